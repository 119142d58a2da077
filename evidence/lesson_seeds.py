"""GSPO, GRPO, no clip and one update per rollout on the small world, on several worlds and seeds.

    python -m evidence.lesson_seeds report   four fresh worlds: an hour or more
    python -m evidence.lesson_seeds lesson   the runs that the lesson shows
    python -m evidence.lesson_seeds picture  draws lesson/collapse.png from the log

`report` trains on fresh pairs of world and seed. evidence/plans/lesson.md states the settings, the
criterion and the pairs, and was committed before these runs. The runs that chose the clip ranges
are in the log, too. A run that is in evidence/logs/lesson.jsonl.gz is not repeated. If a command is
interrupted, run it again to continue. `python -m evidence.tables` makes the tables.
"""
import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.figure import Figure

import train_math
from lesson import tiny
from tools import plot
from tools.answers import markdown
from tools.logs import append, make_writable, read, read_packed

PICTURE = Path(tiny.__file__).with_name("collapse.png")
LOG = Path(__file__).with_name("logs") / "lesson.jsonl.gz"
LEARNING_RATE = ["--learning_rate", "4.5e-4"]  # now the default of lesson/tiny.py, too
CHOICE = [(1, 41), (1, 42)]  # (world, seed) of the runs that chose the ranges
CHOICE_NO_CLIP = [(1, 41), (0, 41), (0, 42)]
FRESH = [(world, seed) for seed in (51, 52, 53) for world in (11, 12, 13, 14)]
RANGES = {"GSPO": (0.01, 0.03), "GRPO": (0.2, 0.4)}  # the lower clip ranges to choose from
LOW = 0.35  # the plan's criterion of a collapse: a final held-out greedy accuracy below this
SUCCESS = 0.90  # a run succeeded if that accuracy is at least this
NAMES = "GSPO", "GRPO", "no clip", "one update"  # of the variants


def clipped(algorithm, low):
    """The flags of an algorithm and its clip range. The upper one is 4/3 of the lower one."""
    return ["--algorithm", algorithm.lower(), "--eps_low", str(low),
            "--eps_high", f"{low * 4 / 3:.3g}"]


VARIANTS = {  # GSPO and GRPO are added in report(), with the ranges that were chosen
    "no clip": ["--eps_low", "1", "--eps_high", "1e9"],  # a range that no ratio can leave
    "one update": ["--minibatches", "1", "--epochs", "1"]}


def runs_of(part):
    """{(variant, world, seed): rows of metrics} of all runs of a part of the log."""
    return {(line["variant"], line["world"], line["seed"]): line["rows"]
            for line in read_packed(LOG).get(part, [])}


def run(part, variant, flags, world, seed):
    """Make one run and append it to the log, unless it is there.

    Its last row also has the sampled held-out accuracy and the CPU seconds of the whole run."""
    if (variant, world, seed) in runs_of(part):
        return
    output = Path("runs/seeds", f"{part}-{variant.replace(' ', '_')}-{world}-{seed}")
    tiny.world(world)  # made beforehand, so that its time is not counted
    began = time.process_time()
    shutil.rmtree(output, ignore_errors=True)
    tiny.main(["--world", str(world), "--seed", str(seed), "--output_dir", str(output),
               *LEARNING_RATE, *flags])
    cpu_seconds = time.process_time() - began
    model, tokenizer = train_math.load(output / "model", "cpu")
    rows = read(output / "metrics.jsonl")
    rows[-1]["sampled"] = tiny.accuracy(model, tokenizer, tiny.questions()[1], 1.0)
    rows[-1]["cpu_seconds"] = cpu_seconds
    rows[0]["start"] = json.loads((tiny.world(world) / "start.json").read_text())
    append(LOG, {"log": part, "variant": variant, "world": world, "seed": seed, "rows": rows})
    shutil.rmtree(output)
    print(f"{variant}, world {world}, seed {seed}: greedy {rows[-1]['eval_reward']:.2f}, "
          f"sampled {rows[-1]['sampled']:.2f}, CPU {cpu_seconds:.0f} s", flush=True)


def chosen_range(algorithm):
    """The lower range with the highest mean sampled accuracy over the CHOICE pairs."""
    runs = runs_of("choose")

    def mean(low):
        return fmean(runs[f"{algorithm} {low}", *pair][-1]["sampled"] for pair in CHOICE)

    return max(RANGES[algorithm], key=mean)


def report(pairs=FRESH, part="report"):
    """The runs on the fresh pairs: all variants of a pair before the next pair."""
    variants = VARIANTS | {algorithm: clipped(algorithm, chosen_range(algorithm))
                           for algorithm in RANGES}
    for world, seed in pairs:
        for name in NAMES:
            run(part, name, variants[name], world, seed)


def lesson():
    """The runs that the lesson shows, on world 0: all variants with seed 0, and with the seeds 0 to
    2 those that differ only in the number of updates per rollout (32, 8 and 1)."""
    report([(0, 0)], "lesson")
    gspo = clipped("GSPO", chosen_range("GSPO"))
    variants = {"GSPO": gspo, "one epoch": [*gspo, "--epochs", "1"],
                "one update": VARIANTS["one update"]}
    for seed in range(3):
        for name, flags in variants.items():
            run("lesson", name, flags, 0, seed)


# ---- table and picture ---------------------------------------------------------------------------


def accuracies(*runs):
    """The mean final held-out accuracy of these runs in percent: greedy / sampled."""
    return " / ".join(f"{100 * fmean(rows[-1][name] for rows in runs):.1f}"
                      for name in ("eval_reward", "sampled"))


def choice_table():
    """The table of the runs from which the ranges were chosen."""
    runs = runs_of("choose")
    lines = []
    for name in (f"{algorithm} {low}" for algorithm, lows in RANGES.items() for low in lows):
        own = [runs[name, *pair] for pair in CHOICE]
        lines.append([name, *map(accuracies, own), accuracies(*own)])
    without = [f"world {world}, seed {seed}: {accuracies(runs['no clip', world, seed])}"
               for world, seed in CHOICE_NO_CLIP]
    table = markdown(["variant", *(f"world {world}, seed {seed}" for world, seed in CHOICE),
                      "mean"], lines)
    return f"{table}\nWithout a clip: {'; '.join(without)}\n"


def report_table(runs):
    """The table of the fresh pairs, and a summary with a line for each variant.

    runs: {variant: {pair: rows}}, with the same pairs for all variants."""
    lines = []
    for (world, seed), rows in runs["GSPO"].items():
        start = rows[0]["start"]
        lines.append([f"{world}, {seed}", f"{100 * start['0.0']:.1f} / {100 * start['1.0']:.1f}",
                      *(accuracies(own[world, seed]) for own in runs.values())])
    summary = []
    for name, own in runs.items():
        greedy = [rows[-1]["eval_reward"] for rows in own.values()]
        collapsed = [rows[-1]["sampled"] < rows[0]["start"]["1.0"] for rows in own.values()]
        settings = own[FRESH[0]][0]["settings"]
        ratios = [rows[-1]["cpu_seconds"] / runs["one update"][pair][-1]["cpu_seconds"]
                  for pair, rows in own.items()]
        summary.append([
            name, accuracies(*own.values()),
            f"{sum(x >= SUCCESS for x in greedy)} of {len(greedy)}",
            f"{sum(collapsed)} of {len(greedy)}",
            f"{sum(x < LOW for x in greedy)} of {len(greedy)}",
            settings["minibatches"] * settings["epochs"] * settings["max_steps"],
            f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"])
    return markdown(["world, seed", "before training", *runs], lines) + "\n" + markdown(
        ["variant", "mean greedy / sampled", "runs of at least 90%", "sampled, below the start",
         "greedy, below 35%", "optimizer steps", "CPU seconds of the run, in units of one update's "
         "(median; least to most)"], summary)


def draw_collapse():
    """The picture of the front page: GSPO with and without its clip. A thin line is a run, and a
    bold one with markers is the mean."""
    figure = Figure((8, 4.4), layout="constrained")
    axis = figure.subplots()
    runs = fresh_runs()
    for name, label, kind, marker in (("GSPO", "GSPO", "gspo", "o"),
                                      ("no clip", "GSPO without its clip", "no clipping", "^")):
        color, line = plot.STYLES[kind]
        curves = [[100 * row["reward"] for row in rows[1:]] for rows in runs[name].values()]
        steps = range(1, len(curves[0]) + 1)
        for values in curves:
            axis.plot(steps, values, line, color=color, alpha=0.25, linewidth=0.8)
        axis.plot(steps, [fmean(values) for values in zip(*curves)], line, marker=marker,
                  markersize=4, color=color, linewidth=2.5, label=label)
    axis.set(ylim=(0, 100), ylabel="accuracy of the sampled responses (%)", xlabel="rollout",
             xticks=range(2, 17, 2), title=f"At a learning rate of {LEARNING_RATE[1]}, the mean "
                                           f"accuracy of {len(FRESH)} runs falls without the clip")
    axis.grid(alpha=0.3)
    figure.legend(title=f"bold with markers: mean of {len(FRESH)} runs; thin: one run",
                  handlelength=4, loc="outside lower center", ncols=2)
    figure.savefig(PICTURE, dpi=150)
    plot.shrink(PICTURE)


def fresh_runs():
    """{variant: {pair: rows}} of the fresh pairs."""
    found = runs_of("report")
    return {name: {pair: found[name, *pair] for pair in sorted(FRESH)} for name in NAMES}


def table():
    """The tables as markdown."""
    chosen = [f"The lower range chosen for {algorithm}: {chosen_range(algorithm)}"
              for algorithm in RANGES]
    return "\n".join([
        "Final held-out accuracy in percent: greedy / sampled at temperature 1.\n",
        "Pairs on which the settings were chosen:\n",
        choice_table(),
        "\n\n".join(chosen),
        "\nFresh pairs: 12 of 12 are finished.\n",
        report_table(fresh_runs()),
        "The plan's criterion: at least 11 of the 12 runs without a clip collapse (greedy, below "
        "35%), and at least 11 of the 12 runs with GSPO reach 90%.\n"])


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
