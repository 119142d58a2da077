"""A small world in which the clip can be seen to matter: any CPU, no network, about a minute.

    python -m lesson.tiny                                                  GSPO
    python -m lesson.tiny --algorithm grpo --output_dir runs/grpo          GRPO
    python -m lesson.tiny --eps_low 0.99 --eps_high 1e9 --output_dir runs/no_clip
    python -m lesson.tiny --world 5 [any flag of train_math.py]            made in two minutes

Word problems of one line about Fibonacci's rabbits, and a Qwen3 of 100,000 parameters that could
count them: it learned to write one sum a month, and after that, from a teacher who is careless and
mostly blurts out a digit, to do the same. RL is to find the careful way again.
"""
import argparse
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import torch
from filelock import FileLock

import train_math
from common.logs import read
from common.plot import draw
from common.tiny_model import tiny_model, tiny_tokenizer
from common.warm_up import supervise

FLAGS = """--output_dir runs/tiny --device cpu --prompts_per_step 16 --group_size 16
    --minibatches 8 --epochs 4 --learning_rate 3e-4 --max_steps 16 --save_steps 4
    --max_completion_length 108 --micro_batch_tokens 8192 --eval_size 175""".split()
WIDER = ["--eps_low", "3e-3", "--eps_high", "4e-3"]  # GSPO's, ten times the paper's
MONTHS = "abcdefghijklmnopqrstuvwxyz"  # a: one month to go, b: two, ...
CHARACTERS = "\n #+,.:=?0123456789RI" + MONTHS
LEAST, MOST = 10, 16  # months that a question asks for
TEMPERATURES = (0.0, 0.3, 0.6, 1.0)  # 0: greedy


# ---- questions, and a teacher of them ------------------------------------------------------------


def rabbits(pairs, months, rng=None, slips=0.0):
    """{"question", "answer", "worked"}: the last digit of the pairs of rabbits after some months.

    Each month has the sum of the two before: "c3+7=0b7+0=7a0+7=7", then "#### 7". Where the teacher
    slips, a random digit is written, and the sums go on from it."""
    question = f"Rabbits: {pairs[0]}, then {pairs[1]}. In {MONTHS[months - 1]} months?"
    written = pairs
    steps = ""
    for month in reversed(MONTHS[:months]):
        pairs = pairs[1], sum(pairs) % 10
        digit = rng.randrange(10) if rng and rng.random() < slips else sum(written) % 10
        steps += f"{month}{written[0]}+{written[1]}={digit}"
        written = written[1], digit
    return {"question": question, "answer": f"#### {pairs[1]}",
            "worked": f"{steps}\n#### {written[1]}"}


def questions():
    """(questions to train on, questions held out): all 700 of them, a quarter held out."""
    rows = [rabbits((first, second), months) for first in range(10) for second in range(10)
            for months in range(LEAST, MOST + 1)]
    random.Random(0).shuffle(rows)
    return rows[175:], rows[:175]


def warm_up(model, tokenizer, seed):
    """The skill, until 19 of 20 samples are right, and then the habit."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    train, _ = questions()

    def draw_pairs():
        return rng.randrange(10), rng.randrange(10)

    def worked(least, most):
        row = rabbits(draw_pairs(), rng.randint(least, most))
        return row | {"answer": row["worked"]}

    def sloppy():
        row = rabbits(draw_pairs(), rng.randint(LEAST, MOST), rng, slips=0.1)
        blurt = f"\n#### {rng.randrange(10)}"
        return row | {"answer": blurt if rng.random() < 0.75 else row["worked"]}

    supervise(model, tokenizer, lambda: worked(1, 6), 250, 64, 4e-3, "skill, short chains")
    while right(model, tokenizer, train[:128], 1.0) < 0.95:
        supervise(model, tokenizer, lambda: worked(LEAST - 4, MOST + 4), 100, 32, 3e-3, "skill")
    supervise(model, tokenizer, sloppy, 60, 32, 1e-3, "habit")


def right(model, tokenizer, rows, temperature):
    """The share of these questions that the model answers right; temperature 0 is greedy."""
    cfg = train_math.parse_settings([*FLAGS, "--instruction", ""])
    cfg = replace(cfg, rollout_rows=len(rows) * cfg.group_size)  # all at once
    torch.manual_seed(0)
    row = train_math.evaluate(model, tokenizer, rows, cfg, temperature=temperature)
    return row["eval_reward"]


# ---- the world, and a run in it ------------------------------------------------------------------


def make_world(folder, seed):
    """model/, questions/train.jsonl, questions/test.jsonl, and start.json: the start's accuracy."""
    tokenizer = tiny_tokenizer(CHARACTERS)
    model = tiny_model(tokenizer, seed)
    warm_up(model, tokenizer, seed)
    aside = folder.with_name(folder.name + ".partial")
    model.save_pretrained(aside / "model")
    tokenizer.save_pretrained(aside / "model")
    (aside / "questions").mkdir(exist_ok=True)
    for name, rows in zip(("train", "test"), questions()):
        lines = [json.dumps({name: row[name] for name in ("question", "answer")}) for row in rows]
        Path(aside, "questions", f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    start = {t: right(model, tokenizer, questions()[1], t) for t in TEMPERATURES}
    (aside / "start.json").write_text(json.dumps(start) + "\n")
    aside.rename(folder)  # whole, or not there


def world(seed, root="runs"):
    """The folder of a world: world 0 comes with the repository, others are made and kept."""
    if seed == 0:
        return Path(os.path.relpath(Path(__file__).with_name("world")))
    folder = Path(root, f"world-{seed}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # a second process waits for the first's
        if not folder.exists():
            make_world(folder, seed)
    return folder


def main(argv=None):
    epilog = f"And any flag that train_math.py --help shows; defaults here: {' '.join(FLAGS)}"
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog=epilog)
    parser.add_argument("--world", type=int, default=0, help="0 is there, others are made")
    args, flags = parser.parse_known_args(argv)
    cfg = train_math.parse_settings(FLAGS + flags)
    torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
    folder = world(args.world)
    start = json.loads((folder / "start.json").read_text())
    print("the start, held out, right at temperature " +
          ", ".join(f"{t}: {share:.2f}" for t, share in start.items()) + " (0.0 is greedy)")
    clip_range = [] if cfg.algorithm == "grpo" else WIDER
    train_math.main([
        *FLAGS, *clip_range, "--model", str(folder / "model"), "--dataset",
        str(folder / "questions"), "--instruction", "", *flags])
    picture = Path(cfg.output_dir, "metrics.png")
    draw({cfg.algorithm: read(Path(cfg.output_dir, "metrics.jsonl"))}, picture)
    print(f"the picture of it: {picture}")


if __name__ == "__main__":
    main()
