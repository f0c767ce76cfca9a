"""Token files without an index, recognized by their first bytes:

    NumPy's .npy            a header with dtype and shape, then ids of 8 to 64 bits
    modded-nanogpt, llm.c   a header of 256 x i32 (magic, version, number of tokens, zeros), then ids whose
                            width follows from the magic: 20240520 (GPT-2) 16 bits, 20240801 (Llama 3) 32 bits
    nanoGPT's .bin          ids of 16 bits, nothing else

The last has no header. It is read as 16-bit ids only if the vocabulary fits into them, and if the file does
not look like wider ids, text or another header; otherwise data.dtype must say what it is.

Documents are separated by end-of-document ids, which are only searched for when needed. There are no
checksums; the ids of some blocks are compared with the vocabulary at opening, those of every block at its
first read.
Sources: github.com/karpathy/nanoGPT, github.com/karpathy/llm.c, github.com/KellerJordan/modded-nanogpt.
"""
import codecs
import hashlib
import os
import pathlib
from typing import NamedTuple

import numpy as np

from config import ConfigError
from data.blocks import BLOCK
from data.contract import WIDEST_U16, TokenizerContract
from data.indexed import IndexedDataset, file_stamp

ENDS = (".bin", ".npy")
NPY_MAGIC = b"\x93NUMPY"
SHARD_HEADER_BYTES = 1024
GPT2_MAGIC = 20240520
GPT2_EOD = 50256  # shards with this magic hold GPT-2 ids by definition
SHARDS = {GPT2_MAGIC: (1, "<u2"), 20240801: (7, "<u4")}  # {magic: (version, dtype of the ids)}
OTHER_FILES = {  # {first bytes: file type}
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip (also torch.save's and .npz)",
    b"PAR1": "parquet",
    b"MMIDIDX": "Megatron's .idx",
}
PROBE = 1 << 20  # bytes of each end covered by the identity; also tokens searched for the next document
WIDTH_SAMPLE = 1 << 16  # ids read at each of three places to detect the width in a file without a header
LEADING = 16  # numbers of a header before its zeros, at most
CONTROL_BYTES = bytes({*range(32)} - set(b"\t\n\v\f\r\x1b"))  # never in text
SMALL = 16  # upper halves of wide ids are below it, if the vocabulary is under a million


class RawLayout(NamedTuple):
    """Position and dtype of the ids in a file."""
    dtype: np.dtype
    header_bytes: int
    eod: int | None = None  # if the format itself defines which id ends a document


class RawShards(IndexedDataset):
    """One file of ids as a token stream.

    vocab: ids are below it. eod: the id that ends a document, if known. stated: data.dtype. ids: number of
    ids of the tokenizer that made the file, which determines their width; defaults to vocab.

    `documents` is 0, since their number is unknown. Raises ConfigError if it is not a file of ids, or if
    their width cannot be determined.
    """

    def __init__(self, path: pathlib.Path | str, vocab: int | None = None, eod: int | None = None, *,
                 stated: str | None = None, ids: int | None = None) -> None:
        self.bin = pathlib.Path(path)
        self.documents = 0
        self.meta = {}
        self.loss_mask = None
        self._crc = None
        self._stamps = {self.bin: file_stamp(self.bin)}

        layout = layout_of(self.bin, stated, vocab if ids is None else ids)
        size = self.bin.stat().st_size
        self.dtype = layout.dtype
        self.tokens = (size - layout.header_bytes) // self.dtype.itemsize
        self._eod = layout.eod if eod is None else eod

        self._map_bin(vocab, layout.header_bytes)
        self._probe_ids()
        parts = [str(size).encode(), self._raw[:PROBE].tobytes(), self._raw[-PROBE:].tobytes()]
        if self.dtype != np.dtype("<u2"):
            parts.append(self.dtype.str.encode())
        # of both ends only: reading the whole file would take minutes
        self.identity = hashlib.sha256(b"".join(parts)).hexdigest()

    def document_starts(self, first: int, stop: int) -> np.ndarray:  # int64, rising
        """Return the tokens strictly between `first` and `stop` that begin a document. Raises ConfigError if
        the end-of-document id is unknown."""
        if self._eod is None:
            raise ConfigError(f"{self.bin}: data.doc_mask needs to know how documents end; "
                              "give data.tokenizer")
        return first + 1 + np.flatnonzero(self.read(first, stop - 1) == self._eod)

    def split_point(self, part: int, whole: int) -> int:
        """Return the first document start at or after part/whole of the tokens, or that token itself if none
        starts within PROBE tokens, or if the end-of-document id is unknown."""
        token = self.tokens * part // whole
        if token in (0, self.tokens) or self._eod is None:
            return token
        starts = self.document_starts(token - 1, min(token + PROBE, self.tokens))
        return int(starts[0]) if len(starts) else token

    def check_ends(self, tok: TokenizerContract | None) -> None:
        """Raise ConfigError if no block probed at opening contains the tokenizer's end-of-document id."""
        if tok is None:
            return
        starts = 0
        for block in self._probed_blocks():
            ids = self._raw[block * BLOCK:(block + 1) * BLOCK].view(self.dtype)
            if (ids == tok.end.id).any():
                return
            starts += 0 if tok.start is None else int((ids == tok.start.id).sum())
        hint = f" (its start token, {tok.start}, occurs {starts:,} times)" if starts else ""
        raise ConfigError(f"{self.bin}: data.doc_mask finds no end of a document, {tok.end}, in the ids that "
                          f"are looked at; name the token that separates documents in data.eod{hint}, or set "
                          "data.doc_mask false")

    def _refuse_id(self, token: int, value: int) -> None:
        raise ConfigError(f"{self.bin}: token {token}: {self._of_vocabulary(value)}")


def is_raw_file(path: str) -> bool:
    """Return whether a path names a file of ids without an index."""
    return path.endswith(ENDS) and os.path.isfile(path) and not os.path.exists(f"{path[:-4]}.idx")


# ---- what a file is ----------------------------------------------------------------------------------------

def layout_of(path: pathlib.Path, stated: str | None, ids: int | None) -> RawLayout:
    """Detect the layout from the first bytes of a file. `stated` is data.dtype, `ids` the number of the
    tokenizer's ids if known. Raises ConfigError for another kind of file, or if the width of the ids cannot
    be determined."""
    with open(path, "rb") as file:
        start = file.read(12)
    magic, version = np.frombuffer(start[:8].ljust(8, b"\0"), "<i4").tolist()
    if start.startswith(NPY_MAGIC):
        layout = npy_layout(path)
    elif magic in SHARDS:
        layout = shard_layout(path, magic, version)
    else:
        return headerless_layout(path, start, stated, ids)
    if stated is not None and np.dtype(stated) != layout.dtype:
        raise ConfigError(f"data.dtype: {stated} is asked for, and the header of {path} says "
                          f"{layout.dtype.name}; leave it out")
    return layout


def npy_layout(path: pathlib.Path) -> RawLayout:
    """Return the layout of a NumPy file. Raises ConfigError unless it holds one row of integers."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:  # an object array, or a file shorter than its header says
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}: {path.stat().st_size} bytes are not the array that its header names "
                          f"({reason}): truncated or of another kind; restore it") from None
    if array.dtype.kind not in "iu" or array.dtype.newbyteorder("<") != array.dtype:
        raise ConfigError(f"{path}: an array of {array.dtype.name} ({array.dtype.str}) holds no ids; save "
                          "little-endian whole numbers, such as ids.astype('<u2')")
    if array.ndim != 1 or not len(array):
        raise ConfigError(f"{path}: an array of shape {array.shape}, where one row of ids is expected; save "
                          "ids.reshape(-1)")
    return RawLayout(array.dtype, array.offset)


def shard_layout(path: pathlib.Path, magic: int, version: int) -> RawLayout:
    """Return the layout of a shard of llm.c or modded-nanogpt.
    Raises ConfigError if its size does not match."""
    known_version, dtype = SHARDS[magic]
    if version != known_version:
        raise ConfigError(f"{path}: begins as a shard of llm.c ({magic}), but of version {version}, where "
                          f"only {known_version} is known; write it again")
    layout = RawLayout(np.dtype(dtype), SHARD_HEADER_BYTES, GPT2_EOD if magic == GPT2_MAGIC else None)
    count = int(np.fromfile(path, "<i4", 3)[2]) if path.stat().st_size >= 12 else 0
    check_size(path, layout, count)
    return layout


def headerless_layout(path: pathlib.Path, start: bytes, stated: str | None, ids: int | None) -> RawLayout:
    """Return the layout of a file that begins with ids. Raises ConfigError like layout_of."""
    state = "state it with data.dtype uint16, uint32 or uint64"
    if stated is None:
        for magic, kind in OTHER_FILES.items():
            if start.startswith(magic):
                raise ConfigError(f"{path}: looks like a file of {kind}, not of ids; unpack it, or make ids "
                                  "of it with scripts.prepare_data")
        if ids is not None and ids > WIDEST_U16:
            raise ConfigError(f"{path}: has no header that tells the width of its ids, and a vocabulary of "
                              f"{ids:,} does not fit into 16 bits; {state}")
        check_beginning(path)
    layout = RawLayout(np.dtype(stated or "<u2"), 0)
    check_size(path, layout, None)
    width = 16 if stated else width_shown(path)
    if width > 16:
        raise ConfigError(f"{path}: without a header, reads as ids of {width} bits, not of 16: only every "
                          f"{'second' if width == 32 else 'fourth'} number is not small; {state}")
    return layout


def check_beginning(path: pathlib.Path) -> None:
    """Raise ConfigError if a file begins like text, or with an unknown header of the same size as those in
    SHARDS."""
    with open(path, "rb") as file:
        start = file.read(SHARD_HEADER_BYTES)
    numbers = np.frombuffer(start[:len(start) // 4 * 4], "<i4")
    if len(start) == SHARD_HEADER_BYTES and numbers[:LEADING].any() and not numbers[LEADING:].any():
        said = ", ".join(map(str, numbers[:4]))
        raise ConfigError(f"{path}: begins with an unknown header ({said} ... and zeros); cut "
                          "it off, or if these are ids state it with data.dtype uint16")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return
    if len(start) == SHARD_HEADER_BYTES and start.translate(None, CONTROL_BYTES) == start:
        raise ConfigError(f"{path}: looks like text, not ids; make ids of it with scripts.prepare_data, or "
                          "if it holds ids state it with data.dtype uint16")


def check_size(path: pathlib.Path, layout: RawLayout, count: int | None) -> None:
    """Raise ConfigError unless a file holds whole ids, `count` of them if known."""
    size = path.stat().st_size
    tokens, rest = divmod(size - layout.header_bytes, layout.dtype.itemsize)
    if rest or tokens < 1 or (count is not None and tokens != count):
        expected = "whole" if count is None else f"a shard of {count}"
        raise ConfigError(f"{path}: {size} bytes are not {expected} {layout.dtype.name} ids: "
                          "truncated, empty or of another format; restore it")


def width_shown(path: pathlib.Path) -> int:
    """Return the width in bits that a file's ids appear to have when read as 16-bit numbers: with wider ids,
    every second number, or three in four, are small. Reads three places of the file."""
    count = path.stat().st_size // 8  # groups of four
    groups = min(count, WIDTH_SAMPLE // 4)
    largest = np.zeros(4, int)
    for part in range(3):
        first = (count - groups) * part // 2
        sample = np.fromfile(path, "<u2", 4 * groups, offset=8 * first)
        if len(sample):
            largest = np.maximum(largest, sample.reshape(-1, 4).max(0))
    is_large = (largest >= SMALL).tolist()
    if groups < SMALL:  # too few to decide
        return 16
    if sum(is_large) == 1:
        return 64
    return 32 if is_large in ([True, False, True, False], [False, True, False, True]) else 16
