"""lesson/seeds.py: the committed tables are those of the logs, and no run is made twice."""
import json
import re

import pytest
import torch

from lesson import seeds, tiny
from tests.conftest import TOP


def test_the_table_is_that_of_the_logs(monkeypatch):
    monkeypatch.setattr(seeds, "draw_collapse", lambda runs, path: None)
    assert seeds.tabulate() == (seeds.RESULTS / "table.md").read_text()


def test_every_fresh_run_has_the_settings_of_the_plan():
    found = seeds.runs_of("report")
    assert found and set(found) <= {(name, *pair) for name in seeds.STYLES for pair in seeds.FRESH}
    plan = (TOP / "evidence" / "plans" / "lesson.md").read_text()
    for (name, _, seed), rows in found.items():
        settings = rows[0]["settings"]
        assert settings["seed"] == seed
        assert settings["learning_rate"] == 4.5e-4
        if name in seeds.RANGES:
            assert f"--eps_low {settings['eps_low']} --eps_high {settings['eps_high']}" in plan


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


def test_the_first_command_of_the_lesson_has_the_settings_of_the_plan():
    assert tiny.FLAGS[tiny.FLAGS.index("--learning_rate") + 1] == seeds.LEARNING_RATE[1]
    for algorithm in seeds.RANGES:
        flags = seeds.clipped(algorithm, seeds.chosen_range(algorithm))
        assert flags[2:] == tiny.RANGES[algorithm.lower()]


def test_the_lesson_shows_lines_of_the_logged_runs():
    """The lines stand in the order of these runs; the seconds are not compared."""
    page = (seeds.RESULTS.parent / "README.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL)
              if block.startswith("step ")]
    runs = seeds.runs_of("lesson")
    shown = "GSPO", "one update", "no clip", "GRPO"
    assert len(blocks) == len(shown)
    for name, block in zip(shown, blocks):
        rows = {row["step"]: row for row in runs[name, 0, 0]}
        for line in block.splitlines():
            step = int(re.match(r"step (\d+)/16", line)[1])
            for metric, value in re.findall(r"(\w+) ([\d.]+)(?:  |$)", line.partition("  ")[2]):
                if metric != "seconds":
                    assert f"{rows[step][metric]:.3g}" == value, (name, line, metric)


def test_visits_count_the_responses_that_never_contribute():
    visits = seeds.Visits()
    mask = torch.ones(4, 2)
    old = torch.zeros(4, 2)
    advantages = torch.tensor([1.0, 1.0, -1.0, 0.0])
    for moved in [0.1, -0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]:
        log_probs = torch.tensor(moved)[:, None].expand(4, 2)
        visits.loss(log_probs, old, advantages, mask, 0.01, 0.01, denominator=4)
    visits.on_step({"step": 1})
    assert visits.rows == [{"step": 1, "visits": 2, "responses": 3,
                            "clipped_at_first_visit": 1, "clipped_at_all_visits": 1}]
