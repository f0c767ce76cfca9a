"""Expert parallelism (GShard, arXiv 2006.16668): tokens go to the ranks of their experts, results come back.

Rank (i, j) of the group ep x etp holds E / ep experts, from number i E / ep on, and of each the j-th part of
its inner width. A row is a token for one of its experts. It goes to all etp ranks of that expert, and their
partial outputs are added where the token came from: one all-to-all each way, whatever etp is. What is sent is
what was routed, without padding, unless a capacity asks for static shapes: then each rank sends every expert
as many rows, and no count is exchanged or read on the host. The ranks of the experts are folded out of dp x
cp x tp (arXiv 2504.14960). Tokens come here divided over all of these, with or without sequence parallelism.

Bytes that a rank sends in a layer and microbatch of t tokens (t = b s / cp / tp, k = top_k; c, g: bytes of
the compute dtype, of fp32 or better):

    counts of rows                     1 all-to-all     ep etp E/ep 8
    forward, backward   tokens         2 each           t k etp d c     dropless; a dropped token is not sent
                        probabilities  1 each           t k etp g

They are counted on the rank that has the token (what it sends, and what comes back), so the count does not
depend on the routing. Of the shared experts, all but the last product runs during the exchange to the experts
and the last during the exchange back, and their gradients likewise (model/moe.py).
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.permute import permute, unpermute
from parallel.cost import Cost, Exchange, MemoryTraffic, Phase, SavedTensor, Workload
from parallel.wire import comm
from parallel.wire.comm import Group, PendingExchange

INDEX_BYTES = 8  # of a row's number, of a count


@dataclass(frozen=True)
class RowExchangeSizes:
    """Numbers of rows on the way to the experts; on the way back, sent and received are exchanged."""
    send_counts: list[int]  # to each rank
    receive_counts: list[int]  # from each rank
    rows_per_expert: list[int] | Tensor  # of each expert of this rank; a tensor [experts]: on the device

    def counts(self, to_experts: bool) -> tuple[list[int], list[int]]:
        """(rows sent to each rank, rows received from each)."""
        if to_experts:
            return self.send_counts, self.receive_counts
        return self.receive_counts, self.send_counts


@dataclass(frozen=True)
class DispatchPlan:
    """Where rows go: m rows are sent, by rank, then by expert; r rows arrive.

    expert_order, arrival_order: from the order of arrival to that of experts, and back. None: one rank, they
    are equal.
    """
    group: Group
    source_token: Tensor  # [m]: the token of each sent row
    token_choice: Tensor  # [m]: its (token, choice) as one number, token * k + choice
    rows_of_token: Tensor  # [t, k etp]: the rows of each token; -1: dropped
    rows_of_choice: Tensor  # [t k, etp]: the rows of each choice; -1: dropped
    nothing_dropped: bool  # there is no -1
    padded: bool  # some rows have no token; they are of a token number t, of zeros
    expert_order: Tensor | None  # [r]
    arrival_order: Tensor | None  # [r]
    sizes: RowExchangeSizes

    @property
    def rows_per_expert(self) -> list[int] | Tensor:
        return self.sizes.rows_per_expert


@torch.no_grad()
def plan_dispatch(
    index: Tensor,
    num_experts: int,
    group: Group,
    etp: int,
    may_drop: bool,
    capacity: int | None = None,
) -> DispatchPlan:
    """Plans the exchange of rows. One all-to-all of a count for each expert; reads the counts on the host.

    On one rank nothing is exchanged, and without drops a GPU's counts are not read.

    index [t, k]: the experts of each token; -1: dropped, only if may_drop. capacity: rows that each rank
    sends to every expert, at least as many as index has; then nothing is exchanged or read.
    """
    num_tokens, top_k = index.shape
    choices = index.flatten()  # [t k]: the expert of each (token, choice)
    if capacity is not None:
        choices = fill_up(choices, num_experts, capacity)

    # how many rows go where
    if group.size == 1:
        counted = count_on_one_rank(choices, num_experts, may_drop, capacity)
    elif capacity is not None:
        counted = count_of_capacity(choices, num_experts, group, etp=etp, capacity=capacity)
    else:
        counted = exchange_counts(choices, num_experts, group, etp=etp, may_drop=may_drop)
    num_dropped, sizes, arrivals = counted

    # which choice each sent row is
    by_expert = choices.argsort(stable=True)  # dropped ones first
    kept = by_expert[num_dropped:]
    expert_order: Tensor | None = None
    arrival_order: Tensor | None = None
    if arrivals is None:
        token_choice = kept
        etp_index = torch.zeros_like(kept)
    else:
        token_choice, etp_index = repeat_over_etp(kept, sizes.send_counts, etp)
        expert_order, arrival_order = orders_of_arrival(arrivals)

    # the inverse: the rows of each choice, and of each token
    rows_of_choice = choices.new_full((len(choices), etp), -1)
    rows_of_choice[token_choice, etp_index] = torch.arange(len(token_choice), device=choices.device)
    rows_of_token = rows_of_choice[:index.numel()].view(num_tokens, top_k * etp)
    if capacity is not None:  # rows without a token are of token number t, choice number t k
        token_choice = token_choice.clamp(max=index.numel())
        rows_of_token = pad(rows_of_token, (0, 0, 0, 1), value=-1)
        rows_of_choice = pad(rows_of_choice[:index.numel()], (0, 0, 0, 1), value=-1)

    return DispatchPlan(
        group,
        source_token=token_choice // top_k,
        token_choice=token_choice,
        rows_of_token=rows_of_token,
        rows_of_choice=rows_of_choice,
        nothing_dropped=not may_drop and capacity is None,
        padded=capacity is not None,
        expert_order=expert_order,
        arrival_order=arrival_order,
        sizes=sizes,
    )


def repeat_over_etp(kept: Tensor, send_counts: list[int], etp: int) -> tuple[Tensor, Tensor]:
    """(token_choice, etp_index) [m] of the sent rows: every etp rank of an expert gets the same rows.

    kept [m / etp]: the choices, by expert. send_counts: rows for each rank.
    """
    token_choice: list[Tensor] = []
    etp_index: list[Tensor] = []
    for rows in kept.split(send_counts[::etp]):  # of each ep rank
        for j in range(etp):
            token_choice.append(rows)
            etp_index.append(torch.full_like(rows, j))
    return torch.cat(token_choice), torch.cat(etp_index)


def fill_up(choices: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Appends choices that are no token's, so that every expert has `capacity` of them.

    [t k] -> [t k + experts * capacity]: as many as could be missing; those that are not needed are -1.
    """
    counts = count_choices(choices, num_experts)[1:]
    missing = capacity - counts[:, None]
    experts = torch.arange(num_experts, device=choices.device)[:, None]
    is_needed = torch.arange(capacity, device=choices.device) < missing  # [experts, capacity]
    added = torch.where(is_needed, experts, -1)
    return torch.cat((choices, added.flatten()))


def count_choices(choices: Tensor, num_experts: int) -> Tensor:
    """choices [t k] -> [1 + experts]: how many are dropped, and how many each expert has.

    torch.bincount gives the same, but the host waits for a GPU in it.
    """
    counts = choices.new_zeros(1 + num_experts)
    return counts.index_add_(0, choices + 1, torch.ones_like(choices))


class RowCounts(NamedTuple):
    """num_dropped: choices of this rank that are not sent. arrivals [ranks, local experts]: rows from each
    rank for each expert of this one; None: one rank has all experts."""
    num_dropped: int
    sizes: RowExchangeSizes
    arrivals: Tensor | None


def count_on_one_rank(
    choices: Tensor, num_experts: int, may_drop: bool, capacity: int | None
) -> RowCounts:
    """Where this rank has all experts. choices [t k]: experts; -1: dropped, only if may_drop.

    Reads the counts on the host where it has to know how many are dropped, and on a CPU.
    """
    rows_per_expert: list[int] | Tensor
    is_on_gpu = choices.device.type != "cpu"
    if capacity is not None:
        num_dropped = len(choices) - num_experts * capacity
        rows_per_expert = [capacity] * num_experts
        if is_on_gpu:
            rows_per_expert = choices.new_full((num_experts,), capacity)
    elif is_on_gpu and not may_drop:
        num_dropped = 0
        rows_per_expert = count_choices(choices, num_experts)[1:]
    else:
        counts = count_choices(choices, num_experts)
        num_dropped, *rows_per_expert = counts.tolist()
    num_kept = len(choices) - num_dropped
    return RowCounts(num_dropped, RowExchangeSizes([num_kept], [num_kept], rows_per_expert), arrivals=None)


def count_of_capacity(
    choices: Tensor, num_experts: int, group: Group, *, etp: int, capacity: int
) -> RowCounts:
    """Where every rank sends `capacity` rows to every expert. Exchanges nothing."""
    num_local = num_experts * etp // group.size
    counts = [num_local * capacity] * group.size
    rows_per_expert = [group.size * capacity] * num_local
    arrivals = torch.full((group.size, num_local), capacity, device=choices.device)
    num_dropped = len(choices) - num_experts * capacity
    return RowCounts(num_dropped, RowExchangeSizes(counts, counts, rows_per_expert), arrivals)


def exchange_counts(
    choices: Tensor, num_experts: int, group: Group, *, etp: int, may_drop: bool
) -> RowCounts:
    """Where the ranks tell each other how many rows they send: one all-to-all of [ranks, local experts].

    Reads the counts on the host.
    """
    counts = count_choices(choices, num_experts)  # dropped ones first
    num_dropped = int(counts[0]) if may_drop else 0
    counts = counts[1:]  # [experts]
    num_local = num_experts * etp // group.size
    of_ep_rank = counts.view(-1, 1, num_local)  # [ep, 1, local experts]
    departures = of_ep_rank.expand(-1, etp, -1).reshape(group.size, num_local)
    arrivals = comm.all_to_all(departures, group)

    totals = torch.stack((departures.sum(1), arrivals.sum(1)))
    send_counts, receive_counts = totals.tolist()
    rows_per_expert = arrivals.sum(0).tolist()
    sizes = RowExchangeSizes(send_counts, receive_counts, rows_per_expert)
    return RowCounts(num_dropped, sizes, arrivals)


def orders_of_arrival(arrivals: Tensor) -> tuple[Tensor, Tensor]:
    """(expert_order, arrival_order) [r] of rows that arrive by rank, then by expert.

    arrivals [ranks, local experts]: how many come from each rank for each expert.
    """
    num_ranks, num_local = arrivals.shape
    experts = torch.arange(num_local, device=arrivals.device).repeat(num_ranks)
    expert_of_row = experts.repeat_interleave(arrivals.flatten())
    expert_order = expert_of_row.argsort(stable=True)

    rows = torch.arange(len(expert_order), device=arrivals.device)
    arrival_order = torch.empty_like(expert_order).scatter_(0, expert_order, rows)
    return expert_order, arrival_order


# ---- tokens to experts and back ----------------------------------------------------------------------------


class Dispatch:
    """Tokens under way to the experts: sent when it is made, received by rows(). Two all-to-alls."""

    def __init__(self, x: Tensor, probs: Tensor, plan: DispatchPlan) -> None:
        """x [t, d]; probs [t, k], the weights of the choices, in fp32 or better."""
        self.plan = plan
        probs = probs.reshape(-1, 1)
        if plan.padded:  # the token of zeros, and its choice
            x = pad(x, (0, 0, 0, 1))
            probs = pad(probs, (0, 0, 0, 1))
        x_rows = permute(x, plan.source_token, plan.rows_of_token, plan.nothing_dropped)
        prob_rows = permute(probs, plan.token_choice, plan.rows_of_choice, plan.nothing_dropped)
        self.x_exchange = start_exchange(x_rows, plan, towards_experts=True)
        self.prob_exchange = start_exchange(prob_rows, plan, towards_experts=True)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Rows [r, d] in the order of experts, and their probabilities [r]."""
        x = finish_exchange(*self.x_exchange)
        probs = finish_exchange(*self.prob_exchange)
        expert_order = self.plan.expert_order
        arrival_order = self.plan.arrival_order
        if expert_order is not None and arrival_order is not None:
            x = permute(x, expert_order, arrival_order[:, None])
            probs = permute(probs, expert_order, arrival_order[:, None])
        return x, probs[:, 0]


class Combine:
    """Rows under way back to their tokens: sent when it is made, received by tokens(). One all-to-all."""

    def __init__(self, rows: Tensor, plan: DispatchPlan) -> None:
        """rows [r, d] in the order of experts, each times its probability."""
        self.plan = plan
        if plan.expert_order is not None and plan.arrival_order is not None:
            rows = permute(rows, plan.arrival_order, plan.expert_order[:, None])
        self.exchange = start_exchange(rows, plan, towards_experts=False)

    def tokens(self) -> Tensor:
        """The sum [t, d] of each token's rows."""
        plan = self.plan
        rows = finish_exchange(*self.exchange)
        out = unpermute(rows, plan.source_token, plan.rows_of_token, plan.nothing_dropped)
        return out[:-1] if plan.padded else out


def dispatch_cost(
    work: Workload,
    group: Group,
    *,
    tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    etp: int,
) -> Cost:
    """Of plan_dispatch, Dispatch and Combine, without a capacity: every choice is sent.

    tokens: that this rank routes. Where nothing is exchanged, the orders of arrival are not needed.
    """
    rows = tokens * top_k * etp
    row_bytes = rows * hidden * work.compute_bytes
    prob_bytes = rows * work.accumulation_bytes
    indices_of_row = 5 if group.size > 1 else 3
    host_reads = 1 if group.size > 1 else 0

    def all_to_all(nbytes: int, phase: Phase = "forward") -> Exchange:
        return Exchange("ep_etp", "all_to_all", nbytes, phase=phase)

    return Cost(
        traffic=(MemoryTraffic(4 * row_bytes),),  # rows in the order of experts, and back
        saved=(SavedTensor(INDEX_BYTES * (rows * indices_of_row + tokens * top_k)),),
        exchanges=(
            all_to_all(etp * num_experts * INDEX_BYTES),  # counts
            all_to_all(row_bytes),
            all_to_all(prob_bytes),
            all_to_all(row_bytes, "output"),
            all_to_all(row_bytes, "backward"),
            all_to_all(row_bytes, "backward"),
            all_to_all(prob_bytes, "backward"),
        ),
        host_reads=host_reads,
    )


# ---- an all-to-all in two halves, forward and backward -----------------------------------------------------


@dataclass
class RowExchange:
    """An all-to-all of rows in the forward, and the reverse in the backward."""
    plan: DispatchPlan
    towards_experts: bool  # in the forward
    work: PendingExchange | None = None  # under way

    def start(self, x: Tensor, is_forward: bool) -> PendingExchange:
        """Starts to send the rows x [rows, ...], by rank."""
        to_experts = self.towards_experts == is_forward
        send_counts, receive_counts = self.plan.sizes.counts(to_experts)
        self.work = comm.start_all_to_all(
            x,
            send_counts,
            receive_counts,
            self.plan.group,
            count_sent=to_experts,
        )
        return self.work

    def wait(self) -> Tensor:
        """Waits for the rows that arrive. Raises RuntimeError if nothing was started."""
        if self.work is None:
            raise RuntimeError("an exchange of rows is waited for, and none was started")
        return self.work.wait()


def start_exchange(x: Tensor, plan: DispatchPlan, towards_experts: bool) -> tuple[Tensor, RowExchange]:
    """Starts an exchange. What runs between it and finish_exchange overlaps with it, in the backward too."""
    exchange = RowExchange(plan, towards_experts)
    return _StartExchange.apply(x, exchange), exchange


def finish_exchange(x: Tensor, exchange: RowExchange) -> Tensor:
    """Waits for the rows that arrive."""
    return _FinishExchange.apply(x, exchange)


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        result = exchange.start(x, is_forward=True).result
        return result.view(result.shape)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(dy, is_forward=False)
        return dy, None  # only its shape is read; _StartExchange returns what arrives
