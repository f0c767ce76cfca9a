"""A GPU as far as exchanges see one: nothing blocks the host, and events come in the order of a stream.

The exchanges themselves run over gloo, beside the host.

`python tests/fake_gpu.py RANK SIZE PORT FOLDER HOW` is a rank of a job of several sums. Rank 1 leaves off in
the middle. HOW: the sums are "started" and awaited, or "blocking"; "stopped": rank 1 stops as a process;
"raises": rank 0 then fails, with a sum in flight.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist


class Stream:
    """The works of exchanges, as they were enqueued. Nothing else takes time."""

    def __init__(self):
        self.works = []


class Event:
    """As torch.cuda.Event on the one stream."""

    stream = Stream()

    def __init__(self, enable_timing=False):
        self.works = []

    def record(self, stream=None):
        self.works = list(self.stream.works)

    def query(self):
        return all(work.is_completed() for work in self.works)


class Work:
    """As a Work of NCCL: wait() puts the exchange into the stream and returns."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        Event.stream.works.append(self.work)
        return True


@contextlib.contextmanager
def fake_gpu(activity):
    """Sums of this process run as on a GPU."""
    all_reduce = dist.all_reduce

    def enqueued(x, *args, async_op=False, **options):
        work = Work(all_reduce(x, *args, async_op=True, **options))
        return work if async_op else work.wait() and None

    activity.clock.device = torch.device("cuda")
    event = mock.patch.object(torch.cuda, "Event", Event)
    stream = mock.patch.object(torch.cuda, "current_stream", lambda device: Event.stream)
    with event, stream, mock.patch.object(dist, "all_reduce", enqueued):
        yield


def leave_like_nccl(folder, rank):
    """Destroying a process group waits for what is in flight: for ever, where a peer never answers."""
    Path(folder, f"left{rank}").touch()
    time.sleep(20)


def main(rank, size, port, folder, how):
    from durable.peers import PeerWatch
    from parallel.wire import comm
    from parallel.wire.world import join_job

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    leave = mock.patch.object(dist, "destroy_process_group", lambda: leave_like_nccl(folder, rank))
    with leave, PeerWatch(rank, size) as peers:
        # gloo's own timeout must not come first here, as NCCL's watchdog must not
        world = join_job(torch.device("cpu"), rank, size, 600.0, store=peers.store, activity=peers.activity)
        peers.folder = Path(folder)
        peers.activity.timeout_s = 3.0
        group = world.all_ranks()
        peers.start_device_watch()
        with fake_gpu(peers.activity):
            for step in range(1, 6):
                peers.activity.step = step
                if rank == 1 and step == 3:
                    if how == "stopped":
                        time.sleep(1.0)  # a stopped host does not stop what its GPU has enqueued; gloo stops
                        os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(120)
                if how == "raises" and step == 4:
                    raise ZeroDivisionError("a failure of rank 0 alone")
                if how == "started":
                    comm.start_all_reduce(torch.ones(3), group).wait()
                else:
                    comm.all_reduce_sum(torch.ones(3), group)
            Path(folder, f"ahead{rank}").touch()  # the host was never held up
            time.sleep(120)  # as a host in a full launch queue


def run(argv):
    main(int(argv[0]), int(argv[1]), *argv[2:])
    return 0


if __name__ == "__main__":
    from runtime.failure import exit_process, fail_cleanly

    exit_process(fail_cleanly(run, sys.argv[1:]))
