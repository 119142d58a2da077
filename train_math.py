r"""Teach a small language model to answer questions better with GSPO, in one script.

    python train_math.py              Qwen2.5-0.5B-Instruct on GSM8K, on one CUDA GPU
    python lesson/tiny.py             the same script on a tiny model: any CPU, about a minute

The maths is gspo.py's, and gspo.py is all that this file needs beside it. It is written in the
order in which things happen: settings - questions and rewards - model and rollout - minibatches
and log-probs - train_step, the algorithm - evaluation and the loop over steps - what goes to disk
- the command line. First reading: train_step, then what it calls. Your own task is a reward
function: `train_math.main(reward=...)`, or `train(...)` with a model of your own.
Left out: several GPUs, a KL penalty, an inference engine, warm-up, logging services.
"""
import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from datasets import load_dataset
from filelock import FileLock
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, HfArgumentParser

from gspo import (
    clip_fraction,
    group_advantages,
    grpo_loss,
    gspo_loss,
    gspo_token_loss,
    token_log_probs,
)

ALGORITHMS = {  # loss, clip range below and above 1
    "gspo": (gspo_loss, 3e-4, 4e-4),
    "gspo_token": (gspo_token_loss, 3e-4, 4e-4),
    "grpo": (grpo_loss, 0.2, 0.27)}


# ---- settings ------------------------------------------------------------------------------------


def flag(default, meaning):
    return field(default=default, metadata={"help": meaning})


@dataclass
class Settings:
    model: str = flag("Qwen/Qwen2.5-0.5B-Instruct", "hub id or folder")
    dataset: str = flag("openai/gsm8k", "hub id, folder of train and test files, or one .jsonl; a "
                        "row has a question and an answer, '42' or '... #### 42'")
    output_dir: str = flag("runs/math", "a run in it goes on where it was saved")
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "cuda or cpu")
    seed: int = flag(0, "of the questions' order and of the sampling")
    instruction: str = flag(
        r"Please reason step by step, and put your final answer within \boxed{}.",
        "stands after each question; Qwen is trained to follow this one")
    # the algorithm
    algorithm: Literal["gspo", "gspo_token", "grpo"] = flag("gspo", "the loss")
    eps_low: float | None = flag(None, "clip range below 1; default 3e-4, for grpo 0.2")
    eps_high: float | None = flag(None, "clip range above 1; default 4e-4, for grpo 0.27")
    group_size: int = flag(8, "responses a prompt: their mean reward is the baseline")
    prompts_per_step: int = flag(32, "prompts a rollout")
    minibatches: int = flag(4, "optimizer steps a pass; with 1, and 1 epoch, all ratios stay 1")
    epochs: int = flag(1, "passes over each rollout")
    learning_rate: float = flag(1e-6, "AdamW's, falling linearly to a tenth at max_steps")
    max_steps: int = flag(200, "rollouts")
    temperature: float = flag(1.0, "of sampling and log-probs: the policy is the tempered model")
    max_completion_length: int = flag(512, "tokens a response; a longer one is cut, and scored so")
    # memory, and evaluation
    micro_batch_tokens: int = flag(1024, "tokens at once in the update: memory, not the result")
    rollout_rows: int = flag(256, "responses sampled at once: memory")
    save_steps: int = flag(25, "rollouts between two saves, each with an evaluation")
    eval_size: int = flag(512, "held-out questions, at most a fifth of a file; 0 for none")

    def __post_init__(self):
        """Fills in the algorithm's own clip range. ValueError: a value that is out of range."""
        for name, value in vars(self).items():
            least = {"seed": 0, "eval_size": 0, "group_size": 2}.get(name, 1e-12)
            if type(value) in (int, float) and not least <= value < 2**31:
                raise ValueError(f"--{name} {value} is out of range")
        if self.prompts_per_step % self.minibatches:
            raise ValueError("--prompts_per_step is no multiple of --minibatches")
        _, low, high = ALGORITHMS[self.algorithm]
        self.eps_low = self.eps_low or low
        self.eps_high = self.eps_high or high


# What may differ when a run goes on; its questions are compared by their hash.
MAY_CHANGE = {"dataset", "output_dir", "device", "max_steps", "micro_batch_tokens",
              "rollout_rows", "save_steps", "eval_size"}


@contextlib.contextmanager
def blame(what):
    """Whatever goes wrong in this block ends the program with one line that says where."""
    try:
        yield
    except Exception as error:  # libraries raise what they like
        sys.exit(f"train_math.py: {what}: {error!r:.300}")


def parse_settings(argv=None):
    """The command line, or argv, as Settings; a wrong flag or value exits with a line or two."""
    parser = HfArgumentParser(Settings, usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    with blame("settings"):
        return parser.parse_args_into_dataclasses(argv)[0]


# ---- questions and rewards -----------------------------------------------------------------------


def extract_answer(completion, strict=True):
    r"""The answer that a completion gives, as a canonical number such as '-1234.5', or None.

    completion: a text, or chat messages, as TRL passes them. strict: the number after the last
    '####' or in the last '\boxed{}', whichever comes last; otherwise the last number. Commas, $, %,
    **, \text{}, a trailing point, a leading + or zeros, a unicode minus, 18.0: all the same."""
    if isinstance(completion, list):
        completion = completion[-1]["content"]
    text = str(completion)
    number = r"(-?)([0-9]+)(\.[0-9]+)?"
    if strict:
        _, *marked = re.split(r"#{4,}|\\boxed *{", text)
        if not marked:
            return None
        text = marked[-1]
        more = r"[.,:/^]?[0-9]|[eE][-+]?[0-9]|\s*\\(?!%|text|[, ][^0-9])"  # 18:30, 18/2, 1e-5, 2\pi
        number = rf"\A[ \t+]*(?:\\text[a-z]*{{[ \t+]*)?{number}(?!{more})"
    text = re.sub(r"\\?\$", "", text).replace("−", "-").replace("*", " ")
    thousands = r"(?<=[0-9])(,|\{,\}|\\,|,\\!)(?=[0-9]{3}(?![0-9]))"
    text = re.sub(thousands, "", text)                    # 1,234 -> 1234
    text = re.sub(r"(?<=[0-9])-", " ", text)              # the last number of 20-18 is 18
    text = re.sub(r"(?<![0-9.])\.(?=[0-9])", "0.", text)  # .5 -> 0.5
    found = re.findall(number, text)
    if not found:
        return None
    sign, whole, decimals = found[-1]
    value = (whole.lstrip("0") or "0") + decimals.rstrip("0").rstrip(".")
    return value if value == "0" else sign + value


def gold_answer(answer):
    r"""The number of a dataset's answer, '... #### 42', '... \boxed{42}' or a plain 42, or None."""
    plain = r"\A\s*+([-−+$]*[0-9,]*+(\.[0-9]+)?%?)\s*\Z"  # *+ gives nothing back: linear time
    return extract_answer(re.sub(plain, r"#### \1", str(answer)))


def correctness_reward(prompts, completions, answer, strict=True, **columns):
    """1.0 for a completion that gives the answer's number, else 0.0: list[float]. For TRL, too."""
    return [float(extract_answer(completion, strict) == (gold_answer(gold) or "no number"))
            for completion, gold in zip(completions, answer)]


def load_questions(cfg, reward=correctness_reward):
    """(rows to train on, rows held out): the test split or, where there is none, the last rows.

    ValueError: a row without a question, or without what the default reward needs."""
    if cfg.dataset.endswith(".jsonl"):
        splits = load_dataset("json", data_files=cfg.dataset)
    else:
        splits = load_dataset(cfg.dataset, "main" if cfg.dataset == "openai/gsm8k" else None)
    questions = list(splits["train"])
    n = len(questions)
    if "test" not in splits:
        n -= min(cfg.eval_size, n // 5)
    held_out = list(splits.get("test", questions[n:]))[:cfg.eval_size]
    del questions[n:]
    for i, row in enumerate(questions + held_out, 1):
        gold = reward is not correctness_reward or gold_answer(row.get("answer"))
        if gold is None or not isinstance(row.get("question"), str):
            raise ValueError(f"row {i}: a question, a text, is needed and, unless you pass a reward"
                             f" of your own, an answer, '42' or '... #### 42'; it is {row}")
    return questions, held_out


def score(reward, questions, texts, **more):
    """The reward of each text, (B,), asked for as TRL does: with all columns of the questions."""
    rows = [row for row in questions for _ in range(len(texts) // len(questions))]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    rewards = reward(prompts=columns["question"], completions=texts, **columns, **more)
    return torch.tensor(rewards, dtype=torch.float32).view(len(texts))  # one a text, or an error


# ---- model and rollout ---------------------------------------------------------------------------


def load(name, device):
    """(model, tokenizer) from a hub id or folder, all in float32: experiments/ shows why."""
    torch.set_float32_matmul_precision("highest")  # some images switch TF32 on
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name)


def encode_prompts(tokenizer, questions, instruction):
    """The token ids of each question, by the chat template (Qwen3's without thinking)."""
    chats = [[{"role": "user", "content": f"{row['question']}\n{instruction}"}]
             for row in questions]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, enable_thinking=False,
                                         return_dict=True).input_ids


def draw_tokens(probs):
    """One token a row, (n, V) -> (n, 1): where the cumulative probability reaches a random number.

    torch.multinomial would draw V random numbers a row: ten times as slow on a CPU."""
    cumulative = probs.cumsum(-1)
    uniform = 1 - torch.rand(len(probs), 1, device=probs.device)  # (0, 1]: never a probability of 0
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:])


@torch.no_grad()
def rollout(model, prompts, group_size, max_length, temperature, ends):
    """Sample `group_size` responses to each prompt at `temperature` (0: greedy).

    prompts: lists of token ids; ends (n,): the ids that end a response. Returns the B responses,
    group by group, lists of token ids with the end token, and their log-probs (B, max_length), 0
    after the end. (model.generate would add the checkpoint's own top_k and top_p: the ratio would
    compare policies of which neither wrote the text.)"""
    ids = pad_sequence([torch.tensor(p, device=model.device) for p in prompts], batch_first=True,
                       padding_value=-1, padding_side="left")  # all responses start in one column
    mask = (ids >= 0).long()
    ids = ids.clamp(min=0)
    cache = DynamicCache(config=model.config)

    n = len(prompts) * group_size
    rows = torch.arange(n, device=ids.device)  # the response that each row of the batch writes
    tokens = torch.full((n, max_length), -1, device=ids.device)
    log_probs = torch.zeros(n, max_length, device=ids.device)
    for t in tqdm(range(max_length), "rollout, tokens", leave=False, delay=1):
        position = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.size(1):]
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position,
                       past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if t == 0:  # each prompt was read once; from here on there is a row a response
            copies = torch.arange(len(prompts), device=ids.device).repeat_interleave(group_size)
            cache.reorder_cache(copies)
            logits, mask = logits[copies], mask[copies]

        probs = torch.softmax(logits.float() / (temperature or 1), dim=-1)
        ids = draw_tokens(probs) if temperature else probs.argmax(-1, keepdim=True)
        tokens[rows, t] = ids[:, 0]
        log_probs[rows, t] = probs.gather(1, ids)[:, 0].log()

        going = (~torch.isin(ids[:, 0], ends)).nonzero()[:, 0]
        if len(going) == 0:
            break
        if len(going) < len(rows):  # finished rows leave the batch
            rows, ids, mask = rows[going], ids[going], mask[going]
            cache.reorder_cache(going)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return [row[row >= 0].tolist() for row in tokens.cpu()], log_probs


def sample(model, tokenizer, questions, group_size, temperature, cfg, rollout=rollout):
    """The rollout for all questions: (prompts, responses, texts, the sampler's log-probs)."""
    prompts = encode_prompts(tokenizer, questions, cfg.instruction)
    more = model.generation_config.eos_token_id  # the tokenizer's end token is not the only one
    ends = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
    if not ends:
        raise ValueError("neither the tokenizer nor the model has an end token")
    ends = torch.tensor(sorted(ends), device=model.device)
    at_once = max(1, cfg.rollout_rows // cfg.group_size)  # prompts: evaluation needs no more memory
    parts = [rollout(model, prompts[i:i + at_once], group_size, cfg.max_completion_length,
                     temperature, ends) for i in range(0, len(prompts), at_once)]
    responses = [response for part, _ in parts for response in part]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return prompts, responses, texts, torch.cat([log_probs for _, log_probs in parts])


# ---- minibatches and log-probs -------------------------------------------------------------------


class MicroBatch:
    """Some of a rollout's prompts and responses, as they go through the model at once."""

    def __init__(self, prompts, responses, rows, device, advantages=None):
        # The mask comes from lengths: from pad ids, it would miss the end token of a model whose
        # pad token is its end token. ids[:, t] predicts ids[:, t + 1]: the mask is a column less.
        ids = [torch.tensor(prompts[i] + responses[i]) for i in rows]
        mask = [torch.arange(1, len(x)) >= len(prompts[i]) for x, i in zip(ids, rows)]
        self.ids = pad_sequence(ids, batch_first=True).to(device)    # (b, L), padded on the right
        self.mask = pad_sequence(mask, batch_first=True).to(device)  # (b, L - 1), of ids[:, 1:]
        self.advantages = None if advantages is None else advantages[rows].to(device)  # (b,)
        # old_log_probs, (b, L - 1), come before the first update


def build_minibatches(prompts, responses, advantages, cfg):
    """The rollout as minibatches, one for each optimizer step of a pass: lists of micro-batches.

    A micro-batch holds at most micro_batch_tokens, or one row. They are built once, for the old
    and the new log-probs: other padding and other neighbours round otherwise, and GSPO's clip range
    is narrow enough to feel it. A response of advantage 0 has no gradient: it is left out here, and
    counts in the loss's denominator. A minibatch of such responses alone is left out, too."""
    minibatches = []
    size = len(responses) // cfg.minibatches
    for start in range(0, len(responses), size):
        rows = [i for i in range(start, start + size) if advantages[i] != 0]
        lengths = {i: len(prompts[i]) + len(responses[i]) for i in rows}
        parts = []
        for i in sorted(rows, key=lengths.get):  # like lengths together: little padding
            if not parts or (len(parts[-1]) + 1) * lengths[i] > cfg.micro_batch_tokens:
                parts.append([])
            parts[-1].append(i)
        if parts:
            minibatches.append([MicroBatch(prompts, responses, part, cfg.device, advantages)
                                for part in parts])
    return minibatches


def response_log_probs(model, batch, temperature):
    """log-probs (b, L - 1) of the response tokens, 0 elsewhere.

    In three lines: logits = model(ids).logits[:, :-1], since position t predicts token t + 1; then
    log_softmax(logits / temperature); then gather, at ids[:, 1:]. But all logits over a vocabulary
    of 151,936 would be the peak of the memory. So only response tokens go through the head, in
    chunks, and once more in the backward pass."""
    hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
    hidden, tokens = hidden[:, :-1][batch.mask], batch.ids[:, 1:][batch.mask]
    head = model.get_output_embeddings()

    def log_probs(hidden, tokens):
        return token_log_probs(head(hidden)[None], tokens[None], temperature)[0]

    n = max(256, 2**22 // len(head.weight))  # rows at once
    parts = [checkpoint(log_probs, h, y, use_reentrant=False, preserve_rng_state=False)
             for h, y in zip(hidden.split(n), tokens.split(n))]
    flat = torch.cat(parts)
    return flat.new_zeros(batch.mask.shape).masked_scatter(batch.mask, flat)


@torch.no_grad()
def check_model(model, tokenizer, questions, cfg):
    """ValueError unless this script can sample from the model and score what it sampled."""
    prompts = encode_prompts(tokenizer, questions, cfg.instruction)
    if max(map(max, prompts)) >= model.get_input_embeddings().num_embeddings:
        raise ValueError("its tokenizer has tokens that it lacks: they are no pair")
    length = max(map(len, prompts)) + cfg.max_completion_length
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", length)
    if length > limit:
        raise ValueError(f"{length} tokens, with --max_completion_length, and its limit is {limit}")
    two = [{"question": ""}, max(questions, key=lambda row: len(row["question"]))]  # unlike lengths
    prompts, responses, _, sampled = sample(model, tokenizer, two, 1, cfg.temperature,
                                            replace(cfg, max_completion_length=8))
    log_probs = response_log_probs(
        model, MicroBatch(prompts, responses, [0, 1], model.device), cfg.temperature)
    gap = (log_probs.sum(1) - sampled.sum(1)).abs().max().item()
    if not gap < 1e-3:
        raise ValueError(f"eight sampled tokens have other log-probs in its forward, by {gap:.2g}: "
                         "its cache, padding or head (scaled, capped?) is not handled here")


# ---- the algorithm -------------------------------------------------------------------------------


def train_step(model, tokenizer, optimizer, questions, step, cfg, reward=correctness_reward,
               rollout=rollout, group_advantages=group_advantages, loss=None,
               build_minibatches=build_minibatches, response_log_probs=response_log_probs):
    """One rollout on these questions, and the updates on it. Returns the step's row of metrics.

    The keywords are the parts that an experiment may want to replace."""
    torch.manual_seed(cfg.seed * 1_000_003 + step)  # a run that goes on draws the same numbers
    done = (step - 1) / max(1, cfg.max_steps - 1)
    optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - 0.9 * done)
    loss = loss or ALGORITHMS[cfg.algorithm][0]
    began = time.perf_counter()

    # 1 SAMPLE group_size responses to each question, from the model as it is.
    prompts, responses, texts, sampled_log_probs = sample(
        model, tokenizer, questions, cfg.group_size, cfg.temperature, cfg, rollout)
    sampled = time.perf_counter()

    # 2 SCORE them, and compare each with its own group.
    rewards = score(reward, questions, texts)
    advantages = group_advantages(rewards, cfg.group_size)

    # 3 REMEMBER the old log-probs: from the very forward of the update, not from the sampler.
    prompts = [prompt for prompt in prompts for _ in range(cfg.group_size)]  # of each response
    minibatches = build_minibatches(prompts, responses, advantages, cfg)
    with torch.no_grad():
        for batch in itertools.chain(*minibatches):
            batch.old_log_probs = response_log_probs(model, batch, cfg.temperature)

    # 4 UPDATE. ONE ROLLOUT, SEVERAL OPTIMIZER STEPS: in the first minibatch the policy is the one
    # that sampled, so every ratio is exactly 1 and no clip can act. Only the later minibatches and
    # epochs meet a policy that has moved. With minibatches = epochs = 1 the ratio is always 1:
    # REINFORCE with the group's advantages.
    denominator = len(responses) // cfg.minibatches  # with the responses that have no gradient
    seen, grad_norms = [], []
    for minibatch in minibatches * cfg.epochs:
        for batch in minibatch:
            log_probs = response_log_probs(model, batch, cfg.temperature)
            value = loss(log_probs, batch.old_log_probs, batch.advantages, batch.mask,
                         cfg.eps_low, cfg.eps_high, denominator=denominator)
            value.backward()
            seen.append((batch, log_probs.detach(), value.item()))
        grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    if not all(p.isfinite().all() for p in model.parameters()):  # as after a loss that was not
        raise FloatingPointError(f"step {step}: loss or weights not finite: lower --learning_rate "
                                 "in a new --output_dir")
    first = len(minibatches[0]) if minibatches else 0  # micro-batches before any optimizer step
    return {"step": step, "reward": rewards.mean().item(),
            **metrics(responses, advantages, sampled_log_probs, seen, grad_norms, first, cfg),
            "seconds": time.perf_counter() - began, "seconds_rollout": sampled - began}


def metrics(responses, advantages, sampled_log_probs, seen, grad_norms, first, cfg):
    """seen: (micro-batch, log-probs, loss), the `first` of them before any optimizer step."""
    sizes = [len(response) for response in responses]
    equal = (advantages.view(-1, cfg.group_size) == 0).all(1)
    log_s = []
    clipped = tokens = 0
    for batch, log_probs, _ in seen:
        log_ratio = log_probs - batch.old_log_probs  # 0 off the mask
        lengths = batch.mask.sum(1)
        log_s.append(log_ratio.sum(1) / lengths)
        ratio = (log_ratio if cfg.algorithm == "grpo" else log_s[-1]).exp()
        share = clip_fraction(ratio, batch.advantages, batch.mask, cfg.eps_low, cfg.eps_high)
        clipped += (share * lengths.sum()).item()
        tokens += lengths.sum().item()
    later = log_s[first:]
    n = max(1, len(grad_norms))
    return {
        "response_length": sum(sizes) / len(sizes),  # tokens, the end token included
        "cut": sizes.count(cfg.max_completion_length) / len(sizes),  # share at the limit
        "equal_reward_groups": equal.float().mean().item(),  # share of groups that teach nothing
        "entropy": -sampled_log_probs.sum().item() / sum(sizes),  # nats a token, estimated
        "loss": sum(loss for *_, loss in seen) / n,  # about 0, and right so
        "grad_norm": sum(grad_norms) / n,  # before it is clipped to 1
        "clip_fraction": clipped / max(1, tokens),  # share of the updates' response tokens
        "log_ratio_first_max": torch.cat(log_s[:first]).abs().max().item() if first else None,
        "log_ratio_std": torch.cat(later).std().item() if later else None}


# ---- evaluation, and the loop over steps ---------------------------------------------------------


def wilson(right, n):
    """Wilson's 95% interval of the share right / n, as (low, high)."""
    z2 = 1.96**2
    centre = right + z2 / 2
    half = (z2 * (right * (n - right) / n + z2 / 4)) ** 0.5
    return (centre - half) / (n + z2), (centre + half) / (n + z2)


def evaluate(model, tokenizer, questions, cfg, reward=correctness_reward, temperature=0.0):
    """The mean reward of one response to each question, greedy unless a temperature is given.

    The default reward is also taken of the last number in a response, whatever its form. Where all
    values are 0 or 1, the mean has Wilson's 95% interval."""
    _, _, texts, _ = sample(model, tokenizer, questions, 1, temperature, cfg)
    rewards = {"eval_reward": score(reward, questions, texts).tolist()}
    if reward is correctness_reward:
        rewards["eval_last_number"] = score(reward, questions, texts, strict=False).tolist()
    row = {"eval_questions": len(questions)}
    for name, values in rewards.items():
        row[name] = sum(values) / len(values)
        if set(values) <= {0, 1}:
            row[f"{name}_interval"] = wilson(sum(values), len(values))
    row["eval_samples"] = list(zip([question["question"] for question in questions], texts,
                                   rewards["eval_reward"]))[:8]
    return row


def shuffled(questions, seed):
    """All questions in a random order, then all in another, without end."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(questions, len(questions))


def train(cfg, model, tokenizer, questions, held_out=(), state=None, reward=correctness_reward,
          stopped=(), **replaced):
    """max_steps rollouts and the updates on them, from the start or from a saved state on.

    questions, held_out: rows with a question and the columns that the reward asks for. Returns a
    row of metrics a step; the first is an evaluation alone. With an output_dir all is reported and
    saved there, with None nothing. Ends early once `stopped` is not empty. replaced: train_step's.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    rows = []
    if state:
        rows = state["rows"]
        model.load_state_dict(state.pop("model"))
        optimizer.load_state_dict(state.pop("optimizer"))
    done = max(0, len(rows) - 1)
    stream = itertools.islice(shuffled(questions, cfg.seed), done * cfg.prompts_per_step, None)
    for step in tqdm(range(len(rows), cfg.max_steps + 1), cfg.algorithm):
        if step == 0:
            row = {"step": 0, "settings": identity(cfg, questions)}
        else:
            picked = list(itertools.islice(stream, cfg.prompts_per_step))
            row = train_step(model, tokenizer, optimizer, picked, step, cfg, reward, **replaced)
        due = step % cfg.save_steps == 0 or step == cfg.max_steps
        if due and held_out:
            row |= evaluate(model, tokenizer, held_out, cfg, reward)
        rows.append(row)
        if cfg.output_dir:
            if due or stopped:
                save({"rows": rows, "model": model.state_dict(),
                      "optimizer": optimizer.state_dict()}, cfg)
            report(rows, cfg)
        if stopped:
            break
    if cfg.output_dir:
        for part in model, tokenizer:
            part.save_pretrained(Path(cfg.output_dir, "model"))
    return rows


# ---- what people see, and what goes to disk ------------------------------------------------------


def report(rows, cfg):
    """The last row on the screen, all of them in metrics.jsonl."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    Path(cfg.output_dir, "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    row = rows[-1]
    shown = [f"step {row['step']}/{cfg.max_steps}"]
    for name in ("reward", "response_length", "cut", "clip_fraction", "log_ratio_std", "seconds",
                 "eval_reward", "eval_last_number"):
        if row.get(name) is not None:
            shown.append(f"{name} {row[name]:.3g}")
        if f"{name}_interval" in row:
            shown.append("(95%: {:.3g} to {:.3g})".format(*row[f"{name}_interval"]))
    tqdm.write("  ".join(shown))
    for question, response, reward in row.get("eval_samples", ())[:2]:
        tqdm.write(f"    {question} -> {response!r}: {reward:g}")
    if row.get("log_ratio_first_max"):
        tqdm.write("warning: log_ratio_first_max is not 0: wrong old log-probs, or forwards that "
                   "round differently")
    if row["step"] == 3 and all(row["equal_reward_groups"] == 1 for row in rows[1:]):
        tqdm.write("note: no gradient in three steps: all rewards of a group are equal (mean "
                   f"{row['reward']:.3g}, cut {row['cut']:.0%}). Try easier questions, a longer "
                   "--max_completion_length, a larger --group_size, experiments/cold_start.py")


def save(state, cfg):
    """state.pt, to go on from: chance follows from seed and step. A kill leaves the old one."""
    aside = Path(cfg.output_dir, "partial")
    torch.save(state, aside)
    os.replace(aside, aside.with_name("state.pt"))


def identity(cfg, questions):
    """The settings of a run and its questions' hash: what must be the same when it goes on."""
    return vars(cfg) | {"questions": zlib.crc32(repr(questions).encode())}


def load_state(cfg, questions):
    """The state of the run in output_dir, None for a new run. ValueError: another run's."""
    path = Path(cfg.output_dir, "state.pt")
    if not path.exists():
        return None
    state = torch.load(path, map_location="cpu")
    saved = state["rows"][0]["settings"]
    now = identity(cfg, questions)
    changed = [name for name in saved if name not in MAY_CHANGE and saved[name] != now[name]]
    if changed:
        raise ValueError(f"the run in it has another {', '.join(changed)}: choose another folder")
    tqdm.write(f"going on, begun with --max_steps {saved['max_steps']} (another: the rate jumps)")
    report(state["rows"], cfg)
    return state


# ---- the command line ----------------------------------------------------------------------------


def prepare(cfg, reward):
    """train()'s arguments. What a user can get wrong ends with one line, the model comes last."""
    with blame(f"--dataset {cfg.dataset}"):
        questions, held_out = load_questions(cfg, reward)
    with blame(f"--output_dir {cfg.output_dir}"):
        state = load_state(cfg, questions)
    with blame(f"--model {cfg.model} --device {cfg.device}"):
        model, tokenizer = load(cfg.model, cfg.device)
        check_model(model, tokenizer, questions + held_out, cfg)
    tqdm.write(f"{cfg.model}: {model.num_parameters():,} parameters in {model.dtype} on "
               f"{cfg.device}; {len(questions):,} questions, {len(held_out):,} more are held out")
    return model, tokenizer, questions, held_out, state, reward


def main(argv=None, reward=correctness_reward):
    """The script, with a reward of your own if you like: TRL's signature, as correctness_reward."""
    cfg = parse_settings(argv)
    with blame(f"--output_dir {cfg.output_dir}"):
        os.makedirs(cfg.output_dir, exist_ok=True)
        found = set(os.listdir(cfg.output_dir))
        if "state.pt" not in found and found - {"lock", "partial"}:
            raise ValueError("not empty, and no run to go on with: choose another")
        lock = FileLock(Path(cfg.output_dir, "lock"))
        lock.acquire(timeout=0)  # a second process is refused
    stopped = []

    def stop(number, frame):
        stopped.append(number)
        signal.signal(number, handlers[number])
        tqdm.write("this step is finished and saved first; once more stops at once")

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        rows = train(cfg, *prepare(cfg, reward), stopped)
    except (KeyboardInterrupt, FloatingPointError, torch.OutOfMemoryError) as error:
        sys.exit(f"train_math.py: {error!r}. What was saved is good. Out of memory? The same "
                 "command goes on with lower --micro_batch_tokens or --rollout_rows")
    finally:
        lock.release()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    tqdm.write(f"{cfg.output_dir}/model is the model after step {rows[-1]['step']}; a picture: "
               f"python experiments/plot.py {cfg.output_dir}")
    if stopped:
        sys.exit(128 + stopped[0])  # as after any signal


if __name__ == "__main__":
    main()
