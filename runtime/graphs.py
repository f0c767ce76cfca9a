"""The pipeline's part of a step as one CUDA graph (train.cuda_graphs): recorded once, launched as a whole.

This helps where the host is slower than its GPU: a small model, a short sequence.

A CUDA graph keeps addresses, not values. Weights and gradients have fixed addresses
(parallel/sharding/bucket.py). What changes from step to step is copied into tensors of the recording before
each replay: the batches, their step number (for dropout) and the loss scale. Gradient norm, clipping and the
optimizer's update follow outside of the graph, so the learning rate and the step number stay numbers of the
host. The same kernels run in the same order, so the results have the same bits.

A mixture of experts divides its rows again in each step. Its numbers of rows are tensors of the recording,
which its kernels read (kernels/grouped_gemm.py); what it allocates is as large as any division needs.

A batch-size ramp (train.ramp) needs one recording for each number of microbatches. Only one is kept at a
time: a ramp never returns to an earlier number, so the memory of the old recording is free for the next one.
`cuda_graph_rules` in config/reading/rules.py refuses configs that a recording cannot hold.

A CPU cannot record. There a replay runs the pipeline again, over the same held tensors; the tests use this,
and for mixtures a recording of operations and launches (tests/capture.py).
"""
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parallel.microbatch import Microbatch
from parallel.pipeline.executor import Pipeline
from parallel.pipeline.schedule import Op
from parallel.sharding.bucket import Bucket

# steps before the recording: kernels are compiled, libraries choose theirs and allocate their workspaces
WARM_UP_STEPS = 2


class RecordedPipeline:
    """Runs a pipeline as Pipeline.run does: first itself, then by a recording of that.

    pipeline: of one rank, so a step has the same ops each time. buckets: of its weights, which a recording
    quantizes itself: what it repeats begins with that.
    """

    def __init__(self, pipeline: Pipeline, device: torch.device, buckets: Sequence[Bucket] = ()) -> None:
        self.pipeline = pipeline
        self.buckets = buckets
        self.device = device
        self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.steps_run = 0  # with this number of microbatches
        self.replay: Callable[[], object] | None = None  # None until the recording is made

        # what is recorded, tensors at fixed addresses: the inputs, and the loss
        self.ops: list[Op] = []
        self.batches: list[Microbatch] = []
        self.step_numbers: list[Tensor] = []  # of each batch, int64 []
        self.scale = torch.ones(())
        self.loss: Tensor | None = None

    def run(self, ops: list[Op], microbatches: Sequence[Microbatch], scale: Tensor) -> Tensor:
        """Returns the loss of Pipeline.run, as a copy that the next replay does not overwrite.

        Raises ValueError if a microbatch has another shape than in the recording.
        """
        for bucket in self.buckets:
            bucket.weights.drop_quantized()
        if len(microbatches) != len(self.batches):
            self.allocate_inputs(ops, microbatches, scale)
        self.copy_inputs(microbatches, scale)

        self.steps_run += 1
        if self.steps_run <= WARM_UP_STEPS:
            return self.run_on_side_stream()
        if self.replay is None:
            self.replay = self.record()
        self.replay()
        assert self.loss is not None  # the replay has set it
        return self.loss.clone()

    def allocate_inputs(self, ops: list[Op], microbatches: Sequence[Microbatch], scale: Tensor) -> None:
        """Drops the recording and allocates inputs of the microbatches' number and shapes."""
        self.steps_run = 0
        self.replay = None
        self.loss = None
        self.ops = ops
        self.scale = scale.clone()
        self.step_numbers = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in microbatches]
        self.batches = []
        for batch, step_number in zip(microbatches, self.step_numbers):
            copies = {name: tensor.clone() for name, tensor in batch.tensors().items()}
            # a recording holds for any number of documents
            self.batches.append(replace(batch, step=step_number, document_counts=None, **copies))

    def copy_inputs(self, microbatches: Sequence[Microbatch], scale: Tensor) -> None:
        """Copies this step's values into the inputs. Raises ValueError if a shape differs from theirs."""
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
        """The part of a step that is recorded."""
        return self.pipeline.run(self.ops, self.batches, self.scale)

    def run_on_side_stream(self) -> Tensor:
        """Runs the pipeline on a stream of its own, as the recording will. On a CPU: just runs it."""
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
        """Records the pipeline. Returns what repeats it over the inputs, into the same `loss`."""
        def run() -> None:
            self.loss = self.run_pipeline()

        if self.side_stream is None:
            return run
        graph = torch.cuda.CUDAGraph()
        # thread_local: the threads of the loader and of the saver may call CUDA while this one records
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        return graph.replay


def shapes(batch: Microbatch) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor but `step`, which is a tensor in the recording alone."""
    return {name: tuple(tensor.shape) for name, tensor in batch.tensors().items() if name != "step"}
