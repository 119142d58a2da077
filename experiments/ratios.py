"""Token ratios and sequence ratios, side by side: how far they spread, and what each clip range takes out.

    python experiments/rivals.py ratios                                            # the tiny long task
    python experiments/rivals.py ratios --model FOLDER_OR_HUB_ID --gsm8k FOLDER    # and real weights: 15 minutes

One rollout and its optimizer steps by train_math.train, one for each of four minibatches in which a group's
rewards differ; then the ratios between the policy that sampled and the policy after, of all responses with a
gradient, as the next epoch would meet them, cut to their first 8, 32, 128, 512 tokens. The tiny model is
rivals.py's long task at its learning rate, 3e-4, from three cold starts; the real one SmolLM2-135M-Instruct
on GSM8K's questions at 1e-6 in float32, three seeds: 4 prompts x 4 responses of 512 tokens (no end token),
rewarded for an odd number of letters e, so that there is something to learn. Seconds, once rivals.py's cold
starts are there (two minutes each). ratios.jsonl has a line for each model, seed and length."""
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import torch

import train_math
from experiments.gsm8k import INSTRUCTION
from experiments.plot import read
from gspo import clip_fraction, sequence_ratio

LENGTHS, GSPO, GRPO = (8, 32, 128, 512), (3e-4, 4e-4), (0.2, 0.27)
BINS = [10 ** (k / 8) for k in range(-56, 5)]


def after_one_rollout(model, tokenizer, questions, cfg, **pieces):
    """[(log_probs, old_log_probs, advantage)] of the responses, each (tokens,), after all updates
    on their rollout."""
    batches = []

    def build_minibatches(*arguments):
        minibatches = train_math.build_minibatches(*arguments)
        batches.extend(itertools.chain(*minibatches))
        return minibatches

    cfg = replace(cfg, max_steps=1, output_dir=None)
    train_math.train(cfg, model, tokenizer, questions, build_minibatches=build_minibatches,
                     **pieces)
    responses = []
    for batch in batches:
        with torch.no_grad():
            now = train_math.response_log_probs(model, batch, cfg.temperature)
        for i, mask in enumerate(batch.mask):
            old = batch.old_log_probs[i]
            responses.append((now[i][mask], old[mask], batch.advantages[i]))
    return responses


def measure(responses, length):
    """Spreads and clip fractions of the responses' first `length` tokens; None if not half of them are that
    long."""
    long = [(now[:length], old[:length], a) for now, old, a in responses if len(now) >= length]
    if len(long) < len(responses) / 2:
        return None
    now, old, advantages = (torch.stack(x) for x in zip(*long))
    log_ratio, mask = (now - old).double(), torch.ones_like(now)
    s = sequence_ratio(now.double(), old.double(), mask)
    return {"length": length, "responses": len(long), "token_std": log_ratio.std().item(),
            "log_s_std": log_ratio.mean(dim=1).std().item(), "log_sum_std": log_ratio.sum(dim=1).std().item(),
            "clipped_gspo": clip_fraction(s, advantages, mask, *GSPO).item(),
            "clipped_grpo": clip_fraction(log_ratio.exp(), advantages, mask, *GRPO).item(),
            "clipped_grpo_at_gspos": clip_fraction(log_ratio.exp(), advantages, mask, *GSPO).item()}


def odd_number_of_e(prompts, completions, **columns):
    return [float(completion.count("e") % 2) for completion in completions]


def endless_rollout(*arguments):
    """train_math's, without an end token."""
    *arguments, _ = arguments
    return train_math.rollout(*arguments, torch.tensor([], dtype=torch.long))


def real_weights(name, gsm8k, seed):
    cfg = train_math.Settings(
        device="cpu", seed=seed, prompts_per_step=4, group_size=4, minibatches=4,
        micro_batch_tokens=4096, max_completion_length=512, learning_rate=1e-6, eps_low=GSPO[0],
        eps_high=GSPO[1], instruction=INSTRUCTION, dataset=str(Path(gsm8k) / "train.jsonl"))
    model, tokenizer = train_math.load(name, cfg.device)
    questions, _ = train_math.load_questions(cfg)
    return after_one_rollout(model, tokenizer, questions[:500], cfg, reward=odd_number_of_e,
                             rollout=endless_rollout)


def histogram(responses):
    """Counts of all tokens' and all responses' |log ratio| in BINS; the first bin takes what is smaller, the
    last what is larger."""
    log_ratios = [(now - old).double() for now, old, _ in responses]
    values = {"tokens": torch.cat(log_ratios), "responses": torch.stack([x.mean() for x in log_ratios])}
    edges = torch.tensor(BINS, dtype=torch.float64)
    return {name: torch.histogram(x.abs().clamp(BINS[0], BINS[-1]), edges)[0].tolist() for name, x in values.items()}


def draw(rows, histograms, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(models) + 1, figsize=(5 * (len(models) + 1), 4.4), layout="constrained")
    kinds = (("tokens", "tab:orange", GRPO, "GRPO"), ("responses", "tab:blue", GSPO, "GSPO"))
    for axis, model in zip(axes, models):
        for name, colour, clip, algorithm in kinds:
            counts = torch.tensor([row[name] for row in histograms if row["model"] == model]).sum(dim=0)
            axis.stairs(counts / counts.sum(), BINS, fill=True, alpha=0.5, color=colour,
                        label=f"ratios of {int(counts.sum()):,} {name}")
            label = f"{algorithm}'s clip range, {clip[0]:g} below 1, {clip[1]:g} above"
            axis.axvline(-math.log1p(-clip[0]), color=colour, linestyle="--", label=label)
            axis.axvline(math.log1p(clip[1]), color=colour, linestyle="--")
        axis.set(xscale="log", title=f"{model}, after one epoch",
                 xlabel="distance from 1: |log ratio|", ylabel="share", ylim=(0, 1.4 * axis.get_ylim()[1]))
        axis.legend(fontsize=7, loc="upper left")
    styles = {"token_std": ("one token", "tab:orange"), "log_s_std": ("log s, the tokens' mean", "tab:blue"),
              "log_sum_std": ("the tokens' sum: no root", "tab:red")}
    for model, line in zip(models, ("--", "-")):
        for name, (label, colour) in styles.items():
            own = [row for row in rows if row["model"] == model]
            lengths = sorted({row["length"] for row in own})
            values = [[row[name] for row in own if row["length"] == n] for n in lengths]
            axes[-1].plot(lengths, [sum(v) / len(v) for v in values], line, marker=".", color=colour,
                          label=f"{label}, {model}")
    axes[-1].set(xscale="log", yscale="log", title="spread of the log-ratio by length",
                 xlabel="tokens of the response", ylabel="standard deviation")
    axes[-1].set_xticks(LENGTHS, map(str, LENGTHS))
    axes[-1].minorticks_off()
    axes[-1].grid(alpha=0.3)
    axes[-1].axhspan(*GSPO, color="gray", alpha=0.6, label="GSPO's clip range")
    axes[-1].set_ylim(2e-7, 8)
    axes[-1].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=110)


def table(rows):
    lines = ["| model | tokens | spread of a token's log-ratio | of log s | of the sum "
             "| clipped by GSPO 3e-4, 4e-4 | by GRPO .2, .27 | by GRPO at GSPO's range |",
             "|---|---|---|---|---|---|---|---|"]
    for model, length in dict.fromkeys((row["model"], row["length"]) for row in rows):
        own = [row for row in rows if (row["model"], row["length"]) == (model, length)]
        spreads = [" ".join(f"{row[name]:.1e}" for row in own)
                   for name in ("token_std", "log_s_std", "log_sum_std")]
        clipped = [" ".join(f"{row[name]:.2%}" for row in own)
                   for name in ("clipped_gspo", "clipped_grpo", "clipped_grpo_at_gspos")]
        lines.append(f"| {model} | {length} | {' | '.join(spreads + clipped)} |")
    return "\n".join(lines) + "\n"


def main(results, tiny_runs, model=None, gsm8k=None):
    """tiny_runs: (seed, responses) of the tiny model, one after the other. Real weights are measured if they
    are given, and otherwise shown as they were last time."""
    path = results / "ratios.jsonl"
    before = [row for row in read(path) if row["model"] != "tiny" and not model]
    rows = []
    runs = (("tiny", *run) for run in tiny_runs)
    if model:
        real = ((Path(model).name, seed, real_weights(model, gsm8k, seed)) for seed in range(3))
        runs = itertools.chain(runs, real)
    for name, seed, responses in runs:
        row = {"model": name, "seed": seed}
        rows += [{**row, **m} for n in LENGTHS if (m := measure(responses, n))]
        rows.append({**row, **histogram(responses)})
    rows += before
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    by_length = [row for row in rows if "length" in row]
    (results / "ratios.md").write_text(table(by_length), encoding="utf-8")
    draw(by_length, [row for row in rows if "length" not in row], results / "ratios.png")
    print(table(by_length))
