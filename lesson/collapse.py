"""What tells a collapse from a success? Runs of the small world without a clip, on world 0.

    OMP_NUM_THREADS=1 python -m lesson.collapse                  the table of the runs in the log
    OMP_NUM_THREADS=1 python -m lesson.collapse 4.5e-4 0         learning rate and seed of a run

A run is a line of lesson/results/collapse.jsonl. It is not repeated if it is there."""
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

import train_math
from gspo import gspo_loss, sequence_ratio
from lesson import tiny
from tools.logs import append, read

LOG = Path(__file__).with_name("results") / "collapse.jsonl"
FLAGS = [*tiny.FLAGS, "--eps_low", "1", "--eps_high", "1e9", "--instruction", ""]
METRICS = ["reward", "response_length", "cut", "equal_reward_groups", "entropy", "loss",
           "grad_norm", "log_ratio_std"]


def rounded(*values):
    return [float(f"{float(value):.4g}") for value in values]


def kinds_of(lengths):
    """The masks of the guesses (short) and of the responses that are worked out (long)."""
    return {"all": lengths > 0, "short": lengths < 10, "long": lengths >= 40}


def summary(log_s, lengths, advantages):
    """{kind of response: number, mean, median, standard deviation, root mean square of log s}.

    + and -: the sign of the advantage."""
    kinds = kinds_of(lengths)
    for kind in "short", "long":
        kinds[f"{kind}+"] = kinds[kind] & (advantages > 0)
        kinds[f"{kind}-"] = kinds[kind] & (advantages < 0)
    found = {}
    for kind, chosen in kinds.items():
        x = log_s[chosen]
        found[kind] = [len(x)]
        if len(x) > 1:
            found[kind] += rounded(x.mean(), x.median(), x.std(), x.square().mean().sqrt())
    return found


class Watch:
    """Parts of train_math that record the first three steps.

    updates: log s at the updates after the first, as in log_ratio_std. after: log s of the whole
    rollout after the last update. greedy: the accuracy on held-out questions. probe: on correct
    worked answers to these, the mean log-prob of the first token, that of the later tokens, the
    share of these that are most likely, and the share of answers in which all of them are."""

    def __init__(self, cfg, model, tokenizer):
        self.cfg, self.model, self.tokenizer = cfg, model, tokenizer
        self.held_out = tiny.questions()[1]
        prompts = train_math.encode_prompts(tokenizer, self.held_out, cfg)
        worked = [row["worked"] + tokenizer.eos_token for row in self.held_out]
        worked = tokenizer(worked).input_ids
        n = len(worked)
        is_sampled = [[True] * len(response) for response in worked]
        answers = train_math.Rollout(
            self.held_out, prompts, worked, torch.zeros(n, cfg.max_completion_length), [""] * n,
            is_sampled)
        self.answers = train_math.MicroBatch(answers, torch.zeros(n), range(n), "cpu")
        self.rewards = []
        self.steps = []

    @torch.no_grad()
    def build_minibatches(self, rollout, advantages, cfg):
        every = range(len(rollout.responses))
        self.batch = train_math.MicroBatch(rollout, advantages, every, "cpu")
        self.batch.old_log_probs = train_math.response_log_probs(self.model, self.batch, 1.0)
        minibatches = train_math.build_minibatches(rollout, advantages, cfg)
        self.visits = []
        self.first_visits = len(minibatches[0]) if minibatches else 0
        return minibatches

    def loss(self, log_probs, old_log_probs, advantages, mask, *more):
        log_s = sequence_ratio(log_probs.detach(), old_log_probs, mask).log()
        self.visits.append((log_s, mask.sum(1), advantages))
        return gspo_loss(log_probs, old_log_probs, advantages, mask, *more)

    def probe(self):
        mask = self.answers.mask
        tokens = self.answers.ids[:, 1:]
        logits = self.model(self.answers.ids).logits[:, :-1]
        log_probs = train_math.token_log_probs(logits, tokens)
        first = mask & (mask.cumsum(1) == 1)
        later = mask & ~first
        best = (logits.argmax(-1) == tokens).float()
        all_best = best.masked_fill(~later, 1).amin(1)
        parts = log_probs[first], log_probs[later], best[later], all_best
        return rounded(*(x.mean() for x in parts))

    @torch.no_grad()
    def on_step(self, row):
        if row["step"] > 0:
            self.rewards += rounded(row["reward"])
        if row["step"] > 3:
            return
        greedy = tiny.accuracy(self.model, self.tokenizer, self.held_out, 0.0)
        found = {"probe": self.probe(), "greedy": round(greedy, 4)}
        if row["step"] > 0:
            batch = self.batch
            log_probs = train_math.response_log_probs(self.model, batch, 1.0)
            log_s = sequence_ratio(log_probs, batch.old_log_probs, batch.mask).log()
            updates = zip(*self.visits[self.first_visits:])
            found |= zip(METRICS, rounded(*map(row.get, METRICS)))
            found["updates"] = summary(*map(torch.cat, updates))
            found["after"] = summary(log_s, batch.mask.sum(1), batch.advantages)
        self.steps.append(found)


def load(*flags):
    """(settings, model, tokenizer, questions to train on)."""
    folder = tiny.world(0)
    cfg = train_math.parse_settings([*FLAGS, "--dataset", str(folder / "questions"), *flags])
    questions, _ = train_math.load_questions(cfg)
    model, tokenizer = train_math.load(folder / "model", "cpu")
    return replace(cfg, output_dir=None), model, tokenizer, questions


def run(rate, seed):
    if any((line.get("rate"), line.get("seed")) == (rate, seed) for line in read(LOG)):
        return
    *loaded, questions = load("--learning_rate", str(rate), "--seed", str(seed))
    watch = Watch(*loaded)
    gspo = train_math.ALGORITHMS["gspo"]
    train_math.ALGORITHMS["gspo"] = gspo._replace(loss=watch.loss)
    train_math.train(*loaded, questions, on_step=watch.on_step,
                     build_minibatches=watch.build_minibatches)
    final = tiny.accuracy(*loaded[1:], watch.held_out, 0.0)
    append(LOG, {"rate": rate, "seed": seed, "final": round(final, 4),
                 "rewards": watch.rewards, "steps": watch.steps})


def flat(value, name):
    """{name: number} of all numbers below a value of the log, but not of `updates`."""
    if isinstance(value, int | float):
        return {name: value}
    found = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key != "updates":
            found |= flat(inner, f"{name} {key}")
    return found


def auc(runs):
    """The share of pairs of a collapsed run and another one with the same learning rate in which
    the collapsed one has the larger value. runs: (learning rate, whether collapsed, value)."""
    return fmean((x > y) + (x == y) / 2 for rate, fell, x in runs if fell
                 for other, collapsed, y in runs if not collapsed and rate == other)


def balanced(runs, sign, limit):
    """The mean of the shares of the collapsed runs and of the others that a rule recognises."""
    hits = {True: [], False: []}
    for _, fell, x in runs:
        hits[fell].append((sign * (x - limit) > 0) == fell)
    return fmean(map(fmean, hits.values()))


def table():
    """For each quantity: the rule from the first half, and how good it is on the second half."""
    halves = [], []
    for line in read(LOG):
        if "final" in line:
            values = flat(line["rate"], "rate") | flat(line["steps"], "step")
            halves[line["seed"] >= 200].append((line["rate"], line["final"] < 0.35, values))
    print("first half: AUC, rule, balanced accuracy | second half: balanced accuracy, AUC at one")
    print("learning rate | both halves: AUC at one learning rate")
    for name in sorted(set.intersection(*(set(values) for half in halves for *_, values in half))):
        first, second = ([(rate, fell, values[name]) for rate, fell, values in half]
                         for half in halves)
        area = auc([(0, fell, x) for _, fell, x in first])
        sign = 1 if area > 0.5 else -1
        values = sorted({x for *_, x in first})
        limits = [(a + b) / 2 for a, b in zip(values, values[1:])] or values
        limit = max(limits, key=lambda limit: balanced(first, sign, limit))
        print(f"{name}: {area:.2f}, {'above' if sign > 0 else 'below'} {limit:.4g}, "
              f"{balanced(first, sign, limit):.2f} | {balanced(second, sign, limit):.2f}, "
              f"{auc(second):.2f} | {auc(first + second):.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        run(float(sys.argv[1]), int(sys.argv[2]))
    else:
        table()
