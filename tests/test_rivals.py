"""The pieces that rivals.py passes into the loop do what their names say, and so do exact.py's
arithmetic and gsm8k.py's comparison."""
import functools
import itertools
import json
import math
import random

import pytest
import torch
from torch.testing import assert_close

import train_math
from experiments import exact, gsm8k, rivals, successors
from experiments import rival_parts as parts
from experiments.plot import append
from experiments.tiny_model import tiny_model, tiny_tokenizer
from gspo import grpo_loss, gspo_loss


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def batch():
    """log_probs, old_log_probs, advantages, mask of 6 responses of 2 to 7 tokens, some ratios
    beyond any range."""
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 7, generator=g) * 3
    new = old + 0.3 * torch.randn(6, 7, generator=g)
    return new, old, torch.randn(6, generator=g), torch.arange(7) < torch.arange(2, 8)[:, None]


def gradient(loss, batch, *eps):
    log_probs = batch[0].clone().requires_grad_()
    return torch.autograd.grad(loss(log_probs, *batch[1:], *eps, denominator=6), log_probs)[0]


def micro_batch(prompts, responses, advantages=None):
    rows = list(range(len(prompts)))
    return train_math.MicroBatch(prompts, responses, rows, "cpu", advantages)


def one_batch(build_minibatches, *arguments, **settings):
    """All of a rollout as one minibatch of one micro-batch."""
    cfg = train_math.Settings(device="cpu", minibatches=1, **settings)
    minibatches = build_minibatches(*arguments, cfg)
    assert [len(minibatch) for minibatch in minibatches] == [1]
    return minibatches[0][0]


class TestSurrogate:
    @pytest.mark.parametrize("ratio, loss", [("token", grpo_loss), ("sequence", gspo_loss)])
    @pytest.mark.parametrize("eps", [(0.003, 0.004), (0.1, 0.2), (0.9, 9.0)])
    def test_has_the_gradient_of_the_algorithm_on_its_diagonal(self, batch, ratio, loss, eps):
        ours = gradient(parts.surrogate(ratio, ratio), batch, *eps)
        assert_close(ours, gradient(loss, batch, *eps))

    def test_off_the_diagonal_has_one_ratios_weight_and_the_others_gate(self, batch):
        weights = gradient(parts.surrogate("token", "one"), batch, 0, 0)  # 1 is never clipped
        gate = gradient(parts.surrogate("one", "sequence"), batch, 0.01, 0.02)
        plain = gradient(parts.surrogate("one", "one"), batch, 0, 0)
        assert_close(gradient(parts.surrogate("token", "sequence"), batch, 0.01, 0.02),
                     weights * (gate != 0), msg="weight: the token's ratio; gate: the sequence's")
        assert_close(gate[gate != 0], plain[gate != 0])
        assert 0 < (gate != 0).sum() < batch[3].sum()

    def test_gates_one_side_where_told(self, batch):
        def kept(gate, side):
            loss = parts.surrogate("sequence", gate, None, side)
            return gradient(loss, batch, 0.01, 0.02) != 0

        both = kept("sequence", "both")
        above = kept("sequence", "above")
        below = kept("sequence", "below")
        free = kept("one", "both")
        right = (batch[2] > 0)[:, None]
        assert torch.equal(above, both.where(right, free))
        assert torch.equal(below, both.where(~right, free))
        assert (both != above).any() and (both != below).any()

    def test_takes_out_as_many_at_random(self, batch):
        torch.manual_seed(0)

        def gone(shuffled):
            loss = parts.surrogate("sequence", "sequence", None, "both", shuffled)
            return (gradient(loss, batch, 0.01, 0.02) == 0).all(dim=1)

        right = batch[2] > 0
        own = gone(None)
        assert 0 < own.sum() < 6 and (own & right).any() and (own & ~right).any()
        for shuffled in ("all", "sign"):
            draws = torch.stack([gone(shuffled) for _ in range(100)])
            assert (draws.sum(dim=1) == own.sum()).all(), "as many as the clip would take"
            assert draws.any(dim=0).all(), "each response may be among them"
            assert len(draws.unique(dim=0)) > 1
        assert (draws[:, right].sum(dim=1) == own[right].sum()).all(), "as many of each sign"

    @pytest.mark.parametrize("share", [0.25, 0.0])
    def test_counts_what_is_pushed_down_as_told(self, batch, share):
        plain, less = (
            gradient(parts.surrogate("token", "token", None, "both", None, x), batch, 0.1, 0.2)
            for x in (1.0, share))
        down = (batch[2] < 0)[:, None]
        assert (plain != 0)[down.expand_as(plain)].any()
        assert_close(less, torch.where(down, share * plain, plain))

    def test_caps_the_weight(self, batch):
        capped, free, plain = (
            gradient(parts.surrogate(weight, "one", cap), batch, 0, 0)
            for weight, cap in (("token", 1.1), ("token", None), ("one", None)))
        mask = batch[3]
        assert_close((capped / plain)[mask], (free / plain)[mask].clamp(max=1.1))

    def test_with_a_noisy_gate_is_gspo_but_for_what_is_dropped(self, batch):
        exactly, noisy = (gradient(parts.noisy_gate(x), batch, 0.01, 0.02) for x in (0, 1.0))
        assert_close(exactly, gradient(gspo_loss, batch, 0.01, 0.02))
        free = gradient(parts.noisy_gate(0), batch, 0.99, 99)
        assert_close(noisy, free * (noisy != 0), msg="the weight is the true s")
        torch.manual_seed(0)
        draws = [gradient(parts.noisy_gate(1.0), batch, 0.01, 0.02) for _ in range(100)]
        dropped = torch.stack([draw[:, 0] == 0 for draw in draws])
        decided = dropped.any(dim=0) & ~dropped.all(dim=0)
        assert decided.all(), "noise a hundred times the range decides"


def sapo(r, a, n, low, high):
    p = [1 / (1 + math.exp(-(high if a > 0 else low) * (x - 1))) for x in r]
    return [4 * q * (1 - q) * x * a / n for q, x in zip(p, r)]


def gmpo(r, a, n, low, high):
    inside = [x < math.exp(high) if a > 0 else x > math.exp(-low) for x in r]
    clipped = [min(x, math.exp(high)) if a > 0 else max(x, math.exp(-low)) for x in r]
    return [a * math.prod(clipped) ** (1 / n) / n * keep for keep in inside]


def fspo(r, a, n, low, high):
    whole = math.prod(r)
    low, high = (math.exp(x * math.sqrt(n)) for x in (-low, high))
    return [a * whole * (whole < high if a > 0 else whole > low)] * n


def luspo(r, a, n, low, high):
    s = math.prod(r) ** (1 / n)
    return [a * s * (s < 1 + high if a > 0 else s > 1 - low)] * n


def tokens(r, a, n, low, high):
    return [a * x * (x < 1 + high if a > 0 else x > 1 - low) for x in r]


def cispo(r, a, n, low, high):
    return [a * min(x, 1 + high) for x in r]


class TestSuccessors:
    mean_length = (2 + 3 + 4 + 5 + 6 + 7) / 6

    @pytest.mark.parametrize("name, weights, low, high, divisor", [
        ("sapo", sapo, 5.0, 3.0, 1), ("gmpo", gmpo, 0.1, 0.15, 1), ("fspo", fspo, 0.1, 0.2, 1),
        ("luspo", luspo, 0.01, 0.02, 1), ("dapo", tokens, 0.1, 0.2, mean_length),
        ("dr_grpo", tokens, 0.1, 0.2, successors.BUDGET),
        ("cispo", cispo, None, 0.2, mean_length)])
    def test_push_each_token_as_told(self, batch, name, weights, low, high, divisor):
        new, old, advantages, mask = batch
        padded = new.masked_fill(~mask, math.nan), old, advantages, mask
        given = gradient(getattr(successors, name + "_loss"), padded, low, high)
        expected = torch.zeros_like(given)
        for i, n in enumerate(mask.sum(dim=1).tolist()):
            ratios = (new - old).exp()[i, :n].tolist()
            pushes = weights(ratios, advantages[i].item(), n, low, high)
            expected[i, :n] = -torch.tensor(pushes) / divisor / 6
        assert_close(given, expected)
        if name not in ("sapo", "cispo"):
            assert 0 < (given[mask] == 0).sum() < mask.sum(), "some dropped, some not"

    def test_dr_grpo_does_not_divide_by_the_standard_deviation(self):
        centred = successors.centred_advantages(torch.tensor([1.0, 0, 0, 1, 1, 1]), 3)
        assert_close(centred, torch.tensor([2 / 3, -1 / 3, -1 / 3, 0, 0, 0]))


class TestAdvantages:
    def test_softmax_and_best_of_n(self):
        rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
        e = torch.tensor(2.0).exp()
        soft = parts.softmax_advantages(rewards, 3, tau=0.5)
        assert_close(soft[:3], torch.tensor([e, 1, 1]) / (e + 2))
        best = parts.best_of_n_advantages(rewards, 3)
        assert_close(best, torch.tensor([1, 0, 0, 0, 0.5, 0.5]))
        none = parts.best_of_n_advantages(torch.zeros(4), 4)
        assert (none == 0).all(), "where none is right, none is kept"

    def test_of_steps_credit_each_sum_by_its_own_arithmetic(self):
        text = "c3+7=0b7+0=8a0+8=8\n#### 8"  # one slip, then right in itself; a wrong answer
        steps = parts.step_rewards(text, 0.0, modulo=10)
        assert steps == [(6, 1.0), (12, 0.0), (18, 1.0), (25, 0.0)]
        assert parts.step_rewards("50*3=150\n#### 150", 1.0, None) == [(8, 1.0), (17, 1.0)]
        assert parts.step_rewards("30+7=38\n", 0.0, None) == [(7, 0.0), (8, 0.0)]

    def test_of_steps_lie_on_the_steps_tokens_and_have_mean_0_over_the_group(self):
        tokenizer = tiny_tokenizer()
        texts = ["a1+1=2\n#### 2", "a1+1=3\n#### 3", "#### 9", "#### 2"]
        responses = [tokenizer(t).input_ids + [tokenizer.eos_token_id] for t in texts]
        credit = parts.StepAdvantages(tokenizer, modulo=10)
        ones = credit.group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
        cfg = train_math.Settings(device="cpu", minibatches=1, micro_batch_tokens=32)
        minibatches = credit.build_minibatches([[5, 6]] * 4, responses, ones, cfg)
        assert [len(minibatch) for minibatch in minibatches] == [2]
        advantages = {row: a[m] for b in minibatches[0]
                      for row, a, m in zip(b.rows, b.advantages, b.mask)}
        assert [len(advantages[i]) for i in range(4)] == [len(r) for r in responses]
        for row, sign in ((0, 1), (1, -1), (2, -1)):
            assert (sign * advantages[row] > 0).all()
        assert abs(torch.cat([advantages[i] for i in range(4)]).mean()) < 1e-6

    def test_of_steps_may_add_the_one_reward(self):
        tokenizer = tiny_tokenizer()
        responses = [tokenizer(t).input_ids for t in ("a1+1=2\n#### 9", "a1+1=3\n#### 2")]
        credit = parts.StepAdvantages(tokenizer, modulo=10, both=True)
        ones = credit.group_advantages(torch.tensor([0.0, 1.0]), 2)
        batch = one_batch(credit.build_minibatches, [[5]] * 2, responses, ones)
        wrong, right = (batch.advantages[batch.rows.index(i)][batch.mask[0]] for i in (0, 1))
        order = wrong[-1] < wrong[0] == right[0] < right[-1]  # rewards 0, 1, 1, 2
        assert order, "own + one"

    def test_know_the_rows_of_each_micro_batch(self):
        responses = [[7] * n for n in (5, 2, 4, 1)]
        advantages = torch.tensor([0.5, 0, -1, 2])
        cfg = train_math.Settings(device="cpu", minibatches=2, micro_batch_tokens=6)
        minibatches = parts.minibatches_with_rows([[5]] * 4, responses, advantages, cfg)
        assert [[b.rows for b in part] for part in minibatches] == [[[0]], [[3], [2]]]
        assert [b.advantages.tolist() for b in minibatches[1]] == [[2], [-1]]


class TestTwoTurns:
    @pytest.fixture
    def tokenizer(self):
        return tiny_tokenizer()

    def test_are_taught_as_they_are_asked(self, tokenizer, monkeypatch):
        taught = []
        rights = iter((1.0, 0.2))
        monkeypatch.setattr(parts, "supervise",
                            lambda model, tokenizer, row, *_: taught.append(row()))
        monkeypatch.setattr(parts, "sampled_reward", lambda *_: next(rights))
        parts.long_cold_start(None, tokenizer, 0, 7, 11, turns=2)
        ids = tokenizer(taught[0]["answer"]).input_ids
        end = ids.index(tokenizer.eos_token_id)
        first, second = (tokenizer.decode(part) for part in (ids[:end], ids[end + 1:]))
        question, worked = second.split("\n", 1)
        assert first == taught[0]["worked"]
        assert worked[:2] == question[2] + question[0] and "####" in worked

    def rolled_out(self, tokenizer, own):
        """Two questions, two responses to each: what the test below looks at."""
        model = tiny_model(tokenizer, 0)
        turns = parts.TwoTurns(tokenizer, own)
        rows = parts.two_turn_questions(0, 2, 3, 5)
        prompts = train_math.encode_prompts(tokenizer, rows, "")
        torch.manual_seed(0)
        responses, sampled = turns.rollout(model, prompts, 2, 6, 1.0, torch.arange(0, 30))
        rows, prompts = ([x for x in each for _ in range(2)] for each in (rows, prompts))
        return model, turns, rows, prompts, responses, sampled

    @pytest.mark.parametrize("own", [False, True])
    def test_mask_the_question_and_credit_each_turn(self, tokenizer, own):
        model, turns, rows, prompts, responses, sampled = self.rolled_out(tokenizer, own)
        turns_of = list(turns.turns)
        for (first, second), response, row in zip(turns_of, responses, rows):
            then = tokenizer(row["question"].split(" ")[1] + "\n").input_ids
            assert response == first + then + second and len(then) == 4
        assert turns.reward(None, None, [row["answer"] for row in rows]) == [0.0] * 4
        turns.rewards = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]])  # first turn, second turn
        one = turns.group_advantages(turns.rewards.mean(dim=0), 2)
        assert (one != 0).all() or own
        batch = one_batch(turns.build_minibatches, prompts, responses, one)
        log_probs = train_math.response_log_probs(model, batch, 1.0).detach()
        assert sorted(batch.rows) == [0, 1, 2, 3]
        for i, row in enumerate(batch.rows):
            n, m = map(len, turns_of[row])
            assert batch.mask[i].sum() == n + m, "the second question is masked out"
            expected = torch.cat([sampled[row, :n], sampled[row, 6:6 + m]])
            assert_close(log_probs[i][batch.mask[i]], expected)
            if own:
                given = batch.advantages[i][batch.mask[i]]
                a, b = torch.tensor([[1.0, 0], [-1, 0], [0, -1], [0, 1]])[row] / 2**0.5
                expected = torch.cat([a.expand(n), b.expand(m)])
                assert_close(given, expected, atol=1e-3, rtol=0)

    def test_count_the_right_answers_of_both_turns(self, tokenizer):
        turns = parts.TwoTurns(tokenizer, True)

        def write(text):
            return tokenizer(text).input_ids + [tokenizer.eos_token_id]

        turns.turns = [(write("#### 7"), write("#### 8")),
                       (write("a1+1=2\n#### 7"), write("#### 7"))]
        assert turns.reward(None, None, ["#### 7\n#### 8"] * 2) == [1.0, 0.5]
        assert turns.rewards.tolist() == [[1.0, 1.0], [1.0, 0.0]] and not turns.turns


class TestCritic:
    values = torch.tensor([[9.0, 0.2, 0.5, 0.4], [0.3, 0.1, 9.0, 9.0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]).bool()
    rewards = torch.tensor([1.0, 0.0])

    def test_gae_of_lambda_0_and_1(self):
        assert_close(parts.gae(self.values, self.rewards, self.mask, 0.0),
                     torch.tensor([[0, 0.3, -0.1, 0.6], [-0.2, -0.1, 0, 0]]),
                     msg="V_{t+1} - V_t, then r - V")
        assert_close(parts.gae(self.values, self.rewards, self.mask, 1.0),
                     torch.tensor([[0, 0.8, 0.5, 0.6], [-0.3, -0.1, 0, 0]]), msg="reward - value")

    def test_gae_between(self):
        expected = 0.3 + 0.9 * (-0.1 + 0.9 * 0.6)
        assert_close(parts.gae(self.values, self.rewards, self.mask, 0.9)[0, 1].item(), expected)

    def test_value_head_learns_from_the_loss_and_the_policy_takes_gae(self):
        tokenizer = tiny_tokenizer()
        model = tiny_model(tokenizer, 0)
        critic = parts.Critic(model, lam=1)
        model.value_head.bias.data.fill_(0.2)
        rewards = critic.group_advantages(torch.tensor([1.0, 0.0]), 2)
        b = micro_batch([[5], [5]], [[6, 7, 1], [8, 1]], rewards)
        with torch.no_grad():
            b.old_log_probs = critic.response_log_probs(model, b, 1.0)
        assert_close(b.returns[b.mask], torch.tensor([0.5] * 3 + [-0.5] * 2))
        assert (b.advantages[0][b.mask[0]] > 0).all() and (b.advantages[1][b.mask[1]] < 0).all()
        log_probs = critic.response_log_probs(model, b, 1.0)
        loss = critic.loss(log_probs, b.old_log_probs, b.advantages, b.mask, 0.2, 0.27,
                           denominator=2)
        loss.backward()
        assert model.value_head.weight.grad.norm() > 0
        assert_close(critic.error.item(), (0.3**2 + 0.7**2) / 2,
                     msg="values of .2, rewards of .5 and -.5")


class TestRoutingReplay:
    def setup(self, replay):
        model = parts.moe(tiny_tokenizer(), 0)
        router = parts.RoutingReplay(model, replay)
        b = micro_batch([[5, 9], [6]], [[6, 7, 8, 1], [8, 1]])
        with torch.no_grad():
            b.old_log_probs = router.response_log_probs(model, b, 1.0)
        return model, router, b

    @staticmethod
    def move(model):
        g = torch.Generator().manual_seed(1)
        for name, p in model.named_parameters():
            if "gate.weight" in name:
                p.data += 0.05 * torch.randn(p.shape, generator=g)

    def test_changes_no_bit_while_the_weights_stay(self):
        model, router, b = self.setup(replay=True)
        log_probs = router.response_log_probs(model, b, 1.0)
        assert torch.equal(log_probs.detach(), b.old_log_probs) and router.changed == [0.0]

    def test_keeps_the_experts_when_the_gate_moves_and_takes_its_weights(self):
        model, router, b = self.setup(replay=True)
        self.move(model)
        replayed = router.response_log_probs(model, b, 1.0)
        assert router.changed[0] > 0
        with torch.no_grad():  # by hand: the old experts, the current gate's probabilities of them
            gates = [m for m in model.modules() if isinstance(m, parts.Qwen3MoeTopKRouter)]
            for gate, old in zip(gates, b.routes):
                def forward(hidden, gate=gate, old=old):
                    logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.T
                    chosen = logits.gather(1, old)
                    return logits, torch.softmax(chosen, dim=1), old
                gate.forward = forward
            assert_close(train_math.response_log_probs(model, b, 1.0), replayed.detach())

    def test_without_it_the_experts_change(self):
        model, router, b = self.setup(replay=False)
        self.move(model)
        log_probs = router.response_log_probs(model, b, 1.0)
        assert router.changed[0] > 0
        own = train_math.response_log_probs(model, b, 1.0)
        assert torch.equal(log_probs, own), "the gate's own choice"

    @pytest.mark.parametrize("replay", [True, False])
    def test_leaves_the_gate_its_gradient(self, replay):
        model, router, b = self.setup(replay)
        router.response_log_probs(model, b, 1.0).sum().backward()
        gates = [p for name, p in model.named_parameters() if "gate.weight" in name]
        assert gates and all(p.grad.norm() > 0 for p in gates)


class TestEngine:
    def sample(self, kind, direct, times=1):
        model = tiny_model(tiny_tokenizer(), 0)
        engine = parts.Engine(kind, direct)
        for _ in range(times):
            torch.manual_seed(0)
            responses, _ = engine.rollout(model, [[5, 6], [7]], 2, 6, 1.0, torch.arange(1, 30))
            model.lm_head.weight.data *= 1.1
        prompts = [[5, 6], [5, 6], [7], [7]]
        b = one_batch(engine.build_minibatches, prompts, responses, torch.ones(4))
        with torch.no_grad():
            return model, engine, b, engine.response_log_probs(model, b, 1.0)

    def test_gives_its_own_likelihoods_on_the_responses_tokens(self):
        model, engine, b, old = self.sample("bf16", True)
        model.lm_head.weight.data /= 1.1
        exactly = train_math.response_log_probs(model, b, 1.0)
        lengths = set(b.mask.sum(dim=1).tolist())
        assert len(lengths) > 1, "responses of one length would hide a shift"
        assert (old[~b.mask] == 0).all() and 0 < (old - exactly).abs().max() < 0.1

    def test_leaves_them_alone_unless_told(self):
        model, _, b, old = self.sample("bf16", False)
        assert torch.equal(old, train_math.response_log_probs(model, b, 1.0))

    def test_rounds_weights_to_8_bits(self):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        error = ((parts.float8(x) - x) / x).abs()
        assert 0.01 < error.mean() < 0.06 and len(parts.float8(x).unique()) < 256

    def test_stale_is_the_policy_of_4_rollouts_ago(self):
        model, engine, b, old = self.sample("stale", True, times=7)
        model.lm_head.weight.data /= 1.1**5  # one for each rollout since, and its own
        assert_close(old, train_math.response_log_probs(model, b, 1.0).detach())

    @pytest.mark.parametrize("correction, expected", [("tis", [0.3, 1.0, 2.0, 2.0]),
                                                      ("icepop", [0, 1.0, 3.0, 0])])
    def test_corrects_by_the_old_policys_likelihood_over_its_own(self, correction, expected):
        model, engine, b, _ = self.sample("bf16", False)
        engine.correction = correction
        factors = torch.tensor([0.3, 1.0, 3.0, 9.0])
        b.old_log_probs = b.reported + factors.log()[:, None] * b.mask
        engine.response_log_probs(model, b, 1.0)
        frozen = b.old_log_probs, b.old_log_probs, torch.tensor([1.0, -1.0, 1.0, -1.0]), b.mask
        corrected = gradient(functools.partial(engine.loss, grpo_loss), frozen, 0.1, 0.2)
        plain = gradient(grpo_loss, frozen, 0.1, 0.2)
        assert_close(corrected, torch.tensor(expected)[:, None] * plain)


def test_bf16_log_probs_are_rounded_and_come_in_float32():
    model = tiny_model(tiny_tokenizer(), 0)
    b = micro_batch([[5, 6]], [[7, 8, 9, 1]])
    rounded = parts.bf16_log_probs(model, b, 1.0)
    exactly = train_math.response_log_probs(model, b, 1.0)
    assert rounded.dtype == torch.float32 and 1e-5 < (rounded - exactly).abs().max() < 0.1
    rounded.sum().backward()
    assert model.lm_head.weight.grad.norm() > 0


class TestTasks:
    def test_fibonacci_counts_down_and_is_right_unless_sloppy(self):
        rows = [parts.fibonacci(random.Random(i), 3, 30) for i in range(50)]
        for row in rows:
            a, b = int(row["question"][0]), int(row["question"][1])
            n = parts.LABELS.index(row["question"][2]) + 1
            for _ in range(n):
                a, b = b, (a + b) % 10
            assert row["answer"] == f"#### {b}" and row["worked"].endswith(f"\n#### {b}")
            assert len(row["worked"]) == 6 * n + 7
        sloppy = [parts.fibonacci(random.Random(i), 20, 32, 0.05, 0.1) for i in range(300)]
        right = sum(row["worked"].endswith(row["answer"]) for row in sloppy) / 300
        assert 0.2 < right < 0.5, "a slip in 5% of 26 steps, a tenth of them none, and 10% give up"

    def test_chains_have_the_lengths_of_their_names(self):
        for length in rivals.CHAINS:
            rows = rivals.TASKS[f"{length} tokens"][2]("held out", 200)
            assert abs(sum(len(row["worked"]) + 1 for row in rows) / 200 - length) < 5

    @pytest.mark.parametrize("chain", rivals.CHAINS.values())
    def test_each_length_is_taught_with_steps_that_have_a_label(self, chain, monkeypatch):
        rights = iter((0.5, 1.0, 0.2))
        monkeypatch.setattr(parts, "supervise",
                            lambda model, tokenizer, row, *_: [row() for _ in range(500)])
        monkeypatch.setattr(parts, "sampled_reward", lambda *_: next(rights))
        parts.long_cold_start(None, None, 0, *chain)
        assert next(rights, None) is None

    @pytest.mark.parametrize("task", ["long", "short", "30 tokens"])
    def test_what_is_held_out_is_not_trained_on(self, task):
        questions = rivals.TASKS[task][2]
        held_out = {row["question"] for row in questions("held out", 256)}
        trained = {row["question"] for seed in range(9) for row in questions(seed, 192)}
        assert len(held_out) > 50 and not held_out & trained

    def test_a_label_after_the_answer_is_no_power_of_ten(self):
        texts = ["a3+4=7\n#### 7", "a3+4=7\n#### 7e3+4=7", "a3+4=7\n#### 8", "7"]
        assert parts.task_reward(None, texts, ["#### 7"] * 4) == [1, 1, 0, 0]

    def test_word_problems_are_answered_well_or_guessed(self):
        rows = parts.word_problems()
        assert len({row["question"] for row in rows}) == len(rows) == 7840
        for row in rows[:50]:
            n, each = (int(word) for word in row["question"].split() if word.isdigit())
            assert row["answer"].endswith(f"\n#### {n * each}")
            assert len(row["answer"]) < 40
        rng = random.Random(0)
        guesses = [parts.guessed(row, rng)["answer"] for row in rows[:500]]
        right = [train_math.gold_answer(text) == train_math.gold_answer(row["answer"])
                 for text, row in zip(guesses, rows)]
        assert 0.25 < sum(right) / 500 < 0.4 and sum("*" in text for text in guesses) < 200


class TestExact:
    @pytest.fixture(autouse=True)
    def double(self):
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)

    @pytest.fixture
    def policies(self):
        g = torch.Generator().manual_seed(0)
        return [torch.randn(exact.CONTEXTS, exact.TOKENS, generator=g) for _ in range(2)]

    def test_moments_equal_the_sums_over_all_responses(self, policies, monkeypatch):
        monkeypatch.setattr(exact, "CONTEXTS", 2)  # so that in 3 positions one context comes twice
        old, new = (x[:2] for x in policies)
        length = 3
        p = old.softmax(1)
        log_ratio = new.log_softmax(1) - old.log_softmax(1)
        context = torch.arange(length) % 2
        mean = dict.fromkeys(exact.WEIGHTS, 0)
        square = dict.fromkeys(exact.WEIGHTS, 0)
        baseline = (1 - p[context, 0]).prod()
        for y in itertools.product(range(exact.TOKENS), repeat=length):
            logits = new.clone().requires_grad_()
            at = context, torch.tensor(y)
            root = log_ratio[at].mean().exp()
            whole = log_ratio[at].sum().exp()
            weights = 1, log_ratio[at].exp(), root, whole
            for name, w in zip(exact.WEIGHTS, weights, strict=True):
                objective = (w * logits.log_softmax(1)[at]).sum() * (float(all(y)) - baseline)
                gradient, = torch.autograd.grad(objective, logits)
                mean[name] = mean[name] + p[at].prod() * gradient
                square[name] = square[name] + p[at].prod() * (gradient**2).sum()
        found = exact.estimates(old, new, length)
        assert list(found) == list(mean)
        for name, (its_mean, its_square) in found.items():
            assert_close(its_mean, mean[name])
            assert_close(its_square, square[name])

    def test_without_its_root_the_sequence_ratio_gives_the_gradient_of_j(self, policies):
        old, new = policies[0], policies[1].requires_grad_()
        right = (1 - new.softmax(1)[torch.arange(20) % exact.CONTEXTS, 0]).prod()
        truth, = torch.autograd.grad(right, new)
        assert_close(exact.gradient(old, new.detach(), 20), truth)

    @pytest.mark.parametrize("how", exact.HOW)
    @pytest.mark.parametrize("length", [8, 40])
    def test_moves_by_the_spread_it_is_told(self, how, length):
        g = torch.Generator().manual_seed(2)
        old = exact.old_policy(length, g)
        new = exact.move(old, length, 0.1, how, g)
        context = torch.arange(200_000) % length % exact.CONTEXTS
        tokens = old.softmax(1)[context].multinomial(1, generator=g)[:, 0]
        log_ratio = (new.log_softmax(1) - old.log_softmax(1))[context, tokens]
        assert abs(log_ratio.std() - 0.1) < 2e-3

    @pytest.mark.parametrize("length", [8, 1024])
    def test_is_right_with_probability_1_over_e(self, length):
        slips = exact.old_policy(length, torch.Generator().manual_seed(3)).softmax(1)[:, 0]
        right = (1 - slips[torch.arange(length) % exact.CONTEXTS]).prod()
        assert 0.3 < right < 0.38, "the more so, the longer"

    def test_leaves_the_default_precision_alone(self, tmp_path, monkeypatch):
        torch.set_default_dtype(torch.float32)
        monkeypatch.setattr(exact, "measure", lambda results: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            exact.main(tmp_path)
        assert torch.get_default_dtype() == torch.float32


class TestRuns:
    GRADIENTS = {}  # of an arm's kind, which stands in several experiments

    @pytest.fixture
    def small(self, tmp_path, monkeypatch):
        """Two rollouts of 4 x 4 responses on an untrained model, rewarded for an odd number of
        different letters."""
        def questions(seed, n, question="Eve?"):
            row = {"question": question, "answer": "#### 1\n#### 1"}
            return [row] * (8 if seed == "held out" else n)

        def reward(prompts, completions, answer, **columns):
            return [float(len(set(completion)) % 2) for completion in completions]

        settings = dict(max_completion_length=8, learning_rate=1e-2)  # ratios above 2, too
        for task, (make, *_) in rivals.TASKS.items():
            monkeypatch.setitem(rivals.TASKS, task, (make, lambda *_: None, questions, settings))
        asked = functools.partial(questions, question="Eve? Bob?")
        monkeypatch.setitem(rivals.TASKS, "two turns", (make, lambda *_: None, asked, settings))
        small = dict(prompts_per_step=4, group_size=4, max_steps=2)
        monkeypatch.setattr(rivals, "COMMON", rivals.COMMON | small)
        monkeypatch.setattr(rivals, "COLD", tmp_path)
        monkeypatch.setattr(parts, "task_reward", reward)

    @pytest.mark.parametrize("name", rivals.EXPERIMENTS)
    def test_of_each_experiment_run_and_each_piece_has_an_effect(self, small, name):
        kinds = {}
        same = "eps", "epochs", "learning_rate", "max_steps"
        for panel in rivals.EXPERIMENTS[name].values():
            for spec in panel.values():
                kind = {key: x for key, x in spec.items() if key not in same}
                kinds.setdefault(json.dumps(kind | {"task": ""}), spec)
        gradients = {}
        for kind, spec in kinds.items():
            if kind not in self.GRADIENTS:
                rivals.cold_start(spec["task"], 0)
                row = rivals.run({**spec, "max_steps": 2}, 0, 5)
                assert len(row["reward"]) == 2 and json.loads(json.dumps(row)) == row
                self.GRADIENTS[kind] = json.dumps(row["grad_norm"])
            gradients[kind] = self.GRADIENTS[kind]
        plain = [g for kind, g in gradients.items() if "gspo_token" not in kind]
        assert len(set(plain)) == len(plain), "a piece without effect"

    def test_with_noise_are_drawn_over_the_movement(self, tmp_path, monkeypatch):
        import matplotlib.pyplot as plt
        kept = []
        monkeypatch.setattr(plt, "close", kept.append)
        arms = [spec for panel in rivals.EXPERIMENTS["noise"].values() for spec in panel.values()]
        rows = [{"arm": spec, "cold": 0, "accuracy": 0.5, "log_ratio_std": [None, 0, 0.02, 0.04]}
                for spec in arms]
        rivals.draw_noise(rows, tmp_path / "noise.png")
        dots = [line.get_xdata() for line in kept[0].axes[0].lines if line.get_marker() == "o"]
        points = [x[0] for x in dots if len(x)]
        assert points == pytest.approx([sd / 0.03 for sd in (0.003, 0.01, 0.03, 0.1, 0.3, 1)])

    def test_are_compared_cold_start_by_cold_start(self):
        rows = [[{"cold": i % 3, "accuracy": x} for i, x in enumerate(values)]
                for values in ([0.9, 0.8, 0.9, 0.9], [0.8, 0.6, 0.8])]
        assert rivals.difference(*rows) == "+0.13 ± 0.14"  # 0.1, 0.2, 0.1
        assert rivals.difference(rows[0], rows[0]) == rivals.difference(rows[0][:1], rows[1]) == "-"

    def test_that_are_there_are_not_run_again_and_make_the_table_and_the_figure(
            self, tmp_path, monkeypatch):
        monkeypatch.setattr(rivals.multiprocessing, "get_context", None)  # nothing may be started
        arms = [spec for panel in rivals.EXPERIMENTS["moe"].values() for spec in panel.values()]
        for i, (spec, cold, k) in enumerate(itertools.product(arms, range(2), range(2))):
            row = {"arm": spec, "cold": cold, "seed": 100 * cold + k, "start": 0.3,
                   "accuracy": i / 100, "reward": [0.5], "clip_fraction": [0.25],
                   "log_ratio_std": [None], "entropy": [0.1], "experts_changed": [0.02],
                   "probe": 0.25}
            append(tmp_path / "runs.jsonl", row)
        another = {**row, "arm": rivals.arm("grpo", 0.3)}  # of another experiment
        append(tmp_path / "runs.jsonl", another)
        rows = rivals.run_all(arms, colds=2, seeds=2, jobs=1, path=tmp_path / "runs.jsonl")
        assert len(rows) == 16
        line = rivals.table("moe", rows).splitlines()[3]
        assert line == ("| GRPO | 0.06 | +0.04 ± 0.00 | 0.04 0.05; 0.06 0.07 | 0.250 | 0.50 "
                        "| 25.0% | - | 0.100 | 2.0% |")
        rivals.draw("moe", rows, tmp_path / "moe.png")
        assert (tmp_path / "moe.png").stat().st_size > 1000


class TestGsm8k:
    def test_compares_right_and_wrong_on_the_same_questions(self):
        before = [1] * 4 + [0] * 6
        after = [0] + [1] * 8 + [0]  # of 10 questions 5 gained, 1 lost
        d, interval, p = gsm8k.paired(before, after)
        assert d == pytest.approx(0.4)
        assert interval == pytest.approx((0.4 - 0.4111, 0.4 + 0.4111), abs=1e-4)
        assert p == 2 * (1 + 6) / 2**6  # of 6 changes at most one against
        assert gsm8k.paired(before, before)[2] == 1

    def test_makes_a_table_of_arms_at_each_temperature(self):
        def arm(right):
            return [{"question": i, "temperature": t, "right": x, "flexible": True, "cut": i == 0,
                     "tokens": 10 + i}
                    for t in gsm8k.TEMPERATURES for i, x in reversed(list(enumerate(right)))]

        text = gsm8k.table({"cold": arm([1, 0, 0, 0]), "grpo": arm([1, 0, 0, 0]),
                            "gspo": arm([1, 1, 0, 1])})
        assert text.count("| gspo | greedy | 3 of 4, 75.0%") == 1
        assert text.count("| gspo | at temperature 1.0 |") == 1
        assert "| 100.0% | +50.0% (+1.0% to +99.0%) | 0.5 | 25% | 12 |" in text
        assert "gspo minus grpo, temperature 0.0: +50.0% (+1.0% to +99.0%), p 0.5" in text
