"""lesson/sums.py: its questions, its reward, its arithmetic, and that nothing is done twice."""
import json
import math
import shutil
from pathlib import Path

import pytest

from experiments import sums_given
from lesson import sums

LOGS = Path(__file__).resolve().parents[1] / "experiments" / "results" / "sums" / "gspo_0"


class TestQuestions:
    def test_held_out_products_are_in_no_training_question(self):
        questions, held_out = sums.make_questions()
        assert len(held_out) == 256
        train = {frozenset(row["factors"]) for row in questions}
        test = {frozenset(row["factors"]) for row in held_out}
        assert not train & test
        assert len(train) + len(test) == len(questions) + 256, "no product is asked for twice"

    def test_the_answer_is_the_product_of_the_numbers_in_the_question(self):
        for row in sums.make_questions()[1]:
            a, b = row["factors"]
            assert int(a) * int(b) == int(row["answer"])
            assert f" {a} boxes of {b} " in row["question"]

    def test_are_the_same_each_time(self):
        assert sums.make_questions() == sums.make_questions()


@pytest.mark.parametrize("text, reward", [
    ("3 * 17 = 51", 1.0),
    ("51", 1.0),
    ("3 * 17 = 51.0 books.", 1.0),
    ("51 = 3 * 17", 0.0),
    ("3 * 17 = 52", 0.0),
    ("3 boxes of 17", 0.0),
    ("", 0.0)])
def test_the_last_number_alone_is_paid(text, reward):
    assert sums.last_number_reward(None, [text], ["51"], factors=[["3", "17"]]) == [reward]


class TestGain:
    def gain(self, won, lost, n):
        right = [{"right": 1.0}]
        wrong = [{"right": 0.0}]
        same = right * (n - won - lost)
        return sums.gain(wrong * won + right * lost + same, right * won + wrong * lost + same)

    def test_counts_what_changed(self):
        # 9 won, 1 lost: p = 2 (1 + 10) / 2^10; variance of the difference (10 / 100 - .08^2) / 100
        half = 1.96 * math.sqrt((0.1 - 0.08**2) / 100)
        assert self.gain(9, 1, 100) == (
            f"+8.0% (95%: {0.08 - half:+.1%} to {0.08 + half:+.1%}), p = 0.021")

    def test_a_loss_is_as_sure_as_a_gain(self):
        assert self.gain(1, 9, 100).startswith("-8.0%")
        assert self.gain(1, 9, 100).endswith("p = 0.021")

    def test_nothing_changed(self):
        assert self.gain(0, 0, 10) == "+0.0% (95%: +0.0% to +0.0%), p = 1"


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


STEPS = [{"step": 0}, {"step": 1, "reward": 0.5, "seconds": 90}]


def logs(folder, before, after):
    """A run's logs; before and after: {temperature: the share of 4 held-out answers right}."""
    write(folder / "training" / "metrics.jsonl", STEPS)
    for when, shares in (("before", before), ("after", after)):
        rows = []
        for temperature, share in shares.items():
            for i in range(4):
                row = {"temperature": temperature, "tokens": 9, "result": True}
                row["factors"] = [["3", "12"][i % 2], "17"]
                row["right"] = float(i < 4 * share)
                rows.append(row)
        write(folder / f"{when}.jsonl", rows)


def test_the_untrained_model_is_taken_at_its_best_temperature(tmp_path, capsys):
    logs(tmp_path, {0.0: 0.25, 0.3: 0.5, 0.6: 0.25, 1.0: 0.0}, {0.0: 0.75, 1.0: 0.5})
    sums.main(["--show", str(tmp_path)])
    text = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text().strip() == text.strip()
    assert "after at 0.0 minus before at 0.0: +50.0%" in text
    assert "after at 0.0 minus before at 0.3: +25.0%" in text
    assert "after at 1.0 minus before at 1.0: +50.0%" in text
    assert "after at 1.0 minus before at 0.3: +0.0%" in text
    assert "after | greedy | 75.0%" in text
    assert "1 rollouts, 2 minutes" in text
    assert (tmp_path / "sums.png").stat().st_size > 5000


def test_a_run_is_taken_up_and_nothing_is_done_twice(tmp_path, monkeypatch, capsys):
    asked = []
    trained = []

    def load(name, device):
        asked.append(str(name))
        return None, None

    def sample(model, tokenizer, questions, group_size, temperature, cfg):
        asked.append(temperature)
        if temperature == 0.6 and len(asked) < 5:
            raise KeyboardInterrupt
        return None, [[1, 2]] * len(questions), ["3 * 17 = 51"] * len(questions), None

    def train(argv, reward):
        trained.append(sums.train_math.parse_settings(argv))
        write(tmp_path / "training" / "metrics.jsonl", STEPS)

    monkeypatch.setattr(sums.train_math, "load", load)
    monkeypatch.setattr(sums.train_math, "sample", sample)
    monkeypatch.setattr(sums.train_math, "main", train)
    flags = ["--output_dir", str(tmp_path), "--model", "M", "--max_steps", "1"]
    with pytest.raises(KeyboardInterrupt):
        sums.main(flags)
    sums.main(flags)
    trained_model = str(tmp_path / "training" / "model")
    assert asked == ["M", 0.0, 0.3, 0.6, "M", 0.6, 1.0, trained_model, 0.0, 1.0]
    sums.main(flags)
    assert len(asked) == 10
    assert len(trained) == 1
    assert trained[0].eps_low == 3e-3
    assert trained[0].max_steps == 1
    assert trained[0].dataset == str(tmp_path / "data")
    assert trained[0].output_dir == str(tmp_path / "training")
    assert len((tmp_path / "before.jsonl").read_text().splitlines()) == 4 * 256


def test_grpo_keeps_its_own_range(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sums, "ask", lambda *arguments: seen.append(arguments[3]))
    monkeypatch.setattr(sums.train_math, "main", lambda argv, reward: None)
    monkeypatch.setattr(sums, "show", lambda folder: None)
    sums.main(["--output_dir", str(tmp_path), "--algorithm", "grpo"])
    assert seen[0].eps_low == 0.2


def test_the_logs_that_are_kept_give_the_figures_that_are_told(tmp_path, monkeypatch, capsys):
    run = shutil.copytree(LOGS, tmp_path / "run")
    (run / "table.md").unlink()
    sums.main(["--show", str(run)])
    assert (run / "table.md").read_text() == (LOGS / "table.md").read_text()
    monkeypatch.setattr("sys.argv", ["sums_given.py", str(run), "--model", "not asked again"])
    sums_given.main()
    page = (LOGS.parent / "README.md").read_text()
    said = capsys.readouterr().out
    for figure in "69.5% (63.6% to 74.8%)", "+9.8% (95%: +6.1% to", "+8.6% (95%: +3.5% to":
        assert figure in said
    for figure in "69.5% (63.6% to 74.8%)", "+9.8 points (+6.1 to", "+8.6 (+3.5 to":
        assert figure in page
