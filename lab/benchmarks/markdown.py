"""Markdown tables."""

from collections.abc import Sequence


def markdown_table(rows: list[dict[str, str]]) -> list[str]:
    """Return the lines of a table with the columns of all rows, [] without rows."""
    if not rows:
        return []
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [markdown_line(columns), "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(markdown_line([row.get(column, "") for column in columns]))
    return lines


def markdown_line(cells: Sequence[str]) -> str:
    """Return a table row. Bars and line breaks in cells are escaped."""
    return "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |"
