"""Megatron's .bin/.idx, byte for byte, and a sidecar that finds every flipped bit.

PREFIX.bin   token ids, little-endian, no header
PREFIX.idx   magic, version, dtype, then lengths i32[N], byte offsets i64[N], document bounds i64[D+1]
PREFIX.json  ours: counts, tokenizer, sha256 of the .idx.  PREFIX.crc: crc32 (u32) of every 256 KiB block of the .bin.
PREFIX.tokenizer/  the tokenizer itself

Opening reads the .idx in chunks (structure, then sha256) and never the .bin; a block of the .bin is checked (crc32, ids
below the vocabulary) when the first token of it is asked for. Files made by Megatron have no sidecar and open with the
structural checks alone. Memory: one chunk, one byte a block. Source: Megatron-LM, core/datasets/indexed_dataset.py.
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
BLOCK = 1 << 18  # bytes a crc covers. A window of 8 KiB read at random costs a whole block once, so not Megabytes
CHUNK = 1 << 18  # entries of the .idx held in memory at a time
AGAIN = "make it again with scripts.prepare_data"


class ChecksumError(ConfigError):
    """A data file whose content is not what was written. One line; train.py exits with 79."""


@contextlib.contextmanager
def naming(path):
    """Writes that fail raise OSError without a name; the one line that the user reads needs it."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


def dtype_of(vocab: int) -> str:
    return "<u2" if vocab < 65500 else "<i4"  # Megatron's rule: i4, never u4


class Indexed:
    """Tokens of PREFIX as one stream, memory-mapped. `vocab`: ids at or above it are refused when first touched.

    tokens, documents: counts.  meta: the sidecar, {} without one.  identity: sha256 that changes with the content.
    Raises ConfigError (ChecksumError where a checksum fails): one line naming file, offset and the way out."""

    def __init__(self, prefix, vocab: int | None = None):
        self.prefix = pathlib.Path(prefix)
        self.idx, self.bin = (self.prefix.with_name(self.prefix.name + end) for end in (".idx", ".bin"))
        for path in (self.idx, self.bin):
            try:
                with open(path, "rb"):
                    pass
            except OSError as e:
                raise ConfigError(f"{path}: {e.strerror}; data.path is the name before .bin and .idx") from None
        self._open_idx()
        self._open_sidecar(vocab)
        raw = np.memmap(self.bin, np.uint8, "r")
        self._raw, self._ids = np.asarray(raw), np.asarray(raw).view(self.dtype)  # plain arrays: memmap's scalars are slow
        self._vocab = vocab
        self._good = np.zeros(-(-len(raw) // BLOCK), bool)  # blocks already checked

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _open_idx(self):
        size = self.idx.stat().st_size
        with open(self.idx, "rb") as f:
            head = f.read(HEADER.size)
        if head[:6] == b"TNTIDX":
            raise ConfigError(f"{self.idx}: the old TNTIDX format is not read; {AGAIN}, or convert it with Megatron-LM")
        if len(head) < HEADER.size:
            raise ConfigError(f"{self.idx}: {size} bytes, the header alone has {HEADER.size}: empty or truncated; {AGAIN}")
        magic, version, code, n, d1 = HEADER.unpack(head)
        if magic != MAGIC:
            raise ConfigError(f"{self.idx}: offset 0: starts with {magic!r}, not {MAGIC!r}: not a Megatron index")
        if version != 1:
            raise ConfigError(f"{self.idx}: offset 9: version {version}, only 1 is known; {AGAIN}")
        if code not in DTYPES:
            raise ConfigError(f"{self.idx}: offset 17: dtype code {code} is not one of {', '.join(map(str, DTYPES))}; {AGAIN}")
        want = HEADER.size + 12 * n + 8 * d1
        if d1 < 1 or size not in (want, want + n):  # + n: a mode a sequence, of multimodal data
            raise ConfigError(f"{self.idx}: {size} bytes, but its header (offset 18: {n} sequences, {d1} bounds) asks for {want}; {AGAIN}")
        self.dtype, self.documents, self.sequences = np.dtype(DTYPES[code]), d1 - 1, n
        self._at = (HEADER.size, HEADER.size + 4 * n, HEADER.size + 12 * n)
        total = self._check_sequences()
        self._check_documents()
        have = self.bin.stat().st_size
        if have != total:
            raise ConfigError(f"{self.bin}: {have} bytes, but {self.idx.name} counts {total}: truncated or grown; {AGAIN}")
        if total == 0:
            raise ConfigError(f"{self.bin}: holds no tokens; {AGAIN}")
        self.tokens = total // self.dtype.itemsize
        idx = np.asarray(np.memmap(self.idx, np.uint8, "r"))
        self._offsets = idx[self._at[1]:self._at[2]].view("<i8")  # [N]: byte offset of each sequence
        self._bounds = idx[self._at[2]:self._at[2] + 8 * d1].view("<i8")  # [D + 1]: first sequence of each document

    def _check_sequences(self) -> int:
        """Bytes of all sequences. Offsets must be the running sum of the lengths: that is how every writer makes them."""
        total, (lengths_at, offsets_at, _) = 0, self._at
        for i in range(0, self.sequences, CHUNK):
            k = min(CHUNK, self.sequences - i)
            lengths = np.fromfile(self.idx, "<i4", k, offset=lengths_at + 4 * i).astype(np.int64)
            offsets = np.fromfile(self.idx, "<i8", k, offset=offsets_at + 8 * i)
            ends = total + np.cumsum(lengths) * self.dtype.itemsize
            if (bad := lengths < 0).any():
                j = int(bad.argmax())
                raise ConfigError(f"{self.idx}: offset {lengths_at + 4 * (i + j)}: sequence {i + j} has length {lengths[j]}; {AGAIN}")
            if (bad := offsets != ends - lengths * self.dtype.itemsize).any():
                j = int(bad.argmax())
                raise ConfigError(f"{self.idx}: offset {offsets_at + 8 * (i + j)}: sequence {i + j} starts at byte {offsets[j]}, "
                                  f"the lengths before it (from offset {lengths_at}) sum to {ends[j] - lengths[j] * self.dtype.itemsize}; {AGAIN}")
            total = int(ends[-1])
        return total

    def _check_documents(self):
        last, at = 0, self._at[2]
        for i in range(0, self.documents + 1, CHUNK):
            bounds = np.fromfile(self.idx, "<i8", min(CHUNK, self.documents + 1 - i), offset=at + 8 * i)
            steps = np.diff(bounds, prepend=0 if i == 0 else last)
            bad = (steps < 0) | (bounds > self.sequences)
            bad[0] |= i == 0 and bounds[0] != 0
            if bad.any():
                j = int(bad.argmax())
                raise ConfigError(f"{self.idx}: offset {at + 8 * (i + j)}: document {i + j} starts at sequence {bounds[j]}; bounds must rise from 0 "
                                  f"to {self.sequences}; {AGAIN}")
            last = int(bounds[-1])
        if last != self.sequences:
            raise ConfigError(f"{self.idx}: offset {at + 8 * self.documents}: documents end at sequence {last}, not {self.sequences}; {AGAIN}")

    def _open_sidecar(self, vocab: int | None):
        self.meta, self._crc = read_sidecar(self.prefix), None
        digest = file_sha256(self.idx)
        if not self.meta:
            self.identity = hashlib.sha256(f"{digest} {self.tokens}".encode()).hexdigest()
            return
        if digest != self.meta["idx_sha256"]:
            raise ChecksumError(f"{self.idx}: sha256 is not that of {self.prefix.name}.json: damaged or replaced; {AGAIN}, or restore the file")
        crc = self.prefix.with_name(self.prefix.name + ".crc")
        try:
            self._crc = np.fromfile(crc, "<u4")
        except OSError as e:
            raise ConfigError(f"{crc}: {e.strerror}; restore it, or delete {self.prefix.name}.json to read without checksums") from None
        if hashlib.sha256(self._crc.tobytes()).hexdigest() != self.meta["crc_sha256"]:
            raise ChecksumError(f"{crc}: sha256 is not that of {self.prefix.name}.json: damaged or replaced; {AGAIN}, or restore the file")
        self.identity = hashlib.sha256(f"{digest} {self.meta['crc_sha256']}".encode()).hexdigest()
        if vocab is not None and self.meta["max_id"] >= vocab:
            self._refuse(self.meta["max_id_at"], self.meta["max_id"], vocab)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, a: int, b: int) -> np.ndarray:  # ids [b - a]
        """Tokens a..b of the stream, in the file's dtype. Raises ChecksumError naming the block, ConfigError naming document and id."""
        size = self.dtype.itemsize
        for k in range(a * size // BLOCK, -(-b * size // BLOCK)):
            if not self._good[k]:
                self._check_block(k)
        return self._ids[a:b]

    def doc(self, i: int) -> np.ndarray:  # ids [length]
        return self.read(self.start(i), self.start(i + 1))

    def start(self, i: int) -> int:
        """First token of document i; of document `documents`: the end of the stream."""
        s = int(self._bounds[i])
        return self.tokens if s == self.sequences else int(self._offsets[s]) // self.dtype.itemsize

    def document_at(self, token: int) -> int:
        s = bisect.bisect_right(self._offsets, token * self.dtype.itemsize) - 1  # empty ones share an offset: the last holds it
        return bisect.bisect_right(self._bounds, s) - 1

    def starts(self, a: int, b: int) -> np.ndarray:  # int64, sorted
        """Tokens in (a, b) that begin a document."""
        first, last = self.document_at(a) + 1, self.document_at(b - 1)
        return np.array(sorted({self.start(i) for i in range(first, last + 1)} - {a}), np.int64)

    def cut(self, part: int, whole: int) -> int:
        """First token of the document at part/whole of all documents: where a split begins."""
        return self.start((2 * self.documents * part + whole) // (2 * whole))  # rounded half up

    def _check_block(self, k: int):
        raw = self._raw[k * BLOCK:(k + 1) * BLOCK]
        if self._crc is not None and zlib.crc32(raw) != int(self._crc[k]):
            raise ChecksumError(f"{self.bin}: block {k} (bytes {k * BLOCK} to {k * BLOCK + len(raw)}) fails its crc32; restore the file or {AGAIN}")
        ids = raw.view(self.dtype)
        if self._vocab is not None and not self.meta:  # a sidecar has answered this at opening
            wrong = int(ids.argmax()) if ids.max() >= self._vocab else int(ids.argmin())
            if not 0 <= int(ids[wrong]) < self._vocab:
                self._refuse(k * BLOCK // self.dtype.itemsize + wrong, int(ids[wrong]), self._vocab)
        self._good[k] = True

    def _refuse(self, token: int, value: int, vocab: int):
        d = self.document_at(token)
        raise ConfigError(f"{self.bin}: document {d}, token {token - self.start(d)}: id {value} is not below the vocabulary of {vocab}; "
                          f"set model.vocab to {value + 1} or more, or use the data's own tokenizer")


def read_sidecar(prefix) -> dict:
    """PREFIX.json, {} where there is none. Raises ChecksumError: it covers itself."""
    path = pathlib.Path(f"{prefix}.json")
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    try:
        meta = json.loads(text)
        if sidecar_bytes(meta) == text:
            return meta
    except (ValueError, RecursionError, TypeError, AttributeError):
        pass
    raise ChecksumError(f"{path}: damaged or edited by hand (its sha256 does not hold); {AGAIN}, or delete it to read without checksums")


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
    """Streams documents to PREFIX.*; nothing of an older PREFIX is touched before `finish`. Memory: one chunk.

    with Writer("out", vocab=1024) as w:
        w.add(ids)                     # one document, end-of-document id included
        w.finish(tokenizer, text_bytes)
    Raises OSError with the file's name when the disk fails; a run killed midway leaves only PREFIX.*.tmp."""

    def __init__(self, prefix, vocab: int):
        self.prefix, self.dtype = pathlib.Path(prefix), np.dtype(dtype_of(vocab))
        self.documents = self.tokens = 0
        self.max_id, self.max_id_at = -1, 0
        self._crc, self._crcs = 0, []
        with naming(self.prefix):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._tmp(".bin"), "wb")
            self._lengths = open(self._tmp(".len"), "wb+")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for f, end in ((self._bin, ".bin"), (self._lengths, ".len")):
            with naming(self._tmp(end)):
                f.close()

    def _tmp(self, end: str) -> pathlib.Path:
        return self.prefix.with_name(f"{self.prefix.name}{end}.tmp")

    def add(self, ids) -> None:
        self.extend(np.asarray(ids), [len(ids)])

    def extend(self, ids: np.ndarray, lengths) -> None:
        """Any stretch of tokens, and the lengths of the documents that end in it: in the end the two must agree."""
        if len(ids):
            top = int(np.argmax(ids))
            if int(ids[top]) > self.max_id:
                self.max_id, self.max_id_at = int(ids[top]), self.tokens + top
            raw = memoryview(np.ascontiguousarray(ids, self.dtype)).cast("B")
            with naming(self._tmp(".bin")):
                self._bin.write(raw)
            done = self.tokens * self.dtype.itemsize
            while raw:
                room = BLOCK - done % BLOCK
                self._crc, done, raw = zlib.crc32(raw[:room], self._crc), done + len(raw[:room]), raw[room:]
                if done % BLOCK == 0:
                    self._crcs.append(self._crc)
                    self._crc = 0
            self.tokens += len(ids)
        lengths = np.asarray(lengths, "<i4")
        with naming(self._tmp(".len")):
            self._lengths.write(lengths.tobytes())
        self.documents += len(lengths)

    def finish(self, tokenizer=None, text_bytes: int | None = None, source: str | None = None, at=lambda point: None) -> None:
        """Writes .crc, .json, .idx and .tokenizer/, makes all durable, and puts them in place, the .idx last."""
        tail = [self._crc] if self.tokens * self.dtype.itemsize % BLOCK else []
        crcs = np.array(self._crcs + tail, "<u4").tobytes()
        self._write(".crc", crcs)
        self._write_idx()
        meta = {"format": 1, "source": source, "documents": self.documents, "tokens": self.tokens, "text_bytes": text_bytes,
                "max_id": self.max_id, "max_id_at": self.max_id_at, "block": BLOCK, "crc_sha256": hashlib.sha256(crcs).hexdigest(),
                "idx_sha256": file_sha256(self._tmp(".idx")), "tokenizer": None}
        shutil.rmtree(self._tmp(".tokenizer"), ignore_errors=True)
        if tokenizer is not None:
            meta["tokenizer"] = {k: getattr(tokenizer, k) for k in ("name", "fingerprint", "vocab", "eod")}
            with naming(self._tmp(".tokenizer")):
                self._tmp(".tokenizer").mkdir()
                tokenizer.save(self._tmp(".tokenizer"))
        self._write(".json", sidecar_bytes(meta))
        with naming(self._tmp(".bin")):
            sync(self._bin)
        at("prepare.pre_publish")
        final = {end: self.prefix.with_name(self.prefix.name + end) for end in (".tokenizer", ".bin", ".crc", ".json", ".idx")}
        final[".idx"].unlink(missing_ok=True)  # without it there is no data set: no mix of two can be read in between
        shutil.rmtree(final[".tokenizer"], ignore_errors=True)
        for end, path in final.items():
            if self._tmp(end).exists():
                os.replace(self._tmp(end), path)
            at(f"prepare.published{end}")
        self._tmp(".len").unlink(missing_ok=True)
        sync_folder(self.prefix.parent)

    def _write(self, end: str, content: bytes):
        with naming(self._tmp(end)), open(self._tmp(end), "wb") as f:
            f.write(content)
            sync(f)

    def _write_idx(self):
        with naming(self._tmp(".idx")), open(self._tmp(".idx"), "wb") as f:
            n = self.documents  # one sequence a document
            code = next(c for c, name in DTYPES.items() if np.dtype(name) == self.dtype)
            f.write(HEADER.pack(MAGIC, 1, code, n, n + 1))
            self._lengths.seek(0)
            while chunk := self._lengths.read(4 * CHUNK):
                f.write(chunk)
            self._lengths.seek(0)
            end = 0
            while chunk := self._lengths.read(4 * CHUNK):
                ends = end + np.cumsum(np.frombuffer(chunk, "<i4").astype(np.int64)) * self.dtype.itemsize
                f.write(np.concatenate([[end], ends[:-1]]).astype("<i8").tobytes())
                end = int(ends[-1])
            if end != self.tokens * self.dtype.itemsize:
                raise ValueError(f"{self.prefix}: lengths sum to {end} bytes, {self.tokens} tokens were written")
            for i in range(0, n + 1, CHUNK):
                f.write(np.arange(i, min(i + CHUNK, n + 1), dtype="<i8").tobytes())
            sync(f)


def sync(f) -> None:
    f.flush()
    os.fsync(f.fileno())


def sync_folder(path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
