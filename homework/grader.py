"""The grader of a homework: a pytest plugin, which the tests of a homework load.

A grader ends endless loops, resets what a file changes in torch, and prints the grade: a line for
each part of the homework, with the number of tests passed and what to look at first.

All parts of a homework count alike. A part has the points of its kinds of tests: 90 for the maths
and 10 for the promises, for example. A kind earns all of its points if all of its tests pass, and
otherwise at most a third of them, in proportion to the tests that pass. A file whose maths is
correct therefore ranks above a file with a mistake in its maths. The grade is the mean over the
parts. A part that runs all other parts together counts only if all of these are correct, because
any of their mistakes would cost points there again.

The class grader (homework/grade.py) reads the results from the file that GRADE_LOG names. If a test
ends the process, the class grader starts the tests again. This grader then reads the earlier
results in that file, and runs no more tests of the part that ended the process.
"""
import json
import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

EXIT = os._exit
CPU_SECONDS = 5       # a test that takes more CPU time is ended; a normal one takes milliseconds
SECONDS = 60          # a test that has not ended by then, because it waits, ends the whole run
LOOPS = 2             # after this many endless loops in a part, its other tests are not run
HAS_ALARM = hasattr(signal, "SIGPROF")
MOST_OF_A_WRONG_KIND = 1 / 3
TORCH_STATE = {  # what a file may change for the whole process: how to read it, how to set it
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default device": (torch.get_default_device, torch.set_default_device),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic mode": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
}


def fail(hint):
    pytest.fail(hint, pytrace=False)


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


SLIPS = {  # mistakes that several losses may share, and how to call a loss to undo one
    "the sign is wrong": negated,
    "the sum over responses is not divided": divided,
    "the sum over responses is divided only by a given denominator": divided_by_default,
    "the mean is over the tokens of all responses": response_by_response,
}


class Repair:
    """One way to try a failed test of a loss again.

    lent: correct functions that replace the file's own. slip: a key of SLIPS to undo, or None."""

    def __init__(self, lender, part, lent, slip=None):
        self.lender = lender
        self.part = part
        self.lent = lent
        self.slip = slip
        notes = []
        if lent:
            notes.append(f"tested with a correct {' and '.join(lent)}")
        if slip:
            notes.append(f"{slip}, as in {lender.first_with.get(slip)}, where it costs points")
        self.note = "; ".join(notes)

    @contextmanager
    def applied(self):
        names = vars(self.lender.module)
        own = {name: names.get(name) for name in self.lent}
        names.update(self.lent)    # for the file's own calls, not for the tests
        tested = self.lender.under_test.functions
        loss = tested.get(self.part)
        if self.slip:
            tested[self.part] = self.without_slip(loss)
        try:
            yield
        finally:
            names.update(own)
            tested[self.part] = loss

    def without_slip(self, loss):
        def call(*arguments, **keywords):
            return SLIPS[self.slip](loss, arguments, keywords)
        return call

    def counts(self):
        """Whether a test counts as passed if it passes with this repair. The first loss with a slip
        does not get these points."""
        if self.slip is None:
            return True
        return self.lender.first_with.setdefault(self.slip, self.part) != self.part


class Lender:
    """If a mistake has cost points in one function, it costs no points in the losses that call it.

    module: the file under test. under_test: the tests' proxy of it. right: the correct functions.
    """

    LENT = ("sequence_ratio", "clipped_objective")
    LOSSES = ("gspo_loss", "gspo_token_loss", "grpo_loss")

    def __init__(self, module, under_test, right):
        self.module = module
        self.under_test = under_test
        self.right = right
        self.first_with = {}       # slip -> the loss that has it first

    def repairs(self, part, failed, dead):
        """The repairs to try, in this order."""
        if part not in self.LOSSES:
            return []
        wrong = (failed | dead.keys()) & self.right.keys()
        lent = {name: self.right[name] for name in self.LENT if name in wrong}
        repairs = [Repair(self, part, lent)] if lent else []
        return repairs + [Repair(self, part, lent, slip) for slip in SLIPS]


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
        self.dead = {}             # part -> why no more of its tests are run
        self.loops = {}            # part -> endless loops so far
        self.said = {}             # part -> what was repaired for it
        self.lines = {}            # test -> " (line 7)" of the file, where the test raised an error
        self.changed = []          # names of TORCH_STATE
        self.now = None            # the test that is running
        self.torch_state = {name: read() for name, (read, _) in TORCH_STATE.items()}
        self.log_path = os.environ.get("GRADE_LOG")
        self.read_log()

    # ---- results that outlive the process --------------------------------------------------------

    def log(self, **entry):
        if self.log_path:
            with open(self.log_path, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def read_log(self):
        """The results of a process that ended too early."""
        if not self.log_path or not Path(self.log_path).exists():
            return
        for line in Path(self.log_path).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if "hint" in entry:
                self.hints[entry["test"]] = entry["hint"]
            elif "dead" in entry:
                self.dead[self.tests[entry["dead"]][0]] = entry["why"]
            elif "said" in entry:
                self.said[entry["part"]] = entry["said"]
            elif "changed" in entry:
                self.changed.append(entry["changed"])

    # ---- limits ----------------------------------------------------------------------------------

    @contextmanager
    def limit(self, cpu_seconds=CPU_SECONDS):
        """Ends a block that takes too long. The limit is CPU time, so that a slow machine does not
        matter.

        A second limit, SECONDS of wall-clock time, is for a block that waits, and for systems
        without the signal. It ends the whole run."""
        timer = threading.Timer(SECONDS, self.give_up)
        timer.daemon = True
        timer.start()
        self.timer = timer
        self.cpu_seconds = cpu_seconds
        if HAS_ALARM:
            signal.signal(signal.SIGPROF, self.ring)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            yield
        finally:
            self.disarm()

    def disarm(self):
        self.timer.cancel()
        if HAS_ALARM:
            signal.setitimer(signal.ITIMER_PROF, 0)

    pytest_enter_pdb = disarm      # there is no limit in a debugger

    def ring(self, *_):
        part = self.tests[self.now][0] if self.now else None
        hint = (f"is there an endless loop? The test was ended after {self.cpu_seconds} seconds of "
                "CPU time")
        self.loops[part] = self.loops.get(part, 0) + 1
        if part and self.loops[part] >= LOOPS:
            self.dead[part] = hint
        fail(hint)

    def give_up(self):
        """Runs in another thread, because the thread of the tests does not return."""
        plugins = self.session.config.pluginmanager
        plugins.getplugin("capturemanager").suspend_global_capture(in_=True)
        where = (self.now or "while it was loaded").partition("::")[2] or "while it was loaded"
        why = f"has not ended after {SECONDS} seconds: is there an endless loop, or does it wait?"
        if self.now:
            self.hints[self.now] = why
            self.log(dead=self.now, why=why)
        print()
        self.show(print)
        print(f"{self.path.name} {why} ({where})", flush=True)
        EXIT(2)

    # ---- tests -----------------------------------------------------------------------------------

    def reset_torch(self):
        """Sets torch's global state back, and remembers what the file has changed."""
        for name, (read, write) in TORCH_STATE.items():
            if read() != self.torch_state[name]:
                write(self.torch_state[name])
                if name not in self.changed:
                    self.changed.append(name)
                    self.log(changed=name)

    def attempt(self, call):
        """Runs a test once. Returns what it raised, or None."""
        self.reset_torch()
        try:
            with self.limit():
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
        test = pyfuncitem.nodeid
        if test not in self.tests:
            return None
        part, _ = self.tests[test]
        known = self.hints.get(test) or self.dead.get(part)
        if known:
            fail(known)
        if test in self.hints:
            return True
        self.now = test
        self.log(start=test)
        names = pyfuncitem._fixtureinfo.argnames
        arguments = {name: pyfuncitem.funcargs[name] for name in names}

        def call():
            pyfuncitem.obj(**arguments)

        repairs = self.lender.repairs(part, self.failed(), self.dead) if self.lender else []
        error = None
        if not (repairs and repairs[0].lent.keys() & self.dead.keys()):  # dead ones do not end
            error = self.attempt(call)
            if error is None:
                return True
        for repair in repairs:
            with repair.applied():
                again = self.attempt(call)
            if again is None and repair.counts():
                self.said[part] = repair.note
                self.log(part=part, said=repair.note)
                return True
            error = error or again
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self.path)]
        self.lines[test] = f" (line {lines[-1]})" if lines else ""
        raise error

    def failed(self):
        """The parts with a test that has failed so far."""
        return {self.tests[test][0] for test, hint in self.hints.items() if hint}

    def pytest_runtest_logreport(self, report):
        if report.nodeid not in self.tests or report.when == "teardown":
            return
        if report.when == "setup" and report.passed:
            return
        hint = "" if report.passed else "the test was skipped, so it has not passed"
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            hint = (crash.message if crash else str(report.longrepr)).partition("\n")[0]
            hint += self.lines.get(report.nodeid, "")
        self.hints[report.nodeid] = hint.removeprefix("Failed: ")
        self.log(test=report.nodeid, hint=self.hints[report.nodeid])

    # ---- the grade -------------------------------------------------------------------------------

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

    def grade(self):
        """The grade in percent, by the rule at the top of this file."""
        fractions = [self.fraction(part) for part in self.parts if self.counts_in_the_grade(part)]
        return 100 * sum(fractions) / len(fractions)

    def fraction(self, part):
        """The points of this part, from 0 to 1. A kind without tests (after -k) does not count."""
        points = most = 0
        for kind, (passed, of) in self.counts(part).items():
            if of == 0:
                continue
            factor = 1 if passed == of else MOST_OF_A_WRONG_KIND
            points += self.weights[kind] * factor * passed / of
            most += self.weights[kind]
        return points / most

    def counts_in_the_grade(self, part):
        if part != self.together:
            return True
        return all(self.fraction(other) == 1 for other in self.parts if other != part)

    def note(self, part):
        """Remarks on this part's points, and what to look at first."""
        hints = [self.hints.get(test) for test, (name, _) in self.tests.items() if name == part]
        if any(hint != "" for hint in hints) and not self.counts_in_the_grade(part):
            return "not counted, because it needs the parts that have lost points"
        notes = []
        if None in hints and part not in self.dead:
            notes.append(f"{hints.count(None)} not run")
        if part in self.said:
            notes.append(self.said[part])
        notes += list(filter(None, [*hints, self.dead.get(part)]))[:1]
        return "; ".join(notes)

    def show(self, write):
        """Writes a line for each part, the total and the grade."""
        for part in [*self.parts, None]:
            line = f"{part or 'total':18}"
            for kind, (passed, of) in self.counts(part).items():
                line += f"  {kind}{passed:4} of{of:4}"
            note = self.note(part) if part else f"grade {self.grade():.1f}%"
            write(f"{line}  {note}".rstrip())
        for name in self.changed:
            write(f"{self.path.name} changes torch's {name}, which was set back before each test")

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # below pytest's own list of failures
    def pytest_terminal_summary(self, terminalreporter):
        yield
        title = f"grade of {self.path.name}: tests passed, and what to look at first"
        terminalreporter.section(title)
        self.show(terminalreporter.line)
        if self.tests.keys() <= self.hints.keys():
            parts = {part: [self.counts(part), self.note(part)] for part in self.parts}
            self.log(grade=self.grade(), parts=parts, total=self.counts(), state=self.changed)

    def pytest_unconfigure(self):
        """Ends the process at once, because a thread of the file that does not end would keep it
        alive."""
        if not all(thread.daemon for thread in threading.enumerate()[1:]):
            print(f"{self.path.name} leaves a thread running")
            self.log(thread=True)
        status = int(self.session.exitstatus)
        if status == 0 and any(self.hints.get(test) != "" for test in self.tests):
            status = 1             # a test that was skipped, or not run, has not passed
        sys.stdout.flush()
        EXIT(status)
