"""What does each ratio correct, and what does each clip take out? Exact arithmetic instead of training.

    python experiments/rivals.py exact      # half a minute on one core

A policy small enough to enumerate: 16 contexts x 8 tokens, position t of a response has context t mod 16.
Token 0 is a slip; a response is right (reward 1) if nothing in it slips, which has probability 1/e whatever
its length. So J = prod_t (1 - p(0 | c_t)), and the expectation of each gradient estimate factorises over
positions. Responses come from pi_old; the gradient is wanted at pi, which has moved away from it by a given
spread of the tokens' log-ratio, along the gradient of J ("improved") or at random.

exact.png: the direction of the estimates without a ratio, with GRPO's token ratios, GSPO's sequence ratio,
and the sequence ratio without its root, against length; in expectation, and in a batch. exact_clip.png: the
direction that is left when 15% are clipped, token by token or as whole responses, and when the reported
likelihoods of a few tokens are wrong: from 8,000 samples each. Raw figures: results/rivals/exact_*.jsonl."""
import json

import torch
from tqdm import tqdm

CONTEXTS, TOKENS, BATCH, CLIPPED = 16, 8, 128, 0.15
LENGTHS, SEEDS = (8, 32, 128, 512, 1024), range(4)
SPREADS = 0.03, 0.1
HOW = {"improved": "the policy has improved", "at random": "the policy has moved at random"}
WEIGHTS = {"no ratio": "tab:gray", "token ratio (GRPO)": "tab:orange", "sequence ratio (GSPO)": "tab:blue",
           "sequence ratio, no root": "tab:red"}
GATES = {"nothing clipped": "tab:gray", "tokens clipped (GRPO)": "tab:orange",
         "responses clipped (GSPO)": "tab:blue"}
CAPPED = {"no ratio": "tab:gray", "token ratio": "tab:orange", "token ratio, at most 2": "tab:olive",
          "sequence ratio": "tab:blue"}


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


def sample(old, new, length, n, g):
    """n responses of the old policy: tokens (n, length), advantages (n,), log-ratios (n, length)."""
    context = torch.arange(length) % CONTEXTS
    cumulative = old.softmax(1).cumsum(1)[context]
    tokens = (torch.rand(n, length, 1, generator=g) > cumulative).sum(-1).clamp(max=TOKENS - 1)
    rewards = (tokens != 0).all(1).double()
    return tokens, rewards - rewards.mean(), (new.log_softmax(1) - old.log_softmax(1))[context, tokens]


def gradients(tokens, weights, new):
    """Each sample's sum_t weights_t grad log pi(y_t), (n, 128)."""
    n, length = tokens.shape
    index = (torch.arange(length) % CONTEXTS * TOKENS + tokens)
    chosen = torch.zeros(n, CONTEXTS * TOKENS).scatter_add_(1, index, weights).view(n, CONTEXTS, TOKENS)
    return (chosen - chosen.sum(2, keepdim=True) * new.softmax(1)).flatten(1)


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


def direction(per_sample, truth):
    """The cosine between the samples' mean gradient and the true one, without what chance adds to the mean's
    norm."""
    mean = per_sample.mean(0)
    along = (mean * truth).sum() / truth.norm()
    norm2 = (mean * mean).sum() - per_sample.var(dim=0).sum() / len(per_sample)
    return (along / torch.maximum(norm2, along * along).sqrt()).item()


def clips(length, spread, how, seed):
    """One line of exact_clip.png, left: 15% clipped, those whose ratio has gone furthest in their advantage's
    direction; what is left has weight 1."""
    g = torch.Generator().manual_seed(seed)
    old = old_policy(length, g)
    new = move(old, length, spread, how, g)
    truth = gradient(old, new, length).flatten()
    tokens, advantages, log_ratio = sample(old, new, length, 8000, g)
    gone = log_ratio * advantages.sign()[:, None]
    row = {"length": length, "spread": spread, "how": how, "seed": seed}
    for name, far in zip(GATES, (None, gone, gone.mean(1, keepdim=True).expand_as(gone))):
        kept = torch.ones_like(gone) if far is None else (far <= far.flatten().kthvalue(
            int((1 - CLIPPED) * far.numel())).values).double()
        row[name] = {"cosine": direction(gradients(tokens, kept * advantages[:, None], new), truth),
                     "clipped": 1 - kept.mean().item()}
    return row


def wrong_likelihoods(share, size, seed, length=128):
    """One line of exact_clip.png, right: the policy has not moved, but `share` of the tokens' reported
    log-probs are off by a normal error of standard deviation `size`. Expected cosines of a batch's gradient
    over that without a ratio."""
    g = torch.Generator().manual_seed(seed)
    old = old_policy(length, g)
    truth = gradient(old, old, length).flatten()
    tokens, advantages, log_ratio = sample(old, old, length, 8000, g)
    off = torch.rand(log_ratio.shape, generator=g) < share
    error = off * torch.randn(log_ratio.shape, generator=g) * size
    weights = (torch.ones_like(error), error.exp(), error.exp().clamp(max=2), error.mean(1, keepdim=True).exp()
               .expand_as(error))
    cosines = []
    for w in weights:
        per_sample = gradients(tokens, w * advantages[:, None], old)
        along = (per_sample.mean(0) * truth).sum() / truth.norm()
        cosines.append((along / (along**2 + per_sample.var(dim=0).sum() / BATCH).sqrt()).item())
    return {"share": share, "size": size, "seed": seed, **dict(zip(CAPPED, (c / cosines[0] for c in cosines)))}


def where(rows, **values):
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def mean(rows, name, key=None):
    values = [row[name] if key is None else row[name][key] for row in rows]
    return sum(values) / len(values)


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
                    points = [mean(where(rows, length=n, how=how, spread=spread), name, key) for n in LENGTHS]
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


def draw_clips(rows, errors, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    lengths = sorted({row["length"] for row in rows})
    for axis, how in zip(axes, HOW):
        for name, colour in GATES.items():
            points = [mean(where(rows, length=n, how=how), name, "cosine") for n in lengths]
            axis.plot(lengths, points, marker="o", color=colour, label=name)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set(xscale="log", xlabel="tokens in a response", ylabel="cosine with the gradient",
                 ylim=(-0.5, 1.05), title=f"{HOW[how]}:\n{CLIPPED:.0%} clipped")
        axis.set_xticks(lengths, map(str, lengths))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    kinds = list(dict.fromkeys((row["share"], row["size"]) for row in errors))
    for i, (name, colour) in enumerate(CAPPED.items()):
        points = [mean(where(errors, share=share, size=size), name) for share, size in kinds]
        axes[2].bar([k + 0.2 * i for k in range(len(kinds))], points, 0.18, color=colour, label=name)
    axes[2].set_xticks([k + 0.3 for k in range(len(kinds))], [f"{s:.0%} off\nby {z:g}" for s, z in kinds])
    axes[2].set(title="Reported likelihoods wrong, policy unchanged,\n128 tokens",
                ylabel="cosine, over that without a ratio", ylim=(0, 1.35))
    axes[2].legend(fontsize=8, loc="upper center", ncols=2)
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
    jobs = {"ratios": [(ratios, n, spread, how, seed) for n in LENGTHS for spread in SPREADS for how in HOW
                       for seed in SEEDS],
            "clips": [(clips, n, 0.1, how, seed) for n in LENGTHS[:4] for how in HOW for seed in SEEDS],
            "wrong_likelihoods": [(wrong_likelihoods, share, size, seed) for share, size in
                                  ((1, 0.1), (1, 0.3), (0.01, 2), (0.1, 2)) for seed in SEEDS]}
    bar, rows = tqdm(total=sum(map(len, jobs.values()))), {}
    for name, calls in jobs.items():
        rows[name] = []
        for function, *arguments in calls:
            rows[name].append(function(*arguments))
            bar.update()
        text = "".join(json.dumps(row) + "\n" for row in rows[name])
        (results / f"exact_{name}.jsonl").write_text(text, encoding="utf-8")
    draw_ratios(rows["ratios"], results / "exact.png")
    draw_clips(rows["clips"], rows["wrong_likelihoods"], results / "exact_clip.png")
