"""Makes all published tables again from the committed logs, in half a minute.

    python -m evidence.tables               writes tables.md; `git diff` shows whether it changed
    python -m evidence.tables --pictures    also draws their pictures and lesson/collapse.png again

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

from evidence import lesson_seeds, rounding, speed
from evidence.tasks import COMPARISONS, EARLY, EXPERIMENTS, opening, variants_of
from tools import answers, plot
from tools.logs import STUDENT, markdown, mean_difference, mean_text, paired, read_packed
from tools.plot import STYLES

HERE = Path(__file__).parent
LOGS = HERE / "logs"


def logs(name):
    """{name of a log: its rows} of an experiment."""
    return read_packed(LOGS / f"{name}.jsonl.gz")


def by(rows, *names):
    """{the values of these columns: the rows that have them}, in the order of the rows."""
    groups = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        groups.setdefault(key if len(names) > 1 else key[0], []).append(row)
    return groups


def percent(shares):
    return f"{statistics.fmean(shares):.1%}"


def spread(values, form):
    """The mean of these values, the lowest and the highest one."""
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def points(before, after):
    """The paired difference in points with its 95% interval, "-" if there are no values."""
    if not (before and after):
        return "-"
    difference, (low, high), _ = paired(before, after)
    return f"{100 * difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


# ---- comparisons on tiny models ------------------------------------------------------------------

# No interval is narrower than this, because three starting models may agree by chance. README.md
# says where the limits come from. An interval that was widened to its limit is marked with a star.
NARROWEST = {3: 6, 6: 2}  # number of starting models: points
OPTIONAL = "experts changed", "sampled: greedy", "gradient norm"  # columns that may be missing


def read_runs(path):
    """The rows of a log of runs. The field "arm" of earlier logs becomes "variant"."""
    rows = read_packed(path).get("runs", [])
    return [{"variant" if key == "arm" else key: value for key, value in row.items()}
            for row in rows]


def runs_of(spec, rows):
    return [row for row in rows if row["variant"] == spec]


def comparable(variants, rows):
    """The runs of these variants, only from those seeds that every variant has."""
    rows = [row for row in rows if row["variant"] in variants]
    seeds_of_each = [{row["seed"] for row in runs_of(spec, rows)} for spec in variants]
    common = set.intersection(*seeds_of_each)
    return [row for row in rows if row["seed"] in common]


def comparison(name, every):
    """The table of an experiment, with a line for each variant; "" if it has no runs. every: all
    rows of the log. An OPTIONAL column is left out if nothing was measured in it."""
    rows = comparable(variants_of(name), every)
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
    columns = [column for column in lines[0]
               if column not in OPTIONAL or any(line[column] != "-" for line in lines)]
    text = markdown(columns, [[line[column] for column in columns] for line in lines])
    starts = {}
    cooler = {}
    for row in rows:
        model = row["variant"]["task"], row["cold"]
        if "first" not in row["variant"]:
            starts[model] = f"{row['start']:.0%}"
        if "start_at" in row:
            cooler[model] = " ".join(f"{row['start_at'][t]:.0%}" for t in ("0.6", "0.3", "0.0"))
    text += before_rl("accuracy", starts)
    text += before_rl("accuracy at temperature 0.6, 0.3 and greedily", cooler)
    return text + cooling(every) * (name == "greedy")


def before_rl(what, accuracies):
    each = [f"{task} {cold} {value}" for (task, cold), value in sorted(accuracies.items())]
    return f"\nBefore RL, {what}: {', '.join(each)}\n" if each else ""


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
    spec = own[0]["variant"]
    clipped = average(own, "clip_fraction", ".1%")
    if spec.get("loss", [0, 0])[1] == "one":  # nothing is clipped, which earlier logs do not say
        clipped = "0.0%"
    return {
        "accuracy, mean": f"{mean(own):.1%}",
        "minus the panel's first, points": difference(own, first),
        "each run, by starting model": "; ".join(
            " ".join(map(told, runs)) for runs in by(own, "cold").values()),
        "on selection questions": f"{mean(probed, 'probe'):.1%}" if probed else "-",
        "clipped": clipped,
        "log_ratio_std": average(own, "log_ratio_std", ".1e"),
        "entropy, last": average(own, "entropy", ".3f", -1),
        "experts changed": average(own, "experts_changed", ".1%"),
        "sampled: greedy": ", ".join(greedy) or "-",
        "gradient norm": (f"{min(norms):.2g} to {max(norms):.2g}, median "
                          f"{statistics.median(norms):.2g}") if norms else "-",
    }


def logged(rows, metric, start=0):
    """The values of a metric in all rollouts of these runs, from rollout `start` on."""
    return [x for row in rows for x in row.get(metric, [])[start:] if x is not None]


def average(rows, metric, form, start=0):
    values = logged(rows, metric, start)
    return format(statistics.fmean(values), form) if values else "-"


def means(rows, name="accuracy"):
    """{starting model: the mean over its runs}"""
    return {cold: statistics.fmean(row[name] for row in runs)
            for cold, runs in by(rows, "cold").items()}


def mean(rows, name="accuracy"):
    return statistics.fmean(means(rows, name).values())


def difference(rows, others):
    """The mean difference in accuracy over the starting models that both variants have."""
    own = means(rows)
    first = means(others)
    common = [cold for cold in own if cold in first]
    if len(common) not in STUDENT or rows == others:
        return "-"
    pairs = [own[cold] for cold in common], [first[cold] for cold in common]
    return mean_difference(*pairs, narrowest=NARROWEST.get(len(common), 0))


def cooling(every):
    """Spearman's correlation of the accuracy and the entropy at the end, over all runs of the long
    task that did not diverge."""
    own = [row for row in every if row["variant"]["task"] == "long" and row.get("entropy")]
    values = torch.tensor([(row["accuracy"], row["entropy"][-1]) for row in own]).T
    ranks = values.argsort().argsort().double()
    value = torch.corrcoef(ranks)[0, 1].item()
    return (f"\nOver all {len(own):,} runs of the long task, accuracy and the entropy at the "
            f"end: Spearman's correlation {value:.2f}\n")


# ---- runs without a clip that collapsed ----------------------------------------------------------


def has_no_clip(spec):
    """Whether nothing is clipped or ignored, and the model has had no RL before."""
    return "first" not in spec and spec.get("loss", [0, 0])[1] == "one" and len(spec["loss"]) == 3


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
QUESTIONS = {"validation": ("1.0", "0.7", "0.5"), "held out": ("1.0", "0.7", "0.5", "0.0")}


def finished_runs(rows):
    """{task: {(algorithm, learning rate): its rows}} of the starting models that have all runs."""
    tasks = {}
    for task, own in by(rows, "task").items():
        models = {start: runs for start, runs in by(own, "start").items() if len(runs) == len(GRID)}
        runs = [row for start in sorted(models) for row in models[start]]
        if runs:
            tasks[task] = by(runs, "algorithm", "learning_rate")
    return tasks


def values(rows, questions, temperature):
    return [row[questions][temperature] for row in rows]


def choice(found, name):
    """(learning rate, temperature) of an algorithm, from the validation questions alone.

    In a tie, the lower learning rate and the higher temperature are taken."""
    def mean(rate, temperature):
        return statistics.fmean(values(found[name, rate], "validation", temperature))

    best = max(RATES[name], key=lambda rate: mean(rate, "1.0"))
    temperatures = QUESTIONS["validation"]
    return best, max(temperatures, key=lambda temperature: mean(best, temperature))


def learning_rates(rows):
    """The algorithms at the learning rates that were chosen, these choices, and all accuracies."""
    compared = []
    choices = ""
    grid = []
    for task, found in finished_runs(rows).items():
        held_out = {"sampled": {}, "best temperature": {}, "greedy": {}}
        for name, rates in RATES.items():
            rate, temperature = choice(found, name)
            edge = ", an end of the grid" if rate in (rates[0], rates[-1]) else ""
            choices += (f"- {task}, {name}: learning rate {rate:g}{edge}; "
                        f"best temperature {temperature}\n")
            for decoding, at in zip(held_out, ("1.0", temperature, "0.0")):
                held_out[decoding][name] = values(found[name, rate], "held out", at)
        for decoding, own in held_out.items():
            versus = [mean_difference(own["GSPO"], own[other], narrowest=2)
                      for other in ("GRPO", "no clip")]
            compared.append([task, len(own["GSPO"]), decoding, *map(percent, own.values()),
                             *versus])
        for name, rate in GRID:
            own = found[name, rate]
            validation = percent(values(own, "validation", "1.0"))
            means = [percent(values(own, "held out", t)) for t in QUESTIONS["held out"]]
            each = " ".join(percent([share]) for share in values(own, "held out", "1.0"))
            grid.append([task, name, f"{rate:g}", validation, *means, each])
    return markdown(["task", "models", "decoding", *RATES, "GSPO minus GRPO, points",
                     "GSPO minus no clip, points"], compared) + (
        f"\nChosen on the validation questions:\n\n{choices}\n") + markdown(
        ["task", "algorithm", "learning rate", "validation, sampled", "held out, sampled",
         "at 0.7", "at 0.5", "greedy", "held out, sampled, each model"], grid)


# ---- the rule for the clip range -----------------------------------------------------------------

FACTORS = (0.1, 0.5, 2, 8)  # the lower clip range in units of the movement
RULE = 0.5  # the factor that represents the rule
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
        moved = [row["movement"] for row in runs[None]]
        accuracy = {factor: [row["accuracy"] for row in runs[factor]] for factor in FACTORS}
        mean = {factor: statistics.fmean(accuracy[factor]) for factor in FACTORS}
        shortfall.append(max(mean.values()) - mean[RULE])
        if updates >= 16:
            too_wide.append(mean[8] < mean[RULE])
        else:
            slow.append(mean[0.1] < mean[RULE])
        name = f"{task}, {updates}, {rate:g}"
        movement = f"{min(moved):.2g}, {statistics.median(moved):.2g}, {max(moved):.2g}"
        means.append([name, movement, *(f"{mean[factor]:.1%}" for factor in FACTORS),
                      f"{100 * shortfall[-1]:.1f}"])
        differences.append([name, *(mean_difference(accuracy[a], accuracy[b])
                                    for a, b in COMPARED)])
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

STEP_BY_STEP = 40  # tokens: a longer response is not a guess


def word_problems():
    """GSPO minus GRPO on the word problems of the lesson: the mean of three seeds on each of four
    worlds, and Student's interval over the worlds."""
    runs = [{"variant": name, "world": world, **rows[-1]}
            for (name, world, _), rows in sorted(lesson_seeds.runs_of("report").items())]
    lines = []
    for metric, name in (("eval_reward", "greedy"), ("sampled", "sampled")):
        gspo, grpo = (
            [statistics.fmean(row[metric] for row in own) for own in by(of, "world").values()]
            for of in (by(runs, "variant")[algorithm] for algorithm in ("GSPO", "GRPO")))
        lines.append([name, percent(gspo), percent(grpo), mean_difference(gspo, grpo)])
    return markdown(["decoding", "GSPO", "GRPO", "GSPO minus GRPO, points, four worlds"], lines)


def starting_model(rows):
    lines = []
    for temperature in 1.0, 0.6, 0.3:
        own = by(rows, "temperature")[temperature]
        written = [row["reward"] for row in own if row["tokens"] >= STEP_BY_STEP]
        guessed = [row["reward"] for row in own if row["tokens"] < STEP_BY_STEP]
        every = [row["reward"] for row in own]
        lines.append([temperature, mean_text(every), f"{len(written)} of {len(own)}",
                      mean_text(written), mean_text(guessed)])
    return markdown(["temperature", "all responses: accuracy (95%)", "written step by step",
                     "their accuracy (95%)", "accuracy of the others (95%)"], lines)


def gradients(rows):
    """A line for each variant."""
    metrics = (("grad_norm", slice(1), ".3g"), ("log_ratio_std", slice(1), ".3g"),
               ("reward", slice(None), ".1%"), ("eval_reward", slice(-1, None), ".1%"),
               ("reward", slice(-1, None), ".1%"))
    lines = []
    first = None  # the mean rewards of the first variant
    for name, runs in by(rows, "variant").items():
        if "stopped" in runs[0]:
            lines.append([name, f"stops: {runs[0]['stopped'].partition('.')[0]}", *[""] * 5])
            continue
        cells = []
        for metric, part, form in metrics:
            values = [statistics.mean(run[metric][part]) for run in runs]
            single = ", ".join(f"{value:{form}}" for value in values)
            cells.append(f"{statistics.mean(values):{form}} ({single})")
        rewards = [statistics.mean(run["reward"]) for run in runs]
        first = first or rewards
        cells.insert(3, mean_difference(rewards, first) if rewards != first else "")
        lines.append([name, *cells])
    return markdown(["variant", "grad_norm, step 1", "log_ratio_std, step 1",
                     "reward, mean of all steps", "minus GSPO", "eval_reward at the end",
                     "reward at the end"], lines)


def before_the_plan(rows):
    """Runs before the plan of the lesson: their accuracies, greedy / sampled."""
    lines = []
    for row in rows:
        first, last = row["rows"][0], row["rows"][-1]
        start = [first["start"]["0.0"], first["start"]["1.0"], max(first["start"].values())]
        lines.append([
            row["variant"], f"{row['world']}, {row['seed']}",
            f"{first['settings']['learning_rate']:g}", " / ".join(f"{x:.2f}" for x in start),
            f"{last['eval_reward']:.2f} / {last['sampled']:.2f}"])
    return markdown(["variant", "world, seed", "learning rate",
                     "the start, greedy / sampled / at its best temperature", "greedy / sampled"],
                    sorted(lines))


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
    fallen = [row for row in runs if has_fallen(row)]
    others = [row for row in runs if not has_fallen(row)]
    return statistics.fmean(
        (value(x) > value(y)) + (value(x) == value(y)) / 2
        for x in fallen for y in others if x["rate"] == y["rate"] or not same_rate)


def balanced(runs, value, sign, limit):
    """The mean of the shares of the collapsed runs and of the others that a rule recognises."""
    hits = {True: [], False: []}
    for row in runs:
        hits[has_fallen(row)].append((sign * (value(row) - limit) > 0) == has_fallen(row))
    return statistics.fmean(map(statistics.fmean, hits.values()))


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
    lines = []
    for rate, runs in sorted(by(rows, "rate").items()):
        below = sum(row["final"] < rows[0]["steps"][0]["greedy"] for row in runs)
        lines.append([f"{rate:g}", len(runs), sum(map(has_fallen, runs)), below,
                      sum(row["final"] >= lesson_seeds.SUCCESS for row in runs)])
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
    lines = []
    rows = [row for row in rows if "length" in row]
    for key, own in by(rows, "model", "length").items():
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
    lines = []
    for key, own in by(rows, "how", "spread", "length").items():
        cells = []
        for name in names:
            angles = spread([row[name]["angle"] for row in own], ".1f")
            cosine = statistics.fmean(row[name]["cosine"] for row in own)
            cells.append(f"{angles}; {cosine:.2f}")
        lines.append([*key, *cells])
    return markdown(["policy", "deviation of the tokens' log-ratios", "tokens", *names], lines)


# ---- GSM8K ---------------------------------------------------------------------------------------

GPU_RUNS = "gspo_1e-6", "grpo_1e-6", "gspo_5e-6", "grpo_5e-6"


def gsm8k_on_a_cpu(logs):
    """Each model is compared with the fine-tuned one, "cold", and GSPO with GRPO."""
    models = {name: logs[f"cpu/{name}"] for name in ("cold", "sft", "grpo", "gspo")}
    text = answers.table(models, "cold", "the fine-tuned model")
    for temperature in 0.0, 1.0:
        difference, p = answers.difference(models["grpo"], models["gspo"], temperature)
        text += f"\ngspo minus grpo, temperature {temperature}: {difference}, p {p}\n"
    return text


def gsm8k(evaluations):
    """The pre-trained model comes first at each precision, and the others are compared with it."""
    lines = []
    for same in by(evaluations, "questions", "precision").values():
        baseline = same[0]["reward"]
        for row in same:
            rewards = row["reward"]
            versus = ["", ""]
            if row is not same[0]:
                versus = [points(baseline, rewards), f"{paired(baseline, rewards)[2]:.2g}"]
            lines.append([
                row["model"], f"{len(rewards)} {row['questions']}", row["precision"],
                mean_text(rewards), percent(row["last_number"]),
                len(rewards) - sum(row["boxed"]), row["tokens"].count(512), *versus])
    return markdown(["model", "questions", "precision", "accuracy, boxed answer (95% CI)",
                     "last number", "no box", "cut at 512", "difference in points (95% CI)",
                     "exact McNemar p"], lines)


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
        lines.append(["5e-6", f"greedy, {len(gspo)} {questions} questions", points(gspo, grpo), ""])
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


# ---- multiplication problems ---------------------------------------------------------------------


def correct(run, when, temperature=0.0):
    """1 or 0 for each answer of a model, in the order of the questions."""
    return answers.column(run.get(when, []), temperature)


def sums_line(name, run):
    """The cells of one run. An answer that was not asked is "-"."""
    start, *steps = run["training/metrics"]
    settings = start["settings"]
    after, given = correct(run, "after"), correct(run, "before_given")
    sampled = correct(run, "after", 1.0)
    minutes = sum(row.get("seconds", 0) for row in steps) / 60
    return [f"{name}: {settings['algorithm']}, {settings['eps_low']:g}", mean_text(after),
            points(correct(run, "before"), after), points(given, after),
            points(given, correct(run, "after_given")), percent(sampled) if sampled else "-",
            f"{minutes:.0f}"]


def welch(some, others):
    """The difference of two means in points, with Welch's 95% interval for two small samples."""
    variances = [statistics.variance(values) / len(values) for values in (some, others)]
    total = sum(variances)
    freedom = total**2 / sum(v**2 / (len(values) - 1)
                             for v, values in zip(variances, (some, others)))
    half = 100 * STUDENT[int(freedom) + 1] * total**0.5
    return f"{100 * (statistics.fmean(some) - statistics.fmean(others)):+.1f} ± {half:.1f}"


def gspo_minus_grpo(runs):
    """GSPO at 3e-2 minus GRPO, for the three common seeds and for all runs."""
    lines = []
    for temperature, name in ((0.0, "greedy"), (1.0, "sampled")):
        grpo, gspo = (
            [statistics.fmean(correct(runs[f"{prefix}_{seed}"], "after", temperature))
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
        first, *later = [row["clip_fraction"] for row in steps]
        lines.append([name, greedy(steps[-1]), percent([row["reward"] for row in steps[-5:]]),
                      f"{steps[0]['log_ratio_std']:.2f}", f"{first:.0%}",
                      f"{statistics.fmean(later):.0%}"])
    lines.append(["pre-trained", greedy(logs["gspo_3e-4"][0]), "", "", "", ""])
    return markdown(["run", "greedy accuracy (95%)", "reward of the last five rollouts",
                     "log_ratio_std, first rollout", "clipped, first rollout", "later"], lines)


def sums_on_gsm8k(runs):
    """The accuracy on 192 short questions of GSM8K after some runs."""
    before = answers.column(runs["gspo_2"]["gsm8k_before"], 0.0, "last_number")
    lines = [["pre-trained", mean_text(before), ""]]
    for name, run in runs.items():
        if "gsm8k_after" in run:
            after = answers.column(run["gsm8k_after"], 0.0, "last_number")
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
                     [sums_line(name, run) for name, run in runs.items()])
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


# ---- tasks of one's own -------------------------------------------------------------------------


def own_tasks(logs):
    """Runs on five tasks of one's own, and those that chose the settings of the recipe."""
    titles = ["task", "solutions first", "learning rate", "seed", "before", "after",
              "difference (95% CI, paired)", "best constant", "fully correct", "criterion met",
              "minutes"]
    lines = []
    for run in sorted(name[:-len("/summary")] for name in logs if name.endswith("/summary")):
        summary = logs[f"{run}/summary"][0]
        steps = [row["step"] for row in logs[f"{run}/metrics"] if "eval_reward" in row]
        first, last = (logs[f"{run}/eval_{step}"] for step in (steps[0], steps[-1]))
        before, after = ([row["reward"] for row in results] for results in (first, last))
        difference, (low, high), _ = paired(before, after)
        mean = statistics.fmean(after)
        constant = summary["constant_reward"]
        full = [sum(reward > 0.999 for reward in rewards) for rewards in (before, after)]
        lines.append([
            summary["task"], run.split("_")[1] if "_solutions_" in run else 0,
            logs[f"{run}/metrics"][0]["settings"]["learning_rate"], summary["seed"],
            f"{statistics.fmean(before):.3f}", f"{mean:.3f}",
            f"{difference:+.3f} ({low:+.3f} to {high:+.3f})", f"{constant:.3f}",
            "{} to {} of {}".format(*full, len(after)),
            "yes" if low > 0 and mean > constant else "no", f"{summary['seconds'] / 60:.0f}"])
    return markdown(titles, lines)


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


def kept(rows):
    """What a rounded copy of the weights keeps of a change of the weights. Each line has the mean,
    the lowest and the highest value of three changes."""
    kinds = by(rows, "kind")
    lines = []
    for size in kinds["size"]:
        for form in "bf16", "float16":
            own = by(kinds["kept"], "size", "format")[size["size"], form]
            other, trained = (by(own, "responses")[which] for which in ("other", "trained"))
            lines.append([
                f"{size['size']:.2g}", f"{size['steps']} at {size['learning_rate']:g}", form,
                f"{statistics.fmean(row['weights_changed'] for row in own):.0%}",
                spread([row["kept"] for row in other], ".2f"),
                spread([row["kept"] for row in trained], ".2f"),
                spread([row["gap"] for row in other], ".4f")])
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
    lines = []
    for (clip, age), own in by(runs, "range", "age").items():
        cells = [spread([statistics.fmean(run[name][4:]) for run in own], ".3f")
                 for name in ("clip_fraction", "clipped_first", "moved_first", "log_ratio_std")]
        lines.append([clip, age, *cells, spread([run["accuracy"] for run in own], ".1%")])
    lines.sort(key=lambda line: line[0])
    titles = ["range", "age, in steps", "clip fraction", "in the first update",
              "std of log s there", "std of log s later", "held-out accuracy, sampled"]
    return (f"Starting models: worlds {', '.join(map(str, whole))}. Means over steps 5 to 8; in "
            "brackets, the lowest and the highest starting model.\n\n" + markdown(titles, lines))


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
    precision = logs("precision")
    sections = {
        "The small world: the planned test": lesson_seeds.tabulate(),
        "The small world: GSPO and GRPO over four worlds": word_problems(),
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
        "The rule for the clip range": range_rule(logs("range_rule")["runs"]),
        "Ratios after an epoch": ratios(logs("ratios")["ratios"]),
        "Exact gradients": exact_ratios(logs("ratios")["exact_ratios"]),
        "Stale rollouts": stale(logs("stale")["runs"]),
        "Pass@k before and after RL": pass_at_k(logs("pass_at_k")),
        "GSM8K on a GPU": gsm8k(gsm8k_logs["gpu/answers"]),
        "GSM8K on a GPU: GRPO minus GSPO": gsm8k_pairs(gsm8k_logs),
        "GSM8K on a GPU: metrics": gsm8k_steps(gsm8k_logs),
        "GSM8K on a CPU": gsm8k_on_a_cpu(gsm8k_logs),
        "Multiplication problems": multiplication(logs("sums")),
        "Tasks of one's own": own_tasks(logs("own_tasks")),
        "Rounding": rounding.table(precision["rounding"]),
        "Copies of the weights": kept(precision["kept"]),
        "Speed beside TRL on a CPU": speed.table(logs("speed")["beside_trl"]),
        "Comparisons on tiny models": COMPARISON_HEAD + "\n".join(comparisons),
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
        "long task": (opening(**EARLY), opening(**EARLY, epochs=1)),
        "small world": (on_world["32 updates a rollout"], on_world["4 updates a rollout"]),
    }
    many, few = {"marker": "o"}, {"marker": "s", "fillstyle": "none"}
    figure = Figure((12, 5.4), layout="constrained")
    for axis, (task, panel) in zip(figure.subplots(1, 2, sharey=True), panels.items()):
        starts = []
        for variants, look, shift in zip(panel, (many, few), (-0.18, 0.18)):
            colds_of_each = [set(by(runs_of(spec, rows), "cold")) for spec in variants.values()]
            common = set.intersection(*colds_of_each)
            for y, spec in enumerate(variants.values()):
                own = [row for row in runs_of(spec, rows) if row["cold"] in common]
                starts += [row["start"] for row in own]
                axis.plot([100 * row["accuracy"] for row in own], [y + shift] * len(own),
                          linestyle="", color=colour_of(spec), alpha=0.8, **look)
                axis.plot([100 * mean(own)] * 2, [y + shift - 0.15, y + shift + 0.15],
                          color="black", linewidth=2.5)
        axis.axvspan(100 * min(starts), 100 * max(starts), color="gray", alpha=0.3)
        axis.set(title=task, xlabel=ACCURACY, xlim=(-2, 102), ylim=(5.5, -0.5))
        labels = [LABELS.get(label, label) for label in variants]
        axis.set_yticks(range(len(variants)), labels)
        axis.grid(axis="x", alpha=0.3)
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
    """Draws the pictures of README.md and of the lesson from the committed logs."""
    draw_opening(read_runs(COMPARISONS), HERE / "opening.png")
    rounding.draw(logs("precision")["rounding"], HERE / "rounding.png")
    lesson_seeds.draw_collapse(lesson_seeds.fresh_runs(), lesson_seeds.PICTURE)


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
