"""Every way to end, and its exit code: one clear line for the user's mistakes, rank and host first for everything else.

An exception class says its own code (`exit_code`): 2 ConfigError, 77 NonFinite, 79 IntegrityError, 82 StorageError.
"""
import contextlib
import errno
import os
import socket
import sys
import traceback

import torch

from config import ConfigError
from parallel.comm import PeerError
from runtime.setup import place, redact

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def code_of(error: BaseException) -> int:
    """The exit code of INTERFACE: what a scheduler decides on."""
    if hasattr(error, "exit_code"):
        return error.exit_code
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return 81
    if isinstance(error, OSError) and error.errno in FULL:
        return 82
    return 1


def again(error: BaseException) -> bool:
    """Would another start help? After a hang, a lost peer, replicas that differ and storage that failed it
    may."""
    return code_of(error) in (76, 80, 82) or isinstance(error, PeerError)


def one_line(error: BaseException) -> str:
    kind = "" if hasattr(error, "exit_code") else f"{type(error).__name__}: "
    return kind + (" ".join(str(error).split()) or type(error).__name__)


def explain(error: BaseException, rank: int = 0, trace: bool = False) -> str:
    """What goes to stderr: `error: ...` in one line where the code says it all, else where it happened and the trace."""
    where = "" if code_of(error) == 2 else f"rank {rank} on {socket.gethostname()}: "
    text = f"error: {where}{one_line(error)}"
    if trace or (code_of(error) == 1 and not hasattr(error, "exit_code")):
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return redact(text)


def leave(code: int) -> None:
    """Ends the process. After a failure in a job of many ranks at once: threads of torch that wait for ranks
    which are gone abort (SIGABRT) where the interpreter or a destructor stops them. All files are closed by
    then."""
    if code and distributed():
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def distributed() -> bool:
    try:
        return place()[1] > 1
    except ConfigError:
        return False


def fail_cleanly(main, argv: list[str]) -> int:
    """main(argv), with every failure reported as above. --traceback anywhere in argv shows where it happened."""
    trace = "--traceback" in argv
    try:
        return main([a for a in argv if a != "--traceback"])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0
    except Exception as error:
        said = getattr(error, "said", None)  # by runtime/peers.py, with the code of the job's first failure
        if said is None or trace:
            print(explain(error, trace=trace), file=sys.stderr, flush=True)
        return code_of(error) if said is None else said
