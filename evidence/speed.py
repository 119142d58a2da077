"""Compares a step of train_math.py with one of TRL's GRPOTrainer in GSPO mode, on one CPU core.

    python3 -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0
    OMP_NUM_THREADS=1 .venv-trl/bin/python -m evidence.speed    # 45 minutes, Linux

The model is a Qwen3 of two layers with random weights in float32. Both sides use fused AdamW,
groups of 8, and 4 minibatches of one micro-batch. TRL runs with its defaults except for bfloat16,
and tuned: without gradient checkpointing and, with the large vocabulary, with several micro-batches
per minibatch, which are faster on this CPU. Times are CPU seconds of the process. The rounds are
written to runs/speed.jsonl. The published ones also have the times of the three phases of a step,
and the peak memory in a step without weights and AdamW's state, which are the same for all.
"""
import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

import train_math
from tools.logs import append, make_writable

LARGE = 151936  # words
PROMPTS = {512: 16, LARGE: 4}  # prompts per step
# The number of words, the hidden size (896 is that of Qwen2.5-0.5B) and the workload
JOBS = [(512, 64, "fixed"), (512, 64, "natural"), (LARGE, 64, "fixed"), (LARGE, 64, "natural"),
        (LARGE, 896, "fixed")]
GROUP = 8
MINIBATCHES = 4
END = 1  # the end token
ROUNDS = 4  # of which the first is not counted
LOG = Path("runs/speed.jsonl")
# Lengths of the prompts and of the responses; the probability that a response ends after a token;
# the number of micro-batches per minibatch of the tuned TRL. natural: one reward in five is 1.
WORKLOADS = {
    "fixed": SimpleNamespace(prompt=(32, 32), length=64, end=0, tuned=4),
    "natural": SimpleNamespace(prompt=(16, 48), length=128, end=1 / 32, tuned=8)}


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
    def reward(completions, **columns):
        sums = [sum(int(word[1:]) for word in text.split()) for text in completions]
        return [float(x % 5 == 0) if workload.end else math.sin(x) for x in sums]
    return reward


class Clock(TrainerCallback):
    """The CPU seconds of each step of one program, so that other jobs on the machine do not count.
    TRL calls it, too. A step is MINIBATCHES optimizer steps of TRL."""

    def __init__(self):
        self.times = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % MINIBATCHES == 0:
            self.times.append(-time.process_time())

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % MINIBATCHES == 0:
            self.times[-1] += time.process_time()


def our_steps(model, job):
    """What ROUNDS calls of train_math.train_step took."""
    times = []
    cfg = train_math.Settings(
        output_dir=None, device="cpu", instruction="", group_size=GROUP,
        prompts_per_step=job.prompts, minibatches=MINIBATCHES,
        micro_batch_tokens=job.rows * (job.prompt[1] + job.length), learning_rate=1e-6,
        max_completion_length=job.length, max_steps=ROUNDS)
    parts = train_math.Parts(reward=reward_of(job))
    optimizer = parts.make_optimizer(model)
    for i in range(ROUNDS):
        questions = [{"question": q} for q in job.questions[i * job.prompts:][:job.prompts]]
        began = time.process_time()
        train_math.train_step(model, job.tokenizer, optimizer, questions, i + 1, cfg, parts)
        times.append(time.process_time() - began)
    return times


def their_steps(model, job, parts=1, **options):
    """What as many steps of TRL took. parts: micro-batches per minibatch."""
    from trl import GRPOConfig, GRPOTrainer  # of another environment
    clock = Clock()
    config = GRPOConfig(
        importance_sampling_level="sequence", loss_type="grpo", scale_rewards="group",
        epsilon=3e-4, epsilon_high=4e-4, beta=0.0, num_iterations=1, temperature=1.0,
        per_device_train_batch_size=job.rows // parts,
        gradient_accumulation_steps=parts, steps_per_generation=MINIBATCHES * parts,
        num_generations=GROUP, max_completion_length=job.length,
        max_steps=MINIBATCHES * ROUNDS, learning_rate=1e-6, adam_beta2=0.95,
        max_grad_norm=1.0, bf16=False, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_steps=10**6, shuffle_dataset=False,
        output_dir=tempfile.mkdtemp(), **options)
    trainer = GRPOTrainer(
        model, reward_of(job), config, Dataset.from_list([{"prompt": q} for q in job.questions]),
        processing_class=job.tokenizer, callbacks=[clock])
    trainer.train()
    return clock.times


def race(vocabulary, hidden, name):
    """Appends a row for each round to the log."""
    job = SimpleNamespace(**vars(WORKLOADS[name]), prompts=PROMPTS[vocabulary])
    job.rows = job.prompts * GROUP // MINIBATCHES  # a minibatch's: one micro-batch
    job.tokenizer = make_tokenizer(vocabulary)
    job.questions = make_questions(job.prompts * ROUNDS, vocabulary, job)
    parts = job.tuned if vocabulary == LARGE else 1
    found = {}
    for side, steps_of, options in (
            ("ours", our_steps, {}), ("TRL", their_steps, {}),
            ("TRL tuned", their_steps, {"parts": parts, "gradient_checkpointing": False})):
        found[side] = steps_of(make_model(vocabulary, hidden, job.end), job, **options)
        seconds = statistics.median(found[side][1:])
        print(f"{vocabulary} words, hidden size {hidden}, {name}, {side}: {seconds:.2f} s a step")
    for i in range(ROUNDS):
        append(LOG, {"vocabulary": vocabulary, "hidden": hidden, "workload": name, "round": i,
                     **{side: {"seconds": times[i]} for side, times in found.items()}})


def main():
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)
    make_writable(LOG)
    for job in JOBS:
        race(*job)


if __name__ == "__main__":
    main()
