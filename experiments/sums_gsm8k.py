"""Does what lesson/sums.py teaches help on GSM8K?

    python experiments/sums_gsm8k.py RUN --model MODEL --gsm8k FOLDER

MODEL and the model that RUN made of it answer GSM8K's short test questions greedily, as Qwen's
cards ask; FOLDER holds test.jsonl. Answers: RUN's gsm8k_before.jsonl and gsm8k_after.jsonl, each
asked once. Printed: right answers by the last number, and in the box.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_math  # noqa: E402
from experiments import gsm8k  # noqa: E402
from experiments.plot import read, write  # noqa: E402
from lesson import sums  # noqa: E402


def ask(path, name, questions, cfg):
    if path.exists():
        return
    model, tokenizer = train_math.load(str(name), cfg.device)
    rows = []
    given = gsm8k.answers(model, tokenizer, questions, cfg, temperature=0.0)
    for i, (text, in_box, right) in enumerate(given):
        gold = train_math.gold_answer(questions[i]["answer"])
        rows.append({"question": i, "gold": gold, "response": text, "right": float(right),
                     "in_box": float(in_box)})
    write(path, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=192)
    a = parser.parse_args()
    cfg = train_math.parse_settings(["--max_completion_length=320"])
    cfg.rollout_rows = a.questions * cfg.group_size  # all at once
    questions = list(filter(gsm8k.is_short, read(a.gsm8k / "test.jsonl")))[:a.questions]
    models = {"before": a.model, "after": a.run / "training" / "model"}
    for when, model in models.items():
        ask(a.run / f"gsm8k_{when}.jsonl", model, questions, cfg)
    before, after = (read(a.run / f"gsm8k_{when}.jsonl") for when in models)
    if [row["gold"] for row in before] != [row["gold"] for row in after]:
        parser.error(f"{a.run} has answers to other questions: delete gsm8k_before.jsonl")
    for when, rows in ("before", before), ("after", after):
        boxed = sum(row["in_box"] for row in rows)
        print(f"{when}: right by the last number {sums.told(rows)} of {len(rows)}; "
              f"in the box {boxed:.0f}")
    print(f"after minus before, by the last number: {sums.gain(before, after)}")


if __name__ == "__main__":
    main()
