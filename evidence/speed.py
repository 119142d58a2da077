"""Compares a step of train_math.py with one of TRL's GRPOTrainer in GSPO mode, on one CPU core.

    python3 -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0
    OMP_NUM_THREADS=1 .venv-trl/bin/python -m evidence.speed    # an hour, Linux

TRL is installed in a separate environment. The model is a Qwen3 of two layers with random weights
in float32. Both sides use fused AdamW, groups of 8, and 4 minibatches of one micro-batch. There are
two sizes: 512 words, hidden size 64 and 16 prompts per step, or 151,936 words, hidden size 896
(both as in Qwen2.5-0.5B) and 4 prompts per step. There are two workloads:

    fixed      prompts of 32 tokens, responses of 64 tokens; the rewards of each group differ
    natural    prompts of 16 to 48 tokens; a response ends after each token with probability 1/32,
               and at 128 tokens at the latest; one reward in five is 1

TRL runs twice: with its defaults except for bfloat16, and tuned. Tuned means
gradient_checkpointing=False and, with the large vocabulary, four or eight micro-batches per
minibatch, which are faster on this CPU. Before the comparison, both sides must give the same loss
and gradient on one frozen rollout.

A round is our step and then each of TRL's steps, in one process. Times are CPU seconds of the
process. Memory is the peak during a step, minus what the process held when the step began. It
therefore does not include the weights and AdamW's state, which are the same for all. The last line
is one JSON object. The numbers of each round are written to rounds.jsonl in --output_dir. Those of
the page are in logs/speed.jsonl.gz.
"""
import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":  # these must be set before the libraries are imported
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

import train_math
from gspo import gspo_loss
from tools.logs import make_writable, read
from tools.warm_up import given_rollout

try:
    import trl
    from trl import GRPOConfig, GRPOTrainer
except ImportError:  # the table can be made without TRL
    trl = None

PROMPTS = {512: 16, 151936: 4}  # prompts per step
HIDDEN = {512: 64, 151936: 896}  # hidden size; the second pair is that of Qwen2.5-0.5B
GROUP, MINIBATCHES, END = 8, 4, 1
WORKLOADS = {  # tuned: the number of micro-batches per minibatch of the tuned TRL
    "fixed": SimpleNamespace(prompt=(32, 32), length=64, end=0, tuned=4),
    "natural": SimpleNamespace(prompt=(16, 48), length=128, end=1 / 32, tuned=8)}
PHASES = "rollout", "old log-probs", "update"


def make_tokenizer(vocabulary):
    """One token per word. A special token must not begin a word: "w1" would split "w12"."""
    words = {f"w{i}": i for i in range(3, vocabulary)} | {"<pad>": 0, "<end>": END, "<unk>": 2}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>",
                                   unk_token="<unk>", chat_template="{{ messages[0].content }}")


def make_model(vocabulary, hidden, end):
    """A model with random weights. A bias of its head gives the end token the probability `end`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=END, pad_token_id=0)
    model = Qwen3ForCausalLM(config).eval()
    bias = torch.zeros(vocabulary)
    bias[END] = math.log(vocabulary * end / (1 - end)) if end else -1e4
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return model


def make_questions(n, vocabulary, workload):
    g = torch.Generator().manual_seed(0)
    least, most = workload.prompt
    lengths = torch.randint(least, most + 1, (n,), generator=g).tolist()
    words = [torch.randint(3, vocabulary, (m,), generator=g).tolist() for m in lengths]
    return [" ".join(f"w{i}" for i in question) for question in words]


def reward_of(workload):
    """fixed: a reward from -1 to 1. natural: 1 for one response in five, so that in some groups all
    rewards are 0."""
    def reward(completions, **columns):
        sums = [sum(int(word[1:]) for word in text.split()) for text in completions]
        if workload.end:
            return [float(total % 5 == 0) for total in sums]
        return [math.sin(total) for total in sums]
    return reward


class Turns(threading.Thread):
    """A training loop in a thread. Each call of this object runs it until it calls pause()."""

    def __init__(self, loop):
        super().__init__(daemon=True)
        self.loop = loop
        self.go = threading.Semaphore(0)
        self.paused = threading.Semaphore(0)
        self.error = None
        self.start()

    def run(self):
        self.go.acquire()
        try:
            self.loop()
        except BaseException as error:
            self.error = error
        self.paused.release()

    def pause(self):
        self.paused.release()
        self.go.acquire()

    def __call__(self):
        self.go.release()
        self.paused.acquire()
        if self.error:
            raise self.error


class Ours:
    """train_math.train_step, called as in train_math.train."""
    name = "ours"

    def __init__(self, model, job):
        self.model = model
        self.job = job
        self.step = 0
        self.cfg = train_math.Settings(
            output_dir=None, device="cpu", instruction="", group_size=GROUP,
            prompts_per_step=PROMPTS[job.vocabulary], minibatches=MINIBATCHES,
            micro_batch_tokens=job.rows * (job.prompt[1] + job.length), learning_rate=1e-6,
            max_completion_length=job.length, max_steps=job.rounds)
        self.parts = train_math.Parts(
            reward=self.reward, response_log_probs=self.response_log_probs)
        self.optimizer = self.parts.make_optimizer(model)

    def reward(self, prompts, completions, **columns):
        self.phases["rollout"] = seconds() - self.began
        return reward_of(self.job)(completions)

    def response_log_probs(self, *arguments):
        began = seconds()
        result = train_math.response_log_probs(*arguments)
        if not torch.is_grad_enabled():
            self.phases["old log-probs"] += seconds() - began
        return result

    def play(self):
        n = self.cfg.prompts_per_step
        questions = [{"question": q} for q in self.job.questions[self.step * n:][:n]]
        self.step += 1
        self.phases = {"rollout": 0.0, "old log-probs": 0.0}
        self.began = seconds()
        row = train_math.train_step(
            self.model, self.job.tokenizer, self.optimizer, questions, self.step, self.cfg,
            self.parts)
        self.length = row["response_length"]


class TRL(TrainerCallback):
    def __init__(self, name, model, job, parts=1, **options):
        self.name = name
        self.phases = {}
        config = GRPOConfig(
            importance_sampling_level="sequence", loss_type="grpo", scale_rewards="group",
            epsilon=3e-4, epsilon_high=4e-4, beta=0.0, num_iterations=1, temperature=1.0, top_p=1.0,
            top_k=0, per_device_train_batch_size=job.rows // parts,
            gradient_accumulation_steps=parts, steps_per_generation=MINIBATCHES * parts,
            num_generations=GROUP, max_completion_length=job.length,
            max_steps=MINIBATCHES * (job.rounds + 1), learning_rate=1e-6, adam_beta2=0.95,
            max_grad_norm=1.0, bf16=False, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_steps=10**6, shuffle_dataset=False,
            output_dir=tempfile.mkdtemp(), **options)
        self.trainer = GRPOTrainer(
            model, reward_of(job), config,
            Dataset.from_list([{"prompt": q} for q in job.questions]),
            processing_class=job.tokenizer, callbacks=[self])
        self.turns = Turns(self.trainer.train)
        self.clock("_generate_and_score_completions", "rollout and old")
        self.clock("_get_per_token_logps_and_entropies", "old log-probs", if_no_grad=True)

    def clock(self, method, phase, if_no_grad=False):
        function = getattr(self.trainer, method)

        def clocked(*args, **kwargs):
            began = seconds()
            result = function(*args, **kwargs)
            if not (if_no_grad and torch.is_grad_enabled()):
                self.phases[phase] = self.phases.get(phase, 0) + seconds() - began
            return result
        setattr(self.trainer, method, clocked)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step and state.global_step % MINIBATCHES == 0:
            self.turns.pause()

    def play(self):
        self.phases = {}
        self.turns()
        both = self.phases.pop("rollout and old")
        self.phases["rollout"] = both - self.phases["old log-probs"]
        self.length = self.trainer._metrics["train"]["completions/mean_length"][-1]


def seconds():
    """CPU seconds of this process, so that other jobs on the machine do not count."""
    return time.process_time()


def memory(key):
    """The memory in MB that this process holds now (key VmRSS) or held at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(key))
    return int(line.split()[1]) / 1024


def play(side):
    """One step of a side: its seconds in total and by phase, and the increase of memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns the memory that an earlier step has freed
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS
    held = memory("VmRSS")
    began = seconds()
    side.play()
    took = seconds() - began
    return {"seconds": took, "rollout": side.phases["rollout"],
            "old log-probs": side.phases["old log-probs"],
            "update": took - sum(side.phases.values()), "peak_mb": memory("VmHWM") - held,
            "response_length": side.length}


def padded(rows, left, value):
    width = max(map(len, rows))
    pads = [[value] * (width - len(row)) for row in rows]
    whole = [pad + row if left else row + pad for row, pad in zip(rows, pads)]
    return torch.tensor(whole)


def frozen_rollout(model, job):
    """(our micro-batch, TRL's inputs) for two prompts with a group of responses each, and random
    advantages."""
    questions = [{"question": q} for q in job.questions[:2]]
    cfg = train_math.Settings(instruction="")
    prompts = train_math.encode_prompts(job.tokenizer, questions, cfg)
    torch.manual_seed(0)
    ends = torch.tensor([END])
    advantages = torch.randn(2 * GROUP)
    responses, _ = train_math.generate(model, prompts, GROUP, job.length, 1.0, ends)
    asked = [p for p in prompts for _ in range(GROUP)]
    rollout = given_rollout(asked, responses)
    batch = train_math.MicroBatch(rollout, advantages, range(len(asked)), torch.device("cpu"))

    inputs = {"advantages": advantages}
    for name, rows, left in (("prompt", asked, True), ("completion", responses, False)):
        inputs[f"{name}_ids"] = padded(rows, left, 0)
        inputs[f"{name}_mask"] = padded([[1] * len(row) for row in rows], left, 0)
    return batch, inputs


@torch.no_grad()
def old_log_probs(trainer, batch, inputs):
    """The old log-probs, (ours, TRL's)."""
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1)
                 for x in ("ids", "mask"))
    length = inputs["completion_ids"].shape[1]
    theirs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)
    return train_math.response_log_probs(trainer.model, batch, 1.0), theirs


def flat_gradient(loss, weights):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])


def same_maths(side, job):
    """AssertionError: our loss or gradient differs from TRL's on a frozen rollout after a random
    change of the policy."""
    trainer = side.trainer
    model = trainer.model
    batch, inputs = frozen_rollout(model, job)
    old, their_old = old_log_probs(trainer, batch, inputs)
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():  # so that the ratios differ from 1
            p.add_(torch.randn_like(p) * 2e-4 * p.requires_grad)
    trainer.current_gradient_accumulation_steps = 1
    log_probs = train_math.response_log_probs(model, batch, 1.0)
    our_loss = gspo_loss(log_probs, old, inputs["advantages"], batch.mask)
    their_loss = trainer._compute_loss(model, inputs | {"old_per_token_logps": their_old})
    weights = [p for p in model.parameters() if p.requires_grad]
    ours = flat_gradient(our_loss, weights)
    theirs = flat_gradient(their_loss, weights)
    with torch.no_grad():
        for p, before in zip(model.parameters(), kept):
            p.copy_(before)
    apart = (ours - theirs).norm() / ours.norm()
    print(f"one frozen rollout: our loss is {our_loss:.6f}, TRL's is {their_loss:.6f}; the norm of "
          f"our gradient is {ours.norm():.4f}, and the relative difference is {apart:.1e}")
    assert abs(our_loss - their_loss) < 1e-6 and apart < 1e-4, "the loss or the gradient differs"


def race(vocabulary, hidden, name, rounds, log):
    job = SimpleNamespace(**vars(WORKLOADS[name]), vocabulary=vocabulary, rounds=rounds)
    job.rows = PROMPTS[vocabulary] * GROUP // MINIBATCHES  # a minibatch's: one micro-batch
    job.tokenizer = make_tokenizer(vocabulary)
    job.questions = make_questions(PROMPTS[vocabulary] * (rounds + 1), vocabulary, job)
    parts = job.tuned if vocabulary > 10_000 else 1
    trained = [make_model(vocabulary, hidden, job.end) for _ in range(3)]
    sides = [Ours(trained[0], job), TRL("TRL", trained[1], job),
             TRL("TRL tuned", trained[2], job, parts, gradient_checkpointing=False)]
    same_maths(sides[2], job)
    for i in range(rounds):
        played = {side.name: play(side) for side in sides}
        row = {"vocabulary": vocabulary, "hidden": hidden, "workload": name, "round": i, **played}
        print(json.dumps(row), file=log, flush=True)
        ours = played["ours"]["seconds"]
        shown = [f"ours {ours:.2f} s"]
        for side in sides[1:]:
            took = played[side.name]["seconds"]
            shown.append(f"{side.name} {took:.2f} s, ratio {took / ours:.2f}")
        dropped = " (dropped)" if i == 0 else ""
        print(f"vocabulary {vocabulary}, {name}, round {i}{dropped}: {'; '.join(shown)}")


def summarise(rounds):
    """The ratios of each vocabulary, workload and variant of TRL, without the first rounds."""
    results = []
    keys = "vocabulary", "hidden", "workload"
    for job in dict.fromkeys(tuple(row[key] for key in keys) for row in rounds):
        played = [row for row in rounds if tuple(row[key] for key in keys) == job and row["round"]]
        for rival in ("TRL", "TRL tuned"):
            times = {key: ratio([row[rival][key] / row["ours"][key] for row in played])
                     for key in ("seconds", *PHASES)}
            peaks = [round(statistics.median(row[side]["peak_mb"] for row in played))
                     for side in ("ours", rival)]
            results.append({**dict(zip(keys, job)), "rival": rival, **times, "peak_mb": peaks})
    return results


def ratio(values):
    return {"median": round(statistics.median(values), 2),
            "range": [round(min(values), 2), round(max(values), 2)]}


def table(results):
    lines = ["Times, TRL / ours: the median of the rounds (their range)\n",
             "| vocabulary | hidden size | workload | against | step | rollout | old log-probs "
             "| update | peak memory, ours : TRL |", "|---|---|---|---|---|---|---|---|---|"]
    for row in results:
        cells = [f"{row['vocabulary']:,}", str(row["hidden"]), row["workload"], row["rival"]]
        for key in ("seconds", *PHASES):
            low, high = row[key]["range"]
            cells.append(f"{row[key]['median']:.2f} ({low:.2f} to {high:.2f})")
        cells.append("{} : {} MB".format(*row["peak_mb"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", choices=PROMPTS, default=list(PROMPTS),
                        help="number of words of the model")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--hidden", type=int,
                        help="hidden size (default: 64, or 896 with 151,936 words)")
    parser.add_argument("--rounds", type=int, default=6,
                        help="number of rounds, of which the first is not counted")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/speed"))
    args = parser.parse_args()
    if trl is None:
        parser.error("trl==1.16.0 is not installed. The first lines of this file show how to "
                     "install it in a separate environment")
    if args.rounds < 2:
        parser.error("--rounds must be at least 2, because the first round is not counted")
    torch.set_num_threads(1)
    make_writable(args.output_dir / "rounds.jsonl")
    with open(args.output_dir / "rounds.jsonl", "w", encoding="utf-8") as log:
        for vocabulary in args.vocabulary:
            for name in args.workload:
                hidden = args.hidden or HIDDEN[vocabulary]
                race(vocabulary, hidden, name, args.rounds, log)
    results = summarise(read(args.output_dir / "rounds.jsonl"))
    print(table(results))
    print(json.dumps({"trl": trl.__version__, "torch": torch.__version__, "ratios": results}))


if __name__ == "__main__":
    main()
