"""A mutant: one edit of one file, drawn at random or planted from the table."""

from dataclasses import dataclass
from pathlib import Path

from lab.proof.mutate.control import VerifyRun
from lab.proof.mutate.operators import OPERATORS
from lab.proof.mutate.source import Edit, Source

Key = tuple[str | int, ...]


def mutant_key(file: str, line: int, operator: str, before: str, after: str) -> Key:
    """Identify a mutant among all: a drawn one by its lines, a planted one by its fault."""
    return (file, line, before, after) if operator in OPERATORS else (operator,)


@dataclass(frozen=True)
class Mutant:
    """One edit of one file. before, after: the lines that differ, starting at `line`.

    operator: the operator that drew it, or the fault that the table plants.
    run: a run of verify in which a planted bug acts.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    edit: Edit
    run: VerifyRun | None = None

    @property
    def key(self) -> Key:
        return mutant_key(self.file, self.line, self.operator, self.before, self.after)

    def difference(self) -> str:
        """Return the mutant as a title and a diff."""
        removed = "".join(f"\n- {line}" for line in self.before.splitlines())
        added = "".join(f"\n+ {line}" for line in self.after.splitlines())
        return f"{self.file}:{self.line} ({self.operator}){removed}{added}"


def make_mutant(
    file: str, source: Source, operator: str, edit: Edit, run: VerifyRun | None = None
) -> Mutant:
    """Return the mutant of an edit, with the lines that it changes."""
    first = source.line_number(edit.start)
    last = source.line_number(max(edit.start, edit.end - 1))
    old_lines = source.text.splitlines()
    new_lines = edit.apply_to(source.text).splitlines()
    num_lines_after = len(old_lines) - last
    before = old_lines[first - 1 : last]
    after = new_lines[first - 1 : len(new_lines) - num_lines_after]
    return Mutant(
        file=file,
        line=first,
        operator=operator,
        before="\n".join(before),
        after="\n".join(after),
        edit=edit,
        run=run,
    )


def plant(mutant: Mutant, checkout: Path) -> None:
    """Write a mutant into a copy of the checkout."""
    planted = checkout / mutant.file
    text = planted.read_text()
    planted.unlink()
    planted.write_text(mutant.edit.apply_to(text))
