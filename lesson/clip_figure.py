"""A figure of lesson/README.md: the objective of a response against its importance ratio s.

    python -m lesson.clip_figure      draws lesson/clip.png
"""
from pathlib import Path

import torch
from matplotlib.figure import Figure

from common.plot import STYLES
from gspo import clipped_objective

LOW, HIGH = 0.2, 0.3  # wide enough to be visible; the paper's range is 3e-4 and 4e-4
BLUE, _ = STYLES["gspo"]
RED, DOTTED = STYLES["no clipping"]


def main():
    s = torch.linspace(0.4, 1.7, 400)
    figure = Figure((9, 4), layout="constrained")
    figure.suptitle("The gradient is 0 where s is beyond the clip range in the direction that the "
                    "advantage A favours")
    axes = figure.subplots(1, 2)
    for axis, advantage in zip(axes, (1.0, -1.0)):
        value = clipped_objective(s, torch.tensor(advantage), LOW, HIGH)
        if advantage > 0:
            better = "better"
            clipped = s > 1 + HIGH
        else:
            better = "worse"
            clipped = s < 1 - LOW
        axis.axvspan(1 - LOW, 1 + HIGH, color="gray", alpha=0.15,
                     label=f"clip range, here {LOW} and {HIGH}")
        axis.plot(s, s * advantage, DOTTED, color=RED, linewidth=2, label="no clipping: s A")
        axis.plot(s[~clipped], value[~clipped], color=BLUE, linewidth=2.5, label="not clipped")
        axis.plot(s[clipped], value[clipped], "--", color="black", linewidth=2.5,
                  label="clipped: gradient 0")
        axis.plot(1, advantage, "o", color="black")
        axis.annotate("s = 1: before the first update", (1, advantage), (8, -14 * advantage),
                      textcoords="offset points", fontsize=9)
        axis.set(title=f"A = {advantage:+.0f}: {better} than the mean of its group",
                 xlabel="importance ratio s", ylabel="objective: min(s A, clip(s) A)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    path = Path(__file__).with_name("clip.png")
    figure.savefig(path, dpi=150)
    print(path)


if __name__ == "__main__":
    main()
