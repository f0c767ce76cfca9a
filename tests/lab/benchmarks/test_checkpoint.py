"""scripts.bench checkpoint at a tiny size: every row is measured, and the table says what the seconds say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.benchmarks import checkpoint

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_row_is_measured_beside_its_baseline(tmp_path):
    words = ["checkpoint", "--parameters", "1e6", "--rounds", "1", "--threads", "1", "--json"]
    command = [sys.executable, "-m", "scripts.bench", *words, "--out", str(tmp_path / "out")]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert end.returncode == 0, end.stderr
    found = json.loads(end.stdout.splitlines()[-1])
    assert found["checkpoint"].startswith("0.01 GB of state, 1 threads")
    assert [row["what"] for row in found["rows"]] == [line.what for line in checkpoint.TIMINGS]
    for row in found["rows"]:
        assert float(row["ours / base"]) > 0 and float(row["faster than DCP"].split()[0]) > 0
    assert not (tmp_path / "out").exists()


def test_ratios_of_rates_and_of_seconds():
    names = {name for line in checkpoint.TIMINGS for name in (line.ours, line.dcp, line.base)}
    seconds = {name: 1.0 for name in names} | {"ours save": 2.0, "ours blocked": 3.0, "dcp load": 5.0}
    rows = {row["what"]: row for row in checkpoint.table_rows(seconds, 4_000_000_000)}
    assert rows["written in the step"]["ours / base"] == "0.50"
    assert rows["written in the step"]["ours"] == "2.00 GB/s"
    assert rows["blocked by a background save"]["ours / base"] == "3.00"
    assert rows["blocked by a background save"]["faster than DCP"] == "0.33 x"
    assert rows["loaded"]["faster than DCP"] == "5.00 x"
