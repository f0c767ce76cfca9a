"""nanoGPT's .bin (u16 ids, nothing else) and modded-nanogpt's shards (256 x i32: 20240520, 1, tokens; then u16 ids).

No index: documents are what end-of-document ids separate, found only where they are needed. No checksums; ids are
checked against the vocabulary when first touched. Sources: karpathy/nanoGPT, KellerJordan/modded-nanogpt.
"""
import hashlib
import pathlib

import numpy as np

from config import ConfigError
from data.indexed import Indexed, stamp

SHARD = 20240520
HEADER = 1024  # bytes
GPT2_EOD = 50256  # shards are GPT-2's by definition
PROBE = 1 << 20


class Raw(Indexed):
    """`eod` ends a document; none: the file is one document, as far as anybody knows."""

    def __init__(self, path, vocab: int | None = None, eod: int | None = None):
        self.bin, self.dtype, self.meta, self._crc, self.documents = pathlib.Path(path), np.dtype("<u2"), {}, None, 0
        self._stamps = {self.bin: stamp(self.bin)}
        size = self.bin.stat().st_size
        head = np.fromfile(self.bin, "<i4", 3)
        shard = len(head) == 3 and head[0] == SHARD
        skip = HEADER if shard else 0
        self.tokens, self._eod = (size - skip) // 2, GPT2_EOD if shard and eod is None else eod
        if size % 2 or self.tokens < 1 or (shard and self.tokens != head[2]):
            raise ConfigError(f"{path}: {size} bytes are not {f'a shard of {head[2]}' if shard else 'whole'} u16 ids: "
                              "truncated, empty or of another format; restore it")
        self._map(vocab, skip)
        ends = [self._raw[:PROBE].tobytes(), self._raw[-PROBE:].tobytes()]  # the whole would take minutes
        self.identity = hashlib.sha256(b"".join([str(size).encode(), *ends])).hexdigest()

    def starts(self, a: int, b: int) -> np.ndarray:  # int64, rising
        if self._eod is None:
            raise ConfigError(f"{self.bin}: data.doc_mask needs to know how documents end; give data.tokenizer")
        return a + 1 + np.flatnonzero(self.read(a, b - 1) == self._eod)

    def cut(self, part: int, whole: int) -> int:
        """The document start at or after part/whole of the tokens; that very token where none is near."""
        at = self.tokens * part // whole
        if at in (0, self.tokens) or self._eod is None:
            return at
        near = self.starts(at - 1, min(at + PROBE, self.tokens))
        return int(near[0]) if len(near) else at

    def _refuse(self, token: int, value: int):
        raise ConfigError(f"{self.bin}: token {token}: id {value} is not below the vocabulary of {self._vocab}; "
                          f"raise model.vocab above {value}, or use the data's tokenizer")
