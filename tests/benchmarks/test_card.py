"""The GPU's race of steps, rehearsed on a CPU: what it plans, that a contestant which crashes, hangs or is
not there costs its box alone, and that what is measured is there even when the run is killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest
import torch

import config
from benchmarks import card
from benchmarks.card import (
    KERNELS,
    PLAN,
    Entry,
    derived_figures,
    fit_layers,
    last_error_line,
    make_table,
    table_cells,
)
from benchmarks.shape import Shape
from plan.count import flops_per_token, parameters

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
WHERE = {"card": "CPU", "driver": "", "torch": torch.__version__}


def args(tmp_path, **more):
    return Namespace(
        **{
            "device": "cpu",
            "tiny": True,
            "minutes": 2.0,
            "only": "dense",
            "peers": "ours",
            "site": "",
            "out": str(tmp_path / "x" / "step.jsonl"),
            "table": str(tmp_path / "step.md"),
            **more,
        }
    )


def test_the_models_are_those_of_the_targets():
    shapes = Shape.gpu_models(False)
    sizes = {name: parameters(config.ModelConfig(**s.model_keys())) for name, s in shapes.items()}
    assert [round(sizes[n]["total"] / 1e9, 2) for n in ("dense", "moe", "8b")] == [1.57, 3.87, 8.03]
    assert round(sizes["moe"]["active"] / 1e9, 1) == 0.7 and shapes["dense-128k"].vocab > 128000
    assert flops_per_token(config.ModelConfig(**shapes["dense"].model_keys()), 4096) == pytest.approx(
        10.43e9, rel=2e-3
    )
    assert flops_per_token(config.ModelConfig(**shapes["moe"].model_keys()), 4096) == pytest.approx(
        4.53e9, rel=2e-3
    )
    assert {e.model for e in PLAN} == {*shapes, KERNELS}


def test_the_8b_shape_gets_as_many_layers_as_fit():
    whole = Shape.gpu_models(False)["8b"]
    layers = [fit_layers(whole, room * 2**30).layers for room in (80, 141, 288)]
    assert layers == sorted(layers) and layers[0] < layers[1] < 32 and layers[2] == 32


def test_results_are_there_as_they_come(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        card,
        "PLAN",
        (
            Entry("dense", "ours"),
            Entry("dense", "ours+graphs"),
            Entry("dense", "ours+fp8"),
            Entry("moe", "ours+fp8"),
        ),
    )
    assert card.main(args(tmp_path, only="")) == 0
    rows = [json.loads(x) for x in (tmp_path / "x" / "step.jsonl").read_text().splitlines()]
    assert [(r["model"], r["contestant"]) for r in rows] == [
        ("dense", "ours"),
        ("dense", "ours+graphs"),
        ("dense", "ours+fp8"),
        ("moe", "ours+fp8"),
    ]
    for r in (rows[0], *rows[2:]):
        assert (
            r["problem"] is None
            and r["tokens/s"] > 0
            and r["ms"] > 0
            and 5 < r["loss"] < 8
            and r["parameters"] > 0
            and r["versions"]["torch"]
        )
    assert "train.cuda_graphs" in rows[1]["problem"]
    assert "not run: " in capsys.readouterr().out
    text = (tmp_path / "step.md").read_text()
    assert text.count("|---") and text.count("| dense | ours | ") == 1 and "torch " in text.splitlines()[0]


def test_a_contestant_that_hangs_costs_its_box(tmp_path, monkeypatch):
    """And takes the processes that it started with it."""
    hang = tmp_path / "hang.py"
    hang.write_text(
        "import subprocess, sys, time\np = subprocess.Popen(['sleep', '600'])\n"
        'print(\'{"phase": "building", "s": 0}\', flush=True)\n'
        "open(sys.argv[1], 'w').write(str(p.pid))\ntime.sleep(600)\n"
    )
    start = subprocess.Popen
    monkeypatch.setattr(
        card.subprocess,
        "Popen",
        lambda cmd, **how: start([sys.executable, str(hang), str(tmp_path / "pid")], **how),
    )
    begun = time.monotonic()
    row = card.run_contestant(Entry("dense", "ours"), Shape.gpu_models(True)["dense"], args(tmp_path), 3.0)
    assert (
        row["ms"] is None
        and row["problem"] == "stopped after its 3 s, last phase: building"
        and time.monotonic() - begun < 10
    )
    child = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not os.path.exists(f"/proc/{child}") or "Z" in open(f"/proc/{child}/stat").read().split()[2]:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("what a contestant started lives on")


def test_kernels_that_were_measured_before_the_end_are_kept(tmp_path, monkeypatch):
    rows = [
        {"kernel": "rope", "ms (of a copy)": "0.1 (90 %)", "beside it": "compiled 0.2 (45 %)"},
        {"kernel": "gemm", "TFLOP/s": "700", "beside it": ""},
    ]
    lines, start = "".join(json.dumps(r) + "\n" for r in rows), subprocess.Popen
    for code, problem in (
        (
            f"import time; print({lines!r} + '{{', end='', flush=True); time.sleep(600)",
            "stopped after its 3 s, last phase: gemm",
        ),
        (f"print({lines!r} + '{{\"machine\": 1}}')", None),
    ):
        monkeypatch.setattr(
            card.subprocess, "Popen", lambda cmd, **how: start([sys.executable, "-c", code], **how)
        )
        row = {"model": KERNELS, "contestant": "ours"} | card.run_contestant(
            Entry(KERNELS, "ours"), None, args(tmp_path), 3.0
        )
        assert row["kernels"] == rows and row["problem"] == problem
        text = make_table([row], WHERE)
        assert "| kernels | ours | 2 measured, below" in text
        assert "| rope | 0.1 (90 %) | compiled 0.2 (45 %) |" in text and "| gemm | 700 |  |" in text


def test_a_contestant_that_dies_says_why(tmp_path, monkeypatch):
    start = subprocess.Popen
    monkeypatch.setattr(
        card.subprocess,
        "Popen",
        lambda cmd, **how: start([sys.executable, "-c", "import os; os.abort()"], **how),
    )
    assert card.run_contestant(Entry("dense", "ours"), Shape.gpu_models(True)["dense"], args(tmp_path), 20.0)[
        "problem"
    ]
    assert (
        last_error_line("Traceback\n  x\nValueError: no\n[rank0] bye\n") == "ValueError: no"
        and last_error_line("") == "exited without output"
    )


def test_no_time_left(tmp_path):
    assert card.main(args(tmp_path, minutes=0.1)) == 0
    row = json.loads((tmp_path / "x" / "step.jsonl").read_text().splitlines()[0])
    assert row["problem"].startswith("no time left")


def test_what_follows_from_a_measured_step():
    shape = Shape.gpu_models(False)["dense"]
    row = {
        "model": "dense",
        "contestant": "torchtitan+compile",
        "problem": None,
        "ms": 600.0,
        "spread": 0.01,
        "gib": 60.0,
        "loss": 10.4,
        "parameters": 1.57e9,
        "first s": 30.0,
        "shape": vars(shape),
        "versions": {"torch": "2.11.0"},
    }
    row |= derived_figures(row, shape, 989e12)
    assert row["tokens/s"] == pytest.approx(54613, rel=1e-3) and row["MFU"] == pytest.approx(0.576, abs=2e-3)
    ours = {**row, "contestant": "ours", "ms": 300.0, "tokens/s": 2 * row["tokens/s"]}
    lost = {"model": "dense", "contestant": "x", "problem": "out of memory", "ms": None}
    assert table_cells(row, {"dense": ours["tokens/s"]})["ours is"] == "2.00 x"
    text = make_table([ours, row, lost], {"card": "NVIDIA H200", "driver": "580", "torch": "2.11"})
    assert (
        "NVIDIA H200, driver 580, torch 2.11.0" in text
        and "2.00 x" in text
        and "not run: out of memory" in text
    )


@pytest.mark.parametrize("argv", [["--device", "cpu", "--tiny", "--only", "moe", "--peers", "ours"]])
def test_from_the_command_line(tmp_path, argv):
    out = tmp_path / "step.jsonl"
    end = subprocess.run(
        [sys.executable, "-m", "scripts.bench", "step", *argv, "--out", str(out)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert end.returncode == 0, end.stderr
    assert json.loads(out.read_text().splitlines()[0])["tokens/s"] > 0 and "| moe | ours |" in end.stdout
