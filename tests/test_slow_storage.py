"""Storage slower than the ranks' patience with each other: parallel.timeout_s finds hangs, and no file of any
size is one."""

import os
import time

import pytest
import run_folder
from ranks import MODEL, corpus, job

import checkpoint.disk.folder
import start
from checkpoint.disk import store

TIMEOUT = 3 + os.getloadavg()[0] / os.cpu_count() / 2  # s
SLOW = 1.3 * TIMEOUT


def late(work):
    """work, which takes SLOW seconds longer the first time."""
    calls = []

    def slowed(*args, **keywords):
        if not calls:
            calls.append(args)
            time.sleep(SLOW)
        return work(*args, **keywords)

    return slowed


@pytest.mark.slow
def test_data_a_save_and_a_resume_that_take_longer_than_a_peer_may(tmp_path):
    """Rank 0 opens the data late and rank 1 writes late; then rank 1 verifies what it reads late, finds it
    damaged (rank 0's own is sound), all go back to the checkpoint before; and rank 1's writer behind the run
    is late."""
    args = [
        "llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--parallel.tp", "2",
        "--parallel.timeout_s", str(TIMEOUT), "--checkpoint.every", "1", "--log.dir", str(tmp_path),
        "--log.name", "r",
    ]

    def opens_late(rank):
        if rank == 0:
            start.open_loader = late(start.open_loader)

    slow_write = f"ckpt.mid_shard:rank=1:step={{}}:act=sleep={SLOW}"
    words = [*args, "--train.steps", "2"]
    end = job(tmp_path, 2, words, fault=slow_write.format(2), before=opens_late)
    assert end.codes == [0, 0], end.logs

    newest = tmp_path / "r" / "checkpoints" / "step_00000002"
    run_folder.flip_bit(newest / "rank_00001_shard_00000.safetensors")

    def verifies_late(rank):
        if rank == 1:
            checkpoint.disk.folder.read_hashed = late(checkpoint.disk.folder.read_hashed)

    words = [*args, "--train.steps", "3", "--checkpoint.async_save", "true"]
    end = job(tmp_path, 2, words, fault=slow_write.format(3), before=verifies_late)
    assert end.codes == [0, 0], end.logs
    assert "step_00000002 is rejected: " in end.logs[0] and "step_00000001 at step 1" in end.logs[0]
    store.verify(newest)  # replaced by the run that went on from step 1
    assert run_folder.saved_steps(tmp_path / "r") == [3, 2]


def test_a_part_that_never_ends_is_a_hang_with_a_name(tmp_path):
    args = [
        "llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--parallel.tp", "2", "--train.steps", "1",
        "--checkpoint.timeout_s", "2", "--log.dir", str(tmp_path), "--log.name", "r",
    ]
    end = job(tmp_path, 2, args, fault="ckpt.mid_shard:rank=1:act=sleep=100")
    assert set(end.codes) <= {76, -15} and 76 in end.codes, end.logs
    assert "rank 1 did not finish reading or writing within 2 s (checkpoint.timeout_s)" in "".join(end.logs)
