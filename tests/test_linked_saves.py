"""Saves that link, in real runs of train.py: a step whose gradients are NaN is skipped, so its checkpoint is
that of the step before.

Skipped are the steps in SKIPPED, and every step is saved. What a run with links ends with is compared with a
run that links nothing (checkpoint.keep 2), sample by sample and bit by bit.
"""

import os
import pathlib
import shutil

import pytest
from ranks import MODEL, corpus, job
from test_resume import STEPS, leftovers, run, story, weights

from checkpoint.disk import store
from scripts import scrub

SKIPPED = (4, 6, 7)
NAN = "; ".join(f"step.backward:step={step}:act=nan" for step in SKIPPED)
ALWAYS = ("--checkpoint.every", "1")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("saves")


def save_all(home: pathlib.Path, name: str, keep: int, fault: str = "", extra: tuple = ()) -> int:
    """The exit code of a start."""
    return run(home, name, f"{NAN}; {fault}".rstrip("; "), (*ALWAYS, "--checkpoint.keep", str(keep), *extra))


@pytest.fixture(scope="module")
def plain(home):
    """The run that links nothing, because it keeps two."""
    assert save_all(home, "plain", 2) == 0
    assert not any(linked(path) for path in checkpoints(home / "plain"))
    assert not steps_linked(home / "plain")
    return home / "plain"


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Newest first."""
    return [path for _, path in store.committed_checkpoints(folder / "checkpoints")]


def linked(path: pathlib.Path) -> set[str]:
    return {name for name, entry in store.read_index(path)["files"].items() if "save_id" in entry}


def steps_linked(folder: pathlib.Path) -> list[int]:
    """The steps whose save says that it linked files."""
    told = folder.with_name(f"{folder.name}.log").read_text().split("saved ")[1:]
    return [int(text.split("step_")[1][:8]) for text in told if ", linked " in " ".join(text.split())]


def same_as(folder: pathlib.Path, plain: pathlib.Path) -> None:
    assert story(folder) == story(plain) and weights(folder) == weights(plain)
    for path in checkpoints(folder):
        store.verify(path)
    assert not leftovers(folder)


@pytest.mark.slow
@pytest.mark.parametrize("keep, which", [(1, [4, 6, 7]), (2, []), (9, [4, 6])])
def test_what_a_skipped_step_left_alone_is_linked(home, plain, keep, which):
    """With nine, that of step 7 would be the third name."""
    name = f"keep{keep}"
    assert save_all(home, name, keep) == 0
    same_as(home / name, plain)
    assert steps_linked(home / name) == which
    assert len(checkpoints(home / name)) == keep
    shutil.rmtree(home / name)


@pytest.mark.slow
def test_a_save_in_a_thread_links_too(home, plain):
    assert save_all(home, "thread", 9, extra=("--checkpoint.async_save", "true")) == 0
    same_as(home / "thread", plain)
    assert [step for step in range(1, STEPS + 1) if linked(checkpoints(home / "thread")[-step])] == [4, 6]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["post_shard", "pre_index", "pre_rename", "post_rename"])
def test_killed_between_the_link_and_the_end_of_the_save(home, plain, point):
    """The next start continues from the checkpoint that was linked to, or from the linked one."""
    assert save_all(home, point, 5, f"ckpt.{point}:step=4:act=SIGKILL") == -9
    assert store.newest_checkpoint(home / point / "checkpoints").name == (
        "step_00000004" if point == "post_rename" else "step_00000003"
    )
    assert save_all(home, point, 5) == 0
    same_as(home / point, plain)
    assert linked(checkpoints(home / point)[STEPS - 6]), "step 6"
    shutil.rmtree(home / point)


@pytest.mark.slow
def test_resumed_from_a_linked_checkpoint_and_saved_again(home, plain):
    """Bit for bit; and the step that is there already stays as it is."""
    folder = home / "again"
    assert save_all(home, "again", 9, "step.begin:step=7:act=SIGTERM") == 75  # stopped after step 7
    shutil.rmtree(checkpoints(folder)[0])
    newest = checkpoints(folder)[0]
    before = (newest / "index.json").read_bytes()
    assert newest.name == "step_00000006" and linked(newest)
    assert save_all(home, "again", 9) == 0
    assert "step_00000006 at step 6" in " ".join((home / "again.log").read_text().split())
    assert (newest / "index.json").read_bytes() == before
    same_as(folder, plain)


@pytest.mark.slow
def test_each_rank_links_its_files(tmp_path):
    """Two ranks, killed in the save of the skipped step, and started again."""
    args = ["llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--log.dir", str(tmp_path), *ALWAYS,
            "--train.steps", "5", "--checkpoint.keep", "4", "--parallel.zero", "1"]
    for name, fault, codes in (
        ("whole", "", [0, 0]),
        ("killed", "; ckpt.pre_rename:rank=0:step=4:act=SIGKILL", [-9, 76]),
        ("killed", "", [0, 0]),
    ):
        nan = "step.backward:step=4:act=nan"
        end = job(tmp_path / name, 2, [*args, "--log.name", name], fault=f"{nan}{fault}")
        assert end.codes[0] == codes[0] and bool(end.codes[1]) is bool(codes[1]), end.logs
    digests = []
    for name in ("whole", "killed"):
        path = checkpoints(tmp_path / name)[1]
        assert path.name == "step_00000004" and store.verify(path)
        shards = {file.name for file in path.glob("*.safetensors")}
        assert linked(path) == shards and {file[:10] for file in shards} == {"rank_00000", "rank_00001"}
        pieces = store.read_index(checkpoints(tmp_path / name)[0])["pieces"]
        digests.append(sorted((piece["key"], piece["start"], piece["checksum"]) for piece in pieces))
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_without_hard_links_all_is_written(home, plain, monkeypatch):
    def refuse(*args, **more):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert save_all(home, "nolinks", 9) == 0
    same_as(home / "nolinks", plain)
    assert not steps_linked(home / "nolinks") and not any(map(linked, checkpoints(home / "nolinks")))


@pytest.mark.slow
def test_a_flipped_byte_of_a_linked_file_and_the_start_after_it(home, plain, capsys):
    """Steps 5 and 6 are damaged, scrub names both, and the run continues from 4."""
    assert save_all(home, "flipped", 9, "step.begin:step=7:act=SIGKILL") == -9
    folder = home / "flipped"
    newest = checkpoints(folder)[0]
    (shard,) = linked(newest)
    with open(newest / shard, "r+b") as file:  # in place: both names see it
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert scrub.main([str(folder)]) == 79
    states = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert states == ["good", "good", "good", "good", "damaged", "damaged", "6"]
    assert save_all(home, "flipped", 9) == 0
    told = " ".join((home / "flipped.log").read_text().split())
    assert all(f"checkpoint step_0000000{step} is rejected" in told for step in (5, 6))
    assert "step_00000004 at step 4" in told
    same_as(folder, plain)
