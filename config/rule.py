"""A rule about several keys, evaluated for one config. Most are in config/reading/rules.py; rules of a
model part are next to its keys."""
from collections.abc import Iterable
from typing import NamedTuple


class Rule(NamedTuple):
    """One rule, evaluated for one config. If it is broken, config/reading/suggestions.py searches for values
    that work.

    It tries other values of the first of `keys` for which any works, or another train.ramp.
    """
    holds: object  # true if the config satisfies the rule
    message: str  # the error otherwise: names the key, and how to correct it
    keys: str = ""  # separated by spaces
    values: Iterable[int] = ()  # candidates for each of `keys`
    ramp_unit: int = 0  # above 0: suggest a train.ramp whose sizes are all multiples of it (sequences)


def nearby_multiples(value: int, unit: int) -> list[int]:
    """Multiples of `unit` around `value`: candidates for a suggestion."""
    return [unit * max(1, value // unit + offset) for offset in range(-1, 3)]
