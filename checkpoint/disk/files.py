"""Bytes on disk: writes safetensors files in one hashed pass, and reads them with checks.

This file knows nothing of steps or of the index. A shard is a safetensors file (8-byte little-endian header
length, JSON header, tensors back to back), so other tools can read it. It is written and read here, without
the library, for two reasons: each byte is hashed exactly once while it is copied, and nothing but a regular
file is ever opened. Every write reaches the disk (fsync) before its function returns. Nothing is pickled.

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
except ImportError:  # where nothing can be installed: sha256 takes its place, and is slower
    xxhash = None

Job = TypeVar("Job")
Result = TypeVar("Result")
# in index.json: {bytes, sha256} of meta.json, {bytes, header} of a shard, {bytes, header, save_id} if linked
FileEntry = dict[str, int | str]
Named = list[tuple[str, torch.Tensor]]  # [(name in a shard, tensor)]
TensorTable = dict[str, dict[str, Any]]  # a safetensors header: {name: {dtype, shape, data_offsets}, ...}
CHUNK = 1 << 20  # bytes that are hashed and written at a time: they stay in a core's cache meanwhile
LENGTH_BYTES = 8  # at the start of a safetensors file: the length of the header
ALIGNMENT = 8  # bytes; the header is padded to a multiple of this, so that the first tensor is aligned
MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses a longer header
MAX_THREADS = 8  # that read or write
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
# Digests of stored tensors, by the name that the index gives. They find damage; none of them is a signature.
DIGESTS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256}
if xxhash is not None:
    DIGESTS["xxh3_128"] = xxhash.xxh3_128
WRITTEN_DIGEST = [*DIGESTS][-1]
LEAST_NON_FINITE: dict[torch.dtype, tuple[Any, int]] = {  # dtype: integers of its size, Inf among them
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

    Exit code 79, if no good checkpoint is left.
    """
    exit_code = 79


class NonFiniteTensor(ArithmeticError):
    """A tensor to be saved holds NaN or Inf.

    The message names its key. Nothing is committed. Exit code 77.
    """
    exit_code = 77


class StorageError(RuntimeError):
    """The disk fails or is full. Exit code 82.

    path: the file or folder; needed: bytes to be written, 0 if unknown; why: the reason in words.
    """
    exit_code = 82

    def __init__(self, path: Path | str, needed: int, why: str) -> None:
        super().__init__(str(path), needed, why)  # so that the error of another rank is equal
        self.path = Path(path)
        self.needed = needed
        self.why = why

    def __str__(self) -> str:
        size = f" {self.needed:,} bytes" if self.needed else ""
        return f"{self.path}: cannot read or write{size}: {self.why}"


@contextlib.contextmanager
def storage_errors(path: Path, needed: int) -> Iterator[None]:
    """Turns every OSError inside into a StorageError.

    Such are ENOSPC, EIO, EROFS, EDQUOT and EFBIG, and the error of a folder that vanished.
    """
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "OSError")
        raise StorageError(error.filename or path, needed, f"{error.strerror or error} ({name})") from error


@contextlib.contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Turns every OSError inside into an IntegrityError that names the file.

    The file is missing or unreadable, or it is a symbolic link. Where this process or machine has no file
    descriptor left, that says nothing of the file: a StorageError.
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
    """Flushes a folder to disk. A rename or a new name is safe only after that."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> FileEntry:
    """Creates a file with these bytes and flushes it to disk. Returns {bytes, sha256}."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def remove(path: Path) -> None:
    """Removes a file, a link or a folder.

    Never raises: what cannot be removed now is removed the next time.
    """
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def is_finite(values: np.ndarray, dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype, given as bytes, hold no NaN and no Inf.

    Read as an integer, a number that is not finite is at least as large as the Inf of its sign (fp8 e4m3: as
    its only NaN). Read with a sign, the largest is a positive number; read without, a negative one, if there
    is one. Two passes that keep nothing, by one thread, so that it takes no core from training.
    """
    if dtype not in LEAST_NON_FINITE or not values.size:
        return True
    unsigned, least = LEAST_NON_FINITE[dtype]
    bits = values.view(unsigned)
    sign_bit = (np.iinfo(unsigned).max >> 1) + 1
    largest_positive = bits.view(SIGNED[unsigned]).max()
    return bool(largest_positive < least and bits.max() < sign_bit + least)


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor in row-major order, as uint8.

    Copies only a tensor on a device or one that is not contiguous.
    """
    tensor = tensor.detach().cpu().contiguous()
    # reshape(-1) would keep the odd stride of a dim of size 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def write_shard(
    path: Path,
    named: Named,
    save_id: str,
    halfway: Callable[[], object],
    read: Callable[[int], torch.Tensor] | None = None,
) -> tuple[FileEntry, list[str], int]:
    """Writes tensors into a new safetensors file, which is not flushed to disk yet.

    named: [(name in the file, tensor)]. halfway: called when half of the tensors are written. read: the
    tensor at a position with its values, where those of `named` have none.
    One tensor a thread is in host memory at a time.

    Returns ({bytes, header: sha256 of length and header}, [checksum of each tensor], the open descriptor).
    Each chunk is looked at for NaN, hashed and written while it is in the cache: one pass over the bytes. The
    hashes together cover every byte of the file.

    Raises NonFiniteTensor naming the tensor. Does not catch OSError.
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
    """Flushes a file to disk and closes it."""
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all bytes: one call may write less."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def shard_header(named: Named, save_id: str) -> tuple[bytes, int]:
    """(length and header of the safetensors file, bytes of the tensors that follow)."""
    table: TensorTable = {"__metadata__": {"format": "pt", "save_id": save_id}}
    end = 0
    for name, tensor in named:
        begin = end
        end += num_bytes(tensor)
        shape = list(tensor.shape)
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    return header_bytes(table), end


def header_bytes(table: TensorTable) -> bytes:
    """Length and header of a safetensors file, padded with spaces so that the first tensor is aligned."""
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_hashed(fd: int, name: str, tensor: torch.Tensor) -> str:
    """Writes the bytes of a tensor chunk by chunk. Returns their checksum. Raises NonFiniteTensor."""
    digest = DIGESTS[WRITTEN_DIGEST]()
    for chunk in chunks_of(raw_bytes(tensor)):
        if not is_finite(chunk, tensor.dtype):
            raise NonFiniteTensor(f"{name}: holds NaN or Inf; this checkpoint is not written")
        digest.update(chunk.data)
        write_all(fd, chunk.data)
    return checksum_text(WRITTEN_DIGEST, digest)


def chunks_of(data: np.ndarray) -> Iterator[np.ndarray]:
    """The bytes, CHUNK at a time."""
    for start in range(0, len(data), CHUNK):
        yield data[start:start + CHUNK]


def reads_as(fd: int, start: int, data: np.ndarray) -> bool:
    """Whether the file has these bytes from `start` on."""
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
    """Opens a regular file and yields its descriptor. Follows no symbolic link, and does not wait for a pipe.

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


def forget_cached(path: Path) -> bool:
    """Lets the next read of a file come from the disk and not from memory. False: the system cannot.

    Bytes that are not flushed yet stay in memory.
    """
    if not hasattr(os, "posix_fadvise"):  # macOS
        return False
    with open_shard(path) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def read_ahead(fd: int, start: int, size: int) -> None:
    """Lets the system read these bytes while others are hashed, where it can."""
    if hasattr(os, "posix_fadvise"):  # not macOS
        os.posix_fadvise(fd, start, size, os.POSIX_FADV_WILLNEED)


def read_file(path: Path) -> bytes:
    """All bytes of a small file. Raises IntegrityError."""
    with open_shard(path) as fd:
        return b"".join(iter(lambda: os.read(fd, CHUNK), b""))


def read_header(fd: int, path: Path, base: int = 0) -> tuple[bytes, TensorTable]:
    """(length and header as stored, header parsed) of a safetensors file. base: the byte at which it begins.

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
    """Fills `target` with the bytes of the file from `start` on. False: the file ends before."""
    view = target.data
    os.lseek(fd, start, os.SEEK_SET)
    while view:
        size = os.readv(fd, [view])
        if not size:
            return False
        view = view[size:]
    return True


def read_hashed(fd: int, start: int, target: np.ndarray, expected: str) -> bool:
    """Fills `target` with the bytes of the file from `start` on. Returns whether they have this checksum.

    It reads the file and does not map it: then a disk that fails raises OSError, and does not kill with
    SIGBUS. Raises ConfigError for a checksum that cannot be made here.
    """
    name, digest = digest_for(expected)
    read_ahead(fd, start, len(target))
    for chunk in chunks_of(target):
        if not read_into(fd, start, chunk):
            return False
        digest.update(chunk.data)
        start += len(chunk)
    return checksum_text(name, digest) == expected


def range_is(fd: int, start: int, size: int, expected: str) -> bool:
    """Whether the bytes [start, start + size) of the file have this checksum. Raises ConfigError as above."""
    name, digest = digest_for(expected)
    buffer = np.empty(min(CHUNK, size), dtype=np.uint8)
    for first in range(0, size, CHUNK):
        chunk = buffer[:min(CHUNK, size - first)]
        if not read_into(fd, start + first, chunk):
            return False
        digest.update(chunk.data)
    return checksum_text(name, digest) == expected


def digest_for(checksum: str) -> tuple[str, Any]:
    """(name, new digest) of the kind that made this checksum.

    Raises ConfigError if it cannot be made here.
    """
    name = checksum.partition(":")[0]
    if name not in DIGESTS:
        raise ConfigError(
            f"a checkpoint has checksums named {name[:20]!r}, which this environment cannot make; "
            "pip install xxhash"
        )
    return name, DIGESTS[name]()


def checksum_text(name: str, digest: Any) -> str:
    """A checksum as the index holds it."""
    return f"{name}:{digest.hexdigest()}"


def available_bytes() -> int:
    """The memory that can be had without swapping, within the limits of this process' cgroups.

    0 where the system does not say (macOS).
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    rooms = cgroup_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min([*free, *rooms], default=0)


def cgroup_rooms(own: Path, root: Path) -> list[int]:
    """Bytes up to the limit of each cgroup (version 2) around this process; [] without limits.

    own: the file that names the process' cgroup. root: where cgroups are mounted.
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
        with contextlib.suppress(OSError, ValueError):  # no limit: "max", or no file
            limit = int((folder / "memory.max").read_text())
            rooms.append(max(0, limit - int((folder / "memory.current").read_text())))
    return rooms


def run_in_threads(
    work: Callable[[Job], Result], jobs: Sequence[Job], max_threads: int = MAX_THREADS
) -> list[Result]:
    """[work(job) for each job], in a few threads: hashing and reading release the GIL.

    Raises the first error.
    """
    num_threads = min(max_threads, len(jobs), usable_cores())
    if num_threads < 2:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, jobs))
