"""Cross-layer sharing of keys and values (arXiv 2405.12981).

A layer with model.mixer.keys_of projects only queries and reads the keys and values of the last layer of that
kind before it. If a pipeline boundary lies between the two layers, keys and values are sent along with the
hidden states.
"""
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from config import Config, ModelConfig, head_shape, layer_kinds, layer_model, layer_models, modules_ahead
from config.rule import Rule

KeysAndValues = tuple[Tensor, Tensor]  # [b, s/cp, g/tp, d], [b, s/cp, g/tp, dv]


@dataclass
class SharedKeys:
    """Keys and values that later layers of one forward pass read.

    `sources` maps a layer to the earlier layer whose keys it reads; `kept` is indexed by the layer that
    produced them.
    """
    sources: Mapping[int, int] = field(default_factory=dict)
    kept: dict[int, KeysAndValues] = field(default_factory=dict)

    def get_source(self, layer: int) -> int:
        """Return the layer whose keys `layer` attends to: an earlier layer, or `layer` itself."""
        return self.sources.get(layer, layer)

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values if a later layer reads them. They are copied: a view would keep the
        queries alive too."""
        if layer in self.sources.values():
            self.kept[layer] = k.contiguous(), v.contiguous()

    def read(self, layer: int) -> KeysAndValues:
        """Return the keys and values of the layer's source in this pass."""
        return self.kept[self.sources[layer]]

    def of_layer(self, layer: int) -> "SharedKeys":
        """Return only what one layer reads, so that recompute does not hold other layers' keys until its
        backward."""
        source = self.sources.get(layer)
        return SharedKeys(self.sources, {} if source is None else {source: self.kept[source]})

    def take(self, layer: int, made: "SharedKeys") -> None:
        """Move the keys that a layer stored in its own SharedKeys into this one."""
        if layer in made.kept:
            self.kept[layer] = made.kept.pop(layer)


@lru_cache(maxsize=1 << 10)
def key_sources(model: ModelConfig) -> Mapping[int, int]:
    """Return {layer: the earlier layer whose keys and values it reads}."""
    kinds = layer_kinds(model)
    last: dict[str, int] = {}  # last layer of each kind
    sources: dict[int, int] = {}
    for layer, kind in enumerate(kinds):
        read = keys_of(layer_model(model, layer))
        if read is not None:
            sources[layer] = last[read]
        last[kind] = layer
    return MappingProxyType(sources)


def keys_of(model: ModelConfig) -> str | None:
    """Return the block kind whose keys a layer reads, or None. `model` is that of one layer (layer_model)."""
    return getattr(model.mixer, "keys_of", None)


# ---- between pipeline stages -------------------------------------------------------------------------------

def carried_into(model: ModelConfig, first: int) -> list[int]:
    """Return the layers before `first` whose keys and values are read by `first` or a later layer."""
    sources = key_sources(model)
    return sorted({source for layer, source in sources.items() if source < first <= layer})


def widths_between_stages(cfg: Config, layers: list[tuple[int, int]]) -> tuple[int, ...]:
    """Return how many numbers each stage receives per token of hidden states.

    Hidden states are [b, s/cp, hidden] (sp: [b, s/cp/tp, hidden]).

    Counts the hidden states and, on one rank, the keys and values, whose heads are sharded over tp. `layers`
    holds (first, end) for each stage.
    """
    tokens = cfg.parallel.tp if cfg.parallel.sp else 1  # key tokens per token of hidden states
    widths: list[int] = []
    for first, _ in layers:
        carried = [token_width(cfg, layer) for layer in carried_into(cfg.model, first)]
        widths.append(cfg.model.hidden + tokens * sum(map(sum, carried)))
    return tuple(widths)


def token_width(cfg: Config, layer: int) -> tuple[int, int]:
    """Return how many numbers one token's keys and values have on one rank: g/tp d and g/tp dv."""
    shape = head_shape(layer_model(cfg.model, layer))
    heads = max(1, shape.kv_heads // cfg.parallel.tp)
    return heads * shape.head_dim, heads * shape.value_dim


def pack_keys(x: Tensor, keys: SharedKeys, cfg: Config, first: int) -> Tensor:
    """Pack hidden states x and the shared keys into one tensor for the stage that begins at layer `first`."""
    carried = [keys.kept[layer] for layer in carried_into(cfg.model, first)]
    if not carried:
        return x
    pieces = [x, *(one for pair in carried for one in pair)]
    return torch.cat([one.flatten() for one in pieces]).view(*x.shape[:2], -1)


def unpack_keys(x: Tensor, keys: SharedKeys, cfg: Config, first: int) -> Tensor:
    """Unpack what a stage received: returns the hidden states and stores keys and values in `keys`."""
    carried = carried_into(cfg.model, first)
    if not carried:
        return x
    b, s = x.shape[:2]
    tokens = b * s * (cfg.parallel.tp if cfg.parallel.sp else 1)
    sizes = [tokens * size for layer in carried for size in token_width(cfg, layer)]
    hidden, *pieces = x.flatten().split((b * s * cfg.model.hidden, *sizes))
    for layer, k, v in zip(carried, pieces[::2], pieces[1::2]):
        shape = head_shape(layer_model(cfg.model, layer))
        keys.kept[layer] = (
            k.view(b, tokens // b, -1, shape.head_dim),
            v.view(b, tokens // b, -1, shape.value_dim),
        )
    return hidden.view(b, s, -1)


# ---- rules -------------------------------------------------------------------------------------------------

def sharing_rules(model: ModelConfig) -> Iterator[Rule]:
    """Check which layers may read the keys of others."""
    kinds, likes = layer_kinds(model), layer_models(model)
    stating = {variant.name for variant in model.blocks if "mixer.keys_of" in dict(variant.changes)}
    makers = [name for name, like in likes.items() if like.mixer.kind == "attention" and not keys_of(like)]
    for name, like in likes.items():
        read = keys_of(like)
        if read is None:
            continue
        key = f"model.blocks.{name}.mixer.keys_of" if name in stating else "model.mixer.keys_of"
        yield Rule(
            read in makers,
            f"{key}: no layers of a kind {read!r} make keys of attention; kinds whose layers do: "
            f"{', '.join(makers) or 'none'}")

        first = kinds.index(name)
        yield Rule(
            read in kinds[:first],
            f"{key}: layer {first} reads the keys of the last {read!r} before it, and there is none; put one "
            "before it in model.pattern")
        source = likes[read]
        yield Rule(
            head_shape(source) == head_shape(like) and source.mixer.rope == like.mixer.rope,
            f"{key}: {read!r} has different key heads or a different RoPE than {name!r}, which reads its "
            "keys; give both the same model.mixer.kv_heads, head_dim, value_dim and rope")
    last = kinds[-1]
    yield Rule(
        not modules_ahead(model) or keys_of(likes[last]) is None,
        f"model.mtp: its blocks are like the last layer, and layers of the kind {last!r} read the keys of "
        "others (model.mixer.keys_of); leave model.mtp out, or end model.pattern with another kind")
