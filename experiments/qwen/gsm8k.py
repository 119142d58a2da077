"""Trains Qwen2.5-0.5B or SmolLM2 on GSM8K's short questions, on a CPU, by GSPO, GRPO and a control.

    python -m experiments.qwen.gsm8k --gsm8k FOLDER --model FOLDER_OR_HUB_ID        # Qwen: hours
    python -m experiments.qwen.gsm8k --gsm8k FOLDER --model FOLDER_OR_HUB_ID --preset smollm2
    python -m experiments.qwen.gsm8k --show experiments/results/qwen/gsm8k    # the table again

FOLDER has train.jsonl and test.jsonl. Only questions with one or two steps and fewer than 220
characters are used. --parts selects the parts of the experiment. A part that is finished is not
repeated, and an interrupted run of RL continues:

    cold      supervised fine-tuning: of Qwen on its own correct answers, with '#### number' added,
              and of SmolLM2 on the solutions of the dataset
    gspo, grpo    RL from this fine-tuned model, on the same questions in the same order
    sft       a control: --sft_steps more supervised batches after `cold`, instead of RL
    evaluate  every model, and `base`, the downloaded one, answers all held-out questions, once
              greedily and once sampled

Everything is written to --output_dir. At the end, table.md, answers.md and the picture are made
from these files. --results copies them to another folder, with the logs.
"""
import argparse
import random
import shutil
from pathlib import Path

import torch

import train_math
from common import evaluate, warm_up
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
TEMPERATURES = 0.0, 1.0  # greedy decoding, and the temperature of RL


def is_short(row):
    return row["answer"].count("<<") <= 2 and len(row["question"]) < 220


def settings(flags):
    """The settings of train_math.py, with 256 answers at once."""
    cfg = train_math.parse_settings(["--instruction", INSTRUCTION, *flags])
    cfg.rollout_rows = 256
    return cfg


def own_answers(args, n=128):
    """Writes own.jsonl: the model's own answers to n training questions whose last number is
    correct, with '#### number' added. They can teach the model the format and nothing else."""
    target = args.output_dir / "own.jsonl"
    if not target.exists():
        cfg = settings(["--max_completion_length", "256"])
        questions = random.Random(0).sample(read(args.questions / "train.jsonl"), n)
        model, tokenizer = train_math.load(args.model, cfg.device)
        rows = []
        torch.manual_seed(0)
        given = train_math.evaluate(model, tokenizer, questions, cfg, temperature=1.0)
        for result in given["eval_results"]:
            if result["last_number"]:
                answer = f"{result['response']}\n#### {result['gold']}"
                rows.append({"question": result["question"], "answer": answer})
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


def ask_arm(args, arm):
    """Writes ARM.jsonl: a greedy and a sampled answer to each held-out question, one per line."""
    folders = {"base": args.model, "cold": args.output_dir / "cold", "sft": args.output_dir / "sft"}
    folder = folders.get(arm, args.output_dir / arm / "model")
    if arm == "base" or folder.exists():
        cfg = settings(RL[args.preset].split())
        questions = read(args.questions / "test.jsonl")
        evaluate.ask(args.output_dir / f"{arm}.jsonl", folder, questions, TEMPERATURES, cfg)


def table(arms):
    """Markdown: all models are compared with the fine-tuned model, and GSPO with GRPO."""
    text = evaluate.table(arms, "cold", "the cold start")
    for temperature in TEMPERATURES if {"gspo", "grpo"} <= arms.keys() else ():
        difference, p = evaluate.difference(arms["grpo"], arms["gspo"], temperature)
        text += f"\ngspo minus grpo, temperature {temperature}: {difference}, p {p}\n"
    return text


def side_by_side(questions, arms, n=8):
    """Markdown: the first n held-out questions, and the greedy answer of each model."""
    text = ""
    for i, question in enumerate(questions[:n]):
        gold = train_math.gold_answer(question["answer"])
        text += f"**{question['question']}** (gold: {gold})\n\n"
        for arm, rows in arms.items():
            own = [row for row in rows if row["question"] == i and row["temperature"] == 0]
            right = "right" if own[0]["reward"] else "wrong"
            text += f"{arm}, {right}:\n```text\n{own[0]['response'].strip()}\n```\n"
    return text


def answers_in(folder):
    """{arm: the logged answers of its model}, for those models that have any."""
    arms = {arm: read(folder / f"{arm}.jsonl") for arm in ARMS}
    return {arm: rows for arm, rows in arms.items() if rows}


def report(args):
    output = args.output_dir
    arms = answers_in(output)
    runs = {arm: read(output / arm / "metrics.jsonl") for arm in ("gspo", "grpo")}
    runs = {arm: rows for arm, rows in runs.items() if rows}
    if arms:
        (output / "table.md").write_text(table(arms), encoding="utf-8")
        questions = read(args.questions / "test.jsonl")
        (output / "answers.md").write_text(side_by_side(questions, arms), encoding="utf-8")
        print(table(arms))
    if runs:
        named = {arm.upper(): rows for arm, rows in runs.items()}
        draw(named, output / "runs.png", eps_high=4e-4)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        for name in ("table.md", "answers.md", "runs.png", *(f"{arm}.jsonl" for arm in ARMS)):
            if (output / name).exists():
                shutil.copy(output / name, args.results / name)
        for arm in runs:
            shutil.copy(output / arm / "metrics.jsonl", args.results / f"{arm}.metrics.jsonl")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gsm8k", type=Path, help="the folder with train.jsonl and test.jsonl")
    parser.add_argument("--model",
                        help="hub id or folder, for example of Qwen2.5-Coder-0.5B-Instruct")
    parser.add_argument("--show", type=Path, metavar="FOLDER",
                        help="only print the table of the answers in this folder")
    parser.add_argument("--preset", choices=COLD, default="qwen",
                        help="the settings for this model")
    parser.add_argument("--parts", nargs="+", choices=[*ARMS, "evaluate", "report"],
                        default=["cold", "gspo", "evaluate", "sft", "grpo", "evaluate"],
                        help="what to do, in this order")
    parser.add_argument("--sft_steps", type=int, default=30,
                        help="number of supervised batches of the control")
    parser.add_argument("--output_dir", type=Path, help="default: runs/gsm8k_PRESET")
    parser.add_argument("--results", type=Path,
                        help="copy the logs, the tables and the picture to this folder")
    args = parser.parse_args(argv)
    if args.show:
        print(table(answers_in(args.show)))
        return
    if not (args.gsm8k and args.model):
        parser.error("give --gsm8k and --model, or --show")
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
                ask_arm(args, arm)
    report(args)


if __name__ == "__main__":
    main()
