"""AdamW against torch.optim.AdamW, and what a skipped step leaves."""

import pytest
import torch
from training import BF16, FP32, bound

from kernels import adam
from kernels.adam import AdamWStep, adamw, adamw_bf16_states, adamw_reference
from kernels.rounding import ElementIndex, salt

HYPER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
YES, ONE = torch.tensor(True), torch.tensor(1.0)


def numbers(step, grad_scale, is_good=YES):
    return AdamWStep(step=step, grad_scale=grad_scale, is_good=is_good, **HYPER)


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("form", ["picked", "reference"])
def test_five_steps(dtype, bound, form, monkeypatch):
    monkeypatch.setattr(adam, "BLOCK", 64)  # several blocks, the last one short
    param = torch.randn(150, dtype=dtype)
    theirs = param.clone().requires_grad_()
    m, v, low = torch.zeros_like(param), torch.zeros_like(param), param.bfloat16()
    optim = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        theirs.grad = torch.randn_like(param)
        factor = torch.tensor(0.25 if step % 2 else 1.0, dtype=dtype)
        grad = theirs.grad / factor
        kept = grad.clone()
        if form == "picked":
            adamw(param, grad, m, v, numbers(step, factor), weight_copy=low)
            assert torch.equal(low, param.bfloat16())
        else:
            adamw_reference(param, grad, m, v, numbers(step, factor, YES))
        assert torch.equal(grad, kept)  # the gradient is read, not changed
        optim.step()
    torch.testing.assert_close(param, theirs.detach(), rtol=bound, atol=bound)
    torch.testing.assert_close(v, optim.state[theirs]["exp_avg_sq"], rtol=bound, atol=bound)


@pytest.mark.parametrize("form", ["picked", "reference"])
def test_a_skipped_step_changes_nothing(form):
    before = [torch.randn(10), torch.rand(10), torch.rand(10), torch.randn(10).bfloat16()]
    param, m, v, low = (t.clone() for t in before)
    grad = torch.full((10,), float("nan"))
    skipped = numbers(3, torch.tensor(float("nan")), is_good=torch.tensor(False))
    if form == "picked":
        adamw(param, grad, m, v, skipped, weight_copy=low)
    else:
        adamw_reference(param, grad, m, v, skipped)
    assert all(torch.equal(a, b) for a, b in zip((param, m, v, low), before))


def test_nothing_to_update():
    """A rank may own no element of a bucket: the call is one, and the tensors stay as they are."""
    empty = [torch.zeros(0) for _ in range(5)]
    adamw(*empty[:4], numbers(1, ONE), weight_copy=empty[4])
    assert [tensor.shape for tensor in empty] == [(0,)] * 5
    assert torch.equal(ONE, torch.tensor(1.0)) and bool(YES)


@pytest.mark.parametrize("low_dtype", [None, torch.bfloat16, torch.float16])
def test_triton(interpreted, monkeypatch, low_dtype):
    monkeypatch.setattr(adam, "GPU_BLOCK", 64)
    param, m, v = (t.to(interpreted) for t in (torch.randn(150), torch.randn(150), torch.rand(150)))
    low = None if low_dtype is None else torch.empty(150, dtype=low_dtype, device=interpreted)
    want = [t.clone() for t in (param, m, v)]
    for step in (1, 7):
        grad, factor, ok = (
            torch.randn(150, device=interpreted),
            torch.tensor(0.3, device=interpreted),
            torch.tensor(True, device=interpreted),
        )
        adamw(param, grad, m, v, numbers(step, factor, ok), weight_copy=low)
        adamw_reference(want[0], grad, *want[1:], numbers(step, factor, ok))
    for a, b in zip((param, m, v), want):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert low is None or torch.equal(low, param.to(low_dtype))
    before = [t.clone() for t in (param, m, v)]
    adamw(param, torch.full_like(param, torch.nan), m, v, numbers(8, factor, ~ok), weight_copy=low)
    assert all(torch.equal(a, b) for a, b in zip((param, m, v), before))


@pytest.mark.slow(every=4)
@pytest.mark.parametrize(
    "place", [ElementIndex(3, 0, 1, 1), ElementIndex(salt(1, 1, "w"), 500, 10, 64, 7)], ids=str
)
@pytest.mark.parametrize("low_dtype", [None, torch.float16])
def test_triton_with_states_in_bf16(interpreted, monkeypatch, low_dtype, place):
    """As the definition: but for the last bit of fp32, which turns one rounding in 65,536."""
    monkeypatch.setattr(adam, "GPU_BLOCK", 64)
    state = [t.to(interpreted).bfloat16() for t in (torch.randn(150), torch.randn(150), torch.rand(150))]
    want, low = (
        [t.clone() for t in state],
        None if low_dtype is None else torch.empty(150, dtype=low_dtype, device=interpreted),
    )
    factor, ok = torch.tensor(0.3, device=interpreted), torch.tensor(True, device=interpreted)
    for step in (1, 7):
        grad = torch.randn(150, device=interpreted)
        adamw(
            state[0],
            grad,
            *state[1:],
            numbers(step, factor, ok),
            weight_copy=low,
            element_index=place,
        )
        adamw_bf16_states(want[0], grad, *want[1:], numbers(step, factor, ok), None, place)
        assert all(torch.equal(a, b) for a, b in zip(state, want))
    assert low is None or torch.equal(low, state[0].to(low_dtype))
    adamw(
        state[0],
        torch.full_like(grad, torch.nan),
        *state[1:],
        numbers(8, factor, ~ok),
        weight_copy=low,
        element_index=place,
    )
    assert all(torch.equal(a, b) for a, b in zip(state, want))


def test_states_in_bf16_are_rounded_block_by_block_and_a_skipped_step_changes_nothing(monkeypatch):
    place, factor = ElementIndex(salt(1, 1, "w"), 500, 10, 64, 7), torch.tensor(0.3)
    start, grad = (
        [t.bfloat16() for t in (torch.randn(150), torch.randn(150), torch.rand(150))],
        torch.randn(150),
    )
    whole, blocks, kept = ([t.clone() for t in start] for _ in range(3))
    low = torch.empty(150, dtype=torch.float16)
    adamw(whole[0], grad, *whole[1:], numbers(3, factor), element_index=place, weight_copy=low)
    monkeypatch.setattr(adam, "BLOCK", 64)
    adamw(blocks[0], grad, *blocks[1:], numbers(3, factor), element_index=place)
    adamw(kept[0], torch.full_like(grad, torch.nan), *kept[1:], numbers(3, factor, ~YES), element_index=place)
    assert all(torch.equal(a, b) for a, b in zip(whole, blocks)) and all(
        torch.equal(a, b) for a, b in zip(kept, start)
    )
    assert torch.equal(low, whole[0].half())
    near = [t.float() for t in start]
    adamw_reference(near[0], grad, *near[1:], numbers(3, torch.tensor(0.3), YES))
    for got, x in zip(whole, near):
        assert ((got.float() - x).abs() <= x.abs() / 128).all() and not torch.equal(got, x.bfloat16())


@pytest.mark.gpu("adam.adamw_kernel")
@pytest.mark.parametrize("in_bf16", [False, True])
def test_at_training_sizes(training, in_bf16):
    """A dozen operations in fp32, each rounded. States in bf16 go to one of the two neighbours."""
    n, device = training.params - 13, training.device
    state = [torch.randn(n, device=device), torch.randn(n, device=device), torch.rand(n, device=device)]
    grad = torch.randn(n, device=device)
    if in_bf16:
        state = [x.bfloat16() for x in state]
    names = "param", "exp_avg", "exp_avg_sq"
    factor, ok = torch.tensor(0.5, device=device), torch.tensor(True, device=device)
    hyper = HYPER | {"eps": 1e-3}  # large enough to matter
    step = AdamWStep(step=7, grad_scale=factor, is_good=ok, **hyper)

    def ours():
        param, *moments = (x.clone() for x in state)
        options = {"weight_copy": torch.empty(n, dtype=BF16, device=device)}
        if in_bf16:
            options = {"element_index": ElementIndex(salt=3, base=5, width=n, stride=n)}
        adamw(param, grad, *moments, step, **options)
        return dict(zip(names, (param, *moments))) | {"copy": options.get("weight_copy")}

    def definition():
        param, *moments = (x.double() for x in state)
        adamw_reference(param, grad.double(), *moments, step)
        return dict(zip(names, (param, *moments))) | {"copy": param}

    bounds = dict.fromkeys(names, bound(2) if in_bf16 else bound(12, dtype=FP32))
    training.check(ours, definition, bounds if in_bf16 else bounds | {"copy": bound(1)})
