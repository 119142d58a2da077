"""Logs of silent bugs: eight rollouts on the small world, with one mistake each and no error.

    python -m homework.find_the_bug                             the exercise: bugs.jsonl, bugs.png
    python -m homework.find_the_bug --all                       the table of bugs.md: twelve bugs
    python -m homework.find_the_bug --handout FOLDER            an exercise for a class

The published logs a to h are in bugs.jsonl, and their answers are in find_the_bug.md. If bugs.jsonl
is missing, its runs are made again. A run takes about half a minute on an idle core, and is kept in
runs/bugs/.

A hand-out is FOLDER with the exercise of find_the_bug.md, and with the logs and the picture of
eight new runs. A secret number, which is in the key, gives their seeds and letters. With --seed and
this number, the hand-out can be made again. The key is not near FOLDER but in runs/keys/. Because
seeds differ, the key has the ranges of the metrics of each log. Nothing is overwritten.

The bugs follow below. Do not read on before you have solved find_the_bug.md.
"""
import argparse
import math
import random
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from matplotlib.figure import Figure

import train_math
from gspo import clipped_objective, group_advantages, gspo_loss
from lesson import tiny
from tools.answers import markdown
from tools.logs import make_writable, read, read_packed, write
from tools.plot import STYLES, shrink

PAGE = Path(__file__).with_name("find_the_bug.md")
LOGS = PAGE.with_name("bugs.jsonl")
FLAGS = [*tiny.FLAGS, "--learning_rate", "3e-4", "--eps_low", "0.003", "--eps_high", "0.004",
         "--max_steps", "8", "--save_steps", "8", "--instruction", ""]
METRICS = ("reward", "response_length", "cut", "equal_reward_groups", "entropy", "loss",
           "grad_norm", "clip_fraction", "log_ratio_first_max", "log_ratio_std")
PANELS = {  # metric: (unit, scale of the vertical axis)
    "reward": ("mean", "linear"),
    "response_length": ("tokens", "linear"),
    "equal_reward_groups": ("fraction", "linear"),
    "loss": ("absolute value", "log"),
    "grad_norm": ("before clipping", "log"),
    "clip_fraction": ("fraction of tokens", "linear"),
    "log_ratio_std": ("of log s", "log")}
KEY = """# Find the bug: the key

The hand-out was made with --seed {seed}. Keep this number secret. The answers in
homework/find_the_bug.md say which metric shows each bug, and why. In these runs, the numbers differ
from those of the answers. Accept any other metric that shows the bug, if the explanation is
correct. The table has the lowest and the highest absolute value of each metric of the picture.

{table}"""
LETTERS = "abcdefgh"
SECOND_SEED = 1  # of the second correct run; the seed of all other published runs is 0
LOWEST = 1e-9  # on logarithmic axes
BLUE, _ = STYLES["gspo"]
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


def others_advantages(rollout, advantages, cfg):
    """The advantages are in another order than the responses: first responses, second ones, ..."""
    transposed = advantages.view(-1, cfg.group_size).T.flatten()
    return train_math.build_minibatches(rollout, transposed, cfg)


def without_end_token(rollout, advantages, cfg):
    minibatches = train_math.build_minibatches(rollout, advantages, cfg)
    for batch in sum(minibatches, []):
        batch.mask &= batch.ids[:, 1:] != END
    return minibatches


def without_first_token(rollout, advantages, cfg):
    """The mask of ids[:, :-1] is used for the log-probs of ids[:, 1:]."""
    minibatches = train_math.build_minibatches(rollout, advantages, cfg)
    for batch in sum(minibatches, []):
        batch.mask[:, 1:] &= batch.mask[:, :-1].clone()
    return minibatches


def without_root(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator):
    product = (log_probs - old_log_probs).sum(dim=1).exp()
    return -clipped_objective(product, advantages, eps_low, eps_high).sum() / denominator


def wrong_sign(*arguments, **keywords):
    return -gspo_loss(*arguments, **keywords)


def own_denominator(*arguments):
    *arguments, _ = arguments  # the last one is the denominator
    return gspo_loss(*arguments)


def without_zero_grad(model):
    optimizer = train_math.adamw(model)
    optimizer.zero_grad = lambda: None
    return optimizer


BUGS = {  # the bug: what makes it (some of Parts, a field of Algorithm, or flags)
    "nothing": {},
    "the ratio is always 1: the current log-probs stand for the old": {"loss": against_itself},
    "zero_grad is missing": {"make_optimizer": without_zero_grad},
    "advantages do not belong to their responses": {"build_minibatches": others_advantages},
    "advantages over the whole batch, not over the group": {"advantages": over_the_batch},
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


def run(name, seed=0):
    """The rows of metrics of a run with this bug. The run is made unless its log exists."""
    kept = Path("runs/bugs", f"{list(BUGS).index(name)}-{seed}.jsonl")
    if not kept.exists():
        make_writable(kept)
        parts = dict(BUGS[name])
        folder = tiny.world(0)
        cfg = train_math.parse_settings([
            *FLAGS, "--seed", str(seed), "--dataset", str(folder / "questions"),
            *parts.pop("flags", ())])
        cfg = replace(cfg, output_dir=None)
        questions, held_out = train_math.load_questions(cfg)
        model, tokenizer = train_math.load(folder / "model", "cpu")
        fields = {name: parts.pop(name) for name in ("loss", "advantages") if name in parts}
        algorithm = train_math.ALGORITHMS["gspo"]._replace(**fields)
        with mock.patch.dict(train_math.ALGORITHMS, gspo=algorithm):
            rows = train_math.train(cfg, model, tokenizer, questions, held_out, **parts)
        write(kept, rows)
    return read(kept)


def answers():
    """{letter: the bug of its published log}: the first seven of BUGS, shuffled, and then a second
    correct run."""
    names = random.Random(2507).sample(list(BUGS)[:7], 7)
    return dict(zip(LETTERS, [*names, "nothing"]))


def packed(logs):
    """The rows of all logs, {name: rows}, each with the name of its log."""
    return [{"log": name, **row} for name, rows in logs.items() for row in rows]


def published():
    """The published logs as the exercise shows them, {letter: rows}. If they are missing, they are
    made."""
    if not LOGS.exists():
        logs = {}
        for letter, name in answers().items():
            seed = SECOND_SEED if letter == "h" else 0
            logs[letter] = [shown(row) for row in run(name, seed)]
        write(LOGS, packed(logs))
    return read_packed(LOGS)


def shown(row):
    """What the exercise shows of a row of metrics, with four digits."""
    kept = {"step": row["step"]}
    for name in (*METRICS, "eval_reward"):
        if name in row:
            kept[name] = None if row[name] is None else float(f"{row[name]:.4g}")
    return kept


# ---- the hand-out for a class --------------------------------------------------------------------


def hand_out(folder, seed):
    """Makes eight runs, whose seeds and letters come from this seed. Writes the exercise into a new
    folder, and its key into runs/keys. Returns the path of the key."""
    key = Path("runs", "keys", f"{folder.name}.md")
    for path in folder, key:
        if path.exists():
            sys.exit(f"{path} exists already, so nothing was written")
        make_writable(path)
    names = list(answers().values())
    numbers = random.Random(seed)
    numbers.shuffle(names)
    seeds = numbers.sample(range(10**6), len(names))  # the first reward of a log shows its seed
    logs = {}
    for letter, name, run_seed in zip(LETTERS, names, seeds):
        logs[letter] = [shown(row) for row in run(name, run_seed)]
    folder.mkdir(parents=True)
    exercise, _, _ = PAGE.read_text(encoding="utf-8").partition("<details>")
    (folder / PAGE.name).write_text(exercise, encoding="utf-8")
    write(folder / LOGS.name, packed(logs))
    draw(logs, folder / LOGS.with_suffix(".png").name)
    lines = [[letter, name, *ranges(logs[letter])] for letter, name in zip(LETTERS, names)]
    table = markdown(["log", "what is wrong", *PANELS], lines)
    key.write_text(KEY.format(seed=seed, table=table), encoding="utf-8")
    return key


# ---- picture and table ---------------------------------------------------------------------------


def sizes(rows, name):
    """The absolute values of this metric over the rollouts. A missing value is NaN."""
    return [math.nan if row[name] is None else abs(row[name]) for row in rows[1:]]


def ranges(rows):
    """For each metric of the picture, its lowest and its highest absolute value."""
    found = []
    for name in PANELS:
        known = [value for value in sizes(rows, name) if value == value]
        found.append(f"{min(known):.2g} to {max(known):.2g}")
    return found


def draw(logs, path):
    """A row of panels for each log, {letter: rows}. The panels of a column have the same scale."""
    figure = Figure((12, 1.45 * len(logs) + 1), layout="constrained")
    axes = figure.subplots(len(logs), len(PANELS), sharex=True, sharey="col")
    for line, (letter, rows) in zip(axes, logs.items()):
        for axis, (name, (_, scale)) in zip(line, PANELS.items()):
            values = sizes(rows, name)
            if scale == "log":
                values = [max(value, LOWEST) for value in values]  # 0 is not on such an axis
            axis.plot(range(1, len(rows)), values, ".-", color=BLUE)
            axis.set_yscale(scale)
            axis.tick_params(labelsize=9)
            axis.grid(alpha=0.3)
        line[0].set_ylabel(letter, rotation=0, fontsize=16, labelpad=16)
        evaluated = [rows[0]["eval_reward"], rows[-1]["eval_reward"]]
        line[0].plot([0, len(rows) - 1], evaluated, "s", color="black", markerfacecolor="white")
    for axis, (name, (unit, _)) in zip(axes[0], PANELS.items()):
        axis.set_title(f"{name}\n({unit})", fontsize=10)
    for axis in axes[-1]:
        axis.set_xticks([0, 4, 8])
    figure.suptitle("Each row is a log. Six logs differ from a correct run in at least one panel.")
    figure.supxlabel("rollout (white squares: eval_reward, the accuracy on held-out questions)")
    figure.savefig(path, dpi=150)
    shrink(path)


def averages(rows):
    """{metric: the mean of its absolute value over the rollouts}, and eval_reward at the end."""
    values = {"eval_reward": rows[-1]["eval_reward"]}
    for name in METRICS:
        known = [value for value in sizes(rows, name) if value == value]
        values[name] = sum(known) / len(known)
    return values


def bugs_table():
    """A line for each bug; what differs by a factor of two is bold."""
    healthy = averages(run("nothing"))
    lines = []
    for name in BUGS:
        cells = []
        for metric, value in averages(run(name)).items():
            far = not healthy[metric] / 2 <= value <= 2 * healthy[metric]
            cells.append(f"**{value:.2g}**" if far else f"{value:.2g}")
        lines.append([name, *cells])
    return markdown(["wrong", *healthy], lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true",
                        help="run all twelve bugs, and print a table of their metrics")
    parser.add_argument("--handout", type=Path, metavar="FOLDER",
                        help="write an exercise for a class to FOLDER")
    parser.add_argument("--seed", type=int, help="number of an earlier hand-out, from its key")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
    if args.seed is not None and not args.handout:
        parser.error("--seed needs --handout")
    if args.handout:
        seed = secrets.randbelow(10**12) if args.seed is None else args.seed
        key = hand_out(args.handout, seed)
        print(f"wrote {args.handout}, and {key} (the key, which is not for students)")
    elif args.all:
        print(bugs_table(), end="")
    else:
        draw(published(), LOGS.with_suffix(".png"))
        print(f"wrote {LOGS.with_suffix('.png')}, the picture of {LOGS}")


if __name__ == "__main__":
    main()
