"""The hand-out, the grader of a student's file, and the table of a class.

    python -m pytest tests/test_grader.py             half a minute on a CPU
"""
import ast
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lesson import teach
from test_gspo import functions_in, load

ROOT = Path(__file__).resolve().parents[1]
GSPO = (ROOT / "gspo.py").read_text(encoding="utf-8")
FUNCTIONS = teach.public_functions()


def command(*arguments, **options):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def changed(*changes):
    """gspo.py with these changes, each (what stands there, what shall)."""
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


class TestHandOut:
    def test_keeps_the_docstrings_and_no_body(self, handed_out):
        stubs = functions_in(handed_out / "my_gspo.py")
        given = functions_in(ROOT / "gspo.py")
        assert [*stubs] == FUNCTIONS
        for name, stub in stubs.items():
            assert ast.get_docstring(stub) == ast.get_docstring(given[name])
            assert ast.unparse(stub.args) == ast.unparse(given[name].args)
            assert ast.unparse(stub.body[1:]) == "raise NotImplementedError"

    def test_has_no_answer_in_its_tests(self, handed_out):
        """No statement of gspo.py's functions, nor a call of torch that would do the work."""
        tests = ast.parse((handed_out / "test_gspo.py").read_text(encoding="utf-8"))
        statements = {ast.unparse(node) for node in ast.walk(tests) if isinstance(node, ast.stmt)}
        for function in functions_in(ROOT / "gspo.py").values():
            for node in ast.walk(function):
                if isinstance(node, (ast.Assign, ast.Return)):
                    assert ast.unparse(node) not in statements
        text = (handed_out / "test_gspo.py").read_text(encoding="utf-8")
        for word in (".log_softmax(", ".gather(", "clamp(", "minimum(", "def right_", "csv"):
            assert word not in text

    def test_grades_without_gspo_py(self, handed_out):
        done = command("-m", "pytest", "-x", "-q", "test_gspo.py", cwd=handed_out,
                       env={**os.environ, "GSPO": "my_gspo.py"})
        assert done.returncode == 1
        assert "group_advantages (or a helper that it calls) is still to be written" in done.stdout
        assert "During handling" not in done.stdout

    def test_says_how_to_start_where_it_cannot_hand_out(self, handed_out):
        done = command("test_gspo.py", cwd=handed_out)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1 and "python -m pytest" in done.stderr

    def test_overwrites_nothing(self, tmp_path):
        (tmp_path / "test_gspo.py").write_text("mine")
        done = command(ROOT / "lesson" / "teach.py", "--handout", tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        there = tmp_path / "test_gspo.py"
        assert done.stderr == f"{there} is there already: nothing has been written\n"
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]

    def test_may_be_smaller(self, tmp_path):
        (tmp_path / "my_gspo.py").write_text(teach.assignment(["sequence_ratio", "gspo_loss"]))
        stubs = functions_in(tmp_path / "my_gspo.py")
        given = functions_in(ROOT / "gspo.py")
        assert [*stubs] == [*given]
        blank = [name for name in stubs if ast.unparse(stubs[name]) != ast.unparse(given[name])]
        assert blank == ["sequence_ratio", "gspo_loss"]

    def test_is_printed_where_no_folder_is_named(self, capsys, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["test_gspo.py"])
        teach.main()
        assert capsys.readouterr().out == teach.assignment([])

    def test_knows_its_functions(self, tmp_path):
        new = tmp_path / "new"
        done = command(ROOT / "lesson" / "teach.py", "--handout", new, "gspo_loss", "gpso_loss")
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
        assert "no function gpso_loss" in done.stderr and not new.exists()


# ---- a class ------------------------------------------------------------------------------------

RATIO = "    return _token_mean(_log_ratio(log_probs, old_log_probs, mask), mask).exp()"
CLIP = "torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)"
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
    "six_lines": SIX_LINES,
    "hostile": HOSTILE,
    # right, but sequence_ratio is (B, 1), wants a word, and is looked up in the file's own module
    "private": STYLE + changed(
        ("def sequence_ratio(log_probs, old_log_probs, mask)",
         "def sequence_ratio(log_probs, old_log_probs, mask, root=None)"),
        (RATIO, RATIO + "[:, None]"),
        ("    ratio = sequence_ratio(log_probs, old_log_probs, mask)\n    objective",
         "    own = sys.modules[__name__].sequence_ratio\n"
         "    ratio = own(log_probs, old_log_probs, mask, root=True)[:, 0]\n    objective"),
        ("sequence_ratio(log_probs, old_log_probs, mask).detach()[:, None]",
         "sequence_ratio(log_probs, old_log_probs, mask, root=True).detach()")),
    # two mistakes a file, in functions that do not meet
    "no_root, max_for_min": changed(
        (RATIO, RATIO.replace("_token_mean", "_token_sum")),
        ("def _loss(", "def _token_sum(x, mask):\n    return x.sum(dim=1)\n\n\ndef _loss("),
        (CLIP, CLIP.replace("minimum", "maximum"))),
    "self_call, clip_without_min": changed(
        (RATIO, "    return sequence_ratio(log_probs, old_log_probs, mask)"),
        (CLIP, "ratio.clamp(1 - eps_low, 1 + eps_high) * advantages")),
    "sign, swapped_eps": changed(
        ("return -objective.sum()", "return objective.sum()"),
        ("(1 - eps_low, 1 + eps_high)", "(1 - eps_high, 1 + eps_low)")),
    "no_upcast": changed(("return x.to(torch.promote_types(x.dtype, torch.float32))", "return x")),
    "imports": "from gspo import *",
    "killed": "import os\nimport signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "loops": "while True:\n    pass",
}


@pytest.fixture(scope="module")
def grades(tmp_path_factory):
    """{name: its row} of the class above, two at a time."""
    folder = tmp_path_factory.mktemp("class")
    for name, text in CLASS.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    with ThreadPoolExecutor(2) as pool:
        rows = pool.map(teach.grade, [folder / f"{name}.py" for name in CLASS])
        return dict(zip(CLASS, rows, strict=True))


def lost(row, kind):
    """{function: tests lost} of one kind."""
    points = {name: row[f"{name} {kind}"] for name in FUNCTIONS}
    return {name: of - passed for name, (passed, of) in points.items() if passed < of}


class TestPoints:
    def test_of_the_six_lines_are_all_of_the_maths(self, grades):
        row = grades["six_lines"]
        assert row["total maths"][0] == row["total maths"][1] > 90
        assert row["total promises"][0] < row["total promises"][1] / 3

    def test_order_by_understanding(self, grades):
        """In maths a missing upcast costs nothing, swapped eps little, a clip without the min more,
        the max for the min still more. Nothing is left of sequence_ratio without the root."""
        assert lost(grades["no_upcast"], "maths") == {}
        assert 5 <= sum(lost(grades["no_upcast"], "promises").values()) <= 8
        order = ("sign, swapped_eps", "self_call, clip_without_min", "no_root, max_for_min")
        clips = [lost(grades[name], "maths")["clipped_objective"] for name in order]
        assert 3 <= clips[0] < clips[1] < clips[2]
        assert grades["no_root, max_for_min"]["sequence_ratio maths"][0] == 0

    def test_are_lost_where_the_mistake_is(self, grades):
        row = grades["no_root, max_for_min"]
        assert [*lost(row, "maths")] == ["sequence_ratio", "clipped_objective"]
        lent = "gspo_loss: tested with a right clipped_objective and sequence_ratio; word for word"
        assert lent in row["remark"]

    def test_lost_to_one_helper_say_so(self, grades):
        row = grades["sign, swapped_eps"]
        losses = ["clipped_objective", "gspo_loss", "gspo_token_loss", "grpo_loss"]
        assert [*lost(row, "maths")] == losses
        assert "grpo_loss: perhaps gspo_loss's mistake, both call _loss: " in row["remark"]

    def test_are_not_lost_to_a_convention_of_ones_own(self, grades):
        """sequence_ratio's shape is wrong; nothing else is, and nothing is lent in its place."""
        row = grades["private"]
        assert [*lost(row, "maths")] == [*lost(row, "promises")] == ["sequence_ratio"]
        assert "tested with" not in row["remark"]

    def test_are_not_earned_by_a_function_that_calls_itself(self, grades):
        row = grades["self_call, clip_without_min"]
        assert row["sequence_ratio maths"][0] == row["sequence_ratio promises"][0] == 0
        assert [*lost(row, "maths")] == ["sequence_ratio", "clipped_objective"]


class TestHostileFiles:
    @pytest.mark.parametrize("said", [
        "leaves a thread running",
        "group_advantages: an endless loop? It has not ended after 5.0 seconds",
        "token_log_probs: token_log_probs ends the run or its test (SystemExit)",
        "sequence_ratio: OSError: pytest: reading from stdin",
        "clipped_objective: clipped_objective ends the run or its test (Skipped)",
        "gspo_token_loss: gspo_token_loss ends the run or its test (SystemExit)",
        "grpo_loss: return a tensor, not a float",
        "clip_fraction: hostile.py has no function clip_fraction"])
    def test_get_a_row_that_says_what_happened(self, grades, said):
        row = grades["hostile"]
        assert (row["total maths"][0], row["total promises"][0]) == (0, 0)
        assert said in row["remark"]

    @pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
    def test_get_at_most_4_GB(self, grades):
        assert re.search("gspo_loss: RuntimeError: .*allocate memory", grades["hostile"]["remark"])

    @pytest.mark.parametrize("name, said", [
        ("imports", "does not load: line 1: ModuleNotFoundError: import of gspo halted"),
        ("loops", "does not load: line .: Failed: an endless loop?"),
        ("killed", "died .exit code -9")])
    def test_have_no_points_where_they_do_not_load(self, grades, name, said):
        assert re.match(said, grades[name]["remark"]) and grades[name]["total maths"][0] == 0

    def test_end_where_no_alarm_is_heard(self, tmp_path):
        """A copy of the tests that waits one second, as on a system without alarms."""
        tests = (ROOT / "test_gspo.py").read_text(encoding="utf-8")
        tests = re.sub("SECONDS = 60", "SECONDS = 1", re.sub("ALARM = .*", "ALARM = False", tests))
        (tmp_path / "test_gspo.py").write_text(tests, encoding="utf-8")
        (tmp_path / "hostile.py").write_text(HOSTILE)
        done = command("-m", "pytest", "-q", "--tb=no", "test_gspo.py", cwd=tmp_path,
                       env={**os.environ, "GSPO": "hostile.py"})
        assert done.returncode == 2
        end = "hostile.py has not ended after 1 seconds, an endless loop? (TestMathsOfGroupAdv"
        assert end in done.stdout
        assert re.search(r"^total +maths +0 of", done.stdout, re.MULTILINE)

    @pytest.mark.parametrize("text, why", [
        ("def f(:", "SyntaxError: invalid syntax (my_gspo.py, line 1)"),
        ("import sys\nsys.exit(0)", "line 2: SystemExit: 0"),
        ("\ntorch.ones(1)", "line 2: NameError: name 'torch' is not defined")])
    def test_say_in_one_line_why_they_do_not_load(self, tmp_path, text, why):
        (tmp_path / "my_gspo.py").write_text(text, encoding="utf-8")
        with pytest.raises(pytest.exit.Exception) as end:
            load(tmp_path / "my_gspo.py")
        assert str(end.value) == f"my_gspo.py does not load: {why}"


class TestTable:
    @pytest.fixture(autouse=True)
    def graded(self, grades, monkeypatch):
        rows = json.loads(json.dumps(grades))
        rows["gspo"] = rows["six_lines"]
        monkeypatch.setattr(teach, "grade", lambda path: rows[path.stem])

    def test_has_a_line_a_file(self, grades, capsys):
        teach.grade_class([Path("six_lines.py"), Path("killed.py")], as_json=False)
        head, six, killed = capsys.readouterr().out.splitlines()
        full = grades["six_lines"]["total maths"][1]
        assert head.startswith("file,group_advantages maths (of 5),group_advantages promises (of ")
        assert f",total maths (of {full}),total promises (of " in head and head.endswith(",remark")
        assert f",{full}," in six and killed.endswith(",0,0,died (exit code -9)")

    def test_is_json_for_a_program(self, grades, capsys):
        teach.grade_class([Path("six_lines.py"), Path("killed.py")], as_json=True)
        six, killed = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert six == grades["six_lines"]
        assert killed["total maths"] == [0, six["total maths"][1]]
