"""experiments/tiny/range_rule.py: the movement. tests/test_tables.py tests its tables."""
import pytest

from experiments.tiny import range_rule


def test_the_movement_is_the_median_of_rollouts_two_to_four():
    rows = [{"step": step, "log_ratio_std": value}
            for step, value in enumerate((9.0, 0.9, 0.02, 0.06, 9.0), 1)]
    assert range_rule.movement_of(rows) == 0.06
    rows[2]["log_ratio_std"] = None  # no gradient in this rollout
    assert range_rule.movement_of(rows) == pytest.approx(0.48)
