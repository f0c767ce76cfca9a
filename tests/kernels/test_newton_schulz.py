"""Newton-Schulz: singular values go to one, directions stay; the kernel's symmetric products beside plain
ones.
"""

import pytest
import torch
from training import bound

from kernels import newton_schulz as kernel
from kernels.newton_schulz import newton_schulz, symmetric_product


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (1, 7)])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_singular_values_come_near_one(shape, dtype, bound):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    y = newton_schulz(x.to(dtype))
    assert y.dtype == dtype and y.shape == x.shape
    inner = u.t() @ y.double() @ v.t()
    values = inner.diagonal()
    assert 0.65 < values.min() and values.max() < 1.3
    assert (inner - values.diag()).abs().max() < bound  # the same singular vectors


def product(x, scale=1.0, add=None, beta=0.0):
    y = scale * (x @ x.t())
    return y if add is None else y + beta * add


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("m, n", [(16, 16), (24, 72), (72, 24), (48, 8)])
@pytest.mark.parametrize("add", [False, True])
def test_triton(interpreted, small_products, m, n, add):
    x, added = (
        torch.randn(m, n, device=interpreted).bfloat16(),
        torch.randn(m, m, device=interpreted).bfloat16(),
    )
    added = added + added.t()
    assert kernel.triton_fits(x)
    got = symmetric_product(x, 2.0315, added, -4.775) if add else symmetric_product(x)
    want = product(x.double(), 2.0315, added.double(), -4.775) if add else product(x.double())
    assert (got - want).norm() <= 4e-3 * want.norm() and torch.equal(got, got.t())


@pytest.mark.gpu("newton_schulz.symmetric_kernel")
@pytest.mark.parametrize("add", [False, True])
def test_at_training_sizes(training, add):
    x = training.randn(training.hidden, training.ffn)
    gram = (x @ x.t()) / training.ffn
    args = (0.5, gram, -2.0) if add else (1.0, None, 0.0)
    wide_args = (0.5, gram.float(), -2.0) if add else args
    training.check(
        lambda: {"y": symmetric_product(x, *args)},
        lambda: {"y": product(x.float(), *wide_args)},
        {"y": bound(1, training.ffn)},
    )


def test_a_matrix_that_the_copy_engine_cannot_read_takes_the_other_way(interpreted, capfd):
    x = torch.randn(12, 9, device=interpreted).bfloat16()
    torch.testing.assert_close(symmetric_product(x).float(), x.float() @ x.float().t(), rtol=0.02, atol=0.02)
    assert "not aligned to 16 bytes" in capfd.readouterr().err
