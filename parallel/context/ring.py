"""Ring attention (arXiv 2310.01889): keys and values travel around the cp group, queries stay.

Each of n ranks holds s/n tokens of every sequence (zigzag.py). At step t, rank r holds rank r - t's keys.
It attends to them (kernels/partial_attention.py) while they are already in flight to rank r + 1. The backward
sends keys and values around again, followed by their gradients in fp32 or better: each rank adds its share to
the gradients it receives and forwards them. After the last step they are one rank away from their owner. A
rank adds the share of its own keys itself.

Bytes that a rank sends per layer and microbatch (K: its keys and values together, in the compute dtype;
K': the same in fp32 or better):

    forward     (n - 1) K                    in n - 1 transfers
    backward    (n - 1) K + (n - 1) K'       in 2 (n - 1) transfers
"""
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.attention_mask import AttentionMask
from kernels.attention_scores import ScoreForm, join_sinks
from kernels.partial_attention import attention_part, merge_partial, partial_backward
from parallel.context.zigzag import chunk_mask, visible_chunk_pairs
from parallel.wire import comm
from parallel.wire.comm import Group, Transfer

Passing = tuple[Tensor, list[Transfer]]  # a buffer, and the transfers that fill it
VisibleSlices = tuple[slice, slice, Tensor | AttentionMask | None]  # (queries, keys, mask)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int | None,
    group: Group,
    mask: AttentionMask | None = None,
    *,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks.

    q [b, s/n, h, d], k [b, s/n, g, d], v [b, s/n, g, dv], sharded by zigzag.py -> [b, s/n, h, dv].
    documents [b, s] is the document of each token of the full sequence, or None for a single document. window
    is in tokens; with None a query sees all earlier keys. chunk: see make_attention_mask. mask is built from
    these three for full sequences; with None (on a CPU) each step builds its own. scale, softcap and sinks
    are as for `attention`; a rank holds the gradient of the sinks from its own queries only.
    """
    form = ScoreForm(scale, softcap)
    out, lse = _RingAttention.apply(q, k, v, documents, window, chunk, mask, form, group)
    return out if sinks is None else join_sinks(out, lse, sinks)


def send_to_next_rank(x: Tensor, group: Group) -> Passing:
    """Start sending x to the next rank and receiving as much from the previous one: two transfers."""
    next_rank = (group.index + 1) % group.size
    previous_rank = (group.index - 1) % group.size
    received = torch.empty_like(x)
    transfers = comm.start_transfers(
        sends=[(x, next_rank)],
        receives=[(received, previous_rank)],
        group=group,
    )
    return received, transfers


def wait_received(passing: Passing | None) -> Tensor:
    """Wait for the previous rank's data. Raise ValueError if nothing was sent, as in a ring of one rank."""
    if passing is None:
        raise ValueError("nothing is in flight in a ring of one rank")
    received, transfers = passing
    for transfer in transfers:
        transfer.wait()
    return received


def visible_slices(
    q: Tensor,
    documents: Tensor | None,
    window: int | None,
    chunk: int | None,
    full_mask: AttentionMask | None,
    group: Group,
    step: int,
) -> Iterator[VisibleSlices]:
    """Yield what this rank's queries see at a step of the ring: (queries, keys, mask), as local slices."""
    chunk_size = q.shape[1] // 2
    halves = (slice(0, chunk_size), slice(chunk_size, 2 * chunk_size))
    source = (group.index - step) % group.size
    farthest = min((limit for limit in (window, chunk) if limit is not None), default=None)
    for pair in visible_chunk_pairs(group.index, source, group.size, chunk_size=chunk_size, window=farthest):
        queries = halves[pair.query_half]
        keys = halves[pair.key_half]
        mask = chunk_mask(
            pair, chunk_size,
            window=window,
            documents=documents,
            device=q.device,
            mask=full_mask,
            attention_chunk=chunk,
        )
        yield queries, keys, mask


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int | None,
        chunk: int | None,
        mask: AttentionMask | None,
        form: ScoreForm,
        group: Group,
    ) -> tuple[Tensor, Tensor]:
        # running output and logsumexp of the scores so far
        sum_dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=sum_dtype)  # [b, s/n, h, dv]
        lse = out.new_full(q.shape[:3], float("-inf"))  # [b, s/n, h]

        widths = (k.shape[-1], v.shape[-1])
        kv = torch.cat((k, v), -1)  # [b, s/n, g, d + dv]: one message
        for step in range(group.size):
            # posted first, to overlap with the computation
            is_last = step == group.size - 1
            passing = None if is_last else send_to_next_rank(kv, group)
            step_k, step_v = kv.split(widths, -1)
            for queries, keys, part in visible_slices(q, documents, window, chunk, mask, group, step):
                part_out, part_lse = attention_part(
                    q[:, queries], step_k[:, keys], step_v[:, keys], part,
                    form=form,
                )
                merge_partial(out[:, queries], lse[:, queries], part_out, part_lse)
            if passing is not None:
                kv = wait_received(passing)

        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, out, lse)
        ctx.set_materialize_grads(False)  # without sinks, the logsumexp has no gradient
        ctx.window = window
        ctx.chunk = chunk
        ctx.mask = mask
        ctx.form = form
        ctx.group = group
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, documents, out, lse = ctx.saved_tensors
        group: Group = ctx.group
        widths = (k.shape[-1], v.shape[-1])
        delta = (dout.to(lse.dtype) * out).sum(-1)  # [b, s/n, h]
        if dlse is not None:
            delta = delta - dlse
        dq = torch.zeros_like(q, dtype=lse.dtype)

        kv = torch.cat((k, v), -1)
        own_dkv = torch.zeros_like(kv, dtype=lse.dtype)  # gradients of this rank's keys and values
        dkv_passing: Passing | None = None  # gradients of other ranks' keys and values, in flight to them

        for step in range(group.size):
            is_last = step == group.size - 1
            passing = None if is_last else send_to_next_rank(kv, group)

            # gradients of the keys and values held at this step
            dkv = own_dkv if step == 0 else torch.zeros_like(own_dkv)
            step_k, step_v = kv.split(widths, -1)
            step_dk, step_dv = dkv.split(widths, -1)
            slices = visible_slices(q, documents, ctx.window, ctx.chunk, ctx.mask, group, step)
            for queries, keys, part in slices:
                partial_backward(
                    dout=dout[:, queries],
                    q=q[:, queries],
                    k=step_k[:, keys],
                    v=step_v[:, keys],
                    mask=part,
                    lse=lse[:, queries],
                    delta=delta[:, queries],
                    into=(dq[:, queries], step_dk[:, keys], step_dv[:, keys]),
                    add=True,
                    form=ctx.form,
                )

            # from step 1 on they belong to another rank and follow its keys
            if step == 1:
                dkv_passing = send_to_next_rank(dkv, group)
            elif step > 1:
                dkv_passing = send_to_next_rank(dkv + wait_received(dkv_passing), group)
            if passing is not None:
                kv = wait_received(passing)

        dkv = own_dkv
        if group.size > 1:
            dkv = dkv + wait_received(dkv_passing)
        dk, dv = dkv.to(k.dtype).split(widths, -1)
        return dq.to(q.dtype), dk, dv, *[None] * 6
