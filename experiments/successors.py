"""The losses of GSPO's successors and of related algorithms, called like gspo.gspo_loss.

Each docstring says what eps_low and eps_high mean; the values of the papers are in
rival_settings.SUCCESSORS. The formulas are those of implementations (TRL, verl, SkyRL). Of the
papers, the abstracts were read.
"""
import torch

from gspo import _log_ratio, _loss, _token_mean, clipped_objective, gspo_loss

BUDGET = 210  # tokens: Dr. GRPO's divisor; AdamW feels it only where the gradient is clipped


def loss_of(objective):
    """gspo_loss with another objective of its responses, (B,), to be maximised: one of log_ratio
    (B, T), 0 on padding, advantages (B,), mask (B, T), eps_low and eps_high."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        mask = mask.bool()
        log_ratio = _log_ratio(log_probs, old_log_probs, mask)
        value = objective(log_ratio, advantages, mask, eps_low, eps_high)
        value = value.where(mask.any(dim=1), 0)  # without tokens: as in gspo_loss
        return _loss(value, denominator)

    loss.__doc__ = objective.__doc__
    return loss


@loss_of
def sapo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """SAPO (2511.20347): no clip but a soft gate on the token ratio r, 4 / tau sigmoid(tau (r - 1))
    A, where tau is eps_high for A > 0, eps_low for A < 0. Near r = 1 its slope is 1; it falls to 0
    within a few 1 / tau."""
    a = advantages[:, None]
    tau = torch.where(a > 0, eps_high, eps_low)
    ratio = log_ratio.exp()
    gate = torch.sigmoid(tau * (ratio - 1))
    return _token_mean(4 / tau * gate * a, mask)


@loss_of
def cispo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """CISPO (2506.13585, Eq. 4 and 5): the token ratio, at most 1 + eps_high, is a weight without
    gradient on A log pi (here less A log pi_old, a constant); nothing is dropped. Mean over all
    tokens. eps_low is not used: no lower bound."""
    weight = log_ratio.exp().detach().clamp(max=1 + eps_high)
    objective = weight * advantages[:, None] * log_ratio
    return _token_sum(objective, mask) / _mean_length(mask)


@loss_of
def gmpo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """GMPO (2507.20673): the geometric mean, as in GSPO, but of token ratios that are clipped
    first, to (e^-eps_low, e^eps_high), above where A > 0 and below where A < 0."""
    below = log_ratio.clamp(min=-eps_low)
    above = log_ratio.clamp(max=eps_high)
    clipped = torch.where(advantages[:, None] > 0, above, below)
    return _token_mean(clipped, mask).exp() * advantages


@loss_of
def fspo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """FSPO (2509.09177) without its drift term, whose formula was not found: the clipped objective
    on the whole response's ratio, without GSPO's root, in the range e^(-eps_low sqrt|y|) to
    e^(eps_high sqrt|y|)."""
    ratio = log_ratio.sum(dim=1).clamp(max=20).exp()
    root = mask.sum(dim=1).sqrt()
    low = (-eps_low * root).exp()
    high = (eps_high * root).exp()
    clipped = ratio.clamp(low, high)
    return torch.minimum(ratio * advantages, clipped * advantages)


@loss_of
def luspo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """LUSPO (2602.05261): GSPO's objective with each response times its length, so that no token of
    a longer one counts less."""
    ratio = _token_mean(log_ratio, mask).exp()
    lengths = mask.sum(dim=1)
    return clipped_objective(ratio, lengths * advantages, eps_low, eps_high)


@loss_of
def dapo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """DAPO (2503.14476, Eq. 8): GRPO's objective, its mean taken over all tokens of the minibatch.
    """
    objective = clipped_objective(log_ratio.exp(), advantages[:, None], eps_low, eps_high)
    return _token_sum(objective, mask) / _mean_length(mask)


@loss_of
def dr_grpo_loss(log_ratio, advantages, mask, eps_low, eps_high):
    """Dr. GRPO (2503.20783): GRPO's objective, summed over tokens and divided by a constant. Its
    advantages are centred_advantages."""
    objective = clipped_objective(log_ratio.exp(), advantages[:, None], eps_low, eps_high)
    return _token_sum(objective, mask) / BUDGET


def centred_advantages(rewards, group_size):
    """Dr. GRPO: the rewards less their group's mean, not divided by its standard deviation."""
    groups = rewards.view(-1, group_size)
    mean = groups.mean(dim=1, keepdim=True)
    return (groups - mean).flatten()


def scaled(loss, times=1, over=1):
    """A loss with its advantages times or over a number."""
    def scaled_loss(log_probs, old_log_probs, advantages, *others, **more):
        return loss(log_probs, old_log_probs, advantages * times / over, *others, **more)
    return scaled_loss


# train_math clips gradients to norm 1: LUSPO's and FSPO's all exceed it, GSPO's never. GSPO times
# 200, the long task's length, is GSPO as they are clipped; they over 200 are as GSPO is, unclipped.
gspo_200_loss = scaled(gspo_loss, times=200)
luspo_200_loss = scaled(luspo_loss, over=200)
fspo_200_loss = scaled(fspo_loss, over=200)


def _token_sum(x, mask):
    return x.masked_fill(~mask, 0).sum(dim=1)


def _mean_length(mask):
    """What makes sums over tokens means over all tokens of the minibatch. Responses without
    gradient, which train_math leaves out, count as if they had the mean length of the others."""
    return mask.sum(dim=1).float().mean()
