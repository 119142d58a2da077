"""What tells a collapse from a success? Runs of the small world without a clip.

    OMP_NUM_THREADS=1 python -m lesson.collapse                  the table of the runs in the log
    OMP_NUM_THREADS=1 python -m lesson.collapse start            the model before RL
    OMP_NUM_THREADS=1 python -m lesson.collapse 4.5e-4 0         learning rate and seed of a run

A run is a line of lesson/results/collapse.jsonl. It is not repeated if it is there."""
import sys
from dataclasses import replace
from pathlib import Path

import torch

import train_math
from common.logs import append, read
from gspo import gspo_loss, sequence_ratio
from lesson import tiny
from support.rewards import score_rollout

LOG = Path(__file__).with_name("results") / "collapse.jsonl"
NO_CLIP = ["--eps_low", "1", "--eps_high", "1e9", "--eval_steps", "16", "--instruction", ""]
COLLAPSED = 0.35  # a run collapsed if its final held-out greedy accuracy is below this
METRICS = ("reward", "response_length", "cut", "equal_reward_groups", "entropy", "loss",
           "grad_norm", "log_ratio_std")


def summary(log_s, lengths, advantages):
    """{kind of response: number, mean, median, standard deviation, root mean square of log s}.

    A short response is a guess, and a long one is worked out. + or -: the advantage's sign."""
    short, long = lengths < 10, lengths >= 40
    right, wrong = advantages > 0, advantages < 0
    kinds = {"all": lengths > 0, "short": short, "long": long, "short+": short & right,
             "short-": short & wrong, "long+": long & right, "long-": long & wrong}
    found = {}
    for kind, chosen in kinds.items():
        x = log_s[chosen]
        found[kind] = [len(x)]
        if len(x) > 1:
            found[kind] += rounded(x.mean(), x.median(), x.std(), x.square().mean().sqrt())
    return found


def rounded(*values):
    return [float(f"{float(value):.4g}") for value in values]


class Watch:
    """Parts of train_math that record the first three steps.

    updates: log s at the updates after the first, as in log_ratio_std. after: log s of the whole
    rollout after the last update. greedy: the accuracy on held-out questions. probe: on correct
    worked answers to these, the mean log-prob of the first token, that of the later tokens, the
    share of these that are most likely, and the share of answers in which all of them are."""

    def __init__(self, cfg, model, tokenizer):
        self.cfg, self.model, self.tokenizer = cfg, model, tokenizer
        self.held_out = tiny.questions()[1]
        self.rewards, self.steps = [], []
        prompts = train_math.encode_prompts(tokenizer, self.held_out, cfg)
        worked = tokenizer([row["worked"] + tokenizer.eos_token for row in self.held_out]).input_ids
        self.answers = train_math.MicroBatch(prompts, worked, range(len(worked)), "cpu")

    def log_probs(self, batch):
        with torch.no_grad():
            return train_math.response_log_probs(self.model, batch, 1.0)

    def build_minibatches(self, prompts, responses, advantages, cfg):
        indices = range(len(responses))
        self.all = train_math.MicroBatch(prompts, responses, indices, "cpu", advantages)
        self.all.old_log_probs = self.log_probs(self.all)
        minibatches = train_math.build_minibatches(prompts, responses, advantages, cfg)
        self.visits = []
        self.first_visits = len(minibatches[0]) if minibatches else 0
        return minibatches

    def loss(self, log_probs, old_log_probs, advantages, mask, *clip_range, denominator):
        log_s = sequence_ratio(log_probs.detach(), old_log_probs, mask).log()
        self.visits.append((log_s, mask.sum(1), advantages))
        return gspo_loss(log_probs, old_log_probs, advantages, mask, *clip_range,
                         denominator=denominator)

    def probe(self):
        mask, tokens = self.answers.mask, self.answers.ids[:, 1:]
        logits = self.model(self.answers.ids).logits[:, :-1]
        log_probs = train_math.token_log_probs(logits, tokens)
        first = mask & (mask.cumsum(1) == 1)
        later = mask & ~first
        best = (logits.argmax(-1) == tokens).float()
        all_best = best.masked_fill(~later, 1).amin(1)
        return rounded(*(x.mean() for x in (log_probs[first], log_probs[later], best[later],
                                            all_best)))

    @torch.no_grad()
    def on_step(self, row):
        if row["step"] > 0:
            self.rewards += rounded(row["reward"])
        if row["step"] > 3:
            return
        greedy = train_math.evaluate(self.model, self.tokenizer, self.held_out, self.cfg)
        found = {"probe": self.probe(), "greedy": round(greedy["eval_reward"], 4)}
        if row["step"] > 0:
            batch = self.all
            log_s = sequence_ratio(self.log_probs(batch), batch.old_log_probs, batch.mask).log()
            updates = map(torch.cat, zip(*self.visits[self.first_visits:]))
            found |= dict(zip(METRICS, rounded(*(row[name] for name in METRICS))))
            found["updates"] = summary(*updates)
            found["after"] = summary(log_s, batch.mask.sum(1), batch.advantages)
        self.steps.append(found)


def load(*flags):
    """(settings, model, tokenizer) and the questions of world 0."""
    folder = tiny.world(0)
    cfg = train_math.parse_settings(
        [*tiny.FLAGS, *NO_CLIP, "--dataset", str(folder / "questions"), *flags])
    questions, _ = train_math.load_questions(cfg)
    return (replace(cfg, output_dir=None), *train_math.load(folder / "model", "cpu")), questions


def run(rate, seed):
    key = {"rate": rate, "seed": seed}
    if any(key.items() <= line.items() for line in read(LOG)):
        return
    loaded, questions = load("--learning_rate", str(rate), "--seed", str(seed))
    watch = Watch(*loaded)
    train_math.train(*loaded, questions, on_step=watch.on_step, loss=watch.loss,
                     build_minibatches=watch.build_minibatches)
    final = tiny.accuracy(*loaded[1:], watch.held_out, 0.0)
    append(LOG, {**key, "final": round(final, 4), "rewards": watch.rewards, "steps": watch.steps})


def start():
    """Counts of the responses of the model before RL, 16 to each held-out question."""
    (cfg, model, tokenizer), _ = load()
    held_out = tiny.questions()[1]
    for temperature in 1.0, 0.6:
        torch.manual_seed(0)
        rollout = train_math.sample(model, tokenizer, held_out, 16, temperature, cfg)
        right = score_rollout(train_math.correctness_reward, held_out, rollout, cfg)[0] > 0
        lengths = torch.tensor(list(map(len, rollout.responses)))
        counts = {"temperature": temperature}
        for kind, chosen in ("all", lengths > 0), ("short", lengths < 10), ("long", lengths >= 40):
            counts[kind] = [int(chosen.sum()), int(right[chosen].sum())]  # responses, correct ones
        append(LOG, counts)


# ---- table ---------------------------------------------------------------------------------------


def quantities(line):
    """{name: value} of a run: what may tell a collapse from a success."""
    found = {"learning rate": line["rate"]}
    for i, step in enumerate(line["steps"][1:], 1):
        values = {name: step[name] for name in METRICS} | {"greedy accuracy": step["greedy"]}
        values |= zip(("log p(first token)", "log p(later)", "p(later best)", "p(all best)"),
                      step["probe"])
        for kind, (number, *numbers) in step["after"].items():
            values[f"share {kind}"] = number / step["after"]["all"][0]
            values |= zip((f"mean {kind}", f"median {kind}", f"std {kind}", f"rms {kind}"), numbers)
        found |= {f"{name}, step {i}": value for name, value in values.items()}
    return found


def auc(runs, name, same_rate=False):
    """The share of pairs of a collapsed run and another one in which the value of the collapsed
    one is larger. same_rate: only pairs with the same learning rate."""
    wins = [(a[name] > b[name]) + (a[name] == b[name]) / 2
            for is_collapsed, a in runs if is_collapsed for other, b in runs if not other
            if not same_rate or a["learning rate"] == b["learning rate"]]
    return sum(wins) / len(wins)


def balanced(runs, name, limit, sign):
    """The mean of the shares of the collapsed runs and of the others that are recognised."""
    shares = []
    for kind in True, False:
        hits = [(sign * (x[name] - limit) > 0) == kind for fell, x in runs if fell == kind]
        shares.append(sum(hits) / len(hits))
    return sum(shares) / 2


def table():
    """Rules from the runs with seeds below 200, and how well they do on the others."""
    halves = [], []
    for line in read(LOG):
        if "final" in line:
            halves[line["seed"] >= 200].append((line["final"] < COLLAPSED, quantities(line)))
    first, second = halves
    print("quantity | first half: AUC, same rate, rule | second half: AUC, same rate, balanced")
    for name in sorted(set.intersection(*(set(x) for _, x in first))):
        area = auc(first, name)
        sign = 1 if area > 0.5 else -1
        values = sorted({x[name] for _, x in first})
        limits = [(a + b) / 2 for a, b in zip(values, values[1:])] or values
        limit = max(limits, key=lambda limit: balanced(first, name, limit, sign))
        cells = [f"{area:.2f} {auc(first, name, True):.2f} "
                 f"{'above' if sign > 0 else 'below'} {limit:.4g}: "
                 f"{balanced(first, name, limit, sign):.2f}"]
        known = [run for run in second if name in run[1]]
        if len({fell for fell, _ in known}) == 2:
            cells.append(f"{auc(known, name):.2f} {auc(known, name, True):.2f} "
                         f"{balanced(known, name, limit, sign):.2f} of {len(known)}")
        print(" | ".join([name, *cells]))


def main(rate=None, seed=0):
    torch.set_num_threads(1)
    if rate == "start":
        start()
    elif rate:
        run(float(rate), int(seed))
    else:
        table()


if __name__ == "__main__":
    main(*sys.argv[1:])
