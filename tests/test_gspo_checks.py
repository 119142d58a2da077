"""The cost and the messages of gspo.py's checks. test_gspo.py tests which inputs they refuse."""
import copy
import re

import pytest
import torch

import gspo
from test_gspo import RANGE, example
from tests.conftest import block
from tools.warm_up import tiny_model, tiny_tokenizer

LOSSES = pytest.mark.parametrize("loss", [gspo.gspo_loss, gspo.gspo_token_loss, gspo.grpo_loss])


@pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float32])
def test_values_of_a_mask_are_read_only_on_the_cpu(kind):
    """Tensors on the meta device have no values, so reading one raises an error. On a GPU, reading
    one would make the CPU wait."""
    log_probs = torch.zeros(4, 5, device="meta", requires_grad=True)
    advantages = torch.zeros(4, device="meta")
    mask = torch.ones(4, 5, dtype=kind, device="meta")
    for loss in gspo.gspo_loss, gspo.gspo_token_loss, gspo.grpo_loss:
        loss(log_probs, log_probs, advantages, mask, denominator=4).backward()
    ratio = gspo.sequence_ratio(log_probs, log_probs, mask)
    gspo.clip_fraction(ratio, advantages, mask, *RANGE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_additive_mask_on_a_gpu_is_padding():
    new, old, _, mask = (x.cuda() for x in example())
    additive = torch.zeros(4, 4).cuda().masked_fill(~mask, -1e9)
    assert gspo.sequence_ratio(new, old, additive).tolist() == [1, 1, 1, 1]


def zeros(*shapes):
    return [torch.zeros(shape) for shape in shapes]


ONES = torch.ones(2)
TWO = (2, 5), (2, 5)


@pytest.mark.parametrize("message, function, arguments", [
    ("pass mask == 0", gspo.gspo_loss, [*example()[:3], -1e9 * ~example()[3]]),
    ("instead of 0.9997 pass 0.0003", gspo.gspo_loss, [*example(), 0.9997, 1.0004]),
    ("eps_low 1.5 must be above 0", gspo.gspo_loss, [*example(), 1.5, -1]),
    ("denominator must be above 0", gspo.gspo_loss, [*example(), *RANGE, -2]),
    ("denominator must be above 0", gspo.gspo_loss, zeros((0, 3), (0, 3), (0,), (0, 3))),
    ("instead of 1.0004 pass 0.0004", gspo.clipped_objective, [ONES, ONES, 0.2, 1.0004]),
    ("not the bound", gspo.clipped_objective, [ONES, ONES, 0.2, 1.1]),
    ("not a list", gspo.group_advantages, [[1.0, 0.0], 2]),
    ("rewards (2, 2)", gspo.group_advantages, [*zeros((2, 2)), 2]),
    ("logits (2, 5, 9), tokens (2, 7)", gspo.token_log_probs, zeros((2, 5, 9), (2, 7))),
    ("mask (1, 5)", gspo.sequence_ratio, zeros(*TWO, (1, 5))),
    ("advantages (3,), mask (2, 5)", gspo.gspo_loss, zeros(*TWO, (3,), (2, 5))),
])
def test_a_message_says_what_was_found_and_what_to_do(message, function, arguments):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(*arguments)


@LOSSES
def test_what_is_unusual_but_allowed(loss):
    gspo.clipped_objective(ONES, ONES, 0.2, 1.0)  # the upper bound is 2
    gspo.clipped_objective(ONES, ONES, 0.2, 1.2)
    assert loss(*zeros((0, 3), (0, 3), (0,), (0, 3)), denominator=4) == 0


@LOSSES
@pytest.mark.parametrize("old", [-60.0, -95.0, -1e4, -1e9, -3e38, -torch.inf])
def test_where_the_clip_is_active_the_gradient_is_0_although_the_ratio_overflows(loss, old):
    """exp(88.8) is infinite in float32. With A < 0, the clip is not active."""
    old = torch.full((2, 3), old)
    new = torch.zeros((2, 3), requires_grad=True)
    loss(new, old, torch.tensor([1.0, -1.0]), torch.ones(2, 3)).backward()
    assert new.grad[0].tolist() == [0, 0, 0]
    assert new.grad[1].isfinite().all() and (new.grad[1] > 1e20).all()


@LOSSES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_no_log_prob_in_any_precision(loss, dtype):
    """The token has A = 1 and then A = -1. If neither policy can sample it, its ratio is 1."""
    inf, nan = torch.inf, torch.nan
    for new, old, same in ((-inf, -1, 0), (-inf, -inf, 1), (nan, -1, None), (-1, nan, None)):
        log_probs = torch.full((2, 3), -1.0, dtype=dtype)
        old_log_probs = log_probs.clone()
        log_probs[:, 1] = new
        old_log_probs[:, 1] = old
        log_probs.requires_grad_()
        value = loss(log_probs, old_log_probs, torch.tensor([1.0, -2.0]), torch.ones(2, 3))
        value.backward()
        assert value.isnan() == (same is None)
        if same is not None:
            assert log_probs.grad.isfinite().all() and (log_probs.grad[:, 1] == 0).all()
            assert not same or value == 0.5


def test_equal_rewards_give_exactly_0_even_without_std_eps():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.0])
    advantages = gspo.group_advantages(rewards, 3, std_eps=0)
    assert advantages[:3].tolist() == [0, 0, 0] and advantages.isfinite().all()


def test_the_loop_on_the_page_makes_the_updates_of_gspo():
    """With one minibatch, all ratios are 1: the gradient is that of the mean over the responses of
    the advantage times the mean log-prob. With several, later minibatches can be clipped."""
    names = {}
    exec(block("guides/paste.md", "import torch\nfrom gspo import group_advantages"), names)
    model = tiny_model(tiny_tokenizer(), seed=0)
    torch.manual_seed(0)
    ids = torch.randint(5, 20, (8, 9))
    mask = torch.arange(8) >= torch.randint(1, 7, (8, 1))
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1])
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    names["update"](model, optimizer, ids, mask, rewards, 4, minibatches=1)
    log_probs = gspo.token_log_probs(other(ids).logits[:, :-1], ids[:, 1:])
    mean = (log_probs * mask).sum(1) / mask.sum(1)
    (-(gspo.group_advantages(rewards, 4) * mean).mean()).backward()
    assert max(p.grad.abs().max() for p in other.parameters()) > 1e-3
    for moved, start in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(start - moved, start.grad, atol=1e-5, rtol=1e-3)

    steps = []
    optimizer.step = lambda: steps.append(1)
    names["update"](model, optimizer, ids, mask, rewards, 4)
    assert len(steps) == 4


def test_an_id_outside_the_vocabulary_has_no_log_prob():
    """Padding often has the id -100 or -1. The mask hides its NaN, but not that of a wrong id."""
    logits = torch.zeros(1, 6, 4, requires_grad=True)
    tokens = torch.tensor([[0, 3, -100, -1, 4, 2 ** 40]])
    log_probs = gspo.token_log_probs(logits, tokens)
    assert log_probs[:, 2:].isnan().all()
    mask = torch.tensor([[1, 1, 0, 0, 0, 0]])
    loss = gspo.gspo_loss(log_probs, log_probs.detach(), torch.tensor([1.0]), mask)
    loss.backward()
    assert loss == -1
    assert logits.grad[:, :2].abs().sum() > 0
    assert (logits.grad[:, 2:] == 0).all()
