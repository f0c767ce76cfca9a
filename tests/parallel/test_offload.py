"""Offload: the copies are the tensors, an address that was used again is no old friend, and the update in
chunks is the update.
"""

from dataclasses import replace

import pytest
import torch
from random_tokens import RandomTokens

import optim.adamw
from build import build_run
from config.reading.tiny import tiny_config
from kernels.adam import AdamWStep, adamw
from parallel.offload import (
    MIN_BYTES,
    PREFETCH,
    ActivationOffload,
    CopyStream,
    OffloadedTensor,
    staged_chunks,
)
from parallel.topology.mesh import Mesh
from train import train_step

CPU = torch.device("cpu")


def test_an_update_in_chunks_is_bitwise_the_update():
    g, n = torch.Generator().manual_seed(0), 1000
    state, grad = [torch.rand(n, generator=g) for _ in range(3)], torch.randn(n, generator=g)
    numbers = AdamWStep(
        lr=1e-2,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=3,
        grad_scale=torch.tensor(0.5),
        is_good=torch.tensor(True),
    )
    whole, low = [t.clone() for t in state], torch.empty(n, dtype=torch.bfloat16)
    adamw(whole[0], grad, *whole[1:], numbers)
    seen = []
    for cut, (p, m, v) in staged_chunks(state, CPU, CopyStream(CPU), chunk=256):
        assert all(t.data_ptr() != s[cut].data_ptr() for t, s in zip((p, m, v), state))  # a copy, as on a GPU
        adamw(p, grad[cut], m, v, numbers, weight_copy=low[cut])
        seen.append((cut.start, cut.stop))
    assert seen == [(0, 256), (256, 512), (512, 768), (768, 1000)]
    assert all(torch.equal(a, b) for a, b in zip(state, whole)) and torch.equal(low, whole[0].bfloat16())


@pytest.mark.parametrize(
    "offload, in_chunks", [("none", False), ("activations", False), ("optimizer", True), ("both", True)]
)
def test_states_that_stay_on_the_device_are_not_copied(monkeypatch, offload, in_chunks):
    cfg = tiny_config("llama3-tiny")
    cfg = replace(cfg, model=replace(cfg.model, layers=1), parallel=replace(cfg.parallel, offload=offload))
    copied = []
    monkeypatch.setattr(
        optim.adamw, "staged_chunks", lambda hosts, *how: copied.append(hosts) or staged_chunks(hosts, *how)
    )
    run = build_run(cfg, Mesh.single(), CPU, None, 2)
    train_step(run, 1, RandomTokens(cfg, 0, 1).microbatches(0))
    assert bool(copied) == in_chunks


def chain(x, w, depth=6):
    for _ in range(depth):
        x = (x @ w).tanh()
    return x.square().sum()


def test_gradients_are_those_of_tensors_that_stayed():
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(64, 64, generator=g, dtype=torch.float64).requires_grad_() for _ in "xw")
    chain(x, w).backward()
    want, x.grad, w.grad = (x.grad.clone(), w.grad.clone()), None, None
    away = ActivationOffload(CPU, CopyStream(CPU))
    with away.saving_to_host():
        y = chain(x, w)
    y.backward()
    assert torch.equal(x.grad, want[0]) and torch.equal(w.grad, want[1])


def test_fetched_in_reverse_a_few_ahead_and_once():
    away, order = ActivationOffload(CPU, CopyStream(CPU)), []
    fetch = away.start_fetch
    away.start_fetch = lambda t: (order.append(t.place) if t.device_copy is None else None, fetch(t))
    with away.saving_to_host():
        tickets = [away.pack(torch.full((MIN_BYTES,), i, dtype=torch.float64)) for i in range(6)]
    for i, t in enumerate(tickets):
        t.place = i
    for i in reversed(range(6)):
        assert torch.equal(away.unpack(tickets[i]), torch.full((MIN_BYTES,), i, dtype=torch.float64))
        assert order == list(range(5, max(i - PREFETCH, 0) - 1, -1))
        del tickets[i]


def test_small_tensors_stay_equal_ones_are_copied_once_and_an_address_used_again_is_another():
    away = ActivationOffload(CPU, CopyStream(CPU))
    with away.saving_to_host():
        small = torch.zeros(4)
        assert away.pack(small) is small
        x = torch.rand(MIN_BYTES)
        first = away.pack(x)
        assert isinstance(first, OffloadedTensor) and away.pack(x.detach()) is first
        x.add_(1)  # written in place since
        second = away.pack(x)
        assert second is not first and torch.equal(second.host_copy, first.host_copy + 1)
        memory = torch.zeros(MIN_BYTES).numpy()
        kept = []
        for i in range(3):  # freed and made again at the same address, while a graph holds the older ticket
            y = torch.from_numpy(memory)
            memory[:] = i
            kept.append(away.pack(y))
            assert torch.equal(kept[i].host_copy, y)
            del y


def test_a_transposed_tensor_comes_back_as_it_lay():
    away = ActivationOffload(CPU, CopyStream(CPU))
    x = torch.rand(128, 64).t()
    with away.saving_to_host():
        back = away.unpack(away.pack(x))
    assert torch.equal(back, x) and back.stride() == x.stride()
