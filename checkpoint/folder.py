"""One committed checkpoint folder: what is in it, and whether every byte is what was written.

    index.sha256    checksum of index.json, as sha256sum writes it (`sha256sum -c index.sha256`): the root of trust
    index.json      version, save_id, step, world, pieces [{key, shape, start, size, dtype, file, name, sha256}],
                    files {meta.json: {bytes, sha256}, *.safetensors: {bytes, header}}
    meta.json       step, save_id, and what the run adds (tokens, config, tokenizer hash, layout)
    *.safetensors   the pieces; each file repeats the save id, so files of two saves are never mixed

A shard is its header and its pieces, so `header` and the pieces' sha256 cover each of its bytes exactly once. A name
in the index is a plain name in this folder and never a path; files are opened without following links; nothing is
unpickled. Everything wrong raises IntegrityError naming the file.
"""
import fcntl
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from os import fstat
from pathlib import Path

from checkpoint.files import TORCH, IntegrityError, opened, read_file, read_header, sha256_range, spread
from checkpoint.locks import held
from config import ConfigError
from parallel.boxes import Box

VERSION = 1
SHARD = re.compile(r"[A-Za-z0-9_]+\.safetensors")


class Newer(ConfigError):
    """A checkpoint of a later version of the format: sound, but not for this code. Never replaced, never
    purged."""


@dataclass(frozen=True)
class Piece:
    """A stored box: `name` in `file`, whose bytes hash to `sha256`."""
    box: Box
    dtype: str  # as safetensors writes it: F32, BF16, ...
    file: str
    name: str
    sha256: str

    @property
    def bytes(self) -> int:
        return self.box.volume * TORCH[self.dtype].itemsize

    def row(self) -> dict:
        b = self.box
        return {"key": b.key, "shape": b.shape, "start": b.start, "size": b.size,
                "dtype": self.dtype, "file": self.file, "name": self.name, "sha256": self.sha256}

    @staticmethod
    def of(row: dict) -> "Piece":
        """Raises KeyError, TypeError or ValueError where the row is not a piece."""
        box = Box(row["key"], *(tuple(row[k]) for k in ("shape", "start", "size")))
        numbers = (*box.shape, *box.start, *box.size)
        words = [row[k] for k in ("key", "dtype", "file", "name", "sha256")]
        if not all(type(n) is int and n >= 0 for n in numbers) or not all(type(w) is str for w in words):
            raise ValueError(f"not a piece: {row}")
        ends = [a + n for a, n in zip(box.start, box.size)]
        if not len(box.shape) == len(box.start) == len(box.size) or any(e > s for e, s in zip(ends, box.shape)):
            raise ValueError(f"{box} does not lie inside its tensor of shape {box.shape}")
        if row["dtype"] not in TORCH:
            raise ValueError(f"{box.key}: unknown dtype {row['dtype']!r}")
        return Piece(box, row["dtype"], row["file"], row["name"], row["sha256"])


# ---- the small files -------------------------------------------------------------------------------------------------

def index_bytes(data: dict) -> bytes:
    """JSON with one piece a line. (`{"key"` cannot occur inside a JSON string: its quote would be escaped.)"""
    return json.dumps(data).replace('{"key"', '\n{"key"').encode() + b"\n"


def seal(index: bytes) -> bytes:
    """What index.sha256 holds."""
    return f"{hashlib.sha256(index).hexdigest()}  index.json\n".encode()


def index(path: Path | str) -> dict:
    """index.json, checked against its seal and its own rules. Raises IntegrityError; Newer."""
    path = Path(path)
    if not path.is_dir():
        raise IntegrityError(f"{path}: no such checkpoint folder")
    text = read_file(path / "index.json")
    if read_file(path / "index.sha256") != seal(text):
        raise IntegrityError(f"{path}/index.json: does not match its checksum in index.sha256")
    try:
        data = json.loads(text)
        if type(data["version"]) is int and data["version"] > VERSION:
            raise Newer(f"{path}: written in format {data['version']}, this code reads {VERSION}; "
                        f"use the code that wrote it, or choose another --log.name")
        if data["version"] != VERSION:
            raise ValueError(f"format version {data['version']}, this code reads {VERSION}")
        for name, entry in data["files"].items():
            if name != "meta.json" and not SHARD.fullmatch(name):
                raise ValueError(f"{name!r} is not a plain file name")
            checksum = entry["sha256" if name == "meta.json" else "header"]
            if type(entry["bytes"]) is not int or type(checksum) is not str:
                raise ValueError(f"bad entry of file {name}")
        if type(data["save_id"]) is not str or type(data["step"]) is not int or "meta.json" not in data["files"]:
            raise ValueError("save_id, step or meta.json is missing")
        for piece in map(Piece.of, data["pieces"]):
            if piece.file not in data["files"] or piece.file == "meta.json":
                raise ValueError(f"{piece.box}: its file {piece.file!r} is not listed")
    except Newer:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise IntegrityError(f"{path}/index.json: not a checkpoint index: {type(e).__name__}: {e}") from None
    return data


def meta(path: Path | str) -> dict:
    """meta.json, checked against the index. Raises IntegrityError."""
    return checked_meta(Path(path), index(path))


def glance(path: Path | str) -> dict:
    """The index, when it and meta.json are sound. Says nothing of the shards. Raises IntegrityError;
    Newer."""
    data = index(path)
    checked_meta(Path(path), data)
    return data


def newer(path: Path | str) -> bool:
    """Is this folder of a later version of the format?"""
    try:
        index(path)
    except Newer:
        return True
    except IntegrityError:
        pass
    return False


def checked_meta(path: Path, data: dict) -> dict:
    text, entry = read_file(path / "meta.json"), data["files"]["meta.json"]
    if len(text) != entry["bytes"]:
        raise IntegrityError(f"{path}/meta.json: size {len(text)} != {entry['bytes']} of the index")
    if hashlib.sha256(text).hexdigest() != entry["sha256"]:
        raise IntegrityError(f"{path}/meta.json: does not match its checksum in index.json")
    try:
        found = json.loads(text)
        if found["save_id"] != data["save_id"]:
            raise ValueError(f"save id mismatch: {found['save_id']}, index.json has {data['save_id']}")
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise IntegrityError(f"{path}/meta.json: damaged: {e}") from None


# ---- the shards ------------------------------------------------------------------------------------------------------

def verify(path: Path | str) -> dict:
    """Every byte of the folder is what was written; returns its index. Raises IntegrityError naming the file
    and what is wrong; Newer."""
    path = Path(path)
    with held(path, fcntl.LOCK_SH):
        data = index(path)
        checked_meta(path, data)
        check_pieces(path, data, map(Piece.of, data["pieces"]), shards=[f for f in data["files"] if f != "meta.json"])
    return data


def check_pieces(path: Path, data: dict, pieces: Iterable[Piece], shards: Iterable[str] = ()) -> dict[Piece, int]:
    """Verifies the headers of `shards` and of all files that `pieces` lie in, then every byte of `pieces`.

    data: {save_id, files} of the index. Returns where each piece begins in its file, in bytes. Raises IntegrityError.
    """
    files: dict[str, list[Piece]] = defaultdict(list, {name: [] for name in shards})
    for piece in pieces:
        files[piece.file].append(piece)
    spots: dict[Piece, int] = {}
    for name, inside in files.items():
        spots |= check_header(path / name, data["files"][name], data["save_id"], inside)
    spread(lambda item: check_bytes(path, *item), list(spots.items()))
    return spots


def check_header(path: Path, entry: dict, save_id: str, pieces: list[Piece]) -> dict[Piece, int]:
    """A shard's save id, size and header, and that it holds `pieces` as the index says. Returns their byte offsets."""
    with opened(path) as fd:
        size = fstat(fd).st_size
        if size != entry["bytes"] and size < 8:
            raise IntegrityError(f"{path}: size {size} != {entry['bytes']} of the index")
        try:
            head, table = read_header(fd, path)
        except IntegrityError:
            if size != entry["bytes"]:  # says more than that the header is cut off
                raise IntegrityError(f"{path}: size {size} != {entry['bytes']} of the index") from None
            raise
    found = table.get("__metadata__", {}).get("save_id")
    if found != save_id:
        raise IntegrityError(f"{path}: save id mismatch: {found}, index.json has {save_id}; it is of another save")
    if size != entry["bytes"]:
        raise IntegrityError(f"{path}: size {size} != {entry['bytes']} of the index")
    if hashlib.sha256(head).hexdigest() != entry["header"]:
        raise IntegrityError(f"{path}: the header does not match its checksum in index.json")
    spots = {}
    for p in pieces:
        row = table.get(p.name)
        if row is None:
            raise IntegrityError(f"{path}: holds no tensor {p.name!r}, which index.json names")
        if row.get("dtype") != p.dtype or row.get("shape") != list(p.box.size):
            found, stored = (row.get("dtype"), row.get("shape")), (p.dtype, list(p.box.size))
            raise IntegrityError(f"{path}: {p.name} is {found}, index.json has {stored}")
        match row.get("data_offsets"):
            case [int(begin), int(end)] if end - begin == p.bytes and 0 <= begin <= end <= size - len(head):
                spots[p] = len(head) + begin
            case other:
                raise IntegrityError(f"{path}: {p.name} cannot lie at bytes {other} of a file of {size}")
    return spots


def check_bytes(path: Path, piece: Piece, spot: int) -> None:
    with opened(path / piece.file) as fd:
        if sha256_range(fd, spot, piece.bytes) != piece.sha256:
            raise IntegrityError(f"{path / piece.file}: {piece.name} does not match its checksum in index.json")
