"""The optimizers' papers in fp64: masters and moments after a step, from the state before it.

Every value has a tolerance: how far an fp32 computation may be from it. Each new value is a sum of a few
terms, each a few roundings off. With u the unit roundoff of fp32: 4 u of the master and 64 u of its change
(1 - beta2 and 1 - beta2^step are differences: 20 u), and twice that with a ratio of norms.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from config import OptimConfig
from kernels.newton_schulz import COEFFICIENTS
from lab.proof.precision.errors import SIGMAS, U32, is_convolution
from lab.proof.precision.recorded_run import RecordedRun

LARS_TRUST = 0.001  # eta of LARS (arXiv 1708.03888)
MUON_SLOPE = 485  # Muon's polynomial multiplies a small direction by at most 3.4445^5
DION_NOISE = (2 * U32)**(2 / 3)  # what optim/dion.py takes for rounding in fp32, relative to the norm
TINY = 1e-30


class Expected(NamedTuple):
    """A tensor in fp64, and how far an fp32 result may be from each element."""

    value: Tensor
    tolerance: Tensor

    def with_tolerance(self, extra: Tensor | float) -> "Expected":
        """Return the same value with a larger tolerance."""
        return Expected(self.value, self.tolerance + extra)


class Update(NamedTuple):
    """The expected state of a parameter after a step."""

    master: Expected
    moments: dict[str, Expected]


@dataclass(frozen=True)
class Before:
    """A parameter before step number `step` (from 1), in fp64.

    grad: unscaled and clipped. moments: by name. decay: the weight decay of this parameter.
    """

    optim: OptimConfig
    step: int
    master: Tensor
    grad: Tensor
    moments: dict[str, Tensor]
    decay: float

    def changed_by(self, change: Tensor, roundings: float = 64.0) -> Expected:
        """Return the master after a change that is itself off by `roundings` u."""
        tolerance = 4 * U32 * self.master.abs() + roundings * U32 * change.abs() + TINY
        return Expected(self.master + change, tolerance)

    def moment(self, name: str, new: Tensor) -> Expected:
        """Return the new value of a moment: a weighted sum of its old value and one other term."""
        old = self.moments[name]
        tolerance = 16 * U32 * (old.abs() + new.abs() + (new - old).abs()) + TINY
        return Expected(new, tolerance)


# ---- the papers --------------------------------------------------------------------------------------------

def muon(before: Before) -> Update:
    """Muon (Keller Jordan 2024), times 0.2 sqrt(max(m, n)) for a matrix [m, n]: the update size of AdamW."""
    optim, master = before.optim, before.master
    momentum = optim.momentum * before.moments["muon_m"] + before.grad
    direction = before.grad + optim.momentum * momentum  # Nesterov
    step = orthogonal(direction) * 0.2 * math.sqrt(max(master.shape))
    expected = before.changed_by(-optim.lr * before.decay * master - optim.lr * step)

    slack = orthogonal_error(master) * float(step.norm()) / math.sqrt(min(master.shape))
    return Update(
        master=expected.with_tolerance(optim.lr * slack),
        moments={"muon_m": before.moment("muon_m", momentum)},
    )


def normuon(before: Before) -> Update:
    """NorMuon (arXiv 2510.05491, algorithm 1). The second moment is the same in a whole row."""
    optim, master, second_before = before.optim, before.master, before.moments["normuon_v"]
    momentum = optim.momentum * before.moments["normuon_m"] + (1 - optim.momentum) * before.grad
    direction = orthogonal(momentum)
    mean_square = direction.square().mean(1, keepdim=True)
    second = optim.beta2 * second_before + (1 - optim.beta2) * mean_square
    divisor = second.sqrt() + optim.eps
    scale = 0.2 * math.sqrt(master.numel()) / (direction / divisor).norm()
    expected = before.changed_by(-optim.lr * before.decay * master - optim.lr * scale * direction / divisor)

    # of an element, of the RMS of its row, and of the norm of the matrix
    error = orthogonal_error(master)
    of_square = (1 - optim.beta2) * (2 * error * mean_square.sqrt() + error**2)
    return Update(
        master=expected.with_tolerance(optim.lr * scale * 4 * error / divisor),
        moments={
            "normuon_m": before.moment("normuon_m", momentum),
            "normuon_v": before.moment("normuon_v", second).with_tolerance(of_square),
        },
    )


def dion(before: Before) -> Update:
    """Dion (arXiv 2504.05295, algorithm 1), times Muon's scale. Q^T is in the first rows of its moment.

    An orthonormal basis is off by the roundings of a product, times the condition of its columns at norm 1
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, 19.9), and never by more than 2.
    """
    optim, master, old = before.optim, before.master, before.moments["dion_q"]
    rank = math.ceil(optim.rank_fraction * min(master.shape))
    buffer = before.moments["dion_m"] + before.grad
    product = buffer @ old[:rank].T
    left, triangle = torch.linalg.qr(product)
    left = left * torch.where(triangle.diagonal() < 0, -1.0, 1.0)
    right = buffer.T @ left
    lengths = right.norm(dim=0)
    is_found = lengths > DION_NOISE * buffer.norm()
    left, right = left * is_found, right * is_found
    basis = torch.where(is_found, right / lengths, old[:rank].T)
    momentum = buffer - (1 - optim.momentum) * left @ right.T
    scale = 0.2 * math.sqrt(max(master.shape))
    change = -optim.lr * before.decay * master - optim.lr * scale * left @ basis.T

    # of a column of P, and of each column of Q
    condition = float(torch.linalg.cond((product / product.norm(dim=0))[:, is_found]))
    of_left = min(2.0, SIGMAS * U32 * math.sqrt(max(master.shape)) * condition)
    of_basis = (2 * of_left * buffer.norm() / lengths).clamp(max=2.0) * is_found
    slack = of_left * float(basis.norm()) + float(of_basis.norm())
    of_rest = (1 - optim.momentum) * 2 * of_left * float(buffer.norm()) * math.sqrt(rank)
    moment = torch.cat((basis.T, old[rank:]))
    of_moment = torch.cat((of_basis[:, None].expand(rank, old.shape[1]), torch.zeros_like(old[rank:])))
    return Update(
        master=before.changed_by(change).with_tolerance(optim.lr * scale * slack),
        moments={
            "dion_m": before.moment("dion_m", momentum).with_tolerance(of_rest),
            "dion_q": Expected(moment, 16 * U32 * moment.abs() + of_moment + TINY),
        },
    )


def orthogonal_error(matrix: Tensor) -> float:
    """Return how far an element of an orthogonalized matrix may be: one relative rounding of the matrix,
    sqrt(n) in a product, times the slope of the polynomial.
    """
    return MUON_SLOPE * SIGMAS * U32 * math.sqrt(max(matrix.shape))


def orthogonal(x: Tensor) -> Tensor:
    """Apply Muon's polynomial in fp64, as U p(S) V^T of the singular value decomposition."""
    linear, cubic, quintic = COEFFICIENTS
    left, singular, right = torch.linalg.svd(x / (x.norm() + 1e-7), full_matrices=False)
    for _ in range(5):
        singular = linear * singular + cubic * singular**3 + quintic * singular**5
    return left @ torch.diag(singular) @ right


def adamw_or_lamb(before: Before) -> Update:
    """AdamW (arXiv 1711.05101) and LAMB (arXiv 1904.00962), which uses AdamW's direction."""
    optim, master, grad = before.optim, before.master, before.grad
    first_correction = 1 - optim.beta1**before.step
    second_correction = 1 - optim.beta2**before.step
    exp_avg = optim.beta1 * before.moments["adam_m"] + (1 - optim.beta1) * grad
    exp_avg_sq = optim.beta2 * before.moments["adam_v"] + (1 - optim.beta2) * grad**2
    denominator = (exp_avg_sq / second_correction).sqrt() + optim.eps
    direction = exp_avg / first_correction / denominator

    decay, ratio, roundings = before.decay, 1.0, 64.0
    if optim.name == "lamb":  # includes its decay in the direction
        direction = direction + decay * master
        ratio = trust_ratio(master, direction) if decay else 1.0
        direction = direction * ratio
        decay, roundings = 0.0, 128.0
    expected = before.changed_by(-optim.lr * decay * master - optim.lr * direction, roundings)

    # the first moment is a difference of larger terms
    terms = (optim.beta1 * before.moments["adam_m"]).abs() + ((1 - optim.beta1) * grad).abs()
    slack = 8 * U32 * terms / first_correction / denominator * ratio
    return Update(
        master=expected.with_tolerance(optim.lr * slack),
        moments={
            "adam_m": before.moment("adam_m", exp_avg).with_tolerance(8 * U32 * terms),
            "adam_v": before.moment("adam_v", exp_avg_sq),
        },
    )


def lion(before: Before) -> Update:
    """Lion (arXiv 2302.06675)."""
    optim, master, grad = before.optim, before.master, before.grad
    old = before.moments["lion_m"]
    direction = optim.beta1 * old + (1 - optim.beta1) * grad
    momentum = optim.beta2 * old + (1 - optim.beta2) * grad
    expected = before.changed_by(-optim.lr * before.decay * master - optim.lr * direction.sign())

    sizes = old.abs() + grad.abs()
    is_unsure = direction.abs() <= 8 * U32 * sizes  # a rounding may flip the sign
    tolerance = torch.where(is_unsure, 2.1 * optim.lr, expected.tolerance)
    return Update(
        master=Expected(expected.value, tolerance),
        moments={"lion_m": Expected(momentum, 16 * U32 * sizes + TINY)},
    )


def sgd_or_lars(before: Before) -> Update:
    """SGD with momentum, and LARS (arXiv 1708.03888), whose momentum includes the learning rate."""
    optim, master, grad, decay = before.optim, before.master, before.grad, before.decay
    old = before.moments["momentum"]
    direction = grad + decay * master
    sizes = grad.abs() + decay * master.abs()
    if optim.name == "lars":
        rate = optim.lr * (LARS_TRUST * trust_ratio(master, direction) if decay else 1.0)
        momentum = optim.momentum * old + rate * direction
        expected = before.changed_by(-momentum)
        terms = old.abs() + sizes * rate
        slack = 32 * U32 * terms
    else:
        momentum = optim.momentum * old + direction
        expected = before.changed_by(-optim.lr * momentum)
        terms = old.abs() + sizes
        slack = 32 * U32 * terms * optim.lr
    return Update(
        master=expected.with_tolerance(slack),
        moments={"momentum": Expected(momentum, 32 * U32 * terms + TINY)},
    )


def trust_ratio(master: Tensor, direction: Tensor) -> float:
    """Return |master| / |direction|, or 1 if either is zero (arXiv 1904.00962, 1708.03888)."""
    master_norm = float(master.norm())
    direction_norm = float(direction.norm())
    return master_norm / direction_norm if master_norm > 0 and direction_norm > 0 else 1.0


PAPERS: dict[str, Callable[[Before], Update]] = {  # by the moment that the optimizer keeps for a parameter
    "muon_m": muon,
    "normuon_m": normuon,
    "dion_m": dion,
    "adam_m": adamw_or_lamb,  # Muon, NorMuon and Dion use AdamW for vectors and embeddings
    "lion_m": lion,
    "momentum": sgd_or_lars,
}


# ---- a step ------------------------------------------------------------------------------------------------

def has_decay(key: str, master: Tensor) -> bool:
    """Return whether a parameter has weight decay: only those that mix channels do. Vectors and short
    convolutions, which scale each channel separately, have none.
    """
    return master.dim() > 1 and not is_convolution(key)


def expected_update(run: RecordedRun, n: int) -> dict[str, Expected]:
    """Return the expected masters ("key") and moments ("key@name") after step n, from the state before it."""
    optim = run.cfg.optim
    step = run.steps[n]
    loss_scale = run.steps[n - 1]["scale"]
    grad_scale = min(1.0, optim.clip / (step["norm"] + 1e-6)) / loss_scale

    old_moments: dict[str, dict[str, Tensor]] = {}  # {key: {name: moment}}
    for full_name, moment in run.moments[n - 1].items():
        key, _, name = full_name.rpartition("@")
        old_moments.setdefault(key, {})[name] = moment.double()

    expected: dict[str, Expected] = {}
    for key, master in run.masters[n - 1].items():
        before = Before(
            optim=optim,
            step=step["step"],
            master=master.double(),
            grad=run.grads[n - 1][key].double() * grad_scale,
            moments=old_moments[key],
            decay=optim.weight_decay if has_decay(key, master) else 0.0,
        )
        (paper,) = [PAPERS[name] for name in before.moments if name in PAPERS]
        update = paper(before)
        expected[key] = update.master
        for name, moment in update.moments.items():
            expected[f"{key}@{name}"] = moment
    return expected
