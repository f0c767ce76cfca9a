"""The Weights & Biases sink: its child process is tracker_child.py.

A resumed run keeps its W&B id (file wandb_id in the run folder), so that W&B shows a single run, and the
offset of W&B's step from the run's (wandb_shift).
"""
import secrets
import shlex
from pathlib import Path
from typing import Any

from runtime.child_sink import BUFFER_BYTES, ChildSink
from runtime.setup import WandbSettings

TRAIN_FILE = Path(__file__).resolve().parent.parent / "train.py"
ID_FILE = "wandb_id"  # in the run folder: the id, and the folder it was created for
SHIFT_FILE = "wandb_shift"


class WandbSink(ChildSink):
    """W&B sink. With mode off there is no child process, and every method does nothing.

    name: the run's name. tree: the resolved config as plain data. command: the train.py command that W&B
    shows. max_buffered: maximum backlog for the pipe in bytes. sync_command (attribute): the command that
    uploads all launches of an offline run, or "". copied_from (attribute): copied_from(run_dir).
    """
    title = "W&B"
    late_hint = "; `wandb sync` can send what is on disk"

    def __init__(self, settings: WandbSettings, run_dir: Path, name: str, tree: dict[str, Any], *,
                 command: str = "", max_buffered: int = BUFFER_BYTES) -> None:
        """Start the child and return at once."""
        super().__init__(max_buffered)
        self.command = command
        self.sync_command = ""
        self.copied_from = ""
        if settings.mode != "off":
            try:
                self.start(settings, Path(run_dir), name, tree)
            except OSError as error:
                self.trouble = str(error)

    def start(self, settings: WandbSettings, run_dir: Path, name: str, tree: dict[str, Any]) -> None:
        self.copied_from = copied_from(run_dir)
        folder = Path(settings.dir or run_dir)
        folder.mkdir(parents=True, exist_ok=True)  # otherwise wandb writes to a temporary folder
        init_arguments = {
            "project": settings.project,
            "entity": settings.entity,
            "group": settings.group,
            "tags": list(settings.tags) or None,
            "notes": settings.notes,
            "name": name,
            "id": settings.id or stable_id(run_dir),
            "dir": str(folder),
            "mode": settings.mode,
            "resume": "allow",
            "config": tree,
        }
        self.begin({
            "kind": "wandb",
            "init": init_arguments,
            "shift_file": str((run_dir / SHIFT_FILE).resolve()),
            "program": str(TRAIN_FILE),
            "arguments": shlex.split(self.command)[2:],  # after python train.py
        })
        if settings.mode == "offline":
            folders = f"{shlex.quote(str(folder))}/wandb/offline-run-*-{init_arguments['id']}"
            self.sync_command = f"wandb sync {folders}"


def stable_id(run_dir: Path) -> str:
    """Return the W&B id of this run folder, creating it on the first call.

    A copied folder gets a new id, unless the original is gone, in which case the folder was moved.
    """
    file = Path(run_dir) / ID_FILE
    place = str(file.parent.resolve())
    before = file.read_text() if file.exists() else ""
    run_id = before.partition("\n")[0].strip()
    if run_id and copied_from(run_dir):
        run_id = ""
        (file.parent / SHIFT_FILE).unlink(missing_ok=True)  # it belongs to the original
    run_id = run_id or secrets.token_hex(4)
    text = f"{run_id}\n{place}\n"
    if text != before:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return run_id


def copied_from(run_dir: Path) -> str:
    """Return the folder that this run folder is a copy of, if it still exists, or ""."""
    file = Path(run_dir) / ID_FILE
    try:
        own, place, *_ = [*file.read_text().split("\n"), ""]
        first = Path(place) / ID_FILE
        is_copy = bool(place) and not first.samefile(file) and first.read_text().split("\n")[0] == own
    except OSError:  # neither exists
        return ""
    return place if is_copy else ""
