"""Many ranks end together: a rank that dies, hangs, raises or is told to stop takes the others with it at
once, and every rank says in one line what happened; its exit_reason.json carries the exit code that torchrun
loses.
"""

import contextlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import pytest
import run_folder
from ranks import MODEL, corpus, job
from waiting import get_state, has_ended, wait_until

import train
from checkpoint.disk import store
from durable.peers import PeerWatch

# for ranks that hang; what dies is found without it
SHORT = ("--parallel.timeout_s", str(5 + 2 * os.getloadavg()[0] / os.cpu_count()))
ROOT = pathlib.Path(__file__).parent.parent
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
    (tmp_path / "run" / "flight").mkdir()
    names = ("exit_reason.json", "exit_reason.rank1.json", "exit_reason.rank9.json")
    for name in (*names, "stacks.rank9.txt", "flight/rank_9"):
        (tmp_path / "run" / name).write_text('{"code": 0, "reason": "finished", "requeue": false, "rank": 0}')


def reasons(tmp_path, world=2):
    """{rank: exit_reason} of the ranks that left one."""
    found = {}
    for rank in range(world):
        with contextlib.suppress(FileNotFoundError):
            found[rank] = run_folder.exit_reason(tmp_path / "run", rank)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, group",
    [
        (("--parallel.tp", "2"), "group tp (ranks 0, 1)"),
        (("--parallel.pp", "2"), "group pp (ranks 0, 1)"),
        (("--parallel.zero", "3"), "dp_shard x cp: ranks 0, 1)"),
    ],
)
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path, args, layout, group):
    end = run(tmp_path, [*args, *layout], fault="step.begin:rank=1:step=3:act=SIGKILL")
    assert end.codes == [1, -9], end.logs
    (line,) = end.errors()
    assert line.startswith("error: rank 0 on ")
    assert "lost the connection in " in line
    assert group in line
    assert "at step 3" in line
    assert "rank 1 on " in line.split("; ")[1] and "is gone" in line
    assert end.seconds < AT_ONCE and reasons(tmp_path)[0]["code"] == 1 and "Traceback" not in end.logs[0]


def test_a_stopped_rank_is_found_named_and_ended(tmp_path, args):
    """Rank 0: what it cannot write any more, the first that missed it does."""
    old_reasons(tmp_path)
    layout = ("--parallel.tp", "2", "--parallel.pp", "2")
    end = run(tmp_path, [*args, *SHORT, *layout], world=4, fault="step.begin:rank=0:step=3:act=SIGSTOP")
    assert end.codes == [-9, 76, 76, 76], end.logs
    lines = end.errors()
    assert [line.split()[2] for line in lines] == ["1", "2", "3"]
    assert all("rank 0 on " in line and "does not respond" in line for line in lines)
    assert all("in group " in line and "no answer for " in line for line in lines)
    assert end.seconds < AT_ONCE
    found = reasons(tmp_path, 4)
    assert {r: x["code"] for r, x in found.items()} == {0: 76, 1: 76, 2: 76, 3: 76}
    assert all(x["requeue"] for x in found.values())
    stacks = sorted(file.name for file in (tmp_path / "run").glob("stacks.*"))
    assert stacks == [f"stacks.rank{rank}.txt" for rank in (1, 2, 3)]
    flights = sorted((tmp_path / "run" / "flight").iterdir())
    assert [file.name for file in flights] == [f"rank_{rank}" for rank in (1, 2, 3)]
    for file in flights:  # torch's own record: each has exchanged with the others
        names = [entry["profiling_name"] for entry in pickle.loads(file.read_bytes())["entries"]]
        assert "gloo:all_reduce" in names
    assert found[0]["rank"] in (1, 2, 3) and not (tmp_path / "run" / "exit_reason.rank9.json").exists()


@pytest.mark.slow
def test_a_killed_first_rank_is_told_of_by_another(tmp_path, args):
    old_reasons(tmp_path)
    end = run(tmp_path, [*args, "--parallel.tp", "2"], fault="step.begin:rank=0:step=3:act=SIGKILL")
    assert end.codes == [-9, 1], end.logs
    job = run_folder.exit_reason(tmp_path / "run")
    assert (job["code"], job["requeue"], job["rank"]) == (1, True, 1) and "rank 0 on " in job["reason"]
    assert not (tmp_path / "run" / "exit_reason.rank9.json").exists()


LAUNCHERS = {
    "launch": ("scripts.launch", "--nproc", "2", "--"),
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"),
}


def make_ranks(launcher):
    """{rank: process id} of the ranks that it has started."""
    found = {}
    for pid in pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with contextlib.suppress(OSError):
            words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found.update({int(word[5:]): int(pid) for word in words if word.startswith(b"RANK=")})
    return found


def last_exchanges(stacks):
    """The lines of stacks.rankN.txt between its head and its threads."""
    return stacks.partition("Last exchanges, the newest at the end:\n")[2].partition("\n\n")[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", list(LAUNCHERS))
def test_a_frozen_host_of_the_store_holds_up_nobody(real_starts, tmp_path, args, how):
    """The launcher, which keeps the store, and rank 0 are stopped, not dead: nothing that rank 1 asks the
    store is ever answered.
    """
    command = [sys.executable, "-m", *LAUNCHERS[how], *args, *SHORT, "--parallel.tp", "2"]
    command += ["--log.dir", str(tmp_path), "--log.name", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT": "step.begin:rank=0:step=3:act=SIGSTOP"}
    log = tmp_path / "log"
    with open(log, "w") as out:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    ranks = {}
    try:
        assert wait_until(lambda: len(make_ranks(launcher.pid)) == 2, 120), log.read_text()
        ranks = make_ranks(launcher.pid)
        assert wait_until(lambda: get_state(ranks[0]) == "T", 120), log.read_text()
        launcher.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert wait_until(lambda: has_ended(ranks[1]), 120), log.read_text()
        assert time.monotonic() - began < float(SHORT[1]) + AT_ONCE

        (line,) = [line for line in log.read_text().splitlines() if line.startswith("error:")]
        assert line.startswith("error: rank 1 on ") and " in group tp (ranks 0, 1) at step 3" in line
        assert "the job's store did not answer" in line
        for reason in reasons(tmp_path).values():
            assert (reason["code"], reason["requeue"], reason["rank"]) == (76, True, 1)
        assert len(reasons(tmp_path)) == 2
        stacks = (tmp_path / "run" / "stacks.rank1.txt").read_text()
        assert stacks.startswith("rank 1 on ") and ": in all_reduce of " in stacks.splitlines()[0]
        assert stacks.splitlines()[0].endswith(" bytes in group tp (ranks 0, 1) at step 3")
        assert " in group tp at step 2, " in last_exchanges(stacks)
        assert "Thread 0x" in stacks and "failure_scope" in stacks
        # its exchange has failed, so no thread is in it any more
        frames, last = stacks.partition("Where its exchange failed:")[2].rstrip().rsplit("\n", 1)
        assert "train.py" in frames and "in run_exchange" in frames
        assert "PeerError: no answer for " in last and " in group tp (ranks 0, 1) at step 3" in last

        os.kill(ranks[0], signal.SIGKILL)
        launcher.send_signal(signal.SIGCONT)
        assert launcher.wait(60) == (76 if how == "launch" else 1)
    finally:
        for pid in [*ranks.values(), launcher.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


@pytest.mark.slow
def test_a_rank_that_hangs_outside_of_any_exchange(tmp_path, args):
    end = run(tmp_path, [*args, *SHORT, "--parallel.tp", "2"], fault="step.begin:rank=1:step=3:act=sleep=100")
    assert end.codes == [76, 76], end.logs
    assert "rank 1 on " in end.errors()[0]
    assert "is in no exchange at step 3" in end.errors()[0]
    assert "faults.py" in end.errors()[0]
    stacks = [(tmp_path / "run" / f"stacks.rank{rank}.txt").read_text() for rank in range(2)]
    assert all(" in group tp at step 2, " in last_exchanges(text) for text in stacks)
    # rank 0 failed in its exchange, and rank 1 is in none: its main thread sleeps where the fault is
    assert " in group tp (ranks 0, 1) at step 3" in stacks[0].splitlines()[0]
    assert "in run_exchange" in stacks[0].partition("Where its exchange failed:")[2]
    assert "in no exchange at step 3" in stacks[1].splitlines()[0]
    assert "Where its exchange failed" not in stacks[1]
    assert "faults.py" in stacks[1] and "in train_loop" in stacks[1]
    assert end.seconds < AT_ONCE


@pytest.mark.slow
def test_a_rank_that_is_slow_to_answer_is_not_killed(tmp_path, args, monkeypatch):
    """As on a machine with more ranks than cores: it says what it does three seconds late, and the first
    rank waits for it.
    """
    describe = PeerWatch.describe_state

    def late(self):
        time.sleep(3)
        return describe(self)

    monkeypatch.setattr(PeerWatch, "describe_state", late)  # ranks are forked from this process
    end = run(tmp_path, [*args, *SHORT, "--parallel.tp", "2"], fault="step.begin:rank=1:step=3:act=sleep=100")
    assert end.codes == [76, 76], end.logs
    assert "is in no exchange at step 3" in end.errors()[0] and "does not respond" not in end.errors()[0]
    assert {x["code"] for x in reasons(tmp_path).values()} == {76} and len(reasons(tmp_path)) == 2
    assert len(list((tmp_path / "run").glob("stacks.rank*.txt"))) == 2


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_less_than_the_timeout_continues(tmp_path, args):
    def wake(pids):
        wait_until(lambda: get_state(pids[1]) == "T")
        time.sleep(1)
        os.kill(pids[1], signal.SIGCONT)

    fault = "step.begin:rank=1:step=3:act=SIGSTOP"
    end = run(tmp_path, [*args, "--parallel.tp", "2"], fault=fault, meanwhile=wake)
    assert end.codes == [0, 0] and not end.errors(), end.logs
    assert [reason["code"] for reason in reasons(tmp_path).values()] == [0, 0]


@pytest.mark.slow
def test_an_exception_on_one_rank_takes_all_out_at_once(tmp_path, args):
    fault = "step.begin:rank=2:step=3:act=raise"
    end = run(tmp_path, [*args, "--parallel.tp", "2", "--parallel.pp", "2"], world=4, fault=fault)
    assert end.codes == [1, 1, 1, 1], end.logs
    assert "InjectedFault: injected at step.begin, step 3" in end.logs[2] and "Traceback" in end.logs[2]
    for rank in (0, 1, 3):
        assert end.logs[rank].count("error:") == 1 and "Traceback" not in end.logs[rank]
        assert "because of rank 2 on " in end.logs[rank]
        assert "InjectedFault: injected at step.begin" in end.logs[rank]
    assert end.seconds < AT_ONCE
    assert {x["code"] for x in reasons(tmp_path, 4).values()} == {1} and len(reasons(tmp_path, 4)) == 4
    assert not any(x["requeue"] for x in reasons(tmp_path, 4).values())  # an error of the code comes again


@pytest.mark.slow
def test_the_cause_decides_every_rank_s_code(tmp_path, args):
    end = run(tmp_path, [*args, "--parallel.tp", "2"], fault="step.begin:rank=1:step=3:act=ENOSPC")
    assert end.codes == [82, 82], end.logs
    assert [reason["code"] for reason in reasons(tmp_path).values()] == [82, 82]


@pytest.mark.slow
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
    assert run(tmp_path, args).codes == [0, 0]  # and continues under another layout
    assert list(run_folder.losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


HANDLED = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")


def torchrun_command(tmp_path, args, *options):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return [*torchrun, *options, "train.py", *args, "--log.dir", str(tmp_path), "--log.name", "run"]


@pytest.mark.slow
def test_a_sigterm_to_torchrun_saves_on_every_rank(tmp_path, args):
    command = torchrun_command(tmp_path, [*args, "--train.steps", "100000"], *HANDLED)
    agent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        rows = tmp_path / "run" / "metrics.jsonl"
        assert wait_until(lambda: rows.exists() and '"step": 2,' in rows.read_text(), 120)
        agent.send_signal(signal.SIGTERM)
        agent.wait(60)
    finally:
        agent.kill()
        agent.wait()
    assert {r: x["code"] for r, x in reasons(tmp_path).items()} == {0: 75, 1: 75}
    (step,) = run_folder.saved_steps(tmp_path / "run")
    assert step >= 2 and step == run_folder.rows(tmp_path / "run")[-1]["step"]


def torchrun(tmp_path, args, *options, fault=""):
    """train.py on two ranks of a real torchrun -> (its exit code, what it and they printed)."""
    done = subprocess.run(
        torchrun_command(tmp_path, args, *options), cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FAULT": fault},
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("handled", [False, True])
def test_a_torchrun_that_passes_no_sigusr1_on_is_told_of(tmp_path, args, handled):
    code, text = torchrun(tmp_path, [*args, "--train.steps", "1"], *(HANDLED if handled else ()))
    assert code == 0, text
    assert text.count("warning: SIGUSR1 would end this torchrun") == (0 if handled else 1)


@pytest.mark.slow
def test_a_store_of_an_earlier_start_is_not_believed(tmp_path, args):
    """torchrun starts the ranks again with the store of those that died, which holds their failure and their
    addresses.
    """
    more = ["--checkpoint.every", "3", "--parallel.tp", "2"]
    fault = "ckpt.pre_purge:rank=0:step=3:act=SIGKILL"
    code, text = torchrun(tmp_path, [*args, *more], "--max-restarts", "1", fault=fault)
    assert code == 0 and text.count("fault ckpt.pre_purge: rank 0 step 3") == 1, text
    assert list(run_folder.losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert {reason["code"] for reason in reasons(tmp_path).values()} == {0}


@pytest.mark.slow
def test_out_of_memory_on_one_rank_is_that_of_all(tmp_path, args):
    more = ("--parallel.tp", "2", "--checkpoint.every", "2")
    end = run(tmp_path, [*args, *more], fault="step.backward:rank=1:step=3:act=ENOMEM")
    assert end.codes == [81, 81], end.logs
    told = "out of memory: MemoryError: injected at step.backward, step 3; "
    assert all(told in line for line in end.errors()) and len(end.errors()) == 2
    assert "the fullest rank holds" in end.logs[1]
    assert [(reason["code"], reason["requeue"]) for reason in reasons(tmp_path).values()] == [(81, False)] * 2
    assert end.seconds < AT_ONCE
    ((step, path),) = store.committed_checkpoints(tmp_path / "run" / "checkpoints")
    assert step == 2 and store.verify(path).step == 2


HANGING = """
import runpy, sys, time
sys.path.insert(0, ".")
from data.indexed import IndexedDataset

read, calls = IndexedDataset.read, []

def hanging(self, *where):
    calls.append(where)
    return time.sleep(1000) if len(calls) > 12 else read(self, *where)

IndexedDataset.read = hanging
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_read_that_never_ends_is_a_hang(tmp_path, args):
    """As on a file system of a server that has gone: one process, whose reader does not come back."""
    words = [*args, "--log.dir", str(tmp_path), "--log.name", "run", *SHORT]
    began = time.monotonic()
    command = [sys.executable, "-c", HANGING, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 76, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "data.path: the samples of step " in line and "were not read in " in line
    reason = reasons(tmp_path, 1)[0]
    assert (reason["code"], reason["requeue"]) == (76, True)
    assert time.monotonic() - began < float(SHORT[1]) + 2 * AT_ONCE


CANARY = "canary-31415926-of-a-token"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["finishes", "raises", "hangs"])
def test_no_secret_is_in_anything_a_run_writes(tmp_path, args, how):
    """Not in its folder, its checkpoints, its stacks, nor what it prints; and errors may quote anything."""

    def before(rank):
        os.environ.update(MY_API_KEY=CANARY, WANDB_API_KEY=CANARY, SOME_PASSWORD=CANARY)
        step_of = train.train_step

        def telling(session, step, *rest, **more):
            if rank == 1 and step == 3 and how == "raises":
                raise RuntimeError(f"login with {os.environ['MY_API_KEY']} was refused")
            return step_of(session, step, *rest, **more)

        train.train_step = telling

    more = ["--parallel.tp", "2", "--checkpoint.every", "2"]
    fault = "step.begin:rank=1:step=3:act=sleep=100" if how == "hangs" else ""
    end = run(tmp_path, [*args, *more, *SHORT], fault=fault, before=before)
    assert end.codes == {"finishes": [0, 0], "raises": [1, 1], "hangs": [76, 76]}[how], end.logs
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 8 and any(path.suffix == ".safetensors" for path in written)
    assert how != "raises" or "login with " in end.logs[0] and "was refused" in end.logs[1]
    assert how != "hangs" or (tmp_path / "run" / "stacks.rank1.txt").exists()
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
