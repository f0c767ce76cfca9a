"""Sort the choices of a router by expert: a stable counting sort, in two launches.

The first counts how many choices of each chunk go to each expert. In the second, each chunk derives from
these counts where its first choice of every expert goes, and places its own in order. No atomics: always the
order of a stable sort.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.permute import RowOrder
from kernels.triton_ import ceil_div, kernels_run_on, power_of_2, tl, triton

CHUNK = 1024  # choices per program
TILE = 4096  # choices times experts that a program compares at a time
WARPS = 4


class ExpertOrder(NamedTuple):
    """The choices of t tokens with k choices each, sorted by expert.

    rows holds the token of each of the t k rows, choices its choice (token * k + choice). rows_per_expert is
    int64 [experts].
    """
    rows: RowOrder
    choices: RowOrder
    rows_per_expert: Tensor


def order_by_expert(index: Tensor, num_experts: int) -> ExpertOrder:
    """Sort index int64 [t, k], the experts of each token in [0, num_experts). Stable; no host sync."""
    t, k = index.shape
    if index.numel() and kernels_run_on(index.device):
        tokens, choices, places, counts = launch_order(index, num_experts)
    else:
        chosen = index.flatten()
        choices = chosen.to(torch.int16).argsort(stable=True)  # 16 bits sort in 2 passes
        tokens = choices // k
        places = torch.empty_like(choices)
        places[choices] = torch.arange(t * k, device=index.device)
        counts = count_choices(chosen, num_experts)[1:]
    return ExpertOrder(
        rows=RowOrder(tokens, places.view(t, k)),
        choices=RowOrder(choices, places[:, None]),
        rows_per_expert=counts,
    )


def count_choices(choices: Tensor, num_experts: int) -> Tensor:
    """choices [t k] -> [1 + experts]: the number of dropped ones (-1), and of each expert's.

    Equals torch.bincount, which makes the host wait for a GPU.
    """
    counts = choices.new_zeros(1 + num_experts)
    return counts.index_add_(0, choices + 1, torch.ones_like(choices))


def with_values(counts: Tensor, num_choices: int, num_experts: int) -> Tensor:
    """Return the counts of choices [experts], with or without a preceding count of dropped ones.

    If they have no values (plan/record), return equal shares for all experts, on the host.
    """
    if not counts.is_meta:
        return counts
    share, rest = divmod(num_choices, num_experts)
    shares = [share + (expert < rest) for expert in range(num_experts)]
    return torch.tensor([0] * (len(counts) - num_experts) + shares)


def host_counts(counts: Sequence[int] | Tensor, num_rows: int) -> list[int]:
    """Return the rows of each expert, on the host. num_rows is their total."""
    if isinstance(counts, Tensor):
        return with_values(counts, num_rows, len(counts)).tolist()
    return list(counts)


# ---- Triton ------------------------------------------------------------------------------------------------

@triton.jit
def falls_on(INDEX, first, n, experts, ROWS: tl.constexpr):
    """Whether choices [first, first + ROWS) of n go to each expert: int32 [ROWS, EXPERTS]."""
    numbers = first + tl.arange(0, ROWS)
    chosen = tl.load(INDEX + numbers, numbers < n, -1)
    return (chosen[:, None] == experts[None, :]).to(tl.int32)


@triton.jit
def count_kernel(
    INDEX, COUNTS, n,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Count into COUNTS int32 [chunks, EXPERTS] how many of a chunk's choices go to each expert."""
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, CHUNK, ROWS):
        counts += tl.sum(falls_on(INDEX, chunk * CHUNK + start, n, experts, ROWS=ROWS), 0)
    tl.store(COUNTS + chunk * EXPERTS + experts, counts)


@triton.jit
def place_kernel(
    INDEX, COUNTS, TOKENS, CHOICES, PLACES, TOTALS, n, k, experts, chunks,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Store the place of each choice of a chunk, and the inverse: the token and choice at that place.

    TOTALS int64 [experts] is the number of choices of each. EXPERTS is at least their number, a power of two.
    """
    chunk = tl.program_id(0)
    expert_range = tl.arange(0, EXPERTS)

    # position of this chunk's first choice of each expert
    totals = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, chunks, ROWS):
        others = start + tl.arange(0, ROWS)
        pointers = COUNTS + others[:, None] * EXPERTS + expert_range[None, :]
        counts = tl.load(pointers, (others < chunks)[:, None], 0)
        totals += tl.sum(counts, 0)
        before += tl.sum(tl.where((others < chunk)[:, None], counts, 0), 0)
    place = tl.cumsum(totals, 0) - totals + before
    if chunk == 0:
        tl.store(TOTALS + expert_range, totals.to(tl.int64), expert_range < experts)

    for start in range(0, CHUNK, ROWS):
        first = chunk * CHUNK + start
        is_chosen = falls_on(INDEX, first, n, expert_range, ROWS=ROWS)
        earlier = tl.cumsum(is_chosen, 0) - is_chosen  # in this block, for the same expert
        places = tl.sum(is_chosen * (place[None, :] + earlier), 1).to(tl.int64)
        place += tl.sum(is_chosen, 0)

        numbers = first + tl.arange(0, ROWS)
        inside = numbers < n
        tl.store(PLACES + numbers, places, inside)
        tl.store(CHOICES + places, numbers.to(tl.int64), inside)
        tl.store(TOKENS + places, (numbers // k).to(tl.int64), inside)


def launch_order(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's token and choice, each choice's row (all [t k]), and the rows per expert."""
    index = index.contiguous()
    n = index.numel()
    slots = power_of_2(num_experts)
    rows = min(CHUNK, max(16, TILE // slots))
    blocks = {"CHUNK": CHUNK, "ROWS": rows, "EXPERTS": slots, "num_warps": WARPS}
    chunks = ceil_div(n, CHUNK)
    counts = torch.empty(chunks, slots, dtype=torch.int32, device=index.device)
    count_kernel[(chunks,)](index, counts, n, **blocks)

    tokens, choices, places = (index.new_empty(n) for _ in range(3))
    totals = index.new_empty(num_experts)
    place_kernel[(chunks,)](
        index, counts, tokens, choices, places, totals, n, index.shape[1], num_experts, chunks,
        **blocks,
    )
    return tokens, choices, places, totals
