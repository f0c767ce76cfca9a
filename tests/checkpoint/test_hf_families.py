"""The table of the Hugging Face families: every field of the model and every tensor has a form in it, has no
effect, or is refused by name; nothing is lost on the way to a config.json and back."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import json
import lzma
import typing
from dataclasses import fields, make_dataclass, replace
from operator import getitem
from pathlib import Path

import pytest
import torch
import whole_folder
from hf_models import (
    LACKED,
    PATHS,
    changed,
    differences,
    from_flat_keys,
    general_model,
    preset,
    with_part,
    without_meaning,
)

import config
from checkpoint.hf import config as hf_config
from checkpoint.hf.families.family import Family
from checkpoint.hf.families.table import FAMILIES
from checkpoint.hf.rules import FamilyError, FieldGroup, Fixed, spell_out
from config import ConfigError, ModelConfig
from config.reading import build_tree, defaults, merge
from config.reading.flat import FLAT_NAMES, FlatModel, flat_model
from config.reading.kinds import members_of, part_types
from config.tree import field_types, has_path, is_below, plain_data, value_at, with_values
from model.attention import AttentionConfig, ChannelGate
from model.mamba import ShortConvConfig
from model.mla import LatentConfig
from model.mlp import MLPConfig
from model.rope import Llama3Scaling
from model.router import ExpertsConfig, RouterConfig, has_experts
from parallel.sharding.boxes import Box

ROOT = Path(__file__).parent.parent.parent
WRITTEN = Path(__file__).parent / "config_json.txt.xz"  # NAME CONFIG_JSON of each preset, as first published


def models(model_type):
    """Models of a family, with and without what it may have."""
    plain = general_model(model_type)
    yarn = {"kind": "yarn", "factor": 4.0, "low_freq": 0.5, "high_freq": 30.0, "original": 16}
    changes = [
        {},
        {"tied": True},
        {"mixer.window": 64},
        {"mixer.rope.scaling": {"kind": "llama3", "factor": 8.0, "original": 16}},
        {"mixer.rope.scaling": yarn},
        {"mixer.rope.scaling": {**yarn, "mscale": 0.7}},
        {"mixer.rope.scaling": {**yarn, "mscale": 0.7, "mscale_all": 0.9}},
        {"mlp.bias": True},
        {"mlp.width": 36},
        {"first_dense": 1},
        {"moe_every": 2},
        {"shared_experts": 3},
        {"router_groups": 2, "router_group_top_k": 2},
        {"experts": None},
        {"mtp": None},
        {"mixer.rope.pairs": False},
    ]
    of_latent = [{"mixer.q_rank": None}]
    of_attention = [
        {"mixer.head_dim": 40},
        {"mixer.kv_heads": 1},
        {"mixer.bias": "all"},
        {"mixer.bias": "all", "mlp.bias": True},
        {"mixer.bias": None},
    ]
    changes += of_latent if isinstance(plain.mixer, LatentConfig) else of_attention
    found = []
    for change in changes:
        with contextlib.suppress(ConfigError):  # modules for further tokens that would have other MLPs
            found.append(changed(plain, change))
    return [model for model in found if not FAMILIES[model_type].obstacles(model)]


def other_changes(model, path):
    """Changes of the model by which this key has another value; none of a part that no model lacks."""
    place, _, name = path.rpartition(".")
    owner = value_at(model, place) if place else model
    hint, value = field_types(type(owner))[name], getattr(owner, name)
    if path in ("blocks", "pattern"):
        return [{"blocks": {"other": {"norm.eps": 0.5}}, "pattern": "(block, other)..."}]
    if path == "mixer.kind":
        return [LACKED[LatentConfig if value == "attention" else AttentionConfig]]
    if path == "mixer.rope.scaling.kind":
        others = {"llama3": "yarn", "yarn": "llama3", "linear": "yarn", "longrope": "linear"}
        return [{path: others[value]}]
    if path == "mixer.gate.kind":
        return [{path: "head" if value == "channel" else "channel"}]
    if part_types(hint) and type(None) not in members_of(hint):
        return []
    if part_types(hint):
        return [LACKED[part_types(hint)[0]] if value is None else {path: None}]
    return [{path: other} for other in other_values(hint, value)]


def other_values(hint, value):
    """Values of a key that are not this one: each other word, or one of another kind."""
    if isinstance(value, tuple):
        return [[number * 2 for number in value]]
    kinds = members_of(hint)
    words = [word for kind in kinds for word in typing.get_args(kind)]
    if words:
        return [word for word in [*words, *[None] * (type(None) in kinds)] if word != value]
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [next(kind for kind in kinds if kind is not type(None))(2)]
    none = [None] * (type(None) in kinds)
    return [f"{value}-other" if isinstance(value, str) else value * 2 or type(value)(1), *none]


def other_flat_values(model, name):
    """Values of a flat key that are not that of the model."""
    value = getattr(spell_out(model), name)
    words = {"router": ("softmax", "sigmoid"), "router_weighs": ("output", "input")}
    if name in words:
        return [word for word in words[name] if word != value]
    if isinstance(value, bool):
        return [not value]
    return [8 if value is None else value * 2 or 1]


def other_changes_of_rule(model, name):
    """other_changes; of a flat key, by that."""
    if name in FLAT_NAMES:
        return [{name: value} for value in other_flat_values(model, name)]
    return other_changes(model, name)


def written_lines():
    with lzma.open(WRITTEN, "rt") as lines:
        return lines.read().splitlines()


@pytest.mark.parametrize("line", written_lines(), ids=lambda line: line.split()[0])
def test_a_preset_is_written_byte_for_byte_as_first_published(line):
    """The order of the keys included. The width of dense MLPs that no layer has is that of an expert."""
    name, _, text = line.partition(" ")
    tokens = {"bos_token_id": 1, "eos_token_id": None}
    assert json.dumps(hf_config.to_hf_config(preset(name), "bfloat16", tokens)) == text


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_group_reads_what_it_writes(model_type):
    family = FAMILIES[model_type]
    assert len(models(model_type)) > 2
    groups = [rule for rule in family.rules if isinstance(rule, FieldGroup) and rule.fields]
    assert groups
    for model in models(model_type):
        keys = {**family.defaults, **family.write(model)}
        gate = getattr(model.mixer, "gate", None) and ChannelGate()
        is_latent = isinstance(model.mixer, LatentConfig)
        blank = LatentConfig(kv_rank=1) if is_latent else AttentionConfig(gate=gate)
        bare = plain_data(FlatModel(mixer=blank, mlp=MLPConfig(), norm=type(model.norm)())) | {"blocks": None}
        stated = plain_data(flat_model(model)[0])
        for group in groups:
            plain = {name: functools.reduce(getitem, name.split("."), bare) for name in group.fields}
            without = merge(stated, plain, FlatModel)
            back = from_flat_keys(merge(without, group.read(keys), FlatModel))
            assert not differences(model, back), (group, model)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_two_rules_never_write_one_key(model_type):
    model = spell_out(general_model(model_type))
    keys = [key for rule in FAMILIES[model_type].rules for key in rule.write(model)]
    assert len(keys) == len(set(keys))


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_is_written_without_effect_or_refused(model_type, path):
    family = FAMILIES[model_type]
    base = with_part(general_model(model_type), path)
    for change in other_changes(base, path):
        model = changed(base, change)
        lost = family.obstacles(model)
        if lost:
            assert not any(is_below(name, without_meaning()) for name in lost)
            place = path
            if not has_path(general_model(model_type), path):  # the part that the family's model lacks
                place = path.rpartition(".")[0]
            while not has_path(general_model(model_type), place):
                place = place.rpartition(".")[0]
            covered = any(is_below(path, rule.fields) for rule in family.rules)
            # kinds of blocks may state more of the part, which is then theirs alone
            by_kinds = any(is_below(name, [path]) for variant in model.blocks for name, _ in variant.changes)
            covered |= by_kinds and "blocks" in lost
            # heads, say, which makes a head_dim that has no key
            assert covered or any(is_below(name, [place]) for name in lost)
            continue
        back = build_tree(ModelConfig, family.read(family.write(model)))
        assert not differences(model, back)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("name, value, default", [
    ("sinks", 4, 0), ("gated", True, False), ("gated", False, True), ("places", (1, 2), ()),
    ("size", 3, dataclasses.MISSING),
])
def test_a_key_that_the_table_does_not_know_is_refused(name, value, default):
    """A feature that somebody adds to the model: only its default has a form in a family."""
    has_default = default is not dataclasses.MISSING
    item = (name, type(value), default if has_default else dataclasses.field(kw_only=True))
    extended = make_dataclass("Extended", [item], bases=(ModelConfig,), frozen=True)
    for model_type in FAMILIES:
        base = {field.name: getattr(general_model(model_type), field.name) for field in fields(ModelConfig)}
        model = extended(**base, **{name: value})
        assert name in FAMILIES[model_type].obstacles(model)
        with pytest.raises(ConfigError) as refused:
            hf_config.to_hf_config(model, "float32", {})
        shown = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
        written_as = hf_config.family_of(general_model(model_type))
        wanted = f"model.{name}: {shown} has no form in {written_as}, the nearest Hugging Face family; "
        assert str(refused.value).startswith(wanted)
        if has_default:
            assert FAMILIES[model_type].obstacles(extended(**base)) == []


@pytest.mark.parametrize("model_type, key", [
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
])
def test_a_tensor_that_the_table_does_not_know_is_refused_before_a_file_is_made(tmp_path, model_type, key):
    model = general_model(model_type)
    pieces = [(Box.whole(name, (4,)), torch.ones(4)) for name in ("norm.weight", key)]
    with pytest.raises(ConfigError, match=f"^{key}: this tensor has no form in {model_type}") as refused:
        whole_folder.write_weights(tmp_path, model_type, model, pieces, dtype=torch.float32)
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=f"^{key}: "):
        whole_folder.read_weights(model_type, model, {}, pieces)


@pytest.mark.parametrize("model_type, ours, theirs", [
    ("mixtral", "layers.31.mlp.experts.7.up.weight", "model.layers.31.block_sparse_moe.experts.7.w3.weight"),
    ("gpt2", "layers.3.attn.k.bias", "transformer.h.3.attn.c_attn.bias"),
    ("deepseek_v3", "layers.61.mlp.router.bias", "model.layers.61.mlp.gate.e_score_correction_bias"),
    ("dots1", "embed.weight", "model.embed_tokens.weight"),
])
def test_names_keep_their_numbers(model_type, ours, theirs):
    assert FAMILIES[model_type].hf_name(ours, defaults().model) == theirs


def test_the_table_has_each_record():
    """Each record stands in its file under its model_type, and the table leaves none out."""
    found = {}
    for file in (ROOT / "checkpoint" / "hf" / "families").glob("[!_]*.py"):
        module = importlib.import_module(f"checkpoint.hf.families.{file.stem}")
        found |= {name: value for name, value in vars(module).items() if isinstance(value, Family)}
    assert found == {model_type.upper(): family for model_type, family in FAMILIES.items()}


def test_no_other_file_knows_a_family():
    """Outside the records no code names a model_type: a new family is one record. torchtitan.py alone says of
    its models which of these compute the same."""
    folder = ROOT / "checkpoint" / "hf" / "families"
    shared = [folder / name for name in ("family.py", "names.py", "rules.py")]
    every = (ROOT / "checkpoint").rglob("*.py")
    others = [file for file in every if file.parent != folder]
    files = [*others, *shared, ROOT / "scripts" / "convert.py"]
    assert len(files) > 40
    for file in files:
        if file.name == "torchtitan.py":
            continue
        nodes = ast.walk(ast.parse(file.read_text()))
        words = {node.value for node in nodes if isinstance(node, ast.Constant)}
        named = {word for word in words if isinstance(word, str)} & FAMILIES.keys()
        assert not named, f"{file.name} names {named}"


YARN = {"kind": "yarn", "factor": 4.0, "low_freq": 1.0, "high_freq": 30.0, "original": 16}


@pytest.mark.parametrize("model_type, change, name", [
    ("deepseek_v3", {"mixer.rope.scaling": {**YARN, "mscale": 0.0, "mscale_all": 0.7}},
     "mixer.rope.scaling.mscale"),
    (
        "llama",
        {"mixer.rope.scaling": {**YARN, "low_freq": 0.0}},  # transformers reads 0 as its default
        "mixer.rope.scaling.low_freq",
    ),
    ("deepseek_v2", {"router_groups": 1, "router_group_top_k": 2}, "mlp.router.group_top_k"),
    ("deepseek_v2", {"mixer.heads": 5}, "mixer.heads"),  # transformers wants hidden % heads == 0
    ("deepseek_v3", {"experts": None}, "mtp"),  # in transformers every such module has experts
    ("deepseek_v2", {"experts": None, "mtp": {}}, "mtp.modules"),
    ("llama", {"mtp": {}}, "mtp.modules"),
    ("dots1", {"mixer.window": 5}, "mixer.window"),
    ("qwen2", {"mixer.bias": "all"}, "mixer.bias"),
    ("internlm3", {"mixer.bias": None}, "mixer.bias"),
    ("internlm3", {"mlp.bias": False}, "mixer.bias"),
    ("qwen2_moe", {"shared_experts": 0}, "mlp.shared"),
    ("mixtral", {"moe_ffn": 7, "first_dense": 1}, "mlp.width"),
    ("olmoe", {"mixer.head_dim": 40}, "mixer.head_dim"),
    ("gpt2", {"mixer.kv_heads": 1}, "mixer.kv_heads"),
    ("llama", {"router": "sigmoid", "experts": 4}, "mlp.router.scores"),
    ("mixtral", {"experts": None}, "mlp.kind"),
])
def test_what_a_group_cannot_express_is_refused(model_type, change, name):
    """Each would come back as another value, or as another model."""
    assert name in FAMILIES[model_type].obstacles(changed(general_model(model_type), change))


MLPS = {"dense": {"mlp": {"kind": "mlp", "width": 40}}, "wider": {"mlp": {"kind": "mlp", "width": 44}}}
GELU = {"dense": {"mlp": {"kind": "mlp", "width": 40, "activation": "gelu"}}}
IN_BLOCKS = {"mlp": {"kind": "mlp", "width": 40}, "pattern": "block, sparse..."}


@pytest.mark.parametrize("change, names", [
    ({"blocks": MLPS, "pattern": "dense, wider, block..."}, ["blocks"]),
    ({"blocks": MLPS, "pattern": "block, dense, block..."}, ["pattern"]),
    ({"blocks": GELU, "pattern": "dense, block..."}, ["blocks"]),
    ({"blocks": {"other": {"mlp.width": 24}}, "pattern": "other, block..."}, ["blocks"]),
    ({"blocks": {"other": {"mlp.router.scale": 2.0}}, "pattern": "block, other..."}, ["blocks"]),
    ({"mlp.router.bias_rate": 1e-3}, ["mlp.router.bias_rate"]),
    ({"mlp.limit": 2.0}, ["mlp.limit"]),
    ({"blocks": {"other": {"mlp.limit": 2.0}}, "pattern": "block, other..."}, ["blocks"]),
    ({**IN_BLOCKS, "blocks": {"sparse": {"mlp": {"kind": "experts", "router.scores": "sigmoid"}}}},
     ["blocks"]),
    ({**IN_BLOCKS, "blocks": {"sparse": {"mlp": {"kind": "experts", "experts": 4}}}}, []),
    ({**IN_BLOCKS, "mlp": "none", "blocks": {"sparse": {"mlp": {"kind": "experts"}}}}, ["blocks", "pattern"]),
    ({"blocks": MLPS, "pattern": "dense..."}, ["mlp.experts"]),
])
def test_layers_that_flat_keys_cannot_say_are_refused(change, names):
    """Layers with other MLPs than the first ones, or with others among themselves, and experts of blocks."""
    model = changed(preset("qwen3-moe-tiny"), {"layers": 4, **change})
    assert FAMILIES["qwen3_moe"].obstacles(model) == names
    if not names:
        family = FAMILIES["qwen3_moe"]
        assert not differences(model, build_tree(ModelConfig, family.read(family.write(model))))


def test_a_mixture_whose_layers_are_all_dense_is_read_as_a_dense_model():
    family = FAMILIES["qwen3_moe"]
    keys = family.defaults | family.write(preset("qwen3-moe-tiny")) | {"intermediate_size": 36}
    for dense in ({"decoder_sparse_step": 9}, {"mlp_only_layers": list(range(keys["num_hidden_layers"]))}):
        model = build_tree(ModelConfig, family.read(keys | dense))
        assert (model.mlp, model.blocks, model.pattern) == (MLPConfig(width=36), (), None)
        assert hf_config.family_of(model) == "qwen3"


@pytest.mark.parametrize("said, words", [
    ({"decoder_sparse_step": 0}, "the step from one layer with experts to the next must be"),
    ({"decoder_sparse_step": 2.5}, "at least 1, not 2.5"),
    ({"num_hidden_layers": 10**9}, "model.layers: 1000000000 must be a whole number from 1 to 100,000"),
    ({"num_hidden_layers": 2.5}, "model.layers: 2.5 must be a whole number"),
])
def test_numbers_that_say_no_layers_are_refused(said, words):
    family = FAMILIES["qwen3_moe"]
    keys = family.defaults | family.write(preset("qwen3-moe-tiny"))
    with pytest.raises(FamilyError, match=words):
        family.read(keys | said)


def test_modules_for_further_tokens_have_the_mlp_of_the_last_layer():
    """A config that says other MLPs for them is refused, whichever way their number is written."""
    flat = {"experts": 4, "layers": 3, "first_dense": 3}
    for mtp in ({"mtp.modules": 1}, {"mtp": {"modules": 1}}):
        with pytest.raises(ConfigError, match="model.mtp: its modules have another kind of MLP"):
            from_flat_keys(flat | mtp)
    assert from_flat_keys(flat | {"first_dense": 2, "mtp.modules": 1}).mtp.modules == 1


def test_dense_layers_keep_a_kind_that_is_called_dense():
    """A saved config may have its own kind of that name beside layers that flat keys make dense."""
    blocks = {"dense": {"mixer.window": 5}}
    model = from_flat_keys(
        {"experts": 4, "layers": 3, "first_dense": 1, "blocks": blocks, "pattern": "block, dense, block"}
    )
    windows = [config.layer_model(model, layer).mixer.window for layer in range(3)]
    assert windows == [None, 5, None]
    assert [has_experts(model, layer) for layer in range(3)] == [False, True, True]


def test_another_value_of_a_fixed_field_is_refused():
    """With or without experts."""
    for model_type in FAMILIES:
        for rule in FAMILIES[model_type].rules:
            if isinstance(rule, Fixed):
                base = general_model(model_type)
                changes = other_changes_of_rule(base, rule.name)
                if rule.name in FLAT_NAMES and rule.name != "experts":
                    base = changed(base, {"experts": 8})
                for change in changes:
                    model = changed(base, change)
                    lost = FAMILIES[model_type].obstacles(model)
                    name = FLAT_NAMES.get(rule.name, rule.name)
                    assert any(is_below(name, [each]) for each in lost), (model_type, rule, lost)


@pytest.mark.parametrize("part", [ExpertsConfig, RouterConfig])
def test_a_key_of_experts_that_the_table_does_not_know_is_refused(part):
    """A feature that somebody adds to the experts: no flat key says it."""
    extended = make_dataclass("Extended", [("sinks", int, 0)], bases=(part,), frozen=True, kw_only=True)
    path = "mlp" if part is ExpertsConfig else "mlp.router"
    for model_type in ("mixtral", "dots1", "llama"):
        model = changed(general_model(model_type), {"experts": 8})
        old = value_at(model, path)
        values = {field.name: getattr(old, field.name) for field in fields(part)}
        for sinks in (0, 4):
            new = with_values(model, {path: extended(**values, sinks=sinks)})
            assert (f"{path}.sinks" in FAMILIES[model_type].obstacles(new)) == (sinks > 0)


def test_a_part_of_a_kind_that_somebody_adds_is_refused():
    """Its other keys are not looked at: the rules know only those of their kinds."""
    words = [("kind", typing.Literal["other"], "other")]
    model = general_model("llama")
    other = make_dataclass("Other", words, bases=(ShortConvConfig,), frozen=True)
    other_mixer = replace(model, mixer=other())
    longer = make_dataclass("Longer", words, bases=(Llama3Scaling,), frozen=True)
    other_scaling = with_values(model, {"mixer.rope.scaling": longer(factor=4.0)})
    for family in FAMILIES.values():
        assert "mixer.kind" in family.obstacles(other_mixer)
        assert family.obstacles(other_scaling)
    assert FAMILIES["llama"].obstacles(other_scaling) == ["mixer.rope.scaling.kind"]
