"""Per-block file checksums: written with the file, and verified at the first read of each block."""
import zlib

from config import ConfigError

BLOCK = 1 << 18  # bytes per crc; small, because the first read in a block reads all of it
AGAIN = "make it again with scripts.prepare_data"


class ChecksumError(ConfigError):
    """The content of a data file does not match its checksums. The message is one line."""
    exit_code = 79


class BlockChecksums:
    """Computes the crc32 of each block of a file, from chunks of any size."""

    def __init__(self) -> None:
        self._offset = 0
        self._crc = 0  # of the current block
        self._complete: list[int] = []  # of complete blocks

    def update(self, raw: memoryview) -> None:
        """Add the next bytes of the file."""
        while raw:
            part = raw[:BLOCK - self._offset % BLOCK]  # up to the end of the block
            raw = raw[len(part):]
            self._offset += len(part)
            self._crc = zlib.crc32(part, self._crc)
            if self._offset % BLOCK == 0:
                self._complete.append(self._crc)
                self._crc = 0

    def values(self) -> list[int]:
        """Return the checksums of all blocks so far; the last block may be shorter."""
        last_is_partial = self._offset % BLOCK != 0
        return [*self._complete, self._crc] if last_is_partial else list(self._complete)
