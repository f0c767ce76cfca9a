"""The final table of a mutation run, and the mutants that are known to be equivalent."""

import ast
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from config import ConfigError
from lab.proof.mutate.change import PlacedChange, read_source
from lab.proof.mutate.judge import Verdict
from lab.proof.mutate.mutant import Key

EXPLANATIONS_FILE = Path(__file__).parent / "equivalent.yaml"
STAGES = ("core", "slow", "verify")
TARGET_SHARE = 0.95  # killed, among the mutants that are not explained


@dataclass(frozen=True)
class Explanation:
    """A change that no test can tell from the original, and why."""

    change: PlacedChange
    reason: str


def read_explanations(path: Path = EXPLANATIONS_FILE) -> list[Explanation]:
    """Read the explained mutants. Raises ConfigError if an entry is incomplete."""
    explanations = []
    for entry in yaml.load(path.read_text(), Loader=yaml.BaseLoader):
        if not entry.get("reason", "").strip() or "place" not in entry:
            raise ConfigError(f"{path.name}: {entry} must have a place, a change and a reason")
        explanations.append(Explanation(PlacedChange.from_entry(entry, others=("reason",)), entry["reason"]))
    return explanations


def explained_mutants(
    verdicts: Sequence[Verdict], explanations: Sequence[Explanation], root: Path
) -> set[Key]:
    """Return the keys of the survivors that are explained: they have the syntax tree of an explanation.

    Raises ConfigError if the place of an explanation in the file of a survivor is not found.
    """
    alive = [verdict for verdict in verdicts if not verdict.stage]
    explained = set()
    for file in sorted({verdict.file for verdict in alive}):
        changes = [explanation.change for explanation in explanations if explanation.change.file == file]
        if not changes:
            continue
        source = read_source(root, file)
        known = {ast.dump(ast.parse(change.edit(source).apply_to(source.text))) for change in changes}
        for verdict in alive:
            if verdict.file == file and not known.isdisjoint(mutated_trees(verdict, source.text)):
                explained.add(verdict.key)
    return explained


def mutated_trees(verdict: Verdict, text: str) -> Iterator[str]:
    """Yield the syntax trees that the mutant has wherever its lines stand in the text today."""
    lines = text.splitlines()
    before = verdict.before.splitlines()
    for start in range(len(lines)):
        end = start + len(before)
        if lines[start:end] == before:
            mutated = "\n".join([*lines[:start], *verdict.after.splitlines(), *lines[end:]])
            yield ast.dump(ast.parse(mutated))


def make_table_report(verdicts: Sequence[Verdict]) -> tuple[list[str], bool]:
    """Return the lines to print about planted bugs that verify met, and whether all are caught."""
    missed = [verdict for verdict in verdicts if not verdict.stage]
    lines = [f"MISSED {verdict.operator}: {verdict.by or 'verify saw nothing'}" for verdict in missed]
    seconds = sum(verdict.seconds for verdict in verdicts)
    num_caught = len(verdicts) - len(missed)
    lines.append(f"{num_caught} of {len(verdicts)} planted bugs caught ({seconds:.0f} s)")
    return lines, not missed


def make_report(verdicts: Sequence[Verdict], explained_keys: Container[Key]) -> tuple[list[str], bool]:
    """Return the lines to print, and whether the killed share reaches TARGET_SHARE."""
    killed = [verdict for verdict in verdicts if verdict.stage]
    alive = [verdict for verdict in verdicts if not verdict.stage]
    explained = [verdict for verdict in alive if verdict.key in explained_keys]
    survived = [verdict for verdict in alive if verdict.key not in explained_keys]

    lines = []
    for verdict in survived:
        lines += survivor_lines(verdict)

    columns = {
        "drawn": list(verdicts),
        "explained": explained,
        **{stage: [verdict for verdict in killed if verdict.stage == stage] for stage in STAGES},
        "hung": [verdict for verdict in killed if verdict.hung],
        "survived": survived,
    }
    lines += operator_table(columns)

    num_by_core = len(columns["core"])
    num_by_tests = num_by_core + len(columns["slow"])
    core_share = num_by_core / max(num_by_tests, 1)
    lines.append(
        f"the core kills {num_by_core} of the {num_by_tests} that a test kills ({100 * core_share:.1f} %)"
    )
    num_judged = len(killed) + len(survived)
    share = len(killed) / max(num_judged, 1)
    lines.append(
        f"{len(killed)} of {num_judged} mutants killed ({100 * share:.1f} %, wanted "
        f"{100 * TARGET_SHARE:.0f} %); {len(explained)} more are explained in {EXPLANATIONS_FILE.name}"
    )
    return lines, share >= TARGET_SHARE


def survivor_lines(verdict: Verdict) -> list[str]:
    """Return the lines that show a surviving mutant."""
    place = f"{verdict.file}:{verdict.line}"
    lines = [f"SURVIVED {place} ({verdict.operator}, {verdict.ran} tests run the line)"]
    if verdict.by:
        lines.append(f"  {verdict.by}")
    lines += [f"  - {line}" for line in verdict.before.splitlines()]
    lines += [f"  + {line}" for line in verdict.after.splitlines()]
    return [*lines, ""]


def operator_table(columns: dict[str, list[Verdict]]) -> list[str]:
    """Return the lines of a table that counts the verdicts of each operator in every column."""
    widths = {name: len(name) + 1 for name in columns}
    cells = [f"{name:>{widths[name]}}" for name in columns]
    lines = [f"{'':<20} {' '.join(cells)}"]

    operators = sorted({verdict.operator for verdict in columns["drawn"]})
    counts = {name: Counter(verdict.operator for verdict in column) for name, column in columns.items()}
    for operator in operators:
        cells = [f"{counts[name][operator]:>{widths[name]}}" for name in columns]
        lines.append(f"{operator:<20} {' '.join(cells)}")

    cells = [f"{len(column):>{widths[name]}}" for name, column in columns.items()]
    lines.append(f"{'all':<20} {' '.join(cells)}")
    return lines
