"""The tasks of the comparisons: their questions, their reward, and the supervised training of tiny
models before RL, which makes the starting models. Then the experiments of compare.py, and the
variants that they compare.
"""
import random
import re
from collections import namedtuple
from functools import partial
from pathlib import Path

import torch

import train_math
from lesson import tiny
from support.task import gold_answer
from tools.logs import read_packed
from tools.warm_up import supervise

# ---- questions and rewards -----------------------------------------------------------------------

LABELS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def fibonacci(rng, least, most, slips=0.0, gives_up=0.0):
    """{"question", "answer", "worked"}: Fibonacci numbers modulo 10, with 6 tokens per step.

    "37c" has the worked answer "c3+7=0b7+0=7a0+7=7\\n#### 7" and the answer "#### 7". With the
    probability `slips`, a step has a random digit as its result, and later steps use this digit.
    With the probability `gives_up`, the steps end early, and a random digit is the answer."""
    n = rng.randint(least, most)
    pair = rng.randrange(10), rng.randrange(10)
    labels = LABELS[:n][::-1]
    steps = rng.randrange(n) if rng.random() < gives_up else n
    text, digit = tiny.sums(pair, labels[:steps], rng, slips)
    given = digit if steps == n else rng.randrange(10)
    return {"question": f"{pair[0]}{pair[1]}{labels[0]}",
            "answer": f"#### {tiny.sums(pair, labels)[1]}", "worked": f"{text}\n#### {given}"}


def long_questions(seed, n, least=20, most=32):
    """n questions of 20 to 32 steps, whose worked answers have 127 to 199 tokens. One question in
    four is held out: only the seed "held out" gives these."""
    rng = random.Random(f"long {seed}")
    rows = []
    while len(rows) < n:
        row = fibonacci(rng, least, most)
        if (sum(map(ord, row["question"])) % 4 == 0) == (seed == "held out"):
            rows.append(row)
    return rows


def world_questions(seed, n):
    """Questions of the lesson's small world: the 175 held-out ones, or n of the others."""
    train, held_out = tiny.questions()
    if seed == "held out":
        return held_out
    return random.Random(f"world {seed}").sample(train, n)


def task_reward(prompts, completions, answer, **columns):
    """1 if the digits after the last "####" are those of the answer. Unlike in the reward of
    train_math.py, the label of a next step may follow them, as the c in "7c3+7=0"."""
    rewards = []
    for text, gold in zip(completions, answer):
        _, mark, rest = text.rpartition("####")
        found = re.match(r"[ +]*0*([0-9]+)(?![.,:/^]?[0-9]| *[-+/^]? *[0-9])", rest)
        rewards.append(float(bool(mark and found) and f"#### {found[1]}" == gold))
    return rewards


def sampled_reward(model, tokenizer, probe, max_completion_length):
    """The accuracy of one sampled answer per question, with 128 answers at once."""
    cfg = train_math.Settings(max_completion_length=max_completion_length, instruction="",
                              rollout_rows=128)
    found = train_math.evaluate(model, tokenizer, probe, cfg, 1.0, reward=task_reward)
    return found["eval_reward"]


def long_cold_start(model, tokenizer, seed, least=20, most=32):
    """Supervised training before RL. First the model learns the task from worked answers. Then it
    is fine-tuned on answers with mistakes, 1.3 in a chain of middle length, until its accuracy on
    128 probe questions is below a third."""
    rng = random.Random(seed)
    probe = long_questions("probe", 128, least, most)

    def teach(steps, size, rate, *how):
        def row():
            row = fibonacci(rng, *how)
            return {**row, "answer": row["worked"]}

        supervise(model, tokenizer, row, steps, size, rate, "warm-up")
        return sampled_reward(model, tokenizer, probe, 6 * most + 18)

    torch.manual_seed(seed)
    right = teach(250, 96, 4e-3, 1, 6)
    how = max(1, least - 4), min(most + 20, len(LABELS))
    while right < 0.9:
        right = teach(200, 24, 3e-3, *how)
    slips = 0.05 * 26 / ((least + most) / 2)
    while right > 0.33:
        right = teach(20, 32, 1e-3, least, most, slips, 0.1)


def word_problems():
    """7,840 one-line questions, with worked answers as in GSM8K: 392 products in 20 wordings."""
    rows = []
    for a in range(11, 60):
        for b in range(2, 10):
            tens = a // 10 * 10
            x = tens * b
            y = a % 10 * b
            worked = f"{tens}*{b}={x}\n{a % 10}*{b}={y}\n{x}+{y}={x + y}\n#### {x + y}"
            rows += [{"question": f"{name} buys {b} boxes of {a} {thing}. How many?",
                      "answer": worked}
                     for name in ("Ann", "Bob", "Eve", "Tom", "Sam")
                     for thing in ("figs", "pens", "eggs", "nuts")]
    random.Random(0).shuffle(rows)
    return rows


def short_questions(seed, n):
    """Word problems whose worked answers have up to 40 tokens. The first 512 are held out."""
    rows = word_problems()
    if seed == "held out":
        return rows[:n]
    return random.Random(f"short {seed}").sample(rows[512:], n)


def guessed(row, rng):
    """The same question. In three of four cases, its answer is a guess, which is rarely correct."""
    if rng.random() < 0.25:
        return row
    error = 0 if rng.random() < 0.1 else rng.choice((-20, -10, -1, 1, 10, 20, 100))
    return {**row, "answer": f"#### {max(0, int(gold_answer(row['answer'])) + error)}"}


def short_cold_start(model, tokenizer, seed):
    """Supervised training before RL: first on worked answers, and then on a mixture with guesses,
    until the accuracy is below 30%."""
    rng = random.Random(seed)
    rows = word_problems()
    supervise(model, tokenizer, lambda: rng.choice(rows), 460, 48, 5e-3, "worked answers")
    probe = rng.sample(rows, 256)
    torch.manual_seed(seed)
    right = sampled_reward(model, tokenizer, probe, 40)
    if right < 0.95:
        raise RuntimeError(f"the supervised training with seed {seed} must reach an accuracy of "
                           f"0.95, but it reached {right:.2f}")
    while right >= 0.3:
        supervise(model, tokenizer, lambda: guessed(rng.choice(rows), rng), 5, 48, 1e-3,
                  "guesses")
        right = sampled_reward(model, tokenizer, probe, 40)


# ---- the tasks -----------------------------------------------------------------------------------

COMMON = dict(output_dir=None, device="cpu", instruction="", prompts_per_step=16, group_size=8,
              minibatches=4, rollout_rows=128, micro_batch_tokens=10**6, max_steps=12)
CHAINS = {30: (3, 5), 60: (7, 11), 120: (16, 22), 200: (28, 36)}  # tokens: steps

# teach(model, tokenizer, seed) trains a model with random weights before RL, and the result is a
# starting model. questions(seed, n) returns questions, also for the seeds "held out" and "probe".
# settings: the settings of train_math.py that differ from COMMON.
Task = namedtuple("Task", "teach questions settings")


def chains(least=20, most=32):
    """A task with chains of `least` to `most` sums of 6 tokens."""
    return Task(
        partial(long_cold_start, least=least, most=most),
        partial(long_questions, least=least, most=most),
        dict(max_completion_length=6 * most + 18, learning_rate=3e-4),
    )


TASKS = {
    "long": chains(),
    "short": Task(
        short_cold_start,
        short_questions,
        dict(max_completion_length=40, learning_rate=8e-5),
    ),
    # The lesson's small world: lesson/tiny.py makes its models.
    "world": Task(
        None,
        world_questions,
        dict(max_completion_length=108, learning_rate=3e-4, group_size=16, minibatches=8,
             max_steps=16, rollout_rows=256),
    ),
}
TASKS |= {f"{tokens} tokens": chains(*steps) for tokens, steps in CHAINS.items()}


def settings_of(task):
    return train_math.Settings(**COMMON | TASKS[task].settings)


# ---- the variants, and the experiments that compare them -----------------------------------------

# An experiment is a dictionary {panel: {label: variant}}. A panel is a part of its table. A
# variant is a dictionary of its settings:
#
#     task        a key of TASKS
#     algorithm   of train_math.py
#     eps         the lower clip range (the upper one is 4/3 of it), or both as a list
#     epochs, minibatches, learning_rate, max_steps    settings of train_math.py
#     loss        the arguments of compare.surrogate
#     successor   an algorithm of guides/losses.py, or fspo
#
# Most experiments are data: the rows "experiments" of the log. Some of their variants have parts
# that were deleted. README.md says which commit has them.

COMPARISONS = Path(__file__).with_name("logs") / "comparisons.jsonl.gz"
GSPO = "gspo"
GRPO = "grpo"
NO_LOWER_BOUND = 0.99  # how the logs write it; gspo.py gets 1 instead


def variant(algorithm, eps, task="long", epochs=4, **pieces):
    """A variant. eps is the lower clip range; the upper one is 4/3 of it, as in GSPO's paper."""
    return {"task": task, "algorithm": algorithm, "eps": eps, "epochs": epochs, **pieces}


def all_losses(gspo, grpo, **more):
    """GSPO, GRPO, and later losses with the two numbers of their losses, from summaries
    or in common use. README.md says which have no source."""
    later = {"SAPO": [1.05, 1.0], "CISPO": [1, 5.0], "GMPO": [0.4, 0.4], "FSPO": [0.03, 0.03],
             "LUSPO": [2e-3, 2.5e-3], "DAPO": [0.2, 0.28], "Dr. GRPO": [0.2, 0.2]}
    variants = {"GSPO": variant(GSPO, gspo, **more), "GRPO": variant(GRPO, grpo, **more)}
    for label, eps in later.items():
        name = label.lower().replace(". ", "_")
        variants[label] = variant(GSPO, eps, successor=name, **more)
    return variants


EXPERIMENTS = {
    "successors": {
        "long responses, 4 epochs a rollout": all_losses(0.003, 0.1),
        "the same, 1 epoch a rollout": all_losses(0.003, 0.1, epochs=1),
        "short responses, 4 epochs": all_losses(0.03, 0.2, task="short"),
    },
}
for row in read_packed(COMPARISONS)["experiments"]:
    panels = EXPERIMENTS.setdefault(row["experiment"], {})
    panels.setdefault(row["panel"], {})[row["label"]] = row["variant"]
# Of these, the code was deleted after their runs.
RETIRED = ("advantages", "collapse", "corrected", "credit", "critic", "engine", "gate", "moe",
           "noise", "norm", "open", "turns", "unfinished", "unfinished_60")


def variants_of(name):
    """All variants of an experiment."""
    return [spec for panel in EXPERIMENTS[name].values() for spec in panel.values()]
