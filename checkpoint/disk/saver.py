"""Save checkpoints in the background: tensors are copied, and a thread writes the copy while training
continues.

- At most one save is in progress; the next save waits for it.
- An error of the writer thread is raised by the next call. has_failed() reports it earlier.
- num_failed counts consecutive saves that failed because of storage; it is the same on all ranks.
- On a single rank, process exit waits for the writer.
- The writer threads of several ranks communicate over a separate group (World.separate_group).
- The cost is one copy of this rank's pieces in host memory, which is kept. Copies from a GPU run at bus
  speed: into pinned memory, all pieces at once.
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

    `group` is the ranks that write a checkpoint together, by default all ranks of the run. `committed` is
    called after each committed save, in the thread that wrote it.
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
        self.linked: list[int] = []  # bytes of its linked files; empty if it existed before
        self.error: BaseException | None = None  # raised by the writer; wait() raises it again
        self.num_failed = 0  # consecutive saves

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
        """Save with the same arguments as store.save.

        Raises the error of an earlier save, if any.
        """
        self.wait()
        if self.in_background:
            pieces = self.host_memory.copy(pieces)  # wait() ended the save that read the last copy
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
        """Start the background thread, which calls `write` and stores its result or error."""
        def run() -> None:
            try:
                self.path = self.counted(write)
                self.committed()
            except BaseException as error:
                self.error = error

        # A rank's writer waits for the writers of other ranks. If the job breaks up, process exit must not
        # wait for them, so the thread is a daemon.
        several_ranks = self.group is not None and self.group.size > 1
        self.thread = threading.Thread(target=run, name="saver", daemon=several_ranks)
        self.thread.start()

    def counted(self, write: Callable[[], Path]) -> Path:
        """Call write() and count consecutive storage failures. All ranks fail together."""
        try:
            path = write()
        except StorageError:
            self.num_failed += 1
            raise
        self.num_failed = 0
        return path

    def has_failed(self) -> bool:
        """Return whether the save in progress has failed.

        All ranks fail together; wait() raises the error on each.
        """
        return self.error is not None

    def step_in_progress(self) -> int:
        """Return the step that the background thread is writing, or -1 if idle."""
        return self.step if self.thread is not None and self.thread.is_alive() else -1

    def wait(self) -> Path | None:
        """Wait until no save is in progress.

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
        """Wait like wait() and return the committed folder.

        Raises ValueError if nothing has been saved yet.
        """
        path = self.wait()
        if path is None:
            raise ValueError("nothing was saved yet")
        return path


class HostMemory:
    """Copies tensors so that training can no longer change them.

    `buffers` are the copy targets, reused across saves: pinning memory and faulting in fresh pages takes
    longer than filling them. So a run that saves in the background holds its state twice.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def copy(self, pieces: store.Pieces) -> list[store.Piece]:
        """Copy the pieces. The copy is complete on return, and overwrites the previous one."""
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
    """Return the first unused tensor if shape and dtype match, else a new one.

    Consecutive saves have the same pieces in the same order.
    """
    if unused:
        first = unused.popleft()
        if first.shape == tensor.shape and first.dtype == tensor.dtype:
            return first
    return host_like(tensor)


def writer_threads(in_background: bool) -> int:
    """Return the threads of a save: as many as this rank computes with, or half of them in the background."""
    cores = torch.get_num_threads()
    return min(max(1, cores // 2) if in_background else cores, MAX_THREADS)
