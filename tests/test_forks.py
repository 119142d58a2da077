"""Five forks of the script as users write them: one file each, without a patch or a global."""

import copy
import http.server
import io
import json
import threading
from pathlib import Path

import pytest
import torch

import train_math
from tests.conftest import parity_reward, settings, sums
from tests.forks import dr_grpo, dynamic_filtering, http_engine, kl_penalty, length_penalty

FORKED = {name: train_math.ALGORITHMS.pop(name) for name in ("dr_grpo", "gspo_kl")}
FORKS = sorted((Path(__file__).parent / "forks").glob("[a-z]*.py"))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The algorithms of the forks are there in these tests alone."""
    for name, algorithm in FORKED.items():
        monkeypatch.setitem(train_math.ALGORITHMS, name, algorithm)


@pytest.mark.parametrize("path", FORKS, ids=lambda path: path.stem)
def test_a_fork_is_short(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 34  # 30 and the docstrings


def test_dr_grpo_divides_by_the_length_limit(fresh):
    cfg = settings(algorithm="dr_grpo", max_completion_length=7)
    batch = train_math.MicroBatch([[5], [5]], [[6, 7], [8]], [0, 1], "cpu", torch.tensor([1.0, -2]))
    old = torch.zeros(2, 2)
    new = torch.tensor([[0.1, 0.0], [0.0, 5.0]])
    loss = dr_grpo.dr_grpo_loss(
        new, old, batch.advantages, batch.mask, 0.2, 0.2, denominator=2, batch=batch, cfg=cfg)
    expected = -(1.1051709 + 1 - 2) / (2 * 7)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert torch.allclose(dr_grpo.centred(torch.tensor([1.0, 0, 3, 3]), 2),
                          torch.tensor([0.5, -0.5, 0, 0]))
    rows = train_math.train(cfg, *fresh, sums(8), reward=parity_reward)
    assert rows[-1]["grad_norm"] > 0


def test_a_reward_gets_lengths_and_whether_a_response_was_cut(fresh):
    seen = []

    def reward(completions, completion_ids, cut, **more):
        seen.append((completions, completion_ids, cut))
        return length_penalty.reward(more.pop("prompts"), completions, completion_ids, cut, **more)

    cfg = settings(max_steps=2, max_completion_length=60)
    rows = train_math.train(cfg, *fresh, sums(8), sums(2), reward=reward)
    for texts, ids, cut in seen:
        assert texts == fresh[1].batch_decode(ids, skip_special_tokens=True)
        assert cut == [len(response) == cfg.max_completion_length for response in ids]
    assert any(any(cut) for _, _, cut in seen) and not all(all(cut) for _, _, cut in seen)
    digits = [sum(letter.isdigit() for letter in text) for text in seen[-2][0]]
    assert rows[2]["digits"] == sum(digits) / len(digits)
    assert "eval_digits" in rows[2]


def test_a_filter_leaves_only_groups_with_different_rewards(fresh):
    spare = sums(30)
    sample = dynamic_filtering.filtering(spare, parity_reward, attempts=8)
    cfg = settings(max_steps=3, group_size=2)
    rows = train_math.train(cfg, *fresh, sums(8), reward=parity_reward)
    filtered = train_math.train(
        cfg, copy.deepcopy(fresh[0]), fresh[1], sums(8), sums(2), reward=parity_reward,
        sample=sample)
    assert max(row["equal_reward_groups"] for row in rows[1:]) > 0
    assert all(row["equal_reward_groups"] == 0 for row in filtered[1:])
    assert all(row["log_ratio_first_max"] == 0 for row in filtered[1:])


def test_the_filter_finds_equal_rewards_whose_standard_deviation_is_rounded(fresh):
    """The standard deviation of eight rewards of 0.1 is 8e-9 in float32."""
    spare = [{"question": "spare?", "answer": "1"}]
    sample = dynamic_filtering.filtering(
        spare, lambda completions, completion_ids, **columns: [0.1] * len(completions))
    rollout = sample(*fresh, sums(2), 8, 1.0, settings())
    assert rollout.questions == spare * 2


def test_rewards_belong_to_the_questions_that_a_sample_of_the_user_has_chosen(fresh):
    asked = []

    def reward(prompts, completions, answer, **columns):
        asked.append(answer)
        return parity_reward(prompts, completions)

    def sample(model, tokenizer, questions, *arguments, **parts):
        others = [{"question": "other?", "answer": "other"}] * len(questions)
        rollout = train_math.sample(model, tokenizer, others, *arguments, **parts)
        return rollout._replace(questions=others)

    train_math.train(settings(max_steps=1), *fresh, sums(8), reward=reward, sample=sample)
    assert asked == [["other"] * 16]


def test_a_kl_term_reaches_responses_with_advantage_0(fresh):
    """All rewards are equal, so only the KL term has a gradient: none at the reference model."""
    model, tokenizer = fresh
    reference = copy.deepcopy(model)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.5)
    norms = []
    for start in model, moved:
        rows = train_math.train(
            settings(algorithm="gspo_kl", max_steps=1, minibatches=1), start, tokenizer, sums(8),
            reward=lambda completions, **columns: [1.0] * len(completions),
            build_minibatches=kl_penalty.with_reference(reference))
        norms.append(rows[1]["grad_norm"])
        assert rows[1]["equal_reward_groups"] == 1
    assert norms[0] < 1e-6 < norms[1]


class Engine(http.server.BaseHTTPRequestHandler):
    """A small server that samples in bf16 with the weights that it was sent."""

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        answer = b""
        if self.path == "/weights":
            if self.server.takes_weights:
                state = torch.load(io.BytesIO(data))
                self.server.model.load_state_dict(state)
                self.server.model.to(self.server.dtype)
        else:
            asked = json.loads(data)
            responses, log_probs = train_math.rollout(
                self.server.model, asked["prompts"], asked["n"], asked["max_length"],
                asked["temperature"], torch.tensor(asked["end_ids"]))
            rows = [row[:len(r)].tolist() for r, row in zip(responses, log_probs)]
            answer = json.dumps({"responses": responses, "log_probs": rows}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def engine(fresh):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.model = copy.deepcopy(fresh[0])
    server.dtype = torch.float32
    server.takes_weights = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def test_an_engine_samples_with_the_present_weights(fresh, engine):
    rollout = http_engine.engine_at(engine.url)
    cfg = settings(max_steps=3)
    rows = train_math.train(cfg, *fresh, sums(8), reward=parity_reward, rollout=rollout)
    assert all(row["sampler_gap"] < 1e-5 for row in rows[1:])
    assert all(row["log_ratio_first_max"] == 0 for row in rows[1:])


def test_the_gap_shows_an_engine_with_stale_weights(fresh, engine):
    engine.takes_weights = False
    rollout = http_engine.engine_at(engine.url)
    cfg = settings(max_steps=3)
    rows = train_math.train(cfg, *fresh, sums(8), reward=parity_reward, rollout=rollout)
    assert rows[1]["sampler_gap"] < 1e-5 and rows[3]["sampler_gap"] > 1e-3


def test_an_engine_in_half_precision_passes_the_trial(fresh, engine, monkeypatch):
    engine.dtype = torch.bfloat16
    rollout = http_engine.engine_at(engine.url)
    arguments = (*fresh, sums(4), settings())
    train_math.check_model(*arguments, reward=parity_reward, rollout=rollout)

    def another_model(model, *arguments):
        responses, log_probs = rollout(model, *arguments)
        return responses, log_probs - 1

    with pytest.raises(ValueError, match="eight sampled tokens differ"):
        train_math.check_model(*arguments, reward=parity_reward, rollout=another_model)
