"""Polynomials of singular values: they go to one, directions stay. Those of Polar Express are the paper's, by
Remez's algorithm in numpy."""

import numpy as np
import pytest
import torch

from kernels.newton_schulz import ITERATIONS, POLAR_EXPRESS, orthogonalize

LOWEST, CUSHION, SAFETY = 1e-3, 0.02407327424182761, 1.01  # arXiv 2505.16932: its implementation
# {method: largest distance from one of what becomes of values above a thousandth of the norm}
DISTANCES = {"newton-schulz": 0.53, "polar-express": 0.16}


def value(polynomial, x):
    a, b, c = polynomial
    return a * x + b * x**3 + c * x**5


def best_approximation(low: float, high: float) -> np.ndarray:
    """a, b, c of the odd polynomial of degree five nearest to 1 on [low, high]: of those whose errors at four
    points have one size and alternate in sign, the one whose extrema are these points (Remez 1934).
    """
    points = np.linspace(low, high, 4)
    for _ in range(100):
        powers = np.stack([points, points**3, points**5, [1, -1, 1, -1]], 1)
        *polynomial, _ = np.linalg.solve(powers, np.ones(4))
        a, b, c = polynomial
        extrema = np.sort(np.sqrt(np.roots([5 * c, 3 * b, a]).real))
        points, before = np.array([low, *extrema, high]), points
        if np.abs(points - before).max() < 1e-15:
            break
    return np.array(polynomial)


def polynomials_of_the_paper(number: int) -> list[np.ndarray]:
    low, high, made = LOWEST, 1.0, []
    for _ in range(number):
        polynomial = best_approximation(max(low, CUSHION * high), high)
        polynomial *= 2 / (value(polynomial, low) + value(polynomial, high))
        made.append(polynomial)
        low = value(polynomial, low)
        high = 2 - low
    return made


def test_polar_express_has_the_polynomials_of_its_paper():
    expected = polynomials_of_the_paper(5)
    np.testing.assert_allclose(POLAR_EXPRESS, expected, rtol=1e-11)
    safe = np.array(expected) / SAFETY ** np.array([1, 3, 5])
    np.testing.assert_allclose(ITERATIONS["polar-express"].polynomials, safe, rtol=1e-11)
    assert ITERATIONS["polar-express"].margin == SAFETY


def test_remez_gives_the_best_approximation():
    grid = np.linspace(0.1, 1, 2001)
    best = best_approximation(0.1, 1.0)
    error = np.abs(1 - value(best, grid)).max()
    stream = np.random.default_rng(0)
    for _ in range(200):
        other = best * (1 + 1e-3 * stream.standard_normal(3))
        assert np.abs(1 - value(other, grid)).max() > error


@pytest.mark.parametrize("method", ITERATIONS)
def test_values_above_a_thousandth_of_the_norm_come_near_one(method):
    """Measured: Newton-Schulz leaves the lowest 0.53 from one, Polar Express none more than 0.16."""
    furthest = 0.0
    for x in np.geomspace(LOWEST, 0.999, 200):
        matrix = torch.tensor([[x, 0.0], [0.0, np.sqrt(1 - x**2)]], dtype=torch.float64)  # of norm 1
        furthest = max(furthest, float((orthogonalize(matrix, method).diagonal() - 1).abs().max()))
    assert furthest == pytest.approx(DISTANCES[method], abs=0.005)


@pytest.mark.parametrize("method", ITERATIONS)
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (1, 7)])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_singular_values_are_those_of_the_polynomials(shape, dtype, bound, method):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    polynomials, margin = polynomials_of_the_paper(5), SAFETY
    if method == "newton-schulz":
        polynomials, margin = [(3.4445, -4.7750, 2.0315)] * 5, 1.0
    values = values / x.norm() / margin
    for polynomial in polynomials:
        values = value(polynomial, values / (1.0 if method == "newton-schulz" else SAFETY))
    y = orthogonalize(x.to(dtype), method)
    assert y.dtype == dtype and y.shape == x.shape
    assert 0.65 < values.min() and values.max() < 1.3
    inner = u.t() @ y.double() @ v.t()
    torch.testing.assert_close(inner, values.diag(), rtol=0, atol=max(bound, 1e-6))  # 1e-7 beside the norm
