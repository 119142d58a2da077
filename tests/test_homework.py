"""The second homework, the loop with four blanks, and the third, logs of silent bugs.

    python -m pytest tests/test_homework.py           a minute on a CPU
"""
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.logs import read
from lesson import find_the_bug, loop_homework

ROOT = Path(__file__).resolve().parents[1]
SOURCE = (ROOT / "train_math.py").read_text(encoding="utf-8")
BLANKS = ["MicroBatch", "ResponseLogProbs", "Phase3Remember", "Phase4Update", "WholeStep"]


def hand_out(folder):
    command = [sys.executable, ROOT / "lesson" / "loop_homework.py", folder]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "homework"
    done = hand_out(folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def run_tests(folder, name, *flags):
    """The hand-out's tests of this file of a student's."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", *flags, "test_loop.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "LOOP": name, "PYTHONPATH": ""})


def grade(folder, text, name="train_math.py"):
    """{blank: (tests passed, of, what to look at first)} of this text as a student's file."""
    (folder / name).write_text(text, encoding="utf-8")
    done = run_tests(folder, name, "-q", "--tb=no", "-rN", "-p", "no:cacheprovider")
    lines = re.findall(r"^(\w+) +(\d+) of (\d+) *(.*)$", done.stdout, re.MULTILINE)
    return {blank: (int(passed), int(of), hint) for blank, passed, of, hint in lines}


def written(tree):
    """All statements in the tree."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)}


class TestHandOut:
    def test_has_four_blanks_that_say_so(self, folder):
        text = (folder / "train_math.py").read_text(encoding="utf-8")
        assert re.findall(r'raise NotImplementedError\("(.*) is still to be written"\)', text) == [
            "MicroBatch.__init__", "response_log_probs", "phase 3", "phase 4"]
        bodies = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                bodies[node.name] = node.body
        assert len(bodies["__init__"]) == 1
        assert len(bodies["response_log_probs"]) == 2  # the docstring, too
        for node in bodies["train_step"]:
            assert not isinstance(node, (ast.For, ast.With))

    def test_differs_in_the_blanks_alone(self, folder):
        """All other lines are train_math.py's, in their order; docstrings among them."""
        lines = (folder / "train_math.py").read_text(encoding="utf-8").splitlines()
        answered = set()
        for body in loop_homework.statements(SOURCE.splitlines()).values():
            answered.update(range(body[0].lineno, body[-1].end_lineno + 1))
        given = iter(lines)
        for number, line in enumerate(SOURCE.splitlines(), 1):
            assert number in answered or line in given, line
        for hint in loop_homework.HINTS.values():
            assert set(hint.splitlines()[1:]) <= set(lines)

    def test_has_no_answer(self, folder):
        """No statement that is left out stands anywhere in the hand-out, the tests included."""
        handed_out = set()
        for name in "train_math.py", "test_loop.py":
            text = (folder / name).read_text(encoding="utf-8")
            handed_out |= written(ast.parse(text))
        answers = set()
        for body in loop_homework.statements(SOURCE.splitlines()).values():
            for node in body:
                answers |= written(node)
        assert len(answers) > 20
        assert not handed_out & answers

    def test_overwrites_nothing(self, tmp_path):
        (tmp_path / "gspo.py").write_text("mine")
        done = hand_out(tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        there = tmp_path / "gspo.py"
        assert done.stderr == f"{there} is there already: nothing has been written\n"
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


class TestGrade:
    def test_of_the_hand_out_is_nothing_and_names_the_blanks(self, folder):
        text = (folder / "train_math.py").read_text(encoding="utf-8")
        got = grade(folder, text)
        assert list(got) == BLANKS
        assert all(passed == 0 and "is still to be written" in hint
                   for passed, _, hint in got.values())

    def test_of_train_math_is_all(self, folder):
        got = grade(folder, SOURCE, "right.py")
        assert list(got) == BLANKS
        assert all(passed == of > 0 and not hint for passed, of, hint in got.values())

    def test_of_three_mistakes_is_less_in_their_three_blanks(self, folder):
        mistakes = {
            "MicroBatch": ("arange(1, len(x)) >=", "arange(1, len(x)) >", "response tokens"),
            "Phase3Remember": ("value = loss(log_probs, batch.old_log_probs,",
                               "value = loss(log_probs, log_probs.detach(),", "taken once"),
            "Phase4Update": ("        optimizer.zero_grad()\n", "", "zero_grad")}
        text = SOURCE
        for right, wrong, _ in mistakes.values():
            assert text.count(right) == 1
            text = text.replace(right, wrong)
        got = grade(folder, text, "wrong.py")
        missed = {name for name, (passed, of, _) in got.items() if passed < of}
        assert missed - {"WholeStep"} == set(mistakes)
        for blank, (_, _, hint) in mistakes.items():
            assert hint in got[blank][2]

    def test_of_a_file_that_does_not_load_is_a_line(self, folder):
        (folder / "broken.py").write_text("import nothing_of_this_name")
        done = run_tests(folder, "broken.py", "-q")
        assert done.returncode == 2
        assert "broken.py does not load: ModuleNotFoundError" in done.stdout


@pytest.fixture
def logs():
    """{what is wrong: its rollouts}, as committed."""
    return {name: read(find_the_bug.FOLDER / f"{letter}.jsonl")[1:]
            for letter, name in find_the_bug.answers().items()}


class TestFindTheBug:
    def test_has_seven_logs_of_eight_rollouts(self, logs):
        kept = {path.name for path in find_the_bug.FOLDER.iterdir()}
        assert kept == {"bugs.png", *(f"{letter}.jsonl" for letter in "abcdefg")}
        assert list(find_the_bug.answers()) == list("abcdefg")
        assert set(logs) == set(list(find_the_bug.BUGS)[:7])
        assert "nothing" in logs
        assert all([row["step"] for row in rows] == list(range(1, 9)) for rows in logs.values())

    def test_gives_nothing_away_in_the_settings(self):
        """The first rows are the same: settings, and how right the start is."""
        firsts = {path.read_text().partition("\n")[0]
                  for path in find_the_bug.FOLDER.glob("*.jsonl")}
        assert len(firsts) == 1
        assert not re.search("eps_|/|temperature", firsts.pop())

    def test_shows_each_bug_where_the_answers_say(self, logs):
        found = {
            "advantages over": lambda row: row["equal_reward_groups"] == 0,
            "advantages do": lambda row: row["reward"] < 0.27 and row["grad_norm"] < 0.6,
            "zero_grad": lambda row: 1 < row["grad_norm"] < 2 and row["loss"] ** 2 > 1e-12,
            "GRPO": lambda row: row["clip_fraction"] < 0.21,
            "the ratio": lambda row: abs(row["loss"]) < 1e-7,
            "no root": lambda row: row["grad_norm"] > 2}
        for start, shown in found.items():
            names = [name for name, rows in logs.items() if all(map(shown, rows))]
            assert len(names) == 1 and names[0].startswith(start), (start, names)

    def test_has_its_answers_in_the_page(self):
        page = (ROOT / "lesson" / "find_the_bug.md").read_text(encoding="utf-8")
        exercise, answers = page.split("<details><summary>Answers")
        for letter, name in find_the_bug.answers().items():
            assert f"| {name} | |" in exercise
            assert f"| {letter} | {name} |" in answers
        assert re.findall(r"^- \*\*(.)\*\*", answers, re.MULTILINE) == list("acdefg")  # b is right

    def test_has_all_bugs_in_the_table(self):
        lines = find_the_bug.TABLE.read_text(encoding="utf-8").splitlines()
        names = [line.split(" | ")[0].removeprefix("| ") for line in lines if line[:2] == "| "]
        assert names == ["wrong", *find_the_bug.BUGS]
