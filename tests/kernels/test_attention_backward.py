"""Both ways of attention's backward, with five and with seven products, against the definition: heads in
groups, head dims of all kinds, dq in one part and in several. tests/kernels/test_partial_attention.py has the
masks.
"""

import pytest
import torch

from kernels import attention_launch as launch
from kernels import partial_attention as kernel
from kernels.attention_mask import make_attention_mask
from kernels.partial_attention import attention_part, partial_backward

LAYOUTS = {  # b, heads, key heads, head dims of keys and of values
    "groups": (2, 6, 2, 16, 16),
    "latent": (1, 2, 2, 24, 16),
    "wide": (1, 2, 1, 72, 40),
}


@pytest.mark.slow(core=["seven products-1-96-latent"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("s", [47, 96])
@pytest.mark.parametrize("processors", [1, 40])
def test_triton_layouts(small, monkeypatch, name, s, processors):
    """Heads in groups, head dims that are no powers of two and differ; one part of dq, and several."""
    b, h, g, d, e = LAYOUTS[name]
    monkeypatch.setattr(launch, "num_processors", lambda device: processors)
    ways = []
    for way in ("launch_five_products", "launch_seven_products"):
        function = getattr(launch, way)
        monkeypatch.setattr(launch, way, lambda *a, way=way, f=function: ways.append(way) or f(*a))
    q, dy = (torch.randn(b, s, h, n, device=small).bfloat16() for n in (d, e))
    k, v = (torch.randn(b, s, g, n, device=small).bfloat16() for n in (d, e))
    docs = (torch.rand(b, s) < 0.05).cumsum(1).to(small)
    mask = make_attention_mask(0, s, 0, s, 60, docs, small)
    exact = [x.double() for x in (q, k, v)]
    out, lse = kernel.partial_reference(*exact, mask.dense_mask)
    delta = (dy * out).sum(-1)
    want = kernel.partial_backward_reference(dy.double(), *exact, mask.dense_mask, lse, delta)
    got, got_lse = attention_part(q, k, v, mask)
    grads = partial_backward(dy, q, k, v, mask, got_lse, delta.float())
    for a, c in zip((got, got_lse, *grads), (out, lse, *want)):
        assert (a.double() - c).norm() <= 0.01 * c.norm()
    again = partial_backward(dy, q, k, v, mask, got_lse, delta.float())
    assert all(torch.equal(a, c) for a, c in zip(grads, again))
    has_five = launch.blocks_of(launch.BACKWARD_BLOCKS, q, v) is not None
    assert set(ways) == {"launch_five_products" if has_five else "launch_seven_products"}
    assert small.type == "cuda" or has_five == bool(launch.BACKWARD_BLOCKS[9])


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("programs, key_blocks, processors, parts", [
    (160, 32, 132, 3),  # 2 rounds; in 3 parts 4 rounds of a third; more parts save too little
    (132, 32, 132, 1),
    (528, 32, 132, 1),
    (16, 32, 132, 8),
    (16, 2, 132, 2),  # no more than there are keys
    (1, 1, 132, 1),
])  # fmt: skip
def test_as_few_parts_as_keep_the_processors_busy(programs, key_blocks, processors, parts):
    assert launch.number_of_parts(programs, key_blocks, processors) == parts


def test_what_sums_start_from(small_blocks):
    """-lse sqrt(d), or nothing at all, and -delta; beyond the queries, nothing."""
    lse, delta = (torch.randn(2, 37, 3, device=small_blocks) for _ in range(2))
    lse[0, 5] = -torch.inf
    scores, dprobs = launch.launch_starts(lse, delta, root=4.0)
    want = torch.where(lse == -torch.inf, lse, -4 * lse).transpose(1, 2)
    assert torch.equal(scores[..., :37], want) and torch.equal(dprobs[..., :37], -delta.transpose(1, 2))
    assert torch.isneginf(scores[..., 37:]).all() and (dprobs[..., 37:] == 0).all()


@pytest.mark.parametrize("shared, stages", [(163 << 10, 2), (99 << 10, 1)])  # sm_80; sm_86, 89 and 120
def test_blocks_follow_the_shared_memory_of_a_chip(monkeypatch, shared, stages):
    """tests/kernels/aot.txt says that they fit."""
    monkeypatch.setattr(launch, "chip_name", lambda device: 8)
    monkeypatch.setattr(launch, "shared_bytes", lambda device: shared)
    x = torch.empty(1, 1, 1, 256, dtype=torch.bfloat16)
    assert launch.blocks_of(launch.DQ_BLOCKS, x, x) == launch.Blocks(64, 32, 8, stages)
    assert launch.blocks_of(launch.DKV_BLOCKS, x, x) == launch.Blocks(*launch.DKV_BLOCKS[8][256])
