r"""The specification of gspo.py and train_math.py, and the grader of a student's gspo.py.

    python -m pytest                                              test both, one to two minutes on a CPU
    python test_gspo.py > my_gspo.py                              the assignment: gspo.py without answers
    python test_gspo.py gspo_loss > my_gspo.py                    a smaller one: gspo_loss alone is blank
    GSPO=my_gspo.py python -m pytest -x test_gspo.py              the student's loop
    GSPO=my_gspo.py python -m pytest -q --tb=no -rN test_gspo.py  the grade: a line a function
    $env:GSPO="my_gspo.py"                                        so in PowerShell, on a line before

Hand out my_gspo.py and this file, without gspo.py. The whole assignment leaves the private _helpers out: they
are half of the answer, and students may write their own; a smaller one keeps them. Tests stand in the order of
gspo.py's functions, the easy ones first, so `-x` makes them a tutorial. The first line of a failure says what
to look at, then come the numbers. They test behaviour, in float32's accuracy: any correct implementation
passes. Grade a smaller assignment with, say, -k "SequenceRatio or GspoLoss": what you filled in does not count.

    arXiv v2         what it says                                     function           tests
    Eq. 6            (reward - mean) / standard deviation, by group   group_advantages   TestGroupAdvantages
    -                log softmax(logits / temperature), at the token  token_log_probs    TestTokenLogProbs
    Eq. 7            s = (pi / pi_old)^(1/|y|), one ratio a response  sequence_ratio     TestSequenceRatio
    Eq. 1, 2, 5, 13  min(r A, clip(r) A)                              clipped_objective  TestClippedObjective
    Eq. 5, 10        GSPO and its gradient                            gspo_loss          TestGspoLoss
    Eq. 13-14, 17    GSPO-token: an advantage for each token          gspo_token_loss    TestGspoTokenLoss
    Eq. 2, 12        GRPO: a ratio for each token                     grpo_loss          TestGrpoLoss
    -                the share of tokens that the clip takes out      clip_fraction      TestClipFraction

A mistake counts once: after sequence_ratio or clipped_objective has failed a test, the losses that call it
are tested with a right one. The grader finds `import gspo`, functions that are word for word those of a
gspo.py beside it, sys.exit and endless loops; it does not see through a file that is out to deceive it, say
by patching pytest.
"""
import ast
import gc
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
GRADING = "GSPO" in os.environ
PATH = Path(os.environ.get("GSPO", HERE / "gspo.py"))
SECONDS = 60                       # a graded run takes three


def functions_in(path):
    """The functions of a file, where there is one: name -> syntax tree."""
    tree = ast.parse(path.read_bytes() if path.is_file() else "")
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def assignment(names):
    """gspo.py where `raise NotImplementedError` stands for the bodies of these functions, docstrings kept. No
    names: of all functions, and the private _helpers are left out."""
    lines = (HERE / "gspo.py").read_text(encoding="utf-8").splitlines()
    for name, node in reversed(functions_in(HERE / "gspo.py").items()):
        if not names and name.startswith("_"):
            del lines[node.lineno - 1:node.end_lineno + 2]  # and the two blank lines below
        elif not names or name in names:
            lines[node.body[0].end_lineno:node.end_lineno] = ["    raise NotImplementedError"]
    return "\n".join(lines)


if __name__ == "__main__":
    known = [name for name in functions_in(HERE / "gspo.py") if not name.startswith("_")]
    if unknown := [name for name in sys.argv[1:] if name not in known]:
        print(f"gspo.py has no function {unknown[0]}: it has {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    print(assignment(sys.argv[1:]))
    sys.exit()


# ---- the grader ---------------------------------------------------------------------------------------------


def load(path):
    """The module in this file; where it does not load, the run ends with one line that says why."""
    if not path.is_file():
        pytest.exit(f"GSPO={path}: no such file", returncode=2)
    module = types.ModuleType(path.stem)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = [f"line {frame.lineno}: " for frame in frames if frame.filename == str(path)] or [""]
        pytest.exit(f"{path.name} does not load: {line[-1]}{type(error).__name__}: {error}", returncode=2)
    return module


class Written:
    """The functions under test. One that is missing, or still to be written, or calls sys.exit, says so."""
    functions = {}

    def __getattr__(self, name):
        def call(*arguments, **keywords):
            __tracebackhide__ = True
            if not callable(self.functions.get(name)):
                fail(f"{PATH.name} has no function {name}")
            try:
                return self.functions[name](*arguments, **keywords)
            except NotImplementedError:
                why = "(or a helper that it calls) is still to be written: its docstring says what it does"
            except SystemExit:
                why = "calls sys.exit"
            fail(f"{name} {why}")
        return call


gspo = Written()


class Grade:
    """The plugin of a graded run: counts the tests, lends right functions, prints the grade, ends a hang."""

    def __init__(self, request):
        self.capture = request.config.pluginmanager.getplugin("capturemanager")
        self.tests = {item.nodeid: re.sub("(?<=[a-z])(?=[A-Z])", "_", item.cls.__name__[4:]).lower()
                      for item in request.session.items if item.path == Path(__file__)}  # test -> function
        self.hints = {}            # test -> first line of its failure, "" if it passed
        self.lent = set()          # functions that have failed a test, so that a right one stands in for them
        self.module = None
        self.timer = threading.Timer(SECONDS, self.give_up)
        self.timer.daemon = True

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.nodeid in self.tests:
            message = report.longrepr.reprcrash.message.removeprefix("Failed: ") if report.failed else ""
            self.hints[report.nodeid] = message.partition("\n")[0]
            function = self.tests[report.nodeid]
            if report.failed and function in RIGHT:
                self.lent.add(function)
                setattr(self.module, function, RIGHT[function])  # for the file's own calls, not for the tests

    def show(self, write):
        """Writes a line for each function: tests passed, of all, what to look at; then the total."""
        own, given, failed = functions_in(PATH), functions_in(HERE / "gspo.py"), []
        called = {name: {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & own.keys()
                  for name, tree in own.items()}
        for function, tests in Counter(self.tests.values()).items():
            hints = [hint for test, hint in self.hints.items() if self.tests[test] == function]
            calls, notes = called.get(function, set()), []
            if len(hints) < tests:
                notes.append(f"{tests - len(hints)} not run")
            if hints and calls & self.lent:
                notes.append(f"tested with a right {' and '.join(sorted(calls & self.lent))}")
            if "" in hints and function not in own:
                notes.append("not written in this file")
            if hints and function in own and function in given:
                if ast.unparse(own[function]) == ast.unparse(given[function]):
                    notes.append("word for word as in gspo.py")
            if any(hints):
                for earlier in failed:
                    shared = [name for name in sorted(calls & called[earlier]) if name.startswith("_")]
                    if shared:
                        notes.append(f"perhaps {earlier}'s mistake: both call {', '.join(shared)}")
                        break
                notes.append(next(filter(None, hints)))
                failed += [function] if function in own else []
            write(f"{function:18}{hints.count(''):4} of {tests:3}   {'; '.join(notes)}".rstrip())
        write(f"{'total':18}{list(self.hints.values()).count(''):4} of {len(self.tests):3}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # below pytest's own list of failures
    def pytest_terminal_summary(self, terminalreporter):
        yield
        terminalreporter.section(f"grade of {PATH.name}: tests passed, and what to look at first")
        self.show(terminalreporter.line)

    def give_up(self):
        """Runs in a thread of its own, as the file's does not come back."""
        self.capture.suspend_global_capture(in_=True)
        where = "outside of its functions"
        if self.module:
            print()
            self.show(print)
            where = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2]
        print(f"{PATH.name} has not ended after {SECONDS} seconds, an endless loop? ({where})", flush=True)
        os._exit(2)

    def pytest_enter_pdb(self):
        self.timer.cancel()        # a debugger may take its time


@pytest.fixture(scope="session", autouse=True)
def under_test(request):
    """Loads the file under test, and grades it where one is given."""
    grade = Grade(request)
    try:
        if GRADING:
            sys.modules["gspo"] = None  # from here on, import gspo is an error
            grade.timer.start()
        grade.module = load(PATH)
        gspo.functions = dict(vars(grade.module))
        if GRADING:
            request.config.pluginmanager.register(grade)
        yield
    finally:
        grade.timer.cancel()


NAN, INF = float("nan"), float("inf")


# ---- how a test speaks --------------------------------------------------------------------------------------


def fail(hint, *details):
    pytest.fail("\n  ".join([hint, *details]), pytrace=False)


def check(got, expected, hint, tolerance=1e-5):
    """Each element of got is within tolerance * (1 + |expected|) of expected, or the test fails with the hint."""
    if not isinstance(got, torch.Tensor):
        fail(hint, f"got {got!r}, expected a tensor")
    got, expected = got.detach().double(), torch.as_tensor(expected, dtype=torch.float64)
    if got.shape != expected.shape:
        fail(f"a result of shape {tuple(expected.shape)}, not {tuple(got.shape)}", f"got      {got.tolist()}",
             f"expected {expected.tolist()}")
    if not bool(((got - expected).abs() <= tolerance * (1 + expected.abs())).all()):
        fail(hint, f"got      {got.tolist()}", f"expected {expected.tolist()}")


def check_float32(got, hint):
    if got.dtype not in (torch.float32, torch.float64):
        fail(hint, f"got {got.dtype}, expected torch.float32 (or torch.float64)")


def refuses(hint, function, *arguments, names=()):
    """The call raises a ValueError whose message holds `names`, or the test fails with the hint."""
    try:
        result, error = function(*arguments), None
    except Exception as raised:
        error = raised
    if error is None:
        fail(f"{hint}: this must raise ValueError", f"got {result}")
    if not isinstance(error, ValueError):
        fail(f"{hint}: check it yourself and raise ValueError", f"got {type(error).__name__}: {error}")
    missing = [str(name) for name in names if str(name) not in str(error)]
    if missing:
        fail(f"{hint}: name the shapes in the message", f"got {error}",
             f"expected it to hold {', '.join(missing)}")


def gradient_of(value, x):
    """d value.sum() / d x, or the test fails because there is none."""
    gradient = torch.autograd.grad(value.sum(), x, allow_unused=True)[0] if value.requires_grad else None
    if gradient is None:
        fail("no gradient comes through: is something detached that should not be?")
    return gradient


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
    """A batch with responses of 0 to 9 tokens, holes in the mask, ratios on both sides of RANGE, junk in the
    padding."""
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
    """The loss and its gradient with respect to log_probs."""
    new = new.detach().clone().requires_grad_()
    value = loss(new, old, advantages, mask, *arguments, **keywords)
    if not isinstance(value, torch.Tensor) or value.shape != ():
        fail("a loss is a scalar tensor", f"got {getattr(value, 'shape', value)}")
    return value, gradient_of(value, new)


# ---- group_advantages ---------------------------------------------------------------------------------------


class TestGroupAdvantages:
    def test_is_the_reward_minus_the_mean_over_the_standard_deviation(self):
        """.8 .4 .6: mean .6, deviations .2 -.2 0, sample variance (.04 + .04) / (3 - 1) = .04, standard
        deviation .2."""
        got = gspo.group_advantages(torch.tensor([0.8, 0.4, 0.6]), 3, std_eps=0.0)
        check(got, [1, -1, 0],
              "Eq. 6: (reward - mean) / standard deviation, the sample one with n - 1 (torch's default)")

    def test_looks_at_each_group_on_its_own(self):
        """The second group's rewards are the first's times 10 plus 100, and so its advantages are the
        same."""
        got = gspo.group_advantages(torch.tensor([0.8, 0.4, 0.6, 108.0, 104.0, 106.0]), 3, std_eps=0.0)
        check(got, [1, -1, 0] * 2, "mean and standard deviation of each group of neighbours, not of the batch")

    def test_adds_std_eps_to_the_standard_deviation(self):
        """0 and .0002: mean .0001, standard deviation .0001 * sqrt 2, and so .0001 / (.0001 * sqrt 2 + .0001)
        = .41421."""
        got = gspo.group_advantages(torch.tensor([0.0, 0.0002]), 2)
        check(got, [-0.41421356, 0.41421356], "divide by (standard deviation + std_eps), std_eps 1e-4 by default",
              1e-3)
        got = gspo.group_advantages(torch.tensor([0.0, 2.0]), 2, std_eps=1.0)
        check(got, [-0.41421356, 0.41421356], "std_eps is an argument, added to the standard deviation itself")

    def test_computes_in_float32_at_least(self):
        rewards = torch.tensor([0.8, 0.4, 0.6, 0.5], dtype=torch.bfloat16)
        got = gspo.group_advantages(rewards, 4)
        check_float32(got, "bfloat16 rewards: compute in float32")
        exact = rewards.double()
        check(got, (exact - exact.mean()) / (exact.std() + 1e-4), "bfloat16 rewards: convert to float32 first")
        got = gspo.group_advantages(torch.tensor([1, 0, 0, 1]), 4)
        check(got, torch.tensor([1.0, -1, -1, 1]) * 0.5 / (1 / 3**0.5 + 1e-4),
              "integer rewards: convert to float32")

    def test_is_exactly_zero_in_a_group_of_equal_rewards(self):
        rewards = [0.0, 0.1, 0.3, 1 / 3, -0.7, 1e6]
        for reward, dtype, group_size in itertools.product(rewards, (torch.float32, torch.float64), (3, 7, 8)):
            two_groups = torch.cat([torch.full((group_size,), reward, dtype=dtype), torch.arange(group_size)])
            got = gspo.group_advantages(two_groups, group_size)[:group_size]
            if not bool((got == 0).all()):
                fail("equal rewards give exactly 0: a mean that rounds, divided by a tiny deviation, is noise",
                     f"got {got.tolist()}")

    def test_refuses_a_group_size_below_2_or_one_that_does_not_divide(self):
        for group_size in (-2, 0, 1, 3, 16):
            refuses(f"group_size {group_size}, 8 rewards", gspo.group_advantages, torch.rand(8), group_size)

    def test_refuses_a_reward_that_is_not_finite(self):
        for bad in (NAN, INF, -INF):
            refuses(f"a reward of {bad}", gspo.group_advantages, torch.tensor([0.0, 1.0, bad, 1.0]), 2)


# ---- token_log_probs ----------------------------------------------------------------------------------------


class TestTokenLogProbs:
    LOGITS = torch.tensor([[[1.0, 2.0, 5.0], [4.0, 2.0, 2.0]]]).log()  # (1, 2, 3): weights 1 2 5 of 8, and 4 2 2

    def test_is_the_log_of_the_tokens_probability(self):
        """Token 1 of the weights 1 2 5 has probability 2/8, token 0 of 4 2 2 has 4/8."""
        got = gspo.token_log_probs(self.LOGITS, torch.tensor([[1, 0]]))
        check(got, torch.tensor([[2 / 8, 4 / 8]]).log(),
              "log softmax over V, taken at each token; logits[:, t] already "
                                                         "predict tokens[:, t], so nothing is shifted here")

    def test_divides_the_logits_by_the_temperature(self):
        """At temperature 1/2 the weights are squared: 1 4 25 of 30, 16 4 4 of 24."""
        got = gspo.token_log_probs(self.LOGITS, torch.tensor([[1, 0]]), 0.5)
        check(got, torch.tensor([[4 / 30, 16 / 24]]).log(),
              "softmax of logits / temperature: the policy is what sampled")

    def test_is_float32_from_bfloat16(self):
        logits = torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
        tokens = torch.tensor([[0, 7, 499], [3, 3, 100]])
        got = gspo.token_log_probs(logits, tokens)
        check_float32(got, "float32 out, whatever comes in")
        expected = logits.double().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        check(got, expected, "bfloat16 logits: convert to float32 before the softmax, not after")

    def test_survives_large_and_infinite_logits(self):
        logits = torch.tensor([[[200.0, 0.0, -INF], [-200.0, -200.0, -INF]]])  # float32 exp ends at 88
        got = gspo.token_log_probs(logits, torch.tensor([[0, 1]]))
        check(got, [[0, math.log(0.5)]], "large logits: log_softmax (or logsumexp), never the log of a softmax")
        got = gspo.token_log_probs(logits, torch.tensor([[1, 0]]))
        check(got, [[-200, math.log(0.5)]],
              "unlikely tokens: log_softmax (or logsumexp), never the log of a softmax")

    def test_carries_the_gradient_of_the_logits(self):
        """d log softmax(z)[y] / d z = onehot(y) - softmax(z)."""
        logits = self.LOGITS.clone().requires_grad_()
        gradient = gradient_of(gspo.token_log_probs(logits, torch.tensor([[1, 0]])), logits)
        check(gradient, [[[-1 / 8, 6 / 8, -5 / 8], [4 / 8, -2 / 8, -2 / 8]]], "the gradient must reach the logits")

    def test_refuses_shapes_that_do_not_fit(self):
        refuses("logits (2, 5, 9) with tokens (2, 7)", gspo.token_log_probs, torch.rand(2, 5, 9),
                torch.zeros(2, 7, dtype=torch.long), names=(5, 7))
        refuses("logits (2, 5, 9) with tokens (1, 5): never broadcast", gspo.token_log_probs, torch.rand(2, 5, 9),
                torch.zeros(1, 5, dtype=torch.long), names=(2, 5))


# ---- sequence_ratio -----------------------------------------------------------------------------------------


class TestSequenceRatio:
    def test_of_a_doubled_probability_is_the_root_of_2(self):
        """Four tokens, one of them twice as likely as before: the response is too, and s = 2^(1/4) = 1.189,
        not 2."""
        new = torch.tensor([[2.0, 1.0, 1.0, 1.0]]).log()
        got = gspo.sequence_ratio(new, torch.zeros(1, 4), torch.ones(1, 4))
        check(got, [2 ** 0.25],
              "Eq. 7: the power 1/|y|, a geometric mean (not the product, not the arithmetic mean 1.25)")

    def test_of_the_example(self):
        got = gspo.sequence_ratio(*example(), MASK)[:4]
        check(got, SEQUENCE_RATIOS,
              "Eq. 7: exp of the mean log ratio over the response's own tokens; |y| counts mask, not T")

    def test_of_a_response_without_tokens_is_1(self):
        got = gspo.sequence_ratio(*example(), MASK)[4:]
        check(got, [1], "a response without tokens: s = exp(0) = 1, not NaN (0 / 0)")

    @pytest.mark.parametrize("padding", [7.0, NAN, -INF, INF])
    def test_does_not_see_the_padding(self, padding):
        got = gspo.sequence_ratio(*example(padding), MASK)[:4]
        check(got, SEQUENCE_RATIOS,
              f"padding of {padding} must not matter: NaN * 0 is NaN, so fill it, do not multiply")

    def test_takes_masks_of_any_kind_and_with_holes(self):
        """Without its second token the first response has one token of ratio 4; without its first the third
        has 1 * 1."""
        mask = MASK.clone()
        mask[0, 1] = mask[2, 0] = False
        for kind in (torch.bool, torch.long, torch.float32):
            got = gspo.sequence_ratio(*example(), mask.to(kind))[:4]
            check(got, [4, 1 / 2, 1, 1 / 2],
                  f"tokens count where the mask is 1, anywhere in the row (mask of {kind})")

    def test_has_the_gradient_s_over_length_on_every_token(self):
        new, old = example(NAN)
        new.requires_grad_()
        got = gradient_of(gspo.sequence_ratio(new, old, MASK), new)
        expected = torch.tensor([s / n for s, n in zip([*SEQUENCE_RATIOS, 1], [2, 4, 3, 2, 1])])[:, None] * MASK
        check(got, expected, "ds/dlog_prob = s / |y| on the response's tokens and 0 on padding, NaN there or not")

    def test_gives_the_old_log_probs_no_gradient(self):
        new, old = (x.requires_grad_() for x in example())
        gspo.sequence_ratio(new, old, MASK).sum().backward()
        if old.grad is not None and bool((old.grad != 0).any()):
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
    # (ratio, advantage, min(r A, clip(r, 0.8, 1.5) A), its derivative by r, what to look at)
    TABLE = [(1.2, 1.0, 1.2, 1, "within the range: r A"),
             (0.5, 1.0, 0.5, 1, "the min of 0.5 and 0.8 (0.8 is the max, or the clip without the min)"),
             (2.0, 1.0, 1.5, 0, "the clip holds at 1 + eps_high (1.2: the two eps are swapped; 2: no clip)"),
             (1.2, -1.0, -1.2, -1, "within the range: r A"),
             (2.0, -1.0, -2.0, -1, "the min of -2 and -1.5 (-1.5 is the max, or the clip without the min)"),
             (0.5, -1.0, -0.8, 0, "the clip holds at 1 - eps_low (-0.5: no clip on this side)"),
             (2.0, 0.0, 0.0, 0, "no advantage, no objective")]

    @pytest.mark.parametrize("ratio, advantage, value, slope, look_at", TABLE)
    def test_is_the_smaller_of_the_clipped_and_the_unclipped(self, ratio, advantage, value, slope, look_at):
        r = torch.tensor([ratio], requires_grad=True)
        got = gspo.clipped_objective(r, torch.tensor([advantage]), *RANGE)
        hint = f"min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = {ratio}, A = {advantage}: {look_at}"
        check(got, [value], hint)
        check(gradient_of(got, r), [slope],
              f"{hint}: its slope is A where the min takes r A, and 0 where the clip holds")

    def test_is_elementwise(self):
        ratio, advantage, value = (torch.tensor(x) for x in list(zip(*self.TABLE))[:3])
        got = gspo.clipped_objective(ratio[:6].view(2, 3), advantage[:6].view(2, 3), *RANGE)
        check(got, value[:6].view(2, 3), "each element on its own, any shape")

    def test_computes_in_float32_at_least(self):
        got = gspo.clipped_objective(torch.ones(1).bfloat16() * 2, torch.ones(1).bfloat16(), 3e-4, 4e-4)
        check(got, [1.0004], "bfloat16 rounds 1 + 4e-4 to 1: compute in float32", 1e-6)


# ---- the losses ---------------------------------------------------------------------------------------------


class LossContract:
    """What every loss promises, from one response to the batch. The subclasses below name the loss and the
    objectives of the example's responses, and write its equation out by hand."""

    def one_response(self, i, padding=()):
        """(new, old, advantage, mask) of the example's response i alone, `padding` behind its tokens."""
        new, old = (torch.cat([x[i, :LENGTHS[i]], torch.tensor(padding)])[None] for x in example())
        return new, old, ADVANTAGES[i:i + 1], torch.arange(new.size(1))[None] < LENGTHS[i]

    def test_of_one_response(self):
        for i in range(4):
            value, _ = value_and_gradient(self.loss, *self.one_response(i), *RANGE)
            check(value, -self.objectives[i], f"{self.value_hint} ({self.about(i)})")

    def test_of_one_response_has_the_papers_gradient(self):
        for i in range(4):
            new, old, advantages, mask = self.one_response(i)
            _, gradient = value_and_gradient(self.loss, new, old, advantages, mask, *RANGE)
            expected = self.by_hand(new, old, advantages[:, None].expand(mask.shape), mask)[1]
            check(gradient, expected, f"{self.gradient_hint} ({self.about(i)})")

    def about(self, i):
        return f"one response, token ratios {RATIOS[i][:LENGTHS[i]]}, A = {ADVANTAGES[i]:g}, range 0.8 to 1.5"

    def test_gives_the_old_log_probs_no_gradient(self):
        new, old = (x.requires_grad_() for x in example())
        self.loss(new, old, ADVANTAGES, MASK, *RANGE).backward()
        if old.grad is not None and bool((old.grad != 0).any()):
            fail("old_log_probs never gets a gradient: detach it", f"got {old.grad.tolist()}")

    def test_does_not_depend_on_the_padded_length(self):
        for i in range(4):
            value, _ = value_and_gradient(self.loss, *self.one_response(i, padding=[0.0] * 6), *RANGE)
            check(value, -self.objectives[i],
                  "six more columns of padding change nothing: divide by |y| (the mask's sum), not by T")

    @pytest.mark.parametrize("padding", [7.0, NAN, -INF])
    def test_does_not_see_the_padding(self, padding):
        value, gradient = value_and_gradient(self.loss, *self.one_response(0, padding=[padding] * 2), *RANGE)
        hint = f"padding of {padding} must not matter: NaN * 0 is NaN, so fill it, do not multiply"
        check(value, -self.objectives[0], hint)
        check(gradient[0, 2:], [0, 0], f"{hint} (the gradient, here)")

    def test_of_the_example(self):
        value, _ = value_and_gradient(self.loss, *(x[:4] for x in (*example(), ADVANTAGES, MASK)), *RANGE)
        check(value, -sum(self.objectives) / 4,
              "four responses: their mean, each counts alike (not the sum, not the mean over all tokens)")

    def test_counts_a_response_without_tokens_as_0(self):
        value, gradient = value_and_gradient(self.loss, *example(), ADVANTAGES, MASK, *RANGE)
        check(value, -sum(self.objectives) / 5,
              "a response without tokens has value 0 (not s A = A, not NaN), and counts in the mean over 5")
        check(gradient[4], [0] * 4, "a response without tokens has gradient 0, not NaN")
        value, gradient = value_and_gradient(self.loss, *example(NAN), ADVANTAGES, torch.zeros(5, 4), *RANGE)
        check(value, 0, "no response with tokens: the value is 0, not NaN (0 / 0)")
        check(gradient, torch.zeros(5, 4), "no response with tokens: the gradient is 0, not NaN")

    def test_with_unchanged_log_probs_is_minus_the_mean_advantage(self):
        """Every ratio is 1. (1 - 1 - 2 + 3 + 0) / 5 = 1/5: the fifth response has no tokens, and counts in
        the mean."""
        old = example()[1]
        value, gradient = value_and_gradient(self.loss, old, old, ADVANTAGES, MASK)
        check(value, -1 / 5, "ratios of 1: minus the mean over responses of the advantages, an empty one's 0")
        expected = [[-a / n / 5 if t < n else 0 for t in range(4)] for a, n in zip(ADVANTAGES.tolist(), LENGTHS)]
        check(gradient, expected,
              "ratios of 1: the gradient is REINFORCE's, -A / |y| / B on each token of a response")

    @pytest.mark.parametrize("seed", range(4))
    def test_equals_the_paper_by_hand(self, seed):
        for padding in (0.0, NAN, -INF):
            new, old, advantages, mask = random_batch(seed, padding=padding)
            value, gradient = value_and_gradient(self.loss, new, old, advantages[:, 0], mask, *RANGE)
            by_hand = self.by_hand(new, old, advantages[:, :1].expand(mask.shape), mask)
            check(value, by_hand[0], f"{self.value_hint} (12 responses, padding holds {padding})")
            check(gradient, by_hand[1], f"{self.gradient_hint} (12 responses, padding holds {padding})")

    def test_has_its_own_clip_range_by_default(self):
        """Ratios just beyond the default range, on the side where the clip holds, have no gradient; just
        within, they have."""
        low, high = self.default_range
        for ratio, sign in ((1 + high, 1.0), (1 - low, -1.0)):
            for factor, holds in ((1.05, True), (0.95, False)):
                new = torch.full((1, 3), math.log(1 + factor * (ratio - 1)), dtype=torch.float64)
                _, gradient = value_and_gradient(self.loss, new, torch.zeros(1, 3), torch.tensor([sign]),
                                                 torch.ones(1, 3))
                if bool((gradient == 0).all()) != holds:
                    fail(f"default clip range: eps_low {low}, eps_high {high}",
                         f"ratio {1 + factor * (ratio - 1):.6f}, advantage {sign}: the gradient is {gradient.tolist()}")

    def test_divides_by_the_denominator(self):
        new, old, advantages, mask = random_batch()
        whole = value_and_gradient(self.loss, new, old, advantages[:, 0], mask, *RANGE)
        for denominator in (12, 48, 3):
            value, gradient = value_and_gradient(self.loss, new, old, advantages[:, 0], mask, *RANGE,
                                                 denominator=denominator)
            check(value, whole[0].detach() * 12 / denominator,
                  f"a sum over responses / denominator (here {denominator})")
            check(gradient, whole[1] * 12 / denominator,
                  f"the gradient divides by the denominator too (here {denominator})")

    def test_adds_up_over_micro_batches(self):
        new, old, advantages, mask = random_batch()
        whole, gradient = value_and_gradient(self.loss, new, old, advantages[:, 0], mask, *RANGE)
        parts = [value_and_gradient(self.loss, new[i], old[i], advantages[i, 0], mask[i], *RANGE, denominator=12)
                 for i in torch.arange(12).split([1, 2, 3, 6])]
        check(sum(p[0] for p in parts), whole.detach(),
              "micro-batches with one denominator must add up to the whole batch")
        check(torch.cat([p[1] for p in parts]), gradient,
              "micro-batches with one denominator: so must their gradients")

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
            refuses(f"log_probs, old_log_probs, advantages, mask of {[tuple(x.shape) for x in arguments]}",
                    self.loss,
                    *arguments, names=names)


class PerTokenContract(LossContract):
    """And what the losses promise that take (B, T) advantages."""

    @pytest.mark.parametrize("seed", range(4))
    def test_takes_an_advantage_for_each_token(self, seed):
        new, old, advantages, mask = random_batch(seed)
        value, gradient = value_and_gradient(self.loss, new, old, advantages.masked_fill(~mask, NAN), mask, *RANGE)
        by_hand = self.by_hand(new, old, advantages, mask)
        check(value, by_hand[0], f"{self.value_hint} ((B, T) advantages, NaN in their padding)")
        check(gradient, by_hand[1], f"{self.gradient_hint} ((B, T) advantages, NaN in their padding)")


def log_ratios_of(new, old, mask):
    """For each response a list of (t, log pi_new / pi_old)."""
    difference = (new - old).tolist()
    return [[(t, x) for t, x in enumerate(row) if mask[i, t]] for i, row in enumerate(difference)]


def clip(ratio):
    return min(max(ratio, 1 - RANGE[0]), 1 + RANGE[1])


def is_clipped(ratio, advantage):
    return (advantage > 0 and ratio > 1 + RANGE[1]) or (advantage < 0 and ratio < 1 - RANGE[0])


class TestGspoLoss(LossContract):
    """s = 2, 1/2, 2, 1/2, clipped where the min says so: 1.5 * 1, 0.8 * -1, 2 * -2, 1/2 * 3."""
    loss = staticmethod(lambda *a, **k: gspo.gspo_loss(*a, **k))
    default_range, objectives = (3e-4, 4e-4), [1.5, -0.8, -4, 1.5]
    value_hint = "Eq. 5, minus min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)"
    gradient_hint = "gradient: Eq. 10, every token weighs s A / |y|, or nothing where the clip holds"

    @staticmethod
    def by_hand(new, old, advantages, mask):
        """Eq. 5, and Eq. 10: the gradient of log pi(y_t) weighs s_i A_i / |y_i|, or nothing where the clip
        holds."""
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
    default_range, objectives = TestGspoLoss.default_range, TestGspoLoss.objectives
    value_hint = "Eq. 13, minus the mean over tokens of min(s_t A_t, clip(s_t) A_t); each s_t is worth s_i"
    gradient_hint = ("gradient: Eq. 17, token t weighs s_i A_t / |y|; look at Eq. 14's stop-gradients: twice "
                     "that where s_i is not detached, 0 where the pi above the fraction line is")

    @staticmethod
    def by_hand(new, old, advantages, mask):
        """Eq. 13, and Eq. 17: the gradient of log pi(y_t) weighs s_i A_{i,t} / |y_i|, or nothing where the
        clip holds."""
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
        sequence = TestGspoLoss.by_hand(new, old, advantages, mask)
        for a in (advantages[:, 0], advantages[:, :1].expand(mask.shape)):
            value, gradient = value_and_gradient(gspo.gspo_token_loss, new, old, a, mask, *RANGE)
            check(value, sequence[0], "equal advantages: GSPO-token's value is GSPO's")
            check(gradient, sequence[1],
                  "equal advantages: GSPO-token's gradient is GSPO's (twice it: a stop-gradient is missing)")

    def test_clips_one_sign_of_a_response_and_not_the_other(self):
        """s = 2 in a range up to 1.5: the token of A = 1 is clipped to 1.5, that of A = -1 keeps -2. -(1.5 -
        2) / 2 = 0.25."""
        new = torch.tensor([[4.0, 1.0]]).log()
        value, gradient = value_and_gradient(gspo.gspo_token_loss, new, torch.zeros(1, 2),
                                             torch.tensor([[1.0, -1.0]]),
                                             torch.ones(1, 2), *RANGE)
        check(value, 0.25, "each token's own advantage decides whether the clip holds for it")
        check(gradient, [[0, 1.0]],
              "only the second token keeps its gradient, s A / |y| = 2 * 1 / 2, and it is its own alone")


class TestGrpoLoss(PerTokenContract):
    """Means over tokens: (1.5 + 1) / 2 = 1.25; (-.8 - 1 - .8 - 1) / 4 = -.9; (-16 - 2 - 2) / 3 = -20/3; (.75
    + 3) / 2 = 1.875."""
    loss = staticmethod(lambda *a, **k: gspo.grpo_loss(*a, **k))
    default_range, objectives = (0.2, 0.27), [1.25, -0.9, -20 / 3, 1.875]
    value_hint = "Eq. 2, minus the mean over tokens of min(w_t A, clip(w_t) A), each token by its own ratio"
    gradient_hint = "gradient: Eq. 12, token t weighs its own w_t A / |y|, or nothing where the clip holds"

    @staticmethod
    def by_hand(new, old, advantages, mask):
        """Eq. 2, and Eq. 12: the gradient of log pi(y_t) weighs w_{i,t} A_{i,t} / |y_i|, or nothing where the
        clip holds."""
        value, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
        for i, tokens in enumerate(log_ratios_of(new, old, mask)):
            for t, x in tokens:
                a, w = advantages[i, t].item(), math.exp(x)
                value -= min(w * a, clip(w) * a) / len(tokens) / len(mask)
                gradient[i, t] = 0 if is_clipped(w, a) else -w * a / len(tokens) / len(mask)
        return value, gradient


# ---- what a graded file's losses call in place of its own function once that has failed a test --------------


def right_sequence_ratio(log_probs, old_log_probs, mask):
    """Eq. 7, response by response."""
    if not log_probs.shape == old_log_probs.shape == mask.shape:
        raise ValueError(f"shapes do not fit: {log_probs.shape}, {old_log_probs.shape}, {mask.shape}")
    rows = zip(log_probs.double(), old_log_probs.detach().double(), mask.bool())
    return torch.stack([((new[m] - old[m]).sum() / max(m.sum(), 1)).exp() for new, old, m in rows])


def right_clipped_objective(ratio, advantages, eps_low, eps_high):
    """The clip holds above where A > 0, below where A < 0."""
    ratio, advantages = ratio.double(), advantages.double()
    clipped = torch.where(advantages > 0, ratio.clamp(max=1 + eps_high), ratio.clamp(min=1 - eps_low))
    return clipped * advantages


RIGHT = {"sequence_ratio": right_sequence_ratio, "clipped_objective": right_clipped_objective}


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
        """Ratios 1.4 and 0.7 in a range of 0.8 to 1.5: only the second is out. In 0.5 to 1.3: only the
        first."""
        ratio, advantages = torch.tensor([1.4, 0.7]), torch.tensor([1.0, -1.0])
        mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
        check(gspo.clip_fraction(ratio, advantages, mask, 0.2, 0.5), 1 / 4, "eps_low is below 1, eps_high above")
        check(gspo.clip_fraction(ratio, advantages, mask, 0.5, 0.3), 3 / 4, "eps_low is below 1, eps_high above")

    def test_of_no_tokens_is_zero(self):
        got = gspo.clip_fraction(self.SEQUENCE, ADVANTAGES, torch.zeros(5, 4), *RANGE)
        check(got, 0, "no tokens: 0, not NaN (0 / 0)")

    def test_refuses_shapes_that_do_not_fit(self):
        mask, adv = torch.zeros(2, 5), torch.zeros(2)
        refuses("ratio (3,) with mask (2, 5)", gspo.clip_fraction, torch.zeros(3), adv, mask, 0.1, 0.1,
                names=(3, 5))
        refuses("ratio (2, 7) with mask (2, 5)", gspo.clip_fraction, torch.zeros(2, 7), adv, mask, 0.1, 0.1,
                names=(7, 5))
        refuses("advantages (5,) with mask (2, 5)", gspo.clip_fraction, adv, torch.zeros(5), mask, 0.1, 0.1,
                names=(2, 5))


# ---- train_math.py: everything below is left out when a student's file is graded --------------------------------


@pytest.fixture(scope="module")
def tm():
    import train_math
    torch.set_num_threads(1)      # models this small are slower on several
    return train_math


@pytest.fixture(scope="module")
def cold():
    from experiments import cold_start
    return cold_start


@pytest.fixture(scope="module")
def tiny(cold):
    """(model, tokenizer): the tiny model, its weights made larger so that its distribution is far from
    flat."""
    tokenizer = cold.tiny_tokenizer()
    model = cold.tiny_model(tokenizer, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model, tokenizer


def parity_reward(prompts, completions, answer):
    """A reward that an untrained model gets half of the time, so that there is something to update on."""
    return [float(sum(c.isdigit() for c in text) % 2) for text in completions]


@pytest.fixture(scope="module")
def world(tm, cold, tmp_path_factory):
    """(model folder, questions' file): the world of --tiny without its cold start."""
    folder = tmp_path_factory.mktemp("world") / "tiny_world-0"
    tokenizer = cold.tiny_tokenizer()
    cold.save_world(folder, cold.tiny_model(tokenizer, seed=0), tokenizer, cold.tiny_questions(0)[:60])
    return str(folder / "model"), str(folder / "questions.jsonl")


@pytest.fixture
def untrained(tm, cold, world, monkeypatch):
    monkeypatch.setattr(cold, "tiny_world", lambda seed: world)
    monkeypatch.setattr(tm, "draw", lambda rows, path, eps_high: path.write_text("fast"))


@pytest.fixture
def parity(tm, untrained, monkeypatch):
    monkeypatch.setattr(tm, "correctness_reward", parity_reward)


@pytest.fixture(autouse=True)
def default_ctrl_c():
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


FAST = ["--max_steps", "6", "--save_steps", "2", "--eval_size", "4", "--prompts_per_step", "4",
        "--group_size", "4", "--max_completion_length", "6", "--learning_rate", "1e-3"]


def run(tm, output_dir, *flags, stop=lambda: False):
    """A few steps of the tiny run. Returns the settings and the rows of metrics."""
    s = tm.parse_settings(["--tiny", "--output_dir", str(output_dir), *FAST, *flags])
    try:
        return s, tm.train(s, **tm.prepare(s), stop=stop)
    finally:
        s.lock.lock.release()


@pytest.fixture(scope="module")
def whole(tm, cold, world, tmp_path_factory):
    """(folder, rows) of a run that nothing interrupts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold, "tiny_world", lambda seed: world)
        patch.setattr(tm, "correctness_reward", parity_reward)
        folder = tmp_path_factory.mktemp("runs") / "whole"
        return folder, run(tm, folder)[1]


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_clocks(rows):
    return [{k: v for k, v in row.items() if not re.match("seconds|peak_memory", k)} for row in rows]


def same(whole, folder):
    """Asserts that the run in this folder equals one that was never interrupted: log, weights, optimizer."""
    expected, rows = (without_clocks(read(f / "metrics.jsonl")) for f in (whole[0], folder))
    assert rows == expected
    before, after = (torch.load(f / "state.pt") for f in (whole[0], folder))
    assert without_clocks(after["rows"]) == without_clocks(before["rows"])
    for a, b in zip(before["optimizer"]["state"].values(), after["optimizer"]["state"].values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (whole[0], folder)]
    assert weights[0] == weights[1] and all(torch.equal(before["model"][n], p) for n, p in after["model"].items())


def exits(script, *flags):
    """The one line with which the script refuses these flags."""
    with pytest.raises(SystemExit) as stop:
        script.main([*flags])
    line = stop.value.code
    assert isinstance(line, str) and "\n" not in line.strip(), f"not one line: {line!r}"
    del stop
    gc.collect()                  # the traceback holds the lock of the output_dir
    return line


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


class TestOwnErrors:
    """Errors of this gspo.py that a student's may leave to torch."""
    __test__ = not GRADING

    def test_are_raised_before_a_tensor_is_laid_along_the_wrong_dimension(self):
        for ratio, advantages in ((5, 5), 5), ((2, 5), 5), ((2, 5), 2), (3, 5), ((2, 5), (3, 5)):
            ratio, advantages = torch.ones(ratio), torch.ones(advantages)
            refuses(f"ratio {tuple(ratio.shape)} and advantages {tuple(advantages.shape)}", gspo.clipped_objective,
                    ratio, advantages, *RANGE, names=(*ratio.shape, *advantages.shape))
        refuses("rewards (2, 4)", gspo.group_advantages, torch.rand(2, 4), 4, names=(2, 4))
        one = torch.zeros(5)
        refuses("one dimension", gspo.sequence_ratio, one, one, one, names=(5,))

    @pytest.mark.parametrize("temperature", [0, -1, NAN])
    def test_are_raised_for_a_temperature_that_is_not_above_0(self, temperature):
        refuses(f"temperature {temperature}", gspo.token_log_probs, torch.rand(1, 2, 3),
                torch.zeros(1, 2, dtype=torch.long), temperature)


class TestRewards:
    __test__ = not GRADING

    @pytest.mark.parametrize("text", [
        "####18", "#### 18", "#### $18", "#### **18**", "#### 18.", "#### 18.0", "#### 18.00.", "#### +18",
        "#### 018", "#### 18 dollars", "#### 18%", "####   18\n", "#### $ 18", "#### 17\nNo.\n#### 18",
        "#### 18, I think",
        "#### 18=9*2",
        "3 * 6 = 18\n#### **$18.00**", "#### 18eggs"])
    def test_reads_18(self, tm, text):
        assert tm.extract_answer(text) == "18"

    @pytest.mark.parametrize("text", [
        "", "18", "#### 1 8", "#### ", "####", "#### x 18", "#### 18\n####", "#### 18/2", "#### 1,8", "#### 18.5",
        "#### -18", "#### 118", "#### 180", "### 18", "#### 18:30", "#### 1.18.2"])
    def test_does_not_read_18(self, tm, text):
        assert tm.extract_answer(text) != "18"

    @pytest.mark.parametrize("text, answer", [
        ("#### $1,234.50", "1234.5"), ("#### -5", "-5"), ("#### −5", "-5"), ("#### -$5", "-5"), ("#### $-5", "-5"),
        ("#### 1,000,000", "1000000"), ("#### .5", "0.5"), ("#### 0", "0"), ("#### -0.0", "0"),
        ("#### 0.10", "0.1"),
        ("#### 100", "100"), ("#### 12345678901234567890", "12345678901234567890")])
    def test_gives_one_canonical_number(self, tm, text, answer):
        assert tm.extract_answer(text) == answer

    @pytest.mark.parametrize("text, answer", [
        ("3 and 4", "4"), ("it is $1,200.", "1200"), ("#### 5, not 6", "6"), ("none", None), ("5-3=2", "2"),
        ("20-18", "18"), ("x = -18", "-18"), ("so 18.", "18"), ("it is...18", "18"), ("-$5", "-5"), (".5", "0.5"),
        ("a,18", "18"), ("", None), ("1,234 and 5.60 %", "5.6")])
    def test_takes_the_last_number_when_not_strict(self, tm, text, answer):
        assert tm.extract_answer(text, strict=False) == answer

    @pytest.mark.parametrize("piece", [
        "1", "1,", "111,", "#", "####", "#### ", "-", "$", " ", "*", ".", "1.", "1/", ",111", "−", "+$1"])
    @pytest.mark.parametrize("frame", ["{}", "#### {}", "#### 1{}x", "{}####"])
    def test_reads_a_megabyte_of_anything(self, tm, piece, frame):
        """Not timed: with a quadratic pattern one of these would take hours."""
        text = frame.format(piece * (1_000_000 // len(piece)))
        for strict in (True, False):
            assert tm.extract_answer(text, strict) is None or tm.extract_answer(text, strict)

    def test_have_trls_signature(self, tm):
        chat = [{"role": "assistant", "content": "So #### 42"}]
        completions = ["#### 42", "#### 41", "42", chat, None, [], "#### 4"]
        completions += [[5], [{}], [{"content": None}]]
        arguments = dict(prompts=["?"] * 10, completions=completions, answer=["6 * 7\n#### 42"] * 10, task="maths",
                         step=3)
        assert tm.correctness_reward(**arguments) == [1.0, 0.0, 0.0, 1.0] + [0.0] * 6
        assert tm.format_reward(**arguments) == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0] + [0.0] * 3
        assert tm.correctness_reward(["?"] * 3, ["#### 42"] * 3, ["42", "x", "$42.00"]) == [1.0, 0.0, 1.0]
        assert tm.correctness_reward(["?"] * 3, ["#### 42"] * 3, [42, 42.0, 4]) == [1.0, 1.0, 0.0]


class TestRollout:
    __test__ = not GRADING
    QUESTIONS = ["Eve buys 3 figs?", "How many boxes of 53 figs are there? Ann has 7."]

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_samples_from_the_models_own_distribution(self, tm, tiny, temperature):
        """The first and second tokens of 10,000 responses to each of two prompts of unlike length, against
        exact probabilities."""
        model, tokenizer = tiny
        prompts, n = [tm.encode_prompt(tokenizer, q) for q in self.QUESTIONS], 10_000
        ends = torch.tensor([tokenizer.eos_token_id])
        torch.manual_seed(0)
        responses, _ = tm.rollout(model, prompts, n, 2, temperature, ends)
        words = torch.arange(len(tokenizer))
        for k, prompt in enumerate(prompts):
            with torch.no_grad():
                first = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
                all_second = torch.tensor([prompt + [word] for word in words.tolist()])
                second = (model(all_second).logits[:, -1] / temperature).softmax(-1)
            second = (first[:, None] * second)[words != ends].sum(0)         # of the responses that go on
            for t, exact in enumerate((first, second)):
                drawn = torch.tensor([r[t] for r in responses[k * n:(k + 1) * n] if len(r) > t])
                seen = torch.bincount(drawn, minlength=len(words)) / n
                rare = exact.argsort()[:len(words) // 2]  # taken together: a top_k or top_p would drop them
                for name, p, share in (("a token", exact, seen),
                                       ("the rarer half", exact[rare].sum(), seen[rare].sum())):
                    worst = ((share - p).abs() / (p * (1 - p) / n).sqrt()).max().item()
                    assert worst < 5, f"prompt {k}, position {t}: {name} is {worst:.1f} standard errors off"

    @pytest.mark.parametrize("uniform", [0, 2**-24, 0.5, 1 - 2**-24])  # torch.rand's are multiples of 2^-24
    def test_never_draws_a_token_of_probability_0(self, tm, monkeypatch, uniform):
        monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.full(size, uniform))
        probs = torch.tensor([[0, 0, 1, 0], [0, 0.4, 0.6, 0], [0.1, 0.2, 0.3, 0.4]]).repeat(2, 1)
        probs[3:] *= 1 - 1e-6                                            # as rounding may leave their sum
        drawn = tm.draw_tokens(probs)
        assert drawn.shape == (6, 1) and (probs.gather(1, drawn) > 0).all()
        alone = torch.cat([tm.draw_tokens(row[None]) for row in probs])
        assert torch.equal(alone, drawn), "a row that is the last one left is drawn as among others"

    def test_gives_the_sampler_the_same_log_probs_as_the_update(self, tm, tiny):
        """Responses end at different times and leave the batch; cache, positions and rows must stay in
        step."""
        model, tokenizer = tiny
        prompts = [tm.encode_prompt(tokenizer, q) for q in self.QUESTIONS]
        ends = torch.arange(1, 20)                                       # ends are frequent, so lengths differ
        torch.manual_seed(0)
        responses, sampled = tm.rollout(model, prompts, 16, 12, 0.7, ends)
        lengths = [len(r) for r in responses]
        assert len(set(lengths)) > 4 and all(r[-1] in ends or len(r) == 12 for r in responses)
        assert all(token not in ends for r in responses for token in r[:-1])
        batch = tm.micro_batch([p for p in prompts for _ in range(16)], responses, "cpu")
        log_probs = tm.response_log_probs(model, batch, 0.7)
        for i, n in enumerate(lengths):
            assert torch.allclose(log_probs[i][batch.mask[i]], sampled[i, :n], atol=1e-4)
            assert (sampled[i, n:] == 0).all()

    def test_is_greedy_at_temperature_0(self, tm, tiny):
        model, tokenizer = tiny
        prompt = tm.encode_prompt(tokenizer, self.QUESTIONS[0])
        responses, _ = tm.rollout(model, [prompt], 2, 5, 0.0, torch.tensor([-1]))
        ids = list(prompt)
        for _ in range(5):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert responses == [ids[len(prompt):]] * 2

    def test_reads_each_prompt_once_and_lets_finished_rows_leave(self, tm, tiny, monkeypatch):
        model, tokenizer = tiny
        prompts, shapes, forward = [tm.encode_prompt(tokenizer, q) for q in self.QUESTIONS], [], model.forward
        monkeypatch.setattr(model, "forward", lambda **k: shapes.append(k["input_ids"].shape) or forward(**k))
        torch.manual_seed(0)
        responses, _ = tm.rollout(model, prompts, 8, 12, 1.0, torch.arange(1, 20))
        assert shapes[0] == (2, max(map(len, prompts))), "the prompts are read once, not once a response"
        going = [sum(len(r) >= t + 1 for r in responses) for t in range(1, max(map(len, responses)))]
        assert [tuple(shape) for shape in shapes[1:]] == [(n, 1) for n in going] and going[-1] < 16

    @pytest.mark.parametrize("rows, at_once", [(256, [5]), (8, [2, 2, 1]), (11, [2, 2, 1]), (3, [1] * 5)])
    def test_takes_whole_groups_at_once_in_the_questions_order(self, tm, tiny, monkeypatch, rows, at_once):
        model, tokenizer = tiny
        questions, seen, rollout = [{"question": f"{'Ann ' * n}?"} for n in (3, 1, 5, 2, 4)], [], tm.rollout
        monkeypatch.setattr(tm, "rollout", lambda *a: seen.append(a) or rollout(*a))
        s = types.SimpleNamespace(rollout_rows=rows, max_completion_length=4)
        responses, texts, log_probs = tm.sample(model, tokenizer, questions, 4, 0.0, s)
        assert [len(call[1]) for call in seen] == at_once
        assert len(texts) == len(log_probs) == 20
        for i, row in enumerate(questions):                              # greedy: a group's responses are equal
            alone = rollout(model, [tm.encode_prompt(tokenizer, row["question"])], 4, 4, 0.0, seen[0][5])[0]
            assert responses[4 * i:4 * i + 4] == alone

    def test_ends_at_any_of_the_models_end_tokens(self, tm, tiny, monkeypatch):
        model, tokenizer = tiny
        monkeypatch.setattr(model.generation_config, "eos_token_id", list(range(4, 75)))
        s = types.SimpleNamespace(rollout_rows=64, max_completion_length=30)
        responses, _, _ = tm.sample(model, tokenizer, [{"question": "Ann?"}], 64, 1.0, s)
        assert max(map(len, responses)) < 10 and any(r[-1] != tokenizer.eos_token_id for r in responses)

    def test_asks_through_the_chat_template_where_there_is_one(self, tm, cold):
        def prompt(template):
            tokenizer = cold.tiny_tokenizer()
            tokenizer.chat_template = template or tokenizer.chat_template
            return tokenizer.decode(tm.encode_prompt(tokenizer, "How many?"))

        assert prompt(None) == "How many?\n"
        text = prompt("{% for m in messages %}Q {{ m.content }}{% endfor %}{% if add_generation_prompt %}A"
                      "{% endif %}{% if enable_thinking is false %} now{% endif %}")
        assert text.startswith("Q How many?\n") and text.endswith("A now") and "####" in text
        tokenizer = cold.tiny_tokenizer()
        tokenizer.chat_template = None
        assert tokenizer.decode(tm.encode_prompt(tokenizer, "How many?")) == "How many?\n"


class TestLogProbs:
    __test__ = not GRADING

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("at_once", [None, 250, 1])  # all positions, three, or one of them
    def test_equal_a_step_by_step_brute_force(self, tm, tiny, temperature, at_once):
        """One forward for each token, without padding, against all at once with padding."""
        model, tokenizer = tiny
        prompts = [tm.encode_prompt(tokenizer, q) for q in ("Ann?", "Bob has 3 figs. How many?", "Eve")]
        responses = [tokenizer("3+4=7").input_ids, [tokenizer.eos_token_id], tokenizer("12\n#### 5").input_ids]
        batch = tm.micro_batch(prompts, responses, "cpu")
        got = tm.response_log_probs(model, batch, temperature, at_once)
        assert (got[~batch.mask] == 0).all()
        for i, (prompt, response) in enumerate(zip(prompts, responses)):
            slow = []
            for t, token in enumerate(response):
                logits = model(torch.tensor([prompt + response[:t]])).logits[0, -1]
                slow.append((logits / temperature).log_softmax(-1)[token].item())
            assert torch.allclose(got[i][batch.mask[i]], torch.tensor(slow), atol=1e-5)

    def test_keep_the_end_token_where_it_is_also_the_pad_token(self, tm):
        end = pad = 0
        batch = tm.micro_batch([[5, 6], [5]], [[7, end], [8, 9, 7, end]], "cpu")
        assert batch.ids.tolist() == [[5, 6, 7, end, pad], [5, 8, 9, 7, end]]
        assert batch.mask.tolist() == [[False, True, True, False], [True, True, True, True]]

    def test_give_the_same_gradient_from_micro_batches_of_1_2_and_all(self, tm, tiny, tmp_path):
        """The second group's rewards are equal: it is left out of the forward and counted in the denominator
        all the same."""
        model, tokenizer = tiny
        s = tm.parse_settings(["--tiny", "--minibatches", "1"])
        prompts = [tm.encode_prompt(tokenizer, "Ann has 3?")] * 4 + [tm.encode_prompt(tokenizer, "Bob?")] * 4
        responses = [tokenizer("1" * n).input_ids for n in (1, 7, 2, 5, 3, 3, 4, 6)]
        advantages = gspo.group_advantages(torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1]), 4)
        everything = tm.micro_batch(prompts, responses, "cpu", advantages)

        def gradient(batches):
            model.zero_grad()
            for batch in batches:
                log_probs = tm.response_log_probs(model, batch, 1.0)
                gspo.gspo_loss(log_probs, log_probs.detach() - 1e-4, batch.advantages, batch.mask,
                             denominator=8).backward()
            return torch.cat([p.grad.flatten() for p in model.parameters()])

        expected, counts = gradient([everything]), set()
        for tokens in (1, 40, 10_000):
            s.micro_batch_tokens = tokens
            (batches,) = tm.build_minibatches(prompts, responses, advantages, s)
            assert sum(len(batch.ids) for batch in batches) == 4
            assert all(batch.ids.numel() <= tokens or len(batch.ids) == 1 for batch in batches)
            counts.add(len(batches))
            assert torch.allclose(gradient(batches), expected, atol=1e-6)
        model.zero_grad(set_to_none=True)
        assert counts == {4, 2, 1}


class TestTraining:
    __test__ = not GRADING

    def test_starts_each_rollout_on_policy_and_writes_what_it_promises(self, tm, whole):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        folder, rows = whole
        assert read(folder / "metrics.jsonl") == json.loads(json.dumps(rows))
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
        metrics = {"step", "reward", "accuracy", "format", "response_length", "cut", "equal_reward_groups",
                   "entropy", "loss", "grad_norm", "clip_fraction", "log_ratio_first_max", "log_ratio_std",
                   "seconds", "seconds_rollout", "seconds_old_log_probs", "seconds_update"}
        evaluation = {"eval_questions", "eval_format", "eval_flexible", "eval_flexible_interval", "eval_strict",
                      "eval_strict_interval", "eval_samples"}
        assert set(rows[0]) == {"step"} | evaluation
        assert all(set(row) == metrics | (evaluation if row["step"] % 2 == 0 else set()) for row in rows[1:])
        assert all(row["log_ratio_first_max"] == 0 for row in rows[1:]), "the first minibatch is on-policy"
        assert all(row["log_ratio_std"] > 0 and row["grad_norm"] > 0 for row in rows[1:])
        assert max(row["clip_fraction"] for row in rows[1:]) > 0
        names = {path.name for path in folder.iterdir()}
        assert names == {"settings.json", "metrics.jsonl", "metrics.png", "model", "state.pt", "lock"}
        assert (folder / "metrics.png").read_bytes()[1:4] == b"PNG"
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        assert len(tokenizer) == model.config.vocab_size and tokenizer.chat_template
        state = torch.load(folder / "state.pt")["model"]
        assert all(torch.equal(p, state[name]) for name, p in model.state_dict().items())

    def test_measures_what_the_names_of_the_metrics_say(self, tm, parity, tmp_path, monkeypatch):
        seen, sample = [], tm.sample
        monkeypatch.setattr(tm, "sample", lambda *a: seen.append(sample(*a)) or seen[-1])
        monkeypatch.setattr(tm, "format_reward", lambda _, texts: [float(len(text) % 2) for text in texts])
        s, rows = run(tm, tmp_path / "a", "--eval_size", "0", "--max_steps", "2", "--format_weight", "0.25")
        for row, (responses, texts, log_probs) in zip(rows[1:], seen, strict=True):
            right, odd = parity_reward(None, texts, None), [len(text) % 2 for text in texts]
            lengths = [len(response) for response in responses]
            assert 0 < row["cut"] == sum(n == 6 for n in lengths) / 16 and len(texts) == 16
            assert row["response_length"] == sum(lengths) / 16
            assert row["accuracy"] == sum(right) / 16 and 0 < row["format"] == sum(odd) / 16
            assert row["reward"] == pytest.approx(row["accuracy"] + 0.25 * row["format"])
            rewards = [r + 0.25 * f for r, f in zip(right, odd)]
            equal = sum(len(set(rewards[i:i + 4])) == 1 for i in range(0, 16, 4))
            assert row["equal_reward_groups"] == equal / 4
            assert row["entropy"] == pytest.approx(-log_probs.sum().item() / sum(lengths))

    def test_of_gspo_token_equals_gspo_and_grpo_differs(self, tm, parity, tmp_path):
        flags = ["--eps_low", "0.01", "--eps_high", "0.01", "--max_steps", "1", "--eval_size", "0"]
        rows = {a: run(tm, tmp_path / a, "--algorithm", a, *flags)[1][1] for a in ("gspo", "gspo_token", "grpo")}
        for key in ("loss", "grad_norm", "log_ratio_std", "clip_fraction"):
            assert rows["gspo"][key] == pytest.approx(rows["gspo_token"][key], rel=1e-3, abs=1e-6)
            assert rows["gspo"][key] != pytest.approx(rows["grpo"][key], rel=1e-3, abs=1e-6)

    def test_moves_the_weights_by_gspos_gradient(self, tm, parity, tmp_path, monkeypatch, world):
        """All ratios are 1 in a single minibatch, here of several micro-batches: the gradient is that of minus the
        mean over responses, those of equal groups too, of A times the mean log-prob."""
        rollouts, gradients, rates, build = [], [], [], tm.build_minibatches

        def clip(parameters, norm):
            parameters = [*parameters]
            gradients.append([p.grad.clone() for p in parameters])
            assert norm == 1.0
            return real_clip(parameters, norm)

        real_clip, step = torch.nn.utils.clip_grad_norm_, torch.optim.AdamW.step
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        monkeypatch.setattr(tm, "build_minibatches", lambda *a: rollouts.append(a) or build(*a))
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (
            rates.append(self.param_groups[0]["lr"]), step(self))[1])
        monkeypatch.setattr(tm, "correctness_reward", lambda _, texts, answer: [0.5] * 4 + parity_reward(
            _, texts[4:], answer))
        _, rows = run(tm, tmp_path / "a", "--minibatches", "1", "--max_steps", "3", "--temperature", "0.8",
                      "--micro_batch_tokens", "200", "--eval_size", "0")
        assert rates == pytest.approx([1e-3, 0.55e-3, 1e-4]), "learning_rate falls to its tenth at max_steps"
        model, total = tm.load(world[0], "cpu")[0], 0
        prompts, responses, advantages, _ = rollouts[0]
        assert (advantages[:4] == 0).all() and len(responses) == 16
        for prompt, response, advantage in zip(prompts, responses, advantages):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1] / 0.8
            log_probs = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
            total = total - log_probs.mean() * advantage / 16
        total.backward()
        assert any(p.grad.abs().max() > 1e-3 for p in model.parameters())
        for parameter, gradient in zip(model.parameters(), gradients[0], strict=True):
            assert torch.allclose(parameter.grad, gradient, atol=1e-5)
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        assert rows[1]["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert rows[1]["loss"] == pytest.approx(-sum(advantages).item() / 16, abs=1e-5)

    def test_goes_over_each_rollout_as_many_times_as_epochs_say(self, tm, parity, tmp_path, monkeypatch):
        rows, observe = [], tm.observe
        monkeypatch.setattr(tm, "observe", lambda b, *a: rows.append([*b.rows]) or observe(b, *a))
        run(tm, tmp_path / "a", "--epochs", "2", "--minibatches", "2", "--max_steps", "1", "--eval_size", "0",
            "--micro_batch_tokens", "100000")
        assert len(rows) == 4 and rows[:2] == rows[2:]
        assert max(rows[0]) < 8 <= min(rows[1]), "a minibatch is a half of the rollout, in whole groups"

    def test_scores_each_response_against_its_own_question(self, tm, untrained, tmp_path, monkeypatch, world):
        """Prompts, responses and gold answers must stay in one order: group by group."""
        seen, rollout, build = {}, tm.rollout, tm.build_minibatches

        def reward(prompts, completions, answer):
            seen.setdefault("answers", answer)
            return [float(i % 3 == 0) for i in range(len(completions))]

        monkeypatch.setattr(tm, "correctness_reward", reward)
        monkeypatch.setattr(tm, "rollout", lambda model, prompts, *rest: (
            seen.setdefault("asked", []).extend(prompts), rollout(model, prompts, *rest))[1])
        monkeypatch.setattr(tm, "build_minibatches", lambda *a: seen.update(prompts=a[0]) or build(*a))
        s, _ = run(tm, tmp_path / "a", "--max_steps", "1", "--eval_size", "0", "--rollout_rows", "8")
        tokenizer = tm.load(world[0], "cpu")[1]
        answers = {tuple(tm.encode_prompt(tokenizer, q["question"])): q["answer"] for q in read(Path(world[1]))}
        assert seen["prompts"] == [prompt for prompt in seen["asked"] for _ in range(s.group_size)]
        assert seen["answers"] == [answers[tuple(prompt)] for prompt in seen["prompts"]]

    @pytest.mark.parametrize("algorithm, clipped", [("gspo", 6), ("gspo_token", 6), ("grpo", 3)])
    def test_counts_the_tokens_that_the_algorithm_clips(self, tm, algorithm, clipped):
        """The example: GSPO clips two whole responses, 6 of 11 tokens; GRPO three tokens."""
        new, old = example()
        s = tm.parse_settings(["--algorithm", algorithm, "--eps_low", str(RANGE[0]), "--eps_high", str(RANGE[1])])
        batch = types.SimpleNamespace(mask=MASK[:4], advantages=ADVANTAGES[:4], old_log_probs=old[:4])
        log_s, clips, tokens = tm.observe(batch, new[:4], s)
        assert (tokens, round(clips, 4)) == (11, clipped)
        assert log_s == pytest.approx([math.log(ratio) for ratio in SEQUENCE_RATIOS])

    def test_leaves_the_weights_alone_where_all_rewards_are_equal_and_says_so_once(
            self, tm, untrained, tmp_path, monkeypatch, capsys, world):
        monkeypatch.setattr(tm, "correctness_reward", lambda _, texts, answer: [0.3] * len(texts))
        s, rows = run(tm, tmp_path / "a")
        assert all(row["equal_reward_groups"] == 1 and row["log_ratio_first_max"] is None for row in rows[1:])
        models = [tm.load(folder, "cpu")[0] for folder in (world[0], tmp_path / "a" / "model")]
        assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models)))
        shown = capsys.readouterr().err
        assert shown.count("note: no gradient in three steps") == 1 and "warning" not in shown
        assert shown.index("step 3/6") < shown.index("no gradient") < shown.index("step 4/6")

    def test_warns_when_the_first_ratios_are_not_1(self, tm, parity, tmp_path, monkeypatch, capsys):
        """Here in the second micro-batch of the first minibatch."""
        log_probs, calls = tm.response_log_probs, itertools.count(1)
        monkeypatch.setattr(tm, "response_log_probs", lambda model, *a: log_probs(model, *a) + (
            1e-6 * (torch.is_grad_enabled() and next(calls) == 2)))
        _, rows = run(tm, tmp_path / "a", "--max_steps", "1", "--eval_size", "0", "--minibatches", "1",
                      "--micro_batch_tokens", "200")
        assert rows[1]["log_ratio_first_max"] > 0
        assert "warning: log_ratio_first_max is not 0" in capsys.readouterr().err

    def test_goes_through_all_questions_before_any_comes_twice(self, tm, cold, tiny, monkeypatch):
        monkeypatch.setattr(tm, "report", lambda *a: None)
        monkeypatch.setattr(tm, "save", lambda *a: None)

        def picked(seed, state=None):
            seen = []
            monkeypatch.setattr(tm, "train_step", lambda m, t, o, questions, step, s: seen.extend(questions) or {})
            s = tm.parse_settings(["--tiny", "--prompts_per_step", "4", "--max_steps", "5", "--seed", str(seed)])
            tm.train(s, *tiny, list(range(10)), [], state)
            return seen

        first = picked(0)
        assert sorted(first[:10]) == sorted(first[10:]) == list(range(10))
        assert first[:10] != first[10:] and first != picked(1) and first == picked(0)
        optimizer = torch.optim.AdamW(tiny[0].parameters(), fused=True).state_dict()
        assert picked(0, {"rows": [{}] * 4, "model": tiny[0].state_dict(), "optimizer": optimizer}) == first[12:]

    @pytest.mark.parametrize("moment", [
        "settings", "update", "half a log", "evaluation", "first state.pt", "first save, before state.pt",
        "second save, in the model", "last save, before state.pt"])
    def test_resumed_after_a_kill_equals_a_run_never_killed(
            self, tm, parity, tmp_path, monkeypatch, moment, whole):
        class Killed(BaseException):
            pass

        def dies_at(call, function, half=lambda *a, **k: None):
            """Like the function, but for its call number `call`, which does a half of it and dies."""
            def dying(*a, **k):
                if next(calls) < call:
                    return function(*a, **k)
                half(*a, **k)
                raise Killed
            calls = itertools.count(1)
            return dying

        with monkeypatch.context() as patch:
            if moment == "settings":
                patch.setattr(tm.Path, "write_text", dies_at(
                    1, tm.Path.write_text, lambda path, text, **k: path.write_bytes(b"{")))
            elif moment == "update":
                patch.setitem(tm.LOSSES, "gspo", dies_at(15, gspo.gspo_loss))
            elif moment == "half a log":
                patch.setattr(tm.Path, "write_text", dies_at(
                    7, tm.Path.write_text, lambda path, text, **k: path.write_bytes(text.encode()[:-200])))
            elif moment == "evaluation":
                patch.setattr(tm, "evaluate", dies_at(3, tm.evaluate))
            elif moment == "first state.pt":
                patch.setattr(torch, "save", dies_at(1, torch.save, lambda state, path: path.write_bytes(b"PK")))
            elif moment == "second save, in the model":
                from transformers import PreTrainedModel
                patch.setattr(PreTrainedModel, "save_pretrained", dies_at(
                    2, PreTrainedModel.save_pretrained, lambda self, to: (to / "model.safetensors").unlink()))
            else:                                                        # the first os.replace is of settings.json
                patch.setattr(tm.os, "replace", dies_at(2 if moment.startswith("first") else 4, tm.os.replace))
            with pytest.raises(Killed):
                run(tm, tmp_path / "killed")
        run(tm, tmp_path / "killed", "--resume")
        same(whole, tmp_path / "killed")

    @pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
    def test_resumed_after_kill_9_equals_a_run_never_killed(self, tm, parity, tmp_path, whole, world):
        """A process of its own that sends itself SIGKILL in the middle of step 4."""
        script = f"""
import os, signal, sys
sys.path.insert(0, {str(HERE)!r})
import test_gspo, train_math
from experiments import cold_start
cold_start.tiny_world = lambda seed: {world!r}
train_math.correctness_reward = test_gspo.parity_reward
steps, loss = [], train_math.LOSSES["gspo"]
def dies(*a, **k):
    steps.append(1)
    if len(steps) == 14:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(*a, **k)
train_math.LOSSES["gspo"] = dies
test_gspo.run(train_math, {str(tmp_path / "killed")!r})
"""
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300).returncode == -9
        assert 2 <= len(torch.load(tmp_path / "killed" / "state.pt")["rows"]) < 6
        run(tm, tmp_path / "killed", "--resume")
        same(whole, tmp_path / "killed")

    @pytest.mark.parametrize("steps", [0, 3])
    def test_saves_when_told_to_stop_and_goes_on_later(self, tm, parity, tmp_path, steps, whole):
        stops = iter([False] * steps + [True])
        _, rows = run(tm, tmp_path / "stopped", stop=lambda: next(stops))
        assert len(rows) == len(torch.load(tmp_path / "stopped" / "state.pt")["rows"]) == steps + 1
        run(tm, tmp_path / "stopped", "--resume")
        same(whole, tmp_path / "stopped")

    @pytest.mark.parametrize("what, bad", [("weights", INF), ("loss", NAN), ("loss", INF)])
    def test_stops_at_what_is_not_finite_and_keeps_the_last_good_state(
            self, tm, parity, tmp_path, monkeypatch, what, bad):
        calls, loss, step = itertools.count(), gspo.gspo_loss, torch.optim.AdamW.step

        def spoil(optimizer):
            step(optimizer)
            if next(calls) == 2:
                optimizer.param_groups[0]["params"][0].data[0, 0] = bad

        if what == "loss":
            monkeypatch.setitem(
                tm.LOSSES, "gspo", lambda *a, **k: loss(*a, **k) * (bad if next(calls) > 1 else 1))
        else:
            monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
        often = ["--minibatches", "1", "--save_steps", "1"]
        line = exits(tm, "--tiny", *FAST, *often, "--output_dir", str(tmp_path / "a"))
        assert re.search(r"step 3: .*not finite: lower --learning_rate.*The last save is good", line)
        state = torch.load(tmp_path / "a" / "state.pt")
        assert len(state["rows"]) == 3 and all(x.isfinite().all() for x in state["model"].values())

    def test_says_so_when_the_logits_are_nan(self, tm, cold, tiny):
        model = cold.tiny_model(tiny[1], seed=0)
        model.lm_head.weight.data.fill_(NAN)
        with pytest.raises(FloatingPointError, match="NaN"):
            tm.rollout(model, [[5, 6]], 2, 3, 1.0, torch.tensor([1]))

    def test_evaluates_greedily_strictly_and_flexibly(self, tm, tiny, monkeypatch):
        """8 of 10 right by the last number, 6 after '####'; the intervals are from a table of Wilson's."""
        seen = []
        texts = ["#### 7"] * 6 + ["it is 7", "#### x 7", "#### 8", "none"]
        monkeypatch.setattr(tm, "sample", lambda *a: seen.append(a) or (None, texts, None))
        questions = [{"question": f"{i}?", "answer": "3 + 4\n#### 7"} for i in range(10)]
        scores, answers = tm.evaluate(*tiny, questions, "s")
        assert seen == [(*tiny, questions, 1, 0.0, "s")], "one answer a question, at temperature 0"
        assert {k: v for k, v in scores.items() if "interval" not in k} == {
            "eval_questions": 10, "eval_format": 0.7, "eval_strict": 0.6, "eval_flexible": 0.8}
        assert scores["eval_strict_interval"] == pytest.approx((0.3127, 0.8318), abs=1e-4)
        assert scores["eval_flexible_interval"] == pytest.approx((0.4902, 0.9433), abs=1e-4)
        assert tm.wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
        assert [answer["right"] for answer in answers] == [True] * 6 + [False] * 4
        assert answers[6] == {"question": "6?", "response": "it is 7", "gold": "7", "right": False}

    def test_shows_accuracy_length_clip_and_spread_in_a_picture(self, whole, tmp_path, monkeypatch):
        import matplotlib.pyplot as plt
        from experiments import plot
        kept = []
        monkeypatch.setattr(plt, "close", kept.append)
        plot.draw({"gspo": whole[1]}, tmp_path / "picture.png", eps_high=0.04)
        assert (tmp_path / "picture.png").stat().st_size > 1000
        axes = kept[0].axes
        for axis, name in zip(axes, ("accuracy", "response_length", "clip_fraction", "log_ratio_std"), strict=True):
            assert axis.lines[0].get_xydata().tolist() == [[row["step"], row[name]] for row in whole[1][1:]]
        bars = [line.get_ydata() for line in axes[0].lines[1:] if len(line.get_xdata()) == 2]
        assert [tuple(bar) for bar in bars] == [tuple(row["eval_strict_interval"]) for row in whole[1][::2]]
        assert 0.04 in axes[3].lines[1].get_ydata()
        plot.draw({"still": [row | {"log_ratio_std": None} for row in whole[1]]}, tmp_path / "picture.png")
        assert len(kept[1].axes[3].lines[0].get_xdata()) == 0, "nothing is drawn where nothing was measured"


class TestCommandLine:
    __test__ = not GRADING

    @pytest.mark.parametrize("flags, word", [
        ("--group_size 1", "--group_size"), ("--group_size x", "--group_size"),
        ("--group_sizes 4", "--group_sizes"), ("--rollout_rows 0", "--rollout_rows"),
        ("--prompts_per_step 0", "--prompts_per_step"), ("--prompts_per_step 6", "--minibatches 4"),
        ("--algorithm ppo", "ppo"), ("--temperature 0", "--temperature"), ("--learning_rate nan", "nan"),
        ("--learning_rate -1", "--learning_rate"), ("--eps_low 0", "--eps_low"), ("--eps_low 1", "--eps_low"),
        ("--eps_high inf", "--eps_high"), ("--eval_size -1", "--eval_size"), ("--max_steps 0", "--max_steps"),
        ("--max_grad_norm 1", "--max_grad_norm"), ("--device tpu9", "--device"), ("--seed -1", "--seed"),
        ("--device meta", "--device"), ("--seed 99999999999999999", "--seed"), ("--save_steps 0", "--save_steps"),
        ("--tiny --model x", "--model"), ("--tiny --dataset x", "--dataset"),
        ("--format_weight -1", "--format_weight"), ("--micro_batch_tokens 0", "--micro_batch_tokens"),
        ("--dataset nowhere.jsonl", "nowhere.jsonl"), ("--tiny maybe", "maybe"), ("stray", "stray"),
        ("--dataset train.jsonl --eval_dataset no.jsonl", "no.jsonl"), ("--output_dir train.jsonl", "train.jsonl"),
        ("--dataset .", "--dataset")])
    def test_refuses_what_is_wrong_before_a_model_loads(self, tm, tmp_path, monkeypatch, flags, word):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(tm, "load", lambda *a: pytest.fail("a model was loaded first"))
        write_jsonl(tmp_path / "train.jsonl", [{"question": "?", "answer": "#### 1"}] * 9)
        line = exits(tm, *flags.split())
        assert word in line and line.startswith("train_math.py: ")

    @pytest.mark.parametrize("text, words", [
        ("", "no question"), ("no json\n", "line 1: found no JSON object"),
        ('{"question": "?"}\n', "found question;"), ('{"answer": "#### 1"}\n', "found answer;"),
        ('{"question": 1, "answer": "1"}\n', "line 1"),
        ('{"question": "?", "answer": "none"}\n', "line 1"), ("[1]\n", "no JSON object"),
        ('"a"\n', "no JSON object"),
        ('{"question": "?", "answer": [null]}\n', "line 1"), ("[[1, 2]]\n", "line 1"),
        ('{"question": "?", "answer": "#### 1"}\n{"question": "?", "answer": "one"}\n', "line 2"),
        ('{"question": "?", "answer": "#### 1"}\n\nno json\n', "line 3"),
        ('{"problem": "?", "solution": "1"}\n', "line 1: found problem, solution; wanted: an object with a"),
        ("question,answer\n1+1?,2\n", "no JSON object"),
        ('[\n {"question": "?", "answer": "1"}\n]\n', "line 1: found no JSON object")])
    def test_refuses_a_bad_dataset_in_one_line_that_says_where(self, tm, tmp_path, monkeypatch, text, words):
        monkeypatch.setattr(tm, "load", lambda *a: pytest.fail("a model was loaded first"))
        (tmp_path / "q.jsonl").write_text(text)
        line = exits(tm, "--dataset", str(tmp_path / "q.jsonl"), "--output_dir", str(tmp_path / "o"))
        assert words in line and "--dataset" in line and "q.jsonl" in line

    def test_holds_out_the_last_lines_of_a_file_and_at_most_a_fifth(self, tm, tmp_path):
        answers = ["#### 1", "2", 3, "4.0", "5 boxes", "6\n#### 60", "7", "8", "9", "10", "11"]
        rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
        data = write_jsonl(tmp_path / "q.jsonl", rows)
        for size, n in (0, 0), (1, 1), (2, 2), (99, 2):
            questions, held_out = tm.load_data(tm.parse_settings(["--dataset", data, "--eval_size", str(size)]))
            assert questions + held_out == rows and len(held_out) == n
        golds = [tm.gold_answer(row["answer"]) for row in rows]
        assert golds == ["1", "2", "3", "4", "5", "60", "7", "8", "9", "10", "11"]
        s = tm.parse_settings(["--dataset", data, "--eval_dataset", data, "--eval_size", "3"])
        assert tm.load_data(s) == (rows, rows[:3])

    def test_takes_gsm8k_and_its_test_split_from_the_hub(self, tm, monkeypatch):
        """The hub itself is out of reach of a test; that the right thing is asked of it is not."""
        import datasets
        asked = []

        def load_dataset(name, configuration, split):
            asked.append((name, configuration, split))
            rows = [{"question": f"{split} {i}?", "answer": "#### 1"} for i in range(5)]
            return datasets.Dataset.from_list(rows)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        questions, held_out = tm.load_data(tm.parse_settings(["--eval_size", "2"]))
        assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
        assert len(questions) == 5 and [row["question"] for row in held_out] == ["test 0?", "test 1?"]
        assert len(tm.load_data(tm.parse_settings(["--dataset", "some/maths", "--eval_size", "0"]))[0]) == 5
        assert asked[2:] == [("some/maths", None, "train")], "not every dataset has a test split"

    def test_refuses_a_model_that_is_not_there_or_damaged_or_too_short(self, tm, tmp_path, untrained, world):
        (tmp_path / "empty").mkdir()
        flags = ["--dataset", world[1], "--output_dir", str(tmp_path / "o"), "--device", "cpu"]
        for name in "empty", "nowhere":
            assert f"--model {tmp_path / name}: " in exits(tm, "--model", str(tmp_path / name), *flags)
        shutil.copytree(world[0], tmp_path / "cut")
        weights = (tmp_path / "cut" / "model.safetensors").read_bytes()
        (tmp_path / "cut" / "model.safetensors").write_bytes(weights[:-1000])
        assert f"--model {tmp_path / 'cut'}: " in exits(tm, "--model", str(tmp_path / "cut"), *flags)
        line = exits(tm, "--tiny", "--max_completion_length", "500", "--output_dir", str(tmp_path / "o"))
        assert "--max_completion_length 500" in line
        assert {p.name for p in (tmp_path / "o").iterdir()} <= {"lock"}, "a run that did not start leaves nothing"

    def test_refuses_a_model_whose_logits_are_nan_or_scaled_or_not_its_tokenizers(self, tm, cold, tiny):
        tokenizer, questions = tiny[1], [{"question": "How many?"}]
        s, model = tm.parse_settings(["--tiny"]), cold.tiny_model(tiny[1], seed=0)
        tm.check_model(model, tokenizer, questions, s)
        forward = model.forward
        model.forward = lambda *a, **k: types.SimpleNamespace(logits=forward(*a, **k).logits * 2)
        with pytest.raises(ValueError, match="scaled"):
            tm.check_model(model, tokenizer, questions, s)
        model.forward = forward
        model.resize_token_embeddings(40)
        with pytest.raises(ValueError, match="no pair"):
            tm.check_model(model, tokenizer, questions, s)
        model = cold.tiny_model(tiny[1], seed=0)
        model.lm_head.weight.data[5] = NAN
        with pytest.raises(ValueError, match="not finite"):
            tm.check_model(model, tokenizer, questions, s)

    def test_overwrites_nothing(self, tm, tmp_path, parity, whole):
        folder = tmp_path / "a"
        shutil.copytree(whole[0], folder)
        before = {path: path.read_bytes() for path in folder.rglob("*.*")}
        flags = ["--tiny", "--output_dir", str(folder), *FAST]
        assert "--resume" in exits(tm, *flags)
        assert "--seed 0, not 1" in exits(tm, *flags, "--seed", "1", "--resume")
        assert "--rollout_rows 128, not 8" in exits(tm, *flags, "--rollout_rows", "8", "--resume")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "thesis.txt").write_text("mine")
        assert "other" in exits(tm, "--tiny", "--output_dir", str(tmp_path / "other"))
        assert "other" in exits(tm, "--tiny", "--output_dir", str(tmp_path / "other"), "--resume")
        assert "thesis.txt" in exits(tm, "--tiny", "--output_dir", str(tmp_path / "other" / "thesis.txt"))
        state = (folder / "state.pt").rename(tmp_path / "elsewhere")
        assert "not empty" in exits(tm, *flags, "--resume"), "its model/ would be overwritten"
        (folder / "state.pt").write_bytes(state.read_bytes()[:-5000])
        line = exits(tm, *flags, "--resume")
        assert f"{folder}/state.pt: " in line
        for text in "", "[1]", '{"old_flag": 1}':
            (folder / "settings.json").write_text(text)
            assert "settings.json" in exits(tm, *flags, "--resume")
        (folder / "settings.json").write_bytes(before[folder / "settings.json"])
        state.rename(folder / "state.pt")
        assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before

    def test_resumes_with_the_runs_own_settings_where_it_now_lies(self, tm, parity, tmp_path, whole, capsys):
        shutil.copytree(whole[0], tmp_path / "moved")
        s = tm.parse_settings(["--resume", "--output_dir", str(tmp_path / "moved")])
        saved = json.loads((whole[0] / "settings.json").read_text())
        assert vars(s) == saved | {"resume": True, "output_dir": str(tmp_path / "moved")}
        tm.main(["--resume", "--output_dir", str(tmp_path / "moved"), "--max_steps", "7", "--device", "cpu"])
        rows = read(tmp_path / "moved" / "metrics.jsonl")
        assert rows[:7] == read(whole[0] / "metrics.jsonl") and rows[7]["step"] == 7 and len(rows) == 8

    def test_refuses_a_second_process_in_the_same_output_dir(self, tm, parity, tmp_path):
        s = tm.parse_settings(["--tiny", *FAST, "--output_dir", str(tmp_path / "a")])
        tm.prepare(s)
        for flags in [], ["--resume"]:
            assert "lock" in exits(tm, "--tiny", *FAST, "--output_dir", str(tmp_path / "a"), *flags)
        s.lock.lock.release()
        tm.main(["--tiny", *FAST, "--max_steps", "1", "--output_dir", str(tmp_path / "a"), "--resume"])

    def test_gives_each_algorithm_its_own_clip_range(self, tm):
        ranges = {(tiny, a): (s.eps_low, s.eps_high) for tiny in (False, True) for a in tm.LOSSES
                  for s in [tm.parse_settings(["--algorithm", a] + ["--tiny"] * tiny)]}
        assert ranges[False, "gspo"] == ranges[False, "gspo_token"] == (3e-4, 4e-4)
        assert ranges[False, "grpo"] == ranges[True, "grpo"] == (0.2, 0.27)
        assert ranges[True, "gspo"] == ranges[True, "gspo_token"] == (0.03, 0.04)
        assert tm.parse_settings(["--eps_low", "0.1"]).eps_low == 0.1

    def test_helps_with_the_defaults_of_the_run_that_is_asked_for(self, tm, capsys):
        for flags, default in ([], "runs/math"), (["--tiny"], "runs/tiny"):
            with pytest.raises(SystemExit) as stop:
                tm.main([*flags, "--help"])
            assert not stop.value.code and f"(default: {default})" in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize("error", [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")])
    def test_names_the_flags_that_help_when_memory_runs_out(self, tm, untrained, tmp_path, monkeypatch, error):
        def full(*arguments):
            raise error
        monkeypatch.setattr(tm, "rollout", full)
        line = exits(tm, "--tiny", *FAST, "--output_dir", str(tmp_path / "a"))
        assert "Memory" in line or "memory" in line
        assert "--micro_batch_tokens" in line and "--rollout_rows" in line

    def test_shows_the_traceback_of_a_mistake_in_the_script(self, tm, untrained, tmp_path, monkeypatch):
        def mistaken(*arguments):
            raise RuntimeError("shapes do not fit")
        monkeypatch.setattr(tm, "rollout", mistaken)
        with pytest.raises(RuntimeError, match="shapes"):
            tm.main(["--tiny", *FAST, "--output_dir", str(tmp_path / "a")])

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="writes to /dev/full")
    @pytest.mark.parametrize("name", ["partial", "metrics.jsonl", "metrics.png", "model/model.safetensors"])
    def test_says_in_one_line_that_the_disk_is_full_and_keeps_the_last_save(
            self, tm, parity, tmp_path, monkeypatch, name, whole):
        from safetensors import SafetensorError
        report, folder = tm.report, tmp_path / "a"

        def full_after_three_steps(rows, s):
            report(rows, s)
            if rows[-1]["step"] == 3:
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to("/dev/full")

        def full(*arguments):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        with monkeypatch.context() as patch:
            patch.setattr(tm, "report", full_after_three_steps)
            if name.startswith("model"):
                import transformers
                save = transformers.PreTrainedModel.save_pretrained
                patch.setattr(tm, "report", lambda rows, s: report(rows, s) or patch.setattr(
                    transformers.PreTrainedModel, "save_pretrained", full if len(rows) > 3 else save))
            line = exits(tm, "--tiny", *FAST, "--output_dir", str(folder))
        assert "Error" in line and "The last save is good" in line
        if (folder / name).is_symlink():
            (folder / name).unlink()
        assert len(torch.load(folder / "state.pt")["rows"]) == 3
        run(tm, folder, "--resume")
        same(whole, folder)

    @pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
    @pytest.mark.parametrize("times", [1, 2])
    def test_saves_on_ctrl_c_and_stops_at_once_on_a_second(
            self, tm, parity, tmp_path, monkeypatch, capsys, times, whole):
        """SIGINT in the middle of step 3 of 6: the step is finished, saved, and the run can go on."""
        build, calls = tm.build_minibatches, itertools.count(1)

        def interrupted(*arguments):
            for _ in range(times if next(calls) == 3 else 0):
                os.kill(os.getpid(), signal.SIGINT)
            return build(*arguments)

        monkeypatch.setattr(tm, "build_minibatches", interrupted)
        with pytest.raises(SystemExit) as stop:
            tm.main(["--tiny", *FAST, "--output_dir", str(tmp_path / "a")])
        said = capsys.readouterr().err + str(stop.value.code)
        assert "Ctrl-C: this step is finished and saved first" in said
        if times == 1:
            assert stop.value.code == 130 and "after step 3" in said
        else:
            assert "--resume goes on from the last save" in stop.value.code
        rows = torch.load(tmp_path / "a" / "state.pt")["rows"]
        assert len(rows) == (4 if times == 1 else 3)
        del stop
        gc.collect()
        run(tm, tmp_path / "a", "--resume")
        same(whole, tmp_path / "a")


class TestColdStart:
    __test__ = not GRADING

    def test_runs_and_then_the_real_job_on_a_local_model_and_dataset(
            self, tm, cold, tmp_path, capsys, monkeypatch):
        """A folder, a .jsonl, a pad token that is the end token, a chat template or none: all but hub and GPU."""
        monkeypatch.chdir(tmp_path)
        tokenizer = cold.tiny_tokenizer()
        tokenizer.pad_token = tokenizer.eos_token
        cold.tiny_model(tokenizer, seed=0).save_pretrained("model")
        tokenizer.save_pretrained("model")
        rows = cold.tiny_questions(0)[:40]
        for row in rows:
            row["answer"] = row["answer"].replace("=", "=<<1+1=2>>", 1)
        data = ["--dataset", write_jsonl(tmp_path / "train.jsonl", rows), "--device", "cpu"]
        seen, log_probs = [], tm.response_log_probs

        def spy(model, batch, temperature):
            seen.append((tokenizer.batch_decode(batch.ids), got := log_probs(model, batch, temperature)))
            return got

        monkeypatch.setattr(tm, "response_log_probs", spy)
        flags = ["--model", "model", "--steps", "30", "--learning_rate", "1e-2", "--output_dir", "out/cold"]
        cold.main([*flags, *data])
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        assert "--model out/cold" in capsys.readouterr().out and not list(Path().rglob("*.partial"))
        assert len(seen) == 30 * 4 and seen[-1][1].mean() > seen[0][1].mean() + 0.2, "two rows at once; it learns"
        assert all("<<" not in text and text.rstrip("<end>").count("####") == 1 for text in seen[0][0])
        assert all("<end>" in text for text in seen[0][0]), "the end token is learned, too"
        with pytest.raises(SystemExit):
            cold.main([*flags, *data])
        assert "is there already" in capsys.readouterr().err
        for template in True, False:
            if not template:
                Path("out/cold/chat_template.jinja").unlink()
            tm.main(["--model", "out/cold", *data, "--output_dir", f"rl{template}", *FAST, "--max_steps", "2"])
            said = capsys.readouterr().err
            for words in ("new run, out/cold: ", " parameters", "36 questions to train", "4 held out", "step 2/2",
                          "held out: ", "after step 2", "2/2 ["):
                assert words in said
            assert ("note: no chat template" in said) is not template
            assert len(read(Path(f"rl{template}") / "metrics.jsonl")) == 3

    @pytest.mark.parametrize("flags, word", [
        ("--dataset nowhere.jsonl", "nowhere.jsonl"),
        ("--dataset q.jsonl --model ./no/where", "--model ./no/where")])
    def test_refuses_what_is_not_there_in_one_line(self, cold, tmp_path, monkeypatch, flags, word):
        monkeypatch.chdir(tmp_path)
        write_jsonl(tmp_path / "q.jsonl", [{"question": "?", "answer": "#### 1"}])
        assert word in exits(cold, "--steps", "1", "--output_dir", "out", *flags.split())
        assert not Path("out").exists()

    def test_does_not_start_rl_without_the_skill(self, cold, tiny):
        model = cold.tiny_model(tiny[1], seed=0)
        with pytest.raises(RuntimeError, match="seed 0 reached a skill of 0.00.*another --seed"):
            cold.tiny_cold_start(model, tiny[1], cold.tiny_questions(0), 0, skill_steps=2)

    def test_makes_the_tiny_world_once_and_never_a_half_of_it(self, cold, tmp_path, monkeypatch, capsys):
        made = []

        def interrupted(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(cold, "tiny_cold_start", interrupted)
        with pytest.raises(SystemExit, match="anew"):
            cold.tiny_world(3, tmp_path)
        monkeypatch.setattr(cold, "tiny_cold_start", lambda model, tokenizer, rows, seed: made.append(rows))
        with monkeypatch.context() as patch:
            patch.setattr(cold.os, "rename", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cold.tiny_world(3, tmp_path)
        assert not (tmp_path / "tiny_world-3").exists() and len(made) == 1
        model, questions = cold.tiny_world(3, tmp_path)
        assert cold.tiny_world(3, tmp_path) == (model, questions) and len(made) == 2, "the second time it is there"
        rows = read(Path(questions))
        assert len(rows) == 7840 and made[1] == rows[:-256], "the cold start does not see what is held out"
        assert rows == cold.tiny_questions(3) != cold.tiny_questions(4)
        assert all(str(eval(worked)) == value for row in rows[:99]
                   for worked, value in re.findall(r"(\d+[*+]\d+)=(\d+)", row["answer"]))


class TestGrader:
    """How my_gspo.py is written, loaded and graded."""
    __test__ = not GRADING

    def command(self, *arguments, **options):
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)

    def grade(self, folder, text, seconds=60):
        """Grades this text beside a copy of test_gspo.py, as students do: exit code, output."""
        (folder / "my_gspo.py").write_text(text, encoding="utf-8")
        grader = (HERE / "test_gspo.py").read_text(encoding="utf-8")
        grader = grader.replace("SECONDS = 60", f"SECONDS = {seconds}")
        (folder / "test_gspo.py").write_text(grader, encoding="utf-8")
        done = self.command("-m", "pytest", "-q", "--tb=no", "test_gspo.py", cwd=folder,
                            env={**os.environ, "GSPO": "my_gspo.py"})
        assert not done.stderr and "INTERNALERROR" not in done.stdout, done.stdout + done.stderr
        return done.returncode, done.stdout

    def test_writes_an_assignment_that_keeps_the_docstrings_and_fails(self, tmp_path):
        done = self.command(HERE / "test_gspo.py", check=True)
        (tmp_path / "my_gspo.py").write_text(done.stdout, encoding="utf-8")
        stubs, given = functions_in(tmp_path / "my_gspo.py"), functions_in(HERE / "gspo.py")
        assert [*stubs] == [name for name in given if not name.startswith("_")]
        for name, stub in stubs.items():
            assert ast.get_docstring(stub) == ast.get_docstring(given[name]) and len(stub.body) == 2
            assert ast.unparse(stub.args) == ast.unparse(given[name].args)
            assert ast.unparse(stub.body[1]) == "raise NotImplementedError"

    def test_writes_a_smaller_assignment(self, tmp_path):
        (tmp_path / "my_gspo.py").write_text(assignment(["sequence_ratio", "gspo_loss"]), encoding="utf-8")
        stubs, given = functions_in(tmp_path / "my_gspo.py"), functions_in(HERE / "gspo.py")
        assert [*stubs] == [*given]
        assert [name for name in stubs if ast.unparse(stubs[name]) != ast.unparse(given[name])] == [
            "sequence_ratio", "gspo_loss"]

    def test_refuses_to_write_an_assignment_with_a_wrong_name(self):
        done = self.command(HERE / "test_gspo.py", "gspo_loss", "gpso_loss")
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
        assert "no function gpso_loss" in done.stderr

    def test_counts_each_mistake_once_and_where_it_is(self, tmp_path):
        text = (HERE / "gspo.py").read_text(encoding="utf-8")
        (tmp_path / "gspo.py").write_text(text, encoding="utf-8")
        for right, wrong in (
                ("_token_mean(_log_ratio(log_probs, old_log_probs, mask), mask).exp()",
                 "_log_ratio(log_probs, old_log_probs, mask).mean(dim=1).exp()"),
                ("ratio.clamp(1 - eps_low, 1 + eps_high)", "ratio.clamp(1 - eps_high, 1 + eps_low)"),
                ("    own = _log_ratio", "    exit()\n    own = _log_ratio"),
                ("    return _loss(_token_mean(objective", "    return -_loss(_token_mean(objective"),
                ("def clip_fraction", "def clipped_fraction")):
            assert right in text
            text = text.replace(right, wrong)
        code, printed = self.grade(tmp_path, text)
        assert code == 1
        for line in (
                r"token_log_probs +(\d+) of +\1   word for word as in gspo.py",
                r"sequence_ratio +[1-9]\d* of +\d+   Eq. 7: .*\|y\| counts mask, not T",
                r"clipped_objective +[1-9]\d* of +\d+   .*the two eps are swapped.*",
                r"gspo_loss +(\d+) of +\1   tested with a right clipped_objective and sequence_ratio; word.*",
                r"gspo_token_loss +0 of +\d+   .*; gspo_token_loss calls sys.exit",
                r"grpo_loss +[1-9]\d* of .*perhaps sequence_ratio's mistake: both call _log_ratio; Eq. 2.*",
                r"clip_fraction +0 of +\d+   my_gspo.py has no function clip_fraction"):
            assert re.search(f"^{line}$", printed, re.MULTILINE), f"{line}\n{printed}"

    @pytest.mark.parametrize("text, where", [
        ("while True: pass", "outside of its functions"),
        ("def group_advantages(*a, **k):\n    while True: pass", "TestGroupAdvantages::test_is_the_reward")])
    def test_ends_an_endless_loop(self, tmp_path, text, where):
        code, printed = self.grade(tmp_path, text, seconds=1)
        assert code == 2 and f"my_gspo.py has not ended after 1 seconds, an endless loop? ({where}" in printed

    def test_does_not_load_the_answer(self, tmp_path):
        (tmp_path / "gspo.py").write_text((HERE / "gspo.py").read_text(encoding="utf-8"), encoding="utf-8")
        code, printed = self.grade(tmp_path, "from gspo import *")
        assert code == 2 and "does not load: line 1: ModuleNotFoundError: import of gspo" in printed

    @pytest.mark.parametrize("text, why", [
        ("def f(:", "SyntaxError: invalid syntax (my_gspo.py, line 1)"),
        ("import sys\nsys.exit(0)", "line 2: SystemExit: 0"),
        ("\ntorch.ones(1)", "line 2: NameError: name 'torch' is not defined")])
    def test_says_in_one_line_why_a_file_does_not_load(self, tmp_path, text, why):
        (tmp_path / "my_gspo.py").write_text(text, encoding="utf-8")
        with pytest.raises(pytest.exit.Exception) as end:
            load(tmp_path / "my_gspo.py")
        assert str(end.value) == f"my_gspo.py does not load: {why}"


class TestReadme:
    __test__ = not GRADING

    @pytest.mark.parametrize("page", ["README.md", "experiments/README.md"])
    def test_blocks_print_what_they_say(self, page):
        """Each ```python block runs beside gspo.py, unless it is for an engine that is not installed, and prints
        the ```text block that follows it, if one does."""
        readme = (HERE / page).read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```\n(?:\s*```text\n(.*?)```)?", readme, re.DOTALL)
        assert blocks
        for code, output in blocks:
            engines = [engine for engine in ("trl", "verl") if f"from {engine}" in code]
            if not all((spec := importlib.util.find_spec(engine)) and spec.origin for engine in engines):
                continue
            done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
            assert done.returncode == 0, f"{code}\n{done.stderr}"
            assert done.stdout.strip() == output.strip(), code

    def test_six_lines_are_gspo_loss(self):
        """README's gspo on a batch without padding's NaN and without empty responses: one value, one gradient."""
        code = re.search(r"```python\n(.*?def gspo\(.*?)```", (HERE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        names = {}
        exec(code[1], names)
        new, old, _, mask = random_batch(rows=40, padding=0.0)
        new, old, mask = (x[mask.any(dim=1)][:32] for x in (new, old, mask))
        rewards = torch.rand(32, generator=torch.Generator().manual_seed(0))
        advantages = gspo.group_advantages(rewards, 8)
        expected = value_and_gradient(gspo.gspo_loss, new, old, advantages, mask, *RANGE)
        got = value_and_gradient(lambda n, o, r, m: names["gspo"](n, o, r, m, 8, *RANGE), new, old, rewards, mask)
        check(got[0], expected[0].detach(), "README's six lines and gspo_loss have one value")
        check(got[1], expected[1], "README's six lines and gspo_loss have one gradient")

    def test_pencil_rows_are_the_example_s(self):
        printed = subprocess.run([sys.executable, str(HERE / "gspo.py")], capture_output=True, text=True).stdout
        table = re.search(r"```text\n(advantage .*?)```", (HERE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        assert set(table[1].splitlines()) <= set(printed.splitlines())
