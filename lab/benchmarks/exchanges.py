"""Do the collectives of parallel/wire/comm.py work here, with every dtype? Over NCCL, or over gloo on a CPU.

Each is called synchronously and, where comm.py supports it, asynchronously, with the clock that train.py
uses; results are compared with what each rank must receive. A world of one takes no shortcut: its group
claims a size other than 1 (Alone), so the exchange goes through the library. Rank 0 reports the rows.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lab.benchmarks.jobs import Report
from parallel.wire import comm
from parallel.wire.comm import Group
from parallel.wire.world import World, join_alone, join_job, leave_job

NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
MOVED = (*NUMBERS, torch.int8, torch.bool)  # dtypes that are sent, but not summed
ROWS = 1000  # of a message; not a power of two
WIDTH = 24
TIMEOUT_S = 20.0
NAMED = ("row", "starting")


class Alone(int):
    """One in arithmetic, but compares as larger than one, because comm.py skips groups of one rank."""

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return other <= 1

    __hash__ = int.__hash__


@dataclass(frozen=True)
class OneRankGroup(Group):
    """A group of one rank that still communicates."""

    @property
    def size(self) -> int:
        return Alone(1)


@dataclass(frozen=True)
class Place:
    """The device and group of a check."""

    group: Group
    device: torch.device

    def message(self, rank: int, dtype: torch.dtype, parts: int = 1) -> Tensor:
        """Return the message of `rank`: [parts * ROWS, WIDTH] of small numbers that all dtypes represent."""
        count = torch.arange(parts * ROWS * WIDTH, device=self.device).view(-1, WIDTH)
        return ((count + 5 * rank) % 7).to(dtype)

    @property
    def num_ranks(self) -> int:
        return len(self.group.ranks)

    def messages(self, dtype: torch.dtype, parts: int = 1) -> list[Tensor]:
        return [self.message(rank, dtype, parts) for rank in range(self.num_ranks)]


Check = Callable[[Place, torch.dtype], tuple[Tensor, Tensor]]  # -> (got, expected)


def own_part(x: Tensor, place: Place) -> Tensor:
    return x[place.group.index * ROWS : (place.group.index + 1) * ROWS]


def all_reduce(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    got = comm.all_reduce_sum(place.message(place.group.index, dtype), place.group)
    return got, compute_sum(place.messages(dtype))


def started_all_reduce(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    got = comm.start_all_reduce(place.message(place.group.index, dtype), place.group).wait()
    return got, compute_sum(place.messages(dtype))


def all_gather(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    got = comm.all_gather(place.message(place.group.index, dtype), place.group)
    return got, torch.cat(place.messages(dtype))


def started_all_gather(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    expected = torch.cat(place.messages(dtype))
    message = place.message(place.group.index, dtype)
    got = comm.start_all_gather(message, place.group, torch.zeros_like(expected)).wait()
    return got, expected


def reduce_scatter(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    parts = place.num_ranks
    got = comm.reduce_scatter(place.message(place.group.index, dtype, parts), place.group)
    return got, own_part(compute_sum(place.messages(dtype, parts)), place)


def started_reduce_scatter(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Reduce-scatter into this rank's part of the message, as ZeRO does."""
    parts = place.num_ranks
    message = place.message(place.group.index, dtype, parts)
    got = comm.start_reduce_scatter(message, place.group, own_part(message, place)).wait()
    return got, own_part(compute_sum(place.messages(dtype, parts)), place)


def all_gather_each(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All-gather two messages concurrently, each by itself, as sequence parallelism gathers a batch."""
    message, expected = messages_to_gather(place, dtype)
    return comm.all_gather_each(message, place.group), expected


def started_all_gather_each(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    message, expected = messages_to_gather(place, dtype)
    return comm.start_all_gather_each(message, place.group).wait(), expected


def messages_to_gather(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (two messages of this rank [2, ROWS, WIDTH], those of all ranks concatenated along dim 1)."""
    pairs = [message.view(2, ROWS, WIDTH) for message in place.messages(dtype, parts=2)]
    return pairs[place.group.index], torch.cat(pairs, 1)


def reduce_scatter_each(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    message, expected = messages_to_scatter(place, dtype)
    return comm.reduce_scatter_each(message, place.group), expected


def started_reduce_scatter_each(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    message, expected = messages_to_scatter(place, dtype)
    return comm.start_reduce_scatter_each(message, place.group).wait(), expected


def messages_to_scatter(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (this rank's two messages [2, ranks * ROWS, WIDTH], its part of their sums [2, ROWS, WIDTH])."""
    messages = place.messages(dtype, parts=2 * place.num_ranks)
    total = compute_sum(messages).view(2, place.num_ranks, ROWS, WIDTH)
    message = messages[place.group.index].view(2, -1, WIDTH)
    return message, total[:, place.group.index]


def all_to_all(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    parts = place.num_ranks
    message = place.message(place.group.index, dtype, parts)
    got = comm.all_to_all(message.view(parts, ROWS, WIDTH), place.group)
    expected = [own_part(message, place) for message in place.messages(dtype, parts)]
    return got, torch.stack(expected)


def started_all_to_all(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All-to-all in which rank r sends 3 r + i + 1 rows to rank i."""
    ranks = range(place.num_ranks)

    def rows(source: int, target: int) -> int:
        return 3 * source + target + 1

    index = place.group.index
    sent = [rows(index, target) for target in ranks]
    received = [rows(source, index) for source in ranks]
    got = comm.start_all_to_all(
        place.message(index, dtype)[: sum(sent)], sent, received, place.group
    ).wait()
    expected = []
    for source in ranks:
        first = sum(rows(source, target) for target in range(index))
        expected.append(place.message(source, dtype)[first : first + rows(source, index)])
    return got, torch.cat(expected)


def broadcast(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    last = place.num_ranks - 1
    got = comm.broadcast(place.message(place.group.index, dtype), place.group, source=last)
    return got, place.message(last, dtype)


def transfers(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Exchange with the next and the previous rank: two sends and two receives at once."""
    index, size = place.group.index, place.num_ranks
    after, before = (index + 1) % size, (index - 1) % size
    message = place.message(index, dtype)
    buffers = [torch.zeros_like(message) for _ in range(2)]
    sends = [(message, after), (message[: ROWS // 2].contiguous(), before)]
    receives = [(buffers[0], before), (buffers[1][: ROWS // 2], after)]
    for transfer in comm.start_transfers(sends, receives, place.group):
        transfer.wait()
    expected = [place.message(before, dtype), place.message(after, dtype)]
    expected[1][ROWS // 2 :] = 0
    return torch.cat(buffers), torch.cat(expected)


def largest(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exchange = comm.all_reduce_max_float if dtype.is_floating_point else comm.all_reduce_max
    got = exchange(place.message(place.group.index, dtype), place.group)
    return got, torch.stack(place.messages(dtype)).amax(0)


def objects(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All-gather Python objects, which travel via the host."""
    got = comm.all_gather_objects({"rank": place.group.index}, place.group)
    return torch.tensor([one["rank"] for one in got]), torch.arange(place.num_ranks)


def objects_of_all(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gather Python objects of different lengths on the first rank only."""
    index = place.group.index
    own_words = ["x"] * index
    received = comm.gather_objects([*own_words, index], place.group)

    num_received = place.num_ranks if index == 0 else 0
    last_words = [words[-1] for words in received]
    return torch.tensor(last_words, dtype=torch.int64), torch.arange(num_received)


def object_of_one(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Broadcast a Python object from the last rank."""
    last = place.num_ranks - 1
    got = comm.broadcast_object({"rank": place.group.index}, place.group, source=last)
    return torch.tensor([got["rank"]]), torch.tensor([last])


def bytes_of_one(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Broadcast bytes from the last rank."""
    last = place.num_ranks - 1
    sent = bytes(range(256)) if place.group.index == last else b""
    got = comm.broadcast_bytes(sent, place.group, source=last)
    return torch.tensor(list(got)), torch.arange(256)


def compute_sum(messages: list[Tensor]) -> Tensor:
    return torch.stack(messages).sum(0).to(messages[0].dtype)


CHECKS: dict[str, tuple[Check, tuple[torch.dtype, ...]]] = {
    "all_reduce": (all_reduce, NUMBERS),
    "all_reduce, started": (started_all_reduce, NUMBERS),
    "all_gather": (all_gather, MOVED),
    "all_gather, started": (started_all_gather, MOVED),
    "reduce_scatter": (reduce_scatter, NUMBERS),
    "reduce_scatter, started in place": (started_reduce_scatter, NUMBERS),
    "all_gather_each": (all_gather_each, MOVED),
    "all_gather_each, started": (started_all_gather_each, MOVED),
    "reduce_scatter_each": (reduce_scatter_each, NUMBERS),
    "reduce_scatter_each, started": (started_reduce_scatter_each, NUMBERS),
    "all_to_all": (all_to_all, MOVED),
    "all_to_all, started": (started_all_to_all, MOVED),
    "broadcast": (broadcast, MOVED),
    "sends and receives": (transfers, MOVED),
    "largest": (largest, (torch.float64, torch.float32, torch.int64, torch.int32)),
    "objects": (objects, (torch.int64,)),
    "objects, to the first": (objects_of_all, (torch.int64,)),
    "object, from one": (object_of_one, (torch.int64,)),
    "object of bytes, from one": (bytes_of_one, (torch.int64,)),
}
NEEDS_A_PEER = {"cpu": {"sends and receives"}, "cuda": set()}  # gloo cannot send to its own rank


def run_checks(place: Place, report: Report, done: frozenset[str] = frozenset()) -> None:
    """Report a row for each collective: how many dtypes passed, and what went wrong with the others."""
    for name, (check, dtypes) in CHECKS.items():
        if name in done:
            continue
        report(starting=name)
        if place.num_ranks == 1 and name in NEEDS_A_PEER[place.device.type]:
            report(row=name, state="absent", problem="gloo does not send to its own rank")
            continue
        wrong = []
        for dtype in dtypes:
            try:
                place.group.ledger.clear()
                got, expected = check(place, dtype)
                assert place.group.ledger or name.startswith("object"), "nothing was exchanged"
                if got.shape != expected.shape or not torch.equal(got, expected):
                    wrong.append(f"{short(dtype)}: wrong")
            except Exception as error:
                traceback.print_exc()
                wrong.append(f"{short(dtype)}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
        figures = {"note": f"{len(dtypes) - len(wrong)} of {len(dtypes)} dtypes"}
        if wrong:
            report(row=name, state="wrong", problem="; ".join(wrong), **figures)
        else:
            report(row=name, state="ok", **figures)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def join(device: torch.device, rank: int, size: int, meet: str) -> Place:
    """Initialize the process group of the whole job. The ranks rendezvous via the file `meet`."""
    if size == 1:
        join_alone(device.type)
        world = World(0, 1, device)
        world.activity.timeout_s = TIMEOUT_S
        group: Group = OneRankGroup("job", (0,), 0, activity=world.activity)
    else:
        world = join_job(device, rank, size, TIMEOUT_S, f"file://{meet}")
        group = world.all_ranks()
    if device.type == "cuda":
        world.activity.clock.device = device
    return Place(replace(group, ledger=Counter()), device)


def report_exchanges(
    report: Report, done: frozenset[str], *, device: str, rank: int, world: int, meet: str
) -> None:
    """Check the exchanges as one rank of a world. Rank 0 reports the rows."""
    at = torch.device(device)
    if device == "cuda":
        at = torch.device("cuda", rank)
        torch.cuda.set_device(at)

    prefix = "1 rank: " if world == 1 else f"{world} ranks: "

    def report_of_first(**message: object) -> None:
        if rank == 0:
            report(**{key: f"{prefix}{value}" if key in NAMED else value for key, value in message.items()})

    report(starting="joining")
    place = join(at, rank, world, meet)
    names = frozenset(name.removeprefix(prefix) for name in done)
    run_checks(place, report_of_first, names if world == 1 else frozenset())  # all ranks run the same checks
    report(starting="leaving")
    leave_job()
