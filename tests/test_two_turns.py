"""evidence/tiny/two_turns.py: a conversation with one advantage per turn."""

import itertools

import pytest
import torch

import train_math
from evidence.tiny import two_turns
from tests.conftest import rollout_of


@pytest.mark.parametrize("answer, told", [
    ("3", "+\n"), ("9", "-\n"), ("7", "=\n"), ("x", "?\n"), ("37", "?\n"),
])
def test_the_reply_says_where_the_digit_is(answer, told):
    assert two_turns.reply(7, answer) == told


def test_each_turn_is_rewarded_by_its_distance():
    turns = two_turns.TurnRewards()
    rewards = turns.reward(None, None, digit=[7, 3], answers=[("7", "4"), ("x", "0")])
    by_turn = torch.tensor([[1, 0], [6 / 9, 6 / 9]])
    assert torch.allclose(turns.rewards, by_turn)
    assert torch.allclose(torch.tensor(rewards), by_turn.mean(0))


@pytest.mark.parametrize("one_advantage", [False, True])
def test_turns_are_compared_within_their_group(one_advantage):
    turns = two_turns.TurnRewards(one_advantage)
    turns.rewards = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]])
    found = turns.advantages(turns.rewards.mean(dim=0), 2)
    of_first = [1, -1, 0, 0]
    of_second = [0, 0, -1, 1]
    if one_advantage:
        of_first = of_second = [1, -1, -1, 1]
    expected = torch.tensor([of_first, of_second]).T / 2**0.5
    assert torch.allclose(found, expected, atol=1e-3)


@pytest.fixture
def responses(monkeypatch, capsys):
    """(rollout, index, micro-batch, its row, advantages of the two turns) of all responses of two
    steps. The rewards are random, because a model with random weights gets none."""
    found = []
    build_minibatches = two_turns.build_minibatches

    def reward(self, prompts, completions, **columns):
        self.rewards = torch.rand(2, len(completions)).round(decimals=1)
        return self.rewards.mean(dim=0).tolist()

    def watched(rollout, advantages, cfg):
        minibatches = build_minibatches(rollout, advantages, cfg)
        assert len(minibatches) == cfg.minibatches
        for batch in itertools.chain(*minibatches):
            for row, i in enumerate(batch.indices):
                found.append((rollout, i, batch, row, advantages[i]))
        return minibatches

    monkeypatch.setattr(two_turns.TurnRewards, "reward", reward)
    monkeypatch.setattr(two_turns, "build_minibatches", watched)
    monkeypatch.setattr(train_math, "ALGORITHMS", train_math.ALGORITHMS.copy())
    rows = two_turns.main(["--max_steps", "2"])
    assert "in turn 2" in capsys.readouterr().out
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["log_ratio_first_max"] == 0
        assert row["sampler_gap"] < 1e-5
        assert 0 < row["clip_fraction"] < 1
    return found


def test_two_steps_have_masks_with_gaps(responses):
    tokenizer = two_turns.tiny_tokenizer()
    for rollout, i, batch, row, _ in responses:
        first, second = rollout.questions[i]["answers"]
        told = two_turns.reply(rollout.questions[i]["digit"], first)
        text = tokenizer.decode(rollout.responses[i], skip_special_tokens=True)
        assert text == first + told + second
        assert tokenizer.decode(rollout.prompts[i]) == "?\n", "the digit is hidden"
        ids = rollout.prompts[i] + rollout.responses[i]
        assert batch.ids[row, :len(ids)].tolist() == ids
        gap = [t for t, is_sampled in enumerate(rollout.is_sampled[i]) if not is_sampled]
        assert len(gap) == 2 and gap[1] == gap[0] + 1
        assert tokenizer.decode([rollout.responses[i][t] for t in gap]) == told
        trained = [False] * len(rollout.prompts[i]) + rollout.is_sampled[i]
        trained += [False] * (batch.ids.shape[1] - len(ids))
        assert batch.mask[row].tolist() == trained[1:]


def test_two_steps_credit_each_turn(responses):
    assert len(responses) == 2 * 320
    opposite = 0
    for rollout, i, batch, row, (first, second) in responses:
        assert batch.advantages.shape == batch.mask.shape
        given = batch.advantages[row][batch.mask[row]]
        n = rollout.is_sampled[i].index(False)
        assert (given[:n] == first).all()
        assert (given[n:] == second).all()
        opposite += (first * second < 0).item()
    assert opposite > 50


def test_advantages_per_turn_leave_out_responses_without_any(tiny):
    """train_math.build_minibatches and equal_reward_groups also accept advantages (B, n)."""
    model, _ = tiny
    cfg = train_math.Settings(device="cpu", group_size=2, minibatches=1)
    advantages = torch.tensor([[0.0, 1], [0, 0], [0, 0], [0, 0]])
    sampled = torch.full((4, 2), -1.0)
    rollout = rollout_of([[3]] * 4, [[4, 5]] * 4, sampled)
    minibatches = train_math.build_minibatches(rollout, advantages, cfg)
    (batch,) = minibatches[0]
    assert batch.indices == [0] and torch.equal(batch.advantages, advantages[:1])
    batch.old_log_probs = train_math.response_log_probs(model, batch, 1.0).detach()
    row = train_math.rollout_metrics(rollout, minibatches, advantages, cfg)
    assert row["equal_reward_groups"] == 0.5
