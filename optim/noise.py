"""Gradient noise scale: up to which batch size a larger batch pays (arXiv 1812.06162, appendix A.1).

It is estimated from gradients that exist anyway. With n tokens, the squared norm of a gradient is |G|^2 + S/n
on average: G is the gradient of the whole distribution, S the trace of the covariance of the tokens'
gradients. So two batches of different size give both, without bias:

    S           = (|G_small|^2 - |G_big|^2) / (1/n_small - 1/n_big)
    |G|^2       = |G_big|^2 - S / n_big
    noise scale = S / |G|^2

The unit is tokens that count in the loss. The big batch is that of the step. The small batches are the first
microbatch of every data-parallel rank: in every layout and every ZeRO stage, its gradient exists alone for a
moment, before it is summed with others. |G_small|^2 is the mean of their squared norms, weighted by tokens;
that is the squared norm of a batch of the mean number of tokens.

Only matrices between hidden features outside of experts are measured (ParameterSpec.is_hidden_matrix): no
rank has the whole gradient of a table or of a parameter that is partial over tp.

The cost is one all-reduce of four numbers per step, and no host sync. The estimate of one step is noise;
runtime/metrics.py smooths both parts.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel.extras import Extra, Gradients
from parallel.sharding.bucket import Bucket
from parallel.topology.mesh import Mesh
from parallel.wire import comm


def noise_scale_estimate(
    *,
    small: Tensor,
    small_tokens: Tensor,
    small_batches: Tensor,
    big: Tensor,
    big_tokens: Tensor,
) -> Tensor:
    """[S, |G|^2]. All arguments are scalars on one device.

    small: sum over the small batches of tokens * |gradient of their mean loss|^2.
    small_tokens, small_batches: the tokens of all of them, and how many of them have any token.
    big: |gradient|^2 of the step. big_tokens: the tokens of the step.
    """
    trace = (small / small_tokens - big) / (small_batches / small_tokens - 1 / big_tokens)
    return torch.stack([trace, big - trace / big_tokens])


class GradientNoiseScale(Extra):
    """Estimates the noise scale of each step (log.noise_scale).

    latest: [S, |G|^2] of the last step, on the device. None if it had one microbatch.
    """

    def __init__(self, buckets: list[Bucket], mesh: Mesh) -> None:
        self.buckets = buckets
        self.mesh = mesh
        self.latest: Tensor | None = None

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        """Estimate the noise scale. It judges nothing: this is when the gradients are not clipped yet."""
        batches = gradients.batches
        self.estimate(batches[0].num_counted(), len(batches), gradients.targets, run.scaler.scale)
        return good

    @torch.no_grad()
    def estimate(
        self, first_tokens: Tensor, microbatches: int, step_tokens: Tensor, loss_scale: Tensor
    ) -> None:
        """Estimates `latest`. Call it after the gradients are reduced, and before they are clipped.

        first_tokens, step_tokens: how many tokens count in this rank's first microbatch, and in the step.
        microbatches: of this rank in the step. loss_scale: the factor of the loss that the gradients contain.
        """
        self.latest = None
        if microbatches * self.mesh.dp.size == 1:
            return
        dtype = self.buckets[0].grads.local.dtype
        small, big = self.local_squares()

        # Gradients are sums over tokens times token_scale; |n G|^2 / n = n |G|^2.
        token_scale = (loss_scale / step_tokens).to(dtype)  # as in train_step, rounded as it is there
        small = small / token_scale**2 / first_tokens.clamp(min=1)
        big = big / ((token_scale * step_tokens)**2 * self.buckets[0].owners.size)

        # of the ranks that share a microbatch, one counts its tokens
        counts_tokens = self.mesh.model_parallel.index == 0
        local = [small, first_tokens * counts_tokens, (first_tokens > 0) * counts_tokens, big]
        packed = torch.stack([value.to(dtype) for value in local])
        small, small_tokens, small_batches, big = comm.all_reduce_sum(packed, self.mesh.world)
        self.latest = noise_scale_estimate(
            small=small,
            small_tokens=small_tokens,
            small_batches=small_batches,
            big=big,
            big_tokens=step_tokens.to(dtype),
        )

    def local_squares(self) -> tuple[Tensor, Tensor]:
        """This rank's sums of squares of the hidden matrices: of the first microbatch, and of the step."""
        zero = self.buckets[0].grads.local.new_zeros(())
        small = [zero]
        big = [zero]
        for bucket in self.buckets:
            grads = bucket.grads
            if grads.first_microbatch_squares is not None:
                small.append(grads.first_microbatch_squares)
            big.append(grads.squared_norm_of_hidden(grads.local, bucket.shard_start, bucket.shard_end))
        return torch.stack(small).sum(), torch.stack(big).sum()
