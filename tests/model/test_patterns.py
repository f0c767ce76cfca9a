"""Layers of several kinds in one model: each has its window, rotary positions, heads and MLP, in the pass, in
the cache, in FLOPs and in what the planner describes. (Logits beside transformers: test_convert.py.)"""

import pytest
import torch
from small_runs import check_cache, compute_weights, forecast_run, gradients_of

import train
from model.block import TransformerBlock
from model.context import forward_context
from model.describe import block_kind, describe_stage
from model.flops import flops_of_parts
from parallel.microbatch import Microbatch
from parallel.sharding.spec import sharded_parameters
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
    return forecast_run("llama3-tiny", SETTINGS)


def test_each_block_is_of_its_kind(run):
    blocks = run.stages[0].blocks
    assert [block.mixer.core.view.window for block in blocks] == [5, None, None, 5, None]
    assert [block.mixer.rotation and block.mixer.rotation.base for block in blocks] == [
        30.0, 500000.0, None, 30.0, 500000.0,
    ]
    assert [block.mixer.kv_heads for block in blocks] == [2, 2, 1, 2, 2]
    assert [block.mlp.down.weight.shape[1] for block in blocks] == [40, 40, 24, 40, 40]
    assert [block_kind(run.cfg, layer).name for layer in range(5)] == list(KINDS)


@torch.no_grad()
def test_a_far_token_is_seen_by_the_layers_that_see_it(run):
    """A change of the first token reaches the outputs of each attention within its window."""
    context = forward_context(run.cfg, torch.arange(S)[None], None)
    assert len(context.masks) == 2 and len(context.rotations) == 2  # each is made once
    for layer, window in enumerate((5, None, None, 5, None)):
        attn = run.stages[0].blocks[layer].mixer
        x = torch.randn(1, S, 32, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
        other = x.clone()
        other[0, 0] += 1
        moved = (attn(x, context) - attn(other, context)).abs().amax(-1)[0] > 1e-12
        assert moved.nonzero().flatten().tolist() == list(range(window or S))


def test_the_cache_changes_nothing(run):
    check_cache(run.stages[0], (0, 9, 10, 16, 17, S))


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


def num_halves(key):
    """Our name of a tensor of whole blocks -> its name where mixers and MLPs are blocks by themselves."""
    start, layer, rest = key.split(".", 2) if key.startswith("layers.") else (key, None, "")
    if layer is None:
        return key
    return f"{start}.{2 * int(layer) + rest.startswith('mlp')}.{rest}"


def train_on_two_sequences(run):
    """{our name: gradient} of their loss, and their logits."""
    ids = torch.randint(50, (2, S + 1), generator=torch.Generator().manual_seed(3))
    place = torch.arange(S).expand(2, S)
    batch = [Microbatch(ids[:, :-1], ids[:, 1:].clone(), place, sequence_ids=torch.arange(2))]
    with torch.no_grad():
        logits = run.stages[0].logits(batch[0].tokens, place)
    train.forward_backward(run, train.shard_microbatches(run, batch), run.scaler.scale)
    return gradients_of(run), logits


@pytest.mark.parametrize("place", ["before", "after", "around"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_mixer_alone_and_an_mlp_alone_are_a_block(place, recompute):
    settings = {**SETTINGS, "model.norm.place": place, "parallel.recompute": recompute}
    settings |= {"train.seq_len": S, "train.micro_batch": 2, "train.global_batch": 2}
    settings = {key: value for key, value in settings.items() if "blocks" not in key}
    whole = settings | {"model.layers": 3, "model.pattern": "none"}
    halves = settings | {
        "model.layers": 6,
        "model.blocks.first.mlp": "none",
        "model.blocks.second.mixer": "none",
        "model.pattern": "(first, second)...",
    }
    runs = [forecast_run("llama3-tiny", keys) for keys in (whole, halves)]
    weights = [compute_weights(run) for run in runs]
    for key, x in weights[0].items():
        weights[1][num_halves(key)].copy_(x)
    assert {num_halves(key) for key in weights[0]} == weights[1].keys()

    (want, logits), (got, same_logits) = map(train_on_two_sequences, runs)
    torch.testing.assert_close(same_logits, logits, rtol=1e-12, atol=1e-13)
    for key, gradient in want.items():
        torch.testing.assert_close(got[num_halves(key)], gradient, rtol=1e-11, atol=1e-13, msg=key)
    kinds = [block_kind(runs[1].cfg, layer) for layer in range(2)]
    assert kinds[1].mixer is None and kinds[0].mixer is TransformerBlock.mixer_class(runs[0].cfg, 0)
    assert parameters(runs[0].cfg.model) == parameters(runs[1].cfg.model)
    assert sum(flops_of_parts(runs[0].cfg.model, (S,), S)) == pytest.approx(
        sum(flops_of_parts(runs[1].cfg.model, (S,), S)), rel=1e-12
    )
