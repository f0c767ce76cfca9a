"""--part K/M of a command whose work is a list: several machines, or several starts, do a part each."""

import re
from collections.abc import Sequence
from typing import TypeVar

from config import ConfigError

Item = TypeVar("Item")


def parse_part(part: str, most: int) -> tuple[int, int]:
    """Returns (K, M) of "K/M". Raises ConfigError unless 1 <= K <= M <= most."""
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    number, num_parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= num_parts <= most:
        raise ConfigError(
            f"--part: {part!r} must be K/M with 1 <= K <= M <= {most}, as 2/4: the second of four parts"
        )
    return number, num_parts


def part_of(items: Sequence[Item], part: str) -> Sequence[Item]:
    """Every M-th item from the K-th on: each item is in exactly one part.

    part: "K/M". Raises ConfigError if there is no such part.
    """
    number, num_parts = parse_part(part, len(items))
    return items[number - 1 :: num_parts]
