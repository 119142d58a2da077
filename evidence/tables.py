"""Makes all published tables again from the committed logs, in a few seconds.

    python -m evidence.tables               then `git diff` shows whether a table changed
    python -m evidence.tables --pictures    also draws all pictures in results/ again

Nothing is trained or measured. Not included are lesson/results/bugs.md, whose runs take six minutes
(python -m homework.find_the_bug --all), and the pictures of the lesson (`python -m lesson.seeds
table`, `python -m lesson.explorer` and `python -m homework.find_the_bug`).

Four tables belong to measurements whose scripts were deleted after the runs. The scripts are in
commit 5a42b2b: GSM8K on a CPU (evidence/qwen/gsm8k.py), 16-bit copies of the weights
(evidence/precision/kept.py), ratios by length (evidence/tiny/ratios.py), and the test of a
rule for the clip range (evidence/tiny/range_rule.py).
"""
import argparse
import statistics
from pathlib import Path

from evidence.comparisons import report
from evidence.precision import rounding
from evidence.qwen import gsm8k_gpu, sums
from evidence.speed import bench_vs_trl
from evidence.tiny import exact, learning_rates, range_rule, starting_model
from lesson import seeds
from tools import evaluate, plot
from tools.logs import mean_difference, read, read_packed

RESULTS = Path(__file__).with_name("results")
GSM8K = RESULTS / "qwen" / "gsm8k"
PRECISION = RESULTS / "precision"
TINY = RESULTS / "tiny"
RATIOS = {  # column of the log: its title
    "token_std": "log-ratio of a token: standard deviation",
    "log_s_std": "log s",
    "log_sum_std": "sum",
    "clipped_gspo": "clipped by GSPO, 3e-4",
    "clipped_grpo": "by GRPO, 0.2",
    "clipped_grpo_at_gspos": "by GRPO, 3e-4",
}


def markdown(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def gsm8k_on_a_cpu(logs):
    """Each model is compared with the fine-tuned one, "cold", and GSPO with GRPO."""
    models = {name: logs[name] for name in ("cold", "sft", "grpo", "gspo")}
    text = evaluate.table(models, "cold", "the fine-tuned model")
    for temperature in 0.0, 1.0:
        difference, p = evaluate.difference(models["grpo"], models["gspo"], temperature)
        text += f"\ngspo minus grpo, temperature {temperature}: {difference}, p {p}\n"
    return text


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


def tables():
    """{path of a table: its contents}"""
    rounds = bench_vs_trl.summarise(read(bench_vs_trl.RESULTS / "rounds.jsonl"))
    by_rate = learning_rates.finished_runs(read(learning_rates.LOG))
    return {
        report.RESULTS / "tables.md": report.tables(report.read_runs(report.RESULTS / report.LOG)),
        TINY / "ratios.md": ratios(read(TINY / "ratios.jsonl")),
        GSM8K / "table.md": gsm8k_on_a_cpu(read_packed(GSM8K / "logs.jsonl.gz")),
        gsm8k_gpu.RESULTS / "table.md": gsm8k_gpu.table(read(gsm8k_gpu.RESULTS / "answers.jsonl")),
        sums.RESULTS / "table.md": sums.page(sums.published()),
        PRECISION / "rounding.md": rounding.table(rounding.logged(PRECISION)),
        PRECISION / "kept.md": kept(read(PRECISION / "kept.jsonl")),
        bench_vs_trl.RESULTS / "table.md": bench_vs_trl.table(rounds),
        TINY / "word_problems.md": word_problems(),
        TINY / "starting_model.md": starting_model.table(read(starting_model.LOG)),
        TINY / "range_rule.md": range_rule.tables(read(range_rule.LOG)),
        TINY / "learning_rates.md": learning_rates.tables(by_rate),
    }


def draw_pictures():
    """Draws the pictures in results/ from the committed logs."""
    runs = report.read_runs(report.RESULTS / report.LOG)
    for name in "gate", "world":
        report.draw_pictures(name, report.RESULTS, runs)
    exact.draw_ratios(read(exact.RESULTS / "exact_ratios.jsonl"), exact.RESULTS / "exact.png")
    rounding.draw(rounding.logged(PRECISION), PRECISION / "rounding.png")
    by_rate = learning_rates.finished_runs(read(learning_rates.LOG))
    learning_rates.draw(by_rate, learning_rates.RESULTS / "learning_rates.png")
    gsm8k_gpu.draw(read_packed(gsm8k_gpu.RESULTS / "metrics.jsonl"),
                   read(gsm8k_gpu.RESULTS / "answers.jsonl"), gsm8k_gpu.RESULTS / "curves.png")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pictures", action="store_true", help="also draw all pictures again")
    args = parser.parse_args(argv)
    for path, text in tables().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(RESULTS.parents[1]))
    if args.pictures:
        draw_pictures()
        for path in RESULTS.rglob("*.png"):
            plot.shrink(path)


if __name__ == "__main__":
    main()
