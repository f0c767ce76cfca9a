"""Before the first step: a device that multiplies wrongly, a link that loses a bit, and what is slow."""

import time

import pytest
import run_folder
import torch
from ranks import MODEL, corpus, job

from durable import probes, restarts
from parallel.topology.dims import GROUP_AXES, ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire import comm

CPU = torch.device("cpu")
COLUMN = {name: column for column, name in enumerate(GROUP_AXES, start=1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [16, 64, 512])
def test_the_product_is_known_exactly(n, dtype):
    left, right, expected = probes.known_product(n, CPU, dtype)
    by_whole_numbers = left.long() @ right.long()
    assert torch.equal(expected, by_whole_numbers.to(dtype))
    assert expected.unique().numel() > 3
    assert torch.equal(left @ right, expected)


@pytest.mark.parametrize("n", [64, 4096])
def test_every_number_of_the_product_counts(n):
    """A lost element of either matrix is seen, wherever it is not 0."""
    numbers = torch.arange(n, dtype=torch.float64)
    assert ((numbers % 5 - 2) @ (numbers % 7 - 3)) != 0
    left, right, expected = probes.known_product(64, CPU, torch.float64)
    for matrix in (left, right):
        row, column = matrix.nonzero()[17].tolist()
        kept = matrix[row, column].item()
        matrix[row, column] = kept + 1
        assert not torch.equal(left @ right, expected)
        matrix[row, column] = kept


def test_a_device_that_multiplies_wrongly_ends_the_run(monkeypatch):
    sound = probes.known_product

    def flipped(n, device, dtype):
        left, right, expected = sound(n, device, dtype)
        left[3, 5] += 1  # as a unit that is broken
        return left, right, expected

    monkeypatch.setattr(probes, "known_product", flipped)
    with pytest.raises(probes.WrongDevice, match=r"cpu of node7 multiplies wrongly: \d+ of 4,096 elements"):
        probes.probe(Mesh.single(), CPU, torch.float32, "node7")
    assert probes.WrongDevice.exit_code == 80


def test_no_two_messages_are_alike():
    messages = [probes.make_message(rank, 1024) for rank in range(300)]
    assert len({bytes(message.tolist()) for message in messages}) == 300
    assert messages[0].unique().numel() == 256


@pytest.mark.parametrize("size", [2, 8, 1024])
def test_a_large_group_gets_small_messages(monkeypatch, size):
    received = []

    def gather(x, group, out=None):
        if x.numel() > 1:
            received.append(group.size * x.nbytes)
            x = torch.cat([probes.make_message(rank, x.numel()) for rank in group.ranks])
        return x

    monkeypatch.setattr(comm, "all_gather", gather)
    group = comm.Group("world", tuple(range(size)), index=1)
    probes.check_link(group, probes.SIZES["cuda"], CPU, "h")
    assert len(received) == 3 and max(received) <= probes.MAX_GATHERED
    assert received[0] >= min(size * probes.SIZES["cuda"].message, probes.MAX_GATHERED) / 2


def row(product=1.0, **links):
    return [product, *(links.get(name, -1.0) for name in GROUP_AXES)]


def test_a_slow_device_is_named_and_noise_is_not():
    hosts = ["a", "a", "b", "b"]
    assert probes.slow_devices([row(ms) for ms in (1.0, 1.1, 5.9, 0.9)], hosts) == []  # not SLOW_MS more
    assert probes.slow_devices([row(ms) for ms in (10.0, 11.0, 29.0, 12.0)], hosts) == []  # not 3 times
    assert probes.slow_devices([row(ms) for ms in (10.0, 11.0, 41.0, 12.0)], hosts) == [
        "slow rank 2 on b: a product takes 41.0 ms, usually 11.0 ms"
    ]


def test_a_slow_link_is_named_once_by_the_rank_that_came_last():
    mesh = Mesh.without_processes(ParallelDims(8, tp=2), 0)
    rows = [row(tp=2.0, dp=3.0, fsdp=3.0) for _ in range(8)]
    hosts = [f"node{rank // 2}" for rank in range(8)]
    rows[4][COLUMN["tp"]] = 90.0  # it waited for the other one
    assert probes.slow_links(rows, hosts, mesh) == []
    rows[5][COLUMN["tp"]] = 40.0
    assert probes.slow_links(rows, hosts, mesh) == [
        "slow link of ranks 4, 5 on node2: a gather in group tp takes 40.0 ms, usually 2.0 ms"
    ]


# ---- the real program --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    layout = ("--parallel.tp", "2", "--train.steps", "2", "--checkpoint.every", "none")
    return ["llama3-tiny", *MODEL, *layout, "--data.path", corpus(tmp_path_factory.mktemp("probes"))]


def is_probe(x):
    return x.dtype == torch.uint8 and x.numel() == probes.SMALL.message


def on_ranks(chosen, change):
    """before(rank) of a job: there, `change` is made to each probe of a link that is gathered."""
    def before(rank):
        gather = comm.all_gather

        def changed(x, group, out=None):
            if rank in chosen and is_probe(x):
                x = change(x, group)
            return gather(x, group, out)

        comm.all_gather = changed

    return before


def test_a_link_that_loses_a_bit_ends_the_job_before_the_first_step(tmp_path, args):
    def lose(x, group):
        x = x.clone()
        x[700] ^= 4
        return x

    run = [*args, "--log.dir", str(tmp_path), "--log.name", "run"]
    end = job(tmp_path, 4, run, before=on_ranks({3}, lose))
    assert 80 in end.codes and set(end.codes) <= {80, -15}, end.logs  # the launcher ends who is late
    reason = run_folder.exit_reason(tmp_path / "run")
    assert restarts.ranks_with_wrong_devices(tmp_path / "run") == set()  # nobody knows which of the two it is
    assert reason["code"] == 80 and "from rank 3 is not what was sent" in reason["reason"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_slow_link_is_named_and_the_run_continues(tmp_path, args):
    def delay(x, group):
        time.sleep(0.4 if group.name == "tp" else 0.0)
        return x

    run = [*args, "--log.dir", str(tmp_path), "--log.name", "run"]
    end = job(tmp_path, 4, run, before=on_ranks({2, 3}, delay))
    assert end.codes == [0] * 4, end.logs
    named = [line for line in end.logs[0].splitlines() if "slow link of ranks 2, 3" in line]
    assert len(named) == 1 and "a gather in group tp takes" in end.logs[0]
    assert "slow" not in "".join(end.logs[1:])
