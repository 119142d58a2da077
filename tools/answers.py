"""Tables that compare the answers of models to the same questions.

A file of answers has a row per response, with its question, its reward, and perhaps its correct
answer ("gold"), temperature, number ("sample"), and other numbers, such as its length in tokens.
tools/evaluate.py writes such files, and so does train_math.py (eval_0.jsonl and so on).
"""
import math
import sys
from statistics import fmean, pstdev, stdev

from support.metrics import wilson
from tools.logs import read

NO_METRICS = {"reward", "temperature", "sample", "gold"}
LABELS = 8  # if there are more different correct answers, they get no table of their own


def load_answers(path):
    """The rows of a file. SystemExit: it is empty, or a row of it is no answer."""
    rows = read(path)
    for row in rows or [None]:
        is_answer = isinstance(row, dict) and "question" in row
        if not is_answer or not isinstance(row.get("reward"), (int, float)):
            sys.exit(f"evaluate.py: {path} does not exist, is empty, or holds no answers. Each row "
                     f"needs a question, and a number as reward, but it is {row!r:.100}")
    return rows


def by_question(rows, temperature):
    """For each question, in the order of the file, the rows of its samples at one temperature."""
    samples = {}
    for row in rows:
        if row.get("temperature", 0.0) == temperature:
            samples.setdefault(row.get("sample", 0), []).append(row)
    whole = max(map(len, samples.values()), default=0)
    return list(zip(*[own for own in samples.values() if len(own) == whole]))


def mean_rewards(groups):
    return [fmean(row["reward"] for row in group) for group in groups]


def mean_text(values, form=".1%"):
    """The mean with its 95% interval, such as "73.8% (68.1% to 78.8%)": Wilson's interval if all
    values are 0 or 1, and otherwise the normal approximation."""
    n = len(values)
    mean = fmean(values)
    if set(values) <= {0, 1}:
        low, high = wilson(sum(values), n)
    elif n == 1:
        return f"{mean:{form}}"
    else:
        half = 1.96 * stdev(values) / math.sqrt(n)
        low, high = mean - half, mean + half
        if 0 <= min(values) and max(values) <= 1:
            low, high = max(0, low), min(1, high)
    return f"{mean:{form}} ({low:{form}} to {high:{form}})"


def gain_text(before, after, form=".1%"):
    """The mean of the paired differences with its 95% interval (normal approximation)."""
    differences = [y - x for x, y in zip(before, after, strict=True)]
    mean = fmean(differences)
    half = 1.96 * pstdev(differences) / math.sqrt(len(differences))
    return f"{mean:+{form}} ({mean - half:+{form}} to {mean + half:+{form}})"


# ---- tables in Markdown --------------------------------------------------------------------------

# models: {name: its answers at one temperature, from by_question}. The first one is the reference.


def markdown(titles, rows):
    """A table. Each row has a cell for each title."""
    lines = [f"| {' | '.join(map(str, row))} |\n" for row in (titles, *rows)]
    lines.insert(1, "|---" * len(titles) + "|\n")
    return "".join(lines)


def check_same_questions(models):
    """SystemExit: two models answered different questions."""
    asked = {}
    for name, groups in models.items():
        asked[name] = [(group[0]["question"], group[0].get("gold")) for group in groups]
    first, *others = asked
    for name in others:
        if asked[name] != asked[first]:
            n, m = len(asked[first]), len(asked[name])
            sys.exit(f"evaluate.py: {first} has answers to {n} questions, and {name} to {m} other "
                     "ones, or in another order, or with other correct answers")


def is_graded(models):
    """Whether some reward is neither 0 nor 1."""
    rewards = {row["reward"] for groups in models.values() for group in groups for row in group}
    return not rewards <= {0, 1}


def mean_cell(groups, metric):
    values = [row.get(metric) for group in groups for row in group]
    are_numbers = all(isinstance(value, (int, float)) for value in values)
    return f"{fmean(values):.3g}" if are_numbers else "-"


def accuracy_table(models, temperature):
    """The mean reward of each model, its gain, and the mean of each other number."""
    title, form = ("mean reward", ".3f") if is_graded(models) else ("accuracy", ".1%")
    first, *_ = models
    metrics = []
    for metric in models[first][0][0].keys() - NO_METRICS:
        if any(mean_cell(groups, metric) != "-" for groups in models.values()):
            metrics.append(metric)
    metrics.sort()
    lines = []
    for name, groups in models.items():
        rewards = mean_rewards(groups)
        gain = gain_text(mean_rewards(models[first]), rewards, form) if name != first else "-"
        others = [mean_cell(groups, metric) for metric in metrics]
        lines.append([name, mean_text(rewards, form), gain, *others])
    how = f"temperature {temperature}" if temperature else "greedy"
    titles = [f"{how}, {len(groups)} questions", f"{title} (95%)", f"minus {first} (95%, paired)"]
    return markdown(titles + metrics, lines)


def label_table(models):
    """The accuracy for each correct answer, or "" if there are too many different ones."""
    first, *_ = models.values()
    labels = {str(group[0].get("gold")) for group in first}
    if not 1 < len(labels) <= min(LABELS, len(first) / 2):
        return ""
    lines = []
    for label in sorted(labels):
        cells = []
        for groups in models.values():
            own = [group for group in groups if str(group[0].get("gold")) == label]
            cells.append(f"{sum(mean_rewards(own)):.3g} of {len(own)}")
        lines.append([label, *cells])
    return markdown(["correct answer", *models], lines)


def pass_at(k, correct, n):
    """An unbiased estimate, from n samples, of the probability that one of k samples is correct:
    1 - C(n - correct, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def pass_table(models):
    """pass@k for k = 1, 2, 4, ... samples, and the gains. "" for one sample or graded rewards."""
    n = min(len(groups[0]) for groups in models.values())
    if n == 1 or is_graded(models):
        return ""
    sizes = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
    lines = []
    first = None
    for name, groups in models.items():
        correct = [int(sum(row["reward"] for row in group[:n])) for group in groups]
        values = [[pass_at(k, c, n) for c in correct] for k in sizes]
        lines.append([name, *map(mean_text, values)])
        if first:
            lines.append([f"{name}, gain", *map(gain_text, first, values)])
        first = first or values
    return markdown([f"{n} samples", *(f"pass@{k}" for k in sizes)], lines)


def tables(files):
    """All tables of {name of a model: its rows}. SystemExit: they answer different questions."""
    temperatures = {row.get("temperature", 0.0) for rows in files.values() for row in rows}
    found = []
    for temperature in sorted(temperatures):
        models = {name: by_question(rows, temperature) for name, rows in files.items()}
        models = {name: groups for name, groups in models.items() if groups}
        check_same_questions(models)
        found += [accuracy_table(models, temperature), label_table(models), pass_table(models)]
    return "\n".join(filter(None, found))
