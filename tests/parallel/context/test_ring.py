"""Ring and all-to-all attention on 2 and 4 gloo ranks: outputs and gradients against one process, bytes on
the wire against the closed form, generation from a context-parallel run, and whole layouts through the proof.
"""

from dataclasses import replace

import pytest
import torch
from dense_mask import dense_attention, visible_keys
from random_tokens import RandomTokens

from build import build_run
from config.reading.tiny import tiny_config
from kernels.attention import attention, attention_reference
from kernels.attention_mask import make_attention_mask
from lab.proof.verify.trial import prove
from model.generate import generate
from model.sharding import parallel_dims
from parallel.context.ring import ring_attention
from parallel.context.ulysses import ulysses_attention
from parallel.context.zigzag import shard_batch, token_positions
from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.world import World
from train import train_step


@pytest.fixture(scope="module", params=[2, 4])
def pool(request, ranks):
    return ranks(request.param)


def mesh_of(world: World, cfg) -> Mesh:
    return Mesh.bind(parallel_dims(cfg, world.size), world)


def with_layout(name: str, cp_kind: str, doc_mask: bool = False, layers: int = 2, **layout):
    cfg = tiny_config(name)
    cfg = replace(cfg, model=replace(cfg.model, layers=layers), train=replace(cfg.train, global_batch=2))
    return replace(
        cfg,
        parallel=replace(cfg.parallel, cp_kind=cp_kind, **layout),
        data=replace(cfg.data, doc_mask=doc_mask),
    )


# ---- attention alone ---------------------------------------------------------------------------------------


def compare(
    world: World, kind: str, c: int, window, packed: bool, dtype: torch.dtype, value: int = 16
) -> float:
    """The largest difference of out, dq, dk, dv of this rank's tokens from the reference over the whole
    sequence.
    """
    group = Mesh.bind(ParallelDims(world.size, cp=world.size), world).cp
    n, s, stream = group.size, 2 * group.size * c, torch.Generator().manual_seed(c)
    heads = {"q": (8, 16), "k": (4, 16), "v": (4, value), "dy": (8, value)}
    q, k, v, dy = (
        torch.randn(2, s, h, d, generator=stream, dtype=torch.float64).to(dtype) for h, d in heads.values()
    )
    docs = (torch.rand(2, s, generator=stream) < 0.2).cumsum(1, dtype=torch.int32) if packed else None
    see = visible_keys(torch.arange(s), torch.arange(s), window, docs, docs)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention_reference(*whole, see)
    out.backward(dy)
    mine = token_positions(s, group.index, n)
    part = [x[:, mine].requires_grad_() for x in (q, k, v)]
    if kind == "ring":
        y = ring_attention(*part, docs, window, group)
    elif kind == "ring, one mask":  # as on a GPU
        mask = make_attention_mask(0, s, 0, s, window, docs, torch.device("cpu"))
        y = ring_attention(*part, docs, window, group, mask)
    else:
        y = ulysses_attention(lambda q, k, v: attention(q, k, v, see), *part, group)
    assert y.dtype == dtype
    y.backward(dy[:, mine])
    return max(
        float((a - b[:, mine]).abs().max())
        for a, b in zip((y, *(x.grad for x in part)), (out, *(x.grad for x in whole)))
    )


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("kind", ["ring", "ring, one mask", "ulysses"])
@pytest.mark.parametrize(
    "c,window,packed", [(3, None, False), (3, None, True), (4, 6, False), (1, 2, True), (4, 9, True)]
)
def test_attention_is_that_of_one_process(pool, kind, c, window, packed):
    assert max(pool.run(compare, kind, c, window, packed, torch.float64)) < 1e-13


@pytest.mark.parametrize("kind", ["ring", "ring, one mask"])
def test_a_ring_of_one_rank_is_attention(kind):
    assert compare(World(), kind, 4, 6, True, torch.float64) < 1e-13


def compare_scores(
    world: World, kind: str, chunk: int | None, packed: bool, dtype: torch.dtype
) -> list[float]:
    """How far this rank's out, dq, dk and dv are from a dense formula over the whole sequence, and the sum of
    all ranks' gradients of the sinks: relative to the largest. With a scale, a soft cap and sinks.
    """
    group = Mesh.bind(ParallelDims(world.size, cp=world.size), world).cp
    s, stream = 8 * group.size, torch.Generator().manual_seed(3)
    heads = {"q": (2, s, 8, 16), "k": (2, s, 4, 16), "v": (2, s, 4, 6), "sinks": (8,)}
    drawn = [
        torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype).double()
        for shape in heads.values()
    ]
    dy = torch.randn(2, s, 8, 6, generator=stream, dtype=torch.float64)
    docs = (torch.rand(2, s, generator=stream) < 0.1).cumsum(1, dtype=torch.int32) if packed else None
    window = 11
    mask = make_attention_mask(0, s, 0, s, window, docs, torch.device("cpu"), chunk=chunk)
    form = {"scale": 0.4, "softcap": 1.5}
    whole = [x.clone().requires_grad_() for x in drawn]
    true = dense_attention(*whole[:3], mask.dense_mask, **form, sinks=whole[3])
    wanted = [true, *torch.autograd.grad(true, whole, dy)]

    mine = token_positions(s, group.index, group.size)
    q, k, v = (x.to(dtype)[:, mine].requires_grad_() for x in drawn[:3])
    sinks = drawn[3].to(dtype).requires_grad_()
    if kind == "ulysses":
        y = ulysses_attention(
            lambda q, k, v, sinks: attention(q, k, v, mask, **form, sinks=sinks), q, k, v, group, sinks
        )
    else:
        see = mask if kind == "ring, one mask" else None
        y = ring_attention(q, k, v, docs, window, group, see, chunk=chunk, **form, sinks=sinks)
    *grads, dsinks = torch.autograd.grad(y, (q, k, v, sinks), dy[:, mine].to(dtype))
    found = [y, *grads, comm.all_reduce_sum(dsinks.double(), group)]
    wanted = [*(x[:, mine] for x in wanted[:4]), wanted[4]]
    return [float((a.double() - c).abs().max() / c.abs().max()) for a, c in zip(found, wanted)]


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("kind", ["ring", "ring, one mask", "ulysses"])
@pytest.mark.parametrize("chunk", [None, 6, 24])
@pytest.mark.parametrize("packed", [False, True])
def test_scores_and_chunks_are_those_of_one_process(pool, kind, chunk, packed):
    for errors in pool.run(compare_scores, kind, chunk, packed, torch.float64):
        assert max(errors) < 1e-12, errors


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_scores_in_bf16(pool, kind):
    for errors in pool.run(compare_scores, kind, 6, True, torch.bfloat16):
        assert max(errors) < 0.02, errors


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("value", [6, 24])
def test_values_of_another_width(pool, kind, value):
    assert max(pool.run(compare, kind, 3, None, True, torch.float64, value)) < 1e-13


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_bf16_rounds_no_more_than_one_process(pool, kind):
    assert (
        max(pool.run(compare, kind, 8, None, False, torch.bfloat16)) < 0.06
    )  # a few units in the last place of 4


def roundings(world: World, c: int) -> list[float]:
    """How far out, dq, dk and dv in bf16 are from those in fp64, in units of what it costs to round them
    once.
    """
    group = Mesh.bind(ParallelDims(world.size, cp=world.size), world).cp
    s, stream = 2 * group.size * c, torch.Generator().manual_seed(c)
    heads = {"q": 8, "k": 4, "v": 4, "dy": 8}
    q, k, v, dy = (torch.randn(2, s, h, 16, generator=stream).bfloat16() for h in heads.values())
    mine = token_positions(s, group.index, group.size)
    part = [x[:, mine].requires_grad_() for x in (q, k, v)]
    y = ring_attention(*part, None, None, group)
    y.backward(dy[:, mine])
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    true = attention_reference(*whole, visible_keys(torch.arange(s), torch.arange(s), None, None, None))
    true.backward(dy.double())
    found = []
    for value, exact in zip((y, *(x.grad for x in part)), (true, *(x.grad for x in whole))):
        value, exact = value.detach().double(), exact.detach()[:, mine]
        found.append(float((value - exact).norm() / (exact.bfloat16() - exact).norm()))
    return found


def test_sums_over_the_ring_are_not_rounded_in_between(pool):
    """The last rank sees all keys, in the most parts: summed in bf16, dq would be 1.3 to 1.7 roundings
    off.
    """
    assert max(pool.run(roundings, 32)[-1]) < 1.2


# ---- the wire ----------------------------------------------------------------------------------------------


def wire(world: World, cfg) -> dict:
    """{(verb, what): of the cp group} of one training step."""
    mesh = mesh_of(world, cfg)
    run = build_run(cfg, mesh, torch.device("cpu"), None, 9)
    mesh.ledger.clear()
    train_step(run, 1, RandomTokens(cfg, mesh.dp.index, mesh.dp.size).microbatches(0))
    return {key[1:]: value for key, value in mesh.ledger.items() if key[0] == "cp"}


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_bytes_of_a_step_are_the_closed_form(pool, kind):
    """Per layer and microbatch; Q, K: bytes of the rank's queries and keys, K': of its keys in fp32 or
    better. ring: 2 (n-1) K forward, 2 (n-1) K + 2 (n-1) K' backward, in n-1 and 2 (n-1) transfers. ulysses: 2
    Q + 2 K each way, in two exchanges each.
    """
    n = pool.size
    cfg = with_layout("llama3-tiny", kind, cp=n)
    cfg = replace(cfg, train=replace(cfg.train, dtype="bf16"))
    m, times = cfg.model, cfg.model.layers * cfg.train.global_batch  # micro_batch 1, dp 1
    tokens, dim = cfg.train.seq_len // n, m.hidden // m.mixer.heads
    heads, kv_heads = m.mixer.heads, m.mixer.kv_heads
    q, k, k_wide = tokens * heads * dim * 2, tokens * kv_heads * dim * 2, tokens * kv_heads * dim * 4
    if kind == "ring":
        true = {
            ("send", "calls"): times * 3 * (n - 1),
            ("send", "bytes"): times * (n - 1) * (4 * k + 2 * k_wide),
        }
    else:
        true = {("all_to_all", "calls"): times * 4, ("all_to_all", "bytes"): times * (4 * q + 4 * k)}
    assert pool.run(wire, cfg) == [true] * n


# ---- generation --------------------------------------------------------------------------------------------


def words(world: World, cfg) -> list[int]:
    mesh = mesh_of(world, cfg)
    run = build_run(cfg, mesh, torch.device("cpu"), None, 9)
    batches = RandomTokens(cfg, mesh.dp.index, mesh.dp.size).microbatches(0)
    train_step(run, 1, batches)  # generation must leave nothing behind, nor find anything
    ids = list(
        generate(
            run.logits,
            [5, 7, 11],
            5,
            temperature=1.0,
            seed=3,
            multiple=run.pipeline.hidden_shape.sequence_shards,
        )
    )
    run.pipeline.evaluate([shard_batch(b, mesh.cp) for b in batches])
    return ids


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "name,layout", [("llama3-tiny", {"zero": 3}), ("gpt2-tiny", {}), ("mistral-tiny", {"tp": 2, "sp": True})]
)
def test_generation_runs_whole_sequences(pool, kind, name, layout):
    cp = pool.size // layout.get("tp", 1)
    if cp == 1:
        pytest.skip("tp takes both ranks")
    alone = words(World(), with_layout(name, kind))
    assert pool.run(words, with_layout(name, kind, cp=cp, **layout)) == [alone] * pool.size


# ---- whole layouts -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,kind,docs,layout",
    [
        ("mistral-tiny", "ring", True, {"cp": 2}),
        ("gpt2-tiny", "ulysses", True, {"cp": 2, "zero": 2}),
        ("llama3-tiny", "ring", False, {"cp": 2, "tp": 2, "sp": True, "zero": 3}),
        ("qwen3-tiny", "ulysses", True, {"cp": 2, "pp": 2, "schedule": "zb-v", "layers": 4}),
        ("mistral-tiny", "ring", False, {"cp": 4, "zero": 1}),
        ("llama3-tiny", "ring", True, {"cp": 2, "zero": 1, "dp_rep": 2}),
    ],
)
def test_layouts_train_like_one_process(pool, tmp_path, name, kind, docs, layout):
    cfg = with_layout(name, kind, docs, **layout)
    p = cfg.parallel
    if p.cp * p.tp * p.pp * p.dp_rep != pool.size:
        pytest.skip("needs another number of ranks")
    first, _ = prove(pool, cfg, tmp_path)
    assert not first.is_wrong, first
