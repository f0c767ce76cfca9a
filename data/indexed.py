"""Megatron's .bin/.idx, byte for byte, and a sidecar that finds every flipped bit.

PREFIX.bin   token ids, little-endian, no header
PREFIX.idx   header; lengths i32[N] and byte offsets i64[N] of N sequences; bounds i64[D+1] of D documents
PREFIX.json  ours: counts, tokenizer, sha256 of the .idx.  PREFIX.crc: crc32 (u32) of every block of the .bin
PREFIX.tokenizer/  the tokenizer itself

Opening reads the .idx in chunks (structure, then sha256) and never the .bin; a block of the .bin is checked (crc32, ids
below the vocabulary) when the first token of it is asked for. Files made by Megatron have no sidecar and open with the
structural checks alone. Memory: one chunk, and a byte a block. Source: Megatron-LM, core/datasets/indexed_dataset.py.
"""
import bisect
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import struct
import zlib

import numpy as np

from config import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences N, length of the document array D + 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: no token ids
BLOCK = 1 << 18  # bytes under one crc. The first window in a block costs the whole block: so not megabytes
CHUNK = 1 << 18  # entries of the .idx in memory at a time
AGAIN = "make it again with scripts.prepare_data"


class ChecksumError(ConfigError):
    """A data file whose content is not what was written: one line."""
    exit_code = 79


def dtype_of(vocab: int) -> str:
    return "<u2" if vocab < 65500 else "<i4"  # Megatron's rule: i4, never u4


def beside(prefix, end: str) -> pathlib.Path:
    return pathlib.Path(f"{prefix}{end}")


class Indexed:
    """The tokens of PREFIX as one stream, memory-mapped. Ids at or above `vocab` are refused.

    tokens, documents: counts.  meta: the sidecar, {} without one.  identity: sha256 that changes with the content.
    Raises ConfigError, ChecksumError where a checksum fails: one line naming file, offset and the way out."""

    def __init__(self, prefix, vocab: int | None = None):
        self.idx, self.bin = beside(prefix, ".idx"), beside(prefix, ".bin")
        for path in (self.idx, self.bin):
            try:
                open(path, "rb").close()
            except OSError as e:
                raise ConfigError(f"{path}: {e.strerror}; data.path is the name without .bin and .idx") from None
        self._stamps = {path: stamp(path) for path in (self.idx, self.bin)}
        self._open_idx()
        self._open_sidecar(beside(prefix, ".json"), beside(prefix, ".crc"))
        self._map(vocab)
        if vocab is not None and self.meta and self.meta["max_id"] >= vocab:
            self._refuse(self.meta["max_id_at"], self.meta["max_id"])

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _broken(self, offset: int, text: str) -> ConfigError:
        return ConfigError(f"{self.idx}: offset {offset}: {text}; {AGAIN}")

    def _open_idx(self):
        size = self.idx.stat().st_size
        with open(self.idx, "rb") as f:
            head = f.read(HEADER.size)
        if head[:6] == b"TNTIDX":
            raise self._broken(0, "the old TNTIDX format is not read")
        if len(head) < HEADER.size:
            raise self._broken(size, f"ends here, the header alone has {HEADER.size} bytes: empty or truncated")
        magic, version, code, n, d1 = HEADER.unpack(head)
        if magic != MAGIC:
            raise self._broken(0, f"starts with {magic!r}, not {MAGIC!r}: not a Megatron index")
        if version != 1:
            raise self._broken(9, f"version {version}, only 1 is known")
        if code not in DTYPES:
            raise self._broken(17, f"dtype code {code} is not one of {', '.join(map(str, DTYPES))}")
        want = HEADER.size + 12 * n + 8 * d1
        if d1 < 1 or size not in (want, want + n):  # + n: a mode a sequence, of multimodal data
            raise self._broken(18, f"{n} sequences and {d1} bounds make {want} bytes, the file has {size}")
        self.dtype, self.documents, self.sequences = np.dtype(DTYPES[code]), d1 - 1, n
        self._at = (HEADER.size, HEADER.size + 4 * n, HEADER.size + 12 * n)
        self._check_documents()
        total, have = self._check_sequences(), self.bin.stat().st_size
        if have != total:
            raise ConfigError(f"{self.bin}: {have} bytes, {self.idx.name} counts {total}: truncated or grown; {AGAIN}")
        if total == 0:
            raise ConfigError(f"{self.bin}: holds no tokens; {AGAIN}")
        self.tokens = total // self.dtype.itemsize
        idx = np.asarray(np.memmap(self.idx, np.uint8, "r"))
        self._offsets = idx[self._at[1]:self._at[2]].view("<i8")  # [N]: first byte of each sequence
        self._bounds = idx[self._at[2]:self._at[2] + 8 * d1].view("<i8")  # [D + 1]: first sequence of each document

    def _check_sequences(self) -> int:
        """Bytes of all sequences. Offsets must be the running sum of the lengths: so every writer makes them."""
        total = 0
        for i in range(0, self.sequences, CHUNK):
            k = min(CHUNK, self.sequences - i)
            sizes = np.fromfile(self.idx, "<i4", k, offset=self._at[0] + 4 * i).astype(np.int64) * self.dtype.itemsize
            offsets = np.fromfile(self.idx, "<i8", k, offset=self._at[1] + 8 * i)
            begins = total + np.cumsum(sizes) - sizes
            if (bad := sizes < 0).any():
                j = int(bad.argmax())
                raise self._broken(self._at[0] + 4 * (i + j), f"sequence {i + j} has a length below 0")
            if (bad := offsets != begins).any():
                j = int(bad.argmax())
                raise self._broken(self._at[1] + 8 * (i + j), f"sequence {i + j} begins at byte {offsets[j]}, "
                                                              f"but the lengths before it sum to {begins[j]}")
            total = int(begins[-1] + sizes[-1])
        return total

    def _check_documents(self):
        last, at = 0, self._at[2]
        for i in range(0, self.documents + 1, CHUNK):
            bounds = np.fromfile(self.idx, "<i8", min(CHUNK, self.documents + 1 - i), offset=at + 8 * i)
            bad = (np.diff(bounds, prepend=last) < 0) | (bounds > self.sequences)
            bad[0] |= i == 0 and bounds[0] != 0
            if bad.any():
                j = int(bad.argmax())
                raise self._broken(at + 8 * (i + j), f"document {i + j} begins at sequence {bounds[j]}; "
                                                     f"bounds must rise from 0 to {self.sequences}")
            last = int(bounds[-1])
        if last != self.sequences:
            raise self._broken(at + 8 * self.documents, f"documents end at sequence {last}, not {self.sequences}")

    def _open_sidecar(self, path: pathlib.Path, crc: pathlib.Path):
        self.meta, self._crc = read_sidecar(path), None
        digest = file_sha256(self.idx)
        self.identity = hashlib.sha256(f"{digest} {self.tokens}".encode()).hexdigest()
        if not self.meta:
            return
        try:
            self._crc = np.fromfile(crc, "<u4")
        except OSError as e:
            raise ConfigError(f"{crc}: {e.strerror}; restore it, or delete {path} to read unchecked") from None
        found = {self.idx: (digest, "idx_sha256"), crc: (file_sha256(crc), "crc_sha256")}
        for file, (have, key) in found.items():
            if have != self.meta[key]:
                raise ChecksumError(f"{file}: sha256 is not as in {path.name}: damaged or replaced; {AGAIN}")
        self.identity = hashlib.sha256(f"{digest} {self.meta['crc_sha256']}".encode()).hexdigest()

    def _map(self, vocab: int | None, skip: int = 0):
        """Maps the .bin after its first `skip` bytes; plain arrays, for memmap's own scalars are slow."""
        self._raw = np.asarray(np.memmap(self.bin, np.uint8, "r", offset=skip))
        self._ids, self._vocab = self._raw.view(self.dtype), vocab
        self._good = np.zeros(-(-len(self._raw) // BLOCK), bool)  # blocks that have been checked

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, a: int, b: int) -> np.ndarray:  # ids [b - a], in the file's dtype
        """Tokens a to b. Raises ChecksumError naming the block, ConfigError naming document, token and id."""
        size = self.dtype.itemsize
        for k in range(a * size // BLOCK, -(-b * size // BLOCK)):
            if not self._good[k]:
                self._check_block(k)
        return self._ids[a:b]

    def unchanged(self) -> None:
        """Raises ChecksumError where a file was replaced or written to since it was opened: what was read since then, or will be after
        a resume, may be other tokens. (One that was removed is still what was opened.)"""
        for path, was in self._stamps.items():
            if (now := stamp(path)) not in (was, None):
                what = "replaced" if now[0] != was[0] else "written to"
                raise ChecksumError(f"{path}: {what} while the run read it; put back what was there, and start again from the last checkpoint")

    def doc(self, i: int) -> np.ndarray:  # ids [length]
        return self.read(self.start(i), self.start(i + 1))

    def start(self, i: int) -> int:
        """First token of document i; of document `documents`: the end of the stream."""
        s = int(self._bounds[i])
        return self.tokens if s == self.sequences else int(self._offsets[s]) // self.dtype.itemsize

    def document_at(self, token: int) -> int:
        s = bisect.bisect_right(self._offsets, token * self.dtype.itemsize) - 1  # after empty ones at the same offset
        return bisect.bisect_right(self._bounds, s) - 1

    def starts(self, a: int, b: int) -> np.ndarray:  # int64, rising
        """The tokens strictly between a and b that begin a document."""
        inside = range(self.document_at(a) + 1, self.document_at(b - 1) + 1)
        return np.array(sorted({self.start(i) for i in inside}), np.int64)

    def cut(self, part: int, whole: int) -> int:
        """First token of the document that lies part/whole into all documents: where a split begins."""
        return self.start((2 * self.documents * part + whole) // (2 * whole))  # rounded half up

    def _check_block(self, k: int):
        raw = self._raw[k * BLOCK:(k + 1) * BLOCK]
        if self._crc is not None and zlib.crc32(raw) != int(self._crc[k]):
            where = f"block {k} (bytes {k * BLOCK} to {k * BLOCK + len(raw)})"
            raise ChecksumError(f"{self.bin}: {where} fails its crc32: damaged; restore the file or {AGAIN}")
        ids = raw.view(self.dtype)
        if self._vocab is not None and self._crc is None:  # a sidecar has answered this at opening
            worst = int(ids.argmax()) if ids.max() >= self._vocab else int(ids.argmin())
            if not 0 <= ids[worst] < self._vocab:
                self._refuse(k * BLOCK // self.dtype.itemsize + worst, int(ids[worst]))
        self._good[k] = True

    def _refuse(self, token: int, value: int):
        d = self.document_at(token)
        raise ConfigError(f"{self.bin}: document {d}, token {token - self.start(d)}: id {value} is not below the "
                          f"vocabulary of {self._vocab}; raise model.vocab above {value}, or use the data's tokenizer")


def stamp(path) -> tuple[int, int, int] | None:
    """Inode, size and time of the last write; None: there is no such file."""
    try:
        s = pathlib.Path(path).stat()
    except OSError:
        return None
    return s.st_ino, s.st_size, s.st_mtime_ns


def read_sidecar(path) -> dict:
    """The .json, {} where there is none. It covers itself: raises ChecksumError when a byte of it has changed."""
    try:
        text = pathlib.Path(path).read_bytes()
        meta = json.loads(text)
        if sidecar_bytes(meta) == text and meta["format"] == 1 and meta["block"] == BLOCK:
            return meta
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        pass
    raise ChecksumError(f"{path}: its sha256 does not hold: damaged or edited; {AGAIN}, or delete it to read unchecked")


def sidecar_bytes(meta: dict) -> bytes:
    body = {k: v for k, v in meta.items() if k != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def file_sha256(path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# ---- writing ---------------------------------------------------------------------------------------------------------

class Writer:
    """Streams documents to PREFIX.*; an older PREFIX stays whole until `finish`. Memory: one chunk.

    with Writer("out", vocab=1024) as w:
        w.add(ids)                     # one document, its end-of-document id included
        w.finish(tokenizer, text_bytes)
    Raises OSError with the file's name when the disk fails. Killed midway it leaves PREFIX.*.tmp for the next."""

    def __init__(self, prefix, vocab: int):
        self.prefix, self.dtype = pathlib.Path(prefix), np.dtype(dtype_of(vocab))
        self.documents = self.tokens = self.max_id_at = 0
        self.max_id, self._crc, self._crcs = -1, 0, []
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin, self._lengths = open(self._tmp(".bin"), "wb"), open(self._tmp(".len"), "wb+")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for f in (self._bin, self._lengths):
            with naming(f.name):
                f.close()

    def _tmp(self, end: str) -> pathlib.Path:
        return beside(self.prefix, f"{end}.tmp")

    def add(self, ids) -> None:
        self.extend(np.asarray(ids), [len(ids)])

    def extend(self, ids: np.ndarray, lengths) -> None:
        """A stretch of tokens, and the lengths of some documents: by `finish` the two must have come to the same."""
        if len(ids):
            top = int(ids.argmax())
            if ids[top] > self.max_id:
                self.max_id, self.max_id_at = int(ids[top]), self.tokens + top
            raw = memoryview(np.ascontiguousarray(ids, self.dtype)).cast("B")
            with naming(self._bin.name):
                self._bin.write(raw)
            at = self.tokens * self.dtype.itemsize
            self.tokens += len(ids)
            while raw:
                part = raw[:BLOCK - at % BLOCK]
                self._crc, at, raw = zlib.crc32(part, self._crc), at + len(part), raw[len(part):]
                if at % BLOCK == 0:
                    self._crcs.append(self._crc)
                    self._crc = 0
        with naming(self._lengths.name):
            self._lengths.write(np.asarray(lengths, "<i4").tobytes())
        self.documents += len(lengths)

    def finish(self, tokenizer=None, text_bytes: int | None = None, source: str | None = None, at=lambda point: None):
        """Writes the other files, makes all durable, and puts them in place, the .idx last."""
        last = [self._crc] if self.tokens * self.dtype.itemsize % BLOCK else []
        self._write(".crc", np.array(self._crcs + last, "<u4").tobytes())
        self._write_idx()
        meta = {"format": 1, "block": BLOCK, "source": source, "text_bytes": text_bytes, "tokenizer": None,
                "documents": self.documents, "tokens": self.tokens, "max_id": self.max_id, "max_id_at": self.max_id_at,
                "idx_sha256": file_sha256(self._tmp(".idx")), "crc_sha256": file_sha256(self._tmp(".crc"))}
        shutil.rmtree(self._tmp(".tokenizer"), ignore_errors=True)
        if tokenizer is not None:
            meta["tokenizer"] = {k: getattr(tokenizer, k) for k in ("name", "fingerprint", "vocab", "eod")}
            with naming(self._tmp(".tokenizer")):
                self._tmp(".tokenizer").mkdir()
                tokenizer.save(self._tmp(".tokenizer"))
        self._write(".json", sidecar_bytes(meta))
        with naming(self._bin.name):
            sync(self._bin)
        at("prepare.pre_publish")
        beside(self.prefix, ".idx").unlink(missing_ok=True)  # without it nothing opens: no mix of old and new is read
        shutil.rmtree(beside(self.prefix, ".tokenizer"), ignore_errors=True)
        for end in (".tokenizer", ".bin", ".crc", ".json", ".idx"):
            if self._tmp(end).exists():
                os.replace(self._tmp(end), beside(self.prefix, end))
            at(f"prepare.published{end}")
        self._tmp(".len").unlink(missing_ok=True)
        sync_folder(self.prefix.parent)

    def _write(self, end: str, content: bytes):
        with naming(self._tmp(end)), open(self._tmp(end), "wb") as f:
            f.write(content)
            sync(f)

    def _write_idx(self):
        n = self.documents  # one sequence a document
        code = next(c for c, name in DTYPES.items() if np.dtype(name) == self.dtype)
        with naming(self._tmp(".idx")), open(self._tmp(".idx"), "wb") as f:
            f.write(HEADER.pack(MAGIC, 1, code, n, n + 1))
            self._lengths.seek(0)
            while chunk := self._lengths.read(4 * CHUNK):
                f.write(chunk)
            self._lengths.seek(0)
            end = 0
            while chunk := self._lengths.read(4 * CHUNK):
                sizes = np.frombuffer(chunk, "<i4").astype(np.int64) * self.dtype.itemsize
                f.write((end + np.cumsum(sizes) - sizes).astype("<i8").tobytes())
                end += int(sizes.sum())
            if end != self.tokens * self.dtype.itemsize:
                raise ValueError(f"{self.prefix}: lengths sum to {end} bytes, but {self.tokens} tokens were written")
            for i in range(0, n + 1, CHUNK):
                f.write(np.arange(i, min(i + CHUNK, n + 1), dtype="<i8").tobytes())
            sync(f)


# ---- files -----------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def naming(path):
    """A failed write raises OSError without a name, and the one line that the user reads needs it."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


def sync(f) -> None:
    f.flush()
    os.fsync(f.fileno())


def sync_folder(path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
