"""Where each source starts when a phase of the run begins: arithmetic on train.phases, without a table.

A source is a path in data.path (a path that a blend names twice is two sources). It keeps its sample order
across phases, whatever its weight and whatever other sources there are:

- A phase with the same sequence length continues with the next sample. None is lost or repeated.
- A phase with another length but the same span (data.span) continues with the next completely unread span.
  Nothing repeats within the epoch. The unread rest of the previous phase's spans is skipped in this epoch:
  less than one span in total, for each source and change of length.
- A phase with another span starts the source's next epoch.
- With data.pack best_fit there are no spans: a phase with another length packs the unread rest of the epoch
  (best_fit.py). Nothing is lost or repeated.

A source that returns after phases without it resumes where it stopped.
"""
from dataclasses import dataclass, replace

import numpy as np

from config import sequences_seen
from config.reading import Phase, Phases, shuffle_span
from data import blend
from data.best_fit import PackedSampler, pack_ranges
from data.sampler import SpanSampler, WindowSampler

Source = tuple[str, int]  # a path in data.path, and how many times the blend has named it before


@dataclass(frozen=True)
class Stretch:
    """The part of one source that consecutive phases read in sequences of the same length.

    `segment` numbers these phases. `span` is how many tokens stay together. `samples` is how many are read;
    None reads to the end of the run.
    """
    segment: int
    span: int
    seq_len: int
    samples: int | None

    @property
    def in_span(self) -> int:
        return self.span // self.seq_len


@dataclass(frozen=True)
class SourceStart:
    """Position of a source when a phase begins.

    number: index of the source in the run, in the order in which phases name them; it selects the sample
    order.
    before: stretches already read. now: the stretch read in this phase and others like it. offset: a sample's
    number in the blend + offset is its number in `now`.
    """
    number: int
    before: tuple[Stretch, ...]
    now: Stretch
    offset: int

    @property
    def longest_span(self) -> int:
        return max(stretch.span for stretch in (*self.before, self.now))

    def sampler(self, first: int, last: int, seed: int) -> SpanSampler:
        """Make the sampler of this stretch for the tokens [first, last), with the source's seed."""
        next_span = 0  # next span to read, counted over all epochs
        span = (self.before or (self.now,))[0].span
        for stretch in (*self.before, self.now):
            if stretch.span != span:  # another order: start the next epoch
                epochs = -(-next_span // WindowSampler(first, last, span, seed).count)
                span = stretch.span
                next_span = epochs * WindowSampler(first, last, span, seed).count
            begin = next_span
            if stretch.samples is not None:
                next_span += -(-stretch.samples // stretch.in_span)
        end = None if self.now.samples is None else next_span
        return SpanSampler(WindowSampler(first, last, span, seed), self.now.seq_len, begin, end)

    def packed_sampler(self, documents: np.ndarray, seed: int) -> PackedSampler:
        """Make the sampler of this stretch with data.pack best_fit. `documents` int64 [n, 2] are the split's,
        and `seed` is the source's."""
        def make_sampler(stretch: Stretch) -> PackedSampler:
            whole = pack_ranges(documents, stretch.seq_len)
            rest = whole if unread is None else pack_ranges(unread, stretch.seq_len)
            return PackedSampler(rest, whole, epoch, seed)

        epoch, unread = 0, None
        for stretch in self.before:
            assert stretch.samples is not None  # its phases have ended
            epoch, unread = make_sampler(stretch).unread(stretch.samples)
        return make_sampler(self.now)


@dataclass(frozen=True)
class PhaseReading:
    """The data that a phase reads.

    `sequences_before` counts the sequences of this blend in the directly preceding phases with the same
    data.path. `last_step` is the phase's last step, or None for the last phase.
    """
    phase: Phase
    mix: blend.Blend
    paths: tuple[str, ...]
    starts: tuple[SourceStart, ...]  # of each path
    sequences_before: int
    last_step: int | None

    def steps_from(self, step: int, count: int) -> range:
        """Return at most `count` steps of the phase, starting at `step` (from 0)."""
        return range(step, step + count if self.last_step is None else min(step + count, self.last_step))

    def sequences_left(self, count: int) -> int:
        """Return `count`, or the number of sequences that the phase reads if that is less."""
        if self.last_step is None:
            return count
        return min(count, sequences_seen(self.phase.cfg.train, self.last_step - self.phase.steps_before))


def read_phases(phases: Phases) -> list[PhaseReading]:
    """Return the data of each phase of a run. Raises ConfigError if a data.path cannot be parsed."""
    blends = [blend.parse_blend(phase.cfg.data.path) for phase in phases.all]
    char_sources = [named_sources(paths) for _, paths in blends]
    numbers: dict[Source, int] = {}
    for sources in char_sources:
        for source in sources:
            numbers.setdefault(source, len(numbers))

    before = sequences_before_phases(phases)
    segments = assign_segments(phases)
    stretches: dict[Source, list[Stretch]] = {source: [] for source in numbers}
    places: list[dict[Source, tuple[int, int]]] = []  # for each phase: {source: (stretch, samples before)}
    for phase, (mix, _), sources in zip(phases.all, blends, char_sources):
        places.append({})
        first = before[phase.number - 1]
        following = phases.after(phase)
        counts = [None] * len(sources)
        if following is not None:
            steps = following.steps_before - phase.steps_before
            end = first + sequences_seen(phase.cfg.train, steps)
            counts = [late - early for early, late in zip(mix.drawn(first), mix.drawn(end))]
        for source, count in zip(sources, counts):
            here = Stretch(segments[phase.number - 1], shuffle_span(phases, phase), phase.cfg.train.seq_len,
                           count)
            places[-1][source] = extend(stretches[source], here)

    readings: list[PhaseReading] = []
    for phase, (mix, paths), sources in zip(phases.all, blends, char_sources):
        first = before[phase.number - 1]
        starts: list[SourceStart] = []
        for source, drawn in zip(sources, mix.drawn(first)):
            index, samples = places[phase.number - 1][source]
            known = stretches[source]
            starts.append(SourceStart(numbers[source], tuple(known[:index]), known[index], samples - drawn))
        following = phases.after(phase)
        readings.append(PhaseReading(
            phase,
            mix,
            paths=tuple(paths),
            starts=tuple(starts),
            sequences_before=first,
            last_step=None if following is None else following.steps_before,
        ))
    return readings


def named_sources(paths: list[str]) -> list[Source]:
    return [(path, paths[:index].count(path)) for index, path in enumerate(paths)]


def extend(stretches: list[Stretch], here: Stretch) -> tuple[int, int]:
    """Add what a phase reads to the stretches of a source.

    Return (the index of the stretch, the samples in it before the phase).
    """
    last = stretches[-1] if stretches else None
    if last is None or last.segment != here.segment:
        stretches.append(here)
        return len(stretches) - 1, 0
    assert last.samples is not None  # the previous phase has ended
    stretches[-1] = replace(here, samples=None if here.samples is None else last.samples + here.samples)
    return len(stretches) - 1, last.samples


def assign_segments(phases: Phases) -> list[int]:
    """Return a segment number for each phase, equal for consecutive phases with the same sequence length."""
    found = [0]
    for phase, following in zip(phases.all, phases.all[1:]):
        is_same = phase.cfg.train.seq_len == following.cfg.train.seq_len
        found.append(found[-1] + (not is_same))
    return found


def sequences_before_phases(phases: Phases) -> list[int]:
    """Return for each phase the sequences of its blend in directly preceding phases with the same
    data.path."""
    found = [0]
    for phase, following in zip(phases.all, phases.all[1:]):
        steps = following.steps_before - phase.steps_before
        is_same = phase.cfg.data.path == following.cfg.data.path
        found.append(found[-1] + sequences_seen(phase.cfg.train, steps) if is_same else 0)
    return found
