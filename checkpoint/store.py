"""Checkpoints on disk: pieces at global coordinates, committed by one rename, trusted only after every checksum.

    root/step_00001000/     a committed checkpoint; checkpoint/folder.py says what is in it
    root/latest             the name of the newest one: a hint for people, never trusted
    root/*.tmp-*, .trash-*  what a dead writer left; removed at the next start or save

Promises. A folder with a final name is complete: shards, meta, index and seal are flushed to disk and read
back before the rename, `latest` comes last, and a committed folder is never written into. Whatever moment the
process is killed at, the old or the new checkpoint loads, never a mix. Any changed bit of what is read is
found before a tensor changes. A save that fails leaves what was there before. Loading reshards from any
layout to any other. No pickle.

One process writes to a root at a time (`lock`). Many ranks write one checkpoint together: each its own pieces, rank 0
the rest. Every phase ends in `gather`, so that a rank which fails takes all of them out with the same error.
Costs: one sha256 while writing, one while reading back or loading; one piece of memory at a time.
"""
import fcntl
import json
import mmap
import os
import re
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch

from checkpoint import folder
from checkpoint.files import (
    DTYPES,
    TORCH,
    IntegrityError,
    NonFinite,
    StorageError,
    opened,
    remove,
    storing,
    sync_dir,
    write_file,
    write_shard,
)
from checkpoint.folder import (
    VERSION,
    Piece,
    check_pieces,
    glance,
    index,
    index_bytes,
    meta,
    newer,
    seal,
    verify,
)
from checkpoint.locks import held, lock
from checkpoint.together import agree
from config import ConfigError
from parallel.boxes import Box, check_tiling, holes, plan_read

__all__ = ["IntegrityError", "NonFinite", "POINTS", "StorageError", "clean", "committed", "index", "load", "lock",
           "glance", "meta", "newest", "save", "verify"]

# Where a writer can die with a different folder behind it each time; the crash tests kill it at every one.
POINTS = ("ckpt.pre_write", "ckpt.mid_shard", "ckpt.post_shard", "ckpt.pre_index", "ckpt.mid_index",
          "ckpt.pre_rename", "ckpt.mid_replace", "ckpt.post_rename", "ckpt.pre_latest", "ckpt.mid_latest",
          "ckpt.pre_purge", "ckpt.mid_purge")
SHARD_BYTES = 1 << 30  # pieces share a file up to this size; a larger piece has one of its own
NAMED = 8  # how many differences between a checkpoint and a run an error names; the rest is counted
MARGIN = 1.2  # free space asked for, over the bytes of the tensors
STEP = re.compile(r"step_(\d{8,})")
LEFTOVER = re.compile(r"(step_\d{8,}|latest)\.tmp-[0-9a-f]{32}|\.trash-.+")

Pieces = Iterable[tuple[Box, torch.Tensor]]


# ---- save ------------------------------------------------------------------------------------------------------------

def save(root: Path | str, step: int, pieces: Pieces, meta: dict, keep: int,
         at: Callable[[str], None] = lambda point: None, rank: int = 0, world: int = 1,
         gather: Callable[[object], list] = lambda x: [x], patience: float | None = None) -> Path:
    """Writes and commits root/step_<step>, then purges all but the `keep` newest. Returns the committed folder.

    pieces: this rank's (Box, tensor of box.size); over all ranks they cover every key exactly once. meta:
    JSON data. at: called with each name of POINTS as it is reached. gather, patience: as
    checkpoint/together.py has them. A step that is committed already and verifies is left as it is: the same
    run saved it before it was resumed. Raises StorageError (what was there before is intact), NonFinite
    (nothing is committed), ValueError (bad pieces).
    """
    root, pieces = Path(root), list(pieces)
    final = root / f"step_{step:08d}"

    def everyone(work: Callable) -> list:
        return agree(gather, work, patience)

    def first(work: Callable):
        return everyone(work if rank == 0 else lambda: None)[0]

    every = everyone(lambda: check_tensors(pieces))
    boxes, needed = [box for boxes, _ in every for box in boxes], sum(n for _, n in every)
    save_id = first(lambda: begin(final, boxes, meta, needed))
    if save_id is not None:
        temp = root / f"{final.name}.tmp-{save_id}"
        try:
            parts = everyone(lambda: write_pieces(temp, pieces, save_id, needed, at, rank, world))
            first(lambda: commit(temp, final, parts, meta, step, save_id, needed, at))
        except BaseException:
            if rank == 0:
                remove(temp)
            raise
    first(lambda: publish(final, step, keep, at))
    return final


def check_tensors(pieces: list[tuple[Box, torch.Tensor]]) -> tuple[list[Box], int]:
    """This rank's boxes and their bytes. Raises ValueError for a tensor that cannot be stored as its box."""
    for box, t in pieces:
        if tuple(t.shape) != tuple(box.size):
            raise ValueError(f"{box}: its tensor has shape {tuple(t.shape)}")
        if t.dtype not in DTYPES:
            raise ValueError(f"{box}: dtype {t.dtype} cannot be stored")
    return [box for box, _ in pieces], sum(t.numel() * t.element_size() for _, t in pieces)


def begin(final: Path, boxes: list[Box], meta: dict, needed: int) -> str | None:
    """The id of the new save; None if this step is committed already and good."""
    check_tiling(boxes)
    json.dumps(meta)  # a meta that is not JSON fails here, before a byte is written
    with storing(final, needed):
        os.makedirs(final.parent, exist_ok=True)
        sync_dir(final.parent.parent)  # else a power cut could take the whole folder of checkpoints
        clean(final.parent)
        if os.path.lexists(final):
            try:
                verify(final)
                return None
            except IntegrityError:
                pass  # stays until the new one takes its name
        free = shutil.disk_usage(final.parent).free
        if free < needed * MARGIN:
            wanted = f"{free:,} bytes are free, {int(needed * MARGIN):,} wanted"
            raise StorageError(final, needed, f"{wanted}; make room, or lower checkpoint.keep")
    return uuid.uuid4().hex


def write_pieces(temp: Path, pieces: list, save_id: str, needed: int, at: Callable, rank: int,
                 world: int) -> tuple[dict, list[Piece]]:
    """This rank's shards, flushed and read back. Returns their {file: {bytes, header}} and pieces, for the index."""
    prefix = f"rank_{rank:05d}_" if world > 1 else ""
    files, stored = {}, []
    with storing(temp, needed):
        temp.mkdir(exist_ok=True)
        at("ckpt.pre_write")
        for i, group in enumerate(shards(pieces)):
            file = f"{prefix}shard_{i:05d}.safetensors"
            named = [(box.key if box.size == box.shape else str(box), t) for box, t in group]
            files[file], sums = write_shard(temp / file, named, save_id, lambda: at("ckpt.mid_shard"))
            for (box, t), (name, _), checksum in zip(group, named, sums):
                stored.append(Piece(box, DTYPES[t.dtype], file, name, checksum))
        at("ckpt.post_shard")
        read_back(temp, needed, lambda: check_pieces(temp, {"save_id": save_id, "files": files}, stored))
    return files, stored


def shards(pieces: list[tuple[Box, torch.Tensor]]) -> Iterable[list[tuple[Box, torch.Tensor]]]:
    """Groups of pieces for one file each; inside, wide dtypes come first, so that every tensor lies aligned."""
    group, size = [], 0
    for box, t in pieces:
        n = t.numel() * t.element_size()
        if group and size + n > SHARD_BYTES:
            yield sorted(group, key=lambda p: -p[1].element_size())
            group, size = [], 0
        group.append((box, t))
        size += n
    if group:
        yield sorted(group, key=lambda p: -p[1].element_size())


def read_back(temp: Path, needed: int, check: Callable) -> None:
    """A disk that gives back other bytes than it was given is found while the previous checkpoint is still there."""
    try:
        check()
    except IntegrityError as e:
        raise StorageError(temp, needed, f"what was written reads back differently: {e}") from e


def commit(temp: Path, final: Path, parts: list, meta: dict, step: int, save_id: str, needed: int,
           at: Callable) -> None:
    """Rank 0, when all shards are on disk: meta, index, seal; then the one rename that makes it a checkpoint."""
    with storing(temp, needed):
        at("ckpt.pre_index")
        files = {name: entry for part, _ in parts for name, entry in part.items()}
        text = json.dumps({**meta, "step": step, "save_id": save_id}, indent=1).encode()
        files["meta.json"] = write_file(temp / "meta.json", text)
        rows = [piece.row() for _, stored in parts for piece in stored]
        text = index_bytes({"version": VERSION, "save_id": save_id, "step": step, "world": len(parts),
                            "files": files, "pieces": rows})
        write_file(temp / "index.json", text)
        at("ckpt.mid_index")
        write_file(temp / "index.sha256", seal(text))
        sync_dir(temp)
        read_back(temp, needed, lambda: folder.meta(temp))
        at("ckpt.pre_rename")
        if os.path.lexists(final):  # `begin` found it bad
            trash(final)
            at("ckpt.mid_replace")
        os.rename(temp, final)
        at("ckpt.post_rename")
        sync_dir(final.parent)


def publish(final: Path, step: int, keep: int, at: Callable) -> None:
    """`latest` names the new checkpoint; older ones beyond `keep` go, oldest first, but for one that is being read.

    A folder of a later step is left alone: it is bad, and replaced once the run gets there, or it is not ours to judge.
    One of a newer format is not ours to judge either.
    """
    root = final.parent
    with storing(root / "latest", 0):
        at("ckpt.pre_latest")
        temp = root / f"latest.tmp-{uuid.uuid4().hex}"
        write_file(temp, f"{final.name}\n".encode())
        at("ckpt.mid_latest")
        os.replace(temp, root / "latest")
        sync_dir(root)
        at("ckpt.pre_purge")
        for path in reversed([p for s, p in committed(root) if s < step][max(keep, 1) - 1:]):
            with held(path, fcntl.LOCK_EX) as free:
                if free and not newer(path):
                    trash(path)
                    at("ckpt.mid_purge")
        clean(root)


def trash(path: Path) -> None:
    """Takes a folder out of sight in one step: deleting file by file would leave half a checkpoint under its name."""
    os.rename(path, path.with_name(f".trash-{path.name}-{uuid.uuid4().hex}"))


# ---- find ------------------------------------------------------------------------------------------------------------

def committed(root: Path | str) -> list[tuple[int, Path]]:
    """[(step, folder)] of every checkpoint that has a final name, newest first; none is verified here."""
    found = [(int(m[1]), p) for p in Path(root).glob("step_*") if (m := STEP.fullmatch(p.name)) and p.is_dir()]
    return sorted(found, reverse=True)


def newest(root: Path | str, log: list[str] | None = None, bad: dict[Path, str] | None = None,
           check: Callable[[Path], dict] = verify) -> Path | None:
    """The newest checkpoint whose every byte verifies (check=glance: whose small files do; load() then
    verifies what it reads); None if there never was one. bad: {folder: why} of those that were found damaged
    since.

    `log` gets a line for each one rejected and for a `latest` that is wrong. Raises IntegrityError if none is
    good, ConfigError if one is of a newer format.
    """
    root, log = Path(root), [] if log is None else log
    folders, good = committed(root), None
    for step, path in folders:
        try:
            if path in (bad or {}):
                raise IntegrityError(bad[path])
            found = check(path)["step"]
            if found != step:
                raise IntegrityError(f"{path}: holds step {found}")
            good = path
            break
        except IntegrityError as e:
            log.append(f"checkpoint {path.name} is rejected: {e}")
    try:
        hint = (root / "latest").read_bytes()[:200].decode("utf-8", "replace").strip()
    except OSError:
        hint = None
    if good is None and folders:
        raise IntegrityError(f"{root}: no good checkpoint left of {len(folders)}: " + "; ".join(log[-len(folders):])
                             + ". Restore one from a copy, or start again with checkpoint.resume=none")
    if hint != (good.name if good else None):
        says = "is missing" if hint is None else f"names {hint!r}"
        used = f"using {good.name}, the newest good one" if good else "there is no checkpoint"
        log.append(f"{root}/latest {says}; {used}")
    return good


def clean(root: Path | str) -> None:
    """Removes what a dead writer left. Call it with the run's lock held: a living writer's folder looks the same."""
    for path in Path(root).glob("*"):
        if LEFTOVER.fullmatch(path.name):
            remove(path)


# ---- load ------------------------------------------------------------------------------------------------------------

def load(path: Path | str, wants: Pieces, strict: bool = True, allow: Sequence[str] = (),
         allow_cast: bool = False, others: Iterable[str] = ()) -> None:
    """Fills each tensor of `wants` (Box, tensor of box.size, any device) from a checkpoint of any layout.

    Two phases: the bytes of every piece to be read are verified, then the tensors are filled; an error changes none.
    strict: a stored key that nobody wants is an error, unless it matches a pattern of `allow`, such as "optim.*"; others:
    keys that other ranks want.
    allow_cast: the dtype may differ. Raises IntegrityError (damaged) or ConfigError (does not fit: every difference).
    """
    path, wants = Path(path), list(wants)
    with held(path, fcntl.LOCK_SH):
        data = index(path)
        stored: dict[str, list[Piece]] = defaultdict(list)
        for piece in map(Piece.of, data["pieces"]):
            stored[piece.box.key].append(piece)
        fits(path, stored, wants, {*others, *(box.key for box, _ in wants)}, strict, allow, allow_cast)
        reads: dict[Piece, list[tuple[tuple, torch.Tensor]]] = defaultdict(list)
        for box, tensor in wants:
            have = stored[box.key]
            for j, source, target in plan_read(box, [p.box for p in have]):
                reads[have[j]].append((source, tensor.detach()[target]))
        spots = check_pieces(path, data, reads)
        jobs: dict[str, list] = defaultdict(list)
        for piece, targets in reads.items():
            jobs[piece.file].append((piece, spots[piece], targets))
        for file, inside in jobs.items():
            copy_out(path / file, inside)


def copy_out(path: Path, jobs: list[tuple[Piece, int, list]]) -> None:
    """Verified pieces of one file into their tensors. Mapped: a slice reads only itself, and nothing is held twice."""
    with opened(path) as fd:
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)  # private and copied on write: torch wants writable memory
    for piece, spot, reads in jobs:
        values = torch.frombuffer(memory, dtype=TORCH[piece.dtype], count=piece.box.volume, offset=spot)
        values = values.view(piece.box.size)
        for source, target in reads:
            target.copy_(values[source])


def fits(path: Path, stored: dict, wants: list, wanted: set[str], strict: bool, allow: Sequence[str], allow_cast: bool) -> None:
    """Raises ConfigError with every difference between what is stored and wanted; IntegrityError for a hole."""
    wrong = []
    for box, tensor in wants:
        have = stored.get(box.key, [])
        if tuple(tensor.shape) != tuple(box.size):
            raise ValueError(f"{box}: its tensor has shape {tuple(tensor.shape)}")
        if not have:
            wrong.append(f"{box.key} is missing")
        elif have[0].box.shape != tuple(box.shape):
            wrong.append(f"{box.key} has shape {have[0].box.shape}, wanted {tuple(box.shape)}")
        elif not allow_cast and (other := {p.dtype for p in have} - {DTYPES.get(tensor.dtype)}):
            wrong.append(f"{box.key} is {', '.join(sorted(other))}, wanted {DTYPES.get(tensor.dtype, tensor.dtype)}")
        elif missing := holes(box, [p.box for p in have]):
            raise IntegrityError(f"{path}: {missing[0]} of shape {box.shape}: no stored piece covers this region")
    if strict:
        extra = [key for key in stored if key not in wanted and not any(fnmatch(key, a) for a in allow)]
        wrong += [f"{key} is extra" for key in extra]
    if wrong:
        wrong = list(dict.fromkeys(wrong))
        more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise ConfigError(f"{path}: does not fit this run, nothing was loaded: {'; '.join(wrong[:NAMED])}{more}")
