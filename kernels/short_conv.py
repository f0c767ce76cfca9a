"""A short causal convolution of each channel over the sequence, used before q, k and v in linear attention
and state space layers (arXiv 2312.00752, section 3.4; arXiv 2412.06464, section 3.3).

    z_t = bias + sum over j of weight_j x_{t - w + 1 + j},  y = z or SiLU(z)

The backward only saves the inputs. On a GPU causal_conv1d runs if it is installed and passes a trial.
"""
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_libraries import Function
from kernels.grad import accumulate_summed_grad, accumulation_dtype
from kernels.sequence_libraries import (
    TRIAL_SHAPE,
    find_library,
    normal_numbers,
    passes_trial,
    trial_documents,
)

BLOCK = 256  # tokens that fit a CPU's caches
LIBRARY_WIDTHS = (2, 3, 4)
LIBRARY_ALIGNMENT = 8  # channels


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    state_documents: Tensor | None = None,
) -> Tensor:
    """x [b, s, c], weight [c, w], whose last tap is for the token itself, bias [c] -> [b, s, c].

    silu applies SiLU after it. state [b, w - 1, c] holds the inputs before x, see inputs_to_pass, by default
    zeros. documents [b, s] are ids: a token only sees inputs of the same document; None for a single one.
    state_documents [b, w - 1] are those of the state, by default that of each sequence's first token.
    """
    state = zero_inputs(x, weight) if state is None else state.to(x.dtype)
    before = None
    if documents is not None:
        first = documents[:, :1].expand(-1, state.shape[1])
        before = torch.cat((first if state_documents is None else state_documents, documents), 1)
    function = choose_library(x, weight, bias, silu, before is not None)
    if function is not None:
        return call_library(function, x, weight, bias, silu, state, before)
    return _ShortConv.apply(x, weight, bias, state, before, silu)


def inputs_to_pass(x: Tensor, width: int, state: Tensor | None = None) -> Tensor:
    """Return the last inputs, the state [b, width - 1, c] after x [b, s, c]. state precedes x, or is zero.

    A rank of context parallelism sends it on before computing anything.
    """
    missing = width - 1 - x.shape[1]
    if missing <= 0:
        return x[:, x.shape[1] - width + 1:]
    if state is None:
        return F.pad(x, (0, 0, missing, 0))
    return torch.cat((state[:, -missing:].to(x.dtype), x), 1)


def zero_inputs(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])


# ---- reference ---------------------------------------------------------------------------------------------
# `inputs` [b, w - 1 + s, c]: the state, then x. `documents` [b, w - 1 + s]: theirs.

def tokens_seen(
    inputs: Tensor, documents: Tensor | None, width: int
) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield for each weight the inputs that it multiplies, one per token; and bool [b, s, 1], whether the
    token sees that input, or None if it does."""
    s = inputs.shape[1] - width + 1
    for j in range(width):
        here = slice(j, j + s)
        seen = None
        if documents is not None and j < width - 1:
            seen = (documents[:, here] == documents[:, width - 1:])[..., None]
        yield here, seen


def blocks(x: Tensor, weight: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of tokens of x, and of the `inputs` that they see."""
    s = x.shape[1]
    length = BLOCK if x.device.type == "cpu" else s
    for start in range(0, s, length):
        end = min(start + length, s)
        yield slice(start, end), slice(start, end + weight.shape[1] - 1)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    """Return z [b, s, c]. All in one dtype."""
    width = weight.shape[1]
    b, length, c = inputs.shape
    out = inputs.new_zeros(b, length - width + 1, c)
    if bias is not None:
        out += bias
    for j, (here, seen) in enumerate(tokens_seen(inputs, documents, width)):
        term = inputs[:, here] if seen is None else inputs[:, here].masked_fill(~seen, 0)
        out.addcmul_(term, weight[:, j])
    return out


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        documents: Tensor | None,
        silu: bool,
    ) -> Tensor:
        inputs, wide_weight, wide_bias = in_one_dtype(x, weight, bias, state)
        out = torch.empty_like(x)
        for tokens, before in blocks(x, weight):
            seen = None if documents is None else documents[:, before]
            z = convolve(inputs[:, before], wide_weight, wide_bias, seen)
            out[:, tokens] = F.silu(z) if silu else z
        ctx.save_for_backward(x, state, documents)
        ctx.weight = weight
        ctx.bias = bias
        ctx.silu = silu
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, state, documents = ctx.saved_tensors
        inputs, weight, bias = in_one_dtype(x, ctx.weight, ctx.bias, state)
        dinputs = torch.zeros_like(inputs)
        dweight = torch.zeros_like(weight)
        dbias = torch.zeros_like(weight[:, 0])
        for tokens, before in blocks(x, weight):
            owners = None if documents is None else documents[:, before]
            dz = dout[:, tokens].to(inputs.dtype)
            if ctx.silu:
                dz = torch.ops.aten.silu_backward(dz, convolve(inputs[:, before], weight, bias, owners))
            for j, (here, seen) in enumerate(tokens_seen(inputs[:, before], owners, weight.shape[1])):
                term = dz if seen is None else dz.masked_fill(~seen, 0)
                dinputs[:, before][:, here].addcmul_(term, weight[:, j])
                dweight[:, j] += (term * inputs[:, before][:, here]).sum((0, 1))
            if bias is not None:
                dbias += dz.sum((0, 1))

        dweight = accumulate_summed_grad(ctx.weight, dweight)
        dbias = None if bias is None else accumulate_summed_grad(ctx.bias, dbias)
        dstate, dx = dinputs.to(x.dtype).split((state.shape[1], x.shape[1]), 1)
        return dx, dweight, dbias, dstate, None, None


def in_one_dtype(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (`inputs`, weight, bias) in fp32 or better."""
    dtype = accumulation_dtype(x.dtype)
    inputs = torch.cat((state, x), 1).to(dtype)
    return inputs, weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)


# ---- causal_conv1d -----------------------------------------------------------------------------------------

class _IntoBuffer(torch.autograd.Function):
    """Pass a weight to a library and send its gradient to where kernels/grad.py puts it."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dweight: Tensor) -> Tensor | None:
        return accumulate_summed_grad(ctx.weight, dweight)


def choose_library(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, has_documents: bool
) -> Function | None:
    """Return the library's function if it supports the call, is installed and passes its trial."""
    c, width = weight.shape
    if width not in LIBRARY_WIDTHS or c % LIBRARY_ALIGNMENT or torch.are_deterministic_algorithms_enabled():
        return None
    function = find_library("short convolution", "causal-conv1d", "causal_conv1d", "causal_conv1d_fn", x)
    if function is None:
        return None
    dtypes = x.dtype, weight.dtype
    works = library_works(function, x.device, dtypes, width, bias is not None, silu, has_documents)
    return function if works else None


def call_library(
    function: Function,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    state: Tensor,
    documents: Tensor | None,
) -> Tensor:
    """Run short_conv by the library's function: channels are adjacent in memory, [b, c, s].

    It takes a state or documents. With documents, the state is prepended to the sequence as its first tokens.
    """
    activation = "silu" if silu else None
    weight = _IntoBuffer.apply(weight)
    bias = None if bias is None else _IntoBuffer.apply(bias)
    if documents is None:
        x, state = (y.contiguous().transpose(1, 2) for y in (x, state))
        return function(x, weight, bias, initial_states=state, activation=activation).transpose(1, 2)
    inputs = torch.cat((state, x), 1).transpose(1, 2)
    out = function(inputs, weight, bias, seq_idx=documents.int().contiguous(), activation=activation)
    return out.transpose(1, 2)[:, state.shape[1]:]


@functools.cache
def library_works(
    function: Function,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    width: int,
    has_bias: bool,
    silu: bool,
    has_documents: bool,
) -> bool:
    """Whether the library computes such calls correctly. dtypes are those of x and of weights."""
    b, s = TRIAL_SHAPE
    c = 64
    shapes = ((b, s, c), (c, width), (b, width - 1, c), (c,))
    x, weight, state, bias = normal_numbers(shapes, device)
    inputs = [x.to(dtypes[0]), weight.to(dtypes[1]), state.to(dtypes[0])]
    if has_bias:
        inputs.append(bias.to(dtypes[1]))
    documents = None
    if has_documents:
        documents = trial_documents(device)
        documents = torch.cat((documents[:, :1].expand(-1, width - 1), documents), 1)

    def by_library(x, weight, state, bias=None) -> tuple[Tensor, ...]:
        return (call_library(function, x, weight, bias, silu, state, documents),)

    def by_definition(x, weight, state, bias=None) -> tuple[Tensor, ...]:
        return (_ShortConv.apply(x, weight, bias, state, documents, silu),)

    what = f"short convolution: {function.__name__} is installed, for {width} weights a channel"
    return passes_trial(what, by_library, by_definition, inputs)
