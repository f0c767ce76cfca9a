"""Bytes on disk: writes safetensors files in one hashed pass, and reads them back with checks.

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from config import usable_cores

Job = TypeVar("Job")
Result = TypeVar("Result")
FileEntry = dict[str, int | str]  # in index.json: {bytes, sha256} of meta.json, {bytes, header} of a shard
TensorTable = dict[str, dict[str, Any]]  # a safetensors header: {name: {dtype, shape, data_offsets}, ...}
CHUNK = 4 << 20  # bytes that are hashed and written at a time
LENGTH_BYTES = 8  # at the start of a safetensors file: the length of the header
ALIGNMENT = 8  # bytes; the header is padded to a multiple of this, so that the first tensor is aligned
MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses a longer header
MAX_THREADS = 4
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


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds no NaN and no Inf.

    The least and the greatest element show both, since aminmax propagates NaN: one pass and no copy.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:
        tensor = tensor.float()  # torch cannot compare fp8
    return all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax())


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order.

    Copies only a tensor on a device or one that is not contiguous.
    """
    tensor = tensor.detach().cpu().contiguous()
    # reshape(-1) would keep the odd stride of a dim of size 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def write_shard(
    path: Path, named: list[tuple[str, torch.Tensor]], save_id: str, halfway: Callable[[], object]
) -> tuple[FileEntry, list[str]]:
    """Writes tensors into a new safetensors file and flushes it to disk.

    named: [(name in the file, tensor)]. halfway: called when half of the tensors are written.
    One tensor at a time is in host memory.

    Returns ({bytes, header: sha256 of length and header}, [sha256 of each tensor]). The hashes are made in
    the same pass, and together they cover every byte of the file.

    Raises NonFiniteTensor naming the tensor. Does not catch OSError.
    """
    header, data_bytes = shard_header(named, save_id)
    checksums: list[str] = []
    with open(path, "xb") as file:
        file.write(header)
        for position, (name, tensor) in enumerate(named):
            if position == len(named) // 2:
                file.flush()
                halfway()
            tensor = tensor.detach().cpu()
            if not is_finite(tensor):
                raise NonFiniteTensor(f"{name}: holds NaN or Inf; this checkpoint is not written")
            checksums.append(write_hashed(file, raw_bytes(tensor)))
        file.flush()
        os.fsync(file.fileno())

    entry: FileEntry = {"bytes": len(header) + data_bytes, "header": hashlib.sha256(header).hexdigest()}
    return entry, checksums


def shard_header(named: list[tuple[str, torch.Tensor]], save_id: str) -> tuple[bytes, int]:
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


def write_hashed(file: BinaryIO, data: memoryview) -> str:
    """Writes the bytes chunk by chunk. Returns their sha256."""
    digest = hashlib.sha256()
    for start in range(0, len(data), CHUNK):
        chunk = data[start:start + CHUNK]
        file.write(chunk)
        digest.update(chunk)
    return digest.hexdigest()


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


def read_file(path: Path) -> bytes:
    """All bytes of a small file. Raises IntegrityError."""
    with open_shard(path) as fd:
        return b"".join(iter(lambda: os.read(fd, CHUNK), b""))


def read_header(fd: int, path: Path) -> tuple[bytes, TensorTable]:
    """(length and header as stored, header parsed) of a safetensors file.

    Raises IntegrityError naming `path`.
    """
    prefix = os.pread(fd, LENGTH_BYTES, 0)
    length = int.from_bytes(prefix, "little")
    available = os.fstat(fd).st_size - LENGTH_BYTES
    if len(prefix) < LENGTH_BYTES or length > min(MAX_HEADER, available):
        raise IntegrityError(f"{path}: truncated, or not a safetensors file")

    text = os.pread(fd, length, LENGTH_BYTES)
    try:
        table = json.loads(text)
        if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
            raise ValueError("not a table of tensors")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: damaged safetensors header ({error})") from None
    return prefix + text, table


def sha256_range(fd: int, start: int, size: int) -> str:
    """sha256 of the bytes [start, start + size).

    It reads the file and does not map it: then a disk that fails raises OSError, and does not kill with
    SIGBUS.
    """
    digest = hashlib.sha256()
    offset = start
    end = start + size
    while offset < end:
        data = os.pread(fd, min(CHUNK, end - offset), offset)
        if not data:  # the file ends here: the sum will not match
            break
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()


def run_in_threads(work: Callable[[Job], Result], jobs: list[Job]) -> list[Result]:
    """[work(job) for each job], in a few threads: hashing and reading release the GIL.

    Raises the first error.
    """
    if len(jobs) < 2:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(min(MAX_THREADS, len(jobs), usable_cores())) as pool:
        return list(pool.map(work, jobs))
