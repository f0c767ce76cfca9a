"""--part K/M splits a command's list of work over several machines or launches."""

import re
from collections.abc import Sequence
from typing import TypeVar

from config import ConfigError

Item = TypeVar("Item")


def parse_part(part: str, most: int) -> tuple[int, int]:
    """Parse "K/M" into (K, M). Raises ConfigError unless 1 <= K <= M <= most."""
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    number, num_parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= num_parts <= most:
        raise ConfigError(
            f"--part: {part!r} must be K/M with 1 <= K <= M <= {most}, such as 2/4: the second of four parts"
        )
    return number, num_parts


def part_of(items: Sequence[Item], part: str) -> Sequence[Item]:
    """Return every M-th item starting from the K-th, so that each item is in exactly one part.

    `part` is "K/M". Raises ConfigError if that part does not exist.
    """
    number, num_parts = parse_part(part, len(items))
    return items[number - 1 :: num_parts]
