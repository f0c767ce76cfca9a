"""AdamW (arXiv 1711.05101) over a flat range of elements, with gradient clipping, so gradients are read once.

On a GPU a range is one launch. It reads four tensors, writes three and the copy in the compute dtype, and
never syncs with the host.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import triton_
from kernels.rounding import ElementIndex, place_bits, round_to_bf16, stochastic_round
from kernels.tiles import block_range, load_fp32
from kernels.triton_ import ceil_div, kernel_is_available, tl, triton

BLOCK = 1 << 19  # elements: five fp32 tensors that stay in a CPU's cache across the operations on them

# elements of a GPU program: a thread accesses each tensor twice, 128 bits at a time
GPU_BLOCK = 1024
WARPS = 4


@dataclass(frozen=True)
class AdamWStep:
    """Hyperparameters and scalars of one update.

    step is the number of the update, from 1.
    grad_scale is a scalar on the device that multiplies the gradients (clipping).
    is_good is a bool scalar on the device. If False, nothing changes (a skipped step).
    """
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: Tensor
    is_good: Tensor


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: AdamWStep,
    *,
    weight_copy: Tensor | None = None,
    element_index: ElementIndex | None = None,
) -> None:
    """Run one update in place. All tensors are flat [n], in fp32 or fp64.

    weight_copy is the copy of `param` in the compute dtype, which is written too (bf16 training).
    element_index gives the positions of the elements, and is set if param, exp_avg and exp_avg_sq are in
    bf16. The update is then computed in the dtype of grad, and the state is rounded stochastically.

    Equals torch.optim.AdamW: bias correction, eps outside of the root, weight decay before the update.
    """
    state = param, grad, exp_avg, exp_avg_sq
    if element_index is None and param.device.type == "cpu" and "cpu" not in triton_.DEVICES:
        adamw_cpu(*state, numbers, weight_copy)
    elif kernel_is_available("AdamW", *state, weight_copy):
        launch_adamw(*state, numbers, weight_copy, element_index)
    elif element_index is not None:
        adamw_bf16_states(*state, numbers, weight_copy, element_index)
    else:
        adamw_reference(*state, numbers)
        if weight_copy is not None:
            weight_copy.copy_(param)


def adamw_cpu(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: AdamWStep,
    weight_copy: Tensor | None,
) -> None:
    """torch's one-pass AdamW, block by block, so that the clipped gradient and the copy stay in the cache.

    Calls the function that torch.optim wraps: the wrapper's overhead per call took a third of the time.
    """
    if not numbers.is_good:
        return
    needs_scale = bool(numbers.grad_scale != 1)
    step_count = [torch.tensor(float(numbers.step))]

    for start in range(0, param.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        block_grad = grad[block] * numbers.grad_scale if needs_scale else grad[block]
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]  # missing in torch's stubs
            [param[block]], [block_grad], [exp_avg[block]], [exp_avg_sq[block]], [], step_count,
            amsgrad=False,
            maximize=False,
            lr=numbers.lr,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            eps=numbers.eps,
            weight_decay=numbers.weight_decay,
        )
        if weight_copy is not None:
            weight_copy[block] = param[block]


def adamw_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamWStep
) -> None:
    """Reference implementation, without a host sync."""
    beta1, beta2 = numbers.beta1, numbers.beta2
    grad = torch.where(numbers.is_good, grad * numbers.grad_scale, 0.0)
    update = numbers.is_good.to(grad.dtype)  # 1, or 0, which makes every coefficient below the identity's

    exp_avg.lerp_(grad, (1 - beta1) * update)
    exp_avg_sq.lerp_(grad.square_(), (1 - beta2) * update)

    root = (exp_avg_sq / (1 - beta2**numbers.step)).sqrt_().add_(numbers.eps)
    change = (exp_avg / root).mul_(update * (numbers.lr / (1 - beta1**numbers.step)))
    param.mul_(1 - numbers.lr * numbers.weight_decay * update).sub_(change)


def adamw_bf16_states(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: AdamWStep,
    weight_copy: Tensor | None,
    element_index: ElementIndex,
) -> None:
    """Reference implementation with states in bf16, block by block.

    One hash of an element holds the 16 random bits for each of the three.
    """
    states = param, exp_avg, exp_avg_sq
    for start in range(0, param.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        block_grad = grad[block]
        wide_param, wide_exp_avg, wide_exp_avg_sq = (state[block].to(grad.dtype) for state in states)
        adamw_reference(wide_param, block_grad, wide_exp_avg, wide_exp_avg_sq, numbers)

        bits = element_index.bits(start, len(block_grad), grad.device)
        param[block] = stochastic_round(wide_param, bits)
        exp_avg[block] = stochastic_round(wide_exp_avg, bits >> 16)
        exp_avg_sq[block] = stochastic_round(wide_exp_avg_sq, bits >> 32)
        if weight_copy is not None:
            weight_copy[block] = param[block]


# ---- Triton ----------------------------------------------------------------------------------------------

@triton.jit
def adamw_kernel(
    PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, WEIGHT_COPY, GRAD_SCALE, IS_FINITE, n,
    one_minus_beta1, one_minus_beta2, bias_correction1, bias_correction2, lr, shrink, eps,
    salt, base, width, stride, skip,
    COPY: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update BLOCK of the n elements.

    shrink is 1 - lr * weight decay. salt .. skip are those of an ElementIndex.
    COPY: write WEIGHT_COPY. ROUND: the states are in bf16. ROWS: see place_bits.
    """
    if tl.load(IS_FINITE):
        # moving averages
        index = block_range(tl.program_id(0).to(tl.int64), BLOCK)
        inside = index < n
        grad = load_fp32(GRAD + index, inside, other=None) * tl.load(GRAD_SCALE).to(tl.float32)
        exp_avg = load_fp32(EXP_AVG + index, inside, other=None)
        exp_avg_sq = load_fp32(EXP_AVG_SQ + index, inside, other=None)
        exp_avg += one_minus_beta1 * (grad - exp_avg)
        exp_avg_sq += one_minus_beta2 * (grad * grad - exp_avg_sq)

        if ROUND:
            bits = place_bits(index, salt, base, width, stride, skip, ROWS)
            tl.store(EXP_AVG + index, round_to_bf16(exp_avg, bits >> 16), inside)
            tl.store(EXP_AVG_SQ + index, round_to_bf16(exp_avg_sq, bits >> 32), inside)
        else:
            tl.store(EXP_AVG + index, exp_avg, inside)
            tl.store(EXP_AVG_SQ + index, exp_avg_sq, inside)

        # parameters
        param = load_fp32(PARAM + index, inside, other=None)
        root = tl.sqrt(exp_avg_sq / bias_correction2) + eps
        param = param * shrink - lr * (exp_avg / bias_correction1) / root
        if ROUND:
            param = round_to_bf16(param, bits)
        tl.store(PARAM + index, param, inside)
        if COPY:
            tl.store(WEIGHT_COPY + index, param, inside)


def launch_adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: AdamWStep,
    weight_copy: Tensor | None,
    element_index: ElementIndex | None = None,
) -> None:
    """Run adamw_reference, or adamw_bf16_states given an element_index, as one kernel."""
    n = param.numel()
    if n == 0:
        return
    beta1, beta2 = numbers.beta1, numbers.beta2
    place = element_index or ElementIndex(0, 0, 1, 1)
    adamw_kernel[(ceil_div(n, GPU_BLOCK),)](
        param, grad, exp_avg, exp_avg_sq,
        param if weight_copy is None else weight_copy,  # not written without a copy
        numbers.grad_scale, numbers.is_good, n,
        one_minus_beta1=1 - beta1,
        one_minus_beta2=1 - beta2,
        bias_correction1=1 - beta1**numbers.step,
        bias_correction2=1 - beta2**numbers.step,
        lr=numbers.lr,
        shrink=1 - numbers.lr * numbers.weight_decay,
        eps=numbers.eps,
        salt=place.salt,
        base=place.base,
        width=place.width,
        stride=place.stride,
        skip=place.skip,
        COPY=weight_copy is not None,
        ROUND=element_index is not None,
        ROWS=place.width != place.stride,
        BLOCK=GPU_BLOCK,
        num_warps=WARPS,
    )
