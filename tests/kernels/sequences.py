"""Shared by the tests of layers with a state: results with gradients, documents, stand-ins for libraries."""

import sys
import types

import torch

from kernels import sequence_libraries, triton_
from kernels.attention_libraries import installed_function

# Two sequences of 37 tokens: the lengths of their documents
DOCUMENTS = [[7, 1, 11, 18], [37]]
TOKENS = 37


def ids(lengths=DOCUMENTS):
    """[b, s] of documents of these lengths in each sequence: those of a second sequence are others."""
    numbers = iter(range(3, 100))
    return torch.tensor([[number for n, number in zip(row, numbers) for _ in range(n)] for row in lengths])


def results(function, leaves):
    """The outputs, and the gradients of the leaves for random ones that every dtype has. function(*leaves) is
    a tuple.
    """
    outputs = function(*leaves)
    stream = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=stream).bfloat16() for y in outputs]
    gradients = torch.autograd.grad(outputs, leaves, [dy.to(y.dtype) for dy, y in zip(dys, outputs)])
    return *outputs, *gradients


def copies(leaves, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in leaves]


def assert_near(found, wanted, bound):
    """||found - wanted|| <= bound ||wanted|| for each."""
    for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert got.shape == want.shape
        error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-6)
        assert error <= bound, f"result {number}: {error}"


def saved_elements(function):
    """(how many elements the backward keeps, what the function returns)."""
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        returned = function()
    return sum(storages.values()), returned


def install(monkeypatch, module, **functions):
    """A module of these functions, as if a library were installed that runs on a CPU."""
    monkeypatch.setattr(sequence_libraries, "DEVICES", ("cpu",))
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**functions))
    installed_function.cache_clear()
    triton_.print_once.cache_clear()


def uninstall():
    """For the end of a test: no later one finds its modules."""
    installed_function.cache_clear()
    triton_.print_once.cache_clear()
