"""The models of train_math.py: loading, and the precision of their weights and products."""
import contextlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(name, device):
    """(model, tokenizer) from a hub id or a folder. All weights are float32: in bf16, most updates
    at a learning rate of 1e-6 are smaller than the distance to the next number."""
    torch.set_float32_matmul_precision("highest")  # some Docker images switch TF32 on
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device).eval()
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # CUDA graphs use the current device
    return model, AutoTokenizer.from_pretrained(name)


@contextlib.contextmanager
def tf32_matmuls():
    """TF32 for the matrix products of the backward pass, which makes them faster on CUDA.

    It changes a gradient by a relative error of about 1e-3. The forward pass, which computes log s,
    stays in float32: TF32 would change log s by 2e-4, almost as much as GSPO's clip range. (The
    head is computed again in the backward pass, in TF32.) On CPUs this setting has no effect."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def check_weights_can_be_trained(model):
    """ValueError: all weights are frozen, or those that are not frozen are not in float32."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("all weights of the model are frozen, as those of a LoRA folder are")
    if any(parameter.dtype != torch.float32 for parameter in trained):
        raise ValueError(f"the model is in {model.dtype}. In half precision, most updates round to "
                         "nothing. Load it in float32: from_pretrained(..., dtype=torch.float32)")


def check_weights(model, step):
    """FloatingPointError: the weights are not finite after this step."""
    if not all(p.isfinite().all() for p in model.parameters()):
        raise FloatingPointError(f"step {step}: the loss or the weights are not finite. Use a lower"
                                 " --learning_rate and another --output_dir")
