"""The table of the Hugging Face families: every field of the model and every tensor has a form in it, has no
effect, or is refused by name; nothing is lost on the way to a config.json and back."""

import ast
import dataclasses
import json
import lzma
import math
import typing
from dataclasses import fields, make_dataclass, replace
from pathlib import Path

import pytest
import torch

import config
from checkpoint import hf, hf_config
from checkpoint.hf_families import FAMILIES, FOLDED, NOT_THE_MODEL
from checkpoint.hf_rules import FieldGroup, Fixed, spell_out
from config import ConfigError, ModelConfig
from parallel.sharding.boxes import Box

ROOT = Path(__file__).parent.parent.parent
WRITTEN = Path(__file__).parent / "config_json.txt.xz"  # NAME CONFIG_JSON of each preset, as first published
TYPES = typing.get_type_hints(ModelConfig)
FAMILY_PRESETS = {
    "gpt2": "gpt2-tiny",
    "llama": "llama3-tiny",
    "mistral": "mistral-tiny",
    "qwen2": "qwen2.5-tiny",
    "qwen3": "qwen3-tiny",
    "mixtral": "mixtral-tiny",
    "qwen2_moe": "qwen2-moe-tiny",
    "qwen3_moe": "qwen3-moe-tiny",
    "olmoe": "olmoe-tiny",
    "dots1": "dots1-tiny",
    "deepseek_v2": "deepseek-v2-lite-tiny",
    "deepseek_v3": "deepseek-v3-tiny",
    "seed_oss": "llama3-tiny",
    "starcoder2": "gpt2-tiny",
    "solar_open": "dots1-tiny",
    "sarvam_moe": "dots1-tiny",
    "hy_v3": "dots1-tiny",
    "glm4_moe_lite": "deepseek-v3-tiny",
    "youtu": "deepseek-v3-tiny",
    "internlm3": "llama3-tiny",
    "phi3": "mistral-tiny",
    "kimi_k2": "deepseek-v3-tiny",
}
CHANGED = {  # of the preset
    "seed_oss": {"bias": True, "heads": 3, "kv_heads": 1, "head_dim": 40},
    "starcoder2": {"positions": "rope"},
    "solar_open": {"qk_norm": False, "first_dense": 0},
    "sarvam_moe": {"qkv_bias": True},
    "hy_v3": {"router_groups": 1, "router_group_top_k": 1, "router_renorm": True},
    "youtu": {"experts": None, "mtp": 0},
}


def preset(name):
    entry = config.presets()[name]
    return config.build_tree(
        ModelConfig, {"vocab": 1000, **{k: v for k, v in entry.items() if k != "recipe"}}
    )


def start_of(model_type):
    """A model of the family."""
    return replace(preset(FAMILY_PRESETS[model_type]), **CHANGED.get(model_type, {}))


def models(model_type):
    """Models of a family, with and without what it may have."""
    plain = start_of(model_type)
    yarn = {
        "rope_factor": 4.0,
        "rope_kind": "yarn",
        "rope_low_freq": 0.5,
        "rope_high_freq": 30.0,
        "rope_original": 16,
    }
    changes = [
        {},
        {"tied": True},
        {"window": 64},
        {"rope_factor": 8.0, "rope_original": 16},
        yarn,
        {**yarn, "rope_mscale": 0.7},
        {**yarn, "rope_mscale": 0.7, "rope_mscale_all": 0.9},
        {"head_dim": 40},
        {"kv_heads": 1},
        {"bias": True},
        {"ffn": 36},
        {"first_dense": 1},
        {"moe_every": 2},
        {"shared_experts": 3},
        {"router_groups": 2, "router_group_top_k": 2},
        {"experts": None},
        {"q_rank": None},
        {"mtp": 0},
        {"rope_pairs": False},
        {"qkv_bias": False},
    ]
    found = [replace(plain, **change) for change in changes]
    return [model for model in found if not FAMILIES[model_type].obstacles(model)]


def effective(model):
    """{field: value} of what counts in this model."""
    ignored = {*NOT_THE_MODEL, *FOLDED, *config.no_effect(model)}
    return {
        item.name: getattr(spell_out(model), item.name) for item in fields(model) if item.name not in ignored
    }


def same(a, b):
    return math.isclose(a, b, rel_tol=1e-12) if isinstance(a, float) and isinstance(b, float) else a == b


def other_value(name, value):
    """A value of the field that is not this one."""
    kinds = typing.get_args(TYPES[name])
    if typing.get_origin(TYPES[name]) is typing.Literal:
        return next(kind for kind in kinds if kind != value)
    if isinstance(value, bool):
        return not value
    if value is None:
        return next(kind for kind in kinds if kind is not type(None))(2)
    return f"{value}-other" if isinstance(value, str) else value * 2 or type(value)(1)


def written_lines():
    with lzma.open(WRITTEN, "rt") as lines:
        return lines.read().splitlines()


@pytest.mark.parametrize("line", written_lines(), ids=lambda line: line.split()[0])
def test_a_preset_is_written_as_ever(line):
    """Byte for byte, the order of the keys included: a folder of today equals one of yesterday."""
    name, _, text = line.partition(" ")
    assert (
        json.dumps(
            hf_config.to_hf_config(preset(name), "bfloat16", {"bos_token_id": 1, "eos_token_id": None})
        )
        == text
    )


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_group_reads_what_it_writes(model_type):
    family = FAMILIES[model_type]
    assert len(models(model_type)) > 2
    groups = [rule for rule in family.rules if isinstance(rule, FieldGroup) and rule.fields]
    assert groups
    for model in models(model_type):
        keys = {**family.defaults, **family.write(model)}
        for group in groups:
            got = {**{name: getattr(ModelConfig(), name) for name in group.fields}, **group.read(keys)}
            back = spell_out(replace(model, **got))
            for name in set(group.fields) & effective(model).keys():
                assert same(getattr(back, name), getattr(spell_out(model), name)), (group, name, model)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_two_rules_never_write_one_key(model_type):
    model = spell_out(start_of(model_type))
    keys = [key for rule in FAMILIES[model_type].rules for key in rule.write(model)]
    assert len(keys) == len(set(keys))


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("name", [item.name for item in fields(ModelConfig)])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_is_written_without_effect_or_refused(model_type, name):
    family = FAMILIES[model_type]
    base = start_of(model_type)
    model = replace(base, **{name: other_value(name, getattr(base, name))})
    ignored = {*NOT_THE_MODEL, *FOLDED, *config.no_effect(model)}
    lost = family.obstacles(model)
    if lost:
        assert not set(lost) & ignored
        covered = any(name in rule.fields for rule in family.rules)
        assert name in lost or covered  # heads, say, which makes a head_dim that has no key
        return
    back = config.build_tree(ModelConfig, family.read(family.write(model)))
    for key, value in effective(model).items():
        assert same(getattr(spell_out(back), key), value), key


@pytest.mark.slow(every=3)
@pytest.mark.parametrize(
    "name, value, default",
    [
        ("sinks", 4, 0),
        ("gated", True, False),
        ("gated", False, True),
        ("pattern", (1, 2), ()),
        ("size", 3, dataclasses.MISSING),
    ],
)
def test_a_key_that_the_table_does_not_know_is_refused(name, value, default):
    """Of a feature that somebody adds to the model: at its default there is none, any other value has no form
    anywhere.
    """
    item = (
        (name, type(value), default)
        if default is not dataclasses.MISSING
        else (name, type(value), dataclasses.field(kw_only=True))
    )
    extended = make_dataclass("Extended", [item], bases=(ModelConfig,), frozen=True)
    for model_type in FAMILIES:
        base = {field.name: getattr(start_of(model_type), field.name) for field in fields(ModelConfig)}
        model = extended(**base, **{name: value})
        assert name in FAMILIES[model_type].obstacles(model)
        with pytest.raises(ConfigError) as refused:
            hf_config.to_hf_config(model, "float32", {})
        shown = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
        written_as = hf_config.family_of(start_of(model_type))
        wanted = f"model.{name}: {shown} has no form in {written_as}, the nearest Hugging Face family; "
        assert str(refused.value).startswith(wanted)
        if default is not dataclasses.MISSING:
            assert FAMILIES[model_type].obstacles(extended(**base)) == []


@pytest.mark.parametrize(
    "model_type, key",
    [
        ("llama", "layers.0.attn.gate.weight"),
        ("llama", "layers.0.attn.q_norm.weight"),
        ("llama", "layers.0.attn_norm.bias"),
        ("llama", "layers.0.attn.q.scale"),
        ("llama", "sinks"),
        ("mistral", "layers.1.attn.o.bias"),
        ("qwen2", "layers.1.attn.o.bias"),
        ("gpt2", "head.bias"),
        ("qwen3_moe", "layers.1.mlp.router.bias"),
        ("mixtral", "layers.1.mlp.shared.up.weight"),
        ("deepseek_v2", "layers.2.join.weight"),
        ("olmoe", "layers.0.mlp.experts.3.gate.bias"),
    ],
)
def test_a_tensor_that_the_table_does_not_know_is_refused_before_a_file_is_made(tmp_path, model_type, key):
    model = start_of(model_type)
    pieces = [(Box.whole(name, (4,)), torch.ones(4)) for name in ("norm.weight", key)]
    with pytest.raises(ConfigError, match=f"^{key}: this tensor has no form in {model_type}") as refused:
        hf.write_weights(tmp_path, model_type, model, pieces, dtype=torch.float32)
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=f"^{key}: "):
        hf.read_weights(model_type, model, {}, pieces)


def test_names_keep_their_numbers():
    assert (
        FAMILIES["mixtral"].hf_name("layers.31.mlp.experts.7.up.weight")
        == "model.layers.31.block_sparse_moe.experts.7.w3.weight"
    )
    assert FAMILIES["gpt2"].hf_name("layers.3.attn.k.bias") == "transformer.h.3.attn.c_attn.bias"
    assert (
        FAMILIES["deepseek_v3"].hf_name("layers.61.mlp.router.bias")
        == "model.layers.61.mlp.gate.e_score_correction_bias"
    )
    assert FAMILIES["dots1"].hf_name("embed.weight") == "model.embed_tokens.weight"


def test_no_other_file_knows_a_family():
    """Outside the table no code names a model_type: a new family is one record."""
    files = [*(ROOT / "checkpoint").glob("*.py"), ROOT / "scripts" / "convert.py"]
    assert len(files) > 8
    for file in files:
        if file.name == "hf_families.py":
            continue
        words = {
            node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
        }
        named = {word for word in words if isinstance(word, str)} & FAMILIES.keys()
        assert not named, f"{file.name} names {named}"


ROPE_WORDS = {
    "rope_factor": 4.0,
    "rope_kind": "yarn",
    "rope_low_freq": 1.0,
    "rope_high_freq": 30.0,
    "rope_original": 16,
}


@pytest.mark.parametrize(
    "model_type, change, name",
    [
        ("llama", {**ROPE_WORDS, "rope_kind": "longrope"}, "rope_kind"),  # a kind that somebody adds
        ("llama", {**ROPE_WORDS, "rope_mscale": 0.7, "rope_mscale_all": 0.7}, "rope_mscale_all"),
        ("deepseek_v3", {**ROPE_WORDS, "rope_mscale": 0.0, "rope_mscale_all": 0.7}, "rope_mscale"),
        (
            "llama",
            {**ROPE_WORDS, "rope_low_freq": 0.0},
            "rope_low_freq",
        ),  # transformers reads 0 as its default
        ("deepseek_v2", {"router_groups": 1, "router_group_top_k": 2}, "router_group_top_k"),
        ("deepseek_v2", {"kv_heads": 1}, "kv_heads"),
        ("deepseek_v2", {"heads": 3}, "heads"),  # transformers wants hidden % heads == 0
        ("deepseek_v3", {"experts": None}, "mtp"),  # in transformers every such module has experts
        ("dots1", {"window": 5}, "window"),
        ("qwen2_moe", {"shared_experts": 0}, "shared_experts"),
        ("mixtral", {"moe_ffn": 7}, "moe_ffn"),
        ("olmoe", {"head_dim": 40}, "head_dim"),
        ("gpt2", {"kv_heads": 1}, "kv_heads"),
        ("llama", {"router": "sigmoid", "experts": 4}, "router"),
        ("mixtral", {"experts": None}, "experts"),
    ],
)
def test_what_a_group_cannot_express_is_refused(model_type, change, name):
    """Each would come back as another value, or as another model."""
    assert name in FAMILIES[model_type].obstacles(replace(start_of(model_type), **change))


def test_fixed_fields_are_those_of_the_family():
    """What a family does not vary is refused at another value, with or without experts."""
    for model_type in FAMILIES:
        for rule in FAMILIES[model_type].rules:
            if isinstance(rule, Fixed):
                model = replace(start_of(model_type), **{rule.name: other_value(rule.name, rule.value)})
                assert rule.name in FAMILIES[model_type].obstacles(model) or rule.name in config.no_effect(
                    model
                )
