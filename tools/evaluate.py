"""Records the answers of models to held-out questions, and compares the models.

    python -m tools.evaluate after.jsonl --model runs/math/model
                                   [--temperature 0 0.6 1] [--samples 16] [flags of train_math.py]
    python -m tools.evaluate before.jsonl after.jsonl ...
    python -m tools.evaluate runs/mine/eval_0.jsonl runs/mine/eval_25.jsonl

The first command asks the model the questions of the test split, at each temperature (default: 0,
which is greedy decoding). If the log of a run is beside the model's folder, the instruction, the
system prompt, the length, the dataset and --eval_size are those of the run; they are printed, and a
flag changes them. after.jsonl gets a row per response, with the settings, and a fingerprint of the
weights and the questions. What the file already has is not asked again, and a file that was asked
with other settings is refused. To ask all 1,319 test questions of GSM8K, add --eval_size 1319.

With --samples 16 at a temperature above 0, each question is asked 16 times. Then a second table has
- pass@k: the probability that at least one of k responses is correct, estimated without bias;
- majority: the accuracy of the most frequent answer. An answer is what the default reward reads in
  a response; with a reward of your own, it is the whole response. A response without an answer has
  no vote. Answers with equally many votes count as their mean. Without any vote, a question is 0.

On CUDA, greedy responses come from the model in float32, and those at a temperature above 0 from
its float16 copy, with which train_math.py samples. The policy of the copy is slightly different.
Each row and the table say which precision was used (earlier rows do not). On CPUs, it is float32.

The other commands only print the tables. Each file is compared with the first one, question by
question, so all files must have answers to the same questions, in any order. Rewards that are not
only 0 and 1 have a mean without a percent sign, and no pass@k. With --last_number, the last number
of a response counts as its answer, whatever its format. For a reward of your own, call
main(reward=my_reward) of this module.
"""
import argparse
import math
import os
import sys
import zlib
from pathlib import Path

import torch

import train_math
from tools.compare import (
    column,
    difference,
    is_graded,
    load_answers,
    samples_table,
    table,
    temperatures_of,
)
from tools.logs import make_writable, read, write

__all__ = ["ask", "column", "difference", "missing", "table"]  # what evidence/ uses
FROM_RUN = "instruction", "system", "max_completion_length", "dataset", "eval_size"
RECORDED = "instruction", "system", "max_completion_length", "seed", "questions"


def missing(path, temperatures, samples=1):
    """The pairs (temperature, number of the sample) of which the file has no answers yet."""
    found = {(row.get("temperature", 0.0), row.get("sample", 0)) for row in read(path)}
    return sorted({(t, i) for t in temperatures for i in range(samples)} - found)


def precision(model, temperature, device):
    """The precision in which `generate` has computed responses at this temperature."""
    dtypes = [torch.float32]
    if temperature and torch.device(device).type == "cuda":
        # The attribute is not there if static_rollout cannot be used.
        dtypes = [*getattr(model, "sampling_dtypes", []), *dtypes]
    return str(dtypes[0]).removeprefix("torch.")


def weights_of(model, tokenizer):
    """A number that another model, or another chat template, does not have."""
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
        asked_with = row.get("settings", {})
        changed = [name for name, value in settings.items()
                   if name != "model" and asked_with.get(name, "not recorded") != value]
        if changed:
            sys.exit(f"evaluate.py: the answers in {path} have another {', '.join(changed)}, or do "
                     "not record it. Choose another file")


def ask(path, name, questions, temperatures, cfg, samples=1, answer_of=None, **replaced):
    """Adds a model's answers to the file: those that the file does not have.

    name: hub id or folder of the model. answer_of: the answer in a response, which is counted for
    the majority. replaced: as for train_math.evaluate, but not the sampler. Each row has the name
    of the model, the temperature, the number of the sample, the settings, and what
    train_math.evaluate returns. SystemExit: the file has answers with other settings."""
    parts = train_math.replace_parts(train_math.Parts(), replaced)
    is_default = parts.reward is train_math.correctness_reward
    answer_of = answer_of or (train_math.extract_answer if is_default else str.strip)
    settings = {key: train_math.fingerprint(cfg, questions)[key] for key in RECORDED}
    settings |= {"model": str(name), "reward": getattr(parts.reward, "__name__", "a reward")}
    make_writable(path)
    refuse_another(path, settings)
    with train_math.exits_with(f"--model {name}"):
        model, tokenizer = parts.load(str(name), cfg.device)
    settings["weights"] = weights_of(model, tokenizer)
    refuse_another(path, settings)
    todo = missing(path, temperatures, samples)
    if not todo:
        print(f"{path} has these answers already, so nothing was asked")
    for temperature, sample in todo:
        torch.manual_seed(cfg.seed * 1_000_003 + sample)
        row = train_math.evaluate(model, tokenizer, questions, cfg, temperature, **replaced)
        computed_in = precision(model, temperature, cfg.device)
        rows = read(path)
        for result in row["eval_results"]:
            cut = result["tokens"] == cfg.max_completion_length
            rows.append({"model": settings["model"], "temperature": temperature, "sample": sample,
                         "precision": computed_in, **result, "cut": cut,
                         "extracted": answer_of(result["response"]), "settings": settings})
        write(path, rows)
        print(f"{path.stem}, temperature {temperature}, sample {sample + 1}, in {computed_in}: "
              f"mean reward {row['eval_reward']:.3f}")


# ---- the command ---------------------------------------------------------------------------------


def run_flags(model):
    """The flags of the run whose log is beside this model's folder, as far as questions need them,
    and the number of its training questions. ([], None) if there is no such log."""
    log = Path(os.path.abspath(model)).parent / "metrics.jsonl"
    settings = next(iter(read(log)), {}).get("settings", {})
    known = {name: settings[name] for name in FROM_RUN if settings.get(name) not in (None, 0)}
    return [f"--{name}={value}" for name, value in known.items()], settings.get("questions")


def main(argv=None, **replaced):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE",
                        help=".jsonl files with answers")
    parser.add_argument("--model", help="hub id or folder of a model whose answers FILE gets")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0],
                        help="sampling temperatures; 0 is greedy decoding")
    parser.add_argument("--samples", type=int, default=1, help="responses to each question")
    parser.add_argument("--last_number", action="store_true",
                        help="count the last number of a response as its answer")
    args, flags = parser.parse_known_args(argv)
    names = [path.stem for path in args.files]
    if len(set(names)) < len(names):
        names = [str(path) for path in args.files]
    if len(set(names)) < len(names):
        parser.error("the same file is given twice")
    if len(set(args.temperature)) < len(args.temperature):
        parser.error("each temperature is asked once; for several responses, use --samples")
    if not all(0 <= t < math.inf for t in args.temperature) or args.samples < 1:
        parser.error("--temperature must be at least 0, and --samples at least 1")
    if args.samples > 1 and 0 in args.temperature:
        parser.error("--samples needs a --temperature above 0, because greedy responses are equal")
    if args.model:
        make_writable(args.files[0])
        ask_model(args, flags, **replaced)
    elif flags or args.samples > 1:
        parser.error(f"these flags need --model: {' '.join(flags or ['--samples'])}")
    models = {name: load_answers(path, args.last_number) for name, path in zip(names, args.files)}
    first = models[names[0]]
    for name in names[1:]:
        if not set(temperatures_of(first)) & set(temperatures_of(models[name])):
            sys.exit(f"evaluate.py: {names[0]} has answers at temperature "
                     f"{temperatures_of(first)}, and {name} at {temperatures_of(models[name])}")
    try:
        print(table(models, names[0], "the first"))
    except ValueError as error:
        sys.exit(f"evaluate.py: {error}")
    for temperature in temperatures_of(first):
        if not any(map(is_graded, models.values())):
            print(samples_table(models, temperature))


def ask_model(args, flags, **replaced):
    """Asks the model with the settings of its run, if there is one, and with these flags."""
    own, trained_on = run_flags(args.model)
    cfg = train_math.parse_settings([*own, *flags, "--model", args.model])
    print(f"asked with --instruction={cfg.instruction!r} --system={cfg.system!r} --dataset="
          f"{cfg.dataset} --max_completion_length={cfg.max_completion_length}"
          + " (from the run, except for your flags)" * bool(own))
    with train_math.exits_with(f"--dataset {cfg.dataset}"):
        questions, held_out = train_math.load_questions(cfg, replaced.get("reward"))
        if not held_out:
            raise ValueError("there are no held-out questions")
    if trained_on not in (None, train_math.fingerprint(cfg, questions)["questions"]):
        print("note: the run had other training questions, which may be among the held-out ones "
              "here. To change this, use its --dataset and --eval_size")
    ask(args.files[0], args.model, held_out, args.temperature, cfg, args.samples, **replaced)


if __name__ == "__main__":
    main()
