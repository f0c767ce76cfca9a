"""Model FLOPs: the work that a token needs, however it is computed.

Each matrix multiplies every token once, except lookup tables; a routed expert multiplies only the tokens that
choose it. Softmax attention multiplies each query head with the visible keys, and the result with their
values. For other mixers, products are counted by running them on a sequence of meta tensors. Norms,
activations, short convolutions and recomputation do not count.
"""
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import nn

from config import Config, ModelConfig, OptimConfig, head_dim, layer_model, modules_ahead, value_dim
from model.attention import AttentionCore
from model.block import TransformerBlock
from model.context import View, forward_context, get_view
from model.describe import PartDescription, describe_stage, mesh_of_one_stage
from model.router import mixture
from parallel.sharding.spec import ParameterSpec, ShardedParameter, sharded_parameters

NO_PRODUCTS = ("embedding", "positions", "convolution")  # roles of parameters


def mean_keys(length: int, window: int | None) -> float:
    """Return the mean number of keys that a causal query sees in a sequence of `length` tokens."""
    width = min(window or length, length)
    growing = width * (width + 1) / 2
    return (growing + (length - width) * width) / length


def keys_of_layers(model: ModelConfig, documents: Sequence[int]) -> float:
    """Return keys_of_layer averaged over all layers."""
    return sum(keys_of_layer(model, layer, documents) for layer in range(model.layers)) / model.layers


def keys_of_layer(model: ModelConfig, layer: int, documents: Sequence[int]) -> float:
    """Return keys_seen for one layer, or 0 without softmax attention."""
    model = layer_model(model, layer)
    return keys_in_view(documents, get_view(model)) if model.mixer.has_softmax else 0.0


def keys_in_view(documents: Sequence[int], view: View) -> float:
    """Return keys_seen for a layer restricted to this view."""
    if view.chunk is None:
        return keys_seen(documents, view.window)
    chunk = view.chunk
    pieces = [min(chunk, length - start) for length in documents for start in range(0, length, chunk)]
    return keys_seen(pieces, view.window)


def keys_seen(documents: Sequence[int], window: int | None) -> float:
    """Return the mean number of keys per query when attention stays within documents of these lengths."""
    seen = sum(length * mean_keys(length, window) for length in documents)
    return seen / sum(documents)


def flops_of_parts(model: ModelConfig, documents: Sequence[int], seq_len: int) -> list[float]:
    """Return forward FLOPs per token of the embedding, of each block, and of the head with multi-token
    prediction.

    `documents` holds the lengths of the token runs that attend to each other, `seq_len` the tokens of a
    sequence. Vocabulary padding counts if the model has it.
    """
    parts = describe_stage(Config(model=model), 0, model.layers).parts
    return [flops_of_part(part, model, tuple(documents), seq_len) for part in parts]


def training_flops(
    model: ModelConfig, documents: Sequence[int], seq_len: int, groups: str | None = None
) -> float:
    """Return the FLOPs per token of forward and backward, three times those of the forward if all trains.

    groups: optim.groups. A frozen matrix has no weight gradient, and parts below all that trains have no
    backward. The others count all their input gradients.
    """
    cfg = Config(model=model, optim=OptimConfig(groups=groups))
    total = 0.0
    for part in describe_stage(cfg, 0, model.layers).parts:
        forward = flops_of_part(part, model, tuple(documents), seq_len)
        uses = list(matrix_flops(part, model))
        matrices = sum(flops for _, flops in uses)
        total += forward
        if part.has_backward:
            total += matrices + 2 * (forward - matrices)
            total += sum(flops for param, flops in uses if param.requires_grad)
    return total


def flops_of_part(
    part: PartDescription, model: ModelConfig, documents: tuple[int, ...], seq_len: int
) -> float:
    """Return forward FLOPs per token of one part."""
    matrices = sum(flops for _, flops in matrix_flops(part, model))
    if part.layer == "embedding":
        return matrices
    layers: Iterable[int] = range(model.layers, model.layers + modules_ahead(model))
    if isinstance(part.layer, int):
        layers = (part.layer,)
    return matrices + sum(mixer_flops(model, layer, documents, seq_len) for layer in layers)


def matrix_flops(part: PartDescription, model: ModelConfig) -> Iterator[tuple[ShardedParameter, float]]:
    """Yield (parameter, FLOPs per token of the products with it) for one part."""
    for param in part.params:
        yield param, flops_of_matrix(param.spec, model)
    if part.layer == "head":
        # each multi-token module has a block and reuses the head's matrix
        table = part.shared_table if model.tied else next(x for x in part.params if x.spec.role == "head")
        yield table, (modules_ahead(model) + model.tied) * 2.0 * table.spec.numel


def flops_of_matrix(spec: ParameterSpec, model: ModelConfig) -> float:
    """Return FLOPs per token of the product with one parameter, or 0 if it is not a matrix."""
    if len(spec.shape) < 2 or spec.role in NO_PRODUCTS:
        return 0.0
    experts = mixture(model)
    used = experts.top_k / experts.experts if experts and spec.is_expert else 1.0
    return 2.0 * used * spec.numel


def mixer_flops(model: ModelConfig, layer: int, documents: tuple[int, ...], seq_len: int) -> float:
    """Return FLOPs per token in the mixer of one layer, excluding its matrices."""
    mixer = TransformerBlock.mixer_class(Config(model=model), layer)
    if mixer is None:
        return 0.0
    model = layer_model(model, layer)
    if has_softmax_core(mixer, model, layer):
        return attention_flops(model, keys_in_view(documents, get_view(model)))
    return counted_flops(mixer, model, layer, seq_len)


def attention_flops(model: ModelConfig, keys: float) -> float:
    """Return FLOPs per token in the softmax attention of one layer, excluding its matrices."""
    return 2.0 * model.mixer.heads * (head_dim(model) + value_dim(model)) * keys


@lru_cache(maxsize=1 << 12)
def has_softmax_core(mixer: type[nn.Module], model: ModelConfig, layer: int) -> bool:
    cfg = Config(model=model)
    modules = mixer(cfg, mesh_of_one_stage(cfg), layer).modules()
    return any(isinstance(value, AttentionCore) for module in modules for value in vars(module).values())


@lru_cache(maxsize=1 << 12)
def counted_flops(mixer: type[nn.Module], model: ModelConfig, layer: int, seq_len: int) -> float:
    """Return FLOPs per token of a mixer's products other than with its matrices, recorded on seq_len tokens.

    Warns and returns 0 for a mixer that does not run on meta tensors.
    """
    # imported here because it pulls in Triton, which runs with softmax attention do not need
    from torch.utils.flop_counter import FlopCounterMode

    cfg = Config(model=model)
    with torch.device("meta"), torch.no_grad():
        module = mixer(cfg, mesh_of_one_stage(cfg), layer)
        matrices = 0.0
        for param in sharded_parameters(module):
            param.data = torch.empty(param.spec.shape)
            matrices += flops_of_matrix(param.spec, model)
        positions = torch.zeros(1, seq_len, dtype=torch.int64)
        context = forward_context(cfg, positions, None)
        with FlopCounterMode(display=False) as counter:
            try:
                module(torch.empty(1, seq_len, model.hidden), context)
            except RuntimeError as error:
                warnings.warn(f"FLOPs of {mixer.__name__} beside its matrices are not counted: it does not "
                              f"run without values ({error})")
                return 0.0
    return counter.get_total_flops() / seq_len - matrices
