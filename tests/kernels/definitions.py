"""A function of ours beside its definition in fp64: its outputs, and the gradients of its inputs."""

import torch


def gradients(outputs, leaves, dys):
    """The outputs, then the gradients of the leaves."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return *outputs, *torch.autograd.grad(outputs, leaves, [dy.to(y.dtype) for dy, y in zip(dys, outputs)])


def check(ours, definition, leaves, bound, dys=None, least=0.0):
    """||ours - definition|| <= bound ||definition|| for each output of ours(*leaves) and each gradient.

    Each has the dtype and the shape of its leaf, outputs the dtype of the first leaf. dys: gradients of the
    outputs, else random ones of their dtypes. least: of ||definition||. Returns our outputs.
    """
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, want = ours(*leaves), definition(*exact)
    outputs = got if isinstance(got, tuple) else (got,)
    if dys is None:
        dys = [torch.randn_like(y) for y in outputs]
    exact_dys = [dy.double() for dy in dys]
    found, wanted = gradients(got, leaves, dys), gradients(want, exact, exact_dys)
    dtypes = [leaves[0].dtype] * len(outputs) + [leaf.dtype for leaf in leaves]
    for number, (a, b, dtype) in enumerate(zip(found, wanted, dtypes, strict=True)):
        assert a.dtype == dtype and a.shape == b.shape, f"result {number}"
        error, size = float((a.double() - b).norm()), max(float(b.norm()), least)
        assert error <= bound * size, f"result {number}: {error} of {size}"
    return outputs
