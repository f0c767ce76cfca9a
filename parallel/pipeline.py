"""Runs a schedule: one interpreter for every list of ops. Accumulating gradients is the list of a one-stage pipeline.

An activation lives from its F to its send; after that only its place in the graph is kept, not its bytes (the idea of
Megatron-LM's deallocation). Transfers between two computes are posted together; a receive is waited for when its buffer
is used, a send when the step ends. The sender's order is the receiver's (parallel/schedule.py), so messages need no names.
"""
import contextlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from parallel import comm
from parallel.mesh import Mesh
from parallel.offload import Away
from parallel.schedule import Op, Schedule, lower

COMM = ("SF", "RF", "SB", "RB")


class Later:
    """The weight gradients that an I left behind, by microbatch, until their W (kernels/grad.py puts them here)."""

    def __init__(self) -> None:
        self.open: bool = False  # inside an I
        self.at: int = 0
        self.jobs: dict[int, list] = {}

    def put(self, weight: Tensor, compute) -> None:
        self.jobs.setdefault(self.at, []).append((weight, compute))

    @torch.no_grad()
    def run(self, mb: int) -> None:
        for weight, compute in self.jobs.pop(mb, []):
            compute(weight.main_grad)  # looked up now: ZeRO-2 may have sent the buffer of the I away


@dataclass
class Flight:
    """What a step holds: by (stage, microbatch), inputs and what came of them; buffers with the transfers they wait for."""
    inputs: dict = field(default_factory=dict)  # activations that arrived: a Tensor, or (buffer, work)
    grads: dict = field(default_factory=dict)  # gradients of outputs that arrived
    leaves: dict = field(default_factory=dict)  # inputs as leaves of the graph, until their gradient is taken
    outputs: dict = field(default_factory=dict)  # outputs to send
    edges: dict = field(default_factory=dict)  # where the backward of an output begins
    sends: list = field(default_factory=list)


class Pipeline:
    """stages: {number: model.Stage} of this rank; later: {number: its deferred weight gradients}."""

    def __init__(self, mesh: Mesh, schedule: Schedule, stages: dict, later: dict[int, Later], hidden: int, vocab: int,
                 dtype: torch.dtype, cut: int, away: Away | None = None) -> None:
        self.mesh, self.schedule, self.stages, self.later = mesh, schedule, stages, later
        self.hidden, self.vocab, self.dtype, self.cut = hidden, vocab, dtype, cut  # cut: into how many parts sp divides the sequence
        self.away = away  # where activations wait for their backward; None: on the device

    def run(self, ops: list[Op], batches: list, scale) -> Tensor:
        """Run this rank's ops over the step's microbatches -> the loss (times scale) summed over all tokens, on every rank."""
        flight, left = Flight(), {s: sum(o.kind in "BW" and o.stage == s for o in ops) for s in self.stages}
        total = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=batches[0].tokens.device)
        at, then = 0, follows(ops)
        while at < len(ops):
            op = ops[at]
            if op.kind in COMM:
                last = at
                while last < len(ops) and ops[last].kind in COMM:
                    last += 1
                self.transfer(ops[at:last], flight, batches)
                at = last
                continue
            if op.kind == "F":
                self.stages[op.stage].zero.turning = then[at] in ("B", "I")
                loss = self.forward(op, flight, batches[op.mb], scale)
                total += 0 if loss is None else loss
            elif op.kind in "BI":
                left[op.stage] -= op.kind == "B"
                self.backward(op, flight, final=op.kind == "B" and left[op.stage] == 0)
            else:
                left[op.stage] -= 1
                self.weights(op, final=left[op.stage] == 0)
            at += 1
        for work in flight.sends:
            work.wait()
        for stage in self.stages.values():
            stage.zero.turning = False
        return comm.sum_(comm.sum_(total, self.mesh.loss), self.mesh.pp)

    @torch.no_grad()
    def evaluate(self, batches: list) -> Tensor:
        """The summed loss over all tokens of these microbatches, on every rank: forwards alone, stage after stage."""
        place = self.schedule.place
        order = [[Op("F", s, i) for i in range(len(batches)) for s in range(len(place)) if place[s] == r] for r in range(self.mesh.pp.size)]
        return self.run(lower(order, place)[self.mesh.pp.index], batches, 1.0)

    @torch.no_grad()
    def logits(self, tokens: Tensor, positions: Tensor, cache, at: int) -> Tensor:
        """Logits [vocab] of the token at place `at` of tokens [1, s], on every rank: one pass through all stages. cache:
        keys and values of earlier tokens (None: none kept)."""
        x, last = tokens, self.schedule.n_stages - 1
        for number in range(self.schedule.n_stages):
            here, stage = self.schedule.place[number], self.stages.get(number)
            if number and self.schedule.place[number - 1] != here:
                x = self.hand_over(x, tokens, self.schedule.place[number - 1], here)
            if stage is not None:
                x = stage.hidden(x, positions, cache=cache)
                if number == last:
                    x = stage.head_logits(x, at)
        if cache is not None:
            cache.length += tokens.shape[1]
        out = x if last in self.stages else torch.empty(self.vocab, dtype=torch.promote_types(self.dtype, torch.float32), device=tokens.device)
        return comm.broadcast(out.contiguous(), self.mesh.pp, self.schedule.place[last])

    def hand_over(self, x: Tensor, tokens: Tensor, source: int, target: int) -> Tensor:
        """A hidden state from one pipeline rank to another, at once."""
        if self.mesh.pp.index == source:
            works = comm.exchange([(x, target)], [], self.mesh.pp)
        elif self.mesh.pp.index == target:
            x = torch.empty(*tokens.shape[:1], tokens.shape[1] // self.cut, self.hidden, dtype=self.dtype, device=tokens.device)
            works = comm.exchange([], [(x, source)], self.mesh.pp)
        else:
            return x
        for work in works:
            work.wait()
        return x

    def forward(self, op: Op, flight: Flight, batch, scale) -> Tensor | None:
        key, stage = (op.stage, op.mb), self.stages[op.stage]
        x = batch.tokens
        if op.stage > 0:
            x = arrived(flight.inputs.pop(key))
            if torch.is_grad_enabled():
                flight.leaves[key] = x.requires_grad_()
        with self.away.keeping() if self.away and torch.is_grad_enabled() else contextlib.nullcontext():
            y = stage(x, batch, scale)
        if y.requires_grad:
            flight.edges[key] = get_gradient_edge(y)
        if op.stage == self.schedule.n_stages - 1:
            return y.detach()
        if op.stage + 1 in self.stages:  # the bottom of a V: the next stage is on this rank
            flight.inputs[op.stage + 1, op.mb] = y.detach()
        else:
            flight.outputs[key] = y.detach()
        return None

    def backward(self, op: Op, flight: Flight, final: bool) -> None:
        key, stage, later = (op.stage, op.mb), self.stages[op.stage], self.later[op.stage]
        dy = arrived(flight.grads.pop(key)) if op.stage < self.schedule.n_stages - 1 else None
        later.open, later.at = op.kind == "I", op.mb
        stage.zero.split, stage.zero.final = later.open, final
        torch.autograd.backward(flight.edges.pop(key), dy)
        later.open = False
        if stage.embed is not None and op.kind == "B":
            stage.zero.end(0)  # the embedding has no input whose gradient would end it
        if op.stage > 0:
            dx = flight.leaves.pop(key).grad
            if op.stage - 1 in self.stages:
                flight.grads[op.stage - 1, op.mb] = dx
            else:
                flight.outputs[key] = dx

    def weights(self, op: Op, final: bool) -> None:
        stage = self.stages[op.stage]
        stage.zero.final = final
        stage.zero.hold()
        self.later[op.stage].run(op.mb)
        for part in reversed(range(len(stage.zero.parts))):
            stage.zero.end(part)

    def transfer(self, ops: list[Op], flight: Flight, batches: list) -> None:
        """Post the transfers between two computes."""
        place = self.schedule.place
        sends, receives, waiting = [], [], []
        for op in ops:
            way = 1 if op.kind in ("SF", "RB") else -1  # the neighbour is the next stage, or the one before
            peer = place[op.stage + way]
            if op.kind[0] == "S":
                sends.append((flight.outputs.pop((op.stage, op.mb)), peer))
            else:
                b, s = batches[op.mb].tokens.shape
                buffer = torch.empty(b, s // self.cut, self.hidden, dtype=self.dtype, device=batches[op.mb].tokens.device)
                receives.append((buffer, peer))
                waiting.append((flight.inputs if op.kind == "RF" else flight.grads, (op.stage, op.mb), buffer))
        works = comm.exchange(sends, receives, self.mesh.pp)
        flight.sends += works[:len(sends)]
        for (table, key, buffer), work in zip(waiting, works[len(sends):]):
            table[key] = (buffer, work)


def follows(ops: list[Op]) -> list[str]:
    """The kind of the next op of the same stage, for each op; "" after its last."""
    last: dict[int, str] = {}
    out = []
    for op in reversed(ops):
        out.append(last.get(op.stage, ""))
        if op.kind not in COMM:
            last[op.stage] = op.kind
    return out[::-1]


def arrived(x) -> Tensor:
    """A tensor that was handed over on this rank, or a buffer once its transfer is done."""
    if isinstance(x, tuple):
        x[1].wait()
        return x[0]
    return x
