"""Per-token loss mask of a data set: one bit per token, stored next to PREFIX.bin.

    PREFIX.mask        bit t % 8 (from the lowest) of byte t // 8 is 1 if token t counts
    PREFIX.mask.crc    crc32 (u32) of each block of the .mask; its sha256 is in PREFIX.json

scripts.prepare_data --chat writes it: what the assistant says counts, and the rest is context. In a data set
without these files every token counts. Blocks are verified at their first read, like those of a .bin. Memory:
one byte per block.
"""
import pathlib
import zlib

import numpy as np

from config import ConfigError
from data.blocks import AGAIN, BLOCK, BlockChecksums, ChecksumError

BITS = 8  # per byte


class LossMask:
    """The memory-mapped mask of a data set of `tokens` tokens.

    `crc` holds the crc32 of each block; if it is None, nothing is verified.
    Raises ConfigError if the file cannot be read, or has the wrong size.
    """

    def __init__(self, path: pathlib.Path, tokens: int, crc: np.ndarray | None) -> None:
        self._path = path
        self._crc = crc
        expected = -(-tokens // BITS)  # rounded up
        try:
            found = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; restore it, or {AGAIN} --chat") from None
        if found != expected:
            raise ConfigError(f"{path}: {found} bytes, {tokens} tokens take {expected}: "
                              f"truncated, or of other data; {AGAIN} --chat")
        self._bytes = np.asarray(np.memmap(path, np.uint8, "r"))
        self._block_is_checked = np.zeros(-(-expected // BLOCK), bool)

    def read(self, first: int, stop: int) -> np.ndarray:  # bool [stop - first]
        """Return whether the loss counts each of the tokens [first, stop).
        Raises ChecksumError naming the block."""
        first_byte = first // BITS
        stop_byte = -(-stop // BITS)
        for block in range(first_byte // BLOCK, -(-stop_byte // BLOCK)):
            if not self._block_is_checked[block]:
                self._check_block(block)
        bits = np.unpackbits(self._bytes[first_byte:stop_byte], bitorder="little")
        return bits[first - first_byte * BITS:stop - first_byte * BITS].astype(bool)

    def _check_block(self, block: int) -> None:
        raw = self._bytes[block * BLOCK:(block + 1) * BLOCK]
        if self._crc is not None and zlib.crc32(raw.data) != int(self._crc[block]):
            place = f"block {block} (bytes {block * BLOCK} to {block * BLOCK + len(raw)})"
            raise ChecksumError(f"{self._path}: {place} fails its crc32: damaged; "
                                f"restore the file or {AGAIN} --chat")
        self._block_is_checked[block] = True


class LossMaskBits:
    """Packs and counts bools, added in chunks of any size, into the bytes of a .mask."""

    def __init__(self) -> None:
        self.checksums = BlockChecksums()
        self.tokens = 0
        self.counted = 0
        self._rest = np.empty(0, bool)  # of an incomplete byte

    def get_bytes(self, counted: np.ndarray) -> bytes:  # bool [tokens]
        """Add bools, and return the bytes that are now complete."""
        self.tokens += len(counted)
        self.counted += int(counted.sum())
        bits = np.concatenate([self._rest, counted])
        full = len(bits) // BITS * BITS
        self._rest = bits[full:]
        return self._packed(bits[:full])

    def last_bytes(self) -> bytes:
        """Return the last byte, padded with zeros, or nothing if there is none."""
        rest, self._rest = self._rest, self._rest[:0]
        return self._packed(rest)

    def _packed(self, bits: np.ndarray) -> bytes:
        content = np.packbits(bits, bitorder="little").tobytes()
        self.checksums.update(memoryview(content))
        return content
