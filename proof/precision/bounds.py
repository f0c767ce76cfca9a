"""How far two runs of a job may be apart: the bounds that proof/precision/__init__.py derives."""
import math
import re

from config import Config
from model.router import mixture
from proof.precision.errors import E4M3, E5M2, SIGMAS, U32, UNIT, Tensors, matrices, relative_distance
from proof.precision.paper import MUON_SLOPE

IN_SERIES = 4  # matrices of a layer that any value passes through: q or k or v, out; in, down
LAYER = re.compile(r"layers\.\d+")


def change_in_series(ours: Tensors, theirs: Tensors) -> float:
    """D: the relative change of a product through the whole model, from the weights of two runs.

    Each matrix counts with its own relative distance: vectors, most of whose norm are ones that hardly
    move, say nothing of it. The IN_SERIES of each layer that are furthest apart count, and each matrix
    outside of the layers.
    """
    distances: dict[str, list[float]] = {}  # {layer: of its matrices}
    total = 0.0
    for key in matrices(theirs):
        distance = relative_distance({key: ours[key]}, {key: theirs[key]})
        layer = LAYER.match(key)
        if layer:
            distances.setdefault(layer[0], []).append(distance)
        else:
            total += distance**2
    for of_layer in distances.values():
        total += sum(distance**2 for distance in sorted(of_layer)[-IN_SERIES:])
    return SIGMAS * math.sqrt(total)


def num_roundings(cfg: Config) -> int:
    """K: the tensors that are rounded in a chain.

    A layer's forward rounds 13: norm, projection, RoPE, probabilities, attention, projection, sum, norm,
    inner, activation, down, sum, and the weights that they read. Its backward rounds as many, and the ends
    of the model four.
    """
    return 2 * (13 * cfg.model.layers + 4)


def gradient_error(cfg: Config) -> float:
    """E: the relative error of the gradients of one process against exact arithmetic."""
    squares = num_roundings(cfg) * UNIT[cfg.train.dtype] ** 2
    if cfg.train.dtype == "fp8":
        # 4 linears a layer; each rounds x and W in the forward, W and x in the backward, and dy twice
        num_layers = cfg.model.layers - 2 * cfg.train.fp8_keep
        output_grad = E4M3 if cfg.train.fp8 == "blockwise" else E5M2
        squares += num_layers * 4 * (4 * E4M3**2 + 2 * output_grad**2)
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
