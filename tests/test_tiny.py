"""lesson/tiny.py: the small world."""
import json
import re

import pytest

import train_math
from experiments.plot import read
from lesson import tiny
from tests.conftest import SMALL


def test_teaches_true_sums_and_slips_where_told():
    row = tiny.rabbits((3, 7), 3)
    assert row["question"] == "Rabbits: 3, then 7. In c months?"
    assert row["worked"] == "c3+7=0b7+0=7a0+7=7\n#### 7" and row["answer"] == "#### 7"
    always = tiny.rabbits((3, 7), 16, tiny.random.Random(0), slips=1.0)
    assert always["answer"] == tiny.rabbits((3, 7), 16)["answer"], "the gold answer never slips"
    sums = re.findall(r"[a-z](\d)\+(\d)=(\d)", always["worked"])
    assert len(sums) == 16 and any((int(a) + int(b)) % 10 != int(c) for a, b, c in sums)
    assert [c for *_, c in sums[:-1]] == [b for _, b, _ in sums[1:]], "and goes on from its slip"


def test_holds_a_quarter_of_all_questions_out():
    train, held_out = tiny.questions()
    assert (len(train), len(held_out)) == (525, 175)
    assert len({row["question"] for row in train + held_out}) == 700
    for name, rows in ("train", train), ("test", held_out):
        there = read(tiny.world(0) / "questions" / f"{name}.jsonl")
        assert [row["answer"] for row in there] == [row["answer"] for row in rows]


def test_world_0_starts_as_start_json_says():
    model, tokenizer = train_math.load(tiny.world(0) / "model", "cpu")
    start = json.loads((tiny.world(0) / "start.json").read_text())
    assert max(start.values()) < 0.35, "no temperature helps"
    for temperature in 0.0, 1.0:
        share = tiny.right(model, tokenizer, tiny.questions()[1], temperature)
        assert share == pytest.approx(start[str(temperature)], abs=0.03)  # CPUs round differently


def test_makes_a_world_once_and_never_a_half_of_it(tmp_path, monkeypatch):
    made = []

    def cold_start(model, tokenizer, seed):
        made.append(seed)

    def dies(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "cold_start", cold_start)
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "right", dies)
        with pytest.raises(KeyboardInterrupt):
            tiny.world(3, tmp_path)
    assert made == [3] and not (tmp_path / "world-3").exists()
    monkeypatch.setattr(tiny, "right", lambda *arguments: 0.5)
    folder = tiny.world(3, tmp_path)
    assert tiny.world(3, tmp_path) == folder and made == [3, 3], "the second time it is there"
    other = tiny.world(4, tmp_path)
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (folder, other)]
    assert weights[0] != weights[1], "another seed, another world"


@pytest.mark.parametrize("flags, clip_range", [
    ([], (0.003, 0.004)),
    (["--algorithm", "grpo"], (0.2, 0.27)),
    (["--eps_low", "0.99", "--eps_high", "1e9"], (0.99, 1e9))])
def test_passes_flags_on_and_draws_a_picture(tmp_path, capsys, flags, clip_range):
    folder = tmp_path / "run"
    small = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    small += ["--max_steps", "1", "--minibatches", "4", "--output_dir", str(folder)]
    tiny.main([*small, *flags])
    rows = read(folder / "metrics.jsonl")
    settings = rows[0]["settings"]
    assert len(rows) == 2 and settings["group_size"] == 4
    assert (settings["eps_low"], settings["eps_high"]) == clip_range
    assert (folder / "metrics.png").read_bytes()[1:4] == b"PNG"
    assert "the start, held out" in capsys.readouterr().out


def test_help_tells_of_the_world_and_of_all_other_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        tiny.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert "--world WORLD" in text
    assert "any flag that train_math.py --help shows" in text
    assert "--epochs 4" in text
