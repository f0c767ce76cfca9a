"""python -m scripts.bench words: the traffic between ranks through the job's store, for many ranks.

Each rank is a process with train.py's PeerWatch (durable/peers.py): its connections, its watcher thread and
its messages. Without a model and a process group, two cores can run 64 ranks. One store on rank 0 serves all
of them, as in a job of any size. Its rate and the operations a rank extrapolate to the time of larger jobs,
which the table marks as such.
"""

import argparse
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from statistics import fmean
from typing import Any
from unittest import mock

from config import ConfigError
from durable import peers
from lab.benchmarks.markdown import markdown_table
from parallel.wire.comm import PeerError
from parallel.wire.world import launcher_store
from runtime import failure

FAR = 16_384  # ranks to extrapolate to
GROWS = 1.5  # growth from the smallest to the largest size beyond this factor is not noise
LIMIT_S = 120.0  # for a story
ATTENDANCE_S = 60.0  # for all ranks to reach a barrier
STORY_SECONDS = 60.0  # how long a waiting rank would wait
PRELOADED = ["durable.peers", "lab.benchmarks.words"]
# the counted operations of a store; all others pass through
COUNTED = ("set", "get", "multi_get", "add", "check", "wait", "compare_set")

# {story: what happens}
STORIES = {
    "start": "a rank joins: its process, its watcher's connection",
    "end": "all ranks finish",
    "failure": "rank 1 raises, the others are busy: cause, states, reasons, codes",
    "hang": "rank 0 has waited too long, the others are in no exchange: it reads what each of them does",
}


Pair = tuple[Synchronized, Synchronized]  # (operations, bytes)


@dataclass(frozen=True)
class Counts:
    """The counts of one story.

    operations, sent: by rank; `sent` in bytes of keys and values, in both directions.
    seconds: until all ranks have ended.
    """

    size: int
    operations: list[int]
    sent: list[int]
    seconds: float


class Totals:
    """The (operations, bytes) of a rank, shared with the parent; `switch` selects another pair."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def switch(self, pair: Pair) -> None:
        self.pair = pair

    def count(self, operations: int, sent: int) -> None:
        for total, value in zip(self.pair, (operations, sent)):
            with total.get_lock():
                total.value += value


class CountedStore:
    """A connection to a store that counts its traffic."""

    def __init__(self, store: Any, totals: Totals) -> None:
        self.store = store
        self.totals = totals

    def clone(self) -> "CountedStore":
        return CountedStore(self.store.clone(), self.totals)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if name not in COUNTED:
            return method

        def counted(*arguments: Any) -> Any:
            self.totals.count(1, sum(map(num_bytes, arguments)))
            result = method(*arguments)
            self.totals.count(0, num_bytes(result))
            return result

        return counted


def num_bytes(value: object) -> int:
    """Return the size of a key or value of the store; numbers count 8 bytes."""
    if isinstance(value, (list, tuple)):
        return sum(map(num_bytes, value))
    if isinstance(value, (str, bytes)):
        return len(value)
    return 8 if type(value) is int else 0


# ---- a rank ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """The arguments of a rank's process.

    before, after: its (operations, bytes) until all ranks have started, and from then on.
    """

    rank: int
    size: int
    port: int
    story: str
    before: Pair
    after: Pair
    meeting: Barrier


def run_rank(mine: Rank) -> None:
    """Run the process of a rank."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # silences the error messages of 64 ranks
    os.environ.update(
        RANK=str(mine.rank), WORLD_SIZE=str(mine.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(mine.port)
    )
    totals = Totals(mine.before)
    open_store = peers.open_store

    def open_counted(*arguments: Any, **options: Any) -> CountedStore:
        return CountedStore(open_store(*arguments, **options), totals)

    with mock.patch.object(peers, "open_store", open_counted):
        watch = peers.PeerWatch(mine.rank, mine.size)
    mine.meeting.wait(ATTENDANCE_S)  # all have started
    totals.switch(mine.after)
    mine.meeting.wait(ATTENDANCE_S)  # the parent starts its clock
    failure.exit_process(failure.fail_cleanly(lambda _: play(mine, watch), []))


def play(mine: Rank, watch: peers.PeerWatch) -> int:
    """Play this rank's part of the story, once all have started."""
    with watch:
        if mine.story == "failure":
            if mine.rank == 1:
                raise ZeroDivisionError("as in a step")
            time.sleep(STORY_SECONDS)
        if mine.story == "hang":
            if mine.rank == 0:
                raise PeerError("no answer for 300.0 s in all_reduce of 4 bytes in group job", failure.HANG)
            time.sleep(STORY_SECONDS)
    return 0


# ---- all ranks ---------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_story(context: ForkServerContext, story: str, size: int) -> tuple[Counts, Counts]:
    """Return the counts (of the start, after the start). Raises ConfigError if the ranks do not end."""
    meeting = context.Barrier(size + 1)
    port = free_port()

    def counters() -> Pair:
        return context.Value("q", 0), context.Value("q", 0)

    def make_rank(rank: int) -> Rank:
        return Rank(
            rank=rank, size=size, port=port, story=story, before=counters(), after=counters(), meeting=meeting
        )

    ranks = [make_rank(rank) for rank in range(size)]
    processes = [context.Process(target=run_rank, args=(rank,), daemon=True) for rank in ranks]
    began = time.monotonic()
    try:
        for process in processes:
            process.start()
        meeting.wait(ATTENDANCE_S)
        started = time.monotonic()
        meeting.wait(ATTENDANCE_S)
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        ended = time.monotonic()
        if any(process.exitcode is None for process in processes):
            raise ConfigError(f"words: {story} of {size} ranks has not ended after {LIMIT_S:g} s")
    except threading.BrokenBarrierError as error:
        raise ConfigError(f"words: {size} ranks have not started after {ATTENDANCE_S:g} s") from error
    finally:
        for process in processes:
            if process.pid is not None:  # it was started
                process.kill()
    start = make_counts([rank.before for rank in ranks], started - began)
    return start, make_counts([rank.after for rank in ranks], ended - started)


def make_counts(totals: list[Pair], seconds: float) -> Counts:
    operations = [total.value for total, _ in totals]
    return Counts(len(totals), operations, [total.value for _, total in totals], seconds)


def measure_rate(size: int) -> float:
    """Measure the operations a second of one store, with `size` connections that await every answer."""
    listener = socket.create_server(("127.0.0.1", 0))
    keeper = launcher_store("127.0.0.1", listener.getsockname()[1], listener)
    asked = 4000 // size
    clients = [peers.clone(keeper) for _ in range(size)]

    def ask(client: Any, rank: int) -> None:
        for _ in range(asked):
            client.add(f"rank/{rank}", 1)

    threads = [threading.Thread(target=ask, args=each) for each in zip(clients, range(size))]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return size * asked / (time.monotonic() - began)


# ---- the command -------------------------------------------------------------------------------------------


def add_words_options(words: argparse.ArgumentParser) -> None:
    words.add_argument("--ranks", default="8,16,32,64", help="numbers of ranks, separated by commas")


def main(args: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError if --ranks are not numbers."""
    sizes = parse_sizes(args.ranks)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    found: dict[str, list[Counts]] = {story: [] for story in STORIES}
    for size in sizes:
        for story in list(STORIES)[1:]:
            start, rest = run_story(context, story, size)
            found[story].append(rest)
            if story == "end":
                found["start"].append(start)
    rate = measure_rate(sizes[-1])

    rows = [row for story, counts in found.items() for row in make_rows(story, counts, rate)]
    print(*markdown_table(rows), sep="\n")
    print(f"\nOne store on this machine answers {rate:,.0f} operations a second.")
    print(*(f"{story}: {what}." for story, what in STORIES.items()), sep="\n")
    return 0


def parse_sizes(text: str) -> list[int]:
    """Parse --ranks. Raises ConfigError."""
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = []
    if len(sizes) < 2 or sizes[0] < 2:
        raise ConfigError(f"--ranks: {text!r}: give two numbers or more, from 2 on, such as 8,64")
    return sizes


def make_rows(story: str, counts: Sequence[Counts], rate: float) -> list[dict[str, str]]:
    """Return a row for each number of ranks, and one for FAR ranks."""
    rows = [
        make_counts_row(story, f"{each.size}", fmean(each.operations), max(each.operations), fmean(each.sent))
        | {"seconds": f"{each.seconds:.1f}"}
        for each in counts
    ]
    operations = line_at_far(counts, [sum(each.operations) for each in counts])
    sent = line_at_far(counts, [sum(each.sent) for each in counts])
    busiest = [max(each.operations) for each in counts]
    most = line_at_far(counts, busiest) if busiest[-1] > GROWS * busiest[0] else max(busiest)
    far = make_counts_row(story, f"{FAR:,} (extrapolated)", operations / FAR, most, sent / FAR)
    rows.append(far | {"seconds": f"{operations / rate:.1f} at the store's rate"})
    return rows


def make_counts_row(story: str, ranks: str, operations: float, most: float, sent: float) -> dict[str, str]:
    return {
        "story": story,
        "ranks": ranks,
        "operations a rank": f"{operations:,.1f}",
        "of the busiest": f"{most:,.0f}",
        "bytes a rank": f"{sent:,.0f}",
    }


def line_at_far(counts: Sequence[Counts], values: Sequence[float]) -> float:
    """Return the value at FAR ranks, on the line through the smallest and the largest size."""
    smallest, largest = counts[0].size, counts[-1].size
    slope = (values[-1] - values[0]) / (largest - smallest)
    return values[-1] + slope * (FAR - largest)
