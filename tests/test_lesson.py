"""lesson/: the programs and the notebook."""
import difflib
import inspect
import json
import os
import random
import re
import subprocess
import sys

import pytest
import torch
from PIL import Image

import gspo
import train_math
from evidence.successors import cispo_loss, sapo_loss
from lesson import grow, pictures, tiny
from tests.conftest import SMALL, TOP
from tools.logs import read

# ---- grow.py: its last stage is gspo_loss, and each stage repairs what the page says -------------

STAGES = [grow.reinforce, grow.baseline, grow.group, grow.ratio, grow.root, grow.clip]


def batch():
    """Some responses are clipped, the padding is NaN, and the last group has equal rewards."""
    torch.manual_seed(0)
    mask = torch.arange(9) < torch.randint(1, 10, (64, 1))
    old = torch.randn(64, 9).double().where(mask, torch.nan)
    new = old + 0.3 * torch.randn(64, 9).double()
    rewards = torch.rand(64).double()
    rewards[-grow.GROUP:] = 0.5
    return new.requires_grad_(), old, rewards, mask


def of_gspo(new, old, rewards, mask):
    advantages = gspo.group_advantages(rewards, grow.GROUP)
    return gspo.gspo_loss(new, old, advantages, mask, grow.EPS_LOW, grow.EPS_HIGH)


def test_the_last_stage_is_gspo_loss():
    found = []
    for loss in grow.clip, of_gspo:
        new, *others = batch()
        value = loss(new, *others)
        value.backward()
        found.append((value, new.grad))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    has_none = (new.grad == 0).all(1)
    assert 8 < has_none.sum() < 40, "a group of equal rewards, and the clipped responses"


def test_each_stage_is_a_small_change():
    sources = [inspect.getsource(stage).splitlines()[1:] for stage in STAGES]
    for before, after in zip(sources, sources[1:]):
        changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        assert 3 <= len(changed) <= 9


@pytest.mark.slow
def test_each_stage_repairs_what_it_says(monkeypatch, capsys):
    monkeypatch.setattr(grow, "BATCHES", 64_000)
    grow.main()
    printed = capsys.readouterr().out
    rows = {}
    for name, length, cells in re.findall(r"^(\w+) +(4|32) +(\d.*)$", printed, re.MULTILINE):
        cells = [float(cell.strip("%")) for cell in cells.replace("+-", "").split()]
        rows[name, int(length)] = dict(zip(
            ("bias", "error", "noise", "bias_moved", "error_moved", "noise_moved", "reward",
             "ruined", "training"), cells, strict=True))
    assert all(row["bias"] < 3 * row["error"] for row in rows.values()), "none is biased at first"
    assert rows["baseline", 4]["noise"] < rows["reinforce", 4]["noise"]
    assert rows["ratio", 4]["bias_moved"] < 2 < 8 < rows["group", 4]["bias_moved"]
    assert rows["ratio", 32]["noise_moved"] > 2 * rows["root", 32]["noise_moved"]
    assert rows["root", 32]["ruined"] > 10 > 2 > rows["clip", 32]["ruined"]
    assert rows["clip", 4]["bias_moved"] > rows["root", 4]["bias_moved"], "the price of the clip"


# ---- pictures.py: the curves are those of the losses ---------------------------------------------

LOSSES = {
    pictures.gspo: (gspo.gspo_loss, 3e-4, 4e-4),
    pictures.grpo: (gspo.grpo_loss, 0.2, 0.27),
    pictures.no_clip: (gspo.gspo_loss, 1, 1e9),
    pictures.cispo: (cispo_loss, 1, 0.28),
    pictures.sapo: (sapo_loss, 1.05, 1.0)}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_weights_in_the_picture_are_the_gradients_of_the_losses(advantage):
    """One response for each ratio, whose three tokens all have this ratio."""
    ratio = torch.linspace(0.305, 2.205, 191).double()  # none of them is the end of a range
    old = torch.full((191, 3), -1.0).double()
    assert {curve for curve, *_ in pictures.CURVES.values()} == set(LOSSES)
    for curve, (loss, low, high) in LOSSES.items():
        new = (old + ratio.log()[:, None]).requires_grad_()
        rest = torch.full((191,), advantage).double(), torch.ones(191, 3), low, high
        gradient = torch.autograd.grad(-191 * loss(new, old, *rest), new)[0].sum(1) / advantage
        weight = pictures.weight(curve, ratio, advantage)
        torch.testing.assert_close(weight, gradient, rtol=1e-5, atol=1e-5)


def test_draws_both_pictures(tmp_path):
    pictures.draw_clip(tmp_path / "clip.png")
    pictures.draw_weights(tmp_path / "weights.png")
    for name in "clip.png", "weights.png":
        assert (tmp_path / name).stat().st_size > 10_000
        assert Image.open(tmp_path / name).mode == "P", "it has few colours, so the file is small"
        assert (TOP / "lesson" / name).stat().st_size < 150_000


# ---- tiny.py: the small world --------------------------------------------------------------------

def test_has_correct_sums_and_mistakes_if_asked_for():
    row = tiny.rabbits((3, 7), 3)
    assert row["question"] == "Rabbits: 3, then 7. In c months?"
    assert row["worked"] == "c3+7=0b7+0=7a0+7=7\n#### 7"
    assert row["answer"] == "#### 7"
    page = (TOP / "lesson" / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^ +\d+ +(k\S+=\d) +(\d) +(\d) ", page, re.MULTILINE)
    for response, answer, reward in shown:  # in the group that the lesson shows
        is_correct = tiny.rabbits((5, 1), 11)["worked"] == f"{response}\n#### {answer}"
        assert is_correct == (reward == "1")
    assert len(shown) == 2
    right = tiny.rabbits((3, 7), 16)
    slipped = tiny.rabbits((3, 7), 16, random.Random(0), slips=1.0)
    assert slipped["answer"] == right["answer"], "the gold answer has no mistake"
    steps = re.findall(r"[a-z](\d)\+(\d)=(\d)", slipped["worked"])
    assert len(steps) == 16
    last = "7"
    wrong = 0
    for a, b, c in steps:
        assert b == last, "the steps after a mistake use it"
        last = c
        wrong += (int(a) + int(b)) % 10 != int(c)
    assert wrong > 8


def test_holds_a_quarter_of_all_questions_out():
    train, held_out = tiny.questions()
    assert len(held_out) == 175
    different = {row["question"] for row in train + held_out}
    assert len(different) == len(train) + len(held_out) == 700
    for name, rows in ("train", train), ("test", held_out):
        there = read(tiny.world(0) / "questions" / f"{name}.jsonl")
        assert [row["answer"] for row in there] == [row["answer"] for row in rows]


def test_world_0_starts_as_start_json_says():
    model, tokenizer = train_math.load(tiny.world(0) / "model", "cpu")
    start = json.loads((tiny.world(0) / "start.json").read_text())
    assert max(start.values()) < 0.35, "no temperature helps"
    _, held_out = tiny.questions()
    for temperature in 0.0, 1.0:
        share = tiny.accuracy(model, tokenizer, held_out, temperature)
        assert share == pytest.approx(start[str(temperature)], abs=0.03)  # CPUs round differently


def test_makes_a_world_once_and_never_an_incomplete_one(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(tiny, "warm_up", lambda model, tokenizer, seed: made.append(seed))
    monkeypatch.setattr(tiny, "accuracy", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.world(3, tmp_path)
    assert not (tmp_path / "world-3").exists()
    monkeypatch.setattr(tiny, "accuracy", lambda *arguments: 0.5)
    folders = [tiny.world(seed, tmp_path) for seed in (3, 3, 4)]
    assert made == [3, 3, 4], "the first call left nothing, and the third found a world"
    first, again, other = [(f / "model" / "model.safetensors").read_bytes() for f in folders]
    assert first == again != other, "another seed, another world"


@pytest.mark.parametrize("flags, clip_range", [
    (["--algorithm", "grpo"], (0.2, 0.267)),
    (["--eps_low", "1", "--eps_high", "1e9"], (1, 1e9))])
def test_passes_flags_on_and_draws_a_picture(tmp_path, capsys, monkeypatch, flags, clip_range):
    folder = tmp_path / "run"
    small = SMALL | {"max_steps": 1, "minibatches": 4, "output_dir": folder}
    tiny.main([f"--{name}={value}" for name, value in small.items()] + flags)
    start, step = read(folder / "metrics.jsonl")
    settings = start["settings"]
    assert settings["group_size"] == 4
    assert (settings["eps_low"], settings["eps_high"]) == clip_range
    assert (folder / "metrics.png").read_bytes()[1:4] == b"PNG"
    shown = capsys.readouterr().out
    assert "held-out accuracy before RL" in shown and "a picture of the run: " in shown
    assert "no CUDA GPU" not in shown
    (folder / "metrics.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it is then an ImportError
    tiny.main([f"--{name}={value}" for name, value in small.items()] + flags)
    shown = capsys.readouterr()
    assert "a picture" not in shown.out and "pip install matplotlib" in shown.err


# ---- notebook.ipynb: its code cells run in order, without Jupyter --------------------------------

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
