"""Mixtures of experts as flat keys: `experts 8`, `first_dense 3`, `moe_every 2`.

config.json files and older saved configs use such keys. from_flat converts them to model parts; flat_model
does the opposite for writing a config.json. With parts, the layers that have MLPs are given by kinds of
blocks and model.pattern.
"""
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from config.pattern import MAX_LAYERS, PLAIN, BlockVariant, kinds_of_layers, pattern_text, with_dense_layers
from config.reading.kinds import stated_leaves
from config.schema import ChannelMixer, ModelConfig, NoPart, layer_kinds, layer_model
from config.strict import ConfigError
from config.tree import is_below
from model.mlp import MLPConfig
from model.router import ExpertsConfig, has_experts, mixture

Part = TypeVar("Part", bound=ChannelMixer)

# {flat key: key of model.*}
FLAT_NAMES = {
    "experts": "mlp.experts",
    "top_k": "mlp.top_k",
    "moe_ffn": "mlp.width",
    "shared_experts": "mlp.shared.experts",
    "shared_gate": "mlp.shared.gate",
    "first_dense": "pattern",
    "moe_every": "pattern",
    "router": "mlp.router.scores",
    "router_renorm": "mlp.router.renorm",
    "router_groups": "mlp.router.groups",
    "router_group_top_k": "mlp.router.group_top_k",
    "router_scale": "mlp.router.scale",
    "router_weighs": "mlp.router.weighs",
    "router_logit_bias": "mlp.router.logit_bias",
    "router_bias": "mlp.router.bias_rate",
}
LIMITS = {"limits": "mlp.limit", "shared_limits": "mlp.shared.limit"}  # per layer, a number or none
# only for training: saved configs had them, config.json does not
FLAT_TRAINING_NAMES = {
    "router_bias_rate": "mlp.router.bias_rate",
    "jitter": "mlp.router.jitter",
    "aux_loss": "mlp.router.aux.weight",
    "aux_kind": "mlp.router.aux.over",
    "z_loss": "mlp.router.z_loss",
    "capacity": "mlp.capacity.factor",
    "drop": "mlp.capacity.drop",
    "pad": "mlp.capacity.pad",
}
ROUTER_KEYS = {  # {flat key: router key} where both mean the same
    flat: ours.removeprefix("mlp.router.")
    for flat, ours in (FLAT_NAMES | FLAT_TRAINING_NAMES).items()
    if ours.startswith("mlp.router.") and ".aux." not in ours and not flat.startswith("router_bias")
}
EXPRESSIBLE = (  # keys whose values flat keys can express
    *FLAT_NAMES.values(), *LIMITS.values(), *FLAT_TRAINING_NAMES.values(),
    "mlp.kind", "mlp.activation", "mlp.bias",
)
USUAL_BIAS_RATE = 1e-3
ALONE = "mixer-alone"  # the kind without changes, in a model whose `mlp` is none


@dataclass(frozen=True)
class FlatModel(ModelConfig):
    """A model whose experts are described by flat keys.

    `mlp` is that of the layers without experts: the first `first_dense` layers, and of the others all except
    every multiple of `moe_every`, counted from 1. `experts` is None for a dense model. `moe_ffn` is the inner
    width of an expert and defaults to that of the MLPs. `router_bias` adds a bias that affects only the
    choice. `limits` bound the MLP or the routed experts of each layer, and `shared_limits` its shared
    experts; empty tuples mean no bounds.
    """
    experts: int | None = None
    top_k: int = 2
    moe_ffn: int | None = None
    shared_experts: int = 0
    shared_gate: bool = False
    first_dense: int = 0
    moe_every: int = 1
    router: str = "softmax"
    router_renorm: bool = True
    router_groups: int = 1
    router_group_top_k: int = 1
    router_scale: float = 1.0
    router_weighs: str = "output"
    router_logit_bias: bool = False
    router_bias: bool = False
    limits: tuple[float | None, ...] = ()
    shared_limits: tuple[float | None, ...] = ()

    def has_experts(self, layer: int) -> bool:
        is_counted = layer >= self.first_dense and (layer + 1) % self.moe_every == 0
        has_mlp = not isinstance(layer_model(self, layer).mlp, NoPart)
        return self.experts is not None and is_counted and has_mlp


USUAL = {
    field.name: field.default for field in dataclasses.fields(FlatModel) if field.name in FLAT_NAMES | LIMITS
}


# ---- flat keys -> parts ------------------------------------------------------------------------------------

def from_flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the flat keys among a model's keys to parts. Keys of its mlp may be nested or dotted.

    Raises ConfigError if layers with and without experts alternate in a way that has no equivalent here.
    """
    flat_names = FLAT_NAMES | LIMITS | FLAT_TRAINING_NAMES
    flat = {**USUAL, **{name: value for name, value in values.items() if name in flat_names}}
    rest = {name: value for name, value in values.items() if name not in flat_names}
    if flat["experts"] is None:
        return rest
    check_numbers(flat)
    mlp = dict(rest.pop("mlp", {}))
    mlp |= {path.removeprefix("mlp."): rest.pop(path) for path in list(rest) if path.startswith("mlp.")}
    blocks = dict(rest.get("blocks") or {})

    # layers with experts
    layers = values.get("layers", ModelConfig.layers)
    if layers != int(layers) or not 0 < layers <= MAX_LAYERS:
        raise ConfigError(f"model.layers: {layers} must be a whole number from 1 to {MAX_LAYERS:,}")
    layers = int(layers)
    kinds = kinds_of_layers(values.get("pattern"), tuple(blocks), layers)
    without = {name for name, changes in blocks.items() if has_no_mlp(changes)}
    is_dense = [kind not in without and not is_counted(flat, layer) for layer, kind in enumerate(kinds)]
    modules = values.get("mtp.modules", (values.get("mtp") or {}).get("modules", 0))
    for layer in range(layers, layers + min(math.ceil(modules), flat["moe_every"] + 1)):
        if is_counted(flat, layer) == is_dense[-1]:
            raise ConfigError(
                "model.mtp: its modules have another kind of MLP here than the last layer, and ours are of "
                "the kind of that")
    if not any(is_counted(flat, layer) and kind not in without for layer, kind in enumerate(kinds)):
        return {**rest, "mlp": mlp}

    # kinds of blocks: widths belong to MLPs, unless experts share them
    widths = set() if flat["moe_ffn"] is None else {"mlp.width"}
    of_experts = {
        name: {path: value for path, value in changes.items() if path not in widths}
        for name, changes in blocks.items()
    }

    def dense(kind: str) -> dict[str, Any]:
        changes = blocks.get(kind, {}).items()
        own = {path.removeprefix("mlp."): value for path, value in changes if path.startswith("mlp.")}
        return {**mlp, "kind": "mlp", **own}

    found, names = with_dense_layers(of_experts, kinds, is_dense, dense)
    pattern = pattern_text(names) if any(is_dense) else values.get("pattern")
    none = (None,) * layers
    of_layers = (flat["limits"] or none, flat["shared_limits"] or none)
    if any(len(limits) != layers for limits in of_layers):
        raise ConfigError(f"model.mlp.limit: give a number, or none, for each of {layers} layers")
    limits = list(zip(*of_layers))
    if any(map(any, limits)):
        found, names = with_limits(found, names, limits)
        pattern = pattern_text(names)
    return {**rest, "mlp": experts_part(flat, mlp), "blocks": found, "pattern": pattern}


def with_limits(
    blocks: Mapping[str, Mapping[str, Any]],
    kinds: Sequence[str],
    limits: Sequence[tuple[float | None, float | None]],
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the blocks and layer kinds after splitting kinds by activation limits.

    `limits` holds for each layer those of its MLP or routed experts, and of its shared experts.
    """
    found = {name: dict(changes) for name, changes in blocks.items()}
    names: dict[tuple[str, object], str] = {}  # {(kind without limits, limits): kind}
    for kind, pair in zip(kinds, limits):
        if (kind, pair) in names or not any(pair):
            continue
        name = "limited" if kind == PLAIN else f"{kind}-limited"
        while name in found:
            name = f"{name}-limited"
        names[kind, pair] = name
        stated = {key: limit for key, limit in zip(("limit", "shared.limit"), pair) if limit is not None}
        changes = dict(blocks.get(kind, {}))
        if isinstance(changes.get("mlp"), Mapping):
            found[name] = {**changes, "mlp": {**changes["mlp"], **stated}}
        else:
            found[name] = changes | {f"mlp.{key}": limit for key, limit in stated.items()}
    layers = [names.get((kind, pair), kind) for kind, pair in zip(kinds, limits)]
    return {name: changes for name, changes in found.items() if name in layers}, layers


def check_numbers(flat: Mapping[str, Any]) -> None:
    """Raise ConfigError for invalid numbers of experts and of layers that have them."""
    for name, least, meaning in (
        ("first_dense", 0, "the number of first layers without experts"),
        ("moe_every", 1, "the step from one layer with experts to the next"),
        ("shared_experts", 0, "the number of shared experts"),
    ):
        number = flat[name]
        if number != int(number) or number < least:
            raise ConfigError(
                f"model.{FLAT_NAMES[name]}: {meaning} must be a whole number, at least {least}, not {number}")


def is_counted(flat: Mapping[str, Any], layer: int) -> bool:
    return layer >= flat["first_dense"] and (layer + 1) % flat["moe_every"] == 0


def has_no_mlp(changes: Mapping[str, Any]) -> bool:
    """Return whether a kind of block states that it only has a token mixer."""
    part = changes.get("mlp")
    kind = part.get("kind") if isinstance(part, Mapping) else part
    return "none" in (kind, changes.get("mlp.kind"))


def experts_part(flat: Mapping[str, Any], mlp: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `mlp` part of a model with experts. The argument `mlp` has the keys of its MLPs."""
    router = {ours: flat[name] for name, ours in ROUTER_KEYS.items() if name in flat}
    if flat["router_bias"]:
        router["bias_rate"] = flat.get("router_bias_rate", USUAL_BIAS_RATE)
    if "aux_loss" in flat:
        router["aux"] = {"weight": flat["aux_loss"], "over": flat["aux_kind"]}
    has_shared = flat["shared_experts"] > 0
    return {
        "kind": "experts",
        "experts": flat["experts"],
        "top_k": flat["top_k"],
        **{key: mlp[key] for key in ("width", "activation", "bias") if key in mlp},
        **({} if flat["moe_ffn"] is None else {"width": flat["moe_ffn"]}),
        "shared": {"experts": flat["shared_experts"], "gate": flat["shared_gate"]} if has_shared else None,
        "router": router,
        "capacity": capacity_part(flat),
    }


def capacity_part(flat: Mapping[str, Any]) -> dict[str, Any] | None:
    if flat.get("capacity") is None:
        return None
    return {"factor": flat["capacity"], "drop": flat["drop"], "pad": flat["pad"]}


# ---- parts -> flat keys ------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=1 << 8)
def flat_model(model: ModelConfig) -> tuple[FlatModel, tuple[str, ...]]:
    """Return the model with flat expert keys, and the keys of model.* whose values flat keys cannot
    express."""
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(ModelConfig)}
    lost = [path for path in stated_leaves(model) if path.partition(".")[0] not in values]
    experts = mixture(model)
    if experts is None and not isinstance(model.mlp, ExpertsConfig):
        return FlatModel(**values), tuple(lost)

    # MLPs of the layers without experts
    layers = [layer_model(model, layer) for layer in range(model.layers)]
    mlps = [layer.mlp for layer in layers]
    dense = {mlp for mlp in mlps if isinstance(mlp, MLPConfig)}
    blocks, kinds = kinds_without_dense(model, layers)
    values |= {"blocks": blocks, "pattern": pattern_text(kinds)}
    if experts is None:
        lost += ["blocks"] if len(dense) > 1 else []
        return FlatModel(**{**values, "mlp": next(iter(dense), NoPart())}), tuple(lost)

    # layers with experts
    limits = [get_limits(mlp) for mlp in mlps]
    experts, mlps = without_limits(experts), [without_limits(mlp) for mlp in mlps]
    dense = {without_limits(mlp) for mlp in dense}
    stated = (f"mlp.{path}" for path in stated_leaves(experts))
    lost += [path for path in stated if not is_below(path, EXPRESSIBLE)]
    order = order_of_experts(mlps)
    if order is None:
        lost.append("pattern")
    usual = MLPConfig(width=experts.width, activation=experts.activation, bias=experts.bias)
    if {dataclasses.replace(mlp, width=0) for mlp in dense} - {dataclasses.replace(usual, width=0)}:
        lost.append("blocks")
    if len(dense) > 1 or {mlp for mlp in mlps if isinstance(mlp, ExpertsConfig)} != {experts}:
        lost.append("blocks")

    router, shared = experts.router, experts.shared
    values |= {
        "mlp": dataclasses.replace(usual, width=dense.pop().width) if dense else usual,
        "experts": experts.experts,
        "top_k": experts.top_k,
        "moe_ffn": experts.width,
        "shared_experts": shared.experts if shared else 0,
        "shared_gate": shared is not None and shared.gate,
        "router_bias": router.bias_rate is not None,
        **{name: getattr(router, ours) for name, ours in ROUTER_KEYS.items() if name in FLAT_NAMES},
    }
    for name, of_layers in zip(LIMITS, zip(*limits)):
        values[name] = of_layers if any(of_layers) else ()
    first_dense, moe_every = order or (0, 1)
    return FlatModel(**values, first_dense=first_dense, moe_every=moe_every), tuple(lost)


def get_limits(mlp: ChannelMixer) -> tuple[float | None, float | None]:
    """Return (limit of the MLP or of the routed experts, limit of the shared experts)."""
    return getattr(mlp, "limit", None), getattr(getattr(mlp, "shared", None), "limit", None)


def without_limits(mlp: Part) -> Part:
    if isinstance(mlp, ExpertsConfig) and mlp.shared:
        mlp = dataclasses.replace(mlp, shared=dataclasses.replace(mlp.shared, limit=None))
    return mlp if isinstance(mlp, NoPart) else dataclasses.replace(mlp, limit=None)


def order_of_experts(mlps: Sequence[object]) -> tuple[int, int] | None:
    """Return (first_dense, moe_every) for layers with these MLPs, or None if no such pair describes them."""
    wanted = {layer: isinstance(mlp, ExpertsConfig) for layer, mlp in enumerate(mlps)
              if not isinstance(mlp, NoPart)}
    for every in range(1, len(mlps) + 1):
        for first in range(len(mlps)):
            flat = {"first_dense": first, "moe_every": every}
            if all(is_counted(flat, layer) == has for layer, has in wanted.items()):
                return first, every
    return None


def kinds_without_dense(
    model: ModelConfig, layers: Sequence[ModelConfig]
) -> tuple[tuple[BlockVariant, ...], list[str]]:
    """Return the kinds of blocks, and the kind of each layer, with experts replaced by MLPs. Kinds that
    differ only in that are merged."""
    changes = {variant.name: variant.changes for variant in model.blocks}
    is_alone = [isinstance(like.mlp, NoPart) for like in layers]
    first_of: dict[object, str] = {(model.mixer, model.norm, False): PLAIN}
    names = layer_kinds(model)
    for layer in sorted(range(len(layers)), key=lambda layer: not has_experts(model, layer)):
        name = ALONE if is_alone[layer] and names[layer] == PLAIN else names[layer]
        first_of.setdefault((layers[layer].mixer, layers[layer].norm, is_alone[layer]), name)
    kinds = [first_of[(like.mixer, like.norm, alone)] for like, alone in zip(layers, is_alone)]

    results: list[BlockVariant] = []
    for name, alone in dict(zip(kinds, is_alone)).items():
        if name == PLAIN:
            continue
        own = [change for change in changes.get(name, ()) if change[0].partition(".")[0] != "mlp"]
        results.append(BlockVariant(name, (*own, *[("mlp", NoPart())] * alone)))
    return tuple(results), kinds
