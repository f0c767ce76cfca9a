"""durable/restarts.py: what a job left behind, and how many starts without progress are too many."""

import json
import pathlib
import subprocess
import sys

import pytest

from checkpoint.disk import store
from durable import memory, restarts
from durable.restarts import ExitReason, Kept, RestartCount

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_the_newest_step_is_that_of_the_store(tmp_path):
    """A save under way, a mark or a file of that name does not count."""
    assert restarts.newest_step(tmp_path) == restarts.FIRST_STEP
    root = tmp_path / "checkpoints"
    for name in ("step_00000008", "step_00000010", f"step_00000012.tmp-{'0' * 32}", "step_123456789"):
        (root / name).mkdir(parents=True)
    for name in ("step_00000014", "step_00000010.keep", "latest"):
        (root / name).touch()
    assert restarts.newest_step(tmp_path) == 123456789 == store.committed_checkpoints(root)[0][0]


def test_a_checkpoint_in_memory_is_progress(tmp_path):
    (tmp_path / "checkpoints" / "step_00000008").mkdir(parents=True)
    record = tmp_path / memory.RECORD
    assert record.name == restarts.MEMORY_RECORD
    for text in ("", "[]", '{"generations": 3}', '{"generations": [{"step": "x"}]}', '{"generations": []}'):
        record.write_text(text)
        assert restarts.progress(tmp_path) == (8, 8)
    memory.write_record(tmp_path, "key", [memory.MemoryGeneration(step, "", 8, {}) for step in (12, 10)])
    assert restarts.progress(tmp_path) == Kept(on_disk=8, newest=12)


@pytest.mark.parametrize(
    "files, reason",
    [
        ({}, None),
        ({"": {"code": 76, "requeue": True}, ".rank1": {"code": 1, "requeue": False}}, ExitReason(76, True)),
        ({".rank3": {"code": 1, "requeue": True}}, ExitReason(1, True)),
        ({"": {"code": 82}}, ExitReason(82, True)),
        ({"": {"code": 79}}, ExitReason(79, False)),
        ({"": [], ".rank1": {"code": "x"}, ".rank2": {"code": 0}}, ExitReason(0, False)),
    ],
)
def test_the_reason_of_a_job(tmp_path, files, reason):
    for name, fields in files.items():
        (tmp_path / f"exit_reason{name}.json").write_text(json.dumps(fields))
    assert restarts.read_reason(tmp_path) == reason
    restarts.remove_reasons(tmp_path)
    assert restarts.read_reason(tmp_path) is None


def test_ranks_that_found_their_own_device_wrong(tmp_path, capsys):
    """Not those whose replicas differ, or that read a link; and fields of another form are ignored."""
    assert restarts.ranks_with_wrong_devices(tmp_path) == set()
    of_rank = {
        "": {"code": 80, "rank": 0},
        ".rank1": {"code": 80, "rank": 1, "host": "node-7.x", "wrong_device": True},
        ".rank2": {"code": 80, "rank": "x", "host": "$(reboot)", "wrong_device": True},
        ".rank3": [],
        ".rank4": {"code": 80, "rank": 4, "wrong_device": "no"},
    }
    for name, fields in of_rank.items():
        (tmp_path / f"exit_reason{name}.json").write_text(json.dumps(fields))
    assert restarts.ranks_with_wrong_devices(tmp_path) == {1}
    assert restarts.hosts_with_wrong_devices(tmp_path) == {"node-7.x"}
    assert restarts.main([str(tmp_path)]) == 0 and capsys.readouterr().out == "-1 80 1 node-7.x\n"


def allowed(first, *kept):
    """Whether each restart is allowed, after starts that have kept (on disk, newest)."""
    progress = RestartCount(Kept(*first))
    return [progress.allows_restart(Kept(*each)) for each in kept]


def test_progress_is_a_newer_checkpoint():
    assert allowed((4, 4), *[(4, 4)] * 4) == [True, True, True, False]
    assert all(allowed((4, 4), *[(step, step) for step in (4, 4, 4, 5, 5, 5, 6)]))
    assert allowed((6, 6), *[(6, 6)] * 4) == [True, True, True, False]
    assert all(allowed((8, 8), (8, 8), (8, 8), (6, 6), (6, 6), (6, 6)))  # it has gone back


def test_a_step_lost_from_memory_and_made_again_does_not_count_as_progress():
    """Starts alternate between two layouts; neither finds what the other has kept in memory."""
    assert allowed((100, 100), (100, 140), (100, 120), (100, 140), (100, 120)) == [True, True, True, False]
    assert all(allowed((100, 100), *[(100, step) for step in (120, 120, 130, 130, 130, 140)]))
    assert all(allowed((100, 140), (100, 120), (120, 120), (120, 130), (120, 130), (120, 130)))


def test_as_the_slurm_script_asks(tmp_path):
    def told():
        words = [sys.executable, "-m", "durable.restarts", str(tmp_path)]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert told() == "-1 - - -\n"
    (tmp_path / "checkpoints" / "step_00000009").mkdir(parents=True)
    (tmp_path / "exit_reason.json").write_text('{"code": 76, "requeue": true}')
    assert told() == "9 76 1 -\n"
