"""What can the starting model of the small world do? It is asked again without any training.

    python -m evidence.tiny.starting_model      a minute on one core

The starting model of the lesson's world 0 answers each of the 175 held-out questions four times at
each of three temperatures. A response of at least 40 tokens is written step by step, and a shorter
one is a guess. results/tiny/starting_model.jsonl.gz has a row per response, and starting_model.md
the table.
"""
from dataclasses import replace
from pathlib import Path

import torch

import train_math
from lesson import tiny
from tools.logs import accuracy_text, read, write

RESULTS = Path(__file__).parents[1] / "results" / "tiny"
LOG = RESULTS / "starting_model.jsonl.gz"
TEMPERATURES = 1.0, 0.6, 0.3
SAMPLES = 4
STEP_BY_STEP = 40  # tokens


def measure():
    """A row for each response."""
    torch.set_num_threads(1)
    _, questions = tiny.questions()
    cfg = train_math.parse_settings([*tiny.FLAGS, "--instruction", ""])
    cfg = replace(cfg, rollout_rows=len(questions))
    model, tokenizer = train_math.load(str(tiny.world(0) / "model"), "cpu")
    rows = []
    for temperature in TEMPERATURES:
        for seed in range(SAMPLES):
            torch.manual_seed(seed)
            found = train_math.evaluate(model, tokenizer, questions, cfg, temperature=temperature)
            rows += [{"temperature": temperature, "seed": seed, "question": i,
                      "reward": result["reward"], "tokens": result["tokens"]}
                     for i, result in enumerate(found["eval_results"])]
    return rows


def table(rows):
    lines = ["| temperature | all responses: accuracy (95%) | written step by step | their "
             "accuracy (95%) | accuracy of the others (95%) |", "|---|---|---|---|---|"]
    for temperature in TEMPERATURES:
        own = [row for row in rows if row["temperature"] == temperature]
        written = [row["reward"] for row in own if row["tokens"] >= STEP_BY_STEP]
        guessed = [row["reward"] for row in own if row["tokens"] < STEP_BY_STEP]
        every = [row["reward"] for row in own]
        lines.append(f"| {temperature} | {accuracy_text(every)} | {len(written)} of {len(own)} | "
                     f"{accuracy_text(written)} | {accuracy_text(guessed)} |")
    return "\n".join(lines) + "\n"


def main():
    write(LOG, measure())
    text = table(read(LOG))
    LOG.with_name("starting_model.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
