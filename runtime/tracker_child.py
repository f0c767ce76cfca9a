"""The process that talks to a tracker: tracker_sinks.py starts it and sends JSON lines to its stdin.

It imports nothing from Bevatron, and the package of its tracker only. The first line has kind (wandb, mlflow
or comet) and what the class of that tracker asks for below. The following lines:

    {"config": {"run": {...}}}                      more facts about the run
    {"step": n, "values": {...}}                    values of a step; "tokens" is the x axis of all others
    {"step": n, "name": ..., "text": ...}           generated text
    {"step": n, "name": ..., "picture": PATH}       a PNG file
    {"step": n, "checkpoint": PATH, "files": [..]}  a checkpoint folder to reference, and files to copy
    {"rewind": n}                                   the run goes back to step n and repeats later steps
    {"finish": exit code, "title": ..., "text": ..., "level": ...}    the last one: an alert, and the end

If the pipe ends without the last line, the run has died. An error is written to stdout as one line.
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
from typing import Any, Protocol, TextIO

GRACE_SECONDS = 3.0  # to finish after the trainer has died
POLL_SECONDS = 0.5
MAX_ERROR_LENGTH = 200

# W&B
MAX_FILES = 10**7  # in a checkpoint, since every rank writes some
MAX_TEXTS = 100  # newest texts in the table, which is sent as a whole each time
OVER_TOKENS = ("train/*", "val/*", "tasks/*", "run/*")  # metrics that W&B plots over "tokens"

# MLflow
MAX_PARAMS = 100  # that it takes at once
MAX_VALUE = 500  # characters of a parameter
MLFLOW_STATUS = {"INFO": "FINISHED", "WARN": "KILLED", "ERROR": "FAILED"}  # by the level of the last line

DIED = {"title": "failed", "text": "the trainer has died", "level": "ERROR"}  # if the last line is missing


class Tracker(Protocol):
    """A run in a tracker. end(last): the last line, or None if it is missing."""

    def facts(self, facts: dict[str, Any]) -> None: ...
    def values(self, values: dict[str, float], step: int) -> None: ...
    def text(self, name: str, text: str, step: int) -> None: ...
    def picture(self, name: str, path: str, step: int) -> None: ...
    def checkpoint(self, folder: str, files: list[str], step: int) -> None: ...
    def rewound(self, step: int) -> None: ...
    def end(self, last: dict[str, Any] | None) -> None: ...


# ---- W&B ---------------------------------------------------------------------------------------------------


class WandbRun:
    """A run in W&B. A text is logged alone and in a table "NAMEs".

    W&B drops values logged at a smaller step than before, as when a run is rewound or resumed. So W&B's step
    keeps increasing (HistoryStep), and the run's step is logged as the value "step". Their difference is kept
    in the run folder, since an offline launch cannot query W&B.

    first: init {argument of wandb.init: value}, shift_file, program (PATH), arguments (of the program).
    """

    def __init__(self, first: dict[str, Any], trainer_pid: int) -> None:
        import wandb
        # console="off": wandb does not capture our streams; x_stats_pid: it monitors the trainer's CPU and
        # memory, not ours
        program = Path(first["program"])
        sys.argv = [str(program), *first["arguments"]]
        settings = wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            x_stats_pid=trainer_pid,
            program=program.name,
            program_relpath=program.name,
            program_abspath=str(program),
        )
        self.wandb = wandb
        self.run = wandb.init(**first["init"], settings=settings)
        for names in OVER_TOKENS:
            self.run.define_metric(names, step_metric="tokens")
        self.history = HistoryStep(self.run.step, Path(first["shift_file"]))
        self.texts: list[list[Any]] = []  # [step, text] of this launch

    def facts(self, facts: dict[str, Any]) -> None:
        self.run.config.update({"run": facts}, allow_val_change=True)

    def values(self, values: dict[str, Any], step: int) -> None:
        self.run.log({"step": step, **values}, step=self.history.of(step))

    def text(self, name: str, text: str, step: int) -> None:
        self.texts = [*self.texts, [step, text]][-MAX_TEXTS:]
        alone = self.wandb.Html(f"<pre>{html.escape(text)}</pre>")
        table = self.wandb.Table(columns=["step", "text"], data=self.texts)
        self.values({name: alone, f"{name}s": table}, step)

    def picture(self, name: str, path: str, step: int) -> None:
        self.values({name: self.wandb.Image(path)}, step)

    def checkpoint(self, folder: str, files: list[str], step: int) -> None:
        """Log an artifact: a reference to the folder, and copies of the files."""
        metadata = {"step": step, "host": platform.node()}
        artifact = self.wandb.Artifact(f"checkpoint-{self.run.id}", type="model", metadata=metadata)
        artifact.add_reference(f"file://{folder}", checksum=False, max_objects=MAX_FILES)
        for file in files:
            artifact.add_file(file)
        self.run.log_artifact(artifact)

    def rewound(self, step: int) -> None:
        self.alert(f"rewound to step {step}", "later steps are trained again", "WARN")

    def alert(self, title: str, text: str, level: str) -> None:
        self.run.alert(title=f"{self.run.name}: {title}", text=text or "-", level=level)

    def end(self, last: dict[str, Any] | None) -> None:
        if last is not None:
            self.alert(last["title"], last["text"], last["level"])
        self.run.finish(exit_code=1 if last is None else last["finish"])


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


# ---- MLflow and Comet --------------------------------------------------------------------------------------


class NotingTracker(Tracker):
    """A tracker that is told of checkpoints, rewinds and the end by notes.

    first: name, project, entity, group, tags, notes, settings {key: value}, id_file and new_id, dir (the run
    folder), and address (MLflow) or online (Comet).
    """

    def note(self, name: str, text: str) -> None: ...
    def close(self, level: str) -> None: ...  # INFO, WARN or ERROR

    def checkpoint(self, folder: str, files: list[str], step: int) -> None:
        self.note("checkpoint", folder)

    def rewound(self, step: int) -> None:
        self.note("rewound", f"to step {step}; later steps are trained again")

    def end(self, last: dict[str, Any] | None) -> None:
        last = last or DIED
        closing = f"{last['title']}: {last['text']}"
        self.note("end", closing)
        if last["level"] == "ERROR":
            self.note("alert", closing)
        self.close(last["level"])


class MlflowRun(NotingTracker):
    """A run in MLflow, continued if the run folder has its id."""

    def __init__(self, first: dict[str, Any], trainer_pid: int) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.set_tracking_uri(first["address"])
        mlflow.set_experiment(first["project"])
        run_id = read_id(first["id_file"])
        if run_id:
            mlflow.start_run(run_id=run_id)
            return

        tags = dict.fromkeys(first["tags"], "true")
        if first["group"]:
            tags["group"] = first["group"]
        run = mlflow.start_run(run_name=first["name"], tags=tags, description=first["notes"])
        Path(first["id_file"]).write_text(f"{run.info.run_id}\n")
        settings = [(key, str(value)[:MAX_VALUE]) for key, value in first["settings"].items()]
        for begin in range(0, len(settings), MAX_PARAMS):
            mlflow.log_params(dict(settings[begin:begin + MAX_PARAMS]))

    def facts(self, facts: dict[str, Any]) -> None:
        self.mlflow.log_dict(facts, "run.json")

    def values(self, values: dict[str, float], step: int) -> None:
        self.mlflow.log_metrics(values, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self.mlflow.log_text(text, f"{name}/step_{step:08d}.txt")

    def picture(self, name: str, path: str, step: int) -> None:
        self.mlflow.log_artifact(path)

    def note(self, name: str, text: str) -> None:
        self.mlflow.set_tag(name, text)

    def close(self, level: str) -> None:
        self.mlflow.end_run(status=MLFLOW_STATUS[level])


class CometRun(NotingTracker):
    """An experiment in Comet, continued if the run folder has its id."""

    def __init__(self, first: dict[str, Any], trainer_pid: int) -> None:
        import comet_ml

        key = read_id(first["id_file"])
        if not key:
            key = first["new_id"]
            Path(first["id_file"]).write_text(f"{key}\n")
        tags = [*first["tags"], *([first["group"]] if first["group"] else [])]
        self.experiment = comet_ml.start(
            workspace=first["entity"],
            project_name=first["project"],
            experiment_key=key,
            mode="get_or_create",
            online=first["online"],
            experiment_config=comet_ml.ExperimentConfig(
                name=first["name"], tags=tags, offline_directory=first["dir"], log_code=False
            ),
        )
        self.experiment.log_parameters(first["settings"])
        if first["notes"]:
            self.note("notes", first["notes"])

    def facts(self, facts: dict[str, Any]) -> None:
        self.experiment.log_others({f"run/{name}": value for name, value in facts.items()})

    def values(self, values: dict[str, float], step: int) -> None:
        self.experiment.log_metrics(values, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self.experiment.log_text(text, step=step, metadata={"name": name})

    def picture(self, name: str, path: str, step: int) -> None:
        self.experiment.log_image(path, name=name, step=step)

    def note(self, name: str, text: str) -> None:
        self.experiment.log_other(name, text)

    def close(self, level: str) -> None:
        if level == "ERROR":
            self.experiment.add_tag("failed")
        self.experiment.end()


def read_id(file: str) -> str:
    """Return the id of an earlier launch, or ""."""
    path = Path(file)
    return path.read_text().strip() if path.exists() else ""


# ---- the process -------------------------------------------------------------------------------------------

TRACKERS = {"wandb": WandbRun, "mlflow": MlflowRun, "comet": CometRun}


def serve(trainer_pid: int) -> None:
    """Read stdin and forward it to the tracker until {"finish": ...} or the end of the pipe."""
    first = json.loads(sys.stdin.readline())
    run: Tracker = TRACKERS[first["kind"]](first, trainer_pid)
    last = None
    for line in sys.stdin:
        message = json.loads(line)
        if "finish" in message:
            last = message
            break
        forward(run, message)
    run.end(last)


def forward(run: Tracker, message: dict[str, Any]) -> None:
    """Pass one message to the method of the tracker that takes it."""
    if "config" in message:
        run.facts(message["config"]["run"])
    elif "rewind" in message:
        run.rewound(message["rewind"])
    elif "checkpoint" in message:
        run.checkpoint(message["checkpoint"], message["files"], message["step"])
    elif "text" in message:
        run.text(message["name"], message["text"], message["step"])
    elif "picture" in message:
        run.picture(message["name"], message["picture"], message["step"])
    else:
        run.values(message["values"], message["step"])


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


def main() -> None:
    """Serve the trainer. An error is written as one line, and exits with code 1."""
    trainer_pid = int(sys.argv[1])  # not getppid(): the trainer may have died before the call
    threading.Thread(target=end_with, args=(trainer_pid,), daemon=True).start()
    sys.path.pop(0)  # this folder: the tracker must not import modules from it

    # redirect the tracker's output to stderr, which is /dev/null; stdout is only for errors
    errors = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(trainer_pid)
    except BaseException as error:  # wandb raises SystemExit and KeyboardInterrupt too
        write_error(errors, error)
        os._exit(1)


if __name__ == "__main__":
    main()
