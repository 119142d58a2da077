"""GSPO's successors and neighbours, a loss each, for rivals.py to pass into train_math.train. Arguments and result as
gspo.gspo_loss's; what eps_low and eps_high mean, each docstring tells. The formulas are those of implementations (TRL,
verl, SkyRL); of the papers, abstracts were read."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from gspo import _log_ratio, _loss, _per_token, _token_mean, clipped_objective, gspo_loss

BUDGET = 210  # tokens: Dr. GRPO's constant divisor, of which AdamW feels nothing unless the gradient is clipped


def sapo_loss(log_probs, old_log_probs, advantages, mask, eps_low=1.05, eps_high=1.0, denominator=None):
    """SAPO (2511.20347): no clip but a soft gate on the token ratio r, 4 / tau sigmoid(tau (r - 1)) A, where tau is
    eps_high for A > 0, eps_low for A < 0. Near r = 1 its slope is 1; it falls to 0 within a few 1 / tau."""
    ratio, a = _log_ratio(log_probs, old_log_probs, mask).exp(), _per_token("advantages", advantages, mask)
    tau = torch.where(a > 0, eps_high, eps_low)
    return _loss(_token_mean(4 / tau * torch.sigmoid(tau * (ratio - 1)) * a, mask), denominator)


def cispo_loss(log_probs, old_log_probs, advantages, mask, eps_low=None, eps_high=5.0, denominator=None):
    """CISPO (2506.13585, Eq. 4 and 5): the token ratio, at most 1 + eps_high, is a weight without gradient on A log pi;
    nothing is dropped. Mean over all tokens. eps_low is not used: no lower bound."""
    weight = _log_ratio(log_probs, old_log_probs, mask).exp().detach().clamp(max=1 + eps_high)
    a = _per_token("advantages", advantages, mask)
    return _all_tokens_loss(weight * a * log_probs.masked_fill(~mask.bool(), 0), mask, denominator)


def gmpo_loss(log_probs, old_log_probs, advantages, mask, eps_low=0.4, eps_high=0.4, denominator=None):
    """GMPO (2507.20673): the geometric mean, as in GSPO, but of token ratios that are clipped first, to
    (e^-eps_low, e^eps_high), above where A > 0 and below where A < 0."""
    log_ratio, a = _log_ratio(log_probs, old_log_probs, mask), _per_token("advantages", advantages, mask)
    clipped = torch.where(a > 0, log_ratio.clamp(max=eps_high), log_ratio.clamp(min=-eps_low))
    return _loss(_token_mean(clipped, mask).exp() * advantages * mask.bool().any(dim=1), denominator)


def fspo_loss(log_probs, old_log_probs, advantages, mask, eps_low=0.03, eps_high=0.03, denominator=None):
    """FSPO (2509.09177) without its drift term, whose formula was not found: the clipped objective on the whole
    response's ratio, without GSPO's root, in the range e^(-eps_low sqrt|y|) to e^(eps_high sqrt|y|)."""
    log_ratio, root = _log_ratio(log_probs, old_log_probs, mask).sum(dim=1), mask.bool().sum(dim=1).sqrt()
    low, high = (-eps_low * root).exp(), (eps_high * root).exp()
    ratio = log_ratio.clamp(max=20).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return _loss(objective * mask.bool().any(dim=1), denominator)


def luspo_loss(log_probs, old_log_probs, advantages, mask, eps_low=2e-3, eps_high=2.5e-3, denominator=None):
    """LUSPO (2602.05261): GSPO's loss with each response times its length, so that no token of a longer one counts
    less."""
    return gspo_loss(log_probs, old_log_probs, advantages * mask.sum(dim=1), mask, eps_low, eps_high, denominator)


def gspo_200_loss(
    log_probs, old_log_probs, advantages, mask, eps_low=2e-3, eps_high=2.5e-3, denominator=None
):
    """GSPO times 200, the long task's length. train_math clips gradients to norm 1: LUSPO's and
    FSPO's all exceed it, GSPO's never. So this is GSPO as they are clipped; the next two are they
    as GSPO is, unclipped."""
    return gspo_loss(
        log_probs, old_log_probs, 200 * advantages, mask, eps_low, eps_high, denominator
    )


def luspo_200_loss(
    log_probs, old_log_probs, advantages, mask, eps_low=2e-3, eps_high=2.5e-3, denominator=None
):
    """LUSPO over 200."""
    return luspo_loss(
        log_probs, old_log_probs, advantages / 200, mask, eps_low, eps_high, denominator
    )


def fspo_200_loss(
    log_probs, old_log_probs, advantages, mask, eps_low=0.03, eps_high=0.03, denominator=None
):
    """FSPO over 200."""
    return fspo_loss(
        log_probs, old_log_probs, advantages / 200, mask, eps_low, eps_high, denominator
    )


def dapo_loss(log_probs, old_log_probs, advantages, mask, eps_low=0.2, eps_high=0.28, denominator=None):
    """DAPO (2503.14476, Eq. 8): GRPO's objective, its mean taken over all tokens of the minibatch."""
    objective = _token_objective(log_probs, old_log_probs, advantages, mask, eps_low, eps_high)
    return _all_tokens_loss(objective, mask, denominator)


def dr_grpo_loss(log_probs, old_log_probs, advantages, mask, eps_low=0.2, eps_high=0.2, denominator=None):
    """Dr. GRPO (2503.20783): GRPO's objective, summed over tokens and divided by a constant. Its advantages are
    centred_advantages."""
    objective = _token_objective(log_probs, old_log_probs, advantages, mask, eps_low, eps_high)
    return _loss(objective.sum(dim=1) / BUDGET, denominator)


def centred_advantages(rewards, group_size):
    """Dr. GRPO: the rewards less their group's mean, not divided by its standard deviation."""
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


def _token_objective(log_probs, old_log_probs, advantages, mask, eps_low, eps_high):
    """GRPO's clipped objective of each token, (B, T)."""
    ratio = _log_ratio(log_probs, old_log_probs, mask).exp()
    return clipped_objective(ratio, _per_token("advantages", advantages, mask), eps_low, eps_high)


def _all_tokens_loss(objective, mask, denominator):
    """Minus the mean of objective (B, T) over all tokens of the minibatch. Responses without gradient, which train_math
    leaves out, count as if they had the mean length of the others."""
    return _loss(objective.sum(dim=1) / mask.sum(dim=1).float().mean(), denominator)
