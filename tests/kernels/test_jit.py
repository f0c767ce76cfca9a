"""The compiled twins give what the functions give."""

import shutil

import pytest
import torch

from kernels.norm import add_norm
from kernels.rope import cos_sin_tables, frequencies, split_heads_and_apply_rope
from kernels.swiglu import swiglu


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="no C++ compiler, which torch.compile needs on a CPU",
)
def test_a_compiled_function_gives_the_same():
    x = torch.randn(2, 8, 48).bfloat16().requires_grad_()
    w = torch.randn(48).bfloat16().requires_grad_()
    cos, sin = cos_sin_tables(torch.arange(8).expand(2, -1), frequencies(8, 100.0), torch.float32)

    def run(compiled):
        y, total = add_norm(x, x, w, None, 1e-5, compiled)
        q, k, v = split_heads_and_apply_rope((y + total).view(2, 8, 6, 8), cos, sin, 2, 2, compiled)
        out = swiglu(torch.cat((q, k, v), 2).flatten(2), compiled)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, w))

    for a, b in zip(run(True), run(False)):
        assert (a - b).float().norm() <= 0.01 * b.float().norm()
