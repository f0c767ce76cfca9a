import os
import signal
import threading
import time

import pytest

from runtime.stop import Stop


@pytest.fixture
def stop(tmp_path):
    made = []

    def make(minutes=None):
        made.append(Stop(tmp_path, minutes))
        return made[-1]
    yield make
    for s in made:
        s.close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_only_sets_a_flag(stop, name):
    s = stop()
    assert s.check() is None
    os.kill(os.getpid(), getattr(signal, name))
    os.kill(os.getpid(), signal.SIGTERM)  # the second one changes nothing
    assert s.check() == f"{name} received"
    assert s.check() == f"{name} received"


def test_signals_in_the_middle_of_a_write_leave_it_whole(stop, tmp_path):
    s, path, data = stop(), tmp_path / "x", os.urandom(1 << 20)

    def pester():
        for _ in range(200):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.0002)
    thread = threading.Thread(target=pester)
    thread.start()
    while thread.is_alive():
        path.write_bytes(data)
        assert path.read_bytes() == data
    assert s.check() == "SIGUSR1 received"


def test_the_stop_file_is_honoured_once(stop, tmp_path):
    s = stop()
    (tmp_path / "STOP").touch()
    assert "STOP found" in s.check()
    assert not (tmp_path / "STOP").exists()
    assert "STOP found" in s.check()  # it keeps saying so
    assert stop().check() is None  # and the next start goes on


def test_time_limit_is_monotonic(stop, monkeypatch):
    s = stop(1.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)  # the wall clock jumps
    assert s.check() is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert s.check() == "time limit of 1 min reached (train.max_minutes)"


def test_close_gives_the_signals_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    s = Stop(tmp_path)
    assert signal.getsignal(signal.SIGTERM) != before
    s.close()
    assert signal.getsignal(signal.SIGTERM) == before
