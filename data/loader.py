"""The data of a run: data.path -> batches, a pure function of (seed, step).

Global sample g = sequences(train, step) + i, the first sequence of a step being a function of the step under train.ramp as
well (keys.py), is sample j of data set d (blend), which is a window of tokens of d's split
(sampler), read from a mapped file (indexed) and packed (pack). A rank reads its share of the step's samples. Nothing is
kept between steps, so a resume at any step, on any number of ranks, reads the very samples that an unbroken run reads.
A thread reads data.prefetch steps ahead; what goes wrong there is raised in the caller, at the step that needed it.
"""
import hashlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch

from config import Config, ConfigError, batch_size, sequences
from data import blend, prepare, tokenizer
from data.batch import Batch
from data.indexed import Indexed
from data.lengths import lengths
from data.pack import IGNORE, pack
from data.raw import Raw
from data.sampler import Windows, key

SPLITS = ("train", "valid", "test")
PROBE = 1 << 20  # tokens whose documents are looked at to tell how far attention reaches


@dataclass(frozen=True)
class Source:
    """One data set of the blend."""
    name: str  # as in data.path
    index: Indexed
    tokenizer: tokenizer.Tokenizer | None
    cuts: tuple[int, ...]  # first token of train, valid, test, and the end
    note: str


class Data:
    """What rank `rank` of `world` data-parallel ranks reads of one split; `open_data` makes it.

    tokens, samples: of the split, samples an epoch.  tokenizer: none for files that do not name theirs.
    vocab: ids lie below it; none: unknown.  fingerprint: equal ones give equal samples where train.* is equal."""

    def __init__(self, cfg: Config, split: str, rank: int, world: int, mix: blend.Blend, sources: list[Source]):
        self.split, self.rank, self.world, self.sources = split, rank, world, sources
        self._cfg, self._mix = cfg, mix
        self._train = cfg.train if split == "train" else replace(cfg.train, ramp=None)  # validation is the same whatever the ramp
        seed = key(cfg.train.seed) if split == "train" else 0  # validation is the same text whatever the seed
        k = SPLITS.index(split)
        self._windows = [Windows(*s.cuts[k:k + 2], cfg.train.seq_len, key(seed, d)) for d, s in enumerate(sources)]
        for source, w in zip(sources, self._windows):
            if w.count < 1:
                raise ConfigError(f"data.split: {cfg.data.split} leaves {split} {w.last - w.first} tokens of "
                                  f"{source.name} ({source.index.documents} documents), a sample is {w.seq_len + 1}; "
                                  "raise its share, shorten train.seq_len, or give more documents")
        self.tokens = sum(w.last - w.first for w in self._windows)
        self.samples = sum(w.count for w in self._windows)
        self.tokenizer = next((s.tokenizer for s in sources if s.tokenizer), None)
        self._thread = ThreadPoolExecutor(1, "loader") if cfg.data.prefetch > 0 and split == "train" else None
        self._ahead = {}  # step -> Future of its micro-batches

    def microbatches(self, step: int) -> list[Batch]:  # batch_size / (micro_batch * world) x [micro_batch, seq_len]
        """This rank's share of the step; of valid and test, of the step-th fixed global batch.
        Raises ChecksumError or ConfigError when tokens of the step are damaged or not below the vocabulary."""
        if self._thread is None:
            return self._read(step)
        want = range(step, step + 1 + self._cfg.data.prefetch)
        for old in [s for s in self._ahead if s not in want]:
            self._ahead.pop(old).cancel()
        for s in want:
            if s not in self._ahead:
                self._ahead[s] = self._thread.submit(self._read, s)
        return self._ahead.pop(step).result()

    def ids(self, step: int) -> list[int]:
        """A whole number for each sample of the step, over all ranks, in order; no two samples of a run share one."""
        sets = len(self.sources)
        return [int(i) * sets + d for d, i, _ in self._samples(sequences(self._train, step), batch_size(self._train, step))]

    def _samples(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """(data set, id in it, first token) of global samples first .. first + count."""
        sets, numbers = self._mix.pick(first, count)
        found = np.empty((2, count), np.int64)
        for d, windows in enumerate(self._windows):
            found[:, sets == d] = windows.window(numbers[sets == d])
        return list(zip(sets.tolist(), *found.tolist()))

    def _read(self, step: int) -> list[Batch]:
        t, s = self._train, self._train.seq_len
        share = batch_size(t, step) // self.world
        rows, starts = [], []
        for d, _, at in self._samples(sequences(t, step) + self.rank * share, share):
            index = self.sources[d].index
            rows.append(index.read(at, at + s + 1))
            starts.append(index.starts(at, at + s + 1) - at if self._cfg.data.doc_mask else None)
        cuts = [slice(i, i + t.micro_batch) for i in range(0, share, t.micro_batch)]
        made = [pack(rows[cut], starts[cut] if self._cfg.data.doc_mask else None) for cut in cuts]
        places = torch.arange(share) + self.rank * share
        return [replace(b, step=step, rows=places[cut]) for b, cut in zip(made, cuts)]

    @property
    def vocab(self) -> int | None:
        made = (s.index.meta.get("tokenizer") for s in self.sources)
        return self.tokenizer.vocab if self.tokenizer else next((m["vocab"] for m in made if m), None)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over tokenizer, content of every data set, weights and split."""
        tok = self.tokenizer and self.tokenizer.fingerprint
        parts = [tok, [s.index.identity for s in self.sources], self._mix.weights, self._cfg.data.split]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def pieces(self) -> list[int]:
        """Lengths of the stretches within which tokens see each other, of the run's first PROBE tokens (at least one
        sample, at most an epoch): whole samples, under data.doc_mask the parts of documents in them."""
        length, out = self._cfg.train.seq_len, []
        for d, _, at in self._samples(0, min(self.samples, max(1, PROBE // length))):
            inside = self.sources[d].index.starts(at, at + length) - at if self._cfg.data.doc_mask else np.empty(0, np.int64)
            out += np.diff([0, *inside, length]).tolist()
        return out

    @cached_property
    def _lengths(self) -> torch.Tensor:  # int64 [2, vocab]
        return torch.from_numpy(lengths(self.tokenizer))

    def text_bytes(self, batch: Batch) -> torch.Tensor:
        """UTF-8 bytes of the text that the batch's counted targets stand for, exactly (data/lengths.py): a float64
        scalar on its device; nan without a tokenizer."""
        if self.tokenizer is None:
            return torch.full((), math.nan, dtype=torch.float64, device=batch.tokens.device)
        inside, first = self._lengths.to(batch.targets.device)
        counted = batch.targets != IGNORE
        target = batch.targets[counted]
        opens = batch.tokens[counted] == self.tokenizer.eod  # the target is the first token of a document
        return torch.where(opens, first[target], inside[target]).sum().double()

    def describe(self) -> str:
        """One line: name, documents, bytes, tokens of each split, tokenizer."""
        parts = []
        for s, weight in zip(self.sources, self._mix.weights):
            share = f"{100 * weight / sum(self._mix.weights):.3g} % " if len(self.sources) > 1 else ""
            size = s.index.meta.get("text_bytes")
            split = ", ".join(f"{name} {short(b - a)}" for name, a, b in zip(SPLITS, s.cuts, s.cuts[1:]) if b > a)
            documents = f"{s.index.documents:,} documents, " if s.index.documents else ""
            parts.append(f"{share}{s.index.meta.get('source') or s.name}: {documents}"
                         f"{f'{size / 1e6:.1f} MB, ' if size else ''}{short(s.index.tokens)} tokens ({split})")
        note = f" ({self.sources[0].note})" if self.sources[0].note else ""
        return f"{' + '.join(parts)}   tokenizer {self.tokenizer.name if self.tokenizer else 'unknown'}{note}"

    def unchanged(self) -> None:
        """Raises ChecksumError where a file of it is no longer what was opened."""
        for source in self.sources:
            source.index.unchanged()

    def close(self) -> None:
        """Joins the thread. May be called twice."""
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)


def open_data(cfg: Config, split: str, rank: int, world: int) -> Data:
    """Opens data.path, and makes the stdlib corpus first where it is asked for. `rank` of `world`: data-parallel.
    Raises ConfigError (one line: key or file, and the way out), ChecksumError, OSError when data.cache's disk fails."""
    mix, paths = blend.parse(cfg.data.path)
    parts = shares(cfg.data.split, split)
    sources = [open_source(cfg, path, parts) for path in paths]
    known = [s for s in sources if s.tokenizer]
    for s in known:
        if s.tokenizer.fingerprint != known[0].tokenizer.fingerprint:
            raise ConfigError(f"data.path: {known[0].name} was made with tokenizer {label(known[0].tokenizer)}, "
                              f"{s.name} with {label(s.tokenizer)}; prepare them with the same one")
    return Data(cfg, split, rank, world, mix, sources)


def open_source(cfg: Config, path: str, parts: list[int]) -> Source:
    prefix, note = path.removesuffix(".bin").removesuffix(".idx"), ""
    if path == "stdlib":
        prefix, note = prepare.stdlib(cfg.data.cache, cfg.data.tokenizer)
    tok = tokenizer.load(f"{prefix}.tokenizer") if os.path.isdir(f"{prefix}.tokenizer") else None
    given = None if path == "stdlib" or (tok and tok.name == cfg.data.tokenizer) else cfg.data.tokenizer
    if given:  # a name alone, such as bpe-1024, asks for the data's own
        wanted = tokenizer.load(given)
        tok = tok or wanted
        if wanted.fingerprint != tok.fingerprint:
            raise ConfigError(f"data.tokenizer: {given} is {label(wanted)}, but {path} was made with {label(tok)}; "
                              "leave data.tokenizer out, or prepare the data again")
    vocab = cfg.model.vocab or (tok and tok.vocab)
    if path.endswith(".bin") and os.path.isfile(path) and not os.path.exists(f"{prefix}.idx"):
        index = Raw(path, vocab, tok and tok.eod)
    else:
        index = Indexed(prefix, vocab)
    made = index.meta.get("tokenizer")
    if made and tok and made["fingerprint"] != tok.fingerprint:
        raise ConfigError(f"data.tokenizer: {label(tok)} is not {made['name']} ({made['fingerprint'][:12]}), with "
                          f"which {path} was made; put that one into {prefix}.tokenizer, or prepare the data again")
    return Source(path, index, tok, tuple(index.cut(sum(parts[:k]), sum(parts)) for k in range(4)), note)


def shares(text: str, split: str) -> list[int]:
    """ "95,5" -> [95, 5, 0]: whole numbers in the ratio of train, valid, test. Raises ConfigError."""
    try:
        parts = [Fraction(p.strip()) for p in text.split(",")]
        ok = len(parts) <= 3 and min(parts) >= 0 and sum(parts) > 0
    except (ValueError, ZeroDivisionError):
        ok = False
    if not ok:
        raise ConfigError(f"data.split: {text!r} is not shares of train,valid[,test] such as 95,5 or 969,30,1")
    parts += [Fraction(0)] * (3 - len(parts))
    if split not in SPLITS or not parts[SPLITS.index(split)]:
        raise ConfigError(f"data.split: {text!r} leaves nothing for {split}; give it a share (train,valid,test)")
    scale = math.lcm(*(p.denominator for p in parts))
    return [int(p * scale) for p in parts]


def label(tok: tokenizer.Tokenizer) -> str:
    return f"{tok.name} ({tok.fingerprint[:12]})"


def short(n: float) -> str:
    """3,887,194 -> 3.9M"""
    for unit in ("", "K", "M", "B", "T"):
        if n < 999.5 or unit == "T":
            return f"{n:.1f}{unit}" if unit else f"{n:.0f}"
        n /= 1000
