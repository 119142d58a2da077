"""The task of train_math.py: questions, their answers, and rewards. By default, this is GSM8K."""
import csv
import io
import json
import random
import re
from pathlib import Path

import torch
from datasets import load_dataset

ENDINGS = ".jsonl", ".json", ".csv"  # what load_rows reads
# A comma belongs to a number only between groups of three digits. v4 and 1e5 are no numbers.
NUMBER = (r"(?<![A-Za-z0-9.])(?:-\s*)?"
          r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
          r"(?!\.?[0-9]*[A-Za-z]+[0-9])")


class Refused(ValueError):
    """An input or a setting cannot be used. The script ends with this text, without a traceback."""


def correctness_reward(prompts, completions, answer, strict=True, **columns):
    """1.0 for a completion that gives the number of the answer, else 0.0. Works in TRL, too."""
    golds = [gold_answer(gold) for gold in answer]
    if None in golds:  # a response without a number would equal it
        raise ValueError(f"the answer {answer[golds.index(None)]!r:.100} is not a number")
    return [float(extract_answer(text, strict) == gold) for text, gold in zip(completions, golds)]


def extract_answer(completion, strict=True):
    r"""The answer of a completion, as a canonical number such as '-1234.5', or None.

    completion: a text, or a list of chat messages, as TRL passes them. strict: the only number in
    the last \boxed{} or, without one, after the last '####' on its line; neither two numbers, as in
    3/4 or '18 or 19', nor 1,5 or 1e5 are an answer. Otherwise: the last number of the text."""
    text = completion[-1]["content"] if isinstance(completion, list) else str(completion)
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    if strict:
        found = re.fullmatch(rf"\D*?({NUMBER})\D*", plain(answer_place(text)))
        return canonical(found[1]) if found else None
    numbers = re.findall(NUMBER, plain(text))
    return canonical(numbers[-1]) if numbers else None


def gold_answer(answer):
    r"""The number that is a dataset's answer, '... #### 42', '\boxed{42}', '$42' or 42, or None."""
    text = str(answer)
    if "####" in text or r"\boxed" in text:
        text = answer_place(text)
    text = plain(text).strip().removesuffix("%").strip()
    return canonical(text) if re.fullmatch(NUMBER, text) else None


def answer_place(text):
    r"""The content of the last \boxed{} or, without one, the line after the last '####'."""
    if r"\boxed" not in text:
        return text.rpartition("####")[2].partition("\n")[0] if "####" in text else ""
    content = re.match(r"\s*{((?:[^{}]|{[^{}]*})*)}", text.rpartition(r"\boxed")[2])
    return content[1] if content else ""


def plain(text):
    """The text without LaTeX spaces and currency signs. After a number, a minus is an operator."""
    text = re.sub(r"\{,\}|\\,|,\\!", ",", re.sub("[−–]", "-", text))
    text = re.sub(r"[\\$€£]", "", text)
    return re.sub(r"(?<=[0-9)])[^\S\n]*-", " ", text)


def canonical(number):  # '1,080.50' as '1080.5', and '-0' as '0'
    sign = "-" if number.startswith("-") else ""
    whole, _, decimals = number.lstrip("- ").replace(",", "").partition(".")
    value = (whole.lstrip("0") or "0") + f".{decimals}".rstrip("0").rstrip(".")
    return value if value == "0" else sign + value


def score(reward, rollout, cfg, step=None, **more):
    """(rewards (B,), metrics): the rewards of the responses, and what the reward has reported.
    As in TRL, the reward gets the prompts, completions, completion_ids and all columns, and also
    cut (whether a response reached the length limit), step (0 in the trial, None in evaluations)
    and log_metric(name, value), whose values go into the row of the step."""
    metrics = {}
    columns = {name: [row[name] for row in rollout.questions] for name in rollout.questions[0]}
    cut = [len(response) == cfg.max_completion_length for response in rollout.responses]
    values = list(reward(prompts=columns["question"], completions=[*rollout.texts], **columns,
                         completion_ids=rollout.responses, cut=cut, step=step,
                         log_metric=metrics.__setitem__, **more))
    rewards = torch.tensor([float(value) for value in values])
    if len(rewards) != len(cut) or not rewards.isfinite().all():
        raise Refused(f"the reward returned {values!r:.200}, but a list of {len(cut)} finite "
                      "numbers is needed, one for each completion")
    return rewards, metrics


def load_questions(cfg, reward=correctness_reward):
    """(questions to train on, held-out questions), as lists of dicts. The test split is held out,
    or else the validation split, or else a random fifth, which is the same for each --seed.
    Refused: there are no questions to train on, or a row cannot be used."""
    splits = load_splits(cfg.dataset)
    questions = splits.get("train")
    if not questions:
        raise Refused(f"{cfg.dataset} has no rows to train on. Its splits: {list(splits)}")
    held_out = splits.get("test") or splits.get("validation")
    if held_out is None:
        n = min(cfg.eval_size, len(questions) // 5)
        order = random.Random(0).sample(range(len(questions)), len(questions))
        held_out = [questions[i] for i in sorted(order[:n])]
        questions = [questions[i] for i in sorted(order[n:])]
    for row in questions + (held_out if cfg.eval_size > 0 else []):
        if not is_usable(row, questions[0], reward):
            raise Refused("a row needs a question, an answer that is not empty, the columns of the "
                          "first row and, without a reward of yours, one number as its answer, such"
                          f" as '42' or '... #### 42'. This one cannot be used: {row}")
    seen = {tuple(row["question"].split()) for row in questions}  # white space does not count
    held_out = [row for row in held_out if tuple(row["question"].split()) not in seen]
    return questions, held_out[:cfg.eval_size]


def is_usable(row, first, reward):
    """Whether this row has a question, the columns of the first row, and a fitting answer."""
    if not isinstance(row, dict) or row.keys() != first.keys():
        return False
    if reward is correctness_reward and gold_answer(row.get("answer")) is None:
        return False
    answer = row.get("answer", "not needed")
    has_answer = answer is not None and str(answer).strip()
    return has_answer and isinstance(row.get("question"), str) and row["question"].strip()


def load_splits(dataset):
    """{"train": rows, "test": rows, ...} of a file, a folder with train.csv, or load_dataset."""
    path = Path(dataset)
    if path.suffix.lower() in ENDINGS:
        return {"train": load_rows(path)}
    splits = {}
    for file in sorted(path.glob("*.*")):
        if file.suffix.lower() in ENDINGS and file.stem in ("train", "test", "validation"):
            splits.setdefault(file.stem, []).extend(load_rows(file))
    if splits:
        return splits
    splits = load_dataset(dataset, "main") if dataset == "openai/gsm8k" else load_dataset(dataset)
    return {name: list(rows) for name, rows in splits.items()}


def load_rows(path):
    """The rows of this .csv, .json or .jsonl file, as dicts. In a .csv file, all values stay texts,
    such as 007 or NA. Refused: a line is damaged, or a row has more or fewer cells than columns."""
    path = Path(path)
    rows = []
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            lines = [cells for cells in csv.reader(io.StringIO(text), strict=True) if cells]
            for cells in lines[1:]:
                row = dict(zip(lines[0], cells))
                if not len(row) == len(cells) == len(lines[0]):
                    raise ValueError(f"the columns are {lines[0]}, and a row is {cells}")
                rows.append(row)
        elif text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            for line in filter(str.strip, text.split("\n")):
                rows.append(json.loads(line))
    except (csv.Error, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
    return rows
