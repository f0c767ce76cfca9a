"""Products of widened bf16 tensors lose nothing by being read as bf16, and nothing else is."""
import math

import pytest
import torch

from kernels.attention import attention
from kernels.cpu_products import operands_are_bf16


def precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.parametrize("shape", [(3, 40, 20, 50), (1, 128, 64, 512), (2, 7, 33, 5)])
def test_a_product_of_widened_operands_is_that_of_fp32(shape):
    batch, rows, inner, columns = shape
    a = torch.randn(batch, rows, inner).bfloat16().float()
    b = torch.randn(batch, inner, columns).bfloat16().float()
    with operands_are_bf16(torch.bfloat16):
        got = torch.bmm(a, b)
    want = a.double() @ b.double()
    sizes = a.double().abs() @ b.double().abs()
    bound = inner * 2.0**-24 * sizes  # of the roundings of sums in fp32, and none of bf16
    assert (got - want).abs().le(bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_operands_of_another_dtype_are_left_alone(dtype):
    before = precision()
    with operands_are_bf16(dtype):
        assert precision() == before


def test_the_setting_is_put_back_after_an_error():
    before = precision()
    with pytest.raises(ZeroDivisionError), operands_are_bf16(torch.bfloat16):
        assert precision() == "bf16" != before
        raise ZeroDivisionError
    assert precision() == before


@pytest.mark.parametrize("head_dim", [20, 64])
def test_the_scores_of_attention_are_not_rounded_to_bf16(head_dim):
    """With values of one and two keys apart by less than a bf16's rounding of their scores."""
    q = torch.full((1, 2, 1, head_dim), 4.0).bfloat16()
    k = torch.full((1, 2, 1, head_dim), 4.0).bfloat16()
    k[0, 1, 0, 0] = 4.0625  # the second score is larger by 0.25 / sqrt(head_dim), of 16 sqrt(head_dim)
    v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, 1, head_dim).bfloat16()
    got = attention(q, k, v, None, "blocks")[0, 1, 0, 0].float()
    want = torch.tensor(0.25 / math.sqrt(head_dim)).sigmoid()  # of the second query
    assert abs(got - want) < 2 * 2.0**-9  # probabilities and the result are rounded to bf16
    assert abs(0.5 - want) > 2 * 2.0**-9  # a difference that is lost would be seen
