"""Checkpoints in an object store: list them, download, verify and repair their local copies.

    URL/NAME/checkpoints/step_00001000/     its files; index.sha256 is written last
    URL/NAME/checkpoints/step_00001000.keep the mark of a permanent checkpoint
    URL/NAME/config.yaml, metrics.jsonl, inside.jsonl, provenance.jsonl, tokenizer/, patches/

A folder counts as a checkpoint only with its index.sha256, which durable/mirror.py writes last. Downloads are
verified by every checksum, as on a disk, before they get a name in the run folder.
"""
import re
import uuid
from collections.abc import Iterable
from pathlib import Path

from checkpoint.disk import store
from checkpoint.disk.files import IntegrityError, remove, storage_errors, sync_dir
from checkpoint.disk.locks import run_lock
from config import ConfigError
from config.provenance import PATCHES, RECORDS_FILE
from data.remote import RemoteError, RemoteFolder, in_threads, is_url, open_folder, url_path

CHECKPOINTS = "checkpoints"
MARKER = "index.sha256"
KEEP = ".keep"
RUN_FILES = ("config.yaml", "metrics.jsonl", "inside.jsonl", RECORDS_FILE)
RUN_FOLDERS = ("tokenizer", PATCHES)
WHOLE_MARKER = re.compile(rb"[0-9a-f]{64}  index\.json\n")  # some stores expose half-written objects
STEP_FOLDER = re.compile(r"step_(\d{8,})")


def steps_in(checkpoints: RemoteFolder) -> dict[int, str]:
    """Return {step: folder name}, complete or not, newest first."""
    result: dict[int, str] = {}
    for name in checkpoints.names():
        match = STEP_FOLDER.fullmatch(name)
        if match:
            result[int(match[1])] = name
    return dict(sorted(result.items(), reverse=True))


def complete_steps(checkpoints: RemoteFolder) -> dict[int, bytes]:
    """Return {step: its index.sha256} of complete checkpoints, newest first."""
    complete: dict[int, bytes] = {}
    for step, name in steps_in(checkpoints).items():
        marker = checkpoints.folder(name).read(MARKER)
        if marker is not None and WHOLE_MARKER.fullmatch(marker):
            complete[step] = marker
    return complete


# ---- download ----------------------------------------------------------------------------------------------

def fetch(checkpoints: RemoteFolder, step: int, marker: bytes, root: Path) -> Path:
    """Download the checkpoint of a step, verify it and commit it to the root.

    `marker` is its index.sha256. Raises IntegrityError if it is damaged, RemoteError or StorageError.
    """
    final = store.checkpoint_folder(root, step)
    temp = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex}")
    source = checkpoints.folder(final.name)
    sizes = {name: source.state(name) for name in source.names() if name != MARKER}
    total = sum(state.size for state in sizes.values() if state is not None)
    with storage_errors(final, total):
        root.mkdir(parents=True, exist_ok=True)
        store.remove_leftovers(root)
        store.check_free_space(final, total)
        try:
            temp.mkdir()
            files = [(name, state.size) for name, state in sizes.items() if state is not None]
            in_threads(lambda file: source.download(file[0], temp / file[0], file[1]), files)
            (temp / MARKER).write_bytes(marker)
            sync_dir(temp)
            if store.verify(temp).step != step:
                raise IntegrityError(f"{source.url}: holds another step")
            mark = checkpoints.read(f"{final.name}{KEEP}")
            if mark is not None:
                store.marker_path(final).write_bytes(mark)
            store.adopt(temp, final)
        finally:
            remove(temp)
    return final


def fetch_run_files(run: RemoteFolder, folder: Path) -> None:
    """Download the files needed to read a checkpoint, and the metrics up to it."""
    inner = [f"{place}/{name}" for place in RUN_FOLDERS for name in run.folder(place).files()]
    for name in (*RUN_FILES, *inner):
        data = run.read(name)
        if data is not None:
            with storage_errors(folder / name, len(data)):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)


def local_checkpoint(url: str, downloads: Path, asker: str = "checkpoint") -> Path:
    """Return the local copy, below `downloads`, of a run or a checkpoint at a URL; download it if missing.

    `url` is a run (its newest checkpoint) or .../checkpoints/step_00000100.
    Raises ConfigError if there is no checkpoint, or IntegrityError if it is damaged.
    """
    run_url, stated = split_url(url)
    run = open_folder(run_url, asker)
    folder = downloads / url_path(run_url)
    checkpoints = run.folder(CHECKPOINTS)
    try:
        complete = complete_steps(checkpoints)
        step = max(complete, default=-1) if stated is None else stated
        if step not in complete:
            raise ConfigError(
                f"{asker}: {url} holds no checkpoint{listed(complete)}; give the URL of a run, or one like "
                "s3://bucket/runs/NAME/checkpoints/step_00000100"
            )
        final = store.checkpoint_folder(folder / CHECKPOINTS, step)
        with run_lock(folder):
            if not is_same(final, complete[step]):
                fetch(checkpoints, step, complete[step], folder / CHECKPOINTS)
            fetch_run_files(run, folder)
    except RemoteError as error:
        raise ConfigError(f"{asker}: {url} cannot be read: {error}") from error
    return final


# ---- repair ------------------------------------------------------------------------------------------------

def repair(source: RemoteFolder, path: Path) -> str:
    """Download damaged shards of a checkpoint again. Returns a line that says so.

    `source` is its place in a store. The caller holds the lock of the run folder around it. Raises
    IntegrityError if the store does not have the same checkpoint complete, RemoteError or StorageError.
    """
    index = store.quick_check(path)
    damaged = store.damaged_shards(path, index)
    if source.read(MARKER) != (path / MARKER).read_bytes():
        raise IntegrityError(f"{source.url}: holds no checkpoint like {path}")
    sizes = {name: index.files[name]["bytes"] for name in damaged}
    total = sum(sizes.values())
    temp = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    with storage_errors(path, total):
        store.check_free_space(path, total)
        try:
            temp.mkdir()
            in_threads(lambda name: source.download(name, temp / name, sizes[name]), list(damaged))
            for name, why in store.damaged_shards(temp, index, damaged).items():
                raise IntegrityError(f"{source.url}/{name}: damaged there, too: {why}")
            for name in damaged:
                (temp / name).replace(path / name)
            sync_dir(path)
        finally:
            remove(temp)
    count = f"{len(damaged)} files" if len(damaged) > 1 else "1 file"
    return f"{count} of {path} fetched again from {source.url}: {'; '.join(damaged.values())}"


def repair_copy(url: str, downloads: Path) -> str:
    """Call repair() on the local copy of a run or a checkpoint at a URL. Raises the same errors, but
    ConfigError for an unreadable store."""
    path = local_checkpoint(url, downloads)
    try:
        with run_lock(path.parent.parent):
            run = open_folder(split_url(url)[0], "checkpoint")
            return repair(run.folder(CHECKPOINTS).folder(path.name), path)
    except RemoteError as error:
        raise ConfigError(f"checkpoint: {url} cannot be read: {error}") from error


def split_url(url: str) -> tuple[str, int | None]:
    """Split the URL of a run or checkpoint into (URL of the run, step). The step of a run is None."""
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    match = STEP_FOLDER.fullmatch(name)
    if match is None:
        return url.removesuffix(f"/{CHECKPOINTS}"), None
    return parent.removesuffix(f"/{CHECKPOINTS}"), int(match[1])


def local_place(source: str, downloads: Path) -> Path:
    """Return a local path unchanged, or where the copy of a URL is stored."""
    return downloads / url_path(source) if is_url(source) else Path(source)


def is_same(path: Path, marker: bytes) -> bool:
    """Return whether a local checkpoint has this index.sha256."""
    return (path / MARKER).is_file() and (path / MARKER).read_bytes() == marker


def listed(steps: Iterable[int]) -> str:
    """Return " of that step (there are 100, 200)", or "" without steps."""
    names = ", ".join(map(str, sorted(steps)))
    return f" of that step (there are {names})" if names else ""


def refuse_url(path: str, asker: str) -> None:
    """Raise ConfigError for a URL where only local folders can be read."""
    if is_url(path):
        raise ConfigError(
            f"{asker}: {path} is in a store, but only local run folders are read here; download it "
            "first"
        )
