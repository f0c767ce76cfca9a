"""The rates of this machine's ranks, measured with all of them busy.

    torchrun --standalone --nproc-per-node 2 -m scripts.bench machine --out machine.json

Each rank times a matrix product, attention, a memory copy, many small operations, and all-reduces with the
other ranks. Rank 0 writes the means as JSON (plan/machine.py), for the planner's forecast.
"""
import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from model import precision
from parallel.wire import comm
from parallel.wire.world import join_job
from plan.machine import Machine
from runtime import setup

SECONDS = 0.4  # duration of each measurement
TIMEOUT_S = 120.0
DTYPES = {name: dtype for name, dtype in precision.DTYPES.items() if name != "fp8"}
PRODUCT_SIZE = 768
ATTENTION_SHAPE = (2, 8, 512, 64)  # [b, heads, s, head dim]
COPY_ELEMENTS = 1 << 25  # of one byte each; larger than a cache
SUM_ELEMENTS = 1 << 21


def main(args: argparse.Namespace) -> int:
    measure_machine(Path(args.out), args.dtype, args.threads)
    return 0


def measure_machine(out: Path, dtype_name: str, threads: int) -> None:
    """Measure on all ranks at the same time, and write the means on rank 0. Collective."""
    rank, size, *_ = setup.rank_and_world()
    torch.set_num_threads(threads)
    group = join_job(torch.device("cpu"), rank, size, TIMEOUT_S).all_ranks()
    dtype = DTYPES[dtype_name]

    # compute
    a = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype)
    product_s = time_call(lambda: a @ a)
    q = torch.randn(ATTENTION_SHAPE).to(dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    attention_s = time_call(lambda: attend(q, q, q, is_causal=True))
    source = torch.zeros(COPY_ELEMENTS, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = time_call(lambda: target.copy_(source))
    scalar = torch.zeros(16)
    operation_s = time_call(lambda: scalar.add_(1.0))
    rates = torch.tensor([product_s, attention_s, copy_s, operation_s], dtype=torch.float64)
    product_s, attention_s, copy_s, operation_s = (comm.all_reduce_sum(rates, group) / size).tolist()

    # communication: all ranks make the same number of calls
    link, hop = math.inf, 0.0
    if size > 1:
        large, small = torch.zeros(SUM_ELEMENTS), torch.zeros(1)
        large_s, small_s = exchange_seconds(large, group, 20), exchange_seconds(small, group, 200)
        sent = 2 * large.numel() * large.element_size() * (size - 1) / size
        hop = small_s / math.log2(size)
        link = sent / max(large_s - small_s, 1e-9)

    if rank == 0:
        batch, heads, seq_len, width = ATTENTION_SHAPE
        causal_flops = 4 * batch * heads * width * seq_len * seq_len / 2
        machine = Machine(
            ranks=size,
            dtype=dtype_name,
            flops=2 * PRODUCT_SIZE**3 / product_s,
            attention_flops=causal_flops / attention_s,
            stream=2 * source.nbytes / copy_s,
            link=min(link, 1e15),
            hop=hop,
            operation=operation_s,
        )
        out.write_text(json.dumps(asdict(machine), indent=1) + "\n")


def time_call(call: Callable[[], object]) -> float:
    """Return the mean seconds of a call, repeated for SECONDS."""
    call()  # warm-up
    calls, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        call()
        calls += 1
    return (time.perf_counter() - started) / calls


def exchange_seconds(x: torch.Tensor, group: comm.Group, calls: int) -> float:
    """Return the mean seconds of an all-reduce."""
    comm.all_reduce_sum(x, group)
    started = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce_sum(x, group)
    return (time.perf_counter() - started) / calls
