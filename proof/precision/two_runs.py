"""A run compared with another run of the same job: step by step, gradients, norm, loss and masters."""
import math

from config import Config
from proof.precision.bounds import (
    gradient_bound,
    gradient_error,
    is_reordered,
    logits_size,
    matrices_in_series,
    path_bound,
    with_rerouting,
)
from proof.precision.errors import (
    SIGMAS,
    U32,
    UNIT,
    BoundedError,
    Tensors,
    frobenius_norm,
    relative_distance,
)
from proof.precision.recorded_run import RecordedRun

NOT_COMPARED = 4  # last steps of fp16 with quantized weights, after one of two runs skipped a step alone


def compare_runs(run: RecordedRun, reference: RecordedRun, against: str) -> list[BoundedError]:
    """The errors of a run against another run of the same job.

    against: "layout" if the reference is one process of the run's dtype, "fp64" if it is one process in fp64.
    """
    cfg = run.cfg
    errors: list[BoundedError] = []
    rho = 0.0  # the largest relative error of a gradient so far
    largest = 0.0  # the largest norm of a gradient so far

    for n in range(1, len(run.masters)):
        ours, theirs = run.steps[n], reference.steps[n]
        where = f"step {theirs['step']}"
        if ours["ok"] != theirs["ok"]:
            what = f"{against} steps from a skip of one run alone"
            not_compared = len(run.masters) - n
            errors.append(BoundedError(what, where, not_compared, may_skip_alone(cfg, against)))
            break
        if not ours["ok"]:
            continue

        # Gradients, as a share of the largest so far.
        delta = relative_distance(run.weights[n - 1], reference.weights[n - 1])
        if against == "fp64":
            error = gradient_error(cfg) + matrices_in_series(cfg) * delta
        else:
            error = gradient_bound(cfg, delta, is_reordered(cfg))
        bound = with_rerouting(cfg, error)
        our_grads, their_grads = unscaled_grads(run, n), unscaled_grads(reference, n)
        size = frobenius_norm(their_grads.values())
        largest = max(largest, size)
        distance = relative_distance(our_grads, their_grads) * size / largest
        errors.append(BoundedError(f"{against} gradient", where, distance, bound))

        distance = abs(ours["norm"] - theirs["norm"]) / largest
        errors.append(BoundedError(f"{against} norm", where, distance, bound))
        rho = max(rho, bound * largest / size)

        # The loss: logits off by `bound` of their size, in directions independent of the softmax's gradient.
        loss_bound = math.sqrt(2) * bound * logits_size(reference.weights[n - 1])
        loss_bound += SIGMAS * 4 * U32 * theirs["loss"]
        distance = abs(ours["loss"] - theirs["loss"])
        errors.append(BoundedError(f"{against} loss", where, distance, loss_bound))

        # The masters' paths from their start.
        our_path, their_path = path_of_masters(run, n), path_of_masters(reference, n)
        bound = path_bound(cfg, rho)
        noise = rounding_noise(reference, n, cfg, their_path)
        if against == "layout":  # the two round alike, except where a boundary is between them
            noise = math.sqrt(noise * bound)
        distance = relative_distance(our_path, their_path)
        errors.append(BoundedError(f"{against} masters", where, distance, bound + noise))
    return errors


def may_skip_alone(cfg: Config, against: str) -> int:
    """How many last steps may stay uncompared because one of the two runs skipped a step alone."""
    is_quantized_fp16 = cfg.train.dtype == "fp16" and cfg.parallel.compress_weights != "none"
    return NOT_COMPARED if is_quantized_fp16 and against == "layout" else 0


def unscaled_grads(run: RecordedRun, n: int) -> Tensors:
    """The gradients of step n in fp64, without the loss scale."""
    loss_scale = run.steps[n - 1]["scale"]
    return {key: grad.double() / loss_scale for key, grad in run.grads[n - 1].items()}


def path_of_masters(run: RecordedRun, n: int) -> Tensors:
    """How far the masters have moved from their start until step n, in fp64."""
    start = run.masters[0]
    return {key: master.double() - start[key].double() for key, master in run.masters[n].items()}


def rounding_noise(reference: RecordedRun, n: int, cfg: Config, path: Tensors) -> float:
    """The relative error of a path of n updates that are each rounded once.

    They are rounded to nearest in fp32, and stochastically, to one of both neighbours, in bf16.
    """
    unit = 2 * UNIT["bf16"] if cfg.optim.states == "bf16" else U32
    size = frobenius_norm(reference.masters[n].values())
    length = frobenius_norm(path.values())
    return math.sqrt(n) * unit * size / length
