"""The tasks of the comparisons, and the parts that their variants replace in train_math.py: losses,
noise, the precision of the forward pass, and an inference engine. tests/test_comparisons.py tests
each part.

In the code and the logs of these experiments, a gate is the clipping rule: it decides which tokens
or responses are clipped.
"""
import copy
import itertools
import random
import re

import torch

import train_math
from gspo import _log_ratio, _loss, _token_mean, sequence_ratio
from lesson import tiny
from tools.warm_up import supervise
from train_math import build_minibatches, correctness_reward, generate, response_log_probs

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


def long_cold_start(model, tokenizer, seed, least=20, most=32, sloppy=True):
    """Supervised training before RL. First the model learns the task from worked answers. Then it
    is fine-tuned on answers with mistakes, 1.3 in a chain of middle length, until its accuracy on
    128 probe questions is below a third. If not `sloppy`, it is trained on correct answers only,
    until its accuracy is a fifth."""
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
    if not sloppy:
        while right < 0.2:
            right = teach(10, 24, 1e-3, *how)
        return
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


def outside(ratio, advantages, eps_low, eps_high):
    """Where the clip is active: (above the range with A > 0, below the range with A < 0)."""
    above = (advantages > 0) & (ratio > 1 + eps_high)
    below = (advantages < 0) & (ratio < 1 - eps_low)
    return above, below


def surrogate(weight, gate, cap=None, side="both", shuffled=None, negatives=1.0):
    """A loss that separates the two roles of the importance ratio: the weight, which multiplies a
    token's gradient, and the gate, which decides whether the token is clipped.

    The gradient of token t of response i is multiplied by w_{i,t} A_i / |y_i|, or by 0 if the ratio
    of the gate is outside the clip range. weight and gate are "token", "sequence" or "one" (a ratio
    that is always 1). (token, token) has GRPO's gradient (Eq. 12), and (sequence, sequence) has
    GSPO's (Eq. 10). The values of the losses differ from theirs.
    cap: the largest weight. side: the gate clips on "both" sides, or only "above" (A > 0) or
    "below" (A < 0). shuffled: the same number of responses is clipped, but at random, among "all"
    or among those whose A has the same "sign". negatives: a factor for every A < 0."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        with torch.no_grad():
            token = _log_ratio(log_probs, old_log_probs, mask).exp()
            sequence = sequence_ratio(log_probs, old_log_probs, mask)[:, None].expand_as(token)
            ratios = {"token": token, "sequence": sequence, "one": torch.ones_like(token)}
            a = advantages[:, None]
            above, below = outside(ratios[gate], a, eps_low, eps_high)
            clipped = {"both": above | below, "above": above, "below": below}[side]
            if shuffled:
                apart = (advantages > 0) & (shuffled == "sign")
                for members in apart, ~apart:
                    rows = members.nonzero()[:, 0]
                    clipped[rows] = clipped[rows[torch.randperm(len(rows))]]
            pushed = a.where(a > 0, negatives * a)
            pushed = ratios[weight].clamp(max=cap or torch.inf) * pushed
            coefficient = pushed.masked_fill(clipped, 0)
        return _loss(_token_mean(coefficient * log_probs, mask), denominator)
    return loss


def noisy_gate(deviation):
    """GSPO, but normal noise with this standard deviation is added to log s when it is decided
    whether a response is clipped. The weight is s without noise."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        ratio = sequence_ratio(log_probs, old_log_probs, mask)
        seen = ratio.detach() * (deviation * torch.randn_like(ratio)).exp()
        above, below = outside(seen, advantages, eps_low, eps_high)
        return _loss((ratio * advantages).masked_fill(above | below, 0), denominator)
    return loss


# ---- rounding, and an inference engine -----------------------------------------------------------


def bf16_log_probs(model, batch, temperature):
    """Replaces train_math's response_log_probs. All forwards are under bfloat16 autocast."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return response_log_probs(model, batch, temperature)


def float8(x):
    """x, rounded to 8 bits (e4m3) with one scale per tensor."""
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Engine:
    """A sampler that differs a little from the policy: "bf16" computes in bfloat16, "float8" has
    weights rounded to 8 bits, and "stale" is the policy of 4 rollouts ago, or the first one. With
    `direct`, its log-probs serve as the old log-probs. Otherwise the training forward computes
    them, as usual. With a `correction`, the loss is `corrected`, and gets the sampler's log-probs.
    The methods replace train_math's functions of the same names."""

    def __init__(self, kind, direct, correction=None):
        self.kind = kind
        self.direct = direct
        self.correction = correction
        self.past = []

    def generate(self, model, *arguments):
        engine = copy.deepcopy(model)
        if self.kind == "bf16":
            for p in engine.parameters():
                p.data = p.data.bfloat16()
        elif self.kind == "float8":
            for p in engine.parameters():
                if p.dim() > 1:
                    p.data = float8(p.data)
        elif self.kind == "stale":
            self.past = (self.past + [engine])[-5:]
            engine = self.past[0]
        return generate(engine, *arguments)

    def build_minibatches(self, rollout, advantages, cfg):
        minibatches = build_minibatches(rollout, advantages, cfg)
        for batch in itertools.chain(*minibatches):
            if self.direct:
                batch.old_log_probs = batch.sampler_log_probs
            if self.correction:
                batch.extra = {"sampler_log_probs": batch.sampler_log_probs}
        return minibatches


def corrected(token_loss, correction):
    """A loss of gspo.py that takes advantages (B, T), corrected for the sampler.

    The advantage of each token is multiplied by its probability under the old policy, divided by
    its probability under the sampler. This factor is truncated to 2 ("tis", truncated importance
    sampling), or set to 0 outside of 0.5 to 5 ("icepop", arXiv:2510.18855)."""
    def loss(log_probs, old_log_probs, advantages, *arguments, sampler_log_probs):
        k = (old_log_probs - sampler_log_probs).exp()
        if correction == "tis":
            factor = k.clamp(max=2)
        else:
            factor = k.where((k >= 0.5) & (k <= 5), 0)
        return token_loss(log_probs, old_log_probs, factor * advantages[:, None], *arguments)
    return loss
