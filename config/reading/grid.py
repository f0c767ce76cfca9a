"""A grid: one command of train.py at every combination of some keys' values, a run each in the grid's folder.

A run is named by its values, as in `optim.lr=0.001+train.seed=2`. The values are those that train.py reads,
so 1e-3 and 0.001 are one. GRID_FILE in the folder has all cells, by which other programs find the runs.
"""
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from config.manifest import keep_manifest, read_manifest
from config.reading.arguments import split_argv
from config.reading.loading import dotted_overrides
from config.reading.run_name import MAX_NAME, plain
from config.schema import Config
from config.strict import ConfigError
from config.tree import value_at

GRID_FILE = "grid.json"
Resolve = Callable[[str | None, str | None, list[str]], Config]


@dataclass(frozen=True)
class Grid:
    """recipe, file: NAME and --config of train.py. settings: {key: text} of every run. axes: {key: texts}."""
    name: str
    recipe: str | None
    file: str | None
    settings: dict[str, str]
    axes: dict[str, tuple[str, ...]]


class GridCell(NamedTuple):
    """One run of a grid. values: {key: text} as the config has them. words: the arguments of train.py."""
    name: str
    values: dict[str, str]
    words: list[str]
    cfg: Config

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.cfg.log.dir) / self.name


def parse_grid(over: list[list[str]], argv: list[str]) -> Grid:
    """Parse a grid. over: [key, value, value, ...] of each axis. argv: of train.py. Raises ConfigError."""
    recipe, file, rest = split_argv(argv)
    settings = dotted_overrides(rest)
    name = settings.pop("log.name", None)
    if name is None:
        raise ConfigError("log.name: missing; it names the grid, whose runs are folders in runs/NAME")

    axes: dict[str, tuple[str, ...]] = {}
    for word, *values in over:
        key = word.removeprefix("--").replace("-", "_")
        if "." not in key or "=" in key:
            raise ConfigError(f"--over: {word} is not a key; write --over optim.lr 1e-3 2e-3")
        if not values:
            raise ConfigError(f"--over: {key} has no values; write --over {key} VALUE VALUE")
        if key in ("log.name", "log.dir"):
            raise ConfigError(f"{key}: a grid names the folders of its runs itself; leave it out of --over")
        if key in axes or key in settings:
            raise ConfigError(f"{key}: given twice; give all its values in one --over")
        axes[key] = tuple(values)
    return Grid(name=name, recipe=recipe, file=file, settings=settings, axes=axes)


def grid_cells(grid: Grid, resolve: Resolve) -> list[GridCell]:
    """Return all cells; the last key varies fastest.

    Raises ConfigError, naming the cell, for one that has no config, and if two cells are the same.
    """
    cells: list[GridCell] = []
    for texts in itertools.product(*grid.axes.values()):
        cell = make_cell(grid, dict(zip(grid.axes, texts)), resolve)
        if any(other.name == cell.name for other in cells):
            raise ConfigError(f"--over: two runs would be named {cell.name}; give each value once")
        cells.append(cell)
    return cells


def make_cell(grid: Grid, texts: dict[str, str], resolve: Resolve) -> GridCell:
    """Return the cell with these values, as they stand on the command line."""
    given = grid.settings | texts
    with cell_named(cell_name(texts)):
        cfg = resolve(grid.recipe, grid.file, setting_words(given))
    values = {key: canonical(cfg, key, text) for key, text in texts.items()}
    name = cell_name(values)
    if len(name) > MAX_NAME:
        raise ConfigError(f"--over: the folder of a run would have a name of {len(name)} characters, "
                          f"{name[:40]}...; at most {MAX_NAME}: vary fewer keys, or shorter values")
    log = dataclasses.replace(cfg.log, dir=str(Path(cfg.log.dir) / grid.name), name=name)
    words = setting_words(given | {"log.dir": log.dir, "log.name": name})
    source = [*([grid.recipe] if grid.recipe else []), *(["--config", grid.file] if grid.file else [])]
    return GridCell(name, values, [*source, *words], dataclasses.replace(cfg, log=log))


@contextlib.contextmanager
def cell_named(name: str) -> Iterator[None]:
    """Prefix a ConfigError with the name of the cell."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def cell_name(values: dict[str, str]) -> str:
    return "+".join(f"{key}={plain(value)}" for key, value in values.items())


def canonical(cfg: Config, key: str, text: str) -> str:
    """Return the text of a key's value in the config, or the given one for a part with keys of its own."""
    value = value_at(cfg, key)
    if dataclasses.is_dataclass(value) or isinstance(value, (tuple, list, dict)):
        return text
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def setting_words(settings: dict[str, str]) -> list[str]:
    """Return {key: text} as arguments of train.py."""
    return [word for key, text in settings.items() for word in (f"--{key}", text)]


# ---- the manifest ------------------------------------------------------------------------------------------


def keep_grid(grid: Grid, cells: list[GridCell]) -> None:
    """Write GRID_FILE and make the grid's folder. A later call may add values.

    Raises ConfigError if the folder holds another grid.
    """
    tree = {
        "recipe": grid.recipe,
        "config": grid.file,
        "settings": grid.settings,
        "keys": list(grid.axes),
        "cells": [{"name": cell.name, "values": cell.values} for cell in cells],
    }
    keep_manifest(
        cells[0].folder.parent / GRID_FILE,
        tree,
        what="grid",
        may_grow=("cells",),
        has_results=any(cell.folder.exists() for cell in cells),
        option="--log.name",
    )


def grid_runs(folder: Path) -> list[Path]:
    """Return the run folders of the grid in this folder, whether they exist or not. Raises ConfigError."""
    tree = read_manifest(folder / GRID_FILE, "grid")
    try:
        return [folder / cell["name"] for cell in tree["cells"]]
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{folder / GRID_FILE}: does not list the cells of a grid; run its command again "
                          "in another folder") from error
