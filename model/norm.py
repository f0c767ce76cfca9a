"""RMSNorm or LayerNorm, fused with the residual addition."""
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from config import Config, NormConfig, NormPlace, recomputes
from config.tree import Positive
from kernels.linear import recompute_output
from kernels.norm import add_norm
from parallel.tensor.layers import replicated_vector


@dataclass(frozen=True, kw_only=True)
class RMSNormConfig(NormConfig):
    """RMSNorm (arXiv 1910.07467)."""
    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: Positive = 1e-5  # added to the mean square
    place: NormPlace = "before"  # what a block normalizes: what its mixer and MLP read; what they give
    #   (after: OLMo 2); or both (around: Gemma 2)
    weight: bool = True  # it has one; false: it scales no channel (nanochat)


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(NormConfig):
    """LayerNorm (arXiv 1607.06450)."""
    kind: Literal["layernorm"] = "layernorm"
    eps: Positive = 1e-5  # added to the variance
    place: NormPlace = "before"  # what a block normalizes: what its mixer and MLP read; what they give
    #   (after); or both (around)
    weight: bool = True  # it has one; false: it scales no channel (OLMo 1)
    bias: bool = True  # it has one (GPT-2); false: a weight alone (Cohere)


NORMS = (RMSNormConfig, LayerNormConfig)  # kinds of model.norm


class Norm(nn.Module):
    """A norm over the last dim [d]."""

    def __init__(self, cfg: Config, key: str) -> None:
        super().__init__()
        hidden = cfg.model.hidden
        sp = cfg.parallel.sp
        self.eps = cfg.model.norm.eps
        self.compiled = cfg.train.compile
        self.function = add_norm  # model/unproven.py may set another
        self.recompute = recomputes(cfg, "norm")
        self.weight = None
        if cfg.model.norm.weight:
            self.weight = replicated_vector(f"{key}.weight", hidden, "norm", is_partial=sp)
        self.is_layer_norm = isinstance(cfg.model.norm, LayerNormConfig)
        self.bias = None
        if isinstance(cfg.model.norm, LayerNormConfig) and cfg.model.norm.bias:
            self.bias = replicated_vector(f"{key}.bias", hidden, "bias", is_partial=sp)

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalize(x)
        return recompute_output(y, self.normalize, x) if self.recompute else y

    def normalize(self, x: Tensor) -> Tensor:
        return self.compute(x, None)[0]

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), or (norm(x), x) without a residual, in one pass."""
        y, total = self.compute(x, residual)
        if self.recompute:
            y = recompute_output(y, self.normalize, total)
        return y, total

    def compute(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        weight, bias = self.weight, self.bias
        if weight is None:
            weight = x.new_ones(x.shape[-1])
        if bias is None and self.is_layer_norm:
            bias = torch.zeros_like(weight)
        return self.function(x, residual, weight, bias, self.eps, self.compiled)


class PlainSum:
    """Stands in for an absent norm: only adds the residual."""

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = add_residual(x, residual)
        return total, total


SUM = PlainSum()


def add_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return x + residual, or x if there is no residual."""
    return x if residual is None else x + residual
