"""What a rank keeps in host memory instead of the device's, on request (ZeRO-Offload and Infinity, arXiv 2101.06840, 2104.07857).

    optimizer     masters and moments; the update brings them to the device in chunks, two at a time, and back
    activations   what autograd keeps from a forward, from SMALL bytes on; a backward gets it back in reverse order, a few
                  tensors ahead of its use

On a GPU, host memory is pinned and copies run on a stream beside the computing one. On a CPU "host" is another tensor of the
same memory: the same lines run, and the same numbers come out. What stays on the device: weights and gradients, the chunks;
the input of a stage, small tensors, and the tensors that a backward is about to use.
"""
import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 22  # elements of each of masters and moments that are on the device together
SMALL = 1 << 13  # bytes: a smaller tensor stays
AHEAD = 2  # tensors that are fetched before they are asked for


def host_like(x: Tensor) -> Tensor:
    """Room for x in host memory: strides as x has them where it is dense, pinned where x is on a GPU."""
    return torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda")


def to_host(x: Tensor) -> Tensor:
    """A copy of x in host memory, there when this returns."""
    return host_like(x).copy_(x)


class Side:
    """A stream for copies beside the computation of a device; on a CPU, nothing: every copy is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def running(self):
        """What is called inside runs beside the computation, after all that was called before."""
        if self.stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.stream)

    def follows(self) -> None:
        """The copies from now on start after the computation so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def mark(self):
        """A moment among the copies, for awaits()."""
        return None if self.stream is None else self.stream.record_event()

    def awaits(self, moment) -> None:
        """The computation from now on starts after that moment."""
        if moment is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(moment)

    def settle(self) -> None:
        """Every copy is done, for whoever reads host memory next."""
        if self.stream is not None:
            self.stream.synchronize()


def staged(hosts: list[Tensor], device: torch.device, side: Side, chunk: int = CHUNK) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yields (range, [that range of each flat host tensor, on the device]); what is written to the copies is taken back. The
    next range is on its way while one is worked on. Host memory is up to date when the iterator is exhausted."""
    n = hosts[0].numel()
    cuts = [slice(at, min(at + chunk, n)) for at in range(0, n, chunk)]
    rooms = [[torch.empty(min(chunk, n), dtype=h.dtype, device=device) for h in hosts] for _ in range(min(2, len(cuts)))]

    def bring(i: int) -> tuple[list[Tensor], object]:
        parts = [room[:cuts[i].stop - cuts[i].start] for room in rooms[i % 2]]
        with side.running():
            for part, host in zip(parts, hosts):
                part.copy_(host[cuts[i]], non_blocking=True)
        return parts, side.mark()

    side.follows()  # the rooms may be memory that a computation still reads
    coming = bring(0) if cuts else None
    for i, cut in enumerate(cuts):
        (parts, moment), coming = coming, bring(i + 1) if i + 1 < len(cuts) else None
        side.awaits(moment)
        yield cut, parts
        side.follows()
        with side.running():
            for part, host in zip(parts, hosts):
                host[cut].copy_(part, non_blocking=True)
    side.settle()


class Ticket:
    """Stands in the graph for a tensor that is in host memory: its place in the order of the forward."""

    def __init__(self, host: Tensor, device: torch.device, before: "Ticket | None") -> None:
        self.host, self.device = host, device
        self.before = None if before is None else weakref.ref(before)
        self.here: Tensor | None = None  # on the device again, until the graph lets go of the ticket
        self.moment: object = None


class Away:
    """The saved tensors of one rank's forwards. `with away.keeping():` around a forward; nothing is called for a backward."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.side = device, Side(device)
        self.known: dict[tuple, tuple] = {}  # (address, layout, version): (its storage, its ticket), both weak
        self.last: weakref.ref | None = None

    def keeping(self):
        self.known, self.last = {}, None
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> "Tensor | Ticket":
        if x.nbytes < SMALL or x.device.type != self.device.type:
            return x
        store, key = x.untyped_storage(), (x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), x._version)
        owner, ticket = (ref() for ref in self.known.get(key, (lambda: None, lambda: None)))
        if owner is not None and ticket is not None:  # an address alone may be another tensor's by now
            return ticket
        host = host_like(x)
        self.side.follows()
        with self.side.running():
            host.copy_(x.detach(), non_blocking=True)
        if x.device.type == "cuda":
            x.record_stream(self.side.stream)  # its memory is not given away before it has been read
        ticket = Ticket(host, x.device, self.last() if self.last else None)
        self.known[key] = weakref.ref(store), weakref.ref(ticket)
        self.last = weakref.ref(ticket)
        return ticket

    def unpack(self, kept: "Tensor | Ticket") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        ticket: Ticket | None = kept
        for _ in range(1 + AHEAD):
            if ticket is None:
                break
            self.fetch(ticket)
            ticket = ticket.before() if ticket.before else None
        self.side.awaits(kept.moment)
        return kept.here

    def fetch(self, ticket: Ticket) -> None:
        if ticket.here is None:
            ticket.here = torch.empty_like(ticket.host, device=ticket.device)
            if self.side.stream is not None:
                ticket.here.record_stream(self.side.stream)  # should nobody use it
            self.side.follows()  # its room may be memory that a computation still reads
            with self.side.running():
                ticket.here.copy_(ticket.host, non_blocking=True)
            ticket.moment = self.side.mark()
