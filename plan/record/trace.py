"""Export a modeled step in the trace event format, for Perfetto and chrome://tracing.

    a process    a rank
    a thread     the ops of the pipeline; a stream; a communicator, with separate sends and receives
    an arrow     from a send to its receive
    a counter    bytes of tensors on the device

Times are in microseconds. An allocation has the start time of the next launch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from parallel.wire.connection import Connection
from plan.record.memory import Point
from plan.record.streams import COMPUTE
from plan.record.summary import LaunchKind
from plan.record.timeline import ExchangeSpan, JobTimeline, RankTimeline

OPS = "ops of the pipeline"
GIB = 2**30


class Thread(NamedTuple):
    """A thread of a rank. key: what runs there."""

    number: int
    name: str


def trace_events(
    line: JobTimeline, titles: Mapping[int, str], curves: Mapping[int, Sequence[Point]]
) -> Iterator[dict]:
    """Yield the events, rank by rank. `titles` name the ranks; `curves` are their bytes over launches."""
    for place, (rank, one) in enumerate(line.ranks.items()):
        threads = assign_threads(one)
        yield named("process_name", rank, 0, titles[rank])
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": place}}
        for thread in threads.values():
            yield named("thread_name", rank, thread.number, thread.name)
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": rank,
                "tid": thread.number,
                "args": {"sort_index": thread.number},
            }
        yield from launch_events(rank, one, threads)
        yield from exchange_events(rank, one, threads)
        yield from memory_events(rank, one, curves[rank], line.step)


def named(what: str, rank: int, thread: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def assign_threads(one: RankTimeline) -> dict[object, Thread]:
    """Return {"", a stream, or a lane_key: its thread}."""
    names: dict[object, str] = {"": OPS}
    for kind in sorted(one.steps.kinds, key=lambda kind: kind.stream != COMPUTE):
        names.setdefault(kind.stream, kind.stream)
    groups: dict[object, list[str]] = {}
    for span in one.exchanges:
        known = groups.setdefault(lane_key(span), [])
        if span.exchange.group not in known:
            known.append(span.exchange.group)
    for key, known in groups.items():
        (channel, ranks), verb = key  # pyright: ignore[reportGeneralTypeIssues]
        words = " ".join(word for word in (", ".join(known), channel, verb) if word)
        names[key] = f"{words}: {len(ranks)} ranks"
    return {key: Thread(number, name) for number, (key, name) in enumerate(names.items())}


def lane_key(span: ExchangeSpan) -> tuple[Connection, str]:
    exchange = span.exchange
    return exchange.lane, "" if exchange.peer is None else exchange.verb


def make_slice(
    name: str, category: str, rank: int, thread: Thread, start: float, end: float, **facts: object
) -> dict:
    """Return a complete event. start, end: seconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": thread.number,
        "ts": microseconds(start),
        "dur": max(0.0, round(microseconds(end) - microseconds(start), 3)),
        "args": facts,
    }


def microseconds(seconds: float) -> float:
    """Round to whole nanoseconds, so that consecutive events do not overlap by a rounding error."""
    return round(1e6 * seconds, 3)


def launch_events(rank: int, one: RankTimeline, threads: Mapping[object, Thread]) -> Iterator[dict]:
    for op in one.ops:
        yield make_slice(op.name, "op", rank, threads[""], op.start, op.end)
    kinds = one.steps.kinds
    facts = [launch_facts(kind) for kind in kinds]
    for index, start in zip(one.steps.order, one.starts):
        kind = kinds[index]
        if kind.work.launches:
            end = start + one.seconds[index]
            thread = threads[kind.stream]
            yield make_slice(kind.work.kernel, kind.phase, rank, thread, start, end, **facts[index])


def launch_facts(kind: LaunchKind) -> dict[str, object]:
    work = kind.work
    return {
        "place": kind.place,
        "part": work.part,
        "FLOPs": int(work.flops),
        "bytes": int(work.nbytes),
        "kernels": work.launches,
    }


def exchange_events(rank: int, one: RankTimeline, threads: Mapping[object, Thread]) -> Iterator[dict]:
    for span in one.exchanges:
        exchange = span.exchange
        thread = threads[lane_key(span)]
        facts = {"group": exchange.group, "bytes": exchange.nbytes, "dtype": str(exchange.dtype)}
        if exchange.peer is not None:
            facts["peer"] = exchange.peer
        yield make_slice(exchange.verb, "exchange", rank, thread, span.start, span.end, **facts)
        if span.sender is not None:
            yield arrow(span, rank, thread)


def arrow(span: ExchangeSpan, rank: int, thread: Thread) -> dict:
    """Return one end of an arrow, bound to this exchange."""
    assert span.sender is not None
    is_send = span.sender == (rank, span.exchange.number)
    event = {
        "ph": "s" if is_send else "f",
        "name": "transfer",
        "cat": "transfer",
        "id": f"{span.sender[0]}.{span.sender[1]}",
        "pid": rank,
        "tid": thread.number,
        "ts": microseconds(span.start),
    }
    return event if is_send else event | {"bp": "e"}


def memory_events(rank: int, one: RankTimeline, curve: Sequence[Point], step: float) -> Iterator[dict]:
    kinds, order = one.steps.kinds, one.steps.order
    now, number = 0.0, 0
    for point in curve:
        while number < min(point.time + 1, len(order)):  # the launch that it is allocated for
            if kinds[order[number]].stream == COMPUTE:
                now = max(now, one.starts[number])
            number += 1
        time = step if point.time >= len(order) else now
        yield {
            "ph": "C",
            "name": "tensors, GiB",
            "pid": rank,
            "tid": 0,
            "ts": microseconds(time),
            "args": {"GiB": round(point.nbytes / GIB, 6)},
        }
