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
    """A panel a model with its ratios' distances from 1, and one with the spreads."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(
        1, len(models) + 1, figsize=(5 * (len(models) + 1), 4.6), layout="constrained"
    )
    for axis, model in zip(axes, models, strict=False):
        draw_histogram(axis, [row for row in histograms if row["model"] == model])
        axis.set_title(f"{model}, after one epoch", pad=22)
    draw_spreads(axes[-1], models, rows)
    figure.savefig(path, dpi=110)


def draw_histogram(axis, histograms):
    kinds = (
        ("tokens", "tab:orange", GRPO, "GRPO's clip range"),
        ("responses", "tab:blue", GSPO, "GSPO's"),
    )
    for name, colour, (low, high), title in kinds:
        counts = torch.tensor([row[name] for row in histograms]).sum(dim=0)
        axis.stairs(
            counts / counts.sum(),
            BINS,
            fill=True,
            alpha=0.5,
            color=colour,
            label=f"{int(counts.sum()):,} {name}",
        )
        axis.axvspan(-math.log1p(-low), math.log1p(high), color=colour, alpha=0.8)
        axis.annotate(
            title,
            (math.log1p(high), 1.01),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            color=colour,
        )
    axis.set(xscale="log", xlabel="distance from 1: |log ratio|", ylabel="share")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def draw_spreads(axis, models, rows):
    spreads = {
        "token_std": ("one token", "tab:orange"),
        "log_s_std": ("log s", "tab:blue"),
        "log_sum_std": ("sum: log s without the root", "tab:red"),
    }
    for model, line in zip(models, ("--", "-"), strict=False):
        own = [row for row in rows if row["model"] == model]
        lengths = sorted({row["length"] for row in own})
        for name in spreads:
            values = [[row[name] for row in own if row["length"] == n] for n in lengths]
            axis.plot(
                lengths, [sum(v) / len(v) for v in values], line, marker=".", color=spreads[name][1]
            )
        axis.plot([], [], line, color="black", label=model)
    for name, (label, colour) in spreads.items():
        last = [row[name] for row in rows if row["length"] == max(LENGTHS)]
        if last:
            above = 0.55 if name == "log_s_std" else 1.5
            axis.annotate(
                label, (max(LENGTHS), above * sum(last) / len(last)), ha="right", color=colour
            )
    axis.axhspan(*GSPO, color="gray", alpha=0.6)
    axis.annotate("GSPO's clip range", (min(LENGTHS), 1.5 * GSPO[1]), color="gray")
    axis.set(
        xscale="log",
        yscale="log",
        title="spread of the log-ratio by length",
        xlabel="tokens of the response",
        ylabel="standard deviation",
        ylim=(1e-4, 10),
    )
    axis.set_xticks(LENGTHS, map(str, LENGTHS))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


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
