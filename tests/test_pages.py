"""The pages: their links lead somewhere, their code runs and prints what they show, and the recipes
of guides/ compute what they promise.

The gradient of each update of a recipe agrees with a formula that is written out: one response at a
time, without padding and micro-batches. A run that is killed continues as if it had not been."""
import copy
import io
import json
import os
import re
import subprocess
import sys
import zlib
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import gspo
import train_math
from tests.conftest import (
    SMOLLM2,
    TOP,
    block,
    parity_reward,
    run,
    run_code,
    settings,
    train,
    weights_of,
    without_clocks,
)
from tools.logs import read
from tools.warm_up import given_rollout, tiny_tokenizer

FOUND = [path.relative_to(TOP) for kind in ("md", "ipynb") for path in TOP.rglob(f"*.{kind}")]
FOUND = [path for path in FOUND if not path.parts[0].startswith((".", "runs"))]
# Plans are not tested: they are kept as they were, with the links and commands of their day.
LINKING = sorted(str(path) for path in FOUND if path.parent.name != "plans")
OWN_TASK, RECIPES, PASTE, TRAINED = (
    f"guides/{name}.md" for name in ("own_task", "recipes", "paste", "trained_model"))


def text_of(page):
    return (TOP / page).read_text(encoding="utf-8")


def names_of(page, *containing, **names):
    """What the blocks with these texts define, without their last call of train_math.main."""
    for text in containing:
        exec(block(page, text).split("\ntrain_math.main(")[0], names)
    return names


# ---- all pages: links, and code that runs --------------------------------------------------------


def anchors(page):
    """The anchors that GitHub makes from the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "", heading.lower())
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_to_files_and_headings(page):
    """Relative links, also those to pictures. Addresses on the web are not tested."""
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
    """The flag for the algorithm that the code adds."""
    return [f"--algorithm={name}" for name in re.findall(r'ALGORITHMS\["(\w+)"\] =', code)]


@pytest.mark.parametrize("page", [page for page in LINKING if page.endswith(".md")])
def test_blocks_print_what_they_say(page, command, whole, chat_model, tmp_path):
    """Each ```python block runs beside gspo.py, unless it needs an optional package that is
    missing, and prints the ```text block after it. A block that calls train_math.main gets flags,
    here those of one step of the tiny model, and of the algorithm that it adds. A block that reads
    the run runs/math reads one of the tiny model. A block that loads SmolLM2 loads the tiny model,
    and its numbers are not on the page."""
    blocks = re.findall(r"```python\n(.*?)```\n(?:\s*```text\n(.*?)```)?", text_of(page), re.DOTALL)
    for i, (code, output) in enumerate(blocks):
        flags = []
        if "train_math.main(" in code:
            flags = [*command, *added(code), "--max_steps", "1", "--output_dir", tmp_path / str(i)]
        is_printing_numbers = flags or "runs/math/" in code or SMOLLM2 in code
        code = code.replace("runs/math/", f"{whole.as_posix()}/")
        code = code.replace(SMOLLM2, chat_model.as_posix())
        code = re.sub("runs/(sft|loop)", (tmp_path / "model").as_posix(), code)
        status, printed, errors = run_code(code, *flags)
        if not re.search("No module named '(verl|peft|math_verify)'", errors):
            assert status == 0, f"{code}\n{errors}"
            assert printed.strip() == output.strip() or is_printing_numbers and not output, code


@pytest.mark.parametrize("page", ["README.md", "lesson/README.md"])
def test_six_lines_are_gspo_loss(page):
    """On a batch without NaN and without empty responses."""
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


def test_pencil_rows_are_the_example_s():
    _, printed, _ = run_code(text_of("gspo.py"))
    table = re.search(r"```text\n(advantage .*?)```", text_of("lesson/README.md"), re.DOTALL)
    assert set(table[1].splitlines()) <= set(printed.splitlines())


# ---- rewards, and the trained model --------------------------------------------------------------


def test_a_reward_with_two_parts_logs_both():
    logged = {}
    reward = names_of(OWN_TASK, "log_metric")["reward"]
    texts = ["7", "8", "7 or 8", "17"]
    assert reward(texts, texts, [7] * 4, logged.__setitem__) == [1.2, 0.2, 0, 0.2]
    assert logged == {"accuracy": [1, 0, 0, 0], "is_number": 3 / 4}


def test_a_reward_gets_lengths_and_whether_a_response_was_cut(fresh):
    seen = []

    def reward(prompts, completions, completion_ids, cut, **columns):
        seen.append((completions, completion_ids, cut))
        return [0.01 * len(ids) for ids in completion_ids]

    train(fresh, held_out=2, reward=reward, max_steps=2, max_completion_length=60)
    for texts, ids, cut in seen:
        assert texts == fresh[1].batch_decode(ids, skip_special_tokens=True)
        assert cut == [len(response) == 60 for response in ids]
    assert {True, False} == {is_cut for _, _, cut in seen for is_cut in cut}


def test_the_reward_of_the_front_page_accepts_a_word_and_a_sentence():
    reward = names_of("README.md", "def reward")["reward"]
    texts = ["Paris", "The capital of France is Paris.", "paris!", "Paris or Rome", "", "Pari"]
    assert reward(texts, texts, ["Paris"] * 6) == [1, 1, 1, 0, 0, 0]
    texts = ["Female", '"Male".\n', "It is 7."]
    assert reward(texts, texts, ["male ", "male ", 7]) == [0, 1, 1]  # an answer may be a number
    golds = ["-5", 3.5, "1,000", "5%", "1/2", "2024-01-02", "(B)", "don't", "**Yes**"]
    assert reward(golds, [f"It is {gold}." for gold in golds], golds) == [1] * len(golds)
    texts = ["-5", "0.5", "1/2", "10", "", "..."]
    assert reward(texts, texts, ["5", "5", "2", "0", "", ""]) == [0] * 6


def test_the_default_reward_refuses_what_the_page_says():
    for text in r"\boxed{5 + 3}", r"\boxed{42 000}", "#### 5-3":
        assert f"`{text}`" in text_of(OWN_TASK) and train_math.extract_answer(text) is None


def test_math_verify_accepts_fractions():
    pytest.importorskip("math_verify")
    reward = names_of(OWN_TASK, "math_verify")["reward"]
    texts = [r"so \boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{1/3}", r"\boxed{5 + 3}", ""]
    golds = ["1/2", r"\frac{1}{2}", "1/2", "5", "1/2"]
    assert reward(texts, texts, golds) == [1, 1, 0, 0, 0]
    assert reward([""], [r"\boxed{42\,000}"], ["42000"]) == [0]  # the page says so


def test_the_recipe_for_evaluation_repeats_the_evaluation_of_the_run(
        chat_model, command, tmp_path, monkeypatch, capsys):
    """Of a run with a system prompt. The chat template shows everything."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "math"
    flags = ["--model", str(chat_model), "--system", "Be brief.", "--max_steps", "1"]
    rows = run(command, folder, *flags, reward=train_math.correctness_reward)
    names = names_of(TRAINED, "train_math.evaluate(")
    row = names["row"]
    assert row["eval_reward"] == rows[-1]["eval_reward"] and row["eval_questions"] == 4
    assert row["eval_results"] == read(folder / "eval_1.jsonl")
    assert capsys.readouterr().out.splitlines()[-1] == str(row["eval_reward"])
    asked = json.loads(re.search(r"such as\s`(\[{.*?}\])`", text_of(TRAINED), re.DOTALL)[1])
    row = train_math.evaluate(names["model"], names["tokenizer"], asked, names["cfg"])
    assert row["eval_results"][0]["gold"] == "144" and row["eval_results"][0]["response"]


@pytest.mark.parametrize("learning_rate", ["0", "1e-3"])
def test_supervised_fine_tuning_trains_on_the_answers_only(
        chat_model, tmp_path, monkeypatch, learning_rate):
    """Its first losses are means over the tokens of the answers after the prompts of the script."""
    monkeypatch.chdir(TOP)
    code = block(RECIPES, "-100").replace("lr=1e-5", f"lr={learning_rate}")
    code = code.replace(SMOLLM2, str(chat_model)).replace("runs/sft", str(tmp_path))
    losses = []
    names = {"print": lambda text: losses.append(float(text.split()[-1]))}
    exec(code, names)
    model, tokenizer = train_math.load(str(chat_model), "cpu")
    after, _ = train_math.load(str(tmp_path / "model"), "cpu")
    assert torch.equal(weights_of(after), weights_of(names["model"]))
    if learning_rate != "0":
        assert losses[2] < losses[1] < losses[0]
        return
    prompts = train_math.encode_prompts(
        tokenizer, names["rows"], settings(instruction=names["instruction"]))
    expected = 0
    for prompt, row in zip(prompts, names["rows"]):
        answer = tokenizer(row["answer"]).input_ids + [tokenizer.eos_token_id]
        batch = train_math.MicroBatch(given_rollout([prompt], [answer]), torch.ones(1), [0], "cpu")
        total = train_math.response_log_probs(model, batch, 1.0).sum().item()
        expected -= total / len(answer) / len(prompts)
    assert losses == pytest.approx([expected] * 3, abs=6e-4)
    assert torch.equal(weights_of(after), weights_of(model))


# ---- recipes with a loss, a sampler or a state of their own --------------------------------------

EPS_LOW, EPS_HIGH = 0.01, 0.0133
FLAGS = ["--minibatches", "2", "--max_completion_length", "24", "--micro_batch_tokens", "200",
         "--eps_low", str(EPS_LOW), "--eps_high", str(EPS_HIGH), "--max_steps", "3"]
PLUS, *DIGITS = tiny_tokenizer().convert_tokens_to_ids(list("+0123456789"))
CODES = {  # texts in the blocks of each recipe. LoRA replaces two functions of the KL penalty.
    "token_mean": ["leave_one_out"], "kl": ["gspo_kl"], "lora": ["gspo_kl", "get_peft_model"],
    "tis": ["gspo_tis"], "masked": ["gspo_tis"], "entropy": ["gspo_entropy"],
    "both": ["leave_one_out", "is_equal"],
    "off_policy": ["before or current"], "tools": ["is_sampled"],
    "dynamic": ["is_equal"]}
PARTS = *train_math.Parts.__annotations__,


def reward(prompts, completions, answer=None, **columns):
    """A hash, so that two responses hardly ever have the same reward, or 0 for some questions."""
    return [0.0 if prompt.startswith("Ann Ann Ann") else zlib.crc32(text.encode()) % 97 / 97
            for prompt, text in zip(prompts, completions)]


def rewards_of(rollout):
    return reward([row["question"] for row in rollout.questions], rollout.texts)


@pytest.fixture
def recipe(command, monkeypatch, tmp_path):
    """A function that runs a recipe and returns its updates. An update is (the model before it, the
    gradients, the rollouts until then). A rollout is (the model before its step, the Rollout)."""
    rollouts = []
    updates = []
    monkeypatch.setattr(train_math, "correctness_reward", reward)

    def run(name, folder="run", **more):
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

        parts |= {"sample": sample, "clip_gradients": clip_gradients}
        train_math.main(flags, **parts | more)
        return updates

    with mock.patch.dict(train_math.ALGORITHMS):
        yield run


def advantage(rollout, i):
    rewards = torch.tensor(rewards_of(rollout))
    group = rewards[i // 4 * 4:i // 4 * 4 + 4]
    return (rewards[i] - group.mean()) / (group.std() + 1e-4)


def distributions(model, rollout, i):
    """The log-probs of all tokens at each place of one response."""
    prompt, response = rollout.prompts[i], rollout.responses[i]
    ids = torch.tensor([prompt + response])
    return model(input_ids=ids).logits[0, len(prompt) - 1:-1].log_softmax(-1)


def log_probs(model, rollout, i):
    """The log-probs of the sampled tokens of one response."""
    response = rollout.responses[i]
    each = distributions(model, rollout, i)[range(len(response)), response]
    return each[torch.tensor(rollout.is_sampled[i])]


def clipped(ratio, value):
    return torch.minimum(ratio * value, ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH) * value)


def gspo_term(model, old_model, rollout, i):
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
    loss, new, _ = gspo_term(model, start, rollout, i)
    difference = log_probs(first, rollout, i).detach() - new
    return loss + 0.1 * (difference.exp() - 1 - difference).mean() / 8


def tis(model, rollouts, i, indices):
    start, rollout = rollouts[-1]
    loss, _, old = gspo_term(model, start, rollout, i)
    lengths = [len(response) for response in rollout.responses[1::2]]
    assert min(lengths) * 0.04 < 0.69 < max(lengths) * 0.04, "some weights are truncated"
    weight = (old.sum() - rollout.log_probs[i, :len(old)].sum()).exp().item()
    return loss * min(weight, 2)


def masked(model, rollouts, i, indices):
    """The sampler's log-probs of every second response are too far away (half_smaller)."""
    start, rollout = rollouts[-1]
    return gspo_term(model, start, rollout, i)[0] * (i % 2 == 0)


def entropy(model, rollouts, i, indices):
    start, rollout = rollouts[-1]
    table = distributions(model, rollout, i)
    each = -(table.exp() * table).sum(1)
    return gspo_term(model, start, rollout, i)[0] - 0.01 * each.mean() / 8


def off_policy(model, rollouts, i, indices):
    old_model, _ = rollouts[-2:][0]  # before the last step
    return gspo_term(model, old_model, rollouts[-1][1], i)[0]


def tools(model, rollouts, i, indices):
    start, rollout = rollouts[-1]
    response, is_sampled = rollout.responses[i], rollout.is_sampled[i]
    for t in range(2, len(response)):
        if is_sampled[t - 2] and response[t - 2] in DIGITS:
            assert not is_sampled[t - 1] and response[t - 1] == PLUS
            assert not is_sampled[t] and response[t] == response[t - 2]
    assert not all(map(all, rollout.is_sampled)), "a tool was called"
    return gspo_term(model, start, rollout, i)[0]


def half_smaller(names, parts):
    """A sampler whose probabilities are 4% smaller in every second response."""
    def generate(*arguments):
        responses, log_probs = train_math.generate(*arguments)
        log_probs[1::2] -= 0.04
        return responses, log_probs

    parts["generate"] = generate


def other_weight(names, parts):
    """The page's other weight, which is 1 or 0."""
    weight = re.search(r"\n    weight = .*\.float\(\)\n", text_of(RECIPES))[0]
    code = re.sub(r"\n    weight = .*\n", weight, block(RECIPES, "gspo_tis"))
    exec(code.split("\ntrain_math.main(")[0], names)
    half_smaller(names, parts)


def calculator(names, parts):
    """After each digit that the model samples, a tool writes '+' and the digit."""
    names["reply"] = lambda turn: [PLUS, turn[-1]] if turn[-1] in DIGITS else []
    parts["generate"] = lambda *others: names["generate"](
        *others[:-1], torch.cat([others[-1], torch.tensor(DIGITS)]))


PREPARE = {"tis": half_smaller, "masked": other_weight, "tools": calculator}
SLOW = [("kl", kl), ("lora", kl), ("tis", tis), ("masked", masked), ("entropy", entropy),
        ("both", token_mean), ("tools", tools)]


@pytest.mark.parametrize("name, direct", [
    ("token_mean", token_mean), ("off_policy", off_policy),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_gradients_agree_with_formulas(recipe, name, direct):
    updates = recipe(name)
    assert len(updates) == 6, "each minibatch has a gradient"
    for number, (model, found, rollouts) in enumerate(updates):
        indices = range(8, 16) if number % 2 else range(8)
        loss = sum(direct(model, rollouts, i, indices) for i in indices)
        trained = [p for p in model.parameters() if p.requires_grad]
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_merged_adapters_give_the_same_log_probs_in_float32_but_not_in_bf16(fresh):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(fresh[0]), config)
    merged = copy.deepcopy(model).merge_and_unload()
    rounded = copy.deepcopy(merged).bfloat16().float()
    ids = torch.randint(3, 50, (4, 30))
    with torch.no_grad():
        table, *others = (each(ids).logits.log_softmax(-1) for each in (model, merged, rounded))
    gap, gap_in_bf16 = ((other - table).abs().mean() for other in others)
    assert gap < 1e-6 and gap_in_bf16 > 100 * gap


@pytest.mark.slow
@pytest.mark.parametrize("name", CODES)
def test_a_killed_run_continues(recipe, name, tmp_path):
    """It is killed after the updates of step 3, and was saved after step 2."""
    def kill(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    recipe(name, "whole")
    with pytest.raises(KeyboardInterrupt):
        recipe(name, "killed", on_step=kill)
    assert len(json.loads(torch.load(tmp_path / "killed" / "state.pt")["rows"])) == 3
    recipe(name, "killed")
    folders = [tmp_path / folder for folder in ("whole", "killed")]
    whole, killed = (without_clocks(read(folder / "metrics.jsonl")) for folder in folders)
    assert whole == killed and whole[3]["grad_norm"] > 0
    states = [torch.load(folder / "state.pt") for folder in folders]
    torch.testing.assert_close(states[0]["model"], states[1]["model"], rtol=0, atol=0)


SEVERAL = """
import functools, os, torch, train_math
from tests.conftest import parity_reward
from tests.test_pages import one_prompt_at_a_time

def on_step(row):
    if row["step"] == int(os.environ.get("KILLED_IN", -1)):
        os._exit(9)

train_math.train = functools.partial(
    train_math.train, on_step=on_step, reward=parity_reward, generate=one_prompt_at_a_time)
""" + block(RECIPES, "all_gather_object")


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
        assert len(json.loads(torch.load(two / "state.pt")["rows"])) == (3 if killed else 6)
    for mine, other in zip(read(one / "metrics.jsonl"), read(two / "metrics.jsonl"), strict=True):
        names = {"reward", "entropy", "response_length", "equal_reward_groups", "eval_reward"}
        for name in names & mine.keys():
            assert mine[name] == pytest.approx(other[name], rel=1e-4)
    weights, others = (torch.load(folder / "state.pt")["model"] for folder in (one, two))
    torch.testing.assert_close(weights, others, rtol=0, atol=5e-6)


def test_dynamic_sampling_prefers_groups_with_a_gradient(fresh, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", *command])
    sample = names_of(RECIPES, "is_equal")["sample"]
    seen = []

    def reward(prompts, completions, **columns):
        """0.1 or 0.3, whose equal groups have a standard deviation that is rounded to 1e-8."""
        seen.append(list(zip(prompts, completions)))
        return [0.3 if odd else 0.1 for odd in parity_reward(prompts, completions)]

    equal = []
    for parts in {}, {"sample": sample}:
        seen.clear()
        rows = train(copy.deepcopy(fresh), held_out=2, reward=reward, max_steps=6, group_size=3,
                     **parts)
        equal.append(sum(row["equal_reward_groups"] for row in rows[1:]) / 6)
        assert all(row["log_ratio_first_max"] in (0, None) for row in rows[1:])
    assert [len(prompts) for prompts in seen[:4]] == [2, 24, 12, 24]  # first an evaluation
    assert set(seen[2]) <= set(seen[1]) and equal[1] < equal[0] / 2


def test_the_recipe_for_an_engine_sends_the_present_weights(fresh, tmp_path, monkeypatch):
    """In place of a server, there are the four addresses of vLLM that the recipe needs."""
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
            for ids, row in zip(responses, log_probs):
                values = {"token_logprobs": row[:len(ids)].tolist()}
                choices.append({"token_ids": ids, "logprobs": values})
        return io.BytesIO(json.dumps({"choices": choices}).encode())

    monkeypatch.setattr("urllib.request.urlopen", answer)
    generate = names_of(RECIPES, "engine_at")["engine_at"]("http://engine", tmp_path)
    rows = train(fresh, held_out=2, generate=generate, max_steps=3)
    assert all(row["sampler_gap"] < 1e-6 for row in rows[1:])
    assert all(row["log_ratio_first_max"] == 0 for row in rows[1:])
    assert paths[:3] == ["collective_rpc", "reset_prefix_cache", "v1/completions"]
    assert len(paths) == 3 * paths.count("reset_prefix_cache")
    monkeypatch.setattr(server, "load_state_dict", lambda weights: None)
    rows = train(fresh, generate=generate, max_steps=3)
    assert rows[3]["sampler_gap"] > 1e-3


def test_the_recipe_for_very_long_responses_gives_the_same_weights(world):
    """Gradient checkpointing keeps less for the backward pass, and changes no number."""
    weights, stored, kept = [], [], []
    count = torch.autograd.graph.saved_tensors_hooks(
        lambda x: stored.append(x.numel()) or x, lambda x: x)
    for parts in vars(train_math), names_of(RECIPES, "activation_checkpointing_enable"):
        model, tokenizer = parts["load"](str(world / "model"), "cpu")
        stored.clear()
        with count:
            *_, row = train((model, tokenizer), max_steps=2,
                            response_log_probs=parts["response_log_probs"])
        assert row["log_ratio_first_max"] == 0 < row["grad_norm"] and not model.training
        weights.append(weights_of(model))
        kept.append(sum(stored))
    assert torch.equal(*weights) and kept[1] < kept[0] / 2


# ---- paste.md ------------------------------------------------------------------------------------


def test_sampled_responses_get_the_log_probs_of_single_texts(tiny):
    """The file for a loop of one's own. Its last lines train, and are not run here."""
    model, tokenizer = tiny
    texts = ["Ann has 3 figs?", "Bob", "Eve has 12?"]
    names = names_of(PASTE, "def sample(", __name__="pasted")
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    found = []
    for penalty in None, 5.0:  # some checkpoints have one
        model.generation_config.repetition_penalty = penalty
        torch.manual_seed(0)
        found.append(names["sample"](model, inputs, 4, 40))
    (ids, mask), (same, _) = found
    lengths = mask.sum(1).tolist()
    assert torch.equal(ids, same) and min(lengths) < 40 == max(lengths)
    with torch.no_grad():
        together = names["log_probs_of"](model, ids)
        for i, length in enumerate(lengths):
            prompt = tokenizer(texts[i // 4]).input_ids
            whole = ids[i, :len(prompt) + length]
            assert whole[:len(prompt)].tolist() == prompt
            assert (whole[-1] == 1) == (length < 40) and 1 not in whole[len(prompt):-1]
            alone = names["log_probs_of"](model, whole[None])[0, len(prompt) - 1:]
            assert torch.allclose(together[i][mask[i]], alone, atol=1e-5)


@pytest.mark.parametrize("loss", [gspo.gspo_loss, gspo.grpo_loss])
def test_packed_sequences_and_the_mean_over_all_tokens(loss):
    """The log-probs of four responses stand one after the other. Some responses are clipped."""
    def unpacked(x):
        return names_of(PASTE, "x.split(lengths)", torch=torch, x=x, lengths=lengths)["log_probs"]

    torch.manual_seed(0)
    lengths = [3, 1, 5, 2]
    old = -torch.rand(11, dtype=torch.float64)
    new = old + 1e-3 * torch.randn(11, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    mask = unpacked(torch.ones(11, dtype=torch.bool))
    names = {"log_probs": unpacked(new), "old_log_probs": unpacked(old), "mask": mask,
             "advantages": advantages, "tokens": 11, "gspo_loss": loss}
    exec(block(PASTE, "denominator=tokens"), names)
    expected = 0
    for now, before, advantage in zip(new.split(lengths), old.split(lengths), advantages):
        single = [x[None] for x in (now, before, advantage, torch.ones_like(now))]
        expected += loss(*single, denominator=11 / len(now))
    assert names["loss"].item() == pytest.approx(expected.item(), abs=1e-9)
