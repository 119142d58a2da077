"""lesson/gradients.py: what its bugs do to the gradient, and that its table is that of its logs."""
import re
from types import SimpleNamespace

import pytest
import torch

from gspo import clipped_objective, gspo_loss, sequence_ratio
from lesson import gradients, prefixes
from tools.logs import read
from train_math import response_log_probs


def value_and_gradient(loss):
    torch.manual_seed(0)
    mask = torch.arange(7) < torch.tensor([[7], [3], [5], [1]])
    old = torch.randn(4, 7).double() * mask
    new = (old + 0.3 * torch.randn(4, 7) * mask).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0]).double()
    value = loss(new, old, advantages, mask, 0.1, 0.1, 4)
    return value.detach(), torch.autograd.grad(value, new)[0]


def gspo_token(detached_s, detached_fraction):
    """GSPO-token with or without each of its two stop-gradients."""
    def loss(new, old, advantages, mask, eps_low, eps_high, denominator):
        s = sequence_ratio(new, old, mask)[:, None]
        own = (new - (new.detach() if detached_fraction else new)).exp()
        ratio = (s.detach() if detached_s else s) * own
        objective = clipped_objective(ratio, advantages[:, None], eps_low, eps_high)
        return -((objective * mask).sum(1) / mask.sum(1)).sum() / denominator

    return loss


@pytest.mark.parametrize("loss, factor", [
    (gradients.twice, 2),
    (gradients.half, 0.5),  # inside the range; in this batch, the others are clipped
    (gspo_token(True, True), 1),
    (gspo_token(False, True), 2),
    (gspo_token(True, False), 0),
    (gspo_token(False, False), 1),
])
def test_a_wrong_stop_gradient_multiplies_the_gradient_and_not_the_value(loss, factor):
    value, gradient = value_and_gradient(gspo_loss)
    its_value, its_gradient = value_and_gradient(loss)
    assert gradient.abs().max() > 0.01
    assert torch.allclose(its_value, value)
    assert torch.allclose(its_gradient, factor * gradient)


def test_log_probs_minus_themselves_have_no_gradient():
    """The value is the one that gspo_loss has in the first update, where all ratios are 1."""
    first, _ = value_and_gradient(lambda new, old, *others: gspo_loss(new, new, *others))
    value, gradient = value_and_gradient(gradients.nothing)
    assert value == first and (gradient == 0).all()


def test_a_mask_before_the_logarithm_gives_nan_only_in_the_gradient(tiny):
    batch = SimpleNamespace(  # of a MicroBatch, only these are used
        ids=torch.tensor([[5, 6, 6, 7, 8], [5, 8, 0, 0, 0]]),
        mask=torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0]]).bool())
    found = []
    for log_probs_of in response_log_probs, gradients.log_of_zero:
        tiny[0].zero_grad()
        log_probs = log_probs_of(tiny[0], batch, 1.0)
        log_probs.sum().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in tiny[0].parameters()])
        found.append((log_probs.detach(), norm))
        tiny[0].zero_grad()
    (right, norm), (same, its_norm) = found
    assert torch.allclose(right, same, atol=1e-5)
    assert norm > 0 and its_norm.isnan()


def test_the_table_is_that_of_the_logs():
    logs = read(gradients.RESULTS / "gradients.jsonl")
    assert gradients.table(logs) == (gradients.RESULTS / "gradients.md").read_text()
    found = [(log["variant"], log["seed"]) for log in logs]
    assert sorted(found) == sorted((name, seed) for name in gradients.VARIANTS
                                   for seed in gradients.SEEDS)


def test_prefixes_are_counted_per_question():
    """Tokens: a, b, end; a, c, end; a, b, end. The last one answers another question."""
    row = prefixes.count(["x", "x", "y"], ["ab", "ac", "ab"])
    assert row == {"prefixes_with_one_sample": 5 / 7, "tokens_with_company": 4 / 9,
                   "different_responses_per_group": 1.5}


@pytest.mark.parametrize("page", ["lesson/README.md", "homework/find_the_bug.md"])
def test_the_pages_show_the_means_of_the_table(page):
    means = []
    for line in (gradients.RESULTS / "gradients.md").read_text().splitlines():
        cells = [re.sub(r" \(.*\)", "", cell.strip()) for cell in line.strip("|").split("|")]
        if len(cells) == 7 and "±" in cells[4]:
            norm, _, reward, difference, accuracy, _ = cells[1:]
            means.append((f"{float(norm):.2g}", reward, difference, accuracy))
    text = (gradients.RESULTS.parents[1] / page).read_text(encoding="utf-8")
    rows = [tuple(row) for row in re.findall(
        r"^\|[^|]*\| (\S+) \| (\S+%) \| ([+-]\S+ ± \S+) \| (\d+\.\d%).* \|$", text, re.M)]
    rows = [(f"{float(norm):.2g}", *others) for norm, *others in rows]
    assert len(rows) >= 3 and set(rows) <= set(means)
