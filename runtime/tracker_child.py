"""The process that talks to MLflow or Comet: tracker_sinks.py starts it and sends JSON lines to its stdin.

The first line has kind (mlflow or comet), name, project, entity, group, tags, notes, settings {key: value},
id_file and new_id, dir (the run folder), and address (MLflow) or online (Comet). child_process.py describes
the others.
"""
import json
import sys
from pathlib import Path
from typing import Any, Protocol

from child_process import serve

MAX_PARAMS = 100  # that MLflow takes at once
MAX_VALUE = 500  # characters of a parameter
MLFLOW_STATUS = {"INFO": "FINISHED", "WARN": "KILLED", "ERROR": "FAILED"}  # by the level of the last line
DIED = {"title": "failed", "text": "the trainer has died", "level": "ERROR"}  # if the last line is missing


class Tracker(Protocol):
    """What the two trackers have in common. end(level): INFO, WARN or ERROR."""

    def facts(self, facts: dict[str, Any]) -> None: ...
    def values(self, values: dict[str, float], step: int) -> None: ...
    def text(self, name: str, text: str, step: int) -> None: ...
    def picture(self, name: str, path: str, step: int) -> None: ...
    def note(self, name: str, text: str) -> None: ...
    def end(self, level: str) -> None: ...


class MlflowRun:
    """A run in MLflow, continued if the run folder has its id."""

    def __init__(self, first: dict[str, Any]) -> None:
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

    def end(self, level: str) -> None:
        self.mlflow.end_run(status=MLFLOW_STATUS[level])


class CometRun:
    """An experiment in Comet, continued if the run folder has its id."""

    def __init__(self, first: dict[str, Any]) -> None:
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

    def end(self, level: str) -> None:
        if level == "ERROR":
            self.experiment.add_tag("failed")
        self.experiment.end()


TRACKERS = {"mlflow": MlflowRun, "comet": CometRun}


def run_tracker(trainer_pid: int) -> None:
    """Read stdin and forward it to the tracker until {"finish": ...} or the end of the pipe."""
    first = json.loads(sys.stdin.readline())
    run: Tracker = TRACKERS[first["kind"]](first)
    last = DIED
    for line in sys.stdin:
        message = json.loads(line)
        if "finish" in message:
            last = message
            break
        forward(run, message)

    closing = f"{last['title']}: {last['text']}"
    run.note("end", closing)
    if last["level"] == "ERROR":
        run.note("alert", closing)
    run.end(last["level"])


def forward(run: Tracker, message: dict[str, Any]) -> None:
    """Pass one message to the method of the tracker that takes it."""
    if "config" in message:
        run.facts(message["config"]["run"])
    elif "rewind" in message:
        run.note("rewound", f"to step {message['rewind']}; later steps are trained again")
    elif "checkpoint" in message:
        run.note("checkpoint", message["checkpoint"])
    elif "text" in message:
        run.text(message["name"], message["text"], message["step"])
    elif "picture" in message:
        run.picture(message["name"], message["picture"], message["step"])
    else:
        values = message["values"].items()
        numbers = {name: value for name, value in values if isinstance(value, (int, float))}
        run.values(numbers, message["step"])


def read_id(file: str) -> str:
    """Return the id of an earlier launch, or ""."""
    path = Path(file)
    return path.read_text().strip() if path.exists() else ""


if __name__ == "__main__":
    serve(run_tracker)
