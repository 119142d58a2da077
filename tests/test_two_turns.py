"""experiments/two_turns.py: a conversation with one advantage per turn."""

import itertools

import pytest
import torch

import train_math
from common.tiny_model import tiny_tokenizer
from experiments import two_turns
from experiments.two_turns import GuessTwice


@pytest.fixture
def game():
    return GuessTwice(tiny_tokenizer())


def ids(game, text, ends=True):
    return game.tokenizer.encode(text) + [game.tokenizer.eos_token_id] * ends


class TestGuessTwice:
    @pytest.mark.parametrize(
        "text, guess", [("7", 7), ("0", 0), ("77", None), ("", None), ("a", None), ("7a", None)]
    )
    def test_takes_one_digit_as_a_guess(self, game, text, guess):
        assert game.guess(ids(game, text)) == guess

    @pytest.mark.parametrize(
        "answer, reply", [("3", "+\n"), ("9", "-\n"), ("7", "=\n"), ("x", "?\n"), ("37", "?\n")]
    )
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


def test_two_steps_have_masks_with_gaps_and_credit_for_each_turn(monkeypatch, capsys):
    """Any answer counts as a guess here, so that a model with random weights gets rewards."""
    seen = []

    class Watched(GuessTwice):
        def guess(self, answer):
            return answer[0] % 10

        def build_minibatches(self, prompts, responses, advantages, cfg):
            minibatches = super().build_minibatches(prompts, responses, advantages, cfg)
            assert len(minibatches) == cfg.minibatches
            seen.append((prompts, responses, self.turns, self.rewards, minibatches))
            return minibatches

    monkeypatch.setattr(two_turns, "GuessTwice", Watched)
    rows = two_turns.main(["--max_steps", "2"])
    assert "in turn 2" in capsys.readouterr().out
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["log_ratio_first_max"] == 0 and row["sampler_gap"] < 1e-5
        assert 0 < row["clip_fraction"] < 1 and row["grad_norm"] > 0

    both = 0
    for prompts, responses, turns, rewards, minibatches in seen:
        groups = rewards.view(2, -1, 16)
        centred = groups - groups.mean(2, keepdim=True)
        credit = (centred / (groups.std(2, keepdim=True) + 1e-4)).view(2, -1)
        batches = list(itertools.chain(*minibatches))
        indices = sorted(i for batch in batches for i in batch.indices)
        assert indices == credit.any(0).nonzero()[:, 0].tolist(), "each response has a gradient"
        for batch in batches:
            assert batch.advantages.shape == batch.mask.shape
            for row, i in enumerate(batch.indices):
                first, reply, second = turns[i]
                assert responses[i] == first + second and len(reply) == 2
                text = prompts[i][1:] + first + reply + second
                assert batch.ids[row, :len(text)].tolist() == text, "without the hidden digit"
                trained = [False] * len(prompts[i][1:]) + [True] * len(first)
                trained += [False] * len(reply) + [True] * len(second)
                trained += [False] * (batch.mask.shape[1] + 1 - len(text))
                assert batch.mask[row].tolist() == trained[1:]
                given = batch.advantages[row][batch.mask[row]]
                n = len(first)
                assert torch.allclose(given[:n], credit[0, i], atol=1e-5)
                assert torch.allclose(given[n:], credit[1, i], atol=1e-5)
                both += (credit[0, i] * credit[1, i] < 0).item()
    assert both > 50, "the turns of many responses have opposite advantages"


def test_advantages_per_turn_leave_out_responses_without_any(tiny):
    """train_math.build_minibatches and the share of equal groups take advantages (B, n), too."""
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
