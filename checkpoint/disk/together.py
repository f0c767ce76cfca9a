"""Run a part of a task on every rank and wait for the slowest rank, however long it takes.

Collectives time out after parallel.timeout_s, so that hangs are found quickly. Hashing or writing a terabyte
takes longer. So each rank runs its part in a thread, while the calling thread meets the other ranks in short
exchanges until all parts are done:

- a rank that dies or is stopped is detected as in any exchange;
- a part that never ends, for example on a disk that does not answer, is detected after `timeout_s`.
"""
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from parallel.wire.comm import PeerError

Result = TypeVar("Result")
Gather = Callable[[object], list[Any]]  # returns all ranks' objects, to every rank or only the first
Broadcast = Callable[[Any], Any]  # returns the first rank's object on every rank
Outcome = tuple[object, Exception | None]  # (result, None) or (None, error)

FIRST_INTERVAL = 0.02  # seconds between the first two exchanges; intervals double ...
LONGEST_INTERVAL = 1.0  # ... up to this one
MAX_NAMED_RANKS = 8  # in an error message
PEER_TIMEOUT = 76  # exit code: a peer did not answer in time


def gather_alone(mine: object) -> list[Any]:
    """`gather` for a single rank."""
    return [mine]


def broadcast_alone(mine: object) -> object:
    """`broadcast` for a single rank."""
    return mine


def do_nothing() -> None:
    """The part of a rank that has nothing to do."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that write or read a checkpoint together, and how they exchange plain data.

    `gather` returns all ranks' objects, which must be small, on every rank. `gather_first` returns them on
    the first rank and [] elsewhere, for data that grows with the number of ranks. `broadcast` returns the
    first rank's object on every rank and ignores the others'.
    """
    rank: int = 0
    size: int = 1
    gather: Gather = gather_alone
    gather_first: Gather = gather_alone
    broadcast: Broadcast = broadcast_alone

    def run_on_all(self, work: Callable[[], Result], timeout_s: float | None = None) -> Result:
        """Call agree_on_outcome among these ranks."""
        return agree_on_outcome(self.gather, work, timeout_s if self.size > 1 else None)

    def run_on_first(self, work: Callable[[], Result], timeout_s: float | None = None) -> Result:
        """Run work() on the first rank and return its result, or raise its error, on every rank.
        Collective."""
        own_part: Callable[[], Any] = work if self.rank == 0 else do_nothing
        return self.broadcast(self.run_on_all(own_part, timeout_s))


def agree_on_outcome(gather: Gather, work: Callable[[], Result], timeout_s: float | None = None) -> Result:
    """Return work() once it is done on every rank. Collective.

    `gather` returns all ranks' objects on every rank. Only errors are exchanged, not results. `timeout_s`
    limits the slowest rank, in seconds. If it is None, work() runs in the calling thread, and ranks that are
    done wait in `gather`.

    If work() fails on any rank, every rank raises the error of the first failing rank, so that all continue
    alike. Raises PeerError (exit code 76) on all ranks if a rank is not done after `timeout_s`.
    """
    if timeout_s is None:
        result, own_error = capture_outcome(work)
    else:
        result, own_error = while_others_wait(gather, work, timeout_s)
    errors = gather(own_error)

    for error in errors:
        if error is not None:
            raise error from own_error
    return cast(Result, result)


def capture_outcome(work: Callable[[], object]) -> Outcome:
    """Call work() and return (its result, None) or (None, its error)."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def while_others_wait(gather: Gather, work: Callable[[], object], timeout_s: float) -> Outcome:
    """Return capture_outcome(work) once the work of every rank is done.

    Collective. Raises PeerError after `timeout_s`.
    """
    outcome: list[Outcome] = []  # filled by the thread
    thread = threading.Thread(target=lambda: outcome.append(capture_outcome(work)), name="part", daemon=True)
    begun = time.monotonic()
    thread.start()

    interval = FIRST_INTERVAL
    while True:
        thread.join(interval)
        states = gather((bool(outcome), time.monotonic() - begun))  # (done, seconds) of every rank
        late = [rank for rank, (done, _) in enumerate(states) if not done]
        if not late:
            return outcome[0]
        seconds_on_rank_0 = states[0][1]  # one clock, so that all ranks decide alike
        if seconds_on_rank_0 > timeout_s:
            raise PeerError(late_message(late, timeout_s), PEER_TIMEOUT)
        interval = min(2 * interval, LONGEST_INTERVAL)


def late_message(late: list[int], timeout_s: float) -> str:
    """Format the message of the PeerError that names the ranks in `late`."""
    names = ", ".join(f"rank {rank}" for rank in late[:MAX_NAMED_RANKS])
    if len(late) > MAX_NAMED_RANKS:
        names += ", ..."
    return f"{names} did not finish reading or writing within {timeout_s:g} s (checkpoint.timeout_s)"
