"""Real weights on the real GSM8K's short questions, on a CPU: a cold start, GSPO, and controls.

    python -m experiments.qwen.gsm8k --gsm8k FOLDER --model FOLDER_OR_HUB_ID        # Qwen: hours
    python -m experiments.qwen.gsm8k --gsm8k FOLDER --model FOLDER_OR_HUB_ID --preset smollm2

--gsm8k holds train.jsonl and test.jsonl; of their questions those of one or two steps and under 220
characters are kept. Parts, which --parts picks, and of which none is done twice (RL goes on where
it was stopped): cold: supervised batches, for Qwen on own right answers with '#### number' put
after them, for SmolLM2 on the dataset's solutions; gspo, grpo: RL from there, on the same questions
in the same order; sft: --sft_steps supervised batches more, to tell RL from mere training on;
evaluate: each model, and `base`, the one that was downloaded, on all held-out questions, greedy and
sampled. All is written to --output_dir; at the end come table.md, answers.md and the picture, from
what is there; --results copies them, with the logs.
"""
import argparse
import math
import random
import shutil
from pathlib import Path

import torch

import train_math
from common import warm_up
from common.logs import read, write
from common.plot import draw

INSTRUCTION = "Reason step by step, then write the final answer, a number, after '####'."
COLD = {"qwen": 10, "smollm2": 12}
RL = {
    "qwen": """--prompts_per_step 8 --max_completion_length 200 --learning_rate 5e-6
               --max_steps 15 --save_steps 5 --eval_size 64""",
    "smollm2": """--prompts_per_step 4 --max_completion_length 96 --learning_rate 1e-5
                  --max_steps 32 --save_steps 16 --eval_size 64"""}
ARMS = "base", "cold", "sft", "grpo", "gspo"
TEMPERATURES = 0.0, 1.0  # greedy, and RL's own


def is_short(row):
    return row["answer"].count("<<") <= 2 and len(row["question"]) < 220


def settings(flags):
    """train_math's settings, to answer 256 questions at once."""
    cfg = train_math.parse_settings(["--instruction", INSTRUCTION, *flags])
    cfg.rollout_rows = 256 * cfg.group_size
    return cfg


def answers(model, tokenizer, questions, cfg, temperature):
    """[(text, is its answer right, is its last number right)], one to each question."""
    torch.manual_seed(0)
    _, _, texts, _ = train_math.sample(model, tokenizer, questions, 1, temperature, cfg)
    strict, flexible = (
        train_math.correctness_reward(None, texts, [row["answer"] for row in questions], strict)
        for strict in (True, False))
    return [(text, bool(a), bool(b)) for text, a, b in zip(texts, strict, flexible)]


def own_answers(args, n=128):
    """own.jsonl: those of the model's own answers to n training questions whose last number is
    right, and '#### number' after them: to learn the form from, and nothing else."""
    target = args.output_dir / "own.jsonl"
    if not target.exists():
        cfg = settings(["--max_completion_length", "256"])
        questions = random.Random(0).sample(read(args.questions / "train.jsonl"), n)
        model, tokenizer = train_math.load(args.model, cfg.device)
        rows = []
        given = answers(model, tokenizer, questions, cfg, temperature=1.0)
        for row, (text, _, right) in zip(questions, given):
            if right:
                gold = train_math.gold_answer(row["answer"])
                rows.append({"question": row["question"], "answer": f"{text}\n#### {gold}"})
        write(target, rows)
    return target


def teach(args, model, folder, steps, seed):
    if not folder.exists():
        dataset = args.questions / "train.jsonl"
        if args.preset == "qwen":
            dataset = own_answers(args)
        warm_up.main(["--model", str(model), "--dataset", str(dataset), "--instruction",
                         INSTRUCTION, "--output_dir", str(folder), "--steps", str(steps), "--seed",
                         str(seed)])


def reinforce(args, algorithm):
    train_math.main(["--model", str(args.output_dir / "cold"), "--dataset", str(args.questions),
                     "--instruction", INSTRUCTION, "--algorithm", algorithm, "--output_dir",
                     str(args.output_dir / algorithm), *RL[args.preset].split()])


def evaluate(args, arm):
    """ARM.jsonl: a line a held-out question, with the greedy answer and one sampled."""
    folders = {"base": args.model, "cold": args.output_dir / "cold", "sft": args.output_dir / "sft"}
    folder = folders.get(arm, args.output_dir / arm / "model")
    target = args.output_dir / f"{arm}.jsonl"
    if target.exists() or arm != "base" and not folder.exists():
        return
    cfg = settings(RL[args.preset].split())
    questions = read(args.questions / "test.jsonl")
    model, tokenizer = train_math.load(str(folder), cfg.device)
    rows = []
    for temperature in TEMPERATURES:
        given = answers(model, tokenizer, questions, cfg, temperature)
        for i, (text, right, flexible) in enumerate(given):
            n = len(tokenizer(text, add_special_tokens=False).input_ids)
            gold = train_math.gold_answer(questions[i]["answer"])
            rows.append({"question": i, "temperature": temperature, "gold": gold, "right": right,
                         "flexible": flexible, "tokens": n,
                         "cut": n >= cfg.max_completion_length - 1, "response": text})
    write(target, rows)


def paired(before, after):
    """(difference, its 95% interval, McNemar's exact p) of two lists of right or wrong on the same
    questions."""
    n = len(before)
    gained = sum(y and not x for x, y in zip(before, after))
    lost = sum(x and not y for x, y in zip(before, after))
    d = (gained - lost) / n
    changed = gained + lost
    half = 1.96 * math.sqrt(changed - (gained - lost) ** 2 / n) / n
    fewer = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return d, (d - half, d + half), min(1, 2 * fewer / 2**changed)


def column(rows, temperature, name="right"):
    rows = sorted(rows, key=lambda row: row["question"])
    return [row[name] for row in rows if row["temperature"] == temperature]


def mean(values):
    return sum(values) / len(values)


def table_line(arm, rows, cold, temperature):
    """One line of table(); cold: the cold start's rows, or None."""
    right = column(rows, temperature)
    low, high = train_math.wilson(sum(right), len(right))
    versus = "- | -"
    if cold:
        d, (a, b), p = paired(column(cold, temperature), right)
        versus = f"{d:+.1%} ({a:+.1%} to {b:+.1%}) | {p:.2g}"
    how = f"at temperature {temperature}" if temperature else "greedy"
    cells = [arm, how,
             f"{sum(right)} of {len(right)}, {mean(right):.1%} ({low:.1%} to {high:.1%})",
             f"{mean(column(rows, temperature, 'flexible')):.1%}", versus,
             f"{mean(column(rows, temperature, 'cut')):.0%}",
             f"{mean(column(rows, temperature, 'tokens')):.0f}"]
    return f"| {' | '.join(cells)} |"


def table(arms):
    lines = ["| model | answers | right (95%) | by the last number | minus the cold start (95%, "
             "paired) | McNemar p | cut | tokens |", "|---|---|---|---|---|---|---|---|"]
    for temperature in TEMPERATURES:
        for arm, rows in arms.items():
            cold = None if arm == "cold" else arms.get("cold")
            lines.append(table_line(arm, rows, cold, temperature))
    for temperature in TEMPERATURES if {"gspo", "grpo"} <= arms.keys() else ():
        d, (a, b), p = paired(*(column(arms[arm], temperature) for arm in ("grpo", "gspo")))
        lines.append(f"\ngspo minus grpo, temperature {temperature}: {d:+.1%} ({a:+.1%} to "
                     f"{b:+.1%}), p {p:.2g}")
    return "\n".join(lines) + "\n"


def side_by_side(questions, arms, n=8):
    """Markdown: the first n held-out questions, and the greedy answer of each arm."""
    text = ""
    for i, question in enumerate(questions[:n]):
        gold = train_math.gold_answer(question["answer"])
        text += f"**{question['question']}** (gold: {gold})\n\n"
        for arm, rows in arms.items():
            own = [row for row in rows if row["question"] == i and row["temperature"] == 0]
            right = "right" if own[0]["right"] else "wrong"
            text += f"{arm}, {right}:\n```text\n{own[0]['response'].strip()}\n```\n"
    return text


def report(args):
    output = args.output_dir
    arms = {arm: read(output / f"{arm}.jsonl") for arm in ARMS}
    arms = {arm: rows for arm, rows in arms.items() if rows}
    runs = {arm: read(output / arm / "metrics.jsonl") for arm in ("gspo", "grpo")}
    runs = {arm: rows for arm, rows in runs.items() if rows}
    if arms:
        (output / "table.md").write_text(table(arms), encoding="utf-8")
        questions = read(args.questions / "test.jsonl")
        (output / "answers.md").write_text(side_by_side(questions, arms), encoding="utf-8")
        print(table(arms))
    if runs:
        draw(runs, output / "runs.png", eps_high=4e-4)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        for name in ("table.md", "answers.md", "runs.png", *(f"{arm}.jsonl" for arm in ARMS)):
            if (output / name).exists():
                shutil.copy(output / name, args.results / name)
        for arm in runs:
            shutil.copy(output / arm / "metrics.jsonl", args.results / f"{arm}.metrics.jsonl")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gsm8k", type=Path, required=True,
                        help="the folder with train.jsonl and test.jsonl")
    parser.add_argument("--model", required=True,
                        help="hub id or folder: of Qwen2.5-Coder-0.5B-Instruct, or so")
    parser.add_argument("--preset", choices=COLD, default="qwen", help="steps and sizes")
    parser.add_argument("--parts", nargs="+", choices=[*ARMS, "evaluate", "report"],
                        default=["cold", "gspo", "evaluate", "sft", "grpo", "evaluate"])
    parser.add_argument("--sft_steps", type=int, default=30, help="batches more, for sft")
    parser.add_argument("--output_dir", type=Path, help="default: runs/gsm8k_PRESET")
    parser.add_argument("--results", type=Path, help="copy logs, tables and picture there")
    args = parser.parse_args()
    args.output_dir = args.output_dir or Path("runs") / f"gsm8k_{args.preset}"
    args.questions = args.output_dir / "questions"
    args.questions.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = read(args.gsm8k / f"{split}.jsonl")
        write(args.questions / f"{split}.jsonl", filter(is_short, rows))
    for part in args.parts:
        if part == "cold":
            teach(args, args.model, args.output_dir / "cold", COLD[args.preset], seed=0)
        elif part == "sft":
            cold = args.output_dir / "cold"
            teach(args, cold, args.output_dir / "sft", args.sft_steps, seed=1)
        elif part in ("gspo", "grpo"):
            reinforce(args, part)
        elif part == "evaluate":
            for arm in ARMS:
                evaluate(args, arm)
    report(args)


if __name__ == "__main__":
    main()
