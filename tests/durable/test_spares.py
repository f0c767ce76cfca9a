"""durable/spares.py: real processes of train.py that wait, what they hold, and what becomes of them."""

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
from waiting import has_ended, wait_until

import config
from durable.spares import Spares

ROOT = pathlib.Path(__file__).parent.parent.parent
TRAIN = [sys.executable, str(ROOT / "train.py")]
# a stand-in for train.py: as quick as its imports are not
QUICK = [sys.executable, "-c", f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from durable.spares import wait_for_job
job = wait_for_job()
print(job.words, job.environment["RANK"], flush=True)
"""]


def are_ready(spares):
    spares.replace_missing()
    for spare in spares.waiting:
        spare.look()
    return len(spares.waiting) == spares.wanted and all(spare.is_ready for spare in spares.waiting)


@pytest.mark.slow
def test_a_spare_has_everything_loaded_and_holds_nothing(real_starts, capfd):
    """And becomes train.py, with the words and the environment that it is given."""
    with Spares(TRAIN, 1) as spares:
        assert wait_until(lambda: are_ready(spares))
        pid = spares.waiting[0].process.pid
        loaded = pathlib.Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch_cpu" in loaded
        links = [os.readlink(file) for file in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
        assert len([link for link in links if link.startswith("socket:")]) == 1, links  # that of the launcher
        assert not [link for link in links if "nvidia" in link]
        assert "--spare" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()

        rank = spares.take(["--list"], {"COLUMNS": "60"})
        assert rank is not None and rank.pid == pid and rank.wait(60) == 0
        lines = capfd.readouterr().out.splitlines()
        assert any("llama3-tiny" in line for line in lines)
        assert spares.take(["--list"], {}) is None


@pytest.mark.slow
def test_one_that_still_loads_is_taken_too(capfd):
    with Spares(QUICK, 2) as spares:
        spares.replace_missing()
        spares.replace_missing()
        assert len(spares.waiting) == 1  # one at a time
        rank = spares.take(["a", "b"], {"RANK": "3"})
        assert rank is not None and rank.wait(60) == 0
        assert capfd.readouterr().out == "['a', 'b'] 3\n"
        assert wait_until(lambda: are_ready(spares))
        assert len(spares.waiting) == 2


def test_of_code_that_has_changed_none_is_taken(monkeypatch):
    with Spares(QUICK, 1) as spares:
        assert wait_until(lambda: are_ready(spares))
        pid = spares.waiting[0].process.pid
        monkeypatch.setattr(config, "code_hash", lambda: "of another checkout")
        assert spares.take([], {}) is None and has_ended(pid)


def test_one_that_was_ended_is_passed_over_and_the_next_is_taken(capfd):
    with Spares(QUICK, 2) as spares:
        assert wait_until(lambda: are_ready(spares))
        first, second = (spare.process for spare in spares.waiting)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        rank = spares.take(["x"], {"RANK": "0"})
        assert rank is second and rank.wait(60) == 0


def test_one_that_cannot_load_is_not_tried_for_ever():
    with Spares([sys.executable, "-c", "raise SystemExit(1)"], 3) as spares:
        spares.replace_missing()
        spares.waiting[0].process.wait()
        for _ in range(3):
            spares.replace_missing()
        assert len(spares.waiting) == 1 and spares.take([], {}) is None


def test_all_end_with_the_job():
    with Spares(QUICK, 2) as spares:
        assert wait_until(lambda: are_ready(spares))
        pids = [spare.process.pid for spare in spares.waiting]
    assert all(map(has_ended, pids))


LAUNCHER = """
import sys, time
from durable.spares import Spares
spares = Spares(sys.argv[2:], 1)
spares.replace_missing()
while sys.argv[1] == "ready" and not spares.waiting[0].is_ready:
    spares.replace_missing()
    spares.waiting[0].look()
print(spares.waiting[0].process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["loading", "ready"])
def test_a_spare_dies_with_a_launcher_that_is_killed(when):
    command = TRAIN if when == "loading" else QUICK
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, when, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as launcher:
        pid = int(launcher.stdout.readline())
        assert not has_ended(pid)
        launcher.kill()
    assert wait_until(lambda: has_ended(pid), 20)


def test_the_time_that_a_spare_waits_does_not_count():
    """Goodput counts from when it becomes a rank."""
    code = (
        "import sys; from durable.spares import process_words; from runtime import setup; "
        "words = process_words(['--spare']); "
        "print(words, setup.process_seconds() - setup.seconds_since_start(), setup.seconds_since_start())"
    )
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=theirs.fileno(), stdout=subprocess.PIPE, text=True
    ) as spare:
        theirs.close()
        assert ours.recv(1) == b"+"
        time.sleep(1.0)
        ours.sendall(json.dumps({"words": ["x"], "environment": {}}).encode())
        ours.shutdown(socket.SHUT_WR)
        said, _ = spare.communicate(timeout=60)
    before, since = map(float, re.fullmatch(r"\['x'\] ([\d.]+) ([\d.e-]+)\n", said).groups())
    assert before >= 1.0 and since < 1.0
