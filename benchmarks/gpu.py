"""On a GPU: each Triton kernel's bandwidth beside a plain copy's, each product's FLOP/s beside a library's.

Bytes are those that must be moved (inputs once, outputs once), so 100 % of a copy is a bound. `compiled` is
the same computation in torch operations under torch.compile, `liger` Liger's kernel if liger-kernel is
installed. The shapes are those of a dense 1.6B model, micro-batch 8 x 4096.
"""

import argparse
import contextlib
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.shape import show
from kernels import (
    adam,
    attention,
    cross_entropy,
    fp8,
    fp8_grouped,
    grouped_gemm,
    linear,
    newton_schulz,
    norm,
    permute,
    rope,
    swiglu,
)
from kernels.attention_mask import AttentionMask, make_attention_mask
from kernels.fp8_gemm import quantize_operand

REPEATS = 20
WARM_UP = 5
FLUSH_BYTES = 1 << 28  # written between repeats: more than any cache holds
COPY_BYTES = 1 << 30
NORM_EPS = 1e-5
ROPE_THETA = 5e5

Function = Callable[[], Any]  # one call of a kernel on tensors that it holds


@dataclass(frozen=True)
class Size:
    """Sizes of the tensors. kv: key/value heads; rows: of logits at a time; params: of one AdamW launch."""

    batch: int = 8
    seq: int = 4096
    hidden: int = 2048
    ffn: int = 5632
    heads: int = 16
    kv: int = 4
    vocab: int = 32768
    rows: int = 4096
    experts: int = 64
    top_k: int = 8
    expert_ffn: int = 768
    params: int = 1 << 28

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Case:
    """work: bytes that a memory-bound kernel must move, FLOPs of a product; others: {name: alternative}."""

    work: float
    ours: Function
    others: dict[str, Function]


@dataclass(frozen=True)
class Inputs:
    """Makes the inputs of all cases."""

    size: Size
    device: torch.device
    dtype: torch.dtype

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self.device, dtype=self.dtype)

    def compiled(self, function: Function) -> Function:
        """Returns the function under torch.compile; as it is on a CPU, for a rehearsal."""
        return torch.compile(function) if self.device.type == "cuda" else function

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one tensor [tokens, hidden]."""
        return self.size.tokens * self.size.hidden * self.element_bytes


# ---- the run -----------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    size = Size()
    device = torch.device("cuda")
    dtype = torch.bfloat16
    torch.set_float32_matmul_precision("highest")
    copy_rate = measure_copy(device)
    name = torch.cuda.get_device_name()
    machine = f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {time.strftime('%Y-%m-%d')}"

    def measure(cases: dict[str, Case], bound: float | None) -> list[dict]:
        rows = []
        for name, case in cases.items():
            if args.only in name:
                rows.append(table_row(name, case, device, bound))
                if args.json:
                    print(json.dumps(rows[-1]), flush=True)
        return rows

    memory_rows = measure(memory_cases(size, device, dtype), copy_rate)
    product_rows = measure(product_cases(size, device, dtype), None)
    if args.json:
        show([], True, machine=machine, copy=copy_rate)
        return 0
    copy_text = f"{copy_rate / 1e12:.2f} TB/s"
    show(memory_rows, False, machine=machine, copy=copy_text, memory=f"bf16, ms, median of {REPEATS}")
    show(product_rows, False, products="bf16, TFLOP/s, forward or as named")
    return 0


def measure_copy(device: torch.device) -> float:
    """Returns bytes a second, read and written, of one large copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source), device)


def table_row(name: str, case: Case, device: torch.device, copy_rate: float | None) -> dict[str, str]:
    """Returns a row of the table. copy_rate: bytes a second of a copy, None for a product.

    Of a function that fails on this machine, the row has the name of its error.
    """

    def measure(function: Function) -> str:
        try:
            seconds = seconds_of(function, device)
        except Exception as error:
            return type(error).__name__
        if copy_rate is None:
            return f"{case.work / seconds / 1e12:.0f}"
        percent = 100 * case.work / seconds / copy_rate
        return f"{1e3 * seconds:.3f} ({percent:.0f} %)"

    unit = "TFLOP/s" if copy_rate is None else "ms (of a copy)"
    beside = [f"{other} {measure(function)}" for other, function in case.others.items()]
    return {"kernel": name, unit: measure(case.ours), "beside it": ", ".join(beside)}


def seconds_of(function: Function, device: torch.device) -> float:
    """Returns the time of one call: the median over REPEATS, each with cold caches."""
    if device.type == "cpu":  # Triton's interpreter: only whether it runs
        function()
        return 1.0

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    times = []
    for repeat in range(WARM_UP + REPEATS):
        flush.zero_()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        if repeat >= WARM_UP:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


# ---- memory-bound kernels ----------------------------------------------------------------------------------


def memory_cases(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Case]:
    """Returns {name: case} of the kernels whose time is that of their memory."""
    inputs = Inputs(size, device, dtype)
    x = inputs.randn(size.tokens, size.hidden)
    cases = {
        **norm_cases(inputs, x),
        "rope": rope_case(inputs),
        **activation_cases(inputs),
        "cross_entropy": cross_entropy_case(inputs),
        "adamw": adamw_case(inputs),
        **permute_cases(inputs, x),
        **fp8_cases(inputs, x),
    }
    with contextlib.suppress(ImportError):
        liger = importlib.import_module("liger_kernel.ops")
        for name, function in liger_functions(liger, inputs).items():
            cases[name].others["liger"] = function
    return cases


def norm_cases(inputs: Inputs, x: Tensor) -> dict[str, Case]:
    """x: [tokens, hidden]."""
    hidden = inputs.size.hidden
    residual = inputs.randn(*x.shape)
    dy = inputs.randn(*x.shape)
    weight = inputs.randn(hidden)
    _, total, scale, mean = norm.launch_forward(x, residual, weight, None, NORM_EPS)

    def plain() -> tuple[Tensor, Tensor]:
        return F.rms_norm(x + residual, (hidden,), weight, NORM_EPS), x + residual

    def plain_backward():
        return norm.norm_backward(dy, residual, total, weight, scale[:, None], None)

    return {
        "add_rms_norm": Case(
            work=4 * inputs.hidden_bytes,
            ours=lambda: norm.launch_forward(x, residual, weight, None, NORM_EPS),
            others={"compiled": inputs.compiled(plain)},
        ),
        "add_rms_norm_backward": Case(
            work=4 * inputs.hidden_bytes,
            ours=lambda: norm.launch_backward(dy, residual, total, weight, scale, mean),
            others={"compiled": inputs.compiled(plain_backward)},
        ),
    }


def rope_case(inputs: Inputs) -> Case:
    """Queries and keys of one fused projection, rotated in place."""
    size = inputs.size
    num_rotated = size.heads + size.kv
    qkv = inputs.randn(size.batch, size.seq, size.heads + 2 * size.kv, size.head_dim)
    rotated = qkv[:, :, :num_rotated]
    positions = torch.arange(size.seq, device=inputs.device).expand(size.batch, -1)
    frequencies = rope.frequencies(size.head_dim, ROPE_THETA).to(inputs.device)
    cos, sin = rope.cos_sin_tables(positions, frequencies, inputs.dtype)
    return Case(
        work=2 * rotated.numel() * inputs.element_bytes,
        ours=lambda: rope.launch_rope(rotated, rotated, cos, sin, num_rotated),
        others={"compiled": inputs.compiled(lambda: rope.rotate(rotated, cos, sin))},
    )


def activation_cases(inputs: Inputs) -> dict[str, Case]:
    size = inputs.size
    gate_up = inputs.randn(size.tokens, 2 * size.ffn)
    x = inputs.randn(size.tokens, size.ffn)  # dy of SwiGLU, x of GELU
    ffn_bytes = size.tokens * size.ffn * inputs.element_bytes
    return {
        "swiglu": Case(
            work=3 * ffn_bytes,
            ours=lambda: swiglu.launch_swiglu(gate_up),
            others={"compiled": inputs.compiled(lambda: swiglu.swiglu_forward(gate_up))},
        ),
        "swiglu_backward": Case(
            work=5 * ffn_bytes,
            ours=lambda: swiglu.launch_swiglu_backward(x, gate_up),
            others={"compiled": inputs.compiled(lambda: swiglu.swiglu_backward(x, gate_up))},
        ),
        "gelu": Case(
            work=2 * ffn_bytes,
            ours=lambda: swiglu.launch_gelu(x),
            others={"compiled": inputs.compiled(lambda: F.gelu(x, approximate="tanh"))},
        ),
    }


def cross_entropy_case(inputs: Inputs) -> Case:
    size = inputs.size
    logits = inputs.randn(size.rows, size.vocab)
    targets = torch.randint(size.vocab, (size.rows,), device=inputs.device)

    def plain() -> Tensor:
        return cross_entropy.softmax_cross_entropy_block(logits, targets, 1.0, size.vocab, 0, None)

    return Case(
        work=2 * logits.numel() * inputs.element_bytes,
        ours=lambda: cross_entropy.launch_softmax(logits, targets, 1.0, size.vocab, 0, None),
        others={"compiled": inputs.compiled(plain)},
    )


def adamw_case(inputs: Inputs) -> Case:
    device = inputs.device
    param, grad, exp_avg, exp_avg_sq = (torch.rand(inputs.size.params, device=device) for _ in range(4))
    weight_copy = torch.empty_like(param, dtype=inputs.dtype)
    update = adam.AdamWStep(
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=5,
        grad_scale=torch.ones((), device=device),
        is_good=torch.ones((), dtype=torch.bool, device=device),
    )

    def plain() -> None:
        adam.adamw_reference(param, grad, exp_avg, exp_avg_sq, update)
        weight_copy.copy_(param)

    bytes_per_parameter = 7 * 4 + inputs.element_bytes  # 4 read and 3 written in fp32, the copy written
    return Case(
        work=inputs.size.params * bytes_per_parameter,
        ours=lambda: adam.launch_adamw(param, grad, exp_avg, exp_avg_sq, update, weight_copy),
        others={"compiled": inputs.compiled(plain)},
    )


def permute_cases(inputs: Inputs, x: Tensor) -> dict[str, Case]:
    """Rows of a mixture sorted by expert, and summed back to their tokens. x: [tokens, hidden]."""
    size = inputs.size
    device = inputs.device
    num_rows = size.tokens * size.top_k
    rows = inputs.randn(num_rows, size.hidden)
    rows_of_token = torch.randperm(num_rows, device=device).view(size.tokens, size.top_k)
    source_token = torch.empty(num_rows, dtype=torch.int64, device=device)
    tokens = torch.arange(size.tokens, device=device)
    source_token[rows_of_token.view(-1)] = tokens.repeat_interleave(size.top_k)
    return {
        "permute": Case(
            work=2 * rows.numel() * inputs.element_bytes,
            ours=lambda: permute.launch_sum_rows(x, source_token[:, None], False),
            others={"torch": lambda: x[source_token]},
        ),
        "unpermute": Case(
            work=(size.top_k + 1) * inputs.hidden_bytes,
            ours=lambda: permute.launch_sum_rows(rows, rows_of_token, True),
            others={"torch": lambda: rows[rows_of_token].sum(1)},
        ),
    }


def fp8_cases(inputs: Inputs, x: Tensor) -> dict[str, Case]:
    """Quantization with each kind of scales. x: [tokens, hidden]."""
    return {f"fp8_{kind}": fp8_case(inputs, x, kind) for kind in fp8.SCALE_KINDS}


def fp8_case(inputs: Inputs, x: Tensor, kind: str) -> Case:
    """x is read in 2 bytes and written in 1; one scale for the whole tensor needs a second read."""
    moved = 2.5 if kind == "tensor" else 1.5
    return Case(
        work=moved * inputs.hidden_bytes,
        ours=lambda: fp8.launch_quantize(x, kind, torch.float8_e4m3fn),
        others={"compiled": inputs.compiled(lambda: fp8.quantize_reference(x, kind, torch.float8_e4m3fn))},
    )


def liger_functions(liger: Any, inputs: Inputs) -> dict[str, Function]:
    """Returns {case: Liger's kernel} at the same sizes, on inputs of their own: some write into them."""
    size = inputs.size

    # add + norm
    x = inputs.randn(size.tokens, size.hidden).requires_grad_()
    residual = inputs.randn(size.tokens, size.hidden).requires_grad_()
    weight = inputs.randn(size.hidden).requires_grad_()

    def add_norm() -> tuple:
        return liger.LigerFusedAddRMSNormFunction.apply(x, residual, weight, NORM_EPS)

    # SwiGLU
    gate = inputs.randn(size.tokens, size.ffn).requires_grad_()
    up = inputs.randn(size.tokens, size.ffn).requires_grad_()

    def product() -> Tensor:
        return liger.LigerSiLUMulFunction.apply(gate, up)

    # RoPE
    q = inputs.randn(size.batch, size.seq, size.heads, size.head_dim).transpose(1, 2)
    k = inputs.randn(size.batch, size.seq, size.kv, size.head_dim).transpose(1, 2)
    cos = inputs.randn(1, size.seq, size.head_dim)
    sin = inputs.randn(1, size.seq, size.head_dim)

    # cross-entropy
    logits = inputs.randn(size.rows, size.vocab)
    targets = torch.randint(size.vocab, (size.rows,), device=x.device)

    def loss() -> Any:
        return liger.LigerCrossEntropyFunction.apply(logits.detach().requires_grad_(), targets, None)

    return {
        "add_rms_norm": torch.no_grad()(add_norm),
        "add_rms_norm_backward": backward_of(add_norm, (x, residual, weight)),
        "rope": lambda: liger.LigerRopeFunction.apply(q, k, cos, sin),
        "swiglu": torch.no_grad()(product),
        "swiglu_backward": backward_of(product, (gate, up)),
        "cross_entropy": loss,
    }


def backward_of(forward: Function, inputs: tuple[Tensor, ...]) -> Function:
    """Returns the backward alone, over one forward that runs at the first call."""
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []

    def run() -> None:
        if not outputs:
            result = forward()
            outputs.extend(result if isinstance(result, tuple) else (result,))
            gradients.extend(torch.ones_like(output) for output in outputs)
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    return run


# ---- matrix products ---------------------------------------------------------------------------------------


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
    offsets = grouped_gemm.offsets_of(counts, device)
    ends = offsets[1:]
    x = inputs.randn(num_rows, size.hidden)
    dy = inputs.randn(num_rows, gate_up)
    weight = inputs.randn(size.experts, gate_up, size.hidden)
    into = torch.zeros(size.experts, gate_up, size.hidden, device=device)
    flops = 2 * num_rows * gate_up * size.hidden

    cases = {
        "grouped": Case(
            work=flops,
            ours=lambda: grouped_gemm.launch_grouped(x, weight, offsets),
            others={"torch._grouped_mm": lambda: torch._grouped_mm(x, weight.mT, offs=ends)},
        ),
        "grouped_dgrad": Case(
            work=flops,
            ours=lambda: grouped_gemm.launch_grouped(dy, weight, offsets, True),
            others={"torch._grouped_mm": lambda: torch._grouped_mm(dy, weight, offs=ends)},
        ),
        "grouped_wgrad": Case(
            work=flops,
            ours=lambda: grouped_gemm.launch_wgrad(into, dy, x, offsets, True),
            others={"torch._grouped_mm": lambda: torch._grouped_mm(dy.mT, x, offs=ends)},
        ),
    }

    def quantized_case(recipe: str) -> Case:
        x_kind, weight_kind, _ = fp8_grouped.RECIPES[recipe]
        a = quantize_operand(x, x_kind, fp8.E4M3, fp8.BLOCK_SIDE)
        b = fp8_grouped.quantized_experts(weight, weight_kind, fp8.BLOCK_SIDE)
        return Case(
            work=flops,
            ours=lambda: fp8_grouped.launch_grouped_product(a, b, offsets, size.experts, inputs.dtype),
            others={"in bf16": lambda: torch._grouped_mm(x, weight.mT, offs=ends)},
        )

    for recipe in ("rowwise", "blockwise"):
        cases[f"grouped_fp8_{recipe}"] = quantized_case(recipe)
    return cases


# ---- attention ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionSize:
    """window: None for plain causal attention."""

    kv_heads: int
    qk_dim: int
    value_dim: int
    window: int | None = None


def attention_cases(name: str, inputs: Inputs, shape: AttentionSize) -> dict[str, Case]:
    """Returns the cases NAME (forward) and NAME_both (forward and backward).

    The FLOPs are those of the pairs of a query and a key that it sees.
    """
    size = inputs.size
    q = inputs.randn(size.batch, size.seq, size.heads, shape.qk_dim).requires_grad_()
    k = inputs.randn(size.batch, size.seq, shape.kv_heads, shape.qk_dim).requires_grad_()
    v = inputs.randn(size.batch, size.seq, shape.kv_heads, shape.value_dim).requires_grad_()
    dy = inputs.randn(size.batch, size.seq, size.heads, shape.value_dim)

    mask = make_attention_mask(0, size.seq, 0, size.seq, shape.window, None, inputs.device)
    functions = {
        "ours": lambda: attention._TritonAttention.apply(q, k, v, mask),
        **attention_libraries(q, k, v, mask, shape.window),
    }

    def both(function: Function) -> Function:
        return lambda: torch.autograd.grad(function(), (q, k, v), dy)

    forward = {key: torch.no_grad()(function) for key, function in functions.items()}
    forward_backward = {key: both(function) for key, function in functions.items()}

    reach = min(shape.window or size.seq, size.seq)
    pairs = size.batch * size.heads * (reach * size.seq - reach * (reach - 1) / 2)
    flops = 2 * pairs * (shape.qk_dim + shape.value_dim)
    return {
        name: Case(flops, forward.pop("ours"), forward),
        f"{name}_both": Case(flops * 3.5, forward_backward.pop("ours"), forward_backward),
    }


def attention_libraries(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, window: int | None
) -> dict[str, Function]:
    """Returns the libraries that can compute this attention: SDPA's kernels, flash-attn."""
    is_grouped = k.shape[2] != q.shape[2]

    def sdpa(backend: SDPBackend) -> Function:
        def run() -> Tensor:
            transposed = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel([backend]):
                out = F.scaled_dot_product_attention(*transposed, is_causal=True, enable_gqa=is_grouped)
            return out.transpose(1, 2)

        return run

    libraries: dict[str, Function] = {}
    if window is None:
        libraries["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
        libraries["flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
    flash_mask = None if mask.is_causal else mask
    if attention.flash_supports(q, k, v, flash_mask):
        libraries["flash-attn"] = lambda: attention.flash_attention(q, k, v, flash_mask)
    return libraries
