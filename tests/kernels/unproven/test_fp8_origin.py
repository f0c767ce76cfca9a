"""What a tensor's producer hands over: taken where it holds, and never read for a result by mistake."""

import torch

from kernels.unproven import fp8_norm, fp8_swiglu
from kernels.unproven.fp8_origin import Reader, find_origin


def test_groups_across_both_halves_stay_on_todays_path(interpreted):
    gate_up = torch.randn(8, 2 * 48, device=interpreted).bfloat16()
    assert find_origin(fp8_swiglu.swiglu(gate_up, reader=Reader("group", 32))).is_written
    assert not find_origin(fp8_swiglu.swiglu(gate_up, reader=Reader("tensor", 32))).is_written


def test_without_kernels_all_is_written():
    x, weight = torch.randn(4, 32), torch.ones(32)
    reader = Reader("row", 32)
    y, _ = fp8_norm.add_norm(x, x, weight, None, 1e-5, reader=reader)
    assert find_origin(y).is_written and y.isfinite().all()
    assert find_origin(fp8_swiglu.swiglu(x, reader=reader)).is_written


def test_who_does_not_ask_reads_nan(interpreted):
    x = torch.randn(8, 32, device=interpreted).bfloat16()
    weight = torch.ones(32, device=interpreted).bfloat16()
    y, _ = fp8_norm.add_norm(x, None, weight, None, 1e-5, reader=Reader("row", 32))
    assert (y @ y.t()).isnan().all() and (y + 1).isnan().all()
    assert y.untyped_storage().nbytes() == 2
