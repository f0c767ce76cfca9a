"""Two committed checkpoints to damage, and a disk that nobody waits for."""

import os

import pytest
from sample import state, whole

from checkpoint.disk import store


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """SIGKILL loses nothing that the kernel has; with fsync these tests take as long as the disk is busy."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def saved(tmp_path):
    """(root, path of step 20, its tensors); step 10 is there too."""
    store.save(tmp_path, 10, whole(state(10)), {"tokens": 10}, keep=3)
    return tmp_path, store.save(tmp_path, 20, whole(state(20)), {"tokens": 20}, keep=3), state(20)
