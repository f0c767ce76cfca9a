"""When a part's weights are whole and when its gradients leave: ZeRO's table (parallel/params.py), set in motion.

A part is what a stage runs at once: the embedding, a block, the head. Its buckets are needed before its forward and before
its backward; those of the next part in the same direction are fetched meanwhile. Gradients are sent when the last of a
microbatch (ZeRO-2, 3) or of the step (0, 1) has landed, and travel while the part below runs its backward; then they must
be there, so that no more than two parts' whole gradients exist under ZeRO-2 and 3. Autograd says when: the gradient of a
part's output begins its backward, the gradient of its input ends it. A bucket that two parts share (a tied table) keeps
its gradients, and its weights whole, until both have ended their last backward of the step.

Every rank of a group runs the same parts in the same order, so all start the same exchanges in the same order.
"""
from torch import Tensor

from parallel.params import Bucket


class Zero:
    """parts: the buckets of each part of a stage; lookup: the first is an embedding, whose backward reads no weights.
    final: the backward now running is the step's last for this stage. split: it computes input gradients only (an I); the
    buckets then end with the W. head: the last part is one. turning: a backward follows the forward now running, and begins
    where that ends: the last block stays whole in between, as the head always does."""

    def __init__(self, parts: list[list[Bucket]], lookup: bool, head: bool) -> None:
        self.parts, self.lookup, self.hinge = parts, lookup, len(parts) - 1 - head
        self.final = self.split = self.turning = False
        self.sent: list[Bucket] = []  # gradients of the part that ended last, under way
        for b in (b for part in parts for b in part):
            b.users += 1

    def need(self, part: int, ahead: int) -> None:
        """The weights of a part, now; those of part `ahead` are used next."""
        for b in self.parts[part]:
            b.need()
        for b in self.parts[ahead] if 0 <= ahead < len(self.parts) else ():
            b.fetch()

    def enter(self, part: int, learn: bool) -> None:
        """Before a part's forward. The head makes gradients in its forward: learn."""
        self.need(part, part + 1)
        if learn:
            for b in self.parts[part]:
                b.hold_grad()

    def left(self, part: int) -> None:
        """After a forward whose backward needs the weights anew."""
        for b in self.parts[part] if not (self.turning and part == self.hinge) else ():
            if b.zero == 3 and b.users == 1:
                b.release()

    def watch(self, part: int, x: Tensor | None, y: Tensor) -> None:
        """Follow one forward of a part, from x (None: token ids) to y, into its backward."""
        if y.requires_grad:
            y.register_hook(lambda _: self.begin(part))
        if x is not None and x.requires_grad:
            x.register_hook(lambda _: None if self.split else self.end(part))

    def begin(self, part: int) -> None:
        if part or not self.lookup:
            self.need(part, part - 1 if part > 1 or not self.lookup else -1)
        for b in self.parts[part]:
            b.hold_grad()

    def hold(self) -> None:
        """Room for gradients in every part, before a W."""
        for b in (b for part in self.parts for b in part):
            b.hold_grad()

    def end(self, part: int) -> None:
        """All gradients of one microbatch of this part are in."""
        for b in self.sent:
            b.land()
        self.sent = []
        for b in self.parts[part]:
            b.sample()
            b.finals += self.final
            last = b.finals == b.users
            if last or (b.zero >= 2 and b.users == 1):
                b.reduce(last)
                self.sent.append(b)
                if b.zero == 3:
                    b.release()
            if last:
                b.finals = 0
