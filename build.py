"""Build a TrainingRun from a config: model, buckets, pipeline, optimizer, and the extras it asks for."""
import pkgutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from checkpoint.disk_saves import DiskSaves
from config import OPTIMIZERS, Config, ConfigError, profiled_steps
from config.reading import get_phases
from config.reading.schedules import make_schedules
from data.loader import BatchLoader
from model.precision import DTYPES
from model.router_states import RouterStates
from model.sharding import sharding_config
from model.stages import get_hidden_shape, make_stages
from model.transformer import PipelineStage
from optim.base import Optimizer
from optim.lr import learning_rates
from optim.scaler import LossScaler
from optim.spikes import SpikeState
from parallel.extras import Extra, Extras, FaultHook
from parallel.offload import ActivationOffload, copy_stream
from parallel.pipeline.executor import GradientAccumulation, Pipeline, WeightGradStore
from parallel.sharding.bucket import Bucket, split_into_buckets
from parallel.sharding.spec import ShardedParameter, sharded_parameters
from parallel.sharding.zero import ZeroHooks
from parallel.topology.mesh import Mesh
from runtime.garbage import GarbageCollection
from runtime.run import TrainingRun
from runtime.setup import LaunchEnv

if TYPE_CHECKING:  # optional features, imported only if the config enables them
    from checkpoint.disk.lease import Lease
    from durable.memory import MemoryCheckpoints
    from durable.rerun import StepRecorder
    from durable.uploader import CheckpointUploader
    from model.inside import LayerStatistics
    from optim.ema import WeightEMA
    from optim.noise import GradientNoiseScale
    from parallel.pipeline.graphs import RecordedPipeline


def with_vocab(cfg: Config, vocab: int) -> Config:
    """Return the config with model.vocab set to the tokenizer's, unless it is already set.

    Raises ConfigError if model.vocab is set and smaller than the tokenizer's.
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
    """Return train.steps, or the number of steps that train.tokens or train.flops takes, rounded up.

    Raises ConfigError if none of them is set.
    """
    train = cfg.train
    if train.steps:
        return train.steps
    tokens = train.tokens
    if not tokens:
        if not train.flops:
            raise ConfigError("train.steps: give exactly one of train.steps, train.tokens, train.flops")
        tokens = train.flops / flops_per_token
    return get_phases(cfg).steps_to_see(tokens)


# ---- stages and buckets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageBuckets:
    """The buckets of this rank's stages, and the hooks that exchange them."""
    buckets: list[Bucket]  # all buckets of this rank, without duplicates; frozen ones come last
    hooks: dict[int, ZeroHooks]  # {stage number: its hooks}


def make_buckets(
    cfg: Config, mesh: Mesh, device: torch.device, stages: dict[int, PipelineStage]
) -> StageBuckets:
    """Allocate buckets, initialize weights and attach ZeRO to the stages. No communication.

    An embedding table shared by the first and the last stage gets a separate bucket, so that both ends of
    the pipeline shard it identically.
    """
    sharding = sharding_config(cfg)
    dtype = DTYPES[cfg.train.dtype]
    bucket_of: dict[int, Bucket] = {}  # {id(parameter): its bucket}
    buckets: list[Bucket] = []
    hooks: dict[int, ZeroHooks] = {}
    for number, stage in stages.items():
        buckets_of_parts: list[list[Bucket]] = []
        for part in stage.parts():
            params = list(sharded_parameters(part))
            for group in without_storage(params, stage.shared_table(), bucket_of):
                for members in split_into_buckets(group, sharding):
                    bucket = Bucket(members, mesh, sharding, dtype=dtype, device=device, seed=cfg.train.seed)
                    buckets.append(bucket)
                    bucket_of.update({id(param): bucket for param in members})
            found = dict.fromkeys(bucket_of[id(param)] for param in params)
            for bucket in found:
                bucket.num_users += 1
            buckets_of_parts.append([bucket for bucket in found if bucket.is_scheduled])
        hooks[number] = ZeroHooks.without_buckets()
        if any(buckets_of_parts):
            hooks[number] = ZeroHooks(
                buckets_of_parts,
                first_is_embedding=stage.embedding is not None,
                last_is_head=stage.head is not None,
            )
            hooks[number].attach(stage.parts())
    return StageBuckets(sorted(buckets, key=lambda bucket: not bucket.trains), hooks)


def without_storage(
    params: list[ShardedParameter], shared_table: ShardedParameter | None, bucket_of: dict[int, Bucket]
) -> list[list[ShardedParameter]]:
    """Return the parameters that are not in a bucket yet, as [[the shared table], [the others]]."""
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
    """Build the run of a config on this rank, with initial weights.

    data: the train split, or None if the run does not read one. phase: the number of the phase in
    train.phases; each phase is built as a separate run.

    Raises ConfigError before anything is allocated. Collective with Muon, NorMuon, Dion, LAMB and LARS, whose
    ranks exchange what they own; with other optimizers there is no communication.
    """
    phases = get_phases(cfg)
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
    accumulates = cfg.parallel.schedule == "1f1b" and schedule.n_stages == 1
    pipeline = (GradientAccumulation if accumulates else Pipeline)(
        mesh,
        schedule,
        stages=stages,
        zero_hooks=made.hooks,
        weight_grad_stores=weight_grad_stores,
        hidden_shape=get_hidden_shape(cfg, schedule.n_stages),
        offload=ActivationOffload(device, copies) if offloads_activations else None,
    )
    ops = {one.microbatches: one.with_transfers[mesh.pp.index] for one in schedules}
    spikes = SpikeState(cfg.optim, device, mesh.world)
    beside = extras_of_step(cfg, made.buckets, mesh, spikes)
    qk_clip = clip_of_scores(cfg, stages, made.buckets, mesh, device)
    inside = layer_statistics(cfg, stages, made.buckets, mesh, device)
    bounded = bounded_rows(cfg, stages, made.buckets, mesh, device)
    # inmost is what starts over with each forward; what follows the clip sees the weights that it leaves
    extras = Extras([*qk_clip, *inside, *bounded, *beside.extras])

    return TrainingRun(
        cfg=cfg,
        mesh=mesh,
        device=device,
        stages=stages,
        pipeline=pipeline,
        phases=phases,
        phase=phases.all[phase - 1],
        steps=steps,
        loader=data,
        buckets=made.buckets,
        optim=optimizer_class(cfg.optim.name, cfg.optim.states)(cfg.optim, made.buckets, mesh),
        learning_rate=learning_rates(phases, steps),
        schedules=ops,
        routers=RouterStates(cfg, mesh, list(stages.values()), device),
        scaler=LossScaler(dtype, device, cfg.train.loss_scale, cfg.train.loss_scale_window),
        spikes=spikes,
        extras=extras,
        noise_scale=beside.noise_scale,
        inside=inside[0] if inside else None,
        ema=beside.ema,
        recording=make_recording(pipeline, device, made.buckets) if cfg.train.cuda_graphs else None,
    )


class StepExtras(NamedTuple):
    """The extras of a step in call order; two of them are also accessible by name."""
    extras: Extras
    noise_scale: "GradientNoiseScale | None"
    ema: "WeightEMA | None"


def extras_of_step(cfg: Config, buckets: list[Bucket], mesh: Mesh, spikes: SpikeState) -> StepExtras:
    """Create the extras of the step that the config enables; extras_of_loop makes those of the loop."""
    extras: list[Extra] = []
    noise_scale: "GradientNoiseScale | None" = None
    ema: "WeightEMA | None" = None

    recorder: "StepRecorder | None" = None
    if cfg.train.rerun_every is not None or cfg.train.rerun_suspects:
        from durable.rerun import StepRecorder

        recorder = StepRecorder(cfg.train, buckets, mesh)  # first: later ones communicate in judge()
        extras.append(recorder)
    if cfg.optim.spike_sigma is not None:
        extras.append(spikes)
    if recorder is not None:
        from durable.rerun import StepReruns

        extras.append(StepReruns(cfg.train, recorder, mesh))  # after those that may mark a step as suspect
    if cfg.log.noise_scale:
        from optim.noise import GradientNoiseScale

        noise_scale = GradientNoiseScale(buckets, mesh)
        extras.append(noise_scale)
    if cfg.train.ema is not None:
        from optim.ema import WeightEMA

        ema = WeightEMA(cfg.train.ema, buckets, mesh)
        extras.append(ema)
    return StepExtras(Extras(extras), noise_scale, ema)


def clip_of_scores(
    cfg: Config, stages: dict[int, PipelineStage], buckets: list[Bucket], mesh: Mesh, device: torch.device
) -> list[Extra]:
    """Create the extra of optim.qk_clip, if it is set."""
    if cfg.optim.qk_clip is None:
        return []
    from model.qk_clip import QKClip

    return [QKClip(cfg, stages.values(), buckets, mesh, device)]


def layer_statistics(
    cfg: Config, stages: dict[int, PipelineStage], buckets: list[Bucket], mesh: Mesh, device: torch.device
) -> "list[LayerStatistics]":
    """Create the extra of log.inside_every, if it is set."""
    if cfg.log.inside_every is None:
        return []
    from model.inside import LayerStatistics

    return [LayerStatistics(cfg, stages, buckets, mesh, device)]


def bounded_rows(
    cfg: Config, stages: dict[int, PipelineStage], buckets: list[Bucket], mesh: Mesh, device: torch.device
) -> list[Extra]:
    """Create the extra of parallel.ep_bound, if experts are on several ranks."""
    bound = cfg.parallel.ep_bound
    if bound is None or mesh.ep_etp.size == 1:
        return []
    from model.bounded_rows import BoundedRows

    return [BoundedRows(bound, stages.values(), buckets, mesh, device)]


def extras_of_loop(
    run: TrainingRun,
    env: LaunchEnv,
    saving: DiskSaves,
    *,
    lease: "Lease | None",
    uploads: "CheckpointUploader | None",
    in_memory: "MemoryCheckpoints | None",
    observe: FaultHook | None,
) -> list[Extra]:
    """Create the extras of the loop, in call order. Collective under log.slow_window.

    lease: lease on the run folder. uploads: those to checkpoint.mirror. in_memory: in-memory checkpoints.
    observe: fault injector, or the observer of a proof.
    """
    cfg, log, goodput = run.cfg, saving.log, saving.goodput
    extras: list[Extra] = []
    if lease is not None:
        from checkpoint.disk.lease import LeaseCheck

        extras.append(LeaseCheck(lease))
    extras += [goodput, saving.run_folder]
    if observe is not None:
        from durable.faults import Faults

        extras.append(Faults(observe))  # before the collection: it is between two steps
    extras.append(GarbageCollection())
    if cfg.profile.steps is not None:
        from runtime.profile import ProfilerTrace

        trace = log.run_dir / f"trace-rank{env.rank}.json"
        extras.append(ProfilerTrace(profiled_steps(cfg.profile.steps), trace))
    if cfg.profile.memory is not None:
        from runtime.profile import MemorySnapshot

        snapshot = log.run_dir / f"memory-rank{env.rank}.pickle"
        extras.append(MemorySnapshot(profiled_steps(cfg.profile.memory, "memory"), snapshot))
    if cfg.train.replay_routing is not None:
        from runtime.routing import RoutingReplay

        extras.append(RoutingReplay(run))
    if cfg.log.routing_every is not None:
        from runtime.routing import RoutingRecord

        extras.append(RoutingRecord(run, log.run_dir))
    if cfg.log.slow_window is not None and env.world > 1:
        from durable.slow import SlowRanks, SlowReports

        slow = SlowRanks(cfg.log.slow_window, run.mesh.dims, run.mesh.world, env.host)
        extras.append(SlowReports(slow, log))
    if uploads is not None:
        from durable.uploader import UploadReports

        extras.append(UploadReports(uploads, log))
    if in_memory is not None:
        from durable.memory_saves import MemorySaves

        extras.append(MemorySaves(in_memory, cfg.checkpoint.memory_every, saving))
    if cfg.checkpoint.check_replicas is not None:
        from checkpoint.replicas import ReplicaChecks

        extras.append(ReplicaChecks(cfg.checkpoint.check_replicas))
    if cfg.optim.spike_sigma is not None:
        from durable.rewind import Rewinds

        extras.append(Rewinds(cfg.optim, saving, in_memory))
    return extras


def make_recording(pipeline: Pipeline, device: torch.device, buckets: list[Bucket]) -> "RecordedPipeline":
    from parallel.pipeline.graphs import RecordedPipeline

    return RecordedPipeline(pipeline, device, buckets)


def optimizer_class(name: str, states: str = "fp32") -> type[Optimizer]:
    """Return the optimizer class registered in config/optimizers.py, for this value of optim.states."""
    spec = OPTIMIZERS[name]
    return pkgutil.resolve_name(spec.implementation_8bit if states == "8bit" else spec.implementation)


def check_device(cfg: Config, device: torch.device) -> None:
    """Raise ConfigError if the device cannot run the config."""
    if cfg.train.dtype != "fp8" or device.type != "cuda":
        return
    if torch.version.hip:
        raise ConfigError("train.dtype: fp8 supports NVIDIA's formats only; GPUs under ROCm use "
                          "others (e4m3fnuz) or are untested; use bf16")
    if torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"train.dtype: {name} does not support fp8 (sm_89 or newer does); use bf16")
