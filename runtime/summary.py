"""Write summary.json from metrics.jsonl whenever a run ends: one object per run, for tables of many runs."""
import json
import os
import statistics
from pathlib import Path
from typing import Any

from runtime.lines import ALL_STEPS, Rows, read_metrics

SUMMARY_FILE = "summary.json"
MS_OF_MINUTE = 60_000


def write_summary(folder: Path, **facts: object) -> None:
    """Write folder/summary.json atomically. Raises OSError."""
    path = folder / SUMMARY_FILE
    temp = path.with_name(f"{SUMMARY_FILE}.tmp")
    temp.write_text(json.dumps(facts, indent=1) + "\n")
    os.replace(temp, path)


def summarize_metrics(folder: Path) -> dict[str, Any]:
    """Summarize the metrics.jsonl of a run.

    Medians are over steps, without the first step of each process, which compiles and connects. A value is
    None if no row has one.
    """
    steps, validations = read_metrics(folder, max_steps=ALL_STEPS)
    last = steps[-1] if steps else {}
    trained = [row for row in steps if row.get("targets") != 0]  # older runs lack the field
    measured = [row for row in validations if row["val_loss"] is not None]
    return {
        "step": last.get("step", 0),
        "tokens": last.get("tokens", 0),
        "train_loss": trained[-1].get("loss") if trained else None,
        "validation": measured[-1] if measured else None,
        "best_validation": best_validation(validations),
        "tokens_per_s": median(steps, "tokens_per_s"),
        "mfu": median(steps, "mfu"),
        "peak_memory_gib": max((row["mem_gib"] for row in steps if row.get("mem_gib")), default=None),
        "skipped_steps": sum(bool(row.get("skipped")) for row in steps),
        "steps_without_targets": len(steps) - len(trained),  # among the skipped steps
        "minutes_in_steps": sum(row.get("step_ms") or 0 for row in steps) / MS_OF_MINUTE,
    }


def best_validation(validations: Rows) -> dict[str, Any] | None:
    """Return the validation with the lowest loss, excluding step 0, which has no checkpoint."""
    measured = [row for row in validations if row["step"] > 0 and row["val_loss"] is not None]
    return min(measured, key=lambda row: row["val_loss"], default=None)


def median(rows: Rows, name: str) -> float | None:
    values = [row[name] for row in rows[1:] or rows if row.get(name) is not None]
    return statistics.median(values) if values else None
