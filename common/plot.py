"""Pictures of the logs of train_math.py.

    python -m common.plot runs/math [MORE ...] --output FILE.png     several runs in one picture
"""
import argparse
import os
import sys
from pathlib import Path

from common.logs import read

PANELS = {
    "reward": "mean reward: samples (line),\nheld out with 95% interval (squares)",
    "response_length": "response length\n(tokens)",
    "clip_fraction": "clip fraction\n(share of tokens)",
    "log_ratio_std": "spread of log s: how far\nlater minibatches have moved"}
OLD_NAMES = {  # of the committed logs' metrics
    "accuracy": "reward", "eval_strict": "eval_reward",
    "eval_strict_interval": "eval_reward_interval"}


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
    for i, (label, rows) in enumerate(runs.items()):
        color = f"C{i}"
        rows = [row | {new: row[old] for old, new in OLD_NAMES.items() if old in row}
                for row in rows]
        for axis, name in zip(axes, PANELS):
            known = [row for row in rows if row.get(name) is not None]
            steps = [row["step"] for row in known]
            values = [row[name] for row in known]
            axis.plot(steps, values, ".-", color=color, alpha=0.8, label=label)
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
        axes[3].axhline(eps_high, color="gray", linestyle="--", label="GSPO's upper clip range")
        axes[3].legend()
    figure.savefig(path, dpi=110)
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
