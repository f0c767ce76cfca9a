"""A microbatch like another is not traced again: a step is recorded with a few, and the others are copied.

    choose     of the ops of a rank (parallel/pipeline/schedule.py), those of a few microbatches. Ops with one
               Key are alike: of one kind and stage, their microbatches have their ops in one order on the
               rank, and the same is true of what else matters of their place. Two of each key are traced, and
               the last
    trace      the real Pipeline.run with these ops alone: nothing on a wire without others needs the rest
    compare    what one op did, a Segment, must be what all traced ops of its key did: the same launches,
               exchanges, allocations, releases and counts. What it awaits or releases is said without numbers
               (Ref): "the third tensor that the forward of the same microbatch made"
    write      the record of all ops, one after the other, each from the segment of its key

If two ops of a key differ, if a reference finds nothing, or if at the end other bytes are alive than after
the trace, it raises Unlike, and the step is traced whole (plan/record/role.py).
"""

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from parallel.pipeline.executor import Pipeline, next_compute_kinds
from parallel.pipeline.schedule import COMPUTE_KINDS, END_OF_SEND, Op
from parallel.wire.comm import Ledger
from plan.record.events import Event, OpBegins, PostedExchange, StreamWait, Wait, without_collection
from plan.record.launches import Launch, Recorder
from plan.record.memory import Change, LiveBytes
from plan.record.wire import RecordingWire

SAME = 2  # ops of a key that are traced to be compared


class Unlike(Exception):
    """Microbatches are not alike: the step must be traced whole."""


# ---- which ops are traced ----------------------------------------------------------------------------------


class Key(NamedTuple):
    """What ops that do the same have in common. order: (kind, stage) of all ops of the microbatch, as the
    rank runs them. place: what else matters of where it runs."""

    kind: str
    stage: int
    order: tuple[tuple[str, int], ...]
    place: tuple[object, ...]


def keys_of(ops: Sequence[Op], last_stage: int, is_sharded: bool) -> list[Key]:
    """Return the key of each op.

    The first and the last op of a kind and stage are apart: the first finds what it needs in no cache and
    overwrites gradients, and after the last they are summed. A forward releases the loss of the one before
    it, if that was of the last stage. is_sharded (ZeRO-2, 3): what is full when an op begins depends on the
    ops of its stage since the last weight gradients, and what stays full on the next.
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
    """Return the ops of the microbatches that are traced: of each key at least SAME, or all there are.

    Among few ops an op may have another key than among all: then those around it are traced, too.
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
    """Return the microbatches of an op, of the forward before it, and of the computations of its stage around
    it."""
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
    """Return the ops, and the ends of the last sends, which the pipeline awaits after its ops."""
    there = set(ops)
    ends = [op._replace(kind=END_OF_SEND[op.kind]) for op in ops if op.kind in END_OF_SEND]
    return [*ops, *(end for end in ends if end not in there)]


# ---- tracing -----------------------------------------------------------------------------------------------


class RecordLength(NamedTuple):
    """Where a record stands: how many of each it has, and what the ledger says."""

    launches: int
    events: int
    changes: int
    host_changes: int
    exchanges: int
    ledger: Ledger


class MarkedOps(list[Op]):
    """Ops that note where the record stands when each of them begins, and at the end. marks: of the last
    iteration; memory, host_memory: as they were before it."""

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
            exchanges=self.wire.count,
            ledger=self.ledger.copy(),
        )


class Trace(NamedTuple):
    """all_ops: of a step, with their keys. ops: those that are traced, with theirs."""

    all_ops: list[Op]
    all_keys: list[Key]
    ops: MarkedOps
    keys: list[Key]


class Splicer:
    """Traces a step with few microbatches, and makes the record of all of them."""

    def __init__(self, recorder: Recorder, wire: RecordingWire, ledger: Ledger) -> None:
        self.recorder = recorder
        self.wire = wire
        self.ledger = ledger
        self.trace: Trace | None = None

    @contextlib.contextmanager
    def tracing_few(self) -> Iterator[None]:
        """Around a step, of which it runs few ops; then recorder and ledger hold all. Raises Unlike."""
        real = Pipeline.run

        def run(pipeline: Pipeline, ops: list[Op], *args: Any) -> Tensor:
            if self.trace is not None:
                raise Unlike("the pipeline runs twice in a step")
            parts = [part for zero in pipeline.zero_schedulers.values() for part in zero.parts]
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

        with mock.patch.object(Pipeline, "run", run):
            yield
        if self.trace is not None:
            self.expand(self.trace)

    @without_collection()
    def expand(self, trace: Trace) -> None:
        """Read what the traced ops did, and writes the record of all."""
        recorder = self.recorder
        marks = [*trace.ops.marks, trace.ops.mark()]
        begin = marks[0]

        # what each traced op did; those of a key must have done the same
        reader = SegmentReader(recorder)
        segments: dict[Key, Segment] = {}
        for number, key in enumerate(trace.keys):
            segment = reader.read(trace.ops[number], marks[number], marks[number + 1])
            if not segments.setdefault(key, segment).does(segment):
                raise Unlike(f"{key.kind} of stage {key.stage}")
        after = reader.read(AFTER, marks[-2], marks[-1])

        # all ops, one after the other
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

AFTER = Op("after", -1, -1)  # stands for what follows the ops


class Ref(NamedTuple):
    """What an op made. anchor: "own": the op of this kind and stage of the same microbatch; "back": the one
    that ran `back` ones ago; "first": the first; "before": made before the ops. label: what it is. index: the
    place among what that op made of it; before the ops its number."""

    anchor: str
    kind: str
    stage: int
    back: int
    label: object
    index: int


class Segment(NamedTuple):
    """What an op did. Times and numbers of exchanges count from its begin, a storage that it makes is 0. What
    it awaits or releases is a Ref. The name of its own begin is ""."""

    launches: list[Launch]
    events: list[Event]
    changes: list[Change]
    host_changes: list[Change]
    ledger: Ledger

    def does(self, other: "Segment") -> bool:
        """Return whether both do the same. A launch may have a NaN among its numbers: then words are
        compared."""
        if len(self.launches) != len(other.launches) or self[1:] != other[1:]:
            return False
        pairs = zip(self.launches, other.launches)
        return all(one == another or repr(vars(one)) == repr(vars(another)) for one, another in pairs)


@dataclass
class Made:
    """Exchanges or storages that ops have made. of: {(op, label): their numbers, in order}. by: {number: (the
    op that made it last, label, its place)}. ran: the ops so far, by kind and stage."""

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
        """Raise LookupError if no op has made it."""
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
        """Return what an op did between two marks."""
        recorder, first = self.recorder, begin.launches
        events = recorder.events[begin.events : end.events]
        changes = recorder.memory.changes[begin.changes : end.changes]
        host_changes = recorder.host_memory.changes[begin.host_changes : end.host_changes]
        segment = Segment(
            recorder.launches[first : end.launches],
            events=[self.event(op, event, begin) for event in events],
            changes=[change_of(self.storages, op, one, first) for one in changes],
            host_changes=[change_of(self.host_storages, op, one, first) for one in host_changes],
            ledger=+Counter({key: count - begin.ledger[key] for key, count in end.ledger.items()}),
        )
        for made in (self.exchanges, self.storages, self.host_storages):
            made.ran[op.kind, op.stage].append(op)
        return segment

    def event(self, op: Op, event: Event, begin: RecordLength) -> Any:
        """As a Segment has it. Raises Unlike for a wait of a stream for an op before."""
        own: dict[str, object] = {"time": event.time - begin.launches}
        if isinstance(event, PostedExchange):
            self.exchanges.add(op, event.number, label_of(event))
            own |= {"number": event.number - begin.exchanges, "batch": event.batch - begin.exchanges}
        elif isinstance(event, Wait):
            own["number"] = self.exchanges.ref(op, event.number)
        elif isinstance(event, StreamWait):
            if event.until < begin.launches:
                raise Unlike("a stream waits for an op before")
            own["until"] = event.until - begin.launches
        elif isinstance(event, OpBegins) and event.name == name_of(op):
            own["name"] = ""
        return event._replace(**own)


def change_of(made: Made, op: Op, change: Change, first: int) -> Any:
    """As a Segment has it."""
    if change.nbytes < 0:
        return change._replace(time=change.time - first, storage=made.ref(op, change.storage))
    made.add(op, change.storage, (change.nbytes, change.holder))
    return change._replace(time=change.time - first, storage=0)


def label_of(exchange: PostedExchange) -> object:
    """Return what exchanges that are alike have in common."""
    return exchange._replace(number=0, batch=0, time=0)


def name_of(op: Op) -> str:
    """As the record names it."""
    return f"{op.kind} of microbatch {op.microbatch}, stage {op.stage}"


# ---- the record of all ops ---------------------------------------------------------------------------------


@dataclass
class RecordWriter:
    """Adds segments to a record. num_exchanges: posted so far."""

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
        """Raise LookupError, and Unlike if it releases other bytes than the traced op."""
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
            self.exchanges.add(op, number, label_of(event))
            own |= {"number": number, "batch": self.num_exchanges + event.batch}
        elif isinstance(event, Wait):
            own["number"] = self.exchanges.number(op, event.number)
        elif isinstance(event, StreamWait):
            own["until"] = first + event.until
        elif isinstance(event, OpBegins) and not event.name:
            own["name"] = name_of(op)
        return event._replace(**own)

    def change(self, memory: LiveBytes, made: Made, op: Op, change: Any, first: int) -> None:
        self.time = first + change.time
        if change.nbytes > 0:
            storage = -1 - len(made.by)  # of no real one
            made.add(op, storage, (change.nbytes, change.holder))
            memory.add(storage, change.nbytes, change.holder)
            return
        storage = made.number(op, change.storage)
        if memory.storages[storage] != (-change.nbytes, change.holder):
            raise Unlike("other bytes are released")
        memory.release(storage)
