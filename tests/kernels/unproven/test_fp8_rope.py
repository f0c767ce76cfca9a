"""The gradient of merged q, k, v, from those of its parts: the 8 bits and scales of the one in memory."""

import functools

import pytest
import torch
from test_fp8_formula import check_at_training_sizes, check_both_directions
from torch.utils.checkpoint import checkpoint

from kernels import rope
from kernels.fp8 import E4M3, E5M2
from kernels.fp8_linear import CASTS as PLAIN_CASTS
from kernels.fp8_linear import Fp8Scaling, scaled_linear
from kernels.unproven import fp8_rope
from kernels.unproven.fp8_formula import CASTS
from kernels.unproven.fp8_origin import Reader, find_origin

SIDE = 32
# b, s, heads, kv, d: tails of strips, of tiles (no power of two) and of programs
SHAPES = [(2, 37, 4, 2, 16), (1, 70, 2, 1, 64), (1, 5, 1, 1, 256), (2, 33, 10, 2, 32), (3, 1, 6, 6, 12)]
LAYOUTS = ("apart", "side by side", "head by head", "expanded tokens")


def draw(b, s, heads, kv, d, layout, device, dtype):
    """dq, dk, dv [b, s, heads, d]: tokens and channels of very different size; the largest element is the
    last."""
    h = heads + 2 * kv
    tokens, channels = (torch.logspace(*size).to(device) for size in ((-2, 1, s), (-1, 1, d)))
    x = torch.randn(b, s, h, d, device=device) * tokens[:, None, None] * channels
    x[-1, -1, -1, -1] = 60.0
    parts = x.to(dtype).split((heads, kv, kv), 2)
    if layout == "apart":
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]
    if layout == "head by head":
        return [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
    if layout == "expanded tokens":  # no stride from a token to the next
        return [*parts[:2], parts[2][:, :1].expand_as(parts[2])]
    return list(parts)


def angles(b, s, d, device, one_table=False):
    positions = torch.arange(s).expand(1 if one_table else b, -1) % 29
    return [t.to(device) for t in rope.cos_sin_tables(positions, rope.frequencies(d, 100.0), torch.bfloat16)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("tensor", "row"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, E5M2), (torch.float16, E4M3)], ids=str)
def test_the_bits_of_the_gradient_in_memory(interpreted, monkeypatch, kind, shape, layout, dtype, bits):
    monkeypatch.setattr(fp8_rope, "HEADS", 3)
    b, s, heads, kv, d = shape
    gradients = draw(*shape, layout, interpreted, dtype)
    cos, sin = angles(b, s, d, interpreted, one_table=layout == "apart")
    assert fp8_rope.computes_gradient(Reader(kind, SIDE), *gradients)
    want = rope.rope_backward(*(x.clone() for x in gradients), cos, sin).flatten(0, 1).flatten(1)  # [t, n]
    before = [x.clone() for x in gradients]
    origin = find_origin(fp8_rope.deferred_gradient(*gradients, cos, sin, (b, s, want.shape[1])))
    assert not origin.is_written and origin.shape == tuple(want.shape)
    check_both_directions(origin, want, kind, bits)
    assert all(torch.equal(one, other) for one, other in zip(before, gradients))


@pytest.mark.gpu(
    "unproven.fp8_rope.rope_cast_kernel", "unproven.fp8_rope.rope_maxima_kernel", "rope.rope_kernel"
)
@pytest.mark.parametrize("kind", ("tensor", "row"))
def test_at_training_sizes(training, kind):
    shape = training.batch, training.seq, training.heads, training.kv, training.head_dim
    cos, sin = angles(training.batch, training.seq, training.head_dim, training.device)

    def make():
        gradients = draw(*shape, "apart", training.device, torch.bfloat16)
        width = sum(x.shape[2] for x in gradients) * training.head_dim
        origin = find_origin(fp8_rope.deferred_gradient(*gradients, cos, sin, (*shape[:2], width)))
        return origin, rope.rope_backward(*gradients, cos, sin).view(training.tokens, width)

    check_at_training_sizes(training, make, kind)


def projection(x, weight, cos, sin, heads, kv, dys, recipe, reader):
    """q, k and v of x, and the gradients of x and weight."""
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    casts = PLAIN_CASTS if reader is None else CASTS
    qkv = scaled_linear(*leaves, None, None, Fp8Scaling(recipe, SIDE, casts=casts))
    split = rope.split_heads_and_apply_rope
    if reader is not None:
        split = functools.partial(fp8_rope.split_heads_and_apply_rope, reader=reader)
    results = split(qkv, cos, sin, heads, kv)
    grads = torch.autograd.grad(results, leaves, [dy.clone() for dy in dys])
    return *(y.detach() for y in results), *grads


def test_recomputed_heads_have_the_gradients_of_kept_ones():
    """torch.utils.checkpoint hands out each saved tensor once."""
    b, s, heads, kv, d = 1, 8, 2, 1, 8
    qkv = torch.randn(b, s, (heads + 2 * kv) * d, requires_grad=True)
    cos, sin = angles(b, s, d, torch.device("cpu"))
    reader = Reader("row", SIDE)

    def weighted(x):
        parts = fp8_rope.split_heads_and_apply_rope(x, cos, sin, heads, kv, reader=reader)
        return sum((part * part).sum() for part in parts)

    (want,) = torch.autograd.grad(weighted(qkv * 1.0), qkv)
    (got,) = torch.autograd.grad(checkpoint(lambda x: weighted(x * 1.0), qkv, use_reentrant=False), qkv)
    assert torch.equal(got, want)


@pytest.mark.slow(core=["1-40-2-2-32-side by side-tensorwise"])
@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("b, s, heads, kv, d", [(2, 16, 4, 2, 16), (1, 40, 2, 2, 32)])
def test_a_projection_trains_with_the_same_bits(interpreted, monkeypatch, recipe, layout, b, s, heads, kv, d):
    x = torch.randn(b, s, 64, device=interpreted).bfloat16()
    weight = torch.randn((heads + 2 * kv) * d, 64, device=interpreted).bfloat16()
    dys = draw(b, s, heads, kv, d, layout, interpreted, torch.bfloat16)
    args = x, weight, *angles(b, s, d, interpreted), heads, kv, dys, recipe
    want = projection(*args, None)

    def written(*_):
        raise AssertionError("the gradient is written")

    monkeypatch.setattr(rope, "rope_backward", written)
    got = projection(*args, Reader(Fp8Scaling(recipe, SIDE).activation_kind, SIDE))
    for one, other in zip(got, want):
        assert one.isfinite().all() and torch.equal(one, other)


def test_what_the_casts_do_not_compute_is_written(interpreted):
    """For scales of groups; channels that lie apart; gradients of several dtypes."""
    dq, dk, dv = draw(1, 4, 4, 2, 16, "apart", interpreted, torch.bfloat16)
    lie_apart = dq.transpose(1, 3).contiguous().transpose(1, 3)
    assert fp8_rope.computes_gradient(Reader("row", SIDE), dq, dk, dv)
    assert not fp8_rope.computes_gradient(Reader("group", SIDE), dq, dk, dv)
    assert not fp8_rope.computes_gradient(Reader("row", SIDE), lie_apart, dk, dv)
    assert not fp8_rope.computes_gradient(Reader("row", SIDE), dq, dk, dv.float())


def test_without_kernels_all_is_written():
    qkv = torch.randn(1, 4, 128, requires_grad=True)
    q, k, v = fp8_rope.split_heads_and_apply_rope(
        qkv, *angles(1, 4, 16, qkv.device), 4, 2, reader=Reader("tensor", 32)
    )
    (grad,) = torch.autograd.grad(q.sum() + k.sum() + v.sum(), qkv)
    assert grad.isfinite().all() and find_origin(grad).is_written
