"""common/intervals.py and common/evaluate.py: the answers of models to held-out questions."""
import pytest
import torch

from common import evaluate
from common.intervals import accuracy_text, paired
from common.logs import read
from support import cuda_sampling
from tests.conftest import one_line, sums, write_jsonl


def test_compares_answers_to_the_same_questions():
    before = [1] * 4 + [0] * 6
    after = [0] + [1] * 8 + [0]  # 5 of 10 answers are gained, 1 is lost
    d, interval, p = paired(before, after)
    assert d == pytest.approx(0.4)
    assert interval == pytest.approx((-0.0111, 0.8111), abs=1e-4)
    assert p == 2 * (1 + 6) / 2**6  # at most one of 6 changes is a loss
    d, _, p = paired(after, before)
    assert d == pytest.approx(-0.4)
    assert p == 2 * (1 + 6) / 2**6
    assert paired(before, before) == (0, (0, 0), 1)


def test_accuracy_has_wilsons_interval():
    assert accuracy_text([0, 1, 0, 0]) == "25.0% (4.6% to 69.9%)"


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
        assert "| before | at temperature 1.0, float32 |" in capsys.readouterr().out

    @pytest.mark.parametrize("refused, expected", [
        (None, "float32"), (set(), "float16"), ({torch.float16}, "bfloat16")])
    def test_says_which_precision_cuda_has_used(self, fresh, monkeypatch, refused, expected):
        model, _ = fresh
        if refused is not None:  # static_rollout was used
            monkeypatch.setitem(cuda_sampling.REFUSED, model, refused)
        assert evaluate.precision(model, 1.0, "cuda") == expected
        assert evaluate.precision(model, 0.0, "cuda") == "float32"
        assert evaluate.precision(model, 1.0, "cpu") == "float32"

    def test_compares_each_file_with_the_first(self, tmp_path, capsys):
        for name, right in ("before", [0, 0, 1, 1]), ("after", [1, 1, 1, 1]):
            rows = [{"question": i, "reward": x, "last_number": i < 3, "tokens": 5}
                    for i, x in enumerate(right)]
            write_jsonl(tmp_path / f"{name}.jsonl", rows)
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
