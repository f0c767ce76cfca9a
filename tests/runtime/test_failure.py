"""How a process ends, and which failures another start may mend."""

import errno
import os
import threading
import time

import pytest
import torch

from checkpoint.disk.files import IntegrityError, NonFiniteTensor, StorageError
from config import ConfigError
from parallel.wire.comm import PeerError
from runtime import failure


@pytest.mark.slow(every=3)
@pytest.mark.parametrize(
    "error, wanted",
    [
        (PeerError("rank 3 is gone", 1), True),
        (PeerError("rank 3 hangs", 76), True),
        (StorageError("x", 1, "full"), True),
        (OSError(errno.ENOSPC, "full"), True),
        (ConfigError("x"), False),
        (NonFiniteTensor("x"), False),
        (IntegrityError("x"), False),
        (MemoryError(), False),
        (ZeroDivisionError("a bug comes again"), False),
    ],
)
def test_which_failures_another_start_may_mend(error, wanted):
    assert failure.should_requeue(error) is wanted


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("error, code", [
    (MemoryError(), 81),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 81),
    (RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"), 81),
    (RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate"), 81),
    (RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB, max allowed: 9.07 GB)."), 81),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"), 81),
    (RuntimeError("HIP error: out of memory"), 81),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 81),
    (RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"), 81),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), 1),
    (RuntimeError("The size of tensor a must match"), 1),
    (ValueError("CUDA error: out of memory"), 1),
])
def test_out_of_memory_is_known_by_what_torch_says(error, code):
    assert failure.get_exit_code(error) == code


def leave_in_child(code: int, world: int) -> tuple[int, float]:
    """(exit code, seconds) of a rank that leaves while a thread of its own hangs, as torch's do where peers
    are gone.
    """
    pid, begun = os.fork(), time.monotonic()
    if pid == 0:
        try:
            os.environ.update(RANK="0", WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(world))
            threading.Thread(target=time.sleep, args=(2.0,)).start()
            failure.exit_process(code)
        except SystemExit as stop:  # the interpreter's own exit, which waits for threads
            for thread in threading.enumerate():
                if thread is not threading.current_thread():
                    thread.join()
            os._exit(stop.code)
        finally:
            os._exit(99)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status), time.monotonic() - begun


def test_a_failed_rank_of_many_waits_for_no_thread_and_no_destructor():
    code, seconds = leave_in_child(2, world=4)
    assert code == 2 and seconds < 1.5


def test_a_process_alone_leaves_in_order():
    """Its checkpoint writer may still be at work."""
    code, seconds = leave_in_child(2, world=1)
    assert code == 2 and seconds > 1.5
