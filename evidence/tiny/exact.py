"""What does each importance ratio correct? This is computed exactly, without training.

    python -m evidence.tiny.exact      half a minute on one core

The policy is small enough to enumerate: 16 contexts and 8 tokens, where position t of a response
has the context t mod 16. Token 0 is a mistake. A response is correct (reward 1) if it contains no
mistake, which has a probability of about 1/e at every length. The expected reward is therefore
J = prod_t (1 - p(0 | c_t)), and the expectation of every gradient estimate factorises over the
positions. The responses are sampled from pi_old, and the gradient at pi is estimated. pi differs
from pi_old so much that the tokens' log-ratios have a given standard deviation. It differs either
in the direction of the gradient of J ("improved") or in a random direction.

exact.png shows the direction of four estimates against the length, in expectation (bias) and for
one batch (bias and variance), where the policy has improved and the log-ratios have a standard
deviation of 0.1. The estimates are those without a ratio, with GRPO's token ratios, with GSPO's
sequence ratio, and with the sequence ratio without the root. The numbers are in
results/tiny/exact_ratios.jsonl, also for a random direction and for a standard deviation of 0.03.
"""
import itertools
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from tools.logs import write
from tools.plot import STYLES

RESULTS = Path(__file__).parents[1] / "results" / "tiny"
CONTEXTS = 16
TOKENS = 8
BATCH = 128
LENGTHS = 8, 32, 128, 512, 1024
SEEDS = range(4)
SPREADS = 0.03, 0.1  # standard deviation of the tokens' log-ratios
HOW = "improved", "at random"
SHOWN = "improved", 0.1  # what the picture shows
WEIGHTS = {  # name in the logs: label, colour, line style, and marker with its size and filling
    "no ratio": ("no weight", "#666666", "-", "s", 9, "none"),
    "token ratio (GRPO)": ("token ratios (GRPO)", *STYLES["grpo"], "^", 6, "full"),
    "sequence ratio (GSPO)": ("s (GSPO)", *STYLES["gspo"], "o", 4, "full"),
    "sequence ratio, no root": ("ratio of the response, no root", "#009E73", ":", "D", 5, "full"),
}
DRAWN = {
    "angle": ("bias: the mean estimate", "angle to the true gradient (degrees)"),
    "cosine": (f"bias and variance: the estimate from {BATCH} responses",
               "cosine with the true gradient (log scale)"),
}
TITLE = ("The weights with the right direction on average (left) have the worst direction in one "
         "batch (right)")


def positions(length):
    """The number of positions of a response that have each context, (16,)."""
    return torch.bincount(torch.arange(length) % CONTEXTS, minlength=CONTEXTS).double()


def normal(shape, g):
    return torch.randn(shape, generator=g, dtype=torch.double)


def old_policy(length, g):
    """Logits (16, 8). A mistake has a probability of 1/length on average."""
    logits = normal((CONTEXTS, TOKENS), g)
    slip = torch.exp(0.5 * normal(CONTEXTS, g))
    slip = slip / (positions(length) * slip).sum()
    odds = slip / (1 - slip)
    logits[:, 0] = logits[:, 1:].logsumexp(dim=1) + odds.log()
    return logits


def moments(old, new, length, own, others):
    """(mean (16, 8), mean of the squared norm) of one response's estimate under the old policy.

    The estimate is sum_t w_t A grad log pi(y_t), where w_t = own(y_t) * prod of others(y_u) over
    u != t, A = reward - E[reward], and grad is taken at `new`. own, others (16, 8): weights of a
    token in its context."""
    p = old.softmax(1)
    counts = positions(length)
    right = torch.ones_like(p)
    right[:, 0] = 0
    # (16, 8, 8): d log pi(k | c) / d logits[c]
    score = torch.eye(TOKENS, dtype=p.dtype) - new.softmax(1)[:, None, :]
    squares = (score**2).sum(2)

    def along(weights):  # E_old[weights * score], (16, 8)
        return ((p * weights)[:, :, None] * score).sum(1)

    def but(weights, n):  # prod of E_old[weights] over all positions but n of context c, (16,)
        logs = (p * weights).sum(1).log()
        return ((counts * logs).sum() - n * logs).exp()

    mean = 0
    square = 0
    baseline = but(right, 0)[0]
    # A = R - baseline, and A^2 = (1 - 2 baseline) R + baseline^2, as R is 0 or 1
    terms = (right, 1, 1 - 2 * baseline), (1, -baseline, baseline**2)
    for of, in_mean, in_square in terms:
        rest = counts * but(others * of, 1)
        mean += in_mean * rest[:, None] * along(own * of)
        same = (p * own**2 * of * squares).sum(1)  # the product of a position with itself
        two = (along(own * others * of) ** 2).sum(1)  # that of two positions with one context
        alone = counts * but(others**2 * of, 1) * same
        pairs = counts * (counts - 1) * but(others**2 * of, 2) * two
        square += in_square * (alone + pairs).sum()
    return mean, square


def estimates(old, new, length):
    """{weight: moments}. The sequence ratio without the root is importance sampling, so its mean is
    the gradient."""
    log_ratio = new.log_softmax(1) - old.log_softmax(1)
    ratio = log_ratio.exp()
    root = ratio ** (1 / length)
    one = torch.ones_like(old)
    own_and_others = (one, one), (ratio, one), (root, root), (ratio, ratio)
    return {name: moments(old, new, length, *weights)
            for name, weights in zip(WEIGHTS, own_and_others)}


def gradient(old, new, length):
    mean, _ = estimates(old, new, length)["sequence ratio, no root"]
    return mean


def move(old, length, spread, how, g):
    """New logits. The tokens' log-ratios have the standard deviation `spread` under the old policy.
    """
    direction = normal(old.shape, g)
    if how == "improved":
        direction = gradient(old, old, length)
    frequencies = positions(length) / length
    p = old.softmax(1) * frequencies[:, None]
    scale = spread / direction.std()
    for _ in range(60):
        new = old + scale * direction
        log_ratio = new.log_softmax(1) - old.log_softmax(1)
        mean = (p * log_ratio).sum()
        variance = (p * (log_ratio - mean) ** 2).sum()
        scale *= spread / variance.sqrt()
    return old + scale * direction


def ratios(length, spread, how, seed):
    """One row of exact_ratios.jsonl. All its numbers are exact."""
    g = torch.Generator().manual_seed(seed)
    old = old_policy(length, g)
    new = move(old, length, spread, how, g)
    truth = gradient(old, new, length)
    size = truth.norm()
    row = {"length": length, "spread": spread, "how": how, "seed": seed}
    for name, (mean, square) in estimates(old, new, length).items():
        along = (mean * truth).sum() / size
        signal = (mean * mean).sum()
        noise = square - signal
        in_batch = signal + noise / BATCH
        found = {
            "bias": (mean - truth).norm() / size,
            "angle": (along / mean.norm()).clamp(-1, 1).acos().rad2deg(),
            "noise": noise.sqrt() / size,
            "cosine": along / in_batch.sqrt(),
        }
        row[name] = {key: x.item() for key, x in found.items()}
    return row


def curve(rows, how, spread, name, key):
    """The means over the seeds, for each length."""
    own = [row for row in rows if row["how"] == how and row["spread"] == spread]
    return [statistics.fmean(row[name][key] for row in own if row["length"] == length)
            for length in LENGTHS]


def draw_ratios(rows, path):
    figure = Figure((11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, (key, (title, unit)) in zip(axes, DRAWN.items()):
        for name, (label, color, line, marker, size, filling) in WEIGHTS.items():
            points = curve(rows, *SHOWN, name, key)
            axis.plot(LENGTHS, points, line, color=color, marker=marker, markersize=size,
                      fillstyle=filling, label=label)
        axis.set(xscale="log", title=title, ylabel=unit,
                 xlabel="length of the responses (tokens, log scale)")
        axis.set_xticks(LENGTHS, map(str, LENGTHS))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylim(-0.5, None)
    axes[1].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  title="weight of a response or token; mean of four policies", handlelength=4)
    figure.suptitle(TITLE)
    figure.savefig(path, dpi=130)


def main():
    torch.set_num_threads(1)
    jobs = list(itertools.product(LENGTHS, SPREADS, HOW, SEEDS))
    rows = [ratios(*job) for job in tqdm(jobs)]
    write(RESULTS / "exact_ratios.jsonl", rows)
    draw_ratios(rows, RESULTS / "exact.png")


if __name__ == "__main__":
    main()
