"""A step's forward and backward as one CUDA graph (train.cuda_graphs): recorded once, launched as a whole.

This helps where the host is slower than its GPU: a small model, a short sequence.

A CUDA graph keeps addresses, not values. Weights and gradients have fixed addresses
(parallel/sharding/bucket.py). What changes from step to step is copied into tensors of the recording before
each replay: the batches, their step number (for dropout) and the loss scale. Gradient norm, clipping and the
optimizer's update follow outside of the graph, so the learning rate and the step number stay numbers of the
host. The same kernels run in the same order, so the results have the same bits.

A batch-size ramp (train.ramp) needs one recording for each number of microbatches. Only one is kept at a
time: a ramp never returns to an earlier number, so the memory of the old recording is free for the next one.
`cuda_graph_rules` in config/rules.py refuses configs that a recording cannot hold.

A CPU cannot record. There a replay calls the work again, over the same held tensors; the tests use this.
"""
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from parallel.microbatch import Microbatch

# calls before the recording: kernels are compiled, libraries choose theirs and allocate their workspaces
WARM_UP_CALLS = 2

ForwardBackward = Callable[[list[Microbatch], Tensor], Tensor]  # (batches, scale of the loss) -> loss


class CudaGraphStep:
    """Call graph(work, batches, scale) instead of work(batches, scale), with the same work each time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.calls = 0  # with this number of microbatches
        self.replay: Callable[[], object] | None = None  # None until the recording is made

        # tensors of the recording: inputs at fixed addresses, and its loss
        self.batches: list[Microbatch] = []
        self.steps: list[Tensor] = []  # the step number of each batch, int64 []
        self.scale = torch.ones(())
        self.loss: Tensor | None = None

    def __call__(self, work: ForwardBackward, batches: list[Microbatch], scale: Tensor) -> Tensor:
        """Returns the loss of work(batches, scale), as a copy that the next replay does not overwrite.

        Raises ValueError if a batch has another shape than in the recording.
        """
        if len(batches) != len(self.batches):
            self.allocate_inputs(batches, scale)
        self.copy_inputs(batches, scale)

        self.calls += 1
        if self.calls <= WARM_UP_CALLS:
            return self.run_on_side_stream(work)
        if self.replay is None:
            self.replay = self.record(work)
        self.replay()
        assert self.loss is not None  # the replay has set it
        return self.loss.clone()

    def allocate_inputs(self, batches: list[Microbatch], scale: Tensor) -> None:
        """Drops the recording and allocates inputs of these batches' number and shapes."""
        self.calls = 0
        self.replay = None
        self.loss = None
        self.scale = scale.clone()
        self.steps = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in batches]
        self.batches = []
        for batch, step in zip(batches, self.steps):
            copies = {name: tensor.clone() for name, tensor in tensors(batch).items()}
            self.batches.append(replace(batch, step=step, **copies))

    def copy_inputs(self, batches: list[Microbatch], scale: Tensor) -> None:
        """Copies this step's values into the inputs. Raises ValueError if a shape differs from theirs."""
        for held, step, batch in zip(self.batches, self.steps, batches):
            new_shapes = shapes(batch)
            held_shapes = shapes(held)
            if new_shapes != held_shapes:
                raise ValueError(f"train.cuda_graphs: a step of {new_shapes}, "
                                 f"and the recorded one is of {held_shapes}")
            step.fill_(batch.step)
            for name, tensor in tensors(batch).items():
                getattr(held, name).copy_(tensor)
        self.scale.copy_(scale)

    def run_on_side_stream(self, work: ForwardBackward) -> Tensor:
        """Runs the work itself, on a stream of its own as the recording will. On a CPU: just runs it."""
        if self.side_stream is None:
            return work(self.batches, self.scale)
        current = torch.cuda.current_stream(self.device)
        self.side_stream.wait_stream(current)
        with torch.cuda.stream(self.side_stream):
            loss = work(self.batches, self.scale)
        current.wait_stream(self.side_stream)
        loss.record_stream(current)
        return loss

    def record(self, work: ForwardBackward) -> Callable[[], object]:
        """Records the work. Returns the function that repeats it over the inputs, into the same `loss`."""
        def run() -> None:
            self.loss = work(self.batches, self.scale)

        if self.side_stream is None:
            return run
        graph = torch.cuda.CUDAGraph()
        # thread_local: the threads of the loader and of the saver may call CUDA while this one records
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        return graph.replay


def tensors(batch: Microbatch) -> dict[str, Tensor]:
    """The batch's fields that are tensors, by name."""
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def shapes(batch: Microbatch) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor but `step`, which is a tensor in the recording alone."""
    return {name: tuple(tensor.shape) for name, tensor in tensors(batch).items() if name != "step"}
