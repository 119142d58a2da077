"""The recipes of guides/recipes.md with a loss, a sampler or a state of their own.

The gradient of each update agrees with a formula that is written out: one response at a time,
without padding and micro-batches. A run that is killed continues as if it had not been."""
import copy
import os
import re
import subprocess
import sys
import zlib
from unittest import mock

import pytest
import torch

import train_math
from tests.conftest import TOP, block, parity_reward, without_clocks
from tools.logs import read
from tools.warm_up import tiny_tokenizer

PAGE = "guides/recipes.md"
EPS_LOW, EPS_HIGH = 0.01, 0.0133
FLAGS = ["--minibatches", "2", "--max_completion_length", "24", "--micro_batch_tokens", "200",
         "--eps_low", str(EPS_LOW), "--eps_high", str(EPS_HIGH), "--max_steps", "3"]
PLUS, *DIGITS = tiny_tokenizer().convert_tokens_to_ids(list("+0123456789"))


def reward(prompts, completions, answer=None, **columns):
    """A hash, so that two responses hardly ever have the same reward, or 0 for some questions."""
    return [0.0 if prompt.startswith("Ann Ann Ann") else zlib.crc32(text.encode()) % 97 / 97
            for prompt, text in zip(prompts, completions)]


def rewards_of(rollout):
    return reward([row["question"] for row in rollout.questions], rollout.texts)


def with_lora():
    """The recipe for a KL penalty, with the two functions of the recipe for LoRA."""
    of_lora = block(PAGE, "get_peft_model")
    code = block(PAGE, "gspo_kl")
    for name in "load", "reference_log_probs":
        function = rf"(?:@.*\n)?def {name}\(.*\n(?: .*\n)+"
        code = code.replace(re.search(function, code)[0], re.search(function, of_lora)[0])
    return re.search("from peft .*\n", of_lora)[0] + code


RECIPES = {  # the code and its algorithm
    "token_mean": (block(PAGE, "leave_one_out"), "token_mean"),
    "kl": (block(PAGE, "gspo_kl"), "gspo_kl"),
    "lora": (with_lora(), "gspo_kl"),
    "tis": (block(PAGE, "gspo_tis"), "gspo_tis"),
    "off_policy": (block(PAGE, 'user_state["weights"]'), "gspo"),
    "tools": (block(PAGE, "is_sampled"), "gspo"),
    "curriculum": (block(PAGE, "pass_rates"), "gspo"),
    "dynamic": (block(PAGE, "is_equal"), "gspo"),
}


@pytest.fixture
def recipe(command, monkeypatch, tmp_path):
    """A function that runs a recipe and returns its updates. An update is (the model before it, the
    gradients, the rollouts until then). A rollout is (the model before its step, the Rollout)."""
    main = train_math.main
    rollouts = []
    updates = []

    def run(name, folder="run", **more):
        if name == "lora":
            pytest.importorskip("peft")
        code, algorithm = RECIPES[name]
        flags = [*command, *FLAGS, "--output_dir", str(tmp_path / folder)]
        parts = {"reward": reward}
        names = {}
        monkeypatch.setattr(sys, "argv", ["mine.py", *flags])
        monkeypatch.setattr(train_math, "main", lambda **replaced: parts.update(replaced))
        monkeypatch.setattr(train_math, "correctness_reward", reward)
        exec(code, names)
        if name in PREPARE:
            PREPARE[name](names, parts)
        inner = parts.get("sample", train_math.sample)

        def sample(model, tokenizer, questions, group_size, *others):
            before = copy.deepcopy(model)
            rollout = inner(model, tokenizer, questions, group_size, *others)
            if group_size > 1:
                rollouts.append((before, rollout))

            return rollout

        def clip_gradients(model):
            grads = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
            updates.append((copy.deepcopy(model), torch.cat(grads), list(rollouts)))
            return train_math.clip_gradients(model)

        own = {"sample": sample, "clip_gradients": clip_gradients}
        main([*flags, "--algorithm", algorithm], **parts | own | more)
        return updates

    with mock.patch.dict(train_math.ALGORITHMS):
        yield run


def advantage(rollout, i):
    rewards = torch.tensor(rewards_of(rollout))
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
    rewards = rewards_of(rollout)
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
    response, is_sampled = rollout.responses[i], rollout.is_sampled[i]
    for t in range(2, len(response)):
        if is_sampled[t - 2] and response[t - 2] in DIGITS:
            assert not is_sampled[t - 1] and response[t - 1] == PLUS
            assert not is_sampled[t] and response[t] == response[t - 2]
    assert not all(map(all, rollout.is_sampled)), "a tool was called"
    return gspo(model, start, rollout, i)[0]


def smaller_log_probs(names, parts):
    """An engine whose probabilities are 4% smaller: the weights of long responses reach 2."""

    def generate(*arguments):
        responses, log_probs = train_math.generate(*arguments)
        return responses, log_probs - 0.04

    parts["generate"] = generate


def calculator(names, parts):
    """After each digit that the model samples, a tool writes '+' and the digit."""
    generate = names["generate"]
    names["reply"] = lambda turn: [PLUS, turn[-1]] if turn[-1] in DIGITS else []
    parts["generate"] = lambda *others: generate(
        *others[:-1], torch.cat([others[-1], torch.tensor(DIGITS)]))


PREPARE = {"tis": smaller_log_probs, "tools": calculator}


@pytest.mark.parametrize("name, direct", [
    ("token_mean", token_mean), ("off_policy", off_policy),
    *(pytest.param(name, direct, marks=pytest.mark.slow) for name, direct in [
        ("kl", kl), ("lora", kl), ("tis", tis), ("tools", tools)])])
def test_gradients_agree_with_formulas(recipe, name, direct):
    updates = recipe(name)
    assert len(updates) == 6, "each minibatch has a gradient"
    for number, (model, found, rollouts) in enumerate(updates):
        indices = range(8, 16) if number % 2 else range(8)
        loss = sum(direct(model, rollouts, i, indices) for i in indices)
        trained = [p for p in model.parameters() if p.requires_grad]
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_the_curriculum_draws_by_the_pass_rates(recipe, tmp_path):
    """The draws of each step are repeated from the rewards of the steps before it."""
    *_, rollouts = recipe("curriculum")[-1]
    rates = torch.full([26], 0.5)  # 30 questions, of which 4 are held out
    for step, (_, rollout) in enumerate(rollouts, 1):
        torch.manual_seed(step)
        drawn = torch.multinomial(rates * (1 - rates) + 0.01, 4).tolist()
        assert [row["index"] for row in rollout.questions] == [i for i in drawn for _ in range(4)]
        for row, passed in zip(rollout.questions, rewards_of(rollout)):
            rates[row["index"]] += 0.1 * (passed - rates[row["index"]])
    state = torch.load(tmp_path / "run" / "state.pt")
    assert torch.equal(state["user_state"]["pass_rates"], rates)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_killed_run_continues(recipe, name, tmp_path):
    """It is killed after the updates of step 3, and was saved after step 2."""
    def kill(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    recipe(name, "whole")
    with pytest.raises(SystemExit):
        recipe(name, "killed", on_step=kill)
    assert len(torch.load(tmp_path / "killed" / "state.pt")["rows"]) == 3
    recipe(name, "killed")
    folders = [tmp_path / folder for folder in ("whole", "killed")]
    whole, killed = (without_clocks(read(folder / "metrics.jsonl")) for folder in folders)
    assert whole == killed and whole[3]["grad_norm"] > 0
    states = [torch.load(folder / "state.pt") for folder in folders]
    for part in "model", "user_state":
        torch.testing.assert_close(states[0][part], states[1][part], rtol=0, atol=0)


SEVERAL = """
import functools, os, torch, train_math
from tests.conftest import parity_reward
from tests.test_recipes import one_prompt_at_a_time

def on_step(row):
    if row["step"] == int(os.environ.get("KILLED_IN", -1)):
        os._exit(9)

train_math.train = functools.partial(
    train_math.train, on_step=on_step, reward=parity_reward, generate=one_prompt_at_a_time)
""" + block(PAGE, "all_gather_object")


def one_prompt_at_a_time(model, prompts, group_size, max_length, temperature, end_ids):
    """Responses that do not depend on the other prompts of a process."""
    generated = []
    with torch.random.fork_rng():
        for prompt in prompts:
            torch.manual_seed(sum(prompt))
            generated.append(train_math.generate(
                model, [prompt], group_size, max_length, temperature, end_ids))
    responses, log_probs = zip(*generated)
    return sum(responses, []), torch.cat(log_probs)


@pytest.mark.slow
@pytest.mark.parametrize("questions, minibatches", [("4", "2"), ("4", "4"), ("3", "1")])
def test_two_processes_equal_one_and_continue_after_a_kill(
        command, tmp_path, questions, minibatches):
    """With four minibatches, some processes have no response with a gradient. With three questions,
    the shares differ."""
    assert len(block(PAGE, "all_gather_object").splitlines()) <= 60
    flags = [*command, "--prompts_per_step", questions, "--minibatches", minibatches,
             "--learning_rate", "3e-4", "--group_size", "2", "--max_steps", "5"]
    one, two = tmp_path / "one", tmp_path / "two"
    train_math.main([*flags, "--output_dir", str(one)], parity_reward,
                    generate=one_prompt_at_a_time)
    (tmp_path / "mine.py").write_text(SEVERAL)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc_per_node", "2", tmp_path / "mine.py"]
    environment = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}
    for killed in {"KILLED_IN": "3"}, {}:
        done = subprocess.run([*launcher, *flags, "--output_dir", two], capture_output=True,
                              text=True, cwd=TOP, env=environment | killed)
        assert (done.returncode == 0) is not bool(killed), done.stderr
        assert len(torch.load(two / "state.pt")["rows"]) == (3 if killed else 6)
    for mine, other in zip(read(one / "metrics.jsonl"), read(two / "metrics.jsonl"), strict=True):
        names = {"reward", "entropy", "response_length", "equal_reward_groups", "eval_reward"}
        for name in names & mine.keys():
            assert mine[name] == pytest.approx(other[name], rel=1e-4)
    weights, others = (torch.load(folder / "state.pt")["model"] for folder in (one, two))
    for name, values in weights.items():
        torch.testing.assert_close(values, others[name], rtol=0, atol=2e-6)
