"""The tools of tools/: logs, intervals, evaluate and plot."""

import functools
import inspect
import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_math
from evidence import compare, lesson_seeds, rounding
from evidence import sums as evidence_sums
from homework import find_the_bug
from tests.conftest import one_line, parity_reward, rollout_of, sums, write_jsonl
from tools import answers, evaluate, logs, plot, warm_up
from tools.logs import mean_difference, mean_text, paired, read

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


def test_packed_logs_come_out_as_they_went_in(tmp_path, capsys):
    runs = {"a/before": [{"step": 0, "word": "−5"}, {"step": 1}], "b": [{"step": 7}]}
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for name, rows in runs.items():
        logs.write(tmp_path / "runs" / f"{name}.jsonl", rows)
    packed = tmp_path / "all.jsonl"
    logs.main(["pack", str(tmp_path / "runs"), str(packed)])
    assert logs.read(packed) == [{"log": name} | row for name in runs for row in runs[name]]
    logs.append(packed, {"log": "c", "same_as": "b"})
    logs.main(["unpack", str(packed), str(tmp_path / "out")])
    for name, rows in (runs | {"c": runs["b"]}).items():
        assert logs.read(tmp_path / "out" / f"{name}.jsonl") == rows
    with pytest.raises(SystemExit):
        logs.main(["unpack", str(tmp_path / "none.jsonl"), str(tmp_path / "out")])
    assert "none.jsonl does not exist" in capsys.readouterr().err


# ---- intervals.py and evaluate.py ----------------------------------------------------------------


def test_compares_answers_to_the_same_questions():
    before = [1] * 4 + [0] * 6
    after = [0] + [1] * 8 + [0]  # 5 of 10 answers are gained, 1 is lost
    d, interval, p = paired(before, after)
    assert d == pytest.approx(0.4) and interval == pytest.approx((-0.0111, 0.8111), abs=1e-4)
    assert p == 2 * (1 + 6) / 2**6  # at most one of 6 changes is a loss
    assert paired(after, before)[::2] == (pytest.approx(-0.4), p)
    assert paired(before, before) == (0, (0, 0), 1)


def test_a_mean_has_wilsons_interval_and_a_difference_student_s():
    assert mean_text([0, 1, 0, 0]) == "25.0% (4.6% to 69.9%)"
    shared = [0.7, 0.1, 0.5, 0.9, 0.3, 0.2]
    more = [share + 0.01 * gain for share, gain in zip(shared, (1, 2, 3, 4, 5, 6))]
    assert mean_difference(more, shared) == "+3.5 ± 2.0"  # 2.571 * 1.871 / sqrt(6) = 1.96
    assert mean_difference(more, shared, narrowest=3) == "+3.5 ± 3.0*"
    assert mean_difference([0.2], [0.21]) == "-1.0"
    with pytest.raises(ValueError):
        mean_difference(more, shared[:5])


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


def answered(path, rewards, **more):
    """A file with a row for each (question, reward)."""
    rows = [{"question": question, "reward": reward, "tokens": 5} | more
            for question, reward in rewards]
    return write_jsonl(path, rows)


def nothing(*arguments, **more):
    raise AssertionError("this must not be called")


class TestEvaluate:
    def test_keeps_the_answers_and_asks_nothing_twice(self, flags, tmp_path, monkeypatch, capsys):
        path = tmp_path / "new" / "folder" / "before.jsonl"
        evaluate.main([str(path), *flags])
        evaluate.main([str(path), *flags, "--temperature", "0", "1", "1"])
        assert "each temperature is asked once" in capsys.readouterr().out
        first = read(path)
        assert [row["temperature"] for row in first] == [0.0] * 3 + [1.0] * 3
        assert [row["question"] for row in first] == [row["question"] for row in sums(11)[8:]] * 2
        assert [row["gold"] for row in first] == ["8", "9", "10"] * 2
        assert all(1 <= row["tokens"] <= 3 for row in first)
        assert all(row["cut"] == (row["tokens"] == 3) for row in first)
        evaluate.main([str(path), *flags, "--temperature", "1", "--samples", "4"])
        rows = read(path)
        assert rows[:6] == first
        assert [row["sample"] for row in rows[3:]] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
        responses = {tuple(row["response"] for row in rows[i:i + 3]) for i in (3, 6, 9, 12)}
        assert len(responses) == 4
        monkeypatch.setattr(evaluate.train_math, "evaluate", nothing)
        evaluate.main([str(path), *flags, "--temperature", "1", "--samples", "2"])
        out = capsys.readouterr().out
        assert "| before | greedy, float32 |" in out
        assert "| before | at temperature 1.0, 4 samples, float32 |" in out
        assert "| temperature 1.0 | pass@1 | pass@2 | pass@4 | majority@4 |" in out
        assert read(path) == rows

    def test_says_what_an_evaluation_of_a_run_says(self, flags, tmp_path, monkeypatch, capsys):
        """All responses are the same, and three of four answers are 7."""
        rows = [{"question": f"{i}?", "answer": f"#### {7 + i // 3}"} for i in range(4)]
        write_jsonl(tmp_path / "questions" / "test.jsonl", rows)

        def sample(model, tokenizer, questions, *others):
            ids = [[1]] * len(questions)
            return replace(rollout_of(ids, ids), questions=questions, texts=["no"] * len(questions))

        ask = functools.partial(train_math.evaluate, sample=sample)
        monkeypatch.setattr(train_math, "evaluate", ask)
        evaluate.main([str(tmp_path / "before.jsonl"), *flags])
        out = capsys.readouterr().out
        assert "always the same answer has an accuracy of 75.0% at best" in out
        assert "note: 100% of the responses in this evaluation are the same: 'no'" in out

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

    @pytest.mark.parametrize("name", ["", "file/after.jsonl", "file/more/after.jsonl", "a" * 250])
    def test_refuses_a_file_that_cannot_be_written_first(self, flags, tmp_path, name, monkeypatch):
        (tmp_path / "file").write_text("kept")
        monkeypatch.setattr(train_math, "load_questions", nothing)
        assert "cannot be written" in one_line(evaluate.main, tmp_path / name, *flags)
        assert (tmp_path / "file").read_text() == "kept"

    def test_a_reward_that_needs_another_column_is_refused_after_one_question(
            self, flags, tmp_path):
        asked = []

        def encode_prompts(tokenizer, questions, cfg):
            asked.append(len(questions))
            return train_math.encode_prompts(tokenizer, questions, cfg)

        line = one_line(evaluate.main, tmp_path / "a.jsonl", *flags,
                        reward=lambda prompts, completions, difficulty, **columns: [1.0],
                        encode_prompts=encode_prompts)
        assert "difficulty" in line and asked == [1]

    def test_refuses_answers_of_other_settings_rewards_or_models(
            self, flags, tmp_path, monkeypatch):
        path = tmp_path / "before.jsonl"
        answered(path, [("a?", 1)])
        assert "or do not record it" in one_line(evaluate.main, path, *flags)
        path.unlink()
        folder = shutil.copytree(flags[1], tmp_path / "model")
        flags = [*flags, "--model", str(folder)]
        evaluate.main([str(path), *flags])
        rows = read(path)
        monkeypatch.setattr(train_math, "evaluate", nothing)
        for changed, named in (
                ("--instruction=x", "instruction"), ("--system=x", "system"), ("--seed=1", "seed"),
                ("--max_completion_length=2", "max_completion_length"),
                ("--eval_size=2", "questions")):
            line = one_line(evaluate.main, path, *flags, changed)
            assert f"{path} were asked with another {named}, or" in line
        assert "another reward" in one_line(evaluate.main, path, *flags, reward=parity_reward)
        line = one_line(evaluate.main, path, *flags, "--model", "other", "--temperature", "1")
        assert f"{path} has answers of {folder}" in line
        for file in "model.safetensors", "chat_template.jinja":
            data = bytearray((folder / file).read_bytes())
            data[-20] ^= 1  # in the template, a letter
            (folder / file).write_bytes(data)
            assert "another weights, or" in one_line(evaluate.main, path, *flags)
            data[-20] ^= 1
            (folder / file).write_bytes(data)
        evaluate.main([str(path), *flags])  # as before
        assert read(path) == rows

    def test_takes_the_settings_of_the_run_beside_the_model(self, flags, tmp_path, capsys):
        run = tmp_path / "run"
        shutil.copytree(flags[1], run / "model")
        cfg = train_math.parse_settings([*flags, "--instruction=", "--system=Be short."])
        questions, _ = train_math.load_questions(cfg)
        write_jsonl(run / "metrics.jsonl", [
            {"step": 0, "settings": train_math.fingerprint(cfg, questions)}])
        path = tmp_path / "after.jsonl"
        flags = ["--model", str(run / "model") + "/", "--device", "cpu"]
        evaluate.main([str(path), *flags])
        out = capsys.readouterr().out
        assert "--instruction='' --system='Be short.' --max_completion_length=3 --dataset=" in out
        assert "note: the run had" not in out
        assert read(path)[0]["settings"]["system"] == "Be short."
        others = write_jsonl(tmp_path / "all.jsonl", sums(11))
        path = tmp_path / "other.jsonl"
        evaluate.main([str(path), *flags, "--system=No.", "--dataset", others])
        assert "note: the run had other training questions" in capsys.readouterr().out
        assert read(path)[0]["settings"]["system"] == "No."

    def test_compares_each_file_with_the_first(self, tmp_path, capsys):
        """The second file is an evaluation of train_math.py with another reward: its questions are
        in another order, and it has no last number."""
        rows = [{"question": i, "reward": i > 1, "tokens": 5} for i in range(4)]
        before = [row | {"last_number": row["question"] < 3} for row in rows]
        after = [row | {"reward": 1} for row in reversed(rows)]
        evaluate.main([write_jsonl(tmp_path / "before.jsonl", before),
                       write_jsonl(tmp_path / "after.jsonl", after)])
        out = capsys.readouterr().out
        assert "| before | greedy | 2 of 4, 50.0% (15.0% to 85.0%) | 75.0% | - | - |" in out
        assert "| after | greedy | 4 of 4, 100.0% (51.0% to 100.0%) | - | +50.0% (" in out
        with pytest.raises(ValueError, match="different questions"):
            answers.difference(before, after[1:], 0.0)

    @pytest.mark.parametrize("before, after, other, message", [
        ("ab", "ac", {}, "2 and 2, of which 1 are the same"),
        ("ab", "abc", {}, "2 and 3, of which 2 are the same"),
        ("aab", "abb", {}, "3 and 3, of which 2 are the same"),
        ("a", "a", {"gold": "4"}, "the gold answers 3 and 4"),
        ("a", "a", {"temperature": 1.0}, "temperatures [0.0], and after at [1.0]"),
    ])
    def test_refuses_to_compare_other_questions_or_temperatures(
            self, tmp_path, before, after, other, message):
        files = []
        for name, questions, more in ("before", before, {}), ("after", after, other):
            columns = {"gold": "3", "temperature": 0.0} | more
            rewards = [(question, 1) for question in questions]
            files.append(answered(tmp_path / f"{name}.jsonl", rewards, **columns))
        assert message in one_line(evaluate.main, *files)

    def test_a_graded_reward_has_means_without_percent_signs(self, tmp_path, capsys):
        files = [answered(tmp_path / "before.jsonl", [("a", 0.5), ("b", 0.25), ("c", 1)]),
                 answered(tmp_path / "after.jsonl", [("c", 2), ("b", 0.75), ("a", 1.5)])]
        evaluate.main(files)
        out = capsys.readouterr().out
        assert "%" not in out.replace("95%", "")
        # Of 0 to 1, an interval ends at 1. The gains are 1, 0.5, 1: 1.96 * 0.2357 / sqrt(3).
        assert "| before | greedy | 0.583 (0.151 to 1.000) | - | - | - |" in out
        assert "| 1.417 (0.705 to 2.129) | - | +0.833 (+0.567 to +1.100) | - |" in out

    @pytest.mark.parametrize("row", [
        {"reward": 1}, {"question": "a", "reward": None}, {"question": "a", "reward": "1"},
        {"question": ["a"], "reward": 1}, {"question": "a", "reward": float("nan")}, [1]])
    def test_a_missing_column_is_refused_in_one_line(self, tmp_path, row):
        path = write_jsonl(tmp_path / "a.jsonl", [{"question": "b", "reward": 1}, row])
        message = f"row 2 of {path} needs a question, and a number as reward"
        assert message in one_line(evaluate.main, path)

    def test_refuses_missing_files_and_impossible_flags(self, flags, tmp_path, capsys):
        path = str(tmp_path / "before.jsonl")
        assert "--model no/such" in one_line(evaluate.main, path, *flags, "--model", "no/such")
        assert "--dataset no/such" in one_line(evaluate.main, path, *flags, "--dataset", "no/such")
        for wrong, message in (
                (["--eval_size", "3"], "these flags need --model: --eval_size 3"),
                ([path], "the same file is given twice"),
                ([*flags, "--samples", "4"], "--samples needs a --temperature above 0"),
                ([*flags, "--temperature", "0", "1", "--samples", "2"], "--samples needs a"),
                ([*flags, "--samples", "0"], "--samples at least 1"),
                ([*flags, "--temperature", "-1"], "--temperature must be at least 0"),
                ([*flags, "--temperature", "nan"], "--temperature must be at least 0")):
            with pytest.raises(SystemExit):
                evaluate.main([path, *wrong])
            assert message in capsys.readouterr().err
        assert f"{path} does not exist" in one_line(evaluate.main, path)
        (tmp_path / "before.jsonl").touch()
        assert f"{path} has no answers" in one_line(evaluate.main, path)


class TestSamples:
    def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(self):
        for correct, k in itertools.product(range(6), range(1, 6)):
            responses = [1] * correct + [0] * (5 - correct)
            found = [max(some) for some in itertools.combinations(responses, k)]
            assert answers.pass_at(k, correct, 5) == pytest.approx(sum(found) / len(found))

    @pytest.mark.parametrize("given, expected", [
        ("7:1 7:1 8:0", 1), ("8:0 7:1 8:0", 0), ("7:1 8:0", 1 / 2), ("7:1 8:0 9:0", 1 / 3),
        (":0 :0 7:1", 1), (":0 :0", 0), ("7:1 7:0 8:0", 1 / 2)])
    def test_the_majority_has_the_most_votes(self, given, expected):
        """given: the answer and the reward of each response."""
        votes = [vote.split(":") for vote in given.split()]
        group = [{"extracted": answer, "reward": int(reward)} for answer, reward in votes]
        assert answers.majority(group) == pytest.approx(expected)

    def sampled(self, path, correct, n):
        """A file in which the first `correct[i]` of n responses to question i are correct."""
        rows = [{"question": f"{i}?", "reward": sample < c, "tokens": 5, "temperature": 1.0,
                 "sample": sample, "last_number": sample < c,
                 "response": "#### 1" if sample < c else f"#### {sample + 2}"}
                for sample in range(n) for i, c in enumerate(correct)]
        return write_jsonl(path, rows)

    def test_are_compared_question_by_question(self, tmp_path, capsys):
        before = self.sampled(tmp_path / "before.jsonl", [1, 0, 2, 0], 4)
        after = self.sampled(tmp_path / "after.jsonl", [4, 0, 4, 4], 4)
        fewer = self.sampled(tmp_path / "fewer.jsonl", [2, 0, 2, 2], 2)
        evaluate.main([before, after])
        evaluate.main([after, fewer])  # of the first file, only two samples count
        out = capsys.readouterr().out
        # pass@2 is (1/2 + 5/6) / 4; the majority ties 1 of 4 votes, then wins with 2 of 4.
        for line in (
                "| before | at temperature 1.0, 4 samples | 18.8% (0.0% to 42.2%) |",
                "| before | 18.8% (0.0% to 42.2%) | 33.3% (0.0% to 73.3%) | 50.0% (15.0% to 85.0%)"
                " | 31.2% (0.0% to 77.6%) |",
                "| after minus the first | +56.2% (+20.0% to +92.5%) | +41.7% (+4.2% to +79.1%) | "
                "+25.0% (-17.4% to +67.4%) | +43.8% (+0.0% to +87.5%) |",
                "| temperature 1.0 | pass@1 | pass@2 | majority@2 |",
                "| after | 75.0% (30.1% to 95.4%) |"):
            assert line in out

    def test_need_several_answers_that_are_correct_or_wrong(self, tmp_path, capsys):
        before = self.sampled(tmp_path / "before.jsonl", [1, 0], 4)
        single = self.sampled(tmp_path / "single.jsonl", [1, 0], 1)
        evaluate.main([before, single])
        assert "pass@k needs several samples in each file" in capsys.readouterr().out
        rows = [row | {"reward": row["reward"] / 2} for row in read(Path(before))]
        evaluate.main([write_jsonl(tmp_path / "graded.jsonl", rows)])
        assert "rewards that are only 0 and 1" in capsys.readouterr().out


# ---- commands that write after long work ---------------------------------------------------------


@pytest.mark.parametrize("module, argv", [
    (plot, "LOGS --output OUT"), (logs, "pack LOGS OUT"),
    (logs, "unpack LOGS/metrics.jsonl OUT"), (lesson_seeds, "report"), (find_the_bug, "--all"),
    (find_the_bug, "--handout OUT --seed 1"), (compare, "world --log OUT"),
    (rounding, "--gsm8k x --output_dir OUT"), (evidence_sums, "--output_dir OUT --device cpu")])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
        module, argv, tmp_path, monkeypatch):
    """A file stands where the folder of the output would be, and in place of the folder runs."""
    blocked = tmp_path / "runs" / "out"
    blocked.parent.write_text("a file is no folder")
    write_jsonl(tmp_path / "metrics.jsonl", [{"log": "x", "step": 0}])
    for owner, name in ((plot, "draw"), (torch.optim.AdamW, "step"), (train_math, "load")):
        monkeypatch.setattr(owner, name, nothing)
    monkeypatch.setattr(lesson_seeds, "LOG", blocked)
    monkeypatch.chdir(tmp_path)
    flags = argv.replace("LOGS", str(tmp_path)).replace("OUT", str(blocked)).split()
    monkeypatch.setattr("sys.argv", ["program", *flags])
    takes_argv = inspect.signature(module.main).parameters
    line = one_line(module.main if takes_argv else lambda argv: module.main(), *flags)
    assert "cannot be written" in line


# ---- plot.py -------------------------------------------------------------------------------------


def log(n, **more):
    """Rows of a run's log, with an evaluation every second step."""
    rows = [{"step": 0, "eval_reward": 0.2, "eval_reward_interval": [0.1, 0.3]}]
    for step in range(1, n):
        row = {"step": step, "reward": step / 10, "response_length": 5.0 * step,
               "clip_fraction": 0.1 * step, "log_ratio_std": 0.01 * step}
        if step % 2 == 0:
            row["eval_reward"] = step / 9
            row["eval_reward_interval"] = [step / 11, step / 8]
        rows.append(row | more)
    return rows


def test_draws_reward_length_clip_and_spread(tmp_path, monkeypatch):
    kept = []

    class Figure(plot.Figure):
        def savefig(self, *arguments, **more):
            kept.append(self)
            super().savefig(*arguments, **more)

    monkeypatch.setattr(plot, "Figure", Figure)
    rows = log(5)
    own_reward = [{"step": 0, "eval_reward": 2.5}]  # not 0 or 1: no interval
    plot.draw({"gspo": rows, "still": log(5, log_ratio_std=None), "own": own_reward},
              tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[1:4] == b"PNG"
    names = ("reward", "response_length", "clip_fraction", "log_ratio_std")
    axes = kept[0].axes
    for axis, name in zip(axes, names, strict=True):
        drawn = axis.lines[0].get_xydata().tolist()
        assert drawn == [[row["step"], row[name]] for row in rows[1:]]
    evaluated = [list(line.get_ydata()) for line in axes[0].lines[1:7]]
    expected = [values for row in rows[::2]
                for values in ([row["eval_reward"]], row["eval_reward_interval"])]
    assert evaluated == expected
    assert len(axes[3].lines[1].get_xdata()) == 0, "nothing where nothing was measured"
    assert list(axes[0].lines[-1].get_ydata()) == [2.5]


def test_pictures_several_runs_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(name).mkdir()
        write_jsonl(Path(name, "metrics.jsonl"), log(4))
    monkeypatch.setattr("sys.argv", ["plot.py", "a", "b", "--output", "two.png"])
    plot.main()
    assert Path("two.png").stat().st_size > 1000 and "two.png" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["plot.py", "a", "nowhere"])
    with pytest.raises(SystemExit):
        plot.main()
    assert "no metrics.jsonl in nowhere" in capsys.readouterr().err


def test_an_algorithm_has_its_colour_and_line_style_and_two_runs_differ():
    default = {"algorithm": "gspo", "eps_high": 4e-4, "epochs": 4, "minibatches": 8}
    kinds = {
        "gspo": {},
        "grpo": {"algorithm": "grpo", "eps_high": 0.27},
        "no clipping": {"eps_high": 1e9},
        "one update": {"epochs": 1, "minibatches": 1}}
    runs = kinds | {"again": {}, "other": {"algorithm": "cispo"}}
    styles = plot.styles_of({label: [{"step": 0, "settings": default | own}]
                             for label, own in runs.items()})
    assert len(set(styles.values())) == len(runs)
    for kind in kinds:
        assert styles[kind][:2] == plot.STYLES[kind]
    assert styles["other"][:2] not in plot.STYLES.values()


# ---- warm_up.py ----------------------------------------------------------------------------------


def test_supervised_training_learns_an_answer_and_its_end(fresh):
    model, tokenizer = fresh
    row = {"question": "How many?", "answer": "1+1=2\n#### 2"}
    warm_up.supervise(model, tokenizer, lambda: row, 40, 4, 1e-2, "warm-up")
    cfg = train_math.Settings(device="cpu", instruction="", max_completion_length=20)
    (found,) = train_math.evaluate(model, tokenizer, [row], cfg)["eval_results"]
    assert found["response"] == row["answer"] and found["tokens"] == len(row["answer"]) + 1
