"""experiments/tiny/range_rule.py: the movement, and the predictions."""
import pytest

from experiments.tiny import range_rule


def lines(accuracy):
    """The log of all runs; accuracy(task, updates, learning_rate, start, factor) of each."""
    return [{"task": task, "updates": updates, "learning_rate": rate, "start": start,
             "factor": factor, "movement": 0.02,
             "accuracy": factor and accuracy(task, updates, rate, start, factor)}
            for task, updates, rate in range_rule.settings()
            for start in range_rule.MODELS[task]
            for factor in (None, *range_rule.FACTORS)]


def test_the_movement_is_the_median_of_rollouts_two_to_four():
    rows = [{"step": step, "log_ratio_std": value}
            for step, value in enumerate((9.0, 0.9, 0.02, 0.06, 9.0), 1)]
    assert range_rule.movement_of(rows) == 0.06
    rows[2]["log_ratio_std"] = None  # no gradient in this rollout
    assert range_rule.movement_of(rows) == pytest.approx(0.48)


def test_a_run_that_confirms_all_predictions():
    best = {0.1: 0.7, 0.5: 0.9, 2: 0.94, 8: 0.5}
    text = range_rule.tables(lines(lambda *key: best[key[-1]]))
    assert "in 8 of 8 settings, and at most 4.0 points" in text
    assert "8 times the movement is worse than 0.5 times in 4 of 4" in text
    assert "0.1 times the movement is worse than 0.5 times in 4 of 4" in text


def test_a_run_that_contradicts_them():
    def accuracy(task, updates, rate, start, factor):
        if updates == 4:
            return {0.1: 0.9, 0.5: 0.8, 2: 0.8, 8: 0.8}[factor]
        return {0.1: 0.5, 0.5: 0.8, 2: 0.8, 8: 0.82}[factor]

    text = range_rule.tables(lines(accuracy))
    assert "in 4 of 8 settings, and at most 10.0 points" in text
    assert "8 times the movement is worse than 0.5 times in 0 of 4" in text
    assert "0.1 times the movement is worse than 0.5 times in 0 of 4" in text


def test_a_model_counts_when_all_its_runs_are_finished():
    some = [line for line in lines(lambda *key: 0.5)
            if line["start"] not in (16, 26) or line["factor"] != 8]
    _, finished = range_rule.runs_of(some, range_rule.settings()[0])
    assert finished == [11, 12, 13, 14, 15]
