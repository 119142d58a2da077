"""Pictures of the logs of train_math.py.

    python -m tools.plot runs/math [MORE ...] --output FILE.png     several runs in one picture

An algorithm has the same colour and line style in every picture of this project.
"""
import argparse
import itertools
import os
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from PIL import Image

from tools.logs import make_writable, read

PANELS = {  # metric: (title, label of the vertical axis)
    "reward": ("reward (line): sampled\neval_reward (squares): held-out,\ngreedy, 95% CI",
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
    "one update": ("#666666", "-."),
}
MORE_STYLES = (("#009E73", "-"), ("#CC79A7", "--"), ("#56B4E9", "-."), ("black", ":"))
MARKERS = ".^vDxP"  # distinguish runs of the same kind; squares are evaluations
FILLINGS = "full", "none", "left", "bottom"  # of these squares, so that runs differ in grey, too
NO_CLIPPING = 1e3  # an eps_high of this size or more clips nothing


def kind_of(label, rows):
    """What decides the colour of a run: its algorithm, "no clipping" or "one update" (one optimizer
    step per rollout). If a log has no settings, it is the label."""
    settings = rows[0].get("settings", {}) if rows else {}
    if settings.get("minibatches") == 1 and settings.get("epochs") == 1:
        return "one update"
    if (settings.get("eps_high") or 0) >= NO_CLIPPING:
        return "no clipping"
    return settings.get("algorithm", label)


def styles_of(runs):
    """{label: (colour, line style, marker)} for runs, which is {label: rows}.

    Runs of one kind have the same colour and line style, and different markers."""
    styles = dict(STYLES)
    others = itertools.cycle(MORE_STYLES)
    markers = {}
    found = {}
    for label, rows in runs.items():
        kind = kind_of(label, rows)
        if kind not in styles:
            styles[kind] = next(others)
        if kind not in markers:
            markers[kind] = itertools.cycle(MARKERS)
        found[label] = (*styles[kind], next(markers[kind]))
    return found


def shrink(path):
    """Reduces a picture to 256 colours, which makes its file less than half as large."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256)
    small.save(path, optimize=True)


def draw(runs, path, title=None):
    """Draws runs, which is {label: rows of metrics}. title: what the picture shows."""
    figure = Figure((4 * len(PANELS), 3.6), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    styles = styles_of(runs)
    handles = []
    for (label, rows), filling in zip(runs.items(), itertools.cycle(FILLINGS)):
        color, line, marker = styles[label]
        square = {"marker": "s", "color": color, "fillstyle": filling}
        for axis, name in zip(axes, PANELS):
            known = [row for row in rows if row.get(name) is not None]
            steps = [row["step"] for row in known]
            values = [row[name] for row in known]
            curve, = axis.plot(steps, values, color=color, linestyle=line, marker=marker,
                               markersize=4, label=label)
        handles.append((curve, Line2D([], [], linestyle="", **square)))
        for row in rows:
            if "eval_reward" in row:
                axes[0].plot(row["step"], row["eval_reward"], **square)
            if "eval_reward_interval" in row:
                axes[0].plot([row["step"]] * 2, row["eval_reward_interval"], "_-", color=color,
                             alpha=0.5)
    for axis, (panel, unit) in zip(axes, PANELS.values()):
        axis.update_datalim([(1, 0)])  # so that the room above counts from 0
        axis.autoscale_view()
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(title=panel, xlabel="step", ylabel=unit, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(handles, runs, handler_map={tuple: HandlerTuple(ndivide=None, pad=0.6)},
                   handlelength=3.5, loc="lower right")
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path,
                        help="the --output_dir of each run of train_math.py")
    parser.add_argument("--output", type=Path, default=Path("runs.png"), help="the picture")
    args = parser.parse_args()
    missing = [str(run) for run in args.runs if not (run / "metrics.jsonl").exists()]
    if missing:
        parser.error(f"no metrics.jsonl in {', '.join(missing)}")
    make_writable(args.output)
    draw({os.path.relpath(run): read(run / "metrics.jsonl") for run in args.runs}, args.output)
    print(args.output)


if __name__ == "__main__":
    main()
