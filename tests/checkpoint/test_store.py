"""The store: what is saved comes back exactly, in any layout, from any ranks; what does not fit is
refused.
"""

import fcntl
import hashlib
import json
import random
import subprocess
import threading
import time
import zlib

import numpy as np
import pytest
import torch
from sample import blank, layout, loaded, ranks, reseal, same, save_in_threads, state, whole

from checkpoint.disk import files, folder, store
from checkpoint.disk.locks import folder_lock
from config import ConfigError
from parallel.sharding.boxes import Box
from parallel.wire.messages import MessageError

# ---- save and load -----------------------------------------------------------------------------------------


def test_every_dtype_comes_back_exactly(saved):
    root, path, truth = saved
    assert path == root / "step_00000020" and store.newest_checkpoint(root) == path
    assert same(loaded(path, truth), truth)
    assert store.read_meta(path)["step"] == 20 and store.read_meta(path)["tokens"] == 20
    assert (root / "latest").read_text() == "step_00000020\n"
    index = store.read_index(path)
    assert set(index) == {"version", "save_id", "step", "world", "files", "pieces"}
    assert set(index["pieces"][0]) == {"key", "shape", "start", "size", "dtype", "file", "name", "checksum"}
    assert subprocess.run(["sha256sum", "-c", "index.sha256"], cwd=path, capture_output=True).returncode == 0


def test_a_checkpoint_of_format_1_is_read(saved):
    """Its index had the sha256 of each piece, without a name."""
    root, path, truth = saved
    shard = path / "shard_00000.safetensors"
    content = shard.read_bytes()
    header_size = 8 + int.from_bytes(content[:8], "little")
    table = json.loads(content[8:header_size])

    def to_format_1(index):
        index["version"] = 1
        for row in index["pieces"]:
            begin, end = table[row["name"]]["data_offsets"]
            row["sha256"] = hashlib.sha256(content[header_size + begin:header_size + end]).hexdigest()
            del row["checksum"]

    reseal(path, to_format_1)
    assert store.newest_checkpoint(root) == path
    assert same(loaded(path, truth), truth)

    # and its damage is seen
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(store.IntegrityError, match="does not match its checksum"):
        loaded(path, truth)


def test_without_xxhash_sha256_is_written_and_the_other_is_no_damage(saved, tmp_path, monkeypatch):
    root, path, truth = saved
    assert all(row["checksum"].startswith("xxh3_128:") for row in store.read_index(path)["pieces"])
    monkeypatch.setattr(files, "DIGESTS", {"sha256": hashlib.sha256})
    monkeypatch.setattr(files, "WRITTEN_DIGEST", "sha256")
    other = store.save(tmp_path / "other", 1, whole(truth), {}, keep=1)
    assert all(row["checksum"].startswith("sha256:") for row in store.read_index(other)["pieces"])
    assert same(loaded(other, truth), truth)
    for read in (lambda: loaded(path, truth), lambda: store.newest_checkpoint(root)):
        with pytest.raises(ConfigError, match="checksums named 'xxh3_128'.*pip install xxhash"):
            read()


NUMBERS = {  # dtype: integers of its size
    torch.float64: np.uint64,
    torch.float32: np.uint32,
    torch.float16: np.uint16,
    torch.bfloat16: np.uint16,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e5m2: np.uint8,
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_every_number_that_is_not_finite_is_found(dtype):
    """All 16-bit patterns; of wider types, these as their highest bits. torch says what is finite."""
    width = torch.empty(0, dtype=dtype).element_size()
    if width == 1:
        bits = np.arange(256, dtype=np.uint8)
    else:
        highest = np.arange(1 << 16, dtype=np.uint64) << np.uint64(8 * width - 16)
        bits = np.concatenate([highest, highest | np.uint64(1)]).astype(NUMBERS[dtype])
    values = torch.from_numpy(bits.view(np.uint8).copy()).view(dtype)
    truth = torch.isfinite(values.double())
    one_by_one = [files.is_finite(bits[i:i + 1].view(np.uint8), dtype) for i in range(len(bits))]
    assert one_by_one == truth.tolist()

    # one bad number among good ones is found, and good ones alone are good
    good = bits[truth.numpy()]
    assert files.is_finite(good.view(np.uint8), dtype)
    for bad in bits[~truth.numpy()][:50]:
        assert not files.is_finite(np.append(good, bad).view(np.uint8), dtype)


def test_safetensors_reads_the_shards(saved):
    load_file = pytest.importorskip("safetensors.torch").load_file
    _, path, truth = saved
    assert same(load_file(path / "shard_00000.safetensors"), {k: t.contiguous() for k, t in truth.items()})


def test_every_tensor_lies_aligned(saved):
    _, path, truth = saved
    with files.open_shard(path / "shard_00000.safetensors") as fd:
        head, table = files.read_header(fd, path)
    assert len(head) % 8 == 0
    assert all(table[k]["data_offsets"][0] % t.element_size() == 0 for k, t in truth.items())


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
    pieces, others = (store.read_index(each)["pieces"] for each in (path, again))
    assert [{**piece, "file": None} for piece in pieces] == [{**piece, "file": None} for piece in others]


def test_float8_and_slices_of_leaf_parameters_are_loaded(tmp_path):
    truth = {"a": torch.randn(8, 4).to(torch.float8_e4m3fn), "b": torch.randn(8, 4)}
    path = store.save(tmp_path, 1, whole(truth), {}, keep=1)
    big = torch.nn.Parameter(torch.zeros(20, 4))
    rows = Box("b", (8, 4), (2, 0), (5, 4))
    store.load(path, [(rows, big[3:8])], allow=("a",))  # into a view of a leaf with gradients
    assert torch.equal(big[3:8], truth["b"][2:7]) and not big[:3].any() and not big[8:].any()
    got = torch.zeros(8, 4, dtype=torch.float8_e4m3fn)
    store.load(path, [(Box.whole("a", (8, 4)), got)], strict=False)
    assert torch.equal(got.view(torch.uint8), truth["a"].view(torch.uint8))


@pytest.mark.parametrize("n", [2, 3])
def test_many_ranks_write_one_checkpoint(tmp_path, n):
    truth = state(3)
    pieces = layout(random.Random(n), truth)
    out = save_in_threads(tmp_path, 5, [pieces[r::n] for r in range(n)])
    assert out == [tmp_path / "step_00000005"] * n
    assert {f.name[:10] for f in out[0].glob("*.safetensors")} == {f"rank_{r:05d}" for r in range(n)}
    assert store.read_index(out[0])["world"] == n and store.newest_checkpoint(tmp_path) == out[0]
    assert same(loaded(out[0], truth), truth)
    # committed already: all return it
    assert save_in_threads(tmp_path, 5, [pieces[r::n] for r in range(n)]) == out


@pytest.mark.parametrize(
    "point, rank",
    [("ckpt.pre_write", 1), ("ckpt.mid_shard", 1), ("ckpt.post_shard", 0), ("ckpt.pre_rename", 0)],
)
def test_a_rank_that_fails_takes_all_out(tmp_path, point, rank):
    def at(r, p):
        if (r, p) == (rank, point):
            raise OSError(28, "No space left on device", f"{tmp_path}/x")

    pieces = layout(random.Random(0), state(3))
    old = store.save(tmp_path, 1, whole(state(1)), {}, keep=2)
    out = save_in_threads(tmp_path, 5, [pieces[::2], pieces[1::2]], at)
    assert all(isinstance(e, store.StorageError) and "ENOSPC" in str(e) for e in out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", old.name]
    assert store.newest_checkpoint(tmp_path) == old


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


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nothing_non_finite_is_committed(tmp_path, dtype, bad):
    old = store.save(tmp_path, 1, whole(state(1)), {}, keep=1)
    w = torch.randn(40, 7).to(dtype).t()
    files_before = sorted(tmp_path.iterdir())
    w[3, 17] = bad
    with pytest.raises(store.NonFiniteTensor, match="layers.0.w: holds NaN or Inf"):
        store.save(tmp_path, 2, whole({"a": torch.ones(3), "layers.0.w": w}), {}, keep=1)
    assert sorted(tmp_path.iterdir()) == files_before and store.newest_checkpoint(tmp_path) == old


def test_huge_finite_values_are_saved(tmp_path):
    t = torch.full((50,), torch.finfo(torch.float64).max, dtype=torch.float64)
    truth = {"w": t, "b": t.new_full((9,), 3e38).bfloat16()}
    path = store.save(tmp_path, 1, whole(truth), {}, keep=1)
    got = blank(truth)
    store.load(path, whole(got))
    assert same(got, truth) and torch.isfinite(got["b"]).all()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_several_threads_write_parts_of_a_tensor_into_several_files(tmp_path, monkeypatch, share):
    """Large tensors in parts of their rows; loaded with memory for what is verified, and without."""
    for name, value in (("MIN_SHARD_BYTES", 500), ("PIECE_BYTES", 64), ("KEPT_SHARE", share)):
        monkeypatch.setattr(store, name, value)
    truth = state(7, ((9, 7), (1, 40), (11,), ()))
    path = store.save(tmp_path, 1, layout(random.Random(3), truth), {}, keep=1, threads=3)
    assert len(list(path.glob("shard_*"))) > 3
    store.verify(path)
    got = blank(truth)
    store.load(path, layout(random.Random(4), got))
    assert same(got, truth)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_started_load_has_verified_all_and_filled_nothing(tmp_path, monkeypatch, share):
    monkeypatch.setattr(store, "KEPT_SHARE", share)
    truth = state(7)
    path = store.save(tmp_path, 1, whole(truth), {}, keep=1)
    got = blank(truth)
    started = store.start_load(path, whole(got))
    assert same(got, blank(truth)) and len(started.kept) == (len(started.reads) if share else 0)
    started.fill()
    assert same(got, truth) and not started.kept


def test_memory_is_taken_within_the_limits_of_every_cgroup(tmp_path):
    own, root = tmp_path / "cgroup", tmp_path / "mounted"
    inner = root / "job" / "step"
    inner.mkdir(parents=True)
    own.write_text("0::/job/step\n")
    assert files.cgroup_rooms(own, root) == []
    for folder_, limit, used in ((inner, "max", "5"), (root / "job", "1000", "400"), (root, "9000", "9999")):
        (folder_ / "memory.max").write_text(limit)
        (folder_ / "memory.current").write_text(used)
    assert files.cgroup_rooms(own, root) == [600, 0]
    assert files.cgroup_rooms(tmp_path / "none", root) == []
    assert files.available_bytes() > 0


# ---- fit ---------------------------------------------------------------------------------------------------


def test_every_difference_is_listed_and_nothing_is_loaded(tmp_path):
    truth = {k: torch.randn(n) for k, n in (("a", (3, 4)), ("b", 5), ("c", 2), ("d", 2), ("opt.a", 2))}
    path = store.save(tmp_path, 1, whole(truth), {}, keep=1)
    got = {"a": torch.zeros(3, 5), "b": torch.zeros(5).bfloat16(), "c": torch.zeros(2), "new": torch.zeros(2)}
    with pytest.raises(ConfigError) as e:
        store.load(path, whole(got), allow=("opt.*",))
    for text in (
        "a has shape (3, 4), wanted (3, 5)", "b is F32, wanted BF16", "new is missing", "d is extra",
    ):
        assert text in str(e.value)
    assert "c " not in str(e.value).split("loaded:")[1]
    assert "opt.a" not in str(e.value)
    assert "\n" not in str(e.value)
    assert not any(t.any() for t in got.values())
    ok = {"b": got["b"], "c": got["c"]}
    store.load(path, whole(ok), strict=False, allow_cast=True)
    assert torch.equal(ok["b"], truth["b"].bfloat16()) and torch.equal(ok["c"], truth["c"])


def test_a_few_of_many_differences_are_named_and_the_rest_counted(tmp_path):
    path = store.save(tmp_path, 1, whole({"a": torch.ones(3)}), {}, keep=1)
    with pytest.raises(ConfigError) as e:
        store.load(path, whole({f"new{i}": torch.zeros(2) for i in range(12)}))
    assert str(e.value).count("is missing") == 8 and str(e.value).endswith("new7 is missing; and 5 more")


def test_a_stored_hole_is_an_integrity_error(tmp_path):
    truth = {"w": torch.randn(6, 4)}
    rows = [(Box("w", (6, 4), (i, 0), (2, 4)), truth["w"][i : i + 2]) for i in (0, 2, 4)]
    path = store.save(tmp_path, 1, rows, {}, keep=1)
    reseal(path, lambda data: data["pieces"].pop(1))
    with pytest.raises(store.IntegrityError, match=r"w\[2:4, 0:4\] of shape \(6, 4\): no stored piece"):
        loaded(path, truth)


# ---- keeping, cleaning, locking ----------------------------------------------------------------------------


def test_the_newest_are_kept_and_leftovers_removed(tmp_path):
    for step in range(1, 8):
        store.save(tmp_path, step, whole({"w": torch.full((3,), step)}), {}, keep=3)
        assert [s for s, _ in store.committed_checkpoints(tmp_path)] == list(
            range(step, max(0, step - 3), -1)
        )
    mine = ("mine", "step_x")
    for name in (*mine, "step_00000009.tmp-" + "a" * 32, ".trash-step_00000001-b", "latest.tmp-" + "c" * 32):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    store.remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"latest", *mine, *(f"step_{s:08d}" for s in (5, 6, 7))}
    store.save(tmp_path, 8, whole({"w": torch.zeros(3)}), {}, keep=1)
    assert [s for s, _ in store.committed_checkpoints(tmp_path)] == [8]


def test_a_checkpoint_being_read_is_not_purged(tmp_path):
    for step in (1, 2):
        store.save(tmp_path, step, whole({"w": torch.zeros(3)}), {}, keep=1 if step == 1 else 2)
    with folder.folder_lock(tmp_path / "step_00000001", fcntl.LOCK_SH) as got:
        assert got
        store.save(tmp_path, 3, whole({"w": torch.zeros(3)}), {}, keep=1)
        assert [s for s, _ in store.committed_checkpoints(tmp_path)] == [3, 1]
    store.save(tmp_path, 4, whole({"w": torch.zeros(3)}), {}, keep=1)
    assert [s for s, _ in store.committed_checkpoints(tmp_path)] == [4]


def test_a_committed_step_is_kept_and_a_bad_one_replaced(tmp_path):
    path = store.save(tmp_path, 1, whole(state(1)), {}, keep=2)
    first = store.read_index(path)["save_id"]
    store.save(tmp_path, 1, whole(state(1)), {}, keep=2)
    assert store.read_index(path)["save_id"] == first
    (path / "meta.json").write_text("{}")
    store.save(tmp_path, 1, whole(state(2)), {}, keep=2)
    assert store.read_index(path)["save_id"] != first and same(loaded(path, state(2)), state(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]


# ---- loads in two steps, saves that came too late ----------------------------------------------------------


@pytest.fixture
def started(saved, monkeypatch):
    """A load without memory for what it has verified."""
    _, path, truth = saved
    monkeypatch.setattr(store, "KEPT_SHARE", 0.0)
    started = store.start_load(path, whole(blank(truth)))
    assert not started.kept
    return started


def test_a_checkpoint_is_kept_until_its_tensors_are_filled(started):
    with folder_lock(started.path, fcntl.LOCK_EX) as is_free:
        assert not is_free
    started.fill()
    with folder_lock(started.path, fcntl.LOCK_EX) as is_free:
        assert is_free


def test_a_load_that_is_given_up_keeps_no_checkpoint(saved, monkeypatch):
    _, path, truth = saved
    started = store.start_load(path, whole(blank(truth)))
    del started
    with folder_lock(path, fcntl.LOCK_EX) as is_free:
        assert is_free


def test_what_is_read_again_is_verified_again(started):
    shard = started.path / "shard_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    with pytest.raises(store.IntegrityError, match="no longer matches its checksum"):
        started.fill()


def test_a_commit_after_the_others_gave_up_names_no_half_of_a_folder(tmp_path, monkeypatch):
    """Rank 0 is slow, and both ranks give up; then it continues, while another cleans up."""
    truth = state(1, ((5, 7), (11,)))
    has_given_up = threading.Event()

    def slow(point):
        if point == "ckpt.pre_rename":
            has_given_up.wait(10)

    def half(path):
        for shard in path.glob("*.safetensors"):
            shard.unlink()

    monkeypatch.setattr(store, "remove", half)
    errors = []

    def one(rank, among):
        parts = whole(truth) if rank == 0 else []
        try:
            store.save(tmp_path, 1, parts, {}, keep=1, fault_point=slow, ranks=among, timeout_s=0.3)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=each) for each in enumerate(ranks(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [type(error).__name__ for error in errors] == ["PeerError"] * 2
    has_given_up.set()
    deadline = time.monotonic() + 5
    while not (tmp_path / "step_00000001").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert store.verify(tmp_path / "step_00000001").step == 1


def test_what_is_unpacked_is_never_more_than_was_announced():
    for size in (0, 1, 2, 1000):
        packed = zlib.compress(b"x" * size)
        for limit in (size, size + 1, 2000):
            assert store.decompress(packed, limit) == b"x" * size
        with pytest.raises(MessageError, match="are cut off"):
            store.decompress(packed[:-5], 2000)
    for size, limit in ((2, 0), (2, 1), (1000, 0), (1000, 999), (10**6, 0)):
        with pytest.raises(MessageError, match=f"unpack to more than {limit:,} bytes"):
            store.decompress(zlib.compress(b"x" * size), limit)
    with pytest.raises(MessageError, match="are not packed data"):
        store.decompress(b"x" * 9, 9)
