"""Rules that relate keys of a config.json to fields of ModelConfig.

A rule reads keys into fields, writes fields as keys, and names fields whose values no key can express. Field,
Fixed and Only are simple; a FieldGroup covers anything beyond one field and one key. The records in
checkpoint/hf/families list the rules of each family.

read(keys): keys of a config.json, with the family's defaults -> fields. Raises FamilyError.
write(model): model, as returned by spell_out -> keys.
obstacles(model): names of fields whose values these keys cannot express.
"""
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from config import (
    ConfigError,
    ModelConfig,
    Tree,
    head_dim,
    kv_heads,
    layer_kinds,
    layer_model,
    modules_ahead,
    rotated_dim,
    value_dim,
)
from config.pattern import PLAIN, BlockVariant, pattern_text
from config.reading.flat import FlatModel, flat_model, from_flat
from config.tree import has_path, value_at, with_values
from model.attention import AttentionConfig
from model.delta import DeltaConfig
from model.mlp import MLPConfig
from model.rope import LinearScaling, Llama3Scaling, LongRopeScaling, Scaling, YarnScaling

LOCAL, NOPE = "local", "nope"  # kinds of blocks: with a window, without RoPE


class FamilyError(ValueError):
    """config.json describes a model that ours cannot express."""


@functools.lru_cache(maxsize=1 << 8)
def spell_out(model: ModelConfig) -> FlatModel:
    """Return the model with flat expert keys, explicit numbers instead of None, and its pattern as written
    by pattern_text."""
    model, _ = flat_model(model)
    values: Tree = {"pattern": pattern_text(layer_kinds(model))}
    if model.experts is None:
        values["moe_ffn"] = getattr(model.mlp, "width", 0)
    if isinstance(model.mixer, AttentionConfig):
        values |= {
            "mixer.kv_heads": kv_heads(model),
            "mixer.head_dim": head_dim(model),
            "mixer.value_dim": value_dim(model),
        }
        values["blocks"] = tuple(spelled_kind(model, variant) for variant in model.blocks)
    if isinstance(model.mixer, DeltaConfig):
        values["mixer.key_heads"] = model.mixer.heads_over_tp()["key_heads"]
    return with_values(model, values)


def spelled_kind(model: ModelConfig, variant: BlockVariant) -> BlockVariant:
    """Return a kind with other heads, with the sizes that depend on them made explicit."""
    changes = dict(variant.changes)
    if "mixer.heads" not in changes:
        return variant
    like = with_values(replace(model, blocks=(), pattern=None), changes)
    sizes = {
        "mixer.kv_heads": kv_heads(like),
        "mixer.head_dim": head_dim(like),
        "mixer.value_dim": value_dim(like),
    }
    return BlockVariant(variant.name, tuple((changes | sizes).items()))


# ---- kinds of rules ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Field:
    """One field and one key."""
    name: str
    key: str
    nullable: bool = False  # null is a valid value; otherwise it is a number
    minimum: float = -math.inf

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, keys: Tree) -> Tree:
        value = number(keys, self.key, self.nullable)
        if value is not None and value < self.minimum:
            raise FamilyError(f"{self.key} = {value} is below {self.minimum}")
        return {self.name: value}

    def write(self, model: ModelConfig) -> Tree:
        return {self.key: value_at(model, self.name)}

    def obstacles(self, model: ModelConfig) -> list[str]:
        if not has_path(model, self.name):
            return [self.name]
        value = value_at(model, self.name)
        if value is None:
            return [] if self.nullable else [self.name]
        return [self.name] if value < self.minimum else []


@dataclass(frozen=True)
class Fixed:
    """A field without a key, with the same value in all models of the family."""
    name: str
    value: object

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, keys: Tree) -> Tree:
        return {self.name: self.value}

    def write(self, model: ModelConfig) -> Tree:
        return {}

    def obstacles(self, model: ModelConfig) -> list[str]:
        return [] if has_path(model, self.name) and value_at(model, self.name) == self.value else [self.name]


@dataclass(frozen=True)
class Only:
    """A key for which only some values are supported."""
    key: str
    values: Sequence[object]  # the first is the default of a missing key
    written: bool = True

    fields: ClassVar[tuple[str, ...]] = ()

    def read(self, keys: Tree) -> Tree:
        value = keys.get(self.key, self.values[0])
        if value not in self.values:
            supported = " or ".join(map(repr, self.values))
            raise FamilyError(f"{self.key} = {value!r} is not supported, only {supported}")
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {self.key: self.values[0]} if self.written else {}

    def obstacles(self, model: ModelConfig) -> list[str]:
        return []


@dataclass(frozen=True)
class Idle:
    """Keys without effect in the supported models of the family."""
    keys: tuple[str, ...]

    fields: ClassVar[tuple[str, ...]] = ()

    def read(self, keys: Tree) -> Tree:
        for key in self.keys:
            keys.get(key)
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {}

    def obstacles(self, model: ModelConfig) -> list[str]:
        return []


class TrackedKeys(dict[str, Any]):
    """The keys of a config.json. `asked` records which keys rules have read."""

    def __init__(self, keys: Tree) -> None:
        super().__init__(keys)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def with_keys(keys: Tree, changes: Tree) -> Tree:
    """Return the keys with some values replaced. Reads are recorded in the original's `asked`."""
    changed = TrackedKeys({**keys, **changes})
    if isinstance(keys, TrackedKeys):
        changed.asked = keys.asked
    return changed


def no_fields(keys: Tree) -> Tree:
    return {}


def no_keys(model: ModelConfig) -> Tree:
    return {}


def no_obstacles(model: ModelConfig) -> list[str]:
    return []


@dataclass(frozen=True)
class FieldGroup:
    """Fields and keys with a custom relation."""
    fields: tuple[str, ...]
    read: Callable[[Tree], Tree] = no_fields
    write: Callable[[ModelConfig], Tree] = no_keys
    obstacles: Callable[[ModelConfig], list[str]] = no_obstacles


Rule = Field | Fixed | Only | Idle | FieldGroup


def read_rules(rules: Sequence[Rule], keys: Tree) -> Tree:
    """Return the fields that all rules read; later rules override earlier ones."""
    values: Tree = {}
    for rule in rules:
        values |= rule.read(keys)
    return values


def read_parts(rules: Sequence[Rule], keys: Tree) -> Tree:
    """Call read_rules and convert experts to a model part. Raises FamilyError."""
    try:
        return from_flat(read_rules(rules, keys))
    except ConfigError as error:
        raise FamilyError(str(error)) from None


def write_rules(rules: Sequence[Rule], model: ModelConfig) -> Tree:
    """Return the keys that all rules write; later rules override earlier ones."""
    keys: Tree = {}
    for rule in rules:
        keys |= rule.write(model)
    return keys


def layers_of(model: ModelConfig) -> list[ModelConfig]:
    """Return the model of each layer."""
    return [layer_model(model, layer) for layer in range(model.layers)]


def number(keys: Tree, key: str, nullable: bool = False) -> int | float | None:
    """Return the value of a key. Raises FamilyError if it is missing, or neither a number nor an allowed
    null."""
    if key not in keys:
        raise FamilyError(f"{key} is missing")
    value = keys[key]
    if value is None and nullable:
        return None
    if not is_number(value):
        raise FamilyError(f"{key} = {value!r} is not a number")
    return value


def is_number(value: object) -> bool:
    """Return whether a value is a number that fits a float: JSON has larger ones, and NaN."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def plain_number(keys: Tree, key: str) -> int | float:
    """Return the value of a key that is never null. Raises FamilyError."""
    value = number(keys, key)
    assert value is not None
    return value


def typed_list(kind: type | tuple[type, ...], keys: Tree, key: str) -> list:
    """Return the list under a key, or [] if null or missing. Raises FamilyError if an entry is not of
    this type, or of one of several."""
    entries = keys.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
        name = kind.__name__ if isinstance(kind, type) else "numbers"
        raise FamilyError(f"{key} = {entries!r} is not a list of {name}")
    return entries


# ---- rotary positions --------------------------------------------------------------------------------------

def read_rope(keys: Tree, mla: bool = False, share: float = 1.0) -> Tree:
    """Read base and scaling in both spellings (checkpoint/hf/config.py). `share` is the share of
    positional channels that are rotated."""
    # in transformers 5's order
    scaling = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
    if kind not in ("default", "linear", "llama3", "yarn", "longrope") or not isinstance(scaling, dict):
        raise FamilyError(
            f"rope scaling {kind!r} is not supported, only linear, llama3's, yarn's, longrope and none")
    check_rope_parameters(scaling)

    theta = plain_number(scaling if "rope_theta" in scaling else keys, "rope_theta")
    if theta <= 0:
        raise FamilyError(f"rope_theta = {theta} is not above 0")
    if kind == "default":
        return {"mixer.rope.base": theta}
    if kind == "linear":
        factor = number(scaling, "factor")
        return {"mixer.rope.base": theta, "mixer.rope.scaling": {"kind": kind, "factor": factor}}
    if kind == "longrope":
        scaled = read_longrope(scaling, keys, channels=int(rotated_channels(keys, mla) * share))
        return {"mixer.rope.base": theta, "mixer.rope.scaling": scaled}
    scaled = read_rope_scaling(kind, scaling, keys)
    check_ramp(scaled, theta, rotated_channels(keys, mla) * share)
    if kind == "yarn":
        scaled |= read_yarn_scales(scaling, mla)
    return {"mixer.rope.base": theta, "mixer.rope.scaling": scaled}


def read_rope_scaling(kind: str, scaling: Tree, keys: Tree) -> Tree:
    """Read the factor and the limits of the ramp."""
    needed = ("factor",) if kind == "yarn" else ("factor", "low_freq_factor", "high_freq_factor")
    for key in needed:
        if scaling.get(key) is None:
            raise FamilyError(f"{kind} rope scaling without {key}")
    scaled: Tree = {"kind": kind, "factor": scaling["factor"], "original": original_context(scaling, keys)}
    if kind == "llama3":
        limits = {"low_freq": scaling["low_freq_factor"], "high_freq": scaling["high_freq_factor"]}
    else:
        limits = {"low_freq": scaling.get("beta_slow") or 1, "high_freq": scaling.get("beta_fast") or 32}
        if not scaling.get("truncate", True):
            limits["truncate"] = False
    return scaled | limits


def original_context(scaling: Tree, keys: Tree) -> int | float:
    """Return the context before scaling: a key of the config itself comes first."""
    stated = {"original_max_position_embeddings": keys["max_position_embeddings"], **scaling, **keys}
    return plain_number(stated, "original_max_position_embeddings")


def read_longrope(scaling: Tree, keys: Tree, channels: int) -> Tree:
    """Read the numbers of each channel pair, and the factor or that implied by attention_factor.
    `channels` counts the rotated channels of a head."""
    original = original_context(scaling, keys)
    if original <= 1:
        raise FamilyError(f"rope scaling 'longrope' of {original} tokens is not supported, only above 1")
    scaled: Tree = {"kind": "longrope", "original": original}
    for name in ("short", "long"):
        numbers = typed_list((int, float), scaling, f"{name}_factor")
        if not numbers or not all(is_number(number) and number > 0 for number in numbers):
            raise FamilyError(f"rope scaling 'longrope' without numbers above 0 in {name}_factor")
        if len(numbers) != channels // 2:
            raise FamilyError(
                f"{name}_factor has {len(numbers)} numbers, and {channels} channels are rotated; "
                f"rope scaling 'longrope' has {channels // 2}")
        scaled[name] = numbers
    factor, multiplied = scaling.get("factor"), scaling.get("attention_factor")
    if factor is None:
        factor = plain_number(keys, "max_position_embeddings") / original
    if multiplied is not None:
        if multiplied < 1:
            raise FamilyError(f"rope parameter attention_factor = {multiplied} is not supported below 1")
        factor = original ** (multiplied**2 - 1)
    return scaled | {"factor": factor}


def rotated_channels(keys: Tree, mla: bool) -> int | float:
    """Return the number of channels of a head that have positions."""
    if mla:
        return plain_number(keys, "qk_rope_head_dim")
    return head_size(keys)


def head_size(keys: Tree) -> int | float:
    """Return the channels of an attention head."""
    size = number({"head_dim": None, **keys}, "head_dim", nullable=True)
    return size or plain_number(keys, "hidden_size") // plain_number(keys, "num_attention_heads")


def check_ramp(scaled: Tree, theta: float, channels: int | float) -> None:
    """Raise FamilyError if the ramp between the scaling's two limits is unsupported (ramp_obstacle)."""
    kind, original = scaled["kind"], scaled["original"]
    low, high = scaled["low_freq"], scaled["high_freq"]
    truncate = scaled.get("truncate", True)
    if ramp_obstacle(
        kind, channels, theta=theta, low=low, high=high, original=original, truncate=truncate
    ):
        raise FamilyError(
            f"{kind} rope scaling between {low} and {high} rotations in {original} positions, "
            f"with rope_theta = {theta}, is not supported: no channel lies between them"
        )


def ramp_obstacle(
    kind: str,
    channels: int | float,
    *,
    theta: float,
    low: float,
    high: float,
    original: float,
    truncate: bool = True,
) -> str:
    """Return the field for which a scaling's ramp differs between transformers and kernels/rope.py, or "".

    The ramp covers channels that rotate between `low` and `high` times in `original` positions. Where it
    would run backwards or has no channels, the two diverge or fail.
    """
    if not 0 < low <= high:  # a step if equal
        return "mixer.rope.scaling.low_freq"
    if original <= 0:
        return "mixer.rope.scaling.original"
    if kind != "yarn":
        return ""
    if theta <= 1:
        return "mixer.rope.base"

    def channel(rotations: float) -> float:
        return channels * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(high), channel(low)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    return "mixer.rope.scaling.original" if last < first else ""


ROPE_PARAMETERS = frozenset(
    """rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor
    beta_fast beta_slow mscale mscale_all_dim attention_factor truncate partial_rotary_factor
    max_position_embeddings finetuned short_factor long_factor""".split()
)
NOT_NUMBERS = ("rope_type", "type", "short_factor", "long_factor")  # among the parameters


def check_rope_parameters(scaling: Tree) -> None:
    """Raise FamilyError for parameters that are unknown or not numbers, and for channels without
    rotation."""
    for key, value in scaling.items():
        if key not in ROPE_PARAMETERS and value is not None:
            raise FamilyError(f"rope parameter {key} = {value!r} is not supported")
        if key not in NOT_NUMBERS and not (value is None or is_number(value)):
            raise FamilyError(f"rope parameter {key} = {value!r} is not supported")
    if (scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        fraction = scaling["partial_rotary_factor"]
        raise FamilyError(f"partial_rotary_factor = {fraction} is not supported, only 1.0")


def read_yarn_scales(scaling: Tree, mla: bool) -> Tree:
    """Read mscale and mscale_all, by which YaRN scales the logits, as transformers does.

    mscale counts only together with mscale_all_dim. An attention_factor replaces both for cos and sin.
    """
    mscale = scaling.get("mscale")
    mscale_all = scaling.get("mscale_all_dim")
    if mscale_all and not mscale:
        raise FamilyError(f"rope parameter mscale_all_dim = {mscale_all} without mscale is not supported")

    fields: Tree = {"mscale": 1.0, "mscale_all": 0.0}
    if mscale_all:
        fields = {"mscale": mscale, "mscale_all": mscale_all}
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        return fields
    if mscale_all:
        raise FamilyError("rope parameters attention_factor and mscale_all_dim together are not supported")
    if attention_factor < 1:
        raise FamilyError(f"rope parameter attention_factor = {attention_factor} is not supported below 1")
    if scaling["factor"] > 1:
        fields["mscale"] = (attention_factor - 1) / (0.1 * math.log(scaling["factor"]))
    elif attention_factor != 1:
        raise FamilyError(
            f"rope parameter attention_factor = {attention_factor} is not supported where factor is at most 1"
        )
    return fields


def write_rope(model: ModelConfig) -> Tree:
    assert model.mixer.rope is not None
    return {"rope_theta": model.mixer.rope.base, "rope_scaling": write_rope_scaling(model.mixer.rope.scaling)}


def write_rope_scaling(scaling: Scaling | None) -> Tree | None:
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    written: Tree = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
    }
    if isinstance(scaling, LongRopeScaling):
        return written | {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
    if isinstance(scaling, Llama3Scaling):
        return written | {"low_freq_factor": scaling.low_freq, "high_freq_factor": scaling.high_freq}
    written |= {"beta_slow": scaling.low_freq, "beta_fast": scaling.high_freq}
    if not scaling.truncate:
        written["truncate"] = False
    if scaling.mscale_all:
        return written | {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all}
    if scaling.mscale == 1.0:
        return written
    return written | {"attention_factor": 1 + 0.1 * scaling.mscale * math.log(scaling.factor)}


def rope_obstacles(model: ModelConfig, mla: bool = False) -> list[str]:
    """Return fields whose values the other side would misread or cannot compute."""
    settings = model.mixer.rope
    if settings is None:
        return ["mixer.rope"]
    if settings.base <= 0:
        return ["mixer.rope.base"]
    scaling = settings.scaling
    if scaling is None:
        return []
    if isinstance(scaling, LinearScaling):
        return []
    if isinstance(scaling, LongRopeScaling):
        pairs = rotated_dim(model) // 2
        lost = [name for name in ("short", "long") if len(getattr(scaling, name)) != pairs]
        lost += ["original"] if scaling.original <= 1 else []
        return [f"mixer.rope.scaling.{name}" for name in lost]
    if scaling.kind not in ("llama3", "yarn"):
        return ["mixer.rope.scaling.kind"]

    lost: list[str] = []
    ramp = ramp_obstacle(
        scaling.kind,
        rotated_dim(model),
        theta=settings.base,
        low=scaling.low_freq,
        high=scaling.high_freq,
        original=scaling.original,
        truncate=getattr(scaling, "truncate", True),
    )
    if ramp:
        lost.append(ramp)
    if isinstance(scaling, YarnScaling):
        if scaling.mscale_all and not scaling.mscale:
            lost.append("mixer.rope.scaling.mscale")
        elif not scaling.mscale_all and scaling.factor <= 1 and scaling.mscale != 1.0:
            lost.append("mixer.rope.scaling.mscale")  # no effect here, but an effect there
    return lost


ROPE_FIELDS = ("mixer.rope.base", "mixer.rope.scaling")
ROPE = FieldGroup(ROPE_FIELDS, read_rope, write_rope, rope_obstacles)
MLA_ROPE = FieldGroup(
    ROPE_FIELDS,
    functools.partial(read_rope, mla=True),
    write_rope,
    functools.partial(rope_obstacles, mla=True),
)
def rope_and_share(keys: Tree, default: float) -> tuple[str, Any, float]:
    """Return the key of the rotary positions, its value without the share of rotated channels, and that
    share. The share is `default` without the key partial_rotary_factor."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    scaling = keys.get(name) or {}
    share = keys.get("partial_rotary_factor")
    if isinstance(scaling, dict):
        share = scaling.get("partial_rotary_factor", share)
        scaling = {key: value for key, value in scaling.items() if key != "partial_rotary_factor"}
    share = default if share is None else share
    if not is_number(share) or not 0 < share <= 1:
        raise FamilyError(f"partial_rotary_factor = {share!r} is not a number in (0, 1]")
    keys.get("rope_theta")
    return name, scaling, share


def read_share_of_rope(keys: Tree, default: float) -> Tree:
    """Read RoPE on the first channels of each head, as many as partial_rotary_factor says."""
    name, scaling, share = rope_and_share(keys, default)
    fields = read_rope({**keys, name: scaling})
    if share != 1 and "mixer.rope.scaling" in fields:
        raise FamilyError(f"rope scaling beside partial_rotary_factor = {share} is not supported")
    return fields | {"mixer.rope.share": float(share)}


def write_share_of_rope(model: ModelConfig) -> Tree:
    assert model.mixer.rope is not None
    return write_rope(model) | {"partial_rotary_factor": model.mixer.rope.share}


def share_of_rope_obstacles(model: ModelConfig) -> list[str]:
    is_lost = model.mixer.rope is not None and model.mixer.rope.share != 1 and model.mixer.rope.scaling
    return rope_obstacles(model) + (["mixer.rope.scaling"] if is_lost else [])


def share_of_rope(default: float) -> FieldGroup:
    return FieldGroup(
        (*ROPE_FIELDS, "mixer.rope.share"),
        functools.partial(read_share_of_rope, default=default),
        write_share_of_rope,
        share_of_rope_obstacles,
    )


# ---- factors and caps --------------------------------------------------------------------------------------

def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-12)


def inverse(value: float) -> float:
    """Return 1 / value, recovering the original number: 13.0 for 1 / 13."""
    return float(f"{1 / value:.14g}")


def score_scale(model: ModelConfig) -> float:
    """Return the factor of the attention scores."""
    assert isinstance(model.mixer, AttentionConfig)
    return head_dim(model) ** -0.5 if model.mixer.scale is None else model.mixer.scale


def read_attention_multiplier(keys: Tree) -> Tree:
    value, channels = plain_number(keys, "attention_multiplier"), head_size(keys)
    is_usual = channels > 0 and close(value, channels**-0.5)
    return {"mixer.scale": None if is_usual else value}


def read_query_scalar(keys: Tree) -> Tree:
    """Read the score scale: 1 / sqrt(query_pre_attn_scalar)."""
    value = plain_number(keys, "query_pre_attn_scalar")
    if value <= 0:
        raise FamilyError(f"query_pre_attn_scalar = {value} is not above 0")
    return {"mixer.scale": None if value == head_size(keys) else value**-0.5}


def query_scalar(model: ModelConfig) -> int:
    return round(score_scale(model) ** -2)


def query_scalar_obstacles(model: ModelConfig) -> list[str]:
    """Return mixer.scale if it does not correspond to a whole number."""
    scale = score_scale(model)
    has_form = 0 < scale <= 1 and close(query_scalar(model) ** -0.5, scale)
    return [] if has_form else ["mixer.scale"]


def read_root_of_width(keys: Tree) -> Tree:
    """Read the embedding scale: Gemma multiplies by the root of its width."""
    return {"embed_scale": float(plain_number(keys, "hidden_size")) ** 0.5}


def read_divided_logits(keys: Tree) -> Tree:
    value = plain_number(keys, "logits_scaling")
    if value <= 0:
        raise FamilyError(f"logits_scaling = {value} is not above 0")
    return {"logit_scale": 1 / value}


ATTENTION_MULTIPLIER = FieldGroup(
    ("mixer.scale",),
    read_attention_multiplier,
    lambda model: {"attention_multiplier": score_scale(model)},
)
QUERY_SCALAR = FieldGroup(
    ("mixer.scale",),
    read_query_scalar,
    lambda model: {"query_pre_attn_scalar": query_scalar(model)},
    query_scalar_obstacles,
)
ROOT_OF_WIDTH = FieldGroup(
    ("embed_scale",),
    read_root_of_width,
    obstacles=lambda model: [] if close(model.embed_scale, model.hidden**0.5) else ["embed_scale"],
)
DIVIDED_LOGITS = FieldGroup(
    ("logit_scale",),
    read_divided_logits,
    lambda model: {"logits_scaling": inverse(model.logit_scale)},
    lambda model: [] if close(1 / inverse(model.logit_scale), model.logit_scale) else ["logit_scale"],
)


# Ministral 3: queries grow with their position, in groups as long as the context before scaling.

MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_growing_rope(keys: Tree, mla: bool = False) -> Tree:
    """Read growing RoPE. The defaults are those of the published model."""
    given = keys.get("rope_scaling") or keys.get("rope_parameters") or MINISTRAL3_ROPE
    if not isinstance(given, dict):
        raise FamilyError(f"rope_parameters = {given!r} is not supported")
    rate = plain_number({"llama_4_scaling_beta": 0.0, **given}, "llama_4_scaling_beta")
    rest = {key: value for key, value in given.items() if key != "llama_4_scaling_beta"}
    fields = read_rope({**keys, "rope_scaling": None, "rope_parameters": rest}, mla)
    if not rate:
        return {**fields, "mixer.growth": None}
    every = plain_number(given, "original_max_position_embeddings")
    return {**fields, "mixer.growth": {"rate": rate, "every": every, "first": 0}}


def write_growing_rope(model: ModelConfig) -> Tree:
    rope, growth = model.mixer.rope, model.mixer.growth
    assert rope is not None
    original = growth.every if growth else model.context
    return {"rope_parameters": {
        "rope_type": "default",
        "original_max_position_embeddings": original,
        **(write_rope_scaling(rope.scaling) or {}),
        "rope_theta": rope.base,
        "llama_4_scaling_beta": growth.rate if growth else 0.0,
    }}


def growing_rope_obstacles(model: ModelConfig, mla: bool = False) -> list[str]:
    lost = rope_obstacles(model, mla)
    growth, rope = model.mixer.growth, model.mixer.rope
    original = getattr(rope.scaling, "original", None) if rope else None
    if growth and growth.first:
        lost.append("mixer.growth.first")
    if growth and original not in (None, growth.every):
        lost.append("mixer.growth.every")
    return lost


# Mistral 4: the same for latent attention. Its config also states how many channels of a head are rotated.

MISTRAL4_ROPE = {
    **MINISTRAL3_ROPE,
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def read_mistral4_rope(keys: Tree) -> Tree:
    keys.get("rope_theta")
    given = keys.get("rope_scaling") or keys.get("rope_parameters") or MISTRAL4_ROPE
    if not isinstance(given, dict) or given.get("rope_type", given.get("type", "default")) == "default":
        raise FamilyError(f"rope_parameters = {given!r} without a scaling is not supported in this family: "
                          "transformers does not run it")
    channels = plain_number(keys, "qk_rope_head_dim")
    share = given.get("partial_rotary_factor")
    if share is not None and share != channels / (plain_number(keys, "qk_nope_head_dim") + channels):
        raise FamilyError(f"partial_rotary_factor = {share!r} is not that of qk_rope_head_dim = {channels}")
    given = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    return read_growing_rope({**keys, "rope_scaling": given}, mla=True)


def mistral4_rope_obstacles(model: ModelConfig) -> list[str]:
    """Return the obstacles: transformers fails without a scaling, and rounds down a quotient to get its
    channels."""
    lost = growing_rope_obstacles(model, mla=True)
    if model.mixer.rope is not None and model.mixer.rope.scaling is None:
        lost.append("mixer.rope.scaling")
    channels, whole = model.mixer.rope_dim, model.mixer.rope_dim + model.mixer.nope_dim
    if int(whole * (channels / whole)) != channels:
        lost.append("mixer.rope_dim")
    return lost


MISTRAL4_GROWING_ROPE = FieldGroup(
    (*ROPE_FIELDS, "mixer.growth"), read_mistral4_rope, write_growing_rope, mistral4_rope_obstacles
)
GROWING_ROPE = FieldGroup(
    (*ROPE_FIELDS, "mixer.growth"), read_growing_rope, write_growing_rope, growing_rope_obstacles
)


def read_hunyuan_rope(keys: Tree) -> Tree:
    """Read Hunyuan's RoPE. Its alpha raises the base (NTK-aware scaling): it is read, and written, as that
    base."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    scaling = keys.get(name) or {}
    keys.get("rope_theta")
    alpha = scaling.get("alpha") if isinstance(scaling, dict) else None
    if not alpha or scaling.get("rope_type", scaling.get("type")) != "dynamic":
        if isinstance(scaling, dict):
            scaling = {key: value for key, value in scaling.items() if key != "alpha"}
        return read_rope({**keys, name: scaling})
    base = plain_number(scaling if "rope_theta" in scaling else keys, "rope_theta")
    channels = head_size(keys)
    if not is_number(alpha) or alpha <= 0 or channels <= 2:
        raise FamilyError(f"rope parameter alpha = {alpha!r} is not supported")
    return {"mixer.rope.base": base * alpha ** (channels / (channels - 2))}


HUNYUAN_ROPE = FieldGroup(ROPE_FIELDS, read_hunyuan_rope, write_rope, rope_obstacles)


# ---- rotary positions of single families -------------------------------------------------------------------

CWM_SCALING = {
    "rope_type": "llama3",
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def read_cwm_rope(keys: Tree) -> Tree:
    """Read CWM's RoPE. The default scaling is that of the published model."""
    if keys.get("rope_scaling") or keys.get("rope_parameters"):
        return read_rope(keys)
    scaling = CWM_SCALING | {"rope_theta": plain_number(keys, "rope_theta")}
    return read_rope({**keys, "rope_scaling": scaling})


def write_cwm_rope(model: ModelConfig) -> Tree:
    keys = write_rope(model)
    return keys | {"rope_scaling": keys["rope_scaling"] or {"rope_type": "default"}}


CWM_ROPE = FieldGroup(ROPE_FIELDS, read_cwm_rope, write_cwm_rope, rope_obstacles)

APERTUS_ROPE = {**CWM_SCALING, "factor": 8.0, "rope_theta": 12e6}


def read_apertus_rope(keys: Tree) -> Tree:
    """Read the RoPE of Apertus. The default base and scaling are those of the published model."""
    if keys.get("rope_scaling") or keys.get("rope_parameters"):
        return read_rope(keys)
    keys.get("rope_theta")
    return read_rope({**keys, "rope_scaling": APERTUS_ROPE})


APERTUS_SCALED_ROPE = FieldGroup(ROPE_FIELDS, read_apertus_rope, write_cwm_rope, rope_obstacles)


# Phi 3: LongRoPE or none, on some of the channels; a missing factor follows from the context.

def read_phi3_rope(keys: Tree) -> Tree:
    name, scaling, share = rope_and_share(keys, 1.0)
    keys.get("original_max_position_embeddings")
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
    if kind not in ("default", "longrope", "su"):
        raise FamilyError(f"rope scaling {kind!r} is not supported in this family, only longrope and none")
    if isinstance(scaling, dict):  # su is an older name
        scaling = {key: "longrope" if value == "su" else value for key, value in scaling.items()}
    return read_rope({**keys, name: scaling}, share=share) | {"mixer.rope.share": float(share)}


def write_phi3_rope(model: ModelConfig) -> Tree:
    keys = write_rope(model) | {"partial_rotary_factor": model.mixer.rope.share}
    scaling = keys["rope_scaling"]
    if scaling is None:
        return keys
    original = scaling["original_max_position_embeddings"]
    if scaling["factor"] == model.context / original:
        del scaling["factor"]
    return keys | {"original_max_position_embeddings": original}


def phi3_rope_obstacles(model: ModelConfig) -> list[str]:
    rope = model.mixer.rope
    has_form = rope is None or isinstance(rope.scaling, (LongRopeScaling, type(None)))
    return rope_obstacles(model) or ([] if has_form else ["mixer.rope.scaling.kind"])


PHI3_ROPE = FieldGroup(
    (*ROPE_FIELDS, "mixer.rope.share"), read_phi3_rope, write_phi3_rope, phi3_rope_obstacles
)


# ---- sliding windows ---------------------------------------------------------------------------------------

def sliding_layers(keys: Tree) -> list[bool]:
    """Return whether each layer has a window according to layer_types, or [] without it. Raises
    FamilyError."""
    layer_types = typed_list(str, keys, "layer_types")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise FamilyError(
                f"layer_types = {layer_type!r} is not supported, only full_attention and sliding_attention"
            )
    layers = plain_number(keys, "num_hidden_layers")
    if layer_types and len(layer_types) != layers:
        raise FamilyError(f"layer_types names {len(layer_types)} layers, num_hidden_layers is {layers}")
    return [layer_type == "sliding_attention" for layer_type in layer_types]


def read_no_window(keys: Tree) -> Tree:
    if any(sliding_layers(keys)):
        raise FamilyError("layer_types = 'sliding_attention' is not supported in this family")
    return {"mixer.window": None}


def window_obstacle(model: ModelConfig) -> list[str]:
    return ["mixer.window"] if model.mixer.window is not None else []


def windows_by_layer(slides: Sequence[bool], size: int | float | None) -> Tree:
    """Return the fields for layers with windows of `size` and others with full attention."""
    if size is None or not any(slides) or all(slides):
        return {"mixer.window": size if any(slides) else None}
    kinds = [LOCAL if each else PLAIN for each in slides]
    pattern = pattern_text(kinds)
    return {"mixer.window": None, "blocks": {LOCAL: {"mixer.window": size}}, "pattern": pattern}


def layer_windows(model: ModelConfig) -> list[int | None]:
    layers = (layer_model(model, layer) for layer in range(model.layers))
    return [getattr(like.mixer, "window", None) for like in layers]


def windows_obstacle(model: ModelConfig) -> list[str]:
    """Return ["blocks", "pattern"] unless layers differ only in having the same window or none."""
    changed = {path for variant in model.blocks for path, _ in variant.changes}
    sizes = {*layer_windows(model)} - {None}
    return ["blocks", "pattern"] if changed - {"mixer.window"} or len(sizes) > 1 else []


def layer_types(model: ModelConfig) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in layer_windows(model)]


def longest_window(model: ModelConfig) -> int | None:
    return max((window for window in layer_windows(model) if window is not None), default=None)


def read_qwen_window(keys: Tree) -> Tree:
    """Read the windows. use_sliding_window may disable the window named by sliding_window."""
    size = number(keys, "sliding_window", nullable=True)
    if not number(keys, "use_sliding_window"):
        size = None
    first = plain_number(keys, "max_window_layers")  # the first layer with a window
    slides = sliding_layers(keys)
    if not slides:
        layers = plain_number(keys, "num_hidden_layers")
        slides = [size is not None and layer >= first for layer in range(int(layers))]
    if any(slides) and size is None:
        raise FamilyError(
            "layer_types = 'sliding_attention' without a window (use_sliding_window, sliding_window)")
    return windows_by_layer(slides, size)


def write_qwen_window(model: ModelConfig) -> Tree:
    """Return the window keys. max_window_layers is ignored if layer_types is given."""
    size = longest_window(model)
    slides = [window is not None for window in layer_windows(model)]
    keys: Tree = {
        "use_sliding_window": size is not None,
        "sliding_window": size,
        "max_window_layers": slides.index(True) if any(slides) else model.layers,
    }
    is_mixed = any(slides) and not all(slides)
    return keys | ({"layer_types": layer_types(model)} if is_mixed else {})


def read_layer_types(keys: Tree) -> Tree:
    """Read the windows of a family whose layers slide as layer_types says, or all of them without it."""
    size = number(keys, "sliding_window", nullable=True)
    slides = sliding_layers(keys) or [size is not None] * int(plain_number(keys, "num_hidden_layers"))
    if any(slides) and size is None:
        raise FamilyError("layer_types = 'sliding_attention' without sliding_window")
    return windows_by_layer(slides, size)


def write_layer_types(model: ModelConfig) -> Tree:
    return {"sliding_window": longest_window(model), "layer_types": layer_types(model)}


def read_dots_window(keys: Tree) -> Tree:
    """Check the windows: dots1 is supported only without any."""
    slides = any(sliding_layers(keys))
    if not keys.get("layer_types"):
        has_size = keys.get("sliding_window", 4096) is not None
        first = plain_number({"max_window_layers": 62, **keys}, "max_window_layers")
        slides = has_size and plain_number(keys, "num_hidden_layers") > first
    if slides:
        raise FamilyError(
            "layers with a sliding window (max_window_layers, layer_types) are not supported in this family"
        )
    return {"mixer.window": None}


def read_cwm_windows(keys: Tree) -> Tree:
    """Read the windows. Without layer_types every fourth layer, beginning with the first, has full
    attention."""
    layers = range(int(plain_number(keys, "num_hidden_layers")))
    default = ["sliding_attention" if layer % 4 else "full_attention" for layer in layers]
    stated = {key: keys.get(key) for key in ("layer_types", "sliding_window")}
    stated["layer_types"] = stated["layer_types"] or default
    return read_layer_types({**keys, **stated})


WINDOWS = ("mixer.window", "blocks", "pattern")
QWEN_WINDOW = FieldGroup(WINDOWS, read_qwen_window, write_qwen_window, windows_obstacle)
CWM_WINDOWS = FieldGroup(WINDOWS, read_cwm_windows, write_layer_types, windows_obstacle)
LAYER_WINDOWS = FieldGroup(WINDOWS, read_layer_types, write_layer_types, windows_obstacle)
PLAIN_WINDOW = Field("mixer.window", "sliding_window", nullable=True)
DOTS_NO_WINDOW = FieldGroup(
    ("mixer.window",),
    read_dots_window,
    lambda model: {"sliding_window": None, "max_window_layers": model.layers},
    window_obstacle,
)
NO_WINDOW = FieldGroup(("mixer.window",), read_no_window, obstacles=window_obstacle)


# ---- layers without rotary positions -----------------------------------------------------------------------

def rotating_layers(keys: Tree) -> list[bool]:
    """Return whether each layer has RoPE: 1 or 0 in no_rope_layers. Without it, each layer with a multiple
    of no_rope_layer_interval has none."""
    layers = int(plain_number(keys, "num_hidden_layers"))
    rotates = typed_list(int, keys, "no_rope_layers")
    if not rotates:
        every = int(plain_number(keys, "no_rope_layer_interval"))
        if every < 1:
            raise FamilyError(f"no_rope_layer_interval = {every} is not above 0")
        rotates = [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(rotates) != layers:
        raise FamilyError(f"no_rope_layers names {len(rotates)} layers, num_hidden_layers is {layers}")
    return [bool(each) for each in rotates]


def read_no_rope_layers(keys: Tree) -> Tree:
    pattern = pattern_text([PLAIN if each else NOPE for each in rotating_layers(keys)])
    return {"blocks": {NOPE: {"mixer.rope": None}}, "pattern": pattern} if pattern else {}


def write_no_rope_layers(model: ModelConfig) -> Tree:
    return {"no_rope_layers": [int(layer.mixer.rope is not None) for layer in layers_of(model)]}


def no_rope_obstacle(model: ModelConfig) -> list[str]:
    """Return ["blocks", "pattern"] unless layers differ only in having the model's RoPE or none."""
    changes = [change for variant in model.blocks for change in variant.changes]
    return [] if all(change == ("mixer.rope", None) for change in changes) else ["blocks", "pattern"]


NO_ROPE_LAYERS = FieldGroup(
    ("blocks", "pattern"), read_no_rope_layers, write_no_rope_layers, no_rope_obstacle
)


# ---- sizes, biases, dropout --------------------------------------------------------------------------------

def read_head_dim(keys: Tree) -> Tree:
    """Read head_dim; None stands for hidden / heads, which transformers 5 writes out."""
    size = number(keys, "head_dim", nullable=True)
    heads = plain_number(keys, "num_attention_heads")
    if size is not None and size * heads == plain_number(keys, "hidden_size"):
        size = None
    return {"mixer.head_dim": size}


def read_gpt2_width(keys: Tree) -> Tree:
    """Read n_inner; null stands for four times the width."""
    width = number(keys, "n_inner", nullable=True)
    return {"mlp.width": 4 * plain_number(keys, "n_embd") if width is None else width}


def read_no_head_dim(keys: Tree) -> Tree:
    """Check head_dim in a family whose config class lacks it: transformers reads it anyway."""
    size = read_head_dim(keys)["mixer.head_dim"] if "head_dim" in keys else None
    if size is not None:
        raise FamilyError(
            f"head_dim = {size} is not supported in this family, only hidden_size / num_attention_heads"
        )
    return {"mixer.head_dim": None}


def heads_share_hidden(model: ModelConfig) -> list[str]:
    """Return the obstacle in a family without a head_dim key, where it must be hidden / heads."""
    return ["mixer.head_dim"] if head_dim(model) * model.mixer.heads != model.hidden else []


def one_kv_head_each(model: ModelConfig) -> list[str]:
    """Return the obstacle in a family without grouped queries."""
    return ["mixer.kv_heads"] if kv_heads(model) != model.mixer.heads else []


def read_attention_bias(keys: Tree) -> Tree:
    """Read attention_bias, which covers all four projections or none."""
    return {"mixer.bias": "all" if number(keys, "attention_bias") else None}


def read_equal_biases(keys: Tree) -> Tree:
    """Read the bias keys, one for q, k and v and one for the rest: only equal values are supported."""
    if number(keys, "mlp_bias") != number(keys, "attention_bias"):
        raise FamilyError("attention_bias and mlp_bias differ; both or neither are supported")
    return read_attention_bias(keys) | {"mlp.bias": number(keys, "mlp_bias")}


def equal_bias_obstacles(model: ModelConfig) -> list[str]:
    return [] if model.mixer.bias == ("all" if model.mlp.bias else None) else ["mixer.bias"]


def bias_of_qkv(key: str) -> FieldGroup:
    """Return the rule of a key that says whether the projections of q, k and v have biases."""
    return FieldGroup(
        ("mixer.bias",),
        lambda keys: {"mixer.bias": "qkv" if number(keys, key) else None},
        lambda model: {key: model.mixer.bias is not None},
        lambda model: ["mixer.bias"] if model.mixer.bias == "all" else [],
    )


def read_seed_biases(keys: Tree) -> Tree:
    """Read the bias keys; ours cover q, k and v, or all."""
    stated = tuple(bool(number(keys, key)) for key in ("attention_bias", "attention_out_bias"))
    if stated == (False, True):
        raise FamilyError("attention_out_bias without attention_bias is not supported")
    return {"mixer.bias": {(False, False): None, (True, False): "qkv", (True, True): "all"}[stated]}


def write_seed_biases(model: ModelConfig) -> Tree:
    return {"attention_bias": model.mixer.bias is not None, "attention_out_bias": model.mixer.bias == "all"}


def read_all_biases(keys: Tree) -> Tree:
    """Read use_bias, which covers all linear layers or none."""
    has_bias = bool(number(keys, "use_bias"))
    return {"mixer.bias": "all" if has_bias else None, "mlp.bias": has_bias}


def all_biases_obstacles(model: ModelConfig) -> list[str]:
    return [] if model.mixer.bias == ("all" if model.mlp.bias else None) else ["mixer.bias"]


def read_qk_norm(keys: Tree) -> Tree:
    return {"mixer.qk_norm": "head" if number(keys, "use_qk_norm") else None}


def read_gating(keys: Tree) -> Tree:
    """Read whether gates are per head or per channel; published folders repeat it for each layer."""
    gating = keys.get("gating", True)
    if gating is not True and gating not in ("per-head", "per-element"):
        raise FamilyError(f"gating = {gating!r} is not supported, only 'per-head' and 'per-element'")
    gate = "channel" if gating == "per-element" else "head"
    own = {"head": "per_head", "channel": "per_element"}[gate]
    if set(typed_list(str, keys, "gating_types")) - {own}:
        raise FamilyError(f"gating_types = {keys['gating_types']!r} are not all {own!r}, as gating says")
    return {"mixer.gate.kind": gate}


def write_gating(model: ModelConfig) -> Tree:
    return {"gating": "per-head" if model.mixer.gate.kind == "head" else "per-element"}


def read_unused_width(keys: Tree) -> Tree:
    """Read the width of a dense MLP, which may be missing if all layers have experts."""
    has_width = keys.get("intermediate_size") is not None
    return {"mlp.width": plain_number(keys, "intermediate_size" if has_width else "moe_intermediate_size")}


def read_init_std_by_width(keys: Tree) -> Tree:
    """Read initializer_range; null stands for 2 / sqrt(5 hidden)."""
    if keys.get("initializer_range") is not None:
        return {"init_std": number(keys, "initializer_range")}
    hidden = plain_number(keys, "hidden_size")
    if hidden <= 0:
        raise FamilyError(f"hidden_size = {hidden} is not above 0")
    return {"init_std": 2 / (5 * hidden) ** 0.5}


HEAD_DIM = FieldGroup(("mixer.head_dim",), read_head_dim, lambda model: {"head_dim": head_dim(model)})
NO_HEAD_DIM = FieldGroup(("mixer.head_dim",), read_no_head_dim, obstacles=heads_share_hidden)
GPT2_WIDTH = FieldGroup(("mlp.width",), read_gpt2_width, lambda model: {"n_inner": model.mlp.width})
GPT2_HEADS = FieldGroup(
    ("mixer.kv_heads", "mixer.head_dim"),
    obstacles=lambda model: one_kv_head_each(model) + heads_share_hidden(model),
)
ATTENTION_BIAS = FieldGroup(
    ("mixer.bias",),
    read_attention_bias,
    lambda model: {"attention_bias": model.mixer.bias is not None},
    lambda model: ["mixer.bias"] if model.mixer.bias == "qkv" else [],
)
EQUAL_BIASES = FieldGroup(
    ("mixer.bias", "mlp.bias"),
    read_equal_biases,
    lambda model: {"attention_bias": model.mlp.bias, "mlp_bias": model.mlp.bias},
    equal_bias_obstacles,
)
ALL_BIASES = FieldGroup(
    ("mixer.bias", "mlp.bias"),
    read_all_biases,
    lambda model: {"use_bias": model.mlp.bias},
    all_biases_obstacles,
)
SEED_BIASES = FieldGroup(("mixer.bias",), read_seed_biases, write_seed_biases)
QK_NORM_OF_HEADS = FieldGroup(
    ("mixer.qk_norm",),
    read_qk_norm,
    lambda model: {"use_qk_norm": model.mixer.qk_norm is not None},
    lambda model: [] if model.mixer.qk_norm in (None, "head") else ["mixer.qk_norm"],
)
def read_experts_beside(keys: Tree) -> Tree:
    """Read the total width of all shared experts, each as wide as a routed one."""
    shared, width = plain_number(keys, "shared_intermediate_size"), plain_number(keys, "intermediate_size")
    if width <= 0 or shared < 0 or shared % width:
        raise FamilyError(
            f"shared_intermediate_size = {shared} is not a multiple of intermediate_size = {width}")
    return {"shared_experts": shared // width}


EXPERTS_BESIDE = FieldGroup(
    ("shared_experts",),
    read_experts_beside,
    lambda model: {"shared_intermediate_size": model.shared_experts * model.moe_ffn},
)


def one_of_null(name: str, key: str) -> FieldGroup:
    """Return the rule of a factor whose key may be null for 1."""
    return FieldGroup(
        (name,),
        lambda keys: {name: 1.0 if keys.get(key) is None else plain_number(keys, key)},
        lambda model: {key: value_at(model, name)},
    )


GATING = FieldGroup(
    ("mixer.gate.kind",),
    read_gating,
    write_gating,
    lambda model: ["mixer.gate"] if model.mixer.gate is None else [],
)
UNUSED_WIDTH = FieldGroup(
    ("mlp.width",), read_unused_width, lambda model: {"intermediate_size": model.mlp.width}
)
INIT_STD_BY_WIDTH = FieldGroup(
    ("init_std",), read_init_std_by_width, lambda model: {"initializer_range": model.init_std}
)
# transformers 5 refuses other sizes only for Llama and DeepSeek-V2; the same Llama is a Mistral.
HEADS_DIVIDE_HIDDEN = FieldGroup(
    (), obstacles=lambda model: ["mixer.heads"] if model.hidden % model.mixer.heads else []
)

# LlamaConfig refuses other values of initializer_range; the same model is a Mistral.
INIT_STD_UP_TO_1 = FieldGroup(
    (), obstacles=lambda model: [] if 0 <= model.init_std <= 1 else ["init_std"]
)

# The family's config class has a default padding token, which is missing from a smaller vocabulary and does
# not train.
NO_PADDING = FieldGroup((), write=lambda model: {"pad_token_id": None})

# Dropout is not read, and does not affect logits. Ours has no attention dropout.
NO_ATTENTION_DROPOUT = FieldGroup((), write=lambda model: {"attention_dropout": 0.0})
RESIDUAL_DROPOUT = FieldGroup(
    (), write=lambda model: {"attention_dropout": 0.0, "residual_dropout": model.dropout}
)
GPT2_DROPOUT = FieldGroup(
    (),
    write=lambda model: {"resid_pdrop": model.dropout, "embd_pdrop": model.dropout, "attn_pdrop": 0.0},
)


# ---- mixtures of experts -----------------------------------------------------------------------------------

def read_dense_layers(keys: Tree) -> Tree:
    """Read the layers without experts, which Qwen lists; ours must come first."""
    dense = sorted(typed_list(int, keys, "mlp_only_layers"))
    if dense != list(range(len(dense))):
        raise FamilyError(
            f"mlp_only_layers = {dense} is not supported, only the first layers (and decoder_sparse_step)"
        )
    return {"first_dense": len(dense)}


def read_shared_width(keys: Tree, key: str) -> Tree:
    """Read the width of all shared experts together."""
    shared_size = plain_number(keys, key)
    expert_size = plain_number(keys, "moe_intermediate_size")
    if not expert_size or not shared_size or shared_size % expert_size:
        raise FamilyError(
            f"{key} = {shared_size} is not a multiple of "
            f"moe_intermediate_size = {expert_size}"
        )
    return {"shared_experts": shared_size // expert_size}


def shared_width(key: str) -> FieldGroup:
    """Return the rule of a key with the total width of all shared experts. There is at least one."""
    return FieldGroup(
        ("shared_experts",),
        functools.partial(read_shared_width, key=key),
        lambda model: {key: model.shared_experts * model.moe_ffn},
        lambda model: [] if model.shared_experts else ["shared_experts"],
    )


def read_mlp_layer_types(keys: Tree) -> Tree:
    """Read a list of dense and sparse layers; ours are dense first. With null, only the first layer is dense.

    Published folders also have first_k_dense_replace, which transformers does not read.
    """
    layers = plain_number(keys, "num_hidden_layers")
    kinds = typed_list(str, keys, "mlp_layer_types")
    dense = kinds.count("dense") if kinds else 1
    is_prefix = kinds == ["dense"] * dense + ["sparse"] * (len(kinds) - dense)
    if (kinds and not (is_prefix and len(kinds) == layers)) or dense >= layers:
        raise FamilyError(
            f"mlp_layer_types = {kinds or None} of {layers} layers is not supported, only dense layers, "
            "then at least one sparse layer")
    stated = keys.get("first_k_dense_replace")
    if stated is not None and stated != dense:
        raise FamilyError(f"first_k_dense_replace = {stated!r} is not supported where mlp_layer_types "
                          f"makes {dense} of the layers dense")
    return {"first_dense": dense}


def write_mlp_layer_types(model: ModelConfig) -> Tree:
    kinds = ["dense" if layer < model.first_dense else "sparse" for layer in range(model.layers)]
    return {"mlp_layer_types": kinds}


MLP_LAYER_TYPES = FieldGroup(
    ("first_dense",),
    read_mlp_layer_types,
    write_mlp_layer_types,
    lambda model: ["first_dense"] if model.first_dense >= model.layers else [],
)
QWEN_DENSE_LAYERS = FieldGroup(
    ("first_dense",), read_dense_layers, lambda model: {"mlp_only_layers": list(range(model.first_dense))}
)
SHARED_WIDTH = shared_width("shared_expert_intermediate_size")


def expert_width_obstacles(model: ModelConfig) -> list[str]:
    """Return the obstacle in a family without a key for the expert width, which must be a dense MLP's."""
    is_other = isinstance(model.mlp, MLPConfig) and model.moe_ffn != model.mlp.width
    return ["moe_ffn"] if is_other else []


EXPERTS_OF_FFN = FieldGroup(("moe_ffn",), obstacles=expert_width_obstacles)


def read_moe_topk(keys: Tree) -> Tree:
    """Read a number, or a list with one number per layer."""
    value = keys.get("moe_topk")
    if isinstance(value, list) and len(set(map(repr, value))) == 1:
        value = value[0]
    return {"top_k": plain_number({"moe_topk": value}, "moe_topk")}


def read_ernie_layers(keys: Tree) -> Tree:
    """Read the first layer with experts. Layers with experts must extend to the last layer."""
    last = keys.get("moe_layer_end_index", -1)
    if last not in (-1, plain_number(keys, "num_hidden_layers") - 1):
        raise FamilyError(f"moe_layer_end_index = {last!r} is not supported, only the last layer")
    return {"first_dense": plain_number(keys, "moe_layer_start_index")}


def read_mup_enabled(keys: Tree) -> Tree:
    return read_root_of_width(keys) if number(keys, "mup_enabled") else {"embed_scale": 1.0}


def mup_enabled_obstacles(model: ModelConfig) -> list[str]:
    is_root = close(model.embed_scale, model.hidden**0.5)
    return [] if model.embed_scale == 1.0 or is_root else ["embed_scale"]


def layers_with_experts(model: ModelConfig) -> list[int]:
    return [layer for layer in range(model.layers) if model.has_experts(layer)]


def read_moe_layers(keys: Tree) -> Tree:
    """Read moe_layers, or each multiple of a step. Ours has each multiple of a step from first_dense on."""
    layers = int(plain_number(keys, "num_hidden_layers"))
    step = int(plain_number(keys, "interleave_moe_layer_step"))
    if step < 1:
        raise FamilyError(f"interleave_moe_layer_step = {step} is not above 0")
    stated = keys.get("moe_layers")
    wanted = list(range(step - 1, layers, step))
    if stated is not None:
        wanted = sorted({layer for layer in typed_list(int, keys, "moe_layers") if layer < layers})
    for every in (step, *range(1, layers + 1)):
        for first in range(layers):
            if wanted and wanted == [layer for layer in range(first, layers) if (layer + 1) % every == 0]:
                return {"first_dense": first, "moe_every": every}
    raise FamilyError(
        f"moe_layers = {stated} of {layers} layers is not supported, only each multiple of a step from some "
        "layer on")


def write_moe_layers(model: ModelConfig) -> Tree:
    return {"interleave_moe_layer_step": model.moe_every, "moe_layers": layers_with_experts(model)}


def moe_layers_obstacles(model: ModelConfig) -> list[str]:
    """Return the fields that a write and a read would change."""
    if model.experts is None:
        return []
    try:
        again = read_moe_layers({"num_hidden_layers": model.layers, **write_moe_layers(model)})
    except FamilyError:
        return ["first_dense"]
    return [name for name, value in again.items() if getattr(model, name) != value]


MOE_LAYERS = FieldGroup(
    ("first_dense", "moe_every"), read_moe_layers, write_moe_layers, moe_layers_obstacles
)
MOE_TOPK = FieldGroup(("top_k",), read_moe_topk, lambda model: {"moe_topk": model.top_k})
ERNIE_LAYERS = FieldGroup(
    ("first_dense",),
    read_ernie_layers,
    lambda model: {"moe_layer_start_index": model.first_dense, "moe_layer_end_index": model.layers - 1},
)
MUP_ENABLED = FieldGroup(
    ("embed_scale",),
    read_mup_enabled,
    lambda model: {"mup_enabled": model.embed_scale != 1.0},
    mup_enabled_obstacles,
)


# ---- DeepSeek ----------------------------------------------------------------------------------------------

def all_layers_dense(keys: Tree) -> bool:
    return plain_number(keys, "first_k_dense_replace") >= plain_number(keys, "num_hidden_layers")


def deepseek_experts(*rules: Rule) -> FieldGroup:
    """Return the rules of the experts.

    A dense model is written as one whose layers all come before the first layer with experts.
    """
    def read(keys: Tree) -> Tree:
        values = read_rules(rules, keys)
        return {} if all_layers_dense(keys) else values

    def write(model: ModelConfig) -> Tree:
        if model.experts is None:
            model = replace(model, experts=1, top_k=1, moe_ffn=model.mlp.width, first_dense=model.layers)
        return write_rules(rules, model)

    def obstacles(model: ModelConfig) -> list[str]:
        if model.experts is None:
            return []
        return [name for rule in rules for name in rule.obstacles(model)]

    return FieldGroup(tuple(name for rule in rules for name in rule.fields), read, write, obstacles)


def dense_mtp_obstacle(model: ModelConfig) -> list[str]:
    """Return the obstacle of dense multi-token prediction: in transformers every module has experts."""
    return ["mtp"] if model.mtp and model.experts is None else []


def read_v2_groups(keys: Tree) -> Tree:
    if all_layers_dense(keys):
        return {}
    method = keys.get("topk_method") or "greedy"
    if method == "greedy":
        return {}
    if method != "group_limited_greedy":
        raise FamilyError(
            f"topk_method = {method!r} is not supported, only 'greedy' and 'group_limited_greedy'"
        )
    return {"router_groups": number(keys, "n_group"), "router_group_top_k": number(keys, "topk_group")}


def write_v2_groups(model: ModelConfig) -> Tree:
    if model.experts is None:
        return {}
    return {
        "topk_method": "greedy" if model.router_groups == 1 else "group_limited_greedy",
        "n_group": model.router_groups,
        "topk_group": model.router_group_top_k,
    }


def v2_group_obstacles(model: ModelConfig) -> list[str]:
    """Return the obstacle of router groups: the greedy method chooses from one group with all experts."""
    is_lost = model.router_groups == 1 and model.router_group_top_k != 1
    return ["router_group_top_k"] if is_lost else []


def read_mla_heads(keys: Tree) -> Tree:
    num_kv_heads = number(keys, "num_key_value_heads", nullable=True)
    if num_kv_heads not in (None, number(keys, "num_attention_heads")):
        raise FamilyError(
            f"num_key_value_heads = {num_kv_heads} is not supported with latent attention, "
            f"only num_attention_heads"
        )
    return {}


def read_stated_mtp(keys: Tree) -> Tree:
    """Read the number of modules; 0 and null mean none, like a missing key."""
    key = "num_nextn_predict_layers"
    count = 0 if keys.get(key) is None else plain_number(keys, key)
    return {"mtp.modules": count} if count else {"mtp": None}


V2_GROUPS = FieldGroup(
    ("router_groups", "router_group_top_k"), read_v2_groups, write_v2_groups, v2_group_obstacles
)
STATED_MTP = FieldGroup(
    ("mtp",), read_stated_mtp, lambda model: {"num_nextn_predict_layers": modules_ahead(model)}
)
MTP_WITH_EXPERTS = FieldGroup((), obstacles=dense_mtp_obstacle)
MLA_HEADS = FieldGroup((), read_mla_heads, lambda model: {"num_key_value_heads": model.mixer.heads})
