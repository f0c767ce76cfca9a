"""Files of public corpora: listed by a pattern, and fetched one at a time when they are read.

A file is written to a temporary name next to its place, which a killed process leaves and the next one
continues; it is compared with its sha256 where that is known, renamed, read, and removed.
"""
import os
from fnmatch import fnmatchcase
from pathlib import Path

from config import ConfigError
from data.documents import DocumentPiece, whole_file
from data.indexed import file_sha256
from data.remote import FileState, RemoteFolder, open_folder, url_path

PART = ".part"  # suffix of an unfinished download


def matching_names(folder: RemoteFolder, pattern: str) -> dict[str, FileState | None]:
    """Return the files below a folder that match a pattern such as data/*/*.parquet, by their path, with a
    state if listing tells it. Raises RemoteError."""
    head, _, rest = pattern.partition("/")
    if not rest:
        return {name: state for name, state in folder.entries().items() if fnmatchcase(name, head)}
    is_named = not set(head) & set("*?[")
    names = [head] if is_named else [name for name in folder.entries() if fnmatchcase(name, head)]
    return {
        f"{name}/{path}": state
        for name in sorted(names)
        for path, state in matching_names(folder.folder(name), rest).items()
    }


def fetch(piece: DocumentPiece, folder: str) -> tuple[Path, str]:
    """Download the file of a URL, or what is left of it, below a folder. Return (its place, its sha256).

    Raises ConfigError if it is not the file that was listed, RemoteError if the store fails, and OSError if
    the disk does.
    """
    target = copy_path(piece, folder)
    if target.exists():
        return target, file_sha256(target)
    part = target.with_name(f"{target.name}{PART}")
    parent, _, name = piece.path.rpartition("/")
    store = open_folder(parent, "--from")
    part.parent.mkdir(parents=True, exist_ok=True)
    store.download(name, part, piece.size)
    digest = file_sha256(part)
    if piece.sha256:
        is_same = digest == piece.sha256
        how = f"sha256 {piece.sha256[:12]} then, {digest[:12]} now"
    else:
        is_whole = part.stat().st_size == piece.size
        is_same = is_whole and store.state(name) == FileState(piece.size, piece.version)
        how = "while it was fetched"
    if not is_same:
        part.unlink()
        raise ConfigError(changed(piece.path, how))
    os.replace(part, target)
    return target, digest


def changed(url: str, how: str) -> str:
    """Return the message about a file that is not the one of the first listing."""
    return (f"{url}: has changed since this corpus was first listed ({how}); give another --out for what it "
            "is now, or --from with a copy of what it was")


def copy_path(piece: DocumentPiece, folder: str) -> Path:
    """Return where the copy of a URL's file lies."""
    return Path(folder, url_path(piece.path))


def pieces_to_read(piece: DocumentPiece, folder: str | None) -> tuple[list[DocumentPiece], str]:
    """Return (the pieces on this machine that a piece stands for, the sha256 of a file that was fetched)."""
    if piece.kind != "url":
        return [piece], ""
    assert folder is not None
    path, digest = fetch(piece, folder)
    return whole_file(str(path)), digest
