"""How train_math.py samples responses: dynamic_rollout on CPUs, static_rollout on CUDA."""
import copy
import functools

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import DynamicCache, StaticCache

from support.models import note
from support.task import Refused

TRIED = {"llama", "qwen2", "qwen3"}  # the model types that static_rollout was tried with
side_stream = functools.cache(lambda: torch.cuda.Stream())  # cuBLAS keeps memory for each one


def generate(model, prompts, group_size, max_length, temperature, end_ids):
    """dynamic_rollout, or on CUDA the faster static_rollout. Responses to train on come from a
    float16 copy of the weights: a slightly different policy, in less than half of the time."""
    arguments = prompts, group_size, max_length, temperature, end_ids
    kind = model.config.model_type
    if model.device.type != "cuda":
        return dynamic_rollout(model, *arguments)
    if kind not in TRIED:
        note(f"sampling without a CUDA graph, about three times as slow, because {kind} was not "
             f"tried. To try it: support.sampling.TRIED.add({kind!r})")
        return dynamic_rollout(model, *arguments)
    torch.cuda.set_device(model.device)  # a CUDA graph records only the current device
    if temperature > 0:
        model = copy.deepcopy(model)
        for parameter in model.parameters():  # but not the buffers: positions need float32
            parameter.data = parameter.data.half()
    responses, log_probs = static_rollout(model, *arguments)
    if not log_probs.isfinite().all():
        raise FloatingPointError("log-probs are NaN. Try main(generate=train_math.dynamic_rollout)")
    return responses, log_probs


def end_tokens(model, tokenizer):
    """The ids (n,) of the tokens that end a response, often several."""
    ids = model.generation_config.eos_token_id
    if not isinstance(ids, list):
        ids = [ids]
    ids = {tokenizer.eos_token_id, *ids}
    ids.discard(None)
    return torch.tensor(sorted(ids), device=model.device)


def check_rollout(rollout, expected):
    """Refused: this Rollout does not have an entry for each expected response in each field."""
    for name, entries in vars(rollout).items():
        if len(entries) != expected:
            raise Refused(f"the sampler returned {len(entries)} {name} instead of {expected}")


@torch.no_grad()
def next_logits(model, cache, ids, mask, positions):
    """The logits (n, V) of the token after ids (n, L), whose keys and values go into the cache."""
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache,
                   use_cache=True, logits_to_keep=1)
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
    """Sample `group_size` responses to each prompt at `temperature` (0: greedy). prompts: lists of
    token ids; end_ids (n,): the ids that end a response. Returns the B responses, group by group,
    as lists of token ids with the end token, and their log-probs (B, max_length), 0 after the end
    (at temperature 0, those of temperature 1). A sampler of your own may return a third list,
    Rollout.is_sampled. (model.generate would apply the top_k and top_p of a checkpoint, and so
    sample from another policy than the one whose log-probs the update computes.)"""
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


def static_rollout(model, prompts, group_size, max_length, temperature, end_ids):
    """dynamic_rollout for CUDA: fixed shapes, and one CUDA graph that samples a token of each row.
    Decoding one token launches hundreds of small kernels, which takes longer than running them. A
    CUDA graph records the kernels once, and then launches all of them with one call, which repeats
    the same work on the same memory. So no tensor may change its shape or its place, finished
    responses stay in the batch until the end, and the number of sampled tokens, t, is a tensor."""
    width = max(map(len, prompts))
    cache = StaticCache(config=model.config, max_cache_len=width + max_length)
    logits, mask = prefill(model, cache, prompts, group_size)
    not_padding = pad(mask.bool(), (0, max_length), value=True)[:, None, None]
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
        draw(next_logits(model, cache, last, visible, positions))

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
    side = side_stream()  # the first run is on another stream, as PyTorch requires
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decode()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            decode()  # is recorded and not run
    except RuntimeError as error:
        raise Refused(f"this model cannot be recorded in a CUDA graph ({error!r:.200}). Use "
                      "main(generate=train_math.dynamic_rollout)") from error
    return graph.replay
