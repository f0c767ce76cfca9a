"""Inputs of every kind -> documents, cut into units of work that any process can read on its own.

jsonl (also .json, .ndjson; plain files are cut by byte range), text (one document a file), parquet (by row group),
hf:NAME[:CONFIG][:SPLIT] (streamed, by shard), stdlib (Python's own source); .gz and .zst of the first two, as a whole.
A unit depends on the inputs alone, never on the number of workers. Memory: the longest document.
"""
import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from config import ConfigError

UNIT = 8 << 20  # bytes of input in a unit: a second or two of work, which is what a kill can cost
KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
         ".txt": "text", ".md": "text", ".rst": "text", ".py": "text"}
SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Piece:
    """A stretch of one input: bytes [start, stop) of a jsonl, row groups of a parquet, shard start of stop of hf."""
    kind: str
    path: str
    start: int
    stop: int
    size: int  # bytes of input, for the progress


class Record(NamedTuple):
    text: str | None  # none: bad
    line: int  # from 1: in the file, of a jsonl in the piece (see `place`); of parquet and hf the row
    why: str  # what is bad
    done: int = 0  # bytes of the piece read so far, where that is known


class Bad(ConfigError):
    """A record that cannot be read, where --skip-bad was not given."""


# ---- planning --------------------------------------------------------------------------------------------------------

def plan(inputs: list[str], unit: int = UNIT) -> list[list[Piece]]:
    """Units in the order of the output. Raises ConfigError naming the input."""
    units, room = [], 0
    for piece in (p for name in inputs for p in pieces(name, unit)):
        if not units or piece.size > room:
            units.append([])
            room = unit
        units[-1].append(piece)
        room -= piece.size
    return units


def pieces(name: str, unit: int) -> Iterator[Piece]:
    if name == "stdlib":
        yield from (Piece("text", path, 0, 0, os.path.getsize(path)) for path in stdlib())
        return
    if name.startswith("hf:"):
        shards = hf_dataset(name[3:]).num_shards
        yield from (Piece("hf", name[3:], i, shards, unit) for i in range(shards))  # of unknown size: a unit each
        return
    for path in files(name):
        kind, size = kind_of(path), os.path.getsize(path)
        if kind == "parquet":
            meta = parquet(path).metadata
            for i in range(meta.num_row_groups):
                yield Piece(kind, path, i, i + 1, size // meta.num_row_groups)
        elif kind == "jsonl" and not path.endswith((".gz", ".zst")):
            for start in range(0, size, unit):
                yield Piece(kind, path, start, min(start + unit, size), min(unit, size - start))
        else:
            yield Piece(kind, path, 0, size, size)


def files(name: str) -> list[str]:
    path = pathlib.Path(name)
    if path.is_dir():
        found = sorted(str(p) for p in path.rglob("*") if p.is_file() and kind_of(str(p), None))
        if not found:
            raise ConfigError(f"--input {name}: holds no {' '.join(KINDS)} file (or .gz, .zst of one)")
        return found
    found = [name] if path.exists() else sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p))
    if not found:
        raise ConfigError(f"--input {name}: no such file; give files, folders, globs, hf:NAME or stdlib")
    return found


def kind_of(path: str, unknown: str | None = "text") -> str | None:
    stem, end = os.path.splitext(path)
    return KINDS.get(os.path.splitext(stem)[1] if end in (".gz", ".zst") else end, unknown)


def stdlib() -> list[str]:
    """Python's own library, in an order keyed by name: any contiguous share of it is a fair sample."""
    root, found = sysconfig.get_paths()["stdlib"], []
    for folder, below, names in os.walk(root):
        below[:] = [b for b in below if b not in SKIP]
        found += [os.path.join(folder, n) for n in names if n.endswith(".py")]
    return sorted(found, key=lambda path: hashlib.sha256(os.path.relpath(path, root).encode()).digest())


def hf_dataset(name: str):
    """NAME[:CONFIG][:SPLIT], streamed. One word after NAME is a config where the set has one so named, else a split."""
    try:
        import datasets  # only where hf: is asked for
    except ImportError:
        raise ConfigError(f"--input hf:{name}: needs the package datasets; pip install datasets") from None
    repo, *rest = name.split(":")
    if len(rest) > 2:
        raise ConfigError(f"--input hf:{name}: write hf:NAME[:CONFIG][:SPLIT]")
    try:
        if len(rest) == 1:
            rest = [rest[0], "train"] if rest[0] in datasets.get_dataset_config_names(repo) else [None, rest[0]]
        config, split = rest or (None, "train")
        return datasets.load_dataset(repo, config or None, split=split or "train", streaming=True)
    except Exception as e:  # the hub's errors are of many kinds: not found, gated, no network
        raise ConfigError(f"--input hf:{name}: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}") from None


def parquet(path: str):
    try:
        import pyarrow.parquet
        return pyarrow.parquet.ParquetFile(path)
    except ImportError:
        raise ConfigError(f"{path}: needs the package pyarrow; pip install pyarrow") from None
    except (OSError, ValueError) as e:  # pyarrow's ArrowInvalid is a ValueError
        raise ConfigError(f"{path}: not a parquet file ({str(e).splitlines()[0][:120]})") from None


# ---- reading ---------------------------------------------------------------------------------------------------------

def read(piece: Piece, key: str) -> Iterator[Record]:
    """The documents of a piece in order, and what could not be read. Raises ConfigError naming the file."""
    reader = {"jsonl": read_jsonl, "text": read_text, "parquet": read_parquet, "hf": read_hf}[piece.kind]
    try:
        yield from reader(piece, key)
    except (OSError, EOFError, zlib.error) as e:
        raise ConfigError(f"{piece.path}: cannot be read to its end: {getattr(e, 'strerror', None) or e}") from None


def read_text(piece: Piece, key: str) -> Iterator[Record]:
    with opened(piece.path)[1] as f:
        raw = f.read().removeprefix(codecs.BOM_UTF8)
    try:
        yield Record(raw.decode("utf-8"), 1, "", piece.size)
    except UnicodeDecodeError as e:
        yield Record(None, raw.count(b"\n", 0, e.start) + 1, f"invalid UTF-8 (byte 0x{raw[e.start]:02x})")


def read_jsonl(piece: Piece, key: str) -> Iterator[Record]:
    raw, f = opened(piece.path)
    with f:
        cut = raw is f  # plain: this piece has the lines that begin in [start, stop)
        at = first_line_at(f, piece.start) if cut else 0
        line = 0
        while not cut or at < piece.stop:
            text = f.readline()
            if not text:
                return
            at += len(text)
            line += 1
            if line == 1 and piece.start == 0:
                text = text.removeprefix(codecs.BOM_UTF8)
            if text.strip():
                yield Record(*from_json(text, key, line), (at if cut else raw.tell()) - piece.start)


def from_json(raw: bytes, key: str, line: int) -> tuple[str | None, int, str]:
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as e:
        return None, line, f"invalid UTF-8 (byte 0x{raw[e.start]:02x} at column {e.start + 1})"
    except (ValueError, RecursionError) as e:
        return None, line, f"broken JSON ({e})"
    if not isinstance(record, dict):
        return None, line, f"not an object with a text under {key!r}"
    return checked(record.get(key), key, line)


def checked(text, key: str, line: int) -> tuple[str | None, int, str]:
    if text is None:
        return None, line, f"no text under {key!r} (see --jsonl-key)"
    if not isinstance(text, str):
        return None, line, f"{key!r} holds no text but {type(text).__name__}"
    try:
        text.encode("utf-8")  # JSON can spell half a character ("\ud800"), which no tokenizer can take
    except UnicodeEncodeError:
        return None, line, "a lone surrogate, which is not text"
    return text, line, ""


def first_line_at(f, start: int) -> int:
    if start == 0:
        return 0
    f.seek(start - 1)
    return start - 1 + len(f.readline())


def read_parquet(piece: Piece, key: str) -> Iterator[Record]:
    table = parquet(piece.path)
    columns = table.schema_arrow.names
    if key not in columns:
        raise ConfigError(f"{piece.path}: no column {key!r}; it has {', '.join(columns)}: choose with --jsonl-key")
    row = sum(table.metadata.row_group(i).num_rows for i in range(piece.start))
    for batch in table.iter_batches(256, row_groups=range(piece.start, piece.stop), columns=[key]):
        for value in batch.column(0):
            row += 1
            try:
                yield Record(*checked(value.as_py(), key, row))
            except UnicodeDecodeError:
                yield Record(None, row, "invalid UTF-8")


def read_hf(piece: Piece, key: str) -> Iterator[Record]:
    rows = enumerate(hf_dataset(piece.path).shard(piece.stop, piece.start), 1)
    while True:
        try:
            i, row = next(rows, (0, None))
        except Exception as e:  # the network's errors are of many kinds
            raise ConfigError(f"hf:{piece.path}: {type(e).__name__}: {e}; the same command goes on") from None
        if row is None:
            return
        yield Record(*checked(row.get(key), key, i))


def place(piece: Piece, line: int) -> str:
    """file:line. A piece of a jsonl counts its own lines; those before it are counted only here, when asked for."""
    if piece.kind == "jsonl" and piece.start:
        with open(piece.path, "rb") as f:
            left = first_line_at(f, piece.start)
            f.seek(0)
            while left > 0:
                chunk = f.read(min(left, 1 << 20))
                left -= len(chunk)
                line += chunk.count(b"\n")
    return f"{'hf:' * (piece.kind == 'hf')}{piece.path}:{line}"


def opened(path: str):
    """(the file on disk, the stream of its content): one and the same for a plain file."""
    raw = open(path, "rb")
    if path.endswith(".gz"):
        return raw, gzip.GzipFile(fileobj=raw)
    return (raw, io.BufferedReader(Zstd(raw), 1 << 20)) if path.endswith(".zst") else (raw, raw)


class Zstd(io.RawIOBase):
    """All frames of a .zst. The package's own stream_reader ends a cut-off file without a word."""

    def __init__(self, raw):
        import zstandard  # only where a .zst is read
        self._new, self._error = lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
        self._raw, self._frame, self._left, self._out = raw, None, b"", memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer) -> int:
        while not self._out:
            chunk = self._left or self._raw.read(1 << 16)
            if not chunk:
                if self._frame:
                    raise EOFError("the file is cut off")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._out, self._left = memoryview(self._frame.decompress(chunk)), b""
            except self._error as e:
                raise OSError(f"not zstd: {e}") from None
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        n = min(len(buffer), len(self._out))
        buffer[:n], self._out = self._out[:n], self._out[n:]
        return n
