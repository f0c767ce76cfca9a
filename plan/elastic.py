"""The layout of a run on another number of ranks than its settings were made for (parallel.elastic).

The global batch, the samples of each step and their order are unchanged; only their placement changes. In
this order:
1. The settings as they are: the data-parallel axis is derived from the world size.
2. The same tp, pp, cp and ep, with fewer replicas (parallel.dp_rep) or a smaller train.micro_batch, if the
   global batch is not a multiple of the given micro-batch on that many ranks.
3. If the fullest rank would exceed its GPU by the planner's count, as may happen with fewer ranks under ZeRO:
   the planner's fastest layout (plan/search.py) with those degrees, which may recompute, shard more or use a
   smaller micro-batch.
4. The planner's fastest layout with any degrees.

The result only depends on the config, the world, the kind of GPU and the number of steps done (phases in the
past need no layout), so all ranks choose the same.
"""
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from config import Config, ConfigError, divisors, read_yaml
from config.axes import AXES, axis_degrees, ranks_of_microbatch
from config.reading import CONFIG_FOLDER, Phase, get_phases
from config.reading.phases import with_values_from
from config.reading.run_name import ELASTIC_KEYS, KEYS_OF_STAGES
from config.reading.schedules import plan_pipeline
from config.tree import value_at, with_values
from config.values import Values
from model.sharding import parallel_dims
from plan.advice import size_text
from plan.cost import Cluster, cluster
from plan.efficiency import get_efficiency
from plan.job import UNBOUNDED_MEMORY, RankDevice
from plan.machine import Machine
from plan.search import Target, held_bytes, make_job, search

NOMINAL_VOCAB = 32768  # used for memory if the vocabulary still has to be read from the data
NUM_TRIED = 16  # of the planner, if later phases constrain the choice
NUM_SIZES = 4  # numbers of ranks named in an error
# A machine without measurements: only the ratios of its rates matter for the order of layouts.
UNKNOWN_RATES = {
    "flops": 1e12,
    "attention_flops": 5e11,
    "stream": 1e11,
    "link": 1e10,
    "hop": 2e-5,
    "operation": 1e-5,
}
OF_STAGES: Values = dict.fromkeys(KEYS_OF_STAGES)  # all unset


class ElasticLayout(NamedTuple):
    """cfg: with the layout. changed: {section.key: value} that differ from the given settings, from the next
    phase on; phase: its config, with the layout. by_planner: whether the planner chose the degrees.
    too_large: bytes that the fullest rank would hold with the given degrees, if that exceeds a GPU; else
    0."""

    cfg: Config
    phase: Config
    changed: Values
    by_planner: bool = False
    too_large: int = 0


def fits(cfg: Config, world: int, after: int = 0) -> bool:
    """Return whether train.py accepts the config on `world` ranks, after `after` steps."""
    try:
        plan_pipeline(cfg, world, advise=False, after=after)
    except ConfigError:
        return False
    return True


def get_next_phase(cfg: Config, after: int) -> Phase:
    """Return the phase in which a run continues after `after` steps: its layout is the given one."""
    return get_phases(cfg).from_step(after)[0]


# ---- the same axes -----------------------------------------------------------------------------------------


def same_axes(cfg: Config, world: int, after: int = 0) -> ElasticLayout | None:
    """Return the layout with the given tp, pp, cp and ep, or None if there is none on that many ranks."""
    phase = get_next_phase(cfg, after)
    for changed in same_axes_changes(phase.cfg):
        changed_cfg = with_values_from(cfg, phase.number, changed)
        if fits(changed_cfg, world, after):
            return ElasticLayout(changed_cfg, with_values(phase.cfg, changed), changed)
    return None


def same_axes_changes(cfg: Config) -> Iterator[Values]:
    """Yield the values that may be reduced, the smallest change first; {} changes nothing."""
    for micro_batch in reversed(divisors(cfg.train.micro_batch)):
        for dp_rep in reversed(divisors(cfg.parallel.dp_rep)):
            values = {"train.micro_batch": micro_batch, "parallel.dp_rep": dp_rep}
            given = {"train.micro_batch": cfg.train.micro_batch, "parallel.dp_rep": cfg.parallel.dp_rep}
            yield {key: value for key, value in values.items() if value != given[key]}


# ---- the planner's -----------------------------------------------------------------------------------------


def planned(
    cfg: Config, world: int, device: RankDevice, fixed: Sequence[str] = (), *, after: int = 0
) -> ElasticLayout | None:
    """Return the planner's fastest layout that fits into memory, or None. `fixed` keys are kept."""
    target = get_target(cfg, world, device)
    phase = get_next_phase(cfg, after)
    given = cfg if phase.number == 1 else phase.cfg  # with its phases, the search finds what suits all
    whole = with_values(with_any_vocab(given), OF_STAGES)
    top = 1 if phase.number == 1 else NUM_TRIED
    found = search(whole, target, fixed={key: value_at(given, key) for key in fixed}, top=top).found
    for each in found:
        values = {key: value_at(each.cfg, key) for key in ELASTIC_KEYS} | OF_STAGES
        changed = {key: value for key, value in values.items() if value != value_at(given, key)}
        changed_cfg = with_values_from(cfg, phase.number, changed)
        if fits(changed_cfg, world, after) and not excess_bytes(changed_cfg, world, device, after):
            return ElasticLayout(changed_cfg, with_values(phase.cfg, changed), changed, by_planner=not fixed)
    return None  # train.py refuses it, or a later phase (train.phases) needs more


def with_any_vocab(cfg: Config) -> Config:
    """Return the config with a vocabulary size, which the planner needs: a typical one if it still has to be
    read from the data."""
    return replace(cfg, model=replace(cfg.model, vocab=cfg.model.vocab or NOMINAL_VOCAB))


def memory_of_fullest_rank(cfg: Config, world: int, device: RankDevice, after: int = 0) -> int:
    """Return the planner's bytes of the fullest rank in its fullest phase, or 0 for an unsupported job."""
    gpu = get_target(cfg, world, device).gpu
    most = 0
    for phase in get_phases(with_any_vocab(cfg)).from_step(after):
        with contextlib.suppress(ConfigError):
            job, _ = make_job(phase.cfg, world)
            most = max(most, held_bytes(job, gpu).total)
    return most


def excess_bytes(cfg: Config, world: int, device: RankDevice, after: int = 0) -> int:
    """Return the planner's bytes of the fullest rank if its GPU has fewer, else 0."""
    if device.memory >= UNBOUNDED_MEMORY:
        return 0
    held = memory_of_fullest_rank(cfg, world, device, after)
    return held if held > device.memory else 0


def get_target(cfg: Config, world: int, device: RankDevice) -> Target:
    """Return the planner's target: a cluster of these GPUs, from configs/clusters.yaml if it has one."""
    known = known_cluster(device)
    if known is not None and cfg.train.dtype in known.flops:
        return Target(world, replace(known, memory=device.memory), get_efficiency(known))
    machine = Machine(ranks=world, dtype=cfg.train.dtype, **UNKNOWN_RATES)
    return Target(world, replace(machine.as_cluster(), memory=device.memory), machine.as_efficiency())


def known_cluster(device: RankDevice) -> Cluster | None:
    """Return the cluster with this GPU whose memory is closest, or None."""
    clusters = [cluster(name) for name in read_yaml(CONFIG_FOLDER / "clusters.yaml")["clusters"]]
    alike = [each for each in clusters if each.gpu in device.gpu.lower()]
    return min(alike, key=lambda each: abs(each.memory - device.memory), default=None)


def check_phases(cfg: Config, after: int) -> None:
    """Raise ConfigError if a later phase sets what the number of ranks determines."""
    first, *later = get_phases(cfg).from_step(after)
    for phase in later:
        for key in ELASTIC_KEYS:
            if value_at(phase.cfg, key) != value_at(first.cfg, key):
                raise ConfigError(
                    f"parallel.elastic: no layout on these ranks, where a phase sets {key} (train.phases); "
                    "leave it out there, so that it can follow the number of ranks"
                )


# ---- the choice --------------------------------------------------------------------------------------------


def layout_for(cfg: Config, world: int, device: RankDevice, after: int = 0) -> ElasticLayout:
    """Return the layout of the run on `world` ranks, for the phases not over after `after` steps.

    Raises ConfigError, as without parallel.elastic, naming the numbers of ranks that would work.
    """
    given = same_axes(cfg, world, after)
    too_large = 0 if given is None else excess_bytes(given.cfg, world, device, after)
    if given is not None and not too_large:
        return given
    degrees = get_degree_keys(get_next_phase(cfg, after).cfg)
    layout = None if given is None else planned(cfg, world, device, degrees, after=after)
    layout = layout or planned(cfg, world, device, after=after)
    if layout is not None:
        return layout._replace(too_large=too_large)

    # explain why there is none
    check_phases(cfg, after)
    sizes = ", ".join(map(str, legal_sizes(cfg, world, device, after)))
    if given is not None:
        raise ConfigError(
            f"parallel.elastic: no layout on {world} rank{'s' if world > 1 else ''} fits into the "
            f"{size_text(device.memory)} of a GPU "
            f"(the given axes would take {size_text(too_large)} of it): start {sizes or 'more'} ranks"
        )
    try:
        plan_pipeline(cfg, world, advise=False, after=after)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; parallel.elastic finds no layout for {world} ranks: start {sizes or 'more'} ranks, "
            "or another train.global_batch"
        ) from None
    raise ConfigError(f"parallel.elastic: no layout on {world} ranks fits into the memory of a GPU")


def get_degree_keys(cfg: Config) -> list[str]:
    """Return the keys that are kept with the given axes; for a pipeline also its schedule."""
    degrees = [f"parallel.{axis.key}" for axis in AXES if axis.key != "dp_rep"] + ["parallel.sp"]
    return [*degrees, "parallel.schedule", "parallel.vpp"] if cfg.parallel.pp > 1 else degrees


def legal_sizes(
    cfg: Config, world: int, device: RankDevice = RankDevice(), after: int = 0
) -> list[int]:
    """Return numbers of ranks near `world` on which the given axes run and fit in memory, in order."""
    phase = get_next_phase(cfg, after).cfg
    unit = ranks_of_microbatch(axis_degrees(phase.parallel))
    last = max(world, unit * phase.train.global_batch)  # any more ranks have no sequence
    sizes = range(unit, min(last, 2 * max(world, unit)) + 1, unit)
    nearest_first = sorted(sizes, key=lambda size: abs(size - world))
    results: list[int] = []
    for size in nearest_first:
        if len(results) == NUM_SIZES:
            break
        layout = same_axes(cfg, size, after)
        if layout is not None and not excess_bytes(layout.cfg, size, device, after):
            results.append(size)
    return sorted(results)


def most_ranks(cfg: Config, least: int, most: int, after: int = 0) -> int | None:
    """Return how many of least to most ranks a launch can use: as many as the given axes can use, or else as
    many as any layout can, regardless of memory. None if no layout exists for any of them."""
    downwards = range(most, least - 1, -1)
    any_layout = partial(planned, device=RankDevice())
    for layout_of in (same_axes, any_layout):
        for world in downwards:
            if layout_of(cfg, world, after=after) is not None:
                return world
    return None


# ---- in words ----------------------------------------------------------------------------------------------


def to_text(cfg: Config, world: int, after: int = 0) -> str:
    """Format as "4 ranks (dp2 tp2)" for the given axes, or say that the planner chooses."""
    layout = same_axes(cfg, world, after)
    if layout is None:
        return f"{world} rank{'s' if world > 1 else ''} (the planner's layout)"
    return parallel_dims(layout.phase, world).to_text()


def describe(layout: ElasticLayout, world: int) -> str:
    """Return one line with the choice and its differences from the given settings, or "" without any."""
    if not layout.changed:
        return ""
    settings = " ".join(f"--{key} {str(value).lower()}" for key, value in layout.changed.items())
    source = "the planner's layout" if layout.by_planner else "the given axes"
    why = ""
    if layout.too_large:
        why = f", because the given settings would take {size_text(layout.too_large)} of a GPU by the planner"
    return f"elastic: {parallel_dims(layout.phase, world).to_text()}, {source}, with {settings}{why}"
