"""The recipes of guides/own_task.md with a loss, a sampler or a state of their own.

The gradient of each update agrees with a formula that is written out: one response at a time,
without padding and micro-batches. A run that is killed continues as if it had not been."""
import copy
import signal
import sys
from importlib.util import find_spec

import pytest
import torch

import train_math
from common.logs import read
from common.tiny_model import tiny_tokenizer
from tests.conftest import block, parity_reward, run_code, without_clocks

PAGE = "guides/own_task.md"
EPS_LOW, EPS_HIGH = 0.01, 0.0133
FLAGS = ["--minibatches", "2", "--max_completion_length", "24", "--micro_batch_tokens", "200",
         "--eps_low", str(EPS_LOW), "--eps_high", str(EPS_HIGH), "--max_steps", "3"]
PLUS, *DIGITS = tiny_tokenizer().convert_tokens_to_ids(list("+0123456789"))


def with_lora():
    """The recipe for a KL penalty, with the two functions that the recipe for LoRA replaces."""
    *definitions, call = block(PAGE, "gspo_kl").rsplit("train_math.main(", 1)
    return "".join(definitions) + block(PAGE, "get_peft_model") + "train_math.main(" + call


RECIPES = {  # the code, its algorithm, and whether its micro-batches hold all responses
    "token_mean": (block(PAGE, "leave_one_out"), "token_mean", True),
    "kl": (block(PAGE, "gspo_kl"), "gspo_kl", True),
    "lora_kl": (with_lora(), "gspo_kl", True),
    "tis": (block(PAGE, "gspo_tis"), "gspo_tis", False),
    "off_policy": (block(PAGE, 'user_state["weights"]'), "gspo", False),
    "tools": (block(PAGE, "is_sampled"), "gspo", False),
    "curriculum": (block(PAGE, "pass_rates"), "gspo", False),
}
NEEDS_PEFT = pytest.mark.skipif(not find_spec("peft"), reason="needs peft")
NAMES = [pytest.param(name, marks=NEEDS_PEFT) if name == "lora_kl" else name for name in RECIPES]


@pytest.fixture
def recipe(command, monkeypatch, tmp_path):
    """A function that runs a recipe: (name, prepare) -> its updates. `prepare` may change what the
    block defines and its parts. An update is (the responses that it uses, the model before it, the
    gradients, the rollouts until then). A rollout is (the model before its step, the Rollout)."""
    algorithms = dict(train_math.ALGORITHMS)
    main = train_math.main
    clip = torch.nn.utils.clip_grad_norm_
    rollouts = []
    updates = []

    def run(name, prepare=lambda names, parts: None):
        code, algorithm, keeps_all = RECIPES[name]
        flags = [*command, *FLAGS, "--output_dir", str(tmp_path / "run"), "--algorithm", algorithm]
        parts = {"reward": parity_reward}
        names = {}
        monkeypatch.setattr(sys, "argv", ["mine.py", *flags[:-2]])
        monkeypatch.setattr(train_math, "main", lambda **replaced: parts.update(replaced))
        exec(code, names)
        prepare(names, parts)
        inner = parts.get("sample", train_math.sample)

        def sample(model, tokenizer, questions, group_size, *others):
            before = copy.deepcopy(model)
            rollout = inner(model, tokenizer, questions, group_size, *others)
            if group_size > 1:
                rollouts.append((before, rollout))
                monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recording(model))
            return rollout

        def recording(model):
            _, rollout = rollouts[-1]
            rewards = parity_reward(None, rollout.texts)
            used = [i for i in (range(8), range(8, 16)) if keeps_all or has_gradient(rewards, i)]
            used = iter(used)

            def record(parameters, most):
                grads = [p.grad.clone() for p in model.parameters() if p.requires_grad]
                updates.append((next(used), copy.deepcopy(model), grads, list(rollouts)))
                return clip(model.parameters(), most)

            return record

        main(flags, **parts | {"sample": sample})
        return updates

    yield run
    train_math.ALGORITHMS.clear()
    train_math.ALGORITHMS.update(algorithms)


def has_gradient(rewards, indices):
    groups = [rewards[i:i + 4] for i in indices[::4]]
    return any(len(set(group)) > 1 for group in groups)


def advantage(rollout, i):
    rewards = torch.tensor(parity_reward(None, rollout.texts))
    group = rewards[i // 4 * 4:i // 4 * 4 + 4]
    return (rewards[i] - group.mean()) / (group.std() + 1e-4)


def log_probs(model, rollout, i):
    """The log-probs of the sampled tokens of one response."""
    prompt, response = rollout.prompts[i], rollout.responses[i]
    ids = torch.tensor([prompt + response])
    table = model(input_ids=ids).logits[0, len(prompt) - 1:-1].log_softmax(-1)
    each = table[range(len(response)), response]
    return each[torch.tensor(rollout.is_sampled[i])]


def clipped(ratio, value):
    return torch.minimum(ratio * value, ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH) * value)


def gspo(model, old_model, rollout, i):
    """The term of one response in GSPO's loss, and the log-probs of its tokens."""
    new = log_probs(model, rollout, i)
    old = log_probs(old_model, rollout, i).detach()
    return -clipped((new - old).mean().exp(), advantage(rollout, i)) / 8, new, old


def token_mean(model, rollouts, i, indices):
    start, rollout = rollouts[-1]
    rewards = parity_reward(None, rollout.texts)
    others = [rewards[j] for j in range(i // 4 * 4, i // 4 * 4 + 4) if j != i]
    ratio = (log_probs(model, rollout, i) - log_probs(start, rollout, i).detach()).exp()
    tokens = sum(len(rollout.responses[j]) for j in indices)
    return -clipped(ratio, rewards[i] - sum(others) / 3).sum() / tokens


def kl(model, rollouts, i, indices):
    start, rollout = rollouts[-1]
    first, _ = rollouts[0]  # the pre-trained model, also with LoRA, whose matrices B begin with 0
    loss, new, _ = gspo(model, start, rollout, i)
    difference = log_probs(first, rollout, i).detach() - new
    return loss + 0.1 * (difference.exp() - 1 - difference).mean() / 8


def tis(model, rollouts, i, indices):
    start, rollout = rollouts[-1]
    loss, _, old = gspo(model, start, rollout, i)
    lengths = [len(response) for response in rollout.responses]
    assert min(lengths) * 0.04 < 0.69 < max(lengths) * 0.04, "some weights are truncated"
    weight = (old.sum() - rollout.log_probs[i, :len(old)].sum()).exp().item()
    return loss * min(weight, 2)


def off_policy(model, rollouts, i, indices):
    old_model, _ = rollouts[-2:][0]  # before the last step
    return gspo(model, old_model, rollouts[-1][1], i)[0]


def tools(model, rollouts, i, indices):
    start, rollout = rollouts[-1]
    assert not all(map(all, rollout.is_sampled))
    response = rollout.responses[i]
    for t in range(2, len(response)):
        if rollout.is_sampled[i][t - 2] and response[t - 2] in DIGITS:
            assert rollout.is_sampled[i][t - 1:t + 1] == [False, False]
            assert response[t - 1:t + 1] == [PLUS, response[t - 2]]
    return gspo(model, start, rollout, i)[0]


def other_log_probs(names, parts):
    """An engine whose probabilities are 4% smaller: the weights of long responses reach 2."""

    def generate(*arguments):
        responses, log_probs = train_math.generate(*arguments)
        return responses, log_probs - 0.04

    parts["generate"] = generate


def calculator(names, parts):
    """After each digit that the model samples, a tool writes '+' and the digit."""
    names["reply"] = lambda turn: [PLUS, turn[-1]] if turn[-1] in DIGITS else []
    generate = names["generate"]

    def with_calls(*others):
        *others, end_ids = others
        return generate(*others, torch.cat([end_ids, torch.tensor(DIGITS)]))

    parts["generate"] = with_calls


@pytest.mark.parametrize("name, direct, prepare", [
    ("token_mean", token_mean, None),
    ("kl", kl, None),
    pytest.param("lora_kl", kl, None, marks=NEEDS_PEFT),
    ("tis", tis, other_log_probs),
    ("off_policy", off_policy, None),
    ("tools", tools, calculator),
])
def test_gradients_agree_with_formulas(recipe, name, direct, prepare):
    updates = recipe(name, prepare) if prepare else recipe(name)
    assert len(updates) >= 5
    for indices, model, grads, rollouts in updates:
        loss = sum(direct(model, rollouts, i, indices) for i in indices)
        trained = [p for p in model.parameters() if p.requires_grad]
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        found = torch.cat([g.flatten() for g in grads])
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_the_curriculum_draws_by_the_pass_rates(recipe, monkeypatch, tmp_path):
    """The draws of each step are repeated from the rewards of the steps before it."""
    monkeypatch.setattr(train_math, "correctness_reward", lambda prompts, completions, answer:
                        parity_reward(prompts, completions))
    *_, rollouts = recipe("curriculum")[-1]
    rates = torch.full([26], 0.5)  # 30 questions, of which 4 are held out
    for step, (_, rollout) in enumerate(rollouts, 1):
        torch.manual_seed(step)
        drawn = torch.multinomial(rates * (1 - rates) + 0.01, 4).tolist()
        assert [row["index"] for row in rollout.questions] == [i for i in drawn for _ in range(4)]
        for row, passed in zip(rollout.questions, parity_reward(None, rollout.texts)):
            rates[row["index"]] += 0.1 * (passed - rates[row["index"]])
    state = torch.load(tmp_path / "run" / "state.pt")
    assert torch.equal(state["user_state"]["pass_rates"], rates)


BEFORE = """
import os, signal, train_math
from tests.conftest import parity_reward
from tests.test_recipes import calculator

main = train_math.main
train_math.correctness_reward = lambda prompts, texts, answer: parity_reward(prompts, texts)

def on_step(row):
    if row["step"] == {killed_in}:
        os.kill(os.getpid(), signal.SIGKILL)

def with_kill(**parts):
    parts = dict(reward=parity_reward) | parts
    if "reply" in globals():
        calculator(globals(), parts)
    main(on_step=on_step, **parts)

train_math.main = with_kill
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_continues(name, command, tmp_path):
    """The process is killed after the updates of step 3. The run is saved after step 2."""
    code, algorithm, _ = RECIPES[name]
    found = []
    for folder, killed_in in ("whole", None), ("killed", 3), ("killed", None):
        status, _, errors = run_code(
            BEFORE.format(killed_in=killed_in) + code, *command, *FLAGS, "--algorithm", algorithm,
            "--max_completion_length", "12", "--output_dir", tmp_path / folder)
        assert status == (-signal.SIGKILL if killed_in else 0), errors
        found.append((without_clocks(read(tmp_path / folder / "metrics.jsonl")),
                      torch.load(tmp_path / folder / "state.pt")))
    (whole, state), (_, killed_state), (resumed, resumed_state) = found
    assert [row["step"] for row in killed_state["rows"]] == [0, 1, 2]
    assert whole == resumed and whole[3]["grad_norm"] > 0
    for part in "model", "user_state":
        torch.testing.assert_close(state[part], resumed_state[part], rtol=0, atol=0)
