"""train.unproven: give a block the kernels of kernels/unproven/, which no other file imports."""
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from config import Config
from kernels.fp8_linear import RECIPES
from kernels.swiglu import swiglu
from kernels.unproven import (
    fp8_formula,
    fp8_norm,
    fp8_rope,
    fp8_swiglu,
    head_norm,
    latent_heads,
    mx_gemm,
    nvfp4_gemm,
)
from kernels.unproven.fp8_origin import Reader
from model.attention import Attention
from model.mla import MultiLatentAttention
from model.mlp import MLP
from model.norm import Norm
from model.precision import fp8_of_layer
from model.router import has_experts
from parallel.tensor.layers import ColumnLinear, RowLinear
from parallel.topology.mesh import Mesh

if TYPE_CHECKING:
    from model.block import TransformerBlock


PRODUCTS = {"mxfp8": mx_gemm.PRODUCTS, "nvfp4": nvfp4_gemm.PRODUCTS}  # {train.fp8: its products}


def use_unproven(block: "TransformerBlock", cfg: Config, mesh: Mesh, layer: int) -> None:
    """Replace the functions of a block's modules. cfg is that of the layer."""
    mixer = block.mixer
    if isinstance(mixer, Attention) and mixer.may_fuse_rope and cfg.model.mixer.qk_norm == "head":
        mixer.fuses_rope = True
        mixer.rotate_heads = partial(normalize_and_rotate_heads, mixer)
    if isinstance(mixer, MultiLatentAttention):
        mixer.rotate_heads = latent_heads.rotate_heads
        mixer.keys_and_values = latent_heads.keys_and_values
    fp8 = fp8_of_layer(cfg, layer)
    if fp8 is not None:
        recipe, side = fp8
        multiply_by_library(block, recipe)
        if recipe in RECIPES:  # in 8 bits
            leave_results_to_fp8(block, cfg, mesh, layer, Reader(RECIPES[recipe].activation_kind, side))


def scaled_linears(block: "TransformerBlock") -> list[ColumnLinear | RowLinear]:
    linears = [module for module in block.modules() if isinstance(module, (ColumnLinear, RowLinear))]
    return [linear for linear in linears if linear.scaling is not None]


def multiply_by_library(block: "TransformerBlock", recipe: str) -> None:
    """Let the chip's own products of a format run, if it has them."""
    if recipe in PRODUCTS:
        for linear in scaled_linears(block):
            linear.scaling = replace(linear.scaling, products=PRODUCTS[recipe])


def normalize_and_rotate_heads(
    mixer: Attention, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, *, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [b, s/cp, (h + 2g) d / tp] into heads, normalize and rotate them in one pass."""
    return head_norm.split_normalize_and_rotate(
        qkv.unflatten(-1, (-1, mixer.head_dim)), mixer.q_norm, mixer.k_norm, cos, sin,
        heads=heads,
        kv=kv_heads,
        eps=mixer.eps,
        compiled=compiled,
    )


def leave_results_to_fp8(
    block: "TransformerBlock", cfg: Config, mesh: Mesh, layer: int, reader: Reader
) -> None:
    """Leave each result that fp8 linears alone read to their casts (kernels/unproven/fp8_origin.py).

    The pre-mixer norm: other mixers than attention also need it in 16 bits, and so does the MLP of a parallel
    residual. The pre-MLP norm: so does a router. Under tp an exchange comes between. SwiGLU, and the gradient
    of q, k, v: with a bias, the gradient of the projection's output is also summed.
    """
    for linear in scaled_linears(block):
        linear.scaling = replace(linear.scaling, casts=fp8_formula.CASTS)

    # norms
    add_norm = partial(fp8_norm.add_norm, reader=reader)
    is_alone = mesh.tp.size == 1 and not block.is_parallel
    if is_alone and isinstance(block.mixer, Attention) and isinstance(block.mixer_norm, Norm):
        block.mixer_norm.function = add_norm
    reads_alone = is_alone and block.mlp is not None and not has_experts(cfg.model, layer)
    if reads_alone and isinstance(block.mlp_norm, Norm):
        block.mlp_norm.function = add_norm

    # SwiGLU, of shared experts, too, and RoPE
    for mlp in block.modules():
        if isinstance(mlp, MLP) and mlp.activation.func is swiglu and mlp.gate_up.bias is None:
            mlp.activation = partial(fp8_swiglu.swiglu, compiled=cfg.train.compile, reader=reader)
    mixer = block.mixer
    if isinstance(mixer, Attention) and cfg.model.mixer.bias is None and cfg.model.mixer.qk_norm is None:
        mixer.rotate_heads = partial(fp8_rope.split_heads_and_apply_rope, reader=reader)
