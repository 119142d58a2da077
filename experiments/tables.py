"""Makes all published tables again from the committed logs, in a few seconds.

    python -m experiments.tables          then `git diff` shows whether a table changed

Nothing is trained or measured. Pictures are drawn by the scripts that made them, for example by
`python -m experiments.rival_report all`. Not included are lesson/results/bugs.md, whose runs take
six minutes (python -m lesson.find_the_bug --all), and results/gsm8k/answers.md, which quotes GSM8K.
"""
from pathlib import Path

from common.logs import read
from experiments import bench_vs_trl, precision, ratios, rival_report
from experiments.qwen import gsm8k, gsm8k_gpu
from experiments.rival_settings import EXPERIMENTS

RESULTS = Path(__file__).with_name("results")


def tables():
    """{path of a table: its contents}"""
    runs = read(rival_report.RESULTS / "runs.jsonl")
    found = {rival_report.RESULTS / f"{name}.md": rival_report.text_of(name, runs)
             for name in EXPERIMENTS}
    ratio_rows = read(rival_report.RESULTS / "ratios.jsonl")
    found[rival_report.RESULTS / "ratios.md"] = ratios.table(ratio_rows)
    answers = gsm8k.answers_in(RESULTS / "gsm8k")
    found[RESULTS / "gsm8k" / "table.md"] = gsm8k.table(answers)
    gpu_answers = read(gsm8k_gpu.RESULTS / "answers.jsonl")
    found[gsm8k_gpu.RESULTS / "table.md"] = gsm8k_gpu.table(gpu_answers)
    measured = precision.logged(precision.RESULTS)
    found[precision.RESULTS / "table.md"] = precision.table(measured)
    rounds = bench_vs_trl.summarise(read(bench_vs_trl.RESULTS / "rounds.jsonl"))
    found[bench_vs_trl.RESULTS / "table.md"] = bench_vs_trl.table(rounds)
    return found


def main():
    for path, text in tables().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(RESULTS.parents[1]))


if __name__ == "__main__":
    main()
