"""Models of the Hugging Face tests: with other keys, and compared key by key."""

import math

import config
from checkpoint.families.family import FOLDED, NOT_THE_MODEL
from checkpoint.hf_rules import spell_out
from config import (
    AttentionConfig,
    DeltaConfig,
    GrowthConfig,
    KimiConfig,
    LatentConfig,
    LayerNormConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MLPConfig,
    MTPConfig,
    MambaConfig,
    ModelConfig,
    MupConfig,
    RopeConfig,
    ShortConvConfig,
    YarnScaling,
    layer_model,
)
from config.tree import every_path, has_path, is_below, leaves, plain_data

PATHS = every_path(ModelConfig)
NO_KINDS = {"blocks": None, "pattern": None}
LACKED = {  # what a model is given that lacks the part to which a key belongs
    AttentionConfig: {"mixer.kind": "attention"},
    LatentConfig: {
        "mixer": {"kind": "latent", "kv_rank": 12, "rope": {}},
        **NO_KINDS,  # a kind without rotary positions has no place there
    },
    DeltaConfig: {"mixer": {"kind": "delta", "heads": 4, "key_dim": 8, "v_dim": 8}, **NO_KINDS},
    KimiConfig: {"mixer": {"kind": "kimi", "heads": 4, "dim": 8}, **NO_KINDS},
    MambaConfig: {"mixer": {"kind": "mamba", "heads": 4, "dim": 8, "state": 8}, **NO_KINDS},
    ShortConvConfig: {"mixer": {"kind": "short_conv"}, **NO_KINDS},
    RopeConfig: {"mixer.rope": {}},
    Llama3Scaling: {"mixer.rope.scaling": {"kind": "llama3", "factor": 2.0}},
    YarnScaling: {"mixer.rope.scaling": {"kind": "yarn", "factor": 2.0}},
    LinearScaling: {"mixer.rope.scaling": {"kind": "linear", "factor": 2.0}},
    LongRopeScaling: {"mixer.rope.scaling": {"kind": "longrope", "factor": 2.0, "short": [1], "long": [2]}},
    GrowthConfig: {"mixer.growth": {}},
    MLPConfig: {"mlp": {"kind": "mlp"}},
    LayerNormConfig: {"norm.kind": "layernorm"},
    MTPConfig: {"mtp": {}},
    MupConfig: {"mup.base": 8},
}


PATTERN = {"blocks": {"local": {"mixer.window": 5}}, "pattern": "(local, block)..."}


def changed(model, change):
    """The model with other values: {path: value}."""
    return config.build_tree(ModelConfig, config.merge(plain_data(model), change, ModelConfig))


def with_key(model, path, value):
    """The model with this value of a key; it gets the part to which the key belongs."""
    if path in ("blocks", "pattern"):
        return changed(model, {**PATTERN, path: value})
    if not has_path(model, path):
        model = changed(model, LACKED[PATHS[path][0]])
    return changed(model, {path: value})


def without_meaning(model):
    """Keys whose values say nothing about the function of this model's weights, or are folded into them."""
    return {*NOT_THE_MODEL, *FOLDED, *config.no_effect(model)}


def same(a, b, tolerance):
    is_float = isinstance(a, float) and isinstance(b, float)
    return math.isclose(a, b, rel_tol=tolerance) if is_float else a == b


def differences(first, second, tolerance=1e-12):
    """{key: its two values} where they differ and count in one of the models. A key may be in one alone."""
    if first.layers == second.layers and (first.pattern or second.pattern):
        found = {}
        for layer in range(first.layers):
            found |= differences(layer_model(first, layer), layer_model(second, layer), tolerance)
        return found
    values = [dict(leaves(spell_out(model))) for model in (first, second)]
    ignored = without_meaning(first) & without_meaning(second)
    found = {}
    for path in values[0].keys() | values[1].keys():
        pair = [of_model.get(path, "absent") for of_model in values]
        if not is_below(path, ignored) and not same(*pair, tolerance):
            found[path] = pair
    return found
