"""What a step of train_math.py should cost on a GPU: an ESTIMATE (a roofline), nothing measured.

    python experiments/gpu_plan.py > experiments/results/gpu_plan.md
    python experiments/gpu_plan.py --model Qwen/Qwen3-0.6B --rollout_rows 64

Each phase takes its arithmetic over a rate plus its bytes over a bandwidth, and never less than it takes to launch
its kernels. Beside each number stands where it comes from. Counted: from the code, by hooks and at torch's
dispatcher, on a CPU. Data sheet: the maker's. Assumed: a guess. experiments/on_gpu.py measures the same step."""
import argparse
import math
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_math import Settings

# GiB that torch can have (assumed); GB/s, TFLOP/s in float32 and in half, that is bfloat16 or, on the T4, float16,
# with sums in float32 (data sheet); the reached shares of these TFLOP/s and GB/s (assumed); the CPU's seconds to
# launch a kernel (assumed).
GPUS = {"T4 16GB": (14.6, 320, (8.1, 65), (0.55, 0.40), 0.78, 14e-6),
        "3090 24GB": (23.3, 936, (35.6, 71), (0.65, 0.70), 0.85, 9e-6),
        "4090 24GB": (23.2, 1008, (82.6, 165), (0.65, 0.70), 0.85, 8e-6),
        "A100 40GB": (39.0, 1555, (19.5, 312), (0.90, 0.60), 0.85, 10e-6),
        "A100 80GB": (78.8, 2039, (19.5, 312), (0.90, 0.60), 0.85, 10e-6),
        "H100 80GB": (78.8, 3350, (67, 989), (0.72, 0.45), 0.85, 9e-6),
        "H200 141GB": (138.0, 4800, (67, 989), (0.72, 0.45), 0.88, 9e-6)}

# Layers, hidden size, intermediate size, heads, key-value heads, head size (config.json); KiB that the backward
# needs a token and layer, in rows of 600, with the math kernel of attention and with a fused one (counted);
# kernels of a decode step, a forward, a backward (counted).
MODELS = {"Qwen/Qwen2.5-0.5B-Instruct": (24, 896, 4864, 14, 2, 64, (144, 105), (1080, 849, 1714)),
          "Qwen/Qwen3-0.6B": (28, 1024, 3072, 16, 8, 128, (166, 120), (1580, 1321, 2694)),
          "Qwen/Qwen3-1.7B": (28, 2048, 6144, 16, 8, 128, (238, 192), (1580, 1321, 2694))}
VOCABULARY = 151936

# What train_math.py, with transformers, does today (counted).
CODE = SimpleNamespace(
    cache_copied=True,      # torch.cat copies the whole cache at each token, and so does dropping a row that ended
    waits_at_an_end=0,      # of the CPU for the GPU when a row ends, beside two a token
    math_attention=True,    # in float32, where heads share keys and values: all attention scores are in memory
    logits_at_once=2**24)   # of the head's chunks in the update
WAIT = 12e-6                # seconds (assumed)

# The work (assumed): tokens of a prompt and of the longest one; the share of responses in groups with a gradient;
# what padding makes of them; micro-batches, over as many full ones; bytes of CUDA itself.
PROMPT, LONGEST, KEPT, PADDING, PARTLY_FULL, CONTEXT = 110, 170, 0.7, 1.06, 1.15, 0.5e9


def estimate(gpu, half, s, mean_length):
    """Seconds of the rollout, the old log-probs and the update, GiB of the update and of the rollout."""
    _, bandwidth, peaks, shares, share, launch = GPUS[gpu]
    layers, hidden, middle, heads, kv_heads, size, kept_kib, (decode, forward, backward) = MODELS[s.model]
    rate, bandwidth = peaks[half] * shares[half] * 1e12, bandwidth * share * 1e9
    math_attention = CODE.math_attention and not half
    trunk = layers * (hidden * size * (heads + 2 * kv_heads) + heads * size * hidden + 3 * hidden * middle)
    head = VOCABULARY * hidden
    parameters, rows = trunk + head, s.prompts_per_step * s.group_size
    # The share of responses longer than t: a gamma distribution, its spread half its mean (assumed).
    lengths = [4 * t / mean_length for t in range(s.max_completion_length)]
    going = [math.exp(-x) * (1 + x + x * x / 2 + x**3 / 6) for x in lengths]
    length = sum(going)

    # Rollout: each token reads all weights and the cache.
    parts = math.ceil(rows / s.rollout_rows)
    at_once = rows / parts
    cache_bytes = layers * kv_heads * size * 2 * 4  # a token's keys and values, float32 in autocast, too (counted)
    weight_bytes = parameters * (8 if half else 4)  # autocast reads float32, writes and reads half (counted)
    rollout = 2 * parameters * s.prompts_per_step / parts * LONGEST / rate  # the prompts, each read once
    for t, share_going in enumerate(going):
        n, width = max(1, at_once * share_going), LONGEST + t
        ends = min(1.0, at_once * (share_going - (going[t + 1] if t + 1 < len(going) else 0)))
        cache = n * width * cache_bytes
        moved = cache * (3 + 2 * ends if CODE.cache_copied else 1) + weight_bytes
        moved += n * VOCABULARY * 4 * 9  # softmax, cumsum and search go over the logits nine times (counted)
        arithmetic = 2 * parameters * n + 4 * n * width * heads * size * layers
        launches = (decode + 15 + ends * (2 * layers + 5)) * launch + (2 + ends * CODE.waits_at_an_end) * WAIT
        rollout += max(arithmetic / rate + moved / bandwidth, launches)
        if share_going * at_once < 0.5:
            break

    # Old log-probs: a forward over the responses that have a gradient, with their prompts; the head on responses.
    answers, tokens = rows * length * KEPT, rows * (PROMPT + length) * KEPT * PADDING
    micro_batches = max(1, tokens / s.micro_batch_tokens * PARTLY_FULL)
    arithmetic = 2 * trunk * tokens + 4 * tokens * (PROMPT + length) * heads * size * layers + 2 * head * answers
    moved = tokens * layers * 2.4 * kept_kib[1] * 1024 + answers * VOCABULARY * 4 * 7  # 2.4 (assumed), 7 (counted)
    if math_attention:
        moved += tokens * layers * heads * (PROMPT + length) * 4 * 8  # eight times over the scores (counted)
    launches = micro_batches * (forward + 60) * launch
    old = max(arithmetic / rate + moved / bandwidth, launches)

    # Update: three times that, the head's forward once more (checkpoint), and AdamW.
    launches += (micro_batches * backward + s.minibatches * 900) * launch
    update = max((3 * arithmetic + 2 * head * answers) / rate + 3.2 * moved / bandwidth, launches)
    update += s.minibatches * 4 * parameters * 4 * 1.6 / bandwidth

    # Memory. Update: weights, gradients and two moments, what the backward needs (in autocast .7 of it, assumed),
    # five tensors of logits, the largest passing tensors, half copies. Rollout: no gradients, but the cache.
    needed = kept_kib[not math_attention] * 1024 * layers * s.micro_batch_tokens * (0.7 if half else 1)
    passing = (3 * heads * 600 if math_attention else 6 * middle) * s.micro_batch_tokens * 4
    in_update = 16 * parameters + needed + CODE.logits_at_once * 4 * 5 + passing + CONTEXT + 2 * trunk * half
    cache = at_once * max(share_going * (LONGEST + t) for t, share_going in enumerate(going)) * cache_bytes
    in_rollout = (12 + 2 * half) * parameters + cache * (1 + 2 / layers) + at_once * VOCABULARY * 4 * 5 + CONTEXT
    return rollout * parts, old, update, in_update / 2**30, in_rollout / 2**30


def row(gpu, half, a, **changes):
    """A line of the table; `changes`: other settings than a's."""
    s = Settings(**{name: getattr(a, name) for name in FLAGS} | changes)
    rollout, old, update, *memory = estimate(gpu, half, s, a.mean_length)
    flags = [f"--{name} {value}" for name, value in vars(s).items() if value != getattr(Settings, name)]
    typed = "no flag for it" if half else f"`{' '.join(['python train_math.py', *flags])}`"
    there, seconds = GPUS[gpu][0], rollout + old + update
    fits = "yes" if max(memory) < 0.95 * there else "hardly" if max(memory) < there else "no"
    return (f"| {gpu} | {'half' if half else 'float32'} | {typed} | {max(memory):.1f} | {fits} | {rollout:.1f} "
            f"+ {old:.1f} + {update:.1f} | {seconds:.1f} | {s.max_steps} | {seconds * s.max_steps / 3600:.1f} |")


FLAGS = "model", "prompts_per_step", "max_completion_length", "micro_batch_tokens", "rollout_rows"
HEAD = """# A step of train_math.py on a GPU: an estimate, nothing measured

{model}, responses of {mean_length:g} tokens in the mean before any is cut at {max_completion_length}. Made by
`experiments/gpu_plan.py`, which names its assumptions; it may well be wrong by a factor of two. The phases of a
step are the rollout, the old log-probs and the update.

| GPU | computes in | what to type | GiB | fits | seconds: rollout + old + update | a step | steps | hours |
|---|---|---|---|---|---|---|---|---|"""
FOOT = """
Hours are those of the steps. An evaluation (512 questions, each 25 steps) adds about two rollouts. float32 is what
the script computes in. Half is autocast, which experiments/on_gpu.py measures and the script has no flag for:
rounding would decide what the clip does (experiments/precision.py). Where it does not fit, a lower
--micro_batch_tokens (the update) or --rollout_rows (the rollout) takes less memory."""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in FLAGS:
        kind, choices = Settings.__dataclass_fields__[name].type, MODELS if name == "model" else None
        parser.add_argument(f"--{name}", type=kind, choices=choices, default=getattr(Settings, name),
                            help=Settings.__dataclass_fields__[name].metadata["help"])
    parser.add_argument("--mean_length", type=float, default=220, help="tokens of a response, before any is cut")
    a = parser.parse_args()
    print(HEAD.format(**vars(a)))
    for gpu in GPUS:
        for half in (False, True):
            print(row(gpu, half, a))
        if gpu == "T4 16GB":  # the one that is lent for free, for some hours
            print(row(gpu, False, a, prompts_per_step=16, max_completion_length=256, max_steps=100))
    print(FOOT)
