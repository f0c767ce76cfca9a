"""Read documents from all kinds of inputs, in work units that any process can read on its own.

    .jsonl, .json, .ndjson       one JSON object per line; plain files are split by byte range
    .txt, .md, .rst, .py         each file is one document
    .gz, .zst, .bz2, .xz of these   read as a whole
    .parquet                     split by row group
    hf:NAME[:CONFIG][:SPLIT]     a dataset on the Hugging Face hub, streamed, split by shard
    a URL                        a file of a public corpus (corpora.py), of the types above
    text:FILES                   each file is one document, whatever its extension
    stdlib                       the source of Python's standard library

Units depend only on the inputs, never on the number of workers. Memory: the longest document.
"""
import bz2
import codecs
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import pathlib
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from config import ConfigError, Tree
from data.chat import ChatFormat, ChatText
from data.conversation import (
    BadConversation,
    DuplicateKey,
    parse_json,
    read_conversation,
    walk_path,
    without_nulls,
)

if TYPE_CHECKING:  # imported only if an input needs them
    import datasets
    import pyarrow.parquet
    from _typeshed import WriteableBuffer

UNIT_BYTES = 8 << 20  # input bytes per unit: one or two seconds of work, lost if a run is killed
KINDS = {
    ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text", ".md": "text", ".rst": "text", ".py": "text",
}
PROSE = (".md", ".rst", ".py")  # never hold records
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
AS_TEXT = "text:"  # prefix that reads any file as text
TABLE = "is a table, and its rows would be one text: write it as parquet or jsonl, as with " \
        "pandas.read_csv(FILE).to_parquet(FILE)"
ARCHIVE = "is an archive; unpack it, and give the files"
OTHER_PACKING = f"uses an unsupported compression; compress it as one of {', '.join(COMPRESSED)}"
RECORDS = f"has a JSON object on each line, and all would be one text: call it .jsonl, or give {AS_TEXT}FILE"
PAGES = "holds pages; extract their text first"
MARKUP = f"has markup that would be read as text: convert it, or give {AS_TEXT}FILE to read it as it is"
BINARY = "is binary; write its text as jsonl"
OTHER_FILES = {  # {extension: why it is not read}
    **dict.fromkeys((".csv", ".tsv"), TABLE),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar", ".warc", ".wet"), ARCHIVE),
    **dict.fromkeys((".lz4", ".lzma", ".br", ".lzo", ".z", ".sz", ".snappy"), OTHER_PACKING),
    **dict.fromkeys((".pdf", ".docx", ".doc", ".odt", ".pptx", ".epub"), PAGES),
    **dict.fromkeys((".html", ".htm", ".xhtml", ".xml", ".svg", ".rtf", ".ipynb"), MARKUP),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".pt", ".pkl", ".npy"), BINARY),
    **dict.fromkeys((".safetensors", ".sqlite", ".png", ".jpg", ".jpeg", ".gif"), BINARY),
    ".arrow": "is Arrow's format; write it as parquet",
}
SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
MAX_LINE_SHARE = 1 << 20  # bytes of a line read to detect records
MAX_ENDS = 5  # kinds of unread files listed in a message
PARQUET_ROWS = 256  # in memory at a time


@dataclass(frozen=True)
class DocumentPiece:
    """A part of one input."""
    kind: str  # jsonl, text, parquet, hf or url
    path: str  # of the file; for hf: NAME[:CONFIG][:SPLIT]
    start: int  # jsonl: bytes [start, stop) of the file; parquet: row groups [start, stop);
    stop: int  # hf: shard number `start` of `stop` shards; text, url: unused
    size: int  # input bytes, for the progress bar
    version: str = ""  # of a URL's file, as its store tells it
    sha256: str = ""  # of a URL's file, if known


class DocumentRecord(NamedTuple):
    """One document, or the reason why it cannot be read."""
    text: str | None  # None if it cannot be read
    line: int  # from 1: in the file; for jsonl in the piece (see piece_location); for parquet and hf the row
    error: str  # why it cannot be read, or empty
    bytes_read: int = 0  # of the piece so far, if known
    chat: ChatText | None = None  # for a conversation, the spans that count
    is_kept: bool = True  # False where a Filter drops it


@dataclass(frozen=True)
class Filter:
    """Which documents of a corpus are kept."""
    score: str | None = None  # field or column with a number
    min_score: float = 0.0  # documents below it are dropped
    min_characters: int = 0  # shorter documents are dropped

    def apply(self, record: Tree, document: DocumentRecord) -> DocumentRecord:
        """Return the document of a record, marked if it is dropped."""
        if document.text is None:
            return document
        is_kept = len(document.text) >= self.min_characters
        if self.score is not None:
            score = record.get(self.score)
            if isinstance(score, bool) or not isinstance(score, (int, float)):
                return document._replace(text=None, error=f"no number under {self.score!r}")
            is_kept = is_kept and score >= self.min_score
        return document._replace(is_kept=is_kept)


ReadRecord = Callable[[Tree, int], DocumentRecord]  # (fields or columns, line) -> document


class BadDocument(ConfigError):
    """A document that cannot be read, without --skip-bad."""


# ---- planning ----------------------------------------------------------------------------------------------

def plan_units(
    inputs: list[str], unit_bytes: int = UNIT_BYTES, passed_over: Sequence[str] = ()
) -> list[list[DocumentPiece]]:
    """Plan the work units, each a list of pieces, in output order. A unit has at most `unit_bytes` of input,
    or one larger piece. Files and folders in `passed_over` are skipped inside input folders. Raises
    ConfigError naming the input."""
    units: list[list[DocumentPiece]] = []
    space_left = 0
    for name in inputs:
        for piece in pieces_of_file(name, unit_bytes, passed_over):
            if not units or piece.size > space_left:
                units.append([])
                space_left = unit_bytes
            units[-1].append(piece)
            space_left -= piece.size
    return units


def pieces_of_file(name: str, unit_bytes: int, passed_over: Sequence[str]) -> Iterator[DocumentPiece]:
    """Yield the pieces of one command-line input, in order."""
    if name == "stdlib":
        for path in stdlib_files():
            yield DocumentPiece(kind="text", path=path, start=0, stop=0, size=os.path.getsize(path))
        return
    if name.startswith("hf:"):
        name = name.removeprefix("hf:")
        num_shards = hf_dataset(name).num_shards
        for shard in range(num_shards):
            # the size of a shard is unknown, so each is a unit
            yield DocumentPiece(kind="hf", path=name, start=shard, stop=num_shards, size=unit_bytes)
        return

    is_text = name.startswith(AS_TEXT)
    for path in matching_files(name.removeprefix(AS_TEXT), passed_over, is_text):
        kind = "text" if is_text else get_kind(path) or "text"
        if not is_text and name_end(path) in OTHER_FILES:
            raise ConfigError(f"{path}: {OTHER_FILES[name_end(path)]}")
        if not is_text and name_end(path) not in PROSE and kind == "text" and holds_records(path):
            raise ConfigError(f"{path}: {RECORDS}")
        file_bytes = os.path.getsize(path)
        if kind == "parquet":
            num_groups = open_parquet(path).metadata.num_row_groups
            group_bytes = file_bytes // num_groups if num_groups else 0
            for group in range(num_groups):
                yield DocumentPiece(kind=kind, path=path, start=group, stop=group + 1, size=group_bytes)
        elif kind == "jsonl" and not packing(path):
            for start in range(0, file_bytes, unit_bytes):
                stop = min(start + unit_bytes, file_bytes)
                yield DocumentPiece(kind=kind, path=path, start=start, stop=stop, size=stop - start)
        else:
            yield DocumentPiece(kind=kind, path=path, start=0, stop=file_bytes, size=file_bytes)


def whole_file(path: str) -> list[DocumentPiece]:
    """Return the pieces of one file, in order: one, but for parquet one for each row group."""
    return list(pieces_of_file(path, max(1, os.path.getsize(path)), ()))


def matching_files(name: str, passed_over: Sequence[str] = (), is_text: bool = False) -> list[str]:
    """Return the sorted files of an input: one file, the readable files of a folder except those passed over,
    or the matches of a glob. `is_text` accepts all files of a folder. Raises ConfigError if there are
    none."""
    path = pathlib.Path(name)
    if path.is_dir():
        files = [file for file in files_in(name, passed_over) if is_text or get_kind(file)]
        if not files:
            packed = ", ".join(COMPRESSED)
            raise ConfigError(f"--input {name}: holds no {' '.join(KINDS)} file (or {packed} of one)")
        return files
    if path.exists():
        return [name]
    files = sorted(file for file in glob.glob(name, recursive=True) if os.path.isfile(file))
    if not files:
        raise ConfigError(f"--input {name}: no such file; give files, folders, globs, hf:NAME or stdlib")
    return files


def files_in(folder: str, passed_over: Sequence[str]) -> list[str]:
    """Return all files in a folder except those passed over, sorted."""
    files = sorted(str(file) for file in pathlib.Path(folder).rglob("*") if file.is_file())
    return without(files, passed_over, folder)


def unread_files(name: str, passed_over: Sequence[str] = ()) -> str | None:
    """Return a line that counts the unread files of a folder by extension, or None if there are none."""
    if not pathlib.Path(name).is_dir():
        return None
    ends = Counter(name_end(file) or "without an end" for file in files_in(name, passed_over)
                   if not get_kind(file))
    if not ends:
        return None
    several = f"{ends.total():,} files are" if ends.total() > 1 else "1 file is"
    named = [f"{count:,} {end}" for end, count in sorted(ends.items(), key=lambda item: (-item[1], item[0]))]
    more = f" and {len(named) - MAX_ENDS} other kinds" if len(named) > MAX_ENDS else ""
    return f"{name}: {several} not read: {', '.join(named[:MAX_ENDS])}{more}"


def without(files: list[str], passed_over: Sequence[str], folder: str) -> list[str]:
    """Drop files at or under one of the paths, except for paths that contain the folder itself."""
    outer = f"{os.path.realpath(folder)}/"
    left_out = tuple(f"{os.path.realpath(path)}/" for path in passed_over)
    left_out = tuple(path for path in left_out if not outer.startswith(path))
    if not left_out:
        return files
    return [file for file in files if not f"{os.path.realpath(file)}/".startswith(left_out)]


def get_kind(path: str) -> str | None:
    """Return the kind of a file by its name, or None if the name does not say."""
    return KINDS.get(name_end(path))


def holds_records(path: str) -> bool:
    """Return whether the first two lines of a file are JSON objects."""
    try:
        disk_file, stream = open_streams(path)
        with disk_file, stream:
            lines = [stream.readline(MAX_LINE_SHARE).removeprefix(codecs.BOM_UTF8) for _ in range(2)]
        return all(isinstance(json.loads(line), dict) for line in lines)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, RecursionError):
        # the reader of the file reports the error
        return False


def name_end(path: str) -> str:
    """Return the lower-case extension of a file, without that of its compression."""
    return os.path.splitext(path[:len(path) - len(packing(path))])[1].lower()


def packing(path: str) -> str:
    """Return the compression extension of a file, or "" if it is not compressed."""
    end = os.path.splitext(path)[1].lower()
    return end if end in COMPRESSED else ""


def is_plain(piece: DocumentPiece) -> bool:
    """Return whether `size` is the number of uncompressed bytes of text or JSON."""
    return piece.kind in ("jsonl", "text") and not packing(piece.path)


def stdlib_files() -> list[str]:
    """Return the standard library's files, ordered by a hash of their names: any range is a fair sample."""
    root = sysconfig.get_paths()["stdlib"]
    files: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIP]  # os.walk does not enter the others
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: hashlib.sha256(os.path.relpath(path, root).encode()).digest())


def hf_dataset(name: str) -> "datasets.IterableDataset":
    """Open NAME[:CONFIG][:SPLIT] for streaming. One word after NAME is a config if the dataset has one with
    that name, else a split; the default split is train. Raises ConfigError if the dataset cannot be
    opened."""
    try:
        import datasets  # only needed for hf: inputs
    except ImportError:
        raise ConfigError(f"--input hf:{name}: needs the package datasets; pip install datasets") from None

    repository, *words = name.split(":")
    if len(words) > 2:
        raise ConfigError(f"--input hf:{name}: write hf:NAME[:CONFIG][:SPLIT]")
    try:
        config, split = None, None
        if len(words) == 2:
            config, split = words
        elif words and words[0] in datasets.get_dataset_config_names(repository):
            config = words[0]
        elif words:
            split = words[0]
        return datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
    except Exception as error:  # hub errors have many classes: not found, gated, no network
        message = (str(error).splitlines() or [""])[0][:200]
        raise ConfigError(f"--input hf:{name}: {type(error).__name__}: {message}") from None


def open_parquet(path: str) -> "pyarrow.parquet.ParquetFile":
    """Open a parquet file. Raises ConfigError if pyarrow is not installed or the file is not parquet."""
    try:
        import pyarrow.parquet  # only needed for .parquet
        return pyarrow.parquet.ParquetFile(path)
    except ImportError:
        raise ConfigError(f"{path}: needs the package pyarrow; pip install pyarrow") from None
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ConfigError(f"{path}: not a parquet file ({str(error).splitlines()[0][:120]})") from None


# ---- reading -----------------------------------------------------------------------------------------------

def read_piece(
    piece: DocumentPiece, key: str | None, chat: ChatFormat | None = None, keep: Filter | None = None
) -> Iterator[DocumentRecord]:
    """Yield the documents of a piece in order, including those that cannot be read and those that `keep`
    drops. `key` is the field or column of the text or the messages; None detects it. `chat` renders
    conversations; None means that the piece holds text. Raises ConfigError naming a file that cannot be read
    to its end."""
    readers = {"jsonl": read_jsonl, "text": read_text, "parquet": read_parquet, "hf": read_hf}
    if chat is not None and piece.kind == "text":
        message = f"{piece.path}: --chat reads conversations from jsonl, parquet or hf:NAME, not text"
        raise ConfigError(message)
    is_table = piece.kind in ("parquet", "hf")
    read = text_reader(key or "text", keep) if chat is None else conversation_reader(chat, key, is_table)
    columns = [key] if chat is None and key is not None else []  # a conversation may use several
    if columns and keep is not None and keep.score is not None:
        columns.append(keep.score)
    try:
        yield from readers[piece.kind](piece, columns, read)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{piece.path}: cannot be read to the end: {reason}") from None


def read_text(piece: DocumentPiece, columns: list[str], read: ReadRecord) -> Iterator[DocumentRecord]:
    _, stream = open_streams(piece.path)
    with stream:
        raw = stream.read().removeprefix(codecs.BOM_UTF8)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        yield DocumentRecord(None, line, f"invalid UTF-8 (byte 0x{raw[error.start]:02x})")
        return
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        yield DocumentRecord(None, line, "a NUL byte, which text does not have (UTF-16, or no text at all)")
        return
    yield DocumentRecord(text, 1, "", piece.size)


def read_jsonl(piece: DocumentPiece, columns: list[str], read: ReadRecord) -> Iterator[DocumentRecord]:
    """Yield the lines of a plain file that begin in [start, stop), or all lines of a compressed file."""
    disk_file, stream = open_streams(piece.path)
    is_plain = stream is disk_file
    with stream:
        offset = seek_line(stream, piece.start) if is_plain else 0
        line = 0
        while not is_plain or offset < piece.stop:
            raw = stream.readline()
            if not raw:
                return
            offset += len(raw)
            line += 1
            if line == 1 and piece.start == 0:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw.strip():
                position = offset if is_plain else disk_file.tell()
                yield parse_line(raw, line, read)._replace(bytes_read=position - piece.start)


def parse_line(raw: bytes, line: int, read: ReadRecord) -> DocumentRecord:
    """Parse the document on one line of jsonl."""
    try:
        record = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = f"invalid UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1})"
        return DocumentRecord(None, line, problem)
    except DuplicateKey as error:
        return DocumentRecord(None, line, str(error))
    except (ValueError, RecursionError) as error:
        return DocumentRecord(None, line, f"broken JSON ({error}){fix_hint(raw)}")
    if isinstance(record, list):
        return DocumentRecord(None, line, f"not an object but list{fix_hint(raw)}")
    if not isinstance(record, dict):
        return DocumentRecord(None, line, f"not an object but {type(record).__name__}")
    return read(record, line)


def fix_hint(raw: bytes) -> str:
    """Suggest what to do about a line that is part of a larger JSON file."""
    begin = raw.strip()[:1]
    if begin == b"[":
        return "; a list of JSON: write one object on each line, as jq -c '.[]' FILE does"
    return "; write one object on each line, as jq -c . FILE does" if raw.strip() == b"{" else ""


def text_reader(key: str, keep: Filter | None = None) -> ReadRecord:
    """Make a reader of the text in a field, or at a path of fields (walk_path)."""
    def read(record: Tree, line: int) -> DocumentRecord:
        holder, name = (record, key) if key in record else walk_path(record, key)[-1]
        document = checked_text(holder.get(name), key, line)
        return document if keep is None else keep.apply(record, document)

    return read


def checked_text(text: object, key: str, line: int) -> DocumentRecord:
    """Return the document whose field `key` holds `text`."""
    if text is None:
        return DocumentRecord(None, line, f"no text under {key!r} (see --jsonl-key)")
    if not isinstance(text, str):
        return DocumentRecord(None, line, f"{key!r} holds no text but {type(text).__name__}")
    try:
        text.encode("utf-8")  # JSON can spell half a character ("\ud800"), which no tokenizer accepts
    except UnicodeEncodeError:
        return DocumentRecord(None, line, "a lone surrogate, which is not text")
    return DocumentRecord(text, line, "")


def conversation_reader(chat: ChatFormat, key: str | None, is_table: bool) -> ReadRecord:
    """Make a reader of conversations, rendered by `chat`. `is_table` drops nulls, since a table gives each
    object the union of all keys."""
    def read(record: Tree, line: int) -> DocumentRecord:
        try:
            conversation = read_conversation(without_nulls(record) if is_table else record, key)
            written = chat.write(conversation)
        except BadConversation as error:
            return DocumentRecord(None, line, str(error))
        unread = tuple(f"{name!r} is not read" for name in conversation.unread)
        document = checked_text(written.text, key or "messages", line)
        return document._replace(chat=written._replace(notes=unread + written.notes))

    return read


def seek_line(file: io.BufferedIOBase, start: int) -> int:
    """Move `file` to the first line that begins at byte `start` or later, and return its position."""
    if start == 0:
        return 0
    file.seek(start - 1)
    return start - 1 + len(file.readline())


def read_parquet(piece: DocumentPiece, columns: list[str], read: ReadRecord) -> Iterator[DocumentRecord]:
    """Yield the rows of the piece's row groups, reading only `columns` if there are any."""
    table = open_parquet(piece.path)
    known = table.schema_arrow.names
    wanted: list[str] = []
    for number, name in enumerate(columns):
        column = name if name in known else name.partition(".")[0]  # a path into a column of objects
        if column not in known:
            raise ConfigError(f"{piece.path}: no column {column!r}; it has {', '.join(known)}: "
                              f"choose with --{('jsonl-key', 'score-key')[number]}")
        if column not in wanted:
            wanted.append(column)
    wanted = wanted or known

    row = sum(table.metadata.row_group(group).num_rows for group in range(piece.start))
    for batch in table.iter_batches(PARQUET_ROWS, row_groups=range(piece.start, piece.stop), columns=wanted):
        for values in zip(*batch.columns):
            row += 1
            try:
                yield read({name: value.as_py() for name, value in zip(wanted, values)}, row)
            except UnicodeDecodeError:
                yield DocumentRecord(None, row, "invalid UTF-8")


def read_hf(piece: DocumentPiece, columns: list[str], read: ReadRecord) -> Iterator[DocumentRecord]:
    shard = hf_dataset(piece.path).shard(piece.stop, piece.start)
    numbered_rows = enumerate(shard, 1)
    while True:
        try:
            number, row = next(numbered_rows, (0, None))
        except Exception as error:  # network errors have many classes
            raise ConfigError(f"hf:{piece.path}: {type(error).__name__}: {error}; "
                              "run the same command again to continue") from None
        if row is None:
            return
        yield read(row, number)


def piece_location(piece: DocumentPiece, line: int) -> str:
    """Return the "file:line" of a record.
    Records of a jsonl piece are numbered within it, so count the lines before the piece."""
    if piece.kind == "jsonl" and piece.start:
        with open(piece.path, "rb") as file:
            bytes_left = seek_line(file, piece.start)
            file.seek(0)
            while bytes_left > 0:
                chunk = file.read(min(bytes_left, 1 << 20))
                bytes_left -= len(chunk)
                line += chunk.count(b"\n")
    prefix = "hf:" if piece.kind == "hf" else ""
    return f"{prefix}{piece.path}:{line}"


# ---- compressed files --------------------------------------------------------------------------------------

def open_streams(path: str) -> tuple[io.BufferedReader, io.BufferedIOBase]:
    """Return the file on disk and the stream of its content, which are the same object for a plain file."""
    disk_file = open(path, "rb")
    end = packing(path)
    if end == ".gz":
        return disk_file, gzip.GzipFile(fileobj=disk_file)
    if end == ".bz2":
        return disk_file, bz2.BZ2File(disk_file)
    if end == ".xz":
        return disk_file, lzma.LZMAFile(disk_file)
    if end == ".zst":
        return disk_file, io.BufferedReader(ZstdReader(disk_file), 1 << 20)
    return disk_file, disk_file


class ZstdReader(io.RawIOBase):
    """Reader over all frames of a .zst. Raises EOFError if the last frame is truncated, which zstandard's
    stream_reader does not report, and OSError if the file is not zstd."""

    def __init__(self, disk_file: io.BufferedReader) -> None:
        import zstandard  # only needed for .zst
        self._new_frame = lambda: zstandard.ZstdDecompressor().decompressobj()
        self._zstd_error = zstandard.ZstdError
        self._disk_file = disk_file
        self._frame: zstandard.ZstdDecompressionObj | None = None  # None between two frames
        self._unused = b""  # read but not yet decompressed: start of the next frame
        self._content = memoryview(b"")  # decompressed but not yet returned

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer)
        while not self._content:
            chunk = self._unused or self._disk_file.read(1 << 16)
            if not chunk:
                if self._frame:
                    raise EOFError("the file is truncated")
                return 0
            self._decompress(chunk)

        count = min(len(target), len(self._content))
        target[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _decompress(self, chunk: bytes) -> None:
        self._frame = self._frame or self._new_frame()
        try:
            self._content = memoryview(self._frame.decompress(chunk))
        except self._zstd_error as error:
            raise OSError(f"not zstd: {error}") from None
        self._unused = b""
        if self._frame.eof:
            self._unused = self._frame.unused_data
            self._frame = None
