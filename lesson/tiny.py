"""The small world: a task on which clipping visibly matters at the learning rate below. A run takes
one or two minutes on a CPU.

    python -m lesson.tiny                                                  GSPO
    python -m lesson.tiny --algorithm grpo --output_dir runs/grpo          GRPO
    python -m lesson.tiny --eps_low 1 --eps_high 1e9 --output_dir runs/no_clip
    python -m lesson.tiny --world 5                                        another world

Any flag of train_math.py can be given, too. No network is needed.

The questions are one-line word problems about Fibonacci's rabbits. The model is a Qwen3 with
100,000 parameters. It was first trained to solve the task step by step, with one sum per month.
Then it was fine-tuned on a mixture in which 75% of the answers are random guesses. The goal of RL
is to make the model solve the task step by step again. A world is a model that was made in this way
with one seed. World 0 is in the repository. Making another world takes two minutes.
"""
import argparse
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils import logging

try:
    import train_math
except ModuleNotFoundError:
    sys.exit("start this program in the top folder of the project with: python -m lesson.tiny")
from tools.logs import read, write
from tools.plot import draw
from tools.warm_up import supervise, tiny_model, tiny_tokenizer

FLAGS = """--output_dir runs/tiny --device cpu --prompts_per_step 16 --group_size 16
    --minibatches 8 --epochs 4 --learning_rate 4.5e-4 --max_steps 16 --save_steps 4
    --max_completion_length 108 --micro_batch_tokens 8192 --eval_size 175""".split()
RANGES = {  # these and the learning rate are the settings of evidence/plans/lesson.md
    "gspo": ["--eps_low", "0.01", "--eps_high", "0.0133"],
    "grpo": ["--eps_low", "0.2", "--eps_high", "0.267"]}
MONTHS = "abcdefghijklmnopqrstuvwxyz"  # a: one month to go, b: two, ...
CHARACTERS = "\n #+,.:=?0123456789RI" + MONTHS
LEAST, MOST = 10, 16  # months that a question asks for
TEMPERATURES = (0.0, 0.3, 0.6, 1.0)  # 0: greedy
TASK = """\
The task: how many rabbits are there after some months, if each month has as many as the two months
before it together? Only last digits count. A short example, in which c stands for three months:
  question   Rabbits: 3, then 7. In c months?
  reasoning  c3+7=0b7+0=7a0+7=7
  answer     #### 7
The questions of this run ask for 10 to 16 months, and 175 of them are held out.
In each line below, cut is the fraction of responses that reach the length limit.
equal_reward_groups is the fraction of questions whose responses all have the same reward, which
have no gradient.
clip_fraction is the fraction of tokens that clipping removes from the gradient. GSPO clips all
tokens of a response at once. log_ratio_std says how far the probabilities of the responses have
moved apart in the updates of the step.
eval_best_constant is the accuracy of giving the same answer to all questions."""
GREEDY = """\
This is greedy decoding, which takes the most probable token each time. Greedy accuracy is often
higher than the reward of sampled responses, because a correct token need only be a little more
probable than others. In the last step, the reward of the sampled responses was {reward:.1%}."""


# ---- questions and worked answers ----------------------------------------------------------------


def sums(pair, labels, rng=None, slips=0.0):
    """(the text of the sums, the last digit): "c3+7=0b7+0=7a0+7=7" for the pair 3, 7. With the
    probability `slips`, the result of a sum is a random digit, and the later sums go on from it."""
    text = ""
    for label in labels:
        digit = rng.randrange(10) if rng and rng.random() < slips else sum(pair) % 10
        text += f"{label}{pair[0]}+{pair[1]}={digit}"
        pair = pair[1], digit
    return text, pair[1]


def rabbits(pairs, months, rng=None, slips=0.0):
    """{"question", "answer", "worked"}: the last digit of the number of rabbits after some months.

    Each month has the sum of the two months before. The worked answer is the text of these sums,
    perhaps with `slips`, and then "#### 7"."""
    question = f"Rabbits: {pairs[0]}, then {pairs[1]}. In {MONTHS[months - 1]} months?"
    labels = MONTHS[:months][::-1]
    text, digit = sums(pairs, labels, rng, slips)
    return {"question": question, "answer": f"#### {sums(pairs, labels)[1]}",
            "worked": f"{text}\n#### {digit}"}


def questions():
    """(questions to train on, held-out questions): all 700, of which a quarter is held out."""
    rows = [rabbits((first, second), months) for first in range(10) for second in range(10)
            for months in range(LEAST, MOST + 1)]
    random.Random(0).shuffle(rows)
    return rows[175:], rows[:175]


def warm_up(model, tokenizer, seed):
    """Supervised training before RL: first on step-by-step solutions, until 95% of the sampled
    answers are correct, and then on the mixture with random guesses."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    train, _ = questions()

    def draw_pairs():
        return rng.randrange(10), rng.randrange(10)

    def worked(least, most):
        row = rabbits(draw_pairs(), rng.randint(least, most))
        return row | {"answer": row["worked"]}

    def careless():
        row = rabbits(draw_pairs(), rng.randint(LEAST, MOST), rng, slips=0.1)
        guess = f"\n#### {rng.randrange(10)}"
        return row | {"answer": guess if rng.random() < 0.75 else row["worked"]}

    supervise(model, tokenizer, lambda: worked(1, 6), 250, 64, 4e-3, "solutions, few months")
    while accuracy(model, tokenizer, train[:128], 1.0) < 0.95:
        supervise(model, tokenizer, lambda: worked(LEAST - 4, MOST + 4), 100, 32, 3e-3, "solutions")
    supervise(model, tokenizer, careless, 60, 32, 1e-3, "with guesses")


def accuracy(model, tokenizer, rows, temperature):
    """The accuracy on these questions; temperature 0 is greedy decoding."""
    cfg = train_math.parse_settings([*FLAGS, "--instruction", ""])
    # All at once, also in greedy decoding, which takes only half of rollout_rows.
    cfg = replace(cfg, rollout_rows=2 * len(rows))
    torch.manual_seed(0)
    row = train_math.evaluate(model, tokenizer, rows, cfg, temperature=temperature)
    return row["eval_reward"]


# ---- a world, and a run in it --------------------------------------------------------------------


def make_world(folder, seed):
    """Makes the folder of a world: model/, questions/train.jsonl, questions/test.jsonl, and
    start.json with the accuracy of the model at each temperature."""
    tokenizer = tiny_tokenizer(CHARACTERS)
    model = tiny_model(tokenizer, seed)
    warm_up(model, tokenizer, seed)
    aside = folder.with_name(folder.name + ".partial")
    model.save_pretrained(aside / "model")
    tokenizer.save_pretrained(aside / "model")
    (aside / "questions").mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), questions()):
        write(aside / "questions" / f"{name}.jsonl",
              [{key: row[key] for key in ("question", "answer")} for row in rows])
    start = {t: accuracy(model, tokenizer, questions()[1], t) for t in TEMPERATURES}
    (aside / "start.json").write_text(json.dumps(start) + "\n")
    aside.rename(folder)  # so that an interrupted command leaves no incomplete world


def world(seed, root="runs"):
    """The folder of a world. World 0 is in the repository; others are made once and kept."""
    if seed == 0:
        return Path(os.path.relpath(Path(__file__).with_name("world")))
    folder = Path(root, f"world-{seed}")
    if not folder.exists():
        make_world(folder, seed)
    return folder


def summarise(folder):
    """Prints the accuracy before and after the run in this folder, and one question as an
    example, if possible one whose answer was wrong before."""
    rows = read(folder / "metrics.jsonl")
    last = max(row["step"] for row in rows if "eval_reward" in row)
    before, after = (read(folder / f"eval_{step}.jsonl") for step in (0, last))
    accuracies = [sum(row["reward"] for row in found) / len(found) for found in (before, after)]
    print("\ngreedy accuracy on {} held-out questions: {:.1%} before, {:.1%} after".format(
        len(before), *accuracies))
    pair = max(zip(before, after), key=lambda pair: pair[1]["reward"] - pair[0]["reward"])
    print(f"  {pair[0]['question']}  (correct: {pair[0]['gold']})")
    for name, row in zip(("before", "after"), pair):
        print(f"  {name + ':':7} {' '.join(row['response'].split())}")
    if accuracies[1] > rows[-1].get("reward", 1):
        print(GREEDY.format(reward=rows[-1]["reward"]))
    return "{:.0%} to {:.0%}".format(*accuracies)


def main(argv=None):
    epilog = ("All flags that train_math.py --help shows are accepted, too. Their defaults here: "
              f"{' '.join(FLAGS)}")
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog=epilog)
    parser.add_argument("--world", type=int, default=0,
                        help="number of the world; 0 is in the repository, others are made")
    args, flags = parser.parse_known_args(argv)
    if args.world != 0:
        flags = ["--output_dir", f"runs/tiny-{args.world}", *flags]
    cfg = train_math.parse_settings(FLAGS + flags)
    logging.disable_progress_bar()  # those of loading and saving, which take no time here
    torch.set_num_threads(1)  # on matrices this small, several threads mostly wait for each other
    folder = world(args.world)
    print(TASK)
    start = json.loads((folder / "start.json").read_text())
    accuracies = ", ".join(f"{value:.1%} at {t}" for t, value in start.items())
    print(f"held-out accuracy before RL, by sampling temperature (0.0 is greedy): {accuracies}\n")
    train_math.main([
        *FLAGS, *RANGES.get(cfg.algorithm, []), "--model", str(folder / "model"), "--dataset",
        str(folder / "questions"), "--instruction", "", *flags])
    output = Path(cfg.output_dir)
    result = summarise(output) if cfg.eval_size > 0 else "no evaluation"
    picture = output / "metrics.png"
    draw({cfg.algorithm: read(output / "metrics.jsonl")}, picture,
         title=f"{cfg.algorithm.upper()}, world {args.world}: held-out accuracy {result}")
    print(f"a picture of the run: {picture}")
    if args.world == 0 and not flags:
        print("next, the same run without the clip: "
              "python -m lesson.tiny --eps_low 1 --eps_high 1e9 --output_dir runs/no_clip")
    else:
        print("next, read what these runs show: lesson/README.md")


if __name__ == "__main__":
    main()
