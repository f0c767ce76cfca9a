"""Causal attention with grouped queries, sliding windows, chunks, document boundaries, a custom scale, a soft
cap and sinks.

`attention` is the only public function. It picks an implementation unless one is named. On a CPU it picks
`blocks`, or SDPA if there are more keys than queries, and for plain sequences of one block. On a GPU it picks
the first of these that supports the call:
1. an installed library: flash-attn, cuDNN for documents, torch's copy of flash-attn for documents and
   windows, torch's flex_attention for every other mask, soft caps and sinks, of long sequences
   (kernels/attention_libraries.py);
2. SDPA's cuDNN and flash kernels, for plain causal attention;
3. the Triton kernels of kernels/partial_attention.py;
4. SDPA with a dense mask, or the reference if SDPA lacks a feature of the call.

| | plain | window | documents, chunks | values of another dim | soft cap | sinks | fp32 | deterministic |
|---|---|---|---|---|---|---|---|---|
| flash-attn 4 | yes | yes | yes, if the host can count them | 192 and 128 | yes | yes | no | yes |
| flash-attn 3 | yes | yes | yes, if the host can count them | 192 and 128 | yes | no | no | yes |
| cuDNN, variable length | no | no | yes, if the host can count them | up to 128 | no | no | no | no |
| flash-attn 2 | yes | yes | yes, if the host can count them | no | yes | no | no | yes |
| torch, variable length | no | yes | yes, if the host can count them | no | no | no | no | yes |
| flex_attention | no | yes | yes | yes | yes | yes | no | yes |
| SDPA, cuDNN | yes | no | no | where torch says so | no | no | no | no |
| SDPA, flash | yes | no | no | no | no | no | no | yes |
| Triton kernels | yes | yes | yes | yes | yes | yes | yes | yes |
| SDPA, dense mask | yes | yes | yes | yes | no | no | yes | without its memory-efficient kernel |
| `blocks`, reference | yes | yes | yes | yes | yes | yes | yes | yes |

All take a scale. The host can count chunks if only they divide sequences, into equal ones. Sinks are merged
after the softmax, through the logsumexp of the scores of keys: so a library has to accept its gradient, while
flash-attn 2 and 3 return the logsumexp but drop the gradient.

Why `blocks`: SDPA's CPU kernel reaches a third of the machine's GEMM throughput, because its inner products
are small and the softmax between them is scalar code. Here one batched GEMM multiplies a block of queries
with all keys up to the end of the block, and skips the later keys. Scores and softmax are in fp32 or better,
probabilities in the compute dtype. The probabilities are saved for the backward if they are small compared to
the other activations of the block. Otherwise the backward recomputes them with the same code, bit for bit. A
sequence of one block has no keys to skip: there, in fp32 or fp64, SDPA takes 0.6 to 0.75 of the time.
"""
import contextlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import attention_libraries, triton_
from kernels.attention_libraries import Choice, choose_library, library_attention
from kernels.attention_mask import AttentionMask, MaskLike, make_attention_mask
from kernels.attention_scores import PLAIN_SCORES, ScoreForm, join_sinks
from kernels.attention_triton import triton_supports
from kernels.cpu_products import operands_are_bf16
from kernels.grad import accumulation_dtype
from kernels.partial_attention import attention_part, partial_backward

# Dtypes of SDPA's flash kernel
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_MAX_HEAD_DIM = 256

# SDPA's kernels, in order of preference
PLAIN_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

# Those that do not materialize a score matrix: {kernel: whether it supports a call}
FUSED_KERNELS: dict[SDPBackend, Callable[[torch.backends.cuda.SDPAParams], bool]] = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
}

BLOCK = 128  # queries per block: fewer skip more of the upper triangle, more make better GEMMs
KEEP_PROBABILITIES = 16  # the forward saves probabilities if s <= KEEP_PROBABILITIES * head dim


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike,
    kind: str = "auto",
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the keys that each query sees.

    q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, e], where h is a multiple of g -> [b, s_q, h, e].
    mask is an AttentionMask or bool [b or 1, 1, s_q, s_k]; None is plain causal over equal lengths.
    kind is auto, flash, triton, sdpa, reference or blocks. If flash, triton or sdpa does not support the
    call, fall back to auto and say so once on stderr.
    scale and softcap: see ScoreForm. sinks [h] is the score of one more key of each head, with value 0.
    """
    form = ScoreForm(scale, softcap)
    has_sinks = sinks is not None
    if isinstance(mask, AttentionMask) and mask.is_causal:
        mask = None

    # the implementation, and a library if it is one
    library = None
    if kind in ("auto", "flash") and q.device.type in attention_libraries.DEVICES:
        library = choose_library(q, k, v, mask, form, has_sinks)
    beyond = ["a soft cap"] * (softcap is not None) + ["sinks"] * has_sinks  # SDPA lacks them; for messages
    if kind != "auto":
        kind = supported_kind(q, k, v, mask, kind, library, beyond)
    if kind == "auto":
        kind = choose_kind(q, k, v, mask, library, beyond)

    if kind == "flash":
        assert library is not None and not isinstance(mask, Tensor)  # no library takes a dense mask
        return library_attention(library, q, k, v, mask, form, sinks)
    dense_mask = mask.dense_mask if isinstance(mask, AttentionMask) and kind != "triton" else mask
    if kind == "reference":
        return attention_reference(q, k, v, dense_mask, form, sinks)
    if kind == "sdpa":
        return sdpa(q, k, v, dense_mask, scale)
    function = _TritonAttention if kind == "triton" else _BlockwiseAttention
    out = function.apply(q, k, v, dense_mask, form, has_sinks)
    return out if sinks is None else join_sinks(*out, sinks)


def supported_kind(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, kind: str, library: Choice | None, beyond: list[str]
) -> str:
    """Return the named implementation if it supports this call, else auto, and say so once.

    library and beyond: see choose_kind.
    """
    supported = {
        "flash": library is not None,
        "triton": kind == "triton" and triton_attends(q, k, v, mask),
        "sdpa": not beyond,
    }
    if supported.get(kind, True):
        return kind
    dtype = str(q.dtype).removeprefix("torch.")
    with_mask = "" if mask is None else ", with this mask"
    with_mask += "".join(f", with {what}" for what in beyond)
    triton_.print_once(
        f"model.mixer.kernel={kind}: not for {dtype} on {q.device.type}, head dims {q.shape[-1]} and "
        f"{v.shape[-1]}{with_mask}, as installed here; auto picks")
    return "auto"


def choose_kind(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, library: Choice | None, beyond: list[str]
) -> str:
    """Resolve auto for this call. library comes from choose_library; beyond: what SDPA lacks."""
    if library is not None:
        return "flash"
    of_torch = "reference" if beyond else "sdpa"
    if q.device.type == "cpu" and "cpu" not in triton_.DEVICES:
        has_all_queries = q.shape[1] == k.shape[1]
        return of_torch if not has_all_queries or is_one_plain_block(q, v, mask, beyond) else "blocks"
    return choose_on_gpu(q, k, v, mask, beyond) or of_torch


def is_one_plain_block(q: Tensor, v: Tensor, mask: MaskLike, beyond: list[str]) -> bool:
    """Whether SDPA's CPU kernel is faster than `blocks`."""
    has_plain_scores = mask is None and not beyond
    has_equal_dims = q.shape[-1] == v.shape[-1]
    is_full_precision = q.dtype in (torch.float32, torch.float64)
    return has_plain_scores and has_equal_dims and is_full_precision and q.shape[1] <= BLOCK


def choose_on_gpu(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, beyond: list[str]) -> str | None:
    """Choose between SDPA's fused kernels and ours; None if neither supports the call."""
    if mask is None and not beyond and q.dtype in FLASH_DTYPES and sdpa_is_fused(q, k, v):
        return "sdpa"
    if not triton_attends(q, k, v, mask):
        return None
    if q.dtype in FLASH_DTYPES:
        report_slower(q, v, mask, beyond)
    return "triton"


def sdpa_is_fused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether SDPA has a fused kernel for plain causal attention in 16 bits with these head dims; torch is
    queried if those of keys and values differ."""
    if q.shape[-1] == v.shape[-1]:
        return True
    if not q.is_cuda:
        return False
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    has_groups = q.shape[1] != k.shape[1]
    call = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, has_groups)
    return FUSED_KERNELS[SDPBackend.CUDNN_ATTENTION](call)


def report_slower(q: Tensor, v: Tensor, mask: MaskLike, beyond: list[str]) -> None:
    """Report once that a library would be faster than the Triton kernels, and which one."""
    what = f"head dims {q.shape[-1]} and {v.shape[-1]}"
    if isinstance(mask, AttentionMask) and mask.first_key is not None:
        what = "documents" if mask.window is None else "a window"
        what = "chunks" if mask.chunk is not None else what
    what = " and ".join(beyond) or what
    triton_.print_once(
        f"attention: no installed library takes {what} in this call; Triton kernels run, which are slower "
        f"than flash-attn {'4 (Hopper and Blackwell)' if 'sinks' in beyond else '3 (Hopper) or 2'}")


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """PyTorch's scaled_dot_product_attention, in our order of dims. mask is dense, as for `attention`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, h or g, s, d]
    has_groups = q.shape[1] != k.shape[1]
    backends = PLAIN_KERNELS
    if torch.are_deterministic_algorithms_enabled():  # the backward of this one uses atomics
        backends = [kernel for kernel in PLAIN_KERNELS if kernel != SDPBackend.EFFICIENT_ATTENTION]

    if q.is_cuda:
        report_missing_kernel(q, k, v, mask, backends)
    with sdpa_kernel(backends, set_priority=True) if q.is_cuda else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=has_groups)
    return out.transpose(1, 2)


def report_missing_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backends: list[SDPBackend]
) -> None:
    """Report once if SDPA would materialize s_q x s_k matrices, and their size.

    q [b, h, s_q, d], k [b, g, s_k, d], v [b, g, s_k, e]. backends are those that it may choose.
    """
    is_plain = mask is None and q.shape[-1] == v.shape[-1]
    if is_plain and q.dtype in FLASH_DTYPES and q.shape[-1] <= FLASH_MAX_HEAD_DIM and q.shape[-1] % 8 == 0:
        return  # the flash kernel supports all of these: avoid a query for each call

    has_groups = q.shape[1] != k.shape[1]
    call = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, mask is None, has_groups)
    if any(FUSED_KERNELS[kernel](call) for kernel in backends if kernel in FUSED_KERNELS):
        return
    dtype = str(q.dtype).removeprefix("torch.")
    with_mask = "" if mask is None else ", with a dense mask"
    element_bytes = accumulation_dtype(q.dtype).itemsize
    gigabytes = 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * element_bytes / 1e9
    triton_.print_once(
        f"attention: no fused kernel for {dtype}, head dims {q.shape[-1]} and {v.shape[-1]}{with_mask}; "
        "SDPA's own arithmetic runs: much slower, and its scores and probabilities take "
        f"{gigabytes:.2g} GB a layer"
    )


# ---- reference ---------------------------------------------------------------------------------------------

def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    form: ScoreForm = PLAIN_SCORES,
    sinks: Tensor | None = None,
) -> Tensor:
    """Reference, term by term, in fp32 or better. Shapes, mask and sinks are as for `attention`."""
    dtype = q.dtype
    acc_dtype = accumulation_dtype(dtype)
    heads_per_group = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(heads_per_group, 2)
    v = v.repeat_interleave(heads_per_group, 2)
    q, k, v = (x.transpose(1, 2).to(acc_dtype) for x in (q, k, v))  # [b, h, s, d]

    scores = form.capped(q @ k.transpose(-1, -2) / form.divisor(q.shape[-1]))  # [b, h, s_q, s_k]
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink_scores = sinks.to(acc_dtype)[:, None, None].expand_as(scores[..., :1])
        scores = torch.cat((scores, sink_scores), -1)
    probs = scores.softmax(-1)[..., :k.shape[2]]
    out = probs @ v
    return out.transpose(1, 2).to(dtype)


# ---- Triton ------------------------------------------------------------------------------------------------

def triton_attends(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike) -> bool:
    """Whether the Triton kernels support the call. Without a mask they would see later keys, too."""
    return (mask is not None or q.shape[1] == k.shape[1]) and triton_supports(q, k, v, mask)


class _TritonAttention(torch.autograd.Function):
    """kernels/partial_attention.py with a single part that holds all keys."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask | None,
        form: ScoreForm = PLAIN_SCORES,
        with_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if mask is None:
            mask = make_attention_mask(0, q.shape[1], 0, k.shape[1], None, None, q.device)
        out, lse = attention_part(q, k, v, mask, q.dtype, form)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask = mask
        ctx.form = form
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        delta = torch.linalg.vecdot(out.to(lse.dtype), dout.to(lse.dtype))
        if dlse is not None:
            delta = delta - dlse
        grads = partial_backward(dout, q, k, v, ctx.mask, lse, delta, form=ctx.form, dtype=q.dtype)
        return *grads, None, None, None


# ---- blocks: batched GEMMs on a CPU ------------------------------------------------------------------------
# n = b g: one GEMM for each key head; r = h / g: the query heads that share it.

def by_head(x: Tensor, groups: int) -> Tensor:
    """[b, s, h, d] -> [b g, h/g, s, d]. A view if x is stored head by head (kernels/rope.py)."""
    b, s, h, d = x.shape
    return x.transpose(1, 2).reshape(b * groups, h // groups, s, d)


def by_token(x: Tensor, b: int) -> Tensor:
    """Invert by_head, as a view: [b g, h/g, s, d] -> [b, s, h, d]."""
    return x.view(b, -1, *x.shape[2:]).transpose(1, 2)


def block_scores(
    q: Tensor, k: Tensor, mask: Tensor | None, form: ScoreForm, start: int, end: int
) -> Tensor:
    """Scores of queries start .. end - 1 and keys 0 .. end - 1, -inf if a query does not see a key.

    q [n, r, s, d], k [n, s, d], mask bool [b or 1, 1, s, s] -> [n, r, end - start, end].
    """
    n, r, _, d = q.shape
    length = end - start
    acc_dtype = accumulation_dtype(q.dtype)
    rows = q[:, :, start:end].to(acc_dtype).reshape(n, -1, d)
    keys = k[:, :end].to(acc_dtype).transpose(1, 2)
    unused = rows.new_empty(1, 1, 1)
    with operands_are_bf16(q.dtype):  # so they are scaled after the product
        scores = torch.baddbmm(unused, rows, keys, beta=0, alpha=1 / form.divisor(d))
    scores = form.capped(scores.view(n, r, length, end))

    if mask is None:
        triangle = scores.new_full((length, length), -math.inf).triu_(1)
        scores[..., start:] += triangle
    else:
        hidden = ~mask[:, :, start:end, :end]
        scores.view(mask.shape[0], -1, length, end).masked_fill_(hidden, -math.inf)
    return scores


def probabilities(scores: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.softmax(scores, -1).to(dtype)


def append_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Append -delta, delta = <dout, out> - dlse, to dout as two channels: its leading digits, and the rest.

    dout, out [n, r, s, d_v], dlse [n, r, s, 1] -> [n, r, s, d_v + 2].
    """
    dtype = dout.dtype
    delta = (dout.to(accumulation_dtype(dtype)) * out).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse
    coarse = delta.to(dtype)
    return torch.cat((dout, -coarse, (coarse - delta).to(dtype)), -1)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        form: ScoreForm = PLAIN_SCORES,
        with_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        b, s, h, d = q.shape
        g = k.shape[2]
        q = by_head(q, g)  # [n, r, s, d]
        k = by_head(k, g)[:, 0]  # [n, s, d]
        v = by_head(v, g)[:, 0]  # [n, s, d_v]

        out = q.new_empty(b, s, g, h // g, v.shape[-1])
        keeps = any(ctx.needs_input_grad) and s <= KEEP_PROBABILITIES * d and form.softcap is None
        kept = []  # [n, r, end - start, end] for each block
        lse = []  # [n, r, end - start, 1] for each block
        for start in range(0, s, BLOCK):
            end = min(start + BLOCK, s)
            scores = block_scores(q, k, mask, form, start, end)
            if with_lse:
                lse.append(scores.logsumexp(-1, keepdim=True))
            probs = probabilities(scores, q.dtype)
            del scores
            rows = torch.bmm(probs.view(len(probs), -1, end), v[:, :end])  # [n, r (end - start), d_v]
            rows = rows.view(b, g, h // g, end - start, -1)
            out[:, start:end] = rows.permute(0, 3, 1, 2, 4)
            if keeps:
                kept.append(probs)

        out = out.view(b, s, h, -1)
        ctx.save_for_backward(q, k, v, mask, out, *kept)
        ctx.form = form
        return (out, by_token(torch.cat(lse, 2), b)[..., 0]) if with_lse else out

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, *kept = ctx.saved_tensors
        batch = len(dout)
        groups = len(q) // batch
        dout = by_head(dout, groups)  # [n, r, s, d_v]
        dlse = None if dlse is None else by_head(dlse[..., None], groups)  # [n, r, s, 1]
        dout_delta = append_delta(dout, by_head(out, groups), dlse)  # [n, r, s, d_v + 2]
        grads = blockwise_gradients(q, k, v, mask, ctx.form, dout, dout_delta, kept)
        dq, dk, dv = (by_token(x, batch) for x in grads)
        return dq, dk, dv, None, None, None


def blockwise_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    form: ScoreForm,
    dout: Tensor,
    dout_delta: Tensor,
    kept: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [n, r, s, d], dk [n, 1, s, d] and dv [n, 1, s, d_v], in the compute dtype.

    q, k and v come from by_head. dout is [n, r, s, d_v], dout_delta its append_delta.
    kept lists the probabilities of each block; it is empty if they are to be recomputed.
    """
    n, r, s, d = q.shape

    # dS = P (dout v^T - delta). The GEMM subtracts delta itself, through two more channels of dout that meet
    # ones in v, so the subtraction happens before the product is rounded.
    ones = v.new_ones(n, s, 2)
    v_ones = torch.cat((v, ones), -1).transpose(1, 2)  # [n, d_v + 2, s]

    dq = torch.empty_like(q)
    acc_dtype = accumulation_dtype(q.dtype)
    dk, dv = (torch.zeros_like(x, dtype=acc_dtype) for x in (k, v))
    for index, start in enumerate(range(0, s, BLOCK)):
        end = min(start + BLOCK, s)
        scores = None if kept else block_scores(q, k, mask, form, start, end)
        probs = kept[index] if scores is None else probabilities(scores, q.dtype)
        scores = None if form.softcap is None else scores  # only the slope of the cap needs them
        probs = probs.view(n, -1, end)  # [n, r (end - start), end]
        dv[:, :end] += torch.bmm(probs.transpose(1, 2), query_rows(dout, start, end))

        dscores = torch.bmm(query_rows(dout_delta, start, end), v_ones[:, :, :end]).mul_(probs)
        if scores is not None:
            dscores = form.through_cap(dscores, scores.view_as(dscores)).to(q.dtype)
        dq_rows = torch.bmm(dscores, k[:, :end])
        dq[:, :, start:end] = dq_rows.view(n, r, end - start, d)
        dk[:, :end] += torch.bmm(dscores.transpose(1, 2), query_rows(q, start, end))

    scale = 1 / form.divisor(d)
    return dq.mul_(scale), dk.mul_(scale).to(q.dtype)[:, None], dv.to(q.dtype)[:, None]


def query_rows(x: Tensor, start: int, end: int) -> Tensor:
    """Return queries start .. end - 1 of all heads of a group: [n, r, s, d] -> [n, r (end - start), d]."""
    return x[:, :, start:end].reshape(len(x), -1, x.shape[-1])
