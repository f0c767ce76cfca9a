"""Link shards that have not changed since an earlier checkpoint, instead of writing them again.

A file is linked as a whole or not at all. It must have the header that this save would write, apart from the
save id, and every byte must equal the tensors in memory: it is read from disk, compared and hashed in one
pass. So a linked file is as good as one that was written and read back, whatever the state of the earlier
checkpoint, and a file that the disk has damaged in the meantime is rewritten.

For a changed shard, only the header and the first elements of its smallest tensor are read, so a save in
which everything has changed takes no longer.

A byte that the disk loses later damages both checkpoints. So a file with two names never gets a third, and
store.folder_to_link decides what may be linked. If the file system cannot create a hard link, the file is
written.
"""
import hashlib
import os
from pathlib import Path

import numpy as np

from checkpoint.disk.files import (
    DIGESTS,
    WRITTEN_DIGEST,
    FileEntry,
    IntegrityError,
    Named,
    TensorTable,
    checksum_text,
    chunks_of,
    drop_page_cache,
    matches_bytes,
    num_bytes,
    open_shard,
    raw_bytes,
    read_header,
    remove,
    shard_header,
)

PROBED = 1 << 14  # elements compared before a file is linked and read as a whole


def link_shard(source: Path, target: Path, named: Named) -> tuple[FileEntry, list[str]] | None:
    """Link `target` to `source` if it holds exactly these tensors.

    `named` is [(name in the file, tensor)], as for write_shard.

    Returns ({bytes, header, save_id of the save that wrote it}, [checksum of each tensor]), or None if the
    file must be written; then nothing is left at `target`. Raises StorageError if no file descriptor is left.
    """
    try:
        if may_be_same(source, named):
            os.link(source, target)
            return compare(target, named)
    except (IntegrityError, OSError):
        remove(target)
    return None


def may_be_same(source: Path, named: Named) -> bool:
    """Return whether the file has one name, the header of these tensors, and the first elements of one of
    them.

    Raises IntegrityError if the header differs or cannot be read.
    """
    with open_shard(source) as fd:
        header, table = same_header(fd, source, named)
        if os.fstat(fd).st_nlink != 1:
            return False
        name, tensor = min(named, key=lambda item: num_bytes(item[1]))
        probed = tensor.detach().reshape(-1)[:PROBED]
        return matches_bytes(fd, start_of(name, header, table), raw_bytes(probed))


def compare(path: Path, named: Named) -> tuple[FileEntry, list[str]]:
    """Return a file's entry and the checksum of each tensor. Raises IntegrityError unless it holds these
    tensors.

    Reads from the disk, bypassing the page cache where the system allows it.
    """
    drop_page_cache(path)
    checksums: list[str] = []
    with open_shard(path) as fd:
        header, table = same_header(fd, path, named)
        for name, tensor in named:
            checksums.append(same_checksum(fd, start_of(name, header, table), raw_bytes(tensor), path))
        size = os.fstat(fd).st_size
    checksum = hashlib.sha256(header).hexdigest()
    return {"bytes": size, "header": checksum, "save_id": get_save_id(table)}, checksums


def same_header(fd: int, path: Path, named: Named) -> tuple[bytes, TensorTable]:
    """Return (length and header, parsed header) of a file that has the header and size of these tensors.

    Raises IntegrityError if it does not.
    """
    header, table = read_header(fd, path)
    expected, data_bytes = shard_header(named, get_save_id(table))
    if header != expected or os.fstat(fd).st_size != len(header) + data_bytes:
        raise IntegrityError(f"{path}: different tensors than in memory")
    return header, table


def same_checksum(fd: int, start: int, data: np.ndarray, path: Path) -> str:
    """Return the checksum of `data`. Raises IntegrityError unless the file has these bytes at `start`."""
    digest = DIGESTS[WRITTEN_DIGEST]()
    for chunk in chunks_of(data):
        if not matches_bytes(fd, start, chunk):
            raise IntegrityError(f"{path}: different bytes than in memory")
        digest.update(chunk.data)
        start += len(chunk)
    return checksum_text(WRITTEN_DIGEST, digest)


def get_save_id(table: TensorTable) -> str:
    """Return the id of the save that wrote a shard."""
    return str(table.get("__metadata__", {}).get("save_id"))


def start_of(name: str, header: bytes, table: TensorTable) -> int:
    """Return a tensor's byte offset in its file."""
    return len(header) + table[name]["data_offsets"][0]
