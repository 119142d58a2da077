"""The models of train_math.py: loading, and the precision of their weights and products."""
import contextlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(name, device):
    """(model, tokenizer) from a hub id or a folder, in float32. In bf16, most updates at a learning
    rate of 1e-6 would round to nothing."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name)


def adamw(model):
    """The optimizer of this model. train_step sets its learning rate. ValueError: weights to train
    are in half precision, in which most updates round to nothing."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.element_size() < 4:
            raise ValueError(f"{name} is in {parameter.dtype}. Load all weights in float32")
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)


def clip_gradients(model):
    """Scale the gradients to a norm of at most 1. Returns their norm before."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


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


def check_finite(model, grad_norms, step):
    """FloatingPointError: the gradients of this step or the weights after it are not finite."""
    tensors = [torch.tensor(grad_norms), *model.parameters()]
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise FloatingPointError(f"step {step}: the loss or the weights are not finite. Use a lower"
                                 " --learning_rate and another --output_dir")
