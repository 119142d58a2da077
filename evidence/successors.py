"""The losses of GSPO's successors and of related algorithms, with the arguments of gspo.gspo_loss.

Each docstring says what eps_low and eps_high mean. The formulas are those of public implementations
(TRL, verl, SkyRL), apart from FSPO's, which follows its abstract. Of the papers, we read abstracts
and summaries. The numbers of equations come from the implementations. Numbers such as 2511.20347
are those of arXiv. `surrogate` makes variants of GSPO and GRPO.
"""
import math

import torch

from gspo import _log_ratio, _loss, _token_mean, clipped_objective, sequence_ratio

BUDGET = 210  # tokens, the divisor of Dr. GRPO; it matters to AdamW only if gradients are clipped


def loss_of(objective):
    """A loss like gspo_loss with another objective (B,) of the responses, which is maximised.

    The objective is a function of log_ratio (B, T), which is 0 on padding, advantages (B,), mask
    (B, T), eps_low and eps_high."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        mask = mask.bool()
        log_ratio = _log_ratio(log_probs, old_log_probs, mask)
        value = objective(log_ratio, advantages, mask, eps_low, eps_high)
        value = value.where(mask.any(dim=1), 0)  # a response without tokens has 0, as in gspo_loss
        return _loss(value, denominator)

    loss.__doc__ = objective.__doc__
    return loss


@loss_of
def sapo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """SAPO (2511.20347): a smooth function of the token ratio r replaces the clip. The objective is
    4 / tau sigmoid(tau (r - 1)) A, where tau is eps_high for A > 0 and eps_low for A < 0. Its slope
    in r is A at r = 1, and falls to 0 over a distance of a few 1 / tau."""
    a = advantages[:, None]
    tau = torch.where(a > 0, eps_high, eps_low)
    ratio = log_ratio.exp()
    gate = torch.sigmoid(tau * (ratio - 1))
    return _token_mean(4 / tau * gate * a, mask)


@loss_of
def cispo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """CISPO (2506.13585, Eq. 4 and 5): A log pi of each token is multiplied by the token's ratio,
    which is limited to 1 + eps_high and has no gradient. No token is clipped. The objective is the
    mean over all tokens. Here A log pi_old, a constant, is subtracted. There is no lower bound, so
    eps_low is not used."""
    weight = log_ratio.exp().detach().clamp(max=1 + eps_high)
    objective = weight * advantages[:, None] * log_ratio
    return _token_sum(objective, mask) / _mean_length(mask)


@loss_of
def gmpo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """GMPO (2507.20673): the geometric mean of token ratios, as in GSPO, but each token ratio is
    clipped first: to at most e^eps_high if A > 0, and to at least e^-eps_low if A < 0."""
    below = log_ratio.clamp(min=-eps_low)
    above = log_ratio.clamp(max=eps_high)
    clipped = torch.where(advantages[:, None] > 0, above, below)
    return _token_mean(clipped, mask).exp() * advantages


@loss_of
def fspo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """FSPO (2509.09177): the clipped objective with the ratio of the whole response, without GSPO's
    length normalisation. The clip range is e^(-eps_low sqrt|y|) to e^(eps_high sqrt|y|), as in the
    abstract of version 3. The abstract of version 1 also has a drift term, which is not in here."""
    ratio = log_ratio.sum(dim=1).clamp(max=20).exp()
    root = mask.sum(dim=1).sqrt()
    low = (-eps_low * root).exp()
    high = (eps_high * root).exp()
    clipped = ratio.clamp(low, high)
    return torch.minimum(ratio * advantages, clipped * advantages)


@loss_of
def luspo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """LUSPO (2602.05261): GSPO's objective, where each response is multiplied by its length. The
    tokens of long responses then have the same weight as those of short ones."""
    ratio = _token_mean(log_ratio, mask).exp()
    lengths = mask.sum(dim=1)
    return clipped_objective(ratio, lengths * advantages, eps_low, eps_high)


@loss_of
def dapo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """DAPO (2503.14476, Eq. 8): GRPO's objective, averaged over all tokens of the minibatch."""
    objective = clipped_objective(log_ratio.exp(), advantages[:, None], eps_low, eps_high)
    return _token_sum(objective, mask) / _mean_length(mask)


@loss_of
def dr_grpo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """Dr. GRPO (2503.20783): GRPO's objective, summed over tokens and divided by a constant. It is
    used with centred_advantages."""
    objective = clipped_objective(log_ratio.exp(), advantages[:, None], eps_low, eps_high)
    return _token_sum(objective, mask) / BUDGET


def centred_advantages(rewards, group_size):
    """Dr. GRPO: the rewards minus the mean of the group, without dividing by its deviation."""
    groups = rewards.view(-1, group_size)
    mean = groups.mean(dim=1, keepdim=True)
    return (groups - mean).flatten()


def clip_of(name, low, high):
    """(ratio, eps_low, eps_high): what the loss with these two numbers clips, for clip_fraction.

    SAPO and CISPO clip nothing. FSPO's range depends on the length, so it cannot be given here."""
    if name in ("sapo", "cispo", "fspo"):
        return "token", 1.0, 1e9
    if name == "gmpo":
        return "token", 1 - math.exp(-low), math.exp(high) - 1
    return "token" if name in ("dapo", "dr_grpo") else "sequence", low, high


def _token_sum(x, mask):
    return x.masked_fill(~mask, 0).sum(dim=1)


def _mean_length(mask):
    """The divisor that turns sums over tokens into a mean over all tokens of the minibatch.
    Responses without gradient, which train_math.py leaves out, count with the mean length of the
    others."""
    return mask.sum(dim=1).float().mean()


# ---- variants of GSPO and GRPO -------------------------------------------------------------------


def surrogate(weight, gate, cap=None, negatives=1.0):
    """A loss that separates the two roles of the importance ratio: the weight, which multiplies a
    token's gradient, and the gate, which decides whether the token is clipped.

    The gradient of token t of response i is multiplied by w_{i,t} A_i / |y_i|, or by 0 if the ratio
    of the gate is outside the clip range. weight and gate are "token", "sequence" or "one" (a ratio
    that is always 1). (token, token) has GRPO's gradient (Eq. 12), and (sequence, sequence) has
    GSPO's (Eq. 10). The values of the losses differ from theirs.
    cap: the largest weight. negatives: a factor for every A < 0."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        with torch.no_grad():
            token = _log_ratio(log_probs, old_log_probs, mask).exp()
            sequence = sequence_ratio(log_probs, old_log_probs, mask)[:, None].expand_as(token)
            ratios = {"token": token, "sequence": sequence, "one": torch.ones_like(token)}
            a = advantages[:, None]
            above = (a > 0) & (ratios[gate] > 1 + eps_high)
            below = (a < 0) & (ratios[gate] < 1 - eps_low)
            pushed = a.where(a > 0, negatives * a)
            pushed = ratios[weight].clamp(max=cap or torch.inf) * pushed
            coefficient = pushed.masked_fill(above | below, 0)
        return _loss(_token_mean(coefficient * log_probs, mask), denominator)
    return loss
