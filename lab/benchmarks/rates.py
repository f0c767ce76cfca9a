"""The rates of this GPU: products, copies, attention, launches, our kernels, and the clock under load.

Each rate is a row, and its inputs are created just before it is timed. Rows with `rate` feed the step model
(lab/benchmarks/measured.py). Products count their FLOPs. Memory-bound kernels count the bytes that must move,
each input and output once, so a copy is their upper bound. Every repeat starts with cold caches.
"""

import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import adam, attention, cross_entropy, fp8, grouped_gemm, linear, norm, permute, rope, swiglu
from kernels.attention_libraries import LIBRARIES, library_attention, usable_libraries
from kernels.attention_mask import DocumentCounts, make_attention_mask
from lab.benchmarks.jobs import Report, begin_again_if_lost
from lab.benchmarks.shape import Shape

REPEATS = 10
WARM_UP = 3
FLUSH_BYTES = 1 << 28  # written between repeats; larger than any cache
LAUNCHES = 1000
LOAD_S = 2.0  # of back-to-back products, for the clock under load
COPY_BYTES = (1 << 26, 1 << 28, 1 << 30)
TINY_COPY_BYTES = (1 << 12, 1 << 14, 1 << 16)
PARAMETERS = 1 << 27  # of one AdamW launch
CLOCK_QUERY = (
    "nvidia-smi",
    "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu",
    "--format=csv,noheader",
    "--id=0",
)
BACKWARD_PRODUCTS = 2.5  # attention backward's products for each of its forward
SQUARE = 8192
TERA = 1e12
DIFFERENT = 0.05  # relative error of a wrong product; fast fp8 accumulation is coarse

ADA, HOPPER = (8, 9), (9, 0)  # minimum compute capabilities for fp8, and for the copy engine

Function = Callable[[], Any]  # one call, on tensors that it captures


class Absent(Exception):
    """Raised with the reason why a rate cannot be measured here."""


@dataclass(frozen=True)
class Case:
    """One rate. work: FLOPs or bytes of a call. rate: its name in the step model. chips: the oldest chip."""

    name: str
    unit: str
    work: float
    make: Callable[[], Function]
    rate: str
    chips: tuple[int, int] = (8, 0)


@dataclass(frozen=True)
class RateInputs:
    """The device of the inputs, and their shapes."""

    device: torch.device
    dense: Shape
    large: Shape
    mixture: Shape
    packed: Shape

    def randn(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(sizes, device=self.device, dtype=dtype)


def measure_rates(report: Report, done: frozenset[str], *, device: str, is_tiny: bool) -> None:
    """Report a row for each rate that is not done, including those that fail."""
    shapes = Shape.gpu_models(is_tiny)
    place = RateInputs(
        torch.device(device), shapes["dense"], shapes["8b"], shapes["moe"], shapes["packed-uneven"]
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    capability = torch.cuda.get_device_capability() if device == "cuda" else HOPPER
    for case in rate_cases(place, is_tiny):
        if case.name in done:
            continue
        report(starting=case.name)

        def measured() -> dict:
            if capability < case.chips:
                raise Absent("needs a chip from sm_{}{} on".format(*case.chips))
            seconds = time_call(case.make(), place.device)
            return {"state": "ok", "value": case.work / seconds / TERA, "ms": 1e3 * seconds}

        report(row=case.name, **tried(measured), unit=case.unit, rate=case.rate, work=case.work)
        begin_again_if_lost(report)
    for name, (function, rate) in LAUNCH_TIMES.items():
        if name not in done:
            report(starting=name)
            row = tried(lambda: {"state": "ok", "value": 1e6 * function(place)})
            report(row=name, **row, unit="us", rate=rate)
    if "clock under load" not in done:
        report(starting="clock under load")
        report(row="clock under load", **tried(lambda: clock_under_load(place)))


def tried(function: Callable[[], dict]) -> dict:
    """Return the row of a measurement, or its state and problem if it fails."""
    try:
        return function()
    except Absent as reason:
        return {"state": "absent", "problem": str(reason)}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        return {"state": "wrong", "problem": f"{type(error).__name__}: {lines[0][:160]}"}


def time_call(function: Function, device: torch.device) -> float:
    """Return the time of one call: the median over REPEATS, each with cold caches."""
    if device.type == "cpu":
        function()
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    times = []
    for repeat in range(WARM_UP + REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        if repeat >= WARM_UP:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def rate_cases(place: RateInputs, is_tiny: bool) -> Iterator[Case]:
    for nbytes in TINY_COPY_BYTES if is_tiny else COPY_BYTES:
        name = f"copy of {nbytes / 2**20:.3g} MiB"
        yield Case(name, "TB/s", 2 * nbytes, partial(copy, place, nbytes), "memory")
    yield from product_cases(place, is_tiny)
    yield from attention_cases(place)
    yield from grouped_cases(place)
    yield from memory_cases(place)


def copy(place: RateInputs, nbytes: int) -> Function:
    source = torch.zeros(nbytes, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


# ---- products ----------------------------------------------------------------------------------------------


def product_cases(place: RateInputs, is_tiny: bool) -> Iterator[Case]:
    """Yield eight shapes: the five products of the dense model, two of the 8B model, and a square."""
    dense, large = place.dense, place.large
    shapes = {}
    for name, (outputs, inputs, _) in zip(("qkv", "out", "up", "down", "head"), dense.linear_sizes()):
        shapes[name] = (dense.tokens, outputs, inputs)
    for name, (outputs, inputs, _) in zip(("8b up", "8b down"), large.linear_sizes()[2:4]):
        shapes[name] = (large.tokens, outputs, inputs)
    side = 64 if is_tiny else SQUARE
    shapes["square"] = (side, side, side)
    for name, sizes in shapes.items():
        flops = 2 * sizes[0] * sizes[1] * sizes[2]
        for way, (make, rate, chips) in PRODUCTS.items():
            yield Case(f"{name} {sizes[0]} x {sizes[1]} x {sizes[2]}, {way}", "TFLOP/s", flops,
                       partial(make, place, *sizes), rate, chips)  # fmt: skip


def forward(place: RateInputs, tokens: int, outputs: int, inputs: int) -> Function:
    x, weight = place.randn(tokens, inputs), place.randn(outputs, inputs)
    return lambda: x @ weight.t()


def input_gradient(place: RateInputs, tokens: int, outputs: int, inputs: int) -> Function:
    dy, weight = place.randn(tokens, outputs), place.randn(outputs, inputs)
    return lambda: dy @ weight


def weight_gradient(place: RateInputs, tokens: int, outputs: int, inputs: int) -> Function:
    """Return a product added to fp32, by the library; on a CPU as in training."""
    dy, x = place.randn(tokens, outputs), place.randn(tokens, inputs)
    into = torch.zeros(outputs, inputs, device=place.device)
    if place.device.type == "cpu":
        return lambda: linear.write_wgrad(into, dy, x, True)
    return lambda: linear.write_by_library(into, dy, x, True)


def own_weight_gradient(place: RateInputs, tokens: int, outputs: int, inputs: int) -> Function:
    dy, x = place.randn(tokens, outputs), place.randn(tokens, inputs)
    into = torch.zeros(outputs, inputs, device=place.device)
    return lambda: linear.launch_wgrad(into, dy, x, True)


def fp8_product(fast: bool, place: RateInputs, tokens: int, outputs: int, inputs: int) -> Function:
    """Return a product with tensorwise scales of one. Its result is compared once with that of bf16."""
    x = place.randn(tokens, inputs).to(torch.float8_e4m3fn)
    weight = place.randn(outputs, inputs).to(torch.float8_e4m3fn)
    one = torch.ones((), device=place.device)

    def product() -> Tensor:
        return torch._scaled_mm(
            x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    got, want = product()[:16].float(), x[:16].float() @ weight.float().t()
    assert float((got - want).norm() / want.norm()) < DIFFERENT, "the product is wrong"
    return product


PRODUCTS = {  # {variant: (factory, its rate in the step model, the oldest chip)}
    "forward": (forward, "library", (8, 0)),
    "input gradient": (input_gradient, "library", (8, 0)),
    "weight gradient": (weight_gradient, "library, weights", (8, 0)),
    "own weight gradient": (own_weight_gradient, "own", HOPPER),
    "fp8": (partial(fp8_product, True), "library fp8", ADA),
    "fp8, exact sums": (partial(fp8_product, False), "library fp8, exact sums", ADA),
}


def grouped_cases(place: RateInputs) -> Iterator[Case]:
    """Yield the gate and up projection of a mixture, with equally many rows for each expert."""
    shape = place.mixture
    rows, outputs = shape.tokens * shape.top_k, 2 * shape.ffn
    flops = 2 * rows * outputs * shape.hidden
    for name, (make, rate) in GROUPED.items():
        yield Case(f"grouped {rows} x {outputs} x {shape.hidden}, {name}", "TFLOP/s", flops,
                   partial(make, place), rate, HOPPER)  # fmt: skip


@dataclass(frozen=True)
class ExpertInputs:
    """x [rows, hidden] sorted by expert, dy [rows, outputs], weight [experts, outputs, hidden]."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    rows: Any
    source: Tensor  # [rows]: the token of each row, if tokens are in their original order

    @staticmethod
    def of(place: RateInputs) -> "ExpertInputs":
        shape = place.mixture
        num_rows = shape.tokens * shape.top_k
        counts = torch.full((shape.experts,), num_rows // shape.experts, device=place.device)
        return ExpertInputs(
            x=place.randn(num_rows, shape.hidden),
            dy=place.randn(num_rows, 2 * shape.ffn),
            weight=place.randn(shape.experts, 2 * shape.ffn, shape.hidden),
            rows=grouped_gemm.row_tiles(counts, num_rows, place.device),
            source=torch.randperm(num_rows, device=place.device) // shape.top_k,
        )

    def into(self) -> Tensor:
        return torch.zeros(self.weight.shape, device=self.weight.device)


def library_grouped(place: RateInputs) -> Function:
    e = ExpertInputs.of(place)
    return lambda: torch._grouped_mm(e.x, e.weight.mT, offs=e.rows.offsets[1:])


def own_grouped(place: RateInputs) -> Function:
    e = ExpertInputs.of(place)
    return lambda: grouped_gemm.launch_grouped(e.x, e.weight, e.rows)


def own_gathered(place: RateInputs) -> Function:
    e = ExpertInputs.of(place)
    tokens = place.randn(place.mixture.tokens, place.mixture.hidden)
    return lambda: grouped_gemm.launch_grouped(tokens, e.weight, e.rows, gather=e.source)


def own_grouped_weights(place: RateInputs) -> Function:
    e = ExpertInputs.of(place)
    into = e.into()
    return lambda: grouped_gemm.launch_wgrad(into, e.dy, e.x, e.rows.offsets, True)


def own_gathered_weights(place: RateInputs) -> Function:
    e = ExpertInputs.of(place)
    into = e.into()
    tokens = place.randn(place.mixture.tokens, place.mixture.hidden)
    return lambda: grouped_gemm.launch_wgrad(into, e.dy, tokens, e.rows.offsets, True, x_source=e.source)


GROUPED = {
    "library": (library_grouped, "library grouped"),
    "own": (own_grouped, "own grouped"),
    "own, gathered": (own_gathered, "own gathered"),
    "own, weights": (own_grouped_weights, "own grouped, weights"),
    "own, gathered, weights": (own_gathered_weights, "own gathered, weights"),
}


# ---- attention ---------------------------------------------------------------------------------------------

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention 2": SDPBackend.FLASH_ATTENTION}
ATTENTION_RATES = {  # {backend: its rate in the step model}; others have none
    "cuDNN": "cudnn",
    "FlashAttention 2": "flash 2",
    "own": "own attention",
    "cuDNN (nvidia-cudnn-frontend)": "cudnn",
    "cuDNN (torch)": "cudnn",
    "torch.nn.attention.varlen": "flash 2",
}


def attention_cases(place: RateInputs) -> Iterator[Case]:
    """Yield causal cases: whole sequences with the heads of the dense and of the 8B model, then documents."""
    for shape in (place.dense, place.large):
        for name in (*BACKENDS, "own"):
            if name != "cuDNN" or place.device.type == "cuda":
                yield from cases_of_attention(place, shape, name)
    for name in ("own", *(library.name for library in LIBRARIES)):
        yield from cases_of_attention(place, place.packed, name)


def cases_of_attention(place: RateInputs, shape: Shape, name: str) -> Iterator[Case]:
    """Yield forward and backward, with the FLOPs of the unmasked pairs of query and key."""
    seen = sum(length * (length + 1) / 2 for length in shape.documents or (shape.seq,))
    flops = 4 * shape.batch * seen * shape.hidden
    lengths = "+".join(map(str, shape.documents or (shape.seq,)))
    title = f"attention {name}, {lengths} tokens, {shape.heads}/{shape.kv or shape.heads} heads"
    rate = ATTENTION_RATES.get(name, "")
    yield Case(f"{title}, forward", "TFLOP/s", flops, partial(attention_forward, place, shape, name), rate)
    make = partial(attention_backward, place, shape, name)
    yield Case(f"{title}, backward", "TFLOP/s", BACKWARD_PRODUCTS * flops, make,
               rate and f"{rate} backward")  # fmt: skip


def attention_call(
    place: RateInputs, shape: Shape, name: str
) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
    """Return (a call, its q [b, s, h, d], k and v [b, s, g, d]). Raises Absent if the library is missing."""
    kv_heads, head_dim = shape.kv or shape.heads, shape.hidden // shape.heads
    q, k, v = (
        place.randn(shape.batch, shape.seq, heads, head_dim).requires_grad_()
        for heads in (shape.heads, kv_heads, kv_heads)
    )
    if name in BACKENDS:

        def by_sdpa() -> Tensor:
            transposed = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel([BACKENDS[name]]):
                return F.scaled_dot_product_attention(
                    *transposed, is_causal=True, enable_gqa=kv_heads != shape.heads
                )

        return by_sdpa, (q, k, v)

    documents = counts = None
    if shape.documents:
        lengths = torch.tensor(shape.documents, device=place.device)
        documents = torch.arange(len(lengths), device=place.device).repeat_interleave(lengths)
        documents = documents.expand(shape.batch, -1).contiguous()
        counts = DocumentCounts(shape.batch * len(lengths), max(shape.documents))
    mask = make_attention_mask(
        query_start=0,
        s_q=shape.seq,
        key_start=0,
        s_k=shape.seq,
        window=None,
        docs=documents,
        device=place.device,
        counts=counts,
    )
    if name == "own":
        return lambda: attention._TritonAttention.apply(q, k, v, mask), (q, k, v)

    for choice in usable_libraries(q, k, v, mask):
        if choice.library.name == name:
            return partial(library_attention, choice, q, k, v, mask), (q, k, v)
    raise Absent("not installed, not for this chip, or refused by its trial")


def attention_forward(place: RateInputs, shape: Shape, name: str) -> Function:
    function, _ = attention_call(place, shape, name)
    return torch.no_grad()(function)


def attention_backward(place: RateInputs, shape: Shape, name: str) -> Function:
    function, inputs = attention_call(place, shape, name)
    out = function()
    dy = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, dy, retain_graph=True)


# ---- our memory-bound kernels ------------------------------------------------------------------------------


def memory_cases(place: RateInputs) -> Iterator[Case]:
    """Yield our memory-bound kernels; their rates are named after the kernels, as in plan/record/work.py."""
    shape = place.dense
    hidden_bytes = 2 * shape.tokens * shape.hidden
    ffn_bytes = 2 * shape.tokens * shape.ffn
    logits = 2 * shape.seq * shape.vocab
    routed = place.mixture.tokens * place.mixture.hidden * 2
    parameters = min(PARAMETERS, shape.tokens * shape.hidden)
    for kernel, nbytes, make in (
        ("norm.forward_kernel", 4 * hidden_bytes, norm_forward),
        ("norm.backward_kernel", 4 * hidden_bytes, norm_backward),
        ("rope.rope_kernel", 2 * hidden_bytes, rotary),
        ("swiglu.swiglu_kernel", 3 * ffn_bytes, gated),
        ("swiglu.swiglu_backward_kernel", 5 * ffn_bytes, gated_backward),
        ("cross_entropy.softmax_kernel", 2 * logits, softmax),
        ("permute.sum_kernel", (place.mixture.top_k + 1) * routed, unpermute),
        ("fp8.cast_kernel", 1.5 * hidden_bytes, quantize),
    ):
        chips = ADA if kernel.startswith("fp8") else (8, 0)
        yield Case(kernel, "TB/s", nbytes, partial(make, place), kernel, chips)
    # 4 tensors read and 3 written in fp32, and the copy
    adamw_bytes = (7 * 4 + 2) * parameters
    yield Case("adam.adamw_kernel", "TB/s", adamw_bytes, partial(adamw, place, parameters),
               "adam.adamw_kernel")  # fmt: skip


def norm_forward(place: RateInputs) -> Function:
    shape = place.dense
    x, residual = place.randn(shape.tokens, shape.hidden), place.randn(shape.tokens, shape.hidden)
    weight = place.randn(shape.hidden)
    return lambda: norm.launch_forward(x, residual, weight, None, 1e-5)


def norm_backward(place: RateInputs) -> Function:
    shape = place.dense
    x, residual, dy = (place.randn(shape.tokens, shape.hidden) for _ in range(3))
    weight = place.randn(shape.hidden)
    _, total, scale, mean = norm.launch_forward(x, residual, weight, None, 1e-5)
    return lambda: norm.launch_backward(dy, residual, total, weight, scale, mean)


def rotary(place: RateInputs) -> Function:
    """Return RoPE in place on half of the heads of a fused projection: queries and keys under GQA."""
    shape = place.dense
    head_dim = shape.hidden // shape.heads
    heads = place.randn(shape.batch, shape.seq, shape.heads, head_dim)
    positions = torch.arange(shape.seq, device=place.device).expand(shape.batch, -1)
    frequencies = rope.frequencies(head_dim, 5e5).to(place.device)
    cos, sin = rope.cos_sin_tables(positions, frequencies, torch.bfloat16)
    return lambda: rope.launch_rope(heads, heads, cos, sin)


def gated(place: RateInputs) -> Function:
    gate_up = place.randn(place.dense.tokens, 2 * place.dense.ffn)
    return lambda: swiglu.launch_swiglu(gate_up)


def gated_backward(place: RateInputs) -> Function:
    dy = place.randn(place.dense.tokens, place.dense.ffn)
    gate_up = place.randn(place.dense.tokens, 2 * place.dense.ffn)
    return lambda: swiglu.launch_swiglu_backward(dy, gate_up)


def softmax(place: RateInputs) -> Function:
    shape = place.dense
    logits = place.randn(shape.seq, shape.vocab)
    targets = torch.randint(shape.vocab, (shape.seq,), device=place.device)
    return lambda: cross_entropy.launch_softmax(logits, targets, 1.0, shape.vocab, 0, None)


def unpermute(place: RateInputs) -> Function:
    shape = place.mixture
    rows = place.randn(shape.tokens * shape.top_k, shape.hidden)
    rows_of_token = torch.randperm(len(rows), device=place.device).view(shape.tokens, shape.top_k)
    return lambda: permute.launch_sum_rows(rows, rows_of_token, True)


def quantize(place: RateInputs) -> Function:
    x = place.randn(place.dense.tokens, place.dense.hidden)
    return lambda: fp8.launch_quantize(x, "row", torch.float8_e4m3fn)


def adamw(place: RateInputs, parameters: int) -> Function:
    param, grad, exp_avg, exp_avg_sq = (torch.rand(parameters, device=place.device) for _ in range(4))
    weight_copy = torch.empty_like(param, dtype=torch.bfloat16)
    update = adam.AdamWStep(
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=5,
        grad_scale=torch.ones((), device=place.device),
        is_good=torch.ones((), dtype=torch.bool, device=place.device),
    )
    return lambda: adam.launch_adamw(param, grad, exp_avg, exp_avg_sq, update, weight_copy)


# ---- launches and the clock --------------------------------------------------------------------------------


def gap_of_launches(place: RateInputs) -> float:
    """Return the seconds between short kernels of a CUDA graph, where nothing waits for the host."""
    x = torch.zeros(1024, device=place.device)
    if place.device.type == "cpu":
        return host_time_of_operation(place)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            x.add_(1.0)
    graph.replay()
    return time_call(graph.replay, place.device) / LAUNCHES


def host_time_of_operation(place: RateInputs) -> float:
    """Return the host seconds of a torch operation."""
    x = torch.zeros(1024, device=place.device)
    return host_time(lambda: x.add_(1.0), place)


def host_time_of_kernel(place: RateInputs) -> float:
    """Return the host seconds of a Triton kernel, including the Python around it."""
    gate_up = place.randn(1, 64)
    return host_time(lambda: swiglu.launch_swiglu(gate_up), place)


def host_time(function: Function, place: RateInputs) -> float:
    calls = LAUNCHES if place.device.type == "cuda" else 3
    function()
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        function()
    seconds = time.perf_counter() - started
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    return seconds / calls


LAUNCH_TIMES = {  # {name: (function that returns the seconds of one, its rate in the step model)}
    "launch, GPU": (gap_of_launches, "shortest"),
    "launch, host: operation": (host_time_of_operation, "host: operation"),
    "launch, host: Triton": (host_time_of_kernel, "host: triton"),
}


def clock_under_load(place: RateInputs) -> dict:
    """Run products for LOAD_S seconds and return their rate, and the clock and the power at the end."""
    if place.device.type == "cpu":
        return {"state": "absent", "problem": "needs a GPU"}
    x = place.randn(SQUARE, SQUARE)
    calls = 50
    query = None
    begun = time.monotonic()
    while (seconds := time.monotonic() - begun) < LOAD_S:
        if query is None and seconds > LOAD_S / 2:
            query = subprocess.Popen(CLOCK_QUERY, stdout=subprocess.PIPE, text=True)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            x @ x
        end.record()
        end.synchronize()
    value = calls * 2 * SQUARE**3 / (start.elapsed_time(end) / 1e3) / 1e12
    assert query is not None, "a call takes less than half of the time"
    output, _ = query.communicate(timeout=10)
    note = f"at the end of {LOAD_S:g} s: {output.strip()}"
    return {"unit": "TFLOP/s", "value": value, "state": "ok", "note": note}
