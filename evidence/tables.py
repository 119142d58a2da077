"""Makes all published tables again from the committed logs, in a few seconds.

    python -m evidence.tables      writes tables.md; `git diff` shows whether it changed

Nothing is trained or measured. The logs are in logs/, in packed files (tools/logs.py). The scripts
that made some of them were deleted after their runs. README.md says which commit has them.
homework/bugs.md is not included: `python -m homework.find_the_bug --all` makes its runs in six
minutes.
"""
import argparse
import math
import statistics
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from evidence import lesson_seeds, rounding
from evidence.tasks import COMPARISONS, EXPERIMENTS, variants_of
from tools.answers import markdown, mean_text
from tools.logs import read, read_packed

HERE = Path(__file__).parent
LOGS = HERE / "logs"


def logs(name):
    """{name of a log: its rows} of a packed file. A row with the key "same_as" stands for all rows
    of another log, which it names."""
    found = {}
    for row in read(LOGS / f"{name}.jsonl.gz"):
        log = row.pop("log")
        if "same_as" in row:
            found[log] = found[row["same_as"]]
        else:
            found.setdefault(log, []).append(row)
    return found


def by(rows, *names):
    """{the values of these columns: the rows that have them}, in the order of the rows."""
    groups = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        groups.setdefault(key if len(names) > 1 else key[0], []).append(row)
    return groups


def column(rows, name):
    return [row[name] for row in rows]


def percent(shares):
    return f"{fmean(shares):.1%}"


def spread(values, form):
    """The mean of these values, the lowest and the highest one."""
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def points(before, after):
    """The paired difference in points with its 95% interval, "-" if there are no values."""
    return gain(before, after).replace("%", "") if before and after else "-"


# ---- answers of models: paired differences, pass@k --------------------------------------------

STUDENT = {  # number of values: the t of a 95% interval
    2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306}


def paired(before, after):
    """Compares the values of two models at the same questions.

    Returns the difference of the two means, its 95% interval (normal approximation), and the
    p-value of McNemar's exact test, which is meant for values that are 0 or 1. This is the
    probability of a split between gained and lost answers that is at least as uneven as the
    observed one, if both were equally likely."""
    differences = [y - x for x, y in zip(before, after, strict=True)]
    n = len(differences)
    total = sum(differences)
    difference = total / n
    squares = sum(d * d for d in differences)
    half = 1.96 * math.sqrt(max(0, squares - total**2 / n)) / n
    gained = sum(d > 0 for d in differences)
    lost = sum(d < 0 for d in differences)
    changed = gained + lost
    fewer = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    p = min(1, 2 * fewer / 2**changed)
    return difference, (difference - half, difference + half), p


def mean_difference(accuracies, others, narrowest=0):
    """The mean paired difference of two variants' accuracies, in points, with the half width of
    Student's 95% interval: "+5.1 ± 4.6". An interval that was widened to `narrowest` has a star."""
    values = [100 * (a - b) for a, b in zip(accuracies, others, strict=True)]
    text = f"{statistics.fmean(values):+.1f}"
    if len(values) in STUDENT:
        half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
        text += f" ± {max(half, narrowest):.1f}" + "*" * (half < narrowest)
    return text


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


def answer_column(rows, temperature, name="reward"):
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


def paired_difference(before, after, temperature, form=".1%"):
    """(the paired difference of two models with its 95% interval, McNemar's p), as texts.

    McNemar's test needs one answer per question that is correct or wrong; otherwise p is "-".
    ValueError: the two models answered different questions."""
    check_same_questions(before, after, temperature)
    values = [answer_column(rows, temperature) for rows in (before, after)]
    is_binary = set(values[0] + values[1]) <= {0, 1}
    return gain(*values, form), f"{paired(*values)[2]:.2g}" if is_binary else "-"


def is_graded(models):
    """Whether some reward in {name: rows} is neither 0 nor 1."""
    return any(row["reward"] not in (0, 1) for rows in models.values() for row in rows)


def table_line(name, rows, reference, temperature, form):
    """The cells of one line. reference: the rows of the model to compare with, or None."""
    first, *others = next(iter(by_question(rows, temperature).values()))
    how = f"at temperature {temperature}" if temperature else "greedy"
    if others:
        how += f", {1 + len(others)} samples"
    if "precision" in first:
        how += f", {first['precision']}"
    rewards = answer_column(rows, temperature)
    value = mean_text(rewards, form)
    if form == ".1%" and set(rewards) <= {0, 1}:
        value = f"{sum(rewards):.0f} of {len(rewards)}, {value}"
    versus = "-", "-"
    if reference and by_question(reference, temperature):
        versus = paired_difference(reference, rows, temperature, form)

    def known(extra, digits):
        is_known = all(row.get(extra) is not None for row in rows)
        return format(fmean(answer_column(rows, temperature, extra)), digits) if is_known else "-"

    return [name, how, value, known("last_number", ".1%"), *versus, known("cut", ".0%"),
            known("tokens", ".0f")]


def answer_table(models, reference, title):
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


def pass_at(k, correct, n):
    """The probability that at least one of k samples is correct, if `correct` of n are: 1 -
    C(n - c, k) / C(n, k)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def quantities(counted, n):
    """{name: its value for each question}. counted: from `counts`."""
    sizes = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
    found = {f"pass@{k}": [pass_at(k, int(c), n) for c, _ in counted] for k in sizes}
    return found | {f"majority@{n}": [value for _, value in counted]}


# ---- comparisons on tiny models ------------------------------------------------------------------

# No interval is narrower than this, because three starting models may agree by chance. README.md
# says where the limits come from. An interval that was widened to its limit is marked with a star.
NARROWEST = {3: 6, 6: 2}  # number of starting models: points
OPTIONAL = "experts changed", "sampled: greedy", "gradient norm"  # columns that may be missing


def read_runs(path):
    """The rows of a log of runs."""
    return read_packed(path).get("runs", [])


def runs_of(spec, rows):
    return [row for row in rows if row["variant"] == spec]


def comparison(name, every):
    """The table of an experiment, with a line for each variant; "" if it has no runs.

    every: all rows of the log, of which only those seeds count that every variant has. An OPTIONAL
    column is left out if nothing was measured in it."""
    common = set.intersection(*(set(column(runs_of(spec, every), "seed"))
                                for spec in variants_of(name)))
    rows = [row for row in every if row["variant"] in variants_of(name) and row["seed"] in common]
    if not rows:
        return ""
    lines = []
    for panel, variants in EXPERIMENTS[name].items():
        first = None
        for label, spec in variants.items():
            own = sorted(runs_of(spec, rows), key=lambda row: row["seed"])
            first = first or own
            title = ": ".join(filter(None, (panel, label)))
            lines.append({"variant": title, **cells_of(own, first)})
    titles = [title for title in lines[0]
              if title not in OPTIONAL or any(line[title] != "-" for line in lines)]
    text = markdown(titles, [[line[title] for title in titles] for line in lines])
    start = {}
    start_at = {}
    for row in rows:
        model = f"{row['variant']['task']} {row['cold']}"
        if "first" not in row["variant"]:
            start[model] = f"{row['start']:.0%}"
        if "start_at" in row:
            start_at[model] = " ".join(f"{row['start_at'][t]:.0%}" for t in ("0.6", "0.3", "0.0"))
    for title, found in (("accuracy", start),
                         ("accuracy at temperature 0.6, 0.3 and greedily", start_at)):
        if found:
            text += f"\nBefore RL, {title}: {', '.join(map(' '.join, sorted(found.items())))}\n"
    return text + sharpening(every) * (name == "greedy")


def cells_of(own, first):
    """{column: the cell of this variant, "-" if nothing was measured}.

    own: the runs of this variant. first: the runs of the first variant of the panel."""
    def told(row):
        start = f" from {100 * row['start']:.0f}" * ("first" in row["variant"])
        return f"{100 * row['accuracy']:.0f}{start}"

    probed = [row for row in own if "probe" in row]
    greedy = [f"{100 * row['accuracy']:.0f}: {100 * row['greedy']:.1f}"
              for row in own if "greedy" in row]
    norms = [norm for norm in logged(own, "grad_norm") if norm]
    # Without a clip nothing is clipped, which earlier logs do not say.
    has_clip = own[0]["variant"].get("loss", [0, 0])[1] != "one"
    return {
        "accuracy, mean": percent(by_model(own)),
        "minus the panel's first, points": "-" if own == first else mean_difference(
            by_model(own), by_model(first), NARROWEST.get(len(by_model(own)), 0)),
        "each run, by starting model": "; ".join(
            " ".join(map(told, runs)) for runs in by(own, "cold").values()),
        "on selection questions": percent(by_model(probed, "probe")) if probed else "-",
        "clipped": average(own, "clip_fraction", ".1%") if has_clip else "0.0%",
        "log_ratio_std": average(own, "log_ratio_std", ".1e"),
        "entropy, last": average(own, "entropy", ".3f", -1),
        "experts changed": average(own, "experts_changed", ".1%"),
        "sampled: greedy": ", ".join(greedy) or "-",
        "gradient norm": (f"{min(norms):.2g} to {max(norms):.2g}, median "
                          f"{statistics.median(norms):.2g}") if norms else "-",
    }


def by_model(rows, name="accuracy"):
    """The mean over the runs of each starting model."""
    return [fmean(column(runs, name)) for runs in by(rows, "cold").values()]


def logged(rows, metric, start=0):
    """The values of a metric in all rollouts of these runs, from rollout `start` on."""
    return [x for row in rows for x in row.get(metric, [])[start:] if x is not None]


def average(rows, metric, form, start=0):
    values = logged(rows, metric, start)
    return format(fmean(values), form) if values else "-"


def sharpening(every):
    """Spearman's correlation of the accuracy and the entropy at the end, over all runs of the long
    task that did not diverge."""
    own = [row for row in every if row["variant"]["task"] == "long" and row.get("entropy")]
    values = torch.tensor([(row["accuracy"], row["entropy"][-1]) for row in own]).T
    ranks = values.argsort().argsort().double()
    value = torch.corrcoef(ranks)[0, 1].item()
    return (f"\nOver all {len(own):,} runs of the long task, accuracy and the entropy at the "
            f"end: Spearman's correlation {value:.2f}\n")


# ---- runs without a clip that collapsed ----------------------------------------------------------


def counted(ends):
    """["a of b" whose sampled accuracy is below the start, "c of d" whose greedy accuracy is below
    35%]. ends: for each run, its sampled accuracy minus that of its start, and its greedy accuracy.
    What was not measured is None."""
    below = [change < 0 for change, _ in ends if change is not None]
    low = [greedy < lesson_seeds.LOW for _, greedy in ends if greedy is not None]
    return [f"{sum(found)} of {len(found)}" if found else "-" for found in (below, low)]


def collapses(every, tuned, lesson):
    """How many runs without a clip collapsed, by task, updates per rollout and learning rate."""
    found = {}

    def add(group, rate, change, greedy):
        found.setdefault((group, rate), []).append((change, greedy))

    for row in every:
        spec = row["variant"]
        loss = spec.get("loss", [])
        if len(loss) == 3 and loss[1] == "one" and "first" not in spec:  # with no earlier RL
            usual = 8e-5 if spec["task"] == "short" else 3e-4
            updates = spec["epochs"] * spec.get("minibatches", 8 if spec["task"] == "world" else 4)
            add(f"comparisons: {spec['task']}, {updates} updates", spec.get("learning_rate", usual),
                row["accuracy"] - row["start"], row.get("greedy"))
    for row in tuned:
        if row["algorithm"] == "no clip":
            end = row["held out"]
            add(f"tuned learning rates: {row['task']}", row["learning_rate"],
                end["1.0"] - row["before"]["1.0"], end["0.0"])
    names = {"report": "planned pairs", "choose": "small world, choice of settings",
             "tried": "small world, choice of settings", "earlier": "small world, earlier"}
    for part, group in names.items():
        for row in lesson[part]:
            first, last = row["rows"][0], row["rows"][-1]
            if row["variant"].startswith("no clip"):
                add(group + ", 4 updates" * row["variant"].endswith("one epoch"),
                    first["settings"]["learning_rate"],
                    last["sampled"] - first["start"]["1.0"], last["eval_reward"])
    for row in lesson["collapse"]:
        add("world 0, signs of a collapse", row["rate"], None, row["final"])
    return markdown(
        ["runs without a clip", "learning rate", "runs", "sampled, below the start",
         "greedy, below 35%"],
        [[group, f"{rate:g}", len(ends), *counted(ends)]
         for (group, rate), ends in sorted(found.items())])


# ---- tuned learning rates ------------------------------------------------------------------------

MODELS = {"long": (17, 18, 19, 20, 21, 22), "world": (31, 32, 33, 34, 35, 36)}
RATES = {
    "GSPO": (1e-4, 2e-4, 3e-4, 6e-4),
    "GRPO": (1e-4, 2e-4, 3e-4, 6e-4),
    "no clip": (3e-5, 1e-4, 2e-4, 3e-4, 6e-4)}
GRID = [(name, rate) for name, rates in RATES.items() for rate in rates]
QUESTIONS = {"validation": ("1.0", "0.7", "0.5"), "held out": ("1.0", "0.7", "0.5", "0.0")}


def accuracies(rows, questions, temperature):
    return [row[questions][temperature] for row in rows]


def choice(found, name):
    """(learning rate, temperature) of an algorithm, from the validation questions alone.

    In a tie, the lower learning rate and the higher temperature are taken."""
    def mean(rate, temperature):
        return fmean(accuracies(found[name, rate], "validation", temperature))

    best = max(RATES[name], key=lambda rate: mean(rate, "1.0"))
    temperatures = QUESTIONS["validation"]
    return best, max(temperatures, key=lambda temperature: mean(best, temperature))


def learning_rates(rows):
    """The algorithms at the learning rates that were chosen, these choices, and all accuracies."""
    compared = []
    choices = ""
    grid = []
    for task, own in by(rows, "task").items():
        models = by(sorted(own, key=lambda row: row["start"]), "start").values()
        complete = [row for runs in models if len(runs) == len(GRID) for row in runs]
        if not complete:
            continue
        found = by(complete, "algorithm", "learning_rate")
        held_out = {"sampled": {}, "best temperature": {}, "greedy": {}}
        for name, rates in RATES.items():
            rate, temperature = choice(found, name)
            edge = ", an end of the grid" if rate in (rates[0], rates[-1]) else ""
            choices += (f"- {task}, {name}: learning rate {rate:g}{edge}; "
                        f"best temperature {temperature}\n")
            for decoding, at in zip(held_out, ("1.0", temperature, "0.0")):
                held_out[decoding][name] = accuracies(found[name, rate], "held out", at)
        for decoding, end in held_out.items():
            versus = [mean_difference(end["GSPO"], end[other], narrowest=2)
                      for other in ("GRPO", "no clip")]
            compared.append([task, len(end["GSPO"]), decoding, *map(percent, end.values()),
                             *versus])
        for name, rate in GRID:
            own = found[name, rate]
            validation = percent(accuracies(own, "validation", "1.0"))
            means = [percent(accuracies(own, "held out", t)) for t in QUESTIONS["held out"]]
            each = " ".join(f"{x:.1%}" for x in accuracies(own, "held out", "1.0"))
            grid.append([task, name, f"{rate:g}", validation, *means, each])
    return markdown(["task", "models", "decoding", *RATES, "GSPO minus GRPO, points",
                     "GSPO minus no clip, points"], compared) + (
        f"\nChosen on the validation questions:\n\n{choices}\n") + markdown(
        ["task", "algorithm", "learning rate", "validation, sampled", "held out, sampled",
         "at 0.7", "at 0.5", "greedy", "held out, sampled, each model"], grid)


# ---- the rule for the clip range -----------------------------------------------------------------

FACTORS = (0.1, 0.5, 2, 8)  # the lower clip range in units of the movement; the rule is 0.5
COMPARED = (0.1, 0.5), (2, 0.5), (8, 0.5), (8, 2)


def range_rule(rows):
    """The accuracies, their differences in points, and the outcomes of the three predictions."""
    means = []
    differences = []
    shortfall = []
    too_wide = []
    slow = []
    rows = sorted(rows, key=lambda row: (row["task"], row["updates"], row["learning_rate"],
                                         row["start"]))
    for (task, updates, rate), own in by(rows, "task", "updates", "learning_rate").items():
        runs = by(own, "factor")
        moved = column(runs[None], "movement")
        accuracy = {factor: column(runs[factor], "accuracy") for factor in FACTORS}
        mean = {factor: fmean(accuracy[factor]) for factor in FACTORS}
        shortfall.append(max(mean.values()) - mean[0.5])
        if updates >= 16:
            too_wide.append(mean[8] < mean[0.5])
        else:
            slow.append(mean[0.1] < mean[0.5])
        name = f"{task}, {updates}, {rate:g}"
        means.append([
            name, f"{min(moved):.2g}, {statistics.median(moved):.2g}, {max(moved):.2g}",
            *map(percent, accuracy.values()), f"{100 * shortfall[-1]:.1f}"])
        differences.append([
            name, *(mean_difference(accuracy[a], accuracy[b]) for a, b in COMPARED)])
    first = "task, updates, learning rate"
    text = markdown([first, "movement: least, median, most",
                     *(f"{factor} times" for factor in FACTORS), "best minus 0.5 times"], means)
    text += "\n" + markdown([first, *(f"{a} minus {b}" for a, b in COMPARED)], differences)
    return text + (
        f"\n1. 0.5 times the movement is at most 5 points below the best range in "
        f"{sum(gap <= 0.05 for gap in shortfall)} of {len(shortfall)} settings, and at most "
        f"{100 * max(shortfall):.1f} points below it in all of them.\n"
        f"2. With 16 or 32 updates, 8 times the movement is worse than 0.5 times in "
        f"{sum(too_wide)} of {len(too_wide)} settings.\n"
        f"3. With 4 updates, 0.1 times the movement is worse than 0.5 times in {sum(slow)} of "
        f"{len(slow)} settings.\n")


# ---- the small world of the lesson ---------------------------------------------------------------


def word_problems(rows):
    """GSPO minus GRPO on the word problems of the lesson: the mean of three seeds on each of four
    worlds, and Student's interval over the worlds."""
    lines = []
    variants = by(sorted(rows, key=lambda row: row["world"]), "variant")
    for metric, name in (("eval_reward", "greedy"), ("sampled", "sampled")):
        gspo, grpo = ([fmean(run["rows"][-1][metric] for run in runs)
                       for runs in by(variants[algorithm], "world").values()]
                      for algorithm in ("GSPO", "GRPO"))
        lines.append([name, percent(gspo), percent(grpo), mean_difference(gspo, grpo)])
    return markdown(["decoding", "GSPO", "GRPO", "GSPO minus GRPO, points, four worlds"], lines)


def starting_model(rows):
    lines = []
    for temperature, own in by(rows, "temperature").items():
        written, guessed = ([row["reward"] for row in own if (row["tokens"] >= 40) == is_written]
                            for is_written in (True, False))  # a longer response is not a guess
        lines.append([temperature, mean_text(column(own, "reward")),
                      f"{len(written)} of {len(own)}", mean_text(written), mean_text(guessed)])
    return markdown(["temperature", "all responses: accuracy (95%)", "written step by step",
                     "their accuracy (95%)", "accuracy of the others (95%)"], lines)


def gradients(rows):
    """A line for each variant, with the mean of five seeds and each seed."""
    lines = []
    whole, first, last = slice(None), slice(1), slice(-1, None)
    metrics = (("grad_norm", first, ".3g"), ("log_ratio_std", first, ".3g"),
               ("reward", whole, ".1%"), ("eval_reward", last, ".1%"), ("reward", last, ".1%"))
    groups = by(rows, "variant")
    for name, runs in groups.items():
        if "stopped" in runs[0]:
            lines.append([name, f"stops: {runs[0]['stopped'].partition('.')[0]}", *[""] * 5])
            continue
        cells = []
        for metric, part, form in metrics:
            found = [fmean(run[metric][part]) for run in runs]
            cells.append(f"{fmean(found):{form}} ({', '.join(f'{x:{form}}' for x in found)})")
        own, gspo = ([fmean(run["reward"]) for run in some] for some in (runs, groups["GSPO"]))
        cells.insert(3, mean_difference(own, gspo) if own != gspo else "")
        lines.append([name, *cells])
    return markdown(["variant", "grad_norm, step 1", "log_ratio_std, step 1",
                     "reward, mean of all steps", "minus GSPO", "eval_reward at the end",
                     "reward at the end"], lines)


def before_the_plan(rows):
    """Runs before the plan of the lesson: their accuracies, greedy / sampled."""
    lines = []
    for row in rows:
        first, last = row["rows"][0], row["rows"][-1]
        start = first["start"]
        lines.append([
            row["variant"], f"{row['world']}, {row['seed']}",
            f"{first['settings']['learning_rate']:g}",
            f"{start['0.0']:.2f} / {start['1.0']:.2f} / {max(start.values()):.2f}",
            f"{last['eval_reward']:.2f} / {last['sampled']:.2f}"])
    return markdown(["variant", "world, seed", "learning rate",
                     "the start, greedy / sampled / at its best temperature", "greedy / sampled"],
                    sorted(lines))


def updates(rows):
    """Three numbers of updates per rollout on world 0, with the seeds 0 to 2."""
    lines = []
    for name, number in ("one update", 1), ("one epoch", 8), ("GSPO", 32):
        runs = [row["rows"] for row in rows if row["variant"] == name]
        first = [next(row["step"] for row in run[1:] if row["reward"] >= 0.9) for run in runs]
        lines.append([
            number, f"{fmean(run[-1]['cpu_seconds'] for run in runs):.0f}",
            ", ".join(map(str, first)), percent(run[4]["eval_reward"] for run in runs),
            percent(run[-1]["sampled"] for run in runs)])
    return markdown(["updates per rollout", "CPU seconds, mean", "first step with a reward of 90%, "
                     "per seed", "greedy after step 4, mean", "sampled at the end, mean"], lines)


def visits(logs):
    """How many responses with an advantage were clipped whenever their minibatch came."""
    def share(rows, visit):
        return f"{sum(column(rows, f'clipped_at_{visit}'))} of {sum(column(rows, 'responses'))}"

    runs = {epochs: logs[f"visits_{epochs}"] for epochs in (4, 1)}
    return markdown(["epochs", "clipped at the first visit, step 1", "never contributed, step 1",
                     "never contributed, all steps"], [
        [epochs, share(rows[:1], "first_visit"), share(rows[:1], "all_visits"),
         share(rows, "all_visits")] for epochs, rows in runs.items()])


def prefixes(rows):
    """How often a rollout has several samples of one next token."""
    return markdown(["step", "prefixes with one sample", "tokens whose prefix has several",
                     "different responses per group of 16"], [
        [row["step"], f"{row['prefixes_with_one_sample']:.0%}", f"{row['tokens_with_company']:.0%}",
         f"{row['different_responses_per_group']:.1f}"] for row in (rows[0], rows[-1])])


# ---- what tells a collapse -----------------------------------------------------------------------

SIGNS = {  # title: the value of a run
    "learning rate": lambda row: row["rate"],
    "loss of step 1": lambda row: row["steps"][1]["loss"],
    "`log_ratio_std` of step 2": lambda row: row["steps"][2]["log_ratio_std"],
    "loss of step 2": lambda row: row["steps"][2]["loss"],
    "log-prob of beginning a worked answer, after step 3": lambda row: row["steps"][3]["probe"][0],
    "no rule was planned: `log_ratio_std` of step 1": lambda row: row["steps"][1]["log_ratio_std"],
}


def has_fallen(row):
    return row["final"] < lesson_seeds.LOW


def auc(runs, value, same_rate=True):
    """The share of pairs of a collapsed run and another one (of the same learning rate) in which
    the collapsed one has the larger value."""
    return fmean((value(x) > value(y)) + (value(x) == value(y)) / 2
                 for x, y in product(runs, runs) if has_fallen(x) and not has_fallen(y)
                 and (x["rate"] == y["rate"] or not same_rate))


def balanced(runs, value, sign, limit):
    """The mean of the shares of the collapsed runs and of the others that a rule recognises."""
    hits = {True: [], False: []}
    for row in runs:
        hits[has_fallen(row)].append((sign * (value(row) - limit) > 0) == has_fallen(row))
    return fmean(map(fmean, hits.values()))


def signs(rows):
    """Rules from the first half of the runs (seeds below 200), checked on the second half."""
    first = [row for row in rows if row["seed"] < 200]
    second = [row for row in rows if row["seed"] >= 200]
    lines = []
    for title, value in SIGNS.items():
        area = auc(first, value, same_rate=False)
        sign = 1 if area > 0.5 else -1
        found = sorted(set(map(value, first)))
        limits = [(a + b) / 2 for a, b in zip(found, found[1:])]
        limit = max(limits, key=lambda limit: balanced(first, value, sign, limit))
        lines.append([f"{title} {'above' if sign > 0 else 'below'} {limit:.4g}", f"{area:.2f}",
                      f"{balanced(second, value, sign, limit):.0%}", f"{auc(second, value):.2f}",
                      f"{auc(rows, value):.2f}"])
    text = markdown(["rule for a collapse", "AUC, first half", "balanced accuracy, later runs",
                     "AUC at one learning rate, later runs", "both halves"], lines)
    start = rows[0]["steps"][0]["greedy"]
    text += "\n" + markdown(
        ["learning rate", "runs", "greedy, below 35%", "greedy, below the start",
         "greedy, at least 90%"],
        [[f"{rate:g}", len(runs), sum(map(has_fallen, runs)),
          sum(row["final"] < start for row in runs),
          sum(row["final"] >= lesson_seeds.SUCCESS for row in runs)]
         for rate, runs in sorted(by(rows, "rate").items())])
    shown = next(row for row in rows if (row["rate"], row["seed"]) == (4.5e-4, 0))
    kinds = {"all": "all", "short": "of guesses", "long": "of worked responses"}
    text += "\n" + markdown(
        ["log s in step 1 of the lesson's run", "values", "mean", "median", "standard deviation",
         "root mean square"],
        [[name, *shown["steps"][1]["updates"][kind]] for kind, name in kinds.items()])
    greedy = ", ".join(f"{step['greedy']:.1%}" for step in shown["steps"][:3])
    return text + f"\nIts greedy accuracy before RL, after step 1 and after step 2: {greedy}\n"


# ---- ratios --------------------------------------------------------------------------------------

RATIOS = {  # title: (column of the log, its format)
    "log-ratio of a token: standard deviation": ("token_std", ".1e"),
    "log s": ("log_s_std", ".1e"),
    "sum": ("log_sum_std", ".1e"),
    "clipped by GSPO, 3e-4": ("clipped_gspo", ".2%"),
    "by GRPO, 0.2": ("clipped_grpo", ".2%"),
    "by GRPO, 3e-4": ("clipped_grpo_at_gspos", ".2%"),
}


def ratios(rows):
    """Ratios after one epoch of updates, over the first tokens of the responses, of three runs."""
    groups = by([row for row in rows if "length" in row], "model", "length")
    return markdown(["model", "first tokens", *RATIOS], [
        [*key, *(" ".join(format(row[name], form) for row in own)
                 for name, form in RATIOS.values())]
        for key, own in groups.items()])


def exact_ratios(rows):
    """Exact gradients of a policy that is small enough to enumerate: the angle between the expected
    gradient and the true one, and the cosine of one batch of 256 responses with the true one. Each
    cell has the mean of four random policies, and the angle also has their range."""
    names = [name for name in rows[0] if isinstance(rows[0][name], dict)]

    def cell(found):
        return f"{spread(column(found, 'angle'), '.1f')}; {fmean(column(found, 'cosine')):.2f}"

    return markdown(["policy", "deviation of the tokens' log-ratios", "tokens", *names], [
        [*key, *(cell(column(own, name)) for name in names)]
        for key, own in by(rows, "how", "spread", "length").items()])


# ---- GSM8K ---------------------------------------------------------------------------------------


def gsm8k_on_a_cpu(logs):
    """Each model is compared with the fine-tuned one, "cold", and GSPO with GRPO."""
    models = {name: logs[f"cpu/{name}"] for name in ("cold", "sft", "grpo", "gspo")}
    text = answer_table(models, "cold", "the fine-tuned model")
    for temperature in 0.0, 1.0:
        difference, p = paired_difference(models["grpo"], models["gspo"], temperature)
        text += f"\ngspo minus grpo, temperature {temperature}: {difference}, p {p}\n"
    return text


def gsm8k(evaluations):
    """The pre-trained model comes first at each precision, and the others are compared with it."""
    lines = []
    for same in by(evaluations, "questions", "precision").values():
        baseline = same[0]["reward"]
        for row in same:
            rewards = row["reward"]
            versus = [points(baseline, rewards), f"{paired(baseline, rewards)[2]:.2g}"]
            lines.append([
                row["model"], f"{len(rewards)} {row['questions']}", row["precision"],
                mean_text(rewards), percent(row["last_number"]),
                len(rewards) - sum(row["boxed"]), row["tokens"].count(512),
                *(["", ""] if row is same[0] else versus)])
    return markdown(["model", "questions", "precision", "accuracy, boxed answer (95% CI)",
                     "last number", "no box", "cut at 512", "difference in points (95% CI)",
                     "exact McNemar p"], lines)


def correlation_of_neighbours(values):
    mean = fmean(values)
    products = [(a - mean) * (b - mean) for a, b in zip(values, values[1:])]
    return sum(products) / sum((x - mean) ** 2 for x in values)


def steps_of(logs, name):
    """The rows of the steps of a run, without its evaluations."""
    return [row for row in logs[f"gpu/{name}"] if "reward" in row]


def gsm8k_pairs(logs):
    """GRPO minus GSPO. Sampled: the mean reward of the steps that both runs have, paired, and an
    interval that treats the steps as independent, or one over the means of ten steps each. Greedy:
    paired over the questions."""
    lines = []
    for rate in "1e-6", "5e-6":
        grpo, gspo = (column(steps_of(logs, f"{name}_{rate}"), "reward")
                      for name in ("grpo", "gspo"))
        gaps = [100 * (a - b) for a, b in zip(grpo, gspo)]
        mean = fmean(gaps)
        half = 1.96 * statistics.stdev(gaps) / len(gaps) ** 0.5
        grpo_means, gspo_means = ([fmean(rewards[i:i + 10]) for i in range(0, len(gaps), 10)]
                                  for rewards in (grpo[:len(gaps)], gspo[:len(gaps)]))
        lines.append([rate, f"sampled, {len(gaps)} paired steps",
                      f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})",
                      mean_difference(grpo_means, gspo_means),
                      f"{correlation_of_neighbours(gaps):.2f}"])
    answers = {(row["model"], row["questions"]): row["reward"] for row in logs["gpu/answers"]}
    for questions in "test", "validation":
        gspo, grpo = (answers[f"{name}_5e-6", questions] for name in ("gspo", "grpo"))
        lines.append(["5e-6", f"greedy, {len(gspo)} {questions} questions", points(gspo, grpo), "",
                      ""])
    return markdown(["learning rate", "accuracy", "GRPO minus GSPO, points",
                     "the same over means of ten steps", "correlation of neighbouring steps"],
                    lines)


def gsm8k_steps(logs):
    """Means over the first ten and the last ten steps of each run: first, last."""
    metrics = {"reward": ".1%", "response_length": ".0f", "cut": ".1%", "entropy": ".3f",
               "clip_fraction": ".3%", "sampler_gap": ".4f"}
    lines = []
    for name in "gspo_1e-6", "grpo_1e-6", "gspo_5e-6", "grpo_5e-6":
        steps = steps_of(logs, name)
        cells = [name, len(steps), f"{sum(column(steps, 'seconds')) / 60:.1f}"]
        for metric, form in metrics.items():
            is_logged = metric in steps[0]
            ends = (fmean(column(end, metric)) for end in (steps[:10], steps[-10:]) if is_logged)
            cells.append(", ".join(format(end, form) for end in ends) or "not logged")
        lines.append([*cells, f"{fmean(column(steps, 'clip_fraction')):.3%}"])
    return markdown(["run", "steps", "minutes", *metrics, "clip_fraction, all steps"], lines)


# ---- multiplication problems ---------------------------------------------------------------------


def correct(run, when, temperature=0.0):
    """1 or 0 for each answer of a model, in the order of the questions."""
    return answer_column(run.get(when, []), temperature)


def sums_line(name, run):
    """The cells of one run. An answer that was not asked is "-"."""
    start, *steps = run["training/metrics"]
    settings = start["settings"]
    after, given = correct(run, "after"), correct(run, "before_given")
    sampled = correct(run, "after", 1.0)
    return [f"{name}: {settings['algorithm']}, {settings['eps_low']:g}", mean_text(after),
            points(correct(run, "before"), after), points(given, after),
            points(given, correct(run, "after_given")), percent(sampled) if sampled else "-",
            f"{sum(row.get('seconds', 0) for row in steps) / 60:.0f}"]


def welch(some, others):
    """The difference of two means in points, with Welch's 95% interval for two small samples."""
    variances = [statistics.variance(values) / len(values) for values in (some, others)]
    total = sum(variances)
    freedom = total**2 / sum(v**2 / (len(values) - 1)
                             for v, values in zip(variances, (some, others)))
    half = 100 * STUDENT[int(freedom) + 1] * total**0.5
    return f"{100 * (fmean(some) - fmean(others)):+.1f} ± {half:.1f}"


def gspo_minus_grpo(runs):
    """GSPO at 3e-2 minus GRPO, for the three common seeds and for all runs."""
    lines = []
    for temperature, name in ((0.0, "greedy"), (1.0, "sampled")):
        grpo, gspo = (
            [fmean(correct(runs[f"{prefix}_{seed}"], "after", temperature))
             for seed in range(number)]
            for prefix, number in (("grpo", 3), ("gspo_wide", 6)))
        lines.append([name, mean_difference(gspo[:3], grpo), percent(gspo), percent(grpo),
                      welch(gspo, grpo)])
    return markdown(["decoding", "GSPO minus GRPO, seeds 0 to 2, paired", "GSPO, six seeds",
                     "GRPO, three seeds", "difference, Welch"], lines)


def range_table(logs):
    """The runs that chose the clip range, each with its last evaluation."""
    def greedy(row):
        low, high = row["eval_reward_interval"]
        return f"{row['eval_reward']:.1%} ({low:.1%} to {high:.1%})"

    lines = []
    for name, (_, *steps) in sorted(logs.items()):
        first, *later = column(steps, "clip_fraction")
        lines.append([name, greedy(steps[-1]), percent(column(steps[-5:], "reward")),
                      f"{steps[0]['log_ratio_std']:.2f}", f"{first:.0%}", f"{fmean(later):.0%}"])
    lines.append(["pre-trained", greedy(logs["gspo_3e-4"][0]), "", "", "", ""])
    return markdown(["run", "greedy accuracy (95%)", "reward of the last five rollouts",
                     "log_ratio_std, first rollout", "clipped, first rollout", "later"], lines)


def sums_on_gsm8k(runs):
    """The accuracy on 192 short questions of GSM8K after some runs."""
    before = answer_column(runs["gspo_2"]["gsm8k_before"], 0.0, "last_number")
    lines = [["pre-trained", mean_text(before), ""]]
    for name, run in runs.items():
        if "gsm8k_after" in run:
            after = answer_column(run["gsm8k_after"], 0.0, "last_number")
            lines.append([name, mean_text(after), points(before, after)])
    return markdown(["model", "greedy accuracy (95%)", "minus pre-trained"], lines)


def multiplication(logs):
    runs = {}
    for name, rows in logs.items():
        run, log = name.split("/", 1)
        runs.setdefault(run, {})[log] = rows
    choice = runs.pop("range")
    table = markdown(["run: algorithm, lower clip range", "greedy accuracy (95%)",
                      "minus pre-trained", "minus pre-trained with the calculation begun",
                      "the same, begun for both", "sampled accuracy", "minutes"],
                     map(sums_line, runs, runs.values()))
    return f"""\
Differences are in points. The brackets are paired 95% intervals over 256 held-out questions. "±"
is the half width of a 95% interval over seeds. Welch's degrees of freedom are rounded down. The
minutes are those of training on one core.

{table}
{gspo_minus_grpo(runs)}
The runs that chose the clip range, on 256 other questions, with one run per row:

{range_table(choice)}
192 short questions of GSM8K, graded by the last number. A script of commit 2ad1537 asked them.

{sums_on_gsm8k(runs)}"""


# ---- tasks of one's own --------------------------------------------------------------------------


def own_tasks(logs):
    """Runs on five tasks of one's own, and those that chose the settings of the recipe."""
    lines = []
    for run in sorted(name[:-len("/summary")] for name in logs if name.endswith("/summary")):
        summary = logs[f"{run}/summary"][0]
        metrics = logs[f"{run}/metrics"]
        steps = [row["step"] for row in metrics if "eval_reward" in row]
        before, after = (column(logs[f"{run}/eval_{step}"], "reward")
                         for step in (steps[0], steps[-1]))
        difference, (low, high), _ = paired(before, after)
        constant = summary["constant_reward"]
        full = [sum(reward > 0.999 for reward in rewards) for rewards in (before, after)]
        lines.append([
            summary["task"], run.split("_")[1] if "_solutions_" in run else 0,
            metrics[0]["settings"]["learning_rate"], summary["seed"],
            f"{fmean(before):.3f}", f"{fmean(after):.3f}",
            f"{difference:+.3f} ({low:+.3f} to {high:+.3f})", f"{constant:.3f}",
            "{} to {} of {}".format(*full, len(after)),
            "yes" if low > 0 and fmean(after) > constant else "no",
            f"{summary['seconds'] / 60:.0f}"])
    return markdown(["task", "solutions first", "learning rate", "seed", "before", "after",
                     "difference (95% CI, paired)", "best constant", "fully correct",
                     "criterion met", "minutes"], lines)


# ---- skill or sharpening -------------------------------------------------------------------------

PASS_HEAD = """\
Each model answered each question 16 times at temperature 1. The brackets are 95% intervals over the
questions, and gains are paired. On the small world, 16 blind guesses have a pass@16 of 81.5%.

"""


def pass_at_k(logs):
    """Each pair of models before and after training with `samples` responses to each question. A
    log has the number of correct ones and the reward of the majority, for each question."""
    pairs = {}
    for name, rows in logs.items():
        if name.startswith("pass_at_k/"):
            _, pair, when = name.split("/")
            counted = list(zip(rows[0]["correct"], rows[0]["majority"], strict=True))
            pairs.setdefault(pair, {})[when] = quantities(counted, rows[0]["samples"])
    lines = []
    outcomes = []
    for pair, found in pairs.items():
        before, after = found["before"], found["after"]
        for when, values in found.items():
            lines.append([f"{pair}, {when}", *map(mean_text, values.values())])
        lines.append([f"{pair}, gain", *map(gain, before.values(), after.values())])
        majority = list(before)[-1]
        versus = gain(after["pass@1"], before[majority])
        outcomes.append([pair, len(before["pass@1"]), versus])
    worlds = [found for pair, found in pairs.items() if pair.startswith("world")]
    means = {when: [[fmean(found[when][name]) for found in worlds] for name in before]
             for when in ("before", "after")}
    gains = map(mean_difference, means["after"], means["before"])
    return "\n".join([
        PASS_HEAD + markdown(["model", *before], lines),
        markdown(["four worlds, mean", *before], [
            *([when, *map(percent, each)] for when, each in means.items()),
            ["gain, points", *gains]]),
        markdown(["model", "questions", f"{majority} before minus pass@1 after"], outcomes),
        majority_of_many(logs["majority/world 0"][0])])


def majority_of_many(log):
    """A sentence on the starting model of the lesson, which was asked many times."""
    found = quantities(list(zip(log["correct"], log["majority"])), log["samples"])
    texts = ", ".join(f"{name} {mean_text(found[name])}" for name in ("pass@1", list(found)[-1]))
    return f"World 0 before training, with {log['samples']} samples per question: {texts}.\n"


# ---- precision -----------------------------------------------------------------------------------


def kept(rows):
    """What a rounded copy of the weights keeps of a change of the weights. Each line has the mean,
    the lowest and the highest value of three changes."""
    kinds = by(rows, "kind")
    lines = []
    for size, form in product(kinds["size"], ("bf16", "float16")):
        own = by(kinds["kept"], "size", "format")[size["size"], form]
        other, trained = (by(own, "responses")[which] for which in ("other", "trained"))
        lines.append([
            f"{size['size']:.2g}", f"{size['steps']} at {size['learning_rate']:g}", form,
            f"{fmean(column(own, 'weights_changed')):.0%}", spread(column(other, "kept"), ".2f"),
            spread(column(trained, "kept"), ".2f"), spread(column(other, "gap"), ".4f")])
    titles = ["size", "as after steps", "copy", "weights that change", "kept, other responses",
              "kept, trained responses", "difference of log-probs, other responses (nats)"]
    (largest,) = kinds["activations"]
    name, value = next(iter(largest["largest"].items()))
    return (markdown(titles, lines) + f"\nLargest recorded activation: {value:,.0f} ({name}). "
            f"Largest weight: {largest['largest_weight']:,.0f}\n")


def stale(rows):
    """Means over the steps in which the rollouts have their full age, from the starting models that
    have all runs. Each cell has the mean, the lowest and the highest of these models."""
    whole = [world for world, own in by(rows, "world").items() if len(own) == 16]
    runs = [row | {"range": "{} {:g}".format(row["clip"][0].upper(), row["clip"][1])}
            for row in rows if row["world"] in whole]
    runs.sort(key=lambda row: row["range"])
    names = "clip_fraction", "clipped_first", "moved_first", "log_ratio_std"
    lines = [[*key, *(spread([fmean(run[name][4:]) for run in own], ".3f") for name in names),
              spread(column(own, "accuracy"), ".1%")]
             for key, own in by(runs, "range", "age").items()]
    titles = ["range", "age, in steps", "clip fraction", "in the first update",
              "std of log s there", "std of log s later", "held-out accuracy, sampled"]
    return (f"Starting models: worlds {', '.join(map(str, whole))}. Means over steps 5 to 8; in "
            "brackets, the lowest and the highest starting model.\n\n" + markdown(titles, lines))


# ---- speed beside TRL ----------------------------------------------------------------------------


def speed_beside_trl(rounds):
    """Times of TRL divided by ours, the median of the rounds and their range, without the first
    round of each job. Memory: the median of the rounds. The phases of a step, which only the
    published rounds have, are in the table, too."""
    phases = [key for key in ("rollout", "old log-probs", "update") if key in rounds[0]["ours"]]
    lines = []
    jobs = by([row for row in rounds if row["round"]], "vocabulary", "hidden", "workload")
    for (vocabulary, *job), rival in product(jobs, ("TRL", "TRL tuned")):
        played = jobs[vocabulary, *job]
        cells = []
        for key in "seconds", *phases:
            ratios = [row[rival][key] / row["ours"][key] for row in played]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to "
                         f"{max(ratios):.2f})")
        peaks = [round(statistics.median(row[side]["peak_mb"] for row in played))
                 for side in ("ours", rival)]
        lines.append([f"{vocabulary:,}", *job, rival, *cells, "{} : {} MB".format(*peaks)])
    return "Times, TRL / ours: the median of the rounds (their range)\n\n" + markdown(
        ["vocabulary", "hidden size", "workload", "against", "step", *phases,
         "peak memory, ours : TRL"], lines)


# ---- the page ------------------------------------------------------------------------------------

HEAD = """# All tables

`python -m evidence.tables` makes this page from the logs. [README.md](README.md) defines the words,
and says what each table shows and does not show.
"""
COMPARISON_HEAD = """\
Accuracies are those at temperature 1 on the held-out questions, unless a column says otherwise.
Differences are in points. "±" is the half width of a 95% interval over the starting models. A star
marks an interval that was widened to the limit that README.md explains. A "gate" is a clipping
rule, and "dropped" responses have no gradient.

"""


def page():
    """The contents of tables.md."""
    every = read_runs(COMPARISONS)
    comparisons = [f"### {name}\n\n{comparison(name, every)}" for name in sorted(EXPERIMENTS)]
    lesson = logs("lesson")
    tuned = logs("learning_rates")["runs"]
    gsm8k_logs = logs("gsm8k")
    measured = logs("measurements")
    sections = {
        "The small world: the planned test": lesson_seeds.table(),
        "The small world: GSPO and GRPO over four worlds": word_problems(lesson["report"]),
        "The small world: updates per rollout": updates(lesson["lesson"]),
        "The small world: clipped at every visit": visits(lesson),
        "The small world: several samples of one next token": prefixes(lesson["prefixes"]),
        "The small world: the starting model at other temperatures":
            starting_model(lesson["starting_model"]),
        "The small world: runs before the plan": before_the_plan(
            lesson["earlier"] + lesson["tried"]),
        "The small world: what tells a collapse": signs(lesson["collapse"]),
        "The small world: the right value and another gradient": gradients(lesson["gradients"]),
        "Runs without a clip that collapsed": collapses(every, tuned, lesson),
        "Tuned learning rates": learning_rates(tuned),
        "The rule for the clip range": range_rule(measured["range_rule"]),
        "Ratios after an epoch": ratios(measured["ratios"]),
        "Exact gradients": exact_ratios(measured["exact_ratios"]),
        "Stale rollouts": stale(measured["stale"]),
        "Pass@k before and after RL": pass_at_k(measured),
        "GSM8K on a GPU": gsm8k(gsm8k_logs["gpu/answers"]),
        "GSM8K on a GPU: GRPO minus GSPO": gsm8k_pairs(gsm8k_logs),
        "GSM8K on a GPU: metrics": gsm8k_steps(gsm8k_logs),
        "GSM8K on a CPU": gsm8k_on_a_cpu(gsm8k_logs),
        "Multiplication problems": multiplication(logs("sums")),
        "Tasks of one's own": own_tasks(logs("own_tasks")),
        "Rounding": rounding.table(measured["rounding"]),
        "Copies of the weights": kept(measured["kept"]),
        "Speed beside TRL on a CPU": speed_beside_trl(measured["speed/beside_trl"]),
        "Comparisons on tiny models": COMPARISON_HEAD + "\n".join(comparisons),
    }
    return "\n".join([HEAD, *(f"## {title}\n\n{text}" for title, text in sections.items())])


def main():
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    (HERE / "tables.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
