"""The tools of tools/: logs, answers, evaluate, plot and warm_up."""
import io
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

import train_math
from support.task import load_questions
from tests.conftest import at_call, one_line, parity_reward, spy, sums, write_jsonl
from tools import evaluate, logs, plot, warm_up
from tools.answers import tables
from tools.logs import read


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_row_that_a_kill_cut_short_is_left_out(tmp_path, monkeypatch, name):
    path = tmp_path / name
    rows = [{"step": 0}, {"step": 1, "word": "−5"}]
    logs.write(path, rows)
    logs.append(path, {"step": 2}, {"step": 3})
    assert read(path) == [*rows, {"step": 2}, {"step": 3}]
    data = path.read_bytes()
    monkeypatch.setattr(Path, "replace", None)
    with pytest.raises(TypeError):
        logs.write(path, [{"step": 1}])
    assert path.read_bytes() == data, "an interrupted write leaves the old file"
    if path.suffix == ".gz":
        path.write_bytes(data[:-12])
        assert read(path)[:2] == rows
    else:
        path.write_bytes(data + '{"step": 4, "word": "−'.encode()[:-1])
        logs.append(path, {"step": 5})
        assert read(path)[3:] == [{"step": 3}, {"step": 5}]


@pytest.mark.parametrize("module, words", [
    (plot, ". --output file/new.png"), (evaluate, "file/new --model x --dataset x.csv"),
    (warm_up, "metrics.jsonl --model x --instruction= --output_dir file/new")])
def test_a_wrong_path_is_refused_before_the_work(module, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    write_jsonl(Path("metrics.jsonl"), [{"question": "x", "answer": "y", "step": 0}])
    assert "cannot be written" in one_line(module.main, *words.split())


def logging_reward(completions, log_metric, **columns):
    log_metric("length", [len(text) for text in completions])
    log_metric("half", torch.tensor(0.5))
    log_metric("word", [Path("a")] * len(completions))
    return [1] * len(completions)


class TestEvaluate:
    def test_keeps_the_answers_and_asks_nothing_twice(self, command, tmp_path, monkeypatch, capsys):
        _, held_out = load_questions(train_math.parse_settings(command))
        path = tmp_path / "new" / "folder" / "before.jsonl"
        evaluate.main([str(path), *command, "--temperature", "0", "1", "1"])
        first = read(path)
        assert [row["temperature"] for row in first] == [0.0] * 4 + [1.0] * 4
        assert [row["question"] for row in first] == [row["question"] for row in held_out] * 2
        evaluate.main([str(path), *command, "--temperature", "1", "--samples", "4"])
        rows = read(path)
        assert rows[:8] == first and [row["sample"] for row in rows[8::4]] == [1, 2, 3]
        assert len({tuple(row["response"] for row in rows[i:i + 4]) for i in (4, 8, 12, 16)}) == 4
        asked = []
        monkeypatch.setattr(train_math, "evaluate", spy(train_math.evaluate, asked))
        evaluate.main([str(path), *command, "--temperature", "1", "--samples", "2"])
        assert [len(arguments[2]) for arguments, *_ in asked] == [1], "only the trial"
        one_line(evaluate.main, path, *command, "--temperature", "-1")
        one_line(evaluate.main, path, *command, "--samples", "2")
        out, errors = capsys.readouterr()
        assert "| greedy, 4 questions | accuracy (95%) |" in out
        assert errors.count("--temperature must be at least 0, and above 0 for several") == 2

    def test_on_a_full_disk_keeps_its_answers_and_continues(self, command, tmp_path, monkeypatch):
        whole, stopped = (tmp_path / name for name in ("whole.jsonl", "stopped.jsonl"))
        flags = [*command, "--rollout_rows", "2", "--temperature", "0", "1"]
        evaluate.main([str(whole), *flags])
        expected = read(whole)
        monkeypatch.setattr(evaluate, "append", at_call(6, logs.append, OSError("no space left")))
        assert one_line(evaluate.main, stopped, *flags) == "no space left"
        assert read(stopped) == expected[:6] and len(expected) == 8
        stopped.write_bytes(stopped.read_bytes()[:-20])
        evaluate.main([str(stopped), *flags])
        assert read(stopped)[:5] == expected[:5]
        assert [row["question"] for row in read(stopped)] == [row["question"] for row in expected]

    @pytest.mark.parametrize("data", [
        b"question,answer\n1 + 1?,2\xff", b'{"question": "1 + 1?"}', b'{"reward": 1}', b"1\n2\n"])
    def test_never_writes_into_a_file_of_something_else(self, command, tmp_path, data):
        path = tmp_path / "data.jsonl"
        path.write_bytes(data)
        assert "holds no answers" in one_line(evaluate.main, path, *command)
        assert path.read_bytes() == data

    def test_needs_no_character_of_the_console(self, command, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
        evaluate.main([str(tmp_path / "после.jsonl"), *command])

    def test_shows_what_a_reward_logs(self, command, tmp_path, capsys):
        evaluate.main([str(tmp_path / "a.jsonl"), *command], reward=logging_reward)
        rows = read(tmp_path / "a.jsonl")
        assert all(row["length"] == len(row["response"]) and row["word"] == "a" for row in rows)
        length = sum(row["length"] for row in rows) / 4
        out = capsys.readouterr().out
        assert "| cut | half | length | tokens |" in out and f"| 0.5 | {length:.3g} |" in out

    def test_refuses_answers_of_other_settings_rewards_or_models(self, command, tmp_path):
        def line(*flags, **parts):
            return one_line(evaluate.main, path, *command, "--model", folder, *flags, **parts)

        path = str(tmp_path / "before.jsonl")
        folder = shutil.copytree(command[1], tmp_path / "model")
        evaluate.main([path, *command, "--model", str(folder)])
        for flag in "--instruction=x", "--system=x", "--seed=1", "--max_completion_length=2":
            assert f"{path} were asked with another {flag[2:].split('=')[0]}, or" in line(flag)
        assert "another questions, reward, or" in line("--eval_size=2", reward=parity_reward)
        evaluate.main([path, *command, "--model", f"{folder}/"])  # the same model
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
        assert "another weights, or" in line()

    def test_takes_the_settings_of_the_run_beside_the_model(self, whole, tmp_path, capsys):
        run = shutil.copytree(whole, tmp_path / "run")
        rows = read(run / "metrics.jsonl")
        rows[0]["settings"] |= {"instruction": "", "system": "Be short."}
        write_jsonl(run / "metrics.jsonl", rows)
        command = ["--model", str(run / "model") + "/", "--device", "cpu"]
        evaluate.main([str(tmp_path / "a.jsonl"), *command])
        out = capsys.readouterr().out
        assert "--instruction='' --system='Be short.' --max_completion_length=6 --dataset=" in out
        assert "note: the run had" not in out and len(read(tmp_path / "a.jsonl")) == 4
        others = write_jsonl(tmp_path / "all.jsonl", sums(11))
        evaluate.main([str(tmp_path / "b.jsonl"), *command, "--system=No.", "--dataset", others])
        out = capsys.readouterr().out
        assert "--system='No.'" in out and "note: the run had other training questions" in out


def rows_of(questions, rewards, **more):
    return [{"question": question, "reward": reward, "tokens": 5} | more
            for question, reward in zip(questions, rewards)]


def sampled(n, *correct):
    return [{"question": f"{i}?", "reward": sample < c, "temperature": 1.0, "sample": sample}
            for sample in range(n) for i, c in enumerate(correct)]


class TestTables:
    def test_compare_each_file_with_the_first_and_show_each_label(self):
        before = rows_of("ab", [0, 0], gold="no", cut=1) + rows_of("cd", [1, 1], gold="yes", cut=1)
        other = rows_of("ab", [1, 1], gold="no") + rows_of("cd", [1, 1], gold="yes")
        out = tables({"before": before, "other": other})
        assert "| before | 50.0% (15.0% to 85.0%) | - | 1 | 5 |" in out
        # The differences are 1, 1, 0, 0: 1.96 * 0.5 / 2.
        assert "| other | 100.0% (51.0% to 100.0%) | +50.0% (+1.0% to +99.0%) | - | 5 |" in out
        assert "| no | 0 of 2 | 2 of 2 |\n| yes | 2 of 2 | 2 of 2 |" in out

    def test_name_files_that_were_asked_with_other_settings(self, tmp_path, capsys):
        first = {"instruction": "Add.", "seed": 1, "weights": 1, "system": None}
        other = {"instruction": "", "seed": 2, "weights": 2, "system": None, "reward": "mine"}
        files = [write_jsonl(tmp_path / f"{name}.jsonl", rows_of("ab", [0, 1], settings=settings))
                 for name, settings in zip("wxyz", (first, first | {"weights": 3}, {}, other))]
        evaluate.main(files)
        assert re.findall("note: .*/(.*)", capsys.readouterr().out) == [
            "z was asked with another instruction, reward than the first"]

    @pytest.mark.parametrize("after, gold", [("ac", "3"), ("abc", "3"), ("ba", "3"), ("ab", "4")])
    def test_refuse_other_questions(self, after, gold):
        files = rows_of("ab", [1] * 2, gold="3"), rows_of(after, [1] * 3, gold=gold)
        with pytest.raises(SystemExit, match="before has answers to 2 questions"):
            tables({"before": files[0], "after": files[1]})

    def test_have_means_without_percent_signs_for_a_graded_reward(self):
        out = tables({"before": rows_of("abc", [0.5, 0.25, 1]),
                      "after": rows_of("abc", [1.5, 0.75, 2])})
        # Of 0 to 1, an interval ends at 1. The gains are 1, 0.5, 1: 1.96 * 0.2357 / sqrt(3).
        assert "| before | 0.583 (0.151 to 1.000) | - | 5 |" in out
        assert "| 1.417 (0.705 to 2.129) | +0.833 (+0.567 to +1.100) | 5 |" in out

    def test_compare_several_samples_question_by_question(self):
        out = tables({"before": sampled(4, 1, 0, 2, 0), "after": sampled(5, 4, 0, 4, 4)[:-1]})
        # pass@2 is (1/2 + 5/6) / 4.
        assert "| 4 samples | pass@1 | pass@2 | pass@4 |" in out
        assert "| before | 18.8% (0.0% to 42.2%) | 33.3% (0.0% to 73.3%) | 50.0% (" in out
        assert "| after, gain | +56.2% (+20.0% to +92.5%) | +41.7% (+4.2% to +79.1%) |" in out
        graded = [row | {"reward": 0.5} for row in sampled(4, 1, 0)]
        assert "pass@" not in tables({"one": sampled(1, 1, 0)}) + tables({"graded": graded})


def test_draws_reward_length_clip_and_spread(whole, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **more: kept.append(figure))
    rows = read(whole / "metrics.jsonl")
    penalties = [{"step": 0, "eval_reward": -2.5}, {"step": 1, "reward": -3, "clip_fraction": None}]
    plot.draw({"gspo": rows, "penalties": penalties}, "picture.png")
    axes = kept[0].axes
    for axis, name in zip(axes, plot.PANELS, strict=True):
        drawn = axis.lines[0].get_xydata().tolist()
        assert drawn == [[row["step"], row[name]] for row in rows[1:]]
        assert axis.get_ylim()[0] == pytest.approx(-3.15 if name == "reward" else 0)
    drawn = [list(line.get_ydata()) for line in axes[0].lines]
    assert drawn[1:9:2] == [[row["eval_reward"]] for row in rows[::2]] and drawn[-1] == [-2.5]
    assert drawn[2:9:2] == [row["eval_reward_interval"] for row in rows[::2]]


def test_pictures_runs_from_the_command_line(whole, tmp_path, capsys):
    shutil.copy(whole / "metrics.jsonl", tmp_path)
    plot.main([str(tmp_path / "metrics.jsonl"), str(whole)])
    assert (tmp_path / "runs.png").read_bytes()[1:4] == b"PNG"
    one_line(plot.main, tmp_path / "none")
    one_line(plot.main, whole, "--output", "x.xyz")
    errors = capsys.readouterr().err
    assert "no metrics.jsonl in" in errors and "x.xyz must end in one of .avif" in errors


def test_an_algorithm_has_its_colour_and_line_style_and_two_runs_differ():
    default = {"algorithm": "gspo", "eps_high": 4e-4, "epochs": 4, "minibatches": 8}
    runs = {
        "gspo": {}, "grpo": {"algorithm": "grpo", "eps_high": 0.27},
        "no clipping": {"eps_high": 1e9}, "one update": {"epochs": 1, "minibatches": 1},
        "again": {}, "other": {"algorithm": "cispo"}}
    styles = plot.styles_of({label: [{"step": 0, "settings": default | own}]
                             for label, own in runs.items()})
    assert len(set(styles.values())) == len(runs)
    assert {kind: styles[kind][:2] for kind in plot.STYLES} == plot.STYLES


def test_solutions_follow_the_prompts_of_the_script(chat_model, tmp_path, capsys, monkeypatch):
    """The loss is the mean over the tokens of the answers alone."""
    def supervised_loss(model, *others):
        assert all(parameter.grad is None for parameter in model.parameters())
        return right(model, *others)

    def loss_of(folder):
        model, tokenizer = train_math.load(str(folder), "cpu")
        losses = []
        for question, answer in ("1+1?", "2"), ("2+3?", "It is 5"):
            chat = [{"role": "user", "content": f"{question}\nAdd."}]
            prompt = tokenizer.apply_chat_template(
                chat, enable_thinking=False, add_generation_prompt=True, return_dict=True).input_ids
            ids = tokenizer(answer).input_ids + [tokenizer.eos_token_id]
            labels = torch.tensor([[-100] * len(prompt) + ids])
            losses.append(model(torch.tensor([prompt + ids]), labels=labels).loss.item())
        return sum(losses) / 2

    right = warm_up.supervised_loss
    monkeypatch.setattr(warm_up, "supervised_loss", supervised_loss)
    path = tmp_path / "solutions.csv"
    path.write_text("question,answer\n1+1?,2\n2+3?,It is 5\n", encoding="utf-8-sig")
    flags = [str(path), "--model", str(chat_model), "--instruction", "Add.", "--device", "cpu",
             "--output_dir", str(tmp_path / "new"), "--learning_rate", "1e-6"]
    warm_up.main(flags)
    losses = [float(loss) for loss in re.findall("loss (.*)", capsys.readouterr().out)]
    assert losses[0] == pytest.approx(loss_of(chat_model), abs=6e-4)
    assert losses[0] > losses[1] > losses[2] > loss_of(tmp_path / "new" / "model")
    one_line(warm_up.main, *flags)
    assert "new is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("rows, number", [("1+1?,2\n1+2?, \n", 2), (",2\n", 1), ("", 1)])
def test_a_row_without_a_question_or_a_solution_is_refused(tmp_path, capsys, rows, number):
    path = tmp_path / "solutions.csv"
    path.write_text(f"question,answer\n{rows}")
    one_line(warm_up.main, path, "--model=x", "--instruction=", "--output_dir=x")
    assert f"row {number} of {path} has no" in capsys.readouterr().err
