"""In-memory checkpoints: the newest state of each rank on its own node, with copies on other nodes.

    MEMORY_DIR/bevatron-UID/RUN-KEY/HOST/  one node's folder: private (0700), outlives the processes
      step_00000120-SAVE_ID/               a generation
        rank_00003/                        what rank 3 reads when it resumes under the same layout
    runs/NAME/memory.json                  the valid generations: step, save id, MEMORY_DIR, and the sha256
                                           of each rank's index.json

The idea is that of GEMINI (SOSP 2023, "Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints"): a rank that restarts on its node finds its own shard there, and a rank that replaces a lost
node receives it from a node that keeps a copy. The copies of a node's shards are on the following nodes in a
ring. A rank's folder is an ordinary checkpoint folder (checkpoint/disk/folder.py), except that it contains
the shard of one rank only.

Guarantees:

- A generation is valid once every rank has written its shard, every copy has arrived, and rank 0 has
  committed it to memory.json by one rename. The previous generation is kept until then, and the one before
  that is removed first, so a node needs room for two.
- Anything that memory.json does not name is never used: a torn generation, one that another history of the
  run left on a node that comes back, or files that somebody else put there.
- Every byte is verified on the rank that loads it, local or received, before any tensor changes.
- All ranks load the same generation, or none.
- A launch with another layout or other ranks consolidates the shards on the nodes into a checkpoint on disk
  (durable/consolidate.py), and resumes from that.
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

from checkpoint.disk import store
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
from checkpoint.disk.together import Ranks
from checkpoint.state import StartingPoint, choose_together, make_ranks
from config import CheckpointConfig, Config, ConfigError, Tree
from config.reading import get_phases
from durable import consolidate
from durable.copies import Delivery, Manifest, build_manifest, deliver
from parallel.sharding.boxes import Box, from_rows, to_rows
from parallel.wire import comm
from parallel.wire.comm import Group, PeerError

# Where tests kill a rank; memory.mid_shard is the writer's ckpt.mid_shard (checkpoint/disk/store.py).
FAULT_POINTS = (
    "memory.mid_shard",
    "memory.pre_send",
    "memory.mid_send",
    "memory.pre_commit",
    "memory.post_commit",
)
RECORD = "memory.json"
VERSION = 1  # of the record format
GENERATIONS = 2  # that a node needs room for
MAX_RECORD_BYTES = 64 << 20
MAX_KEY_NAME = 60  # characters of log.name in the folder name
PRIVATE = 0o700
PERMISSIONS = 0o777  # the mode bits to compare; a folder may inherit set-group-ID from its parent
# Keys of parallel.* that do not affect what a rank holds.
NOT_LAYOUT = (
    "timeout_s",
    "elastic",
    "recompute",
    "recompute_parts",
    "recompute_stages",
    "async_tp",
    "cp_kind",
    "ep_chunks",
    "ep_bound",
    "compress_tokens",
    "offload",
)
SAVE_ID = re.compile(r"[0-9a-f]{32}")
SHA256 = re.compile(r"[0-9a-f]{64}")
RANK_FOLDER = re.compile(r"rank_(\d{5,})")
MAX_NAMED = 8  # ranks listed in a log line


@dataclass(frozen=True)
class MemoryGeneration:
    """The state of all ranks after one step, as recorded in memory.json.

    indexes: sha256 of each rank's index.json, or () while incomplete. disk_step: step of the newest
    checkpoint on disk at that time, at most this step, or -1 if there was none. saving_step: step of the
    checkpoint that was being written in the background, or -1. layout: see layout_of. memory_dir: the
    checkpoint.memory_dir that contains it on each node.
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
    """The mapping of ranks to nodes. hosts: the node name of each rank."""
    hosts: tuple[str, ...]

    def names(self) -> list[str]:
        """Return the distinct node names, ordered by their first ranks."""
        return list(dict.fromkeys(self.hosts))

    def ranks_on(self, host: str) -> list[int]:
        return [rank for rank, name in enumerate(self.hosts) if name == host]

    def keepers(self, rank: int, copies: int) -> list[int]:
        """Return the ranks that keep a copy of this rank's shard, one on each of the next `copies` nodes."""
        names = self.names()
        place = names.index(self.hosts[rank])
        position = self.ranks_on(self.hosts[rank]).index(rank)
        results: list[int] = []
        for distance in range(1, copies + 1):
            there = self.ranks_on(names[(place + distance) % len(names)])
            results.append(there[position % len(there)])
        return results


# ---- the record --------------------------------------------------------------------------------------------

def has_record(run: Path) -> bool:
    """Return whether the run folder records in-memory checkpoints."""
    return os.path.lexists(run / RECORD)


def read_record(run: Path, key: str) -> tuple[list[MemoryGeneration], str | None]:
    """Read memory.json. Returns (generations, newest first; why the record is not used, or None).

    run: the run folder. key: get_run_key that folder. Returns ([], None) if there is no record.
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
        return [], f"{path} belongs to another run folder"
    return sorted(found, key=lambda generation: -generation.step), None


def parse_generation(row: Any) -> MemoryGeneration:
    """Parse a generation of the record. Raises ValueError, KeyError or TypeError if it is invalid."""
    found = MemoryGeneration(
        step=row["step"],
        save_id=row["save_id"],
        disk_step=row["disk_step"],
        layout=row["layout"],
        indexes=tuple(row["indexes"]),
        # absent in records older than these fields
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
        raise ValueError("a generation in it is malformed")
    return found


def write_record(run: Path, key: str, generations: list[MemoryGeneration]) -> None:
    """Write a record of exactly these generations and sync it to disk; remove it if there are none.

    Raises StorageError.
    """
    path = run / RECORD
    temp = run / f"{RECORD}.tmp"
    with storage_errors(path, 0):
        temp.unlink(missing_ok=True)  # from a killed writer
        if not generations:
            path.unlink(missing_ok=True)
            sync_dir(run)
            return
        rows = [asdict(generation) for generation in generations]
        write_file(temp, json.dumps({"version": VERSION, "key": key, "generations": rows}).encode())
        os.replace(temp, path)
        sync_dir(run)


def newest_step_on_disk(run: Path, up_to: float = math.inf) -> int:
    """Return the newest committed step of the run folder up to `up_to`, good or not, or -1."""
    steps = [step for step, _ in store.committed_checkpoints(run / "checkpoints") if step <= up_to]
    return max(steps, default=-1)


def step_in_latest(run: Path) -> int:
    """Return the step of the last committed checkpoint according to `latest`, even if removed, or -1."""
    match = store.STEP.fullmatch(store.read_latest(run / "checkpoints") or "")
    return int(match[1]) if match else -1


def layout_of(cfg: Config, world: int, step: int) -> Tree:
    """Return the layout under which a rank can read its own shard: ranks, and {key: value} of parallel.*

    cfg: the config with train.phases. step: selects the phase, since phases may differ in layout.
    """
    parallel = get_phases(cfg).of_step(step).cfg.parallel
    keys = {name: value for name, value in asdict(parallel).items() if name not in NOT_LAYOUT}
    return {"ranks": world, **{f"parallel.{name}": value for name, value in keys.items()}}


def layout_difference(saved: Tree, present: Tree) -> str | None:
    """Describe how the layout has changed, or return None if it has not."""
    for key in present:
        if saved.get(key) != present[key]:
            return f"it was saved with {key} {saved.get(key)}, not {present[key]}"
    return None


# ---- the folder --------------------------------------------------------------------------------------------

def memory_root(memory_dir: str) -> Path:
    """Return this user's folder in memory_dir."""
    return Path(memory_dir) / f"bevatron-{os.geteuid()}"


def memory_dirs(cfg: Config, generations: list[MemoryGeneration]) -> list[str]:
    """Return every memory_dir that this launch may read, write or clean up.

    The one it writes to comes first, then those of earlier launches with another checkpoint.memory_dir.
    """
    found = [generation.memory_dir for generation in generations]
    if cfg.checkpoint.memory_every is not None or not found:
        found.insert(0, os.path.abspath(cfg.checkpoint.memory_dir))
    return list(dict.fromkeys(found))


def get_run_key(run: Path) -> str:
    """Return the name of a run's folder in memory, derived from the absolute path of its run folder."""
    where = run.resolve()
    return f"{where.name[:MAX_KEY_NAME]}-{hashlib.sha256(str(where).encode()).hexdigest()[:16]}"


def make_private(root: Path, folders: list[str]) -> Path:
    """Create root/folders... with every level, root included, private to this user; return the path.

    The parent of root must exist. Raises ConfigError if a level is not private, or StorageError.
    """
    parent = root.parent
    if not parent.is_dir():
        raise ConfigError(
            f"checkpoint.memory_dir: {parent} is not a folder on this node; give one in memory, such as "
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
                f"checkpoint.memory_dir: {path} is not private to this user (mode 700), so its contents are "
                "not trusted; remove it, or give another checkpoint.memory_dir"
            )
    return path


def folder_of_host(host: str) -> str:
    return host.replace("/", "_")


def rank_folder(rank: int) -> str:
    return f"rank_{rank:05d}"


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the folder's file system. The size of /dev/shm defaults to half of memory."""
    return shutil.disk_usage(folder).free


def bytes_in(folder: Path) -> int:
    """Return the total size of all files in the folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


# ---- the checkpoints ---------------------------------------------------------------------------------------

class MemoryCheckpoints:
    """The in-memory checkpoints of one run. Methods are collective unless they say otherwise.

    folders: {memory_dir: this node's folder in it}, see memory_dirs. committed: the recorded generations,
    newest first, the same on all ranks. notes: lines for the log.
    """

    def __init__(self, cfg: Config, run: Path, host: str, world: Group) -> None:
        """Open the checkpoints of a run folder. host: the name of this node.

        Raises ConfigError if there are too few nodes or the folder cannot be private, or StorageError.
        """
        self.cfg = cfg
        self.run = run
        self.group = world
        self.ranks: Ranks = make_ranks(world)
        self.copies = cfg.checkpoint.replicas if cfg.checkpoint.memory_every is not None else 0
        self.timeout_s = cfg.checkpoint.timeout_s
        self.nodes = Nodes(tuple(comm.all_gather_objects(host, world)))
        self.notes: list[str] = []
        num_others = len(self.nodes.names()) - 1
        if self.copies > num_others:
            self.copies = fewer_copies(cfg, num_others, self.notes)
        self.key = self.ranks.run_on_first(lambda: get_run_key(run), self.timeout_s)
        found, trouble = self.ranks.run_on_first(lambda: read_record(run, self.key), self.timeout_s)
        self.committed: list[MemoryGeneration] = found
        # {name of a generation that this launch does not retry: the reason, for the log}
        self.settled: dict[str, str] = {}
        if trouble is not None:
            self.notes.append(f"checkpoints in memory are not used: {trouble}")
        dirs = memory_dirs(cfg, found)
        self.memory_dir = dirs[0]
        below = [self.key, folder_of_host(host)]
        self.folders: dict[str, Path] = self.ranks.run_on_all(
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
        """The folder that this node writes to."""
        return self.folders[self.memory_dir]

    def generation_folder(self, generation: MemoryGeneration) -> Path:
        """Return this node's folder of a generation."""
        return self.folders[generation.memory_dir] / generation.name

    def shard_folder(self, generation: MemoryGeneration, rank: int) -> Path:
        """Return this node's folder of a rank's shard, original or copy."""
        return self.generation_folder(generation) / rank_folder(rank)

    def check_room(self, own_bytes: int) -> None:
        """Raise ConfigError if a node lacks room. own_bytes: bytes of the tensors that this rank saves."""
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

        self.ranks.run_on_all(check, self.timeout_s)

    def leftover_advice(self) -> str:
        """Return advice to remove this run's folders of other nodes on this machine, or "". Not collective.

        They may be left by containers that are gone. They are never removed automatically: one may belong to
        another job whose run folder has the same path inside its container.
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
        """Save the state after `step` and its copies.

        pieces: what this rank reads when it resumes. saving_step: step of the checkpoint that is being
        written to disk at the same time (MemoryGeneration). fault_point: called with each name of
        FAULT_POINTS when it is reached. Raises StorageError or NonFiniteTensor on all ranks; the newest
        committed generation then remains valid.
        """
        try:
            self.save_generation(step, list(pieces), meta, saving_step, fault_point)
        except (IntegrityError, ConfigError) as error:  # in what this save has just written or created
            raise StorageError(self.folder, 0, str(error)) from error

    def save_generation(
        self,
        step: int,
        pieces: list[store.Piece],
        meta: Tree,
        saving_step: int,
        fault_point: store.FaultPoint,
    ) -> None:
        """Implement save() without translating errors."""
        newest = self.committed[:1]
        self.ranks.run_on_all(lambda: self.prune_generations(newest), self.timeout_s)
        pending = self.ranks.run_on_first(lambda: self.begin(step, saving_step), self.timeout_s)
        try:
            # write this rank's shard, then exchange copies
            index = self.ranks.run_on_all(
                lambda: self.write_own(pending, pieces, meta, fault_point), self.timeout_s
            )
            fault_point("memory.pre_send")
            self.send_copies(pending, fault_point)

            # commit
            complete = replace(pending, indexes=tuple(self.ranks.gather(index)))
            fault_point("memory.pre_commit")
            named = [complete, *newest]
            self.ranks.run_on_first(lambda: write_record(self.run, self.key, named), self.timeout_s)
        except Exception as error:
            if not isinstance(error, PeerError):  # all ranks have stopped writing
                self.remove_all_but(newest)
            raise
        self.committed = named
        fault_point("memory.post_commit")

    def begin(self, step: int, saving_step: int) -> MemoryGeneration:
        """Create, on rank 0, the generation to be written."""
        return MemoryGeneration(
            step=step,
            save_id=uuid.uuid4().hex,
            saving_step=saving_step,
            disk_step=newest_step_on_disk(self.run, up_to=step),  # after saving_step, which may commit
            layout=layout_of(self.cfg, self.group.size, step),
            memory_dir=self.memory_dir,
        )

    def write_own(
        self, pending: MemoryGeneration, pieces: list[store.Piece], meta: Tree, fault_point: store.FaultPoint
    ) -> str:
        """Write this rank's shard. Returns the sha256 of its index. Not collective."""
        def reached(point: str) -> None:
            if point == "ckpt.mid_shard":
                fault_point("memory.mid_shard")

        _, total_bytes = store.check_tensors(pieces)
        final = self.shard_folder(pending, self.group.index)
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
        """Send this rank's shard to its keepers, and receive the shards that this rank keeps."""
        if not self.copies:
            return
        own = self.shard_folder(pending, self.group.index)
        manifests = self.ranks.gather(self.ranks.run_on_all(lambda: build_manifest(own), self.timeout_s))
        deliveries: list[Delivery] = []
        for sender, manifest in enumerate(manifests):
            for keeper in self.nodes.keepers(sender, self.copies):
                deliveries.append(Delivery(sender, keeper, manifest, self.shard_folder(pending, sender)))
        error = deliver(deliveries, self.group, halfway=lambda: fault_point("memory.mid_send"))
        self.ranks.run_on_all(lambda: raise_error(error), self.timeout_s)

    def prune_generations(self, kept: list[MemoryGeneration]) -> None:
        """Recreate this node's folder if it was removed; prune all but these generations. Not collective."""
        make_private(self.folder.parents[1], [self.folder.parent.name, self.folder.name])
        self.remove_all_but(kept)

    def remove_all_but(self, generations: list[MemoryGeneration]) -> None:
        """Remove all other generations from this node, on its first rank. Not collective."""
        if not self.is_first_of_node:
            return
        kept = {self.generation_folder(generation) for generation in generations}
        for folder in self.folders.values():
            if not folder.is_dir():
                continue
            with storage_errors(folder, 0):
                for path in folder.iterdir():
                    if path not in kept:
                        remove(path)

    def drop_after(self, step: int) -> None:
        """Drop the generations after `step` when the run is rewound. Raises StorageError.

        They are dropped from the record first, which invalidates them on every node.
        """
        kept = [generation for generation in self.committed if generation.step <= step]
        self.ranks.run_on_first(lambda: write_record(self.run, self.key, kept), self.timeout_s)
        self.committed = kept
        self.ranks.run_on_all(lambda: self.remove_all_but(kept), self.timeout_s)

    def clear(self) -> None:
        """Free the memory once the state of the run is on disk. Raises StorageError."""
        self.drop_after(-1)
        if self.is_first_of_node:
            for folder in self.folders.values():
                for path in (folder, *folder.parents[:2]):
                    with contextlib.suppress(OSError):  # not empty: another run or another node uses it
                        path.rmdir()

    # ---- resuming

    def newest_start(
        self, cfg: Config, after: int | None = None, bad: Mapping[Path, str] | None = None
    ) -> tuple[StartingPoint | None, list[str]]:
        """Return (the newest verified generation after step `after`, or None; log lines on those not used).

        A generation with another layout is first written to disk. `after` defaults to the step of the newest
        checkpoint on disk, good or not. bad: {folder of this rank's shard: reason} for generations found
        damaged before, the same ones on all ranks.
        """
        if cfg.checkpoint.resume == "none":
            return None, self.notes
        disk = self.ranks.run_on_first(self.read_disk_steps, self.timeout_s)
        for generation in self.committed:
            is_older = generation.step <= (disk.newest if after is None else after)
            if is_older or generation.name in self.settled:
                continue
            why = (bad or {}).get(self.shard_folder(generation, self.group.index))
            why = why or removed_since(generation, disk)
            difference = self.difference_to(generation)
            if why is None:
                try:
                    if difference is None:
                        return self.collect(generation, self.all_notes()), self.all_notes()
                    return self.move_to_disk(generation, difference), self.all_notes()
                except (IntegrityError, StorageError) as error:  # raised on all ranks
                    why = str(error) if difference is None else f"{difference}, and {error}"
            line = f"the checkpoint of step {generation.step:,} in memory is not used: {why}"
            self.settled[generation.name] = line
        return None, self.all_notes()

    def read_disk_steps(self) -> "DiskSteps":
        """Return, on rank 0, the newest steps on disk.

        First removes the leftovers of a killed writer, which would look like a save in progress.
        """
        root = self.run / "checkpoints"
        if root.is_dir():
            store.remove_leftovers(root)
        return DiskSteps(newest_step_on_disk(self.run), step_in_latest(self.run))

    def all_notes(self) -> list[str]:
        """Return all log lines, including why generations are not used."""
        return [*self.notes, *self.settled.values()]

    def difference_to(self, generation: MemoryGeneration) -> str | None:
        """Describe the layout change that makes ranks read other shards, or return None if there is none."""
        for step in (generation.step, generation.step + 1):  # a phase with another layout may begin here
            difference = layout_difference(generation.layout, layout_of(self.cfg, self.group.size, step))
            if difference is not None:
                return difference
        return None

    def collect(self, generation: MemoryGeneration, notes: list[str]) -> StartingPoint:
        """Return the starting point of a generation once every rank has its shard.

        A rank whose shard is missing or damaged receives it from another node. Raises IntegrityError, on all
        ranks, if no good copy of a shard is left.
        """
        found = self.ranks.run_on_all(lambda: self.look(generation, self.group.index), self.timeout_s)
        held = self.ranks.gather(self.held_ranks(generation))
        problems = self.ranks.gather(found.problem)
        was_sent = [rank for rank, problem in enumerate(problems) if problem]
        asked: set[tuple[int, str]] = set()  # (rank, host already asked for its shard)
        while any(problems):
            senders: dict[int, int] = {}  # {receiving rank: sending rank}
            for rank, problem in enumerate(problems):
                if problem:
                    senders[rank] = self.next_holder(rank, problem, held, asked)
                    asked.add((rank, self.nodes.hosts[senders[rank]]))
            error = self.exchange(generation, senders)
            found = self.ranks.run_on_all(partial(self.recheck_shard, generation, found, error),
                                          self.timeout_s)
            problems = self.ranks.gather(found.problem)

        where = f"memory of {', '.join(self.nodes.names()[:MAX_NAMED])}"
        if was_sent:
            plural = "s" if len(was_sent) > 1 else ""
            named = ", ".join(map(str, was_sent[:MAX_NAMED]))
            where += f" (rank{plural} {named}: sent by another node)"
        return StartingPoint(found.index, None, notes, memory=where)

    def look(self, generation: MemoryGeneration, rank: int) -> "FoundShard":
        """Look up a rank's shard on this node and verify every byte of it. Not collective."""
        path = self.shard_folder(generation, rank)
        if not os.path.lexists(path):
            return FoundShard(None, f"rank {rank} has no shard on {self.host}")
        try:
            if path.is_symlink() or path.parent.is_symlink():
                raise IntegrityError(f"{path}: is a link")
            index = store.verify(path)
            if hashlib.sha256(index.text).hexdigest() != generation.indexes[rank]:
                raise IntegrityError(f"{path}: is not the one that {RECORD} names")
        except (IntegrityError, ConfigError) as error:  # ConfigError: newer format
            return FoundShard(None, str(error))
        return FoundShard(index, "")

    def recheck_shard(
        self, generation: MemoryGeneration, before: "FoundShard", error: Exception | None
    ) -> "FoundShard":
        """Repeat look() after an exchange (with its error) if there was a problem before. Not collective."""
        if not before.problem:
            return before
        found = self.look(generation, self.group.index)
        return FoundShard(None, str(error)) if found.problem and error is not None else found

    def held_ranks(self, generation: MemoryGeneration) -> list[int]:
        """Return the ranks whose shard folders are on this node, good or not. Not collective."""
        try:
            names = [path.name for path in self.generation_folder(generation).iterdir()]
        except OSError:
            return []
        return [int(match[1]) for name in names if (match := RANK_FOLDER.fullmatch(name))]

    def next_holder(
        self, rank: int, problem: str, held: list[list[int]], asked: set[tuple[int, str]]
    ) -> int:
        """Return a rank on another node, not asked before, that has this rank's shard. Not collective.

        problem: what is wrong with the rank's own shard. held: held_ranks of each rank. Raises IntegrityError
        if no such rank is left.
        """
        for host in self.nodes.names():
            holders = [other for other in self.nodes.ranks_on(host) if rank in held[other]]
            if holders and host != self.nodes.hosts[rank] and (rank, host) not in asked:
                return holders[rank % len(holders)]
        raise IntegrityError(f"{problem}, and no other node has a good copy")

    def exchange(self, generation: MemoryGeneration, senders: dict[int, int]) -> Exception | None:
        """Send shards, given {receiver: sender}. Returns the first error on this rank (copies.deliver)."""
        rank = self.group.index
        own: dict[int, Manifest] = {}
        for receiver, sender in senders.items():
            if sender == rank:
                with contextlib.suppress(IntegrityError):  # nothing to send
                    own[receiver] = build_manifest(self.shard_folder(generation, receiver))
        manifests = {receiver: files for part in self.ranks.gather(own) for receiver, files in part.items()}
        if rank in senders:
            remove(self.shard_folder(generation, rank))
        deliveries: list[Delivery] = []
        for receiver, sender in senders.items():
            if receiver in manifests:
                path = self.shard_folder(generation, receiver)
                deliveries.append(Delivery(sender, receiver, manifests[receiver], path))
        return deliver(deliveries, self.group)

    # ---- resuming under another layout

    def move_to_disk(self, generation: MemoryGeneration, difference: str) -> StartingPoint:
        """Write a generation with other ranks or another layout to disk, and return it as starting point.

        difference: description of the layout change, for the log. Raises IntegrityError, on all ranks, if no
        node has a good copy of a shard; StorageError if there is no room, leaving the disk unchanged.
        """
        shards = self.shards_to_read(generation)
        boxes = self.without_overlaps(shards)
        pieces = self.ranks.run_on_all(lambda: self.read_shards(shards, boxes), self.timeout_s)
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
        """Return {saved rank: index of its shard} of the shards that this rank reads from its node.

        Each shard is read by one rank. Raises IntegrityError, on all ranks, if one is good on no node.
        """
        good = self.ranks.run_on_all(lambda: self.find_good_shards(generation), self.timeout_s)
        reader = assign_readers(self.ranks.gather(sorted(good)))
        missing = [saved for saved in range(len(generation.indexes)) if saved not in reader]
        if missing:
            named = ", ".join(map(str, missing[:MAX_NAMED]))
            plural = "s" if len(missing) > 1 else ""
            raise IntegrityError(f"no node has a good shard of rank{plural} {named}")
        return {saved: index for saved, index in good.items() if reader[saved] == self.group.index}

    def find_good_shards(self, generation: MemoryGeneration) -> dict[int, store.StoredIndex]:
        """Return {saved rank: index of its shard} of the good shards on this node. Not collective.

        The ranks of a node divide the work; each returns its part.
        """
        here = self.nodes.ranks_on(self.host)
        held = [saved for saved in self.held_ranks(generation) if saved < len(generation.indexes)]
        result: dict[int, store.StoredIndex] = {}
        for saved in sorted(held)[here.index(self.group.index)::len(here)]:
            index = self.look(generation, saved).index
            if index is not None:
                result[saved] = index
        return result

    def without_overlaps(self, shards: Mapping[int, store.StoredIndex]) -> dict[int, list[Box]]:
        """Return {saved rank: boxes to read}, assigned by rank 0 so that each element is read only once."""
        result: dict[int, list[Box]] = {}
        for saved, index in shards.items():
            result[saved] = consolidate.get_boxes(index)
        rows = [(saved, to_rows(boxes)) for saved, boxes in result.items()]
        packed = self.ranks.gather_first(store.pack(rows))
        cut = self.ranks.run_on_first(lambda: cut_boxes(packed), self.timeout_s)
        for saved in result:
            if saved in cut:
                result[saved] = from_rows(cut[saved])
        return result

    def read_shards(
        self, shards: Mapping[int, store.StoredIndex], boxes: Mapping[int, list[Box]]
    ) -> list[store.Piece]:
        """Read and verify these boxes of the shards. Not collective.

        Raises IntegrityError, or StorageError if the node lacks the memory for a second copy of them.
        """
        wanted = sum(consolidate.get_bytes(index, boxes[saved]) for saved, index in shards.items())
        free = available_bytes() // len(self.nodes.ranks_on(self.host))
        if wanted > free:
            raise StorageError(self.folder, wanted, f"a rank can take {free:,} bytes of memory to read them")
        pieces: list[store.Piece] = []
        for saved, index in shards.items():
            pieces += consolidate.read_boxes(index, boxes[saved])
        return pieces


def removed_since(generation: MemoryGeneration, disk: "DiskSteps") -> str | None:
    """Describe a checkpoint older than the generation that was since removed from disk by hand, or None."""
    removed = generation.disk_step if generation.disk_step > disk.newest else None
    if disk.newest < generation.saving_step <= disk.latest:  # otherwise that save failed or was killed
        removed = generation.saving_step
    if removed is None:
        return None
    return f"the older checkpoint of step {removed:,} was removed"


def assign_readers(found: list[list[int]]) -> dict[int, int]:
    """Return {saved rank: the rank that reads its shard}, balanced over the ranks.

    found: for each rank, the shards that it can read.
    """
    holders: dict[int, list[int]] = {}
    for rank, shards in enumerate(found):
        for saved in shards:
            holders.setdefault(saved, []).append(rank)

    reader: dict[int, int] = {}
    loads = [0] * len(found)
    for saved in sorted(holders, key=lambda saved: len(holders[saved])):  # fewest holders first
        reader[saved] = min(holders[saved], key=lambda rank: loads[rank])
        loads[reader[saved]] += 1
    return reader


def cut_boxes(packed: list[bytes]) -> dict[int, list[tuple[object, ...]]]:
    """Return, on rank 0, {saved rank: rows of the boxes to read} for the shards that overlap with others.

    packed: for each rank, the packed boxes of the shards that it reads.
    """
    shards: dict[int, list[Box]] = {}
    for of_rank in packed:
        for saved, rows in store.unpack(of_rank):
            shards[saved] = from_rows(rows)

    cut: dict[int, list[tuple[object, ...]]] = {}
    for saved, boxes in consolidate.assign_boxes_once(shards).items():
        if boxes != shards[saved]:
            cut[saved] = to_rows(boxes)
    return cut


@dataclass(frozen=True)
class DiskSteps:
    """Steps of checkpoints in the run folder, good or not, or -1 if there is none.

    newest: the newest one present. latest: the last one committed, which may have been removed.
    """
    newest: int
    latest: int


@dataclass(frozen=True)
class FoundShard:
    """Result of looking up a shard on this node. problem: why it cannot be used, or "" if it can."""
    index: store.StoredIndex | None
    problem: str


def fewer_copies(cfg: Config, num_others: int, notes: list[str]) -> int:
    """Return the number of copies for a job with too few nodes under parallel.elastic, and append to `notes`.

    Raises ConfigError without parallel.elastic.
    """
    asked = cfg.checkpoint.replicas
    if cfg.parallel.elastic:
        notes.append(f"checkpoint.replicas: {asked}, and this start has {num_others} other nodes")
        return num_others
    remedy = f"take {num_others}" if num_others else "leave it out, and this node keeps only its own shards"
    raise ConfigError(
        f"checkpoint.replicas: {asked} is the number of other nodes with a copy, and this job has "
        f"{num_others} other nodes; {remedy}"
    )


def raise_error(error: Exception | None) -> None:
    """Raise `error` if it is not None."""
    if error is not None:
        raise error
