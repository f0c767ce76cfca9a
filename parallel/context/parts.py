"""Stateful layers under context parallelism: the state before each part of a sequence.

A rank holds two parts of each sequence (zigzag.py), [b, s/n, ...]. `split_parts` turns them into independent
sequences [2b, s/2n, ...], all first parts and then all second parts, which every rank processes concurrently.
Each rank all-gathers how its parts transform any incoming state and derives from that the states before its
own parts (arXiv 2502.07525). The last inputs of each part, which a convolution needs, travel the same way.
Both cost one all-gather in the forward and one reduce-scatter in the backward.

Bytes that a rank receives per layer and microbatch (E: effect of one part, in fp32 or better; I: the last
inputs of one part): 2 (n - 1) (E + I) in the forward, and the same in the backward.
"""
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from parallel.context.zigzag import chunks_of_rank
from parallel.wire import comm
from parallel.wire.comm import Group


class Effect(Protocol):
    """How a part of a sequence transforms a state: a tuple of tensors [b, ...]."""

    def on(self, state: Tensor) -> Tensor:
        """Return the state after the part."""
        ...


AnyEffect = TypeVar("AnyEffect", bound=Effect)


def split_parts(x: Tensor) -> Tensor:
    """[b, s/n, ...] -> [2b, s/2n, ...]: the first parts of all sequences, then the second ones."""
    return x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)


def join_parts(x: Tensor) -> Tensor:
    """Invert split_parts."""
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)


def split_documents(documents: Tensor, tokens_before: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return this rank's parts [2b, s/2n] of documents [b, s], and the documents of the tokens before each
    part [2b, tokens_before]. Tokens before the sequence count as its first document."""
    size = documents.shape[1] // (2 * group.size)
    first = documents[:, :1].expand(-1, tokens_before)
    padded = torch.cat((first, documents), 1)
    starts = [chunk * size for chunk in chunks_of_rank(group.index, group.size)]
    before = torch.cat([padded[:, start:start + tokens_before] for start in starts])
    return torch.cat([documents[:, start:start + size] for start in starts]), before


def inputs_before(x: Tensor, number: int, group: Group) -> Tensor:
    """Return the inputs before each part: x [2b, s/2n, c] -> [2b, number, c], zeros before the sequence."""
    size = min(number, x.shape[1])  # the last inputs of a part: all of them if it is shorter
    parts = gather_parts(x[:, x.shape[1] - size:], group)
    sequence = pad(parts.transpose(0, 1).flatten(1, 2), (0, 0, number, 0))  # [b, number + 2n size, c]
    starts = [chunk * size for chunk in chunks_of_rank(group.index, group.size)]
    return torch.cat([sequence[:, start:start + number] for start in starts])


def states_before(effect: AnyEffect, state: Tensor, group: Group) -> Tensor:
    """Return the states before this rank's parts [2b, ...], given the `effect` of these parts and the `state`
    before the sequence [b, ...]."""
    b = state.shape[0]
    shapes = [(b, *x.shape[1:]) for x in effect]
    packed = gather_parts(torch.cat([x.flatten(1) for x in effect], 1), group)  # one message
    widths = [x[0].numel() for x in effect]

    first, last = chunks_of_rank(group.index, group.size)
    results: list[Tensor] = []
    for chunk in range(last):
        if chunk == first:
            results.append(state)
        tensors = [x.view(shape) for x, shape in zip(packed[chunk].split(widths, 1), shapes)]
        state = type(effect)(*tensors).on(state)
    return torch.cat((*results, state))


def gather_parts(x: Tensor, group: Group) -> Tensor:
    """All-gather the parts of all ranks in sequence order: [2b, ...] -> [2n, b, ...]."""
    of_ranks = _AllGather.apply(x, group).unflatten(0, (group.size, 2, -1))
    early, late = of_ranks.unbind(1)
    return torch.cat((early, late.flip(0)))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return comm.all_gather(x, group)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return comm.reduce_scatter(dy.contiguous(), ctx.group), None
