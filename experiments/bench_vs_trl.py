"""Our step against TRL's GRPOTrainer in GSPO mode: time and memory, in turns, in one process, on one CPU core.

    python3 -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0     # a venv of TRL's own
    OMP_NUM_THREADS=1 .venv-trl/bin/python experiments/bench_vs_trl.py                   # about 20 minutes, Linux

A Qwen3 of two layers, hidden size 64, random weights, float32, fused AdamW, groups of 8, 4 minibatches of one
micro-batch; with 512 words and 16 prompts a step, and with 151,936 words and 4 prompts. Two workloads. "fixed":
prompts of 32 tokens, responses of 64, in no group all rewards equal. "natural": prompts of 16 to 48 tokens, a
response ends after each token with probability 1/32, at 128 at the latest, and one reward in five is 1. TRL runs
twice: as its defaults stand but for bfloat16, and tuned: gradient_checkpointing=False and, with the large
vocabulary, four or eight micro-batches a minibatch, which on this CPU are faster. Before the race both sides
must give one loss and one gradient on one frozen rollout.

A round is our step, then each of TRL's. Times are process CPU seconds. Memory is the peak of a turn over what the
process held when the turn began, so without weights and AdamW's state, which are the same for all. The last line
is one JSON object; results/bench_vs_trl/, or --output_dir, gets each round's figures and table.md. `--device cuda`,
with the wall clock and the GPU's memory instead, has never run on a GPU.
"""
import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
try:
    import trl
    from trl import GRPOConfig, GRPOTrainer
except ImportError:
    sys.exit("bench_vs_trl.py needs trl==1.16.0, in a venv of its own: the head of this file says how")

import train_math
from gspo import gspo_loss
from plot import read

PROMPTS, GROUP, MINIBATCHES = {512: 16, 151936: 4}, 8, 4
END = 1
WORKLOADS = {"fixed": SimpleNamespace(prompt=(32, 32), length=64, end=0, tuned=4),  # tuned: TRL's micro-batches
             "natural": SimpleNamespace(prompt=(16, 48), length=128, end=1 / 32, tuned=8)}


def make_tokenizer(vocabulary):
    words = {f"w{i}": i for i in range(vocabulary)}
    core = Tokenizer(models.WordLevel(words, unk_token="w2"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", eos_token="w1", unk_token="w2")


def make_model(vocabulary, end, device):
    """Random weights, and a bias on the head that sets the probability of the end token, in every position."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, bos_token_id=None, eos_token_id=END,
        pad_token_id=0)).eval()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(vocabulary), requires_grad=False)
    model.lm_head.bias[END] = math.log(vocabulary * end / (1 - end)) if end else -1e4
    return model.to(device)


def make_questions(n, vocabulary, workload):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(workload.prompt[0], workload.prompt[1] + 1, (n,), generator=g).tolist()
    return [" ".join(f"w{i}" for i in torch.randint(3, vocabulary, (m,), generator=g).tolist()) for m in lengths]


def reward_of(workload):
    """fixed: any number from -1 to 1; natural: 1 for one response in five, whole groups of 0 among them."""
    def reward(prompts=None, completions=None, **kwargs):
        sums = [sum(int(word[1:]) for word in text.split()) for text in completions]
        return [float(total % 5 == 0) if workload.end else math.sin(total) for total in sums]
    return reward


class Turns(threading.Thread):
    """A training loop that runs on each call until it calls pause()."""

    def __init__(self, loop):
        super().__init__(daemon=True)
        self.loop, self.go, self.paused, self.error = loop, threading.Semaphore(0), threading.Semaphore(0), None
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
    name = "ours"

    def __init__(self, model, job):
        settings = train_math.Settings(
            device=job.device, group_size=GROUP, prompts_per_step=PROMPTS[job.vocabulary],
            minibatches=MINIBATCHES, micro_batch_tokens=job.rows * (job.prompt[1] + job.length), learning_rate=1e-6,
            max_completion_length=job.length, eps_low=3e-4, eps_high=4e-4, max_steps=job.rounds, format_weight=0.0)
        questions = [{"question": q, "answer": "#### 0"} for q in job.questions]
        self.play = Turns(lambda: train_math.train(settings, model, job.tokenizer, questions, []))

        def report(rows, s):
            self.row = rows[-1]
            if self.row["step"]:
                self.play.pause()

        train_math.report, train_math.save = report, lambda *args: None
        train_math.correctness_reward = lambda prompts, texts, answer: reward_of(job)(completions=texts)

    def phases(self):
        return {"rollout": self.row["seconds_rollout"], "old log-probs": self.row["seconds_old_log_probs"]}

    def length(self):
        return self.row["response_length"]


class TRL(TrainerCallback):
    def __init__(self, name, model, job, parts=1, **options):
        self.name, self.seconds, self.turns = name, {}, Turns(lambda: self.trainer.train())
        config = GRPOConfig(
            importance_sampling_level="sequence", loss_type="grpo", scale_rewards="group", epsilon=3e-4,
            epsilon_high=4e-4, beta=0.0, num_iterations=1, temperature=1.0, top_p=1.0, top_k=0,
            per_device_train_batch_size=job.rows // parts, gradient_accumulation_steps=parts,
            steps_per_generation=MINIBATCHES * parts, num_generations=GROUP, max_completion_length=job.length,
            max_steps=MINIBATCHES * (job.rounds + 1), learning_rate=1e-6, adam_beta2=0.95, max_grad_norm=1.0,
            bf16=False, use_cpu=job.device == "cpu", report_to=[], save_strategy="no", disable_tqdm=True,
            logging_steps=10**6, shuffle_dataset=False, output_dir=tempfile.mkdtemp(), **options)
        self.trainer = GRPOTrainer(model, reward_of(job), config, Dataset.from_list(
            [{"prompt": q} for q in job.questions]), processing_class=job.tokenizer, callbacks=[self])
        self.clock("_generate_and_score_completions", "rollout and old")
        self.clock("_get_per_token_logps_and_entropies", "old log-probs", lambda: not torch.is_grad_enabled())

    def clock(self, method, phase, on=lambda: True):
        function = getattr(self.trainer, method)

        def clocked(*args, **kwargs):
            began = seconds()
            result = function(*args, **kwargs)
            if on():
                self.seconds[phase] = self.seconds.get(phase, 0) + seconds() - began
            return result
        setattr(self.trainer, method, clocked)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step and state.global_step % MINIBATCHES == 0:
            self.turns.pause()

    def play(self):
        self.seconds = {}
        self.turns()

    def phases(self):
        old = self.seconds["old log-probs"]
        return {"rollout": self.seconds["rollout and old"] - old, "old log-probs": old}

    def length(self):
        return self.trainer._metrics["train"]["completions/mean_length"][-1]


def seconds():
    """Now: this process's CPU seconds, so that other jobs on the machine do not count; with a GPU, the wall clock."""
    if not torch.cuda.is_initialized():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def memory(key):
    """VmRSS or VmHWM: the MB that this process (Linux), or with a GPU its tensors there, hold or held at most."""
    if torch.cuda.is_initialized():
        return {"VmRSS": torch.cuda.memory_allocated, "VmHWM": torch.cuda.max_memory_allocated}[key]() / 2**20
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def play(side):
    """One turn: seconds in all and by phase, and the peak of memory over what the process held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier turn freed goes back first
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    held, began = memory("VmRSS"), seconds()
    side.play()
    took, phases = seconds() - began, side.phases()
    return {"seconds": took, **phases, "update": took - sum(phases.values()), "peak_mb": memory("VmHWM") - held,
            "response_length": side.length()}


def same_maths(side, job):
    """Largest difference between our loss and gradient and TRL's, on a frozen rollout, after the policy moved."""
    model, prompts = side.trainer.model, [train_math.encode_prompt(job.tokenizer, q) for q in job.questions[:2]]
    torch.manual_seed(0)
    ends, advantages = torch.tensor([END], device=job.device), torch.randn(2 * GROUP).to(job.device)
    responses, _ = train_math.rollout(model, prompts, GROUP, job.length, 1.0, ends)
    asked = [p for p in prompts for _ in range(GROUP)]
    batch = train_math.micro_batch(asked, responses, job.device)

    def padded(rows, left, value):
        width = max(map(len, rows))
        return torch.tensor([[value] * (width - len(r)) * left + r + [value] * (width - len(r)) * (not left)
                             for r in rows], device=job.device)

    inputs = {"prompt_ids": padded(asked, True, 0), "prompt_mask": padded([[1] * len(p) for p in asked], True, 0),
              "completion_ids": padded(responses, False, 0), "advantages": advantages,
              "completion_mask": padded([[1] * len(r) for r in responses], False, 0)}
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    with torch.no_grad():
        old, _, _ = side.trainer._get_per_token_logps_and_entropies(model, ids, mask, max(map(len, responses)))
        old_log_probs = train_math.response_log_probs(model, batch, 1.0)
        kept = [p.clone() for p in model.parameters()]
        for p in model.parameters():  # the policy moves, and the ratios leave 1
            p.add_(torch.randn_like(p) * 2e-4 * p.requires_grad)
    side.trainer.current_gradient_accumulation_steps = 1
    log_probs = train_math.response_log_probs(model, batch, 1.0)
    losses = [gspo_loss(log_probs, old_log_probs, advantages, batch.mask),
              side.trainer._compute_loss(model, inputs | {"old_per_token_logps": old})]
    weights = [p for p in model.parameters() if p.requires_grad]
    ours, theirs = (torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]) for loss in losses)
    with torch.no_grad():
        for p, before in zip(model.parameters(), kept):
            p.copy_(before)
    print(f"one frozen rollout: loss {losses[0]:.6f}, TRL's {losses[1]:.6f}; gradients of norm {ours.norm():.4f} "
          f"differ by {(ours - theirs).norm() / ours.norm():.1e} of it")
    assert abs(losses[0] - losses[1]) < 1e-6 and (ours - theirs).norm() < 1e-4 * ours.norm(), "not the same maths"


def race(vocabulary, name, rounds, device, log):
    job = SimpleNamespace(**vars(WORKLOADS[name]), vocabulary=vocabulary, rounds=rounds, device=device)
    job.rows = PROMPTS[vocabulary] * GROUP // MINIBATCHES  # of a minibatch, one micro-batch on either side
    job.tokenizer = make_tokenizer(vocabulary)
    job.questions = make_questions(PROMPTS[vocabulary] * (rounds + 1), vocabulary, job)
    make = lambda: make_model(vocabulary, job.end, device)
    sides = [Ours(make(), job), TRL("TRL", make(), job), TRL(
        "TRL tuned", make(), job, gradient_checkpointing=False, parts=job.tuned if vocabulary > 10_000 else 1)]
    same_maths(sides[2], job)
    played = []
    for i in range(rounds):
        played.append({side.name: play(side) for side in sides})
        ours = played[-1]["ours"]
        row = {"vocabulary": vocabulary, "workload": name, "round": i, **played[-1]}
        print(json.dumps(row), file=log, flush=True)
        print(f"vocabulary {vocabulary}, {name}, round {i}{' (dropped)' if i == 0 else ''}: ours "
              f"{ours['seconds']:.2f} s; " + ", ".join(f"{side.name} {played[-1][side.name]['seconds']:.2f} s, ratio "
              f"{played[-1][side.name]['seconds'] / ours['seconds']:.2f}" for side in sides[1:]))


def summarise(rounds):
    """The ratios of each vocabulary, workload and rival, without the first rounds."""
    results = []
    for vocabulary, workload in dict.fromkeys((r["vocabulary"], r["workload"]) for r in rounds):
        played = [r for r in rounds if (r["vocabulary"], r["workload"]) == (vocabulary, workload) and r["round"]]
        for rival in ("TRL", "TRL tuned"):
            times = {key: ratio([r[rival][key] / r["ours"][key] for r in played])
                     for key in ("seconds", "rollout", "old log-probs", "update")}
            peaks = [round(statistics.median(r[side]["peak_mb"] for r in played)) for side in ("ours", rival)]
            results.append({"vocabulary": vocabulary, "workload": workload, "rival": rival, **times, "peak_mb": peaks})
    return results


def ratio(values):
    return {"median": round(statistics.median(values), 2), "range": [round(min(values), 2), round(max(values), 2)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=6, help="the first is dropped")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "results" / "bench_vs_trl")
    a = parser.parse_args()
    if a.rounds < 2:
        parser.error("--rounds must be at least 2, as the first is dropped")
    torch.set_num_threads(1)
    train_math.time = SimpleNamespace(perf_counter=seconds)
    a.output_dir.mkdir(parents=True, exist_ok=True)
    with open(a.output_dir / "rounds.jsonl", "w", encoding="utf-8") as log:
        for vocabulary in a.vocabulary:
            for name in a.workload:
                race(vocabulary, name, a.rounds, a.device, log)
    results = summarise(read(a.output_dir / "rounds.jsonl"))
    show = lambda r: f"{r['median']:.2f} ({r['range'][0]:.2f} to {r['range'][1]:.2f})"
    keys = "seconds", "rollout", "old log-probs", "update"
    lines = ["Times, TRL / ours: the median of the rounds (their range)\n",
             "| vocabulary | workload | against | step | rollout | old log-probs | update | peak memory, ours : TRL |",
             "|---|---|---|---|---|---|---|---|"]
    lines += [" | ".join([f"| {r['vocabulary']:,}", r["workload"], r["rival"], *(show(r[key]) for key in keys),
                          "{} : {} MB |".format(*r["peak_mb"])]) for r in results]
    (a.output_dir / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(json.dumps({"trl": trl.__version__, "torch": torch.__version__, "ratios": results}))


if __name__ == "__main__":
    main()
