"""The material for teachers: the commands on its page run, and it names tests that exist."""
import csv
import json
import re
import subprocess
import sys

import pytest

from tests.conftest import TOP

GUIDE = (TOP / "homework" / "teaching.md").read_text(encoding="utf-8")


def blocks_below(heading):
    """The blocks of shell commands in this section of the guide."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## )", GUIDE, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


def run(commands, folder):
    command = ["bash", "-e", "-c", commands.replace("python3 ", f"{sys.executable} ")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_gradescope_gets_points_for_each_function(tmp_path):
    for name in "source", "submission", "results":
        (tmp_path / name).mkdir()
    (tmp_path / "source" / "gspo").symlink_to(TOP)
    right = (TOP / "gspo.py").read_text(encoding="utf-8")
    wrong = right.replace("return (above | below).sum()", "return above.sum()")
    assert wrong != right
    (tmp_path / "submission" / "my_gspo.py").write_text(wrong, encoding="utf-8")
    commands = blocks_below("Gradescope")[1].replace("/tmp/row.json", str(tmp_path / "row.json"))
    run(commands.replace("/autograder", str(tmp_path)), tmp_path)
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert 85 < results["score"] < 100
    assert "clip_fraction" in results["output"]
    tests = {test["name"]: test for test in results["tests"]}
    assert len(tests) == 16
    lost = [name for name, test in tests.items() if test["score"] < test["max_score"]]
    assert "clip_fraction maths" in lost
    assert all(name.startswith("clip_fraction") for name in lost)


@pytest.mark.slow
def test_moodle_gets_a_worksheet_with_the_grades(tmp_path):
    folder = tmp_path / "submissions" / "Ann Lee_4711_assignsubmission_file"
    folder.mkdir(parents=True)
    (folder / "my_gspo.py").write_text('{"cells": []}')  # a notebook has 0 points, and is fast
    (tmp_path / "worksheet.csv").write_text(
        "Identifier,Full name,Grade\nParticipant 4711,Ann Lee,\nParticipant 4712,Bo Li,70\n",
        encoding="utf-8-sig")
    commands = blocks_below("Moodle")[0].replace("test_gspo.py", str(TOP / "test_gspo.py"), 1)
    run(commands, tmp_path)
    rows = list(csv.DictReader((tmp_path / "filled.csv").open(encoding="utf-8")))
    assert [row["Grade"] for row in rows] == ["0.0", "70"]
    assert rows[0]["Full name"] == "Ann Lee"


def test_the_classroom_steps_select_the_tests_of_one_function():
    """Each name for -k is that of two classes of test_gspo.py: the maths and the promises."""
    source = (TOP / "test_gspo.py").read_text(encoding="utf-8")
    section = GUIDE.partition("## GitHub Classroom")[2].partition("## Moodle")[0]
    names = re.findall(r"-k (\w+)", section)
    names += re.findall(r"`([A-Z]\w+)`", section.partition("other names for")[2])
    assert len(set(names)) == 8
    for name in names:
        assert len(re.findall(rf"^class Test(?:Maths|Promises)Of{name}\b", source, re.M)) == 2
