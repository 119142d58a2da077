"""The tasks of the comparisons, and the losses that their variants replace in train_math.py.

tests/test_evidence.py tests each of them.

In the code and the logs of these experiments, a gate is the clipping rule: it decides which tokens
or responses are clipped.
"""
import random
import re

import torch

import train_math
from gspo import _log_ratio, _loss, _token_mean, sequence_ratio
from lesson import tiny
from tools.warm_up import supervise
from train_math import correctness_reward

# ---- tasks: questions, and the supervised training of a model before RL --------------------------

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
    """The reward of train_math.py, except that "7e3" is not 7,000: the e is the label of the next
    step, as the c in "c3+7=0"."""
    texts = [re.sub("[eE]", "_", text) for text in completions]
    return correctness_reward(prompts, texts, answer)


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
    return {**row, "answer": f"#### {max(0, int(train_math.gold_answer(row['answer'])) + error)}"}


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


# ---- losses -------------------------------------------------------------------------------------


def surrogate(weight, gate, cap=None, negatives=1.0):
    """A loss that separates the two roles of the importance ratio: the weight, which multiplies a
    token's gradient, and the gate, which decides whether the token is clipped.

    The gradient of token t of response i is multiplied by w_{i,t} A_i / |y_i|, or by 0 if the ratio
    of the gate is outside the clip range. weight and gate are "token", "sequence" or "one" (a ratio
    that is always 1). (token, token) has GRPO's gradient (Eq. 12), and (sequence, sequence) has
    GSPO's (Eq. 10). The values of the losses differ from theirs.
    cap: the largest weight. negatives: a factor for every A < 0."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        with torch.no_grad():
            token = _log_ratio(log_probs, old_log_probs, mask).exp()
            sequence = sequence_ratio(log_probs, old_log_probs, mask)[:, None].expand_as(token)
            ratios = {"token": token, "sequence": sequence, "one": torch.ones_like(token)}
            a = advantages[:, None]
            above = (a > 0) & (ratios[gate] > 1 + eps_high)
            below = (a < 0) & (ratios[gate] < 1 - eps_low)
            pushed = a.where(a > 0, negatives * a)
            pushed = ratios[weight].clamp(max=cap or torch.inf) * pushed
            coefficient = pushed.masked_fill(above | below, 0)
        return _loss(_token_mean(coefficient * log_probs, mask), denominator)
    return loss
