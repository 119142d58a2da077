"""Real pre-trained weights on the real GSM8K, on a CPU: SmolLM2-135M learns the answer format.

    python experiments/smollm2_gsm8k.py --gsm8k FOLDER [--model FOLDER_OR_HUB_ID] [--output_dir FOLDER] [--resume]

FOLDER holds GSM8K's train.jsonl and test.jsonl. Questions of one or two steps and fewer than 220 characters
are kept. A model of this size knows next to no arithmetic, so what is left to learn is the format, and
--format_weight pays for it. About a minute a step on one CPU core.
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_math

FLAGS = """--cold_start_steps 12 --prompts_per_step 4 --group_size 8 --minibatches 4 --max_completion_length 96
           --learning_rate 1e-5 --max_steps 32 --eval_steps 16 --eval_size 64 --save_steps 8""".split()


def short_questions(source, target):
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["answer"].count("<<") <= 2 and len(row["question"]) < 220]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gsm8k", type=Path, required=True, help="the folder with train.jsonl and test.jsonl")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub id or folder")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/smollm2"))
    args, more = parser.parse_known_args()
    args.output_dir.parent.mkdir(parents=True, exist_ok=True)
    train, test = (short_questions(args.gsm8k / f"{split}.jsonl",
                                   args.output_dir.with_name(f"gsm8k_short_{split}.jsonl"))
                   for split in ("train", "test"))
    train_math.main(["--model", args.model, "--dataset", train, "--eval_dataset", test, "--output_dir",
                     str(args.output_dir), *FLAGS, *more])
