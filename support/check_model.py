"""The trial of train_math.py: a model and the parts of a step, before the long work begins."""
import contextlib
import itertools
from dataclasses import replace

import torch

from support.cuda_sampling import generate
from support.models import check_trainable, show
from support.rewards import score_rollout
from support.sampling import check_rollout, end_tokens


def check_model(model, tokenizer, questions, cfg, parts, algorithms):
    """Try all that a step calls, apart from the optimizer and the metrics, on two short responses.

    ValueError: the model or a part cannot be used."""
    algorithm = algorithms[cfg.algorithm]
    model.eval()
    check_trainable(model)
    short = replace(cfg, max_completion_length=8, group_size=2, minibatches=1)
    two = [questions[0] | {"question": "?"}, questions[0]]  # prompts of different lengths
    with blames_model(parts):
        prompts = parts.encode_prompts(tokenizer, questions, cfg)
        check_prompts(model, prompts, cfg.max_completion_length)
        show(f"a complete prompt: {tokenizer.decode(prompts[0])!r}")
        rollout = parts.sample(model, tokenizer, two, 1, 0.0, short, parts)
    check_rollout(rollout, two, 1)
    if parts.encode_prompts is type(parts)().encode_prompts:
        check_template(model, tokenizer, rollout)
    rewards, _ = score_rollout(parts.reward, rollout, short)
    # The advantages of equal rewards would be 0, and leave nothing to try.
    advantages = torch.ones_like(algorithm.advantages(rewards, 2))
    for batch in itertools.chain(*parts.build_minibatches(rollout, advantages, short)):
        with blames_model(parts):
            log_probs = parts.response_log_probs(model, batch, 1.0)
        gap = ((log_probs - batch.sampler_log_probs) * batch.mask).sum(1).abs().max()
        if not gap < (1e-3 if parts.generate is generate else 1):  # engines may use bf16
            raise ValueError(f"the log-probs of eight sampled tokens differ by {gap:.2g} between "
                             "sampling and the full forward pass. The cause is the cache, padding "
                             "or head, autocast, or transformers below 5.24")
        if batch.old_log_probs is None:
            batch.old_log_probs = log_probs.detach()
        arguments = log_probs, batch.old_log_probs, batch.advantages, batch.mask, *cfg.clip_range()
        loss = algorithm.loss(*arguments, 2, **batch.extra)
        if loss.shape != () or not loss.requires_grad:
            raise ValueError(f"the loss must be one number with a gradient, not {loss!r:.100}")
        half = algorithm.loss(*arguments, 4, **batch.extra)
        # A loss with further arguments may have a denominator of its own.
        if not batch.extra and not torch.isclose(loss, 2 * half, rtol=1e-3):
            raise ValueError("the loss must be a sum over responses that is divided by "
                             "`denominator`, but with twice the denominator, it is not half")


@contextlib.contextmanager
def blames_model(parts):
    """ValueError: an error in this block, if no part but the reward is the user's."""
    try:
        yield
    except Exception as error:
        is_yours = parts != type(parts)(parts.reward)
        if is_yours or isinstance(error, (ValueError, torch.OutOfMemoryError)):
            raise
        raise ValueError(f"the model or its template is unsupported: {error!r:.300}") from None


def check_template(model, tokenizer, rollout):
    """A note if the token that ends a turn in the chat template does not end a response.

    ValueError: the prompts of two questions are equal."""
    first, last = (row["question"] for row in rollout.questions)
    if rollout.prompts[0] == rollout.prompts[1] and first != last:
        raise ValueError("the chat template drops the text of the question")
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "42"}]
    end = ""
    with contextlib.suppress(Exception):  # the template is only used for prompts
        end = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("42")[2].lstrip()
    for i in tokenizer(end, add_special_tokens=False).input_ids[:1]:
        if i in tokenizer.added_tokens_decoder and i not in end_tokens(model, tokenizer):
            show(f"note: the chat template ends a turn with {tokenizer.decode(i)!r}, which does "
                 f"not end a response. Add {i} to eos_token_id in generation_config.json")


def check_prompts(model, prompts, max_completion_length):
    """ValueError: the model cannot be trained on these prompts."""
    config = model.config.get_text_config()
    for name in "final_logit_softcapping", "logits_scaling", "logit_scale":
        if getattr(config, name, None) not in (None, 1):
            raise ValueError(f"the model scales or caps its logits ({name}), which is unsupported")
    if not all(prompts):
        raise ValueError("a prompt is empty: tokenizer files are missing, or its template is wrong")
    if max(map(max, prompts)) >= model.get_input_embeddings().num_embeddings:
        raise ValueError("the tokenizer has tokens that the model lacks: they are not a pair")
    length = max(map(len, prompts)) + max_completion_length
    limit = getattr(config, "max_position_embeddings", length)
    if length > limit:
        raise ValueError(f"the longest prompt and its response need up to {length} tokens, but the "
                         f"model supports {limit}")
