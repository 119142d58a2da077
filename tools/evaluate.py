"""Records the answers of models to held-out questions, and compares the models.

    python -m tools.evaluate after.jsonl --model runs/math/model
                                   [--temperature 0 0.6 1] [--samples 16] [flags of train_math.py]
    python -m tools.evaluate before.jsonl after.jsonl ...
    python -m tools.evaluate runs/mine/eval_0.jsonl runs/mine/eval_25.jsonl

The first command asks the model the questions of the test split, at each temperature (default: 0,
which is greedy decoding). If the log of a run is beside the model's folder, the instruction, the
system prompt, the length, the dataset and --eval_size are those of the run, unless a flag changes
them. after.jsonl gets a row per response, with these settings and a fingerprint of the weights and
of the questions. What the file already has is not asked again, and a file that was asked with other
settings is refused. To ask all 1,319 test questions of GSM8K, add --eval_size 1319.

With --samples 16 and a temperature above 0, each question is asked 16 times. A second table has
- pass@k, the probability that at least one of k responses is correct. From n responses of which c
  are correct, 1 - C(n - c, k) / C(n, k) estimates it without bias (Chen et al. 2021,
  arxiv.org/abs/2107.03374). pass@1 is the mean over all responses, which is also called avg@16.
- majority@16, the accuracy of the most frequent answer. The answer is what the default reward reads
  in a response; with a reward of your own, it is the whole response. A response without an answer
  has no vote. If several answers have equally many votes, their mean counts.

On CUDA, greedy responses come from the model in float32, and those at a temperature above 0 from
its float16 copy, with which train_math.py samples. The policy of the copy is slightly different.
Each row and the table say which precision was used (earlier rows do not). On CPUs, it is float32.

The other commands only print the tables. Each file is compared with the first one, question by
question, so all files must have answers to the same questions, in any order. The intervals cover
the choice of the questions and not another training seed. Rewards that are not only 0 and 1 have a
mean without a percent sign, and no pass@k. For a reward of your own, call main(reward=my_reward) of
this module.
"""
import argparse
import math
import os
import sys
import zlib
from pathlib import Path

import torch

import train_math
from support.runs import checksum
from support.sampling import TRIED
from support.task import extract_answer
from tools.answers import load_answers, samples_table, table, temperatures_of
from tools.logs import make_writable, read, write

FROM_RUN = "instruction", "system", "max_completion_length", "dataset", "eval_size"
RECORDED = "instruction", "system", "max_completion_length", "seed"


def missing(path, temperatures, samples=1):
    """The pairs (temperature, number of the sample) of which the file has no answers yet."""
    found = {(row.get("temperature", 0.0), row.get("sample", 0)) for row in read(path)}
    return sorted({(t, i) for t in temperatures for i in range(samples)} - found)


def precision(model, temperature, device):
    """The precision in which `generate` has computed responses at this temperature."""
    is_copy = temperature and torch.device(device).type == "cuda"
    return "float16" if is_copy and model.config.model_type in TRIED else "float32"


def fingerprint_of(model, tokenizer):
    """A number that changes with the weights and with the chat template."""
    crc = zlib.crc32(str(tokenizer.chat_template).encode())
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        crc = zlib.crc32(values.numpy(), crc)
    return crc


def refuse_another(path, settings):
    """SystemExit: the answers in the file were asked with other settings than these."""
    for row in read(path):
        if row.get("model", settings["model"]) != settings["model"]:
            sys.exit(f"evaluate.py: {path} has answers of {row['model']}. Choose another file for "
                     f"those of {settings['model']}")
        recorded = {"model": settings["model"], **row.get("settings", {})}
        changed = [name for name, value in settings.items()
                   if recorded.get(name, "not recorded") != value]
        if changed:
            sys.exit(f"evaluate.py: the answers in {path} were asked with another "
                     f"{', '.join(changed)}, or do not record it. Choose another file")


def note_other_settings(models):
    """Prints which files were asked with other settings than the first one, where both have them.
    models: {name: rows}"""
    (first_name, (first, *_)), *others = models.items()
    for name, (row, *_) in others:
        settings = [one.get("settings", {}) for one in (first, row)]
        names = {*settings[0], *settings[1]} - {"model", "weights", "seed", "questions"}
        changed = sorted(key for key in names if settings[0].get(key) != settings[1].get(key))
        if all(settings) and changed:
            print(f"note: {name} was asked with another {', '.join(changed)} than {first_name}")


def ask(path, name, questions, temperatures, cfg, samples=1, **replaced):
    """Adds a model's answers to the file: those that the file does not have.

    name: hub id or folder of the model. replaced: as for train_math.evaluate, but not the sampler.
    Each row has the name of the model, the temperature, the number of the sample, the settings, and
    what train_math.evaluate returns. SystemExit: the file cannot be written, or has answers with
    other settings."""
    make_writable(path)
    parts = train_math.Parts(**replaced)
    is_default = parts.reward is train_math.correctness_reward
    answer_of = extract_answer if is_default else str.strip  # it votes for the majority
    settings = {"model": str(name)} | {key: getattr(cfg, key) for key in RECORDED}
    settings["questions"] = checksum(questions)
    for part, function in replaced.items():
        settings[part] = getattr(function, "__name__", str(type(function)))
    refuse_another(path, settings)
    load = replaced.get("load", train_math.load)
    model, tokenizer = load(str(name), cfg.device)
    settings["weights"] = fingerprint_of(model, tokenizer)
    refuse_another(path, settings)
    todo = missing(path, temperatures, samples)
    if not todo:
        print(f"{path} has these answers already, so nothing was asked")
    for temperature, _ in todo[:1]:  # a trial: the reward may need a column that is not there
        train_math.evaluate(model, tokenizer, questions[:1], cfg, temperature, **replaced)
    for temperature, sample in todo:
        torch.manual_seed(cfg.seed * 1_000_003 + sample)
        row = train_math.evaluate(model, tokenizer, questions, cfg, temperature, **replaced)
        about = {"model": str(name), "temperature": temperature, "sample": sample,
                 "precision": precision(model, temperature, cfg.device), "settings": settings}
        rows = read(path)
        for result in row["eval_results"]:
            is_cut = result["tokens"] == cfg.max_completion_length
            extracted = answer_of(result["response"])
            rows.append({**about, **result, "cut": is_cut, "extracted": extracted})
        write(path, rows)
        print(f"{path.stem}, temperature {temperature}, sample {sample + 1}, in "
              f"{about['precision']}: mean reward {row['eval_reward']:.3f}")
        if "eval_best_constant" in row:
            print(f"always the same answer has an accuracy of {row['eval_best_constant']:.1%} at "
                  "best")


# ---- the command ---------------------------------------------------------------------------------


def ask_model(args, flags, **replaced):
    """Asks the model with these flags, and with the settings of the run whose log is beside the
    model's folder, if there is one."""
    rows = read(Path(os.path.abspath(args.model)).parent / "metrics.jsonl")
    run = rows[0].get("settings", {}) if rows else {}
    own = [f"--{name}={run[name]}" for name in FROM_RUN if run.get(name) not in (None, 0)]
    cfg = train_math.parse_settings([*own, *flags, "--model", args.model])
    used = " ".join(f"--{name}={getattr(cfg, name)!r}" for name in FROM_RUN)
    print(f"asked with {used}{' (from the run, unless your flags say so)' * bool(own)}")
    reward = replaced.get("reward", train_math.correctness_reward)
    questions, held_out = train_math.load_questions(cfg, reward)
    if not held_out:
        sys.exit("evaluate.py: there are no held-out questions")
    trained_on = checksum(questions)
    if run.get("questions", trained_on) != trained_on:
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
    if len({path.resolve() for path in args.files}) < len(args.files):
        parser.error("the same file is given twice")
    if not all(0 <= t < math.inf for t in args.temperature) or args.samples < 1:
        parser.error("--temperature must be at least 0, and --samples at least 1")
    if args.samples > 1 and 0 in args.temperature:
        parser.error("--samples needs a --temperature above 0, because greedy responses are equal")
    if len(set(args.temperature)) < len(args.temperature):
        print("note: each temperature is asked once. For several responses to a question, use "
              "--samples")
    if not args.model and (flags or args.samples > 1):
        parser.error(f"these flags need --model: {' '.join(flags or ['--samples'])}")
    return args, flags


def main(argv=None, **replaced):
    args, flags = parse(argv)
    if args.model:
        make_writable(args.files[0])
        ask_model(args, flags, **replaced)
    names = [path.stem for path in args.files]
    if len(set(names)) < len(names):
        names = [str(path) for path in args.files]
    models = dict(zip(names, map(load_answers, args.files)))
    try:
        print(table(models, names[0], "the first"))
        for temperature in temperatures_of(*models.values()):
            print(samples_table(models, temperature))
        note_other_settings(models)
    except ValueError as error:
        sys.exit(f"evaluate.py: {error}")


if __name__ == "__main__":
    main()
