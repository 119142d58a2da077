"""lesson/tiny.py: what any small world keeps."""

import pytest
import torch

import train_math
from experiments.plot import read
from lesson import tiny
from tests.conftest import SMALL


def test_makes_a_world_once_and_never_a_half_of_it(tmp_path, monkeypatch):
    made = []

    def cold_start(model, tokenizer, rows, seed):
        made.append(rows)

    def dies(*arguments):
        raise KeyboardInterrupt

    for name, owner in ("cold_start", tiny), ("rename", tiny.os):
        with monkeypatch.context() as patch:
            patch.setattr(tiny, "cold_start", cold_start)
            patch.setattr(owner, name, dies)
            with pytest.raises(KeyboardInterrupt):
                tiny.world(3, tmp_path)
    assert len(made) == 1 and not (tmp_path / "tiny_world-3").exists()
    monkeypatch.setattr(tiny, "cold_start", cold_start)
    folder = tiny.world(3, tmp_path)
    assert tiny.world(3, tmp_path) == folder and len(made) == 2, "the second time it is there"
    cfg = train_math.parse_settings(["--dataset", str(folder / "questions.jsonl"), *tiny.FLAGS])
    questions, held_out = train_math.load_questions(cfg)
    assert made[1] == questions and len(held_out) == 256, "what is held out is not taught"
    model, tokenizer = train_math.load(folder / "model", "cpu")
    train_math.check_model(model, tokenizer, questions[:9], cfg)
    other = tiny.world(4, tmp_path)
    weights = [train_math.load(f / "model", "cpu")[0].lm_head.weight for f in (folder, other)]
    assert not torch.equal(*weights), "another seed, another world"
    assert read(other / "questions.jsonl") != read(folder / "questions.jsonl")


@pytest.mark.parametrize(
    "flags, clip_range",
    [
        ([], (0.03, 0.04)),
        (["--algorithm", "grpo"], (0.2, 0.27)),
        (["--eps_low", "0.1"], (0.1, 0.04)),
    ],
)
def test_passes_flags_on_and_draws_a_picture(world, tmp_path, monkeypatch, flags, clip_range):
    monkeypatch.setattr(tiny, "world", lambda seed: world)
    folder = tmp_path / "run"
    small = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    tiny.main([*small, "--max_steps", "1", "--output_dir", str(folder), *flags])
    rows = read(folder / "metrics.jsonl")
    settings = rows[0]["settings"]
    assert len(rows) == 2 and settings["group_size"] == 4
    assert (settings["eps_low"], settings["eps_high"]) == clip_range
    assert (folder / "metrics.png").read_bytes()[1:4] == b"PNG"


def test_does_not_start_rl_without_the_skill(fresh):
    with pytest.raises(RuntimeError, match="seed 0 reached a skill of 0.00"):
        tiny.cold_start(*fresh, tiny.questions(0)[:300], 0, skill_steps=1)
