"""Derive from the config what parameters need besides shapes: rates, mesh degrees and how
data-parallel ranks shard them."""
from dataclasses import replace

from torch import nn

from config import OPTIMIZERS, Config, compression_block, fp8_recipe, mup_width_ratio
from config.axes import AXES, axis_degrees
from config.parameter_groups import find_group, parse_groups
from model.precision import accumulation_bytes
from parallel.sharding.packing import ALIGNMENT
from parallel.sharding.slots import ShardingConfig
from parallel.sharding.spec import ADAPTER_ROLES, sharded_parameters
from parallel.topology.dims import ParallelDims
from parallel.wire.compress import CODECS


def set_rates(cfg: Config, module: nn.Module) -> None:
    """Set initial values and learning rates for muP, and the rates of optim.groups; parameters with a rate of
    0 are frozen, and with model.lora all that are neither adapters nor in a group. Leaves parameter data,
    which modules may share, untouched."""
    width_ratio = mup_width_ratio(cfg.model)
    power = OPTIMIZERS[cfg.optim.name].mup_power
    groups = parse_groups(cfg.optim.groups)
    for param in sharded_parameters(module):
        spec = param.spec.with_mup(width_ratio, power)
        group = find_group(groups, spec.role, spec.boxes[0].key)
        if group is not None:
            spec = replace(spec, group_lr_factor=group.lr_factor, group_weight_decay=group.weight_decay)
        elif cfg.model.lora is not None and spec.role not in ADAPTER_ROLES:
            spec = replace(spec, group_lr_factor=0.0)
        param.spec = spec
        param.requires_grad_(not spec.is_frozen)


def parallel_dims(cfg: Config, world_size: int) -> ParallelDims:
    """Return the parallel dimensions of a job on `world_size` ranks."""
    return ParallelDims(world_size, **mesh_degrees(cfg))


def mesh_degrees(cfg: Config) -> dict[str, int]:
    """Return {field of ParallelDims: degree}."""
    degrees = axis_degrees(cfg.parallel)
    return {axis.dims: degrees[axis.key] for axis in AXES}


def sharding_config(cfg: Config) -> ShardingConfig:
    """Return how data-parallel ranks shard gradients, weights and optimizer state."""
    parallel = cfg.parallel
    return ShardingConfig(
        zero=parallel.zero,
        max_elements=int(parallel.bucket_mb * 2**20 / accumulation_bytes(cfg.train.dtype)),
        alignment=compression_block(parallel) or ALIGNMENT,
        reduce_algorithm=parallel.compress if parallel.compress in CODECS else parallel.reduce,
        ranks_per_node=parallel.node,
        powersgd_rank=parallel.powersgd_rank if parallel.compress == "powersgd" else None,
        weight_codec=parallel.compress_weights,
        separate_hidden=OPTIMIZERS[cfg.optim.name].needs_whole_matrices,
        offload_master=parallel.offload in ("optimizer", "both"),
        bf16_master=cfg.optim.states == "bf16",
        has_fp8_copies=fp8_recipe(cfg.train) is not None,
        track_noise_scale=cfg.log.noise_scale,
    )
