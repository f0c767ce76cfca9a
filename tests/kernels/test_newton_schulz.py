"""Newton-Schulz: singular values near 1, singular vectors kept."""
import pytest
import torch

from kernels.newton_schulz import A, B, C, orthogonalize


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (3, 6, 4), (1, 7)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    g = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    got = orthogonalize(g)
    s = s / (torch.linalg.matrix_norm(g)[..., None] + 1e-7)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    torch.testing.assert_close(got, u * s[..., None, :] @ v, rtol=1e-9, atol=1e-9)
    well = torch.linalg.svdvals(orthogonalize(torch.linalg.qr(torch.randn(12, 5, dtype=torch.float64)).Q))
    assert ((well > 0.68) & (well < 1.21)).all()


def test_scale_transposition_and_zeros():
    g = torch.randn(6, 10, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(g), orthogonalize(1000 * g), rtol=1e-5, atol=1e-6)  # EPS
    assert torch.equal(orthogonalize(g).mT, orthogonalize(g.mT))
    assert not orthogonalize(torch.zeros(3, 4)).any()


def test_products_in_another_dtype():
    g = torch.randn(32, 64)
    got, want = orthogonalize(g, dtype=torch.bfloat16), orthogonalize(g.double())
    assert got.dtype == torch.float32 and (got - want).norm() <= 0.03 * want.norm()
