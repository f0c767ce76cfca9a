"""data/indexed.py against Megatron's bytes, and against every way in which files go wrong."""

import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from config import ConfigError
from data.indexed import BLOCK, ChecksumError, IndexedDataset, IndexedDatasetWriter, get_dtype, sidecar_bytes

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN_IDX = (
    "4d4d494449445800 00"
    "0100000000000000"
    "08"
    "0300000000000000"
    "0400000000000000"  # header: u16, N 3, D+1 4
    "03000000 01000000 02000000"  # lengths
    "0000000000000000 0600000000000000 0800000000000000"  # byte offsets
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000"
)  # document bounds
GOLDEN_BIN = "0100 0200 ff00 ff00 2c01 ff00"
DOCS = [[1, 2, 255], [255], [300, 255]]


def write(prefix, docs, vocab=1024):
    with IndexedDatasetWriter(prefix, vocab) as w:
        for doc in docs:
            w.add(doc)
        w.finish(text_bytes=9)
    return prefix


@pytest.fixture(params=[None, 1, 2], ids=["usual", "1", "2"])
def chunk(request, monkeypatch):
    """Tables are written and read in pieces of this many rows."""
    if request.param is not None:
        monkeypatch.setattr("data.indexed.CHUNK", request.param)


@pytest.fixture
def large(tmp_path):
    """Three blocks of tokens, 200 documents."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(3 * BLOCK // 2 - 1000, np.ones(200) / 200)
    return write(tmp_path / "d", [rng.integers(0, 1000, n) for n in sizes])


def test_files_have_megatrons_bytes(tmp_path, chunk):
    write(tmp_path / "g", DOCS)
    assert (tmp_path / "g.bin").read_bytes() == bytes.fromhex(GOLDEN_BIN)
    assert (tmp_path / "g.idx").read_bytes() == bytes.fromhex(GOLDEN_IDX)


def test_megatrons_own_files_are_read(tmp_path, chunk):
    """No sidecar; sentence-split data has more sequences than documents; modes may follow."""
    lengths, bounds = [2, 1, 3, 0, 2], [0, 2, 2, 5]  # documents of 3, 0 and 5 tokens
    ids = np.arange(8, dtype="<i4")
    ids.tofile(tmp_path / "m.bin")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 5, 4)
    tables = (np.array(lengths, "<i4"), np.array([0, 8, 12, 24, 24], "<i8"), np.array(bounds, "<i8"))
    body = b"".join(table.tobytes() for table in tables)
    for modes in (b"", b"\0" * 5):
        (tmp_path / "m.idx").write_bytes(head + body + modes)
        d = IndexedDataset(tmp_path / "m")
        assert (d.tokens, d.documents) == (8, 3)
        assert [d.document(i).tolist() for i in range(3)] == [[0, 1, 2], [], [3, 4, 5, 6, 7]]
        assert [d.document_at(t) for t in range(8)] == [0, 0, 0, 2, 2, 2, 2, 2]
        assert d.document_starts(0, 8).tolist() == [3]
        assert d.document_starts(3, 8).tolist() == []
        assert d.document_starts(1, 3).tolist() == []


def test_ids_and_document_starts_come_back(tmp_path):
    rng = random.Random(1)
    for vocab in (257, 65499, 65500, 200000):
        docs = [[rng.randrange(vocab) for _ in range(rng.choice([1, 2, 50]))] for _ in range(60)]
        d = IndexedDataset(write(tmp_path / "r", docs, vocab), vocab)
        assert d.dtype == get_dtype(vocab) == ("<u2" if vocab < 65500 else "<i4")
        assert [d.document(i).tolist() for i in range(60)] == docs
        flat, firsts = sum(docs, []), np.cumsum([0] + [len(x) for x in docs])
        for _ in range(50):
            a, b = sorted(rng.sample(range(len(flat) + 1), 2))
            assert d.read(a, b).tolist() == flat[a:b]
            assert d.document_starts(a, b).tolist() == [f for f in firsts[:-1] if a < f < b]
        assert d.meta["max_id"] == max(flat) and flat[d.meta["max_id_at"]] == max(flat)


def flip(path, at, bit):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("end", [".idx", ".crc", ".json"])
def test_200_flips_are_refused_at_opening(large, end):
    path, rng = pathlib.Path(f"{large}{end}"), random.Random(2)
    good = path.read_bytes()
    for _ in range(200):
        flip(path, rng.randrange(len(good)), rng.randrange(8))
        with pytest.raises(ConfigError) as e:
            IndexedDataset(large)
        assert "\n" not in str(e.value) and str(large) in str(e.value)
        path.write_bytes(good)
    IndexedDataset(large)


@pytest.mark.slow
def test_200_flips_of_the_bin_are_found_at_first_touch(large):
    path, rng = pathlib.Path(f"{large}.bin"), random.Random(3)
    good = path.read_bytes()
    for _ in range(200):
        at = rng.randrange(len(good))
        flip(path, at, rng.randrange(8))
        d = IndexedDataset(large)  # the .bin is not read here
        with pytest.raises(ChecksumError, match=f"d.bin: block {at // BLOCK} "):
            d.read(at // 2, at // 2 + 1)
        path.write_bytes(good)


def test_a_flip_in_a_block_that_is_not_read_is_not_noticed(large):
    flip(pathlib.Path(f"{large}.bin"), 2 * BLOCK + 5, 0)
    d = IndexedDataset(large)
    assert len(d.read(0, BLOCK)) == BLOCK  # blocks 0 and 1
    with pytest.raises(ChecksumError):
        d.read(BLOCK - 1, BLOCK + 1)


def test_most_flips_are_found_without_a_sidecar(large):
    """Files of Megatron: structure alone finds each flip of the header, the lengths, the offsets."""
    for end in (".json", ".crc"):
        pathlib.Path(f"{large}{end}").unlink()
    path, rng = pathlib.Path(f"{large}.idx"), random.Random(4)
    good = path.read_bytes()
    for _ in range(200):
        flip(path, rng.randrange(34 + 12 * 200), rng.randrange(8))
        with pytest.raises(ConfigError):
            IndexedDataset(large)
        path.write_bytes(good)


def test_each_block_is_checked_at_its_first_read_alone(tmp_path, monkeypatch):
    """Tokens and mask."""
    with IndexedDatasetWriter(tmp_path / "d", 1024, has_mask=True) as writer:
        writer.add(np.ones(3 * BLOCK // 2, int), np.arange(3 * BLOCK // 2) % 3 == 0)
        writer.finish()
    data, checked = IndexedDataset(tmp_path / "d"), []
    for module in ("indexed", "loss_mask"):
        crc32 = lambda raw, module=module: checked.append(module) or zlib.crc32(raw)
        monkeypatch.setattr(f"data.{module}.zlib", SimpleNamespace(crc32=crc32))
    for _ in range(3):
        data.read(BLOCK // 2 - 1, BLOCK // 2 + 1)
        data.counted(0, 10)
    assert sorted(checked) == ["indexed", "indexed", "loss_mask"]


def put(offset, content):
    return lambda raw: raw[:offset] + content + raw[offset + len(content) :]


BAD_FILES = (
    (".idx", lambda raw: b"", "offset 0: ends here"),
    (".idx", lambda raw: raw[:20], "offset 20: ends here"),
    (".idx", lambda raw: raw[:-8], "offset 18: 3 sequences and 4 bounds make 102 bytes, the file has 94"),
    (".idx", lambda raw: raw + b"\0", "the file has 103"),
    (".idx", put(0, b"MMIDIDY"), "offset 0: starts with"),
    (".idx", put(0, b"TNTIDX\0\0"), "the old TNTIDX format is not read"),
    (".idx", put(9, b"\2"), "offset 9: version 2"),
    (".idx", put(17, b"\7"), "offset 17: dtype code 7"),
    (".idx", put(18, b"\xff" * 8), "offset 18: 18446744073709551615 sequences"),
    (".idx", put(37, b"\x80"), "offset 34: sequence 0 has a length below 0"),
    (".idx", put(54, b"\7"), "offset 54: sequence 1 begins at byte 7, but the lengths before it sum to 6"),
    (".idx", put(70, b"\1"), "offset 70: document 0 begins at sequence 1"),
    (".idx", put(78, b"\5"), "offset 78: document 1 begins at sequence 5"),
    (".idx", put(94, b"\2"), "offset 94: documents end at sequence 2, not 3"),
    (".bin", lambda raw: raw[:-1], "11 bytes, g.idx counts 12: truncated or grown"),
    (".bin", lambda raw: raw + b"\0\0", "14 bytes, g.idx counts 12: truncated or grown"),
    (".bin", lambda raw: b"", "0 bytes, g.idx counts 12"),
    (".idx", None, "No such file"),
    (".bin", None, "No such file"),
    (".crc", None, "No such file"),
)


@pytest.mark.parametrize("end,change,told", BAD_FILES)
def test_a_file_that_is_damaged_or_missing_is_named_with_the_place(tmp_path, chunk, end, change, told):
    write(tmp_path / "g", DOCS)
    path = tmp_path / f"g{end}"
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(ConfigError) as e:
        IndexedDataset(tmp_path / "g")
    assert told in str(e.value) and f"g{end}" in str(e.value) and "\n" not in str(e.value)


def test_no_tokens_is_an_error(tmp_path):
    write(tmp_path / "e", [[]])
    with pytest.raises(ConfigError, match="e.bin: holds no tokens"):
        IndexedDataset(tmp_path / "e")


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    write(tmp_path / "g", DOCS)
    told = "g.bin: document 2, token 0: id 300 is not below the vocabulary of 300"
    with pytest.raises(ConfigError, match=told):
        IndexedDataset(tmp_path / "g", 300)  # the sidecar knows: before anything is read
    IndexedDataset(tmp_path / "g", 301)
    for end in (".json", ".crc"):
        (tmp_path / f"g{end}").unlink()
    with pytest.raises(ConfigError, match="document 2, token 0: id 300"):
        IndexedDataset(tmp_path / "g", 300)  # Megatron's files: in the blocks that are looked at
    raw = bytearray((tmp_path / "g.idx").read_bytes())
    raw[17] = 3  # i16, in which 0xffff is -1
    (tmp_path / "g.idx").write_bytes(raw)
    (tmp_path / "g.bin").write_bytes(bytes.fromhex("0100 0200 ffff ff00 2c01 ff00"))
    with pytest.raises(ConfigError, match="document 0, token 2: id -1"):
        IndexedDataset(tmp_path / "g", 1000)


def test_an_id_that_no_sample_finds_is_refused_at_first_touch(tmp_path, monkeypatch):
    """Only some blocks of a large file are looked at when it is opened."""
    monkeypatch.setattr("data.indexed.PROBED_BLOCKS", 2)  # the first and the last of three
    with IndexedDatasetWriter(tmp_path / "g", 1024) as writer:
        ids = np.ones(3 * BLOCK // 2, int)
        ids[BLOCK // 2 + 7] = 300
        writer.add(ids)
        writer.finish()
    (tmp_path / "g.json").unlink()
    data = IndexedDataset(tmp_path / "g", 300)
    assert data.probed == (2, 3)
    with pytest.raises(ConfigError, match=f"document 0, token {BLOCK // 2 + 7}: id 300"):
        data.read(BLOCK // 2, BLOCK // 2 + 1)


def test_a_failed_writer_leaves_the_old_files(tmp_path):
    write(tmp_path / "g", DOCS)
    with pytest.raises(ZeroDivisionError), IndexedDatasetWriter(tmp_path / "g", 1024) as w:
        w.add([1] * 1000)
        w.add([1 // 0])
    assert IndexedDataset(tmp_path / "g").tokens == 6
    with pytest.raises(ValueError, match="lengths sum to"), IndexedDatasetWriter(tmp_path / "g", 1024) as w:
        w.extend(np.arange(5), [4])
        w.finish()
    assert IndexedDataset(tmp_path / "g").tokens == 6


BIG = """
import resource, sys, time
from dataclasses import replace
from config import DataConfig, TrainConfig
from config.reading import defaults
from data.loader import open_loader
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
data = DataConfig(path=sys.argv[1], split="998,2")
cfg = replace(defaults(), data=data, train=TrainConfig(steps=1, seq_len=2048))
before, clock = peak(), time.perf_counter()
data = open_loader(cfg, "train", 0, 1)
ids = [i for step in range(100) for i in data.sample_ids(step)]
print(time.perf_counter() - clock, peak() - before, data.tokens, len(set(ids)))
"""


def test_a_billion_tokens_open_at_once(tmp_path):
    """1e9 tokens in 1e6 documents, with checksums: 2 s and 100 MB are promised, for files and sample order
    together.
    """
    import hashlib

    from data.indexed import file_sha256, sidecar_bytes

    n, size = 1_000_000, 2_000_000_000
    with open(tmp_path / "big.bin", "wb") as f:
        f.truncate(size)
    lengths = np.full(n, 1000, "<i4")
    with open(tmp_path / "big.idx", "wb") as f:
        f.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, n, n + 1))
        for table in (lengths, np.arange(n, dtype="<i8") * 2000, np.arange(n + 1, dtype="<i8")):
            f.write(table.tobytes())
    crc = [zlib.crc32(bytes(BLOCK))] * (size // BLOCK) + [zlib.crc32(bytes(size % BLOCK))]
    (tmp_path / "big.crc").write_bytes(np.array(crc, "<u4").tobytes())
    meta = {
        "format": 1, "block": BLOCK, "source": None, "text_bytes": 0, "tokenizer": None, "documents": n,
        "tokens": size // 2, "max_id": 0, "max_id_at": 0,
        "idx_sha256": file_sha256(tmp_path / "big.idx"),
        "crc_sha256": hashlib.sha256((tmp_path / "big.crc").read_bytes()).hexdigest(),
    }
    (tmp_path / "big.json").write_bytes(sidecar_bytes(meta))
    out = subprocess.run(
        [sys.executable, "-c", BIG, str(tmp_path / "big")], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )
    seconds, mib, tokens, unique = map(float, out.stdout.split())
    assert seconds < 2 and mib < 100 and tokens == 998_000_000 and unique == 1600, out.stdout
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("change", [{"format": 2}, {"block": BLOCK // 2}])
def test_a_sidecar_of_another_form_is_refused_though_its_checksum_holds(tmp_path, change):
    write(tmp_path / "d", DOCS)
    meta = json.loads((tmp_path / "d.json").read_bytes())
    (tmp_path / "d.json").write_bytes(sidecar_bytes(meta))
    assert IndexedDataset(tmp_path / "d").tokens == 6
    (tmp_path / "d.json").write_bytes(sidecar_bytes(meta | change))
    with pytest.raises(ChecksumError, match="d.json: "):
        IndexedDataset(tmp_path / "d")


def test_a_file_that_changes_after_it_was_opened_is_noticed(tmp_path):
    write(tmp_path / "d", DOCS)
    for end in ("idx", "bin"):
        os.utime(tmp_path / f"d.{end}", (0, 0))  # a clock of a write may tick every few milliseconds
    data = IndexedDataset(tmp_path / "d")
    data.check_unchanged()
    old = (tmp_path / "d.idx").read_bytes()
    (tmp_path / "d.idx").unlink()
    data.check_unchanged()  # what was opened is still there
    (tmp_path / "d.idx").write_bytes(old)
    with pytest.raises(ChecksumError, match="d.idx: (replaced|written to) while the run read it"):
        data.check_unchanged()
    data = IndexedDataset(tmp_path / "d")
    with open(tmp_path / "d.bin", "r+b") as f:
        f.write(b"\x07")
    with pytest.raises(ChecksumError, match="d.bin: written to while"):
        data.check_unchanged()


@pytest.mark.parametrize("documents", [DOCS, [[7] * 200_000] * 3])
def test_a_sidecar_that_lies_about_ids_is_found_at_first_touch(tmp_path, documents):
    """The sidecar is sealed again, so its checksum holds; the largest id that it names does not."""
    last = [5, 60_000, 5]
    write(tmp_path / "d", [*documents, last])
    meta = json.loads((tmp_path / "d.json").read_bytes())
    assert meta["max_id"] == 60_000
    (tmp_path / "d.json").write_bytes(sidecar_bytes(meta | {"max_id": 255}))
    data = IndexedDataset(tmp_path / "d", 256 if documents != DOCS else 1000)
    told = f"document {len(documents)}, token 1: id 60000 is not below the vocabulary"
    with pytest.raises(ConfigError, match=told):
        data.document(len(documents))


@pytest.mark.slow
def test_a_bin_that_is_truncated_under_a_run_is_named(tmp_path):
    """A process of its own, because the alternative is to be killed by SIGBUS."""
    for name in ("indexed", "raw"):
        write(tmp_path / name, [[7] * 200_000])
    (tmp_path / "raw.idx").unlink()
    script = """
import os, sys
from data.indexed import ChecksumError, IndexedDataset
from data.raw import RawShards
path = sys.argv[1]
data = RawShards(path) if path.endswith("raw.bin") else IndexedDataset(path.removesuffix(".bin"))
first = data.read(0, 10)
os.truncate(path, 1000)
for begin in (0, 150_000):
    try:
        data.read(begin, begin + 10).sum()
    except ChecksumError as error:
        print(error.exit_code, error)
"""
    for name in ("indexed", "raw"):
        path = tmp_path / f"{name}.bin"
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, (done.returncode, done.stderr)
        told = f"79 {path}: truncated from 400000 to 1000 bytes while the run read it"
        assert [line.startswith(told) for line in done.stdout.splitlines()] == [True, True]
