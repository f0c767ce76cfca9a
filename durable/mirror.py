"""Mirror a run's checkpoints to an object store, from which a fresh machine can resume.

    URL/NAME/checkpoints/step_00001000/     its files; index.sha256 is written last
    URL/NAME/checkpoints/step_00001000.keep the mark of a permanent checkpoint
    URL/NAME/config.yaml, metrics.jsonl, inside.jsonl, provenance.jsonl, tokenizer/, patches/

The run folder is authoritative: a checkpoint is committed there first, by checkpoint/disk/store.py, and rank
0 then uploads it. Object stores have no rename. So index.sha256, without which a folder does not count as a
checkpoint, is written once all other files are there with their sizes, and removed before any of them is
replaced or removed:

- A reader never mistakes a partial upload for a checkpoint, whenever the writer or the store dies.
- Older checkpoints are removed only once a newer one is complete, by the rules of the run folder:
  checkpoint.keep, and never a permanent one. Checkpoints later than the run's are left alone.
- Downloads are verified by every checksum, as on a disk, before they get a name in the run folder.

Only one run at a time may write to a place in the store, which has no lock.
"""
import fcntl
import uuid
from pathlib import Path

from checkpoint.disk import store
from checkpoint.disk.files import IntegrityError
from checkpoint.disk.locks import folder_lock
from checkpoint.remote import (
    CHECKPOINTS,
    KEEP,
    MARKER,
    RUN_FILES,
    RUN_FOLDERS,
    complete_steps,
    fetch,
    fetch_run_files,
    split_url,
    steps_in,
)
from config import Config, ConfigError
from data.remote import CHECK, RemoteError, RemoteFolder, in_threads, is_url, open_folder


def open_mirror(cfg: Config) -> RemoteFolder | None:
    """Return this run's place in checkpoint.mirror, or None if unset. Sends nothing. Raises ConfigError."""
    url = cfg.checkpoint.mirror
    if url is None:
        return None
    return open_folder(f"{url.rstrip('/')}/{cfg.log.name}", "checkpoint.mirror")


# ---- upload ------------------------------------------------------------------------------------------------

def check_writable(run: RemoteFolder) -> None:
    """Write and remove a small file. Raises ConfigError in one line if the store is not writable."""
    name = f".probe-{uuid.uuid4().hex}"
    try:
        run.write(name, name.encode())
        run.remove([name])
    except RemoteError as error:
        raise ConfigError(
            f"checkpoint.mirror: {run.url} cannot be written to: {error}; {CHECK}, or leave it out"
        ) from error


def update(run: RemoteFolder, folder: Path, keep: int) -> None:
    """Upload the newest checkpoint and permanent ones that the store lacks, then purge older ones there.

    Keeps permanent ones and the `keep` newest. Safe to retry after any failure. Raises RemoteError, or
    OSError of the local disk.
    """
    committed = store.committed_checkpoints(folder / CHECKPOINTS)
    if not committed:
        return
    checkpoints = run.folder(CHECKPOINTS)
    complete = complete_steps(checkpoints)
    send_run_files(run, folder)
    newest = committed[0][0]
    for step, path in committed:
        if step == newest or store.marker_path(path).exists():
            send(checkpoints, path, complete.get(step))
    remove_older(checkpoints, newest, keep)


def send_run_files(run: RemoteFolder, folder: Path) -> None:
    """Upload the files needed to read a checkpoint, and the metrics so far."""
    inner = [path for name in RUN_FOLDERS for path in sorted((folder / name).rglob("*"))]
    for path in (*(folder / name for name in RUN_FILES), *inner):
        if path.is_file():
            run.write(path.relative_to(folder).as_posix(), path.read_bytes())


def send(checkpoints: RemoteFolder, path: Path, there: bytes | None) -> None:
    """Upload a committed checkpoint. `there` is the index.sha256 that the store already has for this step."""
    with folder_lock(path, fcntl.LOCK_SH):  # prevents a purge
        if not (path / MARKER).exists():  # already purged
            return
        marker = (path / MARKER).read_bytes()
        mark = store.marker_path(path)
        if mark.exists():
            checkpoints.write(mark.name, mark.read_bytes())
        if there == marker:
            return
        target = checkpoints.folder(path.name)
        if there is not None:
            target.remove([MARKER])
        files = sorted(file for file in path.iterdir() if file.name != MARKER)
        in_threads(lambda file: target.upload(file, file.name), files)
        target.write(MARKER, marker)


def remove_older(checkpoints: RemoteFolder, newest: int, keep: int) -> None:
    """Purge like store.purge_older on disk, and remove partial uploads that were never completed."""
    names = checkpoints.names()
    complete = complete_steps(checkpoints)
    earlier = [step for step in complete if step < newest]
    released = [step for step in earlier if f"step_{step:08d}{KEEP}" not in names]
    kept = {*earlier[:max(keep, 1) - 1]}
    for step, name in steps_in(checkpoints).items():
        is_part = step not in complete
        if step < newest and (is_part or (step in released and step not in kept)):
            remove_checkpoint(checkpoints.folder(name))


def remove_checkpoint(target: RemoteFolder) -> None:
    """Remove a checkpoint, its marker first, so that the rest does not count as a checkpoint."""
    names = target.names()
    target.remove([name for name in names if name == MARKER])
    target.remove([name for name in names if name != MARKER])
    target.remove_empty()


# ---- download ----------------------------------------------------------------------------------------------

def restore(run: RemoteFolder, folder: Path) -> list[str]:
    """Download the newest good checkpoint if the run folder has none or an older one.

    The caller holds the run lock. Returns notes for the log. Raises RemoteError or StorageError.
    """
    root = folder / CHECKPOINTS
    notes: list[str] = []
    own = newest_local(root)
    checkpoints = run.folder(CHECKPOINTS)
    for step, marker in complete_steps(checkpoints).items():
        if step <= own:
            break
        try:
            path = fetch(checkpoints, step, marker, root)
        except IntegrityError as error:
            notes.append(f"checkpoint {step} of {run.url} is rejected: {error}")
            continue
        fetch_run_files(run, folder)
        notes.append(f"restored {path.name} from {checkpoints.url}")
        break
    return notes


def newest_local(root: Path) -> int:
    """Return the step of the newest checkpoint that looks good, or -1."""
    try:
        path = store.newest_checkpoint(root, check=store.quick_check)
    except IntegrityError:
        return -1
    return -1 if path is None else store.step_of(path)


def prepare(cfg: Config, folder: Path) -> list[str]:
    """Check on rank 0, before any work, that checkpoint.mirror is writable, and restore the run folder from
    it.

    Returns notes for the log. Raises ConfigError or StorageError.
    """
    run = open_mirror(cfg)
    if run is None:
        return []
    check_writable(run)
    try:
        if cfg.checkpoint.resume == "none" and complete_steps(run.folder(CHECKPOINTS)):
            raise ConfigError(
                f"checkpoint.resume: none, but {run.url} holds checkpoints; choose another --log.name, or "
                "remove them there"
            )
        return [f"{'mirror':<9}{run.url}", *restore(run, folder)]
    except RemoteError as error:
        raise ConfigError(f"checkpoint.mirror: {run.url} cannot be read: {error}") from error


def copied_from(cfg: Config, path: Path, root: Path) -> RemoteFolder | None:
    """Return where a store holds a local checkpoint too, or None.

    For the run's own checkpoint (below root) that is checkpoint.mirror, for a copy the place it was
    downloaded from. Raises ConfigError.
    """
    if path.parent == root:
        run = open_mirror(cfg)
        return None if run is None else run.folder(CHECKPOINTS).folder(path.name)
    for key in ("resume", "init_from"):
        url = getattr(cfg.checkpoint, key)
        if url is not None and is_url(url):
            run = open_folder(split_url(url)[0], f"checkpoint.{key}")
            return run.folder(CHECKPOINTS).folder(path.name)
    return None


