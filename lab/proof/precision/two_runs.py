"""Compares two runs of the same job step by step: gradients, norm, loss and masters."""
import math

from config import Config
from lab.proof.precision.bounds import (
    change_in_series,
    gradient_bound,
    gradient_error,
    is_reordered,
    logits_size,
    path_bound,
    with_rerouting,
)
from lab.proof.precision.errors import (
    SIGMAS,
    U32,
    UNIT,
    BoundedError,
    Tensors,
    frobenius_norm,
    relative_distance,
)
from lab.proof.precision.recorded_run import RecordedRun

NOT_COMPARED = 4  # final fp16 steps, after one of two runs skipped a step alone
FP16_LARGEST = 65504.0


def compare_runs(run: RecordedRun, reference: RecordedRun, against: str) -> list[BoundedError]:
    """Return the errors of a run against another run of the same job.

    `against` is "layout" if the reference is one process of the run's dtype, "fp64" if it is one process in
    fp64.
    """
    cfg = run.cfg
    errors: list[BoundedError] = []
    rho = 0.0  # the largest relative error of a gradient so far
    largest = 0.0  # the largest norm of a gradient so far

    for n in range(1, len(run.masters)):
        ours, theirs = run.steps[n], reference.steps[n]
        where = f"step {theirs['step']}"
        if not ours["ok"] and not theirs["ok"]:
            continue

        change = change_in_series(run.weights[n - 1], reference.weights[n - 1], cfg.model)
        if against == "fp64":
            error = gradient_error(cfg) + change
        else:
            error = gradient_bound(cfg, change, is_reordered(cfg))
        bound = with_rerouting(cfg, error)
        if ours["ok"] != theirs["ok"]:
            errors += skip_alone(run, reference, against, n=n, bound=bound)
            break

        # gradients, relative to the largest so far
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

        # the paths of the masters from their start
        our_path, their_path = path_of_masters(run, n), path_of_masters(reference, n)
        bound = path_bound(cfg, rho)
        noise = rounding_noise(reference, n, cfg, their_path)
        if against == "layout":  # both round alike unless a rounding boundary lies between them
            noise = math.sqrt(noise * bound)
        distance = relative_distance(our_path, their_path)
        errors.append(BoundedError(f"{against} masters", where, distance, bound + noise))
    return errors


def skip_alone(
    run: RecordedRun, reference: RecordedRun, against: str, *, n: int, bound: float
) -> list[BoundedError]:
    """Return the errors of step n if only one of the two runs skipped it.

    Only fp16 overflows. What overflowed in one run was in the other a sum of several products (see
    num_products), or off by `bound`, so the other's largest value was close enough.
    """
    good = run if run.steps[n]["ok"] else reference
    may_overflow = run.cfg.train.dtype == "fp16" and against == "layout"
    growth = num_products(run.cfg, good is run) * (1 + bound) if may_overflow else 0.0
    distance = FP16_LARGEST / good.largest[n] if good.largest[n] else math.inf
    where = f"step {run.steps[n]['step']}"
    not_compared = len(run.masters) - n
    return [
        BoundedError(f"{against} range of fp16 over the largest value", where, distance, growth),
        BoundedError(f"{against} steps from a skip of one run alone", where, not_compared, NOT_COMPARED),
    ]


def num_products(cfg: Config, of_layout: bool) -> int:
    """Return how many products of one run the other adds up in a single product, which has to fit fp16.

    The gradient of a weight is a product over tokens: one process multiplies all tokens of a sequence, a rank
    of the layout only a part of them; and an expert gets the tokens of all ep ranks. `of_layout` says whether
    the products are those of the layout.
    """
    parallel = cfg.parallel
    if not of_layout:
        return parallel.ep
    return parallel.cp * (parallel.tp if parallel.sp else 1)


def unscaled_grads(run: RecordedRun, n: int) -> Tensors:
    """Return the gradients of step n in fp64, without the loss scale."""
    loss_scale = run.steps[n - 1]["scale"]
    return {key: grad.double() / loss_scale for key, grad in run.grads[n - 1].items()}


def path_of_masters(run: RecordedRun, n: int) -> Tensors:
    """Return the displacement of the masters from their start to step n, in fp64."""
    start = run.masters[0]
    return {key: master.double() - start[key].double() for key, master in run.masters[n].items()}


def rounding_noise(reference: RecordedRun, n: int, cfg: Config, path: Tensors) -> float:
    """Return the relative error of a path of n updates with one rounding each.

    fp32 rounds to nearest; bf16 rounds stochastically to either neighbour.
    """
    unit = 2 * UNIT["bf16"] if cfg.optim.states == "bf16" else U32
    size = frobenius_norm(reference.masters[n].values())
    length = frobenius_norm(path.values())
    return math.sqrt(n) * unit * size / length
