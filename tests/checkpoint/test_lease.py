"""Two hosts and one run folder, where flock keeps nobody away. Another kernel's name stands for a host."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from checkpoint.disk import lease as leases
from checkpoint.disk.files import StorageError
from checkpoint.disk.lease import Lease
from checkpoint.disk.locks import LOCK_FILE, run_lock
from config import ConfigError

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys
sys.path.insert(0, {root!r})
import fcntl, time
from pathlib import Path
from checkpoint.disk import lease
lease.get_kernel_id = lambda folder: "another"
print("ready", flush=True)
taken = lease.Lease(Path({folder!r}), renew_s=0.2, expires_s=1.0)
taken.take(flock_works=True)
print("mine", flush=True)
while True:
    time.sleep(0.05)
    taken.check()
"""


@pytest.fixture
def other_host(tmp_path):
    """A process on another host that holds the folder."""
    code = HOLDER.format(root=str(ROOT), folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=-1, stderr=-1)
    try:
        assert child.stdout.readline() + child.stdout.readline() == "ready\nmine\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def lease_here(folder):
    return Lease(folder, renew_s=0.2, expires_s=1.0)


def check_taken_when_expired(folder):
    """It is somebody's until then, and then ours alone."""
    lease = lease_here(folder)
    began = time.monotonic()
    lease.take(flock_works=True)
    assert time.monotonic() - began >= 1.0
    lease.check()
    lease.release()
    assert not list(folder.iterdir())


def is_accepted(call, *arguments):
    """Whether the call does not refuse."""
    try:
        call(*arguments)
    except ConfigError:
        return False
    return True


def test_a_run_on_another_host_that_lives_is_named_at_once(tmp_path, other_host):
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"in use by .* pid {other_host.pid}; wait for it, stop it"):
        lease_here(tmp_path).take(flock_works=True)
    assert time.monotonic() - began < 0.9
    assert other_host.poll() is None


def test_what_a_host_that_died_left_behind_is_taken_when_it_has_expired(tmp_path, other_host):
    other_host.kill()
    other_host.wait()
    check_taken_when_expired(tmp_path)


@pytest.mark.slow
def test_a_holder_that_was_cut_off_ends_when_it_comes_back(tmp_path, other_host):
    other_host.send_signal(signal.SIGSTOP)
    lease = lease_here(tmp_path)
    lease.take(flock_works=True)
    other_host.send_signal(signal.SIGCONT)
    _, text = other_host.communicate(timeout=20)
    assert f"taken over by {os.uname().nodename} pid {os.getpid()}" in text
    assert "had no heartbeat from this run for 1 s" in text
    time.sleep(0.5)  # several signs of life
    lease.check()  # and this one keeps it
    lease.release()


@pytest.mark.slow
def test_one_of_two_that_wait_for_a_dead_host_gets_the_folder(tmp_path, other_host):
    other_host.kill()
    other_host.wait()
    code = HOLDER.format(root=str(ROOT), folder=str(tmp_path)).replace('"another"', '"a third"')
    waiting = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=-1, stderr=-1)
    lease = lease_here(tmp_path)
    assert waiting.stdout.readline() == "ready\n"
    try:
        began = time.monotonic()
        is_mine = is_accepted(lease.take, True)
        time.sleep(1.0)  # several signs of life
        while is_mine == (waiting.poll() is None):  # until exactly one continues
            assert time.monotonic() - began < 30, f"both continue: {is_mine}; or none"
            time.sleep(0.1)
            is_mine = is_mine and is_accepted(lease.check)
        time.sleep(1.0)
        assert is_mine == (waiting.poll() is not None)
    finally:
        waiting.kill()
        waiting.communicate()
        lease.release()


@pytest.mark.parametrize("times", [1, 100])
def test_others_that_take_it_at_the_same_time_remove_what_is_beside_it(tmp_path, monkeypatch, times):
    replace, removed = os.replace, []

    def raced(source, target):
        if len(removed) < times:
            removed.append(source)
            os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(leases.os, "replace", raced)
    lease = leases.Lease(tmp_path)
    if times == 1:
        lease.take(flock_works=True)
        assert leases.read(tmp_path / leases.NAME)["id"] == lease.id
    else:
        with pytest.raises(StorageError, match="ENOENT"):
            lease.take(flock_works=True)
        assert len(removed) == leases.TAKE_TRIES
    lease.release()


def test_under_one_kernel_flock_decides_without_a_wait(tmp_path):
    path = tmp_path / leases.NAME
    left_behind = {"id": "x", "kernel": leases.get_kernel_id(tmp_path), "host": "h", "pid": 1, "number": 7}
    path.write_text(json.dumps(left_behind))
    began = time.monotonic()
    with run_lock(tmp_path) as lease:
        assert time.monotonic() - began < 0.5
        assert json.loads(path.read_text())["id"] == lease.id
    assert not path.exists()


@pytest.mark.slow
def test_without_flock_the_lease_keeps_two_processes_of_one_kernel_apart(tmp_path, monkeypatch):
    def no_locks(fd, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(leases, "RENEW_S", 0.2)
    with run_lock(tmp_path) as first:
        first.renew_s = 0.1
        with pytest.raises(ConfigError, match=f"in use by .* pid {os.getpid()}"), run_lock(tmp_path):
            pass


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("text", ["", "x", "[]", "{}", "[" * 900, "null", '{"kernel": []}'])
def test_a_damaged_lease_is_waited_for_and_taken(tmp_path, text):
    (tmp_path / leases.NAME).write_text(text)
    check_taken_when_expired(tmp_path)


def test_a_look_that_fails_does_not_give_a_live_lease_away(tmp_path, other_host, monkeypatch):
    read, looks = leases.read, []

    def fails_sometimes(path):
        looks.append(path)
        return {leases.UNREADABLE: "Stale file handle"} if len(looks) in (1, 3) else read(path)

    monkeypatch.setattr(leases, "read", fails_sometimes)
    with pytest.raises(ConfigError, match=f"in use by .* pid {other_host.pid}"):
        lease_here(tmp_path).take(flock_works=True)
    assert other_host.poll() is None and len(looks) > 3


@pytest.mark.slow
def test_a_run_ends_before_its_next_step_when_its_folder_was_taken_over(tmp_path):
    """The real program: another host writes its lease while this one trains."""
    command = [
        sys.executable, str(ROOT / "train.py"), "llama3-tiny",
        "--log.dir", str(tmp_path), "--log.name", "run",
        "--train.steps", "100000", "--eval.every", "none", "--checkpoint.every", "none",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, text=True, stdout=-1, stderr=-1, env=environment)
    path = tmp_path / "run" / leases.NAME
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "run" / "config.yaml").exists():  # written after the first step
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.1)
        path.write_text(json.dumps({"id": "y", "kernel": "k", "host": "node-b", "pid": 7, "number": 1}))
        _, text = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 2
    assert "taken over by node-b pid 7" in text and text.count("\n") == 1
    assert json.loads(path.read_text())["id"] == "y"
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_who_waits_for_a_start_that_is_refused_has_the_folder(tmp_path):
    """The refused one removes its lock file and the folder: the other makes and holds new ones."""
    folder, found = tmp_path / "deep" / "run", []

    def wait():
        with run_lock(folder):
            found.append((folder / LOCK_FILE).exists())
            with pytest.raises(ConfigError, match="in use by"), run_lock(folder):
                pass

    waiting = threading.Thread(target=wait)
    with pytest.raises(ConfigError, match="refused"), run_lock(folder):
        waiting.start()
        time.sleep(0.2)
        raise ConfigError("refused")
    waiting.join(20)
    assert found == [True] and (folder / LOCK_FILE).exists()
    with pytest.raises(ConfigError, match="refused"), run_lock(folder):
        (folder / "mine").touch()
        raise ConfigError("refused")
    assert {path.name for path in folder.iterdir()} == {LOCK_FILE, "mine"}
