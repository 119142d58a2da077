"""How much of log s is rounding? Five settings of precision, on real weights.

    OMP_NUM_THREADS=1 python experiments/precision.py --gsm8k FOLDER [--model FOLDER_OR_HUB_ID]    # an hour, one core

The model is SmolLM2-135M-Instruct, FOLDER holds GSM8K's train.jsonl. 16 responses of 512 tokens to its first four
questions are sampled once, in float32; their first 32 and 128 tokens are the shorter ones. In each setting their
log-probs are computed with the same weights: by the training forward, by the sampler (a KV cache, token by token),
with 64 more columns of padding, and in micro-batches of 3 rows. Then four of them make one optimizer step of GSPO
in float32 (AdamW, learning rate 1e-6, random rewards), and log s of the other twelve is measured in each setting
between the same two sets of weights: what sets it apart from float32's is rounding.

Published weights are bfloat16, so they lie on bf16's grid, where a small step of a float32 copy rounds back to the
very same bf16 number. Weights in the midst of training do not: all is measured on weights moved off the grid, by
up to half a bf16 step each, and the optimizer step on the weights as published, too.

TF32 needs a GPU; on a CPU it is emulated: inputs and weights of the linear layers (not attention's) are rounded to
10 bits and summed in float32. float16 is slow on a CPU, which says nothing about GPUs. `--device cuda` takes the real
TF32 and wall-clock times; it has never run on a GPU. Raw figures and table.md: results/precision/, or --output_dir;
precision.png beside it."""
import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from tqdm import tqdm

import train_math
from gspo import group_advantages, gspo_loss

LENGTHS = 32, 128, 512
PROMPTS, GROUP, LOW, HIGH = 4, 4, 3e-4, 4e-4
STARTS = "off the grid", "as published"


def tf32(x):
    """x rounded to TF32's 10 bits of mantissa, with x's gradient."""
    return x + (((x.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) - x).detach()


@contextlib.contextmanager
def real_tf32():
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def emulated_tf32():
    forward = torch.nn.Linear.forward
    torch.nn.Linear.forward = lambda self, x: torch.nn.functional.linear(tf32(x), tf32(self.weight), self.bias)
    try:
        yield
    finally:
        torch.nn.Linear.forward = forward


def settings(device):
    """{name: (the weights' dtype, a context)}"""
    def autocast(dtype):  # without its cache, as that would keep the weights of before the step
        return lambda: torch.autocast(torch.device(device).type, dtype, cache_enabled=False)
    tf32 = {"TF32": real_tf32} if "cuda" in device else {"TF32, emulated": emulated_tf32}
    contexts = {"float32": contextlib.nullcontext, **tf32, "bf16 autocast": autocast(torch.bfloat16),
                "bf16 weights": contextlib.nullcontext, "float16 autocast": autocast(torch.float16)}
    return {name: (torch.bfloat16 if name == "bf16 weights" else torch.float32, c) for name, c in contexts.items()}


def seconds(device):
    """Now: process CPU seconds, or, on a GPU, the wall clock when it has done what it was given."""
    if "cuda" not in device:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def file_name(setting):
    return setting.replace(", ", "_").replace(" ", "_") + ".json"


def log_probs(model, batch):
    return train_math.response_log_probs(model, batch, 1.0)


def log_s(new, old):
    """The mean over tokens of new - old, for each response; both are lists of (tokens,) or (b, T) rows."""
    return [(n.double() - o.double()).mean().item() for n, o in zip(new, old, strict=True)]


def forward(model, minibatches):
    """{row: log-probs of its response (n,)}, by the training forward, without gradient."""
    with torch.no_grad():
        return {row: values[mask] for minibatch in minibatches for batch in minibatch
                for row, values, mask in zip(batch.rows, log_probs(model, batch), batch.mask)}


def rollout(model, prompts, length):
    no_ends = torch.tensor([], dtype=torch.long, device=model.device)
    return train_math.rollout(model, prompts, GROUP, length, 1.0, no_ends)


def decode(model, prompts, responses):
    """The sampler's log-probs (B, T) of responses that are given: what it draws is replaced by them."""
    columns = iter(tqdm(torch.tensor(responses, device=model.device).T[..., None], desc="decode", leave=False))
    with mock.patch.object(train_math, "draw_tokens", lambda probs: next(columns)):
        return rollout(model, prompts, len(responses[0]))[1]


@torch.no_grad()
def off_the_grid(model):
    """The model's parameters, each moved by up to half the distance to the next bf16 number."""
    return [p + (torch.rand_like(p) - 0.5) * 2.0**-7 * p.abs().clamp(min=1e-30).log2().floor().exp2()
            for p in model.parameters()]


@torch.no_grad()
def set_parameters(model, values):
    for p, value in zip(model.parameters(), values):
        p.copy_(value)


def float32_step(model, start, minibatch, s):
    """The parameters after one optimizer step of GSPO from `start`, in float32."""
    set_parameters(model, start)
    for batch in minibatch:
        new = log_probs(model, batch)
        gspo_loss(new, new, batch.advantages, batch.mask, LOW, HIGH, denominator=GROUP).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=s.learning_rate, betas=(0.9, 0.95), weight_decay=0).step()
    model.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def measure(model, prompts, responses, starts, moved, build, s):
    """{length: {what: log s of each response}} in one setting, with the seconds of its forward."""
    set_parameters(model, starts[STARTS[0]])
    found, sampled = {}, decode(model, prompts, responses)
    for n in LENGTHS:
        minibatches = build(n, s.micro_batch_tokens)
        began = seconds(s.device)
        old = forward(model, minibatches)
        took = seconds(s.device) - began
        compare = lambda new: log_s([new[i] for i in sorted(new)], [old[i] for i in sorted(new)])
        again = {row: values[mask].detach() for batch in minibatches[0]  # now with a graph for the gradient
                 for row, values, mask in zip(batch.rows, log_probs(model, batch), batch.mask)}
        few_rows = build(n, 3 * max(map(len, prompts)) + 3 * n)
        found[n] = {"decode": compare(dict(enumerate(sampled[:, :n]))), "again": compare(again),
                    "rows": compare(forward(model, few_rows)), "seconds": took}
        for start in STARTS:
            set_parameters(model, starts[start])
            before = old if start == STARTS[0] else forward(model, minibatches[1:])
            set_parameters(model, moved[start, n])
            after = forward(model, minibatches[1:])
            found[n][start] = log_s([after[i] for i in sorted(after)], [before[i] for i in sorted(after)])
        set_parameters(model, starts[STARTS[0]])
        for batch in sum(minibatches, []):
            batch.ids, batch.mask = (torch.nn.functional.pad(x, (0, 64)) for x in (batch.ids, batch.mask))
        found[n]["padding"] = compare(forward(model, minibatches))
    began = seconds(s.device)
    for batch in build(min(LENGTHS), s.micro_batch_tokens)[0]:
        log_probs(model, batch).sum().backward()
    return found | {"seconds with backward": seconds(s.device) - began}


def outside(values):
    return sum(not 1 - LOW <= torch.tensor(x, dtype=torch.float64).exp() <= 1 + HIGH for x in values) / len(values)


def rounding(found, name, n):
    """What sets a setting's log s after the step apart from float32's: its standard deviation."""
    return statistics.stdev(x - y for x, y in zip(found[name][n][STARTS[0]], found["float32"][n][STARTS[0]]))


def table(found):
    """Markdown: spreads of log s with the share of responses outside the clip range, and times over float32's."""
    lines = ["| setting | tokens | sampler against forward | 64 more pad columns | micro-batches of 3 rows | "
             "same micro-batch, max | after one step | apart from float32's | the step on published weights | "
             "time, forward | with backward |", "|" + "---|" * 11]
    cell = lambda values: f"{statistics.stdev(values):.1e}, {outside(values):.0%} out"
    for name in found:
        for n in map(str, LENGTHS):
            own, reference = found[name][n], found["float32"][n]
            trained = found[name]["seconds with backward"] / found["float32"]["seconds with backward"]
            lines.append(f"| {name} | {n} | " + " | ".join(cell(own[k]) for k in ("decode", "padding", "rows"))
                         + f" | {max(map(abs, own['again'])):.1g} | {cell(own[STARTS[0]])} | "
                         + ("reference" if name == "float32" else f"{rounding(found, name, n):.1e}")
                         + f" | {cell(own[STARTS[1]])} | "
                         + (f"{own['seconds'] / reference['seconds']:.2f} | " if "emulated" not in name else "- | ")
                         + (f"{trained:.2f} |" if n == str(min(LENGTHS)) and "emulated" not in name else "- |"))
    return "\n".join(lines) + "\n"


def draw(found, path):
    """Two panels over length: rounding with the same weights, and after a step, beside the policy's own movement."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for i, name in enumerate(found):
        points = [statistics.stdev(found[name][str(n)]["decode"]) for n in LENGTHS]
        axes[0].plot(LENGTHS, points, marker="o", color=f"C{i}", label=name)
        if name != "float32":
            points = [rounding(found, name, str(n)) for n in LENGTHS]
            axes[1].plot(LENGTHS, points, marker="o", color=f"C{i}", label=f"rounding in {name}")
    points = [statistics.stdev(found["float32"][str(n)][STARTS[0]]) for n in LENGTHS]
    axes[1].plot(LENGTHS, points, color="black", marker="s", label="the policy's own movement")
    for axis, title in zip(axes, ("Same weights: log s between\nthe sampler and the training forward",
                                  "After one optimizer step: log s of the policy itself,\nand what rounding adds")):
        axis.axhline(LOW, linestyle="--", color="gray", label="GSPO's clip range, 3e-4")
        axis.set(xscale="log", yscale="log", xlabel="tokens in a response", title=title)
        axis.set_xticks(LENGTHS, map(str, LENGTHS))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc=(0.02, 0.16))
    axes[0].set_ylabel("spread (standard deviation) of log s")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gsm8k", type=Path, required=True, help="the folder with train.jsonl")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub id or folder")
    parser.add_argument("--settings", nargs="+", help="some of them, by name")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results" / "precision")
    a = parser.parse_args()
    s = train_math.Settings(device=a.device, minibatches=4, group_size=GROUP, micro_batch_tokens=4096)
    unknown = set(a.settings or []) - set(settings(a.device))
    if unknown:
        parser.error(f"--settings: {', '.join(unknown)} is none of {', '.join(settings(a.device))}")
    chosen = {name: settings(a.device)[name] for name in a.settings or settings(a.device)}
    a.output_dir.mkdir(parents=True, exist_ok=True)
    questions = train_math.load_questions(str(a.gsm8k / "train.jsonl"), "train")[:PROMPTS]
    model, tokenizer = train_math.load(a.model, a.device)
    prompts = [train_math.encode_prompt(tokenizer, row["question"]) for row in questions]
    asked = [p for p in prompts for _ in range(GROUP)]
    torch.manual_seed(0)
    advantages = group_advantages(torch.rand(len(asked)), GROUP)
    starts = {STARTS[0]: off_the_grid(model), STARTS[1]: [p.detach().clone() for p in model.parameters()]}
    print("sampling in float32")
    responses, _ = rollout(model, prompts, max(LENGTHS))

    def build(n, micro_batch_tokens):
        cut = [r[:n] for r in responses]
        return train_math.build_minibatches(asked, cut, advantages, replace(s, micro_batch_tokens=micro_batch_tokens))

    print("one step in float32, for each length and start")
    moved = {(start, n): float32_step(model, starts[start], build(n, s.micro_batch_tokens)[0], s)
             for start in tqdm(STARTS) for n in LENGTHS}
    for name, (dtype, setting) in tqdm(chosen.items()):
        with setting():
            found = measure(copy.deepcopy(model).to(dtype), prompts, responses, starts, moved, build, s)
        (a.output_dir / file_name(name)).write_text(json.dumps(found))
    found = {name: json.loads(path.read_text()) for name in settings(a.device)
             if (path := a.output_dir / file_name(name)).exists()}
    if "float32" in found:
        (a.output_dir / "table.md").write_text(table(found))
        draw(found, a.output_dir.parent / "precision.png")
        print(table(found))


if __name__ == "__main__":
    main()
