"""How much of what sums.py teaches is to set the calculation up?

    python -m experiments.qwen.sums_given RUN --model MODEL

The pre-trained MODEL answers RUN's held-out questions greedily again, but the beginning of each
answer is written for it: the calculation without its result, such as '26 * 26 ='. This is how the
trained models usually begin. The answers are written to RUN's before_given.jsonl. If the file is
there, they are only compared with the answers before and after the training.
"""
import argparse
from pathlib import Path

import torch

import train_math
from common.intervals import accuracy_text, gain_text
from common.logs import read
from experiments.qwen import evaluate, sums


def begun_answers(model, tokenizer, questions, temperature, cfg):
    """Answers whose beginning is given: (lists of token ids without the beginning, whole texts)."""
    begun = ["{} * {} =".format(*row["factors"]) for row in questions]
    prompts = train_math.encode_prompts(tokenizer, questions, cfg.instruction)
    beginnings = tokenizer(begun, add_special_tokens=False).input_ids
    prompts = [prompt + beginning for prompt, beginning in zip(prompts, beginnings)]
    ends = torch.tensor([tokenizer.eos_token_id])
    responses, _ = train_math.rollout(model, prompts, 1, 12, temperature, ends)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return responses, [start + text for start, text in zip(begun, texts)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    cfg = train_math.parse_settings([*sums.SETTINGS, "--device=cpu"])
    _, questions = sums.make_questions()
    path = args.run / "before_given.jsonl"
    evaluate.ask(path, args.model, questions, [0.0], cfg, sums.judge, begun_answers)
    given = read(path)
    before, after = ([row for row in read(args.run / f"{when}.jsonl") if row["temperature"] == 0]
                     for when in ("before", "after"))
    print(f"right with the calculation given: {accuracy_text(given)}")
    print(f"given minus before: {gain_text(before, given)}")
    print(f"after minus given: {gain_text(given, after)}")


if __name__ == "__main__":
    main()
