"""Linear and embedding, and the protocol that carries their weight gradients (kernels/grad.py)."""

import pytest
import torch
import torch.nn.functional as F
from training import START, bound

from kernels import linear as kernel
from kernels.embedding import embedding
from kernels.linear import linear, linear_of_several, recompute_output
from parallel.pipeline.executor import WeightGradStore


@pytest.mark.slow
def test_gradients_are_those_of_differences():
    x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (5, 4), (5,)))
    assert torch.autograd.gradcheck(linear, (x, w, b))
    assert torch.autograd.gradcheck(lambda x, w: linear(x, w), (x, w))
    ids = torch.tensor([[0, 4, 4], [2, 0, 0]])
    assert torch.autograd.gradcheck(lambda w: embedding(ids, w), w)


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)]
)
def test_buffers_get_what_autograd_gets(given, dtype, bound, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 64)  # several blocks of rows, the last one short
    x, w, b = (torch.randn(*s).to(dtype).requires_grad_() for s in ((2, 9, 24), (17, 24), (17,)))
    dy = torch.randn(2, 9, 17).to(dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    want = torch.autograd.grad(F.linear(*exact), exact, dy.double())
    kept = [given(w, 1.0), given(b, 1.0)]
    x2 = x.detach().clone().requires_grad_()
    for _ in range(3):
        linear(x2, *kept).backward(dy)
    for p in kept:
        assert p.grad is None and p.main_grad.dtype == torch.promote_types(dtype, torch.float32)
    for got, b in zip([x2.grad, *(p.main_grad - 1 for p in kept)], want):
        assert (got.double() / 3 - b).norm() <= bound * b.norm()


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)]
)
def test_the_first_gradient_overwrites_and_the_second_is_added(given, dtype, bound, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 64)
    x, w, b = torch.randn(9, 24).to(dtype), torch.randn(17, 24).to(dtype), torch.randn(17).to(dtype)
    dys = torch.randn(2, 9, 17).to(dtype)
    kept = [given(w, float("nan"), is_written=False), given(b, float("nan"), is_written=False)]
    sums = [torch.zeros(17, 24).double(), torch.zeros(17).double()]
    for dy in dys:
        linear(x, *kept).backward(dy)
        for total, part in zip(sums, (dy.double().t() @ x.double(), dy.double().sum(0))):
            total += part
        for p, want in zip(kept, sums):
            assert p.grad_is_written and (p.main_grad.double() - want).norm() <= bound * want.norm()


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("rows", [slice(0, 2), slice(2, 5), slice(3, None), slice(None)])
def test_rows_that_a_projection_does_not_use_are_written_as_zeros(given, rows):
    x, dy = torch.randn(4, 6), torch.randn(4, len(range(5)[rows]))
    w, b = (given(torch.randn(*s), float("nan"), is_written=False) for s in ((5, 6), (5,)))
    for repeat in (1, 2):
        linear_of_several(x, [w], [b], [rows]).backward(dy)
        want_w, want_b = torch.zeros(5, 6), torch.zeros(5)
        want_w[rows], want_b[rows] = repeat * dy.t() @ x, repeat * dy.sum(0)
        torch.testing.assert_close(w.main_grad, want_w)
        torch.testing.assert_close(b.main_grad, want_b)


def test_input_gradient_alone_where_the_weight_is_frozen():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    linear(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(3, -1))


@pytest.mark.parametrize("layer", ["linear", "embedding"])
def test_a_deferred_weight_gradient_has_the_same_bits(given, layer):
    """Inside an I nothing reaches the buffer; its W brings the same bits."""
    w, ids, x = torch.randn(6, 4), torch.tensor([[1, 1, 5]]), torch.randn(1, 3, 4)
    now, later, store = given(w), given(w), WeightGradStore()
    later.weight_grad_store = store
    store.deferring, store.microbatch = True, 7
    for weight in (now, later):
        (linear(x, weight) if layer == "linear" else embedding(ids, weight)).square().sum().backward()
    assert now.main_grad.any() and not later.main_grad.any()
    store.deferring = False
    store.compute(7)
    assert torch.equal(now.main_grad, later.main_grad) and not store.pending


def test_embedding_counts_every_use_in_fp32(given):
    w, ids = given(torch.randn(3, 2).bfloat16()), torch.zeros(1, 1000, dtype=torch.int64)
    embedding(ids, w).backward(torch.ones(1, 1000, 2, dtype=torch.bfloat16))
    assert w.main_grad.tolist() == [[1000.0, 1000.0], [0.0, 0.0], [0.0, 0.0]]  # bf16 would stop at 256


def test_several_linears_of_one_input_and_of_some_rows():
    g = torch.Generator().manual_seed(0)
    x, *w = (
        torch.randn(*s, generator=g, dtype=torch.float64, requires_grad=True)
        for s in ((2, 3, 5), (4, 5), (6, 5), (4,), (6,))
    )
    rows = [slice(0, 4), slice(2, 5)]
    biased = lambda x, a, b, c, d: linear_of_several(x, [a, b], [c, d], rows)
    plain = lambda x, a, b: linear_of_several(x, [a, b], [None, None], rows)
    assert torch.autograd.gradcheck(biased, (x, *w))
    assert torch.autograd.gradcheck(plain, (x, *w[:2]))
    want = torch.cat((F.linear(x, w[0], w[2]), F.linear(x, w[1][2:5], w[3][2:5])), -1)
    assert torch.equal(biased(x, *w), want)


def test_an_input_that_is_made_again_is_not_kept():
    x, w = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (4, 3))
    want, made, kept = torch.autograd.grad(linear(x.sin(), w).square().sum(), (x, w)), [], []

    def again(x):
        made.append(x.sin())
        return made[-1]

    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        h = x.sin()
        y = linear(recompute_output(h, again, x), w)
    assert x.data_ptr() in kept and h.data_ptr() not in kept and not made
    got = torch.autograd.grad(y.square().sum(), (x, w))
    assert len(made) == 1 and all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.slow(every=9)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)]
)
@pytest.mark.parametrize("t, m, n", [(37, 40, 72), (16, 16, 8), (5, 96, 16)])
def test_triton_sums_a_weight_gradient_in_fp32(
    interpreted, small_products, monkeypatch, dtype, bound, t, m, n
):
    """Whatever the dtype of the inputs is: all have the bound of fp32."""
    dy = torch.randn(t, m, device=interpreted).to(dtype)
    x = torch.randn(t, 2 * n, device=interpreted).to(dtype)[:, :n]
    into = torch.ones(m, n, device=interpreted)
    assert kernel.triton_fits(into, dy, x)
    got = kernel.launch_wgrad(into.clone(), dy, x, True)
    want = 1 + dy.double().t() @ x.double()
    assert (got - want).norm() <= bound * want.norm()
    written = kernel.launch_wgrad(torch.full_like(into, float("nan")), dy, x, False)
    assert (written - (want - 1)).norm() <= bound * want.norm()
    monkeypatch.setattr(kernel, "library_adds_in_fp32", lambda device, dtype: False)
    if dtype != torch.float32:  # where fp32 is added to fp32 the library's GEMM does it
        assert torch.equal(kernel.write_wgrad(into, dy, x, True), got)
        assert torch.equal(kernel.write_wgrad(into, dy, x, False), written)


@pytest.mark.gpu("linear.wgrad_kernel")
def test_a_linear_at_training_sizes(training):
    x, dy = (training.randn(training.tokens, n) for n in (training.hidden, training.ffn))
    training.check_function(
        linear,
        F.linear,
        {"x": x, "w": training.randn(training.ffn, training.hidden)},
        (dy,),
        {"y": bound(1, training.hidden), "dx": bound(1, training.ffn), "dw": bound(0, training.tokens)},
        weights=("w",),
        is_ours=training.device.type == "cpu",  # on a GPU the library's weight gradient, where it adds fp32
    )


@pytest.mark.slow(every=2)
@pytest.mark.gpu("linear.wgrad_kernel")
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("way", [kernel.launch_wgrad, kernel.write_by_library])
def test_weight_gradient_at_training_sizes(training, way, add):
    """By each of the ways of a GPU; add: to what is there, else the first of a step."""
    is_ours = way is kernel.launch_wgrad
    if training.device.type == "cpu" and not is_ours:
        pytest.skip("torch's CPU has no product of 16 bits that is added to fp32")
    dy, x = (training.randn(training.tokens, n) for n in (training.ffn, training.hidden))
    if is_ours and (why := kernel.skewed(dy, x)):
        pytest.skip(why)

    def ours():
        into = torch.full((training.ffn, training.hidden), START if add else float("nan"), device=x.device)
        return {"dw": way(into, dy, x, add) - START * add}

    training.check(
        ours,
        lambda: {"dw": dy.float().t() @ x.float()},
        {"dw": bound(0, training.tokens)},
        is_ours=is_ours,
    )


# ---- the GPU's library -------------------------------------------------------------------------------------


def right(into, dy, x, add):
    """As the library of an NVIDIA GPU."""
    product = dy.float().t() @ x.float()
    return into.add_(product) if add else into.copy_(product)


def adds_elsewhere(into, dy, x, add):
    return into + dy.float().t() @ x.float()


def rounds_first(into, dy, x, add):
    return into.copy_((into.to(dy.dtype) + dy.t() @ x).float())


def forgets_what_was_there(into, dy, x, add):
    return into.copy_(dy.float().t() @ x.float())


def reads_what_it_overwrites(into, dy, x, add):
    return into.mul_(float(add)).add_(dy.float().t() @ x.float())


def refuses(into, dy, x, add):
    raise RuntimeError("self and mat2 must have the same dtype\nmore")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("library, obstacle", [
    (right, None),
    (adds_elsewhere, "a wrong result"),
    (rounds_first, "a wrong result"),
    (forgets_what_was_there, "a wrong result"),
    (reads_what_it_overwrites, "a wrong result"),
    (refuses, "self and mat2 must have the same dtype"),
])
def test_the_library_is_tried_before_it_is_used(monkeypatch, library, obstacle, dtype):
    monkeypatch.setattr(kernel, "write_by_library", library)
    assert kernel.obstacle_to_library(torch.device("cpu"), dtype) == obstacle


def test_a_cpu_has_no_such_library():
    assert not kernel.library_adds_in_fp32(torch.device("cpu"), torch.bfloat16)
    assert kernel.obstacle_to_library(torch.device("cpu"), torch.bfloat16) is not None


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_library_that_adds_in_fp32_multiplies_matrices_and_batches_of_them(monkeypatch, shape):
    a, b = torch.randn(*shape, 6, 8).bfloat16(), torch.randn(*shape, 8, 4).bfloat16()
    expected = a.float() @ b.float()
    assert torch.equal(kernel.multiply_into_fp32(a, b), expected)

    monkeypatch.setattr(kernel, "library_adds_in_fp32", lambda device, dtype: True)
    product = kernel.multiply_into_fp32(a.to("meta"), b.to("meta"))
    assert product.dtype == torch.float32 and product.shape == expected.shape
    with pytest.raises(NotImplementedError, match=r"aten::b?mm.dtype"):  # a CPU has none
        kernel.multiply_into_fp32(a, b)


def test_a_library_that_adds_in_fp32_adds_the_weight_gradient(monkeypatch):
    calls = []
    monkeypatch.setattr(kernel, "library_adds_in_fp32", lambda device, dtype: True)
    monkeypatch.setattr(kernel, "write_by_library", lambda *args: calls.append(args) or right(*args))
    dy, x = torch.randn(6, 8).bfloat16(), torch.randn(6, 4).bfloat16()
    into = torch.ones(8, 4)
    assert kernel.write_wgrad(into, dy, x, True) is into and len(calls) == 1
    torch.testing.assert_close(into, 1 + dy.float().t() @ x.float())
    kernel.write_wgrad(into, dy, x, False)
    torch.testing.assert_close(into, dy.float().t() @ x.float())
    kernel.write_wgrad(torch.ones(8, 4, dtype=torch.float64), dy, x, True)  # not into fp32
    assert len(calls) == 2
