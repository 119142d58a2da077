"""How much of log s is rounding? Four settings of precision are compared on a real model.

    OMP_NUM_THREADS=1 python -m evidence.rounding --dataset GSM8K/train.jsonl [--model MODEL]

16 responses of 512 tokens to four questions of this file are sampled in float32. In each
setting, their log-probs are computed by the training forward and by the sampler (token by token
with a KV cache). Four responses make one optimizer step of GSPO in float32 (learning rate 1e-6,
random rewards), and log s of the other twelve is measured. The published weights are bfloat16
numbers, to which a small step of a float32 copy rounds back. In the middle of a training run, this
does not hold. Therefore the weights are first moved "off the grid", by up to half the distance to
the next bfloat16 number. The published log has more measurements, of an earlier version.
"""
import argparse
import copy
import itertools
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache

import train_math
from gspo import group_advantages, gspo_loss
from support.models import load
from support.sampling import generate
from support.task import load_questions
from tools.logs import make_writable, write
from tools.warm_up import given_rollout

INSTRUCTION = "Reason step by step, then write the final answer, a number, after '####'."
LOG = Path("runs/rounding.jsonl")
LENGTHS = 32, 128, 512
PROMPTS = GROUP = 4
LOW, HIGH = 3e-4, 4e-4
STEP = "off the grid"  # the name of log s after one optimizer step in the log
SETTINGS = {  # name: (the dtype of the weights, that of autocast, or None)
    "float32": (torch.float32, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "bf16 weights": (torch.bfloat16, None),
    "float16 autocast": (torch.float32, torch.float16)}


def log_s(new, old):
    """log s of each response that `new` has. new, old: {row: log-probs (n,)}."""
    return [(new[i].double() - old[i].double()).mean().item() for i in sorted(new)]


@torch.no_grad()
def forward(model, minibatches):
    """{row: log-probs of its response (n,)}, by the training forward."""
    found = {}
    for batch in itertools.chain(*minibatches):
        values = train_math.response_log_probs(model, batch, 1.0)
        found |= {row: own[mask] for row, own, mask in zip(batch.indices, values, batch.mask)}
    return found


@torch.no_grad()
def decode(model, prompts, responses):
    """The log-probs (B, T) of given responses, token by token with a KV cache."""
    found = []
    for i, prompt in enumerate(prompts):
        given = torch.tensor(responses[i * GROUP:][:GROUP])
        ids = torch.tensor([prompt] * GROUP)
        cache = DynamicCache(config=model.config)
        own = []
        for token in given.T[..., None]:
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


def float32_step(model, start, minibatch):
    """The parameters after one optimizer step of GSPO from `start`, in float32."""
    set_parameters(model, start)
    for batch in minibatch:
        new = train_math.response_log_probs(model, batch, 1.0)
        loss = gspo_loss(new, new, batch.advantages, batch.mask, LOW, HIGH, denominator=GROUP)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0).step()
    model.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def measure(model, sampled, start, moved, minibatches):
    """{name of a measurement: log s of each response}. moved: the parameters after the step."""
    old = forward(model, minibatches)
    set_parameters(model, moved)
    new = forward(model, minibatches[1:])
    set_parameters(model, start)
    return {"decode": log_s(dict(enumerate(sampled)), old), STEP: log_s(new, old)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", required=True, help="file with GSM8K's questions")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    make_writable(LOG)
    cfg = train_math.Settings(device="cpu", minibatches=4, group_size=GROUP,
                              micro_batch_tokens=4096, instruction=INSTRUCTION, eval_size=0,
                              dataset=args.dataset)
    questions = load_questions(cfg)[0][:PROMPTS]
    model, tokenizer = load(args.model, cfg.device)
    prompts = train_math.encode_prompts(tokenizer, questions, cfg)
    torch.manual_seed(0)
    advantages = group_advantages(torch.rand(PROMPTS * GROUP), GROUP)
    start = off_the_grid(model)
    no_ends = torch.tensor([], dtype=torch.long)
    responses, _ = generate(model, prompts, GROUP, max(LENGTHS), 1.0, no_ends)
    asked = [prompt for prompt in prompts for _ in range(GROUP)]

    def minibatches_of(n):
        rollout = given_rollout(asked, [response[:n] for response in responses])
        return train_math.build_minibatches(rollout, advantages, cfg)

    moved = {n: float32_step(model, start, minibatches_of(n)[0]) for n in LENGTHS}
    rows = []
    for name, (dtype, cast) in tqdm(SETTINGS.items()):
        # The cache would keep the weights from before the step.
        with torch.autocast("cpu", cast, enabled=cast is not None, cache_enabled=False):
            own = copy.deepcopy(model).to(dtype)
            set_parameters(own, start)
            sampled = decode(own, prompts, responses)
            found = {str(n): measure(own, sampled[:, :n], start, moved[n], minibatches_of(n))
                     for n in LENGTHS}
        rows.append({"setting": name, **found})
    write(LOG, rows)


if __name__ == "__main__":
    main()
