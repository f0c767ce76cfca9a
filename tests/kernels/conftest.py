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


WAYS = ("five products", "seven products")


@pytest.fixture(params=WAYS)
def small(interpreted, monkeypatch, request):
    """Attention by both ways of its backward, without a GPU in blocks of 16 and 32. Its value: the device."""
    from kernels import attention_launch as launch

    if interpreted.type == "cpu":
        blocks = {9: {dim: (16, 32, 4, 1) for dim in (64, 128)}}
        for table in ("FORWARD_BLOCKS", "BACKWARD_BLOCKS", "DQ_BLOCKS", "DKV_BLOCKS"):
            monkeypatch.setattr(launch, table, blocks.copy())
        monkeypatch.setattr(launch, "FP32_BLOCKS", (32, 16, 4, 1))
        monkeypatch.setattr(launch, "DELTA_ROWS", 16)
        monkeypatch.setattr(launch, "STARTS_ROWS", 32)
    if request.param == "seven products":
        monkeypatch.setattr(launch, "BACKWARD_BLOCKS", {8: {}, 9: {}, 10: {}})
    return interpreted
