"""Fit tables and text into the width of the terminal.

Output to a file or a pipe has full width, like ps and systemctl; COLUMNS in the environment sets the width
there and in a terminal.
"""
import argparse
import itertools
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Collection, Mapping, Sequence

GAP = 2  # between two table columns
NARROW_GAP = 1  # if the table does not fit otherwise
COLOR = re.compile(r"\033\[\d+m")
ITEM = "- "  # begins a list item in a description
SEPARATOR = re.compile(r"( · | {2,})")  # between parts of a line


def output_width() -> int | None:
    """Return COLUMNS from the environment, else the width of the terminal on stdout, or None if it is not
    a terminal."""
    return shutil.get_terminal_size((0, 0)).columns or None


def display_width(text: str) -> int:
    """Return the number of terminal columns of a text: East Asian letters take two, combining marks and
    colours none."""
    text = COLOR.sub("", text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    marks = sum(unicodedata.combining(char) > 0 for char in text)
    return len(text) + wide - marks


def visible(text: str, width: int) -> str:
    """Return the text in one line of at most `width` columns, with control characters escaped (\\n)."""
    escaped = [char if char.isprintable() else repr(char)[1:-1] for char in text]
    line = "".join(escaped)
    if display_width(line) <= width:
        return line
    line = line[:max(0, width - 1)]
    while display_width(line) > max(0, width - 1):  # wide characters
        line = line[:-1]
    return line + "…"


def fitting_columns(
    widths: Mapping[str, int], first_to_go: Sequence[str], width: int | None, gap: int = 0
) -> list[str]:
    """Return the names of the columns that fit into `width` together, in order.

    `widths` maps columns to widths, `gap` separates two of them. Columns are dropped in the order of
    `first_to_go`; others always stay.
    """
    kept = dict(widths)
    for name in first_to_go:
        if width is None or sum(kept.values()) + gap * (len(kept) - 1) <= width:
            break
        kept.pop(name, None)
    return list(kept)


def table_lines(
    rows: Sequence[Mapping[str, str]],
    *,
    to_left: Collection[str] = (),
    first_to_go: Sequence[str] = (),
    width: int | None = None,
    whole_in: str | None = None,
) -> list[str]:
    """Format rows {column: text} as lines of aligned columns under their names.

    `to_left` lists left-aligned columns. If the table is wider than `width`, columns move closer together (if
    their names are single words), then those in `first_to_go` are dropped one by one. If `whole_in` is given,
    a last line names the dropped columns and says that `whole_in` has all of them.
    """
    cells = {name: [name, *(row[name] for row in rows)] for name in rows[0]}
    widths = {name: max(map(len, column)) for name, column in cells.items()}
    whole = sum(widths.values()) + GAP * (len(widths) - 1)
    can_be_closer = not any(" " in name for name in widths)
    is_too_wide = width is not None and whole > width
    gap = NARROW_GAP if is_too_wide and can_be_closer else GAP

    aligned: list[list[str]] = []
    shown = fitting_columns(widths, first_to_go, width, gap)
    for name in shown:
        pad = str.ljust if name in to_left else str.rjust
        aligned.append([pad(cell, widths[name]) for cell in cells[name]])
    lines = [(" " * gap).join(line).rstrip() for line in zip(*aligned)]
    missing = [name for name in first_to_go if name in widths and name not in shown]
    if missing and whole_in is not None:
        lines += wrapped(f"too narrow for: {', '.join(missing)} ({whole_in} has all)", width)
    return lines


def wrapped(text: str, width: int | None, indent: int = 0) -> list[str]:
    """Wrap the text into lines of at most `width` columns.

    Breaks between parts first (" · ", or several blanks), then between words; a longer word gets its own
    line. `indent` columns are reserved on every line, including the first.
    """
    if width is None:
        return [text]
    room = max(1, width - indent)
    parts = SEPARATOR.split(text)

    # as many parts per line as fit
    lines = [parts[0]]
    for separator, part in zip(parts[1::2], parts[2::2]):
        longer = lines[-1] + separator + part
        if display_width(longer) <= room:
            lines[-1] = longer
        else:
            lines.append(part)

    # break parts that are too long into words
    broken: list[str] = []
    for line in lines:
        broken += textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [line]
    return broken


def hanging_lines(start: str, text: str, width: int | None) -> list[str]:
    """Return `start` followed by the text, wrapped to `width` with a hanging indent."""
    indent = display_width(start)
    first, *others = wrapped(text, width, indent)
    return [start + first, *(" " * indent + line for line in others)]


class ParagraphHelp(argparse.HelpFormatter):
    """Help formatter: fills paragraphs and "- " items to the terminal's width, keeps other indented lines,
    and shows the defaults of options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_prose, group in itertools.groupby(text.splitlines(), is_prose_line):
            block = list(group)
            lines += filled(block, width) if is_prose else block
        return "\n".join(indent + line for line in lines)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_told = action.help is None or "default" in action.help
        takes_value = bool(action.option_strings) and action.nargs != 0
        if is_told or not takes_value or action.default in (None, [], argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: %(default)s)"


def is_prose_line(line: str) -> bool:
    """Return whether a line of a description belongs to a paragraph, or to an item, which continues under
    its words."""
    indent = len(line) - len(line.lstrip())
    return line.strip() != "" and indent in (0, len(ITEM))


def filled(lines: Sequence[str], width: int) -> list[str]:
    """Wrap paragraphs and items without blank lines between them to `width` columns."""
    blocks: list[list[str]] = []
    for line in lines:
        is_continuation = bool(blocks) and line.startswith(" ") == blocks[-1][0].startswith(ITEM)
        if is_continuation and not line.startswith(ITEM):
            blocks[-1].append(line.strip())
        else:
            blocks.append([line])
    results: list[str] = []
    for block in blocks:
        hanging = " " * len(ITEM) if block[0].startswith(ITEM) else ""
        text = " ".join(block)
        results += textwrap.wrap(text, width, subsequent_indent=hanging, break_on_hyphens=False)
    return results
