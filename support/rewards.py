"""The rewards of train_math.py: calling a reward function, and the default one."""
import copy
import math
import re
import traceback

import torch

TAKEN = {  # the other names in the rows of a log, in evaluations after "eval_"
    "step", "settings", "notes", "reward", "reward_interval", "last_number", "last_number_interval",
    "questions", "results", "response_length", "cut", "equal_reward_groups", "entropy",
    "sampler_gap", "loss", "grad_norm", "clip_fraction", "log_ratio_first_max", "log_ratio_mean",
    "log_ratio_std", "seconds", "seconds_rollout"}


class RewardError(ValueError):
    """The reward function raised an exception, or returned something that is not a reward."""


def score(reward, questions, texts, **more):
    """The reward of each text, (B,). questions: the row of the question of each text.

    As in TRL, the reward function gets all columns of the questions, and the keywords `more`. These
    are copies, which it may change. RewardError: it raised an exception, or did not return one
    finite number per text."""
    name = getattr(reward, "__qualname__", type(reward).__name__)
    columns = {column: [copy.deepcopy(row[column]) for row in questions] for column in questions[0]}
    try:
        returned = reward(prompts=[row["question"] for row in questions], completions=list(texts),
                          **columns, **more)
    except Exception as error:
        lines = traceback.extract_tb(error.__traceback__)[1:2]  # where in the reward function
        place = "".join(f" in {line.filename}, line {line.lineno}" for line in lines)
        raise RewardError(f"the reward {name} raised {error!r}{place}") from error
    rewards = []
    if not isinstance(returned, (str, dict, set)):  # these have no numbers, or no order
        try:
            rewards = [float(value) for value in returned]
        except (TypeError, ValueError):
            pass
    if len(rewards) != len(texts) or not all(map(math.isfinite, rewards)):
        raise RewardError(f"the reward {name} returned {returned!r:.200}, but a list of "
                          f"{len(texts)} finite numbers is needed, one for each completion")
    return torch.tensor(rewards, dtype=torch.float32)


def score_rollout(reward, rollout, cfg, step=None):
    """(rewards (B,), metrics): the rewards of a Rollout, and what the reward has reported.

    Besides what `score` gives it, the reward gets completion_ids (the token ids of each response),
    cut (whether a response reached the length limit), step (None in the trial and in evaluations),
    and log_metric(name, value), as in TRL: the values, which may be lists, go into the row of the
    step. It may be called until the step ends. ValueError: the name is taken."""
    metrics = {}

    def log_metric(name, value):
        if name in TAKEN or name.startswith("eval_"):
            raise ValueError(f"log_metric: the name {name} is taken")
        metrics[name] = value

    cut = [len(response) == cfg.max_completion_length for response in rollout.responses]
    rewards = score(reward, rollout.questions, rollout.texts, cut=cut, step=step,
                    completion_ids=copy.deepcopy(rollout.responses), log_metric=log_metric)
    return rewards, metrics


def correctness_reward(prompts, completions, answer, strict=True, **columns):
    """1.0 for a completion that gives the number of the answer, else 0.0. Works in TRL, too."""
    rewards = []
    for completion, gold in zip(completions, answer):
        expected = gold_answer(gold) or "no number"
        rewards.append(float(extract_answer(completion, strict) == expected))
    return rewards


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
        # What must not follow: 18:30, 18/2, 1e-5, 2\pi, 5 + 3, 42 000, 7!}
        more = (r"[.,:/^]?[0-9]|[eE][-+]?[0-9]|\s*\\(?!%|text|[, ][^0-9])"
                r"|[ \t]*+[-+/^]?[ \t]*+[0-9]|![ \t]*+}")
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
