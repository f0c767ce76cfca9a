"""Checkpoints: how long a save blocks training, and how fast it writes and loads, against the disk and DCP.

One process saves and loads the state of a model (masters and two moments in fp32) over several rounds of:

- a plain copy of the tensors into reused memory: a lower bound for the blocking part of a background save
- a plain write of the same bytes with fsync, and a plain read of them after dropping the page cache
- our blocking save, our background save with steps running meanwhile, our load after dropping the page cache
- a plain file in memory, written and read; our save in memory (checkpoint.memory_every) and our start from it
- the same with torch.distributed.checkpoint (DCP) with as many threads, which neither hashes nor reads back

A step is a row of matrix products on all threads. The table shows medians over the rounds.
"""
import argparse
import importlib
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.disk import store
from checkpoint.disk.files import drop_page_cache, raw_bytes
from checkpoint.disk.saver import CheckpointSaver, writer_threads
from config.reading import resolve
from durable import memory
from durable.memory import MemoryCheckpoints
from lab.benchmarks.shape import show
from parallel.sharding.boxes import Box
from parallel.wire.comm import Group
from parallel.wire.world import join_alone, leave_job

WIDTH = 1024  # of the square weights
STEP_PRODUCTS = 4  # of 1024 x 1024 matrices
READ_BYTES = 4 << 20  # chunk size of a plain read
ROUNDS = 3
FILES_IN_MEMORY = 3  # copies of the state that exist at the same time
State = dict[str, Tensor]
Seconds = dict[str, float]


@dataclass(frozen=True)
class SavedState:
    """The state to save, and the folders of the benchmark on disk and in memory.

    memory: None if there is no room.
    """
    folder: Path
    memory: Path | None
    state: State

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def pieces(self) -> list[store.Piece]:
        return [(Box.whole(key, tensor.shape), tensor) for key, tensor in self.state.items()]

    def empty(self, name: str) -> Path:
        """Return an empty folder."""
        return emptied(self.folder / name)


def emptied(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def main(args: argparse.Namespace) -> int:
    """Return the exit code. Raises StorageError if the disk has too little space."""
    torch.set_num_threads(args.threads)
    state = make_state(int(args.parameters))
    place = SavedState(Path(args.out), folder_in_memory(Path(args.memory), state), state)
    place.folder.mkdir(parents=True, exist_ok=True)
    try:
        store.check_free_space(place.folder / "plain", 3 * place.num_bytes)
        join_alone("cpu")  # DCP's async_save needs a process group
        rounds = [measure_round(place, args.threads) for _ in range(args.rounds + 1)]
    finally:
        leave_job()
        shutil.rmtree(place.folder, ignore_errors=True)
        if place.memory is not None:
            shutil.rmtree(place.memory, ignore_errors=True)
    timed = rounds[1:]  # the first creates buffers and files
    seconds = {name: statistics.median(one[name] for one in timed) for name in timed[0]}
    title = (
        f"{place.num_bytes / 1e9:.2f} GB of state, {args.threads} threads, a save in the background has "
        f"{writer_threads(in_background=True)}; medians of {len(timed)} rounds, load "
        f"{os.getloadavg()[0]:.1f}; {cache_text(place)}"
    )
    if place.memory is None:
        title += f"; nothing in memory: {args.memory} is missing or has too little room"
    show(table_rows(seconds, place.num_bytes), args.json, checkpoint=title)
    return 0


def make_state(parameters: int) -> State:
    """Make masters and two moments for at least one weight [WIDTH, WIDTH]."""
    generator = torch.Generator().manual_seed(0)
    state: State = {}
    for number in range(max(1, parameters // WIDTH**2)):
        for suffix in ("", "@adam_m", "@adam_v"):
            state[f"layers.{number}.weight{suffix}"] = torch.randn(WIDTH, WIDTH, generator=generator)
    return state


def folder_in_memory(parent: Path, state: State) -> Path | None:
    """Return a folder in memory for this benchmark, or None if there is no room."""
    wanted = FILES_IN_MEMORY * sum(tensor.nbytes for tensor in state.values())
    if not parent.is_dir() or memory.free_bytes(parent) < wanted:
        return None
    return emptied(parent / f"bevatron-bench-{os.getpid()}")


def cache_text(place: SavedState) -> str:
    """Describe whether reads come from the disk."""
    probe = place.folder.parent / f".{place.folder.name}-probe"
    probe.write_bytes(b"x")
    try:
        return "reads with the cache dropped" if drop_page_cache(probe) else "reads from the system's cache"
    finally:
        probe.unlink()


# ---- a round -----------------------------------------------------------------------------------------------

def measure_round(place: SavedState, threads: int) -> Seconds:
    """Return {what: seconds} of one round."""
    seconds = {**measure_plain(place), **measure_ours(place), **measure_dcp(place, threads)}
    if place.memory is not None:
        seconds |= measure_in_memory(place, place.memory, threads)
    return seconds


def measure_plain(place: SavedState) -> Seconds:
    """Time the copy of the tensors, and the disk."""
    copies = [torch.empty_like(tensor).zero_() for tensor in place.state.values()]

    def copy() -> None:
        for target, tensor in zip(copies, place.state.values()):
            target.copy_(tensor)

    copy_s = time_call(copy)
    path = place.empty("plain") / "file"
    write_s = time_call(lambda: write_plainly(path, place.state))
    drop_page_cache(path)
    read_s = time_call(lambda: read_plainly(path))
    shutil.rmtree(path.parent)
    return {"copy": copy_s, "disk write": write_s, "disk read": read_s, "step alone": step_seconds(20)}


def measure_ours(place: SavedState) -> Seconds:
    """Time our saves and our load."""
    root = place.empty("ours")
    result: Seconds = {}
    saver = CheckpointSaver(in_background=False)
    result["ours save"] = time_call(lambda: saver.save(root, 1, place.pieces(), {}, keep=1))

    # A background save, with the memory of an earlier one. Unchanged pieces would be linked.
    for tensor in place.state.values():
        tensor.add_(1)
    saver = CheckpointSaver(in_background=True)
    saver.host_memory.copy(place.pieces())
    begun = time.perf_counter()
    result["ours blocked"] = time_call(lambda: saver.save(root, 2, place.pieces(), {}, keep=1))
    result["ours step"] = steps_until(lambda: saver.thread is None or not saver.thread.is_alive())
    path = saver.wait_saved()
    result["ours behind"] = time.perf_counter() - begun

    forget_folder(path)
    targets = [(box, torch.zeros_like(tensor)) for box, tensor in place.pieces()]
    result["ours load"] = time_call(lambda: store.load(path, targets))
    check_loaded(place, {box.key: tensor for box, tensor in targets})
    shutil.rmtree(root)
    return result


def measure_dcp(place: SavedState, threads: int) -> Seconds:
    """Time DCP's saves and its load of the same tensors."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # raced here, not an exchange of ours
    root = place.empty("dcp")
    found: Seconds = {}

    def writer(name: str, threads: int) -> Any:
        return dcp.FileSystemWriter(root / name, thread_count=threads)

    in_step = writer("in-step", threads)
    found["dcp save"] = time_call(lambda: dcp.save(dict(place.state), storage_writer=in_step))
    shutil.rmtree(root / "in-step")
    behind = writer("behind", writer_threads(in_background=True))
    begun = time.perf_counter()
    futures: list[Any] = []
    found["dcp blocked"] = time_call(
        lambda: futures.append(dcp.async_save(dict(place.state), storage_writer=behind))
    )
    found["dcp step"] = steps_until(futures[0].done)
    futures[0].result()
    found["dcp behind"] = time.perf_counter() - begun

    forget_folder(root / "behind")
    targets = {key: torch.zeros_like(tensor) for key, tensor in place.state.items()}
    found["dcp load"] = time_call(lambda: dcp.load(targets, checkpoint_id=root / "behind"))
    check_loaded(place, targets)
    shutil.rmtree(root)
    return found


def measure_in_memory(place: SavedState, folder: Path, threads: int) -> Seconds:
    """Time a plain file in memory, our checkpoints there as in a run of one rank, and DCP's."""
    result: Seconds = {}
    path = emptied(folder / "plain") / "file"
    result["memory write"] = time_call(lambda: write_plainly(path, place.state))
    result["memory read"] = time_call(lambda: read_plainly(path))
    shutil.rmtree(path.parent)

    words = ["--checkpoint.memory_every", "1", "--checkpoint.memory_dir", str(folder)]
    cfg = resolve("quickstart", None, words)
    run = place.empty("run")
    kept = MemoryCheckpoints(cfg, run, "node0", Group("job", (0,), 0))
    result["ours memory"] = time_call(lambda: kept.save(1, place.pieces(), {}))
    targets = [(box, torch.zeros_like(tensor)) for box, tensor in place.pieces()]

    def resume() -> None:
        start, notes = kept.newest_start(cfg)
        if start is None or start.resumed is None:
            raise ValueError(f"nothing in memory is used: {notes}")
        store.load(start.resumed.path, targets)

    result["ours from memory"] = time_call(resume)
    check_loaded(place, {box.key: tensor for box, tensor in targets})
    kept.clear()

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    root = folder / "dcp"
    writer = dcp.FileSystemWriter(root, thread_count=threads)
    result["dcp memory"] = time_call(lambda: dcp.save(dict(place.state), storage_writer=writer))
    loaded = {key: torch.zeros_like(tensor) for key, tensor in place.state.items()}
    result["dcp from memory"] = time_call(lambda: dcp.load(loaded, checkpoint_id=root))
    check_loaded(place, loaded)
    shutil.rmtree(root)
    return result


def check_loaded(place: SavedState, loaded: State) -> None:
    """Raise ValueError if the loaded state differs from the saved one."""
    for key, tensor in place.state.items():
        if not torch.equal(loaded[key], tensor):
            raise ValueError(f"{key} was not loaded as it was saved")


# ---- pieces of a round -------------------------------------------------------------------------------------

def time_call(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def write_plainly(path: Path, state: State) -> None:
    with open(path, "xb", buffering=0) as file:
        for tensor in state.values():
            file.write(raw_bytes(tensor).data)
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    buffer = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def forget_folder(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            drop_page_cache(file)


def step_seconds(steps: int) -> float:
    """Return the mean seconds of a step."""
    a = torch.ones(WIDTH, WIDTH)

    def step() -> None:
        for _ in range(STEP_PRODUCTS):
            torch.mm(a, a)

    return time_call(lambda: [step() for _ in range(steps)]) / steps


def steps_until(is_done: Callable[[], bool]) -> float:
    """Run steps until is_done, and return their mean seconds."""
    found = [step_seconds(1)]
    while not is_done():
        found.append(step_seconds(1))
    return statistics.mean(found)


# ---- the table ---------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Timing:
    """A row of the table.

    of: what both sides do. base: the measurement that theirs is compared with.
    is_rate: shown as GB/s, where a higher ratio to the base is better.
    """
    what: str
    of: str
    base: str
    aim: str = ""
    is_rate: bool = False

    @property
    def ours(self) -> str:
        """The name of our measurement."""
        return f"ours {self.of}"

    @property
    def dcp(self) -> str:
        return f"dcp {self.of}"


TIMINGS = (
    Timing("blocked by a background save", of="blocked", base="copy", aim="1.2 or less"),
    Timing("written in the step", of="save", base="disk write", aim="0.8 or more", is_rate=True),
    Timing("written behind the run", of="behind", base="disk write", aim="0.8 or more", is_rate=True),
    Timing("loaded", of="load", base="disk read", aim="0.8 or more", is_rate=True),
    Timing("a step beside the writer", of="step", base="step alone"),
    Timing("kept in memory", of="memory", base="memory write", is_rate=True),
    Timing("loaded from memory", of="from memory", base="memory read", is_rate=True),
)


def table_rows(seconds: Seconds, num_bytes: int) -> list[dict[str, str]]:
    """Return the rows of the table. Rates count the bytes of the tensors."""
    rows: list[dict[str, str]] = []
    for line in TIMINGS:
        if line.ours not in seconds:
            continue
        ours, dcp, base = seconds[line.ours], seconds[line.dcp], seconds[line.base]
        ratio = base / ours if line.is_rate else ours / base
        rows.append({
            "what": line.what,
            "ours": figure(ours, num_bytes, line.is_rate),
            "DCP": figure(dcp, num_bytes, line.is_rate),
            "base": f"{line.base} {figure(base, num_bytes, line.is_rate)}",
            "ours / base": f"{ratio:.2f}",
            "aim": line.aim,
            "faster than DCP": f"{dcp / ours:.2f} x",
        })
    return rows


def figure(seconds: float, num_bytes: int, is_rate: bool) -> str:
    return f"{num_bytes / seconds / 1e9:.2f} GB/s" if is_rate else f"{seconds:.4f} s"
