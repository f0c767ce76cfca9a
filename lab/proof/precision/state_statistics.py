"""Kernels of recurrent mixers with bf16 inputs against fp64 formulas: states, decays and sums in fp32.

A bf16 result may be off by its one rounding. Inputs are random and independent, so partial sums are no larger
than the largest result, and each of the s tokens adds an fp32 rounding of that size. Results near zero are
differences of larger numbers: a state in bf16 would be off by many times the bound there.
"""
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.delta_rule import delta_rule
from kernels.short_conv import short_conv
from kernels.state_space import state_space
from lab.proof.precision.errors import U32, UNIT, BoundedError
from model.delta import UNIT_EPS, unit
from model.mamba import gate_and_normalize

UNIT_BF16 = 1.01 * UNIT["bf16"]
EPS = 1e-5
TOKENS = 160  # two chunks and a half
HEADS, SHARED, DIM = 4, 2, 16

Formula = Callable[..., tuple[Tensor, ...]]


def state_errors(stream: torch.Generator) -> list[BoundedError]:
    """Return the errors of the kernels, forward and backward, on random inputs from `stream`."""
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=stream)

    heads, shared = (1, TOKENS, HEADS), (1, TOKENS, SHARED, DIM)
    errors: list[BoundedError] = []
    for where, gates in (("gated delta rule", heads), ("Kimi delta attention", (*heads, DIM))):
        q, k, v = normal(*shared), F.normalize(normal(*shared), dim=-1), normal(*heads, DIM)
        g, beta = -0.02 * normal(*gates).exp(), normal(*heads).sigmoid()
        errors += measure_errors(where, delta_rule, exact_delta_rule, (*bf16(q, k, v), g, beta), stream)

    x, B, C = normal(*heads, DIM), normal(*shared), normal(*shared)
    dt, A, D = F.softplus(normal(*heads)), -0.02 * normal(HEADS).exp(), normal(HEADS)
    x, B, C = bf16(x, B, C)
    errors += measure_errors("state space", state_space, exact_state_space, (x, dt, A, B, C, D), stream)

    inputs = bf16(normal(1, TOKENS, DIM), normal(DIM, 4), normal(DIM))
    errors += measure_errors("short convolution", convolution, exact_convolution, inputs, stream)
    errors += measure_errors("convolution, SiLU", convolution_silu, exact_convolution_silu, inputs, stream)
    errors += measure_errors("unit length", lambda x: (unit(x),), exact_unit, bf16(normal(*shared)), stream)
    inputs = bf16(normal(*heads), normal(*heads), normal(HEADS))
    errors += measure_errors("gated norm", gated_norm, exact_gated_norm, inputs, stream)
    return errors


def bf16(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.bfloat16() for tensor in tensors)


def measure_errors(
    where: str, kernel: Formula, formula: Formula, inputs: Sequence[Tensor], stream: torch.Generator
) -> list[BoundedError]:
    """Compare a kernel's results and input gradients with those of a formula in fp64."""
    found = [x.detach().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results, wanted = kernel(*found), formula(*exact)
    dresults = [torch.randn(x.shape, generator=stream).bfloat16() for x in results]
    gradients = torch.autograd.grad(results, found, [dx.to(x.dtype) for dx, x in zip(dresults, results)])
    wanted_gradients = torch.autograd.grad(wanted, exact, [dx.double() for dx in dresults])
    return [
        BoundedError("statistics", where, worst_share(results, wanted), 1.0),
        BoundedError("statistics", f"{where}, backward", worst_share(gradients, wanted_gradients), 1.0),
    ]


def worst_share(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest error, relative to the tolerance of its element."""
    shares: list[float] = []
    for ours, theirs in zip(found, exact, strict=True):
        ours, theirs = ours.detach(), theirs.detach()
        tolerance = TOKENS * U32 * theirs.abs().max() + torch.zeros_like(theirs)
        if ours.dtype == torch.bfloat16:
            tolerance += UNIT_BF16 * theirs.abs()
        shares.append(float(((ours.double() - theirs).abs() / tolerance).max()))
    return max(shares)


# ---- the formulas ------------------------------------------------------------------------------------------

def exact_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """kernels/delta_rule.py token by token: (output, last state)."""
    q, k = (x.repeat_interleave(HEADS // SHARED, 2) for x in (q, k))
    decay = g.exp() if g.dim() == 4 else g.exp()[..., None].expand_as(k)
    state = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None])
    outputs: list[Tensor] = []
    for t in range(TOKENS):
        state = decay[:, t, :, :, None] * state
        held = (k[:, t, :, :, None] * state).sum(-2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - held))[:, :, None]
        outputs.append((q[:, t, :, :, None] * state).sum(-2) / math.sqrt(DIM))
    return torch.stack(outputs, 1), state


def exact_state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, ...]:
    """kernels/state_space.py token by token: (output, last state)."""
    B, C = (y.repeat_interleave(HEADS // SHARED, 2) for y in (B, C))
    state = torch.zeros_like(x[:, 0, :, :, None] * B[:, 0, :, None])
    outputs: list[Tensor] = []
    for t in range(TOKENS):
        decay, step = (dt[:, t] * A).exp(), dt[:, t, :, None] * x[:, t]
        state = decay[..., None, None] * state + step[..., None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1), state


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (short_conv(x, weight, bias),)


def exact_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    width = weight.shape[1]
    seen = F.pad(x, (0, 0, width - 1, 0)).unfold(1, width, 1)  # [b, s, c, w]
    return ((seen * weight).sum(-1) + bias,)


def convolution_silu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (short_conv(x, weight, bias, silu=True),)


def exact_convolution_silu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    (z,) = exact_convolution(x, weight, bias)
    return (z * z.sigmoid(),)


def exact_unit(x: Tensor) -> tuple[Tensor, ...]:
    return (x / (x.square().sum(-1, keepdim=True) + UNIT_EPS).sqrt(),)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (gate_and_normalize(x, z, weight, groups=1, eps=EPS),)


def exact_gated_norm(x: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    gated = x * z * z.sigmoid()
    return (gated / (gated.square().mean(-1, keepdim=True) + EPS).sqrt() * weight,)
