"""What tells a run that collapses from one that succeeds: runs without a clip on the small world.

    OMP_NUM_THREADS=1 python -m lesson.collapse start                      the model before RL
    OMP_NUM_THREADS=1 python -m lesson.collapse run 0 0 4.5e-4             the lesson's run
    OMP_NUM_THREADS=1 python -m lesson.collapse run 0 100-119 3.5e-4       world, seeds, rate

Appends one line per run to lesson/results/collapse.jsonl; a run that is there is not repeated. For
each of the first three steps, a line has the metrics of train_math.py and what `Watch` adds.
"""
import argparse
from dataclasses import replace
from pathlib import Path

import torch

import train_math
from common.logs import append, read
from gspo import group_advantages, gspo_loss, sequence_ratio
from lesson import tiny
from support.rewards import score_rollout

LOG = Path(__file__).with_name("results") / "collapse.jsonl"
NO_CLIP = ["--eps_low", "1", "--eps_high", "1e9", "--eval_steps", "16", "--instruction", ""]
STEPS = 3  # the steps that are logged in detail
SHORT = 10  # a response with fewer tokens is a guess
LONG = 40  # a response with at least this many tokens is worked out step by step
METRICS = ("reward", "response_length", "cut", "equal_reward_groups", "entropy", "loss",
           "grad_norm", "log_ratio_std")


def summary(values):
    """[number, mean, median, standard deviation, root mean square] of a tensor (n,)."""
    if len(values) < 2:
        return [len(values)]
    found = [values.mean(), values.median(), values.std(), values.square().mean().sqrt()]
    return [len(values), *(float(f"{x.item():.4g}") for x in found)]


def summaries(log_s, lengths, advantages):
    """The summary of log s (n,) for kinds of responses. + and -: the sign of the advantage."""
    short = lengths < SHORT
    long = lengths >= LONG
    kinds = {"all": lengths > 0, "short": short, "long": long,
             "short+": short & (advantages > 0), "short-": short & (advantages < 0),
             "long+": long & (advantages > 0), "long-": long & (advantages < 0)}
    return {kind: summary(log_s[chosen]) for kind, chosen in kinds.items()}


class Watch:
    """Parts of train_math that record what a step does to the responses and to the model.

    `updates` summarises log s at each update after the first, as log_ratio_std does. `after` is
    about all responses of the rollout, after the last update. `right_long` is the accuracy of the
    worked responses of the rollout. `probe` is about the correct worked answers to the held-out
    questions: the log-prob of the first token, the mean log-prob of the later ones, the share of
    the later ones that are most likely, and the share of answers where all later ones are."""

    def __init__(self, model, tokenizer, cfg):
        self.model, self.tokenizer, self.cfg = model, tokenizer, cfg
        self.held_out = tiny.questions()[1]
        self.rows = []
        self.curves = {"reward": [], "cut": [], "response_length": []}
        prompts = train_math.encode_prompts(tokenizer, self.held_out, cfg)
        worked = [tokenizer(row["worked"]).input_ids + [tokenizer.eos_token_id]
                  for row in self.held_out]
        self.answers = train_math.MicroBatch(prompts, worked, range(len(worked)), "cpu")

    def build_minibatches(self, prompts, responses, advantages, cfg):
        minibatches = train_math.build_minibatches(prompts, responses, advantages, cfg)
        batch = train_math.MicroBatch(prompts, responses, range(len(responses)), "cpu", advantages)
        with torch.no_grad():
            batch.old_log_probs = train_math.response_log_probs(self.model, batch, 1.0)
        self.rollout = batch
        self.skipped = len(minibatches[0]) if minibatches else 0  # calls of the first update
        self.visits = []
        return minibatches

    def group_advantages(self, rewards, group_size):
        self.rewards = rewards
        return group_advantages(rewards, group_size)

    def loss(self, log_probs, old_log_probs, advantages, mask, *clip_range, denominator):
        log_s = sequence_ratio(log_probs.detach(), old_log_probs, mask).log()
        self.visits.append((log_s, mask.sum(1), advantages))
        return gspo_loss(log_probs, old_log_probs, advantages, mask, *clip_range,
                         denominator=denominator)

    @torch.no_grad()
    def probe(self):
        batch = self.answers
        logits = self.model(batch.ids).logits[:, :-1]
        tokens = batch.ids[:, 1:]
        log_probs = train_math.token_log_probs(logits, tokens)
        first = batch.mask & (batch.mask.cumsum(1) == 1)
        later = batch.mask & ~first
        best = logits.argmax(-1) == tokens
        found = [log_probs[first].mean(), log_probs[later].mean(), best[later].float().mean(),
                 (best | ~later).all(1).float().mean()]
        return [float(f"{x.item():.4g}") for x in found]

    @torch.no_grad()
    def on_step(self, row):
        if row["step"] > 0:
            for name, curve in self.curves.items():
                curve.append(round(row[name], 4))
        if row["step"] > STEPS:
            return
        greedy = train_math.evaluate(self.model, self.tokenizer, self.held_out, self.cfg)
        at_limit = [result["tokens"] == self.cfg.max_completion_length
                    for result in greedy["eval_results"]]
        found = {"probe": self.probe(), "greedy": round(greedy["eval_reward"], 4),
                 "greedy_cut": round(sum(at_limit) / len(at_limit), 4)}
        if row["step"] > 0:
            batch = self.rollout
            log_probs = train_math.response_log_probs(self.model, batch, 1.0)
            log_s = sequence_ratio(log_probs, batch.old_log_probs, batch.mask).log()
            lengths = batch.mask.sum(1)
            after = log_s, lengths, batch.advantages
            right = self.rewards[lengths >= LONG].tolist()
            updates = (torch.cat(column) for column in zip(*self.visits[self.skipped:]))
            found |= {name: float(f"{row[name]:.4g}") for name in METRICS}
            found["right_long"] = round(sum(right) / max(1, len(right)), 4)
            found |= {"updates": summaries(*updates), "after": summaries(*after)}
        self.rows.append(found)


def load(world, flags):
    """(settings, questions, model, tokenizer) of a world."""
    folder = tiny.world(world)
    cfg = train_math.parse_settings(
        [*tiny.FLAGS, *NO_CLIP, "--dataset", str(folder / "questions"), *flags])
    cfg = replace(cfg, output_dir=None)
    questions, _ = train_math.load_questions(cfg)
    return cfg, questions, *train_math.load(folder / "model", "cpu")


def run(world, seed, rate):
    """One run, unless the log has it."""
    key = {"world": world, "seed": seed, "rate": rate}
    if any(key.items() <= line.items() for line in read(LOG)):
        return
    flags = ["--seed", str(seed), "--learning_rate", str(rate)]
    cfg, questions, model, tokenizer = load(world, flags)
    watch = Watch(model, tokenizer, cfg)
    train_math.train(cfg, model, tokenizer, questions, on_step=watch.on_step, loss=watch.loss,
                     build_minibatches=watch.build_minibatches,
                     group_advantages=watch.group_advantages)
    final = tiny.accuracy(model, tokenizer, watch.held_out, 0.0)
    append(LOG, key | {"final": round(final, 4), "curves": watch.curves, "steps": watch.rows})
    print(key, f"final greedy accuracy {final:.1%}", flush=True)


def start(world):
    """The responses of the model before RL to the held-out questions, 16 to each."""
    for temperature in 1.0, 0.6:
        cfg, _, model, tokenizer = load(world, [])
        torch.manual_seed(0)
        held_out = tiny.questions()[1]
        rollout = train_math.sample(model, tokenizer, held_out, 16, temperature, cfg)
        rewards, _ = score_rollout(train_math.correctness_reward, held_out, rollout, cfg)
        lengths = torch.tensor([len(response) for response in rollout.responses])
        long = lengths >= LONG
        append(LOG, {"world": world, "before_RL_at_temperature": temperature,
                     "responses": len(long), "right": int(rewards.sum()),
                     "long": int(long.sum()), "long_right": int(rewards[long].sum()),
                     "short": int((lengths < SHORT).sum()),
                     "short_right": int(rewards[lengths < SHORT].sum())})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["start", "run"])
    parser.add_argument("world", type=int, nargs="?", default=0)
    parser.add_argument("seeds", nargs="?", default="0", help="such as 3 or 0-9")
    parser.add_argument("rate", type=float, nargs="?", default=4.5e-4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "start":
        start(args.world)
    else:
        first, _, last = args.seeds.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            run(args.world, seed, args.rate)


if __name__ == "__main__":
    main()
