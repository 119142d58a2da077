"""train_math.py: whole steps, evaluations, the trial, and functions of the user's own. (The
specification of the parts of a step is homework/test_loop.py.)"""
import contextlib
import copy
import itertools
import math
import statistics

import datasets
import pytest
import torch

import gspo
import train_math
from gspo import group_advantages
from support.task import Refused
from tests.conftest import parity_reward, rollout_of, settings, spy, sums, train, weights_of


def constant_reward(completions, **columns):
    return [0.3] * len(completions)


class TestTraining:
    @pytest.mark.parametrize("algorithm", ["gspo", "gspo_token", "grpo"])
    def test_makes_the_updates_that_the_paper_says(self, tiny, algorithm):
        """They are repeated with a loss that is written out for one response after the other. There
        are two epochs of two minibatches, and in one group all rewards are equal."""
        model, _ = tiny
        model.generation_config.eos_token_id = list(range(20))  # lengths differ
        mine = copy.deepcopy(model)
        start = weights_of(model)
        model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)  # of an earlier use
        calls = []
        rewards = [0.5] * 4 + [i % 3 for i in range(12)]
        _, row = train(
            tiny, 4, reward=lambda **columns: rewards, sample=spy(train_math.sample, calls),
            algorithm=algorithm, minibatches=2, epochs=2, max_steps=1, temperature=0.8,
            eps_low=0.01, eps_high=0.03, micro_batch_tokens=60, learning_rate=0.1,
            make_optimizer=lambda model: torch.optim.SGD(model.parameters()))
        ((_, _, rollout),) = calls

        def log_probs_of(i):
            ids = rollout.prompts[i] + rollout.responses[i]
            n = len(rollout.responses[i])
            logits = mine(torch.tensor([ids])).logits[0, -n - 1:-1]
            return (logits / 0.8).log_softmax(-1)[torch.arange(n), torch.tensor(ids[-n:])]

        advantages = group_advantages(torch.tensor(rewards), 4)
        old = [log_probs_of(i).detach() for i in range(16)]
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        losses, norms = [], []
        clipped = []  # whether each token with a gradient is clipped in each epoch
        later = []  # log s after the first update
        for number, half in enumerate([range(8), range(8, 16)] * 2):
            loss = 0
            for i in half:
                log_ratio = log_probs_of(i) - old[i]
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
        assert set(row) == {*expected, "step", "seconds", "seconds_rollout"}
        assert row["seconds"] > row["seconds_rollout"] > 0

    def test_gives_adamw_a_learning_rate_that_falls_to_a_tenth(self, fresh):
        """All groups of an optimizer of the user's get it."""
        def make_optimizer(model):
            optimizer = train_math.adamw(model)
            assert optimizer.defaults["betas"] == (0.9, 0.95)
            assert optimizer.defaults["weight_decay"] == 0
            assert optimizer.param_groups[0]["params"] == list(model.parameters())
            optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
            optimizer.register_step_pre_hook(
                lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
            return optimizer

        rates = []
        rows = train(fresh, max_steps=3, minibatches=1, make_optimizer=make_optimizer)
        assert rates == [pytest.approx([rate] * 2) for rate in (1e-3, 0.55e-3, 1e-4)]
        assert rows[1]["log_ratio_mean"] is rows[1]["log_ratio_std"] is None, "all s are 1"

    def test_keeps_the_weights_if_all_rewards_are_equal(self, fresh):
        def reward(step, **columns):
            return (parity_reward if step == 1 else constant_reward)(**columns)

        weights = []
        rows = train(fresh, reward=reward, max_steps=4,
                     on_step=lambda row: weights.append(weights_of(fresh[0])))
        assert not torch.equal(weights[0], weights[1]) and torch.equal(weights[1], weights[4])
        assert [row["step"] for row in rows if "no gradient in three" in str(row)] == [4]
        assert rows[4]["log_ratio_first_max"] is rows[4]["sampler_gap"] is None

    def test_asks_all_questions_before_any_twice_and_draws_other_responses_each_time(self, fresh):
        """The questions may be a dataset of the library."""
        def asked_and_drawn(questions, seed):
            calls = []
            train(fresh, questions, reward=spy(constant_reward, calls), max_steps=5, seed=seed)
            asked = [each for _, given, _ in calls for each in given["prompts"][::4]]
            return asked, {tuple(given["completions"]) for _, given, _ in calls}

        rows = datasets.Dataset.from_list([{"question": str(i)} for i in range(10)])
        first, _ = asked_and_drawn(rows, 0)
        assert sorted(first[:10]) == sorted(first[10:]) == [str(i) for i in range(10)]
        assert first[:10] != first[10:] and asked_and_drawn(rows, 1)[0] != first
        _, drawn = asked_and_drawn(sums(1) * 4, 0)
        _, others = asked_and_drawn(sums(1) * 4, 1)
        assert len(drawn | others) == 10, "two steps drew the same responses"

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


class TestEvaluation:
    def test_is_greedy_strict_without_dropout_and_by_the_last_number(self, fresh):
        """Of ten responses, 8 are correct by the last number and 6 in the form that is asked for.
        The intervals are from a table of Wilson's."""
        model, tokenizer = fresh
        model.train()
        texts = ["#### 7"] * 6 + ["it is 7", "#### 7 or 7", "#### 8", "none"]
        responses = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]

        def generate(model, prompts, group_size, max_length, temperature, end_ids):
            assert not any(module.training for module in model.modules()), "dropout"
            assert (len(prompts), group_size, max_length, temperature) == (10, 1, 9, 0)
            return responses, torch.zeros(10, max_length)

        answers = ["3 + 4\n#### 7", "7.0", "$7", 7, "7"] * 2
        questions = [{"question": f"{i}?", "answer": answers[i]} for i in range(10)]
        cfg = settings(max_completion_length=9)
        row = train_math.evaluate(*fresh, questions, cfg, generate=generate)
        assert row.pop("eval_reward_interval") == pytest.approx((0.3127, 0.8318), abs=1e-4)
        assert row.pop("eval_last_number_interval") == pytest.approx((0.4902, 0.9433), abs=1e-4)
        assert row.pop("eval_results") == [
            {"question": f"{i}?", "gold": "7", "response": texts[i], "tokens": len(responses[i]),
             "reward": float(i < 6), "last_number": float(i < 8)} for i in range(10)]
        assert row == {"eval_questions": 10, "eval_reward": 0.6, "eval_last_number": 0.8,
                       "eval_best_constant": 1.0}

    @pytest.mark.parametrize("values, interval, answers, best", [
        ([1, 1, 1], True, [7, "7", "x"], 2 / 3),
        ([0.0, 0.5, 1.0], False, [None] * 3, None),
        ([2, 2], False, ["a", "b"], 1 / 2)])
    def test_with_an_own_reward_has_an_interval_where_it_is_0_or_1_and_the_best_constant_answer(
            self, fresh, values, interval, answers, best):
        def reward(answer, step, **columns):
            assert answer == answers and step is None
            return values

        questions = [{"question": "?", "answer": answer} for answer in answers]
        row = train_math.evaluate(*fresh, questions, settings(), reward=reward)
        assert row["eval_reward"] == pytest.approx(sum(values) / len(values))
        assert ("eval_reward_interval" in row) is interval and "eval_last_number" not in row
        assert row.get("eval_best_constant") == best
        found = [(result["reward"], result["gold"]) for result in row["eval_results"]]
        assert found == list(zip(values, answers))


def test_a_model_is_loaded_in_float32_and_refused_in_half_precision(fresh, tmp_path):
    """In half precision, updates would round to nothing, and nothing else would show it."""
    fresh[0].train().bfloat16()
    with pytest.raises(ValueError, match="is in torch.bfloat16. Load all weights in float32"):
        train(fresh, max_steps=1)
    for part in fresh:
        part.save_pretrained(tmp_path)
    torch.backends.cuda.matmul.allow_tf32 = True
    model, _ = train_math.load(str(tmp_path), "cpu")
    assert not model.training and not torch.backends.cuda.matmul.allow_tf32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class TestTheTrial:
    def test_changes_no_weights_and_calls_each_part(self, fresh):
        """The gradients are not 0, although a constant reward gives all advantages 0."""
        before = weights_of(fresh[0])
        own = vars(train_math.Parts())
        calls = {name: [] for name in own if name != "load"}
        parts = {name: spy(own[name], calls[name]) for name in calls}
        parts["reward"] = spy(constant_reward, calls["reward"])
        fresh[0].train()
        train_math.trial(*fresh, sums(1), settings(), train_math.Parts(**parts))
        assert all(calls.values()) and calls["clip_gradients"][0][2] > 0
        assert calls["reward"][0][1]["step"] == 0
        assert torch.equal(weights_of(fresh[0]), before) and not fresh[0].training
        assert all(parameter.grad is None for parameter in fresh[0].parameters())

    @pytest.mark.parametrize("scale, is_own, is_refused", [
        (1.001, False, False), (1.7, False, True), (1.7, True, False), (50, True, True)])
    def test_refuses_a_sampler_that_disagrees(self, fresh, scale, is_own, is_refused):
        """The sampler uses other logits. A sampler of the user's may round by more."""
        own = {"generate": lambda *arguments: train_math.generate(*arguments)} if is_own else {}
        parts = train_math.Parts(reward=parity_reward, **own)
        head = copy.deepcopy(fresh[0].lm_head)
        head.weight.data *= scale
        fresh[0].get_output_embeddings = lambda: head
        refused = pytest.raises(Refused, match="sampler and training disagree")
        with refused if is_refused else contextlib.nullcontext():
            train_math.trial(*fresh, sums(8), settings(), parts)

    @pytest.mark.parametrize("most, tokens", [(4, 450), (3, 225), (1, 112), (0, 112)])
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
        refused = pytest.raises(Refused, match="one response .* a lower --max_completion_length")
        with contextlib.nullcontext() if most else refused:
            train_math.trial(*tiny, sums(8), cfg, parts)
        assert cfg.micro_batch_tokens == tokens
        assert sizes[0] == (4, max(map(len, train_math.encode_prompts(tiny[1], sums(8), cfg))) + 80)
        assert all(parameter.grad is None for parameter in tiny[0].parameters())


class TestAFunctionOfTheUser:
    def test_for_rewards_gets_all_columns_and_may_return_any_sequence_of_numbers(self):
        def reward(log_metric, **given):
            log_metric("mine", 3)
            given["completions"].clear()  # what is stored does not change
            assert given == {
                "question": ["1+1?", "1+2?"], "prompts": ["1+1?", "1+2?"],
                "completions": [], "tags": [[1], [2]],
                "completion_ids": [[3], [4, 5]], "cut": [False, True], "step": 7}
            return map(float, (1, 2.5))

        rollout = rollout_of([[1], [2]], [[3], [4, 5]])
        rollout.questions = [{"question": "1+1?", "tags": [1]}, {"question": "1+2?", "tags": [2]}]
        rollout.texts = ["x", "y"]
        rewards, metrics = train_math.score(reward, rollout, settings(max_completion_length=2), 7)
        assert rewards.tolist() == [1, 2.5] and rewards.dtype == torch.float32
        assert metrics == {"mine": 3} and rollout.texts == ["x", "y"]

    def test_must_return_a_finite_reward_for_each_completion(self, fresh):
        for returned in [1.0] * 3, [1.0] * 15 + [math.nan], [math.inf] * 16:
            with pytest.raises(Refused, match="a list of 16 finite numbers is needed"):
                train(fresh, reward=lambda **columns: returned)  # noqa: B023

    def test_may_bring_old_log_probs_and_causes_a_note_if_they_are_others(self, fresh):
        def build_minibatches(rollout, advantages, cfg):
            minibatches = train_math.build_minibatches(rollout, advantages, cfg)
            for batch in itertools.chain(*minibatches):
                batch.old_log_probs = batch.sampler_log_probs + 0.5 * batch.mask
            return minibatches

        def response_log_probs(model, batch, temperature):
            log_probs = train_math.response_log_probs(model, batch, temperature)
            return log_probs - 0.2 * batch.mask * torch.is_grad_enabled()

        _, row = train(fresh, 4, build_minibatches=build_minibatches, max_steps=1)
        assert row["sampler_gap"] == pytest.approx(0.5) and row["log_ratio_mean"] < -0.3
        assert row["log_ratio_first_max"] is None
        assert "sampler_gap is above 0.1" in row["notes"][0]
        _, row = train(fresh, 4, response_log_probs=response_log_probs, max_steps=1)
        assert row["log_ratio_first_max"] == pytest.approx(0.2)
        assert "log_ratio_first_max is not 0" in row["notes"][0]


@pytest.mark.parametrize("loss", [gspo.gspo_loss, gspo.gspo_token_loss, gspo.grpo_loss])
class TestALossBesidesItsSpecification:
    def test_reads_the_values_of_a_mask_only_on_the_cpu(self, loss):
        """Tensors on the meta device have no values, so reading one raises an error. On a GPU,
        reading one would make the CPU wait."""
        log_probs = torch.zeros(4, 5, device="meta", requires_grad=True)
        mask = torch.zeros(4, 5, device="meta")
        loss(log_probs, log_probs, mask[:, 0], mask, denominator=4).backward()

    @pytest.mark.parametrize("old", [-60.0, -95.0, -torch.inf])
    def test_has_the_gradient_0_where_the_clip_is_active_although_the_ratio_overflows(
            self, loss, old):
        """exp(88.8) is infinite in float32. With A < 0, the clip is not active."""
        new = torch.zeros((2, 3), requires_grad=True)
        loss(new, torch.full((2, 3), old), torch.tensor([1.0, -1.0]), torch.ones(2, 3)).backward()
        assert new.grad[0].tolist() == [0, 0, 0]
        assert new.grad[1].isfinite().all() and (new.grad[1] > 1e20).all()

    def test_counts_log_probs_of_minus_infinity_as_minus_a_million(self, loss):
        """In float16, -1e6 does not exist. The second token has A = 1 and then A = -2. If neither
        policy can sample it, its ratio is 1."""
        for old in -1.0, -torch.inf:
            log_probs = torch.tensor([[-1, -torch.inf, -1]] * 2).half().requires_grad_()
            old_log_probs = torch.tensor([[-1, old, -1]] * 2).half()
            value = loss(log_probs, old_log_probs, torch.tensor([1.0, -2.0]), torch.ones(2, 3))
            value.backward()
            assert log_probs.grad.isfinite().all() and (log_probs.grad[:, 1] == 0).all()
        assert value == 0.5


def test_an_id_outside_the_vocabulary_has_a_log_prob_of_nan_and_no_gradient():
    """Padding often has the id -100 or -1. The mask hides its NaN."""
    logits = torch.zeros(1, 5, 4, requires_grad=True)
    log_probs = gspo.token_log_probs(logits, torch.tensor([[3, -100, -1, 4, 2 ** 40]]))
    assert log_probs.isnan().tolist() == [[False, True, True, True, True]]
    gspo.gspo_loss(log_probs, log_probs.detach(), torch.ones(1), ~log_probs.isnan()).backward()
    assert logits.grad[:, 0].abs().sum() > 0 and (logits.grad[:, 1:] == 0).all()


def test_rewards_in_a_list_are_refused():
    with pytest.raises(ValueError, match="must be a tensor, not a list"):
        group_advantages([1.0, 0.0], 2)
