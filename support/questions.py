"""The questions of train_math.py: data sets, held-out questions, and the order of training."""
import csv
import io
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet
from datasets import load_dataset, load_from_disk
from tqdm.auto import tqdm

from support.rewards import correctness_reward, gold_answer

ENDINGS = ".jsonl", ".json", ".csv", ".parquet"
PARTS = {"train": "train", "training": "train", "test": "test", "validation": "validation",
         "valid": "validation", "val": "validation", "dev": "validation"}


def load_questions(cfg, reward=None):
    """(questions to train on, held-out questions), as lists of dicts. The test split is held out,
    or else the validation split, or else a random sample of the training part, which is the same
    for each --seed. ValueError: there is no training part, or a row cannot be used."""
    splits = load_splits(cfg.dataset)
    is_graded = reward not in (None, correctness_reward)
    if not splits.get("train"):
        raise ValueError(f"there is no train part with rows; it has the parts {list(splits)}")
    questions = splits.pop("train")
    name = "test" if "test" in splits else "validation"
    held_out = splits.pop(name, None)
    check_rows(questions, "train", is_graded)
    check_rows(held_out or [], name, is_graded)
    if held_out is None:
        n = min(cfg.eval_size, len(questions) // 5)
        order = random.Random(0).sample(range(len(questions)), len(questions))
        held_out = [questions[i] for i in sorted(order[:n])]
        questions = [questions[i] for i in sorted(order[n:])]
    if splits:
        tqdm.write(f"note: these parts of the data are not used: {', '.join(splits)}")
    seen = {tuple(row["question"].split()) for row in questions}  # white space does not count
    unseen = [row for row in held_out if tuple(row["question"].split()) not in seen]
    if len(unseen) < len(held_out):
        tqdm.write(f"note: {len(held_out) - len(unseen)} held-out questions are left out, because "
                   "they are training questions, too")
    held_out = unseen[:cfg.eval_size]
    n = len(held_out)
    text = f"note: {n} questions are held out"
    answers = Counter(str(row["answer"]).strip().casefold() for row in held_out if "answer" in row)
    for answer, count in answers.most_common(1):
        if 2 * count > n > 1:
            text += f". {answer!r:.60} is the answer to {count / n:.0%} of them"
    if n == 0:
        text += ", so nothing is evaluated"
    elif n < 12:  # a file of 60 rows has 12
        text += ". So few show little. Use a file of at least 60 rows, better of 500"
    tqdm.write(text)
    return questions, held_out


def check_rows(rows, part="train", is_graded=True):
    """ValueError: a row has no question, or other columns than the first row, or (unless a reward
    of your own grades it) no answer that the default reward can use."""
    for i, row in enumerate(rows, 1):
        if row.keys() != rows[0].keys():
            columns = row.keys() ^ rows[0].keys()
            raise ValueError(f"{part}: row {i} has other columns than row 1: {columns}")
        is_text = isinstance(row.get("question"), str) and row["question"]
        if not is_text or not (is_graded or gold_answer(row.get("answer"))):
            raise ValueError(f"{part}: row {i} needs a question, which is a text, and, without a "
                             f"reward of yours, an answer like '42' or '... #### 42'; it is {row}")


def load_splits(dataset):
    """{"train": rows, "test": rows, ...} of a file, of a folder of files, or from the hub. Files
    with the name of a part, such as train.csv, are read here, with messages that name the row. The
    package datasets reads folders that it has written, copies from the hub, and shards."""
    if not dataset:
        raise ValueError("it is empty")
    path = Path(dataset)
    if path.is_file():
        return {"train": read_rows(path)}
    if path.is_dir() and (files := part_files(path)):
        return {part: read_rows(file) for part, file in files.items()}
    if (path / "state.json").exists():
        return {"train": list(load_from_disk(dataset))}
    if not path.exists() and path.suffix.lower() in (*ENDINGS, ".tsv", ".txt", ".xls", ".xlsx"):
        raise ValueError("there is no such file")
    load = load_from_disk if (path / "dataset_dict.json").exists() else load_dataset
    splits = load(dataset, "main") if dataset == "openai/gsm8k" else load(dataset)
    return {name: list(rows) for name, rows in splits.items()}


def part_files(folder):
    """{"train": file, ...}: the files of this folder whose names are those of a part."""
    files = {}
    for file in sorted(folder.iterdir()):
        part = PARTS.get(file.stem.lower())
        if part and file.suffix.lower() in ENDINGS:
            if part in files:
                raise ValueError(f"{files[part].name} and {file.name} are the same part. Keep one")
            files[part] = file
    folders = {file.parent.name for file in folder.glob("*/*") if file.suffix.lower() in ENDINGS}
    if not files and len(folders - PARTS.keys()) > 1:
        raise ValueError(f"it holds several data sets. Add one of these folders: {sorted(folders)}")
    return files


def read_rows(path):
    """The rows of this file, as dicts. No value is converted: in a .csv file, all values are texts.
    ValueError: the file cannot be read, or its rows are not dicts with one value per column."""
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        raise ValueError(f"a dataset file must end in {', '.join(ENDINGS)}")
    try:
        if kind == ".parquet":
            unique_columns([(name, None) for name in pyarrow.parquet.read_schema(path).names])
            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            rows = text_rows(path.read_bytes().decode("utf-8-sig"), kind)
        for i, row in enumerate(rows, 1):
            is_short = kind == ".csv" and None in row.values()
            if not isinstance(row, dict) or None in row or is_short:
                raise ValueError(f"row {i} does not have the form of the others: {row!r:.100}")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not in UTF-8. Save it as 'CSV UTF-8' or UTF-8") from None
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path.name}: {error}") from None
    return rows


def text_rows(text, kind):
    """The rows of a .csv file, of one JSON list, or of lines of JSON."""
    if kind == ".csv":
        if ";" in text.partition("\n")[0]:
            raise ValueError("its columns are separated by semicolons. Save it with commas")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        unique_columns([(name, None) for name in reader.fieldnames or []])
        return list(reader)
    if text.lstrip().startswith("["):  # a .json file may be one list
        return json.loads(text, object_pairs_hook=unique_columns)
    rows = []
    for i, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                rows.append(json.loads(line, object_pairs_hook=unique_columns))
        except ValueError as error:
            reason = getattr(error, "msg", error)
            raise ValueError(f"line {i}: {reason}. A row is a JSON object on one line") from None
    return rows


def unique_columns(pairs):
    """A dict of these pairs. ValueError: two of them have one name."""
    columns = dict(pairs)
    if len(columns) < len(pairs):
        raise ValueError(f"two columns have one name: {[name for name, _ in pairs]}")
    return columns


def unused_questions(questions, cfg, steps):
    """The questions in one random order after the other, from the step after `steps` steps on."""
    orders = (random.Random(f"{cfg.seed} {epoch}") for epoch in itertools.count())
    stream = itertools.chain.from_iterable(rng.sample(questions, len(questions)) for rng in orders)
    return itertools.islice(stream, steps * cfg.prompts_per_step, None)
