"""durable/mirror.py on a folder of this machine as the store (file://): what is there after every save,
and when the store dies at any of its operations."""

import functools
import random
import shutil
import sys
import threading

import pytest
from sample import loaded, same, state, whole

from checkpoint import remote
from checkpoint.disk import store
from checkpoint.disk.store import IntegrityError
from checkpoint.state import find_checkpoint
from config import ConfigError
from data import remote as files
from data.remote import RemoteError, open_folder
from durable import mirror
from durable.uploader import CheckpointUploader

WRITES = ("pipe_file", "put_file", "rm_file")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(files, "FIRST_WAIT", 0.0)


@pytest.fixture
def place(tmp_path):
    """(the run's place in the store, the run folder)"""
    more = tmp_path / "run" / "tokenizer" / "additional_chat_templates"
    more.mkdir(parents=True)
    (more / "tool_use.jinja").write_text("")
    (tmp_path / "run" / "config.yaml").write_text("a: 1\n")
    (tmp_path / "run" / "tokenizer" / "tokenizer.bytes").write_text("")
    return open_folder(f"file://{tmp_path}/store/run", "checkpoint.mirror"), tmp_path / "run"


def save(folder, step, keep=2, mark=""):
    return store.save(
        folder / "checkpoints", step, whole(state(step)), {"tokens": step}, keep=keep, mark=mark
    )


def steps_there(run):
    return list(remote.complete_steps(run.folder("checkpoints")))


class DyingStore:
    """Stands for a filesystem; its operations fail from number `last` on. torn: the one that fails first has
    written half of its bytes."""

    def __init__(self, filesystem, last, torn):
        self.inner, self.left, self.torn = filesystem, last, torn

    def __getattr__(self, name):
        work = getattr(self.inner, name)
        if name in ("invalidate_cache", "protocol"):
            return work
        return functools.partial(self.call, name, work)

    def call(self, name, work, *args, **keywords):
        self.left -= 1
        if self.left == -1 and self.torn and name == "pipe_file":
            work(args[0], args[1][: len(args[1]) // 2])
        if self.left < 0:
            raise TimeoutError("the store is gone")
        return work(*args, **keywords)


def dying(run, last, torn):
    return files.RemoteFolder(run.url, DyingStore(run.filesystem, last, torn), run.path)


def test_the_store_keeps_what_the_run_folder_keeps(place):
    """Random saves under random rules, each sent: the same steps and the same bytes."""
    run, folder = place
    random_ = random.Random(0)
    for step in range(1, 25):
        keep = random_.randint(1, 4)
        save(folder, step, keep, mark=random_.choice(("", "", "by hand")))
        mirror.update(run, folder, keep)
        local = store.committed_checkpoints(folder / "checkpoints")
        assert steps_there(run) == [number for number, _ in local] and steps_there(run)[0] == step
        for number in steps_there(run):
            name = store.checkpoint_folder(folder, number).name
            for file in (folder / "checkpoints" / name).iterdir():
                assert run.read(f"checkpoints/{name}/{file.name}") == file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True])
def test_a_store_that_dies_at_any_operation_loses_nothing_and_is_healed(place, tmp_path, torn):
    """At every operation of an update, which sends step 30 and removes step 10: what a fresh machine finds is
    step 20 or step 30, whole; the next update makes it what it would have been."""
    run, folder = place
    save(folder, 10), mirror.update(run, folder, 2)
    save(folder, 20), mirror.update(run, folder, 2)
    save(folder, 30)
    seen, number, is_done = set(), 0, False
    before = tmp_path / "before"
    shutil.copytree(run.path, before)
    while not is_done:
        shutil.rmtree(run.path), shutil.copytree(before, run.path)
        try:
            mirror.update(dying(run, number, torn), folder, 2)
            is_done = True
        except RemoteError as error:
            assert "the store is gone" in str(error) and run.url in str(error)

        fresh = tmp_path / f"fresh{number}"
        notes = mirror.restore(run, fresh)
        path = store.newest_checkpoint(fresh / "checkpoints")
        step = store.verify(path).step
        assert step in (20, 30) and same(loaded(path, state(step)), state(step)), notes
        assert not any("rejected" in note for note in notes)
        assert (step == 30) or not is_done
        seen.add(step)

        mirror.update(run, folder, 2)
        assert steps_there(run) == [30, 20]
        assert [name for name in run.folder("checkpoints").names()] == ["step_00000020", "step_00000030"]
        number += 1
    assert seen == {20, 30} and number > 15


def test_a_step_that_was_saved_again_replaces_its_namesake_whole(place, tmp_path):
    """The run went back, and saves other tensors under the same step: never a mix, and never none of the
    others."""
    run, folder = place
    save(folder, 10), save(folder, 20), mirror.update(run, folder, 2)
    other = tmp_path / "other"
    store.save(other / "checkpoints", 20, whole(state(99)), {}, keep=2)
    for last in range(40):
        mirror.update(run, folder, 2)
        try:
            mirror.update(dying(run, last, torn=False), other, 2)
        except RemoteError:
            pass
        for step in steps_there(run):
            there = run.folder("checkpoints")
            path = remote.fetch(there, step, remote.complete_steps(there)[step], tmp_path / f"back{last}")
            assert same(loaded(path, state(1)), state(99)) or same(loaded(path, state(1)), state(step))


def test_what_is_damaged_in_the_store_is_left_for_the_one_before(place, tmp_path):
    run, folder = place
    save(folder, 10), mirror.update(run, folder, 3)
    path = save(folder, 20)
    mirror.update(run, folder, 3)
    (shard,) = path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    run.write(f"checkpoints/{path.name}/{shard.name}", bytes(data))
    notes = mirror.restore(run, tmp_path / "fresh")
    assert "checkpoint 20 of" in notes[0] and "is rejected" in notes[0] and "step_00000010" in notes[1]
    assert [step for step, _ in store.committed_checkpoints(tmp_path / "fresh" / "checkpoints")] == [10]
    names = {file.name for file in (tmp_path / "fresh" / "checkpoints").iterdir()}
    assert names == {"step_00000010", "latest"}
    for name in ("tokenizer.bytes", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "fresh" / "tokenizer" / name).exists()


def test_only_a_newer_checkpoint_comes_back(place):
    run, folder = place
    save(folder, 10), save(folder, 20), mirror.update(run, folder, 2)
    assert mirror.restore(run, folder) == []
    save(folder, 30)
    assert mirror.restore(run, folder) == []
    mirror.update(run, folder, 2)
    store.move_to_trash(folder / "checkpoints" / "step_00000030")
    assert "restored step_00000030" in mirror.restore(run, folder)[0]
    assert same(loaded(folder / "checkpoints" / "step_00000030", state(30)), state(30))
    # what looks damaged here is replaced by what the store has
    (folder / "checkpoints" / "step_00000030" / "index.json").write_text("{}")
    assert "restored step_00000030" in mirror.restore(run, folder)[0]
    assert same(loaded(folder / "checkpoints" / "step_00000030", state(30)), state(30))


def test_a_url_that_holds_no_checkpoint_is_refused_with_what_there_is(place, tmp_path):
    run, folder = place
    with pytest.raises(ConfigError, match="holds no checkpoint; give the URL"):
        remote.local_checkpoint(run.url, tmp_path / "downloads")
    save(folder, 10), mirror.update(run, folder, 2)
    path = remote.local_checkpoint(run.url, tmp_path / "downloads")
    assert same(loaded(path, state(10)), state(10)) and path.parent.parent.name == "run"
    assert remote.local_checkpoint(f"{run.url}/checkpoints/step_00000010/", tmp_path / "downloads") == path
    with pytest.raises(ConfigError, match=r"no checkpoint of that step \(there are 10\)"):
        remote.local_checkpoint(f"{run.url}/checkpoints/step_00000020", tmp_path / "downloads")


@pytest.mark.parametrize("is_url", [False, True])
def test_a_run_its_checkpoints_and_one_of_them_name_a_checkpoint(place, tmp_path, is_url):
    """Here, or in a store: then it is that of the local copy, below the folder of downloads."""
    run, folder = place
    for step in (10, 20):
        save(folder, step), mirror.update(run, folder, 2)
    find = functools.partial(find_checkpoint, log=[], downloads=tmp_path / "downloads")
    here, root = (run.url, tmp_path / "downloads") if is_url else (str(folder), folder)
    newest = find(here)
    assert newest.name == "step_00000020" and newest.is_relative_to(root)
    assert find(f"{here}/checkpoints") == newest
    older = find(f"{here}/checkpoints/step_00000010")
    assert older == newest.with_name("step_00000010")
    assert same(loaded(older, state(10)), state(10))
    with pytest.raises(IntegrityError, match="^it is rotten$"):
        find(str(older), bad={older: "it is rotten"})
    if not is_url:
        assert find(here, bad={newest: "it is rotten"}) == older
        shutil.rmtree(folder / "checkpoints")
        with pytest.raises(ConfigError, match="holds no checkpoint; give a run folder"):
            find(here)


def test_the_uploader_never_holds_up_its_caller_and_serves_the_last_request(tmp_path):
    gate, begun, calls = threading.Event(), threading.Event(), []

    def update():
        calls.append(len(calls))
        begun.set()
        assert gate.wait(30)

    uploader = CheckpointUploader("s3://b/run", tmp_path, update, may_fail=1)
    uploader.request()
    assert begun.wait(30)
    for _ in range(5):
        uploader.request()
    gate.set()
    uploader.finish(30)
    assert 2 <= len(calls) <= 3  # a third, if the thread takes the request before finish() makes its own
    assert not uploader.has_failed() and uploader.pop_lines() == []


def test_failed_uploads_in_a_row_are_counted_named_and_end_the_run(tmp_path):
    outcomes = iter([OSError("one"), None, OSError("two"), RemoteError("three"), None])

    def update():
        outcome = next(outcomes)
        if outcome:
            raise outcome

    uploader = CheckpointUploader("s3://b/run", tmp_path, update, may_fail=2)
    uploader.upload()
    assert "failed (1 of 2 in a row): OSError: one" in uploader.pop_lines()[0]
    uploader.upload()
    assert "works again, after 1 that failed" in uploader.pop_lines()[0] and uploader.pop_lines() == []
    uploader.check()
    uploader.upload(), uploader.upload()
    assert uploader.has_failed()
    with pytest.raises(RemoteError, match="2 uploads in a row have failed .*three.*the same command resumes"):
        uploader.check()
    uploader.upload()  # this one works, but the other ranks may have heard that the run ends
    assert uploader.has_failed()


@pytest.mark.parametrize("url, words", [
    ("s3://user:secret@bucket/x", "a password must not be in a URL"),
    ("nosuch://bucket/x", "nosuch"),
    ("s3://", "must name a place in the store"),
    ("s3://bucket/../x", "without . and .."),
])
def test_a_url_that_names_no_place_is_refused_in_one_line(url, words):
    with pytest.raises(ConfigError) as caught:
        open_folder(url, "checkpoint.mirror")
    text = str(caught.value)
    assert words in text and "\n" not in text and "secret" not in text


@pytest.mark.parametrize("package, url", [("gcsfs", "gs://bucket/x"), ("fsspec", "gs://bucket/x")])
def test_a_missing_package_is_named_with_what_installs_it(package, url, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    words = rf"checkpoint.mirror: .*{package}.*pip install .bevatron\[stores\]"
    with pytest.raises(ConfigError, match=words):
        open_folder(url, "checkpoint.mirror")
