"""Records the answers of models to held-out questions, and compares the models.

    python -m tools.evaluate after.jsonl --model runs/math/model
                                   [--temperature 0 0.6 1] [--samples 16] [flags of train_math.py]
    python -m tools.evaluate before.jsonl after.jsonl ...
    python -m tools.evaluate runs/mine/eval_0.jsonl runs/mine/eval_25.jsonl

The first command asks the model the questions of the test split, at each temperature (default: 0,
which is greedy decoding). If the log of a run is beside the model's folder, the instruction, the
system prompt, the length, the dataset and --eval_size are those of the run, unless a flag changes
them. The answers are added to after.jsonl, --rollout_rows at a time. The same command continues an
interrupted one. To ask all 1,319 test questions of GSM8K, add --eval_size 1319.

The other commands only print tables. The first file is compared with each other one, which must
have answers to the same questions in the same order. The intervals cover the choice of the
questions and not another training seed. If there are at most eight different correct answers, a
table has the accuracy for each of them. With --samples 16 and a temperature above 0, a table has
pass@k, the probability that at least one of k responses is correct.

On CUDA, greedy responses come from the model in float32, and those at a temperature above 0 from
its float16 copy, with which train_math.py samples. The policy of the copy is slightly different.
For a reward of your own, call main(reward=my_reward) of this module.
"""
import argparse
import itertools
import os
import sys
import zlib
from collections import Counter
from pathlib import Path

import torch

import train_math
from support.runs import checksum
from support.task import load_questions
from tools.answers import load_answers, tables
from tools.logs import append, make_writable, read

FROM_RUN = "instruction", "system", "max_completion_length", "dataset", "eval_size"
RECORDED = "instruction", "system", "max_completion_length", "seed"
NO_METRICS = "eval_reward", "eval_last_number", "eval_questions", "eval_best", "eval_results"


def fingerprint_of(model, tokenizer):
    """A number that changes with the weights and with the chat template."""
    crc = zlib.crc32(str(tokenizer.chat_template).encode())
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        crc = zlib.crc32(values.numpy(), crc)
    return crc


def differing(settings, others):
    """The names of the settings that differ, as a text."""
    names = settings.keys() | others.keys()
    return ", ".join(sorted(key for key in names if settings.get(key) != others.get(key)))


def results_of(row, cfg):
    """The rows of an evaluation, with what the reward has given to log_metric: a list has a value
    for each row, and a number is the same in all rows."""
    results = row["eval_results"]
    for result in results:
        result["cut"] = result["tokens"] == cfg.max_completion_length
    for name, values in row.items():
        if not name.startswith(NO_METRICS):
            if hasattr(values, "tolist"):
                values = values.tolist()
            is_list = isinstance(values, list) and len(values) == len(results)
            for i, result in enumerate(results):
                result.setdefault(name.removeprefix("eval_"), values[i] if is_list else values)
    return results


def ask(path, name, questions, temperatures, cfg, samples=1, **replaced):
    """Adds a model's answers to the file: those that the file does not have.

    name: hub id or folder of the model. replaced: as for train_math.evaluate. SystemExit: the file
    cannot be written, or has something else than answers of this model with these settings."""
    make_writable(path)
    rows = load_answers(path) if path.exists() and path.stat().st_size > 0 else []
    model, tokenizer = replaced.get("load", train_math.load)(str(name), cfg.device)
    settings = {key: getattr(cfg, key) for key in RECORDED}
    settings["questions"] = checksum(questions)
    settings["weights"] = fingerprint_of(model, tokenizer)
    for part, function in replaced.items():
        settings[part] = getattr(function, "__name__", str(type(function)))
    for row in rows:
        changed = differing(settings, row.get("settings", {}))
        if changed:
            sys.exit(f"evaluate.py: the answers in {path} were asked with another {changed}, or do "
                     "not record it. Choose another file")
    # A trial, because the reward may need a column that is not there.
    train_math.evaluate(model, tokenizer, questions[:1], cfg, **replaced)
    answered = Counter((row["temperature"], row["sample"]) for row in rows)
    for temperature, sample in itertools.product(sorted(set(temperatures)), range(samples)):
        at_once = cfg.rollout_rows if temperature else max(1, cfg.rollout_rows // 2)
        for start in range(answered[temperature, sample], len(questions), at_once):
            torch.manual_seed(zlib.crc32(f"{cfg.seed} {sample} {start}".encode()))
            asked = questions[start:start + at_once]
            row = train_math.evaluate(model, tokenizer, asked, cfg, temperature, **replaced)
            about = {"model": str(name), "temperature": temperature, "sample": sample,
                     "settings": settings}
            append(path, *[about | result for result in results_of(row, cfg)])
            print(f"{path.stem}, temperature {temperature}, sample {sample + 1}: "
                  f"{start + len(asked)} of {len(questions)} answers")


def ask_model(args, flags, **replaced):
    """Asks the model with these flags, and with the settings of the run whose log is beside the
    model's folder, if there is one."""
    log = read(Path(os.path.abspath(args.model)).parent / "metrics.jsonl")
    run = log[0].get("settings", {}) if log else {}
    own = [f"--{name}={run[name]}" for name in FROM_RUN if run.get(name) not in (None, 0)]
    cfg = train_math.parse_settings([*own, *flags, "--model", args.model])
    used = " ".join(f"--{name}={getattr(cfg, name)!r}" for name in FROM_RUN)
    print(f"asked with {used}{' (from the run, unless your flags say so)' * bool(own)}")
    reward = replaced.get("reward", train_math.correctness_reward)
    questions, held_out = load_questions(cfg, reward)
    if not held_out:
        sys.exit("evaluate.py: there are no held-out questions")
    if run.get("questions", checksum(questions)) != checksum(questions):
        print("note: the run had other training questions, and some of them may be held out here. "
              "To use the same ones, leave --dataset and --eval_size out")
    ask(args.files[0], args.model, held_out, args.temperature, cfg, args.samples, **replaced)


def parse(argv):
    """(the arguments, the remaining flags, which are those of train_math.py)"""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE",
                        help="answers; the name of the file is the name in the table")
    parser.add_argument("--model", help="hub id or folder of a model whose answers FILE gets")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0],
                        help="sampling temperatures; 0 is greedy decoding")
    parser.add_argument("--samples", type=int, default=1, help="responses to each question")
    args, flags = parser.parse_known_args(argv)
    if min(args.temperature) < 0 or args.samples > 1 and 0 in args.temperature:
        parser.error("--temperature must be at least 0, and above 0 for several --samples")
    if flags and not args.model:
        parser.error(f"these flags need --model: {' '.join(flags)}")
    return args, flags


def main(argv=None, **replaced):
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # of characters that the console cannot show
    args, flags = parse(argv)
    if args.model:
        make_writable(args.files[0])
        ask_model(args, flags, **replaced)
    files = {str(path.with_suffix("")): load_answers(path) for path in args.files}
    print(tables(files))
    settings = [rows[0].get("settings", {}) for rows in files.values()]
    for path, others in zip(files, settings):
        same = {name: settings[0].get(name) for name in ("weights", "seed", "questions")}
        changed = differing(settings[0], others | same)
        if others and settings[0] and changed:
            print(f"note: {path} was asked with another {changed} than the first")


if __name__ == "__main__":
    main()
