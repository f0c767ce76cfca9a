"""One micro-batch, as every rank's model sees it. Shapes: b sequences of s tokens."""
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor  # int64 [b, s]
    targets: torch.Tensor  # int64 [b, s]: the next token; -100 where it does not count
    positions: torch.Tensor  # int64 [b, s]: 0, 1, 2, ...; restarts with each document under data.doc_mask
    docs: torch.Tensor | None = None  # int32 [b, s]: document number within the sample; none without data.doc_mask
    rows: torch.Tensor | None = None  # int64 [b]: place of each sequence in the step's global batch; dropout needs it
    step: int = 0  # the step it belongs to, from 0
    places: torch.Tensor | None = None  # int64 [s/cp]: place of each token in its sequence, where context parallelism has cut
    #   it (parallel/zigzag.py: tokens, targets, positions are then [b, s/cp], docs still [b, s]); none: the whole sequence

    def counted(self) -> torch.Tensor:
        """How many targets count: an int64 scalar on the batch's device."""
        return (self.targets != -100).sum()

    def to(self, device) -> "Batch":
        if torch.device(device) == self.tokens.device:
            return self
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in tensors.items()})
