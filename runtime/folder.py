"""Checks of the run folder before the first step, instead of failing at the first save hours later.

    refuse_links     no link in it redirects a write
    write_token, check_token, remove_token     every rank sees the folder that rank 0 writes to
"""
import contextlib
import socket
import uuid
from pathlib import Path

from config import ConfigError

FOLLOWED = ("STOP",)  # only removed, never written to
# folders in which a run also writes files by name
INNER_FOLDERS = ("tokenizer", "tokenizer/additional_chat_templates", "checkpoints", "patches")


def refuse_links(folder: Path) -> None:
    """Raise ConfigError if a name that a run writes to is a symbolic link.

    The run folder itself may be one. Otherwise a folder from someone else could make a run overwrite your
    files.
    """
    places = [folder, *(folder / name for name in INNER_FOLDERS)]
    for place in places:
        if place != folder and not place.is_dir():
            continue
        for path in sorted(place.iterdir()):
            if path.is_symlink() and path.name not in FOLLOWED:
                raise ConfigError(
                    f"{path}: is a link, and a run does not write through links; replace it by what it "
                    "points to, or choose another --log.name (another disk: --log.dir)"
                )


def write_token(folder: Path) -> str:
    """Write a file with a new unique name, on rank 0, and return the name. Raises OSError."""
    name = f".probe-{uuid.uuid4().hex}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(name)
    return name


def check_token(folder: Path, name: str) -> None:
    """Raise ConfigError if this rank does not find the file of write_token."""
    if not (folder / name).is_file():
        raise ConfigError(
            f"log.dir: {folder.absolute()} on {socket.gethostname()} is not the folder rank 0 writes to; "
            "every rank writes its part of a checkpoint there: give a folder that all nodes share"
        )


def remove_token(folder: Path, name: str) -> None:
    with contextlib.suppress(OSError):
        (folder / name).unlink()
