"""Skip tracing similar microbatches: trace a few microbatches of a step, and copy the others.

    choose     among a rank's ops (parallel/pipeline/schedule.py), those of a few microbatches. Ops with equal
               Keys are alike: they have the same kind and stage, and their microbatches have the same op
               order and otherwise equivalent positions on the rank. Trace two of each key, and the last
    trace      the real Pipeline.run with only these ops: a wire without other ranks does not need the rest
    compare    all traced ops of a key must do the same (Segment): the same launches, exchanges, allocations,
               releases and counts. What an op awaits or releases is described without numbers (Ref): "the
               third tensor made by the forward of the same microbatch"
    write      the record of all ops in order, each from the segment of its key

If two ops of a key differ, if a reference cannot be resolved, or if the bytes alive at the end differ from
those after the trace, raise Unlike, and trace the whole step (plan/record/role.py).
"""

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from parallel.pipeline.executor import GradientAccumulation, Pipeline, next_compute_kinds
from parallel.pipeline.schedule import COMPUTE_KINDS, END_OF_SEND, Op
from parallel.wire.comm import Ledger
from parallel.wire.lanes import PostedExchange, Wait
from plan.record.events import Event, OpBegins, StreamWait, without_collection
from plan.record.launches import Launch, Recorder
from plan.record.memory import Change, LiveBytes
from plan.record.wire import RecordingWire

SAME = 2  # ops traced per key, for comparison


class Unlike(Exception):
    """Microbatches are not alike: the whole step must be traced."""


# ---- which ops are traced ----------------------------------------------------------------------------------


class Key(NamedTuple):
    """Common properties of ops that do the same. order: (kind, stage) of the microbatch's ops, in the order
    of the rank. place: everything else that matters about its position."""

    kind: str
    stage: int
    order: tuple[tuple[str, int], ...]
    place: tuple[object, ...]


def keys_of(ops: Sequence[Op], last_stage: int, is_sharded: bool) -> list[Key]:
    """Return the key of each op.

    The first and the last op of a kind and stage differ from the rest: the first finds empty caches and
    overwrites gradients, and after the last they are summed. A forward releases the loss of the previous
    forward, if that was in the last stage. `is_sharded` (ZeRO-2, 3): which weights are full when an op begins
    depends on its stage's ops since the last weight gradients, and which stay full depends on the next op.
    """
    order: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for op in ops:
        order[op.microbatch].append((op.kind, op.stage))
    orders = {microbatch: tuple(own) for microbatch, own in order.items()}
    counts = Counter((op.kind, op.stage) for op in ops)
    done: Counter[tuple[str, int]] = Counter()
    since: defaultdict[int, tuple[str, ...]] = defaultdict(tuple)
    last_forward = -1

    keys: list[Key] = []
    for op, next_kind in zip(ops, next_compute_kinds(list(ops))):
        place: tuple[object, ...] = ()
        if op.kind in COMPUTE_KINDS:
            done[op.kind, op.stage] += 1
            number = done[op.kind, op.stage]
            frees_loss = op.kind == "F" and last_forward == last_stage
            place = (min(number, 3 if is_sharded else 2), number == counts[op.kind, op.stage], frees_loss)
            if is_sharded:
                place += (since[op.stage], next_kind)
            if op.kind == "F":
                last_forward = op.stage
            if op.kind in ("B", "W"):
                since[op.stage] = ()
            elif since[op.stage][-1:] != (op.kind,):
                since[op.stage] += (op.kind,)
        keys.append(Key(op.kind, op.stage, orders[op.microbatch], place))
    return keys


def chosen(ops: Sequence[Op], key_all: Callable[[Sequence[Op]], list[Key]]) -> list[Op]:
    """Choose the ops of the microbatches to trace: at least SAME for each key, or all there are.

    Among few ops, an op may have another key than among all: then the ops around it are traced, too.
    """
    indices: defaultdict[Key, list[int]] = defaultdict(list)
    for index, key in enumerate(key_all(ops)):
        indices[key].append(index)
    kept = {ops[index].microbatch for own in indices.values() for index in (*own[:SAME], own[-1])}
    while True:
        few = [op for op in ops if op.microbatch in kept]
        counts = Counter(key_all(few))
        lacking = [own for key, own in indices.items() if counts[key] < min(SAME, len(own))]
        around = {microbatch for own in lacking for index in own[:SAME] for microbatch in beside(ops, index)}
        if not lacking:
            return few
        if around <= kept:
            return list(ops)
        kept |= around


def beside(ops: Sequence[Op], index: int) -> set[int]:
    """Return the microbatches of an op, of the previous forward, and of its stage's adjacent computations."""
    own = ops[index]
    before = [op for op in reversed(ops[:index]) if op.kind in COMPUTE_KINDS]
    after = [op for op in ops[index + 1 :] if op.kind in COMPUTE_KINDS]
    found = [
        next((op for op in before if op.kind == "F"), own),
        next((op for op in before if op.stage == own.stage), own),
        next((op for op in after if op.stage == own.stage), own),
    ]
    return {op.microbatch for op in (own, *found)}


def with_ends(ops: Sequence[Op]) -> list[Op]:
    """Return the ops, plus the ends of the last sends, which the pipeline awaits after its ops."""
    there = set(ops)
    ends = [op._replace(kind=END_OF_SEND[op.kind]) for op in ops if op.kind in END_OF_SEND]
    return [*ops, *(end for end in ends if end not in there)]


# ---- tracing -----------------------------------------------------------------------------------------------


class RecordLength(NamedTuple):
    """Position in a record: the length of each list, and the state of the ledger."""

    launches: int
    events: int
    changes: int
    host_changes: int
    exchanges: int
    ledger: Ledger


class MarkedOps(list[Op]):
    """Ops that note the position in the record when each of them begins, and at the end. marks: of the last
    iteration;
    memory, host_memory: as they were before it."""

    def __init__(self, ops: Sequence[Op], recorder: Recorder, wire: RecordingWire, ledger: Ledger) -> None:
        super().__init__(ops)
        self.recorder = recorder
        self.wire = wire
        self.ledger = ledger
        self.marks: list[RecordLength] = []
        self.memory = self.host_memory = LiveBytes()

    def __iter__(self) -> Iterator[Op]:
        self.marks = []
        self.memory = self.recorder.memory.copy()
        self.host_memory = self.recorder.host_memory.copy()
        for op in super().__iter__():
            self.marks.append(self.mark())
            yield op
        self.marks.append(self.mark())

    def mark(self) -> RecordLength:
        recorder = self.recorder
        return RecordLength(
            len(recorder.launches),
            events=len(recorder.events),
            changes=len(recorder.memory.changes),
            host_changes=len(recorder.host_memory.changes),
            exchanges=self.wire.log.count,
            ledger=self.ledger.copy(),
        )


class Trace(NamedTuple):
    """all_ops: of a step, with their keys. ops: the traced ones, with theirs."""

    all_ops: list[Op]
    all_keys: list[Key]
    ops: MarkedOps
    keys: list[Key]


class Splicer:
    """Traces a step with few microbatches, and writes the record of all of them."""

    def __init__(self, recorder: Recorder, wire: RecordingWire, ledger: Ledger) -> None:
        self.recorder = recorder
        self.wire = wire
        self.ledger = ledger
        self.trace: Trace | None = None

    @contextlib.contextmanager
    def tracing_few(self) -> Iterator[None]:
        """Run few ops of a step, then complete recorder and ledger. Raises Unlike."""
        reals = {kind: kind.run for kind in (Pipeline, GradientAccumulation)}

        def run(pipeline: Pipeline, ops: list[Op], *args: Any) -> Tensor:
            real = reals[type(pipeline)]
            if self.trace is not None:
                raise Unlike("the pipeline runs twice in a step")
            parts = [part for zero in pipeline.zero_hooks.values() for part in zero.parts]
            is_sharded = any(bucket.zero >= 2 for part in parts for bucket in part)
            last_stage = pipeline.schedule.n_stages - 1
            key_all = functools.partial(keys_of, last_stage=last_stage, is_sharded=is_sharded)
            all_ops = with_ends(ops)
            few = chosen(all_ops, key_all)
            if len(few) == len(all_ops):
                return real(pipeline, ops, *args)
            marked = MarkedOps(few, self.recorder, self.wire, self.ledger)
            self.trace = Trace(all_ops, key_all(all_ops), marked, key_all(few))
            return real(pipeline, marked, *args)

        with (
            mock.patch.object(Pipeline, "run", run),
            mock.patch.object(GradientAccumulation, "run", run),
        ):
            yield
        if self.trace is not None:
            self.expand(self.trace)

    @without_collection()
    def expand(self, trace: Trace) -> None:
        """Read the segments of the traced ops, and write the record of all ops."""
        recorder = self.recorder
        marks = [*trace.ops.marks, trace.ops.mark()]
        begin = marks[0]

        # segments of traced ops; those of a key must be equal
        reader = SegmentReader(recorder)
        segments: dict[Key, Segment] = {}
        for number, key in enumerate(trace.keys):
            segment = reader.read(trace.ops[number], marks[number], marks[number + 1])
            if not segments.setdefault(key, segment).does(segment):
                raise Unlike(f"{key.kind} of stage {key.stage}")
        after = reader.read(AFTER, marks[-2], marks[-1])

        # all ops, in order
        writer = RecordWriter(
            recorder.launches[: begin.launches],
            events=recorder.events[: begin.events],
            ledger=begin.ledger.copy(),
            memory=trace.ops.memory,
            host_memory=trace.ops.host_memory,
            num_exchanges=begin.exchanges,
        )
        try:
            for op, key in zip(trace.all_ops, trace.all_keys):
                writer.write(op, segments[key])
            writer.write(AFTER, after)
        except LookupError as error:
            raise Unlike("a reference finds nothing") from error
        for few, every in ((recorder.memory, writer.memory), (recorder.host_memory, writer.host_memory)):
            if Counter(few.storages.values()) != Counter(every.storages.values()):
                raise Unlike("other bytes stay")

        recorder.launches = writer.launches
        recorder.events[:] = writer.events
        recorder.memory, recorder.host_memory = writer.memory, writer.host_memory
        self.ledger.clear()
        self.ledger.update(writer.ledger)


# ---- what an op did ----------------------------------------------------------------------------------------

AFTER = Op("after", -1, -1)  # stands for everything after the ops


class Ref(NamedTuple):
    """Something made by an op. anchor: "own": the op of this kind and stage in the same microbatch; "back":
    the one `back` runs ago; "first": the first; "before": made before the ops. label: its type. index: its
    position among the things of this type made by the op, or for "before" its number."""

    anchor: str
    kind: str
    stage: int
    back: int
    label: object
    index: int


class Segment(NamedTuple):
    """The effects of an op. Times and exchange numbers are relative to its begin, and storages that it makes
    are 0. What it awaits or releases is a Ref. The name in its own begin event is ""."""

    launches: list[Launch]
    events: list[Event]
    changes: list[Change]
    host_changes: list[Change]
    ledger: Ledger

    def does(self, other: "Segment") -> bool:
        """Return whether both do the same.
        Launches may have a NaN among their numbers: then compare their repr."""
        if len(self.launches) != len(other.launches) or self[1:] != other[1:]:
            return False
        pairs = zip(self.launches, other.launches)
        return all(one == another or repr(vars(one)) == repr(vars(another)) for one, another in pairs)


@dataclass
class Made:
    """Exchanges or storages made by ops. of: {(op, label): their numbers, in order}. by: {number: (the op
    that made it last, label, its index)}. ran: the ops so far, by kind and stage."""

    of: defaultdict[tuple[Op, object], list[int]] = field(default_factory=lambda: defaultdict(list))
    by: dict[int, tuple[Op, object, int]] = field(default_factory=dict)
    ran: defaultdict[tuple[str, int], list[Op]] = field(default_factory=lambda: defaultdict(list))

    def add(self, op: Op, number: int, label: object) -> None:
        own = self.of[op, label]
        self.by[number] = op, label, len(own)
        own.append(number)

    def ref(self, op: Op, number: int) -> Ref:
        if number not in self.by:
            return Ref("before", "", stage=0, back=0, label=None, index=number)
        maker, label, index = self.by[number]
        ran = self.ran[maker.kind, maker.stage]
        anchor, back = "own", 0
        if maker.microbatch != op.microbatch:
            anchor, back = "back", len(ran) - ran.index(maker)
        if back > 1 and maker == ran[0]:
            anchor, back = "first", 0
        return Ref(anchor, maker.kind, maker.stage, back=back, label=label, index=index)

    def number(self, op: Op, ref: Ref) -> int:
        """Resolve a reference. Raises LookupError if no op has made it."""
        if ref.anchor == "before":
            return ref.index
        maker = Op(ref.kind, ref.stage, op.microbatch)
        if ref.anchor != "own":
            maker = self.ran[ref.kind, ref.stage][-ref.back]
        return self.of[maker, ref.label][ref.index]


@dataclass
class SegmentReader:
    """Reads the segments of a trace, in order."""

    recorder: Recorder
    exchanges: Made = field(default_factory=Made)
    storages: Made = field(default_factory=Made)
    host_storages: Made = field(default_factory=Made)

    def read(self, op: Op, begin: RecordLength, end: RecordLength) -> Segment:
        """Return the effects of an op between two marks."""
        recorder, first = self.recorder, begin.launches
        events = recorder.events[begin.events : end.events]
        changes = recorder.memory.changes[begin.changes : end.changes]
        host_changes = recorder.host_memory.changes[begin.host_changes : end.host_changes]
        segment = Segment(
            recorder.launches[first : end.launches],
            events=[self.event(op, event, begin) for event in events],
            changes=[convert_change(self.storages, op, one, first) for one in changes],
            host_changes=[convert_change(self.host_storages, op, one, first) for one in host_changes],
            ledger=+Counter({key: count - begin.ledger[key] for key, count in end.ledger.items()}),
        )
        for made in (self.exchanges, self.storages, self.host_storages):
            made.ran[op.kind, op.stage].append(op)
        return segment

    def event(self, op: Op, event: Event, begin: RecordLength) -> Any:
        """Convert an event for a Segment. Raises Unlike if a stream waits for an earlier op."""
        own: dict[str, object] = {"time": event.time - begin.launches}
        if isinstance(event, PostedExchange):
            self.exchanges.add(op, event.number, exchange_label(event))
            own |= {"number": event.number - begin.exchanges, "batch": event.batch - begin.exchanges}
        elif isinstance(event, Wait):
            own["number"] = self.exchanges.ref(op, event.number)
        elif isinstance(event, StreamWait):
            if event.until < begin.launches:
                raise Unlike("a stream waits for an op before")
            own["until"] = event.until - begin.launches
        elif isinstance(event, OpBegins) and event.name == get_name(op):
            own["name"] = ""
        return event._replace(**own)


def convert_change(made: Made, op: Op, change: Change, first: int) -> Any:
    """Convert a change for a Segment."""
    if change.nbytes < 0:
        return change._replace(time=change.time - first, storage=made.ref(op, change.storage))
    made.add(op, change.storage, (change.nbytes, change.holder))
    return change._replace(time=change.time - first, storage=0)


def exchange_label(exchange: PostedExchange) -> object:
    """Return the common properties of equivalent exchanges."""
    return exchange._replace(number=0, batch=0, time=0)


def get_name(op: Op) -> str:
    """Return the name in the record."""
    return f"{op.kind} of microbatch {op.microbatch}, stage {op.stage}"


# ---- the record of all ops ---------------------------------------------------------------------------------


@dataclass
class RecordWriter:
    """Appends segments to a record. num_exchanges: posted so far."""

    launches: list[Launch]
    events: list[Event]
    ledger: Ledger
    memory: LiveBytes
    host_memory: LiveBytes
    num_exchanges: int
    time: int = 0
    exchanges: Made = field(default_factory=Made)
    storages: Made = field(default_factory=Made)
    host_storages: Made = field(default_factory=Made)

    def __post_init__(self) -> None:
        self.memory.clock = self.host_memory.clock = lambda: self.time

    def write(self, op: Op, segment: Segment) -> None:
        """Write a segment. Raises LookupError, and Unlike if it releases other bytes than the traced op."""
        first = len(self.launches)
        self.launches += segment.launches
        self.events += [self.event(op, event, first) for event in segment.events]
        self.num_exchanges += sum(isinstance(event, PostedExchange) for event in segment.events)
        for change in segment.changes:
            self.change(self.memory, self.storages, op, change, first)
        for change in segment.host_changes:
            self.change(self.host_memory, self.host_storages, op, change, first)
        self.ledger.update(segment.ledger)
        for made in (self.exchanges, self.storages, self.host_storages):
            made.ran[op.kind, op.stage].append(op)

    def event(self, op: Op, event: Any, first: int) -> Event:
        own: dict[str, object] = {"time": first + event.time}
        if isinstance(event, PostedExchange):
            number = self.num_exchanges + event.number
            self.exchanges.add(op, number, exchange_label(event))
            own |= {"number": number, "batch": self.num_exchanges + event.batch}
        elif isinstance(event, Wait):
            own["number"] = self.exchanges.number(op, event.number)
        elif isinstance(event, StreamWait):
            own["until"] = first + event.until
        elif isinstance(event, OpBegins) and not event.name:
            own["name"] = get_name(op)
        return event._replace(**own)

    def change(self, memory: LiveBytes, made: Made, op: Op, change: Any, first: int) -> None:
        self.time = first + change.time
        if change.nbytes > 0:
            storage = -1 - len(made.by)  # differs from all real ones
            made.add(op, storage, (change.nbytes, change.holder))
            memory.add(storage, change.nbytes, change.holder)
            return
        storage = made.number(op, change.storage)
        if memory.storages[storage] != (-change.nbytes, change.holder):
            raise Unlike("other bytes are released")
        memory.release(storage)
