"""The hand-out, and the grader of a student's file and of a class.

    python -m pytest tests/test_grader.py             two minutes on a CPU
"""
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

import test_gspo
from lesson import class_grades, teach
from lesson.class_grades import functions_of

ROOT = Path(__file__).resolve().parents[1]
GSPO = (ROOT / "gspo.py").read_text(encoding="utf-8").partition('\nif __name__ == "__main__"')[0]
FUNCTIONS = list(teach.BLANKS)
GIVEN = functions_of(GSPO)


def command(*arguments, **options):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


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
    done = command(ROOT / "test_gspo.py", "--handout", folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def functions_in(path):
    return functions_of(path.read_text(encoding="utf-8"))


class TestHandOut:
    def test_has_the_assignment_its_tests_and_the_grader(self, handed_out):
        names = {path.name for path in handed_out.iterdir()}
        assert names == {"my_gspo.py", "test_gspo.py", "grading.py"}

    def test_keeps_the_docstrings_and_no_body(self, handed_out):
        stubs = functions_in(handed_out / "my_gspo.py")
        assert [*stubs] == FUNCTIONS
        for name, stub in stubs.items():
            assert ast.get_docstring(stub) == ast.get_docstring(GIVEN[name])
            assert ast.unparse(stub.args) == ast.unparse(GIVEN[name].args)
            assert ast.unparse(stub.body[1:]) == "raise NotImplementedError"

    def test_has_no_answer_in_its_tests(self, handed_out):
        """No statement of gspo.py's functions, nor a call of torch that would do the work."""
        for name in "test_gspo.py", "grading.py":
            text = (handed_out / name).read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(text)))
            statements = {ast.unparse(node) for node in nodes if isinstance(node, ast.stmt)}
            for function in GIVEN.values():
                for node in ast.walk(function):
                    if isinstance(node, (ast.Assign, ast.Return)):
                        assert ast.unparse(node) not in statements - {"return None"}
            for word in (".log_softmax(", ".gather(", "clamp(", "minimum(", "def right_", "csv"):
                assert word not in text

    def test_grades_without_gspo_py(self, handed_out):
        done = command("-m", "pytest", "-x", "-q", "test_gspo.py", cwd=handed_out,
                       env={**os.environ, "GSPO": "my_gspo.py"})
        assert done.returncode == 1
        assert "is still to be written" in done.stdout
        assert re.search("^total .* grade 0.0%$", done.stdout, re.MULTILINE)

    @pytest.mark.parametrize("folder, names, said", [
        ("there", [], "grading.py exists already, so nothing was written"),
        ("new", ["gspo_loss", "gpso_loss"], "there is no blank gpso_loss"),
    ])
    def test_overwrites_nothing_and_knows_its_blanks(
            self, tmp_path, monkeypatch, capsys, folder, names, said):
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "grading.py").write_text("mine")
        argv = ["test_gspo.py", "--handout", str(tmp_path / folder), *names]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stop:
            teach.main()
        out, err = capsys.readouterr()
        assert (stop.value.code, out, err.count("\n")) == (2, "", 1) and said in err
        assert [path.name for path in tmp_path.rglob("*")] == ["there", "grading.py"]
        assert (tmp_path / "there" / "grading.py").read_text() == "mine"

    def test_may_be_smaller(self):
        stubs = functions_of(teach.assignment(["sequence_ratio", "gspo_loss"]))
        assert [*stubs] == [*GIVEN]
        blank = [name for name in stubs if ast.unparse(stubs[name]) != ast.unparse(GIVEN[name])]
        assert blank == ["sequence_ratio", "gspo_loss"]

# ---- a class ------------------------------------------------------------------------------------


RATIO = "    return _token_mean(_log_ratio(log_probs, old_log_probs, mask), mask).exp()"
CLIP = "torch.minimum(ratio * advantages, clipped * advantages)"
NO_ROOT = RATIO.replace("_token_mean(", "(").replace(", mask).exp()", ").sum(dim=1).exp()")
NO_GROUP = [
    ("groups.mean(dim=1, keepdim=True)", "groups.mean()"),
    ("groups.std(dim=1, keepdim=True)", "groups.std()"),
    ("    groups = groups - groups[:, :1]\n", ""),
]
SIX_LINES = '''
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
'''
HOSTILE = '''
import os
import sys
import threading
import time

import pytest
import torch

threading.Thread(target=time.sleep, args=(100,)).start()


def group_advantages(*arguments, **keywords):
    while True:
        pass


def token_log_probs(*arguments, **keywords):
    os._exit(0)


def sequence_ratio(*arguments, **keywords):
    return input()


def clipped_objective(*arguments, **keywords):
    pytest.skip()


def gspo_loss(*arguments, **keywords):
    size = 50 * 10 ** 9 if sys.platform == "linux" else 1  # where memory is limited
    return torch.ones(size, dtype=torch.uint8)


def gspo_token_loss(*arguments, **keywords):
    sys.exit(0)


def grpo_loss(*arguments, **keywords):
    return 0.5
'''
STYLE = '''from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass
class Range:
    low: float
    high: float


PLACE = __file__


'''
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
    "mean_of_all_tokens": changed(
        ("return _loss(_token_mean(objective, mask), denominator)",
         "return _loss(_weighted(objective, mask), denominator)")) + """

def _weighted(x, mask):
    return x.sum(dim=1) / mask.sum() * len(mask)
""",
    "no_group": changed(*NO_GROUP),
    "loss_over_T": changed(
        ("return _loss(_token_mean(objective, mask), denominator)",
         "return _loss(_over_T(objective), denominator)")) + """

def _over_T(x):
    return x.sum(dim=1) / x.shape[1]
""",
    "no_upcast": changed(("return x.to(torch.promote_types(x.dtype, torch.float32))", "return x")),
    "crashes": changed(
        ("    _require(rewards.dim() == 1, rewards=rewards)",
         "    import ctypes\n    ctypes.string_at(0)"),
        ("    own = _log_ratio", "    raise KeyboardInterrupt\n    own = _log_ratio")),
    # one change as the file is loaded, and one in a function
    "globals": changed(
        ("    _require(rewards.dim() == 1, rewards=rewards)",
         "    torch.set_grad_enabled(False)\n"
         "    _require(rewards.dim() == 1, rewards=rewards)")) + """
torch.set_default_dtype(torch.bfloat16)
""",
    "imports": "from gspo import *",
    "killed": "import os\nimport signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "loops": "while True:\n    pass",
}


@pytest.fixture(scope="module")
def grades(tmp_path_factory):
    """The graded class, {name: row}. Its tests are a copy whose limit of CPU time is one second."""
    folder = tmp_path_factory.mktemp("tests")
    for path in ROOT / "gspo.py", ROOT / "test_gspo.py", ROOT / "lesson" / "grading.py":
        text = path.read_text(encoding="utf-8")
        text = text.replace("\nCPU_SECONDS = 5 ", "\nCPU_SECONDS = 1 ")
        (folder / path.name).write_text(text, encoding="utf-8")
    homework = dataclasses.replace(teach.homework(), tests=folder / "test_gspo.py")
    return {name: class_grades.grade(homework, f"{name}.py", text) for name, text in CLASS.items()}


def lost(row, kind):
    """{function: number of failed tests} of one kind."""
    points = {name: row[f"{name} {kind}"] for name in FUNCTIONS}
    return {name: of - passed for name, (passed, of) in points.items() if passed < of}


class TestPoints:
    def test_of_a_correct_file_are_full(self, grades):
        row = grades["right"]
        assert row["grade"] == 100 and lost(row, "maths") == lost(row, "promises") == {}

    def test_of_the_six_lines_are_full_in_the_maths(self, grades):
        row = grades["six_lines"]
        assert row["total maths"][0] == row["total maths"][1] > 90
        assert row["total promises"][0] < row["total promises"][1] / 2

    def test_of_one_kind_alone_are_all_of_the_grade(self):
        done = command("-m", "pytest", "-q", "-k", "MathsOfClipFraction", ROOT / "test_gspo.py",
                       env={**os.environ, "GSPO": str(ROOT / "gspo.py")})
        assert done.returncode == 0
        assert re.search("^total .* promises +0 of +0 +grade 100.0%$", done.stdout, re.MULTILINE)

    def test_rank_files_by_the_kind_of_mistake(self, grades):
        """Best first: a wrong shape or dtype, a naive file, a mistake in the maths, two of them."""
        order = [
            {"right"}, {"private"}, {"no_upcast"}, {"six_lines"},
            {"no_group", "sign", "sum", "sum_by_default", "mean_of_all_tokens"},
            {"self_call, clip_without_min", "no_root, max_for_min"}, {"killed"},
        ]
        for better, worse in zip(order, order[1:]):
            least = min(grades[name]["grade"] for name in better)
            assert least > max(grades[name]["grade"] for name in worse), (better, worse)

    def test_are_counted_by_function(self, grades):
        """One of eight functions fails 3 of 5 tests of the maths, and 1 of 6 promises."""
        row = grades["no_group"]
        assert lost(row, "maths") == {"group_advantages": 3}
        assert lost(row, "promises") == {"group_advantages": 1}
        maths = 90 * (1 - 2 / 5 / 3) / 8
        promises = 10 * (1 - 5 / 6 / 3) / 8
        assert row["grade"] == pytest.approx(100 - maths - promises, abs=0.05)

    def test_are_lost_where_the_mistake_is(self, grades):
        row = grades["no_root, max_for_min"]
        assert [*lost(row, "maths")] == ["sequence_ratio", "clipped_objective"]
        lent = "gspo_loss: tested with a correct sequence_ratio and clipped_objective"
        assert lent in row["remark"]

    @pytest.mark.parametrize("name, first, said", [
        ("sign", "gspo_loss", "the sign is wrong"),
        ("sum", "gspo_loss", "the sum over responses is not divided"),
        ("sum_by_default", "gspo_loss", "the sum over responses is divided only by a given denomi"),
        ("mean_of_all_tokens", "gspo_token_loss", "the mean is over the tokens of all responses"),
    ])
    def test_are_lost_only_once_to_the_same_slip(self, grades, name, first, said):
        row = grades[name]
        assert [*lost(row, "maths")] == [first]
        assert re.search(f"; grpo_loss: {said}.*, as in {first}, where it", row["remark"])
        if first == "gspo_loss":
            assert [*lost(row, "promises")] == [first]

    def test_lost_to_a_shared_helper_have_a_remark(self, grades):
        row = grades["loss_over_T"]
        assert [*lost(row, "maths")] == ["gspo_token_loss", "grpo_loss"]
        assert "perhaps this is the same mistake as in gspo_token_loss" in row["remark"]

    def test_are_not_lost_to_an_own_convention(self, grades):
        """sequence_ratio's shape is wrong, which is a promise; nothing else is."""
        row = grades["private"]
        assert lost(row, "maths") == {} and lost(row, "promises") == {"sequence_ratio": 1}
        assert "tested with" not in row["remark"]

    def test_are_not_earned_by_a_function_that_calls_itself(self, grades):
        row = grades["self_call, clip_without_min"]
        assert row["sequence_ratio maths"][0] == 0
        assert row["sequence_ratio promises"][0] <= 1  # a check of its arguments comes first
        assert [*lost(row, "maths")] == ["sequence_ratio", "clipped_objective"]


class TestHints:
    @pytest.mark.parametrize("function, hint", [
        (lambda x: x.sum(1).exp(), "the power 1/|y| is missing"),
        (lambda x: x.exp().mean(1), "take the geometric mean"),
        (lambda x: (-x).mean(1).exp(), "upside down"),
        (lambda x: x.mean(1), "this is log s: exp is missing"),
        (lambda x: x.sum(1), "divide it by |y|, then take exp"),
        (lambda x: x[:, 1:].mean(1).exp(), "one token does not count"),
    ])
    def test_tell_mistakes_in_the_ratio_apart(self, function, hint, monkeypatch):
        functions = {"sequence_ratio": lambda new, old, mask: function(new - old)}
        monkeypatch.setattr(test_gspo.gspo, "functions", functions)
        with pytest.raises(pytest.fail.Exception, match=re.escape(hint)):
            test_gspo.TestMathsOfSequenceRatio().test_is_the_geometric_mean_of_the_token_ratios()

    @pytest.mark.parametrize("average, hint", [
        (lambda x, mask: x.sum() / mask.sum(), "the mean over the tokens of all responses"),
        (lambda x, mask: x.sum(1).mean(), "this is a sum over the tokens, but"),
        (lambda x, mask: x.mean(), "this is a sum over the tokens divided by T"),
        (lambda x, mask: (x.sum(1) / mask.sum(1)).sum(), "this is the sum over responses"),
    ])
    def test_tell_wrong_averages_apart(self, average, hint, monkeypatch):
        def loss(new, old, advantages, mask, *clip_range):
            ratio = (new - old).exp()
            objective = test_gspo.load(ROOT / "gspo.py").clipped_objective(
                ratio, advantages[:, None], *clip_range)
            return -average(objective * mask, mask)

        monkeypatch.setattr(test_gspo.gspo, "functions", {"grpo_loss": loss})
        tests = test_gspo.TestMathsOfGrpoLoss()
        with pytest.raises(pytest.fail.Exception, match=hint):
            tests.test_of_unchanged_log_probs_is_minus_the_mean_advantage()
        with pytest.raises(pytest.fail.Exception, match=hint):
            tests.test_of_four_responses_is_their_mean(10, 0.0, "")

    @pytest.mark.parametrize("ratio, advantage, value", [(2.0, 1.0, 1.5), (0.5, -1.0, -0.8)])
    def test_tell_a_clipped_log_ratio_from_other_mistakes(
            self, ratio, advantage, value, monkeypatch):
        def objective(ratio, advantages, eps_low, eps_high):
            clipped = ratio.log().clamp(-eps_low, eps_high).exp()
            return torch.minimum(ratio * advantages, clipped * advantages)

        monkeypatch.setattr(test_gspo.gspo, "functions", {"clipped_objective": objective})
        tests = test_gspo.TestMathsOfClippedObjective()
        with pytest.raises(pytest.fail.Exception, match="clip the ratio itself, not its log"):
            tests.test_is_the_smaller_of_clipped_and_unclipped(ratio, advantage, value, 0, "")

    def test_do_not_blame_the_gradient_for_the_value(self, monkeypatch):
        """A loss with a correct value and no gradient fails in the tests of the gradient."""
        def loss(*arguments, **keywords):
            return test_gspo.gspo_right.gspo_loss(*arguments, **keywords).detach()

        right = test_gspo.load(ROOT / "gspo.py")
        monkeypatch.setattr(test_gspo, "gspo_right", right, raising=False)
        monkeypatch.setattr(test_gspo.gspo, "functions", {"gspo_loss": loss})
        tests = test_gspo.TestMathsOfGspoLoss()
        tests.test_of_one_response(0)
        with pytest.raises(pytest.fail.Exception, match="no gradient comes through"):
            tests.test_of_one_response_has_the_papers_gradient(0)


class TestHostileFiles:
    def test_have_no_points_and_a_row_that_says_what_happened(self, grades):
        row = grades["hostile"]
        assert row["grade"] == row["total maths"][0] == row["total promises"][0] == 0
        for said in (
            "leaves a thread running",
            "group_advantages: is there an endless loop?",
            "token_log_probs: token_log_probs ends the run or its test (SystemExit)",
            "sequence_ratio: OSError: pytest: reading from stdin",
            "clipped_objective: clipped_objective ends the run or its test (Skipped)",
            "gspo_token_loss: gspo_token_loss ends the run or its test (SystemExit)",
            "grpo_loss: return a tensor, not a float",
            "clip_fraction: hostile.py has no function clip_fraction",
        ):
            assert said in row["remark"]

    @pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
    def test_get_at_most_4_GB(self, grades):
        assert re.search("gspo_loss: RuntimeError: .*allocate memory", grades["hostile"]["remark"])

    @pytest.mark.parametrize("name, said", [
        ("imports", "does not load: line 1: ModuleNotFoundError: import of gspo halted"),
        ("loops", "does not load: line .: Failed: is there an endless loop?"),
        ("killed", "ends the process .SIGKILL.")])
    def test_have_no_points_where_they_do_not_load(self, grades, name, said):
        assert re.match(said, grades[name]["remark"]) and grades[name]["grade"] == 0

    def test_lose_the_points_of_the_functions_that_crash(self, grades):
        row = grades["crashes"]
        assert [*lost(row, "maths")] == ["group_advantages", "gspo_token_loss"]
        assert "group_advantages: ends the process (SIGSEGV)" in row["remark"]
        assert "gspo_token_loss: ends the run (KeyboardInterrupt)" in row["remark"]
        assert row["grade"] == 75

    def test_do_not_change_torch_for_the_tests(self, grades):
        row = grades["globals"]
        assert row["grade"] == 100
        assert "changes torch's default dtype" in row["remark"]
        assert "changes torch's gradient mode" in row["remark"]

    def test_end_where_no_signal_is_heard(self, tmp_path):
        """Copies of the tests and the grader have a limit of one second and no signal."""
        (tmp_path / "test_gspo.py").write_bytes((ROOT / "test_gspo.py").read_bytes())
        grading = (ROOT / "lesson" / "grading.py").read_text(encoding="utf-8")
        grading = re.sub(r"\nSECONDS = 60 ", "\nSECONDS = 1 ", grading)
        grading = re.sub("HAS_ALARM = .*", "HAS_ALARM = False", grading)
        (tmp_path / "grading.py").write_text(grading, encoding="utf-8")
        (tmp_path / "hostile.py").write_text(HOSTILE)
        done = command("-m", "pytest", "-q", "--tb=no", "test_gspo.py", cwd=tmp_path,
                       env={**os.environ, "GSPO": "hostile.py"})
        assert done.returncode == 2
        end = "hostile.py has not ended after 1 seconds: is there an endless loop"
        assert end in done.stdout

    def test_do_not_outlive_the_grader(self, tmp_path):
        """A process that the file has started is killed with it."""
        where = tmp_path / "pid"
        text = f"""
import subprocess
open({str(where)!r}, "w").write(str(subprocess.Popen(["sleep", "300"]).pid))
"""
        row = class_grades.grade(teach.homework(), "starts.py", text)
        assert "mentions open, subprocess: read the file" in row["remark"]
        for _ in range(50):
            state = command("-c", f"import os; os.kill({where.read_text()}, 0)")
            stat = Path(f"/proc/{where.read_text()}/stat")
            if state.returncode or (stat.exists() and ") Z " in stat.read_text()):
                return
            time.sleep(0.1)
        raise AssertionError("it is still alive")

    def test_cannot_change_a_later_file(self, tmp_path, capsys):
        """All files are read before the first one runs."""
        later = tmp_path / "later.py"
        later.write_text("def f(:")
        first = tmp_path / "first.py"
        first.write_text(f"open({str(later)!r}, 'w').close()\n1 / 0")
        full = {"file": "gspo.py", "grade": 100.0, "total maths": [1, 1], "remark": ""}
        class_grades.grade_class(teach.homework(), [first, later], as_json=True, full=full)
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert later.read_text() == ""
        assert "ZeroDivisionError" in rows[0]["remark"] and "SyntaxError" in rows[1]["remark"]

    def test_that_forge_their_results_are_to_be_read(self):
        """The file writes the grader's last line itself, and ends its process."""
        parts = {name: [{"maths": [9, 9], "promises": [9, 9]}, ""] for name in FUNCTIONS}
        total = {"maths": [72, 72], "promises": [72, 72]}
        line = json.dumps({"grade": 100.0, "parts": parts, "total": total, "state": []})
        text = f"""
import os
open(os.environ["GRADE_LOG"], "a").write({line!r})
os.kill(os.getpid(), 9)
"""
        row = class_grades.grade(teach.homework(), "forged.py", text)
        assert "its tests ended with the exit code -9: read the file" in row["remark"]
        assert "mentions environ, kill, open: read the file" in row["remark"]


class TestRemarks:
    def test_on_code_that_is_the_same_except_for_names_and_docstrings(self):
        own = GSPO.replace("_token_mean", "average").replace("log_ratio", "difference")
        for name in FUNCTIONS:
            own = own.replace(ast.get_docstring(GIVEN[name], clean=False), "Mine.")
        homework = teach.homework()
        assert own.count("Mine.") == len(FUNCTIONS)
        assert class_grades.fingerprints(homework, own) == class_grades.fingerprints(homework, GSPO)
        other = own.replace("1 + eps_high", "eps_high + 1")
        same = class_grades.fingerprints(homework, other).items() & class_grades.fingerprints(
            homework, GSPO).items()
        assert {name for name, _ in same} == set(FUNCTIONS) - {"clipped_objective", "clip_fraction"}

    def test_name_what_is_copied(self, grades):
        assert f"the same code as in gspo.py: {', '.join(FUNCTIONS)}" in grades["right"]["remark"]
        assert "same code" not in grades["six_lines"]["remark"]

    def test_on_two_files_that_are_the_same(self, monkeypatch):
        monkeypatch.setattr(class_grades, "results_of", lambda *_: (None, "not run", []))
        seen = {}
        texts = {"ann": SIX_LINES, "bob": SIX_LINES.replace("centred", "c"), "cy": GSPO}
        same = []
        for name, text in texts.items():
            row = class_grades.grade(teach.homework(), f"{name}.py", text, seen)
            same.append("the same code as in ann.py" in row["remark"])
        assert same == [False, True, False]

    def test_are_silent_on_an_honest_file(self, grades):
        for name in "right", "six_lines", "no_upcast":
            assert "mentions" not in grades[name]["remark"]
