"""Offload activations and optimizer state to host memory (parallel.offload).

ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, 2104.07857. No communication with other ranks.

    optimizer     masters and moments. The update stages them through the device in chunks, two at a time.
    activations   tensors of at least MIN_BYTES that autograd saves in a forward. The backward prefetches them
                  in reverse order, a few tensors ahead of their use.

On a GPU, host memory is pinned, and copies run on a side stream. On a CPU, "host" is another tensor in the
same memory: the same code runs and yields the same numbers. The device keeps weights and gradients,
the staging chunks, the input of a stage, small tensors, and the tensors that a backward is about to use.
"""
import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel.wire.strict import StrictError, poison

CHUNK_ELEMENTS = 1 << 22  # elements of a master or moment that are staged on the device at once
MIN_BYTES = 1 << 13  # a smaller tensor stays on the device
PREFETCH = 2  # tensors fetched ahead of their use

Event = torch.cuda.Event | int  # of a stream; for DeferredCopies, the number of copies started before it


def host_like(x: Tensor) -> Tensor:
    """Return an empty tensor like x in host memory: pinned if x is on a GPU, with x's strides if dense."""
    return torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda")


def to_host(x: Tensor) -> Tensor:
    """Return a copy of x in host memory, complete on return."""
    return host_like(x).copy_(x)


class CopyStream:
    """A side stream for copies that overlap with a device's computation.

    On a CPU it has none: copies are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context whose copies run on the stream, in order."""
        if self.stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start copying source to target, which have the same shape and dtype."""
        with self.context():
            target.copy_(source, non_blocking=True)

    def keep_memory(self, x: Tensor) -> None:
        """Do not reuse the memory of x until all copies so far have finished, even if x is freed."""
        if self.stream is not None:
            x.record_stream(self.stream)

    def wait_for_compute(self) -> None:
        """Make later copies wait for the computation so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def record_event(self) -> Event | None:
        """Record an event among the copies, for make_compute_wait; None on a CPU."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        self.stream.record_event(event)
        return event

    def make_compute_wait(self, event: Event | None) -> None:
        """Make later computation wait for the event."""
        if self.stream is not None and isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self.stream.device).wait_event(event)

    def give_to_compute(self, x: Tensor) -> None:
        """Keep the memory of x, which was allocated for a copy, from being reused until the computation that
        uses it has finished."""
        if self.stream is not None:
            x.record_stream(torch.cuda.current_stream(self.stream.device))

    def synchronize(self) -> None:
        """Wait for every copy, before host memory is read."""
        if self.stream is not None:
            self.stream.synchronize()


class DeferredCopies(CopyStream):
    """Copies on a CPU, each as late as a GPU may run it, for strict mode (parallel/wire/strict.py).

    Until the computation waits for a copy, its target holds NaN, which exposes early reads. A copy whose
    source was freed without keep_memory() raises StrictError.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_done = 0
        self.waiting: deque[DeferredCopy] = deque()

    def copy(self, target: Tensor, source: Tensor) -> None:
        # copies run in order: those that read the target's memory must run before it is poisoned
        while any(earlier.storage() is target.untyped_storage() for earlier in self.waiting):
            self.run_next()

        storage = weakref.ref(source.untyped_storage())
        shape = (int(source.storage_offset()), source.size(), source.stride())
        self.waiting.append(DeferredCopy(target, source.dtype, storage, shape, kept=[]))
        poison(target)

    def keep_memory(self, x: Tensor) -> None:
        if self.waiting:
            self.waiting[-1].kept.append(x.detach())

    def record_event(self) -> Event | None:
        return self.num_done + len(self.waiting)

    def make_compute_wait(self, event: Event | None) -> None:
        assert isinstance(event, int)
        while self.num_done < event:
            self.run_next()

    def synchronize(self) -> None:
        while self.waiting:
            self.run_next()

    @torch.no_grad()
    def run_next(self) -> None:
        target, dtype, weak_storage, shape, _ = self.waiting.popleft()
        storage = weak_storage()
        if storage is None:
            raise StrictError("a tensor was freed before its copy to or from host memory had ended")
        target.data.copy_(torch.empty(0, dtype=dtype).set_(storage, *shape))
        self.num_done += 1


class DeferredCopy(NamedTuple):
    """A pending copy to target. It refers to its source by storage only, which may be freed by then. `kept`
    tensors stay allocated until the copy runs."""
    target: Tensor
    dtype: torch.dtype
    storage: "weakref.ref[torch.UntypedStorage]"
    shape: tuple[int, torch.Size, tuple[int, ...]]  # offset, sizes and strides of the source
    kept: list[Tensor]


def copy_stream(device: torch.device, is_strict: bool = False) -> CopyStream:
    """Return the copy stream of a device. is_strict is for CPUs, in proofs only."""
    return DeferredCopies() if is_strict else CopyStream(device)


# ---- optimizer state ---------------------------------------------------------------------------------------


def staged_chunks(
    hosts: list[Tensor], device: torch.device, copies: CopyStream, chunk: int = CHUNK_ELEMENTS
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield (range, [that range of each flat host tensor, on the device]).

    Whatever the caller writes there is copied back. The next range is prefetched while the caller works on
    one. Host memory is up to date once the iterator is exhausted.

    hosts are tensors [n] of any dtypes; chunk is the number of elements of a range.
    """
    n = hosts[0].numel()
    ranges = [slice(start, min(start + chunk, n)) for start in range(0, n, chunk)]
    buffers: list[list[Tensor]] = []  # double-buffered: the caller holds one set
    for _ in ranges[:2]:
        buffers.append([torch.empty(min(chunk, n), dtype=host.dtype, device=device) for host in hosts])

    def start_copy(i: int) -> tuple[list[Tensor], Event | None]:
        size = ranges[i].stop - ranges[i].start
        parts = [buffer[:size] for buffer in buffers[i % 2]]
        for part, host in zip(parts, hosts):
            copies.copy(part, host[ranges[i]])
        return parts, copies.record_event()

    copies.wait_for_compute()  # the buffers may be memory that a computation still reads
    started = deque([start_copy(0)] if ranges else [])
    for i, current in enumerate(ranges):
        if i + 1 < len(ranges):
            started.append(start_copy(i + 1))
        parts, copied_event = started.popleft()
        copies.make_compute_wait(copied_event)
        yield current, parts

        # back to the host
        copies.wait_for_compute()
        for part, host in zip(parts, hosts):
            copies.copy(host[current], part)
    copies.synchronize()


# ---- activations -------------------------------------------------------------------------------------------


class OffloadedTensor:
    """Stands in the autograd graph for a saved tensor that is in host memory.

    previous is the tensor saved before it, which a backward needs next, or None if that was freed.
    """

    def __init__(
        self, host_copy: Tensor, device: torch.device, previous: "OffloadReference | None"
    ) -> None:
        self.host_copy = host_copy
        self.device = device
        self.previous_reference = previous
        self.device_copy: Tensor | None = None  # back on the device, until the graph drops this object
        self.copied_event: Event | None = None  # marks the end of the copy; None on a CPU

    @property
    def previous(self) -> "OffloadedTensor | None":
        return None if self.previous_reference is None else self.previous_reference()


OffloadReference = weakref.ref[OffloadedTensor]
SavedEntry = tuple[weakref.ref[torch.UntypedStorage], OffloadReference]  # (its storage, its stand-in)

# What identifies a saved tensor: address, dtype, shape, strides, version.
TensorKey = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]


class ActivationOffload:
    """Keep the saved tensors of one rank's forwards in host memory.

    Wrap a forward in `with offload.saving_to_host():`. The backward needs no call.
    """

    def __init__(self, device: torch.device, copies: CopyStream) -> None:
        self.device = device
        self.copy_stream = copies
        # state of the current forward
        self.saved: dict[TensorKey, SavedEntry] = {}
        self.last: OffloadReference | None = None

    def saving_to_host(self) -> saved_tensors_hooks:
        """Return a context for one forward."""
        self.saved = {}
        self.last = None
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> "Tensor | OffloadedTensor":
        """Offload a tensor that autograd saves (pack hook)."""
        if x.nbytes < MIN_BYTES or x.device.type != self.device.type:
            return x

        # copy a tensor that is saved twice only once
        key = (x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), x._version)
        known = self.find_saved(key)
        if known is not None:
            return known

        host_copy = host_like(x)
        self.copy_stream.wait_for_compute()
        self.copy_stream.copy(host_copy, x.detach())
        self.copy_stream.keep_memory(x)
        offloaded = OffloadedTensor(host_copy, x.device, self.last)
        self.last = weakref.ref(offloaded)
        self.saved[key] = (weakref.ref(x.untyped_storage()), self.last)
        return offloaded

    def find_saved(self, key: TensorKey) -> OffloadedTensor | None:
        """Return the stand-in of a tensor of this forward; None if not saved or its address was reused."""
        if key not in self.saved:
            return None
        storage, offloaded = self.saved[key]
        return None if storage() is None else offloaded()

    def unpack(self, saved: "Tensor | OffloadedTensor") -> Tensor:
        """Fetch a saved tensor that a backward uses (unpack hook)."""
        if isinstance(saved, Tensor):
            return saved
        wanted: OffloadedTensor | None = saved
        for _ in range(1 + PREFETCH):
            if wanted is None:
                break
            self.start_fetch(wanted)
            wanted = wanted.previous
        self.copy_stream.make_compute_wait(saved.copied_event)
        if saved.device_copy is None:
            raise RuntimeError("a tensor in host memory was not fetched for its backward")
        return saved.device_copy

    def start_fetch(self, offloaded: OffloadedTensor) -> None:
        """Start copying it back to the device, unless that was done already."""
        if offloaded.device_copy is not None:
            return
        device_copy = torch.empty_like(offloaded.host_copy, device=offloaded.device)
        self.copy_stream.wait_for_compute()  # it may be memory that a computation still reads
        self.copy_stream.copy(device_copy, offloaded.host_copy)
        self.copy_stream.keep_memory(device_copy)  # in case no computation uses it
        offloaded.device_copy = device_copy
        offloaded.copied_event = self.copy_stream.record_event()
