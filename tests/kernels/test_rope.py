"""Rotary positions: their defining property, the split form, the llama3 scaling."""

import math

import pytest
import torch
from training import bound, results_of
from turns import gradients_of, tables_of_training, turned

from kernels.rope import (
    apply_rope,
    cos_sin_tables,
    frequencies,
    pairs_to_halves,
    split_heads_and_apply_rope,
    yarn_mscale,
)


def table(b, s, d, dtype=torch.float64):
    return cos_sin_tables(torch.arange(s).expand(b, -1), frequencies(d, 10000.0), dtype)


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    cos, sin = table(1, 40, 8)
    turned_q, turned_k = (apply_rope(t.expand(1, 40, 1, 8), cos, sin)[0, :, 0] for t in (q, k))
    scores = turned_q @ turned_k.t()
    for distance in (0, 3, 17):
        line = scores.diagonal(-distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))


def test_channel_i_turns_with_channel_i_plus_half():
    x = torch.zeros(1, 2, 1, 6, dtype=torch.float64)
    x[0, 1, 0, 1] = 1.0
    y = apply_rope(x, *table(1, 2, 6))[0, 1, 0]
    angle = 10000.0 ** (-2 / 6)
    torch.testing.assert_close(
        y, torch.tensor([0, math.cos(angle), 0, 0, math.sin(angle), 0], dtype=torch.float64)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, kv", [(3, 3), (6, 2), (1, 1)])
def test_split_is_split_and_rope(heads, kv, dtype):
    qkv = torch.randn(2, 5, heads + 2 * kv, 4, dtype=dtype, requires_grad=True)
    cos, sin = cos_sin_tables(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]), frequencies(4, 100.0), dtype)
    q, k, v = qkv.split((heads, kv, kv), 2)
    want = apply_rope(q, cos, sin), apply_rope(k, cos, sin), v
    got = split_heads_and_apply_rope(qkv, cos, sin, heads, kv)
    for a, b in zip(got, want):
        assert torch.equal(a, b)
        assert a.transpose(1, 2).stride()[2:] == (4, 1)  # head by head: [b, h, s, d] in memory
    dy = [torch.randn_like(t) for t in want]
    assert torch.equal(*(torch.autograd.grad(x, qkv, dy)[0] for x in (got, want)))


def test_gradcheck():
    qkv = torch.randn(1, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = table(1, 3, 4)
    assert torch.autograd.gradcheck(lambda x: split_heads_and_apply_rope(x, cos, sin, 2, 1), qkv)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin), qkv)


def test_llama3_scaling_slows_long_waves_and_keeps_short_ones():
    plain = frequencies(128, 500000.0)
    scaled = frequencies(128, 500000.0, 8.0, 1.0, 4.0, 8192)
    ratio = plain / scaled
    waves = 2 * math.pi / plain
    torch.testing.assert_close(ratio[waves < 8192 / 4], torch.ones_like(ratio[waves < 8192 / 4]))
    torch.testing.assert_close(ratio[waves > 8192], torch.full_like(ratio[waves > 8192], 8.0))
    assert (ratio.diff() >= 0).all()


def test_yarn_slows_long_waves_and_keeps_short_ones():
    plain, scaled = frequencies(128, 10000.0), frequencies(128, 10000.0, 40.0, 1.0, 32.0, 4096, "yarn")
    ratio, turns = plain / scaled, 4096 * plain / (2 * math.pi)
    torch.testing.assert_close(
        ratio[turns > 40], torch.ones_like(ratio[turns > 40])
    )  # a channel beyond the bound, where it is rounded
    torch.testing.assert_close(ratio[turns < 0.8], torch.full_like(ratio[turns < 0.8], 40.0))
    assert (ratio.diff() >= -1e-12).all() and yarn_mscale(40.0, 1.0) == 1 + 0.1 * math.log(40)
    assert yarn_mscale(None, 1.0) == yarn_mscale(0.5, 1.0) == 1


@pytest.mark.slow
def test_yarn_is_that_of_transformers():
    rope_utils = pytest.importorskip(
        "transformers.modeling_rope_utils", reason="transformers is not installed: nothing to compare with"
    )
    from transformers import LlamaConfig

    for settings in (
        {"factor": 4.0, "original_max_position_embeddings": 32768},
        {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2},
    ):
        cfg = LlamaConfig(
            head_dim=64,
            max_position_embeddings=131072,
            rope_theta=50000.0,
            rope_scaling={"rope_type": "yarn", **settings},
        )
        theirs, grown = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](cfg, "cpu")
        ours = frequencies(
            64,
            50000.0,
            settings["factor"],
            settings.get("beta_slow", 1),
            settings.get("beta_fast", 32),
            settings["original_max_position_embeddings"],
            "yarn",
        )
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=0)
        assert grown == pytest.approx(yarn_mscale(settings["factor"], 1.0))


def test_neighbours_as_halves():
    assert pairs_to_halves(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.slow(every=7)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize("heads, kv, d", [(3, 1, 6), (5, 5, 16), (64, 8, 128)])
@pytest.mark.parametrize("gradient", ["side by side", "apart", "transposed"])
def test_triton(interpreted, dtype, bound, heads, kv, d, gradient):
    s = 3 if heads > 5 else 7
    merged = torch.randn(2, s, (heads + 2 * kv) * d, device=interpreted).to(dtype).requires_grad_()
    exact = merged.detach().double().requires_grad_()
    positions = torch.arange(s).expand(2, -1) % 4
    cos, sin = (t.to(interpreted) for t in cos_sin_tables(positions, frequencies(d, 100.0), dtype))
    qkv = (2 * merged).view(2, s, -1, d)
    got = split_heads_and_apply_rope(qkv, cos, sin, heads, kv)
    assert got[0].data_ptr() == qkv.data_ptr()  # in place
    q, k, v = (2 * exact).view(2, s, -1, d).split((heads, kv, kv), 2)
    want = *(apply_rope(t, cos.double(), sin.double()) for t in (q, k)), v
    dy = torch.randn(2, s, heads + 2 * kv, d, device=interpreted).to(dtype)
    dys = dy.split((heads, kv, kv), 2)
    if gradient == "apart":
        dys = [t.clone() for t in dys]
    if gradient == "transposed":
        dys = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in dys]
    should = torch.autograd.grad(want, exact, [t.double() for t in dys])
    for a, b in zip((*got, *torch.autograd.grad(got, merged, dys)), (*want, *should)):
        assert a.dtype == dtype and (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_rope_alone(interpreted, dtype):
    x = (
        torch.randn(2, 5, 6, 3, device=interpreted).to(dtype).transpose(2, 3).requires_grad_()
    )  # no adjacent channels
    cos, sin = (t.to(interpreted) for t in table(2, 5, 6, torch.float32))
    got, want = apply_rope(x, cos, sin), apply_rope(x.double(), cos.double(), sin.double())
    dy = torch.randn_like(x)
    for a, b in (
        (got, want),
        (torch.autograd.grad(got, x, dy)[0], torch.autograd.grad(want, x, dy.double())[0]),
    ):
        torch.testing.assert_close(
            a,
            b.to(dtype),
            rtol=0.01 if dtype == torch.bfloat16 else 1e-5,
            atol=1e-2 if dtype == torch.bfloat16 else 1e-6,
        )


def test_triton_leaves_a_leaf_alone_and_says_who_still_needs_qkv(interpreted):
    qkv = torch.randn(1, 3, 4, 4, device=interpreted, requires_grad=True)
    before = qkv.detach().clone()
    cos, sin = (t.to(interpreted) for t in table(1, 3, 4, torch.float32))
    split_heads_and_apply_rope(qkv, cos, sin, 2, 1)
    assert torch.equal(qkv, before)
    kept = qkv.exp()  # exp's backward needs its output
    q, k, v = split_heads_and_apply_rope(kept, cos, sin, 2, 1)
    with pytest.raises(RuntimeError, match="inplace"):
        (q.sum() + k.sum() + v.sum()).backward()


def test_one_table_of_any_strides_serves_every_sequence(interpreted):
    """Of channels that do not lie side by side, the table of the first sequence is that of the others."""
    x = torch.randn(3, 5, 2, 8, device=interpreted)
    cos, sin = (t.to(interpreted) for t in table(1, 5, 8, torch.float32))
    apart = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in (cos, sin)]
    assert apart[0].stride(-1) != 1
    want = apply_rope(x, cos.expand(3, -1, -1, -1), sin.expand(3, -1, -1, -1))
    torch.testing.assert_close(apply_rope(x, *apart), want)


@pytest.mark.gpu("rope.rope_kernel")
@pytest.mark.parametrize("memory", ["side by side", "apart"])
def test_split_at_training_sizes(training, memory):
    heads, kv, d = training.heads, training.kv, training.head_dim
    sizes = heads, kv, kv
    cos, sin, turns = tables_of_training(training, d, 5e5)
    qkv = training.randn(training.batch, training.seq, sum(sizes), d)
    dy = training.randn(*qkv.shape)

    def exact(qkv):
        q, k, v = qkv.split(sizes, 2)
        return turned(q.double(), turns, pairs=False), turned(k.double(), turns, pairs=False), v

    training.check(
        lambda: results_of(
            lambda qkv: split_heads_and_apply_rope(qkv, cos, sin, heads, kv),
            {"qkv": qkv},
            gradients_of(memory, dy, sizes),
        ),
        lambda: results_of(exact, {"qkv": qkv.float()}, dy.float().split(sizes, 2)),
        {"y": bound(1), "y1": bound(1), "y2": 0.0, "dqkv": bound(1)},
    )


@pytest.mark.gpu("rope.rope_kernel")
def test_heads_at_training_sizes(training):
    cos, sin, turns = tables_of_training(training, training.head_dim, 5e5)
    x, dy = (training.randn(training.batch, training.seq, training.heads, training.head_dim) for _ in "xd")
    training.check_function(
        lambda x: apply_rope(x, cos, sin),
        lambda x: turned(x.double(), turns, pairs=False),
        {"x": x},
        (dy,),
        {"y": bound(1), "dx": bound(1)},
    )
