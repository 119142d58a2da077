"""Is the movement of the policy a good clip range? Makes the runs that PLAN_range_rule.md plans.

    OMP_NUM_THREADS=1 python -m experiments.tiny.range_rule                               all runs
    OMP_NUM_THREADS=1 python -m experiments.tiny.range_rule --models 1 3 --tasks long    a part

The movement is the median of log_ratio_std over rollouts 2 to 4. A starting model takes about 8
minutes of one idle core on the long task, and 15 minutes on the small world. Each run is a line of
results/tiny/range_rule.jsonl, and no run is made twice. If the command is interrupted, run it again
to continue. Several processes can divide the work if each has its own models or its own task. At
the end, the tables are printed and written to results/tiny/range_rule.md. With --models 0, this is
all that is done.
"""
import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch

import train_math
from common.intervals import mean_difference
from common.logs import append, read
from experiments.comparisons import parts, runs

RESULTS = Path(__file__).parents[1] / "results" / "tiny"
LOG = RESULTS / "range_rule.jsonl"
FACTORS = (0.1, 0.5, 2, 8)  # the lower clip range in units of the movement
RULE = 0.5  # the factor that represents the rule
MEASURED = (2, 3, 4)  # the rollouts in which the movement is measured
PAPERS = 3e-4  # the lower clip range at which it is measured
MOST = 0.899  # the largest lower clip range: gspo.py refuses values from 0.9 to below 1
MODELS = {"long": (11, 12, 13, 14, 15, 16), "world": (21, 22, 23, 24, 25, 26)}
UPDATES = {  # {task: {optimizer steps per rollout: settings}}
    "long": {4: {"epochs": 1}, 16: {"epochs": 4}},
    "world": {4: {"epochs": 1, "minibatches": 4}, 32: {"epochs": 4, "minibatches": 8}}}
LEARNING_RATES = (1e-4, 3e-4)


# ---- runs ----------------------------------------------------------------------------------------


def train(task, updates, learning_rate, start, low, rollouts=None):
    """Train GSPO from a starting model with this lower clip range.

    rollouts: stop after this number, without a change of the learning rate schedule. Returns the
    model, its tokenizer and a row of metrics per rollout."""
    model, tokenizer = train_math.load(runs.cold_folder(task, start), "cpu")
    cfg = replace(runs.settings_of(task), **UPDATES[task][updates], seed=100 * start,
                  learning_rate=learning_rate, eps_low=low, eps_high=low * 4 / 3)
    questions = runs.TASKS[task].questions(cfg.seed, cfg.prompts_per_step * cfg.max_steps)
    stopped = []
    scored = []

    def reward(**columns):
        scored.append(True)
        if len(scored) == rollouts:
            stopped.append(True)
        return parts.task_reward(**columns)

    rows = train_math.train(cfg, model, tokenizer, questions, reward=reward, stopped=stopped)
    return model, tokenizer, rows[1:]


def held_out_accuracy(model, tokenizer, task, temperature, samples):
    """The accuracy on the held-out questions, with this number of samples per question."""
    torch.manual_seed(0)
    questions = runs.TASKS[task].questions("held out", 256)
    cfg = runs.settings_of(task)
    cfg = replace(cfg, rollout_rows=cfg.rollout_rows * cfg.group_size)
    accuracies = []
    for _ in range(samples):
        found = train_math.evaluate(
            model, tokenizer, questions, cfg, temperature, reward=parts.task_reward)
        accuracies.append(found["eval_reward"])
    return statistics.fmean(accuracies)


def movement_of(rows):
    """The median of log_ratio_std over the rollouts that are measured."""
    values = [row["log_ratio_std"] for row in rows if row["step"] in MEASURED]
    return statistics.median(value for value in values if value is not None)


def kept(rows):
    """The metrics that are logged, {name: values of all rollouts}."""
    names = ("reward", "entropy", "clip_fraction", "log_ratio_std", "seconds")
    return {name: [runs.four_digits(row[name]) for row in rows] for name in names}


def run(key, factor):
    """Make one run, or the measurement if the factor is None, and append its line to the log."""
    done = {(row["task"], row["updates"], row["learning_rate"], row["start"], row["factor"]): row
            for row in read(LOG)}
    if (*key, factor) in done:
        return
    task, updates, learning_rate, start = key
    before = runs.cold_start(task, start)
    line = dict(zip(("task", "updates", "learning_rate", "start"), key), factor=factor)
    if factor is None:
        _, _, rows = train(*key, PAPERS, max(MEASURED))
        line |= {"before": before, "movement": movement_of(rows), **kept(rows)}
    else:
        low = min(MOST, factor * done[*key, None]["movement"])
        line["eps_low"] = low
        try:
            model, tokenizer, rows = train(*key, low)
            line |= {"accuracy": held_out_accuracy(model, tokenizer, task, 1.0, 4),
                     "greedy": held_out_accuracy(model, tokenizer, task, 0.0, 1), **kept(rows)}
        except FloatingPointError as problem:  # it diverged: no answer is correct
            line |= {"accuracy": 0.0, "greedy": 0.0, "problem": str(problem)}
    append(LOG, line)
    print(" ".join(f"{name} {line[name]}" for name in line if not isinstance(line[name], list)),
          flush=True)


# ---- tables and picture --------------------------------------------------------------------------


def settings():
    return [(task, updates, learning_rate) for task in UPDATES for updates in UPDATES[task]
            for learning_rate in LEARNING_RATES]


def runs_of(rows, key):
    """{(starting model, factor): line} of one setting, and the models that have all factors."""
    found = {(row["start"], row["factor"]): row for row in rows
             if (row["task"], row["updates"], row["learning_rate"]) == key}
    finished = [start for start in MODELS[key[0]]
                if all((start, factor) in found for factor in (None, *FACTORS))]
    return found, finished


def tables(rows):
    """The accuracy for each setting and factor, and the predictions, over the finished models."""
    lines = ["| task | updates | learning rate | models | movement: least, median, most | "
             + " | ".join(f"{factor} times" for factor in FACTORS) + " | best minus 0.5 times "
             "| 8 times minus 0.5 times | 0.1 times minus 0.5 times |", "|---" * 12 + "|"]
    shortfall = []
    too_wide = []
    slow = []
    for key in settings():
        found, finished = runs_of(rows, key)
        if not finished:
            continue
        accuracy = {factor: [found[start, factor]["accuracy"] for start in finished]
                    for factor in FACTORS}
        means = {factor: statistics.fmean(accuracy[factor]) for factor in FACTORS}
        movements = [found[start, None]["movement"] for start in finished]
        gap = max(means.values()) - means[RULE]
        shortfall.append(gap)
        if key[1] >= 16:
            too_wide.append(means[8] < means[RULE])
        else:
            slow.append(means[0.1] < means[RULE])
        cells = [*key[:2], f"{key[2]:g}", len(finished), f"{min(movements):.2g}, "
                 f"{statistics.median(movements):.2g}, {max(movements):.2g}",
                 *(f"{100 * means[factor]:.1f}%" for factor in FACTORS), f"{100 * gap:.1f}",
                 *(mean_difference(accuracy[factor], accuracy[RULE]) for factor in (8, 0.1))]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    close = sum(gap <= 0.05 for gap in shortfall)
    lines += [
        "",
        f"1. 0.5 times the movement is at most 5 points below the best range in {close} of "
        f"{len(shortfall)} settings, and at most {100 * max(shortfall, default=0):.1f} points "
        "below it in all of them.",
        f"2. With 16 or 32 updates, 8 times the movement is worse than 0.5 times in "
        f"{sum(too_wide)} of {len(too_wide)} settings.",
        f"3. With 4 updates, 0.1 times the movement is worse than 0.5 times in {sum(slow)} of "
        f"{len(slow)} settings."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, nargs="+", choices=range(7), default=range(1, 7),
                        help="numbers of starting models, from 1 (0: only make the tables)")
    parser.add_argument("--tasks", nargs="+", choices=list(UPDATES), default=list(UPDATES),
                        help="only these tasks (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs.COLD.mkdir(parents=True, exist_ok=True)
    for model in filter(None, args.models):
        for task, updates, learning_rate in settings():
            if task in args.tasks:
                key = task, updates, learning_rate, MODELS[task][model - 1]
                for factor in (None, *FACTORS):
                    run(key, factor)
    text = tables(read(LOG))
    (RESULTS / "range_rule.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
