"""Tables and pictures of the runs that runs.py has logged; nothing is trained here.

results/comparisons/tables.md has the tables of all experiments. `python -m evidence.tables`
makes it again from runs.jsonl.gz. In the logs of earlier runs, the field "variant" is called "arm".
"""
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from evidence.comparisons.settings import EARLY, EXPERIMENTS, opening
from tools.logs import read
from tools.plot import STYLES

RESULTS = Path(__file__).parents[1] / "results" / "comparisons"
LOG = "runs.jsonl.gz"
STUDENT = {2: 12.71, 3: 4.303, 6: 2.571, 9: 2.306}  # number of starting models: t of a 95% interval
# No interval is narrower than this, because three starting models may agree by chance. METHOD.md
# says where the limits come from. An interval that was widened to its limit is marked with a star.
NARROWEST = {3: 6, 6: 2}  # points
OPTIONAL = "experts changed", "sampled: greedy", "gradient norm"  # columns that may be missing


HEAD = """# All comparisons on tiny models

`python -m evidence.tables` makes this page from runs.jsonl.gz. METHOD.md defines the words.
Accuracies are those at temperature 1 on the held-out questions, unless a column says otherwise.
Differences are in points. "±" is the half width of a 95% interval over the starting models. A star
marks an interval that was widened to the limit that METHOD.md explains. A "gate" is a clipping
rule, and "dropped" responses have no gradient.
"""


# ---- which runs belong to an experiment ----------------------------------------------------------


def read_runs(path):
    """The rows of a log of runs. The field "arm" of earlier logs becomes "variant"."""
    return [{"variant" if key == "arm" else key: value for key, value in row.items()}
            for row in read(path)]


def variants_of(name):
    """All variants of an experiment."""
    return [spec for panel in EXPERIMENTS[name].values() for spec in panel.values()]


def runs_of(spec, rows):
    return [row for row in rows if row["variant"] == spec]


def comparable(variants, rows):
    """The runs of these variants, only from those seeds that every variant has."""
    rows = [row for row in rows if row["variant"] in variants]
    seeds_of_each = [{row["seed"] for row in runs_of(spec, rows)} for spec in variants]
    common = set.intersection(*seeds_of_each)
    return [row for row in rows if row["seed"] in common]


# ---- tables --------------------------------------------------------------------------------------


def table(name, rows):
    """Markdown: a line for each variant, with the mean and every value. An OPTIONAL column is left
    out if nothing was measured in it."""
    lines = []
    for panel, variants in EXPERIMENTS[name].items():
        first = None
        for label, spec in variants.items():
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
        start = r["variant"]["task"], r["cold"]
        if "first" not in r["variant"]:
            starts[start] = f"{r['start']:.0%}"
        if "start_at" in r:
            cooler[start] = " ".join(f"{r['start_at'][t]:.0%}" for t in ("0.6", "0.3", "0.0"))
    text += before_rl("accuracy", starts)
    text += before_rl("accuracy at temperature 0.6, 0.3 and greedily", cooler)
    return "\n".join(text) + "\n"


def before_rl(what, accuracies):
    each = [f"{task} {cold} {value}" for (task, cold), value in sorted(accuracies.items())]
    return [f"\nBefore RL, {what}: {', '.join(each)}"] if each else []


def cells_of(own, first):
    """{column: the cell of this variant, "-" if nothing was measured}.

    own: the runs of this variant. first: the runs of the first variant of the panel."""
    def told(r):
        return f"{100 * r['accuracy']:.0f}" + f" from {100 * r['start']:.0f}" * (
            "first" in r["variant"])

    each = [" ".join(map(told, runs)) for runs in by_cold_start(own).values()]
    probed = [r for r in own if "probe" in r]
    greedy = [f"{100 * r['accuracy']:.0f}: {100 * r['greedy']:.1f}" for r in own if "greedy" in r]
    return {
        "accuracy, mean": f"{mean(own):.1%}",
        "minus the panel's first, points": difference(own, first),
        "each run, by starting model": "; ".join(each),
        "on selection questions": f"{mean(probed, 'probe'):.1%}" if probed else "-",
        "clipped": clipped(own),
        "log_ratio_std": average(own, "log_ratio_std", ".1e"),
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


def clipped(rows):
    """The fraction of response tokens that the clip removes from the gradient, or "-" if it was not
    logged. A variant without a clip removes nothing, which earlier logs do not say."""
    spec = rows[0]["variant"]
    if "loss" in spec and spec["loss"][1] == "one":
        return "0.0%"
    return average(rows, "clip_fraction", ".1%")


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
    """The mean difference in accuracy over the starting models that both variants have, in points,
    with a 95% interval from Student's t."""
    own = means(rows)
    first = means(others)
    d = [100 * (own[cold] - first[cold]) for cold in own if cold in first]
    if len(d) not in STUDENT or rows == others:
        return "-"
    half = STUDENT[len(d)] * statistics.stdev(d) / len(d) ** 0.5
    narrowest = NARROWEST.get(len(d), 0)
    return f"{statistics.fmean(d):+.1f} ± {max(half, narrowest):.1f}" + "*" * (half < narrowest)


# ---- pictures ------------------------------------------------------------------------------------

# Titles of the published pictures. Pictures of other runs have none, as these may end differently.
TITLES = {
    "gate": "On long responses with 4 epochs, clipping the responses with A < 0\n"
            "prevents a collapse, and clipping those with A > 0 does not.",
    "opening": "With 16 or 32 updates per rollout, all runs with weight 1 and without a clip\n"
               "collapse on both tasks, unless wrong answers are ignored.",
}
# The labels of the pictures, where they differ from those of the tables.
WORDS = {
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
    "opening": {
        "no clip, A < 0 dropped": "no clip, A < 0 ignored",
    },
}
LABELS = {"gate": "what has no gradient"}  # of the vertical axes
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
    labels = [list(variants) for variants in panels.values()]
    columns = len(panels) if len(panels) <= 3 else 2
    lines = -(-len(panels) // columns)
    alike = lines == 1 and all(own == labels[0] for own in labels)
    colds = max(1, *(r["cold"] for r in rows))
    size = 3 + 4 * columns, 1.8 + lines * (0.7 + 0.38 * max(map(len, labels)))
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(lines, columns, sharey=alike, squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.set_axis_off()
    for axis, (panel, variants) in zip(axes.flat, panels.items()):
        starts = []
        for y, spec in enumerate(variants.values()):
            own = runs_of(spec, rows)
            for r in own:
                starts.append(r["start"])
                height = y + 0.3 * (r["cold"] / colds - 0.5)
                axis.plot(100 * r["accuracy"], height, MARKERS[r["cold"] % len(MARKERS)],
                          color=colour_of(spec), alpha=0.8, markersize=5)
            if own:
                bar(axis, y, own, 0.35)
        before(axis, starts)
        axis.set_yticks(range(len(variants)), [words.get(label, label).removeprefix("A < 0 times ")
                                           for label in variants])
        axis.set(title=words.get(panel, panel), xlim=(-2, 102), ylim=(len(variants) - 0.5, -0.5))
        axis.grid(axis="x", alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel(ACCURACY)
    for axis in axes[:, 0]:
        axis.set_ylabel(LABELS.get(name, ""))
    models = [(f"starting model {cold}", {"marker": MARKERS[cold % len(MARKERS)]})
              for cold in sorted({r["cold"] for r in rows})]
    if name == "gate":
        for label, kind in ("some have no gradient", "gspo"), ("no clip", "no clipping"):
            models.append((label, {"marker": "o", "color": STYLES[kind][0]}))
    legend(figure, models, columns=5 if columns > 1 else 3)
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
        for i, variants in enumerate(panel.values()):
            colds_of_each = [set(by_cold_start(runs_of(spec, rows))) for spec in variants.values()]
            common = set.intersection(*colds_of_each)
            for y, spec in enumerate(variants.values()):
                own = [r for r in runs_of(spec, rows) if r["cold"] in common]
                if own:
                    starts += [r["start"] for r in own]
                    height = y + 0.36 * i - 0.18
                    axis.plot(percent(r["accuracy"] for r in own), [height] * len(own),
                              linestyle="", color=colour_of(spec), alpha=0.8, **looks[i])
                    bar(axis, height, own, 0.15)
        before(axis, starts)
        axis.set(title=task, xlabel=ACCURACY, xlim=(-2, 102), ylim=(5.5, -0.5))
        labels = [WORDS["opening"].get(label, label) for label in variants]
        axis.set_yticks(range(len(variants)), labels)
        axis.grid(axis="x", alpha=0.3)
    many, few = looks
    legend(figure, [("16 (long task) or 32 (small world) updates per rollout", many),
                    ("4 updates per rollout", few)])
    figure.suptitle(title or "")
    figure.savefig(path, dpi=130)


def of_the_long_task(rows):
    """The runs of the long task, without those that diverged."""
    return [r for r in rows if r["variant"]["task"] == "long" and r.get("entropy")]


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
    return (f"\nOver all {number:,} runs of the long task, accuracy and the entropy at the "
            f"end: Spearman's correlation {value:.2f}\n")


def text_of(name, every):
    """The table of an experiment, "" if it has no runs. every: all rows of the log."""
    rows = comparable(variants_of(name), every)
    text = table(name, rows) if rows else ""
    if name == "greedy" and rows:
        text += cooling(every)
    return text


def tables(every):
    """The contents of tables.md: all experiments that have runs."""
    texts = {name: text_of(name, every) for name in EXPERIMENTS}
    found = [f"## {name}\n\n{text}" for name, text in texts.items() if text]
    return "\n".join([HEAD, *found])


def report(name, folder):
    """Writes the tables of all experiments in a folder's log, and the pictures of one of them."""
    every = read_runs(folder / LOG)
    (folder / "tables.md").write_text(tables(every), encoding="utf-8")
    print(text_of(name, every))
    draw_pictures(name, folder, every)


def draw_pictures(name, folder, every):
    """The pictures of an experiment. In the published folder, only those that a page shows."""
    titles = TITLES if folder == RESULTS else {}
    if name == "gate" or folder != RESULTS:
        rows = comparable(variants_of(name), every)
        draw(name, rows, folder / f"{name}.png", titles.get(name))
    if name in ("world", "world_few"):
        draw_opening(every, folder / "opening.png", titles.get("opening"))
