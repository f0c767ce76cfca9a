import json
import math
import os
import random
import resource
import signal
import time

import pytest

from runtime.lines import MetricsFile, read_metrics, truncate_after


def rows(*steps):
    return [{"step": s, "loss": 1 / s} for s in steps]


def steps(folder):
    return [r["step"] for r in read_metrics(folder)[0]]


def test_floats_read_back_bit_for_bit(tmp_path):
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
    file = MetricsFile(tmp_path, 0)
    file.add([{"step": i, "loss": v} for i, v in enumerate(values)])
    back = [r["loss"] for r in read_metrics(tmp_path)[0]]
    assert [v.hex() for v in back] == [v.hex() for v in values]


def test_what_is_not_finite_is_still_json(tmp_path):
    MetricsFile(tmp_path, 0).add(
        [{"step": 1, "loss": math.nan, "grad_norm": -math.inf, "lr": 0.1}, {"step": 2, "loss": 1.0}]
    )

    def refuse(name):
        raise AssertionError(name)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[0], parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1, "nonfinite": True}
    assert "nonfinite" not in lines[1]


@pytest.mark.parametrize(
    "torn",
    [b"", b'{"step": 7, "lo', b'{"step": 7, "loss": 0.1}', b"\0" * 40, b'{"step": 7, "loss": 0.1}garbage\n'],
)
def test_a_resumed_run_holds_each_step_once(tmp_path, torn):
    MetricsFile(tmp_path, 0).add(rows(1, 2, 3) + [{"step": 3, "val_loss": 2.0}] + rows(4, 5, 6))
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(torn)
    file = MetricsFile(tmp_path, 3)
    assert steps(tmp_path) == [1, 2, 3] and len(read_metrics(tmp_path)[1]) == 1
    file.add(rows(4, 5))
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert not (tmp_path / "metrics.jsonl.tmp").exists()


def test_a_start_from_nothing_begins_a_new_file(tmp_path):
    start = {"step": 0, "val_loss": 9.0}
    MetricsFile(tmp_path, 0).add([start, *rows(1, 2)])
    MetricsFile(tmp_path, 0).add([start, *rows(1)])
    assert steps(tmp_path) == [1] and read_metrics(tmp_path)[1] == [start]
    MetricsFile(tmp_path, 1)
    assert steps(tmp_path) == [1] and read_metrics(tmp_path)[1] == [start]


def test_only_a_file_with_damage_between_its_lines_is_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(tmp_path, 0).add(rows(1, 2, 3))
    inode = path.stat().st_ino
    for last in (3, 2):
        truncate_after(path, last)
        assert path.stat().st_ino == inode and steps(tmp_path) == [*range(1, last + 1)]
    path.write_bytes(b"damaged\n" + path.read_bytes())
    truncate_after(path, 1)
    assert path.stat().st_ino != inode and path.read_bytes().count(b"\n") == 1 and steps(tmp_path) == [1]


def test_a_full_disk_cuts_all_the_same_or_changes_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for damage, left in ((b"", [1, 2]), (b"damaged\n", None)):
        path.unlink(missing_ok=True)
        MetricsFile(tmp_path, 0).add(rows(1, 2, 3, 4))
        path.write_bytes(damage + path.read_bytes())
        before = path.read_bytes()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
            if left:
                truncate_after(path, 2)
            else:
                with pytest.raises(OSError, match="File too large"):
                    truncate_after(path, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert steps(tmp_path) == left if left else path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_kill_while_writing_leaves_whole_lines(tmp_path):
    """Killed eight times, at some moment of a stream of writes: the next start has whole lines, from the
    first on.
    """
    path = tmp_path / "metrics.jsonl"
    for i in range(8):
        pid = os.fork()
        if pid == 0:
            file = MetricsFile(tmp_path, 0)
            for n in range(10**6):
                file.add(rows(*range(20 * n + 1, 20 * n + 21)))
            os._exit(0)
        until = time.monotonic() + 5
        while time.monotonic() < until and not (path.exists() and path.stat().st_size > 1000 * i):
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        MetricsFile(tmp_path, 10**9)
        text = path.read_bytes()
        assert len(text) > 1000 * i - 100 and (not text or text.endswith(b"}\n"))
        assert [json.loads(line)["step"] for line in text.splitlines()] == list(
            range(1, text.count(b"\n") + 1)
        )
        path.unlink()


def test_a_full_disk_drops_and_counts(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = MetricsFile(tmp_path, 0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        for s in range(1, 11):
            file.add(rows(s))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = steps(tmp_path)
    assert 0 < len(kept) < 10 and kept == list(range(1, len(kept) + 1))
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")  # no half line
    assert "metrics.jsonl: File too large" in file.warning() and file.warning() is None
    file.add(rows(11))  # there is room again
    assert steps(tmp_path)[-1] == 11
    assert file.close() == 10 - len(kept)


def test_a_folder_that_cannot_be_written_to_never_raises(tmp_path):
    (tmp_path / "file").write_text("")
    file = MetricsFile(tmp_path / "file", 0)
    file.add(rows(1, 2))
    assert "training continues" in file.warning() and file.close() == 2


DAMAGE = [
    b'{"step": 2, "loss": x.5}\n', b'{"step": 2, "l\xffss": 0.5}\n',
    b'{"step": ' + b"7" * 5000 + b', "loss": 0.5}\n', b'{"step": 2, "loss": ' + b"7" * 5000 + b"}\n",
    b'{"step": 2, "loss": ' + b"7" * 400 + b"}\n", b'{"step": 2, "loss": "a"}\n',
    b'{"step": 2, "loss": {}}\n', b'{"step": 2, "losr": 0.5}\n',
    b'{"step": 2, "loss": ' + b"[" * 9999 + b"}\n", b"\0" * 50 + b"\n", b'{"step": 2, "loss": NaN}\n',
    b'{"step": 2, "loss": [0.5]}\n', b'{"step": 2, "val_loss": x}\n',
]


@pytest.mark.parametrize("line", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_line_is_left_out_and_counted(tmp_path, line):
    MetricsFile(tmp_path, 0).add(rows(1))
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(line)
    file = MetricsFile(tmp_path, 5)
    assert file.warning() is None  # it was opened, and cut at the step
    file.add(rows(3))
    train, valid = read_metrics(tmp_path, damaged_lines=(bad := []))
    assert (
        [r["step"] for r in train] == [1, 3] and not valid and bad in ([2], [])
    )  # [] where the cut took it away


def test_any_flipped_bits_are_read_around(tmp_path):
    """Six seeded bits of a file of 40 lines at a time, and its lines cut at a step: read gives rows of
    numbers, or leaves out."""
    rng = random.Random(0)
    file = MetricsFile(tmp_path, 0)
    file.add([{"step": s, "loss": 1 / s, "skipped": 0, "moe_load": [1.5, None]} for s in range(1, 21)])
    file.add([{"step": s, "val_loss": 1 / s} for s in range(1, 21)])
    good = (tmp_path / "metrics.jsonl").read_bytes()
    hurt = 0
    for _ in range(40):
        data = bytearray(good)
        for _ in range(6):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "metrics.jsonl").write_bytes(data)
        train, valid = read_metrics(tmp_path, damaged_lines=(bad := []))
        hurt += len(bad)
        assert all(r["loss"] is None or 0 * r["loss"] == 0 for r in train)
        assert all(type(r["step"]) is int for r in train + valid)
        MetricsFile(tmp_path, 10).close()
    assert hurt > 80


def test_a_long_run_is_thinned_but_keeps_its_ends(tmp_path):
    file = MetricsFile(tmp_path, 0)
    file.add([{"step": 0, "val_loss": 9.0}] + rows(*range(1, 1001)) + [{"step": 1000, "val_loss": 2.0}])
    train, valid = read_metrics(tmp_path, max_steps=100)
    assert [r["step"] for r in train] == [*range(1, 1001, 10), 1000]
    assert [r["step"] for r in valid] == [0, 1000]
    assert len(read_metrics(tmp_path)[0]) == 1000
