"""lesson/seeds.py: the committed tables are those of the logs, and no run is made twice."""
import json

import pytest

from lesson import seeds


@pytest.fixture
def no_picture(monkeypatch):
    for name in "draw", "draw_collapse":
        monkeypatch.setattr(seeds, name, lambda runs, path: None)


def test_the_table_is_that_of_the_logs(no_picture):
    assert seeds.tabulate() == (seeds.RESULTS / "table.md").read_text()


def test_every_fresh_run_has_the_settings_of_the_plan():
    found = seeds.runs_of("report")
    assert found and set(found) <= {(name, *pair) for name in seeds.STYLES for pair in seeds.FRESH}
    plan = (seeds.RESULTS / "PLAN.md").read_text()
    for (name, _, seed), rows in found.items():
        settings = rows[0]["settings"]
        assert settings["seed"] == seed
        assert settings["learning_rate"] == 4.5e-4
        if name in seeds.RANGES:
            assert f"--eps_low {settings['eps_low']} --eps_high {settings['eps_high']}" in plan


def test_the_runs_are_counted_by_their_last_greedy_accuracy():
    def log(accuracy, seconds):
        rows = [{"start": {"0.0": 0.1, "1.0": 0.2},
                 "settings": {"minibatches": 8, "epochs": 4, "max_steps": 16}}]
        return rows + [{"eval_reward": accuracy, "sampled": 0.5, "cpu_seconds": seconds}]

    accuracies = [0.34, 0.36, 0.89, *[0.91] * (len(seeds.FRESH) - 3)]
    slow = {pair: log(accuracy, 30.0) for pair, accuracy in zip(seeds.FRESH, accuracies)}
    fast = {pair: log(1.0, 10.0) for pair in seeds.FRESH}
    text = seeds.report_table({"GSPO": slow, "one update": fast})
    (line,) = [line for line in text.splitlines() if line.startswith("| GSPO |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == ["9 of 12", "1 of 12", "512", "3.0 (3.0 to 3.0)"]


def test_a_run_that_exists_is_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    line = {"variant": "GSPO", "world": 0, "seed": 1, "rows": [{"step": 0}]}
    (tmp_path / "report.jsonl").write_text(json.dumps(line) + "\n")
    made = []
    monkeypatch.setattr(seeds.tiny, "world", lambda world: made.append(world))
    monkeypatch.setattr(seeds.tiny, "main", lambda flags: made.append(flags))
    seeds.run("report", "GSPO", [], 0, 1)
    assert made == []
    with pytest.raises(FileNotFoundError):  # another seed is made; here tiny.main leaves no model
        monkeypatch.setattr(seeds.train_math, "load", lambda *names: open("nothing"))
        seeds.run("report", "GSPO", [], 0, 2)
    assert len(made) == 2
