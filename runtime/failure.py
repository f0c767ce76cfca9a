"""How a process ends: the exit code of each error, and what is printed about it.

A mistake of the user is one line. Every other error begins with the rank and its host. An exception class may
carry its own code (`exit_code`): 2 ConfigError, 77 NonFiniteLoss, 79 IntegrityError, 80 ReplicasDiffer and
ComputeDiffers, 81 OutOfMemory, 82 StorageError.
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
# what torch and the libraries below it say where memory runs out, in errors of no class of their own
MEMORY_TEXT = re.compile(
    r"DefaultCPUAllocator: (can't|not enough)|MPS backend out of memory|(CUDA|HIP) error: out of memory|"
    r"(CUBLAS|HIPBLAS|CUDNN|MIOPEN)_STATUS_ALLOC_FAILED|(Cuda|HIP) failure \d+ '?out of memory")
STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE,
                  errno.ENFILE)


class OutOfMemory(RuntimeError):
    """Device or host memory did not suffice. The text says what would make it suffice."""

    exit_code = OUT_OF_MEMORY


def code_of(error: BaseException) -> int:
    """The exit code of an error, by which a scheduler decides (docs/training.md)."""
    own_code: int | None = getattr(error, "exit_code", None)
    if own_code is not None:
        return own_code
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        return STORAGE_FAILED
    return 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. torch says so with a class of its own for its CUDA allocator alone."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and MEMORY_TEXT.search(str(error)) is not None


def should_requeue(error: BaseException) -> bool:
    """Whether another start may succeed: after a hang, a lost peer, replicas that differ, failed storage."""
    return code_of(error) in (HANG, REPLICAS_DIFFER, STORAGE_FAILED) or isinstance(error, PeerError)


def one_line(error: BaseException) -> str:
    """The error's text in one line, with the name of its class unless the class carries its own exit code."""
    text = " ".join(str(error).split()) or type(error).__name__
    if hasattr(error, "exit_code"):
        return text
    return f"{type(error).__name__}: {text}"


def printable(text: str) -> str:
    """`text` with ? for what a terminal would obey, such as escape codes in words of other hosts."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def last_line(error: BaseException) -> str:
    """The last line of the error's text; without a text, the name of its class.

    Of the traceback of a rank (runtime/pool.py) it is the line that says what went wrong.
    """
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def explain(error: BaseException, rank: int = 0, trace: bool = False) -> str:
    """The text for stderr: `error: ...` in one line.

    The traceback follows where the cause is unknown, and everywhere with `trace`.
    """
    code = code_of(error)
    where = "" if code == USER_MISTAKE else f"rank {rank} on {socket.gethostname()}: "
    text = f"error: {where}{one_line(error)}"
    is_unknown = code == 1 and not hasattr(error, "exit_code")
    if trace or is_unknown:
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return redact(text)


def mark_reported(error: BaseException, code: int) -> None:
    """Notes on `error` that it has been printed: fail_cleanly then prints nothing and returns `code`.

    code: of the job's first failure.
    """
    setattr(error, "reported_code", code)


def reported_code(error: BaseException) -> int | None:
    """The code that mark_reported has left; None where the error has not been printed."""
    return getattr(error, "reported_code", None)


def exit_process(code: int) -> NoReturn:
    """Ends the process with this code.

    After a failure in a job of several ranks it exits at once, without the interpreter's clean-up: threads of
    torch that wait for lost ranks abort (SIGABRT) when they are stopped. So it does after a hang: the
    clean-up would wait for the thread that hangs. All files are closed before.
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
    """Runs main(argv) and returns its exit code; an error is printed and returned as its code.

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
        code = reported_code(error)  # set by runtime/peers.py
        if code is None or trace:
            print_error(explain(error, trace=trace))
        return code_of(error) if code is None else code
