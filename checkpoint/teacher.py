"""The teacher of a run (distill.teacher): found and read as checkpoint.init_from is, laid out by the run's
ranks, and given to the output head (model/distill.py)."""
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from checkpoint import state
from checkpoint.disk import store
from checkpoint.origin import TEACHER
from checkpoint.systems.foreign import check_copies, is_hf_folder
from checkpoint.systems.foreign_systems import is_ours, open_foreign
from config import (
    CheckpointConfig,
    Config,
    ConfigError,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    fp8_recipe,
    vocab_size,
)
from config.reading.function import differences
from config.reading.layout import find_teacher_problem
from data.remote import is_url
from model.distill import Teacher
from model.router import mixture
from model.router_states import RouterStates
from model.stages import make_stages
from model.transformer import PipelineStage
from parallel.sharding.bucket import Bucket
from parallel.sharding.zero import ZeroHooks
from parallel.topology.mesh import Mesh
from runtime.run import TrainingRun

FROZEN = "*: lr_factor 0"  # of optim.groups
OF_ONE_STAGE = {"pp": 1, "vpp": None, "schedule": "1f1b", "stages": None}
ONLY_COMPUTES = {  # what belongs to a backward, or loses bits of weights
    "recompute": "none",
    "recompute_stages": None,
    "offload": "none",
    "compress": "none",
    "compress_weights": "none",
    "ep_bound": None,  # rows over it would need another step
}
OF_EXPERTS = ("ep", "etp", "ep_chunks", "compress_tokens")


class Buckets(Protocol):
    """What build.make_buckets returns."""
    buckets: list[Bucket]
    hooks: dict[int, ZeroHooks]


MakeBuckets = Callable[[Config, Mesh, torch.device, dict[int, PipelineStage]], Buckets]


def add_teacher(run: TrainingRun, make_buckets: MakeBuckets) -> list[str]:
    """Give the output head of a run its teacher, on the ranks that have the head. Collective.

    make_buckets: build.py's. Returns header lines. Raises ConfigError if there is no such model, if it has
    another tokenizer or vocabulary, or if these ranks cannot hold it.
    """
    world = run.mesh.world
    timeout_s = run.cfg.checkpoint.timeout_s
    start = state.choose_together(lambda: find_teacher(run.cfg), world, timeout_s, run.cfg.model)
    index = start.weights
    assert index is not None  # find_teacher raises if there is none
    cfg = teacher_config(run.cfg, state.source_model(index), index.path, world.size)
    buckets, routers = place_teacher(run, cfg, make_buckets)
    notes = state.take_weights(
        cfg, index, world, data=run.data, buckets=buckets, routers=routers, asker=TEACHER)
    return [*start.notes, notes[0]]


def place_teacher(
    run: TrainingRun, cfg: Config, make_buckets: MakeBuckets
) -> tuple[list[Bucket], state.BoxedTensors]:
    """Give the output head of a run a teacher with initial weights, if this rank has the head.

    cfg: the teacher's. Returns its buckets and the biases of its routers.
    """
    heads = [stage.head for stage in run.stages.values() if stage.head is not None]
    stages = make_stages(cfg, run.mesh, rank_of_stage=(run.mesh.pp.index,)) if heads else {}
    made = make_buckets(cfg, run.mesh, run.device, stages)
    routers = RouterStates(cfg, run.mesh, list(stages.values()), run.device)
    for head in heads:
        head.teacher = Teacher(run.cfg.distill, stages[0], made.hooks[0], made.buckets)
    return made.buckets, routers.boxes(weights=True)


def read_teacher_config(cfg: Config, world: int) -> Config:
    """Return the teacher's config for a run on `world` ranks, whose weights are not read. Raises ConfigError.
    """
    index = find_teacher(cfg).weights
    assert index is not None  # find_teacher raises if there is none
    return teacher_config(cfg, state.source_model(index), index.path, world)


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


def teacher_config(cfg: Config, source: ModelConfig, path: Path, world: int) -> Config:
    """Return the config of the teacher under the layout of a run.

    source: the model of the weights at `path`. Raises ConfigError if it has another vocabulary, or if `world`
    ranks cannot hold it.
    """
    theirs, own = vocab_size(source), vocab_size(cfg.model)
    if theirs != own:
        remedy = f"set --model.vocab {theirs}" if theirs > own else "choose a teacher with the same tokenizer"
        raise ConfigError(f"{TEACHER}: {path} has {theirs:,} token ids, and model.vocab is {own:,}; {remedy}")
    model = replace(source, vocab_multiple=cfg.model.vocab_multiple, mtp=None, dropout=0.0)
    other = {key: getattr(ParallelConfig, key) for key in OF_EXPERTS} if mixture(model) is None else {}
    dtype = "bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype
    is_fp8 = fp8_recipe(cfg.train) is not None
    changes = ",".join(differences(source, model))
    teacher = replace(
        cfg,
        model=model,
        parallel=replace(cfg.parallel, **OF_ONE_STAGE, **ONLY_COMPUTES, **other),
        train=replace(cfg.train, dtype=dtype, **({"fp8": None, "fp8_block": None} if is_fp8 else {})),
        checkpoint=CheckpointConfig(init_changes=changes or None, timeout_s=cfg.checkpoint.timeout_s),
        optim=OptimConfig(groups=FROZEN),
    )
    problem = find_teacher_problem(teacher, world // cfg.parallel.pp)
    if problem is not None:
        raise ConfigError(f"{TEACHER}: {path} under the layout of the run: {problem}")
    return teacher
