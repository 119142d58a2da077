"""The importance ratios of tokens and of responses: how much they vary, and how many are clipped.

    python -m experiments.tiny.ratios                                           the tiny model
    python -m experiments.tiny.ratios --model FOLDER_OR_HUB_ID --gsm8k FOLDER   and a real model

train_math.train makes one rollout and its optimizer steps, one for each of four minibatches. Then
the importance ratios of the policy after these updates to the policy that sampled are measured. A
second epoch would start with these ratios. They are measured for all responses with a gradient, cut
to their first 8, 32, 128 and 512 tokens.

The tiny model is trained on the long task of comparisons/parts.py at its learning rate, 3e-4, from
three starting models. The real model is SmolLM2-135M-Instruct on questions of GSM8K, at a learning
rate of 1e-6 in float32, with three seeds. This takes 15 minutes. 4 prompts x 4 responses of 512
tokens without an end token are sampled. The reward is 1 for an odd number of letters e, so that
rewards differ. results/tiny/ratios.jsonl has a line for each model, seed and length.
"""
import argparse
import itertools
import math
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

import train_math
from common.logs import read, write
from common.plot import STYLES
from experiments.comparisons import parts, runs
from experiments.comparisons.settings import settings_of
from experiments.qwen.gsm8k import INSTRUCTION
from gspo import clip_fraction, sequence_ratio

RESULTS = Path(__file__).parents[1] / "results" / "tiny"
LENGTHS = 8, 32, 128, 512
GSPO = 3e-4, 4e-4
GRPO = 0.2, 0.27
BLUE, ORANGE, GREEN = STYLES["gspo"][0], STYLES["grpo"][0], "#009E73"
BINS = [10 ** (k / 8) for k in range(-56, 5)]
NAMES = {"tiny": "tiny model"}  # of the models, in the picture
TITLE = ("After one epoch, most responses lie outside GSPO's clip range, and nearly all tokens lie "
         "inside GRPO's")
COLUMNS = {
    "token_std": "spread of a token's log-ratio",
    "log_s_std": "of log s",
    "log_sum_std": "of the sum",
    "clipped_gspo": "clipped by GSPO 3e-4, 4e-4",
    "clipped_grpo": "by GRPO .2, .27",
    "clipped_grpo_at_gspos": "by GRPO at GSPO's range",
}


def after_one_rollout(model, tokenizer, questions, cfg, **pieces):
    """[(log_probs, old_log_probs, advantage)] of the responses after all updates on their rollout.
    Both log-probs are (tokens,)."""
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
    """Standard deviations and clip fractions of the responses' first `length` tokens, or None if
    less than half of the responses are that long."""
    long = [(now[:length], old[:length], a) for now, old, a in responses if len(now) >= length]
    if len(long) < len(responses) / 2:
        return None
    now, old, advantages = map(torch.stack, zip(*long))
    mask = torch.ones_like(now)
    log_ratio = (now - old).double()
    ratio = log_ratio.exp()
    s = sequence_ratio(now.double(), old.double(), mask)

    def clipped(ratio, clip_range):
        return clip_fraction(ratio, advantages, mask, *clip_range).item()

    return {
        "length": length,
        "responses": len(long),
        "token_std": log_ratio.std().item(),
        "log_s_std": log_ratio.mean(dim=1).std().item(),
        "log_sum_std": log_ratio.sum(dim=1).std().item(),
        "clipped_gspo": clipped(s, GSPO),
        "clipped_grpo": clipped(ratio, GRPO),
        "clipped_grpo_at_gspos": clipped(ratio, GSPO),
    }


def odd_number_of_e(prompts, completions, **columns):
    return [float(completion.count("e") % 2) for completion in completions]


def endless_rollout(*arguments):
    """train_math.rollout without an end token."""
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
    """Counts of |log ratio| in BINS, for all tokens and for all responses. Values outside of the
    bins are counted in the first and the last bin."""
    log_ratios = [(now - old).double() for now, old, _ in responses]
    means = [log_ratio.mean() for log_ratio in log_ratios]
    return {"tokens": counts(torch.cat(log_ratios)), "responses": counts(torch.stack(means))}


def counts(log_ratios):
    edges = torch.tensor(BINS, dtype=torch.float64)
    inside = log_ratios.abs().clamp(BINS[0], BINS[-1])
    return torch.histogram(inside, edges).hist.tolist()


def draw(rows, histograms, path, title=""):
    """A panel per model with the distances of its ratios from 1, and one with the standard
    deviations."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    panels = len(models) + 1
    figure = Figure((5 * panels, 4.6), layout="constrained")
    axes = figure.subplots(1, panels)
    for axis, model in zip(axes, models):
        own = [row for row in histograms if row["model"] == model]
        draw_histogram(axis, "tokens", own, ORANGE, GRPO, "GRPO's clip range")
        draw_histogram(axis, "responses", own, BLUE, GSPO, "GSPO's clip range")
        axis.set_title(f"{NAMES.get(model, model)}, after one epoch", pad=22)
        axis.set(xscale="log", xlabel="distance of the ratio from 1: |log ratio| (log scale)",
                 ylabel="tokens or responses (%)")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    draw_spreads(axes[-1], models, rows)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def draw_histogram(axis, name, histograms, colour, clip_range, title):
    counted = torch.tensor([row[name] for row in histograms]).sum(dim=0)
    total = counted.sum()
    look = {"color": colour, "alpha": 0.5, "fill": True}
    if name == "responses":  # an outline and hatches, so that the two differ in grey, too
        look = {"edgecolor": colour, "facecolor": "none", "hatch": "///", "fill": True,
                "linewidth": 1.2}
    axis.stairs(100 * counted / total, BINS, label=f"{int(total):,} {name}", **look)
    low, high = clip_range
    axis.axvspan(-math.log1p(-low), math.log1p(high), color=colour, alpha=0.8)
    axis.annotate(title, (math.log1p(high), 1.01), xycoords=("data", "axes fraction"),
                  ha="center", va="bottom", color=colour)


def draw_spreads(axis, models, rows):
    for model, style in zip(models, ("--", "-")):
        axis.plot([], [], style, color="black", label=NAMES.get(model, model))
    for name, label, colour, marker, above in (
        ("token_std", "log-ratio of a token", ORANGE, "s", 1.5),
        ("log_s_std", "log s", BLUE, "o", 0.55),
        ("log_sum_std", "sum: log s without the root", GREEN, "^", 1.5),
    ):
        for model, style in zip(models, ("--", "-")):
            own = mean_by_length(name, [row for row in rows if row["model"] == model])
            axis.plot(list(own), list(own.values()), style, marker=marker, markersize=4,
                      color=colour)
        last = mean_by_length(name, rows).get(max(LENGTHS))
        if last:
            axis.annotate(label, (max(LENGTHS), above * last), ha="right", color=colour)
    axis.axhspan(*GSPO, color="gray", alpha=0.6)
    axis.annotate("GSPO's clip range", (min(LENGTHS), 1.5 * GSPO[1]), color="gray")
    axis.set(
        xscale="log",
        yscale="log",
        title="standard deviation of log-ratios by length",
        xlabel="first tokens of the response (log scale)",
        ylabel="standard deviation (log scale)",
        ylim=(1e-4, 10),
    )
    axis.set_xticks(LENGTHS, map(str, LENGTHS))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def mean_by_length(name, rows):
    values = {}
    for row in rows:
        values.setdefault(row["length"], []).append(row[name])
    return {length: sum(values[length]) / len(values[length]) for length in sorted(values)}


def table(rows):
    """Markdown: a line per model and length, with the value of each run. Histograms are skipped."""
    rows = [row for row in rows if "length" in row]
    lines = [
        f"| model | tokens | {' | '.join(COLUMNS.values())} |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    groups = {}
    for row in rows:
        groups.setdefault((row["model"], row["length"]), []).append(row)
    for (model, length), own in groups.items():
        cells = []
        for name in COLUMNS:
            form = ".2%" if name.startswith("clipped") else ".1e"
            cells.append(" ".join(format(row[name], form) for row in own))
        lines.append(f"| {model} | {length} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tiny_run(cold):
    """(seed, the responses of one rollout on the long task after its updates) of the tiny model."""
    runs.cold_start("long", cold)
    cfg = replace(settings_of("long"), seed=100 * cold, epochs=1, eps_low=0.003, eps_high=0.004)
    model, tokenizer = train_math.load(runs.cold_folder("long", cold), "cpu")
    questions = parts.long_questions(cfg.seed, cfg.prompts_per_step)
    return cfg.seed, after_one_rollout(model, tokenizer, questions, cfg)


def rows_of(model, seed, responses):
    """The rows of one run for ratios.jsonl: the measures at each length, and the histogram."""
    found = [measure(responses, length) for length in LENGTHS]
    found = [row for row in found if row] + [histogram(responses)]
    return [{"model": model, "seed": seed, **row} for row in found]


def report(results, tiny_runs, model=None, gsm8k=None):
    """tiny_runs: an iterable of (seed, responses) of the tiny model. A real model is measured if it
    is given. Otherwise its earlier rows are kept."""
    path = results / "ratios.jsonl"
    rows = []
    for seed, responses in tiny_runs:
        rows += rows_of("tiny", seed, responses)
    if model:
        for seed in range(3):
            rows += rows_of(Path(model).name, seed, real_weights(model, gsm8k, seed))
    else:
        rows += [row for row in read(path) if row["model"] != "tiny"]
    write(path, rows)
    by_length = [row for row in rows if "length" in row]
    histograms = [row for row in rows if "length" not in row]
    text = table(rows)
    (results / "ratios.md").write_text(text, encoding="utf-8")
    draw(by_length, histograms, results / "ratios.png", TITLE)
    print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--colds", type=int, default=3, help="number of starting models")
    parser.add_argument("--model", help="hub id or folder of a real model")
    parser.add_argument("--gsm8k", help="the folder with GSM8K's train.jsonl")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the log and table")
    args = parser.parse_args()
    if args.colds < 1:
        parser.error("--colds must be at least 1")
    if (args.model is None) != (args.gsm8k is None):
        parser.error("--model and --gsm8k must be given together")
    torch.set_num_threads(1)
    for folder in (args.results, runs.COLD):
        folder.mkdir(parents=True, exist_ok=True)
    tiny_runs = tqdm(map(tiny_run, range(args.colds)), "rollouts", args.colds)
    report(args.results, tiny_runs, args.model, args.gsm8k)


if __name__ == "__main__":
    main()
