"""A step's forward and backward as one CUDA graph (train.cuda_graphs): recorded once, then launched as a whole, so that a host that
is slower than its GPU no longer counts (a small model, a short sequence).

What a recording keeps is addresses, not values. Weights and gradients have fixed ones (parallel/params.py); what changes from
step to step, the batches, their step number (dropout) and the loss's scale, is copied into tensors of the recording before each
replay. Norm, clipping and the optimizer's update come after it as they always do, so learning rate and step number stay numbers
of the host. The same kernels run in the same order: the same bits. A ramp (train.ramp) has a recording for each number of
microbatches, one at a time: it never comes back to an earlier one, whose memory is free for the next. rules.py (`recordable`) refuses
what would break this.

On a CPU nothing can be recorded: a replay calls the work again, over the same held tensors (the tests go this way).
"""
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

WARM = 2  # calls before the recording: kernels are compiled, libraries choose theirs, and make their workspaces


class Graph:
    """Called as graph(work, batches, scale) in the place of work(batches, scale) -> a tuple of tensors, with the same work each time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.calls = device, 0
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.batches: list = []  # the recording's own: data/batch.py's, whose step is a tensor
        self.scale: Tensor | None = None
        self.result: tuple[Tensor, ...] = ()
        self.replay: Callable[[], object] | None = None

    def __call__(self, work: Callable, batches: list, scale: Tensor) -> tuple[Tensor, ...]:
        if len(batches) != len(self.batches):
            self.begin(batches, scale)
        self.take(batches, scale)
        self.calls += 1
        if self.calls <= WARM:
            return self.apart(work)
        if self.replay is None:
            self.record(work)
        self.replay()
        return tuple(t.clone() for t in self.result)  # the next replay writes over them

    def begin(self, batches: list, scale: Tensor) -> None:
        """Another number of microbatches: forget what was recorded, and hold tensors of these batches' shapes."""
        self.calls, self.replay, self.result, self.scale = 0, None, (), scale.clone()
        self.batches = [replace(b, step=torch.zeros((), dtype=torch.int64, device=self.device), **{k: v.clone() for k, v in tensors(b).items()})
                        for b in batches]

    def take(self, batches: list, scale: Tensor) -> None:
        """This step's values into the held tensors. Raises ValueError where a shape is not the recording's."""
        for held, new in zip(self.batches, batches):
            theirs, ours = ({k: tuple(v.shape) for k, v in tensors(b).items() if k != "step"} for b in (new, held))
            if theirs != ours:
                raise ValueError(f"train.cuda_graphs: a step of {theirs}, and the recorded one is of {ours}")
            held.step.fill_(new.step)
            for name, value in tensors(new).items():
                getattr(held, name).copy_(value)
        self.scale.copy_(scale)

    def apart(self, work: Callable) -> tuple[Tensor, ...]:
        """The work itself, on another stream than the usual one, as a recording will be."""
        if self.side is None:
            return work(self.batches, self.scale)
        here = torch.cuda.current_stream(self.device)
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            result = work(self.batches, self.scale)
        here.wait_stream(self.side)
        for t in result:
            t.record_stream(here)
        return result

    def record(self, work: Callable) -> None:
        def again() -> None:
            self.result = work(self.batches, self.scale)
        if self.side is None:
            self.replay = again
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the loader's thread and the saver's do as they like
            again()
        self.replay = graph.replay


def tensors(batch) -> dict[str, Tensor]:
    return {k: v for k, v in vars(batch).items() if isinstance(v, Tensor)}
