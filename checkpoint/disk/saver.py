"""Saves checkpoints while training goes on: the tensors are copied, and a background thread writes the copy.

- At most one save is in progress; the next save waits for it.
- An error of the writer thread is raised by the next call. has_failed() shows it before that.
- num_failed counts the saves in a row that have failed for their storage, as all ranks do alike.
- On a single rank, the exit of the process waits for the writer.
- The writer threads of several ranks exchange messages over a group of their own (World.separate_group).
- The cost is one copy of this rank's pieces in host memory, which is kept. From a GPU it is made at the
  speed of the bus: into pinned memory, all pieces at once.
"""
import functools
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.disk import store
from checkpoint.disk.files import MAX_THREADS, StorageError
from checkpoint.disk.together import Ranks, do_nothing
from config import Tree
from parallel.offload import host_like
from parallel.wire.comm import Group, synchronize


class CheckpointSaver:
    """Calls store.save, in the caller's thread or in a background thread.

    group: the ranks that write a checkpoint together. None: the group of the whole run.
    committed: called after each save that is committed, in the thread that wrote it.
    """

    def __init__(
        self,
        in_background: bool,
        group: Group | None = None,
        committed: Callable[[], object] = do_nothing,
    ) -> None:
        self.in_background = in_background
        self.group = group
        self.committed = committed
        self.host_memory = HostMemory()
        self.thread: threading.Thread | None = None  # the writer in progress
        self.step = -1  # of the last save, which may be in progress
        self.path: Path | None = None  # the last committed checkpoint folder
        self.linked: list[int] = []  # bytes of its files that are linked; none if it was there before
        self.error: BaseException | None = None  # what the writer raised; wait() raises it again
        self.num_failed = 0  # saves in a row

    def save(
        self,
        root: Path,
        step: int,
        pieces: store.Pieces,
        meta: Tree,
        *,
        keep: int,
        mark: str = "",
        fault_point: store.FaultPoint = store.no_fault,
        ranks: Ranks = store.ALONE,
        timeout_s: float | None = None,
    ) -> None:
        """Saves as store.save does, with the same arguments.

        Raises the error of an earlier save, if there is one.
        """
        self.wait()
        if self.in_background:
            pieces = self.host_memory.copy(pieces)  # wait() has ended the save that read the last copy
        self.linked = []
        self.step = step
        write = functools.partial(
            store.save,
            root,
            step,
            pieces,
            meta,
            keep=keep,
            mark=mark,
            fault_point=fault_point,
            ranks=ranks,
            timeout_s=timeout_s,
            threads=writer_threads(self.in_background),
            linked=self.linked,
        )
        if self.in_background:
            self.write_in_background(write)
        else:
            self.path = self.counted(write)
            self.committed()

    def write_in_background(self, write: Callable[[], Path]) -> None:
        """Starts the background thread that calls `write` and keeps its result or its error."""
        def run() -> None:
            try:
                self.path = self.counted(write)
                self.committed()
            except BaseException as error:
                self.error = error

        # The writer of one rank waits for the writers of the others. When the job breaks up, the exit of this
        # process must not wait for them: the thread is then a daemon.
        several_ranks = self.group is not None and self.group.size > 1
        self.thread = threading.Thread(target=run, name="saver", daemon=several_ranks)
        self.thread.start()

    def counted(self, write: Callable[[], Path]) -> Path:
        """write(), and how many in a row have failed for their storage. All ranks fail together."""
        try:
            path = write()
        except StorageError:
            self.num_failed += 1
            raise
        self.num_failed = 0
        return path

    def has_failed(self) -> bool:
        """Whether the save in progress has failed.

        All ranks fail together; wait() raises the error on each.
        """
        return self.error is not None

    def step_in_progress(self) -> int:
        """Of the save that the background thread is writing; -1: it writes none."""
        return self.step if self.thread is not None and self.thread.is_alive() else -1

    def wait(self) -> Path | None:
        """Waits until no save is in progress.

        Returns the last committed folder. Raises the writer's error, once.
        """
        if self.thread:
            self.thread.join()
            self.thread = None
        error = self.error
        self.error = None
        if error:
            raise error
        return self.path

    def wait_saved(self) -> Path:
        """Waits as wait() does and returns the committed folder.

        Raises ValueError if nothing was saved yet.
        """
        path = self.wait()
        if path is None:
            raise ValueError("nothing was saved yet")
        return path


class HostMemory:
    """Takes copies of tensors, which training cannot change any more.

    buffers: what they are copied into, kept from one save to the next: to pin memory, and to get fresh pages
    from the system, takes longer than to fill it. So a run that saves in the background holds its state
    twice.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def copy(self, pieces: store.Pieces) -> list[store.Piece]:
        """A copy of the pieces, complete when this returns. The copy before is overwritten."""
        unused = deque(self.buffers)
        self.buffers = []
        copies: list[store.Piece] = []
        devices: set[torch.device] = set()
        for box, tensor in pieces:
            devices.add(tensor.device)
            target = take_like(tensor, unused)
            self.buffers.append(target)
            copies.append((box, target.copy_(tensor.detach(), non_blocking=is_on_gpu(tensor))))
        for device in devices:
            synchronize(device)
        return copies


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def take_like(tensor: Tensor, unused: deque[Tensor]) -> Tensor:
    """The first of the unused tensors, if it has the shape and dtype of this one; else a new one.

    The pieces of one save are those of the next, in the same order.
    """
    if unused:
        first = unused.popleft()
        if first.shape == tensor.shape and first.dtype == tensor.dtype:
            return first
    return host_like(tensor)


def writer_threads(in_background: bool) -> int:
    """Threads of a save: as many as computations of this rank have, or half of them beside training."""
    cores = torch.get_num_threads()
    return min(max(1, cores // 2) if in_background else cores, MAX_THREADS)
