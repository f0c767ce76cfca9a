"""Microbatch: the tokens, targets and positions that a rank's model sees at once.

Shapes: b sequences of s tokens; cp is the size of the context-parallel group, mtp the number of modules of
multi-token prediction.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from kernels.attention_mask import DocumentCounts
from kernels.cross_entropy import IGNORE_INDEX


@dataclass(frozen=True)
class Microbatch:
    """Sequences as the loader packs them, or this rank's part of them under context parallelism.

    parallel/context/zigzag.py shards the sequences over cp: tokens, targets and positions are then [b, s/cp],
    documents stays [b, s], and sequence_positions is set.
    """
    tokens: torch.Tensor  # int64 [b, s]
    targets: torch.Tensor  # int64 [b, s]: the next token; IGNORE_INDEX where it is not counted
    positions: torch.Tensor  # int64 [b, s]: 0, 1, 2, ...; restarts at each document under data.doc_mask
    documents: torch.Tensor | None = None  # document number; None without data.doc_mask
    sequence_ids: torch.Tensor | None = None  # int64 [b]: index in the step's global batch; dropout needs it
    step: int | torch.Tensor = 0  # from 0; an int64 scalar in a captured step (parallel/pipeline/graphs.py)
    sequence_positions: torch.Tensor | None = None  # int64 [s/cp]: index of each token in its whole sequence;
    #   None if the sequences are not sharded

    document_counts: DocumentCounts | None = None  # of documents, if the host has counted them
    step_targets: torch.Tensor | None = None  # int64 scalar: targets that count in the whole step, over all
    #   ranks, if the loader has summed them

    # for multi-token prediction, set by with_tokens_ahead
    tokens_ahead: torch.Tensor | None = None  # the tokens 1, 2, ... positions ahead
    targets_ahead: torch.Tensor | None = None  # int64 [mtp, b, s]: the token after each, or IGNORE_INDEX

    def with_tokens_ahead(self, depth: int) -> "Microbatch":
        """Return the microbatch with tokens_ahead and targets_ahead for `depth` modules; itself for depth 0.

        Call it on whole sequences, before context parallelism shards them. A target counts if the main loss
        counts it, and if it lies in the same sequence and (under data.doc_mask) the same document as the
        token that predicts it. Beyond the end of a sequence the token is 0. No counted target depends on
        these zeros: under causal attention only later tokens see them, and the targets of those lie beyond
        the end too.
        """
        if depth == 0:
            return self
        tokens: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []

        for distance in range(1, depth + 1):
            tokens.append(shift_left(self.tokens, distance, fill=0))
            target = shift_left(self.targets, distance, fill=IGNORE_INDEX)
            if self.documents is not None:
                document = shift_left(self.documents, distance, fill=-1)
                target = target.masked_fill(document != self.documents, IGNORE_INDEX)
            targets.append(target)

        return replace(self, tokens_ahead=torch.stack(tokens), targets_ahead=torch.stack(targets))

    def num_counted(self) -> torch.Tensor:
        """Return the number of targets that the loss counts: an int64 scalar on the microbatch's device."""
        return (self.targets != IGNORE_INDEX).sum()

    def to(self, device: torch.device | str) -> "Microbatch":
        """Return the microbatch with all its tensors on `device`; itself if they are already there.

        The host does not wait for copies from pinned memory to a CUDA GPU.
        """
        if torch.device(device) == self.tokens.device:
            return self
        beside = torch.device(device).type == "cuda"
        return self.with_tensors(lambda tensor: tensor.to(device, non_blocking=beside))

    def pinned(self) -> "Microbatch":
        """Return a copy of the microbatch in pinned host memory."""
        return self.with_tensors(torch.Tensor.pin_memory)

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Microbatch":
        """Return the microbatch with each of its tensors replaced by change(tensor)."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


def shift_left(x: torch.Tensor, distance: int, fill: int) -> torch.Tensor:
    """[b, s] -> [b, s]: element i is x[:, i + distance], or `fill` beyond the end."""
    return pad(x[:, distance:], (0, distance), value=fill)
