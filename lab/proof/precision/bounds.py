"""How far two runs of a job may be apart: the bounds that lab/proof/precision/__init__.py derives."""
import math
import re
from typing import NamedTuple

from config import Config, ConfigError, ModelConfig, NoPart, layer_in_fp8, layer_model
from model.router import mixture
from lab.proof.precision.errors import E4M3, E5M2, SIGMAS, U32, UNIT, Tensors, matrices, relative_distance
from lab.proof.precision.paper import MUON_SLOPE

# Tensors that kernels round in fp32 before their result, in a chain
CONV = 4  # sums over four tokens, before SiLU
UNIT_LENGTH = 2  # the sum of squares, its root
DELTA_STATE = 9  # a decay's logarithm, decay, pairs, times beta, solved, taken, written, decayed query, sum
NORM = 2  # the root of the mean square, the product with it
LAYER = re.compile(r"layers\.(\d+)\.")


class PartErrors(NamedTuple):
    """What a mixer of tokens, or an MLP, does to errors (lab/proof/precision/__init__.py).

    factors: F, how many times as large the square of a relative error comes out that goes in. roundings: of
    tensors of its forward, in the compute dtype. inner: those inside its kernels, in fp32. matrices: that its
    result changes with. linears: its products in 8 bits.
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
    # norm, projection, convolution, unit length, what the state gives, its norm, the product with SiLU(z),
    # projection, sum; q or k or v, its convolution, and out
    "delta": PartErrors(
        factors=1, roundings=9, inner=CONV + UNIT_LENGTH + DELTA_STATE + NORM, matrices=3, linears=2
    ),
    # in each of q, k and v: norm, projection, convolution; of q and k unit length; what the state gives, its
    # norm, the sigmoid, their product, projection, sum; q, k, v, their convolutions, and out
    "kimi": PartErrors(
        factors=3,
        roundings=3 * 3 + 2 + 6,
        inner=3 * CONV + 2 * UNIT_LENGTH + DELTA_STATE + NORM,
        matrices=7,
        linears=4,
    ),
    # in x and z: norm, projection; of x its convolution; y, the norm of its product with SiLU(z), projection,
    # sum; x, z, the convolution, and out. Inside: D x, SiLU(z) and the product
    "mamba": PartErrors(factors=2, roundings=2 * 2 + 1 + 4, inner=CONV + 3 + NORM, matrices=4, linears=3),
    # norm, projection, B x, convolution, its product with C, projection, sum; B or C or x, convolution, out
    "short_conv": PartErrors(factors=1, roundings=7, inner=2, matrices=3, linears=2),
    "none": NOTHING,
}
ENDS = 4  # roundings of the forward outside of the layers


def parts(model: ModelConfig, layer: int) -> tuple[PartErrors, PartErrors]:
    """The mixer of tokens and the MLP of a layer. Raises ConfigError for a mixer without derived bounds."""
    of_layer = layer_model(model, layer)
    kind = of_layer.mixer.kind
    if kind not in MIXER_ERRORS:
        raise ConfigError(f"model.mixer.kind: {kind} has no bounds; count it in MIXER_ERRORS of {__name__}")
    return MIXER_ERRORS[kind], NOTHING if isinstance(of_layer.mlp, NoPart) else MLP


def through_layers(model: ModelConfig, before: float, of_layers: list[float]) -> float:
    """The square of the relative error of a gradient whose forward has errors, of these squares.

    before: those of what the first layer reads. of_layers: those that each layer adds, of its result.
    """
    total, again = before, 0.0
    for layer, added in enumerate(of_layers):
        mixer, _ = parts(model, layer)
        again += (mixer.factors - 1) * total  # the backward of a product reads the other factors
        total = mixer.factors * total + added
    return total + again


def change_in_series(ours: Tensors, theirs: Tensors, model: ModelConfig) -> float:
    """D: the relative change of a gradient through the whole model, from the weights of two runs.

    Each matrix or short convolution counts with its own relative distance: vectors, most of whose norm are
    ones that hardly move, say nothing of it. Those of each layer that are furthest apart count, as many as
    its result changes with, and each one outside of the layers.
    """
    distances: dict[int, list[float]] = {}  # {layer: squares, of its matrices}
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
    """The sum of u^2 over the tensors that a layer's forward rounds in a chain: those of its parts, and the
    weights that they read. Its backward rounds as many."""
    of_layer = parts(cfg.model, layer)
    num_roundings = 1 + sum(part.roundings for part in of_layer)
    return num_roundings * UNIT[cfg.train.dtype] ** 2 + sum(part.inner for part in of_layer) * U32**2


def gradient_error(cfg: Config) -> float:
    """E: the relative error of the gradients of one process against exact arithmetic."""
    ends = ENDS * UNIT[cfg.train.dtype] ** 2
    output_grad = E4M3 if cfg.train.fp8 == "blockwise" else E5M2
    forward: list[float] = []
    backward = ends
    for layer in range(cfg.model.layers):
        roundings = rounding_squares(cfg, layer)
        linears = sum(part.linears for part in parts(cfg.model, layer)) if layer_in_fp8(cfg, layer) else 0
        # each linear rounds x and W in the forward, W and x in the backward, and dy twice
        forward.append(roundings + linears * 2 * E4M3**2)
        backward += roundings + linears * (2 * E4M3**2 + 2 * output_grad**2)
    squares = through_layers(cfg.model, ends, forward) + backward
    return SIGMAS * math.sqrt(squares / 6)


def gradient_bound(cfg: Config, change: float, reordered: bool) -> float:
    """The relative distance of the gradients of two runs of one dtype.

    change: that of their weights, see change_in_series. reordered: whether the two compute products or sums
    in different orders.
    """
    error = gradient_error(cfg)
    unit = UNIT[cfg.train.dtype]
    if reordered:
        return math.sqrt(2) * error + change
    num_additions = cfg.train.global_batch * cfg.train.seq_len
    base = SIGMAS * U32 * math.sqrt(num_additions)
    return base + change + error * min(1.0, math.sqrt(change / unit))


def is_reordered(cfg: Config) -> bool:
    """Whether the layout computes products or their sums in another order than one process."""
    parallel = cfg.parallel
    return parallel.tp > 1 or parallel.cp > 1 or parallel.ep > 1 or parallel.etp > 1


def with_rerouting(cfg: Config, error: float) -> float:
    """The relative error of the gradients where that of the hidden states is `error`: larger in a mixture.

    Where the k-th and the next logit of a router are closer than their errors, another expert is chosen.
    The gap of 4 normal logits has density 1.5 / sigma at 0, and their errors have a mean positive
    difference of 0.56 error sigma: each layer reroutes a share `error` of the tokens, whose gradients are
    then off by their size.
    """
    return error + math.sqrt(cfg.model.layers * error) if mixture(cfg.model) else error


def path_bound(cfg: Config, rho: float) -> float:
    """The relative distance of the masters' paths from their start, where gradients are off by rho."""
    if cfg.optim.name in ("sgd", "lars"):
        return rho
    sign = min(2.0, 2 * math.sqrt(rho / math.pi))
    if cfg.optim.name == "muon":
        return min(2.0, max(sign, MUON_SLOPE * rho))
    return sign


def logits_size(weights: Tensors) -> float:
    """The root mean square of the logits: the head times a hidden state whose elements have size 1."""
    head = weights.get("head.weight", weights["embed.weight"])
    return float(head.double().square().mean().sqrt()) * math.sqrt(head.shape[1])
