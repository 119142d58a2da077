"""The tables of the test that plans/range_rule.md plans: is the movement of the policy
a good clip range? The movement is the median of log_ratio_std over rollouts 2 to 4. The log
results/tiny/range_rule.jsonl has a line for each run, and one for each movement that was measured.
The script that made the runs is in commit 5a42b2b."""
import statistics
from pathlib import Path

from tools.logs import mean_difference

RESULTS = Path(__file__).parents[1] / "results" / "tiny"
LOG = RESULTS / "range_rule.jsonl"
FACTORS = (0.1, 0.5, 2, 8)  # the lower clip range in units of the movement
RULE = 0.5  # the factor that represents the rule
MODELS = {"long": (11, 12, 13, 14, 15, 16), "world": (21, 22, 23, 24, 25, 26)}
SETTINGS = [(task, updates, learning_rate)
            for task, updates in (("long", 4), ("long", 16), ("world", 4), ("world", 32))
            for learning_rate in (1e-4, 3e-4)]
COMPARED = (0.1, 0.5), (2, 0.5), (8, 0.5), (8, 2)


def tables(rows):
    """The accuracies, their differences in points, and the outcomes of the three predictions."""
    found = {(row["task"], row["updates"], row["learning_rate"], row["start"], row["factor"]): row
             for row in rows}
    means = ["| task, updates, learning rate | movement: least, median, most | "
             + " | ".join(f"{factor} times" for factor in FACTORS) + " | best minus 0.5 times |",
             "|---" * 7 + "|"]
    differences = ["| task, updates, learning rate | "
                   + " | ".join(f"{a} minus {b}" for a, b in COMPARED) + " |", "|---" * 5 + "|"]
    shortfall = []
    too_wide = []
    slow = []
    for key in SETTINGS:
        task, updates, learning_rate = key
        accuracy = {factor: [found[*key, start, factor]["accuracy"] for start in MODELS[task]]
                    for factor in FACTORS}
        mean = {factor: statistics.fmean(accuracy[factor]) for factor in FACTORS}
        moved = [found[*key, start, None]["movement"] for start in MODELS[task]]
        gap = max(mean.values()) - mean[RULE]
        shortfall.append(gap)
        if updates >= 16:
            too_wide.append(mean[8] < mean[RULE])
        else:
            slow.append(mean[0.1] < mean[RULE])
        name = f"{task}, {updates}, {learning_rate:g}"
        cells = [name, f"{min(moved):.2g}, {statistics.median(moved):.2g}, {max(moved):.2g}",
                 *(f"{mean[factor]:.1%}" for factor in FACTORS), f"{100 * gap:.1f}"]
        means.append(f"| {' | '.join(cells)} |")
        cells = [name, *(mean_difference(accuracy[a], accuracy[b]) for a, b in COMPARED)]
        differences.append(f"| {' | '.join(cells)} |")
    close = sum(gap <= 0.05 for gap in shortfall)
    predictions = [
        f"1. 0.5 times the movement is at most 5 points below the best range in {close} of "
        f"{len(shortfall)} settings, and at most {100 * max(shortfall):.1f} points below it in all "
        "of them.",
        f"2. With 16 or 32 updates, 8 times the movement is worse than 0.5 times in "
        f"{sum(too_wide)} of {len(too_wide)} settings.",
        f"3. With 4 updates, 0.1 times the movement is worse than 0.5 times in {sum(slow)} of "
        f"{len(slow)} settings."]
    return "\n".join([*means, "", *differences, "", *predictions]) + "\n"
