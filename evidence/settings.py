"""The experiments of compare.py, and the variants that they compare.

An experiment is a dictionary {panel: {label: variant}}. A panel is a part of its table and picture.
A variant is a dictionary of its settings:

    task        a key of TASKS in tasks.py
    algorithm   of train_math.py
    eps         the lower clip range (the upper one is 4/3 of it), or both as a list
    epochs, minibatches, learning_rate, max_steps    settings of train_math.py
    loss        the arguments of successors.surrogate
    successor   a loss of successors.py

The experiments whose runs are finished are data: the rows "experiments" of the log. Some variants
have parts that were deleted. README.md says which commit has them.
"""
from pathlib import Path

from evidence.tasks import CHAINS
from tools.logs import read_packed

COMPARISONS = Path(__file__).with_name("logs") / "comparisons.jsonl.gz"
GSPO = "gspo"
GRPO = "grpo"
NO_LOWER_BOUND = 0.99  # how the logs write it; gspo.py gets 1 instead
EARLY = {GSPO: 0.003, GRPO: 0.1}  # ranges that were chosen on the reported questions


def variant(algorithm, eps, task="long", epochs=4, **pieces):
    """A variant. eps is the lower clip range; the upper one is 4/3 of it, as in GSPO's paper."""
    return {"task": task, "algorithm": algorithm, "eps": eps, "epochs": epochs, **pieces}


def no_clip(*how, **more):
    """A variant without a clip: its weight and the ratio that decides about clipping are 1."""
    return variant(GSPO, NO_LOWER_BOUND, loss=["one", "one", None, *how], **more)


def both(gspo, grpo, **more):
    return {"GSPO": variant(GSPO, gspo, **more), "GRPO": variant(GRPO, grpo, **more)}


def ranges(algorithm, values, label="", **more):
    """A variant for each clip range."""
    return {f"{label}{eps:g}": variant(algorithm, eps, **more) for eps in values}


def opening(gspo, grpo, **more):
    """The variants in the first picture of evidence/README.md."""
    return both(gspo, grpo, **more) | {
        "GSPO's clipping rule, weight 1": variant(
            GSPO, gspo, loss=["one", "sequence", None], **more),
        "GRPO's clipping rule, weight s": variant(
            GRPO, grpo, loss=["sequence", "token", None], **more),
        "no clip, weight 1": no_clip(**more),
        "no clip, A < 0 dropped": no_clip("both", None, 0, **more),
    }


def all_losses(gspo, grpo, **more):
    """GSPO, GRPO, and later losses with the two numbers that successors.py explains: the paper's
    or, if it has none, those of an implementation."""
    later = {"SAPO": [1.05, 1.0], "CISPO": [1, 5.0], "GMPO": [0.4, 0.4], "FSPO": [0.03, 0.03],
             "LUSPO": [2e-3, 2.5e-3], "DAPO": [0.2, 0.28], "Dr. GRPO": [0.2, 0.2]}
    variants = both(gspo, grpo, **more)
    for label, eps in later.items():
        name = label.lower().replace(". ", "_")
        variants[label] = variant(GSPO, eps, successor=name, **more)
    return variants


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
    "successors": {
        "long responses, 4 epochs a rollout": all_losses(**EARLY),
        "the same, 1 epoch a rollout": all_losses(**EARLY, epochs=1),
        "short responses, 4 epochs": all_losses(0.03, 0.2, task="short"),
    },
    "world": {"32 updates a rollout": opening(0.03, 0.4, task="world")},
    "length": {
        f"{tokens} tokens": {
            **ranges(GSPO, (0.001, 0.003, 0.01, 0.03), "GSPO ", task=f"{tokens} tokens"),
            **ranges(GRPO, (0.03, 0.1, 0.2, 0.5), "GRPO ", task=f"{tokens} tokens"),
        }
        for tokens in CHAINS
    },
}
# Of these, the code was deleted after their runs.
RETIRED = ("advantages", "collapse", "corrected", "credit", "critic", "engine", "gate", "moe",
           "noise", "norm", "open", "turns", "unfinished", "unfinished_60")


def finished():
    """The experiments whose settings are rows of the log."""
    found = {}
    for row in read_packed(COMPARISONS)["experiments"]:
        panels = found.setdefault(row["experiment"], {})
        panels.setdefault(row["panel"], {})[row["label"]] = row["variant"]
    return found


EXPERIMENTS |= finished()


def variants_of(name):
    """All variants of an experiment."""
    return [spec for panel in EXPERIMENTS[name].values() for spec in panel.values()]
