"""The gated delta rule (arXiv 2412.06464), and its variant with a gate per channel: Kimi delta attention
(arXiv 2510.26692).

Each head has a state S [d_k, d_v], which maps keys to values. A token decays it, replaces a fraction beta of
the value stored for the token's key, and reads it with the query:

    S  = diag(exp(g)) S
    S += beta k (v - S^T k)^T
    o  = scale S^T q

`recurrent_delta_rule` computes that token by token. Otherwise a chunk of C tokens becomes matrix products
(arXiv 2406.06484). D_ij is the decay from token j to token i, in_i that from the state before the chunk,
out_j that to its end:

    T = (1 + tril(beta_i <k_i, D_ij k_j>, -1))^-1
    N = T (beta v) - T (beta in k) S         what each token writes
    o = scale ((in q) S + tril(<q_i, D_ij k_j>) N)
    S = diag(in_C) S + (out k)^T N

Decays are exponentials of sums that are never positive, so none overflows. With a gate per channel, D_ij
stays inside the inner product. A chunk is then halved recursively into blocks: from a token in the first half
of a block to one in its second half, the decay is that to the middle times that from the middle.

On a GPU flash-linear-attention runs if it is installed and passes a trial.
"""
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_libraries import Function
from kernels.attention_mask import DocumentCounts, document_ends
from kernels.chunks import (
    by_chunk,
    by_token,
    document_starts,
    documents_of_chunk,
    head_decays,
    visible_pairs,
    within_document,
)
from kernels.grad import accumulation_dtype
from kernels.segments import scan_segments
from kernels.sequence_libraries import (
    TRIAL_LENGTHS,
    TRIAL_SHAPE,
    find_library,
    normal_numbers,
    passes_trial,
    trial_documents,
)

CHUNK = 64  # tokens
SEGMENT = 512  # tokens that the backward recomputes at a time

# flash-linear-attention: {whether there is a gate per channel: (module, function)}
LIBRARY_FUNCTIONS = {
    False: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    True: ("fla.ops.kda", "chunk_kda"),
}
MAX_LIBRARY_KEYS = 256  # channels of a key


class DeltaRuleEffect(NamedTuple):
    """How a part of a sequence transforms the state: state_out = transition @ state_in + contribution.

    transition is [b, h, d_k, d_k], contribution [b, h, d_k, d_v], both in fp32 or better.
    """
    transition: Tensor
    contribution: Tensor

    def on(self, state: Tensor) -> Tensor:
        """Return the state after the part. [b, h, d_k, d_v] -> the same."""
        return self.transition @ state + self.contribution

    def then(self, later: "DeltaRuleEffect") -> "DeltaRuleEffect":
        """Return the combined effect of this part and the later one."""
        return DeltaRuleEffect(later.transition @ self.transition, later.on(self.contribution))


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    state_document: Tensor | None = None,
    counts: DocumentCounts | None = None,
    scale: float | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Let all tokens write and read their head's state, in order: (output [b, s, h, d_v], the last state).

    q, k [b, s, h_k, d_k], v [b, s, h, d_v], where h is a multiple of h_k; they are not normalized here.
    g is the logarithm of the decay, finite and at most 0: [b, s, h], or for each channel of a key
    [b, s, h, d_k]. beta is [b, s, h]. scale multiplies the output, and defaults to 1 / sqrt(d_k).
    state [b, h, d_k, d_v] precedes the first token, by default zeros. The last state is in fp32 or better.
    documents [b, s] are ids of contiguous documents, each starting from a zero state; None for a single one.
    state_document [b] is the document of the token before the first one, by default that of the first.
    counts describes documents; with None the host does not know them, so the library cannot take them.
    chunk is the number of tokens per matrix product, a power of 2, else ValueError. A library has a fixed
    one.
    """
    if state is None:
        state = zero_state(k, v)
    starts = document_starts(documents, state_document)
    ends = library_ends(documents, counts)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    out, state = read_and_write(q, k, v, g, beta, state, starts, ends, scale=scale, chunk=chunk)
    assert out is not None  # there are queries
    return out, state


def delta_rule_effect(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    documents: Tensor | None = None,
    state_document: Tensor | None = None,
    counts: DocumentCounts | None = None,
    chunk: int = CHUNK,
) -> DeltaRuleEffect:
    """Return how these tokens, a rank's part under context parallelism, transform any state before them.
    Arguments are those of delta_rule.

    The effects of the earlier parts yield the state before a part, from which delta_rule runs the part.
    """
    zeros = zero_state(k, v)
    identity = torch.eye(k.shape[-1], dtype=zeros.dtype, device=k.device)
    state = torch.cat((identity.expand(*zeros.shape[:2], -1, -1), zeros), -1)  # [b, h, d_k, d_k + d_v]
    starts = document_starts(documents, state_document)
    ends = library_ends(documents, counts)
    _, state = read_and_write(None, k, v, g, beta, state, starts, ends, scale=1.0, chunk=chunk)
    return DeltaRuleEffect(*state.split((k.shape[-1], v.shape[-1]), -1))


def read_and_write(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    *,
    scale: float,
    chunk: int,
) -> tuple[Tensor | None, Tensor]:
    """Run delta_rule, by a library or in chunks. With q None, nothing is read, and the output is None.

    state is [b, h, d_k, columns]: of more columns than d_v, v writes the last ones, and zeros the others.
    starts, bool [b, s], comes from document_starts, or is None for one document. ends: see library_ends.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"the delta rule's chunk is {chunk} tokens: it must be a power of 2")
    if g.shape not in (beta.shape, (*beta.shape, k.shape[-1])):
        raise ValueError(f"the delta rule's gate is {list(g.shape)}: [b, s, h] or [b, s, h, d_k] is expected")
    state = state.to(accumulation_dtype(k.dtype))
    if starts is None or ends is not None:
        function = choose_library(k, v, state, g, has_documents=starts is not None)
        if function is not None:
            return call_library(function, q, k, v, g, beta, state, starts, ends, scale)
    step = functools.partial(delta_rule_segment, scale=scale, chunk=chunk)
    return scan_segments(step, state, (q, k, v, g, beta, starts), max(chunk, SEGMENT))


def zero_state(k: Tensor, v: Tensor) -> Tensor:
    """Return zeros [b, h, d_k, d_v] in fp32 or better."""
    dtype = accumulation_dtype(k.dtype)
    return k.new_zeros(k.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=dtype)


# ---- token by token ----------------------------------------------------------------------------------------

def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    state_document: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference; with one token, a step of generation. Arguments and results as for delta_rule."""
    out_dtype = v.dtype
    dtype = accumulation_dtype(k.dtype)
    state = zero_state(k, v) if state is None else state.to(dtype)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    starts = document_starts(documents, state_document)
    heads_per_key = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(heads_per_key, 2) for x in (q, k))
    if g.dim() == 3:
        g = g[..., None]
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))

    out: list[Tensor] = []
    for t in range(k.shape[1]):
        if starts is not None:
            state = state.masked_fill(starts[:, t, None, None, None], 0)
        state = state * g[:, t, :, :, None].exp()
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * (v[:, t] - held)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1).to(out_dtype), state


# ---- in chunks ---------------------------------------------------------------------------------------------
# n chunks of C tokens. Per-token tensors are [n, b, h, C, ...].

class Decays(NamedTuple):
    """Decays of a chunk. `query_pairs` [n, b, h, C, C] is <q_i, D_ij k_j>, 0 if token i does not see token j;
    None without queries. `key_pairs` is <k_i, D_ij k_j> likewise. `inside` and `outside` [n, b, h, C, 1 or
    d_k] are in_i and out_i, 0 if another document starts in between."""
    query_pairs: Tensor | None
    key_pairs: Tensor
    inside: Tensor
    outside: Tensor


def delta_rule_segment(
    state: Tensor, parts: Sequence[Tensor | None], *, scale: float, chunk: int
) -> tuple[Tensor | None, Tensor]:
    """Run read_and_write on a segment of tokens: (output in v's dtype, or None; the state after them).

    parts are q (or None), k, v, g, beta and starts (or None) of these tokens. state is in fp32 or better.
    """
    q, k, v, g, beta, starts = parts
    assert k is not None and v is not None and g is not None and beta is not None
    s = k.shape[1]
    out_dtype = v.dtype
    heads_per_key = v.shape[2] // k.shape[2]
    k, v, g, beta = (by_chunk(x, chunk, state.dtype) for x in (k, v, g, beta[..., None]))
    k = k.repeat_interleave(heads_per_key, 2)
    if q is not None:
        q = by_chunk(q, chunk, state.dtype).repeat_interleave(heads_per_key, 2) * scale
    document = None if starts is None else documents_of_chunk(starts, chunk)
    decays = (decays_of_heads if g.dim() == 4 else decays_of_channels)(q, k, g, document)

    # what each token would write without a state, and what the state subtracts from that
    system = beta * decays.key_pairs
    sides = torch.cat((beta * k * decays.inside, beta * v), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    taken, written = solved.split((k.shape[-1], v.shape[-1]), -1)
    written = F.pad(written, (state.shape[-1] - v.shape[-1], 0))

    # from chunk to chunk
    keys_out = (k * decays.outside).transpose(-1, -2)  # [n, b, h, d_k, C]
    carried = decays.inside[..., -1:, :].transpose(-1, -2)  # [n, b, h, 1 or d_k, 1]
    states: list[Tensor] = []
    writes: list[Tensor] = []
    for one_taken, one_written, one_keys, one_carried in zip(
        taken.unbind(), written.unbind(), keys_out.unbind(), carried.unbind()
    ):
        states.append(state)
        write = one_written - one_taken @ state
        writes.append(write)
        state = one_carried * state + one_keys @ write
    if q is None:
        return None, state

    assert decays.query_pairs is not None
    out = (q * decays.inside) @ torch.stack(states) + decays.query_pairs @ torch.stack(writes)
    return by_token(out, s).to(out_dtype), state


def decays_of_heads(q: Tensor | None, k: Tensor, g: Tensor, document: Tensor | None) -> Decays:
    """Decays with one gate per head: q, k [n, b, h, C, d_k], g [n, b, h, C]; see documents_of_chunk."""
    between, inside, outside = head_decays(g, document)
    columns = k.transpose(-1, -2)
    query_pairs = None if q is None else (q @ columns) * between
    return Decays(query_pairs, (k @ columns) * between, inside, outside)


def decays_of_channels(q: Tensor | None, k: Tensor, g: Tensor, document: Tensor | None) -> Decays:
    """Decays with a gate per channel: q, k, g [n, b, h, C, d_k].

    Starts from blocks of one token and merges them pairwise. `inside` and `outside` are the logarithms of the
    decays from a block's start and to its end, summed without a difference.
    """
    chunk = k.shape[-2]
    rows = (k,) if q is None else (q, k)
    pairs = [(row * k).sum(-1)[..., None, None] for row in rows]  # [n, b, h, blocks, size, size]
    inside, outside = g, torch.zeros_like(g)
    size = 1
    while size < chunk:
        first_inside, last_inside = halves(inside, size)  # [n, b, h, blocks, size, d_k]
        first_outside, last_outside = halves(outside, size)
        from_middle = last_inside.exp()
        to_middle = halves(k, size)[0] * first_outside.exp()
        late_rows = torch.cat([halves(row, size)[1] * from_middle for row in rows], -2)
        across = (late_rows @ to_middle.transpose(-1, -2)).split(size, -2)
        pairs = [join_blocks(*halves_of_blocks(x), y) for x, y in zip(pairs, across, strict=True)]

        inside = torch.cat((first_inside, last_inside + first_inside[..., -1:, :]), -2).flatten(-3, -2)
        outside = torch.cat((first_outside + last_inside[..., -1:, :], last_outside), -2).flatten(-3, -2)
        size *= 2

    hidden = ~visible_pairs(g[..., 0], document)
    pairs = [x.squeeze(-3).masked_fill(hidden, 0) for x in pairs]
    inside, outside = within_document(inside.exp(), outside.exp(), document)
    return Decays(None if q is None else pairs[0], pairs[-1], inside, outside)


def halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return both halves of blocks of 2 `size` tokens: [..., C, d] -> two [..., blocks, size, d]."""
    first, last = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return first, last


def halves_of_blocks(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return even and odd matrices: [..., 2 blocks, size, size] -> two [..., blocks, size, size]."""
    first, second = pairs.unflatten(-3, (-1, 2)).unbind(-3)
    return first, second


def join_blocks(first: Tensor, second: Tensor, across: Tensor) -> Tensor:
    """Return [first 0; across second] of matrices [..., size, size] -> [..., 2 size, 2 size]."""
    upper = torch.cat((first, torch.zeros_like(first)), -1)
    lower = torch.cat((across, second), -1)
    return torch.cat((upper, lower), -2)


# ---- flash-linear-attention --------------------------------------------------------------------------------

def library_ends(documents: Tensor | None, counts: DocumentCounts | None) -> Tensor | None:
    """Return document_ends, or None if there is one document or the host does not know."""
    return None if documents is None or counts is None else document_ends(documents, counts.number)


def choose_library(k: Tensor, v: Tensor, state: Tensor, g: Tensor, has_documents: bool) -> Function | None:
    """Return the library's function if it supports the call, is installed and passes its trial."""
    per_channel = g.dim() == 4
    module, name = LIBRARY_FUNCTIONS[per_channel]
    if k.shape[-1] > MAX_LIBRARY_KEYS:
        return None
    function = find_library("delta rule", "flash-linear-attention", module, name, k, v)
    heads = k.shape[2], v.shape[2]
    dims = k.shape[-1], state.shape[-1]
    if function is None or not library_works(
        function, k.device, k.dtype, heads[1] // heads[0], dims, per_channel, has_documents
    ):
        return None
    return function


def call_library(
    function: Function,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    scale: float,
) -> tuple[Tensor | None, Tensor]:
    """Run read_and_write by the library, which takes documents as one sequence, with a state for each."""
    b, s = k.shape[:2]
    v = F.pad(v, (state.shape[-1] - v.shape[-1], 0))
    tensors = (k if q is None else q, k, v, g.float(), beta)
    options: dict[str, object] = {}
    if starts is not None and ends is not None:
        # a sequence's state belongs to its first document, unless a different one starts there
        state = state.masked_fill(starts[:, 0, None, None, None], 0)
        sequences = torch.arange(0, b * s, s, dtype=ends.dtype, device=ends.device)
        first = torch.searchsorted(ends, sequences)
        state = state.new_zeros(len(ends) - 1, *state.shape[1:]).index_copy(0, first, state)
        tensors = tuple(x.flatten(0, 1)[None] for x in tensors)
        options["cu_seqlens"] = ends.long()
    q, k, v, g, beta = tensors
    out, state = function(
        q=q, k=k, v=v, g=g, beta=beta,
        scale=scale,
        initial_state=state,
        output_final_state=True,
        **options,
    )
    if starts is not None and ends is not None:
        out = out.view(b, s, *out.shape[2:])
        last = torch.searchsorted(ends, sequences + s) - 1
        state = state[last]
    return out, state


@functools.cache
def library_works(
    function: Function,
    device: torch.device,
    dtype: torch.dtype,
    heads_per_key: int,
    dims: tuple[int, int],
    per_channel: bool,
    has_documents: bool,
) -> bool:
    """Whether the library computes such calls correctly. dims are those of keys and columns of the state."""
    b, s = TRIAL_SHAPE
    h = 2 * heads_per_key
    d, columns = dims
    gate = (b, s, h, d) if per_channel else (b, s, h)
    shapes = ((b, s, 2, d), (b, s, 2, d), (b, s, h, columns), gate, (b, s, h), (b, h, d, columns))
    q, k, v, g, beta, state = normal_numbers(shapes, device)
    inputs = (*(x.to(dtype) for x in (q, F.normalize(k, dim=-1), v)), F.logsigmoid(g), beta.sigmoid(), state)
    starts = ends = None
    if has_documents:
        documents = trial_documents(device)
        starts = document_starts(documents, None)
        ends = document_ends(documents, len(TRIAL_LENGTHS) + 1)  # one continues in the second sequence

    def by_library(*tensors: Tensor) -> tuple[Tensor, ...]:
        return call_library(function, *tensors, starts, ends, 1.0)

    def by_definition(*tensors: Tensor) -> tuple[Tensor, ...]:
        *tensors, state = tensors
        return delta_rule_segment(state, (*tensors, starts), scale=1.0, chunk=CHUNK)

    what = f"delta rule: {function.__name__} is installed, for head dims {dims[0]} and {dims[1]}"
    return passes_trial(what, by_library, by_definition, inputs)
