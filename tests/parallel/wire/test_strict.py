"""Strict exchanges: right use gives what the exchange gives, bit for bit; each kind of misuse is seen."""

import dataclasses

import pytest
import torch

from parallel.offload import ActivationOffload, CopyStream, DeferredCopies, staged_chunks
from parallel.wire import comm
from parallel.wire.comm import Group
from parallel.wire.strict import StrictError, StrictMode, poison
from parallel.wire.world import World

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def strict_group(world: World, strict: StrictMode | None) -> Group:
    activity = dataclasses.replace(world.activity, strict=strict)
    return Group("job", tuple(range(world.size)), world.rank, activity=activity)


def numbers(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def started(group: Group) -> list[comm.PendingExchange]:
    """One of each kind."""
    x = numbers(group.index, 2 * group.size)
    counts = [2] * group.size
    return [
        comm.start_all_reduce(x.clone(), group),
        comm.start_all_gather(x.clone(), group, x.new_zeros(group.size * len(x), 5)),
        comm.start_reduce_scatter(x.clone(), group),
        comm.start_all_to_all(x.clone(), counts, counts, group),
        comm.start_all_to_all(x.t().contiguous().t(), counts, counts, group),  # of other strides
    ]


def around(group: Group) -> tuple[torch.Tensor, list[comm.Transfer]]:
    """A message to the next rank, and the buffer of the one from the rank before."""
    received = torch.zeros(3, 5, dtype=torch.float64)
    following, previous = (group.index + 1) % group.size, (group.index - 1) % group.size
    message = numbers(group.index, 3)
    return received, comm.start_transfers([(message, following)], [(received, previous)], group)


def results(world: World, is_strict: bool) -> list[torch.Tensor]:
    strict = StrictMode() if is_strict else None
    group = strict_group(world, strict)
    found = []
    for exchange in started(group):
        early = exchange.result.clone()
        assert not is_strict or bool(early.isnan().all())
        found.append(exchange.wait())
    received, transfers = around(group)
    assert not is_strict or bool(received.isnan().all())
    for transfer in transfers:
        transfer.wait()
    if strict is not None:
        strict.check_all_awaited()
    return [*found, received]


@pytest.mark.parametrize("world", [2, 4])
def test_right_use_gives_the_same_bits(ranks, world):
    for plain, strict in zip(ranks(world).run(results, False), ranks(world).run(results, True)):
        for ours, theirs in zip(plain, strict):
            assert torch.equal(ours, theirs) and not ours.isnan().any()


def misuses(world: World) -> dict[str, str]:
    """{misuse: what strict mode says of it}. Every exchange ends: who leaves early stops the others."""
    found = {}

    def judged(name, strict, wait):
        try:
            wait()
            strict.check_all_awaited()
            found[name] = "nothing"
        except StrictError as error:
            found[name] = str(error)

    for kind, name in enumerate(("all_reduce", "all_gather", "reduce_scatter", "all_to_all")):
        strict = StrictMode()
        exchange = started(strict_group(world, strict))[kind]
        for other in list(strict.under_way.values()):
            if other.title.split()[0] != name:
                other.release()
        if name != "all_reduce":
            assert exchange.source is not None
            exchange.source[-1, -1] += 1
            judged(f"{name}: message", strict, exchange.wait)
        else:
            exchange.result[-1, -1] = 0  # in place: message and result are one
            judged(f"{name}: result", strict, exchange.wait)

    strict = StrictMode()
    group = strict_group(world, strict)
    x = numbers(world.rank, 2)
    gather = comm.start_all_gather(x, group, x.new_zeros(2 * world.size, 5))
    gather.result[0, 0] = float("inf")
    judged("all_gather: result", strict, gather.wait)

    strict = StrictMode()
    group = strict_group(world, strict)
    full = numbers(world.rank, 2 * world.size)
    owned = full[2 * world.rank : 2 * world.rank + 2]
    judged("all_gather: message in its result", strict, comm.start_all_gather(owned, group, full).wait)

    strict = StrictMode()
    group = strict_group(world, strict)
    full = numbers(world.rank, 2 * world.size)
    owned = full[2 * world.rank : 2 * world.rank + 2]
    expected = sum(numbers(rank, 2 * world.size) for rank in range(world.size))
    scatter = comm.start_reduce_scatter(full, group, out=owned)
    judged("reduce_scatter: in place", strict, scatter.wait)
    assert torch.equal(owned, expected[2 * world.rank : 2 * world.rank + 2])

    strict = StrictMode()
    group = strict_group(world, strict)
    counts = torch.tensor([world.rank, 7])  # whole numbers too
    judged("whole numbers", strict, comm.start_all_reduce(counts, group).wait)
    assert counts.tolist() == [sum(range(world.size)), 7 * world.size]

    strict = StrictMode()
    received, transfers = around(strict_group(world, strict))
    received.zero_()
    judged("receive: buffer", strict, lambda: [transfer.wait() for transfer in transfers])

    strict = StrictMode()
    received, transfers = around(strict_group(world, strict))
    for transfer in transfers:
        transfer.handle.wait()  # the exchange ends, and nobody has asked for it
    judged("never awaited", strict, lambda: None)
    return found


def test_misuse_is_named(ranks):
    for found in ranks(2).run(misuses):
        for name in ("all_gather: message", "reduce_scatter: message", "all_to_all: message"):
            verb = name.split(":")[0]
            assert found[name].startswith(f"{verb} in group job (ranks 0, 1)")
            assert found[name].endswith(": a message was written before wait()")
        assert "a message was written before wait()" in found["all_gather: message in its result"]
        assert found["reduce_scatter: in place"] == "nothing"
        for name in ("all_reduce: result", "all_gather: result"):
            assert "a result was written before wait()" in found[name]
        assert found["receive: buffer"].startswith("receive from ")
        assert "2 exchanges were never awaited; the first: send to" in found["never awaited"]
        assert found["whole numbers"] == "nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_is_nan(dtype):
    x = torch.ones(3, 4, dtype=dtype).t()  # of any strides
    version = x._version
    poison(x)
    assert bool(x.float().isnan().all())
    assert x._version == version, "an exchange is no change that autograd knows of"


# ---- copies to and from host memory ------------------------------------------------------------------------


def test_deferred_copies_come_when_they_are_waited_for():
    copies = DeferredCopies()
    source, target, later = torch.arange(6.0), torch.zeros(3), torch.zeros(2)
    copies.copy(target, source[::2])  # of other strides
    event = copies.record_event()
    copies.copy(later, source[:2])
    assert target.isnan().all() and later.isnan().all()
    copies.make_compute_wait(event)
    assert target.tolist() == [0, 2, 4] and later.isnan().all()
    copies.make_compute_wait(event)  # again: nothing
    copies.synchronize()
    assert later.tolist() == [0, 1]


def test_memory_that_is_freed_before_its_copy_is_seen():
    for is_kept in (True, False):
        copies = DeferredCopies()
        source, target = torch.arange(4.0), torch.zeros(4)
        copies.copy(target, source)
        if is_kept:
            copies.keep_memory(source)
        del source
        if is_kept:
            copies.synchronize()
            assert target.tolist() == [0, 1, 2, 3]
        else:
            with pytest.raises(StrictError, match="freed before its copy"):
                copies.synchronize()


def test_chunks_of_optimizer_state_are_the_same():
    hosts = [torch.arange(1000.0), torch.ones(1000)]
    expected = [host * 2 + 1 for host in hosts]
    for copies in (CopyStream(CPU), DeferredCopies()):
        state = [host.clone() for host in hosts]
        for _, parts in staged_chunks(state, CPU, copies, chunk=256):
            for part in parts:
                part.mul_(2).add_(1)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(state, expected))


def test_offloaded_activations_are_the_same():
    def gradient(copies):
        weight = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
        x = torch.linspace(0, 1, 64 * 64).view(64, 64)
        with ActivationOffload(CPU, copies).saving_to_host():
            for _ in range(4):
                x = (x @ weight).tanh()
        x.sum().backward()
        return weight.grad

    assert torch.equal(gradient(CopyStream(CPU)), gradient(DeferredCopies()))
