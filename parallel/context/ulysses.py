"""Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): shard heads inside attention, the sequence elsewhere.

    q, k, v [b, s/n, heads, d] -> [b, s, heads/n, d] -> attention over full sequences -> [b, s/n, heads, d]

q, k and v are sent as one message. The zigzag order is undone on arrival, so masks, windows and kernels are
the same as in one process. n must divide the query heads and the key heads (config rules).

Bytes that a rank sends per layer and microbatch (Q: its queries, K: its keys): 2 Q + 2 K in the forward, and
the same in the backward, each in two all-to-alls. 1/n of that stays on the rank.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from parallel.context import zigzag
from parallel.wire import comm
from parallel.wire.comm import Group


def ulysses_attention(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [b, s/n, h, d], k [b, s/n, g, d], v [b, s/n, g, dv], sharded by zigzag.py -> [b, s/n, h, dv].

    attend(q, k, v) is attention over full sequences,
    [b, s, h/n, d], [b, s, g/n, d], [b, s, g/n, dv] -> [b, s, h/n, dv]. sinks [h] are as for `attention`: they
    are passed as attend(q, k, v, sinks=...), sliced to the rank's heads, which get their gradient there only.
    """
    q, k, v = _SequenceToHeads.apply(q, k, v, group)
    of_heads = {} if sinks is None else {"sinks": sinks.chunk(group.size)[group.index]}
    out = attend(q, k, v, **of_heads)
    return _HeadsToSequence.apply(out, group)


def sequence_to_heads(xs: list[Tensor], group: Group) -> list[Tensor]:
    """[b, s/n, h, d] each, with any h and d -> [b, s, h/n, d] each, in sequence order.

    One all-to-all. Rank r gets the heads r h/n to (r + 1) h/n - 1.
    """
    n = group.size
    by_rank: list[Tensor] = []
    widths: list[int] = []
    for x in xs:
        of_ranks = x.unflatten(2, (n, -1)).flatten(3)  # [b, s/n, n, h/n d]
        by_rank.append(of_ranks)
        widths.append(of_ranks.shape[3])

    to_send = torch.cat(by_rank, 3).movedim(2, 0)  # [n, b, s/n, sum of h/n d]
    received = comm.all_to_all(to_send, group)  # [n, b, s/n, sum of h/n d]
    full = zigzag.unshard_sequence(received)  # [b, s, sum of h/n d]

    out: list[Tensor] = []
    for x, part in zip(xs, full.split(widths, 2)):
        head_dim = x.shape[3]
        out.append(part.unflatten(2, (-1, head_dim)))  # [b, s, h/n, d]
    return out


def heads_to_sequence(xs: list[Tensor], group: Group) -> list[Tensor]:
    """[b, s, h/n, d] each -> [b, s/n, h, d] each. One all-to-all."""
    flat = [x.flatten(2) for x in xs]  # [b, s, h/n d] each
    to_send = zigzag.shard_sequence(torch.cat(flat, 2), group.size)  # [n, b, s/n, sum of h/n d]
    received = comm.all_to_all(to_send, group)  # [n, b, s/n, sum of h/n d]

    widths = [part.shape[2] for part in flat]
    out: list[Tensor] = []
    for x, part in zip(xs, received.split(widths, 3)):
        heads = part.unflatten(3, x.shape[2:])  # [n, b, s/n, h/n, d]
        out.append(heads.movedim(0, 2).flatten(2, 3))
    return out


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(sequence_to_heads([q, k, v], group))

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return (*heads_to_sequence([dq, dk, dv], ctx.group), None)


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return heads_to_sequence([x], group)[0]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return sequence_to_heads([dy], ctx.group)[0], None
