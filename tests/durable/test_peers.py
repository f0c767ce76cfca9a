"""A rank that never answers is named although no wait of the host blocks, as over NCCL.

tests/test_launch.py has what gloo shows: torchrun, all ranks, their exit reasons.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_folder
import torch.distributed as dist
from waiting import wait_until

from durable.peers import Failure, SignedStore, StoreTimeout, as_failure, get_all, ranks_without_state, within

ROOT = Path(__file__).parents[2]


def free_port() -> str:
    """Below the ports that the system gives to connections: other tests open those all the time."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return str(port)
    raise OSError("100 ports between 20000 and 30000 are taken")


def end_of_rank_0(folder, how):
    """(exit code, stderr, seconds) of rank 0 in the job of two ranks in tests/fake_gpu.py."""
    port = free_port()
    script = str(ROOT / "tests" / "fake_gpu.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(2):
        command = [sys.executable, script, str(rank), "2", port, str(folder), how]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    began = time.monotonic()
    try:
        _, text = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return processes[0].returncode, text, time.monotonic() - began


@pytest.mark.slow(core=["started"])
@pytest.mark.parametrize("how", ["started", "blocking", "stopped"])
def test_a_rank_that_never_answers_is_named_over_an_asynchronous_wire(tmp_path, how):
    code, text, seconds = end_of_rank_0(tmp_path, how)
    assert code == 76, text
    assert seconds < 45
    assert (tmp_path / "ahead0").exists()  # nothing blocked the host: the device's thread found it
    assert not (tmp_path / "left0").exists()
    assert "in all_reduce of 12 bytes in group job (ranks 0, 1) at step 3" in text
    assert "rank 1 on " in text
    if how == "stopped":
        assert "does not respond: it is stopped or unreachable" in text
    else:
        assert "no exchange at step 3" in text and "fake_gpu.py:" in text
    reason = run_folder.exit_reason(tmp_path)
    assert (reason["code"], reason["requeue"]) == (76, True)


def test_a_rank_that_fails_with_an_exchange_in_flight_does_not_wait_for_it(tmp_path):
    """Its communicators are left as they are: to destroy them would wait for a peer that never answers."""
    code, text, seconds = end_of_rank_0(tmp_path, "raises")
    assert code == 1, text
    assert seconds < 45
    assert "ZeroDivisionError: a failure of rank 0 alone" in text
    assert not (tmp_path / "left0").exists()
    reason = run_folder.exit_reason(tmp_path)
    assert (reason["code"], reason["requeue"]) == (1, False)


# ---- words in the store ------------------------------------------------------------------------------------

WORDS = [
    b'{"code": 0, "rank": 0, "host": "h", "requeue": false, "line": "finished", "text": ""}',
    b'{"code": 256, "rank": 0, "host": "h", "requeue": false, "line": "", "text": ""}',
    b'{"code": "76", "rank": 0, "host": "h", "requeue": true, "line": "", "text": ""}',
    b'{"code": true, "rank": 0, "host": "h", "requeue": true, "line": "", "text": ""}',
    b'{"code": 76}',
    b'{"code": 0}',
    b"[]",
    b"null",
    b"0",
    b"\xff\x00",
    b"[" * 100_000,
]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_a_stranger_is_never_a_success(word):
    failure = as_failure(word, SignedStore())
    assert failure is not None and failure.code == 1 and not failure.requeue
    assert "no rank writes" in failure.line


def test_a_word_of_a_rank_is_believed():
    own = Failure(rank=3, host="h", code=82, requeue=True, line="full", text="full")
    assert as_failure(json.dumps(dataclasses.asdict(own)), SignedStore()) == own
    assert as_failure("{}", SignedStore()) is None


def seal(secret, message, text):
    """RFC 2104 by hand, with SHA-256 and a secret of at most a block."""
    key = secret.encode().ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + f"{message} {text}".encode()).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).hexdigest() + " " + text


def test_with_a_secret_only_sealed_words_count():
    own = Failure(rank=3, host="h", code=82, requeue=True, line="full", text="full")
    text = json.dumps(dataclasses.asdict(own))
    words = SignedStore("of this job", "2")
    word = words.sealed("first_failure", dataclasses.asdict(own))
    assert word == seal("of this job", "2/first_failure", text)
    for stored in (word, word.encode()):
        assert as_failure(stored, words) == own
    assert as_failure(words.sealed("first_failure", {}), words) is None
    foreign = [
        text,  # not sealed
        "{}",
        "",
        word[1:],
        word.replace('"code": 82', '"code": 75'),
        seal("of another job", "2/first_failure", text),
        seal("of this job", "1/first_failure", text),  # of the start before
        seal("of this job", "2/verdict", text),  # of another place
    ]
    for stored in foreign:
        failure = as_failure(stored, words)
        assert failure is not None and failure.code == 1 and "no rank writes" in failure.line


STRANGER = """
import sys, time, torch.distributed as dist
from pathlib import Path
from runtime import failure
from durable.peers import PeerWatch

def main(argv):
    with PeerWatch(0, 2) as peers:
        peers.folder = Path(sys.argv[1])
        Path(sys.argv[1], "ready").touch()
        time.sleep(60)
    return 0

failure.exit_process(failure.fail_cleanly(main, []))
"""


@pytest.mark.slow
def test_a_stranger_ends_the_job_but_not_with_success(tmp_path):
    """Another program writes into the store of a rank that trains: code 0, and an escape code."""
    port = free_port()
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    keeper = dist.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
    words = [
        ({"code": 0, "line": "finished"}, "", 1),
        ({"code": 82, "line": "\x1b]0;owned\x07 full"}, "", 82),
        ({"code": 82, "line": "full"}, "secret", 1),  # it is not sealed
    ]
    for number, (word, secret, code) in enumerate(words):
        folder = tmp_path / str(number)
        folder.mkdir()
        environment["TORCHELASTIC_RESTART_COUNT"] = str(number)
        script = STRANGER.replace("PeerWatch(0, 2)", f"PeerWatch(0, 2, '{number}', '{secret}')")
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(folder)], env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            wait_until((folder / "ready").exists)
            full = {"rank": 1, "host": "h", "requeue": False, "text": "", **word}
            keeper.set(f"attempt_{number}/first_failure", json.dumps(full))
            _, text = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == code, text
        assert run_folder.exit_reason(folder)["code"] == code
        assert "error: rank 0 on " in text and "\x1b" not in text and "\x07" not in text


def test_work_that_does_not_end_is_left_behind():
    began = time.monotonic()
    with pytest.raises(StoreTimeout, match="did not answer for 0.2 s"):
        within(0.2, lambda: time.sleep(30))
    assert time.monotonic() - began < 10
    assert within(10, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(10, lambda: {}["a"])


@pytest.mark.parametrize("silent", [[], [0], [63], [0, 1, 2], [7, 31, 32, 62], list(range(64))])
def test_the_states_of_many_ranks_cost_few_questions(silent, monkeypatch):
    monkeypatch.setattr("durable.peers.KEYS_AT_ONCE", 10)
    store = dist.HashStore()
    written = [rank for rank in range(64) if rank not in silent]
    for rank in written:
        store.set(f"state/{rank}", str(rank))
    questions = []

    class Asked:
        def check(self, keys):
            questions.append(keys)
            return store.check(keys)

        def multi_get(self, keys):
            assert len(keys) <= 10
            return store.multi_get(keys)

    assert ranks_without_state(Asked(), list(range(64))) == silent
    assert len(questions) <= max(1, 2 * 7 * len(silent))
    assert get_all(Asked(), [f"state/{rank}" for rank in written]) == [str(rank).encode() for rank in written]
