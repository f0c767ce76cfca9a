"""Recompute stateful layers by segments: run a function over one segment of tokens after the other.

Only the inputs of a segment and the state before it are saved; the backward recomputes the rest of the
segment (arXiv 1604.06174). So a sequence keeps its inputs and a few states, whatever the function allocates
while it runs.
"""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# step(state, part of each tensor) -> (output of the segment, or None; state after it)
Step = Callable[[Tensor, Sequence[Tensor | None]], tuple[Tensor | None, Tensor]]


def scan_segments(
    step: Step, state: Tensor, tensors: Sequence[Tensor | None], length: int
) -> tuple[Tensor | None, Tensor]:
    """Run all segments of `length` tokens in order: (outputs [b, s, ...], or None; the last state).

    tensors [b, s, ...] or None are the inputs of the step, which gets one segment at a time. Gradients flow
    to `state` and to floating-point tensors. A step must not read any other tensor that requires a gradient.
    """
    out, state = _Segments.apply(step, length, state, *tensors)
    return out, state


def split_segments(
    tensors: Sequence[Tensor | None], length: int, number: int
) -> list[tuple[Tensor | None, ...]]:
    """Return each segment's part of all tensors, as views."""
    parts = [[None] * number if tensor is None else tensor.split(length, 1) for tensor in tensors]
    return list(zip(*parts, strict=True))


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, step: Step, length: int, state: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        s = next(tensor.shape[1] for tensor in tensors if tensor is not None)
        number = -(-s // length)
        outputs: list[Tensor] = []
        starts: list[Tensor] = []
        for parts in split_segments(tensors, length, number):
            starts.append(state)
            out, state = step(state, parts)
            if out is not None:
                outputs.append(out)

        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*starts, *tensors)
        ctx.step = step
        ctx.length = length
        ctx.number = number
        ctx.set_materialize_grads(False)
        return torch.cat(outputs, 1) if outputs else None, state

    @staticmethod
    def backward(ctx, dout: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # only once: activation checkpointing allows no second access
        starts, tensors = saved[:ctx.number], saved[ctx.number:]
        needed = ctx.needs_input_grad[3:]
        gradients = [torch.empty_like(x) if needs else None for x, needs in zip(tensors, needed)]
        segments = zip(
            starts,
            split_segments(tensors, ctx.length, ctx.number),
            split_segments((dout,), ctx.length, ctx.number),
            split_segments(gradients, ctx.length, ctx.number),
        )
        for start, parts, (dout_part,), into in reversed(list(segments)):
            # recompute the segment
            with torch.enable_grad():
                start = start.detach().requires_grad_()
                parts = [x.detach().requires_grad_() if needs else x for x, needs in zip(parts, needed)]
                results = ctx.step(start, parts)

            # backpropagate through it
            read = [result for result, dresult in zip(results, (dout_part, dstate)) if dresult is not None]
            dread = [dresult for dresult in (dout_part, dstate) if dresult is not None]
            leaves = [start, *(x for x, needs in zip(parts, needed) if needs)]
            found: Sequence[Tensor | None] = [None] * len(leaves)
            if read:
                found = torch.autograd.grad(read, leaves, dread, allow_unused=True)
            dstate = found[0]
            for target, gradient in zip((x for x in into if x is not None), found[1:]):
                target.zero_() if gradient is None else target.copy_(gradient)
        return None, None, dstate if ctx.needs_input_grad[2] else None, *gradients
