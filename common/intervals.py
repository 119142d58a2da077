"""Accuracies and their differences, with 95% confidence intervals.

Rows are logged answers; row["right"] is 1 (or True) for a correct answer, otherwise 0 (or False).
"""
import math

from train_math import wilson


def accuracy(rows):
    """(share of correct answers, lower and upper end of Wilson's 95% interval)."""
    right = sum(row["right"] for row in rows)
    return right / len(rows), *wilson(right, len(rows))


def accuracy_text(rows):
    """For example "73.8% (68.1% to 78.8%)"."""
    return "{:.1%} ({:.1%} to {:.1%})".format(*accuracy(rows))


def paired(before, after):
    """Compares two lists of correct (true) and wrong (false) answers to the same questions.

    Returns the difference of the two accuracies, its 95% interval (normal approximation), and the p
    of McNemar's exact test: if a changed answer were as likely to change for the better as for the
    worse, how likely would a split at least as uneven as this one be?"""
    n = len(before)
    gained = sum(y and not x for x, y in zip(before, after))
    lost = sum(x and not y for x, y in zip(before, after))
    difference = (gained - lost) / n
    changed = gained + lost
    half = 1.96 * math.sqrt(changed - (gained - lost) ** 2 / n) / n
    fewer = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    p = min(1, 2 * fewer / 2**changed)
    return difference, (difference - half, difference + half), p


def gain_text(before, after):
    """The paired difference of rows, for example "+14.1% (95%: +8.4% to +19.7%), p = 3e-06"."""
    right = ([row["right"] == 1 for row in rows] for rows in (before, after))
    difference, (low, high), p = paired(*right)
    return f"{difference:+.1%} (95%: {low:+.1%} to {high:+.1%}), p = {p:.2g}"
