"""The first homework: the hand-out, and the grader of a student's file and of a class."""
import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gspo
import test_gspo
from homework import grade
from homework.grade import functions_of
from tests.conftest import TOP

GSPO = (TOP / "gspo.py").read_text(encoding="utf-8").partition('\nif __name__ == "__main__"')[0]
FUNCTIONS = list(grade.FUNCTIONS)
GIVEN = functions_of(GSPO)
MATHS = grade.homeworks()["maths"]


def run_tests(folder, gspo, *flags):
    """Runs the tests in this folder on a student's file."""
    command = [sys.executable, "-m", "pytest", "-q", *flags, "test_gspo.py"]
    environment = {**os.environ, "GSPO": str(gspo)}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def changed(*changes):
    """gspo.py with these changes, which are pairs (old text, new text)."""
    text = GSPO
    for right, wrong in changes:
        assert right in text, right
        text = text.replace(right, wrong)
    return text


# ---- the hand-out --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "homework"
    grade.hand_out(MATHS, folder)
    return folder


class TestHandOut:
    def test_keeps_the_docstrings_and_no_body(self, handed_out):
        names = {path.name for path in handed_out.iterdir()}
        assert names == {"my_gspo.py", "test_gspo.py", "grader.py", "README.md"}
        stubs = functions_of((handed_out / "my_gspo.py").read_text(encoding="utf-8"))
        assert [*stubs] == FUNCTIONS
        for name, stub in stubs.items():
            assert ast.get_docstring(stub) == ast.get_docstring(GIVEN[name])
            assert ast.unparse(stub.args) == ast.unparse(GIVEN[name].args)
            assert ast.unparse(stub.body[1:]) == "raise NotImplementedError"

    @pytest.mark.slow
    def test_has_a_sheet_whose_commands_run(self, handed_out):
        """Of a file without any answer, the first command fails, and the second prints 0%."""
        sheet = (handed_out / "README.md").read_text(encoding="utf-8")
        commands = re.findall(r"^    (GSPO=.*)$", sheet, re.MULTILINE)
        assert len(commands) == 2
        for command in commands:
            command = command.replace("python", sys.executable)
            done = subprocess.run(
                command, shell=True, cwd=handed_out, capture_output=True, text=True)
            assert done.returncode == 1
            assert "grade 0.0%" in done.stdout, done.stdout

    def test_has_no_answer_in_its_tests(self, handed_out):
        """No statement of gspo.py's functions, nor a call of torch that would do the work."""
        for name in "test_gspo.py", "grader.py":
            text = (handed_out / name).read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(text)))
            statements = {ast.unparse(node) for node in nodes if isinstance(node, ast.stmt)}
            for function in GIVEN.values():
                for node in ast.walk(function):
                    if isinstance(node, (ast.Assign, ast.Return)):
                        assert ast.unparse(node) not in statements - {"return None"}
            for word in (".log_softmax(", ".gather(", "clamp(", "minimum(", "def right_", "csv"):
                assert word not in text

    @pytest.mark.slow
    def test_grades_without_gspo_py(self, handed_out):
        done = run_tests(handed_out, "my_gspo.py", "-x")
        assert done.returncode == 1
        assert "is still to be written" in done.stdout
        assert re.search("^total .* grade 0.0%$", done.stdout, re.MULTILINE)

    @pytest.mark.parametrize("names, said", [
        ([], "grader.py exists already, so nothing was written"),
        (["gspo_loss", "gpso_loss"], "there is no blank gpso_loss"),
    ])
    def test_overwrites_nothing_and_knows_its_blanks(
            self, tmp_path, capsys, names, said):
        (tmp_path / "grader.py").write_text("mine")
        with pytest.raises(SystemExit) as stop:
            grade.main(["maths", "--handout", str(tmp_path), *names])
        out, err = capsys.readouterr()
        assert (stop.value.code, out, err.count("\n")) == (2, "", 1) and said in err
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]

    def test_may_be_smaller(self):
        stubs = functions_of(grade.maths_assignment(["sequence_ratio", "gspo_loss"]))
        assert [*stubs] == [*GIVEN]
        blank = [name for name in stubs if ast.unparse(stubs[name]) != ast.unparse(GIVEN[name])]
        assert blank == ["sequence_ratio", "gspo_loss"]


# ---- a class -------------------------------------------------------------------------------------


RATIO = "    return _exp(_token_mean(_log_ratio(log_probs, old_log_probs, mask), mask))"
NO_ROOT = "    return _log_ratio(log_probs, old_log_probs, mask).sum(dim=1).exp()"
CLIP = "torch.minimum(ratio * advantages, clipped * advantages)"
REWARDS = "    _require(rewards.dim() == 1, rewards=rewards)"
MEAN = "return _loss(_token_mean(objective, mask), denominator)"
SIX_LINES = """
import torch
def group_advantages(rewards, group_size, std_eps=1e-4):
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + std_eps)).flatten()
def token_log_probs(logits, tokens, temperature=1.0):
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
def sequence_ratio(log_probs, old_log_probs, mask):
    return (((log_probs - old_log_probs) * mask).sum(1) / mask.sum(1)).exp()
def clipped_objective(ratio, advantages, eps_low, eps_high):
    return torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)
def gspo_loss(log_probs, old_log_probs, advantages, mask, eps_low=3e-4, eps_high=4e-4):
    s = sequence_ratio(log_probs, old_log_probs, mask)
    return -clipped_objective(s, advantages, eps_low, eps_high).mean()
def by_token(w, advantages, mask, eps_low, eps_high):
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    objective = clipped_objective(w, advantages, eps_low, eps_high) * mask
    return -(objective.sum(1) / mask.sum(1)).mean()
def gspo_token_loss(log_probs, old_log_probs, advantages, mask, eps_low=3e-4, eps_high=4e-4):
    s = sequence_ratio(log_probs, old_log_probs, mask).detach()[:, None]
    return by_token(s * (log_probs - log_probs.detach()).exp(), advantages, mask, eps_low, eps_high)
def grpo_loss(log_probs, old_log_probs, advantages, mask, eps_low=0.2, eps_high=0.27):
    return by_token((log_probs - old_log_probs).exp(), advantages, mask, eps_low, eps_high)
def clip_fraction(ratio, advantages, mask, eps_low, eps_high):
    ratio = ratio[:, None] if ratio.dim() == 1 else ratio
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    above = (advantages > 0) & (ratio > 1 + eps_high)
    below = (advantages < 0) & (ratio < 1 - eps_low)
    return ((above | below) * mask).sum() / mask.sum()
"""
HOSTILE = """
import os, sys, threading, time
import pytest, torch
threading.Thread(target=time.sleep, args=(100,)).start()
memory = 50 * 10 ** 9 if sys.platform == "linux" else 1  # where memory is limited
""" + "".join(f"def {name}(*arguments, **keywords):\n    {body}\n" for name, body in {
    "group_advantages": "while True: pass",
    "token_log_probs": "os._exit(0)",
    "sequence_ratio": "return input()",
    "clipped_objective": "pytest.skip()",
    "gspo_loss": "return torch.ones(memory, dtype=torch.uint8)",
    "gspo_token_loss": "sys.exit(0)",
    "grpo_loss": "return 0.5",
}.items())
STYLE = """from __future__ import annotations
import sys
from dataclasses import dataclass
@dataclass
class Range:
    low: float
PLACE = __file__
"""
FORGED = {
    "grade": 100.0,
    "parts": {name: [{"maths": [9, 9], "promises": [9, 9]}, ""] for name in FUNCTIONS},
    "total": {"maths": [72, 72], "promises": [72, 72]},
    "state": [],
}
CLASS = {
    "right": GSPO,
    "six_lines": SIX_LINES,
    "hostile": HOSTILE,
    # correct, but sequence_ratio is (B, 1), has a keyword, and is looked up in the file's module;
    # the message about a wrong shape contains only a number
    "private": STYLE + changed(
        ('raise ValueError(f"these shapes do not match: {shapes}")',
         'raise ValueError(f"not all of {len(tensors)} tensors have the shape they should have")'),
        ("def sequence_ratio(log_probs, old_log_probs, mask)",
         "def sequence_ratio(log_probs, old_log_probs, mask, root=None)"),
        (RATIO, RATIO + "[:, None]"),
        ("    ratio = sequence_ratio(log_probs, old_log_probs, mask)\n    objective",
         "    own = sys.modules[__name__].sequence_ratio\n"
         "    ratio = own(log_probs, old_log_probs, mask, root=True)[:, 0]\n    objective"),
        ("sequence_ratio(log_probs, old_log_probs, mask).detach()[:, None]",
         "sequence_ratio(log_probs, old_log_probs, mask, root=True).detach()")),
    # two mistakes per file, in functions that do not call each other
    "no_root, max_for_min": changed((RATIO, NO_ROOT), (CLIP, CLIP.replace("minimum", "maximum"))),
    "self_call, clip_without_min": changed(
        (RATIO, "    return sequence_ratio(log_probs, old_log_probs, mask)"),
        (CLIP, "clipped * advantages")),
    "sign": changed(("return -objective.sum()", "return objective.sum()")),
    "sum": changed(("return -objective.sum() / denominator", "return -objective.sum()")),
    "sum_by_default": changed(("denominator = len(objective)", "denominator = 1")),
    "mean_of_all_tokens": changed((MEAN, MEAN.replace("_token_mean", "_of_all"))) + """
def _of_all(x, mask):
    return x.sum(dim=1) / mask.sum() * len(mask)
""",
    "no_group": changed(
        ("groups.mean(dim=1, keepdim=True)", "groups.mean()"),
        ("groups.std(dim=1, keepdim=True)", "groups.std()"),
        ("    groups = groups - groups[:, :1]\n", "")),
    "loss_over_T": changed((MEAN, MEAN.replace("_token_mean", "_over_T"))) + """
def _over_T(x, mask):
    return x.sum(dim=1) / x.shape[1]
""",
    "no_upcast": changed(("return x.to(torch.promote_types(x.dtype, torch.float32))", "return x")),
    "crashes": changed(
        (REWARDS, "    import ctypes\n    ctypes.string_at(0)"),
        ("    own = _log_ratio", "    raise KeyboardInterrupt\n    own = _log_ratio")),
    # one change as the file is loaded, and one in a function
    "globals": changed((REWARDS, "    torch.set_grad_enabled(False)\n" + REWARDS))
    + "torch.set_default_dtype(torch.bfloat16)\n",
    "imports": "from gspo import *",
    "killed": "import os\nimport signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "loops": "while True:\n    pass",
    "starts": 'import subprocess\nsleeps = subprocess.Popen(["sleep", "300"])\n'
              'open("PID", "w").write(str(sleeps.pid))\n',
    # writes the grader's last line itself, and ends its process
    "forged": f'import os\nopen(os.environ["GRADE_LOG"], "a").write({json.dumps(FORGED)!r})\n'
              'os.kill(os.getpid(), 9)\n',
}


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """A folder with a copy of the tests whose limit of CPU time is one second."""
    folder = tmp_path_factory.mktemp("tests")
    for path in TOP / "gspo.py", TOP / "test_gspo.py", TOP / "homework" / "grader.py":
        text = path.read_text(encoding="utf-8")
        text = text.replace("\nCPU_SECONDS = 5 ", "\nCPU_SECONDS = 1 ")
        (folder / path.name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def grades(hasty):
    """The graded class, {name: row}."""
    homework = dataclasses.replace(MATHS, tests=hasty / "test_gspo.py")
    texts = CLASS | {"starts": CLASS["starts"].replace("PID", str(hasty / "pid"))}
    return {name: grade.grade(homework, f"{name}.py", text) for name, text in texts.items()}


def lost(row, kind):
    """{function: number of failed tests} of one kind."""
    points = {name: row.get(f"{name} {kind}", [0, 1]) for name in FUNCTIONS}
    return {name: of - passed for name, (passed, of) in points.items() if passed < of}


BOTH = ["sequence_ratio", "clipped_objective"]
ROWS = [  # a file; its grade; the functions that lose points for the maths; the remark
    ("right", 100, [], f"the same code as in gspo.py: {', '.join(FUNCTIONS)}"),
    ("private", None, [], "sequence_ratio: "),  # its shape is wrong
    ("no_root, max_for_min", None, BOTH, f"gspo_loss: tested with a correct {' and '.join(BOTH)}"),
    ("self_call, clip_without_min", None, BOTH, "sequence_ratio: "),
    ("sign", None, ["gspo_loss"], "; grpo_loss: the sign is wrong, as in gspo_loss, where it"),
    ("sum", None, ["gspo_loss"],
     "; grpo_loss: the sum over responses is not divided, as in gspo_loss, where it"),
    ("sum_by_default", None, ["gspo_loss"],
     "; grpo_loss: the sum over responses is divided only by a given denominator, as in gspo_loss"),
    ("mean_of_all_tokens", None, ["gspo_token_loss"],
     "; grpo_loss: the mean is over the tokens of all responses, as in gspo_token_loss, where it"),
    ("loss_over_T", None, ["gspo_token_loss", "grpo_loss"],
     "perhaps this is the same mistake as in gspo_token_loss"),
    ("crashes", 75, ["group_advantages", "gspo_token_loss"],
     r"group_advantages: ends the process \(SIGSEGV\).*"
     r"gspo_token_loss: ends the run \(KeyboardInterrupt\)"),
    ("globals", 100, [], "changes torch's default dtype.*changes torch's gradient mode"),
    ("imports", 0, FUNCTIONS, "^does not load: line 1: ModuleNotFoundError: import of gspo halted"),
    ("loops", 0, FUNCTIONS, "^does not load: line .: Failed: is there an endless loop?"),
    ("killed", 0, FUNCTIONS, r"^ends the process \(SIGKILL\)"),
    ("starts", 0, FUNCTIONS, "mentions open, subprocess: read the file"),
    ("forged", 100, [], "mentions environ, kill, open: read the file.*"
     "its tests ended with the exit code -9: read the file"),
    ("hostile", 0, FUNCTIONS, r"leaves a thread running.*"
     r"group_advantages: is there an endless loop\?.*"
     r"token_log_probs: token_log_probs ends the run or its test \(SystemExit\).*"
     r"sequence_ratio: OSError: pytest: reading from stdin.*"
     r"clipped_objective: clipped_objective ends the run or its test \(Skipped\).*"
     # elsewhere, memory is not limited
     + ("gspo_loss: RuntimeError: .*allocate memory.*" if sys.platform == "linux" else "") +
     r"gspo_token_loss: gspo_token_loss ends the run or its test \(SystemExit\).*"
     r"grpo_loss: return a tensor, not a float.*"
     r"clip_fraction: hostile.py has no function clip_fraction"),
]


@pytest.mark.slow
class TestGrade:
    @pytest.mark.parametrize("name, grade, functions, remark", ROWS)
    def test_is_lost_where_the_mistake_is(self, grades, name, grade, functions, remark):
        row = grades[name]
        assert grade in (None, row["grade"])
        assert [*lost(row, "maths")] == functions
        assert re.search(remark, row["remark"], re.DOTALL)

    def test_of_promises_is_lost_where_the_mistake_is(self, grades):
        assert lost(grades["right"], "promises") == {}
        assert lost(grades["private"], "promises") == {"sequence_ratio": 1}
        for name in "sign", "sum", "sum_by_default":
            assert [*lost(grades[name], "promises")] == ["gspo_loss"]
        passed, of = grades["six_lines"]["total promises"]
        assert passed < of / 2
        row = grades["self_call, clip_without_min"]
        assert row["sequence_ratio maths"][0] == 0
        assert row["sequence_ratio promises"][0] <= 1  # a check of its arguments comes first

    def test_of_one_function_is_an_eighth(self, grades):
        """One of eight functions fails 3 of 5 tests of the maths, and 1 of 6 promises."""
        row = grades["no_group"]
        assert lost(row, "maths") == {"group_advantages": 3}
        assert lost(row, "promises") == {"group_advantages": 1}
        maths = 90 * (1 - 2 / 5 / 3) / 8
        promises = 10 * (1 - 5 / 6 / 3) / 8
        assert row["grade"] == pytest.approx(100 - maths - promises, abs=0.05)

    def test_of_one_kind_alone_is_full(self):
        done = run_tests(TOP, TOP / "gspo.py", "-k", "MathsOfClipFraction")
        assert done.returncode == 0
        assert re.search("^total .* promises +0 of +0 +grade 100.0%$", done.stdout, re.MULTILINE)

    def test_ranks_files_by_the_kind_of_mistake(self, grades):
        """Best first: a wrong shape or dtype, a naive file, a mistake in the maths, two of them."""
        order = [
            {"right"}, {"private"}, {"no_upcast"}, {"six_lines"},
            {"no_group", "sign", "sum", "sum_by_default", "mean_of_all_tokens"},
            {"self_call, clip_without_min", "no_root, max_for_min"}, {"killed"},
        ]
        for better, worse in zip(order, order[1:]):
            least = min(grades[name]["grade"] for name in better)
            assert least > max(grades[name]["grade"] for name in worse), (better, worse)

    def test_has_no_suspicion_against_an_honest_file(self, grades):
        for name in "right", "six_lines", "no_upcast":
            assert "mentions" not in grades[name]["remark"]
        assert lost(grades["six_lines"], "maths") == {}
        for name, absent in ("six_lines", "same code"), ("private", "tested with"):
            assert absent not in grades[name]["remark"]


@pytest.mark.slow
class TestHostileFiles:
    def test_end_where_no_signal_is_heard(self, hasty, tmp_path):
        """Copies of the tests and the grader have a limit of one second and no signal."""
        grader = (hasty / "grader.py").read_text(encoding="utf-8")
        grader = re.sub(r"\nSECONDS = 60 ", "\nSECONDS = 1 ", grader)
        grader = re.sub("HAS_ALARM = .*", "HAS_ALARM = False", grader)
        (tmp_path / "grader.py").write_text(grader, encoding="utf-8")
        (tmp_path / "test_gspo.py").write_bytes((hasty / "test_gspo.py").read_bytes())
        (tmp_path / "hostile.py").write_text(HOSTILE)
        done = run_tests(tmp_path, "hostile.py", "--tb=no")
        assert done.returncode == 2
        end = "hostile.py has not ended after 1 seconds: is there an endless loop"
        assert end in done.stdout

    def test_with_endless_loops_are_tried_twice_for_each_function(self, hasty, tmp_path):
        calls = tmp_path / "calls"
        loop = (f"def group_advantages(*_, **__):\n    open({str(calls)!r}, 'a').write('.')\n"
                "    while True:\n        pass\n")
        path = tmp_path / "loops.py"
        path.write_text(f"{TOP.joinpath('gspo.py').read_text(encoding='utf-8')}\n\n{loop}")
        run_tests(hasty, path, "--tb=no", "-k", "GroupAdvantages")
        assert calls.read_text() == ".."

    def test_do_not_outlive_the_grader(self, grades, hasty):
        """A process that the file has started is killed with it."""
        pid = int((hasty / "pid").read_text())
        stat = Path(f"/proc/{pid}/stat")
        with pytest.raises(ProcessLookupError):
            for _ in range(50):
                os.kill(pid, 0)  # raises if the process does not exist
                if stat.exists() and ") Z " in stat.read_text():
                    raise ProcessLookupError
                time.sleep(0.1)

    def test_cannot_change_a_later_file(self, tmp_path, capsys):
        """All files are read before the first one runs."""
        later = tmp_path / "later.py"
        later.write_text("def f(:")
        first = tmp_path / "first.py"
        first.write_text(f"open({str(later)!r}, 'w').close()\n1 / 0")
        full = {"file": "gspo.py", "grade": 100.0, "total maths": [1, 1], "remark": ""}
        grade.grade_class(MATHS, [first, later], as_json=True, full=full)
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert later.read_text() == ""
        assert "ZeroDivisionError" in rows[0]["remark"] and "SyntaxError" in rows[1]["remark"]


class TestHints:
    @pytest.fixture
    def refused(self, monkeypatch):
        """A function that says which hint a test has for a student's version of a function."""
        def hint_for(name, own, test, *arguments):
            monkeypatch.setattr(test_gspo.gspo, "functions", {name: own})
            with pytest.raises(pytest.fail.Exception) as failure:
                test(*arguments)
            return str(failure.value)

        return hint_for

    @pytest.mark.parametrize("function, hint", [
        (lambda x: x.sum(1).exp(), "the power 1/|y| is missing"),
        (lambda x: x.exp().mean(1), "take the geometric mean"),
        (lambda x: (-x).mean(1).exp(), "upside down"),
        (lambda x: x.mean(1), "this is log s: exp is missing"),
        (lambda x: x.sum(1), "divide it by |y|, then take exp"),
        (lambda x: x[:, 1:].mean(1).exp(), "one token does not count"),
    ])
    def test_tell_mistakes_in_the_ratio_apart(self, refused, function, hint):
        test = test_gspo.TestMathsOfSequenceRatio().test_is_the_geometric_mean_of_the_token_ratios
        assert hint in refused("sequence_ratio", lambda new, old, mask: function(new - old), test)

    @pytest.mark.parametrize("average, hint", [
        (lambda x, mask: x.sum() / mask.sum(), "the mean over the tokens of all responses"),
        (lambda x, mask: x.sum(1).mean(), "this is a sum over the tokens, but"),
        (lambda x, mask: x.mean(), "this is a sum over the tokens divided by T"),
        (lambda x, mask: (x.sum(1) / mask.sum(1)).sum(), "this is the sum over responses"),
    ])
    def test_tell_wrong_averages_apart(self, refused, average, hint):
        def loss(new, old, advantages, mask, *clip_range):
            ratio = (new - old).exp()
            objective = gspo.clipped_objective(ratio, advantages[:, None], *clip_range)
            return -average(objective * mask, mask)

        tests = test_gspo.TestMathsOfGrpoLoss()
        unchanged = tests.test_of_unchanged_log_probs_is_minus_the_mean_advantage
        assert hint in refused("grpo_loss", loss, unchanged)
        assert hint in refused("grpo_loss", loss, tests.test_of_four_responses_is_their_mean,
                               10, 0.0, "")

    def test_tell_a_clipped_log_ratio_from_other_mistakes(self, refused):
        def objective(ratio, advantages, eps_low, eps_high):
            clipped = ratio.log().clamp(-eps_low, eps_high).exp()
            return torch.minimum(ratio * advantages, clipped * advantages)

        test = test_gspo.TestMathsOfClippedObjective().test_is_the_smaller_of_clipped_and_unclipped
        hint = refused("clipped_objective", objective, test, 0.5, -1.0, -0.8, 0, "")
        assert "clip the ratio itself, not its log" in hint

    def test_do_not_blame_the_gradient_for_the_value(self, refused):
        """A loss with a correct value and no gradient fails in the tests of the gradient."""
        def loss(*arguments, **keywords):
            return gspo.gspo_loss(*arguments, **keywords).detach()

        tests = test_gspo.TestMathsOfGspoLoss()
        hint = refused("gspo_loss", loss, tests.test_of_one_response_has_the_papers_gradient, 0)
        assert "no gradient comes through" in hint
        tests.test_of_one_response(0)


class TestRemarks:
    @pytest.mark.parametrize("source", ["", " \n"])
    def test_on_an_empty_file_are_one(self, source):
        assert grade.grade(MATHS, "a.py", source)["remark"] == "is empty"

    def test_on_code_that_is_the_same_except_for_names_and_docstrings(self):
        own = GSPO.replace("_token_mean", "average").replace("log_ratio", "difference")
        for name in FUNCTIONS:
            own = own.replace(ast.get_docstring(GIVEN[name], clean=False), "Mine.")
        assert own.count("Mine.") == len(FUNCTIONS)
        other = own.replace("1 + eps_high", "eps_high + 1")
        given, same, less = (
            grade.fingerprints(MATHS, text).items()
            for text in (GSPO, own, other))
        assert given == same
        assert dict(given - less).keys() == {"clipped_objective", "clip_fraction"}

    def test_on_two_files_that_are_the_same(self, monkeypatch):
        monkeypatch.setattr(grade, "results_of", lambda *_: (None, "not run", []))
        seen = {}
        texts = {"ann": SIX_LINES, "bob": SIX_LINES.replace("centred", "c"), "cy": GSPO}
        same = []
        for name, text in texts.items():
            row = grade.grade(MATHS, f"{name}.py", text, seen)
            same.append("the same code as in ann.py" in row["remark"])
        assert same == [False, True, False]
