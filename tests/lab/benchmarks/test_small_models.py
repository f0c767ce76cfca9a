"""Small models with the kernels and without: what is a difference, and what only a rounding."""

import importlib

import pytest
import torch
from small_tiles import SMALL_TILES

from kernels import swiglu, triton_
from lab.benchmarks import small_models


def test_models_are_compared_by_what_the_dtype_does():
    ones = torch.ones(10)

    def steps(loss, norms, gradient=1.0):
        gradients = {"gradient of x": gradient * ones}
        return small_models.TrainedSteps({"loss": loss, "grad_norm": norms}, gradients)

    reference = steps([2.0, 1.9], [1.0, 1.0])
    wide = steps([2.0, 1.9], [1.0, 1.01], 1.02)  # bf16 moves the norm by 1 %, the gradient by 2 %

    def row(*values):
        return small_models.compare(steps(*values), reference, wide)

    def is_ok(*values):
        return row(*values)["state"] == "ok"

    assert is_ok([2.0, 1.9], [1.075, 1.0]) and not is_ok([2.0, 1.9], [1.085, 1.0])
    assert is_ok([2.007, 1.9], [1.0, 1.0]) and not is_ok([2.009, 1.9], [1.0, 1.0])  # u is 2^-8
    assert is_ok([2.0, 1.9], [1.0, 1.0], 1.07)
    wrong = row([2.0, 1.9], [1.0, 1.0], 1.09)
    assert wrong["state"] == "wrong" and wrong["result"] == "gradient of x"
    assert wrong["bound"] == pytest.approx(0.08)
    for value in (float("nan"), float("inf")):
        assert not is_ok([2.0, value], [1.0, 1.0]) and not is_ok([2.0, 1.9], [1.0, 1.0], value)
    same = row([2.0, 1.9], [1.0, 1.0])
    assert same["state"] == "wrong" and "did not run" in same["problem"]


@pytest.mark.slow
@pytest.mark.skipif(not triton_.TRITON_AVAILABLE, reason="no Triton for this platform")
@pytest.mark.skipif(torch.cuda.is_available(), reason="scripts.bench first trains the models here")
def test_a_model_with_a_wrong_kernel_is_wrong(tmp_path, monkeypatch):
    """The whole of train.py with a backward of SwiGLU that is 10 % too large."""
    monkeypatch.setattr(triton_, "DEVICES", ("cpu",))
    monkeypatch.setattr(triton_, "print_once", print)  # check_model sets it
    for module, table, tile in SMALL_TILES:
        owner = importlib.import_module(f"kernels.{module}")
        monkeypatch.setattr(owner, table, getattr(owner, table) | tile)
    monkeypatch.setattr(small_models, "TINY_STEPS", 1)
    right = swiglu.launch_swiglu_backward
    monkeypatch.setattr(swiglu, "launch_swiglu_backward", lambda *args: right(*args) * 1.1)
    messages = []
    small_models.report_model(lambda **message: messages.append(message), "dense", "cpu", True, tmp_path)
    row = messages[-1]
    assert row["state"] == "wrong" and row["error"] > row["bound"], row
