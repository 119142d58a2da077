"""A small Qwen gets better at sums: real weights, on any CPU.

    python lesson/sums.py                           Qwen2.5-0.5B-Instruct, from the hub
    python lesson/sums.py --model FOLDER --seed 1   any other flag of train_math.py may follow
    python lesson/sums.py --show FOLDER             a run's table and picture again, from its logs

Word problems of one line, answered in one line; a response earns 1 if its last number is right.
The loop is train_math.main(). Before and after it, the model answers 256 questions, with numbers
that no training question multiplies: greedily, and sampled at temperature 1, as in training.
Training also makes a model surer of what it says, and so does a lower temperature, for nothing:
the untrained model is asked at two temperatures between, too, and is compared at its best.
The same command goes on where it stopped, and does nothing twice.
"""
import json
import math
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_math  # noqa: E402
from experiments.plot import read  # noqa: E402

SETTINGS = [
    "--output_dir=runs/sums", "--instruction=Answer in one line.", "--max_completion_length=32",
    "--prompts_per_step=16", "--group_size=4", "--learning_rate=1.5e-6", "--max_steps=10",
    "--save_steps=5", "--eval_size=0", "--rollout_rows=1024"]  # all 256 questions at once
GSPO_RANGE = ["--eps_low=3e-3", "--eps_high=4e-3"]  # ten times the paper's: responses are short
TEMPERATURES = {"before": (0.0, 0.3, 0.6, 1.0), "after": (0.0, 1.0)}  # 0: greedy


def make_questions(n_held_out=256):
    """(questions to train on, questions held out): two digits times one, and two times two."""
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


# ---- before and after ----------------------------------------------------------------------------


def missing(path):
    """The temperatures at which before.jsonl or after.jsonl has no answers yet."""
    return sorted(set(TEMPERATURES[path.stem]) - {row["temperature"] for row in read(path)})


def ask(path, model, held_out, cfg):
    """Adds the model's answers to the held-out questions, a line each, at what is missing."""
    if not missing(path):
        return
    model, tokenizer = train_math.load(model, cfg.device)
    for temperature in missing(path):
        torch.manual_seed(0)
        _, responses, texts, _ = train_math.sample(model, tokenizer, held_out, 1, temperature, cfg)
        right = train_math.score(last_number_reward, held_out, texts).tolist()
        lines = []
        for i, row in enumerate(held_out):
            number = train_math.extract_answer(texts[i], strict=False)
            answer = {"temperature": temperature, **row, "response": texts[i], "right": right[i]}
            answer["result"] = number not in (None, *row["factors"])  # it names a third number
            lines.append(json.dumps(answer | {"tokens": len(responses[i])}) + "\n")
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(lines))
        print(f"{path.stem}, temperature {temperature}: {sum(right):.0f} of {len(right)} right")


# ---- table and picture ---------------------------------------------------------------------------


def share(rows):
    """(share of right answers, the ends of its 95% interval)"""
    right = sum(row["right"] for row in rows)
    return right / len(rows), *train_math.wilson(right, len(rows))


def gain(before, after):
    """The difference of two shares of right answers to the same questions, its 95% interval, and
    McNemar's exact p: of the questions that changed, were as many won as lost?"""
    n = len(before)
    pairs = [(old["right"], new["right"]) for old, new in zip(before, after)]
    won = pairs.count((0, 1))
    lost = pairs.count((1, 0))
    mean = (won - lost) / n
    half = 1.96 * math.sqrt(won + lost - n * mean**2) / n
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    p = min(1, 2 * tail / 2 ** (won + lost))
    return f"{mean:+.1%} (95%: {mean - half:+.1%} to {mean + half:+.1%}), p = {p:.2g}"


def table(answers, steps, best):
    """Markdown: each of the answers, {(when, temperature): rows}, and after minus before."""
    lines = [
        "model | temperature | right, by the last number (95%) | times 1 digit | times 2 digits | "
        "names a result | tokens",
        "---|---|---|---|---|---|---"]
    for (when, temperature), rows in answers.items():
        cells = [when, temperature or "greedy", "{:.1%} ({:.1%} to {:.1%})".format(*share(rows))]
        for digits in 1, 2:
            kind = [row for row in rows if len(row["factors"][0]) == digits]
            cells.append(f"{share(kind)[0]:.1%}")
        for name in "result", "tokens":
            cells.append(f"{sum(row[name] for row in rows) / len(rows):.3g}")
        lines.append(" | ".join(map(str, cells)))
    lines.append("")
    for when, temperature in answers:
        if when == "after":
            for other in dict.fromkeys([temperature, best]):
                change = gain(answers["before", other], answers[when, temperature])
                lines.append(f"- after at {temperature} minus before at {other}: {change}")
    minutes = sum(row["seconds"] for row in steps) / 60
    return "\n".join(lines) + f"\n\n{len(steps)} rollouts, {minutes:.0f} minutes.\n"


def draw(answers, steps, best, path):
    """Right samples in training, and right answers to held-out questions before and after."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    axis.plot([row["step"] for row in steps], [row["reward"] for row in steps], ".-", color="gray",
              label="samples in training")
    for temperature, color, name in (0.0, "C0", "greedy"), (1.0, "C1", "sampled"):
        label = f"held out, {name}"
        for when, step in ("before", 0), ("after", len(steps)):
            if (when, temperature) in answers:
                y, low, high = share(answers[when, temperature])
                axis.errorbar(step + temperature / 5, y, [[y - low], [high - y]], fmt="s",
                              color=color, capsize=4, label=label)
                label = None  # once is enough
    axis.axhline(share(answers["before", best])[0], color="C0", linestyle="--",
                 label=f"untrained at its best, {best or 'greedy'}")
    axis.set(xlabel="rollout", title="right, by the last number (95%)", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def show(folder):
    """table.md and sums.png, from before.jsonl, after.jsonl and training/metrics.jsonl."""
    answers = {}
    for when in TEMPERATURES:
        rows = read(folder / f"{when}.jsonl")
        for temperature in TEMPERATURES[when]:
            found = [row for row in rows if row["temperature"] == temperature]
            if found:
                answers[when, temperature] = found
    best = max(TEMPERATURES["before"], key=lambda x: share(answers["before", x]))
    steps = read(folder / "training" / "metrics.jsonl")[1:]
    text = table(answers, steps, best)
    (folder / "table.md").write_text(text, encoding="utf-8")
    draw(answers, steps, best, folder / "sums.png")
    print(text)


# ---- the command line ----------------------------------------------------------------------------


def main(argv):
    if argv[:1] == ["--show"]:
        return show(Path(argv[1]))
    algorithm = train_math.parse_settings(SETTINGS + argv).algorithm
    flags = SETTINGS + ([] if algorithm == "grpo" else GSPO_RANGE) + argv
    cfg = train_math.parse_settings(flags)
    folder = Path(cfg.output_dir)
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    questions, held_out = make_questions()
    for split, rows in ("train", questions), ("test", held_out):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (data / f"{split}.jsonl").write_text(text, encoding="utf-8")

    ask(folder / "before.jsonl", cfg.model, held_out, cfg)
    if missing(folder / "after.jsonl"):
        own = [f"--dataset={data}", f"--output_dir={folder / 'training'}"]
        train_math.main(flags + own, reward=last_number_reward)
        ask(folder / "after.jsonl", folder / "training" / "model", held_out, cfg)
    show(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
