"""Output head and cross entropy in one, against F.cross_entropy on the whole logits."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from definitions import gradients
from training import bound

from kernels import cross_entropy as kernel
from kernels import triton_
from kernels.cross_entropy import IGNORE_INDEX, linear_cross_entropy


def case(t=11, d=6, v=13, dtype=torch.float64):
    hidden = torch.randn(t, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, v - 3, (t,))


def definition(hidden, weight, targets, scale, vocab, cap=None):
    logits = (hidden @ weight.t())[:, :vocab]
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits.to(torch.promote_types(hidden.dtype, torch.float32))
    return scale * F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def assert_same(got, want, leaves, **bounds):
    """Losses, and their gradients for the leaves."""
    for a, b in zip(gradients(got, leaves, [torch.ones(())]), gradients(want, leaves, [torch.ones(())])):
        torch.testing.assert_close(a, b, **bounds)


@pytest.mark.parametrize("chunk", [None, 1, 4, 11, 64])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_loss_and_gradients_are_those_of_whole_logits(chunk, ignored):
    hidden, weight, y = case()
    y[{"none": slice(0), "some": slice(2, 5), "all": slice(None)}[ignored]] = IGNORE_INDEX
    got = linear_cross_entropy(hidden, weight, y, 0.3, 10, chunk=chunk)  # rows 10, 11, 12 are padding
    assert_same(got, definition(hidden, weight, y, 0.3, 10), (hidden, weight))


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("merge", [None, lambda *statistics: statistics])
def test_capped_logits_have_the_loss_and_gradients_of_whole_ones(chunk, merge):
    """Bounds of the size of the logits themselves, with padding of the vocabulary."""
    hidden, weight, y = case()
    y[3] = IGNORE_INDEX
    got = linear_cross_entropy(hidden, weight, y, 0.3, 10, chunk=chunk, merge=merge, cap=1.5)
    assert_same(got, definition(hidden, weight, y, 0.3, 10, cap=1.5), (hidden, weight))


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("merge", [None, lambda *statistics: statistics])
def test_a_rank_without_rows_has_a_loss_and_gradients_of_0(given, chunk, merge):
    """A rank may hold no row of a microbatch: its loss and its gradients are 0, and nothing divides by the
    number of rows.
    """
    hidden, weight, y = case(t=0, dtype=torch.float32)
    loss = linear_cross_entropy(hidden, weight, y, 0.3, 10, chunk=chunk, merge=merge)
    assert loss.shape == () and loss.dtype == torch.float32 and loss.item() == 0
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    assert dhidden.shape == hidden.shape and torch.equal(dweight, torch.zeros_like(weight))

    kept = given(weight, 1.0)
    linear_cross_entropy(hidden, kept, y, 0.3, 10, chunk=chunk, merge=merge).backward()
    assert kept.grad is None and (kept.main_grad == 1).all()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, y, 0.3, 10, chunk=chunk, merge=merge).item() == 0


def test_the_scale_may_be_a_tensor():
    hidden, weight, y = case()
    losses = [linear_cross_entropy(hidden, weight, y, scale, 13) for scale in (torch.tensor(0.25), 0.25)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("size", [1.0, 300.0])  # 300: logits of thousands, whose exponentials overflow
def test_losses_and_gradients_are_rounded_once(dtype, bound, size):
    hidden, weight, y = case(40, 32, 130)
    hidden, weight = ((x.detach() * size**0.5).to(dtype).requires_grad_() for x in (hidden, weight))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    got = linear_cross_entropy(hidden, weight, y, 1 / 40, 128, chunk=16)
    want = definition(*exact, y, 1 / 40, 128)
    assert got.dtype == torch.float32
    assert abs(got - want) <= bound * want
    for a, b in zip(torch.autograd.grad(got, (hidden, weight)), torch.autograd.grad(want, exact)):
        assert (a.double() - b).norm() <= (bound if size == 1 else 20 * bound) * b.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradient_is_added_to_the_buffer_once(given, dtype):
    hidden, weight, y = case(dtype=dtype)
    plain = torch.autograd.grad(linear_cross_entropy(hidden, weight, y, 0.3, 10, chunk=4), weight)[0]
    kept = given(weight, 1.0)
    linear_cross_entropy(hidden, kept, y, 0.3, 10, chunk=4).backward()
    assert kept.grad is None
    rtol, atol = (0.02, 0.02) if dtype == torch.bfloat16 else (1e-9, 1e-12)
    torch.testing.assert_close(kept.main_grad - 1, plain.to(kept.main_grad.dtype), rtol=rtol, atol=atol)


def test_no_gradient_without_grad_mode(given):
    hidden, weight, y = case()
    kept = given(weight)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, kept, y, 1.0, 13)
    assert not loss.requires_grad and not kept.main_grad.any()


@pytest.mark.parametrize("rows", [14, 21])
def test_parts_of_the_vocabulary_are_merged_to_the_whole(rows):
    """Parts of two ranks, and of three whose last is all padding, merged as a tensor-parallel head
    merges them, against the whole.
    """
    hidden, weight, y = case(11, 6, rows)
    y = y % 12
    y[3] = IGNORE_INDEX
    want = linear_cross_entropy(hidden, weight, y, 0.3, 12)
    dh, dw = torch.autograd.grad(want, (hidden, weight))
    logits = (hidden @ weight.t()).detach()
    logits[:, 12:] = -torch.inf
    picked = logits.gather(1, y.clamp(0)[:, None])[:, 0].where(y != IGNORE_INDEX, 0.0)
    everywhere = torch.logsumexp(logits, 1), picked
    parts = []
    for start in range(0, rows, 7):
        at = iter(range(0, 11, 4))

        def merge(lse, picked, at=at):
            first = next(at)
            return everywhere[0][first : first + len(lse)], everywhere[1][first : first + len(lse)]

        half = weight[start : start + 7]
        got = linear_cross_entropy(hidden, half, y, 0.3, 12, start=start, merge=merge, chunk=4)
        torch.testing.assert_close(got, want)
        parts.append(torch.autograd.grad(got, (hidden, half)))
    torch.testing.assert_close(sum(part for part, _ in parts), dh)
    torch.testing.assert_close(torch.cat([part for _, part in parts]), dw)


@pytest.mark.slow(every=12)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("columns", [64, 256])
def test_triton_is_the_reference(interpreted, monkeypatch, dtype, bound, size, columns):
    """Vocabularies of several blocks, the last one cut, and padded; a target that is not counted."""
    monkeypatch.setattr(kernel, "COLUMNS", columns)
    hidden, weight, y = (t.to(interpreted) for t in case(13, 16, 150))
    y[2] = IGNORE_INDEX
    scale = torch.tensor(0.25, device=interpreted)
    hidden, weight = ((x.detach() * size**0.5).to(dtype).requires_grad_() for x in (hidden, weight))
    with monkeypatch.context() as m:  # without Triton, as proved above: both round logits to dtype
        m.setattr(triton_, "DEVICES", ())
        want = linear_cross_entropy(hidden, weight, y, scale, 147, chunk=5)
        grads = torch.autograd.grad(want, (hidden, weight))
    got = linear_cross_entropy(hidden, weight, y, scale, 147, chunk=5)
    assert got.dtype == torch.float32 and abs(got - want) <= bound * want
    for a, b in zip(torch.autograd.grad(got, (hidden, weight)), grads):
        assert a.dtype == dtype and (a.double() - b.double()).norm() <= bound * b.double().norm()


@pytest.mark.slow
def test_triton_over_parts_of_the_vocabulary(interpreted, monkeypatch):
    """Columns of three ranks whose last is all padding: statistics merged as parallel/tensor/layers.py
    does, gradients as the whole's.
    """
    monkeypatch.setattr(kernel, "COLUMNS", 16)
    logits, y = 5 * torch.randn(7, 60, device=interpreted), torch.randint(0, 40, (7,), device=interpreted)
    y[4] = IGNORE_INDEX
    whole, parts = logits.clone(), [logits[:, i : i + 20].contiguous() for i in (0, 20, 40)]
    want = kernel.softmax_cross_entropy_block(whole, y, 0.5, 40, 0, None)
    seen = []
    note = lambda lse, picked: seen.append((lse.clone(), picked.clone())) or (lse, picked)
    for part, start in zip(parts, (0, 20, 40)):
        kernel.launch_softmax(part.clone(), y, 0.5, 40, start, note)
    lse, picked = (torch.stack(x) for x in zip(*seen))
    for part, start in zip(parts, (0, 20, 40)):
        got = kernel.launch_softmax(part, y, 0.5, 40, start, lambda *_: (lse.logsumexp(0), picked.sum(0)))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(part, whole[:, start : start + 20], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu("cross_entropy.softmax_kernel", "linear.wgrad_kernel")
@pytest.mark.parametrize("larger, padding", [(1, 0), (4, 64)])
def test_at_training_sizes(training, larger, padding):
    """Logits are rounded, their gradient, and each product of it. Chunks are not all of one size."""
    rows, vocab = training.rows // larger, larger * training.vocab - padding
    hidden = training.randn(rows, training.hidden)
    weight = training.randn(vocab, training.hidden) / math.sqrt(training.hidden)  # logits of about 1
    targets = torch.randint(vocab - padding, (rows,), device=training.device)
    targets[::5] = IGNORE_INDEX
    last, scale = vocab - padding, 1 / rows
    training.check_function(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, targets, scale, last, chunk=rows // 3),
        lambda hidden, weight: definition(hidden, weight, targets, scale, last),
        {"hidden": hidden, "weight": weight},
        (torch.ones((), device=training.device),),
        {"y": bound(1), "dhidden": bound(3), "dweight": bound(2, rows)},
        weights=("weight",),
    )


@pytest.mark.parametrize("gib, expected", [(8, 1 << 27), (24, 3 << 27), (64, 1 << 30), (141, 1 << 30)])
def test_a_chunk_of_a_gpu_is_a_small_part_of_its_memory(monkeypatch, gib, expected):
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert kernel.chunk_bytes(torch.device("cuda")) == expected


def test_a_chunk_of_a_cpu_is_what_its_allocator_reuses():
    assert kernel.chunk_bytes(torch.device("cpu")) == kernel.CHUNK_BYTES
