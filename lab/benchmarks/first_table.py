"""The table of `scripts.bench first`: Markdown, and progress lines."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from lab.benchmarks.card_table import step_cells
from lab.benchmarks.first_plan import SECTIONS
from lab.benchmarks.markdown import markdown_table
from lab.benchmarks.measured import compare, measured_rates

STATES = ("wrong", "no time", "absent", "ok")
MAX_GAPS = 5  # components shown for a scenario


def get_cells(row: Mapping) -> dict[str, str]:
    """Return the nonempty cells of a row of any kind, {column: text}."""
    cells = {"row": row["row"], "state": row["state"]}
    if "value" in row:
        cells["rate"] = f"{row['value']:.4g} {row['unit']}"
    if "result" in row:
        cells["result"] = str(row["result"])
    for key in ("error", "bound"):
        if isinstance(row.get(key), float):
            cells[key] = f"{row[key]:.1e}"
    if "shape" in row:
        cells["layers"] = str(row["shape"]["layers"])
        cells["planned GiB"] = f"{row['planned gib']:.1f}"
    if row.get("tokens/s"):
        cells |= step_cells(row)
    cells["why"] = "; ".join(filter(None, (row.get("problem"), row.get("note"))))
    return {column: cell for column, cell in cells.items() if cell}


def progress_line(row: Mapping) -> str:
    cells = get_cells(row)
    rest = [f"{column} {cell}" for column, cell in cells.items() if column not in ("row", "state")]
    return f"{row['section']:22}{row['state']:8} {row['row']:44} {'  '.join(rest)}"


def make_table(rows: list[dict], facts: Mapping[str, str], seconds: float) -> str:
    """Return the Markdown: wrong rows first, then modelled against measured, then a table per section."""
    count = Counter(row["state"] for row in rows)
    summary = ", ".join(f"{count[state]} {state}" for state in STATES)
    where = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
    date = time.strftime("%Y-%m-%d %H:%M")
    lines = [f"# First meeting: {summary}", "", f"{date}, {where}, {seconds:.0f} s", ""]

    wrong = [{"of": row["section"], **get_cells(row)} for row in rows if row["state"] == "wrong"]
    lines += ["## Wrong", "", *(markdown_table(wrong) or ["nothing"]), ""]
    late = [{"of": row["section"], "why": row["problem"]} for row in rows if row["state"] == "no time"]
    lines += ["## No time", "", *markdown_table(late), ""] if late else []
    lines += compared_lines(rows)
    kinds = {section.name: section.kind for section in SECTIONS}
    for kind in dict.fromkeys(kinds.values()):
        shown = [row for row in rows if row["state"] != "no time" and kind != "modelled"]
        of_kind = [row for row in shown if kinds.get(row["section"]) == kind]
        if of_kind:
            title = "steps" if kind == "step" else kind
            lines += [f"## {title[0].upper()}{title[1:]}", "", *markdown_table([*map(get_cells, of_kind)]),
                      ""]
    return "\n".join(lines)


def compared_lines(rows: Iterable[Mapping]) -> list[str]:
    """Return each scenario that was both modelled and measured, with its largest gaps."""
    rates = measured_rates(row for row in rows if row["section"] == "rates")
    modelled = {row["step"]: row for row in rows if row["section"] == "modelled" and row["state"] == "ok"}
    steps, gaps = [], []
    for row in rows:
        if row["row"] not in modelled or row["state"] != "ok" or "tokens/s" not in row:
            continue
        found = compare(modelled[row["row"]], row, rates)
        steps.append({
            "step": row["row"],
            "layers": str(row["shape"]["layers"]),
            "modelled ms": f"{found['modelled ms']:.1f}",
            "measured ms": f"{found['measured ms']:.1f}",
            "modelled MFU": percent(found["modelled MFU"]),
            "measured MFU": percent(found["measured MFU"]),
            "modelled speed / measured": f"{found['ratio']:.2f}",
        })  # fmt: skip
        for name, expected, measured in found["components"][:MAX_GAPS]:
            gaps.append({
                "step": row["row"],
                "component": name,
                "modelled ms": f"{expected:.1f}",
                "measured ms": f"{measured:.1f}",
                "gap ms": f"{measured - expected:+.1f}",
            })  # fmt: skip
    if not steps:
        return []
    text = "Rates as measured below; those that were not are the middle ones of lab/docs/step-model.md."
    if not any(step["modelled MFU"] != "n/a" for step in steps):
        text += " The peak of this machine is not known, or it is a CPU, where the model says nothing."
    lines = ["## Modelled beside measured", "", text, "", *markdown_table(steps), ""]
    return lines + ["The largest gaps first:", "", *markdown_table(gaps), ""] if gaps else lines


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


