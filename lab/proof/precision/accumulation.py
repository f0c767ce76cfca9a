"""Microbatch gradients accumulate in fp32: compares their sum with an fp64 sum."""
import math
from dataclasses import replace
from pathlib import Path

import torch

from config import ChannelMixer, Config
from durable.pool import WorkerPool
from lab.proof.precision.errors import U32, BoundedError
from lab.proof.precision.job import single_process
from lab.proof.precision.recorded_run import train_and_record
from model.router import ExpertsConfig, with_mlps

LOSS_SCALE = 2.0**13


def without_bias_rate(mlp: ChannelMixer) -> ChannelMixer:
    """Return the MLP, or the MoE without updates of its router biases."""
    if not isinstance(mlp, ExpertsConfig):
        return mlp
    return replace(mlp, router=replace(mlp.router, bias_rate=None))


def accumulation_errors(pool: WorkerPool, cfg: Config, folder: Path) -> list[BoundedError]:
    """Compare the gradient of 8 microbatches with the fp64 sum of the 8 separate gradients.

    The separate gradients come from a run of 8 one-sequence steps with a learning rate too small to move any
    weight. The products of both runs are bitwise equal; router biases, which have their own update rate, are
    frozen. The runs differ only in the fp32 additions, at most one per token.

    `cfg` has micro_batch 1 and a layout that splits no product.
    """
    together = replace(
        cfg,
        model=with_mlps(cfg.model, without_bias_rate),
        optim=replace(cfg.optim, name="sgd", states="fp32", lr=1e-30, weight_decay=0.0),
        train=replace(cfg.train, steps=1, loss_scale=LOSS_SCALE, loss_scale_window=1000),
    )
    num_sequences = together.train.global_batch
    one_by_one = replace(
        together,
        train=replace(
            together.train,
            steps=num_sequences,
            global_batch=1,
            loss_scale=LOSS_SCALE / num_sequences,
        ),
    )
    single = WorkerPool(1)
    try:
        summed = train_and_record(pool, together, folder / "together")
        separate = train_and_record(single, single_process(one_by_one), folder / "each")
    finally:
        single.close()

    errors: list[BoundedError] = []
    for key, total in summed.grads[0].items():
        terms = []
        for grads, step in zip(separate.grads, separate.steps):
            terms.append(grads[key].double() / (step["scale"] * num_sequences))
        parts = torch.stack(terms)
        off = (total.double() / summed.steps[0]["scale"] - parts.sum(0)).abs().max()
        largest = float(parts.abs().sum(0).max())
        num_additions = num_sequences * together.train.seq_len
        bound = num_additions * U32 * largest + 1e-30
        errors.append(BoundedError(what="sum", where=key, error=float(off), bound=bound))
    for what in (*summed.wrong, *separate.wrong):
        errors.append(BoundedError(what="sum", where=what, error=math.inf, bound=0.0))
    return errors
