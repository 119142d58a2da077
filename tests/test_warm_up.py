"""common/warm_up.py: a model is trained on responses that train_math.py rewards."""

from pathlib import Path

import pytest

import train_math
from common import warm_up
from common.logs import read
from common.tiny_model import tiny_model, tiny_tokenizer
from tests.conftest import SMALL, one_line, sums, write_jsonl


@pytest.mark.parametrize("answer, text", [
    (42, "#### 42"),
    ("1,234", "#### 1,234"),
    ("6*7=<<6*7=42>>42\n#### 42", "6*7=42\n#### 42"),
    (r"so \boxed{42}", r"so \boxed{42}"),
])
def test_trains_on_what_is_rewarded(answer, text):
    assert warm_up.solution(answer) == text
    assert train_math.correctness_reward(["?"], [text], [answer]) == [1.0]


def test_runs_before_train_math_on_a_local_model_and_dataset(tmp_path, monkeypatch, capsys):
    """The pad token is the end token. The end token must be learned nevertheless."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    for part in tiny_model(tokenizer, seed=0), tokenizer:
        part.save_pretrained("model")
    rows = [row | {"answer": f"1+1=<<1+1=2>>2\n{row['answer']}"} for row in sums(30)]
    rows[::2] = [row | {"answer": row["answer"].split()[-1]} for row in rows[::2]]
    data = ["--dataset", write_jsonl(tmp_path / "q.jsonl", rows), "--device", "cpu"]
    flags = [
        "--model", "model", "--steps", "30", "--learning_rate", "1e-2", "--output_dir", "out/cold",
    ]
    seen = []
    log_probs = train_math.response_log_probs

    def spy(model, batch, temperature):
        got = log_probs(model, batch, temperature)
        seen.append((tokenizer.batch_decode(batch.ids), got.sum().item() / batch.mask.sum().item()))
        return got

    with monkeypatch.context() as patch:
        patch.setattr(train_math, "response_log_probs", spy)
        warm_up.main([*flags, *data])
    assert "--model out/cold" in capsys.readouterr().out and not list(Path().rglob("*.partial"))
    assert len(seen) == 30 * 4, "two of eight rows go through the model at once"
    assert seen[-1][1] > seen[0][1] + 1, "the loss must fall"
    for text in seen[0][0]:
        assert "<<" not in text and text.count("####") == 1
        assert "<end>" in text, "the end token is learned, too"
    with pytest.raises(SystemExit):
        warm_up.main([*flags, *data])
    assert "exists already" in capsys.readouterr().err
    small = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    flags = ["--model", "out/cold", *small, *data, "--max_steps", "1", "--output_dir", "rl"]
    train_math.main(flags)
    assert len(read(Path("rl", "metrics.jsonl"))) == 2


@pytest.mark.parametrize("flags, word", [
    ("--dataset nowhere.jsonl", "nowhere.jsonl"),
    ("--dataset q.jsonl --model ./no/where", "--model ./no/where"),
])
def test_refuses_a_missing_model_or_dataset_in_one_line(tmp_path, monkeypatch, flags, word):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "q.jsonl", sums(5))
    main = warm_up.main
    assert word in one_line(main, "--steps", "1", "--output_dir", "out", *flags.split())
    assert not Path("out").exists()


def test_does_not_train_on_what_train_math_holds_out(tmp_path, monkeypatch):
    asked = []

    def supervise(model, tokenizer, draw_row, *rest, **more):
        asked.extend(draw_row()["question"] for _ in range(500))
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_up, "supervise", supervise)
    monkeypatch.setattr(train_math, "load", lambda name, device: (None, None))
    path = write_jsonl(tmp_path / "q.jsonl", sums(50))
    with pytest.raises(KeyboardInterrupt):
        warm_up.main(["--steps", "1", "--dataset", path, "--output_dir", str(tmp_path / "out")])
    questions, held_out = train_math.load_questions(train_math.Settings(dataset=path))
    assert len(held_out) == 10
    assert set(asked) == {row["question"] for row in questions}
