"""Optimizers as their papers write them: one update of one whole tensor, in plain torch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Update:
    """The numbers of one update. decay: the weight decay of this tensor, 0 for vectors."""

    step: int
    lr: float
    decay: float
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    eps: float = 1e-8
    orthogonalize: str = "newton-schulz"
    rank_fraction: float = 0.25


def sgd(w: Tensor, g: Tensor, state: dict, u: Update) -> Tensor:
    """Polyak 1964, with L2 decay in the gradient."""
    state["momentum"] = u.momentum * state.get("momentum", 0) + g + u.decay * w
    return w - u.lr * state["momentum"]


def lion(w: Tensor, g: Tensor, state: dict, u: Update) -> Tensor:
    """arXiv 2302.06675, algorithm 2."""
    m = state.get("lion_m", torch.zeros_like(w))
    state["lion_m"] = u.beta2 * m + (1 - u.beta2) * g
    return w - u.lr * ((u.beta1 * m + (1 - u.beta1) * g).sign() + u.decay * w)


def adam_direction(g: Tensor, state: dict, u: Update) -> Tensor:
    m = state["adam_m"] = u.beta1 * state.get("adam_m", 0) + (1 - u.beta1) * g
    v = state["adam_v"] = u.beta2 * state.get("adam_v", 0) + (1 - u.beta2) * g**2
    return m / (1 - u.beta1**u.step) / ((v / (1 - u.beta2**u.step)).sqrt() + u.eps)


def adamw(w: Tensor, g: Tensor, state: dict, u: Update) -> Tensor:
    """arXiv 1711.05101, algorithm 2."""
    return w - u.lr * (adam_direction(g, state, u) + u.decay * w)


def lamb(w: Tensor, g: Tensor, state: dict, u: Update) -> Tensor:
    """arXiv 1904.00962, algorithm 2 with phi the identity. Vectors move without the ratio."""
    r = adam_direction(g, state, u) + u.decay * w
    return w - u.lr * (w.norm() / r.norm() if w.dim() > 1 else 1.0) * r


def lars(w: Tensor, g: Tensor, state: dict, u: Update) -> Tensor:
    """arXiv 1708.03888, algorithm 1 with eta 0.001; the ratio over the decayed gradient's norm. Vectors as in
    LAMB.
    """
    r = g + u.decay * w
    rate = u.lr * (0.001 * w.norm() / r.norm() if w.dim() > 1 else 1.0)
    state["momentum"] = u.momentum * state.get("momentum", 0) + rate * r
    return w - state["momentum"]


# of arXiv 2505.16932, implementation 1: each polynomial of x / 1.01
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
POLYNOMIALS = {
    "newton-schulz": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar-express": tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS),
}


def orthogonal(x: Tensor, method: str) -> Tensor:
    """Keller Jordan 2024, or arXiv 2505.16932."""
    x = x / (x.norm() * (1.01 if method == "polar-express" else 1) + 1e-7)
    for a, b, c in POLYNOMIALS[method]:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def muon(w: Tensor, g: Tensor, state: dict, u: Update) -> Tensor:
    """Keller Jordan 2024 for a hidden matrix, with arXiv 2502.16982's scale 0.2 sqrt(max(m, n))."""
    m = state["muon_m"] = u.momentum * state.get("muon_m", 0) + g
    x = orthogonal(g + u.momentum * m, u.orthogonalize)
    return w * (1 - u.lr * u.decay) - u.lr * 0.2 * math.sqrt(max(w.shape)) * x


def normuon(w: Tensor, g: Tensor, state: dict, u: Update) -> Tensor:
    """arXiv 2510.05491, algorithm 1, for a hidden matrix."""
    m = state["normuon_m"] = u.momentum * state.get("normuon_m", 0) + (1 - u.momentum) * g
    x = orthogonal(m, u.orthogonalize)
    of_rows = torch.stack([(row * row).mean() for row in x])[:, None]
    v = state["normuon_v"] = u.beta2 * state.get("normuon_v", 0) + (1 - u.beta2) * of_rows
    x = x / (v.sqrt() + u.eps)
    return w - u.lr * u.decay * w - 0.2 * u.lr * math.sqrt(w.numel()) / x.norm() * x


def orthonormal_columns(x: Tensor) -> Tensor:
    """Gram and Schmidt, twice."""
    found: list[Tensor] = []
    for column in x.T:
        for earlier in (*found, *found):
            column = column - (earlier @ column) * earlier
        found.append(column / column.norm())
    return torch.stack(found, 1)


def dion(w: Tensor, g: Tensor, state: dict, u: Update) -> Tensor:
    """arXiv 2504.05295, algorithm 1, for a hidden matrix, with Muon's scale. dion_q [m, n], Q^T in its first
    rows, is there before the first step."""
    rank = math.ceil(u.rank_fraction * min(w.shape))
    b = state.get("dion_m", 0) + g
    p = orthonormal_columns(b @ state["dion_q"][:rank].T)
    r = b.T @ p
    state["dion_m"] = b - (1 - u.momentum) * p @ r.T
    turned_q = torch.stack([column / column.norm() for column in r.T])
    state["dion_q"] = torch.cat((turned_q, state["dion_q"][rank:]))
    return w * (1 - u.lr * u.decay) - u.lr * 0.2 * math.sqrt(max(w.shape)) * p @ turned_q


RULES = {
    "adamw": adamw,
    "lamb": lamb,
    "lars": lars,
    "lion": lion,
    "muon": muon,  # on hidden matrices; adamw on the rest
    "normuon": normuon,  # likewise
    "dion": dion,  # likewise
    "sgd": sgd,
}
