"""The process that talks to W&B: reads JSON lines from stdin, started by wandb_sink.py. Nothing of ours is imported.

First line: the arguments of wandb.init; then {"step": n, "values": {...}}; at last {"finish": exit code}. A pipe that
ends without it means that the run died. What goes wrong is one line on stdout.
"""
import json
import os
import signal
import sys
import threading
import time

GRACE = 3.0  # seconds to finish in, after the trainer has died


def main() -> None:
    trainer = int(sys.argv[1])  # not getppid(): it may have died before we ask
    threading.Thread(target=end_with, args=(trainer,), daemon=True).start()
    sys.path.pop(0)  # this folder: its module names are not for wandb to find
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what wandb prints goes where stderr goes: nowhere
    try:
        start = json.loads(sys.stdin.readline())
        import wandb
        # console off: no capture of our streams; x_stats_pid: the trainer's CPU and memory are of interest, not ours
        quiet = wandb.Settings(console="off", silent=True, save_code=False, x_stats_pid=trainer)
        run = wandb.init(**start, settings=quiet)
        code = 1
        for line in sys.stdin:
            record = json.loads(line)
            if "finish" in record:
                code = record["finish"]
                break
            run.log(record["values"], step=record["step"])
        run.finish(exit_code=code)
    except BaseException as e:  # wandb raises SystemExit and KeyboardInterrupt too
        words = (str(e).strip() or "no reason given").splitlines()[0]
        say.write(f"{type(e).__name__}: {words[:200]}\n")
        say.flush()
        os._exit(1)


def end_with(trainer: int) -> None:
    """wandb may block for ever; no orphan outlives its run."""
    while os.getppid() == trainer:
        time.sleep(0.5)
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)  # with the processes that wandb has started


if __name__ == "__main__":
    main()
