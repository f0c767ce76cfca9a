"""Shared parts of mixers with a state (model/delta.py, mamba.py): sequences across ranks and passes, the
short convolution before the state, and projections.

A state starts from zeros at each document. It is passed on from earlier tokens: from other ranks under
context parallelism (parallel/context/parts.py, with either parallel.cp_kind), from earlier passes in
generation.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from config import Config
from kernels.attention_mask import DocumentCounts
from kernels.short_conv import inputs_to_pass, short_conv
from model.context import ForwardContext, GenerationCache
from model.init import residual_std
from model.precision import fp8_of_layer
from parallel.context.parts import (
    Effect,
    inputs_before,
    join_parts,
    split_documents,
    split_parts,
    states_before,
)
from parallel.sharding.spec import ParameterSpec, parameter
from parallel.tensor.layers import ColumnLinear, RowLinear, row_shard
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Group


@dataclass(frozen=True)
class TokenStretch:
    """The tokens of a pass as a layer with a state reads them.

    `cp` is None if the rank has full sequences; otherwise its parts are treated as separate sequences.
    `documents` is [b, s], and `documents_before` [b, conv - 1 or 1] covers the preceding tokens. `cache` is
    set in generation; its entries are keyed by layer.
    """
    layer: int
    cp: Group | None
    documents: Tensor | None
    documents_before: Tensor | None
    counts: DocumentCounts | None
    cache: GenerationCache | None

    @staticmethod
    def of(context: ForwardContext, layer: int, cp: Group, conv: int) -> "TokenStretch":
        """Build the stretch of a layer. `conv` counts the tokens that the convolution sees, the current
        one included."""
        documents, before = context.documents, None
        if context.sequence_is_sharded and documents is not None:
            documents, before = split_documents(documents, max(1, conv - 1), cp)
        return TokenStretch(
            layer,
            cp=cp if context.sequence_is_sharded else None,
            documents=documents,
            documents_before=before,
            counts=context.document_counts,
            cache=context.cache,
        )

    def split(self, x: Tensor) -> Tensor:
        """Rearrange this rank's tokens [b, s/cp, ...] into the sequences that the layer reads."""
        return x if self.cp is None else split_parts(x)

    def join(self, x: Tensor) -> Tensor:
        """Invert split."""
        return x if self.cp is None else join_parts(x)

    def state_documents(self) -> dict[str, Any]:
        """Return the document arguments of a kernel with a state."""
        before = self.documents_before
        return {"documents": self.documents, "state_document": None if before is None else before[:, -1]}

    def is_one_token(self, x: Tensor) -> bool:
        """Return whether this is a decoding step."""
        return self.cache is not None and x.shape[1] == 1

    def state_before(self, zeros: Callable[[int], Tensor], effect: Callable[[], Effect]) -> Tensor | None:
        """Return the state before the tokens, or None for zeros.

        zeros(b) returns the initial state of b sequences; effect() returns how the tokens change a state.
        """
        if self.cp is not None:
            made = effect()
            return states_before(made, zeros(made[0].shape[0] // 2), self.cp)
        return None if self.cache is None else self.cache.kept.get((self.layer, "state"))

    def keep_state(self, state: Tensor) -> None:
        """Keep the state for the next pass of generation."""
        if self.cache is not None:
            self.cache.kept[self.layer, "state"] = state

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Apply short_conv to x [b, s, c], laid out by split."""
        number = weight.shape[1] - 1
        state = documents_before = None
        if self.cp is not None:
            state = inputs_before(x, number, self.cp)
        if self.documents_before is not None:
            documents_before = self.documents_before[:, self.documents_before.shape[1] - number:]
        if self.cache is not None:
            state = self.cache.kept.get((self.layer, "inputs"))
            self.cache.kept[self.layer, "inputs"] = inputs_to_pass(x, weight.shape[1], state)
        return short_conv(
            x, weight, bias,
            silu=silu,
            state=state,
            documents=self.documents,
            state_documents=documents_before,
        )


class ShortConvolution(nn.Module):
    """A depthwise causal convolution over concatenated projections.

    `channels` maps keys to sizes, each sharded over tp separately. `width` counts the tokens that it sees.
    """

    def __init__(
        self, mesh: Mesh, channels: dict[str, int], width: int, *, bias: bool = False, silu: bool = True
    ) -> None:
        super().__init__()
        self.silu = silu
        # std of uniform(-1, 1) / sqrt(width), the default initialization of torch's convolutions
        std = 1 / math.sqrt(3 * width)
        weights = [row_shard(f"{key}.weight", (number, width), mesh.tp) for key, number in channels.items()]
        self.weight = parameter(ParameterSpec(tuple(weights), "convolution", std))
        self.bias = None
        if bias:
            biases = [row_shard(f"{key}.bias", (number,), mesh.tp) for key, number in channels.items()]
            self.bias = parameter(ParameterSpec(tuple(biases), "bias"))

    def forward(self, x: Tensor, stretch: TokenStretch) -> Tensor:
        """x [b, s, c/tp], laid out by the stretch's split -> the same."""
        return stretch.convolve(x, self.weight, self.bias, self.silu)


class SplitProjection(nn.Module):
    """x [b, s, hidden] (sp: [b, s/tp, hidden]) -> features [b, s, sum/tp], numbers [b, s, sum/tp].

    `features` and `numbers` map names of projections to sizes, each sharded over tp separately. In fp8 the
    numbers, one per head, stay in the compute dtype; otherwise all projections are one product.
    """

    def __init__(
        self, cfg: Config, mesh: Mesh, layer: int, *, features: dict[str, int], numbers: dict[str, int]
    ) -> None:
        super().__init__()
        fp8 = fp8_of_layer(cfg, layer)
        parts = [features | numbers] if fp8 is None else [features, numbers]
        self.sizes = [sum(sizes.values()) // mesh.tp.size for sizes in (features, numbers)]
        self.parts = nn.ModuleList(
            ColumnLinear(
                mesh,
                {f"layers.{layer}.attn.{name}": size for name, size in part.items()},
                cfg.model.hidden,
                std=cfg.model.init_std,
                bias=False,
                sp=cfg.parallel.sp,
                async_tp=cfg.parallel.async_tp,
                fp8=fp8 if part is parts[0] else None,
            )
            for part in parts
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.parts) == 1:
            features, numbers = self.parts[0](x).split(self.sizes, -1)
            return features, numbers
        features, numbers = (part(x) for part in self.parts)
        return features, numbers


def output_projection(cfg: Config, mesh: Mesh, layer: int, features: int) -> RowLinear:
    """Create the projection [b, s, features/tp] -> the residual stream."""
    return RowLinear(
        mesh,
        f"layers.{layer}.attn.o",
        features,
        cfg.model.hidden,
        std=residual_std(cfg.model),
        bias=False,
        sp=cfg.parallel.sp,
        async_tp=cfg.parallel.async_tp,
        fp8=fp8_of_layer(cfg, layer),
    )
