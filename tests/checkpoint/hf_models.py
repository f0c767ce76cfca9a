"""Models of the Hugging Face tests: with other keys, and compared key by key.

Keys are those of ModelConfig, and FLAT ones too, by which the records of families say experts: `experts`,
`first_dense` (config/reading/flat.py). With one of these, `mlp` is that of the layers without experts.
"""

import math

from checkpoint.hf.families.family import FOLDED, NOT_THE_MODEL
from config import ModelConfig, MTPConfig, MupConfig, head_dim, kv_heads, layer_model, value_dim
from config.reading import build_tree, merge
from config.reading.flat import FLAT_NAMES, FLAT_TRAINING_NAMES, LIMITS, FlatModel, flat_model, from_flat
from config.reading.kinds import every_path
from config.tree import has_path, is_below, leaves, plain_data
from model.attention import AttentionConfig, ChannelGate
from model.delta import DeltaConfig, KimiConfig
from model.mamba import MambaConfig, ShortConvConfig
from model.mla import LatentConfig
from model.mlp import MLPConfig, SharedExpertsConfig
from model.norm import LayerNormConfig
from model.rope import GrowthConfig, LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling
from model.router import BalanceLossConfig, CapacityConfig, ExpertsConfig, RouterConfig

PATHS = every_path(ModelConfig)
FLAT = FLAT_NAMES | FLAT_TRAINING_NAMES | LIMITS
# Of a mixture, what only its training reads.
TRAINING = ("mlp.router.jitter", "mlp.router.aux", "mlp.router.z_loss", "mlp.capacity")
EXPERTS = {"mlp": {"kind": "experts", "experts": 8, "top_k": 3, "width": 20, "activation": "swiglu"}}
OF_EXPERTS = (ExpertsConfig, RouterConfig, SharedExpertsConfig, BalanceLossConfig, CapacityConfig)
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
    ChannelGate: {"mixer": {"kind": "attention", "gate": {"kind": "channel"}}},
    MLPConfig: {"mlp": {"kind": "mlp"}},
    SharedExpertsConfig: {"mlp.shared": {}},
    BalanceLossConfig: {"mlp.router.aux": {"weight": 0.01}},
    CapacityConfig: {"mlp.capacity": {"factor": 1.5}},
    LayerNormConfig: {"norm.kind": "layernorm"},
    MTPConfig: {"mtp": {}},
    MupConfig: {"mup.base": 8},
}


PATTERN = {"blocks": {"local": {"mixer.window": 5}}, "pattern": "(local, block)..."}


def changed(model, change):
    """The model with other values: {path: value}."""
    if FLAT.keys() & change.keys():
        return from_flat_keys(merge(plain_data(flat_model(model)[0]), change, FlatModel))
    return build_tree(ModelConfig, merge(plain_data(model), change, ModelConfig))


def from_flat_keys(keys):
    """The model of these keys, with flat ones among them."""
    return build_tree(ModelConfig, from_flat(keys))


def with_part(model, path):
    """The model with the part to which a key belongs."""
    owner, _ = PATHS[path]
    if owner in OF_EXPERTS and not isinstance(model.mlp, ExpertsConfig):
        model = changed(model, EXPERTS)
    return model if has_path(model, path) else changed(model, LACKED[owner])


def with_key(model, path, value):
    """The model with this value of a key; it gets the part to which the key belongs."""
    if path in ("blocks", "pattern"):
        return changed(model, {**PATTERN, path: value})
    if path not in FLAT:
        model = with_part(model, path)
    return changed(model, {path: value})


def without_meaning():
    """Keys whose values say nothing about the function of the weights, or are folded into them."""
    return {*NOT_THE_MODEL, *FOLDED, *TRAINING}


def values_of(model):
    """{key: value} of a model whose layers are alike, with a number where none stands for one."""
    values = dict(leaves(model))
    if isinstance(model.mixer, AttentionConfig):
        values["mixer.kv_heads"] = kv_heads(model)
        values["mixer.head_dim"] = head_dim(model)
        values["mixer.value_dim"] = value_dim(model)
    if isinstance(model.mixer, DeltaConfig):
        values["mixer.key_heads"] = model.mixer.key_heads or model.mixer.heads
    if isinstance(model.mlp, ExpertsConfig):
        values["mlp.router.bias_rate"] = model.mlp.router.bias_rate is not None
    return values


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
    values = [values_of(model) for model in (first, second)]
    ignored = without_meaning()
    found = {}
    for path in values[0].keys() | values[1].keys():
        pair = [of_model.get(path, "absent") for of_model in values]
        if not is_below(path, ignored) and not same(*pair, tolerance):
            found[path] = pair
    return found
