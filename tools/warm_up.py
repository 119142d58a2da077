"""Supervised training before RL, and the tiny model of the lesson and of many experiments.

RL can only strengthen responses that the model sometimes samples. For a model of your own, use the
program for supervised fine-tuning in guides/recipes.md.
"""
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import train_math

CHARACTERS = "\n #*+-.,=?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def given_rollout(prompts, responses):
    """A Rollout of given responses, one to each prompt. Nobody has sampled them: log_probs is 0."""
    is_sampled = [[True] * len(response) for response in responses]
    log_probs = torch.zeros(len(responses), max(map(len, responses)))
    return train_math.Rollout(None, prompts, responses, log_probs, None, is_sampled)


def supervise(model, tokenizer, draw_row, steps, batch_size, learning_rate, name):
    """Trains the model for `steps` supervised batches.

    draw_row() returns a row with a "question" and an "answer", which is the response to learn.
    `name` labels the progress bar."""
    cfg = train_math.Settings(instruction="")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0, fused=True)
    bar = tqdm(range(steps), desc=name, leave=False)
    for step in bar:
        warm_up = min(1, (step + 1) / 20)
        optimizer.param_groups[0]["lr"] = learning_rate * warm_up * (1 - 0.9 * step / steps)
        rows = [draw_row() for _ in range(batch_size)]
        prompts = train_math.encode_prompts(tokenizer, rows, cfg)
        answers = [tokenizer(row["answer"], add_special_tokens=False).input_ids
                   + [tokenizer.eos_token_id] for row in rows]
        rollout = given_rollout(prompts, answers)
        advantages = torch.ones(batch_size)  # are not used
        batch = train_math.MicroBatch(rollout, advantages, range(batch_size), model.device)
        log_probs = train_math.response_log_probs(model, batch, 1.0)
        loss = -log_probs.sum() / sum(map(len, answers))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")


# ---- a tiny model --------------------------------------------------------------------------------

# A Qwen3 with 100,000 parameters, whose tokens are single characters.


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
