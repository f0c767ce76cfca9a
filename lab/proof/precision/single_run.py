"""Checks within one run: the norm, the digits of gradients, the updates, and that matrices move."""
import math

import torch
from torch import Tensor

from lab.proof.precision.errors import (
    SIGMAS,
    U32,
    UNIT,
    BoundedError,
    frobenius_norm,
    is_convolution,
    matrices,
)
from lab.proof.precision.paper import expected_update
from lab.proof.precision.recorded_run import RecordedRun
from lab.proof.precision.recorder import same_bits

ROUNDING_SIGMAS = 6.0  # standard deviations that the mean of stochastic rounding may be off
NARROW_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
FP16_SMALL = 2.0**-8  # smaller fp16 numbers share one grid, and so do their sums


def norm_errors(run: RecordedRun) -> list[BoundedError]:
    """Compare the reported norm with the fp64 norm.

    fp32 adds n squares in blocks, and is off by at most u sqrt(n) on average.
    """
    unit = UNIT["fp64"] if run.cfg.train.dtype == "fp64" else U32
    errors: list[BoundedError] = []
    for n, grads in enumerate(run.grads):
        step = run.steps[n + 1]
        if not step["ok"]:
            continue
        exact = frobenius_norm(grads.values()) / run.steps[n]["scale"]
        num_squares = sum(grad.numel() for grad in grads.values())
        errors.append(
            BoundedError(
                what="norm",
                where=f"step {step['step']}",
                error=abs(step["norm"] - exact) / exact,
                bound=SIGMAS * unit * math.sqrt(num_squares),
            )
        )
    return errors


def digit_errors(run: RecordedRun) -> list[BoundedError]:
    """Return the fraction of the summed gradients that the compute dtype represents exactly.

    Sums of many microbatches in fp32 are rarely on the grid of the compute dtype; sums in the compute dtype
    always are. The sum of two of its numbers with the same exponent is on the grid every other time, because
    a carry drops one digit; no other sum is on it more often. So the bound is one half. Embeddings are
    excluded, since a token that occurred once has a single gradient in the compute dtype.
    """
    narrow = NARROW_DTYPES.get(run.cfg.train.dtype)
    if narrow is None:
        return []
    smallest = FP16_SMALL if narrow is torch.float16 else 0.0
    errors: list[BoundedError] = []
    for n, grads in enumerate(run.grads):
        step = run.steps[n + 1]
        if not step["ok"]:
            continue
        keys = [key for key in matrices(grads) if key.startswith("layers.")]
        values = torch.cat([grads[key].flatten() for key in keys])
        values = values[values.abs() > smallest]
        if not len(values):
            continue
        is_exact = values.to(narrow).to(values.dtype) == values
        errors.append(
            BoundedError(
                what="wide",
                where=f"step {step['step']}",
                error=float(is_exact.double().mean()),
                bound=0.5,
            )
        )
    return errors


def unmoved_matrices(run: RecordedRun) -> list[str]:
    """Return the matrices whose masters miss a good step, or whose weights never change in the run.

    For a short convolution only fp32 masters must move: its weights start more than 10 times as large as
    those of a matrix, and so does their distance to the next number of bf16 or fp16.
    """
    unmoved: list[str] = []
    for n in range(1, len(run.masters)):
        step = run.steps[n]
        if not step["ok"]:
            continue
        for key in matrices(run.masters[n]):
            must_move = run.cfg.optim.states != "bf16" or not is_convolution(key)
            if must_move and same_bits(run.masters[n - 1][key], run.masters[n][key]):
                unmoved.append(f"step {step['step']}: no master of {key} moved")

    num_steps = len(run.masters) - 1
    for key in matrices(run.weights[0]):
        if not is_convolution(key) and same_bits(run.weights[0][key], run.weights[-1][key]):
            unmoved.append(f"no weight of {key} moved in {num_steps} steps")
    return unmoved


def update_errors(run: RecordedRun) -> list[BoundedError]:
    """Compare every good step with the optimizer's paper.

    The error of a tensor is that of its worst element, relative to that element's tolerance.
    """
    check = bf16_step_errors if run.cfg.optim.states == "bf16" else fp32_step_errors
    errors: list[BoundedError] = []
    for n in range(1, len(run.masters)):
        if run.steps[n]["ok"]:
            errors += check(run, n)
    return errors


def fp32_step_errors(run: RecordedRun, n: int) -> list[BoundedError]:
    """Check every master and moment after step n."""
    when = f"step {run.steps[n]['step']}"
    after = run.masters[n] | run.moments[n]
    errors: list[BoundedError] = []
    for key, (exact, tolerance) in expected_update(run, n).items():
        off = after[key].double() - exact
        errors.append(update_error(f"{when} {key}", off, tolerance))
    return errors


def bf16_step_errors(run: RecordedRun, n: int) -> list[BoundedError]:
    """Like fp32_step_errors, for masters and moments that are rounded stochastically to bf16.

    Each may be either of its two neighbours, and on average neither is favoured.
    """
    when = f"step {run.steps[n]['step']}"
    after = run.masters[n] | run.moments[n]
    errors: list[BoundedError] = []
    total_shift, total_variance = 0.0, 0.0
    for key, (exact, tolerance) in expected_update(run, n).items():
        off = after[key].double() - exact
        below, above = bf16_neighbours(exact)
        errors.append(update_error(f"{when} {key}", off, above - below + tolerance))

        is_master = "@" not in key
        if is_master:  # whether roundings favour the direction of the update
            direction = (exact - run.masters[n - 1][key].double()).sign()
            total_shift += float((off * direction).sum())
            total_variance += float(((above - exact) * (exact - below)).sum())
    shift = abs(total_shift) / math.sqrt(total_variance)
    errors.append(BoundedError(what="rounding", where=when, error=shift, bound=ROUNDING_SIGMAS))
    return errors


def update_error(where: str, off: Tensor, tolerance: Tensor) -> BoundedError:
    """Return the error of the worst element, relative to its tolerance."""
    return BoundedError(what="update", where=where, error=float((off.abs() / tolerance).max()), bound=1.0)


def bf16_neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 numbers on either side of x, in fp64, or x twice where bf16 represents it."""
    nearest = x.to(torch.bfloat16).double()
    _, exponent = torch.frexp(x.abs().clamp(min=2.0**-126))
    spacing = torch.ldexp(torch.ones_like(x), exponent - 8)  # between the numbers in x's binade
    below = torch.floor(x / spacing) * spacing
    return below, torch.where(nearest == x, below, below + spacing)
