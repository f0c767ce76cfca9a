"""data/best_fit.py: no token lost or doubled, fewer cuts than concatenation, and the batches of a run."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from prepared_data import check_layouts, loader_config, metrics
from ranks import MODEL, job
from test_resume import check_killed, run

import config
from checkpoint.disk import store
from data import tokenizer
from data.best_fit import PackedSampler, best_fit_decreasing, document_ranges, pack_ranges
from data.indexed import IndexedDataset, IndexedDatasetWriter
from data.loader import open_loader


def slow_best_fit(sizes, capacity):
    """The definition, without a tree."""
    room, bins = [], [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = [number for number, left in enumerate(room) if left >= sizes[item]]
        if not fits:
            fits = [len(room)]
            room.append(capacity)
        best = min(fits, key=lambda number: room[number])
        room[best] -= sizes[item]
        bins[item] = best
    return bins, room


@pytest.mark.parametrize("capacity", [2, 3, 17, 64, 100])
def test_best_fit_leaves_the_rooms_of_its_definition(capacity):
    """Either of two bins that are equally full may be taken, so the rooms that are left are compared."""
    rng = np.random.default_rng(capacity)
    for count in (0, 1, 2, 30, 200):
        sizes = rng.integers(1, capacity + 1, count)
        bins = best_fit_decreasing(sizes, capacity)
        filled = np.bincount(bins, weights=sizes, minlength=1) if count else np.zeros(0)
        _, room = slow_best_fit(sizes.tolist(), capacity)
        assert sorted(capacity - filled) == sorted(room)


def write(prefix, lengths):
    tok, rng = tokenizer.load_tokenizer("bytes"), np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, tok.vocab) as writer:
        for length in lengths:
            writer.add([*rng.integers(97, 123, length - 1), tok.eod] if length else [])
        writer.finish(tok, 1)
    return IndexedDataset(prefix)


LENGTHS = np.random.default_rng(3).choice([0, 1, 2, 5, 16, 17, 18, 33, 34, 70, 9, 12], 200)


def test_every_token_is_predicted_once_and_documents_stay_whole(tmp_path):
    index = write(tmp_path / "a", LENGTHS)
    packed = pack_ranges(document_ranges(index, 0, index.tokens), 16)
    starts = {index.document_start(number) for number in range(index.documents)}
    predicted, cuts = [], 0
    for sequence in range(packed.count):
        pieces = packed.pieces(sequence)
        assert 0 < sum(stop - first for first, stop in pieces) <= 17
        for first, stop in pieces:
            assert index.document_at(first) == index.document_at(stop - 1)
            predicted += range(first + 1, stop)
            cuts += first not in starts
    assert sorted(predicted) == [token for token in range(index.tokens) if token not in starts]
    assert cuts == sum(-(-(length - 1) // 16) - 1 for length in LENGTHS if length > 1)
    concatenated = sum(token not in starts for token in range(16, index.tokens, 16))
    assert cuts < concatenated
    assert 0.9 < packed.utilization <= 1

    sampler, count = PackedSampler(packed, packed, epoch=0, seed=1), packed.count
    ids, first_tokens = sampler.locate(np.arange(2 * count))
    assert sorted(ids[:count]) == list(range(count))
    assert sorted(ids[count:]) == list(range(count, 2 * count))
    assert (ids[:count] != ids[count:] - count).any()  # each epoch has an order of its own
    assert first_tokens.tolist() == [sampler.pieces(number)[0][0] for number in ids.tolist()]
    assert sampler.locate(np.array([5]))[0] == ids[5]
    # an epoch has the same order for a phase that begins with it
    second = PackedSampler(packed, packed, epoch=1, seed=1)
    assert second.locate(np.arange(count))[0].tolist() == (ids[count:] - count).tolist()
    assert [place[0] for place in (sampler.unread(count + 3), second.unread(3))] == [1, 1]
    assert sampler.unread(count + 3)[1].tolist() == second.unread(3)[1].tolist()


def settings(path, seq_len=16, **more):
    return loader_config(path, seq_len, micro_batch=2, **{"pack": "best_fit", "split": "80,20", **more})


@pytest.mark.parametrize("doc_mask", [False, True])
def test_an_epoch_predicts_every_token_once_on_any_ranks_at_any_step(tmp_path, doc_mask):
    """But the first of a document."""
    index = write(tmp_path / "a", LENGTHS)
    whole = open_loader(settings(tmp_path / "a", doc_mask=doc_mask), "train", 0, 1)
    steps = whole.samples // 4
    _, last = whole.datasets[0].split_points[:2]
    starts = {index.document_start(number) for number in range(index.documents)}
    counted, rows = 0, {}
    for step in range(steps):
        batches = whole.microbatches(step)
        rows[step] = torch.cat([torch.cat([b.tokens, b.targets], 1) for b in batches])
        counted += sum(int(b.num_counted()) for b in batches)
        for batch in batches:
            assert (batch.documents is not None) == doc_mask
            for tokens, targets, positions in zip(batch.tokens, batch.targets, batch.positions):
                is_counted = targets != -100
                assert targets[:-1][is_counted[:-1]].equal(tokens[1:][is_counted[:-1]])
                if doc_mask:  # what is predicted lies in the document of what predicts it
                    assert (positions[1:][is_counted[:-1]] > 0).all()
    left = whole._locate_samples(steps * 4, whole.samples - steps * 4)
    for location in left:
        counted += sum(stop - first - 1 for first, stop in whole._windows[0].pieces(location.sample_id))
    assert counted == sum(token not in starts for token in range(last))

    for step in (3, 0, 2):
        found = []
        for rank in (0, 1):
            loader = open_loader(settings(tmp_path / "a", doc_mask=doc_mask), "train", rank, 2)
            found += [torch.cat([b.tokens, b.targets], 1) for b in loader.microbatches(step)]
        assert torch.cat(found).equal(rows[step])
    assert "% full" in whole.describe()
    stream = settings(tmp_path / "a", pack="stream", doc_mask=doc_mask)
    assert whole.fingerprint != open_loader(stream, "train", 0, 1).fingerprint
    assert min(whole.document_lengths) > 0 and set(map(int, whole.document_lengths)) <= set(range(1, 17))


def test_files_without_documents_are_refused(tmp_path):
    np.arange(2000, dtype="<u2").tofile(tmp_path / "m.bin")
    with pytest.raises(config.ConfigError, match="data.pack: best_fit places whole documents"):
        open_loader(settings(tmp_path / "m.bin"), "train", 0, 1)


@pytest.mark.slow
def test_every_layout_trains_the_same(tmp_path):
    """With documents apart, and a phase with longer sequences of two sources."""
    write(tmp_path / "a", LENGTHS)
    write(tmp_path / "b", LENGTHS[::-1])
    blend = f"0.4 {tmp_path / 'b'} 0.6 {tmp_path / 'a'}"
    rows = [{"after_steps": 2, "train.seq_len": 24, "data.path": blend}]
    words = ["llama3-tiny", *MODEL, "--data.path", str(tmp_path / "a"), "--data.pack", "best_fit",
             "--data.doc_mask", "true", "--data.split", "70,30", "--train.steps", "4",
             "--train.phases", json.dumps(rows)]
    assert len(check_layouts(tmp_path, words)) == 4


# ---- phases ------------------------------------------------------------------------------------------------


def predicted_in(cfg, step: int, phase: int, world: int = 1) -> list[tuple[str, int]]:
    """(path, token) of every target that counts in a step, read from where the samples are said to lie."""
    found = []
    loader = open_loader(cfg, "train", 0, 1, phase=phase)
    rows = torch.cat([batch.targets for batch in loader.microbatches(step)])
    located = loader._locate_samples(loader._first_sequence(step), len(rows))
    for place, targets in zip(located, rows):
        tokens = []
        for first, stop in loader._windows[place.dataset].pieces(place.sample_id):
            tokens += range(first + 1, stop)
        index = loader.datasets[place.dataset].index
        assert targets[targets != -100].tolist() == [int(index.read(token, token + 1)[0]) for token in tokens]
        found += [(loader.datasets[place.dataset].name, token) for token in tokens]
    loader.close()
    return found


def phased(cfg, *rows, **train):
    return replace(cfg, train=replace(cfg.train, phases=json.dumps(rows), **train))


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("lengths", [(16, 64, 32), (48, 16, 20), (16, 16, 40)])
def test_a_phase_of_another_length_packs_what_the_epoch_has_left(tmp_path, lengths):
    """Through two changes of length every token but the first of a document is predicted once in an epoch;
    then the next epoch begins. Lengths need not divide each other.
    """
    write(tmp_path / "a", np.r_[LENGTHS, LENGTHS])
    first, second, third = lengths
    steps, total = (20, 25), 400
    cfg = phased(
        settings(tmp_path / "a", first),
        {"after_steps": steps[0], "train.seq_len": second},
        {"after_steps": steps[1], "train.seq_len": third, "train.global_batch": 2},
        steps=total,
    )
    index = IndexedDataset(tmp_path / "a")
    last = open_loader(cfg, "train", 0, 1).datasets[0].split_points[1]
    starts = {index.document_start(number) for number in range(index.documents)}
    want = [token for token in range(last) if token not in starts]
    counts = np.zeros(last, int)
    for step in range(total):
        tokens = [token for _, token in predicted_in(cfg, step, 1 + (step >= steps[0]) + (step >= steps[1]))]
        np.add.at(counts, tokens, 1)
        if step == steps[1] + 5:
            assert counts.max() == 1  # this is less than an epoch
        if counts.min(initial=9, where=np.isin(np.arange(last), want)) > 0:
            break
    read = counts[want]
    # the last batch alone reaches into the next epoch
    assert read.min() == 1 and (read > 1).sum() < 4 * max(lengths)
    assert step > steps[1] + 10


def test_a_source_resumes_where_it_was_under_the_same_length(tmp_path):
    write(tmp_path / "a", LENGTHS)
    write(tmp_path / "b", LENGTHS[::-1])
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    plain = replace(settings(a), train=replace(settings(a).train, steps=20))
    want = [place for step in range(10) for place in predicted_in(plain, step, 1)]
    cfg = phased(
        settings(a),
        {"after_steps": 3, "optim.lr": 1e-4, "train.global_batch": 2},
        {"after_steps": 5, "data.path": b},
        {"after_steps": 7, "data.path": f"0.5 {b} 0.5 {a}", "train.global_batch": 4},
        steps=12,
    )
    found = []
    for step in range(12):
        found += predicted_in(cfg, step, 1 + sum(step >= start for start in (3, 5, 7)))
    of_a = [place for place in found if place[0] == a]
    assert of_a == want[:len(of_a)] and len(of_a) > len(want) // 2
    of_b = [token for path, token in found if path == b]
    assert len(set(of_b)) == len(of_b)  # less than an epoch


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """In `clean` a run of two phases with packed documents: the second has longer sequences and a blend."""
    home = tmp_path_factory.mktemp("packed")
    write(home / "a", LENGTHS)
    write(home / "b", LENGTHS[::-1])
    rows = json.dumps([{"after_steps": 4, "train.seq_len": 40, "train.micro_batch": 1,
                        "data.path": f"0.4 {home / 'b'} 0.6 {home / 'a'}"}])
    extra = ("--data.path", str(home / "a"), "--data.pack", "best_fit", "--data.doc_mask", "true",
             "--data.split", "70,30", "--checkpoint.keep_at", "3", "--train.phases", rows)
    assert run(home, "clean", extra=extra) == 0, (home / "clean.log").read_text()
    return home, extra


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_run_killed_around_a_boundary_resumes_bit_for_bit(home, step):
    check_killed(*home, step)


@pytest.mark.slow
def test_a_branch_with_longer_sequences_packs_what_is_unread(home):
    """Without data.span, which packing does not know; a branch that was killed resumes bit for bit."""
    folder, _ = home
    branch = ["--checkpoint.branch", f"{folder / 'clean'}@3", "--train.seq_len", "33", "--train.steps", "6",
              "--checkpoint.every", "1", "--checkpoint.keep", "1", "--log.dir", str(folder)]
    for name, fault in (("whole", ""), ("cut", "step.end:step=5:act=SIGKILL"), ("cut", "")):
        end = job(folder / f"log-{name}", 1, [*branch, "--log.name", name], fault=fault)
        assert end.codes == [-9 if fault else 0], end.logs
    metas = [store.read_meta(folder / name / "checkpoints" / "step_00000006") for name in ("whole", "cut")]
    assert metas[0]["config"]["data"]["span"] is None
    assert metas[0]["data"] == metas[1]["data"]
    assert metrics(folder / "whole", "loss") == metrics(folder / "cut", "loss")


# ---- conversations -----------------------------------------------------------------------------------------


def test_a_mask_is_followed_in_packed_sequences(tmp_path):
    """A target of a data set with a mask counts if its bit is set and it is not the first of a piece. In a
    piece that begins inside a document, the first run of set bits does not count."""
    tok, rng = tokenizer.load_tokenizer("bytes"), np.random.default_rng(0)
    bits = []
    with IndexedDatasetWriter(tmp_path / "m", tok.vocab, has_mask=True) as writer:
        for length in LENGTHS[LENGTHS > 0]:
            bits.append(rng.integers(0, 2, length).astype(bool))
            writer.add([*rng.integers(97, 123, length - 1), tok.eod], bits[-1])
        writer.finish(tok, 1)
    bits = np.concatenate(bits)
    loader = open_loader(settings(tmp_path / "m"), "train", 0, 1)
    index, packed = loader.datasets[0].index, loader._windows[0]
    begins = {index.document_start(number) for number in range(index.documents)}
    for step in range(4):
        rows = [(tokens, targets) for batch in loader.microbatches(step)
                for tokens, targets in zip(batch.tokens, batch.targets)]
        for place, (tokens, targets) in zip(loader._locate_samples(4 * step, 4), rows):
            want, slots = [], []
            for first, stop in packed.pieces(place.sample_id):
                ids = index.read(first, stop)
                own = bits[first:stop].tolist()
                if first not in begins:
                    place = own.index(True) if True in own else len(own)
                    while place < len(own) and own[place]:
                        own[place] = False
                        place += 1
                want += [-100] + [int(i) if own[n] else -100 for n, i in enumerate(ids[1:], 1)]
                slots += ids.tolist()
            assert tokens.tolist() == (slots + [tok.eod] * 17)[:16]
            assert targets.tolist() == (want + [-100] * 17)[1:17]


# ---- validation --------------------------------------------------------------------------------------------


def test_validation_packs_its_own_documents_the_same_way_every_time(tmp_path):
    index = write(tmp_path / "a", LENGTHS)
    first = open_loader(settings(tmp_path / "a"), "valid", 0, 1)
    other = open_loader(settings(tmp_path / "a", seed=7), "valid", 0, 1)
    begin = first.datasets[0].split_points[1]
    for step in (0, 1):
        rows = [[batch.targets for batch in loader.microbatches(step)] for loader in (first, other)]
        assert all(map(torch.equal, *rows))
    for sample_id in range(first.samples):
        for start, stop in first._windows[0].pieces(sample_id):
            assert begin <= start < stop <= index.tokens
