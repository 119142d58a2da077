"""lesson/notebook.ipynb: its code cells run in order, without Jupyter."""
import json
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import TOP

CELLS = json.loads((TOP / "lesson" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
TEXT = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")


def execute(cells, folder):
    """Runs these cells in one process that starts in this folder, with one rollout per run."""
    program = "import json, sys\nnames = {}\n"
    program += "for cell in json.load(sys.stdin):\n    exec(cell, names)\n"
    environment = {**os.environ, "NOTEBOOK_STEPS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(cells), capture_output=True, text=True,
        cwd=folder, env=environment,
    )


@pytest.mark.slow
def test_runs_from_the_first_cell_to_the_last():
    done = execute(CODE, TOP / "lesson")
    assert done.returncode == 0, done.stderr
    assert "[1.5, -0.5, -0.5, -0.5]\n[0.0, 0.0, 0.0, 0.0]\n" in done.stdout
    assert "gspo_loss  A = +1  [0.0, 0.0, 0.0, 0.0]" in done.stdout
    assert "grpo_loss  A = +1  [0.0, 1.0, 1.0, 1.0]" in done.stdout
    for name in ("loss", "gradient norm"):
        ours, tested = re.search(rf"^{name} +(\S+)  (\S+)$", done.stdout, re.MULTILINE).groups()
        assert ours == tested and float(tested) != 0
    assert len(re.findall(r"^step 1/1 ", done.stdout, re.MULTILINE)) == 3
    found = re.findall(r"^(.*\S) +held-out accuracy 9.7% -> (\S+)%", done.stdout, re.MULTILINE)
    assert [name for name, _ in found] == ["GSPO", "no clipping", "GRPO"]
    assert done.stdout.count("a picture: ") == 2


def test_holds_no_output_says_how_to_shorten_it_and_links_to_files():
    assert 12 <= len(CELLS) <= 20
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)
    assert "NOTEBOOK_STEPS" in CODE[0] and "OMP_NUM_THREADS" in CODE[0]
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", TEXT):
        assert (TOP / "lesson" / link).exists(), link


def test_clones_the_repository_if_it_is_not_in_one(tmp_path):
    source, here = tmp_path / "source", tmp_path / "here"
    source.mkdir()
    here.mkdir()
    for name in "train_math.py", "requirements.txt":
        (source / name).write_text("")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=source, check=True)
    assert "Put its address into REPOSITORY" in execute(CODE[:1], here).stderr
    cell = CODE[0].replace('REPOSITORY = ""', f"REPOSITORY = {source.as_uri()!r}")
    for _ in range(2):  # the second time, the clone is found
        done = execute([cell, "print(os.getcwd())"], here)
        assert done.stdout.splitlines()[-1] == str(here / "gspo"), done.stderr
