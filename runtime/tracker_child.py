"""The process that talks to MLflow or Comet: tracker_sinks.py starts it and sends JSON lines to its stdin.

It imports nothing from Bevatron but wandb_child.py beside it, which describes the lines after the first one.
The first line has kind (mlflow or comet), name, project, entity, group, tags, notes, settings {key: value},
id_file and new_id, dir (the run folder), and address (MLflow) or online (Comet).
"""
import json
import sys
from pathlib import Path
from typing import Any, Protocol

from wandb_child import serve

MAX_PARAMS = 100  # that MLflow takes at once
MAX_VALUE = 500  # characters of a parameter


class Tracker(Protocol):
    """What the two trackers have in common. ended: (exit code, how the run ended, its closing line)."""

    def facts(self, facts: dict[str, Any]) -> None: ...
    def values(self, values: dict[str, float], step: int) -> None: ...
    def text(self, name: str, text: str, step: int) -> None: ...
    def picture(self, name: str, path: str, step: int) -> None: ...
    def note(self, name: str, text: str) -> None: ...
    def ended(self, code: int, title: str, text: str) -> None: ...


class MlflowRun:
    """A run in MLflow; one that the run folder knows goes on."""

    def __init__(self, first: dict[str, Any]) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.set_tracking_uri(first["address"])
        mlflow.set_experiment(first["project"])
        known = read_id(first["id_file"])
        group = {"group": first["group"]} if first["group"] else {}
        tags = {**dict.fromkeys(first["tags"], "true"), **group}
        if known:
            run = mlflow.start_run(run_id=known)
        else:
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

    def ended(self, code: int, title: str, text: str) -> None:
        self.note("end", f"{title}: {text}")
        if title.startswith("failed"):
            self.note("alert", f"{title}: {text}")
            self.mlflow.end_run(status="FAILED")
        else:
            self.mlflow.end_run(status="FINISHED" if code == 0 else "KILLED")


class CometRun:
    """An experiment in Comet; one that the run folder knows goes on."""

    def __init__(self, first: dict[str, Any]) -> None:
        import comet_ml

        own = read_id(first["id_file"])
        if not own:
            own = first["new_id"]
            Path(first["id_file"]).write_text(f"{own}\n")
        tags = [*first["tags"], *([first["group"]] if first["group"] else [])]
        self.experiment = comet_ml.start(
            workspace=first["entity"],
            project_name=first["project"],
            experiment_key=own,
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

    def ended(self, code: int, title: str, text: str) -> None:
        self.note("end", f"{title}: {text}")
        if title.startswith("failed"):
            self.note("alert", f"{title}: {text}")
            self.experiment.add_tag("failed")
        self.experiment.end()


TRACKERS = {"mlflow": MlflowRun, "comet": CometRun}


def run_tracker(trainer_pid: int) -> None:
    """Read stdin and forward it to the tracker until {"finish": ...} or the end of the pipe."""
    first = json.loads(sys.stdin.readline())
    run: Tracker = TRACKERS[first["kind"]](first)
    for line in sys.stdin:
        message = json.loads(line)
        if "finish" in message:
            run.ended(message["finish"], message["title"], message["text"])
            return
        forward(run, message)
    run.ended(1, "failed without a word", "the trainer is gone")


def forward(run: Tracker, message: dict[str, Any]) -> None:
    """Hand one line to the tracker."""
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
        run.values({name: each for name, each in values if isinstance(each, (int, float))}, message["step"])


def read_id(file: str) -> str:
    """Return the id of an earlier launch, or ""."""
    path = Path(file)
    return path.read_text().strip() if path.exists() else ""


if __name__ == "__main__":
    serve(run_tracker)
