"""config -> Run: everything a step needs, made once. Used by train.py, evaluate, generate and convert."""
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

import config
from checkpoint import state, store
from config import Config, ConfigError, Parallel, batch_sizes, divisors, mup_width, numbers, of_stage, scale_block, steps_of, words
from data import tokenizer
from kernels.grad import wide
from model.moe import Routers
from model.split import by_cost, layers_of
from model.transformer import Stage
from optim.adamw import AdamW
from optim.lamb import LAMB, LARS
from optim.lion import Lion
from optim.lr import learning_rate
from optim.muon import Muon
from optim.noise import Noise
from optim.scaler import Scaler
from optim.sgd import SGD
from parallel.boxes import Box
from parallel.compress import CODES
from parallel.mesh import Mesh
from parallel.offload import Away
from parallel.packing import ALIGN
from parallel.params import Bucket, Sharing, cut
from parallel.pipeline import Later, Pipeline
from parallel.schedule import Op, Schedule, check, lower, make
from parallel.zero import Zero
from rules import nearby, nearby_ramp, validate
from runtime.graphs import Graph

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
OPTIMIZERS = {"adamw": AdamW, "muon": Muon, "lamb": LAMB, "lars": LARS, "lion": Lion, "sgd": SGD}

MUP_POWER = {"muon": 0.5}  # a hidden matrix of m times the tuned width learns m^-this times as fast (optim/muon.py says why); else 1


@dataclass(frozen=True)
class Run:
    """steps: the horizon; stages: {number: stage} of this rank; ops: this rank's schedule for each number of
    microbatches that a step may have; buckets: weights, masters and gradients; routers: what a mixture's routers keep
    beside them; scaler: of the loss, in fp16; noise: the gradient noise scale; graph: what replays forward and backward
    (train.cuda_graphs), None: they run."""
    cfg: Config
    mesh: Mesh
    device: torch.device
    data: object  # the train split: data.loader.Data
    stages: dict[int, Stage]
    buckets: list[Bucket]
    optim: AdamW | Muon | LAMB | LARS | Lion | SGD
    pipeline: Pipeline
    ops: dict[int, list[Op]]
    steps: int
    routers: Routers
    scaler: Scaler
    noise: Noise
    graph: Graph | None = None

    def lr(self, step: int) -> float:
        return learning_rate(self.cfg.optim, step, self.steps)


def with_vocab(cfg: Config, vocab: int) -> Config:
    """The model's vocabulary from the tokenizer, unless the config asks for a larger one."""
    if cfg.model.vocab is None:
        return replace(cfg, model=replace(cfg.model, vocab=vocab))
    if cfg.model.vocab < vocab:
        raise ConfigError(f"model.vocab: {cfg.model.vocab} is smaller than the tokenizer's {vocab} ids; raise it, or leave it out")
    return cfg


def horizon(cfg: Config, flops_per_token: float) -> int:
    """train.steps, or what train.tokens or train.flops come to, rounded up."""
    t = cfg.train
    return t.steps or steps_of(t, ceil((t.tokens or t.flops / flops_per_token) / t.seq_len))


def build_stages(cfg: Config, mesh: Mesh, device: torch.device, place: tuple[int, ...]) -> tuple[dict[int, Stage], list[Bucket]]:
    """This rank's stages (place: the rank of each) with their storage and initial weights. A tied table gets a bucket of
    its own, so that both ends of a pipeline cut it into the same shards."""
    cuts = layers_of(cfg, len(place))
    p, dtype = cfg.parallel, DTYPES[cfg.train.dtype]
    sharing = Sharing(p.zero, p.compress if p.compress in CODES else p.reduce, p.node,
                      int(p.bucket_mb * 2**20 / wide(dtype).itemsize), cfg.optim.name == "muon", p.offload in ("optimizer", "both"),
                      p.compress_weights, scale_block(p) or ALIGN, p.powersgd_rank if p.compress == "powersgd" else None,
                      cfg.log.noise_scale, cfg.optim.states == "bf16")
    stages, buckets = {}, []
    made: dict[int, Bucket] = {}  # parameter -> its bucket
    for n in [s for s, rank in enumerate(place) if rank == mesh.pp.index]:
        stage = Stage(of_stage(cfg, n), mesh, *cuts[n], stages[0].embed.weight if 0 in stages else None, place[0] != place[-1])
        for weight in stage.parameters():  # a table of another stage stays as it is
            weight.spec = weight.spec.wider(mup_width(cfg.model), MUP_POWER.get(cfg.optim.name, 1.0))
        for part in stage.parts():
            new = [p for p in part if id(p) not in made]
            for group in ([p for p in new if p is stage.table()], [p for p in new if p is not stage.table()]):
                for params in cut(group, sharing):
                    buckets.append(Bucket(params, mesh, sharing, dtype, device, cfg.train.seed))
                    made.update({id(p): buckets[-1] for p in params})
        stage.zero = Zero([list({id(made[id(p)]): made[id(p)] for p in part}.values()) for part in stage.parts()],
                          stage.embed is not None, stage.head is not None)
        stages[n] = stage
    return stages, buckets


def plan_pipeline(cfg: Config, world: int, advise: bool = True) -> Schedule:
    """The schedule of a step with the whole train.global_batch; that, and those of a ramp's smaller batches, checked. Raises
    ConfigError for every setting that cannot run on `world` ranks."""
    return schedules(cfg, world, advise)[-1]


def schedules(cfg: Config, world: int, advise: bool = True) -> list[Schedule]:
    """One for each number of microbatches that a step may have, the fewest first."""
    fits = (lambda c: schedules(c, world, False)) if advise else None
    validate(cfg, world, fits)
    p, t = cfg.parallel, cfg.train
    unit, every = t.micro_batch * (world // (p.tp * p.cp * p.pp)), []
    for size in reversed(batch_sizes(t)):  # what is wrong with all of them is said of the whole batch
        try:
            every.insert(0, make(p.schedule, p.pp, size // unit, p.vpp))
        except ValueError as e:
            if every:
                raise ConfigError(f"train.ramp: {t.ramp} has steps of {size} sequences, and parallel.schedule {e} (microbatches = sequences / "
                                  f"(train.micro_batch * dp))" + nearby_ramp(cfg, unit, fits)) from None
            raise ConfigError(f"parallel.schedule: {e} (microbatches = train.global_batch / (train.micro_batch * dp))") from None
    schedule = every[-1]
    if schedule.n_stages > cfg.model.layers:
        raise ConfigError(f"parallel.pp: {p.schedule} on {p.pp} ranks makes {schedule.n_stages} stages, model.layers is {cfg.model.layers}; "
                          "lower parallel.pp or parallel.vpp"
                          + (nearby(cfg, "parallel.pp", divisors(world), fits) if fits else ""))
    if p.stages and len(numbers(p.stages)) != schedule.n_stages:
        raise ConfigError(f"parallel.stages: {p.stages} cuts {len(numbers(p.stages))} stages, {p.schedule} on {p.pp} ranks has {schedule.n_stages}"
                          f"; try parallel.stages {','.join(map(str, by_cost(cfg.model, schedule.n_stages, t.seq_len)))}")
    modes = words(p.recompute_stages)
    if modes and len(modes) != schedule.n_stages:
        raise ConfigError(f"parallel.recompute_stages: {len(modes)} modes, {p.schedule} on {p.pp} ranks has {schedule.n_stages} stages; "
                          f"try parallel.recompute_stages {','.join((modes + modes[-1:] * schedule.n_stages)[:schedule.n_stages])}")
    for one in every:
        check(one.order, one.n_stages, one.microbatches, one.place)
    return every


def build(cfg: Config, mesh: Mesh, device: torch.device, data, steps: int) -> Run:
    """Raises ConfigError before anything is allocated."""
    if cfg.train.dtype == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"train.dtype: {torch.cuda.get_device_name(device)} has no fp8 (chips from sm_89 on have); use bf16")
    every = schedules(cfg, mesh.world.size)
    schedule = every[-1]
    stages, buckets = build_stages(cfg, mesh, device, schedule.place)
    later = {n: Later() for n in stages}
    for n, stage in stages.items():
        for p in stage.parameters():
            p.later = later[n]
    pipeline = Pipeline(mesh, schedule, stages, later, cfg.model.hidden, cfg.model.vocab, DTYPES[cfg.train.dtype],
                        mesh.tp.size if cfg.parallel.sp else 1, Away(device) if cfg.parallel.offload in ("activations", "both") else None)
    ops = {one.microbatches: lower(one.order, one.place)[mesh.pp.index] for one in every}
    return Run(cfg, mesh, device, data, stages, buckets, OPTIMIZERS[cfg.optim.name](cfg.optim, buckets, mesh), pipeline, ops, steps,
               Routers(cfg, mesh, list(stages.values()), device),
               Scaler(DTYPES[cfg.train.dtype], device, cfg.train.loss_scale, cfg.train.loss_scale_window),
               Noise(cfg.log.noise_scale, buckets, mesh), Graph(device) if cfg.train.cuda_graphs else None)


@dataclass(frozen=True)
class Trained:
    """A checkpoint's weights in a stage, with the tokenizer that its tokens mean."""
    cfg: Config
    stage: Stage
    tokenizer: object
    path: Path
    step: int

    @torch.no_grad()
    def logits(self, tokens, positions, cache, at: int):
        """Logits [vocab] of the token at place `at`; the one-process form of Pipeline.logits."""
        out = self.stage.head_logits(self.stage.hidden(tokens, positions, cache=cache), at)
        if cache is not None:
            cache.length += tokens.shape[1]
        return out


@torch.no_grad()
def weights_only(cfg: Config, device: torch.device, dtype: str) -> tuple[Stage, list[tuple[Box, torch.Tensor]]]:
    """The whole model in one process with zeros for weights, and each of its tensors under its key: no gradients, no masters."""
    cfg = replace(cfg, train=replace(cfg.train, dtype=dtype), parallel=Parallel())
    stage = Stage(cfg, Mesh.single(), 0, cfg.model.layers).requires_grad_(False)
    stage.zero = Zero([[] for _ in stage.parts()], lookup=True, head=True)  # nothing is sharded
    pieces = []
    for p in stage.parameters():  # each once, in the order of the forward pass
        p.data = torch.zeros(p.spec.shape, dtype=DTYPES[dtype], device=device)
        pieces += p.spec.split(p.data)
    return stage, pieces + Routers(cfg, Mesh.single(), [stage], device).boxes(weights=True)


def load_run(where: str, device: torch.device, dtype: str | None = None) -> Trained:
    """From a run folder or one of its checkpoint folders. Raises ConfigError, IntegrityError."""
    path = state.find(where, [])
    meta = store.meta(path)
    cfg = config.build(Config, meta["config"])
    plain = "bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype  # as its weights are; fp8 is a way to train
    cfg = replace(cfg, train=replace(cfg.train, dtype=dtype or plain, fp8=None), parallel=Parallel())
    tok = tokenizer.load(path.parent.parent / "tokenizer")
    if tok.fingerprint != meta["tokenizer"]:
        raise ConfigError(f"{path.parent.parent / 'tokenizer'}: is not the tokenizer that {path} was trained with; put that one there")
    stage, pieces = weights_only(cfg, device, cfg.train.dtype)
    store.load(path, pieces, strict=False, allow_cast=True)
    return Trained(cfg, stage, tok, path, meta["step"])
