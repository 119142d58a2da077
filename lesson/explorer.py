"""Writes the explorer: a page on which one moves ratios and watches a rollout being clipped.

    python -m lesson.explorer              writes lesson/explorer.html and its still (seconds)
    python -m lesson.explorer --record     makes the three runs and their log first (minutes)

The page is explorer_template.html with numbers in it. All of them come from gspo.py and from the
log of three runs of 16 steps on the small world, with the seed and the settings of
`python -m lesson.tiny`. Step 1 is GSPO's in all three. From step 2 on, one run goes on with GSPO,
one without its clip, and one with GRPO. So all three have the same 256 responses in step 2, which
is the step that the page shows. After each of its 32 updates, the log has log s of each response
and whether it is clipped. At some moments, it also has the log-ratio of each token.
"""
import argparse
import base64
import json
from pathlib import Path

import torch
from matplotlib.figure import Figure

import gspo
import train_math
from common.plot import STYLES
from lesson.tiny import FLAGS, RANGES, world
from support.models import load
from support.questions import load_questions

HERE = Path(__file__).parent
LOG = HERE / "results" / "explorer.json"
STILL = HERE / "results" / "rollout.png"
TEMPLATE = HERE / "explorer_template.html"
PAGE = HERE / "explorer.html"
STEP = 2  # the step that is shown
UPDATES = 32
MOMENTS = [1, 8, 16, 32]  # updates after which the log has each token's log-ratio
RUNS = {  # the settings from STEP on: algorithm, eps_low, eps_high
    "grpo": ("grpo", *map(float, RANGES["grpo"][1::2])),
    "gspo": ("gspo", *map(float, RANGES["gspo"][1::2])),
    "none": ("gspo", 1.0, 1e9),
}
CLIP_RANGES = {"GRPO": (0.2, 0.27), "small world": RUNS["gspo"][1:], "GSPO": (3e-4, 4e-4)}
PRESETS = {  # the probabilities before and now
    "Pencil example": ([0.25] * 4, [0.5, 0.25, 0.25, 0.25]),
    "One of eight doubles": ([0.4] * 8, [0.4, 0.4, 0.8, 0.4, 0.4, 0.4, 0.4, 0.4]),
    "All rise by 1%": ([0.5] * 8, [0.505] * 8),
    "Noise": ([0.6, 0.3, 0.8, 0.4, 0.5, 0.2, 0.7, 0.5],
              [0.66, 0.23, 0.82, 0.535, 0.445, 0.21, 0.645, 0.52]),
    "Wrong direction": ([0.15, 0.5, 0.5, 0.5], [0.9, 0.55, 0.5, 0.5]),
    "Tug of war": ([0.3] + [0.6] * 5, [0.6] + [0.5] * 5),
}
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
NOISES = [0.003, 0.01, 0.03, 0.1, 0.3]  # standard deviation of a token's log-ratio
TOKENS_MOVE = ["independently", "independently, and all rise by 1%", "with 10% shared variance"]


# ---- the log: one step, seen after each update ---------------------------------------------------


def logged_run(name):
    """One run, with the log of all responses of STEP after each of its updates."""
    folder = world(0)
    cfg = train_math.parse_settings([
        *FLAGS, *RANGES["gspo"], "--model", str(folder / "model"), "--dataset",
        str(folder / "questions"), "--instruction", "", "--output_dir", ""])
    questions, _ = load_questions(cfg, train_math.correctness_reward)
    model, tokenizer = load(cfg.model, cfg.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    rewards = []  # of each step
    step = {}
    log_ratios = []  # after each update: (256, L), for all responses, also those with advantage 0

    def build_minibatches(prompts, responses, advantages, cfg):
        if len(rewards) == STEP - 1:
            step["batch"] = train_math.MicroBatch(
                prompts, responses, range(len(responses)), cfg.device, advantages)
            step["old_log_probs"] = log_probs()
            step["prompts"] = tokenizer.batch_decode(prompts[::cfg.group_size])
            step["responses"] = [spelled(tokenizer, ids) for ids in responses]
        return train_math.build_minibatches(prompts, responses, advantages, cfg)

    @torch.no_grad()
    def log_probs():
        return train_math.response_log_probs(model, step["batch"], cfg.temperature)

    def after_update(*arguments):
        if step and len(log_ratios) < UPDATES:
            log_ratios.append(log_probs() - step["old_log_probs"])

    def on_step(row):
        if row["step"] > 0:
            rewards.append(round(row["reward"], 4))
        if row["step"] == STEP - 1:
            cfg.algorithm, cfg.eps_low, cfg.eps_high = RUNS[name]

    optimizer.register_step_post_hook(after_update)
    train_math.train(cfg, model, tokenizer, questions, optimizer=optimizer, on_step=on_step,
                     build_minibatches=build_minibatches)
    answers = {row["question"]: row["answer"].split()[-1] for row in questions}
    batch = step["batch"]
    shared = {
        "questions": [prompt.strip() for prompt in step["prompts"]],
        "answers": [answers[prompt.strip()] for prompt in step["prompts"]],
        "responses": step["responses"],
        "advantages": [round(a, 2) for a in batch.advantages.tolist()],
    }
    return shared, {"rewards": rewards, **condensed(torch.stack(log_ratios), batch, RUNS[name])}


def spelled(tokenizer, ids):
    """A response with one character per token, also for the end token and a new line."""
    pieces = [tokenizer.decode([i], skip_special_tokens=True) for i in ids]
    return "".join({"\n": "⏎", "": "■"}.get(piece, piece) for piece in pieces)


def condensed(log_ratios, batch, settings):
    """What the log keeps of the log-ratios (updates, responses, tokens)."""
    zeros = torch.zeros_like(log_ratios[0])
    first_turn = zeros.clone()  # before the minibatch of a response comes for the first time
    for i in range(32, len(first_turn)):
        first_turn[i] = log_ratios[i // 32 - 1, i]
    moments = [first_turn] + [log_ratios[update - 1] for update in MOMENTS]
    log_s = []
    clipped = []
    for x in log_ratios:
        log_s.append(gspo.sequence_ratio(x, zeros, batch.mask).log())
        clipped.append("".join(levels(x, batch, *settings)))
    return {
        "log_s": packed(4000 * torch.stack(log_s), torch.int16),
        "clipped": clipped,
        "tokens": [packed(coded(x[batch.mask]), torch.int8) for x in moments],
    }


def levels(log_ratio, batch, algorithm, eps_low, eps_high):
    """For each response "0": no token is clipped, "1": at most half of them, "2": more."""
    ratio = log_ratio.exp()
    if algorithm == "gspo":
        ratio = gspo.sequence_ratio(log_ratio, torch.zeros_like(log_ratio), batch.mask)
    for i in range(len(ratio)):
        row = slice(i, i + 1)
        fraction = gspo.clip_fraction(
            ratio[row], batch.advantages[row], batch.mask[row], eps_low, eps_high)
        yield "0" if fraction == 0 else "1" if fraction <= 0.5 else "2"


def coded(x):
    """Log-ratios as numbers from -127 to 127, precise to 3%. None of them changes its side of an
    end of GRPO's range by rounding."""
    low, high = (torch.tensor([1 - RUNS["grpo"][1], 1 + RUNS["grpo"][2]])).log()

    def is_outside(x):
        return ((x < low) | (x > high)).int()

    codes = (16 * (x / 0.01).asinh()).round()
    codes += x.sign() * (is_outside(x) - is_outside(decoded(codes)))
    return codes


def decoded(codes):
    return 0.01 * (codes / 16).sinh()


def packed(numbers, dtype):
    limits = torch.iinfo(dtype)
    numbers = numbers.round().clamp(limits.min, limits.max).to(dtype)
    return base64.b64encode(numbers.numpy().tobytes()).decode()


def unpacked(text, dtype):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).float()


def record():
    """Makes the three runs and writes their log."""
    torch.set_num_threads(1)
    log = {}
    for name in RUNS:
        shared, log[name] = logged_run(name)
        if log.setdefault("step", shared) != shared:
            raise RuntimeError(f"the runs have different responses in step {STEP}")
    LOG.write_text(json.dumps(log, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


# ---- the numbers of the page ---------------------------------------------------------------------


def step_numbers():
    """What the third panel shows: the log, with medians of s and numbers of clipped responses."""
    log = json.loads(LOG.read_text(encoding="utf-8"))
    advantages = torch.tensor(log["step"]["advantages"])
    signs = {"correct": advantages > 0, "wrong": advantages < 0}
    for name in RUNS:
        run = log[name]
        run["range"] = RUNS[name][1:]
        log_s = unpacked(run["log_s"], torch.int16).reshape(UPDATES, -1) / 4000
        run["medians"] = {sign: [0] + [round(x, 3) for x in log_s[:, chosen].median(1)[0].tolist()]
                          for sign, chosen in signs.items()}
        level = torch.tensor([[int(x) for x in row] for row in ["0" * 256, *run["clipped"]]])
        run["counts"] = []  # after each update: some tokens, most tokens by sign, next minibatch
        for update, row in enumerate(level):
            turn = slice(update % 8 * 32, update % 8 * 32 + 32)
            run["counts"].append([int((row == 1).sum()), *(int((row[chosen] == 2).sum())
                                  for chosen in signs.values()), int((row[turn] > 0).sum())])
        first = [level[i // 32, i].item() for i in range(256)]
        run["at_first_turn"] = sum(x > 0 for x in first)
        if name == "gspo":
            by_length = sorted(range(256), key=lambda i: -len(log["step"]["responses"][i]))
            log["early"] = [i for i in by_length if first[i] > 0]
    return log


def length_numbers():
    """For the second panel, by how tokens move, noise and length: the 5% and 95% quantiles of the
    logarithms of a token ratio, s and the product, and the fraction outside each clip range."""
    torch.manual_seed(0)
    own = torch.randn(2000, max(LENGTHS), dtype=torch.float64)
    shared = torch.randn(2000, 1, dtype=torch.float64)
    ones = torch.ones(2000, 1)
    table = []
    for normal, drift in ((own, 0.0), (own, 0.01), (own * 0.9 ** 0.5 + shared * 0.1 ** 0.5, 0.0)):
        for noise in NOISES:
            log_ratios = normal * noise + drift
            for length in LENGTHS:
                x = log_ratios[:, :length]
                s = gspo.sequence_ratio(x, torch.zeros_like(x), torch.ones_like(x))
                row = []
                for ratio in (x[:, 0].exp(), s, x.sum(dim=1).exp()):
                    ends = ratio.log().quantile(ratio.new_tensor([0.05, 0.95])).tolist()
                    row.append([float(f"{end:.4g}") for end in ends])
                    for low, high in CLIP_RANGES.values():
                        sides = [gspo.clip_fraction(ratio, sign * ones[:, 0], ones, low, high)
                                 for sign in (1, -1)]
                        row[-1].append(round(sum(sides).item(), 3))
                table.append(row)
    return table


def page():
    """The template with its numbers."""
    data = {"step": STEP, "moments": MOMENTS, "presets": PRESETS, "lengths": LENGTHS,
            "noises": NOISES, "move": TOKENS_MOVE, "ranges": CLIP_RANGES,
            "spread": length_numbers(), "log": step_numbers()}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    return TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/null", text)


# ---- the still: four moments of two runs ---------------------------------------------------------


def draw_still(path):
    log = step_numbers()
    advantages = torch.tensor(log["step"]["advantages"])
    blue, _ = STYLES["gspo"]
    figure = Figure((11, 5.6), layout="constrained")
    figure.suptitle("One rollout, 256 responses, 32 updates: without the clip, the updates push the "
                    "wrong responses down without limit", fontsize=12)
    axes = figure.subplots(2, len(MOMENTS), sharex=True, sharey=True)
    for name, row in zip(("gspo", "none"), axes):
        log_s = unpacked(log[name]["log_s"], torch.int16).reshape(UPDATES, -1) / 4000
        for update, axis in zip(MOMENTS, row):
            clipped = torch.tensor([level != "0" for level in log[name]["clipped"][update - 1]])
            axis.set_yscale("asinh", linear_width=0.01)
            axis.axhspan(*torch.tensor([0.99, 1.0133]).log().tolist(), color=blue, alpha=0.25, lw=0)
            for chosen, color, marker, size in (
                    (advantages > 0, "#00805e", "o", 20), (advantages < 0, "#a8438a", "v", 20),
                    (advantages == 0, "#888888", ".", 12)):
                for hollow in (False, True):
                    i = (chosen & (clipped == hollow)).nonzero()[:, 0]
                    axis.scatter(i / 32 + 0.5, log_s[update - 1, i], size, marker=marker, lw=0.9,
                                 edgecolors=color, facecolors="none" if hollow else color)
            axis.set_title(f"after update {update}", fontsize=11)
            ticks = [1.1, 1.01, 1, 0.99, 0.9, 0.5, 0.1, 0.01]
            axis.set_yticks(torch.tensor(ticks).log().tolist(), map(str, ticks))
            axis.minorticks_off()
            axis.set_xticks(range(1, 9))
    axes[0, 0].set_ylabel("GSPO, with its clip\nimportance ratio s")
    axes[1, 0].set_ylabel("GSPO without clip\nimportance ratio s")
    for axis in axes[1]:
        axis.set_xlabel("minibatch of the response")
    figure.savefig(path, dpi=100)


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--record", action="store_true", help="make the three runs and their log")
    if parser.parse_args(argv).record:
        record()
    PAGE.write_text(page(), encoding="utf-8")
    draw_still(STILL)
    print(f"{PAGE}: {PAGE.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
