"""The process that talks to W&B: wandb_sink.py starts it and sends JSON lines to its stdin.

It imports nothing of Bevatron. The first line holds the arguments of wandb.init; then {"step": n, "values":
{...}} for each record; the last is {"finish": exit code}. If the pipe ends without it, the run has died. An
error is written to stdout as one line.
"""
import json
import os
import signal
import sys
import threading
import time
from typing import TextIO

GRACE_SECONDS = 3.0  # to finish in, after the trainer has died
POLL_SECONDS = 0.5
MAX_ERROR_LENGTH = 200


def main() -> None:
    trainer_pid = int(sys.argv[1])  # not getppid(): the trainer may have died before the call
    threading.Thread(target=end_with, args=(trainer_pid,), daemon=True).start()
    sys.path.pop(0)  # this folder: wandb must not import modules from it

    # what wandb prints goes to stderr, which is /dev/null; stdout is for errors alone
    errors = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        run_wandb(trainer_pid)
    except BaseException as error:  # wandb raises SystemExit and KeyboardInterrupt too
        write_error(errors, error)
        os._exit(1)


def run_wandb(trainer_pid: int) -> None:
    """Reads stdin and passes it on to wandb, until {"finish": ...} or the end of the pipe."""
    init_arguments = json.loads(sys.stdin.readline())
    import wandb
    # console off: wandb does not capture our streams; x_stats_pid: it watches the trainer's CPU and memory,
    # not ours
    settings = wandb.Settings(console="off", silent=True, save_code=False, x_stats_pid=trainer_pid)
    run = wandb.init(**init_arguments, settings=settings)
    exit_code = 1
    for line in sys.stdin:
        message = json.loads(line)
        if "finish" in message:
            exit_code = message["finish"]
            break
        run.log(message["values"], step=message["step"])
    run.finish(exit_code=exit_code)


def write_error(out: TextIO, error: BaseException) -> None:
    text = str(error).strip() or "no reason given"
    first_line = text.splitlines()[0]
    out.write(f"{type(error).__name__}: {first_line[:MAX_ERROR_LENGTH]}\n")
    out.flush()


def end_with(trainer_pid: int) -> None:
    """Kills this process some seconds after the trainer has died: wandb may block for ever."""
    while os.getppid() == trainer_pid:
        time.sleep(POLL_SECONDS)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)  # with the processes that wandb has started


if __name__ == "__main__":
    main()
