"""data/loader.py: batches are a pure function of (seed, step), whatever ranks, prefetch and restarts do."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from prepared_data import loader_config
from ranks import write_documents

import config
import phases
from config import ConfigError
from data import loader, tokenizer
from data.indexed import ChecksumError, IndexedDataset, IndexedDatasetWriter
from data.loader import check_paths, open_loader, split_shares
from parallel.microbatch import Microbatch
from parallel.topology.mesh import Mesh

ROOT = pathlib.Path(__file__).parents[2]


def make(prefix, count, seed=0, tok=None):
    """`count` documents of random ascii; each begins with its own number."""
    tok, rng = tok or tokenizer.load_tokenizer("bytes"), np.random.default_rng(seed)
    documents = ([*tok.encode(f"{i:04d}"), *rng.integers(97, 123, rng.integers(0, 60))] for i in range(count))
    return write_documents(prefix, documents, tok)


def settings(path, seed=1, seq_len=16, micro_batch=2, global_batch=12, vocab=None, **data):
    cfg = loader_config(path, seq_len, micro_batch, global_batch, seed, **data)
    return replace(cfg, model=replace(cfg.model, vocab=vocab))


def rows(data, step):
    """[samples, seq_len + 1] of the step, this rank's."""
    return make_rows(data.microbatches(step))


def make_rows(batches):
    return [tuple(row.tolist()) for b in batches for row in torch.cat([b.tokens, b.targets[:, -1:]], 1)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return make(tmp_path_factory.mktemp("data") / "a", 300)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make(tmp_path_factory.mktemp("data") / "b", 50, seed=1)


def counted_step_targets(world, prefix) -> list[tuple[int, int]]:
    """(targets of this rank's samples, those that the loader knows of the step), after a step back, too."""
    data = open_loader(settings(prefix, doc_mask=True, prefetch=2), "train", world.rank, world.size)
    data.count_over(world.separate_group("loaders"))
    found = []
    for step in (0, 1, 0, 1, 2):
        batches = data.microbatches(step)
        assert len({int(batch.step_targets) for batch in batches}) == 1
        own = sum(int(batch.num_counted()) for batch in batches)
        found.append((own, int(batches[0].step_targets)))
    data.close()
    return found


def test_a_step_knows_the_targets_of_all_ranks(ranks, prefix):
    for of_ranks in zip(*ranks(2).run(counted_step_targets, prefix)):
        assert {known for _, known in of_ranks} == {sum(own for own, _ in of_ranks)}


def seconds_to_close(world, prefix) -> float:
    """Rank 1 closes while its loader reads; rank 0 when its own has gone on to a step after that."""
    data = open_loader(settings(prefix, doc_mask=True, prefetch=2), "train", world.rank, world.size)
    data.count_over(world.separate_group("loaders"))
    read = data._read_step

    def read_slowly(step):
        if world.rank == 1 and step > 0:
            time.sleep(1.0)
        return read(step)

    data._read_step = read_slowly
    data.microbatches(0)
    if world.rank == 0:
        time.sleep(1.5)
    begun = time.monotonic()
    data.close()
    return time.monotonic() - begun


def test_a_rank_that_stops_leaves_no_other_waiting_for_its_counts(ranks, prefix):
    assert max(ranks(2).run(seconds_to_close, prefix)) < 20


class Copies:
    """Stands in for a GPU's stream of copies: keeps what was asked of it, and by which thread."""

    def __init__(self, device):
        assert device.type == "cuda"
        self.is_open = False
        self.started = []  # the tensors that were copied
        self.ready = set()  # addresses of those that the computation waits for
        self.kept = set()

    @contextlib.contextmanager
    def context(self):
        assert threading.current_thread().name.startswith("loader")
        self.is_open = True
        yield
        self.is_open = False

    def copy(self, batch, device):
        """Instead of Microbatch.to."""
        assert self.is_open and device.type == "cuda"
        there = batch.with_tensors(torch.clone)
        self.started += there.tensors().values()
        return there

    def record_event(self):
        return len(self.started)

    def make_compute_wait(self, event):
        assert threading.current_thread() is threading.main_thread()
        self.ready.update(x.data_ptr() for x in self.started[:event])

    def give_to_compute(self, x):
        self.kept.add(x.data_ptr())


def test_microbatches_for_a_gpu_are_pinned_and_copied_by_the_thread_that_reads_ahead(prefix, monkeypatch):
    """From other memory the host would wait for each copy, and with it for the step before."""
    pinned = []

    def pin(x):
        pinned.append(threading.current_thread().name)
        return x.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    cfg = settings(prefix, doc_mask=True)
    on_cpu = open_loader(cfg, "train", 0, 1)
    expected = [rows(on_cpu, step) for step in range(3)]
    on_cpu.close()
    monkeypatch.setattr(loader, "CopyStream", Copies)
    monkeypatch.setattr(Microbatch, "to", lambda batch, device: data._copies.copy(batch, device))
    data = open_loader(cfg, "train", 0, 1, device=torch.device("cuda", 0))
    for step, wanted in enumerate(expected):
        batches = data.microbatches(step)
        tensors = [x.data_ptr() for batch in batches for x in batch.tensors().values()]
        assert len(tensors) == 6 * len(batches)  # tokens, targets, positions, documents, ids, the count
        assert {*tensors} <= data._copies.ready and {*tensors} <= data._copies.kept
        assert make_rows(batches) == wanted
    ahead = [read.result() for read in data._prefetched.values()]  # close() cancels what has not begun
    data.close()
    assert pinned and {name.split("_")[0] for name in pinned} == {"loader"}
    assert len(ahead) == cfg.data.prefetch
    assert len(data._copies.started) > len(data._copies.kept)  # steps ahead of the last


def test_the_run_reads_for_its_device(prefix):
    for data in phases.open_data(settings(prefix), Mesh.single(), torch.device("meta")):
        assert data.microbatches(0)[0].tokens.device.type == "meta"
        data.close()


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(prefix):
    data = open_loader(settings(prefix), "train", 0, 1)
    steps = -(-2 * data.samples // 12) + 1
    ids = [i for step in range(steps) for i in data.sample_ids(step)]
    n = data.samples
    assert sorted(ids[:n]) == list(range(n)) and sorted(ids[n : 2 * n]) == list(range(n, 2 * n))
    assert [i % n for i in ids[:n]] != [i % n for i in ids[n : 2 * n]]
    data.close()


def test_samples_are_windows_of_the_stream(prefix):
    data, stream = open_loader(settings(prefix), "train", 0, 1), IndexedDataset(prefix)
    text = stream.read(0, stream.tokens).tolist()
    places = {tuple(text[a : a + 17]) for a in range(len(text) - 16)}
    for batch in data.microbatches(3):
        assert batch.tokens.shape == batch.targets.shape == (2, 16)
        assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == torch.int64
    assert set(rows(data, 4)) <= places
    data.close()


@pytest.mark.parametrize("path", ["{a}", "0.7 {a} 0.3 {b}"])
def test_ranks_share_what_one_rank_reads(prefix, other, path):
    path = path.format(a=prefix, b=other)
    whole = open_loader(settings(path), "train", 0, 1)
    for world, micro in ((1, 4), (2, 3), (3, 1), (6, 2)):
        ranks = [open_loader(settings(path, micro_batch=micro), "train", r, world) for r in range(world)]
        for step in (0, 7, 500):
            assert sum((rows(d, step) for d in ranks), []) == rows(whole, step)
            assert all(d.sample_ids(step) == whole.sample_ids(step) for d in ranks)
            places = [b.sequence_ids.tolist() for d in ranks for b in d.microbatches(step)]
            assert sum(places, []) == list(range(12)) and {len(p) for p in places} == {micro}
        [d.close() for d in ranks]
    whole.close()


def test_steps_are_the_same_in_any_order_with_and_without_prefetch(prefix):
    """Ahead, back, twice, far: a resume can begin anywhere."""
    plain = open_loader(settings(prefix, prefetch=0), "train", 0, 1)
    for prefetch in (1, 2, 5):
        data = open_loader(settings(prefix, prefetch=prefetch), "train", 0, 1)
        for step in [0, 1, 2, 2, 9, 10, 11, 3, 4, 1000, 0, 1]:
            assert rows(data, step) == rows(plain, step)
            assert data.microbatches(step)[0].step == step
        data.close()
        data.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("loader")]


def test_a_slow_disk_keeps_the_order(prefix, monkeypatch):
    plain = open_loader(settings(prefix, prefetch=0), "train", 0, 1)
    want = [rows(plain, step) for step in range(6)]
    data, read = open_loader(settings(prefix), "train", 0, 1), IndexedDataset.read
    monkeypatch.setattr(IndexedDataset, "read", lambda *a: (time.sleep(0.002 * (a[1] % 3)), read(*a))[1])
    assert [rows(data, step) for step in range(6)] == want
    data.close()


def test_seed_changes_training_and_not_validation(prefix):
    a, b = settings(prefix, seed=1), settings(prefix, seed=2)
    assert rows(open_loader(a, "train", 0, 1), 0) != rows(open_loader(b, "train", 0, 1), 0)
    assert rows(open_loader(a, "valid", 0, 1), 0) == rows(open_loader(b, "valid", 0, 1), 0)


def test_splits_are_disjoint_and_complete(prefix):
    for split in ("95,5,0", "969,30,1", "1,1,1", "0.5,0.25,0.25"):
        source = open_loader(settings(prefix, split=split), "train", 0, 1).datasets[0]
        index = source.index
        starts = {index.document_start(i) for i in range(index.documents + 1)}
        assert set(source.split_points) <= starts and list(source.split_points) == sorted(source.split_points)
        # each document in exactly one
        assert source.split_points[0] == 0 and source.split_points[-1] == index.tokens
        shares = split_shares(split, "train")
        begins = np.array([index.document_start(i) for i in range(index.documents)])
        documents, _ = np.histogram(begins, source.split_points)
        np.testing.assert_allclose(documents, 300 * np.array(shares) / sum(shares), atol=1)


def test_a_split_gives_its_own_tokens_alone(prefix):
    for k, split in enumerate(("train", "valid", "test")):
        data = open_loader(settings(prefix, split="1,1,1"), split, 0, 1)
        source = data.datasets[0]
        text = source.index.read(source.split_points[k], source.split_points[k + 1]).tolist()
        places = {tuple(text[a : a + 17]) for a in range(len(text) - 16)}
        assert all(set(rows(data, step)) <= places for step in range(0, 60, 7))
        data.close()


@pytest.mark.parametrize("split,which,told", [
    ("95", "valid", "leaves nothing for valid"),
    ("95,5", "test", "leaves nothing for test"),
    ("a,b", "train", "is not shares"),
    ("-1,2", "train", "is not shares"),
    ("0,0", "train", "is not shares"),
    ("1,1,1,1", "train", "is not shares"),
    ("1000,1", "valid", "leaves valid 0 tokens of .* \\(300 documents\\), a sample is 17.*data.valid"),
])
def test_a_split_that_leaves_nothing_is_refused(prefix, split, which, told):
    with pytest.raises(ConfigError, match=told):
        open_loader(settings(prefix, split=split), which, 0, 1)


def test_a_document_mask_cuts_targets_positions_and_documents(prefix):
    data = open_loader(settings(prefix, seq_len=100, doc_mask=True), "train", 0, 1)
    eod, found = data.tokenizer.eod, 0
    for step in range(5):
        for b in data.microbatches(step):
            ends = b.tokens == eod  # after one the next document begins
            assert torch.equal(b.targets == -100, ends)
            assert torch.equal(b.documents.diff(dim=1), ends[:, :-1].int())
            assert bool((b.positions[:, 1:][ends[:, :-1]] == 0).all())
            found += int(ends.sum())
    assert found > 20
    data.close()


@pytest.mark.parametrize("probe, samples", [(1, 1), (5 * 16 + 3, 5), (1 << 20, None)])
def test_pieces_are_the_stretches_that_see_each_other(prefix, monkeypatch, probe, samples):
    """In the first samples, one at least, an epoch at most; each is cut behind every end of a document."""
    monkeypatch.setattr(loader, "PROBE_TOKENS", probe)
    for masked in (False, True):
        data = open_loader(settings(prefix, doc_mask=masked), "train", 0, 1)
        count, eod = samples or data.samples, data.tokenizer.eod
        read = list(itertools.chain(*(rows(data, step) for step in range(-(-count // 12)))))[:count]
        want = []
        for row in read:
            ends = [i + 1 for i, token in enumerate(row[:16]) if masked and token == eod and i < 15]
            want += [b - a for a, b in itertools.pairwise([0, *ends, 16])]
        assert data.document_lengths == want


def test_the_line_that_describes_the_data(tmp_path):
    """Counts by hand: 1,200 documents of ten letters and an end; text_bytes is what the writer was told."""
    tok = tokenizer.load_tokenizer("bytes")
    with IndexedDatasetWriter(tmp_path / "d", tok.vocab) as w:
        for _ in range(1200):
            w.add([*range(97, 107), tok.eod])
        w.finish(tok, 2_500_000)
    data = open_loader(settings(tmp_path / "d", split="90,10"), "train", 0, 1)
    assert data.describe() == (
        f"{tmp_path / 'd'}: 1,200 documents, 2.5 MB, 13.2K tokens (train 11.9K, valid 1.3K)   "
        "tokenizer bytes, documents end with '<|endoftext|>' (id 256)"
    )


def test_blend_reads_each_set_in_its_share(prefix, other):
    data = open_loader(settings(f"0.7 {prefix} 0.3 {other}"), "train", 0, 1)
    ids = np.array([i for step in range(50) for i in data.sample_ids(step)])
    assert abs((ids % 2 == 0).sum() - 420) <= 1 and len(set(ids.tolist())) == 600
    n = open_loader(settings(other), "train", 0, 1).samples
    mine = (ids[ids % 2 == 1] // 2).tolist()
    assert len(mine) > n and sorted(mine[:n]) == list(range(n))  # a whole epoch of its own, then the next
    assert "70 % " in data.describe() and "30 % " in data.describe()
    assert [name for name, _ in data.passes(50)] == [prefix, other]
    assert data.passes(50)[1][1] == len(mine) / n
    assert [epochs for _, epochs in data.passes(0)] == [0, 0]
    data.close()


@pytest.mark.slow
def test_damage_is_raised_at_the_step_that_needs_it(tmp_path):
    prefix = make(tmp_path / "d", 9000)
    raw = bytearray(pathlib.Path(f"{prefix}.bin").read_bytes())
    raw[300_000] ^= 1  # in block 1
    pathlib.Path(f"{prefix}.bin").write_bytes(raw)
    data, told = open_loader(settings(prefix), "train", 0, 1), 0
    for step in range(8):
        try:
            data.microbatches(step)
        except ChecksumError as e:
            told += "block 1 " in str(e)
    assert told > 0
    data.close()


def test_the_fingerprint_is_of_data_and_split_and_tokenizers_must_agree(prefix, other, tmp_path):
    base = open_loader(settings(prefix), "train", 0, 1)
    assert base.fingerprint == open_loader(settings(prefix, seed=9), "valid", 0, 1).fingerprint
    changed = [settings(other), settings(prefix, split="9,1"), settings(f"0.5 {prefix} 0.5 {other}")]
    assert len({base.fingerprint, *(open_loader(c, "train", 0, 1).fingerprint for c in changed)}) == 4
    assert base.tokenizer.name == "bytes" and base.vocab == 257
    assert open_loader(settings(prefix, tokenizer="bytes"), "train", 0, 1).fingerprint == base.fingerprint

    bpe = tokenizer.train_bpe(["some words to learn " * 9], 280, tmp_path / "x.model")
    with pytest.raises(ConfigError, match=f"bpe-280 .{bpe.fingerprint[:12]}., but .* made with bytes"):
        open_loader(settings(prefix, tokenizer=tmp_path / "x.model"), "train", 0, 1)
    third = make(tmp_path / "c", 50, tok=bpe)
    with pytest.raises(ConfigError, match="prepare them with the same one"):
        open_loader(settings(f"1 {prefix} 1 {third}"), "train", 0, 1)
    bpe.save(f"{prefix}.tokenizer")
    (pathlib.Path(f"{prefix}.tokenizer") / "tokenizer.bytes").rename(tmp_path / "away")
    try:
        with pytest.raises(ConfigError, match="is not bytes .*, with which"):
            open_loader(settings(prefix), "train", 0, 1)
    finally:
        (tmp_path / "away").rename(f"{prefix}.tokenizer/tokenizer.bytes")
        (pathlib.Path(f"{prefix}.tokenizer") / "tokenizer.model").unlink()
    with pytest.raises(ConfigError, match="model.vocab: 200 is smaller than the 257 ids of bytes"):
        open_loader(settings(prefix, vocab=200), "train", 0, 1)
    with pytest.raises(ConfigError, match="nowhere.idx: No such file"):
        open_loader(settings(tmp_path / "nowhere"), "train", 0, 1)


def test_files_without_a_sidecar_or_tokenizer_are_read(prefix, tmp_path):
    for end in (".bin", ".idx"):
        (tmp_path / f"m{end}").write_bytes(pathlib.Path(f"{prefix}{end}").read_bytes())
    data = open_loader(settings(tmp_path / "m"), "train", 0, 1)
    assert data.tokenizer is None and data.vocab is None
    unknown = data.text_bytes(data.microbatches(0)[0])
    assert unknown < 0 and unknown.dtype == torch.int64
    assert rows(data, 0) == rows(open_loader(settings(prefix), "train", 0, 1), 0)
    assert "tokenizer unknown" in data.describe()
    (tmp_path / "m.idx").unlink()  # nanoGPT's form
    raw = open_loader(settings(tmp_path / "m.bin", tokenizer="bytes", doc_mask=True), "train", 0, 1)
    assert raw.tokenizer.name == "bytes" and raw.microbatches(0)[0].documents is not None


def test_half_a_million_tokens_a_second_are_read(prefix):
    """50 times what a step consumes means some 10,000 tokens/s x 50; a hundredth of a core does that."""
    data = open_loader(
        settings(prefix, seq_len=256, global_batch=16, micro_batch=8, prefetch=0), "train", 0, 1
    )
    data.microbatches(0)
    clock = time.process_time()  # of this process: what else runs on the machine does not count
    for step in range(100):
        data.microbatches(step)
    assert 100 * 16 * 256 / (time.process_time() - clock) > 500_000


OPEN = """
import sys
from dataclasses import replace
from config import DataConfig, TrainConfig
from config.reading import defaults
from data.loader import open_loader
data = DataConfig(cache=sys.argv[1], tokenizer=sys.argv[2])
cfg = replace(defaults(), data=data, train=TrainConfig(steps=1))
data = open_loader(cfg, "train", 0, 1)
print(data.fingerprint, data.describe())
"""


@pytest.mark.slow
def test_stdlib_is_made_once_by_two_that_start_together(tmp_path):
    command = [sys.executable, "-c", OPEN, str(tmp_path), "bytes"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    out = sorted(p.communicate(timeout=60)[0].split(maxsplit=1) for p in both)
    assert out[0][0] == out[1][0] and all("python stdlib 3." in o[1] for o in out)
    assert sum("made in" in o[1] for o in out) == 1 and sum("cached" in o[1] for o in out) == 1
    assert sorted(p.name for p in tmp_path.iterdir() if ".tmp" in p.name) == []
    cfg = dataclasses.replace(
        settings("stdlib"), data=config.DataConfig(cache=str(tmp_path), tokenizer="bytes")
    )
    data, valid = open_loader(cfg, "train", 0, 1), open_loader(cfg, "valid", 0, 1)
    assert data.tokenizer.name == "bytes" and data.fingerprint == out[0][0]
    assert 0.02 < valid.tokens / data.tokens < 0.12


def first_line_of_train(tmp_path, *words):
    """(exit code, the line on stderr) of train.py itself, with runs in tmp_path."""
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "llama2-tiny", "--log.dir", "runs", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stderr.count("\n") == 1 and done.stdout == "", done.stdout + done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("names", [("web", "code"), ("a/web", "code/text")])
def test_a_folder_of_data_sets_is_refused_with_one_of_them(tmp_path, names):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        write_documents(tmp_path / "data" / name, [[1, 2]])
    code, said = first_line_of_train(tmp_path, "--data.path", "data")
    first = sorted(names)[0]
    assert code == 2 and f"is a folder of data sets (it has 2); name one: --data.path data/{first}, " in said


def test_a_path_without_tokens_is_refused_with_the_command_that_makes_them(tmp_path):
    """By train.py, before anything is made: text, a name of nothing, a blend without weights; the command
    that it names is one that runs.
    """
    (tmp_path / "my corpus.jsonl").write_text('{"text": "abc"}\n' * 9)
    code, said = first_line_of_train(tmp_path, "--data.path", "my corpus.jsonl")
    assert code == 2 and said.startswith("error: data.path: my corpus.jsonl holds no tokens; make them with ")
    command = said.split("make them with ")[1].split(", then ")[0]
    assert not (tmp_path / "runs").exists()
    argv = shlex.split(command.replace("bpe-32000", "bytes"))
    assert argv[:3] == ["python", "-m", "scripts.prepare_data"]
    done = subprocess.run(
        [sys.executable, *argv[1:]], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0 and said.rstrip().endswith("--data.path 'runs/data/my corpus'")
    assert (tmp_path / "runs" / "data" / "my corpus.idx").exists()


@pytest.mark.parametrize("path, told", [
    ("data/corpus", "data/corpus.idx: No such file; make it from your text with python -m"),
    ("a b", "'a b' does not name a .bin/.idx pair; a blend has a weight before each path: '1 a 1 b'"),
    ("", "empty; name the data"),
    ("0.5 a 0.5 b", "a.idx: No such file"),
])
def test_a_path_that_is_nowhere_is_refused_with_the_way_out(path, told):
    with pytest.raises(ConfigError) as error:
        check_paths(settings(path))
    assert str(error.value).startswith("data.path: ") and told in str(error.value)


def test_the_opening_words_are_those_of_the_split(tmp_path):
    """Whatever the corpus is: words, letters without blanks, a document of line ends, bytes."""
    tok = tokenizer.load_tokenizer("bytes")
    for name, opening, told in (
        ("words", "\n\n  Once upon a time, there was\n", "Once upon a"),
        ("wide", "日本" * 9, "日本" * 9),
        ("long", "x" * 90, "x" * 32),
        ("blank", "\n \n", ""),
    ):
        texts = [f"document {number} of the corpus, " * 4 for number in range(40)]
        texts[20] = opening
        cfg = settings(write_documents(tmp_path / name, map(tok.encode, texts)), split="50,50")
        assert open_loader(cfg, "valid", 0, 1).opening_words() == told
        assert open_loader(cfg, "train", 0, 1).opening_words() == "document 0 of"
