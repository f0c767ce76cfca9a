"""Combinations of config values, as varied by a search (plan/search.py) or a proof (lab/proof/lattice.py)."""
import itertools
from collections.abc import Iterator
from typing import Any

Values = dict[str, Any]  # {key: value}


def combinations(axes: dict[str, tuple]) -> Iterator[Values]:
    """Yield every combination of the values of {key: values}; the last key varies fastest."""
    return (dict(zip(axes, values)) for values in itertools.product(*axes.values()))
