"""Warm workers for proofs and tests: ranks that talk over gloo on this machine, started from a forkserver with torch loaded.

Starting 8 ranks this way takes a fraction of a second, torchrun takes seconds; one pool serves a whole run of tests.
"""
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable


class Pool:
    """`size` ranks; run(f, *args) calls f(world, *args) on each and returns [result of each rank]. f must be importable.
    timeout_s: how long one exchange may wait for a peer.

    Raises RuntimeError with the first failing rank's trace; a pool in which a rank failed is closed, since its peers may
    wait for it."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "build", "train"])
        self.folder = tempfile.TemporaryDirectory(prefix="bevatron-pool-")
        self.size, self.pipes, self.ranks = size, [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, f"file://{self.folder.name}/meet", timeout_s, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.ranks.append(process)
        self.timeout, self.closed = timeout_s, False

    def run(self, f: Callable, *args) -> list:
        for pipe in self.pipes:
            pipe.send((f, args))
        results, failed = [None] * self.size, []
        for rank, pipe in enumerate(self.pipes):
            try:
                ok, value = pipe.recv() if pipe.poll(self.timeout * 4) else (False, "no answer")
            except EOFError:
                ok, value = False, f"died with exit code {self.ranks[rank].exitcode}"
            results[rank] = value
            if not ok:
                failed.append(rank)
        if failed:
            self.close()
            # ranks that wait for a dead peer complain about the connection: the one with another complaint is the cause
            first = next((r for r in failed if "PeerError" not in results[r]), failed[0])
            raise RuntimeError(f"rank {first}: {results[first]}")
        return results

    def close(self) -> None:
        self.closed = True
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self.ranks:
            process.join(2)
            process.kill()
        self.folder.cleanup()


def serve(rank: int, size: int, address: str, timeout_s: float, pipe) -> None:
    """A worker: join, then run what comes until None comes."""
    import torch

    from parallel import comm
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):  # ranks that share cores then hand them over less often: a tenth to a fifth
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    world = comm.join("cpu", rank, size, timeout_s, address)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            os._exit(0)
        if job is None:
            break
        world.close_separate()  # every rank has ended the job before
        try:
            pipe.send((True, job[0](world, *job[1])))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    comm.leave()
