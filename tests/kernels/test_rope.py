"""Rotary positions: their defining property, the split form, the llama3 scaling."""
import math

import pytest
import torch

from kernels.rope import frequencies, halves, mscale, rope, split_rope, tables


def table(b, s, d, dtype=torch.float64):
    return tables(torch.arange(s).expand(b, -1), frequencies(d, 10000.0), dtype)


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    cos, sin = table(1, 40, 8)
    turned_q, turned_k = (rope(t.expand(1, 40, 1, 8), cos, sin)[0, :, 0] for t in (q, k))
    scores = turned_q @ turned_k.t()
    for distance in (0, 3, 17):
        line = scores.diagonal(-distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))


def test_channel_i_turns_with_channel_i_plus_half():
    x = torch.zeros(1, 2, 1, 6, dtype=torch.float64)
    x[0, 1, 0, 1] = 1.0
    y = rope(x, *table(1, 2, 6))[0, 1, 0]
    angle = 10000.0 ** (-2 / 6)
    torch.testing.assert_close(y, torch.tensor([0, math.cos(angle), 0, 0, math.sin(angle), 0], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, kv", [(3, 3), (6, 2), (1, 1)])
def test_split_is_split_and_rope(heads, kv, dtype):
    qkv = torch.randn(2, 5, heads + 2 * kv, 4, dtype=dtype, requires_grad=True)
    cos, sin = tables(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]), frequencies(4, 100.0), dtype)
    q, k, v = qkv.split((heads, kv, kv), 2)
    want = rope(q, cos, sin), rope(k, cos, sin), v
    got = split_rope(qkv, cos, sin, heads, kv)
    for a, b in zip(got, want):
        assert torch.equal(a, b)
        assert a.transpose(1, 2).stride()[2:] == (4, 1)  # head by head: [b, h, s, d] in memory
    dy = [torch.randn_like(t) for t in want]
    assert torch.equal(*(torch.autograd.grad(x, qkv, dy)[0] for x in (got, want)))


def test_gradcheck():
    qkv = torch.randn(1, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = table(1, 3, 4)
    assert torch.autograd.gradcheck(lambda x: split_rope(x, cos, sin, 2, 1), qkv)
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin), qkv)


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
    torch.testing.assert_close(ratio[turns > 40], torch.ones_like(ratio[turns > 40]))  # a channel beyond the bound, where it is rounded
    torch.testing.assert_close(ratio[turns < 0.8], torch.full_like(ratio[turns < 0.8], 40.0))
    assert (ratio.diff() >= -1e-12).all() and mscale(40.0, 1.0) == 1 + 0.1 * math.log(40) and mscale(None, 1.0) == mscale(0.5, 1.0) == 1


def test_yarn_is_that_of_transformers():
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils", reason="transformers is not installed: nothing to compare with")
    from transformers import LlamaConfig
    for settings in ({"factor": 4.0, "original_max_position_embeddings": 32768}, {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2}):
        cfg = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_theta=50000.0, rope_scaling={"rope_type": "yarn", **settings})
        theirs, grown = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](cfg, "cpu")
        ours = frequencies(64, 50000.0, settings["factor"], settings.get("beta_slow", 1), settings.get("beta_fast", 32),
                           settings["original_max_position_embeddings"], "yarn")
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=0)
        assert grown == pytest.approx(mscale(settings["factor"], 1.0))


def test_neighbours_as_halves():
    assert halves(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]
