"""Fused output head and cross entropy: logits exist for one chunk of rows at a time, and are never saved.

The forward computes both gradients while the logits of a chunk exist (as in Liger-Kernel and arXiv
2411.09009), so the backward needs no second GEMM over the vocabulary. The weight's gradient is therefore
complete when the forward returns: the output head leaves no work for the W step of a pipeline schedule.

On a CPU a chunk has as many rows as fill CHUNK_BYTES in the compute dtype, and takes three GEMMs. Within it,
SOFTMAX_ELEMENTS at a time go through the softmax in fp32 while they are in cache, and the gradient replaces
the logits in place. On a GPU a chunk is larger, for its GEMMs, and one kernel computes statistics and
gradient of a row. If ranks share the vocabulary, two kernels are needed.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.grad import accumulate_grad, accumulates, accumulation_dtype
from kernels.linear import write_wgrad
from kernels.tiles import load_fp32
from kernels.triton_ import kernel_is_available, tl, triton

# (lse, target_logit), both [rows] of this rank's columns -> the same over all ranks that share the vocabulary
Merge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# (logits [r, v], which rows [t] they are) -> the loss of each row [r]; the logits become their gradient
RowLosses = Callable[[Tensor, slice], Tensor]

IGNORE_INDEX = -100  # target of tokens that do not count
CHUNK_BYTES = 1 << 25  # the largest size that glibc reuses without new pages (its largest mmap threshold)
SOFTMAX_ELEMENTS = 1 << 21  # logits that the CPU converts to fp32 at a time
GPU_CHUNK_BYTES = 1 << 30  # 4,096 rows of 128k logits in bf16: each chunk reads and writes all of dW
GPU_CHUNK_SHARE = 64  # a chunk takes at most 1 / GPU_CHUNK_SHARE of the GPU's memory
COLUMNS, WARPS = 8192, 16  # columns of a row that a program reads at a time, and its warps


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor | float,
    vocab: int,
    *,
    start: int = 0,
    merge: Merge | None = None,
    cap: float | None = None,
    chunk: int | None = None,
    losses_of_rows: RowLosses | None = None,
) -> Tensor:
    """scale * sum over counted tokens of (logsumexp(logits) - logits[target]): a scalar, in fp32 or better.

    hidden is [t, d]; weight [v, d] holds rows start .. start + v - 1 of the padded vocabulary.
    targets [t] are IGNORE_INDEX for tokens that do not count.
    vocab: rows of the vocabulary from here on are padding, with probability 0.
    merge combines the statistics of a sharded vocabulary; None if this rank has all of it.
    cap bounds the logits, if set: cap tanh(logit / cap) (Gemma 2, arXiv 2408.00118).
    chunk is the number of rows at a time, by default as many as fill chunk_bytes.
    losses_of_rows computes another loss of the logits, which replaces the cross entropy.
    """
    if not chunk:
        chunk = max(1, chunk_bytes(hidden.device) // (weight.shape[0] * weight.element_size()))
    rows = max(1, hidden.shape[0])  # a microbatch may have no rows here
    count = -(-rows // chunk)
    even_chunk = -(-rows // count)  # equally sized chunks, none of them short
    return _LinearCrossEntropy.apply(
        hidden, weight, targets, scale, vocab, start, merge, cap, even_chunk, torch.is_grad_enabled(),
        losses_of_rows)


def chunk_bytes(device: torch.device) -> int:
    """Return the bytes of logits that exist at a time."""
    if device.type == "cpu":
        return CHUNK_BYTES
    if device.type != "cuda":
        return GPU_CHUNK_BYTES
    return min(GPU_CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // GPU_CHUNK_SHARE)


def softmax_cross_entropy_block(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor | float,
    vocab: int,
    start: int,
    merge: Merge | None,
    cap: float | None = None,
) -> Tensor:
    """Return the loss of each row [r], 0 if it does not count. In plain torch.

    logits [r, v] become their gradient: scale * (softmax - one-hot), 0 if the row does not count.
    """
    values = logits.to(accumulation_dtype(logits.dtype))
    slope = None  # of the capped logits
    if cap is not None:
        values = capped(values, cap)
        slope = 1 - (values / cap).square()
    if start + values.shape[1] > vocab:
        values[:, max(vocab - start, 0):] = float("-inf")

    counted = targets != IGNORE_INDEX
    column = targets - start
    is_here = counted & (column >= 0) & (column < values.shape[1])
    column = column.clamp(0, values.shape[1] - 1)[:, None]
    target_logit = values.gather(1, column)[:, 0].where(is_here, 0.0)

    if start >= vocab:  # only padding, for which no softmax is defined
        probs, local_lse = torch.zeros_like(values), values[:, 0].clone()
    else:
        probs = torch.softmax(values, 1)
        # the largest probability is exp(largest logit - lse), and never underflows
        local_lse = values.amax(1) - probs.amax(1).log()
    lse = local_lse
    if merge is not None:
        lse, target_logit = merge(local_lse, target_logit)
        probs.mul_((local_lse - lse).exp_()[:, None])

    probs.scatter_add_(1, column, -is_here.to(probs.dtype)[:, None])
    probs.mul_((counted * scale)[:, None])
    if slope is not None:
        probs.mul_(slope)
    logits.copy_(probs)
    return (lse - target_logit).where(counted, 0.0)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap tanh(logits / cap), or the logits unchanged without a cap."""
    return logits if cap is None else torch.tanh(logits / cap).mul_(cap)


# ---- Triton ------------------------------------------------------------------------------------------------

@triton.jit
def load_logits(LOGITS, column, columns, CAP: tl.constexpr):
    """Load logits [BLOCK] of one row in fp32, -inf in the padding. CAP bounds them, or is None."""
    x = load_fp32(LOGITS + column, column < columns, -float("inf"))
    if CAP is not None:
        x = tl.where(column < columns, bounded(x, CAP=CAP), -float("inf"))
    return x


@triton.jit
def bounded(x, CAP: tl.constexpr):
    """CAP tanh(x / CAP)."""
    return CAP * (2 * tl.sigmoid(2 * x / CAP) - 1)


@triton.jit
def online_softmax(
    LOGITS, columns, BLOCK: tl.constexpr, CAP: tl.constexpr
) -> "tuple[tl.tensor, tl.tensor]":
    """Return (base, total): a row's probabilities are exp(logits - base) / total (arXiv 1805.02867)."""
    # each lane of a block has a separate maximum and sum
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        x = load_logits(LOGITS, first + tl.arange(0, BLOCK), columns, CAP=CAP)
        new_largest = tl.maximum(largest, x)
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        total = total * tl.exp(largest - base) + tl.exp(x - base)
        largest = new_largest

    # reduce them over the row
    row_largest = tl.max(largest, 0)
    base = tl.where(row_largest == -float("inf"), 0.0, row_largest)  # a rank may hold only padding
    total = tl.sum(total * tl.exp(largest - base), 0)
    return base, total


@triton.jit
def softmax_kernel(
    LOGITS, TARGETS, SCALE, LSE, TARGET_LOGIT, stride, columns, start,
    STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    IGNORE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
):
    """Process one row of `stride` logits; the first `columns` are not padding.

    STATISTICS: compute logsumexp and the target's logit over these columns; else read those over all ranks.
    GRADIENT: replace the logits with their gradient, from these statistics.
    """
    row = tl.program_id(0).to(tl.int64)
    LOGITS += row * stride
    target = tl.load(TARGETS + row)
    counted = target != IGNORE
    target_column = target - start
    is_here = counted & (target_column >= 0) & (target_column < columns)

    if STATISTICS:
        base, total = online_softmax(LOGITS, columns, BLOCK, CAP=CAP)
        target_logit = load_fp32(LOGITS + target_column, is_here)
        if CAP is not None:
            target_logit = bounded(target_logit, CAP=CAP)
        tl.store(LSE + row, base + tl.log(total))
        tl.store(TARGET_LOGIT + row, target_logit)
    else:
        base = tl.load(LSE + row)
        total = 1.0

    if GRADIENT:
        scale = tl.where(counted, tl.load(SCALE), 0.0)
        for first in range(0, stride, BLOCK):  # including the padding, whose gradient is 0
            column = first + tl.arange(0, BLOCK)
            x = load_logits(LOGITS, column, columns, CAP=CAP)
            probs = tl.where(column < columns, tl.exp(x - base) / total, 0.0)
            dx = probs - tl.where(column == target_column, 1.0, 0.0)
            if CAP is not None:
                dx = tl.where(column < columns, dx * (1 - (x / CAP) * (x / CAP)), 0.0)
            dx = (dx * scale).to(LOGITS.dtype.element_ty)
            tl.store(LOGITS + column, dx, column < stride)


def launch_softmax(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor | float,
    vocab: int,
    start: int,
    merge: Merge | None,
    cap: float | None = None,
) -> Tensor:
    """Run softmax_cross_entropy_block as one kernel, or two with `merge`. logits [r, v], contiguous."""
    rows, stride = logits.shape
    columns = min(stride, max(0, vocab - start))
    if isinstance(scale, Tensor):
        scale = scale.float()
    else:
        scale = torch.full((), scale, device=logits.device)  # no copy from the host
    lse = scale.new_empty(rows)
    target_logit = scale.new_empty(rows)

    def launch(statistics: bool, gradient: bool) -> None:
        softmax_kernel[(rows,)](
            logits, targets, scale, lse, target_logit, stride, columns, start,
            STATISTICS=statistics,
            GRADIENT=gradient,
            IGNORE=IGNORE_INDEX,
            BLOCK=COLUMNS,
            CAP=cap,
            num_warps=WARPS,
        )

    launch(statistics=True, gradient=merge is None)
    if merge is not None:
        lse, target_logit = (x.contiguous() for x in merge(lse, target_logit))
        launch(statistics=False, gradient=True)
    return (lse - target_logit).where(targets != IGNORE_INDEX, 0.0)


# ---- autograd ----------------------------------------------------------------------------------------------

class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor | float,
        vocab: int,
        start: int,
        merge: Merge | None,
        cap: float | None,
        chunk: int,
        needs_grad: bool,
        losses_of_rows: RowLosses | None,
    ) -> Tensor:
        loss = hidden.new_zeros((), dtype=accumulation_dtype(hidden.dtype))
        dhidden = torch.empty_like(hidden) if needs_grad else None
        dweight = None  # stays None if the weight has a gradient buffer
        has_kernel = kernel_is_available("cross entropy", hidden, weight)
        logits_buffer = hidden.new_empty(chunk, weight.shape[0])
        softmax_rows = max(1, SOFTMAX_ELEMENTS // weight.shape[0])

        for first in range(0, hidden.shape[0], chunk):
            # loss of the chunk
            rows = slice(first, first + chunk)
            row_hidden = hidden[rows]  # [r, d]
            row_targets = targets[rows]  # [r]
            logits = torch.mm(row_hidden, weight.t(), out=logits_buffer[:len(row_hidden)])  # [r, v]
            if losses_of_rows is not None:
                losses = losses_of_rows(logits, rows)
            elif has_kernel:
                losses = launch_softmax(logits, row_targets, scale, vocab, start, merge, cap)
            else:
                block_losses: list[Tensor] = []
                for block in zip(logits.split(softmax_rows), row_targets.split(softmax_rows)):
                    block_losses.append(softmax_cross_entropy_block(*block, scale, vocab, start, merge, cap))
                losses = torch.cat(block_losses)
            loss += scale * losses.sum()

            # gradients of the chunk
            if dhidden is not None:
                dlogits = logits  # the softmax replaced them
                torch.mm(dlogits, weight, out=dhidden[rows])
                part = accumulate_grad(weight, lambda into, add: write_wgrad(into, dlogits, row_hidden, add))
                if part is not None:
                    dweight = part if dweight is None else dweight + part

        if needs_grad and not len(hidden) and not accumulates(weight):  # no chunk has set it
            dweight = torch.zeros_like(weight)
        ctx.save_for_backward(dhidden, dweight)
        return loss

    @staticmethod
    def backward(ctx, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # The loss ends the graph: dloss is 1, and the forward applied the scale. A gradient that is already
        # in main_grad could not be rescaled, so only plain tensors support another dloss.
        dhidden, dweight = ctx.saved_tensors
        dhidden = dhidden * dloss.to(dhidden.dtype)
        if dweight is not None:
            dweight = dweight * dloss.to(dweight.dtype)
        return dhidden, dweight, *[None] * 9
