"""Every place where a writer can die, and every way the disk can fail: the old or the new checkpoint is
there, whole.

Random moments find little, enumerated points find everything: each name in store.FAULT_POINTS is hit with
SIGKILL in every situation that reaches it. Children are forked from this warm process (starting Python with
torch takes seconds), so this file keeps torch to one thread.
"""

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import signal
import traceback
from pathlib import Path

import pytest
import torch

from checkpoint.disk import files, store
from checkpoint.disk.saver import CheckpointSaver
from parallel.sharding.boxes import Box

torch.set_num_threads(1)
COMMITTED = store.FAULT_POINTS.index("ckpt.post_rename")  # from here on the new checkpoint counts
SITUATIONS = ("first", "later", "replace")


def tensors(step):
    """A run's tensors after `step`: every element says its step, so that a mix shows."""
    return {
        "w": torch.full((64, 33), float(step)),
        "m": torch.full((129,), step, dtype=torch.float64).bfloat16(),
        "n": torch.tensor(step),
        "mask": torch.arange(77) % (step + 2) == 0,
    }


def pieces(step):
    """Two boxes of w, and the rest whole: several shards when SHARD_BYTES is small."""
    t = tensors(step)
    w = t.pop("w")
    cut = [(Box("w", (64, 33), (a, 0), (n, 33)), w[a : a + n]) for a, n in ((0, 20), (20, 44))]
    return cut + [(Box.whole(k, v.shape), v) for k, v in t.items()]


def save(root, step, at=lambda point: None):
    return store.save(root, step, pieces(step), {"tokens": step * 100}, keep=2, fault_point=at)


def content(path):
    """The step whose exact tensors a checkpoint holds. Fails on a mix."""
    got = {k: torch.zeros_like(v) for k, v in tensors(0).items()}
    store.load(path, [(Box.whole(k, v.shape), v) for k, v in got.items()])
    step = int(got["n"])
    assert all(torch.equal(got[k], v) for k, v in tensors(step).items())
    assert store.read_meta(path)["tokens"] == step * 100 and path.name == f"step_{step:08d}"
    return step


def child(work):
    """Runs work() in a fork; returns its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def die(point):
    """Kills this process at `point`."""

    def at(reached):
        assert reached in store.FAULT_POINTS
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def prepare(root, situation):
    """Make the state before the save of step 30. Returns the step that counts until that is committed."""
    if situation == "first":
        return None
    save(root, 10)
    save(root, 20)  # with keep = 2 the save of 30 purges 10
    if situation == "replace":  # step 30 is there already, and bad
        save(root, 30)
        (root / "step_00000030" / "meta.json").write_text("damaged")
    return 20


def leftovers(root):
    return [p.name for p in root.iterdir() if ".tmp-" in p.name or p.name.startswith(".trash-")]


def recover(root, expected):
    """Do what a new process does: find the newest good one, check its content, clean up, save the next."""
    found = store.newest_checkpoint(root, log := [])
    assert (content(found) if found else None) == expected, log
    store.remove_leftovers(root)
    assert not leftovers(root)
    assert (content(found) if found else None) == expected
    save(root, 30)
    save(root, 40)
    assert content(store.newest_checkpoint(root, log := [])) == 40 and not log and not leftovers(root)
    assert [content(p) for _, p in store.committed_checkpoints(root)] == [40, 30]


@pytest.mark.slow
@pytest.mark.parametrize("threaded", [False, True], ids=["plain", "async"])
def test_sigkill_at_every_point_in_every_situation(tmp_path, threaded):
    hit = set()
    for situation in SITUATIONS:
        (tmp_path / situation).mkdir()
        old = prepare(tmp_path / situation, situation)
        for point in store.FAULT_POINTS:
            root = tmp_path / f"{situation}-{point}"
            shutil.copytree(tmp_path / situation, root)

            def write(root=root, point=point):
                if threaded:
                    saver = CheckpointSaver(True)
                    saver.save(root, 30, pieces(30), {"tokens": 3000}, keep=2, fault_point=die(point))
                    saver.wait()
                else:
                    save(root, 30, die(point))

            code = child(write)
            assert code in (0, -signal.SIGKILL)
            if code:
                hit.add((situation, point))
            latest = root / "latest"
            if latest.exists() and situation != "replace":  # it comes last: what it names is there
                assert (root / latest.read_text().strip()).is_dir()
            committed = code == 0 or store.FAULT_POINTS.index(point) >= COMMITTED
            last = 30 if committed else old
            assert child(lambda: recover(root, last)) == 0, (situation, point)  # noqa: B023
            shutil.rmtree(root)
    only = {"ckpt.mid_replace": {"replace"}, "ckpt.mid_purge": {"later"}}  # others do not come by here
    points = {(s, p) for p in store.FAULT_POINTS for s in only.get(p, SITUATIONS)}
    assert hit == points, "a point is not covered"


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_folder_killed_again_and_again_keeps_a_whole_checkpoint(tmp_path, situation):
    """A death at every point in turn on the same folder, with no clean-up but the store's own."""
    expected = prepare(tmp_path, situation)
    for step, point in enumerate(store.FAULT_POINTS, 31):
        code = child(lambda: save(tmp_path, step, die(point)))  # noqa: B023
        if code == 0 or store.FAULT_POINTS.index(point) >= COMMITTED:
            expected = step
        found = store.newest_checkpoint(tmp_path)
        assert (content(found) if found else None) == expected
        assert len(leftovers(tmp_path)) <= 2
    save(tmp_path, 50)
    assert not leftovers(tmp_path) and content(store.newest_checkpoint(tmp_path)) == 50


def test_a_kill_between_shards_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """With a shard for every piece, a death in the k-th one, for each k."""
    monkeypatch.setattr(store, "SHARD_BYTES", 1)
    save(tmp_path, 20)
    for k in range(1, len(pieces(30)) + 1):
        left = [k]

        def at(point, left=left):
            left[0] -= point == "ckpt.mid_shard"
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        assert child(lambda: save(tmp_path, 30, at)) == -signal.SIGKILL  # noqa: B023
        assert content(store.newest_checkpoint(tmp_path)) == 20
    save(tmp_path, 30)
    assert content(store.newest_checkpoint(tmp_path)) == 30 and not leftovers(tmp_path)


@pytest.mark.slow
def test_a_kill_after_a_link_leaves_both_checkpoints_whole(tmp_path, monkeypatch):
    """At every point between the first link and the end of the save: the checkpoint that was linked to is
    whole, and the next save links to it again. No file has more names than two.
    """
    monkeypatch.setattr(store, "SHARD_BYTES", 1)
    frozen = torch.arange(3000.0)  # in all steps alike

    def save_linked(root, step, at=lambda point: None):
        boxes = [(Box.whole("a", (3000,)), frozen), *pieces(step)]
        return store.save(root, step, boxes, {"tokens": step * 100}, keep=3, fault_point=at)

    def check(path, is_linked):
        step = store.verify(path).step
        got = {"a": torch.zeros(3000)} | {key: torch.zeros_like(x) for key, x in tensors(0).items()}
        store.load(path, [(Box.whole(key, x.shape), x) for key, x in got.items()])
        truth = {"a": frozen} | tensors(step)
        assert all(torch.equal(got[key], truth[key]) for key in truth)
        (entry,) = [e for f, e in store.read_index(path)["files"].items() if f == "shard_00000.safetensors"]
        assert ("save_id" in entry) is is_linked

    for step in (10, 20):
        save_linked(tmp_path / "start", step)
    for point in store.FAULT_POINTS[1:]:
        root = tmp_path / point
        shutil.copytree(tmp_path / "start", root)
        code = child(lambda: save_linked(root, 30, die(point)))  # noqa: B023
        committed = code == 0 or store.FAULT_POINTS.index(point) >= COMMITTED
        assert code in (0, -signal.SIGKILL)
        if not code:
            assert point in ("ckpt.mid_replace", "ckpt.mid_purge"), point  # nothing to replace or to purge
        newest = store.newest_checkpoint(root)
        assert newest.name == ("step_00000030" if committed else "step_00000020")
        check(newest, is_linked=committed)
        save_linked(root, 30)  # there already, or written again
        check(root / "step_00000030", is_linked=True)
        check(save_linked(root, 40), is_linked=False)  # that of 30 has two names
        shared = [path.stat().st_nlink for path in root.glob("step_*/shard_00000.safetensors")]
        assert sorted(shared) == [1, 2, 2] and not leftovers(root)
        shutil.rmtree(root)


@pytest.mark.slow(every=5)
@pytest.mark.parametrize("cause", ["ENOSPC", "EIO", "EROFS", "EDQUOT", "EFBIG"])
def test_an_error_of_the_disk_at_any_point_leaves_a_whole_checkpoint(tmp_path, cause):
    """StorageError with path, bytes and cause; the previous checkpoint is intact; the same process can save
    again.
    """
    for point in store.FAULT_POINTS:
        root = tmp_path / point
        prepare(root, "replace" if point == "ckpt.mid_replace" else "later")

        def at(reached, point=point, root=root):
            if reached == point:
                raise OSError(getattr(errno, cause), "it fails", str(root / "somewhere"))

        with pytest.raises(store.StorageError) as e:
            save(root, 30, at)
        committed = store.FAULT_POINTS.index(point) >= COMMITTED
        assert cause in str(e.value) and str(root) in str(e.value)
        assert e.value.needed > 8000 and f"{e.value.needed:,} bytes" in str(e.value) or committed
        assert content(store.newest_checkpoint(root)) == (30 if committed else 20)
        assert not [p for p in root.iterdir() if p.name.startswith("step_") and ".tmp-" in p.name]
        recover(root, 30 if committed else 20)


def refused(root, cause):
    """A save of step 30 fails with `cause`; afterwards only what was there before is there."""
    before = sorted(p.name for p in root.iterdir())
    with pytest.raises(store.StorageError, match=cause) as e:
        save(root, 30)
    assert str(root) in str(e.value) and e.value.needed > 8000
    assert sorted(p.name for p in root.iterdir()) == before and content(store.newest_checkpoint(root)) == 20


def test_a_file_size_limit_leaves_the_old_checkpoint(tmp_path):
    """A real write error in the middle of a shard, for several places in it."""
    prepare(tmp_path, "later")
    for limit in (0, 100, 1000, 5000, 9000):

        def work(limit=limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            refused(tmp_path, "EFBIG")

        assert child(work) == 0
    assert recover(tmp_path, 20) is None


def test_no_file_descriptor_left_is_not_taken_for_damage(tmp_path):
    """Neither does a save call the disk a liar, nor a start the newest checkpoint damaged."""
    prepare(tmp_path, "later")

    def work():
        for room in (1, 0):
            taken = os.open(os.devnull, os.O_RDONLY)
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken + room, 4096))
            for attempt in (lambda: save(tmp_path, 30), lambda: store.newest_checkpoint(tmp_path)):
                with pytest.raises((store.StorageError, OSError), match="EMFILE|Too many open files"):
                    attempt()
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))

    assert child(work) == 0
    assert content(store.newest_checkpoint(tmp_path)) == 20


def small_disk(path, size):
    """Mounts a tmpfs of `size` bytes at path for this process alone (a mount namespace of its own). Raises
    OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(result):
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    # CLONE_NEWNS, CLONE_NEWUSER, MS_REC | PRIVATE
    namespace, user, private = 0x00020000, 0x10000000, 1 << 14 | 1 << 18
    call(libc.unshare(namespace if os.geteuid() == 0 else namespace | user))
    call(libc.mount(b"none", b"/", None, private, None))
    call(libc.mount(b"none", str(path).encode(), b"tmpfs", 0, f"size={size}".encode()))


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    def probe():
        small_disk(tmp_path, 1 << 16)
        (tmp_path / "file").write_text("written")

    with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
        if child(probe):
            pytest.skip("this machine does not let a test mount a tmpfs")

    def full(margin):
        small_disk(tmp_path, 1 << 17)  # 32 pages: two checkpoints of a few pages each, and little more
        prepare(tmp_path, "later")
        store.FREE_SPACE_MARGIN = margin  # in this fork only; 0: the write itself runs into the wall
        filler = tmp_path / "filler"
        for room in (4096, 8192):
            filler.write_bytes(b"\1" * (shutil.disk_usage(tmp_path).free - room))
            refused(tmp_path, "bytes are free" if margin else "ENOSPC")
            filler.unlink()
        recover(tmp_path, 20)

    for margin in (1.2, 0):
        assert child(lambda: full(margin)) == 0  # noqa: B023


def test_a_folder_that_vanished_is_made_and_a_file_in_its_place_named(tmp_path):
    prepare(tmp_path / "a", "later")
    shutil.rmtree(tmp_path / "a")
    assert content(save(tmp_path / "a", 30)) == 30  # made again
    (tmp_path / "file").write_text("")
    with pytest.raises(store.StorageError, match="file.*(ENOTDIR|EEXIST)"):
        save(tmp_path / "file", 30)
    with pytest.raises(store.StorageError, match="file.*ENOTDIR"):
        save(tmp_path / "file" / "checkpoints", 30)

    def vanish(point):
        if point == "ckpt.pre_index":
            shutil.rmtree(tmp_path / "a")

    with pytest.raises(store.StorageError, match="ENOENT"):
        save(tmp_path / "a", 40, vanish)


def test_what_reads_back_differently_is_not_committed(tmp_path):
    """A disk that lies: the shard changes between its flush and the check."""
    prepare(tmp_path, "later")

    def rot(point):
        if point == "ckpt.post_shard":
            shard = next(tmp_path.glob("*.tmp-*")) / "shard_00000.safetensors"
            data = bytearray(shard.read_bytes())
            data[-7] ^= 16
            shard.write_bytes(data)

    with pytest.raises(store.StorageError, match="reads back differently.*shard_00000"):
        save(tmp_path, 30, rot)
    assert content(store.newest_checkpoint(tmp_path)) == 20 and not leftovers(tmp_path)


def test_there_is_a_good_checkpoint_at_every_instant(tmp_path):
    """keep = 1, a look at the folder from every point of every save."""
    seen = []

    def look(point):
        if store.committed_checkpoints(tmp_path):
            seen.append(content(store.newest_checkpoint(tmp_path)))
        else:
            assert not seen, f"{point}: nothing is left"

    for step in range(1, 6):
        store.save(tmp_path, step, pieces(step), {"tokens": step * 100}, keep=1, fault_point=look)
    assert seen == sorted(seen) and set(seen) == {1, 2, 3, 4, 5}


def test_what_is_flushed_to_disk_is_the_whole_file(tmp_path, monkeypatch):
    """Bytes that Python still holds would be lost by a power cut after the flush."""
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_size))
    files.write_file(tmp_path / "small", b"x" * 100)
    assert flushed == [100]


def test_everything_is_flushed_before_it_counts(tmp_path, monkeypatch):
    """SIGKILL does not show a missing fsync, a power cut would: the order of flushes and renames itself."""
    events, fsync, rename, replace = [], os.fsync, os.rename, os.replace

    def logged_fsync(fd):
        events.append(("flush", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", str(b))), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(("rename", str(b))), replace(a, b)))
    monkeypatch.setattr(store, "SHARD_BYTES", 8000)
    final = save(tmp_path, 30)
    names = sorted(p.name for p in final.iterdir())
    assert len(names) == 5, "two shards, meta, index, seal"
    commit, latest = events.index(("rename", str(final))), events.index(("rename", str(tmp_path / "latest")))
    before = [path for kind, path in events[:commit] if kind == "flush" and ".tmp-" in path]
    assert sorted(Path(p).name for p in before[:-1]) == names
    assert Path(before[-1]).parent == tmp_path, "the folder, after its files"
    assert ("flush", str(tmp_path)) in events[commit:latest], "the rename is on disk before `latest` names it"
    assert events[latest - 1][0] == "flush" and "latest.tmp-" in events[latest - 1][1]
    assert events[-1] == ("flush", str(tmp_path))


def test_every_point_is_in_the_code_once():
    """FAULT_POINTS and the calls in the writer name the same places."""
    source = Path(store.__file__).read_text()
    for point in store.FAULT_POINTS:
        assert source.count(f'fault_point("{point}")') == 1
    assert source.count('fault_point("ckpt.') == len(store.FAULT_POINTS)
