"""The table of a race (lab/benchmarks/card.py): Markdown, and progress lines."""

import time
from collections.abc import Mapping

from lab.benchmarks.markdown import markdown_table


def step_cells(row: Mapping) -> dict[str, str]:
    """Return the cells of a measured step."""
    return {
        "tokens/s": f"{row['tokens/s']:,.0f}",
        "step ms": f"{row['ms']:.1f}",
        "spread": f"{row['spread']:.1%}",
        "TFLOP/s": f"{row['TFLOP/s']:.3g}",
        "MFU": "n/a" if row["MFU"] is None else f"{row['MFU']:.1%}",
        "peak GiB": "n/a" if row["gib"] is None else f"{row['gib']:.1f}",
        "loss": f"{row['loss']:.3f}",
        "first step s": f"{row['first s']:.0f}",
    }


def table_cells(row: dict, best: Mapping[str, float], dense: Mapping[str, float]) -> dict[str, str]:
    """Return a row of the table.

    best: {model: the TFLOP/s of ours in bf16}. dense: {contestant: its TFLOP/s of the dense model}.
    """
    cells = {"model": row["model"], "contestant": row["contestant"]}
    if row["problem"]:
        return cells | {"tokens/s": f"not run: {row['problem']}"}

    ratio = best.get(row["model"], 0.0) / row["TFLOP/s"]
    unpacked = dense.get(row["contestant"])
    is_packed = row["model"].startswith("packed")
    return cells | {
        "layers": str(row["shape"]["layers"]),
        **step_cells(row),
        "ours is": f"{ratio:.2f} x" if ratio else "",
        "of unpacked": f"{row['TFLOP/s'] / unpacked:.1%}" if is_packed and unpacked else "",
        "params": f"{row['parameters'] / 1e9:.2f}B",
    }


def progress_line(row: dict) -> str:
    """Return a row as one progress line."""
    parts = []
    for column, cell in table_cells(row, {}, {}).items():
        if column in ("model", "contestant"):
            parts.append(f"{cell:22}")
        elif cell:
            parts.append(f"{column} {cell}")
    return "  ".join(parts)


def make_table(rows: list[dict], machine: Mapping[str, str]) -> str:
    """Return the Markdown text: the date and the machine, a row for each result, the shapes."""
    lines = [title_line(rows, machine), ""]

    # the results, sorted by model in the order of the plan
    best: dict[str, float] = {}
    dense: dict[str, float] = {}
    for row in rows:
        if not row["ms"]:
            continue
        if row["contestant"] in ("ours", "ours+graphs"):
            best[row["model"]] = max(best.get(row["model"], 0.0), row["TFLOP/s"])
        if row["model"] == "dense":
            dense.setdefault(row["contestant"], row["TFLOP/s"])
    models = list(dict.fromkeys(row["model"] for row in rows))
    results = sorted(rows, key=lambda row: models.index(row["model"]))
    lines += markdown_table([table_cells(row, best, dense) for row in results])

    lines += noise_line(rows)

    # the shapes
    lines.append("")
    shapes = {row["model"]: row["shape"] for row in rows if row.get("shape")}
    for model, shape in shapes.items():
        sizes = ", ".join(f"{key} {value}" for key, value in shape.items() if value)
        lines.append(f"- {model}: {sizes}")
    lines.append("")
    return "\n".join(lines)


def noise_line(rows: list[dict]) -> list[str]:
    """Return how much repeated measurements of ours differ, nothing if there are none."""
    ours = [row for row in rows if (row["model"], row["contestant"]) == ("dense", "ours")]
    times = [row["ms"] for row in ours if row["ms"]]
    if len(times) < 2:
        return []
    spread = (max(times) - min(times)) / min(times)
    shown = ", ".join(f"{ms:.1f}" for ms in times)
    return ["", f"Noise: ours on the dense model took {shown} ms, {spread:.1%} apart."]


def title_line(rows: list[dict], machine: Mapping[str, str]) -> str:
    """Return the date, the machine and the versions of the packages."""
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.get("versions") or {}
    parts = [time.strftime("%Y-%m-%d"), machine["card"]]
    if machine["driver"]:
        parts.append(f"driver {machine['driver']}")
    parts += [f"{name} {version}" for name, version in versions.items()]
    return ", ".join(parts) + "."
