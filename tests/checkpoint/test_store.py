"""The checkpoint store: what is saved comes back exactly, in any layout; whatever is damaged is named and changes nothing."""
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from checkpoint import files, folder, store
from checkpoint.saver import Saver
from config import ConfigError
from parallel.boxes import Box
from parallel.ranges import range_boxes

torch.set_num_threads(1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


def state(seed, shapes=((5, 4), (6,), (), (3, 2, 4), (0, 2))):
    """{key: tensor} of every dtype, some of them transposed views."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for dtype in DTYPES:
        for i, shape in enumerate(shapes):
            t = (torch.randn(shape[::-1], generator=g).abs() * 9).to(dtype)
            out[f"{str(dtype)[6:]}.{i}"] = t.permute(list(range(len(shape)))[::-1])
    return out


def whole(tensors):
    return [(Box.whole(k, t.shape), t) for k, t in tensors.items()]


def blank(tensors):
    return {k: torch.full_like(t, 1, memory_format=torch.contiguous_format) for k, t in tensors.items()}


def loaded(path, like, **more):
    got = blank(like)
    store.load(path, whole(got), **more)
    return got


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def part(t, box):
    return t[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))]


def layout(rnd, tensors):
    """The tensors cut at random: along one dim, or as a flat ZeRO run. Returns [(Box, view)]."""
    out = []
    for key, t in tensors.items():
        cuts = sorted(rnd.randint(0, t.numel()) for _ in range(rnd.randint(0, 3)))
        if t.numel() == 0 or not cuts:
            boxes = [Box.whole(key, t.shape)]
        else:
            ends = [0, *cuts, t.numel()]
            boxes = [Box(key, tuple(t.shape), *b) for x, y in zip(ends, ends[1:]) for b in range_boxes(tuple(t.shape), x, y)]
        out += [(b, part(t, b)) for b in boxes]
    rnd.shuffle(out)
    return out


@pytest.fixture
def saved(tmp_path):
    """(root, path of step 20, its tensors); step 10 is there too."""
    store.save(tmp_path, 10, whole(state(10)), {"tokens": 10}, keep=3)
    return tmp_path, store.save(tmp_path, 20, whole(state(20)), {"tokens": 20}, keep=3), state(20)


def reseal(path, change):
    """Edits index.json as an attacker would: with a correct checksum."""
    data = json.loads((path / "index.json").read_text())
    change(data)
    text = json.dumps(data).encode()
    (path / "index.json").write_bytes(text)
    (path / "index.sha256").write_bytes(folder.seal(text))


# ---- save and load ---------------------------------------------------------------------------------------------------

def test_round_trip_in_every_dtype(saved):
    root, path, truth = saved
    assert path == root / "step_00000020" and store.newest(root) == path
    assert same(loaded(path, truth), truth)
    assert store.meta(path)["step"] == 20 and store.meta(path)["tokens"] == 20
    assert (root / "latest").read_text() == "step_00000020\n"
    index = store.index(path)
    assert set(index) == {"version", "save_id", "step", "world", "files", "pieces"}
    assert set(index["pieces"][0]) == {"key", "shape", "start", "size", "dtype", "file", "name", "sha256"}
    assert subprocess.run(["sha256sum", "-c", "index.sha256"], cwd=path, capture_output=True).returncode == 0


def test_others_can_read_the_shards(saved):
    load_file = pytest.importorskip("safetensors.torch").load_file
    _, path, truth = saved
    assert same(load_file(path / "shard_00000.safetensors"), {k: t.contiguous() for k, t in truth.items()})


def test_any_layout_loads_any_other(tmp_path, monkeypatch):
    rnd = random.Random(0)
    monkeypatch.setattr(store, "SHARD_BYTES", 300)  # many shards
    truth = state(1, ((5, 7), (11,), (2, 3, 4)))
    for i in range(12):
        path = store.save(tmp_path, i, layout(rnd, truth), {}, keep=1)
        got = blank(truth)
        store.load(path, layout(rnd, got))
        assert same(got, truth)
    assert len(list(path.glob("shard_*"))) > 3


def test_a_second_save_of_what_was_loaded_has_the_same_checksums(saved):
    root, path, truth = saved
    again = store.save(root, 30, whole(loaded(path, truth)), {}, keep=3)
    strip = [[{k: v for k, v in p.items() if k != "file"} for p in store.index(x)["pieces"]] for x in (path, again)]
    assert strip[0] == strip[1]


def test_float8_and_slices_and_leaf_parameters(tmp_path):
    truth = {"a": torch.randn(8, 4).to(torch.float8_e4m3fn), "b": torch.randn(8, 4)}
    path = store.save(tmp_path, 1, whole(truth), {}, keep=1)
    big = torch.nn.Parameter(torch.zeros(20, 4))
    store.load(path, [(Box("b", (8, 4), (2, 0), (5, 4)), big[3:8])], allow=("a",))  # a view of a leaf that wants gradients
    assert torch.equal(big[3:8], truth["b"][2:7]) and not big[:3].any() and not big[8:].any()
    got = torch.zeros(8, 4, dtype=torch.float8_e4m3fn)
    store.load(path, [(Box.whole("a", (8, 4)), got)], strict=False)
    assert torch.equal(got.view(torch.uint8), truth["a"].view(torch.uint8))


def ranks(n):
    """gather functions for n threads."""
    slots, barrier = [None] * n, threading.Barrier(n, timeout=20)

    def gather(rank, x):
        slots[rank] = x
        barrier.wait()
        every = list(slots)
        barrier.wait()
        return every
    return [lambda x, r=r: gather(r, x) for r in range(n)]


def save_in_threads(root, step, parts, at=lambda rank, point: None):
    """store.save as len(parts) ranks; returns each rank's result or exception."""
    out = [None] * len(parts)

    def one(rank, gather):
        try:
            out[rank] = store.save(root, step, parts[rank], {"w": len(parts)}, 2, lambda p: at(rank, p), rank, len(parts), gather)
        except Exception as e:
            out[rank] = e
    threads = [threading.Thread(target=one, args=(r, g)) for r, g in enumerate(ranks(len(parts)))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


@pytest.mark.parametrize("n", [2, 3])
def test_many_ranks_write_one_checkpoint(tmp_path, n):
    truth = state(3)
    pieces = layout(random.Random(n), truth)
    out = save_in_threads(tmp_path, 5, [pieces[r::n] for r in range(n)])
    assert out == [tmp_path / "step_00000005"] * n
    assert {f.name[:10] for f in out[0].glob("*.safetensors")} == {f"rank_{r:05d}" for r in range(n)}
    assert store.index(out[0])["world"] == n and store.newest(tmp_path) == out[0]
    assert same(loaded(out[0], truth), truth)
    assert save_in_threads(tmp_path, 5, [pieces[r::n] for r in range(n)]) == out  # committed already: all return it


@pytest.mark.parametrize("point, rank", [("ckpt.pre_write", 1), ("ckpt.mid_shard", 1), ("ckpt.post_shard", 0), ("ckpt.pre_rename", 0)])
def test_a_rank_that_fails_takes_all_out(tmp_path, point, rank):
    def at(r, p):
        if (r, p) == (rank, point):
            raise OSError(28, "No space left on device", f"{tmp_path}/x")
    pieces = layout(random.Random(0), state(3))
    old = store.save(tmp_path, 1, whole(state(1)), {}, keep=2)
    out = save_in_threads(tmp_path, 5, [pieces[::2], pieces[1::2]], at)
    assert all(isinstance(e, store.StorageError) and "ENOSPC" in str(e) for e in out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", old.name] and store.newest(tmp_path) == old


def test_a_piece_that_no_rank_has_or_two_have_is_refused(tmp_path):
    pieces = layout(random.Random(1), {"w": torch.randn(6, 5)})
    assert len(pieces) > 1
    for bad, text in ((pieces[1:], "w.*no piece covers this region"), (pieces + pieces[:1], "overlap")):
        with pytest.raises(ValueError, match=text):
            store.save(tmp_path, 1, bad, {}, keep=1)
    with pytest.raises(ValueError, match="shape"):
        store.save(tmp_path, 1, [(Box.whole("w", (3,)), torch.zeros(4))], {}, keep=1)
    with pytest.raises(TypeError):
        store.save(tmp_path, 1, pieces, {"x": {1, 2}}, keep=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nothing_non_finite_is_committed(tmp_path, dtype, bad):
    old = store.save(tmp_path, 1, whole(state(1)), {}, keep=1)
    w = torch.randn(40, 7).to(dtype).t()
    files_before = sorted(tmp_path.iterdir())
    w[3, 17] = bad
    with pytest.raises(store.NonFinite, match="layers.0.w: holds NaN or Inf"):
        store.save(tmp_path, 2, whole({"a": torch.ones(3), "layers.0.w": w}), {}, keep=1)
    assert sorted(tmp_path.iterdir()) == files_before and store.newest(tmp_path) == old


def test_huge_finite_values_are_fine(tmp_path):
    t = torch.full((50,), torch.finfo(torch.float64).max, dtype=torch.float64)
    store.save(tmp_path, 1, whole({"w": t, "b": t.new_full((9,), 3e38).bfloat16()}), {}, keep=1)


# ---- damage ----------------------------------------------------------------------------------------------------------

def test_every_flipped_bit_is_found(saved):
    """300 of 300 single flipped bits, over all files of the folder, by verify and by load; nothing is loaded."""
    _, path, truth = saved
    everything = sorted(path.iterdir())
    assert {p.name for p in everything} == {"index.json", "index.sha256", "meta.json", "shard_00000.safetensors"}
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
            store.meta(path)
            store.load(path, whole(got))
        file.write_bytes(good)
    assert found == 300 and same(got, before)
    store.verify(path)


@pytest.mark.parametrize("name", ["index.json", "index.sha256", "meta.json", "shard_00000.safetensors"])
@pytest.mark.parametrize("how", ["empty", "half", "one byte short", "one byte long", "deleted", "a link", "a folder", "a pipe"])
def test_a_broken_file_is_named_and_the_older_one_wins(saved, name, how):
    root, path, truth = saved
    file = path / name
    data = file.read_bytes()
    new = {"empty": b"", "half": data[:len(data) // 2], "one byte short": data[:-1], "one byte long": data + b"\0"}.get(how)
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
    assert store.newest(root, log) == root / "step_00000010"
    assert len(log) == 2 and "step_00000020 is rejected" in log[0] and "latest names 'step_00000020'" in log[1]


def test_a_shard_of_another_save_is_named_so(saved):
    root, path, truth = saved
    shutil.copy(root / "step_00000010" / "shard_00000.safetensors", path)
    for call in (lambda: store.verify(path), lambda: loaded(path, truth)):
        with pytest.raises(store.IntegrityError, match="save id mismatch"):
            call()
    shutil.copy(root / "step_00000010" / "meta.json", path)
    with pytest.raises(store.IntegrityError, match="meta.json"):
        store.meta(path)


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
    assert store.newest(root, log) == root / "step_00000010" and "step_00000030 is rejected" in log[0]
    assert same(loaded(moved, truth), truth)  # by its path it is as good as ever


def test_none_good_left(saved):
    root, path, _ = saved
    for p in root.glob("step_*"):
        (p / "meta.json").write_text("{}")
    with pytest.raises(store.IntegrityError, match="no good checkpoint left of 2.*step_00000020.*step_00000010"):
        store.newest(root)
    with pytest.raises(store.IntegrityError, match="no such checkpoint folder"):
        store.load(root / "step_00000099", [])


@pytest.mark.parametrize("latest", [None, "", "step_00000010\n", "step_00000099\n", "../../etc", "\xff\0garbage", "x" * 10**5])
def test_latest_is_only_a_hint(saved, latest):
    root, path, _ = saved
    (root / "latest").unlink()
    if latest is not None:
        (root / "latest").write_text(latest, encoding="latin-1")
    log = []
    assert store.newest(root, log) == path
    assert len(log) == 1 and "latest" in log[0] and "using step_00000020" in log[0] and len(log[0]) < 500


def test_an_empty_root(tmp_path):
    log = []
    assert store.newest(tmp_path, log) is None and store.newest(tmp_path / "none", log) is None and log == []
    (tmp_path / "latest").write_text("step_00000007\n")
    assert store.newest(tmp_path, log) is None and "names 'step_00000007'" in log[0]
    (tmp_path / "step_00000007.tmp-" "0123456789abcdef0123456789abcdef").mkdir()
    (tmp_path / "step_x").mkdir()
    assert store.newest(tmp_path) is None


@pytest.mark.parametrize("file", ["../step_00000010/shard_00000.safetensors", "/etc/passwd", "a/b.safetensors", "x\0.safetensors",
                                  "..", "meta.json", "index.json", "shard_00009.safetensors"])
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


def test_a_forged_index_is_refused_and_never_crashes(saved):
    """Values of the wrong kind anywhere in a well-sealed index: IntegrityError or ConfigError, nothing else."""
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
        reseal(path, lambda d: (d.clear(), d.update(data)))
        got = blank(truth)
        try:
            store.verify(path)
            store.load(path, whole(got))
            assert same(got, truth)
            outcomes["same"] += 1
        except (store.IntegrityError, ConfigError):
            assert same(got, blank(truth))
            outcomes["refused"] += 1
    assert outcomes["refused"] > 150  # the rest hit what does not matter: the order of a dict, an equal value, `world`
    for text in (b"", b"[" * 10**5, b"null", b"{}", b"\xff", b'{"version": 2}'):
        (path / "index.json").write_bytes(text)
        (path / "index.sha256").write_bytes(folder.seal(text))
        with pytest.raises(store.IntegrityError, match="index.json"):
            store.index(path)


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
            with files.opened(shard) as fd:
                head, _ = files.read_header(fd, shard)
            entry = {"bytes": len(bad), "header": files.hashlib.sha256(head).hexdigest()}
            reseal(path, lambda d: d["files"].update({shard.name: entry}))
            assert same(loaded(path, truth), truth)
        except (store.IntegrityError, ConfigError):
            pass


def test_no_pickle(saved):
    """A shard replaced by a pickle is refused and not run; the store imports no pickle."""
    root, path, truth = saved
    canary = root / "canary"
    shard = path / "shard_00000.safetensors"
    shard.write_bytes(b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.")
    with pytest.raises(store.IntegrityError):
        loaded(path, truth)
    assert not canary.exists()
    for source in Path(store.__file__).parent.glob("*.py"):
        assert "import pickle" not in source.read_text() and "torch.load" not in source.read_text()


# ---- fit -------------------------------------------------------------------------------------------------------------

def test_every_difference_is_listed_and_nothing_is_loaded(tmp_path):
    truth = {"a": torch.randn(3, 4), "b": torch.randn(5), "c": torch.randn(2), "d": torch.randn(2), "opt.a": torch.randn(2)}
    path = store.save(tmp_path, 1, whole(truth), {}, keep=1)
    got = {"a": torch.zeros(3, 5), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(2), "new": torch.zeros(2)}
    with pytest.raises(ConfigError) as e:
        store.load(path, whole(got), allow=("opt.*",))
    for text in ("a has shape (3, 4), wanted (3, 5)", "b is F32, wanted BF16", "new is missing", "d is extra"):
        assert text in str(e.value)
    assert "c " not in str(e.value).split("loaded:")[1] and "opt.a" not in str(e.value) and "\n" not in str(e.value)
    assert not any(t.any() for t in got.values())
    ok = {"b": got["b"], "c": got["c"]}
    store.load(path, whole(ok), strict=False, allow_cast=True)
    assert torch.equal(ok["b"], truth["b"].bfloat16()) and torch.equal(ok["c"], truth["c"])


def test_a_stored_hole_is_an_integrity_error(tmp_path):
    truth = {"w": torch.randn(6, 4)}
    path = store.save(tmp_path, 1, [(Box("w", (6, 4), (i, 0), (2, 4)), truth["w"][i:i + 2]) for i in (0, 2, 4)], {}, keep=1)
    reseal(path, lambda data: data["pieces"].pop(1))
    with pytest.raises(store.IntegrityError, match=r"w\[2:4, 0:4\] of shape \(6, 4\): no stored piece"):
        loaded(path, truth)


# ---- keeping, cleaning, locking --------------------------------------------------------------------------------------

def test_keep_and_clean(tmp_path):
    for step in range(1, 8):
        store.save(tmp_path, step, whole({"w": torch.full((3,), step)}), {}, keep=3)
        assert [s for s, _ in store.committed(tmp_path)] == list(range(step, max(0, step - 3), -1))
    for name in ("step_00000009.tmp-" + "a" * 32, ".trash-step_00000001-b", "latest.tmp-" + "c" * 32, "mine.txt", "step_old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    store.clean(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"latest", "mine.txt", "step_old", *(f"step_{s:08d}" for s in (5, 6, 7))}
    store.save(tmp_path, 8, whole({"w": torch.zeros(3)}), {}, keep=1)
    assert [s for s, _ in store.committed(tmp_path)] == [8]


def test_a_checkpoint_being_read_is_not_purged(tmp_path):
    for step in (1, 2):
        store.save(tmp_path, step, whole({"w": torch.zeros(3)}), {}, keep=1 if step == 1 else 2)
    with folder.held(tmp_path / "step_00000001", fcntl.LOCK_SH) as got:
        assert got
        store.save(tmp_path, 3, whole({"w": torch.zeros(3)}), {}, keep=1)
        assert [s for s, _ in store.committed(tmp_path)] == [3, 1]
    store.save(tmp_path, 4, whole({"w": torch.zeros(3)}), {}, keep=1)
    assert [s for s, _ in store.committed(tmp_path)] == [4]


def test_a_committed_step_is_kept_and_a_bad_one_replaced(tmp_path):
    path = store.save(tmp_path, 1, whole(state(1)), {}, keep=2)
    first = store.index(path)["save_id"]
    store.save(tmp_path, 1, whole(state(1)), {}, keep=2)
    assert store.index(path)["save_id"] == first
    (path / "meta.json").write_text("{}")
    store.save(tmp_path, 1, whole(state(2)), {}, keep=2)
    assert store.index(path)["save_id"] != first and same(loaded(path, state(2)), state(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_rewind_sets_later_steps_aside(tmp_path):
    for step in (1, 2, 3):
        store.save(tmp_path, step, whole({"w": torch.full((3,), step)}), {}, keep=9)
    moved = store.rewind(tmp_path, 1)
    assert len(moved) == 2 and all(p.parent.name == "old" for p in moved) and store.newest(tmp_path).name == "step_00000001"
    for p in moved:
        store.verify(p)


def test_the_run_lock_names_its_holder_and_dies_with_it(tmp_path):
    code = f"import sys, time; sys.path.insert(0, {str(Path.cwd())!r})\nfrom checkpoint.locks import lock\n" \
           f"with lock({str(tmp_path)!r}):\n    print('mine', flush=True)\n    time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "mine\n"
        start = time.monotonic()
        with pytest.raises(ConfigError, match=f"in use by .* pid {child.pid}"), store.lock(tmp_path):
            pass
        assert time.monotonic() - start < 2
    finally:
        child.kill()
    start = time.monotonic()
    with store.lock(tmp_path):
        assert time.monotonic() - start < 1
    child.wait()
    with store.lock(tmp_path):  # freed by leaving, too
        pass


# ---- in a thread -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("threaded", [False, True])
def test_saver_writes_the_state_of_the_call(tmp_path, threaded):
    saver, t = Saver(threaded), torch.zeros(1000)
    for step in range(1, 5):
        t.fill_(step)
        saver.save(tmp_path, step, whole({"w": t}), {}, 9)
        t.fill_(-1)  # training goes on
    path = saver.wait()
    assert path == tmp_path / "step_00000004" and saver.wait() == path
    for step, path in store.committed(tmp_path):
        assert (loaded(path, {"w": t})["w"] == step).all()
    assert len(store.committed(tmp_path)) == 4


def test_saver_raises_the_writers_error_at_the_next_call_once(tmp_path):
    def at(point):
        raise OSError(28, "No space left on device")
    saver, pieces = Saver(True), whole({"w": torch.zeros(3)})
    saver.save(tmp_path, 1, pieces, {}, 2, at=at)
    with pytest.raises(store.StorageError, match="ENOSPC"):
        saver.save(tmp_path, 2, pieces, {}, 2)
    saver.save(tmp_path, 3, pieces, {}, 2)
    assert saver.wait() == tmp_path / "step_00000003" and store.newest(tmp_path) == tmp_path / "step_00000003"


def test_saver_has_one_in_flight(tmp_path):
    writing, peak = [], []

    def at(point):
        if point == "ckpt.pre_write":
            writing.append(1)
            peak.append(len(writing))
            time.sleep(0.05)
        if point == "ckpt.pre_purge":
            writing.pop()
    saver = Saver(True)
    for step in (1, 2, 3):
        saver.save(tmp_path, step, whole({"w": torch.zeros(3)}), {}, 9, at=at)
    saver.wait()
    assert peak == [1, 1, 1]
