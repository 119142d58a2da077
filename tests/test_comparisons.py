"""evidence/comparisons: parts, tasks and runs, and the arithmetic of tiny/exact.py."""
import itertools
import json
import math
import random

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

import train_math
from evidence.comparisons import parts, report, runs, settings, successors
from evidence.precision import rounding
from evidence.tiny import exact
from gspo import clip_fraction, grpo_loss, sequence_ratio
from tests.conftest import rollout_of
from tools.logs import write


@pytest.fixture
def model(fresh):
    return fresh[0]


@pytest.fixture
def batch():
    """log_probs, old_log_probs, advantages, mask of 6 responses of 2 to 7 tokens. Some ratios are
    beyond any clip range."""
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 7, generator=g) * 3
    new = old + 0.3 * torch.randn(6, 7, generator=g)
    advantages = torch.randn(6, generator=g)
    lengths = torch.arange(2, 8)
    mask = torch.arange(7) < lengths[:, None]
    return new, old, advantages, mask


def gradient(loss, batch, eps=(0.01, 0.02), **extra):
    log_probs, *others = batch
    log_probs = log_probs.clone().requires_grad_()
    value = loss(log_probs, *others, *eps, 6, **extra)
    value.backward()
    return log_probs.grad


def log_probs_of(model, b):
    return train_math.response_log_probs(model, b, 1.0)


def one_batch(build_minibatches, prompts, responses, log_probs):
    """A whole rollout as one minibatch of one micro-batch."""
    cfg = train_math.Settings(device="cpu", minibatches=1)
    rollout = rollout_of(prompts, responses, log_probs)
    (minibatch,) = build_minibatches(rollout, torch.ones(len(responses)), cfg)
    (batch,) = minibatch
    return batch


# ---- losses --------------------------------------------------------------------------------------
# What a response with the token ratios r (n,) and the advantage a adds to the gradient of the
# objective. In the order of the table below.


def inside(r, a, low, high):
    return r < high if a > 0 else r > low


def sapo(r, a, n, low, high):
    tau = high if a > 0 else low
    odds = (tau * (r - 1)).exp()
    gate = odds / (1 + odds)
    return 4 * gate * (1 - gate) * r * a / n


def gmpo(r, a, n, low, high):
    low = math.exp(-low)
    high = math.exp(high)
    if a > 0:
        clipped = r.clamp(max=high)
    else:
        clipped = r.clamp(min=low)
    mean = clipped.prod() ** (1 / n)
    return a * mean / n * inside(r, a, low, high)


def fspo(r, a, n, low, high):
    low = math.exp(-low * n**0.5)
    high = math.exp(high * n**0.5)
    whole = r.prod()
    return a * whole * inside(whole, a, low, high)


def gspo(r, a, n, low, high):
    s = r.prod() ** (1 / n)
    return a * s / n * inside(s, a, 1 - low, 1 + high)


def luspo(r, a, n, low, high):
    return n * gspo(r, a, n, low, high)


def grpo(r, a, n, low, high):
    return tokens(r, a, n, low, high) / n


def tokens(r, a, n, low, high):
    return a * r * inside(r, a, 1 - low, 1 + high)


def cispo(r, a, n, low, high):
    return a * r.clamp(max=1 + high)


def token_weight_and_sequence_gate(r, a, n, low, high):
    return a * r / n * inside(r.prod() ** (1 / n), a, 1 - low, 1 + high)


def capped(r, a, n, low, high):
    return a * r.clamp(max=1.1) / n


def quarter_of_negatives(r, a, n, low, high):
    return grpo(r, a, n, low, high) * (1 if a > 0 else 0.25)


class TestLosses:
    mean_length = 4.5  # of responses of 2 to 7 tokens

    @pytest.mark.parametrize("loss, weights, low, high, divisor", [
        (successors.sapo_loss, sapo, 5.0, 3.0, 1),
        (successors.gmpo_loss, gmpo, 0.1, 0.15, 1),
        (successors.fspo_loss, fspo, 0.1, 0.2, 1),
        (successors.fspo_200_loss, fspo, 0.1, 0.2, 200),
        (successors.luspo_loss, luspo, 0.01, 0.02, 1),
        (successors.luspo_200_loss, luspo, 0.01, 0.02, 200),
        (successors.gspo_200_loss, gspo, 0.01, 0.02, 1 / 200),
        (successors.dapo_loss, tokens, 0.1, 0.2, mean_length),
        (successors.dr_grpo_loss, tokens, 0.1, 0.2, successors.BUDGET),
        (successors.cispo_loss, cispo, None, 0.2, mean_length),
        (parts.surrogate("token", "token"), grpo, 0.1, 0.2, 1),
        (parts.surrogate("sequence", "sequence"), gspo, 0.01, 0.02, 1),
        (parts.surrogate("token", "sequence"), token_weight_and_sequence_gate, 0.01, 0.02, 1),
        (parts.surrogate("token", "one", cap=1.1), capped, 0.01, 0.02, 1),
        (parts.surrogate("token", "token", negatives=0.25), quarter_of_negatives, 0.1, 0.2, 1),
        (parts.noisy_gate(0), gspo, 0.01, 0.02, 1),
    ])
    def test_have_the_gradient_of_their_formula(self, batch, loss, weights, low, high, divisor):
        new, old, advantages, mask = batch
        padded = new.masked_fill(~mask, math.nan), old, advantages, mask
        given = gradient(loss, padded, (low, high))
        expected = torch.zeros_like(given)
        for i, a in enumerate(advantages):
            own = mask[i]
            r = (new - old)[i, own].exp()
            pushed = weights(r, a, len(r), low, high)
            expected[i, own] = -pushed / divisor / 6
        assert_close(given, expected)
        if weights not in (sapo, cispo, capped):
            dropped = given[mask] == 0
            assert dropped.any() and not dropped.all()

    def test_clip_as_many_responses_at_random(self, batch):
        torch.manual_seed(0)

        def gone(shuffled):
            loss = parts.surrogate("sequence", "sequence", shuffled=shuffled)
            return (gradient(loss, batch) == 0).all(dim=1)

        right = batch[2] > 0
        own = gone(None)
        assert own[right].any() and own[~right].any() and not own.all()
        for shuffled in ("all", "sign"):
            draws = torch.stack([gone(shuffled) for _ in range(100)])
            assert (draws.sum(dim=1) == own.sum()).all(), "as many as the clip would remove"
            assert draws.any(dim=0).all(), "each response can be among them"
            assert len(draws.unique(dim=0)) > 1
        number = draws[:, right].sum(dim=1)
        assert (number == own[right].sum()).all(), "as many of each sign"

    def test_clip_by_a_noisy_ratio_but_weigh_without_noise(self, batch):
        free = gradient(parts.noisy_gate(0), batch, (0.99, 99))
        torch.manual_seed(0)
        draws = torch.stack([gradient(parts.noisy_gate(1.0), batch) for _ in range(100)])
        kept = draws != 0
        assert_close(draws, free * kept)
        first = kept[:, :, 0]
        decided = first.any(dim=0) & ~first.all(dim=0)
        assert decided.all(), "noise of a hundred times the range decides about clipping"

    def test_dr_grpo_does_not_divide_by_the_standard_deviation(self):
        rewards = tensor([3.0, 0, 0, 1, 1, 1])
        centred = successors.centred_advantages(rewards, 3)
        assert centred.tolist() == [2, -1, -1, 0, 0, 0]


class TestEngine:
    def sample(self, model, *how, rollouts=1):
        """One rollout or more. After each, the head of the model is multiplied by 1.1."""
        engine = parts.Engine(*how)
        prompts = [[5, 6], [7], [8, 9], [6]]
        ends = torch.arange(1, 30)
        for _ in range(rollouts):
            torch.manual_seed(0)
            responses, log_probs = engine.generate(model, prompts, 1, 6, 1.0, ends)
            model.lm_head.weight.data *= 1.1
        return one_batch(engine.build_minibatches, prompts, responses, log_probs)

    def test_reports_its_own_log_probs_of_the_response_tokens(self, model):
        b = self.sample(model, "bf16", True)
        old = b.old_log_probs
        model.lm_head.weight.data /= 1.1
        exactly = log_probs_of(model, b)
        lengths = b.mask.sum(dim=1)
        assert len(lengths.unique()) > 1, "responses of one length would hide a shift"
        assert (old[~b.mask] == 0).all()
        error = (old - exactly).abs().max()
        assert 0 < error < 0.1

    def test_stale_is_the_policy_of_4_rollouts_ago(self, model):
        b = self.sample(model, "stale", True, rollouts=7)
        model.lm_head.weight.data /= 1.1**5  # a factor for this rollout and each one since then
        assert_close(b.old_log_probs, log_probs_of(model, b).detach())

    @pytest.mark.parametrize("correction, expected", [
        ("tis", [0.3, 1.0, 2.0, 2.0]),
        ("icepop", [0, 1.0, 3.0, 0]),
    ])
    def test_corrects_by_the_ratio_of_old_policy_to_engine(self, model, correction, expected):
        b = self.sample(model, "bf16", False, correction)
        factors = tensor([[0.3], [1.0], [3.0], [9.0]])
        old = b.sampler_log_probs + factors.log() * b.mask
        advantages = tensor([1.0, -1, 1, -1])
        frozen = old, old, advantages, b.mask
        corrected = gradient(parts.corrected(grpo_loss, correction), frozen, **b.extra)
        plain = gradient(grpo_loss, frozen)
        assert_close(corrected, tensor(expected)[:, None] * plain)


def test_rounding_decodes_given_responses(model):
    prompts = [[5, 6], [7]]
    responses, log_probs = rounding.generate(model, prompts, 6)
    assert_close(rounding.decode(model, prompts, responses), log_probs)


class TestTasks:
    def test_fibonacci_has_correct_answers(self):
        for seed in range(50):
            rng = random.Random(seed)
            row = parts.fibonacci(rng, 3, 30)
            a, b, label = row["question"]
            a, b = int(a), int(b)
            n = parts.LABELS.index(label) + 1
            for _ in range(n):
                a, b = b, (a + b) % 10
            assert row["answer"] == f"#### {b}"
            assert row["worked"].endswith(f"\n#### {b}")
            assert len(row["worked"]) == 6 * n + 7

    @pytest.mark.parametrize("task", ["long", "short", "30 tokens"])
    def test_held_out_questions_are_not_trained_on(self, task):
        questions = settings.TASKS[task].questions
        held_out = {row["question"] for row in questions("held out", 256)}
        assert len(held_out) > 50
        for seed in range(9):
            trained = {row["question"] for row in questions(seed, 192)}
            assert not held_out & trained

    def test_a_label_after_the_answer_is_not_an_exponent(self):
        texts = ["a3+4=7\n#### 7", "a3+4=7\n#### 7e3+4=7", "a3+4=7\n#### 8", "7"]
        rewards = parts.task_reward(None, texts, ["#### 7"] * 4)
        assert rewards == [1, 1, 0, 0]


class TestExact:
    @pytest.fixture
    def policies(self):
        g = torch.Generator().manual_seed(0)
        return exact.normal((2, exact.CONTEXTS, exact.TOKENS), g)

    def test_moments_equal_the_sums_over_all_responses(self, policies, monkeypatch):
        monkeypatch.setattr(exact, "CONTEXTS", 2)  # in 3 positions, one context occurs twice
        old, new = policies[:, :2]
        length = 3
        p = old.softmax(1)
        log_ratio = new.log_softmax(1) - old.log_softmax(1)
        context = torch.arange(length) % 2
        baseline = (1 - p[context, 0]).prod()
        mean = dict.fromkeys(exact.WEIGHTS, 0)
        square = dict.fromkeys(exact.WEIGHTS, 0)
        for response in itertools.product(range(exact.TOKENS), repeat=length):
            at = context, tensor(response)
            likelihood = p[at].prod()
            advantage = float(all(response)) - baseline
            token = log_ratio[at].exp()
            root = log_ratio[at].mean().exp()
            whole = log_ratio[at].sum().exp()
            weights = 1, token, root, whole
            for name, weight in zip(exact.WEIGHTS, weights):
                logits = new.clone().requires_grad_()
                log_probs = logits.log_softmax(1)[at]
                objective = (weight * log_probs).sum() * advantage
                objective.backward()
                squares = logits.grad**2
                mean[name] += likelihood * logits.grad
                square[name] += likelihood * squares.sum()
        found = exact.estimates(old, new, length)
        assert list(found) == list(mean)
        for name, moments in found.items():
            assert_close(moments, (mean[name], square[name]))

    def test_the_sequence_ratio_without_the_root_gives_the_gradient_of_j(self, policies):
        old, new = policies
        found = exact.gradient(old, new, 20)
        new.requires_grad_()
        slips = new.softmax(1)[:, 0]
        chance_of_right = (1 - slips[torch.arange(20) % exact.CONTEXTS]).prod()
        chance_of_right.backward()
        assert_close(found, new.grad)

    @pytest.mark.parametrize("how", exact.HOW)
    def test_the_log_ratios_have_the_given_standard_deviation(self, how):
        length = 40
        g = torch.Generator().manual_seed(2)
        old = exact.old_policy(length, g)
        new = exact.move(old, length, 0.1, how, g)
        context = torch.arange(200_000) % length % exact.CONTEXTS
        p = old.softmax(1)[context]
        sampled = p.multinomial(1, generator=g)[:, 0]
        log_ratio = new.log_softmax(1) - old.log_softmax(1)
        spread = log_ratio[context, sampled].std()
        assert abs(spread - 0.1) < 2e-3


class TestRuns:
    GRADIENTS = {}  # {kind of a variant: its gradient norms}, because experiments share variants

    @pytest.fixture
    def small(self, tmp_path, monkeypatch):
        """Two rollouts of 4 x 4 responses of a model with random weights. The reward is 1 if the
        number of different letters is odd."""
        def questions(seed, n):
            return [{"question": "Eve?", "answer": "#### 1"}] * (8 if seed == "held out" else n)

        def reward(prompts, completions, answer, **columns):
            return [float(len(set(completion)) % 2) for completion in completions]

        own = dict(max_completion_length=8, learning_rate=1e-2)  # some ratios exceed 2
        for name in settings.TASKS:
            task = settings.Task(lambda *_: None, questions, own)
            monkeypatch.setitem(settings.TASKS, name, task)
        common = settings.COMMON | dict(prompts_per_step=4, group_size=4, max_steps=2)
        monkeypatch.setattr(settings, "COMMON", common)
        monkeypatch.setattr(runs, "COLD", tmp_path)
        monkeypatch.setattr(parts, "task_reward", reward)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [x for x in settings.EXPERIMENTS if x not in settings.RETIRED])
    def test_of_each_experiment_work_and_each_part_has_an_effect(self, small, name):
        gradients = {}
        for spec in report.variants_of(name):
            same = dict(task="", eps=0, epochs=0, learning_rate=0, max_steps=0)
            kind = json.dumps(spec | same, sort_keys=True)
            if kind not in self.GRADIENTS:
                row = runs.run({**spec, "max_steps": 2}, 0, 5)
                assert len(row["reward"]) == 2
                assert json.loads(json.dumps(row)) == row
                self.GRADIENTS[kind] = json.dumps(row["grad_norm"])
            gradients[kind] = self.GRADIENTS[kind]
        assert len(set(gradients.values())) == len(gradients), "a part has no effect"

    def test_that_exist_are_not_repeated(self, tmp_path, monkeypatch):
        monkeypatch.setattr(runs.multiprocessing, "get_context", None)  # must not be called
        path = tmp_path / "runs.jsonl"
        variants = report.variants_of("engine")[:4]
        assert len(runs.missing(variants + variants, 2, 2, path)) == 16, "each run once"
        rows = []
        for spec, seed in itertools.product(variants, (0, 1, 100, 101)):
            rows.append({"variant": spec, "cold": seed // 100, "seed": seed})
        another = settings.variant("grpo", 0.3)  # a variant of another experiment
        write(path, [*rows, rows[-1] | {"variant": another}])
        assert runs.run_all(variants, 2, 2, 1, path) == rows

    @pytest.mark.parametrize("pieces, eps", [
        ({}, [0.01, 0.02]),
        ({"loss": ["sequence", "token", None]}, [0.1, 0.2]),
        ({"loss": ["one", "one", None]}, 0.99),
        ({"loss": ["sequence", "sequence", None, "below"]}, [0.01, 0.02]),
        ({"loss": ["sequence", "sequence", None, "above"]}, [0.01, 0.02]),
        ({"successor": "luspo"}, [0.01, 0.02]),
        ({"successor": "dapo"}, [0.1, 0.2]),
        ({"successor": "dapo"}, [0.99, 0.2]),
        ({"successor": "dr_grpo"}, [0.1, 0.2]),
        ({"successor": "gmpo"}, [0.1, 0.15]),
        ({"successor": "sapo"}, [1.05, 1.0]),
        ({"successor": "cispo"}, [1, 0.2]),
    ])
    def test_have_the_clip_fraction_of_their_own_clip(self, batch, pieces, eps):
        spec = settings.variant("gspo", eps, **pieces)
        assert runs.clip_is_counted(spec)
        algorithm = runs.algorithm_of(spec)
        new, old, advantages, mask = batch
        own = algorithm.eps_low, algorithm.eps_high
        clipped = gradient(algorithm.loss, batch, own)[mask] == 0
        ratio = (new - old).exp()
        if algorithm.ratio == "sequence":
            ratio = sequence_ratio(new, old, mask)
        logged = clip_fraction(ratio, advantages, mask, *own)
        assert_close(logged, clipped.float().mean())
        if eps in ([0.01, 0.02], [0.1, 0.2], [0.1, 0.15]):
            assert 0 < logged < 1

    def test_have_no_clip_fraction_if_the_clip_has_no_range(self):
        for name, value in (
            ("loss", ["sequence", "sequence", None, "both", "sign"]),
            ("noise", 0.1),
            ("successor", "fspo_200"),
        ):
            assert not runs.clip_is_counted(settings.variant("gspo", [0.1, 0.2], **{name: value}))
