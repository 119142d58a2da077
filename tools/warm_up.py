"""Supervised training before RL, which can only strengthen responses that the model samples.

    python -m tools.warm_up solutions.csv --model HuggingFaceTB/SmolLM2-135M-Instruct
                            --instruction "Answer with the sum only." --output_dir runs/warm

The file has a question and an answer in each row. The answer is the whole response that the model
shall learn, such as a worked solution. runs/warm/model is the model after training. To go on with
RL, pass it to train_math.py as --model, with the same instruction.
"""
import argparse
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import train_math
from support.models import load
from support.task import load_rows
from tools.logs import make_writable

CHARACTERS = "\n #*+-.,=?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def given_rollout(prompts, responses):
    """A Rollout of given responses, one to each prompt. Nobody has sampled them: log_probs is 0."""
    is_sampled = [[True] * len(response) for response in responses]
    log_probs = torch.zeros(len(responses), max(map(len, responses)))
    return train_math.Rollout(None, prompts, responses, log_probs, None, is_sampled)


def supervised_loss(model, tokenizer, rows, cfg):
    """The mean negative log-prob of the answers' tokens, their end tokens included."""
    prompts = train_math.encode_prompts(tokenizer, rows, cfg)
    answers = []
    for row in rows:
        ids = tokenizer(str(row["answer"]), add_special_tokens=False).input_ids
        answers.append(ids + [tokenizer.eos_token_id])
    rollout = given_rollout(prompts, answers)
    advantages = torch.ones(len(rows))  # are not used
    batch = train_math.MicroBatch(rollout, advantages, range(len(rows)), model.device)
    log_probs = train_math.response_log_probs(model, batch, 1.0)
    return -log_probs.sum() / sum(map(len, answers))


def supervise(model, tokenizer, draw_row, steps, batch_size, learning_rate, name):
    """Trains a tiny model on batches of rows, which draw_row() returns. name: of the bar."""
    cfg = train_math.Settings(instruction="")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0, fused=True)
    bar = tqdm(range(steps), desc=name, leave=False)
    for step in bar:
        warm_up = min(1, (step + 1) / 20)
        optimizer.param_groups[0]["lr"] = learning_rate * warm_up * (1 - 0.9 * step / steps)
        loss = supervised_loss(model, tokenizer, [draw_row() for _ in range(batch_size)], cfg)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help=".csv, .json or .jsonl")
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--instruction", required=True, help="text after each question")
    parser.add_argument("--output_dir", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--device", help="cuda or cpu; default: cuda if there is a GPU")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the file")
    parser.add_argument("--learning_rate", type=float, default=1e-5, help="of AdamW")
    args = parser.parse_args(argv)
    rows = load_rows(args.file)
    for i, row in enumerate(rows or [{}], 1):
        for name in "question", "answer":
            if row.get(name) is None or not str(row[name]).strip():
                parser.error(f"row {i} of {args.file} has no {name}: {row}")
    if args.output_dir.is_dir() and any(args.output_dir.iterdir()):
        parser.error(f"{args.output_dir} is not empty. Choose another --output_dir")
    make_writable(args.output_dir / "model")
    cfg = train_math.Settings(instruction=args.instruction, device=args.device)
    model, tokenizer = load(args.model, cfg.device)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
    rng = random.Random(0)
    for epoch in range(1, args.epochs + 1):
        total = 0
        for row in tqdm(rng.sample(rows, len(rows)), f"epoch {epoch}", leave=False):
            loss = supervised_loss(model, tokenizer, [row], cfg)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(rows):.3f}")
    for part in model, tokenizer:
        part.save_pretrained(args.output_dir / "model")


# ---- a tiny model: a Qwen3 with 100,000 parameters, whose tokens are single characters -----------


def tiny_tokenizer(characters=CHARACTERS):
    """One token per character. The chat template keeps only the first line of the question."""
    ids = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", *characters])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
        chat_template=r"{{ messages[0].content.split('\n')[0] + '\n' }}")


def tiny_model(tokenizer, seed):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=True, initializer_range=0.05, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return Qwen3ForCausalLM(config).eval()


if __name__ == "__main__":
    main()
