"""Who is slow and why: verdicts over tables of times; real ranks of train.py that sleep or are stopped."""

import os
import signal
import socket
import time

import pytest
import run_folder
from ranks import MODEL, corpus, job
from waiting import wait_until

from durable.slow import COLUMNS, COMPUTE, DATA, LINK, STOPPED, PauseClock, SlowRanks, StepShares, summarize
from parallel.topology.dims import ParallelDims
from parallel.wire import comm


def judge(dims, *windows):
    """The verdicts of each window. windows: {(rank or ranks, column): ms}; else 10 of compute."""
    watch = SlowRanks(10, dims, comm.Group("job"), "here")
    watch.measures = True
    watch.begin_phase(dims)
    found = []
    for window in windows:
        rows = [[0.0] * len(COLUMNS) for _ in range(dims.world)]
        for row in rows:
            row[COLUMNS.index("step")], row[COLUMNS.index(COMPUTE)] = 20.0, 10.0
        for (ranks, name), ms in window.items():
            for rank in ranks if isinstance(ranks, tuple) else (ranks,):
                rows[rank][COLUMNS.index(name)] = ms
        found.append([(one.why, one.ranks, one.excess_ms) for one in watch.judge(rows)])
    return found


@pytest.mark.parametrize("why, ms, excess", [(COMPUTE, 18.0, 8.0), (DATA, 8.0, 8.0)])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_rank_is_named_once_it_lasts(why, ms, excess, world):
    slow = {(1, why): ms}
    assert judge(ParallelDims(world), slow, slow, {}, slow) == [[], [(why, (1,), excess)], [], []]


def test_less_than_a_fifth_of_a_step_says_nothing():
    slow = {(1, COMPUTE): 13.9}
    assert judge(ParallelDims(2), slow, slow) == [[], []]


def test_stages_of_a_pipeline_compute_what_they_compute():
    """Ranks 2 and 3 hold the second stage, which always takes longer; in it, rank 3 is slow."""
    dims = ParallelDims(4, pp=2)
    usual = {((2, 3), COMPUTE): 30.0}
    assert judge(dims, usual, usual) == [[], []]
    slow = usual | {(3, COMPUTE): 60.0}
    assert judge(dims, slow, slow)[1] == [(COMPUTE, (3,), 30.0)]


def test_a_stage_alone_is_compared_with_its_past():
    dims = ParallelDims(2, pp=2)
    usual, slow = {(1, COMPUTE): 30.0}, {(1, COMPUTE): 45.0}
    assert judge(dims, usual, usual, usual, slow, slow)[3:] == [[], [(COMPUTE, (1,), 15.0)]]


def test_a_link_is_that_of_the_group_whose_last_rank_waits_too():
    """Ranks 0 and 1 (tp) have a slow link; 2 and 3 wait for them in dp, and so does each for the other."""
    dims = ParallelDims(4, tp=2)
    slow = {((0, 1), "tp"): 9.0, ((2, 3), "tp"): 1.0, ((2, 3), "dp"): 8.0}
    assert judge(dims, slow, slow)[1] == [(LINK, (0, 1), 8.0)]


def test_who_waits_for_a_slow_rank_has_no_slow_link():
    dims = ParallelDims(4, tp=2)
    slow = {(0, COMPUTE): 30.0, (1, "tp"): 20.0, ((2, 3), "dp"): 20.0}
    assert judge(dims, slow, slow)[1] == [(COMPUTE, (0,), 20.0)]


def test_a_stop_is_named_at_once():
    assert judge(ParallelDims(2), {(1, STOPPED): 4000.0}) == [[(STOPPED, (1,), 4000.0)]]
    assert judge(ParallelDims(2), {((0, 1), STOPPED): 4000.0}) == [[]]  # their host did, with both


def test_what_is_left_of_a_step_is_computation():
    shares = [StepShares(step, 20.0, 3.0, 5.0, {"tp": 2.0, "dp": 3.0}) for step in (1, 2, 3)]
    shares[1] = StepShares(2, 999.0, 0.0, 0.0, {})
    row = dict(zip(COLUMNS, summarize(shares, 7.0)))
    assert (row[COMPUTE], row[DATA], row["tp"], row["dp"], row[STOPPED]) == (12.0, 3.0, 2.0, 3.0, 7.0)


@pytest.mark.slow
def test_a_pause_is_counted_and_a_busy_thread_is_none():
    clock = PauseClock()
    time.sleep(0.6)
    assert clock.take() == 0.0
    pid = os.fork()
    if pid == 0:  # stopped by its parent for 2 s
        own = PauseClock()
        time.sleep(3.0)
        os._exit(int(10 * own.take()))
    time.sleep(0.5)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(pid, signal.SIGCONT)
    assert 15 <= os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) < 60
    clock.close()
    assert not clock.thread.is_alive()


# ---- real ranks --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    data = corpus(tmp_path_factory.mktemp("slow"))
    words = ["llama3-tiny", *MODEL, "--data.path", data, "--data.prefetch", "0", "--checkpoint.every", "none"]
    return [*words, "--train.steps", "33", "--log.name", "run"]


def run(tmp_path, args, *more, world=2, fault="", **how):
    """(lines about slow ranks, rows of metrics.jsonl) of a run that ends well."""
    end = job(tmp_path, world, [*args, "--log.dir", str(tmp_path), *more], fault=fault, **how)
    assert end.codes == [0] * world, end.logs
    said = [line for line in end.logs[0].splitlines() if line.startswith("slow ")]
    assert not any("slow " in log for log in end.logs[1:])
    return said, run_folder.steps(tmp_path / "run")


@pytest.mark.slow(core=["step.backward-compute-layout0"])
@pytest.mark.parametrize(
    "point, why, layout",
    [
        ("step.backward", COMPUTE, ()),
        ("step.load", DATA, ()),
        ("step.backward", COMPUTE, ("--parallel.tp", "2")),
    ],
)
def test_a_rank_that_sleeps_is_named_with_the_right_word(tmp_path, args, point, why, layout):
    said, rows = run(tmp_path, args, *layout, fault=f"{point}:rank=1:act=sleep=0.2")
    assert len(said) == 1, said
    assert said[0].startswith(f"slow rank 1 on {socket.gethostname()}: {why} takes ")
    assert said[0].endswith("(steps 12 to 21)")
    found = [row for row in rows if "slow_rank" in row]
    assert [row["step"] for row in found] == [22, 32]
    assert {row["slow_rank"] for row in found} == {1}
    assert all(150 < row[f"slow_{why}_ms"] < 10_000 for row in found)  # a busy machine adds to it


@pytest.mark.slow
def test_an_even_run_says_nothing(tmp_path, args):
    """Every rank sleeps as long: steps long enough that two shared cores do not tell ranks apart."""
    said, rows = run(tmp_path, args, fault="step.backward:act=sleep=0.25")
    assert not said and not any("slow_rank" in row for row in rows)


@pytest.mark.slow
def test_without_a_window_nothing_is_measured(tmp_path, args):
    said, rows = run(tmp_path, args, "--log.slow_window", "none", fault="step.load:rank=1:act=sleep=0.1")
    assert not said and not any("slow_rank" in row for row in rows)


@pytest.mark.slow
def test_a_rank_that_is_stopped_and_continued_is_named_and_nothing_fails(tmp_path, args):
    def stop_for_a_while(pids):
        file = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: file.exists() and '"step": 3,' in file.read_text())
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(4)
        os.kill(pids[1], signal.SIGCONT)

    said, rows = run(
        tmp_path, args, "--parallel.timeout_s", "60", fault="step.backward:act=sleep=0.1", limit=120,
        meanwhile=stop_for_a_while,
    )
    (line,) = [line for line in said if "stopped for" in line]
    assert line.startswith("slow rank 1 on ") and 3 < float(line.split("stopped for ")[1].split(" s")[0]) < 20
    assert len(rows) == 33
