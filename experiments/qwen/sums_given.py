"""How much of the gain in sums.py comes from writing down the calculation?

    python -m experiments.qwen.sums_given RUN --model MODEL

The pre-trained MODEL, and the model that the run RUN of sums.py trained, answer the held-out
questions again with greedy decoding. Here, the beginning of each answer is given: the calculation
without its result, such as '26 * 26 ='. This is how the trained models usually begin. The rest of
the answers is written to before_given.jsonl and after_given.jsonl in RUN. (In the published
before_given.jsonl, the responses also contain the given beginning.) A file that exists already is
only read. If the trained model was deleted, only the pre-trained one is asked.
"""
import argparse
from pathlib import Path

import train_math
from common import evaluate
from common.intervals import accuracy_text, gain_text
from common.logs import read
from experiments.qwen import sums

COMPARED = [("before", "before_given"), ("before_given", "after"), ("before_given", "after_given"),
            ("after", "after_given")]


def begun_prompts(tokenizer, questions, cfg):
    """The token ids of each question, followed by the beginning of its answer."""
    prompts = train_math.encode_prompts(tokenizer, questions, cfg)
    begun = ["{} * {} =".format(*row["factors"]) for row in questions]
    beginnings = tokenizer(begun, add_special_tokens=False).input_ids
    return [prompt + beginning for prompt, beginning in zip(prompts, beginnings)]


def report(run):
    """The accuracies of a run as text, with and without the given beginning, and their paired
    differences."""
    correct = {}
    lines = []
    for name in "before", "before_given", "after", "after_given":
        rows = read(run / f"{name}.jsonl")
        if rows:
            correct[name] = evaluate.column(rows, 0.0)
            lines.append(f"{name}: {accuracy_text(correct[name])}")
    for first, second in COMPARED:
        if first in correct and second in correct:
            lines.append(f"{second} minus {first}: {gain_text(correct[first], correct[second])}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run of sums.py")
    parser.add_argument("--model", required=True, help="the pre-trained model: hub id or folder")
    args = parser.parse_args()
    cfg = train_math.parse_settings([*sums.SETTINGS, "--device=cpu", "--max_completion_length=12"])
    _, questions = sums.make_questions()
    trained = args.run / "training" / "model"
    for when, model in ("before", args.model), ("after", trained):
        if when == "before" or trained.is_dir():
            evaluate.ask(args.run / f"{when}_given.jsonl", model, questions, [0.0], cfg,
                         reward=sums.last_number_reward, encode_prompts=begun_prompts)
    print(report(args.run))


if __name__ == "__main__":
    main()
