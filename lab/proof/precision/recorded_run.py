"""A complete run: the records of all ranks, joined to whole tensors under their global names."""
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import Config
from durable.pool import WorkerPool
from lab.proof.precision.errors import Tensors
from lab.proof.precision.recorder import FlatPart, record_run, same_bits
from parallel.wire.world import World

Parts = list[tuple[list[FlatPart], Tensor]]  # (places, flat tensor) for every rank and bucket


@dataclass
class RecordedRun:
    """A run of train.train. State 0 is before the first step, state n after the n-th.

    masters, moments ("key@name"), weights: one entry a state. grads: one a step, times the loss scale.
    steps: for each state the step number, its loss, norm and whether it was good (ok), and the loss scale
        (scale) and count of good steps (good) after it.
    largest: for each state the largest finite value in fp16 of the step before it, 0 in other dtypes.
    rows: {kind of rows in 8 bits: the largest error of the run} (row_errors.py).
    wrong: outright errors.
    """

    cfg: Config
    masters: list[Tensors]
    moments: list[Tensors]
    weights: list[Tensors]
    grads: list[Tensors]
    steps: list[dict[str, Any]]
    largest: list[float]
    rows: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def assemble(parts: Parts, wrong: list[str], when: str) -> Tensors:
    """Assemble whole tensors from their parts.

    Appends to `wrong` any difference between replicas, and any element that no rank has.
    """
    whole: Tensors = {}
    known: Tensors = {}  # marks the elements seen so far
    for places, flat in parts:
        for key, shape, start, size, offset in places:
            part = flat[offset:offset + prod(size)].view(size)
            box = tuple(slice(first, first + length) for first, length in zip(start, size))
            if key not in whole:
                whole[key] = torch.full(shape, math.nan, dtype=flat.dtype)
                known[key] = torch.zeros(shape, dtype=torch.bool)
            replica = known[key][box]
            if replica.any() and not same_bits(whole[key][box][replica], part[replica]):
                wrong.append(f"{when}: replicas of {key} differ")
            whole[key][box] = part
            known[key][box] = True
    wrong += [f"{when}: nobody holds all of {key}" for key, mask in known.items() if not mask.all()]
    return whole


def read_run(cfg: Config, folder: Path, world: int) -> RecordedRun:
    """Read the run of `world` ranks that `record_run` recorded in the folder."""
    records = [torch.load(folder / f"record.{rank}", weights_only=True) for rank in range(world)]
    steps = records[0]["steps"]
    largest = [max(values) for values in zip(*(record["largest"] for record in records))]
    run = RecordedRun(cfg, masters=[], moments=[], weights=[], grads=[], steps=steps, largest=largest)
    for record in records:
        for kind, error in record["rows"].items():
            run.rows[kind] = max(run.rows.get(kind, 0.0), error)

    said = [f"rank {rank}: {what}" for rank, record in enumerate(records) for what in record["wrong"]]
    run.wrong += dict.fromkeys(said)
    if any(repr(record["steps"]) != repr(steps) for record in records):  # as text, where NaN equals NaN
        run.wrong.append("ranks have different losses, norms or loss scales")

    for n in range(len(records[0]["states"])):
        when = f"after step {steps[n]['step']}"
        run.masters.append(assemble(state_parts(records, n, "master"), run.wrong, when))
        run.moments.append(assemble_moments(records, n, run.wrong, when))
        run.weights.append(assemble(read_parts(records, n), run.wrong, f"{when}, as read"))
    for n in range(len(records[0]["grads"])):
        when = f"step {steps[n + 1]['step']}, gradients"
        run.grads.append(assemble(grad_parts(records, n), run.wrong, when))
    return run


def state_parts(records: list[dict], n: int, name: str) -> Parts:
    """Return the tensors `name` of state n from all ranks, for the buckets that have one."""
    parts: Parts = []
    for record in records:
        for places, state in zip(record["owned_parts"], record["states"][n]):
            if name in state:
                parts.append((places, state[name]))
    return parts


def read_parts(records: list[dict], n: int) -> Parts:
    """Return the weights read in state n."""
    parts: Parts = []
    for record in records:
        for i, places in enumerate(record["whole_parts"]):
            parts.append((places, record["weights_read"][n][i]))
    return parts


def grad_parts(records: list[dict], n: int) -> Parts:
    """Return the gradients of the n-th recorded step, counted from 0."""
    parts: Parts = []
    for record in records:
        parts += zip(record["owned_parts"], record["grads"][n])
    return parts


def assemble_moments(records: list[dict], n: int, wrong: list[str], when: str) -> Tensors:
    """Return the moments of state n, {"key@name": tensor}."""
    names: dict[str, None] = {}  # an ordered set
    for record in records:
        for state in record["states"][n]:
            names |= dict.fromkeys(name for name in state if name not in ("master", "own"))

    moments: Tensors = {}
    for name in names:
        whole = assemble(state_parts(records, n, name), wrong, f"{when}, {name}")
        moments |= {f"{key}@{name}": tensor for key, tensor in whole.items()}
    return moments


def train_and_record(
    pool: WorkerPool,
    cfg: Config,
    folder: Path,
    spoilt: frozenset[int] = frozenset(),
    work: Callable[[World, Config, Path, frozenset[int]], int] = record_run,
) -> RecordedRun:
    """Train on the ranks of the pool, return the run and remove the folder.

    `spoilt` steps get a NaN gradient. `work` is called on each rank: `record_run` or a variant of it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    codes = pool.run(work, cfg, folder, spoilt)
    run = read_run(cfg, folder, pool.size)
    shutil.rmtree(folder)
    if any(codes):
        run.wrong.append(f"exit codes {codes}")
    return run
