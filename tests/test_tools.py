"""The tools of tools/: logs, intervals, evaluate and plot."""

import shutil
from pathlib import Path

import pytest
import torch

import train_math
from evidence import compare, lesson_seeds, rounding
from evidence import sums as evidence_sums
from tests.conftest import one_line, parity_reward, spy, sums, write_jsonl
from tools import answers, evaluate, logs, plot, warm_up
from tools.logs import mean_difference, mean_text, paired, read


def nothing(*arguments, **more):
    raise AssertionError("this must not be called")


# ---- logs.py -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_row_that_a_kill_cut_short_is_left_out(tmp_path, name):
    path = tmp_path / name
    assert read(path) == []
    rows = [{"step": 0}, {"step": 1, "word": "−5"}]
    logs.write(path, rows)
    logs.append(path, {"step": 2})
    assert read(path) == [*rows, {"step": 2}]
    data = path.read_bytes()
    if path.suffix == ".gz":
        assert data[:2] == b"\x1f\x8b"
        path.write_bytes(data[:-12])
        assert read(path)[:2] == rows
    else:
        path.write_bytes(data + '{"step": 3, "word": "−'.encode()[:-1])
        logs.append(path, {"step": 4})
        assert read(path) == [*rows, {"step": 2}, {"step": 4}]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    logs.write(path, [{"step": 0}])
    monkeypatch.setattr(Path, "replace", nothing)
    with pytest.raises(AssertionError):
        logs.write(path, [{"step": 1}])
    assert read(path) == [{"step": 0}]


def test_packed_logs_come_out_as_they_went_in(tmp_path, capsys):
    runs = {"a/before": [{"step": 0, "word": "−5"}, {"step": 1}], "b": [{"step": 7}]}
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for name, rows in runs.items():
        logs.write(tmp_path / "runs" / f"{name}.jsonl", rows)
    packed = tmp_path / "all.jsonl"
    logs.main(["pack", str(tmp_path / "runs"), str(packed)])
    assert read(packed) == [{"log": name} | row for name in runs for row in runs[name]]
    logs.append(packed, {"log": "c", "same_as": "b"})
    logs.main(["unpack", str(packed), str(tmp_path / "out")])
    for name, rows in (runs | {"c": runs["b"]}).items():
        assert read(tmp_path / "out" / f"{name}.jsonl") == rows
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


class TestEvaluate:
    def test_keeps_the_answers_and_asks_nothing_twice(self, command, tmp_path, monkeypatch, capsys):
        _, held_out = train_math.load_questions(train_math.parse_settings(command))
        path = tmp_path / "new" / "folder" / "before.jsonl"
        evaluate.main([str(path), *command])
        evaluate.main([str(path), *command, "--temperature", "0", "1", "1"])
        assert "each temperature is asked once" in capsys.readouterr().out
        first = read(path)
        assert [row["temperature"] for row in first] == [0.0] * 4 + [1.0] * 4
        assert [row["question"] for row in first] == [row["question"] for row in held_out] * 2
        assert [f"#### {row['gold']}" for row in first] == [row["answer"] for row in held_out] * 2
        assert all(row["cut"] == (row["tokens"] == 6) for row in first)
        evaluate.main([str(path), *command, "--temperature", "1", "--samples", "4"])
        rows = read(path)
        assert rows[:8] == first
        assert [row["sample"] for row in rows[4:]] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
        responses = {tuple(row["response"] for row in rows[i:i + 4]) for i in (4, 8, 12, 16)}
        assert len(responses) == 4
        monkeypatch.setattr(train_math, "evaluate", nothing)
        evaluate.main([str(path), *command, "--temperature", "1", "--samples", "2"])
        out = capsys.readouterr().out
        assert "| before | greedy, float32 |" in out
        assert "| before | at temperature 1.0, 4 samples, float32 |" in out
        assert "| temperature 1.0 | pass@1 | pass@2 | pass@4 | majority@4 |" in out
        assert read(path) == rows

    def test_says_what_an_evaluation_of_a_run_says(self, command, tmp_path, monkeypatch, capsys):
        result = {"question": "1?", "response": "no", "reward": 0.0, "tokens": 1}
        row = {"eval_reward": 0.0, "eval_best_constant": 0.75, "eval_results": [result] * 4}
        monkeypatch.setattr(train_math, "evaluate", lambda *arguments, **more: row)
        evaluate.main([str(tmp_path / "before.jsonl"), *command])
        out = capsys.readouterr().out
        assert "always the same answer has an accuracy of 75.0% at best" in out

    def test_says_which_precision_cuda_has_used(self, fresh):
        model, _ = fresh
        assert evaluate.precision(model, 1.0, "cuda") == "float16"
        assert evaluate.precision(model, 0.0, "cuda") == "float32"
        assert evaluate.precision(model, 1.0, "cpu") == "float32"
        model.config.model_type = "gpt2"
        assert evaluate.precision(model, 1.0, "cuda") == "float32"

    def test_a_reward_that_needs_another_column_is_refused_after_one_question(
            self, command, tmp_path):
        asked = []
        line = one_line(evaluate.main, tmp_path / "a.jsonl", *command,
                        reward=lambda prompts, completions, difficulty, **columns: [1.0],
                        encode_prompts=spy(train_math.encode_prompts, asked))
        assert "difficulty" in line and [len(arguments[1]) for arguments, *_ in asked] == [1]

    def test_refuses_answers_of_other_settings_rewards_or_models(
            self, command, tmp_path, monkeypatch):
        def line(*flags, **parts):
            return one_line(evaluate.main, path, *command, "--model", folder, *flags, **parts)

        path = tmp_path / "before.jsonl"
        folder = shutil.copytree(command[1], tmp_path / "model")
        write_jsonl(path, rows_of("a", [1]))
        assert "or do not record it" in line()
        path.unlink()
        evaluate.main([str(path), *command, "--model", str(folder)])
        rows = read(path)
        monkeypatch.setattr(train_math, "evaluate", nothing)
        for changed in "instruction=x", "system=x", "seed=1", "max_completion_length=2":
            named = changed.partition("=")[0]
            assert f"{path} were asked with another {named}, or" in line(f"--{changed}")
        assert "another questions, or" in line("--eval_size=2")
        assert "another reward" in line(reward=parity_reward)
        assert f"{path} has answers of {folder}" in line("--model", "other", "--temperature", "1")
        for file in "model.safetensors", "chat_template.jinja":
            data = (folder / file).read_bytes()
            (folder / file).write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
            assert "another weights, or" in line()
            (folder / file).write_bytes(data)
        evaluate.main([str(path), *command, "--model", str(folder)])  # as before
        assert read(path) == rows

    def test_takes_the_settings_of_the_run_beside_the_model(self, command, tmp_path, capsys):
        run = tmp_path / "run"
        shutil.copytree(command[1], run / "model")
        cfg = train_math.parse_settings([*command, "--instruction=", "--system=Be short."])
        questions, _ = train_math.load_questions(cfg)
        write_jsonl(run / "metrics.jsonl", [
            {"step": 0, "settings": vars(cfg) | {
                "questions": train_math.checksum(questions)}}])
        path = tmp_path / "after.jsonl"
        command = ["--model", str(run / "model") + "/", "--device", "cpu"]
        evaluate.main([str(path), *command])
        out = capsys.readouterr().out
        assert "--instruction='' --system='Be short.' --max_completion_length=6 --dataset=" in out
        assert "note: the run had" not in out
        assert read(path)[0]["settings"]["system"] == "Be short."
        others = write_jsonl(tmp_path / "all.jsonl", sums(11))
        path = tmp_path / "other.jsonl"
        evaluate.main([str(path), *command, "--system=No.", "--dataset", others])
        assert "note: the run had other training questions" in capsys.readouterr().out
        assert read(path)[0]["settings"]["system"] == "No."

    @pytest.mark.parametrize("words, message", [
        ("new FLAGS --samples 0", "--samples at least 1"),
        ("new FLAGS --temperature -1", "--temperature must be at least 0"),
        ("new FLAGS --temperature inf", "--temperature must be at least 0"),
        ("new FLAGS --temperature 0 1 --samples 2", "--samples needs a --temperature above 0"),
        ("new --eval_size 3", "these flags need --model: --eval_size 3"),
        ("new ./new", "the same file is given twice"),
        ("new", "new does not exist"),
        ("empty", "empty has no answers")])
    def test_refuses_missing_files_and_impossible_flags(
            self, command, tmp_path, monkeypatch, capsys, words, message):
        monkeypatch.chdir(tmp_path)
        Path("empty").touch()
        with pytest.raises(SystemExit) as stop:
            evaluate.main(words.replace("FLAGS", " ".join(command)).split())
        assert message in f"{stop.value} {capsys.readouterr().err}"


# ---- answers.py ----------------------------------------------------------------------------------


def rows_of(questions, rewards, **more):
    """A row for each question, which has one letter."""
    return [{"question": question, "reward": reward, "tokens": 5} | more
            for question, reward in zip(questions, rewards)]


def sampled(n, *correct):
    """Rows of which the first `correct[i]` of n responses to question i are correct."""
    return [{"question": f"{i}?", "reward": sample < c, "tokens": 5, "temperature": 1.0,
             "sample": sample, "last_number": sample < c,
             "response": "#### 1" if sample < c else f"#### {sample + 2}"}
            for sample in range(n) for i, c in enumerate(correct)]


class TestTables:
    @pytest.fixture
    def printed(self, tmp_path, capsys):
        """What evaluate.py prints for the rows of several models."""
        def printed(**models):
            evaluate.main([write_jsonl(tmp_path / f"{name}.jsonl", rows)
                           for name, rows in models.items()])
            return capsys.readouterr().out
        return printed

    def test_compare_each_file_with_the_first(self, printed):
        """The second file is an evaluation of train_math.py with another reward: its questions are
        in another order, and it has no last number."""
        before = rows_of("abc", [0, 0, 1], last_number=1) + rows_of("d", [1], last_number=0)
        out = printed(before=before, after=rows_of("dcba", [1] * 4))
        assert "| before | greedy | 2 of 4, 50.0% (15.0% to 85.0%) | 75.0% | - | - |" in out
        assert "| after | greedy | 4 of 4, 100.0% (51.0% to 100.0%) | - | +50.0% (" in out

    def test_name_files_that_were_asked_with_other_settings(self, printed):
        settings = {"instruction": "Add.", "seed": 1, "model": "a", "system": None}
        others = settings | {"instruction": "", "seed": 2, "model": "b", "reward": "mine"}
        files = [rows_of("ab", [0, 1], **more) for more in (
            {"settings": settings}, {"settings": settings | {"model": "c"}}, {},
            {"settings": others})]
        out = printed(**dict(zip("wxyz", files)))
        notes = [line for line in out.splitlines() if line.startswith("note")]
        assert notes == ["note: z was asked with another instruction, reward than w"]

    @pytest.mark.parametrize("before, after, other, message", [
        ("ab", "ac", {}, "2 and 2, of which 1 are the same"),
        ("ab", "abc", {}, "2 and 3, of which 2 are the same"),
        ("ab", "a", {}, "2 and 1, of which 1 are the same"),
        ("aab", "abb", {}, "3 and 3, of which 2 are the same"),
        ("a", "a", {"gold": "4"}, "the gold answers 3 and 4"),
        ("a", "a", {"temperature": 1.0}, r"temperatures \[0.0\], and after at \[1.0\]"),
    ])
    def test_refuse_other_questions_and_temperatures(
            self, printed, before, after, other, message):
        columns = {"gold": "3", "temperature": 0.0}
        with pytest.raises(SystemExit, match=message):
            printed(before=rows_of(before, [1] * 3, **columns),
                    after=rows_of(after, [1] * 3, **columns | other))

    @pytest.mark.parametrize("row", [
        {"reward": 1}, {"question": "a", "reward": None}, {"question": "a", "reward": "1"},
        {"question": ["a"], "reward": 1}, {"question": "a", "reward": float("nan")}, [1]])
    def test_refuse_a_row_without_a_question_or_a_reward(self, printed, row):
        with pytest.raises(SystemExit, match="row 2 of .* needs a question, and a number as"):
            printed(a=[*rows_of("b", [1]), row])

    def test_have_means_without_percent_signs_for_a_graded_reward(self, printed):
        out = printed(before=rows_of("abc", [0.5, 0.25, 1]), after=rows_of("cba", [2, 0.75, 1.5]))
        assert "%" not in out.replace("95%", "")
        # Of 0 to 1, an interval ends at 1. The gains are 1, 0.5, 1: 1.96 * 0.2357 / sqrt(3).
        assert "| before | greedy | 0.583 (0.151 to 1.000) | - | - | - |" in out
        assert "| 1.417 (0.705 to 2.129) | - | +0.833 (+0.567 to +1.100) | - |" in out

    def test_compare_several_samples_question_by_question(self, printed):
        """Of a file with more samples than the other one, only the first ones count."""
        after = sampled(4, 4, 0, 4, 4)
        out = printed(before=sampled(4, 1, 0, 2, 0), after=after)
        out += printed(after=after, fewer=sampled(2, 2, 0, 2, 2))
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

    def test_of_pass_at_k_need_several_samples_that_are_correct_or_wrong(self, printed):
        several = sampled(4, 1, 0)
        out = printed(several=several, single=sampled(1, 1, 0))
        assert "pass@k needs several samples in each file" in out
        graded = [row | {"reward": row["reward"] / 2} for row in several]
        assert "rewards that are only 0 and 1" in printed(graded=graded)


@pytest.mark.parametrize("given, expected", [
    ("7:1 7:1 8:0", 1), ("8:0 7:1 8:0", 0), ("7:1 8:0", 1 / 2), ("7:1 8:0 9:0", 1 / 3),
    (":0 :0 7:1", 1), (":0 :0", 0), ("7:1 7:0 8:0", 1 / 2)])
def test_the_majority_has_the_most_votes(given, expected):
    """given: the answer and the reward of each response."""
    votes = [vote.split(":") for vote in given.split()]
    group = [{"extracted": answer, "reward": int(reward)} for answer, reward in votes]
    assert answers.majority(group) == pytest.approx(expected)


# ---- commands that write after long work ---------------------------------------------------------


@pytest.mark.parametrize("name", ["", "file/after.jsonl", "file/more/after.jsonl", "a" * 250])
def test_a_path_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot be written"):
        logs.make_writable(tmp_path / name)


@pytest.mark.parametrize("module, argv", [
    (plot, ". --output runs/out"), (logs, "pack . runs/out"),
    (logs, "unpack metrics.jsonl runs/out"), (evaluate, "runs/out --model x"),
    (lesson_seeds, "report"), (compare, "world --log runs/out"),
    (rounding, "--gsm8k x --output_dir runs/out"),
    (evidence_sums, "--output_dir runs/out --device cpu")])
def test_it_is_refused_before_the_work(module, argv, tmp_path, monkeypatch):
    """A file stands in place of the folder runs."""
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    write_jsonl(Path("metrics.jsonl"), [{"log": "x", "step": 0}])
    for owner, name in ((plot, "draw"), (torch.optim.AdamW, "step"), (train_math, "load"),
                        (train_math, "load_questions")):
        monkeypatch.setattr(owner, name, nothing)
    monkeypatch.setattr(lesson_seeds, "LOG", Path("runs/out"))
    monkeypatch.setattr("sys.argv", ["program", *argv.split()])
    arguments = [argv.split()] if module is evidence_sums else []
    with pytest.raises(SystemExit, match="cannot be written"):
        module.main(*arguments)


# ---- plot.py -------------------------------------------------------------------------------------


def test_draws_reward_length_clip_and_spread(whole, monkeypatch):
    kept = []
    monkeypatch.setattr(plot.Figure, "savefig", lambda figure, *_, **more: kept.append(figure))
    rows = read(whole / "metrics.jsonl")
    still = [row | {"log_ratio_std": None} for row in rows]
    own_reward = [{"step": 0, "eval_reward": 2.5}]  # not 0 or 1: no interval
    plot.draw({"gspo": rows, "still": still, "own": own_reward}, "picture.png")
    axes = kept[0].axes
    names = "reward", "response_length", "clip_fraction", "log_ratio_std"
    for axis, name in zip(axes, names, strict=True):
        drawn = axis.lines[0].get_xydata().tolist()
        assert drawn == [[row["step"], row[name]] for row in rows[1:]]
    expected = []
    for row in rows[::2]:
        expected += [[row["eval_reward"]], row["eval_reward_interval"]]
    drawn = [list(line.get_ydata()) for line in axes[0].lines]
    assert drawn[1:9] == expected and drawn[-1] == [2.5]
    assert len(axes[3].lines[1].get_xdata()) == 0, "nothing where nothing was measured"


def test_pictures_several_runs_from_the_command_line(whole, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "two.png"
    flags = ["plot.py", str(whole), str(tmp_path), "--output", str(picture)]
    monkeypatch.setattr("sys.argv", flags)
    with pytest.raises(SystemExit):
        plot.main()
    assert f"no metrics.jsonl in {tmp_path}" in capsys.readouterr().err
    shutil.copy(whole / "metrics.jsonl", tmp_path)
    plot.main()
    assert picture.read_bytes()[1:4] == b"PNG" and "two.png" in capsys.readouterr().out


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
