"""train_math.py with a reward, an algorithm or a training loop of the user's own."""

import copy
import datetime
import gc
import json
import math
import re
from pathlib import Path

import pytest
import torch

import support.rewards
import support.runs
import train_math
from common.logs import read
from tests.conftest import (
    assert_same,
    constant_reward,
    one_line,
    parity_reward,
    run,
    settings,
    sums,
    without_clocks,
)


class TestScore:
    def test_gives_a_reward_its_prompts_completions_and_all_columns(self):
        questions = [{"question": "a?", "level": 1}, {"question": "b?", "level": 2}]
        asked = []

        def reward(prompts, completions, level, **columns):
            asked.append((prompts, completions, level, columns))
            return [1, 2, 3, 4]

        rewards = train_math.score(reward, questions, ["w", "x", "y", "z"])
        assert rewards.tolist() == [1, 2, 3, 4] and rewards.dtype == torch.float32
        prompts = ["a?", "a?", "b?", "b?"]
        assert asked == [(prompts, ["w", "x", "y", "z"], [1, 1, 2, 2], {"question": prompts})]

    @pytest.mark.parametrize(
        "returned",
        [(1, 2.5), torch.tensor([1, 2.5]), torch.tensor([1, 2.5]).numpy(), map(float, (1, 2.5))],
    )
    def test_takes_any_sequence_of_numbers(self, returned):
        rewards = train_math.score(lambda **columns: returned, sums(1), ["x", "y"])
        assert rewards.tolist() == [1, 2.5]


async def an_async_reward(prompts, completions, **columns):
    return [1.0] * len(completions)


def a_reward_that_raises(prompts, completions, **columns):
    raise OSError("HTTP 503")


def a_reward_that_returns(value):
    """A reward that returns this, or, if it is a function, what this makes of the texts."""

    def faulty_reward(prompts, completions, **columns):
        return value(completions) if callable(value) else value

    return faulty_reward


FAULTY_REWARDS = {
    "NaN": (lambda texts: [math.nan] * len(texts), "[nan, nan]"),
    "one NaN": (lambda texts: [0.0] * (len(texts) - 1) + [math.nan], "[0.0, nan]"),
    "inf": (lambda texts: [-math.inf] * len(texts), "[-inf, -inf]"),
    "None": (None, "None"),
    "None for each text": (lambda texts: [None] * len(texts), "[None, None]"),
    "one number": (1.0, "1.0"),
    "one number too few": (lambda texts: [1.0] * (len(texts) - 1), "[1.0]"),
    "one number too many": (lambda texts: [1.0] * (len(texts) + 1), "[1.0, 1.0, 1.0]"),
    "a dict": ({"format": 1.0, "answer": 0.0}, "{'format': 1.0, 'answer': 0.0}"),
    "texts": (lambda texts: ["good"] * len(texts), "['good', 'good']"),
    "a dict whose keys are numbers": (lambda texts: {0: 1.0, 1: 0.0}, "{0: 1.0, 1: 0.0}"),
    "a text of digits": (lambda texts: "01", "'01'"),
    "a list for each text": (lambda texts: [[1.0]] * len(texts), "[[1.0], [1.0]]"),
}


HERE = f"{__file__}, line {a_reward_that_raises.__code__.co_firstlineno + 1}"


class TestAFaultyReward:
    @pytest.mark.parametrize("fault", FAULTY_REWARDS)
    def test_ends_in_one_line_before_the_first_rollout(self, command, tmp_path, fault):
        value, shown = FAULTY_REWARDS[fault]
        line = self.line(command, tmp_path, a_reward_that_returns(value))
        assert "faulty_reward returned " + shown in line
        assert "2 finite numbers" in line

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # it was never awaited
    @pytest.mark.parametrize(
        "reward, said",
        [
            (an_async_reward, "an_async_reward returned <coroutine"),
            (a_reward_that_raises, "a_reward_that_raises raised OSError('HTTP 503') in " + HERE),
            (lambda prompts, answers: [0.0], "unexpected keyword argument"),
        ],
    )
    def test_that_raises_or_is_async_is_named_too(self, command, tmp_path, reward, said):
        assert said in self.line(command, tmp_path, reward)
        gc.collect()  # Python warns here, not after the tests, that nobody awaited it

    def line(self, command, tmp_path, reward):
        def rollout(model, prompts, group_size, max_length, *rest):
            assert len(prompts) == 2 and max_length == 8, "the long work has begun"
            return train_math.rollout(model, prompts, group_size, max_length, *rest)

        flags = ["--output_dir", tmp_path / "a"]
        line = one_line(train_math.main, *command, *flags, reward=reward, rollout=rollout)
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"lock"}
        return line

    def test_that_is_an_object_is_named_by_its_class(self):
        class Judge:
            def __call__(self, prompts, completions, **columns):
                return None

        with pytest.raises(support.rewards.RewardError, match="the reward Judge returned None"):
            train_math.score(Judge(), sums(1), ["x"])

    @pytest.mark.parametrize("fault", ["raises", "NaN"])
    def test_in_a_later_step_is_shown_after_a_save_and_the_run_can_be_resumed(
        self, command, whole, tmp_path, capsys, fault
    ):
        """In step 4 of 6. The last regular save was after step 2."""
        calls = []

        def reward(prompts, completions, **columns):
            if len(completions) == 16:
                calls.append(1)
                if len(calls) == 4 and fault == "raises":
                    raise OSError("HTTP 503")
                if len(calls) == 4:
                    return [math.nan] * 16
            return parity_reward(prompts, completions)

        with pytest.raises(support.rewards.RewardError) as raised:
            run(command, tmp_path / "a", reward=reward)
        if fault == "raises":
            assert isinstance(raised.value.__cause__, OSError), "the traceback is the user's"
        assert "saved" in capsys.readouterr().out
        state = torch.load(tmp_path / "a" / "state.pt")
        assert [row["step"] for row in state["rows"]] == [0, 1, 2, 3]
        run(command, tmp_path / "a")
        assert_same(whole, tmp_path / "a")

    def test_in_an_evaluation_costs_this_evaluation_and_nothing_else(
        self, command, whole, tmp_path
    ):
        """Of the evaluations, each of four questions, the one after step 4 fails."""
        calls = []

        def reward(prompts, completions, **columns):
            calls.extend([1] * (len(completions) == 4))
            if len(calls) == 3:
                raise OSError("HTTP 503")
            return parity_reward(prompts, completions)

        with pytest.raises(support.rewards.RewardError):
            run(command, tmp_path / "a", reward=reward)
        run(command, tmp_path / "a")
        expected = without_clocks(read(whole / "metrics.jsonl"))
        found = without_clocks(read(tmp_path / "a" / "metrics.jsonl"))
        expected[4] = {
            name: value for name, value in expected[4].items() if not name.startswith("eval_")
        }
        assert found == expected
        before, after = (torch.load(f / "state.pt")["model"] for f in (whole, tmp_path / "a"))
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_keeps_other_alphabets_readable(self, tmp_path):
        support.runs.write_lines([{"question": "Wie groß?"}], tmp_path / "log.jsonl")
        assert "groß" in (tmp_path / "log.jsonl").read_text(encoding="utf-8")

    def test_keeps_the_log_json(self, whole):
        def refuse(word):
            raise ValueError(f"{word} is not JSON")

        for path in whole.glob("*.jsonl"):
            for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
                json.loads(line, parse_constant=refuse)


class TestAnAlgorithm:
    @pytest.mark.parametrize("ratio", ["sequence", "token"])
    def test_is_asked_which_ratio_it_clips(self, fresh, monkeypatch, ratio):
        """The log-probs of a response change by +1 and -1 in turn, so that s is about 1, and all
        tokens with a positive advantage and +1, or a negative one and -1, are clipped."""
        row = train_math.ALGORITHMS["grpo"]._replace(ratio=ratio)
        monkeypatch.setitem(train_math.ALGORITHMS, "own", row)

        def response_log_probs(model, batch, temperature):
            log_probs = train_math.response_log_probs(model, batch, temperature)
            order = batch.mask.cumsum(1)  # 1, 2, 3, ... on the response
            even = batch.mask.sum(1)[:, None] // 2 * 2
            signs = (1 - 2 * (order % 2)) * batch.mask * (order <= even)
            return log_probs + signs * torch.is_grad_enabled()

        cfg = settings(algorithm="own", max_steps=1, learning_rate=1e-12)
        parts = {"reward": parity_reward, "response_log_probs": response_log_probs}
        _, row = train_math.train(cfg, *fresh, sums(4), **parts)
        if ratio == "sequence":
            assert row["clip_fraction"] == 0
        else:
            assert 0.3 < row["clip_fraction"] <= 0.5

    def test_is_a_choice_of_the_command_line(self, monkeypatch, capsys):
        with pytest.raises(SystemExit):
            train_math.parse_settings(["--algorithm", "own"])
        assert "gspo" in capsys.readouterr().err
        row = train_math.ALGORITHMS["gspo"]._replace(eps_low=0.5)
        monkeypatch.setitem(train_math.ALGORITHMS, "own", row)
        cfg = train_math.parse_settings(["--algorithm", "own"])
        assert cfg.clip_range() == (0.5, 4e-4)

    def test_with_a_wrong_clip_range_is_refused(self, monkeypatch):
        row = train_math.ALGORITHMS["gspo"]._replace(eps_low=1.5)
        monkeypatch.setitem(train_math.ALGORITHMS, "own", row)
        with pytest.raises(ValueError, match="eps_low 1.5"):
            settings(algorithm="own")


class TestTrain:

    def test_without_questions_is_refused(self, fresh):
        with pytest.raises(ValueError, match="no questions"):
            train_math.train(settings(), *fresh, [], sums(2), reward=parity_reward)

    def test_over_the_folder_of_its_model_is_refused(self, fresh, tmp_path):
        (tmp_path / "model").mkdir()
        with pytest.raises(ValueError, match="holds model"):
            train_math.train(
                settings(output_dir=str(tmp_path)), *fresh, sums(8), reward=parity_reward)

    def test_gives_on_step_a_copy_of_the_metrics(self, fresh, tmp_path):
        cfg = settings(output_dir=str(tmp_path), max_steps=1)
        train_math.train(cfg, *fresh, sums(8), reward=parity_reward, on_step=dict.clear)
        rows = read(tmp_path / "metrics.jsonl")
        assert rows[0]["settings"] and rows[1]["step"] == 1

    def test_with_numbers_of_numpy_and_a_path_can_be_resumed(self, fresh, tmp_path):
        number = torch.tensor([1e-3, 0], dtype=torch.float64).numpy()
        cfg = settings(output_dir=tmp_path, learning_rate=number[0], seed=torch.tensor(3),
                       max_steps=1)
        assert type(number[0]) is not float
        assert [type(x) for x in (cfg.output_dir, cfg.learning_rate, cfg.seed)] == [str, float, int]
        train_math.train(cfg, *fresh, sums(8), reward=parity_reward)
        assert len(train_math.load_state(cfg, sums(8))["rows"]) == 2
        with pytest.raises(ValueError, match="eps_low 0"):
            settings(eps_low=number[1])

    def test_into_the_folder_of_another_run_is_refused(self, fresh, tmp_path):
        cfg = settings(output_dir=str(tmp_path), max_steps=1)
        train_math.train(cfg, *fresh, sums(8), sums(2), reward=parity_reward)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
        with pytest.raises(ValueError, match="holds (metrics.jsonl|state.pt|model). Choose"):
            train_math.train(cfg, *fresh, sums(8), sums(2), reward=parity_reward)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
        state = train_math.load_state(cfg, sums(8))
        rows = train_math.train(cfg, *fresh, sums(8), state=state, reward=parity_reward)
        assert len(rows) == 2
        assert train_math.load_state(settings(output_dir=str(tmp_path / "b")), sums(8)) is None

    def test_gives_on_step_every_row_with_its_notes(self, fresh):
        """Also without an output_dir, where nothing is printed."""
        seen = []
        rows = train_math.train(
            settings(), *fresh, sums(8), sums(2), reward=constant_reward,
            on_step=lambda row: seen.append(dict(row)),
        )
        assert seen == rows and len(rows) == 7
        (note,) = rows[3]["notes"]
        assert "no gradient in three steps" in note and "(mean 0.3;" in note
        assert all("notes" not in row for row in rows[:3] + rows[4:])
        assert all("eval_results" not in row for row in rows)

    def test_main_passes_on_step_on(self, command, tmp_path):
        seen = []
        flags = [*command, "--output_dir", str(tmp_path / "a"), "--max_steps", "1"]
        train_math.main(flags, parity_reward, on_step=seen.append)
        assert json.loads(json.dumps(seen)) == read(tmp_path / "a" / "metrics.jsonl")

    @pytest.mark.parametrize("name", ["encode_prompts", "rollout", "response_log_probs"])
    def test_main_tries_each_part_before_the_long_work(self, command, tmp_path, name):
        def fails(*arguments):
            raise OSError("in the part")

        parts = {"reward": parity_reward, name: fails}
        line = one_line(train_math.main, *command, "--output_dir", tmp_path / "a", **parts)
        assert "in the part" in line and "--model" in line



def test_the_recipe_for_very_long_responses_gives_the_same_weights(fresh):
    """Gradient checkpointing keeps less for the backward pass, and changes no number."""
    page = Path(__file__).parents[1] / "guides" / "own_task.md"
    code = re.search(r"def checkpointed_log_probs.*?\n\n", page.read_text("utf-8"), re.DOTALL)
    names = {"train_math": train_math}
    exec(code[0], names)
    weights = []
    kept = []
    for parts in {}, {"response_log_probs": names["checkpointed_log_probs"]}:
        model = copy.deepcopy(fresh[0])
        if parts and hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        elif parts:  # transformers 5.17
            model.gradient_checkpointing_enable()
        numbers = 0

        def count(x):
            nonlocal numbers
            numbers += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            rows = train_math.train(settings(max_steps=2), model, fresh[1], sums(8),
                                    reward=parity_reward, **parts)
        assert rows[-1]["log_ratio_first_max"] == 0 and not model.training
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        kept.append(numbers)
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.cat([p.flatten() for p in fresh[0].parameters()]))
    assert kept[1] < kept[0] / 2


def test_an_answer_of_any_kind_can_be_logged(fresh, tmp_path):
    answers = ["Paris", 7, "x #### 8", datetime.date(2025, 7, 24)]
    held_out = [row | {"answer": answer} for row, answer in zip(sums(4), answers)]
    cfg = settings(output_dir=str(tmp_path), max_steps=1)
    train_math.train(cfg, *fresh, sums(8), held_out, reward=parity_reward)
    found = [row["gold"] for row in read(tmp_path / "eval_0.jsonl")]
    assert found == ["Paris", "7", "8", "2025-07-24"]


class TestWhatAReviewFound:
    def test_a_gradient_that_is_left_over_changes_nothing(self, fresh):
        model, tokenizer = fresh
        weights = []
        for left_over in False, True:
            copied = copy.deepcopy(model)
            if left_over:
                for parameter in copied.parameters():
                    parameter.grad = torch.ones_like(parameter)
            cfg = settings(max_steps=1)
            train_math.train(cfg, copied, tokenizer, sums(4), reward=parity_reward)
            weights.append(torch.cat([p.detach().flatten() for p in copied.parameters()]))
        assert torch.equal(*weights)

    def test_a_prompt_function_may_use_every_column(self, fresh):
        model, tokenizer = fresh
        questions = [row | {"hint": "Add."} for row in sums(4)]

        def with_hint(tokenizer, questions, cfg):
            return [tokenizer(f"{row['hint']} {row['question']}").input_ids for row in questions]

        cfg = settings(max_completion_length=8)
        train_math.check_model(
            model, tokenizer, questions, cfg, reward=parity_reward, encode_prompts=with_hint)

    def test_a_signal_after_a_save_is_saved_too(self, fresh, tmp_path):
        stopped = []

        def on_step(row):
            if row["step"] == 1:
                stopped.append(15)

        cfg = settings(output_dir=str(tmp_path), max_steps=6, save_steps=6)
        train_math.train(cfg, *fresh, sums(4), stopped=stopped, on_step=on_step,
                         reward=parity_reward)
        assert len(torch.load(tmp_path / "state.pt")["rows"]) == 2
