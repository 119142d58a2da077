"""Real weights on the real GSM8K's short questions, on a CPU: a cold start, GSPO, and controls beside it.

    python experiments/gsm8k.py --gsm8k FOLDER --model FOLDER_OR_HUB_ID                      # Qwen: some hours
    python experiments/gsm8k.py --gsm8k FOLDER --model FOLDER_OR_HUB_ID --preset smollm2     # some hours, too

--gsm8k holds train.jsonl and test.jsonl; of their questions those of one or two steps and under 220 characters are
kept. Parts, which --parts picks, and of which none is done twice (RL goes on where it was stopped):
cold: supervised batches, for Qwen on own right answers with '#### number' put after them, for SmolLM2 on the
dataset's solutions; gspo, grpo: RL from there, on the same questions in the same order; sft: --sft_steps supervised
batches more, to tell RL from mere training on; evaluate: each model, and `base`, the one that was downloaded, on all
held-out questions, greedy and sampled. All is written to --output_dir; at the end come table.md, answers.md and the
picture, from what is there; --results copies them, with the logs."""
import argparse
import json
import math
import random
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import cold_start
import train_math
from plot import draw, read

COLD = dict(qwen=10, smollm2=12)
RL = dict(qwen="""--prompts_per_step 8 --max_completion_length 200 --learning_rate 5e-6 --max_steps 15 --save_steps 5
                  --eval_size 64""",
          smollm2="""--prompts_per_step 4 --max_completion_length 96 --learning_rate 1e-5 --max_steps 32 --save_steps 16
                     --eval_size 64""")
ARMS = "base", "cold", "sft", "grpo", "gspo"
TEMPERATURES = 0.0, 1.0  # greedy, and RL's own


def short_questions(source, target):
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["answer"].count("<<") <= 2 and len(row["question"]) < 220]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def own_answers(a, n=128):
    """own.jsonl: those of the model's own answers to n training questions whose last number is right, and '#### number'
    after them: to learn the form from, and nothing else."""
    target = a.output_dir / "own.jsonl"
    if not target.exists():
        s = train_math.parse_settings(["--max_completion_length", "256"])
        questions = random.Random(0).sample(train_math.load_questions(str(a.output_dir / "train.jsonl"), "train"), n)
        model, tokenizer = train_math.load(a.model, s.device)
        torch.manual_seed(0)
        _, answers = train_math.evaluate(model, tokenizer, questions, s, temperature=1.0)
        rows = [{"question": x["question"], "answer": f"{x['response']}\n#### {x['gold']}"} for x in answers
                if train_math.extract_answer(x["response"], strict=False) == x["gold"]]
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return target


def teach(a, model, folder, steps, seed):
    if not folder.exists():
        dataset = own_answers(a) if a.preset == "qwen" else a.output_dir / "train.jsonl"
        cold_start.main(["--model", str(model), "--dataset", str(dataset), "--output_dir", str(folder),
                         "--steps", str(steps), "--seed", str(seed)])


def reinforce(a, algorithm):
    output = a.output_dir / algorithm
    flags = ["--resume"] if (output / "settings.json").exists() else []
    train_math.main(["--model", str(a.output_dir / "cold"), "--dataset", str(a.output_dir / "train.jsonl"),
                     "--eval_dataset", str(a.output_dir / "test.jsonl"), "--output_dir", str(output),
                     "--algorithm", algorithm, *RL[a.preset].split(), *flags])


def evaluate(a, arm):
    """ARM.jsonl: a line a held-out question, with the greedy answer and one sampled at each temperature."""
    folder = {"base": a.model, "cold": a.output_dir / "cold", "sft": a.output_dir / "sft"}.get(
        arm, a.output_dir / arm / "model")
    target = a.output_dir / f"{arm}.jsonl"
    if target.exists() or arm != "base" and not folder.exists():
        return
    s = train_math.parse_settings(RL[a.preset].split())
    questions = train_math.load_questions(str(a.output_dir / "test.jsonl"), "test")
    model, tokenizer = train_math.load(str(folder), s.device)
    rows = []
    for temperature in TEMPERATURES:
        torch.manual_seed(0)
        _, answers = train_math.evaluate(model, tokenizer, questions, s, temperature)
        for i, answer in enumerate(answers):
            n = len(tokenizer(answer["response"], add_special_tokens=False).input_ids)
            rows.append({"question": i, "temperature": temperature, "gold": answer["gold"], "right": answer["right"],
                         "flexible": train_math.extract_answer(answer["response"], strict=False) == answer["gold"],
                         "tokens": n, "cut": n >= s.max_completion_length - 1, "response": answer["response"]})
    aside = target.with_suffix(".partial")
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    aside.rename(target)


def paired(before, after):
    """(difference, its 95% interval, McNemar's exact p) of two lists of right or wrong on the same questions."""
    n, gained = len(before), sum(y and not x for x, y in zip(before, after))
    lost = sum(x and not y for x, y in zip(before, after))
    d, changed = (gained - lost) / n, gained + lost
    half = 1.96 * math.sqrt(changed - (gained - lost) ** 2 / n) / n
    p = min(1, 2 * sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed)
    return d, (d - half, d + half), p


def column(rows, temperature, name="right"):
    return [row[name] for row in sorted(rows, key=lambda row: row["question"]) if row["temperature"] == temperature]


def table(arms):
    lines = ["| model | answers | right (95%) | by the last number | minus the cold start (95%, paired) | McNemar p "
             "| cut | tokens |", "|---|---|---|---|---|---|---|---|"]
    for temperature in TEMPERATURES:
        for arm, rows in arms.items():
            right, n = column(rows, temperature), len(column(rows, temperature))
            low, high = train_math.wilson(sum(right), n)
            versus = "- | -"
            if arm != "cold" and "cold" in arms:
                d, (a, b), p = paired(column(arms["cold"], temperature), right)
                versus = f"{d:+.1%} ({a:+.1%} to {b:+.1%}) | {p:.2g}"
            mean = lambda name: sum(column(rows, temperature, name)) / n
            how = f"at temperature {temperature}" if temperature else "greedy"
            lines.append(f"| {arm} | {how} | {sum(right)} of {n}, "
                         f"{sum(right) / n:.1%} ({low:.1%} to {high:.1%}) | {mean('flexible'):.1%} | {versus} | "
                         f"{mean('cut'):.0%} | {mean('tokens'):.0f} |")
    for temperature in TEMPERATURES if {"gspo", "grpo"} <= arms.keys() else ():
        d, (a, b), p = paired(*(column(arms[arm], temperature) for arm in ("grpo", "gspo")))
        lines.append(f"\ngspo minus grpo, temperature {temperature}: {d:+.1%} ({a:+.1%} to {b:+.1%}), p {p:.2g}")
    return "\n".join(lines) + "\n"


def side_by_side(questions, arms, n=8):
    """Markdown: the first n held-out questions, and the greedy answer of each arm."""
    text = ""
    for i, row in enumerate(questions[:n]):
        text += f"**{row['question']}** (gold: {train_math.gold_answer(row['answer'])})\n\n"
        for arm, rows in arms.items():
            answer = next(r for r in rows if r["question"] == i and r["temperature"] == 0)
            text += f"{arm}, {'right' if answer['right'] else 'wrong'}:\n```text\n{answer['response'].strip()}\n```\n"
    return text


def report(a):
    arms = {arm: rows for arm in ARMS if (rows := read(a.output_dir / f"{arm}.jsonl"))}
    runs = {arm: rows for arm in ("gspo", "grpo") if (rows := read(a.output_dir / arm / "metrics.jsonl"))}
    if arms:
        (a.output_dir / "table.md").write_text(table(arms), encoding="utf-8")
        questions = train_math.load_questions(str(a.output_dir / "test.jsonl"), "test")
        (a.output_dir / "answers.md").write_text(side_by_side(questions, arms), encoding="utf-8")
        print(table(arms))
    if runs:
        draw(runs, a.output_dir / "runs.png", eps_high=4e-4)
    if a.results:
        a.results.mkdir(parents=True, exist_ok=True)
        for name in ("table.md", "answers.md", "runs.png", *(f"{arm}.jsonl" for arm in ARMS)):
            if (a.output_dir / name).exists():
                shutil.copy(a.output_dir / name, a.results / name)
        for arm in runs:
            shutil.copy(a.output_dir / arm / "metrics.jsonl", a.results / f"{arm}.metrics.jsonl")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gsm8k", type=Path, required=True, help="the folder with train.jsonl and test.jsonl")
    parser.add_argument("--model", required=True, help="hub id or folder: of Qwen2.5-Coder-0.5B-Instruct, or so")
    parser.add_argument("--preset", choices=COLD, default="qwen", help="steps and sizes")
    parser.add_argument("--parts", nargs="+", choices=[*ARMS, "evaluate", "report"],
                        default=["cold", "gspo", "evaluate", "sft", "grpo", "evaluate"])
    parser.add_argument("--sft_steps", type=int, default=30, help="supervised batches more, for sft")
    parser.add_argument("--output_dir", type=Path, help="default: runs/gsm8k_PRESET")
    parser.add_argument("--results", type=Path, help="copy logs, tables and picture there")
    a = parser.parse_args()
    a.output_dir = a.output_dir or Path("runs") / f"gsm8k_{a.preset}"
    a.output_dir.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        short_questions(a.gsm8k / f"{split}.jsonl", a.output_dir / f"{split}.jsonl")
    for part in a.parts:
        if part == "cold":
            teach(a, a.model, a.output_dir / "cold", COLD[a.preset], seed=0)
        elif part == "sft":
            teach(a, a.output_dir / "cold", a.output_dir / "sft", a.sft_steps, seed=1)
        elif part in ("gspo", "grpo"):
            reinforce(a, part)
        elif part == "evaluate":
            for arm in ARMS:
                evaluate(a, arm)
    report(a)


if __name__ == "__main__":
    main()
