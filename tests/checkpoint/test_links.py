"""Shards that did not change are linked: what is linked is exact, no byte of the disk takes away the last
good checkpoint, and where there are no links all is written.
"""

import errno
import os

import pytest
import torch
from sample import blank, loaded, reseal, same, save_in_threads, state, whole

from checkpoint.disk import files, folder, links, store
from checkpoint.disk.folder import NewerFormat
from config import ConfigError
from parallel.sharding.boxes import Box
from scripts import scrub


@pytest.fixture(autouse=True)
def a_file_for_each_tensor(monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 1)


def tensors(step, changing=("b",)):
    """Those in `changing` are of this step, the others of none."""
    of = {key: torch.arange(40_000.0).view(200, 200) + number for number, key in enumerate("abc")}
    return {key: tensor + step * (key in changing) for key, tensor in of.items()}


def save(root, step, *, keep=9, changing=("b",), **more):
    return store.save(root, step, whole(tensors(step, changing)), {}, keep=keep, **more)


def three(root, **more):
    """Checkpoints after steps 1, 2 and 3: the third is the first that may link."""
    return [save(root, step, **more) for step in (1, 2, 3)]


def linked_files(path):
    """{file: the id of the save that wrote it} of the linked ones, as the index says."""
    entries = store.read_index(path)["files"]
    return {name: entry["save_id"] for name, entry in entries.items() if "save_id" in entry}


def names(path, file):
    return os.stat(path / file).st_nlink


def flip(file):
    data = bytearray(file.read_bytes())
    data[-100] ^= 8
    with open(file, "r+b") as f:  # in place, as a disk does it
        f.write(data)


def good(paths):
    found = []
    for path in paths:
        try:
            store.verify(path)
            found.append(path)
        except store.IntegrityError:
            pass
    return found


A, B, C = (f"shard_{number:05d}.safetensors" for number in range(3))


# ---- what is linked ----------------------------------------------------------------------------------------


def check_exact(root):
    """Save three times. The third may link: it has every value of its step, and verifies."""
    *_, second, third = three(root)
    assert same(loaded(third, tensors(3)), tensors(3)) and same(loaded(second, tensors(2)), tensors(2))
    assert store.verify(third).step == 3
    return second, third


def test_what_did_not_change_is_linked_and_the_rest_written(tmp_path):
    told = []
    second, third = check_exact(tmp_path)
    writer = store.read_index(second)["save_id"]
    assert not linked_files(second) and linked_files(third) == {A: writer, C: writer}
    for file, alike in ((A, True), (B, False), (C, True), ("meta.json", False)):
        assert os.path.samefile(second / file, third / file) is alike, file
    save(tmp_path, 4, changing=("a", "b", "c"), linked=told)
    save(tmp_path, 5, changing=(), linked=told)
    assert told == [0, 0]
    save(tmp_path, 6, changing=(), linked=told)
    size = sum(file.stat().st_size for file in (tmp_path / "step_00000006").glob("*.safetensors"))
    assert told[2] == size > 3 * 160_000


def test_an_older_reader_refuses_links_and_never_as_damage(tmp_path, monkeypatch):
    """It neither replaces nor purges them."""
    _, second, third = three(tmp_path)
    for module in (folder, store):
        monkeypatch.setattr(module, "VERSION", 1)
    reseal(second, lambda index: index.update(version=1))
    store.verify(second)
    with pytest.raises(NewerFormat, match="format 2, this code reads up to 1"):
        store.newest_checkpoint(tmp_path)
    with pytest.raises(ConfigError):
        save(tmp_path, 3)
    save(tmp_path, 4, keep=1, changing=("a", "b", "c"))
    assert third.is_dir() and not second.is_dir()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_one_changed_element_anywhere_is_seen(tmp_path, monkeypatch, dtype):
    """In a file of several tensors of many chunks, of any type; also one that the probe does not meet."""
    monkeypatch.setattr(store, "SHARD_BYTES", 1 << 30)
    monkeypatch.setattr(files, "CHUNK", 1000)
    monkeypatch.setattr(links, "PROBED", 5)
    truth = {key: torch.zeros(70, 31).to(dtype) for key in "abc"} | {"n": torch.tensor(0)}
    for step in (1, 2):
        store.save(tmp_path, step, whole(truth), {}, keep=9)
    for step, (key, place) in enumerate((("a", 0), ("b", 1234), ("c", 2169)), 3):
        truth[key].view(-1)[place] = 1
        path = store.save(tmp_path, step, whole(truth), {}, keep=9)
        assert not linked_files(path) and same(loaded(path, truth), truth)
    assert linked_files(store.save(tmp_path, 9, whole(truth), {}, keep=9))


def test_every_dtype_and_shape_is_linked(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 300)
    truth = state(1)
    for step in (1, 2, 3):
        path = store.save(tmp_path, step, whole(truth), {}, keep=9)
    shards = {file.name for file in path.glob("*.safetensors")}
    assert len(shards) > 3 and linked_files(path).keys() == shards
    assert same(loaded(path, truth), truth)


@pytest.mark.parametrize("change", [
    lambda t: {"x" + key: tensor for key, tensor in t.items()},
    lambda t: {key: tensor.view(400, 100) for key, tensor in t.items()},
    lambda t: {key: tensor.view(torch.int32) for key, tensor in t.items()},
], ids=["name", "shape", "dtype"])
def test_the_same_bytes_of_another_tensor_are_written(tmp_path, change):
    three(tmp_path, changing=())
    other = change(tensors(3, changing=()))
    path = store.save(tmp_path, 5, whole(other), {}, keep=9)
    assert not linked_files(path) and same(loaded(path, other), other)


def test_each_of_many_ranks_links_its_own_files(tmp_path):
    """And writes those that have changed."""
    def parts(step):
        mine = {"a": torch.arange(12.0).view(4, 3), "b": torch.full((4, 3), float(step))}
        return [[(Box.whole(key, (4, 3)), tensor)] for key, tensor in mine.items()]

    for step in (1, 2, 3):
        results = save_in_threads(tmp_path, step, parts(step))
    store.marker_path(results[0]).touch()  # keep is 2: a third one that stays
    paths = [save_in_threads(tmp_path, step, parts(step))[1] for step in (4, 5)]
    assert [list(linked_files(path)) for path in paths] == [[], ["rank_00000_shard_00000.safetensors"]]
    truth = {"a": torch.arange(12.0).view(4, 3), "b": torch.full((4, 3), 5.0)}
    assert same(loaded(paths[-1], truth), truth)


# ---- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep, linked", [(1, True), (2, False), (3, True), (5, True)])
def test_no_byte_takes_away_the_last_good_checkpoint(tmp_path, keep, linked):
    """After each of many saves of what never changes: whatever byte the disk loses, a good one is left if
    there was more than one before. With two, links would take it."""
    count = 0
    for step in range(1, 9):
        save(tmp_path, step, keep=keep, changing=())
        paths = [path for _, path in store.committed_checkpoints(tmp_path)]
        count += len(linked_files(paths[0]))
        for path in paths:
            for file in (A, B, C):
                assert names(path, file) <= 2
                if len(paths) > 1:
                    flip(path / file)
                    assert good(paths), (path, file)
                    flip(path / file)
    assert (count > 0) is linked


def test_keep_1_links_to_the_checkpoint_that_it_then_purges(tmp_path):
    for step in (1, 2, 3):
        path = save(tmp_path, step, keep=1)
    assert [step for step, _ in store.committed_checkpoints(tmp_path)] == [3]
    assert linked_files(path).keys() == {A, C} and names(path, A) == 1
    assert same(loaded(path, tensors(3)), tensors(3))


def test_a_permanent_checkpoint_is_written_whole(tmp_path):
    three(tmp_path, changing=())
    for step in (4, 5):
        path = save(tmp_path, step, changing=(), mark="keep_every or keep_at")
        assert not linked_files(path)
    assert linked_files(save(tmp_path, 6, changing=()))


def test_a_flipped_byte_is_in_both_and_scrub_names_both(tmp_path, capsys):
    paths = three(tmp_path)
    flip(paths[1] / A)
    assert good(paths) == paths[:1]
    assert scrub.main([str(tmp_path)]) == 79
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["good", "damaged", "damaged", "3"]
    assert all(A in line for line in told[1:3])
    log = []
    assert store.newest_checkpoint(tmp_path, log) == paths[0] and len(log) == 3


def test_a_file_that_the_disk_has_damaged_is_not_linked_but_written(tmp_path):
    """The save after it has a good one."""
    paths = [save(tmp_path, step) for step in (1, 2)]
    flip(paths[1] / A)
    third = save(tmp_path, 3)
    assert linked_files(third).keys() == {C} and good([*paths, third]) == [paths[0], third]


def test_a_file_of_another_save_is_told_from_a_linked_one(tmp_path):
    """Both in place of a linked one and of one that was written."""
    first, second, third = three(tmp_path)
    for file in (A, B):
        data = (third / file).read_bytes()
        (third / file).unlink()
        (third / file).write_bytes((first / file).read_bytes())
        with pytest.raises(store.IntegrityError, match=f"{file}: save id mismatch"):
            store.verify(third)
        got = blank(tensors(3))
        with pytest.raises(store.IntegrityError, match="save id mismatch"):
            store.load(third, whole(got))
        assert same(got, blank(tensors(3)))
        (third / file).write_bytes(data)
    store.verify(third)


@pytest.mark.parametrize("value", [None, 1, ["0"], "0" * 32])
def test_a_forged_id_in_the_index_is_refused(tmp_path, value):
    *_, third = three(tmp_path)
    reseal(third, lambda data: data["files"][A].update(save_id=value))
    with pytest.raises(store.IntegrityError):
        store.verify(third)


# ---- where there are no links ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSPC])
def test_without_hard_links_all_is_written(tmp_path, monkeypatch, error):
    def refuse(*args, **more):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    *_, third = check_exact(tmp_path)
    assert not linked_files(third)


def test_a_link_that_was_made_though_the_call_failed_is_replaced(tmp_path, monkeypatch):
    """As over NFS, where an answer was lost."""
    real = os.link

    def lost(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", lost)
    *_, third = check_exact(tmp_path)
    assert not linked_files(third)


@pytest.mark.parametrize("how", ["gone", "a link", "a folder", "garbage", "cut"])
def test_beside_an_earlier_file_that_cannot_be_read_all_is_written(tmp_path, how):
    _, second = [save(tmp_path, step) for step in (1, 2)]
    file, data = second / A, (second / A).read_bytes()
    file.unlink()
    if how == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif how == "a folder":
        file.mkdir()
    elif how in ("garbage", "cut"):
        file.write_bytes(data[:-1] if how == "cut" else b"\xff" * 500)
    third = save(tmp_path, 3)
    assert linked_files(third).keys() == {C} and store.verify(third)
    assert (third / A).is_file() and not (third / A).is_symlink()
