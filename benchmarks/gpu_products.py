"""The cases of benchmarks/gpu.py whose time is that of their products, beside NVIDIA's libraries."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_case import Case, Function, Inputs, Size
from kernels import attention, fp8, fp8_grouped, grouped_gemm, linear, newton_schulz, permute
from kernels.attention_libraries import library_attention, usable_libraries
from kernels.attention_mask import AttentionMask, DocumentCounts, make_attention_mask
from kernels.fp8_gemm import quantize_operand


def product_cases(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Case]:
    """Returns {name: case} of the kernels whose time is that of their products."""
    inputs = Inputs(size, device, dtype)
    x = inputs.randn(size.tokens, size.hidden)
    cases = {
        "weight_gradient": weight_gradient_case(inputs, x),
        "gemm": gemm_case(inputs, x),
        "symmetric": symmetric_case(inputs),
        **grouped_cases(inputs),
    }

    head_dim = size.head_dim
    attention_sizes = {
        "attention": AttentionSize(size.heads, head_dim, head_dim),
        "attention_gqa": AttentionSize(size.kv, head_dim, head_dim),
        "attention_window": AttentionSize(size.kv, head_dim, head_dim, window=size.seq // 4),
        "attention_documents": AttentionSize(
            size.kv, head_dim, head_dim, documents=uneven_documents(size.seq)
        ),
        "attention_mla": AttentionSize(size.heads, head_dim + head_dim // 2, head_dim),
    }
    for name, shape in attention_sizes.items():
        cases |= attention_cases(name, inputs, shape)
    return cases


def weight_gradient_case(inputs: Inputs, x: Tensor) -> Case:
    """into (fp32) += dy^T x. x: [tokens, hidden]."""
    size = inputs.size
    dy = inputs.randn(size.tokens, size.ffn)
    into = torch.zeros(size.ffn, size.hidden, device=inputs.device)
    return Case(
        work=2 * size.tokens * size.ffn * size.hidden,
        ours=lambda: linear.launch_wgrad(into, dy, x, True),
        others={
            "addmm to fp32": lambda: linear.write_by_library(into, dy, x, True),
            "add_(mm)": lambda: into.add_(dy.t() @ x),
        },
    )


def gemm_case(inputs: Inputs, x: Tensor) -> Case:
    """cuBLAS alone: what this GPU can reach. x: [tokens, hidden]."""
    size = inputs.size
    gate_up = inputs.randn(2 * size.ffn, size.hidden)
    x_fp8 = x.to(torch.float8_e4m3fn)
    gate_up_fp8 = gate_up.to(torch.float8_e4m3fn)
    scale = torch.ones((), device=inputs.device)

    def in_fp8() -> Tensor:
        return torch._scaled_mm(
            x_fp8,
            gate_up_fp8.t(),
            scale_a=scale,
            scale_b=scale,
            out_dtype=inputs.dtype,
            use_fast_accum=True,
        )

    return Case(
        work=4 * size.tokens * size.ffn * size.hidden,
        ours=lambda: x @ gate_up.t(),
        others={"in fp8": in_fp8},
    )


def symmetric_case(inputs: Inputs) -> Case:
    """X X^T, of Muon's Newton-Schulz iteration."""
    size = inputs.size
    matrix = inputs.randn(size.hidden, size.ffn)
    return Case(
        work=2 * size.hidden * size.hidden * size.ffn,
        ours=lambda: newton_schulz.launch_symmetric_product(matrix, 1.0, None, 0.0),
        others={"mm": lambda: matrix @ matrix.t()},
    )


def grouped_cases(inputs: Inputs) -> dict[str, Case]:
    """The gate and up projection of a mixture, as many rows for each expert."""
    size = inputs.size
    device = inputs.device
    num_rows = size.tokens * size.top_k
    gate_up = 2 * size.expert_ffn
    counts = torch.full((size.experts,), num_rows // size.experts, device=device)
    rows = grouped_gemm.row_tiles(counts, num_rows, device)
    offsets = rows.offsets
    ends = offsets[1:]
    x = inputs.randn(num_rows, size.hidden)
    dy = inputs.randn(num_rows, gate_up)
    weight = inputs.randn(size.experts, gate_up, size.hidden)
    into = torch.zeros(size.experts, gate_up, size.hidden, device=device)
    flops = 2 * num_rows * gate_up * size.hidden

    cases = {
        "grouped": Case(
            work=flops,
            ours=lambda: grouped_gemm.launch_grouped(x, weight, rows),
            others={"torch._grouped_mm": lambda: torch._grouped_mm(x, weight.mT, offs=ends)},
        ),
        "grouped_dgrad": Case(
            work=flops,
            ours=lambda: grouped_gemm.launch_grouped(dy, weight, rows, True),
            others={"torch._grouped_mm": lambda: torch._grouped_mm(dy, weight, offs=ends)},
        ),
        "grouped_wgrad": Case(
            work=flops,
            ours=lambda: grouped_gemm.launch_wgrad(into, dy, x, offsets, True),
            others={"torch._grouped_mm": lambda: torch._grouped_mm(dy.mT, x, offs=ends)},
        ),
    }

    # of the tokens, where they lie: beside a copy in the order of experts and the library
    tokens = inputs.randn(size.tokens, size.hidden)
    source = torch.randperm(num_rows, device=device) // size.top_k  # [m]: the token of each row
    cases["grouped_gather"] = Case(
        work=flops,
        ours=lambda: grouped_gemm.launch_grouped(tokens, weight, rows, gather=source),
        others={
            "permute and torch._grouped_mm": lambda: torch._grouped_mm(
                permute.gather_rows(tokens, source), weight.mT, offs=ends
            )
        },
    )
    cases["grouped_wgrad_gather"] = Case(
        work=flops,
        ours=lambda: grouped_gemm.launch_wgrad(into, dy, tokens, offsets, True, x_source=source),
        others={"rows in order": lambda: grouped_gemm.launch_wgrad(into, dy, x, offsets, True)},
    )

    def quantized_case(recipe: str) -> Case:
        x_kind, weight_kind, _ = fp8_grouped.RECIPES[recipe]
        a = quantize_operand(x, x_kind, fp8.E4M3, fp8.BLOCK_SIDE)
        stacked = weight.flatten(0, 1)
        b = fp8_grouped.quantized_experts(stacked, size.experts, weight_kind, fp8.BLOCK_SIDE).ahead
        return Case(
            work=flops,
            ours=lambda: fp8_grouped.launch_grouped_product(a, b, rows, size.experts, inputs.dtype),
            others={"in bf16": lambda: torch._grouped_mm(x, weight.mT, offs=ends)},
        )

    for recipe in ("rowwise", "blockwise"):
        cases[f"grouped_fp8_{recipe}"] = quantized_case(recipe)
    return cases


# ---- attention ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionSize:
    """window: None for plain causal attention. documents: tokens of those in each sequence; (): there is one.
    """

    kv_heads: int
    qk_dim: int
    value_dim: int
    window: int | None = None
    documents: tuple[int, ...] = ()


def uneven_documents(seq: int) -> tuple[int, int, int]:
    """Tokens of three documents: about 3, 25 and 72 percent of a sequence."""
    short, middle = max(1, seq // 30), seq // 4
    return short, middle, seq - short - middle


def attention_cases(name: str, inputs: Inputs, shape: AttentionSize) -> dict[str, Case]:
    """Returns the cases NAME (forward) and NAME_both (forward and backward).

    The FLOPs are those of the pairs of a query and a key that it sees.
    """
    size = inputs.size
    q = inputs.randn(size.batch, size.seq, size.heads, shape.qk_dim).requires_grad_()
    k = inputs.randn(size.batch, size.seq, shape.kv_heads, shape.qk_dim).requires_grad_()
    v = inputs.randn(size.batch, size.seq, shape.kv_heads, shape.value_dim).requires_grad_()
    dy = inputs.randn(size.batch, size.seq, size.heads, shape.value_dim)

    docs, counts = None, None
    if shape.documents:
        lengths = torch.tensor(shape.documents, device=inputs.device)
        docs = torch.arange(len(lengths), device=inputs.device).repeat_interleave(lengths)
        docs = docs.expand(size.batch, -1).contiguous()
        counts = DocumentCounts(size.batch * len(lengths), max(shape.documents))
    mask = make_attention_mask(0, size.seq, 0, size.seq, shape.window, docs, inputs.device, counts)
    functions = {
        "ours": lambda: attention._TritonAttention.apply(q, k, v, mask),
        **attention_libraries(q, k, v, mask),
    }

    def both(function: Function) -> Function:
        return lambda: torch.autograd.grad(function(), (q, k, v), dy)

    forward = {key: torch.no_grad()(function) for key, function in functions.items()}
    forward_backward = {key: both(function) for key, function in functions.items()}

    pairs = 0.0
    for length in shape.documents or (size.seq,):
        reach = min(shape.window or length, length)
        pairs += size.batch * size.heads * (reach * length - reach * (reach - 1) / 2)
    flops = 2 * pairs * (shape.qk_dim + shape.value_dim)
    return {
        name: Case(flops, forward.pop("ours"), forward),
        f"{name}_both": Case(flops * 3.5, forward_backward.pop("ours"), forward_backward),
    }


def attention_libraries(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> dict[str, Function]:
    """Returns what can compute this attention: SDPA's kernels, and the libraries that the model may use."""
    is_grouped = k.shape[2] != q.shape[2]

    def sdpa(backend: SDPBackend) -> Function:
        def run() -> Tensor:
            transposed = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel([backend]):
                out = F.scaled_dot_product_attention(*transposed, is_causal=True, enable_gqa=is_grouped)
            return out.transpose(1, 2)

        return run

    libraries: dict[str, Function] = {}
    if mask.is_causal:
        libraries["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
        libraries["flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
    flash_mask = None if mask.is_causal else mask
    for choice in usable_libraries(q, k, v, flash_mask):
        libraries[choice.library.name] = partial(library_attention, choice, q, k, v, flash_mask)
    return libraries
