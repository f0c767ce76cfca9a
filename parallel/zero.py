"""When a part's weights are whole and when its gradients leave: ZeRO's table (parallel/params.py), set in motion.

A part is what a stage runs at once: the embedding, a block, the head. Its buckets are gathered before its forward and
before its backward, and reduced when the last gradient of a microbatch (ZeRO-2, 3) or of the step (0, 1) has landed,
while the backward goes on below it. Autograd says when: the gradient of a part's output begins its backward, the gradient
of its input ends it. A bucket that two parts share (a tied table) keeps
its gradients until both have ended their last backward of the step.
"""
from torch import Tensor

from parallel.params import Bucket


class Zero:
    """parts: the buckets of each part of a stage. final: the backward now running is the step's last for this stage.
    split: it computes input gradients only (an I); the buckets then end with the W."""

    def __init__(self, parts: list[list[Bucket]]) -> None:
        self.parts = parts
        self.final = self.split = False
        for b in (b for part in parts for b in part):
            b.users += 1

    def enter(self, part: int, learn: bool) -> None:
        """Before a part's forward. The head makes gradients in its forward: learn."""
        for b in self.parts[part]:
            b.gather()
            if learn:
                b.hold_grad()

    def left(self, part: int) -> None:
        """After a forward whose backward needs the weights anew."""
        for b in self.parts[part]:
            if b.zero == 3 and b.users == 1:
                b.release()

    def watch(self, part: int, x: Tensor | None, y: Tensor) -> None:
        """Follow one forward of a part, from x (None: token ids) to y, into its backward."""
        if y.requires_grad:
            y.register_hook(lambda _: self.begin(part))
        if x is not None and x.requires_grad:
            x.register_hook(lambda _: None if self.split else self.end(part))

    def begin(self, part: int) -> None:
        for b in self.parts[part]:
            b.gather()
            b.hold_grad()

    def hold(self) -> None:
        """Room for gradients in every part, before a W."""
        for b in (b for part in self.parts for b in part):
            b.hold_grad()

    def end(self, part: int) -> None:
        """All gradients of one microbatch of this part are in."""
        for b in self.parts[part]:
            b.finals += self.final
            last = b.finals == b.users
            if last or (b.zero >= 2 and b.users == 1):
                b.reduce()
                if b.zero == 3:
                    b.release()
            if last:
                b.finals = 0
