"""Makes all published tables again from the committed logs, in half a minute.

    python -m evidence.tables               writes tables.md; `git diff` shows whether it changed
    python -m evidence.tables --pictures    also draws opening.png and rounding.png again

Nothing is trained or measured. The logs are in logs/, one packed file per experiment
(tools/logs.py). The scripts that made some of them were deleted after their runs. README.md says
which commit has them. homework/bugs.md is not included: `python -m homework.find_the_bug
--all` makes its runs in six minutes.
"""
import argparse
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from evidence import rounding, speed, sums
from evidence.settings import EARLY, EXPERIMENTS, NO_LOWER_BOUND, opening
from lesson import seeds
from tools import answers, plot
from tools.logs import accuracy_text, mean_difference, mean_text, paired, read_packed
from tools.plot import STYLES

HERE = Path(__file__).parent
LOGS = HERE / "logs"
COMPARISONS = LOGS / "comparisons.jsonl.gz"


def logs(name):
    """{name of a log: its rows} of an experiment."""
    return read_packed(LOGS / f"{name}.jsonl.gz")


def markdown(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def percent(shares):
    return f"{100 * statistics.fmean(shares):.1f}%"


# ---- comparisons on tiny models ------------------------------------------------------------------

STUDENT = {2: 12.71, 3: 4.303, 6: 2.571, 9: 2.306}  # number of starting models: t of a 95% interval
# No interval is narrower than this, because three starting models may agree by chance. README.md
# says where the limits come from. An interval that was widened to its limit is marked with a star.
NARROWEST = {3: 6, 6: 2}  # points
OPTIONAL = "experts changed", "sampled: greedy", "gradient norm"  # columns that may be missing


def read_runs(path):
    """The rows of a log of runs. The field "arm" of earlier logs becomes "variant"."""
    rows = read_packed(path).get("runs", [])
    return [{"variant" if key == "arm" else key: value for key, value in row.items()}
            for row in rows]


def variants_of(name):
    """All variants of an experiment."""
    return [spec for panel in EXPERIMENTS[name].values() for spec in panel.values()]


def runs_of(spec, rows):
    return [row for row in rows if row["variant"] == spec]


def comparable(variants, rows):
    """The runs of these variants, only from those seeds that every variant has."""
    rows = [row for row in rows if row["variant"] in variants]
    seeds_of_each = [{row["seed"] for row in runs_of(spec, rows)} for spec in variants]
    common = set.intersection(*seeds_of_each)
    return [row for row in rows if row["seed"] in common]


def comparison_table(name, rows):
    """Markdown: a line for each variant, with the mean and every value. An OPTIONAL column is left
    out if nothing was measured in it."""
    lines = []
    for panel, variants in EXPERIMENTS[name].items():
        first = None
        for label, spec in variants.items():
            own = sorted(runs_of(spec, rows), key=lambda r: r["seed"])
            first = first or own
            if own:
                title = ": ".join(filter(None, (panel, label)))
                lines.append({"variant": title, **cells_of(own, first)})
    columns = [column for column in lines[0]
               if column not in OPTIONAL or any(line[column] != "-" for line in lines)]
    cells = [columns] + [[line[column] for column in columns] for line in lines]
    text = [f"| {' | '.join(row)} |" for row in cells]
    text.insert(1, "|---" * len(columns) + "|")
    starts = {}
    cooler = {}
    for r in rows:
        start = r["variant"]["task"], r["cold"]
        if "first" not in r["variant"]:
            starts[start] = f"{r['start']:.0%}"
        if "start_at" in r:
            cooler[start] = " ".join(f"{r['start_at'][t]:.0%}" for t in ("0.6", "0.3", "0.0"))
    text += before_rl("accuracy", starts)
    text += before_rl("accuracy at temperature 0.6, 0.3 and greedily", cooler)
    return "\n".join(text) + "\n"


def before_rl(what, accuracies):
    each = [f"{task} {cold} {value}" for (task, cold), value in sorted(accuracies.items())]
    return [f"\nBefore RL, {what}: {', '.join(each)}"] if each else []


def cells_of(own, first):
    """{column: the cell of this variant, "-" if nothing was measured}.

    own: the runs of this variant. first: the runs of the first variant of the panel."""
    def told(r):
        return f"{100 * r['accuracy']:.0f}" + f" from {100 * r['start']:.0f}" * (
            "first" in r["variant"])

    each = [" ".join(map(told, runs)) for runs in by_cold_start(own).values()]
    probed = [r for r in own if "probe" in r]
    greedy = [f"{100 * r['accuracy']:.0f}: {100 * r['greedy']:.1f}" for r in own if "greedy" in r]
    return {
        "accuracy, mean": f"{mean(own):.1%}",
        "minus the panel's first, points": difference(own, first),
        "each run, by starting model": "; ".join(each),
        "on selection questions": f"{mean(probed, 'probe'):.1%}" if probed else "-",
        "clipped": clipped(own),
        "log_ratio_std": average(own, "log_ratio_std", ".1e"),
        "entropy, last": average(own, "entropy", ".3f", -1),
        "experts changed": average(own, "experts_changed", ".1%"),
        "sampled: greedy": ", ".join(greedy) or "-",
        "gradient norm": spread(logged(own, "grad_norm")),
    }


def logged(rows, metric, start=0):
    """The values of a metric in all rollouts of these runs, from rollout `start` on."""
    return [x for row in rows for x in row.get(metric, [])[start:] if x is not None]


def average(rows, metric, form, start=0):
    values = logged(rows, metric, start)
    return format(statistics.fmean(values), form) if values else "-"


def clipped(rows):
    """The fraction of response tokens that the clip removes from the gradient, or "-" if it was not
    logged. A variant without a clip removes nothing, which earlier logs do not say."""
    spec = rows[0]["variant"]
    if "loss" in spec and spec["loss"][1] == "one":
        return "0.0%"
    return average(rows, "clip_fraction", ".1%")


def spread(values):
    values = [x for x in values if x]
    if not values:
        return "-"
    return f"{min(values):.2g} to {max(values):.2g}, median {statistics.median(values):.2g}"


def by_cold_start(rows):
    """{starting model: its runs}"""
    groups = {}
    for r in rows:
        groups.setdefault(r["cold"], []).append(r)
    return groups


def means(rows, name="accuracy"):
    """{starting model: the mean over its runs}"""
    return {cold: statistics.fmean(r[name] for r in runs)
            for cold, runs in by_cold_start(rows).items()}


def mean(rows, name="accuracy"):
    return statistics.fmean(means(rows, name).values())


def difference(rows, others):
    """The mean difference in accuracy over the starting models that both variants have, in points,
    with a 95% interval from Student's t."""
    own = means(rows)
    first = means(others)
    d = [100 * (own[cold] - first[cold]) for cold in own if cold in first]
    if len(d) not in STUDENT or rows == others:
        return "-"
    half = STUDENT[len(d)] * statistics.stdev(d) / len(d) ** 0.5
    narrowest = NARROWEST.get(len(d), 0)
    return f"{statistics.fmean(d):+.1f} ± {max(half, narrowest):.1f}" + "*" * (half < narrowest)


def of_the_long_task(rows):
    """The runs of the long task, without those that diverged."""
    return [r for r in rows if r["variant"]["task"] == "long" and r.get("entropy")]


def correlation(rows):
    """(number of runs of the long task, Spearman's correlation of their accuracy and the entropy
    at the end)."""
    own = of_the_long_task(rows)
    values = torch.tensor([(r["accuracy"], r["entropy"][-1]) for r in own]).T
    ranks = values.argsort().argsort().double()
    return len(own), torch.corrcoef(ranks)[0, 1].item()


def cooling(rows):
    """A line for the table: the correlation of the accuracy and the entropy at the end."""
    number, value = correlation(rows)
    return (f"\nOver all {number:,} runs of the long task, accuracy and the entropy at the "
            f"end: Spearman's correlation {value:.2f}\n")


def comparison(name, every):
    """The table of an experiment, "" if it has no runs. every: all rows of the log."""
    rows = comparable(variants_of(name), every)
    text = comparison_table(name, rows) if rows else ""
    if name == "greedy" and rows:
        text += cooling(every)
    return text


def comparisons(every):
    """The tables of all experiments that have runs."""
    texts = {name: comparison(name, every) for name in EXPERIMENTS}
    return "\n".join(f"### {name}\n\n{text}" for name, text in texts.items() if text)


# ---- runs without a clip that collapsed ----------------------------------------------------------


def has_no_clip(spec):
    """Whether nothing is clipped or ignored, and the model has had no RL before."""
    return "first" not in spec and spec.get("loss", [0, 0])[1] == "one" and len(spec["loss"]) == 3


def counted(ends):
    """["a of b" whose sampled accuracy is below the start, "c of d" whose greedy accuracy is below
    35%]. ends: for each run, its sampled accuracy minus that of its start, and its greedy accuracy.
    What was not measured is None."""
    below = [change < 0 for change, _ in ends if change is not None]
    low = [greedy < seeds.LOW for _, greedy in ends if greedy is not None]
    return [f"{sum(found)} of {len(found)}" if found else "-" for found in (below, low)]


def collapses(every, tuned, lesson):
    """How many runs without a clip collapsed, by task, updates per rollout and learning rate."""
    found = {}

    def add(group, rate, change, greedy):
        found.setdefault((group, rate), []).append((change, greedy))

    for row in every:
        spec = row["variant"]
        if has_no_clip(spec):
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
                group_of = group + ", 4 updates" * row["variant"].endswith("one epoch")
                add(group_of, first["settings"]["learning_rate"],
                    last["sampled"] - first["start"]["1.0"], last["eval_reward"])
    for row in lesson["collapse"]:
        add("world 0, signs of a collapse", row["rate"], None, row["final"])
    lines = [[group, f"{rate:g}", len(ends), *counted(ends)]
             for (group, rate), ends in sorted(found.items())]
    return markdown(["runs without a clip", "learning rate", "runs", "sampled, below the start",
                     "greedy, below 35%"], lines)


# ---- tuned learning rates ------------------------------------------------------------------------

MODELS = {"long": (17, 18, 19, 20, 21, 22), "world": (31, 32, 33, 34, 35, 36)}
RATES = {
    "GSPO": (1e-4, 2e-4, 3e-4, 6e-4),
    "GRPO": (1e-4, 2e-4, 3e-4, 6e-4),
    "no clip": (3e-5, 1e-4, 2e-4, 3e-4, 6e-4)}
GRID = [(name, rate) for name, rates in RATES.items() for rate in rates]
RANGES = {  # the lower ones, chosen on other starting models at a learning rate of 3e-4
    "long": {"GSPO": 0.01, "GRPO": 0.1, "no clip": NO_LOWER_BOUND},
    "world": {"GSPO": 0.03, "GRPO": 0.4, "no clip": NO_LOWER_BOUND}}
QUESTIONS = {"validation": ("1.0", "0.7", "0.5"), "held out": ("1.0", "0.7", "0.5", "0.0")}


def finished_runs(rows):
    """{task: {(algorithm, learning rate): lines}} of the starting models that have all runs. A task
    without such a starting model is left out."""
    found = {(row["task"], row["start"], row["algorithm"], row["learning_rate"]): row
             for row in rows}
    tasks = {}
    for task, starts in MODELS.items():
        models = [start for start in starts
                  if all((task, start, *setting) in found for setting in GRID)]
        if models:
            tasks[task] = {setting: [found[task, start, *setting] for start in models]
                           for setting in GRID}
    return tasks


def values(lines, questions, temperature):
    return [line[questions][temperature] for line in lines]


def choice(found, name):
    """(learning rate, temperature) of an algorithm, from the validation questions alone.

    In a tie, the lower learning rate and the higher temperature are taken."""
    def mean(rate, temperature):
        return statistics.fmean(values(found[name, rate], "validation", temperature))

    best = max(RATES[name], key=lambda rate: mean(rate, "1.0"))
    temperatures = QUESTIONS["validation"]
    return best, max(temperatures, key=lambda temperature: mean(best, temperature))


def row_of(cells):
    return f"| {' | '.join(cells)} |"


def grid(tasks):
    """The mean accuracies of every algorithm and learning rate."""
    lines = ["| task | algorithm | learning rate | validation, sampled | held out, sampled "
             "| at 0.7 | at 0.5 | greedy | held out, sampled, each model |", "|---" * 9 + "|"]
    for task, found in tasks.items():
        for (name, rate), own in found.items():
            cells = [task, name, f"{rate:g}", percent(values(own, "validation", "1.0"))]
            for temperature in QUESTIONS["held out"]:
                cells.append(percent(values(own, "held out", temperature)))
            each = [percent([share]) for share in values(own, "held out", "1.0")]
            lines.append(row_of([*cells, " ".join(each)]))
    return "\n".join(lines)


def tuned_comparison(tasks):
    """The algorithms at the learning rates that were chosen, on the held-out questions."""
    lines = [f"| task | models | decoding | {' | '.join(RATES)} | GSPO minus GRPO, points "
             "| GSPO minus no clip, points |", "|---" * 8 + "|"]
    choices = ["\nChosen on the validation questions:\n"]
    for task, found in tasks.items():
        held_out = {"sampled": {}, "best temperature": {}, "greedy": {}}
        for name, rates in RATES.items():
            rate, temperature = choice(found, name)
            edge = ", an end of the grid" if rate in (rates[0], rates[-1]) else ""
            choices.append(f"- {task}, {name}: learning rate {rate:g}{edge}; "
                           f"best temperature {temperature}")
            for decoding, at in zip(held_out, ("1.0", temperature, "0.0")):
                held_out[decoding][name] = values(found[name, rate], "held out", at)
        for decoding, own in held_out.items():
            cells = [task, str(len(own["GSPO"])), decoding, *map(percent, own.values())]
            for other in ("GRPO", "no clip"):
                cells.append(mean_difference(own["GSPO"], own[other], narrowest=2))
            lines.append(row_of(cells))
    return "\n".join(lines + choices)


def learning_rates(tasks):
    return f"{tuned_comparison(tasks)}\n\n{grid(tasks)}\n"


# ---- the rule for the clip range -----------------------------------------------------------------

FACTORS = (0.1, 0.5, 2, 8)  # the lower clip range in units of the movement
RULE = 0.5  # the factor that represents the rule
RULE_MODELS = {"long": (11, 12, 13, 14, 15, 16), "world": (21, 22, 23, 24, 25, 26)}
SETTINGS = [(task, updates, learning_rate)
            for task, updates in (("long", 4), ("long", 16), ("world", 4), ("world", 32))
            for learning_rate in (1e-4, 3e-4)]
COMPARED = (0.1, 0.5), (2, 0.5), (8, 0.5), (8, 2)


def range_rule(rows):
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
        accuracy = {factor: [found[*key, start, factor]["accuracy"] for start in RULE_MODELS[task]]
                    for factor in FACTORS}
        mean = {factor: statistics.fmean(accuracy[factor]) for factor in FACTORS}
        moved = [found[*key, start, None]["movement"] for start in RULE_MODELS[task]]
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


# ---- the small world of the lesson ---------------------------------------------------------------

STEP_BY_STEP = 40  # tokens: a longer response is not a guess


def word_problems():
    """GSPO minus GRPO on the word problems of the lesson: the mean of three seeds on each of four
    worlds, and Student's interval over the worlds."""
    last = {key: rows[-1] for key, rows in seeds.runs_of("report").items()}
    worlds = sorted({world for _, world, _ in last})
    lines = []
    for metric, name in (("eval_reward", "greedy"), ("sampled", "sampled")):
        means = {algorithm: [statistics.fmean(row[metric] for (variant, at, _), row in last.items()
                                              if (variant, at) == (algorithm, world))
                             for world in worlds] for algorithm in ("GSPO", "GRPO")}
        lines.append([name, *(f"{statistics.fmean(values):.1%}" for values in means.values()),
                      mean_difference(means["GSPO"], means["GRPO"])])
    return markdown(["decoding", "GSPO", "GRPO", "GSPO minus GRPO, points, four worlds"], lines)


def starting_model(rows):
    lines = ["| temperature | all responses: accuracy (95%) | written step by step | their "
             "accuracy (95%) | accuracy of the others (95%) |", "|---|---|---|---|---|"]
    for temperature in 1.0, 0.6, 0.3:
        own = [row for row in rows if row["temperature"] == temperature]
        written = [row["reward"] for row in own if row["tokens"] >= STEP_BY_STEP]
        guessed = [row["reward"] for row in own if row["tokens"] < STEP_BY_STEP]
        every = [row["reward"] for row in own]
        lines.append(f"| {temperature} | {accuracy_text(every)} | {len(written)} of {len(own)} | "
                     f"{accuracy_text(written)} | {accuracy_text(guessed)} |")
    return "\n".join(lines) + "\n"


def gradients(logs):
    """A line for each variant."""
    lines = ["| variant | grad_norm, step 1 | log_ratio_std, step 1 | reward, mean of all steps | "
             "minus GSPO | eval_reward at the end | reward at the end |", "|---" * 7 + "|"]
    first = None  # the mean rewards of the first variant
    for name in dict.fromkeys(log["variant"] for log in logs):
        runs = [log for log in logs if log["variant"] == name]
        if "stopped" in runs[0]:
            lines.append(f"| {name} | stops: {runs[0]['stopped'].partition('.')[0]} | | | | | |")
            continue
        cells = []
        for metric, part, form in (
                ("grad_norm", slice(1), ".3g"), ("log_ratio_std", slice(1), ".3g"),
                ("reward", slice(None), ".1%"), ("eval_reward", slice(-1, None), ".1%"),
                ("reward", slice(-1, None), ".1%")):
            values = [statistics.mean(log[metric][part]) for log in runs]
            single = ", ".join(f"{value:{form}}" for value in values)
            cells.append(f"{statistics.mean(values):{form}} ({single})")
        rewards = [statistics.mean(log["reward"]) for log in runs]
        first = first or rewards
        cells.insert(3, mean_difference(rewards, first) if rewards != first else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shares(row):
    return f"{row['eval_reward']:.2f} / {row['sampled']:.2f}"


def earlier(rows):
    """Runs at a learning rate of 3e-4 before the plan: final accuracies, greedy / sampled."""
    last = {(row["variant"], row["world"], row["seed"]): row["rows"][-1] for row in rows}
    starts = {row["world"]: row["rows"][0]["start"] for row in rows}
    text = ""
    for titles in ("GSPO", "no clip", "GRPO"), ("GSPO one epoch", "no clip one epoch",
                                                "GRPO one epoch", "one update"):
        lines = []
        for world, seed in sorted({key[1:] for key in last if key[0] == titles[0]}):
            start = starts[world]
            before = " / ".join(f"{x:.2f}" for x in (start["0.0"], start["1.0"],
                                                     max(start.values())))
            cells = [shares(last[name, world, seed]) for name in titles]
            lines.append([f"{world}, {seed}", before, *cells])
        text += markdown(["world, seed", "the start, greedy / sampled / at its best temperature",
                          *titles], lines) + "\n"
    low = [f"{name.split()[1]}: {row['sampled']:.2f}" for (name, _, seed), row in last.items()
           if seed == 100]
    return text + f"GRPO's lower ranges on world 0, seed 100, sampled: {', '.join(low)}\n"


def tried(rows):
    """Runs at a learning rate of 6e-4 before the plan."""
    return markdown(["variant", "world, seed", "greedy / sampled"],
                    [[row["variant"], f"{row['world']}, {row['seed']}", shares(row["rows"][-1])]
                     for row in rows])


def updates(rows):
    """Three numbers of updates per rollout on world 0, with the seeds 0 to 2."""
    lines = []
    for name, number in ("one update", 1), ("one epoch", 8), ("GSPO", 32):
        own = [row["rows"] for row in rows if row["variant"] == name]
        first = [next(row["step"] for row in run[1:] if row["reward"] >= 0.9) for run in own]
        fourth = [run[4]["eval_reward"] for run in own]
        lines.append([
            number, f"{statistics.fmean(run[-1]['cpu_seconds'] for run in own):.0f}",
            ", ".join(map(str, first)), percent(fourth),
            percent([run[-1]["sampled"] for run in own])])
    return markdown(["updates per rollout", "CPU seconds, mean", "first step with a reward of 90%, "
                     "per seed", "greedy after step 4, mean", "sampled at the end, mean"], lines)


def visits(logs):
    """How many responses with an advantage were clipped whenever their minibatch came."""
    lines = []
    for epochs in 4, 1:
        rows = logs[f"visits_{epochs}"]
        first = rows[0]
        never = sum(row["clipped_at_all_visits"] for row in rows)
        lines.append([epochs, f"{first['clipped_at_first_visit']} of {first['responses']}",
                      f"{first['clipped_at_all_visits']} of {first['responses']}",
                      f"{never} of {sum(row['responses'] for row in rows)}"])
    return markdown(["epochs", "clipped at the first visit, step 1", "never contributed, step 1",
                     "never contributed, all steps"], lines)


def prefixes(rows):
    """How often a rollout has several samples of one next token."""
    lines = [[row["step"], f"{row['prefixes_with_one_sample']:.0%}",
              f"{row['tokens_with_company']:.0%}", f"{row['different_responses_per_group']:.1f}"]
             for row in (rows[0], rows[-1])]
    return markdown(["step", "prefixes with one sample", "tokens whose prefix has several",
                     "different responses per group of 16"], lines)


# ---- what tells a collapse -----------------------------------------------------------------------

SIGNS = {"rate": "learning rate", "step 1 loss": "loss of step 1",
         "step 2 log_ratio_std": "`log_ratio_std` of step 2", "step 2 loss": "loss of step 2",
         "step 3 probe 0": "log-prob of beginning a worked answer, after step 3",
         "step 1 log_ratio_std": "no rule was planned: `log_ratio_std` of step 1"}


def flat(value, name):
    """{name: number} of all numbers below a value of the log, but not of `updates`."""
    if isinstance(value, int | float):
        return {name: value}
    found = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key != "updates":
            found |= flat(inner, f"{name} {key}")
    return found


def auc(runs):
    """The share of pairs of a collapsed run and another one with the same learning rate in which
    the collapsed one has the larger value. runs: (learning rate, whether collapsed, value)."""
    return statistics.fmean((x > y) + (x == y) / 2 for rate, fell, x in runs if fell
                            for other, collapsed, y in runs if not collapsed and rate == other)


def balanced(runs, sign, limit):
    """The mean of the shares of the collapsed runs and of the others that a rule recognises."""
    hits = {True: [], False: []}
    for _, fell, x in runs:
        hits[fell].append((sign * (x - limit) > 0) == fell)
    return statistics.fmean(map(statistics.fmean, hits.values()))


def signs(rows):
    """Rules from the first half of the runs (seeds below 200), checked on the second half."""
    halves = [], []
    for row in rows:
        values = flat(row["rate"], "rate") | flat(row["steps"], "step")
        halves[row["seed"] >= 200].append((row["rate"], row["final"] < seeds.LOW, values))
    lines = []
    for name, title in SIGNS.items():
        first, second = ([(rate, fell, values[name]) for rate, fell, values in half]
                         for half in halves)
        area = auc([(0, fell, x) for _, fell, x in first])
        sign = 1 if area > 0.5 else -1
        found = sorted({x for *_, x in first})
        limits = [(a + b) / 2 for a, b in zip(found, found[1:])]
        limit = max(limits, key=lambda limit: balanced(first, sign, limit))
        lines.append([f"{title} {'above' if sign > 0 else 'below'} {limit:.4g}", f"{area:.2f}",
                      f"{balanced(second, sign, limit):.0%}", f"{auc(second):.2f}",
                      f"{auc(first + second):.2f}"])
    text = markdown(["rule for a collapse", "AUC, first half", "balanced accuracy, later runs",
                     "AUC at one learning rate, later runs", "both halves"], lines)
    by_rate = {}
    for row in rows:
        by_rate.setdefault(row["rate"], []).append(row["final"])
    lines = [[f"{rate:g}", len(own), sum(x < seeds.LOW for x in own),
              sum(x < rows[0]["steps"][0]["greedy"] for x in own),
              sum(x >= seeds.SUCCESS for x in own)] for rate, own in sorted(by_rate.items())]
    text += "\n" + markdown(["learning rate", "runs", "greedy, below 35%",
                             "greedy, below the start", "greedy, at least 90%"], lines)
    shown = next(row for row in rows if (row["rate"], row["seed"]) == (4.5e-4, 0))
    kinds = {"all": "all", "short": "of guesses", "long": "of worked responses"}
    lines = [[name, *shown["steps"][1]["updates"][kind]] for kind, name in kinds.items()]
    text += "\n" + markdown(["log s in step 1 of the lesson's run", "values", "mean", "median",
                             "standard deviation", "root mean square"], lines)
    greedy = ", ".join(f"{step['greedy']:.1%}" for step in shown["steps"][:3])
    return text + f"\nIts greedy accuracy before RL, after step 1 and after step 2: {greedy}\n"


# ---- ratios --------------------------------------------------------------------------------------

RATIOS = {  # column of the log: its title
    "token_std": "log-ratio of a token: standard deviation",
    "log_s_std": "log s",
    "log_sum_std": "sum",
    "clipped_gspo": "clipped by GSPO, 3e-4",
    "clipped_grpo": "by GRPO, 0.2",
    "clipped_grpo_at_gspos": "by GRPO, 3e-4",
}


def ratios(rows):
    """Ratios after one epoch of updates, over the first tokens of the responses, of three runs."""
    groups = {}
    for row in rows:
        if "length" in row:
            groups.setdefault((row["model"], row["length"]), []).append(row)
    lines = []
    for key, own in groups.items():
        cells = []
        for name in RATIOS:
            form = ".2%" if name.startswith("clipped") else ".1e"
            cells.append(" ".join(format(row[name], form) for row in own))
        lines.append([*key, *cells])
    return markdown(["model", "first tokens", *RATIOS.values()], lines)


def exact_ratios(rows):
    """Exact gradients of a policy that is small enough to enumerate: the angle between the expected
    gradient and the true one, and the cosine of one batch of 256 responses with the true one. Each
    cell has the mean of four random policies, and the angle also has their range."""
    names = [name for name in rows[0] if isinstance(rows[0][name], dict)]
    groups = {}
    for row in rows:
        groups.setdefault((row["how"], row["spread"], row["length"]), []).append(row)
    lines = []
    for (how, spread, length), own in groups.items():
        cells = []
        for name in names:
            angles = [row[name]["angle"] for row in own]
            cosine = statistics.fmean(row[name]["cosine"] for row in own)
            cells.append(f"{statistics.fmean(angles):.1f} ({min(angles):.1f} to "
                         f"{max(angles):.1f}); {cosine:.2f}")
        lines.append([how, spread, length, *cells])
    return markdown(["policy", "deviation of the tokens' log-ratios", "tokens", *names], lines)


# ---- real models ---------------------------------------------------------------------------------

GPU_RUNS = "gspo_1e-6", "grpo_1e-6", "gspo_5e-6", "grpo_5e-6"


def gsm8k_on_a_cpu(logs):
    """Each model is compared with the fine-tuned one, "cold", and GSPO with GRPO."""
    models = {name: logs[f"cpu/{name}"] for name in ("cold", "sft", "grpo", "gspo")}
    text = answers.table(models, "cold", "the fine-tuned model")
    for temperature in 0.0, 1.0:
        difference, p = answers.difference(models["grpo"], models["gspo"], temperature)
        text += f"\ngspo minus grpo, temperature {temperature}: {difference}, p {p}\n"
    return text


def points(difference):
    return f"{100 * difference:+.1f}"


def table_row(evaluation, baseline):
    """One line of the table. baseline: the pre-trained model on the same questions, at the same
    precision."""
    rewards = evaluation["reward"]
    n = len(rewards)
    cut = sum(tokens == 512 for tokens in evaluation["tokens"])
    cells = [
        evaluation["model"], f"{n} {evaluation['questions']}", evaluation["precision"],
        accuracy_text(rewards), percent(evaluation["last_number"]),
        str(n - sum(evaluation["boxed"])), str(cut)]
    if baseline is evaluation:
        cells += ["", ""]
    else:
        difference, (low, high), p = paired(baseline["reward"], rewards)
        cells += [f"{points(difference)} ({points(low)} to {points(high)})", f"{p:.2g}"]
    return f"| {' | '.join(cells)} |"


def gsm8k(evaluations):
    lines = [
        "| model | questions | precision | accuracy, boxed answer (95% CI) | last number "
        "| no box | cut at 512 | difference in points (95% CI) | exact McNemar p |",
        "|---|---|---|---|---|---|---|---|---|"]
    baselines = {}
    for evaluation in evaluations:
        key = evaluation["questions"], evaluation["precision"]
        baseline = baselines.setdefault(key, evaluation)  # the pre-trained model comes first
        lines.append(table_row(evaluation, baseline))
    return "\n".join(lines) + "\n"


def correlation_of_neighbours(values):
    mean = statistics.fmean(values)
    products = [(a - mean) * (b - mean) for a, b in zip(values, values[1:])]
    return sum(products) / sum((x - mean) ** 2 for x in values)


def gsm8k_pairs(logs):
    """GRPO minus GSPO. Sampled: the mean reward of the steps that both runs have, paired, and an
    interval that treats the steps as independent. Greedy: paired over the questions."""
    lines = []
    for rate in "1e-6", "5e-6":
        rewards = [[row["reward"] for row in logs[f"gpu/{name}_{rate}"] if "reward" in row]
                   for name in ("grpo", "gspo")]
        gaps = [100 * (a - b) for a, b in zip(*rewards)]
        mean = statistics.fmean(gaps)
        half = 1.96 * statistics.stdev(gaps) / len(gaps) ** 0.5
        lines.append([rate, f"sampled, {len(gaps)} paired steps",
                      f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})",
                      f"{correlation_of_neighbours(gaps):.2f}"])
    answers = {(row["model"], row["questions"]): row["reward"] for row in logs["gpu/answers"]}
    for questions in "test", "validation":
        gspo, grpo = (answers[f"{name}_5e-6", questions] for name in ("gspo", "grpo"))
        difference, (low, high), _ = paired(gspo, grpo)
        lines.append(["5e-6", f"greedy, {len(gspo)} {questions} questions",
                      f"{points(difference)} ({points(low)} to {points(high)})", ""])
    return markdown(["learning rate", "accuracy", "GRPO minus GSPO, points",
                     "correlation of neighbouring steps"], lines)


def gsm8k_steps(logs):
    """Means over the first ten and the last ten steps of each run: first, last."""
    metrics = {"reward": ".1%", "response_length": ".0f", "cut": ".1%", "entropy": ".3f",
               "clip_fraction": ".3%", "sampler_gap": ".4f"}
    lines = []
    for name in GPU_RUNS:
        steps = [row for row in logs[f"gpu/{name}"] if "reward" in row]
        cells = [name, len(steps), f"{sum(row['seconds'] for row in steps) / 60:.1f}"]
        for metric, form in metrics.items():
            values = [row[metric] for row in steps if metric in row]
            ends = [format(statistics.fmean(end), form) for end in (values[:10], values[-10:])
                    if values]
            cells.append(", ".join(ends) or "not logged")
        whole = [row["clip_fraction"] for row in steps]
        lines.append([*cells, f"{statistics.fmean(whole):.3%}"])
    return markdown(["run", "steps", "minutes", *metrics, "clip_fraction, all steps"], lines)


# ---- skill or sharpening -------------------------------------------------------------------------


PASS_HEAD = """\
Each model answered each question 16 times at temperature 1. The brackets are 95% intervals over the
questions, and gains are paired. On the small world, 16 blind guesses have a pass@16 of 81.5%.

"""


def pass_at_k(logs):
    """Each pair of models before and after training with `samples` responses to each question. A
    log has the number of correct ones and the reward of the majority, for each question."""
    pairs = {}
    for name, (row,) in logs.items():
        pair, when = name.split("/")
        counted = list(zip(row["correct"], row["majority"], strict=True))
        pairs.setdefault(pair, {})[when] = answers.quantities(counted, row["samples"])
    lines = []
    outcomes = []
    for pair, found in pairs.items():
        before, after = found["before"], found["after"]
        for when, values in found.items():
            lines.append([f"{pair}, {when}", *map(mean_text, values.values())])
        lines.append([f"{pair}, gain", *(answers.gain(before[key], after[key]) for key in before)])
        majority = list(before)[-1]
        versus = answers.gain(after["pass@1"], before[majority])
        outcomes.append([pair, len(before["pass@1"]), versus])
    text = markdown(["model", *before], lines)
    worlds = [found for pair, found in pairs.items() if pair.startswith("world")]
    means = {when: [[statistics.fmean(found[when][key]) for found in worlds] for key in before]
             for when in ("before", "after")}
    gains = map(mean_difference, means["after"], means["before"])
    text += "\n" + markdown(["four worlds, mean", *before], [
        *([when, *map(percent, each)] for when, each in means.items()), ["gain, points", *gains]])
    return PASS_HEAD + text + "\n" + markdown(
        ["model", "questions", f"{majority} before minus pass@1 after"], outcomes)


# ---- precision -----------------------------------------------------------------------------------


def mean_and_range(rows, name, digits):
    values = [row[name] for row in rows]
    mean, low, high = (f"{value:.{digits}f}"
                       for value in (statistics.fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def kept(rows):
    """What a rounded copy of the weights keeps of a change of the weights. Each line has the mean,
    the lowest and the highest value of three changes."""
    lines = []
    for size in (row for row in rows if row["kind"] == "size"):
        for form in "bf16", "float16":
            own = [row for row in rows if row["kind"] == "kept"
                   and (row["size"], row["format"]) == (size["size"], form)]
            other = [row for row in own if row["responses"] == "other"]
            trained = [row for row in own if row["responses"] == "trained"]
            lines.append([
                f"{size['size']:.2g}", f"{size['steps']} at {size['learning_rate']:g}", form,
                f"{statistics.fmean(row['weights_changed'] for row in own):.0%}",
                mean_and_range(other, "kept", 2), mean_and_range(trained, "kept", 2),
                mean_and_range(other, "gap", 4)])
    titles = ["size", "as after steps", "copy", "weights that change", "kept, other responses",
              "kept, trained responses", "difference of log-probs, other responses (nats)"]
    largest = next(row for row in rows if row["kind"] == "activations")
    name, value = next(iter(largest["largest"].items()))
    return (markdown(titles, lines) + f"\nLargest recorded activation: {value:,.0f} ({name}). "
            f"Largest weight: {largest['largest_weight']:,.0f}\n")


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
    lesson = logs("lesson")
    tuned = logs("learning_rates")["runs"]
    gsm8k_logs = logs("gsm8k")
    precision = logs("precision")
    sections = {
        "The small world: the planned test": seeds.tabulate(),
        "The small world: GSPO and GRPO over four worlds": word_problems(),
        "The small world: updates per rollout": updates(lesson["lesson"]),
        "The small world: clipped at every visit": visits(lesson),
        "The small world: several samples of one next token": prefixes(lesson["prefixes"]),
        "The small world: the starting model at other temperatures":
            starting_model(lesson["starting_model"]),
        "The small world: runs at a learning rate of 3e-4": earlier(lesson["earlier"]),
        "The small world: runs at a learning rate of 6e-4": tried(lesson["tried"]),
        "The small world: what tells a collapse": signs(lesson["collapse"]),
        "The small world: the right value and another gradient": gradients(lesson["gradients"]),
        "Runs without a clip that collapsed": collapses(every, tuned, lesson),
        "Tuned learning rates": learning_rates(finished_runs(tuned)),
        "The rule for the clip range": range_rule(logs("range_rule")["runs"]),
        "Ratios after an epoch": ratios(logs("ratios")["ratios"]),
        "Exact gradients": exact_ratios(logs("ratios")["exact_ratios"]),
        "Pass@k before and after RL": pass_at_k(logs("pass_at_k")),
        "GSM8K on a GPU": gsm8k(gsm8k_logs["gpu/answers"]),
        "GSM8K on a GPU: GRPO minus GSPO": gsm8k_pairs(gsm8k_logs),
        "GSM8K on a GPU: metrics": gsm8k_steps(gsm8k_logs),
        "GSM8K on a CPU": gsm8k_on_a_cpu(gsm8k_logs),
        "Multiplication problems": sums.page(sums.published()),
        "Rounding": rounding.table(rounding.by_setting(precision["rounding"])),
        "Copies of the weights": kept(precision["kept"]),
        "Speed beside TRL on a CPU": speed.table(speed.summarise(logs("speed")["beside_trl"])),
        "Comparisons on tiny models": COMPARISON_HEAD + comparisons(every),
    }
    return "\n".join([HEAD, *(f"## {title}\n\n{text}" for title, text in sections.items())])


# ---- the first picture of the page ---------------------------------------------------------------

ACCURACY = "sampled accuracy after RL (%)"
LABELS = {"no clip, A < 0 dropped": "no clip, A < 0 ignored"}  # those that differ from the table's


def colour_of(spec):
    """GSPO and its clipping rule are blue, GRPO's are orange, and no clip is red, as everywhere."""
    gate = spec["loss"][1] if "loss" in spec else spec["algorithm"]
    kind = {"one": "no clipping", "token": "grpo", "grpo": "grpo"}.get(gate, "gspo")
    return STYLES[kind][0]


def draw_opening(rows, path):
    """The variants of `opening` on two tasks. Runs with few updates are hollow squares."""
    on_world = EXPERIMENTS["world"] | EXPERIMENTS["world_few"]
    panels = {
        "long task": {16: opening(**EARLY), 4: opening(**EARLY, epochs=1)},
        "small world": {32: on_world["32 updates a rollout"], 4: on_world["4 updates a rollout"]},
    }
    looks = {"marker": "o"}, {"marker": "s", "fillstyle": "none"}
    figure = Figure((12, 5.4), layout="constrained")
    for axis, (task, panel) in zip(figure.subplots(1, 2, sharey=True), panels.items()):
        starts = []
        for i, variants in enumerate(panel.values()):
            colds_of_each = [set(by_cold_start(runs_of(spec, rows))) for spec in variants.values()]
            common = set.intersection(*colds_of_each)
            for y, spec in enumerate(variants.values()):
                own = [r for r in runs_of(spec, rows) if r["cold"] in common]
                if own:
                    starts += [r["start"] for r in own]
                    height = y + 0.36 * i - 0.18
                    axis.plot([100 * r["accuracy"] for r in own], [height] * len(own),
                              linestyle="", color=colour_of(spec), alpha=0.8, **looks[i])
                    axis.plot([100 * mean(own)] * 2, [height - 0.15, height + 0.15],
                              color="black", linewidth=2.5)
        axis.axvspan(100 * min(starts), 100 * max(starts), color="gray", alpha=0.3)
        axis.set(title=task, xlabel=ACCURACY, xlim=(-2, 102), ylim=(5.5, -0.5))
        labels = [LABELS.get(label, label) for label in variants]
        axis.set_yticks(range(len(variants)), labels)
        axis.grid(axis="x", alpha=0.3)
    many, few = looks
    handles = [Line2D([], [], linestyle="", color="black", label=label, **look) for label, look in (
        ("16 (long task) or 32 (small world) updates per rollout", many),
        ("4 updates per rollout", few))]
    handles.append(Line2D([], [], color="black", linewidth=2.5, label="mean"))
    handles.append(Patch(color="gray", alpha=0.3, label="before RL"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6,
                  title="a marker: one run")
    figure.suptitle("With 16 or 32 updates per rollout, all runs with weight 1 and without a clip\n"
                    "collapse on both tasks, unless wrong answers are ignored.")
    figure.savefig(path, dpi=130)


def draw_pictures():
    """Draws the pictures of README.md from the committed logs."""
    draw_opening(read_runs(COMPARISONS), HERE / "opening.png")
    rounding.draw(rounding.by_setting(logs("precision")["rounding"]), HERE / "rounding.png")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pictures", action="store_true", help="also draw the pictures again")
    args = parser.parse_args(argv)
    (HERE / "tables.md").write_text(page(), encoding="utf-8")
    if args.pictures:
        draw_pictures()
        for path in HERE.glob("*.png"):
            plot.shrink(path)


if __name__ == "__main__":
    main()
