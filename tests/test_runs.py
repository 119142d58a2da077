"""A run of train_math.py: its flags, its files, what it prints, and how it is ended and resumed."""
import contextlib
import copy
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import train_math
from support.runs import locked
from support.sampling import dynamic_rollout
from support.task import Refused
from tests.conftest import TOP, at_call, parity_reward, run, sums, train, write_jsonl
from tools.logs import read
from tools.warm_up import tiny_tokenizer


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def without_clocks(rows):
    """The rows without the times and the folder, which may differ between two equal runs."""
    kept = [{k: v for k, v in row.items() if not re.match("seconds|settings", k)} for row in rows]
    kept[0]["settings"] = rows[0]["settings"] | {"output_dir": None}
    return kept


def assert_same(whole, folder):
    """The run in `folder` equals one without interruption: the log, the results of each question in
    each evaluation, the weights and the optimizer."""
    logs = [without_clocks(read(f / "metrics.jsonl")) for f in (whole, folder)]
    assert logs[0] == logs[1]
    evaluations = [{f.name: read(f) for f in x.glob("eval_*.jsonl")} for x in (whole, folder)]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 4
    states = [torch.load(f / "state.pt") for f in (whole, folder)]
    for part in "model", "optimizer":
        torch.testing.assert_close(states[0][part], states[1][part], rtol=0, atol=0)
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (whole, folder)]
    assert weights[0] == weights[1]


def dies_while_writing(*arguments, **more):
    """A file is damaged, or one of the model's, and nothing else happens any more."""
    (path,) = [each for each in arguments if isinstance(each, Path)]
    if path.name == "model":
        path.mkdir()
        path /= "config.json"
    path.write_bytes(b"{")
    raise KILL


KILL = KeyboardInterrupt()
SLOW = pytest.mark.slow
INTERRUPTIONS = [  # what is called, which call of it, and what it does instead
    pytest.param((torch.Tensor, "backward"), 12, OSError("HTTP 503"), id="an error in an update"),
    pytest.param((os, "replace"), 2, KILL, id="a kill before a later save counts"),
    pytest.param((os, "replace"), 1, KILL, marks=SLOW, id="before the first save counts"),
    pytest.param((torch, "save"), 3, dies_while_writing, marks=SLOW, id="in a later save"),
    pytest.param((Path, "write_text"), 6, dies_while_writing, marks=SLOW, id="in the log"),
    pytest.param((Path, "write_text"), 5, dies_while_writing, marks=SLOW, id="in an evaluation"),
    pytest.param((transformers.PreTrainedModel, "save_pretrained"), 1, dies_while_writing,
                 marks=SLOW, id="in the model at the end"),
]


class TestResuming:
    @pytest.mark.parametrize("what, call, instead", INTERRUPTIONS)
    def test_after_an_interruption_equals_a_run_without_one(
            self, command, whole, tmp_path, monkeypatch, what, call, instead):
        """The same process can call main() again after an error."""
        with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, OSError)):
            patch.setattr(*what, at_call(call, getattr(*what), instead))
            run(command, tmp_path / "a")
        run(command, tmp_path / "a")
        assert_same(whole, tmp_path / "a")

    @pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
    @pytest.mark.parametrize("names, saved", [(["SIGTERM"], 4), (["SIGINT", "SIGTERM"], 3)])
    def test_after_a_signal_equals_a_run_never_stopped(
            self, command, whole, tmp_path, names, saved):
        """The signal comes in the middle of step 3 of 6. After a second one, the run ends at once,
        and the last save is that of step 2."""
        def reward(prompts, completions, step, **columns):
            if step == 3:
                for name in names:
                    os.kill(os.getpid(), signal.Signals[name])
            return parity_reward(prompts, completions)

        before = signal.getsignal(signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            run(command, tmp_path / "a", reward=reward)
        assert signal.getsignal(signal.SIGINT) is before
        assert len(torch.load(tmp_path / "a" / "state.pt")["rows"]) == saved
        run(command, tmp_path / "a")
        assert_same(whole, tmp_path / "a")

    def test_takes_other_sizes_a_new_place_and_more_steps(self, command, whole, tmp_path, capsys):
        """The model may be spelled in another way. Evaluations have a distance of their own."""
        folder = tmp_path / "moved"
        shutil.copytree(whole, folder)
        data = shutil.copy(command[3], tmp_path / "copy.jsonl")
        rows = run(
            command, folder, "--max_steps", "9", "--micro_batch_tokens", "99", "--rollout_rows",
            "8", "--save_steps", "5", "--eval_steps", "4", "--dataset", str(data),
            "--model", f"{command[1]}/")
        shown = capsys.readouterr().out
        assert f"resuming the run of {command[1]} in {folder} after step 6. Another model" in shown
        assert without_clocks(rows)[:7] == without_clocks(read(whole / "metrics.jsonl"))
        assert [row["step"] for row in rows[7:]] == [7, 8, 9]
        assert [step for step, row in enumerate(rows) if "eval_reward" in row] == [0, 2, 4, 6, 8, 9]

    @pytest.mark.parametrize("flags, words", [
        ("--seed 1 --algorithm grpo", "was begun with {'seed': 0, 'algorithm': 'gspo', 'eps_low': "
         "0.0003, 'eps_high': 0.0004}. Use this, or another --output_"),
        ("--dataset changed.jsonl", "was begun with {'questions': "),
        ("--model {chat_model}", "was begun with {'prompt': 'has 0 figs?\\n'}"),
    ])
    def test_refuses_another_run_by_what_it_has_changed(
            self, command, whole, chat_model, tmp_path, monkeypatch, flags, words):
        """The first prompt, as text, shows another chat template."""
        monkeypatch.chdir(tmp_path)
        write_jsonl(tmp_path / "changed.jsonl", [{"question": "new?", "answer": "1"}] + sums(29))
        before = (whole / "state.pt").read_bytes()
        with pytest.raises(SystemExit, match=re.escape(words)):
            run(command, whole, *flags.format(chat_model=chat_model).split())
        assert (whole / "state.pt").read_bytes() == before

    def test_continues_a_run_that_on_step_has_ended(self, fresh, tmp_path):
        def on_step(row):
            row["mine"] = torch.tensor(row["step"])
            return row["step"] == 3

        changes = {"output_dir": tmp_path, "save_steps": 5, "max_steps": 4}
        whole = train((copy.deepcopy(fresh[0]), fresh[1]), max_steps=4)
        assert len(train(fresh, on_step=on_step, **changes)) == 4 and (tmp_path / "model").exists()
        train(fresh, on_step=on_step, **changes)
        added = read(tmp_path / "metrics.jsonl")
        assert [row.pop("mine") for row in added] == [0, 1, 2, 3, 4]
        assert without_clocks(added)[1:] == without_clocks(whole)[1:]

    def test_compares_questions_without_columns_such_as_pictures(self, fresh, tmp_path):
        """The default repr of an object has its address."""
        for steps in 1, 2:
            questions = [row | {"picture": object(), "level": None} for row in sums(8)]
            assert len(train(fresh, questions, max_steps=steps, output_dir=tmp_path)) == steps + 1
        with pytest.raises(Refused, match="was begun with .'questions': "):
            train(fresh, [row | {"level": 2} for row in questions], output_dir=tmp_path)

    def test_refuses_a_state_that_it_cannot_read(self, fresh, tmp_path):
        torch.save({"rows": [{"step": 0, "settings": {}}], "user_state": {}}, tmp_path / "state.pt")
        for content in (tmp_path / "state.pt").read_bytes(), b"{":
            (tmp_path / "state.pt").write_bytes(content)
            with pytest.raises(Refused, match="state.pt is damaged or too old"):
                train(fresh, output_dir=tmp_path)
            assert (tmp_path / "state.pt").read_bytes() == content

    def test_refuses_a_folder_with_files_of_something_else(self, fresh, tmp_path):
        (tmp_path / "eval_0.jsonl").write_text("mine")
        with pytest.raises(Refused, match="has eval_0.jsonl, but no run. Use another"):
            train(fresh, output_dir=tmp_path)
        assert names_in(tmp_path) == {"eval_0.jsonl", "lock"}
        assert (tmp_path / "eval_0.jsonl").read_text() == "mine"

    def test_refuses_a_folder_that_another_process_uses(self, command, tmp_path):
        """The same thread may lock it again."""
        with filelock.FileLock(tmp_path / "lock"):
            with pytest.raises(SystemExit, match="is in use by another process"):
                run(command, tmp_path)
        with locked(tmp_path):
            run(command, tmp_path, "--max_steps", "1")


class TestWhatIsSaved:
    def test_is_finite(self, command, tmp_path):
        right = train_math.response_log_probs
        broken = at_call(8, right, lambda *inputs: math.nan * right(*inputs))  # 1 and 2: the trial
        with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
            run(command, tmp_path / "a", "--minibatches", "1", "--save_steps", "1",
                response_log_probs=broken)
        state = torch.load(tmp_path / "a" / "state.pt")
        assert len(state["rows"]) == 3
        assert all(weight.isfinite().all() for weight in state["model"].values())

    def test_is_the_log_the_results_of_evaluations_and_the_last_model(self, whole):
        rows = read(whole / "metrics.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
        assert max(row["clip_fraction"] for row in rows[1:]) > 0, "the run learns"
        evaluations = {f"eval_{step}.jsonl" for step in (0, 2, 4, 6)}
        assert names_in(whole) == {"metrics.jsonl", "model", "state.pt", "lock"} | evaluations
        model, tokenizer = train_math.load(whole / "model", "cpu")
        assert len(tokenizer) == model.config.vocab_size and tokenizer.chat_template
        weights = torch.load(whole / "state.pt")["model"]
        torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)

    def test_is_nothing_without_a_folder(self, fresh, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        rows = train(fresh, held_out=2)
        assert not names_in(tmp_path) and not capsys.readouterr().out
        assert all("eval_results" not in row for row in rows)


class TestTheScript:
    def test_has_these_defaults(self):
        """A changed default is a change for everybody who repeats a run without flags."""
        defaults = vars(train_math.Settings(device="cpu", instruction="", output_dir=None))
        assert defaults == {
            "model": "Qwen/Qwen2.5-0.5B-Instruct", "dataset": "openai/gsm8k", "device": "cpu",
            "output_dir": None, "algorithm": "gspo", "instruction": "", "system": None,
            "seed": 0, "eps_low": None, "eps_high": None, "group_size": 8, "prompts_per_step": 32,
            "minibatches": 4, "epochs": 1, "learning_rate": 1e-6, "max_steps": 200,
            "temperature": 1.0, "max_completion_length": 512, "micro_batch_tokens": 1024,
            "rollout_rows": 256, "save_steps": 25, "eval_steps": None, "eval_size": 512,
        }

    @pytest.mark.parametrize("flags, words", [
        ("--group_size 1", "group_size 1 must be at least 2"),
        ("--prompts_per_step 6", "a multiple of --minibatches"), ("--eps_low 0.9997", "0.9997"),
        ("--eps_high 0", "eps_high 0"), ("--group_siz 4", "--group_siz"),
        *((f"--{name}", "must be above 0") for name in (
            "minibatches 0", "epochs 0", "save_steps 0", "eval_size=-1"))])
    def test_names_a_wrong_setting(self, flags, words):
        with pytest.raises(SystemExit, match=words):
            train_math.main(flags.split())

    def test_ends_with_one_line_or_in_the_users_functions_with_a_traceback(
            self, command, tmp_path):
        def broken(*arguments, **more):
            raise ValueError("mine")

        for parts, error, words in (
                ({"generate": lambda *arguments: ([[3]], torch.zeros(1, 8))}, SystemExit,
                 "the sampler returned 1 .* instead of 4"),
                ({"reward": lambda **columns: [1.0]}, SystemExit, "a list of 4 finite numbers"),
                ({"reward": broken}, ValueError, "mine"),
                ({"reward": lambda prompts: [0.0] * 4}, TypeError, "unexpected keyword argument")):
            with pytest.raises(error, match=words):
                run(command, tmp_path, **parts)
        with pytest.raises(SystemExit, match=r"^train_math.py: [^\n]{20,}$"):
            run(command, tmp_path, "--model", "no_model")
        assert not names_in(tmp_path)

    def test_refuses_a_model_whose_files_lack_weights(self, command, world, tmp_path):
        shutil.copytree(world / "model", tmp_path / "model")
        weights = load_file(tmp_path / "model" / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
        with pytest.raises(SystemExit, match="lack weights: .'model.norm.weight'"):
            run(command, tmp_path / "a", "--model", str(tmp_path / "model"))

    def test_on_a_gpu_that_torch_cannot_use_names_three_ways(self, monkeypatch):
        monkeypatch.setattr(shutil, "which", lambda name: name)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit, match="PyPI, .*whl/cu126. .*--device cpu"):
            train_math.main([])
        assert train_math.parse_settings(["--device", "cpu"]).device == "cpu"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert train_math.parse_settings([]).device == "cpu"

    def test_says_what_has_changed_and_names_a_frequent_response(self, command, tmp_path, capsys):
        """Of 4 questions, 1 is answered correctly before, and 3 are after the training. Numbers
        that the reward reports are shown, too."""
        def reward(log_metric, **columns):
            log_metric("exact", 1)
            return train_math.correctness_reward(**columns)

        def generate(model, prompts, group_size, max_length, temperature, end_ids):
            texts = ["#### 12", "#### 0", "#### 0", "x"] if not rows else ["#### 12"] + [
                f"#### {n}" for n in (13, 24, 1)]
            if group_size > 1:
                return dynamic_rollout(model, prompts, group_size, max_length, temperature, end_ids)
            tokens = tiny_tokenizer()(texts).input_ids
            return tokens, torch.zeros(len(tokens), max(map(len, tokens)))

        rows = []
        run(command, tmp_path, "--max_steps", "1", "--max_completion_length", "8",
            reward=reward, generate=generate, on_step=rows.append)
        shown = capsys.readouterr().out
        first, last = re.findall("step [01]/1 .*", shown)
        assert "eval_exact 1" in first and "  exact 1  " in last
        assert "2 of 4 responses in this evaluation are '#### 0'" in shown
        assert shown.count("responses in this evaluation") == 1
        assert ("0.25 before and 0.75 after on 4 questions, +0.5 (paired 95% CI +0.01 to +0.99)"
                in shown)

    def test_compares_evaluations_question_by_question(self, command, tmp_path, capsys):
        """The test questions have another order after the first step, and four are gone."""
        folder = tmp_path / "data"
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", sums(30)[:20])
        for steps, rows in (1, sums(30)[20:]), (2, sums(30)[:23:-1]):
            write_jsonl(folder / "test.jsonl", rows)
            run([*command, "--dataset", str(folder)], tmp_path / "a", "--max_steps", str(steps),
                "--eval_size", "10", "--learning_rate", "1e-12", "--save_steps", "1")
        shown = capsys.readouterr().out
        found = re.findall(r"on (\d+) questions, (.*?) \(paired 95% CI (.*) to", shown)
        assert found == [("10", "+0", "+0"), ("6", "+0", "+0")]

    def test_takes_its_flags_from_nowhere_else(self, tmp_path, monkeypatch):
        (tmp_path / "mine.args").write_text("--max_steps 7")
        monkeypatch.setattr(sys, "argv", [str(tmp_path / "mine.py")])
        assert train_math.parse_settings(["--device", "cpu"]).max_steps == 200

    def test_rewards_correct_numbers_and_prints_and_returns_what_it_logs(
            self, command, tmp_path, capsys):
        rows = train_math.main([*command, "--output_dir", str(tmp_path), "--max_steps", "3"])
        assert rows == read(tmp_path / "metrics.jsonl")
        assert rows[0]["eval_reward"] == rows[1]["reward"] == 0
        shown = capsys.readouterr().out
        for words in (
                "26 questions and 4 held-out ones\nthe first prompt: 'has 0 figs?", "step 1/3",
                "eval_reward 0  (95% CI 0 to 0.49)", "note: no gradient in three steps"):
            assert words in shown
        assert shown.count("? -> '") == 6, "two responses after each evaluation"

    @pytest.mark.slow
    def test_beside_the_users_file_needs_no_other_files(self, command, tmp_path):
        """It runs as a script, and its reward changes the directory."""
        for name in "train_math.py", "gspo.py":
            shutil.copy(TOP / name, tmp_path)
        shutil.copytree(TOP / "support", tmp_path / "support")
        (tmp_path / "own.py").write_text(
            "import os, train_math\n"
            "def reward(completions, **columns):\n"
            "    os.chdir('/')\n"
            "    return [i % 2 for i in range(len(completions))]\n"
            "train_math.main(reward=reward)\n")
        data = write_jsonl(tmp_path / "own.jsonl", [{"question": f"有 {i}?"} for i in range(10)])
        flags = ["--dataset", data, "--max_steps", "2", "--output_dir", "runs/own"]
        done = subprocess.run(
            [sys.executable, "own.py", *command, *flags], cwd=tmp_path, capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": "utf-8"})
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
        assert b"model is the model after step 2" in done.stdout
        assert read(tmp_path / "runs" / "own" / "metrics.jsonl")[2]["log_ratio_std"] > 0
        evaluation = tmp_path / "runs" / "own" / "eval_0.jsonl"
        assert "有 9?" in evaluation.read_text(encoding="utf-8"), "other alphabets stay readable"
