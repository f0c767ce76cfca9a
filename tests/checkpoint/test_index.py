"""The index of a large checkpoint: read fast, and small in memory."""

import json
import time
import tracemalloc
from pathlib import Path

import pytest

from checkpoint.disk import folder, store

PIECES = 20_000


def large_index() -> bytes:
    rows = []
    for number in range(PIECES):
        key = f"layers.{number // 100}.attention.weight@adam_m"
        start = [4 * (number % 100), 0]
        row = {"key": key, "shape": [400, 64], "start": start, "size": [4, 64], "dtype": "F32",
               "file": f"rank_{number % 64:05d}_shard_00000.safetensors", "name": f"{key}[{start[0]}]",
               "sha256": f"{number:064x}"}
        rows.append(row)
    files = {row["file"]: {"bytes": 8, "header": "0" * 64} for row in rows}
    files["meta.json"] = {"bytes": 2, "sha256": "0" * 64}
    return folder.index_bytes(
        {"version": 1, "save_id": "0" * 32, "step": 1, "world": 64, "files": files, "pieces": rows}
    )


@pytest.mark.slow
def test_what_repeats_in_an_index_is_held_once():
    text = large_index()
    tracemalloc.start()
    parsed = folder.parse_index(Path("step_00000001"), text)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(parsed.pieces) == PIECES and len(parsed.by_key()) == PIECES // 100
    assert held / PIECES < 700 and peak / PIECES < 1000, (held / PIECES, peak / PIECES)


def test_an_index_is_parsed_in_a_few_passes_of_json():
    text = large_index()

    def seconds(work):
        begun = time.process_time()
        work()
        return time.process_time() - begun

    plain = min(seconds(lambda: json.loads(text)) for _ in range(3))
    parsed = min(seconds(lambda: folder.parse_index(Path("step_00000001"), text)) for _ in range(3))
    assert parsed < 8 * plain, (parsed, plain)


def test_rows_are_packed_into_few_bytes():
    rows = json.loads(large_index())["pieces"]
    packed = store.pack(rows)
    assert store.unpack(packed) == rows
    assert len(packed) / PIECES < 100
