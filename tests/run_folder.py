"""Read what a run has left in its folder."""

import json
from pathlib import Path

from checkpoint.disk import store


def rows(folder) -> list[dict]:
    """Every line of metrics.jsonl, steps and validations in their order."""
    return read_lines(Path(folder) / "metrics.jsonl")


def steps(folder) -> list[dict]:
    return [row for row in rows(folder) if "loss" in row]


def validations(folder) -> list[dict]:
    return [row for row in rows(folder) if "val_loss" in row]


def losses(folder) -> dict[int, float]:
    """{step: loss}. Each step must be there once, in order."""
    found = steps(folder)
    assert [row["step"] for row in found] == list(range(found[0]["step"], found[0]["step"] + len(found)))
    return {row["step"]: row["loss"] for row in found}


def starts(folder) -> list[dict]:
    """The lines of starts.jsonl."""
    return read_lines(Path(folder) / "starts.jsonl")


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def exit_reason(folder, rank: int = 0) -> dict:
    name = f"exit_reason.rank{rank}.json" if rank else "exit_reason.json"
    return json.loads((Path(folder) / name).read_text())


def summary(folder) -> dict:
    return json.loads((Path(folder) / "summary.json").read_text())


def saved_steps(folder) -> list[int]:
    """The steps of the committed checkpoints, the newest first."""
    return [step for step, _ in store.committed_checkpoints(Path(folder) / "checkpoints")]


def flip_bit(file: Path) -> None:
    """Damage a file without changing its length."""
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
