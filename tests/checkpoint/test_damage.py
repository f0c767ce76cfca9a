"""Damage of every kind to a committed checkpoint: it is found and named, nothing is loaded, the older one is
used.
"""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from sample import blank, loaded, reseal, same, whole

from checkpoint.disk import files, folder, store
from checkpoint.state import newest_start
from config import ConfigError
from config.reading import defaults
from parallel.sharding.boxes import Box
from parallel.wire.comm import Group

# ---- accidents ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_flipped_bit_is_found(saved):
    """300 of 300 single flipped bits, over all files of the folder, by verify and by load; nothing is
    loaded.
    """
    _, path, truth = saved
    everything = sorted(path.iterdir())
    assert {p.name for p in everything} == {
        "index.json", "index.sha256", "meta.json", "shard_00000.safetensors",
    }
    rnd, found = random.Random(0), 0
    got = blank(truth)
    before = {k: t.clone() for k, t in got.items()}
    for i in range(300):
        file = everything[i % len(everything)]
        good = file.read_bytes()
        bit = rnd.randrange(len(good) * 8)
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        with pytest.raises(store.IntegrityError, match=path.name):
            store.verify(path)
        found += 1
        with pytest.raises(store.IntegrityError):
            store.read_meta(path)
            store.load(path, whole(got))
        file.write_bytes(good)
    assert found == 300 and same(got, before)
    store.verify(path)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", ["index.json", "index.sha256", "meta.json", "shard_00000.safetensors"])
@pytest.mark.parametrize(
    "how", ["empty", "half", "one short", "one long", "deleted", "a link", "a folder", "a pipe"]
)
def test_a_broken_file_is_named_and_the_older_one_wins(saved, name, how):
    root, path, truth = saved
    file = path / name
    data = file.read_bytes()
    new = {
        "empty": b"", "half": data[: len(data) // 2], "one short": data[:-1], "one long": data + b"\0",
    }.get(how)
    file.unlink()
    if new is not None:
        file.write_bytes(new)
    elif how == "a link":
        (root / "elsewhere").write_bytes(data)
        file.symlink_to(root / "elsewhere")
    elif how == "a folder":
        file.mkdir()
    elif how == "a pipe":
        os.mkfifo(file)
    with pytest.raises(store.IntegrityError) as e:
        store.verify(path)
    assert name.split(".")[0] in str(e.value)
    if name.startswith("shard"):
        if new is not None:
            assert f"size {len(new)} != {len(data)}" in str(e.value)
        got = blank(truth)
        with pytest.raises(store.IntegrityError, match=name):
            store.load(path, whole(got))
        assert same(got, blank(truth))
    log = []
    assert store.newest_checkpoint(root, log) == root / "step_00000010"
    assert len(log) == 2
    assert "step_00000020 is rejected" in log[0]
    assert "latest names 'step_00000020'" in log[1]


def test_a_shard_of_another_save_is_named_so(saved):
    root, path, truth = saved
    shutil.copy(root / "step_00000010" / "shard_00000.safetensors", path)
    for call in (lambda: store.verify(path), lambda: loaded(path, truth)):
        with pytest.raises(store.IntegrityError, match="save id mismatch"):
            call()
    shutil.copy(root / "step_00000010" / "meta.json", path)
    with pytest.raises(store.IntegrityError, match="meta.json"):
        store.read_meta(path)


def test_load_needs_only_the_files_it_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 1)
    truth = {k: torch.randn(5) for k in "abc"}
    path = store.save(tmp_path, 1, whole(truth), {}, keep=1)
    (path / "shard_00001.safetensors").unlink()
    got = torch.zeros(5)
    store.load(path, [(Box.whole("c", (5,)), got)], strict=False)
    assert torch.equal(got, truth["c"])


def test_a_folder_under_another_step_is_rejected(saved):
    root, path, truth = saved
    moved = path.rename(root / "step_00000030")
    log = []
    assert store.newest_checkpoint(root, log) == root / "step_00000010"
    assert "step_00000030 is rejected" in log[0]
    assert same(loaded(moved, truth), truth)  # by its path it is as good as ever


def test_where_no_good_one_is_left_each_is_named(saved):
    root, path, _ = saved
    for p in root.glob("step_*"):
        (p / "meta.json").write_text("{}")
    left = "no good checkpoint left of 2.*step_00000020.*step_00000010"
    with pytest.raises(store.IntegrityError, match=left):
        store.newest_checkpoint(root)
    with pytest.raises(store.IntegrityError, match="no such checkpoint folder"):
        store.load(root / "step_00000099", [])


@pytest.mark.parametrize(
    "latest",
    [None, "", "step_00000010\n", "step_00000099\n", "../..", "\xff\0?", "x" * 10**5],
    ids=["absent", "empty", "older", "nothing", "outside", "garbage", "long"],
)
def test_latest_is_only_a_hint(saved, latest):
    root, path, _ = saved
    (root / "latest").unlink()
    if latest is not None:
        (root / "latest").write_text(latest, encoding="latin-1")
    log = []
    assert store.newest_checkpoint(root, log) == path
    assert len(log) == 1 and "latest" in log[0] and "using step_00000020" in log[0] and len(log[0]) < 500


def test_an_empty_root_has_no_checkpoint(tmp_path):
    log = []
    assert store.newest_checkpoint(tmp_path, log) is None
    assert store.newest_checkpoint(tmp_path / "none", log) is None
    assert log == []
    (tmp_path / "latest").write_text("step_00000007\n")
    assert store.newest_checkpoint(tmp_path, log) is None and "names 'step_00000007'" in log[0]
    (tmp_path / "step_00000007.tmp-0123456789abcdef0123456789abcdef").mkdir()
    (tmp_path / "step_x").mkdir()
    assert store.newest_checkpoint(tmp_path) is None


# ---- forgeries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [
    "../step_00000010/shard_00000.safetensors", "/etc/passwd", "a/b.safetensors", "x\0.safetensors", "..",
    "meta.json", "index.json", "shard_00009.safetensors",
])
def test_an_index_cannot_point_outside(saved, file):
    _, path, truth = saved

    def change(data):
        for p in data["pieces"]:
            p["file"] = file
        data["files"][file] = data["files"].pop("shard_00000.safetensors")

    if file == "shard_00009.safetensors":
        (path / file).symlink_to(path / "shard_00000.safetensors")
    if file != "meta.json":
        reseal(path, change)
    else:
        reseal(path, lambda data: data["pieces"][0].update(file=file))
    with pytest.raises(store.IntegrityError):
        loaded(path, truth)
    with pytest.raises(store.IntegrityError):
        store.verify(path)


WRONG_KINDS = (
    [("meta.json", "sha256", x) for x in (None, 7, ["0"])]
    + [("shard_00000.safetensors", "header", x) for x in (None, 7, ["0"])]
    + [
        (file, "bytes", x)
        for file in ("meta.json", "shard_00000.safetensors")
        for x in (None, 7.0, "7", True)
    ]
)


@pytest.mark.parametrize("file, field, value", WRONG_KINDS)
def test_a_file_s_entry_has_a_whole_number_and_a_text(saved, file, field, value):
    """Refused by the index alone, before anything is read by it."""
    _, path, _ = saved
    reseal(path, lambda data: data["files"][file].update({field: value}))
    with pytest.raises(store.IntegrityError, match=f"index.json: .*bad entry of file {file}"):
        store.read_index(path)


@pytest.mark.slow
def test_a_forged_index_is_refused_and_never_crashes(saved):
    """Values of the wrong kind anywhere in a well-sealed index: IntegrityError or ConfigError, nothing
    else.
    """
    _, path, truth = saved
    rnd, original = random.Random(0), (path / "index.json").read_text()
    junk = [None, -1, 0, 2**70, 1.5, "", "x", [], {}, [[]], True, [10**30], "F32", ["a"], "meta.json"]
    outcomes = {"same": 0, "refused": 0}
    for _ in range(250):
        data = json.loads(original)
        spot = data
        while True:
            keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
            key = rnd.choice(keys)
            if isinstance(spot[key], (dict, list)) and spot[key] and rnd.random() < 0.8:
                spot = spot[key]
                continue
            spot[key] = rnd.choice(junk)
            break
        reseal(path, lambda d: (d.clear(), d.update(data)))  # noqa: B023
        got = blank(truth)
        try:
            store.verify(path)
            store.load(path, whole(got))
            assert same(got, truth)
            outcomes["same"] += 1
        except (store.IntegrityError, ConfigError):
            assert same(got, blank(truth))
            outcomes["refused"] += 1
    # the rest hit what does not matter: the order of a dict, an equal value, `world`
    assert outcomes["refused"] > 150
    for text in (b"", b"[" * 10**5, b"null", b"{}", b"\xff", b'{"version": 0}', b'{"version": "2"}'):
        (path / "index.json").write_bytes(text)
        (path / "index.sha256").write_bytes(folder.seal_index(text))
        with pytest.raises(store.IntegrityError, match="index.json"):
            store.read_index(path)


@pytest.mark.slow
def test_mutated_shard_headers_never_crash(saved):
    """A forged header under a matching checksum: the parser's own errors do not come through."""
    _, path, truth = saved
    shard, rnd = path / "shard_00000.safetensors", random.Random(0)
    good = shard.read_bytes()
    n = 8 + int.from_bytes(good[:8], "little")
    for _ in range(250):
        bad = bytearray(good)
        bad[rnd.randrange(n)] = rnd.choice(b'09{}[]",:-. eE\xff\0')
        shard.write_bytes(bad)
        try:
            with files.open_shard(shard) as fd:
                head, _ = files.read_header(fd, shard)
            entry = {"bytes": len(bad), "header": files.hashlib.sha256(head).hexdigest()}
            reseal(path, lambda d: d["files"].update({shard.name: entry}))  # noqa: B023
            assert same(loaded(path, truth), truth)
        except (store.IntegrityError, ConfigError):
            pass


@pytest.mark.parametrize("move", [(0, 1), (0, -1), (1, 0), (10**7, 10**7), (-(10**7), -(10**7))])
def test_a_tensor_lies_within_its_file_and_has_its_size(saved, move):
    """A header under matching checksums with other offsets: refused by them, before the bytes are read."""
    _, path, truth = saved
    shard = path / "shard_00000.safetensors"
    good = shard.read_bytes()
    n = 8 + int.from_bytes(good[:8], "little")
    table = json.loads(good[8:n])
    stored = [piece["name"] for piece in json.loads((path / "index.json").read_text())["pieces"]]
    filled = [each for each in stored if 0 not in table[each]["shape"]]
    name = max(filled, key=lambda each: table[each]["data_offsets"])
    table[name]["data_offsets"] = [at + by for at, by in zip(table[name]["data_offsets"], move)]
    head = json.dumps(table).encode()
    head = len(head).to_bytes(8, "little") + head
    shard.write_bytes(head + good[n:])
    entry = {"bytes": len(head) + len(good) - n, "header": files.hashlib.sha256(head).hexdigest()}
    reseal(path, lambda d: d["files"].update({shard.name: entry}))
    with pytest.raises(store.IntegrityError, match="cannot lie at bytes"):
        store.verify(path)
    with pytest.raises(store.IntegrityError, match="cannot lie at bytes"):
        loaded(path, truth)


def test_a_pickle_is_refused_and_not_run(saved):
    """In place of a shard; and the store imports no pickle."""
    root, path, truth = saved
    canary = root / "canary"
    shard = path / "shard_00000.safetensors"
    shard.write_bytes(b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.")
    with pytest.raises(store.IntegrityError):
        loaded(path, truth)
    assert not canary.exists()
    for source in Path(store.__file__).parent.glob("*.py"):
        assert not re.search(r"\b(import|from) pickle\b|\btorch\.load\b", source.read_text()), source


def test_a_newer_format_is_refused_and_neither_replaced_nor_purged(saved):
    """A run that goes back to older code must not take the newer code's checkpoints for damage."""
    root, path, tensors = saved
    reseal(path, lambda index: index.update(version=3))
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    line = "step_00000020: written in format 3, this code reads up to 2; use the code that wrote it"
    for work in (
        lambda: store.newest_checkpoint(root),
        lambda: store.newest_checkpoint(root, check=store.quick_check),
        lambda: store.verify(path),
        lambda: store.read_meta(path),
        lambda: loaded(path, tensors),
        lambda: store.save(root, 20, whole(tensors), {}, keep=3),
    ):
        with pytest.raises(ConfigError, match=line):
            work()
    for step in (30, 40, 50):
        store.save(root, step, whole(tensors), {}, keep=1)
    assert [step for step, _ in store.committed_checkpoints(root)] == [50, 20]
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    for odd in (0, "2", None, 2.5):  # no version of ours: damage
        reseal(path, lambda index: index.update(version=odd))
        with pytest.raises(store.IntegrityError, match="format version"):
            store.verify(path)


def test_a_checkpoint_found_damaged_since_is_passed_over(saved):
    root, path, _ = saved
    older, log = root / "step_00000010", []
    assert store.newest_checkpoint(root, log, {path: "a bit fell"}, store.quick_check) == older
    assert "step_00000020 is rejected: a bit fell" in log[0]
    with pytest.raises(store.IntegrityError, match="no good checkpoint left of 2: .*a bit fell.*another"):
        store.newest_checkpoint(root, log, {path: "a bit fell", older: "another"}, store.quick_check)


def test_a_start_passes_over_a_checkpoint_that_a_rank_found_damaged(saved):
    root, newest, _ = saved
    chosen = lambda bad=None: newest_start(defaults(), root, Group("job"), bad).resumed.path
    assert chosen() == chosen({}) == newest
    assert chosen({newest: "it is rotten"}).name == "step_00000010"
    with pytest.raises(store.IntegrityError):
        chosen({newest: "it is rotten", newest.with_name("step_00000010"): "it is, too"})
