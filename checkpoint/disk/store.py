"""Checkpoints on disk: tensors in pieces, committed by one rename, trusted only after every checksum.

Each piece is stored with its global coordinates, so a checkpoint does not depend on the layout that saved it.

    root/step_00001000/     a committed checkpoint; see checkpoint/disk/folder.py for its contents
    root/step_00001000.keep marks the checkpoint as permanent, by the run or by hand: it is never purged
    root/latest             the name of the newest one: a hint for people, never trusted
    root/*.tmp-*, .trash-*  left behind by a dead writer; removed at the next launch or save

Guarantees:

- A folder with a final name is complete. Shards, meta, index and checksum are flushed to disk and read back
  before the rename. `latest` is written last. Nothing is ever written into a committed folder.
- Whenever the process is killed, either the old or the new checkpoint loads, never a mix of both.
- Any flipped bit in the bytes read is detected before a tensor changes.
- A failed save leaves existing checkpoints unchanged.
- Loading reshards from any layout to any other.
- Nothing is pickled.

Files that are unchanged since the newest earlier checkpoint are linked (checkpoint/disk/links.py).

One process at a time writes to a root (`run_lock`). Many ranks write one checkpoint together: each rank
writes its pieces, and rank 0 writes the rest. Only rank 0 learns what the others hold. Every phase ends in
Ranks.gather, so that one failing rank makes all ranks raise the same error. The cost: one digest while
writing, a comparison with the tensors while reading back, one digest while loading.
"""
import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint.disk.files import (
    DTYPES,
    TORCH,
    FileEntry,
    IntegrityError,
    NonFiniteTensor,
    StorageError,
    available_bytes,
    flush,
    matches_bytes,
    num_bytes,
    open_shard,
    raw_bytes,
    read_hashed,
    remove,
    run_in_threads,
    storage_errors,
    sync_dir,
    write_file,
    write_shard,
)
from checkpoint.disk.folder import (
    VERSION,
    Index,
    PieceRow,
    StoredIndex,
    StoredPiece,
    check_header,
    check_pieces,
    damaged_shards,
    index_bytes,
    is_newer_format,
    quick_check,
    read_index,
    read_meta,
    read_stored_index,
    seal_index,
    verify,
)
from checkpoint.disk.links import link_shard
from checkpoint.disk.locks import folder_lock, run_lock
from checkpoint.disk.together import Ranks
from config import ConfigError, Tree
from parallel.sharding.boxes import Box, check_tiling, from_rows, plan_read, to_rows, uncovered_boxes
from parallel.sharding.packing import equal_part
from parallel.wire import messages
from parallel.wire.comm import PeerError

__all__ = [
    "FAULT_POINTS", "Index", "IntegrityError", "NonFiniteTensor", "StartedLoad", "StorageError",
    "StoredIndex", "adopt", "check_free_space", "committed_checkpoints", "damaged_shards", "load",
    "newest_checkpoint", "quick_check", "read_index", "read_meta", "remove_leftovers", "run_lock", "save",
    "seconds_since_mark", "start_load", "storage_errors", "verify",
]

# Points at which a dying writer leaves different folders behind. The crash tests kill it at each of them.
FAULT_POINTS = (
    "ckpt.pre_write",
    "ckpt.mid_shard",
    "ckpt.post_shard",
    "ckpt.pre_index",
    "ckpt.mid_index",
    "ckpt.pre_rename",
    "ckpt.mid_replace",
    "ckpt.post_rename",
    "ckpt.pre_latest",
    "ckpt.mid_latest",
    "ckpt.pre_purge",
    "ckpt.mid_purge",
)
SHARD_BYTES = 1 << 30  # pieces share a file up to this size; a larger piece gets a separate file
MIN_SHARD_BYTES = 64 << 20  # files are not split below this size for the sake of threads
FILES_PER_THREAD = 4
PIECE_BYTES = 256 << 20  # larger tensors are stored in several pieces, if they have rows
KEPT_SHARE = 0.5  # of a machine's free memory, for verified bytes while loading
MAX_NAMED = 8  # differences between a checkpoint and a run named in an error; the rest are only counted
FREE_SPACE_MARGIN = 1.2  # required free space relative to the bytes of the tensors
PACK_LEVEL = 1  # zlib level of messages between ranks
ALONE = Ranks()
MAX_HINT_BYTES = 200  # read from `latest`
STEP = re.compile(r"step_(\d{8,})")
LEFTOVER = re.compile(r"(step_\d{8,}|latest)\.tmp-[0-9a-f]{32}|\.trash-.+")

Piece = tuple[Box, torch.Tensor]  # a tensor of box.size, and its place in the whole tensor
Pieces = Iterable[Piece]
ReadValues = Callable[[Piece], torch.Tensor]  # returns the values of a piece
Read = tuple[tuple[slice, ...], torch.Tensor]  # slices of a stored piece, and the view that they fill
Reads = dict[StoredPiece, list[Read]]
FaultPoint = Callable[[str], object]  # called with a name from FAULT_POINTS on reaching it


def no_fault(point: str) -> None:
    """A FaultPoint that does nothing."""


# ---- save --------------------------------------------------------------------------------------------------

def own_values(piece: Piece) -> torch.Tensor:
    """Return the tensor of a piece."""
    return piece[1]


@dataclass(frozen=True)
class PendingSave:
    """A save that has begun but is not committed yet. Identical on every rank, except for fault_point and
    read."""
    final: Path  # the folder once committed
    step: int
    save_id: str  # 32 hex digits, repeated in the index, meta.json and every written shard
    total_bytes: int  # of the tensors of all ranks
    earlier: Path | None  # the checkpoint whose files may be linked
    fault_point: FaultPoint
    read: ReadValues = own_values

    @property
    def temp(self) -> Path:
        """Return the folder used until the commit."""
        return self.final.with_name(f"{self.final.name}.tmp-{self.save_id}")


@dataclass(frozen=True)
class RankShards:
    """The shards that one rank wrote, for the index.

    `rows` are the packed index rows of its pieces.
    """
    files: dict[str, FileEntry]
    rows: bytes


def pack(rows: object) -> bytes:
    """Compress JSON data: index rows are repetitive."""
    return zlib.compress(json.dumps(rows).encode(), PACK_LEVEL)


def unpack(packed: bytes) -> Any:
    """Return the data passed to pack, with lists for tuples. Raises MessageError."""
    return json.loads(decompress(packed, messages.MAX_TOTAL_BYTES))


def decompress(packed: bytes, max_bytes: int) -> bytes:
    """Decompress zlib data. Raises MessageError if it exceeds max_bytes, before using more memory."""
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(packed, max(max_bytes, 1))  # 0 would mean unlimited
        is_whole = reader.eof or (not reader.decompress(reader.unconsumed_tail, 1) and reader.eof)
    except zlib.error as error:
        raise messages.MessageError(f"{len(packed):,} bytes are not packed data: {error}") from None
    if not is_whole:
        raise messages.MessageError(
            f"{len(packed):,} bytes unpack to more than {max_bytes:,} bytes, or are cut off"
        )
    return data


def save(
    root: Path | str,
    step: int,
    pieces: Pieces,
    meta: Tree,
    *,
    keep: int,
    mark: str = "",
    fault_point: FaultPoint = no_fault,
    ranks: Ranks = ALONE,
    timeout_s: float | None = None,
    threads: int = 1,
    linked: list[int] | None = None,
    read: ReadValues = own_values,
) -> Path:
    """Write and commit root/step_<step>, then purge all except permanent and the `keep` newest checkpoints.

    Collective. Only the first rank learns what the others hold, and writes the index.

    `pieces` are this rank's (Box, tensor of box.size). Over all ranks they cover every element of every key
    exactly once. `meta` is JSON data. `mark` says why the checkpoint is permanent, or is empty; rank 0's
    counts. `fault_point` is called with each name of FAULT_POINTS on reaching it. For `timeout_s` see
    together.agree_on_outcome. `threads` of this rank check for NaN, hash and write. `linked` receives the
    bytes of all linked files after the commit. `read` returns the values of a piece, or of some of its rows,
    if its tensor has none (device "meta"): it is called for writing and for reading back.

    Returns the committed folder. A step that is already committed and verifies is left unchanged: the same
    run saved it before resuming.

    Raises StorageError (existing checkpoints are unchanged), NonFiniteTensor (nothing is committed),
    ValueError (the pieces are wrong).
    """
    root = Path(root)
    pieces = list(pieces)
    final = checkpoint_folder(root, step)

    # check everything that can be checked before writing a byte
    checked = ranks.gather_first(ranks.run_on_all(lambda: check_tensors(pieces), timeout_s))
    save_id, total_bytes, earlier = ranks.run_on_first(
        lambda: begin_save(final, checked, meta, mark, keep), timeout_s
    )

    # write the shards of all ranks to a temporary folder, then rename it
    if save_id is not None:
        pending = PendingSave(
            final=final,
            step=step,
            save_id=save_id,
            total_bytes=total_bytes,
            earlier=earlier,
            fault_point=fault_point,
            read=read,
        )
        try:
            own = ranks.run_on_all(lambda: write_pieces(pending, pieces, ranks, threads), timeout_s)
            shards = ranks.gather_first(own)
            linked_bytes = ranks.run_on_first(lambda: commit(pending, shards, meta), timeout_s)
        except BaseException as error:
            # After a timeout or an interrupt a rank may still be at work, and rename what is left of the
            # folder to its final name, so the next launch removes it.
            have_ended = isinstance(error, Exception) and not isinstance(error, PeerError)
            if ranks.rank == 0 and (have_ended or ranks.size == 1):
                remove(pending.temp)
                remove_orphan_markers(root)
            raise
        if linked is not None:
            linked.append(linked_bytes)

    ranks.run_on_first(lambda: publish(final, step, keep, fault_point), timeout_s)
    return final


def check_tensors(pieces: list[Piece]) -> tuple[bytes, int]:
    """Return this rank's boxes, packed, and their bytes.

    Raises ValueError for a tensor that cannot be stored as its box.
    """
    for box, tensor in pieces:
        if tuple(tensor.shape) != tuple(box.size):
            raise ValueError(f"{box}: its tensor has shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{box}: dtype {tensor.dtype} cannot be stored")
    return pack(to_rows(box for box, _ in pieces)), sum(num_bytes(tensor) for _, tensor in pieces)


def begin_save(
    final: Path, checked: list[tuple[bytes, int]], meta: Tree, mark: str, keep: int
) -> tuple[str | None, int, Path | None]:
    """Prepare the root on rank 0, and mark the checkpoint before it exists, so that a kill cannot come in
    between.

    `checked` has the results of check_tensors on each rank. Returns (id of the new save, bytes of all
    tensors, folder_to_link()); the id is None if this step is already committed and verifies.
    Raises ValueError if the boxes leave a hole or overlap, TypeError if meta is not JSON, or StorageError.
    """
    boxes: list[Box] = []
    for rows, _ in checked:
        boxes += from_rows(unpack(rows))
    check_tiling(boxes)
    total_bytes = sum(rank_bytes for _, rank_bytes in checked)
    json.dumps(meta)  # raises before a byte is written
    with storage_errors(final, total_bytes):
        os.makedirs(final.parent, exist_ok=True)
        sync_dir(final.parent.parent)  # otherwise a power cut could lose the whole folder of checkpoints
        remove_leftovers(final.parent)
        save_id = None
        if not is_valid_checkpoint(final):  # a bad folder stays until the new one takes its name
            check_free_space(final, total_bytes)
            save_id = uuid.uuid4().hex
        if mark and not marker_path(final).exists():
            write_mark(final, mark)
        earlier = folder_to_link(final, keep) if save_id is not None else None
    return save_id, total_bytes, earlier


def is_valid_checkpoint(path: Path) -> bool:
    """Return whether every byte of the folder verifies; False if it does not exist. Raises NewerFormat."""
    try:
        verify(path)
        return True
    except IntegrityError:
        return False


def write_mark(checkpoint: Path, mark: str) -> None:
    """Make a checkpoint permanent. The mark appears atomically: an empty one would look like a person's."""
    temp = checkpoint.with_name(f"{checkpoint.name}.tmp-{uuid.uuid4().hex}")
    write_file(temp, f"{mark}\n".encode())
    os.replace(temp, marker_path(checkpoint))
    sync_dir(checkpoint.parent)


def folder_to_link(final: Path, keep: int) -> Path | None:
    """Return the checkpoint whose files a save may link: the newest earlier one, or None if it may not link.

    A lost byte in a linked file damages both checkpoints. So nothing is linked if these two are all that
    remain after the save, nor for a permanent checkpoint, which may have to outlast all others.
    """
    earlier = earlier_checkpoints(final.parent, step_of(final))
    if not earlier or marker_path(final).exists():
        return None
    purged = too_old(earlier, keep)
    num_left = len(earlier) - len(purged)
    return earlier[0] if earlier[0] in purged or num_left > 1 else None


def check_free_space(final: Path, total_bytes: int) -> None:
    """Raise StorageError if the disk has too little free space for this save."""
    free = shutil.disk_usage(final.parent).free
    wanted = total_bytes * FREE_SPACE_MARGIN
    if free < wanted:
        why = (f"{free:,} bytes are free, {int(wanted):,} wanted ({FREE_SPACE_MARGIN} times its tensors); "
               "free space, or lower checkpoint.keep")
        raise StorageError(final, total_bytes, why)


def write_pieces(pending: PendingSave, pieces: list[Piece], ranks: Ranks, threads: int) -> RankShards:
    """Write this rank's shards, flush them and read them back. Raises StorageError or NonFiniteTensor.

    Each thread writes one file at a time. Other threads wait for the disk, and flushed files are read back
    while the disk still writes the rest.
    """
    temp = pending.temp
    prefix = f"rank_{ranks.rank:05d}_" if ranks.size > 1 else ""
    groups: dict[str, list[Piece]] = {}
    with storage_errors(temp, pending.total_bytes):
        temp.mkdir(exist_ok=True)
        pending.fault_point("ckpt.pre_write")
        for number, group in enumerate(assign_shard_files(divide_large(pieces), threads)):
            groups[f"{prefix}shard_{number:05d}.safetensors"] = group

        with ThreadPoolExecutor(max(threads, 1), "flush") as flushers:
            written = run_in_threads(
                lambda file: write_group(pending, file, groups[file], flushers), list(groups), threads
            )
            pending.fault_point("ckpt.post_shard")
            files = {shard.file: shard.entry for shard in written}
            read_back(pending, lambda: compare_shards(pending, files, written, groups, threads))
    rows = [piece.to_row() for shard in written for piece in shard.pieces]
    return RankShards(files, pack(rows))


@dataclass(frozen=True)
class WrittenShard:
    """A shard file: its entry in the index, its pieces in order, and when it is on disk.

    `flushed` is None if the file is linked, and therefore already on disk.
    """
    file: str
    entry: FileEntry
    pieces: list[StoredPiece]
    flushed: "Future[None] | None"


def write_group(
    pending: PendingSave, file: str, group: list[Piece], flushers: ThreadPoolExecutor
) -> WrittenShard:
    """Link a shard file that has not changed; otherwise write it, and flush it in a thread of `flushers`."""
    names = [box.key if box.size == box.shape else str(box) for box, _ in group]
    named = [(name, tensor) for name, (_, tensor) in zip(names, group)]
    target = pending.temp / file
    same = link_shard(pending.earlier / file, target, named) if pending.earlier is not None else None
    if same is not None:
        entry, checksums = same
        flushed = None
    else:
        entry, checksums, fd = write_shard(
            target,
            named,
            pending.save_id,
            halfway=lambda: pending.fault_point("ckpt.mid_shard"),
            read=lambda position: pending.read(group[position]),
        )
        flushed = flushers.submit(flush, fd)
    stored: list[StoredPiece] = []
    for (box, tensor), name, checksum in zip(group, names, checksums):
        dtype = DTYPES[tensor.dtype]
        stored.append(StoredPiece(box=box, dtype=dtype, file=file, name=name, checksum=checksum))
    return WrittenShard(file, entry, stored, flushed)


def compare_shards(
    pending: PendingSave,
    files: dict[str, FileEntry],
    written: list[WrittenShard],
    groups: dict[str, list[Piece]],
    threads: int,
) -> None:
    """Wait until each shard is on disk, and compare it with its tensors.

    Raises IntegrityError if a shard reads back differently, OSError if it could not be flushed. The tensors
    are still in memory, so bytes are compared instead of hashed again. Linked files were compared before.
    """
    def compare(shard: WrittenShard) -> None:
        if shard.flushed is not None:
            shard.flushed.result()
        path = pending.temp / shard.file
        offsets = check_header(path, files[shard.file], pending.save_id, shard.pieces)
        if shard.flushed is None:
            return
        with open_shard(path) as fd:
            for piece, of_rank in zip(shard.pieces, groups[shard.file]):
                if not matches_bytes(fd, offsets[piece], raw_bytes(pending.read(of_rank))):
                    raise IntegrityError(f"{path}: {piece.name} is not what was written")

    run_in_threads(compare, written, threads)


def divide_large(pieces: list[Piece]) -> Iterator[Piece]:
    """Yield the pieces, splitting those larger than PIECE_BYTES by rows, for several threads."""
    for box, tensor in pieces:
        num_rows = box.size[0] if box.size else 1
        num_parts = min(num_rows, -(-num_bytes(tensor) // PIECE_BYTES))
        if num_parts < 2:
            yield box, tensor
            continue
        for part in range(num_parts):
            rows = equal_part(num_rows, part, num_parts, grain=1)
            yield box.rows(rows.start, rows.stop), tensor[rows.start:rows.stop]


def assign_shard_files(pieces: Iterable[Piece], threads: int) -> Iterator[list[Piece]]:
    """Group the pieces into files: large ones, but a few per thread.

    Within a file, wide dtypes come first so that every tensor is aligned.
    """
    pieces = list(pieces)
    total_bytes = sum(num_bytes(tensor) for _, tensor in pieces)
    share = total_bytes // (FILES_PER_THREAD * threads)
    file_bytes = min(SHARD_BYTES, max(share, MIN_SHARD_BYTES))

    group: list[Piece] = []
    group_bytes = 0
    for box, tensor in pieces:
        size = num_bytes(tensor)
        if group and group_bytes + size > file_bytes:
            yield widest_first(group)
            group = []
            group_bytes = 0
        group.append((box, tensor))
        group_bytes += size
    if group:
        yield widest_first(group)


def widest_first(group: list[Piece]) -> list[Piece]:
    return sorted(group, key=lambda piece: -piece[1].element_size())


def read_back(pending: PendingSave, check: Callable[[], object]) -> None:
    """Raise StorageError if check() raises IntegrityError.

    Detects a disk that returns different bytes while the previous checkpoint still exists.
    """
    try:
        check()
    except IntegrityError as error:
        why = f"what was written reads back differently: {error}"
        raise StorageError(pending.temp, pending.total_bytes, why) from error


def commit(pending: PendingSave, shards: list[RankShards], meta: Tree) -> int:
    """Write the small files and rename the folder, on rank 0 once all shards are on disk.

    This single rename commits the checkpoint. Returns the bytes of its linked files.
    """
    with storage_errors(pending.temp, pending.total_bytes):
        write_meta_and_index(pending, shards, meta)
        read_back(pending, lambda: read_meta(pending.temp))
        rename_to_final(pending)
    entries = [entry for part in shards for entry in part.files.values()]
    return sum(int(entry["bytes"]) for entry in entries if "save_id" in entry)


def write_meta_and_index(pending: PendingSave, shards: list[RankShards], meta: Tree) -> None:
    """Write and flush meta.json, the index of all ranks' shards, and its checksum."""
    temp = pending.temp
    pending.fault_point("ckpt.pre_index")
    files = {name: entry for part in shards for name, entry in part.files.items()}
    full_meta = {**meta, "step": pending.step, "save_id": pending.save_id}
    rows: list[PieceRow] = [row for part in shards for row in unpack(part.rows)]
    files["meta.json"] = write_file(temp / "meta.json", json.dumps(full_meta, indent=1).encode())
    index = index_bytes({
        "version": VERSION,
        "save_id": pending.save_id,
        "step": pending.step,
        "world": len(shards),
        "files": files,
        "pieces": rows,
    })
    write_file(temp / "index.json", index)
    pending.fault_point("ckpt.mid_index")
    write_file(temp / "index.sha256", seal_index(index))
    sync_dir(temp)


def rename_to_final(pending: PendingSave) -> None:
    """Rename the folder to its final name, and flush the rename."""
    final = pending.final
    pending.fault_point("ckpt.pre_rename")
    if os.path.lexists(final):  # begin_save found it bad
        move_to_trash(final)
        pending.fault_point("ckpt.mid_replace")
    os.rename(pending.temp, final)
    pending.fault_point("ckpt.post_rename")
    sync_dir(final.parent)


def adopt(temp: Path, final: Path) -> None:
    """Commit a verified folder that was copied from elsewhere: rename it and update `latest`.

    `temp` is named like that of a save. The caller holds the run lock. Raises OSError.
    """
    if os.path.lexists(final):  # the caller found it bad
        move_to_trash(final)
    os.rename(temp, final)
    sync_dir(final.parent)
    write_latest(final, no_fault)


def publish(final: Path, step: int, keep: int, fault_point: FaultPoint) -> None:
    """Update `latest` and purge older checkpoints, on rank 0 after the commit."""
    root = final.parent
    with storage_errors(root / "latest", 0):
        write_latest(final, fault_point)
        purge_older(root, step, keep, fault_point)


def write_latest(final: Path, fault_point: FaultPoint) -> None:
    """Point `latest` at the new checkpoint."""
    root = final.parent
    fault_point("ckpt.pre_latest")
    temp = root / f"latest.tmp-{uuid.uuid4().hex}"
    write_file(temp, f"{final.name}\n".encode())
    fault_point("ckpt.mid_latest")
    os.replace(temp, root / "latest")
    sync_dir(root)


def purge_older(root: Path, step: int, keep: int, fault_point: FaultPoint) -> None:
    """Purge all checkpoints up to `step`, oldest first, except permanent ones and the `keep` newest.

    Skips checkpoints that are being read. Also skips folders of later steps, which are either bad and will be
    replaced once the run gets there or not this run's to delete, and folders of a newer format.
    """
    fault_point("ckpt.pre_purge")
    for path in reversed(too_old(earlier_checkpoints(root, step), keep)):
        with folder_lock(path, fcntl.LOCK_EX) as nobody_reads:
            if nobody_reads and not is_newer_format(path):
                move_to_trash(path)
                fault_point("ckpt.mid_purge")
    remove_leftovers(root)


def earlier_checkpoints(root: Path, step: int) -> list[Path]:
    """Return the committed checkpoints of earlier steps, newest first."""
    return [path for other_step, path in committed_checkpoints(root) if other_step < step]


def too_old(earlier: list[Path], keep: int) -> list[Path]:
    """Return the earlier checkpoints to purge: beyond `keep`, and not permanent."""
    return [path for path in earlier[max(keep, 1) - 1:] if not marker_path(path).exists()]


def drop_after(root: Path, step: int) -> None:
    """Remove the checkpoints of later steps and their marks, newest first, because the run takes another
    course.

    The order means that if a kill leaves some of them, the earlier ones are still there too.
    """
    for other_step, path in committed_checkpoints(root):
        if other_step <= step:
            continue
        with storage_errors(root, 0), folder_lock(path, fcntl.LOCK_EX):
            marker_path(path).unlink(missing_ok=True)  # first: a kill must not leave it to the next save
            move_to_trash(path)
    write_latest(checkpoint_folder(root, step), no_fault)
    remove_leftovers(root)


def marker_path(checkpoint: Path) -> Path:
    """Return the file next to a checkpoint that makes it permanent."""
    return checkpoint.with_name(f"{checkpoint.name}.keep")


def seconds_since_mark(root: Path, mark: str) -> float:
    """Return the age of the newest checkpoint that is permanent with this mark, or infinity."""
    times = [0.0]
    for _, path in committed_checkpoints(root):
        try:
            if marker_path(path).read_text().strip() == mark:
                times.append(path.stat().st_mtime)
        except OSError:  # not permanent, or purged in the meantime
            continue
    return time.time() - max(times) if max(times) else float("inf")


def move_to_trash(path: Path) -> None:
    """Rename a folder, to be deleted later.

    Deleting it file by file could leave half a checkpoint under its name.
    """
    os.rename(path, path.with_name(f".trash-{path.name}-{uuid.uuid4().hex}"))


# ---- find --------------------------------------------------------------------------------------------------

def checkpoint_folder(root: Path, step: int) -> Path:
    """Return the path of this step's checkpoint."""
    return root / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name. Checks compare it with the content."""
    match = STEP.fullmatch(path.name)
    assert match is not None  # from committed_checkpoints
    return int(match[1])


def committed_checkpoints(root: Path | str) -> list[tuple[int, Path]]:
    """Return [(step, folder)] of every checkpoint with a final name, newest first.

    Does not verify them.
    """
    results: list[tuple[int, Path]] = []
    for path in Path(root).glob("step_*"):
        match = STEP.fullmatch(path.name)
        if match and path.is_dir():
            results.append((int(match[1]), path))
    return sorted(results, reverse=True)


def newest_checkpoint(
    root: Path | str,
    log: list[str] | None = None,
    bad: dict[Path, str] | None = None,
    check: Callable[[Path], StoredIndex] = verify,
) -> Path | None:
    """Return the newest good checkpoint, or None if there never was one.

    `log` receives a line per rejected checkpoint, and one if `latest` is wrong. `bad` is {folder: reason} of
    checkpoints already known to be damaged. `check` is verify, which checks every byte, or quick_check, which
    reads only the small files; load() then verifies what it reads.

    Raises IntegrityError if checkpoints exist but none is good, or ConfigError if one has a newer format.
    """
    root = Path(root)
    log = [] if log is None else log
    bad = bad or {}
    folders = committed_checkpoints(root)

    good: Path | None = None
    for step, path in folders:
        try:
            check_named_step(path, step, bad, check)
            good = path
            break
        except IntegrityError as error:
            log.append(f"checkpoint {path.name} is rejected: {error}")

    hint = read_latest(root)
    if good is None and folders:
        reasons = "; ".join(log[-len(folders):])
        raise IntegrityError(
            f"{root}: no good checkpoint left of {len(folders)}: {reasons}. "
            "Restore one from a copy; to begin again, move them away or choose another --log.name"
        )
    if hint != (good.name if good else None):
        wrong = "is missing" if hint is None else f"names {hint!r}"
        used = f"using {good.name}, the newest good one" if good else "there is no checkpoint"
        log.append(f"{root}/latest {wrong}; {used}")
    return good


def check_named_step(
    path: Path, step: int, bad: dict[Path, str], check: Callable[[Path], StoredIndex]
) -> None:
    """Raise IntegrityError if the folder is in `bad`, fails the check, or has another step than its name."""
    why = bad.get(path)
    if why is not None:
        raise IntegrityError(why)
    found = check(path).step
    if found != step:
        raise IntegrityError(f"{path}: holds step {found}")


def read_latest(root: Path) -> str | None:
    """Return the text of `latest`, or None if it cannot be read."""
    try:
        text = (root / "latest").read_bytes()[:MAX_HINT_BYTES]
    except OSError:
        return None
    return text.decode("utf-8", "replace").strip()


def remove_leftovers(root: Path | str) -> None:
    """Remove what a dead writer left behind.

    The caller must hold the run lock: the folder of a live writer looks the same.
    """
    for path in Path(root).glob("*"):
        if LEFTOVER.fullmatch(path.name):
            remove(path)
    remove_orphan_markers(Path(root))


def remove_orphan_markers(root: Path) -> None:
    """Remove marks left by failed saves, i.e. of steps after the newest checkpoint. Never raises.

    A later save of that step may not be meant to be permanent. An empty mark, made by a person, stays; so
    does that of an earlier step, whose checkpoint was moved away and may come back.
    """
    newest = max((step for step, _ in committed_checkpoints(root)), default=-1)
    with contextlib.suppress(OSError):
        for path in root.glob("step_*.keep"):
            match = STEP.fullmatch(path.stem)
            if match and int(match[1]) > newest and path.lstat().st_size > 0:
                remove(path)


# ---- load --------------------------------------------------------------------------------------------------

def load(
    source: Path | str | StoredIndex,
    wants: Pieces,
    *,
    strict: bool = True,
    allow: Sequence[str] = (),
    allow_cast: bool = False,
    others: Iterable[str] = (),
) -> None:
    """Fill each tensor of `wants` from a checkpoint saved with any layout.

    All pieces are verified before any tensor is filled, so an error changes no tensor. If many ranks must
    agree in between, use start_load.

    `source` is the checkpoint folder, or its index if already read. `wants` are (Box, tensor of box.size on
    any device). With `strict`, a stored key that no rank wants is an error, except keys that match a pattern
    of `allow`, such as "optim.*". `others` are keys that other ranks want. With `allow_cast`, dtypes may
    differ.

    Raises IntegrityError if the checkpoint is damaged, or ConfigError, listing all differences, if it does
    not fit.
    """
    start_load(source, wants, strict=strict, allow=allow, allow_cast=allow_cast, others=others).fill()


@dataclass(frozen=True)
class StartedLoad:
    """Pieces that are verified, but not yet copied to their tensors.

    `kept` is {piece: its bytes}; the others did not fit in memory and are read and verified again. `release`
    unlocks the folder, which nobody may remove before that. A load that is dropped because another rank found
    damage releases the lock as well.
    """
    path: Path
    reads: Reads
    offsets: dict[StoredPiece, int]
    kept: dict[StoredPiece, torch.Tensor]
    release: Callable[[], object]

    def fill(self) -> None:
        """Copy the pieces to their tensors. Raises IntegrityError."""
        again: dict[str, list[StoredPiece]] = defaultdict(list)
        for piece in self.reads:
            if piece not in self.kept:
                again[piece.file].append(piece)
                continue
            copy_piece(piece, self.kept.pop(piece), self.reads)
        for file, pieces in again.items():
            copy_from_file(self.path / file, pieces, self.offsets, self.reads)
        self.release()


def start_load(
    source: Path | str | StoredIndex,
    wants: Pieces,
    *,
    strict: bool = True,
    allow: Sequence[str] = (),
    allow_cast: bool = False,
    others: Iterable[str] = (),
    sharers: int = 1,
) -> StartedLoad:
    """Verify every byte that load would read, in several threads, without changing a tensor. See load.

    Verified bytes are kept in memory, up to KEPT_SHARE of what is free, so that they are read only once.
    Memory is allocated only for sizes confirmed by the file headers. `sharers` counts the processes of this
    machine that load concurrently.
    """
    path = source.path if isinstance(source, StoredIndex) else Path(source)
    wants = list(wants)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder_lock(path, fcntl.LOCK_SH))

        # find the stored pieces of each key, and check that they fit
        index = source if isinstance(source, StoredIndex) else read_stored_index(path)
        stored = index.by_key()
        extra = extra_keys(stored, wants, allow, others) if strict else []
        check_fits(path, stored, wants, extra=extra, allow_cast=allow_cast)

        # verify every byte to be read
        reads = plan_reads(stored, wants)
        kept: dict[StoredPiece, torch.Tensor] = {}
        room = int(KEPT_SHARE * available_bytes() / sharers)
        offsets = check_pieces(path, index.shards(), reads, kept=kept, room=room)
        return StartedLoad(path, reads, offsets, kept, release=stack.pop_all().close)


def extra_keys(
    stored: dict[str, list[StoredPiece]], wants: list[Piece], allow: Sequence[str], others: Iterable[str]
) -> list[str]:
    """Return stored keys that no rank wants and that match no pattern of `allow`."""
    wanted = {*others, *(box.key for box, _ in wants)}
    unwanted = [key for key in stored if key not in wanted]
    return [key for key in unwanted if not any(fnmatch(key, pattern) for pattern in allow)]


def check_fits(
    path: Path,
    stored: dict[str, list[StoredPiece]],
    wants: list[Piece],
    *,
    extra: list[str],
    allow_cast: bool,
) -> None:
    """Raise ConfigError with every difference between what is stored and what is wanted.

    Raises IntegrityError if the stored pieces leave a hole in a wanted box, or ValueError if a tensor does
    not fit its box.
    """
    wrong: list[str] = []
    for box, tensor in wants:
        pieces = stored.get(box.key, [])
        if tuple(tensor.shape) != tuple(box.size):
            raise ValueError(f"{box}: its tensor has shape {tuple(tensor.shape)}")
        difference = describe_mismatch(box, tensor, pieces, allow_cast)
        if difference is not None:
            wrong.append(difference)
            continue
        holes = uncovered_boxes(box, [piece.box for piece in pieces])
        if holes:
            hole = f"{holes[0]} of shape {box.shape}"
            raise IntegrityError(f"{path}: {hole}: no stored piece covers this region")

    wrong += [f"{key} is extra" for key in extra]
    if wrong:
        wrong = list(dict.fromkeys(wrong))  # each once
        named = "; ".join(wrong[:MAX_NAMED])
        more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise ConfigError(f"{path}: does not fit this run, nothing was loaded: {named}{more}")


def describe_mismatch(box: Box, tensor: torch.Tensor, pieces: list[StoredPiece],
                      allow_cast: bool) -> str | None:
    """Describe how the stored pieces of a key differ from what is wanted, or return None."""
    if not pieces:
        return f"{box.key} is missing"
    stored_shape = pieces[0].box.shape
    if stored_shape != tuple(box.shape):
        return f"{box.key} has shape {stored_shape}, wanted {tuple(box.shape)}"

    wanted_dtype = DTYPES.get(tensor.dtype)
    other_dtypes = {piece.dtype for piece in pieces} - {wanted_dtype}
    if other_dtypes and not allow_cast:
        return f"{box.key} is {', '.join(sorted(other_dtypes))}, wanted {wanted_dtype or tensor.dtype}"
    return None


def plan_reads(stored: dict[str, list[StoredPiece]], wants: list[Piece]) -> Reads:
    """Return {stored piece: [(slices of it, view that they fill)]}, so that each piece is verified and
    mapped once."""
    reads: Reads = defaultdict(list)
    for box, tensor in wants:
        pieces = stored[box.key]
        for position, source, target in plan_read(box, [piece.box for piece in pieces]):
            reads[pieces[position]].append((source, tensor.detach()[target]))
    return reads


def copy_from_file(
    path: Path, pieces: list[StoredPiece], offsets: dict[StoredPiece, int], reads: Reads
) -> None:
    """Copy pieces of one file to their tensors, verifying each first.

    Holds one piece in memory at a time. Raises IntegrityError.
    """
    with open_shard(path) as fd:
        for piece in pieces:
            data = np.empty(piece.num_bytes, dtype=np.uint8)
            if not read_hashed(fd, offsets[piece], data, piece.checksum):
                raise IntegrityError(f"{path}: {piece.name} no longer matches its checksum")
            copy_piece(piece, torch.from_numpy(data), reads)


def copy_piece(piece: StoredPiece, values: torch.Tensor, reads: Reads) -> None:
    """Copy the bytes of a piece to the tensors that want a part of it."""
    shaped = values.view(TORCH[piece.dtype]).view(piece.box.size)
    for source, target in reads[piece]:
        target.copy_(shaped[source])
