"""How train_math.py samples responses, and the log-probs of their tokens.

`rollout` chooses one of two samplers, which draw from the same distribution: read dynamic_rollout
first; static_rollout is the faster one on CUDA. A sampler of your own is a function with the
arguments and the results of `rollout`. Pass it as train_math.main(rollout=my_rollout).
"""
import copy

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer


def end_tokens(model, tokenizer):
    """The ids (n,) of the tokens that end a response; a model can have several. ValueError: it has
    none."""
    ids = model.generation_config.eos_token_id
    if not isinstance(ids, list):
        ids = [ids]
    ids = {tokenizer.eos_token_id, *ids} - {None}
    if not ids:
        raise ValueError("neither the tokenizer nor the model has an end token")
    return torch.tensor(sorted(ids), device=model.device)


def rollout(model, prompts, group_size, max_length, temperature, end_ids):
    """Sample `group_size` responses to each prompt at `temperature` (0: greedy).

    prompts: lists of token ids; end_ids (n,): the ids that end a response. Returns the B responses,
    group by group, as lists of token ids with the end token, and their log-probs (B, max_length),
    0 after the end. (model.generate would apply the top_k and top_p of the checkpoint. Then the
    responses would not come from the policy whose log-probs the update computes.)"""
    length = max(map(len, prompts)) + max_length
    arguments = prompts, group_size, max_length, temperature, end_ids
    if model.device.type != "cuda" or not cache_can_be_static(model, length):
        return dynamic_rollout(model, *arguments)
    if temperature == 0:  # accuracies are computed from greedy responses: these are in float32
        return static_rollout(model, *arguments)
    for dtype in PRECISIONS:
        sampler = copy_in(model, dtype)
        if can_sample(sampler, model, max(prompts, key=len)):
            responses, log_probs = static_rollout(sampler, *arguments)
            if log_probs.isfinite().all():
                return responses, log_probs
        tqdm.write(f"note: this model cannot sample in {dtype}, which is too coarse or overflows")
    raise FloatingPointError("the logits of the model are not finite")


# ---- the precision of the sampler ----------------------------------------------------------------

# Responses to train on are sampled with a 16-bit copy of the weights, which takes less than half of
# the time (measured in bf16). The ratios stay exact, because the old log-probs come from the
# forward pass of the update. But the responses come from a slightly different policy, as with any
# inference engine, and the metric sampler_gap measures how different.
# In bf16, numbers near 0.02 are 1.2e-4 apart, and a step at a learning rate of 1e-6 changes a
# weight by 2e-6. Most weights of such a copy stay the same, so that it samples from an older policy
# (experiments/precision.md). float16 has eight times as many numbers there, but it ends at 65,504,
# so that large activations overflow.
PRECISIONS = torch.float16, torch.bfloat16, torch.float32  # in the order in which they are tried


def copy_in(model, dtype):
    """A copy of the model with its float32 parameters in `dtype`."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():  # but not the buffers: positions need float32
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def can_sample(sampler, model, prompt):
    """Whether the sampler and the model give each token nearly the same probability, at the end of
    this prompt (token ids): the largest difference is below 0.1."""
    ids = torch.tensor([prompt], device=model.device)
    probs = []
    for each in sampler, model:
        logits = each(input_ids=ids, use_cache=False, logits_to_keep=16).logits
        probs.append(logits.float().softmax(-1))
    difference = (probs[0] - probs[1]).abs().max()
    return bool(difference < 0.1)  # False if it is NaN


# ---- one token -----------------------------------------------------------------------------------


@torch.no_grad()
def next_logits(model, cache, ids, mask, positions):
    """The logits (n, V) of the token after ids (n, L), whose keys and values go into the cache."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def next_tokens(logits, temperature):
    """(tokens (n, 1), their log-probs (n, 1)), drawn at this temperature or, at 0, greedy."""
    probs = torch.softmax(logits.float() / (temperature or 1), dim=-1)
    if temperature:
        tokens = draw_tokens(probs)
    else:
        tokens = probs.argmax(-1, keepdim=True)
    return tokens, probs.gather(1, tokens).log()


def draw_tokens(probs):
    """One token per row, (n, V) -> (n, 1): where the cumulative probability meets a random number.

    torch.multinomial draws V random numbers per row, which takes ten times as long on a CPU."""
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    uniform = 1 - torch.rand(len(probs), 1, device=probs.device)  # in (0, 1]: never a probability 0
    tokens = torch.searchsorted(cumulative, uniform * total)
    return tokens.clamp(max=probs.shape[-1] - 1)  # a row of NaN: `rollout` sees its log-probs


def prefill(model, cache, prompts, group_size):
    """Read each prompt once, and then copy its keys and values for each response of its group.

    Returns the logits (B, V) of the first tokens, and the mask (B, L) of the prompts, which are
    padded on the left so that all responses start in the same column."""
    ids = []
    for prompt in prompts:
        ids.append(torch.tensor(prompt, device=model.device))
    ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left")
    mask = (ids >= 0).long()
    ids = ids.clamp(min=0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = next_logits(model, cache, ids, mask, positions)
    copies = torch.arange(len(prompts), device=ids.device)
    copies = copies.repeat_interleave(group_size)
    cache.reorder_cache(copies)
    return logits[copies], mask[copies]


# ---- the two samplers ----------------------------------------------------------------------------


def dynamic_rollout(model, prompts, group_size, max_length, temperature, end_ids):
    """`rollout` for CPUs and models without a static cache: finished responses leave the batch."""
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
        if len(kept) < len(unfinished):
            unfinished = unfinished[kept]
            ids = ids[kept]
            mask = mask[kept]
            cache.reorder_cache(kept)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = mask.sum(1, keepdim=True) - 1
        logits = next_logits(model, cache, ids, mask, positions)
    responses = [row[row >= 0].tolist() for row in tokens.cpu()]
    return responses, log_probs


def cache_can_be_static(model, length):
    """Whether `static_rollout` supports this model: only attention layers, with SDPA, no sliding
    window that is shorter than `length` tokens, and no mixture of experts."""
    has_experts = any(p.dim() == 3 for p in model.parameters())  # the CPU decides which ones run
    if has_experts or model.config._attn_implementation != "sdpa":
        return False
    if not getattr(model.get_decoder(), "_can_compile_fullgraph", False):
        return False
    kinds = StaticLayer, StaticSlidingWindowLayer
    layers = StaticCache(config=model.config, max_cache_len=length).layers
    return all(type(layer) in kinds and layer.max_cache_len == length for layer in layers)


def static_rollout(model, prompts, group_size, max_length, temperature, end_ids):
    """`rollout` for CUDA: fixed shapes, and one CUDA graph that samples a token of each response.

    Decoding one token launches hundreds of small kernels. Launching them from Python takes longer
    than running them. A CUDA graph records the kernels once, and then launches all of them with one
    call. This call repeats the same work on the same memory. Therefore no tensor may change its
    shape or its place. The cache has room for all tokens from the beginning. Finished responses
    stay in the batch, and what follows their end is removed afterwards. The number of sampled
    tokens, t, is a tensor on the GPU."""
    width = max(map(len, prompts))
    cache = StaticCache(config=model.config, max_cache_len=width + max_length)
    logits, mask = prefill(model, cache, prompts, group_size)
    not_padding = torch.nn.functional.pad(mask.bool(), (0, max_length), value=True)
    not_padding = not_padding[:, None, None]
    columns = torch.arange(width + max_length, device=mask.device)
    t = torch.zeros(1, dtype=torch.long, device=mask.device)  # tokens sampled so far
    tokens = torch.zeros(len(mask), max_length, dtype=torch.long, device=mask.device)
    log_probs = torch.zeros(len(mask), max_length, device=mask.device)

    def draw(logits):
        drawn, drawn_log_probs = next_tokens(logits, temperature)
        tokens.index_copy_(1, t, drawn)
        log_probs.index_copy_(1, t, drawn_log_probs)
        t.add_(1)

    def decode():
        last = tokens.index_select(1, t - 1)
        visible = not_padding & (columns < width + t)  # (B, 1, 1, columns of the cache)
        positions = mask.sum(1, keepdim=True) + t - 1
        logits = next_logits(model, cache, last, visible, positions)
        draw(logits)

    draw(logits)
    for done in tqdm(range(1, max_length), "sampling, tokens", leave=False, delay=1):
        # To ask whether all responses have ended, the CPU must wait for the GPU.
        if done % 16 == 0 and torch.isin(tokens[:, :done], end_ids).any(1).all():
            break
        if done == 1 and mask.is_cuda:
            decode = run_and_capture(decode)
        else:
            decode()
    ended = torch.isin(tokens, end_ids).long()
    is_kept = ended.cumsum(1) - ended == 0
    responses = [row[kept].tolist() for row, kept in zip(tokens.cpu(), is_kept.cpu())]
    return responses, log_probs.masked_fill(~is_kept, 0)


def run_and_capture(decode):
    """Run `decode` once, record it in a CUDA graph, and return the function that replays it."""
    stream = torch.cuda.Stream()  # the first run is on a stream of its own, as PyTorch requires
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            decode()  # is recorded and not run
    except RuntimeError:  # some models wait for the CPU in between
        return decode
    return graph.replay
