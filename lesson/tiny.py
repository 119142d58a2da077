"""A small world for train_math.py: any CPU, no network, about a minute.

    python lesson/tiny.py [any flag of train_math.py]

A Qwen3 of 100,000 parameters is taught to write its sums out, then a bad habit, to guess at once;
RL's part is to find the careful way again. The world is made once a seed and kept in runs/.
"""
import json
import os
import random
import sys
from pathlib import Path

import torch
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_math  # noqa: E402
from experiments.cold_start import supervise  # noqa: E402
from experiments.plot import draw, read  # noqa: E402
from experiments.tiny_model import tiny_model, tiny_tokenizer  # noqa: E402

FLAGS = """--output_dir runs/tiny --device cpu --prompts_per_step 16 --rollout_rows 128
    --max_completion_length 40 --learning_rate 8e-5 --max_steps 15 --save_steps 5
    --eval_size 256""".split()


def questions(seed):
    """7,840 word problems of one line, with worked answers in GSM8K's manner, shuffled. They ask
    for 392 products in 20 wordings each: what is held out is new in its wording alone."""
    rows = []
    for a in range(11, 60):
        for b in range(2, 10):
            x = a // 10 * 10 * b
            y = a % 10 * b
            worked = f"{a // 10 * 10}*{b}={x}\n{a % 10}*{b}={y}\n{x}+{y}={x + y}\n#### {x + y}"
            rows += [{"question": f"{name} buys {b} boxes of {a} {thing}. How many?",
                      "answer": worked}
                     for name in ("Ann", "Bob", "Eve", "Tom", "Sam")
                     for thing in ("figs", "pens", "eggs", "nuts")]
    random.Random(seed).shuffle(rows)
    return rows


def sloppy(row, rng):
    """The same question, answered by a teacher who mostly guesses at once and is seldom right."""
    if rng.random() < 0.25:
        return row
    error = 0 if rng.random() < 0.1 else rng.choice((-20, -10, -1, 1, 10, 20, 100))
    return {**row, "answer": f"#### {max(0, int(train_math.gold_answer(row['answer'])) + error)}"}


def cold_start(model, tokenizer, rows, seed, skill_steps=460):
    """The skill, then the habit, until less than 30% of sampled answers are right."""
    rng = random.Random(seed)
    cfg = train_math.Settings(rollout_rows=1024, max_completion_length=40, instruction="")

    def sampled(probe):
        return train_math.evaluate(model, tokenizer, probe, cfg, temperature=1.0)["eval_reward"]

    supervise(model, tokenizer, lambda: rng.choice(rows), skill_steps, 48, 5e-3, "skill")
    probe = rng.sample(rows, 256)
    torch.manual_seed(seed)
    skill = right = sampled(probe)
    if skill < 0.95:
        raise RuntimeError(f"seed {seed} reached a skill of {skill:.2f}, not .95: take another")
    while right >= 0.3:
        supervise(model, tokenizer, lambda: sloppy(rng.choice(rows), rng), 5, 48, 1e-3, "habit")
        right = sampled(probe)
    print(f"cold start: {skill:.0%} of samples right, {right:.0%} after a teacher who guesses")


def save_world(folder, model, tokenizer, rows):
    """model/ and questions.jsonl, written aside and then renamed: whole or not there."""
    aside = folder.with_name(folder.name + ".partial")
    model.save_pretrained(aside / "model")
    tokenizer.save_pretrained(aside / "model")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (aside / "questions.jsonl").write_text(text, encoding="utf-8")
    os.rename(aside, folder)


def world(seed, root="runs"):
    """The folder of a world, made if it is not there."""
    folder = Path(root, f"tiny_world-{seed}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # a second process waits for the first's
        if not folder.exists():
            rows = questions(seed)
            tokenizer = tiny_tokenizer()
            model = tiny_model(tokenizer, seed)
            cold_start(model, tokenizer, rows[:-256], seed)  # the last 256 are held out
            save_world(folder, model, tokenizer, rows)
    return folder


def main(argv=None):
    flags = FLAGS + (sys.argv[1:] if argv is None else argv)
    cfg = train_math.parse_settings(flags)
    torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
    folder = world(cfg.seed)
    if cfg.algorithm != "grpo":
        flags = ["--eps_low", "0.03", "--eps_high", "0.04", *flags]
    train_math.main(["--model", str(folder / "model"), "--instruction", "",
                     "--dataset", str(folder / "questions.jsonl"), *flags])
    draw({cfg.algorithm: read(Path(cfg.output_dir, "metrics.jsonl"))},
         Path(cfg.output_dir, "metrics.png"))


if __name__ == "__main__":
    main()
