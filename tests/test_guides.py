"""The recipes of guides/, beyond that their blocks run: what they compute is right. The recipes
with a loss, a sampler or a state of their own are in test_recipes.py."""
import copy
import functools
import http.server
import json
import re
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file

import gspo
import train_math
from tests.conftest import (
    SMOLLM2,
    TOP,
    block,
    check,
    parity_reward,
    run,
    settings,
    train,
    weights_of,
)
from tools.logs import paired, read, read_packed
from tools.warm_up import given_rollout

OWN_TASK = "guides/own_task.md"
RECIPES = "guides/recipes.md"
TRAINED = "guides/trained_model.md"
PASTE = "guides/paste.md"


def names_of(page, containing, **names):
    """What the block defines, without its last call of train_math.main."""
    code = re.sub(r"^train_math\.main\(.*\n", "", block(page, containing), flags=re.MULTILINE)
    exec(code, names)
    return names


# ---- own_task.md, recipes.md and trained_model.md -----------------------------------------------


def test_several_rewards_are_logged(fresh):
    reward = names_of(OWN_TASK, "log_metric")["reward"]
    rows = train(fresh, held_out=2, reward=reward, max_steps=1)
    for row, prefix in (rows[0], "eval_"), (rows[1], ""), (rows[1], "eval_"):
        accuracy = row[f"{prefix}accuracy"]
        assert row[f"{prefix}short"] == 1
        assert row[f"{prefix}reward"] == pytest.approx(sum(accuracy) / len(accuracy) + 0.2)


def test_a_reward_gets_lengths_and_whether_a_response_was_cut(fresh):
    seen = []

    def reward(prompts, completions, completion_ids, cut, log_metric, **columns):
        seen.append((completions, completion_ids, cut))
        lengths = [len(ids) for ids in completion_ids]
        log_metric("lengths", lengths)
        return [0.01 * length - 0.5 * is_cut for length, is_cut in zip(lengths, cut)]

    rows = train(fresh, held_out=2, reward=reward, max_steps=2, max_completion_length=60)
    for texts, ids, cut in seen:
        assert texts == fresh[1].batch_decode(ids, skip_special_tokens=True)
        assert cut == [len(response) == 60 for response in ids]
    assert {True, False} == {is_cut for _, _, cut in seen for is_cut in cut}
    assert rows[2]["eval_lengths"] == [len(response) for response in seen[-1][1]]


@pytest.mark.parametrize("seed", range(3))
def test_the_table_of_the_recipe_for_a_laptop_is_that_of_its_logs(seed):
    logs = read_packed(TOP / "evidence/logs/reviews.jsonl.gz")
    found = {}
    for name in "eval_0", "eval_16", "metrics":
        rows = logs[f"seed_{seed}/{name}"]
        found[name] = [row["reward"] for row in rows if "reward" in row]
    before, after, steps = found.values()
    difference, (low, high), _ = paired(before, after)
    line = (f"| {seed} | {sum(before) / 70:.1%} | {sum(after) / 70:.1%} | {100 * difference:+.1f} "
            f"({100 * low:+.1f} to {100 * high:+.1f}) | {steps[0]:.0%}, {steps[-1]:.0%} |")
    assert line in (TOP / OWN_TASK).read_text(encoding="utf-8") and len(before) == 70


def test_the_reward_of_the_front_page_accepts_a_word_and_a_sentence():
    reward = names_of("README.md", "def reward")["reward"]
    texts = ["Paris", "The capital of France is Paris.", "paris!", "Paris or Rome", "", "Pari"]
    assert reward(texts, texts, ["Paris"] * 6) == [1, 1, 1, 0, 0, 0]
    assert reward(["7"], ["It is 7."], [7]) == [1]  # the answer may be a number
    assert reward("?" * 3, ["Female", '"Male".\n', ""], ["male ", "male ", ""]) == [0, 1, 0]


@pytest.mark.parametrize("text", [r"\boxed{5 + 3}", r"\boxed{7!}", r"\boxed{42 000}", "#### 5-3"])
def test_the_default_reward_refuses_what_the_page_says(text):
    assert f"`{text}`" in (TOP / OWN_TASK).read_text(encoding="utf-8")
    assert train_math.extract_answer(text) is None


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
    page = (TOP / TRAINED).read_text(encoding="utf-8")
    asked = json.loads(re.search(r"such as\s`(\[{.*?}\])`", page, re.DOTALL)[1])
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
    cfg = settings(instruction=names["instruction"])
    model, tokenizer = train_math.load(str(chat_model), "cpu")
    prompts = train_math.encode_prompts(tokenizer, names["rows"], cfg)
    texts = [row["answer"] for row in names["rows"]]
    answers = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]
    expected = 0
    for prompt, answer in zip(prompts, answers):
        rollout = given_rollout([prompt], [answer])
        batch = train_math.MicroBatch(rollout, torch.ones(1), [0], "cpu")
        total = train_math.response_log_probs(model, batch, 1.0).sum().item()
        expected -= total / len(answer) / len(prompts)
    after, _ = train_math.load(str(tmp_path / "model"), "cpu")
    if learning_rate == "0":
        assert losses == pytest.approx([expected] * 3, abs=6e-4)
        assert torch.equal(weights_of(after), weights_of(model))
    else:
        assert losses[2] < losses[1] < losses[0] and losses[2] < expected / 2
        assert torch.equal(weights_of(after), weights_of(names["model"]))


def test_dynamic_sampling_prefers_groups_with_a_gradient(fresh, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", *command])
    sample = names_of(RECIPES, "is_equal")["sample"]
    seen = []

    def reward(prompts, completions, cut, **columns):
        """0.1 or 0.3, whose equal groups have a standard deviation that is rounded to 1e-8."""
        seen.append(list(zip(prompts, completions)))
        odd = parity_reward(prompts, completions)
        return [0.3 if value else 0.1 for value in odd]

    equal = []
    for parts in {}, {"sample": sample}:
        seen.clear()
        copied = copy.deepcopy(fresh)
        rows = train(copied, held_out=2, reward=reward, max_steps=6, group_size=3, **parts)
        equal.append(sum(row["equal_reward_groups"] for row in rows[1:]) / 6)
        assert all(row["log_ratio_first_max"] in (0, None) for row in rows[1:])
    assert [len(prompts) for prompts in seen[:4]] == [2, 24, 12, 24]  # first an evaluation
    assert set(seen[2]) <= set(seen[1])
    assert equal[1] < equal[0] / 2


class Engine(http.server.BaseHTTPRequestHandler):
    """A small server with the four addresses of vLLM that the recipe needs. It samples with the
    weights that it has loaded last."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(self.path)
        answer = {}
        if self.path == "/collective_rpc":
            assert asked == {"method": "reload_weights"}
            if self.server.takes_weights:
                state = load_file(self.server.folder / "model.safetensors")
                self.server.model.load_state_dict(state)
                self.server.model.to(self.server.dtype)
        elif self.path == "/v1/completions":
            assert asked["return_token_ids"] and asked["logprobs"] == 0
            responses, log_probs = train_math.generate(
                self.server.model, asked["prompt"], asked["n"], asked["max_tokens"],
                asked["temperature"], torch.tensor(asked["stop_token_ids"]))
            answer = {"choices": [
                {"token_ids": ids, "logprobs": {"token_logprobs": row[:len(ids)].tolist()}}
                for ids, row in zip(responses, log_probs)]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def engine(fresh, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.folder = tmp_path
    server.model = copy.deepcopy(fresh[0])
    server.dtype = torch.float32
    server.takes_weights = True
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    server.generate = names_of(RECIPES, "engine_at")["engine_at"](url, tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def test_the_recipe_for_an_engine_sends_the_present_weights(fresh, engine):
    rows = train(fresh, held_out=2, generate=engine.generate, max_steps=3)
    assert all(row["sampler_gap"] < 1e-6 for row in rows[1:])
    assert all(row["log_ratio_first_max"] == 0 for row in rows[1:])
    assert engine.asked[:3] == ["/collective_rpc", "/reset_prefix_cache", "/v1/completions"]
    assert len(engine.asked) == 3 * engine.asked.count("/reset_prefix_cache")
    engine.takes_weights = False
    rows = train(fresh, generate=engine.generate, max_steps=3)
    assert rows[3]["sampler_gap"] > 1e-3


def test_an_engine_in_half_precision_passes_the_trial_and_another_model_does_not(fresh, engine):
    engine.dtype = torch.bfloat16
    check(*fresh, generate=engine.generate)
    engine.takes_weights = False
    engine.model.lm_head.weight.data.mul_(20)
    with pytest.raises(ValueError, match="eight sampled tokens differ"):
        check(*fresh, generate=engine.generate)


def test_the_recipe_for_very_long_responses_gives_the_same_weights(world):
    """Gradient checkpointing keeps less for the backward pass, and changes no number."""
    recipe = names_of(RECIPES, "activation_checkpointing_enable")
    before, _ = train_math.load(str(world / "model"), "cpu")
    weights = [weights_of(before)]
    kept = []
    for parts in vars(train_math), recipe:
        model, tokenizer = parts["load"](str(world / "model"), "cpu")
        sizes = []

        def count(x, sizes=sizes):
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            rows = train((model, tokenizer), max_steps=2,
                         response_log_probs=parts["response_log_probs"])
        assert rows[-1]["log_ratio_first_max"] == 0 and not model.training
        weights.append(weights_of(model))
        kept.append(sum(sizes))
    assert torch.equal(weights[1], weights[2]) and not torch.equal(weights[0], weights[1])
    assert kept[1] < kept[0] / 2


# ---- paste.md ------------------------------------------------------------------------------------


def test_the_output_of_generate_gets_the_log_probs_of_single_texts(tiny):
    model, tokenizer = tiny
    texts = ["Ann has 3 figs?", "Bob", "Eve has 12?"]
    names = names_of(PASTE, "def padded_on_the_right", model=model, tokenizer=tokenizer)
    code = block(PASTE, "model.generate(").replace("512", "40")
    names |= {"texts": texts, "group_size": 4}
    found = []
    for penalty in None, 5.0:  # some checkpoints have one
        model.generation_config.repetition_penalty = penalty
        torch.manual_seed(0)
        exec(code, names)
        found.append(names["ids"])
    assert torch.equal(*found)
    ids, mask = names["ids"], names["mask"]
    log_probs_of = names_of(PASTE, "def update")["log_probs_of"]
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


def unpacked(x, lengths):
    code = block(PASTE, "x.split(lengths)")
    names = {"torch": torch, "x": x, "lengths": lengths}
    exec(code, names)
    return names["log_probs"]


@pytest.mark.parametrize("name", ["packed", "gspo_loss", "grpo_loss"])
def test_packed_sequences_and_the_mean_over_all_tokens(name):
    """The log-probs of four responses stand one after the other. Some responses are clipped."""
    torch.manual_seed(0)
    lengths = [3, 1, 5, 2]
    old = -torch.rand(sum(lengths), dtype=torch.float64)
    new = old + 1e-3 * torch.randn(len(old), dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    names = {
        "gspo_loss": gspo.grpo_loss if name == "grpo_loss" else gspo.gspo_loss,
        "log_probs": unpacked(new, lengths),
        "old_log_probs": unpacked(old, lengths),
        "mask": unpacked(torch.ones_like(new), lengths),
        "advantages": advantages,
        "tokens": sum(lengths),
    }
    names["gspo_loss"] = functools.partial(names["gspo_loss"], eps_low=3e-4, eps_high=4e-4)
    if name == "packed":
        code = "loss = gspo_loss(log_probs, old_log_probs, advantages, mask)"
    else:
        code = block(PASTE, "denominator=tokens")
    exec(code, names)
    expected = 0
    for log_ratio, advantage in zip((new - old).split(lengths), advantages):
        if name != "grpo_loss":
            log_ratio = log_ratio.mean().expand(len(log_ratio))
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
        objective = torch.minimum(ratio * advantage, clipped * advantage)
        expected -= objective.mean() / 4 if name == "packed" else objective.sum() / sum(lengths)
    assert names["loss"].item() == pytest.approx(expected.item(), abs=1e-9)
