"""Warm worker processes for proofs and tests: ranks on this machine that communicate over gloo.

They are forked from a server that has torch loaded, so 8 ranks start in a fraction of a second instead of the
seconds that torchrun takes. One pool serves a whole test run.
"""
import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "build", "train"]
JOIN_SECONDS = 2
GRACE_SECONDS = 5.0


class Answer(NamedTuple):
    """The result of a job on one rank."""
    is_good: bool
    result: Any  # why the rank failed, if it did

    @property
    def is_cause(self) -> bool:
        """Whether this rank caused the failure; ranks that wait for a lost peer report a PeerError."""
        return not self.is_good and "PeerError" not in self.result


class WorkerPool:
    """`size` ranks that wait for work. timeout_s: the timeout of a collective."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.size = size
        self.timeout_s = timeout_s
        self.closed = False
        self.folder = tempfile.TemporaryDirectory(prefix="bevatron-pool-")
        self.pipes: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        for rank in range(size):
            our_end, worker_end = context.Pipe()
            arguments = {
                "rank": rank,
                "size": size,
                "address": f"file://{self.folder.name}/meet",
                "timeout_s": timeout_s,
                "pipe": worker_end,
            }
            process = context.Process(target=rank_main, kwargs=arguments, daemon=True)
            process.start()
            worker_end.close()
            self.pipes.append(our_end)
            self.processes.append(process)

    def run(self, f: Callable[..., Result], *args: object) -> list[Result]:
        """Call f(world, *args) on each rank and return the results in rank order. f must be importable.

        Raises RuntimeError with the traceback of the rank that failed first, and closes the pool, because the
        other ranks may wait for the failed one.
        """
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # the rank is dead; receive reports it
                pipe.send((f, args))
        answers = self.receive_all()
        failed = [rank for rank, answer in answers.items() if not answer.is_good]
        if failed:
            self.close()
            causes = [rank for rank in failed if answers[rank].is_cause]
            first = causes[0] if causes else failed[0]
            raise RuntimeError(f"rank {first}: {answers[first].result}")
        return [answers[rank].result for rank in range(self.size)]

    def receive_all(self) -> dict[int, Answer]:
        """Return the answers of the ranks, in order of arrival.

        Once a rank has caused a failure, the others have GRACE_SECONDS, since they may be waiting for it.
        """
        answers: dict[int, Answer] = {}
        missing = dict(enumerate(self.pipes))
        deadline = time.monotonic() + 4 * self.timeout_s
        while missing:
            ready = wait(missing.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in missing.items() if pipe in ready]:
                del missing[rank]
                answers[rank] = self.receive(rank)
                if answers[rank].is_cause:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in missing:
            answers[rank] = Answer(False, "no answer")
        return answers

    def receive(self, rank: int) -> Answer:
        """Return the answer of a rank whose pipe is readable or closed."""
        process = self.processes[rank]
        try:
            return Answer(*self.pipes[rank].recv())
        except (EOFError, ConnectionResetError):
            process.join(JOIN_SECONDS)  # the pipe closes before the exit code is known
            return Answer(False, f"died with exit code {process.exitcode}")

    def close(self) -> None:
        """Stop the ranks, and kill those that do not exit in time."""
        self.closed = True
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(JOIN_SECONDS)
            process.kill()
        self.folder.cleanup()


def rank_main(rank: int, size: int, address: str, timeout_s: float, pipe: Connection) -> None:
    """Run a worker: join the job, then execute jobs from the pipe until it sends None."""
    import torch

    from parallel.wire.world import join_job, leave_job
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):  # fewer switches between ranks on a core: a tenth to a fifth faster
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    world = join_job(torch.device("cpu"), rank, size, timeout_s, address)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            os._exit(0)
        if job is None:
            break
        world.close_separate_groups()  # every rank has finished the previous job
        function, args = job
        try:
            pipe.send((True, function(world, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    leave_job()


def last_line(error: BaseException) -> str:
    """Return the last line of the error's text, or its class name if it has no text.

    In the traceback of a rank this line says what went wrong.
    """
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
