"""config -> Run: everything a step needs, made once. Used by train.py, evaluate, generate and convert."""
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

import config
from checkpoint import state, store
from config import Config, ConfigError, validate
from data import tokenizer
from model.transformer import Stage
from optim.adamw import AdamW
from optim.lr import learning_rate
from parallel.mesh import Mesh
from parallel.params import Bucket, materialize
from parallel.pipeline import Later, Pipeline
from parallel.schedule import Op, check, one_f_one_b

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """steps: the horizon; ops: this rank's schedule; buckets: weights, masters and gradients."""
    cfg: Config
    mesh: Mesh
    device: torch.device
    data: object  # the train split: data.loader.Data
    stage: Stage
    buckets: list[Bucket]
    optim: AdamW
    pipeline: Pipeline
    ops: list[Op]
    steps: int

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
    t, per_step = cfg.train, cfg.train.global_batch * cfg.train.seq_len
    return t.steps or ceil((t.tokens or t.flops / flops_per_token) / per_step)


def build_stage(cfg: Config, mesh: Mesh, device: torch.device) -> tuple[Stage, list[Bucket], Later]:
    """The model with its storage and initial weights."""
    stage, later = Stage(cfg, mesh, 0, cfg.model.layers), Later()
    groups = stage.groups()
    buckets = materialize(groups, DTYPES[cfg.train.dtype], device, cfg.train.seed)
    for p in (p for group in groups for p in group):
        p.later = later
    return stage, buckets, later


def build(cfg: Config, mesh: Mesh, device: torch.device, data, steps: int) -> Run:
    """Raises ConfigError before anything is allocated."""
    validate(cfg, mesh.world.size)
    micro = cfg.train.global_batch // (cfg.train.micro_batch * mesh.data.size)
    order = one_f_one_b(mesh.pp.size, micro)
    check(order, mesh.pp.size, micro)
    stage, buckets, later = build_stage(cfg, mesh, device)
    return Run(cfg, mesh, device, data, stage, buckets, AdamW(cfg.optim, buckets), Pipeline(stage, later),
               order[mesh.pp.index], steps)


@dataclass(frozen=True)
class Trained:
    """A checkpoint's weights in a stage, with the tokenizer that its tokens mean."""
    cfg: Config
    stage: Stage
    buckets: list[Bucket]
    tokenizer: object
    path: Path
    step: int


def load_run(where: str, device: torch.device, dtype: str | None = None) -> Trained:
    """From a run folder or one of its checkpoint folders. Raises ConfigError, IntegrityError."""
    path = state.find(where, [])
    meta = store.meta(path)
    cfg = config.build(Config, meta["config"])
    cfg = replace(cfg, train=replace(cfg.train, dtype=dtype or cfg.train.dtype))
    tok = tokenizer.load(path.parent.parent / "tokenizer")
    if tok.fingerprint != meta["tokenizer"]:
        raise ConfigError(f"{path.parent.parent / 'tokenizer'}: is not the tokenizer that {path} was trained with; put that one there")
    stage, buckets, _ = build_stage(cfg, Mesh.single(), device)
    state.load_weights(buckets, path)
    return Trained(cfg, stage, buckets, tok, path, meta["step"])
