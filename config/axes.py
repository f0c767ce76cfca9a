"""The axes of a layout in one table. Each is a key of parallel.* with the number of ranks that it shards
over.

Rules, layout names, run headers, plans and proofs read this table. parallel/topology/dims.py defines which
ranks form the groups of an axis.
"""
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from config.schema import Config, ParallelConfig


def sizes_over_tp(cfg: Config) -> dict[str, int]:
    """Return the sizes that tp must divide: heads (or the features of a mixer without heads), MLP width,
    vocabulary rows."""
    model, tp = cfg.model, cfg.parallel.tp
    divided = {f"mixer.{name}": number for name, number in model.mixer.heads_over_tp().items()}
    divided = divided or model.mixer.features_over_tp(model.hidden)
    sizes = {
        **{f"model.{key}": size for key, size in divided.items()},
        **{f"model.{key}": size for key, size in model.mlp.features_over_tp(model.hidden).items()},
        "model.vocab_multiple": model.vocab_multiple,
    }
    may_share = getattr(model.mixer, "qk_norm", None) != "whole"
    kv_heads = sizes.get("model.mixer.kv_heads", 0)
    if kv_heads and tp % kv_heads == 0 and may_share:
        del sizes["model.mixer.kv_heads"]  # several ranks compute the same key and value head
    return sizes


class Axis(NamedTuple):
    """One axis of parallelism.

    `key` is the degree, a number of ranks in parallel.*; `word` precedes it in layout names; `dims` is its
    field of ParallelDims.

    `reads_same`: its ranks read the same samples.
    `reuses_ranks`: it regroups the ranks of other axes, so the degree is not a factor of the world size.
    `of_experts`: it is 1 in a model without experts.
    `divides`: {key: size} that the degree must divide.
    """
    key: str
    word: str
    dims: str
    reads_same: bool = False
    reuses_ranks: bool = False
    of_experts: bool = False
    divides: Callable[[Config], dict[str, int]] = lambda cfg: {}


AXES = (
    Axis("tp", "tp", "tp", reads_same=True, divides=sizes_over_tp),
    Axis("pp", "pp", "pp", reads_same=True),
    Axis("cp", "cp", "cp", reads_same=True),
    Axis("dp_rep", "rep", "dp_replicate"),
    Axis("ep", "ep", "ep", reuses_ranks=True, of_experts=True),
    Axis("etp", "etp", "etp", reuses_ranks=True, of_experts=True),
)


def axis_degrees(parallel: ParallelConfig) -> dict[str, int]:
    """Return {axis key: degree}."""
    return {axis.key: getattr(parallel, axis.key) for axis in AXES}


def ranks_of_microbatch(degrees: Mapping[str, int]) -> int:
    """Return the number of ranks that read the same samples. Missing axes in `degrees` count as 1."""
    return math.prod(degrees.get(axis.key, 1) for axis in AXES if axis.reads_same)


def ranks_of_layout(degrees: Mapping[str, int]) -> int:
    """Return the number that the world size must be a multiple of. The remaining factor shards the state
    (dp_shard)."""
    return math.prod(degrees.get(axis.key, 1) for axis in AXES if not axis.reuses_ranks)
