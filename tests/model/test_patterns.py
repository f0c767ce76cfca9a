"""Layers of several kinds in one model: each has its window, rotary positions, heads and MLP, in the pass, in
the cache, in FLOPs and in what the planner describes. (Logits beside transformers: test_convert.py.)"""

import pytest
import torch

import config
from build import build_run
from model.block import TransformerBlock
from model.context import GenerationCache, forward_context
from model.describe import describe_stage
from model.flops import flops_of_parts
from parallel.sharding.spec import sharded_parameters
from parallel.topology.mesh import Mesh
from plan.count import parameters

S = 24
SETTINGS = {
    "model.layers": 5,
    "model.hidden": 32,
    "model.vocab": 50,
    "model.vocab_multiple": 1,
    "model.context": 64,
    "model.mixer.heads": 4,
    "model.mixer.kv_heads": 2,
    "model.mlp.width": 40,
    "model.mixer.rope.scaling": "none",
    "model.blocks.local.mixer.window": 5,
    "model.blocks.local.mixer.rope.base": 30,
    "model.blocks.few.mixer.kv_heads": 1,
    "model.blocks.few.mixer.rope": "none",
    "model.blocks.few.mlp.width": 24,
    "model.pattern": "(local, block, few)...",
    "train.dtype": "fp64",
}
KINDS = ("local", "block", "few", "local", "block")


@pytest.fixture(scope="module")
def run():
    cfg = config.resolve("llama3-tiny", None, [f"--{key}={value}" for key, value in SETTINGS.items()])
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, 1)
    for number, p in enumerate(run.stages[0].parameters()):
        numbers = torch.Generator().manual_seed(number)
        p.data.add_(0.3 * torch.randn(p.shape, generator=numbers, dtype=p.dtype))
    return run


def test_each_block_is_of_its_kind(run):
    blocks = run.stages[0].blocks
    assert [block.attn.core.view.window for block in blocks] == [5, None, None, 5, None]
    assert [block.attn.rotation and block.attn.rotation.base for block in blocks] == [
        30.0, 500000.0, None, 30.0, 500000.0,
    ]
    assert [block.attn.kv_heads for block in blocks] == [2, 2, 1, 2, 2]
    assert [block.mlp.down.weight.shape[1] for block in blocks] == [40, 40, 24, 40, 40]
    assert [TransformerBlock.kind(run.cfg, layer).name for layer in range(5)] == list(KINDS)


@torch.no_grad()
def test_a_far_token_is_seen_by_the_layers_that_see_it(run):
    """What a change of the first token changes in the last one's input of each attention."""
    context = forward_context(run.cfg, torch.arange(S)[None], None)
    assert len(context.masks) == 2 and len(context.rotations) == 2  # each is made once
    for layer, window in enumerate((5, None, None, 5, None)):
        attn = run.stages[0].blocks[layer].attn
        x = torch.randn(1, S, 32, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
        other = x.clone()
        other[0, 0] += 1
        moved = (attn(x, context) - attn(other, context)).abs().amax(-1)[0] > 1e-12
        assert moved.nonzero().flatten().tolist() == list(range(window or S))


@torch.no_grad()
def test_the_cache_changes_nothing(run):
    stage = run.stages[0]
    ids = torch.randint(50, (1, S), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(S)[None]
    whole = stage.logits(ids, positions)
    cache = GenerationCache()
    for first, last in ((0, 9), (9, 10), (10, 16), (16, 17), (17, S)):
        got = stage.logits(ids[:, first:last], positions[:, first:last], cache=cache)
        cache.length = last
        torch.testing.assert_close(got, whole[:, first:last], rtol=1e-9, atol=1e-11)


def test_flops_and_parameters_are_those_of_each_kind(run):
    model = run.cfg.model
    near, all_before = sum(min(place + 1, 5) for place in range(S)) / S, (S + 1) / 2
    seen = {"local": near, "block": all_before, "few": all_before}
    matrices = {  # heads of 8 channels
        kind: 32 * 8 * (4 + 2 * kv) + 32 * 32 + 3 * 32 * width
        for kind, kv, width in (("local", 2, 40), ("block", 2, 40), ("few", 1, 24))
    }
    blocks = [2 * (matrices[kind] + 2 * 32 * seen[kind]) for kind in KINDS]
    assert flops_of_parts(model, (S,), S) == pytest.approx([0, *blocks, 2 * 32 * 50], rel=1e-12)
    norms = 2 * 32
    total = sum(matrices[kind] + norms for kind in KINDS) + 2 * 50 * 32 + 32
    assert parameters(model)["total"] == total
    assert sum(p.numel() for p in run.stages[0].parameters()) == total


def test_blocks_of_one_kind_are_described_once(run):
    _, *parts, _ = describe_stage(run.cfg, 0, 5).parts
    assert parts[0] is parts[3] and parts[1] is parts[4] and len({id(part) for part in parts}) == 3
    for part, block in zip(parts, run.stages[0].blocks):
        assert [p.spec.shape for p in part.params] == [p.spec.shape for p in sharded_parameters(block)]
