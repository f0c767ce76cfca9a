"""Files in an object store, by URL: s3://bucket/folder, gs://, az://, hf://, and whatever else fsspec speaks.

The only file that imports fsspec. Everything else a store needs (endpoint, region, credentials) comes from
the environment variables and files of its package, and from fsspec's (FSSPEC_S3_ENDPOINT_URL, ...), so no
secret is in a config. Requirements: requirements-stores.txt, or pip install "bevatron[stores]".

A store fails in more ways than a disk. Each request is tried up to TRIES times and then raises one
RemoteError, whatever the package's own exception is. A missing file, or one without read or write permission,
is an answer and not a failure, and is not retried.
"""
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from config import ConfigError

Result = TypeVar("Result")
URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE)
PASSWORD = re.compile(r"[^/@]*:[^/@]*@")  # user:password@host
INSTALL = 'pip install "bevatron[stores]", or pip install -r requirements-stores.txt'
CHECK = "check the address, the network and the credentials of the store"
TRIES = 3  # of each request, on top of the retries of the store's package
FIRST_WAIT = 1.0  # seconds before the second try; doubles with each further try
PART_BYTES = 16 << 20  # per request of a download
MAX_THREADS = 4  # concurrent requests for a file, and files at a time
WITH_FOLDERS = ("file", "local", "webhdfs", "hdfs")  # protocols with real folders, not just name prefixes
VERSIONS = (
    "ETag", "etag", "md5Hash", "content_md5", "oid", "blob_id", "mtime", "modificationTime", "Last-Modified"
)


class RemoteError(RuntimeError):
    """Raised when the store still fails after all tries. One line that names the URL. Exit code 82."""
    exit_code = 82


@dataclass(frozen=True)
class FileState:
    """The size of a file in a store, and a `version` that changes with its content if the store has one."""
    size: int  # bytes
    version: str
    sha256: str = field(default="", compare=False)  # of the content, where the store tells it


def is_url(text: str | None) -> bool:
    """Return whether a path names a store rather than a local file."""
    return text is not None and URL.match(text) is not None


def url_path(url: str) -> Path:
    """Map s3://bucket/a/b to s3/bucket/a/b, the path of a copy below a local folder. Raises ConfigError."""
    match = URL.match(url)
    if match is None:
        raise ConfigError(f"{url}: not a URL such as s3://bucket/folder")
    parts = [part for part in match[2].split("/") if part]
    if not parts or any(part in (".", "..") for part in parts):
        raise ConfigError(f"{url}: must name a place in the store, without . and ..")
    return Path(match[1].lower(), *parts)


@dataclass(frozen=True)
class RemoteFolder:
    """A folder in a store, as opened by open_folder. File names are relative to it.

    All methods raise RemoteError if the store fails.
    """
    url: str
    filesystem: Any  # fsspec.AbstractFileSystem
    path: str  # the folder's path within the filesystem

    def folder(self, name: str) -> "RemoteFolder":
        """Return a subfolder."""
        return RemoteFolder(f"{self.url}/{name}", self.filesystem, f"{self.path}/{name}")

    # ---- reading -------------------------------------------------------------------------------------------

    def state(self, name: str) -> FileState | None:
        """Return the state of a file as the store reports it, or None if the file does not exist."""
        def look() -> FileState | None:
            self.filesystem.invalidate_cache()
            info = self.filesystem.info(f"{self.path}/{name}")
            return file_state(info) if info["type"] == "file" else None

        return self.call(name, look, None)

    def entries(self) -> dict[str, FileState | None]:
        """Return the direct files and folders, {} if the folder does not exist. Folders have no state, nor
        do files whose size a listing does not tell."""
        def look() -> dict[str, FileState | None]:
            self.filesystem.invalidate_cache()
            found = self.filesystem.ls(self.path, detail=True)
            names = [info["name"].rstrip("/").rpartition("/")[2] for info in found]
            is_sized = [info["type"] == "file" and info["size"] is not None for info in found]
            return {
                name: file_state(info) if sized else None for name, info, sized in zip(names, found, is_sized)
            }

        return self.call("", look, {})

    def names(self) -> list[str]:
        """Return the sorted names of the direct files and folders, [] if the folder does not exist."""
        def look() -> list[str]:
            self.filesystem.invalidate_cache()
            found = self.filesystem.ls(self.path, detail=False)
            return sorted({path.rstrip("/").rpartition("/")[2] for path in found} - {""})

        return self.call("", look, [])

    def files(self) -> list[str]:
        """Return the sorted names of all files below, [] if the folder does not exist."""
        def look() -> list[str]:
            self.filesystem.invalidate_cache()
            found = self.filesystem.find(self.path)
            return sorted(path.removeprefix(f"{self.path}/") for path in found)

        return self.call("", look, [])

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        return self.call(name, lambda: self.filesystem.cat_file(f"{self.path}/{name}"), None)

    def download(self, name: str, target: Path, size: int) -> None:
        """Download a file of `size` bytes in parts, after those that the local file already has, and fsync
        it. A server that sends whole files instead of parts sends it once.

        Raises RemoteError if the store has fewer bytes, and OSError if the local disk fails.
        """
        def fetch(start: int) -> bytes:
            stop = min(start + PART_BYTES, size)
            data = self.call(
                name,
                lambda: self.filesystem.cat_file(f"{self.path}/{name}", start=start, end=stop),
                b"",
            )
            if len(data) == size:
                return data[start:]
            if len(data) != stop - start:
                raise RemoteError(f"{self.url}/{name}: bytes {start} to {stop} are not there")
            return data

        with open(target, "ab") as file:
            if file.tell() < size:
                file.write(fetch(file.tell()))
            starts = iter(range(file.tell(), size, PART_BYTES))
            with ThreadPoolExecutor(MAX_THREADS, "store") as pool:
                parts = deque(pool.submit(fetch, start) for start in islice(starts, MAX_THREADS))
                while parts:
                    file.write(parts.popleft().result())
                    parts.extend(pool.submit(fetch, start) for start in islice(starts, 1))
            file.flush()
            os.fsync(file.fileno())

    # ---- writing -------------------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a small file."""
        self.call(name, lambda: self.filesystem.pipe_file(f"{self.path}/{name}", data))

    def upload(self, source: Path, name: str) -> None:
        """Create or replace a file and verify its size in the store. Raises OSError if the disk fails."""
        size = source.stat().st_size
        self.call(name, lambda: self.filesystem.put_file(str(source), f"{self.path}/{name}"))
        stored = self.state(name)
        if stored is None or stored.size != size:
            found = "nothing" if stored is None else f"{stored.size:,} bytes"
            raise RemoteError(f"{self.url}/{name}: {size:,} bytes were sent, and {found} are stored")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files one by one, ignoring those that do not exist."""
        for name in names:
            self.call(name, lambda name=name: self.filesystem.rm_file(f"{self.path}/{name}"), None)

    def remove_empty(self) -> None:
        """Remove the folder itself if it is empty and the store has real folders."""
        if URL.sub(r"\1", self.url) in WITH_FOLDERS and not self.names():
            # not rmdir, which does nothing for webhdfs
            self.call("", lambda: self.filesystem.rm(self.path, recursive=True), None)

    # ---- failing -------------------------------------------------------------------------------------------

    def call(self, name: str, work: Callable[[], Result], absent: Any = ...) -> Any:
        """Call work() and retry if the store fails. Return `absent`, if given, when the file does not exist.

        It catches Exception because the exceptions of fsspec's packages share no base class.
        """
        place = f"{self.url}/{name}" if name else self.url
        wait = FIRST_WAIT
        for number in range(1, TRIES + 1):
            try:
                return work()
            except FileNotFoundError as error:
                if absent is not ...:
                    return absent
                raise RemoteError(f"{place}: no such place in the store ({get_reason(error)})") from error
            except (PermissionError, RemoteError) as error:
                raise as_remote_error(place, error) from error
            except Exception as error:
                if number == TRIES:
                    raise as_remote_error(place, error) from error
            time.sleep(wait)
            wait *= 2
        raise AssertionError("unreachable")


def file_state(info: dict[str, Any]) -> FileState:
    """Return what a store tells of a file."""
    version = next((str(info[key]) for key in VERSIONS if info.get(key) is not None), "")
    large_file = info.get("lfs") or {}
    return FileState(int(info["size"]), version, large_file.get("sha256", ""))


def as_remote_error(place: str, error: Exception) -> RemoteError:
    if isinstance(error, RemoteError):
        return error
    return RemoteError(f"{place}: the store failed: {get_reason(error)}")


def get_reason(error: Exception) -> str:
    """Return the class and the first words of another package's error, on one line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_threads(work: Callable[[Any], object], jobs: Iterable[Any]) -> None:
    """Call work(job) for each job in a few threads. Raises the first error."""
    with ThreadPoolExecutor(MAX_THREADS, "store") as pool:
        for _ in pool.map(work, jobs):
            pass


# ---- opening -----------------------------------------------------------------------------------------------

def open_folder(url: str, key: str) -> RemoteFolder:
    """Return the folder that a URL names, without contacting the store.

    `key` is the config key to name in messages. Raises ConfigError if the URL contains a password, or if the
    package for its protocol is not installed.
    """
    protocol = str(url_path(url).parts[0])
    if PASSWORD.match(url.partition("://")[2]):
        raise ConfigError(
            f"{key}: a password must not be in a URL, which the run writes into its files; give it in the "
            "environment of the store's package (docs/checkpoints.md)"
        )
    options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
    try:
        import fsspec  # only runs that name a store need it, and the package of its protocol

        filesystem, path = fsspec.url_to_fs(url.rstrip("/"), **options)
    except ImportError as error:
        raise ConfigError(f"{key}: {url}: {one_line(error)}; {INSTALL}") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {url}: {one_line(error)}; write it like s3://bucket/folder") from None
    except Exception as error:  # some packages connect immediately
        raise ConfigError(f"{key}: {url} cannot be reached: {get_reason(error)}; {CHECK}") from error
    return RemoteFolder(url.rstrip("/"), filesystem, path.rstrip("/"))


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
