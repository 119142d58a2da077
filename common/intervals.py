"""Accuracies and their differences, with 95% confidence intervals.

Most functions take lists of values, one for each question: 1 (or True) for a correct answer,
otherwise 0 (or False). mean_difference takes accuracies, one for each starting model.
"""
import math
import statistics

from train_math import wilson

STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # models: the t of a 95% interval


def accuracy(values):
    """(fraction of correct answers, lower end, upper end) with Wilson's 95% interval."""
    correct = sum(values)
    low, high = wilson(correct, len(values))
    return correct / len(values), low, high


def accuracy_text(values):
    """For example "73.8% (68.1% to 78.8%)"."""
    return "{:.1%} ({:.1%} to {:.1%})".format(*accuracy(values))


def paired(before, after):
    """Compares the answers of two models to the same questions.

    Returns the difference of the two accuracies, its 95% interval (normal approximation), and the
    p-value of McNemar's exact test. This is the probability of a split between gained and lost
    answers that is at least as uneven as the observed one, if both were equally likely."""
    n = len(before)
    gained = 0
    lost = 0
    for x, y in zip(before, after, strict=True):
        gained += y > x
        lost += y < x
    difference = (gained - lost) / n
    changed = gained + lost
    half = 1.96 * math.sqrt(changed - (gained - lost) ** 2 / n) / n
    fewer = 0
    for k in range(min(gained, lost) + 1):
        fewer += math.comb(changed, k)
    p = min(1, 2 * fewer / 2**changed)
    return difference, (difference - half, difference + half), p


def gain_text(before, after):
    """The paired difference, for example "+14.1% (95%: +8.4% to +19.7%), p = 3e-06"."""
    difference, (low, high), p = paired(before, after)
    return f"{difference:+.1%} (95%: {low:+.1%} to {high:+.1%}), p = {p:.2g}"


def mean_difference(accuracies, others, narrowest=0):
    """The mean paired difference of two variants' accuracies, in points, with the half width of
    Student's 95% interval (at least `narrowest`): "+5.1 ± 4.6"."""
    values = [100 * (a - b) for a, b in zip(accuracies, others, strict=True)]
    text = f"{statistics.fmean(values):+.1f}"
    if len(values) in STUDENT:
        half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
        text += f" ± {max(half, narrowest):.1f}"
    return text
