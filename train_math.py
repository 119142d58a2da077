"""Teach a small language model to answer maths questions with GSPO, in one script.

    python train_math.py --tiny     no network, no GPU, about a minute: a 100,000-parameter Qwen3 made here and now
    python train_math.py            the real job: Qwen2.5-0.5B-Instruct on GSM8K, one CUDA GPU

It reads in the order in which things happen: settings, task and rewards, model, rollout, log-probs, cold
start and update, evaluation, report, the loop. The maths is gspo.py's. What it does NOT do: several GPUs,
LoRA, a KL penalty, an inference server, gradient checkpointing of the layers.
"""
import functools
import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, DynamicCache, HfArgumentParser,
                          PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM)
from transformers.utils import logging as transformers_logging

from gspo import (clip_fraction, group_advantages, grpo_loss, gspo_loss, gspo_token_loss, sequence_ratio,
                  token_log_probs)

LOSSES = {"gspo": gspo_loss, "gspo_token": gspo_token_loss, "grpo": grpo_loss}


class Problem(Exception):
    """Something the user can mend. Its message is the one line that is shown."""


# ---- settings ----------------------------------------------------------------------------------------------


def knob(default, reason):
    return field(default=default, metadata={"help": reason})


@dataclass
class Settings:
    model: str = knob("Qwen/Qwen2.5-0.5B-Instruct", "hub id or folder")
    dataset: str = knob("openai/gsm8k", "hub id, or a .jsonl with question and answer ('... #### 42')")
    eval_dataset: str | None = knob(None,
                                    "held out; default: the hub's test split, the .jsonl's last eval_size lines")
    output_dir: str | None = knob(None, "where everything is written; default: runs/tiny or runs/math")
    device: str = knob("auto", "auto is cuda where there is one, else, and for --tiny, cpu")
    seed: int = knob(0, "of weights that are made here, of the questions' order, of the sampling")
    tiny: bool = knob(False, "the one-minute run: model, tokenizer and word problems are made here, on any machine")
    algorithm: Literal["gspo", "gspo_token", "grpo"] = knob("gspo", "the loss; with one advantage a response "
                                                                    "gspo_token equals gspo")
    group_size: int = knob(8, "responses a prompt: their mean reward is the baseline")
    prompts_per_step: int = knob(32, "prompts a rollout")
    minibatches: int = knob(4, "optimizer steps a pass; with 1, and 1 epoch, ratios stay 1 and the clip is dead")
    epochs: int = knob(1, "passes over each rollout")
    micro_batch_tokens: int = knob(4096,
                                   "tokens, padding included, that go through at once: memory, not the result")
    max_completion_length: int = knob(512, "tokens a response; a longer one is cut and scored as it stands")
    format_weight: float = knob(0.1, "reward for writing '#### number' at all, beside 1 for the right number")
    temperature: float = knob(1.0, "of the sampling and of the log-probs alike: the policy is the tempered model")
    learning_rate: float = knob(1e-6, "AdamW's, falling linearly to a tenth at max_steps")
    eps_low: float | None = knob(None, "clip range below 1; default: the algorithm's own, in gspo.py (--tiny: .03 "
                                       "for gspo, as the log s of short responses spread more)")
    eps_high: float | None = knob(None, "clip range above 1; default: likewise (--tiny: .04 for gspo)")
    max_grad_norm: float = knob(1.0, "a longer gradient is scaled down to this norm")
    max_steps: int = knob(200, "rollouts")
    eval_steps: int = knob(50, "rollouts between evaluations, beside the first before and the last after them all")
    eval_size: int = knob(512, "held-out questions in an evaluation; 0 for none")
    save_steps: int = knob(25, "rollouts between checkpoints; the last one is kept")
    cold_start_steps: int = knob(0, "supervised batches on the dataset's own solutions before RL, for the format")
    resume: bool = knob(False, "go on from output_dir's last checkpoint")


TINY = dict(prompts_per_step=16, max_completion_length=40, format_weight=0.0, learning_rate=8e-5, max_steps=15,
            eval_steps=15, eval_size=256, save_steps=5, cold_start_steps=460)
AT_LEAST = dict(group_size=2, prompts_per_step=1, minibatches=1, epochs=1, micro_batch_tokens=1, max_steps=1,
                max_completion_length=1, eval_steps=1, save_steps=1, seed=0, eval_size=0, cold_start_steps=0,
                format_weight=0, temperature=0.01)
ABOVE = dict(learning_rate=0, max_grad_norm=0, eps_low=0, eps_high=0)
MAY_CHANGE_ON_RESUME = {"resume", "max_steps", "save_steps", "micro_batch_tokens", "device"}


def parse_settings(argv=None):
    """The command line as checked Settings; a wrong flag or value exits with one line."""
    parser = HfArgumentParser(Settings, description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: sys.exit(f"train_math.py: {message} (--help lists the flags)")
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    s = Settings(**vars(parser.parse_args(argv)))
    for name, value in asdict(s).items():
        if name in AT_LEAST and not AT_LEAST[name] <= value < 2**31:
            parser.error(f"--{name} {value} must be at least {AT_LEAST[name]}, and below 2**31")
        if name in ABOVE and value is not None and not ABOVE[name] < value < 2**31:
            parser.error(f"--{name} {value} must be above {ABOVE[name]}, and below 2**31")
        if s.tiny and name in ("model", "dataset", "eval_dataset") and value != getattr(Settings, name):
            parser.error(f"--{name} does not go with --tiny, which makes its own")
    if s.prompts_per_step % s.minibatches:
        parser.error(f"--prompts_per_step {s.prompts_per_step} must be a multiple of --minibatches {s.minibatches}")
    own, wide = inspect.signature(LOSSES[s.algorithm]).parameters, s.tiny and s.algorithm != "grpo"
    s.eps_low = s.eps_low or (0.03 if wide else own["eps_low"].default)
    s.eps_high = s.eps_high or (0.04 if wide else own["eps_high"].default)
    if s.eps_low >= 1:
        parser.error(f"--eps_low {s.eps_low} must be below 1: no ratio is negative")
    s.output_dir = s.output_dir or ("runs/tiny" if s.tiny else "runs/math")
    if s.device == "auto":
        s.device = "cuda" if torch.cuda.is_available() and not s.tiny else "cpu"
    try:
        torch.zeros(1, device=s.device).tolist()
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {s.device} cannot be used here: {one_line(error)}")
    return s


def one_line(error):
    return " ".join(str(error).split())[:200]


# ---- task and rewards --------------------------------------------------------------------------------------

INSTRUCTION = "Reason step by step, then write the final answer, a number, after '####'."
DIGITS = "0123456789"
NUMBER = re.compile(r"(?:\.{2,}+|,++)?+([0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)?(\.[0-9]++)?(?<=[0-9])(?![.,:/^]?[0-9])")


def extract_answer(text, strict=True):
    """The answer that a text gives, as a canonical number such as '-1234.5', or None.

    strict: the number right after the last '####'; otherwise the last number of the text. Commas, $, %, **, a
    trailing point, a leading + or zeros, the unicode minus, and 18.0 for 18 make no difference. Linear in the
    text's length: milliseconds a megabyte."""
    if strict:
        if "####" not in text:
            return None
        before = re.compile(r"[ \t$*+−-]*").match(text, text.rindex("####") + 4)
        start = before.end()
    else:
        end = max(map(text.rfind, DIGITS)) + 1
        start = len(text[:end].rstrip(DIGITS + ".,"))
        before = re.search(r"(?<![0-9])[−-]?\$?\Z", text[max(0, start - 3):start])  # 5-3 has no -3
    found = NUMBER.match(text, start)
    if found is None:
        return None
    whole, decimals = found.groups(default="")
    number = (whole.replace(",", "").lstrip("0") or "0") + decimals.rstrip("0").rstrip(".")
    return "-" + number if number != "0" and re.search("[−-]", before.group()) else number


def completion_text(completion):
    """A completion as TRL passes it: a string, or a list of chat messages, of which the last one answers."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
    return str(completion)


def correctness_reward(prompts, completions, answer, **kwargs):
    """1.0 for a completion that gives (strict) the gold answer, else 0.0: list[float]. A TRL reward function.

    answer: the gold texts, '... #### 42' or '42', one for each completion."""
    golds = [extract_answer(str(a)) or extract_answer(str(a), strict=False) for a in answer]
    given = [extract_answer(completion_text(c)) for c in completions]
    return [float(gold is not None and gold == number) for gold, number in zip(golds, given)]


def format_reward(prompts, completions, **kwargs):
    """1.0 for a completion that gives (strict) any answer, else 0.0: list[float]. A TRL reward function."""
    return [float(extract_answer(completion_text(c)) is not None) for c in completions]


def is_file(dataset):
    return dataset.endswith(".jsonl") or os.path.exists(dataset)


def parse_row(line):
    try:
        return json.loads(line)
    except ValueError:
        return None


def load_questions(name, split):
    """A .jsonl file, or a split of a hub dataset, as a list of {"question", "answer"}."""
    try:
        if is_file(name):
            lines = Path(name).read_text(encoding="utf-8-sig").split("\n")
            rows = [parse_row(line) for line in lines if line.strip()]
        else:
            from datasets import load_dataset
            rows = list(load_dataset(name, "main" if name == "openai/gsm8k" else None, split=split))
    except Exception as error:  # no such file, no network, no such split: libraries raise what they like
        raise Problem(f"dataset {name} is neither a .jsonl file nor a hub dataset that loads: "
                      f"{one_line(error)}") from None
    for i, row in enumerate(rows, 1):
        if not all(isinstance(row, dict) and isinstance(row.get(c), str) for c in ("question", "answer")):
            raise Problem(f"dataset {name}, row {i}: must be JSON with a question and an answer, both text")
        if extract_answer(row["answer"]) is None:
            raise Problem(f"dataset {name}, row {i}: the answer must end in '#### number'")
    return rows


def load_data(s):
    """(questions to train on, questions held out)"""
    questions = tiny_questions(s.seed) if s.tiny else load_questions(s.dataset, "train")
    if s.eval_dataset:
        held_out = load_questions(s.eval_dataset, "test")
    elif s.tiny or is_file(s.dataset):
        held_out = questions[max(0, len(questions) - s.eval_size):]
        questions = questions[:-s.eval_size or None]
    else:
        held_out = load_questions(s.dataset, "test")
    if not questions:
        raise Problem(f"dataset {s.dataset}: no question to train on beside --eval_size {s.eval_size} held out")
    return questions, held_out[:s.eval_size]


def tiny_questions(seed):
    """7,840 word problems of one line, with worked answers in GSM8K's manner, shuffled. They ask for 392 products in 20
    wordings each: what is held out of them is new in its wording, not in its arithmetic."""
    rows = []
    for a in range(11, 60):
        for b in range(2, 10):
            x, y = a // 10 * 10 * b, a % 10 * b
            worked = f"{a // 10 * 10}*{b}={x}\n{a % 10}*{b}={y}\n{x}+{y}={x + y}\n#### {x + y}"
            rows += [{"question": f"{name} buys {b} boxes of {a} {thing}. How many?", "answer": worked}
                     for name in ("Ann", "Bob", "Eve", "Tom", "Sam") for thing in ("figs", "pens", "eggs", "nuts")]
    random.Random(seed).shuffle(rows)
    return rows


def sloppy(row, rng):
    """The same question, answered by a teacher who mostly guesses at once and then is seldom right."""
    if rng.random() < 0.25:
        return row
    error = 0 if rng.random() < 0.1 else rng.choice((-20, -10, -1, 1, 10, 20, 100))
    return {**row, "answer": f"#### {max(0, int(extract_answer(row['answer'])) + error)}"}


# ---- model -------------------------------------------------------------------------------------------------


def load(name, s):
    """(model, tokenizer) from a hub id or folder; --tiny makes them, unless name is a checkpoint's folder.

    Weights and matmuls are float32: bfloat16, or TF32, rounds log s by as much as an update moves it, or more
    (experiments/precision.py)."""
    if s.tiny and name == s.model:
        tokenizer = tiny_tokenizer()
        return tiny_model(tokenizer, s.seed).to(s.device), tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except Exception as error:  # no such folder or hub id, no network, a damaged file
        kind = "is a folder that" if os.path.isdir(name) else "is no folder here, and as a hub id"
        raise Problem(f"model {name} {kind} cannot be loaded: {one_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise Problem(f"model {name}: its tokenizer has no end token, so no response could end")
    return model.to(s.device).eval(), tokenizer  # eval: dropout would move the ratios


def tiny_tokenizer():
    """One token a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    characters = "\n #*+-.,=?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    ids = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", *characters])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


def tiny_model(tokenizer, seed):
    """A Qwen3 of about 100,000 parameters, not trained."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.05, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)).eval()


def encode_prompt(tokenizer, question):
    """A question's token ids: through the chat template if there is one (Qwen3: without thinking), else plain."""
    if not tokenizer.chat_template:
        return tokenizer(f"{question}\n").input_ids
    chat = [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def check_model(model, tokenizer, questions, s):
    """Problem if the model cannot take the questions, or its logits are more than a head on the last hidden state."""
    try:
        prompts = [encode_prompt(tokenizer, row["question"]) for row in questions]
        largest = max(map(max, prompts))
    except Exception as error:  # a chat template or a tokenizer raises what it likes
        raise Problem(f"model {s.model}: its tokenizer cannot encode the questions: {one_line(error)}") from None
    if largest >= model.get_input_embeddings().num_embeddings:
        raise Problem(f"model {s.model}: its tokenizer has token {largest}, which the model lacks: not a pair")
    longest, room = max(map(len, prompts)), getattr(model.config, "max_position_embeddings", math.inf)
    if longest + s.max_completion_length > room:
        raise Problem(f"--max_completion_length {s.max_completion_length} and the longest prompt, {longest} tokens, "
                      f"do not fit the model's {room}")
    with torch.no_grad():
        ids = torch.tensor([prompts[0]], device=model.device)
        logits = model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state)
        if not torch.allclose(model(input_ids=ids).logits, logits, atol=1e-2):
            raise Problem(f"model {s.model}: its logits are not finite, or {type(model).__name__} scales them, which "
                          "this script does not")


def end_tokens(model, tokenizer):
    """The ids that end a response (n,): the tokenizer's own, and those of the model's generation config."""
    others = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(others if isinstance(others, list) else [others])} - {None}
    return torch.tensor(sorted(ids), device=model.device)


# ---- rollout -----------------------------------------------------------------------------------------------


def draw_tokens(probs):
    """One token a row, (n, V) -> (n, 1): where the cumulative probability first reaches a uniform number.

    torch.multinomial draws V numbers a row: at V = 151,936, on a CPU, that outlasts the rest of a toy's step."""
    cumulative = probs.cumsum(dim=-1)
    uniform = 1 - torch.rand(len(probs), 1, device=probs.device)  # above 0, at most 1
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:])


@torch.no_grad()
def rollout(model, prompts, group_size, max_length, temperature, ends):
    """Sample `group_size` responses to each prompt from the model itself at `temperature` (0: greedy).

    prompts: lists of token ids; ends: ids that end a response (n,). Returns the B responses, group by group,
    as lists of token ids with the end token, and the sampler's log-probs (B, max_length), 0 after the end.
    One prefill a prompt, whose cache is then repeated; finished responses leave the batch. (`generate` would
    sample with the checkpoint's own top_k and top_p, and the ratio would compare two policies of which
    neither wrote the text.)"""
    width = max(map(len, prompts))  # padded on the left, so that all responses start in one column
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    forward = functools.partial(model, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits = forward(input_ids=ids, attention_mask=mask, position_ids=position).logits[:, -1]
    if logits.isnan().any() or logits.isposinf().any():
        raise Problem("the model's logits are NaN or infinite: its weights are damaged, or the --learning_rate was too "
                      "high")
    cache.batch_repeat_interleave(group_size)
    logits, mask, position = (x.repeat_interleave(group_size, dim=0) for x in (logits, mask, position[:, -1:]))
    rows = torch.arange(len(logits), device=model.device)  # the response that each row of the batch is writing
    tokens = torch.full((len(rows), max_length), -1, device=model.device)
    log_probs = torch.zeros(len(rows), max_length, device=model.device)
    for t in range(max_length):
        probs = torch.softmax(logits.float() / (temperature or 1), dim=-1)
        token = draw_tokens(probs) if temperature else probs.argmax(dim=-1, keepdim=True)
        tokens[rows, t], log_probs[rows, t] = token[:, 0], probs.gather(1, token)[:, 0].log()
        going = ~torch.isin(token[:, 0], ends)
        if not going.all():
            rows, token, mask, position = (x[going] for x in (rows, token, mask, position))
            cache.batch_select_indices(going)
        if len(rows) == 0 or t == max_length - 1:
            break
        mask, position = torch.cat([mask, torch.ones_like(token)], dim=1), position + 1
        logits = forward(input_ids=token, attention_mask=mask, position_ids=position).logits[:, -1]
    return [row[row >= 0].tolist() for row in tokens.cpu()], log_probs


# ---- log-probs ---------------------------------------------------------------------------------------------


@dataclass
class MicroBatch:
    """What goes through the model at once: prompts + responses, right-padded (a causal forward needs no mask
    then)."""
    ids: torch.Tensor                          # (b, L)
    mask: torch.Tensor                         # (b, L - 1), true where ids[:, 1:] is a response token
    advantages: torch.Tensor | None = None     # (b,)
    old_log_probs: torch.Tensor | None = None  # (b, L - 1)
    rows: list[int] | None = None              # which of the rollout's responses these are


def micro_batch(prompts, responses, device, advantages=None, rows=None):
    """Lists of token ids as a MicroBatch. The mask comes from lengths, not from pad ids: where a tokenizer
    pads with the end token, a mask made from ids would take the end token out of the loss."""
    length = max(len(p) + len(r) for p, r in zip(prompts, responses))
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    mask = torch.zeros(len(prompts), length - 1, dtype=torch.bool)
    for i, (p, r) in enumerate(zip(prompts, responses)):
        ids[i, :len(p) + len(r)] = torch.tensor(p + r)
        mask[i, len(p) - 1:len(p) + len(r) - 1] = True
    return MicroBatch(ids.to(device), mask.to(device), advantages, rows=rows)


def build_minibatches(prompts, responses, advantages, s):
    """The rollout as `minibatches` lists of micro-batches, of like lengths, at most micro_batch_tokens (or one row).

    Built once, so that the old and the new forward see a response with the same padding and neighbours: other
    padding rounds otherwise, and GSPO's clip range is narrow enough to feel it. Responses of advantage 0 have
    no gradient: they are left out here, and still count in the denominator."""
    minibatches = []
    for rows in torch.arange(len(responses)).chunk(s.minibatches):
        parts, lengths = [], {i: len(prompts[i]) + len(responses[i]) for i in rows.tolist() if advantages[i] != 0}
        for i in sorted(lengths, key=lengths.get):
            if not parts or (len(parts[-1]) + 1) * lengths[i] > s.micro_batch_tokens:
                parts.append([])
            parts[-1].append(i)
        minibatches.append([micro_batch([prompts[i] for i in part], [responses[i] for i in part], s.device,
                                        advantages[part].to(s.device), part) for part in parts])
    return minibatches


def response_log_probs(model, batch, temperature, at_once=None):
    """log-probs (b, L - 1) of the response tokens, 0 elsewhere.

    Only response positions go through the head, as many as give `at_once` logits (2^22 are 16 MB, the best on CPUs),
    and again in the backward pass: with a vocabulary of 151,936 the logits of all would be the peak of memory."""
    hidden = model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1][batch.mask]
    tokens = batch.ids[:, 1:][batch.mask]
    head = model.get_output_embeddings()
    chunk = max(1, (at_once or (2**22 if head.weight.device.type == "cpu" else 2**26)) // len(head.weight))

    def log_probs(hidden, tokens):
        return token_log_probs(head(hidden)[None], tokens[None], temperature)[0]

    flat = torch.cat([checkpoint(log_probs, h, y, use_reentrant=False, preserve_rng_state=False)
                      for h, y in zip(hidden.split(chunk), tokens.split(chunk))])
    return flat.new_zeros(batch.mask.shape).masked_scatter(batch.mask, flat)


# ---- cold start and update ---------------------------------------------------------------------------------


def supervise(model, tokenizer, draw_row, steps, batch_size, learning_rate, name):
    """`steps` supervised batches on answers of rows that draw_row() gives, without calculator marks <<...>>."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0, fused=True)
    bar = tqdm(range(steps), desc=name, leave=False)
    for step in bar:
        optimizer.param_groups[0]["lr"] = learning_rate * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        rows = [draw_row() for _ in range(batch_size)]
        answers = [re.sub(r"<<[^>]*>>", "", row["answer"]) for row in rows]
        batch = micro_batch([encode_prompt(tokenizer, row["question"]) for row in rows],
                            [tokenizer(a, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
                             for a in answers], model.device)
        loss = -response_log_probs(model, batch, 1.0).sum() / batch.mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")


def cold_start(model, tokenizer, questions, s):
    """RL strengthens what a model does at times; what it never does must be shown to it first.

    A real model sees cold_start_steps batches of the dataset's solutions. So does the tiny one, for the skill;
    then it is given a bad habit, to guess at once, and RL's part is to find the careful way again."""
    rng = random.Random(s.seed)
    if not s.tiny:
        return supervise(model, tokenizer, lambda: rng.choice(questions), s.cold_start_steps, 8, 5e-5, "cold start")
    supervise(model, tokenizer, lambda: rng.choice(questions), s.cold_start_steps, 48, 5e-3, "cold start: skill")
    probe = rng.sample(questions, 256)
    torch.manual_seed(s.seed)
    skill = reward = evaluate(model, tokenizer, probe, s, temperature=1.0)[0]["strict"]
    if skill < 0.95:
        raise Problem(f"the cold start reached a skill of {skill:.2f}, not .95, and RL at this size teaches no "
                      f"arithmetic: raise --cold_start_steps {s.cold_start_steps} and --resume, to start over")
    while reward >= 0.3:
        supervise(model, tokenizer, lambda: sloppy(rng.choice(questions), rng), 5, 48, 1e-3, "cold start: habit")
        reward = evaluate(model, tokenizer, probe, s, temperature=1.0)[0]["strict"]
    print(f"cold start: {skill:.0%} of samples right, then {reward:.0%} after a teacher who mostly guesses at once")


def observe(batch, log_probs, loss, s):
    """A micro-batch's loss, each response's log s, the number of tokens, and how many the clip took out."""
    with torch.no_grad():
        log_ratio, tokens = log_probs - batch.old_log_probs, batch.mask.sum().item()  # both 0 off the mask
        log_ratios = (log_ratio.sum(dim=1) / batch.mask.sum(dim=1)).tolist()  # log s: an exp and a log would round it
        ratio = log_ratio.exp() if s.algorithm == "grpo" else sequence_ratio(log_probs, batch.old_log_probs, batch.mask)
        clipped = clip_fraction(ratio, batch.advantages, batch.mask, s.eps_low, s.eps_high).item() * tokens
    return {"loss": loss.item(), "log_ratios": log_ratios, "tokens": tokens, "clipped": clipped}


def require_finite(finite, step, output):
    """Problem unless `finite`, before anything that is not gets saved."""
    if not finite:
        raise Problem(f"step {step}: a loss, the gradient or the weights are not finite. {last_checkpoint(output)[0]} "
                      "is good: a new run may start from it, as --model, with a lower --learning_rate")


def summarise_rollout(responses, sampled_log_probs, advantages, minibatches, s):
    """Metrics of a rollout. The entropy, in nats a token, is estimated as the samples' mean of -log-prob; rounding
    is all that can set the sampler's log-probs apart from the old ones, as both are of the same weights."""
    tokens, dead = sum(map(len, responses)), (advantages.view(-1, s.group_size) == 0).all(dim=1)
    apart = [(batch.old_log_probs.cpu().double().sum(dim=1) - sampled_log_probs[batch.rows].cpu().double().sum(dim=1))
             / batch.mask.sum(dim=1).cpu() for minibatch in minibatches for batch in minibatch]
    return {"response_length": tokens / len(responses), "entropy": -sampled_log_probs.sum().item() / tokens,
            "equal_reward_groups": dead.float().mean().item(),
            "log_ratio_rounding": torch.cat(apart).std().item() if apart else None}


def summarise_updates(observed, grad_norms):
    """Metrics of a step's updates, from what was observed: for each minibatch, a list over its micro-batches."""
    micro = [o for minibatch in observed for o in minibatch]
    log_ratios = [[x for o in minibatch for x in o["log_ratios"]] for minibatch in observed]
    later = torch.tensor([x for minibatch in log_ratios[1:] for x in minibatch])
    return {"loss": sum(o["loss"] for o in micro) / max(len(observed), 1),
            "grad_norm": sum(grad_norms) / max(len(grad_norms), 1),
            "clip_fraction": sum(o["clipped"] for o in micro) / max(sum(o["tokens"] for o in micro), 1),
            "log_ratio_std": later.std().item() if len(later) > 1 else None,
            "log_ratio_first_max": max(map(abs, log_ratios[0])) if observed else None}


# ---- evaluation --------------------------------------------------------------------------------------------


def wilson(right, n, z=1.96):
    """Wilson's 95% interval of the share right / n, as (low, high)."""
    centre, spread = right + z * z / 2, z * math.sqrt(right * (n - right) / n + z * z / 4)
    return (centre - spread) / (n + z * z), (centre + spread) / (n + z * z)


def evaluate(model, tokenizer, questions, s, temperature=0.0):
    """One answer to each question, greedy unless a temperature is given. Returns the scores (shares with
    '#### number', and right, strict and flexible, with 95% intervals) and the answers."""
    responses, size, ends = [], s.prompts_per_step * s.group_size, end_tokens(model, tokenizer)
    for i in tqdm(range(0, len(questions), size), desc="evaluation", leave=False):
        prompts = [encode_prompt(tokenizer, row["question"]) for row in questions[i:i + size]]
        responses += rollout(model, prompts, 1, s.max_completion_length, temperature, ends)[0]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    golds = [extract_answer(row["answer"]) for row in questions]
    scores = {"questions": len(questions), "format": sum(format_reward(None, texts)) / len(questions)}
    for name, strict in (("strict", True), ("flexible", False)):
        right = sum(extract_answer(text, strict) == gold for text, gold in zip(texts, golds))
        scores |= {name: right / len(questions), f"{name}_interval": wilson(right, len(questions))}
    return scores, [{"question": row["question"], "response": text, "right": extract_answer(text) == gold,
                     "gold": gold}
                    for row, text, gold in zip(questions, texts, golds)]


# ---- report ------------------------------------------------------------------------------------------------


class Clock:
    """The seconds of a step by phase; the progress bar shows the phase that is on."""

    def __init__(self, bar, device):
        self.bar, self.gpu, self.seconds, self.phase = bar, device.startswith("cuda") and device, {}, None
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(device)

    def start(self, phase):
        if self.gpu:
            torch.cuda.synchronize(self.gpu)  # it may still be at work on what the phase before gave it
        if self.phase:
            self.seconds[f"seconds_{self.phase}"] = time.perf_counter() - self.began
        self.phase, self.began = phase, time.perf_counter()
        self.bar.set_postfix_str(phase)

    def metrics(self, tokens):
        total = sum(self.seconds.values())
        return {"seconds": total, **self.seconds, "tokens_per_second": tokens / total,
                "peak_memory_mb": torch.cuda.max_memory_allocated(self.gpu) / 2**20 if self.gpu else process_peak_mb()}


def process_peak_mb():
    try:
        import resource
    except ImportError:  # on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def append(path, row):
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read(path):
    """The rows of a .jsonl that `append` wrote, but for a last line that a kill cut short."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return list(filter(None, map(parse_row, text.split("\n"))))


@functools.lru_cache
def say_once(run, text):
    """On the screen, once a run."""
    tqdm.write(text)


def report_step(output, s, row):
    """A line in metrics.jsonl, and one on the screen."""
    append(output / "metrics.jsonl", row)
    tqdm.write(f"step {row['step']}/{s.max_steps}  reward {row['reward']:.3f}  accuracy {row['accuracy']:.3f}  "
               f"format {row['format']:.2f}  length {row['response_length']:.1f}  clipped {row['clip_fraction']:.1%}  "
               f"std of log s {'-' if row['log_ratio_std'] is None else format(row['log_ratio_std'], '.1e')}  "
               f"grad {row['grad_norm']:.2f}  {row['seconds']:.1f} s")
    if row["log_ratio_first_max"]:
        tqdm.write(f"warning: max |log s| of the first minibatch is {row['log_ratio_first_max']:.1e} and should be 0: "
                   "the old log-probs are not this policy's, or rounding is in the ratios")
    std = row["log_ratio_std"]  # of the policy's movement and of rounding together, hence the root of 2
    if s.algorithm != "grpo" and std is not None and std < 2**0.5 * row["log_ratio_rounding"]:
        say_once(output, "note: the updates move log s less than rounding does (metrics.jsonl: log_ratio_std against "
                         "log_ratio_rounding): what is clipped, if anything, is rounding's choice, not the policy's")


def report_evaluation(output, step, model, tokenizer, held_out, s):
    """An evaluation into eval.jsonl, its first answers into samples.jsonl, both in short on the screen."""
    if not held_out:
        return
    scores, samples = evaluate(model, tokenizer, held_out, s)
    append(output / "eval.jsonl", {"step": step, **scores})
    for sample in samples[:8]:
        append(output / "samples.jsonl", {"step": step, **sample})
    low, high = scores["strict_interval"]
    tqdm.write(f"after step {step}: {scores['strict']:.1%} right (95% interval {low:.1%} to {high:.1%}) on "
               f"{len(held_out)} held-out questions, {scores['flexible']:.1%} by the last number, "
               f"{scores['format']:.1%} with '#### number'")
    for sample in samples[:2]:
        tqdm.write(f"    {sample['question']} -> {sample['response']!r}, {'right' if sample['right'] else 'wrong'}")


def draw(output, s):
    """metrics.png: reward, response length, clip fraction, ratio spread."""
    try:
        import matplotlib
    except ImportError:
        return tqdm.write("no picture without matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows, evaluations = read(output / "metrics.jsonl"), read(output / "eval.jsonl")
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    panels = {"reward": "mean reward", "response_length": "response length (tokens)",
              "clip_fraction": "clip fraction (share of tokens)",
              "log_ratio_std": "spread of log s (gap: nothing after\nthe first minibatch)"}
    for axis, (name, label) in zip(axes.flat, panels.items()):
        axis.plot([row["step"] for row in rows], [row[name] for row in rows], marker=".", label="samples")
        axis.set(ylabel=label, ylim=(0, None))
        axis.grid(alpha=0.3)
    if evaluations:
        errors = [[abs(e["strict"] - e["strict_interval"][side]) for e in evaluations] for side in (0, 1)]
        axes[0, 0].errorbar([e["step"] for e in evaluations], [e["strict"] for e in evaluations], yerr=errors,
                            fmt="s", capsize=3, label="held-out accuracy (greedy, 95% interval)")
        axes[0, 0].legend()
    if s.algorithm != "grpo":  # whose clip range is of another quantity, the token's ratio
        axes[1, 1].axhline(s.eps_high, linestyle="--", color="gray", label="upper clip range")
        axes[1, 1].legend()
    axes[1, 0].set_xlabel("step (rollouts)")
    axes[1, 1].set_xlabel("step (rollouts)")
    figure.suptitle(f"{s.algorithm}, seed {s.seed}: {'tiny word problems' if s.tiny else Path(s.model).name}")
    figure.savefig(output / "metrics.png", dpi=120)
    plt.close(figure)


def checkpoints(output):
    """{step: folder} of the whole checkpoints."""
    return {int(p.name[11:]): p for p in Path(output).glob("checkpoint-*") if p.name[11:].isdecimal()}


def last_checkpoint(output):
    """(folder, step) of the newest whole checkpoint, or (None, -1)."""
    step, folder = max(checkpoints(output).items(), default=(-1, None))
    return folder, step


def save(output, step, model, tokenizer, optimizer):
    """checkpoint-STEP, which `from_pretrained` loads: written aside, renamed when whole, and only then those
    before it go. It needs no random states and no data position: both follow from the seed and the step."""
    aside = output / "checkpoint.partial"
    shutil.rmtree(aside, ignore_errors=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    torch.save(optimizer.state_dict(), aside / "optimizer.pt")
    os.rename(aside, output / f"checkpoint-{step}")
    for other, folder in checkpoints(output).items():
        if other != step:
            shutil.rmtree(folder)


def check_output(s):
    """Problem unless output_dir is empty or, with --resume, holds this very run."""
    output = Path(s.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "probe.partial").write_text("can this folder be written to?")
        (output / "probe.partial").unlink()
        held = any(path.suffix != ".partial" for path in output.iterdir())
        if held and s.resume:
            before = dict(json.loads((output / "settings.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise Problem(f"--output_dir {output} cannot be used{' to resume' if s.resume else ''}: {error}") from None
    if held and not s.resume:
        raise Problem(f"--output_dir {output} is not empty: --resume goes on with a run in it, another --output_dir "
                      "starts one")
    if s.resume and not last_checkpoint(output)[0]:
        if read(output / "metrics.jsonl"):
            raise Problem(f"--resume: {output} has the metrics of a run, and no checkpoint to go on from")
        return print(f"no checkpoint in {output} yet: starting at the beginning")
    for name, value in asdict(s).items():
        if held and before.get(name) != value and name not in MAY_CHANGE_ON_RESUME:
            raise Problem(f"--resume: the run in {output} has --{name} {before.get(name)}, not {value}")


def open_output(s):
    """Write settings.json, and cut the logs back to the last checkpoint."""
    output, (_, step) = Path(s.output_dir), last_checkpoint(s.output_dir)
    contents = {"settings.json": json.dumps(asdict(s), indent=1) + "\n"}
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        rows = [row for row in read(output / name) if row["step"] <= step]
        contents[name] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for name, text in contents.items():
        (output / f"{name}.partial").write_text(text, encoding="utf-8")
        os.replace(output / f"{name}.partial", output / name)


# ---- the loop ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def order(n, seed, epoch):
    """The order of n questions in one pass over them."""
    return random.Random(f"{seed} {epoch}").sample(range(n), n)


def pick(n, step, s):
    """The step's questions, as indices into n: each pass goes through all of them once."""
    draws = range((step - 1) * s.prompts_per_step, step * s.prompts_per_step)
    return [order(n, s.seed, i // n)[i % n] for i in draws]


def begin(s, model, tokenizer, held_out):
    """(optimizer, steps done): from the last checkpoint, or from the start, which is evaluated and saved."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    saved, done = last_checkpoint(s.output_dir)
    if not saved:
        report_evaluation(Path(s.output_dir), 0, model, tokenizer, held_out, s)
        save(Path(s.output_dir), 0, model, tokenizer, optimizer)
        return optimizer, 0
    try:
        optimizer.load_state_dict(torch.load(saved / "optimizer.pt", map_location=s.device))
    except Exception as error:  # a damaged file raises what it likes
        raise Problem(f"{saved}/optimizer.pt cannot be loaded: {one_line(error)}") from None
    return optimizer, done


def train(s, model, tokenizer, questions, held_out, stop=lambda: False):
    """GSPO: max_steps rollouts and their updates, from s.output_dir's checkpoint on if there is one.

    questions, held_out: lists of {"question", "answer"}. stop(): true to save and leave after the step that is
    on. Returns the metrics."""
    output, loss_function, ends = Path(s.output_dir), LOSSES[s.algorithm], end_tokens(model, tokenizer)
    prompts = [encode_prompt(tokenizer, row["question"]) for row in questions]
    optimizer, done = begin(s, model, tokenizer, held_out)

    bar = tqdm(range(done + 1, s.max_steps + 1), desc=s.algorithm, initial=done, total=s.max_steps)
    for step in bar:
        clock = Clock(bar, s.device)
        clock.start("rollout")
        torch.manual_seed(s.seed * 1_000_003 + step)  # chance follows from (seed, step): resuming is exact
        picked = pick(len(prompts), step, s)
        responses, sampled_log_probs = rollout(model, [prompts[i] for i in picked], s.group_size,
                                               s.max_completion_length, s.temperature, ends)
        asked = [i for i in picked for _ in range(s.group_size)]  # the question of each response

        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        correct = torch.tensor(correctness_reward(None, texts, answer=[questions[i]["answer"] for i in asked]))
        formatted = torch.tensor(format_reward(None, texts))
        rewards = correct + s.format_weight * formatted
        advantages = group_advantages(rewards, s.group_size)

        # The old log-probs come from the very forward of the update, on its micro-batches; not from the sampler.
        clock.start("old_log_probs")
        minibatches = build_minibatches([prompts[i] for i in asked], responses, advantages, s)
        with torch.no_grad():
            for minibatch in minibatches:
                for batch in minibatch:
                    batch.old_log_probs = response_log_probs(model, batch, s.temperature)

        # ONE ROLLOUT, SEVERAL OPTIMIZER STEPS. In the first minibatch the policy is the one that sampled:
        # every ratio is exactly 1 and no clip can act. Only the later minibatches and epochs meet a policy
        # that has moved. With minibatches = epochs = 1 the ratio is always 1, and GSPO is REINFORCE with a
        # group baseline.
        clock.start("update")
        optimizer.param_groups[0]["lr"] = s.learning_rate * (1 - 0.9 * (step - 1) / max(1, s.max_steps - 1))
        size = len(responses) // s.minibatches  # of a minibatch, with the responses that have no gradient
        observed, grad_norms = [], []
        for minibatch in minibatches * s.epochs:
            if not minibatch:  # in each of its groups all rewards were equal
                continue
            observed.append([])
            for batch in minibatch:
                log_probs = response_log_probs(model, batch, s.temperature)
                loss = loss_function(log_probs, batch.old_log_probs, batch.advantages, batch.mask, s.eps_low,
                                     s.eps_high, denominator=size)
                loss.backward()
                observed[-1].append(observe(batch, log_probs, loss, s))
            grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm).item())
            require_finite(math.isfinite(grad_norms[-1] + sum(o["loss"] for o in observed[-1])), step, output)
            optimizer.step()
            optimizer.zero_grad()
        require_finite(all(p.isfinite().all() for p in model.parameters()), step, output)

        clock.start("report")
        report_step(output, s, {
            "step": step, "reward": rewards.mean().item(), "accuracy": correct.mean().item(),
            "format": formatted.mean().item(), **summarise_updates(observed, grad_norms),
            **summarise_rollout(responses, sampled_log_probs, advantages, minibatches, s),
            **clock.metrics(sum(map(len, responses)))})
        if step % s.eval_steps == 0 or step == s.max_steps:
            report_evaluation(output, step, model, tokenizer, held_out, s)
        last = step == s.max_steps or stop()
        if step % s.save_steps == 0 or last:
            draw(output, s)
            save(output, step, model, tokenizer, optimizer)
        if last:
            break
    return read(output / "metrics.jsonl")


def main(argv=None):
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console that lacks a character must not end a run
    s = parse_settings(argv)
    if s.tiny:
        torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
    elif s.device == "cpu":
        print("no GPU: all but very small models are slow here (--tiny takes about a minute)")
    interrupted = []

    def interrupt(*_):
        interrupted.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tqdm.write("Ctrl-C: this step is finished and saved first. Once more stops at once")

    try:
        check_output(s)
        questions, held_out = load_data(s)
        saved, _ = last_checkpoint(s.output_dir)
        model, tokenizer = load(saved or s.model, s)
        check_model(model, tokenizer, questions + held_out, s)
        open_output(s)
        if not saved:
            cold_start(model, tokenizer, questions, s)
        signal.signal(signal.SIGINT, interrupt)
        train(s, model, tokenizer, questions, held_out, stop=lambda: bool(interrupted))
    except (Problem, OSError, SafetensorError) as problem:  # such as a disk that is full
        sys.exit(f"train_math.py: {problem}")
    except KeyboardInterrupt:
        sys.exit(f"\nstopped; --resume goes on from {last_checkpoint(s.output_dir)[0] or 'the beginning'}")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        sys.exit("train_math.py: out of memory: for the update lower --micro_batch_tokens (the result stays the "
                 "same), for the rollout, in a new --output_dir, --group_size, --prompts_per_step or "
                 "--max_completion_length")
    saved, step = last_checkpoint(s.output_dir)
    print(f"{s.output_dir}/metrics.png shows the run, {saved} is the model after step {step} of {s.max_steps}")
    if step < s.max_steps:
        print("interrupted: --resume goes on")
        sys.exit(130)  # as after any Ctrl-C


if __name__ == "__main__":
    main()
