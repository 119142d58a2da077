"""GSPO from the first line to the last, in one file: python -m lesson.loop

A tiny model learns word problems in about a minute on a CPU. The algorithm is `train_step`. For a
task of your own, copy this file beside gspo.py, and change the four lines marked "yours".
"""
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

from gspo import group_advantages, gspo_loss, token_log_probs

WORLD = Path(__file__).parent / "world"
MODEL = WORLD / "model"  # yours: a folder, or a name on the Hugging Face hub
ROWS = [json.loads(line) for line in open(WORLD / "questions" / "train.jsonl")]  # yours
LEARNING_RATE = 4.5e-4  # yours: 2e-5 for 135 million parameters, 1e-6 for 500 million
EPS_LOW, EPS_HIGH = 0.01, 0.0133  # the clip range; the paper's, for large models: 3e-4, 4e-4
QUESTIONS = 16  # in each step
GROUP_SIZE = 16  # responses to each question
MAX_TOKENS = 128  # in a response
MINIBATCHES = 4  # updates in each step


def reward(response, answer):
    return float(response.endswith(answer))  # yours: here, an answer is a text like "#### 7"


def sample(model, tokenizer, questions):
    """ids (B, L): each prompt with its response, padded on the right. mask (B, L - 1): 1 where
    ids[:, 1:] is a token of the response, the end token included. texts: the responses."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**prompts, max_new_tokens=MAX_TOKENS)
    is_prompt = prompts.attention_mask.bool()
    responses = ids[:, is_prompt.size(1):]
    end_ids = torch.tensor(model.generation_config.eos_token_id)
    is_end = torch.isin(responses, end_ids).long()
    is_response = is_end.cumsum(1) - is_end == 0  # up to the first end token
    is_token = torch.cat([is_prompt, is_response], 1)
    mask = torch.cat([torch.zeros_like(is_prompt), is_response], 1)
    order = is_token.int().argsort(dim=1, descending=True, stable=True)  # moves padding to the end
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return ids.gather(1, order), mask.gather(1, order)[:, 1:], texts


def log_probs_of(model, ids):
    """The log-probs (B, L - 1) of ids[:, 1:]: position t predicts t + 1, and sees no padding."""
    return token_log_probs(model(ids).logits[:, :-1], ids[:, 1:])


def train_step(model, tokenizer, optimizer, rows):
    # 1 SAMPLE a group of responses to each question.
    rows = [row for row in rows for _ in range(GROUP_SIZE)]
    ids, mask, texts = sample(model, tokenizer, [row["question"] for row in rows])
    # 2 SCORE the responses, and compare each reward with the others of its group.
    rewards = torch.tensor([reward(text, row["answer"]) for text, row in zip(texts, rows)])
    advantages = group_advantages(rewards, GROUP_SIZE)
    # 3 REMEMBER the log-probs under the weights that sampled.
    minibatches = torch.arange(len(ids)).chunk(MINIBATCHES)
    with torch.no_grad():
        old_log_probs = [log_probs_of(model, ids[batch]) for batch in minibatches]
    # 4 UPDATE on each minibatch. In the first update, all importance ratios are still 1.
    for batch, old in zip(minibatches, old_log_probs):
        new = log_probs_of(model, ids[batch])
        loss = gspo_loss(new, old, advantages[batch], mask[batch], EPS_LOW, EPS_HIGH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return rewards.mean()


def main():
    set_seed(0)  # of random and of torch
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)  # without dropout
    end_ids = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(  # penalties or top_p would change the policy
        do_sample=True, top_k=0, eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0)
    for step in range(1, 9):
        value = train_step(model, tokenizer, optimizer, random.sample(ROWS, QUESTIONS))
        print(f"step {step}: reward {value:.2f}")


if __name__ == "__main__":
    main()
