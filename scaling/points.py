"""The finished runs that a scaling law is fitted to."""
import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from config import ConfigError

Array = NDArray[np.float64]
COLUMNS = ("run", "parameters", "tokens", "flops", "loss")  # of a table of points


@dataclass(frozen=True)
class Points:
    """n runs. parameters, tokens, flops (of the whole run) and loss (nats a token, at its end): [n]."""
    runs: tuple[str, ...]
    parameters: Array
    tokens: Array
    flops: Array
    loss: Array

    def __len__(self) -> int:
        return len(self.runs)

    def take(self, rows: NDArray[np.intp]) -> "Points":
        """Some of the runs, by their numbers; one may be taken several times."""
        return Points(
            tuple(self.runs[row] for row in rows),
            self.parameters[rows],
            self.tokens[rows],
            self.flops[rows],
            self.loss[rows],
        )

    @property
    def sizes(self) -> Array:
        """The different numbers of parameters, the smallest first."""
        return np.unique(self.parameters)

    @property
    def flops_factor(self) -> float:
        """FLOPs of a parameter and token: 6 by the usual rule, more in small models, for their attention."""
        return float(np.median(self.flops / (self.parameters * self.tokens)))


def make_points(rows: list[dict[str, float | str]], source: str) -> Points:
    """Points from rows with the keys of COLUMNS. source: named in errors.

    Raises ConfigError, which names the run, for a number that no law can take.
    """
    for row in rows:
        for column in COLUMNS[1:]:
            value = float(row[column])
            if not (np.isfinite(value) and value > 0):
                raise ConfigError(
                    f"{source}: {row['run']} has {column} {row[column]}, and a law is fitted to numbers "
                    "above 0; leave the run out, or finish it"
                )
    values = {column: np.array([float(row[column]) for row in rows]) for column in COLUMNS[1:]}
    return Points(tuple(str(row["run"]) for row in rows), **values)


def read_points(path: Path) -> Points:
    """The points of a CSV file with the columns of COLUMNS. Raises ConfigError."""
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            missing = set(COLUMNS) - set(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a table of points ({error})") from error
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(sorted(missing))}; a table of points has "
                          f"{', '.join(COLUMNS)}")
    checked: list[dict[str, float | str]] = []
    for number, row in enumerate(rows, 2):
        try:
            checked.append({"run": row["run"], **{column: float(row[column]) for column in COLUMNS[1:]}})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: not a row of numbers ({error})") from error
    return make_points(checked, str(path))


def write_points(points: Points, path: Path) -> None:
    """Writes what read_points reads."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        columns = (points.runs, points.parameters, points.tokens, points.flops, points.loss)
        for run, *numbers in zip(*columns):
            writer.writerow([run, *(repr(float(number)) for number in numbers)])


def check_enough(points: Points) -> None:
    """Raises ConfigError where no law can be fitted: fewer than three sizes, or as many runs as numbers."""
    if len(points.sizes) < 3:
        raise ConfigError(f"fit: {len(points.sizes)} different sizes, and three are the least from which a "
                          "law can be seen; run more of the ladder")
    if len(points) < 6:
        raise ConfigError(f"fit: {len(points)} finished runs, and a law with five numbers needs six or more; "
                          "run more of the ladder")
