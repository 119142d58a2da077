"""experiments/tiny/learning_rates.py: runs, the choice on other questions, the comparison."""
import random
import sys

import pytest

from common.intervals import mean_difference
from common.logs import append, read
from experiments.comparisons import report, runs
from experiments.tiny import learning_rates, range_rule
from lesson import seeds


def lines(accuracy):
    """The log of all runs; accuracy(algorithm, rate, start, questions, temperature) of each."""
    return [{"task": task, "start": start, "algorithm": name, "learning_rate": rate,
             **{questions: {t: accuracy(name, rate, start, questions, t) for t in temperatures}
                for questions, temperatures in learning_rates.QUESTIONS.items()}}
            for task, starts in learning_rates.MODELS.items()
            for start in starts
            for name, rate in learning_rates.GRID]


def falling(name, rate, start, questions, t):
    """On the validation questions 2e-4 and temperature 0.7 are best, on the others all the rest."""
    if questions == "validation":
        return 0.5 + 0.1 * (rate == 2e-4) + 0.2 * (t == "0.7")
    best = {"GSPO": 0.9, "GRPO": 0.8, "no clip": 0.3}[name] + 0.01 * (start % 2)
    return best - 0.05 * (t == "0.7") if rate == 2e-4 else 0.99


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(learning_rates, "RESULTS", tmp_path)
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
        return [dict.fromkeys((*runs.KEPT, "seconds"), 0.5)], None

    monkeypatch.setattr(runs, "cold_start", lambda task, start: {"1.0": 0.3})
    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(runs, "accuracy",
                        lambda model, tokenizer, task, start, name, temperature: temperature / 2)
    monkeypatch.setattr(learning_rates.train_math, "load", lambda folder, device: (None, None))
    return found


def test_the_interval_is_student_s_over_paired_differences():
    shared = [random.Random(0).random() for _ in range(6)]
    more = [share + 0.01 * gain for share, gain in zip(shared, (1, 2, 3, 4, 5, 6))]
    assert mean_difference(more, shared) == "+3.5 ± 2.0"  # 2.571 * 1.871 / sqrt(6) = 1.96
    assert mean_difference(more, shared, narrowest=3) == "+3.5 ± 3.0"
    assert mean_difference(shared[:1], more[:1]) == "-1.0"
    with pytest.raises(ValueError):
        mean_difference(more, shared[:5])


def test_no_committed_run_used_these_starting_models():
    for task, starts in learning_rates.MODELS.items():
        used = {row["cold"] for row in read(report.RESULTS / "runs.jsonl")
                if row["arm"]["task"] == task}
        assert used
        assert not set(starts) & (used | set(range_rule.MODELS[task]))
    worlds = {row["world"] for path in seeds.RESULTS.glob("*.jsonl") for row in read(path)}
    assert worlds and not worlds & set(learning_rates.MODELS["world"])


def test_a_run_has_its_settings_and_is_not_made_twice(log, trained, monkeypatch):
    monkeypatch.setattr(runs, "cold_folder", lambda task, start: None)  # it would be made
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
    tasks = learning_rates.finished_runs(lines(falling))
    assert learning_rates.choice(tasks["long"], "GRPO") == (2e-4, "0.7")
    text = learning_rates.comparison(tasks)
    assert "| long | 6 | sampled | 90.5% | 80.5% | 30.5% | +10.0 ± 2.0 | +60.0 ± 2.0 |" in text
    assert "| world | 6 | best temperature | 85.5% | 75.5% | 25.5% |" in text
    assert "| world | 6 | greedy | 90.5% |" in text
    assert "- long, no clip: learning rate 0.0002; best temperature 0.7" in text


def test_a_rate_at_an_end_of_the_grid_is_pointed_out():
    tasks = learning_rates.finished_runs(lines(lambda name, rate, *key: rate))
    text = learning_rates.comparison(tasks)
    assert text.count("learning rate 0.0006, an end of the grid; best temperature 1.0") == 6


def test_a_model_counts_once_all_its_runs_are_there(log, monkeypatch, capsys):
    for line in lines(falling):
        if line["start"] not in (22, 36) or line["learning_rate"] != 3e-5:
            append(log, line)
    tasks = learning_rates.finished_runs(read(log))
    assert {len(own) for runs in tasks.values() for own in runs.values()} == {5}
    monkeypatch.setattr(sys, "argv", ["learning_rates", "--models", "0"])
    learning_rates.main()
    assert "| world | no clip | 3e-05 |" in capsys.readouterr().out
    assert (log.parent / "learning_rates.png").stat().st_size > 10_000


def test_without_runs_there_is_no_picture(log, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["learning_rates", "--models", "0"])
    learning_rates.main()
    assert [path.name for path in log.parent.iterdir()] == ["learning_rates.md"]
