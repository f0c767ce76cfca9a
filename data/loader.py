"""Batches of a run: data.path -> the microbatches of a step, as a pure function of (seed, step).

The global batch of a step is a range of global sample numbers (config.sequences_seen gives the first one,
with or without train.ramp). Each global sample number passes through these files:

    blend.py     global sample number -> dataset, and sample number in that dataset
    sources.py   that number -> sample number in the part of the run that reads sequences of this length
    sampler.py   sample number -> first token of its window in the dataset's split
    best_fit.py  instead, with data.pack best_fit: sample number -> pieces of whole documents
    indexed.py   window -> seq_len + 1 token ids, from a memory-mapped file (raw.py: files without an index)
    start_tokens.py  the same with a start token before each document, if the model has one
    fim.py       with data.fim_rate: moves the middle of documents to the end
    pack.py      windows -> Microbatch

Each rank reads its share of the step's samples. The loader keeps no state between steps, so a resume at any
step, on any number of ranks, reads exactly the samples of an uninterrupted run. A thread prefetches
data.prefetch steps; its errors are raised in the caller, at the step that needs the data. On a GPU it also
copies them from pinned memory, overlapped with compute.
"""
import hashlib
import json
import math
import os
import pathlib
import re
import shlex
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config import Config, ConfigError, global_batch_at, sequences_seen
from config.reading import get_phases
from data import prepare, tokenizer
from data.best_fit import PackedSampler, document_ranges
from data.blend import named_paths, validation_key
from data.contract import check_same_tokenizer, check_stored
from data.download import local_data, local_path
from data.fim import FillInTheMiddle, open_fim
from data.indexed import IndexedDataset
from data.lengths import is_exact, token_byte_lengths
from data.pack import pack_windows
from data.prompts import Prompts, open_prompts
from data.raw import RawShards, is_raw_file
from data.remote import is_url
from data.same_tokens import ids_by_text
from data.sampler import SpanSampler, derive_seed
from data.sources import PhaseReading, SourceStart, read_phases
from data.start_tokens import Index, StartedDocuments, with_starts
from data.targets import SAMPLED_SEQUENCES, TargetCounts, cut_targets, number_of_targets
from data.tokenizer import Tokenizer
from data.window import Window, WithoutTokens, read_pieces, read_stream
from parallel.microbatch import IGNORE_INDEX, Microbatch
from parallel.offload import CopyStream, Event
from parallel.wire import comm
from parallel.wire.comm import Group

SPLITS = ("train", "valid", "test")
PROBE_TOKENS = 1 << 20  # from the start of the run: their documents give the estimated cost of attention
UNKNOWN_BYTES = -1  # for a text with an unknown tokenizer
OPENING_TOKENS = 64  # tokens of a split searched for its first words
OPENING_CHARACTERS = 32  # maximum length of these words
CHAT_TOKENS = 1 << 12  # tokens of a split searched for a conversation to use as a prompt
HELLO = {"role": "user", "content": "Hello"}  # if there is none
FIRST_WORDS = re.compile(r"\s*(\S+(?:[ \t]+\S+){0,2})")  # up to three words on the first line
CPU = torch.device("cpu")


class DataReadTimeout(RuntimeError):
    """The prefetch thread does not return: the storage hangs, as network storage may."""

    exit_code = 76


@dataclass(frozen=True)
class BlendedDataset:
    """One dataset of the blend."""
    name: str  # as in data.path
    index: Index
    tokenizer: Tokenizer | None
    split_points: tuple[int, ...]  # first token of train, valid and test, and the end of the stream
    note: str  # for the run's header: "made in 2.4 s", "cached" or ""


class SampleLocation(NamedTuple):
    """Where a global sample is stored."""
    dataset: int  # index in BatchLoader.datasets
    sample_id: int  # within the dataset's split, unique over all epochs
    first_token: int  # of its window in the dataset's stream, or of its first piece (data.pack best_fit)


class StepRead(NamedTuple):
    """Microbatches of a step, as read by the thread."""
    batches: list[Microbatch]  # on the device
    copied: Event | None  # when the copies are done; None on a CPU


class BatchLoader:
    """Reads the microbatches of one data-parallel rank out of `world`, for one split. Made by open_loader.

    cfg: the config of a phase. reading: the data that the phase reads, and where its sources start.
    tokens, samples: size of the split in tokens, and in samples per epoch.
    tokenizer: the data's; None if the files do not name theirs and data.tokenizer is not set.
    Raises ConfigError if the split of a dataset is shorter than one sample, or if the data or its tokenizer
    do not support data.fim_rate.
    """

    def __init__(
        self,
        cfg: Config,
        *,
        split: str,
        rank: int,
        world: int,
        reading: PhaseReading,
        datasets: list[BlendedDataset],
        device: torch.device = CPU,
    ) -> None:
        self.split = split
        self.rank = rank
        self.world = world
        self.datasets = datasets
        self.device = device
        self._cfg = cfg
        self._mix = reading.mix
        self._reading = reading
        self.before_read: Callable[[], object] | None = None  # called first in `microbatches`
        self._counting_ranks: Group | None = None  # set by count_over

        # validation reads the same samples for any train.seed and train.ramp
        is_train = split == "train"
        self._train = cfg.train if is_train else replace(cfg.train, ramp=None)
        seed = derive_seed(cfg.train.seed) if is_train else 0
        self._seeds = [derive_seed(seed, start.number) for start in reading.starts]  # one per dataset

        self._windows: list[SpanSampler | PackedSampler] = []
        for dataset, start, dataset_seed in zip(datasets, reading.starts, self._seeds):
            self._windows.append(self._make_sampler(dataset, start, dataset_seed))
        splits = [self._split_range(dataset) for dataset in datasets]
        self.tokens = sum(last - first for first, last in splits)
        self.samples = sum(windows.count for windows in self._windows)
        self.tokenizer = next((dataset.tokenizer for dataset in datasets if dataset.tokenizer), None)
        has_fim = cfg.data.fim_rate > 0 and (is_train or cfg.data.fim_valid)
        self._fim = self._open_fim() if has_fim else None

        has_thread = is_train and cfg.data.prefetch > 0
        self._thread = ThreadPoolExecutor(1, "loader") if has_thread else None
        self._prefetched: dict[int, Future[StepRead]] = {}  # by step
        self._copies = CopyStream(device)

    def _open_fim(self) -> FillInTheMiddle:
        if all(dataset.index.loss_mask is not None for dataset in self.datasets):
            raise ConfigError(f"data.fim_rate: {self._cfg.data.path} holds conversations (.mask), and they "
                              "are never cut; leave it out, or blend them with other text")
        start = self.prompts.start
        return open_fim(
            self._cfg.data, self.required_tokenizer, self._cfg.model.vocab, start.id if start else None
        )

    def _split_range(self, dataset: BlendedDataset) -> tuple[int, int]:
        """Return the token range [first, last) of a dataset in this split."""
        part = SPLITS.index(self.split)
        return dataset.split_points[part], dataset.split_points[part + 1]

    def _make_sampler(
        self, dataset: BlendedDataset, start: SourceStart, seed: int
    ) -> SpanSampler | PackedSampler:
        first, last = self._split_range(dataset)
        split = f"data.split: {self._cfg.data.split} leaves {self.split} {last - first} tokens of " \
                f"{dataset.name} ({dataset.index.documents} documents)"
        more, larger = "raise its share", "give more documents"
        if self._cfg.data.valid and self.split == "valid":
            size = f"{last - first} tokens ({dataset.index.documents} documents)"
            split = f"data.valid: {dataset.name} has {size}"
            more = "name more data there"
        elif self.split == "valid":
            larger += ", or name its data in data.valid"
        if self._cfg.data.pack == "best_fit":
            if dataset.index.documents == 0:
                raise ConfigError(f"data.pack: best_fit places whole documents, and {dataset.name} has no "
                                  ".idx that names them; make one with scripts.prepare_data, or use stream")
            documents = document_ranges(dataset.index, first, last)
            if (documents[:, 1] - documents[:, 0]).max() < 2:  # none of them predicts anything
                raise ConfigError(f"{split}, and no document of two tokens; {more}, or {larger}")
            return start.packed_sampler(documents, seed)

        span = start.longest_span
        if last - first <= span:
            what = "a sample" if span == self._cfg.train.seq_len else "the longest sample of the run"
            raise ConfigError(f"{split}, {what} is {span + 1}; {more}, shorten train.seq_len, or {larger}")
        return start.sampler(first, last, seed)

    # ---- reading -------------------------------------------------------------------------------------------

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this rank's microbatches of a step on the device: the step's global batch / (micro_batch *
        world) microbatches of [micro_batch, seq_len]. Steps count from 0. For valid and test, step n is the
        n-th fixed global batch.

        Raises ChecksumError if tokens of the step are damaged, ConfigError if an id is not below the
        vocabulary, DataReadTimeout if the thread has not read them within parallel.timeout_s.
        """
        if self.before_read is not None:
            self.before_read()
        if self._thread is None:
            return self._for_compute(self._read_and_copy(step))

        wanted = self._reading.steps_from(step, 1 + self._cfg.data.prefetch)
        outdated = [other for other in self._prefetched if other not in wanted]
        for other in outdated:  # it is still read, because the loaders of other ranks may have begun it
            del self._prefetched[other]
        for other in wanted:
            if other not in self._prefetched:
                self._prefetched[other] = self._thread.submit(self._read_and_copy, other)
        return self._for_compute(self._awaited(self._prefetched.pop(step), step))

    def _awaited(self, read: Future[StepRead], step: int) -> StepRead:
        """Wait for the thread's result. Raises DataReadTimeout on a timeout."""
        limit_s = self._cfg.parallel.timeout_s
        wait([read], limit_s)
        if not read.done():
            raise DataReadTimeout(
                f"data.path: the samples of step {step + 1:,} were not read in {limit_s:g} s "
                "(parallel.timeout_s): the storage hangs"
            )
        return read.result()

    def sample_ids(self, step: int) -> list[int]:
        """Return an id for each sample of the global batch of a step, in order, unique within a phase."""
        locations = self._locate_samples(self._first_sequence(step), self._global_batch(step))
        return [location.sample_id * len(self.datasets) + location.dataset for location in locations]

    def sequences_of_step(self, step: int) -> int:
        """Return the number of sequences in a step (from 1), over all ranks."""
        return self._global_batch(step - 1)

    def _global_batch(self, step: int) -> int:
        """Return the number of sequences in a step (from 0)."""
        return global_batch_at(self._train, step - self._reading.phase.steps_before)

    def _first_sequence(self, step: int) -> int:
        """Return the global sample number of the first sequence of a step."""
        before = self._reading.sequences_before
        return before + sequences_seen(self._train, step - self._reading.phase.steps_before)

    def _locate_samples(self, first: int, count: int) -> list[SampleLocation]:
        """Locate the global samples first .. first + count - 1."""
        datasets, samples = self._mix.pick(first, count)
        sample_ids = np.empty(count, np.int64)
        first_tokens = np.empty(count, np.int64)
        for dataset, windows in enumerate(self._windows):
            chosen = datasets == dataset
            numbers = samples[chosen] + self._reading.starts[dataset].offset
            sample_ids[chosen], first_tokens[chosen] = windows.locate(numbers)
        return list(map(SampleLocation, datasets.tolist(), sample_ids.tolist(), first_tokens.tolist()))

    def _read_and_copy(self, step: int) -> StepRead:
        """Read a step and start its copies to the device."""
        batches = self._read_step(step)
        step_targets = self._count_step_targets(batches)
        batches = [replace(batch, step_targets=step_targets) for batch in batches]
        if self.device.type != "cuda":
            return StepRead([batch.to(self.device) for batch in batches], None)
        with self._copies.context():
            batches = [batch.pinned().to(self.device) for batch in batches]
        return StepRead(batches, self._copies.record_event())

    @cached_property
    def every_target_counts(self) -> bool:
        """Whether no sequence has a target that does not count."""
        return self._fim is None and self._every_stored_target_counts

    @cached_property
    def _every_stored_target_counts(self) -> bool:
        """The same of the sequences as stored, before data.fim_rate rearranges them."""
        if self._cfg.data.pack != "stream" or self._cfg.data.doc_mask:
            return False
        indices = [dataset.index for dataset in self.datasets]
        return not any(isinstance(index, StartedDocuments) or index.loss_mask for index in indices)

    def count_over(self, ranks: Group) -> None:
        """Sum the targets of each step over the loaders of all ranks, as soon as they are read.

        So the step knows them before it begins. No one else may use `ranks`, all ranks of the job.
        """
        self._counting_ranks = ranks

    def _count_step_targets(self, batches: list[Microbatch]) -> Tensor | None:
        """Return the counted targets of a step over all ranks, an int64 scalar, or None if unknown."""
        own = sum(int(batch.num_counted()) for batch in batches)
        if self.world == 1 or self.every_target_counts:
            return torch.tensor(own * self.world)
        if self._counting_ranks is None:
            return None
        readers = self._counting_ranks.size // self.world  # ranks that read the same samples
        return comm.all_reduce_sum(torch.tensor(own), self._counting_ranks) // readers

    def _for_compute(self, read: StepRead) -> list[Microbatch]:
        """Return the microbatches, and make compute wait for their copies."""
        self._copies.make_compute_wait(read.copied)
        for batch in read.batches:
            for tensor in batch.tensors().values():
                self._copies.give_to_compute(tensor)
        return read.batches

    def _read_step(self, step: int) -> list[Microbatch]:
        """Read this rank's microbatches of a step into host memory."""
        doc_mask = self._cfg.data.doc_mask
        micro_batch = self._train.micro_batch
        window_size = self._train.seq_len + 1
        share = self._global_batch(step) // self.world  # sequences read by this rank
        offset = self.rank * share  # of this rank's first sequence in the global batch

        # read this rank's windows
        windows: list[Window] = []
        for location in self._locate_samples(self._first_sequence(step) + offset, share):
            windows.append(self._read_window(location, window_size))

        # pack them
        sequence_ids = torch.arange(share) + offset
        batches: list[Microbatch] = []
        for begin in range(0, share, micro_batch):
            rows = slice(begin, begin + micro_batch)
            batch = pack_windows(
                [window.tokens for window in windows[rows]],
                [window.starts for window in windows[rows]] if doc_mask else None,
                [window.counted for window in windows[rows]],
            )
            batch = replace(batch, step=step, sequence_ids=sequence_ids[rows])
            batches.append(batch)
        return batches

    def _read_window(self, location: SampleLocation, slots: int) -> Window:
        """Read the tokens of a sample."""
        index = self.datasets[location.dataset].index
        fim = self._fim if index.loss_mask is None else None  # conversations are never rearranged
        window = self._read_stored_window(location, slots, index, self._cfg.data.doc_mask or fim is not None)
        if fim is None:
            return window
        return fim.rearrange_window(window, derive_seed(self._seeds[location.dataset], location.sample_id))

    def _read_stored_window(
        self, location: SampleLocation, slots: int, index: Index | WithoutTokens, wants_starts: bool
    ) -> Window:
        """Read a sample as stored in the data. `wants_starts` looks up document starts in a stream."""
        sampler = self._windows[location.dataset]
        if isinstance(sampler, PackedSampler):
            pad_id = self.tokenizer.eod if self.tokenizer else 0
            return read_pieces(index, sampler.pieces(location.sample_id), slots, pad_id)
        return read_stream(index, location.first_token, slots, wants_starts)

    # ---- facts about the data ------------------------------------------------------------------------------

    @property
    def required_tokenizer(self) -> Tokenizer:
        """The tokenizer of the data. Raises ConfigError if neither the files nor data.tokenizer name one."""
        if self.tokenizer is None:
            raise ConfigError(f"data.tokenizer: {self._cfg.data.path} does not say which tokenizer made it; "
                              "name it: bytes, a tokenizer.json or an x.model")
        return self.tokenizer

    @property
    def without_tokenizer(self) -> list[str]:
        """Names of the datasets whose files do not record which tokenizer made them."""
        return [dataset.name for dataset in self.datasets if not dataset.index.meta.get("tokenizer")]

    @cached_property
    def prompts(self) -> Prompts:
        """Formats texts as prompts for a model of this data. Raises like required_tokenizer."""
        return open_prompts(self.required_tokenizer, self._cfg.data.bos)

    @property
    def has_start(self) -> bool:
        """Whether documents begin with a start token. Raises like `prompts`."""
        return self.prompts.start is not None

    def ids_by_text(self, folder: pathlib.Path, fingerprint: str) -> np.ndarray:  # int64 [vocab]
        """Map each id to the id with the same meaning for the tokenizer in a folder (same_tokens.py).

        Raises ConfigError if the folder has no tokenizer, or one with another fingerprint, and like
        required_tokenizer.
        """
        there = tokenizer.load_tokenizer(folder)
        if there.fingerprint != fingerprint:
            raise ConfigError(f"{folder}: is {there.contract.label}, and not the tokenizer of the weights; "
                              "put that one there")
        return ids_by_text(there, self.required_tokenizer)

    @property
    def is_chat(self) -> bool:
        """Whether the largest part of the data holds conversations."""
        return self._largest.index.loss_mask is not None

    @property
    def _largest(self) -> BlendedDataset:
        """The dataset with the largest weight."""
        weights = self._mix.weights
        return self.datasets[weights.index(max(weights))]

    @property
    def vocab(self) -> int | None:
        """Number of token ids, or None if unknown."""
        if self.tokenizer is not None:
            return self.tokenizer.vocab
        for dataset in self.datasets:
            made_with = dataset.index.meta.get("tokenizer")
            if made_with:
                return made_with["vocab"]
        return None

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokenizer, the content of every dataset, the weights, the split, the packing and
        fill-in-the-middle. Loaders with equal fingerprints and equal train.* read equal samples."""
        tokenizer_digest = self.tokenizer.fingerprint if self.tokenizer is not None else None
        identities = [dataset.index.identity for dataset in self.datasets]
        parts = [tokenizer_digest, identities, self._mix.weights, self._cfg.data.split]
        if self._cfg.data.pack != "stream":
            parts.append(self._cfg.data.pack)
        if self._fim is not None:
            parts.append(self._fim.identity)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def document_lengths(self) -> list[int]:
        """Lengths of the ranges within which tokens attend to each other: whole samples, or with
        data.doc_mask the parts of documents in them. Covers the run's first PROBE_TOKENS tokens, at least one
        sample and at most an epoch."""
        seq_len = self._cfg.train.seq_len
        count = self._reading.sequences_left(min(self.samples, max(1, PROBE_TOKENS // seq_len)))
        if not self._cfg.data.doc_mask:
            return [seq_len] * count

        lengths: list[int] = []
        for location in self._locate_samples(self._reading.sequences_before, count):
            first = location.first_token
            sampler = self._windows[location.dataset]
            if isinstance(sampler, PackedSampler):
                sizes = [stop - begin for begin, stop in sampler.pieces(location.sample_id)]
                starts = np.cumsum(sizes)
                starts = starts[starts < seq_len]
            else:
                starts = self.datasets[location.dataset].index.document_starts(first, first + seq_len) - first
            lengths += np.diff(starts, prepend=0, append=seq_len).tolist()
        return lengths

    def passes(self, last_step: int) -> list[tuple[str, float]]:
        """Return (name, epochs) for each dataset that the phase reads. `last_step` is the phase's."""
        before = self._reading.sequences_before
        steps = last_step - self._reading.phase.steps_before
        drawn_before = self._mix.drawn(before)
        drawn = self._mix.drawn(before + sequences_seen(self._train, max(steps, 0)))
        return [
            (dataset.name, (drawn[number] - drawn_before[number]) / self._windows[number].count)
            for number, dataset in enumerate(self.datasets)
        ]

    def count_targets(self, last_step: int) -> TargetCounts | None:
        """Like sample_targets, up to the phase's `last_step`.
        Raises ConfigError with a fix if none counts."""
        counts = self.sample_targets(last_step - self._reading.phase.steps_before)
        if counts is not None and counts.targets == 0:
            raise ConfigError(f"data.path: none of the {counts.looked_at:,} sequences of "
                              f"{self._cfg.data.path} that were looked at has a target that counts; "
                              f"{self._targets_hint()}")
        return counts

    def sample_targets(self, steps: int) -> TargetCounts | None:
        """Count the targets in the first SAMPLED_SEQUENCES sequences of a number of steps. Return None if
        every target counts, or nothing is read."""
        if self._every_stored_target_counts:
            return None
        sequences = min(self.samples, sequences_seen(self._train, max(steps, 0)))
        looked_at = min(sequences, SAMPLED_SEQUENCES)
        if looked_at == 0:
            return None

        seq_len = self._cfg.train.seq_len
        doc_mask = self._cfg.data.doc_mask
        counts: list[int] = []  # of each sequence
        cut = 0
        for location in self._locate_samples(self._reading.sequences_before, looked_at):
            index, sampler = self.datasets[location.dataset].index, self._windows[location.dataset]
            window = self._read_stored_window(location, seq_len + 1, WithoutTokens(index), doc_mask)
            counts.append(number_of_targets(window.counted, window.starts if doc_mask else None, seq_len))
            if index.loss_mask is None:
                continue
            pieces = [(location.first_token, location.first_token + seq_len + 1)]
            if isinstance(sampler, PackedSampler):
                pieces = sampler.pieces(location.sample_id)
            cut += sum(cut_targets(index, first, stop) for first, stop in pieces)

        return TargetCounts(
            looked_at=looked_at,
            sequences=sequences,
            places=looked_at * seq_len,
            targets=sum(counts),
            empty=counts.count(0),
            cut=cut if any(dataset.index.loss_mask for dataset in self.datasets) else None,
        )

    def _targets_hint(self) -> str:
        """Suggest what to do if no target counts."""
        chats = [dataset.index for dataset in self.datasets if dataset.index.loss_mask is not None]
        if not chats:
            return "set data.doc_mask false: nothing is predicted across documents, and these are too short"
        tokens = sum(index.tokens for index in chats)
        mean = tokens / max(sum(index.documents for index in chats), 1)
        if all(index.meta.get("counted") == 0 for index in chats):
            return "prepare it again from conversations in which the assistant speaks"
        if mean > self._cfg.train.seq_len + 1:
            return (f"raise train.seq_len: a conversation has {mean:,.0f} tokens on average, and what the "
                    "assistant says lies outside of these sequences, or without its question")
        if self._cfg.data.pack == "stream":
            return "take data.pack best_fit, which keeps conversations whole"
        return "give more conversations in which the assistant speaks"

    @cached_property
    def _byte_lengths(self) -> torch.Tensor:  # int64 [2, vocab]
        lengths = token_byte_lengths(self.required_tokenizer)
        if self._fim is not None:  # sentinels have no text, whatever the tokenizer says
            lengths[:, [self._fim.prefix, self._fim.middle, self._fim.suffix]] = 0
        return torch.from_numpy(lengths)

    @cached_property
    def _has_true_bytes(self) -> bool:
        """Whether the tokens have the same bytes as the text, in all data sets."""
        return all(is_exact(self.required_tokenizer, dataset.index.meta) for dataset in self.datasets)

    def text_bytes(self, batch: Microbatch) -> torch.Tensor:
        """Return the UTF-8 bytes of the text of the batch's counted targets (data/lengths.py), as an int64
        scalar on its device; UNKNOWN_BYTES without a tokenizer, or if it has lost a part of the text."""
        if self.tokenizer is None or not self._has_true_bytes:
            return torch.full((), UNKNOWN_BYTES, dtype=torch.int64, device=batch.tokens.device)
        inside, first = self._byte_lengths.to(batch.targets.device)
        is_counted = batch.targets != IGNORE_INDEX
        target = batch.targets[is_counted]
        before = batch.tokens[is_counted]
        begins_document = (before == self.tokenizer.eod) | (before == self.prompts.before_text)
        return torch.where(begins_document, first[target], inside[target]).sum()

    def describe(self) -> str:
        """Return one line for the run's header: describe_datasets, and the tokenizer."""
        tokenizer_name = "unknown"
        if self.tokenizer:
            start = self.prompts.start
            begin = "" if start is None else f"begin with {start}, as {start.named_by[0]} says, and "
            tokenizer_name = f"{self.tokenizer.name}, documents {begin}end with {self.tokenizer.contract.end}"
        note = f" ({self.datasets[0].note})" if self.datasets[0].note else ""
        return f"{self.describe_datasets()}   tokenizer {tokenizer_name}{note}"

    def describe_datasets(self) -> str:
        """Return "NAME: 1,200 documents, 2.5 MB, 13.2K tokens (train 11.9K, valid 1.3K)" for each dataset."""
        total = sum(self._mix.weights)
        texts: list[str] = []
        for dataset, weight in zip(self.datasets, self._mix.weights):
            share = f"{100 * weight / total:.3g} % " if len(self.datasets) > 1 else ""
            texts.append(share + describe_dataset(dataset))
        if self._cfg.data.pack == "best_fit":
            packed = [sampler for sampler in self._windows if isinstance(sampler, PackedSampler)]
            share = sum(sampler.whole.utilization * sampler.count for sampler in packed) / self.samples
            texts[-1] += f"   best fit: {self.samples:,} sequences, {100 * share:.1f} % full"
        if self._fim is not None:
            kind = f"between {self._cfg.data.fim_split}s, {100 * self._fim.spm_rate:g} % SPM"
            texts[-1] += f"   fill-in-the-middle {100 * self._fim.rate:g} % ({kind})"
        return " + ".join(texts)

    def opening_words(self) -> str:
        """Return the first words of the split's first document, as a prompt that fits the data, or "" if it
        has none. Raises like microbatches."""
        tokenizer = self.required_tokenizer
        part = SPLITS.index(self.split)
        first, last = self.datasets[0].split_points[part:part + 2]
        ids = self.datasets[0].index.read(first, min(last, first + OPENING_TOKENS)).tolist()
        start = self.prompts.start
        if start is not None and ids[:1] == [start.id]:
            ids = ids[1:]
        if tokenizer.eod in ids:
            ids = ids[:ids.index(tokenizer.eod)]
        words = FIRST_WORDS.match(tokenizer.decode(ids))
        return words[1][:OPENING_CHARACTERS] if words else ""

    def opening_chat(self) -> list[int]:
        """Return the ids of a conversation of the split, the shortest of the first ones, up to where the
        assistant first speaks. Raises like microbatches, and ConfigError if there is none."""
        dataset = self._largest
        first, last = self._split_range(dataset)
        results: list[list[int]] = []
        for begin, stop in document_ranges(dataset.index, first, min(last, first + CHAT_TOKENS)).tolist():
            counted = dataset.index.counted(begin, stop)
            if counted is not None and counted.any():
                results.append(dataset.index.read(begin, begin + int(counted.argmax())).tolist())
        return min(filter(None, results), key=len, default=self.prompts.chat([HELLO]))

    def check_unchanged(self) -> None:
        """Raise ChecksumError if a data file has changed since it was opened."""
        for dataset in self.datasets:
            dataset.index.check_unchanged()

    def close(self) -> None:
        """Stop the thread and wait for it. May be called twice.

        What all ranks count together is read to the end, since another rank may wait for it.
        """
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=self._counting_ranks is None)


# ---- opening -----------------------------------------------------------------------------------------------

def check_paths(cfg: Config) -> None:
    """Raise ConfigError with a fix if data.path or data.valid names something without tokens. Opens nothing;
    URLs are checked when they are downloaded."""
    for key, path in named_paths(cfg.data):
        check_path(path, f"--{key}", cfg.data.tokenizer)


def check_path(path: str, option: str, made_with: str | None) -> None:
    """Raise ConfigError if a path named by `option` holds no tokens. `made_with` is the tokenizer to make
    them with, or None to leave the choice to the user."""
    key = option.removeprefix("--") if "." in option else option
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    is_indexed = any(os.path.exists(f"{prefix}{end}") for end in (".idx", ".bin"))
    if path == "stdlib" or is_url(path) or is_raw_file(path) or is_indexed:
        return

    spec = shlex.quote(str(made_with or "bpe-32000"))
    if os.path.isdir(path):
        folder = pathlib.Path(path)
        files = [*folder.glob("*.idx"), *folder.glob("*/*.idx")]  # or each in a subfolder, like stdlib's
        names = sorted(file.with_suffix("") for file in files)
        if names:
            several = f" (it has {len(names)})" if len(names) > 1 else ""
            raise ConfigError(f"{key}: {path} is a folder of data sets{several}; name one: "
                              f"{option} {shlex.quote(str(names[0]))}, or several as a blend")
    if os.path.exists(path):
        out = f"runs/data/{pathlib.Path(path).name.partition('.')[0]}"
        is_input = prepare.first_replaced(out, [path]) is not None
        out = shlex.quote(f"{out}-tokens" if is_input else out)
        raise ConfigError(f"{key}: {path} holds no tokens; make them with python -m scripts.prepare_data "
                          f"--input {shlex.quote(path)} --tokenizer {spec} --out {out}, then {option} {out}")
    if len(path.split()) > 1:
        weighted = " ".join(f"1 {word}" for word in path.split())
        raise ConfigError(f"{key}: {path!r} does not name a .bin/.idx pair; a blend has a weight before each "
                          f"path: {weighted!r}")
    out = shlex.quote(prefix)
    raise ConfigError(f"{key}: {prefix}.idx: No such file; make it from your text with python -m "
                      f"scripts.prepare_data --input FILES --tokenizer {spec} --out {out}, or give another "
                      f"{option}: a prefix of .bin/.idx that is there, a blend, or stdlib")


def open_loader(
    cfg: Config, split: str, rank: int, world: int, *, device: torch.device = CPU, phase: int = 1
) -> BatchLoader:
    """Open data.path, or data.valid for the valid split, for rank `rank` of `world` data-parallel ranks.
    Builds the stdlib corpus first if it is requested.

    `device` is where the microbatches go. `phase` numbers the reading phase of train.phases; each phase has a
    separate loader.

    Raises ConfigError (one line: the key or the file, and a fix), ChecksumError, and OSError if data.cache
    cannot be written.
    """
    phases = get_phases(cfg)
    cfg = phases.all[phase - 1].cfg
    read_key = validation_key(cfg.data) if split == "valid" else "data.path"
    for key, path in named_paths(cfg.data):
        if key == read_key:
            check_path(path, f"--{key}", cfg.data.tokenizer)
    cfg = config_of_split(cfg, split)
    if split == "train":
        reading = read_phases(phases)[phase - 1]
    else:  # every evaluation of a phase reads the same samples, whatever was read before
        reading = read_phases(get_phases(replace(cfg, data=replace(cfg.data, span=None))))[0]
    shares = split_shares(cfg.data.split, split)
    datasets = [open_dataset(cfg, path, shares) for path in reading.paths]
    made_with = [(each.name, each.tokenizer.contract) for each in datasets if each.tokenizer]
    check_same_tokenizer(made_with, read_key)
    unnamed = [each.name for each in datasets if not each.tokenizer]
    if made_with and unnamed:  # otherwise it would lack the start token and the end token of the other data
        raise ConfigError(f"{read_key}: {unnamed[0]} does not say which tokenizer made it, and "
                          f"{made_with[0][0]} does; name it in data.tokenizer")
    return BatchLoader(
        cfg,
        split=split,
        rank=rank,
        world=world,
        reading=reading,
        datasets=datasets,
        device=device,
    )


def config_of_split(cfg: Config, split: str) -> Config:
    """Return the config of a phase with data.path and data.split set to what the split reads, even if
    data.valid is set.

    With data.valid, valid is all of it, and data.split's share for valid goes to train. Raises ConfigError.
    """
    if cfg.data.valid is None:
        return cfg
    if split == "valid":
        return replace(cfg, data=replace(cfg.data, path=cfg.data.valid, split="0,1"))
    train, valid, test = parse_shares(cfg.data.split)
    return replace(cfg, data=replace(cfg.data, split=f"{train + valid},0,{test}"))


def check_dtype(cfg: Config) -> None:
    """Raise ConfigError if data.dtype is given but every file has an index. The files are on this node."""
    paths = [local_path(path, cfg.data.cache) for _, path in named_paths(cfg.data)]
    if cfg.data.dtype and not any(map(is_raw_file, paths)):
        raise ConfigError(f"data.dtype: {cfg.data.dtype} is for files without an index, and the .idx of "
                          f"{' and of '.join(paths)} says what its ids are; leave it out")


def open_dataset(cfg: Config, path: str, shares: list[int]) -> BlendedDataset:
    """Open one dataset of data.path, with the shares of train, valid and test. Raises like open_loader."""
    name = path
    path = local_data(name, cfg.data.cache)
    prefix: pathlib.Path | str = path.removesuffix(".bin").removesuffix(".idx").removesuffix(".npy")
    requested = cfg.data.tokenizer
    note = ""
    if path == "stdlib":
        prefix, note = prepare.prepare_stdlib(cfg.data.cache, requested, cfg.data.eod)
        requested = None  # the corpus is made with it
    tok = tokenizer_of_dataset(path, prefix, requested, cfg.data.eod)

    vocab = cfg.model.vocab or (tok.vocab if tok else None)
    if tok and vocab and vocab < tok.vocab:
        label = tok.contract.label
        raise ConfigError(f"model.vocab: {vocab} is smaller than the {tok.vocab} ids of {label}, with which "
                          f"{name} was made; raise it, or prepare the data with the model's tokenizer")
    if is_raw_file(path):
        index = RawShards(
            path,
            vocab,
            tok.eod if tok else None,
            stated=cfg.data.dtype,
            ids=tok.vocab if tok else None,
        )
        if cfg.data.doc_mask:
            index.check_ends(tok.contract if tok else None)
    else:
        index = IndexedDataset(prefix, vocab)

    index.contract.check(tok.contract if tok else None)
    index = with_starts(index, tok, cfg.data.bos, name)

    total = sum(shares)
    split_points = [index.split_point(sum(shares[:part]), total) for part in range(len(SPLITS) + 1)]
    return BlendedDataset(
        name=name, index=index, tokenizer=tok, split_points=tuple(split_points), note=note
    )


def tokenizer_of_dataset(
    path: str, prefix: pathlib.Path | str, requested: str | None, eod: str | None
) -> Tokenizer | None:
    """Return the tokenizer stored with the data, else the requested one (data.tokenizer, with documents that
    end with data.eod), else None. Raises ConfigError if the two differ."""
    folder = f"{prefix}.tokenizer"
    stored = tokenizer.load_tokenizer(folder) if os.path.isdir(folder) else None
    if stored is not None and requested in (None, stored.name):  # bpe-1024 requests the one with that name
        requested = folder
    if not requested or (requested == folder and eod is None):
        return stored

    wanted = tokenizer.load_tokenizer(requested, eod)
    if stored is not None:
        check_stored(
            path, stored.contract, wanted.contract, requested=requested, eod=eod, folder=folder
        )
    return stored or wanted


def parse_shares(text: str) -> list[Fraction]:
    """Parse "95,5" into the shares of train, valid and test. Raises ConfigError if it is not such a list."""
    try:
        shares = [Fraction(share.strip()) for share in text.split(",")]
    except (ValueError, ZeroDivisionError):
        shares = []
    if not shares or len(shares) > len(SPLITS) or min(shares) < 0 or sum(shares) == 0:
        raise ConfigError(f"data.split: {text!r} is not shares of train,valid[,test] "
                          "such as 95,5 or 969,30,1")
    return shares + [Fraction(0)] * (len(SPLITS) - len(shares))


def split_shares(text: str, split: str) -> list[int]:
    """Parse "95,5" into [95, 5, 0], integers in the ratio of train, valid and test.

    Raises ConfigError like parse_shares, and if `split` gets nothing.
    """
    shares = parse_shares(text)
    if split not in SPLITS or not shares[SPLITS.index(split)]:
        other_way = ", or name its data in data.valid" if split == "valid" else ""
        raise ConfigError(f"data.split: {text!r} leaves nothing for {split}; "
                          f"give it a share (train,valid,test){other_way}")
    scale = math.lcm(*(share.denominator for share in shares))
    return [int(share * scale) for share in shares]


# ---- text --------------------------------------------------------------------------------------------------

def describe_dataset(dataset: BlendedDataset) -> str:
    """Return "NAME: 1,200 documents, 2.5 MB, 13.2K tokens (train 11.9K, valid 1.3K)", as far as known."""
    index = dataset.index
    text_bytes = index.meta.get("text_bytes")
    sizes: list[str] = []
    if index.documents:
        sizes.append(f"{index.documents:,} documents")
    if text_bytes:
        sizes.append(f"{text_bytes / 1e6:.1f} MB")

    splits: list[str] = []
    for name, first, last in zip(SPLITS, dataset.split_points, dataset.split_points[1:]):
        if last > first:
            splits.append(f"{name} {short_count(last - first)}")
    sizes.append(f"{short_count(index.tokens)} tokens ({', '.join(splits)})")
    if index.probed and index.probed[0] < index.probed[1]:
        sizes.append(f"ids looked at in {index.probed[0]:,} of {index.probed[1]:,} blocks")
    return f"{index.meta.get('source') or dataset.name}: {', '.join(sizes)}"


def short_count(count: float) -> str:
    """Format a count: 3,887,194 -> 3.9M."""
    for unit in ("", "K", "M", "B"):
        if count < 999.5:
            return f"{count:.1f}{unit}" if unit else f"{count:.0f}"
        count /= 1000
    return f"{count:.1f}T"
