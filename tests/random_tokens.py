"""Microbatches of random tokens, for benchmarks and tests of a part of a step.

The proof of the whole program reads files through the loader instead (lab/proof/verify/loop.py).
"""
from types import SimpleNamespace

import torch
from torch import Tensor

from build import build_run
from config import Config, global_batch_at
from model.sharding import parallel_dims
from parallel.microbatch import Microbatch
from parallel.topology.mesh import Mesh

IGNORED_TARGET = -100
IGNORED_SHARE = 0.2
DOCUMENT_STARTS_SHARE = 0.1
# what a checkpoint says of its data
DATA = SimpleNamespace(
    tokenizer=SimpleNamespace(fingerprint="t"), fingerprint="d", is_chat=False, has_start=False
)


class RandomTokens:
    """Batches that depend only on (train.seed, step), sharded over the data-parallel ranks.

    A fifth of the targets is ignored, and nearly all of those of the first of several sequences, so that
    microbatches have unequal weights. With the first target alone, queries and keys would have no gradient.
    """

    def __init__(self, cfg: Config, dp_index: int, dp_size: int) -> None:
        self.cfg = cfg
        self.dp_index = dp_index
        self.dp_size = dp_size

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return the microbatches of one rank for a step, counted from 0. No two share storage."""
        train = self.cfg.train
        assert self.cfg.model.vocab is not None  # set in every trial's config
        size = global_batch_at(train, step)
        stream = torch.Generator().manual_seed(train.seed + step)
        ids = torch.randint(self.cfg.model.vocab, (size, train.seq_len + 1), generator=stream)

        is_ignored = torch.rand(size, train.seq_len, generator=stream) < IGNORED_SHARE
        targets = ids[:, 1:].masked_fill(is_ignored, IGNORED_TARGET)
        if size > 1:
            targets[0, 1:] = IGNORED_TARGET

        positions = torch.arange(train.seq_len).expand(size, -1)
        documents: Tensor | None = None
        if self.cfg.data.doc_mask:
            is_start = torch.rand(size, train.seq_len, generator=stream) < DOCUMENT_STARTS_SHARE
            is_start[:, 0] = True
            start = torch.where(is_start, positions, 0).cummax(dim=1).values
            positions = positions - start
            documents = is_start.cumsum(dim=1, dtype=torch.int32)

        share = size // self.dp_size
        microbatches: list[Microbatch] = []
        for first in range(self.dp_index * share, (self.dp_index + 1) * share, train.micro_batch):
            rows = slice(first, first + train.micro_batch)
            microbatches.append(Microbatch(
                ids[rows, :-1].clone(),
                targets[rows].clone(),
                positions[rows].clone(),
                documents=None if documents is None else documents[rows].clone(),
                sequence_ids=torch.arange(first, first + train.micro_batch),
                step=step,
                step_targets=(targets != IGNORED_TARGET).sum(),
            ))
        return microbatches


def begin(world, cfg: Config, steps: int | None = None):
    """Return a rank's run on a CPU, whose ledger is empty, and its tokens. steps: if not those of cfg."""
    mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
    mesh.ledger.clear()
    run = build_run(cfg, mesh, torch.device("cpu"), DATA, steps or cfg.train.steps)
    return run, RandomTokens(cfg, mesh.dp.index, mesh.dp.size)
