"""The table of planted bugs: table.yaml, and what verify says of each.

A bug is silent: it crashes nothing and trains something else. Each is of a class of faults that published
codebases had, and comes with a run of scripts.verify in which it acts. A bug that verify does not see is a
hole in the proof.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from config import OPTIMIZERS, ConfigError
from lab.proof.mutate.change import PlacedChange, read_source
from lab.proof.mutate.checkout import ROOT
from lab.proof.mutate.control import (
    CommandResult,
    VerifyRun,
    has_verdict,
    last_output_line,
    run_verify,
    sandbox,
)
from lab.proof.mutate.judge import Kill, Verdict, make_verdict
from lab.proof.mutate.mutant import Mutant, make_mutant, plant

TABLE_FILE = Path(__file__).parent / "table.yaml"
LIMIT_S = 600.0

# Words of a layout in the table that stand for several.
SHORTHANDS = {
    "only-adamw": " ".join(f"no-{name}" for name in OPTIMIZERS if name != "adamw"),
    "only-plain-sums": "no-reduce-ring no-reduce-hierarchy no-reduce-server no-powersgd",
}

# Ranks that die of these ran a broken program, not one with a silent bug.
BROKEN_COPY = tuple(
    f"died: {name}"
    for name in (
        "AttributeError",
        "ImportError",
        "IndentationError",
        "NameError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
    )
)


OTHER_KEYS = ("fault", "run", "strict", "lanes", "settings")  # of an entry, beside its change


@dataclass(frozen=True)
class Bug:
    """A planted bug: its fault in words, with the issue in which it was seen, and where verify meets it."""

    fault: str
    change: PlacedChange
    run: VerifyRun


def read_table(path: Path = TABLE_FILE) -> list[Bug]:
    """Read the planted bugs. Raises ConfigError if an entry is incomplete or has an unknown key."""
    return [read_bug(entry) for entry in yaml.load(path.read_text(), Loader=yaml.BaseLoader)]


def read_bug(entry: dict) -> Bug:
    """Return the bug of an entry. table.yaml describes its keys."""
    for key in ("fault", "place", "run"):
        if key not in entry:
            raise ConfigError(f"{TABLE_FILE.name}: {entry} must have a {key}")
    recipe, world, *words = [*entry["run"].split(), "", ""]
    if not world.isdigit():
        raise ConfigError(f"{TABLE_FILE.name}: {entry['fault']}: run: a recipe, a number of ranks and words")
    run = VerifyRun(
        recipe=recipe,
        world=int(world),
        words=" ".join(SHORTHANDS.get(word, word) for word in words).strip(),
        num_layouts=2,
        is_strict=entry.get("strict") == "true",
        on_lanes=entry.get("lanes") == "true",
        overrides=tuple(entry.get("settings", "").split()),
    )
    change = PlacedChange.from_entry(entry, others=OTHER_KEYS)
    return Bug(entry["fault"], change, run)


def choose(bugs: Sequence[Bug], only: Sequence[str], world: int) -> list[Bug]:
    """Return the bugs whose text has all the words of `only` and that need at most `world` ranks."""
    chosen = []
    for bug in bugs:
        text = f"{bug.fault} {bug.change.file} {bug.run.words}"
        if bug.run.world <= world and all(word in text for word in only):
            chosen.append(bug)
    return chosen


def mutants(bugs: Sequence[Bug], root: Path = ROOT) -> list[Mutant]:
    """Return the bugs as mutants. Raises ConfigError if the place of one is not found."""
    parse = cache(read_source)
    planted = []
    for bug in bugs:
        try:
            source = parse(root, bug.change.file)
            edit = bug.change.edit(source)
        except ConfigError as error:
            raise ConfigError(f"{TABLE_FILE.name}: {bug.fault}: {error}") from None
        planted.append(make_mutant(bug.change.file, source, bug.fault, edit, bug.run))
    return planted


def judge_by_verify(mutant: Mutant, base: Path) -> Verdict:
    """Plant a bug in a copy of the checkout in `base`, and run scripts.verify where it acts."""
    started = time.perf_counter()
    with sandbox(base) as folder:
        plant(mutant, folder / "checkout")
        result = run_verify(folder, mutant.run, LIMIT_S)
    return make_verdict(mutant, read_result(result), started)


def read_result(result: CommandResult) -> Kill:
    """Return whether verify found a layout wrong.

    A crash or a hang of verify, an error exit and a copy that cannot run give no verdict.
    """
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    wrong = [line for line in lines if line.startswith("WRONG")]
    broken = [line for line in wrong if any(words in line for words in BROKEN_COPY)]
    crashed = result.code == 1 and not wrong
    reason = ""
    if result.code is None:
        reason = "did not end"
    elif crashed or not has_verdict(result):
        reason = last_output_line(result)
    elif broken:
        reason = f"the copy cannot run: {broken[0]}"
    if reason:
        return Kill("", f"no verdict of scripts.verify: {reason}", result.code is None)
    return Kill("verify", wrong[0], False) if wrong else Kill("", "", False)
