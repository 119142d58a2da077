"""The models of train_math.py: loading, and the precision of their weights and products."""
import contextlib
import functools
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(name, device):
    """(model, tokenizer) from a hub id or a folder, in float32. In bf16, most updates at a learning
    rate of 1e-6 would round to nothing. ValueError: it has no model, or weights are missing or not
    finite."""
    torch.set_float32_matmul_precision("highest")  # some Docker images switch TF32 on
    folder = Path(name)
    files = folder / "config.json", folder / "adapter_config.json"
    is_path = folder.exists() or len(folder.parts) > 2 or str(name).startswith((".", "/", "~"))
    if is_path and not any(file.exists() for file in files):
        raise ValueError(f"there is no {files[0]}. A run has its model in RUN/model. If it was "
                         "killed, first repeat its command with --max_steps 1")
    model, report = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:  # they would be random
        raise ValueError(f"{len(missing)} weights are missing in its files, such as {missing[0]}")
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise ValueError("its weights are not finite")
    rope = getattr(model.config, "rope_parameters", None) or {}
    if "rope_theta" in rope:  # transformers 4 looks for it outside, and otherwise takes a default
        model.config.rope_theta = rope["rope_theta"]
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name)


def adamw(model):
    """The optimizer of this model. train_step sets its learning rate."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)


def clip_gradients(model):
    """Scale the gradients to a norm of at most 1. Returns their norm before."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def micro_batch_tokens(device):
    """What fits into the memory of this GPU with the default model; 1024 on CPUs."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return 1024
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30  # in GiB
    sizes = {44: 8192, 32: 4096, 22: 2048, 14: 1024, 0: 512}
    return next(tokens for least, tokens in sizes.items() if memory >= least)


@functools.cache  # so that it is printed once, and not in each step
def note(text):
    show(f"note: {text}")


def show(text):
    """Print beside the progress bars. A run goes on if its terminal has been closed."""
    with contextlib.suppress(OSError):
        tqdm.write(text)


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


def check_trainable(model):
    """ValueError: all weights are frozen, or some weights, frozen or not, are in half precision."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("all weights of the model are frozen, as those of a LoRA folder are")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() < 4:
            raise ValueError(f"{name} is in {parameter.dtype}, which rounds away most updates and "
                             "changes ratios by more than they do. Load all weights in float32")


def check_finite(model, grad_norms, step):
    """FloatingPointError: the gradients of this step or the weights after it are not finite."""
    tensors = [torch.tensor(grad_norms), *model.parameters()]
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise FloatingPointError(f"step {step}: the loss or the weights are not finite. Use a lower"
                                 " --learning_rate and another --output_dir")
