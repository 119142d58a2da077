"""GSM8K's short questions, by RL from the downloaded model: no cold start, no reward for a form.

    python experiments/gsm8k_rl.py --gsm8k FOLDER --model MODEL            hours, on a CPU
    python experiments/gsm8k_rl.py --gsm8k FOLDER --model MODEL --ask_only --output_dir RUN

FOLDER holds train.jsonl and test.jsonl; of their questions those of one or two steps and under 220
characters are kept. train_math.py trains with its own instruction and reward: 1 for the right
number in the box. Then the downloaded model and the trained one answer the test questions, greedily
and sampled. Any other flag of train_math.py may be given. --ask_only: RUN is lesson/sums.py's. Does
what it teaches help here? The same command goes on where it stopped, and does nothing twice.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_math  # noqa: E402
from experiments import gsm8k  # noqa: E402
from experiments.plot import read, write  # noqa: E402
from lesson import sums  # noqa: E402

SETTINGS = [
    "--output_dir=runs/gsm8k_rl", "--max_completion_length=320", "--prompts_per_step=8",
    "--learning_rate=3e-6", "--max_steps=12", "--save_steps=3", "--eval_size=0"]


def ask(path, name, questions, cfg, temperatures):
    """The answers in path, a line each, once all questions were asked at each temperature."""
    rows = read(path)
    golds = [train_math.gold_answer(row["answer"]) for row in questions]
    asked = {row["temperature"] for row in rows}
    for t in asked.intersection(temperatures):
        if [row["gold"] for row in rows if row["temperature"] == t] != golds:
            sys.exit(f"gsm8k_rl.py: {path} has answers to other questions: choose another folder")
    missing = [t for t in temperatures if t not in asked]
    if missing:
        with train_math.blame(f"--model {name}"):
            model, tokenizer = train_math.load(str(name), cfg.device)
    for temperature in missing:
        given = gsm8k.answers(model, tokenizer, questions, cfg, temperature)
        for i, (text, in_box, right) in enumerate(given):
            tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
            rows.append({
                "question": i, "temperature": temperature, "response": text,
                "gold": golds[i], "right": float(right), "in_box": float(in_box), "tokens": tokens,
                "cut": tokens >= cfg.max_completion_length - 1})
        write(path, rows)
    return {t: [row for row in rows if row["temperature"] == t] for t in temperatures}


def paid(rows):
    """The same answers, right if the number in the box is."""
    return [row | {"right": row["in_box"]} for row in rows]


def table(answers, temperatures):
    """Markdown: each model's answers, {"before": {temperature: rows}, "after": ...}, and gains."""
    lines = [
        "model | temperature | right, by the last number (95%) | right, in the box (95%) | cut | "
        "tokens",
        "---|---|---|---|---|---"]
    changes = [""]
    for t in temperatures:
        in_box = {}
        for when in answers:
            rows = answers[when][t]
            in_box[when] = paid(rows)
            cut, tokens = (gsm8k.mean([row[name] for row in rows]) for name in ("cut", "tokens"))
            cells = [when, t or "greedy", sums.told(rows), sums.told(in_box[when])]
            lines.append(" | ".join(map(str, [*cells, f"{cut:.1%}", f"{tokens:.0f}"])))
        changes.append(
            f"- {t or 'greedy'}, after minus before: by the last number "
            f"{sums.gain(answers['before'][t], answers['after'][t])}; in the box "
            f"{sums.gain(*in_box.values())}")
    return "\n".join(lines + changes) + f"\n\n{len(rows)} questions.\n"


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--ask_only", action="store_true", help="RUN is trained already")
    parser.add_argument("--questions", type=int, help="of the test, the first; default: all short")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    a, flags = parser.parse_known_args(argv)
    flags = SETTINGS + flags
    cfg = train_math.parse_settings(flags)
    if cfg.dataset != train_math.Settings.dataset:
        sys.exit("gsm8k_rl.py: --gsm8k names the questions: no --dataset")
    folder = Path(cfg.output_dir)
    data = folder / "short"
    data.mkdir(parents=True, exist_ok=True)
    for split in "train", "test":
        rows = read(a.gsm8k / f"{split}.jsonl")
        if not rows:
            sys.exit(f"gsm8k_rl.py: no questions in {a.gsm8k / f'{split}.jsonl'}")
        write(data / f"{split}.jsonl", filter(gsm8k.is_short, rows))
    questions = read(data / "test.jsonl")[:a.questions]
    if not a.ask_only:
        own = [f"--dataset={data}", f"--output_dir={folder / 'training'}"]
        train_math.main(flags + own)
    cfg.rollout_rows = len(questions) * cfg.group_size  # all at once
    models = {"before": cfg.model, "after": folder / "training" / "model"}
    answers = {when: ask(folder / f"gsm8k_{when}.jsonl", model, questions, cfg, a.temperatures)
               for when, model in models.items()}
    text = table(answers, a.temperatures)
    (folder / "gsm8k_table.md").write_text(text, encoding="utf-8")
    print(text)
    if a.ask_only:
        return
    settings, steps, _ = sums.load_run(folder)
    asked = {(when, t): paid(rows) for when, given in answers.items() for t, rows in given.items()}
    sums.draw({folder: (settings, steps, asked)}, folder / "gsm8k.png", "right, in the box (95%)")


if __name__ == "__main__":
    main(sys.argv[1:])
