"""Draws three pictures of the lesson, which need no new run: python -m lesson.pictures

clip.png shows the clipped objective of a response, and weights.png by how much several losses
multiply the gradient of a response. Both come from the functions of gspo.py. In weights.png, all
tokens of the response have the same ratio, so that the ratio of each token is also that of the
response. rollout.png shows the importance ratios in one step of the small world, from the log that
is in explorer.html.
"""
import base64
import json
import re
import zlib
from pathlib import Path

import torch
from matplotlib.figure import Figure

from gspo import clipped_objective
from tools.plot import STYLES, shrink

HERE = Path(__file__).parent
LOW, HIGH = 0.2, 0.3  # the clip range of clip.png, wide enough to be seen


def with_clip(low, high):
    """The clipped objective with this range, as a function of the log-ratio."""
    def objective(log_ratio, advantage):
        return clipped_objective(log_ratio.exp(), advantage, low, high)

    return objective


def cispo(log_ratio, advantage):
    weight = log_ratio.exp().detach().clamp(max=1.28)
    return weight * advantage * log_ratio


def sapo(log_ratio, advantage):
    tau = 1.0 if advantage > 0 else 1.05
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1))
    return 4 / tau * gate * advantage


CURVES = {  # label: (objective, (colour, line style), width); where lines meet, all remain visible
    "GSPO (3e-4, 4e-4)": (with_clip(3e-4, 4e-4), STYLES["gspo"], 4),
    "PPO, GRPO (0.2, 0.27)": (with_clip(0.2, 0.27), STYLES["grpo"], 3),
    "CISPO (ratio at most 1.28)": (cispo, ("#CC79A7", "-."), 2),
    "SAPO (1 and 1.05)": (sapo, ("#009E73", (0, (8, 1))), 1.5),
    "no clip": (with_clip(1, 1e9), STYLES["no clipping"], 2)}


def weight(objective, ratio, advantage):
    """What multiplies the advantage in the gradient with respect to the log-prob, for each ratio:
    1 in the first update of a rollout, and 0 where the response is clipped."""
    log_ratio = ratio.log().requires_grad_()
    total = objective(log_ratio, torch.tensor(advantage)).sum()
    return torch.autograd.grad(total, log_ratio)[0] / advantage


def draw_clip(path):
    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle(f"The clipped objective, with an example range of {1 - LOW} to {1 + HIGH}")
    ratio = torch.linspace(0.4, 1.7, 1301).double()
    panels = figure.subplots(1, 2)
    for axis, advantage in zip(panels, (1.0, -1.0)):
        clipped = clipped_objective(ratio, torch.tensor(advantage), LOW, HIGH)
        color, line = STYLES["no clipping"]
        axis.plot(ratio, ratio * advantage, color=color, linestyle=line, label="s A: no clip")
        axis.plot(ratio, clipped, color=STYLES["gspo"][0], linewidth=2.5,
                  label="min(s A, clip(s) A)")
        ends = ratio[weight(with_clip(LOW, HIGH), ratio, advantage) == 0]
        axis.axvspan(ends.min(), ends.max(), color="0.88", label="clipped: the gradient is 0")
        for start in (0.6, 0.95, 1.1) if advantage > 0 else (1.0, 1.2, 1.5):
            end = start + 0.15 * advantage  # along the objective, upwards
            axis.annotate("", (end, abs(end) * advantage), (start, start * advantage),
                          arrowprops={"arrowstyle": "-|>", "linewidth": 2})
        side = "right" if advantage > 0 else "left"
        axis.set(xlabel="importance ratio s", ylabel="objective of the response",
                 title=f"A = {advantage:+.0f}: the gradient moves s to the {side}")
        axis.axvline(1, color="0.5", linewidth=0.8)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right" if advantage > 0 else "upper right", fontsize=9)
    save(figure, path)


def draw_weights(path):
    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle("By how much each loss multiplies the gradient of a response")
    ratio = torch.linspace(0.3, 2.2, 3801).double()
    panels = figure.subplots(1, 2, sharey=True)
    for axis, advantage in zip(panels, (1.0, -1.0)):
        for label, (objective, (color, line), width) in CURVES.items():
            axis.plot(ratio, weight(objective, ratio, advantage), color=color, linestyle=line,
                      linewidth=width, label=label)
        kind = "raise" if advantage > 0 else "lower"
        axis.set(xlabel="ratio, the same for all tokens", ylim=(-0.05, 2.25),
                 title=f"A = {advantage:+.0f}: {kind} the probability")
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("weight of the gradient")
    panels[0].legend(loc="upper left", fontsize=9)
    save(figure, path)


def log_of_a_step():
    """(log s (updates, B) with GSPO, the same without a clip, advantages (B,)) of explorer.html."""
    page = (HERE / "explorer.html").read_text(encoding="utf-8")
    log = json.loads(re.search(r"const D = (.*);", page)[1])["log"]
    advantages = torch.tensor(log["step"]["advantages"])
    found = []
    for name in "gspo", "none":
        data = bytearray(zlib.decompress(base64.b64decode(log[name]["log_s"])))
        log_s = torch.frombuffer(data, dtype=torch.int16) / 4000
        found.append(log_s.view(-1, len(advantages)))
    return *found, advantages


def draw_rollout(path):
    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle("Without the clip, most wrong responses become almost impossible in one step")
    *log_s, advantages = log_of_a_step()
    for axis, values, title in zip(figure.subplots(1, 2, sharey=True), log_s,
                                   ("with GSPO's clip", "without the clip")):
        updates = range(1, len(values) + 1)
        for kind, chosen, color, line in (("correct", advantages > 0, "#009E73", "-"),
                                          ("wrong", advantages < 0, "#8a2d74", "--")):
            ratios = values[:, chosen].exp()
            axis.plot(updates, ratios, color=color, linewidth=0.4, alpha=0.25)
            axis.plot(updates, ratios.median(1).values, color=color, linestyle=line, linewidth=3,
                      label=f"{kind} responses: the median")
        axis.axhline(1, color="0.5", linewidth=0.8)
        axis.set(title=title, xlabel="optimizer update in this step", xlim=(1, len(values)))
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("importance ratio s")
    figure.axes[0].legend(loc="lower left", fontsize=9)
    save(figure, path)


def save(figure, path):
    figure.savefig(path, dpi=120)
    shrink(path)


PICTURES = {"clip.png": draw_clip, "weights.png": draw_weights, "rollout.png": draw_rollout}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(HERE / name)
