"""data/fim.py: the orders by hand, rates, documents put together again, and runs of train.py with it."""

import bisect
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from prepared_data import byte_level_bpe, check_layouts, loader_config
from ranks import MODEL
from test_resume import check_killed, run

import config
from data import tokenizer
from data.documents import stdlib_files
from data.fim import SENTINELS, open_fim, round_trips_parts
from data.indexed import IndexedDataset, IndexedDatasetWriter
from data.loader import open_loader
from data.prepare import prepare_corpus

NAMES = SENTINELS[0]
MASK = 2**64 - 1


# ---- the definition, without numpy and without the code ----------------------------------------------------


def mix(x: int) -> int:
    """The finalizer of splitmix64, as published."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def seed_of(*parts: int) -> int:
    state = 0
    for part in parts:
        state = mix(state ^ part)
    return state


def by_hand(tok, ids: list[int], room: int, seed: int, rate: float, spm_rate: float, split: str) -> list[int]:
    """One part of a document, from arXiv 2207.14255 and the text of docs/data.md."""
    pre, mid, suf = (tok.processor.piece_to_id(name) for name in NAMES)
    is_cut, is_spm, *cuts = ((mix(seed ^ draw) >> 11) / 2**53 for draw in range(4))
    content, end = (ids[:-1], ids[-1:]) if ids[-1] == tok.eod else (ids, [])
    if is_cut >= rate or not content:
        return ids[:room]
    while content:
        whole = tok.decode(content) if split == "character" else content
        encode = tok.encode if split == "character" else list
        if split == "character" and "\ufffd" in whole:
            whole, encode = content, list
        a, b = sorted(math.floor(cut * (len(whole) + 1)) for cut in cuts)
        prefix, middle, suffix = encode(whole[:a]), encode(whole[a:b]), encode(whole[b:])
        if is_spm < spm_rate:
            found = [pre, suf, *suffix, mid, *prefix, *middle, *end]
        else:
            found = [pre, *prefix, suf, *suffix, mid, *middle, *end]
        excess = len(found) - room
        if excess <= 0:
            return found
        from_content = excess - len(end)
        end = []
        content = content[:len(content) - from_content] if from_content else content
    return ids[:room]


def put_together(tok, ids: list[int]) -> str:
    """The text of a part, whichever order it is in."""
    pre, mid, suf = (tok.processor.piece_to_id(name) for name in NAMES)
    ids = [token for token in ids if token != tok.eod]
    if pre not in ids:
        return tok.decode(ids)
    assert ids[0] == pre and ids.count(pre) == ids.count(mid) == ids.count(suf) == 1
    middle = ids[ids.index(mid) + 1:]
    if ids[1] == suf:  # what follows the sentinel of the middle in SPM is prefix and middle
        return tok.decode(middle) + tok.decode(ids[2:ids.index(mid)])
    prefix, suffix = ids[1:ids.index(suf)], ids[ids.index(suf) + 1:ids.index(mid)]
    return tok.decode(prefix) + tok.decode(middle) + tok.decode(suffix)


# ---- data --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder with `code`, 60 files of Python's library as prepare_data makes it, and the tokenizer."""
    home = tmp_path_factory.mktemp("fim")
    (home / "in").mkdir()
    for number, path in enumerate(sorted(stdlib_files())[:60]):
        text = open(path, encoding="utf-8", errors="ignore").read()[:2000]
        (home / "in" / f"{number}.py").write_text(f"# größer 漢字 🙂\n{text}", encoding="utf-8")
    prepare_corpus([str(home / "in")], "bpe-600", home / "code", has_fim=True)
    return home, tokenizer.load_tokenizer(home / "code.tokenizer")


def settings(path, seq_len: int = 64, **data):
    data = {"fim_rate": 0.7, "fim_spm_rate": 0.4, "split": "80,20", **data}
    return loader_config(path, seq_len, micro_batch=4, global_batch=8, **data)


def make_rows(loader, step: int) -> list[list[int]]:
    """The slots of each sample of a step, from its microbatches."""
    found = []
    for batch in loader.microbatches(step):
        assert batch.tokens[:, 1:].equal(batch.targets[:, :-1].where(
            batch.targets[:, :-1] != -100, batch.tokens[:, 1:]))
        found += torch.cat([batch.tokens, batch.targets[:, -1:]], 1).tolist()
    return found


def parts_by_hand(loader, location, slots: int) -> list[list[int]]:
    """The part of each document in a sample, without fill-in-the-middle."""
    index = loader.datasets[location.dataset].index
    sampler = loader._windows[location.dataset]
    if hasattr(sampler, "pieces"):
        return [index.read(*piece).tolist() for piece in sampler.pieces(location.sample_id)]
    bounds = [index.document_start(number) for number in range(index.documents + 1)]
    first, stop = location.first_token, location.first_token + slots
    inside = bounds[bisect.bisect_right(bounds, first):bisect.bisect_left(bounds, stop)]
    edges = [first, *inside, stop]
    return [index.read(*pair).tolist() for pair in zip(edges, edges[1:])]


# ---- one part ----------------------------------------------------------------------------------------------


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("split", ["character", "token"])
@pytest.mark.parametrize("pack", ["stream", "best_fit"])
@pytest.mark.parametrize("doc_mask", [False, True])
def test_every_slot_is_that_of_the_definition(code, split, pack, doc_mask):
    """At lengths of less and of more than a document."""
    home, tok = code
    for seq_len in (64, 900):
        cfg = settings(home / "code", seq_len, fim_split=split, pack=pack, doc_mask=doc_mask)
        loader = open_loader(cfg, "train", 0, 1)
        dataset_seed = seed_of(seed_of(cfg.train.seed), 0)
        for step in range(3):
            found = make_rows(loader, step)
            counted = torch.cat([batch.targets != -100 for batch in loader.microbatches(step)])
            places = loader._locate_samples(8 * step, 8)
            for place, row, row_counted in zip(places, found, counted.tolist()):
                want, not_counted = [], []
                sample_seed = seed_of(dataset_seed, place.sample_id)
                for number, part in enumerate(parts_by_hand(loader, place, seq_len + 1)):
                    if len(want) == seq_len + 1:
                        break
                    not_counted.append(len(want))
                    seed = seed_of(sample_seed, number, 3)
                    want += by_hand(tok, part, seq_len + 1 - len(want), seed, 0.7, 0.4, split)
                padding = range(len(want), seq_len + 1)
                want += [tok.eod] * len(padding)
                starts = set(not_counted) if pack == "best_fit" or doc_mask else set()
                slots = [slot not in starts and slot not in padding for slot in range(1, seq_len + 1)]
                if pack == "stream":  # the last slot of a window is padding only if text got shorter
                    assert len(padding) <= 4
                assert row_counted == slots
                seen = [token for token, is_counted in zip(row[1:], [*slots]) if is_counted]
                assert seen == [token for token, is_counted in zip(want[1:], slots) if is_counted]
                assert row[:-1] == want[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["character", "token"])
def test_parts_are_cut_at_the_given_rates_and_uniform_places(code, split):
    home, tok = code
    fim = open_fim(settings("", fim_split=split).data, tok, None)
    ids = IndexedDataset(home / "code").document(3)[:200]
    text = tok.decode(ids.tolist())
    draws, cut, spm, places = 4000, 0, 0, []
    for seed in range(draws):
        found = fim.rearrange(ids, 10_000, seed_of(seed)).tolist()
        assert put_together(tok, found) == text
        if fim.prefix in found:
            cut += 1
            spm += found[1] == fim.suffix
            if found[1] != fim.suffix:
                prefix = tok.decode(found[1:found.index(fim.suffix)])
                middle = tok.decode(found[found.index(fim.middle) + 1:])
                places += [len(prefix) / len(text), (len(prefix) + len(middle)) / len(text)]
    assert abs(cut / draws - 0.7) < 4 * (0.7 * 0.3 / draws) ** 0.5
    assert abs(spm / cut - 0.4) < 4 * (0.4 * 0.6 / cut) ** 0.5
    low, high = np.array(places[::2]), np.array(places[1::2])
    # the smaller and the larger of two uniform numbers: means 1/3 and 2/3, variance 1/18
    tolerance = 4 * (1 / 18 / len(low)) ** 0.5 + (0.02 if split == "token" else 0)
    assert abs(low.mean() - 1 / 3) < tolerance and abs(high.mean() - 2 / 3) < tolerance


def test_a_start_token_that_no_file_names_stays_in_front(code):
    """As of a tokenizer.json whose post-processor puts it: the text behind it is cut, by character."""
    home, tok = code
    start = tok.encode("a")[0]
    fim = open_fim(settings("", fim_split="character", fim_rate=1.0).data, tok, None, start)
    ids = np.append(start, IndexedDataset(home / "code").document(5)[:60].astype(np.int64))
    for seed in range(20):
        found = fim.rearrange(ids, 300, seed_of(seed, 300)).tolist()
        assert found[0] == start and found[1] == fim.prefix


@pytest.mark.parametrize("split", ["character", "token"])
def test_a_middle_is_whole_in_any_room(code, split):
    """Text that does not fit is left out before the cuts: a part put together begins the text."""
    home, tok = code
    fim = open_fim(settings("", fim_split=split, fim_rate=1.0).data, tok, None)
    ids = IndexedDataset(home / "code").document(5)[:120].astype(np.int64)
    ids = np.append(ids, tok.eod)
    text = tok.decode(ids.tolist())
    for room in [*range(1, 40), 100, *range(118, 126), 300]:
        for seed in range(6):
            found = fim.rearrange(ids, room, seed_of(seed, room)).tolist()
            assert len(found) <= room
            if fim.prefix not in found:
                assert found == ids[:room].tolist() and room < 12
                continue
            back = put_together(tok, found)
            assert text.startswith(back) or "\ufffd" in back
            assert (found[-1] == tok.eod) <= (back == text)
            if split == "token":
                assert len(found) == min(room, len(ids) + 3)


def test_a_document_is_never_mixed_with_another(code):
    """In every sample each part, put together, is text of one document."""
    home, tok = code
    index = IndexedDataset(home / "code")
    texts = [tok.decode(index.document(number).tolist()) for number in range(index.documents)]
    loader = open_loader(settings(home / "code", 900, pack="best_fit", doc_mask=True), "train", 0, 1)
    checked = 0
    for step in range(2):
        for batch in loader.microbatches(step):
            for tokens, positions in zip(batch.tokens, batch.positions):
                starts = [*np.flatnonzero(positions == 0), len(tokens)]
                for start, stop in zip(starts[:-2], starts[1:-1]):
                    text = put_together(tok, tokens[start:stop].tolist())
                    assert any(text in whole for whole in texts)
                    checked += 1
    assert checked > 10


# ---- the same for any ranks, any step, any prefetch --------------------------------------------------------


@pytest.mark.slow
def test_ranks_and_resumes_read_the_same_and_epochs_are_cut_elsewhere(code):
    home, _ = code
    cfg = settings(home / "code", pack="best_fit")
    whole = open_loader(cfg, "train", 0, 1)
    steps = whole.samples // 8 + 5  # into the second epoch
    want = {step: make_rows(whole, step) for step in range(steps)}
    ahead = replace(cfg, data=replace(cfg.data, prefetch=0))
    for step in (steps - 1, 0, 7):
        assert make_rows(open_loader(ahead, "train", 0, 1), step) == want[step]
        shares = [make_rows(open_loader(cfg, "train", rank, 2), step) for rank in (0, 1)]
        assert shares[0] + shares[1] == want[step]
    # the same documents are cut elsewhere in another epoch
    first = {tuple(row) for step in range(whole.samples // 8) for row in want[step]}
    again = [tuple(row) for step in range(steps - 4, steps) for row in want[step]]
    assert sum(row in first for row in again) < len(again) // 2


def test_validation_is_cut_only_with_fim_valid(code):
    home, tok = code
    plain = open_loader(settings(home / "code", fim_rate=0.0), "valid", 0, 1)
    left = open_loader(settings(home / "code"), "valid", 0, 1)
    asked = open_loader(settings(home / "code", fim_valid=True), "valid", 0, 1)
    assert make_rows(plain, 0) == make_rows(left, 0) != make_rows(asked, 0)
    train = open_loader(settings(home / "code"), "train", 0, 1)
    plain_train = open_loader(settings(home / "code", fim_rate=0.0), "train", 0, 1)
    assert train.fingerprint != plain_train.fingerprint
    assert "fill-in-the-middle 70 % (between characters, 40 % SPM)" in train.describe()
    # bits per byte: sentinels have none
    fim = asked._fim
    batch = asked.microbatches(0)[0]
    targets = batch.targets[(batch.targets != -100)].tolist()
    is_text = [token not in (fim.prefix, fim.middle, fim.suffix) for token in targets]
    assert not all(is_text)
    sizes = [len(tok.decode([token]).encode()) for token in targets]
    ascii_only = [size for token, size, text in zip(targets, sizes, is_text) if text]
    broken = sum("\ufffd" in tok.decode([token]) for token in targets)  # 3 bytes here, 1 in the text
    assert abs(int(asked.text_bytes(batch)) - sum(ascii_only)) <= 2 * broken


def test_conversations_are_not_cut(code, tmp_path):
    home, tok = code
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "chat", tok.vocab, has_mask=True) as writer:
        for _ in range(60):
            writer.add([*rng.integers(100, 500, 40), tok.eod], rng.integers(0, 2, 41).astype(bool))
        writer.finish(tok, 1)
    with pytest.raises(config.ConfigError, match="data.fim_rate: .* holds conversations"):
        open_loader(settings(tmp_path / "chat"), "train", 0, 1)
    blend = f"0.5 {home / 'code'} 0.5 {tmp_path / 'chat'}"
    cut = open_loader(settings(blend, fim_rate=1.0), "train", 0, 1)
    plain = open_loader(settings(blend, fim_rate=0.0), "train", 0, 1)
    for place, row, same in zip(cut._locate_samples(0, 8), make_rows(cut, 0), make_rows(plain, 0)):
        assert (row == same) == (place.dataset == 1)


# ---- tokenizers --------------------------------------------------------------------------------------------


def json_tokenizer(folder, prefix_space: bool, specials=("<|stop|>", *SENTINELS[1])):
    texts = [open(path, encoding="utf-8").read() for path in stdlib_files()[:3]]
    tok = byte_level_bpe(texts, 400, specials, prefix_space)
    folder.mkdir()
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|stop|>"}))
    return tokenizer.load_tokenizer(folder)


def test_sentinels_of_a_tokenizer_json_and_tokens_that_have_no_text(tmp_path):
    """Found by name; a special token in a document is not lost: it is cut between tokens."""
    tok = json_tokenizer(tmp_path / "a", prefix_space=False, specials=("<|stop|>", *SENTINELS[1], "<|repo|>"))
    data = settings("", fim_rate=1.0).data
    fim = open_fim(data, tok, None)
    assert [fim.prefix, fim.middle, fim.suffix] == [tok.processor.token_to_id(name) for name in SENTINELS[1]]
    named = open_fim(replace(data, fim_tokens="<|repo|>,<|fim_middle|>,<|fim_suffix|>"), tok, None)
    repo = tok.processor.token_to_id("<|repo|>")
    assert named.prefix == repo
    ids = np.array([repo, *tok.encode("name\ndef f(x):\n    return x\n"), tok.eod])
    for seed in range(50):
        found = fim.rearrange(ids, 1000, seed_of(seed)).tolist()
        assert sorted(found) == sorted([*ids.tolist(), fim.prefix, fim.middle, fim.suffix])
        assert found[-1] == tok.eod


@pytest.mark.parametrize("keys, vocab, line", [
    ({"fim_tokens": "a,b"}, None, "data.fim_tokens: 'a,b' are not three tokens"),
    ({"fim_tokens": "<fim_prefix>,nope,<fim_suffix>"}, None,
     "data.fim_tokens: .* bpe-600 has no token 'nope'"),
    ({}, 4, "model.vocab: 4 leaves out the sentinels"),
])
def test_sentinels_that_are_not_there_are_refused(code, keys, vocab, line):
    _, tok = code
    with pytest.raises(config.ConfigError, match=line):
        open_fim(replace(settings("").data, **keys), tok, vocab)


def test_a_tokenizer_that_cannot_be_cut_is_refused(code, tmp_path):
    home, _ = code
    data = settings("").data
    with pytest.raises(config.ConfigError, match="data.fim_rate: .* bytes has no sentinels .* --fim"):
        open_fim(data, tokenizer.load_tokenizer("bytes"), None)
    with pytest.raises(config.ConfigError, match="--fim: gives sentinels to a tokenizer"):
        prepare_corpus([str(home / "in")], "bytes", tmp_path / "x", has_fim=True)
    spaced = json_tokenizer(tmp_path / "spaced", prefix_space=True)
    assert not round_trips_parts(spaced)
    with pytest.raises(config.ConfigError, match="data.fim_split: .* use token"):
        open_fim(data, spaced, None)
    assert open_fim(replace(data, fim_split="token"), spaced, None)


# ---- runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(code, tmp_path_factory):
    """In `clean` a run of two phases: the second cuts more, and has longer sequences of packed documents."""
    folder, _ = code
    home = tmp_path_factory.mktemp("runs")
    second = {"after_steps": 4, "data.fim_rate": 0.9, "train.seq_len": 48, "data.fim_split": "token"}
    rows = json.dumps([second])
    extra = ("--data.path", str(folder / "code"), "--data.pack", "best_fit", "--data.fim_rate", "0.5",
             "--data.split", "70,30", "--train.phases", rows)
    assert run(home, "clean", extra=extra) == 0, (home / "clean.log").read_text()
    return home, extra


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_run_killed_around_a_boundary_resumes_bit_for_bit(home, step):
    check_killed(*home, step)


def test_another_rate_cannot_continue_a_run(home):
    folder, extra = home
    assert run(folder, "clean", extra=(*extra, "--data.fim_rate", "0.6", "--train.steps", "12")) == 2
    assert "data.fim_rate: " in (folder / "clean.log").read_text()


@pytest.mark.slow
def test_every_layout_trains_the_same(code, tmp_path):
    """And otherwise than without cuts."""
    folder, _ = code
    words = ["llama3-tiny", *MODEL, "--data.path", str(folder / "code"), "--train.steps", "3",
             "--data.doc_mask", "true"]
    cut = check_layouts(tmp_path, [*words, "--data.fim_rate", "0.5"])
    plain = check_layouts(tmp_path / "plain", words, layouts=())
    assert len(cut) == len(plain) == 3 and abs(plain[0] - cut[0]) > 1e-6
