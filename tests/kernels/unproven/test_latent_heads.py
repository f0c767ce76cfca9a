"""Heads of latent attention: rotated beside other channels, both ways, against formulas in fp64."""

import pytest
import torch
from training import bound
from turns import tables_of, tables_of_training, turned

from kernels import rope
from kernels.unproven.latent_heads import keys_and_values, rotate_heads

POSITIONS = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)]
SIZES = [(3, 5, 6, 7), (2, 8, 2, 8), (20, 128, 64, 128)]  # heads, nope, rope, v


def tables(rope_dim, dtype, device, scale=1.0):
    """cos and sin, and the same turns as complex numbers in fp64."""
    return tables_of(POSITIONS, rope.frequencies(rope_dim, 100.0), dtype, device, scale)


def close(got, want, bound):
    for a, b in zip(got, want):
        assert a.shape == b.shape and (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.slow(every=12)
@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1.7])
@pytest.mark.parametrize("heads, nope, rope_dim, _", SIZES)
def test_rotated_heads(interpreted, dtype, bound, pairs, scale, heads, nope, rope_dim, _):
    leaf = torch.randn(2, 5, heads, nope + rope_dim, device=interpreted).to(dtype).requires_grad_()
    cos, sin, turns = tables(rope_dim, dtype, interpreted, 1.2)
    x = leaf * 2
    got = rotate_heads(x, cos, sin, nope_dim=nope, pairs=pairs, scale=scale)
    assert got.data_ptr() == x.data_ptr() and got.dtype == dtype

    exact = leaf.detach().double().requires_grad_()
    parts = (2 * exact).split((nope, rope_dim), -1)
    want = torch.cat((parts[0], turned(parts[1].contiguous(), turns, pairs)), -1) * scale
    dy = torch.randn(2, heads, 5, nope + rope_dim, device=interpreted).to(dtype).transpose(1, 2)
    before = dy.clone()
    grads = torch.autograd.grad(got, leaf, dy)
    assert torch.equal(dy, before)
    close((got, *grads), (want, *torch.autograd.grad(want, exact, dy.double())), bound)


@pytest.mark.slow(every=12)
@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("heads, nope, rope_dim, value", SIZES)
def test_keys_and_values(interpreted, dtype, bound, pairs, is_rotated, heads, nope, rope_dim, value):
    kv = torch.randn(2, 5, heads, nope + value, device=interpreted).to(dtype).requires_grad_()
    latents = torch.randn(2, 5, 9 + rope_dim, device=interpreted).to(dtype).requires_grad_()
    cos, sin, turns = tables(rope_dim, dtype, interpreted)
    angles = None if is_rotated else (cos, sin)
    got = keys_and_values(kv, latents[..., 9:], angles, nope_dim=nope, pairs=pairs)
    assert got[1].data_ptr() == kv[..., nope:].data_ptr()

    exact = [x.detach().double().requires_grad_() for x in (kv, latents)]
    key = exact[1][..., 9:].contiguous()[:, :, None]
    key = key if is_rotated else turned(key, turns, pairs)
    k_nope, v = exact[0].split((nope, value), -1)
    want = torch.cat((k_nope, key.repeat(1, 1, heads, 1)), -1), v
    dk = torch.randn(2, heads, 5, nope + rope_dim, device=interpreted).to(dtype).transpose(1, 2)
    dv = torch.randn(2, 5, value, heads, device=interpreted).to(dtype).transpose(2, 3)
    should = torch.autograd.grad(want, exact, (dk.double(), dv.double()))
    close((*got, *torch.autograd.grad(got, (kv, latents), (dk, dv))), (*want, *should), bound)


@pytest.mark.parametrize("pairs", [True, False])
def test_queries_and_keys_have_one_order(interpreted, pairs):
    """Scores through the kernels are those of the definition, whichever order the channels have in it."""
    b, s, heads, nope, rope_dim = 2, 5, 3, 4, 8
    q = torch.randn(b, s, heads, nope + rope_dim, device=interpreted)
    kv, key = torch.randn(b, s, heads, nope + 2, device=interpreted), torch.randn(b, s, rope_dim)
    cos, sin, _ = tables(rope_dim, torch.float32, interpreted)

    def scores(q, kv, key, cos, sin):
        q = rotate_heads(q, cos, sin, nope_dim=nope, pairs=pairs, scale=1.3)
        k, _ = keys_and_values(kv, key, (cos, sin), nope_dim=nope, pairs=pairs)
        cached = rotate_heads(key[:, :, None], cos, sin, nope_dim=0, pairs=pairs)[:, :, 0]
        again, _ = keys_and_values(kv, cached, None, nope_dim=nope, pairs=pairs)
        torch.testing.assert_close(k, again, rtol=0, atol=0)
        return torch.einsum("bqhd,bkhd->bhqk", q, k)

    wide = [x.double() for x in (q, kv, key.to(interpreted), cos, sin)]  # without a kernel
    got = scores(q, kv, key.to(interpreted), cos, sin)
    torch.testing.assert_close(got, scores(*wide).float(), rtol=1e-4, atol=1e-5)


def test_without_a_kernel_gradients_are_right():
    cos, sin, _ = tables(4, torch.float64, torch.device("cpu"))
    q = torch.randn(2, 5, 2, 7, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(2, 5, 2, 5, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    for pairs in (True, False):
        rotated = lambda q: rotate_heads(q, cos, sin, nope_dim=3, pairs=pairs, scale=1.3)  # noqa: E731
        joined = lambda *x: keys_and_values(*x, (cos, sin), nope_dim=3, pairs=pairs)  # noqa: E731
        assert torch.autograd.gradcheck(rotated, q)
        assert torch.autograd.gradcheck(joined, (kv, key))


def test_a_leaf_stays_and_the_old_queries_are_missed(interpreted):
    cos, sin, _ = tables(4, torch.float32, interpreted)
    leaf = torch.randn(2, 5, 2, 7, device=interpreted, requires_grad=True)
    before = leaf.detach().clone()
    rotate_heads(leaf, cos, sin, nope_dim=3, pairs=True)
    assert torch.equal(leaf, before)
    kept = leaf.exp()  # exp's backward needs its output
    with pytest.raises(RuntimeError, match="inplace"):
        rotate_heads(kept, cos, sin, nope_dim=3, pairs=True).sum().backward()


@pytest.mark.gpu("unproven.latent_heads.rotate_heads_kernel")
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_rotated_heads_at_training_sizes(training, scale):
    """Queries in the sizes of DeepSeek; channels 2i and 2i + 1 are a pair."""
    nope, rope_dim = training.head_dim, training.head_dim // 2
    shape = training.batch, training.seq, training.heads, nope + rope_dim
    cos, sin, turns = tables_of_training(training, rope_dim, 1e4)

    def exact(q):
        own, rest = q.split((nope, rope_dim), -1)
        return torch.cat((own, turned(rest.double().contiguous(), turns, pairs=True)), -1) * scale

    training.check_function(
        lambda q: rotate_heads(q, cos, sin, nope_dim=nope, pairs=True, scale=scale),
        exact,
        {"q": training.randn(*shape)},
        (training.randn(*shape),),
        {"y": bound(1), "dq": bound(1)},
    )


@pytest.mark.gpu(
    "unproven.latent_heads.latent_keys_kernel", "unproven.latent_heads.latent_keys_backward_kernel"
)
def test_keys_and_values_at_training_sizes(training):
    nope, rope_dim, heads = training.head_dim, training.head_dim // 2, training.heads
    shape = training.batch, training.seq
    cos, sin, turns = tables_of_training(training, rope_dim, 1e4)

    def exact(kv, rope_key):
        own, values = kv.split((nope, training.head_dim), -1)
        shared = turned(rope_key.double()[:, :, None], turns, pairs=True)
        return torch.cat((own, shared.expand(-1, -1, heads, -1)), -1), values

    kv = training.randn(*shape, heads, nope + training.head_dim)
    training.check_function(
        lambda kv, rope_key: keys_and_values(kv, rope_key, (cos, sin), nope_dim=nope, pairs=True),
        exact,
        {"kv": kv, "rope_key": training.randn(*shape, rope_dim)},
        (training.randn(*shape, heads, nope + rope_dim), training.randn(*shape, heads, training.head_dim)),
        {"y": bound(1), "y1": 0.0, "dkv": bound(1), "drope_key": bound(1)},
    )
