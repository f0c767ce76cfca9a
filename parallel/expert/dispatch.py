"""Expert parallelism (GShard, arXiv 2006.16668): tokens go to the ranks of their experts, results come back.

Rank (i, j) of the group ep x etp holds E / ep experts, from number i E / ep on, and of each the j-th part of
its inner width. A row is a token for one of its experts. It goes to all etp ranks of that expert, and their
partial outputs are added where the token came from: one all-to-all each way, whatever etp is. What is sent is
what was routed, without padding, unless a capacity asks for static shapes: then each rank sends every expert
as many rows, and no count is exchanged or read on the host. The ranks of the experts are folded out of dp x
cp x tp (arXiv 2504.14960). Tokens come here divided over all of these, with or without sequence parallelism.

With parallel.ep_chunks the rows travel in chunks (Tutel, arXiv 2206.03382, section 3.3), each of which is a
run of the experts of every rank: while these compute one chunk, the next ones arrive and the last ones go
back. An expert is in one chunk, if there are not more chunks than experts of a rank: so every product has the
rows that it has without chunks, and each weight is read, and its gradient added, once. A boundary within an
expert divides its rows. The backward is the mirror image: the last chunk goes first.

Bytes that a rank sends in a layer and microbatch of t tokens (t = b s / cp / tp, k = top_k; n: chunks; c, g:
bytes of the compute dtype, of fp32 or better):

    counts of rows                     1 all-to-all     ep etp E/ep 8
    forward, backward   tokens         2 n each         t k etp d c     dropless; a dropped token is not sent
                        probabilities  1 each           t k etp g

They are counted on the rank that has the token (what it sends, and what comes back), so the count does not
depend on the routing. What arrives is not brought into the order of experts: their products read it where it
lies, and write to where it returns from (kernels/grouped_gemm.py). If one rank has all experts, nothing is
sent, and they read the tokens themselves. Products in fp8 read copies in the order of experts (model/moe.py).

Of the shared experts, all but the last product runs during the exchange to the experts and the last during
the exchange back, and their gradients likewise (model/moe.py).

In the backward of a chunk, the gradients of its rows go home before the experts' weight gradients are
computed (LateWeightGrads): so the last exchange of the backward, which has no other chunk beside it, travels
during these. Their operands, rows of the output's gradient and of the activation, live that much longer.
"""
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.expert_order import count_choices, order_by_expert, with_values
from kernels.grad import LateWeightGrads
from kernels.permute import RowOrder, permute, unpermute
from parallel.wire import comm
from parallel.wire.comm import Group, PendingExchange


@dataclass(frozen=True)
class RowCounts:
    """How many rows of one exchange each rank sends to the experts, and gets back from them."""
    sent: list[int]  # to each rank
    received: list[int]  # from each rank

    @property
    def num_sent(self) -> int:
        return sum(self.sent)


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk of the rows: the experts of this rank have r of them.

    order: which of the rows that arrive each of them is; on one rank, which of the tokens. None: they arrive
    in the order of experts.
    """
    counts: RowCounts
    rows_per_expert: list[int] | Tensor  # of each expert of this rank; a tensor [experts]: on the device
    order: RowOrder | None = None


@dataclass(frozen=True)
class DispatchPlan:
    """Where rows go: m rows are sent, by chunk, then by rank, then by expert; r rows arrive.

    Their probabilities make one exchange for all chunks: they are sent by rank, then by expert, which is by
    chunk, too. arrived_probs: which of those that arrive is that of each row, by chunk, then by expert. None:
    they arrive in this order.
    """
    group: Group
    sent_rows: RowOrder  # which token each sent row is: m of t, each in k etp places
    sent_probs: RowOrder  # which choice (token * k + choice) each sent probability is: m of t k, etp places
    padded: bool  # some rows have no token; they are of a token number t, of zeros
    chunks: list[ChunkPlan]
    prob_counts: RowCounts
    arrived_probs: RowOrder | None


@torch.no_grad()
def plan_dispatch(
    index: Tensor,
    num_experts: int,
    group: Group,
    etp: int,
    may_drop: bool,
    capacity: int | None = None,
    num_chunks: int = 1,
) -> DispatchPlan:
    """Plans the exchange of rows. One all-to-all of a count for each expert; reads the counts on the host.

    On one rank nothing is exchanged, there is one chunk, and without drops a GPU's counts are not read.

    index [t, k]: the experts of each token; -1: dropped, only if may_drop. capacity: rows that each rank
    sends to every expert, at least as many as index has; then nothing is exchanged or read.
    """
    if group.size == 1 and capacity is None and not may_drop:
        return plan_on_one_rank(index, num_experts, group)
    num_tokens, top_k = index.shape
    choices = index.flatten()  # [t k]: the expert of each (token, choice)
    if capacity is not None:
        choices = fill_up(choices, num_experts, capacity)

    # how many rows go where
    if group.size == 1:
        counted = count_on_one_rank(choices, num_experts, capacity)
    elif capacity is not None:
        counted = count_of_capacity(
            choices, num_experts, group, etp=etp, capacity=capacity, num_chunks=num_chunks)
    else:
        counted = exchange_counts(
            choices, num_experts, group, etp=etp, may_drop=may_drop, num_chunks=num_chunks)
    num_dropped, chunks, arrivals = counted

    # which choice each sent row is, and each sent probability
    by_expert = choices.to(torch.int16).argsort(stable=True)  # dropped ones first; 16 bits sort in 2 passes
    kept = by_expert[num_dropped:]
    all_chunks = total_counts([chunk.counts for chunk in chunks])
    probs = order_of_departure(kept, [all_chunks], etp, num_choices=len(choices))
    rows = probs
    if len(chunks) > 1:
        counts_of_chunks = [chunk.counts for chunk in chunks]
        rows = order_of_departure(kept, counts_of_chunks, etp, num_choices=len(choices))
    if capacity is not None:
        probs = with_empty_token(probs, index.numel())
        rows = with_empty_token(rows, index.numel())

    # from the order of arrival to that of experts
    arrived_probs: RowOrder | None = None
    if arrivals is not None:
        chunks, arrived_probs = with_orders_of_arrival(chunks, arrivals)

    rows_of_token = rows.sent_of_choice[:index.numel()].view(num_tokens, top_k * etp)
    if capacity is not None:
        rows_of_token = pad(rows_of_token, (0, 0, 0, 1), value=-1)
    nothing_dropped = not may_drop and capacity is None
    sent_rows = RowOrder(rows.token_choice // top_k, rows_of_token, nothing_dropped)
    if group.size == 1:
        chunks = [replace(chunks[0], order=sent_rows)]
    return DispatchPlan(
        group,
        sent_rows=sent_rows,
        sent_probs=RowOrder(probs.token_choice, probs.sent_of_choice, nothing_dropped),
        padded=capacity is not None,
        chunks=chunks,
        prob_counts=all_chunks,
        arrived_probs=arrived_probs,
    )


def plan_on_one_rank(index: Tensor, num_experts: int, group: Group) -> DispatchPlan:
    """Where this rank has all experts, and none of them turns a token away. index [t, k]."""
    rows, choices, per_expert = order_by_expert(index, num_experts)
    counts = RowCounts([index.numel()], [index.numel()])
    rows_per_expert: list[int] | Tensor = per_expert
    if not stays_on_device(index):
        rows_per_expert = with_values(per_expert, index.numel(), num_experts).tolist()
    return DispatchPlan(
        group,
        sent_rows=rows,
        sent_probs=choices,
        padded=False,
        chunks=[ChunkPlan(counts, rows_per_expert, order=rows)],
        prob_counts=counts,
        arrived_probs=None,
    )


# ---- the order in which rows leave -------------------------------------------------------------------------


class Departure(NamedTuple):
    """token_choice [m]: the (token, choice) of each sent row. sent_of_choice [choices, etp]: the inverse; -1:
    dropped."""
    token_choice: Tensor
    sent_of_choice: Tensor


def order_of_departure(kept: Tensor, counts: list[RowCounts], etp: int, num_choices: int) -> Departure:
    """By chunk, then by rank, then by expert: every etp rank of an expert gets the same rows.

    kept [m / etp]: the choices, by expert. counts: of each chunk, rows for each rank.
    """
    token_choice = kept
    etp_index = torch.zeros_like(kept)
    num_ranks = len(counts[0].sent)
    if num_ranks > 1:
        # of each ep rank, a part for each chunk: they are in this order in `kept`
        num_chunks = len(counts)
        ep = num_ranks // etp
        sizes = [counts[chunk].sent[i * etp] for i in range(ep) for chunk in range(num_chunks)]
        parts = kept.split(sizes)

        sent: list[Tensor] = []
        indices: list[Tensor] = []
        for chunk in range(num_chunks):
            for i in range(ep):
                part = parts[i * num_chunks + chunk]
                sent += [part] * etp
                if etp > 1:
                    indices += [torch.full_like(part, j) for j in range(etp)]
        token_choice = torch.cat(sent)
        etp_index = torch.cat(indices) if etp > 1 else etp_index

    sent_of_choice = kept.new_full((num_choices, etp), -1)
    sent_of_choice[token_choice, etp_index] = torch.arange(len(token_choice), device=kept.device)
    return Departure(token_choice, sent_of_choice)


def with_empty_token(departure: Departure, num_choices: int) -> Departure:
    """Rows without a token are of choice number `num_choices`, which has no row of its own."""
    token_choice, sent_of_choice = departure
    return Departure(
        token_choice.clamp(max=num_choices),
        pad(sent_of_choice[:num_choices], (0, 0, 0, 1), value=-1),
    )


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


# ---- how many rows go where --------------------------------------------------------------------------------


class Counted(NamedTuple):
    """num_dropped: choices of this rank that are not sent. chunks: without their orders of arrival. arrivals
    [chunks, ranks, local experts]: rows from each rank for each expert of this one; None: one rank has all
    experts."""
    num_dropped: int
    chunks: list[ChunkPlan]
    arrivals: Tensor | None


def count_on_one_rank(choices: Tensor, num_experts: int, capacity: int | None) -> Counted:
    """Where this rank has all experts, and drops choices or fills up. choices [t k]: experts; -1: dropped.

    Reads the counts on the host where it has to know how many are dropped.
    """
    rows_per_expert: list[int] | Tensor
    if capacity is not None:
        num_dropped = len(choices) - num_experts * capacity
        rows_per_expert = [capacity] * num_experts
        if stays_on_device(choices):
            rows_per_expert = choices.new_full((num_experts,), capacity)
    else:
        counts = with_values(count_choices(choices, num_experts), len(choices), num_experts)
        num_dropped, *rows_per_expert = counts.tolist()
    num_kept = len(choices) - num_dropped
    chunk = ChunkPlan(RowCounts([num_kept], [num_kept]), rows_per_expert)
    return Counted(num_dropped, [chunk], arrivals=None)


def stays_on_device(choices: Tensor) -> bool:
    """Whether the host is not told the counts of choices: it would have to wait for a GPU."""
    return choices.device.type != "cpu"


def count_of_capacity(
    choices: Tensor, num_experts: int, group: Group, *, etp: int, capacity: int, num_chunks: int
) -> Counted:
    """Where every rank sends `capacity` rows to every expert. Exchanges nothing."""
    num_local = num_experts * etp // group.size
    counts = torch.full((group.size, num_local), capacity)  # on the host
    of_chunks = rows_of_chunks(counts, num_chunks)
    sent = of_chunks.sum(2).tolist()
    rows_per_expert = of_chunks.sum(1).tolist()
    chunks = [ChunkPlan(RowCounts(n, n), per_expert) for n, per_expert in zip(sent, rows_per_expert)]
    num_dropped = len(choices) - num_experts * capacity
    return Counted(num_dropped, chunks, of_chunks.to(choices.device, non_blocking=True))


def exchange_counts(
    choices: Tensor, num_experts: int, group: Group, *, etp: int, may_drop: bool, num_chunks: int
) -> Counted:
    """Where the ranks tell each other how many rows they send: one all-to-all of [ranks, local experts].

    How these are divided over chunks, each rank knows itself. Reads the counts on the host, once.
    """
    counts = with_values(count_choices(choices, num_experts), len(choices), num_experts)  # dropped ones first
    num_local = num_experts * etp // group.size
    of_ep_rank = counts[1:].view(-1, 1, num_local)  # [ep, 1, local experts]
    departures = of_ep_rank.expand(-1, etp, -1).reshape(group.size, num_local)
    arrivals = exchange_departures(departures, group, etp, is_assumed=choices.is_meta)

    # of each chunk
    departures = rows_of_chunks(departures, num_chunks)  # [chunks, ranks, local experts]
    arrivals = rows_of_chunks(arrivals, num_chunks)
    of_chunks = torch.cat((departures.sum(2), arrivals.sum(2), arrivals.sum(1)), dim=1)
    num_dropped, *read = torch.cat((counts[:1], of_chunks.flatten())).tolist()

    chunks: list[ChunkPlan] = []
    width = 2 * group.size + num_local
    for start in range(0, len(read), width):
        of_chunk = read[start:start + width]
        sent, received = of_chunk[:group.size], of_chunk[group.size:2 * group.size]
        chunks.append(ChunkPlan(RowCounts(sent, received), of_chunk[2 * group.size:]))
    return Counted(num_dropped if may_drop else 0, chunks, arrivals.to(choices.device))


def exchange_departures(departures: Tensor, group: Group, etp: int, is_assumed: bool) -> Tensor:
    """departures [ranks, local experts]: rows that this rank sends -> arrivals, likewise: rows that it gets.

    is_assumed: the ranks are not there (plan/record), and each sends what this one does.
    """
    arrivals = comm.all_to_all(departures, group)
    if is_assumed:
        own = departures[group.index // etp * etp]  # etp ranks have the same experts
        return own.expand(group.size, -1)
    return arrivals


def rows_of_chunks(counts: Tensor, num_chunks: int) -> Tensor:
    """How many of the rows that one rank sends to another are in each chunk.

    The experts of a rank are divided evenly, in their order. Where a boundary lies within an expert, it
    divides its rows in the same ratio, rounded down.

    counts [ranks, local experts] -> [chunks, ranks, local experts].
    """
    num_local = counts.shape[1]
    experts = torch.arange(num_local, device=counts.device)
    boundaries = torch.arange(num_chunks + 1, device=counts.device)[:, None]
    # in units of 1 / num_chunks of an expert: how much of each expert lies before each boundary
    before = (boundaries * num_local - experts * num_chunks).clamp(0, num_chunks)
    rows_before = counts * before[:, None] // num_chunks  # [chunks + 1, ranks, local experts]
    return rows_before.diff(dim=0)


def total_counts(counts: list[RowCounts]) -> RowCounts:
    """Of all chunks together."""
    return RowCounts(
        sent=[sum(of_rank) for of_rank in zip(*(one.sent for one in counts))],
        received=[sum(of_rank) for of_rank in zip(*(one.received for one in counts))],
    )


def with_orders_of_arrival(
    chunks: list[ChunkPlan], arrivals: Tensor
) -> tuple[list[ChunkPlan], RowOrder | None]:
    """(the chunks with their orders, arrived_probs: see DispatchPlan).

    arrivals [chunks, ranks, local experts]: how many rows come from each rank for each expert.
    """
    num_chunks, num_ranks, num_local = arrivals.shape
    products = torch.arange(num_chunks * num_local, device=arrivals.device)  # one of each expert in a chunk
    products = products.view(num_chunks, 1, num_local).expand(arrivals.shape)
    num_rows = [sum(chunk.counts.received) for chunk in chunks]

    # rows arrive by chunk, then by rank; if a chunk is of one expert, that is its order
    if num_chunks % num_local:
        orders = sorting_order(products, arrivals, sum(num_rows))
        ordered: list[ChunkPlan] = []
        start = 0
        for chunk, n in zip(chunks, num_rows):
            of_chunk = slice(start, start + n)
            order = RowOrder(orders.source[of_chunk] - start, orders.slots[of_chunk] - start)
            ordered.append(replace(chunk, order=order))
            start += n
        chunks = ordered
    if num_chunks * num_local == 1:
        return chunks, None
    if num_chunks == 1:
        return chunks, chunks[0].order

    # probabilities arrive by rank
    by_rank = products.transpose(0, 1), arrivals.transpose(0, 1)
    return chunks, sorting_order(*by_rank, sum(num_rows))


def sorting_order(keys: Tensor, counts: Tensor, num_rows: int) -> RowOrder:
    """The order that sorts rows by key, stable: a permutation.

    keys, counts: of the same shape: so many rows in turn have each key.
    """
    key_of_row = keys.flatten().repeat_interleave(counts.flatten(), output_size=num_rows)
    order = key_of_row.argsort(stable=True)
    rows = torch.arange(num_rows, device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, rows)
    return RowOrder(order, inverse[:, None])


# ---- tokens to experts and back ----------------------------------------------------------------------------


class ExpertRows(NamedTuple):
    """What the experts of this rank work on: row j in the order of experts is x[order.source[j]], or x[j] if
    there is no order. Their results return as rows of x do, each the sum of its own (kernels/permute.py)."""
    x: Tensor  # [r, d]; on one rank: [t, d], the tokens
    order: RowOrder | None
    probs: Tensor  # [r], in the order of experts: what the results are multiplied by


class Dispatch:
    """Tokens under way to the experts: all sent when it is made, received by chunks(). An all-to-all for each
    chunk, and one of the probabilities. On one rank nothing moves but the probabilities.

    late_grads: weight gradients of the experts, which a backward computes beside the exchanges that take the
    gradients of rows home. None: there is no such exchange, or each is computed at once.
    """

    def __init__(
        self, x: Tensor, probs: Tensor, plan: DispatchPlan, late_grads: LateWeightGrads | None = None
    ) -> None:
        """x [t, d]; probs [t, k], the weights of the choices, in fp32 or better."""
        self.plan = plan
        probs = probs.reshape(-1, 1)
        if plan.padded:  # the token of zeros, and its choice
            x = pad(x, (0, 0, 0, 1))
            probs = pad(probs, (0, 0, 0, 1))

        # probabilities apart, once for all chunks: at the end of their rows, they would cost copies of these
        prob_rows = permute(probs, *plan.sent_probs)
        self.probs = prob_rows
        self.x_rows: tuple[Tensor, ...] = (x,)
        self.late_grads: LateWeightGrads | None = None
        if plan.group.size > 1:
            self.prob_exchange = RowExchange(plan.group, [plan.prob_counts])
            (self.probs,) = _Leave.apply(prob_rows, self.prob_exchange)
            self.row_exchange = RowExchange(plan.group, [chunk.counts for chunk in plan.chunks])
            x_rows = permute(x, *plan.sent_rows)
            self.x_rows = _Leave.apply(x_rows, self.row_exchange)

            self.late_grads = late_grads if x_rows.requires_grad else None

    def chunks(self) -> Iterator[ExpertRows]:
        """What the experts work on, chunk by chunk, once it has arrived."""
        plan = self.plan
        probs = self.probs
        if plan.group.size > 1:
            probs = _Arrive.apply(probs, self.prob_exchange, 0, None)
        if plan.arrived_probs is not None:
            probs = permute(probs, *plan.arrived_probs)
        num_rows = [sum(chunk.counts.received) for chunk in plan.chunks]
        probs_of_chunks = probs[:, 0].split(num_rows)

        for number, (chunk, x, chunk_probs) in enumerate(zip(plan.chunks, self.x_rows, probs_of_chunks)):
            if plan.group.size > 1:
                x = _Arrive.apply(x, self.row_exchange, number, self.late_grads)
            yield ExpertRows(x, chunk.order, chunk_probs)


class Combine:
    """Rows under way back to their tokens: sent chunk by chunk, received by tokens(). An all-to-all for each
    chunk; none on one rank, whose experts give the sums of the tokens. late_grads: those of the Dispatch."""

    def __init__(self, plan: DispatchPlan, late_grads: LateWeightGrads | None = None) -> None:
        self.plan = plan
        self.late_grads = late_grads
        self.exchange = RowExchange(plan.group, [chunk.counts for chunk in plan.chunks])
        self.sent: list[Tensor] = []  # under way

    def send(self, rows: Tensor) -> None:
        """Sends the next chunk. rows: as those of ExpertRows.x, each times its probability."""
        number = len(self.sent)
        if self.plan.group.size > 1:
            rows = _Return.apply(rows, self.exchange, number, self.late_grads)
        self.sent.append(rows)

    def tokens(self) -> Tensor:
        """The sum [t, d] of each token's rows, once all chunks have arrived."""
        plan = self.plan
        if plan.group.size == 1:
            (out,) = self.sent
        else:
            rows = _ComeHome.apply(self.exchange, *self.sent)
            out = unpermute(rows, *plan.sent_rows)
        return out[:-1] if plan.padded else out


# ---- all-to-alls in two halves, forward and backward -------------------------------------------------------


class RowExchange:
    """The all-to-alls that take rows to the experts, or back from there, one for each chunk; the reverse in
    the backward.

    At home, on the rank of their tokens, the rows of all chunks are one tensor [m, ...], by chunk; the
    all-to-alls read and write parts of it. So nothing is copied to divide them.
    """

    def __init__(self, group: Group, counts: list[RowCounts]) -> None:
        """counts: of each chunk."""
        self.group = group
        self.counts = counts
        self.under_way: dict[int, PendingExchange] = {}  # by chunk
        self.home: Tensor | None = None  # what returning rows are written into

    def leave(self, rows: Tensor, order: range) -> tuple[Tensor, ...]:
        """Starts to send all rows [m, ...] to the experts, the chunks in this order.

        Returns what will arrive of each chunk.
        """
        parts = self.of_chunks(rows)
        for chunk in order:
            counts = self.counts[chunk]
            self.under_way[chunk] = comm.start_all_to_all(
                parts[chunk], counts.sent, counts.received, self.group)
        return tuple(self.under_way[chunk].result for chunk in range(len(parts)))

    def send_back(self, rows: Tensor, chunk: int) -> Tensor:
        """Starts to send the rows [r, ...] of a chunk home. Returns what will arrive."""
        counts = self.counts[chunk]
        out = None
        if len(self.counts) > 1:
            if self.home is None:
                num_rows = sum(counts.num_sent for counts in self.counts)
                self.home = rows.new_empty(num_rows, *rows.shape[1:])
            out = self.of_chunks(self.home)[chunk]
        self.under_way[chunk] = comm.start_all_to_all(
            rows, counts.received, counts.sent, self.group, out=out, count_sent=False)
        return self.under_way[chunk].result

    def arrive(self, chunk: int) -> Tensor:
        """Waits for what arrives of a chunk. Raises RuntimeError if nothing was started."""
        if chunk not in self.under_way:
            raise RuntimeError(f"chunk {chunk} of an exchange of rows is waited for, and none was started")
        return self.under_way.pop(chunk).wait()

    def come_home(self) -> Tensor:
        """Waits for all chunks that were sent back. Returns their rows [m, ...]."""
        arrived = [self.arrive(chunk) for chunk in range(len(self.counts))]
        home, self.home = self.home, None
        return arrived[0] if home is None else home

    def of_chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The rows [m, ...] of each chunk."""
        return rows.split([counts.num_sent for counts in self.counts])


class _Leave(torch.autograd.Function):
    """Rows start to the experts. What runs between it and _Arrive overlaps with it, in the backward too."""

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: RowExchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        results = exchange.leave(rows, range(len(exchange.counts)))
        return tuple(result.view(result.shape) for result in results)

    @staticmethod
    def backward(ctx, *dy: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.come_home(), None


class _Arrive(torch.autograd.Function):
    """A chunk arrives at the experts. In the backward its gradients start home, and the weight gradients that
    waited for that are computed beside them."""

    @staticmethod
    def forward(
        ctx, x: Tensor, exchange: RowExchange, chunk: int, late_grads: LateWeightGrads | None
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.chunk = chunk
        ctx.late_grads = late_grads
        exchange.arrive(chunk)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.exchange.send_back(dy, ctx.chunk)
        if ctx.late_grads is not None:
            ctx.late_grads.finish()
        return dy, None, None, None  # only its shape is read; _Leave returns what arrives


class _Return(torch.autograd.Function):
    """A chunk starts back from the experts. What runs between it and _ComeHome overlaps with it.

    Its backward begins that of the experts: their weight gradients wait from then on.
    """

    @staticmethod
    def forward(
        ctx, rows: Tensor, exchange: RowExchange, chunk: int, late_grads: LateWeightGrads | None
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.chunk = chunk
        ctx.late_grads = late_grads
        result = exchange.send_back(rows, chunk)
        return result.view(result.shape)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        arrived = ctx.exchange.arrive(ctx.chunk)
        if ctx.late_grads is not None:
            ctx.late_grads.begin()
        return arrived, None, None, None


class _ComeHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: RowExchange, *chunks: Tensor) -> Tensor:
        ctx.exchange = exchange
        home = exchange.come_home()
        return home.view(home.shape)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        dy = dy.contiguous()
        exchange.leave(dy, range(len(exchange.counts))[::-1])  # the last chunk's gradients are needed first
        return None, *exchange.of_chunks(dy)  # only their shapes are read
