"""On a GPU: each Triton kernel's bandwidth beside a plain copy's, each product's FLOP/s beside the libraries'.

Bytes are those that must be moved (inputs once, outputs once), so 100 % of a copy is a bound; `plain` is the same thing in torch
operations under torch.compile, `liger` its kernel where liger-kernel is installed. The shapes are those of a dense 1.6B model, micro-batch 8 x 4096.
"""
import contextlib
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import adam, attention, cross_entropy, fp8, fp8_grouped, grouped_gemm, linear, newton_schulz, norm, permute, rope, swiglu
from kernels.fp8_gemm import quantize
from kernels.sight import Sight, sight
from scripts.bench.shape import show

REPEATS, WARM = 20, 5
FLUSH = 1 << 28  # bytes written between repeats: more than any cache holds


@dataclass(frozen=True)
class Size:
    batch: int = 8
    seq: int = 4096
    hidden: int = 2048
    ffn: int = 5632
    heads: int = 16
    kv: int = 4
    vocab: int = 32768
    rows: int = 4096  # of logits at a time
    experts: int = 64
    top_k: int = 8
    expert_ffn: int = 768
    params: int = 1 << 28  # of one AdamW launch


@dataclass(frozen=True)
class Case:
    """work: bytes that a memory-bound kernel must move, FLOPs of a product; others: what stands beside it."""
    work: float
    ours: Callable
    others: dict[str, Callable]


def main(args) -> int:
    size, device, dtype = Size(), torch.device("cuda"), torch.bfloat16
    torch.set_float32_matmul_precision("highest")
    copy = copy_speed(device)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, {time.strftime('%Y-%m-%d')}"
    tables: list[list[dict]] = []
    for cases, bound in ((memory_cases, copy), (product_cases, None)):
        tables.append([])
        for name, case in cases(size, device, dtype).items():
            if args.only in name:
                tables[-1].append(row(name, case, device, bound))
                if args.json:
                    print(json.dumps(tables[-1][-1]), flush=True)
    if args.json:
        show([], True, machine=where, copy=copy)
        return 0
    show(tables[0], False, machine=where, copy=f"{copy / 1e12:.2f} TB/s", memory=f"bf16, ms, median of {REPEATS}")
    show(tables[1], False, products="bf16, TFLOP/s, forward or as named")
    return 0


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of one large copy."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in "ab")
    return 2 * a.numel() / clock(lambda: a.copy_(b), device)


def row(name: str, case: Case, device: torch.device, copy: float | None) -> dict:
    """A kernel that does not run here says why and costs the others nothing."""
    def measure(function: Callable) -> str:
        try:
            seconds = clock(function, device)
        except Exception as problem:
            return type(problem).__name__
        return f"{1e3 * seconds:.3f} ({100 * case.work / seconds / copy:.0f} %)" if copy else f"{case.work / seconds / 1e12:.0f}"
    unit = "ms (of a copy)" if copy else "TFLOP/s"
    beside = ", ".join(f"{other} {measure(function)}" for other, function in case.others.items())
    return {"kernel": name, unit: measure(case.ours), "beside it": beside}


def clock(function: Callable, device: torch.device) -> float:
    """Seconds of one call: the median over REPEATS, each with cold caches."""
    if device.type == "cpu":  # the interpreter: that it runs is all that can be learnt
        function()
        return 1.0
    flush, times = torch.empty(FLUSH, dtype=torch.uint8, device=device), []
    for i in range(WARM + REPEATS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        function()
        end.record()
        end.synchronize()
        if i >= WARM:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def memory_cases(s: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Case]:
    t, d, e = s.batch * s.seq, s.hidden, dtype.itemsize

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, r, w, wide = make(t, d), make(t, d), make(d), make(t, 2 * s.ffn)
    dy, df, dw = make(t, d), make(t, s.ffn), torch.compile if device.type == "cuda" else lambda f: f
    y, total, scale, mean = norm.launch_forward(x, r, w, None, 1e-5)
    dim = d // s.heads
    qkv = make(s.batch, s.seq, s.heads + 2 * s.kv, dim)
    cos, sin = rope.tables(torch.arange(s.seq, device=device).expand(s.batch, -1), rope.frequencies(dim, 5e5).to(device), dtype)
    turned = qkv[:, :, :s.heads + s.kv]
    logits, targets = make(s.rows, s.vocab), torch.randint(s.vocab, (s.rows,), device=device)
    p, g, m, v = (torch.rand(s.params, device=device) for _ in "pgmv")
    low, one, yes = torch.empty_like(p, dtype=dtype), torch.ones((), device=device), torch.ones((), dtype=torch.bool, device=device)
    slots = torch.randperm(t * s.top_k, device=device).view(t, s.top_k)
    rows, source = make(t * s.top_k, d), torch.empty(t * s.top_k, dtype=torch.int64, device=device)
    source[slots.view(-1)] = torch.arange(t, device=device).repeat_interleave(s.top_k)
    n = t * d * e  # bytes of one [tokens, hidden]
    cases = {
        "add_rms_norm": Case(4 * n, lambda: norm.launch_forward(x, r, w, None, 1e-5), {
            "compiled": dw(lambda: (F.rms_norm(x + r, (d,), w, 1e-5), x + r))}),
        "add_rms_norm_backward": Case(4 * n, lambda: norm.launch_backward(dy, r, total, w, scale, mean), {
            "compiled": dw(lambda: norm.norm_backward(dy, r, total, w, scale[:, None], None))}),
        "rope": Case(2 * turned.numel() * e, lambda: rope.launch(turned, turned, cos, sin, s.heads + s.kv), {
            "compiled": dw(lambda: rope.rotate(turned, cos, sin))}),
        "swiglu": Case(3 * t * s.ffn * e, lambda: swiglu.launch_swiglu(wide), {"compiled": dw(lambda: swiglu.swiglu_forward(wide))}),
        "swiglu_backward": Case(5 * t * s.ffn * e, lambda: swiglu.launch_swiglu_backward(df, wide), {
            "compiled": dw(lambda: swiglu.swiglu_backward(df, wide))}),
        "gelu": Case(2 * t * s.ffn * e, lambda: swiglu.launch_gelu(df), {"compiled": dw(lambda: F.gelu(df, approximate="tanh"))}),
        "cross_entropy": Case(2 * logits.numel() * e, lambda: cross_entropy.launch(logits, targets, 1.0, s.vocab, 0, None), {
            "compiled": dw(lambda: cross_entropy.block_loss(logits, targets, 1.0, s.vocab, 0, None))}),
        "adamw": Case(s.params * (7 * 4 + e), lambda: adam.launch(p, g, m, v, 1e-3, 0.9, 0.95, 1e-8, 0.1, 5, one, yes, low), {
            "compiled": dw(lambda: (adam.reference(p, g, m, v, 1e-3, 0.9, 0.95, 1e-8, 0.1, 5, one, yes), low.copy_(p)))}),
        "permute": Case(2 * rows.numel() * e, lambda: permute.launch(x, source[:, None], False), {"torch": lambda: x[source]}),
        "unpermute": Case((s.top_k + 1) * n, lambda: permute.launch(rows, slots, True), {"torch": lambda: rows[slots].sum(1)}),
        **{f"fp8_{kind}": Case(1.5 * n if kind != "tensor" else 2.5 * n, lambda kind=kind: fp8.launch(x, kind, torch.float8_e4m3fn), {
            "compiled": dw(lambda kind=kind: fp8.reference(x, kind, torch.float8_e4m3fn))}) for kind in fp8.KINDS},
    }
    with contextlib.suppress(ImportError):
        for name, way in liger_ways(importlib.import_module("liger_kernel.ops"), s, make).items():
            cases[name].others["liger"] = way
    return cases


def liger_ways(liger, s: Size, make: Callable) -> dict[str, Callable]:
    """Liger's kernels of the same sizes, on inputs of their own: some write into them."""
    t, d, dim, p = s.batch * s.seq, s.hidden, s.hidden // s.heads, torch.Tensor.requires_grad_
    x, r, w, a, b, logits = p(make(t, d)), p(make(t, d)), p(make(d)), p(make(t, s.ffn)), p(make(t, s.ffn)), make(s.rows, s.vocab)
    q, k = (make(s.batch, s.seq, heads, dim).transpose(1, 2) for heads in (s.heads, s.kv))
    cos, sin = (make(1, s.seq, dim) for _ in "cs")
    targets = torch.randint(s.vocab, (s.rows,), device=x.device)

    def norm_() -> tuple:
        return liger.LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-5)

    def product() -> torch.Tensor:
        return liger.LigerSiLUMulFunction.apply(a, b)

    return {"add_rms_norm": torch.no_grad()(norm_), "add_rms_norm_backward": backward(norm_, (x, r, w)),
            "rope": lambda: liger.LigerRopeFunction.apply(q, k, cos, sin),
            "swiglu": torch.no_grad()(product), "swiglu_backward": backward(product, (a, b)),
            "cross_entropy": lambda: liger.LigerCrossEntropyFunction.apply(p(logits.detach()), targets, None)}


def backward(forward: Callable, inputs: tuple) -> Callable:
    """The backward alone, over one forward, which is run when it is first asked for."""
    outs: list = []

    def run() -> None:
        if not outs:
            out = forward()
            outs.extend(out if isinstance(out, tuple) else (out,))
            outs.append([torch.ones_like(o) for o in outs])
        torch.autograd.grad(outs[:-1], inputs, outs[-1], retain_graph=True)
    return run


def product_cases(s: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Case]:
    t, d, dim = s.batch * s.seq, s.hidden, s.hidden // s.heads

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    dy, x, into = make(t, s.ffn), make(t, d), torch.zeros(s.ffn, d, device=device)
    cases = {"weight_gradient": Case(2 * t * s.ffn * d, lambda: linear.launch_wgrad(into, dy, x), {
        "addmm to fp32": lambda: torch.addmm(into, dy.t(), x, out_dtype=torch.float32), "add_(mm)": lambda: into.add_(dy.t() @ x)})}
    both = make(2 * s.ffn, d)  # gate and up
    x8, both8, one = x.to(torch.float8_e4m3fn), both.to(torch.float8_e4m3fn), torch.ones((), device=device)
    cases["gemm"] = Case(4 * t * s.ffn * d, lambda: x @ both.t(), {  # cuBLAS: what can be had of the card
        "in fp8": lambda: torch._scaled_mm(x8, both8.t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=True)})
    matrix = make(d, s.ffn)
    cases["symmetric"] = Case(2 * d * d * s.ffn, lambda: newton_schulz.launch(matrix, 1.0, None, 0.0), {"mm": lambda: matrix @ matrix.t()})
    counts = torch.full((s.experts,), t * s.top_k // s.experts, device=device)
    rows, inner = make(t * s.top_k, d), make(t * s.top_k, 2 * s.expert_ffn)
    weight, grads = make(s.experts, 2 * s.expert_ffn, d), torch.zeros(s.experts, 2 * s.expert_ffn, d, device=device)
    offsets, flops = grouped_gemm.offsets_of(counts, device), 2 * t * s.top_k * 2 * s.expert_ffn * d
    cases |= {
        "grouped": Case(flops, lambda: grouped_gemm.launch(rows, weight, offsets), {
            "torch._grouped_mm": lambda: torch._grouped_mm(rows, weight.mT, offs=offsets[1:])}),
        "grouped_dgrad": Case(flops, lambda: grouped_gemm.launch(inner, weight, offsets, True), {
            "torch._grouped_mm": lambda: torch._grouped_mm(inner, weight, offs=offsets[1:])}),
        "grouped_wgrad": Case(flops, lambda: grouped_gemm.launch_wgrad(grads, inner, rows, offsets), {
            "torch._grouped_mm": lambda: torch._grouped_mm(inner.mT, rows, offs=offsets[1:])}),
    }
    for recipe in ("rowwise", "blockwise"):
        kind, of_weight, _ = fp8_grouped.RECIPES[recipe]
        a, b = quantize(rows, kind, fp8.E4M3, fp8.SIDE), fp8_grouped.matrices(weight, of_weight, fp8.SIDE)
        cases[f"grouped_fp8_{recipe}"] = Case(flops, lambda a=a, b=b: fp8_grouped.launch(a, b, offsets, s.experts, dtype), {
            "in bf16": lambda: torch._grouped_mm(rows, weight.mT, offs=offsets[1:])})
    for name, kv, qk, window in (("attention", s.heads, dim, None), ("attention_gqa", s.kv, dim, None),
                                 ("attention_window", s.kv, dim, s.seq // 4), ("attention_mla", s.heads, dim + dim // 2, None)):
        cases |= attention_cases(name, make, s, kv, qk, dim, window, device)
    return cases


def attention_cases(name: str, make: Callable, s: Size, kv: int, qk: int, dim: int, window: int | None, device: torch.device) -> dict[str, Case]:
    """Forward, and forward with backward; the FLOPs are those of the pairs that see each other."""
    q, k, v = (make(s.batch, s.seq, heads, channels).requires_grad_() for heads, channels in ((s.heads, qk), (kv, qk), (kv, dim)))
    dy = make(s.batch, s.seq, s.heads, dim)
    see: Sight = sight(0, s.seq, 0, s.seq, window, None, device)
    reach = min(window or s.seq, s.seq)
    pairs = s.batch * s.heads * (reach * s.seq - reach * (reach - 1) / 2)

    def backend(which: SDPBackend) -> Callable:
        def run():
            with sdpa_kernel([which]):
                out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=kv != s.heads)
            return out.transpose(1, 2)
        return run

    ways = {"ours": lambda: attention._Flash.apply(q, k, v, see)}
    if window is None:
        ways |= {"cudnn": backend(SDPBackend.CUDNN_ATTENTION), "flash": backend(SDPBackend.FLASH_ATTENTION)}
    if attention.flash_fits(q, k, v, None if see.plain else see):
        ways["flash-attn"] = lambda: attention.flash(q, k, v, None if see.plain else see)

    def forward(way: Callable) -> Callable:
        return torch.no_grad()(way)

    def both(way: Callable) -> Callable:
        return lambda: torch.autograd.grad(way(), (q, k, v), dy)

    others = {key: way for key, way in ways.items() if key != "ours"}
    return {name: Case(2 * pairs * (qk + dim), forward(ways["ours"]), {key: forward(way) for key, way in others.items()}),
            f"{name}_both": Case(2 * pairs * (qk + dim) * 3.5, both(ways["ours"]), {key: both(way) for key, way in others.items()})}
