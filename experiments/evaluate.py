"""Accuracy of a model on held-out questions: one greedy response to each, in float32.

    python -m experiments.evaluate OUTPUT.jsonl --model FOLDER_OR_HUB_ID --dataset GSM8K
                                   [--temperature 0.6] [other flags of train_math.py]

Writes a row for each question (the gold answer, the response, its number of tokens, whether the
boxed answer and the last number are correct) to OUTPUT.jsonl, and prints the accuracies. Like
training, it asks with the instruction and the chat template, and takes the test split. To evaluate
all 1,319 test questions of GSM8K, add --eval_size 1319.
"""
import sys
from pathlib import Path

import torch

import train_math


def main(argv=None):
    output, *flags = sys.argv[1:] if argv is None else argv
    temperature = 0.0
    if "--temperature" in flags:
        temperature = float(flags[flags.index("--temperature") + 1])
    if Path(output).exists() or not output.endswith(".jsonl"):
        sys.exit(f"evaluate.py: {output} is not the name of a new .jsonl file")
    cfg = train_math.parse_settings(flags)
    _, held_out = train_math.load_questions(cfg)
    model, tokenizer = train_math.load(cfg.model, cfg.device)
    torch.manual_seed(cfg.seed)
    row = train_math.evaluate(model, tokenizer, held_out, cfg, temperature=temperature)
    train_math.write_lines(row.pop("eval_results"), Path(output))
    print(row)


if __name__ == "__main__":
    main()
