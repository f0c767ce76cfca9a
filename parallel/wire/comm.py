"""Groups of ranks, collectives and transfers. Only this file and world.py call torch.distributed.

A Group of one rank is the identity: nothing is called or counted, so one process runs the same code as many.
The ledger counts calls and payload bytes by (group, verb): the bytes of the larger side of an exchange. So a
reduce-scatter and its inverse all-gather count the same, and together twice as much as the equivalent
all-reduce (a ring all-reduce is these two, Patarasuk and Yuan, 2009). Tests compare the ledger with closed
forms.

If a peer dies or hangs, a PeerError says which exchange of which group was waiting for it. torch's own errors
do not (gloo names a port). So every exchange is first recorded in Activity, which durable/peers.py reads too.
"""
import re
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.distributed_c10d import Work as Handle

from parallel.wire import messages
from parallel.wire.clock import CommunicationClock, PendingSpan
from parallel.wire.device_waits import DeviceWaits
from parallel.wire.lanes import LaneLog
from parallel.wire.record import NumbersRecord
from parallel.wire.strict import PrivateCopies, StrictMode

Ledger = Counter[tuple[str, str, str]]  # (group, verb, "calls" or "bytes") -> how many
Result = TypeVar("Result")
Data = TypeVar("Data")  # plain data, different on each rank

NUM_PAST = 32  # recent exchanges that a rank remembers, to report after a hang
NUM_MARKS = 256  # recent steps for which it remembers a digest of its collectives
MAX_NAMED = 4  # maximum number of kinds of exchanges in a message

# Errors of gloo, nccl and the store for a peer that does not respond or has disconnected.
TIMEOUT_TEXT = re.compile(r"timed? ?out", re.IGNORECASE)
DISCONNECT_TEXT = re.compile(
    r"connection|socket|broken pipe|reset by peer|remote (process|worker|server)", re.IGNORECASE)

# torch 2.13 has new names for these two.
all_gather_verb = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_verb = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_each_verb(
    out: Tensor, x: Tensor, group: ProcessGroup | None, async_op: bool = False
) -> Handle | None:
    """Run all_gather_verb from x[i] into out[i] for each i, as one exchange."""
    if len(x) == 1:
        return all_gather_verb(out[0], x[0], group=group, async_op=async_op)
    options = AllgatherOptions()
    options.asyncOp = async_op
    results = list(out.unbind(0))
    messages = list(x.unbind(0))
    handle = process_group(group).allgather_into_tensor_coalesced(results, messages, options)
    return wait_unless_async(async_op, handle)


def scatter_each_verb(
    out: Tensor, x: Tensor, group: ProcessGroup | None, async_op: bool = False
) -> Handle | None:
    """Run reduce_scatter_verb from x[i] into out[i] for each i, as one exchange."""
    if len(x) == 1:
        return reduce_scatter_verb(out[0], x[0], group=group, async_op=async_op)
    options = ReduceScatterOptions()
    options.asyncOp = async_op
    results = list(out.unbind(0))
    messages = list(x.unbind(0))
    handle = process_group(group).reduce_scatter_tensor_coalesced(results, messages, options)
    return wait_unless_async(async_op, handle)


def process_group(handle: ProcessGroup | None) -> ProcessGroup:
    """Return the process group of a Group's handle. It is None for the whole job."""
    found = dist.group.WORLD if handle is None else handle
    assert found is not None  # the job has been joined
    return found


def wait_unless_async(async_op: bool, handle: Handle | None) -> Handle | None:
    """Return the handle, or None after waiting for it, like torch's own verbs.

    NCCL returns none for a synchronous coalesced exchange, which runs on the caller's stream.
    """
    if async_op:
        return handle
    if handle is not None:
        handle.wait()
    return None


class PeerError(RuntimeError):
    """A peer did not respond in time (exit_code 76) or is gone (1). The text says in which exchange."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Wire(Protocol):
    """Carries messages instead of torch.distributed (plan/record/wire.py)."""

    def exchange(self, group: "Group", verb: str, sent: Tensor, received: Tensor) -> None:
        """Run a collective, which has finished on return."""

    def start(self, group: "Group", verb: str, sent: Tensor, received: Tensor) -> Handle:
        """Start a collective, which finishes when its handle is waited for."""
        ...

    def transfers(
        self, group: "Group", sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> list[Handle]:
        """Send to and receive from group indices; return a handle for each."""
        ...

    def objects(self, group: "Group", x: Data) -> list[Data]:
        """Return the object of each rank of the group; this rank contributes x."""
        ...


@dataclass(frozen=True)
class AwaitedExchange:
    """An exchange that a rank waits for. peer is a transfer's other global rank; None for a collective."""
    verb: str
    group: "Group"
    nbytes: int | None
    peer: int | None
    step: int  # 0 outside of a step

    def __str__(self) -> str:
        """all_reduce of 4,096 bytes in group dp (dp_replicate x dp_shard: ranks 0, 2) at step 7"""
        size = "" if self.nbytes is None else f" of {self.nbytes:,} bytes"
        peer = "" if self.peer is None else f" rank {self.peer}"
        return f"{self.verb}{size}{peer} in {self.group}{at_step(self.step)}"


def at_step(step: int) -> str:
    return f" at step {step}" if step else ""


class CollectiveMismatch(RuntimeError):
    """Ranks of a group have not run the same collectives, so the data they received is wrong."""

    exit_code = 1


Collective = tuple[str, int | None, torch.dtype]  # (verb, bytes or None if they differ by rank, dtype)


def to_text(verb: str, nbytes: int | None, dtype: torch.dtype) -> str:
    """all_reduce of 4,096 bytes in torch.float32"""
    size = "" if nbytes is None else f" of {nbytes:,} bytes"
    return f"{verb}{size} in {dtype}"


@dataclass
class CollectiveLog:
    """The collectives of a group, which all its ranks must run in the same order.

    digest covers all of them, and times counts each. marks holds (step, digest after it) of recent steps.
    words describes each.
    """
    digest: int = 0
    times: Counter[str] = field(default_factory=Counter[str])
    marks: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=NUM_MARKS))
    words: dict[Collective, str] = field(default_factory=dict[Collective, str])

    def add(self, collective: Collective, step: int) -> None:
        what = self.words.get(collective)
        if what is None:
            what = self.words[collective] = to_text(*collective)
        self.digest = zlib.crc32(what.encode(), self.digest)
        self.times[what] += 1
        if self.marks and self.marks[-1][0] == step:
            self.marks.pop()
        self.marks.append((step, self.digest))


class PastExchange(NamedTuple):
    """An exchange that the host waited for. It refers to no Group, which would keep connections open."""
    verb: str
    group: str  # the group's name
    nbytes: int | None
    step: int
    began: float  # time.monotonic()
    seconds: float

    def line(self, now: float) -> str:
        """12.3 s ago: all_reduce of 4,096 bytes in group dp at step 7, 0.0012 s"""
        size = "" if self.nbytes is None else f" of {self.nbytes:,} bytes"
        what = f"{self.verb}{size} in group {self.group}{at_step(self.step)}"
        return f"{now - self.began:.1f} s ago: {what}, {self.seconds:.4f} s"


@dataclass
class Activity:
    """Current activity of this rank, shared by all groups of a job."""
    step: int = 0
    timeout_s: float = 0.0
    exchange: AwaitedExchange | None = None  # the exchange that the host waits for
    since: float = field(default_factory=time.monotonic)  # when that exchange began or the last one ended
    device_waits: DeviceWaits[AwaitedExchange] = field(  # empty without a GPU
        default_factory=DeviceWaits[AwaitedExchange]
    )
    clock: CommunicationClock = field(default_factory=CommunicationClock)
    past: deque[PastExchange] = field(default_factory=lambda: deque(maxlen=NUM_PAST))
    collectives: dict[tuple[str, tuple[int, ...]], CollectiveLog] = field(  # by the group's name and ranks
        default_factory=lambda: defaultdict(CollectiveLog)
    )
    error: RuntimeError | None = None  # error of the last failed exchange
    strict: StrictMode | None = None  # for proofs; by default exchanges run on the tensors themselves
    record: NumbersRecord | None = None  # for a step that may be rerun: sent and received data
    wire: Wire | None = None  # by default torch.distributed
    lanes: LaneLog | None = None  # for proofs: the order of all exchanges

    def current_exchange(self) -> tuple[AwaitedExchange | None, float]:
        """Return (the exchange that the host or the GPU waits for, or None; for how many seconds)."""
        if self.exchange is None:
            waited = self.device_waits.current()
            if waited is not None:
                return waited
        return self.exchange, time.monotonic() - self.since

    def __str__(self) -> str:
        exchange, _ = self.current_exchange()
        return f"no exchange{at_step(self.step)}" if exchange is None else str(exchange)


@dataclass(frozen=True)
class Group:
    """Ranks that exchange data."""
    name: str
    ranks: tuple[int, ...] = (0,)  # global
    index: int = 0  # this rank's position among them
    handle: ProcessGroup | None = None  # None for one rank, or for the whole job
    ledger: Ledger = field(default_factory=Counter, compare=False, repr=False)
    axes: str = ""  # axes that it spans: "dp_shard x cp"
    channel: str = ""  # groups of the same ranks share connections unless their channels differ
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def collectives(self) -> CollectiveLog:
        """Return this rank's log of the group. Cached: a lookup hashes the ranks."""
        return self.activity.collectives[self.name, self.ranks]

    def __str__(self) -> str:
        """group tp (ranks 0, 1)"""
        shown: Sequence[object] = self.ranks
        if self.size > 8:
            shown = (*self.ranks[:3], "...", self.ranks[-1])
        axes = f"{self.axes}: " if self.axes not in ("", self.name) else ""
        return f"group {self.name} ({axes}ranks {', '.join(map(str, shown))})"

    def run_exchange(
        self,
        verb: str,
        work: Callable[[], Result],
        *,
        nbytes: int | None = None,
        peer: int | None = None,
    ) -> Result:
        """Return work(). The only place where a rank waits for others.

        nbytes is the size of the message, if known. peer is the global rank that is waited for, or None for
        the group. Raises PeerError if a peer is to blame; other errors propagate.
        """
        activity = self.activity
        exchange = AwaitedExchange(verb, self, nbytes=nbytes, peer=peer, step=activity.step)
        activity.exchange = exchange
        activity.since = time.monotonic()
        start = activity.clock.record_event()
        try:
            result = work()
        except RuntimeError as error:
            activity.error = as_peer_error(error, activity)
            raise activity.error from error
        activity.exchange = None
        began = activity.since
        activity.since = time.monotonic()
        seconds = activity.since - began
        past = PastExchange(
            verb=verb,
            group=self.name,
            nbytes=nbytes,
            step=exchange.step,
            began=began,
            seconds=seconds,
        )
        activity.past.append(past)

        end = activity.clock.record_wait(start, self.name)
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            activity.device_waits.add(exchange, start, end)
        return result

    def run_collective(
        self, verb: str, collective: Callable[..., object], *, sent: Tensor, received: Tensor
    ) -> None:
        """Count and run an exchange of the whole group: collective(group=its handle).

        `received` is the tensor that holds its result.
        """
        larger = max(sent, received, key=lambda x: x.nbytes)
        self.count_exchange(verb, larger)
        if self.activity.wire is not None:
            self.activity.wire.exchange(self, verb, sent, received)
            return
        self.record_sent(verb, sent)
        posted = self.log_post(verb, larger)
        self.run_exchange(verb, partial(collective, group=self.handle), nbytes=larger.nbytes)
        self.log_wait(posted)
        self.record_received(verb, received)

    def record_sent(self, verb: str, x: Tensor) -> None:
        """Record data that is about to be sent, if there is a record."""
        if self.activity.record is not None:
            self.activity.record.add_own(f"the input of {verb} in {self}", x)

    def record_received(self, verb: str, x: Tensor) -> None:
        """Record data that has arrived, if there is a record."""
        if self.activity.record is not None:
            self.activity.record.add_received(f"the result of {verb} in {self}", x)

    def private_copies(
        self, verb: str, sources: Sequence[Tensor], results: Sequence[Tensor]
    ) -> PrivateCopies | None:
        """Return the tensors that an exchange that starts now must use in strict mode; else None."""
        if self.activity.strict is None:
            return None
        title = f"{verb} in {self}{at_step(self.activity.step)}"
        return self.activity.strict.start(title, sources, results)

    def log_post(
        self, verb: str, x: Tensor, peer: int | None = None, batch: int | None = None
    ) -> int | None:
        """Log an exchange that starts now, if there is a log of lanes, and return its number there."""
        if self.activity.lanes is None:
            return None
        lane = (self.channel, self.ranks)
        return self.activity.lanes.post(lane, self.name, verb, x.nbytes, x.dtype, peer=peer, batch=batch)

    def log_wait(self, posted: int | None) -> None:
        """Log a wait for the exchange with this number, if there is a log."""
        if self.activity.lanes is not None and posted is not None:
            self.activity.lanes.wait(posted)

    def count_exchange(self, verb: str, x: Tensor) -> None:
        """Add an exchange to the ledger, where x is the tensor of its larger side."""
        self.ledger[self.name, verb, "calls"] += 1
        self.ledger[self.name, verb, "bytes"] += x.nbytes
        if verb != "send":
            nbytes = None if verb == "all_to_all" else x.nbytes  # it differs by rank there
            self.collectives.add((verb, nbytes, x.dtype), self.activity.step)


def as_peer_error(error: RuntimeError, activity: Activity) -> RuntimeError:
    """Convert torch's error to a PeerError if a peer is to blame; else return it unchanged."""
    if TIMEOUT_TEXT.search(str(error)):
        seconds = time.monotonic() - activity.since
        return PeerError(f"no answer for {seconds:.1f} s in {activity}", 76)
    if DISCONNECT_TEXT.search(str(error)):
        return PeerError(f"lost the connection in {activity}", 1)
    return error


# ---- collectives -------------------------------------------------------------------------------------------


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Sum x over the group in place, on every rank."""
    if group.size > 1:
        group.run_collective("all_reduce", partial(dist.all_reduce, x), sent=x, received=x)
    return x


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Take the maximum of integers over the group, in place."""
    if group.size > 1:
        # gloo's maximum of floats drops a NaN that is not on rank 0
        assert not x.is_floating_point(), "reduce a flag as an int: a float maximum loses NaNs"
        group.run_collective("all_reduce", partial(dist.all_reduce, x, dist.ReduceOp.MAX), sent=x, received=x)
    return x


def all_reduce_max_float(x: Tensor, group: Group) -> Tensor:
    """Take the maximum over the group of nonnegative floats, in place; NaN counts as the largest.

    Their bits, read as integers, have the same order.
    """
    bits = x.view({4: torch.int32, 8: torch.int64}[x.itemsize])
    all_reduce_max(bits, group)
    return x


def all_gather(x: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """All-gather x [n, ...] -> [size * n, ...] in group order, into `out` if given."""
    if group.size == 1:
        return x if out is None else out.copy_(x)
    if out is None:
        out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    group.run_collective("all_gather", partial(all_gather_verb, out, x.contiguous()), sent=x, received=out)
    return out


def reduce_scatter(x: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """Reduce-scatter x [size * n, ...] -> this rank's [n, ...] of the sum, into `out` if given."""
    if group.size == 1:
        return x if out is None else out.copy_(x)
    if out is None:
        out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    group.run_collective(
        "reduce_scatter", partial(reduce_scatter_verb, out, x.contiguous()), sent=x, received=out
    )
    return out


def all_gather_each(x: Tensor, group: Group) -> Tensor:
    """All-gather each x[i]: [b, n, ...] -> [b, size * n, ...], in one exchange without copies."""
    if group.size == 1:
        return x
    out = x.new_empty(x.shape[0], group.size * x.shape[1], *x.shape[2:])
    group.run_collective("all_gather", partial(gather_each_verb, out, x.contiguous()), sent=x, received=out)
    return out


def reduce_scatter_each(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter each x[i]: [b, size * n, ...] -> [b, n, ...], in one exchange without copies."""
    if group.size == 1:
        return x
    out = x.new_empty(x.shape[0], x.shape[1] // group.size, *x.shape[2:])
    group.run_collective(
        "reduce_scatter", partial(scatter_each_verb, out, x.contiguous()), sent=x, received=out
    )
    return out


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """[size, ...], with part i going to rank i -> [size, ...], with part i received from rank i."""
    if group.size == 1:
        return x
    x = x.contiguous()
    out = torch.empty_like(x)
    group.run_collective("all_to_all", partial(dist.all_to_all_single, out, x), sent=x, received=out)
    return out


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """Broadcast the tensor of group index `source`, in place."""
    if group.size > 1:
        sent = x if group.index == source else x.new_empty(0)
        send = partial(dist.broadcast, x, group.ranks[source])
        group.run_collective("broadcast", send, sent=sent, received=x)
    return x


# ---- messages ----------------------------------------------------------------------------------------------
# Small plain data (messages.py), for start-up and checkpoints, never within a step. One exchange sends the
# lengths of the messages and another the messages. The ledger does not count them.


def all_gather_objects(x: Data, group: Group) -> list[Data]:
    """Return [x of each rank], on every rank. Raises MessageError."""
    if group.size == 1:
        return [x]
    if group.activity.wire is not None:
        return group.activity.wire.objects(group, x)
    own = as_tensor(x, group)
    lengths = gather_lengths(own, group, "all_gather_object")
    padded = padded_to(max(lengths), own)
    received = own.new_empty(group.size * len(padded))
    gather = partial(all_gather_verb, group=group.handle)
    group.run_exchange("all_gather_object", partial(gather, received, padded), nbytes=received.nbytes)
    return from_rows(received.view(group.size, len(padded)).cpu(), lengths, group)


def gather_objects(x: Data, group: Group) -> list[Data]:
    """Return [x of each rank] on the first rank of the group, and [] on the others. Raises MessageError.

    For data that grows with the number of ranks: only the first rank receives and stores it.
    """
    if group.size == 1:
        return [x]
    if group.activity.wire is not None:
        return group.activity.wire.objects(group, x) if group.index == 0 else []
    own = as_tensor(x, group)
    lengths = gather_lengths(own, group, "gather_object")
    padded = padded_to(max(lengths), own)
    rows = [torch.empty_like(padded) for _ in group.ranks] if group.index == 0 else None
    gather = partial(dist.gather, dst=group.ranks[0], group=group.handle)
    group.run_exchange("gather_object", partial(gather, padded, rows), nbytes=padded.nbytes)
    return [] if rows is None else from_rows(rows, lengths, group)


def broadcast_object(x: Data, group: Group, source: int = 0) -> Data:
    """Broadcast x of group index `source` to every rank; `source` gets x itself. Raises MessageError."""
    if group.size == 1:
        return x
    if group.activity.wire is not None:
        return group.activity.wire.objects(group, x)[source]
    is_source = group.index == source
    device = message_device(group)
    message = as_tensor(x, group) if is_source else torch.empty(0, dtype=torch.uint8, device=device)
    send = partial(dist.broadcast, src=group.ranks[source], group=group.handle)
    length = torch.tensor([len(message)], device=device)
    group.run_exchange("broadcast_object", partial(send, length), nbytes=length.nbytes)

    check_length(group.ranks[source], int(length.item()))
    received = message if is_source else message.new_empty(int(length.item()))
    group.run_exchange("broadcast_object", partial(send, received), nbytes=received.nbytes)
    return x if is_source else from_tensor(received, group, source)


def broadcast_bytes(x: bytes, group: Group, source: int = 0) -> bytes:
    """Broadcast the bytes of group index `source` to every rank; `source` gets x itself.

    For data longer than a message: split into exchanges of at most messages.MAX_BYTES. Raises MessageError
    before memory is allocated for data that is too long.
    """
    if group.size == 1:
        return x
    length = broadcast_object(len(x), group, source)
    limit = messages.MAX_TOTAL_BYTES
    if type(length) is not int or not 0 <= length <= limit:
        told = f"rank {group.ranks[source]} announces {length!r} bytes; the limit is {limit:,}"
        raise messages.MessageError(told)
    if length == 0:
        return b""

    is_source = group.index == source
    data = torch.frombuffer(bytearray(x if is_source else length), dtype=torch.uint8)
    data = data.to(message_device(group))
    send = partial(dist.broadcast, src=group.ranks[source], group=group.handle)
    for part in data.split(messages.MAX_BYTES):
        group.run_exchange("broadcast_bytes", partial(send, part), nbytes=part.nbytes)
    return x if is_source else data.cpu().numpy().tobytes()


def gather_lengths(own: Tensor, group: Group, verb: str) -> list[int]:
    """Gather the lengths of all ranks' messages. Raises MessageError before memory is allocated for them."""
    lengths = own.new_empty(group.size, dtype=torch.int64)
    own_length = torch.tensor([len(own)], device=own.device)
    gather = partial(all_gather_verb, group=group.handle)
    group.run_exchange(verb, partial(gather, lengths, own_length), nbytes=lengths.nbytes)
    return check_lengths(lengths.tolist(), group)


def padded_to(length: int, message: Tensor) -> Tensor:
    """Zero-pad the message."""
    padded = message.new_zeros(length)
    padded[:len(message)] = message
    return padded


def from_rows(rows: Sequence[Tensor] | Tensor, lengths: list[int], group: Group) -> list[Any]:
    """Decode each rank's message: rows[i] holds lengths[i] bytes from rank i. Raises MessageError."""
    return [from_tensor(rows[rank][:length], group, rank) for rank, length in enumerate(lengths)]


def check_collectives(groups: Sequence[Group]) -> None:
    """Raise CollectiveMismatch if ranks of a group have not run the same collectives: verbs, types, sizes.

    Collective; all ranks list the groups in the same order. One all-reduce of two numbers per group.
    """
    for group in groups:
        if group.size == 1:
            continue
        log = group.collectives
        own = log.digest  # before the exchanges that compare it
        extremes = torch.tensor([own, -own], dtype=torch.int64, device=message_device(group))
        largest, smallest = all_reduce_max(extremes, group).tolist()
        if largest == -smallest:
            continue
        digests = all_gather_objects(own, group)
        other = next(index for index, digest in enumerate(digests) if digest != digests[0])
        times = all_gather_objects(dict(log.times), group)
        marks = all_gather_objects([list(mark) for mark in log.marks], group)
        logs = [
            CollectiveLog(digest, Counter(each), deque((step, at) for step, at in late))
            for digest, each, late in zip(digests, times, marks)
        ]
        told = difference(logs[0], logs[other], (group.ranks[0], group.ranks[other]))
        raise CollectiveMismatch(f"ranks of {group} run different exchanges{told}")


def difference(first: CollectiveLog, log: CollectiveLog, ranks: tuple[int, int]) -> str:
    """Describe how the exchanges of the second of two ranks differ from those of the first."""
    one, other = (f"on rank {rank}" for rank in ranks)
    steps, own_steps = dict(first.marks), dict(log.marks)
    since = [step for step in steps if step in own_steps and steps[step] != own_steps[step]]
    when = f" by step {since[0]}" if since and since[0] else ""
    others = sorted(what for what in first.times | log.times if first.times[what] != log.times[what])
    if not others:
        return f"{when}: the same ones {one} and {other}, in another order"
    named = [f"{what}: {first.times[what]:,} {one}, {log.times[what]:,} {other}" for what in others]
    more = f"; and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return f"{when}: {'; '.join(named[:MAX_NAMED])}{more}"


def message_device(group: Group) -> torch.device:
    """Return the device of the group's messages: the host if it has gloo, else the GPU (NCCL)."""
    devices: list[torch.device] = process_group(group.handle)._device_types
    on_host = torch.device("cpu") in devices
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def as_tensor(x: object, group: Group) -> Tensor:
    """Encode the message as uint8."""
    message = bytearray(messages.encode(x))
    return torch.frombuffer(message, dtype=torch.uint8).to(message_device(group))


def from_tensor(message: Tensor, group: Group, index: int) -> Any:
    """Decode the message from group index `index`. Raises MessageError."""
    return messages.decode(message.cpu().numpy().tobytes(), f"rank {group.ranks[index]}")


def check_lengths(lengths: list[int], group: Group) -> list[int]:
    """Return the lengths. Raise MessageError for messages that are too long, alone or in total, before memory
    is allocated: each is received padded to the longest."""
    for rank, length in zip(group.ranks, lengths):
        check_length(rank, length)
    total = len(lengths) * max(lengths)
    limit = messages.MAX_TOTAL_BYTES
    if total > limit:
        raise messages.MessageError(
            f"messages of {len(lengths)} ranks take {total:,} bytes; the limit is {limit:,}"
        )
    return lengths


def check_length(rank: int, length: int) -> None:
    """Raise MessageError if a message of global rank `rank` is too long."""
    if not 0 < length <= messages.MAX_BYTES:
        raise messages.MessageError(
            f"rank {rank} announces a message of {length:,} bytes; the limit is {messages.MAX_BYTES:,}"
        )


# ---- asynchronous exchanges --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """An exchange in flight."""
    handle: Handle
    verb: str
    nbytes: int
    peer: int | None  # the other global rank of a send or receive; None for a collective
    group: Group
    received: Tensor | None = None  # holds its result; None for a send
    pending: PendingSpan | None = None  # its span; None if the clock cannot know it
    private: PrivateCopies | None = None  # in strict mode
    posted: int | None = None  # its number in the log of lanes

    def wait(self) -> None:
        """Wait until it has finished. Raises PeerError if the peer does not respond or is gone."""
        self.group.log_wait(self.posted)
        if self.pending is not None:
            self.group.activity.clock.record_arrival(self.pending, self.handle)
        self.group.run_exchange(self.verb, self.handle.wait, nbytes=self.nbytes, peer=self.peer)
        if self.private is not None:
            self.private.release()
        if self.received is not None:
            self.group.record_received(with_peer(self.verb, self.peer), self.received)


class PendingExchange:
    """An exchange in flight and its result, which may be read after wait().

    transfer is None if there is nothing to wait for, as in a group of one. source is the message; it must
    stay alive until received.
    """

    def __init__(
        self, result: Tensor, transfer: Transfer | None = None, source: Tensor | None = None
    ) -> None:
        self.result = result
        self.transfer = transfer
        self.source = source

    def wait(self) -> Tensor:
        """Wait until the exchange has finished, and return its result."""
        if self.transfer is not None:
            self.transfer.wait()
        self.transfer = None
        self.source = None
        return self.result

    def start_next_phase(self) -> None:
        """Do nothing: this exchange has one phase. Others have two (compress.py)."""


def start_collective(
    verb: str,
    start: Callable[[Tensor, Tensor], Handle | None],
    *,
    result: Tensor,
    source: Tensor,
    group: Group,
    nbytes: int,
) -> PendingExchange:
    """Start an exchange of the whole group: start(result, source) returns its torch handle.

    source is this rank's message, or the result itself if the exchange is in place. nbytes is the size of the
    larger of the two, or of the message.
    """
    group.record_sent(verb, source)
    posted = group.log_post(verb, max(source, result, key=lambda x: x.nbytes))
    private = group.private_copies(verb, [source], [result])
    if group.activity.wire is not None:
        handle = group.activity.wire.start(group, verb, source, result)
    elif private is None:
        handle = start(result, source)
    else:
        handle = start(private.of(result), private.of(source))
    if handle is None:  # it has finished
        group.log_wait(posted)
        group.record_received(verb, result)
        return PendingExchange(result)
    pending = group.activity.clock.record_start(handle)
    transfer = Transfer(
        handle,
        verb,
        nbytes,
        peer=None,
        group=group,
        received=result,
        pending=pending,
        private=private,
        posted=posted,
    )
    return PendingExchange(result, transfer, source=None if source is result else source)


def start_all_reduce(x: Tensor, group: Group) -> PendingExchange:
    """Start all_reduce_sum: until wait(), x must be neither read nor written."""
    if group.size == 1:
        return PendingExchange(x)
    group.count_exchange("all_reduce", x)

    def start(result: Tensor, _: Tensor) -> Handle | None:
        return dist.all_reduce(result, group=group.handle, async_op=True)

    return start_collective("all_reduce", start, result=x, source=x, group=group, nbytes=x.nbytes)


def start_all_gather(x: Tensor, group: Group, out: Tensor) -> PendingExchange:
    """Start all_gather: until wait(), x must not be written, and `out` neither read nor written."""
    if group.size == 1:
        return PendingExchange(out.copy_(x))
    group.count_exchange("all_gather", out)
    start = partial(all_gather_verb, group=group.handle, async_op=True)
    return start_collective("all_gather", start, result=out, source=x, group=group, nbytes=out.nbytes)


def start_reduce_scatter(x: Tensor, group: Group, out: Tensor | None = None) -> PendingExchange:
    """Start reduce_scatter: until wait(), x must not be written.

    The result is written to `out`, which may be this rank's own chunk of x; by default to a new tensor.
    """
    if group.size == 1:
        return PendingExchange(x if out is None else out.copy_(x))
    group.count_exchange("reduce_scatter", x)
    if out is None:
        out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    start = partial(reduce_scatter_verb, group=group.handle, async_op=True)
    return start_collective("reduce_scatter", start, result=out, source=x, group=group, nbytes=x.nbytes)


def start_all_gather_each(x: Tensor, group: Group) -> PendingExchange:
    """Start all_gather_each: until wait(), x must not be written."""
    if group.size == 1:
        return PendingExchange(x)
    x = x.contiguous()
    out = x.new_empty(x.shape[0], group.size * x.shape[1], *x.shape[2:])
    group.count_exchange("all_gather", out)
    start = partial(gather_each_verb, group=group.handle, async_op=True)
    return start_collective("all_gather", start, result=out, source=x, group=group, nbytes=out.nbytes)


def start_reduce_scatter_each(x: Tensor, group: Group) -> PendingExchange:
    """Start reduce_scatter_each: until wait(), x must not be written."""
    if group.size == 1:
        return PendingExchange(x)
    x = x.contiguous()
    out = x.new_empty(x.shape[0], x.shape[1] // group.size, *x.shape[2:])
    group.count_exchange("reduce_scatter", x)
    start = partial(scatter_each_verb, group=group.handle, async_op=True)
    return start_collective("reduce_scatter", start, result=out, source=x, group=group, nbytes=x.nbytes)


def start_all_to_all(
    x: Tensor,
    send_counts: list[int],
    receive_counts: list[int],
    group: Group,
    out: Tensor | None = None,
    count_sent: bool = True,
) -> PendingExchange:
    """Start sending send_counts[i] rows of x [sum(send_counts), ...] to rank i.

    The result is [sum(receive_counts), ...]: receive_counts[i] rows from rank i, in rank order. It is written
    to `out`, by default a new tensor. The ledger counts the sent bytes if count_sent, else the received ones,
    so that an exchange and its inverse count the same.
    """
    if group.size == 1:
        return PendingExchange(x if out is None else out.copy_(x))
    x = x.contiguous()
    if out is None:
        out = x.new_empty(sum(receive_counts), *x.shape[1:])
    group.count_exchange("all_to_all", x if count_sent else out)

    def start(result: Tensor, source: Tensor) -> Handle | None:
        counts = (receive_counts, send_counts)
        return dist.all_to_all_single(result, source, *counts, group=group.handle, async_op=True)

    return start_collective("all_to_all", start, result=out, source=x, group=group, nbytes=x.nbytes)


def start_transfers(
    sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Group
) -> list[Transfer]:
    """Start transfers with ranks of the group: sends [(tensor, target)], receives [(buffer, source)].

    Return the transfers to wait for, sends first.
    """
    messages: list[tuple[Tensor, int]] = []
    filled: list[tuple[Tensor, int]] = []
    copies: list[PrivateCopies | None] = []
    posted: list[int | None] = []
    for x, target in sends:
        private = group.private_copies(f"send to {group.ranks[target]}", [x], [])
        messages.append((x.contiguous() if private is None else private.of(x), target))
        copies.append(private)
        posted.append(group.log_post("send", x, group.ranks[target], posted[0] if posted else None))
        group.record_sent(with_peer("send to", group.ranks[target]), x)
        group.count_exchange("send", x)
    for buffer, source in receives:
        private = group.private_copies(f"receive from {group.ranks[source]}", [], [buffer])
        posted.append(group.log_post("receive", buffer, group.ranks[source], posted[0] if posted else None))
        filled.append((buffer if private is None else private.of(buffer), source))
        copies.append(private)
    if not copies:
        return []

    wire = group.activity.wire
    post = post_transfers if wire is None else wire.transfers
    handles = group.run_exchange("sends and receives", partial(post, group, messages, filled))
    if len(handles) < len(copies):  # nccl has one handle for all of them
        handles = [handles[-1]] * len(copies)

    verbs = ["send to"] * len(sends) + ["receive from"] * len(receives)
    buffers: list[Tensor | None] = [*(None for _ in sends), *(buffer for buffer, _ in receives)]
    transfers: list[Transfer] = []
    parts = zip(handles, verbs, sends + receives, buffers, copies, posted)
    for handle, verb, (x, peer), buffer, private, number in parts:
        transfer = Transfer(
            handle,
            verb,
            x.nbytes,
            peer=group.ranks[peer],
            group=group,
            received=buffer,
            private=private,
            posted=number,
        )
        transfers.append(transfer)
    return transfers


def post_transfers(
    group: Group, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
) -> list[Handle]:
    """Start sends [(tensor, target)] and receives [(buffer, source)] together."""
    ops = [dist.P2POp(dist.isend, x, group=group.handle, group_peer=target) for x, target in sends]
    for buffer, source in receives:
        ops.append(dist.P2POp(dist.irecv, buffer, group=group.handle, group_peer=source))
    return dist.batch_isend_irecv(ops)


def with_peer(verb: str, peer: int | None) -> str:
    """send to rank 3"""
    return verb if peer is None else f"{verb} rank {peer}"


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU, before reading a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
