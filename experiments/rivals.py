"""GSPO against its rivals, on tasks that a CPU core trains in half a minute: every arm from three cold
starts, on train_math.train, into which the rival's pieces (rival_parts.py) are passed.

    python experiments/rivals.py factorial      # which part of GSPO helps? the centre
    python experiments/rivals.py NAME           # one of the others below; `all` for all of them
    python experiments/rivals.py ratios         # the ratios of one rollout, and both clip ranges (ratios.py)
    python experiments/rivals.py exact          # no training: exact gradients of an enumerable policy (exact.py)

Runs are kept in results/rivals/runs.jsonl, a line each, and none is run twice: an interrupted experiment goes
on where it stopped, arms that two experiments share are run once, and what comes with this repository is
drawn, not trained. --results FOLDER starts with none: do so after any change of a setting or a piece. An
experiment ends with NAME.md and NAME.png beside runs.jsonl. Cold starts are kept in runs/rivals."""
import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_math  # noqa: E402
from experiments import exact, ratios, successors  # noqa: E402
from experiments import rival_parts as parts  # noqa: E402
from experiments.plot import append, read  # noqa: E402
from experiments.tiny_model import tiny_model, tiny_tokenizer  # noqa: E402
from gspo import grpo_loss, gspo_token_loss  # noqa: E402
from lesson import tiny  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS, COLD = ROOT / "experiments" / "results" / "rivals", ROOT / "runs" / "rivals"
PRECISION = RESULTS.parent / "precision"
COMMON = dict(output_dir=None, device="cpu", instruction="", prompts_per_step=16, group_size=8,
              minibatches=4, rollout_rows=128, micro_batch_tokens=10**6, max_steps=12)
LONG = dict(max_completion_length=210, learning_rate=3e-4)
CHAINS = {30: (3, 5), 60: (7, 11), 120: (16, 22), 200: (28, 36)}  # tokens: steps
TASKS = {"long": (tiny_model, parts.long_cold_start, parts.long_questions, LONG),
         "short": (tiny_model, parts.short_cold_start, parts.short_questions,
                   dict(max_completion_length=40, learning_rate=8e-5)),
         "long_moe": (parts.moe, parts.long_cold_start, parts.long_questions, LONG),
         "unfinished": (tiny_model, partial(parts.long_cold_start, sloppy=False), parts.long_questions, LONG)}
TASKS |= {f"{tokens} tokens": (tiny_model, partial(parts.long_cold_start, least=least, most=most),
                               partial(parts.long_questions, least=least, most=most),
                               dict(max_completion_length=6 * most + 18, learning_rate=3e-4))
          for tokens, (least, most) in CHAINS.items()}
TASKS["unfinished, 60 tokens"] = (tiny_model, partial(parts.long_cold_start, least=7, most=11, sloppy=False),
                                  *TASKS["60 tokens"][2:])
TASKS["two turns"] = (tiny_model, partial(parts.long_cold_start, least=7, most=11, turns=2),
                      partial(parts.two_turn_questions, least=7, most=11), TASKS["60 tokens"][-1])
# The lesson's small world: a cold start is a world, and tiny.py makes it.
TASKS["world"] = (None, None, parts.world_questions,
                  dict(max_completion_length=108, learning_rate=3e-4, group_size=16,
                       minibatches=8, max_steps=16, rollout_rows=256))
STUDENT = {2: 12.71, 3: 4.303, 6: 2.571, 9: 2.306}  # cold starts: the t of a 95% interval
# No interval is narrower. Three cold starts may agree by luck: differences between arms above .75
# have a pooled standard deviation of .053 (135 of them). Six: sampling 256 answers makes .02.
NARROWEST = {3: 0.06, 6: 0.02}
KEPT = ("reward", "response_length", "entropy", "clip_fraction", "log_ratio_std", "grad_norm",
        "seconds", "seconds_rollout")

# ---- the experiments: {panel: {label: arm}} ----------------------------------------------------------------

GSPO, GRPO = "gspo", "grpo"


def arm(algorithm, eps, task="long", epochs=4, **pieces):
    """What sets a run apart, for JSON. eps is the lower clip range; the upper is 4/3 of it, as in GSPO's
    paper."""
    return {"task": task, "algorithm": algorithm, "eps": eps, "epochs": epochs, **pieces}


def factorial(sequence, token, **more):
    """gate x weight. The algorithm says which ratio the metrics describe; .99 is a clip range that nothing leaves."""
    arms, names = {}, {("sequence", "sequence"): " (GSPO)", ("token", "token"): " (GRPO)"}
    for gate, algorithm, eps in (("sequence", GSPO, sequence), ("token", GRPO, token), ("one", GSPO, 0.99)):
        for weight, cap in (("sequence", None), ("one", None), ("token", 2), ("token", None)):
            name = "" if cap else names.get((weight, gate), "")
            shown = {"sequence": "s", "one": "1"}.get(weight, weight) + ", at most 2" * bool(cap)
            label = f"{'no' if gate == 'one' else gate} gate, weight {shown}{name}"
            arms[label] = arm(algorithm, eps, **({} if name else {"loss": [weight, gate, cap]}), **more)
    return arms


def gate(eps, **more):
    """GSPO's gate on one side; and as many responses as it would take out of each minibatch, but others, at random."""
    losses = {"only those of A < 0": ["below"], "only those of A > 0": ["above"],
              "as many of each sign of A, at random": ["both", "sign"], "as many, at random": ["both", "all"]}
    return {"what GSPO drops": arm(GSPO, eps, **more)} | {
        label: arm(GSPO, eps, loss=["sequence", "sequence", None, *how], **more) for label, how in losses.items()} | {
        "nothing": arm(GSPO, 0.99, loss=["sequence", "one", None], **more)}


def both(gspo, grpo, label="", **more):
    return {f"GSPO{label}": arm(GSPO, gspo, **more), f"GRPO{label}": arm(GRPO, grpo, **more)}


def opening(gspo, grpo, **more):
    """The arms that the lab's opening speaks of."""
    weigh = ["one", "one", None]
    return both(gspo, grpo, **more) | {
        "GSPO's gate, weight 1": arm(GSPO, gspo, loss=["one", "sequence", None], **more),
        "GRPO's gate, weight s": arm(GRPO, grpo, loss=["sequence", "token", None], **more),
        "no gate, weight 1": arm(GSPO, 0.99, loss=weigh, **more),
        "no gate, A < 0 dropped": arm(GSPO, 0.99, loss=[*weigh, "both", None, 0], **more)}


def after(name, eps, **more):
    """A successor, with its own two numbers as eps; successors.py says what they are."""
    return arm(GSPO, eps, successor=name, **more)


BEST = dict(gspo=0.003, grpo=0.1)  # of clip_range, on the long task
NO_GATE = arm(GSPO, 0.99, loss=["one", "one", None])
SUCCESSORS = {  # the first: of the paper or, if it tells none, in use
    "sapo": ([1.05, 1.0], [5.25, 5], [21, 20], [84, 80]),
    "cispo": ([1, 5.0], [1, 1.0], [1, 0.28], [1, 0.1]),
    "gmpo": ([0.4, 0.4], [0.2, 0.2], [0.1, 0.1], [0.03, 0.03]),
    "fspo": ([0.03, 0.03], [0.01, 0.01], [0.1, 0.1], [0.3, 0.3]),
    "luspo": ([2e-3, 2.5e-3], [3e-4, 4e-4], [6e-3, 8e-3], [0.02, 0.027]),
    "dapo": ([0.2, 0.28], [0.1, 0.14], [0.05, 0.07], [0.5, 0.7]),
    "dr_grpo": ([0.2, 0.2], [0.1, 0.1], [0.05, 0.05], [0.5, 0.5])}
WORLD = {32: {"epochs": 4}, 4: {"epochs": 1, "minibatches": 4}}  # updates a rollout
EXPERIMENTS = {
    "clip_range": {
        f"{algorithm.upper()}'s clip range, {task} responses" + ", 1 epoch" * (epochs == 1): {
            f"{e:g}": arm(algorithm, e, task, epochs) for e in ranges}
        for algorithm, task, epochs, ranges in ((GSPO, "long", 4, (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2)),
                                                (GRPO, "long", 4, (3e-4, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.5)),
                                                (GSPO, "long", 1, (3e-4, 1e-3, 3e-3, 0.01, 0.03)),
                                                (GRPO, "long", 1, (0.01, 0.03, 0.1, 0.2, 0.5)),
                                                (GSPO, "short", 4, (3e-4, 3e-3, 0.01, 0.03, 0.1)),
                                                (GRPO, "short", 4, (3e-4, 0.03, 0.1, 0.2, 0.5)))},
    "factorial": {
        "long responses, 4 epochs a rollout": factorial(0.003, 0.1),
        "the same, 1 epoch a rollout": factorial(0.003, 0.1, epochs=1),
        "short responses, 4 epochs": factorial(0.03, 0.2, task="short")},
    "gate": {"long responses, 4 epochs: dropped": gate(0.003), "1 epoch": gate(0.003, epochs=1),
             "short, 4 epochs": gate(0.03, task="short")},
    "negatives": {
        "no gate, weight 1" + ended: {
            "GSPO, with its gate": arm(GSPO, 0.003, **more), "A < 0 times 1": {**NO_GATE, **more}} | {
            f"A < 0 times {x:g}": arm(GSPO, 0.99, loss=["one", "one", None, "both", None, x], **more)
            for x in (0.5, 0.36, 0.25, 0)}
        for ended, more in (("", {}), (", 1 epoch", {"epochs": 1}))} | {
        "GRPO's gate and weight" + ended: {"A < 0 times 1": arm(GRPO, 0.1, **more)} | {
            f"A < 0 times {x:g}": arm(GRPO, 0.1, loss=["token", "token", None, "both", None, x], **more)
            for x in (0.25, 0)}
        for ended, more in (("", {}), (", 1 epoch", {"epochs": 1}))},
    "successors_range": {name: {str(eps): after(name, eps) for eps in ranges} for name, ranges in SUCCESSORS.items()},
    "successors": {panel: both(*ranges, **more) | {
        name.upper().replace("DR_", "Dr. "): after(name, eps, **more) for name, (eps, *_) in SUCCESSORS.items()}
        for panel, ranges, more in (("long responses, 4 epochs a rollout", BEST.values(), {}),
                                    ("the same, 1 epoch a rollout", BEST.values(), {"epochs": 1}),
                                    ("short responses, 4 epochs", (0.03, 0.2), {"task": "short"}))},
    "norm": {"long responses, 4 epochs": {
        "GSPO": arm(GSPO, [2e-3, 2.5e-3]),
        "GSPO times 200": after("gspo_200", [2e-3, 2.5e-3]),
        "LUSPO": after("luspo", [2e-3, 2.5e-3]),
        "LUSPO over 200": after("luspo_200", [2e-3, 2.5e-3]),
        "FSPO": after("fspo", [0.03, 0.03]),
        "FSPO over 200": after("fspo_200", [0.03, 0.03])}},
    "lower_rates": {f"learning rate {rate:g}": {
        "GSPO": arm(GSPO, 0.003, **more),
        "no gate": {**NO_GATE, **more},
        "SAPO": after("sapo", [1.05, 1.0], **more),
        "CISPO": after("cispo", [1, 5.0], **more)}
        for rate, more in ((3e-4, {}),
                           (1e-4, {"learning_rate": 1e-4}),
                           (3e-5, {"learning_rate": 3e-5}))},
    "greedy": {"long responses, 4 epochs": {**both(0.01, 0.1), "no gate": NO_GATE}},
    "open": {  # not run yet
        "60 tokens, 100 rollouts": {
            "GSPO without its clip": arm(GSPO, 0.99, "unfinished, 60 tokens", max_steps=100,
                                         learning_rate=3e-4, loss=["sequence", "one", None])},
        "beyond the grid's edge": {
            "SAPO": after("sapo", [336, 320]),
            "CISPO": after("cispo", [1, 0.03]),
            "DAPO": after("dapo", [0.99, 1.4])}},
    "world_range": {  # few updates: an epoch of four, as in the paper; many: four of eight
        f"{algorithm.upper()}, {updates} updates a rollout": {
            f"{eps:g}": arm(algorithm, eps, "world", **more) for eps in ranges}
        for updates, more in WORLD.items()
        for algorithm, ranges in ((GSPO, (3e-4, 3e-3, 0.01, 0.03, 0.1)), (GRPO, (0.05, 0.1, 0.2, 0.4, 0.8)))},
    "world": {"32 updates a rollout": opening(0.03, 0.4, task="world", **WORLD[32])},
    "world_few": {"4 updates a rollout": opening(0.03, 0.4, task="world", **WORLD[4])},
    "noise": {
        f"{epochs} epoch{'s' * (epochs > 1)}, noise on log s in the gate": {
            f"{sd:g}": arm(GSPO, 0.003, epochs=epochs, **({"noise": sd} if sd else {}))
            for sd in (0, 0.003, 0.01, 0.03, 0.1, 0.3, 1)} for epochs in (4, 1)} | {
        "training forward in bf16": both(**BEST, autocast=True) | {"GSPO at 3e-4": arm(GSPO, 3e-4, autocast=True)}},
    "length": {f"{tokens} tokens": {
        f"{algorithm.upper()} {eps:g}": arm(algorithm, eps, f"{tokens} tokens")
        for algorithm, ranges in ((GSPO, (0.001, 0.003, 0.01, 0.03)), (GRPO, (0.03, 0.1, 0.2, 0.5)))
        for eps in ranges} for tokens in CHAINS},
    "unfinished": {"40 rollouts": both(**BEST, task="unfinished", max_steps=40),
                   "60 tokens, 100 rollouts, learning rate 1e-3": both(
                       **BEST, task="unfinished, 60 tokens", max_steps=100, learning_rate=1e-3)},
    "unfinished_60": {"60 tokens, 100 rollouts, lower clip range": {
        f"{algorithm.upper()} {eps:g}": arm(algorithm, eps, "unfinished, 60 tokens", max_steps=100, learning_rate=3e-4)
        for algorithm, eps in ((GSPO, 0.003), (GSPO, 0.01), (GRPO, 0.1), (GRPO, 0.2))}},
    "collapse": {"from a policy that a run without a gate has ruined": both(**BEST, first=NO_GATE),
                 "from GSPO's policy": {"no gate": {**NO_GATE, "first": arm(GSPO, 0.003)}}},
    "corrected": {f"{algorithm.upper()}, {name}": {
        " ".join(["recomputed", *way]): arm(algorithm, BEST[algorithm], engine=[kind, False, *way]) for way in ways}
        for name, kind, ways in (("8-bit weights", "float8", ((), ("tis",))),
                                 ("4 rollouts old", "stale", ((), ("tis",), ("icepop",)))) for algorithm in BEST},
    "cold_starts": {  # the ranges that clip_range chooses on other questions, and the papers'
        "4 epochs, ranges chosen": both(0.01, 0.1), "1 epoch, ranges chosen": both(0.01, 0.2, epochs=1),
        "4 epochs, the papers' ranges": both(3e-4, 0.2), "1 epoch, the papers' ranges": both(3e-4, 0.2, epochs=1),
        "1 epoch, early ranges": both(**BEST, epochs=1)},
    "learning_rate": {"learning rate 1e-4": both(**BEST, learning_rate=1e-4), "3e-4": both(**BEST),
                      "6e-4": both(**BEST, learning_rate=6e-4)},
    "long_run": {"40 rollouts, lower clip range": {
        f"{algorithm.upper()} {eps:g}": arm(algorithm, eps, max_steps=40)
        for algorithm, eps in ((GSPO, 0.003), (GSPO, 3e-4), (GRPO, 0.1), (GRPO, 0.2))}},
    "critic": {"": both(**BEST) | {f"PPO, critic, GAE {lam:g}": arm(GRPO, BEST["grpo"], critic=lam)
                                   for lam in (1, 0.95)}},
    "advantages": {"": both(**BEST) | {
        "reward-weighted regression": arm(GSPO, 0.003, advantages="softmax_advantages"),
        "best of n": arm(GSPO, 0.003, advantages="best_of_n_advantages")}},
    "credit": {name: {"GSPO, one reward": arm(GSPO, eps, **more),
                      "GSPO-token, one reward": arm("gspo_token", eps, **more),
                      "GSPO-token, each step its own": arm("gspo_token", eps, step_rewards="own", **more),
                      "GSPO-token, own + one reward": arm("gspo_token", eps, step_rewards="both", **more)}
               for name, eps, more in (("long responses", 0.003, {}),
                                       ("short responses", 0.03, {"task": "short"}))},
    "turns": {"": {name: arm(algorithm, eps, "two turns", turns=turns) for name, algorithm, eps, turns in (
        ("GSPO, one reward", GSPO, 0.003, "one"), ("GSPO-token, each turn its own", "gspo_token", 0.003, "own"),
        ("GRPO, one reward", GRPO, 0.1, "one"), ("GRPO, each turn its own", GRPO, 0.1, "own"))}},
    "moe": {"": {**both(**BEST, task="long_moe", replay=False),
                 **both(**BEST, label=", Routing Replay", task="long_moe", replay=True)}},
    "engine": {name: both(**BEST) | both(**BEST, label=", recomputed", engine=[kind, False])
               | both(**BEST, label=", the engine's", engine=[kind, True])
               | {"GSPO at 3e-4, the engine's": arm(GSPO, 3e-4, engine=[kind, True])}
               for name, kind in (("bf16 sampler", "bf16"), ("8-bit weights", "float8"),
                                  ("4 rollouts old", "stale"))}}

# ---- one run -----------------------------------------------------------------------------------------------


def settings_of(task):
    return train_math.Settings(**COMMON | TASKS[task][-1])


def cold_folder(task, cold):
    return tiny.world(cold, ROOT / "runs") / "model" if task == "world" else COLD / f"{task}-{cold}"


def cold_start(task, cold):
    """Make the folder of a cold start, unless it is there.

    Returns its accuracy by temperature, 0 being greedy."""
    make, teach, _, _ = TASKS[task]
    folder = cold_folder(task, cold)
    if task == "world":
        return json.loads((folder.parent / "start.json").read_text())
    if not folder.exists():
        torch.set_num_threads(1)
        tokenizer = tiny_tokenizer()
        model = make(tokenizer, cold)
        teach(model, tokenizer, cold)
        right = {t: accuracy(model, tokenizer, task, cold, temperature=t)
                 for t in (1.0, 0.6, 0.3, 0.0)}
        aside = folder.with_name(folder.name + ".partial")
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        (aside / "right.json").write_text(json.dumps(right))
        aside.rename(folder)
    return json.loads((folder / "right.json").read_text())


def accuracy(model, tokenizer, task, cold, name="held out", temperature=1.0):
    """Share of right answers to 256 questions: "held out", which RL never sees, or others, to
    choose ranges by."""
    torch.manual_seed(cold)
    questions = TASKS[task][2](name, 256)
    cfg = settings_of(task)
    cfg.rollout_rows *= cfg.group_size  # 128 questions at once
    if task == "two turns":
        return parts.TwoTurns(tokenizer, False).right(model, questions, temperature, cfg)
    found = train_math.evaluate(model, tokenizer, questions, cfg, parts.task_reward, temperature)
    return found["eval_reward"]


def one_rollout(cold):
    """What ratios.py asks for: the responses of one rollout on the long task, after four optimizer
    steps."""
    cold_start("long", cold)
    cfg = replace(settings_of("long"), seed=100 * cold, epochs=1, eps_low=BEST["gspo"],
                  eps_high=0.004)
    model, tokenizer = train_math.load(COLD / f"long-{cold}", "cpu")
    questions = parts.long_questions(cfg.seed, cfg.prompts_per_step)
    return cfg.seed, ratios.after_one_rollout(model, tokenizer, questions, cfg)


def pieces_of(spec, model, tokenizer):
    """What train() is given in place of its own parts: {name: function}."""
    pieces = {"reward": parts.task_reward}

    def take(part, *names):
        pieces.update((name, getattr(part, name)) for name in names)

    if "loss" in spec:
        pieces["loss"] = parts.surrogate(*spec["loss"])
    if "noise" in spec:
        pieces["loss"] = parts.noisy_gate(spec["noise"])
    if "successor" in spec:
        pieces["loss"] = getattr(successors, spec["successor"] + "_loss")
        if spec["successor"] == "dr_grpo":
            pieces["group_advantages"] = successors.centred_advantages
    if "advantages" in spec:
        pieces["group_advantages"] = getattr(parts, spec["advantages"])
    if "autocast" in spec:
        pieces["response_log_probs"] = parts.bf16_log_probs
    if "critic" in spec:
        critic = parts.Critic(model, spec["critic"])
        take(critic, "loss", "group_advantages", "response_log_probs")
    if "step_rewards" in spec:
        modulo = 10 if spec["task"] == "long" else None
        credit = parts.StepAdvantages(tokenizer, modulo, both=spec["step_rewards"] == "both")
        take(credit, "group_advantages", "build_minibatches")
    if "turns" in spec:
        turns = parts.TwoTurns(tokenizer, own=spec["turns"] == "own")
        take(turns, "rollout", "reward", "group_advantages", "build_minibatches")
    if "replay" in spec:
        take(parts.RoutingReplay(model, spec["replay"]), "response_log_probs")
    if "engine" in spec:
        engine = parts.Engine(*spec["engine"])
        take(engine, "rollout", "build_minibatches", "response_log_probs")
        if engine.correction:
            token_loss = gspo_token_loss if spec["algorithm"] == GSPO else grpo_loss
            pieces["loss"] = partial(engine.loss, token_loss)
    return pieces


def train(spec, model, tokenizer, seed):
    """Train one arm. Returns its rows of metrics, and its RoutingReplay if it has one."""
    names = "algorithm", "epochs", "minibatches", "learning_rate", "max_steps"
    own = {name: spec[name] for name in names if name in spec}
    low = high = spec["eps"]
    if isinstance(low, list):
        low, high = low
    else:
        high = float(f"{low * 4 / 3:.2g}")
    cfg = replace(settings_of(spec["task"]), **own, seed=seed, eps_low=low, eps_high=high)
    questions = TASKS[spec["task"]][2](seed, cfg.prompts_per_step * cfg.max_steps)
    pieces = pieces_of(spec, model, tokenizer)
    rows = train_math.train(cfg, model, tokenizer, questions, **pieces)
    replay = pieces["response_log_probs"].__self__ if "replay" in spec else None
    return rows[1:], replay


def run(spec, cold, seed):
    """Train one arm from a cold start, or after another arm; the line of runs.jsonl."""
    torch.set_num_threads(1)
    start, task = cold_start(spec["task"], cold), spec["task"]
    row = {"arm": spec, "cold": cold, "seed": seed, "start": start["1.0"], "start_at": start}
    model, tokenizer = train_math.load(cold_folder(task, cold), "cpu")
    try:
        if "first" in spec:
            train(spec["first"], model, tokenizer, seed)
            row["start"] = accuracy(model, tokenizer, task, cold)
        steps, replay = train(spec, model, tokenizer, seed + 50 * ("first" in spec))
    except FloatingPointError as problem:  # it diverged: no answer is right
        return {**row, "accuracy": 0.0, "probe": 0.0, "greedy": 0.0, "problem": str(problem)}
    row["accuracy"] = accuracy(model, tokenizer, task, cold)
    row["probe"] = accuracy(model, tokenizer, task, cold, "probe")
    row["greedy"] = accuracy(model, tokenizer, task, cold, temperature=0.0)
    for name in KEPT:
        row[name] = [None if step[name] is None else float(f"{step[name]:.4g}") for step in steps]
    if replay:
        row["experts_changed"] = [float(f"{x:.4g}") for x in replay.changed if x > 0]
    return row


# ---- all runs of an experiment -----------------------------------------------------------------------------


def cold_start_of(arguments):
    return cold_start(*arguments)


def run_of(arguments):
    return run(*arguments)


def run_all(arms, colds, seeds, jobs, path):
    """Cold starts and runs that are not there yet, on `jobs` processes. Returns the rows of these arms, from all
    seeds that every one of them has."""
    wanted = [(spec, cold, 100 * cold + k) for k in range(seeds) for cold in range(colds) for spec in arms]
    there = [(row["arm"], row["cold"], row["seed"]) for row in read(path)]
    missing = [w for i, w in enumerate(wanted) if w not in there + wanted[:i]]
    if missing:
        starts = sorted({(spec["task"], cold) for spec, cold, _ in missing})
        os.environ.update(TQDM_DISABLE="1", OMP_NUM_THREADS="1")  # the workers'
        ignore = signal.SIGINT, signal.SIG_IGN  # a Ctrl-C ends this process, and leaving the pool ends them
        with multiprocessing.get_context("spawn").Pool(jobs, signal.signal, ignore) as pool:
            for _ in tqdm(pool.imap_unordered(cold_start_of, starts), "cold starts", len(starts)):
                pass
            for row in tqdm(pool.imap_unordered(run_of, missing), "runs", len(missing)):
                append(path, row)
            pool.close()
            pool.join()
    rows = [row for row in read(path) if row["arm"] in arms]
    common = set.intersection(*({row["seed"] for row in rows if row["arm"] == arm} for arm in arms))
    return [row for row in rows if row["seed"] in common]


# ---- report ------------------------------------------------------------------------------------------------


def table(name, rows):
    """Markdown: an arm a line, with the mean and every value; some columns only where measured."""
    header = [
        "arm",
        "right, mean",
        "minus the panel's first",
        "each run, cold start by cold start",
        "right, probe",
        "reward over the run",
        "clipped",
        "std of log s",
        "entropy, last",
    ]
    more = {
        "experts changed": "experts_changed",
        "sampled: greedy": "greedy",
        "gradient norm": "grad_norm",
    }
    more = {title: key for title, key in more.items() if any(key in r for r in rows)}
    header += more
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for panel, arms in EXPERIMENTS[name].items():
        first = None
        for label, spec in arms.items():
            own = sorted((r for r in rows if r["arm"] == spec), key=lambda r: r["seed"])
            first = first or own
            if own:
                title = ": ".join(filter(None, (panel, label)))
                cells = [
                    title,
                    *cells_of(own, first),
                    *(last_cell(own, key) for key in more.values()),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    starts = {(r["arm"]["task"], r["cold"]): r["start"] for r in rows if "first" not in r["arm"]}
    if starts:
        lines.append(
            "\nBefore RL, right: "
            + ", ".join(
                f"{task} {cold} {right:.2f}" for (task, cold), right in sorted(starts.items())
            )
        )
    cooler = {(r["arm"]["task"], r["cold"]): r["start_at"] for r in rows if "start_at" in r}
    if cooler:
        lines.append(
            "\nBefore RL, right at temperature 0.6, 0.3 and greedily: "
            + ", ".join(
                f"{task} {cold} " + " ".join(f"{right[t]:.2f}" for t in ("0.6", "0.3", "0.0"))
                for (task, cold), right in sorted(cooler.items())
            )
        )
    return "\n".join(lines) + "\n"


def cells_of(own, first):
    """What the table says of an arm's runs, after its name."""
    each = []
    for cold in sorted({r["cold"] for r in own}):
        each.append(
            " ".join(
                f"{r['accuracy']:.2f}" + f" from {r['start']:.2f}" * ("first" in r["arm"])
                for r in own
                if r["cold"] == cold
            )
        )
    probes = by_cold_start([r for r in own if "probe" in r], "probe").values()

    def average(metric, form, start=0):
        values = [x for r in own for x in r.get(metric, [])[start:] if x is not None]
        return format(statistics.fmean(values), form) if values else "-"

    return [
        f"{mean_accuracy(own):.2f}",
        difference(own, first),
        "; ".join(each),
        f"{statistics.fmean(probes):.3f}" if probes else "-",
        average("reward", ".2f"),
        average("clip_fraction", ".1%"),
        average("log_ratio_std", ".1e"),
        average("entropy", ".3f", -1),
    ]


def last_cell(own, key):
    """A column that not all runs have: greedy answers run by run, gradient norms, or a mean."""
    if key == "greedy":
        measured = [r for r in own if "greedy" in r]
        return ", ".join(f"{r['accuracy']:.2f}: {r['greedy']:.2f}" for r in measured) or "-"
    values = [x for r in own for x in r.get(key, []) if x]
    if not values:
        return "-"
    if key == "grad_norm":
        return f"{min(values):.2g} to {max(values):.2g}, median {statistics.median(values):.2g}"
    return f"{statistics.fmean(values):.1%}"


def by_cold_start(rows, name="accuracy"):
    """{cold start: mean over its runs}"""
    return {cold: statistics.fmean(r[name] for r in rows if r["cold"] == cold) for cold in {r["cold"] for r in rows}}


def mean_accuracy(rows):
    return statistics.fmean(by_cold_start(rows).values())


def difference(rows, others):
    """Mean difference in accuracy over the cold starts that both have, and its 95% interval (Student's t)."""
    own, first = by_cold_start(rows), by_cold_start(others)
    d = [own[cold] - first[cold] for cold in sorted(own.keys() & first.keys())]
    if len(d) not in STUDENT or rows == others:
        return "-"
    half = STUDENT[len(d)] * statistics.stdev(d) / len(d) ** 0.5
    return f"{statistics.fmean(d):+.2f} ± {max(half, NARROWEST.get(len(d), 0)):.2f}"


def draw(name, rows, path):
    """A dot a run, coloured by cold start, a bar at the arm's mean; dotted lines where the cold starts
    were."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    panels = EXPERIMENTS[name]
    labels = [list(arms) for arms in panels.values()]
    alike, colds = all(own == labels[0] for own in labels), max(1, *(r["cold"] for r in rows))
    size = 3 + 4 * len(panels), 1.5 + 0.4 * max(map(len, labels))
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=alike, squeeze=False, layout="constrained")
    for axis, (panel, arms) in zip(axes[0], panels.items()):
        for y, spec in enumerate(arms.values()):
            own = [r for r in rows if r["arm"] == spec]
            for r in own:
                axis.plot(r["accuracy"], y + 0.3 * (r["cold"] / colds - 0.5), "o", color=f"C{r['cold']}", alpha=0.7,
                          markersize=5)
            if own:
                axis.plot([mean_accuracy(own)] * 2, [y - 0.35, y + 0.35], color="black", linewidth=2)
        for cold, start in sorted({(r["cold"], r["start"]) for r in rows if r["arm"] in arms.values()}):
            axis.axvline(start, color=f"C{cold}", linestyle=":", label=f"cold start {cold}")
        axis.set_yticks(range(len(arms)), list(arms))
        axis.set(title=panel or name, xlabel="right answers after RL (bar: mean; dotted: before)", xlim=(0, 1),
                 ylim=(len(arms) - 0.5, -0.5))
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_factorial(rows, path):
    """Three gates, in each the four weights a colour: a dot is a run, a bar the mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(EXPERIMENTS["factorial"].items())[:2]  # on short responses nothing differs
    weights = ["s (GSPO's)", "1", "the token's ratio, at most 2", "the token's ratio (GRPO's)"]
    gates = ["GSPO's gate", "GRPO's gate", "no gate"]
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), sharey=True, layout="constrained")
    for axis, (panel, arms) in zip(axes, panels, strict=True):
        for i, spec in enumerate(arms.values()):
            own = [r for r in rows if r["arm"] == spec]
            y = i // 4 + 0.2 * (i % 4 - 1.5)
            axis.plot(
                [r["accuracy"] for r in own], [y] * len(own), "o", color=f"C{i % 4}", alpha=0.5
            )
            axis.plot([mean_accuracy(own)] * 2, [y - 0.09, y + 0.09], color="black", linewidth=2.5)
        before = [r["start"] for r in rows if r["arm"] in arms.values()]
        axis.axvspan(min(before), max(before), color="gray", alpha=0.3)
        axis.annotate(
            "before RL", (statistics.fmean(before), 1), rotation=90, ha="center", va="center"
        )
        axis.set(title=panel, xlabel="right answers after RL", xlim=(0, 1), ylim=(2.5, -0.5))
        axis.set_yticks(range(3), gates)
        axis.grid(axis="x", alpha=0.3)
    dots = [plt.Line2D([], [], marker="o", linestyle="", color=f"C{i}") for i in range(4)]
    figure.legend(
        dots, [f"weight {weight}" for weight in weights], loc="outside lower center", ncols=4
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def of_the_long_task(rows):
    """Runs of the long task and their entropy at the end, but those that diverged."""
    return [(r, r["entropy"][-1]) for r in rows if r["arm"]["task"] == "long" and r.get("entropy")]


def cooling(rows):
    """A line for the table: Spearman's correlation of right answers and the last entropy."""
    own = of_the_long_task(rows)
    ranks = [
        torch.tensor(values).argsort().argsort().double()
        for values in ([r["accuracy"] for r, _ in own], [entropy for _, entropy in own])
    ]
    correlation = torch.corrcoef(torch.stack(ranks))[0, 1]
    return (
        f"\nOver all {len(own):,} runs of the long task, right answers and the entropy at the end: "
        f"Spearman's correlation {correlation:.2f}\n"
    )


def draw_cooling(rows, path):
    """Right answers over the entropy at the end, a dot a run of the long task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    kinds = {
        "other arms": [],
        "no gate, weight 1": [],
        "GRPO, any range": [],
        "GSPO, any range": [],
    }
    for r, entropy in of_the_long_task(rows):
        kind = "other arms"
        if {**r["arm"], "epochs": 4} == NO_GATE:
            kind = "no gate, weight 1"
        elif r["arm"].keys() == {"task", "algorithm", "eps", "epochs"}:
            kind = f"{r['arm']['algorithm'].upper()}, any range"
        kinds.get(kind, kinds["other arms"]).append((entropy, r["accuracy"]))
    for (kind, points), colour in zip(
        kinds.items(), ("lightgray", "black", "tab:orange", "tab:blue"), strict=True
    ):
        axis.plot(*zip(*points, strict=True), ".", color=colour, label=f"{kind}: {len(points)}")
    axis.set(
        xscale="log",
        ylim=(0, 1),
        xlabel="entropy of the last rollout's samples, nats a token",
        ylabel="right answers after RL",
        title="The long task: a dot is a run",
    )
    axis.legend(loc="lower left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_noise(rows, path):
    """Right answers over the noise in the gate, in units of the policy's own movement: the spread of log s. The marks
    are what rounding adds to log s on SmolLM2, in units of its movement by one step at 1e-6 (precision.py's logs)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for epochs, style in ((4, "o-"), (1, "^--")):
        own = [r for r in rows if r["arm"]["epochs"] == epochs and "autocast" not in r["arm"]]
        points = {}
        for r in own:
            if deviation := r["arm"].get("noise"):
                at = deviation / statistics.fmean(x for x in r["log_ratio_std"] if x), r["accuracy"]
                points.setdefault(deviation, []).append(at)
                axis.plot(*at, style[0], color=f"C{r['cold']}", alpha=0.7)
        means = [tuple(map(statistics.fmean, zip(*points[deviation]))) for deviation in sorted(points)]
        axis.plot(*zip(*means), style[1:], color="black")
        axis.plot([], [], style, color="black", label=f"{epochs} epoch{'s' * (epochs > 1)} a rollout (line: mean)")
        axis.axhline(mean_accuracy([r for r in own if "noise" not in r["arm"]]), color="black", linestyle=style[1:],
                     linewidth=0.6)
    logs = {path.stem: json.loads(path.read_text())["128"]["off the grid"] for path in PRECISION.glob("*.json")}
    exact = logs.pop("float32")
    for form, rounded in logs.items():
        x = statistics.stdev(a - b for a, b in zip(rounded, exact)) / statistics.stdev(exact)
        axis.axvline(x, color="grey", linestyle=":")
        axis.text(x, 0.02, form.replace("_", " "), rotation=90, ha="right")
    axis.set(xscale="log", ylim=(0, 1), ylabel="right answers after RL (thin: without noise)",
             title="Noise in GSPO's gate (a point is a run, its colour the cold start)",
             xlabel="noise on log s / spread of log s by training (dotted: rounding on SmolLM2, learning rate 1e-6)")
    axis.legend(loc="lower left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=["exact", "ratios", *EXPERIMENTS, "all"])
    parser.add_argument("--colds", type=int, default=3, help="cold starts")
    parser.add_argument("--seeds", type=int, default=1, help="seeds, from each cold start")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2),
                        help="processes, a core each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder; runs that it holds are not run again")
    parser.add_argument("--model", help="for ratios: hub id or folder of real weights")
    parser.add_argument("--gsm8k", help="for ratios: the folder with train.jsonl")
    args = parser.parse_args()
    if min(args.colds, args.seeds, args.jobs) < 1:
        parser.error("--colds, --seeds and --jobs must be at least 1")
    if (args.model is None) != (args.gsm8k is None):
        parser.error("--model and --gsm8k go together")
    for folder in (args.results, COLD):
        folder.mkdir(parents=True, exist_ok=True)
    if args.name in ("exact", "all"):
        exact.main(args.results)
    if args.name in ("ratios", "all"):
        torch.set_num_threads(1)
        rollouts = tqdm(map(one_rollout, range(args.colds)), "rollouts", args.colds)
        ratios.main(args.results, rollouts, args.model, args.gsm8k)
    names = {"all": EXPERIMENTS, "exact": [], "ratios": []}.get(args.name, [args.name])
    for name in names:
        arms = [spec for panel in EXPERIMENTS[name].values() for spec in panel.values()]
        rows = run_all(arms, args.colds, args.seeds, args.jobs, args.results / "runs.jsonl")
        (args.results / f"{name}.md").write_text(table(name, rows), encoding="utf-8")
        draw(name, rows, args.results / f"{name}.png")
        if name == "factorial":
            draw_factorial(rows, args.results / "factorial.png")
        if name == "greedy":
            every = read(args.results / "runs.jsonl")
            with (args.results / "greedy.md").open("a", encoding="utf-8") as file:
                file.write(cooling(every))
            draw_cooling(every, args.results / "cooling.png")
        if name == "noise":
            draw_noise(rows, args.results / "noise_over_movement.png")
        print(table(name, rows))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped: the same command goes on, and only the runs that were on are lost")
