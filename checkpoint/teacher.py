"""The teacher of a run (distill.teacher): found and read as checkpoint.init_from is, laid out by the run's
ranks, and given to the output head (model/distill.py)."""
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from checkpoint import state
from checkpoint.disk import store
from checkpoint.made_by import with_teacher_input
from checkpoint.origin import TEACHER
from checkpoint.systems.foreign import check_copies, is_hf_folder
from checkpoint.systems.foreign_systems import is_ours, open_foreign
from config import Config, ConfigError, ModelConfig
from config.reading.teacher import teacher_config
from data.remote import is_url
from model.distill import Teacher
from model.router_states import RouterStates
from model.stages import make_stages
from model.transformer import PipelineStage
from parallel.sharding.bucket import Bucket, wait_param_gathers
from parallel.sharding.zero import ZeroHooks
from parallel.topology.mesh import Mesh
from runtime.run import TrainingRun


class Buckets(Protocol):
    """What build.make_buckets returns."""
    buckets: list[Bucket]
    hooks: dict[int, ZeroHooks]


MakeBuckets = Callable[[Config, Mesh, torch.device, dict[int, PipelineStage]], Buckets]


def add_teacher(run: TrainingRun, make_buckets: MakeBuckets) -> tuple[TrainingRun, list[str]]:
    """Give the output head of a run its teacher, on the ranks that have the head. Collective.

    make_buckets: build.py's. Returns the run, with the teacher in its provenance, and header lines. Raises
    ConfigError if there is no such model, if it is another than the run has had, if it has another tokenizer
    or vocabulary, or if these ranks cannot hold it.
    """
    world = run.mesh.world
    timeout_s = run.cfg.checkpoint.timeout_s
    start = state.choose_together(lambda: find_teacher(run.cfg), world, timeout_s, run.cfg.model)
    index = start.weights
    assert index is not None  # find_teacher raises if there is none
    made = state.run_on_first_rank(lambda: with_teacher_input(run, index).provenance, world, timeout_s)
    run = replace(run, provenance=made)
    cfg = teacher_config(run.cfg, state.source_model(index), index.path, world.size)
    buckets, routers = place_teacher(run, cfg, make_buckets)
    notes = state.take_weights(
        cfg, index, world, data=run.data, buckets=buckets, routers=routers, asker=TEACHER)
    wait_param_gathers(buckets)  # they are not part of a step, which may be computed again
    return run, [*start.notes, notes[0]]


def place_teacher(
    run: TrainingRun, cfg: Config, make_buckets: MakeBuckets
) -> tuple[list[Bucket], state.BoxedTensors]:
    """Give the output head of a run a teacher with initial weights, if this rank has the head.

    cfg: the teacher's. Returns its buckets and the biases of its routers.
    """
    heads = [stage.head for stage in run.stages.values() if stage.head is not None]
    stages = make_stages(cfg, run.mesh, rank_of_stage=(run.mesh.pp.index,)) if heads else {}
    made = make_buckets(cfg, run.mesh, run.device, stages)
    terms = torch.zeros(2, dtype=run.pipeline.loss_dtype, device=run.device)
    run.pipeline.loss_terms = terms  # on every rank, as ranks sum it with the loss
    routers = RouterStates(cfg, run.mesh, list(stages.values()), run.device)
    for head in heads:
        head.teacher = Teacher(run.cfg.distill, stages[0], made.hooks[0], made.buckets, terms)
    return made.buckets, routers.boxes(weights=True)


def read_model(cfg: Config) -> ModelConfig:
    """Return the model of distill.teacher. Raises ConfigError or IntegrityError."""
    index = find_teacher(cfg).weights
    assert index is not None  # find_teacher raises if there is none
    return state.source_model(index)


def find_teacher(cfg: Config) -> state.StartingPoint:
    """Return the weights that distill.teacher names, on rank 0. Checks only small files. Raises ConfigError
    or IntegrityError."""
    where = cfg.distill.teacher
    assert where is not None
    folder = Path(where)
    if not is_url(where) and is_hf_folder(folder):
        index = open_foreign(folder, cfg.model)
        check_copies(index)
        return state.StartingPoint(None, index, list(index.notes))
    if not is_url(where) and not is_ours(folder):
        raise ConfigError(f"{TEACHER}: {where} is neither a run, nor a checkpoint, nor a Hugging Face folder")
    notes: list[str] = []
    indexes: state.Indexes = {}
    check = state.kept_in(indexes, store.quick_check)
    found = state.find_checkpoint(where, notes, None, check, state.downloads_folder(cfg))
    return state.StartingPoint(None, indexes[found], notes)
