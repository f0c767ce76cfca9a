"""Exit codes and error messages of a process.

A user error is one line. Every other error begins with the rank and its host. An exception class may define
its exit code (`exit_code`): 2 ConfigError, 77 NonFiniteLoss, 79 IntegrityError, 80 ReplicaMismatch and
ComputeMismatch, 81 OutOfMemory, 82 StorageError.
"""
import contextlib
import errno
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from config import ConfigError
from config.exit_codes import INTERRUPTED
from parallel.wire.comm import PeerError
from runtime.processes import print_error
from runtime.setup import rank_and_world, redact

USER_MISTAKE = 2
HANG = 76
REPLICAS_DIFFER = 80
OUT_OF_MEMORY = 81
STORAGE_FAILED = 82
# messages of torch and its libraries when memory runs out, in errors without a specific class
MEMORY_TEXT = re.compile(
    r"DefaultCPUAllocator: (can't|not enough)|MPS backend out of memory|(CUDA|HIP) error: out of memory|"
    r"(CUBLAS|HIPBLAS|CUDNN|MIOPEN)_STATUS_ALLOC_FAILED|(Cuda|HIP) failure \d+ '?out of memory")
STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE,
                  errno.ENFILE)


class OutOfMemory(RuntimeError):
    """Out of device or host memory. The message says what would reduce it."""

    exit_code = OUT_OF_MEMORY


def get_exit_code(error: BaseException) -> int:
    """Return the exit code of an error, which schedulers act on (docs/training.md)."""
    own_code: int | None = getattr(error, "exit_code", None)
    if own_code is not None:
        return own_code
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        return STORAGE_FAILED
    return 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. torch has an exception class only for its CUDA allocator."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and MEMORY_TEXT.search(str(error)) is not None


def should_requeue(error: BaseException) -> bool:
    """Return whether a requeue may succeed: after a hang, a lost peer, differing replicas, failed storage."""
    return get_exit_code(error) in (HANG, REPLICAS_DIFFER, STORAGE_FAILED) or isinstance(error, PeerError)


def one_line(error: BaseException) -> str:
    """Return the error in one line, with its class name unless the class defines an exit code."""
    text = " ".join(str(error).split()) or type(error).__name__
    if hasattr(error, "exit_code"):
        return text
    return f"{type(error).__name__}: {text}"


def explain(error: BaseException, rank: int = 0, trace: bool = False) -> str:
    """Return the text for stderr: `error: ...` in one line.

    A traceback follows if the cause is unknown or with `trace`.
    """
    code = get_exit_code(error)
    where = "" if code == USER_MISTAKE else f"rank {rank} on {socket.gethostname()}: "
    text = f"error: {where}{one_line(error)}"
    is_unknown = code == 1 and not hasattr(error, "exit_code")
    if trace or is_unknown:
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return redact(text)


def mark_reported(error: BaseException, code: int) -> None:
    """Mark `error` as printed, so that fail_cleanly prints nothing and returns `code`.

    code: the exit code of the job's first failure.
    """
    setattr(error, "reported_code", code)


def reported_code(error: BaseException) -> int | None:
    """Return the code set by mark_reported, or None if the error has not been printed."""
    return getattr(error, "reported_code", None)


def exit_process(code: int) -> NoReturn:
    """Exit the process with this code.

    After a failure in a multi-rank job, or a hang, it exits at once without the interpreter's clean-up: torch
    threads that wait for lost ranks abort (SIGABRT) when they are stopped, and the clean-up would wait for a
    thread that hangs. All files are closed before that.
    """
    if code == HANG or (code and is_distributed()):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def is_distributed() -> bool:
    try:
        return rank_and_world()[1] > 1
    except ConfigError:
        return False


def fail_cleanly(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run main(argv) and return its exit code; print an error and return the error's code.

    --traceback anywhere in argv prints the traceback of every error.
    """
    trace = "--traceback" in argv
    try:
        return main([word for word in argv if word != "--traceback"])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `| head`, has closed it
        sys.stderr.close()
        return 0
    except Exception as error:
        code = reported_code(error)  # set by durable/peers.py
        if code is None or trace:
            print_error(explain(error, trace=trace))
        return get_exit_code(error) if code is None else code
