"""Expert parallelism (GShard, arXiv 2006.16668): dispatch tokens to their experts' ranks, combine results.

Rank (i, j) of the ep x etp group holds E / ep experts, starting at i E / ep, and the j-th shard of each one's
inner width. A row is a token for one of its experts. It is sent to all etp ranks of that expert, and their
partial outputs are summed on the token's rank: one all-to-all each way, whatever etp is. Exactly the routed
rows are sent, without padding, unless a capacity asks for static shapes: then each rank sends the same number
of rows to every expert, and no count is exchanged or read on the host. With parallel.ep_bound each rank sends
the same number of rows to every rank (parallel/expert/bounded.py). The ranks of the experts are folded out of
dp x cp x tp (arXiv 2504.14960). Tokens arrive here sharded over all of these, with or without sequence
parallelism.

With parallel.ep_chunks, rows travel in chunks (Tutel, arXiv 2206.03382, section 3.3), each a run of experts
on every rank: while these compute one chunk, the next arrives and the previous one returns. As long as there
are at most as many chunks as experts per rank, an expert lies in a single chunk: every GEMM has the same rows
as without chunks, and each weight is read, and its gradient accumulated, once. A boundary within an expert
splits its rows. The backward runs in reverse: the last chunk goes first.

Bytes that a rank sends per layer and microbatch of t tokens (t = b s / cp / tp, k = top_k; n: chunks; c, g:
bytes of the compute dtype, of fp32 or better):

    counts of rows                     1 all-to-all     ep etp E/ep 8
    forward, backward   tokens         2 n each         t k etp d c     dropless; a dropped token is not sent
                        probabilities  1 each           t k etp g

These are counted on the rank that owns the token (what it sends, and what it gets back), so they do not
depend on the routing. Arriving rows are not permuted into expert order: the grouped GEMMs read them in place
and write their results where they return from (kernels/grouped_gemm.py). If one rank holds all experts,
nothing is sent and they read the tokens directly. FP8 GEMMs read copies in expert order (model/moe.py). With
parallel.compress_tokens rows travel to the experts in 8 bits (parallel/expert/coded.py).

The shared experts overlap with the exchanges: all their GEMMs but the last run during the dispatch, the last
during the combine, and their gradients likewise (model/moe.py).

In the backward of a chunk, the gradients of its rows are sent back before the experts' weight gradients are
computed (LateWeightGrads), so the last exchange of the backward, with no other chunk to overlap with,
overlaps with these. Their operands, rows of the output gradient and of the activation, live that much longer.
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
    """Numbers of rows in one exchange, on the way to the experts."""
    sent: list[int]  # to each rank
    received: list[int]  # from each rank

    @property
    def num_sent(self) -> int:
        return sum(self.sent)


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk of the rows; r of them are for this rank's experts.

    order maps each of them to a row that arrives, or, on one rank, to a token. It is None if rows arrive in
    expert order.
    """
    counts: RowCounts
    rows_per_expert: list[int] | Tensor  # by local expert; a tensor [experts] if on the device
    order: RowOrder | None = None


@dataclass(frozen=True)
class DispatchPlan:
    """Where rows go: m rows are sent, ordered by chunk, rank and expert; r rows arrive.

    The probabilities of all chunks travel in one exchange, ordered by rank and expert, hence also by chunk.
    arrived_probs maps rows ordered by chunk and expert to the probabilities that arrive, or is None if these
    arrive in that order.
    """
    group: Group
    sent_rows: RowOrder  # the token of each sent row: m of t, each in k etp places
    sent_probs: RowOrder  # the choice (token * k + choice) of each sent probability: m of t k, etp places
    padded: bool  # some rows are padding; they belong to a token number t, of zeros
    chunks: list[ChunkPlan]
    prob_counts: RowCounts
    arrived_probs: RowOrder | None
    num_over: Tensor | None = None  # int64 []: choices over a bound, which are not sent (bounded.py)


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
    """Plan the exchange of rows. One all-to-all of a count for each expert; reads the counts on the host.

    On one rank nothing is exchanged, there is one chunk, and without drops a GPU's counts are not read.

    index [t, k] holds the experts of each token, and -1 for a dropped choice (only if may_drop). capacity is
    the number of rows that each rank sends to every expert, at least as many as index has; with it, nothing
    is exchanged or read.
    """
    if group.size == 1 and capacity is None and not may_drop:
        return plan_on_one_rank(index, num_experts, group)
    num_tokens, top_k = index.shape
    choices = index.flatten()  # [t k]: the expert of each (token, choice)
    if capacity is not None:
        choices = append_padding(choices, num_experts, capacity)

    # number of rows for each rank and expert
    if group.size == 1:
        counted = count_on_one_rank(choices, num_experts, capacity)
    elif capacity is not None:
        counted = count_of_capacity(
            choices, num_experts, group, etp=etp, capacity=capacity, num_chunks=num_chunks)
    else:
        counted = exchange_counts(
            choices, num_experts, group, etp=etp, may_drop=may_drop, num_chunks=num_chunks)
    num_dropped, chunks, arrivals = counted

    # choice of each sent row and each sent probability
    by_expert = choices.to(torch.int16).argsort(stable=True)  # dropped ones first; 16 bits sort in 2 passes
    kept = by_expert[num_dropped:]
    all_chunks = total_counts([chunk.counts for chunk in chunks])
    probs = make_send_permutation(kept, [all_chunks], etp, num_choices=len(choices))
    rows = probs
    if len(chunks) > 1:
        counts_of_chunks = [chunk.counts for chunk in chunks]
        rows = make_send_permutation(kept, counts_of_chunks, etp, num_choices=len(choices))
    if capacity is not None:
        probs = with_empty_token(probs, index.numel())
        rows = with_empty_token(rows, index.numel())

    # from arrival order to expert order
    arrived_probs: RowOrder | None = None
    if arrivals is not None:
        chunks, arrived_probs = with_arrival_orders(chunks, arrivals)

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
    """Plan for a single rank that holds all experts, dropless. index [t, k]."""
    rows, choices, per_expert = order_by_expert(index, num_experts)
    counts = RowCounts([index.numel()], [index.numel()])
    rows_per_expert: list[int] | Tensor = per_expert
    if not counts_stay_on_device(index):
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


# ---- order of sent rows ------------------------------------------------------------------------------------


class SendPermutation(NamedTuple):
    """token_choice [m] is the (token, choice) of each sent row. sent_of_choice [choices, etp] is its inverse,
    with -1 for dropped choices."""
    token_choice: Tensor
    sent_of_choice: Tensor


def make_send_permutation(kept: Tensor, counts: list[RowCounts], etp: int,
                          num_choices: int) -> SendPermutation:
    """Order rows by chunk, rank and expert; every etp rank of an expert gets the same rows.

    kept [m / etp] holds the choices by expert, counts the number of rows for each rank in each chunk.
    """
    token_choice = kept
    etp_index = torch.zeros_like(kept)
    num_ranks = len(counts[0].sent)
    if num_ranks > 1:
        # one part for each ep rank and chunk, in this order in `kept`
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
    return SendPermutation(token_choice, sent_of_choice)


def with_empty_token(permutation: SendPermutation, num_choices: int) -> SendPermutation:
    """Map padding rows to choice number `num_choices`, which has no row itself."""
    token_choice, sent_of_choice = permutation
    return SendPermutation(
        token_choice.clamp(max=num_choices),
        pad(sent_of_choice[:num_choices], (0, 0, 0, 1), value=-1),
    )


def append_padding(choices: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Append padding choices until every expert has `capacity` of them.

    [t k] -> [t k + experts * capacity]: the upper bound on missing ones; those not needed are -1.
    """
    counts = count_choices(choices, num_experts)[1:]
    missing = capacity - counts[:, None]
    experts = torch.arange(num_experts, device=choices.device)[:, None]
    is_needed = torch.arange(capacity, device=choices.device) < missing  # [experts, capacity]
    added = torch.where(is_needed, experts, -1)
    return torch.cat((choices, added.flatten()))


# ---- row counts --------------------------------------------------------------------------------------------


class DispatchCounts(NamedTuple):
    """num_dropped counts the choices of this rank that are not sent. chunks lack their orders of arrival.
    arrivals [chunks, ranks, local experts] are the rows from each rank for each local expert, or None if one
    rank holds all experts."""
    num_dropped: int
    chunks: list[ChunkPlan]
    arrivals: Tensor | None


def count_on_one_rank(choices: Tensor, num_experts: int, capacity: int | None) -> DispatchCounts:
    """Count rows where this rank holds all experts and drops or pads. choices [t k]: experts; -1: dropped.

    Reads the counts on the host if it has to know how many are dropped.
    """
    rows_per_expert: list[int] | Tensor
    if capacity is not None:
        num_dropped = len(choices) - num_experts * capacity
        rows_per_expert = [capacity] * num_experts
        if counts_stay_on_device(choices):
            rows_per_expert = choices.new_full((num_experts,), capacity)
    else:
        counts = with_values(count_choices(choices, num_experts), len(choices), num_experts)
        num_dropped, *rows_per_expert = counts.tolist()
    num_kept = len(choices) - num_dropped
    chunk = ChunkPlan(RowCounts([num_kept], [num_kept]), rows_per_expert)
    return DispatchCounts(num_dropped, [chunk], arrivals=None)


def counts_stay_on_device(choices: Tensor) -> bool:
    """Whether the counts of choices stay on the device: reading them would make the host wait for a GPU."""
    return choices.device.type != "cpu"


def count_of_capacity(
    choices: Tensor, num_experts: int, group: Group, *, etp: int, capacity: int, num_chunks: int
) -> DispatchCounts:
    """Count rows where every rank sends `capacity` rows to every expert. Exchanges nothing."""
    num_local = num_experts * etp // group.size
    counts = torch.full((group.size, num_local), capacity)  # on the host
    of_chunks = rows_of_chunks(counts, num_chunks)
    sent = of_chunks.sum(2).tolist()
    rows_per_expert = of_chunks.sum(1).tolist()
    chunks = [ChunkPlan(RowCounts(n, n), per_expert) for n, per_expert in zip(sent, rows_per_expert)]
    num_dropped = len(choices) - num_experts * capacity
    return DispatchCounts(num_dropped, chunks, of_chunks.to(choices.device, non_blocking=True))


def exchange_counts(
    choices: Tensor, num_experts: int, group: Group, *, etp: int, may_drop: bool, num_chunks: int
) -> DispatchCounts:
    """Exchange the numbers of rows between ranks: one all-to-all of [ranks, local experts].

    Each rank derives their split into chunks locally. Reads the counts on the host, once.
    """
    counts = with_values(count_choices(choices, num_experts), len(choices), num_experts)  # dropped ones first
    num_local = num_experts * etp // group.size
    of_ep_rank = counts[1:].view(-1, 1, num_local)  # [ep, 1, local experts]
    sent_counts = of_ep_rank.expand(-1, etp, -1).reshape(group.size, num_local)
    arrivals = exchange_row_counts(sent_counts, group, etp, is_assumed=choices.is_meta)

    # counts of each chunk
    sent_counts = rows_of_chunks(sent_counts, num_chunks)  # [chunks, ranks, local experts]
    arrivals = rows_of_chunks(arrivals, num_chunks)
    of_chunks = torch.cat((sent_counts.sum(2), arrivals.sum(2), arrivals.sum(1)), dim=1)
    num_dropped, *read = torch.cat((counts[:1], of_chunks.flatten())).tolist()

    chunks: list[ChunkPlan] = []
    width = 2 * group.size + num_local
    for start in range(0, len(read), width):
        of_chunk = read[start:start + width]
        sent, received = of_chunk[:group.size], of_chunk[group.size:2 * group.size]
        chunks.append(ChunkPlan(RowCounts(sent, received), of_chunk[2 * group.size:]))
    return DispatchCounts(num_dropped if may_drop else 0, chunks, arrivals.to(choices.device))


def exchange_row_counts(sent_counts: Tensor, group: Group, etp: int, is_assumed: bool) -> Tensor:
    """Exchange row counts: departures [ranks, local experts], sent by this rank, -> arrivals, same shape.

    is_assumed: other ranks do not exist (plan/record), and each is taken to send what this one does.
    """
    arrivals = comm.all_to_all(sent_counts, group)
    if is_assumed:
        own = sent_counts[group.index // etp * etp]  # etp ranks have the same experts
        return own.expand(group.size, -1)
    return arrivals


def rows_of_chunks(counts: Tensor, num_chunks: int) -> Tensor:
    """Return how many of the rows sent between two ranks are in each chunk.

    The experts of a rank are split evenly over chunks, in order. A boundary within an expert splits its rows
    in the same ratio, rounded down.

    counts [ranks, local experts] -> [chunks, ranks, local experts].
    """
    num_local = counts.shape[1]
    experts = torch.arange(num_local, device=counts.device)
    boundaries = torch.arange(num_chunks + 1, device=counts.device)[:, None]
    # how much of each expert lies before each boundary, in units of 1 / num_chunks of an expert
    before = (boundaries * num_local - experts * num_chunks).clamp(0, num_chunks)
    rows_before = counts * before[:, None] // num_chunks  # [chunks + 1, ranks, local experts]
    return rows_before.diff(dim=0)


def total_counts(counts: list[RowCounts]) -> RowCounts:
    """Sum the counts over all chunks."""
    return RowCounts(
        sent=[sum(of_rank) for of_rank in zip(*(one.sent for one in counts))],
        received=[sum(of_rank) for of_rank in zip(*(one.received for one in counts))],
    )


def with_arrival_orders(
    chunks: list[ChunkPlan], arrivals: Tensor
) -> tuple[list[ChunkPlan], RowOrder | None]:
    """Return (the chunks with their orders, arrived_probs as in DispatchPlan).

    arrivals [chunks, ranks, local experts]: rows from each rank for each expert.
    """
    num_chunks, num_ranks, num_local = arrivals.shape
    products = torch.arange(num_chunks * num_local, device=arrivals.device)  # one for each expert of a chunk
    products = products.view(num_chunks, 1, num_local).expand(arrivals.shape)
    num_rows = [sum(chunk.counts.received) for chunk in chunks]

    # rows arrive by chunk, then by rank; in a chunk of one expert, that is expert order
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
    """Return the order that sorts rows by key, stably: a permutation.

    keys and counts have the same shape: counts[i] consecutive rows have keys[i].
    """
    key_of_row = keys.flatten().repeat_interleave(counts.flatten(), output_size=num_rows)
    order = key_of_row.argsort(stable=True)
    rows = torch.arange(num_rows, device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, rows)
    return RowOrder(order, inverse[:, None])


# ---- tokens to experts and back ----------------------------------------------------------------------------


class ExpertRows(NamedTuple):
    """Input of this rank's experts: row j in expert order is x[order.source[j]], or x[j] without an order.
    Results return in the layout of x, each row the sum of its results (kernels/permute.py)."""
    x: Tensor  # [r, d]; on one rank: [t, d], the tokens
    order: RowOrder | None
    probs: Tensor  # [r], in expert order: the results are multiplied by these


class Dispatch:
    """Tokens in flight to the experts: sent by the constructor, received by chunks(). One all-to-all for each
    chunk and one for the probabilities. On one rank only the probabilities are permuted.

    late_grads are the experts' weight gradients that a backward overlaps with the exchanges of row gradients.
    None without such an exchange, or if each is computed at once.
    """

    def __init__(
        self,
        x: Tensor,
        probs: Tensor,
        plan: DispatchPlan,
        late_grads: LateWeightGrads | None = None,
        exchange: "type[RowExchange] | None" = None,
    ) -> None:
        """Send x [t, d], by default with a RowExchange, and probs [t, k], the weights of the choices in fp32
        or better."""
        self.plan = plan
        probs = probs.reshape(-1, 1)
        if plan.padded:  # append a token of zeros and its choice
            x = pad(x, (0, 0, 0, 1))
            probs = pad(probs, (0, 0, 0, 1))

        # probabilities travel separately, once for all chunks: appended to rows, they would cost copies
        prob_rows = permute(probs, *plan.sent_probs)
        self.probs = prob_rows
        self.x_rows: tuple[Tensor, ...] = (x,)
        self.late_grads: LateWeightGrads | None = None
        if plan.group.size > 1:
            self.prob_exchange = RowExchange(plan.group, [plan.prob_counts])
            (self.probs,) = _SendRows.apply(prob_rows, self.prob_exchange)
            make_exchange = exchange or RowExchange
            self.row_exchange = make_exchange(plan.group, [chunk.counts for chunk in plan.chunks])
            x_rows = permute(x, *plan.sent_rows)
            self.x_rows = _SendRows.apply(x_rows, self.row_exchange)

            self.late_grads = late_grads if x_rows.requires_grad else None

    def chunks(self) -> Iterator[ExpertRows]:
        """Yield the input of the experts, chunk by chunk, as it arrives."""
        plan = self.plan
        probs = self.probs
        if plan.group.size > 1:
            probs = _ReceiveRows.apply(probs, self.prob_exchange, 0, None)
        if plan.arrived_probs is not None:
            probs = permute(probs, *plan.arrived_probs)
        num_rows = [sum(chunk.counts.received) for chunk in plan.chunks]
        probs_of_chunks = probs[:, 0].split(num_rows)

        for number, (chunk, x, chunk_probs) in enumerate(zip(plan.chunks, self.x_rows, probs_of_chunks)):
            if plan.group.size > 1:
                x = _ReceiveRows.apply(x, self.row_exchange, number, self.late_grads)
            yield ExpertRows(x, chunk.order, chunk_probs)


class Combine:
    """Rows in flight back to their tokens: sent chunk by chunk, received by tokens(). One all-to-all for each
    chunk, or none on one rank, whose experts return the sums. late_grads and exchange are those of the
    Dispatch."""

    def __init__(
        self,
        plan: DispatchPlan,
        late_grads: LateWeightGrads | None = None,
        exchange: "type[RowExchange] | None" = None,
    ) -> None:
        self.plan = plan
        self.late_grads = late_grads
        make_exchange = exchange or RowExchange
        self.exchange = make_exchange(plan.group, [chunk.counts for chunk in plan.chunks])
        self.sent: list[Tensor] = []  # in flight

    def send(self, rows: Tensor) -> None:
        """Send the next chunk: rows like those of ExpertRows.x, each times its probability."""
        number = len(self.sent)
        if self.plan.group.size > 1:
            rows = _ReturnRows.apply(rows, self.exchange, number, self.late_grads)
        self.sent.append(rows)

    def tokens(self) -> Tensor:
        """Wait for all chunks and return the sum [t, d] of each token's rows."""
        plan = self.plan
        if plan.group.size == 1:
            (out,) = self.sent
        else:
            rows = _ReceiveReturned.apply(self.exchange, *self.sent)
            out = unpermute(rows, *plan.sent_rows)
        return out[:-1] if plan.padded else out


# ---- all-to-alls in two halves, forward and backward -------------------------------------------------------


class RowExchange:
    """The all-to-alls that take rows to the experts or back, one for each chunk; reversed in the backward.

    On the rank of their tokens, the rows of all chunks are one tensor [m, ...], ordered by chunk. The
    all-to-alls read and write slices of it, so splitting copies nothing.
    """

    def __init__(self, group: Group, counts: list[RowCounts]) -> None:
        """`counts` has one entry for each chunk."""
        self.group = group
        self.counts = counts
        self.under_way: dict[int, PendingExchange] = {}  # by chunk
        self.home: Tensor | None = None  # buffer for returning rows

    def start_sending(self, rows: Tensor, order: range) -> tuple[Tensor, ...]:
        """Start sending all rows [m, ...] to the experts, with the chunks in this order.

        Return the receive buffer of each chunk.
        """
        parts = self.of_chunks(rows)
        for chunk in order:
            counts = self.counts[chunk]
            self.under_way[chunk] = comm.start_all_to_all(
                parts[chunk], counts.sent, counts.received, self.group)
        return tuple(self.under_way[chunk].result for chunk in range(len(parts)))

    def start_returning(self, rows: Tensor, chunk: int) -> Tensor:
        """Start sending the rows [r, ...] of a chunk back. Return the receive buffer."""
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

    def wait_chunk(self, chunk: int) -> Tensor:
        """Wait for a chunk to arrive. Raise RuntimeError if no exchange was started."""
        if chunk not in self.under_way:
            raise RuntimeError(f"chunk {chunk} of an exchange of rows is waited for, but was never started")
        return self.under_way.pop(chunk).wait()

    def wait_returned(self) -> Tensor:
        """Wait for all chunks that were sent back. Return their rows [m, ...]."""
        arrived = [self.wait_chunk(chunk) for chunk in range(len(self.counts))]
        home, self.home = self.home, None
        return arrived[0] if home is None else home

    def of_chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split the rows [m, ...] by chunk."""
        return rows.split([counts.num_sent for counts in self.counts])


class _SendRows(torch.autograd.Function):
    """Start sending rows to the experts. Whatever runs before _Arrive overlaps, in the backward too."""

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: RowExchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        results = exchange.start_sending(rows, range(len(exchange.counts)))
        return tuple(result.view(result.shape) for result in results)

    @staticmethod
    def backward(ctx, *dy: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait_returned(), None


class _ReceiveRows(torch.autograd.Function):
    """Wait for a chunk at the experts; of x, what _SendRows returned, only the shape is read. The backward
    starts sending its gradients back and overlaps the deferred weight gradients with that."""

    @staticmethod
    def forward(
        ctx, x: Tensor, exchange: RowExchange, chunk: int, late_grads: LateWeightGrads | None
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.chunk = chunk
        ctx.late_grads = late_grads
        arrived = exchange.wait_chunk(chunk)
        return arrived.view(arrived.shape)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.exchange.start_returning(dy, ctx.chunk)
        if ctx.late_grads is not None:
            ctx.late_grads.finish()
        return dy, None, None, None  # only its shape is read; _Leave returns the gradients that arrive


class _ReturnRows(torch.autograd.Function):
    """Start sending a chunk back from the experts. Whatever runs before _ReceiveReturned overlaps with it.

    Its backward precedes that of the experts: their weight gradients are deferred from then on.
    """

    @staticmethod
    def forward(
        ctx, rows: Tensor, exchange: RowExchange, chunk: int, late_grads: LateWeightGrads | None
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.chunk = chunk
        ctx.late_grads = late_grads
        result = exchange.start_returning(rows, chunk)
        return result.view(result.shape)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        arrived = ctx.exchange.wait_chunk(ctx.chunk)
        if ctx.late_grads is not None:
            ctx.late_grads.begin()
        return arrived, None, None, None


class _ReceiveReturned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: RowExchange, *chunks: Tensor) -> Tensor:
        ctx.exchange = exchange
        home = exchange.wait_returned()
        return home.view(home.shape)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        dy = dy.contiguous()
        # the last chunk's gradients are needed first
        exchange.start_sending(dy, range(len(exchange.counts))[::-1])
        return None, *exchange.of_chunks(dy)  # only their shapes are read
