"""Logs of silent bugs: eight rollouts on the small world, with one mistake each and no error.

    python -m lesson.find_the_bug          the exercise: bugs/a.jsonl to g.jsonl, bugs/bugs.png
    python -m lesson.find_the_bug --all    all twelve bugs: results/bugs.md

A run takes about half a minute on an idle core. Runs are kept in runs/bugs/ and not repeated. Do
not read on before you have solved find_the_bug.md, because the bugs follow here.
"""
import argparse
import contextlib
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from matplotlib.figure import Figure

import train_math
from common.logs import read
from gspo import clipped_objective, group_advantages, gspo_loss
from lesson import tiny

FOLDER = Path(__file__).with_name("bugs")
TABLE = Path(__file__).with_name("results") / "bugs.md"
FLAGS = [*tiny.FLAGS, "--eps_low", "0.003", "--eps_high", "0.004", "--max_steps", "8",
         "--save_steps", "8", "--instruction", ""]
METRICS = ("reward", "response_length", "cut", "equal_reward_groups", "entropy", "loss",
           "grad_norm", "clip_fraction", "log_ratio_first_max", "log_ratio_std")
SETTINGS = ("algorithm", "seed", "group_size", "prompts_per_step", "minibatches", "epochs",
            "learning_rate", "max_steps", "max_completion_length")
PANELS = {"reward": "linear", "response_length": "linear", "equal_reward_groups": "linear",
          "loss": "log", "grad_norm": "log", "clip_fraction": "linear", "log_ratio_std": "log"}
CAPTION = """`python -m lesson.find_the_bug --all`: world 0, seed 0, eight rollouts.
Means over the rollouts, of the loss's size, and eval_reward at the end.
Bold: less than half of the value without a bug, or more than twice.

"""
END = 1  # the tiny tokenizer's end token


# ---- the bugs ------------------------------------------------------------------------------------


def against_itself(log_probs, old_log_probs, *arguments, **keywords):
    return gspo_loss(log_probs, log_probs, *arguments, **keywords)


def taken_anew(model, batch, temperature):
    log_probs = train_math.response_log_probs(model, batch, temperature)
    batch.old_log_probs = log_probs.detach()
    return log_probs


def without_temperature(model, batch, temperature):
    return train_math.response_log_probs(model, batch, 1.0)


def over_the_batch(rewards, group_size):
    return group_advantages(rewards, len(rewards))


def others_advantages(prompts, responses, advantages, cfg):
    """The advantages are in another order than the responses: first responses, second ones, ..."""
    transposed = advantages.view(-1, cfg.group_size).T.flatten()
    return train_math.build_minibatches(prompts, responses, transposed, cfg)


def without_end_token(prompts, responses, advantages, cfg):
    minibatches = train_math.build_minibatches(prompts, responses, advantages, cfg)
    for batch in sum(minibatches, []):
        batch.mask &= batch.ids[:, 1:] != END
    return minibatches


def without_first_token(prompts, responses, advantages, cfg):
    """The mask of ids[:, :-1] is used for the log-probs of ids[:, 1:]."""
    minibatches = train_math.build_minibatches(prompts, responses, advantages, cfg)
    for batch in sum(minibatches, []):
        batch.mask[:, 1:] &= batch.mask[:, :-1].clone()
    return minibatches


def without_root(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator):
    product = (log_probs - old_log_probs).sum(dim=1).exp()
    return -clipped_objective(product, advantages, eps_low, eps_high).sum() / denominator


def wrong_sign(*arguments, **keywords):
    return -gspo_loss(*arguments, **keywords)


def own_denominator(*arguments, denominator):
    return gspo_loss(*arguments)


def leave_gradients(optimizer):
    pass


BUGS = {  # what is wrong: parts of train_math.py, flags, or the optimizer's zero_grad
    "nothing": {},
    "the ratio is always 1: the current log-probs stand for the old": {"loss": against_itself},
    "zero_grad is missing": {"zero_grad": leave_gradients},
    "advantages do not belong to their responses": {"build_minibatches": others_advantages},
    "advantages over the whole batch, not over the group": {"group_advantages": over_the_batch},
    "no root: s is the product of the tokens' ratios": {"loss": without_root},
    "GRPO's clip range with GSPO": {"flags": ["--eps_low", "0.2", "--eps_high", "0.27"]},
    "the loss has the wrong sign": {"loss": wrong_sign},
    "the denominator is the micro-batch's own size": {"loss": own_denominator},
    "the end token is left out of the mask": {"build_minibatches": without_end_token},
    "the temperature (0.8) is left out of the log-probs":
        {"response_log_probs": without_temperature, "flags": ["--temperature", "0.8"]},
    "the mask is off by one: the first token is left out":
        {"build_minibatches": without_first_token},
    "the old log-probs are taken anew before each update": {"response_log_probs": taken_anew}}


# ---- the runs ------------------------------------------------------------------------------------


def run(name):
    """The rows of the run with this bug, which is made now unless it was kept."""
    kept = Path("runs/bugs", f"{list(BUGS).index(name)}.jsonl")
    if not kept.exists():
        parts = dict(BUGS[name])
        folder = tiny.world(0)
        cfg = train_math.parse_settings([
            *FLAGS, "--dataset", str(folder / "questions"), *parts.pop("flags", ())])
        cfg = replace(cfg, output_dir=None)
        questions, held_out = train_math.load_questions(cfg)
        model, tokenizer = train_math.load(folder / "model", "cpu")
        patch = contextlib.nullcontext()
        if "zero_grad" in parts:
            patch = mock.patch.object(torch.optim.AdamW, "zero_grad", parts.pop("zero_grad"))
        with patch:
            rows = train_math.train(cfg, model, tokenizer, questions, held_out, **parts)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(kept)


def answers():
    """{letter: what is wrong in its log}: the first seven of BUGS, shuffled."""
    return dict(zip("abcdefg", random.Random(2507).sample(list(BUGS)[:7], 7)))


def shown(row):
    """What the exercise shows of a row of metrics, with four digits."""
    kept = {"step": row["step"]}
    for name in (*METRICS, "eval_reward"):
        if name in row:
            kept[name] = None if row[name] is None else float(f"{row[name]:.4g}")
    if "settings" in row:
        kept["settings"] = {name: row["settings"][name] for name in SETTINGS}
    return kept


# ---- picture and table ---------------------------------------------------------------------------


def draw(logs, path):
    """A line of panels for each log, {letter: rows}. The panels of a column have the same scale."""
    figure = Figure((15, 11), layout="constrained")
    axes = figure.subplots(len(logs), len(PANELS), sharex=True, sharey="col")
    for line, (letter, rows) in zip(axes, logs.items()):
        for axis, (name, scale) in zip(line, PANELS.items()):
            values = [math.nan if row[name] is None else abs(row[name]) for row in rows[1:]]
            axis.plot(range(1, len(rows)), values, ".-")
            axis.set_yscale(scale)
            axis.grid(alpha=0.3)
        line[0].set_ylabel(letter, rotation=0, fontsize=16, labelpad=16)
        line[0].plot([0, len(rows) - 1], [rows[0]["eval_reward"], rows[-1]["eval_reward"]], "s")
    for axis, name in zip(axes[0], PANELS):
        axis.set_title(f"size of the {name}" if name == "loss" else name)
    figure.supxlabel("rollout (squares: eval_reward, on held-out questions)")
    figure.savefig(path, dpi=70)


def averages(rows):
    """{metric: its mean over the rollouts, of the loss's size}, and eval_reward at the end."""
    values = {"eval_reward": rows[-1]["eval_reward"]}
    for name in METRICS:
        known = [abs(row[name]) for row in rows[1:] if row[name] is not None]
        values[name] = sum(known) / len(known)
    return values


def table():
    """A line for each bug; what differs by a factor of two is bold."""
    healthy = averages(run("nothing"))
    lines = [f"| wrong | {' | '.join(healthy)} |", "|---" * (1 + len(healthy)) + "|"]
    for name in BUGS:
        cells = []
        for metric, value in averages(run(name)).items():
            far = not healthy[metric] / 2 <= value <= 2 * healthy[metric]
            cells.append(f"**{value:.2g}**" if far else f"{value:.2g}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="twelve bugs: results/bugs.md")
    args = parser.parse_args()
    torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
    if args.all:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(CAPTION + table())
        print(TABLE.read_text(), end="")
        return
    FOLDER.mkdir(exist_ok=True)
    logs = {letter: [shown(row) for row in run(name)] for letter, name in answers().items()}
    for letter, rows in logs.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (FOLDER / f"{letter}.jsonl").write_text("".join(lines))
    draw(logs, FOLDER / "bugs.png")
    print(f"{FOLDER}/a.jsonl to g.jsonl, and their picture, bugs.png")


if __name__ == "__main__":
    main()
