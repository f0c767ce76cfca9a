"""Compares what a run left on disk with a run without faults."""

import fcntl
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint.disk import store
from durable import restarts
from durable.memory import RECORD, has_record
from lab.benchmarks.chaos.layouts import STEPS
from parallel.sharding.boxes import Box

TOLERANCE = 1e-9  # relative, of fp64 values under two layouts
STEP_FIELDS = ("loss", "grad_norm", "lr", "tokens", "skipped")
Row = dict[str, Any]


@dataclass(frozen=True)
class Evidence:
    """The results of a run.

    steps: (step, its fields) for each step line, in order; other samples would change a step's loss.
    evaluations: (step, validation loss).
    checksums: {key and place: checksum} of each stored piece of weights and moments after the last step.
    """

    steps: list[tuple[int, Row]]
    evaluations: list[tuple[int, float]]
    checksums: dict[str, str]


def read_evidence(folder: Path) -> Evidence:
    """Read the results of a run. Raises store.IntegrityError or ValueError if its last checkpoint is not of
    the last step.
    """
    rows = read_rows(folder)
    path = store.newest_checkpoint(folder / "checkpoints", [])
    index = store.read_index(path) if path else None
    if index is None or index["step"] != STEPS:
        raise ValueError(f"the newest checkpoint is {path and path.name}, not that of step {STEPS}")
    return Evidence(
        steps=[(row["step"], {name: row.get(name) for name in STEP_FIELDS}) for row in rows if "loss" in row],
        evaluations=[(row["step"], row["val_loss"]) for row in rows if "val_loss" in row],
        checksums={f"{piece['key']} at {piece['start']}": piece["checksum"] for piece in index["pieces"]},
    )


def read_rows(folder: Path) -> list[Row]:
    """Return the complete lines of metrics.jsonl."""
    rows = []
    for line in (folder / "metrics.jsonl").read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def newest_step(folder: Path) -> int:
    """Return the newest step among published checkpoints and usable ones in memory, or 0 without any."""
    return max(0, restarts.progress(folder).newest)


# ---- comparisons: each returns the problems as text --------------------------------------------------------


def differences(found: Evidence, clean: Evidence, lost_lines: int = 0) -> list[str]:
    """Check that a run matches a clean one bit for bit. Up to `lost_lines` lines may be missing."""
    problems = ledger_problems(found, clean, lost_lines, exact=True)
    names = {key for key, digest in clean.checksums.items() if found.checksums.get(key) != digest}
    if names or len(found.checksums) != len(clean.checksums):
        first = min(names, default="")
        problems.append(f"{len(names)} of {len(clean.checksums)} stored pieces differ, as {first}")
    return problems


def ledger_problems(found: Evidence, clean: Evidence, lost_lines: int, exact: bool) -> list[str]:
    """Check that each step and evaluation is recorded once, in order, with the numbers of the clean run."""
    problems = []
    steps, evaluations = dict(found.steps), dict(found.evaluations)
    for name, seen, expected in (
        ("step", [step for step, _ in found.steps], [step for step, _ in clean.steps]),
        ("evaluation", [step for step, _ in found.evaluations], [step for step, _ in clean.evaluations]),
    ):
        if len(set(seen)) < len(seen):
            problems.append(f"the same {name} is there twice: {seen}")
        missing = [step for step in expected if step not in seen]
        if sorted(seen) != seen or len(missing) > lost_lines or set(seen) - set(expected):
            problems.append(f"the {name}s are {seen}, not {expected}")
        lost_lines -= len(missing)
    for step, row in clean.steps:
        for field, value in row.items():
            if step in steps and not is_same(steps[step][field], value, exact):
                problems.append(f"{field} of step {step} is {steps[step][field]!r}, not {value!r}")
    for step, loss in clean.evaluations:
        if step in evaluations and not is_same(evaluations[step], loss, exact):
            problems.append(f"val_loss of step {step} is {evaluations[step]!r}, not {loss!r}")
    return problems


def is_same(a: float, b: float, exact: bool) -> bool:
    return a == b if exact else math.isclose(a, b, rel_tol=TOLERANCE)


def weight_problems(folder: Path, clean: Path) -> list[str]:
    """Check that the final weights and moments equal those of another layout, in fp64."""
    found, expected = read_tensors(folder), read_tensors(clean)
    if found.keys() != expected.keys():
        return [f"other tensors are stored: {sorted(found.keys() ^ expected.keys())[:4]}"]
    problems = []
    for key, tensor in expected.items():
        scale = max(float(tensor.abs().max()), 1e-30)
        error = float((found[key] - tensor).abs().max()) / scale
        if not error <= TOLERANCE:
            problems.append(f"{key} is off by {error:.1e}")
    return problems[:4]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return each whole tensor of the newest checkpoint, in fp64."""
    path = store.newest_checkpoint(folder / "checkpoints", [])
    assert path is not None, folder
    shapes = {piece["key"]: tuple(piece["shape"]) for piece in store.read_index(path)["pieces"]}
    tensors = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in shapes.items()}
    store.load(path, [(Box.whole(key, x.shape), x) for key, x in tensors.items()], allow_cast=True)
    return tensors


# ---- the folder --------------------------------------------------------------------------------------------


def checkpoint_problems(folder: Path) -> list[str]:
    """Check that every published checkpoint verifies."""
    problems = []
    for _, path in store.committed_checkpoints(folder / "checkpoints"):
        try:
            store.verify(path)
        except store.IntegrityError as error:
            problems.append(f"{path.name} is committed and does not verify: {error}")
    return problems


def folder_problems(folder: Path) -> list[str]:
    """Check that no partial files, locks or STOP file are left over."""
    problems = []
    if has_record(folder):
        problems.append(f"{RECORD} is left, and what it names in memory")
    for path in sorted(folder.rglob("*")):
        if ".tmp" in path.name or path.name.startswith((".trash", ".probe")) or path.name == "STOP":
            problems.append(f"{path.relative_to(folder)} is left")
    return problems + lock_problems(folder)


def lock_problems(folder: Path) -> list[str]:
    """Check that nobody still holds the run's lock."""
    try:
        fd = os.open(folder / ".lock", os.O_RDWR)
    except FileNotFoundError:
        return []
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return []
    except OSError:
        return ["the lock of the run is held"]
    finally:
        os.close(fd)
