"""Saving while training goes on: the tensors are copied, and a thread writes the copy.

Promises: at most one save in flight, a second one waits; an error of the writer is raised at the next call, and failed()
tells of it before; a normal exit of the process waits for the writer. The writers of many ranks talk over a group of their
own (comm.World.apart). Costs one copy of the pieces in host memory.
"""
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from checkpoint import store
from parallel.boxes import Box
from parallel.comm import Group


class Saver:
    """store.save, in the caller or (threaded) behind its back. group: over which the ranks agree; None: the run's own."""

    def __init__(self, threaded: bool, group: Group | None = None):
        self.threaded, self.group, self.thread = threaded, group, None
        self.path: Path | None = None  # of the last committed checkpoint
        self.error: BaseException | None = None

    def save(self, root: Path, step: int, pieces: Iterable[tuple[Box, torch.Tensor]], *args, **more) -> None:
        """As store.save, same arguments; raises the error of an earlier save here."""
        self.wait()
        if not self.threaded:
            self.path = store.save(root, step, pieces, *args, **more)
            return
        frozen = [(box, t.detach().to("cpu", copy=True)) for box, t in pieces]
        # a writer of many waits for the others': where the job breaks up, nobody must wait for it
        many = self.group is not None and self.group.size > 1
        self.thread = threading.Thread(target=self.write, args=(root, step, frozen, *args), kwargs=more, name="saver", daemon=many)
        self.thread.start()

    def write(self, *args, **more) -> None:
        try:
            self.path = store.save(*args, **more)
        except BaseException as e:
            self.error = e

    def failed(self) -> bool:
        """Has the save in flight ended in an error? wait() raises it, on every rank: they fail together."""
        return self.error is not None

    def wait(self) -> Path | None:
        """Until nothing is in flight. Returns the last committed folder; raises the writer's error, once."""
        if self.thread:
            self.thread.join()
            self.thread = None
        error, self.error = self.error, None
        if error:
            raise error
        return self.path
