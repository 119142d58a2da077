"""Records the answers of models to held-out questions, and compares the models.

    python -m tools.evaluate after.jsonl --model FOLDER_OR_HUB_ID --dataset GSM8K
                                   [--temperature 0 0.6 1] [other flags of train_math.py]
    python -m tools.evaluate before.jsonl after.jsonl ...
    python -m tools.evaluate runs/mine/eval_0.jsonl runs/mine/eval_25.jsonl

The first command asks the model the questions of the test split, once at each temperature (default:
0, which is greedy decoding), with the instruction and the chat template of the training. It adds a
row per answer to after.jsonl: the model, the gold answer, the response, its number of tokens,
whether it was cut, and whether the boxed answer (reward) and the last number are correct. A
temperature that the file already has is not asked again, and a file with the answers of another
model is refused. To ask all 1,319 test questions of GSM8K, add --eval_size 1319.

On CUDA, greedy responses come from the model in float32, and those at a temperature above 0 from
its float16 copy, with which train_math.py samples. The policy of the copy is slightly different.
Each row and the table say which precision was used (earlier rows do not). On CPUs, it is float32.

The other commands only print the table. The third one compares two evaluations of a run, also with
a reward of your own, if it is 0 or 1. Each file is compared with the first one by a paired test, so
all files must have answers to the same questions. With --last_number, the last number of a response
counts as its answer, whatever its format.
"""
import argparse
import sys
from pathlib import Path

import torch

import train_math
from tools.logs import accuracy_text, paired, read, write


def missing(path, temperatures):
    """The temperatures at which the file has no answers yet."""
    return sorted(set(temperatures) - {row.get("temperature", 0.0) for row in read(path)})


def precision(model, temperature, device):
    """The precision in which `generate` has computed responses at this temperature."""
    dtypes = [torch.float32]
    if temperature and torch.device(device).type == "cuda":
        # The attribute is not there if static_rollout cannot be used.
        dtypes = [*getattr(model, "sampling_dtypes", []), *dtypes]
    return str(dtypes[0]).removeprefix("torch.")


def ask(path, name, questions, temperatures, cfg, **replaced):
    """Adds a model's answers to the file, at those temperatures that the file does not have.

    name: hub id or folder of the model. replaced: as for train_math.evaluate, but not the sampler.
    Each row has the name of the model, the temperature, the precision, the index of its question in
    `questions`, and what train_math.evaluate returns. SystemExit: the file has answers of another
    model."""
    name = str(name)
    for row in read(path):
        if row.get("model", name) != name:
            sys.exit(f"evaluate.py: {path} has answers of {row['model']}. Choose another file for "
                     f"those of {name}")
    if not missing(path, temperatures):
        print(f"{path} has these answers already, so nothing was asked")
        return
    with train_math.exits_with(f"--model {name}"):
        model, tokenizer = train_math.load(name, cfg.device)
    for temperature in missing(path, temperatures):
        torch.manual_seed(cfg.seed)
        row = train_math.evaluate(model, tokenizer, questions, cfg, temperature, **replaced)
        computed_in = precision(model, temperature, cfg.device)
        rows = read(path)
        for i, result in enumerate(row["eval_results"]):
            cut = result["tokens"] == cfg.max_completion_length
            rows.append({"model": name, "temperature": temperature, "precision": computed_in,
                         **result, "question": i, "cut": cut})
        write(path, rows)
        print(f"{path.stem}, temperature {temperature}, in {computed_in}: "
              f"mean reward {row['eval_reward']:.3f}")


# ---- the table -----------------------------------------------------------------------------------


def answers_at(rows, temperature):
    """The answers at one temperature, in the order of the questions."""
    rows = [row for row in rows if row.get("temperature", 0.0) == temperature]
    return sorted(rows, key=lambda row: row["question"])


def column(rows, temperature, name="reward"):
    return [row[name] for row in answers_at(rows, temperature)]


def mean(values):
    return sum(values) / len(values)


def difference(before, after, temperature):
    """(the paired difference of two models with its 95% interval, McNemar's p), as texts.

    ValueError: the two models answered different questions."""
    asked = [column(rows, temperature, "question") for rows in (before, after)]
    if asked[0] != asked[1]:
        raise ValueError(f"temperature {temperature}: the models answered different questions")
    d, (low, high), p = paired(column(before, temperature), column(after, temperature))
    return f"{d:+.1%} ({low:+.1%} to {high:+.1%})", f"{p:.2g}"


def table_line(name, rows, reference, temperature):
    """One line of the table. reference: the rows of the model to compare with, or None."""
    correct = column(rows, temperature)
    versus = "-", "-"
    if reference:
        versus = difference(reference, rows, temperature)
    how = f"at temperature {temperature}" if temperature else "greedy"
    if "precision" in answers_at(rows, temperature)[0]:
        how += f", {answers_at(rows, temperature)[0]['precision']}"
    last_number = "-"
    if "last_number" in answers_at(rows, temperature)[0]:
        last_number = f"{mean(column(rows, temperature, 'last_number')):.1%}"
    cut = "-"
    if "cut" in answers_at(rows, temperature)[0]:
        cut = f"{mean(column(rows, temperature, 'cut')):.0%}"
    cells = [
        name,
        how,
        f"{sum(correct):.0f} of {len(correct)}, {accuracy_text(correct)}",
        last_number,
        *versus,
        cut,
        f"{mean(column(rows, temperature, 'tokens')):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(models, reference, title):
    """Markdown. models is {name: rows}. All models are compared with the model named `reference`,
    which the table calls `title`."""
    lines = [
        f"| model | answers | right (95%) | by the last number | minus {title} (95%, paired) "
        "| McNemar p | cut | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    temperatures = {row.get("temperature", 0.0) for rows in models.values() for row in rows}
    for temperature in sorted(temperatures):
        for name, rows in models.items():
            if answers_at(rows, temperature):
                other = models.get(reference) if name != reference else None
                lines.append(table_line(name, rows, other, temperature))
    return "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE",
                        help=".jsonl files with answers")
    parser.add_argument("--model", help="hub id or folder of a model whose answers FILE gets")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0],
                        help="sampling temperatures; 0 is greedy decoding")
    parser.add_argument("--last_number", action="store_true",
                        help="count the last number of a response as its answer")
    args, flags = parser.parse_known_args(argv)
    names = [path.stem for path in args.files]
    if len(set(names)) < len(names):
        parser.error("the files need different names, because these name the models in the table")
    if args.model:
        cfg = train_math.parse_settings([*flags, "--model", args.model])
        with train_math.exits_with(f"--dataset {cfg.dataset}"):
            _, questions = train_math.load_questions(cfg)
            if not questions:
                raise ValueError("there are no held-out questions")
        ask(args.files[0], args.model, questions, args.temperature, cfg)
    elif flags:
        parser.error(f"these flags need --model: {' '.join(flags)}")
    models = {path.stem: read(path) for path in args.files}
    for path in args.files:
        if not models[path.stem]:
            parser.error(f"{path} {'has no answers' if path.exists() else 'does not exist'}")
    if args.last_number:
        for name, rows in models.items():
            models[name] = [row | {"reward": row["last_number"]} for row in rows]
    print(table(models, names[0], "the first"))


if __name__ == "__main__":
    main()
