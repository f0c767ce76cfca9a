"""Dropless dispatch of static shape: a bound on the rows between two ranks (parallel.ep_bound).

Each rank sends to every rank the same number of rows: ep_bound times the mean, and at most as many as a
router can send. The bound is one of ranks, not of experts, since the loads of a rank's experts average out.
What is missing is filled with rows of zeros, which the last of the receiving experts computes. So the shapes
of all exchanges are known to the host, while the counts by expert travel as a tensor that stays on the
device, and the grouped GEMMs read them there (kernels/grouped_gemm.py). The host reads nothing.

With parallel.ep_chunks the bound is one of each chunk, which must be whole experts.

Rows over the bound are left out and counted. If any rank has counted one in a step, the step is computed
again with the exact dispatch (model/bounded_rows.py).

Bytes that a rank sends per layer and microbatch of t tokens (symbols as in parallel/expert/dispatch.py):

    counts of rows                     1 all-to-all     ep etp E/ep 8
    forward, backward   tokens         2 n each         ep_bound t k etp d c
                        probabilities  1 each           ep_bound t k etp g
"""
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.expert_order import count_choices
from kernels.permute import RowOrder
from parallel.expert import dispatch
from parallel.expert.dispatch import ChunkPlan, DispatchPlan, RowCounts
from parallel.wire.comm import Group


@torch.no_grad()
def plan_bounded_dispatch(
    index: Tensor, num_experts: int, group: Group, etp: int, *, bound: float, num_chunks: int = 1
) -> DispatchPlan:
    """Plan the exchange of rows like plan_dispatch, without reading counts on the host.

    index int64 [t, k] holds the experts of each token; t is the same on all ranks. bound: the most rows to a
    rank, in multiples of the mean. num_chunks divides the experts of a rank. The plan's num_over counts the
    choices that are not sent.
    """
    num_tokens, top_k = index.shape
    ep = group.size // etp
    num_units = ep * num_chunks  # a unit: the experts of a rank in one chunk
    unit_experts = num_experts // num_units
    most = num_tokens * min(top_k, unit_experts)
    room = min(math.ceil(bound * index.numel() / num_units), most)

    # order of departure
    counts = count_choices(index.flatten(), num_experts)[1:].view(num_units, unit_experts)
    placed = place_choices(index.flatten(), counts, room)
    layout = torch.arange(group.size * num_chunks * room, device=index.device)
    by_chunk = layout.view(num_chunks, ep, etp, room).permute(1, 0, 3, 2)
    by_rank = layout.view(ep, etp, num_chunks, room).permute(0, 2, 3, 1)
    rows = send_order(placed, by_chunk.reshape(-1, etp))
    probs = rows if num_chunks == 1 else send_order(placed, by_rank.reshape(-1, etp))
    rows_of_token = rows.slots[:-1].view(num_tokens, top_k * etp)
    sent_rows = RowOrder(rows.source // top_k, pad(rows_of_token, (0, 0, 0, 1), value=-1), False)

    # arrivals: the last expert of each unit gets its padding
    ends = counts.cumsum(1).clamp(max=room)
    ends[:, -1] = room
    sent_counts = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    of_ranks = sent_counts.view(ep, 1, -1).expand(-1, etp, -1).reshape(group.size, -1)
    arrivals = dispatch.exchange_row_counts(of_ranks, group, etp, is_assumed=index.is_meta).to(index.device)
    of_chunks = dispatch.rows_of_chunks(arrivals, num_chunks)
    each = RowCounts([room] * group.size, [room] * group.size)
    chunks = [ChunkPlan(each, rows_per_expert) for rows_per_expert in of_chunks.sum(1)]
    chunks, arrived_probs = dispatch.with_arrival_orders(chunks, of_chunks)
    return DispatchPlan(
        group,
        sent_rows=sent_rows,
        sent_probs=probs,
        padded=True,
        chunks=chunks,
        prob_counts=dispatch.total_counts([each] * num_chunks),
        arrived_probs=arrived_probs,
        num_over=(counts.sum(1) - room).clamp(min=0).sum(),
    )


class PlacedChoices(NamedTuple):
    """The choices (token * k + choice) of a rank in units with the same number of places.

    choice_of_place [units * room] is t k for an empty place. place_of_choice [t k + 1] is units * room for a
    choice over the bound, and for the choice t k.
    """
    choice_of_place: Tensor
    place_of_choice: Tensor


def place_choices(choices: Tensor, counts: Tensor, room: int) -> PlacedChoices:
    """Place choices [t k], the expert of each, by unit and expert. counts [units, experts of a unit]."""
    num_units, unit_experts = counts.shape
    num_places = num_units * room
    by_expert = choices.to(torch.int16).argsort(stable=True)  # 16 bits sort in 2 passes
    unit = choices[by_expert] // unit_experts
    of_unit = counts.sum(1)
    first = of_unit.cumsum(0) - of_unit
    number = torch.arange(len(choices), device=choices.device) - first[unit]  # within its unit
    place = torch.where(number < room, unit * room + number, num_places)

    # one more place and choice for all that have no partner
    choice_of_place = choices.new_full((num_places + 1,), len(choices)).scatter_(0, place, by_expert)
    place_of_choice = choices.new_full((len(choices) + 1,), num_places)
    place_of_choice[:-1].scatter_(0, by_expert, place)
    return PlacedChoices(choice_of_place[:-1], place_of_choice)


def send_order(placed: PlacedChoices, rows_of_place: Tensor) -> RowOrder:
    """Return the order that maps sent rows to choices. rows_of_place [units * room, etp]: where each place
    is sent; every etp rank of an expert gets the same rows."""
    etp = rows_of_place.shape[1]
    source = placed.choice_of_place.new_empty(rows_of_place.numel())
    source.scatter_(0, rows_of_place.flatten(), placed.choice_of_place.repeat_interleave(etp))
    slots = pad(rows_of_place, (0, 0, 0, 1), value=-1)[placed.place_of_choice]
    return RowOrder(source, slots, every_slot_filled=False)
