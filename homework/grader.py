"""The grader of a homework: a pytest plugin, which the tests of a homework load.

A grader ends endless loops, and prints the grade: a line for each part of the homework, with the
number of tests passed and what to look at first.

All parts count alike. A part has the points of its kinds of tests: 90 for the maths and 10 for the
promises, for example. A kind earns all of its points if all of its tests pass, and otherwise at
most a third of them, in proportion to the tests that pass. A file whose maths is correct therefore
ranks above a file with a mistake in its maths. A part that runs all other parts together counts
only if all of these are correct, because any of their mistakes would cost points there again.

The class grader (homework/grade.py) reads the results from the file that GRADE_LOG names. If a test
ends the process, the class grader starts the tests again, and GRADE_DEAD names the parts that have
ended a process, and why. Their tests fail without being run.
"""
import json
import os
import signal
import sys
from contextlib import contextmanager

import pytest
import torch

EXIT = os._exit
CPU_SECONDS = 5       # a test that takes more CPU time is ended; a normal one takes milliseconds
LOOPS = 2             # after this many endless loops in a part, its other tests are not run
MOST_OF_A_WRONG_KIND = 1 / 3


# ---- mistakes that several losses share ----------------------------------------------------------


def negated(loss, arguments, keywords):
    return -loss(*arguments, **keywords)


def divided(loss, arguments, keywords):
    return loss(*arguments, **keywords) / (keywords.get("denominator") or len(arguments[0]))


def divided_by_default(loss, arguments, keywords):
    n = 1 if keywords.get("denominator") else len(arguments[0])
    return loss(*arguments, **keywords) / n


def response_by_response(loss, arguments, keywords):
    """If the loss sees one response at a time, each mean is over the tokens of this response."""
    if keywords.get("denominator"):
        return loss(*arguments, **keywords)
    tensors, clip_range = arguments[:4], arguments[4:]
    total = 0
    for i in range(len(tensors[0])):
        total = total + loss(*[x[i:i + 1] for x in tensors], *clip_range, **keywords)
    return total / len(tensors[0])


SLIPS = {  # the mistake, and how to call a loss to undo it
    "the sign is wrong": negated,
    "the sum over responses is not divided": divided,
    "the sum over responses is divided only by a given denominator": divided_by_default,
    "the mean is over the tokens of all responses": response_by_response,
}


class Lender:
    """Repairs a loss for a test that has failed. A mistake that has cost points in one function
    then costs no points in the losses that call this function, or that have the same slip.

    module: the file under test. under_test: the tests' proxy of it. right: the correct functions.
    """

    LENT = ("sequence_ratio", "clipped_objective")
    LOSSES = ("gspo_loss", "gspo_token_loss", "grpo_loss")

    def __init__(self, module, under_test, right):
        self.names = vars(module)
        self.under_test = under_test
        self.right = right
        self.losses_with = {}      # slip -> the losses that have it; the first one loses points

    def repairs(self, part, wrong):
        """The repairs to try: pairs (correct functions to lend, a slip to undo or None).

        wrong: the parts that have lost points."""
        if part not in self.LOSSES:
            return []
        lent = {name: self.right[name] for name in self.LENT if name in wrong & self.right.keys()}
        return [(lent, slip) for slip in (None, *SLIPS) if lent or slip]

    @contextmanager
    def applied(self, part, lent, slip):
        """Lends the functions to the file's own calls, not to the tests, and undoes the slip."""
        own = {name: self.names.get(name) for name in lent}
        tested = self.under_test.functions
        loss = tested.get(part)

        def without_slip(*arguments, **keywords):
            return SLIPS[slip](loss, arguments, keywords)

        self.names.update(lent)
        if slip:
            tested[part] = without_slip
        try:
            yield
        finally:
            self.names.update(own)
            tested[part] = loss

    def costs_points(self, part, slip):
        """Remembers that this loss has the slip. It costs points only in the first loss."""
        losses = self.losses_with.setdefault(slip, [])
        if part not in losses:
            losses.append(part)
        return part == losses[0]

    def notes(self, part):
        """A note on each slip that costs points in this loss, and not in later ones."""
        return [f"{slip} also in {' and '.join(later)}, where this costs no points"
                for slip, (first, *later) in self.losses_with.items() if part == first and later]


# ---- a graded run --------------------------------------------------------------------------------


class Grader:
    """The plugin of one graded run.

    path: the file under test. place: a function from a test's id to its (part, kind), or None.
    weights: {kind: points}. lender: a Lender, or None. together: the part that runs all others."""

    def __init__(self, session, path, place, weights, lender=None, together=None):
        self.session = session
        self.path = path
        self.weights = weights
        self.lender = lender
        self.together = together
        self.tests = {}            # test -> (part, kind)
        for item in session.items:
            found = place(item.nodeid)
            if found:
                self.tests[item.nodeid] = found
        self.parts = list(dict.fromkeys(part for part, _ in self.tests.values()))
        self.hints = {}            # test -> the first line of its failure, "" if it passed
        self.dead = json.loads(os.environ.get("GRADE_DEAD", "{}"))  # part -> why it is not run
        self.loops = dict.fromkeys(self.parts, 0)
        self.lent = {}             # part -> the functions that were lent to it

    def log(self, **entry):
        if "GRADE_LOG" in os.environ:
            with open(os.environ["GRADE_LOG"], "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    @contextmanager
    def limit(self, seconds=CPU_SECONDS, part=None):
        """Ends a block that needs too much CPU time, so that a slow machine does not matter.
        Windows has no such signal: use Ctrl-C there."""
        def ring(*_):
            hint = f"is there an endless loop? This code ran for {seconds} seconds of CPU time"
            if part:
                self.loops[part] += 1
                if self.loops[part] == LOOPS:
                    self.dead[part] = hint
            pytest.fail(hint, pytrace=False)

        if not hasattr(signal, "SIGPROF"):
            yield
            return
        signal.signal(signal.SIGPROF, ring)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def reset_torch(self):
        """Undoes what a file may have changed for the whole process."""
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)

    def attempt(self, part, call):
        """Runs a test once. Returns what it raised, or None."""
        self.reset_torch()
        try:
            with self.limit(part=part):
                call()
        except (Exception, pytest.fail.Exception) as error:
            return error
        finally:
            self.reset_torch()
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        """Runs a test, in place of pytest's own call, which runs after it for all other tests.

        If it fails, it is tried again with the lender's repairs."""
        if pyfuncitem.nodeid not in self.tests:
            return None
        part, _ = self.tests[pyfuncitem.nodeid]
        if part in self.dead:
            pytest.fail(self.dead[part], pytrace=False)
        self.log(start=part)
        names = pyfuncitem._fixtureinfo.argnames
        arguments = {name: pyfuncitem.funcargs[name] for name in names}

        def call():
            pyfuncitem.obj(**arguments)

        wrong = {self.tests[test][0] for test, hint in self.hints.items() if hint}
        repairs = self.lender.repairs(part, wrong) if self.lender else []
        error = None
        if not (repairs and repairs[0][0].keys() & self.dead.keys()):  # a dead one may not end
            error = self.attempt(part, call)
            if error is None:
                return True
        for lent, slip in repairs:
            with self.lender.applied(part, lent, slip):
                again = self.attempt(part, call)
            if again is None and not (slip and self.lender.costs_points(part, slip)):
                self.lent[part] = lent
                return True
            error = error or again
        raise error

    def pytest_runtest_logreport(self, report):
        if report.nodeid not in self.tests or report.when != "call" and report.passed:
            return
        hint = "" if report.passed else "the test was skipped, so it has not passed"
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            hint = (crash.message if crash else str(report.longrepr)).partition("\n")[0]
        self.hints[report.nodeid] = hint.removeprefix("Failed: ")

    def counts(self, part=None):
        """{kind: (tests passed, tests)} of this part, or of all."""
        found = {}
        for kind in self.weights:
            hints = []
            for test, (its_part, its_kind) in self.tests.items():
                if its_kind == kind and part in (None, its_part):
                    hints.append(self.hints.get(test))
            found[kind] = (hints.count(""), len(hints))
        return found

    def fraction(self, part):
        """The points of this part, from 0 to 1. A kind without tests (after -k) does not count."""
        points = most = 0
        for kind, (passed, of) in self.counts(part).items():
            if of > 0:
                factor = 1 if passed == of else MOST_OF_A_WRONG_KIND
                points += self.weights[kind] * factor * passed / of
                most += self.weights[kind]
        return points / most

    def counts_in_the_grade(self, part):
        if part != self.together:
            return True
        return all(self.fraction(other) == 1 for other in self.parts if other != part)

    def grade(self):
        """The grade in percent: the mean over the parts."""
        fractions = [self.fraction(part) for part in self.parts if self.counts_in_the_grade(part)]
        return 100 * sum(fractions) / len(fractions)

    def notes(self, part):
        """What to look at first in this part, and other remarks on its points."""
        hints = [self.hints.get(test) for test, (name, _) in self.tests.items() if name == part]
        if any(hint != "" for hint in hints) and not self.counts_in_the_grade(part):
            return ["not counted, because it needs the parts that have lost points"]
        notes = list(filter(None, hints))[:1]
        notes += [f"{hints.count(None)} tests not run"] if None in hints else []
        notes += self.lender.notes(part) if self.lender else []
        if self.lent.get(part):
            names = " and ".join(self.lent[part])
            notes.append(f"where it calls {names}, tested with a correct one")
        return notes

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # below pytest's own list of failures
    def pytest_terminal_summary(self, terminalreporter):
        """Writes a line for each part, the total and the grade."""
        yield
        terminalreporter.section(
            f"grade of {self.path.name}: tests passed, and what to look at first")
        left = len(self.tests.keys() - self.hints.keys())
        said = f"grade {self.grade():.1f}%"
        if left:  # pytest has stopped early, as with -x
            said = f"no grade, because {left} tests were not run"
        parts = {part: [self.counts(part), self.notes(part)] for part in self.parts}
        for part, (counts, notes) in [*parts.items(), ("total", (self.counts(), [said]))]:
            line = f"{part:18}"
            for kind, (passed, of) in counts.items():
                line += f"  {kind}{passed:4} of{of:4}"
            terminalreporter.line(f"{line}  {' // '.join(notes)}".rstrip())
        if not left:
            self.log(grade=self.grade(), parts=parts, total=self.counts())

    def pytest_unconfigure(self):
        """Ends the process at once, because a thread of the file could keep it alive."""
        status = int(self.session.exitstatus)
        if status == 0 and any(self.hints.get(test) != "" for test in self.tests):
            status = 1             # a test that was skipped, or not run, has not passed
        sys.stdout.flush()
        EXIT(status)
