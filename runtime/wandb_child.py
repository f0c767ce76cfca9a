"""The process that talks to W&B: wandb_sink.py starts it and sends JSON lines to its stdin.

The first line is

    {"init": arguments of wandb.init, "shift_file": PATH, "program": PATH, "arguments": [of the program]}

and child_process.py describes the others. A text is logged alone and in a table "NAMEs".

W&B drops values logged at a smaller step than before, as when a run is rewound or resumed. So W&B's step
keeps increasing (HistoryStep), and the run's step is logged as the value "step". Their difference is kept in
the run folder, since an offline launch cannot query W&B.
"""
import html
import json
import platform
import sys
from pathlib import Path
from typing import Any

from child_process import serve

MAX_FILES = 10**7  # in a checkpoint, since every rank writes some
MAX_TEXTS = 100  # newest texts in the table, which is sent as a whole each time
OVER_TOKENS = ("train/*", "val/*", "tasks/*", "run/*")  # metrics that W&B plots over "tokens"


def run_wandb(trainer_pid: int) -> None:
    """Read stdin and forward it to wandb until {"finish": ...} or the end of the pipe."""
    first_line = json.loads(sys.stdin.readline())
    import wandb
    # console="off": wandb does not capture our streams; x_stats_pid: it monitors the trainer's CPU and
    # memory, not ours
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
    texts: list[list[Any]] = []  # [step, text] of this launch
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
            title = f"{run.name}: rewound to step {message['rewind']}"
            run.alert(title=title, text="later steps are trained again", level="WARN")
        elif "checkpoint" in message:
            run.log_artifact(make_artifact(wandb, run.id, message))
        else:
            step = message["step"]
            if "text" in message:
                texts = [*texts, [step, message["text"]]][-MAX_TEXTS:]
            run.log({"step": step, **logged_values(wandb, message, texts)}, step=history.of(step))
    run.finish(exit_code=exit_code)


class HistoryStep:
    """Map steps of the run to W&B steps, which are equal as long as W&B accepts that.

    first: the smallest step that W&B accepts, i.e. the one after the last if the run is resumed online. file:
    stores the difference between W&B's step and the run's for the next launch.
    """

    def __init__(self, first: int, file: Path) -> None:
        self.last = first - 1
        self.run_step = -1  # the step of the run logged at `last`
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
    """Read a number from a file, or return 0 if it is missing or damaged."""
    try:
        return max(0, int(file.read_text()))
    except (OSError, ValueError):
        return 0


def logged_values(wandb: Any, message: dict[str, Any], texts: list[list[Any]]) -> dict[str, Any]:
    """Convert a message to values for run.log. texts: [step, text] of all texts so far."""
    if "text" in message:
        name = message["name"]
        return {
            name: wandb.Html(f"<pre>{html.escape(message['text'])}</pre>"),
            f"{name}s": wandb.Table(columns=["step", "text"], data=texts),
        }
    if "picture" in message:
        return {message["name"]: wandb.Image(message["picture"])}
    return message["values"]


def make_artifact(wandb: Any, run_id: str, message: dict[str, Any]) -> Any:
    """Create an artifact for a checkpoint: a reference to its folder, and copies of the files."""
    metadata = {"step": message["step"], "host": platform.node()}
    artifact = wandb.Artifact(f"checkpoint-{run_id}", type="model", metadata=metadata)
    artifact.add_reference(f"file://{message['checkpoint']}", checksum=False, max_objects=MAX_FILES)
    for file in message["files"]:
        artifact.add_file(file)
    return artifact


if __name__ == "__main__":
    serve(run_wandb)
