"""Saving behind the run's back, and the lock that keeps a second run away."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sample import loaded, whole

from checkpoint import store
from checkpoint.saver import CheckpointSaver
from config import ConfigError


@pytest.mark.parametrize("threaded", [False, True])
def test_saver_writes_the_state_of_the_call(tmp_path, threaded):
    saver, t = CheckpointSaver(threaded), torch.zeros(1000)
    for step in range(1, 5):
        t.fill_(step)
        saver.save(tmp_path, step, whole({"w": t}), {}, keep=9)
        t.fill_(-1)  # training goes on
    path = saver.wait()
    assert path == tmp_path / "step_00000004" and saver.wait() == path
    for step, path in store.committed_checkpoints(tmp_path):
        assert (loaded(path, {"w": t})["w"] == step).all()
    assert len(store.committed_checkpoints(tmp_path)) == 4


def test_saver_raises_the_writers_error_at_the_next_call_once(tmp_path):
    def at(point):
        raise OSError(28, "No space left on device")

    saver, pieces = CheckpointSaver(True), whole({"w": torch.zeros(3)})
    saver.save(tmp_path, 1, pieces, {}, keep=2, fault_point=at)
    with pytest.raises(store.StorageError, match="ENOSPC"):
        saver.save(tmp_path, 2, pieces, {}, keep=2)
    saver.save(tmp_path, 3, pieces, {}, keep=2)
    assert (
        saver.wait() == tmp_path / "step_00000003"
        and store.newest_checkpoint(tmp_path) == tmp_path / "step_00000003"
    )


def test_saver_has_one_in_flight(tmp_path):
    writing, peak = [], []

    def at(point):
        if point == "ckpt.pre_write":
            writing.append(1)
            peak.append(len(writing))
            time.sleep(0.05)
        if point == "ckpt.pre_purge":
            writing.pop()

    saver = CheckpointSaver(True)
    for step in (1, 2, 3):
        saver.save(tmp_path, step, whole({"w": torch.zeros(3)}), {}, keep=9, fault_point=at)
    saver.wait()
    assert peak == [1, 1, 1]


def test_the_run_lock_names_its_holder_and_dies_with_it(tmp_path):
    code = (
        f"import sys, time; sys.path.insert(0, {str(Path.cwd())!r})\nfrom checkpoint.locks import run_lock\n"
        f"with run_lock({str(tmp_path)!r}):\n    print('mine', flush=True)\n    time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "mine\n"
        start = time.monotonic()
        with pytest.raises(ConfigError, match=f"in use by .* pid {child.pid}"), store.run_lock(tmp_path):
            pass
        assert time.monotonic() - start < 2
    finally:
        child.kill()
    start = time.monotonic()
    with store.run_lock(tmp_path):
        assert time.monotonic() - start < 1
    child.wait()
    with store.run_lock(tmp_path):  # freed by leaving, too
        pass
    with pytest.raises(store.StorageError, match="latch"), store.run_lock(tmp_path / ".lock" / "latch"):
        pass
