"""The table of benchmarks/smoke.py: Markdown text, and a line for whoever watches."""

import time
from collections import Counter

from benchmarks.markdown import markdown_table

VERDICTS = {True: "ok", False: "FAILED", None: "not run"}


def cells_of(row: dict) -> dict[str, str]:
    cells = {"check": row["row"], "verdict": VERDICTS[row["ok"]]}
    task = row.get("task", "")
    if task and task not in row["row"]:
        cells["check"] = f"{task}: {row['row']}"
    figures = [row.get("result", "")]
    for key in ("tokens/s", "mfu", "loss"):
        if row.get(key) is not None:
            figures.append(f"{key} {row[key]:,.4g}" if key != "tokens/s" else f"{key} {row[key]:,.0f}")
    for key in ("note", "trace"):
        figures.append(row.get(key) or "")
    if "right" in row:
        figures.append(f"{len(row['right'])} dtypes" if len(row["right"]) > 1 else "")
    cells["result"] = "; ".join(filter(None, figures))
    cells["error"] = f"{row['error']:.1e}" if "error" in row else ""
    cells["bound"] = f"{row['bound']:.1e}" if "bound" in row else ""
    cells["why"] = row.get("problem") or ""
    cells["s"] = str(row.get("s", ""))
    return cells


def progress_line(row: dict) -> str:
    cells = cells_of(row)
    rest = [cells[key] for key in ("result", "error", "why") if cells[key]]
    return f"{row['phase']:12}{cells['verdict']:8}{cells['check']:44}  {'  '.join(rest)}"


def make_table(rows: list[dict], machine: dict[str, str], seconds: float) -> str:
    """The Markdown text: what failed first, then a table for each phase."""
    count = Counter(VERDICTS[row["ok"]] for row in rows)
    summary = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS.values())
    where = ", ".join(filter(None, (machine["card"], machine["driver"], f"torch {machine['torch']}")))
    date = time.strftime("%Y-%m-%d %H:%M")
    lines = [f"# Smoke run: {summary}", "", f"{date}, {where}, {seconds:.0f} s", ""]
    failed = [{"phase": row["phase"], **cells_of(row)} for row in rows if row["ok"] is False]
    lines += ["## What failed", "", *(markdown_table(failed) or ["nothing"]), ""]
    for phase in dict.fromkeys(row["phase"] for row in rows):
        cells = [cells_of(row) for row in rows if row["phase"] == phase]
        lines += [f"## {phase}", "", *markdown_table(cells), ""]
    return "\n".join(lines)
