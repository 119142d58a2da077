"""GSPO, GRPO, no clip and one update per rollout on the small world, on several worlds and seeds.

    python -m evidence.lesson_seeds report   the planned test, on four worlds: an hour or more
    python -m evidence.lesson_seeds lesson   the runs that the lesson shows
    python -m evidence.lesson_seeds picture  draws lesson/collapse.png from the log

plans/lesson.md states the settings, the criterion and the pairs of world and seed. A run that is in
the log is not repeated, so an interrupted command can be run again.
"""
import argparse
import json
import shutil
import statistics
import time
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.figure import Figure

from lesson import tiny
from support.models import load
from tools import plot
from tools.answers import markdown
from tools.logs import append, make_writable, read, read_packed

PICTURE = Path(tiny.__file__).with_name("collapse.png")
LOG = Path(__file__).with_name("logs") / "lesson.jsonl.gz"
LEARNING_RATE = ["--learning_rate", "4.5e-4"]  # also the default of lesson/tiny.py
VARIANTS = {
    "GSPO": ["--algorithm", "gspo", "--eps_low", "0.01", "--eps_high", "0.0133"],
    "GRPO": ["--algorithm", "grpo", "--eps_low", "0.2", "--eps_high", "0.267"],
    "no clip": ["--eps_low", "1", "--eps_high", "1e9"],  # a range that no ratio can leave
    "one update": ["--minibatches", "1", "--epochs", "1"]}
ONE_EPOCH = [*VARIANTS["GSPO"], "--epochs", "1"]
FRESH = [(world, seed) for world in (11, 12, 13, 14) for seed in (51, 52, 53)]
LOW = 0.35  # the plan's criterion of a collapse: a final held-out greedy accuracy below this
SUCCESS = 0.90  # a run succeeded if that accuracy is at least this


def runs_of(part):
    """{(variant, world, seed): rows of metrics} of all runs of a part of the log."""
    return {(line["variant"], line["world"], line["seed"]): line["rows"]
            for line in read_packed(LOG).get(part, [])}


def run(part, variant, flags, world, seed):
    """Makes one run and adds it to the log, unless it is there. Its last row also has the sampled
    held-out accuracy and the CPU seconds of the whole run."""
    if (variant, world, seed) in runs_of(part):
        return
    output = Path("runs/seeds", f"{part}-{variant.replace(' ', '_')}-{world}-{seed}")
    tiny.world(world)  # made beforehand, so that its time is not counted
    began = time.process_time()
    shutil.rmtree(output, ignore_errors=True)
    tiny.main(["--world", str(world), "--seed", str(seed), "--output_dir", str(output),
               *LEARNING_RATE, *flags])
    cpu_seconds = time.process_time() - began
    model, tokenizer = load(output / "model", "cpu")
    rows = read(output / "metrics.jsonl")
    rows[-1]["sampled"] = tiny.accuracy(model, tokenizer, tiny.questions()[1], 1.0)
    rows[-1]["cpu_seconds"] = cpu_seconds
    rows[0]["start"] = json.loads((tiny.world(world) / "start.json").read_text())
    append(LOG, {"log": part, "variant": variant, "world": world, "seed": seed, "rows": rows})
    shutil.rmtree(output)


def report():
    """The planned test: all variants of a pair before the next pair."""
    for pair, name in product(FRESH, VARIANTS):
        run("report", name, VARIANTS[name], *pair)


def lesson():
    """On world 0: all variants with seed 0, and with the seeds 0 to 2 those that differ only in the
    number of updates per rollout (32, 8 and 1)."""
    for name, flags in VARIANTS.items():
        run("lesson", name, flags, 0, 0)
    for seed in range(3):
        run("lesson", "GSPO", VARIANTS["GSPO"], 0, seed)
        run("lesson", "one epoch", ONE_EPOCH, 0, seed)
        run("lesson", "one update", VARIANTS["one update"], 0, seed)


def ends(runs):
    """The mean final held-out accuracy of these runs in percent: greedy / sampled."""
    return " / ".join(f"{100 * fmean(rows[-1][name] for rows in runs):.1f}"
                      for name in ("eval_reward", "sampled"))


def table():
    """The runs of the planned test, and a summary with a line for each variant."""
    runs = runs_of("report")
    lines = []
    for pair in FRESH:
        start = runs["GSPO", *pair][0]["start"]
        lines.append(["{}, {}".format(*pair),
                      f"{100 * start['0.0']:.1f} / {100 * start['1.0']:.1f}",
                      *(ends([runs[name, *pair]]) for name in VARIANTS)])
    summary = []
    for name in VARIANTS:
        own = [runs[name, *pair] for pair in FRESH]
        greedy = [rows[-1]["eval_reward"] for rows in own]
        collapsed = [rows[-1]["sampled"] < rows[0]["start"]["1.0"] for rows in own]
        settings = own[0][0]["settings"]
        ratios = [runs[name, *pair][-1]["cpu_seconds"]
                  / runs["one update", *pair][-1]["cpu_seconds"] for pair in FRESH]
        summary.append([
            name, ends(own), f"{sum(x >= SUCCESS for x in greedy)} of {len(own)}",
            f"{sum(collapsed)} of {len(own)}", f"{sum(x < LOW for x in greedy)} of {len(own)}",
            settings["minibatches"] * settings["epochs"] * settings["max_steps"],
            f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"])
    return markdown(["world, seed", "before training", *VARIANTS], lines) + "\n" + markdown(
        ["variant", "mean greedy / sampled", "runs of at least 90%", "sampled, below the start",
         "greedy, below 35%", "optimizer steps", "CPU seconds of the run, in units of one update's "
         "(median; least to most)"], summary)


def updates():
    """The table of three numbers of updates per rollout on world 0, with the seeds 0 to 2."""
    lines = []
    for name, number in (("one update", 1), ("one epoch", 8), ("GSPO", 32)):
        runs = [rows for (variant, *_), rows in runs_of("lesson").items() if variant == name]
        first = [next(row["step"] for row in rows[1:] if row["reward"] >= 0.9) for rows in runs]
        lines.append([
            number, f"{fmean(rows[-1]['cpu_seconds'] for rows in runs):.0f}",
            ", ".join(map(str, first)), f"{fmean(rows[4]['eval_reward'] for rows in runs):.1%}",
            f"{fmean(rows[-1]['sampled'] for rows in runs):.1%}"])
    return markdown(["updates per rollout", "CPU seconds, mean", "first step with a reward of 90%, "
                     "per seed", "greedy after step 4, mean", "sampled at the end, mean"], lines)


def draw_collapse():
    """The picture of the front page: GSPO with and without its clip. A thin line is a run, and a
    bold one with markers is the mean."""
    figure = Figure((8, 4.4), layout="constrained")
    axis = figure.subplots()
    runs = runs_of("report")
    for name, label, kind, marker in (("GSPO", "GSPO", "gspo", "o"),
                                      ("no clip", "GSPO without its clip", "no clipping", "^")):
        color, line = plot.STYLES[kind]
        curves = [[100 * row["reward"] for row in runs[name, *pair][1:]] for pair in FRESH]
        steps = range(1, len(curves[0]) + 1)
        for values in curves:
            axis.plot(steps, values, line, color=color, alpha=0.25, linewidth=0.8)
        axis.plot(steps, list(map(fmean, zip(*curves))), line, marker=marker, markersize=4,
                  color=color, linewidth=2.5, label=label)
    axis.set(ylim=(0, 100), ylabel="accuracy of the sampled responses (%)", xlabel="rollout",
             xticks=range(2, 17, 2), title=f"At a learning rate of {LEARNING_RATE[1]}, the mean "
                                           f"accuracy of {len(FRESH)} runs falls without the clip")
    axis.grid(alpha=0.3)
    figure.legend(title=f"bold with markers: mean of {len(FRESH)} runs; thin: one run",
                  handlelength=4, loc="outside lower center", ncols=2)
    figure.savefig(PICTURE, dpi=150)
    plot.shrink(PICTURE)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = {"report": report, "lesson": lesson, "picture": draw_collapse}
    parser.add_argument("part", choices=parts, help="which runs to make, or the picture")
    part = parser.parse_args().part
    make_writable(LOG)
    torch.set_num_threads(1)
    parts[part]()


if __name__ == "__main__":
    main()
