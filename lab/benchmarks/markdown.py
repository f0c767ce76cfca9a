"""Markdown tables."""

from collections.abc import Sequence


def markdown_table(rows: list[dict[str, str]]) -> list[str]:
    """The lines of a table with every column that a row has; none without rows."""
    if not rows:
        return []
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [markdown_line(columns), "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(markdown_line([row.get(column, "") for column in columns]))
    return lines


def markdown_line(cells: Sequence[str]) -> str:
    """Cells may hold any text: a bar would begin a new cell, a new line a new row."""
    return "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |"
