"""Made-up microbatches for tests of a part: what is proved of the whole reads real files (proof/verify)."""

import torch

import config
from config import Config
from parallel.microbatch import Microbatch


class Tokens:
    """Microbatches of made-up tokens, a function of (seed, step) cut over the ranks as data/loader.py cuts
    real ones.
    """

    def __init__(self, cfg: Config, rank: int, world: int) -> None:
        self.cfg, self.rank, self.world = cfg, rank, world

    def microbatches(self, step: int) -> list[Microbatch]:
        t, v, size = self.cfg.train, self.cfg.model.vocab, config.global_batch_at(self.cfg.train, step)
        stream = torch.Generator().manual_seed(t.seed + step)
        ids = torch.randint(v, (size, t.seq_len + 1), generator=stream)
        targets = ids[:, 1:].masked_fill(torch.rand(size, t.seq_len, generator=stream) < 0.2, -100)
        targets[0, 1:] = -100  # one sequence that hardly counts: microbatches of very unequal weight
        starts = torch.rand(size, t.seq_len, generator=stream) < 0.1
        starts[:, 0] = True
        place = torch.arange(t.seq_len).expand_as(starts)
        positions = (
            place - torch.where(starts, place, 0).cummax(1).values if self.cfg.data.doc_mask else place
        )
        docs = starts.cumsum(1, dtype=torch.int32) if self.cfg.data.doc_mask else None
        share = size // self.world
        cuts = [
            slice(i, i + t.micro_batch)
            for i in range(self.rank * share, (self.rank + 1) * share, t.micro_batch)
        ]
        return [
            Microbatch(
                ids[c, :-1],
                targets[c],
                positions[c],
                None if docs is None else docs[c],
                torch.arange(c.start, c.stop),
                step,
            )
            for c in cuts
        ]
