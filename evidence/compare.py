"""Runs experiments that compare GSPO with other algorithms, on tasks that one CPU core trains in a
minute.

    python -m evidence.compare NAME     an experiment; --help lists them
    python -m evidence.compare tuned    GSPO, GRPO and no clip, each at several learning rates

Every variant is trained by train_math.train from three starting models, which were trained before
RL ("cold starts" in the code and the tables). A variant is an entry of train_math.ALGORITHMS.

Each run adds one line to the packed log. A run that is in this file is not repeated. If the command
is interrupted, run it again to continue. A variant that belongs to two experiments is run once.
After a change of the code, use --log FILE, because the old runs would otherwise be reused. The
starting models are kept in runs/comparisons, and those of the small world in runs.
"""
import argparse
import itertools
import json
import math
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from filelock import FileLock
from tqdm import tqdm

import train_math
from evidence import tasks
from evidence.tables import GRID, LOGS, MODELS, QUESTIONS, comparison, learning_rates, read_runs
from gspo import _log_ratio, _loss, _token_mean, sequence_ratio
from guides import losses
from lesson import tiny
from tools.logs import append, make_writable
from tools.warm_up import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
COLD = ROOT / "runs" / "comparisons"
KEPT = ("reward", "response_length", "entropy", "clip_fraction", "log_ratio_std", "grad_norm",
        "seconds")
TUNED = "tuned"
BUDGET = 210  # tokens, the divisor of Dr. GRPO
RANGES = {  # of "tuned": the lower ones, chosen on other starting models at a rate of 3e-4
    "long": {"GSPO": 0.01, "GRPO": 0.1, "no clip": tasks.NO_LOWER_BOUND},
    "world": {"GSPO": 0.03, "GRPO": 0.4, "no clip": tasks.NO_LOWER_BOUND}}


# ---- starting models -----------------------------------------------------------------------------


def cold_folder(task, cold):
    if task == "world":
        return tiny.world(cold, ROOT / "runs") / "model"
    return COLD / f"{task}-{cold}"


def cold_start(task, cold):
    """Makes the starting model of this task and seed, unless its folder exists.

    Returns {temperature: accuracy of this model}, where "0.0" is greedy decoding."""
    folder = cold_folder(task, cold)
    if task == "world":
        return json.loads((folder.parent / "start.json").read_text())
    COLD.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # another process waits until this one has made it
        if not folder.exists():
            tokenizer = tiny_tokenizer()
            model = tiny_model(tokenizer, cold)
            tasks.TASKS[task].teach(model, tokenizer, cold)
            right = {t: accuracy(model, tokenizer, task, cold, "held out", t)
                     for t in (1.0, 0.6, 0.3, 0.0)}
            aside = folder.with_name(folder.name + ".partial")
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            (aside / "right.json").write_text(json.dumps(right))
            aside.rename(folder)
    return json.loads((folder / "right.json").read_text())


def accuracy(model, tokenizer, task, cold, name, temperature):
    """The accuracy on 256 questions (small world: 175). name: "held out", which are not used in RL,
    or anything else, such as "probe", on which settings are selected."""
    torch.manual_seed(cold)
    questions = tasks.TASKS[task].questions(name, 256)
    found = train_math.evaluate(model, tokenizer, questions, tasks.settings_of(task), temperature,
                                reward=tasks.task_reward)
    return found["eval_reward"]


# ---- one run -------------------------------------------------------------------------------------


def surrogate(weight, gate, cap=None, negatives=1.0):
    """A loss that separates the two roles of the importance ratio: the weight, which multiplies a
    token's gradient, and the gate, which decides whether the token is clipped.

    The gradient of token t of response i is multiplied by w_{i,t} A_i / |y_i|, or by 0 if the ratio
    of the gate is outside the clip range. weight and gate are "token", "sequence" or "one" (a ratio
    that is always 1). (token, token) has GRPO's gradient (Eq. 12), and (sequence, sequence) has
    GSPO's (Eq. 10). The values of the losses differ from theirs.
    cap: the largest weight. negatives: a factor for every A < 0."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        with torch.no_grad():
            token = _log_ratio(log_probs, old_log_probs, mask).exp()
            sequence = sequence_ratio(log_probs, old_log_probs, mask)[:, None].expand_as(token)
            ratios = {"token": token, "sequence": sequence, "one": torch.ones_like(token)}
            a = advantages[:, None]
            above = (a > 0) & (ratios[gate] > 1 + eps_high)
            below = (a < 0) & (ratios[gate] < 1 - eps_low)
            pushed = a.where(a > 0, negatives * a)
            pushed = ratios[weight].clamp(max=cap or torch.inf) * pushed
            coefficient = pushed.masked_fill(above | below, 0)
        return _loss(_token_mean(coefficient * log_probs, mask), denominator)
    return loss


def fspo_loss(log_probs, old_log_probs, advantages, mask, low, high, denominator=None):
    """FSPO (2509.09177): the clipped objective with the ratio of the whole response, without GSPO's
    length normalisation. The clip range is e^(-low sqrt|y|) to e^(high sqrt|y|), as in the abstract
    of version 3. The abstract of version 1 also has a drift term, which is not in here."""
    root = mask.sum(dim=1).sqrt()
    ratio = _log_ratio(log_probs, old_log_probs, mask).sum(dim=1).clamp(max=20).exp()
    clipped = ratio.clamp((-low * root).exp(), (high * root).exp())
    return _loss(torch.minimum(ratio * advantages, clipped * advantages), denominator)


def algorithm_of(spec):
    """The entry of train_math.ALGORITHMS for this variant. Its ratio and its range are those of the
    variant's own clip, so that clip_fraction is, too."""
    algorithm = train_math.ALGORITHMS[spec["algorithm"]]
    low, high = clip_range(spec)
    if "loss" in spec:
        weight, gate, cap, *more = spec["loss"]  # more: parts of finished experiments, and a factor
        loss = surrogate(weight, gate, cap, *more[2:])
        algorithm = algorithm._replace(loss=loss, ratio="sequence" if gate == "one" else gate)
    if "successor" in spec:
        name = spec["successor"]
        row = train_math.ALGORITHMS.get(name)
        own_loss = fspo_loss if name == "fspo" else row.loss
        numbers = low, high  # which gspo.py might not accept as a clip range
        if name == "gmpo":
            numbers = low, high = 1 - math.exp(-low), math.exp(high) - 1
        if name in ("sapo", "cispo", "fspo"):  # clip nothing, or in a range of each length
            low, high = 1.0, 1e9

        def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator):
            lengths = mask.sum(dim=1)
            mean = lengths.float().mean()
            divisors = {"cispo": mean, "dapo": mean, "dr_grpo": BUDGET, "luspo": 1}
            if name in divisors:
                advantages = advantages * lengths / divisors[name]
            with mock.patch.multiple(losses, TAU_LOW=numbers[0], TAU_HIGH=numbers[1]):
                return own_loss(log_probs, old_log_probs, advantages, mask, *numbers, denominator)

        algorithm = algorithm._replace(loss=loss, ratio=row.ratio if row else "token")
        if name == "dr_grpo":
            algorithm = algorithm._replace(advantages=losses.centred_advantages)
    return algorithm._replace(eps_low=low, eps_high=high)


def clip_range(spec):
    """(lower, upper): the two numbers of the variant's loss."""
    eps = spec["eps"]
    low, high = eps if isinstance(eps, list) else (eps, float(f"{eps * 4 / 3:.2g}"))
    if low == tasks.NO_LOWER_BOUND:
        low = 1.0
        high = high if isinstance(eps, list) else 1e9
    return low, high


def train(spec, cold, seed, asked):
    """Trains one variant from a starting model.

    asked: pairs (name of the questions, temperature). Returns ({pair: accuracy}, {metric: its value
    in each rollout}). If the run diverges, all accuracies are 0, and there is only a "problem"."""
    torch.set_num_threads(1)
    task = spec["task"]
    model, tokenizer = train_math.load(cold_folder(task, cold), "cpu")
    names = "epochs", "minibatches", "learning_rate", "max_steps"
    own = {name: spec[name] for name in names if name in spec}
    try:
        with mock.patch.dict(train_math.ALGORITHMS, {"variant": algorithm_of(spec)}):
            cfg = replace(tasks.settings_of(task), **own, seed=seed, algorithm="variant")
            questions = tasks.TASKS[task].questions(seed, cfg.prompts_per_step * cfg.max_steps)
            rows = train_math.train(cfg, model, tokenizer, questions, reward=tasks.task_reward)
    except FloatingPointError as problem:
        return dict.fromkeys(asked, 0.0), {"problem": str(problem)}
    metrics = {name: [four_digits(row[name]) for row in rows[1:]] for name in KEPT}
    return {pair: accuracy(model, tokenizer, task, cold, *pair) for pair in asked}, metrics


def four_digits(x):
    return None if x is None else float(f"{x:.4g}")


def run(job):
    """The log row of a variant, a starting model and a seed."""
    spec, cold = job["variant"], job["cold"]
    start = cold_start(spec["task"], cold)
    asked = {"accuracy": ("held out", 1.0), "probe": ("probe", 1.0), "greedy": ("held out", 0.0)}
    found, metrics = train(spec, cold, job["seed"], asked.values())
    if "fspo" in spec.get("successor", ""):  # its clip range depends on the length
        metrics.pop("clip_fraction", None)
    accuracies = {name: found[pair] for name, pair in asked.items()}
    return {**job, "start": start["1.0"], "start_at": start, **accuracies, **metrics}


def run_tuned(job):
    """The log row of a task, a starting model, an algorithm and a learning rate."""
    task, cold, name, rate = job.values()
    row = {**job, "before": cold_start(task, cold)}
    algorithm = tasks.GRPO if name == "GRPO" else tasks.GSPO
    spec = tasks.variant(algorithm, RANGES[task][name], task=task, learning_rate=rate)
    asked = [(questions, float(t)) for questions in QUESTIONS for t in QUESTIONS[questions]]
    found, metrics = train(spec, cold, 100 * cold, asked)
    for questions, temperatures in QUESTIONS.items():
        row[questions] = {t: found[questions, float(t)] for t in temperatures}
    return row | metrics


# ---- all runs of an experiment -------------------------------------------------------------------

# A job is the first fields of its row in the log, which no other row has.


def jobs_of(name, colds, seeds):
    """The jobs of an experiment, for run()."""
    return [{"variant": spec, "cold": cold, "seed": 100 * cold + k} for k, cold, spec
            in itertools.product(range(seeds), range(colds), tasks.variants_of(name))]


def tuned_jobs(colds):
    """The jobs of "tuned", for run_tuned()."""
    return [{"task": task, "start": cold, "algorithm": name, "learning_rate": rate}
            for task, models in MODELS.items() for cold in models[:colds] for name, rate in GRID]


def missing(jobs, path):
    """The jobs that are not in the log yet, each one once."""
    there = [{name: row[name] for name in jobs[0]} for row in read_runs(path)]
    return [job for i, job in enumerate(jobs) if job not in there + jobs[:i]]


def make(function, wanted, jobs, path):
    """Makes these runs in `jobs` processes, and appends their rows to the log."""
    os.environ.update(TQDM_DISABLE="1", OMP_NUM_THREADS="1")  # of the worker processes
    # A Ctrl-C ends this process, and leaving the pool ends the workers.
    ignore = signal.SIGINT, signal.SIG_IGN
    with multiprocessing.get_context("spawn").Pool(jobs, signal.signal, ignore) as pool:
        for row in tqdm(pool.imap_unordered(function, wanted), "runs", len(wanted)):
            append(path, {"log": "runs", **row})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = [name for name in tasks.EXPERIMENTS if name not in tasks.RETIRED]
    parser.add_argument("name", choices=[*names, TUNED], help="the experiment")
    parser.add_argument("--colds", type=int, default=3, help="number of starting models")
    parser.add_argument("--seeds", type=int, default=1,
                        help=f"number of runs per starting model ({TUNED}: always 1)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2),
                        help="number of processes, which use one core each")
    parser.add_argument("--log", type=Path,
                        help="file of the runs; those that it has are not repeated")
    args = parser.parse_args()
    if min(args.colds, args.seeds, args.jobs) < 1:
        parser.error("--colds, --seeds and --jobs must be at least 1")
    is_tuned = args.name == TUNED
    path = args.log or (LOGS / "learning_rates.jsonl.gz" if is_tuned else tasks.COMPARISONS)
    make_writable(path)
    if is_tuned:
        make(run_tuned, missing(tuned_jobs(args.colds), path), args.jobs, path)
        print(learning_rates(read_runs(path)))
    else:
        jobs = jobs_of(args.name, args.colds, args.seeds)
        make(run, missing(jobs, path), args.jobs, path)
        print(comparison(args.name, read_runs(path)))


if __name__ == "__main__":
    main()
