"""Rules of families with two types of layers (layer_types): full attention and sliding windows, with
different rotary positions.

In a model with both types, layers with full attention are the plain blocks, and `local` is the kind of the
others.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from checkpoint.hf.rules import (
    LOCAL,
    NOPE,
    FamilyError,
    FieldGroup,
    head_size,
    is_number,
    layers_of,
    number,
    plain_number,
    read_mlp_layer_types,
    read_rope,
    rope_obstacles,
    rotating_layers,
    sliding_layers,
    typed_list,
    write_rope_scaling,
)
from config import ModelConfig, Tree, head_dim
from config.pattern import PLAIN, pattern_text
from config.reading import build_tree, defaults
from config.tree import value_at, with_values
from model.attention import AttentionConfig
from model.rope import GrowthConfig, RopeConfig

FIELDS = ("mixer.window", "mixer.rope", "blocks", "pattern")
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerTypes:
    """How a family's layers differ by type.

    full, sliding: map keys to mixer.rope of a layer of that type.
    write: maps the rotary positions of full and sliding layers, None for a type that the model lacks, to
    keys.
    every, every_key: without layer_types, each layer with a multiple of this number has full attention; the
    key that states it, if any.
    differ: other fields in which the types differ. of_type: maps (keys, whether each layer slides, whether
    this type slides) to their values. write_differ: maps the model of each layer to keys.
    usual_slides: maps keys to whether each layer slides, instead of `every`.
    """
    full: Callable[[Tree], Tree | None]
    sliding: Callable[[Tree], Tree | None]
    write: Callable[[RopeConfig | None, RopeConfig | None], Tree]
    every: int = 1
    every_key: str | None = "sliding_window_pattern"
    differ: tuple[str, ...] = ()
    of_type: Callable[[Tree, list[bool], bool], Tree] = lambda keys, slides, sliding: {}
    write_differ: Callable[[list[ModelConfig]], Tree] = lambda layers: {}
    usual_slides: Callable[[Tree], list[bool]] | None = None

    def read(self, keys: Tree) -> Tree:
        slides, full, sliding = self.types_of(keys)
        if all(slides) or not any(slides):
            return sliding if all(slides) else full
        changes = {path: value for path, value in sliding.items() if value != full[path]}
        pattern = pattern_text([LOCAL if each else PLAIN for each in slides])
        return {**full, "blocks": {LOCAL: changes}, "pattern": pattern}

    def types_of(self, keys: Tree) -> tuple[list[bool], Tree, Tree]:
        """Return whether each layer slides, and the fields of full and of sliding layers."""
        slides = sliding_layers(keys) or self.usual(keys)
        size = number(keys, "sliding_window", nullable=True)
        if self.every_key:
            keys.get(self.every_key)  # meaningless if layer_types is given
        if any(slides) and size is None:
            raise FamilyError("layer_types = 'sliding_attention' without sliding_window")
        full: Tree = {"mixer.window": None, "mixer.rope": self.full(keys)}
        sliding = {"mixer.window": size, "mixer.rope": self.sliding(keys)}
        return slides, full | self.of_type(keys, slides, False), sliding | self.of_type(keys, slides, True)

    def usual(self, keys: Tree) -> list[bool]:
        """Return whether each layer slides in a config without layer_types."""
        if self.usual_slides is not None:
            return self.usual_slides(keys)
        layers = int(plain_number(keys, "num_hidden_layers"))
        every = keys.get(self.every_key) if self.every_key else None
        if every is None:
            every = self.every
        if not isinstance(every, int) or every < 1:
            raise FamilyError(f"{self.every_key} = {every!r} is not supported without layer_types")
        return [(layer + 1) % every != 0 for layer in range(layers)]

    def keys_of(self, model: ModelConfig) -> Tree:
        layers = layers_of(model)
        mixers = [layer.mixer for layer in layers]
        full = [mixer for mixer in mixers if mixer.window is None]
        sliding = [mixer for mixer in mixers if mixer.window is not None]
        return {
            "sliding_window": sliding[0].window if sliding else None,
            "layer_types": [FULL if mixer.window is None else SLIDING for mixer in mixers],
            **self.write(
                full[0].rope if full else None if sliding else model.mixer.rope,
                sliding[0].rope if sliding else None,
            ),
            **self.write_differ(layers),
        }

    def without_type(self, mixer: AttentionConfig) -> AttentionConfig:
        """Return the part of the mixer that both types of layers share."""
        model = defaults().model
        usual = {path: value_at(model, path) for path in self.differ}
        return with_values(replace(model, mixer=replace(mixer, window=None, rope=None)), usual).mixer

    def obstacles(self, model: ModelConfig) -> list[str]:
        """Return the fields that a write and a read would change."""
        layers = layers_of(model)
        if not all(isinstance(layer.mixer, AttentionConfig) for layer in layers):
            return ["blocks", "pattern"]
        others = {(self.without_type(layer.mixer), layer.mlp, layer.norm) for layer in layers}
        if len(others) > 1:
            return ["blocks", "pattern"]
        lost = lost_ropes(layers)
        if lost:
            return lost
        try:
            _, full, sliding = self.types_of({**size_keys(model, model), **self.keys_of(model)})
        except (FamilyError, AssertionError):
            return ["blocks", "pattern"] if model.pattern else ["mixer.rope"]
        for layer in layers:
            again = full if layer.mixer.window is None else sliding
            if any(again[path] != value_at(layer, path) for path in ("mixer.window", *self.differ)):
                return ["blocks", "pattern"]
            if rope_from(again["mixer.rope"]) != layer.mixer.rope:
                return ["blocks", "pattern"] if model.pattern else ["mixer.rope"]
        return []


def lost_ropes(layers: list[ModelConfig]) -> list[str]:
    """Return rope_obstacles of the first layer that has any."""
    found = (rope_obstacles(layer) for layer in layers if layer.mixer.rope)
    return next((lost for lost in found if lost), [])


def size_keys(model: ModelConfig, layer: ModelConfig) -> Tree:
    """Return the size keys that rules of layers read. The heads are those of `layer`."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": layer.mixer.heads,
        "head_dim": head_dim(layer),
        "max_position_embeddings": model.context,
    }


def rope_from(keys: Tree | None) -> RopeConfig | None:
    return None if keys is None else build_tree(RopeConfig, keys, "mixer.rope.")


def layer_types_group(types: LayerTypes) -> FieldGroup:
    return FieldGroup((*FIELDS, *types.differ), types.read, types.keys_of, types.obstacles)


# ---- rotary positions per type -----------------------------------------------------------------------------

def rope_part(fields: Tree, pairs: bool = False) -> Tree:
    """Convert {mixer.rope.KEY: value} to the keys of the part."""
    none = {"pairs": pairs, "scaling": None}  # stated because a kind of block otherwise inherits the model's
    return none | {path.removeprefix("mixer.rope."): value for path, value in fields.items()}


def has_types(keys: Tree) -> bool:
    """Return whether rope_parameters is split by layer type, as transformers 5 writes it."""
    parameters = keys.get("rope_parameters")
    return isinstance(parameters, dict) and (FULL in parameters or SLIDING in parameters)


def rope_of_type(keys: Tree, layer_type: str) -> Tree:
    """Return the rotary positions in rope_parameters for this type of layer."""
    own = keys["rope_parameters"].get(layer_type)
    check_rope_of_type(own, layer_type)
    keys.get("rope_theta")
    return rope_part(read_rope({**keys, "rope_parameters": own, "rope_scaling": None}))


def check_rope_of_type(own: object, layer_type: str) -> None:
    """Raise FamilyError unless transformers reads these parameters for a single type of layer."""
    if not isinstance(own, dict):
        raise FamilyError(f"rope_parameters has no {layer_type}")
    if own.get("truncate", True) is not True:
        raise FamilyError(f"truncate = {own['truncate']!r} of {layer_type} is not supported: transformers "
                          "does not read it per layer type")


def no_rope(keys: Tree) -> None:
    return None


def one_rope(keys: Tree, pairs: bool = False) -> Tree:
    """Return rotary positions that are the same in every layer."""
    return rope_part(read_rope(keys), pairs)


def written_rope(rope: RopeConfig | None) -> Tree:
    """Return base and scaling in the spelling of transformers 4."""
    if rope is None:
        return {}
    return {"rope_theta": rope.base, "rope_scaling": write_rope_scaling(rope.scaling)}


def written_parameters(rope: RopeConfig) -> Tree:
    """Return base and scaling for one type of layer in the spelling of transformers 5."""
    return {"rope_type": "default", **(write_rope_scaling(rope.scaling) or {}), "rope_theta": rope.base}


def typed_full(keys: Tree) -> Tree:
    """Return the rotary positions of full-attention layers, from either spelling."""
    return rope_of_type(keys, FULL) if has_types(keys) else one_rope(keys)


# a window that no layer uses; transformers builds its mask anyway
NO_LAYER: Tree = {"sliding_window": 4096}

# OLMo 3: sliding layers have no scaling.

OLMO3_BASE = 500000.0


def olmo3_sliding(keys: Tree) -> Tree:
    if has_types(keys):
        return rope_of_type(keys, SLIDING)
    base = plain_number(keys, "rope_theta")
    if base != OLMO3_BASE:  # transformers 5 applies it only to full layers, version 4 to all
        raise FamilyError(
            f"rope_theta = {base} is ambiguous for sliding-window layers; set rope_parameters")
    return rope_part({"mixer.rope.base": base})


def write_olmo3(full: RopeConfig | None, sliding: RopeConfig | None) -> Tree:
    given = full or sliding
    assert given is not None
    parameters = {FULL: written_parameters(full or given), SLIDING: written_parameters(sliding or given)}
    return {"rope_parameters": parameters}


# Gemma 3: two bases.

def gemma3_sliding(keys: Tree) -> Tree:
    if has_types(keys):
        return rope_of_type(keys, SLIDING)
    return rope_part({"mixer.rope.base": plain_number(keys, "rope_local_base_freq")})


def write_gemma3(full: RopeConfig | None, sliding: RopeConfig | None) -> Tree:
    assert sliding is None or sliding.scaling is None
    local = {"rope_local_base_freq": sliding.base} if sliding else NO_LAYER
    return {**written_rope(full), **local}


# Gemma 2: the same in all layers.

def write_one_rope(full: RopeConfig | None, sliding: RopeConfig | None) -> Tree:
    return written_rope(full or sliding) | ({} if sliding else NO_LAYER)


# gpt-oss: the same in all layers. The default scaling is that of the published model.

GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def gpt_oss_rope(keys: Tree) -> Tree:
    if keys.get("rope_scaling") or keys.get("rope_parameters"):
        return one_rope(keys)
    scaling = GPT_OSS_SCALING | {"rope_theta": plain_number(keys, "rope_theta")}
    return one_rope({**keys, "rope_scaling": scaling})


def write_gpt_oss_rope(full: RopeConfig | None, sliding: RopeConfig | None) -> Tree:
    stated = {"rope_scaling": {"rope_type": "default"}}
    return stated | {key: value for key, value in written_rope(full or sliding).items() if value}


# Cohere 2, EXAONE 4: full-attention layers have no RoPE if other layers slide.

def write_sliding_rope(full: RopeConfig | None, sliding: RopeConfig | None) -> Tree:
    assert sliding is not None and full is None
    return written_rope(sliding)


def exaone4_full(keys: Tree) -> Tree | None:
    """Return None, unless all layers of the model have full attention."""
    return one_rope(keys) if keys.get("sliding_window") is None else None


def write_exaone4(full: RopeConfig | None, sliding: RopeConfig | None) -> Tree:
    if full is None and sliding is None:
        return NO_LAYER  # positions come from the other layers
    return written_rope(sliding or full)


# Laguna: sliding layers have other angles, another share of rotated channels, and another number of heads.

LAGUNA_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def shared_rope_of_type(keys: Tree, usual: Tree, usual_share: float, layer_type: str) -> Tree:
    """Return the rotary positions of a layer type. `usual` is the default for both types, and
    `usual_share` the default share of rotated channels."""
    given = keys.get("rope_parameters") or usual
    own = given.get(layer_type) if isinstance(given, dict) else None
    check_rope_of_type(own, layer_type)
    share = own.get("partial_rotary_factor", usual_share)
    if not is_number(share) or not 0 < share <= 1:
        raise FamilyError(f"partial_rotary_factor = {share!r} is not a number in (0, 1]")
    own = {key: value for key, value in own.items() if key != "partial_rotary_factor"}
    fields = read_rope({**keys, "rope_parameters": own, "rope_scaling": None}, share=share)
    return rope_part(fields) | {"share": float(share)}


def write_shared_ropes(full: RopeConfig | None, sliding: RopeConfig | None) -> Tree:
    given = {FULL: full or sliding, SLIDING: sliding or full}
    assert full or sliding
    parameters = {
        layer_type: {**written_parameters(rope), "partial_rotary_factor": rope.share}
        for layer_type, rope in given.items() if rope is not None
    }
    return {"rope_parameters": parameters} | ({} if sliding else NO_LAYER)


def heads_of_type(keys: Tree, slides: list[bool], sliding: bool) -> Tree:
    heads = typed_list(int, keys, "num_attention_heads_per_layer")
    usual = int(plain_number(keys, "num_attention_heads"))
    heads = heads or [usual] * len(slides)
    if len(heads) != len(slides):
        raise FamilyError(
            f"num_attention_heads_per_layer names {len(heads)} layers, num_hidden_layers is {len(slides)}")
    own = {count for count, slide in zip(heads, slides) if slide == sliding} or {heads[0]}
    if len(own) > 1 or min(own) < 1:
        raise FamilyError(f"num_attention_heads_per_layer = {heads} is not supported, only one number above "
                          "0 for each type of layer")
    return {"mixer.heads": own.pop()}


def write_heads(layers: list[ModelConfig]) -> Tree:
    heads = [layer.mixer.heads for layer in layers]
    return {"num_attention_heads": heads[0], "num_attention_heads_per_layer": heads}


def none_slides(keys: Tree) -> list[bool]:
    return [False] * int(plain_number(keys, "num_hidden_layers"))


# MiMo-V2: sliding layers have twice as many key heads, and sinks.

MIMO_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
}


def mimo_rope(keys: Tree, layer_type: str) -> Tree:
    """Return rotary positions whose share is rounded down to whole channels of a head."""
    rope = shared_rope_of_type(keys, usual=MIMO_ROPE, usual_share=0.334, layer_type=layer_type)
    size = head_size(keys)
    return {**rope, "share": int(size * rope["share"]) / size}


def mimo_type(keys: Tree, slides: list[bool], sliding: bool) -> Tree:
    """Return the fields of a layer type. sliding_window_size in published folders does not count the token
    itself."""
    size = number({"sliding_window_size": None, **keys}, "sliding_window_size", nullable=True)
    keys.get("sliding_window_size")
    window = {"mixer.window": size + 1} if sliding and size is not None else {}
    heads = plain_number(keys, "num_key_value_heads") * (2 if sliding else 1)
    return window | {"mixer.kv_heads": heads, "mixer.sinks": sliding}


def write_mimo_heads(layers: list[ModelConfig]) -> Tree:
    first = layers[0].mixer
    return {"num_key_value_heads": first.kv_heads if first.window is None else first.kv_heads // 2}


def mimo_slides(keys: Tree) -> list[bool]:
    """Return whether each layer slides: all except the first and every sixth."""
    layers = range(int(plain_number(keys, "num_hidden_layers")))
    return [layer != 0 and (layer + 1) % 6 != 0 for layer in layers]


def check_mimo_spellings(keys: Tree) -> Tree:
    """Raise FamilyError if redundant keys of published folders contradict what the class computes."""
    slides = sliding_layers(keys) or mimo_slides(keys)
    expected = {
        "hybrid_layer_pattern": [int(each) for each in slides],
        "moe_layer_freq": [int(layer >= read_mlp_layer_types(keys)["first_dense"])
                           for layer in range(len(slides))],
        "swa_num_attention_heads": keys.get("num_attention_heads"),
        "swa_num_key_value_heads": 2 * plain_number(keys, "num_key_value_heads"),
        "swa_head_dim": keys.get("head_dim"),
        "swa_v_head_dim": keys.get("v_head_dim"),
        "rope_theta": shared_rope_of_type(keys, MIMO_ROPE, 0.334, FULL)["base"],
        "swa_rope_theta": shared_rope_of_type(keys, MIMO_ROPE, 0.334, SLIDING)["base"],
        "layernorm_epsilon": keys.get("rms_norm_eps"),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    for key, value in expected.items():
        if keys.get(key) is not None and keys[key] != value:
            raise FamilyError(
                f"{key} = {keys[key]!r} is not supported where the other keys make it {value!r}")
    return {}


MIMO_SPELLINGS = FieldGroup((), check_mimo_spellings)
MIMO_LAYERS = layer_types_group(LayerTypes(
    partial(mimo_rope, layer_type=FULL),
    partial(mimo_rope, layer_type=SLIDING),
    write_shared_ropes,
    differ=("mixer.kv_heads", "mixer.sinks"),
    of_type=mimo_type,
    write_differ=write_mimo_heads,
    usual_slides=mimo_slides,
))
# Granite with windows: a RoPE base per layer, 0 for none.

def granite_slides(keys: Tree) -> list[bool]:
    """Return whether each layer slides: all except every fourth, beginning with the first."""
    return [layer % 4 != 0 for layer in range(int(plain_number(keys, "num_hidden_layers")))]


def granite_rope(keys: Tree, sliding: bool) -> Tree | None:
    slides = sliding_layers(keys) or granite_slides(keys)
    bases = typed_list((int, float), keys, "layer_rope_theta")
    if bases and len(bases) != len(slides):
        raise FamilyError(f"layer_rope_theta names {len(bases)} layers, num_hidden_layers is {len(slides)}")
    own = {base for base, slide in zip(bases, slides) if slide == sliding}
    if len(own) > 1 or not all(is_number(base) and base >= 0 for base in own):
        raise FamilyError(f"layer_rope_theta = {bases} is not supported, only one number, not below 0, for "
                          "each type of layer")
    base = own.pop() if own else None
    fields = read_rope(keys)
    if base == 0:
        return None
    return rope_part(fields if base is None else fields | {"mixer.rope.base": base})


def write_granite_bases(layers: list[ModelConfig]) -> Tree:
    return {"layer_rope_theta": [layer.mixer.rope.base if layer.mixer.rope else 0 for layer in layers]}


def write_granite_rope(full: RopeConfig | None, sliding: RopeConfig | None) -> Tree:
    window = {} if sliding else NO_LAYER
    return (written_rope(full or sliding) or {"rope_theta": 10000.0, "rope_scaling": None}) | window


GRANITE_SWA_LAYERS = layer_types_group(LayerTypes(
    partial(granite_rope, sliding=False),
    partial(granite_rope, sliding=True),
    write_granite_rope,
    write_differ=write_granite_bases,
    usual_slides=granite_slides,
))
LAGUNA_LAYERS = layer_types_group(LayerTypes(
    partial(shared_rope_of_type, usual=LAGUNA_ROPE, usual_share=1.0, layer_type=FULL),
    partial(shared_rope_of_type, usual=LAGUNA_ROPE, usual_share=1.0, layer_type=SLIDING),
    write_shared_ropes,
    differ=("mixer.heads",),
    of_type=heads_of_type,
    write_differ=write_heads,
    usual_slides=none_slides,
))
OLMO3_LAYERS = layer_types_group(LayerTypes(typed_full, olmo3_sliding, write_olmo3, every=4))
GEMMA2_LAYERS = layer_types_group(LayerTypes(one_rope, one_rope, write_one_rope, every=2))
GPT_OSS_LAYERS = layer_types_group(
    LayerTypes(gpt_oss_rope, gpt_oss_rope, write_gpt_oss_rope, every=2, every_key=None))
GEMMA3_LAYERS = layer_types_group(LayerTypes(typed_full, gemma3_sliding, write_gemma3, every=6))
COHERE2_LAYERS = layer_types_group(
    LayerTypes(no_rope, partial(one_rope, pairs=True), write_sliding_rope, every=4))
AFMOE_LAYERS = layer_types_group(
    LayerTypes(no_rope, one_rope, write_sliding_rope, every=4, every_key="global_attn_every_n_layers"))
EXAONE4_LAYERS = layer_types_group(LayerTypes(exaone4_full, one_rope, write_exaone4, every=4))


# ---- Llama 4: chunks and RoPE, or neither and growing scores -----------------------------------------------

CHUNKED = "chunked_attention"
LLAMA4_PARTS = ("rope", "chunk", "qk_norm", "growth")  # of the mixer, in which layers differ


def chunked_layers(keys: Tree, rotates: list[bool]) -> list[bool]:
    """Return whether each layer attends to chunks. Without layer_types, those with RoPE do."""
    size = number(keys, "attention_chunk_size", nullable=True)
    layer_types = typed_list(str, keys, "layer_types")
    if not layer_types:
        return [rotates_here and size is not None for rotates_here in rotates]
    for layer_type in layer_types:
        if layer_type not in (FULL, CHUNKED):
            raise FamilyError(f"layer_types = {layer_type!r} is not supported, only {FULL} and {CHUNKED}")
    if len(layer_types) != len(rotates):
        raise FamilyError(
            f"layer_types names {len(layer_types)} layers, num_hidden_layers is {len(rotates)}")
    if size is None and CHUNKED in layer_types:
        raise FamilyError(f"layer_types = {CHUNKED!r} without attention_chunk_size")
    return [layer_type == CHUNKED for layer_type in layer_types]


def read_llama4_layers(keys: Tree) -> Tree:
    """Read the layers. Those with RoPE may have chunks and a norm of q and k, the others growing scores."""
    rotates = rotating_layers(keys)
    chunked = chunked_layers(keys, rotates)
    chunks: Tree = {}  # {whether it rotates: the chunk of such layers}
    for rotates_here, is_chunked in zip(rotates, chunked):
        size = keys["attention_chunk_size"] if is_chunked else None
        if chunks.setdefault(rotates_here, size) != size:
            which = "with" if rotates_here else "without"
            raise FamilyError(f"layer_types has two types of layers {which} rotary positions")

    growth = read_llama4_growth(keys)
    rotating: Tree = {
        "mixer.rope": one_rope(keys, pairs=True),
        "mixer.chunk": chunks.get(True),
        "mixer.qk_norm": "unweighted" if number(keys, "use_qk_norm") else None,
        "mixer.growth": None,
    }
    others: Tree = {
        "mixer.rope": None, "mixer.chunk": chunks.get(False), "mixer.qk_norm": None, "mixer.growth": growth,
    }
    if all(rotates) or not any(rotates):
        return rotating if all(rotates) else others
    changes = {path: value for path, value in others.items() if value != rotating[path]}
    pattern = pattern_text([PLAIN if each else NOPE for each in rotates])
    return {**rotating, "blocks": {NOPE: changes}, "pattern": pattern}


def read_llama4_growth(keys: Tree) -> Tree | None:
    """Read the growth of scores. attn_temperature_tuning is a bool, or a number in older folders."""
    rate, every = plain_number(keys, "attn_scale"), plain_number(keys, "floor_scale")
    if not number(keys, "attn_temperature_tuning") or rate == 0:
        return None
    if rate < 0 or every < 1 or every % 1:
        raise FamilyError(f"attn_scale = {rate} and floor_scale = {every} are not supported, only a number "
                          "above 0 and a whole one")
    return {"rate": rate, "every": int(every), "first": 1}


def write_llama4_layers(model: ModelConfig) -> Tree:
    mixers = [layer.mixer for layer in layers_of(model)]
    rotating = [mixer for mixer in mixers if mixer.rope is not None]
    growth = next((mixer.growth for mixer in mixers if mixer.growth is not None), None)
    grown = {"attn_scale": growth.rate, "floor_scale": growth.every} if growth else {}
    return {
        "no_rope_layers": [int(mixer.rope is not None) for mixer in mixers],
        "layer_types": [FULL if mixer.chunk is None else CHUNKED for mixer in mixers],
        "attention_chunk_size": next((mixer.chunk for mixer in mixers if mixer.chunk is not None), None),
        "use_qk_norm": any(mixer.qk_norm is not None for mixer in mixers),
        "attn_temperature_tuning": growth is not None,
        **grown,
        **written_rope(rotating[0].rope if rotating else None),
    }


def llama4_obstacles(model: ModelConfig) -> list[str]:
    """Return the fields that a write and a read would change."""
    layers = layers_of(model)
    if not all(isinstance(layer.mixer, AttentionConfig) for layer in layers):
        return ["blocks", "pattern"]
    none = dict.fromkeys(LLAMA4_PARTS)
    if len({(replace(layer.mixer, **none), layer.mlp, layer.norm) for layer in layers}) > 1:
        return ["blocks", "pattern"]
    lost = lost_ropes(layers)
    if lost:
        return lost
    try:
        sizes = size_keys(model, layers[0])
        fields = read_llama4_layers({**LLAMA4_LAYER_DEFAULTS, **sizes, **write_llama4_layers(model)})
    except FamilyError:
        return ["blocks", "pattern"] if model.pattern else ["mixer.chunk"]
    changes = fields.get("blocks", {}).get(NOPE, {})
    for layer in layers:
        again = llama4_parts(fields if layer.mixer.rope else {**fields, **changes})
        lost = [f"mixer.{part}" for part, value in again.items() if getattr(layer.mixer, part) != value]
        if lost:
            return ["blocks", "pattern"] if model.pattern else lost
    return []


def llama4_parts(fields: Tree) -> dict[str, object]:
    """Return the fields of one layer as parts of a mixer."""
    parts = {part: fields[f"mixer.{part}"] for part in LLAMA4_PARTS}
    growth = parts["growth"]
    return {
        **parts,
        "rope": rope_from(parts["rope"]),
        "growth": growth and build_tree(GrowthConfig, growth, "mixer.growth."),
    }


LLAMA4_LAYER_DEFAULTS: Tree = {
    "rope_theta": 500000.0,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
    "attention_chunk_size": 8192,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
}
LLAMA4_LAYERS = FieldGroup(
    (*(f"mixer.{part}" for part in LLAMA4_PARTS), "blocks", "pattern"),
    read_llama4_layers,
    write_llama4_layers,
    llama4_obstacles,
)
