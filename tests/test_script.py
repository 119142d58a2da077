"""train_math.py as a program: each test runs it in a process of its own."""

import os
import re
import subprocess
import sys
from unittest import mock

import train_math
from common.logs import read
from tests.conftest import TOP, copy_script, without_clocks, write_jsonl

PAGE = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
CISPO = re.search(r"```python\n(import train_math.*?)train_math\.main\(\)", PAGE, re.DOTALL)[1]
OWN_ALGORITHM = CISPO + """

def centred(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def reward(prompts, completions, level, **columns):
    digits = [sum(c.isdigit() for c in text) for text in completions]
    return [float((d + n) % 2) for d, n in zip(digits, level)]


train_math.ALGORITHMS["cispo"] = train_math.Algorithm(
    cispo_loss, 1.0, 4.0, ratio="token", advantages=centred)
if __name__ == "__main__":
    train_math.main(reward=reward)
"""


class TestScript:
    def test_from_outside_trains_and_is_measured_by_its_row(self, command, tmp_path, monkeypatch):
        """The user's file runs as a script, with its own reward and algorithm, beside copies of
        train_math.py and what it needs, and on a console that cannot show every character. Its run
        is compared with one in this process, where the clip range is given as settings."""
        copy_script(tmp_path)
        (tmp_path / "own.py").write_text(OWN_ALGORITHM)
        rows = [{"question": f"有 {i}?", "level": i} for i in range(10)]
        data = write_jsonl(tmp_path / "own.jsonl", rows)
        flags = [*command, "--dataset", data, "--max_steps", "2", "--learning_rate", "0.01"]
        done = subprocess.run(
            [sys.executable, "own.py", *flags, "--algorithm", "cispo", "--output_dir", "runs/own"],
            env=os.environ | {"OMP_NUM_THREADS": "1",  # as the tests: threads round differently
                              "PYTHONIOENCODING": "cp1252"},
            cwd=tmp_path, capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        assert b"8 questions and 2 held-out ones" in done.stdout and b"? 8? -> " in done.stdout
        assert b"model is the model after step 2" in done.stdout
        assert b"Traceback" not in done.stderr
        rows = read(tmp_path / "runs" / "own" / "metrics.jsonl")
        assert rows[0]["settings"]["algorithm"] == "cispo"
        assert [rows[0]["settings"][name] for name in ("eps_low", "eps_high")] == [1.0, 4.0]
        assert len(rows) == 3 and rows[2]["eval_questions"] == 2
        assert "eval_reward_interval" in rows[2] and "eval_last_number" not in rows[2]
        assert read(tmp_path / "runs" / "own" / "eval_0.jsonl")[0]["question"] == "有 8?"

        with mock.patch.dict(train_math.ALGORITHMS):
            names = {"__name__": "own"}
            exec(OWN_ALGORITHM, names)
            own = train_math.ALGORITHMS["cispo"]
        monkeypatch.setitem(
            train_math.ALGORITHMS, "grpo", own._replace(eps_low=0.1, eps_high=0.1))
        flags += ["--algorithm", "grpo", "--eps_low", "1", "--eps_high", "4"]
        flags += ["--output_dir", str(tmp_path / "parts")]
        train_math.main(flags, names["reward"])
        expected = read(tmp_path / "parts" / "metrics.jsonl")
        assert without_clocks(rows)[1:] == without_clocks(expected)[1:]
        weights = [tmp_path / run / "model" / "model.safetensors" for run in ("runs/own", "parts")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert rows[2]["log_ratio_std"] > 0
