"""GSPO, GRPO and no clip, each at its best learning rate: as plans/learning_rates.md says.

    OMP_NUM_THREADS=1 python -m evidence.learning_rates            makes what is missing
    OMP_NUM_THREADS=1 python -m evidence.learning_rates --models 1 3 --tasks long    a part

A starting model takes some 12 minutes of one core on the long task, and 13 on the small world. Each
run is a line of logs/learning_rates.jsonl.gz, and no run is made twice, so an interrupted command
can simply be given again. Afterwards, and with --models 0 at once, the tables are printed.
"""
import argparse
from pathlib import Path

import torch

import train_math
from evidence import compare
from evidence.settings import GRPO, GSPO, NO_LOWER_BOUND, variant
from evidence.tables import GRID, MODELS, QUESTIONS, finished_runs, learning_rates
from tools.logs import append, make_writable, read_packed

LOG = Path(__file__).with_name("logs") / "learning_rates.jsonl.gz"
RANGES = {  # the lower ones, chosen on other starting models at a learning rate of 3e-4
    "long": {"GSPO": 0.01, "GRPO": 0.1, "no clip": NO_LOWER_BOUND},
    "world": {"GSPO": 0.03, "GRPO": 0.4, "no clip": NO_LOWER_BOUND}}


def made():
    """The lines of the runs that are in the log."""
    return read_packed(LOG).get("runs", [])


def run(task, start, name, rate):
    """Make one run and append its line to the log, unless it is there."""
    line = {"task": task, "start": start, "algorithm": name, "learning_rate": rate}
    if any(row == row | line for row in made()):
        return
    line["before"] = compare.cold_start(task, start)
    algorithm = GRPO if name == "GRPO" else GSPO
    spec = variant(algorithm, RANGES[task][name], task=task, learning_rate=rate)
    model, tokenizer = train_math.load(compare.cold_folder(task, start), "cpu")
    try:
        rows = compare.train(spec, model, tokenizer, 100 * start)
        for metric in (*compare.KEPT, "seconds"):
            line[metric] = [compare.four_digits(row[metric]) for row in rows]
    except FloatingPointError as problem:
        line["problem"] = str(problem)
    for questions, temperatures in QUESTIONS.items():
        line[questions] = dict.fromkeys(temperatures, 0.0)  # for a run that diverged
        if "problem" not in line:
            for t in temperatures:
                line[questions][t] = compare.accuracy(
                    model, tokenizer, task, start, questions, float(t))
    append(LOG, {"log": "runs", **line})
    print(task, start, name, rate, line["validation"], line["held out"], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, nargs="+", choices=range(7), default=range(1, 7),
                        help="which starting models, counted from 1; 0: no run, only the tables")
    parser.add_argument("--tasks", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    make_writable(LOG)
    compare.COLD.mkdir(parents=True, exist_ok=True)
    for model in filter(None, args.models):
        for task in args.tasks:
            for name, rate in GRID:
                run(task, MODELS[task][model - 1], name, rate)
    print(learning_rates(finished_runs(made())))


if __name__ == "__main__":
    main()
