"""A rank that never answers is named although no wait of the host blocks, as over NCCL.

tests/test_launch.py has what gloo shows: torchrun, all ranks, their exit reasons.
"""

import contextlib
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

ROOT = Path(__file__).parents[2]


def free_port() -> str:
    """Below the ports that the system gives to connections: other tests open those all the time."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return str(port)
    raise OSError("100 ports between 20000 and 30000 are taken")


@pytest.mark.parametrize("how", ["started", "blocking", "stopped"])
def test_a_rank_that_never_answers_is_named_over_an_asynchronous_wire(tmp_path, how):
    port = free_port()
    script = str(ROOT / "tests" / "fake_gpu.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(2):
        command = [sys.executable, script, str(rank), "2", port, str(tmp_path), how]
        processes.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )
    began = time.monotonic()
    try:
        _, text = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert processes[0].returncode == 76, text
    assert time.monotonic() - began < 45
    assert (tmp_path / "ahead0").exists()  # nothing blocked the host: the device's thread found it
    assert "in all_reduce of 12 bytes in group job (ranks 0, 1) at step 3" in text
    assert "rank 1 on " in text
    if how == "stopped":
        assert "gives no sign of life: it is stopped or cut off" in text
    else:
        assert "no exchange at step 3" in text and "fake_gpu.py:" in text
    reason = json.loads((tmp_path / "exit_reason.json").read_text())
    assert (reason["code"], reason["requeue"]) == (76, True)
