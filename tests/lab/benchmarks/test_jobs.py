"""Jobs in forked processes: a crash, a hang, too little memory and too little time are told apart."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from lab.benchmarks import jobs
from lab.benchmarks.jobs import OUT_OF_MEMORY, ForkedJob, JobPlace, run_jobs

ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(tmp_path):
    return JobPlace(multiprocessing.get_context("fork"), tmp_path)


def run(place, *some, most=2, seconds=60.0, done=None):
    end = time.monotonic() + seconds
    left = partial(lambda: end - time.monotonic())
    return list(run_jobs(some, place, most=most, seconds_left=left, done=done or {}))


def job(name, function, limit_s=9.0, **more):
    return ForkedJob(name, function, limit_s, **more)


def steps(*actions):
    """A job's function: its rows are a, b, c, ...; each comes after an action of its name."""

    def function(report, done):
        for name, action in zip("abcdef", actions):
            if name not in done:
                report(starting=name)
                action()
                report(row=name, state="ok")

    return function


def nothing():
    pass


def shown(messages):
    """(row, state) of each, and the jobs that are complete."""
    rows = [(message["row"], message["state"]) for message in messages if "row" in message]
    return rows, [message["job"] for message in messages if "complete" in message]


def assert_gone(pid):
    """Within five seconds."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            if open(f"/proc/{pid}/stat").read().split()[2] != "Z":
                time.sleep(0.05)
                continue
        return
    pytest.fail(f"process {pid} lives on")


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "action, problem",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "crashed (SIGKILL)"),
        (partial(os._exit, 3), "exit code 3"),
        (partial(int, "no"), "exit code 1: ValueError: invalid literal"),
        (partial(time.sleep, 600), "hung for 3 s"),
    ],
)
def test_a_row_that_fails_is_wrong_and_the_others_run(place, action, problem):
    limit_s = 3.0 if problem == "hung for 3 s" else 60.0
    messages = run(place, job("x", steps(nothing, action, nothing), limit_s=limit_s))
    rows, complete = shown(messages)
    assert rows == [("a", "ok"), ("b", "wrong"), ("c", "ok")] and complete == ["x"]
    assert messages[1]["problem"].startswith(problem)
    assert (place.logs / "x.log").exists()  # of what was wrong


def test_what_fails_before_a_row_is_tried_once(place):
    def fail(report, done):
        raise OSError("full")

    rows, complete = shown(run(place, job("x", fail), job("y", steps(nothing))))
    assert sorted(rows) == [("a", "ok"), ("x", "wrong")] and sorted(complete) == ["x", "y"]
    assert not (place.logs / "y.log").exists()  # all of it was ok


def test_without_time_a_row_has_no_verdict(place):
    is_in_b = place.logs / "b"
    slow = steps(nothing, lambda: (is_in_b.touch(), time.sleep(600)))
    jobs_of_a_minute = job("x", slow, limit_s=60.0), job("y", slow, limit_s=60.0)
    left = lambda: 0.0 if is_in_b.exists() else 60.0
    begun = time.monotonic()
    messages = list(run_jobs(jobs_of_a_minute, place, most=1, seconds_left=left, done={}))
    assert shown(messages) == ([("a", "ok")], []) and time.monotonic() - begun < 30


def test_rows_that_are_done_are_left_out(place):
    done = {"x": frozenset("a"), "one": frozenset(["one"])}
    boom = job("one", lambda report, done: os.abort())
    rows, complete = shown(run(place, job("x", steps(os.abort, nothing)), boom, done=done))
    assert rows == [("b", "ok")] and sorted(complete) == ["one", "x"]


def test_fewer_layers_come_after_too_little_memory(place):
    def fails(report, done):
        report(row="step", state="wrong", problem=OUT_OF_MEMORY)

    def fits(report, done):
        report(row="step", state="ok", layers=2)

    smaller = job("step", fits)
    messages = run(place, job("step", fails, alternative=smaller), most=1)
    assert [message.get("layers") for message in messages] == [2, None] and "complete" in messages[1]
    rows, complete = shown(run(place, job("step", fails, alternative=job("step", fails))))
    assert rows == [("step", "wrong")] and complete == ["step"]


def test_a_lost_gpu_asks_for_a_new_process(place, monkeypatch):
    def lost():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(jobs.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(jobs.torch.cuda, "synchronize", lost)

    def function(report, done):
        for name in "ab":
            if name not in done:
                report(row=name, state="wrong", pid=os.getpid())
                jobs.begin_again_if_lost(report)

    messages = run(place, job("x", function))
    assert shown(messages) == ([("a", "wrong"), ("b", "wrong")], ["x"])
    assert messages[0]["pid"] != messages[1]["pid"]


def test_what_a_job_started_ends_with_it(place):
    """Also where the caller stops in the middle."""

    def function(report, done):
        child = subprocess.Popen(["sleep", "600"])
        report(row="a", state="ok", pid=child.pid)
        time.sleep(600)

    one = [job("x", function, limit_s=60.0)]
    messages = run_jobs(one, place, most=1, seconds_left=lambda: 60.0, done={})
    pid = next(messages)["pid"]
    messages.close()
    assert_gone(pid)


def test_a_job_does_not_outlive_its_parent(tmp_path):
    """Also one that is killed, and cannot end its jobs."""
    code = (
        "import multiprocessing, os, time; from pathlib import Path; "
        "from lab.benchmarks.jobs import ForkedJob, JobPlace, run_jobs; "
        f"place = JobPlace(multiprocessing.get_context('fork'), Path({str(tmp_path)!r})); "
        "run = lambda report, done: (report(row='a', state='ok', pid=os.getpid()), time.sleep(600)); "
        "job = ForkedJob('x', run, 60.0); "
        "rows = run_jobs([job], place, most=1, seconds_left=lambda: 60.0, done={}); "
        "print(next(rows)['pid'], flush=True); os.kill(os.getpid(), 9)"
    )
    end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert_gone(int(end.stdout))
