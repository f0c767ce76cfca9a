"""Is a family of kernels right on this machine? Forward and backward beside torch in fp32.

    python -m benchmarks.smoke_kernels FAMILY --device cuda    rows as JSON lines; benchmarks/smoke.py runs it

A family (benchmarks/smoke_families.py) has a process of its own: an illegal access spoils all later calls of
its process. Both sides read the same numbers, those of the compute dtype. The definitions are torch's own
operations and autograd, in fp32 without TF32, and share nothing with kernels/. While ours runs, torch.empty
gives NaN, so that what a kernel leaves unwritten is seen. Ours runs twice, and must give the same bits.

The error of a result is ||ours - definition|| / ||definition||, and its bound follows from the arithmetic:

    roundings * u       a value that is rounded to a dtype changes by at most its unit roundoff u of itself;
                        sums of such values with random signs keep that ratio
    terms * 2^-24       a sum of so many terms in fp32: with random signs a partial sum is as large as the
                        last one, and tensor cores may cut where others round
    2^-20               the GPU's approximate functions (exp2, rsqrt, division), of some ulp each
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import deterministic

from benchmarks.gpu_case import Inputs, Size
from kernels import triton_

Results = dict[str, Tensor]
FUNCTIONS = 2.0**-20
FP32_TERM = 2.0**-24
CAPABILITY = {  # {family: the first chip}
    "fp8-cast": (8, 9),
    "fp8-formula": (8, 9),
    "fp8-product": (8, 9),
    "fp8-grouped": (9, 0),
}
SIZE = Size(batch=2, params=1 << 24)  # a part of a step: several families share the GPU's memory
TINY = Size(
    batch=1,
    seq=32,
    hidden=64,
    ffn=32,
    heads=2,
    kv=1,
    vocab=96,
    rows=24,
    experts=4,
    top_k=2,
    expert_ffn=16,
    params=1500,
)


@dataclass(frozen=True)
class Check:
    """A call of a kernel, and what it must give.

    bounds: the largest error of each result. ours may give more results than it has bounds.
    is_ours: else a library's kernels run, of which nothing is asked but that they are right.
    """

    ours: Callable[[], Results]
    definition: Callable[[], Results]
    bounds: Mapping[str, float]
    is_ours: bool = True


def bound(dtype: torch.dtype, roundings: int, terms: int = 0) -> float:
    """The largest error of a result; see the text above."""
    return roundings * torch.finfo(dtype).eps / 2 + terms * FP32_TERM + FUNCTIONS


# ---- running a check ---------------------------------------------------------------------------------------


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it torch.empty and its kin are filled with NaN (integers: with the largest)."""
    fills = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, in fp32; not finite if one of the two is not."""
    assert got.shape == want.shape, f"{tuple(got.shape)} instead of {tuple(want.shape)}"
    difference = (got.float() - want.float()).norm()
    return float(difference / want.float().norm().clamp(min=torch.finfo(torch.float32).tiny))


def run_check(check: Check) -> dict:
    """Compares one call -> {"ok", "result": the one nearest to its bound or above it, "error", "bound"}."""
    with poisoned() if check.is_ours else nullcontext():
        got = check.ours()
        again = check.ours() if check.is_ours else got
    for name in check.bounds:
        if not torch.equal(bits(got[name]), bits(again[name])):
            return {"ok": False, "result": name, "problem": "two runs differ"}
    del again
    want = check.definition()

    errors = {name: relative_error(got[name], want[name]) for name in check.bounds}
    worst = max(errors, key=lambda name: distance(errors[name], check.bounds[name]))
    ok = errors[worst] <= check.bounds[worst]
    return {"ok": ok, "result": worst, "error": errors[worst], "bound": check.bounds[worst], "errors": errors}


def distance(error: float, bound: float) -> float:
    """How near to its bound an error is; an error that is no number is the farthest beyond."""
    return float("inf") if error != error else error / max(bound, 1e-30)


def bits(x: Tensor) -> Tensor:
    """The bits of x, of which two NaN are equal."""
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


# ---- the process -------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Prints {"checking"} before each check and its row after it. Returns the exit code."""
    from benchmarks.smoke_families import FAMILIES  # it needs the functions above

    parser = argparse.ArgumentParser("python -m benchmarks.smoke_kernels", description=__doc__)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--share", type=float, default=1.0, help="of the GPU's memory that it may take")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    if args.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(args.share)
    fallbacks: list[str] = []
    triton_.print_once = fallbacks.append  # a kernel that leaves a call to its reference says so here
    inputs = Inputs(TINY if args.tiny else SIZE, torch.device(args.device), torch.bfloat16)

    if not triton_.TRITON_AVAILABLE or args.device not in triton_.DEVICES:
        report({"row": args.family, "ok": False, "problem": "no Triton here: torch references would run"})
        report({"complete": True})
        return 1
    capability = torch.cuda.get_device_capability() if args.device == "cuda" else (9, 0)
    needed = CAPABILITY.get(args.family, (0, 0))
    if capability < needed:
        chips = f"sm_{needed[0]}{needed[1]}"
        report({"row": args.family, "ok": None, "problem": f"chips from {chips} on have what it needs"})
        report({"complete": True})
        return 0
    report({"checking": "its inputs"})
    for name, check in FAMILIES[args.family](inputs):
        report({"checking": name})
        started = time.perf_counter()
        row = {"row": name, **checked(check)}
        if fallbacks:
            is_for_others = "in chips from" in fallbacks[0]  # a kernel that this chip cannot have
            row |= {"ok": None if is_for_others else False}
            row |= {"problem": f"the kernel did not run: {fallbacks[0]}"}
            fallbacks.clear()
        report(row | {"s": round(time.perf_counter() - started, 1)})
        if row.get("is_lost"):
            return 1
        report({"checking": f"the inputs after {name}"})
    report({"complete": True})
    return 0


def checked(check: Check) -> dict:
    """run_check, or what it raised. is_lost: the GPU takes no more calls from this process."""
    try:
        return run_check(check)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        row = {"ok": False, "problem": f"{type(error).__name__}: {lines[0][:120]}"}
        return row | {"is_lost": not device_answers()}


def device_answers() -> bool:
    """Whether the GPU still takes calls; there are no such failures without one."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def report(message: dict) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
