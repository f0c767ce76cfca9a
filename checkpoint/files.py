"""Bytes on disk: safetensors files written in one hashed pass and read back checked. Knows no steps and no index.

A shard is a safetensors file (8-byte little-endian header length, JSON header, tensors back to back), so anyone can
read it; we write and read it ourselves to hash each byte exactly once while it streams by, and to open nothing but
regular files. Every write reaches the disk (fsync) before its function returns. No pickle anywhere.
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

import torch

CHUNK = 4 << 20  # bytes hashed and written at a time
MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses more
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
          torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
TORCH = {name: dtype for dtype, name in DTYPES.items()}


class IntegrityError(RuntimeError):
    """What is on disk is not what was written: names file and difference. Exit code 79 if no good one is left."""
    exit_code = 79


class NonFinite(ArithmeticError):
    """A tensor to be saved holds NaN or Inf; nothing is committed. Names the key."""
    exit_code = 77


class StorageError(RuntimeError):
    """The disk failed or is full: StorageError(path, bytes that were to be written, why). Exit code 82."""
    exit_code = 82

    def __init__(self, path: Path | str, needed: int, why: str):
        super().__init__(str(path), needed, why)  # all three are args, so that it survives pickling between ranks
        self.path, self.needed, self.why = Path(path), needed, why

    def __str__(self) -> str:
        return f"{self.path}: cannot write{f' {self.needed:,} bytes' if self.needed else ''}: {self.why}"


@contextlib.contextmanager
def storing(path: Path, needed: int) -> Iterator[None]:
    """Turns every OSError inside (ENOSPC, EIO, EROFS, EDQUOT, EFBIG, a folder that vanished) into a StorageError."""
    try:
        yield
    except OSError as e:
        name = errno.errorcode.get(e.errno, "OSError")
        raise StorageError(e.filename or path, needed, f"{e.strerror or e} ({name})") from e


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns every OSError inside (missing, unreadable, a symlink) into an IntegrityError naming the file."""
    try:
        yield
    except OSError as e:
        why = "is a symbolic link" if e.errno == errno.ELOOP else e.strerror or str(e)
        raise IntegrityError(f"{path}: {why[0].lower()}{why[1:]}") from e


# ---- writing ---------------------------------------------------------------------------------------------------------

def sync_dir(path: Path) -> None:
    """A rename or a new name is on disk only once its folder is."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> dict:
    """A new file with these bytes, flushed to disk. Returns {bytes, sha256}."""
    with open(path, "xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def remove(path: Path) -> None:
    """A file, link or folder is gone afterwards, whatever it was. Never raises: what stays is removed next time."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def finite(tensor: torch.Tensor) -> bool:
    """No NaN and no Inf: least and greatest show both (aminmax propagates NaN), in one pass and with no copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # fp8 cannot be compared
    return all(bool(torch.isfinite(x)) for x in tensor.aminmax())


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; copies only what is elsewhere or not contiguous."""
    tensor = tensor.detach().cpu().contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))  # reshape(-1) would keep the odd stride of a dim of size 1
    return memoryview(flat.view(torch.uint8).numpy())


def write_shard(path: Path, named: list[tuple[str, torch.Tensor]], save_id: str,
                halfway: Callable[[], None]) -> tuple[dict, list[str]]:
    """Streams tensors into one new safetensors file and flushes it; hashes in the same pass, one tensor at a time.

    Returns ({bytes, header: sha256 of length and header}, [sha256 of each tensor]): together they cover every byte.
    `halfway` is called when half of the tensors are written. Raises NonFinite naming the tensor; OSError as it comes.
    """
    table, end = {"__metadata__": {"format": "pt", "save_id": save_id}}, 0
    for name, t in named:
        begin, end = end, end + t.numel() * t.element_size()
        table[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # the first tensor starts aligned
    head = len(text).to_bytes(8, "little") + text
    sums = []
    with open(path, "xb") as f:
        f.write(head)
        for i, (name, t) in enumerate(named):
            if i == len(named) // 2:
                f.flush()
                halfway()
            t = t.detach().cpu()
            if not finite(t):
                raise NonFinite(f"{name}: holds NaN or Inf; this checkpoint is not written")
            data, digest = raw(t), hashlib.sha256()
            for a in range(0, len(data), CHUNK):
                f.write(data[a:a + CHUNK])
                digest.update(data[a:a + CHUNK])
            sums.append(digest.hexdigest())
        f.flush()
        os.fsync(f.fileno())
    return {"bytes": len(head) + end, "header": hashlib.sha256(head).hexdigest()}, sums


# ---- reading ---------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file: no symbolic link is followed, no pipe waited for. Raises IntegrityError."""
    with reading(path):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise IntegrityError(f"{path}: not a regular file")
        with reading(path):
            yield fd
    finally:
        os.close(fd)


def read_file(path: Path) -> bytes:
    """All bytes of a small file. Raises IntegrityError."""
    with opened(path) as fd:
        return b"".join(iter(lambda: os.read(fd, CHUNK), b""))


def read_header(fd: int, path: Path) -> tuple[bytes, dict]:
    """(length and header as stored, header parsed) of a safetensors file. Raises IntegrityError."""
    head = os.pread(fd, 8, 0)
    n = int.from_bytes(head, "little")
    if len(head) < 8 or n > min(MAX_HEADER, os.fstat(fd).st_size - 8):
        raise IntegrityError(f"{path}: truncated, or not a safetensors file")
    text = os.pread(fd, n, 8)
    try:
        table = json.loads(text)
        if not isinstance(table, dict) or not all(isinstance(v, dict) for v in table.values()):
            raise ValueError("not a table of tensors")
    except (ValueError, RecursionError) as e:
        raise IntegrityError(f"{path}: damaged safetensors header ({e})") from None
    return head + text, table


def sha256_range(fd: int, start: int, size: int) -> str:
    """Of bytes start..start+size. By read and not by mmap: a failing disk is then an OSError, not a SIGBUS."""
    digest, at, end = hashlib.sha256(), start, start + size
    while at < end and (data := os.pread(fd, min(CHUNK, end - at), at)):
        digest.update(data)
        at += len(data)
    return digest.hexdigest()


def spread(work: Callable, jobs: list) -> list:
    """[work(job)] over a few threads (hashing and reading release the GIL). The first error is raised."""
    if len(jobs) < 2:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(min(4, len(jobs), len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(work, jobs))
