"""How much of the gain in sums.py comes from writing down the calculation?

    python -m experiments.qwen.sums_given RUN --model MODEL

The pre-trained MODEL answers the held-out questions of RUN again with greedy decoding. Here, the
beginning of each answer is given: the calculation without its result, such as '26 * 26 ='. This is
how the trained models usually begin. The rest of the answer is written to before_given.jsonl in
RUN. (In the published logs, the responses also contain the given beginning.) If the file exists
already, its answers are only compared with those before and after training.
"""
import argparse
from pathlib import Path

import train_math
from common.intervals import accuracy_text, gain_text
from common.logs import read
from experiments import evaluate
from experiments.qwen import sums


def begun_prompts(tokenizer, questions, cfg):
    """The token ids of each question, followed by the beginning of its answer."""
    prompts = train_math.encode_prompts(tokenizer, questions, cfg)
    begun = ["{} * {} =".format(*row["factors"]) for row in questions]
    beginnings = tokenizer(begun, add_special_tokens=False).input_ids
    return [prompt + beginning for prompt, beginning in zip(prompts, beginnings)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run of sums.py")
    parser.add_argument("--model", required=True, help="the pre-trained model: hub id or folder")
    args = parser.parse_args()
    cfg = train_math.parse_settings([*sums.SETTINGS, "--device=cpu", "--max_completion_length=12"])
    _, questions = sums.make_questions()
    path = args.run / "before_given.jsonl"
    evaluate.ask(path, args.model, questions, [0.0], cfg, reward=sums.last_number_reward,
                 encode_prompts=begun_prompts)
    given = evaluate.column(read(path), 0.0)
    before, after = (evaluate.column(read(args.run / f"{when}.jsonl"), 0.0)
                     for when in ("before", "after"))
    print(f"accuracy with the calculation given: {accuracy_text(given)}")
    print(f"given minus before: {gain_text(before, given)}")
    print(f"after minus given: {gain_text(given, after)}")


if __name__ == "__main__":
    main()
