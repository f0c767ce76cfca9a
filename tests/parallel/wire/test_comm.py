"""Every exchange beside its definition: what each rank must hold afterwards, worked out from what all ranks
had; in a group of one rank it is what went in. And the gradients of the autograd pairs, beside autograd's own
through the same arithmetic in one process.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.tensor import regions as collectives
from parallel.tensor.regions import all_gather_sequence, reduce_scatter_sequence
from parallel.wire import comm
from parallel.wire.comm import Group
from parallel.wire.world import World

ROWS, COLUMNS = 6, 5


def numbers(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(
        shape or (ROWS, COLUMNS), generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    )


# ---- exchanges ---------------------------------------------------------------------------------------------


def whole_numbers(rank: int) -> torch.Tensor:
    return (numbers(rank) * 100).long()


def exchanges(group: Group, rank: int) -> dict[str, torch.Tensor]:
    """What every exchange gives this rank, in tensors of its own and in those that it is handed."""
    size, x = group.size, numbers(rank)
    out_gathered, out_scattered = x.new_zeros(size * ROWS, COLUMNS), x.new_zeros(ROWS // size, COLUMNS)
    started = comm.start_all_gather(x.clone(), group, x.new_zeros(size * ROWS, COLUMNS))
    found = {
        "sum": comm.all_reduce_sum(x.clone(), group),
        "max": comm.all_reduce_max(whole_numbers(rank), group),
        "largest": comm.all_reduce_max_float(x.abs(), group),
        "gather": comm.all_gather(x, group),
        "gather of columns": comm.all_gather(x.t(), group),
        "gather into": comm.all_gather(x, group, out_gathered),
        "scatter": comm.reduce_scatter(x, group),
        "scatter into": comm.reduce_scatter(x, group, out_scattered),
        "all to all": comm.all_to_all(x, group),
        "started sum": comm.start_all_reduce(x.clone(), group).wait(),
        "started gather": started.wait(),
        "started scatter": comm.start_reduce_scatter(x, group).wait(),
        "broadcast": comm.broadcast(x.clone(), group, size - 1),
    }
    assert found["gather into"] is out_gathered or size == 1
    assert torch.equal(out_gathered, found["gather into"]) and torch.equal(
        out_scattered, found["scatter into"]
    )
    assert comm.all_gather_objects({"rank": rank}, group) == [{"rank": r} for r in group.ranks]
    return found


def expected(members: list[int], rank: int) -> dict[str, torch.Tensor]:
    every, size, rank = [numbers(r) for r in members], len(members), members.index(rank)
    total, share = torch.stack(every).sum(0), ROWS // size
    return {
        "sum": total,
        "max": torch.stack([whole_numbers(r) for r in members]).amax(0),
        "largest": torch.stack(every).abs().amax(0),
        "gather": torch.cat(every),
        "gather of columns": torch.cat([x.t() for x in every]),
        "gather into": torch.cat(every),
        "scatter": total[rank * share : (rank + 1) * share],
        "scatter into": total[rank * share : (rank + 1) * share],
        "all to all": torch.cat([x[rank * share : (rank + 1) * share] for x in every]),
        "started sum": total,
        "started gather": torch.cat(every),
        "started scatter": total[rank * share : (rank + 1) * share],
        "broadcast": every[-1],
    }


def of_groups(world, groups: list[list[int]]) -> tuple[dict[str, torch.Tensor], dict]:
    ledger = Counter()
    found = exchanges(world.group_of_rank("dp_cp", groups, ledger), world.rank)
    return found, dict(ledger)


@pytest.mark.parametrize(
    "groups", [[[0]], [[0, 1]], [[0, 1, 2]], [[0, 2], [1, 3]], [[0], [1, 2, 3]]], ids=str
)
def test_each_exchange_is_its_definition(ranks, groups):
    world = sum(map(len, groups))
    told = ranks(world).run(of_groups, groups) if world > 1 else [(exchanges(Group("dp_cp"), 0), {})]
    for rank, (found, sent) in enumerate(told):
        members = next(group for group in groups if rank in group)
        want, size = expected(members, rank), len(members)
        assert found.keys() == want.keys()
        for name, value in found.items():
            assert value.shape == want[name].shape, name
            assert torch.allclose(value, want[name], rtol=1e-12, atol=1e-12), name
        if size > 1:
            whole = ROWS * COLUMNS * 8  # bytes of a rank's numbers
            assert (
                sent["dp_cp", "all_reduce", "calls"] == 4
                and sent["dp_cp", "all_reduce", "bytes"] == 4 * whole
            )
            assert sent["dp_cp", "all_gather", "calls"] == 4
            assert sent["dp_cp", "all_gather", "bytes"] == 4 * size * whole  # of the result
            assert sent["dp_cp", "reduce_scatter", "calls"] == 3
            assert sent["dp_cp", "reduce_scatter", "bytes"] == 3 * whole  # of what goes in
            assert sent["dp_cp", "all_to_all", "calls"] == 1 and sent["dp_cp", "all_to_all", "bytes"] == whole
            assert sent["dp_cp", "broadcast", "bytes"] == whole


class AsNccl:
    """The coalesced exchanges of a rank with itself, which give a handle only when it is asked for."""

    def exchange(self, results, messages, options):
        for result, message in zip(results, messages):
            result.copy_(message)
        return "handle" if options.asyncOp else None

    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = exchange


@pytest.mark.parametrize("verb", [comm.gather_each_verb, comm.scatter_each_verb])
def test_nccl_gives_no_handle_of_a_coalesced_exchange_that_is_awaited(verb):
    x = numbers(0, 2, ROWS, COLUMNS)
    for async_op, handle in ((False, None), (True, "handle")):
        out = torch.zeros_like(x)
        assert verb(out, x, AsNccl(), async_op) == handle
        assert torch.equal(out, x)


def uneven(world) -> tuple[torch.Tensor, dict, dict]:
    """Rank r sends r + i + 1 rows to rank i; counted as sent, and as what came."""
    group, ledgers = [], []
    for _ in range(2):
        ledgers.append(Counter())
        group.append(world.group_of_rank("ep", [list(range(world.size))], ledgers[-1]))
    sent = [world.rank + i + 1 for i in range(world.size)]
    came = [i + world.rank + 1 for i in range(world.size)]
    x = numbers(world.rank, sum(sent), COLUMNS)
    results = [comm.start_all_to_all(x, sent, came, group[i], count_sent=not i).wait() for i in range(2)]
    assert torch.equal(*results)
    return results[0], dict(ledgers[0]), dict(ledgers[1])


def test_rows_go_where_they_are_sent(ranks):
    size = 3
    for rank, (found, by_sent, by_came) in enumerate(ranks(size).run(uneven)):
        parts = [numbers(r, sum(r + i + 1 for i in range(size)), COLUMNS) for r in range(size)]
        want = torch.cat([p.split([r + i + 1 for i in range(size)])[rank] for r, p in enumerate(parts)])
        assert torch.equal(found, want)
        rows = sum(rank + i + 1 for i in range(size))
        assert (
            by_sent["ep", "all_to_all", "bytes"] == by_came["ep", "all_to_all", "bytes"] == rows * COLUMNS * 8
        )


def test_what_is_started_in_a_group_of_one_is_in_its_result():
    x, alone = numbers(0), Group("dp")
    gathered, scattered = torch.zeros_like(x), torch.zeros_like(x)
    assert comm.start_all_gather(x, alone, gathered).wait() is gathered
    assert comm.start_reduce_scatter(x, alone, scattered).wait() is scattered
    assert torch.equal(gathered, x) and torch.equal(scattered, x)
    assert comm.start_reduce_scatter(x, alone).wait() is x


def test_rows_of_a_group_of_one_stay():
    x = numbers(0)
    assert comm.start_all_to_all(x, [ROWS], [ROWS], Group("ep")).wait() is x


# ---- autograd pairs ----------------------------------------------------------------------------------------

BATCH, TOKENS = 2, 7  # which two ranks do not divide; 3 give the last rank a single token


def region(world, sequence: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """leave(w_rank * enter(x)), weighted by v: (output, gradient of x)."""
    group = world.group_of_rank("tp", [list(range(world.size))], Counter())
    full = numbers(9, BATCH, 6, 3)
    x = (collectives.local_chunk(full, group) if sequence else full).clone().requires_grad_()
    y = collectives.leave_region(
        collectives.enter_region(x, group, sequence) * (world.rank + 2), group, sequence
    )
    v = numbers(8, BATCH, 6, 3)
    y.backward(collectives.local_chunk(v, group) if sequence else v)
    return y.detach(), x.grad


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_parallel_region(ranks, size, sequence):
    x = numbers(9, BATCH, 6, 3).requires_grad_()
    y = sum((rank + 2) * x for rank in range(size))
    y.backward(numbers(8, BATCH, 6, 3))
    share = 6 // size
    for rank, (out, grad) in enumerate(ranks(size).run(region, sequence)):
        mine = slice(rank * share, (rank + 1) * share) if sequence else slice(None)
        assert torch.allclose(out, y[:, mine], rtol=1e-12) and torch.allclose(
            grad, x.grad[:, mine], rtol=1e-12
        )


def cut_and_joined(world) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sequence that the ranks do not divide, cut, scaled by its rank, and joined: (part, whole,
    gradient).
    """
    group = world.group_of_rank("cp", [list(range(world.size))], Counter())
    x = numbers(9, BATCH, TOKENS, 3).requires_grad_()
    part = collectives.scatter_to_tp(x, group)
    whole = collectives.gather_from_tp(part * (world.rank + 2), group, TOKENS)
    whole.backward(numbers(8, BATCH, TOKENS, 3))
    return part.detach(), whole.detach(), x.grad


@pytest.mark.parametrize("size", [2, 3])
def test_a_sequence_that_the_ranks_do_not_divide(ranks, size):
    x, length = numbers(9, BATCH, TOKENS, 3), -(-TOKENS // size)
    scale = torch.tensor([2.0 + place // length for place in range(TOKENS)], dtype=torch.float64)[:, None]
    for rank, (part, whole, grad) in enumerate(ranks(size).run(cut_and_joined)):
        mine = x[:, rank * length : (rank + 1) * length]
        assert part.shape == (BATCH, length, 3) and torch.equal(part[:, : mine.shape[1]], mine)
        assert not part[:, mine.shape[1] :].any()
        assert torch.allclose(whole, x * scale, rtol=1e-12)
        assert torch.allclose(grad, numbers(8, BATCH, TOKENS, 3) * scale, rtol=1e-12)


# ---- sequences of a microbatch, as one exchange ------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Counts the elements that are copied from one tensor to another."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if any(f"aten.{name}." in str(function) for name in ("copy_", "clone", "cat", "_to_copy", "stack")):
            self.elements += out.numel()
        return out


def of_each_sequence(world: World, b: int, dtype: torch.dtype) -> tuple[bool, int]:
    """(whether gathers and scatters of [b, ...] are those of each sequence alone, elements that were copied
    beyond those of torch's verbs)."""
    ledger = Counter()
    group = world.group_of_rank("tp", [list(range(world.size))], ledger)
    generator = torch.Generator().manual_seed(world.rank)
    part = torch.randn(b, 3, 5, generator=generator).to(dtype)
    whole = torch.randn(b, 3 * world.size, 5, generator=generator).to(dtype)
    with Copies() as own:  # what gloo copies for itself
        each = [
            [comm.all_gather(x, group) for x in part],
            [comm.reduce_scatter(x, group) for x in whole],
            [comm.start_all_gather(x, group, whole[0].clone()).wait() for x in part],
            [comm.start_reduce_scatter(x, group).wait() for x in whole],
        ]
    gathered, scattered = torch.stack(each[0]), torch.stack(each[1])

    ledger.clear()
    with Copies() as copies:
        found = [
            (all_gather_sequence(part, group), gathered),
            (reduce_scatter_sequence(whole, group), scattered),
            (comm.start_all_gather_each(part, group).wait(), gathered),
            (comm.start_reduce_scatter_each(whole, group).wait(), scattered),
        ]
    are_equal = all(torch.equal(got, wanted) and got.is_contiguous() for got, wanted in found)
    calls = {verb: count for (_, verb, what), count in ledger.items() if what == "calls"}
    sizes = {verb: count for (_, verb, what), count in ledger.items() if what == "bytes"}
    nbytes = 2 * whole.nbytes
    is_counted = calls == {"all_gather": 2, "reduce_scatter": 2}
    is_counted &= sizes == {"all_gather": nbytes, "reduce_scatter": nbytes}
    of_results = whole.numel()  # the clones above
    return are_equal and is_counted, copies.elements - (own.elements - of_results)


@pytest.mark.parametrize("b", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sequences_of_a_microbatch_travel_without_copies(ranks, b, dtype):
    for size in (2, 4):
        assert ranks(size).run(of_each_sequence, b, dtype) == [(True, 0)] * size
