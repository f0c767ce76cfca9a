"""On a GPU: each Triton kernel's bandwidth beside a plain copy's, each product's FLOP/s beside a library's.

Bytes are those that must be moved (inputs once, outputs once), so 100 % of a copy is a bound. `compiled` is
the same computation in torch operations under torch.compile, `liger` Liger's kernel if liger-kernel is
installed. The shapes are those of a dense 1.6B model, micro-batch 8 x 4096. The products (--part products)
and the memory-bound kernels (--part memory) can be measured in processes of their own. Whether a kernel is
right is what benchmarks/smoke.py asks.
"""

import argparse
import json
import statistics
import time

import torch

from benchmarks.gpu_case import Case, Function, Size
from benchmarks.gpu_memory import memory_cases
from benchmarks.gpu_products import product_cases
from benchmarks.shape import show

REPEATS = 20
WARM_UP = 5
FLUSH_BYTES = 1 << 28  # written between repeats: more than any cache holds
COPY_BYTES = 1 << 30


# ---- the run -----------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    size = Size()
    device = torch.device("cuda")
    dtype = torch.bfloat16
    torch.set_float32_matmul_precision("highest")
    copy_rate = measure_copy(device)
    name = torch.cuda.get_device_name()
    machine = f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {time.strftime('%Y-%m-%d')}"

    def measure(cases: dict[str, Case], bound: float | None) -> list[dict]:
        rows = []
        for name, case in cases.items():
            if args.only in name:
                rows.append(table_row(name, case, device, bound))
                if args.json:
                    print(json.dumps(rows[-1]), flush=True)
        return rows

    memory_rows: list[dict] = []
    product_rows: list[dict] = []
    if args.part in ("all", "products"):
        product_rows = measure(product_cases(size, device, dtype), None)
    if args.part in ("all", "memory"):
        memory_rows = measure(memory_cases(size, device, dtype), copy_rate)
    if args.json:
        show([], True, machine=machine, copy=copy_rate)
        return 0
    copy_text = f"{copy_rate / 1e12:.2f} TB/s"
    show(memory_rows, False, machine=machine, copy=copy_text, memory=f"bf16, ms, median of {REPEATS}")
    show(product_rows, False, products="bf16, TFLOP/s, forward or as named")
    return 0


def measure_copy(device: torch.device) -> float:
    """Returns bytes a second, read and written, of one large copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source), device)


def table_row(name: str, case: Case, device: torch.device, copy_rate: float | None) -> dict[str, str]:
    """Returns a row of the table. copy_rate: bytes a second of a copy, None for a product.

    Of a function that fails on this machine, the row has the name of its error.
    """

    def measure(function: Function) -> str:
        try:
            seconds = seconds_of(function, device)
        except Exception as error:
            return type(error).__name__
        if copy_rate is None:
            return f"{case.work / seconds / 1e12:.0f}"
        percent = 100 * case.work / seconds / copy_rate
        return f"{1e3 * seconds:.3f} ({percent:.0f} %)"

    unit = "TFLOP/s" if copy_rate is None else "ms (of a copy)"
    beside = [f"{other} {measure(function)}" for other, function in case.others.items()]
    return {"kernel": name, unit: measure(case.ours), "beside it": ", ".join(beside)}


def seconds_of(function: Function, device: torch.device) -> float:
    """Returns the time of one call: the median over REPEATS, each with cold caches."""
    if device.type == "cpu":  # Triton's interpreter: only whether it runs
        function()
        return 1.0

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    times = []
    for repeat in range(WARM_UP + REPEATS):
        flush.zero_()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        if repeat >= WARM_UP:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
