"""Gradient noise scale: the batch size beyond which larger batches stop paying (arXiv 1812.06162, app. A.1).

It is estimated from gradients that training computes anyway. The expected squared norm of the gradient of n
tokens is |G|^2 + S/n, where G is the true gradient and S is the trace of the covariance of the per-token
gradients. Two batches of different size give unbiased estimates of both:

    S           = (|G_small|^2 - |G_big|^2) / (1/n_small - 1/n_big)
    |G|^2       = |G_big|^2 - S / n_big
    noise scale = S / |G|^2

The unit is tokens that count in the loss. The big batch is the batch of the step. The small batches are the
first microbatch of every data-parallel rank, whose gradient exists on its own in every layout and ZeRO stage
before it is accumulated with others. |G_small|^2 is the token-weighted mean of their squared norms, which
estimates the squared norm at the mean number of tokens.

Only hidden matrices outside the experts are measured (ParameterSpec.is_hidden_matrix): no rank holds the full
gradient of an embedding table or of a parameter that is partial over tp.

Costs one all-reduce of four numbers per step and no host sync. The estimate of a single step is mostly noise;
SmoothedNoise smooths both parts for the log.
"""
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.extras import Gradients, StepExtra
from parallel.sharding.bucket import Bucket
from parallel.topology.mesh import Mesh
from parallel.wire import comm

NOISE_DECAY = 0.95  # of the running means of the noise scale


def noise_scale_estimate(
    *,
    small: Tensor,
    small_tokens: Tensor,
    small_batches: Tensor,
    big: Tensor,
    big_tokens: Tensor,
) -> Tensor:
    """Return [S, |G|^2]. All arguments are scalars on one device.

    small: sum over the small batches of tokens * |gradient of their mean loss|^2.
    small_tokens, small_batches: total tokens of the small batches, and the number of nonempty ones.
    big: |gradient|^2 of the step. big_tokens: tokens of the step.
    """
    trace = (small / small_tokens - big) / (small_batches / small_tokens - 1 / big_tokens)
    return torch.stack([trace, big - trace / big_tokens])


class GradientNoiseScale(StepExtra):
    """Estimate the noise scale of each step (log.noise_scale).

    latest: [S, |G|^2] of the last step, on the device, or None if that step had a single microbatch.
    """

    def __init__(self, buckets: list[Bucket], mesh: Mesh) -> None:
        self.buckets = buckets
        self.mesh = mesh
        self.latest: Tensor | None = None

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        """Estimate the noise scale and return `good`. This hook runs before the gradients are clipped."""
        batches = gradients.batches
        self.estimate(batches[0].num_counted(), len(batches), gradients.targets, run.scaler.scale)
        return good

    @torch.no_grad()
    def estimate(
        self, first_tokens: Tensor, microbatches: int, step_tokens: Tensor, loss_scale: Tensor
    ) -> None:
        """Update `latest`. Call it after the gradients are reduced and before they are clipped.

        first_tokens, step_tokens: tokens that count in this rank's first microbatch, and in the step.
        microbatches: this rank's microbatches per step. loss_scale: the loss scale still in the gradients.
        """
        self.latest = None
        if microbatches * self.mesh.dp.size == 1:
            return
        dtype = self.buckets[0].grads.local.dtype
        small, big = self.local_squares()

        # Gradients are sums over tokens times token_scale; |n G|^2 / n = n |G|^2.
        token_scale = (loss_scale / step_tokens).to(dtype)  # rounded exactly as in train_step
        small = small / token_scale**2 / first_tokens.clamp(min=1)
        big = big / ((token_scale * step_tokens)**2 * self.buckets[0].owners.size)

        # count the tokens on only one of the ranks that share a microbatch
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
        """Return this rank's sums of squares over hidden matrices: (of the first microbatch, of the step)."""
        zero = self.buckets[0].grads.local.new_zeros(())
        small = [zero]
        big = [zero]
        for bucket in self.buckets:
            grads = bucket.grads
            if grads.first_microbatch_squares is not None:
                small.append(grads.first_microbatch_squares)
            big.append(grads.squared_norm_of_hidden(grads.local, bucket.shard_start, bucket.shard_end))
        return torch.stack(small).sum(), torch.stack(big).sum()


class SmoothedNoise:
    """Gradient noise scale as a ratio of two running means; noise_scale_estimate gives the two parts.

    Each part is unbiased, but their ratio in a single step is mostly noise and may be negative. rows: the
    rows of metrics.jsonl that a resumed run keeps, which initialize the means.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.means: tuple[float, float] | None = None  # of S and |G|^2
        for row in rows:
            parts = [row.get("noise_s"), row.get("noise_g2")]
            self.update(parts, is_good=not row.get("skipped"))

    def update(self, parts: Sequence[float | None], is_good: bool) -> dict[str, float | None]:
        """Add one step. Returns its metrics.jsonl fields; noise_scale is in tokens, None if unknown.

        parts: [S, |G|^2] of the step, or empty. A skipped step (not is_good) does not change the means.
        """
        known = [part for part in parts if part is not None and math.isfinite(part)]
        if len(parts) != 2 or len(known) != 2:
            return {"noise_scale": None, "noise_s": None, "noise_g2": None}
        noise_s, noise_g2 = known
        if is_good:
            self.update_means(noise_s, noise_g2)
        return {"noise_scale": self.ratio(), "noise_s": noise_s, "noise_g2": noise_g2}

    def update_means(self, noise_s: float, noise_g2: float) -> None:
        if self.means is None:
            self.means = (noise_s, noise_g2)
            return
        old_s, old_g2 = self.means
        new_s = NOISE_DECAY * old_s + (1 - NOISE_DECAY) * noise_s
        new_g2 = NOISE_DECAY * old_g2 + (1 - NOISE_DECAY) * noise_g2
        self.means = (new_s, new_g2)

    def ratio(self) -> float | None:
        if self.means is None or min(self.means) <= 0:
            return None
        mean_s, mean_g2 = self.means
        return mean_s / mean_g2
