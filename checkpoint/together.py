"""Ranks that each do their part of one work, and wait for the slowest however long it takes.

A collective gives up after parallel.timeout_s, which is how soon a hang is found; to hash or write a terabyte
takes longer. So a rank's part runs in a thread while its caller meets the others again and again until all
are done. A rank that dies or is stopped is found as in any exchange; one whose part does not end (a disk that
does not answer), after `patience`.
"""
import threading
import time
from collections.abc import Callable

from parallel.comm import PeerError

FIRST, LONGEST = 0.02, 1.0  # seconds between two meetings: twice as long each time, up to the longest


def agree(gather: Callable[[object], list], work: Callable, patience: float | None = None) -> list:
    """[work() of every rank]. If it fails on one, all raise (their own error, or the first): none is left
    waiting.

    gather: gives every rank the list of all ranks' objects. patience: seconds that the slowest may take;
    None: work() runs in the caller, and whoever is done waits in gather. Raises PeerError (76) on all ranks
    when the patience is at an end."""
    mine, error = attempt(work) if patience is None else meanwhile(gather, work, patience)
    every = gather((mine, error))
    failed = [e for _, e in every if e is not None]
    if error is not None:
        raise error
    if failed:
        raise failed[0]
    return [result for result, _ in every]


def attempt(work: Callable) -> tuple[object, Exception | None]:
    """(result, None) or (None, error)."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def meanwhile(gather: Callable, work: Callable, patience: float) -> tuple[object, Exception | None]:
    """attempt(work), returned when all ranks have come so far."""
    done: list[tuple] = []
    thread = threading.Thread(target=lambda: done.append(attempt(work)), name="part", daemon=True)
    begun, wait = time.monotonic(), FIRST
    thread.start()
    while True:
        thread.join(wait)
        every = gather((bool(done), time.monotonic() - begun))
        late = [rank for rank, (ready, _) in enumerate(every) if not ready]
        if not late:
            return done[0]
        if every[0][1] > patience:  # rank 0's clock, so that all decide alike
            names = ", ".join(f"rank {rank}" for rank in late[:8]) + ", ..." * (len(late) > 8)
            waited = f"after {patience:g} s (checkpoint.timeout_s)"
            raise PeerError(f"{names} not done with reading or writing {waited}", 76)
        wait = min(2 * wait, LONGEST)
