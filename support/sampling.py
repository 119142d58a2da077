"""How train_math.py samples responses. dynamic_rollout is the sampler for CPUs.
cuda_sampling.py has a faster one for CUDA, and `generate`, which chooses. A sampler of your own,
for main(generate=f), is a function with the arguments and the results of dynamic_rollout."""
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import DynamicCache


def end_tokens(model, tokenizer):
    """The ids (n,) of the tokens that end a response, often several. ValueError: it has none."""
    ids = model.generation_config.eos_token_id
    if not isinstance(ids, list):
        ids = [ids]
    ids = {tokenizer.eos_token_id, *ids}
    ids.discard(None)
    if not ids:
        raise ValueError("neither the tokenizer nor the model has an end token")
    return torch.tensor(sorted(ids), device=model.device)


def check_rollout(rollout, questions, group_size):
    """ValueError: this is not a Rollout of `group_size` responses to each question, group by group.
    In an evaluation, where group_size is 1, the questions must be those that were asked."""
    counts = {name: len(values) for name, values in vars(rollout).items()}
    if set(counts.values()) != {len(questions) * group_size}:
        raise ValueError(f"the sampler must return {group_size} responses to each of "
                         f"{len(questions)} questions, but it returned {counts}")
    answered = [row["question"] for row in rollout.questions]
    if group_size == 1 and answered != [row["question"] for row in questions]:
        raise ValueError("in an evaluation, the sampler must answer the questions that it gets")
    width = rollout.log_probs.shape[1]
    for i, response in enumerate(rollout.responses):
        if rollout.prompts[i] != rollout.prompts[i - i % group_size]:
            raise ValueError("the sampler must return the responses to one prompt side by side")
        if not len(rollout.is_sampled[i]) == len(response) <= width:
            raise ValueError("each token of a response needs a value of is_sampled and log_probs")


@torch.no_grad()
def next_logits(model, cache, ids, mask, positions):
    """The logits (n, V) of the token after ids (n, L), whose keys and values go into the cache."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def next_tokens(logits, temperature):
    """(tokens (n, 1), their log-probs (n, 1)), drawn at this temperature or, at 0, greedy."""
    probs = torch.softmax(logits.float() / (temperature or 1), dim=-1)
    if temperature:  # on a CPU, torch.multinomial takes ten times as long as this
        cumulative = probs.cumsum(-1)
        uniform = 1 - torch.rand(len(probs), 1, device=probs.device)  # in (0, 1], so never p = 0
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])
        tokens = tokens.clamp(max=probs.shape[-1] - 1)  # for NaN: `generate` sees its log-probs
    else:
        tokens = probs.argmax(-1, keepdim=True)
    return tokens, probs.gather(1, tokens).log()


def prefill(model, cache, prompts, group_size):
    """Read each prompt once, and then copy its keys and values for each response of its group.

    Returns the logits (B, V) of the first tokens, and the mask (B, L) of the prompts, which are
    padded on the left so that all responses start in the same column."""
    ids = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left")
    mask = (ids >= 0).long()
    ids = ids.clamp(min=0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = next_logits(model, cache, ids, mask, positions)
    copies = torch.arange(len(prompts), device=ids.device).repeat_interleave(group_size)
    cache.reorder_cache(copies)
    return logits[copies], mask[copies]


def dynamic_rollout(model, prompts, group_size, max_length, temperature, end_ids):
    """Sample `group_size` responses to each prompt at `temperature` (0: greedy).

    prompts: lists of token ids; end_ids (n,): the ids that end a response. Returns the B responses,
    group by group, as lists of token ids with the end token, and their log-probs (B, max_length),
    0 after the end (at temperature 0, those of temperature 1). A sampler of your own may return a
    third list, Rollout.is_sampled. (model.generate would apply the top_k and top_p of a checkpoint.
    The responses would not come from the policy whose log-probs the update computes.)"""
    cache = DynamicCache(config=model.config)
    logits, mask = prefill(model, cache, prompts, group_size)
    unfinished = torch.arange(len(mask), device=mask.device)  # the response of each row
    tokens = torch.full((len(mask), max_length), -1, device=mask.device)
    log_probs = torch.zeros(len(mask), max_length, device=mask.device)
    for t in tqdm(range(max_length), "sampling, tokens", leave=False, delay=1):
        ids, drawn_log_probs = next_tokens(logits, temperature)
        tokens[unfinished, t] = ids[:, 0]
        log_probs[unfinished, t] = drawn_log_probs[:, 0]

        is_end = torch.isin(ids[:, 0], end_ids)
        kept = (~is_end).nonzero()[:, 0]
        if len(kept) == 0 or t + 1 == max_length:
            break
        if len(kept) < len(unfinished):  # finished responses leave the batch
            unfinished = unfinished[kept]
            ids = ids[kept]
            mask = mask[kept]
            cache.reorder_cache(kept)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = mask.sum(1, keepdim=True) - 1
        logits = next_logits(model, cache, ids, mask, positions)
    responses = [row[row >= 0].tolist() for row in tokens.cpu()]
    return responses, log_probs
