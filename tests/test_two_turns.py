"""experiments/tiny/two_turns.py: a conversation with one advantage per turn."""

import itertools

import pytest
import torch

import train_math
from common.tiny_model import tiny_tokenizer
from experiments.tiny import two_turns
from experiments.tiny.two_turns import GuessTwice


@pytest.fixture
def game():
    return GuessTwice(tiny_tokenizer())


def ids(game, text, ends=True):
    return game.tokenizer.encode(text) + [game.tokenizer.eos_token_id] * ends


class TestGuessTwice:
    @pytest.mark.parametrize("answer, reply", [
        ("3", "+\n"),
        ("9", "-\n"),
        ("7", "=\n"),
        ("x", "?\n"),
        ("37", "?\n"),
    ])
    def test_replies_where_the_digit_is(self, game, answer, reply):
        (hidden,) = ids(game, "7", ends=False)
        assert game.tokenizer.decode(game.reply(hidden, ids(game, answer))) == reply

    def test_rewards_each_turn_by_its_distance(self, game):
        game.sampled = [(ids(game, "7"), [], ids(game, "4")), (ids(game, "x"), [], ids(game, "0"))]
        rewards = game.reward(None, None, digit=[7, 3])
        by_turn = torch.tensor([[1, 0], [6 / 9, 6 / 9]])
        assert torch.allclose(game.rewards, by_turn)
        assert torch.allclose(torch.tensor(rewards), by_turn.mean(0))
        assert not game.sampled, "the next rollout begins with an empty list"

    @pytest.mark.parametrize("one_advantage", [False, True])
    def test_compares_turns_within_their_group(self, one_advantage):
        game = GuessTwice(tiny_tokenizer(), one_advantage)
        game.rewards = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]])
        found = game.group_advantages(game.rewards.mean(dim=0), 2)
        of_first = [1, -1, 0, 0]
        of_second = [0, 0, -1, 1]
        if one_advantage:
            of_first = of_second = [1, -1, -1, 1]
        expected = torch.tensor([of_first, of_second]).T / 2**0.5
        assert torch.allclose(found, expected, atol=1e-3)


class Watched(GuessTwice):
    """Any answer counts as a guess, so that a model with random weights gets rewards. Keeps what
    goes into and out of build_minibatches, once per step."""

    steps = []

    def guess(self, answer):
        return answer[0] % 10

    def build_minibatches(self, prompts, responses, advantages, cfg):
        minibatches = super().build_minibatches(prompts, responses, advantages, cfg)
        assert len(minibatches) == cfg.minibatches
        batches = list(itertools.chain(*minibatches))
        self.steps.append((prompts, responses, self.turns, self.rewards, batches))
        return minibatches


@pytest.fixture
def steps(monkeypatch, capsys):
    """The records of Watched for two steps."""
    monkeypatch.setattr(two_turns, "GuessTwice", Watched)
    monkeypatch.setattr(Watched, "steps", [])
    rows = two_turns.main(["--max_steps", "2"])
    assert "in turn 2" in capsys.readouterr().out
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["log_ratio_first_max"] == 0
        assert row["sampler_gap"] < 1e-5
        assert 0 < row["clip_fraction"] < 1
    return Watched.steps


def test_two_steps_have_masks_with_gaps(steps):
    for prompts, responses, turns, _, batches in steps:
        for batch in batches:
            for row, i in enumerate(batch.indices):
                first, reply, second = turns[i]
                shown = prompts[i][1:]  # without the hidden digit
                text = shown + first + reply + second
                assert responses[i] == first + second
                assert len(reply) == 2
                assert batch.ids[row, :len(text)].tolist() == text
                trained = [False] * len(shown)
                trained += [True] * len(first)
                trained += [False] * len(reply)
                trained += [True] * len(second)
                trained += [False] * (batch.ids.shape[1] - len(text))
                assert batch.mask[row].tolist() == trained[1:]


def test_two_steps_credit_each_turn(steps):
    opposite = 0
    for _, _, turns, rewards, batches in steps:
        groups = rewards.view(2, -1, 16)
        centred = groups - groups.mean(2, keepdim=True)
        scale = groups.std(2, keepdim=True) + 1e-4
        credit = (centred / scale).view(2, -1)
        indices = sorted(i for batch in batches for i in batch.indices)
        assert indices == credit.any(0).nonzero()[:, 0].tolist()
        for batch in batches:
            assert batch.advantages.shape == batch.mask.shape
            for row, i in enumerate(batch.indices):
                given = batch.advantages[row][batch.mask[row]]
                n = len(turns[i][0])
                assert torch.allclose(given[:n], credit[0, i], atol=1e-5)
                assert torch.allclose(given[n:], credit[1, i], atol=1e-5)
                opposite += (credit[0, i] * credit[1, i] < 0).item()
    assert opposite > 50


def test_advantages_per_turn_leave_out_responses_without_any(tiny):
    """train_math.build_minibatches and equal_reward_groups also accept advantages (B, n)."""
    model, _ = tiny
    cfg = train_math.Settings(device="cpu", group_size=2, minibatches=1)
    advantages = torch.tensor([[0.0, 1], [0, 0], [0, 0], [0, 0]])
    responses = [[4, 5]] * 4
    minibatches = train_math.build_minibatches([[3]] * 4, responses, advantages, cfg)
    (batch,) = minibatches[0]
    assert batch.indices == [0] and torch.equal(batch.advantages, advantages[:1])
    batch.old_log_probs = train_math.response_log_probs(model, batch, 1.0).detach()
    sampled = batch.old_log_probs[:1].repeat(4, 1)
    rollout = train_math.Rollout([[3]] * 2, responses, [""] * 4, sampled)
    row = train_math.rollout_metrics(rollout, minibatches, advantages, cfg)
    assert row["equal_reward_groups"] == 0.5
