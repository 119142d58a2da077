"""Writes the tables of tables.md again from the logs, in a few seconds.

    python -m evidence.table      afterwards, `git diff` shows whether a table has changed

The text between a heading and its first table is written by hand, and stays as it is. The tables
are specified by TABLES, at the end, and comparisons on tiny models by rows of the log.
"""
import functools
import math
import statistics
from itertools import product
from pathlib import Path
from statistics import fmean

from evidence import lesson_seeds
from tools.answers import gain_text, markdown, mean_text, pass_at
from tools.logs import read_packed

PAGE = Path(__file__).with_name("tables.md")
LOGS = Path(__file__).with_name("logs")
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306}  # n: t of 95%


@functools.cache
def logs(name):
    """{name of a log: its rows} of a file in logs/."""
    return read_packed(LOGS / f"{name}.jsonl.gz")


def by(rows, *names):
    """{the values of these columns: the rows that have them}, in the order of the rows."""
    groups = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        groups.setdefault(key if len(names) > 1 else key[0], []).append(row)
    return groups


def column(rows, name):
    return [row[name] for row in rows]


def percent(values):
    return f"{fmean(values):.1%}"


def spread(values, form):
    """The mean, the lowest and the highest value."""
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def points(before, after):
    """The mean of the paired differences in points, with its 95% interval over the questions."""
    return gain_text(before, after).replace("%", "")


def mcnemar(before, after):
    """The p-value of McNemar's exact test: the probability of a split between gained and lost
    answers that is at least as uneven as this one, if both were equally likely."""
    differences = [y - x for x, y in zip(before, after)]
    gained = differences.count(1)
    changed = gained + differences.count(-1)
    fewer = sum(math.comb(changed, k) for k in range(min(gained, changed - gained) + 1))
    return f"{min(1, 2 * fewer / 2**changed):.2g}"


def mean_difference(accuracies, others, narrowest=0):
    """The mean paired difference of two variants' accuracies, in points, with the half width of
    Student's 95% interval: "+5.1 ± 4.6". An interval that was widened to `narrowest` has a star."""
    values = [100 * (a - b) for a, b in zip(accuracies, others, strict=True)]
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    star = "*" if half < narrowest else ""
    return f"{fmean(values):+.1f} ± {max(half, narrowest):.1f}{star}"


def welch(some, others):
    """The difference of two means in points, with Welch's 95% interval for two small samples."""
    variances = [statistics.variance(values) / len(values) for values in (some, others)]
    total = sum(variances)
    parts = [v**2 / (len(values) - 1) for v, values in zip(variances, (some, others))]
    freedom = int(total**2 / sum(parts))
    half = 100 * STUDENT[freedom + 1] * total**0.5
    return f"{100 * (fmean(some) - fmean(others)):+.1f} ± {half:.1f}"


# ---- comparisons on tiny models ------------------------------------------------------------------

# No interval is narrower than this. README.md says why.
NARROWEST = {3: 6, 6: 2}  # number of starting models: points
OPTIONAL = "experts changed", "sampled: greedy", "gradient norm"  # columns that may be missing


def comparison(specs):
    """A line for each variant, and the accuracies of the starting models. Of an experiment, only
    those seeds count that all its variants have."""
    lines = []
    used = []
    for variants in by(specs, "experiment").values():
        runs = [[run for run in logs("comparisons")["runs"] if run["variant"] == row["variant"]]
                for row in variants]
        seeds = set.intersection(*(set(column(own, "seed")) for own in runs))
        firsts = {}  # panel: the runs of its first variant
        for row, own in zip(variants, runs):
            own = sorted((run for run in own if run["seed"] in seeds), key=lambda run: run["seed"])
            first = firsts.setdefault(row["panel"], own)
            name = ": ".join(filter(None, (row["panel"], row["label"])))
            line = {"variant": name, **cells_of(own, first)}
            used += own
            if line not in lines:
                lines.append(line)
    titles = [title for title in lines[0]
              if title not in OPTIONAL or any(line[title] != "-" for line in lines)]
    return markdown(titles, [[line[title] for title in titles] for line in lines]) + before_rl(used)


def before_rl(runs):
    """The accuracies of the starting models of these runs."""
    models = {}
    for run in sorted(runs, key=lambda run: "start_at" in run):
        start = run.get("start_at", {"1.0": run["start"]})
        values = [f"{start[t]:.0%}" for t in ("1.0", "0.6", "0.3", "0.0") if t in start]
        models[f"{run['variant']['task']} {run['cold']}"] = " ".join(values)
    found = ", ".join(map(" ".join, sorted(models.items())))
    return f"\nBefore RL, at temperature 1 and, if measured, at 0.6, 0.3 and greedily: {found}\n"


def by_model(runs, name="accuracy"):
    """The mean over the runs of each starting model."""
    return [fmean(column(own, name)) for own in by(runs, "cold").values()]


def logged(runs, metric, start=0):
    """The values of a metric in all rollouts of these runs, from rollout `start` on."""
    return [x for run in runs for x in run.get(metric, [])[start:] if x is not None]


def average(values, form):
    return format(fmean(values), form) if values else "-"


def cells_of(own, first):
    """{column: its cell, "-" if nothing was measured}. first: the runs of the first variant."""
    accuracies = by_model(own)
    narrowest = NARROWEST.get(len(accuracies), 0)
    versus = mean_difference(accuracies, by_model(first), narrowest) if own != first else "-"
    each = [" ".join(f"{100 * x:.0f}" for x in column(runs, "accuracy"))
            for runs in by(own, "cold").values()]
    probed = [run for run in own if "probe" in run]
    greedy = [f"{100 * run['accuracy']:.0f}: {100 * run['greedy']:.1f}"
              for run in own if "greedy" in run]
    norms = [norm for norm in logged(own, "grad_norm") if norm]
    # Without a clip nothing is clipped, which earlier logs do not say.
    has_clip = own[0]["variant"].get("loss", [0, 0])[1] != "one"
    return {
        "accuracy, mean": percent(accuracies),
        "minus the panel's first, points": versus,
        "each run, by starting model": "; ".join(each),
        "on selection questions": percent(by_model(probed, "probe")) if probed else "-",
        "clipped": average(logged(own, "clip_fraction"), ".1%") if has_clip else "0.0%",
        "log_ratio_std": average(logged(own, "log_ratio_std"), ".1e"),
        "entropy, last": average(logged(own, "entropy", -1), ".3f"),
        "experts changed": average(logged(own, "experts_changed"), ".1%"),
        "sampled: greedy": ", ".join(greedy) or "-",
        "gradient norm": (f"{min(norms):.2g} to {max(norms):.2g}, median "
                          f"{statistics.median(norms):.2g}") if norms else "-",
    }


def ends_without_a_clip():
    """(group of runs, learning rate, sampled accuracy minus that of the start, greedy accuracy) of
    each run. What was not measured is None."""
    for row in logs("comparisons")["runs"]:
        spec = row["variant"]
        loss = spec.get("loss", [])
        if len(loss) == 3 and loss[1] == "one":
            usual = 8e-5 if spec["task"] == "short" else 3e-4
            updates = spec["epochs"] * spec.get("minibatches", 8 if spec["task"] == "world" else 4)
            yield (f"comparisons: {spec['task']}, {updates} updates",
                   spec.get("learning_rate", usual), row["accuracy"] - row["start"],
                   row.get("greedy"))
    for row in logs("learning_rates")["runs"]:
        if row["algorithm"] == "no clip":
            end = row["held out"]
            yield (f"tuned learning rates: {row['task']}", row["learning_rate"],
                   end["1.0"] - row["before"]["1.0"], end["0.0"])
    groups = {"report": "planned pairs", "choose": "small world, choice of settings",
              "tried": "small world, choice of settings", "earlier": "small world, earlier"}
    for part, group in groups.items():
        for row in logs("lesson")[part]:
            first, last = row["rows"][0], row["rows"][-1]
            if row["variant"].startswith("no clip"):
                few = ", 4 updates" if row["variant"].endswith("one epoch") else ""
                yield (group + few, first["settings"]["learning_rate"],
                       last["sampled"] - first["start"]["1.0"], last["eval_reward"])
    for row in logs("lesson")["collapse"]:
        yield "world 0, signs of a collapse", row["rate"], None, row["final"]


def counted(ends):
    """["a of b" that end below the start, "c of d" whose greedy accuracy is below 35%]."""
    below = [change < 0 for change, _ in ends if change is not None]
    low = [greedy < lesson_seeds.LOW for _, greedy in ends if greedy is not None]
    return [f"{sum(found)} of {len(found)}" if found else "-" for found in (below, low)]


def collapses():
    """How many runs without a clip collapsed, by task, updates per rollout and learning rate."""
    found = {}
    for group, rate, *end in ends_without_a_clip():
        found.setdefault((group, rate), []).append(end)
    return markdown(
        ["runs without a clip", "learning rate", "runs", "sampled, below the start",
         "greedy, below 35%"],
        [[group, f"{rate:g}", len(ends), *counted(ends)]
         for (group, rate), ends in sorted(found.items())])


CHOSEN = {  # task: the learning rate of each algorithm that is best on the validation questions
    "long": {"GSPO": 3e-4, "GRPO": 2e-4, "no clip": 1e-4},
    "world": {"GSPO": 3e-4, "GRPO": 1e-4, "no clip": 1e-4}}


def learning_rates():
    """The algorithms at the learning rates that were chosen, and all accuracies. On the validation
    questions, 0.5 is the best temperature of all algorithms."""
    decodings = {"sampled": "1.0", "best temperature": "0.5", "greedy": "0.0"}
    compared = []
    grid = []
    for task, rows in by(logs("learning_rates")["runs"], "task").items():
        found = by(rows, "algorithm", "learning_rate")
        for decoding, temperature in decodings.items():
            gspo, grpo, free = ([row["held out"][temperature] for row in found[chosen]]
                                for chosen in CHOSEN[task].items())
            compared.append([task, len(gspo), decoding, *map(percent, (gspo, grpo, free)),
                             mean_difference(gspo, grpo, narrowest=2),
                             mean_difference(gspo, free, narrowest=2)])
        for (name, rate), own in found.items():
            held_out = column(own, "held out")
            means = [percent(column(held_out, t)) for t in ("1.0", "0.7", "0.5", "0.0")]
            each = " ".join(f"{x:.1%}" for x in column(held_out, "1.0"))
            validation = percent(column(column(own, "validation"), "1.0"))
            grid.append([task, name, f"{rate:g}", validation, *means, each])
    summary = markdown(["task", "models", "decoding", "GSPO", "GRPO", "no clip",
                        "GSPO minus GRPO, points", "GSPO minus no clip, points"], compared)
    return summary + "\n" + markdown(
        ["task", "algorithm", "learning rate", "validation, sampled", "held out, sampled",
         "at 0.7", "at 0.5", "greedy", "held out, sampled, each model"], grid)


def four_worlds():
    """GSPO and GRPO in the planned test: the mean of three seeds on each of four worlds."""
    runs = by(sorted(logs("lesson")["report"], key=lambda run: run["world"]), "variant")
    lines = []
    for name, metric in (("greedy", "eval_reward"), ("sampled", "sampled")):
        gspo, grpo = ([fmean(run["rows"][-1][metric] for run in own)
                       for own in by(runs[algorithm], "world").values()]
                      for algorithm in ("GSPO", "GRPO"))
        lines.append([name, percent(gspo), percent(grpo), mean_difference(gspo, grpo)])
    return markdown(["decoding", "GSPO", "GRPO", "GSPO minus GRPO, points, four worlds"], lines)


def gradients():
    """A line for each variant, with the mean of five seeds and each seed."""
    lines = []
    whole, first, last = slice(None), slice(1), slice(-1, None)
    metrics = (("grad_norm", first, ".3g"), ("log_ratio_std", first, ".3g"),
               ("reward", whole, ".1%"), ("eval_reward", last, ".1%"), ("reward", last, ".1%"))
    groups = by(logs("lesson")["gradients"], "variant")
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


def ratios():
    """Ratios after one epoch of updates, over the first tokens of the responses, of three runs."""
    titles = {
        "log-ratio of a token: standard deviation": ("token_std", ".1e"),
        "log s": ("log_s_std", ".1e"),
        "sum": ("log_sum_std", ".1e"),
        "clipped by GSPO, 3e-4": ("clipped_gspo", ".2%"),
        "by GRPO, 0.2": ("clipped_grpo", ".2%"),
        "by GRPO, 3e-4": ("clipped_grpo_at_gspos", ".2%"),
    }
    rows = [row for row in logs("measurements")["ratios"] if "length" in row]
    return markdown(["model", "first tokens", *titles], [
        [*key, *(" ".join(f"{x:{form}}" for x in column(own, name))
                 for name, form in titles.values())]
        for key, own in by(rows, "model", "length").items()])


def exact_ratios():
    """Exact gradients of a policy that is small enough to enumerate."""
    rows = logs("measurements")["exact_ratios"]
    names = [name for name in rows[0] if isinstance(rows[0][name], dict)]

    def cell(found):
        return f"{spread(column(found, 'angle'), '.1f')}; {fmean(column(found, 'cosine')):.2f}"

    return markdown(["policy", "deviation of the tokens' log-ratios", "tokens", *names], [
        [*key, *(cell(column(own, name)) for name in names)]
        for key, own in by(rows, "how", "spread", "length").items()])


def stale():
    """Means over the steps 5 to 8, in which the rollouts have their full age."""
    runs = [row | {"range": f"{row['clip'][0].upper()} {row['clip'][1]:g}"}
            for row in logs("measurements")["stale"]]
    runs.sort(key=lambda row: row["range"])
    names = "clip_fraction", "clipped_first", "moved_first", "log_ratio_std"
    lines = [[*key, *(spread([fmean(run[name][4:]) for run in own], ".3f") for name in names),
              spread(column(own, "accuracy"), ".1%")]
             for key, own in by(runs, "range", "age").items()]
    return markdown(["range", "age, in steps", "clip fraction", "in the first update",
                     "std of log s there", "std of log s later", "held-out accuracy, sampled"],
                    lines)


def rounding():
    """Standard deviations of log s, with the fraction of responses outside of GSPO's clip range."""
    rows = by(logs("measurements")["rounding"], "setting")
    low, high = math.log(1 - 3e-4), math.log(1 + 4e-4)

    def cell(values):
        outside = fmean(not low <= value <= high for value in values)
        return f"{statistics.stdev(values):.1e}, {outside:.0%} out"

    lines = []
    for name, n in product(rows, ("32", "128", "512")):
        own = rows[name][0][n]
        stepped = own["off the grid"]
        apart = [x - y for x, y in zip(stepped, rows["float32"][0][n]["off the grid"])]
        lines.append([f"{name}, {n}", *map(cell, (own["decode"], own["padding"], own["rows"])),
                      f"{max(map(abs, own['again'])):.1g}", cell(stepped),
                      f"{statistics.stdev(apart):.1e}" if any(apart) else "reference",
                      cell(own["as published"])])
    return markdown(["setting, tokens", "sampler against forward", "64 more pad columns",
                     "micro-batches of 3 rows", "same micro-batch, max", "after one step",
                     "apart from float32's", "the step on published weights"], lines)


def kept():
    """What a rounded copy of the weights keeps of a change of the weights."""
    kinds = by(logs("measurements")["kept"], "kind")
    lines = []
    for size, form in product(kinds["size"], ("bf16", "float16")):
        own = by(kinds["kept"], "size", "format")[size["size"], form]
        other, trained = (by(own, "responses")[which] for which in ("other", "trained"))
        lines.append([
            f"{size['size']:.2g}", f"{size['steps']} at {size['learning_rate']:g}", form,
            f"{fmean(column(own, 'weights_changed')):.0%}", spread(column(other, "kept"), ".2f"),
            spread(column(trained, "kept"), ".2f"), spread(column(other, "gap"), ".4f")])
    return markdown(
        ["size", "as after steps", "copy", "weights that change", "kept, other responses",
         "kept, trained responses", "difference of log-probs, other responses (nats)"], lines)


def gsm8k():
    """The pre-trained model comes first at each precision, and the others are compared with it."""
    lines = []
    for same in by(logs("gsm8k")["gpu/answers"], "questions", "precision").values():
        baseline = same[0]["reward"]
        for row in same:
            rewards = row["reward"]
            versus = [points(baseline, rewards), mcnemar(baseline, rewards)]
            lines.append([
                row["model"], f"{len(rewards)} {row['questions']}", row["precision"],
                mean_text(rewards), percent(row["last_number"]),
                len(rewards) - sum(row["boxed"]), row["tokens"].count(512),
                *(["", ""] if row is same[0] else versus)])
    return markdown(["model", "questions", "precision", "accuracy, boxed answer (95% CI)",
                     "last number", "no box", "cut at 512", "difference in points (95% CI)",
                     "exact McNemar p"], lines)


def gsm8k_pairs():
    """GRPO minus GSPO, paired over the steps that both runs have, or over the questions."""
    lines = []
    for rate in "1e-6", "5e-6":
        # Row 0 is an evaluation. Both runs are cut to as many steps.
        grpo, gspo = (column(logs("gsm8k")[f"gpu/{name}_{rate}"][1:], "reward")
                      for name in ("grpo", "gspo"))
        grpo, gspo = zip(*zip(grpo, gspo))
        gaps = [100 * (x - y) for x, y in zip(grpo, gspo)]
        mean = fmean(gaps)
        half = 1.96 * statistics.stdev(gaps) / len(gaps) ** 0.5
        tens = [[fmean(values[i:i + 10]) for i in range(0, len(gaps), 10)]
                for values in (grpo, gspo)]
        neighbours = sum((a - mean) * (b - mean) for a, b in zip(gaps, gaps[1:]))
        lines.append([rate, f"sampled, {len(gaps)} paired steps",
                      f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})",
                      mean_difference(*tens),
                      f"{neighbours / sum((gap - mean) ** 2 for gap in gaps):.2f}"])
    answers = by(logs("gsm8k")["gpu/answers"], "model", "questions")
    for questions in "test", "validation":
        gspo, grpo = (answers[f"{name}_5e-6", questions][0]["reward"] for name in ("gspo", "grpo"))
        name = f"greedy, {len(gspo)} {questions} questions"
        lines.append(["5e-6", name, points(gspo, grpo), "", ""])
    return markdown(["learning rate", "accuracy", "GRPO minus GSPO, points",
                     "the same over means of ten steps", "correlation of neighbouring steps"],
                    lines)


def correct(rows, temperature=0.0):
    """1 or 0 for each answer at this temperature, in the order of the questions."""
    own = [row for row in rows if row["temperature"] == temperature]
    return column(sorted(own, key=lambda row: row["question"]), "reward")


def multiplication():
    """A line for each run, and the difference of the two algorithms."""
    log = logs("sums")
    before = correct(log["grpo_0/before"])  # the pre-trained model is the same for all runs
    begun = correct(log["grpo_0/before_given"])
    lines = []
    ends = {"greedy": {}, "sampled": {}}
    for run in sorted(name[:-len("/after")] for name in log if name.endswith("/after")):
        start, *steps = log[f"{run}/training/metrics"]
        greedy, sampled = (correct(log[f"{run}/after"], t) for t in (0.0, 1.0))
        both = correct(log.get(f"{run}/after_given", []))
        name = "{algorithm}, {eps_low:g}".format(**start["settings"])
        ends["greedy"].setdefault(name, []).append(fmean(greedy))
        ends["sampled"].setdefault(name, []).append(fmean(sampled))
        lines.append([
            f"{run}: {name}", mean_text(greedy), points(before, greedy), points(begun, greedy),
            points(begun, both) if both else "-", percent(sampled),
            f"{sum(column(steps, 'seconds')) / 60:.0f}"])
    means = []
    for decoding, end in ends.items():
        gspo = end["gspo, 0.03"]
        grpo = end["grpo, 0.2"]
        means.append([decoding, mean_difference(gspo[:3], grpo), percent(gspo), percent(grpo),
                      welch(gspo, grpo)])
    return markdown(
        ["run: algorithm, lower clip range", "greedy accuracy (95%)", "minus pre-trained",
         "minus pre-trained with the calculation begun", "the same, begun for both",
         "sampled accuracy", "minutes"], lines) + "\n" + markdown(
        ["decoding", "GSPO minus GRPO, seeds 0 to 2, paired", "GSPO, six seeds",
         "GRPO, three seeds", "difference, Welch"], means)


def own_tasks():
    """Runs on five tasks of one's own."""
    log = logs("own_tasks")
    lines = []
    for run in sorted(name[:-len("/summary")] for name in log if name.endswith("/summary")):
        (summary,) = log[f"{run}/summary"]
        rate = log[f"{run}/metrics"][0]["settings"]["learning_rate"]
        before, after = (column(log[f"{run}/eval_{step}"], "reward") for step in (0, 20))
        constant = summary["constant_reward"]
        full = [sum(reward > 0.999 for reward in rewards) for rewards in (before, after)]
        gains = [y - x for x, y in zip(before, after)]
        low = fmean(gains) - 1.96 * statistics.pstdev(gains) / len(gains) ** 0.5
        lines.append([
            summary["task"], run.split("_")[1] if "_solutions_" in run else 0, rate,
            summary["seed"], f"{fmean(before):.3f}", f"{fmean(after):.3f}",
            gain_text(before, after, ".3f"), f"{constant:.3f}",
            "{} to {} of {}".format(*full, len(after)),
            "yes" if low > 0 and fmean(after) > constant else "no",
            f"{summary['seconds'] / 60:.0f}"])
    return markdown(["task", "solutions first", "learning rate", "seed", "before", "after",
                     "difference (95% CI, paired)", "best constant", "fully correct",
                     "criterion met", "minutes"], lines)


def quantities(log):
    """For each question: pass@k for each k, and the reward of the most frequent answer."""
    found = [[pass_at(k, int(c), log["samples"]) for c in log["correct"]] for k in (1, 2, 4, 8, 16)]
    return [*found, log["majority"]]


def pass_at_k():
    """Each pair of models before and after training, with 16 samples of each answer."""
    log = logs("measurements")
    pairs = {}
    for name, (row, *_) in log.items():
        part, *pair = name.split("/")
        if part == "pass_at_k":
            pairs.setdefault(pair[0], []).append(quantities(row))
    lines = []
    outcomes = []
    worlds = []
    for pair, (before, after) in pairs.items():
        lines.append([f"{pair}, before", *map(mean_text, before)])
        lines.append([f"{pair}, after", *map(mean_text, after)])
        lines.append([f"{pair}, gain", *map(gain_text, before, after)])
        outcomes.append([pair, len(before[0]), gain_text(after[0], before[-1])])
        if pair.startswith("world"):
            worlds.append([list(map(fmean, before)), list(map(fmean, after))])
    before, after = (list(zip(*found)) for found in zip(*worlds))
    (many,) = log["majority/world 0"]
    first, *_, last = quantities(many)
    titles = ["pass@1", "pass@2", "pass@4", "pass@8", "pass@16", "majority@16"]
    return "\n".join([
        markdown(["model", *titles], lines),
        markdown(["four worlds, mean", *titles], [
            ["before", *map(percent, before)], ["after", *map(percent, after)],
            ["gain, points", *map(mean_difference, after, before)]]),
        markdown(["model", "questions", "majority@16 before minus pass@1 after"], outcomes),
        f"World 0 before training, with {many['samples']} samples per question: pass@1 "
        f"{mean_text(first)}, majority@{many['samples']} {mean_text(last)}.\n"])


# ---- the page ------------------------------------------------------------------------------------

TABLES = {  # without those of comparisons
    "The small world: the planned test": lesson_seeds.table,
    "The small world: GSPO and GRPO over four worlds": four_worlds,
    "The small world: updates per rollout": lesson_seeds.updates,
    "The small world: the right value and another gradient": gradients,
    "Runs without a clip that collapsed": collapses,
    "Tuned learning rates": learning_rates,
    "Ratios after an epoch": ratios,
    "Exact gradients": exact_ratios,
    "Stale rollouts": stale,
    "Pass@k before and after RL": pass_at_k,
    "GSM8K on a GPU": gsm8k,
    "GSM8K on a GPU: GRPO minus GSPO": gsm8k_pairs,
    "Multiplication problems": multiplication,
    "Tasks of one's own": own_tasks,
    "Rounding": rounding,
    "Copies of the weights": kept,
}


def page(text):
    """The contents of tables.md with new tables. text: its present contents."""
    comparisons = by(logs("comparisons")["experiments"], "table")
    head, *sections = text.split("\n## ")
    found = [head]
    for section in sections:
        title, _, rest = section.partition("\n")
        note = rest[:rest.index("|")]  # the text before the first table
        new = comparison(comparisons[title]) if title in comparisons else TABLES[title]()
        found.append(f"{title}\n{note}{new}")
    return "\n## ".join(found)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
