"""The questions of train_math.py: data sets, their order, calling the reward, and answers.

A new format of data goes into load_questions, and a new form of an answer into extract_answer. A
reward for another task needs nothing from this file: see train_math.main.
"""
import itertools
import math
import random
import re
import traceback
from pathlib import Path

import torch
from datasets import load_dataset
from tqdm.auto import tqdm

FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


# ---- data sets -----------------------------------------------------------------------------------


def load_questions(cfg, has_own_reward=False):
    """(questions to train on, held-out questions), as lists of dicts.

    The test split is held out. If there is none, the validation split is held out, or else the last
    questions of the training part. Held-out questions that are also in the training part are left
    out. ValueError: there is no training part, or a row has no question, or it has no answer that
    the default reward can use and has_own_reward is false."""
    kind = FILE_KINDS.get(Path(cfg.dataset).suffix.lower())
    if kind:
        splits = load_dataset(kind, data_files=cfg.dataset)
    elif Path(cfg.dataset).is_file():
        raise ValueError(f"a dataset file must end in {', '.join(FILE_KINDS)}")
    else:
        splits = load_dataset(cfg.dataset, "main" if cfg.dataset == "openai/gsm8k" else None)
    if "train" not in splits:
        raise ValueError(f"there is no train part, only {', '.join(splits)}")
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
        is_graded = has_own_reward or gold_answer(row.get("answer"))
        if not is_graded or not isinstance(row.get("question"), str):
            raise ValueError(f"row {i} needs a question, which is a text, and, unless you pass your"
                             f" own reward, an answer like '42' or '... #### 42'; it is {row}")
    seen = {row["question"] for row in questions}
    unseen = [row for row in held_out if row["question"] not in seen]
    if len(unseen) < len(held_out):
        tqdm.write(f"note: {len(held_out) - len(unseen)} held-out questions are left out, because "
                   "they are training questions, too")
    return questions, unseen[:cfg.eval_size]


def shuffled(questions, seed):
    """All questions in a random order, then all of them in another order, without end."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(questions, len(questions))


# ---- rewards and answers -------------------------------------------------------------------------


class RewardError(Exception):
    """The reward function raised an exception, which is the cause of this one."""


def score(reward, questions, texts, **more):
    """The reward of each text, (B,). The reward function gets all columns of the questions, as in
    TRL. RewardError: it raised an exception, or did not return one finite number per text."""
    name = getattr(reward, "__qualname__", type(reward).__name__)
    repeated = [row for row in questions for _ in range(len(texts) // len(questions))]
    columns = {column: [row[column] for row in repeated] for column in repeated[0]}
    try:
        returned = reward(prompts=columns["question"], completions=texts, **columns, **more)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardError(f"the reward {name} raised {error!r} in {place.filename}, line "
                          f"{place.lineno}") from error
    try:
        rewards = [] if isinstance(returned, (str, dict)) else [float(value) for value in returned]
    except (TypeError, ValueError):
        rewards = []
    if len(rewards) != len(texts) or not all(map(math.isfinite, rewards)):
        raise RewardError(f"the reward {name} returned {returned!r:.200}, but a list of "
                          f"{len(texts)} finite numbers is needed, one for each completion")
    return torch.tensor(rewards, dtype=torch.float32)


def extract_answer(completion, strict=True):
    r"""The answer of a completion, as a canonical number such as '-1234.5', or None.

    completion: a text, or a list of chat messages, as TRL passes them. strict: the number after the
    last '####' or in the last '\boxed{}', whichever comes last; otherwise the last number. Commas,
    $, %, **, \text{}, a final period, a leading + or 0, and decimals as in 18.0 make no
    difference."""
    if isinstance(completion, list):
        completion = completion[-1]["content"]
    text = str(completion)
    number = r"(-?)([0-9]+)(\.[0-9]+)?"
    if strict:
        _, *marked = re.split(r"#{4,}|\\boxed *{", text)
        if not marked:
            return None
        text = marked[-1]
        more = r"[.,:/^]?[0-9]|[eE][-+]?[0-9]|\s*\\(?!%|text|[, ][^0-9])"  # 18:30, 18/2, 1e-5, 2\pi
        number = rf"\A[ \t+]*(?:\\text[a-z]*{{[ \t+]*)?{number}(?!{more})"
    text = re.sub(r"\\?\$", "", text).replace("−", "-").replace("*", " ")
    thousands = r"(?<=[0-9])(,|\{,\}|\\,|,\\!)(?=[0-9]{3}(?![0-9]))"
    text = re.sub(thousands, "", text)                    # 1,234 -> 1234
    text = re.sub(r"(?<=[0-9])-", " ", text)              # the last number of 20-18 is 18
    text = re.sub(r"(?<![0-9.])\.(?=[0-9])", "0.", text)  # .5 -> 0.5
    found = re.findall(number, text)
    if not found:
        return None
    sign, whole, decimals = found[-1]
    value = (whole.lstrip("0") or "0") + decimals.rstrip("0").rstrip(".")
    return value if value == "0" else sign + value


def gold_answer(answer):
    r"""The number in a dataset's answer: '... #### 42', '... \boxed{42}' or 42. Otherwise None."""
    plain = r"\A\s*+([-−+$]*[0-9,]*+(\.[0-9]+)?%?)\s*\Z"  # *+ does not backtrack: linear time
    return extract_answer(re.sub(plain, r"#### \1", str(answer)))
