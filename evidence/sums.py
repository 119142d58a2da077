"""Trains Qwen2.5-0.5B on products in words by GSPO, on any CPU.

    python -m evidence.sums                              Qwen2.5-0.5B-Instruct, from the hub
    python -m evidence.sums --seed 1 --output_dir runs/sums_1
                                                         or any other flag of train_math.py
    python -m evidence.sums --show FOLDER ...       the table of some runs, from their logs

The questions are products in words, which the model answers in one line. The reward is 1 if the
last number of a response is correct. The training loop is train_math.main(). Afterwards, the
pre-trained model and the trained model answer 256 held-out questions, whose products are in no
training question. They answer with greedy decoding, and sampled at temperature 1 as in training.

Two other explanations of a gain are measured, too. Training makes a model more confident, and a
lower temperature does the same without training. Therefore the pre-trained model is also asked at
two temperatures in between. Training also teaches the model to write down the calculation.
Therefore both models are asked again, with the beginning of each answer given, such as '26 * 26 ='.
(In the published before_given, the responses also contain the given beginning.)

If the command is interrupted, run it again to continue. Nothing is done twice. A run with other
settings needs another folder. before.jsonl and before_given.jsonl, which have the answers of the
pre-trained model, can be copied to it if --model, --instruction and --max_completion_length are the
same. The published runs are in logs/sums.jsonl.gz. Its runs named "range" chose the clip range on
other questions. Their script is in commit 5a42b2b.
"""
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

import train_math
from tools import answers, evaluate
from tools.logs import (
    accuracy,
    accuracy_text,
    make_writable,
    mean_difference,
    paired,
    read,
    read_packed,
    write,
)

SETTINGS = [
    "--output_dir=runs/sums", "--instruction=Answer in one line.", "--max_completion_length=32",
    "--prompts_per_step=16", "--group_size=4", "--learning_rate=1.5e-6", "--max_steps=10",
    "--save_steps=5", "--eval_size=0", "--rollout_rows=256"]  # all held-out questions at once
GSPO_RANGE = ["--eps_low=3e-2", "--eps_high=4e-2"]  # the best of three on other questions
MAY_DIFFER = train_math.MAY_CHANGE - {"max_steps"} | {"questions"}  # when a run is resumed
TEMPERATURES = {"before": (0.0, 0.3, 0.6, 1.0), "after": (0.0, 1.0),  # 0: greedy decoding
                "before_given": (0.0,), "after_given": (0.0,)}
LOG = Path(__file__).with_name("logs") / "sums.jsonl.gz"


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


def begun_prompts(tokenizer, questions, cfg):
    """The token ids of each question, followed by the beginning of its answer."""
    prompts = train_math.encode_prompts(tokenizer, questions, cfg)
    begun = ["{} * {} =".format(*row["factors"]) for row in questions]
    beginnings = tokenizer(begun, add_special_tokens=False).input_ids
    return [prompt + beginning for prompt, beginning in zip(prompts, beginnings)]


def missing(folder, when):
    """The temperatures at which the model before or after training has not answered yet."""
    return evaluate.missing(folder / f"{when}.jsonl", TEMPERATURES[when])


# ---- tables --------------------------------------------------------------------------------------


def load_run(folder):
    """{name of a log: its rows} of a run. SystemExit: no run."""
    rows = read(folder / "training" / "metrics.jsonl")
    if not rows:
        sys.exit(f"sums.py: no run in {folder}: it has no training/metrics.jsonl")
    return {"training/metrics": rows, **{when: read(folder / f"{when}.jsonl")
                                         for when in TEMPERATURES}}


def published():
    """{run: {name of a log: its rows}} of all published runs. "range" has the runs that chose the
    clip range."""
    runs = {}
    for name, rows in read_packed(LOG).items():
        run, log = name.split("/", 1)
        runs.setdefault(run, {})[log] = rows
    return runs


def correct(rows, temperature=0.0):
    """1 or 0 for each answer at a temperature, in the order of the questions."""
    return answers.column(rows, temperature)


def points(before, after):
    """The paired difference in points with its 95% interval, "-" if there are no answers."""
    if not (before and after):
        return "-"
    difference, (low, high), _ = paired(before, after)
    return f"{100 * difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def minutes(steps):
    return f"{sum(row.get('seconds', 0) for row in steps) / 60:.0f}"


def line_of(name, run):
    """The cells of one run. An answer that was not asked is "-"."""
    start, *steps = run["training/metrics"]
    settings = start["settings"]
    before, given, after, after_given = (
        correct(run.get(when, [])) for when in ("before", "before_given", "after", "after_given"))
    sampled = correct(run.get("after", []), 1.0)
    return [
        f"{name}: {settings['algorithm']}, {settings['eps_low']:g}",
        accuracy_text(after) if after else "-",
        points(before, after),
        points(given, after),
        points(given, after_given),
        f"{accuracy(sampled)[0]:.1%}" if sampled else "-",
        minutes(steps),
    ]


def compare(runs):
    """Markdown: a line per run. runs: {name: load_run(folder)}."""
    lines = [
        "run: algorithm, lower clip range | greedy accuracy (95%) | minus pre-trained | minus "
        "pre-trained with the calculation begun | the same, begun for both | sampled accuracy "
        "| minutes", "---|---|---|---|---|---|---"]
    lines += [" | ".join(line_of(name, run)) for name, run in runs.items()]
    return "".join(f"| {line} |\n" for line in lines)


def by_seed(runs, prefix, seeds, temperature):
    return [statistics.fmean(correct(runs[f"{prefix}_{seed}"]["after"], temperature))
            for seed in seeds]


def welch(some, others):
    """The difference of two means in points, with Welch's 95% interval for two small samples."""
    variances = [statistics.variance(values) / len(values) for values in (some, others)]
    total = sum(variances)
    freedom = total**2 / sum(v**2 / (len(values) - 1)
                             for v, values in zip(variances, (some, others)))
    t = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}[int(freedom)]
    half = 100 * t * total**0.5
    return f"{100 * (statistics.fmean(some) - statistics.fmean(others)):+.1f} ± {half:.1f}"


def gspo_minus_grpo(runs):
    """Markdown: GSPO at 3e-2 minus GRPO, for the three common seeds and for all runs."""
    lines = ["| decoding | GSPO minus GRPO, seeds 0 to 2, paired | GSPO, six seeds | GRPO, three "
             "seeds | difference, Welch |", "|---|---|---|---|---|"]
    for temperature, name in ((0.0, "greedy"), (1.0, "sampled")):
        grpo = by_seed(runs, "grpo", range(3), temperature)
        gspo = by_seed(runs, "gspo_wide", range(6), temperature)
        lines.append(f"| {name} | {mean_difference(gspo[:3], grpo)} | {statistics.fmean(gspo):.1%} "
                     f"| {statistics.fmean(grpo):.1%} | {welch(gspo, grpo)} |")
    return "\n".join(lines) + "\n"


def range_table(logs):
    """Markdown: the runs that chose the clip range, each with its last evaluation."""
    lines = ["| run | greedy accuracy (95%) | reward of the last five rollouts | log_ratio_std, "
             "first rollout | clipped, first rollout | later |", "|---|---|---|---|---|---|"]
    for name, (_, *steps) in sorted(logs.items()):
        low, high = steps[-1]["eval_reward_interval"]
        first, *later = [row["clip_fraction"] for row in steps]
        lines.append(
            f"| {name} | {steps[-1]['eval_reward']:.1%} ({low:.1%} to {high:.1%}) | "
            f"{statistics.fmean(row['reward'] for row in steps[-5:]):.1%} | "
            f"{steps[0]['log_ratio_std']:.2f} | {first:.0%} | {statistics.fmean(later):.0%} |")
    start = logs["gspo_3e-4"][0]
    low, high = start["eval_reward_interval"]
    return "\n".join([*lines, f"| pre-trained | {start['eval_reward']:.1%} ({low:.1%} to "
                               f"{high:.1%}) | | | | |"]) + "\n"


def gsm8k_table(runs):
    """Markdown: the accuracy on 192 short questions of GSM8K after some runs."""
    def last_number(rows):
        return answers.column(rows, 0.0, "last_number")

    before = last_number(runs["gspo_2"]["gsm8k_before"])
    lines = ["| model | greedy accuracy (95%) | minus pre-trained |", "|---|---|---|",
             f"| pre-trained | {accuracy_text(before)} | |"]
    for name, run in runs.items():
        if "gsm8k_after" in run:
            after = last_number(run["gsm8k_after"])
            lines.append(f"| {name} | {accuracy_text(after)} | {points(before, after)} |")
    return "\n".join(lines) + "\n"


def page(runs):
    """The tables of all published runs, for tables.md."""
    choice = runs["range"]
    runs = {name: run for name, run in runs.items() if name != "range"}
    return f"""\
Differences are in points. The brackets are paired 95% intervals over 256 held-out questions. "±"
is the half width of a 95% interval over seeds. Welch's degrees of freedom are rounded down. The
minutes are those of training on one core.

{compare(runs)}
{gspo_minus_grpo(runs)}
The runs that chose the clip range, on 256 other questions, with one run per row:

{range_table(choice)}
192 short questions of GSM8K, graded by the last number. A script of commit 2ad1537 asked them.

{gsm8k_table(runs)}"""


def show(folders):
    if not folders:
        sys.exit("sums.py: --show needs the folder of a run, or several folders")
    print(compare({folder.name: load_run(folder) for folder in folders}))


# ---- the command line ----------------------------------------------------------------------------


def refuse_another(folder, cfg):
    """SystemExit: the folder has a run with other settings."""
    for row in read(folder / "training" / "metrics.jsonl")[:1]:
        changed = [name for name, value in train_math.fingerprint(cfg, []).items()
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
    for when in TEMPERATURES:
        make_writable(folder / f"{when}.jsonl")
    questions, held_out = make_questions()
    if missing(folder, "after") or missing(folder, "after_given"):
        data = folder / "data"
        with train_math.exits_with(f"--model {cfg.model} --output_dir {folder}"):
            AutoTokenizer.from_pretrained(cfg.model)  # is there such a model?
            data.mkdir(parents=True, exist_ok=True)
            write(data / "train.jsonl", questions)
            write(data / "test.jsonl", held_out)
        own = [f"--dataset={data}", f"--output_dir={folder / 'training'}"]
        train_math.main(flags + own, reward=last_number_reward)
    cfg = replace(cfg, seed=0)  # so that before.jsonl serves for runs with other seeds, too
    models = {"before": cfg.model, "after": folder / "training" / "model"}
    for when, model in models.items():
        evaluate.ask(folder / f"{when}.jsonl", model, held_out, TEMPERATURES[when], cfg,
                     reward=last_number_reward)
        evaluate.ask(folder / f"{when}_given.jsonl", model, held_out, [0.0],
                     replace(cfg, max_completion_length=12), reward=last_number_reward,
                     encode_prompts=begun_prompts)
    show([folder])


if __name__ == "__main__":
    main(sys.argv[1:])
