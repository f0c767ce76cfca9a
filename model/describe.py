"""Describe a model's parts and parameters without storage and without processes.

The real modules are built on a mesh of made-up groups: a parameter has no storage until build.py allocates
it. Blocks of the same kind (block_kind) are built once. The description holds for any rank of a
stage: ranks differ in which rows they hold, not in how many.
"""
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from config import Config, DistillConfig, ModelConfig, OptimConfig, layer_in_fp8, layer_kinds
from config.parameter_groups import freezes
from model.block import TransformerBlock
from model.sharding import mesh_degrees, set_rates
from model.shared_keys import key_sources
from model.transformer import PipelineStage
from parallel.sharding.spec import ParameterSpec, ShardedParameter, sharded_parameters
from parallel.topology.dims import ParallelDims, min_world_size
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Activity

# ---- a part of a stage -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PartDescription:
    """A unit that a stage runs, gathers and reduces as a whole: the embedding, a block, or the output head.

    `cfg` holds the keys that modules read; `layer` is the number of a block, "embedding" or "head". `params`
    have no storage and exclude `shared_table`, the embedding's table if the output head or multi-token
    prediction needs it too. has_input_grad: something below it trains, or it is in another stage.
    """
    cfg: Config
    layer: int | str
    params: tuple[ShardedParameter, ...]
    shared_table: ShardedParameter | None = None
    has_input_grad: bool = True

    @property
    def trains(self) -> bool:
        """Whether any of its parameters does."""
        tables = () if self.shared_table is None else (self.shared_table,)
        return any(param.requires_grad for param in (*self.params, *tables))

    @property
    def has_backward(self) -> bool:
        return self.has_input_grad or self.trains


class BlockKind(NamedTuple):
    """Blocks of one kind differ only in parameter names.

    `name` is the kind in model.pattern. `mixer` is None for an MLP alone. `is_read` says that later blocks
    read the block's keys. `frozen` says which of its parameters are; () if all train.
    """
    name: str
    mixer: type[nn.Module] | None
    in_fp8: bool
    is_read: bool
    frozen: tuple[bool, ...] = ()


def block_kind(cfg: Config, layer: int) -> BlockKind:
    name = layer_kinds(cfg.model)[min(layer, cfg.model.layers - 1)]
    is_read = layer in key_sources(cfg.model).values()
    mixer = TransformerBlock.mixer_class(cfg, layer)
    return BlockKind(name, mixer, layer_in_fp8(cfg, layer), is_read, frozen_in_block(cfg, layer))


@lru_cache(maxsize=1 << 12)
def frozen_in_block(cfg: Config, layer: int) -> tuple[bool, ...]:
    """Return which parameters of a block are frozen, or () if all train."""
    if not freezes(cfg):
        return ()
    frozen = tuple(param.spec.is_frozen for param in describe_block(cfg, layer).params)
    return frozen if any(frozen) else ()


@dataclass(frozen=True)
class EndParts:
    """The parts other than blocks."""
    embedding: PartDescription
    head: PartDescription


@lru_cache(maxsize=1 << 12)
def describe_ends(cfg: Config, ends_are_apart: bool) -> EndParts:
    mesh = mesh_of_one_stage(cfg)
    num_layers = cfg.model.layers
    first = PipelineStage(cfg, mesh, 0, 0, ends_are_apart=ends_are_apart)
    last = PipelineStage(cfg, mesh, num_layers, num_layers, ends_are_apart=ends_are_apart)
    ends: list[PartDescription] = []
    for layer, stage, module in (("embedding", first, first.embedding), ("head", last, last.head)):
        set_rates(cfg, module)
        table = stage.shared_table()
        params = tuple(param for param in sharded_parameters(module) if param is not table)
        ends.append(PartDescription(cfg, layer, params, table))
    return EndParts(*ends)


@lru_cache(maxsize=1 << 12)
def describe_block(cfg: Config, layer: int) -> PartDescription:
    block = TransformerBlock(cfg, mesh_of_one_stage(cfg), layer)
    set_rates(cfg, block)
    return PartDescription(cfg, layer, tuple(sharded_parameters(block)))


def mesh_of_one_stage(cfg: Config, activity: Activity | None = None) -> Mesh:
    """Return the smallest mesh with the degrees that modules read, as seen by rank 0. With `activity`, its
    wire carries what the modules exchange."""
    degrees = mesh_degrees(cfg) | {"pp": 1, "dp_replicate": 1}
    dims = ParallelDims(min_world_size(degrees), **degrees)
    return Mesh.without_processes(dims, rank=0, activity=activity)


# ---- a stage -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StageDescription:
    """`parts` follow the order of the forward pass; blocks of the same kind are the same object."""
    cfg: Config
    parts: tuple[PartDescription, ...]


@lru_cache(maxsize=1 << 14)
def describe_stage(cfg: Config, first: int, end: int, ends_are_apart: bool = False) -> StageDescription:
    """Describe blocks first .. end - 1, plus embedding and head if PipelineStage has them.

    `cfg` has the stage's recompute mode. `ends_are_apart` says that the first and last stage are on different
    ranks.
    """
    return describe_modules(keys_of_modules(cfg), first, end, ends_are_apart)


@lru_cache(maxsize=1 << 12)
def describe_modules(cfg: Config, first: int, end: int, ends_are_apart: bool) -> StageDescription:
    parts: list[PartDescription] = []
    if first == 0:
        parts.append(describe_ends(cfg, ends_are_apart).embedding)
    has_grad = first > 0 or parts[0].trains

    block_of: dict[tuple[BlockKind, bool], PartDescription] = {}
    for layer in range(first, end):
        form = block_kind(cfg, layer), has_grad
        if form not in block_of:
            block = describe_block(cfg, first_layer_like(cfg, layer))
            block_of[form] = replace(block, has_input_grad=has_grad)
        parts.append(block_of[form])
        has_grad = parts[-1].has_backward

    if end == cfg.model.layers:
        parts.append(replace(describe_ends(cfg, ends_are_apart).head, has_input_grad=has_grad))
    return StageDescription(cfg, tuple(parts))


def first_layer_like(cfg: Config, layer: int) -> int:
    """Return the first layer with a block of the same kind."""
    kind = block_kind(cfg, layer)
    return next(other for other in range(layer + 1) if block_kind(cfg, other) == kind)


def keys_of_modules(cfg: Config) -> Config:
    """Return the config without the layout keys that no module reads, so that layouts that differ only in
    them share modules. A teacher is described apart."""
    parallel = replace(
        cfg.parallel,
        pp=1,
        vpp=None,
        schedule="1f1b",
        stages=None,
        recompute_stages=None,
        dp_rep=1,
        zero=0,
    )
    train = replace(cfg.train, micro_batch=1, global_batch=1, ramp=None)
    return replace(cfg, parallel=parallel, train=train, distill=DistillConfig())


def describe_model(model: ModelConfig, groups: str | None = None) -> StageDescription:
    """Describe the full model on one rank, with the parameters of optim.groups that are frozen. A vocabulary
    decided by the tokenizer counts as 0 rows, and padding does not count."""
    counted = replace(model, vocab=model.vocab or 0, vocab_multiple=1)
    return describe_stage(Config(model=counted, optim=OptimConfig(groups=groups)), 0, model.layers)


def all_parameters(model: ModelConfig) -> Iterator[tuple[ParameterSpec, list[str]]]:
    """Yield each parameter of the full model on one rank, with the names of all tensors that it stores. Specs
    of blocks of the same kind are those of the first."""
    for number, part in enumerate(describe_model(model).parts):
        params = part.params if part.shared_table is None else (*part.params, part.shared_table)
        for param in params:
            keys = [box.key for box in param.spec.boxes]
            if isinstance(part.layer, int):
                layer = f"layers.{number - 1}."
                keys = [layer + key.removeprefix(f"layers.{part.layer}.") for key in keys]
            yield param.spec, keys
