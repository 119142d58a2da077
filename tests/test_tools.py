"""The tools of tools/: logs, intervals, evaluate, plot and warm_up."""

from pathlib import Path

import pytest
import torch

import train_math
from tests.conftest import SMALL, one_line, sums, write_jsonl
from tools import evaluate, logs, plot, warm_up
from tools.logs import accuracy_text, paired, read
from tools.warm_up import tiny_model, tiny_tokenizer

# ---- logs.py -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_row_that_a_kill_cut_short_is_left_out(tmp_path, name):
    path = tmp_path / name
    assert logs.read(path) == []
    rows = [{"step": 0}, {"step": 1, "word": "−5"}]
    logs.write(path, rows)
    logs.append(path, {"step": 2})
    assert logs.read(path) == [*rows, {"step": 2}]
    data = path.read_bytes()
    if path.suffix == ".gz":
        assert data[:2] == b"\x1f\x8b"
        path.write_bytes(data[:-12])
        assert logs.read(path)[:2] == rows
    else:
        path.write_bytes(data + '{"step": 3, "word": "−'.encode()[:-1])
        logs.append(path, {"step": 4})
        assert logs.read(path) == [*rows, {"step": 2}, {"step": 4}]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    logs.write(path, [{"step": 0}])

    def half(path, data):
        with open(path, "wb") as file:
            file.write(data[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(KeyboardInterrupt):
        logs.write(path, [{"step": 1}])
    assert path.read_text() == '{"step": 0}\n'


def test_packed_logs_come_out_as_they_went_in(tmp_path):
    """The packed file is readable, and holds equal logs once."""
    folder = tmp_path / "runs"
    same = [{"step": 0, "word": "−5"}, {"step": 1}]
    for name, rows in ("a/before", same), ("a/eps_0.02", [{"step": 7}]), ("b/before", same):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        logs.write(path, rows)
    packed = tmp_path / "all.jsonl"
    logs.main(["pack", str(folder), str(packed)])
    assert logs.read(packed) == [
        {"log": "a/before", "step": 0, "word": "−5"},
        {"log": "a/before", "step": 1},
        {"log": "a/eps_0.02", "step": 7},
        {"log": "b/before", "same_as": "a/before"},
    ]
    logs.main(["unpack", str(packed), str(tmp_path / "out")])
    contents = []
    for top in folder, tmp_path / "out":
        files = top.rglob("*.jsonl")
        contents.append({path.relative_to(top): path.read_bytes() for path in files})
    assert len(contents[0]) == 3
    assert contents[0] == contents[1]


def test_a_missing_file_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        logs.main(["unpack", str(tmp_path / "none.jsonl"), str(tmp_path / "out")])
    assert "none.jsonl does not exist" in capsys.readouterr().err


# ---- intervals.py and evaluate.py ----------------------------------------------------------------


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


class TestEvaluate:
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

    @pytest.mark.parametrize("left, expected", [
        (None, "float32"), ([torch.float16, torch.bfloat16], "float16"),
        ([torch.bfloat16], "bfloat16"), ([], "float32")])
    def test_says_which_precision_cuda_has_used(self, fresh, left, expected):
        model, _ = fresh
        if left is not None:  # static_rollout was used
            model.sampling_dtypes = left
        assert evaluate.precision(model, 1.0, "cuda") == expected
        assert evaluate.precision(model, 0.0, "cuda") == "float32"
        assert evaluate.precision(model, 1.0, "cpu") == "float32"

    def test_compares_each_file_with_the_first(self, tmp_path, capsys):
        """The second file is an evaluation of train_math.py with another reward: its questions are
        in another order, and it has no last number."""
        rows = [{"question": i, "reward": i > 1, "tokens": 5} for i in range(4)]
        before = [row | {"last_number": row["question"] < 3} for row in rows]
        after = [row | {"reward": 1} for row in reversed(rows)]
        files = []
        for name, answers in ("before", before), ("after", after):
            files.append(write_jsonl(tmp_path / f"{name}.jsonl", answers))
        evaluate.main(files)
        out = capsys.readouterr().out
        assert "| before | greedy | 2 of 4, 50.0% (15.0% to 85.0%) | 75.0% | - | - |" in out
        assert "| after | greedy | 4 of 4, 100.0% (51.0% to 100.0%) | - | +50.0% (" in out
        evaluate.main(["--last_number", files[0]])
        assert "| before | greedy | 3 of 4, 75.0%" in capsys.readouterr().out
        with pytest.raises(ValueError, match="different questions"):
            evaluate.difference(before, after[1:], 0.0)

    def test_refuses_missing_files_and_unknown_flags(self, flags, tmp_path, capsys):
        path = str(tmp_path / "before.jsonl")
        assert "--model no/such" in one_line(evaluate.main, path, *flags, "--model", "no/such")
        assert "--dataset no/such" in one_line(evaluate.main, path, *flags, "--dataset", "no/such")
        with pytest.raises(SystemExit):
            evaluate.main([path, "--eval_size", "3"])
        assert "these flags need --model: --eval_size 3" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            evaluate.main([path])
        assert f"{path} does not exist" in capsys.readouterr().err
        (tmp_path / "before.jsonl").touch()
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


# ---- plot.py -------------------------------------------------------------------------------------


def log(n, **more):
    """Rows of a run's log, with an evaluation every second step."""
    first = {"step": 0, "eval_reward": 0.2, "eval_reward_interval": [0.1, 0.3]}
    rows = [first]
    for step in range(1, n):
        row = {"step": step, "reward": step / 10, "response_length": 5.0 * step,
               "clip_fraction": 0.1 * step, "log_ratio_std": 0.01 * step}
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


# ---- warm_up.py ----------------------------------------------------------------------------------


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
    """The pad token is the end token. The end token must be learned nevertheless. What train_math
    can hold out is not trained on."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    for part in tiny_model(tokenizer, seed=0), tokenizer:
        part.save_pretrained("model")
    rows = [row | {"answer": f"1+1=<<1+1=2>>2\n{row['answer']}"} for row in sums(30)]
    rows[::2] = [row | {"answer": row["answer"].split()[-1]} for row in rows[::2]]
    data = ["--dataset", write_jsonl(tmp_path / "q.jsonl", rows), "--device", "cpu"]
    flags = [
        "--model", "model", "--steps", "30", "--learning_rate", "1e-2", "--output_dir", "out/cold"]
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
    trained = {text.partition("\n")[0] for texts, _ in seen for text in texts}
    questions, _ = train_math.load_questions(train_math.Settings(dataset=data[1]))
    assert trained == {row["question"] for row in questions}
    with pytest.raises(SystemExit):
        warm_up.main([*flags, *data])
    assert "exists already" in capsys.readouterr().err
    small = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    flags = ["--model", "out/cold", *small, *data, "--max_steps", "1", "--output_dir", "rl"]
    train_math.main(flags)
    assert len(read(Path("rl", "metrics.jsonl"))) == 2


@pytest.mark.parametrize(
    "wrong", ["--dataset nowhere.jsonl", "--dataset q.jsonl --model ./no/where"])
def test_refuses_a_missing_model_or_dataset_in_one_line(tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "q.jsonl", sums(5))
    line = one_line(warm_up.main, "--steps", "1", "--output_dir", "out", *wrong.split())
    assert wrong.split()[-1] in line
    assert not Path("out").exists()
