"""Newton-Schulz: singular values go to one, directions stay."""

import pytest
import torch

from kernels.newton_schulz import newton_schulz


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
