"""The task of train_math.py: questions, their answers, and rewards. By default, this is GSM8K."""
import csv
import io
import json
import random
import re
from decimal import Decimal
from pathlib import Path

import torch
from datasets import load_dataset

ENDINGS = ".jsonl", ".json", ".csv"  # what load_rows reads
# Not glued to a word, as in v4; after a number, a minus is an operator.
NUMBER = r"(?<![\w.,)])-?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"


# ---- answers and rewards -------------------------------------------------------------------------


def correctness_reward(prompts, completions, answer, strict=True, **columns):
    """1.0 for a completion that gives the number of the answer, else 0.0. Works in TRL, too."""
    golds = [gold_answer(gold) for gold in answer]
    if None in golds:  # a response without a number would equal it
        raise ValueError(f"the answer {answer[golds.index(None)]!r:.100} is not a number")
    return [float(extract_answer(text, strict) == gold) for text, gold in zip(completions, golds)]


def extract_answer(completion, strict=True):
    r"""The answer of a completion, as a canonical number such as '-1234.5', or None.

    completion: a text, or a list of chat messages, as TRL passes them. strict: the only number in
    the last \boxed{}, or else after the last '####' on its line, among any words and units. Two
    numbers, as in 3/4 or '18 or 19', are no answer. Otherwise: the last number of the text."""
    text = completion[-1]["content"] if isinstance(completion, list) else str(completion)
    text = text.rpartition("</think>")[2].replace("−", "-").replace("{,}", ",")
    text = re.sub(r"\\(?:text|math)[a-z]*\s*{([^{}]*)}", r" \1", text)
    if strict:
        places = re.findall(r"\\boxed\s*{([^{}]*)}", text) or re.findall(r"####(.*)", text)
        text = places[-1] if places else ""
    text = re.sub(r"[*_]", " ", re.sub(r"[\\$€£]", "", text))  # **$18** but not 2*9
    numbers = re.findall(NUMBER, text)
    if not numbers or strict and len(numbers) > 1:
        return None
    number = numbers[-1].replace(",", "")
    value = Decimal(number).normalize() + 0  # 18.0 is 18, and -0 is 0
    return f"{value:f}"


def gold_answer(answer):
    r"""The number in a dataset's answer: '... #### 42', '... \boxed{42}' or 42. Otherwise None."""
    text = str(answer)
    return extract_answer(text) or extract_answer(f"#### {' '.join(text.split())}")


def score(reward, rollout, cfg, step=None, **more):
    """(rewards (B,), metrics): the rewards of the responses, and what the reward has reported.

    As in TRL, the reward gets the prompts, the completions, all columns of the questions, and
    completion_ids, cut (whether a response reached the length limit), step (None in evaluations)
    and log_metric(name, value). These values go into the row of the step."""
    metrics = {}
    columns = {name: [row[name] for row in rollout.questions] for name in rollout.questions[0]}
    cut = [len(response) == cfg.max_completion_length for response in rollout.responses]
    values = reward(
        prompts=columns["question"],
        completions=rollout.texts,
        completion_ids=rollout.responses,
        cut=cut,
        step=step,
        log_metric=metrics.__setitem__,
        **columns,
        **more,
    )
    rewards = torch.tensor([float(value) for value in values])
    if len(rewards) != len(cut):
        raise ValueError(f"the reward returned {len(rewards)} values for {len(cut)} completions")
    return rewards, metrics


# ---- questions -----------------------------------------------------------------------------------


def load_questions(cfg, reward=correctness_reward):
    """(questions to train on, held-out questions), as lists of dicts. The test split is held out,
    or else the validation split, or else a random fifth, which is the same for each --seed.
    ValueError: a row cannot be used."""
    splits = load_splits(cfg.dataset)
    questions = splits["train"]
    held_out = splits.get("test") or splits.get("validation")
    if held_out is None:
        n = min(cfg.eval_size, len(questions) // 5)
        order = random.Random(0).sample(range(len(questions)), len(questions))
        held_out = [questions[i] for i in sorted(order[:n])]
        questions = [questions[i] for i in sorted(order[n:])]
    for row in questions + held_out:
        is_usable = reward is not correctness_reward or gold_answer(row.get("answer"))
        if not row.get("question") or not is_usable:
            raise ValueError("a row needs a question and, without a reward of yours, an answer "
                             f"such as '42' or '... #### 42': {row}")
    seen = {row["question"] for row in questions}
    held_out = [row for row in held_out if row["question"] not in seen]
    return questions, held_out[:cfg.eval_size]


def load_splits(dataset):
    """{"train": rows, "test": rows, ...} of one file, of a folder with train.csv, test.csv or the
    like, or of anything that load_dataset takes."""
    path = Path(dataset)
    if path.suffix in ENDINGS:
        return {"train": load_rows(path)}
    files = [file for file in path.glob("*.*") if file.suffix in ENDINGS]
    if files:
        return {file.stem: load_rows(file) for file in files}
    splits = load_dataset(dataset, "main") if dataset == "openai/gsm8k" else load_dataset(dataset)
    return {name: list(rows) for name, rows in splits.items()}


def load_rows(path):
    """The rows of this file, as dicts. In a .csv file, all values stay texts, such as 007 or NA."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text, newline="")))
    if path.suffix == ".json":
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]
