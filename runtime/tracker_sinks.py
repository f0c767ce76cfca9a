"""The MLflow and Comet sinks: their child process is tracker_child.py. Imported only by a run that asks.

A resumed run continues the same run of the tracker, whose id is in the run folder (mlflow_id, comet_id).
"""
import secrets
from pathlib import Path
from typing import Any

from config import LogConfig
from config.reading import flatten_tree
from runtime.child_sink import ChildSink
from runtime.sinks import asked_trackers, run_tags


class TrackerSink(ChildSink):
    """A sink of tracker_child.py. name: the run's name. tree: the resolved config as plain data."""
    kind = ""  # the name of the tracker there

    def __init__(self, log: LogConfig, run_dir: Path, name: str, tree: dict[str, Any]) -> None:
        """Start the child and return at once."""
        super().__init__()
        try:
            self.begin({
                "kind": self.kind,
                "name": name,
                "project": log.project,
                "entity": log.entity,
                "group": log.group,
                "tags": list(run_tags(log.tags)),
                "notes": log.notes,
                "id_file": str((run_dir / f"{self.kind}_id").resolve()),
                "new_id": secrets.token_hex(16),
                "dir": str(run_dir.resolve()),
                "settings": flatten_tree(tree),
                **self.own_settings(log),
            })
        except OSError as error:
            self.trouble = str(error)

    def own_settings(self, log: LogConfig) -> dict[str, Any]:
        """Return what only this tracker needs."""
        raise NotImplementedError


class MlflowSink(TrackerSink):
    """MLflow sink. log.mlflow is the address of a server or a database, or a folder."""
    title = "MLflow"
    kind = "mlflow"

    def own_settings(self, log: LogConfig) -> dict[str, Any]:
        address = str(log.mlflow)
        if "://" not in address and not address.startswith(("file:", "databricks")):
            address = Path(address).resolve().as_uri()
        return {"address": address}


class CometSink(TrackerSink):
    """Comet sink. Offline, it leaves an archive in the run folder, which `comet upload` sends."""
    title = "Comet"
    kind = "comet"
    late_hint = "; `comet upload` can send what is on disk"

    def own_settings(self, log: LogConfig) -> dict[str, Any]:
        return {"online": log.comet == "online"}


SINKS = {sink.kind: sink for sink in (MlflowSink, CometSink)}


def open_trackers(log: LogConfig, run_dir: Path, name: str, tree: dict[str, Any]) -> list[TrackerSink]:
    """Open the sinks that the config asks for. See TrackerSink."""
    return [SINKS[kind](log, run_dir, name, tree) for kind in asked_trackers(log)]
