"""The process that talks to W&B: wandb_sink.py starts it and sends JSON lines to its stdin.

It imports nothing of Bevatron. The first line holds the arguments of wandb.init. The lines after it:

    {"config": {...}}                               more of what the run is
    {"step": n, "values": {...}}                    numbers of a step; "tokens" is the axis of all others
    {"step": n, "name": ..., "text": ...}           a text that the model wrote
    {"step": n, "name": ..., "picture": PATH}       a PNG file
    {"finish": exit code, "title": ..., "text": ..., "level": ...}    the last one: an alert, and the end

If the pipe ends without the last, the run has died. An error is written to stdout as one line.
"""
import html
import json
import os
import signal
import sys
import threading
import time
from typing import Any, TextIO

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
    for names in ("train/*", "val/*"):
        run.define_metric(names, step_metric="tokens")
    exit_code = 1
    for line in sys.stdin:
        message = json.loads(line)
        if "finish" in message:
            exit_code = message["finish"]
            title = f"{run.name}: {message['title']}"
            run.alert(title=title, text=message["text"] or "-", level=message["level"])
            break
        if "config" in message:
            run.config.update(message["config"], allow_val_change=True)
        else:
            run.log(logged_values(wandb, message), step=message["step"])
    run.finish(exit_code=exit_code)


def logged_values(wandb: Any, message: dict[str, Any]) -> dict[str, Any]:
    """What run.log takes of a message."""
    if "text" in message:
        return {message["name"]: wandb.Html(f"<pre>{html.escape(message['text'])}</pre>")}
    if "picture" in message:
        return {message["name"]: wandb.Image(message["picture"])}
    return message["values"]


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
