"""The preflight: real ranks over gloo, each a node of its own, and each check where something is wrong."""

import argparse
import json
import os
import pathlib
import re
import time

import pytest
import torch
from ranks import End, job

import scripts.preflight as preflight
from parallel.wire import comm
from runtime.failure import fail_cleanly

WORDS = ("--disk-mb", "1", "--min-mb-s", "0", "--min-free-gb", "0", "--max-skew", "60")


def run(home: pathlib.Path, *words: str, nodes: int = 3, before=lambda rank: None) -> End:
    """One rank a node, which are named as SLURM names them. before(rank): called in each rank."""
    def begin(rank):
        os.environ.update(SLURMD_NODENAME=f"node{rank}", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        torch.set_num_threads(1)
        before(rank)

    words = (*WORDS, "--folder", str(home / "runs"), *words)
    return job(home, nodes, words, before=begin, main=preflight.main)


def ended_with(code: int, end: End) -> bool:
    """A launcher ends the others when the first has ended."""
    return code in end.codes and set(end.codes) <= {code, -15}


def test_good_nodes_are_a_row_each(tmp_path):
    end = run(tmp_path)
    assert end.codes == [0, 0, 0], end.logs
    head, *rows, last = end.logs[0].splitlines()
    assert head.split()[:3] == ["node", "ranks", "device"] and last == "good     3 nodes, 3 ranks"
    assert [row.split()[0] for row in rows] == ["node0", "node1", "node2"]
    assert all(row.split()[-1] == "-" for row in rows) and end.logs[1:] == ["", ""]
    assert not list((tmp_path / "runs").iterdir())


def flipped(chosen, verb):
    """before(rank): what the chosen rank puts into an exchange has another bit."""
    def before(rank):
        if rank != chosen:
            return
        if verb == "sum":
            reduce = comm.all_reduce_sum
            comm.all_reduce_sum = lambda x, group: reduce(x + (torch.arange(len(x)) == 77), group)
        else:
            start = comm.start_transfers

            def changed(sends, receives, group):
                return start([(x ^ 4, target) for x, target in sends], receives, group)

            comm.start_transfers = changed

    return before


def test_a_wrong_link_names_the_node_in_the_most_wrong_pairs(tmp_path):
    end = run(tmp_path, nodes=4, before=flipped(2, "link"))
    assert ended_with(80, end), end.logs
    *_, problem, exclude = end.logs[0].splitlines()
    assert problem.startswith("problem  node2: link: messages between it and node0, node3 arrive wrong; ")
    assert exclude == "exclude: [node2]"


def test_a_wrong_sum_is_seen_by_all(tmp_path):
    end = run(tmp_path, before=flipped(1, "sum"))
    assert ended_with(80, end), end.logs
    assert "problem  all nodes: sum: a sum over all ranks is wrong; leave out whom" in end.logs[0]
    assert "exclude" not in end.logs[0]


def test_a_folder_that_a_node_cannot_write_is_a_problem_of_storage(tmp_path):
    """Full or read-only: the error of the system counts."""
    def before(rank):
        if rank == 1:
            real = preflight.time_file

            def full(path, block, blocks):
                real(path, block, blocks)
                raise OSError(28, "No space left on device")

            preflight.time_file = full

    end = run(tmp_path, before=before)
    assert ended_with(82, end), end.logs
    (line,) = [line for line in end.logs[0].splitlines() if line.startswith("problem")]
    assert line.startswith(f"problem  node1: disk: {tmp_path}/runs: No space left on device; make room, or")
    assert end.logs[0].endswith("exclude: [node1]\n") and not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("words, says", [
    (("--min-mb-s", "1e9"), r"writes \d+ MB/s, less than 1e\+09 \(--min-mb-s\); checkpoints would hold up"),
    (("--min-free-gb", "1e9"), r"[\d.]+ GiB free, less than 1e\+09 \(--min-free-gb\); make room"),
])
def test_a_disk_that_is_slow_or_full(tmp_path, words, says):
    end = run(tmp_path, *words, nodes=2)
    assert ended_with(82, end) and re.search(f"problem  node0: disk: {tmp_path}/runs: {says}", end.logs[0])
    assert "exclude: [node0, node1]\n" in end.logs[0]


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "runs").write_text("")
    end = run(tmp_path, nodes=2)
    assert ended_with(82, end) and "disk: " in end.logs[0] and "File exists" in end.logs[0]


def test_a_node_that_sees_another_folder(tmp_path):
    def before(rank):
        if rank == 1:
            real = preflight.check_token
            preflight.check_token = lambda folder, token: real(tmp_path / "other", token)

    end = run(tmp_path, nodes=2, before=before)
    assert ended_with(82, end)
    assert f"problem  node1: disk: {tmp_path}/runs is not the folder that the first node sees" in end.logs[0]


def test_a_disk_that_reads_back_other_bytes(tmp_path, monkeypatch):
    fsync = os.fsync

    def damage(fd):
        os.pwrite(fd, b"x", 1000)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", damage)
    problems: list[list[str]] = []
    args = argparse.Namespace(folder=tmp_path, disk_mb=2, min_mb_s=0.0, min_free_gb=0.0)
    preflight.measure_disk(args, problems)
    ((kind, text),) = problems
    assert kind == "disk" and "a file reads back other bytes than were written" in text


def test_a_clock_that_is_off_names_its_node(tmp_path):
    def before(rank):
        if rank == 2:
            real = time.time
            time.time = lambda: real() + 3600

    end = run(tmp_path, before=before)
    assert ended_with(80, end), end.logs
    (line,) = [line for line in end.logs[0].splitlines() if line.startswith("problem")]
    assert re.match(r"problem  node2: clock: its clock is 3[56]\d\d\.\d s ahead; start its time", line)


def test_a_device_that_multiplies_wrongly(tmp_path):
    def before(rank):
        if rank == 1:
            known = preflight.probes.known_product

            def wrong(n, device, dtype):
                left, right, expected = known(n, device, dtype)
                expected[3, 5] += 1
                return left, right, expected

            preflight.probes.known_product = wrong

    end = run(tmp_path, nodes=2, before=before)
    assert ended_with(80, end)
    assert "problem  node1: device: cpu of node1 multiplies wrongly: 1 of 4,096 elements" in end.logs[0]


def test_a_node_without_a_gpu_among_others(tmp_path):
    """Ranks then meet without GPUs, and the rest is checked."""
    def before(rank):
        torch.cuda.device_count = lambda: 0 if rank == 1 else 1

    end = run(tmp_path, "--json", before=before)
    assert ended_with(80, end), end.logs
    told = json.loads(end.logs[0])
    assert told["exclude"] == ["node1"] and [problem["kind"] for problem in told["problems"]] == ["gpu"]
    assert set(told["nodes"]) == {"node0", "node1", "node2"}


def test_a_gpu_whose_memory_another_process_holds(tmp_path, monkeypatch):
    """On a device that says it is a GPU: the rest of the checks run on the CPU."""
    class Device:
        type = "cuda"

    for name, value in (("get_device_name", lambda device: "H100"),
                        ("mem_get_info", lambda device: (20 * 2**30, 80 * 2**30))):
        monkeypatch.setattr(torch.cuda, name, value)
    good = {"wrong_sums": 0, "exchange_in_pairs": ([], 1.0), "check_folder": [], "read_clock": 0.0}
    for name, result in good.items():
        monkeypatch.setattr(preflight, name, lambda *_, result=result: result)
    monkeypatch.setattr(preflight.probes, "check_product", lambda *_: 1.0)
    args = argparse.Namespace(folder=tmp_path, disk_mb=1, min_mb_s=0.0, min_free_gb=0.0)
    report = preflight.measure(args, comm.Group("job", (0,), 0), Device())
    ((kind, text),) = report.problems
    assert kind == "gpu" and text.startswith("20.0 of 80.0 GiB of ") and report.gpu_free == 20.0


@pytest.mark.parametrize("option, value, says", [
    ("--disk-mb", "0", "0; at least 1"),
    ("--min-mb-s", "nan", "nan; a number of at least 0"),
    ("--min-free-gb", "-1", "-1; a number of at least 0"),
    ("--max-skew", "-1", "-1; a number of at least 0"),
])
def test_a_bound_that_bounds_nothing_is_refused(capsys, option, value, says):
    assert fail_cleanly(preflight.main, [option, value]) == 2
    assert capsys.readouterr().err == f"error: {option}: {says}\n"


def test_one_process_is_a_node_alone(tmp_path, capsys):
    assert preflight.main([*WORDS, "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("good     1 node, 1 rank\n")
