"""Rules of families in which some layers have a mixer with a state instead of attention (layer_types).

In a model with both, layers with attention are the plain blocks, and the others get a kind of their name.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace

from checkpoint.hf.layer_types import FULL, rope_part
from checkpoint.hf.rules import (
    MLP_LAYER_TYPES,
    FamilyError,
    Field,
    FieldGroup,
    Fixed,
    Rule,
    layers_of,
    number,
    plain_number,
    read_rope,
    read_rules,
    rope_obstacles,
    share_of_rope,
    typed_list,
    write_rope,
    write_rules,
)
from config import ModelConfig, Tree
from config.pattern import PLAIN, pattern_text
from config.reading.kinds import stated_leaves
from config.tree import differing_leaves

LINEAR = "linear_attention"
EARLIER_TYPES = {"mamba": LINEAR, "attention": FULL}  # old names, which transformers 5 reads too


@dataclass(frozen=True)
class StateLayers:
    """The layers with a state.

    `layer_type` is their name in layer_types, `name` their kind of blocks. `rules` cover how they differ from
    layers with attention, including their mixer. `usual` maps keys to whether each layer has a state, if
    layer_types is missing. `needs_both` says that transformers requires layers of both types.
    """
    layer_type: str
    name: str
    rules: tuple[Rule, ...]
    usual: Callable[[Tree], list[bool]]
    needs_both: bool = False

    def read(self, keys: Tree) -> Tree:
        has_state = self.types_of(keys)
        changes = read_rules(self.rules, keys)
        pattern = pattern_text([self.name if each else PLAIN for each in has_state])
        return {"blocks": {self.name: changes}, "pattern": pattern} if pattern else {}

    def types_of(self, keys: Tree) -> list[bool]:
        """Return whether each layer has a state. Raises FamilyError."""
        types = [EARLIER_TYPES.get(name, name) for name in typed_list(str, keys, "layer_types")]
        usual = self.usual(keys)
        types = types or [self.layer_type if each else FULL for each in usual]
        for layer_type in types:
            if layer_type not in (FULL, self.layer_type):
                raise FamilyError(
                    f"layer_types = {layer_type!r} is not supported, only {FULL} and {self.layer_type}")
        layers = plain_number(keys, "num_hidden_layers")
        if len(types) != layers:
            raise FamilyError(f"layer_types names {len(types)} layers, num_hidden_layers is {layers}")
        if self.needs_both and len(set(types)) < 2:
            raise FamilyError(f"layer_types has no layer of {FULL} or none of {self.layer_type}")
        return [layer_type == self.layer_type for layer_type in types]

    def write(self, model: ModelConfig) -> Tree:
        layers = layers_of(model)
        keys: Tree = {
            "layer_types": [FULL if layer.mixer.has_softmax else self.layer_type for layer in layers]
        }
        first = next((layer for layer in layers if not layer.mixer.has_softmax), None)
        return keys if first is None else keys | write_rules(self.rules, first)

    def obstacles(self, model: ModelConfig) -> list[str]:
        """Return ["blocks", "pattern"] unless layers with attention match the model, and the others differ
        only in what the rules read."""
        layers = layers_of(model)
        states = [layer for layer in layers if not layer.mixer.has_softmax]
        is_lost = self.needs_both and len(states) in (0, len(layers))
        for layer in layers:
            if layer.mixer.has_softmax:
                is_lost |= (layer.mixer, layer.mlp, layer.norm) != (model.mixer, model.mlp, model.norm)
            else:
                is_lost |= layer != states[0] or not self.covers(model, layer)
        return ["blocks", "pattern"] if is_lost else []

    def covers(self, model: ModelConfig, layer: ModelConfig) -> bool:
        """Return whether the rules express every difference between a layer with a state and the model."""
        same_kinds = type(layer.mlp) is type(model.mlp) and type(layer.norm) is type(model.norm)
        if not same_kinds or any(rule.obstacles(layer) for rule in self.rules):
            return False
        covered = {name for rule in self.rules for name in rule.fields}
        own = {
            *stated_leaves(layer.mixer, "mixer."),
            *differing_leaves(model.mlp, layer.mlp, "mlp."),
            *differing_leaves(model.norm, layer.norm, "norm."),
        }
        return own <= covered


def state_layers_group(layers: StateLayers) -> FieldGroup:
    return FieldGroup(("blocks", "pattern"), layers.read, layers.write, layers.obstacles)


# ---- LFM2 --------------------------------------------------------------------------------------------------

def conv_where_not_stated(keys: Tree) -> list[bool]:
    """Return whether each layer has a state. full_attn_idxs lists the layers with attention, by default
    all."""
    layers = range(int(plain_number(keys, "num_hidden_layers")))
    if keys.get("full_attn_idxs") is None:
        return [False for _ in layers]
    full = set(typed_list(int, keys, "full_attn_idxs"))
    return [layer not in full for layer in layers]


def read_lfm2_width(keys: Tree) -> Tree:
    """Read the MLP width: two thirds of the stated one, times a factor, rounded up to a multiple."""
    has_name = keys.get("block_ff_dim") is not None
    stated = plain_number(keys, "intermediate_size") if not has_name else plain_number(keys, "block_ff_dim")
    factor, multiple = keys.get("block_ffn_dim_multiplier"), keys.get("block_multiple_of")
    if not keys.get("block_auto_adjust_ff_dim"):
        return {"mlp.width": stated}
    width = int(2 * stated / 3)
    if factor is None:
        return {"mlp.width": width}
    width = int(plain_number(keys, "block_ffn_dim_multiplier") * width)
    multiple = int(plain_number(keys, "block_multiple_of"))
    if multiple < 1:
        raise FamilyError(f"block_multiple_of = {multiple} is not above 0")
    return {"mlp.width": -(-width // multiple) * multiple}


LFM2_WIDTH = FieldGroup(
    ("mlp.width",),
    read_lfm2_width,
    lambda model: {"intermediate_size": model.mlp.width, "block_auto_adjust_ff_dim": False},
)
LFM2_LAYERS = state_layers_group(StateLayers(
    "conv", "conv",
    rules=(Fixed("mixer.kind", "short_conv"), Field("mixer.conv", "conv_L_cache", minimum=1)),
    usual=conv_where_not_stated,
))


# ---- the gated delta net -----------------------------------------------------------------------------------

def read_delta_sizes(keys: Tree) -> Tree:
    """Read the sizes. The number of key heads is None if it equals that of value heads."""
    key_heads, heads, key_dim, value_dim = (plain_number(keys, key) for key in DELTA_SIZES)
    return {
        "mixer.heads": heads,
        "mixer.key_heads": None if key_heads == heads else key_heads,
        "mixer.key_dim": key_dim,
        "mixer.v_dim": value_dim,
    }


def write_delta_sizes(layer: ModelConfig) -> Tree:
    mixer = layer.mixer
    sizes = (mixer.heads_over_tp()["key_heads"], mixer.heads, mixer.key_dim, mixer.v_dim)
    return dict(zip(DELTA_SIZES, sizes))


def linear_where_not_stated(keys: Tree) -> list[bool]:
    """Return whether each layer has a state: all except multiples of full_attention_interval."""
    every = keys.get("full_attention_interval", 4)
    if not isinstance(every, int) or every < 1:
        raise FamilyError(f"full_attention_interval = {every!r} is not supported")
    return [(layer + 1) % every != 0 for layer in range(int(plain_number(keys, "num_hidden_layers")))]


DELTA_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)
DELTA_SIZES_GROUP = FieldGroup(
    ("mixer.heads", "mixer.key_heads", "mixer.key_dim", "mixer.v_dim"), read_delta_sizes, write_delta_sizes
)
DELTA_CONV = Field("mixer.conv", "linear_conv_kernel_dim", minimum=1)
DELTA_RULES = (Fixed("mixer.kind", "delta"), DELTA_SIZES_GROUP, DELTA_CONV)
QWEN_LAYERS = state_layers_group(StateLayers(
    LINEAR, "linear", rules=DELTA_RULES, usual=linear_where_not_stated
))


# Qwen3.5: for text, a token's three positions are equal.

IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")


def read_text_rope(keys: Tree) -> Tree:
    """Read RoPE on a share of the channels, ignoring keys for images."""
    said: Tree = {}
    for name in ("rope_scaling", "rope_parameters"):
        said[name] = keys.get(name)
        if isinstance(said[name], dict):
            said[name] = {key: value for key, value in said[name].items() if key not in IMAGE_POSITIONS}
    for name in ("rope_theta", "partial_rotary_factor", "max_position_embeddings"):
        keys.get(name)
    return SHARE_OF_ROPE.read({**keys, **said})


SHARE_OF_ROPE = share_of_rope(0.25)
TEXT_ROPE = replace(SHARE_OF_ROPE, read=read_text_rope)


# ---- OLMo hybrid -------------------------------------------------------------------------------------------

def read_olmo_sizes(keys: Tree) -> Tree:
    """Read the sizes. Null sizes follow from the others."""
    stated = {key: number(keys, key, nullable=True) for key in DELTA_SIZES}
    heads, hidden = plain_number(keys, "num_attention_heads"), plain_number(keys, "hidden_size")
    stated = {key: heads if value is None and "heads" in key else value for key, value in stated.items()}
    if stated["linear_num_key_heads"] < 1:
        raise FamilyError(f"linear_num_key_heads = {stated['linear_num_key_heads']} is below 1")
    if stated["linear_key_head_dim"] is None:
        stated["linear_key_head_dim"] = int(0.75 * hidden / stated["linear_num_key_heads"])
    if stated["linear_value_head_dim"] is None:
        stated["linear_value_head_dim"] = 2 * stated["linear_key_head_dim"]
    return DELTA_SIZES_GROUP.read(stated)


def every_fourth_full(keys: Tree) -> list[bool]:
    """Return whether each layer has a state: all except every fourth or, with fewer than four layers, the
    last."""
    layers = int(plain_number(keys, "num_hidden_layers"))
    return [(layer + 1) % 4 != 0 and (layers > 3 or layer + 1 < layers) for layer in range(layers)]


def read_rope_or_none(keys: Tree) -> Tree:
    """Read RoPE; a null base means none."""
    scaling = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    base = keys.get("rope_theta")
    if isinstance(scaling, dict) and scaling.get("rope_theta", base) is None:
        return {"mixer.rope": None}
    return {"mixer.rope": rope_part(read_rope(keys))}


def write_rope_or_none(model: ModelConfig) -> Tree:
    if model.mixer.rope is not None:
        return write_rope(model)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


def rope_or_none_obstacles(model: ModelConfig) -> list[str]:
    rope = model.mixer.rope
    if rope is None:
        return []
    lost = ["mixer.rope.pairs"] * rope.pairs + ["mixer.rope.share"] * (rope.share != 1)
    return lost + rope_obstacles(model)


OLMO_RULES = (
    Fixed("mixer.kind", "delta"),
    replace(DELTA_SIZES_GROUP, read=read_olmo_sizes),
    DELTA_CONV,
    Field("mixer.negative_eigenvalues", "linear_allow_neg_eigval"),
    Fixed("mixer.norm_eps", 1e-5),
    Fixed("norm.place", "before"),
)
OLMO_HYBRID_LAYERS = state_layers_group(StateLayers(
    "linear_attention", "linear",
    rules=OLMO_RULES,
    usual=every_fourth_full,
    needs_both=True,
))
OLMO_HYBRID_ROPE = FieldGroup(
    ("mixer.rope",), read_rope_or_none, write_rope_or_none, rope_or_none_obstacles
)


# ---- Kimi Linear -------------------------------------------------------------------------------------------

KIMI_SIZES = "linear_attn_config"  # where published folders keep the sizes and places of these layers
IN_LINEAR = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
PLACES = ("full_attn_layers", "kda_layers")  # counted from 1


def linear_config(keys: Tree) -> Tree:
    """Return linear_attn_config, or an empty one. Raises FamilyError for a key that implies another
    model."""
    found = keys.get(KIMI_SIZES) or {}
    if not isinstance(found, dict):
        raise FamilyError(f"{KIMI_SIZES} = {found!r} is not supported")
    for key, value in found.items():
        if key not in (*IN_LINEAR.values(), *PLACES) and value is not None:
            raise FamilyError(f"{KIMI_SIZES}.{key} = {value!r} is not supported")
    return found


def read_kimi_sizes(keys: Tree) -> Tree:
    """Read the sizes. linear_attn_config takes precedence over keys of the config itself."""
    inside = linear_config(keys)
    stated = {key: inside.get(name, keys.get(key)) for key, name in IN_LINEAR.items()}
    heads, dim, conv = (plain_number(stated, key) for key in IN_LINEAR)
    return {"mixer.heads": heads, "mixer.dim": dim, "mixer.conv": conv}


def write_kimi_sizes(layer: ModelConfig) -> Tree:
    return dict(zip(IN_LINEAR, (layer.mixer.heads, layer.mixer.dim, layer.mixer.conv)))


def kimi_where_not_stated(keys: Tree) -> list[bool]:
    """Return whether each layer has a state, from linear_attn_config or, without it, all except layers 4,
    8, ..."""
    layers = range(int(plain_number(keys, "num_hidden_layers")))
    inside = linear_config(keys)
    if not all(name in inside for name in PLACES):
        return [layer == 0 or layer % 4 != 0 for layer in layers]
    full, state = (set(typed_list(int, inside, name)) for name in PLACES)
    if full & state or full | state != {layer + 1 for layer in layers}:
        raise FamilyError(
            f"{KIMI_SIZES}: {' and '.join(PLACES)} do not name each of {len(layers)} layers once")
    return [layer + 1 in state for layer in layers]


def read_kimi_dense_layers(keys: Tree) -> Tree:
    """Read the dense layers from mlp_layer_types or, without it, the first first_k_dense_replace layers."""
    if keys.get("mlp_layer_types"):
        return MLP_LAYER_TYPES.read(keys)
    dense = keys.get("first_k_dense_replace", 1)
    return {"first_dense": plain_number({"first_k_dense_replace": dense}, "first_k_dense_replace")}


KIMI_LAYERS = state_layers_group(StateLayers(
    "linear_attention", "linear",
    rules=(
        Fixed("mixer.kind", "kimi"),
        FieldGroup(("mixer.heads", "mixer.dim", "mixer.conv"), read_kimi_sizes, write_kimi_sizes),
    ),
    usual=kimi_where_not_stated,
))
KIMI_DENSE_LAYERS = replace(MLP_LAYER_TYPES, read=read_kimi_dense_layers)
