"""Strict exchanges: expose on a CPU the misuse that NCCL does not forgive.

gloo finishes an exchange inside wait(), often earlier; NCCL runs it concurrently with the computation. So
reading a result before wait(), or changing a message in flight, trains correctly over gloo and wrongly over
NCCL. In strict mode (`scripts.verify --strict`) every asynchronous exchange runs on private copies:

    at its start   messages are copied, and results are filled with NaN (integers: all bits set)
    until wait()   nobody may write a message, nor write or read a result: early reads yield NaN
    in wait()      messages and results must be bitwise unchanged; then the results are copied in
    at the end     every exchange must have been waited for

A violation raises StrictError with the verb, the group and the step.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

POISON = 0xFF  # byte pattern of a NaN in fp64, fp32, bf16, fp16 and e4m3


class StrictError(RuntimeError):
    """An exchange was misused. The text says which, and how."""


class PrivateCopies:
    """Private tensors of one exchange, used instead of the caller's.

    sources are the messages; the exchange writes to results. A tensor that is both is exchanged in place.
    """

    def __init__(self, title: str, mode: "StrictMode", sources: Sequence[Tensor],
                 results: Sequence[Tensor]) -> None:
        self.title = title
        self.mode = mode
        written = {id(x) for x in results}
        self.messages = [x for x in sources if id(x) not in written]
        self.results = list(results)

        # copy each tensor; then poison the results, including those that are sent too
        self.copies = {id(x): x.detach().clone(memory_format=torch.contiguous_format)
                       for x in (*sources, *results)}
        snapshots = [get_bits(x) for x in self.messages]
        for x in self.results:
            poison(x)

        # a result may be a part of its message (in-place reduce-scatter): then that part is poisoned. A
        # message that is a part of a result has changed here, which wait() reports
        self.snapshots = [
            get_bits(message) if any(contains(message, x) for x in self.results) else snapshot
            for message, snapshot in zip(self.messages, snapshots)
        ]

    def of(self, x: Tensor) -> Tensor:
        """Return the private copy of x."""
        return self.copies[id(x)]

    def release(self) -> None:
        """In wait(), once the exchange has finished, check the tensors and deliver results. Idempotent."""
        if self.mode.under_way.pop(id(self), None) is None:
            return
        for message, snapshot in zip(self.messages, self.snapshots):
            if not torch.equal(get_bits(message), snapshot):
                raise StrictError(f"{self.title}: a message was written before wait()")
        for result in self.results:
            if not bool((get_bits(result) == POISON).all()):
                raise StrictError(f"{self.title}: a result was written before wait()")
            result.data.copy_(self.of(result))


class StrictMode:
    """The exchanges of one rank in flight on private copies."""

    def __init__(self) -> None:
        self.under_way: dict[int, PrivateCopies] = {}  # in start order

    def start(self, title: str, sources: Sequence[Tensor], results: Sequence[Tensor]) -> PrivateCopies:
        """Start an exchange on private copies. `title` describes it in errors."""
        private = PrivateCopies(title, self, sources, results)
        self.under_way[id(private)] = private
        return private

    def check_all_awaited(self) -> None:
        """Raise StrictError at the end of a run if an exchange was started and never waited for."""
        titles = [private.title for private in self.under_way.values()]
        self.under_way.clear()
        if titles:
            raise StrictError(f"{len(titles)} exchanges were never awaited; the first: {titles[0]}")


def contains(outer: Tensor, inner: Tensor) -> bool:
    """Whether the memory of `inner` lies within that of `outer`. Both are dense."""
    first, last = outer.data_ptr(), outer.data_ptr() + outer.nbytes
    return first <= inner.data_ptr() and inner.data_ptr() + inner.nbytes <= last


def get_bits(x: Tensor) -> Tensor:
    """Return the bytes of x [any shape] as a new tensor [bytes], uint8."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def poison(x: Tensor) -> None:
    """Set every byte of x. Like an exchange, it does not count as a change that autograd sees."""
    num_bytes = x.numel() * x.element_size()
    poisoned = torch.full((num_bytes,), POISON, dtype=torch.uint8, device=x.device)
    x.data.copy_(poisoned.view(x.dtype).view(x.shape))
