"""The cases of benchmarks/gpu.py whose time is that of their memory, beside torch.compile and Liger."""

import contextlib
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_case import Case, Function, Inputs, Size
from kernels import adam, cross_entropy, fp8, norm, permute, rope, swiglu

NORM_EPS = 1e-5
ROPE_THETA = 5e5


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
    qkv = inputs.randn(size.batch, size.seq, size.heads + 2 * size.kv, size.head_dim)
    rotated = qkv[:, :, :size.heads + size.kv]
    positions = torch.arange(size.seq, device=inputs.device).expand(size.batch, -1)
    frequencies = rope.frequencies(size.head_dim, ROPE_THETA).to(inputs.device)
    cos, sin = rope.cos_sin_tables(positions, frequencies, inputs.dtype)
    return Case(
        work=2 * rotated.numel() * inputs.element_bytes,
        ours=lambda: rope.launch_rope(rotated, rotated, cos, sin),
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
