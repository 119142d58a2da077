"""evidence/qwen/sums.py: questions, reward, arithmetic, and that nothing is done twice.
tests/test_tables.py tests its published tables."""
import functools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from evidence.qwen import sums
from tests.conftest import one_line, rollout_of
from tools.logs import read, write


class TestQuestions:
    def test_held_out_products_are_in_no_training_question(self):
        questions, held_out = sums.make_questions()
        assert len(held_out) == 256
        train = {frozenset(row["factors"]) for row in questions}
        test = {frozenset(row["factors"]) for row in held_out}
        assert not train & test
        assert len(train) + len(test) == len(questions) + 256, "no product occurs twice"

    def test_the_answer_is_the_product_of_the_numbers_in_the_question(self):
        for row in sums.make_questions()[1]:
            a, b = row["factors"]
            assert int(a) * int(b) == int(row["answer"])
            assert f" {a} boxes of {b} " in row["question"]


@pytest.mark.parametrize("text, reward", [
    ("3 * 17 = 51", 1.0),
    ("3 * 17 = 51.0 books.", 1.0),
    ("51 = 3 * 17", 0.0),
    ("3 * 17 = 52", 0.0),
    ("", 0.0)])
def test_only_the_last_number_is_rewarded(text, reward):
    assert sums.last_number_reward(None, [text], ["51"], factors=[["3", "17"]]) == [reward]


def test_welch_s_interval():
    """By hand: variances of the means 1/3 and 2/3, 4.9 degrees of freedom, t 2.776."""
    assert sums.welch([0.01, 0.02, 0.03], [0.0, 0.02, 0.04, 0.02]) == "+0.0 ± 2.8"


def test_another_dataset_is_refused_in_one_line():
    assert "makes its own questions" in one_line(sums.main, "--dataset", "my.jsonl")


@pytest.fixture(scope="module")
def flags(world):
    """The flags of a run with one small step, on the model with random weights."""
    return ["--model", str(world / "model"), "--max_steps", "1", "--max_completion_length", "2",
            "--device", "cpu"]


def test_a_run_has_all_answers_of_both_models(flags, tmp_path):
    sums.main([*flags, "--output_dir", str(tmp_path)])
    for when, temperatures in sums.TEMPERATURES.items():
        answers = read(tmp_path / f"{when}.jsonl")
        asked = [temperature for temperature in temperatures for _ in range(256)]
        assert [row["temperature"] for row in answers] == asked


def test_a_run_is_resumed_and_no_question_is_asked_twice(tmp_path, monkeypatch, flags):
    asked = []
    trained = []

    def load(name, device):
        asked.append(str(name))
        return None, None

    def sample(model, tokenizer, questions, group_size, temperature, cfg, parts):
        asked.append(temperature)
        if temperature == 0.6 and len(asked) < 5:
            raise KeyboardInterrupt
        n = len(questions)
        return replace(rollout_of([[1]] * n, [[1, 2]] * n), questions=questions)

    def train(argv, reward):
        cfg = sums.train_math.parse_settings(argv)
        trained.append(cfg)
        folder = Path(cfg.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        shown = vars(cfg) | {"eps_low": cfg.clip_range()[0]}
        write(folder / "metrics.jsonl", [{"step": 0, "settings": shown}])

    monkeypatch.setattr(sums.train_math, "load", load)
    ask = functools.partial(sums.train_math.evaluate, sample=sample)
    monkeypatch.setattr(sums.train_math, "evaluate", ask)
    monkeypatch.setattr(sums.train_math, "main", train)
    command = [*flags, "--output_dir", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        sums.main(command)
    sums.main(command)
    trained_model = str(tmp_path / "training" / "model")
    model = flags[1]
    assert asked == [model, 0.0, 0.3, 0.6, model, 0.6, 1.0, model, 0.0,
                     trained_model, 0.0, 1.0, trained_model, 0.0]
    assert len(trained) == 2, "the run was resumed, and nothing was left to do"
    sums.main(command)
    assert len(asked) == 14
    assert len(trained) == 2
    assert trained[0].eps_low == 3e-2
    assert trained[0].max_steps == 1
    assert trained[0].dataset == str(tmp_path / "data")
    assert trained[0].output_dir == str(tmp_path / "training")
    for name, value in ("model", "x"), ("seed", "1"), ("algorithm", "grpo"), ("max_steps", "2"):
        assert f"has another {name}" in one_line(sums.main, *command, f"--{name}", value)
    other = tmp_path / "grpo"
    other.mkdir()
    shutil.copy(tmp_path / "before.jsonl", other)
    asked.clear()
    sums.main([*flags, "--output_dir", str(other), "--algorithm", "grpo"])
    model_after = str(other / "training" / "model")
    assert asked == [model, 0.0, model_after, 0.0, 1.0, model_after, 0.0], "before.jsonl is there"
    assert trained[2].clip_range()[0] == 0.2, "GRPO has its own range"
