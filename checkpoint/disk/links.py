"""Shards that did not change since an earlier checkpoint: they get a second name, and are not written again.

A file is linked whole or not at all. It must have the header that this save would write, but for the save id,
and every byte must be that of the tensors in memory: it is read from the disk, compared and hashed in one
pass. So a linked file is as good as one that was written and read back, whatever state the earlier checkpoint
is in; and one that the disk has damaged meanwhile is written anew.

Of a shard that has changed, the header and the first elements of its smallest tensor are read. So a save in
which all has changed takes no longer.

A byte that the disk loses later damages both checkpoints. So a file that has two names gets no third one, and
store.folder_to_link chooses what may be linked. Where the file system makes no hard links, or not here, a
file is written.
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
    forget_cached,
    num_bytes,
    open_shard,
    raw_bytes,
    read_header,
    reads_as,
    remove,
    shard_header,
)

PROBED = 1 << 14  # elements that are compared before a file is linked and read as a whole


def link_shard(source: Path, target: Path, named: Named) -> tuple[FileEntry, list[str]] | None:
    """Links `target` to `source`, if that holds just these tensors.

    named: [(name in the file, tensor)], as write_shard would write them.

    Returns ({bytes, header, save_id: of the save that wrote it}, [checksum of each tensor]). None: it must be
    written; nothing is left at `target`. Raises StorageError if no file descriptor is left.
    """
    try:
        if may_be_same(source, named):
            os.link(source, target)
            return compare(target, named)
    except (IntegrityError, OSError):
        remove(target)
    return None


def may_be_same(source: Path, named: Named) -> bool:
    """Whether the file has no other name, the header of these tensors, and the first elements of one of them.

    Raises IntegrityError if it has another header, or cannot be read.
    """
    with open_shard(source) as fd:
        header, table = same_header(fd, source, named)
        if os.fstat(fd).st_nlink != 1:
            return False
        name, tensor = min(named, key=lambda item: num_bytes(item[1]))
        probed = tensor.detach().reshape(-1)[:PROBED]
        return reads_as(fd, start_of(name, header, table), raw_bytes(probed))


def compare(path: Path, named: Named) -> tuple[FileEntry, list[str]]:
    """The entry of a file, and the checksum of each tensor in it. Raises IntegrityError unless it holds them.

    It is read from the disk, where the system lets a program ask for that.
    """
    forget_cached(path)
    checksums: list[str] = []
    with open_shard(path) as fd:
        header, table = same_header(fd, path, named)
        for name, tensor in named:
            checksums.append(same_checksum(fd, start_of(name, header, table), raw_bytes(tensor), path))
        size = os.fstat(fd).st_size
    checksum = hashlib.sha256(header).hexdigest()
    return {"bytes": size, "header": checksum, "save_id": save_id_of(table)}, checksums


def same_header(fd: int, path: Path, named: Named) -> tuple[bytes, TensorTable]:
    """(length and header, header parsed) of a file that has the header and the size of these tensors.

    Raises IntegrityError if it has not.
    """
    header, table = read_header(fd, path)
    expected, data_bytes = shard_header(named, save_id_of(table))
    if header != expected or os.fstat(fd).st_size != len(header) + data_bytes:
        raise IntegrityError(f"{path}: other tensors than in memory")
    return header, table


def same_checksum(fd: int, start: int, data: np.ndarray, path: Path) -> str:
    """The checksum of `data`. Raises IntegrityError unless the file has these bytes from `start` on."""
    digest = DIGESTS[WRITTEN_DIGEST]()
    for chunk in chunks_of(data):
        if not reads_as(fd, start, chunk):
            raise IntegrityError(f"{path}: other bytes than in memory")
        digest.update(chunk.data)
        start += len(chunk)
    return checksum_text(WRITTEN_DIGEST, digest)


def save_id_of(table: TensorTable) -> str:
    """The id of the save that wrote a shard."""
    return str(table.get("__metadata__", {}).get("save_id"))


def start_of(name: str, header: bytes, table: TensorTable) -> int:
    """Where a tensor begins in its file."""
    return len(header) + table[name]["data_offsets"][0]
