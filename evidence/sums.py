"""Trains Qwen2.5-0.5B on products in words by GSPO, on any CPU.

    python -m evidence.sums                              Qwen2.5-0.5B-Instruct, from the hub
    python -m evidence.sums --seed 1 --output_dir runs/sums_1
                                                         or any other flag of train_math.py

The model answers questions such as "Ann buys 26 boxes of 26 eggs" in one line. The reward is 1 if
the last number of a response is correct. Afterwards, the pre-trained and the trained model answer
256 held-out questions, whose products are in no training question.

Training makes a model more confident, and so does a lower temperature. Therefore the pre-trained
model is also asked at temperatures in between. Training also teaches the model to write down the
calculation. Therefore both models are asked again with the beginning of each answer given, such as
'26 * 26 ='. An interrupted command can be run again. A run with other settings needs another
folder. The published runs are in logs/sums.jsonl.gz.
"""
import random
import sys
from dataclasses import replace
from pathlib import Path

import train_math
from support.task import extract_answer
from tools import evaluate
from tools.logs import make_writable, write

SETTINGS = [
    "--output_dir=runs/sums", "--instruction=Answer in one line.", "--max_completion_length=32",
    "--prompts_per_step=16", "--group_size=4", "--learning_rate=1.5e-6", "--max_steps=10",
    "--save_steps=5", "--eval_size=0", "--rollout_rows=256"]  # all held-out questions at once
GSPO_RANGE = ["--eps_low=3e-2", "--eps_high=4e-2"]  # the best of three on other questions
TEMPERATURES = {"before": (0.0, 0.3, 0.6, 1.0), "after": (0.0, 1.0)}  # 0: greedy decoding


def make_questions(n_held_out=256):
    """(training questions, held-out questions). The products have two digits times one digit, or
    two digits times two digits."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(3, 10) for b in range(11, 100)]
    pairs += [(a, b) for a in range(11, 30) for b in range(a, 60)]
    rows = []
    for a, b in pairs:
        name = rng.choice(("Ann", "Bob", "Eve", "Leo", "Mia", "Sam", "Tom"))
        things = rng.choice(("books", "cards", "eggs", "figs", "nuts", "pens"))
        question = f"{name} buys {a} boxes of {b} {things}. How many {things}?"
        rows.append({"question": question, "answer": str(a * b), "factors": [str(a), str(b)]})
    rng.shuffle(rows)
    return rows[n_held_out:], rows[:n_held_out]


def last_number_reward(prompts, completions, answer, **columns):
    """1.0 for a completion whose last number is the answer, else 0.0."""
    given = [extract_answer(text, strict=False) for text in completions]
    return [float(number == gold) for number, gold in zip(given, answer)]


def begun_prompts(tokenizer, questions, cfg):
    """The token ids of each question, followed by the beginning of its answer."""
    prompts = train_math.encode_prompts(tokenizer, questions, cfg)
    begun = ["{} * {} =".format(*row["factors"]) for row in questions]
    beginnings = tokenizer(begun, add_special_tokens=False).input_ids
    return [prompt + beginning for prompt, beginning in zip(prompts, beginnings)]


def main(argv):
    algorithm = train_math.parse_settings(SETTINGS + argv).algorithm
    flags = SETTINGS + ([] if algorithm == "grpo" else GSPO_RANGE) + argv
    cfg = train_math.parse_settings(flags)
    if cfg.dataset != train_math.Settings.dataset:
        sys.exit("sums.py makes its own questions, so it does not accept --dataset")
    folder = Path(cfg.output_dir)
    data = folder / "data"
    for name in "train", "test":
        make_writable(data / f"{name}.jsonl")
    questions, held_out = make_questions()
    write(data / "train.jsonl", questions)
    write(data / "test.jsonl", held_out)
    train_math.main([*flags, f"--dataset={data}", f"--output_dir={folder / 'training'}"],
                    reward=last_number_reward)
    cfg = replace(cfg, seed=0)  # so that before.jsonl serves for runs with other seeds, too
    short = replace(cfg, max_completion_length=12)
    models = {"before": cfg.model, "after": folder / "training" / "model"}
    files = []
    for when, model in models.items():
        path = folder / f"{when}.jsonl"
        begun = folder / f"{when}_given.jsonl"
        evaluate.ask(path, model, held_out, TEMPERATURES[when], cfg, reward=last_number_reward)
        evaluate.ask(begun, model, held_out, [0.0], short, reward=last_number_reward,
                     encode_prompts=begun_prompts)
        files += [str(path), str(begun)]
    evaluate.main(files)


if __name__ == "__main__":
    main(sys.argv[1:])
