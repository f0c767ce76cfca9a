"""Python's garbage collector, at the same steps on every rank.

It starts when enough objects were made, at another moment on each rank, and looks at every object of the
process. The others wait for that rank in their next exchange: of many ranks, one is always collecting. So in
the loop it is off, what was there before is never looked at again, and all ranks collect after the same
steps. A step leaves no tensor in a cycle (tests/runtime/test_garbage.py): memory does not grow in between.
"""
import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from parallel.extras import Extra

COLLECT_EVERY = 50  # steps


@contextlib.contextmanager
def collected_between_steps() -> Iterator[None]:
    """Inside, the collector runs in GarbageCollection alone."""
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
    """Collect every COLLECT_EVERY steps, counted from the run's first: after a resume too."""

    def after_step(self, run: Any, step: int) -> None:
        if step % COLLECT_EVERY == 0:
            gc.collect()
