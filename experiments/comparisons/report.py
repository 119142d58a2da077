"""Tables and pictures of the runs that runs.py has logged; nothing is trained here.

    python -m experiments.comparisons.report all         all tables, and the pictures of the pages
    python -m experiments.comparisons.report NAME ...    those of some experiments

This reads results/comparisons/runs.jsonl and writes NAME.md and NAME.png beside it. --results
names another folder.
"""
import argparse
import json
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from common.logs import read
from common.plot import STYLES
from experiments.comparisons.settings import EARLY, EXPERIMENTS, GRPO, GSPO, NO_GATE, arm, opening

RESULTS = Path(__file__).parents[1] / "results" / "comparisons"
ROUNDING = RESULTS.parent / "precision" / "rounding"
STUDENT = {2: 12.71, 3: 4.303, 6: 2.571, 9: 2.306}  # number of starting models: t of a 95% interval
# No interval is narrower than this, because three starting models may agree by chance. 135
# differences between variants with an accuracy above 0.75 have a pooled standard deviation of
# 0.053. For six starting models, the limit is 0.02, which sampling 256 answers causes.
NARROWEST = {3: 0.06, 6: 0.02}
OPTIONAL = "experts changed", "sampled: greedy", "gradient norm"  # columns that may be missing
CLIPPED_AS_GSPO = "gspo_200", "luspo", "luspo_200"  # the losses of successors.py with GSPO's clip
# Experiments whose picture is published. There are also those of the functions draw_...
SHOWN = "clip_range", "gate", "lower_rates", "negatives", "turns", "unfinished_60"


# ---- which runs belong to an experiment ----------------------------------------------------------


def arms_of(name):
    """All variants of an experiment."""
    return [spec for panel in EXPERIMENTS[name].values() for spec in panel.values()]


def runs_of(spec, rows):
    return [row for row in rows if row["arm"] == spec]


def comparable(arms, rows):
    """The runs of these variants, only from those seeds that every variant has."""
    rows = [row for row in rows if row["arm"] in arms]
    seeds_of_each = [{row["seed"] for row in runs_of(spec, rows)} for spec in arms]
    common = set.intersection(*seeds_of_each)
    return [row for row in rows if row["seed"] in common]


# ---- tables --------------------------------------------------------------------------------------


def table(name, rows):
    """Markdown: a line for each variant, with the mean and every value. An OPTIONAL column is left
    out if nothing was measured in it."""
    lines = []
    for panel, arms in EXPERIMENTS[name].items():
        first = None
        for label, spec in arms.items():
            own = sorted(runs_of(spec, rows), key=lambda r: r["seed"])
            first = first or own
            if own:
                title = ": ".join(filter(None, (panel, label)))
                lines.append({"variant": title, **cells_of(own, first)})
    columns = [column for column in lines[0]
               if column not in OPTIONAL or any(line[column] != "-" for line in lines)]
    cells = [columns] + [[line[column] for column in columns] for line in lines]
    text = [f"| {' | '.join(row)} |" for row in cells]
    text.insert(1, "|---" * len(columns) + "|")
    starts = {}
    cooler = {}
    for r in rows:
        start = r["arm"]["task"], r["cold"]
        if "first" not in r["arm"]:
            starts[start] = f"{r['start']:.2f}"
        if "start_at" in r:
            cooler[start] = " ".join(f"{r['start_at'][t]:.2f}" for t in ("0.6", "0.3", "0.0"))
    text += before_rl("correct", starts)
    text += before_rl("correct at temperature 0.6, 0.3 and greedily", cooler)
    return "\n".join(text) + "\n"


def before_rl(what, accuracies):
    each = [f"{task} {cold} {value}" for (task, cold), value in sorted(accuracies.items())]
    return [f"\nBefore RL, {what}: {', '.join(each)}"] if each else []


def cells_of(own, first):
    """{column: the cell of this variant, "-" if nothing was measured}.

    own: the runs of this variant. first: the runs of the first variant of the panel."""
    def told(r):
        return f"{r['accuracy']:.2f}" + f" from {r['start']:.2f}" * ("first" in r["arm"])

    each = [" ".join(map(told, runs)) for runs in by_cold_start(own).values()]
    probed = [r for r in own if "probe" in r]
    greedy = [f"{r['accuracy']:.2f}: {r['greedy']:.2f}" for r in own if "greedy" in r]
    return {
        "correct, mean": f"{mean(own):.2f}",
        "minus the panel's first": difference(own, first),
        "each run, by starting model": "; ".join(each),
        "correct, selection questions": f"{mean(probed, 'probe'):.3f}" if probed else "-",
        "reward over the run": average(own, "reward", ".2f"),
        "clipped": clipped(own),
        "std of log s": average(own, "log_ratio_std", ".1e"),
        "entropy, last": average(own, "entropy", ".3f", -1),
        "experts changed": average(own, "experts_changed", ".1%"),
        "sampled: greedy": ", ".join(greedy) or "-",
        "gradient norm": spread(logged(own, "grad_norm")),
    }


def logged(rows, metric, start=0):
    """The values of a metric in all rollouts of these runs, from rollout `start` on."""
    return [x for row in rows for x in row.get(metric, [])[start:] if x is not None]


def average(rows, metric, form, start=0):
    values = logged(rows, metric, start)
    return format(statistics.fmean(values), form) if values else "-"


def clips_as_logged(spec):
    """Whether the clip fraction that train_math.py logs is that of this variant's own clip.

    It is computed for the clip of gspo_loss or grpo_loss. Some variants have no clip or another
    clipping rule: most losses of successors.py, and gates that are noisy, random or on one side."""
    loss = dict(zip(("weight", "gate", "cap", "side", "shuffled"), spec.get("loss", [])))
    if loss.get("gate") == "one" or loss.get("side", "both") != "both" or loss.get("shuffled"):
        return False
    return "noise" not in spec and spec.get("successor", "luspo") in CLIPPED_AS_GSPO


def clipped(rows):
    """The fraction of response tokens that the clip removes from the gradient, or "-" if it was not
    logged. A variant without a clip removes nothing."""
    spec = rows[0]["arm"]
    if "loss" in spec and spec["loss"][1] == "one":
        return "0.0%"
    return average(rows, "clip_fraction", ".1%") if clips_as_logged(spec) else "-"


def spread(values):
    values = [x for x in values if x]
    if not values:
        return "-"
    return f"{min(values):.2g} to {max(values):.2g}, median {statistics.median(values):.2g}"


def by_cold_start(rows):
    """{starting model: its runs}"""
    groups = {}
    for r in rows:
        groups.setdefault(r["cold"], []).append(r)
    return groups


def means(rows, name="accuracy"):
    """{starting model: the mean over its runs}"""
    return {cold: statistics.fmean(r[name] for r in runs)
            for cold, runs in by_cold_start(rows).items()}


def mean(rows, name="accuracy"):
    return statistics.fmean(means(rows, name).values())


def difference(rows, others):
    """The mean difference in accuracy over the starting models that both variants have, with a 95%
    interval from Student's t."""
    own = means(rows)
    first = means(others)
    d = [own[cold] - first[cold] for cold in own if cold in first]
    if len(d) not in STUDENT or rows == others:
        return "-"
    half = STUDENT[len(d)] * statistics.stdev(d) / len(d) ** 0.5
    return f"{statistics.fmean(d):+.2f} ± {max(half, NARROWEST.get(len(d), 0)):.2f}"


# ---- pictures ------------------------------------------------------------------------------------

# Titles of the published pictures. Pictures of other runs have none, as these may end differently.
TITLES = {
    "clip_range": "A factor of ten in the clip range changes GSPO's accuracy little.\n"
                  "With 4 epochs on long responses, a range of 0.1 or more is too wide for GSPO.",
    "gate": "On long responses with 4 epochs, clipping the responses with A < 0\n"
            "prevents a collapse, and clipping those with A > 0 does not.",
    "lower_rates": "At a learning rate of 3e-4, only GSPO keeps its accuracy. At 3e-5, all four "
                   "losses end at similar accuracies.",
    "negatives": "On the long task, ignoring the responses with A < 0 does about as well as GSPO\n"
                 "and needs no clip.",
    "turns": "The means are higher if each turn has its own reward,\n"
             "but the 95% intervals of both differences contain 0.",
    "unfinished_60": "GSPO's means are higher than GRPO's,\n"
                     "but starting models differ by more than the algorithms.",
    "factorial": "With 4 epochs, all runs without a clip collapse, whatever the weight. "
                 "With a clip, the weight changes little.",
    "opening": "With 16 or 32 updates per rollout, all runs with weight 1 and without a clip\n"
               "collapse, on both tasks.",
    "noise_over_movement": "With 4 epochs, the accuracy falls if the noise on log s is more than\n"
                           "about three times the change of log s by training.",
}
# The labels of the pictures, where they differ from those of the tables.
WORDS = {
    "clip_range": {
        "GSPO's clip range, long responses": "GSPO, long responses, 4 epochs",
        "GRPO's clip range, long responses": "GRPO, long responses, 4 epochs",
        "GSPO's clip range, long responses, 1 epoch": "GSPO, long responses, 1 epoch",
        "GRPO's clip range, long responses, 1 epoch": "GRPO, long responses, 1 epoch",
        "GSPO's clip range, short responses": "GSPO, short responses, 4 epochs",
        "GRPO's clip range, short responses": "GRPO, short responses, 4 epochs",
    },
    "gate": {
        "long responses, 4 epochs: dropped": "long responses, 4 epochs",
        "1 epoch": "long responses, 1 epoch",
        "short, 4 epochs": "short responses, 4 epochs",
        "what GSPO drops": "what GSPO clips",
        "only those of A < 0": "of these, only A < 0",
        "only those of A > 0": "of these, only A > 0",
        "as many of each sign of A, at random": "as many of each sign, at random",
        "as many, at random": "as many of any sign, at random",
        "nothing": "nothing (no clip)",
    },
    "lower_rates": {
        "learning rate 0.0003": "learning rate 3e-4",
        "learning rate 0.0001": "learning rate 1e-4",
        "learning rate 3e-05": "learning rate 3e-5",
    },
    "negatives": {
        "no clip, weight 1": "no clip, 4 epochs",
        "no clip, weight 1, 1 epoch": "no clip, 1 epoch",
        "GRPO's clipping rule and weight": "GRPO, 4 epochs",
        "GRPO's clipping rule and weight, 1 epoch": "GRPO, 1 epoch",
        "GSPO, with its clip": "GSPO",
    },
    "turns": {"GSPO-token, each turn its own": "GSPO-token, a reward per turn",
              "GRPO, each turn its own": "GRPO, a reward per turn"},
    "unfinished_60": {
        "60 tokens, 100 rollouts, lower clip range": "responses of 60 tokens, 100 rollouts"},
    "opening": {
        "no clip, A < 0 dropped": "no clip, A < 0 ignored",
    },
}
LABELS = {  # of the vertical axes
    "clip_range": "lower clip range", "gate": "what has no gradient",
    "negatives": "factor on A < 0", "unfinished_60": "lower clip range"}
ACCURACY = "sampled accuracy after RL (%)"
MARKERS = "os^Dv<>pP"  # of the starting models
GREEN, PURPLE, GRAY = "#009E73", "#CC79A7", "#666666"


def colour_of(spec):
    """GSPO and its clipping rule are blue, GRPO's are orange, and no clip is red, as everywhere."""
    if "successor" in spec:
        return {"sapo": GREEN, "cispo": PURPLE}.get(spec["successor"], GRAY)
    if "critic" in spec:
        return GRAY
    gate = spec["loss"][1] if "loss" in spec else spec["algorithm"]
    kind = {"one": "no clipping", "token": "grpo", "grpo": "grpo"}.get(gate, "gspo")
    return STYLES[kind][0]


def percent(values):
    return [100 * value for value in values]


def bar(axis, y, own, half):
    """A vertical bar at the mean accuracy of these runs."""
    axis.plot(percent([mean(own)] * 2), [y - half, y + half], color="black", linewidth=2.5)


def before(axis, starts):
    """A band over the accuracies before RL."""
    if starts:
        axis.axvspan(*percent((min(starts), max(starts))), color="gray", alpha=0.3)


def legend(figure, more=(), columns=6):
    """What the markers, the bar and the band are; more: [(label, settings of a marker)]."""
    handles = [Line2D([], [], linestyle="", label=label, **{"color": "black", **look})
               for label, look in more]
    handles.append(Line2D([], [], color="black", linewidth=2.5, label="mean"))
    handles.append(Patch(color="gray", alpha=0.3, label="before RL"))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns,
                  title="a marker: one run")


def draw(name, rows, path, title=None):
    """A marker for each run, whose shape tells the starting model, and a bar at the mean of each
    variant."""
    panels = EXPERIMENTS[name]
    words = WORDS.get(name, {})
    labels = [list(arms) for arms in panels.values()]
    columns = len(panels) if len(panels) <= 3 else 2
    lines = -(-len(panels) // columns)
    alike = lines == 1 and all(own == labels[0] for own in labels)
    colds = max(1, *(r["cold"] for r in rows))
    size = 3 + 4 * columns, 1.8 + lines * (0.7 + 0.38 * max(map(len, labels)))
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(lines, columns, sharey=alike, squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.set_axis_off()
    for axis, (panel, arms) in zip(axes.flat, panels.items()):
        starts = []
        for y, spec in enumerate(arms.values()):
            own = runs_of(spec, rows)
            for r in own:
                starts.append(r["start"])
                height = y + 0.3 * (r["cold"] / colds - 0.5)
                axis.plot(100 * r["accuracy"], height, MARKERS[r["cold"] % len(MARKERS)],
                          color=colour_of(spec), alpha=0.8, markersize=5)
            if own:
                bar(axis, y, own, 0.35)
        before(axis, starts)
        axis.set_yticks(range(len(arms)), [words.get(label, label).removeprefix("A < 0 times ")
                                           for label in arms])
        axis.set(title=words.get(panel, panel), xlim=(-2, 102), ylim=(len(arms) - 0.5, -0.5))
        axis.grid(axis="x", alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel(ACCURACY)
    for axis in axes[:, 0]:
        axis.set_ylabel(LABELS.get(name, ""))
    models = [(f"starting model {cold}", {"marker": MARKERS[cold % len(MARKERS)]})
              for cold in sorted({r["cold"] for r in rows})]
    legend(figure, models, columns=5 if columns > 1 else 3)
    figure.suptitle(title or "")
    figure.savefig(path, dpi=130)


def draw_factorial(rows, path, title=None):
    """Three clipping rules in three colours, with four weights each, which are four shapes."""
    panels = list(EXPERIMENTS["factorial"].items())[:2]  # on short responses nothing differs
    weights = ["s (GSPO's)", "1", "the token's ratio, at most 2", "the token's ratio (GRPO's)"]
    figure = Figure((12, 5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (_, arms), panel in zip(
            axes, panels, ("long responses, 4 epochs", "long responses, 1 epoch")):
        starts = []
        for i, spec in enumerate(arms.values()):
            own = runs_of(spec, rows)
            starts += [r["start"] for r in own]
            y = i // 4 + 0.2 * (i % 4 - 1.5)
            axis.plot(percent(r["accuracy"] for r in own), [y] * len(own), MARKERS[i % 4],
                      color=colour_of(spec), alpha=0.8)
            bar(axis, y, own, 0.09)
        before(axis, starts)
        axis.set(title=panel, xlabel=ACCURACY, xlim=(-2, 102), ylim=(2.5, -0.5))
        axis.set_yticks(range(3), ["GSPO's clipping rule", "GRPO's clipping rule", "no clip"])
        axis.grid(axis="x", alpha=0.3)
    legend(figure, [(f"weight {weight}", {"marker": marker})
                    for weight, marker in zip(weights, MARKERS)])
    figure.suptitle(title or "")
    figure.savefig(path, dpi=130)


def draw_opening(rows, path, title=None):
    """The variants of `opening` on two tasks. Runs with few updates are hollow squares."""
    on_world = EXPERIMENTS["world"] | EXPERIMENTS["world_few"]
    panels = {
        "long task": {16: opening(**EARLY), 4: opening(**EARLY, epochs=1)},
        "small world": {32: on_world["32 updates a rollout"], 4: on_world["4 updates a rollout"]},
    }
    looks = {"marker": "o"}, {"marker": "s", "fillstyle": "none"}
    figure = Figure((12, 5.4), layout="constrained")
    for axis, (task, panel) in zip(figure.subplots(1, 2, sharey=True), panels.items()):
        starts = []
        for i, arms in enumerate(panel.values()):
            colds_of_each = [set(by_cold_start(runs_of(spec, rows))) for spec in arms.values()]
            common = set.intersection(*colds_of_each)
            for y, spec in enumerate(arms.values()):
                own = [r for r in runs_of(spec, rows) if r["cold"] in common]
                if own:
                    starts += [r["start"] for r in own]
                    height = y + 0.36 * i - 0.18
                    axis.plot(percent(r["accuracy"] for r in own), [height] * len(own),
                              linestyle="", color=colour_of(spec), alpha=0.8, **looks[i])
                    bar(axis, height, own, 0.15)
        before(axis, starts)
        axis.set(title=task, xlabel=ACCURACY, xlim=(-2, 102), ylim=(5.5, -0.5))
        axis.set_yticks(range(len(arms)), [WORDS["opening"].get(label, label) for label in arms])
        axis.grid(axis="x", alpha=0.3)
    many, few = looks
    legend(figure, [("16 (long task) or 32 (small world) updates per rollout", many),
                    ("4 updates per rollout", few)])
    figure.suptitle(title or "")
    figure.savefig(path, dpi=130)


def of_the_long_task(rows):
    """The runs of the long task, without those that diverged."""
    return [r for r in rows if r["arm"]["task"] == "long" and r.get("entropy")]


def correlation(rows):
    """(number of runs of the long task, Spearman's correlation of their accuracy and the entropy
    at the end)."""
    own = of_the_long_task(rows)
    values = torch.tensor([(r["accuracy"], r["entropy"][-1]) for r in own]).T
    ranks = values.argsort().argsort().double()
    return len(own), torch.corrcoef(ranks)[0, 1].item()


def cooling(rows):
    """A line for the table: the correlation of the accuracy and the entropy at the end."""
    number, value = correlation(rows)
    return (f"\nOver all {number:,} runs of the long task, correct answers and the entropy at the "
            f"end: Spearman's correlation {value:.2f}\n")


def kind_of(spec):
    if {**spec, "epochs": 4} == NO_GATE:
        return "no clip, weight 1"
    if spec in (arm(algorithm, spec["eps"], epochs=spec["epochs"]) for algorithm in (GSPO, GRPO)):
        return f"{spec['algorithm'].upper()}, any clip range"
    return "other variants"


def draw_cooling(rows, path):
    """The accuracy against the entropy at the end, with a marker for each run of the long task."""
    figure = Figure((9, 4.8), layout="constrained")
    axis = figure.subplots()
    looks = {
        "other variants": ("lightgray", "."),
        "GRPO, any clip range": (STYLES["grpo"][0], "s"),
        "GSPO, any clip range": (STYLES["gspo"][0], "o"),
        "no clip, weight 1": (STYLES["no clipping"][0], "^"),
    }
    for kind, (colour, marker) in looks.items():
        own = [r for r in of_the_long_task(rows) if kind_of(r["arm"]) == kind]
        entropy = [r["entropy"][-1] for r in own]
        axis.plot(entropy, percent(r["accuracy"] for r in own), marker, color=colour, markersize=4,
                  fillstyle="none" if marker == "s" else "full", label=f"{kind}: {len(own)} runs")
    number, value = correlation(rows)
    axis.set(
        xscale="log",
        ylim=(0, 100),
        xlabel="entropy of the last rollout's responses (nats per token, log scale)",
        ylabel=ACCURACY,
        title="The lower the entropy at the end, the higher the sampled accuracy\n"
              f"({number:,} runs of the long task, Spearman's correlation {value:.2f})",
    )
    axis.legend(loc="lower left", title="a marker: one run")
    figure.savefig(path, dpi=130)


def draw_noise(rows, path, title=None):
    """The accuracy against the noise in the clipping rule, in units of the standard deviation of
    log s that training causes. The dotted lines are what rounding adds to log s on SmolLM2, in
    units of what one step at a learning rate of 1e-6 causes there (from the logs of
    precision/rounding.py)."""
    figure = Figure((9.5, 5), layout="constrained")
    axis = figure.subplots()
    for epochs, dot, line, filling in ((4, "o", "-", "full"), (1, "^", "--", "none")):
        own = [r for r in rows if r["arm"]["epochs"] == epochs and "autocast" not in r["arm"]]
        points = {}
        for r in own:
            if deviation := r["arm"].get("noise"):
                movement = statistics.fmean(x for x in r["log_ratio_std"] if x)
                point = deviation / movement, 100 * r["accuracy"]
                points.setdefault(deviation, []).append(point)
                axis.plot(*point, dot, color=STYLES["gspo"][0], fillstyle=filling)
        means = [[statistics.fmean(x) for x in zip(*points[noise])] for noise in sorted(points)]
        axis.plot(*zip(*means), line, color="black", linewidth=2)
        label = f"{epochs} epoch{'s' * (epochs > 1)}, {4 * epochs} updates per rollout"
        axis.plot([], [], dot + line, color="black", fillstyle=filling, label=label)
        without = mean([r for r in own if "noise" not in r["arm"]])
        axis.axhline(100 * without, color="black", linestyle=line, linewidth=0.6)
    logs = {path.stem: json.loads(path.read_text()) for path in ROUNDING.glob("*.json")}
    log_s = {form: log["128"]["off the grid"] for form, log in logs.items()}
    exact = log_s.pop("float32")
    for form, rounded in log_s.items():
        x = statistics.stdev(a - b for a, b in zip(rounded, exact)) / statistics.stdev(exact)
        axis.axvline(x, color="grey", linestyle=":")
        axis.text(x, 2, form.replace("_", " "), rotation=90, ha="right")
    axis.set(
        xscale="log",
        ylim=(0, 100),
        ylabel=ACCURACY,
        xlabel="standard deviation of the noise / standard deviation of log s by training\n"
        "(dotted: rounding on SmolLM2, learning rate 1e-6)",
    )
    axis.legend(loc="lower left", fontsize=9, title_fontsize=9,
                title="a marker: one run of GSPO\nbold: mean; thin: mean without noise")
    figure.suptitle(title or "")
    figure.savefig(path, dpi=130)


def text_of(name, every):
    """The contents of NAME.md. every: all rows of runs.jsonl."""
    text = table(name, comparable(arms_of(name), every))
    if name == "greedy":
        text += cooling(every)
    return text


def report(name, folder):
    """Writes the table of an experiment, and its pictures, from the folder's runs.jsonl."""
    text = text_of(name, read(folder / "runs.jsonl"))
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    draw_pictures(name, folder)


def draw_pictures(name, folder):
    """The pictures of an experiment. In the published folder, only those that a page shows."""
    titles = TITLES if folder == RESULTS else {}
    every = read(folder / "runs.jsonl")
    rows = comparable(arms_of(name), every)
    if name in SHOWN or folder != RESULTS:
        draw(name, rows, folder / f"{name}.png", titles.get(name))
    if name == "greedy":
        draw_cooling(every, folder / "cooling.png")
    if name == "factorial":
        draw_factorial(rows, folder / "factorial.png", titles.get("factorial"))
    if name in ("world", "world_few"):
        draw_opening(every, folder / "opening.png", titles.get("opening"))
    if name == "noise":
        picture = "noise_over_movement"
        draw_noise(rows, folder / f"{picture}.png", titles.get(picture))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"], help="experiments")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with runs.jsonl")
    args = parser.parse_args()
    for name in EXPERIMENTS if "all" in args.names else args.names:
        report(name, args.results)


if __name__ == "__main__":
    main()
