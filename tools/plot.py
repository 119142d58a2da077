"""Pictures of the logs of train_math.py.

    python -m tools.plot runs/math [MORE ...]     one picture, runs/math/runs.png

An algorithm has the same colour and line style in every picture of this project.
"""
import argparse
import itertools
import os
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from tools.logs import make_writable, read

PANELS = {  # metric: (title, label of the vertical axis)
    "reward": ("reward (line): sampled\neval_reward (hollow; bars: 95% CI):\nheld-out, greedy",
               "mean reward"),
    "response_length": ("response_length\nof the sampled responses", "tokens"),
    "clip_fraction": ("clip_fraction: what clipping\nremoves from the gradient",
                      "fraction of tokens"),
    "log_ratio_std": ("log_ratio_std: how much the\nratios of the responses differ",
                      "standard deviation of log s")}
STYLES = {  # Okabe and Ito's colours, which colour-blind readers can tell apart, and line styles
    "gspo": ("#0072B2", "-"),
    "grpo": ("#E69F00", "--"),
    "no clipping": ("#D55E00", ":"),
    "one update": ("#666666", "-.")}
MORE_STYLES = (("#009E73", "-"), ("#CC79A7", "--"), ("#56B4E9", "-."), ("black", ":"))
MARKERS = "os^vDP"  # distinguish runs of the same kind


def kind_of(label, rows):
    """What decides the colour: the algorithm, "no clipping", "one update" per rollout, or, for a
    log without settings, the label."""
    settings = rows[0].get("settings", {}) if rows else {}
    if settings.get("minibatches") == 1 and settings.get("epochs") == 1:
        return "one update"
    if (settings.get("eps_high") or 0) >= 1e3:  # which clips nothing
        return "no clipping"
    return settings.get("algorithm", label)


def styles_of(runs):
    """{label: (colour, line style, marker)} for runs, which is {label: rows}. Runs of one kind
    differ only in their markers."""
    styles = dict(STYLES)
    others = itertools.cycle(MORE_STYLES)
    markers = {}
    found = {}
    for label, rows in runs.items():
        kind = kind_of(label, rows)
        if kind not in styles:
            styles[kind] = next(others)
        markers.setdefault(kind, itertools.cycle(MARKERS))
        found[label] = (*styles[kind], next(markers[kind]))
    return found


def shrink(path):
    """Reduces a picture to 256 colours, which makes the file less than half as large."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256)
    small.save(path, optimize=True)


def draw(runs, path, title=None):
    """Draws runs, which is {label: rows of metrics}. title: what the picture shows."""
    figure = Figure((4 * len(PANELS), 3.6), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for label, (color, line, marker) in styles_of(runs).items():
        for axis, name in zip(axes, PANELS):
            known = [row for row in runs[label] if row.get(name) is not None]
            axis.plot([row["step"] for row in known], [row[name] for row in known], color=color,
                      linestyle=line, marker=marker, markersize=3, label=label)
        for row in runs[label]:
            if "eval_reward" in row:
                axes[0].plot(row["step"], row["eval_reward"], color=color, marker=marker,
                             markersize=8, fillstyle="none")
            if "eval_reward_interval" in row:
                axes[0].plot([row["step"]] * 2, row["eval_reward_interval"], "_-", color=color)
    for axis, (panel, unit) in zip(axes, PANELS.values()):
        axis.update_datalim([(1, 0)])  # each picture shows 0
        axis.autoscale_view()
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(title=panel, xlabel="step", ylabel=unit, ylim=(1.05 * axis.dataLim.y0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=150)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path,
                        help="the --output_dir of each run of train_math.py, or its metrics.jsonl")
    parser.add_argument("--output", type=Path, help="default: runs.png in the first folder")
    args = parser.parse_args(argv)
    files = [run if run.is_file() else run / "metrics.jsonl" for run in args.runs]
    runs = {os.path.relpath(file.parent): read(file) for file in files}
    if not all(runs.values()):
        parser.error(f"no metrics.jsonl in {', '.join(name for name in runs if not runs[name])}")
    output = args.output or files[0].with_name("runs.png")
    endings = Figure().canvas.get_supported_filetypes()
    if output.suffix[1:].lower() not in endings:
        parser.error(f"{output} must end in one of .{', .'.join(sorted(endings))}")
    make_writable(output)
    draw(runs, output)
    print(output)


if __name__ == "__main__":
    main()
