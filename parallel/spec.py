"""One Spec per parameter: which boxes of which global tensors it holds, how it starts, over which axes its gradient is
partial. Initialisation, ZeRO, clipping, the optimizer, checkpoints and export all read it; there is no second bookkeeping.
"""
import hashlib
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from parallel.boxes import Box

BLOCK = 1 << 20  # elements of one key that are drawn together; part of the definition of the initial weights


@dataclass(frozen=True)
class Spec:
    """boxes: stacked along dim 0 of the local tensor, in order (q, k, v of a merged projection; usually one).

    init: 'normal' | 'ones' | 'zeros'; std of the normal. decay: weight decay applies. rate: factor of the learning rate.
    partial: mesh groups over which every rank's gradient is only a part of the sum (beyond the data axes, over which it
    always is). expert: laid out by the experts' factorization of the ranks (parallel/layout.py), whose data axes are its own.
    """
    boxes: tuple[Box, ...]
    init: str
    std: float = 0.0
    decay: bool = True
    rate: float = 1.0
    partial: tuple[str, ...] = ()
    expert: bool = False

    @property
    def hidden(self) -> bool:
        """A matrix between hidden features: not a table, not what routes or gates."""
        key = self.boxes[0].key
        return (len(self.shape) == 2 and self.decay and not key.startswith(("embed.", "positions.", "head."))
                and ".router." not in key and "_gate." not in key)

    def wider(self, m: float, power: float) -> "Spec":
        """The same in a model m times as wide as the one that was tuned: muP (arXiv 2203.03466, table 8). A table or vector stays;
        a hidden matrix starts m^-1/2 times as large and learns m^-power times as fast; what reads a fixed number of values off
        the hidden state, a router or gate, starts and learns 1/m times (table 3: the same as a factor 1/m behind it)."""
        if self.hidden:
            return replace(self, std=self.std / m**0.5, rate=self.rate / m**power)
        reads = len(self.shape) == 2 and self.boxes[0].key.startswith("layers.")
        return replace(self, std=self.std / m, rate=self.rate / m) if reads else self

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(b.size[0] for b in self.boxes), *self.boxes[0].size[1:])

    def split(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """[(box, its rows of the local tensor)]: views."""
        return list(zip(self.boxes, local.split([b.size[0] for b in self.boxes])))


def parameter(spec: Spec) -> nn.Parameter:
    """A parameter without storage; parallel/params.py gives it its place in a flat buffer, of shape spec.shape."""
    p = nn.Parameter(torch.empty(0))
    p.spec = spec
    return p


@torch.no_grad()
def fill(spec: Spec, local: Tensor, seed: int) -> None:
    """Initial values: a function of (seed, global key, global index) alone, so every layout starts the same."""
    for box, part in spec.split(local):
        if spec.init == "normal":
            draw(box, part, seed, spec.std)
        else:
            part.fill_({"ones": 1.0, "zeros": 0.0}[spec.init])


def draw(box: Box, out: Tensor, seed: int, std: float) -> None:
    """Normal numbers, drawn in blocks of whole rows, each from its own stream: a rank draws only the blocks it touches."""
    width = prod(box.shape[1:])
    rows = max(1, BLOCK // width)
    for block in range(box.start[0] // rows, -(-(box.start[0] + box.size[0]) // rows)):
        first, last = block * rows, min((block + 1) * rows, box.shape[0])
        digest = hashlib.sha256(f"{seed}/{box.key}/{block}".encode()).digest()
        stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        piece = Box(box.key, box.shape, (first, *(0,) * (len(box.shape) - 1)), (last - first, *box.shape[1:]))
        mine = piece.meet(box)
        values = torch.randn(piece.size, generator=stream)[mine.within(piece)]
        out[mine.within(box)] = (values * std).to(out.dtype)
