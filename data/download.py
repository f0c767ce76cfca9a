"""Data in an object store: whole files, downloaded once per node into data.cache, then read like local data.

    s3://bucket/corpora/web  ->  CACHE/s3/bucket/corpora/web.copy/web.bin, .idx, .json, .crc, ...

A run reads its windows in random order, and touches every part of the file within the first thousands of
steps. Ranges fetched on demand would soon add up to the whole file, each with the latency of a request in the
path of a step. Megatron-LM and MosaicML's streaming also put whole files, or whole shards, on the local disk.
The cost is as much disk on each node as the data is long. Nothing is evicted: files that are there are never
fetched again. Remove the folder to free the space.

- One process per node downloads (under a lock), the others wait. A folder is downloaded under a temporary
name
  and renamed, so a copy is either complete or absent.
- Checksums are verified before the rename: .json, .idx, and each block of the .bin and .mask.
- The store is asked once, at startup, whether its files still match the copy.
"""
import contextlib
import fcntl
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from config import Config, ConfigError
from config.reading import get_phases
from data.blend import named_paths
from data.blocks import BLOCK, ChecksumError
from data.indexed import FILE_ENDS, IndexedDataset, sibling_file
from data.remote import CHECK, FileState, RemoteError, RemoteFolder, is_url, open_folder, url_path

TOKENIZER = ".tokenizer"  # suffix of the tokenizer folder next to them
SOURCE = "source.json"  # in a copy: the store's metadata of its files

Files = dict[str, FileState]  # {name in the data set's folder: state}
Copies = dict[str, Files]  # {URL of data.path: the store's metadata at download}


def local_path(path: str, cache: str) -> str:
    """Return where a path of data.path lies on this machine.
    A URL maps to its copy, which need not exist yet."""
    if not is_url(path):
        return path
    place = url_path(common_prefix(path))
    end = ".bin" if path.endswith(".bin") else ""  # a .npy keeps its extension
    return str(Path(cache) / place.parent / f"{place.name}.copy" / f"{place.name}{end}")


def common_prefix(path: str) -> str:
    """Return the common prefix of a data set's files; for a single NumPy .npy, the whole name."""
    return path.rstrip("/").removesuffix(".bin").removesuffix(".idx")


def local_data(path: str, cache: str, key: str = "data.path") -> str:
    """Return local_path, downloading the copy if needed. `key` names the path in messages.

    Raises ConfigError, ChecksumError, OSError.
    """
    if is_url(path) and not copy_folder(path, cache).is_dir():
        download(path, cache, key)
    return local_path(path, cache)


def download_sources(cfg: Config, known: Copies | None = None, after: int = 0) -> Copies:
    """Download the data sets in data.path and data.valid that are in a store and not on this node, for every
    phase of the run that ends after step `after`.

    `known` holds the first rank's metadata. Without it this is the first rank, which asks the store.

    Raises ConfigError if a store cannot be reached, or if a copy differs from the store; ChecksumError;
    OSError.
    """
    copies: Copies = {}
    for phase in get_phases(cfg).from_step(after):
        for key, path in named_paths(phase.cfg.data):
            if is_url(path) and path not in copies:
                cache = cfg.data.cache
                wanted = stored_files(path, key) if known is None else known[path]
                local_data(path, cache, key)
                copies[path] = read_source(copy_folder(path, cache))
                check_same_files(f"{key}: {path}", copy_folder(path, cache), copies[path], wanted)
    return copies


def check_same_files(named: str, folder: Path, copied: Files, wanted: Files) -> None:
    """Raise ConfigError if a copy has other files than `wanted`. `named` is "KEY: URL"."""
    differing = sorted(name for name in {*copied, *wanted} if copied.get(name) != wanted.get(name))
    if differing:
        raise ConfigError(f"{named} has changed in the store since {folder} was downloaded "
                          f"({', '.join(differing)}); remove that folder on every node to download it again")


# ---- the store ---------------------------------------------------------------------------------------------

def open_source(path: str, key: str) -> tuple[RemoteFolder, str]:
    """Return (the folder that holds a data set, the data set's name in it). Raises ConfigError."""
    parent, _, name = common_prefix(path).rpartition("/")
    return open_folder(parent, key), name


def stored_files(path: str, key: str) -> Files:
    """Return the files of a data set in the store. Raises ConfigError if it is unreachable or has none."""
    folder, name = open_source(path, key)
    is_array = name.endswith(".npy")
    possible = [name] if is_array else [f"{name}{end}" for end in FILE_ENDS]
    tokenizer = f"{name.removesuffix('.npy')}{TOKENIZER}"
    try:
        found = {file: folder.state(file) for file in possible}
        inner = folder.folder(tokenizer)
        found |= {f"{tokenizer}/{file}": inner.state(file) for file in inner.files()}
    except RemoteError as error:
        raise ConfigError(f"{key}: {path} cannot be reached: {error}; {CHECK}") from error
    files = {file: state for file, state in found.items() if state is not None}
    prepared = [f"{name}.bin"] if path.endswith(".bin") else [f"{name}.idx", f"{name}.bin"]
    for file in possible if is_array else prepared:
        if file not in files:
            raise ConfigError(f"{key}: {folder.url}/{file}: no such file in the store; name what python -m "
                              "scripts.prepare_data made, without .bin and .idx, or a .bin or .npy of ids")
    return files


# ---- the copy ----------------------------------------------------------------------------------------------

def copy_folder(path: str, cache: str) -> Path:
    """Return the folder for the copy of a URL."""
    return Path(local_path(path, cache)).parent


def read_source(folder: Path) -> Files:
    """Return the recorded store metadata of a copy. Raises ConfigError if the folder is not a copy."""
    try:
        rows = json.loads((folder / SOURCE).read_text())["files"]
        return {name: FileState(**row) for name, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{folder}: is not a copy of data in a store; remove it") from None


def download(path: str, cache: str, key: str) -> None:
    """Download a data set, or wait for the process of this node that does."""
    final = copy_folder(path, cache)
    final.parent.mkdir(parents=True, exist_ok=True)
    with one_process(final.with_name(f".{final.name}.lock")):
        if final.is_dir():
            return
        for left in final.parent.glob(f".{final.name}.tmp-*"):  # of a killed process
            shutil.rmtree(left, ignore_errors=True)
        temp = final.with_name(f".{final.name}.tmp-{uuid.uuid4().hex}")
        try:
            download_files(path, temp, key)
            commit_copy(temp, final)
        finally:
            shutil.rmtree(temp, ignore_errors=True)


def download_files(path: str, temp: Path, key: str) -> None:
    """Download all files of a data set into a new folder and verify them. Raises like download_sources."""
    files = stored_files(path, key)
    folder, name = open_source(path, key)
    temp.mkdir()
    total = sum(state.size for state in files.values())
    free = shutil.disk_usage(temp).free
    if free < total:
        raise ConfigError(f"data.cache: {path} has {total:,} bytes, and {free:,} are free in {temp.parent}; "
                          "free space, or give another data.cache")
    try:
        for file, state in files.items():
            (temp / file).parent.mkdir(parents=True, exist_ok=True)
            folder.download(file, temp / file, state.size)
        changed = stored_files(path, key) != files
    except RemoteError as error:
        raise ConfigError(f"{key}: {path} cannot be downloaded: {error}") from error
    if changed:
        raise ConfigError(f"{key}: {path} was changed while it was downloaded; start again")
    check_copy(path, temp / name, key)
    rows = {file: {"size": state.size, "version": state.version} for file, state in files.items()}
    (temp / SOURCE).write_text(json.dumps({"url": path, "files": rows}, indent=1))


def commit_copy(temp: Path, final: Path) -> None:
    """Rename a copy into place. On a shared folder, a process of another node may have been first."""
    try:
        os.rename(temp, final)
    except OSError:
        if not final.is_dir():
            raise


def check_copy(path: str, prefix: Path, key: str) -> None:
    """Raise ChecksumError or ConfigError naming the URL if a copy is not what was prepared."""
    if not sibling_file(prefix, ".idx").exists():
        return  # a .bin or .npy of ids, without checksums
    try:
        IndexedDataset(prefix)
        for end, crc_end in ((".bin", ".crc"), (".mask", ".mask.crc")):
            if sibling_file(prefix, crc_end).exists():
                check_blocks(sibling_file(prefix, end), sibling_file(prefix, crc_end))
    except ConfigError as error:
        kind = type(error)
        text = str(error).replace(f"{prefix.parent}/", f"{path.rpartition('/')[0]}/")
        raise kind(f"{key}: {path} was downloaded, but is damaged: {text}") from None


def check_blocks(file: Path, crc_file: Path) -> None:
    """Raise ChecksumError naming the block if a file does not match its checksums."""
    expected = np.fromfile(crc_file, "<u4").tolist()
    with open(file, "rb") as content:
        for block, crc in enumerate(expected):
            if zlib.crc32(content.read(BLOCK)) != crc:
                raise ChecksumError(f"{file}: block {block} fails its crc32: upload it again")


@contextlib.contextmanager
def one_process(path: Path) -> Iterator[None]:
    """Hold a per-node lock, waiting for other processes. Without file-system locks, do nothing."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
