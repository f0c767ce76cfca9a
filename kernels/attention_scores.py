"""From query-key products to softmax inputs: scale, soft cap (Gemma 2, arXiv 2408.00118), and sinks in
addition to the keys (gpt-oss; the idea is from arXiv 2309.17453)."""
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoreForm:
    """How a product q k^T becomes a score: softcap tanh(scale q k^T / softcap).

    scale defaults to 1 / sqrt(head dim). Without a softcap the score is scale q k^T. Raises ValueError for
    numbers that are not above 0.
    """
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and not value > 0:
                raise ValueError(f"attention: {name} is {value}, but must be above 0, or None")

    def divisor(self, head_dim: int) -> float:
        """Return 1 / scale."""
        return math.sqrt(head_dim) if self.scale is None else 1 / self.scale

    def capped(self, scores: Tensor) -> Tensor:
        """Map scaled products to scores."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def through_cap(self, dscores: Tensor, scores: Tensor) -> Tensor:
        """Map gradients of scores to those of scaled products. scores are capped; 0 where masked to -inf."""
        if self.softcap is None:
            return dscores
        tanh = (scores / self.softcap).clamp_min(-1)
        return dscores * (1 - tanh.square())


PLAIN_SCORES = ScoreForm()


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attend as if each head had one more key, with these scores and value 0.

    out [b, s, h, e]; lse [b, s, h], the logsumexp of its scores; sinks [h] -> [b, s, h, e].
    """
    share = torch.sigmoid(lse - sinks.to(lse.dtype))  # softmax share of the keys
    return (out * share[..., None]).to(out.dtype)
