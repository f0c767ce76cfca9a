"""Causal attention with grouped queries, a sliding window and document boundaries.

One public function, `attention`, that picks. On a CPU: `blocks`, or SDPA where there are other keys than queries. On a GPU
the first that can: flash-attn (arXiv 2205.14135, 2307.08691, 2407.08608) where it is installed, SDPA's cuDNN and flash
kernels for plain causal attention, our Triton kernels (kernels/partial_attention.py), SDPA with a dense mask. Or by name.

Blocks: SDPA's CPU kernel reaches a third of what the machine's GEMMs do (its inner products are small and its softmax is
scalar code between them). Here a block of queries meets all keys before its end in one batched GEMM, and keys after it are
skipped: scores and softmax in fp32 or better, probabilities in the compute dtype. The probabilities are kept for the
backward where they are small beside the block's other activations, and made again otherwise (the same lines, the same bits).
"""
import contextlib
import functools
import importlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import triton_
from kernels.grad import wide
from kernels.partial_attention import inner, partial, partial_backward, triton_fits
from kernels.sight import Sight

FLASH = ("flash_attn_interface", "flash_attn.cute", "flash_attn")  # versions 3, 4 and 2, where each has flash_attn_func
FLASH_CHIPS = {"flash_attn_interface": (9,), "flash_attn.cute": (9, 10), "flash_attn": (8, 9, 10, 12)}  # major compute capability
PLAIN = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BLOCK = 128  # queries that meet their keys together: smaller skips more of the upper triangle, larger has better GEMMs
KEEP = 16  # probabilities are kept for the backward up to this many tokens a channel of a head (s <= KEEP d)


def mask(queries: Tensor, keys: Tensor, window: int | None = None, docs_q: Tensor | None = None,
         docs_k: Tensor | None = None) -> Tensor | None:
    """Who sees whom, bool [b or 1, 1, s_q, s_k]; None: plain causal over equal lengths.

    queries [s_q], keys [s_k]: places in the sequence; docs [b, s]: the document of each token.
    """
    plain = queries.shape == keys.shape and (window is None or window >= keys.shape[0]) and docs_q is None
    if plain:
        return None
    apart = queries[:, None] - keys[None, :]
    see = apart >= 0
    if window is not None:
        see &= apart < window
    see = see[None, None]
    return see if docs_q is None else see & (docs_q[:, None, :, None] == docs_k[:, None, None, :])


def attention(q: Tensor, k: Tensor, v: Tensor, see: Tensor | Sight | None, kind: str = "auto") -> Tensor:
    """softmax(q k^T / sqrt(d)) v. q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, e] with h a multiple of g -> [b, s_q, h, e].

    see: who sees whom, as kernels/sight.py or as bits [b or 1, 1, s_q, s_k]; None: plain causal over equal lengths.
    kind: auto, flash, triton, sdpa, reference; what cannot do this call says so in one line, and auto picks instead.
    """
    if isinstance(see, Sight) and see.plain:
        see = None
    can = {"flash": flash_fits, "triton": triton_takes}.get(kind)
    if can and not can(q, k, v, see):
        triton_.say_once(f"model.attention={kind}: not for {str(q.dtype).removeprefix('torch.')} on {q.device.type}, head dims {q.shape[-1]} and "
                         f"{v.shape[-1]}{'' if see is None else ', with this mask'}, as installed here; auto picks")
        kind = "auto"
    if kind == "auto":
        kind = pick(q, k, v, see)
    if kind == "flash":
        return flash(q, k, v, see)
    if kind == "triton":
        return _Flash.apply(q, k, v, see)
    bits = see.dense if isinstance(see, Sight) else see
    if kind == "reference":
        return reference(q, k, v, bits)
    if kind == "blocks":
        return _Blocks.apply(q, k, v, bits)
    return sdpa(q, k, v, bits)


def pick(q: Tensor, k: Tensor, v: Tensor, see: Tensor | Sight | None) -> str:
    if q.device.type == "cpu" and "cpu" not in triton_.DEVICES:
        return "blocks" if q.shape[1] == k.shape[1] else "sdpa"
    if flash_fits(q, k, v, see):
        return "flash"
    ours = see is not None or q.shape[-1] != v.shape[-1] or q.dtype == torch.float32  # where SDPA's fast kernels do not go
    return "triton" if ours and triton_takes(q, k, v, see) else "sdpa"


def sdpa(q: Tensor, k: Tensor, v: Tensor, see: Tensor | None) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    exact = torch.are_deterministic_algorithms_enabled()
    allowed = [kernel for kernel in PLAIN if kernel != SDPBackend.EFFICIENT_ATTENTION or not exact]  # its backward has atomics
    with sdpa_kernel(allowed, set_priority=True) if q.is_cuda else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=see, is_causal=see is None, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


@functools.cache
def flash_function(capability: tuple[int, int]) -> Callable | None:
    """flash_attn_func of the best version that is installed and has this chip; None: there is none."""
    for name in FLASH:
        if capability[0] in FLASH_CHIPS[name]:
            try:
                return importlib.import_module(name).flash_attn_func
            except (ImportError, AttributeError):
                continue
    return None


def flash_fits(q: Tensor, k: Tensor, v: Tensor, see: Tensor | Sight | None) -> bool:
    """Plain causal attention, or a window without documents."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] > 256 or q.shape[-1] % 8 \
            or q.shape[-1] != v.shape[-1] or isinstance(see, Tensor) or (see is not None and see.window is None):
        return False
    return flash_function(torch.cuda.get_device_capability(q.device)) is not None


def flash(q: Tensor, k: Tensor, v: Tensor, see: Sight | None) -> Tensor:
    """Versions differ in what they return beside the output; all align the last query with the last key."""
    more = {} if see is None else {"window_size": (see.window - 1, 0)}
    out = flash_function(torch.cuda.get_device_capability(q.device))(
        q, k, v, causal=True, deterministic=torch.are_deterministic_algorithms_enabled(), **more)
    return out[0] if isinstance(out, tuple) else out


def triton_takes(q: Tensor, k: Tensor, v: Tensor, see: Tensor | Sight | None) -> bool:
    return triton_fits(q, k, v, see) and (see is not None or q.shape[1] == k.shape[1])


def reference(q: Tensor, k: Tensor, v: Tensor, see: Tensor | None) -> Tensor:
    """The definition, term by term, in fp32 or better."""
    dtype, share = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2).to(wide(q.dtype)) for t in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if see is None:
        see = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return (scores.masked_fill(~see, float("-inf")).softmax(-1) @ v).transpose(1, 2).to(dtype)


class _Flash(torch.autograd.Function):
    """One part that has all the keys."""

    @staticmethod
    def forward(ctx, q, k, v, see):
        if see is None:
            see = Sight(0, 0, q.shape[1], k.shape[1], None, None, None, q.device)
        out, lse = partial(q, k, v, see, q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.see = see
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        into = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        if q.shape[1] == k.shape[1] and q.shape[-1] == v.shape[-1]:  # side by side, as RoPE's backward and the merged projection like them
            heads = [t.shape[2] for t in (q, k, v)]
            into = q.new_empty(*q.shape[:2], sum(heads), q.shape[-1]).split(heads, 2)
        return *partial_backward(dout, q, k, v, ctx.see, lse, inner(out, dout), into), None


def by_head(x: Tensor, groups: int) -> Tensor:
    """[b, s, h, d] -> [b g, h/g, s, d], without a copy where x lies head by head already (kernels/rope.py makes it so)."""
    b, s, h, d = x.shape
    return x.transpose(1, 2).reshape(b * groups, h // groups, s, d)


def by_token(x: Tensor, b: int) -> Tensor:
    """The way back, as a view: [b g, h/g, s, d] -> [b, s, h, d]."""
    return x.view(b, -1, *x.shape[2:]).transpose(1, 2)


def probabilities(q: Tensor, k: Tensor, see: Tensor | None, lo: int, hi: int) -> Tensor:
    """Softmax of queries lo..hi over keys 0..hi. q [n, r, s, d] and k [n, s, d] -> [n, r, hi - lo, hi], n = b g."""
    n, r, _, d = q.shape
    rows = (q[:, :, lo:hi].to(wide(q.dtype)) / math.sqrt(d)).reshape(n, -1, d)
    scores = torch.bmm(rows, k[:, :hi].to(rows.dtype).transpose(1, 2)).view(n, r, hi - lo, hi)
    if see is None:
        scores[..., lo:] += torch.full((hi - lo, hi - lo), -math.inf, dtype=scores.dtype, device=q.device).triu_(1)
    else:
        scores.view(see.shape[0], -1, hi - lo, hi).masked_fill_(~see[:, :, lo:hi, :hi], -math.inf)
    return torch.softmax(scores, -1).to(q.dtype)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, see):
        b, s, h, d = q.shape
        g = k.shape[2]
        q, k, v = by_head(q, g), by_head(k, g)[:, 0], by_head(v, g)[:, 0]  # [n, r, s, d], [n, s, d], n = b g
        out = q.new_empty(b, s, g, h // g, v.shape[-1])
        kept = [] if any(ctx.needs_input_grad) and s <= KEEP * d else None  # [n, r, B, hi] a block
        for lo in range(0, s, BLOCK):
            hi = min(lo + BLOCK, s)
            p = probabilities(q, k, see, lo, hi)
            o = torch.bmm(p.view(len(p), -1, hi), v[:, :hi])  # [n, r B, dv]
            out[:, lo:hi] = o.view(b, g, h // g, hi - lo, -1).permute(0, 3, 1, 2, 4)
            if kept is not None:
                kept.append(p)
        out = out.view(b, s, h, -1)
        ctx.save_for_backward(q, k, v, see, out, *(kept or ()))
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, see, out, *kept = ctx.saved_tensors
        (n, r, s, d), d_v, b, g = q.shape, v.shape[-1], len(dout), len(q) // len(dout)
        dtype, acc = q.dtype, wide(q.dtype)
        # dS = P (dO v^T - delta) with delta = <dO, O>. The subtraction rides inside the GEMM, as two more channels of dO
        # (delta's leading digits and the rest) against ones in v: it happens before the product is rounded.
        dout = by_head(dout, g)  # [n, r, s, d_v]
        delta = (dout.to(acc) * by_head(out, g)).sum(-1, keepdim=True)
        coarse = delta.to(dtype)
        dout_delta = torch.cat((dout, -coarse, (coarse - delta).to(dtype)), -1)  # [n, r, s, d_v + 2]
        v_ones = torch.cat((v, v.new_ones(n, s, 2)), -1).transpose(1, 2)  # [n, d_v + 2, s]
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=acc) for x in (k, v))
        for i, lo in enumerate(range(0, s, BLOCK)):
            hi = min(lo + BLOCK, s)
            p = (kept[i] if kept else probabilities(q, k, see, lo, hi)).view(n, -1, hi)  # [n, r B, hi]
            dv[:, :hi] += torch.bmm(p.transpose(1, 2), dout[:, :, lo:hi].reshape(n, -1, d_v))
            ds = torch.bmm(dout_delta[:, :, lo:hi].reshape(n, -1, d_v + 2), v_ones[:, :, :hi]).mul_(p)
            dq[:, :, lo:hi] = torch.bmm(ds, k[:, :hi]).view(n, r, hi - lo, d)
            dk[:, :hi] += torch.bmm(ds.transpose(1, 2), q[:, :, lo:hi].reshape(n, -1, d))
        scale = 1 / math.sqrt(d)
        dk, dv = (x.to(dtype)[:, None] for x in (dk.mul_(scale), dv))
        return by_token(dq.mul_(scale), b), by_token(dk, b), by_token(dv, b), None
