"""The pipeline schedules of a job: one for each number of microbatches that a step may have.

train.py, the planner and the proofs all get them here, so they refuse the same jobs in the same words.
"""
from collections.abc import Iterator
from functools import lru_cache

from config import Config, ConfigError, comma_separated, divisors, global_batch_sizes, positive_integers
from config.axes import axis_degrees, ranks_of_microbatch
from config.reading.phases import get_phases, named
from config.reading.rules import RULES_OF_PHASES, Rule, validate
from config.reading.suggestions import suggestion
from model.split import split_by_cost
from parallel.pipeline.schedule import Schedule, check_schedule, make_schedule


def plan_pipeline(cfg: Config, world: int, advise: bool = True, after: int = 0) -> Schedule:
    """Return the schedule of a step with the full train.global_batch, in the first phase.

    Also checks the smaller batches of a ramp, and every phase. Raises ConfigError for every setting that
    cannot run on `world` ranks. With `advise`, the error names values that can. Phases that are over after
    step `after` need no ranks.
    """
    first, *later = get_phases(cfg).from_step(after)
    if first.number > 1:
        for rules in RULES_OF_PHASES:
            broken = next((rule for rule in rules(cfg, world) if not rule.holds), None)
            if broken is not None:
                raise ConfigError(broken.message)
    with named(first):
        schedule = make_schedules(cfg if first.number == 1 else first.cfg, world, advise)[-1]
    for phase in later:
        with named(phase):
            make_schedules(phase.cfg, world, advise)
    return schedule


def make_schedules(cfg: Config, world: int, advise: bool = True) -> list[Schedule]:
    """Return a schedule for each number of microbatches that a step may have, in ascending order.

    Raises ConfigError like plan_pipeline.
    """
    schedules = schedules_or_broken_rule(cfg, world)
    if not isinstance(schedules, Rule):
        return schedules

    def can_run(other: Config) -> bool:
        return not isinstance(schedules_or_broken_rule(other, world), Rule)

    advice = suggestion(cfg, schedules, can_run) if advise else ""
    raise ConfigError(schedules.message + advice)


def schedules_or_broken_rule(cfg: Config, world: int) -> list[Schedule] | Rule:
    """Return the schedules of make_schedules, or the first rule that a run on `world` ranks breaks.

    Raises ConfigError if a value cannot be parsed.
    """
    broken = validate(cfg, world)
    if broken is not None:
        return broken
    schedules = batch_size_schedules(cfg, world)
    if isinstance(schedules, Rule):
        return schedules
    for rule in stage_rules(cfg, schedules[-1], world):
        if not rule.holds:
            return rule
    for schedule in schedules:
        check_once(schedule.kind, len(schedule.order), schedule.microbatches, schedule.chunks)
    return schedules


@lru_cache(maxsize=32)
def get_schedule(kind: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    """Return make_schedule, cached: many layouts of a search share a schedule.

    The cache is small: schedules for many ranks and microbatches take megabytes. Raises ValueError.
    """
    return make_schedule(kind, ranks, microbatches, chunks)


@lru_cache(maxsize=1024)
def check_once(kind: str, ranks: int, microbatches: int, chunks: int) -> None:
    """Check a schedule the first time it is requested. Raises ValueError if it cannot run."""
    schedule = get_schedule(kind, ranks, microbatches, chunks)
    check_schedule(schedule.order, schedule.n_stages, schedule.microbatches, schedule.rank_of_stage)


def batch_size_schedules(cfg: Config, world: int) -> list[Schedule] | Rule:
    """Return the schedules of make_schedules, not yet checked against the model.

    Returns the broken rule instead if the microbatches of a batch size do not fit the schedule.
    """
    parallel = cfg.parallel
    train = cfg.train
    dp = world // ranks_of_microbatch(axis_degrees(parallel))
    sequences = train.micro_batch * dp  # of a microbatch, on all ranks
    schedules: list[Schedule] = []
    # the full batch first: if no batch fits, the error names it and not the ramp
    for size in reversed(global_batch_sizes(train)):
        try:
            schedule = get_schedule(parallel.schedule, parallel.pp, size // sequences, parallel.vpp)
        except ValueError as error:
            if schedules:
                message = (
                    f"train.ramp: {train.ramp} has steps of {size} sequences, and parallel.schedule {error} "
                    "(microbatches = sequences / (train.micro_batch * dp))"
                )
                return Rule(False, message, ramp_unit=sequences)
            message = (
                f"parallel.schedule: {error} "
                "(microbatches = train.global_batch / (train.micro_batch * dp))"
            )
            return Rule(False, message)
        schedules.insert(0, schedule)
    return schedules


def stage_rules(cfg: Config, schedule: Schedule, world: int) -> Iterator[Rule]:
    """Check that every stage has a layer, and an entry in parallel.stages and parallel.recompute_stages."""
    parallel = cfg.parallel
    shape = f"{parallel.schedule} on {parallel.pp} ranks"
    yield Rule(
        schedule.n_stages <= cfg.model.layers,
        f"parallel.pp: {shape} makes {schedule.n_stages} stages, "
        f"model.layers is {cfg.model.layers}; lower parallel.pp or parallel.vpp",
        "parallel.pp",
        divisors(world),
    )

    sizes = positive_integers(parallel.stages)
    if parallel.stages and len(sizes) != schedule.n_stages:
        balanced = split_by_cost(cfg.model, schedule.n_stages, cfg.train.seq_len)
        example = ",".join(map(str, balanced))
        yield Rule(
            False,
            f"parallel.stages: {parallel.stages} cuts {len(sizes)} stages, "
            f"{shape} has {schedule.n_stages}; try parallel.stages {example}",
        )

    modes = comma_separated(parallel.recompute_stages)
    if modes:
        extended = modes + modes[-1:] * schedule.n_stages
        example = ",".join(extended[:schedule.n_stages])
        yield Rule(
            len(modes) == schedule.n_stages,
            f"parallel.recompute_stages: {len(modes)} modes, "
            f"{shape} has {schedule.n_stages} stages; try parallel.recompute_stages {example}",
        )
