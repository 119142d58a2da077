r"""The specification of gspo.py and train_math.py, and the grader of a student's gspo.py.

    python -m pytest                                          test both, under a minute on a CPU
    python test_gspo.py > my_gspo.py                          write the assignment: gspo.py without its bodies
    GSPO=my_gspo.py python -m pytest -x test_gspo.py          grade it (PowerShell: $env:GSPO="my_gspo.py")

The tests stand in the order of gspo.py's functions, the easy ones first, so `-x` makes them a tutorial. The first line of
a failure says what to look at, then come the numbers. They test behaviour, in float32's accuracy: any correct
implementation passes.
"""
import ast
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
GRADING = "GSPO" in os.environ


def load_gspo():
    path = Path(os.environ.get("GSPO", HERE / "gspo.py"))
    if not path.is_file():
        pytest.exit(f"GSPO={path}: no such file", returncode=2)
    spec = importlib.util.spec_from_file_location("gspo_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assignment():
    """gspo.py with every function's body replaced by `raise NotImplementedError`, its docstring kept."""
    source = (HERE / "gspo.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for node in sorted(functions, key=lambda node: -node.lineno):
        lines[node.body[0].end_lineno:node.end_lineno] = ["    raise NotImplementedError"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(assignment())
    sys.exit()

gspo = load_gspo()
NAN, INF = float("nan"), float("inf")


# ---- how a test speaks --------------------------------------------------------------------------------------


def fail(hint, *details):
    pytest.fail("\n  ".join([hint, *details]), pytrace=False)


def check(got, expected, hint, tolerance=1e-5):
    """got equals expected within the tolerance (relative to the largest number expected), or the test fails with the hint."""
    if not isinstance(got, torch.Tensor):
        fail(hint, f"got {got!r}, expected a tensor")
    got, expected = got.detach().double(), torch.as_tensor(expected, dtype=torch.float64)
    close = got.shape == expected.shape and bool(((got - expected).abs() <= tolerance * (1 + expected.abs())).all())
    if not close:
        fail(hint, f"got      {got.tolist()}", f"expected {expected.tolist()}")


def check_float32(got, hint):
    if got.dtype not in (torch.float32, torch.float64):
        fail(hint, f"got {got.dtype}, expected torch.float32 (or torch.float64)")


def refuses(hint, function, *arguments, names=()):
    """The call raises a ValueError whose message holds `names`, or the test fails with the hint."""
    try:
        result = function(*arguments)
    except ValueError as error:
        missing = [str(name) for name in names if str(name) not in str(error)]
        if missing:
            fail(f"{hint}: name the shapes in the message", f"got {error}", f"expected it to hold {', '.join(missing)}")
    except NotImplementedError:
        raise
    except Exception as error:
        fail(f"{hint}: check it yourself and raise ValueError", f"got {type(error).__name__}: {error}")
    else:
        fail(f"{hint}: this must raise ValueError", f"got {result}")


# ---- the example that a pencil can check --------------------------------------------------------------------

# Five responses of 2, 4, 3, 2 and 0 tokens. Each number is pi_new / pi_old of one token, None is padding.
RATIOS = [[4, 1, None, None],      # s = (4 * 1)^(1/2)             = 2
          [1/4, 1, 1/4, 1],        # s = (1/4 * 1 * 1/4 * 1)^(1/4) = 1/2
          [8, 1, 1, None],         # s = (8 * 1 * 1)^(1/3)         = 2
          [1/4, 1, None, None],    # s = (1/4 * 1)^(1/2)           = 1/2
          [None] * 4]              # no token at all
SEQUENCE_RATIOS = [2, 1/2, 2, 1/2]
ADVANTAGES = torch.tensor([1.0, -1.0, -2.0, 3.0, 1.0])
MASK = torch.tensor([[r is not None for r in row] for row in RATIOS])
LENGTHS = [2, 4, 3, 2, 0]
RANGE = (0.2, 0.5)                 # the clip range of the example: 0.8 to 1.5


def example(padding=0.0, dtype=torch.float32):
    """(log_probs, old_log_probs), every old probability 1/16; padding holds what you say."""
    old = torch.full(MASK.shape, 1 / 16).log()
    new = old + torch.tensor([[r or 1.0 for r in row] for row in RATIOS]).log()
    return tuple(x.masked_fill(~MASK, padding).to(dtype) for x in (new, old))


def random_batch(seed=0, rows=12, columns=9, padding=NAN):
    """A batch with responses of 0 to 9 tokens, holes in the mask, ratios on both sides of RANGE, junk in the padding."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(columns) < torch.randint(1, columns + 1, (rows, 1), generator=generator)
    mask &= torch.rand(rows, columns, generator=generator) > 0.15
    mask[3] = False
    old = -3 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 0.05
    shift = torch.randn(rows, 1, generator=generator) + torch.randn(rows, columns, generator=generator)
    new = old + 0.4 * shift
    advantages = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return new.masked_fill(~mask, padding), old.masked_fill(~mask, padding), advantages, mask


def value_and_gradient(loss, new, old, advantages, mask, *arguments, **keywords):
    """The loss and its gradient with respect to log_probs; a loss that carries no gradient has gradient 0."""
    new = new.detach().clone().requires_grad_()
    value = loss(new, old, advantages, mask, *arguments, **keywords)
    if not isinstance(value, torch.Tensor) or value.shape != ():
        fail("a loss is a scalar tensor", f"got {getattr(value, 'shape', value)}")
    if not value.requires_grad:
        fail("no gradient reaches log_probs: is the numerator of the ratio detached?")
    gradient, = torch.autograd.grad(value, new, allow_unused=True)
    if gradient is None:
        fail("no gradient reaches log_probs: is the numerator of the ratio detached?")
    return value, gradient


# ---- group_advantages ---------------------------------------------------------------------------------------


class TestGroupAdvantages:
    def test_is_the_reward_minus_the_mean_over_the_standard_deviation(self):
        """.8 .4 .6: mean .6, deviations .2 -.2 0, sample variance (.04 + .04) / (3 - 1) = .04, standard deviation .2."""
        got = gspo.group_advantages(torch.tensor([0.8, 0.4, 0.6]), 3, std_eps=0.0)
        check(got, [1, -1, 0], "Eq. 6: (reward - mean) / standard deviation, the sample one with n - 1 (torch's default)")

    def test_looks_at_each_group_on_its_own(self):
        """The second group's rewards are the first's times 10 plus 100, and so its advantages are the same."""
        got = gspo.group_advantages(torch.tensor([0.8, 0.4, 0.6, 108.0, 104.0, 106.0]), 3, std_eps=0.0)
        check(got, [1, -1, 0] * 2, "mean and standard deviation of each group of neighbours, not of the batch")

    def test_adds_std_eps_to_the_standard_deviation(self):
        """0 and .0002: mean .0001, standard deviation .0001 * sqrt 2, and so .0001 / (.0001 * sqrt 2 + .0001) = .41421."""
        got = gspo.group_advantages(torch.tensor([0.0, 0.0002]), 2)
        check(got, [-0.41421356, 0.41421356], "divide by (standard deviation + std_eps), std_eps 1e-4 by default", 1e-3)
        got = gspo.group_advantages(torch.tensor([0.0, 2.0]), 2, std_eps=1.0)
        check(got, [-0.41421356, 0.41421356], "std_eps is an argument, added to the standard deviation itself")

    @pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 1 / 3, -0.7, 1e6])
    @pytest.mark.parametrize("group_size", [3, 7, 8])
    def test_is_exactly_zero_in_a_group_of_equal_rewards(self, reward, group_size):
        rewards = torch.cat([torch.full((group_size,), reward), torch.arange(group_size)])
        for dtype in (torch.float32, torch.float64):
            got = gspo.group_advantages(rewards.to(dtype), group_size)[:group_size]
            if not bool((got == 0).all()):
                fail("equal rewards give exactly 0: a mean that rounds, divided by a tiny deviation, is noise",
                     f"got {got.tolist()}")

    def test_computes_in_float32_at_least(self):
        rewards = torch.tensor([0.8, 0.4, 0.6, 0.5], dtype=torch.bfloat16)
        got = gspo.group_advantages(rewards, 4)
        check_float32(got, "bfloat16 rewards: compute in float32")
        exact = rewards.double()
        check(got, (exact - exact.mean()) / (exact.std() + 1e-4), "bfloat16 rewards: convert to float32 first")
        got = gspo.group_advantages(torch.tensor([1, 0, 0, 1]), 4)
        check(got, torch.tensor([1.0, -1, -1, 1]) * 0.5 / (1 / 3**0.5 + 1e-4), "integer rewards: convert to float32")

    @pytest.mark.parametrize("group_size", [-2, 0, 1, 3, 16])
    def test_refuses_a_group_size_below_2_or_one_that_does_not_divide(self, group_size):
        refuses(f"group_size {group_size} for 8 rewards", gspo.group_advantages, torch.rand(8), group_size)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_refuses_a_reward_that_is_not_finite(self, bad):
        refuses(f"a reward of {bad}", gspo.group_advantages, torch.tensor([0.0, 1.0, bad, 1.0]), 2)


# ---- token_log_probs ----------------------------------------------------------------------------------------


class TestTokenLogProbs:
    LOGITS = torch.tensor([[[1.0, 2.0, 5.0], [4.0, 2.0, 2.0]]]).log()  # (1, 2, 3): weights 1 2 5 of 8, then 4 2 2 of 8

    def test_is_the_log_of_the_tokens_probability(self):
        """Token 1 of the weights 1 2 5 has probability 2/8, token 0 of 4 2 2 has 4/8."""
        got = gspo.token_log_probs(self.LOGITS, torch.tensor([[1, 0]]))
        check(got, torch.tensor([[2 / 8, 4 / 8]]).log(), "log softmax over V, taken at each token; logits[:, t] already "
                                                         "predict tokens[:, t], so nothing is shifted here")

    def test_divides_the_logits_by_the_temperature(self):
        """At temperature 1/2 the weights are squared: 1 4 25 of 30, 16 4 4 of 24."""
        got = gspo.token_log_probs(self.LOGITS, torch.tensor([[1, 0]]), 0.5)
        check(got, torch.tensor([[4 / 30, 16 / 24]]).log(), "softmax of logits / temperature: the policy is what sampled")

    def test_is_float32_from_bfloat16(self):
        logits = torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
        tokens = torch.tensor([[0, 7, 499], [3, 3, 100]])
        got = gspo.token_log_probs(logits, tokens)
        check_float32(got, "float32 out, whatever comes in")
        expected = logits.double().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        check(got, expected, "bfloat16 logits: convert to float32 before the softmax, not after")

    def test_survives_large_and_infinite_logits(self):
        logits = torch.tensor([[[1e4, 0.0, -INF], [-1e4, -1e4, -INF]]])
        got = gspo.token_log_probs(logits, torch.tensor([[0, 1]]))
        check(got, [[0, math.log(0.5)]], "large logits: log_softmax (or logsumexp), never the log of a softmax")
        got = gspo.token_log_probs(logits, torch.tensor([[1, 0]]))
        check(got, [[-1e4, math.log(0.5)]], "unlikely tokens: log_softmax (or logsumexp), never the log of a softmax")

    def test_carries_the_gradient_of_the_logits(self):
        """d log softmax(z)[y] / d z = onehot(y) - softmax(z)."""
        logits = self.LOGITS.clone().requires_grad_()
        gradient, = torch.autograd.grad(gspo.token_log_probs(logits, torch.tensor([[1, 0]])).sum(), logits)
        check(gradient, [[[-1 / 8, 6 / 8, -5 / 8], [4 / 8, -2 / 8, -2 / 8]]], "the gradient must reach the logits")

    def test_refuses_shapes_that_do_not_fit(self):
        refuses("logits (2, 5, 9) with tokens (2, 7)", gspo.token_log_probs, torch.rand(2, 5, 9),
                torch.zeros(2, 7, dtype=torch.long), names=(5, 7))
        refuses("logits (2, 5, 9) with tokens (1, 5): never broadcast", gspo.token_log_probs, torch.rand(2, 5, 9),
                torch.zeros(1, 5, dtype=torch.long), names=(2, 5))


# ---- sequence_ratio -----------------------------------------------------------------------------------------


class TestSequenceRatio:
    def test_of_a_doubled_probability_is_the_root_of_2(self):
        """Four tokens, one of them twice as likely as before: the response is too, and s = 2^(1/4) = 1.189, not 2."""
        new = torch.tensor([[2.0, 1.0, 1.0, 1.0]]).log()
        got = gspo.sequence_ratio(new, torch.zeros(1, 4), torch.ones(1, 4))
        check(got, [2 ** 0.25], "Eq. 7: the power 1/|y|, a geometric mean (not the product, not the arithmetic mean 1.25)")

    def test_of_the_example(self):
        got = gspo.sequence_ratio(*example(), MASK)[:4]
        check(got, SEQUENCE_RATIOS, "Eq. 7: exp of the mean log ratio over the response's own tokens; |y| counts mask, not T")

    @pytest.mark.parametrize("padding", [7.0, NAN, -INF, INF])
    def test_does_not_see_the_padding(self, padding):
        got = gspo.sequence_ratio(*example(padding), MASK)[:4]
        check(got, SEQUENCE_RATIOS, f"padding of {padding} must not matter: NaN * 0 is NaN, so fill it, do not multiply")

    def test_takes_masks_of_any_kind_and_with_holes(self):
        """Without its second token the first response has one token of ratio 4; without its first the third has 1 * 1."""
        mask = MASK.clone()
        mask[0, 1] = mask[2, 0] = False
        for kind in (torch.bool, torch.long, torch.float32):
            got = gspo.sequence_ratio(*example(), mask.to(kind))[:4]
            check(got, [4, 1 / 2, 1, 1 / 2], f"tokens count where the mask is 1, anywhere in the row (mask of {kind})")

    def test_has_the_gradient_s_over_length_on_every_token(self):
        new, old = example(NAN)
        new, old = new.requires_grad_(), old.requires_grad_()
        gspo.sequence_ratio(new, old, MASK).sum().backward()
        expected = torch.tensor([s / n for s, n in zip([*SEQUENCE_RATIOS, 1], [2, 4, 3, 2, 1])])[:, None] * MASK
        check(new.grad, expected, "ds/dlog_prob = s / |y| on the response's tokens and 0 on padding, NaN there or not")
        if old.grad is not None and bool((old.grad.nan_to_num(1) != 0).any()):
            fail("old_log_probs never gets a gradient: detach it", f"got {old.grad.tolist()}")

    def test_computes_in_float32_at_least(self):
        """-0.5 and -0.50390625 are bfloat16 numbers; exp of their difference, 1.0039, is none."""
        new, old = torch.full((1, 3), -0.5).bfloat16(), torch.full((1, 3), -0.50390625).bfloat16()
        got = gspo.sequence_ratio(new, old, torch.ones(1, 3))
        check_float32(got, "bfloat16 log-probs: compute in float32 (bfloat16 cannot hold 1 + 3e-4)")
        check(got, [math.exp(0.00390625)], "bfloat16 log-probs: convert to float32 before the difference", 1e-6)

    def test_does_not_overflow_on_5000_tokens(self):
        """Each token e times as likely: the product is e^5000, s is e."""
        got = gspo.sequence_ratio(torch.zeros(1, 5000), torch.full((1, 5000), -1.0), torch.ones(1, 5000))
        check(got, [math.e], "average the logs, then exp: the product of 5,000 ratios overflows")

    def test_refuses_shapes_that_do_not_fit(self):
        a, b, c = torch.zeros(2, 5), torch.zeros(2, 7), torch.zeros(1, 5)
        for arguments, names in (((a, b, a), (5, 7)), ((a, a, b), (5, 7)), ((b, a, a), (5, 7)), ((a, c, a), (2, 1)),
                                 ((a, a, c), (2, 1))):
            refuses(f"log_probs, old_log_probs, mask of {[tuple(x.shape) for x in arguments]}", gspo.sequence_ratio,
                    *arguments, names=names)


# ---- clipped_objective --------------------------------------------------------------------------------------


class TestClippedObjective:
    # (ratio, advantage, min(r A, clip(r, 0.8, 1.5) A), its derivative by r)
    TABLE = [(2.0, 1.0, 1.5, 0), (1.2, 1.0, 1.2, 1), (0.5, 1.0, 0.5, 1),
             (2.0, -1.0, -2.0, -1), (1.2, -1.0, -1.2, -1), (0.5, -1.0, -0.8, 0), (2.0, 0.0, 0.0, 0)]

    @pytest.mark.parametrize("ratio, advantage, value, slope", TABLE)
    def test_is_the_smaller_of_the_clipped_and_the_unclipped(self, ratio, advantage, value, slope):
        r = torch.tensor([ratio], requires_grad=True)
        got = gspo.clipped_objective(r, torch.tensor([advantage]), *RANGE)
        hint = f"r = {ratio}, A = {advantage}, range 0.8 to 1.5: min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)"
        check(got, [value], hint)
        got.sum().backward()
        check(r.grad, [slope], f"{hint}: its slope is A where the min takes r A, and 0 where the clip holds")

    def test_is_elementwise(self):
        ratio, advantage, value = (torch.tensor(x) for x in list(zip(*self.TABLE))[:3])
        got = gspo.clipped_objective(ratio[:6].view(2, 3), advantage[:6].view(2, 3), *RANGE)
        check(got, value[:6].view(2, 3), "each element on its own, any shape")

    def test_computes_in_float32_at_least(self):
        got = gspo.clipped_objective(torch.ones(1).bfloat16() * 2, torch.ones(1).bfloat16(), 3e-4, 4e-4)
        check(got, [1.0004], "bfloat16 rounds 1 + 4e-4 to 1: compute in float32", 1e-6)


# ---- the losses ---------------------------------------------------------------------------------------------


class LossContract:
    """What every loss promises. The subclasses below name the loss and write its equation out by hand."""

    def test_of_the_example(self):
        value, _ = value_and_gradient(self.loss, *example(), ADVANTAGES, MASK, *RANGE)
        check(value, self.example_loss, self.example_hint)

    def test_with_unchanged_log_probs_is_minus_the_mean_advantage(self):
        """Every ratio is 1. (1 - 1 - 2 + 3 + 0) / 5 = 1/5: the fifth response has no tokens, and counts in the mean."""
        old = example()[1]
        value, gradient = value_and_gradient(self.loss, old, old, ADVANTAGES, MASK)
        check(value, -1 / 5, "ratios of 1: minus the mean of the advantages over ALL responses, an empty one counting as 0")
        expected = [[-a / n / 5 if t < n else 0 for t in range(4)] for a, n in zip(ADVANTAGES.tolist(), LENGTHS)]
        check(gradient, expected, "ratios of 1: the gradient is REINFORCE's, -A / |y| / B on each token of a response")

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("padding", [0.0, NAN, -INF])
    def test_equals_the_paper_by_hand(self, seed, padding):
        new, old, advantages, mask = random_batch(seed, padding=padding)
        value, gradient = value_and_gradient(self.loss, new, old, advantages[:, 0], mask, *RANGE)
        by_hand = self.by_hand(new, old, advantages[:, :1].expand(mask.shape), mask)
        check(value, by_hand[0], f"the value is not {self.equation}'s (padding holds {padding})")
        check(gradient, by_hand[1], f"the gradient is not that of {self.equation} (padding holds {padding})")

    def test_has_its_own_clip_range_by_default(self):
        """Ratios just beyond the default range, on the side where the clip holds, have no gradient; just within, they have."""
        low, high = self.default_range
        for ratio, sign in ((1 + high, 1.0), (1 - low, -1.0)):
            for factor, holds in ((1.05, True), (0.95, False)):
                new = torch.full((1, 3), math.log(1 + factor * (ratio - 1)), dtype=torch.float64)
                _, gradient = value_and_gradient(self.loss, new, torch.zeros(1, 3), torch.tensor([sign]), torch.ones(1, 3))
                if bool((gradient == 0).all()) != holds:
                    fail(f"default clip range: eps_low {low}, eps_high {high}",
                         f"ratio {1 + factor * (ratio - 1):.6f}, advantage {sign}: the gradient is {gradient.tolist()}")

    def test_divides_by_the_denominator(self):
        new, old, advantages, mask = random_batch()
        whole = value_and_gradient(self.loss, new, old, advantages[:, 0], mask, *RANGE)
        for denominator in (12, 48, 3):
            value, gradient = value_and_gradient(self.loss, new, old, advantages[:, 0], mask, *RANGE, denominator=denominator)
            check(value, whole[0].detach() * 12 / denominator, f"a sum over responses / denominator (here {denominator})")
            check(gradient, whole[1] * 12 / denominator, f"the gradient divides by the denominator too (here {denominator})")

    def test_adds_up_over_micro_batches(self):
        new, old, advantages, mask = random_batch()
        whole, gradient = value_and_gradient(self.loss, new, old, advantages[:, 0], mask, *RANGE)
        parts = [value_and_gradient(self.loss, new[i], old[i], advantages[i, 0], mask[i], *RANGE, denominator=12)
                 for i in torch.arange(12).split([1, 2, 3, 6])]
        check(sum(p[0] for p in parts), whole.detach(), "micro-batches with one denominator must add up to the whole batch")
        check(torch.cat([p[1] for p in parts]), gradient, "micro-batches with one denominator: so must their gradients")

    def test_does_not_depend_on_the_padded_length(self):
        new, old = example()
        wide = [torch.cat([x, torch.full((5, 6), NAN)], dim=1) for x in (new, old)]
        mask = torch.cat([MASK, torch.zeros(5, 6, dtype=torch.bool)], dim=1)
        value, _ = value_and_gradient(self.loss, *wide, ADVANTAGES, mask, *RANGE)
        check(value, self.example_loss, "six more columns of padding change nothing: divide by |y| (the mask's sum), not by T")

    def test_gives_the_old_log_probs_no_gradient(self):
        new, old = (x.requires_grad_() for x in example())
        self.loss(new, old, ADVANTAGES, MASK, *RANGE).backward()
        if old.grad is not None and bool((old.grad != 0).any()):
            fail("old_log_probs never gets a gradient: detach it", f"got {old.grad.tolist()}")

    def test_is_zero_where_nothing_counts(self):
        value, gradient = value_and_gradient(self.loss, *example(NAN), ADVANTAGES, torch.zeros(5, 4), *RANGE)
        check(value, 0, "responses without tokens: the value is 0, not NaN (0 / 0)")
        check(gradient, torch.zeros(5, 4), "responses without tokens: the gradient is 0, not NaN")

    def test_computes_in_float32_at_least(self):
        new, old, advantages, mask = (x[:, :6] for x in random_batch(1, padding=0.0))
        half = [x.bfloat16() for x in (new, old, advantages[:, 0])]
        value, _ = value_and_gradient(self.loss, *half, mask, *RANGE)
        check_float32(value, "bfloat16 in: compute in float32")
        exact = [x.double() for x in half]
        expected = self.by_hand(exact[0], exact[1], exact[2][:, None].expand(mask.shape), mask)
        check(value, expected[0], "bfloat16 in: convert to float32 before the first difference")

    def test_leaves_its_arguments_as_they_were(self):
        arguments = [*random_batch(padding=7.0)]
        arguments[2] = arguments[2][:, 0].clone()
        before = [x.clone() for x in arguments]
        self.loss(*arguments)
        if not all(torch.equal(x, y) for x, y in zip(arguments, before)):
            fail("the arguments were changed in place: they belong to the caller")

    def test_refuses_shapes_that_do_not_fit(self):
        a, b, adv = torch.zeros(2, 5), torch.zeros(2, 7), torch.zeros(2)
        for arguments, names in (((a, b, adv, a), (5, 7)), ((b, a, adv, a), (5, 7)), ((a, a, adv, b), (5, 7)),
                                 ((a, a, torch.zeros(3), a), (3, 2)), ((a, a, torch.zeros(5), a), (5, 2)),
                                 ((a, a, torch.zeros(1), a), (1, 2)), ((a, a, torch.zeros(2, 7), a), (7, 5))):
            refuses(f"log_probs, old_log_probs, advantages, mask of {[tuple(x.shape) for x in arguments]}", self.loss,
                    *arguments, names=names)


class PerTokenContract(LossContract):
    """And what the losses promise that take (B, T) advantages."""

    @pytest.mark.parametrize("seed", range(4))
    def test_takes_an_advantage_for_each_token(self, seed):
        new, old, advantages, mask = random_batch(seed)
        value, gradient = value_and_gradient(self.loss, new, old, advantages.masked_fill(~mask, NAN), mask, *RANGE)
        by_hand = self.by_hand(new, old, advantages, mask)
        check(value, by_hand[0], f"(B, T) advantages, NaN in their padding: the value is not {self.equation}'s")
        check(gradient, by_hand[1], f"(B, T) advantages, NaN in their padding: the gradient is not that of {self.equation}")


def log_ratios_of(new, old, mask):
    """For each response a list of (t, log pi_new / pi_old)."""
    return [[(t, (new[i, t] - old[i, t]).item()) for t in range(mask.shape[1]) if mask[i, t]] for i in range(len(mask))]


def clip(ratio):
    return min(max(ratio, 1 - RANGE[0]), 1 + RANGE[1])


def is_clipped(ratio, advantage):
    return (advantage > 0 and ratio > 1 + RANGE[1]) or (advantage < 0 and ratio < 1 - RANGE[0])


class TestGspoLoss(LossContract):
    """s A for the clipped s: 1.5, -0.8, -4, 1.5 and 0, whose sum is -1.8; minus a fifth of it is 0.36."""
    loss = staticmethod(lambda *a, **k: gspo.gspo_loss(*a, **k))
    default_range, equation = (3e-4, 4e-4), "Eq. 5 (gradient: Eq. 10, every token weighs s A / |y|)"
    example_loss, example_hint = 0.36, "Eq. 5: minus the mean over responses of min(s A, clip(s) A)"

    @staticmethod
    def by_hand(new, old, advantages, mask):
        """Eq. 5, and Eq. 10: the gradient of log pi(y_t) weighs s_i A_i / |y_i|, or nothing where the clip holds."""
        value, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
        for i, tokens in enumerate(log_ratios_of(new, old, mask)):
            if tokens:
                a, s = advantages[i, 0].item(), math.exp(sum(x for _, x in tokens) / len(tokens))
                value -= min(s * a, clip(s) * a) / len(mask)
                for t, _ in tokens:
                    gradient[i, t] = 0 if is_clipped(s, a) else -s * a / len(tokens) / len(mask)
        return value, gradient


class TestGspoTokenLoss(PerTokenContract):
    """As GSPO's where the advantages are equal within each response."""
    loss = staticmethod(lambda *a, **k: gspo.gspo_token_loss(*a, **k))
    default_range, equation = (3e-4, 4e-4), "Eq. 13-14 (gradient: Eq. 17, token t weighs s A_t / |y|)"
    example_loss, example_hint = 0.36, "Eq. 13: s_t is worth s_i (Eq. 14: sg[s_i] * pi / sg[pi]); the mean over tokens, then responses"

    @staticmethod
    def by_hand(new, old, advantages, mask):
        """Eq. 13, and Eq. 17: the gradient of log pi(y_t) weighs s_i A_{i,t} / |y_i|, or nothing where the clip holds."""
        value, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
        for i, tokens in enumerate(log_ratios_of(new, old, mask)):
            s = math.exp(sum(x for _, x in tokens) / max(len(tokens), 1))
            for t, _ in tokens:
                a = advantages[i, t].item()
                value -= min(s * a, clip(s) * a) / len(tokens) / len(mask)
                gradient[i, t] = 0 if is_clipped(s, a) else -s * a / len(tokens) / len(mask)
        return value, gradient

    def test_equals_gspo_loss_where_the_advantages_of_a_response_are_equal(self):
        new, old, advantages, mask = random_batch(2)
        sequence = value_and_gradient(gspo.gspo_loss, new, old, advantages[:, 0], mask, *RANGE)
        for a in (advantages[:, 0], advantages[:, :1].expand(mask.shape)):
            value, gradient = value_and_gradient(gspo.gspo_token_loss, new, old, a, mask, *RANGE)
            check(value, sequence[0].detach(), "equal advantages: GSPO-token's value is GSPO's")
            check(gradient, sequence[1], "equal advantages: GSPO-token's gradient is GSPO's (twice it, if a stop-gradient is missing)")

    def test_clips_one_sign_of_a_response_and_not_the_other(self):
        """s = 2 in a range up to 1.5: the token of A = 1 is clipped to 1.5, that of A = -1 keeps -2. -(1.5 - 2) / 2 = 0.25."""
        new = torch.tensor([[4.0, 1.0]]).log()
        value, gradient = value_and_gradient(gspo.gspo_token_loss, new, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]),
                                             torch.ones(1, 2), *RANGE)
        check(value, 0.25, "each token's own advantage decides whether the clip holds for it")
        check(gradient, [[0, 1.0]], "only the second token keeps its gradient, s A / |y| = 2 * 1 / 2, and it is its own alone")


class TestGrpoLoss(PerTokenContract):
    """Means over tokens: (1.5 + 1) / 2 = 1.25; (-.8 - 1 - .8 - 1) / 4 = -.9; (-16 - 2 - 2) / 3 = -20/3; (.75 + 3) / 2 = 1.875; 0."""
    loss = staticmethod(lambda *a, **k: gspo.grpo_loss(*a, **k))
    default_range, equation = (0.2, 0.27), "Eq. 2 (gradient: Eq. 12, token t weighs its own w_t A / |y|)"
    example_loss = -(1.25 - 0.9 - 20 / 3 + 1.875) / 5
    example_hint = "Eq. 2: each token's own ratio, clipped on its own; the mean over a response's tokens, then over responses"

    @staticmethod
    def by_hand(new, old, advantages, mask):
        """Eq. 2, and Eq. 12: the gradient of log pi(y_t) weighs w_{i,t} A_{i,t} / |y_i|, or nothing where the clip holds."""
        value, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
        for i, tokens in enumerate(log_ratios_of(new, old, mask)):
            for t, x in tokens:
                a, w = advantages[i, t].item(), math.exp(x)
                value -= min(w * a, clip(w) * a) / len(tokens) / len(mask)
                gradient[i, t] = 0 if is_clipped(w, a) else -w * a / len(tokens) / len(mask)
        return value, gradient


# ---- clip_fraction ------------------------------------------------------------------------------------------


class TestClipFraction:
    SEQUENCE = torch.tensor([*SEQUENCE_RATIOS, 1.0])
    TOKEN = torch.tensor([[r or NAN for r in row] for row in RATIOS])

    def test_of_the_example_with_sequence_ratios(self):
        """Clipped: the first response (s = 2, A > 0) and the second (s = 1/2, A < 0), 2 + 4 of 11 tokens."""
        got = gspo.clip_fraction(self.SEQUENCE, ADVANTAGES, MASK, *RANGE)
        check(got, 6 / 11, "tokens of clipped responses / all tokens; s > 1 + eps_high counts only where A > 0, "
                           "s < 1 - eps_low only where A < 0")

    def test_of_the_example_with_token_ratios(self):
        """Clipped: the 4 of the first response and both 1/4 of the second, 3 of 11 tokens."""
        got = gspo.clip_fraction(self.TOKEN, ADVANTAGES, MASK, *RANGE)
        check(got, 3 / 11, "(B, T) ratios: each token counts on its own, padding (NaN here) never")

    def test_takes_an_advantage_for_each_token(self):
        """s = 2, 1/2, 2, 1/2 clip the signs + - + -: of these rows 1, 2, 2 and 1 tokens, so 6 of 11."""
        advantages = torch.tensor([[1.0, -1, 1, 1], [-1, 1, -1, 1], [1, -1, 1, 1], [1, -1, -1, -1], [1, 1, 1, 1]])
        got = gspo.clip_fraction(self.SEQUENCE, advantages.masked_fill(~MASK, NAN), MASK, *RANGE)
        check(got, 6 / 11, "(B, T) advantages: each token's own sign decides")

    def test_does_not_count_advantages_of_zero(self):
        got = gspo.clip_fraction(self.SEQUENCE, torch.zeros(5), MASK, *RANGE)
        check(got, 0, "A = 0 has no gradient to take out, so nothing of it is clipped")

    def test_uses_each_side_of_the_range(self):
        """Ratios 1.4 and 0.7 in a range of 0.8 to 1.5: only the second is out. In 0.5 to 1.3: only the first."""
        ratio, advantages, mask = torch.tensor([1.4, 0.7]), torch.tensor([1.0, -1.0]), torch.tensor([[1, 1, 1], [1, 0, 0]])
        check(gspo.clip_fraction(ratio, advantages, mask, 0.2, 0.5), 1 / 4, "eps_low is below 1, eps_high above")
        check(gspo.clip_fraction(ratio, advantages, mask, 0.5, 0.3), 3 / 4, "eps_low is below 1, eps_high above")

    def test_of_no_tokens_is_zero(self):
        got = gspo.clip_fraction(self.SEQUENCE, ADVANTAGES, torch.zeros(5, 4), *RANGE)
        check(got, 0, "no tokens: 0, not NaN (0 / 0)")

    def test_refuses_shapes_that_do_not_fit(self):
        mask, adv = torch.zeros(2, 5), torch.zeros(2)
        refuses("ratio (3,) with mask (2, 5)", gspo.clip_fraction, torch.zeros(3), adv, mask, 0.1, 0.1, names=(3, 5))
        refuses("ratio (2, 7) with mask (2, 5)", gspo.clip_fraction, torch.zeros(2, 7), adv, mask, 0.1, 0.1, names=(7, 5))
        refuses("advantages (5,) with mask (2, 5)", gspo.clip_fraction, adv, torch.zeros(5), mask, 0.1, 0.1, names=(2, 5))
