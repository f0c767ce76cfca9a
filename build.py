"""A config -> a TrainingRun: all that a step needs, made once.

Used by train.py, and by scripts that evaluate, generate and convert.
"""
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from checkpoint import state, store
from checkpoint.folder import StoredPiece
from checkpoint.state import TRAINED
from config import (
    OPTIMIZERS,
    CheckpointConfig,
    Config,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    Tree,
    config_of_stage,
    layer_models,
)
from config.reading import Phase, Phases, phases_of
from config.reading.layout import AskedLayout, layout_of_weights
from config.reading.schedules import make_schedules, schedule_of
from config.tree import has_path
from data import tokenizer
from data.loader import BatchLoader
from data.prompts import Prompts, open_prompts
from data.task_scores import Score, TextRow, score_rows
from data.tokenizer import Tokenizer
from model.context import GenerationCache
from model.generate import pipeline_logits
from model.precision import DTYPES
from model.router import mixture
from model.router_states import RouterStates
from model.score import pipeline_scores
from model.sharding import parallel_dims, scale_for_mup, sharding_config
from model.shared_keys import widths_between_stages
from model.split import layers_of_stages
from model.transformer import PipelineStage
from optim.base import Optimizer
from optim.lr import learning_rate_of_run, schedules_of
from optim.scaler import LossScaler
from optim.spikes import SpikeState
from parallel.extras import Extra, Extras
from parallel.offload import ActivationOffload, copy_stream
from parallel.pipeline.executor import HiddenShape, Pipeline, WeightGradStore
from parallel.pipeline.schedule import Op
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket, split_into_buckets
from parallel.sharding.spec import ShardedParameter, sharded_parameters
from parallel.sharding.zero import ZeroScheduler
from parallel.topology.mesh import Mesh
from parallel.wire.world import World

if TYPE_CHECKING:  # a run that asks for none of them loads none of them
    from optim.ema import WeightEMA
    from optim.noise import GradientNoiseScale
    from runtime.graphs import RecordedPipeline

Fill = Callable[[list[tuple[Box, Tensor]]], object]  # gives tensors the values of their boxes
SIZE_MARGIN = 2  # a size of a model beyond this times what is stored is refused before anything is made


@dataclass(frozen=True)
class TrainingRun:
    """All that a step needs.

    phases: of the whole run. phase: the present one, and cfg is its config.
    """
    cfg: Config
    phases: Phases
    phase: Phase
    mesh: Mesh
    device: torch.device
    loader: BatchLoader | None  # the train split; None if the caller has its own microbatches
    stages: dict[int, PipelineStage]  # of this rank, by number
    buckets: list[Bucket]  # of this rank's parameters
    optim: Optimizer
    pipeline: Pipeline
    schedules: dict[int, list[Op]]  # {number of microbatches of a step: this rank's ops}
    steps: int  # the horizon
    routers: RouterStates  # what a mixture's routers keep beside their weights
    scaler: LossScaler  # of the loss, in fp16
    spikes: SpikeState  # which steps are not applied (optim.spike_sigma), and which data is left out
    extras: Extras  # what a step has beside the plain one
    noise_scale: "GradientNoiseScale | None" = None  # of these extras, for the log (log.noise_scale)
    ema: "WeightEMA | None" = None  # of these extras, for checkpoints and evaluations (train.ema)
    recording: "RecordedPipeline | None" = None  # runs in place of the pipeline (train.cuda_graphs)
    provenance: Tree = field(default_factory=dict)  # what makes the run, for its checkpoints

    @property
    def data(self) -> BatchLoader:
        """The train split. Raises ValueError if the run was built without."""
        if self.loader is None:
            raise ValueError("the run was built without data")
        return self.loader

    @property
    def last_step(self) -> int:
        """The last step of this phase."""
        return self.phases.last_step(self.phase, self.steps)

    def with_extras(self, *extras: Extra) -> "TrainingRun":
        """The run with these behind its own."""
        return replace(self, extras=Extras((*self.extras, *extras)))

    def learning_rate(self, step: int) -> float:
        """Of step number `step` (from 1), before the factors of single parameters."""
        return learning_rate_of_run(schedules_of(self.phases, self.steps), step)

    def logits(
        self, tokens: Tensor, positions: Tensor, cache: GenerationCache | None, position: int
    ) -> Tensor:
        """Logits [vocab] of the token at `position` of tokens [1, s], on every rank."""
        return pipeline_logits(
            self.pipeline,
            self.stages,
            tokens,
            positions,
            cache=cache,
            position=position,
        )

    def score(self, rows: Sequence[TextRow]) -> list[Score]:
        """The scores of texts, the same on every rank. Ranks of dp and cp divide them. Collective."""
        def forward(tokens: Tensor, targets: Tensor) -> Tensor | None:
            return pipeline_scores(self.pipeline, self.stages, tokens, targets)

        train = self.cfg.train
        return score_rows(
            rows,
            forward,
            batch_tokens=train.micro_batch * train.seq_len,
            device=self.device,
            multiple=self.pipeline.hidden_shape.sequence_shards,
            replicas=self.mesh.dp_cp,
            stages=self.mesh.pp,
        )


def with_vocab(cfg: Config, vocab: int) -> Config:
    """The config with the tokenizer's vocabulary, unless it asks for a larger one.

    Raises ConfigError if it asks for a smaller one.
    """
    if cfg.model.vocab is None:
        return replace(cfg, model=replace(cfg.model, vocab=vocab))
    if cfg.model.vocab < vocab:
        raise ConfigError(
            f"model.vocab: {cfg.model.vocab} is smaller than the tokenizer's {vocab} ids; "
            "raise it, or leave it out"
        )
    return cfg


def total_steps(cfg: Config, flops_per_token: float) -> int:
    """train.steps, or the steps of train.tokens or train.flops, rounded up.

    Raises ConfigError if none is set.
    """
    train = cfg.train
    if train.steps:
        return train.steps
    tokens = train.tokens
    if not tokens:
        if not train.flops:
            raise ConfigError("train.steps: give exactly one of train.steps, train.tokens, train.flops")
        tokens = train.flops / flops_per_token
    return phases_of(cfg).steps_to_see(tokens)


# ---- stages and buckets ------------------------------------------------------------------------------------


def hidden_shape_of(cfg: Config, stages: int) -> HiddenShape:
    """Of what travels between the stages."""
    return HiddenShape(
        widths=widths_between_stages(cfg, layers_of_stages(cfg, stages)),
        dtype=DTYPES[cfg.train.dtype],
        sequence_shards=cfg.parallel.tp if cfg.parallel.sp else 1,
    )


def make_stages(cfg: Config, mesh: Mesh, rank_of_stage: tuple[int, ...]) -> dict[int, PipelineStage]:
    """This rank's stages, without storage. rank_of_stage: the rank of each stage."""
    layers = layers_of_stages(cfg, len(rank_of_stage))
    ends_are_apart = rank_of_stage[0] != rank_of_stage[-1]
    stages: dict[int, PipelineStage] = {}
    for number, rank in enumerate(rank_of_stage):
        if rank != mesh.pp.index:
            continue
        first, last = layers[number]
        embedding = stages[0].embedding if 0 in stages else None
        table = None if embedding is None else embedding.weight
        stage = PipelineStage(
            config_of_stage(cfg, number),
            mesh,
            first,
            last,
            table=table,
            ends_are_apart=ends_are_apart,
        )
        scale_for_mup(cfg, stage)
        stages[number] = stage
    return stages


@dataclass(frozen=True)
class StageBuckets:
    """The storage of this rank's stages, and when it is exchanged."""
    buckets: list[Bucket]  # of all parts of this rank, each once
    schedulers: dict[int, ZeroScheduler]  # of each stage, by its number


def make_buckets(
    cfg: Config, mesh: Mesh, device: torch.device, stages: dict[int, PipelineStage]
) -> StageBuckets:
    """Storage and initial weights for the stages, and ZeRO attached to them. Sends nothing.

    A table that the first and the last stage need has a bucket of its own, so that both ends of a pipeline
    divide it into the same shards.
    """
    sharding = sharding_config(cfg)
    dtype = DTYPES[cfg.train.dtype]
    bucket_of: dict[int, Bucket] = {}  # by the id of a parameter
    buckets: list[Bucket] = []
    schedulers: dict[int, ZeroScheduler] = {}
    for number, stage in stages.items():
        buckets_of_parts: list[list[Bucket]] = []
        for part in stage.parts():
            params = list(sharded_parameters(part))
            for group in without_storage(params, stage.shared_table(), bucket_of):
                for members in split_into_buckets(group, sharding):
                    bucket = Bucket(members, mesh, sharding, dtype=dtype, device=device, seed=cfg.train.seed)
                    buckets.append(bucket)
                    bucket_of.update({id(param): bucket for param in members})
            found = [bucket_of[id(param)] for param in params]
            buckets_of_parts.append(list(dict.fromkeys(found)))
        schedulers[number] = ZeroScheduler(
            buckets_of_parts,
            first_is_embedding=stage.embedding is not None,
            last_is_head=stage.head is not None,
        )
        schedulers[number].attach(stage.parts())
    return StageBuckets(buckets, schedulers)


def without_storage(
    params: list[ShardedParameter], shared_table: ShardedParameter | None, bucket_of: dict[int, Bucket]
) -> list[list[ShardedParameter]]:
    """The parameters that are in no bucket yet: [the shared table alone, the others]."""
    new = [param for param in params if id(param) not in bucket_of]
    shared = [param for param in new if param is shared_table]
    others = [param for param in new if param is not shared_table]
    return [shared, others]


# ---- a run -------------------------------------------------------------------------------------------------


def build_run(
    cfg: Config,
    mesh: Mesh,
    device: torch.device,
    data: BatchLoader | None,
    steps: int,
    phase: int = 1,
) -> TrainingRun:
    """The run of a config on this rank, with initial weights. data: the train split, if the run reads one.

    phase: the number of the phase of train.phases whose steps it makes; each has a run of its own.

    Raises ConfigError before anything is allocated. Collective with Muon, LAMB and LARS: ranks tell each
    other what they hold. With other optimizers it sends nothing.
    """
    phases = phases_of(cfg)
    cfg = phases.all[phase - 1].cfg
    check_device(cfg, device)
    schedules = make_schedules(cfg, mesh.world.size)
    schedule = schedules[-1]

    # model
    stages = make_stages(cfg, mesh, schedule.rank_of_stage)
    made = make_buckets(cfg, mesh, device, stages)
    weight_grad_stores = {number: WeightGradStore() for number in stages}
    for number, stage in stages.items():
        for weight in sharded_parameters(stage):
            weight.weight_grad_store = weight_grad_stores[number]

    # pipeline
    dtype = DTYPES[cfg.train.dtype]
    copies = copy_stream(device, mesh.is_strict)
    offloads_activations = cfg.parallel.offload in ("activations", "both")
    pipeline = Pipeline(
        mesh,
        schedule,
        stages=stages,
        zero_schedulers=made.schedulers,
        weight_grad_stores=weight_grad_stores,
        hidden_shape=hidden_shape_of(cfg, schedule.n_stages),
        offload=ActivationOffload(device, copies) if offloads_activations else None,
    )
    ops = {one.microbatches: one.with_transfers[mesh.pp.index] for one in schedules}
    spikes = SpikeState(cfg.optim, device, mesh.world)
    beside = extras_of_step(cfg, made.buckets, mesh, spikes)

    return TrainingRun(
        cfg=cfg,
        phases=phases,
        phase=phases.all[phase - 1],
        mesh=mesh,
        device=device,
        loader=data,
        stages=stages,
        buckets=made.buckets,
        optim=optimizer_class(cfg.optim.name)(cfg.optim, made.buckets, mesh),
        pipeline=pipeline,
        schedules=ops,
        steps=steps,
        routers=RouterStates(cfg, mesh, list(stages.values()), device),
        scaler=LossScaler(dtype, device, cfg.train.loss_scale, cfg.train.loss_scale_window),
        spikes=spikes,
        extras=beside.extras,
        noise_scale=beside.noise_scale,
        ema=beside.ema,
        recording=recording_of(pipeline, device, made.buckets) if cfg.train.cuda_graphs else None,
    )


class StepExtras(NamedTuple):
    """What a step has beside the plain one, in the order of the calls; two of them also by name."""
    extras: Extras
    noise_scale: "GradientNoiseScale | None"
    ema: "WeightEMA | None"


def extras_of_step(cfg: Config, buckets: list[Bucket], mesh: Mesh, spikes: SpikeState) -> StepExtras:
    """What the config asks for beside the plain step. train.py adds what the loop has beside it."""
    extras: list[Extra] = []
    noise_scale: GradientNoiseScale | None = None
    ema: WeightEMA | None = None

    is_rerun = cfg.train.rerun_every is not None or cfg.train.rerun_suspects
    if is_rerun:
        from runtime.rerun import StepRecorder, StepReruns

        recorder = StepRecorder(cfg.train, buckets, mesh)  # before others send something at judge()
        extras.append(recorder)
    if cfg.optim.spike_sigma is not None:
        extras.append(spikes)
    if is_rerun:
        extras.append(StepReruns(cfg.train, recorder, mesh))  # behind what may call a step suspect
    if cfg.log.noise_scale:
        from optim.noise import GradientNoiseScale

        noise_scale = GradientNoiseScale(buckets, mesh)
        extras.append(noise_scale)
    if cfg.train.ema is not None:
        from optim.ema import WeightEMA

        ema = WeightEMA(cfg.train.ema, buckets, mesh)
        extras.append(ema)
    return StepExtras(Extras(extras), noise_scale, ema)


def recording_of(pipeline: Pipeline, device: torch.device, buckets: list[Bucket]) -> "RecordedPipeline":
    from runtime.graphs import RecordedPipeline

    return RecordedPipeline(pipeline, device, buckets)


def optimizer_class(name: str) -> type[Optimizer]:
    """The class that config/optimizers.py names."""
    return pkgutil.resolve_name(OPTIMIZERS[name].implementation)


def check_device(cfg: Config, device: torch.device) -> None:
    """Raises ConfigError if the device cannot run the config."""
    if cfg.train.dtype != "fp8" or device.type != "cuda":
        return
    if torch.version.hip:
        raise ConfigError("train.dtype: fp8 has NVIDIA's formats, and chips under ROCm have others "
                          "(e4m3fnuz) or have not been tried; use bf16")
    if torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"train.dtype: {name} has no fp8 (chips from sm_89 on have); use bf16")


# ---- a trained model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedModel:
    """The weights of a checkpoint in stages, with the tokenizer that they were trained with.

    stages: of this rank, by number; one process has the only one. known_tokenizer: None of weights that were
    imported without one. is_chat: was it trained on conversations?
    """
    cfg: Config
    mesh: Mesh
    stages: dict[int, PipelineStage]
    pipeline: Pipeline
    device: torch.device
    known_tokenizer: Tokenizer | None
    path: Path
    step: int
    is_chat: bool = False

    @property
    def stage(self) -> PipelineStage:
        """The whole model. Raises ValueError where ranks hold parts of it."""
        if self.mesh.world.size > 1:
            raise ValueError(f"{self.mesh.world.size} ranks hold parts of the model")
        return self.stages[0]

    @property
    def is_first_rank(self) -> bool:
        return self.mesh.rank == 0

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError if the weights were imported without one."""
        if self.known_tokenizer is None:
            raise ConfigError(f"--tokenizer: {self.path.parent.parent} has none, and text needs one; "
                              "give bytes, a .model, a tokenizer.json, or their folder")
        return self.known_tokenizer

    @cached_property
    def prompts(self) -> Prompts:
        """Turns texts into what the model reads. Raises ConfigError as `tokenizer` does, or if data.bos
        contradicts the tokenizer."""
        return open_prompts(self.tokenizer, self.cfg.data.bos)

    def logits(
        self, tokens: Tensor, positions: Tensor, cache: GenerationCache | None, position: int | None
    ) -> Tensor:
        """Logits [vocab] of a position of tokens [1, s], or [b, s, vocab] without one. Collective."""
        return pipeline_logits(
            self.pipeline,
            self.stages,
            tokens,
            positions,
            cache=cache,
            position=position,
        )

    def score(self, rows: Sequence[TextRow]) -> list[Score]:
        """The scores of texts, the same on every rank. Collective."""
        def forward(tokens: Tensor, targets: Tensor) -> Tensor | None:
            return pipeline_scores(self.pipeline, self.stages, tokens, targets)

        train = self.cfg.train
        return score_rows(
            rows,
            forward,
            batch_tokens=train.micro_batch * train.seq_len,
            device=self.device,
            stages=self.mesh.pp,
        )


@torch.no_grad()
def weights_only(
    cfg: Config, device: torch.device, dtype: str
) -> tuple[PipelineStage, list[tuple[Box, Tensor]]]:
    """The full model in one process with zeros for weights, and [(box, tensor)] of all of them.

    It has no gradients and no master weights.
    """
    cfg = replace(cfg, train=replace(cfg.train, dtype=dtype), parallel=ParallelConfig())
    stages, boxes = weights_of_rank(cfg, Mesh.single(), device, rank_of_stage=(0,))
    return stages[0], boxes


@torch.no_grad()
def weights_of_rank(
    cfg: Config, mesh: Mesh, device: torch.device, rank_of_stage: tuple[int, ...]
) -> tuple[dict[int, PipelineStage], list[tuple[Box, Tensor]]]:
    """This rank's stages with zeros for weights, and [(box, tensor)] of all of them; of those of a mixture's
    routers, also the biases. No rank has more than one stage.

    On the device "meta" the tensors have shapes alone, and the stages none.
    """
    stages = make_stages(cfg, mesh, rank_of_stage)
    boxes: list[tuple[Box, Tensor]] = []
    for stage in stages.values():
        stage.requires_grad_(False)
        for weight in sharded_parameters(stage):  # each once, in the order of the forward pass
            values = torch.zeros(weight.spec.shape, dtype=DTYPES[cfg.train.dtype], device=device)
            if device.type != "meta":
                weight.data = values
            boxes += weight.spec.split(values)
    routers = RouterStates(cfg, mesh, list(stages.values()), device)
    return stages, boxes + routers.boxes(weights=True)


@torch.no_grad()
def model_in_parts(cfg: Config, dtype: str, fill: Fill) -> PipelineStage:
    """The full model in one process, on the CPU; of its weights those of one part (PipelineStage.parts) are
    in memory at a time.

    fill: gives [(box, tensor)] their values. It is called with the biases of routers, and before each forward
    of a part with the weights of that part.
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


def check_size(model: ModelConfig, pieces: list[StoredPiece], where: str) -> None:
    """check_counts, with what a checkpoint holds: the stored boxes of its weights."""
    weights = [piece.box for piece in pieces if "@" not in piece.box.key]
    num_elements = sum(box.volume for box in weights)
    check_counts(model, num_tensors=len(weights), num_elements=num_elements, where=where)


def check_counts(model: ModelConfig, *, num_tensors: int, num_elements: int, where: str) -> None:
    """Raises ConfigError if the model is far larger than what is stored of it, before it is allocated.

    The sizes come from a file that anybody may have written. Exact differences are found when it is loaded.
    """
    width = model.hidden
    mlps = [like.mlp for like in layer_models(model).values() if has_path(like, "mlp.width")]
    experts = mixture(model)
    least = {  # what any model with these sizes has at least
        "layers": (model.layers, num_tensors),
        "layers x hidden": (model.layers * width, num_elements),
        "hidden x vocab": (width * (model.vocab or 1), num_elements),
        "hidden x heads": (width * max(model.mixer.heads_over_tp().values(), default=1), num_elements),
        "hidden x ffn": (width * max((mlp.width for mlp in mlps), default=1), num_elements),
        "hidden x experts": (width * (experts.experts if experts else 1), num_elements),
    }
    for name, (asked, stored) in least.items():
        if asked > SIZE_MARGIN * stored:
            raise ConfigError(f"{where}: the config says {name} = {asked:,}, its tensors hold {stored:,}; "
                              "the two are not of one model")


def load_run(
    where: str,
    device: torch.device,
    dtype: str | None = None,
    weights: str = TRAINED,
    tokenizer_spec: str | None = None,
    eod: str | None = None,
    *,
    world: World | None = None,
    layout: AskedLayout = AskedLayout(),
) -> TrainedModel:
    """The model of a run folder, or of one of its checkpoint folders. dtype: by default the run's own.

    weights: one of checkpoint.state.WEIGHTS. tokenizer_spec: by default that of the run, if it has one.
    eod: the token that ends documents; by default the one that the files of the tokenizer name.
    world: the ranks that hold the model together, whatever layout has saved it; None: this process.
    Collective. layout: how they do.

    Raises ConfigError if `where` has no model, or the ranks cannot hold it; IntegrityError, on all ranks, if
    the checkpoint is damaged.
    """
    world = world or World(device=device)
    everyone = world.all_ranks()

    def load(index: store.StoredIndex) -> TrainedModel:
        path, meta = index.path, index.meta
        cfg = layout_of_weights(config_to_compute(meta, dtype), world.size, layout)
        check_size(cfg.model, index.pieces, str(path))
        known_tokenizer = tokenizer_of_run(path, meta["tokenizer"], tokenizer_spec, eod)

        # this rank's stage, and its weights
        mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
        schedule = schedule_of("gpipe", cfg.parallel.pp, 1, None)
        stages, boxes = weights_of_rank(cfg, mesh, device, schedule.rank_of_stage)
        state.fill_boxes(index, state.stored_as(index, boxes, weights), everyone, cfg.checkpoint.timeout_s)

        pipeline = Pipeline(
            mesh,
            schedule,
            stages=stages,
            zero_schedulers={number: ZeroScheduler.without_buckets() for number in stages},
            weight_grad_stores={},
            hidden_shape=hidden_shape_of(cfg, schedule.n_stages),
        )
        return TrainedModel(
            cfg,
            mesh,
            stages=stages,
            pipeline=pipeline,
            device=device,
            known_tokenizer=known_tokenizer,
            path=path,
            step=meta["step"],
            is_chat=meta.get("chat", False),
        )

    if world.size == 1:
        return load(state.find_index(where, []))
    return state.load_found(where, [], load, everyone, CheckpointConfig().timeout_s)


def config_to_compute(meta: Tree, dtype: str | None) -> Config:
    """The config of a checkpoint, for a model that only computes. dtype: None for the run's own."""
    cfg = state.config_of(meta)
    if dtype is None:
        dtype = "bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype  # the weights of fp8 are bf16
    train = replace(cfg.train, dtype=dtype, fp8=None)
    return replace(cfg, train=train, parallel=ParallelConfig())


def tokenizer_of_run(
    path: Path, fingerprint: str, spec: str | None, eod: str | None = None
) -> Tokenizer | None:
    """The tokenizer `spec`, or that of the run folder; None if the weights were imported without one.

    path: the checkpoint. fingerprint: of the tokenizer that it was trained with; "none": of none.
    Raises ConfigError if it is another one.
    """
    folder = path.parent.parent / "tokenizer"
    if spec is None and fingerprint == "none" and not folder.is_dir():
        return None
    found = tokenizer.load_tokenizer(spec or folder, eod)
    if fingerprint not in (found.fingerprint, "none"):
        advice = "leave --tokenizer out" if spec else "put that one there"
        raise ConfigError(f"{spec or folder}: is not the tokenizer that {path} was trained with; {advice}")
    return found
