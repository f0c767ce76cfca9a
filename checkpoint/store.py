"""Checkpoints on disk: tensors in pieces, committed by one rename, trusted only after every checksum.

Each piece is stored with its global coordinates, so a checkpoint does not depend on the layout that saved it.

    root/step_00001000/     a committed checkpoint; checkpoint/folder.py describes what it holds
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

One process at a time writes to a root (`run_lock`). Many ranks write one checkpoint together: each rank
writes its own pieces, and rank 0 writes the rest. Every phase ends in `gather`, so that a rank that fails
makes all ranks raise the same error. The cost: one sha256 while writing, one while reading back or loading,
and one piece in memory at a time.
"""
import fcntl
import json
import mmap
import os
import re
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import torch

from checkpoint import folder
from checkpoint.files import (
    DTYPES,
    TORCH,
    FileEntry,
    IntegrityError,
    NonFiniteTensor,
    StorageError,
    num_bytes,
    open_shard,
    remove,
    storage_errors,
    sync_dir,
    write_file,
    write_shard,
)
from checkpoint.folder import (
    VERSION,
    Index,
    StoredPiece,
    check_pieces,
    index_bytes,
    is_newer_format,
    quick_check,
    read_index,
    read_meta,
    seal_index,
    verify,
)
from checkpoint.locks import folder_lock, run_lock
from checkpoint.together import Gather, agree_on_outcome
from config import ConfigError, Tree
from parallel.sharding.boxes import Box, check_tiling, plan_read, uncovered_boxes

__all__ = [
    "FAULT_POINTS", "Index", "IntegrityError", "NonFiniteTensor", "StorageError", "adopt",
    "check_free_space", "committed_checkpoints", "load", "newest_checkpoint", "quick_check", "read_index",
    "read_meta", "remove_leftovers", "run_lock", "save", "seconds_since_mark", "storage_errors", "verify",
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
MAX_NAMED = 8  # differences between a checkpoint and a run that an error names; the rest is only counted
FREE_SPACE_MARGIN = 1.2  # free space that a save asks for, over the bytes of the tensors
MAX_HINT_BYTES = 200  # of `latest`, that are read
STEP = re.compile(r"step_(\d{8,})")
LEFTOVER = re.compile(r"(step_\d{8,}|latest)\.tmp-[0-9a-f]{32}|\.trash-.+")

Piece = tuple[Box, torch.Tensor]  # a tensor of box.size, and where it lies in the whole tensor
Pieces = Iterable[Piece]
Read = tuple[tuple[slice, ...], torch.Tensor]  # slices of a stored piece, and the view that they fill
Reads = dict[StoredPiece, list[Read]]
FaultPoint = Callable[[str], object]  # called with each name of FAULT_POINTS when it is reached
Result = TypeVar("Result")


def no_fault(point: str) -> None:
    """A FaultPoint that does nothing."""


def gather_alone(mine: object) -> list[Any]:
    """`gather` of a single rank."""
    return [mine]


def do_nothing() -> None:
    """The part of a rank that has none."""


# ---- save --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class PendingSave:
    """A save that has begun and is not committed yet: the same on every rank, except for fault_point."""
    final: Path  # the folder once it is committed
    step: int
    save_id: str  # of 32 hex digits; the index, meta.json and every shard repeat it
    total_bytes: int  # of the tensors of all ranks
    fault_point: FaultPoint

    @property
    def temp(self) -> Path:
        """The folder until it is committed."""
        return self.final.with_name(f"{self.final.name}.tmp-{self.save_id}")


@dataclass(frozen=True)
class RankShards:
    """What one rank wrote, for the index."""
    files: dict[str, FileEntry]
    pieces: list[StoredPiece]


def save(
    root: Path | str,
    step: int,
    pieces: Pieces,
    meta: Tree,
    *,
    keep: int,
    mark: str = "",
    fault_point: FaultPoint = no_fault,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = gather_alone,
    timeout_s: float | None = None,
) -> Path:
    """Writes and commits root/step_<step>, then purges all but permanent and the `keep` newest checkpoints.

    Collective.

    pieces: this rank's (Box, tensor of box.size). Over all ranks they cover every element of every key
    exactly once.
    meta: JSON data. mark: why it is permanent; "": it is not. Rank 0's counts.
    fault_point: called with each name of FAULT_POINTS when it is reached. gather, timeout_s: see
    together.agree_on_outcome.

    Returns the committed folder. A step that is committed already and verifies is left as it is: the same run
    saved it before it was resumed.

    Raises StorageError (what was there before is unchanged), NonFiniteTensor (nothing is committed),
    ValueError (the pieces are wrong).
    """
    root = Path(root)
    pieces = list(pieces)
    final = checkpoint_folder(root, step)

    def all_ranks_do(work: Callable[[], Result]) -> list[Result]:
        return agree_on_outcome(gather, work, timeout_s)

    def first_rank_does(work: Callable[[], Result]) -> Result:
        own_part: Callable[[], Any] = work if rank == 0 else do_nothing
        results = all_ranks_do(own_part)
        return results[0]

    # Check everything that can be checked before a byte is written.
    checked = all_ranks_do(lambda: check_tensors(pieces))
    boxes = [box for rank_boxes, _ in checked for box in rank_boxes]
    total_bytes = sum(rank_bytes for _, rank_bytes in checked)
    save_id = first_rank_does(lambda: begin_save(final, boxes, meta, total_bytes, mark))

    # Write the shards of all ranks into a temporary folder, then rename it.
    if save_id is not None:
        pending = PendingSave(
            final=final, step=step, save_id=save_id, total_bytes=total_bytes, fault_point=fault_point
        )
        try:
            shards = all_ranks_do(lambda: write_pieces(pending, pieces, rank, world_size))
            first_rank_does(lambda: commit(pending, shards, meta))
        except BaseException:
            if rank == 0:
                remove(pending.temp)
            raise

    first_rank_does(lambda: publish(final, step, keep, fault_point))
    return final


def check_tensors(pieces: list[Piece]) -> tuple[list[Box], int]:
    """This rank's boxes and their bytes. Raises ValueError for a tensor that cannot be stored as its box."""
    for box, tensor in pieces:
        if tuple(tensor.shape) != tuple(box.size):
            raise ValueError(f"{box}: its tensor has shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{box}: dtype {tensor.dtype} cannot be stored")
    boxes = [box for box, _ in pieces]
    return boxes, sum(num_bytes(tensor) for _, tensor in pieces)


def begin_save(final: Path, boxes: list[Box], meta: Tree, total_bytes: int, mark: str) -> str | None:
    """Rank 0: prepares the root, and marks the checkpoint before it is there: no kill can come between.

    Returns the id of the new save; None if this step is committed already and verifies.
    Raises ValueError if the boxes leave a hole or overlap; TypeError if meta is not JSON; StorageError.
    """
    check_tiling(boxes)
    json.dumps(meta)  # raises before a byte is written
    with storage_errors(final, total_bytes):
        os.makedirs(final.parent, exist_ok=True)
        sync_dir(final.parent.parent)  # else a power cut could take the whole folder of checkpoints
        remove_leftovers(final.parent)
        if mark and not mark_of(final).exists():
            write_file(mark_of(final), f"{mark}\n".encode())
        if os.path.lexists(final):
            try:
                verify(final)
                return None
            except IntegrityError:
                pass  # the bad folder stays until the new one takes its name
        check_free_space(final, total_bytes)
    return uuid.uuid4().hex


def check_free_space(final: Path, total_bytes: int) -> None:
    """Raises StorageError if the disk has too little free space for this save."""
    free = shutil.disk_usage(final.parent).free
    wanted = total_bytes * FREE_SPACE_MARGIN
    if free < wanted:
        why = f"{free:,} bytes are free, {int(wanted):,} wanted; make room, or lower checkpoint.keep"
        raise StorageError(final, total_bytes, why)


def write_pieces(pending: PendingSave, pieces: list[Piece], rank: int, world_size: int) -> RankShards:
    """Writes this rank's shards, flushes them and reads them back. Raises StorageError; NonFiniteTensor."""
    temp = pending.temp
    prefix = f"rank_{rank:05d}_" if world_size > 1 else ""
    files: dict[str, FileEntry] = {}
    stored: list[StoredPiece] = []
    with storage_errors(temp, pending.total_bytes):
        temp.mkdir(exist_ok=True)
        pending.fault_point("ckpt.pre_write")
        for number, group in enumerate(assign_shard_files(pieces)):
            file = f"{prefix}shard_{number:05d}.safetensors"
            files[file], pieces_of_file = write_group(pending, file, group)
            stored += pieces_of_file
        pending.fault_point("ckpt.post_shard")
        index: folder.Shards = {"save_id": pending.save_id, "files": files}
        read_back(pending, lambda: check_pieces(temp, index, stored))
    return RankShards(files, stored)


def write_group(pending: PendingSave, file: str, group: list[Piece]) -> tuple[FileEntry, list[StoredPiece]]:
    """Writes one shard file. Returns its entry in the index, and its pieces."""
    names = [box.key if box.size == box.shape else str(box) for box, _ in group]
    tensors = [tensor for _, tensor in group]
    entry, checksums = write_shard(
        pending.temp / file,
        list(zip(names, tensors)),
        pending.save_id,
        halfway=lambda: pending.fault_point("ckpt.mid_shard"),
    )
    stored: list[StoredPiece] = []
    for (box, tensor), name, checksum in zip(group, names, checksums):
        dtype = DTYPES[tensor.dtype]
        stored.append(StoredPiece(box=box, dtype=dtype, file=file, name=name, sha256=checksum))
    return entry, stored


def assign_shard_files(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Groups the pieces, one group for each file.

    In a file, wide dtypes come first, so that every tensor is aligned.
    """
    group: list[Piece] = []
    group_bytes = 0
    for box, tensor in pieces:
        size = num_bytes(tensor)
        if group and group_bytes + size > SHARD_BYTES:
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


def commit(pending: PendingSave, shards: list[RankShards], meta: Tree) -> None:
    """Rank 0, once all shards are on disk: writes the small files and renames the folder.

    This one rename makes it a checkpoint.
    """
    with storage_errors(pending.temp, pending.total_bytes):
        write_meta_and_index(pending, shards, meta)
        read_back(pending, lambda: read_meta(pending.temp))
        rename_to_final(pending)


def write_meta_and_index(pending: PendingSave, shards: list[RankShards], meta: Tree) -> None:
    """Writes meta.json, the index of all ranks' shards, and its checksum; flushes them to disk."""
    temp = pending.temp
    pending.fault_point("ckpt.pre_index")
    files = {name: entry for part in shards for name, entry in part.files.items()}
    full_meta = {**meta, "step": pending.step, "save_id": pending.save_id}
    files["meta.json"] = write_file(temp / "meta.json", json.dumps(full_meta, indent=1).encode())
    index = index_bytes({
        "version": VERSION,
        "save_id": pending.save_id,
        "step": pending.step,
        "world": len(shards),
        "files": files,
        "pieces": [piece.to_row() for part in shards for piece in part.pieces],
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
    earlier = [path for other_step, path in committed_checkpoints(root) if other_step < step]
    too_many = earlier[max(keep, 1) - 1:]
    for path in reversed([path for path in too_many if not mark_of(path).exists()]):
        with folder_lock(path, fcntl.LOCK_EX) as nobody_reads:
            if nobody_reads and not is_newer_format(path):
                move_to_trash(path)
                fault_point("ckpt.mid_purge")
    remove_leftovers(root)


def drop_after(root: Path, step: int) -> None:
    """Removes the checkpoints of later steps, the newest first, and their marks: the run goes another way.

    So a start that finds one of them, after a kill in between, finds also those before it.
    """
    for other_step, path in committed_checkpoints(root):
        if other_step > step:
            move_to_trash(path)
            mark_of(path).unlink(missing_ok=True)
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
    check: Callable[[Path], Index] = verify,
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
            f"Restore one from a copy, or start again with checkpoint.resume=none"
        )
    if hint != (good.name if good else None):
        wrong = "is missing" if hint is None else f"names {hint!r}"
        used = f"using {good.name}, the newest good one" if good else "there is no checkpoint"
        log.append(f"{root}/latest {wrong}; {used}")
    return good


def check_named_step(path: Path, step: int, bad: dict[Path, str], check: Callable[[Path], Index]) -> None:
    """Raises IntegrityError if the folder is in `bad`, fails the check, or does not hold its step."""
    why = bad.get(path)
    if why is not None:
        raise IntegrityError(why)
    found = check(path)["step"]
    if found != step:
        raise IntegrityError(f"{path}: holds step {found}")


def read_latest(root: Path) -> str | None:
    """What `latest` says; None if it cannot be read."""
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


# ---- load --------------------------------------------------------------------------------------------------

def load(
    path: Path | str,
    wants: Pieces,
    *,
    strict: bool = True,
    allow: Sequence[str] = (),
    allow_cast: bool = False,
    others: Iterable[str] = (),
) -> None:
    """Fills each tensor of `wants` from a checkpoint that any layout saved.

    First the bytes of every piece to be read are verified, then the tensors are filled. So an error changes
    no tensor.

    wants: (Box, tensor of box.size on any device).
    strict: a stored key that no rank wants is an error.
    allow: except for keys that match one of these patterns, such as "optim.*".
    others: keys that other ranks want.
    allow_cast: the dtype may differ.

    Raises IntegrityError if the checkpoint is damaged; ConfigError, with all differences, if it does not fit.
    """
    path = Path(path)
    wants = list(wants)
    with folder_lock(path, fcntl.LOCK_SH):
        # Find the stored pieces of each key, and check that they fit.
        data = read_index(path)
        stored: dict[str, list[StoredPiece]] = defaultdict(list)
        for row in data["pieces"]:
            piece = StoredPiece.from_row(row)
            stored[piece.box.key].append(piece)
        extra = extra_keys(stored, wants, allow, others) if strict else []
        check_fits(path, stored, wants, extra=extra, allow_cast=allow_cast)

        # Verify every byte that is to be read, then copy file by file.
        reads = plan_reads(stored, wants)
        offsets = check_pieces(path, data, reads)
        pieces_of: dict[str, list[StoredPiece]] = defaultdict(list)
        for piece in reads:
            pieces_of[piece.file].append(piece)
        for file, pieces in pieces_of.items():
            copy_from_file(path / file, pieces, offsets, reads)


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
    """Copies verified pieces of one file into their tensors.

    The file is mapped: a slice reads only its own bytes, and nothing is held twice.
    """
    with open_shard(path) as fd:
        # Private and copied on write: torch wants writable memory.
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    for piece in pieces:
        dtype = TORCH[piece.dtype]
        values = torch.frombuffer(memory, dtype=dtype, count=piece.box.volume, offset=offsets[piece])
        values = values.view(piece.box.size)
        for source, target in reads[piece]:
            target.copy_(values[source])
