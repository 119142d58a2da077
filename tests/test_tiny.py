"""lesson/tiny.py: the small world."""
import json
import random
import re
import sys

import pytest

import train_math
from lesson import tiny
from tests.conftest import SMALL
from tools.logs import read


def test_has_correct_sums_and_mistakes_if_asked_for():
    row = tiny.rabbits((3, 7), 3)
    assert row["question"] == "Rabbits: 3, then 7. In c months?"
    assert row["worked"] == "c3+7=0b7+0=7a0+7=7\n#### 7"
    assert row["answer"] == "#### 7"
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
