"""Writes the explorer: a page on which one moves ratios and watches a rollout being clipped.

    python -m lesson.explorer              writes lesson/explorer.html and its still (seconds)
    python -m lesson.explorer --record     makes the three runs and their log first (minutes)

The page is explorer_template.html with numbers from gspo.py and from the log of three runs on the
small world, with the seed and settings of `python -m lesson.tiny`. The first three steps are
GSPO's. From step 4 on, one run goes on with GSPO, one without its clip, and one with GRPO. So all
have the same 256 responses in step 4, which the page shows. After each of its 32 updates, the log
has log s of each response and whether it is clipped, and at some moments each token's log-ratio.
"""
import argparse
import base64
import itertools
import json
import math
import zlib
from pathlib import Path

import torch
from matplotlib.figure import Figure

import gspo
import train_math
from lesson.tiny import FLAGS, RANGES, world
from tools.plot import STYLES

HERE = Path(__file__).parent
LOG = HERE / "results" / "explorer.json"
STILL = HERE / "results" / "rollout.png"
TEMPLATE = HERE / "explorer_template.html"
PAGE = HERE / "explorer.html"
STEP = 4  # the step that is shown
UPDATES = 32
MOMENTS = [1, 8, 16, 32]  # updates after which the log has each token's log-ratio
RUNS = {  # the settings from STEP on: algorithm, eps_low, eps_high
    "grpo": ("grpo", *map(float, RANGES["grpo"][1::2])),
    "gspo": ("gspo", *map(float, RANGES["gspo"][1::2])),
    "none": ("gspo", 1.0, 1e9),
}
CLIP_RANGES = {"GRPO": (0.2, 0.27), "GSPO": (3e-4, 4e-4), "GSPO in panel 3": RUNS["gspo"][1:]}
PRESETS = {  # the probabilities before and now, and what to look at
    "Nothing moved": ([0.25] * 4, [0.25] * 4,
                      "All ratios are 1: the model is still the one that sampled."),
    "Pencil example": ([0.25] * 4, [0.5, 0.25, 0.25, 0.25], "The first token doubles."),
    "One of eight doubles": ([0.4] * 8, [0.8] + [0.4] * 7, "In a longer response, s moves less."),
    "All rise by 1%": ([0.5] * 8, [0.505] * 8, "No token moves much, but all move together."),
    "Noise": ([0.6, 0.3, 0.8, 0.4, 0.5, 0.2, 0.7, 0.5],
              [0.66, 0.23, 0.795, 0.535, 0.445, 0.21, 0.65, 0.515],
              "Tokens move far, in both directions."),
    "Wrong direction": ([0.15, 0.5, 0.5, 0.5], [0.9, 0.55, 0.5, 0.5],
                        "Wrong if A = −1, but not clipped then."),
}
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
NOISES = [0.003, 0.01, 0.03, 0.1, 0.3]  # standard deviation of a token's log-ratio


# ---- the log: one step, seen after each update ---------------------------------------------------


def logged_run(name):
    """One run, with the log of all responses of STEP after each of its updates."""
    torch.set_num_threads(1)
    folder = world(0)
    cfg = train_math.parse_settings([
        *FLAGS, *RANGES["gspo"], "--model", str(folder / "model"), "--dataset",
        str(folder / "questions"), "--instruction", "", "--output_dir", ""])
    questions, _ = train_math.load_questions(cfg, train_math.correctness_reward)
    model, tokenizer = train_math.load(cfg.model, cfg.device)
    rewards = []  # of steps 0, 1, ...
    step = {}
    log_ratios = []  # after each update: (256, L), for all responses, also those with advantage 0

    def build_minibatches(rollout, advantages, cfg):
        if len(rewards) == STEP:
            step["rollout"] = rollout
            step["batch"] = train_math.MicroBatch(
                rollout, advantages, range(len(advantages)), cfg.device)
            step["old_log_probs"] = log_probs()
        return train_math.build_minibatches(rollout, advantages, cfg)

    @torch.no_grad()
    def log_probs():
        return train_math.response_log_probs(model, step["batch"], cfg.temperature)

    def after_update(*arguments):
        if step and len(log_ratios) < UPDATES:
            log_ratios.append(log_probs() - step["old_log_probs"])

    def make_optimizer(model):
        optimizer = train_math.adamw(model)
        optimizer.register_step_post_hook(after_update)
        return optimizer

    def on_step(row):
        rewards.append(row.get("reward"))  # None in step 0
        if row["step"] == STEP - 1:
            cfg.algorithm, cfg.eps_low, cfg.eps_high = RUNS[name]

    train_math.train(cfg, model, tokenizer, questions, on_step=on_step,
                     make_optimizer=make_optimizer, build_minibatches=build_minibatches)
    asked = step["rollout"].questions[::cfg.group_size]
    shared = {
        "questions": [row["question"] for row in asked],
        "answers": [row["answer"].split()[-1] for row in asked],
        "responses": [spelled(tokenizer, ids) for ids in step["rollout"].responses],
        "advantages": [round(a, 2) for a in step["batch"].advantages.tolist()],
    }
    log = condensed(torch.stack(log_ratios), step["batch"], RUNS[name])
    return shared, {"rewards": [round(reward, 4) for reward in rewards[1:]], **log}


def spelled(tokenizer, ids):
    """A response with one character per token, also for the end token and a new line."""
    pieces = [tokenizer.decode([i], skip_special_tokens=True) for i in ids]
    return "".join({"\n": "⏎", " ": "␣", "": "■"}.get(piece, piece) for piece in pieces)


def condensed(log_ratios, batch, settings):
    """What the log keeps of the log-ratios (updates, responses, tokens)."""
    zeros = torch.zeros_like(log_ratios[0])
    i = torch.arange(len(zeros))
    first_turn = torch.cat([zeros[None], log_ratios])[i // 32, i]  # before a minibatch first comes
    moments = [first_turn, *log_ratios[[update - 1 for update in MOMENTS]]]
    log_s = [gspo.sequence_ratio(x, zeros, batch.mask).log() for x in log_ratios]
    return {
        "log_s": packed(4000 * torch.stack(log_s), torch.int16),
        "clipped": ["".join(levels(x, batch, *settings)) for x in log_ratios],
        "clipped_tokens": [round(clipped_tokens(x, batch, *settings), 4) for x in log_ratios],
        "tokens": packed(coded(torch.cat([x[batch.mask] for x in moments])), torch.int8),
    }


def clipped_tokens(log_ratio, batch, algorithm, eps_low, eps_high, rows=slice(None)):
    """The fraction of the tokens of these responses that is clipped."""
    ratio = log_ratio.exp()
    if algorithm == "gspo":
        ratio = gspo.sequence_ratio(log_ratio, torch.zeros_like(log_ratio), batch.mask)
    return gspo.clip_fraction(
        ratio[rows], batch.advantages[rows], batch.mask[rows], eps_low, eps_high).item()


def levels(log_ratio, batch, *settings):
    """For each response "0": no token is clipped, "1": at most half of them, "2": more."""
    for row in torch.arange(len(log_ratio)).split(1):
        fraction = clipped_tokens(log_ratio, batch, *settings, rows=row)
        yield "0" if fraction == 0 else "1" if fraction <= 0.5 else "2"


def coded(x):
    """Log-ratios as numbers from -127 to 127, precise to 3%. None of them changes its side of an
    end of GRPO's range by rounding."""
    low, high = math.log(1 - RUNS["grpo"][1]), math.log(1 + RUNS["grpo"][2])
    codes = (16 * (x / 0.01).asinh()).round()
    rounded = 0.01 * (codes / 16).sinh()
    is_outside, was_outside = ((y != y.clamp(low, high)).int() for y in (rounded, x))
    return codes + x.sign() * (was_outside - is_outside)


def packed(numbers, dtype):
    limits = torch.iinfo(dtype)
    numbers = numbers.round().clamp(limits.min, limits.max).to(dtype)
    return base64.b64encode(zlib.compress(numbers.numpy().tobytes(), 9)).decode()


def unpacked(text, dtype):
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=dtype).float()


# ---- the numbers of the page ---------------------------------------------------------------------


def step_numbers():
    """What the third panel shows: the log, with medians of s and numbers of clipped responses."""
    log = json.loads(LOG.read_text(encoding="utf-8"))
    advantages = torch.tensor(log["step"]["advantages"])
    signs = advantages > 0, advantages < 0
    log["ends"] = [1.0, 1.0]
    for name in RUNS:
        run = log[name]
        run["range"] = RUNS[name][1:]
        run["counts"] = []  # per update: clipped tokens; responses (A > 0, A < 0); medians
        s = torch.cat([torch.zeros(256), unpacked(run["log_s"], torch.int16) / 4000]).exp()
        log["ends"] = [min(log["ends"][0], s.min().item()), max(log["ends"][1], s.max().item())]
        levels = torch.tensor([[int(x) for x in row] for row in ["0" * 256, *run["clipped"]]])
        for part, row, level in zip([0, *run["clipped_tokens"]], s.reshape(-1, 256), levels):
            counts = [int(((level > 0) & sign).sum()) for sign in signs]
            medians = [float(f"{row[sign].median():.5g}") for sign in signs]
            run["counts"].append([part, *counts, *medians])
        if name == "gspo":  # those that are clipped before their minibatch comes for the first time
            by_length = sorted(range(256), key=lambda i: -len(log["step"]["responses"][i]))
            log["early"] = [i for i in by_length if levels[i // 32, i] > 0]
    return log


def length_numbers():
    """For the second panel, by noise and length: the 5% and 95% quantiles of a token ratio, of s
    and of the product, and the fraction outside each clip range."""
    torch.manual_seed(0)
    normal = torch.randn(2000, max(LENGTHS), dtype=torch.float64)
    normal[:, 0] = torch.special.ndtri(torch.arange(0.5, 2000).double() / 2000)  # evenly
    ones = torch.ones(2000, 1)
    table = []
    for noise, length in itertools.product(NOISES, LENGTHS):
        x = normal[:, :length] * noise
        s = gspo.sequence_ratio(x, torch.zeros_like(x), torch.ones_like(x))
        row = []
        for ratio in (x[:, 0].exp(), s, x.sum(dim=1).exp()):
            ends = ratio.quantile(ratio.new_tensor([0.05, 0.95])).tolist()
            row.append([float(f"{end:.7g}") for end in ends])
            for low, high in CLIP_RANGES.values():
                sides = [gspo.clip_fraction(ratio, sign * ones[:, 0], ones, low, high)
                         for sign in (1, -1)]
                row[-1].append(round(sum(sides).item(), 3))
        table.append(row)
    return table


def page():
    """The template with its numbers."""
    data = {"step": STEP, "moments": MOMENTS, "presets": PRESETS, "lengths": LENGTHS,
            "noises": NOISES, "ranges": CLIP_RANGES,
            "spread": length_numbers(), "log": step_numbers()}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    return TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/null", text)


def draw_still():
    """Four moments of the runs with and without the clip."""
    log = step_numbers()
    signs = torch.tensor(log["step"]["advantages"]).sign()
    kinds = ((1, "#00805e", "o"), (-1, "#a8438a", "v"), (0, "gray", "."))
    figure = Figure((11, 5.4), layout="constrained")
    figure.suptitle("Without the clip, nothing limits how unlikely a step makes wrong responses\n"
                    "(circle: correct, triangle: wrong, hollow: clipped, grey dot: A = 0, "
                    "blue: GSPO's clip range)")
    ticks = [1.1, 1.01, 1, 0.99, 0.9, 0.5, 0.1, 0.01]
    axes = figure.subplots(2, len(MOMENTS), sharex=True, sharey=True)
    for row, (name, title) in zip(axes, {"gspo": "GSPO", "none": "GSPO without clip"}.items()):
        row[0].set_ylabel(f"{title}\nimportance ratio s")
        log_s = unpacked(log[name]["log_s"], torch.int16).reshape(UPDATES, -1) / 4000
        for update, axis in zip(MOMENTS, row):
            axis.set_yscale("asinh", linear_width=0.01)
            axis.axhspan(math.log(0.99), math.log(1.0133), color=STYLES["gspo"][0], alpha=0.25)
            axis.set(title=f"after update {update}", xlabel="minibatch of the response")
            axis.label_outer()
            clipped = torch.tensor([level != "0" for level in log[name]["clipped"][update - 1]])
            for (sign, color, marker), hollow in itertools.product(kinds, (False, True)):
                i = ((signs == sign) & (clipped == hollow)).nonzero()[:, 0]
                axis.scatter(i / 32 + 0.5, log_s[update - 1, i], 20, marker=marker, lw=0.9,
                             edgecolors=color, facecolors="none" if hollow else color)
            axis.set_yticks([math.log(s) for s in ticks], map(str, ticks))
            axis.minorticks_off()
    figure.savefig(STILL, dpi=90)


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--record", action="store_true", help="make the three runs and their log")
    if parser.parse_args(argv).record:
        log = {}
        for name in RUNS:
            log["step"], log[name] = logged_run(name)  # all runs have the same step
        LOG.write_text(json.dumps(log, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    draw_still()
    print(f"{PAGE}: {PAGE.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
