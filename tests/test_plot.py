"""common/plot.py: pictures of logs."""

import builtins

import pytest

from common import plot
from tests.conftest import write_jsonl


def log(n, **more):
    """Rows of a run's log, with an evaluation every second step."""
    first = {"step": 0, "eval_reward": 0.2, "eval_reward_interval": [0.1, 0.3]}
    rows = [first]
    for step in range(1, n):
        row = {
            "step": step,
            "reward": step / 10,
            "response_length": 5.0 * step,
            "clip_fraction": 0.1 * step,
            "log_ratio_std": 0.01 * step,
        }
        if step % 2 == 0:
            row["eval_reward"] = step / 9
            row["eval_reward_interval"] = [step / 11, step / 8]
        rows.append(row | more)
    return rows


@pytest.fixture
def kept(monkeypatch):
    """The figures that are drawn."""
    import matplotlib.pyplot as plt

    found = []
    monkeypatch.setattr(plt, "close", found.append)
    return found


def test_draws_reward_length_clip_and_spread(tmp_path, kept):
    rows = log(5)
    plot.draw({"gspo": rows}, tmp_path / "picture.png", eps_high=0.04)
    assert (tmp_path / "picture.png").read_bytes()[1:4] == b"PNG"
    names = ("reward", "response_length", "clip_fraction", "log_ratio_std")
    for axis, name in zip(kept[0].axes, names, strict=True):
        drawn = axis.lines[0].get_xydata().tolist()
        assert drawn == [[row["step"], row[name]] for row in rows[1:]]
    evaluated = [list(line.get_ydata()) for line in kept[0].axes[0].lines[1:]]
    expected = []
    for row in rows[::2]:
        expected.append([row["eval_reward"]])
        expected.append(row["eval_reward_interval"])
    assert evaluated == expected
    assert 0.04 in kept[0].axes[3].lines[1].get_ydata()


def test_draws_nothing_where_nothing_was_measured(tmp_path, kept):
    own_reward = [{"step": 0, "eval_reward": 2.5}]  # not 0 or 1: no interval
    plot.draw({"still": log(5, log_ratio_std=None), "own": own_reward}, tmp_path / "picture.png")
    first, *_, last = kept[0].axes
    assert len(last.lines[0].get_xdata()) == 0
    assert [list(line.get_ydata()) for line in first.lines[-1:]] == [[2.5]]


def test_goes_on_without_matplotlib(tmp_path, monkeypatch, capsys):
    real_import = builtins.__import__

    def no_matplotlib(name, *arguments, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    plot.draw({"gspo": log(3)}, tmp_path / "picture.png")
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "picture.png").exists()


def test_pictures_several_runs_from_the_command_line(tmp_path, monkeypatch, capsys):
    for name in "a", "b":
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "metrics.jsonl", log(4))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["plot.py", "a", "b", "--output", "two.png"])
    plot.main()
    assert (tmp_path / "two.png").stat().st_size > 1000 and "two.png" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["plot.py", "a", "nowhere"])
    with pytest.raises(SystemExit):
        plot.main()
    assert "no metrics.jsonl in nowhere" in capsys.readouterr().err


def test_an_algorithm_has_its_colour_and_line_style_and_two_runs_differ():
    """The kind of a run is in its settings, or else in its label."""
    def with_settings(**settings):
        own = {"algorithm": "gspo", "eps_high": 4e-4, "epochs": 4, "minibatches": 8} | settings
        return [{"step": 0, "settings": own}]

    runs = {
        "a": with_settings(algorithm="grpo", eps_high=0.27),
        "b": with_settings(eps_high=1e9),
        "c": with_settings(),
        "d": with_settings(epochs=1, minibatches=1),
        "e": with_settings(algorithm="cispo"),
        "runs/no_clip": log(4),
        "GSPO": log(4),
        "one_update": log(4),
    }
    styles = plot.styles_of(runs)
    assert len(set(styles.values())) == len(runs)
    lines = {label: style[:2] for label, style in styles.items()}
    assert lines["a"] == plot.STYLES["grpo"]
    assert lines["b"] == lines["runs/no_clip"] == plot.STYLES["no clipping"]
    assert lines["c"] == lines["GSPO"] == plot.STYLES["gspo"]
    assert lines["d"] == lines["one_update"] == plot.STYLES["one update"]
    assert lines["e"] not in plot.STYLES.values()
