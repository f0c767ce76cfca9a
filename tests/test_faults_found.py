"""Faults that were found in runs of train.py, each as it was found."""

import hashlib
import json
import os
import shutil
import time

import pytest
import run_folder
import torch
from safetensors.torch import load_file
from test_resume import run

import train
from checkpoint import run_folder as run_folders
from checkpoint.disk import store
from checkpoint.disk.folder import index_bytes, seal_index
from checkpoint.trained import load_run
from config import ConfigError


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("faults")
    assert run(home, "clean") == 0
    return home


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["config.yaml", "tokenizer", "metrics.jsonl", "config.yaml.tmp", "summary.json", "checkpoints"]
)
def test_no_link_in_a_run_folder_is_written_through(home, name):
    folder, outside = home / f"link-{name}", home / f"outside-{name}"
    folder.mkdir()
    outside.mkdir()
    target = outside / "mine"
    if "." in name and name != "metrics.jsonl":
        target.write_text("mine")
    elif name != "metrics.jsonl":  # which dangles
        target.mkdir()
    before = sorted(outside.rglob("*"))
    (folder / name).symlink_to(target)
    assert run(home, folder.name) == 2
    (line,) = (home / f"{folder.name}.log").read_text().splitlines()
    assert line.startswith("error: ") and f"{folder.name}/{name}: is a link" in line
    assert sorted(outside.rglob("*")) == before
    assert not target.is_file() or target.read_text() == "mine"


def test_a_link_in_the_tokenizer_s_folder_is_refused(home):
    shutil.copytree(home / "clean", home / "inner")
    file = next((home / "inner" / "tokenizer").iterdir())
    file.unlink()
    file.symlink_to(home / "elsewhere")
    assert run(home, "inner") == 2 and not (home / "elsewhere").exists()


def test_the_run_folder_itself_may_be_a_link(home):
    (home / "other-disk").mkdir()
    (home / "linked").symlink_to(home / "other-disk")
    assert run(home, "linked") == 0
    assert (home / "other-disk" / "config.yaml").is_file()


def test_too_small_a_disk_is_found_before_the_first_step(home, monkeypatch):
    free = shutil.disk_usage(home)._replace(free=1000)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: free)
    assert run(home, "small") == 82
    told = (home / "small.log").read_text()
    assert "1,000 bytes are free" in told and not (home / "small" / "metrics.jsonl").exists()


def test_the_room_that_is_looked_for_is_that_of_the_checkpoint(home, monkeypatch):
    """To a byte, with the average of the weights too: each tensor of the first checkpoint is in it."""
    asked = home / "asked"
    check = store.check_free_space

    def noting(root, num_bytes):
        asked.write_text(str(num_bytes))
        check(root, num_bytes)

    monkeypatch.setattr(store, "check_free_space", noting)
    assert run(home, "averaged", extra=("--train.ema", "0.9")) == 0
    saved = sorted((home / "averaged" / "checkpoints").iterdir())[-1]
    held = sum(
        tensor.numel() * tensor.element_size()
        for file in saved.glob("*.safetensors")
        for tensor in load_file(file).values()
    )
    assert int(asked.read_text()) == held > 0


def test_a_folder_that_is_not_shared_is_found_before_the_first_step(home, monkeypatch):
    """The files of rank 0 are not there for this rank: as on a node with a disk of its own."""
    monkeypatch.setattr(run_folders, "write_token", lambda folder: ".probe-of-another-disk")
    assert run(home, "apart") == 2
    told = (home / "apart.log").read_text()
    assert "is not the folder rank 0 writes to" in told
    assert not (home / "apart" / "metrics.jsonl").exists()


def test_nothing_is_left_of_the_probe(home):
    assert not [path for path in (home / "clean").iterdir() if "probe" in path.name]


def test_a_run_folder_that_is_removed_under_the_run(home, monkeypatch):
    """At step 5: there is a warning, and the checkpoints of steps 6 and 9 are ones that can be read."""
    step_of = train.train_step

    def removing(run, step, *rest, **more):
        if step == 5:
            shutil.rmtree(home / "gone")
        return step_of(run, step, *rest, **more)

    monkeypatch.setattr(train, "train_step", removing)
    assert run(home, "gone") == 0
    told = (home / "gone.log").read_text()
    assert told.count("was removed or emptied before step 6") == 1
    assert sorted(os.listdir(home / "gone" / "tokenizer")) == sorted(os.listdir(home / "clean" / "tokenizer"))
    assert (home / "gone" / "config.yaml").is_file()
    assert run_folder.saved_steps(home / "gone") == [9, 6]
    steps = (home / "gone" / "metrics.jsonl").read_text().splitlines()
    assert '"step": 9' in steps[-1]


def forge(checkpoint, change):
    """Other sizes of the model in meta.json, sealed again."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["config"]["model"].update(change)
    text = json.dumps(meta).encode()
    (checkpoint / "meta.json").write_bytes(text)
    index = json.loads((checkpoint / "index.json").read_text())
    index["files"]["meta.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (checkpoint / "index.json").write_bytes(index_bytes(index))
    (checkpoint / "index.sha256").write_bytes(seal_index(index_bytes(index)))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 10**6},
        {"mlp": {"width": 10**9}},
        {"vocab": 10**12},
        {"layers": 10**6},
        {"mlp": {"kind": "experts", "experts": 10**6, "width": 48}},
    ],
)
def test_forged_sizes_are_refused_before_they_are_allocated(home, tmp_path, change):
    shutil.copytree(home / "clean", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000009"
    load_run(str(checkpoint), torch.device("cpu"))
    forge(checkpoint, change)
    begun = time.process_time()
    with pytest.raises(ConfigError, match="they belong to different models"):
        load_run(str(checkpoint), torch.device("cpu"))
    assert time.process_time() - begun < 1
