"""The recipes of guides/, beyond that their blocks run: what they compute is right."""
import copy
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import gspo
import train_math
from common.logs import read
from tests.conftest import parity_reward, run, settings, sums
from tests.test_forks import engine  # noqa: F401, a fixture

GUIDES = Path(__file__).resolve().parents[1] / "guides"


def block(page, containing):
    """The one ```python or ```py block of this page that contains this text."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    found = [code for code in re.findall(r"```py(?:thon)?\n(.*?)```", text, re.DOTALL)
             if containing in code]
    (code,) = found
    return code


def names_of(page, containing, **names):
    """What the block defines, without its last call of train_math.main."""
    code = re.sub(r"^train_math\.main\(.*\n", "", block(page, containing), flags=re.MULTILINE)
    exec(code, names)
    return names


# ---- own_task.md ---------------------------------------------------------------------------------


def test_several_rewards_are_logged(fresh):
    reward = names_of("own_task.md", "log_metric")["reward"]
    questions = [{"question": f"{i}?", "answer": str(i)} for i in range(8)]
    rows = train_math.train(settings(max_steps=1), *fresh, questions, questions[:2], reward=reward)
    for row, prefix in (rows[0], "eval_"), (rows[1], ""), (rows[1], "eval_"):
        mean = row[f"{prefix}accuracy"] + 0.2 * row[f"{prefix}short"]
        assert row[f"{prefix}reward"] == pytest.approx(mean) and row[f"{prefix}short"] == 1


@pytest.mark.parametrize("text", [r"\boxed{5 + 3}", r"\boxed{7!}", r"\boxed{42 000}", "#### 5-3"])
def test_the_default_reward_refuses_what_the_page_says(text):
    assert f"`{text}`" in (GUIDES / "own_task.md").read_text(encoding="utf-8")
    assert train_math.extract_answer(text) is None


def test_math_verify_accepts_fractions():
    pytest.importorskip("math_verify")
    reward = names_of("own_task.md", "math_verify")["reward"]
    texts = [r"so \boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{1/3}", r"\boxed{5 + 3}", ""]
    golds = ["1/2", r"\frac{1}{2}", "1/2", "5", "1/2"]
    assert reward(texts, texts, golds) == [1, 1, 0, 0, 0]
    assert reward([""], [r"\boxed{42\,000}"], ["42000"]) == [0]  # the page says so


@pytest.fixture
def system_run(world, command, tmp_path, monkeypatch):
    """The folder runs/math of a run with a system prompt. The chat template shows everything."""
    model, tokenizer = train_math.load(str(world / "model"), "cpu")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}")
    for part in model, tokenizer:
        part.save_pretrained(tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "math"
    flags = ["--model", str(tmp_path / "start"), "--system", "Be brief.", "--max_steps", "1"]
    run(command, folder, *flags, reward=train_math.correctness_reward)
    return folder


def test_the_recipe_for_evaluation_repeats_the_evaluation_of_the_run(system_run, capsys):
    row = names_of("own_task.md", "train_math.evaluate(")["row"]
    of_run = read(system_run / "metrics.jsonl")[-1]
    assert row["eval_reward"] == of_run["eval_reward"] and row["eval_questions"] == 4
    assert row["eval_results"] == read(system_run / "eval_1.jsonl")
    assert capsys.readouterr().out.splitlines()[-1] == str(row["eval_reward"])


def test_the_recipe_for_asking_uses_the_prompt_of_the_training(system_run, monkeypatch):
    prompts = []
    template = PreTrainedTokenizerBase.apply_chat_template

    def recording(*arguments, **more):
        encoded = template(*arguments, **more)
        prompts.append(encoded["input_ids"].tolist())
        return encoded

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "apply_chat_template", recording)
        tokenizer = names_of("own_task.md", "pipeline(")["ask"].tokenizer
    saved = json.loads((system_run / "metrics.jsonl").read_text().splitlines()[0])["settings"]
    del saved["questions"]
    cfg = train_math.Settings(**saved)
    of_training = train_math.encode_prompts(tokenizer, [{"question": "What is 12 * 12?"}], cfg)
    assert prompts == [of_training]
    shown = tokenizer.decode(of_training[0])
    assert all(words in shown for words in ("Be brief.", "reason step by step", "False"))


def test_an_optimizer_keeps_the_learning_rate_of_its_other_groups(fresh):
    weights = list(fresh[0].parameters())
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    train_math.train(settings(max_steps=2), *fresh, sums(8), reward=parity_reward,
                     optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(1e-4), 0.25]


@pytest.fixture
def kl(command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", *command])
    monkeypatch.setattr(train_math, "ALGORITHMS", dict(train_math.ALGORITHMS))
    return names_of("own_task.md", "gspo_kl")


def test_the_kl_penalty_is_the_formula(kl):
    batch = train_math.MicroBatch([[5], [5]], [[6, 7], [8]], [0, 1], "cpu", torch.tensor([1.0, 0]))
    batch.reference_log_probs = torch.tensor([[-1.0, -2.0], [-1.5, 0]])
    new = torch.tensor([[-1.2, -1.0], [-1.0, -3.0]])  # the last one is padding
    loss = kl["loss_with_kl"](new, new, batch.advantages, batch.mask, 3e-4, 4e-4, denominator=2,
                              batch=batch, cfg=None)
    first = (1.2214028 - 1 - 0.2) / 2 + (0.3678794 - 1 + 1) / 2  # e^d - 1 - d at d = 0.2 and -1
    second = 0.6065307 - 1 + 0.5  # d = -0.5
    assert loss.item() == pytest.approx(-1 / 2 + 0.1 * (first + second) / 2, abs=1e-6)


def test_the_kl_penalty_reaches_all_responses(kl, fresh):
    """All rewards are equal, and there is a gradient unless the policy is the reference."""
    sizes = []

    def build_minibatches(*arguments):
        minibatches = kl["build_minibatches"](*arguments)
        sizes.append(sum(len(batch.indices) for batch in itertools.chain(*minibatches)))
        return minibatches

    norms = []
    for factor in 1, 1.5:
        model = copy.deepcopy(kl["reference"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        rows = train_math.train(
            settings(algorithm="gspo_kl", max_steps=1, minibatches=1), model, fresh[1], sums(8),
            reward=lambda completions, **columns: [1.0] * len(completions),
            build_minibatches=build_minibatches)
        norms.append(rows[1]["grad_norm"])
    assert norms[0] < 1e-6 < 1e-3 < norms[1]
    assert sizes == [16, 16]


def test_dynamic_sampling_prefers_groups_with_a_gradient(fresh, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", *command])
    sample = names_of("own_task.md", "is_equal")["sample"]
    seen = []

    def reward(prompts, completions, cut, **columns):
        """0.1 or 0.3, whose equal groups have a standard deviation that is rounded to 1e-8."""
        seen.append(list(zip(prompts, completions)))
        odd = parity_reward(prompts, completions)
        return [0.3 if value else 0.1 for value in odd]

    cfg = settings(max_steps=6, group_size=3)
    equal = []
    for parts in {}, {"sample": sample}:
        seen.clear()
        model = copy.deepcopy(fresh[0])
        rows = train_math.train(cfg, model, fresh[1], sums(8), sums(2), reward=reward, **parts)
        equal.append(sum(row["equal_reward_groups"] for row in rows[1:]) / 6)
        assert all(row["log_ratio_first_max"] in (0, None) for row in rows[1:])
    assert [len(prompts) for prompts in seen[:3]] == [2, 24, 12]  # the first is an evaluation
    assert set(seen[2]) <= set(seen[1])
    assert equal[1] < equal[0] / 2


def test_the_recipe_for_an_engine_sends_the_present_weights(fresh, engine):  # noqa: F811
    rollout = names_of("own_task.md", "engine_at")["engine_at"](engine.url)
    cfg = settings(max_steps=3)
    train_math.check_model(*fresh, sums(4), cfg, reward=parity_reward, rollout=rollout)
    rows = train_math.train(cfg, *fresh, sums(8), sums(2), reward=parity_reward, rollout=rollout)
    assert all(row["sampler_gap"] < 1e-6 for row in rows[1:])
    engine.takes_weights = False
    rows = train_math.train(cfg, *fresh, sums(8), reward=parity_reward, rollout=rollout)
    assert rows[3]["sampler_gap"] > 1e-3


# ---- paste.md ------------------------------------------------------------------------------------


def test_the_output_of_generate_gets_the_log_probs_of_single_texts(tiny):
    model, tokenizer = tiny
    texts = ["Ann has 3 figs?", "Bob", "Eve has 12?"]
    names = names_of("paste.md", "def padded_on_the_right", model=model, tokenizer=tokenizer)
    code = block("paste.md", "model.generate(").replace("512", "40")
    names |= {"texts": texts, "group_size": 4}
    found = []
    for penalty in None, 5.0:  # some checkpoints have one
        model.generation_config.repetition_penalty = penalty
        torch.manual_seed(0)
        exec(code, names)
        found.append(names["ids"])
    assert torch.equal(*found)
    ids, mask = names["ids"], names["mask"]
    log_probs_of = names_of("paste.md", "def update")["log_probs_of"]
    with torch.no_grad():
        together = log_probs_of(model, ids)
        lengths = mask.sum(1).tolist()
        assert min(lengths) < 40 == max(lengths)
        for i, length in enumerate(lengths):
            prompt = tokenizer(texts[i // 4]).input_ids
            whole = ids[i, :len(prompt) + length]
            assert whole[:len(prompt)].tolist() == prompt
            assert (whole[-1] == 1) == (length < 40) and 1 not in whole[len(prompt):-1]
            alone = log_probs_of(model, whole[None])[0, len(prompt) - 1:]
            assert torch.allclose(together[i][mask[i]], alone, atol=1e-5)


def test_without_it_the_log_probs_are_wrong(tiny):
    model, tokenizer = tiny
    log_probs_of = names_of("paste.md", "def update")["log_probs_of"]
    inputs = tokenizer(["Ann has 3 figs?", "Bob"], return_tensors="pt", padding=True,
                       padding_side="left")
    ids = torch.cat([inputs.input_ids, torch.full((2, 4), 20)], dim=1)
    with torch.no_grad():
        wrong = log_probs_of(model, ids)[1, -4:]
        alone = log_probs_of(model, ids[1:, inputs.attention_mask[1].argmax():])[0, -4:]
    assert (wrong - alone).abs().mean() > 0.01


@pytest.fixture
def responses():
    """Lengths, packed log-probs, old log-probs (both (N,)) and advantages. Some are clipped."""
    torch.manual_seed(0)
    lengths = [3, 1, 5, 2]
    old = -torch.rand(sum(lengths), dtype=torch.float64)
    new = old + 1e-3 * torch.randn(len(old), dtype=torch.float64)
    return lengths, new, old, torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)


def unpacked(x, lengths):
    code = block("paste.md", "x.split(lengths)")
    names = {"torch": torch, "x": x, "lengths": lengths}
    exec(code, names)
    return names["log_probs"]


def clipped(ratio, advantage):
    return min(ratio * advantage, min(max(ratio, 1 - 3e-4), 1 + 4e-4) * advantage)


def test_packed_sequences(responses):
    lengths, new, old, advantages = responses
    mask = unpacked(torch.ones_like(new, dtype=torch.bool), lengths)
    loss = gspo.gspo_loss(unpacked(new, lengths), unpacked(old, lengths), advantages, mask)
    expected = 0
    start = 0
    for length, advantage in zip(lengths, advantages.tolist()):
        part = slice(start, start + length)
        ratio = ((new[part] - old[part]).sum() / length).exp().item()
        expected -= clipped(ratio, advantage) / len(lengths)
        start += length
    assert loss.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["gspo_loss", "grpo_loss"])
def test_the_mean_over_all_tokens(responses, name):
    lengths, new, old, advantages = responses
    code = block("paste.md", "denominator=tokens")
    names = {
        "gspo_loss": lambda *arguments, denominator: getattr(gspo, name)(
            *arguments, 3e-4, 4e-4, denominator=denominator),
        "log_probs": unpacked(new, lengths),
        "old_log_probs": unpacked(old, lengths),
        "mask": unpacked(torch.ones_like(new), lengths),
        "advantages": advantages,
        "tokens": sum(lengths),
    }
    exec(code, names)
    expected = 0
    start = 0
    for length, advantage in zip(lengths, advantages.tolist()):
        log_ratio = new[start:start + length] - old[start:start + length]
        if name == "gspo_loss":
            log_ratio = log_ratio.mean().expand(length)
        expected -= sum(clipped(ratio, advantage) for ratio in log_ratio.exp().tolist())
        start += length
    assert names["loss"].item() == pytest.approx(expected / sum(lengths), abs=1e-9)
