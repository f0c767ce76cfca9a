"""Capture the forward and backward of a step as one CUDA graph (train.cuda_graphs).

This helps when the host cannot keep up with the GPU: small models, short sequences.

A CUDA graph keeps addresses, not values. Weights and gradients have fixed addresses
(parallel/sharding/bucket.py). Values that change from step to step are copied into static tensors before each
replay: the batches, their step number (for dropout) and the loss scale. Gradient norm, clipping and the
optimizer update stay outside of the graph, so the learning rate and the step number remain host numbers. The
same kernels run in the same order, so results are bitwise identical.

An MoE model routes a different number of rows to each expert in each step. The row counts are static tensors
that its kernels read (kernels/grouped_gemm.py), and its buffers are sized for any split.

A batch-size ramp (train.ramp) needs one graph per number of microbatches. Only one is kept at a time: a ramp
never returns to an earlier number, so the memory of the old graph is reused for the next one.
`cuda_graph_rules` in config/reading/rules.py rejects configs that cannot be captured.

A CPU cannot capture. There a replay reruns the pipeline over the same static tensors; the tests use this, and
for MoE models a recording of operations and launches (tests/capture.py).
"""
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parallel.microbatch import Microbatch
from parallel.pipeline.executor import Pipeline
from parallel.pipeline.schedule import Op
from parallel.sharding.bucket import Bucket
from parallel.sharding.spec import ShardedParameter

# eager steps before the capture: kernels are compiled, libraries pick theirs and allocate workspaces
WARM_UP_STEPS = 2


class RecordedPipeline:
    """Run a pipeline like Pipeline.run, first eagerly and then by replaying a captured graph.

    pipeline: this rank's pipeline, whose ops are the same in every step. buckets: the buckets of its weights.
    Their quantized copies are dropped before each step, so that the graph starts by quantizing them.
    """

    def __init__(self, pipeline: Pipeline, device: torch.device, buckets: Sequence[Bucket] = ()) -> None:
        self.pipeline = pipeline
        self.buckets = buckets
        self.device = device
        self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.steps_run = 0  # with this number of microbatches
        self.replay: Callable[[], object] | None = None  # None until the graph is captured
        self.written: list[ShardedParameter] = []  # whose gradients the graph writes

        # static tensors of the graph: the inputs and the loss
        self.ops: list[Op] = []
        self.batches: list[Microbatch] = []
        self.step_numbers: list[Tensor] = []  # one int64 [] per batch
        self.scale = torch.ones(())
        self.loss: Tensor | None = None

    def run(self, ops: list[Op], microbatches: Sequence[Microbatch], scale: Tensor) -> Tensor:
        """Return the loss of Pipeline.run, as a copy that the next replay does not overwrite.

        Raises ValueError if a microbatch has another shape than the captured one.
        """
        for bucket in self.buckets:
            bucket.weights.drop_quantized()
        if len(microbatches) != len(self.batches):
            self.allocate_inputs(ops, microbatches, scale)
        self.copy_inputs(microbatches, scale)

        self.steps_run += 1
        if self.steps_run <= WARM_UP_STEPS:
            return self.run_on_side_stream()
        is_first = self.replay is None
        if self.replay is None:
            self.replay = self.record()
        self.replay()
        assert self.loss is not None  # set by the replay

        # a replay writes the gradients, and sets no mark that they are written
        if is_first:
            params = [slot.param for bucket in self.buckets for slot in bucket.slots]
            self.written = [param for param in params if param.grad_is_written]
        for param in self.written:
            param.grad_is_written = True
        return self.loss.clone()

    def allocate_inputs(self, ops: list[Op], microbatches: Sequence[Microbatch], scale: Tensor) -> None:
        """Drop the graph and allocate static inputs with the number and shapes of these microbatches."""
        self.steps_run = 0
        self.replay = None
        self.loss = None
        self.ops = ops
        self.scale = scale.clone()
        self.step_numbers = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in microbatches]
        self.batches = []
        for batch, step_number in zip(microbatches, self.step_numbers):
            copies = {name: tensor.clone() for name, tensor in batch.tensors().items()}
            # the graph is valid for any number of documents
            self.batches.append(replace(batch, step=step_number, document_counts=None, **copies))

    def copy_inputs(self, microbatches: Sequence[Microbatch], scale: Tensor) -> None:
        """Copy this step's values into the static inputs. Raises ValueError if a shape differs."""
        for held, step_number, batch in zip(self.batches, self.step_numbers, microbatches):
            new_shapes = shapes(batch)
            held_shapes = shapes(held)
            if new_shapes != held_shapes:
                raise ValueError(f"train.cuda_graphs: a step of {new_shapes}, "
                                 f"and the recorded one is of {held_shapes}")
            step_number.fill_(batch.step)
            for name, tensor in batch.tensors().items():
                getattr(held, name).copy_(tensor)
        self.scale.copy_(scale)

    def run_pipeline(self) -> Tensor:
        """Run the part of a step that is captured."""
        return self.pipeline.run(self.ops, self.batches, self.scale)

    def run_on_side_stream(self) -> Tensor:
        """Run the pipeline on a side stream, as the capture will; on a CPU just run it."""
        if self.side_stream is None:
            return self.run_pipeline()
        current = torch.cuda.current_stream(self.device)
        self.side_stream.wait_stream(current)
        with torch.cuda.stream(self.side_stream):
            loss = self.run_pipeline()
        current.wait_stream(self.side_stream)
        loss.record_stream(current)
        return loss

    def record(self) -> Callable[[], object]:
        """Capture the pipeline. Returns a function that replays it on the static inputs into `loss`."""
        def run() -> None:
            self.loss = self.run_pipeline()

        if self.side_stream is None:
            return run
        graph = torch.cuda.CUDAGraph()
        # thread_local: loader and saver threads may call CUDA during the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        return graph.replay


def shapes(batch: Microbatch) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors except `step`, which is a tensor only in the graph."""
    return {name: tuple(tensor.shape) for name, tensor in batch.tensors().items() if name != "step"}
