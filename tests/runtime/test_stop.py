import os
import signal
import threading
import time

import pytest

from runtime.stop import StopRequest


@pytest.fixture
def stop(tmp_path):
    made = []

    def make(minutes=None):
        made.append(StopRequest(tmp_path, minutes))
        return made[-1]

    yield make
    for s in made:
        s.close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_only_sets_a_flag(stop, name):
    s = stop()
    assert s.reason_to_stop() is None
    os.kill(os.getpid(), getattr(signal, name))
    os.kill(os.getpid(), signal.SIGTERM)  # the second one changes nothing
    assert s.reason_to_stop() == f"{name} received"
    assert s.reason_to_stop() == f"{name} received"


def test_under_nohup_the_terminal_may_go(stop):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        s = stop()
        os.kill(os.getpid(), signal.SIGHUP)
        assert s.reason_to_stop() is None
        s.close()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)


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
    assert s.reason_to_stop() == "SIGUSR1 received"


def test_the_stop_file_is_honoured_once(stop, tmp_path):
    s = stop()
    (tmp_path / "STOP").touch()
    assert "STOP found" in s.reason_to_stop()
    assert not (tmp_path / "STOP").exists()
    assert "STOP found" in s.reason_to_stop()  # it keeps saying so
    assert not s.requeue  # an empty one is a person's
    assert stop().reason_to_stop() is None  # and the next start trains


@pytest.mark.parametrize(
    "text, again",
    [
        ("requeue", True),
        (" requeue\n", True),
        ("", False),
        ("no\n", False),
        ("requeue not", False),
        ("\0\xff" * 9999, False),
    ],
)
def test_the_stop_file_s_word(stop, tmp_path, text, again):
    s = stop()
    (tmp_path / "STOP").write_text(text)
    assert "STOP found" in s.reason_to_stop() and s.requeue is again and not (tmp_path / "STOP").exists()


def test_a_stop_file_that_is_still_being_written(stop, tmp_path):
    s = stop()
    (tmp_path / "STOP").touch()
    writer = threading.Timer(0.05, lambda: (tmp_path / "STOP").write_text("requeue\n"))
    writer.start()
    assert "STOP found" in s.reason_to_stop() and s.requeue
    writer.join()


def test_a_link_or_a_folder_called_stop_stops_too(stop, tmp_path):
    (tmp_path / "STOP").symlink_to(tmp_path / "nowhere")
    s = stop()
    assert "STOP found" in s.reason_to_stop() and not s.requeue and not os.path.lexists(tmp_path / "STOP")
    (tmp_path / "STOP" / "full").mkdir(parents=True)
    s = stop()
    assert "remove it before the next start: Directory not empty" in s.reason_to_stop() and not s.requeue


def test_other_ranks_leave_the_stop_file_to_the_first(tmp_path):
    (tmp_path / "STOP").touch()
    other = StopRequest(tmp_path, watches_file=False)
    assert other.reason_to_stop() is None and (tmp_path / "STOP").exists()
    other.close()


def test_time_limit_is_monotonic(stop, monkeypatch):
    s = stop(1.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)  # the wall clock jumps
    assert s.reason_to_stop() is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert s.reason_to_stop() == "time limit of 1 min reached (train.max_minutes)"


def test_close_gives_the_signals_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    s = StopRequest(tmp_path)
    assert signal.getsignal(signal.SIGTERM) != before
    s.close()
    assert signal.getsignal(signal.SIGTERM) == before
