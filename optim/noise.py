"""Gradient noise scale: how large a batch still pays (arXiv 1812.06162, appendix A.1), from gradients that exist anyway.

With n tokens a gradient's squared norm is |G|^2 + S/n on average: G is the gradient of the whole distribution and S the trace
of the tokens' covariance. Two batches of unequal size therefore give both, without bias,

    S     = (|G_small|^2 - |G_big|^2) / (1/n_small - 1/n_big)        |G|^2 = |G_big|^2 - S / n_big        noise scale = S / |G|^2

in tokens that count in the loss. The big batch is the step's. The small ones are the first microbatch of every data rank, the
one batch that every layout and every ZeRO stage holds alone for a moment, before it is summed with others: |G_small|^2 is
their mean weighted by tokens, which is that of a batch of the mean number of tokens. It is taken over the matrices between
hidden features outside experts (Spec.hidden): tables and what is partial over tp are never whole in one place. One sum of
four numbers a step; nothing comes back to the host. An estimate of one step is noise: runtime/metrics.py smooths both parts.
"""
import torch
from torch import Tensor

from parallel import comm
from parallel.mesh import Mesh
from parallel.params import Bucket


def estimate(small: Tensor, tokens: Tensor, count: Tensor, big: Tensor, whole: Tensor) -> Tensor:
    """-> [S, |G|^2]. small: sum over the small batches of tokens * |gradient of their mean loss|^2; tokens, count: of them all, and
    how many have any; big: |gradient|^2 of the step's `whole` tokens. All scalars on one device."""
    s = (small / tokens - big) / (count / tokens - 1 / whole)
    return torch.stack([s, big - s / whole])


class Noise:
    """told: [S, |G|^2] of the last step, on the device; None where the step was one microbatch, or this is off."""

    def __init__(self, on: bool, buckets: list[Bucket], mesh: Mesh) -> None:
        self.on, self.buckets, self.mesh = on, buckets, mesh
        self.told: Tensor | None = None

    @torch.no_grad()
    def settle(self, first: Tensor, microbatches: int, whole: Tensor, scale: Tensor) -> None:
        """After the reductions, before clipping. first: tokens that count in this rank's first microbatch; microbatches: that it had;
        whole: tokens of the step; scale: of the loss, as in the gradients."""
        self.told = None
        if not self.on or microbatches * self.mesh.data.size == 1:
            return
        zero = self.buckets[0].shard.new_zeros(())
        small = torch.stack([zero, *(b.first for b in self.buckets if b.first is not None)]).sum()
        big = torch.stack([zero, *(b.squares(b.shard, b.lo, b.hi) for b in self.buckets)]).sum()
        unit = (scale / whole).to(zero.dtype)  # as in train_step: of one token's gradient, rounded as it is there
        small, big = small / unit**2 / first.clamp(min=1), big / ((unit * whole)**2 * self.copies())  # n |G|^2 = |n G|^2 / n
        alone = self.mesh.model.index == 0  # of a data rank's copies, one counts its tokens
        mine = [small, first * alone, (first > 0) * alone, big]
        sums = comm.sum_(torch.stack([x.to(zero.dtype) for x in mine]), self.mesh.world)
        self.told = estimate(*sums, whole.to(zero.dtype))

    def copies(self) -> int:
        """Ranks that hold the same summed gradients."""
        return self.mesh.dp_rep.size if self.buckets[0].zero else self.mesh.loss.size
