"""A weight as the training code has it: with an fp32 (fp64) buffer that its gradient is added to."""

import pytest
import torch


@pytest.fixture
def given():
    """given(weight, 1.0): a copy of `weight` as a leaf, with a main_grad filled with 1.0, as if an earlier
    gradient had written that. is_written False: it is left from the step before.
    """

    def make(weight, fill=0.0, is_written=True):
        leaf = weight.detach().clone().requires_grad_()
        leaf.main_grad = torch.full_like(leaf, fill, dtype=torch.promote_types(leaf.dtype, torch.float32))
        leaf.grad_is_written = is_written
        return leaf

    return make


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def interpreted(monkeypatch):
    """The public functions run their Triton kernels: on a GPU as they are, elsewhere through the interpreter.
    Its value: the device.
    """
    from kernels import triton_

    if not triton_.TRITON_AVAILABLE:
        pytest.skip("no Triton for this platform")
    triton_.print_once.cache_clear()
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(triton_, "DEVICES", ("cpu",))
    return torch.device("cpu")
