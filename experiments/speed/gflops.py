"""Measures the GFLOP/s of one CPU core in matrix products with the shapes of Qwen2.5-0.5B.

    python -m experiments.speed.gflops float32     or bfloat16, or medium

The time is CPU time. `medium` is float32 with torch.set_float32_matmul_precision("medium"), which
uses oneDNN instead of MKL.
"""
import sys
import time

import torch

SHAPES = (1024, 896, 4864), (1024, 4864, 896), (128, 896, 4864), (128, 896, 30000)


def gflops(rows, inputs, outputs, dtype, repeats=4):
    x = torch.randn(rows, inputs, dtype=dtype)
    weight = torch.randn(outputs, inputs, dtype=dtype)
    x @ weight.T  # the first product is slow and not measured
    began = time.process_time()
    for _ in range(repeats):
        x @ weight.T
    return 2 * repeats * rows * inputs * outputs / (time.process_time() - began) / 1e9


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "medium":
        torch.set_float32_matmul_precision("medium")
    dtype = torch.bfloat16 if sys.argv[1] == "bfloat16" else torch.float32
    print(sys.argv[1], *(f"{shape}: {gflops(*shape, dtype):.0f}" for shape in SHAPES))
