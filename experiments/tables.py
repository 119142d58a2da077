"""Makes all published tables again from the committed logs, in a few seconds.

    python -m experiments.tables               then `git diff` shows whether a table changed
    python -m experiments.tables --pictures    also draws all pictures in results/ again

Nothing is trained or measured. Not included are lesson/results/bugs.md, whose runs take six minutes
(python -m lesson.find_the_bug --all), and results/qwen/gsm8k/answers.md, which quotes GSM8K. The
pictures of the lesson are drawn by `python -m lesson.seeds table`, `python -m lesson.clip_figure`
and `python -m lesson.find_the_bug`.
"""
import argparse
import tempfile
from pathlib import Path

from common import plot
from common.logs import read, read_packed, unpack
from experiments.comparisons import report
from experiments.comparisons.settings import EXPERIMENTS
from experiments.precision import kept, rounding
from experiments.qwen import gsm8k, gsm8k_gpu, sums
from experiments.speed import bench_vs_trl
from experiments.tiny import exact, learning_rates, range_rule, ratios

RESULTS = Path(__file__).with_name("results")
GSM8K = RESULTS / "qwen" / "gsm8k"
SUMS = RESULTS / "qwen" / "sums"
SUMS_SHOWN = "gspo_wide_0", "gspo_wide_1", "gspo_wide_2", "grpo_0", "grpo_1", "grpo_2"
GSM8K_TITLE = ("Qwen2.5-Coder-0.5B on GSM8K, one run each: the responses become shorter, and GSPO "
               "is not ahead of GRPO")


def tables():
    """{path of a table: its contents}"""
    runs = read(report.RESULTS / "runs.jsonl")
    found = {report.RESULTS / f"{name}.md": report.text_of(name, runs)
             for name in EXPERIMENTS}
    ratio_rows = read(ratios.RESULTS / "ratios.jsonl")
    found[ratios.RESULTS / "ratios.md"] = ratios.table(ratio_rows)
    answers = gsm8k.answers_in(GSM8K)
    found[GSM8K / "table.md"] = gsm8k.table(answers)
    gpu_answers = read(gsm8k_gpu.RESULTS / "answers.jsonl")
    found[gsm8k_gpu.RESULTS / "table.md"] = gsm8k_gpu.table(gpu_answers)
    measured = rounding.logged(rounding.RESULTS)
    found[rounding.RESULTS / "table.md"] = rounding.table(measured)
    found[kept.LOG.with_suffix(".md")] = kept.tables(read(kept.LOG))
    rounds = bench_vs_trl.summarise(read(bench_vs_trl.RESULTS / "rounds.jsonl"))
    found[bench_vs_trl.RESULTS / "table.md"] = bench_vs_trl.table(rounds)
    found[range_rule.RESULTS / "range_rule.md"] = range_rule.tables(read(range_rule.LOG))
    by_rate = learning_rates.finished_runs(read(learning_rates.LOG))
    found[learning_rates.RESULTS / "learning_rates.md"] = learning_rates.tables(by_rate)
    return found


def draw_pictures():
    """Draws the pictures in results/ from the committed logs."""
    for name in (*report.SHOWN, "factorial", "greedy", "noise", "world"):
        report.draw_pictures(name, report.RESULTS)
    rows = read(ratios.RESULTS / "ratios.jsonl")
    by_length = [row for row in rows if "length" in row]
    histograms = [row for row in rows if "length" not in row]
    ratios.draw(by_length, histograms, ratios.RESULTS / "ratios.png", ratios.TITLE)
    exact.draw_ratios(read(exact.RESULTS / "exact_ratios.jsonl"), exact.RESULTS / "exact.png")
    rounding.draw(rounding.logged(rounding.RESULTS), rounding.RESULTS / "rounding.png")
    range_rule.draw(read(range_rule.LOG), range_rule.RESULTS / "range_rule.png")
    by_rate = learning_rates.finished_runs(read(learning_rates.LOG))
    learning_rates.draw(by_rate, learning_rates.RESULTS / "learning_rates.png")
    gsm8k_gpu.draw(read_packed(gsm8k_gpu.RESULTS / "metrics.jsonl"),
                   read(gsm8k_gpu.RESULTS / "answers.jsonl"), gsm8k_gpu.RESULTS / "curves.png")
    runs = {name.upper(): read(GSM8K / f"{name}.metrics.jsonl")
            for name in ("gspo", "grpo")}
    plot.draw(runs, GSM8K / "runs.png", eps_high=4e-4, title=GSM8K_TITLE)
    with tempfile.TemporaryDirectory() as folder:
        unpack(SUMS / "logs.jsonl", Path(folder))
        runs = {name: sums.load_run(Path(folder, name)) for name in SUMS_SHOWN}
    sums.draw(runs, SUMS / "compared.png")


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
