"""Model FLOPs: what a token needs, however it is computed.

Each matrix multiplies every token once, but for the tables that are looked up; a routed expert those tokens
that choose it. Attention multiplies each query head with the keys that it sees, and their values with the
result. Norms, activations and what is computed again do not count.
"""
from collections.abc import Sequence

from config import Config, ModelConfig, head_dim, value_dim
from model.describe import PartDescription, describe_stage
from parallel.sharding.spec import ParameterSpec

LOOKUPS = ("embedding", "positions")  # roles of parameters


def mean_keys(length: int, window: int | None) -> float:
    """The mean number of keys that a causal query sees in a sequence of `length` tokens."""
    width = min(window or length, length)
    growing = width * (width + 1) / 2
    return (growing + (length - width) * width) / length


def keys_seen(documents: Sequence[int], window: int | None) -> float:
    """The mean number of keys that a query sees where tokens attend within documents of these lengths."""
    seen = sum(length * mean_keys(length, window) for length in documents)
    return seen / sum(documents)


def flops_of_parts(model: ModelConfig, keys: float) -> list[float]:
    """FLOPs of a token in the forward of the embedding, of each block, and of the head with multi-token
    prediction. keys: that a query sees, on average. Padding of the vocabulary counts if the model has it."""
    parts = describe_stage(Config(model=model), 0, model.layers).parts
    return [flops_of_part(part, model, keys) for part in parts]


def flops_of_part(part: PartDescription, model: ModelConfig, keys: float) -> float:
    """FLOPs of a token in the forward of one part."""
    flops = sum(flops_of_matrix(param.spec, model) for param in part.params)
    if part.layer == "embedding":
        return flops
    if part.layer != "head":
        return flops + attention_flops(model, keys)
    # each module that predicts further tokens has a block, and uses the head's matrix again
    table = part.shared_table if model.tied else next(one for one in part.params if one.spec.role == "head")
    used_again = model.mtp + model.tied
    return flops + used_again * 2.0 * table.spec.numel + model.mtp * attention_flops(model, keys)


def flops_of_matrix(spec: ParameterSpec, model: ModelConfig) -> float:
    """FLOPs of a token in the product with one parameter, which may be no matrix."""
    if len(spec.shape) < 2 or spec.role in LOOKUPS:
        return 0.0
    used = model.top_k / model.experts if spec.is_expert else 1.0
    return 2.0 * used * spec.numel


def attention_flops(model: ModelConfig, keys: float) -> float:
    """FLOPs of a token in the attention of one layer, beside its matrices."""
    return 2.0 * model.heads * (head_dim(model) + value_dim(model)) * keys
