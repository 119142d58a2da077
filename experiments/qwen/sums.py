"""Trains Qwen2.5-0.5B on products in words by GSPO, on any CPU.

    python -m experiments.qwen.sums                         Qwen2.5-0.5B-Instruct, from the hub
    python -m experiments.qwen.sums --seed 1 --output_dir runs/sums_1
                                                            or any other flag of train_math.py
    python -m experiments.qwen.sums --show FOLDER           table and picture of a run from its logs
    python -m experiments.qwen.sums --show FOLDER FOLDER    several runs in one table and picture

The questions are products in words, which the model answers in one line. The reward is 1 if the
last number of a response is correct. The training loop is train_math.main(). Afterwards, the
pre-trained model and the trained model answer 256 held-out questions, whose products are in no
training question. They answer with greedy decoding, and sampled at temperature 1 as in training.

Training also makes a model more confident. A lower temperature does the same without any training.
Therefore the pre-trained model is also asked at two temperatures in between, and its best
temperature is the one that the trained model is compared with.

If the command is interrupted, run it again to continue. Nothing is done twice. A run with other
settings needs another folder. before.jsonl, which has the answers of the pre-trained model, can be
copied to it if --model, --instruction and --max_completion_length are the same.
"""
import random
import sys
from pathlib import Path

from transformers import AutoTokenizer

import train_math
from common import evaluate
from common.intervals import accuracy, accuracy_text, gain_text
from common.logs import read, write
from common.plot import MORE_STYLES, STYLES
from support.runs import MAY_CHANGE, fingerprint

SETTINGS = [
    "--output_dir=runs/sums", "--instruction=Answer in one line.", "--max_completion_length=32",
    "--prompts_per_step=16", "--group_size=4", "--learning_rate=1.5e-6", "--max_steps=10",
    "--save_steps=5", "--eval_size=0", "--rollout_rows=256"]  # all held-out questions at once
GSPO_RANGE = ["--eps_low=3e-2", "--eps_high=4e-2"]  # the best of three: sums_range.py
MAY_DIFFER = MAY_CHANGE - {"max_steps"} | {"questions"}  # when a run is resumed
TEMPERATURES = {"before": (0.0, 0.3, 0.6, 1.0), "after": (0.0, 1.0)}  # 0: greedy decoding


def make_questions(n_held_out=256):
    """(training questions, held-out questions). The products have two digits times one digit, or
    two digits times two digits."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(3, 10) for b in range(11, 100)]
    pairs += [(a, b) for a in range(11, 30) for b in range(a, 60)]
    rows = []
    for a, b in pairs:
        name = rng.choice(("Ann", "Bob", "Eve", "Leo", "Mia", "Sam", "Tom"))
        things = rng.choice(("books", "cards", "eggs", "figs", "nuts", "pens"))
        question = f"{name} buys {a} boxes of {b} {things}. How many {things}?"
        rows.append({"question": question, "answer": str(a * b), "factors": [str(a), str(b)]})
    rng.shuffle(rows)
    return rows[n_held_out:], rows[:n_held_out]


def last_number_reward(prompts, completions, answer, **columns):
    """1.0 for a completion whose last number is the answer, else 0.0."""
    given = [train_math.extract_answer(text, strict=False) for text in completions]
    return [float(number == gold) for number, gold in zip(given, answer)]


def missing(folder, when):
    """The temperatures at which the model before or after training has not answered yet."""
    return evaluate.missing(folder / f"{when}.jsonl", TEMPERATURES[when])


# ---- table and picture ---------------------------------------------------------------------------


def load_run(folder):
    """The logs of a run: (settings, steps, {(when, temperature): answers}). SystemExit: no run."""
    rows = read(folder / "training" / "metrics.jsonl")
    if not rows:
        sys.exit(f"sums.py: no run in {folder}: it has no training/metrics.jsonl")
    answers = {}
    for when in TEMPERATURES:
        given = read(folder / f"{when}.jsonl")
        for temperature in TEMPERATURES[when]:
            found = [row for row in given if row["temperature"] == temperature]
            if found:
                answers[when, temperature] = found
    return rows[0]["settings"], rows[1:], answers


def correct(rows):
    """1 or 0 for each answer."""
    return [row["reward"] for row in rows]


def names_a_result(row, question):
    """Whether the last number of a response is one that the question does not contain."""
    number = train_math.extract_answer(row["response"], strict=False)
    return number not in (None, *question["factors"])


def minutes(steps):
    return f"{sum(row['seconds'] for row in steps) / 60:.0f}"


def table(answers, steps, best):
    """Markdown: a line for each entry of answers, {(when, temperature): rows}, and the differences
    of the accuracy after training and before it."""
    _, questions = make_questions()
    lines = [
        "model | temperature | right, by the last number (95%) | times 1 digit | times 2 digits | "
        "names a result | tokens",
        "---|---|---|---|---|---|---"]
    for (when, temperature), rows in answers.items():
        cells = [when, temperature or "greedy", accuracy_text(correct(rows))]
        asked = [questions[row["question"]] for row in rows]
        for digits in 1, 2:
            kind = [row["reward"] for row, question in zip(rows, asked)
                    if len(question["factors"][0]) == digits]
            cells.append(f"{sum(kind) / len(kind):.1%}")
        results = sum(map(names_a_result, rows, asked))
        tokens = sum(row["tokens"] for row in rows)
        cells += [f"{results / len(rows):.3g}", f"{tokens / len(rows):.3g}"]
        lines.append(" | ".join(map(str, cells)))
    lines.append("")
    for temperature in TEMPERATURES["after"]:
        for other in dict.fromkeys([temperature, best]):
            change = gain_text(
                correct(answers["before", other]), correct(answers["after", temperature]))
            lines.append(f"- after at {temperature} minus before at {other}: {change}")
    return "\n".join(lines) + f"\n\n{len(steps)} rollouts, {minutes(steps)} minutes.\n"


def compare(runs):
    """Markdown: a line per run, and the means of each algorithm and clip range.

    runs: {folder: load_run(folder)}."""
    lines = [
        "run | algorithm, range | seed | greedy before (95%) | greedy after | sampled after | "
        "greedy after minus before | rollouts | minutes",
        "---|---|---|---|---|---|---|---|---"]
    means = {}
    for folder, (settings, steps, answers) in runs.items():
        algorithm = f"{settings['algorithm']} {settings['eps_low']:g}"
        cells = [folder, algorithm, settings["seed"]]
        asked = [answers.get(key) for key in (("before", 0.0), ("after", 0.0), ("after", 1.0))]
        for rows in asked:
            cells.append(f"{accuracy_text(correct(rows))} of {len(rows)}" if rows else "-")
        cells.append(gain_text(*map(correct, asked[:2])) if all(asked[:2]) else "-")
        lines.append(" | ".join(map(str, [*cells, len(steps), minutes(steps)])))
        if all(asked):
            means.setdefault(algorithm, []).append([accuracy(correct(rows))[0] for rows in asked])
    for algorithm, values in means.items():
        cells = [f"{sum(column) / len(values):.1%}" for column in zip(*values)]
        lines.append(f"mean of {len(values)} | {algorithm} | - | {' | '.join(cells)} | - | - | -")
    return "\n".join(lines) + "\n"


def draw(runs, path):
    """The accuracy in training, and on held-out questions before and after it, in three panels.

    runs: {folder: load_run(folder)}. Each run is a line in training, and a point per temperature
    after it, with its 95% interval."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9, 4.8), sharey=True, layout="constrained",
                                width_ratios=(1.5, 4, 2.4))
    before, training, after = axes
    offsets = [0.6 * (i + 0.5) / len(runs) - 0.3 for i in range(len(runs))]
    groups = {}  # algorithm: the greedy accuracy after each of its runs
    for (settings, steps, answers), offset in zip(runs.values(), offsets):
        name = settings["algorithm"].upper()
        color, line = STYLES.get(settings["algorithm"], MORE_STYLES[0])
        look = {"color": color, "marker": "s" if name == "GRPO" else "o",
                "fillstyle": "none" if name == "GRPO" else "full"}
        curve = [100 * row["reward"] for row in steps]
        label = None if name in groups else name
        training.plot(range(1, len(steps) + 1), curve, linestyle=line, alpha=0.7, markersize=4,
                      label=label, **look)
        for place, temperature in enumerate(TEMPERATURES["after"]):
            start = answers["before", temperature]
            interval(before, place, correct(start), color="black", marker="D")
            interval(after, place + offset, correct(answers["after", temperature]), **look)
        groups.setdefault(name, []).append(accuracy(correct(answers["after", 0.0]))[0])
    best = max(accuracy(correct(answers["before", x]))[0] for x in TEMPERATURES["before"])
    for axis in axes:
        axis.axhline(100 * best, color="black", linestyle=":",
                     label="pre-trained model at its best temperature" if axis is before else None)
        axis.grid(alpha=0.3)
    for axis, title in ((before, "before training:\nheld-out questions"),
                        (after, "after training:\nheld-out questions")):
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(2), ["greedy", "sampled"])
        axis.set_xlim(-0.6, 1.6)
    training.set_title("training:\nsampled responses to training questions", fontsize=10)
    training.set_xlabel("rollout")
    training.xaxis.get_major_locator().set_params(integer=True)
    before.set(ylabel="accuracy by the last number (%)", ylim=(0, 100))
    start = accuracy(correct(answers["before", 0.0]))[0]
    ends = []
    for name, values in groups.items():
        number = f"mean of {len(values)} runs" if len(values) > 1 else "one run"
        ends.append(f"{sum(values) / len(values):.1%} after {name} ({number})")
    figure.suptitle("Greedy accuracy on held-out questions:\n"
                    f"{start:.1%} before training, {', '.join(ends)}")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9,
                  title="a line in training, and two points after it: one run; "
                        "vertical bars: 95% interval")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def interval(axis, x, values, **look):
    """A point at the accuracy in percent, with its 95% interval."""
    middle, low, high = (100 * y for y in accuracy(values))
    axis.errorbar(x, middle, [[middle - low], [high - middle]], capsize=3, **look)


def show(folders):
    """Writes table.md and sums.png of one run. For several runs, prints a line per run and draws
    compared.png."""
    if not folders:
        sys.exit("sums.py: --show needs the folder of a run, or several folders")
    runs = {folder: load_run(folder) for folder in folders}
    finished = {folder: run for folder, run in runs.items()
                if not any(missing(folder, when) for when in TEMPERATURES)}
    folder = folders[0]
    if len(runs) > 1 or not finished:
        print(compare(runs))
        if finished:
            draw(finished, folder.parent / "compared.png")
        return
    _, steps, answers = runs[folder]
    best = max(TEMPERATURES["before"], key=lambda x: accuracy(correct(answers["before", x])))
    text = table(answers, steps, best)
    (folder / "table.md").write_text(text, encoding="utf-8")
    draw(runs, folder / "sums.png")
    print(text)


# ---- the command line ----------------------------------------------------------------------------


def refuse_another(folder, cfg):
    """SystemExit: the folder has a run with other settings."""
    for row in read(folder / "training" / "metrics.jsonl")[:1]:
        changed = [name for name, value in fingerprint(cfg, []).items()
                   if name not in MAY_DIFFER and row["settings"].get(name) != value]
        if changed:
            sys.exit(f"sums.py: the run in {folder} has another {', '.join(changed)}. Choose "
                     "another --output_dir")


def main(argv):
    if argv[:1] == ["--show"]:
        return show([Path(name) for name in argv[1:]])
    algorithm = train_math.parse_settings(SETTINGS + argv).algorithm
    flags = SETTINGS + ([] if algorithm == "grpo" else GSPO_RANGE) + argv
    cfg = train_math.parse_settings(flags)
    if cfg.dataset != train_math.Settings.dataset:
        sys.exit("sums.py makes its own questions, so it does not accept --dataset")
    folder = Path(cfg.output_dir)
    refuse_another(folder, cfg)
    questions, held_out = make_questions()
    if missing(folder, "after"):
        data = folder / "data"
        with train_math.exits_with(f"--model {cfg.model} --output_dir {folder}"):
            AutoTokenizer.from_pretrained(cfg.model)  # is there such a model?
            data.mkdir(parents=True, exist_ok=True)
            write(data / "train.jsonl", questions)
            write(data / "test.jsonl", held_out)
        own = [f"--dataset={data}", f"--output_dir={folder / 'training'}"]
        train_math.main(flags + own, reward=last_number_reward)
    models = {"before": cfg.model, "after": folder / "training" / "model"}
    for when, model in models.items():
        path = folder / f"{when}.jsonl"
        evaluate.ask(path, model, held_out, TEMPERATURES[when], cfg, reward=last_number_reward)
    show([folder])


if __name__ == "__main__":
    main(sys.argv[1:])
