"""Many ranks end together: a rank that dies, hangs, raises or is told to stop takes the others with it at
once, and every rank says in one line what happened; its exit_reason.json carries the exit code that torchrun
loses.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from ranks import MODEL, corpus, job

from checkpoint import store

SHORT = (
    "--parallel.timeout_s",
    str(5 + 2 * os.getloadavg()[0] / os.cpu_count()),
)  # for ranks that hang; what dies is found without it
AT_ONCE = 30.0  # seconds between the first rank's end and the last's; a second on a quiet machine


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    home = tmp_path_factory.mktemp("launch")
    return ["llama3-tiny", *MODEL, "--data.path", corpus(home), "--train.steps", "6"]


def run(tmp_path, args, world=2, **how):
    return job(tmp_path, world, [*args, "--log.dir", str(tmp_path), "--log.name", "run"], **how)


def old_reasons(tmp_path):
    """Left by an earlier start, which had more ranks."""
    (tmp_path / "run").mkdir()
    for name in ("exit_reason.json", "exit_reason.rank1.json", "exit_reason.rank9.json"):
        (tmp_path / "run" / name).write_text('{"code": 0, "reason": "finished", "requeue": false, "rank": 0}')


def reasons(tmp_path, world=2):
    """{rank: exit_reason} of the ranks that left one."""
    files = {
        r: tmp_path / "run" / ("exit_reason.json" if r == 0 else f"exit_reason.rank{r}.json")
        for r in range(world)
    }
    return {r: json.loads(f.read_text()) for r, f in files.items() if f.exists()}


def test_a_job_that_finishes(tmp_path, args):
    end = run(tmp_path, [*args, "--parallel.tp", "2"])
    assert end.codes == [0, 0] and not end.errors(), end.logs
    assert {r["code"] for r in reasons(tmp_path).values()} == {0}


@pytest.mark.parametrize(
    "layout, group",
    [
        (("--parallel.tp", "2"), "group tp (ranks 0, 1)"),
        (("--parallel.pp", "2"), "group pp (ranks 0, 1)"),
        (("--parallel.zero", "3"), "dp_shard x cp: ranks 0, 1)"),
    ],
)
def test_a_killed_rank(tmp_path, args, layout, group):
    end = run(tmp_path, [*args, *layout], fault="step.begin:rank=1:step=3:act=SIGKILL")
    assert end.codes == [1, -9], end.logs
    (line,) = end.errors()
    assert (
        line.startswith("error: rank 0 on ")
        and "lost the connection in " in line
        and group in line
        and "at step 3" in line
    )
    assert "rank 1 on " in line.split("; ")[1] and "is gone" in line
    assert end.seconds < AT_ONCE and reasons(tmp_path)[0]["code"] == 1 and "Traceback" not in end.logs[0]


def test_a_stopped_rank_is_found_named_and_ended(tmp_path, args):
    """Rank 0: what it cannot write any more, the first that missed it does."""
    old_reasons(tmp_path)
    end = run(
        tmp_path,
        [*args, *SHORT, "--parallel.tp", "2", "--parallel.pp", "2"],
        world=4,
        fault="step.begin:rank=0:step=3:act=SIGSTOP",
    )
    assert end.codes == [-9, 76, 76, 76], end.logs
    lines = end.errors()
    assert [line.split()[2] for line in lines] == ["1", "2", "3"] and all(
        "rank 0 on " in line and "no sign of life" in line for line in lines
    )
    assert all("in group " in line and "no answer for " in line for line in lines)
    assert end.seconds < AT_ONCE
    found = reasons(tmp_path, 4)
    assert {r: x["code"] for r, x in found.items()} == {0: 76, 1: 76, 2: 76, 3: 76} and all(
        x["requeue"] for x in found.values()
    )
    assert found[0]["rank"] in (1, 2, 3) and not (tmp_path / "run" / "exit_reason.rank9.json").exists()


def test_a_killed_first_rank_is_told_of_by_another(tmp_path, args):
    old_reasons(tmp_path)
    end = run(tmp_path, [*args, "--parallel.tp", "2"], fault="step.begin:rank=0:step=3:act=SIGKILL")
    assert end.codes == [-9, 1], end.logs
    job = json.loads((tmp_path / "run" / "exit_reason.json").read_text())
    assert (job["code"], job["requeue"], job["rank"]) == (1, True, 1) and "rank 0 on " in job["reason"]
    assert not (tmp_path / "run" / "exit_reason.rank9.json").exists()


def test_a_rank_that_hangs_outside_of_any_exchange(tmp_path, args):
    end = run(tmp_path, [*args, *SHORT, "--parallel.tp", "2"], fault="step.begin:rank=1:step=3:act=sleep=100")
    assert end.codes == [76, 76], end.logs
    assert (
        "rank 1 on " in end.errors()[0]
        and "is in no exchange at step 3" in end.errors()[0]
        and "faults.py" in end.errors()[0]
    )
    assert end.seconds < AT_ONCE


def test_a_rank_that_is_stopped_for_less_than_the_timeout_goes_on(tmp_path, args):
    def wake(pids):
        while "T" not in open(f"/proc/{pids[1]}/stat").read().rpartition(")")[2].split()[0]:
            time.sleep(0.02)
        time.sleep(1)
        os.kill(pids[1], signal.SIGCONT)

    end = run(
        tmp_path, [*args, "--parallel.tp", "2"], fault="step.begin:rank=1:step=3:act=SIGSTOP", meanwhile=wake
    )
    assert end.codes == [0, 0] and not end.errors(), end.logs


def test_an_exception_on_one_rank_takes_all_out_at_once(tmp_path, args):
    end = run(
        tmp_path,
        [*args, "--parallel.tp", "2", "--parallel.pp", "2"],
        world=4,
        fault="step.begin:rank=2:step=3:act=raise",
    )
    assert end.codes == [1, 1, 1, 1], end.logs
    assert "InjectedFault: injected at step.begin, step 3" in end.logs[2] and "Traceback" in end.logs[2]
    for rank in (0, 1, 3):
        assert end.logs[rank].count("error:") == 1 and "Traceback" not in end.logs[rank]
        assert (
            "because of rank 2 on " in end.logs[rank]
            and "InjectedFault: injected at step.begin" in end.logs[rank]
        )
    assert end.seconds < AT_ONCE
    assert {x["code"] for x in reasons(tmp_path, 4).values()} == {1} and len(reasons(tmp_path, 4)) == 4
    assert not any(x["requeue"] for x in reasons(tmp_path, 4).values())  # an error of the code comes again


def test_the_cause_decides_every_rank_s_code(tmp_path, args):
    end = run(
        tmp_path,
        [*args, "--parallel.tp", "2", "--checkpoint.every", "2"],
        fault="step.begin:rank=1:step=3:act=ENOSPC",
    )
    assert end.codes == [82, 82], end.logs
    assert {x["code"] for x in reasons(tmp_path).values()} == {82}


@pytest.mark.parametrize("how", ["file", "SIGTERM", "time"])
def test_two_ranks_stop_at_the_same_step(tmp_path, args, how):
    (tmp_path / "run").mkdir()
    more, fault = ["--parallel.zero", "1"], ""
    if how == "file":
        (tmp_path / "run" / "STOP").touch()
    elif how == "time":
        more += ["--train.max_minutes", "1e-6"]
    else:
        fault = f"step.begin:rank=1:step=3:act={how}"  # one rank alone hears it
    end = run(tmp_path, [*args, *more], fault=fault)
    assert end.codes == [75, 75] and not end.errors(), end.logs
    at = 3 if how == "SIGTERM" else 1
    ((_, path),) = store.committed_checkpoints(tmp_path / "run" / "checkpoints")
    assert store.read_meta(path)["step"] == at and not (tmp_path / "run" / "STOP").exists()
    assert {x["code"] for x in reasons(tmp_path).values()} == {75} and len(reasons(tmp_path)) == 2
    assert run(tmp_path, args).codes == [0, 0]  # and goes on under another layout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == [1, 2, 3, 4, 5, 6]


def test_a_sigterm_to_torchrun_saves_on_every_rank(tmp_path, args):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGUSR1",
        "train.py",
    ]
    agent = subprocess.Popen(
        [*torchrun, *args, "--train.steps", "100000", "--log.dir", str(tmp_path), "--log.name", "run"],
        cwd=pathlib.Path(__file__).parent.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        rows, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (rows.exists() and '"step": 2,' in rows.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        agent.send_signal(signal.SIGTERM)
        agent.wait(60)
    finally:
        agent.kill()
        agent.wait()
    assert {r: x["code"] for r, x in reasons(tmp_path).items()} == {0: 75, 1: 75}
    ((step, _),) = store.committed_checkpoints(tmp_path / "run" / "checkpoints")
    assert step >= 2 and step == json.loads(rows.read_text().splitlines()[-1])["step"]
