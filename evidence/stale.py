"""Clip fractions with stale rollouts, on the small world: as plans/stale.md says.

    OMP_NUM_THREADS=1 python -m evidence.stale

In an asynchronous loop, the sampler has weights of some steps ago. This script imitates this: the
policy of `age` steps ago samples, and also gives the old log-probs. In the first `age` steps, this
is the starting model. Each run is a line of logs/stale.jsonl.gz, and no run is made twice.
"""
import argparse
import copy
import itertools
from collections import deque
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

import train_math
from gspo import clip_fraction, sequence_ratio
from lesson import tiny
from tools.logs import append, make_writable, read_packed

LOG = Path(__file__).with_name("logs") / "stale.jsonl.gz"
WORLDS = 0, 1, 2, 3
AGES = 0, 1, 2, 4
CLIPS = ("gspo", 3e-4, 4e-4), ("gspo", 3e-3, 4e-3), ("gspo", 3e-2, 4e-2), ("grpo", 0.2, 0.27)
FLAGS = [*tiny.FLAGS, "--instruction", "", "--minibatches", "4", "--epochs", "1",
         "--max_steps", "8", "--prompts_per_step", "8"]
EVALUATED = 4  # samples for each held-out question
KEPT = "reward", "clip_fraction", "clipped_first", "moved_first", "log_ratio_std", "grad_norm"


def recorded(loss, ratio, found):
    """The loss, which also adds to `found`, for each update: (the fraction of tokens that are
    clipped, the standard deviation of log s over its responses)."""
    def recording(log_probs, old_log_probs, advantages, mask, low, high, denominator):
        s = sequence_ratio(log_probs.detach(), old_log_probs, mask)
        ratios = s if ratio == "sequence" else (log_probs.detach() - old_log_probs).exp()
        clipped = clip_fraction(ratios, advantages, mask, low, high)
        found.append((clipped.item(), s.log().std().item()))
        return loss(log_probs, old_log_probs, advantages, mask, low, high, denominator)

    return recording


def run(world, age, clip):
    """Trains one model. Returns its line of the log."""
    algorithm, low, high = clip
    model, tokenizer = train_math.load(str(tiny.world(world) / "model"), "cpu")
    sampler = copy.deepcopy(model)
    weights = deque(maxlen=age + 1)  # at the beginnings of this step and of the `age` before it
    found = []

    def sample(model, tokenizer, questions, group_size, *others):
        if group_size > 1:  # in training
            weights.append(copy.deepcopy(model.state_dict()))
            sampler.load_state_dict(weights[0])
            model = sampler
        return train_math.sample(model, tokenizer, questions, group_size, *others)

    def build_minibatches(rollout, advantages, cfg):
        minibatches = train_math.build_minibatches(rollout, advantages, cfg)
        for batch in itertools.chain(*minibatches):
            with torch.no_grad():
                batch.old_log_probs = train_math.response_log_probs(sampler, batch, 1.0)
        return minibatches

    def on_step(row):
        if found:  # not at step 0
            row["clipped_first"], row["moved_first"] = found[0]
            found.clear()

    entry = train_math.ALGORITHMS[algorithm]
    entry = entry._replace(loss=recorded(entry.loss, entry.ratio, found), eps_low=low,
                           eps_high=high)
    train, held_out = tiny.questions()
    parts = {"sample": sample, "build_minibatches": build_minibatches}
    with mock.patch.dict(train_math.ALGORITHMS, {"recorded": entry}):
        cfg = replace(train_math.parse_settings(FLAGS), output_dir=None, algorithm="recorded",
                      micro_batch_tokens=10**6, seed=100 * world)
        rows = train_math.train(cfg, model, tokenizer, train, on_step=on_step, **parts)
        torch.manual_seed(world)
        end = train_math.evaluate(model, tokenizer, held_out, cfg, 1.0, group_size=EVALUATED)
    line = {"world": world, "age": age, "clip": list(clip), "accuracy": end["eval_reward"]}
    for name in KEPT:
        line[name] = [float(f"{row[name] or 0:.4g}") for row in rows[1:]]
    return line | {"seconds": sum(row["seconds"] for row in rows[1:])}


def main():
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)
    make_writable(LOG)
    made = [(row["world"], row["age"], tuple(row["clip"]))
            for row in read_packed(LOG).get("runs", [])]
    for job in itertools.product(WORLDS, AGES, CLIPS):
        if job not in made:
            append(LOG, {"log": "runs", **run(*job)})


if __name__ == "__main__":
    main()
