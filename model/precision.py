"""Compute dtypes of a run, and which linear layers run in fp8 (kernels/fp8_linear.py): those of attention
and MLP, except in the first and last blocks."""
import torch

from config import Config, fp8_block, fp8_recipe, layer_in_fp8
from kernels.grad import accumulation_dtype
from parallel.tensor.layers import Fp8Recipe

# train.dtype -> dtype of weights and activations
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # kernels/fp8_linear.py quantizes the operands of products
}


def compute_bytes(dtype: str) -> int:
    """Return bytes per element of weights and activations. `dtype` is train.dtype."""
    return DTYPES[dtype].itemsize


def accumulation_bytes(dtype: str) -> int:
    """Return bytes per element of gradients and master weights, which are fp32 or better. `dtype` is
    train.dtype."""
    return accumulation_dtype(DTYPES[dtype]).itemsize


def fp8_of_layer(cfg: Config, layer: int) -> Fp8Recipe | None:
    """Return the layer's fp8 recipe and block side, or None if it runs in the compute dtype."""
    recipe = fp8_recipe(cfg.train)
    if recipe is None or not layer_in_fp8(cfg, layer):
        return None
    return recipe, fp8_block(cfg.train)
