"""Run Python's garbage collector at the same steps on every rank.

By default it runs after enough allocations, at a different time on each rank, and scans every object of the
process. The other ranks wait for that rank in their next collective, and among many ranks one is always
collecting. So it is disabled in the loop, the objects from before are frozen, and all ranks collect after the
same steps. A step leaves no tensor in a cycle (tests/runtime/test_garbage.py), so memory does not grow in
between.
"""
import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from parallel.extras import Extra

COLLECT_EVERY = 50  # steps


@contextlib.contextmanager
def collected_between_steps() -> Iterator[None]:
    """Disable automatic collection inside; only GarbageCollection collects."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class GarbageCollection(Extra):
    """Collect every COLLECT_EVERY steps, counted from the first step of the run, also after a resume."""

    def after_step(self, run: Any, step: int) -> None:
        if step % COLLECT_EVERY == 0:
            gc.collect()
