"""The trial of train_math.py: a model and the parts of a step, before the long work begins.

A new check of a model goes into check_prompts or check_log_probs.
"""
from dataclasses import replace

import torch

from support.program import tried
from support.questions import score

UNSUPPORTED = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@torch.no_grad()
def try_parts(model, tokenizer, questions, cfg, parts, micro_batch):
    """Try prompts, sampler, log-probs and reward with two responses of eight tokens.

    parts, micro_batch: Parts(...) and MicroBatch of train_math. ValueError: the script cannot
    sample from the model or score what it sampled. RewardError: as in score. The error has a note
    that says which part was tried."""
    short = replace(cfg, max_completion_length=8)
    with tried("encode_prompts"):
        prompts = parts.encode_prompts(tokenizer, questions, cfg)
        longest = check_prompts(model, prompts, questions, cfg.max_completion_length)
    two = [questions[0] | {"question": "?"}, questions[longest]]  # prompts of different lengths
    with tried("the sampler"):
        rollout = parts.sample(model, tokenizer, two, 1, 0.0, short, **vars(parts))
    with tried("response_log_probs"):
        batch = micro_batch(rollout.prompts, rollout.responses, [0, 1], model.device)
        log_probs = parts.response_log_probs(model, batch, 1.0)
        check_log_probs(log_probs, rollout.log_probs)
    with tried("the reward"):
        score(parts.reward, [questions[0]] * 2, rollout.texts)


def check_prompts(model, prompts, questions, max_completion_length):
    """The index of the longest prompt. ValueError: the model cannot be trained on these prompts."""
    config = model.config.get_text_config()
    for name in UNSUPPORTED:
        if getattr(config, name, None) not in (None, 1):
            raise ValueError(f"the model scales or caps its logits ({name}), which is unsupported")
    if max(map(max, prompts)) >= model.get_input_embeddings().num_embeddings:
        raise ValueError("the tokenizer has tokens that the model lacks: they are not a pair")
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = len(prompts[longest]) + max_completion_length
    limit = getattr(config, "max_position_embeddings", length)
    if length > limit:
        raise ValueError(f"prompt and response need up to {length} tokens, but the model supports "
                         f"{limit}. The longest question is {questions[longest]['question']!r:.80}")
    return longest


def check_log_probs(log_probs, sampled):
    """ValueError: the log-probs (b, L - 1) of some short responses are not those of the sampler."""
    gap = (log_probs.sum(1) - sampled.sum(1)).abs().max().item()
    if not gap < 1e-3:
        raise ValueError(f"the log-probs of eight sampled tokens differ by {gap:.2g} between "
                         "sampling and the full forward pass: its cache, padding or head is "
                         "unsupported")
