"""Pipeline executor: run this rank's ops of a schedule.

Without a pipeline it is gradient accumulation, the last class of this file.

An activation lives from its forward until it is sent. After that only its node in the autograd graph is kept,
without its data (like Megatron-LM's deallocation of pipeline outputs). Transfers to higher and to lower ranks
use separate communicators, and each transfer is posted alone: NCCL matches what is posted together with what
the peer posts together, and those would not be the same transfers. A receive is waited for when its buffer is
used, a send when it is known to have finished. Both ends list the transfers of a communicator in the same
order (add_transfers in schedule.py), so messages need no tags.
"""
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kernels.grad import AccumulatingWeight, Compute, write_grad
from parallel.microbatch import Microbatch
from parallel.offload import ActivationOffload
from parallel.pipeline.schedule import (
    COMPUTE_KINDS,
    END_OF_SEND,
    Op,
    Schedule,
    add_transfers,
    evaluation_order,
    goes_down,
)
from parallel.sharding.zero import ZeroHooks
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.comm import Transfer

OpKey = tuple[int, int]  # (stage, microbatch)
Arrival = Tensor | tuple[Tensor, Transfer]  # local, or a buffer and the transfer that fills it

# A stage's forward (model/transformer.py: PipelineStage): (token ids or hidden states, microbatch, loss
# scale) -> hidden states for the next stage, or the summed loss from the last stage.
StageForward = Callable[[Tensor, Microbatch, Tensor | float], Tensor]


@dataclass(frozen=True)
class HiddenShape:
    """Shape of the hidden states between stages: [b, s / sequence_shards, width], where widths is indexed by
    the stage that reads them."""
    widths: tuple[int, ...]
    dtype: torch.dtype
    sequence_shards: int  # the tp size under sequence parallelism, else 1

    def empty_like(self, tokens: Tensor, stage: int) -> Tensor:
        """Return a buffer for a stage's input for tokens [b, s]."""
        b, s = tokens.shape
        shape = (b, s // self.sequence_shards, self.widths[stage])
        return torch.empty(shape, dtype=self.dtype, device=tokens.device)


class WeightGradStore:
    """Weight gradients of a stage that an I defers to its W, by microbatch.

    kernels/grad.py puts them here.
    """

    def __init__(self) -> None:
        self.deferring = False  # true during an I
        self.microbatch = 0  # whose I runs
        self.pending: dict[int, list[tuple[AccumulatingWeight, Compute]]] = {}

    def put(self, weight: AccumulatingWeight, compute: Compute) -> None:
        self.pending.setdefault(self.microbatch, []).append((weight, compute))

    @torch.no_grad()
    def compute(self, microbatch: int) -> None:
        """Compute the deferred gradients of a microbatch."""
        for weight, compute in self.pending.pop(microbatch, []):
            write_grad(weight, compute)  # its current buffer: ZeRO-2 and 3 may have freed the one of the I


@dataclass
class StepState:
    """Tensors that a rank holds during a step, by (stage, microbatch)."""
    inputs: dict[OpKey, Arrival] = field(default_factory=dict)  # hidden states from the stage before
    output_grads: dict[OpKey, Arrival] = field(default_factory=dict)  # gradients from the stage after
    leaves: dict[OpKey, Tensor] = field(default_factory=dict)  # inputs, until their gradients are computed
    to_send: dict[OpKey, Tensor] = field(default_factory=dict)  # outputs and input gradients for other ranks
    graph_outputs: dict[OpKey, GradientEdge] = field(default_factory=dict)  # where a backward starts
    sends: dict[Op, Transfer] = field(default_factory=dict)  # in flight, by the op that waits for them


class Pipeline:
    """The stages of this rank and their execution.

    stages, zero_hooks and weight_grad_stores are indexed by stage. With `offload`, activations of
    forwards are kept in host memory; with None they stay on the device.
    """
    OP_METHODS = ("forward", "backward", "compute_weight_grads")  # each runs an op, its first argument

    def __init__(
        self,
        mesh: Mesh,
        schedule: Schedule,
        *,
        stages: Mapping[int, StageForward],
        zero_hooks: Mapping[int, ZeroHooks],
        weight_grad_stores: Mapping[int, WeightGradStore],
        hidden_shape: HiddenShape,
        offload: ActivationOffload | None = None,
    ) -> None:
        self.mesh = mesh
        self.schedule = schedule
        self.stages = stages
        self.zero_hooks = zero_hooks
        self.weight_grad_stores = weight_grad_stores
        self.hidden_shape = hidden_shape
        self.offload = offload
        self.loss_dtype = torch.promote_types(hidden_shape.dtype, torch.float32)
        self.loss_terms: Tensor | None = None  # sums of the step, reduced with the loss (model/distill.py)

    # ---- a step --------------------------------------------------------------------------------------------

    def run(self, ops: list[Op], microbatches: Sequence[Microbatch], scale: Tensor | float) -> Tensor:
        """Run this rank's ops over the microbatches of a step.

        Return the loss, times scale, summed over all tokens: a scalar, the same on every rank. This costs one
        scalar all-reduce over dp_cp and one over pp. Each transfer between stages carries the hidden states
        of a microbatch, or their gradient.
        """
        state = StepState()
        total = self.no_loss_yet(microbatches)
        next_kinds = next_compute_kinds(ops)
        backwards_left = {stage: count_backwards(ops, stage) for stage in self.stages}

        for index, op in enumerate(ops):
            if op.kind in END_OF_SEND.values():
                state.sends.pop(op).wait()
                continue
            if op.kind not in COMPUTE_KINDS:
                self.start_transfer(op, state, microbatches[op.microbatch])
                continue

            zero = self.zero_hooks[op.stage]
            if op.kind == "F":
                zero.backward_follows = next_kinds[index] in ("B", "I")
                loss = self.forward(op, state, microbatches[op.microbatch], scale)
                if loss is not None:
                    total += loss
            else:
                backwards_left[op.stage] -= op.kind in ("B", "W")
                zero.is_last_microbatch = op.kind in ("B", "W") and backwards_left[op.stage] == 0
                if op.kind == "W":
                    self.compute_weight_grads(op)
                else:
                    self.backward(op, state)

        for op in list(state.sends):
            state.sends.pop(op).wait()
        for zero in self.zero_hooks.values():
            zero.backward_follows = False

        return self.sum_over_ranks(total)

    def no_loss_yet(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return the sum of the losses before the first one. Its terms restart, too."""
        if self.loss_terms is not None:
            self.loss_terms.zero_()
        return torch.zeros((), dtype=self.loss_dtype, device=microbatches[0].tokens.device)

    def sum_over_ranks(self, total: Tensor) -> Tensor:
        """Return the loss summed over dp_cp and pp, with its terms in the same messages."""
        sums = total if self.loss_terms is None else torch.cat((total[None], self.loss_terms))
        for group in (self.mesh.dp_cp, self.mesh.pp):
            comm.all_reduce_sum(sums, group)
        if self.loss_terms is None:
            return sums
        self.loss_terms.copy_(sums[1:])
        return sums[0]

    def forward(
        self, op: Op, state: StepState, microbatch: Microbatch, scale: Tensor | float
    ) -> Tensor | None:
        """Run an F; return the loss on the last stage, None on the others."""
        key = (op.stage, op.microbatch)
        x = microbatch.tokens
        if op.stage > 0:
            x = wait_arrival(state.inputs.pop(key))
            if torch.is_grad_enabled():
                state.leaves[key] = x.requires_grad_()

        with self.saving_activations():
            y = self.stages[op.stage](x, microbatch, scale)

        if y.requires_grad:
            state.graph_outputs[key] = get_gradient_edge(y)
        if op.stage == self.schedule.n_stages - 1:
            return y.detach()
        if op.stage + 1 in self.stages:  # on this rank too: the bottom of a V, or a pipeline of one rank
            state.inputs[op.stage + 1, op.microbatch] = y.detach()
        else:
            state.to_send[key] = y.detach()
        return None

    def saving_activations(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for a forward, which offloads its activations if there is an `offload`."""
        if self.offload is None or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self.offload.saving_to_host()

    def backward(self, op: Op, state: StepState) -> None:
        """Run a B, or an I, which skips the weight gradients."""
        key = (op.stage, op.microbatch)
        is_split = op.kind == "I"
        zero = self.zero_hooks[op.stage]
        store = self.weight_grad_stores[op.stage]

        # gradient of the output; the last stage starts from its loss
        output_grad = None
        if op.stage < self.schedule.n_stages - 1:
            output_grad = wait_arrival(state.output_grads.pop(key))

        store.deferring = is_split
        store.microbatch = op.microbatch
        zero.input_grads_only = is_split
        output = state.graph_outputs.pop(key, None)
        if output is not None:  # something in the stage trains
            torch.autograd.backward(output, output_grad)
        store.deferring = False
        if not is_split:
            zero.end_lowest_backward()

        # gradient of the input, for the previous stage
        if op.stage == 0:
            return
        input_grad = state.leaves.pop(key).grad
        if input_grad is None:
            raise RuntimeError(f"the backward of stage {op.stage} made no gradient of its input")
        if op.stage - 1 in self.stages:
            state.output_grads[op.stage - 1, op.microbatch] = input_grad
        else:
            state.to_send[key] = input_grad

    def compute_weight_grads(self, op: Op) -> None:
        """Run a W: compute what the I of the same microbatch deferred."""
        zero = self.zero_hooks[op.stage]
        zero.begin_weight_grads()
        self.weight_grad_stores[op.stage].compute(op.microbatch)
        zero.end_weight_grads()

    def start_transfer(self, op: Op, state: StepState, microbatch: Microbatch) -> None:
        """Post a transfer of hidden states or of their gradient."""
        is_activation = op.kind in ("SF", "RF")
        group = self.mesh.pp if goes_down(op, self.schedule.rank_of_stage) else self.mesh.pp_up
        other_stage = op.stage + 1 if op.kind in ("SF", "RB") else op.stage - 1
        other_rank = self.schedule.rank_of_stage[other_stage]

        key = (op.stage, op.microbatch)
        if op.kind in ("SF", "SB"):
            output = state.to_send.pop(key)
            (send,) = comm.start_transfers([(output, other_rank)], [], group)
            state.sends[op._replace(kind=END_OF_SEND[op.kind])] = send
        else:
            reader = op.stage if is_activation else op.stage + 1
            buffer = self.hidden_shape.empty_like(microbatch.tokens, reader)
            (transfer,) = comm.start_transfers([], [(buffer, other_rank)], group)
            arrivals = state.inputs if is_activation else state.output_grads
            arrivals[key] = (buffer, transfer)

    # ---- without gradients ---------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return the loss summed over all tokens of these microbatches: a scalar, the same on every rank.

        Runs forwards only, with the transfers and all-reduces of `run`.
        """
        rank_of_stage = self.schedule.rank_of_stage
        order = evaluation_order(rank_of_stage, len(microbatches))
        ops = add_transfers(order, rank_of_stage)[self.mesh.pp.index]
        return self.run(ops, microbatches, 1.0)

    def receive_hidden(self, x: Tensor, tokens: Tensor, stage: int) -> Tensor:
        """Return the input of a stage in a pass through all stages, one after the other.

        Every pipeline rank calls it; the hidden states are sent at most once. x is the output of the previous
        stage, on its rank; tokens is [b, s]. Ranks that do not own the stage get x back.
        """
        if stage == 0:
            return x
        source = self.schedule.rank_of_stage[stage - 1]
        target = self.schedule.rank_of_stage[stage]
        if source == target:
            return x
        if self.mesh.pp.index == source:
            transfers = comm.start_transfers([(x, target)], [], self.mesh.pp)
        elif self.mesh.pp.index == target:
            x = self.hidden_shape.empty_like(tokens, stage)
            transfers = comm.start_transfers([], [(x, source)], self.mesh.pp)
        else:
            return x
        for transfer in transfers:
            transfer.wait()
        return x


class GradientAccumulation(Pipeline):
    """A model in one stage: a backward follows its forward at once, from the loss down to the tokens."""
    OP_METHODS = ("forward_from_tokens", "backward_from_loss")

    def run(self, ops: list[Op], microbatches: Sequence[Microbatch], scale: Tensor | float) -> Tensor:
        """Run the ops: a forward of each microbatch, followed by its backward in training.

        Return the loss as Pipeline.run does.
        """
        zero = self.zero_hooks[0]
        loss = total = self.no_loss_yet(microbatches)
        for op in ops:
            if op.kind == "F":
                loss = self.forward_from_tokens(op, microbatches[op.microbatch], scale)
                total += loss.detach()
            else:
                zero.is_last_microbatch = op == ops[-1]
                self.backward_from_loss(op, loss)
        zero.backward_follows = False
        return self.sum_over_ranks(total)

    def forward_from_tokens(self, op: Op, microbatch: Microbatch, scale: Tensor | float) -> Tensor:
        """Run an F; return the loss."""
        self.zero_hooks[0].backward_follows = torch.is_grad_enabled()
        with self.saving_activations():
            return self.stages[0](microbatch.tokens, microbatch, scale)

    def backward_from_loss(self, op: Op, loss: Tensor) -> None:
        """Run a B."""
        loss.backward()
        self.zero_hooks[0].end_lowest_backward()


def count_backwards(ops: list[Op], stage: int) -> int:
    """Return the number of ops of a stage that complete the backward of a microbatch."""
    return sum(op.kind in ("B", "W") and op.stage == stage for op in ops)


def next_compute_kinds(ops: list[Op]) -> list[str]:
    """Return for each op the kind of the same stage's next computation; "" after its last."""
    next_kind: dict[int, str] = {}  # by stage
    results: list[str] = []
    for op in reversed(ops):
        results.append(next_kind.get(op.stage, ""))
        if op.kind in COMPUTE_KINDS:
            next_kind[op.stage] = op.kind
    return results[::-1]


def wait_arrival(arrival: Arrival) -> Tensor:
    """Return the tensor, after its transfer if it was received."""
    if isinstance(arrival, Tensor):
        return arrival
    buffer, transfer = arrival
    transfer.wait()
    return buffer
