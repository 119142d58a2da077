"""Measures seconds and memory of a training step on one GPU, for several samplers and for TRL.

    python -m evidence.speed.gpu_speed --model FOLDER_OR_HUB_ID --dataset GSM8K [--variants ...]

Each variant trains for a few steps with the default settings, on the same questions. The first step
is a warm-up. Each step is printed as a line of JSON, and appended to gpu_speed.jsonl. The line has
the seconds and the peak memory of the rollout and of the rest of the step. The variant `trl` is
TRL's GRPOTrainer in GSPO mode, which needs `pip install trl`. It has one line per rollout with its
four updates.
"""
import argparse
import gc
import json
import time

import torch

import train_math

VARIANTS = {  # (what replaces the sampler, settings)
    "default": (None, {}),
    "8192 tokens per micro-batch": (None, {"micro_batch_tokens": 8192}),
    "float32 sampler": (train_math.static_rollout, {}),
    "dynamic sampler": (train_math.dynamic_rollout, {}),
}


def our_steps(args, sampler, changes):
    """The metrics of the steps. gib_rollout and gib_update are peaks of allocated memory in GiB."""
    flags = ["--model", args.model, "--dataset", args.dataset, "--output_dir", "-"]
    flags += ["--max_steps", str(args.steps), "--eval_size", "0"]
    for name, value in changes.items():
        flags += [f"--{name}", str(value)]
    cfg = train_math.parse_settings(flags)
    questions, _ = train_math.load_questions(cfg)
    model, tokenizer = train_math.load(cfg.model, cfg.device)
    parts = train_math.Parts()
    train_math.check_model(model, tokenizer, questions, cfg, parts, train_math.ALGORITHMS)
    cfg.output_dir = None
    peaks = []

    @torch.no_grad()
    def measured(*arguments):
        torch.cuda.reset_peak_memory_stats()
        sampled = (sampler or train_math.generate)(*arguments)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() / 2**30)
        torch.cuda.reset_peak_memory_stats()
        return sampled

    rows = []

    def note(row):
        if row["step"]:
            row = row | {"micro_batch_tokens": cfg.micro_batch_tokens, "gib_rollout": peaks[-1]}
            rows.append(row | {"gib_update": torch.cuda.max_memory_allocated() / 2**30})

    train_math.train(cfg, model, tokenizer, questions, on_step=note, generate=measured)
    return rows


def trl_steps(args):
    """The seconds of each rollout with its four updates, in TRL with the same batch size."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        times = []

        def on_step_end(self, *arguments, **more):
            torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    cfg = train_math.parse_settings(["--model", args.model, "--dataset", args.dataset])
    questions, _ = train_math.load_questions(cfg)
    rows = []
    for question in questions[:512]:
        content = f"{question['question']}\n{cfg.instruction}"
        rows.append(question | {"prompt": [{"role": "user", "content": content}]})

    def reward(prompts, completions, answer, **columns):
        return train_math.correctness_reward(prompts, completions, answer)

    config = GRPOConfig(
        output_dir="runs/trl", importance_sampling_level="sequence", loss_type="grpo",
        epsilon=3e-4, epsilon_high=4e-4, beta=0.0, num_generations=8,
        per_device_train_batch_size=16, gradient_accumulation_steps=4, steps_per_generation=16,
        max_completion_length=512, temperature=1.0, learning_rate=1e-6, max_steps=4 * args.steps,
        report_to=[], save_strategy="no", logging_steps=4, disable_tqdm=True)
    trainer = GRPOTrainer(model=args.model, args=config, reward_funcs=reward,
                          train_dataset=Dataset.from_list(rows), callbacks=[Clock()])
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    trainer.train()
    ends = [start, *Clock.times[3::4]]
    peak = torch.cuda.max_memory_allocated() / 2**30
    lengths = [log.get("completions/mean_length") for log in trainer.state.log_history]
    steps = []
    for before, after, length in zip(ends, ends[1:], lengths):
        steps.append({"seconds": after - before, "gib_update": peak, "response_length": length})
    return steps


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--dataset", default="openai/gsm8k", help="as for train_math.py")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, "trl"], default=[*VARIANTS])
    parser.add_argument("--steps", type=int, default=3, help="number of steps, with the warm-up")
    parser.add_argument("--output", default="gpu_speed.jsonl", help="log to which steps are added")
    args = parser.parse_args(argv)
    device = torch.cuda.get_device_name()
    for name in args.variants:
        rows = trl_steps(args) if name == "trl" else our_steps(args, *VARIANTS[name])
        with open(args.output, "a", encoding="utf-8") as file:
            for row in rows:
                line = json.dumps({"variant": name, "device": device, **row})
                print(line, flush=True)
                file.write(line + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
