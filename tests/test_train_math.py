"""train_math.py: the updates of a step, evaluation, models, and functions of the user's own.

Sampling is tested in test_rollout, what a run writes in test_runs, and what is refused in
test_bad_inputs. The specification of the maths is test_gspo.py.
"""

import contextlib
import copy
import itertools
import math
import re
import statistics

import datasets
import pytest
import torch

import gspo
import train_math
from gspo import group_advantages
from support.task import Refused
from test_gspo import RANGE, example
from tests.conftest import (
    QUESTIONS,
    block,
    constant_reward,
    encoded,
    names_in,
    parity_reward,
    rollout_of,
    settings,
    spy,
    sums,
    train,
    weights_of,
)
from tools.logs import read
from tools.warm_up import tiny_model, tiny_tokenizer


def log_probs_of(model, prompt, response):
    """Those of one response, at the temperature 0.8."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1]
    return (logits / 0.8).log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]


class TestTraining:
    @pytest.mark.parametrize("algorithm", train_math.ALGORITHMS)
    def test_makes_the_updates_that_the_paper_says(self, tiny, algorithm):
        """They are repeated with a loss that is written out for one response after the other. There
        are two epochs of two minibatches, and in one group all rewards are equal."""
        model, _ = tiny
        model.generation_config.eos_token_id = list(range(20))  # lengths differ
        mine = copy.deepcopy(model)
        start = weights_of(model)
        calls = []
        rewards = [0.5] * 4 + [i % 3 for i in range(12)]
        _, row = train(
            tiny, 4, reward=lambda **columns: rewards, sample=spy(train_math.sample, calls),
            algorithm=algorithm, minibatches=2, epochs=2, max_steps=1, temperature=0.8,
            eps_low=0.01, eps_high=0.03, micro_batch_tokens=60, learning_rate=0.1,
            make_optimizer=lambda model: torch.optim.SGD(model.parameters()))
        ((_, _, rollout),) = calls
        texts = list(zip(rollout.prompts, rollout.responses))
        advantages = group_advantages(torch.tensor(rewards), 4)
        old = [log_probs_of(mine, *text).detach() for text in texts]
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        losses, norms = [], []
        clipped = []  # whether each token with a gradient is clipped in each epoch
        later = []  # log s after the first update
        for number, half in enumerate([range(8), range(8, 16)] * 2):
            loss = 0
            for i in half:
                log_ratio = log_probs_of(mine, *texts[i]) - old[i]
                ratio = (log_ratio if algorithm == "grpo" else log_ratio.mean()).exp()
                unclipped = ratio * advantages[i]
                objective = torch.minimum(unclipped, ratio.clamp(0.99, 1.03) * advantages[i])
                loss = loss - objective.mean() / 8
                if advantages[i] != 0:
                    clipped += (objective < unclipped).expand(len(old[i])).tolist()
                    later += [log_ratio.mean().item()] * (number > 0)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(mine.parameters(), 1.0).item())
            optimizer.step()
        moved = weights_of(mine) - start
        assert (weights_of(model) - start - moved).norm() < 1e-3 * moved.norm()
        assert max(norms) > 1.1, "so that it is clipped to 1"
        lengths = [len(response) for response in rollout.responses]
        expected = {
            "loss": sum(losses) / 4,
            "grad_norm": sum(norms) / 4,
            "clip_fraction": sum(clipped) / len(clipped),
            "log_ratio_first_max": 0,
            "log_ratio_mean": statistics.mean(later),
            "log_ratio_std": statistics.stdev(later),
            "reward": sum(rewards) / 16,
            "equal_reward_groups": 0.25,
            "response_length": sum(lengths) / 16,
            "cut": lengths.count(6) / 16,
            "entropy": -sum(each.sum().item() for each in old) / sum(lengths),
            "sampler_gap": 0,
        }
        found = {name: row[name] for name in expected}
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert 0 < row["clip_fraction"] < 1 and 0 < row["cut"] < 1
        assert row["seconds"] > row["seconds_rollout"] > 0

    def test_is_by_default_with_this_optimizer(self, model):
        optimizer = train_math.Parts().make_optimizer(model)
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.defaults["betas"] == (0.9, 0.95)
        assert optimizer.defaults["weight_decay"] == 0
        assert optimizer.param_groups[0]["params"] == list(model.parameters())

    def test_keeps_the_weights_if_the_learning_rate_is_0_or_all_rewards_are_equal(self, fresh):
        """In the first run, only step 1 has a gradient. A note follows three steps without any."""
        def reward(step, **columns):
            return (parity_reward if step == 1 else constant_reward)(**columns)

        before = weights_of(fresh[0])
        rows = train(fresh, learning_rate=0, epochs=2, reward=reward)
        metrics = [rows[1][f"log_ratio_{name}"] for name in ("first_max", "mean", "std")]
        assert metrics == [0, 0, 0] and rows[1]["grad_norm"] > 0
        assert [row["step"] for row in rows if "no gradient in three" in str(row)] == [4, 5, 6]
        for row in train(fresh, reward=constant_reward, max_steps=2)[1:]:
            assert row["equal_reward_groups"] == 1
            assert row["log_ratio_first_max"] is row["sampler_gap"] is None
        assert torch.equal(before, weights_of(fresh[0]))

    def test_asks_all_questions_before_any_twice_and_draws_other_responses_each_time(self, fresh):
        """The questions may be a dataset of the library."""
        def asked_and_drawn(questions, seed):
            calls = []
            train(fresh, questions, reward=spy(constant_reward, calls), max_steps=5, seed=seed)
            asked = [each for _, given, _ in calls for each in given["prompts"][::4]]
            return asked, [tuple(given["completions"]) for _, given, _ in calls]

        rows = [{"question": str(i)} for i in range(10)]
        first, drawn = asked_and_drawn(rows, 0)
        assert sorted(first[:10]) == sorted(first[10:]) == [str(i) for i in range(10)]
        assert first[:10] != first[10:]
        assert asked_and_drawn(datasets.Dataset.from_list(rows), 0) == (first, drawn)
        assert asked_and_drawn(rows, 1)[0] != first
        same = [asked_and_drawn(QUESTIONS[:1] * 4, seed)[1] for seed in (0, 1)]
        assert len(set(sum(same, []))) == 10, "two steps drew the same responses"

    def test_gives_all_groups_of_an_optimizer_the_learning_rate(self, fresh):
        """The rate begins at learning_rate and falls to a tenth of it in the last step."""
        first, *others = fresh[0].parameters()
        optimizer = torch.optim.SGD([{"params": [first]}, {"params": others}])
        rates = []
        optimizer.register_step_pre_hook(
            lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        rows = train(fresh, max_steps=3, minibatches=1, make_optimizer=lambda model: optimizer)
        assert rows[1]["log_ratio_mean"] is rows[1]["log_ratio_std"] is None, "all s are 1"
        assert rates == [pytest.approx([rate] * 2) for rate in (1e-3, 0.55e-3, 1e-4)]

    def test_multiplies_in_tf32_in_the_backward_alone(self, fresh):
        model, _ = fresh
        matmul = torch.backends.cuda.matmul
        forward = set()
        backward = set()
        model.get_decoder().register_forward_hook(lambda *_: forward.add(matmul.allow_tf32))
        for parameter in model.parameters():
            parameter.register_hook(lambda _: backward.add(matmul.allow_tf32))
        matmul.allow_tf32 = True
        train(fresh, held_out=2, max_steps=2)
        assert forward == {False} and backward == {True}
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
        evaluated = {"questions", "reward", "reward_interval", "best_constant"}
        evaluation = {f"eval_{name}" for name in evaluated}
        assert set(rows[0]) - {"notes"} == {"step", "settings"} | evaluation
        for row in rows[1:]:
            assert set(row) - evaluation - {"notes"} == metrics, "no texts, for example"
            assert evaluation & set(row) == (evaluation if row["step"] % 2 == 0 else set())
        assert max(row["clip_fraction"] for row in rows[1:]) > 0, "the run learns"
        evaluations = {f"eval_{step}.jsonl" for step in (0, 2, 4, 6)}
        assert names_in(whole) == {"metrics.jsonl", "model", "state.pt", "lock"} | evaluations
        model, tokenizer = train_math.load(whole / "model", "cpu")
        assert len(tokenizer) == model.config.vocab_size and tokenizer.chat_template
        state = torch.load(whole / "state.pt")
        assert state["rows"] == rows
        torch.testing.assert_close(model.state_dict(), state["model"], rtol=0, atol=0)


class TestEvaluation:
    @pytest.mark.parametrize("mode", [True, False])
    def test_is_greedy_strict_without_dropout_and_by_the_last_number(self, fresh, mode):
        """Of ten responses, 8 are correct by the last number and 6 in the form that is asked for.
        The intervals are from a table of Wilson's."""
        model, tokenizer = fresh
        model.train(mode)
        asked = []
        texts = ["#### 7"] * 6 + ["it is 7", "#### 7 or 7", "#### 8", "none"]
        responses = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]

        def generate(model, prompts, group_size, max_length, temperature, end_ids):
            assert not any(module.training for module in model.modules()), "dropout"
            asked.append((len(prompts), group_size, max_length, temperature))
            return responses, torch.zeros(10, max_length)

        questions = [{"question": f"{i}?", "answer": "3 + 4\n#### 7"} for i in range(10)]
        cfg = settings(max_completion_length=9)
        row = train_math.evaluate(*fresh, questions, cfg, generate=generate)
        assert asked == [(10, 1, 9, 0)], "one response each, and greedy by default"
        assert row.pop("eval_reward_interval") == pytest.approx((0.3127, 0.8318), abs=1e-4)
        assert row.pop("eval_last_number_interval") == pytest.approx((0.4902, 0.9433), abs=1e-4)
        assert row.pop("eval_results") == [
            {"question": f"{i}?", "gold": "7", "response": texts[i], "tokens": len(responses[i]),
             "reward": float(i < 6), "last_number": float(i < 8)} for i in range(10)]
        assert row == {"eval_questions": 10, "eval_reward": 0.6, "eval_last_number": 0.8,
                       "eval_best_constant": 1.0}

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_of_several_responses_has_them_side_by_side_and_no_interval(self, tiny, temperature):
        def reward(prompts, completions, log_metric, **columns):
            log_metric("seen", len(prompts))
            return parity_reward(prompts, completions)

        row = train_math.evaluate(
            *tiny, sums(5), settings(), temperature, group_size=3, reward=reward)
        results = row["eval_results"]
        assert row["eval_questions"] == 5 and row["eval_seen"] == 15
        assert row["eval_reward"] == sum(result["reward"] for result in results) / 15
        assert "eval_reward_interval" not in row
        texts = [result["response"] for result in results]
        groups = [len(set(texts[i:i + 3])) for i in range(0, 15, 3)]
        assert max(groups) == (1 if temperature == 0 else 3)

    @pytest.mark.parametrize("values, interval", [
        ([0, 1, 1], True), ([0.0, 0.5, 1.0], False), ([2, 2, 2], False), ([1, 1, 1], True)])
    def test_with_an_own_reward_has_an_interval_where_it_is_0_or_1(self, fresh, values, interval):
        def reward(level, **columns):
            return [values[i] for i in level]

        questions = [{"question": "?", "level": i} for i in range(3)]
        row = train_math.evaluate(*fresh, questions, settings(), reward=reward)
        assert row["eval_reward"] == pytest.approx(sum(values) / 3)
        assert ("eval_reward_interval" in row) is interval and "eval_last_number" not in row
        assert [result["reward"] for result in row["eval_results"]] == values
        assert all(result["gold"] is None for result in row["eval_results"])

    @pytest.mark.parametrize("answers, best", [
        (["login"] * 8 + ["billing"] * 6 + ["delivery"] * 4, 8 / 18), ([7, "7", 8], 2 / 3),
        ([None] * 9, None), (range(9), 1 / 9),
    ])
    def test_has_the_accuracy_of_the_best_constant_answer(self, fresh, answers, best):
        questions = [{"question": "?", "answer": answer} for answer in answers]
        row = train_math.evaluate(*fresh, questions, settings(), reward=parity_reward)
        assert row.get("eval_best_constant") == best
        assert [result["gold"] for result in row["eval_results"]] == [*answers]

    def test_compares_numbers_with_the_default_reward(self, fresh):
        questions = [{"question": "?", "answer": answer} for answer in ("#### 7", "7.0", "$8")]
        row = train_math.evaluate(*fresh, questions, settings())
        assert row["eval_best_constant"] == 2 / 3
        assert [result["gold"] for result in row["eval_results"]] == ["7", "7", "8"]


def test_a_model_is_loaded_in_float32(fresh, tmp_path):
    model, tokenizer = fresh
    model.half().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = train_math.load(str(tmp_path), "cpu")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_model_in_half_precision_is_refused(fresh):
    """Its updates would round to nothing, and nothing else would show it."""
    fresh[0].bfloat16()
    with pytest.raises(ValueError, match="is in torch.bfloat16. Load all weights in float32"):
        train(fresh, max_steps=1)


def test_a_model_whose_sampling_and_update_differ_gives_a_note(tiny):
    """Models that cap their logits, that ignore padding or the cache, and so on."""
    model, _ = tiny
    head = copy.deepcopy(model.lm_head)
    head.weight.data *= 2
    model.get_output_embeddings = lambda: head
    _, row = train(tiny, max_steps=1)
    assert row["sampler_gap"] > 0.1 and "sampler_gap is above 0.1" in row["notes"][0]


class TestTheTrial:
    def trial(self, fresh, questions=8, **parts):
        parts = train_math.Parts(reward=parity_reward, **parts)
        train_math.trial(*fresh, sums(questions), settings(), parts)

    def test_changes_no_weights_and_calls_each_part(self, fresh, own_loss, monkeypatch):
        """The gradients are not 0, although a constant reward gives all advantages 0."""
        before = weights_of(fresh[0])
        rows = []
        monkeypatch.setattr(train_math, "train_step", spy(train_math.train_step, rows))
        own = vars(train_math.Parts())
        calls = {name: [] for name in own if name != "load"}
        parts = {name: spy(own[name], calls[name]) for name in calls}
        parts["reward"] = spy(constant_reward, calls["reward"])
        fresh[0].train()
        train_math.trial(*fresh, sums(1), settings(), train_math.Parts(**parts))
        assert all(calls.values()) and rows[0][2]["grad_norm"] > 0
        assert torch.equal(weights_of(fresh[0]), before) and not fresh[0].training
        assert all(parameter.grad is None for parameter in fresh[0].parameters())

    @pytest.mark.parametrize("is_own", [False, True])
    def test_refuses_a_sampler_that_disagrees(self, fresh, is_own):
        """The sampler uses other logits. A sampler of the user's may round by more."""
        own = {"generate": lambda *arguments: train_math.generate(*arguments)} if is_own else {}
        model, _ = fresh
        for scale, is_refused in (1.001, False), (1.7, not is_own), (50, True):
            head = copy.deepcopy(model.lm_head)
            head.weight.data *= scale
            model.get_output_embeddings = lambda: head  # noqa: B023
            with pytest.raises(Refused, match="sampler and training disagree") if is_refused else (
                    contextlib.nullcontext()):
                self.trial(fresh, **own)

    @pytest.mark.parametrize("most, tokens", [(4, 450), (3, 225), (1, 112), (0, None)])
    def test_halves_the_micro_batches_until_they_fit_into_the_memory_of_a_gpu(
            self, tiny, pretend_cuda, most, tokens):
        """`most` responses of full length fit. All but these are short."""
        sizes = []

        def response_log_probs(model, batch, temperature):
            if batch.ids.shape[1] > 80:
                sizes.append(tuple(batch.ids.shape))
                if len(batch.ids) > most:
                    raise torch.OutOfMemoryError
            return train_math.response_log_probs(model, batch, temperature)

        cfg = settings(max_completion_length=80, micro_batch_tokens=450)
        parts = train_math.Parts(reward=parity_reward, response_log_probs=response_log_probs)
        if tokens:
            train_math.trial(*tiny, sums(8), cfg, parts)
            assert cfg.micro_batch_tokens == tokens
        else:
            with pytest.raises(Refused, match="one response .* a lower --max_completion_length"):
                train_math.trial(*tiny, sums(8), cfg, parts)
        longest = max(map(len, encoded(tiny[1], sums(8))))
        assert sizes[0] == (4, longest + 80)
        assert all(parameter.grad is None for parameter in tiny[0].parameters())


class TestAReward:
    @pytest.mark.parametrize("returned", [
        (1, 2.5), torch.tensor([1, 2.5]), torch.tensor([1, 2.5]).numpy(), map(float, (1, 2.5))])
    def test_gets_all_columns_and_may_return_any_sequence_of_numbers(self, returned):
        def reward(log_metric, **given):
            log_metric("mine", 3)
            given["completions"].clear()  # what is stored does not change
            assert given == {
                "question": ["1+1?", "1+2?"], "prompts": ["1+1?", "1+2?"],
                "completions": [], "tags": [[1], [2]],
                "completion_ids": [[3], [4, 5]], "cut": [False, True], "step": 7}
            return returned

        rollout = rollout_of([[1], [2]], [[3], [4, 5]])
        rollout.questions = [{"question": "1+1?", "tags": [1]}, {"question": "1+2?", "tags": [2]}]
        rollout.texts = ["x", "y"]
        cfg = settings(max_completion_length=2)
        rewards, metrics = train_math.score(reward, rollout, cfg, step=7)
        assert rewards.tolist() == [1, 2.5] and rewards.dtype == torch.float32
        assert metrics == {"mine": 3} and rollout.texts == ["x", "y"]

    def test_that_is_not_a_finite_number_for_each_completion_is_refused(self, fresh):
        for returned in [1.0] * 3, [1.0] * 15 + [math.nan], [math.inf] * 16:
            with pytest.raises(Refused, match="a list of 16 finite numbers is needed"):
                train(fresh, reward=lambda **columns: returned)  # noqa: B023
        with pytest.raises(TypeError, match="number, not 'NoneType'"):
            train(fresh, reward=lambda completions, **columns: [None] * 16)

    def test_gets_the_step_0_in_the_trial_and_none_in_evaluations(self, command, tmp_path):
        calls = []
        reward = spy(parity_reward, calls)
        train_math.main([*command, "--output_dir", str(tmp_path), "--max_steps", "2"], reward)
        assert [given["step"] for _, given, _ in calls] == [0, None, 1, 2, None]

    def test_may_keep_log_metric_for_a_loss_until_the_step_ends(self, fresh, own_loss):
        def loss(*arguments):
            calls[0][1]["log_metric"]("mine", 5)
            return gspo.gspo_loss(*arguments)

        calls = []
        own_loss(loss)
        _, row = train(fresh, reward=spy(parity_reward, calls), max_steps=1)
        assert row["mine"] == 5


class TestAPart:
    """What a part of the user gets, may change, and may add on the way to the update."""

    def test_may_bring_old_log_probs_which_are_no_mistake(self, fresh):
        def build_minibatches(rollout, advantages, cfg):
            minibatches = train_math.build_minibatches(rollout, advantages, cfg)
            for batch in itertools.chain(*minibatches):
                batch.old_log_probs = batch.sampler_log_probs + 0.5 * batch.mask
            return minibatches

        _, row = train(fresh, 4, build_minibatches=build_minibatches, max_steps=1)
        assert row["sampler_gap"] == pytest.approx(0.5) and row["log_ratio_mean"] < -0.3
        assert row["log_ratio_first_max"] is None
        (note,) = row["notes"]
        assert "sampler_gap is above 0.1" in note

    def test_that_gives_other_log_probs_in_the_update_than_before_it_causes_a_note(self, fresh):
        def response_log_probs(model, batch, temperature):
            log_probs = train_math.response_log_probs(model, batch, temperature)
            return log_probs - 0.2 * batch.mask * torch.is_grad_enabled()

        _, row = train(fresh, 4, response_log_probs=response_log_probs, max_steps=1)
        assert row["log_ratio_first_max"] == pytest.approx(0.2)
        (note,) = row["notes"]
        assert "log_ratio_first_max is not 0" in note


LOSSES = pytest.mark.parametrize("loss", [gspo.gspo_loss, gspo.gspo_token_loss, gspo.grpo_loss])


class TestTheMathsBesidesItsSpecification:
    @LOSSES
    @pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float32])
    def test_reads_the_values_of_a_mask_only_on_the_cpu(self, loss, kind):
        """Tensors on the meta device have no values, so reading one raises an error. On a GPU,
        reading one would make the CPU wait."""
        log_probs = torch.zeros(4, 5, device="meta", requires_grad=True)
        advantages = torch.zeros(4, device="meta")
        mask = torch.ones(4, 5, dtype=kind, device="meta")
        loss(log_probs, log_probs, advantages, mask, denominator=4).backward()
        gspo.clip_fraction(log_probs, advantages, mask, *RANGE)

    @LOSSES
    def test_allows_what_is_unusual(self, loss):
        for eps_high in 1.0, 1.2:  # distances from 1, although they could be bounds
            gspo.clipped_objective(torch.ones(2), torch.ones(2), 0.2, eps_high)
        none = torch.zeros(0, 3)
        assert loss(none, none, torch.zeros(0), none, denominator=4) == 0
        advantages = group_advantages(torch.tensor([0.1, 0.1, 0.0, 1.0]), 2, std_eps=0)
        assert advantages[:2].tolist() == [0, 0] and advantages.isfinite().all()

    @LOSSES
    @pytest.mark.parametrize("old", [-60.0, -95.0, -1e4, -1e9, -3e38, -torch.inf])
    def test_has_the_gradient_0_where_the_clip_is_active_although_the_ratio_overflows(
            self, loss, old):
        """exp(88.8) is infinite in float32. With A < 0, the clip is not active."""
        old = torch.full((2, 3), old)
        new = torch.zeros((2, 3), requires_grad=True)
        loss(new, old, torch.tensor([1.0, -1.0]), torch.ones(2, 3)).backward()
        assert new.grad[0].tolist() == [0, 0, 0]
        assert new.grad[1].isfinite().all() and (new.grad[1] > 1e20).all()

    @LOSSES
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("new, old, expected", [
        (-torch.inf, -1, "finite"), (-torch.inf, -torch.inf, 0.5), (torch.nan, -1, None),
        (-1, torch.nan, None)])
    def test_stays_finite_if_a_token_has_the_probability_0_but_not_if_it_is_nan(
            self, loss, dtype, new, old, expected):
        """The token has A = 1 and then A = -2. If neither policy can sample it, its ratio is 1."""
        log_probs = torch.full((2, 3), -1.0, dtype=dtype)
        old_log_probs = log_probs.clone()
        log_probs[:, 1] = new
        old_log_probs[:, 1] = old
        log_probs.requires_grad_()
        value = loss(log_probs, old_log_probs, torch.tensor([1.0, -2.0]), torch.ones(2, 3))
        value.backward()
        assert value.isnan() == (expected is None)
        if expected:
            assert log_probs.grad.isfinite().all() and (log_probs.grad[:, 1] == 0).all()
            assert expected in ("finite", value)

    def test_gives_an_id_outside_the_vocabulary_no_log_prob(self):
        """Padding often has the id -100 or -1. The mask hides its NaN."""
        logits = torch.zeros(1, 6, 4, requires_grad=True)
        log_probs = gspo.token_log_probs(logits, torch.tensor([[0, 3, -100, -1, 4, 2 ** 40]]))
        assert log_probs[:, 2:].isnan().all()
        mask = torch.tensor([[1, 1, 0, 0, 0, 0]])
        loss = gspo.gspo_loss(log_probs, log_probs.detach(), torch.tensor([1.0]), mask)
        loss.backward()
        assert loss == -1
        assert logits.grad[:, :2].abs().sum() > 0 and (logits.grad[:, 2:] == 0).all()

    def test_makes_the_updates_of_gspo_in_the_loop_on_the_page(self):
        """With one minibatch, all ratios are 1: the gradient is that of the mean over the responses
        of the advantage times the mean log-prob. With several, later minibatches can be clipped."""
        names = {}
        exec(block("guides/paste.md", "import torch\nfrom gspo import group_advantages"), names)
        model = tiny_model(tiny_tokenizer(), seed=0)
        ids = torch.randint(5, 20, (8, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.arange(8) >= torch.tensor([1, 4, 6, 2, 3, 6, 1, 5])[:, None]
        rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1])
        other = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        names["update"](model, optimizer, ids, mask, rewards, 4, minibatches=1)
        log_probs = gspo.token_log_probs(other(ids).logits[:, :-1], ids[:, 1:])
        mean = (log_probs * mask).sum(1) / mask.sum(1)
        (-(group_advantages(rewards, 4) * mean).mean()).backward()
        assert torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0) > 1.1, "the loop clips it"
        for moved, start in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(start - moved, start.grad, atol=1e-5, rtol=1e-3)

        steps = []
        optimizer.step = lambda: steps.append(1)
        names["update"](model, optimizer, ids, mask, rewards, 4)
        assert len(steps) == 4


def zeros(*shapes):
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize("message, function, arguments", [
    ("pass mask == 0", gspo.gspo_loss, [*example()[:3], -1e9 * ~example()[3]]),
    ("eps_low 0.9997 must be above 0", gspo.gspo_loss, [*example(), 0.9997, 1.0004]),
    ("eps_high 1.1 must be above 0. They are distances from 1, not bounds: instead of 0.9997",
     gspo.gspo_loss, [*example(), 0.2, 1.1]),
    ("denominator must be above 0", gspo.gspo_loss, zeros((0, 3), (0, 3), (0,), (0, 3))),
    ("not a list", gspo.group_advantages, [[1.0, 0.0], 2]),
    ("rewards (2, 2)", gspo.group_advantages, [*zeros((2, 2)), 2]),
    ("logits (2, 5, 9), tokens (2, 7)", gspo.token_log_probs, zeros((2, 5, 9), (2, 7))),
    ("advantages (3,), mask (2, 5)", gspo.gspo_loss, zeros((2, 5), (2, 5), (3,), (2, 5))),
])
def test_a_message_of_the_maths_says_what_was_found_and_what_to_do(message, function, arguments):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(*arguments)
