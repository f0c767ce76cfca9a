"""Damage to the files of a run between two starts."""

import random
import shutil
from pathlib import Path

from checkpoint.disk import store


def prepare(what: str, folder: Path, aside: Path, draw: random.Random) -> str:
    """Apply the damage `what` to a run folder and describe it. Damaged originals are kept in `aside`."""
    checkpoints = [path for _, path in store.committed_checkpoints(folder / "checkpoints")]
    if what == "flip newest":
        return flip_a_byte(checkpoints[0], draw)
    if what == "flip all":
        shutil.copytree(folder / "checkpoints", aside)
        return "; ".join(flip_a_byte(path, draw) for path in checkpoints)
    if what == "mend":
        shutil.rmtree(folder / "checkpoints")
        shutil.move(aside, folder / "checkpoints")
        return "the checkpoints are as they were"
    if what == "damage metrics":
        return damage_a_line(folder / "metrics.jsonl", draw)
    if what == "lose latest":
        (folder / "checkpoints" / "latest").write_text("step_99999999\n")
        return "latest names step_99999999"
    raise ValueError(what)


def flip_a_byte(checkpoint: Path, draw: random.Random) -> str:
    """Flip one bit at a random place of one file of a checkpoint."""
    file = draw.choice(sorted(checkpoint.iterdir()))
    data = bytearray(file.read_bytes())
    place, bit = draw.randrange(len(data)), draw.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {place:,} of {checkpoint.name}/{file.name}"


def damage_a_line(file: Path, draw: random.Random) -> str:
    """Overwrite one byte of one line with a byte that occurs in no text."""
    lines = file.read_bytes().splitlines(keepends=True)
    number = draw.randrange(len(lines))
    line = bytearray(lines[number])
    place = draw.randrange(len(line) - 1)
    line[place] = 0xFF
    lines[number] = bytes(line)
    file.write_bytes(b"".join(lines))
    return f"byte {place} of line {number + 1} of {file.name}"
