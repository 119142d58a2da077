"""The sampler for CUDA, and `generate`, which chooses a sampler. Read sampling.py first."""
import copy

import torch
from tqdm.auto import tqdm
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from support.models import note
from support.sampling import dynamic_rollout, next_logits, next_tokens, prefill


def generate(model, prompts, group_size, max_length, temperature, end_ids):
    """Sample with dynamic_rollout, which has the same arguments and results, or, on CUDA, with
    static_rollout and a 16-bit copy. FloatingPointError: on CUDA, the logits are not finite."""
    length = max(map(len, prompts)) + max_length
    arguments = prompts, group_size, max_length, temperature, end_ids
    if model.device.type != "cuda" or not cache_can_be_static(model, length):
        return dynamic_rollout(model, *arguments)
    torch.cuda.set_device(model.device)  # a CUDA graph records only the current device
    # Responses to train on are sampled in less than half of the time with a 16-bit copy of the
    # weights, which is a slightly different policy. bf16 keeps few of the changes of a step at
    # 1e-6, and float16 ends at 65,504.
    dtypes = vars(model).setdefault("sampling_dtypes", [torch.float16, torch.bfloat16])
    for dtype in [*dtypes, torch.float32] if temperature else [torch.float32]:
        sampler = model if dtype == torch.float32 else copy_in(model, dtype)
        if can_sample(sampler, model, max(prompts, key=len)):
            responses, log_probs = static_rollout(sampler, *arguments)
            if log_probs.isfinite().all():
                return responses, log_probs
        if dtype in dtypes:
            dtypes.remove(dtype)
            note(f"this model cannot sample in {dtype}, which is too coarse or overflows")
    raise FloatingPointError("the logits of the model are not finite")


def copy_in(model, dtype):
    """A copy of the model with its float32 parameters in `dtype`."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():  # but not the buffers: positions need float32
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def can_sample(sampler, model, prompt):
    """Whether the probabilities of both at the end of this prompt differ by less than 0.1."""
    ids = torch.tensor([prompt], device=model.device)
    probs = []
    for each in sampler, model:
        logits = each(input_ids=ids, use_cache=False, logits_to_keep=16).logits
        probs.append(logits.float().softmax(-1))
    difference = (probs[0] - probs[1]).abs().max()
    return bool(difference < 0.1)  # False if it is NaN


def cache_can_be_static(model, length):
    """Whether `static_rollout` supports this model: only attention layers, with SDPA, no sliding
    window that is shorter than `length` tokens, no mixture of experts, and no dynamic rope."""
    has_experts = any(p.dim() == 3 for p in model.parameters())  # the CPU decides which ones run
    has_dynamic_rope = "'dynamic'" in str(getattr(model.config, "rope_parameters", ""))
    is_capturable = getattr(model.get_decoder(), "_can_compile_fullgraph", False)
    has_sdpa = model.config._attn_implementation == "sdpa"
    if has_experts or has_dynamic_rope or not is_capturable or not has_sdpa:
        return False
    kinds = StaticLayer, StaticSlidingWindowLayer
    layers = StaticCache(config=model.config, max_cache_len=length).layers
    return all(type(layer) in kinds and layer.max_cache_len == length for layer in layers)


def static_rollout(model, prompts, group_size, max_length, temperature, end_ids):
    """dynamic_rollout for CUDA: fixed shapes, and one CUDA graph that samples a token of each row.

    Decoding one token launches hundreds of small kernels, which takes longer than running them. A
    CUDA graph records the kernels once, and then launches all of them with one call, which repeats
    the same work on the same memory. So no tensor may change its shape or its place, finished
    responses stay in the batch until the end, and the number of sampled tokens, t, is a tensor."""
    width = max(map(len, prompts))
    cache = StaticCache(config=model.config, max_cache_len=width + max_length)
    logits, mask = prefill(model, cache, prompts, group_size)
    not_padding = torch.nn.functional.pad(mask.bool(), (0, max_length), value=True)[:, None, None]
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
    """Run `decode` once, record it in a CUDA graph, and return the function that replays it, or
    `decode` if this fails. ValueError: after a CUDA error, torch may stay on the wrong stream."""
    stream = torch.cuda.Stream()  # the first run is on a stream of its own, as PyTorch requires
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            decode()  # is recorded and not run
    except RuntimeError as error:  # some models wait for the CPU in between
        if isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        if "CUDA error" in str(error):
            raise ValueError(f"this model cannot be recorded in a CUDA graph ({error!r:.200}). Use "
                             "main(generate=train_math.dynamic_rollout)") from None
        note(f"sampling without a CUDA graph, which is slow: {error!r:.200}")
        return decode
    return graph.replay
