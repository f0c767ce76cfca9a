"""scripts/launch.py and durable/launcher.py: stand-ins that end as they are told to, and real ranks; what the
launcher prints, its exit code, and who is left.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import run_folder
import zygote
from ranks import MODEL, corpus
from waiting import has_ended, wait_until

from durable import launcher
from durable.launcher import Node, RankEnd, StartWatch
from durable.relay import SignalRelay
from durable.spares import Spares
from runtime.stop import SIGNALS
from scripts import launch

ROOT = pathlib.Path(__file__).parent.parent.parent
# ranks that take a moment, and end with the code at their place, or by the signal where it is negative
RANK = """
import os, signal, sys, time
codes = [int(code) for code in sys.argv[1].split(",")]
rank = int(os.environ["RANK"])
time.sleep(rank)
code = codes[rank]
if code < 0:
    os.kill(os.getpid(), -code)
print(f"rank {rank} of {os.environ['WORLD_SIZE']} says {code}", flush=True)
sys.exit(code)
"""


def run_stand_ins(codes, program=RANK, **node):
    """The ends of ranks on this node, without a store: stand-ins need none."""
    node = Node(**{"nproc": len(codes), "nnodes": 1, "node_rank": 0, "host": "127.0.0.1", "port": 1, **node})
    command = [sys.executable, "-c", program, ",".join(map(str, codes))]
    with SignalRelay() as relay:
        return launcher.run_ranks(node, None, command, StartWatch(relay))


# ---- the pairs of a line and a code ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codes, code, words",
    [
        ([0, 0], 0, "2 ranks ended with code 0 after 0s: finished"),
        ([1, 1], 1, "code 1 after 0s: an error, or a lost rank"),
        ([2, 2], 2, "code 2 after 0s: a mistake, named above"),
        ([75, 75], 75, "code 75 after 0s: stopped early, everything is saved; the same command resumes"),
        ([76, 76], 76, "code 76 after 0s: a hang"),
        ([77, 77], 77, "code 77 after 0s: loss or gradient stayed non-finite"),
        ([79, 79], 79, "code 79 after 0s: a file is damaged"),
        ([80, 80], 80, "code 80 after 0s: replicas differ"),
        ([81, 81], 81, "code 81 after 0s: out of memory"),
        ([82, 82], 82, "code 82 after 0s: the storage fails"),
        ([-9, 1], 1, "begins with 'error:' says which; rank 0 was ended by SIGKILL"),
        ([-9, 76, 76], 76, "a hang; what was waited for is named above; rank 0 was ended by SIGKILL"),
        ([-9], 137, "1 rank ended with code 137 after 0s; rank 0 was ended by SIGKILL"),
        ([-15, -15], 143, "rank 0 was ended by SIGTERM; rank 1 was ended by SIGTERM"),
        ([75, 0], 75, "stopped early"),
        ([75, 82], 82, "the storage fails"),  # who has saved is stopped early, who has not decides
        ([0, -11], 139, "rank 1 was ended by SIGSEGV"),
        ([99], 99, "1 rank ended with code 99 after 0s"),
    ],
    ids=str,
)
def test_the_code_and_its_line(codes, code, words):
    ends = [RankEnd(rank, code) for rank, code in enumerate(codes)]
    assert launcher.exit_code(ends) == code
    line = launcher.closing_line(ends, 0.2, code)
    assert words in line and line.startswith("launch: ") and "\n" not in line, line


@pytest.mark.parametrize(
    "codes, stopped, code",
    [
        ([-15, -15], (0, 1), 75),
        ([-15, 1], (0,), 75),  # it lost the connection to the one that had nothing to save yet
        ([75, -10], (1,), 75),
        ([-15, 82], (0,), 82),
        ([-15, -9], (0,), 75),
        ([130, 130], (0, 1), 75),
        ([-15, -15], (), 143),
    ],
)
def test_the_code_of_ranks_that_are_stopped_before_they_can_save(codes, stopped, code):
    ends = [RankEnd(rank, code, stopped=rank in stopped) for rank, code in enumerate(codes)]
    assert launcher.exit_code(ends) == code and not any(end.is_lost for end in ends if end.stopped)


def test_every_code_of_the_pages_has_a_meaning():
    text = (ROOT / "docs" / "training.md").read_text()
    table = text.split("| code | meaning |")[1].split("\n\n")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)} == set(launcher.MEANINGS)


def test_the_closing_line_gives_minutes_from_one_on():
    assert "after 3m20s:" in launcher.closing_line([RankEnd(0, 0)], 200.4, 0)
    assert "after 59s:" in launcher.closing_line([RankEnd(0, 0)], 59.2, 0)


# ---- processes ---------------------------------------------------------------------------------------------


def test_the_ends_are_in_the_order_of_ranks_and_all_are_heard(capfd):
    assert run_stand_ins([3, 0, 75]) == [RankEnd(0, 3), RankEnd(1, 0), RankEnd(2, 75)]
    out = capfd.readouterr().out
    assert sorted(out.splitlines()) == ["rank 0 of 3 says 3", "rank 1 of 3 says 0", "rank 2 of 3 says 75"]


def test_what_does_not_end_after_a_failure_is_killed_with_its_children(monkeypatch, tmp_path):
    """And not before its time is over."""
    monkeypatch.setattr(launcher, "FAILURE_SECONDS", 1.5)
    program = f"""
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "0":
    sys.exit(82)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    began = time.monotonic()
    ends = run_stand_ins([0, 0], program)
    assert ends == [RankEnd(0, 82), RankEnd(1, -signal.SIGKILL)] and launcher.exit_code(ends) == 82
    assert 1.5 <= time.monotonic() - began < 30
    assert wait_until(lambda: has_ended(int((tmp_path / "child").read_text())), 20)


def test_who_has_stopped_early_has_the_others_killed_never(monkeypatch):
    """They may write for longer than a failed job has time."""
    monkeypatch.setattr(launcher, "FAILURE_SECONDS", 0.0)
    assert run_stand_ins([75, 0, 0]) == [RankEnd(0, 75), RankEnd(1, 0), RankEnd(2, 0)]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signals_are_passed_on_to_every_rank(number, tmp_path):
    program = f"""
import os, pathlib, signal, sys, time
signal.signal({int(number)}, lambda *_: sys.exit(75))
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).touch()
time.sleep(60)
"""
    before = signal.getsignal(number)
    sender = subprocess.Popen(
        ["bash", "-c", f"until [ -e {tmp_path}/0 ] && [ -e {tmp_path}/1 ]; do sleep 0.05; done; "
         f"kill -{int(number)} {os.getpid()}"]
    )
    ends = run_stand_ins([0, 0], program)
    sender.wait()
    assert {end.code for end in ends} == {75} and len(ends) == 2
    assert signal.getsignal(number) is before


def test_a_signal_reaches_a_rank_that_is_just_being_started(monkeypatch, tmp_path):
    """It comes before the launcher knows the rank's process."""
    program = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
pathlib.Path({str(tmp_path)!r}, "ready").touch()
time.sleep(20)
"""

    class Slow(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            while not (tmp_path / "ready").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(launcher.subprocess, "Popen", Slow)
    assert run_stand_ins([0], program) == [RankEnd(0, 75)]


# ---- train.py ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    home = tmp_path_factory.mktemp("launcher")
    return ["llama3-tiny", *MODEL, "--data.path", corpus(home)]


def start(folder, options, words, fault=""):
    """The launcher in this folder, which is not the checkout."""
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.launch", *options, "--", *words, "--log.name", "r", "--log.dir", "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FAULT": fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(launcher):
    """(exit code, what was printed, lines on stderr)"""
    try:
        out, err = launcher.communicate(timeout=240)
    finally:
        launcher.kill()
    return launcher.returncode, out, [line for line in err.splitlines() if not line.startswith("fault ")]


def wait_for_step(folder, launcher, step=2):
    rows, deadline = folder / "r" / "metrics.jsonl", time.monotonic() + 200
    while not (rows.exists() and f'"step": {step},' in rows.read_text()):
        assert time.monotonic() < deadline and launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)


def make_ranks(launcher):
    return zygote.children_of(launcher.pid)


def listening(pid):
    """Addresses at which a process listens, as /proc/net/tcp and tcp6 have them."""
    inodes = set()
    for file in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.slow
def test_two_ranks_train_and_nothing_listens_to_the_network_and_a_signal_saves(tmp_path, words):
    launcher = start(tmp_path, ["--nproc", "2"], [*words, "--parallel.tp", "2", "--train.steps", "100000"])
    wait_for_step(tmp_path, launcher)
    heard = [listening(pid) for pid in (launcher.pid, *make_ranks(launcher))]
    launcher.send_signal(signal.SIGTERM)
    code, out, errors = finished(launcher)
    assert code == 75 and "stopped" in out, (out, errors)
    assert len(heard) == 3 and heard[0] and set().union(*heard) <= {"0100007F"}, heard  # 127.0.0.1
    assert len(errors) == 1
    assert re.fullmatch(r"launch: 2 ranks ended with code 75 after .*: stopped early, .*", errors[0])

    launcher = start(tmp_path, ["--nproc", "2"], [*words, "--train.steps", "3"])  # fewer: other settings
    code, out, errors = finished(launcher)
    assert code == 2 and len(errors) == 2 and errors[0].startswith("error: "), errors
    assert re.fullmatch(r"launch: 2 ranks ended with code 2 after .*: a mistake, named above", errors[1])


@pytest.mark.slow
def test_a_ctrl_c_that_also_ends_the_reader_of_the_pipe_saves(tmp_path, words):
    """As of `2>&1 | tee log`: what the launcher and the ranks still say has no reader."""
    launcher = start(tmp_path, ["--nproc", "2"], [*words, "--train.steps", "100000"])
    wait_for_step(tmp_path, launcher)
    launcher.stdout.close()
    launcher.stderr.close()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 75
    assert run_folder.exit_reason(tmp_path / "r")["code"] == 75
    assert list((tmp_path / "r" / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_a_failure_whose_line_nobody_reads_still_leaves_its_reason(tmp_path, words):
    fault = "step.begin:rank=1:step=60:act=raise"
    launcher = start(tmp_path, ["--nproc", "2"], [*words, "--train.steps", "100000"], fault=fault)
    wait_for_step(tmp_path, launcher)
    launcher.stdout.close()
    launcher.stderr.close()
    assert launcher.wait(60) == 1
    own = run_folder.exit_reason(tmp_path / "r", rank=1)
    assert own["code"] == 1 and "InjectedFault" in own["reason"]
    job = run_folder.exit_reason(tmp_path / "r")
    assert job["code"] == 1 and "rank 1" in job["reason"]


@pytest.mark.slow
def test_a_job_that_finishes_and_a_mistake_that_only_ranks_can_see(tmp_path, words):
    code, out, errors = finished(start(tmp_path, ["--nproc", "2"], [*words, "--train.steps", "2"]))
    assert code == 0 and "done" in out and len(errors) == 1 and "code 0" in errors[0], (out, errors)
    code, out, errors = finished(start(tmp_path, ["--nproc", "2"], [*words, "--parallel.tp", "4"]))
    assert code == 2 and len(errors) == 2 and "parallel.tp" in errors[0] and "code 2" in errors[1], errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, code, line",
    [
        ("step.begin:rank=1:step=2:act=SIGKILL", 1, "lost the connection"),
        ("step.begin:rank=1:step=2:act=SIGSTOP", 76, "does not respond"),
        ("step.begin:rank=1:step=2:act=ENOSPC", 82, "ENOSPC|No space left"),
    ],
)
def test_a_failure_is_told_once_by_its_rank_and_by_the_code(tmp_path, words, fault, code, line):
    seconds = str(5 + 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
    arguments = [*words, "--parallel.tp", "2", "--train.steps", "6", "--parallel.timeout_s", seconds]
    ended, _, errors = finished(start(tmp_path, ["--nproc", "2"], arguments, fault))
    assert ended == code, errors
    assert re.search(line, errors[0]) and errors[0].startswith("error: rank "), errors
    assert f"code {code} after" in errors[-1] and "Traceback" not in "\n".join(errors)
    assert len(errors) <= 3  # a line of each rank, and that of the launcher


@pytest.mark.slow(core=["before they look for their parent"])
@pytest.mark.parametrize("is_training", [False, True], ids=["before they look for their parent", "in a step"])
def test_ranks_die_with_a_launcher_that_is_killed(tmp_path, words, is_training):
    launcher = start(tmp_path, ["--nproc", "2"], [*words, "--train.steps", "100000"])
    if is_training:
        wait_for_step(tmp_path, launcher)
    else:  # python and torch are still being loaded
        assert wait_until(lambda: len(make_ranks(launcher)) == 2, 100)
    ranks = make_ranks(launcher)
    launcher.kill()
    assert len(ranks) == 2 and wait_until(lambda: all(map(has_ended, ranks)), 20)
    finished(launcher)


@pytest.mark.slow
def test_two_nodes_meet_at_an_address_of_the_first(tmp_path, words):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [*words, "--train.steps", "2", "--parallel.zero", "1"]
    options = ["--nproc", "1", "--nnodes", "2", "--rdzv", address, "--node-rank"]
    nodes = [start(tmp_path, [*options, str(rank)], arguments) for rank in (1, 0)]
    ends = [finished(launcher) for launcher in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert ends[0][2] == [] and "launch: 1 rank ended with code 0" in ends[1][2][-1]  # node 0 says it for all


# ---- elastic jobs ------------------------------------------------------------------------------------------

# ranks of start N do what the plan says: N-th of the list {rank: signal or code}; and rank 0 saves a step
ELASTIC_RANK = """
import json, os, pathlib, signal, sys, time
run, plan = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
told = [start, rank, os.environ["WORLD_SIZE"], os.environ["CUDA_VISIBLE_DEVICES"]]
with open(run / "starts", "a") as file:
    file.write(json.dumps(told) + "\\n")
act = plan[min(start, len(plan) - 1)]
if rank in act.get("wrong", []):
    reason = {"code": 80, "requeue": True, "rank": rank, "wrong_device": True}
    (run / f"exit_reason.rank{rank}.json").write_text(json.dumps(reason))
if rank == 0 and act.get("save"):
    (run / "checkpoints" / f"step_{act['save']:08d}").mkdir(parents=True)
time.sleep(act.get("starts", 0))
if act.get("waits"):
    if act.get("stopped"):
        (run / "exit_reason.json").write_text('{"code": 75, "requeue": false}')
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    time.sleep(act.get("lives", 60))
code = act.get(str(rank), act.get("others", 0))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def elastic_run(folder, span, plan, *words, regrow=()):
    """(exit code, [[start, rank, world, GPUs] of each rank]) of a job with stand-ins."""
    run = folder / "r"
    run.mkdir()
    options = launch.arguments().parse_args(["--nproc", span, *regrow, "--", "llama3-tiny"])
    words = ["llama3-tiny", "--log.dir", str(folder), "--log.name", "r", "--train.global_batch", "8", *words]
    command = [sys.executable, "-S", "-c", ELASTIC_RANK, str(run), json.dumps(plan)]
    with SignalRelay() as relay:
        code = launcher.run_elastic(options, words, command, relay, Spares([], 0))
    return code, sorted(map(json.loads, (run / "starts").read_text().splitlines()))


def test_three_restarts_in_a_row_without_a_newer_checkpoint_end_the_job(tmp_path, capsys):
    """The second start saves, so three more follow it."""
    code, starts = elastic_run(tmp_path, "1:1", [{"0": -9}, {"0": -11, "save": 5}, {"0": -7}])
    assert code == 128 + 7 and [start for start, *_ in starts] == [0, 1, 2, 3, 4]
    lines = [line for line in capsys.readouterr().err.splitlines() if "ended with" not in line]
    assert lines[0] == "launch: restart 1, from the beginning: 1 rank -> 1 rank"
    assert lines[1:4] == [f"launch: restart {n}, from step 5: 1 rank -> 1 rank" for n in (2, 3, 4)]
    assert lines[4:] == ["launch: 3 restarts in a row produced no newer checkpoint: the job ends"]


def test_places_of_lost_ranks_stay_out_as_long_as_enough_remain(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    plan = [{"1": -9, "others": 1, "save": 2}, {"0": -9, "others": 1, "save": 4}, {"others": 0}]
    code, starts = elastic_run(tmp_path, "2:4", plan, "--train.micro_batch", "1")
    assert code == 0
    assert starts[:4] == [[0, rank, "4", "4,5,6,7"] for rank in range(4)]
    assert starts[4:6] == [[1, rank, "2", "4,6"] for rank in range(2)]  # three ranks do not divide the batch
    assert starts[6:] == [[2, rank, "2", "6,7"] for rank in range(2)]
    errors = capsys.readouterr().err
    assert "from step 2: 4 ranks (dp4) -> 2 ranks (dp2), without place 1 of this node" in errors
    assert "from step 4: 2 ranks (dp2) -> 2 ranks (dp2), without places 0, 1 of this node" in errors


def test_a_place_that_the_layout_cannot_use_is_a_spare(tmp_path, capsys):
    """Three ranks do not divide a batch of 8: two train, and the third place takes over."""
    code, starts = elastic_run(tmp_path, "2:3", [{"0": -9, "others": 1, "save": 2}, {}])
    assert code == 0 and [place for *_, place in starts] == ["0,1", "0,1", "1,2", "1,2"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "launch: 2 of 3 ranks: as many as the layout can use"
    assert "2 ranks (dp2) -> 2 ranks (dp2), without place 0 of this node" in lines[2]


@pytest.mark.slow
def test_a_place_whose_device_computes_wrongly_stays_out(tmp_path, capsys):
    """Also where others that were lost must be used again, and when the job grows."""
    plan = [
        {"wrong": [1], "others": 80},
        {"0": -9, "others": 1, "save": 2},
        {"0": -9, "others": 1, "save": 4},  # too few remain: all that are sound
        {"0": -9, "others": 1, "save": 6},
        {"waits": True},
        {},
    ]
    words = ("--train.micro_batch", "1", "--train.global_batch", "12")
    code, starts = elastic_run(tmp_path, "2:4", plan, *words, regrow=("--regrow", "0.05"))
    assert code == 0
    used = {start: places for start, _, _, places in starts}
    assert used == {0: "0,1,2,3", 1: "0,2,3", 2: "2,3", 3: "0,2,3", 4: "2,3", 5: "0,2,3"}
    lines = [line for line in capsys.readouterr().err.splitlines() if "launch: restart" in line]
    wrong = "(of place 1 the device computes wrongly)"
    assert lines[0].endswith(f"4 ranks (dp4) -> 3 ranks (dp3), without place 1 of this node {wrong}")
    assert lines[1].endswith(f"3 ranks (dp3) -> 2 ranks (dp2), without places 0, 1 of this node {wrong}")
    assert lines[2].endswith(f"2 ranks (dp2) -> 3 ranks (dp3), without place 1 of this node {wrong}")


def test_too_few_sound_places_end_the_job_with_80(tmp_path, capsys):
    code, starts = elastic_run(tmp_path, "2:3", [{"wrong": [0], "others": 80}, {"wrong": [1], "others": 80}])
    assert code == 80 and [start for start, *_ in starts] == [0, 0, 1, 1]
    assert capsys.readouterr().err.splitlines()[-1] == (
        "launch: no restart, without places 0, 2 of this node (of places 0, 2 the device computes wrongly): "
        "--nproc: fewer than 2 places of this node compute correctly"
    )


def test_too_few_that_remain_make_all_places_start_again(tmp_path):
    code, starts = elastic_run(tmp_path, "2:2", [{"1": -9, "others": 1, "save": 2}, {}])
    assert code == 0 and [[start, rank] for start, rank, *_ in starts] == [[0, 0], [0, 1], [1, 0], [1, 1]]


@pytest.mark.slow
def test_a_job_that_no_place_would_make_larger_is_not_stopped_to_grow(tmp_path):
    """Three ranks do not divide the batch: without the lost place there are as many as the layout can use."""
    plan = [{"0": -9, "others": 1, "save": 2}, {"waits": True, "lives": 4}, {}]
    code, starts = elastic_run(tmp_path, "2:3", plan, regrow=("--regrow", "0.02"))
    assert code == 0
    assert [place for *_, place in starts] == ["0,1", "0,1", "1,2", "1,2"]


def test_a_smaller_job_grows_again_as_soon_as_its_ranks_can_stop(tmp_path, capsys):
    """While they import what they need, a SIGUSR1 would end them."""
    plan = [{"1": -9, "others": 1, "save": 2}, {"waits": True, "starts": 1.5}, {}]
    code, starts = elastic_run(tmp_path, "1:2", plan, regrow=("--regrow", "0.01"))
    assert code == 0 and "SIGUSR1" not in capsys.readouterr().err
    assert [(start, world) for start, _, world, _ in starts] == [(0, "2")] * 2 + [(1, "1")] + [(2, "2")] * 2


@pytest.mark.slow
def test_a_person_s_stop_is_not_undone_by_growing(tmp_path):
    plan = [{"1": -9, "others": 1, "save": 2}, {"waits": True, "stopped": True}, {}]
    code, starts = elastic_run(tmp_path, "1:2", plan, regrow=("--regrow", "0.05"))
    assert code == 75 and [start for start, *_ in starts] == [0, 0, 1]


@pytest.mark.parametrize(
    "codes, reason, restarts",
    [
        ([-9, 1], None, True),
        ([-9, 1], (1, True), True),
        ([-9, 1], (1, False), False),  # an error of the code, which comes again
        ([1, 1], None, False),
        ([1, 1], (1, True), True),  # the rank was lost elsewhere
        ([76, 76], (76, True), True),
        ([80, 80], (80, True), True),
        ([-11, -6], None, True),
        *(([code, code], (code, True), False) for code in (75, 82)),
        *(([code, -9], (code, False), False) for code in (2, 77, 79, 81)),
        ([0, 0], (0, False), False),
    ],
)
def test_which_ends_of_a_job_start_it_again(codes, reason, restarts):
    ends = [RankEnd(rank, code) for rank, code in enumerate(codes)]
    reason = reason and launcher.restarts.ExitReason(*reason)
    assert launcher.may_restart(ends, reason) == restarts
    killed = [RankEnd(end.rank, end.code, killed=True) for end in ends]
    assert launcher.may_restart(killed, None) is False


def test_the_ranks_of_a_smaller_world_fill_the_nodes_in_order():
    nodes = [Node(4, 3, number, "a", 1, world=6) for number in range(3)]
    assert [list(node.ranks()) for node in nodes] == [[0, 1, 2, 3], [4, 5], []]
    assert nodes[1].environment(1)["RANK"] == "5" and nodes[1].environment(1)["LOCAL_WORLD_SIZE"] == "2"
    assert {node.environment(0)["WORLD_SIZE"] for node in nodes} == {"6"}
    assert [node.nodes_with_ranks() for node in nodes] == [2, 2, 2]


@pytest.mark.parametrize("node_rank, ranks", [(0, 4), (1, 2), (2, 0)])
def test_of_fewer_nodes_than_the_layout_has_as_many_ranks_start_as_it_can_use(
    node_rank, ranks, monkeypatch, capsys
):
    """As a SLURM job that is requeued with fewer nodes: 12 ranks would be dp6, which 24 sequences allow and
    21 do not."""
    started = []
    monkeypatch.setattr(launcher, "listen", lambda options: (Node(4, 3, node_rank, "a", 1), None))
    monkeypatch.setattr(launcher, "run_ranks", lambda node, *_: started.append(node) or [RankEnd(0, 0)])
    words = ["llama3-tiny", "--parallel.tp", "2", "--parallel.elastic", "true", "--train.micro_batch", "1"]
    options = ["--nproc", "4", "--nnodes", "3", "--node-rank", str(node_rank), "--rdzv", "a:1"]
    assert launch.main([*options, "--", *words, "--train.global_batch", "24"]) == 0
    assert [node.world_size for node in started] == [12]
    capsys.readouterr()

    started.clear()
    assert launch.main([*options, "--", *words, "--train.global_batch", "21"]) == 0
    assert [len(node.ranks()) for node in started] == ([ranks] if ranks else [])
    line = "launch: 6 of 12 ranks: as many as the layout can use"
    assert (line in capsys.readouterr().err) == (node_rank == 0)


# ---- signals while no rank runs ----------------------------------------------------------------------------

# the launcher, which gets a signal at the N-th call of one of its functions; its ranks are stand-ins
SIGNALLED_LAUNCHER = """
import os, sys
from durable import launcher
from scripts import launch

function, call, number, launcher.TRAIN_FILE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
module = launcher if hasattr(launcher, function) else launch
sound, calls = getattr(module, function), []

def signalled(*args, **more):
    calls.append(args)
    if len(calls) == call:
        os.kill(os.getpid(), number)
    return sound(*args, **more)

setattr(module, function, signalled)
launcher.launcher_store = lambda *_: None
sys.exit(launch.main(sys.argv[5:]))
"""
# a rank that is lost at the first start, and that later ones would wait for
LOST_ONCE = """
import os, pathlib, signal, time
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path("r").mkdir(exist_ok=True)
with open("r/starts", "a") as file:
    file.write(start)
if start == "0":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def start_signalled(folder, function, call, number, options, program=LOST_ONCE):
    file = folder / "stand_in.py"
    file.write_text(program)
    where = [function, str(call), str(int(number)), str(file)]
    if ":" in options[1]:
        options = [*options, "--spares", "0"]
    words = ["--", "llama3-tiny", "--log.name", "r", "--log.dir", ".", "--train.global_batch", "8"]
    return subprocess.Popen(
        [sys.executable, "-c", SIGNALLED_LAUNCHER, *where, *options, *words], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow(every=6)
@pytest.mark.parametrize(
    "function, call, number",
    [
        ("closing_line", 1, signal.SIGTERM),  # the ranks of the first start have just ended
        ("choose_places", 2, signal.SIGUSR1),
        ("restart_line", 1, signal.SIGINT),
        ("listen", 2, signal.SIGHUP),
        ("run_ranks", 2, signal.SIGTERM),
        ("wait_for_ranks", 2, signal.SIGUSR1),  # they have begun, and catch nothing yet
    ],
)
def test_a_signal_between_two_starts_ends_the_job(tmp_path, function, call, number):
    """Nothing is left to save: the job is stopped, not failed, and the same command continues it."""
    began = time.monotonic()
    code, out, errors = finished(start_signalled(tmp_path, function, call, number, ["--nproc", "1:1"]))
    assert code == 75 and not out, (code, out, errors)
    assert time.monotonic() - began < 30  # the second start would have taken 60
    assert f"{number.name}" in errors[-1] and "the same command resumes" in errors[-1], errors
    assert "Traceback" not in "".join(errors)
    reason = run_folder.exit_reason(tmp_path / "r")
    assert (reason["code"], reason["requeue"]) == (75, True) and number.name in reason["reason"]
    allowed = {"0", "01"} if function == "wait_for_ranks" else {"0"}
    assert (tmp_path / "r" / "starts").read_text() in allowed


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("options", [["--nproc", "1:1"], ["--nproc", "1"]])
def test_a_signal_before_the_first_start_ends_the_job(tmp_path, options):
    code, out, errors = finished(start_signalled(tmp_path, "listen", 1, signal.SIGTERM, options))
    assert code == 75 and not out and not (tmp_path / "r").exists(), (out, errors)
    line = "launch: SIGTERM before the first start: the job ends with code 75; the same command starts it"
    assert errors == [line]


STUBBORN = """
import pathlib, signal, time
parse_count = lambda number, frame: open("heard", "a").write(f"{number} ")
signal.signal(signal.SIGINT, parse_count)
pathlib.Path("ready").touch()
time.sleep(60)
"""


def test_a_second_ctrl_c_kills(tmp_path):
    """Two that come at once, as through a wrapper that passes its own on, are one."""
    launcher = start_signalled(tmp_path, "main", 9, 0, ["--nproc", "1:1"], program=STUBBORN)
    assert wait_until(lambda: (tmp_path / "ready").exists())
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert wait_until(lambda: (tmp_path / "heard").exists())
    time.sleep(1)
    assert launcher.poll() is None
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    code, _, errors = finished(launcher)
    assert code == 130 and time.monotonic() - began < 15
    assert errors[0] == "launch: SIGINT: the ranks save and end; a second Ctrl-C kills them"
    assert "1 rank ended with code 130 after" in errors[1] and ": interrupted; " in errors[1]
    assert errors[1].endswith("; rank 0 was ended by SIGKILL") and len(errors) == 2


# ---- mistakes that need no rank ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, line",
    [
        ("--nproc 2 -- llama3-tiny --parallel.tpp 2", "parallel.tpp: no such key; did you mean parallel.tp?"),
        ("--nproc 2 -- lama3-tiny", "lama3-tiny: no such recipe"),
        (
            "--nproc 2 llama3-tiny --train.steps 3",
            "--train.steps: no option of the launcher; arguments of train.py",
        ),
        ("--nproc 2 --train.steps 3", "--train.steps: no option of the launcher; arguments of train.py come"),
        ("--nproc 2 --rdvz node0:29500 -- llama3-tiny", "unrecognized arguments: --rdvz"),
        ("--nproc 2 --nnodes 2 -- llama3-tiny", "--rdzv: jobs of several nodes need a host and a free port"),
        ("--nproc 2 --nnodes 2 --rdzv node0 -- llama3-tiny", "--rdzv: jobs of several nodes need a host"),
        ("--nproc 2 --nnodes 2 --rdzv a:1 --node-rank 2 -- llama3-tiny", "--node-rank: 2 is not"),
        ("--nproc 2 --nnodes 2 --rdzv 192.0.2.1:29500 -- llama3-tiny", "listen at 192.0.2.1:29500"),
        ("--nproc 0 -- llama3-tiny", "--nproc-per-node: expected a whole number of at least 1, got '0'"),
        ("--nproc -1 -- llama3-tiny", "expected a whole number of at least 1, got '-1'"),
        ("--nproc many -- llama3-tiny", "expected a whole number of at least 1, got 'many'"),
        ("--nproc 1:2 --nnodes 2 -- llama3-tiny", "--nproc: MIN:MAX starts the ranks of one node again"),
        ("--nproc 2 --regrow 5 -- llama3-tiny", "--regrow: goes with --nproc MIN:MAX, such as 1:2"),
        ("--nproc 2 --spares 1 -- llama3-tiny", "--spares: goes with --nproc MIN:MAX, such as 1:2"),
        ("--nproc 1:2 --spares 3 -- llama3-tiny", "--spares: at most one for each place, 0 to 2"),
        ("--nproc 1:2 -- --checkpoint.branch runs/x@5", "give --log.name and --log.dir too"),
        ("--nproc 3:3 -- llama3-tiny --train.global_batch 8 --parallel.tp 2 --model.layers 2",
         "no layout for 3 ranks: start 2, 4"),
    ],
)
def test_a_mistake_is_one_line_and_no_rank_starts(words, line, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "run_ranks", None)
    assert launch.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and line in err and err.count("\n") == 1 and not out


def test_a_branch_is_looked_at_by_its_ranks(tmp_path, monkeypatch):
    """Phases that do not fit the quickstart may fit the run whose settings the branch has."""
    class Started(Exception):
        pass

    def start(*_):
        raise Started

    monkeypatch.setattr(launcher, "run_ranks", start)
    phases = tmp_path / "phases.yaml"
    phases.write_text("- after_steps: 5\n  train.seq_len: 96\n")
    words = ["--log.name", "b", "--train.phases", str(phases)]
    assert launch.main(["--nproc", "2", "--", *words]) == 2, "of the quickstart"
    with pytest.raises(Started):
        launch.main(["--nproc", "2", "--", *words, "--checkpoint.branch", "runs/first@100"])


def test_a_port_that_is_taken_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "run_ranks", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert launch.main(["--nproc", "1", "--nnodes", "2", "--rdzv", address, "--", "llama3-tiny"]) == 2
    assert f"cannot listen at {address} (Address already in use)" in capsys.readouterr().err


def test_the_ranks_of_a_node_share_a_secret_of_their_job(monkeypatch):
    """For the words in their store. That of the environment counts: nodes of a job must have the same."""
    monkeypatch.delenv("BEVATRON_STORE_SECRET", raising=False)
    options = launch.arguments().parse_args(["--nproc", "2"])
    told = []
    for _ in range(2):
        node, listener = launcher.listen(options)
        listener.close()
        (secret,) = {node.environment(rank)["BEVATRON_STORE_SECRET"] for rank in range(2)}
        told.append(secret)
    assert len(set(told)) == 2 and all(re.fullmatch("[0-9a-f]{32}", secret) for secret in told)

    first_of_two = Node(2, 2, 0, "127.0.0.1", 1)
    assert "BEVATRON_STORE_SECRET" not in first_of_two.environment(0)
    monkeypatch.setenv("BEVATRON_STORE_SECRET", "of the cluster")
    for given in (node, first_of_two):
        assert given.environment(1)["BEVATRON_STORE_SECRET"] == "of the cluster"


