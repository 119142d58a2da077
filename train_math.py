r"""Fine-tune a small language model with GSPO on questions whose answers can be checked.

    python train_math.py              Qwen2.5-0.5B-Instruct on GSM8K, on one CUDA GPU
    python -m lesson.tiny             the same script on a tiny model: any CPU, one or two minutes

The maths is in gspo.py, which is the only other project file that this script needs. Read
train_step first, and then the functions that it calls, which follow it in this order: rollout,
minibatches and log-probs, evaluation and the training loop, questions and rewards, files, command
line. For a task of your own, write a reward function: `train_math.main(reward=my_reward)`. For a
loss of your own, add an entry to ALGORITHMS. To use a model that you have loaded yourself, call
`train(...)`.

In this file a *step* is one rollout with all its updates. (In TRL and Hugging Face, a step is one
optimizer step.) log s is the logarithm of a response's importance ratio. Some choices are fixed:
AdamW without weight decay, a gradient norm of at most 1, a learning rate that falls linearly to a
tenth, and the same minibatches in every epoch. This script does not support several GPUs, a KL
penalty, an inference engine or a learning rate warm-up.
"""
import contextlib
import copy
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from datasets import load_dataset
from filelock import FileLock
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    HfArgumentParser,
    StaticCache,
)
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from gspo import (
    clip_fraction,
    clipped_objective,
    group_advantages,
    grpo_loss,
    gspo_loss,
    gspo_token_loss,
    token_log_probs,
)


class Algorithm(NamedTuple):
    """What distinguishes one algorithm from another. A new algorithm is a row of ALGORITHMS."""
    loss: Callable  # called like gspo_loss
    eps_low: float  # default clip range
    eps_high: float
    ratio: str  # which importance ratio is clipped, for clip_fraction: "sequence" or "token"
    advantages: Callable = group_advantages  # called with rewards (B,) and group_size


ALGORITHMS = {
    "gspo": Algorithm(gspo_loss, 3e-4, 4e-4, ratio="sequence"),
    "gspo_token": Algorithm(gspo_token_loss, 3e-4, 4e-4, ratio="sequence"),
    "grpo": Algorithm(grpo_loss, 0.2, 0.27, ratio="token"),
}


# ---- settings ------------------------------------------------------------------------------------


def flag(default, meaning, **more):
    return field(default=default, metadata={"help": meaning, **more})


@dataclass
class Settings:
    model: str = flag("Qwen/Qwen2.5-0.5B-Instruct", "hub id or folder")
    dataset: str = flag(
        "openai/gsm8k",
        "hub id, folder with train and test files, or one .jsonl, .json, .csv or .parquet file; "
        "each row has a question and an answer, '42' or '... #### 42'")
    output_dir: str = flag("runs/math", "a run that is saved there is resumed")
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "cuda or cpu")
    seed: int = flag(0, "seed of the order of the questions and of the sampling")
    instruction: str = flag(
        r"Please reason step by step, and put your final answer within \boxed{}.",
        "text after each question, on a new line; Qwen models were trained with this one")
    system: str | None = flag(None, "system prompt; default: that of the chat template, if any")
    # The algorithm
    algorithm: str = flag("gspo", "the loss", choices=ALGORITHMS)
    eps_low: float | None = flag(None, "lower clip range; default: the algorithm's (gspo 3e-4)")
    eps_high: float | None = flag(None, "upper clip range; default: the algorithm's (gspo 4e-4)")
    group_size: int = flag(8, "responses per prompt; their mean reward is the baseline")
    prompts_per_step: int = flag(32, "prompts per rollout")
    minibatches: int = flag(4, "optimizer steps per epoch")
    epochs: int = flag(1, "passes over each rollout")
    learning_rate: float = flag(1e-6, "of AdamW; decreases linearly to a tenth at max_steps")
    max_steps: int = flag(200, "number of rollouts")
    temperature: float = flag(1.0, "sampling temperature; log-probs are computed at it, too")
    max_completion_length: int = flag(512, "tokens per response; a longer response is cut")
    # Memory and evaluation
    micro_batch_tokens: int | None = flag(
        None, "tokens per forward pass in the update; default: chosen from the free GPU memory, on "
              "a CPU 1024")
    rollout_rows: int = flag(256, "responses sampled at once")
    save_steps: int = flag(25, "rollouts between two evaluations, each of which saves the run")
    eval_size: int = flag(512, "held-out questions, at most a fifth of a file; 0: no evaluation")

    def __post_init__(self):
        """ValueError: a value that is out of range."""
        for name, value in vars(self).items():
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
            elif hasattr(value, "item"):  # a number of numpy or torch, which the logs cannot hold
                value = value.item()
            setattr(self, name, value)
            least = {"seed": 0, "eval_size": 0, "group_size": 2}.get(name, 1e-12)
            if type(value) in (int, float) and not least <= value < 2**31:
                raise ValueError(f"--{name} {value} is out of range")
        if self.prompts_per_step % self.minibatches:
            raise ValueError("--prompts_per_step must be a multiple of --minibatches")
        one = torch.ones(1)
        clipped_objective(one, one, *self.clip_range())  # raises if the range cannot be one

    def clip_range(self):
        """(eps_low, eps_high): the flags, or else the defaults of the algorithm."""
        algorithm = ALGORITHMS[self.algorithm]
        return self.eps_low or algorithm.eps_low, self.eps_high or algorithm.eps_high


# These settings may differ when a run is resumed. The questions are compared by their hash. If the
# held-out questions are cut from the training part, the hash changes with eval_size.
MAY_CHANGE = {"dataset", "output_dir", "device", "max_steps", "micro_batch_tokens",
              "rollout_rows", "save_steps", "eval_size"}


# ---- the algorithm -------------------------------------------------------------------------------


def train_step(model, tokenizer, optimizer, questions, step, cfg, **replaced):
    """One rollout on these questions and all updates on it. Returns the metrics of the step.

    replaced: functions to use in place of the default ones, by their names in Parts."""
    parts = Parts(**replaced)
    algorithm = ALGORITHMS[cfg.algorithm]
    loss_function = parts.loss or algorithm.loss
    group_advantages = parts.group_advantages or algorithm.advantages
    torch.manual_seed(cfg.seed * 1_000_003 + step)  # a resumed run draws the same numbers
    progress = (step - 1) / max(1, cfg.max_steps - 1)
    optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - 0.9 * progress)
    start = time.perf_counter()

    # 1 SAMPLE group_size responses to each question from the current policy.
    rollout = sample(
        model, tokenizer, questions, cfg.group_size, cfg.temperature, cfg, **replaced)
    seconds_rollout = time.perf_counter() - start

    # 2 SCORE the responses, and compare each reward with the others of its group.
    rewards = score(parts.reward, questions, rollout.texts)
    advantages = group_advantages(rewards, cfg.group_size)

    # 3 REMEMBER the old log-probs. They are computed by the forward pass of the update, on the same
    # micro-batches, and not by the sampler. The sampler rounds differently, and this difference
    # can be as large as GSPO's clip range. This way, only a change of the weights moves the ratio.
    prompts = [prompt for prompt in rollout.prompts for _ in range(cfg.group_size)]
    minibatches = parts.build_minibatches(prompts, rollout.responses, advantages, cfg)
    with torch.no_grad():
        for batch in itertools.chain(*minibatches):
            batch.old_log_probs = parts.response_log_probs(model, batch, cfg.temperature)

    # 4 UPDATE. ONE ROLLOUT, SEVERAL OPTIMIZER STEPS: in the first minibatch, the weights are still
    # those of the old log-probs. Every importance ratio is exactly 1, and nothing can be clipped.
    # Only the later minibatches and epochs see a policy that has moved. With minibatches = epochs
    # = 1, the ratio is always 1, and GSPO is REINFORCE with group advantages, where each response
    # counts as the mean over its tokens.
    eps_low, eps_high = cfg.clip_range()
    denominator = len(rollout.responses) // cfg.minibatches  # includes responses without gradient
    updates = []  # for each optimizer step: a list of (micro-batch, log-probs, loss)
    grad_norms = []
    for minibatch in minibatches * cfg.epochs:
        update = []
        for batch in minibatch:
            log_probs = parts.response_log_probs(model, batch, cfg.temperature)
            loss = loss_function(log_probs, batch.old_log_probs, batch.advantages, batch.mask,
                                 eps_low, eps_high, denominator=denominator)
            with tf32_matmuls():
                loss.backward()
            update.append((batch, log_probs.detach(), loss.item()))
        grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        updates.append(update)

    if not all(p.isfinite().all() for p in model.parameters()):
        raise FloatingPointError(f"step {step}: the loss or the weights are not finite. Use a lower"
                                 " --learning_rate and another --output_dir")
    return {
        "step": step,
        "reward": rewards.mean().item(),
        **rollout_metrics(rollout, minibatches, advantages, cfg),
        **update_metrics(updates, grad_norms, cfg),
        "seconds": time.perf_counter() - start,
        "seconds_rollout": seconds_rollout,
    }


@contextlib.contextmanager
def tf32_matmuls():
    """TF32 for the matrix products of the backward pass, which makes them faster on CUDA.

    It changes a gradient by a relative error of about 1e-3. The forward pass, which computes log s,
    stays in float32: TF32 would change log s by 2e-4, almost as much as GSPO's clip range. (The
    head is computed again in the backward pass, in TF32.) On CPUs this setting has no effect."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def rollout_metrics(rollout, minibatches, advantages, cfg):
    """The metrics of the sampled responses, before any update."""
    lengths = [len(response) for response in rollout.responses]
    equal = (advantages.view(len(lengths) // cfg.group_size, -1) == 0).all(1)
    gaps = []  # the sampler's log-probs minus those of the update
    for batch in itertools.chain(*minibatches):
        sampled = [rollout.log_probs[i, :lengths[i]] for i in batch.indices]
        old = batch.old_log_probs[batch.mask]
        gaps.append(torch.cat(sampled) - old)
    return {
        "response_length": sum(lengths) / len(lengths),  # in tokens, the end token included
        "cut": lengths.count(cfg.max_completion_length) / len(lengths),  # share at the limit
        "equal_reward_groups": equal.float().mean().item(),  # share of groups without a gradient
        "entropy": -rollout.log_probs.sum().item() / sum(lengths),  # nats per token, estimated
        # Mean absolute difference between the sampler's log-probs and the old log-probs, in nats.
        "sampler_gap": torch.cat(gaps).abs().mean().item() if gaps else None,
    }


def update_metrics(updates, grad_norms, cfg):
    """The metrics of the updates.

    updates: for each optimizer step, a list of (micro-batch, log-probs, loss)."""
    clips_responses = ALGORITHMS[cfg.algorithm].ratio == "sequence"
    log_s = []  # for each optimizer step: the logs of the responses' importance ratios
    clipped_tokens = 0
    all_tokens = 0
    total_loss = 0
    for update in updates:
        log_s.append([])
        for batch, log_probs, loss in update:
            lengths = batch.mask.sum(1)
            token_log_ratio = log_probs - batch.old_log_probs  # 0 outside of the mask
            sequence_log_ratio = token_log_ratio.sum(1) / lengths
            log_s[-1].append(sequence_log_ratio)
            log_ratio = sequence_log_ratio if clips_responses else token_log_ratio
            share = clip_fraction(
                log_ratio.exp(), batch.advantages, batch.mask, *cfg.clip_range())
            clipped_tokens += (share * lengths.sum()).item()
            all_tokens += lengths.sum().item()
            total_loss += loss
    later = list(itertools.chain(*log_s[1:]))
    n = max(1, len(updates))
    return {
        "loss": total_loss / n,  # a value close to 0 is normal
        "grad_norm": sum(grad_norms) / n,  # before it is clipped to 1
        # The share of the response tokens. Responses with advantage 0 are not in the minibatches.
        "clip_fraction": clipped_tokens / max(1, all_tokens),
        # The largest |log s| before the first optimizer step, which must be 0, and the standard
        # deviation of log s after it. Both are per response, for every algorithm.
        "log_ratio_first_max": torch.cat(log_s[0]).abs().max().item() if log_s else None,
        "log_ratio_std": torch.cat(later).std().item() if sum(map(len, later)) > 1 else None,
    }


# ---- model and rollout ---------------------------------------------------------------------------


def load(name, device):
    """(model, tokenizer) from a hub id or a folder. All weights are float32: in bf16, most updates
    at a learning rate of 1e-6 are smaller than the distance to the next number."""
    torch.set_float32_matmul_precision("highest")  # some Docker images switch TF32 on
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device).eval()
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # CUDA graphs use the current device
    return model, AutoTokenizer.from_pretrained(name)


def encode_prompts(tokenizer, questions, cfg):
    """The token ids of each question in the chat template (for Qwen3: without thinking)."""
    chats = []
    for row in questions:
        chat = [{"role": "user", "content": f"{row['question']}\n{cfg.instruction}"}]
        if cfg.system:
            chat.insert(0, {"role": "system", "content": cfg.system})
        chats.append(chat)
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, enable_thinking=False,
                                         return_dict=True).input_ids


class Rollout(NamedTuple):
    """The B = len(prompts) * group_size responses to some prompts, group by group."""
    prompts: list  # token ids of each prompt
    responses: list  # token ids of each response, the end token included
    texts: list  # each response as a text, without the end token
    log_probs: torch.Tensor  # (B, max_completion_length): the sampler's log-probs, 0 after the end


def sample(model, tokenizer, questions, group_size, temperature, cfg, **replaced):
    """Sample `group_size` responses to each question (temperature 0: greedy). Returns a Rollout."""
    parts = Parts(**replaced)
    prompts = parts.encode_prompts(tokenizer, questions, cfg)
    end_ids = model.generation_config.eos_token_id  # a model can have several end tokens
    end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
    end_ids = {tokenizer.eos_token_id, *end_ids} - {None}
    if not end_ids:
        raise ValueError("neither the tokenizer nor the model has an end token")
    end_ids = torch.tensor(sorted(end_ids), device=model.device)
    prompts_at_once = max(1, cfg.rollout_rows // group_size)
    responses = []
    log_probs = []
    for i in range(0, len(prompts), prompts_at_once):
        some_responses, some_log_probs = parts.rollout(
            model, prompts[i:i + prompts_at_once], group_size, cfg.max_completion_length,
            temperature, end_ids)
        responses += some_responses
        log_probs.append(some_log_probs)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return Rollout(prompts, responses, texts, torch.cat(log_probs))


def rollout(model, prompts, group_size, max_length, temperature, end_ids):
    """Sample `group_size` responses to each prompt at `temperature` (0: greedy).

    prompts: lists of token ids; end_ids (n,): the ids that end a response. Returns the B responses,
    group by group, as lists of token ids with the end token, and their log-probs (B, max_length),
    0 after the end. (model.generate would apply the top_k and top_p of the checkpoint. Then the
    responses would not come from the policy whose log-probs the update computes.)"""
    length = max(map(len, prompts)) + max_length
    if model.device.type != "cuda" or not cache_can_be_static(model, length):
        return dynamic_rollout(model, prompts, group_size, max_length, temperature, end_ids)
    if temperature and torch.cuda.is_bf16_supported(including_emulation=False):
        # Responses to train on are sampled with a bf16 copy of the weights, because this takes less
        # than half of the time. The old log-probs do not come from this sampler but from the
        # forward pass of the update, so that the importance ratios stay exact. The cost is that the
        # responses come from a slightly different policy, as with any inference engine. The metric
        # sampler_gap measures this difference. Its effect on training was only measured on a tiny
        # model, where the sampler was rounded on purpose (experiments/engine.md).
        # Greedy responses, from which accuracies are computed, use the float32 weights.
        model = copy.deepcopy(model)
        for parameter in model.parameters():  # but not the buffers: positions need float32
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()
    return static_rollout(model, prompts, group_size, max_length, temperature, end_ids)


@torch.no_grad()
def next_logits(model, cache, ids, mask, positions):
    """The logits (n, V) of the token after ids (n, L), whose keys and values go into the cache."""
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions,
        past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1]


def prefill(model, cache, prompts, group_size):
    """Read each prompt once, and then copy its keys and values for each response of its group.

    Returns the logits (B, V) of the first tokens, and the mask (B, L) of the prompts, which are
    padded on the left so that all responses start in the same column."""
    ids = []
    for prompt in prompts:
        ids.append(torch.tensor(prompt, device=model.device))
    ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left")
    mask = (ids >= 0).long()
    ids = ids.clamp(min=0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = next_logits(model, cache, ids, mask, positions)
    copies = torch.arange(len(prompts), device=ids.device).repeat_interleave(group_size)
    cache.reorder_cache(copies)
    return logits[copies], mask[copies]


def draw_tokens(probs):
    """One token per row, (n, V) -> (n, 1): where the cumulative probability meets a random number.

    torch.multinomial draws V random numbers per row, which takes ten times as long on a CPU."""
    cumulative = probs.cumsum(-1)
    uniform = 1 - torch.rand(len(probs), 1, device=probs.device)  # in (0, 1]: never a probability 0
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:])


def next_tokens(logits, temperature):
    """(tokens (n, 1), their log-probs (n, 1)), drawn at this temperature or, at 0, greedy."""
    probs = torch.softmax(logits.float() / (temperature or 1), dim=-1)
    if temperature:
        tokens = draw_tokens(probs)
    else:
        tokens = probs.argmax(-1, keepdim=True)
    return tokens, probs.gather(1, tokens).log()


def dynamic_rollout(model, prompts, group_size, max_length, temperature, end_ids):
    """`rollout` for CPUs and models without a static cache: finished responses leave the batch."""
    cache = DynamicCache(config=model.config)
    logits, mask = prefill(model, cache, prompts, group_size)
    unfinished = torch.arange(len(mask), device=mask.device)  # the response of each row
    tokens = torch.full((len(mask), max_length), -1, device=mask.device)
    log_probs = torch.zeros(len(mask), max_length, device=mask.device)
    for t in tqdm(range(max_length), "sampling, tokens", leave=False, delay=1):
        ids, drawn_log_probs = next_tokens(logits, temperature)
        tokens[unfinished, t] = ids[:, 0]
        log_probs[unfinished, t] = drawn_log_probs[:, 0]

        kept = (~torch.isin(ids[:, 0], end_ids)).nonzero()[:, 0]
        if len(kept) == 0 or t + 1 == max_length:
            break
        if len(kept) < len(unfinished):
            unfinished = unfinished[kept]
            ids = ids[kept]
            mask = mask[kept]
            cache.reorder_cache(kept)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = mask.sum(1, keepdim=True) - 1
        logits = next_logits(model, cache, ids, mask, positions)
    responses = [row[row >= 0].tolist() for row in tokens.cpu()]
    return responses, log_probs


def cache_can_be_static(model, length):
    """Whether `static_rollout` supports this model: only attention layers, with SDPA, no sliding
    window that is shorter than `length` tokens, and no mixture of experts."""
    has_experts = any(p.dim() == 3 for p in model.parameters())  # the CPU decides which ones run
    if has_experts or model.config._attn_implementation != "sdpa":
        return False
    if not getattr(model.get_decoder(), "_can_compile_fullgraph", False):
        return False
    layers = StaticCache(config=model.config, max_cache_len=length).layers
    kinds = StaticLayer, StaticSlidingWindowLayer
    return all(type(layer) in kinds and layer.max_cache_len == length for layer in layers)


def static_rollout(model, prompts, group_size, max_length, temperature, end_ids):
    """`rollout` for CUDA: fixed shapes, and one CUDA graph that samples a token of each response.

    Decoding one token launches hundreds of small kernels. Launching them from Python takes longer
    than running them. A CUDA graph records the kernels once, and then launches all of them with one
    call. This call repeats the same work on the same memory. Therefore no tensor may change its
    shape or its place. The cache has room for all tokens from the beginning. Finished responses
    stay in the batch, and what follows their end is removed afterwards. The number of sampled
    tokens, t, is a tensor on the GPU."""
    width = max(map(len, prompts))
    cache = StaticCache(config=model.config, max_cache_len=width + max_length)
    logits, mask = prefill(model, cache, prompts, group_size)
    not_padding = torch.nn.functional.pad(mask.bool(), (0, max_length), value=True)[:, None, None]
    columns = torch.arange(width + max_length, device=mask.device)
    t = torch.zeros(1, dtype=torch.long, device=mask.device)  # tokens sampled so far
    tokens = torch.zeros(len(mask), max_length, dtype=torch.long, device=mask.device)
    log_probs = torch.zeros(len(mask), max_length, device=mask.device)

    def draw(logits):
        drawn, drawn_log_probs = next_tokens(logits, temperature)
        tokens.index_copy_(1, t, drawn)
        log_probs.index_copy_(1, t, drawn_log_probs)
        t.add_(1)

    def decode():
        last = tokens.index_select(1, t - 1)
        visible = not_padding & (columns < width + t)  # (B, 1, 1, columns of the cache)
        positions = mask.sum(1, keepdim=True) + t - 1
        draw(next_logits(model, cache, last, visible, positions))

    draw(logits)
    for done in tqdm(range(1, max_length), "sampling, tokens", leave=False, delay=1):
        # To ask whether all responses have ended, the CPU must wait for the GPU.
        if done % 16 == 0 and torch.isin(tokens[:, :done], end_ids).any(1).all():
            break
        if done == 1 and mask.is_cuda:
            decode = run_and_capture(decode)
        else:
            decode()
    ended = torch.isin(tokens, end_ids).long()
    is_kept = (ended.cumsum(1) - ended == 0) & (columns[:max_length] < t)
    responses = [row[kept].tolist() for row, kept in zip(tokens.cpu(), is_kept.cpu())]
    return responses, log_probs * is_kept


def run_and_capture(decode):
    """Run `decode` once, record it in a CUDA graph, and return the function that replays it."""
    stream = torch.cuda.Stream()  # the first run is on a stream of its own, as PyTorch requires
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            decode()  # is recorded and not run
    except RuntimeError:  # some models wait for the CPU in between
        return decode
    return graph.replay


# ---- minibatches and log-probs -------------------------------------------------------------------


class MicroBatch:
    """Some responses of a rollout, with their prompts, that go through the model at once."""

    def __init__(self, prompts, responses, indices, device, advantages=None):
        """indices: which responses; prompts: the prompt of each response; advantages: (B,), or
        (B, n) if a build_minibatches of your own turns them into advantages per token."""
        ids = []
        mask = []
        for i in indices:
            ids.append(torch.tensor(prompts[i] + responses[i]))
            # The mask is made from lengths. If it were made from pad tokens, it would miss the end
            # token of a model that uses the same token for padding and for the end.
            is_response = [False] * len(prompts[i]) + [True] * len(responses[i])
            mask.append(torch.tensor(is_response[1:]))  # position t predicts token t + 1
        self.indices = list(indices)
        self.ids = pad_sequence(ids, batch_first=True).to(device)  # (b, L), padded on the right
        self.mask = pad_sequence(mask, batch_first=True).to(device)  # (b, L - 1), for ids[:, 1:]
        self.advantages = None  # (b,), or (b, L - 1) for losses with an advantage per token
        if advantages is not None:
            self.advantages = advantages[self.indices].to(device)
        self.old_log_probs = None  # (b, L - 1), computed before the first update


CPU_TOKENS = 1024  # the default of micro_batch_tokens on CPUs


def build_minibatches(prompts, responses, advantages, cfg):
    """Split a rollout into minibatches, one per optimizer step: lists of micro-batches.

    A micro-batch holds at most micro_batch_tokens, or a single response. The micro-batches are
    built once and serve for the old and the new log-probs. With other padding or other neighbours,
    the same log-probs would be rounded differently, and GSPO's clip range is so narrow that this
    would matter. Responses with advantage 0 have no gradient. They are left out here, but
    train_step counts them in the denominator. A minibatch without any gradient is left out, too."""
    minibatches = []
    size = len(responses) // cfg.minibatches
    tokens_at_once = cfg.micro_batch_tokens or CPU_TOKENS
    for start in range(0, len(responses), size):
        indices = [i for i in range(start, start + size) if advantages[i].any()]
        lengths = {i: len(prompts[i]) + len(responses[i]) for i in indices}
        groups = []
        for i in sorted(indices, key=lengths.get):  # similar lengths together need little padding
            if not groups or (len(groups[-1]) + 1) * lengths[i] > tokens_at_once:
                groups.append([])
            groups[-1].append(i)
        minibatch = []
        for group in groups:
            minibatch.append(MicroBatch(prompts, responses, group, cfg.device, advantages))
        if minibatch:
            minibatches.append(minibatch)
    return minibatches


def response_log_probs(model, batch, temperature):
    """The log-probs (b, L - 1) of the response tokens; 0 elsewhere.

    In three lines, since position t predicts token t + 1:

        logits = model(batch.ids).logits[:, :-1]
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        return log_probs.gather(-1, batch.ids[:, 1:, None])[..., 0] * batch.mask

    But with a vocabulary of 151,936 tokens, the logits would need more memory than anything else.
    Therefore only response tokens go through the head, in chunks, and the chunks are computed again
    in the backward pass."""
    hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
    hidden = hidden[:, :-1][batch.mask]
    tokens = batch.ids[:, 1:][batch.mask]
    head = model.get_output_embeddings()

    def log_probs_of(hidden, tokens):
        logits = head(hidden)[None]
        return token_log_probs(logits, tokens[None], temperature)[0]

    chunk_size = max(256, 2**22 // len(head.weight))
    chunks = []
    for chunk in zip(hidden.split(chunk_size), tokens.split(chunk_size)):
        chunks.append(checkpoint(log_probs_of, *chunk, use_reentrant=False,
                                 preserve_rng_state=False))
    log_probs = torch.cat(chunks)
    return log_probs.new_zeros(batch.mask.shape).masked_scatter(batch.mask, log_probs)


def fitting_micro_batch_tokens(model, length, free_bytes):
    """The largest power of two for micro_batch_tokens, from 512 to 8192, with which an update fits.
    If none does, it is 512.

    free_bytes: the free memory after loading the model; length: tokens of the longest text. Per
    token and layer, the backward pass keeps about 8 vectors of the hidden size, 4 of the size of
    the MLP, and the attention scores, all in float32. Gradients and AdamW take 12 bytes per weight,
    and the logits up to 1 GiB. A tenth of the memory is left free. Measured on an H100 with
    Qwen2.5-0.5B: a peak of 12 GiB at 1024 tokens and of 36 GiB at 8192."""
    config = model.config.get_text_config()
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    floats = 8 * config.hidden_size + 4 * mlp + 1.2 * config.num_attention_heads * length
    free_bytes = 0.9 * free_bytes - 12 * model.num_parameters() - 2**30
    tokens = 8192
    while tokens > 512 and tokens * 4 * floats * config.num_hidden_layers > free_bytes:
        tokens //= 2
    return tokens


# ---- evaluation, and the training loop -----------------------------------------------------------


def wilson(successes, n):
    """Wilson's 95% interval for the share successes / n, as (low, high)."""
    z2 = 1.96**2
    centre = successes + z2 / 2
    half = (z2 * (successes * (n - successes) / n + z2 / 4)) ** 0.5
    return (centre - half) / (n + z2), (centre + half) / (n + z2)


def evaluate(model, tokenizer, questions, cfg, temperature=0.0, **replaced):
    """The mean reward of one response to each question; greedy decoding, in float32, by default.

    With the default reward, eval_last_number is the accuracy if the last number of a response
    counts as its answer, whatever its format. A mean of zeros and ones has Wilson's 95% interval.
    eval_results has a row for each question."""
    reward = Parts(**replaced).reward
    rollout = sample(model, tokenizer, questions, 1, temperature, cfg, **replaced)
    rewards = {"reward": score(reward, questions, rollout.texts).tolist()}
    if reward is correctness_reward:
        last_number = score(reward, questions, rollout.texts, strict=False)
        rewards["last_number"] = last_number.tolist()
    row = {"eval_questions": len(questions)}
    results = [
        {"question": question["question"],
         "gold": gold_answer(question.get("answer")) or question.get("answer"),
         "response": text, "tokens": len(response)}
        for question, text, response in zip(questions, rollout.texts, rollout.responses)]
    for name, values in rewards.items():
        row[f"eval_{name}"] = sum(values) / len(values)
        if set(values) <= {0, 1}:
            row[f"eval_{name}_interval"] = wilson(sum(values), len(values))
        for result, value in zip(results, values):
            result[name] = value
    return row | {"eval_results": results}


def shuffled(questions, seed):
    """All questions in a random order, then all of them in another order, without end."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(questions, len(questions))


def train(cfg, model, tokenizer, questions, held_out=(), state=None, stopped=(), on_step=None,
          **replaced):
    """Train for max_steps rollouts, from the beginning or from a saved state.

    questions, held_out: lists of dicts with a "question" and the columns that the reward needs.
    state: from load_state. on_step: a function that is called with the metrics of each step, such
    as wandb.log. replaced: functions to use in place of the default ones, by their names in Parts;
    the most common one is reward=f. Training ends early once `stopped` is not empty. With an
    output_dir, the metrics are printed and the files go there; with None, neither happens. Dropout
    is switched off (model.eval()). Micro-batches have 1024 tokens unless cfg says otherwise.
    Returns the metrics, one dict per step; step 0 is only an evaluation. ValueError: no questions,
    weights that are not float32, an output_dir that holds a run."""
    check_arguments(cfg, model, questions, state)
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    optimizer.zero_grad()  # a gradient may be left over from an earlier use of the model
    rows = []
    if state:
        rows = state["rows"]
        model.load_state_dict(state.pop("model"))
        optimizer.load_state_dict(state.pop("optimizer"))
    used = max(0, len(rows) - 1) * cfg.prompts_per_step
    stream = itertools.islice(shuffled(questions, cfg.seed), used, None)

    for step in tqdm(range(len(rows), cfg.max_steps + 1), cfg.algorithm):
        is_due = step % cfg.save_steps == 0 or step == cfg.max_steps
        results = []
        try:
            if step == 0:
                row = {"step": 0, "settings": fingerprint(cfg, questions)}
            else:
                picked = list(itertools.islice(stream, cfg.prompts_per_step))
                row = train_step(model, tokenizer, optimizer, picked, step, cfg, **replaced)
            rows.append(row)
            row |= notes(rows)
            if is_due and held_out:
                row |= evaluate(model, tokenizer, held_out, cfg, **replaced)
                results = row.pop("eval_results")
        except RewardError:  # the weights are those after the last row
            save(rows, [], model, optimizer, cfg)
            raise
        is_saved = is_due or bool(stopped)
        if is_saved:
            save(rows, results, model, optimizer, cfg)
        report(rows, results, cfg)
        if on_step:
            on_step(dict(row))
        if stopped and not is_saved:  # a signal came after the other save
            save(rows, results, model, optimizer, cfg)
        if stopped:
            break
    if cfg.output_dir:
        for part in model, tokenizer:
            part.save_pretrained(Path(cfg.output_dir, "model"))
    return rows


def check_arguments(cfg, model, questions, state):
    """ValueError if train() cannot work with these arguments."""
    if not questions:
        raise ValueError("there are no questions to train on")
    if any(p.requires_grad and p.dtype != torch.float32 for p in model.parameters()):
        raise ValueError(f"the model is in {model.dtype}. In half precision, most updates round to "
                         "nothing. Load it in float32: from_pretrained(..., dtype=torch.float32)")
    device = next(model.parameters()).device
    if device.type != torch.device(cfg.device).type:
        raise ValueError(f"the model is on {device}, but cfg.device is {cfg.device}")
    if cfg.output_dir:
        os.makedirs(cfg.output_dir, exist_ok=True)
        found = {"metrics.jsonl", "state.pt", "model"} & set(os.listdir(cfg.output_dir))
        if found and not state:
            raise ValueError(f"{cfg.output_dir} holds {min(found)}. Choose another output_dir, or "
                             "resume the run with state=load_state(cfg, questions)")


# ---- questions and rewards -----------------------------------------------------------------------


class RewardError(Exception):
    """The reward function raised an exception, which is the cause of this one."""


def score(reward, questions, texts, **more):
    """The reward of each text, (B,). The reward function gets all columns of the questions, as in
    TRL. RewardError: it raised an exception, or did not return one finite number per text."""
    name = getattr(reward, "__qualname__", type(reward).__name__)
    repeated = [row for row in questions for _ in range(len(texts) // len(questions))]
    columns = {column: [row[column] for row in repeated] for column in repeated[0]}
    try:
        returned = reward(prompts=columns["question"], completions=texts, **columns, **more)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardError(f"the reward {name} raised {error!r} in {place.filename}, line "
                          f"{place.lineno}") from error
    rewards = []
    if not isinstance(returned, (str, dict)):  # letters and keys are not rewards
        with contextlib.suppress(TypeError, ValueError):
            rewards = [float(value) for value in returned]
    if len(rewards) != len(texts) or not all(map(math.isfinite, rewards)):
        raise RewardError(f"the reward {name} returned {returned!r:.200}, but a list of "
                          f"{len(texts)} finite numbers is needed, one for each completion")
    return torch.tensor(rewards, dtype=torch.float32)


FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_questions(cfg, reward=None):
    """(questions to train on, held-out questions), as lists of dicts.

    The test split is held out. If there is none, the validation split is held out, or else the last
    questions of the training part. Held-out questions that are also in the training part are left
    out.
    ValueError: there is no training part, or a row has no question, or it has no answer that the
    default reward can use."""
    kind = FILE_KINDS.get(Path(cfg.dataset).suffix.lower())
    if kind:
        splits = load_dataset(kind, data_files=cfg.dataset)
    elif Path(cfg.dataset).is_file():
        raise ValueError(f"a dataset file must end in {', '.join(FILE_KINDS)}")
    else:
        splits = load_dataset(cfg.dataset, "main" if cfg.dataset == "openai/gsm8k" else None)
    if "train" not in splits:
        raise ValueError(f"there is no train part, only {', '.join(splits)}")
    questions = list(splits["train"])
    if "test" in splits:
        held_out = list(splits["test"])
    elif "validation" in splits:
        held_out = list(splits["validation"])
    else:
        n = len(questions) - min(cfg.eval_size, len(questions) // 5)
        held_out = questions[n:]
        del questions[n:]
    for i, row in enumerate(questions + held_out, 1):
        is_graded = reward not in (None, correctness_reward) or gold_answer(row.get("answer"))
        if not is_graded or not isinstance(row.get("question"), str):
            raise ValueError(f"row {i} needs a question, which is a text, and, unless you pass your"
                             f" own reward, an answer like '42' or '... #### 42'; it is {row}")
    seen = {row["question"] for row in questions}
    unseen = [row for row in held_out if row["question"] not in seen]
    if len(unseen) < len(held_out):
        tqdm.write(f"note: {len(held_out) - len(unseen)} held-out questions are left out, because "
                   "they are training questions, too")
    return questions, unseen[:cfg.eval_size]


def correctness_reward(prompts, completions, answer, strict=True, **columns):
    """1.0 for a completion that gives the number of the answer, else 0.0. Works in TRL, too."""
    rewards = []
    for completion, gold in zip(completions, answer):
        expected = gold_answer(gold) or "no number"
        rewards.append(float(extract_answer(completion, strict) == expected))
    return rewards


def extract_answer(completion, strict=True):
    r"""The answer of a completion, as a canonical number such as '-1234.5', or None.

    completion: a text, or a list of chat messages, as TRL passes them. strict: the number after the
    last '####' or in the last '\boxed{}', whichever comes last; otherwise the last number. Commas,
    $, %, **, \text{}, a final period, a leading + or 0, and decimals as in 18.0 make no
    difference."""
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
    r"""The number in a dataset's answer: '... #### 42', '... \boxed{42}' or 42. Otherwise None."""
    plain = r"\A\s*+([-−+$]*[0-9,]*+(\.[0-9]+)?%?)\s*\Z"  # *+ does not backtrack: linear time
    return extract_answer(re.sub(plain, r"#### \1", str(answer)))


# ---- the parts that can be replaced --------------------------------------------------------------


@dataclass
class Parts:
    """The functions that train(), train_step(), evaluate() and main() let you replace by name."""
    reward: Callable = correctness_reward
    encode_prompts: Callable = encode_prompts
    rollout: Callable = rollout
    group_advantages: Callable | None = None  # None: the one of the algorithm
    build_minibatches: Callable = build_minibatches
    response_log_probs: Callable = response_log_probs
    loss: Callable | None = None  # None: the one of the algorithm


# ---- what is printed, and what is written to disk ------------------------------------------------


def notes(rows):
    """{"notes": [...]} if the metrics show something that the user should know, else {}."""
    row = rows[-1]
    found = []
    if row.get("log_ratio_first_max"):
        found.append("log_ratio_first_max is not 0. The old log-probs are wrong, or the "
                     "two forward passes round differently")
    if row["step"] == 3 and all(row["equal_reward_groups"] == 1 for row in rows[1:]):
        found.append("no gradient in three steps, because the rewards within each group are equal "
                     f"(mean {row['reward']:.3g}; {row['cut']:.0%} of the responses are cut). Try "
                     "easier questions, a longer --max_completion_length, a larger --group_size, "
                     "or supervised fine-tuning on a few answers first")
    return {"notes": found} if found else {}


SHOWN = ("reward", "response_length", "cut", "clip_fraction", "log_ratio_std", "seconds",
         "eval_reward", "eval_last_number")


def report(rows, results, cfg):
    """Print the last row, and write metrics.jsonl and the results of the evaluation, if any."""
    if not cfg.output_dir:
        return
    write_lines(rows, Path(cfg.output_dir, "metrics.jsonl"))
    row = rows[-1]
    if results:
        write_lines(results, Path(cfg.output_dir, f"eval_{row['step']}.jsonl"))
    shown = [f"step {row['step']}/{cfg.max_steps}"]
    for name in SHOWN:
        if row.get(name) is not None:
            shown.append(f"{name} {row[name]:.3g}")
        if f"{name}_interval" in row:
            shown.append("(95% CI {:.3g} to {:.3g})".format(*row[f"{name}_interval"]))
    tqdm.write("  ".join(shown))
    for result in results[:2]:
        tqdm.write(f"    {result['question']} -> {result['response']!r}: {result['reward']:g}")
    for note in row.get("notes", ()):
        tqdm.write(f"note: {note}")


def write_lines(rows, path):
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def save(rows, results, model, optimizer, cfg):
    """Write state.pt, from which a run is resumed. The old one stays until this is complete."""
    if cfg.output_dir:
        state = {"rows": rows, "results": results, "model": model.state_dict(),
                 "optimizer": optimizer.state_dict()}
        partial = Path(cfg.output_dir, "partial")
        with exits_with(f"{partial} cannot be written (is the disk full?)"):
            torch.save(state, partial)
        os.replace(partial, partial.with_name("state.pt"))


def fingerprint(cfg, questions):
    """The settings of a run and the hash of its questions, which must not change on resuming."""
    eps_low, eps_high = cfg.clip_range()
    crc = zlib.crc32(repr(questions).encode())
    return vars(cfg) | {"eps_low": eps_low, "eps_high": eps_high, "questions": crc}


def load_state(cfg, questions):
    """The state of the run in output_dir, or None. ValueError: the saved run has other settings.
    SystemExit: state.pt is damaged."""
    path = Path(cfg.output_dir, "state.pt")
    if not path.exists():
        return None
    with exits_with(f"--output_dir {cfg.output_dir}: state.pt is damaged, so choose another"):
        state = torch.load(path, map_location="cpu")
    begun_with = state["rows"][0]["settings"]
    now = fingerprint(cfg, questions)
    changed = []
    for name, value in begun_with.items():
        if name not in MAY_CHANGE and value != now[name]:
            changed.append(name)
    if changed:
        hint = " (they also change with --eval_size)" if "questions" in changed else ""
        raise ValueError(f"the run that is saved there has other values of {', '.join(changed)}"
                         f"{hint}. Choose another --output_dir")
    tqdm.write(f"resuming a run that was begun with --max_steps {begun_with['max_steps']} "
               "(with another value, the learning rate jumps)")
    report(state["rows"], state["results"], cfg)
    return state


# ---- the command line ----------------------------------------------------------------------------


@contextlib.contextmanager
def exits_with(what):
    """If anything fails in this block, the program ends with one line that names the reason."""
    try:
        yield
    except Exception as error:  # libraries raise many kinds
        reason = error if isinstance(error, RewardError) else error.__cause__ or error
        sys.exit(f"train_math.py: {what}: {reason!r:.400}")


def parse_settings(argv=None):
    """The command line, or argv, as Settings. A wrong flag or value ends the program."""
    parser = HfArgumentParser(Settings, usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    with exits_with("settings"):
        return parser.parse_args_into_dataclasses(argv)[0]


UNSUPPORTED = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@torch.no_grad()
def check_model(model, tokenizer, questions, cfg, **replaced):
    """Try prompts, sampler, log-probs and reward with two responses of eight tokens before the long
    work begins. The loss is not tried.

    Returns the number of tokens of the longest possible text. ValueError: this script cannot sample
    from the model or score what it sampled. RewardError: as in score."""
    parts = Parts(**replaced)
    config = model.config.get_text_config()
    for name in UNSUPPORTED:
        if getattr(config, name, None) not in (None, 1):
            raise ValueError(f"the model scales or caps its logits ({name}), which is unsupported")
    prompts = parts.encode_prompts(tokenizer, questions, cfg)
    if max(map(max, prompts)) >= model.get_input_embeddings().num_embeddings:
        raise ValueError("the tokenizer has tokens that the model lacks: they are not a pair")
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = len(prompts[longest]) + cfg.max_completion_length
    limit = getattr(config, "max_position_embeddings", length)
    if length > limit:
        raise ValueError(f"prompt and response need up to {length} tokens, but the model supports "
                         f"{limit}. The longest question is {questions[longest]['question']!r:.80}")
    if model.device.type == "cuda" and not cache_can_be_static(model, length):
        tqdm.write("note: this model's cache cannot be static, so that sampling is slower")

    two = [questions[0] | {"question": "?"}, questions[longest]]  # prompts of different lengths
    short = replace(cfg, max_completion_length=8)
    rollout = sample(model, tokenizer, two, 1, 0.0, short, **replaced)  # greedy: in float32
    batch = MicroBatch(rollout.prompts, rollout.responses, [0, 1], model.device)
    log_probs = parts.response_log_probs(model, batch, 1.0)
    gap = (log_probs.sum(1) - rollout.log_probs.sum(1)).abs().max().item()
    if not gap < 1e-3:
        raise ValueError(f"the log-probs of eight sampled tokens differ by {gap:.2g} between "
                         "sampling and the full forward pass: its cache, padding or head is "
                         "unsupported")
    score(parts.reward, [questions[0]] * 2, rollout.texts)
    return length


def prepare(cfg, replaced):
    """The first arguments of train(). What a user can get wrong ends with one line.

    The model is loaded last. If micro_batch_tokens is None, it is chosen from the free memory."""
    with exits_with(f"--dataset {cfg.dataset}"):
        questions, held_out = load_questions(cfg, replaced["reward"])
    with exits_with(f"--output_dir {cfg.output_dir}"):
        state = load_state(cfg, questions)
    with exits_with(f"--model {cfg.model} --device {cfg.device}"):
        model, tokenizer = load(cfg.model, cfg.device)
    with exits_with(f"--model {cfg.model} --device {cfg.device}, tried with prompts and reward"):
        length = check_model(model, tokenizer, questions + held_out, cfg, **replaced)
        if model.device.type == "cuda" and not cfg.micro_batch_tokens:
            tokens = fitting_micro_batch_tokens(model, length, torch.cuda.mem_get_info()[0])
            cfg = replace(cfg, micro_batch_tokens=tokens)
    tqdm.write(f"{cfg.model}: {model.num_parameters():,} parameters in {model.dtype} on "
               f"{cfg.device}; {len(questions):,} questions and {len(held_out):,} held-out ones; "
               f"micro-batches of {cfg.micro_batch_tokens or CPU_TOKENS} tokens")
    eps_low, _ = cfg.clip_range()
    if ALGORITHMS[cfg.algorithm].ratio == "sequence" and 0.1 <= eps_low < 1:
        tqdm.write(f"note: --eps_low {eps_low} is wide for GSPO's ratio. The paper uses 3e-4")
    return cfg, model, tokenizer, questions, held_out, state


def main(argv=None, reward=correctness_reward, on_step=None, **replaced):
    """The script. The keywords are those of train(), such as a reward function of your own."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # some consoles cannot show every character
    cfg = parse_settings(argv)
    with exits_with(f"--output_dir {cfg.output_dir}"):
        os.makedirs(cfg.output_dir, exist_ok=True)
        found = set(os.listdir(cfg.output_dir))
        if "state.pt" not in found and found - {"lock", "partial"}:
            raise ValueError("the folder is not empty and holds no run that can be resumed")
        lock = FileLock(Path(cfg.output_dir, "lock"))
    with exits_with(f"--output_dir {cfg.output_dir} is in use by another process"):
        lock.acquire(timeout=0)
    stopped = []
    handlers = {}

    def stop(number, frame):
        stopped.append(number)
        for other, handler in handlers.items():
            signal.signal(other, handler)
        tqdm.write("This step will be finished and saved. A second signal stops at once.")

    if threading.current_thread() is threading.main_thread():
        for number in signal.SIGINT, signal.SIGTERM:
            handlers[number] = signal.signal(number, stop)
    replaced["reward"] = reward
    try:
        cfg, model, tokenizer, questions, held_out, state = prepare(cfg, replaced)
        rows = train(cfg, model, tokenizer, questions, held_out, state, stopped, on_step,
                     **replaced)
    except RewardError:
        tqdm.write("What was saved is intact. Correct the reward function, and run the same "
                   "command again to resume the run.")
        raise
    except torch.OutOfMemoryError as error:
        sys.exit(f"train_math.py: {error!r}. What was saved is intact. Run the same command with a "
                 "lower --micro_batch_tokens or --rollout_rows")
    except (KeyboardInterrupt, FloatingPointError) as error:
        sys.exit(f"train_math.py: {error!r}. What was saved is intact")
    finally:
        lock.release()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    tqdm.write(f"{cfg.output_dir}/model is the model after step {rows[-1]['step']}")
    if stopped:
        sys.exit(128 + stopped[0])  # as after any signal


if __name__ == "__main__":
    main()
