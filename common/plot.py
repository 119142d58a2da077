"""Pictures of the logs of train_math.py.

    python -m common.plot runs/math [MORE ...] --output FILE.png     several runs in one picture
"""
import argparse
import itertools
import os
import sys
from pathlib import Path

from common.logs import read

PANELS = {
    "reward": "mean reward: samples (line),\nheld out with 95% interval (squares)",
    "response_length": "response length\n(tokens)",
    "clip_fraction": "clip fraction\n(share of tokens)",
    "log_ratio_std": "standard deviation of log s\nafter the first update"}
STYLES = {  # Okabe and Ito's colours, which colour-blind readers can tell apart, and line styles
    "gspo": ("#0072B2", "-"),
    "grpo": ("#E69F00", "--"),
    "no clipping": ("#D55E00", ":"),
    "one update": ("#666666", "-."),
}
MORE_STYLES = (("#009E73", "-"), ("#CC79A7", "--"), ("#56B4E9", "-."), ("black", ":"))
MARKERS = ".^vDxP"  # for runs of the same kind; squares are evaluations
NO_CLIPPING = 1e3  # an eps_high from here on clips nothing
OLD_NAMES = {  # of the committed logs' metrics
    "accuracy": "reward", "eval_strict": "eval_reward",
    "eval_strict_interval": "eval_reward_interval"}


def kind_of(label, rows):
    """What decides the colour of a run: its algorithm, "no clipping" or "one update" (one optimizer
    step per rollout). A log without settings is judged by its label."""
    settings = rows[0].get("settings", {}) if rows else {}
    if not settings:
        words = label.lower().replace("_", " ").replace("/", " ").split()
        if "no" in words and {"clip", "clipping"} & set(words):
            return "no clipping"
        if "one" in words and "update" in words:
            return "one update"
        return next((name for name in ("grpo", "gspo") if name in words), label)
    if settings.get("minibatches") == 1 and settings.get("epochs") == 1:
        return "one update"
    if (settings.get("eps_high") or 0) >= NO_CLIPPING:
        return "no clipping"
    return settings.get("algorithm", label)


def styles_of(runs):
    """{label: (colour, line style, marker)} of runs, {label: rows}.

    Runs of one kind share a colour and a line style, and differ in their markers."""
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


def draw(runs, path, eps_high=None):
    """Draws runs, {label: rows of metrics}, and GSPO's upper clip range if it is given."""
    try:
        import matplotlib
    except ImportError:
        print("No picture was drawn, because matplotlib is missing: pip install matplotlib",
              file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.6),
                                layout="constrained")
    styles = styles_of(runs)
    for label, rows in runs.items():
        color, line, marker = styles[label]
        rows = [row | {new: row[old] for old, new in OLD_NAMES.items() if old in row}
                for row in rows]
        for axis, name in zip(axes, PANELS):
            known = [row for row in rows if row.get(name) is not None]
            steps = [row["step"] for row in known]
            values = [row[name] for row in known]
            axis.plot(steps, values, color=color, linestyle=line, marker=marker,
                      markersize=4, label=label)
        for row in rows:
            if "eval_reward" in row:
                axes[0].plot(row["step"], row["eval_reward"], "s", color=color)
            if "eval_reward_interval" in row:
                axes[0].plot([row["step"]] * 2, row["eval_reward_interval"], "_-", color=color,
                             alpha=0.5)
    for axis, title in zip(axes, PANELS.values()):
        axis.update_datalim([(1, 0)])  # so that the room above counts from 0
        axis.autoscale_view()
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(title=title, xlabel="rollout", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend()
    if eps_high:
        axes[3].axhline(eps_high, color="black", linewidth=0.8, label="GSPO's upper clip range")
        axes[3].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="output_dirs of train_math.py")
    parser.add_argument("--output", type=Path, default=Path("runs.png"))
    args = parser.parse_args()
    missing = [str(run) for run in args.runs if not (run / "metrics.jsonl").exists()]
    if missing:
        parser.error(f"no metrics.jsonl in {', '.join(missing)}")
    draw({os.path.relpath(run): read(run / "metrics.jsonl") for run in args.runs}, args.output)
    print(args.output)


if __name__ == "__main__":
    main()
