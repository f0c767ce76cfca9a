"""Saving behind the run's back, and the lock that keeps a second run away."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sample import loaded, whole

from checkpoint.disk import saver as saver_module
from checkpoint.disk import store
from checkpoint.disk.saver import CheckpointSaver
from config import ConfigError


@pytest.mark.parametrize("threaded", [False, True])
def test_the_saver_writes_the_state_at_the_call(tmp_path, threaded):
    saver, t = CheckpointSaver(threaded), torch.zeros(1000)
    for step in range(1, 5):
        t.fill_(step)
        saver.save(tmp_path, step, whole({"w": t}), {}, keep=9)
        t.fill_(-1)  # training continues
    path = saver.wait()
    assert path == tmp_path / "step_00000004" and saver.wait() == path
    for step, path in store.committed_checkpoints(tmp_path):
        assert (loaded(path, {"w": t})["w"] == step).all()
    assert len(store.committed_checkpoints(tmp_path)) == 4


def test_copies_from_a_gpu_are_started_together_into_memory_that_is_kept(tmp_path, monkeypatch):
    """A stand-in for the GPU: a copy arrives when the device is waited for, and not before."""
    under_way = []
    copy = torch.Tensor.copy_

    def start_copy(target, source, non_blocking=False):
        if not non_blocking:
            return copy(target, source)
        under_way.append((target, source.clone()))
        return target

    def synchronize(device):
        for target, source in under_way:
            copy(target, source)
        under_way.clear()

    monkeypatch.setattr(torch.Tensor, "copy_", start_copy)
    monkeypatch.setattr(saver_module, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(saver_module, "synchronize", synchronize)
    saver = CheckpointSaver(in_background=True)
    weights = {"w": torch.zeros(1000), "m": torch.zeros(30, dtype=torch.bfloat16)}
    kept = []
    for step in range(1, 4):
        if step == 3:
            weights["m"] = torch.zeros(40, dtype=torch.bfloat16)  # as another optimizer's
        for x in weights.values():
            x.fill_(step)
        saver.save(tmp_path, step, whole(weights), {}, keep=9)
        kept.append([x.data_ptr() for x in saver.host_memory.buffers])
        for x in weights.values():
            x.fill_(-1)  # training continues
        found = loaded(saver.wait_saved(), weights)
        assert all((x == step).all() for x in found.values())
    assert kept[0] == kept[1]
    assert kept[1][0] == kept[2][0] and kept[1][1] != kept[2][1]


def test_copies_from_the_host_are_made_at_once_into_memory_that_is_kept(tmp_path, monkeypatch):
    """From an Apple GPU, too."""
    waits = []
    copy = torch.Tensor.copy_

    def seen(target, source, non_blocking=False):
        waits.append(not non_blocking)
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", seen)
    saver, weights = CheckpointSaver(in_background=True), {"w": torch.ones(3, 5).t(), "m": torch.ones(4)}
    kept = []
    for step in (1, 2):
        weights["w"].fill_(step)
        saver.save(tmp_path, step, whole(weights), {}, keep=9)
        kept.append([x.data_ptr() for x in saver.host_memory.buffers])
        path = saver.wait_saved()
        assert len(waits) >= 2 and all(waits)
        assert (loaded(path, weights)["w"] == step).all()
        waits.clear()
    assert kept[0] == kept[1]


def test_beside_training_half_of_the_threads_write(monkeypatch):
    for cores, beside, alone in ((1, 1, 1), (2, 1, 2), (6, 3, 6), (64, 8, 8)):
        monkeypatch.setattr(torch, "get_num_threads", lambda cores=cores: cores)
        assert saver_module.writer_threads(in_background=True) == beside
        assert saver_module.writer_threads(in_background=False) == alone


def test_the_saver_raises_the_writers_error_once_at_the_next_call(tmp_path):
    def at(point):
        raise OSError(28, "No space left on device")

    saver, pieces = CheckpointSaver(True), whole({"w": torch.zeros(3)})
    saver.save(tmp_path, 1, pieces, {}, keep=2, fault_point=at)
    with pytest.raises(store.StorageError, match="ENOSPC"):
        saver.save(tmp_path, 2, pieces, {}, keep=2)
    saver.save(tmp_path, 3, pieces, {}, keep=2)
    assert saver.wait() == tmp_path / "step_00000003"
    assert store.newest_checkpoint(tmp_path) == tmp_path / "step_00000003"


def test_the_saver_has_one_save_in_flight(tmp_path):
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
        f"import sys, time; sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from checkpoint.disk.locks import run_lock\n"
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


@pytest.mark.parametrize(
    "name, why", [("file/run", "Not a directory"), ("x" * 300, "File name too long")], ids=["file", "long"]
)
def test_a_place_that_cannot_be_written_is_refused_by_its_key(tmp_path, name, why):
    (tmp_path / "file").touch()
    told = rf"^log.dir: a run cannot write to .*{name} \({why}\); give another log.dir or log.name$"
    with pytest.raises(ConfigError, match=told), store.run_lock(tmp_path / name):
        pass


@pytest.mark.parametrize("number, kind", [(errno.EACCES, ConfigError), (errno.EIO, store.StorageError)])
def test_a_forbidden_folder_is_the_users_mistake_a_failing_disk_is_not(tmp_path, monkeypatch, number, kind):
    def fail(path, **_):  # whoever runs the tests may be root, who may write anywhere
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(kind, match=os.strerror(number)), store.run_lock(tmp_path / "run"):
        pass
