"""Rules of Step 3.5 and 3.7 (StepFun), whose layers differ in attention and whose activations have limits.

As in Laguna, sliding layers have other rotary positions and another number of heads. Published folders have
lists with an entry per layer instead of keys per type, plus entries for multi-token prediction modules, which
transformers ignores.
"""
from dataclasses import replace
from functools import partial

from checkpoint.hf.layer_types import (
    FULL,
    SLIDING,
    LayerTypes,
    layer_types_group,
    none_slides,
    shared_rope_of_type,
    write_shared_ropes,
)
from checkpoint.hf.rules import (
    MLP_LAYER_TYPES,
    QUERY_SCALAR,
    FamilyError,
    FieldGroup,
    head_size,
    is_number,
    number,
    plain_number,
    read_mlp_layer_types,
    read_query_scalar,
    sliding_layers,
    with_keys,
    write_mlp_layer_types,
)
from config import ModelConfig, Tree
from config.reading.flat import FlatModel

STEP_LISTS = (
    "layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits",
    "swiglu_limits_shared",
)


def step_keys(keys: Tree) -> Tree:
    """Return the keys with lists cut to the layers, and with mlp_layer_types."""
    layers = int(plain_number(keys, "num_hidden_layers"))
    ahead = number({"num_nextn_predict_layers": None, **keys}, "num_nextn_predict_layers", nullable=True)
    keys.get("num_nextn_predict_layers")  # records the read, which the copy above did not
    lists = {key: keys[key] for key in STEP_LISTS if isinstance(keys.get(key), list)}
    own = {key: entries[:layers] for key, entries in lists.items() if len(entries) == layers + (ahead or 0)}
    if keys.get("mlp_layer_types") is None:
        stated = keys.get("moe_layers_enum")
        words = str(stated).strip("[]").split(",") if stated is not None else map(str, range(3, layers))
        sparse = {word.strip() for word in words}
        own["mlp_layer_types"] = ["sparse" if str(layer) in sparse else "dense" for layer in range(layers)]
    return with_keys(keys, own)


def step_rope(keys: Tree, layer_type: str) -> Tree:
    """Return rotary positions whose share is rounded down to whole channels of a head."""
    given = keys.get("rope_parameters") or {}
    slides = sliding_layers(keys) or none_slides(keys)
    types = [SLIDING if each else FULL for each in slides]
    if not isinstance(given, dict) or (given and not set(types) <= given.keys()):
        raise FamilyError(
            f"rope_parameters = {given!r} is not supported, only with {' and '.join(sorted(set(types)))}")
    if given and keys.get("rope_scaling"):
        raise FamilyError("rope_scaling has no effect beside rope_parameters; remove it")
    stated = given or {each: step_rope_of_lists(keys, types, each) for each in set(types)}
    every = dict.fromkeys((FULL, SLIDING), stated[types[0]]) | stated
    rope = shared_rope_of_type({**keys, "rope_parameters": every}, {}, 1.0, layer_type)
    size = head_size(keys)
    return {**rope, "share": int(size * rope["share"]) / size}


def step_rope_of_lists(keys: Tree, types: list[str], layer_type: str) -> Tree:
    """Return the rotary positions of a layer type, from lists with an entry per layer."""
    own: Tree = {"rope_type": "default"}
    for key, name in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        entries = keys.get(key)
        if entries is None or entries == []:
            continue
        if not isinstance(entries, list):
            entries = [entries] * len(types)
        found = {repr(entry) for entry, each in zip(entries, types) if each == layer_type}
        if len(entries) != len(types) or len(found) > 1:
            raise FamilyError(f"{key} = {entries} is not supported, only one number for each type of layer")
        own[name] = entries[types.index(layer_type)]
    scaling = keys.get("rope_scaling")
    if scaling is None or layer_type == SLIDING:
        return own
    if not isinstance(scaling, dict):
        raise FamilyError(f"rope_scaling = {scaling!r} is not supported")
    return own | scaling


def step_heads(keys: Tree, slides: list[bool], sliding: bool) -> Tree:
    """Return the heads. Those of sliding layers may be stated in three places."""
    usual = int(plain_number(keys, "num_attention_heads"))
    other = keys.get("attention_other_setting") or {}
    expected = {
        "attention_type": SLIDING,
        "num_attention_groups": keys.get("num_key_value_heads"),
        "head_dim": keys.get("head_dim"),
        "true_head_dim": keys.get("head_dim"),
    }
    if not isinstance(other, dict) or not other.items() <= {**other, **expected}.items():
        raise FamilyError(f"attention_other_setting = {other!r} is not supported, only other heads")
    count = keys.get("num_sliding_attention_heads")
    count = other.get("num_attention_heads", usual) if count is None else count

    stated = keys.get("per_layer_config")
    if stated is not None:
        own = {str(layer): {"num_attention_heads": count} for layer, slide in enumerate(slides) if slide}
        if stated != own and not (stated == {} and count == usual):
            raise FamilyError(f"per_layer_config = {stated!r} is not supported, only {own!r}, as "
                              "num_sliding_attention_heads says")
    if not isinstance(count, int) or min(count, usual) < 1:
        raise FamilyError(f"num_sliding_attention_heads = {count!r} is not a whole number above 0")
    return {"mixer.heads": count if sliding else usual}


def write_step_heads(layers: list[ModelConfig]) -> Tree:
    full = [layer.mixer.heads for layer in layers if layer.mixer.window is None]
    sliding = [layer.mixer.heads for layer in layers if layer.mixer.window is not None]
    return {
        "num_attention_heads": (full or sliding)[0],
        "num_sliding_attention_heads": (sliding or full)[0],
    }


def read_step_scalar(keys: Tree) -> Tree:
    """Read the score scale; null stands for the channels of a head."""
    if keys.get("query_pre_attn_scalar") is None:
        return {"mixer.scale": None}
    return read_query_scalar(keys)


def read_step_mlps(keys: Tree) -> Tree:
    return read_mlp_layer_types(step_keys(keys))


def read_step_limits(keys: Tree) -> Tree:
    """Read the limits. One list covers routed experts; the other covers shared experts and, in layers
    without experts, the MLP. 0 and null mean none."""
    keys = step_keys(keys)
    dense = read_mlp_layer_types(keys)["first_dense"]
    routed, shared = (step_limits(keys, f"swiglu_limits{of}") for of in ("", "_shared"))
    none = (None,) * dense
    return {
        "limits": shared[:dense] + routed[dense:],
        "shared_limits": none + shared[dense:],
    }


def step_limits(keys: Tree, key: str) -> tuple[float | None, ...]:
    layers = int(plain_number(keys, "num_hidden_layers"))
    entries = keys.get(key) or [None] * layers
    is_list = isinstance(entries, list) and len(entries) == layers
    if not is_list or not all(entry is None or (is_number(entry) and entry >= 0) for entry in entries):
        raise FamilyError(f"{key} = {entries!r} is not supported, only a number for each layer, 0 or above")
    return tuple(entry or None for entry in entries)


def write_step_limits(model: FlatModel) -> Tree:
    none = (None,) * model.layers
    limits, shared = model.limits or none, model.shared_limits or none
    first = model.first_dense
    lists = {
        "swiglu_limits": none[:first] + limits[first:],
        "swiglu_limits_shared": limits[:first] + shared[first:],
    }
    return {
        key: [limit or 0.0 for limit in entries] if any(entries) else None for key, entries in lists.items()
    }


STEP_TYPES = layer_types_group(LayerTypes(
    partial(step_rope, layer_type=FULL),
    partial(step_rope, layer_type=SLIDING),
    write_shared_ropes,
    every_key=None,
    differ=("mixer.heads",),
    of_type=step_heads,
    write_differ=write_step_heads,
    usual_slides=none_slides,
))
STEP_LAYERS = replace(STEP_TYPES, read=lambda keys: STEP_TYPES.read(step_keys(keys)))
STEP_SCALAR = replace(QUERY_SCALAR, read=read_step_scalar)
STEP_MLPS = FieldGroup(
    ("first_dense",), read_step_mlps, write_mlp_layer_types, MLP_LAYER_TYPES.obstacles
)
STEP_LIMITS = FieldGroup(("limits", "shared_limits"), read_step_limits, write_step_limits)
