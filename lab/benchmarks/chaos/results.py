"""The rounds of a long run on disk, one JSON line each, so that it can be resumed.

    {"seed": 1, "number": 7, "fault": "disk full", "layout": "pp2", "disturbed_before": false,
     "starts": [...], "codes": [82, 0], "problems": [], "lost_s": 9.1, "commit": "0f49525"}
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config import ConfigError
from lab.benchmarks.chaos.rounds import Draw, Report


def identity(draw: Draw, seed: int) -> dict[str, Any]:
    """Return the fields that identify a round."""
    return {
        "seed": seed,
        "number": draw.number,
        "fault": draw.fault,
        "layout": draw.layout.name,
        "disturbed_before": draw.disturbed_before,
    }


def read_reports(path: Path, draws: list[Draw], seed: int) -> list[Report]:
    """Read the reports of these draws from the file, [] if there is no file.

    A truncated last line is dropped. Raises ConfigError for a line of another draw, which would be
    miscounted.
    """
    if not path.exists():
        return []
    by_number = {draw.number: draw for draw in draws}
    results: list[Report] = []
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # a killed writer's last line, or the empty rest of the file
            continue
        try:
            draw = by_number[row["number"]]
            told = {key: row.pop(key) for key in identity(draw, seed)}
            report = Report(draw, **row)
        except (KeyError, TypeError):  # no such round, or missing fields
            told, report = {}, None
        if report is None or told != identity(report.draw, seed):
            raise ConfigError(
                f"--resume: line {number} of {path} is of another draw; give the same --seed, --rounds, "
                "--layouts and --faults as before, or another file"
            )
        results.append(report)
    return results


def append_report(path: Path, report: Report, seed: int) -> None:
    """Append a line for the round and fsync it."""
    row = identity(report.draw, seed) | {key: value for key, value in asdict(report).items() if key != "draw"}
    with open(path, "ab+") as out:
        if out.tell() and not ends_a_line(path):
            out.write(b"\n")
        out.write(json.dumps(row).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


def ends_a_line(path: Path) -> bool:
    """Return whether the file's last line is complete."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
