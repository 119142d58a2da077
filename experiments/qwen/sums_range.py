"""Which clip range and which learning rate suit sums.py?

    python -m experiments.qwen.sums_range --model MODEL
    python -m experiments.qwen.sums_range --show experiments/results/qwen/sums/range

Each variant ("arm" in the table) is one run of sums.py, with a seed that is not used elsewhere. The
variants are evaluated on 256 training questions of sums.py, which are not trained on here. The 256
held-out questions of sums.py are neither trained on nor asked. The log of a variant is written when
it has finished. Its weights are not kept. If the command is interrupted, run it again to continue
with the next variant.
"""
import argparse
import sys
from dataclasses import replace
from pathlib import Path

import train_math
from common.logs import read, write
from experiments.qwen import sums

ARMS = {  # (algorithm, eps_low, eps_high, learning rate)
    "gspo_3e-4": ("gspo", 3e-4, 4e-4, 1.5e-6),
    "gspo_3e-3": ("gspo", 3e-3, 4e-3, 1.5e-6),
    "gspo_3e-2": ("gspo", 3e-2, 4e-2, 1.5e-6),
    "gspo_3e-3_rate_3e-6": ("gspo", 3e-3, 4e-3, 3e-6),
    "grpo_0.02": ("grpo", 0.02, 0.027, 1.5e-6),
    "grpo_0.2": ("grpo", 0.2, 0.27, 1.5e-6),
    "grpo_0.2_rate_3e-6": ("grpo", 0.2, 0.27, 3e-6)}


def run(arm, model, seed, n_held_out=256):
    """Trains a variant and returns its metrics. The first and the last row have an evaluation."""
    algorithm, low, high, rate = arm
    cfg = train_math.parse_settings([
        *sums.SETTINGS, "--dataset=lesson/sums.py", f"--model={model}", f"--seed={seed}",
        f"--algorithm={algorithm}", f"--eps_low={low}", f"--eps_high={high}",
        f"--learning_rate={rate}"])
    cfg = replace(cfg, output_dir=None, save_steps=cfg.max_steps, eval_size=n_held_out)
    questions, _ = sums.make_questions()
    with train_math.exits_with(f"--model {model}"):
        model, tokenizer = train_math.load(model, cfg.device)
    return train_math.train(cfg, model, tokenizer, questions[n_held_out:], questions[:n_held_out],
                            reward=sums.last_number_reward)


def table(folder):
    """Markdown: a line for each variant that is finished."""
    lines = [
        "arm | greedy (95%) | samples of the last five rollouts | spread of log s, first rollout | "
        "clipped, first rollout | later | minutes",
        "---|---|---|---|---|---|---"]
    for name in ARMS:
        rows = read(folder / f"{name}.jsonl")
        if not rows:
            continue
        start, *steps = rows
        if len(lines) == 2:
            lines.append(f"untrained | {greedy(start)} | | | | | ")
        samples = sum(row["reward"] for row in steps[-5:]) / 5
        first, *later = [row["clip_fraction"] for row in steps]
        lines.append(
            f"{name} | {greedy(steps[-1])} | {samples:.1%} | {steps[0]['log_ratio_std']:.2f} | "
            f"{first:.0%} | {sum(later) / len(later):.0%} | {sums.minutes(steps)}")
    return "".join(f"| {line} |\n" for line in lines)


def greedy(row):
    low, high = row["eval_reward_interval"]
    return f"{row['eval_reward']:.1%} ({low:.1%} to {high:.1%})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="hub id or folder")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--output_dir", type=Path, default="runs/sums_range",
                        help="folder of the logs")
    parser.add_argument("--show", type=Path, metavar="FOLDER",
                        help="only print the table of the logs in this folder")
    a = parser.parse_args()
    if a.show:
        if not any(a.show.glob("*.jsonl")):
            sys.exit(f"sums_range.py: {a.show} has no logs")
        print(table(a.show))
        return
    if not a.model:
        parser.error("give --model, or --show")
    with train_math.exits_with(f"--output_dir {a.output_dir}"):
        a.output_dir.mkdir(parents=True, exist_ok=True)
    for name, arm in ARMS.items():
        path = a.output_dir / f"{name}.jsonl"
        for row in read(path)[:1]:
            if (row["settings"]["model"], row["settings"]["seed"]) != (a.model, a.seed):
                sys.exit(f"sums_range.py: {path} has another --model or --seed. Choose another "
                         "--output_dir")
        if not path.exists():
            write(path, run(arm, a.model, a.seed))
            print(table(a.output_dir))


if __name__ == "__main__":
    main()
