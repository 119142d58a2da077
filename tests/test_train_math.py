"""train_math.py: data, training, evaluation, resuming, the command line, models that are refused.

Further tests of it are in test_answers, test_rollout, test_bad_inputs and test_own_task.
"""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from filelock import FileLock

import support.metrics
import support.questions
import train_math
from gspo import group_advantages, gspo_loss
from support.rewards import TAKEN
from tests.conftest import (
    QUESTIONS,
    assert_same,
    at_call,
    check,
    constant_reward,
    contents,
    names_in,
    one_line,
    parity_reward,
    refused,
    rollout_of,
    run,
    settings,
    sums,
    train,
    without_clocks,
    write_jsonl,
)
from tests.test_rollout import model_of
from tools.logs import paired, read


def load_questions(path, reward=None, **changes):
    return train_math.load_questions(settings(dataset=str(path), **changes), reward)


def write_rows(path, rows):
    kind = path.suffix[1:].lower().replace("jsonl", "json")
    getattr(datasets.Dataset.from_list(rows), f"to_{kind}")(path)


class TestDataset:
    @pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet", "CSV"])
    def test_that_is_a_file_holds_out_at_most_a_fifth(self, tmp_path, ending):
        path = tmp_path / f"q.{ending}"
        write_rows(path, sums(14))
        for size, n in (0, 0), (1, 1), (2, 2), (99, 2):
            questions, held_out = load_questions(path, eval_size=size)
            assert sorted(questions + held_out, key=sums(14).index) == sums(14)
            assert len(held_out) == n

    @pytest.mark.parametrize("ending, parts", [
        ("jsonl", ["train", "test"]),
        ("parquet", ["train", "validation"]),
        ("csv", ["train", "validation", "test"]),
    ])
    def test_that_is_a_folder_holds_out_its_test_or_else_its_validation_file(
            self, tmp_path, ending, parts):
        rows = sums(12)
        for i, name in enumerate(parts):
            write_rows(tmp_path / f"{name}.{ending}", rows[4 * i:4 * i + 4])
        last = rows[:4 * len(parts)][-4:]
        for size in 0, 2, 4:
            assert load_questions(tmp_path, eval_size=size) == (rows[:4], last[:size])

    def test_on_the_hub_is_asked_for_by_its_name(self, monkeypatch):
        """No test asks the hub itself."""
        asked = []
        parts = {"train": sums(9)[:6], "test": sums(9)[6:]}

        def load_dataset(*what):
            asked.append(what)
            return parts

        monkeypatch.setattr(support.questions, "load_dataset", load_dataset)
        assert train_math.load_questions(settings(eval_size=2)) == (sums(6), sums(8)[6:])
        parts = {"train": sums(10)}
        questions, held_out = load_questions("some/maths")
        assert len(held_out) == 2 and all(row in sums(10) for row in questions + held_out)
        assert asked == [("openai/gsm8k", "main"), ("some/maths",)]


def brute_force_loss(algorithm, model, prompts, responses, advantages, old_log_probs, temperature):
    """An algorithm as in the paper, one response after the other, clipped at 0.99 and 1.03.

    Returns (loss, log-probs)."""
    value = 0
    all_log_probs = []
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1]
        log_probs = (logits / temperature).log_softmax(-1)
        log_probs = log_probs[torch.arange(len(response)), torch.tensor(response)]
        all_log_probs.append(log_probs.detach())
        old = old_log_probs[i] if old_log_probs else all_log_probs[i]
        log_ratio = log_probs - old
        if algorithm != "grpo":
            log_ratio = log_ratio.mean()
        ratio = log_ratio.exp()
        clipped = ratio.clamp(0.99, 1.03)
        value = value - torch.minimum(ratio * advantages[i], clipped * advantages[i]).mean()
    return value / len(prompts), all_log_probs


class TestTraining:
    @pytest.mark.parametrize("algorithm", train_math.ALGORITHMS)
    def test_makes_the_updates_that_the_paper_says(self, tiny, monkeypatch, algorithm):
        """There are two epochs of two minibatches of several micro-batches, and in one group all
        rewards are equal. Each gradient is computed again with the weights before its update, and
        each update is made again by another AdamW."""
        model, tokenizer = tiny
        moments = []
        rollouts = []
        clip = torch.nn.utils.clip_grad_norm_

        def note(parameters, norm):
            moments.append((copy.deepcopy(model), [p.grad.clone() for p in model.parameters()]))
            return clip(parameters, norm)

        def sample(*arguments):
            rollouts.append(train_math.sample(*arguments))
            return rollouts[0]

        def reward(**columns):
            return [0.5] * 4 + [i % 3 for i in range(12)]

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.utils, "clip_grad_norm_", note)
            _, row = train(
                tiny, 4, reward=reward, sample=sample, algorithm=algorithm, minibatches=2, epochs=2,
                max_steps=1, temperature=0.8, eps_low=0.01, eps_high=0.03, micro_batch_tokens=60,
                learning_rate=3e-3)
        moments.append((model, None))
        (rollout,) = rollouts
        advantages = group_advantages(torch.tensor(reward()), 4)

        def direct(model, half, old):
            return brute_force_loss(
                algorithm, model, rollout.prompts[half], rollout.responses[half], advantages[half],
                old, 0.8)

        start = moments[0][0]
        _, old = direct(start, slice(0, 16), None)
        mine = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0)
        losses = []
        norms = []
        for k, (then, gradients) in enumerate(moments[:-1]):
            then.zero_grad()
            half = slice(0, 8) if k % 2 == 0 else slice(8, 16)
            loss, _ = direct(then, half, old[half])
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

    @pytest.mark.parametrize("algorithm, clipped", [("gspo", 6), ("gspo_token", 6), ("grpo", 4)])
    @pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
    def test_counts_the_tokens_that_the_algorithm_clips(
            self, fresh, own_loss, algorithm, clipped, micro_batch_tokens):
        """Six responses in two minibatches, with chosen log-probs. In the first minibatch, s is
        exp(-0.2), which is below the range of 0.85 to 1.2, for a response of 2 tokens. In the
        second, it is exp(0.4), which is above it, for a response of 4 tokens, and 1 for one of 2
        tokens. The others have advantage 0."""
        responses = [[5] * n for n in (2, 1, 3, 4, 2, 1)]
        moved_by = {0: [-0.4, 0.0], 3: [0.0, 0.5, 0.5, 0.6], 4: [0.0, 0.0]}
        sampled = torch.zeros(6, 4)
        for i, response in enumerate(responses):
            sampled[i, :len(response)] = -1 - i
        sampled[3, 1] = -4.7

        def response_log_probs(model, batch, temperature):
            log_probs = torch.zeros(batch.mask.shape)
            for k, i in enumerate(batch.indices):
                moved = torch.tensor(moved_by[i]) * torch.is_grad_enabled()
                log_probs[k, batch.mask[k]] = moved - 1 - i
            return log_probs + 0 * model.lm_head.weight.sum()

        def loss(log_probs, *arguments):
            assert arguments[-1] == 3, "the denominator"
            return len(log_probs) + 0 * log_probs.sum()

        own_loss(loss, algorithm, advantages=lambda *_: torch.tensor([-1.0, 0, 0, 1, -1, 0]))
        _, row = train(
            fresh, 2, reward=lambda **columns: [1, 0, 0, 0, 0, 0.5],
            generate=lambda *_: (responses, sampled), response_log_probs=response_log_probs,
            algorithm=algorithm, eps_low=0.15, eps_high=0.2, group_size=3, prompts_per_step=2,
            minibatches=2, max_completion_length=4, max_steps=1,
            micro_batch_tokens=micro_batch_tokens)
        expected = {
            "clip_fraction": clipped / 8,
            "log_ratio_first_max": 0.2,
            "log_ratio_mean": 0.2,
            "log_ratio_std": torch.tensor([0.4, 0]).std().item(),
            "loss": 1.5,
            "grad_norm": 0,
            "reward": 0.25,
            "equal_reward_groups": 0,
            "response_length": 13 / 6,
            "cut": 1 / 6,
            "entropy": (2 + 2 + 9 + 16 + 10 + 6 + 0.7) / 13,
            "sampler_gap": 0.7 / 8,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        assert row["seconds"] > row["seconds_rollout"] > 0
        assert "log_ratio_first_max is not 0" in row["notes"][0]

    @pytest.mark.parametrize("steps, mean", [(1, None), (2, 0)])
    def test_have_no_deviation_of_fewer_than_two_responses(self, steps, mean):
        batch = train_math.MicroBatch(rollout_of([[1]], [[2, 3]]), torch.ones(1), [0], "cpu")
        batch.old_log_probs = torch.zeros(1, 2)
        batch.is_on_policy = True
        updates = [[(batch, torch.zeros(1, 2), 0.0)]] * steps
        row = train_math.update_metrics(updates, [1.0], "sequence", (3e-4, 4e-4))
        assert row["log_ratio_mean"] == mean and row["log_ratio_std"] is None

    def test_keeps_the_weights_if_all_rewards_are_equal_and_says_so(
            self, command, world, tmp_path, capsys):
        rows = run(command, tmp_path / "a", reward=constant_reward)
        for row in rows[1:]:
            assert row["equal_reward_groups"] == 1
            assert row["log_ratio_first_max"] is row["sampler_gap"] is None
        weights = [folder / "model" / "model.safetensors" for folder in (world, tmp_path / "a")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        shown = capsys.readouterr().out
        assert shown.count("note: no gradient in three steps") == 4, "after steps 3 to 6"
        assert shown.count("equal_reward_groups 1 ") == 6

    @pytest.mark.parametrize("equal, is_noted", [
        ([1, 1, 1], True), ([0.5, 1, 1], False), ([1, 1, 0.5], False), ([1, 1], False),
        ([0.5, 0, 1, 1, 1], True), ([1, 1, 1, 0.9], False), ([0.9, 1, 1, 1, 1], True)])
    def test_notes_that_three_steps_in_a_row_have_no_gradient(self, equal, is_noted):
        rows = [{"step": 0}]
        for step, fraction in enumerate(equal, 1):
            row = {"step": step, "equal_reward_groups": fraction, "reward": 0.5, "cut": 0.0}
            rows.append(row)
        assert ("notes" in support.metrics.notes(rows, [])) == is_noted

    def test_uses_all_questions_before_it_uses_any_twice(self, fresh):
        def picked(seed):
            seen = []

            def reward(prompts, completions, **columns):
                seen.extend(int(prompt) for prompt in prompts[::4])
                return constant_reward(prompts, completions)

            questions = [{"question": str(i)} for i in range(10)]
            train(fresh, questions, reward=reward, max_steps=5, seed=seed)
            return seen

        first = picked(0)
        assert sorted(first[:10]) == sorted(first[10:]) == list(range(10))
        assert first[:10] != first[10:]
        assert first == picked(0) != picked(1)

    def test_draws_other_responses_in_each_step_and_with_each_seed(self, fresh):
        drawn = []

        def reward(prompts, completions, **columns):
            drawn.append(tuple(completions))
            return constant_reward(prompts, completions)

        for seed in 0, 1, 0:
            train(fresh, QUESTIONS[:1] * 4, reward=reward, max_steps=2, seed=seed)
        assert drawn[:2] == drawn[4:]
        assert len(set(drawn)) == 4

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_stops_if_weights_are_not_finite_and_keeps_the_last_good_state(
            self, command, tmp_path, own_loss, bad):
        def bad_loss(*arguments, **more):
            return bad * gspo_loss(*arguments, **more)

        own_loss(at_call(5, gspo_loss, bad_loss))  # the first two are the trial
        line = refused(command, tmp_path / "a", "--minibatches", "1", "--save_steps", "1")
        assert "step 3: the loss or the weights are not finite" in line
        assert "--learning_rate" in line
        state = torch.load(tmp_path / "a" / "state.pt")
        assert len(state["rows"]) == 3
        assert all(weight.isfinite().all() for weight in state["model"].values())

    def test_multiplies_in_tf32_in_the_backward_alone(self, fresh):
        """Seen from the decoder, from the log-probs and from the gradients of all parameters.
        train() switches TF32 off, whatever it was."""
        model, _ = fresh
        matmul = torch.backends.cuda.matmul
        seen = {"forward": set(), "backward": set()}

        def response_log_probs(*arguments):
            log_probs = train_math.response_log_probs(*arguments)
            seen["forward"].add(matmul.allow_tf32)
            return log_probs

        model.get_decoder().register_forward_pre_hook(
            lambda *_: seen["forward"].add(matmul.allow_tf32))
        for parameter in model.parameters():
            parameter.register_hook(lambda _: seen["backward"].add(matmul.allow_tf32))
        matmul.allow_tf32 = True
        train(fresh, held_out=2, response_log_probs=response_log_probs, max_steps=2)
        assert seen == {"forward": {False}, "backward": {True}}
        with pytest.raises(KeyError), train_math.tf32_matmuls():
            raise KeyError("in the backward")
        assert not matmul.allow_tf32

    def test_writes_what_it_promises(self, whole):
        rows = read(whole / "metrics.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
        metrics = {
            "step", "reward", "response_length", "cut", "equal_reward_groups", "entropy",
            "sampler_gap", "loss", "grad_norm", "clip_fraction", "log_ratio_first_max",
            "log_ratio_mean", "log_ratio_std", "seconds", "seconds_rollout",
        }
        evaluation = {"eval_questions", "eval_reward", "eval_reward_interval"}
        evaluated = {name.removeprefix("eval_") for name in evaluation}
        assert metrics | evaluated | {"settings", "notes"} <= TAKEN, "a reward cannot log these"
        assert set(rows[0]) == {"step", "settings"} | evaluation
        for row in rows[1:]:
            assert set(row) - evaluation - {"notes"} == metrics, "no texts, for example"
            assert evaluation & set(row) == (evaluation if row["step"] % 2 == 0 else set())
            assert row["log_ratio_first_max"] == 0, "the first minibatch is on-policy"
            assert row["log_ratio_std"] > 0 and row["grad_norm"] > 0 and row["sampler_gap"] < 1e-5
        assert max(row["clip_fraction"] for row in rows[1:]) > 0
        names = {path.name for path in whole.iterdir()}
        evaluations = {f"eval_{step}.jsonl" for step in (0, 2, 4, 6)}
        assert names == {"metrics.jsonl", "model", "state.pt", "lock"} | evaluations
        model = transformers.AutoModelForCausalLM.from_pretrained(whole / "model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(whole / "model")
        assert len(tokenizer) == model.config.vocab_size and tokenizer.chat_template
        state = torch.load(whole / "state.pt")
        assert json.loads(json.dumps(state["rows"])) == rows
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, state["model"][name])


class TestEvaluation:
    def test_is_greedy_strict_and_by_the_last_number(self, fresh):
        """Of ten responses, 8 are correct by the last number and 6 in the form that is asked for.
        The intervals are from a table of Wilson's."""
        model, tokenizer = fresh
        asked = []
        texts = ["#### 7"] * 6 + ["it is 7", "#### x 7", "#### 8", "none"]
        responses = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]

        def generate(model, prompts, group_size, max_length, temperature, end_ids):
            asked.append((len(prompts), group_size, max_length, temperature))
            return responses, torch.zeros(10, max_length)

        questions = [{"question": f"{i}?", "answer": "3 + 4\n#### 7"} for i in range(10)]
        cfg = settings(max_completion_length=9)
        row = train_math.evaluate(*fresh, questions, cfg, generate=generate)
        assert asked == [(10, 1, 9, 0)], "one response each, temperature 0"
        assert row.pop("eval_reward_interval") == pytest.approx((0.3127, 0.8318), abs=1e-4)
        assert row.pop("eval_last_number_interval") == pytest.approx((0.4902, 0.9433), abs=1e-4)
        results = row.pop("eval_results")
        assert row == {"eval_questions": 10, "eval_reward": 0.6, "eval_last_number": 0.8,
                       "eval_best_constant": 1.0}
        for i, result in enumerate(results):
            assert result == {
                "question": f"{i}?", "gold": "7", "response": texts[i],
                "tokens": len(responses[i]), "reward": float(i < 6), "last_number": float(i < 8),
            }
        assert len(results) == 10
        train_math.evaluate(*fresh, questions, cfg, temperature=0.5, generate=generate)
        assert asked[1] == (10, 1, 9, 0.5)
        assert support.metrics.wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_of_several_responses_has_them_side_by_side_and_no_interval(self, tiny, temperature):
        def reward(prompts, completions, log_metric, **columns):
            log_metric("seen", len(prompts))
            return parity_reward(prompts, completions)

        row = train_math.evaluate(
            *tiny, sums(5), settings(), temperature, group_size=3, reward=reward)
        results = row["eval_results"]
        assert [result["question"] for result in results] == [
            question["question"] for question in sums(5) for _ in range(3)]
        assert row["eval_questions"] == 5 and row["eval_seen"] == 15
        assert row["eval_reward"] == sum(result["reward"] for result in results) / 15
        assert "eval_reward_interval" not in row
        texts = [result["response"] for result in results]
        groups = [len(set(texts[i:i + 3])) for i in range(0, 15, 3)]
        assert set(groups) == {1} if temperature == 0 else max(groups) == 3

    @pytest.mark.parametrize("fails", [False, True])
    def test_is_without_dropout_and_leaves_each_module_in_its_mode(self, fails):
        def reward(prompts, completions, **columns):
            return [sum(map(ord, text)) for text in completions]

        def sample(*arguments):
            assert not any(module.training for module in model.modules())
            if fails:
                raise OSError("no engine")
            return train_math.sample(*arguments)

        model, tokenizer = model_of("GPT-2")
        model.eval()
        expected = train_math.evaluate(model, tokenizer, sums(5), settings(), reward=reward)
        model.train()
        model.get_decoder().h[0].eval()
        modes = [module.training for module in model.modules()]
        with pytest.raises(OSError) if fails else contextlib.nullcontext():
            found = train_math.evaluate(
                model, tokenizer, sums(5), settings(), reward=reward, sample=sample)
            assert found == expected
        assert modes == [module.training for module in model.modules()] and len(set(modes)) == 2

    @pytest.mark.parametrize("change", [
        lambda rows: [{"question": "mine?", "answer": "1"}] * len(rows),
        lambda rows: rows[::-1],
        lambda rows: [rows[0]] * len(rows),
        lambda rows: [*rows[:-1], rows[-1] | {"question": "another?"}],
    ])
    def test_of_other_questions_than_those_asked_is_refused(self, fresh, change):
        def sample(model, tokenizer, questions, *others):
            return train_math.sample(model, tokenizer, change(questions), *others)

        for group_size in 1, 2:
            with pytest.raises(ValueError, match="answer the questions that it gets"):
                train_math.evaluate(
                    *fresh, sums(3), settings(), group_size=group_size, sample=sample)
        with pytest.raises(ValueError, match="answer the questions that it gets"):
            check(*fresh, sample=sample)

    @pytest.mark.parametrize("values, interval", [
        ([0, 1, 1], True), ([0.0, 0.5, 1.0], False), ([2, 2, 2], False), ([1, 1, 1], True)])
    def test_with_an_own_reward_has_an_interval_where_it_is_0_or_1(self, fresh, values, interval):
        questions = [{"question": "?", "level": i} for i in range(3)]
        levels = []

        def reward(prompts, completions, level, **columns):
            levels.extend(level)
            return values

        row = train_math.evaluate(*fresh, questions, settings(), reward=reward)
        assert row["eval_reward"] == pytest.approx(sum(values) / 3) and levels == [0, 1, 2]
        assert ("eval_reward_interval" in row) is interval and "eval_last_number" not in row
        assert [result["reward"] for result in row["eval_results"]] == values
        assert all(result["gold"] is None for result in row["eval_results"])

    @pytest.mark.parametrize("texts, words", [
        (["Delivery."] * 18, "100% of the responses in this evaluation are the same: 'delivery'"),
        (["a"] + ["Delivery.", "delivery\n", " DELIVERY"] * 6, "95% of the responses"),
        ([""] * 4, "100% of the responses in this evaluation are the same: ''"),
        (["a", "b"] + ["Delivery."] * 8, ""),
        (["a", "b"], ""), (["a"], ""), ([], ""),
    ])
    def test_notes_that_nearly_all_responses_are_one_text(self, texts, words):
        results = [{"response": text} for text in texts]
        found = support.metrics.notes([{"step": 0}], results).get("notes", [])
        assert len(found) == bool(words) and words in "".join(found)

    @pytest.mark.parametrize("answers, best", [
        (["login"] * 8 + ["billing"] * 6 + ["delivery"] * 4, 8 / 18), ([7, "7", 8], 2 / 3),
        (["#### 7", "3 + 4 = 7\n#### 7", "#### 8"], 2 / 3), ([None] * 9, None), (range(9), None),
        ([*range(30), 1, 1], None),
    ])
    def test_has_the_accuracy_of_the_best_constant_answer(self, fresh, answers, best):
        questions = [{"question": "?", "answer": answer} for answer in answers]
        row = train_math.evaluate(*fresh, questions, settings(), reward=parity_reward)
        assert row.get("eval_best_constant") == best


class TestOutcome:
    @pytest.mark.parametrize("before, after, words", [
        ([0, 0, 0, 1], [1, 1, 0, 1], "0.25 before and 0.75 after, a difference of +0.5, whose "
                                     "paired 95% CI +0.01 to +0.99 excludes 0: it has risen"),
        ([1, 1, 1, 1], [0, 0, 1, 0], "excludes 0: it has fallen"),
        ([0, 1, 0, 1], [1, 0, 0, 1], "includes 0, so no change is shown"),
        ([0.5, 0.5], [0.5, 0.5], "difference of +0, whose paired 95% CI +0 to +0 includes 0"),
        ([0.2, 0.4, 0.3], [0.6, 0.9, 0.8, 1.0], "0.3 before and 0.767 after"),
    ])
    def test_says_in_words_whether_a_change_is_shown(self, before, after, words):
        results = [[{"question": f"{i}?", "reward": value} for i, value in enumerate(values)]
                   for values in (before, after)]
        assert words in support.metrics.outcome(*results)
        results[0][0]["question"] = "another?"
        assert "cannot be compared" in support.metrics.outcome(*results)

    def test_has_the_interval_that_the_tools_compute(self):
        before, after = [0, 1, 0.5, 0, 1], [1, 1, 0.25, 1, 0]
        _, (low, high), _ = paired(before, after)
        results = [[{"question": "?", "reward": value} for value in values]
                   for values in (before, after)]
        assert f"{low:+.3g} to {high:+.3g} includes 0" in support.metrics.outcome(*results)

    def test_is_the_last_sentence_of_a_run(self, command, tmp_path, capsys):
        run(command, tmp_path)
        shown = capsys.readouterr().out
        assert "steps 0 and 6: " in shown and "whose paired 95% CI" in shown
        assert "The responses are in " in shown and "eval_6.jsonl" in shown
        assert shown.count("eval_reward is that of greedy ones to held-out questions, after") == 1
        run(command, tmp_path / "none", "--eval_size", "0")
        assert "whose paired" not in capsys.readouterr().out


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


KILLS = {  # what is called, which call of it, and what it does instead
    "in an update": (None, None, 15, Killed()),
    "in the log": (Path, "write_text", 6, dies_while_writing),
    "in the results of an evaluation": (Path, "write_text", 5, dies_while_writing),
    "in an evaluation": (train_math, "evaluate", 3, Killed()),
    "in the first save": (torch, "save", 1, dies_while_writing),
    "in a later save": (torch, "save", 3, dies_while_writing),
    "before the first save counts": (os, "replace", 1, Killed()),
    "before a later save counts": (os, "replace", 2, Killed()),
    "in the model at the end": (
        transformers.PreTrainedModel, "save_pretrained", 1, dies_while_writing),
}


OTHER_SIGNALS = [name for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
                 if hasattr(signal, name)]  # Windows has none of them


class TestResuming:
    @pytest.mark.parametrize("moment", [
        name if name == "before a later save counts" else pytest.param(name, marks=pytest.mark.slow)
        for name in KILLS])
    def test_after_a_kill_equals_a_run_never_killed(
            self, command, whole, tmp_path, monkeypatch, own_loss, moment):
        owner, name, call, instead = KILLS[moment]
        with monkeypatch.context() as patch:
            if owner:
                patch.setattr(owner, name, at_call(call, getattr(owner, name), instead))
            else:
                own_loss(at_call(call, gspo_loss, instead))
            with pytest.raises(Killed):
                run(command, tmp_path / "killed")
        own_loss(gspo_loss)
        run(command, tmp_path / "killed")
        assert_same(whole, tmp_path / "killed")

    @pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
    @pytest.mark.parametrize("signals", [
        [signal.SIGINT],
        [signal.SIGTERM],
        *([signal.Signals[name]] for name in OTHER_SIGNALS[:2]),
        *(pytest.param(several, marks=pytest.mark.slow) for several in [
            [signal.SIGTERM, signal.SIGINT],
            [signal.SIGTERM, signal.SIGTERM],
            *([signal.Signals[name]] for name in OTHER_SIGNALS[2:]),
            *([signal.Signals[name]] * 2 for name in OTHER_SIGNALS[:2]),
            *([signal.Signals[name], signal.SIGTERM] for name in OTHER_SIGNALS[:2]),
        ]),
    ])
    def test_after_a_signal_equals_a_run_never_stopped(
            self, command, whole, tmp_path, capsys, signals):
        """The signal comes in the middle of step 3 of 6. After one signal, the step is finished and
        saved. After two, the run ends at once if the second is SIGINT or SIGTERM. Afterwards, the
        earlier handlers are in place."""
        training = itertools.count(1)

        def reward(prompts, completions, **columns):
            if len(completions) == 16 and next(training) == 3:
                for each in signals:
                    os.kill(os.getpid(), each)
            return parity_reward(prompts, completions)

        own = signal.default_int_handler  # a program in the background ignores SIGINT
        before = {each: signal.signal(each, own) for each in (signal.SIGINT, signal.SIGTERM)}
        others = [signal.getsignal(signal.Signals[name]) for name in OTHER_SIGNALS]
        try:
            with pytest.raises(SystemExit) as stop:
                run(command, tmp_path / "a", reward=reward)
            assert all(signal.getsignal(each) is own for each in before)
            assert others == [signal.getsignal(signal.Signals[name]) for name in OTHER_SIGNALS]
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
        assert "This step will be finished and saved" in capsys.readouterr().out
        ends_at_once = signals[1:] and signals[1] in before
        if ends_at_once:
            assert "What was saved is intact" in stop.value.code
        else:
            assert stop.value.code == 128 + signals[0]
            assert (tmp_path / "a" / "model" / "model.safetensors").exists()
        rows = torch.load(tmp_path / "a" / "state.pt")["rows"]
        assert len(rows) == (3 if ends_at_once else 4)
        run(command, tmp_path / "a")
        assert_same(whole, tmp_path / "a")

    @pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
    @pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
    def test_leaves_signals_that_are_ignored_or_have_a_handler(self, command, tmp_path, handler):
        """nohup ignores SIGHUP."""
        def reward(prompts, completions, **columns):
            os.kill(os.getpid(), signal.SIGHUP)
            return parity_reward(prompts, completions)

        before = signal.signal(signal.SIGHUP, handler)
        try:
            assert len(run(command, tmp_path / "a", reward=reward)) == 7
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

    @pytest.mark.parametrize("name", ["thesis.txt", "model"])
    def test_refuses_a_folder_that_holds_something_else(self, command, tmp_path, name):
        (tmp_path / name).write_text("mine")
        assert "not empty" in refused(command, tmp_path)
        assert names_in(tmp_path) == {name}
        assert (tmp_path / name).read_text() == "mine"

    def test_refuses_a_second_process_and_gives_the_lock_back(self, command, fresh, tmp_path):
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


ABOVE_0 = ("rollout_rows", "prompts_per_step", "max_steps", "save_steps", "micro_batch_tokens",
           "epochs", "minibatches", "max_completion_length", "temperature", "eps_low", "eps_high")


class TestCommandLine:
    @pytest.mark.parametrize("flags, word", [
        *((f"--{name} 0", f"--{name} 0") for name in ABOVE_0),
        ("--group_size 1", "--group_size 1"),
        ("--group_siz 4", "there is no flag --group_siz; see --group_size"),
        ("--learningrate=1", "there is no flag --learningrate=1; see --learning_rate"),
        ("--zzz 4", "there is no flag --zzz; see --help"),
        ("--prompts_per_step 6", "--minibatches"),
        ("--learning_rate nan", "nan"),
        ("--learning_rate -1", "--learning_rate"),
        ("--eps_low 1.5", "eps_low 1.5"),
        ("--eps_low 0.9997", "0.9997"),
        ("--eps_high inf", "--eps_high"),
        ("--eval_size -1", "--eval_size"),
        ("--seed -1", "--seed"),
        ("--seed 99999999999999999", "--seed"),
        ("stray", "stray"),
    ])
    def test_refuses_what_is_wrong_in_one_line(self, flags, word):
        line = one_line(train_math.main, *flags.split())
        assert line.startswith("train_math.py: settings: ") and word in line

    @pytest.mark.parametrize("flags, expected", [
        ("", (3e-4, 4e-4)),
        ("--algorithm gspo_token", (3e-4, 4e-4)),
        ("--algorithm grpo", (0.2, 0.27)),
        ("--eps_low 0.1", (0.1, 4e-4)),
        ("--algorithm grpo --eps_high 0.1", (0.2, 0.1)),
        ("--eps_low 1 --eps_high 1e9", (1, 1e9)),
    ])
    def test_gives_each_algorithm_its_own_clip_range(self, flags, expected):
        cfg = train_math.parse_settings(flags.split())
        assert cfg.clip_range() == expected
        if cfg.eps_low is cfg.eps_high is None:
            assert dataclasses.replace(cfg, algorithm="gspo").clip_range() == (3e-4, 4e-4)

    def test_has_these_defaults(self):
        """A changed default is a change for everybody who repeats a run without flags."""
        settings = vars(train_math.Settings(device="cpu"))
        assert settings["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
        assert settings["dataset"] == "openai/gsm8k"
        numbers = {k: v for k, v in settings.items() if not isinstance(v, str)}
        assert numbers == {
            "seed": 0, "system": None, "eps_low": None, "eps_high": None, "group_size": 8,
            "prompts_per_step": 32, "minibatches": 4, "epochs": 1, "learning_rate": 1e-6,
            "max_steps": 200, "temperature": 1.0, "max_completion_length": 512,
            "micro_batch_tokens": 1024, "rollout_rows": 256, "save_steps": 25, "eval_steps": None,
            "eval_size": 512,
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

    @pytest.mark.parametrize("program, name", [
        ("home/my_task.py", "my_task.py"), ("lesson/tiny.py", "tiny.py"), ("", "train_math.py")])
    @pytest.mark.parametrize("error, said", [
        (ValueError("the file is empty"), "the file is empty"),
        (ValueError("two\n  lines"), "two lines"), (KeyError("name"), "KeyError('name')"),
        (ConnectionError("Couldn't connect"), "Couldn't connect. Without a network"),
        (RuntimeError(), "RuntimeError()"),
    ])
    def test_begins_a_message_with_the_program_and_shows_a_sentence_as_it_is(
            self, monkeypatch, program, name, error, said):
        monkeypatch.setattr(sys, "argv", [program])
        with pytest.raises(SystemExit) as stop:
            with train_math.exits_with("the data"):
                raise error
        assert stop.value.code.startswith(f"{name}: the data: {said}")

    def test_helps(self, capsys):
        with pytest.raises(SystemExit) as stop:
            train_math.main(["--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert not stop.value.code
        for word in "[--flag value ...]", "(default: runs/math)", *train_math.ALGORITHMS:
            assert word in said

    def test_shows_the_traceback_of_a_mistake_in_a_part_and_can_be_called_again(
            self, command, whole, tmp_path, own_loss):
        """Between two updates of step 4. Step 3 is not saved."""
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        own_loss(at_call(12, gspo_loss, RuntimeError("shapes do not fit")))
        with pytest.raises(RuntimeError, match="shapes"):
            run(command, tmp_path / "a")
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
        run(command, tmp_path / "a")
        assert_same(whole, tmp_path / "a")
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers

    def test_works_outside_of_the_main_thread(self, command, whole, tmp_path):
        """There, Python does not allow signal handlers."""
        with ThreadPoolExecutor() as threads:
            threads.submit(run, command, tmp_path / "a").result()
        assert_same(whole, tmp_path / "a")

    def test_rewards_correct_numbers_if_no_reward_is_given(self, command, tmp_path, capsys):
        """The answers to each question agree with the log."""
        train_math.main([*command, "--output_dir", str(tmp_path / "a"), "--max_steps", "3"])
        log = read(tmp_path / "a" / "metrics.jsonl")
        assert log[0]["eval_reward"] == log[1]["reward"] == 0
        shown = capsys.readouterr().out
        for word in ("26 questions and 4 held-out ones", "step 1/3", "103,488 parameters",
                     "eval_reward 0  (95% CI 0 to 0.49)", "a complete prompt: 'has 0 figs?"):
            assert word in shown
        lines = [line for line in shown.split("\n") if "? -> '" in line]
        assert len(lines) == 6, "two after each evaluation"
        for step in 0, 2, 3:
            rows = read(tmp_path / "a" / f"eval_{step}.jsonl")
            assert [row["gold"] for row in rows] == ["12", "13", "24", "27"]
            for name in "reward", "last_number":
                assert log[step][f"eval_{name}"] == sum(row[name] for row in rows) / 4


def doubled(forward, inputs):
    out = forward(**inputs)
    out.logits = out.logits * 2
    return out


def forgetful(forward, inputs):
    return forward(**inputs | {"cache": transformers.DynamicCache()})


def blind_to_padding(forward, inputs):
    return forward(**inputs | {"attention_mask": None, "position_ids": None})


class TestModels:
    def test_are_loaded_in_float32_and_switch_tf32_off(self, world):
        torch.set_float32_matmul_precision("high")
        model, _ = train_math.load(world / "model", "cpu")
        assert torch.get_float32_matmul_precision() == "highest" and not model.training
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    @pytest.mark.parametrize("questions", [QUESTIONS, QUESTIONS[::-1], QUESTIONS[:1]])
    def test_that_work_pass_the_check(self, fresh, questions):
        check(*fresh, questions, settings(instruction=""))

    @pytest.mark.parametrize("fault", [doubled, forgetful, blind_to_padding])
    @pytest.mark.parametrize("questions", [QUESTIONS, QUESTIONS[::-1]])
    def test_whose_cache_padding_or_head_misbehaves_are_refused(self, tiny, fault, questions):
        model, tokenizer = tiny
        forward = model.forward
        model.forward = lambda **inputs: fault(forward, inputs)
        torch.manual_seed(0)
        with pytest.raises(ValueError, match="log-probs of eight sampled tokens differ"):
            check(model, tokenizer, questions)

    @pytest.mark.parametrize("fault, words", [
        ("no pair by one token", "not a pair"),
        ("no end", "an end token"),
        ("nan", "differ by nan"),
    ])
    def test_that_do_not_fit_end_in_one_line_before_any_step(
            self, command, fresh, tmp_path, fault, words):
        model, tokenizer = fresh
        if fault == "no pair by one token":
            questions, _ = load_questions(command[3])
            prompts = train_math.encode_prompts(tokenizer, questions, settings())
            model.resize_token_embeddings(max(map(max, prompts)))
        elif fault == "no end":
            tokenizer.eos_token = model.generation_config.eos_token_id = None
        else:
            model.lm_head.weight.data[5] = math.nan
        line = refused(command, tmp_path / "a", load=lambda *_: fresh)
        assert line.startswith(f"train_math.py: a trial of {command[1]} and the parts: ")
        assert words in line
        assert names_in(tmp_path / "a") == {"lock"}

    @pytest.mark.parametrize("config, name, value", [
        (transformers.Gemma2Config, "final_logit_softcapping", 30.0),
        (transformers.GraniteConfig, "logits_scaling", 8.0),
        (transformers.CohereConfig, "logit_scale", 0.5),
    ])
    def test_that_change_their_logits_are_refused_by_their_config(self, fresh, config, name, value):
        """With small logits, a cap has no effect on the texts of the check, but it has later."""
        assert hasattr(config(), name)
        for harmless in None, 1.0:
            setattr(fresh[0].config, name, harmless)
            check(*fresh)
        setattr(fresh[0].config, name, value)
        with pytest.raises(ValueError, match=name):
            check(*fresh)

    def test_are_trained_without_dropout(self):
        """Dropout would give the same tokens other log-probs in each forward."""
        model, tokenizer = model_of("GPT-2")
        model.train()
        rows = train((model, tokenizer), max_steps=2)
        assert not model.training
        assert all(row["log_ratio_first_max"] == 0 for row in rows[1:])

    def test_keep_their_weights_at_a_learning_rate_of_0(self, command, world, tmp_path):
        rows = run(command, tmp_path / "a", "--learning_rate", "0", "--epochs", "2")
        for row in rows[1:]:
            assert row["log_ratio_first_max"] == row["log_ratio_mean"] == row["log_ratio_std"] == 0
            assert row["grad_norm"] > 0
        weights = [Path(folder, "model", "model.safetensors").read_bytes()
                   for folder in (world, tmp_path / "a")]
        assert weights[0] == weights[1]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_with_frozen_weights_in_half_precision_are_refused_for_their_precision(
            self, tiny, dtype):
        """As with a LoRA adapter in float32 over such weights."""
        model, tokenizer = tiny
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.data = parameter.data.to(dtype)
                parameter.requires_grad_(False)
        with torch.autocast("cpu", dtype), pytest.raises(ValueError) as refusal:
            check(model, tokenizer)
        assert f"Weights in {dtype} round too much: load the model in float32" in str(refusal.value)

    def test_in_half_precision_are_refused_with_the_remedy(self, fresh):
        model, _ = fresh
        model.bfloat16()
        with pytest.raises(ValueError, match="bfloat16.*float32"):
            train(fresh)
        model.float()
        model.frozen = torch.nn.Parameter(torch.ones(1).bfloat16(), requires_grad=False)
        train(fresh, max_steps=1)
