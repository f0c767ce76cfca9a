"""A warm pool (runtime/pool.py) is as fast for its last job as for its first."""
import os

import torch

from parallel import comm


def saves(world) -> int:
    """A job that saves in the background, as train.py does: the threads of this rank while it runs."""
    group = world.apart("saver")
    total = comm.sum_(torch.ones(2, dtype=torch.int64), group)
    assert total.tolist() == [world.size] * 2
    return len(os.listdir("/proc/self/task"))


def test_groups_of_earlier_jobs_are_closed(ranks):
    """Each group of gloo has three threads, of which one wakes a hundred times a second."""
    pool = ranks(2)
    first, *others = [pool.run(saves) for _ in range(4)]
    assert others == [first] * 3
