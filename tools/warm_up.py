"""Supervised training before RL. RL can only strengthen responses that the model sometimes samples.

    python -m tools.warm_up --steps 30 --model FOLDER_OR_HUB_ID \\
        --dataset FILE_OR_HUB_ID --output_dir FOLDER

This trains a model for `steps` batches on the solutions of the dataset, so that its responses have
their format, '... #### 42', which the reward of train_math.py accepts. FOLDER can then be the
--model of train_math.py.
"""
import argparse
import os
import random
import re
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import train_math
from tools.logs import make_writable

CHARACTERS = "\n #*+-.,=?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

def solution(answer):
    """A dataset's answer as a response that the reward accepts: without GSM8K's calculator marks
    <<...>>, and with '#### ' before a plain number."""
    text = re.sub(r"<<[^>]*>>", "", str(answer))
    if train_math.extract_answer(text) is None:
        text = f"#### {text}"
    return text


def given_rollout(prompts, responses):
    """A Rollout of given responses, one to each prompt. Nobody has sampled them: log_probs is 0."""
    is_sampled = [[True] * len(response) for response in responses]
    log_probs = torch.zeros(len(responses), max(map(len, responses)))
    return train_math.Rollout(None, prompts, responses, log_probs, None, is_sampled)


def supervise(model, tokenizer, draw_row, steps, batch_size, learning_rate, name, instruction="",
              at_once=None):
    """Trains the model for `steps` supervised batches.

    draw_row() returns a row with a "question" and an "answer". `at_once` rows of a batch go through
    the model together (default: all), which determines the memory. `name` labels the progress bar.
    """
    cfg = train_math.Settings(instruction=instruction)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0, fused=True)
    at_once = at_once or batch_size
    bar = tqdm(range(steps), desc=name, leave=False)
    for step in bar:
        warm_up = min(1, (step + 1) / 20)
        optimizer.param_groups[0]["lr"] = learning_rate * warm_up * (1 - 0.9 * step / steps)
        rows = [draw_row() for _ in range(batch_size)]
        prompts = train_math.encode_prompts(tokenizer, rows, cfg)
        answers = [tokenizer(solution(row["answer"]), add_special_tokens=False).input_ids
                   + [tokenizer.eos_token_id] for row in rows]
        tokens = sum(map(len, answers))
        rollout = given_rollout(prompts, answers)
        advantages = torch.ones(batch_size)  # are not used
        total = 0.0
        for i in range(0, batch_size, at_once):
            some = range(i, min(i + at_once, batch_size))
            batch = train_math.MicroBatch(rollout, advantages, some, model.device)
            loss = -train_math.response_log_probs(model, batch, 1.0).sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{total:.3f}")


# ---- a tiny model --------------------------------------------------------------------------------

# The model of the lesson and of many experiments: a Qwen3 with 100,000 parameters, whose tokens are
# single characters.


def tiny_tokenizer(characters=CHARACTERS):
    """A tokenizer with one token per character. Its chat template keeps only the first line of the
    question."""
    ids = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", *characters])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
        chat_template=r"{{ messages[0].content.split('\n')[0] + '\n' }}")


def tiny_model(tokenizer, seed):
    """The model with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=True, initializer_range=0.05, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return Qwen3ForCausalLM(config).eval()


# ---- the command ---------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    defaults = train_math.Settings()
    parser.add_argument("--steps", type=int, required=True, help="supervised batches")
    parser.add_argument("--model", default=defaults.model, help="hub id or folder")
    parser.add_argument("--dataset", default=defaults.dataset, help="hub id, folder or .jsonl")
    parser.add_argument("--output_dir", type=Path, required=True, help="a new folder for the model")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--instruction", default=defaults.instruction, help="as for train_math.py")
    args = parser.parse_args(argv)
    if min(args.steps, args.batch_size, args.learning_rate) <= 0:
        parser.error("--steps, --batch_size and --learning_rate must be above 0")
    if args.output_dir.exists():
        parser.error(f"--output_dir {args.output_dir} exists already: choose a new folder")
    make_writable(args.output_dir)
    with train_math.exits_with(f"--dataset {args.dataset}"):
        # With the largest eval_size, no question that train_math.py may hold out is trained on.
        cfg = train_math.Settings(dataset=args.dataset, eval_size=2**31 - 1)
        questions, _ = train_math.load_questions(cfg)
    with train_math.exits_with(f"--model {args.model}, --device {args.device}"):
        model, tokenizer = train_math.load(args.model, args.device)
    rng = random.Random(args.seed)

    def draw_row():
        return rng.choice(questions)

    supervise(model, tokenizer, draw_row, args.steps, args.batch_size, args.learning_rate,
              "warm-up", args.instruction, at_once=2)
    aside = args.output_dir.with_name(args.output_dir.name + ".partial")
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    os.rename(aside, args.output_dir)
    print(f"The model is in {args.output_dir}. Train it further with: python train_math.py "
          f"--model {args.output_dir} --dataset {args.dataset}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped: nothing was saved, because the model is saved only at the end")
