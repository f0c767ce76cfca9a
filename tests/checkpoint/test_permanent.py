"""Permanent checkpoints: the rotation removes all but them and the newest; a kill cannot take the mark."""

import contextlib
import os
import shutil
import time
from dataclasses import replace

import pytest
from sample import state as tensors
from sample import whole

from checkpoint import state
from checkpoint.disk import store
from config import CheckpointConfig, is_permanent_step
from config.reading import defaults
from config.reading.rules import checkpoint_rules


def steps(root) -> list[int]:
    return sorted(step for step, _ in store.committed_checkpoints(root))


def save(root, step: int, mark: str = "", **more):
    return store.save(root, step, whole(tensors(step)), {}, keep=2, mark=mark, **more)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("keys, permanent", [
    ({"keep_every": 5}, [5, 10, 15, 20]),
    ({"keep_at": "log2"}, [1, 2, 4, 8, 16]),
    ({"keep_at": "3, 7,19"}, [3, 7, 19]),
    ({"keep_every": 9, "keep_at": "log2"}, [1, 2, 4, 8, 9, 16, 18]),
    ({}, []),
])
def test_the_rotation_keeps_permanent_steps_and_the_newest(tmp_path, keys, permanent):
    checkpoint = CheckpointConfig(**keys)
    assert [step for step in range(21) if is_permanent_step(checkpoint, step)] == permanent
    for step in range(1, 21):
        save(tmp_path, step, state.permanent_mark(checkpoint, tmp_path, step))
    assert steps(tmp_path) == sorted({*permanent, 19, 20})
    assert store.verify(tmp_path / "step_00000020").step == 20


def test_a_mark_by_hand_keeps_a_checkpoint_until_it_is_removed(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step)
        if step == 2:
            (tmp_path / "step_00000002.keep").touch()
    assert steps(tmp_path) == [2, 5, 6]
    (tmp_path / "step_00000002.keep").unlink()
    save(tmp_path, 7)
    assert steps(tmp_path) == [6, 7]


def test_keep_minutes_counts_from_the_newest_permanent_checkpoint(tmp_path):
    """So that another start of the run does not reset the clock."""
    checkpoint = CheckpointConfig(keep_minutes=10)
    assert state.permanent_mark(checkpoint, tmp_path, 1)
    (save(tmp_path, 1, state.BY_TIME), save(tmp_path, 2), save(tmp_path, 3), save(tmp_path, 4))
    assert steps(tmp_path) == [1, 3, 4] and not state.permanent_mark(checkpoint, tmp_path, 5)
    long_ago = time.time() - 601
    os.utime(tmp_path / "step_00000001", (long_ago, long_ago))
    assert state.permanent_mark(checkpoint, tmp_path, 5) == state.BY_TIME


@pytest.mark.parametrize("point", store.FAULT_POINTS)
def test_a_kill_at_any_point_leaves_a_permanent_checkpoint_marked(tmp_path, point):
    class Killed(BaseException):
        pass

    def fault(reached: str) -> None:
        if reached == point:
            raise Killed

    (save(tmp_path, 1), save(tmp_path, 2))
    try:
        save(tmp_path, 3, "keep_every", fault_point=fault)
    except Killed:
        pass
    is_committed = 3 in steps(tmp_path)
    (save(tmp_path, 4), save(tmp_path, 5), save(tmp_path, 6))
    assert (3 in steps(tmp_path)) == is_committed
    if point in ("ckpt.post_rename", "ckpt.pre_latest", "ckpt.pre_purge"):
        assert is_committed


def marks(root) -> list[str]:
    return sorted(path.name for path in root.glob("*.keep"))


@pytest.mark.parametrize("point", ["ckpt.pre_write", "ckpt.mid_shard", "ckpt.pre_index", "ckpt.pre_rename"])
def test_a_save_that_fails_leaves_no_mark(tmp_path, point):
    """Nor does one that is killed, once the next writer has begun. A person's mark stays, and so does that of
    a checkpoint that was moved away."""

    def fault(kind):
        def fail(reached: str) -> None:
            if reached == point:
                raise kind

        return fail

    save(tmp_path, 1, "keep_every")
    save(tmp_path, 2)
    shutil.rmtree(tmp_path / "step_00000001")  # moved away
    (tmp_path / "step_00000009.keep").touch()
    kept = ["step_00000001.keep", "step_00000009.keep"]
    with pytest.raises(store.StorageError):
        save(tmp_path, 3, "keep_every", fault_point=fault(OSError(28, "No space left on device")))
    assert marks(tmp_path) == kept
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(SystemExit):
            save(tmp_path, 3, "keep_every", fault_point=lambda reached: reached == point and os._exit(0))
        os._exit(9)
    assert os.waitpid(pid, 0)[1] == 0 and marks(tmp_path) == sorted([*kept, "step_00000003.keep"])
    store.remove_leftovers(tmp_path)
    assert marks(tmp_path) == kept and steps(tmp_path) == [2]


def test_a_save_without_room_leaves_no_mark(tmp_path, monkeypatch):
    def no_room(final, total_bytes):
        raise store.StorageError(final, total_bytes, "no room")

    with monkeypatch.context() as full:
        full.setattr(store, "check_free_space", no_room)
        with pytest.raises(store.StorageError, match="no room"):
            save(tmp_path, 2, "keep_every")
    assert marks(tmp_path) == []


def test_a_keep_at_without_steps_is_refused():
    for text in ("log", "1,x", "0", ""):
        cfg = replace(defaults(), checkpoint=CheckpointConfig(keep_at=text))
        broken = [rule.message for rule in checkpoint_rules(cfg, 1) if not rule.holds]
        assert broken and broken[0].startswith("checkpoint.keep_at: ")
