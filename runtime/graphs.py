"""A step's forward and backward as one CUDA graph (train.cuda_graphs): recorded once, then launched as a whole, so that a host that
is slower than its GPU no longer counts (a small model, a short sequence).

What a recording keeps is addresses, not values. Weights and gradients have fixed ones (parallel/params.py); what changes from
step to step, the batches, their step number (dropout) and the loss's scale, is copied into tensors of the recording before each
replay. Norm, clipping and the optimizer's update come after it as they always do, so learning rate and step number stay numbers
of the host. rules.py refuses what would break this: several ranks (exchanges are not recorded), mixtures (their counts are read
on the host), offload and ZeRO-2, 3 (buffers come and go). The numbers are those of the same kernels in the same order: bitwise.

On a CPU nothing can be recorded: a replay calls the work again, over the same held tensors (the tests go this way).
"""
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

WARM = 2  # calls before the recording: kernels are compiled, libraries choose theirs, and make their workspaces


class Graph:
    """Called as graph(work, batches, scale) in the place of work(batches, scale) -> Tensor, with the same work each time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.calls = device, 0
        self.batches: list | None = None  # the recording's own: data/batch.py's, whose step is a tensor
        self.scale: Tensor | None = None
        self.result: Tensor | None = None
        self.replay: Callable[[], object] | None = None

    def __call__(self, work: Callable[[list, Tensor], Tensor], batches: list, scale: Tensor) -> Tensor:
        self.take(batches, scale)
        self.calls += 1
        if self.calls <= WARM:
            return self.apart(work)
        if self.replay is None:
            self.record(work)
        self.replay()
        return self.result.clone()  # the next replay writes over it

    def take(self, batches: list, scale: Tensor) -> None:
        """This step's values into the held tensors. Raises ValueError where a shape is not the recording's."""
        if self.batches is None:
            self.batches = [replace(b, step=torch.full((), b.step, device=self.device), **{k: v.clone() for k, v in tensors(b).items()})
                            for b in batches]
            self.scale = scale.clone()
        shapes = [[{k: v.shape for k, v in tensors(b).items() if k != "step"} for b in those] for those in (self.batches, batches)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"train.cuda_graphs: a step of {shapes[1]}, and the recorded one is of {shapes[0]}")
        for held, new in zip(self.batches, batches):
            held.step.fill_(new.step)
            for name, value in tensors(new).items():
                getattr(held, name).copy_(value)
        self.scale.copy_(scale)

    def apart(self, work: Callable) -> Tensor:
        """The work itself, on another stream than the usual one, as a recording will be."""
        if self.device.type != "cuda":
            return work(self.batches, self.scale)
        here, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            result = work(self.batches, self.scale)
        here.wait_stream(side)
        result.record_stream(here)
        return result

    def record(self, work: Callable) -> None:
        if self.device.type != "cuda":
            def replay():
                self.result = work(self.batches, self.scale)
            self.replay = replay
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the loader's thread and the saver's do as they like
            self.result = work(self.batches, self.scale)
        self.replay = graph.replay


def tensors(batch) -> dict[str, Tensor]:
    return {k: v for k, v in vars(batch).items() if isinstance(v, Tensor)}
