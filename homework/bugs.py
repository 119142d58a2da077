"""Silent bugs: runs on the small world with one mistake each and no error, for find_the_bug.md.

    python -m homework.bugs --seed N --handout FOLDER    an exercise for a class, and its key
    python -m homework.bugs --seed N                     the key again
    python -m homework.bugs --seed N --all FILE.png      the metrics of all twelve bugs

N decides the letters and the seeds of an exercise: take a long number, and keep it secret. A run
takes half a minute on an idle core. Do not read on before you have solved find_the_bug.md.
"""
import argparse
import random
from pathlib import Path
from unittest import mock

import torch
from matplotlib.figure import Figure

import train_math
from gspo import clipped_objective, group_advantages, gspo_loss
from lesson import tiny
from support.models import adamw, load
from support.runs import write_lines
from support.task import load_questions

PAGE = Path(__file__).with_name("find_the_bug.md")
FLAGS = """--learning_rate 3e-4 --eps_low 0.003 --eps_high 0.004 --max_steps 8 --save_steps 8
    --instruction= --output_dir=""".split()
SHOWN = """step reward eval_reward response_length cut equal_reward_groups entropy loss grad_norm
    clip_fraction log_ratio_first_max log_ratio_std""".split()
PANELS = {  # metric: what the picture says about it
    "reward": "mean", "response_length": "tokens", "equal_reward_groups": "fraction",
    "loss": "absolute value", "grad_norm": "before clipping",
    "clip_fraction": "fraction of tokens", "log_ratio_std": "of log s"}


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
        batch.mask &= batch.ids[:, 1:] != 1  # the end token
    return minibatches


def without_first_token(rollout, advantages, cfg):
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
    return gspo_loss(*arguments[:-1])  # without the denominator


def without_zero_grad(model):
    optimizer = adamw(model)
    optimizer.zero_grad = lambda: None
    return optimizer


BUGS = {  # the bug: what makes it (some of Parts, fields of Algorithm, or flags)
    "nothing": {},
    "the ratio is always 1: the current log-probs replace the old ones": {"loss": against_itself},
    "zero_grad is missing": {"make_optimizer": without_zero_grad},
    "advantages are given to the wrong responses": {"build_minibatches": others_advantages},
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


# ---- the runs and the exercise -------------------------------------------------------------------


def run(name, seed):
    """The rows of metrics of a run with this bug, without the settings, which would tell it."""
    parts = dict(BUGS[name])
    world = tiny.world(0)
    words = [*tiny.FLAGS, *FLAGS, *parts.pop("flags", ())]
    cfg = train_math.parse_settings([*words, f"--seed={seed}", f"--dataset={world / 'questions'}"])
    questions, held_out = load_questions(cfg)
    model, tokenizer = load(world / "model", "cpu")
    fields = {key: parts.pop(key) for key in ("loss", "advantages") if key in parts}
    algorithm = train_math.ALGORITHMS["gspo"]._replace(**fields)
    with mock.patch.dict(train_math.ALGORITHMS, gspo=algorithm):
        rows = train_math.train(cfg, model, tokenizer, questions, held_out, **parts)
    return [{key: row[key] for key in SHOWN if key in row} for row in rows]


def key(seed):
    """{letter: (bug, seed of its run)}: six bugs and two correct runs, shuffled by this seed."""
    numbers = random.Random(seed)
    names = [*list(BUGS)[:7], "nothing"]
    numbers.shuffle(names)
    return dict(zip("abcdefgh", zip(names, numbers.sample(range(10**6), len(names)))))


def hand_out(folder, seed):
    """Writes the page without its answers, the logs of eight new runs, and their picture."""
    logs = {letter: run(*bug) for letter, bug in key(seed).items()}
    folder.mkdir(parents=True)
    exercise, _, _ = PAGE.read_text(encoding="utf-8").partition("<details>")
    (folder / PAGE.name).write_text(exercise, encoding="utf-8")
    rows = [{"log": letter, **row} for letter, rows in logs.items() for row in rows]
    write_lines(rows, folder / "bugs.jsonl")
    draw(logs, folder / "bugs.png")


def draw(logs, path):
    """A row of panels for each log, {letter: rows}. The panels of a column have the same scale."""
    figure = Figure((12, 1.45 * len(logs) + 1), layout="constrained")
    axes = figure.subplots(len(logs), len(PANELS), sharex=True, sharey="col")
    for line, (letter, rows) in zip(axes, logs.items()):
        for axis, name in zip(line, PANELS):
            values = [float("nan") if row[name] is None else abs(row[name]) for row in rows[1:]]
            if name in ("loss", "grad_norm"):
                values = [max(value, 1e-9) for value in values]  # 0 is not on such an axis
                axis.set_yscale("log")
            axis.plot(range(1, len(rows)), values, ".-", color="#0072B2")
            axis.grid(alpha=0.3)
        line[0].set_ylabel(letter, rotation=0, fontsize=16)
        evaluated = [rows[0]["eval_reward"], rows[-1]["eval_reward"]]
        line[0].plot([0, len(rows) - 1], evaluated, "s", color="black", markerfacecolor="white")
    for axis, (name, meaning) in zip(axes[0], PANELS.items()):
        axis.set_title(f"{name}\n({meaning})", fontsize=10)
    figure.supxlabel("rollout (white squares: eval_reward, the accuracy on held-out questions)")
    figure.savefig(path, dpi=100)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True, help="a secret number")
    parser.add_argument("--handout", type=Path, metavar="FOLDER", help="write an exercise there")
    parser.add_argument("--all", type=Path, metavar="FILE.png", help="draw all twelve bugs there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
    if args.all:
        return draw({i: run(name, args.seed) for i, name in enumerate(BUGS)}, args.all)
    if args.handout:
        if args.handout.exists():
            parser.error(f"{args.handout} exists already, so nothing was written")
        hand_out(args.handout, args.seed)
    for letter, (bug, _) in key(args.seed).items():
        print(f"{letter}: {bug}")


if __name__ == "__main__":
    main()
