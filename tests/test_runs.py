"""A run of train_math.py: its flags, its files, what it prints, and how it is ended and resumed."""

import copy
import dataclasses
import datetime
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock

import train_math
from gspo import gspo_loss
from tests.conftest import (
    TOP,
    assert_same,
    at_call,
    block,
    contents,
    names_in,
    parity_reward,
    refused,
    run,
    settings,
    spy,
    sums,
    train,
    without_clocks,
    write_jsonl,
)
from tools.logs import read


class Killed(BaseException):
    pass


def dies_while_writing(*arguments, **more):
    """A file is damaged, or one of the model's, and nothing else happens any more."""
    (path,) = [each for each in arguments if isinstance(each, Path)]
    if path.name == "model":
        path.mkdir()
        path /= "config.json"
    path.write_bytes(b"{")
    raise Killed


INTERRUPTIONS = {  # what is called, which call of it, what it does instead, and the error of main()
    "a kill in an update": ("loss", 15, Killed(), Killed),
    "a kill in the log": ((Path, "write_text"), 6, dies_while_writing, Killed),
    "a kill in the results of an evaluation": ((Path, "write_text"), 5, dies_while_writing, Killed),
    "a kill in an evaluation": ((train_math, "evaluate"), 3, Killed(), Killed),
    "a kill in the first save": ((torch, "save"), 1, dies_while_writing, Killed),
    "a kill in a later save": ((torch, "save"), 3, dies_while_writing, Killed),
    "a kill before the first save counts": ((os, "replace"), 1, Killed(), Killed),
    "a kill before a later save counts": ((os, "replace"), 2, Killed(), Killed),
    "a kill in the model at the end": (
        (transformers.PreTrainedModel, "save_pretrained"), 1, dies_while_writing, Killed),
    "an error in the reward": ("reward", 7, OSError("HTTP 503"), SystemExit),
    "a mistake in a loss": ("loss", 12, RuntimeError("shapes do not fit"), RuntimeError),
}
QUICK = "a kill before a later save counts", "an error in the reward", "a mistake in a loss"
SIGNALS = [["SIGINT"], ["SIGTERM"], ["SIGHUP"], ["SIGUSR1"], ["SIGUSR2"], ["SIGXCPU"],
           ["SIGTERM", "SIGINT"], ["SIGTERM", "SIGTERM"], ["SIGHUP", "SIGHUP"],
           ["SIGUSR1", "SIGUSR1"], ["SIGHUP", "SIGTERM"], ["SIGUSR1", "SIGTERM"]]
QUICK_SIGNALS = [["SIGTERM"], ["SIGHUP"], ["SIGTERM", "SIGINT"]]
not_on_windows = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


def slow(cases, quick):
    """These cases, of which all but the quick ones are slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow)
            for case in cases]


@pytest.fixture
def handlers():
    """Those of a program in the foreground, also if the tests run in the background or with nohup.
    Afterwards, all handlers must be as they were."""
    foreground = dict.fromkeys([signal.SIGINT, signal.SIGTERM], signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        foreground[signal.SIGHUP] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in foreground.items()}
    expected = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    found = {number: signal.getsignal(number) for number in expected}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert found == expected


class TestResuming:
    @pytest.mark.parametrize("moment", slow(INTERRUPTIONS, QUICK))
    def test_after_an_interruption_equals_a_run_without_one(
            self, command, whole, tmp_path, monkeypatch, own_loss, handlers, moment):
        """The same process can call main() again after an error."""
        what, call, instead, error = INTERRUPTIONS[moment]
        reward = parity_reward
        with monkeypatch.context() as patch:
            if what == "loss":
                own_loss(at_call(call, gspo_loss, instead))
            elif what == "reward":
                reward = at_call(call, parity_reward, instead)
            else:
                patch.setattr(*what, at_call(call, getattr(*what), instead))
            with pytest.raises(error) as stop:
                run(command, tmp_path / "a", reward=reward)
        if error is SystemExit:
            assert "raised OSError('HTTP 503') in " in stop.value.code
            assert "What was saved is intact" in stop.value.code
        own_loss(gspo_loss)
        run(command, tmp_path / "a")
        assert_same(whole, tmp_path / "a")

    @not_on_windows
    @pytest.mark.parametrize("names", slow(SIGNALS, QUICK_SIGNALS))
    def test_after_a_signal_equals_a_run_never_stopped(
            self, command, whole, tmp_path, capsys, handlers, names):
        """The signal comes in the middle of step 3 of 6. After one signal, the step is finished and
        saved. After two, the run ends at once if the second is SIGINT or SIGTERM."""
        training = itertools.count(1)

        def reward(prompts, completions, **columns):
            if len(completions) == 16 and next(training) == 3:
                for name in names:
                    os.kill(os.getpid(), signal.Signals[name])
            return parity_reward(prompts, completions)

        with pytest.raises(SystemExit) as stop:
            run(command, tmp_path / "a", reward=reward)
        assert "This step will be finished and saved" in capsys.readouterr().out
        rows = torch.load(tmp_path / "a" / "state.pt")["rows"]
        if names[1:] in (["SIGINT"], ["SIGTERM"]):
            assert "What was saved is intact" in stop.value.code and len(rows) == 3
        else:
            assert stop.value.code == 128 + signal.Signals[names[0]] and len(rows) == 4
            assert (tmp_path / "a" / "model" / "model.safetensors").exists()
        run(command, tmp_path / "a")
        assert "is the model after step 6" in capsys.readouterr().out
        assert_same(whole, tmp_path / "a")

    @not_on_windows
    def test_is_not_needed_after_a_signal_that_nohup_ignores(self, command, tmp_path):
        def reward(prompts, completions, **columns):
            os.kill(os.getpid(), signal.SIGHUP)
            return parity_reward(prompts, completions)

        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            assert len(run(command, tmp_path, "--max_steps", "2", reward=reward)) == 3
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_takes_other_sizes_a_new_place_and_more_steps(self, command, whole, tmp_path, capsys):
        folder = tmp_path / "moved"
        shutil.copytree(whole, folder)
        data = shutil.copy(command[3], tmp_path / "copy.jsonl")
        rows = run(
            command, folder, "--max_steps", "8", "--micro_batch_tokens", "99", "--rollout_rows",
            "8", "--save_steps", "5", "--dataset", str(data))
        shown = capsys.readouterr().out
        assert "begun with --max_steps 6 (with another value, the learning rate jumps)" in shown
        assert "run is complete" not in shown
        assert without_clocks(rows)[:7] == without_clocks(read(whole / "metrics.jsonl"))
        assert [row["step"] for row in rows[7:]] == [7, 8]
        assert [step for step, row in enumerate(rows) if "eval_reward" in row] == [0, 2, 4, 6, 8]

    @pytest.mark.parametrize("flags, words", [
        ("--model other --seed 1 --instruction Hm. --system Hm. --algorithm grpo --group_size 2 "
         "--prompts_per_step 8 --minibatches 2 --epochs 2 --learning_rate 1 --temperature 0.9 "
         "--max_completion_length 7",
         "other values of model, seed, instruction, system, algorithm, eps_low, eps_high, "
         "group_size, prompts_per_step, minibatches, epochs, learning_rate, temperature, "
         "max_completion_length."),
        ("--eval_size 2", "questions. Choose another --output_dir. (questions may"),
        ("--dataset changed.jsonl", "questions. Choose another --output_dir. (questions may"),
    ])
    def test_refuses_another_run_by_what_it_has_changed(
            self, command, whole, tmp_path, monkeypatch, flags, words):
        load = {"load": lambda *_: pytest.fail("a model was loaded first")}
        monkeypatch.chdir(tmp_path)
        write_jsonl(tmp_path / "changed.jsonl", [{"question": "new?", "answer": "1"}] + sums(29))
        before = contents(whole)
        line = refused(command, whole, *flags.split(), **load)
        assert words in line and f"--output_dir {whole}: " in line
        assert contents(whole) == before

    @pytest.mark.parametrize("answer, steps", [
        (True, 3), (None, 4),
        pytest.param(torch.tensor(True).numpy()[()], 3, marks=pytest.mark.slow),
        pytest.param(1, 4, marks=pytest.mark.slow)])
    def test_continues_a_run_that_on_step_has_ended(self, fresh, tmp_path, answer, steps):
        def on_step(row):
            user_state["seen"] = row["mine"] = user_state.get("seen", 0) + 1
            return answer if row["step"] == 3 else False

        user_state = {}
        changes = {"output_dir": tmp_path, "save_steps": 5, "max_steps": 4}
        whole = train((copy.deepcopy(fresh[0]), fresh[1]), max_steps=4)
        rows = train(fresh, on_step=on_step, user_state=user_state, **changes)
        assert len(rows) == steps + 1 and (tmp_path / "model").exists()
        user_state.clear()
        state = train_math.load_state(settings(**changes), sums(8))
        train(fresh, on_step=on_step, user_state=user_state, state=state, **changes)
        added = read(tmp_path / "metrics.jsonl")
        assert [row.pop("mine") for row in added] == [1, 2, 3, 4, 5]
        assert without_clocks(added)[1:] == without_clocks(whole)[1:]

    def test_needs_no_plain_settings_or_answers(self, fresh, tmp_path):
        number = torch.tensor(1e-3, dtype=torch.float64).numpy()[()]
        answers = ["Paris", 7, "x #### 8", datetime.date(2025, 7, 24), torch.ones(2).numpy(), {1}]
        rows = [row | {"answer": answer} for row, answer in zip(sums(6), answers)]
        cfg = settings(output_dir=tmp_path, model=tmp_path, learning_rate=number, max_steps=1)
        train_math.train(cfg, *fresh, rows, rows, reward=parity_reward)
        state = train_math.load_state(cfg, rows)
        found = [row["gold"] for row in state["results"]]
        assert found == ["Paris", 7, "x #### 8", "2025-07-24", "[1. 1.]", "{1}"]
        assert found == [row["gold"] for row in read(tmp_path / "eval_1.jsonl")]

    def test_with_one_step_writes_the_model_of_a_killed_run(self, command, whole, tmp_path):
        shutil.copy(whole / "state.pt", tmp_path)
        rows = run(command, tmp_path, "--max_steps", "1")
        assert rows == read(whole / "metrics.jsonl")
        for path in (whole / "model").iterdir():
            assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()


class TestTheFolder:
    @pytest.mark.parametrize("name", ["thesis.txt", "metrics.jsonl", "model"])
    def test_that_holds_something_else_is_refused(self, command, tmp_path, name):
        (tmp_path / name).write_text("mine")
        assert "not empty" in refused(command, tmp_path)
        assert names_in(tmp_path) <= {name, "lock"} and (tmp_path / name).read_text() == "mine"

    @pytest.mark.parametrize("name", ["metrics.jsonl", "model", "state.pt"])
    def test_of_another_run_is_refused_by_train(self, fresh, tmp_path, name):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=f"holds {name}. Choose"):
            train(fresh, output_dir=str(tmp_path), max_steps=1)
        assert (tmp_path / name).read_text() == "mine"
        assert names_in(tmp_path) == {name, "lock"}

    def test_is_locked_for_other_processes_until_the_run_ends(self, command, fresh, tmp_path):
        folder = tmp_path / "a"
        folder.mkdir()
        with FileLock(folder / "lock"):
            assert "is in use by another process" in refused(command, folder)
            with pytest.raises(ValueError, match="is in use by another"):
                train(fresh, output_dir=folder)
        assert names_in(folder) == {"lock"}
        for _ in range(2):  # after an error, too
            assert "--model nowhere" in refused(command, folder, "--model", "nowhere")
        FileLock(folder / "lock").acquire(timeout=0)


class TestWhatIsSaved:
    def test_is_finite(self, command, tmp_path, own_loss):
        def bad_loss(*arguments):
            return math.nan * gspo_loss(*arguments)

        own_loss(at_call(5, gspo_loss, bad_loss))  # the first two are the trial
        line = refused(command, tmp_path / "a", "--minibatches", "1", "--save_steps", "1")
        assert "step 3: the loss or the weights are not finite" in line
        assert "--learning_rate" in line
        state = torch.load(tmp_path / "a" / "state.pt")
        assert len(state["rows"]) == 3
        assert all(weight.isfinite().all() for weight in state["model"].values())

    def test_may_be_saved_more_often_than_it_is_evaluated(self, fresh, tmp_path, monkeypatch):
        saved = []
        monkeypatch.setattr(torch, "save", spy(torch.save, saved))
        rows = train(
            fresh, held_out=2, output_dir=tmp_path, save_steps=1, eval_steps=2, max_steps=4)
        assert [row["step"] for row in rows if "eval_reward" in row] == [0, 2, 4]
        assert len(saved) == 5

    def test_is_the_last_good_state_of_the_user(self, fresh, tmp_path):
        user_state = {}

        def on_step(row):
            user_state["mine"] = row["step"] if row["step"] < 2 else torch.zeros(1).numpy()

        with pytest.raises(ValueError, match="user_state may hold only tensors, numbers"):
            train(fresh, on_step=on_step, user_state=user_state, output_dir=tmp_path, save_steps=1)
        state = torch.load(tmp_path / "state.pt")
        assert len(state["rows"]) == 2 and state["user_state"] == {"mine": 1}

    def test_is_nothing_without_a_folder_but_on_step_gets_every_row_to_add_to(
            self, fresh, tmp_path, monkeypatch, capsys):
        seen = []

        def on_step(row):
            seen.append(dict(row))
            row["added"] = torch.tensor(row["step"])

        monkeypatch.chdir(tmp_path)
        rows = train(fresh, held_out=2, on_step=on_step)
        assert not names_in(tmp_path) and not capsys.readouterr().out
        assert [row.pop("added") for row in rows] == list(range(7))
        assert seen == rows and [row["step"] for row in rows] == list(range(7))
        assert all("eval_results" not in row for row in rows)

    def test_prints_the_metrics_of_the_reward(self, fresh, tmp_path, capsys):
        def reward(completions, log_metric, **columns):
            log_metric("exact", [1, 0, 2, 1])
            log_metric("words", ["a", "b"])
            return [0.3] * len(completions)

        train(fresh, held_out=2, reward=reward, max_steps=1, output_dir=str(tmp_path))
        first, last = re.findall("step [01]/1 .*", capsys.readouterr().out)
        assert first.endswith("eval_exact 1") and "exact 1  eval_exact 1" in last
        assert "words" not in first + last


OWN_ALGORITHM = block("CONTRIBUTING.md", "cispo").replace("train_math.main()", "import os") + """

def reward(prompts, completions, level, **columns):
    os.chdir("/")
    digits = [sum(c.isdigit() for c in text) for text in completions]
    return [float((d + n) % 2) for d, n in zip(digits, level)]


train_math.main(reward=reward)
"""


class TestTheScript:
    @pytest.mark.parametrize("flags, expected", [
        ("", (3e-4, 4e-4)),
        ("--algorithm gspo_token", (3e-4, 4e-4)),
        ("--algorithm grpo", (0.2, 0.27)),
        ("--algorithm grpo --eps_high 0.1", (0.2, 0.1)),
        ("--eps_low 1 --eps_high 1e9", (1, 1e9)),
    ])
    def test_gives_each_algorithm_its_own_clip_range(self, flags, expected):
        cfg = train_math.parse_settings(flags.split())
        assert cfg.clip_range() == expected
        other = dataclasses.replace(cfg, algorithm="gspo", eps_high=None)
        assert other.clip_range() == (cfg.eps_low or 3e-4, 4e-4)

    def test_has_these_defaults(self):
        """A changed default is a change for everybody who repeats a run without flags."""
        defaults = vars(train_math.Settings(device="cpu", instruction=""))
        assert defaults == {
            "model": "Qwen/Qwen2.5-0.5B-Instruct", "dataset": "openai/gsm8k", "device": "cpu",
            "output_dir": "runs/math", "algorithm": "gspo", "instruction": "", "system": None,
            "seed": 0, "eps_low": None, "eps_high": None, "group_size": 8, "prompts_per_step": 32,
            "minibatches": 4, "epochs": 1, "learning_rate": 1e-6, "max_steps": 200,
            "temperature": 1.0, "max_completion_length": 512, "micro_batch_tokens": 1024,
            "rollout_rows": 256, "save_steps": 25, "eval_steps": None, "eval_size": 512,
        }

    @pytest.mark.parametrize("flags, has_gpu, said", [
        ("", False, "note: on a CPU, a step takes many minutes"),
        ("", True, "this PyTorch cannot use your NVIDIA GPU"),
        ("--model small", True, "this PyTorch cannot use your NVIDIA GPU"),
        ("--model small", False, ""),
        ("--device=cpu", True, ""),
    ])
    def test_says_once_what_it_means_to_have_no_gpu(
            self, monkeypatch, capsys, flags, has_gpu, said):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(shutil, "which", lambda name: name if has_gpu else None)
        for _ in range(2):
            train_math.parse_settings(flags.split())
        printed = capsys.readouterr().out
        assert printed.count("note: ") == bool(said) + (has_gpu and not flags) and said in printed
        assert ("many minutes" in printed) == (not flags)

    def test_in_a_notebook_asks_for_a_list(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["launcher.py", "-f", "kernel.json"])
        monkeypatch.setitem(sys.modules, "ipykernel", None)
        with pytest.raises(SystemExit, match="launcher.py: settings: in a notebook, pass a list"):
            train_math.main()
        assert train_math.parse_settings(["--seed", "3"]).seed == 3

    @pytest.mark.parametrize("program, error, line", [
        ("home/my_task.py", ValueError("it is empty"), "my_task.py: the data: it is empty"),
        ("", ValueError("two\n  lines"), "train_math.py: the data: two lines"),
        ("", KeyError("name"), "train_math.py: the data: KeyError('name')"),
        ("", ConnectionError("Couldn't do"), "train_math.py: the data: Couldn't do. Without a"),
    ])
    def test_begins_a_message_with_the_program_and_shows_a_sentence_as_it_is(
            self, monkeypatch, program, error, line):
        monkeypatch.setattr(sys, "argv", [program])
        with pytest.raises(SystemExit) as stop, train_math.exits_with("the data"):
            raise error
        assert stop.value.code.startswith(line)

    def test_helps(self, capsys):
        with pytest.raises(SystemExit, match="0"):
            train_math.main(["--help"])
        said = " ".join(capsys.readouterr().out.split())
        for word in "[--flag value ...]", "(default: runs/math)", *train_math.ALGORITHMS:
            assert word in said

    def test_works_outside_of_the_main_thread(self, command, tmp_path):
        """There, Python does not allow signal handlers."""
        with ThreadPoolExecutor() as threads:
            done = threads.submit(run, command, tmp_path / "a", "--max_steps", "1")
        assert len(done.result()) == 2

    def test_rewards_correct_numbers_and_prints_and_returns_what_it_logs(
            self, command, tmp_path, capsys):
        """No response is correct."""
        rows = train_math.main([*command, "--output_dir", str(tmp_path), "--max_steps", "3"])
        log = read(tmp_path / "metrics.jsonl")
        assert json.loads(json.dumps(rows)) == log
        assert log[0]["eval_reward"] == log[1]["reward"] == 0
        shown = capsys.readouterr().out
        for words in (
                "26 questions and 4 held-out ones", "step 1/3", "103,488 parameters",
                "eval_reward 0  (95% CI 0 to 0.49)", "a complete prompt: 'has 0 figs?",
                "note: no gradient in three steps", "equal_reward_groups 1 ",
                "steps 0 and 3: 0 before and 0 after",
                f"The responses are in {tmp_path}/eval_3.jsonl"):
            assert words in shown
        for words in "eval_reward is that of greedy ones to held-out questions", "whose paired":
            assert shown.count(words) == 1, words
        assert shown.count("? -> '") == 6, "two responses after each evaluation"
        for step in 0, 2, 3:
            results = read(tmp_path / f"eval_{step}.jsonl")
            assert [result["gold"] for result in results] == ["12", "13", "24", "27"]
        run(command, tmp_path / "none", "--eval_size", "0", "--max_steps", "1")
        assert "whose paired" not in capsys.readouterr().out

    @pytest.mark.slow
    def test_beside_the_users_file_trains_with_an_algorithm_of_the_user(self, command, tmp_path):
        """The user's file runs as a script beside copies of train_math.py and what it needs, on a
        console that cannot show every character. Its reward changes the directory."""
        for name in "train_math.py", "gspo.py":
            shutil.copy(TOP / name, tmp_path)
        shutil.copytree(TOP / "support", tmp_path / "support",
                        ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "own.py").write_text(OWN_ALGORITHM)
        rows = [{"question": f"有 {i}?", "level": i} for i in range(10)]
        data = write_jsonl(tmp_path / "own.jsonl", rows)
        flags = ["--dataset", data, "--max_steps", "2", "--learning_rate", "0.01", "--algorithm",
                 "cispo", "--output_dir", "runs/own"]
        done = subprocess.run(
            [sys.executable, "own.py", *command, *flags], cwd=tmp_path, capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": "cp1252"})
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
        for words in b"8 questions and 2 held-out ones", b"model is the model after step 2":
            assert words in done.stdout
        first, *_, last = read(tmp_path / "runs" / "own" / "metrics.jsonl")
        assert [first["settings"][name] for name in ("eps_low", "eps_high")] == [1.0, 4.0]
        assert last["step"] == last["eval_questions"] == 2 and last["log_ratio_std"] > 0
        evaluation = tmp_path / "runs" / "own" / "eval_0.jsonl"
        assert "有 9?" in evaluation.read_text(encoding="utf-8"), "other alphabets stay readable"
