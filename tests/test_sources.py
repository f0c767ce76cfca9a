"""Validation of each source of a blend: its loss is that of a run that reads the source alone."""

import shutil

import pytest
import run_folder
from program import settings, trained
from ranks import corpus
from test_phases import write_tokens

from data.blend import source_names
from parallel.wire.world import World

SPLIT = {"split": "60,40"}


def run(cfg, folder) -> list[dict]:
    assert trained(World(), cfg, str(folder), lambda *_, **__: None) == 0
    return run_folder.validations(folder)


@pytest.fixture
def sources(tmp_path):
    return {"text": corpus(tmp_path), "code": write_tokens(tmp_path, "code", 600)}


@pytest.mark.slow
def test_the_loss_of_a_source_is_that_of_a_run_that_reads_it_alone(tmp_path, sources):
    blend = f"0.7 {sources['text']} 0.3 {sources['code']}"
    found = run(settings(blend, eval={"every": 1, "batches": 2}, data=SPLIT), tmp_path / "blend")
    for name, path in sources.items():
        first = run(settings(path, eval={"every": 1, "batches": 2}, data=SPLIT), tmp_path / "alone")[0]
        assert found[0][f"val/{name}/loss"] == pytest.approx(first["val_loss"], rel=1e-12)
        assert not any(key.startswith("val/") for key in first)
        assert len({row[f"val/{name}/loss"] for row in found}) == 3  # it moves
        shutil.rmtree(tmp_path / "alone")
    assert found[0]["val/text/loss"] != found[0]["val/code/loss"]
    assert [row["step"] for row in found] == [0, 1, 2]


def test_none_is_validated_apart_where_it_is_not_wanted(tmp_path, sources):
    blend = f"0.7 {sources['text']} 0.3 {sources['code']}"
    cfg = settings(blend, eval={"every": 1, "source_batches": 0}, data=SPLIT)
    assert not any(key.startswith("val/") for row in run(cfg, tmp_path / "none") for key in row)


def test_a_source_is_named_by_the_shortest_path_that_tells_it_apart():
    assert source_names(["data/web", "data/code.bin"]) == ["web", "code"]
    assert source_names(["a/text", "b/text", "c"]) == ["a/text", "b/text", "c"]
