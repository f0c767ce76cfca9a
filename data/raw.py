"""Token files without an index: nanoGPT's .bin, and modded-nanogpt's shards.

    nanoGPT's .bin          u16 ids, nothing else
    modded-nanogpt's shard  a header of 256 x i32 (20240520, 1, number of tokens, zeros), then u16 ids

Documents are what end-of-document ids separate, found only where they are needed. There are no checksums; ids
are checked against the vocabulary at the first read. Sources: github.com/karpathy/nanoGPT,
github.com/KellerJordan/modded-nanogpt.
"""
import hashlib
import pathlib

import numpy as np

from config import ConfigError
from data.indexed import IndexedDataset, file_stamp

SHARD_MAGIC = 20240520
SHARD_HEADER_BYTES = 1024
GPT2_EOD = 50256  # shards hold ids of GPT-2's tokenizer by definition
PROBE = 1 << 20  # bytes of each end that the identity covers; also tokens searched for the next document


class RawShards(IndexedDataset):
    """One file of u16 ids as a stream of tokens. eod: the id that ends a document; none: not known.

    `documents` is 0: their number is not known. Raises ConfigError if the size of the file is not that of
    such a file.
    """

    def __init__(self, path: pathlib.Path | str, vocab: int | None = None, eod: int | None = None) -> None:
        self.bin = pathlib.Path(path)
        self.dtype = np.dtype("<u2")
        self.documents = 0
        self.meta = {}
        self.loss_mask = None
        self._crc = None
        self._stamps = {self.bin: file_stamp(self.bin)}

        size = self.bin.stat().st_size
        header = np.fromfile(self.bin, "<i4", 3)
        is_shard = len(header) == 3 and header[0] == SHARD_MAGIC
        header_bytes = SHARD_HEADER_BYTES if is_shard else 0
        self.tokens = (size - header_bytes) // self.dtype.itemsize
        self._eod = GPT2_EOD if is_shard and eod is None else eod
        if size % self.dtype.itemsize or self.tokens < 1 or (is_shard and self.tokens != header[2]):
            expected = f"a shard of {header[2]}" if is_shard else "whole"
            raise ConfigError(f"{path}: {size} bytes are not {expected} u16 ids: "
                              "truncated, empty or of another format; restore it")

        self._map_bin(vocab, header_bytes)
        self._probe_ids()
        parts = [str(size).encode(), self._raw[:PROBE].tobytes(), self._raw[-PROBE:].tobytes()]
        # of both ends only: to read the whole file would take minutes
        self.identity = hashlib.sha256(b"".join(parts)).hexdigest()

    def document_starts(self, first: int, stop: int) -> np.ndarray:  # int64, rising
        """The tokens strictly between `first` and `stop` that begin a document. Raises ConfigError if the
        end-of-document id is not known."""
        if self._eod is None:
            raise ConfigError(f"{self.bin}: data.doc_mask needs to know how documents end; "
                              "give data.tokenizer")
        return first + 1 + np.flatnonzero(self.read(first, stop - 1) == self._eod)

    def split_point(self, part: int, whole: int) -> int:
        """The first start of a document at or after part/whole of the tokens; that token itself if no
        document starts within PROBE tokens, or if the end-of-document id is not known."""
        token = self.tokens * part // whole
        if token in (0, self.tokens) or self._eod is None:
            return token
        starts = self.document_starts(token - 1, min(token + PROBE, self.tokens))
        return int(starts[0]) if len(starts) else token

    def _refuse_id(self, token: int, value: int) -> None:
        raise ConfigError(f"{self.bin}: token {token}: {self._of_vocabulary(value)}")
