"""Losses of GSPO's successors and of related algorithms, as rows of train_math.ALGORITHMS.

    python guides/losses.py --algorithm cispo      train_math.py with CISPO; its flags are the same

Three algorithms need no loss of their own: DAPO (2503.14476, Eq. 8) and Dr. GRPO (2503.20783) are
GRPO, and LUSPO (2602.05261) is GSPO, with other weights of long responses (build_minibatches).

The formulas are those of public implementations (TRL, verl, SkyRL). Of the papers, we read
abstracts and summaries. Numbers such as 2511.20347 are those of arXiv.
"""
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where gspo.py is
import train_math  # noqa: E402
from gspo import _log_ratio, _loss, _token_mean, grpo_loss, gspo_loss  # noqa: E402
from train_math import Algorithm  # noqa: E402

TAU_LOW = 1.05  # of SAPO, for negative advantages
TAU_HIGH = 1.0  # of SAPO, for positive advantages


def loss_of(objective):
    """A loss with the arguments and errors of gspo_loss that maximises this objective (B,), which
    is a function of log_ratio (B, T), 0 on padding, advantages (B, 1), mask, eps_low, eps_high."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        mask = mask.bool()
        log_ratio = _log_ratio(log_probs, old_log_probs, mask)
        value = objective(log_ratio, advantages[:, None], mask, eps_low, eps_high)
        return _loss(value.where(mask.any(dim=1), 0), denominator)  # 0 for a response of no tokens
    return loss


@loss_of
def sapo_loss(log_ratio, a, mask, eps_low, eps_high):
    """SAPO (2511.20347): a smooth function of the token ratio r replaces the clip. The objective is
    4 / tau sigmoid(tau (r - 1)) A, with a tau for each sign of A. Its slope in r is A at r = 1, and
    falls to 0 over a distance of a few 1 / tau. eps_low and eps_high are not used."""
    tau = torch.where(a > 0, TAU_HIGH, TAU_LOW)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1))
    return _token_mean(4 / tau * gate * a, mask)


@loss_of
def cispo_loss(log_ratio, a, mask, eps_low, eps_high):
    """CISPO (2506.13585, Eq. 4 and 5): A log pi of each token is multiplied by the token's ratio,
    which is limited to 1 + eps_high and has no gradient. A log pi_old, a constant, is subtracted.
    No token is clipped, but clip_fraction counts those at the limit that have A > 0. There is no
    lower bound, so eps_low is not used. build_minibatches makes it a mean over all tokens."""
    weight = log_ratio.exp().detach().clamp(max=1 + eps_high)
    return _token_mean(weight * a * log_ratio, mask)


@loss_of
def gmpo_loss(log_ratio, a, mask, eps_low, eps_high):
    """GMPO (2507.20673): the geometric mean of token ratios, as in GSPO, but each token ratio is
    clipped first: to at most 1 + eps_high if A > 0, and to at least 1 - eps_low if A < 0."""
    low, high = torch.tensor([1 - eps_low, 1 + eps_high]).log().tolist()
    clipped = torch.where(a > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    return _token_mean(clipped, mask).exp() * a[:, 0]


def centred_advantages(rewards, group_size):
    """Dr. GRPO: rewards (B,) minus the mean of the group, without dividing by its deviation."""
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


def build_minibatches(rollout, advantages, cfg):
    """train_math.build_minibatches with advantages that are multiplied by length / divisor."""
    lengths = torch.tensor([float(sum(sampled)) for sampled in rollout.is_sampled])
    lengths = lengths.view(cfg.minibatches, -1)
    mean = lengths.mean(dim=1, keepdim=True)  # gives the mean over all tokens of a minibatch
    divisors = {
        "cispo": mean,
        "dapo": mean,
        "dr_grpo": cfg.max_completion_length,
        "luspo": 1,
    }
    if cfg.algorithm in divisors:
        advantages = advantages * (lengths / divisors[cfg.algorithm]).flatten()
    return train_math.build_minibatches(rollout, advantages, cfg)


train_math.ALGORITHMS |= {  # loss, default eps_low and eps_high, whose ratio clip_fraction takes
    "sapo": Algorithm(sapo_loss, 1.0, 1e9, "token"),
    "cispo": Algorithm(cispo_loss, 1.0, 4.0, "token"),
    "gmpo": Algorithm(gmpo_loss, 0.33, 0.49, "token"),  # e^-0.4 to e^0.4
    "luspo": Algorithm(gspo_loss, 2e-3, 2.5e-3, "sequence"),
    "dapo": Algorithm(grpo_loss, 0.2, 0.28, "token"),
    "dr_grpo": Algorithm(grpo_loss, 0.2, 0.2, "token", centred_advantages),
}

if __name__ == "__main__":
    train_math.main(build_minibatches=build_minibatches)
