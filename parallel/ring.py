"""Ring attention (arXiv 2310.01889) over a zigzag cut: keys and values go round the cp group, queries stay.

Each of n ranks holds s/n tokens of every sequence. At step t rank r has the keys of rank r - t: it adds what its queries see
there (kernels/partial_attention.py) while those keys are already on their way to rank r + 1. The backward sends keys and
values round again, and behind them their gradients, in fp32 or better: each rank adds its share to those that arrive and
sends them on; after the last step they are one hop from home. A rank adds the share of its own keys itself.

On the wire, a rank, layer and microbatch; K: bytes of its keys (as many values), in the compute dtype; K': in fp32 or better:

    forward     2 (n - 1) K               in n - 1 transfers
    backward    2 (n - 1) K + 2 (n - 1) K'      2 (n - 1) transfers
"""
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.partial_attention import merge, partial, partial_backward
from parallel import comm
from parallel.comm import Group
from parallel.zigzag import meetings, sight


def ring_attention(q: Tensor, k: Tensor, v: Tensor, docs: Tensor | None, window: int | None, group: Group) -> Tensor:
    """Causal attention of this rank's queries over all keys of the group. q [b, s/n, h, d], k [b, s/n, g, d], v [b, s/n, g, dv],
    cut by parallel/zigzag.py; docs [b, s]: of the whole sequence; window: in tokens -> [b, s/n, h, dv]."""
    return _Ring.apply(q, k, v, docs, window, group)


def pass_on(x: Tensor, group: Group) -> tuple[Tensor, list]:
    """Start sending x to the next rank -> (what the rank before sends, once the works are done; the works)."""
    arriving = torch.empty_like(x)
    return arriving, comm.exchange([(x, (group.index + 1) % group.size)], [(arriving, (group.index - 1) % group.size)], group)


def arrived(transfer: tuple[Tensor, list]) -> Tensor:
    x, works = transfer
    for work in works:
        work.wait()
    return x


def visits(q: Tensor, docs: Tensor | None, window: int | None, group: Group, step: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """What this rank's queries see at this step of the ring: (queries, keys, see), the first two as slices of local tokens."""
    c = q.shape[1] // 2
    for m in meetings(group.index, (group.index - step) % group.size, group.size, c, window):
        yield slice(m.query * c, (m.query + 1) * c), slice(m.key * c, (m.key + 1) * c), sight(m, c, window, docs, q.device)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, docs, window, group):
        n = group.size
        out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=torch.promote_types(q.dtype, torch.float32))
        lse = out.new_full(q.shape[:3], float("-inf"))
        kv = torch.cat((k, v), -1)  # [b, 2c, g, d + dv]: one message
        for step in range(n):
            coming = pass_on(kv, group) if step < n - 1 else None  # posted first: it travels while we compute
            ks, vs = kv.split((k.shape[-1], v.shape[-1]), -1)
            for rows, keys, see in visits(q, docs, window, group, step):
                merge(out[:, rows], lse[:, rows], *partial(q[:, rows], ks[:, keys], vs[:, keys], see))
            kv = arrived(coming) if coming else kv
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, docs, out, lse)
        ctx.window, ctx.group = window, group
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, docs, out, lse = ctx.saved_tensors
        group, n = ctx.group, ctx.group.size
        delta = (dout.to(lse.dtype) * out).sum(-1)  # [b, 2c, h]
        dq = torch.zeros_like(q, dtype=lse.dtype)
        kv, widths = torch.cat((k, v), -1), (k.shape[-1], v.shape[-1])
        home = going = None  # gradients of our own keys, and of others' keys on their way home
        for step in range(n):
            coming = pass_on(kv, group) if step < n - 1 else None
            dkv = torch.zeros_like(kv, dtype=lse.dtype)  # of the keys that are here at this step
            (ks, vs), (dks, dvs) = kv.split(widths, -1), dkv.split(widths, -1)
            for rows, keys, see in visits(q, docs, ctx.window, group, step):
                part = partial_backward(dout[:, rows], q[:, rows], ks[:, keys], vs[:, keys], see, lse[:, rows], delta[:, rows])
                for total, share in zip((dq[:, rows], dks[:, keys], dvs[:, keys]), part):
                    total += share
            if step == 0:
                home = dkv
            else:
                going = pass_on(dkv if step == 1 else dkv + arrived(going), group)
            kv = arrived(coming) if coming else kv
        dk, dv = (home + arrived(going)).to(k.dtype).split(widths, -1)
        return dq.to(q.dtype), dk, dv, None, None, None
