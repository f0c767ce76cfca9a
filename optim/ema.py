"""The exponential moving average (EMA) of the master weights, for evaluation and export.

    average <- decay * average + (1 - decay) * weights        after every step that was not skipped

The average is initialized to the initial weights, like timm's ModelEmaV3 without warmup, or an AveragedModel
of torch.optim.swa_utils with get_ema_multi_avg_fn that is updated with the initial weights first. The weights
of t steps ago have weight (1 - decay) decay^t (Polyak and Juditsky 1992; for language models arXiv
2306.03241).

Each rank averages the elements it owns, so the code is the same for every layout and ZeRO stage and needs no
communication. Checkpoints store the average as KEY@ema, like the optimizer moments. Router biases are not
averaged; the average is evaluated with the current ones.
"""
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from config.optimizers import EMA
from kernels.grad import accumulation_dtype
from parallel.extras import StepExtra
from parallel.offload import CopyStream, copy_stream, staged_chunks
from parallel.sharding.bucket import Bucket, wait_param_gathers
from parallel.sharding.views import Moments
from parallel.topology.mesh import Mesh


class WeightEMA(StepExtra):
    """Moving average of the master weights, updated after each step.

    buckets: those that train; frozen weights are their own average.
    averages: one flat [owned elements] tensor per bucket, in fp32 (fp64 in an fp64 run), next to its master.
    """

    def __init__(self, decay: float, buckets: list[Bucket], mesh: Mesh) -> None:
        self.decay = decay
        self.buckets = [bucket for bucket in buckets if bucket.trains]
        self.averages: list[Tensor] = []
        for bucket in self.buckets:
            master = bucket.weights.master
            dtype = accumulation_dtype(bucket.dtype)
            self.averages.append(torch.empty_like(master, dtype=dtype, pin_memory=master.is_pinned()))
        self.start()

        self.copy_stream: CopyStream | None = None  # set if masters and averages are in host memory
        if buckets and buckets[0].sharding.offload_master:
            self.copy_stream = copy_stream(buckets[0].weights.local.device, mesh.is_strict)

    def state(self) -> Moments:
        """Return the tensors that a checkpoint stores."""
        return {EMA: self.averages}

    def start(self) -> None:
        """Set the average to the current weights, once those that are on their way have arrived."""
        wait_param_gathers(self.buckets)
        for average, bucket in zip(self.averages, self.buckets):
            average.copy_(bucket.weights.master)

    def weights_updated(self, run: Any, step: int, good: Tensor) -> None:
        self.update(good)

    @torch.no_grad()
    def update(self, is_good: Tensor) -> None:
        """Update the average with the weights of this step. No host sync.

        is_good: bool scalar; if it is False, the step was skipped and nothing changes. Call this before the
        all-gather of the updated weights: under ZeRO-1 and 2 a master may be a slice of its output.
        """
        if is_good.device.type == "cpu" and not is_good:
            return
        masters = [bucket.weights.master for bucket in self.buckets]
        if self.copy_stream is None:
            self.average_in(self.averages, masters, is_good)
            return
        for average, master in zip(self.averages, masters):
            for _, (part, new) in staged_chunks([average, master], is_good.device, self.copy_stream):
                self.average_in([part], [new], is_good)

    def average_in(self, averages: list[Tensor], weights: list[Tensor], is_good: Tensor) -> None:
        """Update the averages in place with one multi-tensor operation."""
        if not averages:
            return
        share = is_good.to(averages[0].dtype) * (1 - self.decay)  # 0 if the step was skipped
        wide = [weight.to(average.dtype) for weight, average in zip(weights, averages)]  # bf16: optim.states
        torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
            averages, wide, [share] * len(averages)
        )

    @contextlib.contextmanager
    def as_weights(self) -> Iterator[None]:
        """Swap in the average, and restore the original weights bit for bit on exit.

        For evaluation only: no training step may run inside. Keeps a copy of the masters, and all-gathers the
        weights twice.
        """
        masters = [bucket.weights.master for bucket in self.buckets]
        wait_param_gathers(self.buckets)
        kept = [master.clone() for master in masters]
        self.compute_with(self.averages)
        try:
            yield
        finally:
            wait_param_gathers(self.buckets)
            self.compute_with(kept)

    @torch.no_grad()
    def compute_with(self, values: list[Tensor]) -> None:
        """Copy `values` ([owned elements] per bucket) to the masters and all-gather the weights."""
        for bucket, value in zip(self.buckets, values):
            bucket.weights.master.copy_(value)
            bucket.weights.copy_master_to_local()
            bucket.weights.start_gather_updated()
