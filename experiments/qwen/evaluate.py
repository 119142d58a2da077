"""A model's answers to held-out questions: asks for them, keeps them, and tabulates accuracies.

    python -m experiments.qwen.evaluate after.jsonl --model MODEL --dataset FOLDER
    python -m experiments.qwen.evaluate before.jsonl after.jsonl ...

The first command asks MODEL the questions in FOLDER's test file and writes its answers to
after.jsonl, one per line. It takes --temperatures (default: 0, which is greedy, and 1) and all
flags of train_math.py. Temperatures that are in the file are not asked again. The second command
only prints a table of answers that are there. Each model is compared with the first one by a paired
test, so all files must hold answers to the same questions. --last_number takes the last number of a
response as its answer, whatever its format.
"""
import argparse
from pathlib import Path

import torch

import train_math
from common.intervals import accuracy_text, paired
from common.logs import read, write


def sample(model, tokenizer, questions, temperature, cfg):
    """One response to each question: (lists of token ids, texts)."""
    _, responses, texts, _ = train_math.sample(model, tokenizer, questions, 1, temperature, cfg)
    return responses, texts


def judge(questions, texts):
    """What is kept of each answer: "right" is strict accuracy, "flexible" is the last number."""
    golds = [row["answer"] for row in questions]
    strict = train_math.correctness_reward(None, texts, golds)
    flexible = train_math.correctness_reward(None, texts, golds, strict=False)
    kept = []
    for i, gold in enumerate(golds):
        gold = train_math.gold_answer(gold)
        right, last = bool(strict[i]), bool(flexible[i])
        kept.append({"question": i, "gold": gold, "right": right, "flexible": last})
    return kept


def missing(path, temperatures):
    """The temperatures at which the file has no answers yet."""
    return sorted(set(temperatures) - {row["temperature"] for row in read(path)})


def ask(path, name, questions, temperatures, cfg, judge=judge, sample=sample):
    """Adds the answers of a model to the file, at those temperatures that it lacks.

    name: hub id or folder of the model. judge(questions, texts) returns a dictionary for each
    answer. sample can be replaced, too. "tokens" counts the end token. "cut" says whether a
    response reached max_completion_length."""
    if not missing(path, temperatures):
        return
    with train_math.blame(f"--model {name}"):
        model, tokenizer = train_math.load(str(name), cfg.device)
    for temperature in missing(path, temperatures):
        torch.manual_seed(0)
        responses, texts = sample(model, tokenizer, questions, temperature, cfg)
        rows = read(path)
        for response, text, kept in zip(responses, texts, judge(questions, texts)):
            tokens = len(response)
            cut = tokens == cfg.max_completion_length
            row = {"temperature": temperature, **kept}
            rows.append({**row, "tokens": tokens, "cut": cut, "response": text})
        write(path, rows)
        asked = rows[-len(questions):]
        print(f"{path.stem}, temperature {temperature}: {accuracy_text(asked)} right")


# ---- the table -----------------------------------------------------------------------------------


def answers_at(rows, temperature):
    """The answers at one temperature, in the order of the questions."""
    rows = [row for row in rows if row["temperature"] == temperature]
    return sorted(rows, key=lambda row: row["question"])


def column(rows, temperature, name="right"):
    return [row[name] for row in answers_at(rows, temperature)]


def mean(values):
    return sum(values) / len(values)


def difference(before, after, temperature):
    """(the paired difference of two models with its 95% interval, McNemar's p), as texts."""
    d, (low, high), p = paired(column(before, temperature), column(after, temperature))
    return f"{d:+.1%} ({low:+.1%} to {high:+.1%})", f"{p:.2g}"


def table_line(name, rows, reference, temperature):
    """One line of the table. reference: the rows of the model to compare with, or None."""
    own = answers_at(rows, temperature)
    right = sum(row["right"] for row in own)
    versus = "-", "-"
    if reference:
        versus = difference(reference, rows, temperature)
    cells = [
        name,
        f"at temperature {temperature}" if temperature else "greedy",
        f"{right} of {len(own)}, {accuracy_text(own)}",
        f"{mean(column(rows, temperature, 'flexible')):.1%}",
        *versus,
        f"{mean(column(rows, temperature, 'cut')):.0%}",
        f"{mean(column(rows, temperature, 'tokens')):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(models, reference, title):
    """Markdown: models is {name: rows}; all are compared with the model named `reference`, which
    the table calls `title`."""
    lines = [
        f"| model | answers | right (95%) | by the last number | minus {title} (95%, paired) "
        "| McNemar p | cut | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    temperatures = {row["temperature"] for rows in models.values() for row in rows}
    for temperature in sorted(temperatures):
        for name, rows in models.items():
            other = None if name == reference else models.get(reference)
            lines.append(table_line(name, rows, other, temperature))
    return "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, help="answers; .jsonl")
    parser.add_argument("--model", help="hub id or folder: ask it, and keep its answers in FILE")
    parser.add_argument("--last_number", action="store_true", help="compare by the last number")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args, flags = parser.parse_known_args(argv)
    if args.model:
        cfg = train_math.parse_settings(flags)
        with train_math.blame(f"--dataset {cfg.dataset}"):
            _, questions = train_math.load_questions(cfg)
        cfg.rollout_rows = len(questions) * cfg.group_size  # all questions at once
        ask(args.files[0], args.model, questions, args.temperatures, cfg)
    models = {path.stem: read(path) for path in args.files}
    empty = [path for path in args.files if not models[path.stem]]
    if empty:
        parser.error(f"no answers in {empty[0]}")
    if args.last_number:
        for name, rows in models.items():
            models[name] = [row | {"right": row["flexible"]} for row in rows]
    print(table(models, args.files[0].stem, "the first"))


if __name__ == "__main__":
    main()
