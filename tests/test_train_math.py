"""train_math.py: what it promises.

Answers and rewards - datasets - the rollout - log-probs - the algorithm - evaluation - going on
where a run stopped - the command line - models of other kinds.
"""

import copy
import datetime
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
)

import train_math
from common.logs import read
from common.tiny_model import tiny_tokenizer
from gspo import group_advantages, gspo_loss
from tests.conftest import (
    assert_same,
    one_line,
    parity_reward,
    run,
    settings,
    sums,
    without_clocks,
    write_jsonl,
)

TOP = Path(__file__).resolve().parents[1]
QUESTIONS = [
    {"question": "Eve buys 3 figs?"},
    {"question": "How many boxes of 53 figs are there? Ann has 7."},
]


def encoded(tokenizer, questions=QUESTIONS):
    return train_math.encode_prompts(tokenizer, questions, "")


def constant_reward(prompts, completions, **columns):
    return [0.3] * len(completions)


def dataset(path, **changes):
    return settings(dataset=str(path), **changes)


class TestDataset:
    def test_that_is_a_file_holds_out_its_last_rows_and_at_most_a_fifth(self, tmp_path):
        rows = sums(11)
        path = write_jsonl(tmp_path / "q.jsonl", rows)
        for size, n in (0, 0), (1, 1), (2, 2), (99, 2):
            questions, held_out = train_math.load_questions(dataset(path, eval_size=size))
            assert questions + held_out == rows and len(held_out) == n

    @pytest.mark.parametrize("kind", ["json", "parquet"])
    def test_that_is_a_folder_has_its_own_test_file(self, tmp_path, kind):
        rows = sums(9)
        for name, part in ("train", rows[:6]), ("test", rows[6:]):
            made = datasets.Dataset.from_list(part)
            ending = "jsonl" if kind == "json" else kind
            getattr(made, f"to_{kind}")(tmp_path / f"{name}.{ending}")
        assert train_math.load_questions(dataset(tmp_path, eval_size=2)) == (rows[:6], rows[6:8])

    def test_that_is_a_folder_without_a_test_file_holds_out_the_last_rows(self, tmp_path):
        write_jsonl(tmp_path / "train.jsonl", sums(10))
        questions, held_out = train_math.load_questions(dataset(tmp_path, eval_size=4))
        assert (questions, held_out) == (sums(10)[:8], sums(10)[8:])

    def test_on_the_hub_is_asked_for_by_its_name(self, monkeypatch):
        """The hub is out of reach of a test; that the right thing is asked of it is not."""
        asked = []
        no_test = {"train": sums(10)}

        def load_dataset(*what):
            asked.append(what)
            return {"train": sums(6), "test": sums(3)}

        monkeypatch.setattr(train_math, "load_dataset", load_dataset)
        assert train_math.load_questions(settings(eval_size=2)) == (sums(6), sums(2))
        monkeypatch.setattr(train_math, "load_dataset", lambda *what: asked.append(what) or no_test)
        assert train_math.load_questions(dataset("some/maths")) == (sums(10)[:8], sums(10)[8:])
        assert asked == [("openai/gsm8k", "main"), ("some/maths", None)]

    def test_may_have_dates_and_needs_no_answer_for_an_own_reward(self, tmp_path):
        rows = [{"question": "?", "day": datetime.datetime(2024, 1, i)} for i in range(1, 6)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
        questions, held_out = train_math.load_questions(dataset(tmp_path), parity_reward)
        assert questions + held_out == rows
        hashes = [
            train_math.identity(dataset("x"), some)["questions"]
            for some in (questions, questions, rows[:3], rows[:4][::-1])
        ]
        assert hashes[0] == hashes[1] and len(set(hashes)) == 3

    @pytest.mark.parametrize(
        "text, words",
        [
            ("", ""),
            ("no json\n", ""),
            ('{"question": "?"}\n', "row 1:"),
            ("[1]\n", ""),
            ('{"answer": "#### 1"}\n', "row 1:"),
            ('{"question": 1, "answer": "1"}\n', "row 1:"),
            ('{"question": "?", "answer": "none"}\n', "row 1:"),
            ('{"question": "?", "answer": "1"}\n{"question": "?", "answer": "1/2"}\n', "row 2:"),
            (
                '{"question": "?", "answer": "1"}\n' * 5 + '{"question": "?", "answer": ""}\n',
                "row 6:",
            ),
            ('{"problem": "?", "solution": "1"}\n', "a question, a text, is needed"),
        ],
    )
    def test_that_is_wrong_ends_in_one_line_that_says_where(
        self, command, tmp_path, monkeypatch, text, words
    ):
        monkeypatch.setattr(train_math, "load", lambda *a: pytest.fail("a model was loaded first"))
        path = tmp_path / "q.jsonl"
        path.write_text(text)
        line = one_line(
            train_math.main, *command, "--dataset", path, "--output_dir", tmp_path / "o"
        )
        assert line.startswith(f"train_math.py: --dataset {path}: ") and words in line

    @pytest.mark.parametrize("name", ["nowhere.jsonl", ".", "no/where"])
    def test_that_is_not_there_ends_in_one_line(self, command, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        flags = ["--dataset", name, "--output_dir", "o"]
        assert f"--dataset {name}: " in one_line(train_math.main, *command, *flags)

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

    def test_refuses_a_reward_that_gives_one_number_a_question_instead_of_one_a_response(self):
        with pytest.raises(RuntimeError, match=r"shape '\[4\]' is invalid for input of size 2"):
            train_math.score(lambda **columns: [1, 2], sums(2), ["w", "x", "y", "z"])


class Spy:
    """Notes what goes into and out of each part of a step."""

    def __init__(self, monkeypatch):
        self.events = []
        self.rollouts = []
        self.batches = []
        self.rates = []
        step = torch.optim.AdamW.step

        def stepping(optimizer):
            self.events.append("step")
            self.rates.append(optimizer.param_groups[0]["lr"])
            step(optimizer)

        monkeypatch.setattr(torch.optim.AdamW, "step", stepping)

    def rollout(self, *arguments):
        self.events.append("rollout")
        self.rollouts.append((arguments[1], *train_math.rollout(*arguments)))
        return self.rollouts[-1][1:]

    def group_advantages(self, rewards, group_size):
        self.events.append("advantages")
        return group_advantages(rewards, group_size)

    def build_minibatches(self, *arguments):
        self.events.append("build")
        return train_math.build_minibatches(*arguments)

    def response_log_probs(self, model, batch, temperature):
        self.events.append("new" if torch.is_grad_enabled() else "old")
        self.batches.append(batch)
        return train_math.response_log_probs(model, batch, temperature)

    def loss(self, *arguments, **more):
        self.events.append("loss")
        return gspo_loss(*arguments, **more)

    def parts(self):
        names = ("rollout", "group_advantages", "build_minibatches", "response_log_probs", "loss")
        return {name: getattr(self, name) for name in names}


def brute_force_loss(model, prompts, responses, advantages, old_log_probs, temperature):
    """GSPO by the paper, a response at a time, clipped at 0.99 and 1.03: (loss, log-probs)."""
    value = 0
    all_log_probs = []
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        log_probs = (logits / temperature).log_softmax(-1)
        log_probs = log_probs[torch.arange(len(response)), torch.tensor(response)]
        all_log_probs.append(log_probs.detach())
        old = old_log_probs[i] if old_log_probs else all_log_probs[i]
        s = (log_probs - old).mean().exp()
        value = value - torch.minimum(s * advantages[i], s.clamp(0.99, 1.03) * advantages[i])
    return value / len(prompts), all_log_probs


class TestTraining:
    def test_makes_the_updates_that_the_paper_says(self, tiny, monkeypatch):
        """Two minibatches, twice each, of several micro-batches; in one group all rewards are
        equal. Each gradient is computed again with the weights of its moment, each weight by an
        AdamW of the test."""
        model, tokenizer = tiny
        moments = []
        clip = torch.nn.utils.clip_grad_norm_

        def note(parameters, norm):
            moments.append((copy.deepcopy(model), [p.grad.clone() for p in model.parameters()]))
            return clip(parameters, norm)

        def reward(prompts, completions, **columns):
            return [0.5] * 4 + [i % 3 for i in range(12)]

        spy = Spy(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.utils, "clip_grad_norm_", note)
            cfg = settings(
                minibatches=2,
                epochs=2,
                max_steps=1,
                temperature=0.8,
                eps_low=0.01,
                eps_high=0.03,
                micro_batch_tokens=60,
                learning_rate=3e-3,
            )
            _, row = train_math.train(cfg, model, tokenizer, sums(4), reward=reward, **spy.parts())
        moments.append((model, None))
        ((prompts, responses, _),) = spy.rollouts
        prompts = [prompt for prompt in prompts for _ in range(4)]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        advantages = group_advantages(torch.tensor(reward(None, texts)), 4)
        start = copy.deepcopy(moments[0][0])
        _, old = brute_force_loss(start, prompts, responses, advantages, None, 0.8)
        mine = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0)
        losses = []
        norms = []
        for k, (then, gradients) in enumerate(moments[:-1]):
            then.zero_grad()
            half = slice(0, 8) if k % 2 == 0 else slice(8, 16)
            loss, new = brute_force_loss(
                then, prompts[half], responses[half], advantages[half], old[half], 0.8
            )
            loss.backward()
            losses.append(loss.item())
            norms.append(math.hypot(*(p.grad.norm().item() for p in then.parameters())))
            for mine_p, then_p, gradient in zip(mine.parameters(), then.parameters(), gradients):
                assert torch.allclose(then_p.grad, gradient, atol=1e-4), f"update {k}"
                mine_p.grad = gradient / max(1, norms[-1])
            optimizer.step()
            after = moments[k + 1][0]
            for mine_p, after_p in zip(mine.parameters(), after.parameters()):
                assert torch.allclose(mine_p, after_p, atol=1e-5), f"after update {k}"
        assert max(norms) > 1.1, "so that it is clipped to 1"
        assert row["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-3)
        assert row["loss"] == pytest.approx(sum(losses) / 4, abs=1e-4)
        assert row["log_ratio_first_max"] == 0 < row["clip_fraction"] < 1
        assert row["equal_reward_groups"] == 0.25

    def test_takes_old_log_probs_once_before_the_first_update(self, fresh, monkeypatch):
        """And on the very micro-batches of the update, built once; each part may be replaced."""
        spy = Spy(monkeypatch)
        cfg = settings(epochs=2, minibatches=2, max_steps=3, micro_batch_tokens=60)
        rows = train_math.train(cfg, *fresh, sums(9), reward=parity_reward, **spy.parts())
        steps = " ".join(spy.events).split("rollout ")[1:]
        assert len(steps) == 3 and len(rows) == 4
        batches = iter(spy.batches)
        for step in steps:
            *parts, last = step.split("step")
            n = parts[0].count("old")
            assert parts[0].startswith("advantages build " + "old " * n + "new loss")
            assert n > 2 and sum(part.count("new loss") for part in parts) == 2 * n
            assert len(parts) == 4 and "new" not in last and step.count("old") == n
            old = list(itertools.islice(batches, n))
            assert list(itertools.islice(batches, 2 * n)) == old * 2
        assert spy.rates[::4] == pytest.approx([1e-3, 0.55e-3, 1e-4]), "to a tenth at max_steps"

    def test_has_one_step_at_the_full_rate(self, fresh, monkeypatch):
        spy = Spy(monkeypatch)
        train_math.train(settings(max_steps=1), *fresh, sums(4), reward=parity_reward)
        assert set(spy.rates) == {1e-3}

    def test_measures_what_the_names_of_the_metrics_say(self, fresh, monkeypatch):
        spy = Spy(monkeypatch)
        paid = []

        def reward(prompts, completions, **columns):
            paid.append([float(len(text) % 2) for text in completions])
            return paid[-1]

        rows = train_math.train(
            settings(max_steps=2), *fresh, sums(9), reward=reward, **spy.parts()
        )
        for row, rewards, (_, responses, log_probs) in zip(
            rows[1:], paid, spy.rollouts, strict=True
        ):
            lengths = [len(response) for response in responses]
            assert len(responses) == 16 and 0 < row["cut"] == lengths.count(6) / 16
            assert row["response_length"] == sum(lengths) / 16
            assert 0 < row["reward"] == sum(rewards) / 16
            equal = sum(len(set(rewards[i : i + 4])) == 1 for i in range(0, 16, 4))
            assert row["equal_reward_groups"] == equal / 4
            assert row["entropy"] == pytest.approx(-log_probs.sum().item() / sum(lengths))
            assert row["seconds"] > row["seconds_rollout"] > 0
        assert rows[1]["reward"] != rows[2]["reward"]

    @pytest.mark.parametrize("algorithm, clipped", [("gspo", 6), ("gspo_token", 6), ("grpo", 4)])
    def test_counts_the_tokens_that_the_algorithm_clips(self, algorithm, clipped):
        """Three responses of 2, 4 and 2 tokens in two micro-batches. In the first, s = exp(-0.2) is
        below the range of 0.85 to 1.2, in the second exp(0.4) above, in the third it is 1."""
        cfg = settings(algorithm=algorithm, eps_low=0.15, eps_high=0.2, group_size=3)
        first = SimpleNamespace(
            old_log_probs=torch.zeros(1, 2),
            mask=torch.ones(1, 2).bool(),
            advantages=torch.tensor([-1.0]),
        )
        second = SimpleNamespace(
            old_log_probs=torch.zeros(2, 4),
            mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool(),
            advantages=torch.tensor([1.0, -1.0]),
        )
        log_probs = torch.tensor([[0.0, 0.5, 0.5, 0.6], [0, 0, 0, 0]])
        seen = [(first, torch.tensor([[-0.4, 0.0]]), 3.0), (second, log_probs, 5.0)]
        responses = [[1] * 2, [1] * 4, [1] * 2]
        advantages = torch.tensor([1.0, -1.0, 0.0])
        sampled = torch.zeros(3, 4)
        row = train_math.metrics(responses, advantages, sampled, seen, [2.0, 4.0], 1, cfg)
        assert row["clip_fraction"] == pytest.approx(clipped / 8)
        assert row["log_ratio_first_max"] == pytest.approx(0.2)
        assert row["log_ratio_std"] == pytest.approx(torch.tensor([0.4, 0]).std().item())
        assert (row["loss"], row["grad_norm"]) == (4, 3)
        assert row["equal_reward_groups"] == 0

    def test_of_gspo_token_equals_gspo_and_grpo_differs(self, world):
        rows = {}
        for algorithm in train_math.ALGORITHMS:
            cfg = settings(
                algorithm=algorithm,
                eps_low=0.01,
                eps_high=0.01,
                max_steps=1,
                epochs=2,
                learning_rate=1e-2,
            )
            model, tokenizer = train_math.load(world / "model", "cpu")
            _, rows[algorithm] = train_math.train(
                cfg, model, tokenizer, sums(4), reward=parity_reward
            )
        for key in "loss", "grad_norm", "log_ratio_std", "clip_fraction":
            gspo = pytest.approx(rows["gspo"][key], rel=1e-3, abs=1e-6)
            assert rows["gspo_token"][key] == gspo
            assert rows["grpo"][key] != gspo

    def test_pays_each_response_for_its_own_question(self, fresh):
        """Prompts, responses and columns stay in one order: group by group."""
        _, tokenizer = fresh
        seen = {"asked": []}

        def reward(prompts, completions, answer, **columns):
            seen.update(prompts=prompts, answers=answer)
            return [float(i % 3 == 0) for i in range(len(completions))]

        def rollout(model, prompts, *rest):
            seen["asked"] += tokenizer.batch_decode(prompts)
            return train_math.rollout(model, prompts, *rest)

        def build(prompts, responses, advantages, cfg):
            seen["built"] = tokenizer.batch_decode(prompts)
            return train_math.build_minibatches(prompts, responses, advantages, cfg)

        cfg = settings(max_steps=1, rollout_rows=8)
        questions = sums(7)
        train_math.train(
            cfg, *fresh, questions, reward=reward, rollout=rollout, build_minibatches=build
        )
        answers = {row["question"]: row["answer"] for row in questions}
        assert seen["built"] == [prompt + "\n" for prompt in seen["prompts"]]
        assert seen["asked"] == seen["built"][::4] and len(set(seen["asked"])) == 4
        assert seen["answers"] == [answers[prompt] for prompt in seen["prompts"]]

    def test_leaves_the_weights_alone_where_all_rewards_are_equal_and_says_so_once(
        self, command, world, tmp_path, capsys
    ):
        rows = run(command, tmp_path / "a", reward=constant_reward)
        assert all(row["equal_reward_groups"] == 1 for row in rows[1:])
        assert all(row["log_ratio_first_max"] is None for row in rows[1:])
        weights = [folder / "model" / "model.safetensors" for folder in (world, tmp_path / "a")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        shown = capsys.readouterr().out
        assert shown.count("note: no gradient in three steps") == 1 and "warning" not in shown
        assert shown.index("step 3/6") < shown.index("no gradient") < shown.index("step 4/6")

    def test_warns_when_the_first_ratios_are_not_1(self, fresh, tmp_path, capsys):
        """Here in the second micro-batch of the first minibatch."""
        calls = itertools.count(1)

        def rounds_otherwise(model, batch, temperature):
            log_probs = train_math.response_log_probs(model, batch, temperature)
            return log_probs + 1e-6 * (torch.is_grad_enabled() and next(calls) == 2)

        cfg = settings(output_dir=str(tmp_path), max_steps=1, minibatches=1, micro_batch_tokens=60)
        _, row = train_math.train(
            cfg, *fresh, sums(4), reward=parity_reward, response_log_probs=rounds_otherwise
        )
        assert row["log_ratio_first_max"] > 0
        assert "warning: log_ratio_first_max is not 0" in capsys.readouterr().out

    def test_goes_through_all_questions_before_any_comes_twice(self, fresh, monkeypatch):
        questions = [{"question": str(i)} for i in range(10)]

        def picked(seed, state=None):
            seen = []

            def train_step(model, tokenizer, optimizer, questions, *rest):
                seen.extend(int(row["question"]) for row in questions)
                return {}

            monkeypatch.setattr(train_math, "train_step", train_step)
            train_math.train(settings(max_steps=5, seed=seed), *fresh, questions, state=state)
            return seen

        first = picked(0)
        assert sorted(first[:10]) == sorted(first[10:]) == list(range(10))
        assert first[:10] != first[10:] and first != picked(1) and first == picked(0)
        optimizer = torch.optim.AdamW(fresh[0].parameters(), fused=True).state_dict()
        state = {"rows": [{}] * 4, "model": fresh[0].state_dict(), "optimizer": optimizer}
        assert picked(0, state) == first[12:]

    def test_draws_other_responses_in_each_step_and_with_each_seed(self, fresh):
        drawn = {}
        for seed, step in (0, 1), (0, 2), (1, 1), (0, 1):
            cfg = settings(seed=seed, learning_rate=1e-12)
            responses = []

            def rollout(*arguments, responses=responses):
                got = train_math.rollout(*arguments)
                responses += got[0]
                return got

            optimizer = torch.optim.AdamW(fresh[0].parameters())
            train_math.train_step(*fresh, optimizer, sums(4), step, cfg, parity_reward, rollout)
            assert drawn.setdefault((seed, step), responses) == responses
        assert drawn[0, 1] != drawn[0, 2] != drawn[1, 1] != drawn[0, 1]

    def test_without_a_folder_writes_and_prints_nothing(self, fresh, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        cfg = settings(max_steps=2)
        rows = train_math.train(cfg, *fresh, sums(9), sums(3), reward=constant_reward)
        assert len(rows) == 3 and not list(tmp_path.iterdir()) and not capsys.readouterr().out

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_stops_where_weights_are_not_finite_and_keeps_the_last_good_state(
        self, command, tmp_path, monkeypatch, bad
    ):
        calls = itertools.count(1)

        def norm(parameters, limit):
            if next(calls) == 3:
                next(iter(parameters)).grad.fill_(bad)
            return torch.tensor(1.0)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", norm)
        flags = ["--minibatches", "1", "--save_steps", "1", "--output_dir", tmp_path / "a"]
        line = one_line(train_math.main, *command, *flags, reward=parity_reward)
        assert "step 3: loss or weights not finite: lower --learning_rate" in line
        state = torch.load(tmp_path / "a" / "state.pt")
        assert len(state["rows"]) == 3
        assert all(weight.isfinite().all() for weight in state["model"].values())

    def test_writes_what_it_promises(self, whole):
        rows = read(whole / "metrics.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
        metrics = {
            "step",
            "reward",
            "response_length",
            "cut",
            "equal_reward_groups",
            "entropy",
            "loss",
            "grad_norm",
            "clip_fraction",
            "log_ratio_first_max",
            "log_ratio_std",
            "seconds",
            "seconds_rollout",
        }
        evaluation = {"eval_questions", "eval_reward", "eval_reward_interval", "eval_samples"}
        assert set(rows[0]) == {"step", "settings"} | evaluation
        for row in rows[1:]:
            assert metrics <= set(row)
            assert evaluation & set(row) == (evaluation if row["step"] % 2 == 0 else set())
            assert row["log_ratio_first_max"] == 0, "the first minibatch is on-policy"
            assert row["log_ratio_std"] > 0 and row["grad_norm"] > 0
        assert max(row["clip_fraction"] for row in rows[1:]) > 0
        names = {path.name for path in whole.iterdir()}
        assert names == {"metrics.jsonl", "model", "state.pt", "lock"}
        model = AutoModelForCausalLM.from_pretrained(whole / "model")
        tokenizer = AutoTokenizer.from_pretrained(whole / "model")
        assert len(tokenizer) == model.config.vocab_size and tokenizer.chat_template
        state = torch.load(whole / "state.pt")
        assert json.loads(json.dumps(state["rows"])) == rows
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, state["model"][name])


class TestEvaluation:
    def test_is_greedy_strict_and_by_the_last_number(self, fresh, monkeypatch):
        """8 of 10 right by the last number, 6 in the form; intervals from a table of Wilson's."""
        seen = []
        texts = ["#### 7"] * 6 + ["it is 7", "#### x 7", "#### 8", "none"]

        def sample(*arguments):
            seen.append(arguments)
            return None, None, texts, None

        monkeypatch.setattr(train_math, "sample", sample)
        questions = [{"question": f"{i}?", "answer": "3 + 4\n#### 7"} for i in range(10)]
        row = train_math.evaluate(*fresh, questions, "cfg")
        assert seen == [(*fresh, questions, 1, 0.0, "cfg")], "one response each, temperature 0"
        assert row.pop("eval_reward_interval") == pytest.approx((0.3127, 0.8318), abs=1e-4)
        assert row.pop("eval_last_number_interval") == pytest.approx((0.4902, 0.9433), abs=1e-4)
        samples = [(f"{i}?", text, float(i < 6)) for i, text in enumerate(texts)]
        assert row == {
            "eval_questions": 10,
            "eval_reward": 0.6,
            "eval_last_number": 0.8,
            "eval_samples": samples[:8],
        }
        assert train_math.wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)

    @pytest.mark.parametrize(
        "values, interval",
        [([0, 1, 1], True), ([0.0, 0.5, 1.0], False), ([2, 2, 2], False), ([1, 1, 1], True)],
    )
    def test_with_an_own_reward_has_an_interval_where_it_is_0_or_1(self, fresh, values, interval):
        questions = [{"question": "?", "level": i} for i in range(3)]
        levels = []

        def reward(prompts, completions, level, **columns):
            levels.extend(level)
            return values

        row = train_math.evaluate(*fresh, questions, settings(), reward)
        assert row["eval_reward"] == pytest.approx(sum(values) / 3) and levels == [0, 1, 2]
        assert ("eval_reward_interval" in row) is interval and "eval_last_number" not in row


class Killed(BaseException):
    pass


def dies_at(call, function, half=None):
    """The function, but for its call number `call`, which does a half of it and dies."""
    calls = itertools.count(1)

    def dying(*arguments, **more):
        if next(calls) < call:
            return function(*arguments, **more)
        if half:
            half(*arguments)
        raise Killed

    return dying


def half_a_state(state, path):
    path.write_bytes(b"PK")


def half_a_text(path, text):
    path.write_bytes(text.encode()[:-200])


def half_a_model(self, folder):
    folder.mkdir()
    (folder / "config.json").write_text("{")


KILLS = {
    "in an update": (train_math.ALGORITHMS, "gspo", 15, gspo_loss, None),
    "in the log": (Path, "write_text", 6, Path.write_text, half_a_text),
    "in an evaluation": (train_math, "evaluate", 3, train_math.evaluate, None),
    "in the first save": (torch, "save", 1, torch.save, half_a_state),
    "in a later save": (torch, "save", 3, torch.save, half_a_state),
    "before the first save counts": (os, "replace", 1, os.replace, None),
    "before a later save counts": (os, "replace", 2, os.replace, None),
    "in the model at the end": (PreTrainedModel, "save_pretrained", 1, None, half_a_model),
}


class TestGoingOn:
    @pytest.mark.parametrize("moment", KILLS)
    def test_after_a_kill_equals_a_run_never_killed(
        self, command, whole, tmp_path, monkeypatch, moment
    ):
        owner, name, call, function, half = KILLS[moment]
        dying = dies_at(call, function, half)
        with monkeypatch.context() as patch:
            if owner is train_math.ALGORITHMS:
                patch.setitem(owner, name, (dying, 3e-4, 4e-4))
            else:
                patch.setattr(owner, name, dying)
            with pytest.raises(Killed):
                run(command, tmp_path / "killed")
        run(command, tmp_path / "killed")
        assert_same(whole, tmp_path / "killed")

    @pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
    def test_after_kill_9_equals_a_run_never_killed(self, command, whole, tmp_path):
        """A process of its own that sends itself SIGKILL in the middle of step 4."""
        script = f"""
from tests.conftest import gspo_loss_that_kills, parity_reward, train_math
train_math.ALGORITHMS["gspo"] = (gspo_loss_that_kills(14), 3e-4, 4e-4)
train_math.main({[*command, "--output_dir", str(tmp_path / "killed")]!r}, parity_reward)
"""
        done = subprocess.run([sys.executable, "-c", script], cwd=TOP, capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert 2 <= len(torch.load(tmp_path / "killed" / "state.pt")["rows"]) < 6
        run(command, tmp_path / "killed")
        assert_same(whole, tmp_path / "killed")

    @pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("times", [1, 2])
    def test_after_a_signal_equals_a_run_never_stopped(
        self, command, whole, tmp_path, capsys, number, times
    ):
        """In the middle of step 3 of 6. One: the step is finished and saved. Two: it ends at once.
        Either way, the handlers that were there before main are there again."""
        training = itertools.count(1)

        def reward(prompts, completions, **columns):
            if len(completions) == 16 and next(training) == 3:
                for _ in range(times):
                    os.kill(os.getpid(), number)
            return parity_reward(prompts, completions)

        before = signal.signal(number, signal.default_int_handler)
        try:
            with pytest.raises(SystemExit) as stop:
                run(command, tmp_path / "a", reward=reward)
            assert signal.getsignal(number) is signal.default_int_handler
        finally:
            signal.signal(number, before)
        shown = capsys.readouterr().out
        assert "this step is finished and saved first" in shown
        assert "no gradient" not in shown, "there was one"
        if times == 1:
            assert stop.value.code == 128 + number and "after step 3" in shown
            assert (tmp_path / "a" / "model" / "model.safetensors").exists()
        else:
            assert "What was saved is good" in stop.value.code
        rows = torch.load(tmp_path / "a" / "state.pt")["rows"]
        assert len(rows) == (4 if times == 1 else 3)
        run(command, tmp_path / "a")
        assert_same(whole, tmp_path / "a")

    def test_of_a_finished_run_changes_nothing_but_mends_its_model(
        self, command, whole, tmp_path, capsys
    ):
        folder = tmp_path / "a"
        shutil.copytree(whole, folder)
        (folder / "model" / "model.safetensors").write_bytes(b"half")
        run(command, folder)
        assert_same(whole, folder)
        assert "step 6" in capsys.readouterr().out

    def test_takes_other_sizes_a_new_place_and_more_steps(self, command, whole, tmp_path, capsys):
        """And says so where the rate jumps."""
        folder = tmp_path / "moved"
        shutil.copytree(whole, folder)
        data = shutil.copy(command[3], tmp_path / "copy.jsonl")
        flags = [
            "--max_steps",
            "8",
            "--micro_batch_tokens",
            "99",
            "--rollout_rows",
            "8",
            "--save_steps",
            "5",
            "--dataset",
            str(data),
        ]
        rows = run(command, folder, *flags)
        assert "begun with --max_steps 6 (another: the rate jumps)" in capsys.readouterr().out
        assert without_clocks(rows)[:7] == without_clocks(read(whole / "metrics.jsonl"))
        assert [row["step"] for row in rows[7:]] == [7, 8]
        assert [step for step, row in enumerate(rows) if "eval_reward" in row] == [0, 2, 4, 6, 8]

    @pytest.mark.parametrize(
        "flags, words",
        [
            (["--seed", "1"], "another seed:"),
            (["--group_size", "2"], "another group_size:"),
            (["--epochs", "2", "--temperature", "0.9"], "another epochs, temperature:"),
            (["--algorithm", "grpo"], "another algorithm, eps_low, eps_high:"),
            (["--learning_rate", "1"], "another learning_rate:"),
            (["--prompts_per_step", "8"], "another prompts_per_step:"),
            (["--minibatches", "2"], "another minibatches:"),
            (["--instruction", "Hm."], "another instruction:"),
            (["--max_completion_length", "7"], "another max_completion_length:"),
            (["--model", "other"], "another model:"),
            (["--eval_size", "2"], "another questions:"),
            (["--dataset", "changed.jsonl"], "another questions:"),
        ],
    )
    def test_refuses_another_run_by_what_it_has_changed(
        self, command, whole, tmp_path, monkeypatch, flags, words
    ):
        monkeypatch.setattr(train_math, "load", lambda *a: pytest.fail("a model was loaded first"))
        monkeypatch.chdir(tmp_path)
        write_jsonl(tmp_path / "changed.jsonl", [{"question": "new?", "answer": "1"}] + sums(29))
        before = {path: path.read_bytes() for path in whole.rglob("*.*")}
        line = one_line(
            train_math.main, *command, "--output_dir", whole, *flags, reward=parity_reward
        )
        assert words in line and f"--output_dir {whole}: " in line
        assert {path: path.read_bytes() for path in whole.rglob("*.*")} == before

    @pytest.mark.parametrize("name", ["thesis.txt", "model"])
    def test_refuses_a_folder_that_holds_something_else(self, command, tmp_path, name):
        (tmp_path / name).write_text("mine")
        assert "not empty" in one_line(train_math.main, *command, "--output_dir", tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {name}
        assert (tmp_path / name).read_text() == "mine"

    def test_refuses_a_file_and_a_damaged_state(self, command, whole, tmp_path):
        (tmp_path / "file").write_text("mine")
        file = tmp_path / "file"
        assert f"--output_dir {file}: " in one_line(train_math.main, *command, "--output_dir", file)
        shutil.copytree(whole, tmp_path / "a")
        state = tmp_path / "a" / "state.pt"
        state.write_bytes(state.read_bytes()[:-5000])
        line = one_line(
            train_math.main, *command, "--output_dir", tmp_path / "a", reward=parity_reward
        )
        assert f"--output_dir {tmp_path / 'a'}: " in line

    def test_refuses_a_second_process_and_gives_the_lock_back(self, command, tmp_path):
        (tmp_path / "a").mkdir()
        flags = [*command, "--output_dir", tmp_path / "a"]
        with FileLock(tmp_path / "a" / "lock"):
            assert "lock" in one_line(train_math.main, *flags)
        for _ in range(2):  # after an error, too
            assert "--model nowhere" in one_line(train_math.main, *flags, "--model", "nowhere")
        FileLock(tmp_path / "a" / "lock").acquire(timeout=0)


OWN_TASK = """import train_math

def reward(prompts, completions, level, **columns):
    return [float(len(text) > n) for text, n in zip(completions, level)]

train_math.main(reward=reward)
"""


class TestCommandLine:
    def test_needs_gspo_alone_beside_it_and_takes_an_own_reward(self, command, tmp_path):
        for name in "gspo.py", "train_math.py":
            shutil.copy(TOP / name, tmp_path)
        (tmp_path / "own.py").write_text(OWN_TASK)
        rows = [{"question": f"{i}?", "level": i} for i in range(10)]
        data = write_jsonl(tmp_path / "own.jsonl", rows)
        flags = ["--dataset", data, "--output_dir", "runs/own", "--max_steps", "2"]
        done = subprocess.run(
            [sys.executable, "own.py", *command, *flags],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "8 questions, 2 more are held out" in done.stdout
        assert "runs/own/model is the model after step 2" in done.stdout
        assert "Traceback" not in done.stderr
        rows = read(tmp_path / "runs" / "own" / "metrics.jsonl")
        assert len(rows) == 3 and rows[2]["eval_questions"] == 2
        assert "eval_reward_interval" in rows[2] and "eval_last_number" not in rows[2]

    @pytest.mark.parametrize(
        "flags, word",
        [
            ("--group_size 1", "--group_size 1"),
            ("--group_sizes 4", "--group_sizes"),
            ("--group_siz 4", "--group_siz"),
            ("--rollout_rows 0", "--rollout_rows"),
            ("--prompts_per_step 0", "--prompts_per_step"),
            ("--prompts_per_step 6", "--minibatches"),
            ("--temperature 0", "--temperature"),
            ("--learning_rate nan", "nan"),
            ("--learning_rate -1", "--learning_rate"),
            ("--eps_low 0", "--eps_low"),
            ("--eps_high inf", "--eps_high"),
            ("--tiny", "--tiny"),
            ("--eval_size -1", "--eval_size"),
            ("--max_steps 0", "--max_steps"),
            ("--seed -1", "--seed"),
            ("--seed 99999999999999999", "--seed"),
            ("stray", "stray"),
            ("--save_steps 0", "--save_steps"),
            ("--micro_batch_tokens 0", "--micro_batch_tokens"),
            ("--epochs 0", "--epochs"),
            ("--minibatches 0", "--minibatches"),
        ],
    )
    def test_refuses_what_is_wrong_in_one_line(self, flags, word):
        line = one_line(train_math.main, *flags.split())
        assert line.startswith("train_math.py: settings: ") and word in line

    @pytest.mark.parametrize("flags", ["--algorithm ppo", "--group_size x", "--seed"])
    def test_refuses_a_value_of_another_kind(self, flags, capsys):
        with pytest.raises(SystemExit) as stop:
            train_math.main(flags.split())
        assert stop.value.code == 2 and flags.split()[0] in capsys.readouterr().err

    def test_gives_each_algorithm_its_own_clip_range(self):
        for algorithm, expected in (
            ("gspo", (3e-4, 4e-4)),
            ("gspo_token", (3e-4, 4e-4)),
            ("grpo", (0.2, 0.27)),
        ):
            cfg = train_math.parse_settings(["--algorithm", algorithm])
            assert (cfg.eps_low, cfg.eps_high) == expected
        cfg = train_math.parse_settings(["--eps_low", "0.1"])
        assert (cfg.eps_low, cfg.eps_high) == (0.1, 4e-4)

    def test_helps(self, capsys):
        with pytest.raises(SystemExit) as stop:
            train_math.main(["--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert not stop.value.code and "(default: runs/math)" in said and "the loss" in said

    def test_names_the_flags_that_help_when_memory_runs_out(self, command, tmp_path, monkeypatch):
        def full(*arguments, **more):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

        monkeypatch.setitem(train_math.ALGORITHMS, "gspo", (full, 3e-4, 4e-4))
        line = one_line(
            train_math.main, *command, "--output_dir", tmp_path / "a", reward=parity_reward
        )
        assert "CUDA out of memory" in line
        assert "--micro_batch_tokens" in line and "--rollout_rows" in line

    def test_shows_the_traceback_of_a_mistake_in_the_script_and_can_be_called_again(
        self, command, whole, tmp_path
    ):
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

        def mistaken(prompts, completions, **columns):
            raise RuntimeError("shapes do not fit")

        with pytest.raises(RuntimeError, match="shapes"):
            run(command, tmp_path / "a", reward=mistaken)
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
        run(command, tmp_path / "a")
        assert_same(whole, tmp_path / "a")
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers

    def test_pays_right_numbers_where_no_reward_is_given(self, command, tmp_path, capsys):
        train_math.main([*command, "--output_dir", str(tmp_path / "a"), "--max_steps", "1"])
        rows = read(tmp_path / "a" / "metrics.jsonl")
        assert rows[0]["eval_reward"] == rows[1]["reward"] == 0
        assert {"eval_last_number", "eval_last_number_interval"} <= set(rows[0])
        shown = capsys.readouterr().out
        assert "26 questions, 4 more are held out" in shown and "step 1/1" in shown
        assert "eval_reward 0 (95%: 0 to 0.49)" in " ".join(shown.split())
