"""Megatron-LM's .bin/.idx format, byte for byte, with sidecar files that detect any flipped bit.

    PREFIX.bin         token ids, little-endian, no header
    PREFIX.idx         header; length i32[N] and byte offset i64[N] of each of N sequences; first sequence
                       i64[D + 1] of each of D documents ("bounds")
    PREFIX.json        not Megatron's: counts, tokenizer, sha256 of the .idx and the .crc
    PREFIX.crc         not Megatron's: crc32 (u32) of each block of the .bin
    PREFIX.tokenizer/  not Megatron's: the tokenizer itself
    PREFIX.mask        not Megatron's: which tokens the loss counts, if not all do (loss_mask.py)

Opening reads the .idx in chunks (structure, then sha256) and nothing of the .bin. The first read of a .bin
block verifies it: its crc32, and that ids are below the vocabulary. Files written by Megatron-LM have no
sidecars, so only their structure is checked. Memory: one chunk, and one byte per block.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
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
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple

import numpy as np

from config import ConfigError, Tree
from data.blocks import AGAIN, BLOCK, BlockChecksums, ChecksumError
from data.contract import FileContract, get_dtype
from data.loss_mask import LossMask, LossMaskBits
from data.tokenizer import Tokenizer

FILE_ENDS = (".idx", ".bin", ".json", ".crc", ".mask", ".mask.crc")  # files that a data set may have
MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences N, number of bounds D + 1
VERSION_OFFSET, DTYPE_OFFSET, COUNTS_OFFSET = 9, 17, 18  # byte offsets of header fields
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, not token ids
LENGTH_BYTES, OFFSET_BYTES, BOUND_BYTES = 4, 8, 8  # size of one entry in each table of the .idx
CHUNK = 1 << 18  # entries of an .idx table in memory at a time
LARGEST_VOCAB = 1 << 24  # above any real one; larger ids mean a wrong dtype
SIDECAR_KEYS = (b'"crc_sha256"', b'"idx_sha256"', b'"max_id_at"')  # present in no other file
SIDECAR_HEAD = 1 << 12  # bytes within which they appear
PROBED_BLOCKS = 64  # compared with the vocabulary when opening a file without a .json


def sibling_file(prefix: pathlib.Path | str, end: str) -> pathlib.Path:
    return pathlib.Path(f"{prefix}{end}")


class IndexedDataset:
    """The tokens of PREFIX as one memory-mapped stream. Rejects ids that are not below `vocab`.

    tokens, documents, sequences: counts.
    probed: (blocks compared with the vocabulary at opening, all blocks), or None if the .json states the
    largest id.
    meta: the content of the .json, or {} if it is missing.
    loss_mask: which tokens the loss counts, or None if it counts all of them.
    identity: a sha256 that changes with the content.

    Raises ConfigError, or ChecksumError if a checksum does not match: one line with file, offset and a fix.
    """

    def __init__(self, prefix: pathlib.Path | str, vocab: int | None = None) -> None:
        self.idx = sibling_file(prefix, ".idx")
        self.bin = sibling_file(prefix, ".bin")
        for path in (self.idx, self.bin):
            try:
                open(path, "rb").close()
            except OSError as error:
                message = (f"{path}: {error.strerror}; data.path is the name without .bin and .idx of what "
                           "python -m scripts.prepare_data made")
                raise ConfigError(message) from None
        self._stamps = {path: file_stamp(path) for path in (self.idx, self.bin)}

        self._open_idx()
        self._open_sidecar(sibling_file(prefix, ".json"), sibling_file(prefix, ".crc"))
        self._open_loss_mask(sibling_file(prefix, ".mask"), sibling_file(prefix, ".mask.crc"))
        self._map_bin(vocab)
        if vocab is not None and self.meta and self.meta["max_id"] >= vocab:
            self._refuse_id(self.meta["max_id_at"], self.meta["max_id"])
        self._probe_ids()

    # ---- opening -------------------------------------------------------------------------------------------

    def _idx_error(self, offset: int, text: str) -> ConfigError:
        return ConfigError(f"{self.idx}: offset {offset}: {text}; {AGAIN}")

    def _open_idx(self) -> None:
        num_bounds = self._read_header()
        self._check_bounds()
        bin_bytes = self._check_sequences()

        found_bytes = self.bin.stat().st_size
        if found_bytes != bin_bytes:
            raise ConfigError(f"{self.bin}: {found_bytes} bytes, {self.idx.name} counts {bin_bytes}: "
                              f"truncated or grown; {AGAIN}")
        if bin_bytes == 0:
            raise ConfigError(f"{self.bin}: holds no tokens; {AGAIN}")
        self.tokens = bin_bytes // self.dtype.itemsize

        # plain arrays: scalars of a np.memmap are slow
        idx = np.asarray(np.memmap(self.idx, np.uint8, "r"))
        bounds_end = self._bounds_begin + BOUND_BYTES * num_bounds
        self._offsets = idx[self._offsets_begin:self._bounds_begin].view("<i8")  # [N], in bytes
        self._bounds = idx[self._bounds_begin:bounds_end].view("<i8")  # [D + 1], in sequences

    def _read_header(self) -> int:
        """Check the header and the size of the .idx. Return the number of bounds."""
        size = self.idx.stat().st_size
        with open(self.idx, "rb") as file:
            header = file.read(HEADER.size)
        if header.startswith(OLD_MAGIC):
            raise self._idx_error(0, "the old TNTIDX format is not read")
        if len(header) < HEADER.size:
            raise self._idx_error(size, f"ends here, the header alone has {HEADER.size} bytes: "
                                        "empty or truncated")

        magic, version, dtype_code, num_sequences, num_bounds = HEADER.unpack(header)
        if magic != MAGIC:
            raise self._idx_error(0, f"starts with {magic!r}, not {MAGIC!r}: not a Megatron index")
        if version != 1:
            raise self._idx_error(VERSION_OFFSET, f"version {version}, only 1 is known")
        if dtype_code not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise self._idx_error(DTYPE_OFFSET, f"dtype code {dtype_code} is not one of {known}")

        self._lengths_begin = HEADER.size
        self._offsets_begin = self._lengths_begin + LENGTH_BYTES * num_sequences
        self._bounds_begin = self._offsets_begin + OFFSET_BYTES * num_sequences
        expected = self._bounds_begin + BOUND_BYTES * num_bounds
        with_modes = expected + num_sequences  # multimodal data has one more byte per sequence
        if num_bounds < 1 or size not in (expected, with_modes):
            raise self._idx_error(COUNTS_OFFSET, f"{num_sequences} sequences and {num_bounds} bounds make "
                                                 f"{expected} bytes, the file has {size}")
        self.dtype = np.dtype(DTYPES[dtype_code])
        self.sequences = num_sequences
        self.documents = num_bounds - 1
        return num_bounds

    def _check_bounds(self) -> None:
        """Raise ConfigError unless the document bounds rise from 0 to the number of sequences."""
        previous = 0
        for begin in range(0, self.documents + 1, CHUNK):
            count = min(CHUNK, self.documents + 1 - begin)
            bounds = np.fromfile(self.idx, "<i8", count, offset=self._bounds_begin + BOUND_BYTES * begin)
            is_bad = (np.diff(bounds, prepend=previous) < 0) | (bounds > self.sequences)
            is_bad[0] |= begin == 0 and bounds[0] != 0
            if is_bad.any():
                first = int(is_bad.argmax())
                document = begin + first
                raise self._idx_error(self._bounds_begin + BOUND_BYTES * document,
                                      f"document {document} begins at sequence {bounds[first]}; "
                                      f"bounds must rise from 0 to {self.sequences}")
            previous = int(bounds[-1])
        if previous != self.sequences:
            raise self._idx_error(self._bounds_begin + BOUND_BYTES * self.documents,
                                  f"documents end at sequence {previous}, not {self.sequences}")

    def _check_sequences(self) -> int:
        """Return the size of all sequences in bytes. Raises ConfigError unless each offset is the sum of the
        preceding lengths, as in every known writer."""
        total = 0
        for begin in range(0, self.sequences, CHUNK):
            count = min(CHUNK, self.sequences - begin)
            lengths = np.fromfile(self.idx, "<i4", count, offset=self._lengths_begin + LENGTH_BYTES * begin)
            offsets = np.fromfile(self.idx, "<i8", count, offset=self._offsets_begin + OFFSET_BYTES * begin)
            sizes = lengths.astype(np.int64) * self.dtype.itemsize
            expected = total + np.cumsum(sizes) - sizes

            is_negative = sizes < 0
            if is_negative.any():
                sequence = begin + int(is_negative.argmax())
                raise self._idx_error(self._lengths_begin + LENGTH_BYTES * sequence,
                                      f"sequence {sequence} has a length below 0")
            is_wrong = offsets != expected
            if is_wrong.any():
                first = int(is_wrong.argmax())
                sequence = begin + first
                raise self._idx_error(self._offsets_begin + OFFSET_BYTES * sequence,
                                      f"sequence {sequence} begins at byte {offsets[first]}, "
                                      f"but the lengths before it sum to {expected[first]}")
            total = int(expected[-1] + sizes[-1])
        return total

    def _open_sidecar(self, json_path: pathlib.Path, crc_path: pathlib.Path) -> None:
        """Read the .json and the .crc, if present, and check the .idx against them."""
        self.meta: Tree = read_sidecar(json_path)
        self._crc: np.ndarray | None = None  # one per block
        idx_digest = file_sha256(self.idx)
        if not self.meta:
            self.identity = text_sha256(f"{idx_digest} {self.tokens}")
            return

        try:
            self._crc = np.fromfile(crc_path, "<u4")
        except OSError as error:
            message = f"{crc_path}: {error.strerror}; restore it, or delete {json_path} to read unchecked"
            raise ConfigError(message) from None
        digests = {self.idx: (idx_digest, "idx_sha256"), crc_path: (file_sha256(crc_path), "crc_sha256")}
        for path, (digest, key) in digests.items():
            if digest != self.meta[key]:
                raise ChecksumError(f"{path}: sha256 differs from that in {json_path.name}: "
                                    f"damaged or replaced; {AGAIN}")
        self.identity = text_sha256(f"{idx_digest} {self.meta['crc_sha256']}")

    def _open_loss_mask(self, mask_path: pathlib.Path, crc_path: pathlib.Path) -> None:
        """Open the .mask, if present. The .json says whether it must be."""
        self.loss_mask: LossMask | None = None
        is_named = "mask_crc_sha256" in self.meta
        if not is_named and (self.meta or not mask_path.exists()):
            return

        crc: np.ndarray | None = None
        if is_named:
            try:
                crc = np.fromfile(crc_path, "<u4")
                digest = file_sha256(crc_path)
            except OSError as error:
                raise ConfigError(f"{crc_path}: {error.strerror}; restore it, or {AGAIN} --chat") from None
            if digest != self.meta["mask_crc_sha256"]:
                raise ChecksumError(f"{crc_path}: sha256 differs from that in the .json beside it: "
                                    f"damaged or replaced; {AGAIN} --chat")
        self.loss_mask = LossMask(mask_path, self.tokens, crc)
        self._stamps[mask_path] = file_stamp(mask_path)
        mask_digest = self.meta["mask_crc_sha256"] if is_named else file_sha256(mask_path)
        self.identity = text_sha256(f"{self.identity} {mask_digest}")

    def _map_bin(self, vocab: int | None, header_bytes: int = 0) -> None:
        """Map the .bin without its first `header_bytes`.
        Uses plain arrays: scalars of a np.memmap are slow."""
        self._vocab = vocab
        self._bin_file = open(self.bin, "rb")  # keeps the mapped file, even if the name is reused
        self._bin_bytes = os.fstat(self._bin_file.fileno()).st_size
        self._raw = np.asarray(np.memmap(self._bin_file, np.uint8, "r", offset=header_bytes))
        self._token_ids = self._raw.view(self.dtype)
        num_blocks = -(-len(self._raw) // BLOCK)  # rounded up
        self._block_is_checked = np.zeros(num_blocks, bool)

    def _probe_ids(self) -> None:
        """Compare ids with the vocabulary in evenly spaced blocks, or in all if there are few, since a file
        without a .json does not state its ids. Raises ConfigError naming position and id."""
        self.probed: tuple[int, int] | None = None
        if self.meta or self._vocab is None:
            return
        chosen = self._probed_blocks()
        for block in chosen:
            self._check_block(block)
        self.probed = len(chosen), len(self._block_is_checked)

    def _probed_blocks(self) -> list[int]:
        whole = len(self._block_is_checked)
        return np.unique(np.linspace(0, whole - 1, min(whole, PROBED_BLOCKS)).round().astype(int)).tolist()

    @property
    def contract(self) -> FileContract:
        """The ids in the files, as declared there."""
        return FileContract(str(self.bin), self.dtype, self.documents, self.meta.get("tokenizer"))

    # ---- reading -------------------------------------------------------------------------------------------

    def read(self, first: int, stop: int) -> np.ndarray:  # [stop - first], in the file's dtype
        """Read the ids of the tokens [first, stop). Raises ChecksumError naming the block, or ConfigError
        naming document, token and id."""
        self._check_size()
        first_byte = first * self.dtype.itemsize
        stop_byte = stop * self.dtype.itemsize
        for block in range(first_byte // BLOCK, -(-stop_byte // BLOCK)):
            if not self._block_is_checked[block]:
                self._check_block(block)
        return self._token_ids[first:stop]

    def peek(self, places: np.ndarray) -> np.ndarray:  # int64 [n] -> [n], in the file's dtype
        """Return the ids at these positions unchecked: whatever they select is checked when it is read."""
        return self._token_ids[places]

    def _check_size(self) -> None:
        """Raise ChecksumError if the .bin was truncated: reading a missing page would kill with SIGBUS."""
        size = os.fstat(self._bin_file.fileno()).st_size
        if size < self._bin_bytes:
            raise ChecksumError(f"{self.bin}: truncated from {self._bin_bytes} to {size} bytes while the run "
                                "read it; restore the original file, and resume from the last checkpoint")

    def counted(self, first: int, stop: int) -> np.ndarray | None:  # bool [stop - first]
        """Return whether the loss counts each of the tokens [first, stop), or None if it counts all. Raises
        ChecksumError naming the block."""
        return None if self.loss_mask is None else self.loss_mask.read(first, stop)

    def check_unchanged(self) -> None:
        """Raise ChecksumError if a file was replaced or written to since it was opened: tokens read since
        then, or after a resume, may differ. A deleted file is harmless, since the mapping keeps its
        content."""
        for path, opened in self._stamps.items():
            now = file_stamp(path)
            if now is None or now == opened:
                continue
            same_file = opened is not None and now.inode == opened.inode
            raise ChecksumError(f"{path}: {'written to' if same_file else 'replaced'} while the run read it; "
                                "restore the original file, and start again from the last checkpoint")

    def document(self, number: int) -> np.ndarray:  # ids [length]
        """Return the ids of one document."""
        return self.read(self.document_start(number), self.document_start(number + 1))

    def document_start(self, number: int) -> int:
        """Return the first token of a document, or the end of the stream if `number` = documents."""
        sequence = int(self._bounds[number])
        if sequence == self.sequences:
            return self.tokens
        return int(self._offsets[sequence]) // self.dtype.itemsize

    def document_firsts(self, numbers: np.ndarray) -> np.ndarray:  # int64 [n] -> int64 [n]
        """Return the first token of each of these documents."""
        sequences = self._bounds[numbers]
        offsets = self._offsets[np.minimum(sequences, self.sequences - 1)]
        return np.where(sequences == self.sequences, self.tokens, offsets // self.dtype.itemsize)

    def document_at(self, token: int) -> int:
        """Return the document that contains a token; empty documents contain none."""
        # bisect_right skips empty sequences and documents, which begin at the same place
        sequence = bisect.bisect_right(self._offsets, token * self.dtype.itemsize) - 1
        return bisect.bisect_right(self._bounds, sequence) - 1

    def document_starts(self, first: int, stop: int) -> np.ndarray:  # int64, rising
        """Return the tokens strictly between `first` and `stop` that begin a document."""
        first_document = self.document_at(first) + 1  # the first that can begin after `first`
        last_document = self.document_at(stop - 1)
        sequences = self._bounds[first_document:last_document + 1]
        # unique, because an empty document begins where the next one does
        return np.unique(self._offsets[sequences]) // self.dtype.itemsize

    def split_point(self, part: int, whole: int) -> int:
        """Return the first token after part/whole of the documents, rounded half up to a document."""
        return self.document_start(rounded_share(self.documents, part, whole))

    def _check_block(self, block: int) -> None:
        begin = block * BLOCK
        raw = self._raw[begin:begin + BLOCK]
        if self._crc is not None and zlib.crc32(raw.data) != int(self._crc[block]):
            place = f"block {block} (bytes {begin} to {begin + len(raw)})"
            raise ChecksumError(f"{self.bin}: {place} fails its crc32: damaged; restore the file or {AGAIN}")

        # even if a .json states the largest id: if it were wrong, a kernel would read past its table
        if self._vocab is not None:
            token_ids = raw.view(self.dtype)
            worst = int(token_ids.argmax())
            if token_ids[worst] < self._vocab:  # no id is too large; is one negative?
                worst = int(token_ids.argmin())
            if not 0 <= token_ids[worst] < self._vocab:
                self._refuse_id(begin // self.dtype.itemsize + worst, int(token_ids[worst]))
        self._block_is_checked[block] = True

    def _refuse_id(self, token: int, value: int) -> None:
        document = self.document_at(token)
        place = f"document {document}, token {token - self.document_start(document)}"
        raise ConfigError(f"{self.bin}: {place}: {self._of_vocabulary(value)}")

    def _of_vocabulary(self, value: int) -> str:
        """Describe an id outside the vocabulary, and how to fix it."""
        if value < 0:
            return f"id {value} is below 0, and not in the vocabulary of {self._vocab}; make the file again"
        if value >= LARGEST_VOCAB:
            return (f"id {value} is in no vocabulary: the file is damaged, or its ids have a different width "
                    "or byte order than the one they are read with (data.dtype, little-endian); make the "
                    "file again")
        return (f"id {value} is not below the vocabulary of {self._vocab}; raise model.vocab above {value}, "
                "or use the data's tokenizer")


class FileStamp(NamedTuple):
    """Changes when a file is replaced or written to."""
    inode: int
    size: int
    modified_ns: int


def file_stamp(path: pathlib.Path | str) -> FileStamp | None:
    """Return the stamp of a file, or None if there is no file."""
    try:
        status = pathlib.Path(path).stat()
    except OSError:
        return None
    return FileStamp(status.st_ino, status.st_size, status.st_mtime_ns)


def read_sidecar(path: pathlib.Path | str) -> Tree:
    """Read PREFIX.json, or return {} if there is none. Raises ChecksumError if it does not match the sha256
    of its content that it contains, and ConfigError if it is some other file."""
    try:
        text = pathlib.Path(path).read_bytes()
        meta = json.loads(text)
        if sidecar_bytes(meta) == text and meta["format"] == 1 and meta["block"] == BLOCK:
            return meta
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        pass  # damaged: not JSON, or not our object
    if not is_sidecar(path):
        raise ConfigError(f"{path}: is another file, where the checksums of the data beside it have their "
                          "place; move it, or rename the data (.bin, .idx)")
    raise ChecksumError(f"{path}: its sha256 does not match: damaged or edited; {AGAIN}, "
                        "or delete it to read unchecked")


def is_sidecar(path: pathlib.Path | str) -> bool:
    """Return whether it is a PREFIX.json written by us, damaged or not."""
    try:
        with open(path, "rb") as file:
            head = file.read(SIDECAR_HEAD)
    except OSError:
        return False
    return any(key in head for key in SIDECAR_KEYS)


def sidecar_bytes(meta: Tree) -> bytes:
    """Encode PREFIX.json for `meta`, with its sha256 added."""
    body = {key: value for key, value in meta.items() if key != "sha256"}
    digest = text_sha256(json.dumps(body, sort_keys=True))
    text = json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True)
    return f"{text}\n".encode()


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: pathlib.Path | str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# ---- writing -----------------------------------------------------------------------------------------------

class IndexedDatasetWriter:
    """Writes documents to PREFIX.*, each as one sequence. Memory: one chunk.

        with IndexedDatasetWriter("out", vocab=1024) as writer:
            writer.add(ids)                          # one document with its end-of-document id
            writer.finish(tokenizer, text_bytes)

    If `has_mask`, `add` and `extend` also take which tokens the loss counts, and write a .mask.

    An older PREFIX stays intact until finish. A killed writer leaves PREFIX.*.tmp, which the next one
    overwrites. Raises OSError naming the file if the disk fails.
    """

    def __init__(self, prefix: pathlib.Path | str, vocab: int, has_mask: bool = False) -> None:
        self.prefix = pathlib.Path(prefix)
        self.dtype = np.dtype(get_dtype(vocab))
        self.documents = 0
        self.tokens = 0
        self.max_id = -1
        self.max_id_at = 0  # index of the first token with the largest id
        self.lost_bytes: int | None = None  # text bytes that the tokens lack; None if not counted yet
        self.unknown_tokens: int | None = None
        self._checksums = BlockChecksums()
        self._mask = LossMaskBits() if has_mask else None
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        for end in (".mask", ".mask.crc"):  # left by a killed writer
            self._temporary(end).unlink(missing_ok=True)
        self._bin_file = open(self._temporary(".bin"), "wb")
        self._lengths_file = open(self._temporary(".len"), "wb+")
        self._mask_file = open(self._temporary(".mask"), "wb") if has_mask else None

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._bin_file, self._lengths_file, self._mask_file):
            if file is not None:
                with naming_errors(file.name):
                    file.close()

    def _temporary(self, end: str) -> pathlib.Path:
        return sibling_file(self.prefix, f"{end}.tmp")

    def add(self, ids: np.ndarray | Sequence[int], counted: Sequence[bool] | None = None) -> None:
        """Write one document."""
        self.extend(np.asarray(ids), [len(ids)], None if counted is None else np.asarray(counted, bool))

    def extend(self, ids: np.ndarray, lengths: np.ndarray | Sequence[int],
               counted: np.ndarray | None = None) -> None:
        """Write some tokens, and the lengths of some documents. The two may come in separate calls; finish
        compares their totals. `counted` is bool, as long as ids; None counts every token in the loss."""
        if len(ids):
            self._write_tokens(ids)
            self._write_mask(np.ones(len(ids), bool) if counted is None else counted)
        with naming_errors(self._lengths_file.name):
            self._lengths_file.write(np.asarray(lengths, "<i4").tobytes())
        self.documents += len(lengths)

    def _write_tokens(self, ids: np.ndarray) -> None:
        largest = int(ids.argmax())
        if ids[largest] > self.max_id:
            self.max_id = int(ids[largest])
            self.max_id_at = self.tokens + largest
        raw = np.ascontiguousarray(ids, self.dtype).data.cast("B")
        with naming_errors(self._bin_file.name):
            self._bin_file.write(raw)
        self._checksums.update(raw)
        self.tokens += len(ids)

    def _write_mask(self, counted: np.ndarray) -> None:
        if self._mask is None or self._mask_file is None:
            if not counted.all():
                raise ValueError(f"{self.prefix}: tokens that do not count need has_mask")
            return
        with naming_errors(self._mask_file.name):
            self._mask_file.write(self._mask.get_bytes(counted))

    def finish(self, tokenizer: Tokenizer | None = None, text_bytes: int | None = None,
               source: str | None = None, fault_point: Callable[[str], object] = lambda name: None,
               made: Tree | None = None) -> None:
        """Write the other files, sync all of them to disk, and rename them into place, the .idx last.

        text_bytes: UTF-8 bytes of the text. source: human-readable origin of the text. fault_point: called at
        each named crash point (data/prepare.py). made: provenance (config/provenance.py). Raises ValueError
        if the lengths do not sum to the tokens, or if the mask has another length.
        """
        self._write_crc()
        self._finish_mask()
        self._write_idx()
        self._write_tokenizer(tokenizer)
        self._write_json(tokenizer, text_bytes, source, made)
        with naming_errors(self._bin_file.name):
            sync_file(self._bin_file)
        fault_point("prepare.pre_publish")
        self._publish(fault_point)

    def _write_crc(self) -> None:
        self._write(".crc", np.array(self._checksums.values(), "<u4").tobytes())

    def _finish_mask(self) -> None:
        if self._mask is None or self._mask_file is None:
            return
        if self._mask.tokens != self.tokens:
            raise ValueError(f"{self.prefix}: a mask of {self._mask.tokens} tokens for {self.tokens}")
        with naming_errors(self._mask_file.name):
            self._mask_file.write(self._mask.last_bytes())
            sync_file(self._mask_file)
        self._write(".mask.crc", np.array(self._mask.checksums.values(), "<u4").tobytes())

    def _write_idx(self) -> None:
        dtype_code = next(code for code, name in DTYPES.items() if np.dtype(name) == self.dtype)
        header = HEADER.pack(MAGIC, 1, dtype_code, self.documents, self.documents + 1)
        with naming_errors(self._temporary(".idx")), open(self._temporary(".idx"), "wb") as file:
            file.write(header)
            for chunk in self._length_chunks():
                file.write(chunk)

            offset = 0
            for chunk in self._length_chunks():
                sizes = np.frombuffer(chunk, "<i4").astype(np.int64) * self.dtype.itemsize
                file.write((offset + np.cumsum(sizes) - sizes).astype("<i8").tobytes())
                offset += int(sizes.sum())
            if offset != self.tokens * self.dtype.itemsize:
                raise ValueError(f"{self.prefix}: lengths sum to {offset} bytes, "
                                 f"but {self.tokens} tokens were written")

            for begin in range(0, self.documents + 1, CHUNK):
                stop = min(begin + CHUNK, self.documents + 1)
                file.write(np.arange(begin, stop, dtype="<i8").tobytes())
            sync_file(file)

    def _length_chunks(self) -> Iterator[bytes]:
        self._lengths_file.seek(0)
        while chunk := self._lengths_file.read(LENGTH_BYTES * CHUNK):
            yield chunk

    def _write_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        folder = self._temporary(".tokenizer")
        shutil.rmtree(folder, ignore_errors=True)
        if tokenizer is not None:
            with naming_errors(folder):
                folder.mkdir()
                tokenizer.save(folder)

    def _write_json(self, tokenizer: Tokenizer | None, text_bytes: int | None, source: str | None,
                    made: Tree | None) -> None:
        made_with: Tree | None = None
        if tokenizer is not None:
            made_with = tokenizer.contract.record()
        meta: Tree = {
            "format": 1,
            "block": BLOCK,
            "source": source,
            "text_bytes": text_bytes,
            "lost_bytes": self.lost_bytes,
            "unknown_tokens": self.unknown_tokens,
            "tokenizer": made_with,
            "documents": self.documents,
            "tokens": self.tokens,
            "max_id": self.max_id,
            "max_id_at": self.max_id_at,
            "idx_sha256": file_sha256(self._temporary(".idx")),
            "crc_sha256": file_sha256(self._temporary(".crc")),
        }
        if made is not None:
            meta["provenance"] = made
        if self._mask is not None:
            meta["counted"] = self._mask.counted
            meta["mask_crc_sha256"] = file_sha256(self._temporary(".mask.crc"))
        self._write(".json", sidecar_bytes(meta))

    def _write(self, end: str, content: bytes) -> None:
        path = self._temporary(end)
        with naming_errors(path), open(path, "wb") as file:
            file.write(content)
            sync_file(file)

    def _publish(self, fault_point: Callable[[str], object]) -> None:
        # nothing can be opened without an .idx, so nobody reads a mix of old and new files
        sibling_file(self.prefix, ".idx").unlink(missing_ok=True)
        shutil.rmtree(sibling_file(self.prefix, ".tokenizer"), ignore_errors=True)
        for end in (".mask", ".mask.crc"):
            sibling_file(self.prefix, end).unlink(missing_ok=True)
            if self._temporary(end).exists():
                os.replace(self._temporary(end), sibling_file(self.prefix, end))
        for end in (".tokenizer", ".bin", ".crc", ".json", ".idx"):
            if self._temporary(end).exists():
                os.replace(self._temporary(end), sibling_file(self.prefix, end))
            fault_point(f"prepare.published{end}")
        self._temporary(".len").unlink(missing_ok=True)
        sync_folder(self.prefix.parent)


# ---- files -------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def naming_errors(path: pathlib.Path | str) -> Iterator[None]:
    """Add the file name to an OSError that lacks one, such as a failed write, for the message to the user."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def rounded_share(documents: int, part: int, whole: int) -> int:
    """Return part/whole of the documents, rounded half up."""
    return (2 * documents * part + whole) // (2 * whole)


def sync_file(file: IO[bytes]) -> None:
    """Flush buffered writes to disk, and wait until they are stored."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: pathlib.Path | str) -> None:
    """Wait until the renames in a folder are stored on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
