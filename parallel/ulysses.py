"""Context parallelism by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509): cut along the sequence everywhere, along the heads
inside attention.

    q, k, v  [b, s/n, heads, d]  ->  [b, s, heads/n, d]  -> any attention over whole sequences ->  [b, s/n, heads, d]

q, k and v travel as one message. The zigzag order is undone on arrival, so masks, windows and kernels are those of one
process. Needs query and key heads that n divides (rules.validate says so).

On the wire, a rank, layer and microbatch; Q, K: bytes of its queries and keys: 2 Q + 2 K forward, the same backward, in two
all-to-alls each, of which 1/n stays on the rank.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from parallel import comm, zigzag
from parallel.comm import Group


def ulysses_attention(attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """attend(q, k, v): attention of whole sequences, [b, s, h/n, d], [b, s, g/n, d], [b, s, g/n, dv] -> [b, s, h/n, dv].
    q [b, s/n, h, d], k [b, s/n, g, d], v [b, s/n, g, dv], cut by parallel/zigzag.py -> [b, s/n, h, dv]."""
    return _ToSequence.apply(attend(*_ToHeads.apply(q, k, v, group)), group)


def to_heads(xs: list[Tensor], group: Group) -> list[Tensor]:
    """[b, s/n, h, d] each, h and d their own -> [b, s, h/n, d] each, in the order of the sequence. One exchange."""
    n = group.size
    parts = torch.cat([x.unflatten(2, (n, -1)).flatten(3) for x in xs], 3)  # [b, s/n, n, sum of h/n d]: heads r h/n ... go to rank r
    whole = zigzag.join(comm.all_to_all(parts.movedim(2, 0), group))
    return [y.unflatten(2, (-1, x.shape[3])) for x, y in zip(xs, whole.split([x.shape[2] // n * x.shape[3] for x in xs], 2))]


def to_sequence(xs: list[Tensor], group: Group) -> list[Tensor]:
    """The way back: [b, s, h/n, d] each -> [b, s/n, h, d] each."""
    parts = comm.all_to_all(zigzag.split(torch.cat([x.flatten(2) for x in xs], 2), group.size), group)  # [n, b, s/n, sum of h/n d]
    back = zip(xs, parts.split([x.shape[2] * x.shape[3] for x in xs], 3))
    return [y.unflatten(3, x.shape[2:]).movedim(0, 2).flatten(2, 3) for x, y in back]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group = group
        return tuple(to_heads([q, k, v], group))

    @staticmethod
    def backward(ctx, dq, dk, dv):
        return (*to_sequence([dq, dk, dv], ctx.group), None)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return to_sequence([x], group)[0]

    @staticmethod
    def backward(ctx, dy):
        return to_heads([dy], ctx.group)[0], None
