"""One committed checkpoint folder: its contents and their verification.

    index.sha256    checksum of index.json, in sha256sum format (`sha256sum -c index.sha256`):
                    the root of trust
    index.json      version, save_id, step, world,
                    pieces [{key, shape, start, size, dtype, file, name, checksum}],
                    files {meta.json: {bytes, sha256}, *.safetensors: {bytes, header}}; for a linked file
                    (checkpoint/disk/links.py) also save_id
    meta.json       step, save_id, and what the run adds (tokens, config, tokenizer hash, layout)
    *.safetensors   the pieces; each file repeats the save id, so that files of two saves are never mixed;
                    a linked file has the id of the save that wrote it, which the index names

A shard consists of its header and its pieces, so `header` and the checksums of the pieces cover each of its
bytes exactly once. A checksum begins with the name of its digest: "xxh3_128:...", or "sha256:..." if xxhash
is not installed. File names in the index are plain names in this folder, never paths. Files are opened
without following links, and nothing is unpickled. Any damage raises an IntegrityError that names the file.
"""
import fcntl
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import add, gt
from os import fstat
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from checkpoint.disk.files import (
    LENGTH_BYTES,
    TORCH,
    FileEntry,
    IntegrityError,
    TensorTable,
    matches_checksum,
    open_shard,
    read_file,
    read_hashed,
    read_header,
    run_in_threads,
)
from checkpoint.disk.locks import folder_lock
from config import ConfigError, Tree
from parallel.sharding.boxes import Box

VERSION = 2  # format version. Version 1, still readable, had sha256 per piece and no linked files
META = "meta.json"
SHARD = re.compile(r"[A-Za-z0-9_]+\.safetensors")


class NewerFormat(ConfigError):
    """The checkpoint has a newer format version: it is intact, but this code cannot read it.

    Such a checkpoint is never replaced or purged.
    """


class PieceRow(TypedDict):
    """A StoredPiece as a row of index.json."""
    key: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str
    file: str
    name: str
    checksum: str


class Shards(TypedDict):
    """The part of index.json that shards are checked against."""
    save_id: str
    files: dict[str, FileEntry]


class Index(Shards):
    """index.json"""
    version: int
    step: int
    world: int
    pieces: list[PieceRow]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A stored box: tensor `name` in `file`, with checksum `checksum`, "NAME:HEX"."""
    box: Box
    dtype: str  # as safetensors writes it: F32, BF16, ...
    file: str
    name: str
    checksum: str

    @property
    def num_bytes(self) -> int:
        return self.box.volume * TORCH[self.dtype].itemsize

    def to_row(self) -> PieceRow:
        return {
            "key": self.box.key,
            "shape": self.box.shape,
            "start": self.box.start,
            "size": self.box.size,
            "dtype": self.dtype,
            "file": self.file,
            "name": self.name,
            "checksum": self.checksum,
        }


@dataclass(frozen=True)
class StoredIndex:
    """A parsed and checked index.json, about 0.5 KB of memory per piece.

    `text` is index.json itself, for ranks that have not read it. `meta` is meta.json, or {} if not read yet.
    """
    path: Path
    save_id: str
    step: int
    files: dict[str, FileEntry]
    pieces: list[StoredPiece]
    text: bytes = b""
    meta: Tree = field(default_factory=dict)

    def shards(self) -> "Shards":
        """Return the part that shards are checked against."""
        return {"save_id": self.save_id, "files": self.files}

    def by_key(self) -> dict[str, list[StoredPiece]]:
        """Return {key: its pieces}."""
        found: dict[str, list[StoredPiece]] = defaultdict(list)
        for piece in self.pieces:
            found[piece.box.key].append(piece)
        return found


class PieceReader:
    """Converts rows to StoredPieces. Repeated values are stored once."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def once(self, value: Any) -> Any:
        """Return the first value equal to this one (interning)."""
        return self.known.setdefault(value, value)

    def read(self, row: dict[str, Any]) -> Any:
        """Convert a row with a key to a StoredPiece, and return other rows unchanged: a hook for json.loads.

        Raises KeyError, TypeError or ValueError if the row has a key but is not a piece.
        """
        if "key" not in row:
            return row
        shape, start, size = tuple(row["shape"]), tuple(row["start"]), tuple(row["size"])
        key, dtype, file, name = row["key"], row["dtype"], row["file"], row["name"]
        checksum = row["checksum"] if "checksum" in row else f"sha256:{row['sha256']}"  # format 1
        check_types((*shape, *start, *size), (key, dtype, file, name, checksum))
        box = Box(self.once(key), self.once(shape), self.once(start), self.once(size))
        check_inside(box)
        if dtype not in TORCH:
            raise ValueError(f"{key}: unknown dtype {dtype!r}")
        name = box.key if name == box.key else name
        return StoredPiece(box, self.once(dtype), self.once(file), name, checksum)


def check_types(numbers: tuple[Any, ...], texts: tuple[Any, ...]) -> None:
    """Raise ValueError unless all numbers are non-negative integers and all texts are strings."""
    for number in numbers:
        if type(number) is not int or number < 0:
            raise ValueError(f"not a piece: {texts[0]!r} with the number {number!r}")
    for text in texts:
        if type(text) is not str:
            raise ValueError(f"not a piece: {text!r} where text is expected")


def check_inside(box: Box) -> None:
    """Raise ValueError unless the box lies inside its tensor."""
    same_dims = len(box.shape) == len(box.start) == len(box.size)
    ends = map(add, box.start, box.size)
    if not same_dims or any(map(gt, ends, box.shape)):
        raise ValueError(f"{box} does not lie inside its tensor of shape {box.shape}")


# ---- the small files ---------------------------------------------------------------------------------------

def index_bytes(data: Index) -> bytes:
    """Serialize index.json with one piece per line."""
    text = json.dumps(data)
    text = text.replace('{"key"', '\n{"key"')  # cannot occur inside a JSON string, where the quote is escaped
    return text.encode() + b"\n"


def seal_index(index: bytes) -> bytes:
    """Return the content of index.sha256."""
    return f"{hashlib.sha256(index).hexdigest()}  index.json\n".encode()


def read_index(path: Path | str) -> Index:
    """Return index.json as stored, after the checks of read_stored_index. For tools.

    `path` is the checkpoint folder. Raises IntegrityError or NewerFormat.
    """
    return json.loads(read_stored_index(path).text)


def read_stored_index(path: Path | str) -> StoredIndex:
    """Read index.json and check its checksum and consistency.

    `path` is the checkpoint folder. Raises IntegrityError or NewerFormat.
    """
    path = Path(path)
    if not path.is_dir():
        raise IntegrityError(f"{path}: no such checkpoint folder")
    text = read_file(path / "index.json")
    if read_file(path / "index.sha256") != seal_index(text):
        raise IntegrityError(f"{path}/index.json: does not match its checksum in index.sha256")
    return parse_index(path, text)


def parse_index(path: Path, text: bytes) -> StoredIndex:
    """Parse an index. Raises IntegrityError or NewerFormat."""
    try:
        data = json.loads(text, object_hook=PieceReader().read)
        check_version(path, data)
        check_index(data)
    except NewerFormat:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise IntegrityError(f"{path}/index.json: not a checkpoint index: {why}") from None
    return StoredIndex(
        path,
        save_id=data["save_id"],
        step=data["step"],
        files=data["files"],
        pieces=data["pieces"],
        text=text,
    )


def with_checked_meta(index: StoredIndex) -> StoredIndex:
    """Return the index with meta.json read and checked. Raises IntegrityError."""
    return replace(index, meta=read_checked_meta(index.path, index.shards()))


def check_version(path: Path, data: Any) -> None:
    """Raise NewerFormat for a newer format version, ValueError for an invalid one."""
    version = data["version"]
    if type(version) is int and version > VERSION:
        raise NewerFormat(
            f"{path}: written in format {version}, this code reads up to {VERSION}; "
            f"use the code that wrote it, or choose another --log.name"
        )
    if type(version) is not int or version < 1:
        raise ValueError(f"format version {version}, this code reads 1 to {VERSION}")


def check_index(data: Any) -> None:
    """Raise KeyError, TypeError, ValueError or AttributeError if `data` is not an index."""
    files = data["files"]
    for name, entry in files.items():
        if name != META and not SHARD.fullmatch(name):
            raise ValueError(f"{name!r} is not a plain file name")
        checksum = entry["sha256" if name == META else "header"]
        linked_id = entry.get("save_id", "")
        if type(entry["bytes"]) is not int or type(checksum) is not str or type(linked_id) is not str:
            raise ValueError(f"bad entry of file {name}")
    if type(data["save_id"]) is not str or type(data["step"]) is not int or META not in files:
        raise ValueError("save_id, step or meta.json is missing")
    if type(data["pieces"]) is not list:
        raise ValueError("the pieces are not a list")
    for piece in data["pieces"]:
        if piece.file not in files or piece.file == META:
            raise ValueError(f"{piece.box}: its file {piece.file!r} is not listed")


def read_meta(path: Path | str) -> Tree:
    """Read meta.json of a checkpoint folder and check it against the index.

    Raises IntegrityError or NewerFormat.
    """
    return quick_check(path).meta


def read_checked_meta(path: Path, data: Shards) -> Tree:
    """Like read_meta, with the index `data` already read. Raises IntegrityError."""
    text = read_file(path / META)
    entry = data["files"][META]
    if len(text) != entry["bytes"]:
        raise IntegrityError(f"{path}/{META}: size {len(text)} != {entry['bytes']} of the index")
    if hashlib.sha256(text).hexdigest() != entry["sha256"]:
        raise IntegrityError(f"{path}/{META}: does not match its checksum in index.json")
    try:
        meta = json.loads(text)
        if meta["save_id"] != data["save_id"]:
            raise ValueError(f"save id mismatch: {meta['save_id']}, index.json has {data['save_id']}")
        return meta
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(f"{path}/{META}: damaged: {error}") from None


def quick_check(path: Path | str) -> StoredIndex:
    """Check the index and meta.json, but no shards. Returns both. Raises IntegrityError or NewerFormat."""
    return with_checked_meta(read_stored_index(path))


def is_newer_format(path: Path | str) -> bool:
    """Return whether this folder has a newer format version."""
    try:
        read_stored_index(path)
    except NewerFormat:
        return True
    except IntegrityError:
        pass
    return False


# ---- the shards --------------------------------------------------------------------------------------------

def verify(path: Path | str) -> StoredIndex:
    """Verify every byte of the folder. Returns its index, with meta.json.

    Raises IntegrityError naming the file and the problem, or NewerFormat.
    """
    path = Path(path)
    with folder_lock(path, fcntl.LOCK_SH):
        index = quick_check(path)
        shards = [name for name in index.files if name != META]
        check_pieces(path, index.shards(), index.pieces, shards)
    return index


def damaged_shards(path: Path, index: StoredIndex, names: Iterable[str] | None = None) -> dict[str, str]:
    """Return {shard: problem} for a folder with this index. Checks only `names`, if given."""
    result: dict[str, str] = {}
    for name in index.files if names is None else names:
        if name == META:
            continue
        inside = [piece for piece in index.pieces if piece.file == name]
        try:
            check_pieces(path, index.shards(), inside, [name])
        except IntegrityError as error:
            result[name] = str(error)
    return result


def check_pieces(
    path: Path,
    data: Shards,
    pieces: Iterable[StoredPiece],
    shards: Iterable[str] = (),
    *,
    kept: dict[StoredPiece, torch.Tensor] | None = None,
    room: int = 0,
) -> dict[StoredPiece, int]:
    """Check the headers of `shards` and of all files that hold `pieces`, then every byte of `pieces`.

    `data` is {save_id, files} of the index. `kept` receives the bytes [num_bytes] of the first pieces, up to
    `room` bytes in total. Returns {piece: byte offset in its file}. Raises IntegrityError.
    """
    split_into_pieces: dict[str, list[StoredPiece]] = defaultdict(list, {name: [] for name in shards})
    for piece in pieces:
        split_into_pieces[piece.file].append(piece)

    offsets: dict[StoredPiece, int] = {}
    for name, inside in split_into_pieces.items():
        offsets |= check_header(path / name, data["files"][name], data["save_id"], inside)

    # headers match the index and the file sizes, so allocating is safe now
    if kept is not None:
        for piece in offsets:
            if piece.num_bytes <= room:
                buffer = np.empty(piece.num_bytes, dtype=np.uint8)  # numpy asks for huge pages
                kept[piece] = torch.from_numpy(buffer)
                room -= piece.num_bytes
    run_in_threads(lambda item: check_bytes(path, *item, kept or {}), list(offsets.items()))
    return offsets


def check_header(
    path: Path, entry: FileEntry, save_id: str, pieces: list[StoredPiece]
) -> dict[StoredPiece, int]:
    """Check a shard's save id, size and header, and that it holds `pieces` as the index says.

    `entry` is this file's entry in the index; for a linked file it overrides `save_id`. Returns {piece: byte
    offset in the file}. Raises IntegrityError.
    """
    with open_shard(path) as fd:
        size = fstat(fd).st_size
        wrong_size = f"{path}: size {size} != {entry['bytes']} of the index"
        if size != entry["bytes"] and size < LENGTH_BYTES:
            raise IntegrityError(wrong_size)
        try:
            header, table = read_header(fd, path)
        except IntegrityError:
            if size != entry["bytes"]:  # says more than a truncated header
                raise IntegrityError(wrong_size) from None
            raise

    # Check the save id first: a shard of another save also differs in size, but its id is the better message.
    found = table.get("__metadata__", {}).get("save_id")
    wanted = entry.get("save_id", save_id)
    if found != wanted:
        raise IntegrityError(
            f"{path}: save id mismatch: {found}, index.json has {wanted}; it belongs to another save"
        )
    if size != entry["bytes"]:
        raise IntegrityError(wrong_size)
    if hashlib.sha256(header).hexdigest() != entry["header"]:
        raise IntegrityError(f"{path}: the header does not match its checksum in index.json")
    offsets: dict[StoredPiece, int] = {}
    for piece in pieces:
        offsets[piece] = byte_offset(path, piece, table, header_size=len(header), file_size=size)
    return offsets


def byte_offset(
    path: Path, piece: StoredPiece, table: TensorTable, *, header_size: int, file_size: int
) -> int:
    """Return the byte offset of `piece` according to the file's header.

    Raises IntegrityError if the header differs from the index.
    """
    row = table.get(piece.name)
    if row is None:
        raise IntegrityError(f"{path}: holds no tensor {piece.name!r}, which index.json names")
    found = (row.get("dtype"), row.get("shape"))
    indexed = (piece.dtype, list(piece.box.size))
    if found != indexed:
        raise IntegrityError(f"{path}: {piece.name} is {found}, index.json has {indexed}")

    data_size = file_size - header_size
    match row.get("data_offsets"):
        case [int(begin), int(end)] if end - begin == piece.num_bytes and 0 <= begin <= end <= data_size:
            return header_size + begin
        case other:
            raise IntegrityError(f"{path}: {piece.name} cannot lie at bytes {other} of a file of {file_size}")


def check_bytes(
    path: Path, piece: StoredPiece, offset: int, kept: dict[StoredPiece, torch.Tensor]
) -> None:
    """Raise IntegrityError if the bytes of `piece` at `offset` do not match its checksum.

    If `kept` has a buffer for the piece, the bytes are left there.
    """
    file = path / piece.file
    with open_shard(file) as fd:
        if piece in kept:
            is_sound = read_hashed(fd, offset, kept[piece].numpy(), piece.checksum)
        else:
            is_sound = matches_checksum(fd, offset, piece.num_bytes, piece.checksum)
        if not is_sound:
            raise IntegrityError(f"{file}: {piece.name} does not match its checksum in index.json")
