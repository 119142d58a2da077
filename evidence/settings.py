"""The experiments of compare.py: the tasks, and the variants of GSPO that are compared.

An experiment is a dictionary {panel: {label: variant}}. A panel is a part of its table and picture.
A variant is a dictionary of its settings:

    task        a key of TASKS
    algorithm   of train_math.py
    eps         the lower clip range (the upper one is 4/3 of it), or both as a list
    epochs, minibatches, learning_rate, max_steps    settings of train_math.py
    loss        the arguments of parts.surrogate
    successor   a loss of successors.py
    first       a variant that is trained before this one
    autocast, engine, noise, critic, ...    parts of finished experiments

The labels are printed in the published tables. The code of the experiments in RETIRED was deleted
after their runs. README.md says which commit has it. Their runs stay in the log, and their tables
are made from it.
"""
from collections import namedtuple
from functools import partial

import train_math
from evidence import parts

# ---- the tasks -----------------------------------------------------------------------------------

COMMON = dict(output_dir=None, device="cpu", instruction="", prompts_per_step=16, group_size=8,
              minibatches=4, rollout_rows=128, micro_batch_tokens=10**6, max_steps=12)
CHAINS = {30: (3, 5), 60: (7, 11), 120: (16, 22), 200: (28, 36)}  # tokens: steps

# teach(model, tokenizer, seed) trains a model with random weights before RL, and the result is a
# starting model. questions(seed, n) returns questions, also for the seeds "held out" and "probe".
# settings: the settings of train_math.py that differ from COMMON.
Task = namedtuple("Task", "teach questions settings")


def chains(least=20, most=32):
    """A task with chains of `least` to `most` sums of 6 tokens."""
    return Task(
        partial(parts.long_cold_start, least=least, most=most),
        partial(parts.long_questions, least=least, most=most),
        dict(max_completion_length=6 * most + 18, learning_rate=3e-4),
    )


TASKS = {
    "long": chains(),
    "short": Task(
        parts.short_cold_start,
        parts.short_questions,
        dict(max_completion_length=40, learning_rate=8e-5),
    ),
    # The lesson's small world: lesson/tiny.py makes its models.
    "world": Task(
        None,
        parts.world_questions,
        dict(max_completion_length=108, learning_rate=3e-4, group_size=16, minibatches=8,
             max_steps=16, rollout_rows=256),
    ),
}
TASKS |= {f"{tokens} tokens": chains(*steps) for tokens, steps in CHAINS.items()}

# ---- the experiments: {panel: {label: variant}} --------------------------------------------------

GSPO = "gspo"
GRPO = "grpo"
NO_LOWER_BOUND = 0.99  # how the logs write it; gspo.py gets 1 instead
EARLY = {GSPO: 0.003, GRPO: 0.1}  # ranges that were chosen on the reported questions


def variant(algorithm, eps, task="long", epochs=4, **pieces):
    """A variant. eps is the lower clip range; the upper one is 4/3 of it, as in GSPO's paper."""
    return {"task": task, "algorithm": algorithm, "eps": eps, "epochs": epochs, **pieces}


def no_gate(weight, *how, **more):
    """A variant without a clip: the ratio that decides about clipping is always 1."""
    return variant(GSPO, NO_LOWER_BOUND, loss=[weight, "one", None, *how], **more)


NO_GATE = no_gate("one")


def both(gspo, grpo, label="", **more):
    return {
        f"GSPO{label}": variant(GSPO, gspo, **more),
        f"GRPO{label}": variant(GRPO, grpo, **more),
    }


def ranges(algorithm, values, label="", **more):
    """A variant for each clip range."""
    return {f"{label}{eps:g}": variant(algorithm, eps, **more) for eps in values}


def ranges_of_both(gspo, grpo, **more):
    return ranges(GSPO, gspo, "GSPO ", **more) | ranges(GRPO, grpo, "GRPO ", **more)


def factorial(sequence, token, **more):
    """All combinations of a gate and a weight. The metrics are those of its algorithm."""
    gates = {"sequence": (GSPO, sequence), "token": (GRPO, token), "one": (GSPO, NO_LOWER_BOUND)}
    weights = {
        "s": ("sequence", None),
        "1": ("one", None),
        "token, at most 2": ("token", 2),
        "token": ("token", None),
    }
    variants = {}
    for gate, (algorithm, eps) in gates.items():
        for shown, (weight, cap) in weights.items():
            label = f"{gate} clipping rule, weight {shown}".replace("one clipping rule", "no clip")
            if weight == gate != "one" and not cap:
                variants[f"{label} ({algorithm.upper()})"] = variant(algorithm, eps, **more)
            else:
                variants[label] = variant(algorithm, eps, loss=[weight, gate, cap], **more)
    return variants


def gate(eps, **more):
    """Variants of GSPO that clip on one side only, and variants that clip as many responses of each
    minibatch as GSPO would, but at random."""
    def dropped(*how):
        return variant(GSPO, eps, loss=["sequence", "sequence", None, *how], **more)

    return {
        "what GSPO drops": variant(GSPO, eps, **more),
        "only those of A < 0": dropped("below"),
        "only those of A > 0": dropped("above"),
        "as many of each sign of A, at random": dropped("both", "sign"),
        "as many, at random": dropped("both", "all"),
        "nothing": no_gate("sequence", **more),
    }


def pushed_down(spec, ratio, *shares):
    """A variant, and the same variant with smaller factors for A < 0."""
    variants = {"A < 0 times 1": spec}
    for x in shares:
        variants[f"A < 0 times {x:g}"] = spec | {"loss": [ratio, ratio, None, "both", None, x]}
    return variants


def without_gate_pushed_down(**more):
    return {"GSPO, with its clip": variant(GSPO, 0.003, **more)} | pushed_down(
        no_gate("one", **more), "one", 0.5, 0.36, 0.25, 0)


def opening(gspo, grpo, **more):
    """The variants in the first picture of evidence/README.md."""
    weight_1 = ["one", "sequence", None]
    weight_s = ["sequence", "token", None]
    return both(gspo, grpo, **more) | {
        "GSPO's clipping rule, weight 1": variant(GSPO, gspo, loss=weight_1, **more),
        "GRPO's clipping rule, weight s": variant(GRPO, grpo, loss=weight_s, **more),
        "no clip, weight 1": no_gate("one", **more),
        "no clip, A < 0 dropped": no_gate("one", "both", None, 0, **more),
    }


def after(name, eps, **more):
    """A successor of GSPO. eps holds the two numbers of its loss, which successors.py explains."""
    return variant(GSPO, eps, successor=name, **more)


SUCCESSORS = {  # first: the paper's numbers or, if it has none, those of an implementation
    "sapo": ([1.05, 1.0], [5.25, 5], [21, 20], [84, 80]),
    "cispo": ([1, 5.0], [1, 1.0], [1, 0.28], [1, 0.1]),
    "gmpo": ([0.4, 0.4], [0.2, 0.2], [0.1, 0.1], [0.03, 0.03]),
    "fspo": ([0.03, 0.03], [0.01, 0.01], [0.1, 0.1], [0.3, 0.3]),
    "luspo": ([2e-3, 2.5e-3], [3e-4, 4e-4], [6e-3, 8e-3], [0.02, 0.027]),
    "dapo": ([0.2, 0.28], [0.1, 0.14], [0.05, 0.07], [0.5, 0.7]),
    "dr_grpo": ([0.2, 0.2], [0.1, 0.1], [0.05, 0.05], [0.5, 0.5]),
}


def all_after(gspo, grpo, **more):
    variants = both(gspo, grpo, **more)
    for name, (eps, *_) in SUCCESSORS.items():
        variants[name.upper().replace("DR_", "Dr. ")] = after(name, eps, **more)
    return variants


def gate_or_later(**more):
    return {
        "GSPO": variant(GSPO, 0.003, **more),
        "no clip": no_gate("one", **more),
        "SAPO": after("sapo", [1.05, 1.0], **more),
        "CISPO": after("cispo", [1, 5.0], **more),
    }


def noisy(**more):
    variants = {"0": variant(GSPO, 0.003, **more)}
    for deviation in (0.003, 0.01, 0.03, 0.1, 0.3, 1):
        variants[f"{deviation:g}"] = variant(GSPO, 0.003, noise=deviation, **more)
    return variants


def credit(eps, **more):
    return {
        "GSPO, one reward": variant(GSPO, eps, **more),
        "GSPO-token, one reward": variant("gspo_token", eps, **more),
        "GSPO-token, each step its own": variant("gspo_token", eps, step_rewards="own", **more),
        "GSPO-token, own + one reward": variant("gspo_token", eps, step_rewards="both", **more),
    }


def engine(kind):
    """The old log-probs are computed by the training forward, or by the engine that samples."""
    return {
        **both(**EARLY),
        **both(**EARLY, label=", recomputed", engine=[kind, False]),
        **both(**EARLY, label=", the engine's", engine=[kind, True]),
        "GSPO at 3e-4, the engine's": variant(GSPO, 3e-4, engine=[kind, True]),
    }


def corrected(algorithm, kind, *ways):
    variants = {"recomputed": variant(algorithm, EARLY[algorithm], engine=[kind, False])}
    for way in ways:
        own = variant(algorithm, EARLY[algorithm], engine=[kind, False, way])
        variants[f"recomputed {way}"] = own
    return variants


RETIRED = ("advantages", "collapse", "corrected", "credit", "critic", "engine", "gate", "moe",
           "noise", "open", "turns", "unfinished", "unfinished_60")
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
        "no clip, weight 1": without_gate_pushed_down(),
        "no clip, weight 1, 1 epoch": without_gate_pushed_down(epochs=1),
        "GRPO's clipping rule and weight": pushed_down(variant(GRPO, 0.1), "token", 0.25, 0),
        "GRPO's clipping rule and weight, 1 epoch": pushed_down(
            variant(GRPO, 0.1, epochs=1), "token", 0.25, 0),
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
            "GSPO": variant(GSPO, [2e-3, 2.5e-3]),
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
    "greedy": {"long responses, 4 epochs": {**both(0.01, 0.1), "no clip": NO_GATE}},
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
    "world_range": {  # few updates: one epoch of 4 minibatches, as in the paper; many: 4 of 8
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
        "4 epochs, noise on log s in the clipping rule": noisy(),
        "1 epoch, noise on log s in the clipping rule": noisy(epochs=1),
        "training forward in bf16": {
            **both(**EARLY, autocast=True),
            "GSPO at 3e-4": variant(GSPO, 3e-4, autocast=True),
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
        "from a policy that a run without a clip has ruined": both(**EARLY, first=NO_GATE),
        "from GSPO's policy": {"no clip": no_gate("one", first=variant(GSPO, 0.003))},
    },
    "corrected": {
        "GSPO, 8-bit weights": corrected(GSPO, "float8", "tis"),
        "GRPO, 8-bit weights": corrected(GRPO, "float8", "tis"),
        "GSPO, 4 rollouts old": corrected(GSPO, "stale", "tis", "icepop"),
        "GRPO, 4 rollouts old": corrected(GRPO, "stale", "tis", "icepop"),
    },
    "cold_starts": {  # the ranges that clip_range selects on other questions, and the papers' ones
        "4 epochs, ranges chosen": both(0.01, 0.1),
        "1 epoch, ranges chosen": both(0.01, 0.2, epochs=1),
        "4 epochs, the papers' ranges": both(3e-4, 0.2),
        "1 epoch, the papers' ranges": both(3e-4, 0.2, epochs=1),
        "1 epoch, early ranges": both(**EARLY, epochs=1),
    },
    "range_few": {  # the best range on other questions, and the paper's
        "GSPO, 1 epoch": ranges(GSPO, (3e-4, 0.003, 0.01), epochs=1),
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
            "PPO, critic, GAE 1": variant(GRPO, 0.1, critic=1),
            "PPO, critic, GAE 0.95": variant(GRPO, 0.1, critic=0.95),
        },
    },
    "advantages": {
        "": {
            **both(**EARLY),
            "reward-weighted regression": variant(GSPO, 0.003, advantages="softmax_advantages"),
            "best of n": variant(GSPO, 0.003, advantages="best_of_n_advantages"),
        },
    },
    "credit": {
        "long responses": credit(0.003),
        "short responses": credit(0.03, task="short"),
    },
    "turns": {
        "": {
            "GSPO, one reward": variant(GSPO, 0.003, "two turns", turns="one"),
            "GSPO-token, each turn its own": variant("gspo_token", 0.003, "two turns", turns="own"),
            "GRPO, one reward": variant(GRPO, 0.1, "two turns", turns="one"),
            "GRPO, each turn its own": variant(GRPO, 0.1, "two turns", turns="own"),
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


def settings_of(task):
    return train_math.Settings(**COMMON | TASKS[task].settings)
