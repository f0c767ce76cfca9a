"""scripts.bench watching: a real run of two ranks, and the table of hand-made reports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config import ConfigError
from lab.benchmarks.corpus import write_corpus
from lab.benchmarks.watching import OFTEN, REPORT, RUN, WATCHES, RankCosts, make_rows

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_real_run_has_every_watch():
    command = [sys.executable, "-m", "scripts.bench", "watching", "--steps", str(2 * OFTEN), "--batch", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("|")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("|")}
    for watch in WATCHES.values():
        assert watch.what in rows
    assert "thread `peers`" in rows and "thread `pauses`" in rows
    assert re.search(r"2 ranks, a step of [\d,]+ ms: all watches of a step take \d+\.\d+% of it", done.stdout)


@pytest.mark.slow
def test_a_mac_has_the_watches_without_the_threads(tmp_path):
    """macOS has no CPU clock of another thread: the ranks run, and report their calls."""
    data = write_corpus(tmp_path, documents=500)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "tests/other_system.py", "macos", "lab.benchmarks.watching", "llama3-tiny", *RUN,
        "--train.steps", "10", "--train.global_batch", "8", "--data.path", data,
        "--log.dir", str(tmp_path), "--log.name", "run",
    ]
    environment = {**os.environ, REPORT: str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    files = [tmp_path / f"rank-{rank}.json" for rank in range(2)]
    reports = [RankCosts(**json.loads(file.read_text())) for file in files]
    assert [report.threads for report in reports] == [{}, {}]
    rows, _ = make_rows(reports)  # it raises if no rank has called a watch
    assert [row["watch"] for row in rows] == [watch.what for watch in WATCHES.values()]


def report(seconds, steps=20, threads=None):
    """A rank whose watches take these seconds in each call, and whose steps take one second."""
    calls = {name: [seconds] * (steps if watch.every in (1, 10) else 2) for name, watch in WATCHES.items()}
    return RankCosts(calls, threads or {}, [1.0] * steps, seconds=10.0)


@pytest.mark.slow
def test_the_slowest_rank_counts_at_the_usual_intervals():
    rows, share = make_rows([report(0.01), report(0.02, threads={"peers": 0.05})])
    shares = {row["watch"]: row.get("share of a step") for row in rows}
    assert shares["what replicas share is compared"] == "0.020%"  # 20 ms in 100 steps of 1 s
    assert shares["the times of ranks are compared"] == "1.000%"  # of a window of 10 steps: 5 calls of 20 ms
    assert shares["ranks agree to continue"] == "2.000%"
    assert shares["the disk is probed"] is None  # before the first step
    assert shares["thread `peers`"] == "0.500%"  # 50 ms of CPU in 10 s
    assert share == pytest.approx(0.0002 + 0.01 + 0.02 + 0.02 + 0.005)


@pytest.mark.slow
def test_a_watch_that_nobody_has_called_is_named():
    silent = report(0.01)
    silent.calls["agree_to_stop"] = []
    with pytest.raises(ConfigError, match="no rank called agree_to_stop"):
        make_rows([silent])
