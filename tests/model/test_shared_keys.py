"""Layers that read the keys and values of earlier ones: beside transformers, from a cache, and what is
refused. (Across stages and with every parallel axis: tests/test_invariance.py.)"""

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM

import config
import train
from build import build_run
from checkpoint.state import differing_settings
from config.reading import resolve
from config.reading.function import differences
from config.reading.suggestions import check_rules
from model.context import GenerationCache
from model.shared_keys import (
    SharedKeys,
    carried_into,
    key_sources,
    widths_between_stages,
    with_keys,
    without_keys,
)
from parallel.microbatch import Microbatch
from parallel.sharding.views import boxes_of
from parallel.topology.mesh import Mesh

S = 24
SETTINGS = {
    "model.layers": 7,
    "model.hidden": 32,
    "model.vocab": 50,
    "model.vocab_multiple": 1,
    "model.context": 64,
    "model.mixer.heads": 4,
    "model.mixer.kv_heads": 2,
    "model.mixer.head_dim": 8,
    "model.mixer.scale": 1.0,
    "model.mlp.width": 40,
    "model.mlp.activation": "geglu",
    "model.embed_scale": 32**0.5,
    "model.norm.place": "around",
    "model.norm.eps": 1e-6,
    "model.blocks.local.mixer.window": 5,
    "model.blocks.local_reader.mixer.window": 5,
    "model.pattern": "2 local, block, local, (local_reader, reader)...",
    "train.dtype": "fp64",
    "train.seq_len": S,
    "train.micro_batch": 2,
    "train.global_batch": 2,
}
SOURCES = {4: 3, 5: 2, 6: 3}  # the last layers of their kinds that make keys


def config_of(**keys):
    settings = SETTINGS | {key.replace("__", "."): value for key, value in keys.items()}
    return resolve("shared-keys-tiny", None, [f"--{key}={value}" for key, value in settings.items()])


def run_of(**keys):
    """With weights far from their initial values."""
    run = build_run(config_of(**keys), Mesh.single(), torch.device("cpu"), None, 1)
    for number, p in enumerate(run.stages[0].parameters()):
        numbers = torch.Generator().manual_seed(number)
        p.data.add_(0.2 * torch.randn(p.shape, generator=numbers, dtype=p.dtype))
    return run


@pytest.fixture(scope="module")
def run():
    return run_of()


def batch() -> Microbatch:
    ids = torch.randint(50, (2, S + 1), generator=torch.Generator().manual_seed(7))
    return Microbatch(ids[:, :-1], ids[:, 1:].clone(), torch.arange(S).expand(2, S))


# ---- beside transformers -----------------------------------------------------------------------------------

THEIR_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "attn_norm_after.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_norm_after.weight": "post_feedforward_layernorm.weight",
    **{f"attn.{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"attn.{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in "qk"},
    **{f"mlp.{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


def their_name(key: str) -> str:
    if not key.startswith("layers."):
        return THEIR_NAMES[key]
    _, layer, leaf = key.split(".", 2)
    return f"model.layers.{layer}.{THEIR_NAMES[leaf]}"


def theirs_of(cfg):
    """Their decoder with shared keys, without what it has beside: a norm of values, embeddings by layer."""
    model = cfg.model
    kinds = {"local": "sliding_attention", "block": "full_attention"}
    kinds |= {"local_reader": kinds["local"], "reader": kinds["block"]}
    rope = {"rope_type": "default"}
    theirs = Gemma4ForCausalLM(Gemma4TextConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        layer_types=[kinds[name] for name in config.layer_kinds(model)],
        num_kv_shared_layers=4,
        sliding_window=5,
        rope_parameters={
            "sliding_attention": rope | {"rope_theta": 10000.0},
            "full_attention": rope | {"rope_theta": 1000000.0},
        },
        hidden_size_per_layer_input=0,
        attn_implementation="eager",
    ))
    for layer in theirs.model.layers:
        layer.self_attn.v_norm = torch.nn.Identity()
    return theirs


def test_logits_and_every_gradient_are_those_of_transformers():
    """Their last layer attends to all tokens, and their norms compute in fp64 here, too; frequencies of
    RoPE and the factor of the embedding stay in fp32."""
    run = run_of(model__layers=8)
    theirs = theirs_of(run.cfg).double()
    named = dict(theirs.named_parameters())
    for b in run.buckets:
        for box, x in boxes_of(b, b.weights.master):
            named.pop(their_name(box.key)).data.copy_(x)
    assert not named  # ours are all that they have

    one = batch()
    loss = train.forward_backward(run, train.shard_microbatches(run, [one]), 1.0)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        out = theirs(input_ids=one.tokens, output_hidden_states=True)  # without it, of the last token alone
    wanted = cross_entropy(out.logits.flatten(0, 1), one.targets.flatten(), reduction="sum")
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-7, atol=0)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for b in run.buckets:
        for box, x in boxes_of(b, b.grads.local):
            want = gradients[their_name(box.key)]
            torch.testing.assert_close(x, want, rtol=0, atol=1e-5 * float(want.abs().max()))


# ---- one process -------------------------------------------------------------------------------------------

def test_a_reader_projects_queries_alone(run):
    assert dict(key_sources(run.cfg.model)) == SOURCES
    keys = {box.key for b in run.buckets for box, _ in boxes_of(b, b.weights.master)}
    for layer in range(7):
        assert (f"layers.{layer}.attn.k.weight" in keys) == (layer not in SOURCES)
        assert (f"layers.{layer}.attn.k_norm.weight" in keys) == (layer not in SOURCES)
        assert f"layers.{layer}.attn.q.weight" in keys


@torch.no_grad()
def test_a_token_at_a_time_the_cache_gives_the_logits_of_the_whole(run):
    stage, tokens = run.stages[0], batch().tokens[:1]
    positions = torch.arange(S)[None]
    whole = stage.logits(tokens, positions)
    cache = GenerationCache()
    parts = []
    for first, last in ((0, 9), *((at, at + 1) for at in range(9, S))):
        parts.append(stage.logits(tokens[:, first:last], positions[:, first:last], cache=cache))
        cache.length = last
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    assert {layer for layer, _ in cache.kept} == {0, 1, 2, 3}  # readers keep none


def test_what_travels_between_stages_is_what_is_still_read():
    model = config_of().model
    assert [carried_into(model, first) for first in range(8)] == [[], [], [], [2], [2, 3], [2, 3], [3], []]


@pytest.mark.parametrize("sp", [False, True])
def test_keys_arrive_as_they_were_sent(sp):
    """Those of two layers, of one rank of two, beside its hidden states."""
    cfg = config_of(parallel__tp=2, parallel__sp=sp)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, S // 2 if sp else S, 32, generator=draw)
    pairs = {layer: tuple(torch.randn(2, 2, S, 1, 8, generator=draw)) for layer in (2, 3)}
    sent = with_keys(x, SharedKeys(SOURCES, pairs | {0: pairs[2]}), cfg, first=5)
    assert sent.shape == (*x.shape[:2], widths_between_stages(cfg, [(0, 5), (5, 7)])[1])

    arrived = SharedKeys(SOURCES)
    assert without_keys(sent, arrived, cfg, first=5).equal(x)
    assert arrived.kept.keys() == pairs.keys()
    for layer, pair in pairs.items():
        assert all(map(torch.equal, arrived.kept[layer], pair))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_keys_that_were_read_are_freed_with_their_step(recompute):
    """Without the collector of cycles: each would hold a microbatch's activations until it runs."""
    run = run_of(parallel__recompute=recompute)
    stage = run.stages[0]
    found = []
    real = stage.training_context

    def noted(*args):
        context = real(*args)
        found.append(weakref.ref(context))
        return context

    stage.training_context = noted
    gc.collect()
    gc.disable()
    try:
        train.forward_backward(run, train.shard_microbatches(run, [batch()]), 1.0)
        assert [one() for one in found] == [None]
    finally:
        gc.enable()


def test_the_names_of_kinds_are_no_setting():
    """The same layers with the kinds called otherwise are the same run, and another source is another one."""
    renamed = config_of(
        model__pattern="2 near, block, near, (local_reader, reader)...",
        model__blocks__near__mixer__window=5,
        model__blocks__near__mixer__rope__base=10000.0,
        model__blocks__local_reader__mixer__keys_of="near",
    )
    assert differing_settings(config_of(), renamed).keys() == set()
    assert differences(config_of().model, renamed.model) == {}
    other = config_of(model__pattern="2 local, block, (local_reader, reader)...")
    assert differing_settings(config_of(), other).keys() == {"model.pattern"}


# ---- refused -----------------------------------------------------------------------------------------------

READ = "model.blocks.reader.mixer.keys_of"
BAD = {
    "no kind": ({READ: "blok"}, "no layers of a kind 'blok' .*: local, block"),
    "a reader": ({READ: "local_reader"}, "no layers of a kind 'local_reader' .*: local, block"),
    "all read": ({"model.mixer.keys_of": "block"}, "model.mixer.keys_of: no layers of a kind 'block'"),
    "none before": ({"model.pattern": "(reader, block)..."}, "layer 0 reads .* put one before it"),
    "other heads": ({"model.blocks.reader.mixer.kv_heads": 1}, "reader.mixer.keys_of: .* other heads"),
    "another RoPE": ({"model.blocks.reader.mixer.rope.base": 5}, "reader.mixer.keys_of: .* another RoPE"),
    "ahead": ({"model.mtp.modules": 1}, "model.mtp: .* leave model.mtp out"),
}


@pytest.mark.parametrize("keys,message", BAD.values(), ids=BAD)
def test_what_cannot_be_read_is_refused(keys, message):
    cfg = resolve("shared-keys-tiny", None, [f"--{key}={value}" for key, value in (SETTINGS | keys).items()])
    with pytest.raises(config.ConfigError, match=message):
        check_rules(cfg)
