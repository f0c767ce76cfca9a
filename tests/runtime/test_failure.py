"""How a process ends, and which failures another start may mend."""

import errno
import os
import threading
import time

import pytest

from checkpoint.files import IntegrityError, NonFiniteTensor, StorageError
from config import ConfigError
from parallel.wire.comm import PeerError
from runtime import failure


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
