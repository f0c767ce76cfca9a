"""Expert parallelism (GShard, arXiv 2006.16668): tokens travel to the ranks that hold their experts, and back.

Rank (i, j) of the group ep x etp holds experts i E/ep ... and of each the j-th part of its inner width. A row (a token for
one of its experts) goes to all etp ranks of that expert, and their partial outputs are added where the token lives: one
all-to-all each way, whatever etp is. Nothing is padded, so what is sent is what was routed, unless `room` asks for static shapes:
then each rank sends every expert so many rows, and no count is exchanged or read on the host. The experts' ranks are folded out
of dp x cp x tp (arXiv 2504.14960); tokens are cut over all of these before they come here, with or without sequence parallelism.

On the wire, a rank, layer and microbatch of t tokens (t = b s / cp / tp, k = top_k; c, g: bytes of compute and fp32 or better):

    counts of rows                     1 all-to-all   ep etp E/ep 8
    forward, backward   tokens         2 each         t k etp d c        dropless; a capacity's drops do not travel
                        probabilities  1 each         t k etp g
Counted where the token lives (what it sends, and what comes back), so that the count does not depend on the routing. Of the shared
experts, all but the last product lies under the exchange there, the last under the one back, and likewise their gradients (model/moe.py).
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.permute import permute, unpermute
from parallel import comm
from parallel.comm import Group, Work


@dataclass(frozen=True)
class Plan:
    """Where rows go. Sent: m rows, by rank, then by expert; came: r rows, sorted by expert once they are here.

    source [m]: the token of each sent row; pair [m]: its (token, choice) as one number; slots [t, k etp], pairs [t k, etp]: the
    other way round (-1: dropped, where not whole); padded: rows without a token are there too, of a token t of zeros;
    order, back [r]: arrival -> by expert, and back (None: one rank, as they are).
    sent, came: rows to and from each rank; counts: rows of each expert that is here."""
    group: Group
    source: Tensor
    pair: Tensor
    slots: Tensor
    pairs: Tensor
    whole: bool
    padded: bool
    order: Tensor | None
    back: Tensor | None
    sent: list[int]
    came: list[int]
    counts: list[int]


@torch.no_grad()
def plan(index: Tensor, experts: int, group: Group, etp: int, dropped: bool, room: int | None = None) -> Plan:
    """index [t, k]: each token's experts; -1: dropped, only where `dropped`. One small exchange; reads the counts on the host.
    room: rows for each expert, never more than that in index; none of both."""
    t, k = index.shape
    flat = index.flatten()
    here = experts * etp // group.size
    if room is not None:  # fill up each expert's rows with pairs t k, t k + 1, ... that are no token's
        lacks = room - torch.bincount(flat + 1, minlength=experts + 1)[1:, None]
        filling = torch.where(torch.arange(room, device=flat.device) < lacks, torch.arange(experts, device=flat.device)[:, None], -1)
        flat = torch.cat((flat, filling.flatten()))
    order = flat.argsort(stable=True)  # by expert; dropped ones first
    rows = torch.bincount(flat + 1, minlength=experts + 1)  # [1 + experts]
    if room is not None:
        rows = [len(flat) - experts * room] + [room] * experts  # whatever was routed
    if group.size == 1:
        lost, *counts = rows if room is not None else rows.tolist()
        mine, sent, came = order[lost:], [len(order) - lost], [len(order) - lost]
        arriving = back = None
        copy = torch.zeros_like(mine)
    else:
        if room is not None:
            theirs = torch.full((group.size, here), room, device=flat.device)
            sent, came, counts, lost = [here * room] * group.size, [here * room] * group.size, [group.size * room] * here, rows[0]
        else:
            table = rows[1:].view(-1, 1, here).expand(-1, etp, -1).reshape(group.size, here)  # rows to (rank, expert)
            theirs = comm.all_to_all(table, group)
            (sent, came), counts = torch.stack((table.sum(1), theirs.sum(1))).tolist(), theirs.sum(0).tolist()
            lost = int(rows[0]) if dropped else 0
        blocks = order[lost:].split(sent[::etp])  # the rows of one rank's experts, which all its etp partners get
        mine = torch.cat([block for block in blocks for _ in range(etp)])
        copy = torch.cat([torch.full_like(block, j) for block in blocks for j in range(etp)])
        expert = torch.arange(here, device=flat.device).repeat(group.size).repeat_interleave(theirs.flatten())
        arriving = expert.argsort(stable=True)
        back = torch.empty_like(arriving).scatter_(0, arriving, torch.arange(len(arriving), device=flat.device))
    pairs = flat.new_full((len(flat), etp), -1)
    pairs[mine, copy] = torch.arange(len(mine), device=flat.device)
    slots = pairs[:t * k].view(t, k * etp)
    if room is not None:
        mine, slots, pairs = (mine.clamp(max=t * k), torch.nn.functional.pad(slots, (0, 0, 0, 1), value=-1),
                              torch.nn.functional.pad(pairs[:t * k], (0, 0, 0, 1), value=-1))
    return Plan(group, mine // k, mine, slots, pairs, not dropped and room is None, room is not None, arriving, back, sent, came, counts)


class Dispatch:
    """Tokens on their way: started when made, here after `rows()`. x [t, d], probs [t, k] in fp32 or better."""

    def __init__(self, x: Tensor, probs: Tensor, p: Plan) -> None:
        self.plan = p
        x, probs = (torch.nn.functional.pad(part, (0, 0, 0, 1)) if p.padded else part for part in (x, probs.reshape(-1, 1)))
        parts = permute(x, p.source, p.slots, p.whole), permute(probs, p.pair, p.pairs, p.whole)
        self.travels = [travel(part, p, out=True) for part in parts]

    def rows(self) -> tuple[Tensor, Tensor]:
        """-> rows [r, d] by expert, their probabilities [r]."""
        x, probs = (arrive(*t) for t in self.travels)
        if self.plan.order is not None:
            x, probs = (permute(part, self.plan.order, self.plan.back[:, None]) for part in (x, probs))
        return x, probs[:, 0]


class Combine:
    """Rows [r, d] by expert, already weighted, on their way back: started when made, here after `tokens()`."""

    def __init__(self, rows: Tensor, p: Plan) -> None:
        if p.order is not None:
            rows = permute(rows, p.back, p.order[:, None])
        self.plan, self.travels = p, travel(rows, p, out=False)

    def tokens(self) -> Tensor:
        """-> the sum of each token's rows [t, d]."""
        out = unpermute(arrive(*self.travels), self.plan.source, self.plan.slots, self.plan.whole)
        return out[:-1] if self.plan.padded else out


# ---- an all-to-all in two halves, forward and backward -----------------------------------------------------------------

@dataclass
class Flight:
    """An exchange of rows. out: from tokens to experts."""
    plan: Plan
    out: bool
    work: Work | None = None

    def start(self, x: Tensor, there: bool) -> None:
        p, out = self.plan, self.out == there
        sent, came = (p.sent, p.came) if out else (p.came, p.sent)
        self.work = comm.start_all_to_all(x, sent, came, p.group, count=out)


def travel(x: Tensor, p: Plan, out: bool) -> tuple[Tensor, Flight]:
    """Start an exchange. What lies between it and `arrive` runs meanwhile, in the backward too."""
    flight = Flight(p, out)
    return _Start.apply(x, flight), flight


def arrive(x: Tensor, flight: Flight) -> Tensor:
    return _Arrive.apply(x, flight)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flight):
        ctx.flight = flight
        flight.start(x, True)
        return flight.work.result.view(flight.work.result.shape)

    @staticmethod
    def backward(ctx, dy):
        return ctx.flight.work.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flight):
        ctx.flight = flight
        flight.work.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.flight.start(dy, False)
        return dy, None  # only its shape is looked at; _Start returns what arrives
