"""The MLflow and Comet sinks: their child process is tracker_child.py. Imported only by a run that asks.

A resumed run is the same run there: the run folder has its id (mlflow_id, comet_id).
"""
import secrets
from pathlib import Path
from typing import Any

from config import LogConfig
from config.reading import flatten_tree
from runtime.child_sink import ChildSink
from runtime.sinks import run_tags


class MlflowSink(ChildSink):
    """MLflow sink. name: the run's name. tree: the resolved config as plain data."""
    title = "MLflow"

    def __init__(self, log: LogConfig, run_dir: Path, name: str, tree: dict[str, Any]) -> None:
        super().__init__()
        address = str(log.mlflow)
        if "://" not in address and not address.startswith(("file:", "databricks")):
            address = Path(address).resolve().as_uri()
        start_tracker(self, "mlflow", log, run_dir, name, tree, address=address)


class CometSink(ChildSink):
    """Comet sink; offline, it leaves an archive in the run folder, which `comet upload` sends."""
    title = "Comet"
    late_hint = "; `comet upload` can send what is on disk"

    def __init__(self, log: LogConfig, run_dir: Path, name: str, tree: dict[str, Any]) -> None:
        super().__init__()
        start_tracker(self, "comet", log, run_dir, name, tree, online=log.comet == "online")


def open_trackers(log: LogConfig, run_dir: Path, name: str, tree: dict[str, Any]) -> list[ChildSink]:
    """Open the sinks that the config asks for."""
    kinds = [MlflowSink] * (log.mlflow is not None) + [CometSink] * (log.comet != "off")
    return [kind(log, run_dir, name, tree) for kind in kinds]


def start_tracker(
    sink: ChildSink, kind: str, log: LogConfig, run_dir: Path, name: str, tree: dict[str, Any], **own: Any
) -> None:
    """Start the child of a sink. own: what only this kind of tracker needs."""
    try:
        sink.begin("tracker_child.py", {
            "kind": kind,
            "name": name,
            "project": log.project,
            "entity": log.entity,
            "group": log.group,
            "tags": list(run_tags(log.tags)),
            "notes": log.notes,
            "id_file": str((run_dir / f"{kind}_id").resolve()),
            "new_id": secrets.token_hex(16),
            "dir": str(run_dir.resolve()),
            "settings": flatten_tree(tree),
            **own,
        })
    except OSError as error:
        sink.trouble = str(error)
