"""The race of steps on a GPU, rehearsed on a CPU: its plan, contestants that crash, hang or are missing, and
its table.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

import config
from config.reading import build_tree
from lab.benchmarks import card, contestant, process
from lab.benchmarks.card import PLAN, Entry, derived_figures, fit_layers
from lab.benchmarks.card_table import make_table, table_cells
from lab.benchmarks.process import last_error_line
from lab.benchmarks.shape import Shape
from plan.count import flops_per_token, parameters

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
MACHINE = card.GpuMachine("CPU", "", torch.__version__, card.CPU_MEMORY)
WHERE = MACHINE.facts()


MEASURED = {"problem": None, "ms": 600.0, "spread": 0.0, "gib": 1.0, "loss": 6.0, "first s": 1.0}
MEASURED |= {"parameters": 1}


def args(tmp_path, **more):
    usual = {"device": "cpu", "tiny": True, "minutes": 2.0, "only": "dense", "peers": "ours", "site": ""}
    places = {"out": str(tmp_path / "x" / "step.jsonl"), "table": str(tmp_path / "step.md")}
    return Namespace(**usual | places | more)


def make_rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "x" / "step.jsonl").read_text().splitlines()]


@pytest.fixture
def starts_instead(monkeypatch):
    """starts_instead(words): each contestant is python with these words."""
    start = subprocess.Popen

    def replace_program(*words):
        program = [sys.executable, *words]
        monkeypatch.setattr(process.subprocess, "Popen", lambda _, **how: start(program, **how))

    return replace_program


def test_the_models_are_those_of_the_targets():
    shapes = Shape.gpu_models(False)
    models = {name: build_tree(config.ModelConfig, s.model_keys()) for name, s in shapes.items()}
    sizes = {name: parameters(model) for name, model in models.items()}
    assert [round(sizes[n]["total"] / 1e9, 2) for n in ("dense", "moe", "8b")] == [1.57, 3.87, 8.03]
    assert round(sizes["moe"]["active"] / 1e9, 1) == 0.7 and shapes["dense-128k"].vocab > 128000
    assert flops_per_token(models["dense"], 4096) == pytest.approx(10.43e9, rel=2e-3)
    assert flops_per_token(models["moe"], 4096) == pytest.approx(4.53e9, rel=2e-3)
    assert {e.model for e in PLAN} == set(shapes)


@pytest.mark.parametrize("tiny", [False, True])
def test_packed_documents_cost_what_unpacked_ones_do(tiny):
    """As many tokens and FLOPs; and packed-uneven says what its own cost."""
    shapes = Shape.gpu_models(tiny)
    dense, packed, uneven = (shapes[name] for name in ("dense", "packed", "packed-uneven"))
    for shape in (packed, uneven):
        assert shape.tokens == dense.tokens and sum(shape.documents) == shape.seq
        assert shape.model_keys() == dense.model_keys()

    def flops(shape):
        model = build_tree(config.ModelConfig, shape.model_keys())
        return flops_per_token(model, shape.seq, shape.documents)

    assert flops(packed) == flops(dense) > flops(uneven)
    row = {"ms": 100.0}
    assert derived_figures(row, packed, 1e12) == derived_figures(row, dense, 1e12)


def test_packed_documents_train_like_unpacked_ones():
    """Two documents in a sequence, or each in one: the same losses, step by step."""
    shapes = Shape.gpu_models(True)
    tokens = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    for name in ("dense", "packed"):
        step, _ = contestant.ours(shapes[name], "cpu", set())
        batch = tokens.view(shapes[name].batch, shapes[name].seq)
        losses.append([float(step(batch, batch)) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3) and losses[0][2] < losses[0][0]


def test_a_model_that_does_not_fit_runs_with_fewer_layers(tmp_path, monkeypatch):
    """Whoever runs it; and what is compared then is FLOPs, not tokens."""
    shape = replace(Shape.gpu_models(True)["moe"], layers=10)
    monkeypatch.setattr(card, "fitted_shape", lambda *_: shape)
    monkeypatch.setattr(card, "PLAN", (Entry("moe", "ours"), Entry("moe", "torchtitan+compile")))

    def run(entry, shape, args, limit_s):
        fits = shape.layers <= (10 if entry.contestant == "ours" else 5)
        return MEASURED if fits else card.NO_RESULT | {"problem": "out of memory"}

    monkeypatch.setattr(card, "run_contestant", run)
    rows = list(card.run_plan(MACHINE, args(tmp_path, only="moe", peers=""), lambda: 100.0))
    assert [(row["contestant"], row["shape"]["layers"]) for row in rows] == [
        ("ours", 10),
        ("torchtitan+compile", 10),
        ("torchtitan+compile", 7),
        ("torchtitan+compile", 4),
    ]
    text = make_table(rows, WHERE)
    assert text.count("not run: out of memory") == 2 and "| moe | torchtitan+compile | 4 | " in text


def test_a_model_of_which_too_little_fits_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "PLAN", (Entry("8b", "ours"),))
    small = card.GpuMachine("a card", "", "", 24 * card.GIB)
    [row] = card.run_plan(small, args(tmp_path, only="8b", peers="", tiny=False), lambda: 100.0)
    assert row["problem"] == card.TOO_LARGE and "not run: the fewest" in make_table([row], WHERE)


def test_the_noise_is_that_of_ours_measured_twice():
    one = MEASURED | {"model": "dense", "contestant": "ours", "shape": vars(Shape.gpu_models(False)["dense"])}
    one |= {"tokens/s": 1.0, "TFLOP/s": 1.0, "MFU": 0.5}
    text = make_table([{**one, "ms": 100.0}, {**one, "ms": 102.0}], WHERE)
    assert "Noise: ours on the dense model took 100.0, 102.0 ms, 2.0% apart." in text


def test_a_shape_gets_as_many_layers_as_fit():
    whole = Shape.gpu_models(False)["8b"]
    layers = [fit_layers(whole, room * 2**30).layers for room in (80, 141, 288)]
    assert layers == sorted(layers) and layers[0] < layers[1] < 32 and layers[2] == 32


@pytest.mark.slow
def test_results_are_written_as_they_come(tmp_path, monkeypatch, capsys):
    plan = [("dense", "ours"), ("dense", "ours+graphs"), ("dense", "ours+fp8"), ("moe", "ours+fp8")]
    monkeypatch.setattr(card, "PLAN", tuple(Entry(*words) for words in plan))
    assert card.main(args(tmp_path, only="")) == 0
    rows = make_rows(tmp_path)
    assert [(row["model"], row["contestant"]) for row in rows] == plan
    for row in (rows[0], *rows[2:]):
        assert row["problem"] is None and 5 < row["loss"] < 8 and row["versions"]["torch"]
        assert min(row["tokens/s"], row["ms"], row["parameters"]) > 0
    assert "train.cuda_graphs" in rows[1]["problem"]
    assert "not run: " in capsys.readouterr().out
    text = (tmp_path / "step.md").read_text()
    assert text.count("|---") and text.count("| dense | ours | ") == 1 and "torch " in text.splitlines()[0]


def test_a_contestant_that_hangs_is_stopped_with_the_processes_that_it_started(tmp_path, starts_instead):
    hang = tmp_path / "hang.py"
    hang.write_text(
        "import subprocess, sys, time\np = subprocess.Popen(['sleep', '600'])\n"
        'print(\'{"phase": "building", "s": 0}\', flush=True)\n'
        "open(sys.argv[1], 'w').write(str(p.pid))\ntime.sleep(600)\n"
    )
    starts_instead(str(hang), str(tmp_path / "pid"))
    begun = time.monotonic()
    row = card.run_contestant(Entry("dense", "ours"), Shape.gpu_models(True)["dense"], args(tmp_path), 8.0)
    assert row["ms"] is None and row["problem"] == "stopped after its 8 s, last phase: building"
    assert time.monotonic() - begun < 20
    child = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not os.path.exists(f"/proc/{child}") or "Z" in open(f"/proc/{child}/stat").read().split()[2]:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("what a contestant started lives on")


def test_a_contestant_that_dies_is_named_with_its_last_error(tmp_path, starts_instead):
    starts_instead("-c", "import os; os.abort()")
    shape = Shape.gpu_models(True)["dense"]
    assert card.run_contestant(Entry("dense", "ours"), shape, args(tmp_path), 20.0)["problem"]
    assert last_error_line("Traceback\n  x\nValueError: no\n[rank0] bye\n") == "ValueError: no"
    assert last_error_line("") == "exited without output"


def test_without_time_a_contestant_is_not_begun(tmp_path):
    assert card.main(args(tmp_path, minutes=0.1)) == 0
    assert make_rows(tmp_path)[0]["problem"].startswith("no time left")


def test_rates_and_ratios_follow_from_a_measured_step():
    shape = Shape.gpu_models(False)["dense"]
    row = MEASURED | {"model": "dense", "contestant": "torchtitan+compile", "shape": vars(shape)}
    row |= {"parameters": 1.57e9, "versions": {"torch": "2.11.0"}}
    row |= derived_figures(row, shape, 989e12)
    assert row["tokens/s"] == pytest.approx(54613, rel=1e-3) and row["MFU"] == pytest.approx(0.576, abs=2e-3)
    ours = {**row, "contestant": "ours", "ms": 300.0}
    ours |= derived_figures(ours, shape, 989e12)
    lost = {"model": "dense", "contestant": "x", "problem": "out of memory", "ms": None}
    assert table_cells(row, {"dense": 2 * row["TFLOP/s"]}, {})["ours is"] == "2.00 x"
    text = make_table([ours, row, lost], {"card": "NVIDIA H200", "driver": "580", "torch": "2.11"})
    for part in ("NVIDIA H200, driver 580, torch 2.11.0", "2.00 x", "not run: out of memory"):
        assert part in text


def test_the_command_prints_the_table(tmp_path):
    out = tmp_path / "step.jsonl"
    words = ["step", "--device", "cpu", "--tiny", "--only", "moe", "--peers", "ours", "--out", str(out)]
    command = [sys.executable, "-m", "scripts.bench", *words]
    end = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)
    assert end.returncode == 0, end.stderr
    assert json.loads(out.read_text().splitlines()[0])["tokens/s"] > 0 and "| moe | ours |" in end.stdout
