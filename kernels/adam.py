"""AdamW (arXiv 1711.05101) over one flat run of elements; the clip factor rides along, so gradients are read once.

On a GPU a run is one launch: four streams read, three written and the low copy, nothing read back to the host.
"""
import torch
from torch import Tensor

from kernels import triton_
from kernels.rounding import Place, place_bits, round_to_bf16, rounded
from kernels.triton_ import ceil_div, fits, tl, triton

BLOCK = 1 << 19  # elements: five streams of fp32 that stay in a CPU's cache between the operations on them

GPU_BLOCK, WARPS = 1024, 4  # elements a program: two 128-bit accesses a thread and stream


def adamw(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, lr: float, beta1: float, beta2: float, eps: float,
          decay: float, step: int, factor: Tensor, ok: Tensor, low: Tensor | None = None, place: Place | None = None) -> None:
    """One update in place. All flat [n] in fp32 or fp64; grad is multiplied by `factor` (a device scalar: clipping).

    step counts updates from 1. ok: False on the device leaves everything as it is (a skipped step, even with NaN in grad).
    low: the compute-dtype copy of `param`, written too (bf16 training).
    place: param, m and v are bf16, and rounded stochastically after an update in grad's dtype; where their elements lie.
    Matches torch.optim.AdamW: bias-corrected moments, eps outside the root, decay before the update.
    """
    if place is None and param.device.type == "cpu" and "cpu" not in triton_.DEVICES:
        return on_cpu(param, grad, m, v, lr, beta1, beta2, eps, decay, step, factor, ok, low)
    if fits("AdamW", param, grad, m, v, low):
        return launch(param, grad, m, v, lr, beta1, beta2, eps, decay, step, factor, ok, low, place)
    if place is not None:
        return narrow(param, grad, m, v, lr, beta1, beta2, eps, decay, step, factor, ok, low, place)
    reference(param, grad, m, v, lr, beta1, beta2, eps, decay, step, factor, ok)
    if low is not None:
        low.copy_(param)


def on_cpu(param, grad, m, v, lr, beta1, beta2, eps, decay, step, factor, ok, low) -> None:
    """torch's one-pass AdamW, block by block: the clipped gradient and the low copy never leave the cache in between. Called as
    torch.optim calls it: what it does around each call took a third of the time."""
    if not ok:
        return
    clip, count = bool(factor != 1), [torch.tensor(float(step))]
    for at in range(0, param.numel(), BLOCK):
        p, g, a, b = (t[at:at + BLOCK] for t in (param, grad, m, v))
        torch._fused_adamw_([p], [g * factor if clip else g], [a], [b], [], count, amsgrad=False, maximize=False, lr=lr, beta1=beta1,
                            beta2=beta2, eps=eps, weight_decay=decay)
        if low is not None:
            low[at:at + BLOCK] = p


def reference(param, grad, m, v, lr, beta1, beta2, eps, decay, step, factor, ok) -> None:
    """The definition, without a host sync."""
    grad = torch.where(ok, grad * factor, 0.0)
    keep = ok.to(grad.dtype)  # 1: an update; 0: every coefficient below becomes the identity
    m.lerp_(grad, (1 - beta1) * keep)
    v.lerp_(grad.square_(), (1 - beta2) * keep)
    root = (v / (1 - beta2**step)).sqrt_().add_(eps)
    param.mul_(1 - lr * decay * keep).sub_((m / root).mul_(keep * (lr / (1 - beta1**step))))


def narrow(param, grad, m, v, lr, beta1, beta2, eps, decay, step, factor, ok, low, place) -> None:
    """The definition with states in bf16, block by block: one hash an element has the 16 bits for each of the three."""
    for at in range(0, param.numel(), BLOCK):
        cut = slice(at, at + BLOCK)
        wide = [t[cut].to(grad.dtype) for t in (param, m, v)]
        reference(wide[0], grad[cut], *wide[1:], lr, beta1, beta2, eps, decay, step, factor, ok)
        bits = place.bits(at, len(wide[0]), grad.device)
        for i, t in enumerate((param, m, v)):
            t[cut] = rounded(wide[i], bits >> 16 * i)
        if low is not None:
            low[cut] = param[cut]


# ---- Triton ------------------------------------------------------------------------------------------------------------------

@triton.jit
def adamw_kernel(PARAM, GRAD, M, V, LOW, FACTOR, OK, n, keep1, keep2, bias1, bias2, lr, shrink, eps, salt, base, width, stride, skip,
                 COPY: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(OK):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(GRAD + at, inside).to(tl.float32) * tl.load(FACTOR).to(tl.float32)
        m, v = tl.load(M + at, inside).to(tl.float32), tl.load(V + at, inside).to(tl.float32)
        m += keep1 * (g - m)
        v += keep2 * (g * g - v)
        if ROUND:
            bits = place_bits(at, salt, base, width, stride, skip, ROWS)
            tl.store(M + at, round_to_bf16(m, bits >> 16), inside)
            tl.store(V + at, round_to_bf16(v, bits >> 32), inside)
        else:
            tl.store(M + at, m, inside)
            tl.store(V + at, v, inside)
        p = tl.load(PARAM + at, inside).to(tl.float32) * shrink - lr * (m / bias1) / (tl.sqrt(v / bias2) + eps)
        if ROUND:
            p = round_to_bf16(p, bits)
        tl.store(PARAM + at, p, inside)
        if COPY:
            tl.store(LOW + at, p.to(LOW.dtype.element_ty), inside)


def launch(param, grad, m, v, lr, beta1, beta2, eps, decay, step, factor, ok, low, place=None) -> None:
    n, x = param.numel(), place or Place(0, 0, 1, 1)
    if n:
        adamw_kernel[(ceil_div(n, GPU_BLOCK),)](
            param, grad, m, v, param if low is None else low, factor, ok, n, 1 - beta1, 1 - beta2, 1 - beta1**step, 1 - beta2**step,
            lr, 1 - lr * decay, eps, x.salt, x.base, x.width, x.stride, x.skip, COPY=low is not None, ROUND=place is not None,
            ROWS=x.width != x.stride, BLOCK=GPU_BLOCK, num_warps=WARPS)
