"""How much of what sums.py teaches is to set the calculation up?

    python -m experiments.qwen.sums_given RUN --model MODEL

The pre-trained MODEL answers RUN's held-out questions greedily again, but the beginning of each
answer is written for it: the calculation without its result, such as '26 * 26 ='. This is how the
trained models usually begin. What follows is written to RUN's before_given.jsonl. (In the published
logs, the responses contain the given beginning, too.) If the file is there, its answers are only
compared with those before and after the training.
"""
import argparse
from pathlib import Path

import train_math
from common.intervals import accuracy_text, gain_text
from common.logs import read
from experiments import evaluate
from experiments.qwen import sums


def begun_prompts(tokenizer, questions, cfg):
    """The token ids of each question, and after them the beginning of its answer."""
    prompts = train_math.encode_prompts(tokenizer, questions, cfg)
    begun = ["{} * {} =".format(*row["factors"]) for row in questions]
    beginnings = tokenizer(begun, add_special_tokens=False).input_ids
    return [prompt + beginning for prompt, beginning in zip(prompts, beginnings)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    cfg = train_math.parse_settings([*sums.SETTINGS, "--device=cpu", "--max_completion_length=12"])
    _, questions = sums.make_questions()
    path = args.run / "before_given.jsonl"
    evaluate.ask(path, args.model, questions, [0.0], cfg, reward=sums.last_number_reward,
                 encode_prompts=begun_prompts)
    given = evaluate.column(read(path), 0.0)
    before, after = (evaluate.column(read(args.run / f"{when}.jsonl"), 0.0)
                     for when in ("before", "after"))
    print(f"right with the calculation given: {accuracy_text(given)}")
    print(f"given minus before: {gain_text(before, given)}")
    print(f"after minus given: {gain_text(given, after)}")


if __name__ == "__main__":
    main()
