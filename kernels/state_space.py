"""The state space layer of Mamba-2 (arXiv 2405.21060).

Each head has a state S [p, n]. A token decays it, adds to it, and reads it:

    S = exp(dt A) S + dt x B^T
    y = S C + D x

`recurrent_state_space` computes that token by token. Otherwise a chunk of tokens becomes matrix products
(section 6 there). between_ij is the decay from token j to token i, inside_i that from the state before the
chunk, outside_j that to its end:

    Y = tril(C B^T * between) (dt x) + inside C S^T
    S = inside of the last token * S + (outside dt x)^T B

Decays are exponentials of sums that are never positive, so none overflows. On a GPU mamba_ssm runs if it is
installed and passes a trial.
"""
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_libraries import Function, installed_function
from kernels.chunks import by_chunk, document_starts, documents_of_chunk, head_decays
from kernels.grad import accumulation_dtype
from kernels.segments import scan_segments
from kernels.sequence_libraries import (
    TRIAL_SHAPE,
    find_library,
    normal_numbers,
    passes_trial,
    trial_documents,
)

CHUNK = 64  # tokens
SEGMENT = 512  # tokens that the backward recomputes at a time
LIBRARY_CHUNK = 256


class StateSpaceEffect(NamedTuple):
    """How a part of a sequence transforms the state: state_out = decay * state_in + contribution.

    decay is [b, h], contribution [b, h, p, n], both in fp32 or better.
    """
    decay: Tensor
    contribution: Tensor

    def on(self, state: Tensor) -> Tensor:
        """Return the state after the part. [b, h, p, n] -> the same."""
        return self.decay[..., None, None] * state + self.contribution

    def then(self, later: "StateSpaceEffect") -> "StateSpaceEffect":
        """Return the combined effect of this part and the later one."""
        return StateSpaceEffect(later.decay * self.decay, later.on(self.contribution))


def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    state_document: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Let all tokens write and read their head's state, in order: (y [b, s, h, p], the last state).

    x [b, s, h, p]; dt [b, s, h], at least 0; A [h], at most 0; B, C [b, s, g, n], where h is a multiple of g;
    D [h], by default zeros.
    state [b, h, p, n] precedes the first token, by default zeros. The last state is in fp32 or better.
    documents [b, s] are ids of contiguous documents, each starting from a zero state; None for a single one.
    state_document [b] is the document of the token before the first one, by default that of the first.
    chunk is the number of tokens per matrix product; ValueError below 1. A library has a fixed one.
    """
    starts = document_starts(documents, state_document)
    state = zero_state(x, B) if state is None else state
    out, state = read_and_write(x, dt, A, B, C, D, state, starts, chunk)
    assert out is not None  # there is a C
    return out, state


def state_space_effect(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    documents: Tensor | None = None,
    state_document: Tensor | None = None,
    chunk: int = CHUNK,
) -> StateSpaceEffect:
    """Return how these tokens, a rank's part under context parallelism, transform any state before them.
    Arguments are those of state_space.

    The effects of the earlier parts yield the state before a part, from which state_space runs the part.
    """
    starts = document_starts(documents, state_document)
    _, contribution = read_and_write(x, dt, A, B, None, None, zero_state(x, B), starts, chunk)
    decay = log_decays(dt, A).sum(1).exp()
    if starts is not None:
        decay = decay.masked_fill(starts.any(1)[:, None], 0)
    return StateSpaceEffect(decay, contribution)


def read_and_write(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    starts: Tensor | None,
    chunk: int,
) -> tuple[Tensor | None, Tensor]:
    """Run state_space, by a library or in chunks. With C None, nothing is read, and the output is None.

    starts, bool [b, s], comes from document_starts, or is None for one document.
    """
    if chunk < 1:
        raise ValueError(f"the state space layer's chunk is {chunk} tokens: it must be at least 1")
    state = state.to(accumulation_dtype(x.dtype))
    function = choose_library(x, B, has_skip=D is not None, has_documents=starts is not None)
    if function is not None:
        return call_library(function, x, dt, A, B, C, D, state, starts)

    b, s, h, _ = x.shape
    skip = None if D is None else D.to(state.dtype).expand(b, s, h)  # so its gradients are summed in fp32
    step = functools.partial(state_space_segment, chunk=chunk)
    tensors = (x, dt, log_decays(dt, A), B, C, skip, starts)
    length = chunk * max(1, SEGMENT // chunk)
    out, state = scan_segments(step, state.transpose(2, 3), tensors, length)
    return out, state.transpose(2, 3)


def zero_state(x: Tensor, B: Tensor) -> Tensor:
    """Return zeros [b, h, p, n] in fp32 or better."""
    b, _, h, p = x.shape
    return x.new_zeros(b, h, p, B.shape[-1], dtype=accumulation_dtype(x.dtype))


def log_decays(dt: Tensor, A: Tensor) -> Tensor:
    """Return dt A: [b, s, h], in fp32 or better."""
    dtype = accumulation_dtype(dt.dtype)
    return dt.to(dtype) * A.to(dtype)


# ---- token by token ----------------------------------------------------------------------------------------

def recurrent_state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    state_document: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference; with one token, a step of generation. Arguments and results as for state_space."""
    out_dtype = x.dtype
    dtype = accumulation_dtype(x.dtype)
    state = zero_state(x, B) if state is None else state.to(dtype)
    starts = document_starts(documents, state_document)
    decay = log_decays(dt, A).exp()
    heads_per_group = x.shape[2] // B.shape[2]
    B, C = (y.repeat_interleave(heads_per_group, 2).to(dtype) for y in (B, C))
    x = x.to(dtype)
    added = dt.to(dtype)[..., None] * x

    out: list[Tensor] = []
    for t in range(x.shape[1]):
        if starts is not None:
            state = state.masked_fill(starts[:, t, None, None, None], 0)
        state = decay[:, t, :, None, None] * state + added[:, t, :, :, None] * B[:, t, :, None, :]
        y = torch.einsum("bhpn,bhn->bhp", state, C[:, t])
        out.append(y if D is None else y + D.to(dtype)[:, None] * x[:, t])
    return torch.stack(out, 1).to(out_dtype), state


# ---- in chunks ---------------------------------------------------------------------------------------------
# m chunks of T tokens; r heads share a B and a C. The state is [b, g, n, r p] here: one GEMM for r heads.

def state_space_segment(
    state: Tensor, parts: Sequence[Tensor | None], *, chunk: int
) -> tuple[Tensor | None, Tensor]:
    """Run read_and_write on a segment of tokens: (output in x's dtype, or None; the state after them).

    state [b, h, n, p] is in fp32 or better. parts are x, dt, dt A, B, C (or None), D [b, s, h] (or None) and
    starts (or None) of these tokens.
    """
    x, dt, log_decay, B, C, skip, starts = parts
    assert x is not None and dt is not None and log_decay is not None and B is not None
    b, s, h, p = x.shape
    groups, n = B.shape[2:]
    shape = (groups, h // groups)
    out_dtype = x.dtype
    tokens = x.to(state.dtype)  # only once, so that both gradients of x are added in fp32
    document = None if starts is None else documents_of_chunk(starts, chunk)
    x, dt, log_decay, B = (by_chunk(y, chunk, state.dtype) for y in (tokens, dt[..., None], log_decay, B))
    x = x * dt  # [m, b, h, T, p]
    between, inside, outside = head_decays(log_decay, document)

    # from chunk to chunk
    added = B.transpose(-1, -2) @ side_by_side(x * outside, groups)  # [m, b, g, n, r p]
    carried = inside[..., -1, :].unflatten(2, shape)[:, :, :, None]  # [m, b, g, 1, r, 1]
    state = state.unflatten(1, shape).transpose(2, 3)  # [b, g, n, r, p]
    states: list[Tensor] = []
    for one_carried, one_added in zip(carried.unbind(), added.unflatten(-1, (-1, p)).unbind()):
        states.append(state)
        state = one_carried * state + one_added
    last_state = state.transpose(2, 3).flatten(1, 2)
    if C is None:
        return None, last_state

    # outputs of the tokens
    C = by_chunk(C, chunk, state.dtype)
    pairs = (C @ B.transpose(-1, -2))[:, :, :, None] * between.unflatten(2, shape)  # [m, b, g, r, T, T]
    read = C @ torch.stack(states).flatten(-2)  # [m, b, g, T, r p]
    read = read.unflatten(-1, (-1, p)).transpose(3, 4)
    out = pairs @ x.unflatten(2, shape) + inside.unflatten(2, shape) * read
    out = out.permute(1, 0, 4, 2, 3, 5).reshape(b, -1, h, p)[:, :s]
    if skip is not None:
        out = out + skip[..., None] * tokens
    return out.to(out_dtype), last_state


def side_by_side(x: Tensor, groups: int) -> Tensor:
    """Concatenate the heads of a group as columns: [m, b, h, T, p] -> [m, b, g, T, r p]."""
    return x.unflatten(2, (groups, -1)).transpose(3, 4).flatten(-2)


# ---- mamba_ssm ---------------------------------------------------------------------------------------------

def choose_library(x: Tensor, B: Tensor, has_skip: bool, has_documents: bool) -> Function | None:
    """Return the library's function if it supports the call, is installed and passes its trial."""
    module = "mamba_ssm.ops.triton.ssd_combined"
    function = find_library("state space", "mamba-ssm", module, "mamba_chunk_scan_combined", x, B)
    if function is None:
        return None
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and installed_function("mamba_ssm.utils.determinism", "use_deterministic_mode") is None:
        return None  # earlier versions sum in arbitrary order
    dims = x.shape[-1], B.shape[-1]
    heads_per_group = x.shape[2] // B.shape[2]
    works = library_works(function, x.device, x.dtype, heads_per_group, dims, has_skip, has_documents)
    return function if works else None


def call_library(
    function: Function,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run read_and_write by the library's function, for which the preceding state belongs to document 0."""
    index = None
    if starts is not None:
        state = state.masked_fill(starts[:, 0, None, None, None], 0)
        index = (starts.cumsum(1) - starts[:, :1].long()).int()
    out, state = function(
        x, dt, A.float(), B, B if C is None else C, LIBRARY_CHUNK,
        D=D,
        initial_states=state,
        seq_idx=index,
        return_final_states=True,
    )
    return out, state


@functools.cache
def library_works(
    function: Function,
    device: torch.device,
    dtype: torch.dtype,
    heads_per_group: int,
    dims: tuple[int, int],
    has_skip: bool,
    has_documents: bool,
) -> bool:
    """Whether the library computes such calls correctly. dims are p and n."""
    b, s = TRIAL_SHAPE
    h = 2 * heads_per_group
    p, n = dims
    shapes = ((b, s, h, p), (b, s, h), (h,), (b, s, 2, n), (b, s, 2, n), (b, h, p, n), (h,))
    x, dt, A, B, C, state, D = normal_numbers(shapes, device)
    inputs = [x.to(dtype), F.softplus(dt - 2), -A.exp(), B.to(dtype), C.to(dtype), state]
    if has_skip:
        inputs.append(D)
    starts = document_starts(trial_documents(device), None) if has_documents else None

    def by_library(x, dt, A, B, C, state, D=None) -> tuple[Tensor, ...]:
        return call_library(function, x, dt, A, B, C, D, state, starts)

    def by_definition(x, dt, A, B, C, state, D=None) -> tuple[Tensor, ...]:
        skip = None if D is None else D.expand(b, s, h)
        parts = (x, dt, log_decays(dt, A), B, C, skip, starts)
        out, state = state_space_segment(state.transpose(2, 3), parts, chunk=CHUNK)
        return out, state.transpose(2, 3)

    what = f"state space: {function.__name__} is installed, for head dims {p} and {n}"
    return passes_trial(what, by_library, by_definition, inputs)
