"""A rule about several keys: what it says of one config. config/reading/rules.py has most of them; those of a
part of the model stand with its keys.
"""
from collections.abc import Iterable
from typing import NamedTuple


class Rule(NamedTuple):
    """One rule, evaluated for one config. Where it is broken, config/reading/suggestions.py looks for values.

    They are other values of the first of `keys` that has any, or another train.ramp.
    """
    holds: object  # true if the config keeps the rule
    message: str  # the error if it does not: names the key, and how to correct it
    keys: str = ""  # separated by spaces
    values: Iterable[int] = ()  # candidates for each of `keys`
    ramp_unit: int = 0  # above 0: another train.ramp, whose sizes are all multiples of it (sequences)


def nearby_multiples(value: int, unit: int) -> list[int]:
    """Multiples of `unit` around `value`: candidates for a suggestion."""
    return [unit * max(1, value // unit + offset) for offset in range(-1, 3)]
