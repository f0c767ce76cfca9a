"""scripts.scrub: every damaged checkpoint of a run is named, with its file; nothing is written."""

import random

import pytest
import torch

from checkpoint.disk import store
from config import ConfigError
from parallel.sharding.boxes import Box
from runtime.failure import fail_cleanly
from scripts import scrub


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3):
        weights = torch.full((40, 5), float(step))
        store.save(tmp_path / "run" / "checkpoints", step, [(Box.whole("w", (40, 5)), weights)], {}, keep=9)
    return tmp_path / "run"


def folder(run, step):
    return run / "checkpoints" / f"step_{step:08d}"


def everything(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_good_checkpoints_are_called_good_and_left_alone(run, capsys):
    before = everything(run)
    assert scrub.main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["good", "good", "good", "3"]
    assert str(folder(run, 1)) in lines[0] and " bytes in " in lines[0]
    assert lines[-1] == "3 checkpoints, 0 damaged"
    assert everything(run) == before


def test_every_flipped_bit_in_every_file_is_named(run, capsys):
    """In the one in the middle, which no start would look at."""
    rnd, before = random.Random(0), everything(run)
    for file in sorted(folder(run, 2).iterdir()):
        for _ in range(10):
            data = bytearray(before[file])
            bit = rnd.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
            assert scrub.main([str(run)]) == 79
            lines = capsys.readouterr().out.splitlines()
            assert [line.split()[0] for line in lines] == ["good", "damaged", "good", "3"]
            assert str(folder(run, 2)) in lines[1] and lines[-1] == "3 checkpoints, 1 damaged"
            assert file.name.split(".")[0] in lines[1]
            file.write_bytes(before[file])


def test_one_checkpoint_and_several_places(run, capsys):
    (folder(run, 1) / "meta.json").unlink()
    assert scrub.main([str(folder(run, 3))]) == 0
    assert scrub.main([str(folder(run, 3)), str(run / "checkpoints")]) == 79
    out = capsys.readouterr().out
    assert "damaged" in out and "meta.json: no such file or directory" in out


def test_a_folder_under_another_step_is_damaged(run, capsys):
    folder(run, 3).rename(folder(run, 4))
    assert scrub.main([str(run)]) == 79
    assert "holds step 3" in capsys.readouterr().out


def test_places_without_checkpoints_are_refused_before_work(run, tmp_path, capsys):
    for place in (str(tmp_path), str(tmp_path / "none"), "s3://bucket/runs/first"):
        with pytest.raises(ConfigError, match="scrub: "):
            scrub.main([str(run), place])
        assert not capsys.readouterr().out
    assert fail_cleanly(scrub.main, [str(tmp_path)]) == 2
