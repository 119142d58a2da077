"""Runs experiments that compare GSPO with other algorithms, on tasks that one CPU core trains in a
minute.

    python -m evidence.compare NAME     an experiment of settings.py; `all` for all

Every variant is trained by train_math.train from three starting models, which were trained before
RL ("cold starts" in the code and the tables). A variant is an entry of train_math.ALGORITHMS. The
other parts of train_math.py that it replaces (parts.py) are passed to that function.

Each run adds one line to logs/comparisons.jsonl.gz. A run that is in this file is not repeated. If
the command is interrupted, run it again to continue. A variant that belongs to two experiments is
run once. After a change of the settings or of a part, use --log FILE, because the old runs would
otherwise be reused. The starting models are kept in runs/comparisons, and those of the small world
in runs.
"""
import argparse
import itertools
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from tqdm import tqdm

import train_math
from evidence import parts, successors
from evidence.settings import EXPERIMENTS, NO_LOWER_BOUND, RETIRED, TASKS, settings_of
from evidence.tables import COMPARISONS, comparable, comparison, read_runs, variants_of
from lesson import tiny
from tools.logs import append, make_writable
from tools.warm_up import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
COLD = ROOT / "runs" / "comparisons"
KEPT = ("reward", "response_length", "entropy", "clip_fraction", "log_ratio_std", "grad_norm")


# ---- one run -------------------------------------------------------------------------------------


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
    if not folder.exists():
        torch.set_num_threads(1)
        tokenizer = tiny_tokenizer()
        model = tiny_model(tokenizer, cold)
        TASKS[task].teach(model, tokenizer, cold)
        right = {t: accuracy(model, tokenizer, task, cold, temperature=t)
                 for t in (1.0, 0.6, 0.3, 0.0)}
        aside = folder.with_name(folder.name + ".partial")
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        (aside / "right.json").write_text(json.dumps(right))
        aside.rename(folder)
    return json.loads((folder / "right.json").read_text())


def accuracy(model, tokenizer, task, cold, name="held out", temperature=1.0):
    """The accuracy on 256 questions (small world: 175). name: "held out", which are not used in RL,
    or "probe", on which clip ranges are selected."""
    torch.manual_seed(cold)
    questions = TASKS[task].questions(name, 256)
    cfg = settings_of(task)
    found = train_math.evaluate(
        model, tokenizer, questions, cfg, temperature, reward=parts.task_reward)
    return found["eval_reward"]


def algorithm_of(spec):
    """The entry of train_math.ALGORITHMS for this variant. Its ratio and its range are those of the
    variant's own clip, so that clip_fraction is, too."""
    algorithm = train_math.ALGORITHMS[spec["algorithm"]]
    low, high = clip_range(spec)
    if "loss" in spec:
        weight, gate, cap, *more = spec["loss"]  # more: parts of finished experiments, and a factor
        loss = parts.surrogate(weight, gate, cap, *more[2:])
        algorithm = algorithm._replace(loss=loss, ratio="sequence" if gate == "one" else gate)
    if "successor" in spec:
        name = spec["successor"]
        loss = fixed_range(getattr(successors, name + "_loss"), low, high)
        ratio, low, high = successors.clip_of(name, low, high)
        algorithm = algorithm._replace(loss=loss, ratio=ratio)
        if name == "dr_grpo":
            algorithm = algorithm._replace(advantages=successors.centred_advantages)
    return algorithm._replace(eps_low=low, eps_high=high)


def fixed_range(loss, low, high):
    """The loss with its own two numbers, which gspo.py might not accept as a clip range."""
    def with_own_numbers(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, *more):
        return loss(log_probs, old_log_probs, advantages, mask, low, high, *more)

    return with_own_numbers


def clip_range(spec):
    """(lower, upper): the two numbers of the variant's loss."""
    eps = spec["eps"]
    low, high = eps if isinstance(eps, list) else (eps, float(f"{eps * 4 / 3:.2g}"))
    if low == NO_LOWER_BOUND:
        low = 1.0
        high = high if isinstance(eps, list) else 1e9
    return low, high


def train(spec, model, tokenizer, seed):
    """Trains one variant. Returns its rows of metrics."""
    names = "epochs", "minibatches", "learning_rate", "max_steps"
    own = {name: spec[name] for name in names if name in spec}
    with mock.patch.dict(train_math.ALGORITHMS, {"variant": algorithm_of(spec)}):
        cfg = replace(settings_of(spec["task"]), **own, seed=seed, algorithm="variant")
        questions = TASKS[spec["task"]].questions(seed, cfg.prompts_per_step * cfg.max_steps)
        rows = train_math.train(cfg, model, tokenizer, questions, reward=parts.task_reward)
    return rows[1:]


def run(spec, cold, seed):
    """Trains one variant from a starting model. Returns its log row."""
    torch.set_num_threads(1)
    task = spec["task"]
    start = cold_start(task, cold)
    row = {"variant": spec, "cold": cold, "seed": seed, "start": start["1.0"], "start_at": start}
    model, tokenizer = train_math.load(cold_folder(task, cold), "cpu")
    try:
        steps = train(spec, model, tokenizer, seed)
    except FloatingPointError as problem:  # it diverged, which counts as an accuracy of 0
        return {**row, "accuracy": 0.0, "probe": 0.0, "greedy": 0.0, "problem": str(problem)}
    row["accuracy"] = accuracy(model, tokenizer, task, cold)
    row["probe"] = accuracy(model, tokenizer, task, cold, "probe")
    row["greedy"] = accuracy(model, tokenizer, task, cold, temperature=0.0)
    for name in KEPT:
        row[name] = [four_digits(step[name]) for step in steps]
    if "fspo" in spec.get("successor", ""):  # its clip range depends on the length
        del row["clip_fraction"]
    return row


def four_digits(x):
    return None if x is None else float(f"{x:.4g}")


# ---- all runs of an experiment -------------------------------------------------------------------


def missing(variants, colds, seeds, path):
    """The arguments of run() for the runs that are not in the logs yet."""
    there = [(row["variant"], row["cold"], row["seed"]) for row in read_runs(path)]
    wanted = []
    for k, cold, spec in itertools.product(range(seeds), range(colds), variants):
        job = spec, cold, 100 * cold + k
        if job not in there + wanted:
            wanted.append(job)
    return wanted


def call(job):
    function, *arguments = job
    return function(*arguments)


def run_all(variants, colds, seeds, jobs, path):
    """Makes the missing starting models and runs, in `jobs` processes. Returns the rows of these
    variants, from those seeds that every variant has."""
    wanted = missing(variants, colds, seeds, path)
    if wanted:
        starts = sorted({(spec["task"], cold) for spec, cold, _ in wanted})
        starts = [(cold_start, *start) for start in starts]
        runs = [(run, *job) for job in wanted]
        os.environ.update(TQDM_DISABLE="1", OMP_NUM_THREADS="1")  # of the worker processes
        # A Ctrl-C ends this process, and leaving the pool ends the workers.
        ignore = signal.SIGINT, signal.SIG_IGN
        with multiprocessing.get_context("spawn").Pool(jobs, signal.signal, ignore) as pool:
            for _ in tqdm(pool.imap_unordered(call, starts), "starting models", len(starts)):
                pass
            for row in tqdm(pool.imap_unordered(call, runs), "runs", len(runs)):
                append(path, {"log": "runs", **row})
            pool.close()
            pool.join()
    return comparable(variants, read_runs(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = [name for name in EXPERIMENTS if name not in RETIRED]
    parser.add_argument("name", choices=[*names, "all"], help="the experiment")
    parser.add_argument("--colds", type=int, default=3, help="number of starting models")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs per starting model")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2),
                        help="number of processes, which use one core each")
    parser.add_argument("--log", type=Path, default=COMPARISONS,
                        help="file of the runs; those that it has are not repeated")
    args = parser.parse_args()
    if min(args.colds, args.seeds, args.jobs) < 1:
        parser.error("--colds, --seeds and --jobs must be at least 1")
    make_writable(args.log)
    COLD.mkdir(parents=True, exist_ok=True)
    for name in names if args.name == "all" else [args.name]:
        run_all(variants_of(name), args.colds, args.seeds, args.jobs, args.log)
        print(comparison(name, read_runs(args.log)))


if __name__ == "__main__":
    main()
