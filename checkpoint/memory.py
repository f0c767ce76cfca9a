"""Checkpoints in memory: the newest state of each rank on its own node, with copies on other nodes.

    MEMORY_DIR/bevatron-UID/RUN-KEY/HOST/  of one node: private (0700), and it outlives the processes
      step_00000120-SAVE_ID/               a generation
        rank_00003/                        what rank 3 reads at a resume under the same layout
    runs/NAME/memory.json                  which generations count: step, save id, MEMORY_DIR, and the sha256
                                           of each rank's index.json

The idea is that of GEMINI (SOSP 2023, "Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints"): a rank that is started again on its node finds its own shard, and one that takes the place of a
lost node is sent it by a node that keeps a copy. The copies of a node's ranks are on the nodes that follow it
in a ring. A rank's folder is an ordinary checkpoint folder (checkpoint/disk/folder.py), but for the one
difference that it holds the shard of one rank.

Guarantees:

- A generation counts once every rank has written its shard, every copy has arrived, and rank 0 has named it
  in memory.json, by one rename. The one before it is there until then; the one before that is removed first.
  So a node has room for two.
- What is not named there is never used: neither a torn generation, nor one that another history of the run
  has left on a node that comes back, nor what somebody else has put there.
- Before a tensor changes, every byte is verified on the rank that loads it: its own, or what it was sent.
- All ranks load the same generation, or none.
- A start under another layout, or with other ranks, consolidates the shards that the nodes have into a
  checkpoint on the disk (checkpoint/consolidate.py), and goes on from there.
"""
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import consolidate
from checkpoint.disk import store
from checkpoint.copies import Delivery, Manifest, deliver, manifest_of
from checkpoint.disk.files import (
    IntegrityError,
    StorageError,
    available_bytes,
    read_file,
    remove,
    storage_errors,
    sync_dir,
    write_file,
)
from checkpoint.disk.saver import writer_threads
from checkpoint.state import StartingPoint, choose_together, ranks_of
from checkpoint.disk.together import Ranks
from config import CheckpointConfig, Config, ConfigError, Tree
from config.reading import phases_of
from parallel.sharding.boxes import Box, from_rows, to_rows
from parallel.wire import comm
from parallel.wire.comm import Group, PeerError

# Where tests kill a rank; memory.mid_shard is the ckpt.mid_shard of the writer (checkpoint/disk/store.py).
FAULT_POINTS = (
    "memory.mid_shard",
    "memory.pre_send",
    "memory.mid_send",
    "memory.pre_commit",
    "memory.post_commit",
)
RECORD = "memory.json"
VERSION = 1  # of the record
GENERATIONS = 2  # for which a node needs room
MAX_RECORD_BYTES = 64 << 20
MAX_KEY_NAME = 60  # characters of log.name in the name of the folder
PRIVATE = 0o700
PERMISSIONS = 0o777  # of a mode; a folder inherits set-group-ID from the one that it is in
# Of parallel.*: what changes nothing of what a rank holds.
NOT_LAYOUT = (
    "timeout_s",
    "elastic",
    "recompute",
    "recompute_parts",
    "recompute_stages",
    "async_tp",
    "cp_kind",
    "ep_chunks",
    "offload",
)
SAVE_ID = re.compile(r"[0-9a-f]{32}")
SHA256 = re.compile(r"[0-9a-f]{64}")
RANK_FOLDER = re.compile(r"rank_(\d{5,})")
MAX_NAMED = 8  # ranks in a line of the log


@dataclass(frozen=True)
class MemoryGeneration:
    """The state of all ranks after one step, as memory.json names it.

    indexes: sha256 of the index.json of each rank; (): it is not complete yet. disk_step: of the newest
    checkpoint in the run folder at the time, up to this step; -1: there was none. saving_step: of the one
    that was being written in the background; -1: none was. layout: see layout_of. memory_dir: the folder
    (checkpoint.memory_dir) in which it lies on each node.
    """
    step: int
    save_id: str
    disk_step: int
    layout: Tree
    indexes: tuple[str, ...] = ()
    saving_step: int = -1
    memory_dir: str = CheckpointConfig.memory_dir

    @property
    def name(self) -> str:
        return f"step_{self.step:08d}-{self.save_id}"


@dataclass(frozen=True)
class Nodes:
    """Which ranks are on which node. hosts: the node's name for each rank."""
    hosts: tuple[str, ...]

    def names(self) -> list[str]:
        """Of each node once, in the order of their first ranks."""
        return list(dict.fromkeys(self.hosts))

    def ranks_on(self, host: str) -> list[int]:
        return [rank for rank, name in enumerate(self.hosts) if name == host]

    def keepers(self, rank: int, copies: int) -> list[int]:
        """The ranks that keep a copy of this rank's shard: one on each of the next nodes."""
        names = self.names()
        place = names.index(self.hosts[rank])
        position = self.ranks_on(self.hosts[rank]).index(rank)
        found: list[int] = []
        for distance in range(1, copies + 1):
            there = self.ranks_on(names[(place + distance) % len(names)])
            found.append(there[position % len(there)])
        return found


# ---- the record --------------------------------------------------------------------------------------------

def has_record(run: Path) -> bool:
    """Whether the run in this folder has checkpoints in memory, as far as the folder knows."""
    return os.path.lexists(run / RECORD)


def read_record(run: Path, key: str) -> tuple[list[MemoryGeneration], str | None]:
    """(the generations of memory.json, the newest first, None), or ([], why it is not used).

    run: the run folder. key: of the run's folder in memory. Without a record ([], None).
    """
    path = run / RECORD
    if not has_record(run):
        return [], None
    try:
        if path.lstat().st_size > MAX_RECORD_BYTES:
            raise ValueError("it is too long")
        data = json.loads(read_file(path))
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']!r}, this code reads {VERSION}")
        owner = data["key"]
        found = [parse_generation(row) for row in data["generations"]]
    except (IntegrityError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [], f"{path} is damaged: {error}"
    if owner != key:
        return [], f"{path} is of another run folder"
    return sorted(found, key=lambda generation: -generation.step), None


def parse_generation(row: Any) -> MemoryGeneration:
    """A generation of the record. Raises ValueError, KeyError or TypeError if it is none."""
    found = MemoryGeneration(
        step=row["step"],
        save_id=row["save_id"],
        disk_step=row["disk_step"],
        layout=row["layout"],
        indexes=tuple(row["indexes"]),
        # a record that is older than these fields has none of them
        saving_step=row.get("saving_step", -1),
        memory_dir=row.get("memory_dir", CheckpointConfig.memory_dir),
    )
    is_sound = (
        type(found.step) is int
        and found.step >= 0
        and type(found.disk_step) is int
        and type(found.saving_step) is int
        and type(found.memory_dir) is str
        and os.path.isabs(found.memory_dir)
        and SAVE_ID.fullmatch(found.save_id)
        and isinstance(found.layout, dict)
        and all(SHA256.fullmatch(index) for index in found.indexes)
    )
    if not is_sound:
        raise ValueError("a generation in it does not read as one")
    return found


def write_record(run: Path, key: str, generations: list[MemoryGeneration]) -> None:
    """Names these generations, and no others; without any, removes the record. It is on disk then.

    Raises StorageError.
    """
    path = run / RECORD
    temp = run / f"{RECORD}.tmp"
    with storage_errors(path, 0):
        temp.unlink(missing_ok=True)  # of a killed writer
        if not generations:
            path.unlink(missing_ok=True)
            sync_dir(run)
            return
        rows = [asdict(generation) for generation in generations]
        write_file(temp, json.dumps({"version": VERSION, "key": key, "generations": rows}).encode())
        os.replace(temp, path)
        sync_dir(run)


def newest_step_on_disk(run: Path, up_to: float = math.inf) -> int:
    """Of the committed checkpoints of the run folder, good or not, up to a step; -1: there is none."""
    steps = [step for step, _ in store.committed_checkpoints(run / "checkpoints") if step <= up_to]
    return max(steps, default=-1)


def step_in_latest(run: Path) -> int:
    """Of the checkpoint that the run has committed last, there or not, as `latest` says; -1: none."""
    match = store.STEP.fullmatch(store.read_latest(run / "checkpoints") or "")
    return int(match[1]) if match else -1


def layout_of(cfg: Config, world: int, step: int) -> Tree:
    """The layout that must stay for a rank to read its own shard again: ranks, and {key: value} of parallel.*

    cfg: with train.phases; each phase may have a layout of its own. step: its phase counts.
    """
    parallel = phases_of(cfg).of_step(step).cfg.parallel
    keys = {name: value for name, value in asdict(parallel).items() if name not in NOT_LAYOUT}
    return {"ranks": world, **{f"parallel.{name}": value for name, value in keys.items()}}


def layout_difference(saved: Tree, present: Tree) -> str | None:
    """How the layout has changed since, in words; None if it has not."""
    for key in present:
        if saved.get(key) != present[key]:
            return f"it was saved with {key} {saved.get(key)}, not {present[key]}"
    return None


# ---- the folder --------------------------------------------------------------------------------------------

def memory_root(memory_dir: str) -> Path:
    """The folder of this user's runs in memory."""
    return Path(memory_dir) / f"bevatron-{os.geteuid()}"


def memory_dirs(cfg: Config, generations: list[MemoryGeneration]) -> list[str]:
    """Where a start may have to read, write or remove checkpoints in memory: first where it writes them, then
    where earlier starts, which may have had another checkpoint.memory_dir, have left some."""
    found = [generation.memory_dir for generation in generations]
    if cfg.checkpoint.memory_every is not None or not found:
        found.insert(0, os.path.abspath(cfg.checkpoint.memory_dir))
    return list(dict.fromkeys(found))


def key_of(run: Path) -> str:
    """The name of a run's folder in memory: of its run folder, wherever that is named from."""
    where = run.resolve()
    return f"{where.name[:MAX_KEY_NAME]}-{hashlib.sha256(str(where).encode()).hexdigest()[:16]}"


def make_private(root: Path, folders: list[str]) -> Path:
    """root/folders..., each made for this user alone. Raises ConfigError if one is not; StorageError.

    root itself is one of them; what it lies in is there.
    """
    parent = root.parent
    if not parent.is_dir():
        raise ConfigError(
            f"checkpoint.memory_dir: {parent} is no folder on this node; give one in memory, such as "
            f"/dev/shm, or leave checkpoint.memory_every out and remove {RECORD} from the run folder"
        )
    path = parent
    for name in (root.name, *folders):
        path = path / name
        with storage_errors(path, 0):
            with contextlib.suppress(FileExistsError):
                path.mkdir(PRIVATE)
            status = path.lstat()
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not is_ours or status.st_mode & PERMISSIONS != PRIVATE:
            raise ConfigError(
                f"checkpoint.memory_dir: {path} is not a folder of this user alone (mode 700), and what lies "
                "in it is not trusted; remove it, or give another checkpoint.memory_dir"
            )
    return path


def folder_of_host(host: str) -> str:
    return host.replace("/", "_")


def rank_folder(rank: int) -> str:
    return f"rank_{rank:05d}"


def free_bytes(folder: Path) -> int:
    """The bytes that the folder's file system can still take: of /dev/shm half of the memory by default."""
    return shutil.disk_usage(folder).free


def bytes_in(folder: Path) -> int:
    """Of all files in the folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


# ---- the checkpoints ---------------------------------------------------------------------------------------

class MemoryCheckpoints:
    """The checkpoints in memory of one run. Its methods are collective, but for those that say otherwise.

    folders: {memory_dir: the run's folder of this node in it}, see memory_dirs. committed: the generations
    that the record names, the newest first, alike on all ranks. notes: for the log.
    """

    def __init__(self, cfg: Config, run: Path, host: str, world: Group) -> None:
        """run: the run folder. host: the name of this node.

        Raises ConfigError if there are too few nodes, or the folder cannot be had; StorageError.
        """
        self.cfg = cfg
        self.run = run
        self.group = world
        self.ranks: Ranks = ranks_of(world)
        self.copies = cfg.checkpoint.replicas if cfg.checkpoint.memory_every is not None else 0
        self.timeout_s = cfg.checkpoint.timeout_s
        self.nodes = Nodes(tuple(comm.all_gather_objects(host, world)))
        self.notes: list[str] = []
        num_others = len(self.nodes.names()) - 1
        if self.copies > num_others:
            self.copies = fewer_copies(cfg, num_others, self.notes)
        self.key = self.ranks.first_does(lambda: key_of(run), self.timeout_s)
        found, trouble = self.ranks.first_does(lambda: read_record(run, self.key), self.timeout_s)
        self.committed: list[MemoryGeneration] = found
        # {name of a generation that this start does not try again: why, for the log}
        self.settled: dict[str, str] = {}
        if trouble is not None:
            self.notes.append(f"checkpoints in memory are not used: {trouble}")
        dirs = memory_dirs(cfg, found)
        self.memory_dir = dirs[0]
        below = [self.key, folder_of_host(host)]
        self.folders: dict[str, Path] = self.ranks.all_do(
            lambda: {each: make_private(memory_root(each), below) for each in dirs}, self.timeout_s
        )

    @property
    def host(self) -> str:
        return self.nodes.hosts[self.group.index]

    @property
    def is_first_of_node(self) -> bool:
        return self.nodes.ranks_on(self.host)[0] == self.group.index

    @property
    def folder(self) -> Path:
        """Where this node writes."""
        return self.folders[self.memory_dir]

    def folder_of(self, generation: MemoryGeneration) -> Path:
        """Where this node has a generation."""
        return self.folders[generation.memory_dir] / generation.name

    def path_of(self, generation: MemoryGeneration, rank: int) -> Path:
        """Where this node has the shard of a rank, its own or a copy."""
        return self.folder_of(generation) / rank_folder(rank)

    def check_room(self, own_bytes: int) -> None:
        """Raises ConfigError if a node has no room. own_bytes: of the tensors that this rank saves."""
        sizes = self.ranks.gather(own_bytes)

        def check() -> None:
            here = self.nodes.ranks_on(self.host)
            kept = list(here)
            for rank in range(self.group.size):
                kept += [rank for keeper in self.nodes.keepers(rank, self.copies) if keeper in here]
            wanted = int(store.FREE_SPACE_MARGIN * GENERATIONS * sum(sizes[rank] for rank in kept))
            with storage_errors(self.folder, wanted):
                free = free_bytes(self.folder) + bytes_in(self.folder)
            if free < wanted:
                where = self.folder.parents[2]
                raise ConfigError(
                    f"checkpoint.memory_dir: {where} on {self.host} can take {free:,} bytes, and "
                    f"{GENERATIONS} checkpoints of {len(kept)} shards ask for {wanted:,}; "
                    f"{self.leftover_advice()}enlarge it (docker: --shm-size), give another folder, or leave "
                    "checkpoint.memory_every out"
                )

        self.ranks.all_do(check, self.timeout_s)

    def leftover_advice(self) -> str:
        """Advice on what may be removed by hand on this node: folders of this run under names of other nodes,
        such as containers that are gone. Returns "" where there are none. Not collective.

        They are never removed here: one may be of another job, whose run folder has the same path inside its
        container.
        """
        own = {folder_of_host(host) for host in self.nodes.names()}
        with storage_errors(self.folder, 0):
            others = sorted(path for path in self.folder.parent.iterdir() if path.name not in own)
        if not others:
            return ""
        more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        named = ", ".join(map(str, others[:MAX_NAMED])) + more
        return f"if the nodes of these folders are gone, remove {named}; else "

    # ---- saving

    def save(
        self,
        step: int,
        pieces: store.Pieces,
        meta: Tree,
        *,
        saving_step: int = -1,
        fault_point: store.FaultPoint = store.no_fault,
    ) -> None:
        """Keeps the state after `step`, with its copies.

        pieces: what this rank reads at a resume. saving_step: of the checkpoint that is being written to the
        disk meanwhile (MemoryGeneration). fault_point: called with each name of FAULT_POINTS when it is
        reached. Raises StorageError and NonFiniteTensor, on all ranks: the newest generation is still there,
        and counts.
        """
        try:
            self.save_generation(step, list(pieces), meta, saving_step, fault_point)
        except (IntegrityError, ConfigError) as error:  # of what this save has just written or made
            raise StorageError(self.folder, 0, str(error)) from error

    def save_generation(
        self,
        step: int,
        pieces: list[store.Piece],
        meta: Tree,
        saving_step: int,
        fault_point: store.FaultPoint,
    ) -> None:
        """save(), with the errors of its parts."""
        newest = self.committed[:1]
        self.ranks.all_do(lambda: self.make_way(newest), self.timeout_s)
        pending = self.ranks.first_does(lambda: self.begin(step, saving_step), self.timeout_s)
        try:
            # this rank's own shard, then copies of others
            index = self.ranks.all_do(
                lambda: self.write_own(pending, pieces, meta, fault_point), self.timeout_s
            )
            fault_point("memory.pre_send")
            self.send_copies(pending, fault_point)

            # from here on it counts
            complete = replace(pending, indexes=tuple(self.ranks.gather(index)))
            fault_point("memory.pre_commit")
            named = [complete, *newest]
            self.ranks.first_does(lambda: write_record(self.run, self.key, named), self.timeout_s)
        except Exception as error:
            if not isinstance(error, PeerError):  # then no rank is at work any more
                self.remove_all_but(newest)
            raise
        self.committed = named
        fault_point("memory.post_commit")

    def begin(self, step: int, saving_step: int) -> MemoryGeneration:
        """Rank 0: the generation that is to be written."""
        return MemoryGeneration(
            step=step,
            save_id=uuid.uuid4().hex,
            saving_step=saving_step,
            disk_step=newest_step_on_disk(self.run, up_to=step),  # after that: it may be committed meanwhile
            layout=layout_of(self.cfg, self.group.size, step),
            memory_dir=self.memory_dir,
        )

    def write_own(
        self, pending: MemoryGeneration, pieces: list[store.Piece], meta: Tree, fault_point: store.FaultPoint
    ) -> str:
        """Writes this rank's shard. Returns the sha256 of its index. Not collective."""
        def reached(point: str) -> None:
            if point == "ckpt.mid_shard":
                fault_point("memory.mid_shard")

        _, total_bytes = store.check_tensors(pieces)
        final = self.path_of(pending, self.group.index)
        shard = store.PendingSave(
            final=final,
            step=pending.step,
            save_id=pending.save_id,
            total_bytes=total_bytes,
            earlier=None,
            fault_point=reached,
        )
        with storage_errors(final, total_bytes):
            final.parent.mkdir(PRIVATE, exist_ok=True)
        written = store.write_pieces(shard, pieces, store.ALONE, writer_threads(in_background=False))
        store.commit(shard, [written], meta)
        return hashlib.sha256(read_file(final / "index.json")).hexdigest()

    def send_copies(self, pending: MemoryGeneration, fault_point: store.FaultPoint) -> None:
        """Sends this rank's shard to the nodes that keep it, and takes those of others."""
        if not self.copies:
            return
        own = self.path_of(pending, self.group.index)
        manifests = self.ranks.gather(self.ranks.all_do(lambda: manifest_of(own), self.timeout_s))
        deliveries: list[Delivery] = []
        for sender, manifest in enumerate(manifests):
            for keeper in self.nodes.keepers(sender, self.copies):
                deliveries.append(Delivery(sender, keeper, manifest, self.path_of(pending, sender)))
        error = deliver(deliveries, self.group, halfway=lambda: fault_point("memory.mid_send"))
        self.ranks.all_do(lambda: raise_error(error), self.timeout_s)

    def make_way(self, kept: list[MemoryGeneration]) -> None:
        """Removes all but these generations from this node; makes the folder again where somebody has
        removed it. Not collective."""
        make_private(self.folder.parents[1], [self.folder.parent.name, self.folder.name])
        self.remove_all_but(kept)

    def remove_all_but(self, generations: list[MemoryGeneration]) -> None:
        """Removes all others from this node; its first rank does. Not collective."""
        if not self.is_first_of_node:
            return
        kept = {self.folder_of(generation) for generation in generations}
        for folder in self.folders.values():
            if not folder.is_dir():
                continue
            with storage_errors(folder, 0):
                for path in folder.iterdir():
                    if path not in kept:
                        remove(path)

    def drop_after(self, step: int) -> None:
        """Forgets the generations of later steps: the run goes another way. First in the record, so that none
        of them counts any more, wherever it lies. Raises StorageError."""
        kept = [generation for generation in self.committed if generation.step <= step]
        self.ranks.first_does(lambda: write_record(self.run, self.key, kept), self.timeout_s)
        self.committed = kept
        self.ranks.all_do(lambda: self.remove_all_but(kept), self.timeout_s)

    def clear(self) -> None:
        """Gives the memory back: what the run has is on the disk. Raises StorageError."""
        self.drop_after(-1)
        if self.is_first_of_node:
            for folder in self.folders.values():
                for path in (folder, *folder.parents[:2]):
                    with contextlib.suppress(OSError):  # another run, or another node's folder, is there
                        path.rmdir()

    # ---- resuming

    def newest_start(
        self, cfg: Config, after: int | None = None, bad: Mapping[Path, str] | None = None
    ) -> tuple[StartingPoint | None, list[str]]:
        """(the newest generation of a step after this one, verified, or None; why others are not used, a line
        each).

        A generation of another layout is written to the disk, and that is the start. after: None for the step
        of the newest checkpoint on the disk, good or not. bad: {folder of this rank's shard: why} of
        generations that were found damaged before, the same ones on all ranks.
        """
        if cfg.checkpoint.resume == "none":
            return None, self.notes
        disk = self.ranks.first_does(self.look_at_disk, self.timeout_s)
        for generation in self.committed:
            is_older = generation.step <= (disk.newest if after is None else after)
            if is_older or generation.name in self.settled:
                continue
            why = (bad or {}).get(self.path_of(generation, self.group.index))
            why = why or removed_since(generation, disk)
            difference = self.difference_to(generation)
            if why is None:
                try:
                    if difference is None:
                        return self.collect(generation, self.all_notes()), self.all_notes()
                    return self.move_to_disk(generation, difference), self.all_notes()
                except (IntegrityError, StorageError) as error:  # on all ranks
                    why = str(error) if difference is None else f"{difference}, and {error}"
            line = f"the checkpoint of step {generation.step:,} in memory is not used: {why}"
            self.settled[generation.name] = line
        return None, self.all_notes()

    def look_at_disk(self) -> "DiskSteps":
        """Rank 0: which checkpoints the run folder has. What a killed writer has left is removed first: it
        would be taken for one that is being written."""
        root = self.run / "checkpoints"
        if root.is_dir():
            store.remove_leftovers(root)
        return DiskSteps(newest_step_on_disk(self.run), step_in_latest(self.run))

    def all_notes(self) -> list[str]:
        """For the log, with why generations are not used."""
        return [*self.notes, *self.settled.values()]

    def difference_to(self, generation: MemoryGeneration) -> str | None:
        """The change of the layout that makes ranks read other shards, or None where each reads its own."""
        for step in (generation.step, generation.step + 1):  # where a phase begins there, its layout, too
            difference = layout_difference(generation.layout, layout_of(self.cfg, self.group.size, step))
            if difference is not None:
                return difference
        return None

    def collect(self, generation: MemoryGeneration, notes: list[str]) -> StartingPoint:
        """The start from a generation, once every rank has its shard.

        A rank that has none, or a damaged one, is sent it by one of another node. Raises IntegrityError, on
        all ranks, if no good copy is left of one.
        """
        found = self.ranks.all_do(lambda: self.look(generation, self.group.index), self.timeout_s)
        held = self.ranks.gather(self.held_ranks(generation))
        problems = self.ranks.gather(found.problem)
        was_sent = [rank for rank, problem in enumerate(problems) if problem]
        asked: set[tuple[int, str]] = set()  # (rank, host that has sent it its shard)
        while any(problems):
            senders: dict[int, int] = {}  # {rank: who sends it its shard}
            for rank, problem in enumerate(problems):
                if problem:
                    senders[rank] = self.next_holder(rank, problem, held, asked)
                    asked.add((rank, self.nodes.hosts[senders[rank]]))
            error = self.exchange(generation, senders)
            found = self.ranks.all_do(partial(self.look_again, generation, found, error), self.timeout_s)
            problems = self.ranks.gather(found.problem)

        where = f"memory of {', '.join(self.nodes.names()[:MAX_NAMED])}"
        if was_sent:
            plural = "s" if len(was_sent) > 1 else ""
            named = ", ".join(map(str, was_sent[:MAX_NAMED]))
            where += f" (rank{plural} {named}: sent by another node)"
        return StartingPoint(found.index, None, notes, memory=where)

    def look(self, generation: MemoryGeneration, rank: int) -> "FoundShard":
        """The shard of a rank on this node, every byte of it verified. Not collective."""
        path = self.path_of(generation, rank)
        if not os.path.lexists(path):
            return FoundShard(None, f"rank {rank} has no shard on {self.host}")
        try:
            if path.is_symlink() or path.parent.is_symlink():
                raise IntegrityError(f"{path}: is a link")
            index = store.verify(path)
            if hashlib.sha256(index.text).hexdigest() != generation.indexes[rank]:
                raise IntegrityError(f"{path}: is not the one that {RECORD} names")
        except (IntegrityError, ConfigError) as error:  # ConfigError: of a newer format
            return FoundShard(None, str(error))
        return FoundShard(index, "")

    def look_again(
        self, generation: MemoryGeneration, before: "FoundShard", error: Exception | None
    ) -> "FoundShard":
        """look() after an exchange, if there was a problem before. error: of the exchange. Not collective."""
        if not before.problem:
            return before
        found = self.look(generation, self.group.index)
        return FoundShard(None, str(error)) if found.problem and error is not None else found

    def held_ranks(self, generation: MemoryGeneration) -> list[int]:
        """The ranks whose folder this node has, good or not. Not collective."""
        try:
            names = [path.name for path in self.folder_of(generation).iterdir()]
        except OSError:
            return []
        return [int(match[1]) for name in names if (match := RANK_FOLDER.fullmatch(name))]

    def next_holder(
        self, rank: int, problem: str, held: list[list[int]], asked: set[tuple[int, str]]
    ) -> int:
        """A rank of another node that has the shard of this one, and has not sent it yet. Not collective.

        problem: why the rank has none. held: held_ranks of each rank. Raises IntegrityError if there is none.
        """
        for host in self.nodes.names():
            holders = [other for other in self.nodes.ranks_on(host) if rank in held[other]]
            if holders and host != self.nodes.hosts[rank] and (rank, host) not in asked:
                return holders[rank % len(holders)]
        raise IntegrityError(f"{problem}, and no other node has a good copy")

    def exchange(self, generation: MemoryGeneration, senders: dict[int, int]) -> Exception | None:
        """Sends each rank of `senders` its shard. Returns the first error on this rank (copies.deliver)."""
        rank = self.group.index
        own: dict[int, Manifest] = {}
        for receiver, sender in senders.items():
            if sender == rank:
                with contextlib.suppress(IntegrityError):  # it has nothing that can be sent
                    own[receiver] = manifest_of(self.path_of(generation, receiver))
        manifests = {receiver: files for part in self.ranks.gather(own) for receiver, files in part.items()}
        if rank in senders:
            remove(self.path_of(generation, rank))
        deliveries: list[Delivery] = []
        for receiver, sender in senders.items():
            if receiver in manifests:
                path = self.path_of(generation, receiver)
                deliveries.append(Delivery(sender, receiver, manifests[receiver], path))
        return deliver(deliveries, self.group)

    # ---- resuming under another layout

    def move_to_disk(self, generation: MemoryGeneration, difference: str) -> StartingPoint:
        """The start from a generation of other ranks or another layout, once it is a checkpoint on the disk.

        difference: in words, for the log. Raises IntegrityError, on all ranks, if no node has a good copy of
        a shard; StorageError where there is no room, and what was there before is unchanged.
        """
        shards = self.shards_to_read(generation)
        boxes = self.without_overlaps(shards)
        pieces = self.ranks.all_do(lambda: self.read_shards(shards, boxes), self.timeout_s)
        metas = self.ranks.gather(shards[0].meta if 0 in shards else None)
        path = store.save(
            self.run / "checkpoints",
            generation.step,
            pieces,
            next(meta for meta in metas if meta is not None),
            keep=self.cfg.checkpoint.keep,
            ranks=self.ranks,
            timeout_s=self.timeout_s,
            threads=writer_threads(in_background=False),
        )
        self.settled[generation.name] = (
            f"the checkpoint of step {generation.step:,} in memory was written to {path}: {difference}"
        )
        notes = self.all_notes()
        return choose_together(
            lambda: StartingPoint(store.quick_check(path), None, notes), self.group, self.timeout_s
        )

    def shards_to_read(self, generation: MemoryGeneration) -> dict[int, store.StoredIndex]:
        """{saved rank: the index of its shard} of those that this rank reads. Its node has a good copy of
        each. Each shard is read by one rank.

        Raises IntegrityError, on all ranks, if one is good on no node.
        """
        good = self.ranks.all_do(lambda: self.look_at_all(generation), self.timeout_s)
        reader = assign_readers(self.ranks.gather(sorted(good)))
        missing = [saved for saved in range(len(generation.indexes)) if saved not in reader]
        if missing:
            named = ", ".join(map(str, missing[:MAX_NAMED]))
            plural = "s" if len(missing) > 1 else ""
            raise IntegrityError(f"no node has a good shard of rank{plural} {named}")
        return {saved: index for saved, index in good.items() if reader[saved] == self.group.index}

    def look_at_all(self, generation: MemoryGeneration) -> dict[int, store.StoredIndex]:
        """{saved rank: the index of its shard} of the good ones on this node; its ranks share the work.

        Not collective.
        """
        here = self.nodes.ranks_on(self.host)
        held = [saved for saved in self.held_ranks(generation) if saved < len(generation.indexes)]
        found: dict[int, store.StoredIndex] = {}
        for saved in sorted(held)[here.index(self.group.index)::len(here)]:
            index = self.look(generation, saved).index
            if index is not None:
                found[saved] = index
        return found

    def without_overlaps(self, shards: Mapping[int, store.StoredIndex]) -> dict[int, list[Box]]:
        """{saved rank: what of its shard is read}: over all ranks each element once, which rank 0 decides."""
        found: dict[int, list[Box]] = {}
        for saved, index in shards.items():
            found[saved] = consolidate.boxes_of(index)
        rows = [(saved, to_rows(boxes)) for saved, boxes in found.items()]
        packed = self.ranks.gather_first(store.pack(rows))
        cut = self.ranks.first_does(lambda: cut_boxes(packed), self.timeout_s)
        for saved in found:
            if saved in cut:
                found[saved] = from_rows(cut[saved])
        return found

    def read_shards(
        self, shards: Mapping[int, store.StoredIndex], boxes: Mapping[int, list[Box]]
    ) -> list[store.Piece]:
        """These boxes of the shards, verified. Not collective.

        Raises IntegrityError; StorageError if the node has not the memory to hold them a second time.
        """
        wanted = sum(consolidate.bytes_of(index, boxes[saved]) for saved, index in shards.items())
        free = available_bytes() // len(self.nodes.ranks_on(self.host))
        if wanted > free:
            raise StorageError(self.folder, wanted, f"a rank can take {free:,} bytes of memory to read them")
        pieces: list[store.Piece] = []
        for saved, index in shards.items():
            pieces += consolidate.read_boxes(index, boxes[saved])
        return pieces


def removed_since(generation: MemoryGeneration, disk: "DiskSteps") -> str | None:
    """The checkpoint on the disk, older than the generation, that was removed by hand; None if none was."""
    removed = generation.disk_step if generation.disk_step > disk.newest else None
    if disk.newest < generation.saving_step <= disk.latest:  # else that save has failed, or was killed
        removed = generation.saving_step
    if removed is None:
        return None
    return f"the checkpoint of step {removed:,}, which was there before it, is removed"


def assign_readers(found: list[list[int]]) -> dict[int, int]:
    """{saved rank: the rank that reads its shard}, evenly.

    found: of each rank, the shards that it may read.
    """
    holders: dict[int, list[int]] = {}
    for rank, shards in enumerate(found):
        for saved in shards:
            holders.setdefault(saved, []).append(rank)

    reader: dict[int, int] = {}
    loads = [0] * len(found)
    for saved in sorted(holders, key=lambda saved: len(holders[saved])):  # first those with the least choice
        reader[saved] = min(holders[saved], key=lambda rank: loads[rank])
        loads[reader[saved]] += 1
    return reader


def cut_boxes(packed: list[bytes]) -> dict[int, list[tuple[object, ...]]]:
    """Rank 0: {saved rank: rows of what is taken of its shard} of the shards that others overlap.

    packed: of each rank, the boxes of the shards that it reads.
    """
    shards: dict[int, list[Box]] = {}
    for of_rank in packed:
        for saved, rows in store.unpack(of_rank):
            shards[saved] = from_rows(rows)

    cut: dict[int, list[tuple[object, ...]]] = {}
    for saved, boxes in consolidate.each_element_once(shards).items():
        if boxes != shards[saved]:
            cut[saved] = to_rows(boxes)
    return cut


@dataclass(frozen=True)
class DiskSteps:
    """Steps of checkpoints of the run folder, good or not; -1: none.

    newest: of those that are there. latest: of the one that was committed last, which may have been removed.
    """
    newest: int
    latest: int


@dataclass(frozen=True)
class FoundShard:
    """The finding of a rank about a shard on its node. problem: why it cannot be used, or "" if it can."""
    index: store.StoredIndex | None
    problem: str


def fewer_copies(cfg: Config, num_others: int, notes: list[str]) -> int:
    """The copies that a job with so few other nodes has, under parallel.elastic; else raises ConfigError.

    notes: gets a line.
    """
    asked = cfg.checkpoint.replicas
    if cfg.parallel.elastic:
        notes.append(f"checkpoint.replicas: {asked}, and this start has {num_others} other nodes")
        return num_others
    remedy = f"take {num_others}" if num_others else "leave it out, and this node keeps its own shards alone"
    raise ConfigError(
        f"checkpoint.replicas: {asked} is the number of other nodes with a copy, and this job has "
        f"{num_others} other nodes; {remedy}"
    )


def raise_error(error: Exception | None) -> None:
    """Raises the error, if there is one."""
    if error is not None:
        raise error
