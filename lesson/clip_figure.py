"""A figure of lesson/README.md: the objective of a response against its importance ratio s.

    python -m lesson.clip_figure      writes lesson/clip.png
"""
from pathlib import Path

import torch
from matplotlib.figure import Figure

from gspo import clipped_objective

LOW, HIGH = 0.2, 0.3  # wide, to be seen: the paper's range is 3e-4 and 4e-4


def main():
    s = torch.linspace(0.4, 1.7, 400)
    figure = Figure((9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, advantage in zip(axes, (1.0, -1.0)):
        value = clipped_objective(s, torch.tensor(advantage), LOW, HIGH)
        if advantage > 0:
            better = "better"
            held = s > 1 + HIGH
        else:
            better = "worse"
            held = s < 1 - LOW
        axis.axvspan(1 - LOW, 1 + HIGH, color="gray", alpha=0.15)
        axis.plot(s, s * advantage, ":", color="C0", label="s A, without a clip")
        axis.plot(s[~held], value[~held], color="C0", linewidth=2.5, label="it pushes")
        axis.plot(s[held], value[held], color="C3", linewidth=2.5, label="clipped: no more push")
        axis.plot(1, advantage, "o", color="black")
        axis.annotate("the rollout's policy, s = 1", (1, advantage), (8, -12 * advantage),
                      textcoords="offset points", fontsize=9)
        axis.set(title=f"A = {advantage:+.0f}: {better} than its group's mean", xlabel="s",
                 ylabel="min(s A, clip(s) A)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    path = Path(__file__).with_name("clip.png")
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main()
