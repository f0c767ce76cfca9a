"""Bytes on disk: write safetensors files in one hashed pass, and read them with checks.

This file knows nothing of steps or the index. A shard is a safetensors file (8-byte little-endian header
length, JSON header, tensors back to back), so other tools can read it. We read and write it without the
library for two reasons: each byte is hashed exactly once while it is copied, and only regular files are ever
opened. Every write is flushed (fsync) before its function returns. Nothing is pickled.

Source of the format: https://github.com/huggingface/safetensors, "Format".
"""
import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from config import ConfigError, usable_cores

try:
    import xxhash
except ImportError:  # if it cannot be installed: fall back to sha256, which is slower
    xxhash = None

Job = TypeVar("Job")
Result = TypeVar("Result")
# in index.json: {bytes, sha256} of meta.json, {bytes, header} of a shard, plus save_id if linked
FileEntry = dict[str, int | str]
Named = list[tuple[str, torch.Tensor]]  # [(name in a shard, tensor)]
TensorTable = dict[str, dict[str, Any]]  # a safetensors header: {name: {dtype, shape, data_offsets}, ...}
CHUNK = 1 << 20  # bytes hashed and written at a time: they stay in a core's cache
LENGTH_BYTES = 8  # length of the header, at the start of a safetensors file
ALIGNMENT = 8  # bytes; the header is padded to a multiple of this to align the first tensor
MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses longer headers
MAX_THREADS = 8  # for reading or writing
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH = {name: dtype for dtype, name in DTYPES.items()}
# Digests of stored tensors, by their name in the index. They detect damage; they do not authenticate.
DIGESTS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256}
if xxhash is not None:
    DIGESTS["xxh3_128"] = xxhash.xxh3_128
WRITTEN_DIGEST = [*DIGESTS][-1]
MIN_NON_FINITE: dict[torch.dtype, tuple[Any, int]] = {  # dtype: (integer type, its first non-finite value)
    torch.float64: (np.uint64, 0x7FF0_0000_0000_0000),
    torch.float32: (np.uint32, 0x7F80_0000),
    torch.float16: (np.uint16, 0x7C00),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float8_e4m3fn: (np.uint8, 0x7F),
    torch.float8_e5m2: (np.uint8, 0x7C),
}
SIGNED: dict[Any, Any] = {np.uint8: np.int8, np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64}


# ---- errors ------------------------------------------------------------------------------------------------

class IntegrityError(RuntimeError):
    """The disk does not hold what was written. The message names the file and the difference.

    Exit code 79 if no good checkpoint is left.
    """
    exit_code = 79


class NonFiniteTensor(ArithmeticError):
    """A tensor to be saved has NaN or Inf.

    The message names its key. Nothing is committed. Exit code 77.
    """
    exit_code = 77


class StorageError(RuntimeError):
    """The disk fails or is full. Exit code 82.

    `path` is the file or folder, `needed` the bytes to write (0 if unknown), `why` the reason.
    """
    exit_code = 82

    def __init__(self, path: Path | str, needed: int, why: str) -> None:
        super().__init__(str(path), needed, why)  # makes errors of different ranks equal
        self.path = Path(path)
        self.needed = needed
        self.why = why

    def __str__(self) -> str:
        size = f" {self.needed:,} bytes" if self.needed else ""
        return f"{self.path}: cannot read or write{size}: {self.why}"


@contextlib.contextmanager
def storage_errors(path: Path, needed: int) -> Iterator[None]:
    """Convert every OSError inside into a StorageError.

    For example ENOSPC, EIO, EROFS, EDQUOT, EFBIG, or a folder that vanished.
    """
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "OSError")
        raise StorageError(error.filename or path, needed, f"{error.strerror or error} ({name})") from error


@contextlib.contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Convert every OSError inside into an IntegrityError that names the file.

    The file is missing, unreadable or a symbolic link. Running out of file descriptors says nothing about the
    file, so that is a StorageError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise StorageError(path, 0, f"{error.strerror}; raise the limit (ulimit -n)") from error
        if error.errno == errno.ELOOP:
            why = "is a symbolic link"
        else:
            why = error.strerror or str(error)
        raise IntegrityError(f"{path}: {why[0].lower()}{why[1:]}") from error


# ---- writing -----------------------------------------------------------------------------------------------

def sync_dir(path: Path) -> None:
    """Flush a folder to disk. A rename or a new name is not durable before that."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> FileEntry:
    """Create a file with these bytes and flush it to disk. Returns {bytes, sha256}."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def remove(path: Path) -> None:
    """Remove a file, a link or a folder.

    Never raises: the next cleanup retries whatever cannot be removed now.
    """
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def is_finite(values: np.ndarray, dtype: torch.dtype) -> bool:
    """Return whether numbers of this dtype, given as bytes, have no NaN and no Inf.

    Interpreted as an integer, a non-finite number is at least as large as the Inf of its sign (fp8 e4m3: as
    its only NaN). The signed maximum is the largest positive number; the unsigned maximum is a negative
    number, if there are any. Two passes without temporaries, in one thread, so that no core is taken from
    training.
    """
    if dtype not in MIN_NON_FINITE or not values.size:
        return True
    unsigned, least = MIN_NON_FINITE[dtype]
    bits = values.view(unsigned)
    sign_bit = (np.iinfo(unsigned).max >> 1) + 1
    largest_positive = bits.view(SIGNED[unsigned]).max()
    return bool(largest_positive < least and bits.max() < sign_bit + least)


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor in row-major order, as uint8.

    Copies only if the tensor is on a device or not contiguous.
    """
    tensor = tensor.detach().cpu().contiguous()
    # reshape(-1) would keep the odd stride of a dim of size 1
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def write_shard(
    path: Path,
    named: Named,
    save_id: str,
    halfway: Callable[[], object],
    read: Callable[[int], torch.Tensor] | None = None,
) -> tuple[FileEntry, list[str], int]:
    """Write tensors to a new safetensors file, without flushing it.

    `named` is [(name in the file, tensor)]. `halfway` is called when half of the tensors are written. `read`
    returns the values of the tensor at a position, for tensors that have none. One tensor per thread is in
    host memory at a time.

    Returns ({bytes, header: sha256 of length and header}, [checksum of each tensor], open file descriptor).
    Each chunk is checked for NaN, hashed and written while in cache: one pass over the bytes. Together the
    hashes cover every byte of the file.

    Raises NonFiniteTensor naming the tensor. OSError propagates.
    """
    header, data_bytes = shard_header(named, save_id)
    checksums: list[str] = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, header)
        for position, (name, tensor) in enumerate(named):
            if position == len(named) // 2:
                halfway()
            checksums.append(write_hashed(fd, name, tensor if read is None else read(position)))
    except BaseException:
        os.close(fd)
        raise

    entry: FileEntry = {"bytes": len(header) + data_bytes, "header": hashlib.sha256(header).hexdigest()}
    return entry, checksums, fd


def flush(fd: int) -> None:
    """Flush a file to disk and close it."""
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes; a single os.write may write fewer."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def shard_header(named: Named, save_id: str) -> tuple[bytes, int]:
    """Return (length and header of the safetensors file, bytes of the tensors that follow)."""
    table: TensorTable = {"__metadata__": {"format": "pt", "save_id": save_id}}
    end = 0
    for name, tensor in named:
        begin = end
        end += num_bytes(tensor)
        shape = list(tensor.shape)
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    return header_bytes(table), end


def header_bytes(table: TensorTable) -> bytes:
    """Return length and header of a safetensors file, padded with spaces to align the first tensor."""
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_hashed(fd: int, name: str, tensor: torch.Tensor) -> str:
    """Write a tensor chunk by chunk and return its checksum. Raises NonFiniteTensor."""
    digest = DIGESTS[WRITTEN_DIGEST]()
    for chunk in chunks_of(raw_bytes(tensor)):
        if not is_finite(chunk, tensor.dtype):
            raise NonFiniteTensor(f"{name}: holds NaN or Inf; this checkpoint is not written")
        digest.update(chunk.data)
        write_all(fd, chunk.data)
    return checksum_text(WRITTEN_DIGEST, digest)


def chunks_of(data: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the data in pieces of CHUNK bytes."""
    for start in range(0, len(data), CHUNK):
        yield data[start:start + CHUNK]


def matches_bytes(fd: int, start: int, data: np.ndarray) -> bool:
    """Return whether the file has these bytes at `start`."""
    buffer = np.empty(min(CHUNK, len(data)), dtype=np.uint8)
    for chunk in chunks_of(data):
        found = buffer[:len(chunk)]
        if not read_into(fd, start, found) or not np.array_equal(found, chunk):
            return False
        start += len(chunk)
    return True


# ---- reading -----------------------------------------------------------------------------------------------

@contextlib.contextmanager
def open_shard(path: Path) -> Iterator[int]:
    """Open a regular file and yield its descriptor. Does not follow symbolic links or block on a pipe.

    Raises IntegrityError naming the file, also for an OSError inside the with block.
    """
    with reading_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise IntegrityError(f"{path}: not a regular file")
        with reading_errors(path):
            yield fd
    finally:
        os.close(fd)


def drop_page_cache(path: Path) -> bool:
    """Drop a file from the page cache, so that the next read hits the disk. Returns False if unsupported.

    Unflushed bytes stay in memory.
    """
    if not hasattr(os, "posix_fadvise"):  # macOS
        return False
    with open_shard(path) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def read_ahead(fd: int, start: int, size: int) -> None:
    """Prefetch these bytes while others are hashed, if the system can."""
    if hasattr(os, "posix_fadvise"):  # not macOS
        os.posix_fadvise(fd, start, size, os.POSIX_FADV_WILLNEED)


def read_file(path: Path) -> bytes:
    """Return all bytes of a small file. Raises IntegrityError."""
    with open_shard(path) as fd:
        return b"".join(iter(lambda: os.read(fd, CHUNK), b""))


def read_header(fd: int, path: Path, base: int = 0) -> tuple[bytes, TensorTable]:
    """Return (length and header as stored, parsed header) of a safetensors file that begins at byte `base`.

    Raises IntegrityError naming `path`.
    """
    prefix = os.pread(fd, LENGTH_BYTES, base)
    length = int.from_bytes(prefix, "little")
    available = os.fstat(fd).st_size - base - LENGTH_BYTES
    if len(prefix) < LENGTH_BYTES or length > min(MAX_HEADER, available):
        raise IntegrityError(f"{path}: truncated, or not a safetensors file")

    text = os.pread(fd, length, base + LENGTH_BYTES)
    try:
        table = json.loads(text)
        if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
            raise ValueError("not a table of tensors")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: damaged safetensors header ({error})") from None
    return prefix + text, table


def read_into(fd: int, start: int, target: np.ndarray) -> bool:
    """Fill `target` with the file's bytes from `start`. Returns False if the file ends early."""
    view = target.data
    os.lseek(fd, start, os.SEEK_SET)
    while view:
        size = os.readv(fd, [view])
        if not size:
            return False
        view = view[size:]
    return True


def read_hashed(fd: int, start: int, target: np.ndarray, expected: str) -> bool:
    """Fill `target` with the file's bytes from `start`. Returns whether they match the checksum.

    Reads instead of mapping the file, so that a failing disk raises OSError and does not kill the process
    with SIGBUS. Raises ConfigError if this environment cannot compute the checksum.
    """
    name, digest = digest_for(expected)
    read_ahead(fd, start, len(target))
    for chunk in chunks_of(target):
        if not read_into(fd, start, chunk):
            return False
        digest.update(chunk.data)
        start += len(chunk)
    return checksum_text(name, digest) == expected


def matches_checksum(fd: int, start: int, size: int, expected: str) -> bool:
    """Return whether bytes [start, start + size) of the file match the checksum. Raises ConfigError like
    read_hashed."""
    name, digest = digest_for(expected)
    buffer = np.empty(min(CHUNK, size), dtype=np.uint8)
    for first in range(0, size, CHUNK):
        chunk = buffer[:min(CHUNK, size - first)]
        if not read_into(fd, start + first, chunk):
            return False
        digest.update(chunk.data)
    return checksum_text(name, digest) == expected


def digest_for(checksum: str) -> tuple[str, Any]:
    """Return (name, new digest) of the kind that produced this checksum.

    Raises ConfigError if this environment cannot compute it.
    """
    name = checksum.partition(":")[0]
    if name not in DIGESTS:
        raise ConfigError(
            f"a checkpoint has checksums named {name[:20]!r}, which this environment cannot compute; "
            "pip install xxhash"
        )
    return name, DIGESTS[name]()


def checksum_text(name: str, digest: Any) -> str:
    """Format a checksum as in the index."""
    return f"{name}:{digest.hexdigest()}"


def available_bytes() -> int:
    """Return the memory available without swapping, within the limits of this process's cgroups.

    Returns 0 if the system does not say (macOS).
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    rooms = cgroup_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min([*free, *rooms], default=0)


def cgroup_rooms(own: Path, root: Path) -> list[int]:
    """Return the bytes left below the limit of each cgroup (version 2) around this process, or [] without
    limits.

    `own` is the file that names the process's cgroup, `root` the mount point of cgroups.
    """
    try:
        line = own.read_text().splitlines()[-1]
    except (OSError, IndexError):
        return []
    place = root / line.rpartition("::")[2].lstrip("/")
    rooms: list[int] = []
    for folder in (place, *place.parents):
        if not folder.is_relative_to(root):
            break
        with contextlib.suppress(OSError, ValueError):  # unlimited: "max", or no file
            limit = int((folder / "memory.max").read_text())
            rooms.append(max(0, limit - int((folder / "memory.current").read_text())))
    return rooms


def run_in_threads(
    work: Callable[[Job], Result], jobs: Sequence[Job], max_threads: int = MAX_THREADS
) -> list[Result]:
    """Return [work(job) for each job], in a few threads: hashing and reading release the GIL.

    Raises the first error.
    """
    num_threads = min(max_threads, len(jobs), usable_cores())
    if num_threads < 2:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, jobs))
