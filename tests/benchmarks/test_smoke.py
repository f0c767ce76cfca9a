"""The smoke run of a GPU, rehearsed on a CPU from a folder that holds only what travels; and that a wrong
kernel, a crash and a hang are rows of its table.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import smoke, smoke_exchanges, smoke_models, smoke_phases, travel
from benchmarks.process import Task
from benchmarks.smoke_table import make_table
from kernels import triton_
from parallel.wire.comm import Group

ROOT = Path(__file__).parents[2]
PEERS_MIB = 48  # of wheels and the extension, as docs/benchmarks.md lists them
QUICK = "models/dense,models/graphs,exchanges"
MACHINE = {"card": "a card", "driver": "580", "torch": "2.11"}

needs_interpreter = pytest.mark.skipif(
    not triton_.TRITON_AVAILABLE or torch.cuda.is_available(),
    reason="no Triton for this platform, or a GPU, where the run itself is the test",
)


@pytest.fixture(scope="module")
def travelled(tmp_path_factory):
    """A folder with what travels to a GPU: tracked files, and the ignored folder of peers."""
    folder = tmp_path_factory.mktemp("travelled")
    for source in travel.tracked_files():
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    (folder / "peers" / "wheels").mkdir(parents=True)
    (folder / "peers" / "wheels" / "a.whl").write_bytes(b"x" * 2**20)
    return folder


def bench(folder, *argv, timeout=600):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.bench", *map(str, argv)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)


def rows_in(out):
    return [json.loads(line) for line in (out / "smoke.jsonl").read_text().splitlines()]


# ---- the rehearsal -----------------------------------------------------------------------------------------


@needs_interpreter
def test_rehearsal(travelled, tmp_path, request):
    """With --all: every family, model, contestant and phase, in ten minutes."""
    is_whole = request.config.getoption("all")
    what = ["--minutes", "20"] if is_whole else ["--minutes", "4", "--only", QUICK]
    end = bench(
        travelled, "smoke", "--device", "cpu", "--tiny", "--out", tmp_path, *what, timeout=1300
    )
    rows = rows_in(tmp_path)
    failed = [row for row in rows if row["ok"] is False]
    assert not failed and end.returncode == 0, (failed, end.stderr[-2000:])

    done = Counter(row["phase"] for row in rows if row["ok"])
    expected = set(smoke.BOXES) if is_whole else {"models", "exchanges"}
    assert set(done) == expected and done["exchanges"] >= 20
    assert {row["row"]: row["ok"] for row in rows if row["phase"] == "models"}["graphs"] is None

    assert end.stdout.startswith("travels: ") and "1.0 MiB of peers/; fits" in end.stdout.splitlines()[0]
    table = (tmp_path / "smoke.md").read_text()
    assert table in end.stdout and "## What failed\n\nnothing" in table and "| dense | ok | " in table
    if is_whole:
        assert len(list(tmp_path.glob("deterministic-*.trace-rank0.json.gz"))) == 2
        assert all(row["tokens/s"] > 0 for row in rows if row["phase"] == "train")


def test_the_race_from_what_travels(travelled, tmp_path):
    out, table = tmp_path / "step.jsonl", tmp_path / "step.md"
    argv = ["step", "--device", "cpu", "--tiny", "--only", "packed,packed-uneven", "--minutes", "2"]
    end = bench(travelled, *argv, "--peers", "ours", "--warm-up", "30", "--out", out, "--table", table)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert end.returncode == 0 and [row["model"] for row in rows] == ["packed", "packed-uneven"], end.stderr
    assert all(row["problem"] is None and row["shape"]["documents"] for row in rows)
    assert "| packed | ours | 3 |" in table.read_text() and "not there: torchtitan" in end.stdout


def test_what_travels_is_small_enough():
    tracked, _ = travel.travel_bytes()
    assert tracked + PEERS_MIB * 2**20 < travel.MOST_BYTES
    assert ROOT / "train.py" in travel.tracked_files()


def test_the_size_of_what_travels_is_said(tmp_path):
    (tmp_path / "peers").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "large.pt").write_bytes(b"1" * 2**20)
    (tmp_path / "x.py").write_bytes(b"1" * 2**20)
    assert travel.travel_line(tmp_path) == "travels: 1.0 MiB of files and 0.0 MiB of peers/; fits 64 MiB"
    with (tmp_path / "peers" / "large.whl").open("wb") as file:
        file.truncate(64 * 2**20)
    assert "DOES NOT FIT" in travel.travel_line(tmp_path)


def test_the_peers_that_are_there_are_named(tmp_path):
    info = tmp_path / "torchtitan-0.2.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n")
    line = travel.describe_peers(str(tmp_path))
    assert line.startswith("peers: torchtitan 0.2.2; not there: ") and "docs/benchmarks.md" in line


# ---- wrong models ------------------------------------------------------------------------------------------


@needs_interpreter
def test_a_model_with_a_wrong_kernel_is_a_failing_row(tmp_path):
    """The whole of train.py with a backward of SwiGLU that is 10 % too large."""
    plant = (
        "from benchmarks.interpreted import interpret_kernels; interpret_kernels(); "
        "from kernels import swiglu; right = swiglu.launch_swiglu_backward; "
        "swiglu.launch_swiglu_backward = lambda *args: right(*args) * 1.1; "
        "from benchmarks import smoke_models; "
        f"smoke_models.main(['dense', '--device', 'cpu', '--tiny', '--folder', {str(tmp_path)!r}])"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    end = subprocess.run(
        [sys.executable, "-c", plant], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    [row] = [json.loads(line) for line in end.stdout.splitlines() if line.startswith('{"row"')]
    assert row["ok"] is False and row["error"] > row["bound"], row


def test_models_are_compared_by_what_the_dtype_does():
    ones = torch.ones(10)

    def steps(loss, norms, gradient=1.0):
        gradients = {"gradient of x": gradient * ones}
        return smoke_models.TrainedSteps({"loss": loss, "grad_norm": norms}, gradients)

    reference = steps([2.0, 1.9], [1.0, 1.0])
    wide = steps([2.0, 1.9], [1.0, 1.01], 1.02)  # bf16 moves the norm by 1 %, the gradient by 2 %

    def row(*values):
        return smoke_models.compare(steps(*values), reference, wide)

    assert row([2.0, 1.9], [1.075, 1.0])["ok"] and not row([2.0, 1.9], [1.085, 1.0])["ok"]
    assert row([2.007, 1.9], [1.0, 1.0])["ok"] and not row([2.009, 1.9], [1.0, 1.0])["ok"]  # u is 2^-8
    assert row([2.0, 1.9], [1.0, 1.0], 1.07)["ok"]
    wrong = row([2.0, 1.9], [1.0, 1.0], 1.09)
    assert wrong["ok"] is False and wrong["result"] == "gradient of x"
    assert wrong["bound"] == pytest.approx(0.08)
    for value in (float("nan"), float("inf")):
        assert not row([2.0, value], [1.0, 1.0])["ok"] and not row([2.0, 1.9], [1.0, 1.0], value)["ok"]
    same = row([2.0, 1.9], [1.0, 1.0])
    assert same["ok"] is False and "did not run" in same["problem"]


# ---- crashes, hangs, time ----------------------------------------------------------------------------------

STARTED = "import json, os, time; say = lambda **m: print(json.dumps(m), flush=True); say(checking='a'); "


@pytest.mark.parametrize(
    "code, rows",
    [
        (
            "say(row='a', ok=True); say(checking='b'); os.abort()",
            [("a", True, None), ("b", False, "crashed (SIGABRT): ")],
        ),
        (
            "say(row='a', ok=True); say(checking='b'); time.sleep(600)",
            [("a", True, None), ("b", False, "hung: ")],
        ),
        ("raise ValueError('no')", [("a", False, "exit code 1: ValueError: no")]),
        ("say(row='a', ok=True); say(complete=True)", [("a", True, None)]),
        ("say(row='a', ok=True)", [("a", True, None), ("what follows a", False, "ended before")]),
    ],
)
def test_a_crash_and_a_hang_are_rows(code, rows):
    task = Task("family", [sys.executable, "-c", STARTED + code], os.environ, limit_s=2.0)
    found = list(smoke_phases.rows_of_tasks([task], most=1, seconds_left=lambda: 60.0))
    assert [(row["row"], row["ok"]) for row in found] == [row[:2] for row in rows]
    for row, (_, _, problem) in zip(found, rows):
        assert row.get("problem") == problem or row["problem"].startswith(problem)
    text = make_table([{"phase": "kernels", **row} for row in found], MACHINE, 1.0)
    assert text.count("FAILED |") == 2 * sum(row[1] is False for row in rows)  # in its phase, and above all


def test_tasks_that_find_no_time_are_rows():
    end = time.monotonic() + 1
    command = [sys.executable, "-c", STARTED + "time.sleep(60)"]
    tasks = [Task(name, command, os.environ, 60.0) for name in "ab"]
    rows = list(smoke_phases.rows_of_tasks(tasks, most=1, seconds_left=lambda: end - time.monotonic()))
    assert [(row["task"], row["ok"]) for row in rows] == [("a", False), ("b", None)]
    assert rows[1]["problem"] == "no time left" and time.monotonic() < end + 5


def test_boxes_sum_to_the_minutes_and_time_is_passed_on(monkeypatch, tmp_path):
    """And a phase that fails does not end the run."""
    seen = {}

    def phase(name, error=False):
        def run(_, seconds_left):
            seen[name] = seconds_left()
            if error:
                raise OSError("full")
            yield {"row": name, "ok": True}

        return run

    monkeypatch.setattr(smoke, "BOXES", {"a": 10, "b": 30, "c": 60})
    monkeypatch.setattr(smoke, "PHASES", {"a": phase("a"), "b": phase("b", error=True), "c": phase("c")})

    def run_of(*only):
        run = smoke.SmokeRun("cpu", True, only, "", tmp_path, tmp_path, jobs=1, num_gpus=0)
        return [(row["phase"], row["ok"]) for row in smoke.run_phases(run, 200.0, time.monotonic())]

    assert run_of() == [("a", True), ("b", False), ("c", True)]
    assert [seen[name] for name in "abc"] == pytest.approx([20, 80, 200], abs=1)  # all that is left over
    assert run_of("b/x", "c") == [("b", False), ("c", True)]
    assert [seen[name] for name in "bc"] == pytest.approx([200 / 3, 200], abs=1)


@needs_interpreter
def test_a_run_that_is_killed_leaves_its_table(tmp_path):
    argv = ["smoke", "--device", "cpu", "--tiny", "--only", "models", "--out", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.Popen(
        [sys.executable, "-m", "scripts.bench", *argv], cwd=ROOT, env=env, stdout=subprocess.DEVNULL
    )
    try:
        for _ in range(900):
            if (tmp_path / "smoke.jsonl").exists() and len(rows_in(tmp_path)) >= 1:
                break
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 143
    finally:
        run.kill()
    text = (tmp_path / "smoke.md").read_text()
    assert " ok" in text.splitlines()[0] and " | ok | " in text


def test_an_unknown_phase_is_one_line(tmp_path):
    end = bench(ROOT, "smoke", "--device", "cpu", "--tiny", "--only", "kernel", "--out", tmp_path)
    assert end.returncode == 2 and end.stderr.startswith("error: --only kernel: no such phase; of imports, ")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
@pytest.mark.parametrize("command", ["smoke", "step"])
def test_no_gpu_is_one_line(tmp_path, command):
    end = bench(ROOT, command, "--device", "cuda", "--out", tmp_path / "out")
    assert end.returncode == 2
    assert "error: --device cuda: nvidia-smi finds no GPU here; a rehearsal is --device cpu" in end.stderr


# ---- exchanges and tests -----------------------------------------------------------------------------------


def test_a_wrong_exchange_is_a_failing_row(monkeypatch, capsys):
    def right(place, dtype):
        place.group.ledger["job", "x", "calls"] += 1
        return torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype)

    def wrong(place, dtype):
        got, expected = right(place, dtype)
        return (got + 1 if dtype == torch.bfloat16 else got), expected

    def left_out(place, dtype):
        return torch.ones(2), torch.ones(2)

    dtypes = (torch.float32, torch.bfloat16)
    checks = {"right": right, "wrong": wrong, "left out": left_out}
    table = {name: (check, dtypes) for name, check in checks.items()}
    monkeypatch.setattr(smoke_exchanges, "CHECKS", table)
    group = Group("job", (0,), 0, ledger=Counter())
    smoke_exchanges.run_checks(smoke_exchanges.Place(group, torch.device("cpu")))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"row"' in line]
    assert [row["ok"] for row in rows] == [True, False, False]
    assert rows[1]["right"] == ["float32"] and rows[1]["problem"] == "bfloat16: wrong"
    assert rows[2]["problem"].startswith("float32: AssertionError: nothing was exchanged")


XDIST = """
[gw0] [ 10%] PASSED tests/kernels/test_a.py::test_x[1-2]
[gw1] [ 20%] FAILED tests/kernels/test_a.py::test_y[cpu, bf16]
[gw1] [ 30%] SKIPPED tests/kernels/test_a.py::test_z
FAILED tests/kernels/test_a.py::test_y[cpu, bf16] - AssertionError: 3 is not 4
"""
PLAIN = """
tests/kernels/test_a.py::test_x[1-2] PASSED                             [ 10%]
tests/kernels/test_a.py::test_y[cpu, bf16] FAILED                       [ 20%]
tests/kernels/test_a.py::test_z SKIPPED (no GPU here)                   [ 30%]
FAILED tests/kernels/test_a.py::test_y[cpu, bf16] - AssertionError: 3 is not 4
"""


@pytest.mark.parametrize("output", [XDIST, PLAIN])
@pytest.mark.parametrize("timed_out", [False, True])
def test_what_pytest_says_is_read(output, timed_out):
    """Also when its time is over before its summary."""
    outcome = smoke_phases.Outcome([], output, "", timed_out=timed_out, exit_code=1, seconds=9.0)
    failed, total = smoke_phases.test_rows(outcome)
    assert failed["row"] == "tests/kernels/test_a.py::test_y[cpu, bf16]"
    assert failed["problem"] == "failed: AssertionError: 3 is not 4"
    assert total["ok"] is False and total["result"] == "1 passed, 1 failed, 1 skipped"
    assert total["problem"].startswith("hung: stopped after its 9 s" if timed_out else "exit code 1")
