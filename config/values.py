"""Combinations of values of config keys, as a search (plan/search.py) or a proof (lab/proof/lattice.py)
varies them."""
import itertools
from collections.abc import Iterator
from typing import Any

Values = dict[str, Any]  # {key: value}


def combinations(axes: dict[str, tuple]) -> Iterator[Values]:
    """Every combination of the values of {key: values}; the last key changes fastest."""
    return (dict(zip(axes, values)) for values in itertools.product(*axes.values()))
