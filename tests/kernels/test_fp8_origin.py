"""What a tensor's producer hands over: taken where it holds, and never read for a result by mistake."""

import torch

from kernels import norm, swiglu
from kernels.fp8 import Maxima
from kernels.fp8_formula import maxima_of
from kernels.fp8_origin import Reader, origin_of, with_maxima


def test_maxima_of_what_was_written_since_are_not_taken():
    x = with_maxima(torch.ones(4, 8), "tensor", Maxima(torch.ones(1), torch.ones(1)))
    assert origin_of(x).maxima.rows.item() == 1
    assert maxima_of(origin_of(x), "row", both=True).rows.shape == (4, 1)  # those of another kind neither
    x.mul_(5)
    assert maxima_of(origin_of(x), "tensor", both=True).rows.item() == 5
    assert origin_of(x + 1).kind is None


def test_groups_across_both_halves_stay_on_todays_path(interpreted):
    gate_up = torch.randn(8, 2 * 48, device=interpreted).bfloat16()
    assert origin_of(swiglu.swiglu(gate_up, reader=Reader("group", 32))).is_written
    assert not origin_of(swiglu.swiglu(gate_up, reader=Reader("tensor", 32))).is_written


def test_without_kernels_all_is_written():
    x, weight = torch.randn(4, 32), torch.ones(32)
    reader = Reader("row", 32)
    y, _ = norm.add_rms_norm(x, x, weight, 1e-5, False, norm.Fp8Readers(reader, reader))
    assert origin_of(y).is_written and y.isfinite().all()
    assert origin_of(swiglu.swiglu(x, reader=reader)).is_written


def test_who_does_not_ask_reads_nan(interpreted):
    x = torch.randn(8, 32, device=interpreted).bfloat16()
    weight = torch.ones(32, device=interpreted).bfloat16()
    y = norm.rms_norm(x, weight, 1e-5, False, norm.Fp8Readers(of_result=Reader("row", 32)))
    assert (y @ y.t()).isnan().all() and (y + 1).isnan().all()
    assert y.untyped_storage().nbytes() == 2
