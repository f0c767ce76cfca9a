"""Strict exchanges: what NCCL does not forgive, made visible on a CPU.

gloo ends an exchange inside wait(), often before; NCCL runs it beside the computation. So a result that is
read before wait(), or a message that is changed while it is under way, trains rightly over gloo and wrongly
over NCCL. In strict mode (`scripts.verify --strict`) every started exchange runs on private copies:

    at its start   messages are copied, and results are filled with NaN (whole numbers: all bits set)
    until wait()   nobody may write a message, nor write or read a result: what is read early is NaN
    in wait()      messages and results must be bit for bit what they were; then the results arrive
    at the end     every exchange must have been awaited

A violation raises StrictError with the verb, the group and the step.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

POISON = 0xFF  # of every byte: a NaN in fp64, fp32, bf16, fp16 and e4m3


class StrictError(RuntimeError):
    """An exchange was misused. The text says which, and how."""


class PrivateCopies:
    """What one exchange sends and receives in the place of the caller's tensors.

    sources: messages. results: what the exchange writes. A tensor that is both is exchanged in place.
    """

    def __init__(self, title: str, mode: "StrictMode", sources: Sequence[Tensor],
                 results: Sequence[Tensor]) -> None:
        self.title = title
        self.mode = mode
        written = {id(x) for x in results}
        self.messages = [x for x in sources if id(x) not in written]
        self.results = list(results)

        # a copy for each tensor; then results are poisoned, those that are sent too included
        self.copies = {id(x): x.detach().clone(memory_format=torch.contiguous_format)
                       for x in (*sources, *results)}
        snapshots = [bits_of(x) for x in self.messages]
        for x in self.results:
            poison(x)

        # a result may be a part of its message (a reduce-scatter in place): then that part is poisoned. A
        # message that is a part of a result has changed here, and wait() says so
        self.snapshots = [
            bits_of(message) if any(contains(message, x) for x in self.results) else snapshot
            for message, snapshot in zip(self.messages, snapshots)
        ]

    def of(self, x: Tensor) -> Tensor:
        """What to exchange in the place of x."""
        return self.copies[id(x)]

    def release(self) -> None:
        """In wait(), once the exchange has ended: checks, then the results arrive. Does nothing again."""
        if self.mode.under_way.pop(id(self), None) is None:
            return
        for message, snapshot in zip(self.messages, self.snapshots):
            if not torch.equal(bits_of(message), snapshot):
                raise StrictError(f"{self.title}: a message was written before wait()")
        for result in self.results:
            if not bool((bits_of(result) == POISON).all()):
                raise StrictError(f"{self.title}: a result was written before wait()")
            result.data.copy_(self.of(result))


class StrictMode:
    """The exchanges of one rank that are under way on private copies."""

    def __init__(self) -> None:
        self.under_way: dict[int, PrivateCopies] = {}  # in the order of their start

    def start(self, title: str, sources: Sequence[Tensor], results: Sequence[Tensor]) -> PrivateCopies:
        """title: of the exchange, for errors."""
        private = PrivateCopies(title, self, sources, results)
        self.under_way[id(private)] = private
        return private

    def check_all_awaited(self) -> None:
        """At the end of a run. Raises StrictError if an exchange was started and never awaited."""
        titles = [private.title for private in self.under_way.values()]
        self.under_way.clear()
        if titles:
            raise StrictError(f"{len(titles)} exchanges were never awaited; the first: {titles[0]}")


def contains(outer: Tensor, inner: Tensor) -> bool:
    """Whether the memory of `inner` lies within that of `outer`. Both are dense."""
    first, last = outer.data_ptr(), outer.data_ptr() + outer.nbytes
    return first <= inner.data_ptr() and inner.data_ptr() + inner.nbytes <= last


def bits_of(x: Tensor) -> Tensor:
    """The bytes of x [any shape] as a new tensor [bytes], uint8."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def poison(x: Tensor) -> None:
    """Sets every byte of x. Like an exchange, it does not count as a change that autograd would see."""
    num_bytes = x.numel() * x.element_size()
    poisoned = torch.full((num_bytes,), POISON, dtype=torch.uint8, device=x.device)
    x.data.copy_(poisoned.view(x.dtype).view(x.shape))
