"""What all blocks of one forward pass share."""
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from config import Config, RopeConfig, YarnScaling, rotated_dim
from kernels import rope
from kernels.attention_mask import AttentionMask, DocumentCounts, make_attention_mask
from model.router import RouterInputs
from parallel.microbatch import Microbatch
from parallel.rng import DropoutRng


@dataclass
class KeyValueCache:
    """Keys and values of earlier tokens, by layer, for generation.

    [b, s_past, kv_heads, head_dim] each. For latent attention: the latent [b, s_past, kv_rank], and the
    rotated key that all heads share [b, s_past, rope_dim].

    length: tokens that every layer has seen. It grows after a pass through all stages (model/generate.py):
    they all start from the same length, and a rank may have several of them.
    """
    length: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the keys and values of new tokens; returns those of all tokens."""
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), 1)
            v = torch.cat((self.values[layer], v), 1)
        self.keys[layer] = k
        self.values[layer] = v
        return k, v


@dataclass(frozen=True)
class ForwardContext:
    """cos, sin [b, s, 1, rope_dim / 2]: rotary tables; None with learned positions.

    mask: which query sees which key, of full sequences; None: ring attention on a CPU, which computes it
    chunk by chunk. dropout_rng: None in
    evaluation. cache: None outside of generation. sequence_is_sharded: the tokens are this rank's part of
    sequences that are sharded over cp. documents [b, s]: of the full sequence; None: no document mask.
    router_inputs: None outside of training.
    """
    cos: Tensor | None
    sin: Tensor | None
    mask: AttentionMask | None
    dropout_rng: DropoutRng | None = None
    cache: KeyValueCache | None = None
    sequence_is_sharded: bool = False
    documents: Tensor | None = None
    router_inputs: RouterInputs | None = None

    def rotation(self) -> tuple[Tensor, Tensor]:
        """cos and sin. Raises ValueError if positions are learned."""
        if self.cos is None or self.sin is None:
            raise ValueError("a pass without rotary positions has no cos and sin")
        return self.cos, self.sin


@dataclass(frozen=True)
class LossInputs:
    """What the loss needs beside the hidden states. scale: the loss is multiplied by it."""
    microbatch: Microbatch
    scale: Tensor | float
    context: ForwardContext


def forward_context(cfg: Config, positions: Tensor, documents: Tensor | None, *,
                    dropout_rng: DropoutRng | None = None,
                    cache: KeyValueCache | None = None,
                    sequence_is_sharded: bool = False,
                    document_counts: DocumentCounts | None = None,
                    router_inputs: RouterInputs | None = None) -> ForwardContext:
    """positions [b, s] (sharded: [b, s/cp]); they restart where a document does. document_counts: of
    documents; None: the host does not know."""
    cos = sin = None
    if cfg.model.mixer.rope is not None:
        cos, sin = rope_tables(cfg, positions)

    mask = None
    is_ring = sequence_is_sharded and cfg.parallel.cp_kind == "ring"
    if not is_ring or positions.device.type == "cuda":
        past = cache.length if cache else 0
        s = positions.shape[1] * (cfg.parallel.cp if sequence_is_sharded else 1)
        window = cfg.model.mixer.window
        mask = make_attention_mask(
            query_start=past,
            s_q=s,
            key_start=0,
            s_k=past + s,
            window=window,
            docs=documents,
            device=positions.device,
            counts=None if is_ring else document_counts,
        )
    return ForwardContext(
        cos,
        sin,
        mask,
        dropout_rng=dropout_rng,
        cache=cache,
        sequence_is_sharded=sequence_is_sharded,
        documents=documents,
        router_inputs=router_inputs,
    )


def rope_tables(cfg: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """positions [b, s] -> cos and sin [b, s, 1, rope_channels / 2] in fp32, or fp64 in an fp64 run.

    RoPE (arXiv 2104.09864); for a longer context than the model was trained on, with the frequencies of Llama
    3.1 (arXiv 2407.21783) or YaRN (arXiv 2309.00071). YaRN's tables are also multiplied by a number, which in
    DeepSeek's models is 1: there the scale of the scores has it (model/mla.py).
    """
    settings = cfg.model.mixer.rope
    assert isinstance(settings, RopeConfig)
    scaling = settings.scaling
    scaled: dict[str, Any] = {}
    if scaling is not None:
        scaled = {
            "factor": scaling.factor,
            "low": scaling.low_freq,
            "high": scaling.high_freq,
            "original": scaling.original,
            "kind": scaling.kind,
        }
    frequencies = rope.frequencies(
        rotated_dim(cfg.model),
        settings.base,
        **scaled,
        device=positions.device,  # computed there: a copy from the host would make it wait
    )
    scale = 1.0
    if isinstance(scaling, YarnScaling):
        scale = (rope.yarn_mscale(scaling.factor, scaling.mscale)
                 / rope.yarn_mscale(scaling.factor, scaling.mscale_all))
    dtype = torch.float64 if cfg.train.dtype == "fp64" else torch.float32
    return rope.cos_sin_tables(positions, frequencies, dtype, scale)
