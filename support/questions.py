"""The questions of train_math.py: data sets, held-out questions, and the order of training."""
import csv
import io
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
    questions of the training part. ValueError: there is no training part, or a row has no question,
    or no answer that the default reward can use (with another reward, answers may be anything)."""
    splits = load_splits(cfg.dataset)
    if not splits.get("train"):
        counts = {name: len(rows) for name, rows in splits.items()}
        raise ValueError(f"there is no train part with rows; the rows of each part: {counts}")
    questions = splits.pop("train")
    held_out = splits.pop("test" if "test" in splits else "validation", None)
    if held_out is None:
        n = len(questions) - min(cfg.eval_size, len(questions) // 5)
        held_out = questions[n:]
        questions = questions[:n]
    if splits:
        tqdm.write(f"note: these parts of the data are not used: {', '.join(splits)}")
    check_columns(questions)
    check_columns(held_out)
    for i, row in enumerate(questions + held_out, 1):
        is_graded = reward not in (None, correctness_reward) or gold_answer(row.get("answer"))
        if not is_graded or not isinstance(row.get("question"), str) or not row["question"]:
            raise ValueError(f"row {i} needs a question, which is a text, and, unless you pass your"
                             f" own reward, an answer like '42' or '... #### 42'; it is {row}")
    seen = {tuple(row["question"].split()) for row in questions}  # white space does not count
    unseen = [row for row in held_out if tuple(row["question"].split()) not in seen]
    if len(unseen) < len(held_out):
        tqdm.write(f"note: {len(held_out) - len(unseen)} held-out questions are left out, because "
                   "they are training questions, too")
    return questions, unseen[:cfg.eval_size]


def check_columns(rows):
    """ValueError: these rows, which are dicts, do not all have the same columns."""
    for i, row in enumerate(rows, 1):
        if row.keys() != rows[0].keys():
            raise ValueError(f"row {i} has other columns than row 1: {list(row)}, {list(rows[0])}")


def load_splits(dataset):
    """{"train": rows, "test": rows, ...} of a file, of a folder of files, or from the hub."""
    path = Path(dataset)
    if dataset and path.is_file():
        return {"train": read_rows(path)}
    if dataset and path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in ENDINGS)
        if len({file.stem for file in files}) < len(files):
            raise ValueError(f"two of these files are one part: {[file.name for file in files]}")
        if files:
            return {file.stem: read_rows(file) for file in files}
    if path.suffix.lower() in (*ENDINGS, ".tsv", ".txt", ".xls", ".xlsx"):
        raise ValueError("there is no such file")
    splits = load_dataset(dataset, "main" if dataset == "openai/gsm8k" else None)
    return {name: list(rows) for name, rows in splits.items()}


def read_rows(path):
    """The rows of this file, as dicts. No value is converted: in a .csv file, all values are texts.
    ValueError: the ending is another one, the file is not in UTF-8, a row is not a dict, or a .csv
    file has a row with more or fewer cells than its header."""
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        raise ValueError(f"a dataset file must end in {', '.join(ENDINGS)}")
    if kind == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is not in UTF-8. Save it as 'CSV UTF-8' or as UTF-8 text") from None
    rows = []
    if kind == ".csv":
        if ";" in text.partition("\n")[0]:
            raise ValueError("its columns are separated by semicolons. Save it with commas")
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    elif text.startswith("["):  # a .json file may be one list
        rows = json.loads(text)
    else:
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        for i, line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {i} is not JSON ({error})") from None
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict) or None in row or (kind == ".csv" and None in row.values()):
            raise ValueError(f"row {i} does not have the form of the others: {row!r:.100}")
    return rows


def unused_questions(questions, cfg, steps):
    """All questions in a random order, then in another one, and so on, but not those of the first
    `steps` steps."""
    orders = (random.Random(f"{cfg.seed} {epoch}") for epoch in itertools.count())
    stream = itertools.chain.from_iterable(rng.sample(questions, len(questions)) for rng in orders)
    return itertools.islice(stream, steps * cfg.prompts_per_step, None)
