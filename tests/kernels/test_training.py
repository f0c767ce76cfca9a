"""The comparison that the tests marked gpu share sees what is wrong with a kernel; each kernel has such a
test.
"""

import pathlib
import re
from dataclasses import replace

import pytest
import torch
import triton_kernels
from test_swiglu import KERNELS
from training import BF16, FP32, bound, relative_error

from kernels import fp8, norm, triton_

HERE = pathlib.Path(__file__).parent


def check_norm(training, dtype=BF16):
    training = replace(training, kernels=frozenset({"norm.forward_kernel", "norm.backward_kernel"}))
    x, weight, dy = (training.randn(*size).to(dtype) for size in ((8, 64), (64,), (8, 64)))
    training.check_function(
        lambda x, w: norm.rms_norm(x, w, 1e-5),
        lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-5),
        {"x": x, "w": weight},
        (dy,),
        {"y": bound(1), "dx": bound(1), "dw": bound(0, 8)},
        weights=("w",),
    )


def left_unwritten(y, *rest):
    y[-1] = torch.empty_like(y[-1])
    return y, *rest


def other_each_time(y, *rest):
    return y + 1e-2 * torch.rand_like(y), *rest


def too_large(y, *rest):
    return y * 1.01, *rest


def no_result(*_):
    raise RuntimeError("no such instruction")


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("fault, says", [
    (lambda *results: results, None),
    (too_large, "dx: error 0.0"),
    (left_unwritten, "dx: error nan"),
    (other_each_time, "dx: two runs differ"),
    (no_result, "no such instruction"),
])
def test_a_wrong_kernel_fails(training, monkeypatch, fault, says):
    launch = norm.launch_backward
    monkeypatch.setattr(norm, "launch_backward", lambda *args: fault(*launch(*args)))
    if says is None:
        check_norm(training)
    else:
        with pytest.raises((AssertionError, RuntimeError), match=says):
            check_norm(training)
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_was_found_is_reported(training):
    found = {}
    check_norm(replace(training, report=found.__setitem__))
    assert found["result"] in ("y", "dx", "dw") and 0 < found["error"] < found["bound"] < 0.01


def test_a_reference_in_the_place_of_a_kernel_fails(training, monkeypatch):
    with pytest.raises(AssertionError, match="the kernel did not run: norm: no kernel for float64"):
        check_norm(training, torch.float64)
    monkeypatch.setattr(triton_, "DEVICES", ())
    with pytest.raises(AssertionError, match="launched: |no kernel was launched"):
        check_norm(training)


def test_a_chip_that_cannot_have_the_kernel_is_skipped(training, monkeypatch):
    is_available, old = triton_.kernel_is_available, "fp8 needs sm_89 or newer"
    monkeypatch.setattr(fp8, "kernel_is_available", lambda *args, why: is_available(*args, why=old))
    x = training.randn(8, 16)
    with pytest.raises(pytest.skip.Exception, match=old):
        training.check(lambda: dict(enumerate(fp8.quantize(x, "row"))), dict, {})


def test_bounds_follow_the_dtype():
    """One rounding is within its bound, and a tenth of its error beyond that of none; so is a sum in fp32."""
    x = torch.randn(10000)
    for dtype in (BF16, torch.float16, torch.float8_e4m3fn):
        error = relative_error((x * 2).to(dtype), x * 2)
        assert bound(0, dtype=dtype) < error / 10 < error < bound(1, dtype=dtype)
    terms = 1 << 15
    a, b = torch.randn(64, terms), torch.randn(64, terms)
    total = torch.zeros(64)
    for left, right in zip(a.t(), b.t()):  # one term after another: the worst order
        total += left * right
    assert 0 < relative_error(total, (a.double() * b.double()).sum(1)) < bound(0, terms, FP32)


def test_every_kernel_has_a_test_at_training_sizes():
    """By the names in the marks; `check` holds that the kernels are launched."""
    text = "".join(path.read_text() for path in HERE.rglob("test_*.py"))
    marks = re.findall(r"pytest\.mark\.gpu\((.*?)\)", text, re.DOTALL)
    named = set(re.findall(r'"([\w.]+_kernel)"', "".join(marks))) | set().union(*KERNELS.values())
    known = {place.full_name.removeprefix("kernels.") for place in triton_kernels.places()}
    assert named == known and len(known) >= 40


@pytest.mark.parametrize("share, limits", [(None, []), (0.11, [0.11]), (1.0, [1.0])])
def test_a_share_of_the_memory_is_set_where_there_is_a_gpu(request, monkeypatch, share, limits):
    limited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limited.append)
    configure_memory(request, share)
    assert limited == limits


@pytest.mark.parametrize("share", [0.0, 8.0, float("nan")])
def test_a_share_of_memory_outside_0_to_1_is_refused(request, share):
    with pytest.raises(pytest.UsageError, match=f"--memory-share {share:g}: give a share"):
        configure_memory(request, share)


def configure_memory(request, share):
    conftest = request.config.pluginmanager.get_plugin(str(HERE.parent / "conftest.py"))
    conftest.limit_memory(share)
