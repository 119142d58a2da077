"""Tables and pictures of the runs that rivals.py has logged; nothing is trained here.

    python -m experiments.rival_report all         all tables, and the pictures that a page shows
    python -m experiments.rival_report NAME ...    those of some experiments

Reads results/rivals/runs.jsonl and writes NAME.md and NAME.png beside it; --results names another
folder. exact.py and ratios.py make their own tables and pictures.
"""
import argparse
import json
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure

from common.logs import read
from experiments.rival_settings import EARLY, EXPERIMENTS, GRPO, GSPO, NO_GATE, arm, opening

RESULTS = Path(__file__).with_name("results") / "rivals"
PRECISION = RESULTS.parent / "precision"
STUDENT = {2: 12.71, 3: 4.303, 6: 2.571, 9: 2.306}  # number of cold starts: t of a 95% interval
# No interval is narrower than this. Three cold starts may agree by chance: 135 differences between
# arms with an accuracy above 0.75 have a pooled standard deviation of 0.053. For six, the limit is
# what the sampling of 256 answers causes, 0.02.
NARROWEST = {3: 0.06, 6: 0.02}
OPTIONAL = "experts changed", "sampled: greedy", "gradient norm"  # columns, where measured
CLIPPED_AS_GSPO = "gspo_200", "luspo", "luspo_200"  # of the losses in successors.py
SHOWN = "clip_range", "gate", "lower_rates", "negatives", "turns", "unfinished_60"


# ---- which runs belong to an experiment ----------------------------------------------------------


def arms_of(name):
    """All variants of an experiment."""
    return [spec for panel in EXPERIMENTS[name].values() for spec in panel.values()]


def runs_of(spec, rows):
    return [row for row in rows if row["arm"] == spec]


def comparable(arms, rows):
    """The runs of these variants, from those seeds alone that every variant has."""
    rows = [row for row in rows if row["arm"] in arms]
    seeds_of_each = [{row["seed"] for row in runs_of(spec, rows)} for spec in arms]
    common = set.intersection(*seeds_of_each)
    return [row for row in rows if row["seed"] in common]


# ---- tables --------------------------------------------------------------------------------------


def table(name, rows):
    """Markdown: a line for each arm, with the mean and every value. Columns in which nothing was
    measured are left out if they are OPTIONAL."""
    lines = []
    for panel, arms in EXPERIMENTS[name].items():
        first = None
        for label, spec in arms.items():
            own = sorted(runs_of(spec, rows), key=lambda r: r["seed"])
            first = first or own
            if own:
                title = ": ".join(filter(None, (panel, label)))
                lines.append({"arm": title, **cells_of(own, first)})
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
    text += before_rl("right", starts)
    text += before_rl("right at temperature 0.6, 0.3 and greedily", cooler)
    return "\n".join(text) + "\n"


def before_rl(what, shares):
    each = [f"{task} {cold} {share}" for (task, cold), share in sorted(shares.items())]
    return [f"\nBefore RL, {what}: {', '.join(each)}"] if each else []


def cells_of(own, first):
    """{column: the cell of this arm, "-" if nothing was measured}; first: the panel's first arm."""
    def told(r):
        return f"{r['accuracy']:.2f}" + f" from {r['start']:.2f}" * ("first" in r["arm"])

    each = [" ".join(map(told, runs)) for runs in by_cold_start(own).values()]
    probed = [r for r in own if "probe" in r]
    greedy = [f"{r['accuracy']:.2f}: {r['greedy']:.2f}" for r in own if "greedy" in r]
    return {
        "right, mean": f"{mean(own):.2f}",
        "minus the panel's first": difference(own, first),
        "each run, cold start by cold start": "; ".join(each),
        "right, probe": f"{mean(probed, 'probe'):.3f}" if probed else "-",
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

    It is computed for the clip of gspo_loss or grpo_loss. Some variants have no clip, or clip by
    another rule: most losses of successors.py, noisy gates, gates on one side, random ones."""
    loss = dict(zip(("weight", "gate", "cap", "side", "shuffled"), spec.get("loss", [])))
    if loss.get("gate") == "one" or loss.get("side", "both") != "both" or loss.get("shuffled"):
        return False
    return "noise" not in spec and spec.get("successor", "luspo") in CLIPPED_AS_GSPO


def clipped(rows):
    """The share of response tokens that the clip removes from the gradient; "-" if the logs do not
    say it. A variant without a clip removes nothing."""
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
    """{cold start: its runs}"""
    groups = {}
    for r in rows:
        groups.setdefault(r["cold"], []).append(r)
    return groups


def means(rows, name="accuracy"):
    """{cold start: mean over its runs}"""
    return {cold: statistics.fmean(r[name] for r in runs)
            for cold, runs in by_cold_start(rows).items()}


def mean(rows, name="accuracy"):
    return statistics.fmean(means(rows, name).values())


def difference(rows, others):
    """The mean difference in accuracy over the cold starts that both have, with a 95% interval from
    Student's t."""
    own = means(rows)
    first = means(others)
    d = [own[cold] - first[cold] for cold in own if cold in first]
    if len(d) not in STUDENT or rows == others:
        return "-"
    half = STUDENT[len(d)] * statistics.stdev(d) / len(d) ** 0.5
    return f"{statistics.fmean(d):+.2f} ± {max(half, NARROWEST.get(len(d), 0)):.2f}"


# ---- pictures ------------------------------------------------------------------------------------


def draw(name, rows, path):
    """A dot for each run, in the colour of its cold start, and a bar at the mean of the arm. Dotted
    lines show the accuracy before RL."""
    panels = EXPERIMENTS[name]
    labels = [list(arms) for arms in panels.values()]
    alike = all(own == labels[0] for own in labels)
    colds = max(1, *(r["cold"] for r in rows))
    size = 3 + 4 * len(panels), 1.5 + 0.4 * max(map(len, labels))
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=alike, squeeze=False)[0]
    for axis, (panel, arms) in zip(axes, panels.items()):
        starts = set()
        for y, spec in enumerate(arms.values()):
            own = runs_of(spec, rows)
            for r in own:
                starts.add((r["cold"], r["start"]))
                height = y + 0.3 * (r["cold"] / colds - 0.5)
                axis.plot(r["accuracy"], height, "o", color=f"C{r['cold']}", alpha=0.7,
                          markersize=5)
            if own:
                axis.plot([mean(own)] * 2, [y - 0.35, y + 0.35], color="black", linewidth=2)
        for cold, start in sorted(starts):
            axis.axvline(start, color=f"C{cold}", linestyle=":", label=f"cold start {cold}")
        axis.set_yticks(range(len(arms)), list(arms))
        axis.set(title=panel or name, xlabel="right answers after RL (bar: mean; dotted: before)",
                 xlim=(0, 1), ylim=(len(arms) - 0.5, -0.5))
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)


def draw_factorial(rows, path):
    """Three gates with four weights each, in four colours. A dot is a run, a bar the mean."""
    panels = list(EXPERIMENTS["factorial"].items())[:2]  # on short responses nothing differs
    weights = ["s (GSPO's)", "1", "the token's ratio, at most 2", "the token's ratio (GRPO's)"]
    figure = Figure((12, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (panel, arms) in zip(axes, panels):
        before = []
        for i, spec in enumerate(arms.values()):
            own = runs_of(spec, rows)
            before += [r["start"] for r in own]
            right = [r["accuracy"] for r in own]
            y = i // 4 + 0.2 * (i % 4 - 1.5)
            axis.plot(right, [y] * len(own), "o", color=f"C{i % 4}", alpha=0.5)
            axis.plot([mean(own)] * 2, [y - 0.09, y + 0.09], color="black", linewidth=2.5)
        axis.axvspan(min(before), max(before), color="gray", alpha=0.3)
        middle = statistics.fmean(before)
        axis.annotate("before RL", (middle, 1), rotation=90, ha="center", va="center")
        axis.set(title=panel, xlabel="right answers after RL", xlim=(0, 1), ylim=(2.5, -0.5))
        axis.set_yticks(range(3), ["GSPO's gate", "GRPO's gate", "no gate"])
        axis.grid(axis="x", alpha=0.3)
    for i, weight in enumerate(weights):
        axis.plot([], [], "o", color=f"C{i}", label=f"weight {weight}")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def draw_opening(rows, path):
    """The arms of `opening` on two tasks. A dot is a run, a bar the mean."""
    on_world = EXPERIMENTS["world"] | EXPERIMENTS["world_few"]
    panels = {
        "long task": {16: opening(**EARLY), 4: opening(**EARLY, epochs=1)},
        "small world": {32: on_world["32 updates a rollout"], 4: on_world["4 updates a rollout"]},
    }
    figure = Figure((12, 5), layout="constrained")
    for axis, (task, panel) in zip(figure.subplots(1, 2, sharey=True), panels.items()):
        before = []
        for i, (updates, arms) in enumerate(panel.items()):
            colds_of_each = [set(by_cold_start(runs_of(spec, rows))) for spec in arms.values()]
            common = set.intersection(*colds_of_each)
            for y, spec in enumerate(arms.values()):
                own = [r for r in runs_of(spec, rows) if r["cold"] in common]
                if own:
                    before += [r["start"] for r in own]
                    right = [r["accuracy"] for r in own]
                    height = y + 0.36 * i - 0.18
                    axis.plot(right, [height] * len(own), "o", color=f"C{i}", alpha=0.5)
                    axis.plot([mean(own)] * 2, [height - 0.15, height + 0.15], color="black",
                              linewidth=2.5)
            axis.plot([], [], "o", color=f"C{i}", label=f"{updates} updates a rollout")
        if before:
            axis.axvspan(min(before), max(before), color="gray", alpha=0.3, label="before RL")
        axis.set(title=task, xlabel="right answers after RL (bar: mean)", xlim=(-0.02, 1.02),
                 ylim=(5.5, -0.5))
        axis.set_yticks(range(len(arms)), list(arms))
        axis.grid(axis="x", alpha=0.3)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    figure.savefig(path, dpi=110)


def of_the_long_task(rows):
    """The runs of the long task, without those that diverged."""
    return [r for r in rows if r["arm"]["task"] == "long" and r.get("entropy")]


def cooling(rows):
    """A line for the table: Spearman's correlation of the accuracy and the entropy at the end."""
    own = of_the_long_task(rows)
    values = torch.tensor([(r["accuracy"], r["entropy"][-1]) for r in own]).T
    ranks = values.argsort().argsort().double()
    return (f"\nOver all {len(own):,} runs of the long task, right answers and the entropy at the "
            f"end: Spearman's correlation {torch.corrcoef(ranks)[0, 1]:.2f}\n")


def kind_of(spec):
    if {**spec, "epochs": 4} == NO_GATE:
        return "no gate, weight 1"
    if spec in (arm(algorithm, spec["eps"], epochs=spec["epochs"]) for algorithm in (GSPO, GRPO)):
        return f"{spec['algorithm'].upper()}, any range"
    return "other arms"


def draw_cooling(rows, path):
    """The accuracy over the entropy at the end, with a dot for each run of the long task."""
    figure = Figure((9, 4.5), layout="constrained")
    axis = figure.subplots()
    colours = {
        "other arms": "lightgray",
        "no gate, weight 1": "black",
        "GRPO, any range": "tab:orange",
        "GSPO, any range": "tab:blue",
    }
    for kind, colour in colours.items():
        own = [r for r in of_the_long_task(rows) if kind_of(r["arm"]) == kind]
        entropy = [r["entropy"][-1] for r in own]
        right = [r["accuracy"] for r in own]
        axis.plot(entropy, right, ".", color=colour, label=f"{kind}: {len(own)}")
    axis.set(
        xscale="log",
        ylim=(0, 1),
        xlabel="entropy of the last rollout's samples, nats a token",
        ylabel="right answers after RL",
        title="The long task: a dot is a run",
    )
    axis.legend(loc="lower left")
    figure.savefig(path, dpi=110)


def draw_noise(rows, path):
    """The accuracy over the noise in the gate, in units of the standard deviation of log s that
    training causes. The dotted lines are what rounding adds to log s on SmolLM2, in units of what
    one step at a learning rate of 1e-6 causes there (from the logs of precision.py)."""
    figure = Figure((9, 4.5), layout="constrained")
    axis = figure.subplots()
    for epochs, dot, line in ((4, "o", "-"), (1, "^", "--")):
        own = [r for r in rows if r["arm"]["epochs"] == epochs and "autocast" not in r["arm"]]
        points = {}
        for r in own:
            if deviation := r["arm"].get("noise"):
                movement = statistics.fmean(x for x in r["log_ratio_std"] if x)
                point = deviation / movement, r["accuracy"]
                points.setdefault(deviation, []).append(point)
                axis.plot(*point, dot, color=f"C{r['cold']}", alpha=0.7)
        means = [[statistics.fmean(x) for x in zip(*points[noise])] for noise in sorted(points)]
        axis.plot(*zip(*means), line, color="black")
        label = f"{epochs} epoch{'s' * (epochs > 1)} a rollout (line: mean)"
        axis.plot([], [], dot + line, color="black", label=label)
        without = mean([r for r in own if "noise" not in r["arm"]])
        axis.axhline(without, color="black", linestyle=line, linewidth=0.6)
    logs = {path.stem: json.loads(path.read_text()) for path in PRECISION.glob("*.json")}
    log_s = {form: log["128"]["off the grid"] for form, log in logs.items()}
    exact = log_s.pop("float32")
    for form, rounded in log_s.items():
        x = statistics.stdev(a - b for a, b in zip(rounded, exact)) / statistics.stdev(exact)
        axis.axvline(x, color="grey", linestyle=":")
        axis.text(x, 0.02, form.replace("_", " "), rotation=90, ha="right")
    axis.set(
        xscale="log",
        ylim=(0, 1),
        ylabel="right answers after RL (thin: without noise)",
        title="Noise in GSPO's gate (a point is a run, its colour the cold start)",
        xlabel="noise on log s / spread of log s by training "
        "(dotted: rounding on SmolLM2, learning rate 1e-6)",
    )
    axis.legend(loc="lower left")
    figure.savefig(path, dpi=110)


def text_of(name, every):
    """The contents of NAME.md; every: all rows of runs.jsonl."""
    text = table(name, comparable(arms_of(name), every))
    if name == "greedy":
        text += cooling(every)
    return text


def report(name, folder):
    """Writes the table of an experiment, and its pictures, from the folder's runs.jsonl."""
    every = read(folder / "runs.jsonl")
    rows = comparable(arms_of(name), every)
    text = text_of(name, every)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    if name in SHOWN or folder != RESULTS:
        draw(name, rows, folder / f"{name}.png")
    if name == "greedy":
        draw_cooling(every, folder / "cooling.png")
    if name == "factorial":
        draw_factorial(rows, folder / "factorial.png")
    if name in ("world", "world_few"):
        draw_opening(every, folder / "opening.png")
    if name == "noise":
        draw_noise(rows, folder / "noise_over_movement.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with runs.jsonl")
    args = parser.parse_args()
    for name in EXPERIMENTS if "all" in args.names else args.names:
        report(name, args.results)


if __name__ == "__main__":
    main()
