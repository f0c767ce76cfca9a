"""What the child processes of trackers share: the lines that they read, their streams, and how they end.

wandb_child.py and tracker_child.py import this file and nothing else from Bevatron. A sink (child_sink.py)
starts one of them and writes JSON lines to its stdin. The first line is described in each; the following:

    {"config": {"run": {...}}}                      more facts about the run
    {"step": n, "values": {...}}                    values of a step; "tokens" is the x axis of all others
    {"step": n, "name": ..., "text": ...}           generated text
    {"step": n, "name": ..., "picture": PATH}       a PNG file
    {"step": n, "checkpoint": PATH, "files": [..]}  a checkpoint folder to reference, and files to copy
    {"rewind": n}                                   the run goes back to step n and repeats later steps
    {"finish": exit code, "title": ..., "text": ..., "level": ...}    the last one: an alert, and the end

If the pipe ends without the last line, the run has died. An error is written to stdout as one line.
"""
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

GRACE_SECONDS = 3.0  # to finish after the trainer has died
POLL_SECONDS = 0.5
MAX_ERROR_LENGTH = 200


def serve(run: Callable[[int], None]) -> None:
    """Call run(process id of the trainer). An error is written as one line, and exits with code 1.

    The process ends some seconds after the trainer has died.
    """
    trainer_pid = int(sys.argv[1])  # not getppid(): the trainer may have died before the call
    threading.Thread(target=end_with, args=(trainer_pid,), daemon=True).start()
    sys.path.pop(0)  # this folder: the tracker must not import modules from it

    # redirect the tracker's output to stderr, which is /dev/null; stdout is only for errors
    errors = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        run(trainer_pid)
    except BaseException as error:  # wandb raises SystemExit and KeyboardInterrupt too
        write_error(errors, error)
        os._exit(1)


def write_error(out: TextIO, error: BaseException) -> None:
    text = str(error).strip() or "no reason given"
    first_line = text.splitlines()[0]
    out.write(f"{type(error).__name__}: {first_line[:MAX_ERROR_LENGTH]}\n")
    out.flush()


def end_with(trainer_pid: int) -> None:
    """Kill this process some seconds after the trainer has died, since a tracker may block forever."""
    while os.getppid() == trainer_pid:
        time.sleep(POLL_SECONDS)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)  # including the processes started by the tracker
