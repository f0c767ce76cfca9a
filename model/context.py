"""State shared by all blocks in one forward pass."""
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from config import Config, ModelConfig, layer_models
from kernels.attention_mask import AttentionMask, DocumentCounts, make_attention_mask
from model.rope import GrowthConfig, Rotation, get_rotation, query_growth, rope_tables
from model.router import RouterInputs
from model.shared_keys import SharedKeys, key_sources
from parallel.microbatch import Microbatch
from parallel.rng import DropoutRng


@dataclass
class GenerationCache:
    """Cache of earlier tokens for generation: {(layer, name): tensor}.

    Attention stores keys and values [b, s_past, kv_heads, head_dim] each. Latent attention stores the latent
    [b, s_past, kv_rank] as keys and the rotated key that all heads share [b, s_past, rope_dim] as values.
    Mixers with a state (model/recurrence.py) store the state and the last inputs of their convolution,
    regardless of s_past.

    `length` counts the tokens that every layer has seen. It grows after a pass through all stages
    (model/generate.py): all stages, several of which may be on one rank, start from the same length.
    """
    length: int = 0
    kept: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, once per pass; return those of all tokens."""
        for name, new in (("keys", k), ("values", v)):
            earlier = self.kept.get((layer, name))
            if earlier is None:
                self.kept[layer, name] = new
            elif earlier.shape[1] == self.length:  # else appended by a layer that shares them
                self.kept[layer, name] = torch.cat((earlier, new), 1)
        return self.kept[layer, "keys"], self.kept[layer, "values"]


class View(NamedTuple):
    """How far back a query sees, in tokens: a mask depends on this and on documents."""
    window: int | None
    chunk: int | None = None


NO_LIMITS = View(window=None)


def get_view(model: ModelConfig) -> View:
    """Return the view of a layer with softmax attention. `model` is that of one layer (layer_model)."""
    return View(model.mixer.window, getattr(model.mixer, "chunk", None))


@dataclass(frozen=True)
class ForwardContext:
    """Inputs that all blocks of a pass share.

    rotations: {rotation of a layer (get_rotation): (cos, sin) [b, s, 1, rotated / 2]}.
    growths: {growth of a mixer: factor of the queries [b, s, 1, 1]}.
    masks: {view of a layer (get_view): mask of full sequences}. None: causality is the only limit; or for
    ring attention on a CPU, which computes its masks chunk by chunk.
    dropout_rng: None in evaluation. cache: None outside of generation. router_inputs: None outside of
    training.
    token_rng: of all tokens [b, s/cp], for gradients in NVFP4 and what adapters read; None without these, and
    in evaluation.
    sequence_is_sharded: tokens are this rank's part of sequences that are sharded over cp.
    documents [b, s]: covers the full sequence; None means no document mask.
    document_counts: set if sequences are not sharded and the host knows the counts.
    shared_keys: keys that layers of this pass read from earlier layers.
    """
    rotations: Mapping[Rotation, tuple[Tensor, Tensor]]
    masks: Mapping[View, AttentionMask | None]
    growths: Mapping[GrowthConfig, Tensor] = field(default_factory=dict)
    dropout_rng: DropoutRng | None = None
    token_rng: DropoutRng | None = None
    cache: GenerationCache | None = None
    sequence_is_sharded: bool = False
    documents: Tensor | None = None
    document_counts: DocumentCounts | None = None
    router_inputs: RouterInputs | None = None
    shared_keys: SharedKeys = field(default_factory=SharedKeys)

    def of_layer(self, layer: int) -> "ForwardContext":
        """Return the context with only the shared keys that one layer reads."""
        if not self.shared_keys.sources:
            return self
        return replace(self, shared_keys=self.shared_keys.of_layer(layer))


@dataclass(frozen=True)
class LossInputs:
    """Inputs of the loss besides the hidden states. The loss is multiplied by `scale`."""
    microbatch: Microbatch
    scale: Tensor | float
    context: ForwardContext


class ContextNeeds(NamedTuple):
    """What the layers of a model read from the context, each once."""
    rotations: tuple[Rotation, ...]
    growths: tuple[GrowthConfig, ...]
    views: tuple[View, ...]
    has_limits: bool  # whether a view sees less than all earlier tokens


@lru_cache(maxsize=1 << 10)
def context_needs(model: ModelConfig) -> ContextNeeds:
    models = layer_models(model).values()
    rotations = dict.fromkeys(filter(None, map(get_rotation, models)))
    growths = dict.fromkeys(filter(None, (getattr(like.mixer, "growth", None) for like in models)))
    views = dict.fromkeys(get_view(like) for like in models if like.mixer.has_softmax)
    has_limits = any(view != NO_LIMITS for view in views)
    return ContextNeeds(tuple(rotations), tuple(growths), tuple(views), has_limits)


def forward_context(cfg: Config, positions: Tensor, documents: Tensor | None, *,
                    dropout_rng: DropoutRng | None = None,
                    token_rng: DropoutRng | None = None,
                    cache: GenerationCache | None = None,
                    sequence_is_sharded: bool = False,
                    document_counts: DocumentCounts | None = None,
                    router_inputs: RouterInputs | None = None) -> ForwardContext:
    """Build the context. positions [b, s] (sharded: [b, s/cp]) restart at each document. `document_counts`
    is None if the host does not know the counts."""
    past = cache.length if cache else 0
    s = positions.shape[1] * (cfg.parallel.cp if sequence_is_sharded else 1)
    needs = context_needs(cfg.model)
    rotations = {rotation: rope_tables(cfg, rotation, positions, past + s) for rotation in needs.rotations}
    growths = {growth: query_growth(cfg, growth, positions) for growth in needs.growths}

    masks: dict[View, AttentionMask | None] = dict.fromkeys(needs.views)
    if past or documents is not None or sequence_is_sharded or needs.has_limits:
        is_ring = sequence_is_sharded and cfg.parallel.cp_kind == "ring"
        masks = attention_masks(needs.views, past, s, documents, positions.device, is_ring, document_counts)
    return ForwardContext(
        rotations,
        masks,
        growths,
        dropout_rng=dropout_rng,
        token_rng=token_rng,
        cache=cache,
        sequence_is_sharded=sequence_is_sharded,
        documents=documents,
        document_counts=None if sequence_is_sharded else document_counts,
        router_inputs=router_inputs,
        shared_keys=SharedKeys(key_sources(cfg.model)),
    )


def attention_masks(
    views: tuple[View, ...],
    past: int,
    s: int,
    documents: Tensor | None,
    device: torch.device,
    is_ring: bool,
    document_counts: DocumentCounts | None,
) -> dict[View, AttentionMask | None]:
    """Make the masks of s queries after `past` keys; on a CPU the ring makes its own, chunk by chunk."""
    if is_ring and device.type != "cuda":
        return dict.fromkeys(views)
    masks: dict[View, AttentionMask | None] = {}
    for view in views:
        masks[view] = make_attention_mask(
            query_start=past,
            s_q=s,
            key_start=0,
            s_k=past + s,
            window=view.window,
            chunk=view.chunk,
            docs=documents,
            device=device,
            counts=None if is_ring else document_counts,
        )
    return masks
