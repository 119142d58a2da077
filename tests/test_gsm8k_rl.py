"""gsm8k_rl.py: short questions alone, answers before and after, nothing done twice."""
from pathlib import Path

import pytest

from experiments import gsm8k, gsm8k_rl
from experiments.plot import read
from tests.conftest import one_line, sums, write_jsonl

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


@pytest.fixture
def flags(tmp_path, world):
    rows = [row | {"answer": f"<<1+1=2>>\n{row['answer']}"} for row in sums(12)]
    long = {"question": "x" * 300, "answer": "#### 1"}
    write_jsonl(tmp_path / "train.jsonl", [*rows[:8], long])
    write_jsonl(tmp_path / "test.jsonl", [long, *rows[8:]])
    return [
        f"--gsm8k={tmp_path}",
        f"--model={world / 'model'}",
        f"--output_dir={tmp_path / 'run'}",
        "--device=cpu",
        "--max_completion_length=3",
        "--max_steps=1",
    ]


def test_trains_and_asks_before_and_after(tmp_path, flags, monkeypatch, capsys):
    gsm8k_rl.main(flags)
    run = tmp_path / "run"
    assert len(read(run / "short" / "train.jsonl")) == 8
    settings = read(run / "training" / "metrics.jsonl")[0]["settings"]
    assert settings["dataset"] == str(run / "short")
    assert settings["learning_rate"] == 3e-6
    for when in "before", "after":
        rows = read(run / f"gsm8k_{when}.jsonl")
        assert [row["temperature"] for row in rows] == [0.0] * 4 + [1.0] * 4
        assert [row["question"] for row in rows] == [0, 1, 2, 3] * 2
    assert (run / "gsm8k.png").stat().st_size > 5000
    capsys.readouterr()

    monkeypatch.setattr(gsm8k, "answers", None)  # a second call asks nothing
    gsm8k_rl.main(flags)
    assert "4 questions." in capsys.readouterr().out
    other = [*flags, "--ask_only", "--questions", "3", "--temperatures"]
    assert "answers to other questions" in one_line(gsm8k_rl.main, *other, "1", "0.5")
    assert "no --dataset" in one_line(gsm8k_rl.main, *flags, "--dataset", "my.jsonl")


def test_the_answers_of_another_training_are_asked_for(tmp_path, flags, monkeypatch, capsys):
    """--ask_only trains nothing; a folder without questions is refused at once."""
    asked = []

    def answers(model, tokenizer, questions, cfg, temperature):
        asked.append((model, temperature))
        right = model.endswith("training/model")
        return [("5", False, right), *[("6", right, right)] * 3]

    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            self.input_ids = [1] * 2
            return self

    monkeypatch.setattr(gsm8k, "answers", answers)
    monkeypatch.setattr(gsm8k_rl.train_math, "load", lambda name, device: (name, Tokenizer()))
    gsm8k_rl.main([*flags, "--ask_only", "--temperatures", "0"])
    after = str(tmp_path / "run" / "training" / "model")
    assert asked == [(flags[1].removeprefix("--model="), 0.0), (after, 0.0)]
    table = capsys.readouterr().out
    assert "before | greedy | 0.0% (0.0% to 49.0%) | 0.0% (0.0% to 49.0%) | 100.0% | 2" in table
    assert "after | greedy | 100.0% (51.0% to 100.0%) | 75.0%" in table
    assert "by the last number +100.0%" in table
    assert "in the box +75.0%" in table
    (tmp_path / "test.jsonl").unlink()
    assert "no questions in" in one_line(gsm8k_rl.main, *flags)


def test_the_page_tells_what_the_logs_say():
    answers = {}
    for when in "before", "after":
        rows = read(EXPERIMENTS / "results" / "gsm8k" / "rl" / f"gsm8k_{when}.jsonl")
        answers[when] = {t: [row for row in rows if row["temperature"] == t] for t in (0.0, 1.0)}
    page = (EXPERIMENTS / "qwen.md").read_text(encoding="utf-8")
    lines = gsm8k_rl.table(answers, [0.0, 1.0]).split("\n")
    for line, name in zip(lines[2:6], ("greedy: before", "after", "sampled: before", "after")):
        _, _, right, in_box, cut, tokens = line.split(" | ")
        right, in_box = right.split(" ")[0], in_box.split(" ")[0]
        found = [row for row in page.split("\n") if row.startswith(f"| {name} | {right} | ")]
        assert len(found) == 1, line
        assert f" | {in_box} | {cut} | {tokens} |" in found[0]
    for line in lines[7:9]:
        gain = line.split("by the last number ")[1].split(";")[0]
        gain = gain.replace("%", "").replace("95: ", "").replace("p = ", "p ")
        assert f"| {gain} |" in page
