"""Send checkpoint folders from rank to rank over the job's connections, file by file in chunks.

Both sides know the manifest {file: bytes} in advance. So the receiver uses buffers of at most CHUNK_BYTES,
and never allocates for an unchecked size. A failing disk does not block the other side: that rank continues
its exchanges and returns the error at the end. Received data is not verified here.
"""
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.disk.files import (
    IntegrityError,
    StorageError,
    open_shard,
    read_into,
    storage_errors,
    write_all,
)
from checkpoint.disk.folder import META, SHARD
from checkpoint.disk.together import do_nothing
from parallel.wire import comm
from parallel.wire.comm import Group

CHUNK_BYTES = 16 << 20
SMALL_FILES = ("index.json", "index.sha256", META)
Manifest = dict[str, int]  # {file name: bytes}, in sending order


@dataclass(frozen=True)
class Delivery:
    """A folder sent from one rank to another. `sender` and `receiver` are positions in the group.

    `folder` is the path on the sender, or the destination on the receiver; other ranks ignore it.
    """
    sender: int
    receiver: int
    manifest: Manifest
    folder: Path


def build_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder. Raises IntegrityError for anything except its regular
    files."""
    result: Manifest = {}
    try:
        for path in sorted(folder.iterdir()):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise IntegrityError(f"{path}: not a regular file")
            result[path.name] = status.st_size
    except OSError as error:
        raise IntegrityError(f"{folder}: {error.strerror or error}") from error
    check_names(folder, result)
    return result


def check_names(folder: Path, manifest: Manifest) -> None:
    """Raise IntegrityError unless every name is that of a checkpoint file."""
    for name in manifest:
        if name not in SMALL_FILES and not SHARD.fullmatch(name):
            raise IntegrityError(f"{folder}: {name!r} is not a file of a checkpoint")


def deliver(
    deliveries: list[Delivery], group: Group, halfway: Callable[[], object] = do_nothing
) -> Exception | None:
    """Send and receive this rank's part of the deliveries. Collective over the ranks that they name.

    All ranks pass the same list, in which a pair of ranks occurs at most once per direction. `halfway` is
    called while files are in flight. Returns the first error of the storage or of a file on this rank, so
    that all ranks can agree on it. Raises PeerError.
    """
    quiet = replace(group, ledger=comm.Ledger())  # the ledger of a step is compared with closed forms
    sent = [OutgoingFolder(each) for each in deliveries if each.sender == group.index]
    received = [IncomingFolder(each) for each in deliveries if each.receiver == group.index]
    while True:
        sends = [(chunk, one.delivery.receiver) for one in sent if (chunk := one.next_chunk()) is not None]
        buffers = [(one, buffer) for one in received if (buffer := one.next_buffer()) is not None]
        if not sends and not buffers:
            break
        receives = [(buffer, one.delivery.sender) for one, buffer in buffers]
        for transfer in comm.start_transfers(sends, receives, quiet):
            transfer.wait()
        for one, buffer in buffers:
            one.keep(buffer)
        halfway()
    errors = [one.error for one in (*sent, *received) if one.error is not None]
    return errors[0] if errors else None


def chunks_of_files(manifest: Manifest) -> Iterator[tuple[str, int, int]]:
    """Yield (file, first byte, bytes) of each chunk. Empty files have none, but checkpoints have no empty
    files."""
    for name, size in manifest.items():
        for start in range(0, size, CHUNK_BYTES):
            yield name, start, min(CHUNK_BYTES, size - start)


class OutgoingFolder:
    """The chunks of a folder to send. `error` says why the sent bytes differ from the files."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.chunks = chunks_of_files(delivery.manifest)
        self.error: Exception | None = None

    def next_chunk(self) -> Tensor | None:
        """Return the next bytes to send, or None at the end. After an error they are zeros."""
        for name, start, size in self.chunks:
            chunk = torch.zeros(size, dtype=torch.uint8)
            if self.error is None:
                self.read(self.delivery.folder / name, start, chunk)
            return chunk
        return None

    def read(self, path: Path, start: int, chunk: Tensor) -> None:
        """Fill the chunk from the file. Records an error instead of raising it."""
        try:
            with open_shard(path) as fd:
                if not read_into(fd, start, chunk.numpy()):
                    raise IntegrityError(f"{path}: shrank while it was copied")
        except (IntegrityError, StorageError) as error:
            self.error = error


class IncomingFolder:
    """The chunks of a received folder, which is created. `error` says why it is not kept."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.chunks = chunks_of_files(delivery.manifest)
        self.expected: tuple[Path, int] | None = None  # file and first byte of the next chunk
        self.error: Exception | None = None
        try:
            check_names(delivery.folder, delivery.manifest)
            with storage_errors(delivery.folder, sum(delivery.manifest.values())):
                delivery.folder.mkdir(parents=True)
        except (IntegrityError, StorageError) as error:
            self.error = error

    def next_buffer(self) -> Tensor | None:
        """Return a buffer for the next chunk, or None at the end."""
        for name, start, size in self.chunks:
            self.expected = self.delivery.folder / name, start
            return torch.empty(size, dtype=torch.uint8)
        return None

    def keep(self, buffer: Tensor) -> None:
        """Append received bytes to their file, which the first chunk creates. Records an error instead of
        raising it."""
        if self.expected is None or self.error is not None:
            return
        path, start = self.expected
        created = os.O_CREAT | os.O_EXCL if start == 0 else os.O_APPEND
        try:
            with storage_errors(path, buffer.numel()):
                fd = os.open(path, os.O_WRONLY | created | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    write_all(fd, buffer.numpy().data)
                finally:
                    os.close(fd)
        except StorageError as error:
            self.error = error
