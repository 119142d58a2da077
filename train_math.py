"""Teach a small language model to answer maths questions with GSPO, in one script.

    python train_math.py --tiny     no network, no GPU, a minute or two: a Qwen3 of 100,000 parameters
    python train_math.py            the real job: Qwen2.5-0.5B-Instruct on GSM8K, one CUDA GPU

The maths is gspo.py's. First reading: train_step; then rollout, build_minibatches, response_log_probs. Left out:
several GPUs, LoRA, KL penalty, inference engine, gradient checkpointing of the layers, warm-up, logging services.
"""
import functools
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
from filelock import FileLock
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, HfArgumentParser

from experiments.plot import draw
from gspo import clip_fraction, group_advantages, grpo_loss, gspo_loss, gspo_token_loss, token_log_probs

LOSSES = {"gspo": gspo_loss, "gspo_token": gspo_token_loss, "grpo": grpo_loss}
# ---- settings ----------------------------------------------------------------------------------------------
flag = lambda default, meaning: field(default=default, metadata={"help": meaning})

@dataclass
class Settings:
    model: str = flag("Qwen/Qwen2.5-0.5B-Instruct", "hub id or folder")
    dataset: str = flag("openai/gsm8k", "hub id, or a .jsonl with question and answer ('... #### 42', or '42')")
    eval_dataset: str | None = flag(None, "held out; default: the hub's test split, or the .jsonl's last lines")
    output_dir: str = flag("runs/math", "where everything is written")
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "cuda, cpu")
    seed: int = flag(0, "of the questions' order and of the sampling")
    tiny: bool = flag(False, "the small run: model and word problems are made by experiments/cold_start.py")
    algorithm: Literal["gspo", "gspo_token", "grpo"] = flag("gspo", "the loss")
    prompts_per_step: int = flag(32, "prompts a rollout")
    group_size: int = flag(8, "responses a prompt: their mean reward is the baseline")
    minibatches: int = flag(4, "optimizer steps a pass; with 1, and 1 epoch, ratios stay 1, the clip is dead")
    epochs: int = flag(1, "passes over each rollout")
    micro_batch_tokens: int = flag(1024, "tokens at once in the update: sets its memory, not its result")
    rollout_rows: int = flag(256, "responses sampled at once: sets the rollout's memory")
    max_completion_length: int = flag(512, "tokens a response; a longer one is cut and scored as it stands")
    format_weight: float = flag(0.1, "reward for writing '#### number' at all, beside 1 for the right number")
    temperature: float = flag(1.0, "of the sampling and of the log-probs: the policy is the tempered model")
    learning_rate: float = flag(1e-6, "AdamW's, falling linearly to a tenth at max_steps")
    eps_low: float | None = flag(None, "clip range below 1; default: gspo.py's (gspo in --tiny: 0.03)")
    eps_high: float | None = flag(None, "clip range above 1; default: gspo.py's (gspo in --tiny: 0.04)")
    max_steps: int = flag(200, "rollouts")
    save_steps: int = flag(25, "rollouts between two saves, each with an evaluation")
    eval_size: int = flag(512, "held-out questions, at most a fifth of a .jsonl; 0 for none")
    resume: bool = flag(False, "go on with output_dir's run, whose settings are then the defaults")

TINY = dict(output_dir="runs/tiny", device="cpu", prompts_per_step=16, rollout_rows=128, format_weight=0.0,
            max_completion_length=40, learning_rate=8e-5, max_steps=15, save_steps=5, eval_size=256)
AT_LEAST = dict(group_size=2, seed=0, eval_size=0, format_weight=0, temperature=0.01)  # the others: above 0
MAY_CHANGE_ON_RESUME = {"resume", "output_dir", "device", "max_steps", "save_steps", "micro_batch_tokens"}

def parse_settings(argv):
    """The command line as checked Settings; a wrong flag or value exits with one line."""
    parser = HfArgumentParser(Settings, description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: sys.exit(f"train_math.py: {message} (--help lists the flags)")
    parser.set_defaults(**TINY if any(word.startswith("--tiny") for word in argv) else {})
    s, saved = Settings(**vars(parser.parse_args(argv))), {}
    if s.resume and (path := Path(s.output_dir, "settings.json")).exists():
        try:
            parser.set_defaults(**(saved := json.loads(path.read_text(encoding="utf-8"))))
            s = Settings(**vars(parser.parse_args(argv)))
        except (TypeError, ValueError) as error:
            parser.error(f"--resume: {path}: {error}")
    for name, value in vars(s).items():
        least, below = AT_LEAST.get(name, 1e-30), 1 if name == "eps_low" else 2**31  # 1e-30 stands for above 0
        if type(value) in (int, float) and not least <= value < below:
            bound = f"at least {least}" if name in AT_LEAST else "above 0"
            parser.error(f"--{name} {value} must be {bound} and below {below}")
        if value != saved.get(name, value) and name not in MAY_CHANGE_ON_RESUME:
            parser.error(f"--resume: the run in {s.output_dir} has --{name} {saved[name]}, not {value}")
    if s.tiny and not saved and (s.model, s.dataset, s.eval_dataset) != (Settings.model, Settings.dataset, None):
        parser.error("--model, --dataset and --eval_dataset do not go with --tiny, which makes its own")
    if s.prompts_per_step % s.minibatches:
        parser.error(f"--prompts_per_step {s.prompts_per_step} is no multiple of --minibatches {s.minibatches}")
    low, high, _ = (0.03, 0.04, None) if s.tiny and s.algorithm != "grpo" else LOSSES[s.algorithm].__defaults__
    s.eps_low, s.eps_high = s.eps_low or low, s.eps_high or high
    return s

# ---- questions and rewards ---------------------------------------------------------------------------------
def extract_answer(completion, strict=True):
    """The answer that a completion gives, as a canonical number such as '-1234.5', or None.
    completion: a text, or chat messages as TRL passes them. strict: the number after the last '####'; otherwise
    the last one. Commas, $, %, **, a trailing point, a leading + or zeros, a unicode minus, 18.0: all the same."""
    chat = isinstance(completion, list) and completion and isinstance(completion[-1], dict)
    text = str(completion[-1].get("content") if chat else completion)
    if strict and "####" not in text:
        return None
    text = text.rpartition("####")[2] if strict else text
    text = text.replace("−", "-").replace("$", "").replace("*", " ")
    text = re.sub("(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)  # 1,234 -> 1234
    text = re.sub("(?<=[0-9])-", " ", text)                      # the last number of 20-18 is 18
    text = re.sub(r"(?<![0-9.])\.(?=[0-9])", "0.", text)         # .5 -> 0.5
    number = r"(-?)([0-9]+)(\.[0-9]+)?"
    found = re.findall(rf"\A[ \t+]*{number}(?![.,:/^]?[0-9])" if strict else number, text)  # not 18:30, 18/2
    if not found:
        return None
    sign, whole, decimals = found[-1]
    value = (whole.lstrip("0") or "0") + decimals.rstrip("0").rstrip(".")
    return value if value == "0" else sign + value

def gold_answer(answer):
    """The canonical number of a dataset's answer, '... #### 42' or '42', or None."""
    return extract_answer(answer) or extract_answer(answer, strict=False)

def correctness_reward(prompts, completions, answer, **kwargs):
    """1.0 for a completion that gives (strict) the answer's number, else 0.0: list[float]. For TRL, too."""
    given = map(extract_answer, completions)
    return [float(number is not None and number == gold_answer(gold)) for number, gold in zip(given, answer)]

def format_reward(prompts, completions, **kwargs):
    """1.0 for a completion that gives (strict) any number, else 0.0: list[float]. For TRL, too."""
    return [float(extract_answer(completion) is not None) for completion in completions]

def load_questions(name, split):
    """A .jsonl file, or a split of a hub dataset: [{"question", "answer"}]. ValueError: what is wrong where."""
    if name.endswith(".jsonl") or os.path.exists(name):
        lines = Path(name).read_text(encoding="utf-8-sig").split("\n")
    else:
        from datasets import load_dataset
        lines = map(json.dumps, load_dataset(name, "main" if name == "openai/gsm8k" else None, split=split))
    questions = []
    for i, line in enumerate(lines, 1):
        try:
            row = {**json.loads(line or "{}")}
        except (ValueError, TypeError):
            row = {}
        if isinstance(row.get("question"), str) and gold_answer(row.get("answer")) is not None:
            questions.append(row)
        elif line.strip():
            raise ValueError(f"{name}, line {i}: found {', '.join(map(str, row)) or 'no JSON object'}; wanted: an "
                             "object with a question, a text, and an answer with a number, such as '... #### 42'")
    if not questions:
        raise ValueError(f"{name}: there is no question in it")
    return questions

def load_data(s):
    """(questions to train on, questions held out)"""
    questions = load_questions(s.dataset, "train")
    if s.eval_dataset or not os.path.exists(s.dataset):
        return questions, load_questions(s.eval_dataset or s.dataset, "test")[:s.eval_size] if s.eval_size else []
    n = len(questions) - min(s.eval_size, len(questions) // 5)
    return questions[:n], questions[n:]

# ---- model, rollout, log-probs -----------------------------------------------------------------------------
def load(name, device):
    """(model, tokenizer) from a hub id or folder, all in float32: experiments/precision.py shows why."""
    torch.set_float32_matmul_precision("highest")  # some images switch TF32 on
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name)  # eval: dropout would move the ratios

@functools.lru_cache(maxsize=None)
def encode_prompt(tokenizer, question):
    """A question's token ids: through the chat template if there is one (Qwen3: without thinking), else plain."""
    if not tokenizer.chat_template:
        return tokenizer(f"{question}\n").input_ids
    instruction = "Reason step by step, then write the final answer, a number, after '####'."
    chat = [{"role": "user", "content": f"{question}\n{instruction}"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tokenizer(text, add_special_tokens=False).input_ids

def check_model(model, tokenizer, questions, s):
    """ValueError if the model cannot take the questions, or its logits are not finite and its head's."""
    prompts = [encode_prompt(tokenizer, row["question"]) for row in questions]
    length = max(map(len, prompts)) + s.max_completion_length
    if length > getattr(model.config, "max_position_embeddings", length):
        raise ValueError(f"{length} tokens, with --max_completion_length {s.max_completion_length}, are too many")
    if max(tokenizer.eos_token_id, *map(max, prompts)) >= model.get_input_embeddings().num_embeddings:
        raise ValueError("its tokenizer has tokens that it lacks: they are no pair")
    with torch.no_grad():
        ids = torch.tensor([prompts[0]], device=model.device)
        logits = model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state)
        if not torch.allclose(model(input_ids=ids).logits, logits, atol=1e-2):
            raise ValueError("its logits are not finite (damaged weights?), or scaled, which is not done here")

def draw_tokens(probs):
    """One token a row, (n, V) -> (n, 1): where the cumulative probability first reaches a uniform number."""
    rows = probs if len(probs) > 1 else probs.repeat(2, 1)  # CUDA sums a single row in no fixed order
    cumulative = rows.cumsum(dim=-1)[:len(probs)]
    uniform = 1 - torch.rand(len(probs), 1, device=probs.device)  # (0, 1]; torch.multinomial draws V: slow on CPUs
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:])

@torch.no_grad()
def rollout(model, prompts, group_size, max_length, temperature, ends):
    """Sample `group_size` responses to each prompt from the model itself at `temperature` (0: greedy).
    prompts: lists of token ids; ends: ids that end a response (n,). Returns the B responses, group by group, lists
    of token ids with the end token, and their log-probs (B, max_length), 0 after the end. (`generate` would add
    the checkpoint's own top_k and top_p: ratios would compare policies of which neither wrote the text.)"""
    width = max(map(len, prompts))  # padded on the left, so that all responses start in one column
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    rows = torch.arange(len(prompts) * group_size, device=model.device)  # the response that each row writes
    tokens = torch.full((len(rows), max_length), -1, device=model.device)
    log_probs = torch.zeros(len(rows), max_length, device=model.device)
    for t in tqdm(range(max_length), "rollout, tokens", leave=False, delay=1):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache,
                       use_cache=True, logits_to_keep=1).logits[:, -1]
        if t == 0:  # each prompt was read once
            if logits.isnan().any() or logits.isposinf().any():
                raise FloatingPointError("the model's logits are NaN or infinite: was --learning_rate too high?")
            cache.batch_repeat_interleave(group_size)  # and every response to it goes on from there
            logits, mask, position = (x.repeat_interleave(group_size, 0) for x in (logits, mask, position[:, -1:]))
        probs = torch.softmax(logits.float() / (temperature or 1), dim=-1)
        ids = draw_tokens(probs) if temperature else probs.argmax(dim=-1, keepdim=True)
        tokens[rows, t], log_probs[rows, t] = ids[:, 0], probs.gather(1, ids)[:, 0].log()
        going = (~torch.isin(ids[:, 0], ends)).nonzero()[:, 0]
        if len(going) == 0:
            break
        if len(going) < len(ids):
            rows, ids, mask, position = (x[going] for x in (rows, ids, mask, position))  # the others have ended
            cache.batch_select_indices(going)
        mask, position = torch.cat([mask, torch.ones_like(ids)], dim=1), position + 1
    return [row[row >= 0].tolist() for row in tokens.cpu()], log_probs

def sample(model, tokenizer, questions, group_size, temperature, s):
    """The rollout for all questions, rollout_rows at once: (responses, their texts, the sampler's log-probs)."""
    prompts = [encode_prompt(tokenizer, row["question"]) for row in questions]
    more = model.generation_config.eos_token_id  # the tokenizer's end token is not always the only one
    ends = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
    ends, at_once = torch.tensor(sorted(ends), device=model.device), max(1, s.rollout_rows // group_size)
    parts = [rollout(model, prompts[i:i + at_once], group_size, s.max_completion_length, temperature, ends)
             for i in range(0, len(prompts), at_once)]
    responses = [response for part, _ in parts for response in part]
    return responses, tokenizer.batch_decode(responses, skip_special_tokens=True), torch.cat([x for _, x in parts])

def micro_batch(prompts, responses, device, advantages=None, rows=None):
    """b prompts and responses, lists of token ids, as they go through the model at once: ids (b, L), padded on the
    right, mask (b, L - 1), true where ids[:, 1:] is a response token, advantages (b,), their rows in the rollout.
    The mask is made from lengths: from pad ids, it would miss the end token where that is the pad token, too."""
    ids = [torch.tensor(p + r) for p, r in zip(prompts, responses)]
    mask = [torch.arange(1, len(p) + len(r)) >= len(p) for p, r in zip(prompts, responses)]
    ids, mask = (pad_sequence(x, batch_first=True).to(device) for x in (ids, mask))
    return SimpleNamespace(ids=ids, mask=mask, advantages=advantages, rows=rows)

def build_minibatches(prompts, responses, advantages, s):
    """The rollout as `minibatches` lists of micro-batches, of like lengths, at most micro_batch_tokens or one row.
    Built once, for the old and the new forward: other padding and other neighbours round otherwise, and GSPO's
    clip range is narrow enough to feel it. Advantage 0, no gradient: left out here, counted in the denominator."""
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
    """log-probs (b, L - 1) of the response tokens, 0 elsewhere. Only they go through the head, as many at once as
    give `at_once` logits, and again in the backward pass: all logits over 151,936 words would be too large."""
    hidden = model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1][batch.mask]
    head = model.get_output_embeddings()
    chunk = max(1, (at_once or 2**24) // len(head.weight))
    log_probs = lambda hidden, tokens: token_log_probs(head(hidden)[None], tokens[None], temperature)[0]
    flat = torch.cat([checkpoint(log_probs, h, y, use_reentrant=False, preserve_rng_state=False)
                      for h, y in zip(hidden.split(chunk), batch.ids[:, 1:][batch.mask].split(chunk))])
    return flat.new_zeros(batch.mask.shape).masked_scatter(batch.mask, flat)

# ---- the algorithm -----------------------------------------------------------------------------------------
def train_step(model, tokenizer, optimizer, questions, step, s):
    """One rollout on these questions, and the updates on it. Returns the step's row of metrics."""
    torch.manual_seed(s.seed * 1_000_003 + step)  # chance follows from (seed, step): resuming is exact
    optimizer.param_groups[0]["lr"] = s.learning_rate * (1 - 0.9 * (step - 1) / max(1, s.max_steps - 1))
    if "cuda" in s.device:
        torch.cuda.reset_peak_memory_stats(s.device)
    times = [time.perf_counter()]

    # 1 SAMPLE group_size responses to each question, from the model as it is.
    responses, texts, sampled_log_probs = sample(model, tokenizer, questions, s.group_size, s.temperature, s)
    times.append(time.perf_counter())

    # 2 SCORE them, and compare each with its own group.
    asked = [row for row in questions for _ in range(s.group_size)]  # the question of each response
    correct = torch.tensor(correctness_reward(None, texts, answer=[row["answer"] for row in asked]))
    formatted = torch.tensor(format_reward(None, texts))
    rewards = correct + s.format_weight * formatted
    advantages = group_advantages(rewards, s.group_size)

    # 3 REMEMBER the old log-probs: from the very forward of the update, on its micro-batches, not the sampler's.
    prompts = [encode_prompt(tokenizer, row["question"]) for row in asked]
    minibatches = build_minibatches(prompts, responses, advantages, s)
    with torch.no_grad():
        for batch in sum(minibatches, []):
            batch.old_log_probs = response_log_probs(model, batch, s.temperature)
    if "cuda" in s.device:
        torch.cuda.synchronize(s.device)  # rollout and update wait for the GPU at their ends anyway
    times.append(time.perf_counter())

    # 4 UPDATE. ONE ROLLOUT, SEVERAL OPTIMIZER STEPS: in the first minibatch the policy is the one that sampled,
    # so every ratio is exactly 1 and no clip can act. Only the later minibatches and epochs meet a policy that
    # has moved. With minibatches = epochs = 1 the ratio is always 1: REINFORCE with the group's advantages.
    size, norms, seen = len(responses) // s.minibatches, [], []  # size: with the responses without gradient
    for minibatch in tqdm([m for m in minibatches if m] * s.epochs, "update, minibatches", leave=False, delay=1):
        for batch in minibatch:
            log_probs = response_log_probs(model, batch, s.temperature)
            loss = LOSSES[s.algorithm](log_probs, batch.old_log_probs, batch.advantages, batch.mask, s.eps_low,
                                       s.eps_high, denominator=size)
            loss.backward()
            seen.append([loss.item(), *observe(batch, log_probs.detach(), s)])
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    times.append(time.perf_counter())

    losses, log_s, clipped, tokens = zip(*seen) if seen else ([], [], [], [])
    n_first = len(next(filter(None, minibatches), []))  # micro-batches before the first optimizer step
    first, later = sum(log_s[:n_first], []), sum(log_s[n_first:], [])
    if not all(p.isfinite().all() for p in model.parameters()):  # as they are not, after a loss that was not
        raise FloatingPointError(f"step {step}: loss, gradient or weights are not finite: lower --learning_rate")
    lengths, phases = [len(response) for response in responses], ("rollout", "old_log_probs", "update")
    return {
        "step": step,
        "reward": rewards.mean().item(),                 # accuracy + format_weight * format
        "accuracy": correct.mean().item(),               # share of the samples that are right
        "format": formatted.mean().item(),               # share with '#### number'
        "response_length": sum(lengths) / len(lengths),  # tokens, the end token included
        "cut": sum(n == s.max_completion_length for n in lengths) / len(lengths),  # share that reached the limit
        "equal_reward_groups": (advantages.view(-1, s.group_size) == 0).all(dim=1).float().mean().item(),
        "entropy": -sampled_log_probs.sum().item() / sum(lengths),   # nats a token, estimated from the samples
        "loss": sum(losses) / max(1, len(norms)),        # about 0, and that is right: watch the reward
        "grad_norm": sum(norms) / max(1, len(norms)),    # before it is clipped to 1
        "clip_fraction": sum(clipped) / max(1, sum(tokens)),         # share of the updates' response tokens
        "log_ratio_first_max": max(map(abs, first), default=None),   # of |log s| in the first minibatch: must be 0
        "log_ratio_std": torch.tensor(later).std().item() if len(later) > 1 else None,  # how far the policy moved
        "seconds": times[-1] - times[0],
        **{f"seconds_{phase}": after - before for phase, before, after in zip(phases, times, times[1:])},
        **({"peak_memory_gib": torch.cuda.max_memory_allocated(s.device) / 2**30} if "cuda" in s.device else {})}

def observe(batch, log_probs, s):
    """For the metrics: log s of a micro-batch's responses, and how many of its tokens are clipped, of how many."""
    log_ratio, lengths = log_probs - batch.old_log_probs, batch.mask.sum(dim=1)  # both are 0 off the mask
    log_s = log_ratio.sum(dim=1) / lengths
    ratio = log_ratio.exp() if s.algorithm == "grpo" else log_s.exp()
    clipped = clip_fraction(ratio, batch.advantages, batch.mask, s.eps_low, s.eps_high) * lengths.sum()
    return log_s.tolist(), clipped.item(), lengths.sum().item()

# ---- evaluation, and the loop over steps -------------------------------------------------------------------
def wilson(right, n, z=1.96):
    """Wilson's 95% interval of the share right / n, as (low, high)."""
    centre, half = right + z * z / 2, z * math.sqrt(right * (n - right) / n + z * z / 4)
    return (centre - half) / (n + z * z), (centre + half) / (n + z * z)

def evaluate(model, tokenizer, questions, s, temperature=0.0):
    """One answer to each question, greedy unless a temperature is given. Returns (shares, answers)."""
    _, texts, _ = sample(model, tokenizer, questions, 1, temperature, s)
    golds, n = [gold_answer(row["answer"]) for row in questions], len(questions)
    scores = {"eval_questions": n, "eval_format": sum(format_reward(None, texts)) / n}
    for name, strict in (("flexible", False), ("strict", True)):
        right = [extract_answer(text, strict) == gold for text, gold in zip(texts, golds)]
        scores |= {f"eval_{name}": sum(right) / n, f"eval_{name}_interval": wilson(sum(right), n)}
    return scores, [{"question": row["question"], "response": text, "gold": gold, "right": hit}
                    for row, text, gold, hit in zip(questions, texts, golds, right)]

def train(s, model, tokenizer, questions, held_out, state=None, stop=lambda: False):
    """max_steps rollouts and the updates on them, or until stop(), from the beginning or the state of a save on.
    questions, held_out: [{"question", "answer"}]. Returns the rows of metrics; step 0 is an evaluation alone."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    rows = state.pop("rows") if state else []
    if state:
        model.load_state_dict(state.pop("model"))
        optimizer.load_state_dict(state.pop("optimizer"))
    done = max(0, len(rows) - 1)
    orders = (random.Random(f"{s.seed} {epoch}").sample(questions, len(questions)) for epoch in itertools.count())
    stream = itertools.islice(itertools.chain.from_iterable(orders), done * s.prompts_per_step, None)
    bar = tqdm(desc=s.algorithm, initial=done, total=s.max_steps)
    for step in range(len(rows), s.max_steps + 1):
        row, due = {"step": 0}, step % s.save_steps == 0 or step == s.max_steps
        if step:
            picked = list(itertools.islice(stream, s.prompts_per_step))  # all come once before any comes twice
            row = train_step(model, tokenizer, optimizer, picked, step, s)
            bar.update()
        if due and held_out:
            scores, answers = evaluate(model, tokenizer, held_out, s)
            row |= scores | {"eval_samples": answers[:8]}
        rows.append(row)
        report(rows, s)
        stopped = stop()
        if stopped or step and due:
            save(s, rows, model, tokenizer, optimizer)
        if stopped:
            break
    bar.close()
    return rows

# ---- what people see, and what goes to disk ----------------------------------------------------------------
say = lambda line: tqdm.write(line, file=sys.stderr)  # above the bar; `| head` ends no run

def report(rows, s):
    """The last row on the screen, all of them in metrics.jsonl."""
    row, dead = rows[-1], [row["equal_reward_groups"] == 1 for row in rows[1:]]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(s.output_dir, "metrics.jsonl").write_text(lines, encoding="utf-8")
    shown = "reward", "response_length", "cut", "clip_fraction", "log_ratio_std", "seconds"
    shown = "".join(f"  {name} {row[name]:.3g}" for name in shown if row.get(name) is not None)
    say(f"step {row['step']}/{s.max_steps}{shown}")
    if row.get("log_ratio_first_max"):
        say("warning: log_ratio_first_max is not 0: wrong old log-probs, or forwards that round differently")
    if len(dead) == 3 and all(dead):
        say(f"note: no gradient in three steps: all rewards of a group are equal (right {row['accuracy']:.0%}, "
            f"'#### number' {row['format']:.0%}, cut {row['cut']:.0%}). Try experiments/cold_start.py, a longer "
            "--max_completion_length, a larger --group_size")
    if "eval_strict" in row:
        say("held out: {eval_strict:.1%} of {eval_questions} right (95%: {0:.1%} to {1:.1%}), {eval_flexible:.1%} "
            "by the last number".format(*row["eval_strict_interval"], **row))
        for answer in row["eval_samples"][:2]:
            say(f"    {answer['question']} -> {answer['response']!r}, {'right' if answer['right'] else 'wrong'}")

def save(s, rows, model, tokenizer, optimizer):
    """model/ for `from_pretrained`, a picture, and state.pt for --resume (chance follows from seed and step)."""
    output = Path(s.output_dir)
    try:
        state = {"rows": rows, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, output / "partial")
        model.save_pretrained(output / "model")
        tokenizer.save_pretrained(output / "model")
        draw({s.algorithm: rows}, output / "metrics.png", None if s.algorithm == "grpo" else s.eps_high)
        os.replace(output / "partial", output / "state.pt")  # a kill leaves the old one or the new one, whole
    except Exception as error:  # each library has its own for a full disk
        raise OSError(f"{output} cannot be written (disk full?): {error}") from error

# ---- the command line --------------------------------------------------------------------------------------
def prepare(s):
    """What train() needs, as keywords, checked: whatever is wrong exits with one line that names the flag."""
    try:
        at = f"--device {s.device}"
        torch.zeros(1, device=s.device).tolist()
        at, output = f"--output_dir {s.output_dir}", Path(s.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        s.lock = FileLock(output / "lock").acquire(timeout=0)  # a second process is refused
        names = {path.name for path in output.iterdir()} - {"lock"}
        whole = "settings.json" in names and ("model" not in names or names & {"state.pt", "partial"})
        if names - {"partial"} and not (s.resume and whole):
            raise ValueError("not empty: --resume goes on with a whole run in it, another --output_dir starts one")
        if s.tiny:
            torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
            from experiments.cold_start import tiny_world
            s.model, s.dataset = tiny_world(s.seed)
        at = f"{output}/state.pt"
        state = torch.load(output / "state.pt", map_location="cpu") if "state.pt" in names else None
        at = f"--dataset {s.dataset}, --eval_dataset {s.eval_dataset}"
        questions, held_out = load_data(s)
        at = f"--model {s.model}"
        model, tokenizer = load(s.model, s.device)
        check_model(model, tokenizer, questions + held_out, s)
    except Exception as error:  # libraries raise what they like
        sys.exit(f"train_math.py: {at}: " + " ".join(str(error).split())[:300])
    (output / "partial").write_text(json.dumps(asdict(s), indent=1) + "\n", encoding="utf-8")
    os.replace(output / "partial", output / "settings.json")
    n = model.num_parameters()
    say(f"{'resumed' if state else 'new run'}, {s.model}: {n:,} parameters, float32 on {s.device}: {n / 2**26:.2g} GiB "
        f"with AdamW, plus activations; {len(questions):,} questions to train on, {len(held_out):,} held out")
    if not tokenizer.chat_template:
        say("note: no chat template: the model is given the bare question, and not told of '#### number'")
    return dict(model=model, tokenizer=tokenizer, questions=questions, held_out=held_out, state=state)

def main(argv=None):
    s, interrupted = parse_settings(sys.argv[1:] if argv is None else argv), []
    def interrupt(*_):
        interrupted.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say("Ctrl-C: this step is finished and saved first. Once more stops at once")
    try:
        prepared = prepare(s)
        signal.signal(signal.SIGINT, interrupt)
        rows = train(s, **prepared, stop=lambda: bool(interrupted))
    except KeyboardInterrupt:
        sys.exit("\nstopped: --resume goes on from the last save, if any")
    except (ArithmeticError, OSError, RuntimeError, MemoryError) as error:
        memory = re.search("out of memory|MemoryError|allocate memory|ALLOC_FAILED", repr(error))
        if isinstance(error, RuntimeError) and not memory:
            raise
        hint = "Lower --micro_batch_tokens or, in a new run, --rollout_rows or --max_completion_length. "
        sys.exit(f"train_math.py: {' '.join(repr(error).split())}. {hint if memory else ''}The last save is good")
    say(f"{s.output_dir}: metrics.png shows the run, model/ is the model after step {rows[-1]['step']}")
    if rows[-1]["step"] < s.max_steps:
        sys.exit(130)  # as after any Ctrl-C

if __name__ == "__main__":
    main()
