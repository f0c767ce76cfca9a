"""A weight as the training code has it, with an fp32 (fp64) buffer that its gradient is added to; kernels
in the interpreter where there is no GPU, and their sizes.
"""

import importlib

import pytest
import torch
from small_tiles import SMALL_TILES
from training import TINY, Training


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


@pytest.fixture
def small_products(interpreted, monkeypatch):
    """Tiles of products as small as the tensor cores allow, where there is no GPU. Its value: the device."""
    if interpreted.type == "cpu":
        for module, table, tile in SMALL_TILES:
            owner = importlib.import_module(f"kernels.{module}")
            monkeypatch.setattr(owner, table, getattr(owner, table) | tile)
    return interpreted


@pytest.fixture
def training(small_products, request, record_property):
    """The sizes of training; tiny ones where there is no GPU (tests/kernels/training.py)."""
    torch.set_float32_matmul_precision("highest")
    kernels = frozenset(name for mark in request.node.iter_markers("gpu") for name in mark.args)
    sizes = TINY if small_products.type == "cpu" else {}
    return Training(small_products, kernels, record_property, **sizes)


@pytest.fixture
def small_blocks(interpreted, monkeypatch):
    """Attention in blocks of 16 and 32, where there is no GPU. Its value: the device."""
    from kernels import attention_triton as twin

    if interpreted.type == "cpu":
        small = dict.fromkeys((64, 128), twin.Blocks(16, 32, 4, 1))
        monkeypatch.setattr(twin, "BLOCKS", dict.fromkeys(twin.BLOCKS, small))
        monkeypatch.setattr(twin, "FP32_BLOCKS", twin.Blocks(32, 16, 4, 1))
    return interpreted
