"""The trial of train_math.py: a model and the parts of a step, before the long work begins.

A new check of a model goes into check_prompts or check_log_probs.
"""
import itertools
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from support.models import check_weights_can_be_trained
from support.program import tried
from support.rewards import score_rollout

UNSUPPORTED = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def try_parts(model, tokenizer, questions, cfg, parts, algorithm, micro_batch):
    """Try each part of a step with two responses of eight tokens, before the long work begins.

    parts, algorithm, micro_batch: Parts, the Algorithm and MicroBatch of train_math. ValueError: a
    part cannot be used. RewardError: as in score. The error has a note that says what was tried."""
    model.eval()
    parts = parts.completed(algorithm)
    short = replace(cfg, max_completion_length=8, group_size=2, minibatches=1)
    with tried("encode_prompts"):
        check_weights_can_be_trained(model)
        prompts = parts.encode_prompts(tokenizer, questions, cfg)
        longest = check_prompts(model, prompts, questions, cfg.max_completion_length)
    tqdm.write(f"a complete prompt: {tokenizer.decode(prompts[0])!r}")
    two = [questions[0] | {"question": "?"}, questions[longest]]  # prompts of different lengths
    with tried("sample"):
        rollout = parts.sample(model, tokenizer, two, 1, 0.0, short, **vars(parts))
    with tried("response_log_probs"), torch.no_grad():
        batch = micro_batch(rollout.prompts, rollout.responses, [0, 1], model.device)
        log_probs = parts.response_log_probs(model, batch, 1.0)
        default = type(parts)
        is_own = parts.rollout is default.rollout and parts.sample is default.sample
        # An engine of the user may compute in half precision.
        check_log_probs(log_probs, rollout.log_probs, 1e-3 if is_own else 1.0)
    with tried("the reward"):
        rewards, _ = score_rollout(parts.reward, [questions[0]] * 2, rollout, short)
    with tried("group_advantages"):
        advantages = parts.group_advantages(rewards, 2)
        if len(advantages) != 2:
            raise ValueError(f"two responses have advantages of shape {tuple(advantages.shape)}")
    with tried("build_minibatches"):
        minibatches = parts.build_minibatches(
            rollout.prompts, rollout.responses, torch.ones_like(advantages), short)
    with tried("the loss"):
        for batch in itertools.chain(*minibatches):
            log_probs = parts.response_log_probs(model, batch, 1.0)
            more = {"batch": batch, "cfg": short} if algorithm.needs_batch else {}
            loss = parts.loss(log_probs, log_probs.detach(), batch.advantages, batch.mask,
                              *cfg.clip_range(), denominator=2, **more)
            if loss.shape != () or not loss.requires_grad:
                raise ValueError(f"it must be one number with a gradient, not {loss!r:.100}")


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


def check_log_probs(log_probs, sampled, tolerance):
    """ValueError: the log-probs (b, L - 1) of some short responses are not those of the sampler."""
    gap = (log_probs.sum(1) - sampled.sum(1)).abs().max().item()
    if not gap < tolerance:
        raise ValueError(f"the log-probs of eight sampled tokens differ by {gap:.2g} between "
                         "sampling and the full forward pass: its cache, padding or head is "
                         "unsupported")
