"""common/intervals.py and common/evaluate.py: the answers of models to held-out questions."""
import math
from pathlib import Path

import pytest

from common import evaluate
from common.intervals import accuracy_text, gain_text, paired
from common.logs import read
from experiments.qwen import gsm8k
from tests.conftest import one_line, sums, write_jsonl

RESULTS = Path(gsm8k.__file__).parents[1] / "results" / "qwen" / "gsm8k"


class TestGain:
    def gain(self, won, lost, n):
        same = [1.0] * (n - won - lost)
        return gain_text([0.0] * won + [1.0] * lost + same, [1.0] * won + [0.0] * lost + same)

    def test_counts_what_changed(self):
        # 9 gained, 1 lost: p = 2 (1 + 10) / 2^10. The variance is (10 / 100 - 0.08^2) / 100.
        half = 1.96 * math.sqrt((0.1 - 0.08**2) / 100)
        assert self.gain(9, 1, 100) == (
            f"+8.0% (95%: {0.08 - half:+.1%} to {0.08 + half:+.1%}), p = 0.021")

    def test_a_loss_has_the_same_p_value_as_a_gain(self):
        assert self.gain(1, 9, 100).startswith("-8.0%")
        assert self.gain(1, 9, 100).endswith("p = 0.021")

    def test_nothing_changed(self):
        assert self.gain(0, 0, 10) == "+0.0% (95%: +0.0% to +0.0%), p = 1"


def test_compares_answers_to_the_same_questions():
    before = [1] * 4 + [0] * 6
    after = [0] + [1] * 8 + [0]  # 5 of 10 answers are gained, 1 is lost
    d, interval, p = paired(before, after)
    assert d == pytest.approx(0.4)
    assert interval == pytest.approx((-0.0111, 0.8111), abs=1e-4)
    assert p == 2 * (1 + 6) / 2**6  # at most one of 6 changes is a loss
    *_, p = paired(before, before)
    assert p == 1


def test_accuracy_has_wilsons_interval():
    assert accuracy_text([0, 1, 0, 0]) == "25.0% (4.6% to 69.9%)"


def test_makes_a_table_of_models_at_each_temperature():
    def arm(*right):
        rows = []
        for t in gsm8k.TEMPERATURES:
            for i, x in enumerate(right):
                rows.append({
                    "question": i,
                    "temperature": t,
                    "reward": x,
                    "last_number": 1.0,
                    "cut": i == 0,
                    "tokens": 10 + i,
                })
        return rows[::-1]

    cold = arm(1, 0, 0, 0)
    gspo = arm(1, 1, 0, 1)
    text = gsm8k.table({"cold": cold, "grpo": cold, "gspo": gspo})
    assert text.count("| gspo | greedy | 3 of 4, 75.0%") == 1
    assert text.count("| gspo | at temperature 1.0 |") == 1
    assert "| 100.0% | +50.0% (+1.0% to +99.0%) | 0.5 | 25% | 12 |" in text
    assert "gspo minus grpo, temperature 0.0: +50.0% (+1.0% to +99.0%), p 0.5" in text


def test_gsm8k_gives_the_table_that_is_published(capsys):
    gsm8k.main(["--show", str(RESULTS)])
    published = (RESULTS / "table.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == published.strip()


@pytest.fixture
def flags(world, tmp_path):
    """Flags with which the tiny model answers three questions in three tokens."""
    questions = tmp_path / "questions"
    questions.mkdir()
    write_jsonl(questions / "train.jsonl", sums(8))
    write_jsonl(questions / "test.jsonl", sums(11)[8:])
    model = str(world / "model")
    return ["--model", model, "--dataset", str(questions), "--max_completion_length", "3",
            "--device", "cpu"]


class TestCommand:
    def test_keeps_the_answers_and_asks_nothing_twice(self, flags, tmp_path, monkeypatch, capsys):
        path = tmp_path / "before.jsonl"
        evaluate.main([str(path), *flags])
        evaluate.main([str(path), *flags, "--temperature", "0", "1"])
        rows = read(path)
        assert [row["temperature"] for row in rows] == [0.0] * 3 + [1.0] * 3
        assert [row["question"] for row in rows] == [0, 1, 2] * 2
        assert [row["gold"] for row in rows] == ["8", "9", "10"] * 2
        assert all(1 <= row["tokens"] <= 3 for row in rows)
        assert all(row["cut"] == (row["tokens"] == 3) for row in rows)
        monkeypatch.setattr(evaluate.train_math, "load", None)
        capsys.readouterr()
        evaluate.main([str(path), *flags, "--temperature", "1"])
        assert "| before | at temperature 1.0 |" in capsys.readouterr().out

    def test_compares_each_file_with_the_first(self, tmp_path, capsys):
        for name, right in ("before", [0, 0, 1, 1]), ("after", [1, 1, 1, 1]):
            write_jsonl(tmp_path / f"{name}.jsonl", [
                {"question": i, "temperature": 0.0, "reward": float(x), "last_number": float(i < 3),
                 "tokens": 5, "cut": False} for i, x in enumerate(right)])
        files = [str(tmp_path / f"{name}.jsonl") for name in ("before", "after")]
        evaluate.main(files)
        out = capsys.readouterr().out
        assert "| before | greedy | 2 of 4, 50.0% (15.0% to 85.0%) | 75.0% | - | - |" in out
        assert "| after | greedy | 4 of 4, 100.0% (51.0% to 100.0%) | 75.0% | +50.0% (" in out
        evaluate.main(["--last_number", *files])
        assert "| after | greedy | 3 of 4, 75.0%" in capsys.readouterr().out

    def test_refuses_missing_files_and_unknown_flags(self, flags, tmp_path, capsys):
        path = str(tmp_path / "before.jsonl")
        assert "--model no/such" in one_line(evaluate.main, path, *flags, "--model", "no/such")
        assert "--dataset no/such" in one_line(evaluate.main, path, *flags, "--dataset", "no/such")
        with pytest.raises(SystemExit):
            evaluate.main([path, "--eval_size", "3"])
        assert "these flags need --model: --eval_size 3" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            evaluate.main([path])
        assert f"{path} has no answers" in capsys.readouterr().err

    def test_refuses_a_file_with_the_answers_of_another_model(self, flags, tmp_path):
        path = tmp_path / "before.jsonl"
        evaluate.main([str(path), *flags])
        rows = read(path)
        assert {row["model"] for row in rows} == {flags[1]}
        for temperature in "0", "1":
            line = one_line(
                evaluate.main, path, *flags, "--model", "other", "--temperature", temperature)
            assert f"{path} has answers of {flags[1]}" in line
        assert read(path) == rows

    def test_refuses_answers_to_different_questions(self):
        rows = [{"question": i, "reward": 1.0} for i in range(3)]
        evaluate.difference(rows, rows, 0.0)
        with pytest.raises(ValueError, match="different questions"):
            evaluate.difference(rows, rows[1:], 0.0)
