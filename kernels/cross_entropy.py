"""Output head and cross entropy in one: the logits live one chunk of rows at a time and are never kept.

Both gradients are made during the forward, while a chunk's logits are there (the idea of Liger-Kernel and of arXiv
2411.09009), so the backward costs no second GEMM over the vocabulary. The weight's gradient is therefore complete when the
forward returns: a pipeline's W of the head is empty.

A chunk is as many rows as fill CHUNK bytes in the compute dtype: three GEMMs. Inside it, BLOCK elements at a time go
through the softmax in fp32 while they are in the cache, and come back as the gradient in the logits' place. On a GPU a chunk
is larger, for its GEMMs, and one kernel makes statistics and gradient of a row: two, where ranks share the vocabulary.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.grad import give, wide
from kernels.linear import add_wgrad
from kernels.triton_ import fits, tl, triton

IGNORE = -100  # a target that is not counted
CHUNK = 1 << 25  # bytes: what glibc still hands out again without new pages (its largest mmap threshold)
BLOCK = 1 << 21  # elements
GPU_CHUNK = 1 << 28  # bytes: 1,024 rows of 128k logits in bf16, enough for full GEMMs
COLUMNS, WARPS = 8192, 16  # of a row that a program reads at a time


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | float, vocab: int, *,
                         start: int = 0, merge: Callable | None = None, chunk: int | None = None) -> Tensor:
    """scale * sum over counted tokens of (logsumexp(logits) - logits[target]), a scalar in fp32 or better.

    hidden [t, d]; weight [v, d]: rows start.. of the (padded) vocabulary; targets [t], IGNORE where not counted;
    vocab: rows from here on are padding and take no part. merge: sums the partial statistics of a vocabulary that is
    split over ranks: (lse, target's logit, both [rows]) -> the same over all ranks. chunk: rows at a time.
    """
    size = CHUNK if hidden.device.type == "cpu" else GPU_CHUNK
    rows = chunk or max(1, size // (weight.shape[0] * weight.element_size()))
    even = -(-hidden.shape[0] // -(-hidden.shape[0] // rows))  # as many chunks, none of them short
    return _LinearCrossEntropy.apply(hidden, weight, targets, scale, vocab, start, merge, even, torch.is_grad_enabled())


def block_loss(logits: Tensor, targets: Tensor, scale: Tensor | float, vocab: int, start: int, merge) -> Tensor:
    """Losses of some rows [r] (0 where not counted); logits [r, v] become scale * (softmax - one-hot), 0 where not counted."""
    f = logits.to(wide(logits.dtype))
    if start + f.shape[1] > vocab:
        f[:, max(vocab - start, 0):] = float("-inf")
    counted = targets != IGNORE
    column = targets - start
    here = counted & (column >= 0) & (column < f.shape[1])
    column = column.clamp(0, f.shape[1] - 1)[:, None]
    picked = f.gather(1, column)[:, 0].where(here, 0.0)
    p = torch.softmax(f, 1)
    own = lse = f.amax(1) - p.amax(1).log()  # the largest probability is exp(largest logit - lse), and never underflows
    if merge is not None:
        lse, picked = merge(lse, picked)
        p.mul_((own - lse).exp_()[:, None])
    p.scatter_add_(1, column, -here.to(p.dtype)[:, None])
    logits.copy_(p.mul_((counted * scale)[:, None]))
    return (lse - picked).where(counted, 0.0)


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def softmax_kernel(LOGITS, TARGETS, SCALE, LSE, PICKED, stride, columns, start,
                   COUNT: tl.constexpr, GRADIENT: tl.constexpr, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    """One row. COUNT: its log-sum-exp and target's logit, from these columns; GRADIENT: in place, from the statistics of all."""
    row = tl.program_id(0).to(tl.int64)
    LOGITS += row * stride
    target = tl.load(TARGETS + row)
    counted = target != IGNORE
    column = target - start
    here = counted & (column >= 0) & (column < columns)
    if COUNT:
        top, total = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(LOGITS + at, at < columns, -float("inf")).to(tl.float32)
            new = tl.maximum(top, x)
            base = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(top - base) + tl.exp(x - base)
            top = new
        largest = tl.max(top, 0)
        base = tl.where(largest == -float("inf"), 0.0, largest)  # a rank that has nothing but padding
        total = tl.sum(total * tl.exp(top - base), 0)
        picked = tl.load(LOGITS + column, here, 0.0).to(tl.float32)
        tl.store(LSE + row, base + tl.log(total))
        tl.store(PICKED + row, picked)
    else:
        base, total = tl.load(LSE + row), 1.0
    if GRADIENT:
        scale = tl.where(counted, tl.load(SCALE), 0.0)
        for first in range(0, stride, BLOCK):  # padding's gradient is 0
            at = first + tl.arange(0, BLOCK)
            x = tl.load(LOGITS + at, at < columns, -float("inf")).to(tl.float32)
            p = tl.where(at < columns, tl.exp(x - base) / total, 0.0) - tl.where(at == column, 1.0, 0.0)
            tl.store(LOGITS + at, (p * scale).to(LOGITS.dtype.element_ty), at < stride)


def launch(logits: Tensor, targets: Tensor, scale: Tensor | float, vocab: int, start: int, merge) -> Tensor:
    """What block_loss returns and leaves in `logits` [r, v], contiguous."""
    rows, stride = logits.shape
    scale = scale.float() if isinstance(scale, Tensor) else torch.full((), scale, device=logits.device)  # no copy from the host
    lse, picked = (scale.new_empty(rows) for _ in "lp")

    def kernel(count: bool, gradient: bool) -> None:
        softmax_kernel[(rows,)](logits, targets, scale, lse, picked, stride, min(stride, max(0, vocab - start)), start,
                                COUNT=count, GRADIENT=gradient, IGNORE=IGNORE, BLOCK=COLUMNS, num_warps=WARPS)
    kernel(True, merge is None)
    if merge is not None:
        lse, picked = (t.contiguous() for t in merge(lse, picked))
        kernel(False, True)
    return (lse - picked).where(targets != IGNORE, 0.0)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, scale, vocab, start, merge, chunk, learn):
        loss = hidden.new_zeros((), dtype=wide(hidden.dtype))
        dh = torch.empty_like(hidden) if learn else None
        dw = None
        triton = fits("cross entropy", hidden, weight)
        logits = hidden.new_empty(chunk, weight.shape[0])
        step = max(1, BLOCK // weight.shape[0])
        for first in range(0, hidden.shape[0], chunk):
            h, y = hidden[first:first + chunk], targets[first:first + chunk]
            grad = torch.mm(h, weight.t(), out=logits[:len(h)])
            if triton:
                losses = launch(grad, y, scale, vocab, start, merge)
            else:
                losses = torch.cat([block_loss(grad[i:i + step], y[i:i + step], scale, vocab, start, merge) for i in range(0, len(h), step)])
            loss += scale * losses.sum()
            if learn:
                torch.mm(grad, weight, out=dh[first:first + chunk])
                part = give(weight, lambda into: add_wgrad(into, grad, h))
                dw = part if dw is None else dw + part
        ctx.save_for_backward(dh, dw)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        # The loss is the end of the graph: its own gradient is 1 and the scale was applied above. A weight whose gradient
        # went to main_grad could not be scaled any more, so only the plain-tensor form honours another value.
        dh, dw = ctx.saved_tensors
        return dh * dloss.to(dh.dtype), None if dw is None else dw * dloss.to(dw.dtype), *[None] * 7
