"""The models of train_math.py: loading, precision, and what fits into the memory of a GPU."""
import contextlib
import functools
import os
import shutil
from types import SimpleNamespace

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.task import Refused


def load(name, device):
    """(model, tokenizer) from a hub id or a folder, in float32. In bf16, most updates at a learning
    rate of 1e-6 would round to nothing. Refused: files lack weights, which would be random."""
    torch.set_float32_matmul_precision("highest")  # some Docker images switch TF32 on
    model, report = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, output_loading_info=True)
    if report["missing_keys"]:
        raise Refused(f"the files of {name} lack weights: {sorted(report['missing_keys'])[:3]}")
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name)


def adamw(model):
    """The optimizer of this model. train_step sets its learning rate. Refused: a weight is in half
    precision, which rounds most updates to nothing, and ratios by more than an update."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() < 4:
            raise Refused(f"{name} is in {parameter.dtype}. Load all weights in float32")
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)


def clip_gradients(model):
    """Scale the gradients to a norm of at most 1. Returns the norm before, which must be finite."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@contextlib.contextmanager
def tf32_matmuls():
    """TF32 for the matrix products of the backward pass, which makes them faster on CUDA. It
    changes a gradient by a relative error of about 1e-3. In the forward pass, it would change log s
    by 2e-4, almost as much as GSPO's clip range."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@functools.cache  # so that it is printed once, and not in each step
def note(text):
    tqdm.write(f"note: {text}")


def complete(cfg):
    """Fill in what depends on the machine: the device, micro_batch_tokens, and the absolute path of
    output_dir (a reward may change the directory). Refused: torch cannot use the NVIDIA GPU."""
    cfg.output_dir = cfg.output_dir and os.path.abspath(cfg.output_dir)
    has_cuda = torch.cuda.is_available()
    is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    if cfg.device is None and shutil.which("nvidia-smi") and not has_cuda and not is_hidden:
        raise Refused("torch cannot use the NVIDIA GPU. Reinstall torch from PyPI, which needs a "
                      "driver of 580 or newer. For an older driver or GPU, reinstall it from "
                      "https://download.pytorch.org/whl/cu126. Or train without it: --device cpu")
    cfg.device = cfg.device or ("cuda" if has_cuda else "cpu")
    if cfg.micro_batch_tokens is None and cfg.device != "cpu" and has_cuda:  # a first guess
        memory = torch.cuda.get_device_properties(cfg.device).total_memory / 2**30  # in GiB
        sizes = {44: 8192, 32: 4096, 22: 2048, 14: 1024, 0: 512}
        cfg.micro_batch_tokens = next(n for least, n in sizes.items() if memory >= least)
    cfg.micro_batch_tokens = cfg.micro_batch_tokens or 1024


def fit_micro_batch(model, prompts, cfg, response_log_probs):
    """On CUDA, halve cfg.micro_batch_tokens until an update fits into the memory if all prompts are
    as long as the longest of these, and all responses, too. Refused: not even one response fits."""
    length = max(map(len, prompts)) + cfg.max_completion_length
    while model.device.type == "cuda":
        n = max(1, cfg.micro_batch_tokens // length)
        ids = torch.zeros(n, length, dtype=torch.long, device=model.device)
        batch = SimpleNamespace(ids=ids, mask=ids[:, 1:] == 0, extra={})
        with contextlib.suppress(torch.OutOfMemoryError), tf32_matmuls():
            response_log_probs(model, batch, cfg.temperature).sum().backward()
            return model.zero_grad()
        model.zero_grad()
        torch.cuda.empty_cache()
        if n == 1:
            raise Refused(f"an update with one response of {length} tokens does not fit into the "
                          "memory. Use a lower --max_completion_length")
        cfg.micro_batch_tokens //= 2
        note(f"--micro_batch_tokens {cfg.micro_batch_tokens}, because more do not fit")
