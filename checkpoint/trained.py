"""Load the model of a checkpoint, for scripts that evaluate, generate, average and convert."""
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoint import state
from checkpoint.disk import store
from checkpoint.sizes import check_size
from checkpoint.state import TRAINED
from config import CheckpointConfig, Config, ConfigError, ParallelConfig, Tree
from config.reading.layout import RequestedLayout, layout_of_weights
from config.reading.schedules import get_schedule
from data import tokenizer
from data.prompts import Prompts, open_prompts
from data.tokenizer import Tokenizer
from model.precision import DTYPES
from model.router_states import RouterStates
from model.sharding import parallel_dims
from model.stages import get_hidden_shape, make_stages
from model.transformer import PipelineStage
from parallel.pipeline.executor import Pipeline
from parallel.sharding.boxes import Box
from parallel.sharding.spec import sharded_parameters
from parallel.sharding.zero import ZeroHooks
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from runtime.sharded_model import ShardedModel

Fill = Callable[[list[tuple[Box, Tensor]]], object]  # fills each tensor with the values of its box


@dataclass(frozen=True)
class TrainedModel(ShardedModel):
    """The weights of a checkpoint as pipeline stages, with the tokenizer they were trained with.

    known_tokenizer: None if the weights were imported without a
    tokenizer. is_chat: whether the model was trained on conversations.
    """
    known_tokenizer: Tokenizer | None
    path: Path
    step: int
    is_chat: bool = False

    @property
    def stage(self) -> PipelineStage:
        """The whole model. Raises ValueError if it is split over several ranks."""
        if self.mesh.world.size > 1:
            raise ValueError(f"{self.mesh.world.size} ranks hold parts of the model")
        return self.stages[0]

    @property
    def is_first_rank(self) -> bool:
        return self.mesh.rank == 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError if the weights were imported without one."""
        if self.known_tokenizer is None:
            raise ConfigError(f"--tokenizer: {self.path.parent.parent} has none, and text needs one; "
                              "give bytes, a .model, a tokenizer.json, or their folder")
        return self.known_tokenizer

    @cached_property
    def prompts(self) -> Prompts:
        """The encoder of prompts. Raises ConfigError like `tokenizer`, or if data.bos contradicts it."""
        return open_prompts(self.tokenizer, self.cfg.data.bos)


@torch.no_grad()
def weights_only(
    cfg: Config, device: torch.device, dtype: str
) -> tuple[PipelineStage, list[tuple[Box, Tensor]]]:
    """Build the full model in one process with zero weights. Returns it with [(box, tensor)] of its weights.

    It has no gradients and no master weights.
    """
    cfg = replace(cfg, train=replace(cfg.train, dtype=dtype), parallel=ParallelConfig())
    stages, boxes = weights_of_rank(cfg, Mesh.single(), device, rank_of_stage=(0,))
    return stages[0], boxes


@torch.no_grad()
def weights_of_rank(
    cfg: Config, mesh: Mesh, device: torch.device, rank_of_stage: tuple[int, ...]
) -> tuple[dict[int, PipelineStage], list[tuple[Box, Tensor]]]:
    """Build this rank's stages with zero weights, at most one per rank.

    Returns them with [(box, tensor)] of all weights and of the routers' biases. On the "meta" device the
    tensors carry only shapes and are not assigned to the stages.
    """
    stages = make_stages(cfg, mesh, rank_of_stage)
    boxes: list[tuple[Box, Tensor]] = []
    for stage in stages.values():
        stage.requires_grad_(False)
        for weight in sharded_parameters(stage):  # without duplicates, in forward order
            values = torch.zeros(weight.spec.shape, dtype=DTYPES[cfg.train.dtype], device=device)
            if device.type != "meta":
                weight.data = values
            boxes += weight.spec.split(values)
    routers = RouterStates(cfg, mesh, list(stages.values()), device)
    return stages, boxes + routers.boxes(weights=True)


@torch.no_grad()
def model_in_parts(cfg: Config, dtype: str, fill: Fill) -> PipelineStage:
    """Build the full model on the CPU, keeping the weights of only one part (PipelineStage.parts) in memory.

    `fill` loads the values of [(box, tensor)]. It is called once with the routers' biases, and before each
    forward of a part with the weights of that part.
    """
    cfg = replace(cfg, train=replace(cfg.train, dtype=dtype), parallel=ParallelConfig())
    stages = make_stages(cfg, Mesh.single(), rank_of_stage=(0,))
    fill(RouterStates(cfg, Mesh.single(), list(stages.values()), torch.device("cpu")).boxes(weights=True))

    def hold(part: nn.Module, _: object) -> None:
        boxes: list[tuple[Box, Tensor]] = []
        for weight in sharded_parameters(part):
            weight.data = torch.zeros(weight.spec.shape, dtype=DTYPES[dtype])
            boxes += weight.spec.split(weight.data)
        fill(boxes)

    def release(part: nn.Module, *_: object) -> None:
        for weight in sharded_parameters(part):
            weight.data = torch.empty(0)

    stages[0].requires_grad_(False)
    for part in stages[0].parts():
        part.register_forward_pre_hook(hold)
        part.register_forward_hook(release)
    return stages[0]


def load_run(
    where: str,
    device: torch.device,
    dtype: str | None = None,
    weights: str = TRAINED,
    tokenizer_spec: str | None = None,
    eod: str | None = None,
    *,
    world: World | None = None,
    layout: RequestedLayout = RequestedLayout(),
) -> TrainedModel:
    """Load the model of a run folder or of one of its checkpoint folders. Collective.

    dtype and tokenizer_spec default to those of the run. weights: one of checkpoint.state.WEIGHTS. eod: the
    end-of-document token, by default the one named in the tokenizer's files. world: the ranks to shard the
    model over, whatever layout saved it; by default this process alone. layout: the requested layout.

    Raises ConfigError if `where` contains no model or the ranks cannot shard it; IntegrityError, on all
    ranks, if the checkpoint is damaged.
    """
    world = world or World(device=device)
    everyone = world.all_ranks()

    def load(index: store.StoredIndex) -> TrainedModel:
        path, meta = index.path, index.meta
        cfg = layout_of_weights(config_to_compute(meta, dtype), world.size, layout)
        check_size(cfg.model, index.pieces, str(path))
        known_tokenizer = tokenizer_of_run(path, meta["tokenizer"], tokenizer_spec, eod)

        # build this rank's stage and load its weights
        mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
        schedule = get_schedule("gpipe", cfg.parallel.pp, 1, None)
        stages, boxes = weights_of_rank(cfg, mesh, device, schedule.rank_of_stage)
        state.fill_boxes(index, state.stored_as(index, boxes, weights), everyone, cfg.checkpoint.timeout_s)

        pipeline = Pipeline(
            mesh,
            schedule,
            stages=stages,
            zero_hooks={number: ZeroHooks.without_buckets() for number in stages},
            weight_grad_stores={},
            hidden_shape=get_hidden_shape(cfg, schedule.n_stages),
        )
        return TrainedModel(
            cfg=cfg,
            mesh=mesh,
            device=device,
            stages=stages,
            pipeline=pipeline,
            known_tokenizer=known_tokenizer,
            path=path,
            step=meta["step"],
            is_chat=meta.get("chat", False),
        )

    if world.size == 1:
        return load(state.find_index(where, []))
    return state.load_found(where, [], load, everyone, CheckpointConfig().timeout_s)


def config_to_compute(meta: Tree, dtype: str | None) -> Config:
    """Return the config of a checkpoint for inference. `dtype` defaults to that of the run."""
    cfg = state.build_config(meta)
    if dtype is None:
        dtype = "bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype  # fp8 runs store bf16 weights
    train = replace(cfg.train, dtype=dtype, fp8=None)
    return replace(cfg, train=train, parallel=ParallelConfig())


def tokenizer_of_run(
    path: Path, fingerprint: str, spec: str | None, eod: str | None = None
) -> Tokenizer | None:
    """Return the tokenizer `spec`, or the run folder's; None if the weights were imported without one.

    path: the checkpoint. fingerprint: that of the tokenizer it was trained with, or "none".
    Raises ConfigError if the tokenizer has another fingerprint.
    """
    folder = path.parent.parent / "tokenizer"
    if spec is None and fingerprint == "none" and not folder.is_dir():
        return None
    found = tokenizer.load_tokenizer(spec or folder, eod)
    if fingerprint not in (found.fingerprint, "none"):
        advice = "leave --tokenizer out" if spec else "put that one there"
        raise ConfigError(f"{spec or folder}: is not the tokenizer that {path} was trained with; {advice}")
    return found
