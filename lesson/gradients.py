"""Runs of the small world with the right value of the loss and a changed gradient.

    OMP_NUM_THREADS=1 python -m lesson.gradients              makes the missing runs, and the table
    OMP_NUM_THREADS=1 python -m lesson.gradients table        makes the table from the logs

Four variants are bugs that no value of the loss shows, and the others multiply the loss by a
factor. All have the settings of the first run of the lesson. A run takes about a minute. The logs
are in results/gradients.jsonl, with one line per run, and the table is results/gradients.md.
"""
import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

import train_math
from gspo import clipped_objective, gspo_loss, sequence_ratio
from lesson import tiny
from tools.logs import append, mean_difference, read

RESULTS = Path(__file__).with_name("results")
SEEDS = range(5)
METRICS = ("reward", "eval_reward", "loss", "grad_norm", "clip_fraction", "log_ratio_std",
           "equal_reward_groups")
CAPTION = """`python -m lesson.gradients`: world 0, 16 rollouts, {seeds} seeds.
Means over the runs. In brackets: the runs. Step 1 has the same responses in all variants.
The difference is that of the mean reward, in points, with its 95% interval over the seeds.

"""


# ---- the right value, and another gradient -------------------------------------------------------


def twice(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator):
    """GSPO-token, but s is not detached: the response's and the token's own ratio both count."""
    own = (log_probs - log_probs.detach()).exp()
    ratio = sequence_ratio(log_probs, old_log_probs, mask)[:, None] * own
    objective = clipped_objective(ratio, advantages[:, None], eps_low, eps_high)
    return -((objective * mask).sum(1) / mask.sum(1)).sum() / denominator


def nothing(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator):
    """GSPO, but the old log-probs are the current ones, and they are not detached."""
    ratio = ((log_probs - log_probs) * mask).sum(1).exp()
    return -clipped_objective(ratio, advantages, eps_low, eps_high).sum() / denominator


def half(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator):
    """GSPO, but the ratio is detached before it is clipped. Inside the range, both arguments of
    the minimum are equal, and each gets half of the gradient."""
    ratio = sequence_ratio(log_probs, old_log_probs, mask)
    clipped = ratio.detach().clamp(1 - eps_low, 1 + eps_high)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum() / denominator


def log_of_zero(model, batch, temperature):
    """The log-probs, but the mask is applied to the probabilities. On padding, the derivative of
    the logarithm is infinite, and 0 times infinity is NaN."""
    logits = model(batch.ids).logits[:, :-1] / temperature
    probabilities = logits.softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0] * batch.mask
    return torch.where(batch.mask, probabilities.log(), 0)


def times(factor):
    def loss(*arguments):
        return factor * gspo_loss(*arguments)
    return loss


def kept_only(*arguments):
    """The mean over the responses that have a gradient. Here, a micro-batch is a minibatch."""
    *arguments, _ = arguments  # the last one is the denominator
    return gspo_loss(*arguments)


VARIANTS = {  # the loss, or a part of train_math.py
    "GSPO": {},
    "s is not detached in GSPO-token: twice the gradient": {"loss": twice},
    "the old log-probs are the current ones, not detached: no gradient": {"loss": nothing},
    "the ratio is detached before it is clipped: half of the gradient": {"loss": half},
    "the mask comes before the logarithm: NaN": {"response_log_probs": log_of_zero},
    "the loss times 0.1": {"loss": times(0.1)},
    "the loss times 100": {"loss": times(100)},
    "the denominator counts only responses with a gradient": {"loss": kept_only}}


# ---- runs and table ------------------------------------------------------------------------------


def run(name, seed):
    """{metric: its value in each step}; or {"stopped": the message} of a run that stops."""
    folder = tiny.world(0)
    cfg = train_math.parse_settings([
        *tiny.FLAGS, *tiny.RANGES["gspo"], "--seed", str(seed), "--instruction", "",
        "--dataset", str(folder / "questions")])
    cfg = replace(cfg, output_dir=None)
    questions, held_out = train_math.load_questions(cfg)
    model, tokenizer = train_math.load(folder / "model", "cpu")
    parts = dict(VARIANTS[name])
    algorithm = train_math.ALGORITHMS["gspo"]._replace(loss=parts.pop("loss", gspo_loss))
    try:
        with mock.patch.dict(train_math.ALGORITHMS, gspo=algorithm):
            rows = train_math.train(cfg, model, tokenizer, questions, held_out, **parts)
    except FloatingPointError as error:
        return {"stopped": str(error)}
    values = {}
    for metric in METRICS:
        found = [row[metric] for row in rows if row.get(metric) is not None]
        values[metric] = [float(f"{value:.4g}") for value in found]
    return values


def table(logs):
    """A line for each variant."""
    lines = ["| variant | grad_norm, step 1 | log_ratio_std, step 1 | reward, mean of all steps | "
             "minus GSPO | eval_reward at the end | reward at the end |", "|---" * 7 + "|"]
    first = None  # the mean rewards of the first variant
    for name in VARIANTS:
        runs = [log for log in logs if log["variant"] == name]
        if "stopped" in runs[0]:
            lines.append(f"| {name} | stops: {runs[0]['stopped'].partition('.')[0]} | | | | | |")
            continue
        cells = []
        for metric, part, form in (
                ("grad_norm", slice(1), ".3g"), ("log_ratio_std", slice(1), ".3g"),
                ("reward", slice(None), ".1%"), ("eval_reward", slice(-1, None), ".1%"),
                ("reward", slice(-1, None), ".1%")):
            values = [statistics.mean(log[metric][part]) for log in runs]
            single = ", ".join(f"{value:{form}}" for value in values)
            cells.append(f"{statistics.mean(values):{form}} ({single})")
        rewards = [statistics.mean(log["reward"]) for log in runs]
        first = first or rewards
        cells.insert(3, mean_difference(rewards, first) if rewards != first else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return CAPTION.format(seeds=len(SEEDS)) + "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", nargs="?", choices=["table"], help="only make the table")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
    path = RESULTS / "gradients.jsonl"
    done = {(log["variant"], log["seed"]) for log in read(path)}
    for seed in SEEDS:
        for name in VARIANTS:
            if args.part != "table" and (name, seed) not in done:
                append(path, {"variant": name, "seed": seed, **run(name, seed)})
    text = table(read(path))
    (RESULTS / "gradients.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
