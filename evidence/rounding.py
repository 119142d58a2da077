"""How much of log s is rounding? Four settings of precision are compared on a real model.

    OMP_NUM_THREADS=1 python -m evidence.rounding --gsm8k FOLDER [--model MODEL]

This takes an hour on one core. MODEL is a folder or a hub id. By default, it is
SmolLM2-135M-Instruct, and FOLDER has GSM8K's train.jsonl. 16 responses of 512 tokens to its first
four questions are sampled once, in float32. Their first 32 and 128 tokens serve as shorter
responses.

In each setting, the log-probs of the responses are computed with the same weights in four ways: by
the training forward, by the sampler (token by token with a KV cache), with 64 more columns of
padding, and in micro-batches of 3 rows. Then four of the responses make one optimizer step of GSPO
in float32 (AdamW, learning rate 1e-6, random rewards). log s of the other twelve is measured in
each setting between the same two sets of weights. Its difference from log s in float32 is rounding.

The published weights are bfloat16 numbers. A small step of a float32 copy then rounds back to the
same bfloat16 numbers. This does not hold for weights in the middle of a training run. Therefore
everything is measured on weights that were moved "off the grid", by up to half the distance to the
next bfloat16 number. The optimizer step is also measured on the weights "as published".

The measured values are written to rounding.jsonl in --output_dir. Those of the page are in
logs/measurements.jsonl.gz. They also have TF32, which the script of commit d775aef emulated.
"""
import argparse
import contextlib
import copy
import itertools
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache

import train_math
from gspo import group_advantages, gspo_loss
from tools.answers import markdown
from tools.logs import make_writable, read, write
from tools.warm_up import given_rollout

INSTRUCTION = "Reason step by step, then write the final answer, a number, after '####'."
LENGTHS = 32, 128, 512
PROMPTS, GROUP, LOW, HIGH = 4, 4, 3e-4, 4e-4
STARTS = "off the grid", "as published"


def autocast(dtype):
    """A context without a cache, which would keep the weights from before the step."""
    return lambda: torch.autocast("cpu", dtype, cache_enabled=False)


SETTINGS = {  # name: (the weights' dtype, a context)
    "float32": (torch.float32, contextlib.nullcontext),
    "bf16 autocast": (torch.float32, autocast(torch.bfloat16)),
    "bf16 weights": (torch.bfloat16, contextlib.nullcontext),
    "float16 autocast": (torch.float32, autocast(torch.float16)),
}


def log_probs(model, batch):
    return train_math.response_log_probs(model, batch, 1.0)


def log_s(new, old):
    """log s of each response that `new` has. new, old: {row: log-probs (n,)}."""
    return [(new[i].double() - old[i].double()).mean().item() for i in sorted(new)]


def forward(model, minibatches):
    """{row: log-probs of its response (n,)}, by the training forward."""
    return {row: values[mask] for batch in itertools.chain(*minibatches)
            for row, values, mask in zip(batch.indices, log_probs(model, batch), batch.mask)}


@torch.no_grad()
def decode(model, prompts, responses):
    """The log-probs (B, T) of given responses, token by token with a KV cache, as a sampler
    computes them."""
    found = []
    for i, prompt in enumerate(prompts):
        given = torch.tensor(responses[i * GROUP:][:GROUP], device=model.device)
        ids = torch.tensor([prompt] * GROUP, device=model.device)
        cache = DynamicCache(config=model.config)
        own = []
        for token in tqdm(given.T[..., None], desc="decode", leave=False):
            logits = model(ids, cache=cache, logits_to_keep=1).logits[:, -1]
            own.append(logits.float().log_softmax(-1).gather(1, token))
            ids = token
        found.append(torch.cat(own, dim=1))
    return torch.cat(found)


@torch.no_grad()
def off_the_grid(model):
    """The model's parameters, each changed by up to half the distance to the next bf16 number."""
    moved = []
    for p in model.parameters():
        step = 2.0**-7 * p.abs().clamp(min=1e-30).log2().floor().exp2()
        moved.append(p + (torch.rand_like(p) - 0.5) * step)
    return moved


@torch.no_grad()
def set_parameters(model, values):
    for p, value in zip(model.parameters(), values):
        p.copy_(value)


def float32_step(model, start, minibatch, cfg):
    """The parameters after one optimizer step of GSPO from `start`, in float32."""
    set_parameters(model, start)
    for batch in minibatch:
        new = log_probs(model, batch)
        loss = gspo_loss(new, new, batch.advantages, batch.mask, LOW, HIGH, denominator=GROUP)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, betas=(0.9, 0.95),
                                  weight_decay=0)
    optimizer.step()
    model.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def measure(model, n, sampled, starts, moved, build, cfg):
    """{name of a measurement: log s of each response} for responses of n tokens."""
    minibatches = build(n, cfg.micro_batch_tokens)
    found = {}
    with torch.no_grad():
        old = forward(model, minibatches)
    again = forward(model, minibatches[:1])  # with a graph for the gradient
    found["again"] = log_s({row: values.detach() for row, values in again.items()}, old)
    with torch.no_grad():
        found["decode"] = log_s(dict(enumerate(sampled[:, :n])), old)
        found["rows"] = log_s(forward(model, build(n, None)), old)
        for start in STARTS:
            set_parameters(model, starts[start])
            before = forward(model, minibatches[1:])
            set_parameters(model, moved[start, n])
            found[start] = log_s(forward(model, minibatches[1:]), before)
        set_parameters(model, starts[STARTS[0]])
        for batch in itertools.chain(*minibatches):
            batch.ids = torch.nn.functional.pad(batch.ids, (0, 64))
            batch.mask = torch.nn.functional.pad(batch.mask, (0, 64))
        found["padding"] = log_s(forward(model, minibatches), old)
    return found


def outside(values):
    ratios = torch.tensor(values, dtype=torch.float64).exp()
    return ((ratios < 1 - LOW) | (ratios > 1 + HIGH)).double().mean().item()


def cell(values):
    return f"{statistics.stdev(values):.1e}, {outside(values):.0%} out"


def table(rows):
    """Standard deviations of log s, with the fraction of responses outside of GSPO's clip range."""
    found = {row["setting"]: row for row in rows}
    lines = []
    for name, n in itertools.product(found, map(str, LENGTHS)):
        own = found[name][n]
        stepped, published = (own[start] for start in STARTS)
        apart = [x - y for x, y in zip(stepped, found["float32"][n][STARTS[0]])]
        lines.append([f"{name}, {n}", cell(own["decode"]), cell(own["padding"]),
                      cell(own["rows"]), f"{max(map(abs, own['again'])):.1g}", cell(stepped),
                      f"{statistics.stdev(apart):.1e}" if any(apart) else "reference",
                      cell(published)])
    return markdown(["setting, tokens", "sampler against forward", "64 more pad columns",
                     "micro-batches of 3 rows", "same micro-batch, max", "after one step",
                     "apart from float32's", "the step on published weights"], lines)


def minibatches_of(prompts, responses, advantages, cfg):
    """build(n, micro_batch_tokens): minibatches of the responses' first n tokens, in micro-batches
    of 3 rows if micro_batch_tokens is None."""
    asked = [p for p in prompts for _ in range(GROUP)]

    def build(n, micro_batch_tokens):
        cut = [response[:n] for response in responses]
        tokens = micro_batch_tokens or 3 * max(map(len, prompts)) + 3 * n
        own = replace(cfg, micro_batch_tokens=tokens)
        return train_math.build_minibatches(given_rollout(asked, cut), advantages, own)

    return build


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gsm8k", type=Path, required=True,
                        help="the folder with GSM8K's train.jsonl")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct",
                        help="hub id or folder")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/rounding"))
    args = parser.parse_args()
    log = args.output_dir / "rounding.jsonl"
    make_writable(log)
    cfg = train_math.Settings(device="cpu", minibatches=4, group_size=GROUP,
                              micro_batch_tokens=4096, instruction=INSTRUCTION, eval_size=0,
                              dataset=str(args.gsm8k / "train.jsonl"))
    questions = train_math.load_questions(cfg)[0][:PROMPTS]
    model, tokenizer = train_math.load(args.model, cfg.device)
    prompts = train_math.encode_prompts(tokenizer, questions, cfg)
    torch.manual_seed(0)
    advantages = group_advantages(torch.rand(PROMPTS * GROUP), GROUP)
    starts = {STARTS[0]: off_the_grid(model),
              STARTS[1]: [p.detach().clone() for p in model.parameters()]}
    print("sampling in float32")
    no_ends = torch.tensor([], dtype=torch.long, device=model.device)
    responses, _ = train_math.generate(model, prompts, GROUP, max(LENGTHS), 1.0, no_ends)
    build = minibatches_of(prompts, responses, advantages, cfg)

    print("one step in float32, for each length and start")
    moved = {}
    for start, n in tqdm(list(itertools.product(STARTS, LENGTHS))):
        minibatch = build(n, cfg.micro_batch_tokens)[0]
        moved[start, n] = float32_step(model, starts[start], minibatch, cfg)
    rows = []
    for name, (dtype, setting) in tqdm(SETTINGS.items()):
        with setting():
            own = copy.deepcopy(model).to(dtype)
            set_parameters(own, starts[STARTS[0]])
            sampled = decode(own, prompts, responses)
            found = {n: measure(own, n, sampled, starts, moved, build, cfg) for n in LENGTHS}
        rows.append({"setting": name, **found})
    write(log, rows)
    print(table(read(log)))


if __name__ == "__main__":
    main()
