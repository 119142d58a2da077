"""How often does a rollout contain several samples of the same next token?

    OMP_NUM_THREADS=1 python -m lesson.prefixes      repeats the first run of the lesson; one minute

A prefix is a question with the first tokens of a response. For each step, results/prefixes.jsonl
has the fraction of the prefixes with one sample, the fraction of the tokens whose prefix has at
least two, and the mean number of different responses in a group. A token is a character here, and
each response counts with an end token, also if it was cut.
"""
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

import train_math
from lesson import tiny
from tools.logs import write

RESULTS = Path(__file__).with_name("results")


def count(questions, texts):
    """The row of a rollout. texts: the responses, each to the question at the same place."""
    samples = Counter()
    for question, text in zip(questions, texts):
        for n in range(len(text) + 1):
            samples[question, text[:n]] += 1
    tokens = sum(samples.values())
    single = sum(n == 1 for n in samples.values())
    different = len(set(zip(questions, texts)))
    return {"prefixes_with_one_sample": single / len(samples),
            "tokens_with_company": (tokens - single) / tokens,
            "different_responses_per_group": different / len(set(questions))}


def main():
    torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
    folder = tiny.world(0)
    cfg = train_math.parse_settings([
        *tiny.FLAGS, *tiny.RANGES["gspo"], "--instruction", "", "--dataset",
        str(folder / "questions")])
    cfg = replace(cfg, output_dir=None)
    rows = []

    def reward(prompts, completions, **columns):
        rows.append({"step": len(rows) + 1, **count(prompts, completions)})
        return train_math.correctness_reward(prompts, completions, **columns)

    questions, _ = train_math.load_questions(cfg)
    model, tokenizer = train_math.load(folder / "model", "cpu")
    train_math.train(cfg, model, tokenizer, questions, reward=reward)
    write(RESULTS / "prefixes.jsonl", rows)
    print(rows[0], rows[-1], sep="\n")


if __name__ == "__main__":
    main()
