"""experiments/tiny/learning_rates.py: runs, and the choice on other questions."""
import random

import pytest

from common.intervals import mean_difference
from common.logs import read
from experiments.comparisons import runs
from experiments.tiny import learning_rates


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(learning_rates, "LOG", tmp_path / "log.jsonl")
    return tmp_path / "log.jsonl"


@pytest.fixture
def trained(monkeypatch):
    """The variants that would have been trained, without training or starting models."""
    found = []

    def train(spec, model, tokenizer, seed):
        found.append((spec, seed))
        if spec["learning_rate"] > 5e-4:
            raise FloatingPointError("the loss is not finite")
        return [dict.fromkeys((*runs.KEPT, "seconds"), 0.5)]

    monkeypatch.setattr(runs, "cold_start", lambda task, start: {"1.0": 0.3})
    monkeypatch.setattr(runs, "cold_folder", lambda task, start: None)
    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(runs, "accuracy",
                        lambda model, tokenizer, task, start, name, temperature: temperature / 2)
    monkeypatch.setattr(learning_rates.train_math, "load", lambda folder, device: (None, None))
    return found


def test_the_interval_is_student_s_over_paired_differences():
    shared = [random.Random(0).random() for _ in range(6)]
    more = [share + 0.01 * gain for share, gain in zip(shared, (1, 2, 3, 4, 5, 6))]
    assert mean_difference(more, shared) == "+3.5 ± 2.0"  # 2.571 * 1.871 / sqrt(6) = 1.96
    assert mean_difference(more, shared, narrowest=3) == "+3.5 ± 3.0*"
    assert mean_difference(shared[:1], more[:1]) == "-1.0"
    with pytest.raises(ValueError):
        mean_difference(more, shared[:5])


def test_a_run_has_its_settings_and_is_not_made_twice(log, trained):
    for _ in range(2):
        learning_rates.run("long", 17, "GRPO", 2e-4)
        learning_rates.run("world", 31, "no clip", 3e-4)
    (grpo, seed), (no_clip, _) = trained
    assert (grpo["task"], grpo["algorithm"], seed) == ("long", "grpo", 1700)
    assert (grpo["epochs"], grpo["learning_rate"]) == (4, 2e-4)
    assert runs.clip_range(grpo) == (0.1, 0.13)
    assert (no_clip["task"], no_clip["algorithm"]) == ("world", "gspo")
    assert runs.clip_range(no_clip) == (1.0, 1e9)
    first, second = read(log)
    assert first["validation"] == {"1.0": 0.5, "0.7": 0.35, "0.5": 0.25}
    assert first["held out"] == {"1.0": 0.5, "0.7": 0.35, "0.5": 0.25, "0.0": 0.0}
    assert second["seconds"] == [0.5]


def test_a_run_that_diverges_has_no_correct_answer(log, trained):
    learning_rates.run("long", 17, "no clip", 6e-4)
    line, = read(log)
    assert line["problem"] == "the loss is not finite"
    assert {*line["validation"].values(), *line["held out"].values()} == {0.0}


def test_what_is_chosen_depends_on_the_validation_questions_alone():
    found = {}
    for name, rate in learning_rates.GRID:
        best = 0.5 + 0.1 * (rate == 2e-4)
        validation = {"1.0": best, "0.7": best + 0.2, "0.5": best}
        held_out = {"1.0": 1 - best, "0.7": 0.0, "0.5": 1.0, "0.0": 1.0}
        found[name, rate] = [{"validation": validation, "held out": held_out}]
    for name in learning_rates.RATES:
        assert learning_rates.choice(found, name) == (2e-4, "0.7")
