"""Two committed checkpoints to damage, the sizes of reads, and a disk that nobody waits for."""

import os

import pytest
from sample import state, whole

from checkpoint.disk import store, tensors_by_name


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """SIGKILL loses nothing that the kernel has; with fsync these tests take as long as the disk is busy."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def saved(tmp_path):
    """(root, path of step 20, its tensors); step 10 is there too."""
    store.save(tmp_path, 10, whole(state(10)), {"tokens": 10}, keep=3)
    return tmp_path, store.save(tmp_path, 20, whole(state(20)), {"tokens": 20}, keep=3), state(20)


@pytest.fixture
def read_sizes(monkeypatch):
    """The bytes of each read of a stored tensor, as they come."""
    sizes = []
    read_into = tensors_by_name.read_into

    def noted(fd, start, target):
        sizes.append(len(target))
        return read_into(fd, start, target)

    monkeypatch.setattr(tensors_by_name, "read_into", noted)
    return sizes
