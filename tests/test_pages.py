"""The pages: their links lead somewhere, their code runs and prints what they show, and the recipes
and losses of guides/ have the gradients of formulas that are written out for one response."""
import copy
import io
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
import zlib
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import gspo
import train_math
from guides import losses
from support.task import extract_answer
from tests.conftest import TOP, block, rollout_of, settings, train, weights_of
from tools.logs import read
from tools.warm_up import tiny_tokenizer

FOUND = [path.relative_to(TOP) for kind in ("md", "ipynb") for path in TOP.rglob(f"*.{kind}")]
FOUND = [path for path in FOUND if not path.parts[0].startswith((".", "runs"))]
LINKING = sorted(str(path) for path in FOUND if path.parent.name != "plans")
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
OWN_TASK, RECIPES, PASTE = (f"guides/{name}.md" for name in ("own_task", "recipes", "paste"))


def text_of(page):
    return (TOP / page).read_text(encoding="utf-8")


def names_of(page, *containing, **names):
    """What the blocks with these texts define, without their last call of train_math.main."""
    for text in containing:
        exec(block(page, text).split("\ntrain_math.main(")[0], names)
    return names


def anchors(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "", heading.lower())
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_to_files_and_headings(page):
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)", text_of(page)):
        name, _, anchor = link.partition("#")
        target = (TOP / page).parent / name if name else TOP / page
        if not link.startswith(("http", "mailto:")):
            is_page = target.suffix == ".md" and anchor
            if not target.exists() or is_page and anchor not in anchors(target):
                missing.append(link)
    assert not missing


def added(code):
    return [f"--algorithm={name}" for name in re.findall(r'ALGORITHMS\["(\w+)"\] =', code)]


@pytest.fixture(autouse=True)
def no_algorithms_of_other_pages(monkeypatch):
    monkeypatch.chdir(TOP)
    with mock.patch.dict(train_math.ALGORITHMS):
        yield


def execute(code, flags, monkeypatch, capsys):
    """What this program prints."""
    monkeypatch.setattr(sys, "argv", ["mine.py", *map(str, flags)])
    capsys.readouterr()
    exec(code, {"__name__": "__main__"})
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", [page for page in LINKING if page.endswith(".md")])
def test_blocks_print_what_they_say(page, command, chat_model, tmp_path, monkeypatch, capsys):
    """Each ```python block runs beside gspo.py, unless an optional package is missing, and prints
    the ```text block after it. One that trains gets the flags of one step of the tiny model, which
    also stands in for SmolLM2."""
    blocks = re.findall(r"```python\n(.*?)```\n(?:\s*```text\n(.*?)```)?", text_of(page), re.DOTALL)
    for i, (code, output) in enumerate(blocks):
        flags = []
        if "train_math.main(" in code:
            flags = [*command, *added(code), "--max_steps", "1", "--output_dir", tmp_path / str(i)]
        is_printing_numbers = flags or SMOLLM2 in code
        code = code.replace(SMOLLM2, chat_model.as_posix())
        code = re.sub("runs/(sft|loop)", (tmp_path / "model").as_posix(), code)
        try:
            printed = execute(code, flags, monkeypatch, capsys)
        except ModuleNotFoundError as error:
            assert error.name in ("verl", "peft")
        else:
            assert printed == output.strip() or is_printing_numbers and not output, code


@pytest.mark.parametrize("page", ["README.md", "lesson/README.md"])
def test_six_lines_are_gspo_loss(page):
    torch.manual_seed(0)
    old = -torch.rand(32, 9)
    new = (old + 1e-3 * torch.randn(32, 9)).requires_grad_()
    rewards = torch.rand(32)
    mask = torch.arange(9) < torch.randint(1, 10, (32, 1))
    theirs = names_of(page, "def gspo(")["gspo"](new, old, rewards, mask, group_size=8)
    ours = gspo.gspo_loss(new, old, gspo.group_advantages(rewards, 8), mask)
    found, expected = ((loss, *torch.autograd.grad(loss, new)) for loss in (theirs, ours))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert expected[1].abs().max() > 1e-3


def test_pencil_rows_are_the_example_s(monkeypatch, capsys):
    printed = execute(text_of("gspo.py"), [], monkeypatch, capsys)
    table = re.search(r"```text\n(advantage .*?)```", text_of("lesson/README.md"), re.DOTALL)
    assert set(table[1].splitlines()) <= set(printed.splitlines())


def test_a_reward_with_two_parts_logs_both():
    logged = {}
    texts = ["7", "8", "7 or 8", "17"]
    reward = names_of(OWN_TASK, "log_metric")["reward"]
    assert reward(texts, texts, [7] * 4, logged.__setitem__) == [1.2, 0.2, 0, 0.2]
    assert logged == {"accuracy": [1, 0, 0, 0], "is_number": 3 / 4}


def test_the_reward_of_the_front_page_accepts_the_answer_alone():
    reward = names_of("README.md", "def reward")["reward"]
    golds = ["Paris", "male ", 7, "-5", 3.5, "1,000", "5%", "1/2", "(B)", "don't", "**Yes**"]
    assert reward(golds, [f'"{gold}".\n'.upper() for gold in golds], golds) == [1] * len(golds)
    texts = ["This message is about payment, not billing.", "Not billing", "Billing or payment", "",
             "It is billing.", "bill", "No.\nBilling"]
    assert reward(texts, texts, ["billing"] * 7) == [0] * 7
    assert reward(["-5", "", "..."], ["-5", "", "..."], ["5", "", ""]) == [0] * 3


def test_the_default_reward_refuses_what_the_page_says():
    for text in r"\boxed{5 + 3}", r"\boxed{42 000}", "#### 5-3":
        assert f"`{text}`" in text_of(OWN_TASK) and extract_answer(text) is None


EPS_LOW, EPS_HIGH = 0.01, 0.0133
FLAGS = ["--minibatches", "2", "--max_completion_length", "24", "--micro_batch_tokens", "200",
         "--eps_low", str(EPS_LOW), "--eps_high", str(EPS_HIGH), "--max_steps", "3"]
PLUS, *DIGITS = tiny_tokenizer().convert_tokens_to_ids(list("+0123456789"))
CODES = {  # texts in the blocks of each recipe. LoRA replaces two functions of the KL penalty.
    "kl": ["gspo_kl"], "lora": ["gspo_kl", "get_peft_model"], "tis": ["gspo_tis"],
    "tools": ["is_sampled"], "dynamic": ["is_equal"]}
PARTS = *train_math.Parts.__annotations__,


def reward(prompts, completions, answer=None, **columns):
    """A hash, so that two responses hardly ever have the same reward, or 0 for some questions."""
    return [0.0 if prompt.startswith("Ann Ann Ann") else zlib.crc32(text.encode()) % 97 / 97
            for prompt, text in zip(prompts, completions)]


@pytest.fixture
def recipe(command, monkeypatch, tmp_path):
    """A function that runs a recipe and returns its updates. An update is (the model before it, the
    gradients, the rollouts until then). A rollout is (the model before its step, the Rollout)."""
    monkeypatch.setattr(train_math, "correctness_reward", reward)

    def run(name, folder="run", **more):
        rollouts, updates = [], []
        if name == "lora":
            pytest.importorskip("peft")
        flags = [*command, *FLAGS, "--output_dir", str(tmp_path / folder)]
        flags += added(block(RECIPES, CODES[name][0]))
        monkeypatch.setattr(sys, "argv", ["mine.py", *flags])
        names = names_of(RECIPES, *CODES[name])
        parts = {"reward": reward} | {part: names[part] for part in PARTS if part in names}
        if name in PREPARE:
            PREPARE[name](names, parts)
        inner = parts.get("sample", train_math.sample)

        def sample(model, tokenizer, questions, group_size, temperature, cfg, parts):
            before = copy.deepcopy(model)
            rollout = inner(model, tokenizer, questions, group_size, temperature, cfg, parts)
            if group_size > 1 and cfg.learning_rate > 0:  # neither an evaluation nor the trial
                rollouts.append((before, rollout))
            return rollout

        def clip_gradients(model):
            grads = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
            if rollouts:  # the trial has none
                updates.append((copy.deepcopy(model), torch.cat(grads), list(rollouts)))
            return train_math.clip_gradients(model)

        parts |= {"sample": sample, "clip_gradients": clip_gradients}
        train_math.main(flags, **parts | more)
        return updates

    return run


def advantage(rollout, i):
    prompts = [row["question"] for row in rollout.questions]
    rewards = torch.tensor(reward(prompts, rollout.texts))
    group = rewards[i // 4 * 4:i // 4 * 4 + 4]
    return (rewards[i] - group.mean()) / (group.std() + 1e-4)


def log_probs(model, rollout, i):
    prompt, response = rollout.prompts[i], rollout.responses[i]
    ids = torch.tensor([prompt + response])
    table = model(input_ids=ids).logits[0, len(prompt) - 1:-1].log_softmax(-1)
    return table[range(len(response)), response][torch.tensor(rollout.is_sampled[i])]


def clipped(ratio, value, low=EPS_LOW, high=EPS_HIGH):
    return torch.minimum(ratio * value, ratio.clamp(1 - low, 1 + high) * value)


def gspo_term(model, old_model, rollout, i):
    new = log_probs(model, rollout, i)
    old = log_probs(old_model, rollout, i).detach()
    return -clipped((new - old).mean().exp(), advantage(rollout, i)) / 8, new, old


def kl(model, rollouts, i):
    start, rollout = rollouts[-1]
    first, _ = rollouts[0]  # the pre-trained model, also with LoRA, whose matrices B begin with 0
    loss, new, _ = gspo_term(model, start, rollout, i)
    difference = log_probs(first, rollout, i).detach() - new
    return loss + 0.1 * (difference.exp() - 1 - difference).mean() / 8


def tis(model, rollouts, i):
    start, rollout = rollouts[-1]
    loss, _, old = gspo_term(model, start, rollout, i)
    lengths = [len(response) for response in rollout.responses[1::2]]
    assert min(lengths) * 0.04 < 0.69 < max(lengths) * 0.04, "some weights are truncated"
    weight = (old.sum() - rollout.log_probs[i, :len(old)].sum()).exp().item()
    return loss * min(weight, 2)


def tools(model, rollouts, i):
    start, rollout = rollouts[-1]
    response, is_sampled = rollout.responses[i], rollout.is_sampled[i]
    for t in range(2, len(response)):
        if is_sampled[t - 2] and response[t - 2] in DIGITS:
            assert not is_sampled[t - 1] and response[t - 1] == PLUS
            assert not is_sampled[t] and response[t] == response[t - 2]
    assert not all(map(all, rollout.is_sampled)), "a tool was called"
    return gspo_term(model, start, rollout, i)[0]


def half_smaller(names, parts):
    def generate(*arguments):
        responses, log_probs = train_math.generate(*arguments)
        log_probs[1::2] -= 0.04
        return responses, log_probs

    parts["generate"] = generate


def calculator(names, parts):
    """After each digit that the model samples, a tool writes '+' and the digit."""
    names["reply"] = lambda turn: [PLUS, turn[-1]] if turn[-1] in DIGITS else []
    parts["generate"] = lambda *others: names["generate"](
        *others[:-1], torch.cat([others[-1], torch.tensor(DIGITS)]))


PREPARE = {"tis": half_smaller, "tools": calculator}
@pytest.mark.parametrize("name, direct", [
    ("tis", tis), ("tools", tools),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [("kl", kl), ("lora", kl)])])
def test_gradients_agree_with_formulas(recipe, name, direct):
    updates = recipe(name)
    assert len(updates) == 6, "two in each of three steps"
    for number, (model, found, rollouts) in enumerate(updates):
        indices = range(8, 16) if number % 2 else range(8)
        loss = sum(direct(model, rollouts, i) for i in indices)
        trained = [p for p in model.parameters() if p.requires_grad]
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", CODES)
def test_a_killed_run_continues(recipe, name, tmp_path):
    def kill(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    recipe(name, "whole")
    with pytest.raises(KeyboardInterrupt):
        recipe(name, "killed", on_step=kill)
    recipe(name, "killed")
    folders = [tmp_path / folder for folder in ("whole", "killed")]
    norms = [[row.get("grad_norm") for row in read(at / "metrics.jsonl")] for at in folders]
    assert norms[0] == norms[1] and norms[0][3] > 0
    states = [torch.load(folder / "state.pt") for folder in folders]
    torch.testing.assert_close(states[0]["model"], states[1]["model"], rtol=0, atol=0)


def test_dynamic_sampling_prefers_groups_with_a_gradient(fresh, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", *command])
    sample = names_of(RECIPES, "is_equal")["sample"]
    equal = []
    for parts in {}, {"sample": sample}:
        rows = train(copy.deepcopy(fresh), max_steps=6, group_size=3, **parts)
        equal.append(sum(row["equal_reward_groups"] for row in rows[1:]))
    assert equal[1] < equal[0] / 2


def test_the_recipe_for_an_engine_sends_the_present_weights(fresh, tmp_path, monkeypatch):
    server = copy.deepcopy(fresh[0])
    paths = []

    def answer(request):
        path = request.full_url.removeprefix("http://engine/")
        asked = json.loads(request.data)
        paths.append(path)
        choices = []
        if path == "collective_rpc":
            assert asked == {"method": "reload_weights"}
            server.load_state_dict(load_file(tmp_path / "model.safetensors"))
        elif path == "v1/completions":
            assert asked["return_token_ids"] and asked["logprobs"] == 0
            responses, log_probs = train_math.generate(
                server, asked["prompt"], asked["n"], asked["max_tokens"], asked["temperature"],
                torch.tensor(asked["stop_token_ids"]))
            for ids, row in zip(responses, log_probs.tolist()):
                values = {"token_logprobs": row[:len(ids)]}
                choices.append({"token_ids": ids, "logprobs": values})
        return io.BytesIO(json.dumps({"choices": choices}).encode())

    monkeypatch.setattr("urllib.request.urlopen", answer)
    generate = names_of(RECIPES, "engine_at")["engine_at"]("http://engine", tmp_path)
    rows = train(fresh, generate=generate, max_steps=3)
    assert all(row["sampler_gap"] < 1e-6 for row in rows[1:])
    assert paths == ["collective_rpc", "reset_prefix_cache", "v1/completions"] * 3
    monkeypatch.setattr(server, "load_state_dict", lambda weights: None)
    rows = train(fresh, generate=generate, max_steps=3)
    assert rows[3]["sampler_gap"] > 1e-3


def test_four_lines_change_the_loop_for_an_own_task(chat_model, tmp_path):
    rows = "".join(f"How many figs are {i} figs?,Q\n" for i in range(20))
    (tmp_path / "my.csv").write_text("question,answer\n" + rows, encoding="utf-8-sig")
    shutil.copy(TOP / "gspo.py", tmp_path)
    code = text_of("lesson/loop.py").replace("import json", "import csv")
    for line in block(PASTE, "MODEL =").splitlines():
        start = re.escape(line[:line.index(" ", 4)])
        (old,) = re.findall(rf"^{start} .*# yours.*$", code, re.MULTILINE)
        code = code.replace(old, line)
    assert "yours" not in code.split('"""')[2] and "json" not in code
    code = code.replace(SMOLLM2, chat_model.as_posix()).replace("range(1, 9)", "range(1, 2)")
    code = re.sub(r"\nif __name__", block(PASTE, "runs/loop") + r"\g<0>", code)
    (tmp_path / "loop.py").write_text(code.replace("MAX_TOKENS = 128", "MAX_TOKENS = 1"))
    done = subprocess.run([sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True)
    assert re.fullmatch(r"step 1: reward \d\.\d\d\n", done.stdout), done.stderr
    models = [train_math.load(folder, "cpu")[0] for folder in (tmp_path / "runs/loop", chat_model)]
    assert not torch.equal(*map(weights_of, models)), "it is trained and saved"


# ---- guides/losses.py ----------------------------------------------------------------------------

NAMES = "sapo", "cispo", "gmpo", "luspo", "dapo", "dr_grpo"
LENGTHS = 2, 7, 4, 5, 3, 6, 7, 3
LONGEST = 9


def formula(name, r, a, low, high, mean):
    """The objective of one response with the token ratios r (n,) and the advantage a. mean: the
    mean length of the responses of its minibatch."""
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return (4 / tau * (tau * (r - 1)).sigmoid() * a).mean()
    if name == "cispo":
        return (r.detach().clamp(max=1 + high) * a * r.log()).sum() / mean
    if name == "gmpo":
        limited = r.clamp(max=1 + high) if a > 0 else r.clamp(min=1 - low)
        return limited.log().mean().exp() * a
    if name == "luspo":
        return len(r) * clipped(r.log().mean().exp(), a, low, high)
    return clipped(r, a, low, high).sum() / (LONGEST if name == "dr_grpo" else mean)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_a_loss_is_that_of_its_formula(name):
    """8 responses of 2 to 7 tokens, of which one has advantage 0, in two minibatches of several
    micro-batches."""
    torch.manual_seed(0)
    algorithm = train_math.ALGORITHMS[name]
    low, high = algorithm.eps_low, algorithm.eps_high
    cfg = settings(algorithm=name, minibatches=2, prompts_per_step=4, group_size=2,
                   max_completion_length=LONGEST, micro_batch_tokens=16)
    rollout = rollout_of([[1]] * 8, [[5] * length for length in LENGTHS])
    advantages = torch.tensor([1.0, -1, 0.5, -2, 0, 2, -0.5, 1])
    minibatches = losses.build_minibatches(rollout, advantages, cfg)
    assert len(minibatches) == 2 and min(map(len, minibatches)) > 1
    seen = []
    for batch in minibatches[0] + minibatches[1]:
        old = -torch.rand(batch.mask.shape) * 3
        new = (old + 0.6 * torch.randn(old.shape)).masked_fill(~batch.mask, math.nan)
        new.requires_grad_()
        loss = algorithm.loss(new, old, batch.advantages, batch.mask, low, high, 4)
        (gradient,) = torch.autograd.grad(loss, new)
        total = 0
        for row, i in enumerate(batch.indices):
            r = (new - old)[row, batch.mask[row]].exp()
            mean = sum(LENGTHS[i // 4 * 4:][:4]) / 4
            total = total - formula(name, r, advantages[i], low, high, mean) / 4
        (expected,) = torch.autograd.grad(total, new)
        torch.testing.assert_close(gradient, expected.nan_to_num())
        ratio = (new - old).exp() if algorithm.ratio == "token" else gspo.sequence_ratio(
            new, old, batch.mask)
        fraction = gspo.clip_fraction(ratio, batch.advantages, batch.mask, low, high)
        if name != "cispo":  # which clips nothing
            assert fraction == pytest.approx((gradient[batch.mask] == 0).float().mean())
        seen.append(fraction)
    assert (max(seen) > 0) == (name != "sapo")


def test_dr_grpo_does_not_divide_by_the_standard_deviation():
    advantages = train_math.ALGORITHMS["dr_grpo"].advantages(torch.tensor([3.0, 0, 0, 1, 1, 1]), 3)
    assert advantages.tolist() == [2, -1, -1, 0, 0, 0]


def test_a_response_without_tokens_has_the_loss_0():
    one = torch.ones(1, 3)
    for loss in losses.sapo_loss, losses.cispo_loss, losses.gmpo_loss:
        assert loss(one, one, torch.ones(1), 0 * one, 0.1, 0.1).item() == 0


@pytest.mark.parametrize("name", ["cispo", "dr_grpo"])
def test_the_script_trains_with_another_loss(name, command, monkeypatch, tmp_path):
    flags = "--algorithm", name, "--max_steps", "1", "--output_dir", str(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["losses.py", *command, *flags])
    runpy.run_path(str(TOP / "guides/losses.py"), run_name="__main__")
    assert read(tmp_path / "run/metrics.jsonl")[1]["step"] == 1
