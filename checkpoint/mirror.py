"""Checkpoints of a run in an object store: a copy of the run folder's, from which a fresh machine goes on.

    URL/NAME/checkpoints/step_00001000/     its files, and index.sha256 as the last of them
    URL/NAME/checkpoints/step_00001000.keep the mark of a permanent checkpoint
    URL/NAME/config.yaml, metrics.jsonl, provenance.jsonl, tokenizer/, patches/

The run folder stays the truth: a checkpoint is committed there first, by checkpoint/disk/store.py, and rank 0
then sends it. A store has no rename. So index.sha256, without which a folder is no checkpoint, is written
when all other files are there with their sizes, and removed before one of them is replaced or removed:

- A reader never takes a part of an upload for a checkpoint, whenever the writer or the store dies.
- Older checkpoints are removed only when a newer one is complete, by the rules of the run folder:
  checkpoint.keep, and never a permanent one. A later one than the run's is left alone.
- What is read back is verified by every checksum, as on a disk, before it gets a name in the run folder.

One run at a time may write to a place in the store: it has no lock there.
"""
import fcntl
import re
import uuid
from collections.abc import Iterable
from pathlib import Path

from checkpoint.disk import store
from checkpoint.disk.files import IntegrityError, remove, storage_errors, sync_dir
from checkpoint.disk.locks import folder_lock, run_lock
from config import Config, ConfigError
from config.provenance import PATCHES, RECORDS_FILE
from remote.files import CHECK, RemoteError, RemoteFolder, in_threads, is_url, open_folder, path_of_url

CHECKPOINTS = "checkpoints"
MARKER = "index.sha256"
KEEP = ".keep"
RUN_FILES = ("config.yaml", "metrics.jsonl", RECORDS_FILE)
RUN_FOLDERS = ("tokenizer", PATCHES)
WHOLE_MARKER = re.compile(rb"[0-9a-f]{64}  index\.json\n")  # some stores show half of what is being written
STEP_FOLDER = re.compile(r"step_(\d{8,})")


def open_mirror(cfg: Config) -> RemoteFolder | None:
    """The place of this run in checkpoint.mirror; None without one. Sends nothing. Raises ConfigError."""
    url = cfg.checkpoint.mirror
    if url is None:
        return None
    return open_folder(f"{url.rstrip('/')}/{cfg.log.name}", "checkpoint.mirror")


# ---- what is there -----------------------------------------------------------------------------------------

def steps_in(checkpoints: RemoteFolder) -> dict[int, str]:
    """{step: the name of its folder}, complete or not, newest first."""
    found: dict[int, str] = {}
    for name in checkpoints.names():
        match = STEP_FOLDER.fullmatch(name)
        if match:
            found[int(match[1])] = name
    return dict(sorted(found.items(), reverse=True))


def complete_steps(checkpoints: RemoteFolder) -> dict[int, bytes]:
    """{step: its index.sha256} of the checkpoints that are complete, newest first."""
    complete: dict[int, bytes] = {}
    for step, name in steps_in(checkpoints).items():
        marker = checkpoints.folder(name).read(MARKER)
        if marker is not None and WHOLE_MARKER.fullmatch(marker):
            complete[step] = marker
    return complete


# ---- to the store ------------------------------------------------------------------------------------------

def check_writable(run: RemoteFolder) -> None:
    """Writes and removes a small file. Raises ConfigError in one line if the store cannot be written to."""
    name = f".probe-{uuid.uuid4().hex}"
    try:
        run.write(name, name.encode())
        run.remove([name])
    except RemoteError as error:
        raise ConfigError(
            f"checkpoint.mirror: {run.url} cannot be written to: {error}; {CHECK}, or leave it out"
        ) from error


def update(run: RemoteFolder, folder: Path, keep: int) -> None:
    """Sends the newest checkpoint of the run folder and permanent ones, where the store lacks them; then
    removes older ones there, all but permanent ones and the `keep` newest.

    May be called again after any failure. Raises RemoteError; OSError of the local disk.
    """
    committed = store.committed_checkpoints(folder / CHECKPOINTS)
    if not committed:
        return
    checkpoints = run.folder(CHECKPOINTS)
    complete = complete_steps(checkpoints)
    send_run_files(run, folder)
    newest = committed[0][0]
    for step, path in committed:
        if step == newest or store.mark_of(path).exists():
            send(checkpoints, path, complete.get(step))
    remove_older(checkpoints, newest, keep)


def send_run_files(run: RemoteFolder, folder: Path) -> None:
    """Sends what a checkpoint is read with, and the metrics so far."""
    inner = [path for name in RUN_FOLDERS for path in sorted((folder / name).rglob("*"))]
    for path in (*(folder / name for name in RUN_FILES), *inner):
        if path.is_file():
            run.write(path.relative_to(folder).as_posix(), path.read_bytes())


def send(checkpoints: RemoteFolder, path: Path, there: bytes | None) -> None:
    """Sends a committed checkpoint. there: the index.sha256 that the store has of this step."""
    with folder_lock(path, fcntl.LOCK_SH):  # it is not purged meanwhile
        if not (path / MARKER).exists():  # purged before
            return
        marker = (path / MARKER).read_bytes()
        mark = store.mark_of(path)
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
    """Removes what store.purge_older removes on a disk, and parts of uploads that were never completed."""
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
    """Removes a checkpoint; its marker first, so that what is left of it is none."""
    names = target.names()
    target.remove([name for name in names if name == MARKER])
    target.remove([name for name in names if name != MARKER])
    target.remove_empty()


# ---- from the store ----------------------------------------------------------------------------------------

def restore(run: RemoteFolder, folder: Path) -> list[str]:
    """Brings the newest good checkpoint of the store into the run folder, if that has none or an older one.

    The caller holds the run's lock. Returns notes for the log. Raises RemoteError; StorageError.
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
    """The step of the newest checkpoint of a root that looks good; -1 without one."""
    try:
        path = store.newest_checkpoint(root, check=store.quick_check)
    except IntegrityError:
        return -1
    return -1 if path is None else store.step_of(path)


def fetch(checkpoints: RemoteFolder, step: int, marker: bytes, root: Path) -> Path:
    """Downloads the checkpoint of a step, verifies it and commits it to the root.

    marker: its index.sha256. Raises IntegrityError if it is damaged; RemoteError; StorageError.
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
                store.mark_of(final).write_bytes(mark)
            store.adopt(temp, final)
        finally:
            remove(temp)
    return final


def fetch_run_files(run: RemoteFolder, folder: Path) -> None:
    """Brings what a checkpoint is read with, and the metrics that lead to it."""
    inner = [f"{place}/{name}" for place in RUN_FOLDERS for name in run.folder(place).files()]
    for name in (*RUN_FILES, *inner):
        data = run.read(name)
        if data is not None:
            with storage_errors(folder / name, len(data)):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)


def prepare(cfg: Config, folder: Path) -> list[str]:
    """Rank 0, before any work: finds out whether checkpoint.mirror can be written to, and restores the run
    folder from it. Returns notes for the log. Raises ConfigError; StorageError.
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


def local_checkpoint(url: str, downloads: Path, asker: str = "checkpoint") -> Path:
    """The local copy of a run or a checkpoint at a URL, below `downloads`; downloaded if it is not there.

    url: of a run (its newest checkpoint), or .../checkpoints/step_00000100.
    Raises ConfigError if there is no checkpoint; IntegrityError if it is damaged.
    """
    run_url, stated = parts_of_url(url)
    run = open_folder(run_url, asker)
    folder = downloads / path_of_url(run_url)
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


def copied_from(cfg: Config, path: Path, root: Path) -> RemoteFolder | None:
    """The place in a store that has a checkpoint of this machine, too: of the run's own (below root), in
    checkpoint.mirror; of a copy, where it was downloaded from. None: there is none. Raises ConfigError.
    """
    if path.parent == root:
        run = open_mirror(cfg)
        return None if run is None else run.folder(CHECKPOINTS).folder(path.name)
    for key in ("resume", "init_from"):
        url = getattr(cfg.checkpoint, key)
        if url is not None and is_url(url):
            run = open_folder(parts_of_url(url)[0], f"checkpoint.{key}")
            return run.folder(CHECKPOINTS).folder(path.name)
    return None


def repair(source: RemoteFolder, path: Path) -> str:
    """Fetches those shards of a checkpoint again that are damaged here. Returns a line that says so.

    source: its place in a store. The caller holds the lock of the run folder around it. Raises IntegrityError
    if the store has not the same checkpoint, whole; RemoteError; StorageError.
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
    """repair() of the local copy of a run or a checkpoint at a URL. Raises as it does, but ConfigError for a
    store that cannot be read."""
    path = local_checkpoint(url, downloads)
    try:
        with run_lock(path.parent.parent):
            run = open_folder(parts_of_url(url)[0], "checkpoint")
            return repair(run.folder(CHECKPOINTS).folder(path.name), path)
    except RemoteError as error:
        raise ConfigError(f"checkpoint: {url} cannot be read: {error}") from error


def parts_of_url(url: str) -> tuple[str, int | None]:
    """(the URL of the run, the step) of the URL of a run or of a checkpoint; of a run the step is None."""
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    match = STEP_FOLDER.fullmatch(name)
    if match is None:
        return url.removesuffix(f"/{CHECKPOINTS}"), None
    return parent.removesuffix(f"/{CHECKPOINTS}"), int(match[1])


def local_place(source: str, downloads: Path) -> Path:
    """A local folder or file as it is; of a URL, where its copy lies."""
    return downloads / path_of_url(source) if is_url(source) else Path(source)


def is_same(path: Path, marker: bytes) -> bool:
    """Whether a local checkpoint has this index.sha256."""
    return (path / MARKER).is_file() and (path / MARKER).read_bytes() == marker


def listed(steps: Iterable[int]) -> str:
    """ " of that step (there are 100, 200)"; "" without any."""
    names = ", ".join(map(str, sorted(steps)))
    return f" of that step (there are {names})" if names else ""


def refuse_url(path: str, asker: str) -> None:
    """Raises ConfigError if a path is a URL, where only folders of this machine are read."""
    if is_url(path):
        raise ConfigError(
            f"{asker}: {path} is in a store, and only a run folder of this machine is read here; download it "
            "first"
        )
