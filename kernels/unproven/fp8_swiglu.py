"""kernels/swiglu.py with a result, and a gradient, that are left to the fp8 linears that read them: the
formulas `swiglu` and `swiglu_backward`."""
import torch
from torch import Tensor

from kernels.fp8 import GROUP_KINDS
from kernels.swiglu import swiglu as written_swiglu
from kernels.triton_ import kernels_run_on
from kernels.unproven.fp8_origin import Origin, Reader, deferred_tensor


def swiglu(gate_up: Tensor, compiled: bool = False, *, reader: Reader) -> Tensor:
    """kernels.swiglu.swiglu, whose result `reader` computes, if there are kernels for it.

    A similar linear produced gate_up, and is the sole consumer of its gradient: it computes that.
    """
    if kernels_run_on(gate_up.device) and reader.takes(gate_up) and halves_are_apart(gate_up, reader):
        return _DeferredSwiGLU.apply(gate_up)
    return written_swiglu(gate_up, compiled)


def halves_are_apart(gate_up: Tensor, reader: Reader) -> bool:
    """Whether no group of columns that share a scale contains elements of both gate and up."""
    return reader.kind not in GROUP_KINDS or gate_up.shape[-1] // 2 % reader.side == 0


class _DeferredSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        f = gate_up.shape[-1] // 2
        origin = Origin("swiglu", (gate_up.numel() // (2 * f), f), (gate_up,))
        return deferred_tensor(origin, (*gate_up.shape[:-1], f), like=gate_up)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        width = gate_up.shape[-1]
        operands = gate_up, dy.contiguous()
        origin = Origin("swiglu_backward", (gate_up.numel() // width, width), operands)
        return deferred_tensor(origin, gate_up.shape, like=gate_up)
