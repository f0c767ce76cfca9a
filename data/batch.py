"""One micro-batch, as every rank's model sees it. Shapes: b sequences of s tokens."""
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor  # int64 [b, s]
    targets: torch.Tensor  # int64 [b, s]: the next token; -100 where it does not count
    positions: torch.Tensor  # int64 [b, s]: 0, 1, 2, ...; restarts with each document under data.doc_mask
    docs: torch.Tensor | None = None  # int32 [b, s]: document number within the sample; none without data.doc_mask
    rows: torch.Tensor | None = None  # int64 [b]: place of each sequence in the step's global batch; dropout needs it
    step: int | torch.Tensor = 0  # the step it belongs to, from 0; an int64 scalar in a recorded step (runtime/graphs.py)
    places: torch.Tensor | None = None  # int64 [s/cp]: place of each token in its sequence, where context parallelism has cut
    #   it (parallel/zigzag.py: tokens, targets, positions are then [b, s/cp], docs still [b, s]); none: the whole sequence

    ahead: torch.Tensor | None = None  # int64 [mtp, b, s]: the tokens 1, 2, ... places further on, for multi-token prediction
    ahead_targets: torch.Tensor | None = None  # int64 [mtp, b, s]: what follows each of them; -100 where it does not count

    def look_ahead(self, depth: int) -> "Batch":
        """With `ahead` for so many modules. To be done on whole sequences, before cp cuts them. A target counts where the main
        loss counts it, in the sequence and (data.doc_mask) the document of the token that looks ahead. Beyond the end the
        token is 0; nothing that counts can see it, since all that comes after it looks beyond the end too."""
        if depth == 0:
            return self

        def shifted(x: torch.Tensor, k: int, beyond: int) -> torch.Tensor:
            return pad(x[:, k:], (0, k), value=beyond)
        targets = [shifted(self.targets, k, -100) for k in range(1, depth + 1)]
        if self.docs is not None:
            targets = [t.masked_fill(shifted(self.docs, k, -1) != self.docs, -100) for k, t in enumerate(targets, 1)]
        tokens = [shifted(self.tokens, k, 0) for k in range(1, depth + 1)]
        return replace(self, ahead=torch.stack(tokens), ahead_targets=torch.stack(targets))

    def counted(self) -> torch.Tensor:
        """How many targets count: an int64 scalar on the batch's device."""
        return (self.targets != -100).sum()

    def to(self, device) -> "Batch":
        if torch.device(device) == self.tokens.device:
            return self
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in tensors.items()})
