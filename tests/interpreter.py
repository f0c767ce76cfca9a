"""Triton's CPU interpreter, repaired; importing this is enough. tests/kernels/test_interpreter.py proves the
repair.

Four defects of triton 3.6 and 3.7, each silent or fatal: - numpy >= 2.4 makes no int of an array of one
element: every loop with a run-time bound died; - bf16 is kept as uint16, and arithmetic, comparisons and
tl.dot worked on those bits as on integers; - fp32 -> bf16 cut the low bits off, and casts to fp8 rounded
halves up: both round to nearest even on a GPU; - a Python scalar beside a bf16 tensor found no builder.
"""

from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
TORCH = {
    tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
}  # no numpy dtype
BITS = {torch.bfloat16: np.uint16, torch.float8_e4m3fn: np.uint8, torch.float8_e5m2: np.uint8}


def narrow(handle):
    return handle.dtype.scalar in TORCH


def widened(handle):
    """The values, as fp32 where numpy has no such dtype."""
    if not narrow(handle):
        return handle
    dtype = TORCH[handle.dtype.scalar]
    values = torch.from_numpy(np.array(handle.data)).view(dtype).float().numpy()
    return Handle(values, tl.float32)


def narrowed(values, dtype):
    """fp32 values -> a handle of `dtype`, rounded as torch rounds: to nearest even."""
    there = torch.from_numpy(np.array(values, dtype=np.float32)).to(TORCH[dtype])
    return Handle(
        there.view(torch.uint8 if there.itemsize == 1 else torch.uint16).numpy().view(BITS[TORCH[dtype]]),
        dtype,
    )


def patch():
    cast, to_float, binary, unary, ternary, dot = (
        getattr(Builder, name)
        for name in ("cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "ternary_op", "create_dot")
    )
    patch_tensor = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def cast_impl(self, src, dst_type, rounding=None):
        dst = dst_type.scalar
        if not narrow(src) and dst not in TORCH:
            return cast(self, src, dst_type) if rounding is None else to_float(self, src, dst_type, rounding)
        wide = widened(src)
        return (
            narrowed(wide.data, dst)
            if dst in TORCH
            else Handle(wide.data.astype(interpreter._get_np_dtype(dst)), dst)
        )

    def back(result, like):
        return (
            narrowed(result.data, like.dtype.scalar) if narrow(like) and result.data.dtype != bool else result
        )

    def select(self, cond, a, b):  # bits in, bits out
        return Handle(np.where(cond.data, a.data, b.data), b.dtype.scalar)

    interpreter._patch_lang_tensor = with_index
    Builder.get_bf16 = lambda self, value: narrowed([value], tl.bfloat16)
    Builder.cast_impl = cast_impl
    Builder.create_fp_to_fp = cast_impl
    Builder.binary_op = lambda self, a, b, op: back(binary(self, widened(a), widened(b), op), a)
    Builder.unary_op = lambda self, a, op: back(unary(self, widened(a), op), a)
    Builder.ternary_op = lambda self, a, b, c, op: back(
        ternary(self, widened(a), widened(b), widened(c), op), c
    )
    Builder.create_select = select
    Builder.create_fma = lambda self, a, b, c: back(
        Handle(widened(a).data * widened(b).data + widened(c).data, tl.float32)
        if narrow(c)
        else Handle(a.data * b.data + c.data, c.dtype.scalar),
        c,
    )
    total = interpreter.ReduceOps.sum

    def sum_(self, value):
        assert not narrow(value.handle), "sum bf16 as fp32: the interpreter adds its bits"
        return total(self, value)

    interpreter.ReduceOps.sum = sum_
    Builder.create_dot = lambda self, a, b, d, *how: dot(self, widened(a), widened(b), d, *how)


def once():
    """The language is patched for good: the interpreter patched it for every call of every helper, most of a
    kernel's time.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


patch()
once()
np.seterr(
    divide="ignore", invalid="ignore", over="ignore"
)  # kernels take log(0), inf - inf and exp(200), and select something else, as on a GPU
