r"""The specification of gspo.py, and the tests of a student's version.

    python -m pytest test_gspo.py                      test gspo.py, in seconds
    GSPO=my_gspo.py python -m pytest -x test_gspo.py   work on your own file, one mistake at a time
    GSPO=my_gspo.py python -m pytest test_gspo.py      end with a line for each function

The maths is what the equations say, on ordinary input. The promises make a function usable on any
input: half precision, NaN in the padding, responses without tokens, micro-batches, and a ValueError
for invalid arguments. The tests of the maths come first, so `-x` is a tutorial.

    arXiv v2         what it says                                     function
    Eq. 6            (reward - mean) / standard deviation, by group   group_advantages
    -                log softmax(logits / temperature), at the token  token_log_probs
    Eq. 7            s = (pi / pi_old)^(1/|y|), one per response      sequence_ratio
    Eq. 1, 2, 5, 13  min(r A, clip(r) A)                              clipped_objective
    Eq. 5, 10        GSPO and its gradient                            gspo_loss
    Eq. 13-14, 17    GSPO-token: an advantage for each token          gspo_token_loss
    Eq. 2, 12        GRPO: a ratio for each token                     grpo_loss
    -                the fraction of tokens that clipping removes     clip_fraction

To run fewer tests, add for example -k "SequenceRatio or GspoLoss". Where gspo.py is beside this
file, a test that fails is run again with gspo.py's versions of all other functions. A mistake in
one function therefore costs nothing in the functions that call it.
"""
import inspect
import itertools
import math
import os
import re
import runpy
import sys
import traceback
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

ANSWERS = Path(__file__).resolve().with_name("gspo.py")
PATH = Path(os.environ.get("GSPO", ANSWERS)).resolve()
FAILURES = Exception, SystemExit, pytest.fail.Exception, pytest.skip.Exception


# ---- the file under test -------------------------------------------------------------------------


def fail(hint, *details):
    pytest.fail("\n  ".join([hint, *details]), pytrace=False)


def load(path):
    """The module in this file. If it does not load, the run ends with one line that says why."""
    module = types.ModuleType("file_under_test")
    sys.modules[module.__name__] = module  # dataclasses, pickle and the file itself look there
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except FAILURES as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"line {frame.lineno}: " for frame in frames if frame.filename == str(path)]
        why = f"{path.name} does not load: {''.join(where[-1:])}{type(error).__name__}: {error}"
        raise pytest.Collector.CollectError(why) from None
    return module


class Written:
    """The functions under test. If one is missing, its test says so."""
    names = {}

    def __getattr__(self, name):
        def call(*arguments, **keywords):
            __tracebackhide__ = True
            if not callable(self.names.get(name)):
                fail(f"{PATH.name} has no function {name}")
            result = self.names[name](*arguments, **keywords)
            if not isinstance(result, torch.Tensor):
                fail(f"return a tensor, not a {type(result).__name__}", f"got {result!r}")
            return result
        return call


gspo = Written()
right = {}                         # the names in gspo.py, for a second chance
if __name__ != "__main__":
    if "GSPO" in os.environ:
        sys.modules["gspo"] = None  # import gspo is now an error
    if PATH != ANSWERS and ANSWERS.is_file():
        right = vars(load(ANSWERS))
    gspo.names = vars(load(PATH))


def place(test):
    """(part of the homework, kind) of a test's id, or None. The maths is a kind without a name."""
    found = re.search("test_(gspo|loop).py::Test(MathsOf|PromisesOf|)([^:]*)", test)
    if found:
        part = re.sub("(?<=[a-z])(?=[A-Z])", "_", found[3]).lower()
        return part, "promises " if found[2] == "PromisesOf" else ""


class Report:
    """A pytest plugin that ends the run with a line for each part, and a total. A test that fails
    is run again with gspo.py's functions in place of all but the one that it tests."""

    def __init__(self):
        self.passed = {}           # part, or "total": {kind: whether each test has passed}
        self.hints = {}            # part: what to look at first

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        __tracebackhide__ = True
        found = place(pyfuncitem.nodeid)
        if not (right and found):
            return None            # pytest runs the test
        functions = {name: x for name, x in right.items() if inspect.isfunction(x)}
        # homework/grade.py knows which of the file's own functions hang or end the process.
        own = {name: functions[name] for name in os.environ.get("GRADE_BROKEN", "").split()}
        others = {name: x for name, x in functions.items() if name[0] != "_" and name != found[0]}
        arguments = inspect.signature(pyfuncitem.obj).parameters.keys()
        failures = []
        for names in own, others:
            torch.set_default_dtype(torch.float32)  # the file may have changed these
            torch.set_grad_enabled(True)
            try:
                with mock.patch.dict(gspo.names, names):
                    pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments})
                return True
            except FAILURES as error:
                failures.append(error)
        raise failures[-1]         # the mistake of this function, and not of one that it calls

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and place(report.nodeid):
            part, kind = place(report.nodeid)
            for name in part, "total":
                self.passed.setdefault(name, {}).setdefault(kind, []).append(report.passed)
            if not report.passed:
                crash = getattr(report.longrepr, "reprcrash", None)
                hint = crash.message.partition("\n")[0] if crash else "a test was skipped"
                self.hints.setdefault(part, f": {hint.removeprefix('Failed: ')}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # below pytest's own list of failures
    def pytest_terminal_summary(self, terminalreporter):
        yield
        terminalreporter.section("tests passed, and what to look at first")
        total = self.passed.pop("total", {})
        for part, kinds in [*self.passed.items(), ("total", total)]:
            counts = [f"{kind}{sum(tests)} of {len(tests)}" for kind, tests in kinds.items()]
            terminalreporter.line(f"{part} {', '.join(counts)}{self.hints.get(part, '')}")


@pytest.fixture(scope="session", autouse=True)
def report(request):
    if "GSPO" in os.environ:
        request.config.pluginmanager.register(Report())


# ---- what a failed test says ---------------------------------------------------------------------


def check(got, expected, hint, tolerance=1e-5, mistakes=()):
    """Each element is within tolerance * (1 + |expected|) of the expected, or the test fails.

    mistakes: pairs of a wrong result and the message for it. Dimensions of size 1 do not count."""
    if got.dtype not in (torch.float32, torch.float64):
        fail("compute in float32: bfloat16 rounds too coarsely for GSPO", f"got {got.dtype}")
    got = got.detach().double()
    expected = torch.as_tensor(expected, dtype=torch.float64)
    numbers = [f"got      {got.tolist()}", f"expected {expected.tolist()}"]
    sizes = [[n for n in x.shape if n != 1] for x in (got, expected)]
    if sizes[0] != sizes[1]:
        fail(f"the shape must be {tuple(expected.shape)}, not {tuple(got.shape)}", *numbers)
    got = got.reshape(expected.shape)

    def is_close_to(value):
        value = torch.as_tensor(value, dtype=torch.float64)
        return bool(((got - value).abs() <= tolerance * (1 + value.abs())).all())

    if not is_close_to(expected):
        known = [look_at for value, look_at in mistakes if is_close_to(value)]
        fail([*known, hint][0], *numbers)


def check_shape(got, shape):
    if got.shape != shape:
        fail(f"the shape of the result must be {shape}, but it is {tuple(got.shape)}")


def check_refused(hint, function, *arguments, shapes=False):
    """The call raises a ValueError, or the test fails. With shapes, its message has a number."""
    try:
        result = function(*arguments)
    except Exception as error:
        result = error
    got = f"got      {type(result).__name__}: {result}"
    if not isinstance(result, ValueError):
        fail(f"{hint}: check it yourself and raise ValueError", got)
    if shapes and not re.search("[0-9]", str(result)):
        fail(f"{hint}: say in the message which shape was found", got)


def gradient_of(value, x):
    """d value.sum() / d x, or the test fails because there is none."""
    gradient = None
    if value.requires_grad:
        gradient = torch.autograd.grad(value.sum(), x, allow_unused=True)[0]
    if gradient is None:
        fail("no gradient comes through: is something detached that should not be?")
    return gradient


def check_refuses_bad_masks(function, mask):
    """function(mask) refuses masks that mark tokens by another value than 1."""
    for other in (-math.inf, -1e9, 2.0):
        bad = torch.zeros(mask.shape).masked_fill(~mask, other)
        check_refused(f"a mask of 0 and {other:g} (is it an additive mask?)", function, bad)


def check_refuses_bad_clip_ranges(function):
    """function(eps_low, eps_high) refuses what cannot be two distances from 1."""
    for eps in (0.9997, 1.0004), (0.9, 0.5), (0.0, 0.5), (-0.2, 0.5), (1.5, 0.5), (0.2, 0.0):
        check_refused(f"eps_low, eps_high = {eps} (distances from 1, not bounds)", function, *eps)
    function(0.8, 0.5)
    function(1, 1e9)  # no clip


def check_no_gradient_of_old(function, new, old, *arguments):
    new.requires_grad_()
    old.requires_grad_()
    function(new, old, *arguments).sum().backward()
    if old.grad is not None and bool((old.grad != 0).any()):
        fail("old_log_probs must not get a gradient: detach it", f"got {old.grad.tolist()}")


# ---- an example that can be checked with a pencil ------------------------------------------------

# Five responses of 2, 4, 3, 2 and 0 tokens. Each number is pi_new / pi_old of one token.
RATIOS = [[8, 1/2],                # s = (8 * 1/2)^(1/2)             = 2
          [1/8, 1, 2, 1/4],        # s = (1/8 * 1 * 2 * 1/4)^(1/4)   = 1/2
          [4, 1/2, 4],             # s = (4 * 1/2 * 4)^(1/3)         = 2
          [1/8, 2],                # s = (1/8 * 2)^(1/2)             = 1/2
          []]                      # no tokens; used only in the tests of empty responses
SEQUENCE_RATIOS = [2, 1/2, 2, 1/2]
ADVANTAGES = [1.0, -1.0, -3.0, 2.0, 1.0]
RANGE = (0.2, 0.5)                 # the clip range of the example: 0.8 to 1.5
GSPO = [1.5, -0.8, -6, 1]          # the objective of each response, in this range
GRPO = [1, -1.15, -8.8, 1.625]
ALL = (0, 1, 2, 3)


def example(rows=ALL, columns=None, padding=0.0):
    """log_probs, old_log_probs, advantages, mask of these responses; old probabilities are 1/16."""
    lengths = torch.tensor([len(RATIOS[i]) for i in rows])
    mask = torch.arange(columns or max(lengths)) < lengths[:, None]
    old = torch.full(mask.shape, 1 / 16).log()
    new = old.clone()
    new[mask] += torch.tensor([ratio for i in rows for ratio in RATIOS[i]]).log()
    advantages = torch.tensor([ADVANTAGES[i] for i in rows])
    new = new.masked_fill(~mask, padding)
    old = old.masked_fill(~mask, padding / 2)
    return new, old, advantages, mask


def about(i):
    return f"one response, token ratios {RATIOS[i]}, A = {ADVANTAGES[i]:g}, range 0.8 to 1.5"


# Three layouts of the same four responses: columns, padding, what to look at
LAYOUTS = pytest.mark.parametrize("columns, padding, hint", [
    (4, 0.0, "|y| is the number of tokens of each response: the sum of its mask, and not T"),
    (10, 0.0, "six more columns of padding change nothing: divide by |y|, and not by T"),
    (4, -7.0, "padding (-7 here) changes nothing: a mean is over the tokens of the mask"),
])

# ratio, advantage, min(r A, clip(r, 0.8, 1.5) A), its slope in r, what to look at
CLIPPED = [
    (1.2, 1.0, 1.2, 1, "r is within the range, so this is r A"),
    (0.5, 1.0, 0.5, 1, "take the min of 0.5 and 0.8 (is the min a max, or missing?)"),
    (2.0, 1.0, 1.5, 0, "the clip is active at 1 + eps_high (1.2 would be 1 + eps_low)"),
    (1.2, -1.0, -1.2, -1, "r is within the range, so this is r A"),
    (0.5, -1.0, -0.8, 0, "the clip is active at 1 - eps_low"),
    (2.0, -1.0, -2.0, -1, "take the min of -2 and -1.5 (is the min a max, or missing?)"),
    (2.0, 0.0, 0.0, 0, "without an advantage, the objective is 0"),
    (0.7, 1.0, 0.7, 1, "take the min of 0.7 and 0.8: if A > 0, a low ratio is not clipped"),
    (1.6, -1.0, -1.6, -1, "take the min of -1.6 and -1.5: if A < 0, a high ratio is not clipped"),
]


def random_batch(seed=0, one_ratio=True, one_advantage=True):
    """The .arguments of a loss for 12 responses of 1 to 9 tokens with gaps in the mask, and the
    loss's .value and .gradient. Ratio and sign of A come from the first six rows of CLIPPED.
    one_ratio: the tokens of a response share a row, and their ratios scatter around its ratio."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(9) < torch.randint(1, 10, (12, 1), generator=generator)
    mask[:, 1:] &= torch.rand(12, 8, generator=generator) > 0.15
    lengths = mask.sum(dim=1, keepdim=True)
    columns = 1 if one_advantage else 9
    line = torch.randint(3, (12, 1 if one_ratio else 9), generator=generator)
    line = line + 3 * torch.randint(2, (12, columns), generator=generator)
    table = torch.tensor([row[:4] for row in CLIPPED], dtype=torch.float64)
    ratio, sign, objective, slope = table[line.expand(12, 9)].unbind(dim=-1)
    size = 0.5 + torch.rand(12, columns, generator=generator, dtype=torch.float64)
    scatter = torch.randn(12, 9, generator=generator, dtype=torch.float64) * mask * 0.3 * one_ratio
    scatter -= scatter.sum(dim=1, keepdim=True) / lengths
    old = -0.5 - torch.rand(12, 9, generator=generator, dtype=torch.float64)
    new = (old + ratio.log() + scatter) * mask
    advantages = sign[:, 0] * size[:, 0] if one_advantage else sign * size
    share = mask * size / lengths / 12  # each response counts alike, and in it each token
    return types.SimpleNamespace(
        arguments=(new, old * mask, advantages, mask),
        value=-(share * objective).sum(),
        gradient=-share * slope * ratio,
        ratio=ratio[:, 0] if one_ratio else ratio,
        clipped=slope == 0,
    )


# ==== part one: the maths =========================================================================


class TestMathsOfGroupAdvantages:
    def test_is_the_reward_minus_the_mean_over_the_standard_deviation(self):
        """0.8, 0.4 and 0.6 have the mean 0.6, the deviations 0.2, -0.2 and 0, the sample variance
        (0.04 + 0.04) / (3 - 1) = 0.04 and the standard deviation 0.2."""
        got = gspo.group_advantages(torch.tensor([0.8, 0.4, 0.6]), 3, std_eps=0.0)
        hint = "Eq. 6: (reward - mean) / standard deviation, which is that of a sample (n - 1)"
        check(got, [1, -1, 0], hint, mistakes=[
            ([1.5 ** 0.5, -(1.5 ** 0.5), 0], "use the standard deviation of a sample (n - 1)"),
            ([0.2, -0.2, 0], "divide by the group's standard deviation"),
            ([4, 2, 3], "subtract the group's mean before you divide")])

    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_looks_at_each_group_on_its_own(self, size):
        """The rewards of the second group are 10 times those of the first group, plus 100."""
        rewards = torch.rand(size, generator=torch.Generator().manual_seed(0))
        alone = gspo.group_advantages(rewards, size, std_eps=0.0)
        got = gspo.group_advantages(torch.cat([rewards, 10 * rewards + 100]), size, std_eps=0.0)
        hint = "take mean and standard deviation of each group of neighbours, not of the batch"
        check(got, torch.cat([alone, alone]), hint, 1e-4)

    def test_adds_std_eps_to_the_standard_deviation(self):
        """0 and 2 have the mean 1 and the standard deviation sqrt 2, so the advantage of 2 is
        1 / (sqrt 2 + 1) = 0.41421. The rewards 0 and 0.0002 with std_eps 1e-4 give the same."""
        got = gspo.group_advantages(torch.tensor([0.0, 2.0]), 2, std_eps=1.0)
        check(got, [-0.41421356, 0.41421356], "std_eps is added to the standard deviation")
        got = gspo.group_advantages(torch.tensor([0.0, 0.0002]), 2)
        check(got, [-0.41421356, 0.41421356], "std_eps is 1e-4 by default", 1e-3)


class TestMathsOfTokenLogProbs:
    # (1, 2, 3): the weights of three words are 1, 2, 5 and then 4, 2, 2. Tokens: word 1, word 0.
    LOGITS = torch.tensor([[[1.0, 2.0, 5.0], [4.0, 2.0, 2.0]]], dtype=torch.float32).log()
    TOKENS = torch.tensor([[1, 0]])

    def test_is_the_log_of_the_tokens_probability(self):
        """Word 1 of 1, 2, 5 has the probability 2/8. Word 0 of 4, 2, 2 has the probability 4/8."""
        got = gspo.token_log_probs(self.LOGITS, self.TOKENS)
        hint = "log softmax over V, at the token; logits[:, t] predict tokens[:, t]: do not shift"
        check(got.exp(), [[2 / 8, 4 / 8]], hint, mistakes=[
            ([[math.exp(2 / 8), math.exp(4 / 8)]], "this is the probability: take its log"),
            ([[2, 4]], "this is the logit: log_softmax over V is missing")])

    def test_divides_the_logits_by_the_temperature(self):
        """At temperature 1/2 the weights are squared: 1, 4, 25 of 30, and 16, 4, 4 of 24."""
        got = gspo.token_log_probs(self.LOGITS, self.TOKENS, 0.5)
        check(got.exp(), [[4 / 30, 16 / 24]], "take softmax of logits / temperature", mistakes=[
            ([[4 / 64, 16 / 64]], "divide the logits before the softmax, not the log-probs after"),
            ([[2 / 8, 4 / 8]], "the temperature has no effect, but responses are sampled at it")])

    @pytest.mark.parametrize("temperature, expected", [
        (1.0, [[-1 / 8, 6 / 8, -5 / 8], [4 / 8, -2 / 8, -2 / 8]]),
        (0.5, [[-2 / 30, 52 / 30, -50 / 30], [16 / 24, -8 / 24, -8 / 24]]),
    ])
    def test_carries_the_gradient_of_the_logits(self, temperature, expected):
        """d log softmax(z)[y] / d z = onehot(y) - softmax(z); at temperature 1/2, twice that."""
        logits = self.LOGITS.clone().requires_grad_()
        got = gradient_of(gspo.token_log_probs(logits, self.TOKENS, temperature), logits)
        check(got, [expected], f"the gradient must reach the logits (temperature {temperature})")


class TestMathsOfSequenceRatio:
    def test_is_the_geometric_mean_of_the_token_ratios(self):
        """The product of 1/2, 1, 4 and 8 is 16, so s = 16^(1/4) = 2."""
        new = torch.tensor([[1 / 2, 1.0, 4.0, 8.0]]).log()
        got = gspo.sequence_ratio(new, torch.zeros(1, 4), torch.ones(1, 4))
        hint = "Eq. 7: the geometric mean of the token ratios 1/2, 1, 4 and 8 is 16^(1/4) = 2"
        check(got, [2], hint, mistakes=[
            (16, "this is the product of the token ratios: the power 1/|y| is missing"),
            (3.375, "this is the arithmetic mean of the token ratios: take the geometric mean"),
            (1 / 2, "the ratio is upside down: it is the current policy over the old one"),
            (math.log(2), "this is log s: exp is missing")])

    @pytest.mark.parametrize("i", ALL)
    def test_of_one_response(self, i):
        new, old, _, mask = example([i])
        got = gspo.sequence_ratio(new, old, mask)
        check(got, [SEQUENCE_RATIOS[i]], f"Eq. 7: exp of the mean log-ratio ({about(i)})")

    @LAYOUTS
    def test_of_four_responses(self, columns, padding, hint):
        new, old, _, mask = example(ALL, columns, padding)
        check(gspo.sequence_ratio(new, old, mask), SEQUENCE_RATIOS, hint)

    @pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float32])
    def test_of_a_random_batch_with_holes_in_the_mask(self, kind):
        batch = random_batch()
        new, old, _, mask = batch.arguments
        hint = f"Eq. 7: take the tokens where the mask ({kind}) is 1, anywhere in the row"
        check(gspo.sequence_ratio(new, old, mask.to(kind)), batch.ratio, hint)

    def test_has_the_gradient_s_over_length_on_every_token(self):
        new, old, _, mask = example()
        new.requires_grad_()
        got = gradient_of(gspo.sequence_ratio(new, old, mask), new)
        expected = [[1, 1, 0, 0], [1/8] * 4, [2/3, 2/3, 2/3, 0], [1/4, 1/4, 0, 0]]
        check(got, expected, "the derivative of s is s / |y| for each token, and 0 for padding")


class TestMathsOfClippedObjective:
    @pytest.mark.parametrize("ratio, advantage, value, _, look_at", CLIPPED)
    def test_is_the_smaller_of_clipped_and_unclipped(self, ratio, advantage, value, _, look_at):
        got = gspo.clipped_objective(torch.tensor([ratio]), torch.tensor([advantage]), *RANGE)
        formula = "min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)"
        about = f"r = {ratio}, A = {advantage:g}"
        check(got, [value], f"{formula}, {about}: {look_at}", mistakes=[
            ([-value], f"the sign is wrong: {formula} is maximised; only the loss has a minus")])

    @pytest.mark.parametrize("ratio, advantage, _, slope, look_at", CLIPPED)
    def test_slopes_where_the_min_takes_the_unclipped(self, ratio, advantage, _, slope, look_at):
        r = torch.tensor([ratio], requires_grad=True)
        got = gspo.clipped_objective(r, torch.tensor([advantage]), *RANGE)
        hint = "the derivative is A if the min takes r A, and 0 if the clip is active"
        check(gradient_of(got, r), [slope], f"{hint}; r = {ratio}, A = {advantage:g}: {look_at}")

    def test_is_elementwise(self):
        table = torch.tensor([row[:4] for row in CLIPPED[:6]])
        ratio, advantage, value, _ = table.T.reshape(4, 2, 3)
        got = gspo.clipped_objective(ratio, advantage, *RANGE)
        check(got, value, "treat each element on its own, whatever the shape")


class LossMaths:
    """The tests of a loss. The classes below say what they need to know about each loss."""
    sign_hint = "the sign is wrong: the loss is minus the objective"

    def loss(self, *arguments, **keywords):
        return getattr(gspo, self.name)(*arguments, **keywords)

    def value_and_gradient(self, log_probs, *arguments, **keywords):
        """The loss and its gradient with respect to log_probs, in RANGE."""
        log_probs = log_probs.detach().clone().requires_grad_()
        value = self.loss(log_probs, *arguments, *RANGE, **keywords)
        return value, gradient_of(value, log_probs)

    def mistakes(self, objectives, columns):
        """Wrong means of these responses' objectives in so many columns, and their hints."""
        by_token = sum(len(RATIOS[i]) * objectives[i] for i in ALL)
        each = "each response has the mean over its own tokens"
        return [
            (-sum(objectives), "this is the sum over responses: take the mean"),
            (sum(objectives) / 4, self.sign_hint),
            (-by_token / 11, f"this is the mean over the tokens of all responses, but {each}"),
            (-by_token / 4 / columns, f"this is a sum over the tokens divided by T, but {each}")]

    @pytest.mark.parametrize("i", ALL)
    def test_of_one_response(self, i):
        value = self.loss(*example([i]), *RANGE)
        check(value, -self.objectives[i], f"{self.value_hint} ({about(i)})", mistakes=[
            (self.objectives[i], self.sign_hint),
            (-self.without_root[i], "the power 1/|y| is missing in s"),
            (-self.other_objectives[i], f"{self.other_hint} ({about(i)})")])

    @pytest.mark.parametrize("i", ALL)
    def test_of_one_response_has_the_papers_gradient(self, i):
        _, gradient = self.value_and_gradient(*example([i]))
        twice = "this is twice the gradient: in Eq. 14, the gradient of s_i is stopped"
        check(gradient, [self.gradients[i]], f"{self.gradient_hint} ({about(i)})", mistakes=[
            ([[2 * x for x in self.gradients[i]]], twice)])

    def test_of_unchanged_log_probs_is_minus_the_mean_advantage(self):
        """Every ratio is 1: -(1 - 1 - 3 + 2) / 4 = 1/4."""
        _, old, advantages, mask = example()
        value, gradient = self.value_and_gradient(old, old, advantages, mask)
        check(value, 1 / 4, "if all ratios are 1, the loss is minus the mean of the advantages",
              mistakes=self.mistakes([ADVANTAGES[i] for i in ALL], 4))
        expected = [[-1/8, -1/8, 0, 0], [1/16] * 4, [1/4, 1/4, 1/4, 0], [-1/4, -1/4, 0, 0]]
        check(gradient, expected, "if all ratios are 1, the gradient of a token is -A / |y| / B")

    @LAYOUTS
    def test_of_four_responses_is_their_mean(self, columns, padding, hint):
        value = self.loss(*example(ALL, columns, padding), *RANGE)
        check(value, -sum(self.objectives) / 4, f"take the mean over responses; {hint}",
              mistakes=self.mistakes(self.objectives, columns))

    @pytest.mark.parametrize("seed", range(4))
    def test_of_a_random_batch(self, seed):
        one_advantage = seed < 2 or not self.token_advantages
        batch = random_batch(seed, self.one_ratio, one_advantage)
        about = f"12 responses, advantages {tuple(batch.arguments[2].shape)}"
        value, gradient = self.value_and_gradient(*batch.arguments)
        check(value, batch.value, f"{self.value_hint} ({about})")
        check(gradient, batch.gradient, f"{self.gradient_hint} ({about})")

    def test_has_its_own_clip_range_by_default(self):
        """Just beyond the range, on the clipped side, the gradient is 0. Elsewhere it is not 0."""
        low, high = self.default_range
        for edge, sign, factor in itertools.product((high, -low), (1.0, -1.0), (1.05, 0.95)):
            ratio = 1 + factor * edge
            new = torch.full((1, 3), math.log(ratio), dtype=torch.float64, requires_grad=True)
            value = self.loss(new, torch.zeros(1, 3), torch.tensor([sign]), torch.ones(1, 3))
            gradient = gradient_of(value, new)
            clipped = factor > 1 and edge * sign > 0
            if bool((gradient == 0).all()) != clipped:
                numbers = f"ratio {ratio:.6f}, advantage {sign:g}: gradient {gradient.tolist()}"
                fail(f"the default clip range is eps_low={low}, eps_high={high}", numbers)


class TestMathsOfGspoLoss(LossMaths):
    """s = 2, 1/2, 2, 1/2, clipped where the min says so: 1.5 * 1, 0.8 * -1, 2 * -3, 1/2 * 2. Each
    token's gradient is -s A / |y|: 0, 0 (both are clipped), 2 * 3 / 3, -1/2 * 2 / 2."""
    name = "gspo_loss"
    token_advantages = False       # takes advantages (B,) only
    one_ratio = True
    default_range = (3e-4, 4e-4)
    objectives = GSPO
    without_root = [1.5, -0.8, -24, 0.5]  # the products are 4, 1/16, 8 and 1/4
    gradients = [[0, 0], [0, 0, 0, 0], [2, 2, 2], [-0.5, -0.5]]
    other_objectives = GRPO
    other_hint = "this is GRPO's value (all tokens share s), or s is always 1 (use old_log_probs)"
    value_hint = "Eq. 5: the loss is minus min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)"
    gradient_hint = "Eq. 10: the gradient of a token is -s A / |y|, or 0 if the clip is active"


class TestMathsOfGspoTokenLoss(TestMathsOfGspoLoss):
    name = "gspo_token_loss"
    token_advantages = True
    value_hint = "Eq. 13: the loss is minus the mean over tokens of min(s_t A_t, clip(s_t) A_t)"
    gradient_hint = "Eq. 17: the gradient of a token is -s_i A_t / |y|, or 0 if the clip is active"

    def test_clips_one_sign_of_a_response_and_not_the_other(self):
        """s = 2, so A = 1 gives 1.5 (clipped) and A = -1 gives -2. The loss is -(1.5 - 2) / 2."""
        new, old, _, mask = example([0])
        value, gradient = self.value_and_gradient(new, old, torch.tensor([[1.0, -1.0]]), mask)
        check(value, 0.25, "the advantage of each token decides whether the clip is active for it")
        check(gradient, [[0, 1.0]], "only the second token has a gradient: s A / |y| = 2 * 1 / 2")


class TestMathsOfGrpoLoss(LossMaths):
    """Means over tokens: (1.5 + .5) / 2, (-.8 - 1 - 2 - .8) / 4, (-12 - 2.4 - 12) / 3 and
    (.25 + 3) / 2. Each token's gradient is -w A / |y|, or 0 if the clip is active for it."""
    name = "grpo_loss"
    token_advantages = True
    one_ratio = False
    default_range = (0.2, 0.27)
    objectives = without_root = GRPO
    gradients = [[0, -0.25], [0, 0.25, 0.5, 0], [4, 0, 4], [-0.125, 0]]
    other_objectives = GSPO
    other_hint = "this is GSPO's value: in GRPO, each token has its own ratio w_t"
    value_hint = "Eq. 2: the loss is minus the mean over tokens of min(w_t A, clip(w_t) A)"
    gradient_hint = "Eq. 12: the gradient of a token is -w_t A / |y|, or 0 if the clip is active"


class TestMathsOfClipFraction:
    def test_of_the_example_with_sequence_ratios(self):
        """Responses 1 (s = 2, A > 0) and 2 (s = 1/2, A < 0) are clipped: 6 of 11 tokens."""
        _, _, advantages, mask = example()
        got = gspo.clip_fraction(torch.tensor(SEQUENCE_RATIOS), advantages, mask, *RANGE)
        hint = "clipped / all tokens; s > 1 + eps_high counts if A > 0, s < 1 - eps_low if A < 0"
        check(got, 6 / 11, hint, mistakes=[
            (1 / 2, "this is the fraction of responses: count their tokens"),
            (1, "look at the sign of A: on the other side, the min keeps the gradient")])

    def test_of_the_example_with_token_ratios(self):
        """The clipped ratios are 8, 1/8 and 1/4, 1/2, and 2. These are 5 of 11 tokens."""
        new, old, advantages, mask = example()
        got = gspo.clip_fraction((new - old).exp(), advantages, mask, *RANGE)
        check(got, 5 / 11, "if the ratios are (B, T), each token counts on its own")

    @pytest.mark.parametrize("one_ratio", [True, False])
    def test_of_a_random_batch(self, one_ratio):
        batch = random_batch(3, one_ratio, one_advantage=False)
        _, _, advantages, mask = batch.arguments
        got = gspo.clip_fraction(batch.ratio, advantages, mask, *RANGE)
        expected = batch.clipped[mask].double().mean()
        check(got, expected, "clipped / all tokens; advantages (B, T) belong to tokens")

    def test_does_not_count_advantages_of_zero(self):
        new, old, advantages, mask = example()
        got = gspo.clip_fraction((new - old).exp(), 0 * advantages, mask, *RANGE)
        check(got, 0, "a token with A = 0 has no gradient to remove, so it does not count")


# ==== part two: the promises ======================================================================

FILL = "must change nothing: use masked_fill, because NaN * 0 is NaN"
UNUSUAL = pytest.mark.parametrize("rows, padding, hint", [
    (ALL, math.nan, f"padding of nan {FILL}"),
    (ALL, -math.inf, f"padding of -inf {FILL}"),
    ([*ALL, 4], 0.0, "a response without tokens has s = 1; in a loss, it counts with value 0"),
])
# Both are bfloat16 numbers, but their difference, 1023/1024, is not.
NEW, OLD = -1 / 1024, -1.0


def bfloat16(x):
    return torch.full((1, 3), x).bfloat16()


class TestPromisesOfGroupAdvantages:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.long])
    def test_computes_in_float32_at_least(self, dtype):
        """0, 1, 0, 1 have the mean 1/2 and the sample standard deviation 1 / sqrt 3."""
        got = gspo.group_advantages(torch.tensor([0, 1, 0, 1], dtype=dtype), 4)
        expected = torch.tensor([-1, 1, -1, 1]) * 0.5 / (3 ** -0.5 + 1e-4)
        check(got, expected, f"rewards of {dtype} must be converted to float32 first")

    def test_is_exactly_zero_in_a_group_of_equal_rewards(self):
        for reward, n in itertools.product((0.0, 0.1, 0.3, 1 / 3, -0.7, 1e6), (3, 7, 8)):
            two_groups = torch.cat([torch.full((n,), reward), torch.arange(n)])
            got = gspo.group_advantages(two_groups, n)[:n]
            if not bool((got == 0).all()):
                fail("equal rewards must give exactly 0, even if rounding interferes", f"got {got}")

    def test_returns_one_advantage_for_each_response(self):
        check_shape(gspo.group_advantages(torch.rand(8), 4), (8,))

    def test_refuses_a_group_size_below_2_or_one_that_does_not_divide(self):
        for size in (-2, 0, 1, 3, 16):
            check_refused(f"8 rewards by {size}", gspo.group_advantages, torch.rand(8), size)

    def test_refuses_a_reward_that_is_not_finite(self):
        for bad in (math.nan, math.inf, -math.inf):
            check_refused(f"a reward of {bad}", gspo.group_advantages, torch.tensor([1, bad]), 2)


class TestPromisesOfTokenLogProbs:
    def test_is_float32_from_bfloat16(self):
        """300 logits are 2 and one is 0, so the weights are 1 and exp(-2), of 300 + exp(-2)."""
        logits = torch.full((1, 2, 301), 2.0).bfloat16()
        logits[..., 7] = 0
        got = gspo.token_log_probs(logits, torch.tensor([[0, 7]]))
        total = math.log(300 + math.exp(-2))
        check(got, [[-total, -2 - total]], "convert bfloat16 logits to float32 before the softmax")

    def test_returns_one_log_prob_for_each_token(self):
        check_shape(gspo.token_log_probs(torch.rand(2, 5, 9), torch.ones(2, 5).long()), (2, 5))

    def test_survives_large_and_infinite_logits(self):
        logits = torch.tensor([[[200.0, 0.0, -math.inf]] * 2 + [[-200.0, -200.0, -math.inf]]])
        got = gspo.token_log_probs(logits, torch.tensor([[0, 1, 1]]))
        hint = "take log_softmax, not log(softmax): exp of a large logit overflows"
        check(got, [[0, -200, -math.log(2)]], hint)

    def test_refuses_shapes_that_do_not_fit(self):
        for shape in ((2, 7), (1, 5)):
            arguments = torch.rand(2, 5, 9), torch.zeros(shape, dtype=torch.long)
            hint = f"logits (2, 5, 9) with tokens {shape} must not be broadcast"
            check_refused(hint, gspo.token_log_probs, *arguments, shapes=True)

    def test_refuses_a_temperature_that_is_not_above_0(self):
        logits, tokens = torch.rand(1, 2, 3), torch.tensor([[0, 1]])
        for bad in (0, -1, math.nan):
            check_refused(f"a temperature of {bad}", gspo.token_log_probs, logits, tokens, bad)


class TestPromisesOfSequenceRatio:
    @UNUSUAL
    def test_of_unusual_responses(self, rows, padding, hint):
        new, old, _, mask = example(rows, padding=padding)
        new.requires_grad_()
        got = gspo.sequence_ratio(new, old, mask)
        check(got, [*SEQUENCE_RATIOS, 1][:len(rows)], hint)
        gradient = gradient_of(got, new)
        check(gradient[~mask], [0] * int((~mask).sum()), f"{hint}: the gradient of padding is 0")

    def test_gives_the_old_log_probs_no_gradient(self):
        new, old, _, mask = example()
        check_no_gradient_of_old(gspo.sequence_ratio, new, old, mask)

    def test_computes_in_float32_at_least(self):
        got = gspo.sequence_ratio(bfloat16(NEW), bfloat16(OLD), torch.ones(1, 3))
        check(got, [math.exp(NEW - OLD)], "convert bfloat16 to float32 before the first difference")

    def test_returns_one_ratio_for_each_response(self):
        new, old, _, mask = example()
        check_shape(gspo.sequence_ratio(new, old, mask), (4,))

    def test_does_not_overflow_on_5000_tokens(self):
        """Each token has become e times as likely. The product is e^5000, and s is e."""
        old = torch.full((1, 5000), -1.0)
        got = gspo.sequence_ratio(torch.zeros(1, 5000), old, torch.ones(1, 5000))
        check(got, [math.e], "take exp of the mean log-ratio: a product of 5,000 overflows")

    def test_refuses_shapes_that_do_not_fit(self):
        for shapes in itertools.permutations([(2, 5), (2, 5), (1, 5)]):
            tensors = [torch.zeros(shape) for shape in shapes]
            hint = f"log_probs, old_log_probs, mask of {shapes}"
            check_refused(hint, gspo.sequence_ratio, *tensors, shapes=True)

    def test_refuses_a_mask_that_is_not_0_and_1(self):
        new, old, _, mask = example()
        check_refuses_bad_masks(lambda bad: gspo.sequence_ratio(new, old, bad), mask)


class TestPromisesOfClippedObjective:
    def test_computes_in_float32_at_least(self):
        """A ratio of 2 is clipped to 1 + 4e-4."""
        got = gspo.clipped_objective(bfloat16(2.0), bfloat16(1.0), 3e-4, 4e-4)
        check(got, [[1.0004] * 3], "compute in float32: bfloat16 rounds 1 + 4e-4 to 1", 1e-6)

    def test_refuses_shapes_that_do_not_fit(self):
        for ratio, advantages in ((5, 5), (5,)), ((2, 5), (2,)), ((2, 5), (3, 5)):
            hint = f"ratio {ratio} with advantages {advantages} must not be broadcast"
            tensors = torch.ones(ratio), torch.ones(advantages)
            check_refused(hint, gspo.clipped_objective, *tensors, *RANGE, shapes=True)

    def test_refuses_a_clip_range_that_is_not_two_distances_from_1(self):
        ratio = torch.tensor([0.01, 100.0])
        objective = gspo.clipped_objective
        check_refuses_bad_clip_ranges(lambda *eps: objective(ratio, torch.ones(2), *eps))
        got = objective(ratio, torch.tensor([-1.0, 1.0]), 1, 1e9)
        check(got, [-0.01, 100], "eps_low=1, eps_high=1e9 switches the clip off, so this is r A")


class LossPromises:
    def test_adds_up_over_micro_batches(self):
        arguments = random_batch().arguments
        whole, gradient = self.of.value_and_gradient(*arguments)
        parts = [[x[i] for x in arguments] for i in torch.arange(12).split([1, 2, 3, 6])]
        parts = [self.of.value_and_gradient(*part, denominator=12) for part in parts]
        hint = "the loss is a sum over responses / denominator, so that micro-batches add up"
        check(sum(value for value, _ in parts), whole.detach(), hint)
        check(torch.cat([part for _, part in parts]), gradient, f"{hint}, and so do gradients")

    @UNUSUAL
    def test_of_unusual_responses(self, rows, padding, hint):
        new, old, advantages, mask = example(rows, padding=padding)
        if self.of.token_advantages:
            advantages = advantages[:, None].expand(mask.shape).masked_fill(~mask, padding)
        value, gradient = self.of.value_and_gradient(new, old, advantages, mask)
        check(value, -sum(self.of.objectives) / len(rows), hint)
        check(gradient[~mask], [0] * int((~mask).sum()), f"{hint}: the gradient of padding is 0")

    def test_gives_the_old_log_probs_no_gradient(self):
        check_no_gradient_of_old(self.of.loss, *example())

    def test_computes_in_float32_at_least(self):
        """Each token is e^(1023/1024) times as likely. As A = -1, the loss is this ratio."""
        advantages = bfloat16(-1.0)[:, 0]
        value = self.of.loss(bfloat16(NEW), bfloat16(OLD), advantages, torch.ones(1, 3), *RANGE)
        check(value, math.exp(NEW - OLD), "convert bfloat16 to float32 before the first difference")

    def test_returns_one_number(self):
        check_shape(self.of.loss(*example()), ())

    def test_leaves_its_arguments_as_they_were(self):
        arguments, before = example(padding=7.0), example(padding=7.0)
        self.of.loss(*arguments)
        if not all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True)):
            fail("the arguments were changed in place, but they belong to the caller")

    def test_refuses_shapes_that_do_not_fit(self):
        for position, wrong in itertools.product(range(4), [(2, 7), (1,), (5,)]):
            shapes = [(2, 5), (2, 5), (2,), (2, 5)]
            shapes[position] = wrong
            tensors = [torch.zeros(shape) for shape in shapes]
            hint = f"log_probs, old_log_probs, advantages, mask of {shapes}"
            check_refused(hint, self.of.loss, *tensors, shapes=True)

    def test_refuses_a_mask_that_is_not_0_and_1(self):
        *arguments, mask = example()
        check_refuses_bad_masks(lambda bad: self.of.loss(*arguments, bad), mask)

    def test_refuses_a_clip_range_that_is_not_two_distances_from_1(self):
        check_refuses_bad_clip_ranges(lambda *eps: self.of.loss(*example(), *eps))

    def test_refuses_a_denominator_that_is_not_above_0(self):
        for bad in (0, -4, math.nan):
            hint = f"a denominator of {bad}"
            check_refused(hint, lambda d: self.of.loss(*example(), *RANGE, denominator=d), bad)


class TestPromisesOfGspoLoss(LossPromises):
    of = TestMathsOfGspoLoss()


class TestPromisesOfGspoTokenLoss(LossPromises):
    of = TestMathsOfGspoTokenLoss()


class TestPromisesOfGrpoLoss(LossPromises):
    of = TestMathsOfGrpoLoss()


class TestPromisesOfClipFraction:
    def test_does_not_see_the_padding(self):
        new, old, advantages, mask = example(padding=math.nan)
        advantages = advantages[:, None].expand(mask.shape).masked_fill(~mask, math.nan)
        got = gspo.clip_fraction((new - old).exp(), advantages, mask, *RANGE)
        check(got, 5 / 11, "padding (NaN here) must not count")

    def test_returns_one_number(self):
        _, _, advantages, mask = example()
        check_shape(gspo.clip_fraction(torch.ones(4), advantages, mask, *RANGE), ())

    def test_of_no_tokens_is_zero(self):
        new, old, advantages, mask = example()
        got = gspo.clip_fraction((new - old).exp(), advantages, mask & False, *RANGE)
        check(got, 0, "without any token, the result is 0, and not 0 / 0 = NaN")

    def test_refuses_shapes_that_do_not_fit(self):
        for shapes in itertools.permutations([(2,), (3,), (5,), (2, 7)], 2):
            tensors = [torch.zeros(shape) for shape in (*shapes, (2, 5))]
            hint = f"ratio, advantages of {shapes}, mask (2, 5)"
            check_refused(hint, gspo.clip_fraction, *tensors, *RANGE, shapes=True)

    def test_refuses_a_mask_that_is_not_0_and_1(self):
        ratio, _, a, mask = example()
        check_refuses_bad_masks(lambda bad: gspo.clip_fraction(ratio, a, bad, *RANGE), mask)

    def test_refuses_a_clip_range_that_is_not_two_distances_from_1(self):
        ratio, _, a, mask = example()
        check_refuses_bad_clip_ranges(lambda *eps: gspo.clip_fraction(ratio, a, mask, *eps))


if __name__ == "__main__":         # the hand-outs, and the grades of a class
    if sys.argv[1:2] not in (["--handout"], ["--grade"]):
        sys.exit("start the tests with: python -m pytest -x test_gspo.py")
    module = sys.argv[1].replace("--", "homework.")
    sys.argv[1] = "maths"
    runpy.run_module(module, run_name="__main__")
