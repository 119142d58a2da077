"""GSPO against its rivals, on tasks that a CPU core trains in a minute: every arm from three
cold starts, on train_math.train, into which the rival's pieces (rival_parts.py) are passed.

    python -m experiments.rivals factorial   # which part of GSPO helps? the centre
    python -m experiments.rivals NAME        # one of the others below; `all` for all of them
    python -m experiments.rivals ratios      # the ratios of one rollout, and both clip ranges
    python -m experiments.rivals exact       # no training: gradients of an enumerable policy

Runs are kept in results/rivals/runs.jsonl, a line each, and none is run twice: an interrupted
experiment goes on where it stopped, arms that two experiments share are run once, and what comes
with this repository is drawn, not trained. --results FOLDER starts with none: do so after any
change of a setting or a piece. An experiment ends with NAME.md and NAME.png beside runs.jsonl. Cold
starts are kept in runs/rivals, the lesson's worlds in runs. ratios.py and exact.py have two of the
questions to themselves."""
import argparse
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import sys
from collections import namedtuple
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

import train_math
from common.logs import append, read
from common.tiny_model import tiny_model, tiny_tokenizer
from experiments import exact, ratios, successors
from experiments import rival_parts as parts
from gspo import grpo_loss, gspo_token_loss
from lesson import tiny

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results" / "rivals"
COLD = ROOT / "runs" / "rivals"
PRECISION = RESULTS.parent / "precision"
STUDENT = {2: 12.71, 3: 4.303, 6: 2.571, 9: 2.306}  # cold starts: the t of a 95% interval
# No interval is narrower. Three cold starts may agree by luck: differences between arms above .75
# have a pooled standard deviation of .053 (135 of them). Six: sampling 256 answers makes .02.
NARROWEST = {3: 0.06, 6: 0.02}
KEPT = ("reward", "response_length", "entropy", "clip_fraction", "log_ratio_std", "grad_norm",
        "seconds", "seconds_rollout")

# ---- the tasks -----------------------------------------------------------------------------------

COMMON = dict(output_dir=None, device="cpu", instruction="", prompts_per_step=16, group_size=8,
              minibatches=4, rollout_rows=128, micro_batch_tokens=10**6, max_steps=12)
CHAINS = {30: (3, 5), 60: (7, 11), 120: (16, 22), 200: (28, 36)}  # tokens: steps

# make(tokenizer, seed) is a model, teach(model, tokenizer, seed) its cold start;
# questions(seed, n), also of "held out" and "probe"; settings beside COMMON.
Task = namedtuple("Task", "make teach questions settings")


def chains(least=20, most=32, make=tiny_model, questions=parts.long_questions, **taught):
    """Chains of so many sums, 6 tokens each."""
    return Task(
        make,
        partial(parts.long_cold_start, least=least, most=most, **taught),
        partial(questions, least=least, most=most),
        dict(max_completion_length=6 * most + 18, learning_rate=3e-4),
    )


TASKS = {
    "long": chains(),
    "long_moe": chains(make=parts.moe),
    "unfinished": chains(sloppy=False),
    "unfinished, 60 tokens": chains(*CHAINS[60], sloppy=False),
    "two turns": chains(*CHAINS[60], questions=parts.two_turn_questions, turns=2),
    "short": Task(
        tiny_model,
        parts.short_cold_start,
        parts.short_questions,
        dict(max_completion_length=40, learning_rate=8e-5),
    ),
    # The lesson's small world: a cold start is a world, and tiny.py makes it.
    "world": Task(
        None,
        None,
        parts.world_questions,
        dict(max_completion_length=108, learning_rate=3e-4, group_size=16, minibatches=8,
             max_steps=16, rollout_rows=256),
    ),
}
TASKS |= {f"{tokens} tokens": chains(*steps) for tokens, steps in CHAINS.items()}

# ---- the experiments: {panel: {label: arm}} ------------------------------------------------------

GSPO = "gspo"
GRPO = "grpo"
EARLY = {GSPO: 0.003, GRPO: 0.1}  # ranges picked on the questions that are reported


def arm(algorithm, eps, task="long", epochs=4, **pieces):
    """What sets a run apart, for JSON. eps is the lower clip range; the upper is 4/3 of it, as in
    GSPO's paper."""
    return {"task": task, "algorithm": algorithm, "eps": eps, "epochs": epochs, **pieces}


def no_gate(weight, *how, **more):
    """.99 is a clip range that nothing leaves."""
    return arm(GSPO, 0.99, loss=[weight, "one", None, *how], **more)


NO_GATE = no_gate("one")


def both(gspo, grpo, label="", **more):
    return {f"GSPO{label}": arm(GSPO, gspo, **more), f"GRPO{label}": arm(GRPO, grpo, **more)}


def ranges(algorithm, values, label="", **more):
    """An arm for each clip range."""
    return {f"{label}{eps:g}": arm(algorithm, eps, **more) for eps in values}


def ranges_of_both(gspo, grpo, **more):
    return ranges(GSPO, gspo, "GSPO ", **more) | ranges(GRPO, grpo, "GRPO ", **more)


def factorial(sequence, token, **more):
    """gate x weight. The algorithm says which ratio the metrics describe."""
    gates = {"sequence": (GSPO, sequence), "token": (GRPO, token), "one": (GSPO, 0.99)}
    weights = {
        "s": ("sequence", None),
        "1": ("one", None),
        "token, at most 2": ("token", 2),
        "token": ("token", None),
    }
    arms = {}
    for gate, (algorithm, eps) in gates.items():
        for shown, (weight, cap) in weights.items():
            label = f"{gate} gate, weight {shown}".replace("one", "no")
            if weight == gate != "one" and not cap:
                arms[f"{label} ({algorithm.upper()})"] = arm(algorithm, eps, **more)
            else:
                arms[label] = arm(algorithm, eps, loss=[weight, gate, cap], **more)
    return arms


def gate(eps, **more):
    """GSPO's gate on one side; and as many responses as it would take out of each minibatch, but
    others, at random."""
    def dropped(*how):
        return arm(GSPO, eps, loss=["sequence", "sequence", None, *how], **more)

    return {
        "what GSPO drops": arm(GSPO, eps, **more),
        "only those of A < 0": dropped("below"),
        "only those of A > 0": dropped("above"),
        "as many of each sign of A, at random": dropped("both", "sign"),
        "as many, at random": dropped("both", "all"),
        "nothing": no_gate("sequence", **more),
    }


def pushed_down(spec, ratio, *shares):
    """An arm whose weight and gate are this ratio, and the same where an A < 0 counts less."""
    arms = {"A < 0 times 1": spec}
    for x in shares:
        arms[f"A < 0 times {x:g}"] = spec | {"loss": [ratio, ratio, None, "both", None, x]}
    return arms


def without_gate_pushed_down(**more):
    return {"GSPO, with its gate": arm(GSPO, 0.003, **more)} | pushed_down(
        no_gate("one", **more), "one", 0.5, 0.36, 0.25, 0)


def opening(gspo, grpo, **more):
    """The arms that the lab's opening speaks of."""
    return both(gspo, grpo, **more) | {
        "GSPO's gate, weight 1": arm(GSPO, gspo, loss=["one", "sequence", None], **more),
        "GRPO's gate, weight s": arm(GRPO, grpo, loss=["sequence", "token", None], **more),
        "no gate, weight 1": no_gate("one", **more),
        "no gate, A < 0 dropped": no_gate("one", "both", None, 0, **more),
    }


def after(name, eps, **more):
    """A successor, with its own two numbers as eps; successors.py says what they are."""
    return arm(GSPO, eps, successor=name, **more)


SUCCESSORS = {  # the first: of the paper or, if it tells none, in use
    "sapo": ([1.05, 1.0], [5.25, 5], [21, 20], [84, 80]),
    "cispo": ([1, 5.0], [1, 1.0], [1, 0.28], [1, 0.1]),
    "gmpo": ([0.4, 0.4], [0.2, 0.2], [0.1, 0.1], [0.03, 0.03]),
    "fspo": ([0.03, 0.03], [0.01, 0.01], [0.1, 0.1], [0.3, 0.3]),
    "luspo": ([2e-3, 2.5e-3], [3e-4, 4e-4], [6e-3, 8e-3], [0.02, 0.027]),
    "dapo": ([0.2, 0.28], [0.1, 0.14], [0.05, 0.07], [0.5, 0.7]),
    "dr_grpo": ([0.2, 0.2], [0.1, 0.1], [0.05, 0.05], [0.5, 0.5]),
}


def all_after(gspo, grpo, **more):
    arms = both(gspo, grpo, **more)
    for name, (eps, *_) in SUCCESSORS.items():
        arms[name.upper().replace("DR_", "Dr. ")] = after(name, eps, **more)
    return arms


def gate_or_later(**more):
    return {
        "GSPO": arm(GSPO, 0.003, **more),
        "no gate": no_gate("one", **more),
        "SAPO": after("sapo", [1.05, 1.0], **more),
        "CISPO": after("cispo", [1, 5.0], **more),
    }


def noisy(**more):
    arms = {"0": arm(GSPO, 0.003, **more)}
    for deviation in (0.003, 0.01, 0.03, 0.1, 0.3, 1):
        arms[f"{deviation:g}"] = arm(GSPO, 0.003, noise=deviation, **more)
    return arms


def credit(eps, **more):
    return {
        "GSPO, one reward": arm(GSPO, eps, **more),
        "GSPO-token, one reward": arm("gspo_token", eps, **more),
        "GSPO-token, each step its own": arm("gspo_token", eps, step_rewards="own", **more),
        "GSPO-token, own + one reward": arm("gspo_token", eps, step_rewards="both", **more),
    }


def engine(kind):
    """Old log-probs recomputed by the training forward, or those that the engine reports."""
    return {
        **both(**EARLY),
        **both(**EARLY, label=", recomputed", engine=[kind, False]),
        **both(**EARLY, label=", the engine's", engine=[kind, True]),
        "GSPO at 3e-4, the engine's": arm(GSPO, 3e-4, engine=[kind, True]),
    }


def corrected(algorithm, kind, *ways):
    arms = {"recomputed": arm(algorithm, EARLY[algorithm], engine=[kind, False])}
    for way in ways:
        arms[f"recomputed {way}"] = arm(algorithm, EARLY[algorithm], engine=[kind, False, way])
    return arms


WORLD = {32: {"epochs": 4}, 4: {"epochs": 1, "minibatches": 4}}  # updates a rollout
EXPERIMENTS = {
    "clip_range": {
        "GSPO's clip range, long responses": ranges(
            GSPO, (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2)),
        "GRPO's clip range, long responses": ranges(
            GRPO, (3e-4, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.5)),
        "GSPO's clip range, long responses, 1 epoch": ranges(
            GSPO, (3e-4, 1e-3, 3e-3, 0.01, 0.03), epochs=1),
        "GRPO's clip range, long responses, 1 epoch": ranges(
            GRPO, (0.01, 0.03, 0.1, 0.2, 0.5), epochs=1),
        "GSPO's clip range, short responses": ranges(
            GSPO, (3e-4, 3e-3, 0.01, 0.03, 0.1), task="short"),
        "GRPO's clip range, short responses": ranges(
            GRPO, (3e-4, 0.03, 0.1, 0.2, 0.5), task="short"),
    },
    "factorial": {
        "long responses, 4 epochs a rollout": factorial(0.003, 0.1),
        "the same, 1 epoch a rollout": factorial(0.003, 0.1, epochs=1),
        "short responses, 4 epochs": factorial(0.03, 0.2, task="short"),
    },
    "gate": {
        "long responses, 4 epochs: dropped": gate(0.003),
        "1 epoch": gate(0.003, epochs=1),
        "short, 4 epochs": gate(0.03, task="short"),
    },
    "negatives": {
        "no gate, weight 1": without_gate_pushed_down(),
        "no gate, weight 1, 1 epoch": without_gate_pushed_down(epochs=1),
        "GRPO's gate and weight": pushed_down(arm(GRPO, 0.1), "token", 0.25, 0),
        "GRPO's gate and weight, 1 epoch": pushed_down(
            arm(GRPO, 0.1, epochs=1), "token", 0.25, 0),
    },
    "successors_range": {
        name: {str(eps): after(name, eps) for eps in values}
        for name, values in SUCCESSORS.items()
    },
    "successors": {
        "long responses, 4 epochs a rollout": all_after(**EARLY),
        "the same, 1 epoch a rollout": all_after(**EARLY, epochs=1),
        "short responses, 4 epochs": all_after(0.03, 0.2, task="short"),
    },
    "norm": {
        "long responses, 4 epochs": {
            "GSPO": arm(GSPO, [2e-3, 2.5e-3]),
            "GSPO times 200": after("gspo_200", [2e-3, 2.5e-3]),
            "LUSPO": after("luspo", [2e-3, 2.5e-3]),
            "LUSPO over 200": after("luspo_200", [2e-3, 2.5e-3]),
            "FSPO": after("fspo", [0.03, 0.03]),
            "FSPO over 200": after("fspo_200", [0.03, 0.03]),
        },
    },
    "lower_rates": {
        "learning rate 0.0003": gate_or_later(),
        "learning rate 0.0001": gate_or_later(learning_rate=1e-4),
        "learning rate 3e-05": gate_or_later(learning_rate=3e-5),
    },
    "greedy": {"long responses, 4 epochs": {**both(0.01, 0.1), "no gate": NO_GATE}},
    "open": {
        "60 tokens, 100 rollouts": {
            "GSPO without its clip": no_gate(
                "sequence", task="unfinished, 60 tokens", max_steps=100, learning_rate=3e-4),
        },
        "beyond the grid's edge": {
            "SAPO": after("sapo", [336, 320]),
            "CISPO": after("cispo", [1, 0.03]),
            "DAPO": after("dapo", [0.99, 1.4]),
        },
    },
    "world_range": {  # few updates: an epoch of four, as in the paper; many: four of eight
        f"{algorithm.upper()}, {updates} updates a rollout": ranges(
            algorithm, values, task="world", **more)
        for updates, more in WORLD.items()
        for algorithm, values in (
            (GSPO, (3e-4, 3e-3, 0.01, 0.03, 0.1)),
            (GRPO, (0.05, 0.1, 0.2, 0.4, 0.8)),
        )
    },
    "world": {"32 updates a rollout": opening(0.03, 0.4, task="world", **WORLD[32])},
    "world_few": {"4 updates a rollout": opening(0.03, 0.4, task="world", **WORLD[4])},
    "noise": {
        "4 epochs, noise on log s in the gate": noisy(),
        "1 epoch, noise on log s in the gate": noisy(epochs=1),
        "training forward in bf16": {
            **both(**EARLY, autocast=True),
            "GSPO at 3e-4": arm(GSPO, 3e-4, autocast=True),
        },
    },
    "length": {
        f"{tokens} tokens": ranges_of_both(
            (0.001, 0.003, 0.01, 0.03), (0.03, 0.1, 0.2, 0.5), task=f"{tokens} tokens")
        for tokens in CHAINS
    },
    "unfinished": {
        "40 rollouts": both(**EARLY, task="unfinished", max_steps=40),
        "60 tokens, 100 rollouts, learning rate 1e-3": both(
            **EARLY, task="unfinished, 60 tokens", max_steps=100, learning_rate=1e-3),
    },
    "unfinished_60": {
        "60 tokens, 100 rollouts, lower clip range": ranges_of_both(
            (0.003, 0.01), (0.1, 0.2), task="unfinished, 60 tokens", max_steps=100,
            learning_rate=3e-4),
    },
    "collapse": {
        "from a policy that a run without a gate has ruined": both(**EARLY, first=NO_GATE),
        "from GSPO's policy": {"no gate": no_gate("one", first=arm(GSPO, 0.003))},
    },
    "corrected": {
        "GSPO, 8-bit weights": corrected(GSPO, "float8", "tis"),
        "GRPO, 8-bit weights": corrected(GRPO, "float8", "tis"),
        "GSPO, 4 rollouts old": corrected(GSPO, "stale", "tis", "icepop"),
        "GRPO, 4 rollouts old": corrected(GRPO, "stale", "tis", "icepop"),
    },
    "cold_starts": {  # the ranges that clip_range chooses on other questions, and the papers'
        "4 epochs, ranges chosen": both(0.01, 0.1),
        "1 epoch, ranges chosen": both(0.01, 0.2, epochs=1),
        "4 epochs, the papers' ranges": both(3e-4, 0.2),
        "1 epoch, the papers' ranges": both(3e-4, 0.2, epochs=1),
        "1 epoch, early ranges": both(**EARLY, epochs=1),
    },
    "learning_rate": {
        "learning rate 1e-4": both(**EARLY, learning_rate=1e-4),
        "3e-4": both(**EARLY),
        "6e-4": both(**EARLY, learning_rate=6e-4),
    },
    "long_run": {
        "40 rollouts, lower clip range": ranges_of_both((0.003, 3e-4), (0.1, 0.2), max_steps=40),
    },
    "critic": {
        "": {
            **both(**EARLY),
            "PPO, critic, GAE 1": arm(GRPO, 0.1, critic=1),
            "PPO, critic, GAE 0.95": arm(GRPO, 0.1, critic=0.95),
        },
    },
    "advantages": {
        "": {
            **both(**EARLY),
            "reward-weighted regression": arm(GSPO, 0.003, advantages="softmax_advantages"),
            "best of n": arm(GSPO, 0.003, advantages="best_of_n_advantages"),
        },
    },
    "credit": {
        "long responses": credit(0.003),
        "short responses": credit(0.03, task="short"),
    },
    "turns": {
        "": {
            "GSPO, one reward": arm(GSPO, 0.003, "two turns", turns="one"),
            "GSPO-token, each turn its own": arm("gspo_token", 0.003, "two turns", turns="own"),
            "GRPO, one reward": arm(GRPO, 0.1, "two turns", turns="one"),
            "GRPO, each turn its own": arm(GRPO, 0.1, "two turns", turns="own"),
        },
    },
    "moe": {
        "": {
            **both(**EARLY, task="long_moe", replay=False),
            **both(**EARLY, label=", Routing Replay", task="long_moe", replay=True),
        },
    },
    "engine": {
        "bf16 sampler": engine("bf16"),
        "8-bit weights": engine("float8"),
        "4 rollouts old": engine("stale"),
    },
}

# ---- one run -------------------------------------------------------------------------------------


def settings_of(task):
    return train_math.Settings(**COMMON | TASKS[task].settings)


def cold_folder(task, cold):
    if task == "world":
        return tiny.world(cold, ROOT / "runs") / "model"
    return COLD / f"{task}-{cold}"


def cold_start(task, cold):
    """Make the folder of a cold start, unless it is there.

    Returns its accuracy by temperature, 0 being greedy."""
    folder = cold_folder(task, cold)
    if task == "world":
        return json.loads((folder.parent / "start.json").read_text())
    if not folder.exists():
        torch.set_num_threads(1)
        tokenizer = tiny_tokenizer()
        model = TASKS[task].make(tokenizer, cold)
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
    """Share of right answers to 256 questions (small world: 175): "held out", which RL never sees,
    or others, to choose ranges by."""
    torch.manual_seed(cold)
    questions = TASKS[task].questions(name, 256)
    cfg = settings_of(task)
    cfg.rollout_rows *= cfg.group_size  # 128 questions at once, or more
    if task == "two turns":
        return parts.TwoTurns(tokenizer, False).right(model, questions, temperature, cfg)
    found = train_math.evaluate(model, tokenizer, questions, cfg, parts.task_reward, temperature)
    return found["eval_reward"]


def one_rollout(cold):
    """What ratios.py asks for: the responses of one rollout on the long task, after four optimizer
    steps."""
    cold_start("long", cold)
    cfg = replace(settings_of("long"), seed=100 * cold, epochs=1, eps_low=0.003, eps_high=0.004)
    model, tokenizer = train_math.load(cold_folder("long", cold), "cpu")
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
    eps = spec["eps"]
    low, high = eps if isinstance(eps, list) else (eps, float(f"{eps * 4 / 3:.2g}"))
    cfg = replace(settings_of(spec["task"]), **own, seed=seed, eps_low=low, eps_high=high)
    questions = TASKS[spec["task"]].questions(seed, cfg.prompts_per_step * cfg.max_steps)
    pieces = pieces_of(spec, model, tokenizer)
    rows = train_math.train(cfg, model, tokenizer, questions, **pieces)
    replay = pieces["response_log_probs"].__self__ if "replay" in spec else None
    return rows[1:], replay


def run(spec, cold, seed):
    """Train one arm from a cold start, or after another arm; the line of runs.jsonl."""
    torch.set_num_threads(1)
    task = spec["task"]
    start = cold_start(task, cold)
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
        row[name] = [four_digits(step[name]) for step in steps]
    if replay:
        row["experts_changed"] = [four_digits(x) for x in replay.changed if x > 0]
    return row


def four_digits(x):
    return None if x is None else float(f"{x:.4g}")


# ---- all runs of an experiment -------------------------------------------------------------------


def missing(arms, colds, seeds, path):
    """What run() is still to be given, each once."""
    there = [(row["arm"], row["cold"], row["seed"]) for row in read(path)]
    wanted = []
    for k, cold, spec in itertools.product(range(seeds), range(colds), arms):
        job = spec, cold, 100 * cold + k
        if job not in there + wanted:
            wanted.append(job)
    return wanted


def call(job):
    function, *arguments = job
    return function(*arguments)


def run_all(arms, colds, seeds, jobs, path):
    """Cold starts and runs that are not there yet, on `jobs` processes. Returns the rows of these
    arms, from all seeds that every one of them has."""
    wanted = missing(arms, colds, seeds, path)
    if wanted:
        starts = sorted({(spec["task"], cold) for spec, cold, _ in wanted})
        starts = [(cold_start, *start) for start in starts]
        runs = [(run, *job) for job in wanted]
        os.environ.update(TQDM_DISABLE="1", OMP_NUM_THREADS="1")  # the workers'
        # A Ctrl-C ends this process, and leaving the pool ends them.
        ignore = signal.SIGINT, signal.SIG_IGN
        with multiprocessing.get_context("spawn").Pool(jobs, signal.signal, ignore) as pool:
            for _ in tqdm(pool.imap_unordered(call, starts), "cold starts", len(starts)):
                pass
            for row in tqdm(pool.imap_unordered(call, runs), "runs", len(runs)):
                append(path, row)
            pool.close()
            pool.join()
    rows = [row for row in read(path) if row["arm"] in arms]
    seeds_of_each = [{row["seed"] for row in runs_of(spec, rows)} for spec in arms]
    common = set.intersection(*seeds_of_each)
    return [row for row in rows if row["seed"] in common]


def runs_of(spec, rows):
    return [row for row in rows if row["arm"] == spec]


# ---- report --------------------------------------------------------------------------------------

OPTIONAL = "experts changed", "sampled: greedy", "gradient norm"


def table(name, rows):
    """Markdown: an arm a line, with the mean and every value; some columns only where measured."""
    lines = []
    for panel, arms in EXPERIMENTS[name].items():
        first = None
        for label, spec in arms.items():
            own = sorted(runs_of(spec, rows), key=lambda r: r["seed"])
            first = first or own
            if own:
                title = ": ".join(filter(None, (panel, label)))
                lines.append({"arm": title, **cells_of(own, first)})
    columns = [column for column in lines[0]
               if column not in OPTIONAL or any(line[column] != "-" for line in lines)]
    cells = [columns] + [[line[column] for column in columns] for line in lines]
    text = [f"| {' | '.join(row)} |" for row in cells]
    text.insert(1, "|---" * len(columns) + "|")
    starts = {}
    cooler = {}
    for r in rows:
        start = r["arm"]["task"], r["cold"]
        if "first" not in r["arm"]:
            starts[start] = f"{r['start']:.2f}"
        if "start_at" in r:
            cooler[start] = " ".join(f"{r['start_at'][t]:.2f}" for t in ("0.6", "0.3", "0.0"))
    text += before_rl("right", starts)
    text += before_rl("right at temperature 0.6, 0.3 and greedily", cooler)
    return "\n".join(text) + "\n"


def before_rl(what, shares):
    each = [f"{task} {cold} {share}" for (task, cold), share in sorted(shares.items())]
    return [f"\nBefore RL, {what}: {', '.join(each)}"] if each else []


def cells_of(own, first):
    """{column: what an arm's runs say, or -}"""
    def values(metric, start=0):
        return [x for r in own for x in r.get(metric, [])[start:] if x is not None]

    def average(metric, form, start=0):
        found = values(metric, start)
        return format(statistics.fmean(found), form) if found else "-"

    def told(r):
        return f"{r['accuracy']:.2f}" + f" from {r['start']:.2f}" * ("first" in r["arm"])

    each = [" ".join(map(told, runs)) for runs in by_cold_start(own).values()]
    probed = [r for r in own if "probe" in r]
    greedy = [f"{r['accuracy']:.2f}: {r['greedy']:.2f}" for r in own if "greedy" in r]
    return {
        "right, mean": f"{mean(own):.2f}",
        "minus the panel's first": difference(own, first),
        "each run, cold start by cold start": "; ".join(each),
        "right, probe": f"{mean(probed, 'probe'):.3f}" if probed else "-",
        "reward over the run": average("reward", ".2f"),
        "clipped": average("clip_fraction", ".1%"),
        "std of log s": average("log_ratio_std", ".1e"),
        "entropy, last": average("entropy", ".3f", -1),
        "experts changed": average("experts_changed", ".1%"),
        "sampled: greedy": ", ".join(greedy) or "-",
        "gradient norm": spread(values("grad_norm")),
    }


def spread(values):
    values = [x for x in values if x]
    if not values:
        return "-"
    return f"{min(values):.2g} to {max(values):.2g}, median {statistics.median(values):.2g}"


def by_cold_start(rows):
    """{cold start: its runs}"""
    groups = {}
    for r in rows:
        groups.setdefault(r["cold"], []).append(r)
    return groups


def means(rows, name="accuracy"):
    """{cold start: mean over its runs}"""
    return {cold: statistics.fmean(r[name] for r in runs)
            for cold, runs in by_cold_start(rows).items()}


def mean(rows, name="accuracy"):
    return statistics.fmean(means(rows, name).values())


def difference(rows, others):
    """Mean difference in accuracy over the cold starts that both have, and its 95% interval
    (Student's t)."""
    own = means(rows)
    first = means(others)
    d = [own[cold] - first[cold] for cold in own if cold in first]
    if len(d) not in STUDENT or rows == others:
        return "-"
    half = STUDENT[len(d)] * statistics.stdev(d) / len(d) ** 0.5
    return f"{statistics.fmean(d):+.2f} ± {max(half, NARROWEST.get(len(d), 0)):.2f}"


def draw(name, rows, path):
    """A dot a run, coloured by cold start, a bar at the arm's mean; dotted lines where the cold
    starts were."""
    panels = EXPERIMENTS[name]
    labels = [list(arms) for arms in panels.values()]
    alike = all(own == labels[0] for own in labels)
    colds = max(1, *(r["cold"] for r in rows))
    size = 3 + 4 * len(panels), 1.5 + 0.4 * max(map(len, labels))
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=alike, squeeze=False)[0]
    for axis, (panel, arms) in zip(axes, panels.items()):
        starts = set()
        for y, spec in enumerate(arms.values()):
            own = runs_of(spec, rows)
            for r in own:
                starts.add((r["cold"], r["start"]))
                height = y + 0.3 * (r["cold"] / colds - 0.5)
                axis.plot(r["accuracy"], height, "o", color=f"C{r['cold']}", alpha=0.7,
                          markersize=5)
            if own:
                axis.plot([mean(own)] * 2, [y - 0.35, y + 0.35], color="black", linewidth=2)
        for cold, start in sorted(starts):
            axis.axvline(start, color=f"C{cold}", linestyle=":", label=f"cold start {cold}")
        axis.set_yticks(range(len(arms)), list(arms))
        axis.set(title=panel or name, xlabel="right answers after RL (bar: mean; dotted: before)",
                 xlim=(0, 1), ylim=(len(arms) - 0.5, -0.5))
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)


def draw_factorial(rows, path):
    """Three gates, in each the four weights a colour: a dot is a run, a bar the mean."""
    panels = list(EXPERIMENTS["factorial"].items())[:2]  # on short responses nothing differs
    weights = ["s (GSPO's)", "1", "the token's ratio, at most 2", "the token's ratio (GRPO's)"]
    figure = Figure((12, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (panel, arms) in zip(axes, panels):
        before = []
        for i, spec in enumerate(arms.values()):
            own = runs_of(spec, rows)
            before += [r["start"] for r in own]
            right = [r["accuracy"] for r in own]
            y = i // 4 + 0.2 * (i % 4 - 1.5)
            axis.plot(right, [y] * len(own), "o", color=f"C{i % 4}", alpha=0.5)
            axis.plot([mean(own)] * 2, [y - 0.09, y + 0.09], color="black", linewidth=2.5)
        axis.axvspan(min(before), max(before), color="gray", alpha=0.3)
        middle = statistics.fmean(before)
        axis.annotate("before RL", (middle, 1), rotation=90, ha="center", va="center")
        axis.set(title=panel, xlabel="right answers after RL", xlim=(0, 1), ylim=(2.5, -0.5))
        axis.set_yticks(range(3), ["GSPO's gate", "GRPO's gate", "no gate"])
        axis.grid(axis="x", alpha=0.3)
    for i, weight in enumerate(weights):
        axis.plot([], [], "o", color=f"C{i}", label=f"weight {weight}")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def draw_opening(rows, path):
    """The opening's arms on two tasks: a dot is a run, a bar the mean."""
    on_world = EXPERIMENTS["world"] | EXPERIMENTS["world_few"]
    panels = {
        "long task": {16: opening(**EARLY), 4: opening(**EARLY, epochs=1)},
        "small world": {32: on_world["32 updates a rollout"], 4: on_world["4 updates a rollout"]},
    }
    figure = Figure((12, 5), layout="constrained")
    for axis, (task, panel) in zip(figure.subplots(1, 2, sharey=True), panels.items()):
        before = []
        for i, (updates, arms) in enumerate(panel.items()):
            colds_of_each = [set(by_cold_start(runs_of(spec, rows))) for spec in arms.values()]
            common = set.intersection(*colds_of_each)
            for y, spec in enumerate(arms.values()):
                own = [r for r in runs_of(spec, rows) if r["cold"] in common]
                if own:
                    before += [r["start"] for r in own]
                    right = [r["accuracy"] for r in own]
                    height = y + 0.36 * i - 0.18
                    axis.plot(right, [height] * len(own), "o", color=f"C{i}", alpha=0.5)
                    axis.plot([mean(own)] * 2, [height - 0.15, height + 0.15], color="black",
                              linewidth=2.5)
            axis.plot([], [], "o", color=f"C{i}", label=f"{updates} updates a rollout")
        if before:
            axis.axvspan(min(before), max(before), color="gray", alpha=0.3, label="before RL")
        axis.set(title=task, xlabel="right answers after RL (bar: mean)", xlim=(-0.02, 1.02),
                 ylim=(5.5, -0.5))
        axis.set_yticks(range(len(arms)), list(arms))
        axis.grid(axis="x", alpha=0.3)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    figure.savefig(path, dpi=110)


def of_the_long_task(rows):
    """Runs of the long task, but those that diverged."""
    return [r for r in rows if r["arm"]["task"] == "long" and r.get("entropy")]


def cooling(rows):
    """A line for the table: Spearman's correlation of right answers and the last entropy."""
    own = of_the_long_task(rows)
    values = torch.tensor([(r["accuracy"], r["entropy"][-1]) for r in own]).T
    ranks = values.argsort().argsort().double()
    return (f"\nOver all {len(own):,} runs of the long task, right answers and the entropy at the "
            f"end: Spearman's correlation {torch.corrcoef(ranks)[0, 1]:.2f}\n")


def kind_of(spec):
    if {**spec, "epochs": 4} == NO_GATE:
        return "no gate, weight 1"
    if spec in (arm(algorithm, spec["eps"], epochs=spec["epochs"]) for algorithm in (GSPO, GRPO)):
        return f"{spec['algorithm'].upper()}, any range"
    return "other arms"


def draw_cooling(rows, path):
    """Right answers over the entropy at the end, a dot a run of the long task."""
    figure = Figure((9, 4.5), layout="constrained")
    axis = figure.subplots()
    colours = {
        "other arms": "lightgray",
        "no gate, weight 1": "black",
        "GRPO, any range": "tab:orange",
        "GSPO, any range": "tab:blue",
    }
    for kind, colour in colours.items():
        own = [r for r in of_the_long_task(rows) if kind_of(r["arm"]) == kind]
        entropy = [r["entropy"][-1] for r in own]
        right = [r["accuracy"] for r in own]
        axis.plot(entropy, right, ".", color=colour, label=f"{kind}: {len(own)}")
    axis.set(
        xscale="log",
        ylim=(0, 1),
        xlabel="entropy of the last rollout's samples, nats a token",
        ylabel="right answers after RL",
        title="The long task: a dot is a run",
    )
    axis.legend(loc="lower left")
    figure.savefig(path, dpi=110)


def draw_noise(rows, path):
    """Right answers over the noise in the gate, in units of the policy's own movement: the spread
    of log s. The marks are what rounding adds to log s on SmolLM2, in units of its movement by one
    step at 1e-6 (precision.py's logs)."""
    figure = Figure((9, 4.5), layout="constrained")
    axis = figure.subplots()
    for epochs, dot, line in ((4, "o", "-"), (1, "^", "--")):
        own = [r for r in rows if r["arm"]["epochs"] == epochs and "autocast" not in r["arm"]]
        points = {}
        for r in own:
            if deviation := r["arm"].get("noise"):
                movement = statistics.fmean(x for x in r["log_ratio_std"] if x)
                point = deviation / movement, r["accuracy"]
                points.setdefault(deviation, []).append(point)
                axis.plot(*point, dot, color=f"C{r['cold']}", alpha=0.7)
        means = [[statistics.fmean(x) for x in zip(*points[noise])] for noise in sorted(points)]
        axis.plot(*zip(*means), line, color="black")
        label = f"{epochs} epoch{'s' * (epochs > 1)} a rollout (line: mean)"
        axis.plot([], [], dot + line, color="black", label=label)
        without = mean([r for r in own if "noise" not in r["arm"]])
        axis.axhline(without, color="black", linestyle=line, linewidth=0.6)
    logs = {path.stem: json.loads(path.read_text()) for path in PRECISION.glob("*.json")}
    log_s = {form: log["128"]["off the grid"] for form, log in logs.items()}
    exact = log_s.pop("float32")
    for form, rounded in log_s.items():
        x = statistics.stdev(a - b for a, b in zip(rounded, exact)) / statistics.stdev(exact)
        axis.axvline(x, color="grey", linestyle=":")
        axis.text(x, 0.02, form.replace("_", " "), rotation=90, ha="right")
    axis.set(
        xscale="log",
        ylim=(0, 1),
        ylabel="right answers after RL (thin: without noise)",
        title="Noise in GSPO's gate (a point is a run, its colour the cold start)",
        xlabel="noise on log s / spread of log s by training "
        "(dotted: rounding on SmolLM2, learning rate 1e-6)",
    )
    axis.legend(loc="lower left")
    figure.savefig(path, dpi=110)


def report(name, rows, folder):
    every = read(folder / "runs.jsonl")
    text = table(name, rows)
    if name == "greedy":
        text += cooling(every)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    if name == "factorial":
        draw_factorial(rows, folder / "factorial.png")
    else:
        draw(name, rows, folder / f"{name}.png")
    if name in ("world", "world_few"):
        draw_opening(every, folder / "opening.png")
    if name == "greedy":
        draw_cooling(every, folder / "cooling.png")
    if name == "noise":
        draw_noise(rows, folder / "noise_over_movement.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=["exact", "ratios", *EXPERIMENTS, "all"])
    parser.add_argument("--colds", type=int, default=3, help="cold starts")
    parser.add_argument("--seeds", type=int, default=1, help="seeds, from each cold start")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2),
                        help="processes, a core each")
    parser.add_argument("--results", type=Path, default=RESULTS,
                        help="folder; runs that it holds are not run again")
    parser.add_argument("--model", help="for ratios: hub id or folder of real weights")
    parser.add_argument("--gsm8k", help="for ratios: the folder with train.jsonl")
    args = parser.parse_args()
    if min(args.colds, args.seeds, args.jobs) < 1:
        parser.error("--colds, --seeds and --jobs must be at least 1")
    if (args.model is None) != (args.gsm8k is None):
        parser.error("--model and --gsm8k go together")
    for folder in (args.results, COLD):
        folder.mkdir(parents=True, exist_ok=True)
    names = ["exact", "ratios", *EXPERIMENTS] if args.name == "all" else [args.name]
    for name in names:
        if name == "exact":
            exact.main(args.results)
        elif name == "ratios":
            torch.set_num_threads(1)
            rollouts = tqdm(map(one_rollout, range(args.colds)), "rollouts", args.colds)
            ratios.main(args.results, rollouts, args.model, args.gsm8k)
        else:
            arms = [spec for panel in EXPERIMENTS[name].values() for spec in panel.values()]
            rows = run_all(arms, args.colds, args.seeds, args.jobs, args.results / "runs.jsonl")
            report(name, rows, args.results)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped: the same command goes on, and only the runs that were on are lost")
