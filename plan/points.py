"""The finished runs that a scaling law is fitted to."""
import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from config import ConfigError

Array = NDArray[np.float64]
COLUMNS = ("run", "parameters", "tokens", "flops", "loss")  # of a table of points
NON_EMBEDDING = "parameters_without_embeddings"  # an optional column
SCORE = "tasks/"  # begins other optional columns: scores of tasks, as metrics.jsonl names them
SMOOTHING = 0.02  # window of the average before a point, as a fraction of its position


@dataclass(frozen=True)
class Points:
    """n runs. parameters, tokens, flops (of the whole run) and final loss (nats per token): [n].

    non_embedding: parameters outside of the embedding and the output head, [n], or None if unknown.
    scores: {column: [n]}, such as tasks/core.
    """
    runs: tuple[str, ...]
    parameters: Array
    tokens: Array
    flops: Array
    loss: Array
    non_embedding: Array | None = None
    scores: Mapping[str, Array] = field(default_factory=dict[str, Array])

    def __len__(self) -> int:
        return len(self.runs)

    def take(self, rows: NDArray[np.intp]) -> "Points":
        """Select runs by index; repeats are allowed."""
        return Points(
            tuple(self.runs[row] for row in rows),
            parameters=self.parameters[rows],
            tokens=self.tokens[rows],
            flops=self.flops[rows],
            loss=self.loss[rows],
            non_embedding=None if self.non_embedding is None else self.non_embedding[rows],
            scores={name: values[rows] for name, values in self.scores.items()},
        )

    @property
    def sizes(self) -> Array:
        """The distinct numbers of parameters, ascending."""
        return np.unique(self.parameters)

    @property
    def flops_factor(self) -> float:
        """FLOPs per parameter and token: 6 by the usual rule, more in small models because of attention."""
        return float(np.median(self.flops / (self.parameters * self.tokens)))


def make_points(rows: list[dict[str, float | str]], source: str) -> Points:
    """Make points from rows with the keys of COLUMNS, and those of the optional columns that all rows have.

    `source` is named in errors.

    Raises ConfigError naming the run if a number is invalid for a law.
    """
    has_non_embedding = all(NON_EMBEDDING in row for row in rows)
    columns = [*COLUMNS[1:], *([NON_EMBEDDING] if has_non_embedding else [])]
    for row in rows:
        for column in columns:
            value = float(row[column])
            if not (np.isfinite(value) and value > 0):
                raise ConfigError(
                    f"{source}: {row['run']} has {column} {row[column]}, and a law is fitted to numbers "
                    "above 0; leave the run out, or finish it"
                )
    values = {column: np.array([float(row[column]) for row in rows]) for column in columns}
    non_embedding = values.pop(NON_EMBEDDING, None)
    scores = get_scores(rows, source)
    return Points(
        tuple(str(row["run"]) for row in rows), **values, non_embedding=non_embedding, scores=scores
    )


def get_scores(rows: list[dict[str, float | str]], source: str) -> dict[str, Array]:
    """Return the scores that all rows have. Raises ConfigError naming the run of one that is not finite."""
    names = [name for name in (rows[0] if rows else ()) if name.startswith(SCORE)]
    scores: dict[str, Array] = {}
    for name in names:
        if not all(name in row for row in rows):
            continue
        scores[name] = np.array([float(row[name]) for row in rows])
        for row in rows:
            if not np.isfinite(float(row[name])):
                raise ConfigError(
                    f"{source}: {row['run']} has {name} {row[name]}; leave the run out, or the column"
                )
    return scores


def read_points(path: Path) -> Points:
    """Read a CSV file with the columns of COLUMNS, and optionally NON_EMBEDDING. Raises ConfigError."""
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            names = set(reader.fieldnames or ())
            missing = set(COLUMNS) - names
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a table of points ({error})") from error
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(sorted(missing))}; a table of points has "
                          f"{', '.join(COLUMNS)}")
    numeric = [*COLUMNS[1:], *([NON_EMBEDDING] if NON_EMBEDDING in names else [])]
    numeric += sorted(name for name in names if name.startswith(SCORE))
    checked: list[dict[str, float | str]] = []
    for number, row in enumerate(rows, 2):
        try:
            checked.append({"run": row["run"], **{column: float(row[column]) for column in numeric}})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: not a row of numbers ({error})") from error
    return make_points(checked, str(path))


def write_points(points: Points, path: Path) -> None:
    """Write a file for read_points."""
    columns = [points.runs, points.parameters, points.tokens, points.flops, points.loss]
    optional = dict(points.scores)
    if points.non_embedding is not None:
        optional = {NON_EMBEDDING: points.non_embedding, **optional}
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *optional])
        for run, *numbers in zip(*columns, *optional.values()):
            writer.writerow([run, *(repr(float(number)) for number in numbers)])


def check_enough(points: Points) -> None:
    """Raise ConfigError if no law can be fitted: fewer than three sizes, or as many runs as parameters."""
    if len(points.sizes) < 3:
        raise ConfigError(f"fit: {len(points.sizes)} different sizes, and three are the least from which a "
                          "law can be seen; run more of the ladder")
    if len(points) < 6:
        raise ConfigError(f"fit: {len(points)} finished runs, and a law with five numbers needs six or more; "
                          "run more of the ladder")


def smoothed(position: Array, loss: Array) -> Array:
    """Return the mean loss [steps] of each step over those since (1 - SMOOTHING) of its position, inclusive.

    `position` is what steps are measured in, such as tokens or FLOPs, and rises. Later steps have no
    influence, so runs of any length agree where they did the same. Losses that are not finite are excluded;
    the result is NaN where no other is left.
    """
    # the steps start .. end - 1 of each mean
    ends = np.arange(1, len(loss) + 1)
    first_near = np.searchsorted(position, (1 - SMOOTHING) * position, side="right")
    starts = np.minimum(ends - 1, first_near)

    # sum and count of the finite losses among them
    is_finite = np.isfinite(loss)
    sums_before = np.cumsum(np.insert(np.where(is_finite, loss, 0.0), 0, 0.0))
    counts_before = np.cumsum(np.insert(is_finite.astype(float), 0, 0.0))
    sums = sums_before[ends] - sums_before[starts]
    counts = counts_before[ends] - counts_before[starts]
    unknown = np.full(len(loss), np.nan)
    return np.divide(sums, counts, out=unknown, where=counts > 0)
