"""Grouped GEMM against a GEMM an expert: uneven and empty experts, gradients in the buffers, now or later."""

import pytest
import torch
from training import bound

from kernels import grouped_gemm as kernel
from kernels.grouped_gemm import grouped_dgrad, grouped_forward, grouped_linear, grouped_wgrad
from kernels.permute import RowOrder
from parallel.pipeline.executor import WeightGradStore

COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [9, 0, 0, 0], [0, 0, 0, 0], [2, 2, 2, 3], [40, 5, 0, 33, 50, 1]]
N, O = 6, 10


def definition(x, w, counts):
    experts = w.view(len(counts), -1, x.shape[1])
    return torch.cat([rows @ expert.t() for rows, expert in zip(x.split(counts), experts)])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_against_one_gemm_an_expert(given, counts, dtype, bound):
    x, w, dy = (torch.randn(*s).to(dtype) for s in ((sum(counts), N), (len(counts) * O, N), (sum(counts), O)))
    kept, x1 = given(w, 1.0), x.clone().requires_grad_()
    x2, w2 = (t.double().requires_grad_() for t in (x, w))
    want = definition(x2, w2, counts)
    dx, dw = torch.autograd.grad(want, (x2, w2), dy.double())
    for _ in range(2):
        got = grouped_linear(x1, kept, counts)
        got.backward(dy)
    assert got.shape == want.shape and got.dtype == dtype and kept.grad is None
    for a, b in ((got, want), (x1.grad / 2, dx), ((kept.main_grad - 1) / 2, dw)):
        assert (a.double() - b).norm() <= bound * b.norm() + 1e-300
    for expert, n in zip(kept.main_grad.view(len(counts), O, N), counts):
        assert n or (expert == 1).all()  # an empty expert's gradient is what it was

    # the first gradient of a step overwrites, and an empty expert's is zero
    first = given(w, float("nan"), is_written=False)
    for repeat in (1, 2):
        grouped_linear(x, first, counts).backward(dy)
        assert (first.main_grad.double() / repeat - dw).norm() <= bound * dw.norm()


def test_forward_dgrad_and_wgrad_are_products_an_expert():
    counts, (x, w, dy) = [2, 0, 3], (torch.randn(5, N), torch.randn(3, O, N), torch.randn(5, O))
    assert torch.allclose(grouped_forward(x, w, counts), definition(x, w.view(-1, N), counts))
    assert torch.allclose(grouped_dgrad(dy, w, counts), torch.cat([dy[:2] @ w[0], dy[2:] @ w[2]]))
    into = torch.ones(3, O, N, dtype=torch.float64)
    grouped_wgrad(into, dy.double(), x.double(), counts, True)
    want = torch.stack([dy[:2].t() @ x[:2], torch.zeros(O, N), dy[2:].t() @ x[2:]]).double()
    assert torch.allclose(into, 1 + want, atol=1e-5)


def test_gradients_are_those_of_differences():
    x, w = (torch.randn(rows, 3, dtype=torch.float64, requires_grad=True) for rows in (5, 8))
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, [4, 0, 0, 1]), (x, w))


def test_a_deferred_weight_gradient_has_the_same_bits(given):
    """Inside an I nothing reaches the buffer; its W brings the same bits."""
    x, w, dy, counts = torch.randn(5, N), torch.randn(2 * O, N), torch.randn(5, O), [1, 4]
    now, put = given(w), given(w)
    store = put.weight_grad_store = WeightGradStore()
    store.deferring, store.microbatch = True, 3
    for weight in (now, put):
        grouped_linear(x.clone().requires_grad_(), weight, counts).backward(dy)
    assert now.main_grad.any() and not put.main_grad.any()
    store.compute(3)
    assert torch.equal(now.main_grad, put.main_grad)


# ---- Triton ----

SHARES = {
    "uneven": (5, 0, 17, 16, 1),
    "all to one": (0, 0, 39),
    "even": (16, 16),
    "none at the ends": (0, 7, 0),
}


def case(counts, o, n, dtype):
    x = torch.randn(sum(counts), n).to(dtype).requires_grad_()
    weight = torch.randn(len(counts) * o, n).to(dtype).requires_grad_()
    return x, weight, torch.randn(sum(counts), o).to(dtype)


@pytest.mark.slow(every=32)
@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("o, n", [(40, 24), (16, 72)])
@pytest.mark.parametrize("on_device", [False, True])
def test_triton_is_one_product_an_expert(small_products, given, name, dtype, o, n, on_device):
    counts = torch.tensor(SHARES[name], device=small_products) if on_device else SHARES[name]
    x, weight, dy = (t.detach().to(small_products) for t in case(SHARES[name], o, n, dtype))
    leaves = x.requires_grad_(), given(weight, 1.0)
    exact = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    got, want = grouped_linear(leaves[0], leaves[1], counts), definition(*exact, SHARES[name])
    assert got.grad_fn.triton
    got.backward(dy)
    want.backward(dy.double())
    rounding = {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert (got - want).norm() <= rounding * want.norm()
    assert (leaves[0].grad - exact[0].grad).norm() <= rounding * exact[0].grad.norm()
    assert (leaves[1].main_grad - 1 - exact[1].grad).norm() <= 1e-6 * exact[1].grad.norm()  # fp32 throughout
    for i, count in enumerate(SHARES[name]):
        assert count or (leaves[1].main_grad.view(len(SHARES[name]), o, n)[i] == 1).all()

    first = given(weight, float("nan"), is_written=False)  # of a step: it overwrites
    grouped_linear(x, first, counts).backward(dy)
    assert (first.main_grad - exact[1].grad).norm() <= 1e-6 * exact[1].grad.norm()
    for i, count in enumerate(SHARES[name]):
        assert count or (first.main_grad.view(len(SHARES[name]), o, n)[i] == 0).all()


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("o, n", [(40, 24), (16, 72)])
@pytest.mark.parametrize("name", SHARES)
def test_triton_overwrites_what_was_there(small_products, name, o, n):
    """Whatever was there, an expert without rows included, whose gradient is zero."""
    x, _, dy = (t.detach().to(small_products) for t in case(SHARES[name], o, n, torch.bfloat16))
    offsets = kernel.row_tiles(SHARES[name], sum(SHARES[name]), small_products).offsets
    into = torch.full((len(SHARES[name]), o, n), float("nan"), device=small_products)
    kernel.launch_wgrad(into, dy, x, offsets, add=False)
    want = torch.zeros(into.shape, device=small_products)
    kernel.launch_wgrad(want, dy, x, offsets, add=True)
    assert torch.equal(into, want) and want.any()


@pytest.mark.parametrize("counts", [*SHARES.values(), (0, 0, 0), (16, 0, 32, 1)], ids=str)
def test_tiles_are_those_of_a_loop_over_experts(interpreted, monkeypatch, counts):
    """Beside a loop over the experts."""
    monkeypatch.setattr(kernel, "TILE", {"M": 16, "N": 32, "K": 16})
    rows = kernel.row_tiles(torch.tensor(counts, device=interpreted), sum(counts), interpreted)
    assert rows.offsets.tolist() == [sum(counts[:e]) for e in range(len(counts) + 1)]
    want = []
    for expert, count in enumerate(counts):
        start = sum(counts[:expert])
        want += [[expert, row, start + count] for row in range(start, start + count, 16)]
    assert rows.tiles[0, 0] == len(want) <= len(rows.tiles) - 1
    assert rows.tiles[1:1 + len(want), :3].tolist() == want


def test_triton_returns_a_plain_tensors_gradient(small_products):
    counts = (3, 0, 4)
    x, weight, dy = (t.detach().to(small_products) for t in case(counts, 8, 16, torch.bfloat16))
    weight.requires_grad_()
    got = torch.autograd.grad(grouped_linear(x, weight, counts), weight, dy)[0]
    want = torch.autograd.grad(definition(x.double(), weight.double(), counts), weight, dy.double())[0]
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


# ---- rows that are read where tokens are, and written to where they belong ----

ORDERS = {  # tokens, rows of a token, whether some are dropped
    "top 3": (13, 3, False),
    "some dropped": (20, 3, True),
    "one each": (39, 1, False),
    "one each, some dropped": (60, 1, True),
}


def order_of(name, m, device):
    """A RowOrder of m rows; where none is dropped, as many as the tokens have."""
    t, k, drops = ORDERS[name]
    places = torch.randperm(t * k)
    assert drops and len(places) > m or len(places) == m
    slots = torch.full((t * k,), -1)
    slots[places[:m]] = torch.arange(m)
    source = places[:m] // k
    return RowOrder(source.to(device), slots.view(t, k).to(device), not drops), t


def ordered_case(name, shares, o, n, dtype, device):
    m = sum(shares)
    order, t = order_of(name, m, device)
    x, rows = torch.randn(t, n).to(device, dtype), torch.randn(m, n).to(device, dtype)
    weight = torch.randn(len(shares) * o, n).to(device, dtype)
    return order, x, rows, weight


@pytest.mark.slow(core=["40-24-triton-dtype2-0.006-some dropped-(0, 0, 39)"])
@pytest.mark.parametrize("counts", [(5, 0, 17, 16, 1), (0, 0, 39)], ids=str)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("way, dtype, bound", [
    ("torch", torch.float64, 1e-12),
    ("torch", torch.bfloat16, 6e-3),
    ("triton", torch.bfloat16, 6e-3),
    ("triton", torch.float16, 8e-4),
])
@pytest.mark.parametrize("o, n", [(40, 24), (16, 72)])
def test_rows_are_gathered_and_combined_as_by_matrices(request, given, counts, name, way, dtype, bound, o, n):
    """Gathered and combined, forward and backward, beside matrices of 0 and 1 in fp64."""
    device = torch.device("cpu")
    if way == "triton":
        device = request.getfixturevalue("small_products")
    order, x, rows, weight = ordered_case(name, counts, o, n, dtype, device)
    t, m = len(x), len(rows)
    is_row_of = torch.zeros(m, t, dtype=torch.float64, device=device)  # [m, t]
    is_row_of[torch.arange(m), order.source] = 1

    for gathers in (True, False):
        leaf = (x if gathers else rows).clone().requires_grad_()
        kept = given(weight, 1.0)
        how = {"gather": order} if gathers else {"combine": order}
        got = grouped_linear(leaf, kept, counts, **how)
        assert way == "torch" or got.grad_fn.triton

        exact, exact_weight = (z.detach().double().requires_grad_() for z in (leaf, weight))
        product = definition(is_row_of @ exact if gathers else exact, exact_weight, counts)
        want = product if gathers else is_row_of.t() @ product
        dy = torch.randn(want.shape, device=device).to(dtype)
        got.backward(dy)
        want.backward(dy.double())
        assert (got.double() - want).norm() <= bound * want.norm()
        assert (leaf.grad.double() - exact.grad).norm() <= bound * exact.grad.norm()
        gradient_bound = 1e-6 if dtype != torch.float64 else bound
        if way == "torch":
            gradient_bound = max(gradient_bound, bound)
        difference = kept.main_grad.double() - 1 - exact_weight.grad
        assert difference.norm() <= gradient_bound * exact_weight.grad.norm()
        for i, count in enumerate(counts):
            assert count or (kept.main_grad.view(len(counts), o, n)[i] == 1).all()

        first = given(weight, float("nan"), is_written=False)  # of a step: it overwrites
        grouped_linear(leaf, first, counts, **how).backward(dy)
        assert (first.main_grad + 1 - kept.main_grad).norm() <= 1e-6 * kept.main_grad.norm()


def uneven_counts(training):
    """Rows of each expert: of all sizes, the second has none."""
    shares = torch.arange(1, training.experts + 1, dtype=torch.float64) ** 2
    shares[1] = 0
    counts = (shares / shares.sum() * training.tokens * training.top_k).long()
    counts[-1] += training.tokens * training.top_k - counts.sum()
    return counts.tolist()


BY_EXPERT = pytest.mark.gpu("grouped_gemm.grouped_wgrad_kernel")
BY_TOKEN = pytest.mark.gpu("grouped_gemm.gathered_wgrad_kernel", "permute.sum_kernel")


@pytest.mark.slow(every=2)
@pytest.mark.gpu("grouped_gemm.row_tiles_kernel", "grouped_gemm.grouped_kernel")
@pytest.mark.parametrize("rows", [
    pytest.param("known", marks=BY_EXPERT),
    pytest.param("on the device", marks=BY_EXPERT),
    pytest.param("gathered", marks=BY_TOKEN),
    pytest.param("combined", marks=BY_TOKEN),
])
def test_at_training_sizes(training, rows):
    """Experts with unequal numbers of rows; the host knows them, or not. Rows of tokens are read where they
    lie, or summed where they belong, which rounds them twice.
    """
    counts, width = uneven_counts(training), 2 * training.expert_ffn
    on_device = torch.tensor(counts, device=training.device)
    slots = torch.randperm(sum(counts), device=training.device).view(training.tokens, training.top_k)
    source = torch.empty(sum(counts), dtype=torch.int64, device=training.device)
    source[slots] = torch.arange(training.tokens, device=training.device)[:, None]
    order = RowOrder(source, slots)
    product = lambda x, weight: definition(x, weight, counts)
    ways = {
        "known": ({}, product),
        "on the device": ({}, product),
        "gathered": ({"gather": order}, lambda x, weight: product(x[source], weight)),
        "combined": ({"combine": order}, lambda x, weight: product(x, weight)[slots].sum(1)),
    }
    how, exact = ways[rows]
    num_in = training.tokens if rows == "gathered" else sum(counts)
    num_out = training.tokens if rows == "combined" else sum(counts)
    training.check_function(
        lambda x, weight: grouped_linear(x, weight, counts if rows == "known" else on_device, **how),
        exact,
        {
            "x": training.randn(num_in, training.hidden),
            "weight": training.randn(training.experts * width, training.hidden),
        },
        (training.randn(num_out, width),),
        {
            "y": bound(1 + (rows == "combined"), training.hidden),
            "dx": bound(1 + (rows == "gathered"), width),
            "dweight": bound(0, max(counts)),
        },
        weights=("weight",),
    )


@pytest.mark.parametrize("name", ORDERS)
def test_gradients_of_gathered_and_combined_rows_are_those_of_differences(name):
    counts = (2, 0, 37)
    order, x, rows, weight = ordered_case(name, counts, 2, 3, torch.float64, torch.device("cpu"))
    for leaf, how in ((x, {"gather": order}), (rows, {"combine": order})):
        leaves = leaf[:, :3].requires_grad_(), weight.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, weight, how=how: grouped_linear(x, weight, counts, **how), leaves)


def test_only_tokens_are_kept_for_the_backward():
    """Not the rows of experts, three times as many."""
    order, x, _, weight = ordered_case("top 3", (5, 34), 8, 16, torch.float64, torch.device("cpu"))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda z: z):
        grouped_linear(x.requires_grad_(), weight, (5, 34), gather=order)
    assert sum(z.numel() for z in kept if z.is_floating_point()) == x.numel()


def test_rows_that_are_gathered_are_not_combined():
    order, x, _, weight = ordered_case("one each", (39,), 24, 24, torch.float64, torch.device("cpu"))
    with pytest.raises(ValueError, match="not both"):
        grouped_linear(x, weight, (39,), gather=order, combine=order)


def test_without_rows_of_tokens_gradients_are_0():
    """Every choice is dropped: the output is zero, and so are the gradients."""
    none = RowOrder(torch.empty(0, dtype=torch.long), torch.full((5, 2), -1), False)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    gathered = grouped_linear(x, weight, (0, 0), gather=none)
    assert gathered.shape == (0, 4)
    down = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    y = grouped_linear(gathered, down, (0, 0), combine=none)
    assert torch.equal(y, torch.zeros(5, 3, dtype=torch.float64))
    for gradient in torch.autograd.grad(y.sum(), (x, weight, down)):
        assert not gradient.any()
