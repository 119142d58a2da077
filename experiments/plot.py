"""Runs' logs, read and pictured.

    python experiments/plot.py runs/tiny [MORE ...] --output FILE.png      # some runs in one picture
"""
import argparse
import json
import os
import sys
from pathlib import Path


def read(path):
    """The rows of a .jsonl, but for a last line that a kill cut short."""
    rows, path = [], Path(path)
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            pass
    return rows


def append(path, row):
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


PANELS = {"accuracy": "right answers: samples (line),\nheld out with 95% interval (squares)",
          "response_length": "response length\n(tokens)", "clip_fraction": "clip fraction\n(share of tokens)",
          "log_ratio_std": "spread of log s: how far\nlater minibatches have moved"}


def draw(runs, path, eps_high=None):
    """A picture of runs, {label: rows of metrics}, with GSPO's upper clip range if it is given."""
    try:
        import matplotlib
    except ImportError:
        return print("no picture without matplotlib: pip install matplotlib", file=sys.stderr)
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.6), layout="constrained")
    for i, (label, rows) in enumerate(runs.items()):
        for axis, name in zip(axes, PANELS):
            known = [row for row in rows if row.get(name) is not None]
            axis.plot([row["step"] for row in known], [row[name] for row in known], ".-", color=f"C{i}", alpha=0.8,
                      label=label)
        for row in rows:
            if "eval_strict" in row:
                axes[0].plot([row["step"]] * 2, row["eval_strict_interval"], "_-", color=f"C{i}", alpha=0.5)
                axes[0].plot(row["step"], row["eval_strict"], "s", color=f"C{i}")
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="output_dirs of train_math.py")
    parser.add_argument("--output", type=Path, default=Path("runs.png"))
    a = parser.parse_args()
    missing = [str(run) for run in a.runs if not (run / "metrics.jsonl").exists()]
    if missing:
        parser.error(f"no metrics.jsonl in {', '.join(missing)}")
    draw({os.path.relpath(run): read(run / "metrics.jsonl") for run in a.runs}, a.output)
    print(a.output)
