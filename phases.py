"""Build the phase of a run that comes next, and load what it continues from (train.phases).

A run without phases is a single one.
"""
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from build import build_run, make_buckets, total_steps
from checkpoint import state
from checkpoint.made_by import describe_phase, describe_start, keep_provenance, other_code
from checkpoint.sizes import check_size
from config import Config, ConfigError, Tree
from config.reading import Phase, get_phases
from config.reading.phases import change_text, named, with_next_layout
from config.reading.schedules import make_schedules
from data.describe import describe_passes, describe_targets
from data.loader import BatchLoader, open_loader
from durable.advice import advised_on_memory
from durable.continue_from import (
    choose_start,
    drop_rows,
    is_evaluation_missing,
    rate_notes,
    repair_from_store,
)
from model.sharding import parallel_dims
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from plan.count import flops_per_token
from runtime import setup
from runtime.closing import trained_flops_per_token
from runtime.run import TrainingRun
from services import Services

if TYPE_CHECKING:  # imported only by runs with in-memory checkpoints
    from durable.memory import MemoryCheckpoints


def start_run(
    cfg: Config,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    in_memory: "MemoryCheckpoints | None" = None,
) -> tuple[TrainingRun, BatchLoader, state.StartingPoint, list[str]]:
    """The run of the phase that comes next, with what it continues.

    Returns (run, its valid split, what it has loaded, notes for the log). Collective.
    """
    root = folder / "checkpoints"
    phases = get_phases(cfg)
    everyone = world.all_ranks()
    left_out: list[str] = []  # validations

    def begins_elsewhere(start: state.StartingPoint) -> bool:
        """Whether no run of this folder has made the steps before the start."""
        if start.resumed is None or start.memory:
            return False
        return start.resumed.path.parent.resolve() != root.resolve()

    def phase_after(start: state.StartingPoint) -> tuple[int, Config]:
        """(its number, the config). Where an evaluation is missing, the phase before a boundary: it has its
        own validation, if it still can."""
        left_out.clear()
        here, following = phases.of_step(start.step), phases.of_step(start.step + 1)
        made_here = None if begins_elsewhere(start) else folder
        if here == following or not is_evaluation_missing(cfg, start.step, made_here, everyone):
            return following.number, cfg
        try:
            return here.number, config_to_validate(cfg, here, world)
        except ConfigError as error:
            left_out.append(f"the validation of step {start.step:,} is left out: {error}")
            return following.number, cfg

    repaired: dict[Path, str] = {}  # {checkpoint: a line that says so}

    def choose(bad: dict[Path, str]) -> state.StartingPoint:
        """choose_start, after a try to bring a damaged checkpoint from a store: one for each."""
        for path in [path for path in bad if path not in repaired]:
            is_good, repaired[path] = state.run_on_first_rank(
                lambda: repair_from_store(cfg, path, root), everyone, cfg.checkpoint.timeout_s
            )
            if is_good:
                del bad[path]
        start = choose_start(cfg, world, root, in_memory, bad)
        return replace(start, notes=[*filter(None, repaired.values()), *start.notes])

    start = choose({})
    may_be_large = bool(cfg.checkpoint.branch) and not start.memory
    if start.resumed is not None and may_be_large:  # its model is as large as the source says
        check_size(cfg.model, start.resumed.pieces, str(start.resumed.path))
    while True:
        number, whole = phase_after(start)
        with named(phases.all[number - 1]):
            run, valid_data = build_phase(whole, env, world, number)
        start, notes = state.resume(run, root, start, choose)
        if len(phases.all) == 1 or phase_after(start)[0] == number:
            if begins_elsewhere(start):
                state.run_on_first_rank(lambda: drop_rows(folder), everyone)
            if in_memory is not None:
                in_memory.drop_after(start.step)  # the run continues from this step alone
                if cfg.checkpoint.memory_every is None and not start.memory:
                    in_memory.clear()  # nothing will be saved there any more
            notes = [*other_code(start, env, folder), *notes, *rate_notes(run, start), *left_out]
            run = describe_start(run, valid_data, env, start, root)
            if start.step < run.phase_end:  # else it only validates
                run, about_teacher = with_teacher(run, world)
                notes += about_teacher
            return run, valid_data, start, notes
        run.data.close()  # the newest checkpoint is damaged, and the one before it is of an earlier phase


def config_to_validate(cfg: Config, phase: Phase, world: World) -> Config:
    """The config with which a phase that is over is validated: in its own layout, or that of the next one
    where these ranks cannot have it. Collective. Raises ConfigError if they have neither, or data is gone.
    """
    trouble: ConfigError | None = None
    for whole in (cfg, with_next_layout(cfg, phase.number)):
        try:
            make_schedules(get_phases(whole).all[phase.number - 1].cfg, world.size, advise=False)
        except ConfigError as error:
            trouble = trouble or error
            continue

        def open_once() -> None:
            for split in ("train", "valid"):
                open_loader(whole, split, 0, 1, phase=phase.number).close()

        state.run_on_first_rank(open_once, world.all_ranks(), cfg.checkpoint.timeout_s)
        return whole
    assert trouble is not None
    raise trouble


def build_phase(
    cfg: Config, env: setup.LaunchEnv, world: World, number: int
) -> tuple[TrainingRun, BatchLoader]:
    """The run of a phase with initial weights, and its valid split. Collective."""
    setup.seed_everything(cfg)
    phase = get_phases(cfg).all[number - 1]
    steps = total_steps(cfg, flops_per_token(cfg.model, cfg.train.seq_len, groups=cfg.optim.groups))
    mesh = connect(phase.cfg, world)
    train_data, valid_data = open_data(cfg, mesh, env.device, number)
    if mesh.dp.size > 1 and not train_data.every_target_counts:
        train_data.count_over(world.separate_group("loaders"))
    with advised_on_memory(phase.cfg, world):
        run = build_run(cfg, mesh, env.device, data=train_data, steps=steps, phase=number)
    return run, valid_data


def with_teacher(run: TrainingRun, world: World) -> tuple[TrainingRun, list[str]]:
    """Give the run its teacher, if it has one (distill.teacher). Collective. Returns (run, header lines)."""
    if run.cfg.distill.teacher is None:
        return run, []
    from checkpoint.teacher import add_teacher

    with advised_on_memory(run.cfg, world):
        return add_teacher(run, make_buckets)


def connect(cfg: Config, world: World) -> Mesh:
    """The groups of this rank. Collective: every rank calls it."""
    return Mesh.bind(parallel_dims(cfg, world.size), world)


def open_data(
    cfg: Config, mesh: Mesh, device: torch.device, phase: int = 1
) -> tuple[BatchLoader, BatchLoader]:
    """This rank's part of the train and the valid split of a phase."""
    train_data = open_loader(cfg, "train", mesh.dp.index, mesh.dp.size, device=device, phase=phase)
    valid_data = open_loader(cfg, "valid", mesh.dp.index, mesh.dp.size, device=device, phase=phase)
    return train_data, valid_data


def build_next_phase(
    services: Services, step: int, start: state.StartingPoint, provenance: Tree
) -> tuple[TrainingRun, BatchLoader]:
    """(the run of the phase after `step`, which is saved; its valid split). Collective.

    start: what this process has begun with. provenance: that of the phase that ended.
    """
    root = services.folder / "checkpoints"
    phases = get_phases(services.cfg)
    before, phase = phases.of_step(step), phases.of_step(step + 1)
    run, valid_data = build_phase(services.cfg, services.env, services.world, phase.number)
    run = describe_phase(run, valid_data, provenance, step)
    if step == start.step:  # it has only validated: the step may be another run's, or in memory
        state.load_start(run, root, start)
    else:
        state.resume_after(run, root, step)
    run, _ = with_teacher(run, services.world)
    services.observe("run.built", step, run=run, data=run.data, valid=valid_data)
    services.log.begin_phase(phase, trained_flops_per_token(run), change_text(before, phase))
    if services.env.rank == 0:
        texts = {
            "targets": describe_targets(run.data, run.phase_end, valid_data, run.cfg.eval.batches),
            "epochs": describe_passes(run.data, run.phase_end),
        }
        for name, text in texts.items():
            if text:
                services.log.log_line(f"{name}: {text}")
    for warning in keep_provenance(run, services.env, services.folder):
        services.log.log_line(warning)
    return run, valid_data
