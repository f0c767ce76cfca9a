"""How far apart two runs of a job may be: the bounds derived in lab/proof/precision/__init__.py."""
import math
import re
from typing import NamedTuple

import torch

from config import Config, ConfigError, ModelConfig, NoPart, fp8_recipe, layer_in_fp8, layer_model
from kernels.fp8_linear import RECIPES
from lab.proof.precision.errors import (
    E2M1,
    E4M3,
    E5M2,
    SIGMAS,
    U32,
    UNIT,
    Tensors,
    matrices,
    relative_distance,
)
from lab.proof.precision.paper import MUON_SLOPE
from model.router import has_experts, mixture

# Tensors that kernels round in fp32 before their result, in series
CONV = 4  # sums over four tokens, before SiLU
UNIT_LENGTH = 2  # the sum of squares and its root
DELTA_STATE = 9  # a decay's logarithm, decay, pairs, times beta, solved, taken, written, decayed query, sum
NORM = 2  # the root mean square and the product with it
UNIT_OF_8_BITS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
# {train.fp8: of x and W, and of dy}; a stochastic rounding has twice the variance of one to nearest
UNITS = {
    recipe: (E4M3, UNIT_OF_8_BITS[formats.gradient_dtype]) for recipe, formats in RECIPES.items()
} | {"nvfp4": (E2M1, math.sqrt(2) * E2M1)}
LAYER = re.compile(r"layers\.(\d+)\.")


class PartErrors(NamedTuple):
    """The effect of a token mixer or an MLP on errors (lab/proof/precision/__init__.py).

    factors: F, by which the square of the relative error of its input grows.
    roundings: its forward tensors in the compute dtype. inner: tensors inside its kernels, in fp32.
    matrices: those that a path through it multiplies by. linears: its products in 8 bits.
    """

    factors: int
    roundings: int
    inner: int
    matrices: int
    linears: int


NOTHING = PartErrors(factors=1, roundings=0, inner=0, matrices=0, linears=0)
# norm, inner, activation, down, sum; in and down
MLP = PartErrors(factors=1, roundings=5, inner=0, matrices=2, linears=2)
MIXER_ERRORS = {
    # norm, projection, RoPE, probabilities, attention, projection, sum; q or k or v, and out
    "attention": PartErrors(factors=1, roundings=7, inner=0, matrices=2, linears=2),
    "latent": PartErrors(factors=1, roundings=7, inner=0, matrices=2, linears=2),
    # norm, projection, convolution, unit length, the state's output, its norm, the product with SiLU(z),
    # projection, sum; q or k or v, its convolution, and out
    "delta": PartErrors(
        factors=1, roundings=9, inner=CONV + UNIT_LENGTH + DELTA_STATE + NORM, matrices=3, linears=2
    ),
    # in each of q, k and v: norm, projection, convolution; for q and k unit length; the state's output, its
    # norm, the sigmoid, their product, projection, sum; q, k, v, their convolutions, and out
    "kimi": PartErrors(
        factors=3,
        roundings=3 * 3 + 2 + 6,
        inner=3 * CONV + 2 * UNIT_LENGTH + DELTA_STATE + NORM,
        matrices=7,
        linears=4,
    ),
    # in x and z: norm, projection; for x its convolution; y, the norm of its product with SiLU(z),
    # projection, sum; x, z, the convolution, and out. Inside: D x, SiLU(z) and the product
    "mamba": PartErrors(factors=2, roundings=2 * 2 + 1 + 4, inner=CONV + 3 + NORM, matrices=4, linears=3),
    # norm, projection, B x, convolution, its product with C, projection, sum; B or C or x, convolution, out
    "short_conv": PartErrors(factors=1, roundings=7, inner=2, matrices=3, linears=2),
    "none": NOTHING,
}
ENDS = 4  # forward roundings outside the layers


def parts(model: ModelConfig, layer: int) -> tuple[PartErrors, PartErrors]:
    """Return the errors of a layer's token mixer and MLP. Raises ConfigError for a mixer without bounds."""
    of_layer = layer_model(model, layer)
    kind = of_layer.mixer.kind
    if kind not in MIXER_ERRORS:
        raise ConfigError(f"model.mixer.kind: {kind} has no bounds; count it in MIXER_ERRORS of {__name__}")
    return MIXER_ERRORS[kind], NOTHING if isinstance(of_layer.mlp, NoPart) else MLP


def through_layers(model: ModelConfig, before: float, of_layers: list[float]) -> float:
    """Return the squared relative error of a gradient, given the squared errors of the forward.

    `before` is the error of the first layer's input; `of_layers` are the errors that each layer adds to its
    output.
    """
    total, again = before, 0.0
    for layer, added in enumerate(of_layers):
        mixer, _ = parts(model, layer)
        again += (mixer.factors - 1) * total  # the backward of a product reads the other factors
        total = mixer.factors * total + added
    return total + again


def change_in_series(ours: Tensors, theirs: Tensors, model: ModelConfig) -> float:
    """Return D, the relative change of a gradient through the whole model, from the weights of two runs.

    Each matrix or short convolution counts with its own relative distance. Vectors are ignored, since
    their norm is mostly ones that hardly move. In each layer the most distant tensors count, as many as its
    `matrices`; outside the layers, all of them do.
    """
    distances: dict[int, list[float]] = {}  # {layer: squared distances of its matrices}
    before, after = 0.0, 0.0
    for key in matrices(theirs):
        square = relative_distance({key: ours[key]}, {key: theirs[key]}) ** 2
        layer = LAYER.match(key)
        if layer:
            distances.setdefault(int(layer[1]), []).append(square)
        elif key.startswith("head."):
            after += square
        else:
            before += square
    of_layers = [0.0] * (1 + max(distances, default=-1))
    for layer, squares in distances.items():
        number = sum(part.matrices for part in parts(model, layer))
        of_layers[layer] = sum(sorted(squares)[-number:])
    return SIGMAS * math.sqrt(through_layers(model, before, of_layers) + after)


def rounding_squares(cfg: Config, layer: int) -> float:
    """Return the sum of u^2 over the tensors that a layer's forward rounds in series: those of its parts,
    and the weights that they read. Its backward rounds the same number.
    """
    of_layer = parts(cfg.model, layer)
    num_roundings = 1 + sum(part.roundings for part in of_layer)
    return num_roundings * UNIT[cfg.train.dtype] ** 2 + sum(part.inner for part in of_layer) * U32**2


def gradient_error(cfg: Config) -> float:
    """Return E, the relative error of one process's gradients against exact arithmetic."""
    ends = ENDS * UNIT[cfg.train.dtype] ** 2
    recipe = fp8_recipe(cfg.train)
    operand, output_grad = UNITS[recipe] if recipe else (0.0, 0.0)
    sends_8_bits = cfg.parallel.compress_tokens != "none" and cfg.parallel.ep * cfg.parallel.etp > 1
    forward: list[float] = []
    backward = ends
    for layer in range(cfg.model.layers):
        roundings = rounding_squares(cfg, layer)
        linears = sum(part.linears for part in parts(cfg.model, layer)) if layer_in_fp8(cfg, layer) else 0
        # each linear rounds x and W in the forward, W and x in the backward, and dy twice; the experts' first
        # reads rows that were rounded, as does its weight gradient, and its last a rounded dy
        rows = E4M3**2 if has_experts(cfg.model, layer) and sends_8_bits else 0.0
        forward.append(roundings + linears * 2 * operand**2 + rows)
        backward += roundings + linears * (2 * operand**2 + 2 * output_grad**2) + 2 * rows
    squares = through_layers(cfg.model, ends, forward) + backward
    return SIGMAS * math.sqrt(squares / 6)


def gradient_bound(cfg: Config, change: float, reordered: bool) -> float:
    """Return the bound on the relative distance between the gradients of two runs of one dtype.

    `change` is that of their weights (see change_in_series). `reordered` says whether the two compute
    products or sums in different orders.
    """
    error = gradient_error(cfg)
    unit = UNIT[cfg.train.dtype]
    if reordered:
        return math.sqrt(2) * error + change
    num_additions = cfg.train.global_batch * cfg.train.seq_len
    base = SIGMAS * U32 * math.sqrt(num_additions)
    return base + change + error * min(1.0, math.sqrt(change / unit))


def is_reordered(cfg: Config) -> bool:
    """Return whether the layout computes products or sums in another order than one process."""
    parallel = cfg.parallel
    return parallel.tp > 1 or parallel.cp > 1 or parallel.ep > 1 or parallel.etp > 1


def with_rerouting(cfg: Config, error: float) -> float:
    """Return the relative error of the gradients if the hidden states have `error`. A MoE has a larger one.

    Where the k-th and the next router logit are closer than their errors, another expert is chosen. The gap
    between 4 normal logits has density 1.5 / sigma at 0, and their errors have a mean positive difference of
    0.56 error sigma: each layer reroutes a fraction `error` of the tokens, whose gradients are then off by
    their own size.
    """
    return error + math.sqrt(cfg.model.layers * error) if mixture(cfg.model) else error


def path_bound(cfg: Config, rho: float) -> float:
    """Return the bound on the relative distance of the masters' paths if gradients are off by rho."""
    if cfg.optim.name in ("sgd", "lars"):
        return rho
    if cfg.optim.name == "dion":  # as small as the last singular value is, rho may turn its direction
        return 2.0
    sign = min(2.0, 2 * math.sqrt(rho / math.pi))
    if cfg.optim.name in ("muon", "normuon"):
        return min(2.0, max(sign, MUON_SLOPE * rho))
    return sign


def logits_size(weights: Tensors) -> float:
    """Return the RMS of the logits: the head times a hidden state with elements of size 1."""
    head = weights.get("head.weight", weights["embed.weight"])
    return float(head.double().square().mean().sqrt()) * math.sqrt(head.shape[1])
