"""Tensors of another system by name: metadata without reading data, and boxes on demand.

Every reader of foreign checkpoints returns NamedTensors: open_safetensors_folder here, pickled.py
(torch.save), dcp.py (torch.distributed.checkpoint) and quantized.py, which reads through one of these.

A read takes the memory of the box plus MAX_READ bytes. Files are read in ranges instead of mapped, so that a
failing disk raises OSError and does not kill the process with SIGBUS. No file is open between reads.
"""
import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from checkpoint.disk.files import TORCH, IntegrityError, read_header, read_into
from config import ConfigError
from parallel.sharding.boxes import Box, Slices

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_READ = 1 << 22  # bytes read in one call, and held in addition to the target
SMALL_READ = 1 << 16  # bytes up to which a read may have any gaps
MAX_WASTE = 4  # maximum of bytes read / bytes needed in a larger read
SAFETENSORS_DTYPES = {
    **TORCH,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a tensor, available without reading it."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class NamedTensors:
    """Tensors by name in a file or a folder.

    `objects` names stored items that are not tensors; they are listed but not read.
    """
    where: Path
    tensors: dict[str, TensorInfo]
    read_box: Callable[[Box], Tensor]  # box.key is the name
    objects: tuple[str, ...] = ()

    def read(self, name: str, box: Slices | None = None) -> Tensor:
        """Read a box of a tensor into contiguous host memory. `box` has one slice per dim and defaults to
        everything.

        Raises ConfigError naming the file that cannot be read, or ValueError for a box that is not inside.
        """
        shape = self.tensors[name].shape
        return self.read_box(Box.whole(name, shape) if box is None else box_from_slices(name, shape, box))


def box_from_slices(name: str, shape: tuple[int, ...], slices: Slices) -> Box:
    """Return the box that slices cover. Raises ValueError unless they lie inside the tensor, without
    steps."""
    if len(slices) != len(shape):
        raise ValueError(f"{name}: {len(slices)} slices of a tensor of shape {shape}")
    start: list[int] = []
    size: list[int] = []
    for one, extent in zip(slices, shape):
        first = 0 if one.start is None else one.start
        end = extent if one.stop is None else one.stop
        if one.step not in (None, 1) or not 0 <= first <= end <= extent:
            raise ValueError(f"{name}: {one} does not lie inside a dim of {extent}")
        start.append(first)
        size.append(end - first)
    return Box(name, shape, tuple(start), tuple(size))


def one_line(text: str, longest: int = 200) -> str:
    """Escape a text from a file for an error message, so that it is one line."""
    return text.encode("unicode_escape").decode()[:longest]


# ---- a tensor in a file ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class StoredTensor:
    """A tensor stored in one file."""
    file: Path
    start: int  # byte offset of its first element
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    dtype: torch.dtype

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, self.dtype)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[dim + 1:]) for dim in range(len(shape)))


def read_stored(stored: StoredTensor, box: Box) -> Tensor:
    """Read a box of a stored tensor. Raises ConfigError naming the file."""
    target = torch.empty(box.size, dtype=stored.dtype)
    fill_from(stored, box, target)
    return target


def fill_from(stored: StoredTensor, box: Box, target: Tensor) -> None:
    """Read a box of a stored tensor into `target`, a tensor or view of box.size."""
    steps = [start * stride for start, stride in zip(box.start, stored.stride)]
    with open_regular(stored.file) as fd:
        fill(target, fd, stored, stored.start + sum(steps) * stored.dtype.itemsize)


def fill(target: Tensor, fd: int, stored: StoredTensor, start: int) -> None:
    """Read elements from byte `start`, with the strides of `stored`, into `target`.

    Reads at once if that needs few bytes or wastes few; otherwise splits along the dim with the largest
    stride.
    """
    if not target.numel():
        return
    span = 1 + sum((size - 1) * stride for size, stride in zip(target.shape, stored.stride))  # elements
    num_bytes = span * stored.dtype.itemsize
    if num_bytes <= SMALL_READ or (num_bytes <= MAX_READ and span <= MAX_WASTE * target.numel()):
        data = np.empty(num_bytes, dtype=np.uint8)
        if not read_into(fd, start, data):
            raise ConfigError(f"{stored.file}: truncated; copy it again")
        target.copy_(torch.from_numpy(data).view(stored.dtype).as_strided(target.shape, stored.stride))
        return

    strides = [stride if size > 1 else -1 for size, stride in zip(target.shape, stored.stride)]
    dim = strides.index(max(strides))
    half = target.shape[dim] // 2
    rest = start + half * stored.stride[dim] * stored.dtype.itemsize
    fill(target.narrow(dim, 0, half), fd, stored, start)
    fill(target.narrow(dim, half, target.shape[dim] - half), fd, stored, rest)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file and yield its descriptor. Follows links (hub caches are full of them), and does not
    block on a pipe.

    Raises ConfigError naming the file, also for an OSError inside the with block.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{path}: not a regular file")
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


# ---- safetensors -------------------------------------------------------------------------------------------

Table = dict[str, StoredTensor]


def open_safetensors_folder(folder: Path) -> NamedTensors:
    """Open the tensors of a Hugging Face folder: model.safetensors, or the files that an index names.

    Reads only the headers. Raises ConfigError naming the file.
    """
    folder = Path(folder)
    tables = [(file, safetensors_table(file)) for file in weight_files(folder)]
    table = join_tables(tables)

    index = folder / INDEX_NAME
    if index.exists() and not (folder / SINGLE_NAME).exists():
        for name, file_name in read_weight_map(index).items():
            if name not in table or table[name].file.name != file_name:
                raise ConfigError(f"{index}: names {file_name!r} for {one_line(name)}, which is not in it")
    return named_tensors(folder, table)


def named_tensors(where: Path, table: Table, objects: Iterable[str] = ()) -> NamedTensors:
    """Return NamedTensors for a table of stored tensors."""
    tensors = {name: stored.info for name, stored in table.items()}
    return NamedTensors(where, tensors, lambda box: read_stored(table[box.key], box), tuple(objects))


def join_tables(tables: Iterable[tuple[Path, Table]]) -> Table:
    """Merge the tensors of several files. Raises ConfigError if a name occurs twice."""
    joined: Table = {}
    for file, table in tables:
        for name, stored in table.items():
            if name in joined:
                raise ConfigError(f"{file}: {one_line(name)} stands in {joined[name].file.name} already")
            joined[name] = stored
    return joined


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder.

    Raises ConfigError if there are none, or if their index is damaged or names a missing file.
    """
    single = folder / SINGLE_NAME
    index = folder / INDEX_NAME
    if single.exists():
        return [single]
    if not index.exists():
        hint = ""
        if any(folder.glob("pytorch_model*.bin")):
            hint = "; pickled weights (pytorch_model.bin) are never opened: save them again as safetensors"
        raise ConfigError(f"{folder}: holds no {SINGLE_NAME} and no {INDEX_NAME}{hint}")

    files = [folder / name for name in sorted(set(read_weight_map(index).values()))]
    for file in files:
        if not file.exists():
            raise ConfigError(f"{file}: missing, though the index names it; download it again")
    return files


def read_weight_map(index: Path) -> dict[str, str]:
    """Return {tensor: file name} from an index of safetensors files. Raises ConfigError naming it."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = list(weight_map.values())
        if not names or any(not name or Path(name).name != name for name in names):
            raise ValueError("a weight_map of plain file names is expected")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{index}: not an index of safetensors ({why})") from None
    return weight_map


def safetensors_table(file: Path, base: int = 0) -> Table:
    """Return the tensors of a safetensors file that begins at byte `base`, from its header.

    Raises ConfigError naming the file, also if its tensors do not fill it exactly.
    """
    with open_regular(file) as fd:
        try:
            header, entries = read_header(fd, file, base)
        except IntegrityError as error:
            raise ConfigError(f"{error}; download it again") from None
        begin = base + len(header)
        available = os.fstat(fd).st_size - begin

    table: Table = {}
    ranges: list[tuple[int, int]] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        where = f"{file}: {one_line(name)}"
        try:
            dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, first, end]
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{where}: damaged safetensors header; download it again") from None
        if dtype not in SAFETENSORS_DTYPES:
            known = ", ".join(SAFETENSORS_DTYPES)
            raise ConfigError(f"{where} has dtype {dtype!r}; these are read: {known}")
        stored = StoredTensor(
            file, begin + first, tuple(shape), row_major(shape), dtype=SAFETENSORS_DTYPES[dtype]
        )
        if end - first != prod(shape) * stored.dtype.itemsize:
            raise ConfigError(f"{where}: {end - first} bytes for shape {shape} of {dtype}")
        table[name] = stored
        ranges.append((first, end))

    position = 0
    for first, end in sorted(ranges):
        if first != position:
            raise ConfigError(f"{file}: its tensors leave a gap or overlap at byte {begin + first}")
        position = end
    if position != available:
        what = "truncated" if position > available else "longer than its tensors"
        raise ConfigError(f"{file}: {what} ({available:,} bytes for {position:,}); download it again")
    return table
