"""Tables that compare the answers of models to the same questions.

A file of answers has a row per response, with its question, its reward and perhaps its temperature
and the number of its sample. tools/evaluate.py writes such files, and so does train_math.py
(eval_0.jsonl and so on). Models are compared question by question, whatever the order of the rows.
"""
import math
import sys
from statistics import fmean

from support.task import extract_answer
from tools.logs import markdown, mean_text, paired, read


def load_answers(path):
    """The rows of a file, with the answer of each response ("extracted") for the majority.

    SystemExit: there is no row, or a row has no question or no reward."""
    rows = read(path)
    if not rows:
        sys.exit(f"evaluate.py: {path} {'has no answers' if path.exists() else 'does not exist'}")
    for i, row in enumerate(rows, 1):
        is_row = isinstance(row, dict) and isinstance(row.get("question"), (str, int))
        value = row.get("reward") if is_row else None
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            sys.exit(f"evaluate.py: row {i} of {path} needs a question, and a number as reward. It "
                     f"is {row!r:.100}")
        if "extracted" not in row:
            text = row.get("response") or ""
            is_number = "last_number" in row  # the default reward has read it
            row["extracted"] = extract_answer(text) if is_number else text
    return rows


def temperatures_of(*files):
    return sorted({row.get("temperature", 0.0) for rows in files for row in rows})


def by_question(rows, temperature):
    """{(question, its number among equal ones): its samples} at one temperature, sorted."""
    groups = {}
    seen = {}
    for row in rows:
        if row.get("temperature", 0.0) == temperature:
            sample = row["question"], row.get("sample", 0)
            seen[sample] = seen.get(sample, -1) + 1
            groups.setdefault((row["question"], seen[sample]), []).append(row)
    return dict(sorted(groups.items()))


def column(rows, temperature, name="reward"):
    """The mean of a column over the samples of each question, in the order of the questions."""
    groups = by_question(rows, temperature).values()
    return [fmean([row[name] for row in group]) for group in groups]


def check_same_questions(before, after, temperature):
    """ValueError: these rows answer different questions."""
    groups, others = by_question(before, temperature), by_question(after, temperature)
    common = groups.keys() & others.keys()
    if len(common) < max(len(groups), len(others)):
        raise ValueError(f"temperature {temperature}: the models answered different questions, "
                         f"{len(groups)} and {len(others)}, of which {len(common)} are the same")
    for key in common:
        golds = {str(side[key][0].get("gold")) for side in (groups, others)} - {"None"}
        if len(golds) > 1:
            raise ValueError(f"temperature {temperature}: the models answered different questions: "
                             f"{key[0]!r:.80} has the gold answers {' and '.join(sorted(golds))}")


def gain(before, after, form=".1%"):
    """The paired difference of two lists with its 95% interval, as a text."""
    d, (low, high), _ = paired(before, after)
    return f"{d:+{form}} ({low:+{form}} to {high:+{form}})"


def difference(before, after, temperature, form=".1%"):
    """(the paired difference of two models with its 95% interval, McNemar's p), as texts.

    McNemar's test needs one answer per question that is correct or wrong; otherwise p is "-".
    ValueError: the two models answered different questions."""
    check_same_questions(before, after, temperature)
    values = [column(rows, temperature) for rows in (before, after)]
    is_binary = set(values[0] + values[1]) <= {0, 1}
    return gain(*values, form), f"{paired(*values)[2]:.2g}" if is_binary else "-"


def is_graded(models):
    """Whether some reward in {name: rows} is neither 0 nor 1."""
    return any(row["reward"] not in (0, 1) for rows in models.values() for row in rows)


# ---- one answer per question, or the mean over several -------------------------------------------


def table_line(name, rows, reference, temperature, form):
    """The cells of one line. reference: the rows of the model to compare with, or None."""
    first, *others = next(iter(by_question(rows, temperature).values()))
    how = f"at temperature {temperature}" if temperature else "greedy"
    if others:
        how += f", {1 + len(others)} samples"
    if "precision" in first:
        how += f", {first['precision']}"
    rewards = column(rows, temperature)
    value = mean_text(rewards, form)
    if form == ".1%" and set(rewards) <= {0, 1}:
        value = f"{sum(rewards):.0f} of {len(rewards)}, {value}"
    versus = "-", "-"
    if reference and by_question(reference, temperature):
        versus = difference(reference, rows, temperature, form)

    def known(extra, digits):
        is_known = all(row.get(extra) is not None for row in rows)
        return format(fmean(column(rows, temperature, extra)), digits) if is_known else "-"

    return [name, how, value, known("last_number", ".1%"), *versus, known("cut", ".0%"),
            known("tokens", ".0f")]


def table(models, reference, title):
    """Markdown. models is {name: rows}. All models are compared with the model named `reference`,
    which the table calls `title`. ValueError: they were asked other questions or at other
    temperatures."""
    value, form = ("mean reward", ".3f") if is_graded(models) else ("right", ".1%")
    of_first = temperatures_of(models[reference])
    for name, rows in models.items():
        own = temperatures_of(rows)
        if not set(own) & set(of_first):
            raise ValueError(f"{reference} has answers at the temperatures {of_first}, and {name} "
                             f"at {own}")
    lines = []
    for temperature in temperatures_of(*models.values()):
        for name, rows in models.items():
            if by_question(rows, temperature):
                other = models[reference] if name != reference else None
                lines.append(table_line(name, rows, other, temperature, form))
    return markdown(["model", "answers", f"{value} (95%)", "by the last number",
                     f"minus {title} (95%, paired)", "McNemar p", "cut", "tokens"], lines)


# ---- several samples: pass@k and the majority ----------------------------------------------------


def pass_at(k, correct, n):
    """The probability that at least one of k samples is correct, if `correct` of n are: 1 -
    C(n - c, k) / C(n, k)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority(group):
    """The reward of the most frequent answer; their mean, if there are several such answers."""
    votes = {}  # answer: the rewards of its responses
    for row in group:
        if row["extracted"]:
            votes.setdefault(row["extracted"], []).append(row["reward"])
    most = max(map(len, votes.values()), default=0)
    tied = [fmean(rewards) for rewards in votes.values() if len(rewards) == most]
    return fmean(tied) if tied else 0.0


def counts(rows, temperature, n):
    """[(number of correct samples, reward of the majority)] of the first n samples of each
    question, in the order of the questions."""
    firsts = [group[:n] for group in by_question(rows, temperature).values()]
    return [(sum(row["reward"] for row in first), majority(first)) for first in firsts]


def quantities(counted, n):
    """{name: its value for each question}. counted: from `counts`."""
    sizes = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
    found = {f"pass@{k}": [pass_at(k, int(c), n) for c, _ in counted] for k in sizes}
    return found | {f"majority@{n}": [value for _, value in counted]}


def samples_table(models, temperature):
    """Markdown: pass@k and majority@k with their 95% intervals over the questions, and their paired
    differences from the first model. "" if no question was asked more than once. If the models have
    different numbers of samples, the smallest number counts."""
    groups = {name: by_question(rows, temperature) for name, rows in models.items()}
    sizes = [len(group) for found in groups.values() for group in found.values()]
    n = min(sizes)
    if max(sizes) == 1:
        return ""
    if n == 1 or is_graded(models):
        return "pass@k needs several samples in each file, and rewards that are only 0 and 1\n"
    found = {name: quantities(counts(models[name], temperature, n), n)
             for name, own in groups.items() if own}
    first = next(iter(found.values()))
    lines = []
    for name, values in found.items():
        lines.append([name, *map(mean_text, values.values())])
        if values is not first:
            lines.append([f"{name} minus the first", *map(gain, first.values(), values.values())])
    return markdown([f"temperature {temperature}", *first], lines)
