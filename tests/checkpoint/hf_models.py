"""Models of the Hugging Face tests: with other keys, and compared key by key.

Keys are those of ModelConfig, and FLAT ones too, by which the records of families say experts: `experts`,
`first_dense` (config/reading/flat.py). With one of these, `mlp` is that of the layers without experts.
"""

import functools
import math

from checkpoint.hf.families.family import FOLDED, NOT_THE_MODEL
from config import LoraConfig, ModelConfig, MTPConfig, MupConfig, head_dim, kv_heads, layer_model, value_dim
from config.reading import build_tree, merge, presets
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
    LoraConfig: {"lora": {}},
    MTPConfig: {"mtp": {}},
    MupConfig: {"mup.base": 8},
}


PATTERN = {"blocks": {"local": {"mixer.window": 5}}, "pattern": "(local, block)..."}


def preset(name, change=None):
    """The model of a preset, with other values: {path: value}."""
    entry = {key: value for key, value in presets()[name].items() if key != "recipe"}
    return build_tree(ModelConfig, merge({"vocab": 1000, **entry}, change or {}, ModelConfig))


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


# ---- a model of each family --------------------------------------------------------------------------------

SIZES = {
    "layers": 3, "hidden": 24, "mixer.heads": 4, "mlp.width": 40, "vocab": 50, "vocab_multiple": 64,
    "context": 96,
}
LATENT = {"kind": "latent", "kv_rank": 12, "nope_dim": 6, "rope_dim": 8, "v_dim": 10}
MIXTURE = {"experts": 8, "top_k": 3, "moe_ffn": 20}
SIGMOID = {"router": "sigmoid", "router_bias": True}
LONGROPE = {"kind": "longrope", "factor": 2.0, "short": (1.0, 1.5), "long": (1.0, 3.0)}
GELU = {"norm.kind": "layernorm", "mlp": {"activation": "gelu", "bias": True}}
GEGLU = {"mlp.activation": "geglu"}
COHERE = {"norm": {"kind": "layernorm", "bias": False}, "residual": "parallel", "logit_scale": 0.25}
CONVOLUTIONS = {"blocks": {"conv": {"mixer.kind": "short_conv"}}, "pattern": "(conv, block)..."}
DELTA = {
    "mixer": {"kv_heads": 2, "head_dim": 8, "qk_norm": "head", "gate": "channel", "rope.share": 0.25},
    "blocks": {"linear": {"mixer": {"kind": "delta", "heads": 4, "key_heads": 2, "key_dim": 6, "v_dim": 10}}},
    "pattern": "(linear, block)...",
}
GENERAL = {
    "gpt2": {**GELU, "positions": "learned", "mixer": {"rope": None, "bias": "all"}, "tied": True},
    "llama": {"mixer.kv_heads": 2},
    "mistral": {"mixer": {"kv_heads": 2, "window": 7}},
    "qwen2": {"mixer": {"kv_heads": 2, "bias": "qkv"}},
    "qwen3": {"mixer": {"kv_heads": 2, "qk_norm": "head", "head_dim": 8}},
    "mixtral": {"experts": 8, "top_k": 3},
    "qwen2_moe": {**MIXTURE, "mixer.bias": "qkv", "shared_experts": 2, "shared_gate": True},
    "qwen3_moe": {**MIXTURE, "mixer": {"qk_norm": "head", "head_dim": 8}},
    "olmoe": {"experts": 8, "top_k": 3, "mixer.qk_norm": "whole"},
    "dots1": {**MIXTURE, **SIGMOID, "mixer.qk_norm": "head", "first_dense": 1},
    "deepseek_v2": {
        **MIXTURE, "mixer": {**LATENT, "rope.pairs": True}, "router_renorm": False, "shared_experts": 2,
    },
    "deepseek_v3": {**MIXTURE, **SIGMOID, "mixer": {**LATENT, "q_rank": 14}, "shared_experts": 1, "mtp": {}},
    "seed_oss": {"mixer": {"kv_heads": 1, "heads": 5, "head_dim": 8, "bias": "all"}, "mlp.bias": True},
    "starcoder2": {**GELU, "mixer": {"kv_heads": 2, "bias": "all", "window": 7}},
    "solar_open": {**MIXTURE, **SIGMOID, "mixer": {"kv_heads": 2, "head_dim": 8}, "shared_experts": 1},
    "sarvam_moe": {**MIXTURE, **SIGMOID, "mixer": {"qk_norm": "head", "bias": "qkv"}, "first_dense": 1},
    "hy_v3": {**MIXTURE, **SIGMOID, "mixer.qk_norm": "head", "first_dense": 2, "shared_experts": 1},
    "glm4_moe_lite": {
        **MIXTURE, **SIGMOID, "mixer": {**LATENT, "q_rank": 14}, "shared_experts": 1, "first_dense": 1,
        "mtp": {},
    },
    "youtu": {"mixer": {**LATENT, "q_rank": 14, "rope.pairs": True}, "tied": True},
    "internlm3": {"mixer": {"kv_heads": 2, "bias": "all"}, "mlp.bias": True},
    "phi3": {
        "hidden": 32,
        "mixer": {
            "kv_heads": 2, "window": 7,
            "rope": {"share": 0.5, "scaling": {**LONGROPE, "factor": 3.0, "original": 32}},
        },
    },
    "ernie4_5": {"mixer": {"kv_heads": 2, "head_dim": 8, "rope.pairs": True}},
    "glm4_moe": {
        **MIXTURE, **SIGMOID, "mixer": {"kv_heads": 2, "head_dim": 8, "rope.share": 0.5}, "first_dense": 1,
        "shared_experts": 1,
    },
    "minimax_m2": {
        "experts": 8, "top_k": 3, **SIGMOID, "mixer": {"qk_norm": "whole", "head_dim": 8, "rope.share": 0.5},
    },
    "smollm3": {
        "mixer.kv_heads": 2, "blocks": {"nope": {"mixer.rope": None}}, "pattern": "(3 block, nope)...",
        "layers": 5,
    },
    "ministral": {"mixer.kv_heads": 2, **PATTERN},
    "cwm": {"mixer": {"kv_heads": 2, "head_dim": 8}, **PATTERN},
    "gemma": {**GEGLU, "embed_scale": 24**0.5, "mixer": {"kv_heads": 2, "head_dim": 8}, "tied": True},
    "gemma2": {
        **GEGLU, "embed_scale": 24**0.5, "norm.place": "around", "logit_cap": 30.0, **PATTERN,
        "mixer": {"kv_heads": 2, "head_dim": 8, "scale": 0.2, "softcap": 50.0},
    },
    "gemma3_text": {
        **GEGLU, "embed_scale": 24**0.5, "norm.place": "around",
        "mixer": {"kv_heads": 2, "head_dim": 8, "qk_norm": "head"},
        "blocks": {"local": {"mixer.window": 5, "mixer.rope.base": 50.0}}, "pattern": "(local, block)...",
    },
    "olmo2": {"mixer.qk_norm": "whole", "norm.place": "after"},
    "olmo3": {"mixer.qk_norm": "whole", "norm.place": "after", **PATTERN},
    "granite": {
        "mixer": {"kv_heads": 2, "scale": 0.3}, "residual_scale": 0.5, "embed_scale": 3.0,
        "logit_scale": 0.25,
    },
    "arcee": {"mixer.kv_heads": 2, "mlp.activation": "relu2"},
    "apertus": {"mixer": {"kv_heads": 2, "qk_norm": "head"}, "mlp.activation": "xielu"},
    "nanochat": {
        "mixer": {"kv_heads": 2, "qk_norm": "unweighted"}, "mlp.activation": "relu2", "norm.weight": False,
        "embed_norm": True, "logit_cap": 15.0,
    },
    "gpt_neox": {
        "norm.kind": "layernorm", "mlp": {"activation": "gelu_erf", "bias": True},
        "residual": "parallel_norms", "mixer": {"heads": 3, "bias": "all", "rope.share": 0.5},
    },
    "nemotron": {
        "norm.kind": "layernorm", "mlp.activation": "relu2",
        "mixer": {"kv_heads": 2, "head_dim": 8, "rope.share": 0.5},
    },
    "cohere": {**COHERE, "mixer": {"kv_heads": 2, "rope.pairs": True}},
    "cohere2": {
        **COHERE, "mixer": {"kv_heads": 2, "rope": None}, "pattern": "(local, block)...",
        "blocks": {"local": {"mixer.window": 5, "mixer.rope": {"pairs": True}}},
    },
    "glm": {"mixer": {"kv_heads": 2, "head_dim": 8, "rope": {"share": 0.5, "pairs": True}}},
    "glm4": {
        "mixer": {"kv_heads": 2, "head_dim": 8, "rope": {"share": 0.5, "pairs": True}},
        "norm.place": "around",
    },
    "exaone4": {
        "mixer": {"kv_heads": 2, "qk_norm": "head", "rope": None}, "norm.place": "after",
        "blocks": {"local": {"mixer.window": 5, "mixer.rope": {}}}, "pattern": "(local, block)...",
    },
    "hunyuan_v1_dense": {"mixer": {"kv_heads": 2, "qk_norm": "after_rope"}},
    "hunyuan_v1_moe": {
        "experts": 8, "top_k": 3, "mixer": {"kv_heads": 2, "qk_norm": "after_rope"}, "shared_experts": 1,
    },
    "ernie4_5_moe": {
        **MIXTURE, "router_bias": True, "mixer": {"kv_heads": 2, "rope.pairs": True}, "shared_experts": 2,
    },
    "afmoe": {
        **MIXTURE, **SIGMOID, "norm.place": "around", "shared_experts": 1, "first_dense": 1,
        "mixer": {"kv_heads": 2, "qk_norm": "head", "gate": "channel", "rope": None},
        "blocks": {"local": {"mixer.window": 5, "mixer.rope": {}}}, "pattern": "(local, block)...",
    },
    "laguna": {
        **MIXTURE, **SIGMOID, "shared_experts": 2, "first_dense": 1,
        "mixer": {
            "kv_heads": 2, "head_dim": 8, "qk_norm": "head", "gate": {"kind": "head", "by": "softplus"},
            "rope": {"share": 0.5, "scaling": {"kind": "yarn", "factor": 2.0, "original": 7}},
        },
        "blocks": {"local": {
            "mixer": {"window": 5, "heads": 6, "rope": {"base": 50.0, "share": 1.0, "scaling": None}},
        }},
        "pattern": "(local, block)...",
    },
    "mimo_v2_flash": {
        **MIXTURE, **SIGMOID, "first_dense": 1,
        "mixer": {"kv_heads": 1, "head_dim": 8, "value_dim": 6, "value_scale": 0.7, "rope": {"share": 0.5}},
        "blocks": {"local": {"mixer": {"window": 5, "kv_heads": 2, "sinks": True, "rope.base": 50.0}}},
        "pattern": "(local, block)...",
    },
    "step3p5": {
        **MIXTURE, **SIGMOID, "shared_experts": 2, "first_dense": 1,
        "mixer": {
            "kv_heads": 2, "head_dim": 8, "qk_norm": "head", "gate": "head",
            "rope": {"share": 0.5, "scaling": {"kind": "llama3", "factor": 2.0, "original": 7}},
        },
        "blocks": {"local": {
            "mixer": {"window": 5, "heads": 6, "rope": {"base": 50.0, "share": 1.0, "scaling": None}},
        }},
        "pattern": "(local, block)...", "limits": (0.3, None, 0.2), "shared_limits": (None, 0.1, None),
    },
    "exaone_moe": {
        **MIXTURE, **SIGMOID, "mixer": {"kv_heads": 2, "qk_norm": "head", "rope": None}, "shared_experts": 1,
        "blocks": {"local": {"mixer.window": 5, "mixer.rope": {}}}, "pattern": "(local, block)...",
    },
    "gpt_oss": {
        "experts": 8, "top_k": 3, "mlp": {"activation": "clamped_swiglu", "bias": True},
        "router_logit_bias": True, "mixer": {"kv_heads": 2, "bias": "all", "sinks": True}, **PATTERN,
    },
    "llama4_text": {
        **MIXTURE, "router": "sigmoid", "router_renorm": False, "router_weighs": "input", "shared_experts": 1,
        "mixer": {"kv_heads": 2, "chunk": 5, "qk_norm": "unweighted", "rope.pairs": True},
        "blocks": {"nope": {"mixer": {
            "chunk": None, "qk_norm": None, "rope": None, "growth": {"every": 7, "first": 1},
        }}},
        "pattern": "(2 block, nope)...",
    },
    "granitemoe": {
        "experts": 8, "top_k": 3, "mixer": {"kv_heads": 2, "scale": 0.3}, "residual_scale": 0.5,
        "embed_scale": 3.0, "logit_scale": 0.25,
    },
    "granitemoehybrid": {
        "mixer": {"kv_heads": 2, "scale": 0.3, "rope": None}, "mlp.width": 44, "residual_scale": 0.5,
        "embed_scale": 3.0, "logit_scale": 0.25, "pattern": "(mamba, block)...",
        "blocks": {"mamba": {"mixer": {"kind": "mamba", "heads": 8, "dim": 12, "groups": 2, "state": 6}}},
    },
    "nemotron_h": {
        "layers": 5, "mixer": {"kv_heads": 2, "head_dim": 8, "rope": None}, "mlp.activation": "relu2",
        "blocks": {
            "mamba": {"mixer": {"kind": "mamba", "heads": 4, "dim": 6, "state": 10}, "mlp.kind": "none"},
            "attention": {"mlp.kind": "none"},
            "mlp": {"mixer.kind": "none"},
        },
        "pattern": "mamba, mlp, attention, mamba, mlp...",
    },
    "lfm2": {"mixer": {"kv_heads": 2, "qk_norm": "head"}, "mlp.width": 44, **CONVOLUTIONS},
    "lfm2_moe": {
        **MIXTURE, **SIGMOID, "mixer": {"kv_heads": 2, "qk_norm": "head"}, "first_dense": 1, **CONVOLUTIONS,
    },
    "qwen3_next": {**MIXTURE, **DELTA, "shared_experts": 2, "shared_gate": True},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": {
        "mixer": {"qk_norm": "whole", "rope": None}, "norm.place": "after", "pattern": "(linear, block)...",
        "blocks": {"linear": {"norm.place": "before", "mixer": {
            "kind": "delta", "heads": 4, "key_heads": 2, "key_dim": 6, "v_dim": 10, "norm_eps": 1e-5,
        }}},
    },
    "qwen3_5_moe_text": {**MIXTURE, **DELTA, "shared_experts": 1, "shared_gate": True},
    "kimi_linear": {
        **MIXTURE, **SIGMOID, "mixer": {**LATENT, "q_rank": 14, "rope": None}, "shared_experts": 1,
        "first_dense": 1, "pattern": "(linear, block)...",
        "blocks": {"linear": {"mixer": {"kind": "kimi", "heads": 4, "dim": 8}}},
    },
    "granite_swa": {
        "mixer": {"kv_heads": 2, "scale": 0.3, "sinks": True, "rope": None}, "residual_scale": 0.5,
        "blocks": {"local": {"mixer.window": 5, "mixer.rope": {"base": 50.0}}},
        "pattern": "(block, 3 local)...",
    },
    "granitemoe_swa": {
        "experts": 8, "top_k": 3, "shared_experts": 2, "mixer": {"kv_heads": 2, "sinks": True}, **PATTERN,
    },
    "ministral3": {"mixer": {"kv_heads": 2, "growth": {"rate": 0.3, "every": 7}}},
    "mistral4": {
        **MIXTURE, "shared_experts": 2, "first_dense": 1,
        "mixer": {
            **LATENT, "q_rank": 14, "growth": {"rate": 0.3, "every": 7},
            "rope": {"pairs": True, "scaling": {"kind": "yarn", "factor": 2.0, "original": 7}},
        },
    },
    "kimi_k2": {
        **MIXTURE, **SIGMOID, "mixer": {**LATENT, "q_rank": 14, "rope.pairs": True}, "shared_experts": 1,
        "first_dense": 1,
    },
}


@functools.cache
def general_model(model_type):
    """A small model of the family, with most of what sets it apart."""
    return from_flat_keys(merge(SIZES, GENERAL[model_type], FlatModel))
