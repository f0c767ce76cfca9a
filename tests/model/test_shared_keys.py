"""Layers that read the keys and values of earlier ones: beside transformers, from a cache, and what is
refused. (Across stages and with every parallel axis: tests/test_invariance.py.)"""

import gc
import weakref
from unittest import mock

import pytest
import small_runs
import torch
from small_runs import check_cache, compute_weights, gradients_of
from torch.nn.functional import cross_entropy
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM

import config
import train
from checkpoint.state import differing_settings
from config.reading.function import differences
from config.reading.suggestions import check_rules
from model.shared_keys import (
    SharedKeys,
    carried_into,
    key_sources,
    pack_keys,
    unpack_keys,
    widths_between_stages,
)
from parallel.microbatch import Microbatch

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


def build_config(keys=None):
    return small_runs.build_config("shared-keys-tiny", SETTINGS | (keys or {}))


def forecast_run(keys=None):
    return small_runs.forecast_run("shared-keys-tiny", SETTINGS | (keys or {}), spread=0.2)


@pytest.fixture(scope="module")
def run():
    return forecast_run()


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
    run = forecast_run({"model.layers": 8})
    theirs = theirs_of(run.cfg).double()
    named = dict(theirs.named_parameters())
    for key, x in compute_weights(run).items():
        named.pop(their_name(key)).data.copy_(x)
    assert not named  # ours are all that they have

    one = batch()
    loss = train.forward_backward(run, train.shard_microbatches(run, [one]), 1.0)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        out = theirs(input_ids=one.tokens, output_hidden_states=True)  # without it, of the last token alone
    wanted = cross_entropy(out.logits.flatten(0, 1), one.targets.flatten(), reduction="sum")
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-7, atol=0)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for key, x in gradients_of(run).items():
        want = gradients[their_name(key)]
        torch.testing.assert_close(x, want, rtol=0, atol=1e-5 * float(want.abs().max()))


# ---- one process -------------------------------------------------------------------------------------------

def test_a_reader_projects_queries_alone(run):
    assert dict(key_sources(run.cfg.model)) == SOURCES
    keys = compute_weights(run).keys()
    for layer in range(7):
        assert (f"layers.{layer}.attn.k.weight" in keys) == (layer not in SOURCES)
        assert (f"layers.{layer}.attn.k_norm.weight" in keys) == (layer not in SOURCES)
        assert f"layers.{layer}.attn.q.weight" in keys


def test_the_cache_changes_nothing_and_readers_keep_no_keys(run):
    for kept in check_cache(run.stages[0], (0, *range(9, S + 1))):
        assert {layer for layer, _ in kept} == {0, 1, 2, 3}


def test_what_travels_between_stages_is_what_is_still_read():
    model = build_config().model
    assert [carried_into(model, first) for first in range(8)] == [[], [], [], [2], [2, 3], [2, 3], [3], []]


@pytest.mark.parametrize("sp", [False, True])
def test_keys_arrive_as_they_were_sent(sp):
    """Those of two layers, of one rank of two, beside its hidden states."""
    cfg = build_config({"parallel.tp": 2, "parallel.sp": sp})
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, S // 2 if sp else S, 32, generator=draw)
    pairs = {layer: tuple(torch.randn(2, 2, S, 1, 8, generator=draw)) for layer in (2, 3)}
    sent = pack_keys(x, SharedKeys(SOURCES, pairs | {0: pairs[2]}), cfg, first=5)
    assert sent.shape == (*x.shape[:2], widths_between_stages(cfg, [(0, 5), (5, 7)])[1])

    arrived = SharedKeys(SOURCES)
    assert unpack_keys(sent, arrived, cfg, first=5).equal(x)
    assert arrived.kept.keys() == pairs.keys()
    for layer, pair in pairs.items():
        assert all(map(torch.equal, arrived.kept[layer], pair))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_keys_that_were_read_are_freed_with_their_step(recompute):
    """Without the collector of cycles: each would hold a microbatch's activations until it runs."""
    run = forecast_run({"parallel.recompute": recompute})
    stage = run.stages[0]
    found = []
    real = stage.context_of

    def noted(*args):
        context = real(*args)
        found.append(weakref.ref(context))
        return context

    stage.context_of = noted
    gc.collect()
    gc.disable()
    try:
        train.forward_backward(run, train.shard_microbatches(run, [batch()]), 1.0)
        assert [one() for one in found] == [None]
    finally:
        gc.enable()


def test_the_names_of_kinds_are_no_setting():
    """The same layers with the kinds called otherwise are the same run, and another source is another one."""
    renamed = build_config({
        "model.pattern": "2 near, block, near, (local_reader, reader)...",
        "model.blocks.near.mixer.window": 5,
        "model.blocks.near.mixer.rope.base": 10000.0,
        "model.blocks.local_reader.mixer.keys_of": "near",
    })
    assert differing_settings(build_config(), renamed).keys() == set()
    assert differences(build_config().model, renamed.model) == {}
    other = build_config({"model.pattern": "2 local, block, (local_reader, reader)..."})
    assert differing_settings(build_config(), other).keys() == {"model.pattern"}


# ---- refused -----------------------------------------------------------------------------------------------

READ = "model.blocks.reader.mixer.keys_of"
BAD = {
    "no kind": ({READ: "blok"}, "no layers of a kind 'blok' .*: local, block"),
    "a reader": ({READ: "local_reader"}, "no layers of a kind 'local_reader' .*: local, block"),
    "all read": ({"model.mixer.keys_of": "block"}, "model.mixer.keys_of: no layers of a kind 'block'"),
    "none before": ({"model.pattern": "(reader, block)..."}, "layer 0 reads .* put one before it"),
    "other heads": ({"model.blocks.reader.mixer.kv_heads": 1},
                    "reader.mixer.keys_of: .* different key heads"),
    "another RoPE": ({"model.blocks.reader.mixer.rope.base": 5}, "reader.mixer.keys_of: .* a different RoPE"),
    "ahead": ({"model.mtp.modules": 1}, "model.mtp: .* leave model.mtp out"),
}


@pytest.mark.parametrize("keys,message", BAD.values(), ids=BAD)
def test_what_cannot_be_read_is_refused(keys, message):
    with pytest.raises(config.ConfigError, match=message):
        check_rules(build_config(keys))
