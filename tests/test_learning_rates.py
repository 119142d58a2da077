"""evidence/tiny/learning_rates.py: runs, and the choice on other questions."""
import random

import pytest

from evidence.comparisons import runs
from evidence.comparisons.settings import variant
from evidence.tiny import learning_rates
from tools.logs import mean_difference, read


def test_the_interval_is_student_s_over_paired_differences():
    shared = [random.Random(0).random() for _ in range(6)]
    more = [share + 0.01 * gain for share, gain in zip(shared, (1, 2, 3, 4, 5, 6))]
    assert mean_difference(more, shared) == "+3.5 ± 2.0"  # 2.571 * 1.871 / sqrt(6) = 1.96
    assert mean_difference(more, shared, narrowest=3) == "+3.5 ± 3.0*"
    assert mean_difference(shared[:1], more[:1]) == "-1.0"
    with pytest.raises(ValueError):
        mean_difference(more, shared[:5])


def test_a_run_has_its_settings_and_is_not_made_twice(tmp_path, monkeypatch):
    """Here it diverges, so it has no correct answer."""
    trained = []

    def train(spec, model, tokenizer, seed):
        trained.append((spec, seed))
        raise FloatingPointError("the loss is not finite")

    monkeypatch.setattr(learning_rates, "LOG", tmp_path / "log.jsonl")
    monkeypatch.setattr(learning_rates.train_math, "load", lambda folder, device: (None, None))
    monkeypatch.setattr(runs, "cold_start", lambda task, start: {"1.0": 0.3})
    monkeypatch.setattr(runs, "cold_folder", lambda task, start: None)
    monkeypatch.setattr(runs, "train", train)
    for _ in range(2):
        learning_rates.run("long", 17, "GRPO", 2e-4)
    assert trained == [(variant("grpo", 0.1, learning_rate=2e-4), 1700)]
    (line,) = read(learning_rates.LOG)
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
