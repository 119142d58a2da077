"""The questions of train_math.py: reading data sets, held-out questions, and the order of training.

A new format of data goes into load_splits or read_rows.
"""
import csv
import itertools
import json
import random
from pathlib import Path

import pyarrow.parquet
from datasets import load_dataset
from tqdm.auto import tqdm

from support.rewards import correctness_reward, gold_answer

ENDINGS = ".jsonl", ".json", ".csv", ".parquet"


# ---- data sets -----------------------------------------------------------------------------------


def load_questions(cfg, reward=None):
    """(questions to train on, held-out questions), as lists of dicts.

    The test split is held out. If there is none, the validation split is held out, or else the last
    questions of the training part. Held-out questions that are also in the training part are left
    out. ValueError: there is no training part, or a row has no question, or it has no answer that
    the default reward can use (with another reward, answers may be anything)."""
    splits = load_splits(cfg.dataset)
    if not splits.get("train"):
        raise ValueError(f"there is no train part with rows, only {', '.join(splits) or 'nothing'}")
    questions = list(splits["train"])
    if "test" in splits:
        held_out = list(splits["test"])
    elif "validation" in splits:
        held_out = list(splits["validation"])
    else:
        n = len(questions) - min(cfg.eval_size, len(questions) // 5)
        held_out = questions[n:]
        del questions[n:]
    for i, row in enumerate(questions + held_out, 1):
        is_graded = reward not in (None, correctness_reward) or gold_answer(row.get("answer"))
        if not is_graded or not isinstance(row.get("question"), str) or not row["question"]:
            raise ValueError(f"row {i} needs a question, which is a text, and, unless you pass your"
                             f" own reward, an answer like '42' or '... #### 42'; it is {row}")
    seen = {row["question"] for row in questions}
    unseen = [row for row in held_out if row["question"] not in seen]
    if len(unseen) < len(held_out):
        tqdm.write(f"note: {len(held_out) - len(unseen)} held-out questions are left out, because "
                   "they are training questions, too")
    return questions, unseen[:cfg.eval_size]


def load_splits(dataset):
    """{"train": rows, "test": rows, ...} of a file, of a folder of files, or from the hub."""
    path = Path(dataset)
    if dataset and path.is_file():
        return {"train": read_rows(path)}
    if dataset and path.is_dir():
        files = {file.stem: file for file in path.iterdir() if file.suffix.lower() in ENDINGS}
        if files:
            return {name: read_rows(file) for name, file in files.items()}
    if path.suffix.lower() in ENDINGS:
        raise ValueError("there is no such file")
    splits = load_dataset(dataset, "main" if dataset == "openai/gsm8k" else None)
    return {name: list(rows) for name, rows in splits.items()}


def read_rows(path):
    """The rows of this file, as dicts. No value is converted: in a .csv file, all values are texts.

    ValueError: the ending is another one, or a row is not a dict."""
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        raise ValueError(f"a dataset file must end in {', '.join(ENDINGS)}")
    if kind == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    rows = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        if kind == ".csv":
            rows = list(csv.DictReader(file, strict=True))
        elif file.read(1) == "[":  # a .json file may be one list
            file.seek(0)
            rows = json.load(file)
        else:
            file.seek(0)
            for i, line in enumerate(file, 1):
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"line {i} is not JSON ({error})") from None
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict) or None in row:  # None: a cell more than in the header
            raise ValueError(f"row {i} does not have the form of the others: {row!r:.100}")
    return rows


def shuffled(questions, seed):
    """All questions in a random order, then all of them in another order, without end."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(questions, len(questions))
