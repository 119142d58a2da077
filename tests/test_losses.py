"""guides/losses.py: each algorithm has the gradient of its formula, on several micro-batches."""
import math
import subprocess
import sys

import pytest
import torch

import train_math
from gspo import clip_fraction, sequence_ratio
from guides import losses
from tests.conftest import TOP, rollout_of, settings

NAMES = "sapo", "cispo", "gmpo", "luspo", "dapo", "dr_grpo"
LENGTHS = 2, 7, 4, 5, 3, 6, 7, 3
LONGEST = 9


def clipped(r, a, low, high):
    return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def formula(name, r, a, low, high, mean):
    """The objective of one response with the token ratios r (n,) and the advantage a. mean: the
    mean length of the responses of its minibatch."""
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return (4 / tau * (tau * (r - 1)).sigmoid() * a).mean()
    if name == "cispo":
        return (r.detach().clamp(max=1 + high) * a * r.log()).sum() / mean
    if name == "gmpo":
        limited = r.clamp(max=1 + high) if a > 0 else r.clamp(min=1 - low)
        return limited.log().mean().exp() * a
    if name == "luspo":
        return len(r) * clipped(r.log().mean().exp(), a, low, high)
    return clipped(r, a, low, high).sum() / (LONGEST if name == "dr_grpo" else mean)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_formula(name):
    """8 responses of 2 to 7 tokens, of which one has advantage 0, in two minibatches of several
    micro-batches."""
    torch.manual_seed(0)
    algorithm = train_math.ALGORITHMS[name]
    low, high = algorithm.eps_low, algorithm.eps_high
    cfg = settings(algorithm=name, minibatches=2, prompts_per_step=4, group_size=2,
                   max_completion_length=LONGEST, micro_batch_tokens=16)
    rollout = rollout_of([[1]] * 8, [[5] * length for length in LENGTHS])
    advantages = torch.tensor([1.0, -1, 0.5, -2, 0, 2, -0.5, 1])
    minibatches = losses.build_minibatches(rollout, advantages, cfg)
    assert len(minibatches) == 2 and min(map(len, minibatches)) > 1
    seen = []
    for batch in minibatches[0] + minibatches[1]:
        old = -torch.rand(batch.mask.shape) * 3
        new = (old + 0.6 * torch.randn(old.shape)).masked_fill(~batch.mask, math.nan)
        new.requires_grad_()
        loss = algorithm.loss(new, old, batch.advantages, batch.mask, low, high, 4)
        (gradient,) = torch.autograd.grad(loss, new)
        total = 0
        for row, i in enumerate(batch.indices):
            r = (new - old)[row, batch.mask[row]].exp()
            mean = sum(LENGTHS[i // 4 * 4:][:4]) / 4
            total = total - formula(name, r, advantages[i], low, high, mean) / 4
        (expected,) = torch.autograd.grad(total, new)
        torch.testing.assert_close(gradient, expected.nan_to_num())
        ratio = (new - old).exp() if algorithm.ratio == "token" else sequence_ratio(
            new, old, batch.mask)
        fraction = clip_fraction(ratio, batch.advantages, batch.mask, low, high)
        if name != "cispo":  # which clips nothing
            assert fraction == pytest.approx((gradient[batch.mask] == 0).float().mean())
        seen.append(fraction)
    assert (max(seen) > 0) == (name != "sapo")


def test_dr_grpo_does_not_divide_by_the_standard_deviation():
    advantages = train_math.ALGORITHMS["dr_grpo"].advantages(torch.tensor([3.0, 0, 0, 1, 1, 1]), 3)
    assert advantages.tolist() == [2, -1, -1, 0, 0, 0]


def test_a_response_without_tokens_has_loss_0():
    one = torch.ones(1, 3)
    for loss in losses.sapo_loss, losses.cispo_loss, losses.gmpo_loss:
        assert loss(one, one, torch.ones(1), 0 * one, 0.1, 0.1).item() == 0


@pytest.mark.parametrize("name", ["cispo", "dr_grpo"])
def test_the_script_trains(name, tmp_path):
    flags = {"algorithm": name, "model": "lesson/world/model", "dataset": "lesson/world/questions",
             "device": "cpu", "prompts_per_step": 4, "group_size": 4, "minibatches": 2,
             "max_completion_length": 6, "eval_size": 4, "instruction": "", "max_steps": 1,
             "output_dir": tmp_path / "run"}
    command = [sys.executable, "guides/losses.py", *(f"--{key}={flags[key]}" for key in flags)]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"step": 1' in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8")
