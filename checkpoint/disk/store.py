"""Checkpoints on disk: tensors in pieces, committed by one rename, trusted only after every checksum.

Each piece is stored with its global coordinates, so a checkpoint does not depend on the layout that saved it.

    root/step_00001000/     a committed checkpoint; checkpoint/disk/folder.py describes what it holds
    root/step_00001000.keep a mark, by the run or by hand: this checkpoint is permanent, and never purged
    root/latest             the name of the newest one: a hint for people, never trusted
    root/*.tmp-*, .trash-*  what a writer that died left behind; removed at the next start or save

Guarantees:

- A folder with a final name is complete. Shards, meta, index and checksum are flushed to disk and read back
  before the rename. `latest` is written last. Nothing is ever written into a committed folder.
- Whenever the process is killed, either the old or the new checkpoint loads, never a mix of both.
- Any changed bit of what is read is found before a tensor changes.
- A save that fails leaves unchanged what was there before.
- Loading reshards from any layout to any other.
- Nothing is pickled.

What did not change since the newest earlier checkpoint is linked, file by file (checkpoint/disk/links.py).

One process at a time writes to a root (`run_lock`). Many ranks write one checkpoint together: each rank
writes its own pieces, and rank 0 writes the rest. Rank 0 alone learns what the others hold. Every phase ends
in Ranks.gather, so that a rank that fails makes all ranks raise the same error. The cost: one digest while
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
    num_bytes,
    open_shard,
    raw_bytes,
    read_hashed,
    reads_as,
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

# Where a writer can die and leave a different folder behind. The crash tests kill it at each of these points.
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
SHARD_BYTES = 1 << 30  # pieces share a file up to this size; a larger piece has a file of its own
LEAST_SHARD_BYTES = 64 << 20  # a smaller file is not made for the sake of threads
FILES_A_THREAD = 4
PIECE_BYTES = 256 << 20  # a larger tensor is stored in several pieces, if it has rows
KEPT_SHARE = 0.5  # of the free memory of a machine, that loading takes for verified bytes
MAX_NAMED = 8  # differences between a checkpoint and a run that an error names; the rest is only counted
FREE_SPACE_MARGIN = 1.2  # free space that a save asks for, over the bytes of the tensors
PACK_LEVEL = 1  # of zlib, for what ranks tell each other
ALONE = Ranks()
MAX_HINT_BYTES = 200  # of `latest`, that are read
STEP = re.compile(r"step_(\d{8,})")
LEFTOVER = re.compile(r"(step_\d{8,}|latest)\.tmp-[0-9a-f]{32}|\.trash-.+")

Piece = tuple[Box, torch.Tensor]  # a tensor of box.size, and where it lies in the whole tensor
Pieces = Iterable[Piece]
ReadValues = Callable[[Piece], torch.Tensor]  # the values of a piece
Read = tuple[tuple[slice, ...], torch.Tensor]  # slices of a stored piece, and the view that they fill
Reads = dict[StoredPiece, list[Read]]
FaultPoint = Callable[[str], object]  # called with each name of FAULT_POINTS when it is reached


def no_fault(point: str) -> None:
    """A FaultPoint that does nothing."""


# ---- save --------------------------------------------------------------------------------------------------

def own_values(piece: Piece) -> torch.Tensor:
    """The tensor of a piece."""
    return piece[1]


@dataclass(frozen=True)
class PendingSave:
    """A save that has begun and is not committed yet: the same on every rank, except for fault_point and
    read."""
    final: Path  # the folder once it is committed
    step: int
    save_id: str  # of 32 hex digits; the index, meta.json and every shard that is written repeat it
    total_bytes: int  # of the tensors of all ranks
    earlier: Path | None  # the checkpoint whose files may be linked
    fault_point: FaultPoint
    read: ReadValues = own_values

    @property
    def temp(self) -> Path:
        """The folder until it is committed."""
        return self.final.with_name(f"{self.final.name}.tmp-{self.save_id}")


@dataclass(frozen=True)
class RankShards:
    """The shards that one rank wrote, for the index.

    rows: those of its pieces in the index, packed.
    """
    files: dict[str, FileEntry]
    rows: bytes


def pack(rows: object) -> bytes:
    """JSON data in few bytes: rows of an index repeat themselves."""
    return zlib.compress(json.dumps(rows).encode(), PACK_LEVEL)


def unpack(packed: bytes) -> Any:
    """The data that pack was given, with lists for tuples. Raises MessageError."""
    return json.loads(decompress(packed, messages.MAX_TOTAL_BYTES))


def decompress(packed: bytes, max_bytes: int) -> bytes:
    """The data that zlib has packed. Raises MessageError where it exceeds max_bytes, before it takes more."""
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(packed, max(max_bytes, 1))  # 0 would be no limit
        is_whole = reader.eof or (not reader.decompress(reader.unconsumed_tail, 1) and reader.eof)
    except zlib.error as error:
        raise messages.MessageError(f"{len(packed):,} bytes are no packed data: {error}") from None
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
    """Writes and commits root/step_<step>, then purges all but permanent and the `keep` newest checkpoints.

    Collective. The first rank alone learns what the others hold, and writes the index.

    pieces: this rank's (Box, tensor of box.size). Over all ranks they cover every element of every key
    exactly once.
    meta: JSON data. mark: why it is permanent; "": it is not. Rank 0's counts.
    fault_point: called with each name of FAULT_POINTS when it is reached. timeout_s: see
    together.agree_on_outcome. threads: of this rank, that look for NaN, hash and write. linked: gets the
    bytes of all files that were linked, once they are committed. read: the values of a piece, or of some of
    its rows, if its tensor has none (on the device "meta"): called when it is written, and when it is read
    back.

    Returns the committed folder. A step that is committed already and verifies is left as it is: the same run
    saved it before it was resumed.

    Raises StorageError (what was there before is unchanged), NonFiniteTensor (nothing is committed),
    ValueError (the pieces are wrong).
    """
    root = Path(root)
    pieces = list(pieces)
    final = checkpoint_folder(root, step)

    # Check everything that can be checked before a byte is written.
    checked = ranks.gather_first(ranks.all_do(lambda: check_tensors(pieces), timeout_s))
    save_id, total_bytes, earlier = ranks.first_does(
        lambda: begin_save(final, checked, meta, mark, keep), timeout_s
    )

    # Write the shards of all ranks into a temporary folder, then rename it.
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
            own = ranks.all_do(lambda: write_pieces(pending, pieces, ranks, threads), timeout_s)
            shards = ranks.gather_first(own)
            linked_bytes = ranks.first_does(lambda: commit(pending, shards, meta), timeout_s)
        except BaseException as error:
            # After a timeout or an interrupt a rank may still be at work, and give what is left of the folder
            # its final name: the next start removes it.
            have_ended = isinstance(error, Exception) and not isinstance(error, PeerError)
            if ranks.rank == 0 and (have_ended or ranks.size == 1):
                remove(pending.temp)
                remove_vain_marks(root)
            raise
        if linked is not None:
            linked.append(linked_bytes)

    ranks.first_does(lambda: publish(final, step, keep, fault_point), timeout_s)
    return final


def check_tensors(pieces: list[Piece]) -> tuple[bytes, int]:
    """This rank's boxes, packed, and their bytes.

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
    """Rank 0: prepares the root, and marks the checkpoint before it is there: no kill can come between.

    checked: what check_tensors found on each rank. Returns (the id of the new save, bytes of all tensors,
    folder_to_link()); the id is None if this step is committed already and verifies.
    Raises ValueError if the boxes leave a hole or overlap; TypeError if meta is not JSON; StorageError.
    """
    boxes: list[Box] = []
    for rows, _ in checked:
        boxes += from_rows(unpack(rows))
    check_tiling(boxes)
    total_bytes = sum(rank_bytes for _, rank_bytes in checked)
    json.dumps(meta)  # raises before a byte is written
    with storage_errors(final, total_bytes):
        os.makedirs(final.parent, exist_ok=True)
        sync_dir(final.parent.parent)  # else a power cut could take the whole folder of checkpoints
        remove_leftovers(final.parent)
        save_id = None
        if not verifies(final):  # a bad folder stays until the new one takes its name
            check_free_space(final, total_bytes)
            save_id = uuid.uuid4().hex
        if mark and not mark_of(final).exists():
            write_mark(final, mark)
        earlier = folder_to_link(final, keep) if save_id is not None else None
    return save_id, total_bytes, earlier


def verifies(path: Path) -> bool:
    """Whether every byte of the folder is what was written; False if there is none. Raises NewerFormat."""
    try:
        verify(path)
        return True
    except IntegrityError:
        return False


def write_mark(checkpoint: Path, mark: str) -> None:
    """Makes a checkpoint permanent. The mark is never there in part: an empty one would be a person's."""
    temp = checkpoint.with_name(f"{checkpoint.name}.tmp-{uuid.uuid4().hex}")
    write_file(temp, f"{mark}\n".encode())
    os.replace(temp, mark_of(checkpoint))
    sync_dir(checkpoint.parent)


def folder_to_link(final: Path, keep: int) -> Path | None:
    """The checkpoint whose files a save may link: the newest earlier one, or None where it may link none.

    A byte that the disk loses of a linked file damages both checkpoints. So none is linked where these two
    are all that is left after the save. Nor for a permanent checkpoint, which may have to outlast all others.
    """
    earlier = earlier_checkpoints(final.parent, step_of(final))
    if not earlier or mark_of(final).exists():
        return None
    purged = too_old(earlier, keep)
    num_left = len(earlier) - len(purged)
    return earlier[0] if earlier[0] in purged or num_left > 1 else None


def check_free_space(final: Path, total_bytes: int) -> None:
    """Raises StorageError if the disk has too little free space for this save."""
    free = shutil.disk_usage(final.parent).free
    wanted = total_bytes * FREE_SPACE_MARGIN
    if free < wanted:
        why = (f"{free:,} bytes are free, {int(wanted):,} wanted ({FREE_SPACE_MARGIN} times its tensors); "
               "make room, or lower checkpoint.keep")
        raise StorageError(final, total_bytes, why)


def write_pieces(pending: PendingSave, pieces: list[Piece], ranks: Ranks, threads: int) -> RankShards:
    """Writes this rank's shards, flushes them and reads them back. Raises StorageError; NonFiniteTensor.

    Each of the threads writes a file at a time. Others wait for the disk meanwhile, and what it has is read
    back while it still writes the rest.
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

    flushed: None if it is linked, and so was on disk before.
    """
    file: str
    entry: FileEntry
    pieces: list[StoredPiece]
    flushed: "Future[None] | None"


def write_group(
    pending: PendingSave, file: str, group: list[Piece], flushers: ThreadPoolExecutor
) -> WrittenShard:
    """Links a shard file that did not change; or writes it, and a thread of `flushers` brings it to disk."""
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
    """Waits until each shard is on disk. Raises IntegrityError unless it reads back as the tensors that it
    was made of; OSError if it could not be flushed.

    The tensors are still in memory, so the bytes are compared and not hashed a second time. Those of a linked
    file were compared before.
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
                if not reads_as(fd, offsets[piece], raw_bytes(pending.read(of_rank))):
                    raise IntegrityError(f"{path}: {piece.name} is not what was written")

    run_in_threads(compare, written, threads)


def divide_large(pieces: list[Piece]) -> Iterator[Piece]:
    """The pieces; one that is larger than PIECE_BYTES in parts of its rows, for several threads."""
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
    """Groups the pieces, one group for each file: large ones, but a few for each thread.

    In a file, wide dtypes come first, so that every tensor is aligned.
    """
    pieces = list(pieces)
    total_bytes = sum(num_bytes(tensor) for _, tensor in pieces)
    share = total_bytes // (FILES_A_THREAD * threads)
    file_bytes = min(SHARD_BYTES, max(share, LEAST_SHARD_BYTES))

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
    """Raises StorageError if check() raises IntegrityError.

    A disk that returns other bytes than it was given is found while the previous checkpoint is still there.
    """
    try:
        check()
    except IntegrityError as error:
        why = f"what was written reads back differently: {error}"
        raise StorageError(pending.temp, pending.total_bytes, why) from error


def commit(pending: PendingSave, shards: list[RankShards], meta: Tree) -> int:
    """Rank 0, once all shards are on disk: writes the small files and renames the folder.

    This one rename makes it a checkpoint. Returns the bytes of its files that are linked.
    """
    with storage_errors(pending.temp, pending.total_bytes):
        write_meta_and_index(pending, shards, meta)
        read_back(pending, lambda: read_meta(pending.temp))
        rename_to_final(pending)
    entries = [entry for part in shards for entry in part.files.values()]
    return sum(int(entry["bytes"]) for entry in entries if "save_id" in entry)


def write_meta_and_index(pending: PendingSave, shards: list[RankShards], meta: Tree) -> None:
    """Writes meta.json, the index of all ranks' shards, and its checksum; flushes them to disk."""
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
    """Gives the folder its final name, and flushes the rename to disk."""
    final = pending.final
    pending.fault_point("ckpt.pre_rename")
    if os.path.lexists(final):  # begin_save found it bad
        move_to_trash(final)
        pending.fault_point("ckpt.mid_replace")
    os.rename(pending.temp, final)
    pending.fault_point("ckpt.post_rename")
    sync_dir(final.parent)


def adopt(temp: Path, final: Path) -> None:
    """Gives a verified folder, which was copied from elsewhere, its final name, and lets `latest` name it.

    temp: named like that of a save. The caller holds the run's lock. Raises OSError.
    """
    if os.path.lexists(final):  # the caller found it bad
        move_to_trash(final)
    os.rename(temp, final)
    sync_dir(final.parent)
    write_latest(final, no_fault)


def publish(final: Path, step: int, keep: int, fault_point: FaultPoint) -> None:
    """Rank 0, once the folder is committed: lets `latest` name it, and purges older ones."""
    root = final.parent
    with storage_errors(root / "latest", 0):
        write_latest(final, fault_point)
        purge_older(root, step, keep, fault_point)


def write_latest(final: Path, fault_point: FaultPoint) -> None:
    """Lets `latest` name the new checkpoint."""
    root = final.parent
    fault_point("ckpt.pre_latest")
    temp = root / f"latest.tmp-{uuid.uuid4().hex}"
    write_file(temp, f"{final.name}\n".encode())
    fault_point("ckpt.mid_latest")
    os.replace(temp, root / "latest")
    sync_dir(root)


def purge_older(root: Path, step: int, keep: int, fault_point: FaultPoint) -> None:
    """Purges all but the `keep` newest checkpoints up to `step` and permanent ones, oldest first.

    A checkpoint that is being read is not purged. A folder of a later step is left alone: it is bad and will
    be replaced once the run gets there, or it is not this run's to delete. One of a newer format is left
    alone, too.
    """
    fault_point("ckpt.pre_purge")
    for path in reversed(too_old(earlier_checkpoints(root, step), keep)):
        with folder_lock(path, fcntl.LOCK_EX) as nobody_reads:
            if nobody_reads and not is_newer_format(path):
                move_to_trash(path)
                fault_point("ckpt.mid_purge")
    remove_leftovers(root)


def earlier_checkpoints(root: Path, step: int) -> list[Path]:
    """The committed checkpoints of earlier steps, newest first."""
    return [path for other_step, path in committed_checkpoints(root) if other_step < step]


def too_old(earlier: list[Path], keep: int) -> list[Path]:
    """Of the checkpoints before the newest one, those that are purged: beyond `keep`, and not permanent."""
    return [path for path in earlier[max(keep, 1) - 1:] if not mark_of(path).exists()]


def drop_after(root: Path, step: int) -> None:
    """Removes the checkpoints of later steps, the newest first, and their marks: the run goes another way.

    So a start that finds one of them, after a kill in between, finds also those before it.
    """
    for other_step, path in committed_checkpoints(root):
        if other_step <= step:
            continue
        with storage_errors(root, 0), folder_lock(path, fcntl.LOCK_EX):
            mark_of(path).unlink(missing_ok=True)  # first: a kill leaves none to the next one
            move_to_trash(path)
    write_latest(checkpoint_folder(root, step), no_fault)
    remove_leftovers(root)


def mark_of(checkpoint: Path) -> Path:
    """The file beside a checkpoint that makes it permanent."""
    return checkpoint.with_name(f"{checkpoint.name}.keep")


def seconds_since_mark(root: Path, mark: str) -> float:
    """The age of the newest checkpoint of the root that is permanent with this mark; infinite without one."""
    times = [0.0]
    for _, path in committed_checkpoints(root):
        try:
            if mark_of(path).read_text().strip() == mark:
                times.append(path.stat().st_mtime)
        except OSError:  # not permanent, or purged meanwhile
            continue
    return time.time() - max(times) if max(times) else float("inf")


def move_to_trash(path: Path) -> None:
    """Renames a folder, to be deleted later.

    To delete it file by file could leave half a checkpoint under its name.
    """
    os.rename(path, path.with_name(f".trash-{path.name}-{uuid.uuid4().hex}"))


# ---- find --------------------------------------------------------------------------------------------------

def checkpoint_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of this step lies."""
    return root / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint folder, by its name, which a check compares with what it holds."""
    match = STEP.fullmatch(path.name)
    assert match is not None  # of committed_checkpoints
    return int(match[1])


def committed_checkpoints(root: Path | str) -> list[tuple[int, Path]]:
    """[(step, folder)] of every checkpoint that has a final name, newest first.

    None of them is verified here.
    """
    found: list[tuple[int, Path]] = []
    for path in Path(root).glob("step_*"):
        match = STEP.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def newest_checkpoint(
    root: Path | str,
    log: list[str] | None = None,
    bad: dict[Path, str] | None = None,
    check: Callable[[Path], StoredIndex] = verify,
) -> Path | None:
    """The newest checkpoint that is good; None if there never was one.

    log: gets a line for each checkpoint that is rejected, and one if `latest` is wrong.
    bad: {folder: why} of checkpoints that were found damaged before.
    check: verify checks every byte. quick_check reads the small files alone; load() then verifies what it
    reads.

    Raises IntegrityError if there are checkpoints and none is good; ConfigError if one has a newer format.
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
    """Raises IntegrityError if the folder is in `bad`, fails the check, or does not hold its step."""
    why = bad.get(path)
    if why is not None:
        raise IntegrityError(why)
    found = check(path).step
    if found != step:
        raise IntegrityError(f"{path}: holds step {found}")


def read_latest(root: Path) -> str | None:
    """The text of `latest`; None if it cannot be read."""
    try:
        text = (root / "latest").read_bytes()[:MAX_HINT_BYTES]
    except OSError:
        return None
    return text.decode("utf-8", "replace").strip()


def remove_leftovers(root: Path | str) -> None:
    """Removes what a writer that died left behind.

    The caller must hold the run lock: the folder of a writer that is still at work looks the same.
    """
    for path in Path(root).glob("*"):
        if LEFTOVER.fullmatch(path.name):
            remove(path)
    remove_vain_marks(Path(root))


def remove_vain_marks(root: Path) -> None:
    """Removes the marks that failed saves have left: of steps after the newest checkpoint. Never raises.

    Another save of that step may not be meant to be permanent. A mark that a person has made, which is empty,
    stays; so does one of an earlier step, whose checkpoint was moved away and may come back.
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
    """Fills each tensor of `wants` from a checkpoint that any layout saved.

    First the bytes of every piece to be read are verified, then the tensors are filled. So an error changes
    no tensor. For many ranks, which must agree between the two: start_load.

    source: the checkpoint folder, or its index if it was read before.
    wants: (Box, tensor of box.size on any device).
    strict: a stored key that no rank wants is an error.
    allow: except for keys that match one of these patterns, such as "optim.*".
    others: keys that other ranks want.
    allow_cast: the dtype may differ.

    Raises IntegrityError if the checkpoint is damaged; ConfigError, with all differences, if it does not fit.
    """
    start_load(source, wants, strict=strict, allow=allow, allow_cast=allow_cast, others=others).fill()


@dataclass(frozen=True)
class StartedLoad:
    """Pieces that are verified, and not yet in their tensors.

    kept: {piece: its bytes}. The others are read and verified again: there was no memory for them.
    release: gives back the lock on the folder, which nobody may remove before it is filled. A load that is
    dropped, because another rank has found damage, gives it back, too.
    """
    path: Path
    reads: Reads
    offsets: dict[StoredPiece, int]
    kept: dict[StoredPiece, torch.Tensor]
    release: Callable[[], object]

    def fill(self) -> None:
        """Copies the pieces into their tensors. Raises IntegrityError."""
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
    """Verifies every byte that load would read, in several threads, and changes no tensor. See load.

    What is verified is kept in memory, within KEPT_SHARE of what is free, and so read once. Memory is taken
    only for what the headers of the files confirm. sharers: processes of this machine that load at the time.
    """
    path = source.path if isinstance(source, StoredIndex) else Path(source)
    wants = list(wants)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder_lock(path, fcntl.LOCK_SH))

        # Find the stored pieces of each key, and check that they fit.
        index = source if isinstance(source, StoredIndex) else read_stored_index(path)
        stored = index.by_key()
        extra = extra_keys(stored, wants, allow, others) if strict else []
        check_fits(path, stored, wants, extra=extra, allow_cast=allow_cast)

        # Verify every byte that is to be read.
        reads = plan_reads(stored, wants)
        kept: dict[StoredPiece, torch.Tensor] = {}
        room = int(KEPT_SHARE * available_bytes() / sharers)
        offsets = check_pieces(path, index.shards(), reads, kept=kept, room=room)
        return StartedLoad(path, reads, offsets, kept, release=stack.pop_all().close)


def extra_keys(
    stored: dict[str, list[StoredPiece]], wants: list[Piece], allow: Sequence[str], others: Iterable[str]
) -> list[str]:
    """Stored keys that no rank wants and that match no pattern of `allow`."""
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
    """Raises ConfigError with every difference between what is stored and what is wanted.

    Raises IntegrityError if the stored pieces leave a hole in a wanted box; ValueError if a tensor is not of
    its box.
    """
    wrong: list[str] = []
    for box, tensor in wants:
        pieces = stored.get(box.key, [])
        if tuple(tensor.shape) != tuple(box.size):
            raise ValueError(f"{box}: its tensor has shape {tuple(tensor.shape)}")
        difference = difference_of(box, tensor, pieces, allow_cast)
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


def difference_of(box: Box, tensor: torch.Tensor, pieces: list[StoredPiece], allow_cast: bool) -> str | None:
    """How the stored pieces of a key differ from what is wanted, in words; None if they do not."""
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
    """{stored piece: [(slices of it, the view that they fill)]}: each piece is verified and mapped once."""
    reads: Reads = defaultdict(list)
    for box, tensor in wants:
        pieces = stored[box.key]
        for position, source, target in plan_read(box, [piece.box for piece in pieces]):
            reads[pieces[position]].append((source, tensor.detach()[target]))
    return reads


def copy_from_file(
    path: Path, pieces: list[StoredPiece], offsets: dict[StoredPiece, int], reads: Reads
) -> None:
    """Copies pieces of one file into their tensors, each after its bytes were verified.

    One piece is in memory at a time. Raises IntegrityError.
    """
    with open_shard(path) as fd:
        for piece in pieces:
            data = np.empty(piece.num_bytes, dtype=np.uint8)
            if not read_hashed(fd, offsets[piece], data, piece.checksum):
                raise IntegrityError(f"{path}: {piece.name} does not match its checksum, and did before")
            copy_piece(piece, torch.from_numpy(data), reads)


def copy_piece(piece: StoredPiece, values: torch.Tensor, reads: Reads) -> None:
    """Copies the bytes of a piece into the tensors that want a part of it."""
    shaped = values.view(TORCH[piece.dtype]).view(piece.box.size)
    for source, target in reads[piece]:
        target.copy_(shaped[source])
