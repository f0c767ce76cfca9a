"""The process that talks to W&B: wandb_sink.py starts it and sends JSON lines to its stdin.

It imports nothing of Bevatron. The first line is

    {"init": the arguments of wandb.init, "shift_file": PATH, "program": PATH, "arguments": [its words]}

The lines after it:

    {"config": {...}}                               more of what the run is
    {"step": n, "values": {...}}                    numbers of a step; "tokens" is the axis of all others
    {"step": n, "name": ..., "text": ...}           a text that the model wrote: alone, and in a table "NAMEs"
    {"step": n, "name": ..., "picture": PATH}       a PNG file
    {"step": n, "checkpoint": PATH, "files": [..]}  a checkpoint's folder, which is named, and files to copy
    {"rewind": n}                                   the run goes back: later steps come again
    {"finish": exit code, "title": ..., "text": ..., "level": ...}    the last one: an alert, and the end

If the pipe ends without the last, the run has died. An error is written to stdout as one line.

W&B drops what is logged at a smaller step than before, as when a run goes back or is resumed. So its own step
counts on there (HistoryStep), and the run's is among the values, as "step". How far the two are apart is kept
in the run folder: a start offline cannot ask W&B.
"""
import html
import json
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

GRACE_SECONDS = 3.0  # to finish in, after the trainer has died
POLL_SECONDS = 0.5
MAX_ERROR_LENGTH = 200
MOST_FILES = 10**7  # of a checkpoint: every rank writes some
MOST_TEXTS = 100  # rows of a table of texts, which is sent whole each time: the newest
OVER_TOKENS = ("train/*", "val/*", "tasks/*", "run/*")  # what W&B shows over "tokens"


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
    first_line = json.loads(sys.stdin.readline())
    import wandb
    # console off: wandb does not capture our streams; x_stats_pid: it watches the trainer's CPU and memory,
    # not ours
    program = Path(first_line["program"])
    sys.argv = [str(program), *first_line["arguments"]]
    settings = wandb.Settings(
        console="off",
        silent=True,
        save_code=False,
        x_stats_pid=trainer_pid,
        program=program.name,
        program_relpath=program.name,
        program_abspath=str(program),
    )
    run = wandb.init(**first_line["init"], settings=settings)
    for names in OVER_TOKENS:
        run.define_metric(names, step_metric="tokens")
    history = HistoryStep(run.step, Path(first_line["shift_file"]))
    texts: list[list[Any]] = []  # [step, text], of this start
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
        elif "rewind" in message:
            title = f"{run.name}: went back to step {message['rewind']}"
            run.alert(title=title, text="later steps are trained again", level="WARN")
        elif "checkpoint" in message:
            run.log_artifact(artifact_of(wandb, run.id, message))
        else:
            step = message["step"]
            if "text" in message:
                texts = [*texts, [step, message["text"]]][-MOST_TEXTS:]
            run.log({"step": step, **logged_values(wandb, message, texts)}, step=history.of(step))
    run.finish(exit_code=exit_code)


class HistoryStep:
    """The step of W&B at which a step of the run is logged: the same, as long as W&B takes it.

    first: the smallest that W&B takes; of a run that is resumed online, the one after its last. file: keeps
    how much larger W&B's step is, for the next start.
    """

    def __init__(self, first: int, file: Path) -> None:
        self.last = first - 1
        self.run_step = -1  # that was logged at the last
        self.file = file
        self.shift = read_number(file)

    def of(self, run_step: int) -> int:
        if run_step != self.run_step:
            shift = max(self.shift, self.last + 1 - run_step)
            if shift != self.shift:
                self.file.write_text(f"{shift}\n")
            self.shift = shift
            self.run_step = run_step
            self.last = run_step + self.shift
        return self.last


def read_number(file: Path) -> int:
    """The number in the file; 0 without one, or if it is damaged."""
    try:
        return max(0, int(file.read_text()))
    except (OSError, ValueError):
        return 0


def logged_values(wandb: Any, message: dict[str, Any], texts: list[list[Any]]) -> dict[str, Any]:
    """The values of a message, as run.log takes them. texts: [step, text] of all until now."""
    if "text" in message:
        name = message["name"]
        return {
            name: wandb.Html(f"<pre>{html.escape(message['text'])}</pre>"),
            f"{name}s": wandb.Table(columns=["step", "text"], data=texts),
        }
    if "picture" in message:
        return {message["name"]: wandb.Image(message["picture"])}
    return message["values"]


def artifact_of(wandb: Any, run_id: str, message: dict[str, Any]) -> Any:
    """A checkpoint as W&B keeps it: a reference to its folder, and copies of the files."""
    metadata = {"step": message["step"], "host": platform.node()}
    artifact = wandb.Artifact(f"checkpoint-{run_id}", type="model", metadata=metadata)
    artifact.add_reference(f"file://{message['checkpoint']}", checksum=False, max_objects=MOST_FILES)
    for file in message["files"]:
        artifact.add_file(file)
    return artifact


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
