"""What does each ratio correct? Exact arithmetic instead of training.

    python experiments/rivals.py exact      # half a minute on one core

A policy small enough to enumerate: 16 contexts x 8 tokens, position t of a response has context t mod 16.
Token 0 is a slip; a response is right (reward 1) if nothing in it slips, which has probability 1/e whatever
its length. So J = prod_t (1 - p(0 | c_t)), and the expectation of each gradient estimate factorises over
positions. Responses come from pi_old; the gradient is wanted at pi, which has moved away from it by a given
spread of the tokens' log-ratio, along the gradient of J ("improved") or at random.

exact.png: the direction of the estimates without a ratio, with GRPO's token ratios, GSPO's sequence ratio,
and the sequence ratio without its root, against length; in expectation, and in a batch. Raw figures:
results/rivals/exact_ratios.jsonl."""
import itertools
import json
import statistics

import torch
from tqdm import tqdm

CONTEXTS, TOKENS, BATCH = 16, 8, 128
LENGTHS, SEEDS = (8, 32, 128, 512, 1024), range(4)
SPREADS = 0.03, 0.1
HOW = {"improved": "the policy has improved", "at random": "the policy has moved at random"}
WEIGHTS = {"no ratio": "tab:gray", "token ratio (GRPO)": "tab:orange", "sequence ratio (GSPO)": "tab:blue",
           "sequence ratio, no root": "tab:red"}


def positions(length):
    """How many positions of a response have each context, (16,)."""
    return torch.bincount(torch.arange(length) % CONTEXTS, minlength=CONTEXTS).double()


def old_policy(length, g):
    """Logits (16, 8): a slip has probability 1/length on average."""
    logits = torch.randn(CONTEXTS, TOKENS, generator=g)
    slip = torch.exp(0.5 * torch.randn(CONTEXTS, generator=g))
    slip = slip / (positions(length) * slip).sum()
    logits[:, 0] = logits[:, 1:].logsumexp(dim=1) + (slip / (1 - slip)).log()
    return logits


def moments(old, new, length, own, others):
    """Of one response's estimate, sum_t w_t A grad log pi(y_t), under the old policy: its mean (16, 8) and
    the mean of its squared norm. w_t = own(y_t) * prod of others(y_u) over u != t, A = reward - E[reward],
    and grad is taken at `new`. own, others (16, 8) are weights of a token in its context."""
    p, counts = old.softmax(1), positions(length)
    right = torch.ones(CONTEXTS, TOKENS)
    right[:, 0] = 0
    score = torch.eye(TOKENS) - new.softmax(1)[:, None, :]           # (16, 8, 8): d log pi(k | c) / d logits[c]
    baseline = (counts * (p * right).sum(1).log()).sum().exp()

    def along(weights):  # E_old[weights * score], (16, 8)
        return ((p * weights)[:, :, None] * score).sum(1)

    def but(weights, n):  # prod of E_old[weights] over all positions but n of context c, (16,)
        logs = (p * weights).sum(1).log()
        return ((counts * logs).sum() - n * logs).exp()

    mean, square = 0, 0
    # A = R - baseline, and A^2 = (1 - 2 baseline) R + baseline^2, as R is 0 or 1
    for of, in_mean, in_square in ((right, 1, 1 - 2 * baseline), (1, -baseline, baseline**2)):
        mean = mean + in_mean * (counts * but(others * of, 1))[:, None] * along(own * of)
        same = (p * own**2 * of * (score**2).sum(2)).sum(1)  # a position with itself; two of one context
        two = (along(own * others * of) ** 2).sum(1)
        square += in_square * (counts * but(others**2 * of, 1) * same
                               + counts * (counts - 1) * but(others**2 * of, 2) * two).sum()
    return mean, square


def estimates(old, new, length):
    """{weight: moments}; without its root the sequence ratio is importance sampling, and its mean the
    gradient."""
    ratio, one = (new.log_softmax(1) - old.log_softmax(1)).exp(), torch.ones_like(old)
    root = ratio ** (1 / length)
    pairs = zip(WEIGHTS, ((one, one), (ratio, one), (root, root), (ratio, ratio)))
    return {name: moments(old, new, length, own, others) for name, (own, others) in pairs}


def gradient(old, new, length):
    return estimates(old, new, length)["sequence ratio, no root"][0]


def move(old, length, spread, how, g):
    """New logits, where the tokens' log-ratio has standard deviation `spread` under the old policy."""
    direction = torch.randn(old.shape, generator=g)
    if how == "improved":
        direction = gradient(old, old, length)
    p = old.softmax(1) * (positions(length) / length)[:, None]
    scale = spread / direction.std()
    for _ in range(60):
        log_ratio = (old + scale * direction).log_softmax(1) - old.log_softmax(1)
        scale *= spread / (p * (log_ratio - (p * log_ratio).sum()) ** 2).sum().sqrt()
    return old + scale * direction


def ratios(length, spread, how, seed):
    """One line of exact.png: all of it exact."""
    g = torch.Generator().manual_seed(seed)
    old = old_policy(length, g)
    new = move(old, length, spread, how, g)
    truth, row = gradient(old, new, length), {"length": length, "spread": spread, "how": how, "seed": seed}
    for name, (mean, square) in estimates(old, new, length).items():
        along, noise = (mean * truth).sum() / truth.norm(), square - (mean * mean).sum()
        row[name] = {"bias": ((mean - truth).norm() / truth.norm()).item(),
                     "angle": (along / mean.norm()).clamp(-1, 1).acos().rad2deg().item(),
                     "noise": (noise.sqrt() / truth.norm()).item(),
                     "cosine": (along / ((mean * mean).sum() + noise / BATCH).sqrt()).item()}
    return row


def draw_ratios(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, sharey="row", layout="constrained")
    for column, how in enumerate(HOW):
        for line, (key, label) in enumerate((
                ("angle", "degrees between the estimate's\nexpectation and the gradient"),
                ("cosine", f"cosine between a batch of {BATCH}\nand the gradient"))):
            axis = axes[line, column]
            for name, colour in WEIGHTS.items():
                for spread, style in zip(SPREADS, (":", "-")):
                    points = [statistics.fmean(row[name][key] for row in rows if (n, how, spread) == (
                        row["length"], row["how"], row["spread"])) for n in LENGTHS]
                    axis.plot(LENGTHS, points, style, color=colour, marker=".",
                              label=name if (line, column, spread) == (0, 0, SPREADS[1]) else None)
            axis.set(xscale="log", ylabel=label, title=HOW[how] if line == 0 else "", ylim=(0, None))
            axis.grid(alpha=0.3)
        axes[1, column].set_xlabel("tokens in a response")
        axes[1, column].set_xticks(LENGTHS, map(str, LENGTHS))
        axes[1, column].minorticks_off()
    figure.legend(loc="outside upper center", ncols=4,
                  title=f"spread of the tokens' log-ratio {SPREADS[1]} (dotted: {SPREADS[0]})")
    figure.savefig(path, dpi=110)


def main(results):
    torch.set_num_threads(1)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        measure(results)
    finally:
        torch.set_default_dtype(default)


def measure(results):
    jobs = list(itertools.product(LENGTHS, SPREADS, HOW, SEEDS))
    rows = [ratios(*job) for job in tqdm(jobs)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (results / "exact_ratios.jsonl").write_text(text, encoding="utf-8")
    draw_ratios(rows, results / "exact.png")
