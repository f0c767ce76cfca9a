"""A warm pool (durable/pool.py) is as fast for its last job as for its first, and names how a rank
died."""

import os
import signal
import time

import pytest
import torch

from parallel.wire import comm


def saves(world) -> int:
    """A job that saves in the background, as train.py does: the threads of this rank while it runs."""
    group = world.separate_group("saver")
    total = comm.all_reduce_sum(torch.ones(2, dtype=torch.int64), group)
    assert total.tolist() == [world.size] * 2
    return len(os.listdir("/proc/self/task"))


def test_groups_of_earlier_jobs_are_closed(ranks):
    """Each group of gloo has three threads; one wakes a hundred times a second."""
    pool = ranks(2)
    first, *others = [pool.run(saves) for _ in range(4)]
    assert others == [first] * 3


def dies(world, code: int) -> None:
    if world.rank == 1:
        os._exit(code)


def is_killed(world) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("work, args, code", [(dies, (7,), 7), (is_killed, (), -9)])
def test_the_exit_code_of_a_dead_rank_is_known(ranks, work, args, code):
    """Its pipe closes before the server of the processes knows how it ended."""
    pool = ranks(2)
    with pytest.raises(RuntimeError, match=f"^rank 1: died with exit code {code}$"):
        pool.run(work, *args)
    assert pool.closed


@pytest.mark.slow
def test_a_rank_that_died_while_it_waited_is_named(ranks):
    pool = ranks(2)
    pool.run(saves)  # every rank has joined
    pool.processes[1].kill()
    pool.processes[1].join()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="^rank 1: died with exit code -9$"):
        pool.run(saves)
    assert pool.closed
    assert time.monotonic() - started < pool.timeout_s / 2  # rank 0 would wait for it all that time


def breaks(world, ranks: tuple[int, ...]) -> None:
    """The named ranks fail, each after the one before it; the others wait for them."""
    if world.rank in ranks:
        time.sleep(0.5 * ranks.index(world.rank))
        raise ValueError(f"{world.rank} broke")
    comm.all_reduce_sum(torch.ones(2), world.separate_group("waits"))


@pytest.mark.slow
@pytest.mark.parametrize("broken", [(0,), (1,), (2, 0)])
def test_the_first_rank_that_failed_is_named_while_others_wait(ranks, broken):
    """By the order in which they failed, not by number; the traceback of the rank comes with it."""
    pool = ranks(3)
    started = time.monotonic()
    with pytest.raises(
        RuntimeError, match=rf"(?s)^rank {broken[0]}: Traceback.*ValueError: {broken[0]} broke"
    ):
        pool.run(breaks, broken)
    assert time.monotonic() - started < pool.timeout_s / 2
