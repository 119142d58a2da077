"""GSPO, GRPO and no clip, each at its best learning rate: as plans/learning_rates.md says.

    OMP_NUM_THREADS=1 python -m evidence.tiny.learning_rates            makes what is missing
    OMP_NUM_THREADS=1 python -m evidence.tiny.learning_rates --models 1 3 --tasks long    a part

A starting model takes some 12 minutes of one core on the long task, and 13 on the small world. Each
run is a line of results/tiny/learning_rates.jsonl, and no run is made twice, so an interrupted
command can simply be given again. Several processes can share the work if each has its own models
or task. Afterwards, and with --models 0 at once, the tables are printed and kept in
results/tiny/learning_rates.md, and results/tiny/learning_rates.png is drawn.
"""
import argparse
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure

import train_math
from evidence.comparisons import runs
from evidence.comparisons.settings import GRPO, GSPO, NO_LOWER_BOUND, variant
from lesson.seeds import STYLES
from tools.logs import append, mean_difference, read

RESULTS = Path(__file__).parents[1] / "results" / "tiny"
LOG = RESULTS / "learning_rates.jsonl"
MODELS = {"long": (17, 18, 19, 20, 21, 22), "world": (31, 32, 33, 34, 35, 36)}
RATES = {
    "GSPO": (1e-4, 2e-4, 3e-4, 6e-4),
    "GRPO": (1e-4, 2e-4, 3e-4, 6e-4),
    "no clip": (3e-5, 1e-4, 2e-4, 3e-4, 6e-4)}
GRID = [(name, rate) for name, rates in RATES.items() for rate in rates]
RANGES = {  # the lower ones, chosen on other starting models at a learning rate of 3e-4
    "long": {"GSPO": 0.01, "GRPO": 0.1, "no clip": NO_LOWER_BOUND},
    "world": {"GSPO": 0.03, "GRPO": 0.4, "no clip": NO_LOWER_BOUND}}
QUESTIONS = {"validation": ("1.0", "0.7", "0.5"), "held out": ("1.0", "0.7", "0.5", "0.0")}
TITLES = {"long": "long task, 16 updates per rollout",
          "world": "small world, 32 updates per rollout"}


# ---- runs ----------------------------------------------------------------------------------------


def run(task, start, name, rate):
    """Make one run and append its line to the log, unless it is there."""
    line = {"task": task, "start": start, "algorithm": name, "learning_rate": rate}
    if any(row == row | line for row in read(LOG)):
        return
    line["before"] = runs.cold_start(task, start)
    algorithm = GRPO if name == "GRPO" else GSPO
    spec = variant(algorithm, RANGES[task][name], task=task, learning_rate=rate)
    model, tokenizer = train_math.load(runs.cold_folder(task, start), "cpu")
    try:
        rows = runs.train(spec, model, tokenizer, 100 * start)
        for metric in (*runs.KEPT, "seconds"):
            line[metric] = [runs.four_digits(row[metric]) for row in rows]
    except FloatingPointError as problem:
        line["problem"] = str(problem)
    for questions, temperatures in QUESTIONS.items():
        line[questions] = dict.fromkeys(temperatures, 0.0)  # for a run that diverged
        if "problem" not in line:
            for t in temperatures:
                line[questions][t] = runs.accuracy(
                    model, tokenizer, task, start, questions, float(t))
    append(LOG, line)
    print(task, start, name, rate, line["validation"], line["held out"], flush=True)


# ---- tables and picture --------------------------------------------------------------------------


def finished_runs(rows):
    """{task: {(algorithm, learning rate): lines}} of the starting models that have all runs. A task
    without such a starting model is left out."""
    found = {(row["task"], row["start"], row["algorithm"], row["learning_rate"]): row
             for row in rows}
    tasks = {}
    for task, starts in MODELS.items():
        models = [start for start in starts
                  if all((task, start, *setting) in found for setting in GRID)]
        if models:
            tasks[task] = {setting: [found[task, start, *setting] for start in models]
                           for setting in GRID}
    return tasks


def values(lines, questions, temperature):
    return [line[questions][temperature] for line in lines]


def choice(found, name):
    """(learning rate, temperature) of an algorithm, from the validation questions alone.

    In a tie, the lower learning rate and the higher temperature are taken."""
    def mean(rate, temperature):
        return statistics.fmean(values(found[name, rate], "validation", temperature))

    best = max(RATES[name], key=lambda rate: mean(rate, "1.0"))
    temperatures = QUESTIONS["validation"]
    return best, max(temperatures, key=lambda temperature: mean(best, temperature))


def percent(shares):
    return f"{100 * statistics.fmean(shares):.1f}%"


def row_of(cells):
    return f"| {' | '.join(cells)} |"


def grid(tasks):
    """The mean accuracies of every algorithm and learning rate."""
    lines = ["| task | algorithm | learning rate | validation, sampled | held out, sampled "
             "| at 0.7 | at 0.5 | greedy | held out, sampled, each model |", "|---" * 9 + "|"]
    for task, found in tasks.items():
        for (name, rate), own in found.items():
            cells = [task, name, f"{rate:g}", percent(values(own, "validation", "1.0"))]
            for temperature in QUESTIONS["held out"]:
                cells.append(percent(values(own, "held out", temperature)))
            each = [percent([share]) for share in values(own, "held out", "1.0")]
            lines.append(row_of([*cells, " ".join(each)]))
    return "\n".join(lines)


def comparison(tasks):
    """The algorithms at the learning rates that were chosen, on the held-out questions."""
    lines = [f"| task | models | decoding | {' | '.join(RATES)} | GSPO minus GRPO, points "
             "| GSPO minus no clip, points |", "|---" * 8 + "|"]
    choices = ["\nChosen on the validation questions:\n"]
    for task, found in tasks.items():
        held_out = {"sampled": {}, "best temperature": {}, "greedy": {}}
        for name, rates in RATES.items():
            rate, temperature = choice(found, name)
            edge = ", an end of the grid" if rate in (rates[0], rates[-1]) else ""
            choices.append(f"- {task}, {name}: learning rate {rate:g}{edge}; "
                           f"best temperature {temperature}")
            for decoding, at in zip(held_out, ("1.0", temperature, "0.0")):
                held_out[decoding][name] = values(found[name, rate], "held out", at)
        for decoding, own in held_out.items():
            cells = [task, str(len(own["GSPO"])), decoding, *map(percent, own.values())]
            for other in ("GRPO", "no clip"):
                cells.append(mean_difference(own["GSPO"], own[other], narrowest=2))
            lines.append(row_of(cells))
    return "\n".join(lines + choices)


def tables(tasks):
    return f"{comparison(tasks)}\n\n{grid(tasks)}\n"


def draw(tasks, path):
    """Sampled held-out accuracy against the learning rate, with a panel for each task."""
    figure = Figure((1 + 5 * len(tasks), 4.6), layout="constrained")
    axes = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axis, (task, found) in zip(axes, tasks.items()):
        for name, rates in RATES.items():
            color, line, marker = STYLES[name]
            curves = [[100 * x for x in values(found[name, rate], "held out", "1.0")]
                      for rate in rates]
            means = [statistics.fmean(curve) for curve in curves]
            axis.plot(rates, curves, line, color=color, alpha=0.4, linewidth=0.7)
            axis.plot(rates, means, line, marker=marker, color=color, linewidth=2.5, label=name)
        ticks = RATES["no clip"]
        axis.set(xscale="log", xticks=ticks, xticklabels=[f"{rate:g}" for rate in ticks],
                 xlabel="learning rate", ylim=(0, 100),
                 title=f"{TITLES[task]}, {len(curves[0])} models")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy at temperature 1 (%)")
    figure.suptitle("Accuracy on the held-out questions after training, by learning rate")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  title="bold: mean; thin: one starting model")
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, nargs="+", choices=range(7), default=range(1, 7),
                        help="which starting models, counted from 1; 0: no run, only the tables")
    parser.add_argument("--tasks", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs.COLD.mkdir(parents=True, exist_ok=True)
    for model in filter(None, args.models):
        for task in args.tasks:
            for name, rate in GRID:
                run(task, MODELS[task][model - 1], name, rate)
    tasks = finished_runs(read(LOG))
    text = tables(tasks)
    (RESULTS / "learning_rates.md").write_text(text)
    if tasks:
        draw(tasks, RESULTS / "learning_rates.png")
    print(text)


if __name__ == "__main__":
    main()
