"""The final table of a mutation run, and the mutants that are known to be equivalent."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from config import ConfigError
from lab.proof.mutate.judge import Verdict

EXPLANATIONS_FILE = Path(__file__).parent / "equivalent.yaml"
STAGES = ("core", "slow", "verify")
TARGET_SHARE = 0.95  # killed, among the mutants that are not explained

Explanations = dict[tuple[str, str, str], str]  # (file, before, after) -> why no test can tell the difference


def read_explanations(path: Path = EXPLANATIONS_FILE) -> Explanations:
    """Read the explained mutants, with unindented lines.

    Raises ConfigError if an entry is incomplete.
    """
    explanations = {}
    for entry in yaml.safe_load(path.read_text()) or []:
        if set(entry) != {"file", "before", "after", "reason"} or not str(entry["reason"]).strip():
            raise ConfigError(f"{path.name}: {entry} must have file, before, after and a reason")
        before = without_indentation(entry["before"])
        after = without_indentation(entry["after"])
        explanations[entry["file"], before, after] = entry["reason"]
    return explanations


def without_indentation(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def make_report(verdicts: Sequence[Verdict], explanations: Explanations) -> tuple[list[str], bool]:
    """Return the lines to print, and whether the killed share reaches TARGET_SHARE."""

    def is_explained(verdict: Verdict) -> bool:
        before = without_indentation(verdict.before)
        after = without_indentation(verdict.after)
        return (verdict.file, before, after) in explanations

    killed = [verdict for verdict in verdicts if verdict.stage]
    alive = [verdict for verdict in verdicts if not verdict.stage]
    explained = [verdict for verdict in alive if is_explained(verdict)]
    survived = [verdict for verdict in alive if not is_explained(verdict)]

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
