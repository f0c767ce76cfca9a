"""The statistics of kernels in bf16 (softmax, log-sum-exp, norms) against fp64 formulas.

The inputs are chosen so that statistics in bf16 would exceed the bound several times over. The bound allows
one rounding of the result, and the roundings of the probabilities, which are bf16.
"""
import math

import torch
from torch import Tensor

from kernels.attention import attention
from kernels.cross_entropy import linear_cross_entropy
from kernels.norm import layer_norm, rms_norm
from kernels.partial_attention import attention_part
from lab.proof.precision.errors import U32, UNIT, BoundedError
from lab.proof.precision.state_statistics import state_errors

UNIT_BF16 = 1.01 * UNIT["bf16"]
EPS = 1e-5


def kernel_errors() -> list[BoundedError]:
    """Return the errors of all kernels, for fixed random inputs."""
    stream = torch.Generator().manual_seed(0)
    return [
        *attention_errors(stream),
        *rms_and_layer_norm_errors(stream),
        cross_entropy_error(stream),
        *state_errors(stream),
    ]


def statistic(where: str, computed: Tensor, exact: Tensor, tolerance: Tensor) -> BoundedError:
    """Return the error of the worst element, relative to its tolerance."""
    off = (computed.double() - exact).abs()
    error = float((off / tolerance).max())
    return BoundedError(what="statistics", where=where, error=error, bound=1.0)


def attention_errors(stream: torch.Generator) -> list[BoundedError]:
    """Check attention with scores of 30 and more: in bf16 they are off by 0.06, their exponentials by 6 %."""
    q, k, v = (torch.randn(2, 64, 4, 32, generator=stream) for _ in "qkv")  # [b, s, h, d]
    q = (8 * q).bfloat16()
    k = (2 * k[:, :, :2]).bfloat16()
    v = v[:, :, :2].bfloat16()
    is_hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)  # masked, causal

    # the exact result [b, s, h, d]
    q64 = q.double().transpose(1, 2)
    k64 = k.repeat_interleave(2, 2).double().transpose(1, 2)
    v64 = v.repeat_interleave(2, 2).double().transpose(1, 2)
    all_scores = q64 @ k64.transpose(-1, -2) / math.sqrt(32)
    scores = all_scores.masked_fill(is_hidden, -math.inf)
    probabilities = torch.softmax(scores, -1)
    exact = probabilities @ v64

    # one rounding of the result, and one of each probability
    sizes = probabilities @ v64.abs() + exact.abs()
    tolerance = UNIT_BF16 * sizes + 1e-4
    errors: list[BoundedError] = []
    for kind in ("blocks", "sdpa", "reference"):
        computed = attention(q, k, v, None, kind).transpose(1, 2)
        errors.append(statistic(f"attention, {kind}", computed, exact, tolerance))

    # a chunk of ring attention and its log-sum-exp, both in fp32
    part, lse = attention_part(q, k, v, ~is_hidden[None, None])
    largest_score = scores.abs().masked_fill(is_hidden, 0).amax(-1)[..., None]
    tolerance = 64 * U32 * (largest_score + 1)
    errors.append(statistic("attention, a part of the ring", part.transpose(1, 2), exact, tolerance))

    exact_lse = scores.logsumexp(-1).transpose(1, 2)
    tolerance = 64 * U32 * (exact_lse.abs() + 30)
    errors.append(statistic("log-sum-exp of attention", lse, exact_lse, tolerance))
    return errors


def rms_and_layer_norm_errors(stream: torch.Generator) -> list[BoundedError]:
    """Check rows of 4,096 with squares of very different sizes: a bf16 sum stalls after 256 equal terms."""
    x = torch.randn(8, 4096, generator=stream) * torch.logspace(-2, 1, 4096)
    x = x.bfloat16()
    weight = torch.randn(4096, generator=stream).bfloat16()
    bias = torch.randn(4096, generator=stream).bfloat16()
    weight64 = weight.double()
    bias64 = bias.double()

    x64 = x.double()
    mean_square = x64.square().mean(-1, keepdim=True)
    exact = x64 / (mean_square + EPS).sqrt() * weight64
    tolerance = UNIT_BF16 * exact.abs() + 1e-30
    rms_error = statistic("RMSNorm", rms_norm(x, weight, EPS), exact, tolerance)

    x = (x + 64).bfloat16()  # a mean that is large relative to the deviation
    x64 = x.double()
    centred = x64 - x64.mean(-1, keepdim=True)
    variance = x64.var(-1, keepdim=True, unbiased=False)
    exact = centred / (variance + EPS).sqrt() * weight64 + bias64
    of_statistics = 4096**0.5 * U32 * 64 * (weight64.abs() + bias64.abs() + 1)
    tolerance = UNIT_BF16 * exact.abs() + of_statistics
    layer_error = statistic("LayerNorm", layer_norm(x, weight, bias, EPS), exact, tolerance)
    return [rms_error, layer_error]


def cross_entropy_error(stream: torch.Generator) -> BoundedError:
    """Check integer logits, which bf16 represents exactly: only later operations can be off."""
    vocab = 280
    hidden = torch.randint(-1, 2, (4096, 64), generator=stream).bfloat16()
    head = torch.randint(-1, 2, (288, 64), generator=stream).bfloat16()  # includes padding rows
    targets = torch.randint(vocab, (4096,), generator=stream)

    all_logits = hidden.double() @ head.double().t()
    logits = all_logits[:, :vocab]
    of_targets = logits.gather(1, targets[:, None])[:, 0]
    exact = (logits.logsumexp(1) - of_targets).sum()
    loss = linear_cross_entropy(hidden, head, targets, 1.0, vocab)
    return statistic("the loss of 4,096 tokens", loss, exact, 4096 * U32 * exact)
