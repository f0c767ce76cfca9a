"""The router's kernels against its definition, and the definition against autograd of a formula that shares
nothing with it: scores, choice, weights, sums, losses, and the gradients of x and W.
"""

import math

import pytest
import torch
from training import FP32, bound, results_of

from kernels import router as kernel
from kernels import triton_
from kernels.router import (
    RouterLosses,
    RoutingRule,
    choose_experts,
    routed_weights,
    router_logits,
    router_statistics,
)

B, S, D = 2, 21, 16
RULES = {
    "softmax": (8, RoutingRule(2)),
    "softmax, as they are": (8, RoutingRule(3, renorm=False, scale=1.5)),
    "one": (5, RoutingRule(1)),
    "60 experts": (60, RoutingRule(4, renorm=False)),
    "all of them": (8, RoutingRule(8)),
    "groups": (12, RoutingRule(3, groups=4, top_groups=2)),
    "groups of five": (15, RoutingRule(5, groups=3, top_groups=2, scale=16.0, renorm=False)),
    "sigmoid": (6, RoutingRule(2, sigmoid=True, scale=2.5)),
    "sigmoid groups": (32, RoutingRule(7, sigmoid=True, groups=8, top_groups=4, scale=2.5)),
    "sigmoid, as they are": (60, RoutingRule(6, sigmoid=True, groups=6, top_groups=3, renorm=False)),
}
LOSSES = {"none": (0.0, 0.0), "aux": (0.3, 0.0), "z": (0.0, 0.1), "both": (0.3, 0.1)}


def inputs(experts: int, dtype: torch.dtype, bias: bool):
    """x [B, S, D], weight [experts, D], bias [experts], counted [B, S], scale, and a gradient for weights."""
    x = torch.randn(B, S, D).to(dtype)
    weight = (torch.randn(experts, D) * 0.5).to(dtype)
    counted = torch.rand(B, S) < 0.7
    counted[0, 3:] = False  # a sequence that hardly counts
    per_expert = torch.linspace(-0.4, 0.4, experts, dtype=torch.float64) if bias else None
    return x, weight, per_expert, counted, torch.tensor(0.125)


def by_autograd(x, weight, index, counted, scale, rule, load, aux_loss, z_loss, dweights):
    """The gradients of x and weight in fp64, with the choice as it is."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = x @ weight.t()
    exponentials = logits.exp()
    scores = exponentials / (1 + exponentials if rule.sigmoid else exponentials.sum(-1, keepdim=True))
    chosen = scores.gather(-1, index)
    weights = rule.scale * (chosen / chosen.sum(-1, keepdim=True) if rule.renorm else chosen)
    total = (weights * dweights.double()).sum()
    shares = scores / scores.sum(-1, keepdim=True)
    factor = scale.double() * counted.double()
    if load is not None:
        total = total + aux_loss * (factor[..., None] * shares * load.double()[:, None]).sum()
    total = total + z_loss * (factor * logits.exp().sum(-1).log() ** 2).sum()
    return weights.detach(), *torch.autograd.grad(total, (x, weight))


def run(x, weight, bias, counted, scale, rule, aux_loss, z_loss, dweights, rows, given=None):
    """Everything that a layer takes from the router. rows: of the load, B or 1; None if it is given. given:
    the choice."""
    logits = router_logits(x, weight)
    choice = choose_experts(logits, rule, bias, counted, given)
    load = counts = None
    if aux_loss and rows is None:
        load = torch.linspace(0.5, 1.5, len(weight), device=x.device)[None]
    elif aux_loss:
        counts = choice.sums.counts if rows == B else choice.sums.counts.sum(0, keepdim=True)
    stats, load = router_statistics(
        choice.sums, scale, aux_loss=aux_loss, z_loss=z_loss, load=load, counts=counts)
    losses = RouterLosses(counted, scale.to(logits.dtype), load, aux_loss, z_loss)
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    weight.main_grad = torch.full(weight.shape, 2.0, dtype=logits.dtype, device=x.device)
    weight.grad_is_written = True
    weights = routed_weights(x, weight, logits, choice, rule, losses)
    weights.backward(dweights)
    assert weight.grad is None
    return choice.index, weights.detach(), choice.sums, stats, load, x.grad, weight.main_grad - 2


@pytest.mark.parametrize("rows", [B, 1, None])
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("name", RULES)
def test_the_formula_is_the_gradient(name, losses, rows):
    experts, rule = RULES[name]
    x, weight, bias, counted, scale = inputs(experts, torch.float64, bias=rule.sigmoid)
    dweights = torch.randn(B, S, rule.top_k, dtype=torch.float64)
    index, weights, _, _, load, dx, dw = run(
        x, weight, bias, counted, scale.double(), rule, *LOSSES[losses], dweights, rows)
    assert (load is not None) == (losses in ("aux", "both"))
    want = by_autograd(x, weight, index, counted, scale, rule, load, *LOSSES[losses], dweights)
    for got, exact in zip((weights, dx, dw), want):
        assert (got - exact).norm() <= 1e-12 * exact.norm() + 1e-14  # of one expert, renormalized, it is 0


@pytest.mark.parametrize("name", ["softmax", "sigmoid groups", "60 experts"])
def test_a_given_choice_has_the_weights_losses_and_gradients_of_the_formula(name):
    """No group, bias or score has a say in it; counts are of the experts that are given."""
    experts, rule = RULES[name]
    x, weight, bias, counted, scale = inputs(experts, torch.float64, bias=True)
    given = torch.rand(B, S, experts).argsort(-1)[..., :rule.top_k]
    dweights = torch.randn(B, S, rule.top_k, dtype=torch.float64)
    index, weights, sums, _, load, dx, dw = run(
        x, weight, bias, counted, scale.double(), rule, *LOSSES["both"], dweights, B, given)
    assert torch.equal(index, given)
    is_counted = counted[..., None].double().expand(given.shape)
    hits = torch.zeros(B, S, experts, dtype=torch.float64).scatter(-1, given, is_counted)
    assert torch.equal(sums.counts, hits.sum(1))
    want = by_autograd(x, weight, given, counted, scale, rule, load, *LOSSES["both"], dweights)
    for got, exact in zip((weights, dx, dw), want):
        assert (got - exact).norm() <= 1e-12 * exact.norm()


def with_learned_bias(x, weight, dtype, device):
    """The formula's x and weight have one more column, of ones and of the biases."""
    bias = torch.linspace(-1, 1, len(weight)).to(dtype)
    exact = torch.cat((x, x.new_ones(B, S, 1)), -1), torch.cat((weight, bias[:, None]), 1)
    kept = bias.to(device, copy=True).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    kept.main_grad = torch.full(kept.shape, 2.0, dtype=wide, device=device)
    kept.grad_is_written = True
    return kept, *exact


def learned_bias(name, dtype, device, rtol):
    experts, rule = RULES[name]
    x, weight, bias, counted, scale = inputs(experts, dtype, bias=rule.sigmoid)
    logit_bias, longer_x, longer_weight = with_learned_bias(x, weight, dtype, device)
    x, weight, bias, counted, scale = (
        None if t is None else t.to(device) for t in (x, weight, bias, counted, scale))
    logits = router_logits(x, weight, logit_bias)
    choice = choose_experts(logits, rule, bias, counted)
    load = torch.linspace(0.5, 1.5, experts, dtype=logits.dtype, device=device)[None]
    losses = RouterLosses(counted, scale.to(logits.dtype), load, *LOSSES["both"])
    x, weight = x.requires_grad_(), weight.requires_grad_()
    dweights = torch.randn(B, S, rule.top_k).to(logits.dtype)
    weights = routed_weights(x, weight, logits, choice, rule, losses, logit_bias=logit_bias)
    weights.backward(dweights.to(device))
    want, dx, dw = by_autograd(
        longer_x, longer_weight, choice.index.cpu(), counted.cpu(), scale.cpu(), rule, load.cpu(),
        *LOSSES["both"], dweights)
    found = weights, logit_bias.main_grad - 2, x.grad, weight.grad
    assert logit_bias.grad is None
    for got, exact in zip(found, (want, dw[:, -1], dx[..., :-1], dw[:, :-1])):
        assert (got.cpu().double() - exact).norm() <= rtol * exact.norm() + 1e-14


@pytest.mark.parametrize("name", RULES)
def test_a_learned_bias_of_the_logits(name):
    learned_bias(name, torch.float64, "cpu", 1e-12)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_triton_with_a_learned_bias(interpreted, small_tiles, dtype, rtol):
    learned_bias("softmax", dtype, interpreted, rtol)


@pytest.mark.parametrize("name", RULES)
def test_sums_over_counted_tokens_are_those_by_hand(name):
    experts, rule = RULES[name]
    x, weight, bias, counted, scale = inputs(experts, torch.float64, bias=True)
    choice = choose_experts(router_logits(x, weight), rule, bias, counted)
    logits = x @ weight.t()
    for b in range(B):
        counts, shares = [0] * experts, torch.zeros(experts, dtype=torch.float64)
        squares = entropy = 0.0
        for t in range(S):
            if not counted[b, t]:
                continue
            for e in choice.index[b, t].tolist():
                counts[e] += 1
            own = torch.special.expit(logits[b, t]) if rule.sigmoid else logits[b, t].softmax(0)
            own = own / own.sum()
            shares += own
            squares += float(logits[b, t].exp().sum().log()) ** 2
            entropy -= float((own * own.log()).sum())
        assert choice.sums.counts[b].tolist() == counts
        assert torch.allclose(choice.sums.shares[b], shares, rtol=1e-12)
        assert torch.allclose(choice.sums.squares[b], torch.tensor(squares, dtype=torch.float64), rtol=1e-12)
        assert torch.allclose(choice.sums.entropy[b], torch.tensor(entropy, dtype=torch.float64), rtol=1e-12)


# ---- Triton ----

@pytest.fixture
def small_tiles(monkeypatch):
    """Several programs a sequence, and several tiles a program: 21 tokens in tiles of 2, 3 programs for 2
    sequences, so some program has an incomplete tile and one has more tiles than another."""
    monkeypatch.setattr(kernel, "MAX_TOKENS", 2)
    monkeypatch.setattr(kernel, "PROGRAMS", 1)


@pytest.mark.slow(core=["one-dtype0-2"])
@pytest.mark.parametrize("rows", [B, 1, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_triton_is_the_reference(interpreted, monkeypatch, small_tiles, name, dtype, rows):
    experts, rule = RULES[name]
    losses = LOSSES["both" if len(name) % 2 else "aux"]
    given = [None if t is None else t.to(interpreted) for t in inputs(experts, dtype, bias=rule.sigmoid)]
    dweights = torch.randn(B, S, rule.top_k, device=interpreted)
    got = run(*given, rule, *losses, dweights, rows)
    monkeypatch.setattr(triton_, "DEVICES", ())
    want = run(*given, rule, *losses, dweights, rows)

    assert torch.equal(got[0].sort(-1).values, want[0].sort(-1).values)
    assert torch.equal(got[0], want[0])  # from the best down
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-7)
    assert torch.equal(got[2].counts, want[2].counts)
    assert losses[0]  # there is a load
    for ours, theirs in (*zip(got[2], want[2]), *zip(got[3:5], want[3:5])):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for ours, theirs, bound in ((got[5], want[5], 1e-5 if dtype == torch.float32 else 5e-3),
                                (got[6], want[6], 2e-5)):  # in 16 bits twice: nearly fp32
        assert ours.dtype == theirs.dtype
        assert (ours.double() - theirs.double()).norm() <= bound * theirs.double().norm()


def test_triton_adds_to_nothing_in_two_ways(interpreted):
    """A plain weight gets its gradient through autograd; jitter makes x fp32 beside a weight in bf16."""
    for x_dtype in (torch.bfloat16, torch.float32):
        x, weight, *_ = inputs(8, torch.bfloat16, bias=False)
        x = x.to(interpreted, x_dtype).requires_grad_()
        weight = weight.to(interpreted).requires_grad_()
        rule, dweights = RoutingRule(2), torch.randn(B, S, 2, device=interpreted)
        logits = router_logits(x, weight)
        choice = choose_experts(logits, rule)
        assert choice.sums is None
        routed_weights(x, weight, logits, choice, rule).backward(dweights)
        counted = torch.zeros(B, S, dtype=torch.bool, device=interpreted)
        zero = torch.zeros((), device=interpreted)
        want = by_autograd(x, weight, choice.index, counted, zero, rule, None, 0.0, 0.0, dweights)
        assert x.grad.dtype == x_dtype and weight.grad.dtype == torch.bfloat16
        for got, exact in zip((choice.weights, x.grad, weight.grad), want):
            assert (got.double() - exact).norm() <= 5e-3 * exact.norm()


def test_the_lowest_number_of_equals_is_chosen(interpreted):
    logits = torch.zeros(1, 3, 12, device=interpreted)
    logits[0, 1, 5] = logits[0, 1, 9] = logits[0, 1, 7] = 1.0
    index = choose_experts(logits, RoutingRule(4)).index
    assert index.tolist() == [[[0, 1, 2, 3], [5, 7, 9, 0], [0, 1, 2, 3]]]
    index = choose_experts(logits, RoutingRule(3, groups=3, top_groups=1)).index
    assert index.tolist() == [[[0, 1, 2], [5, 7, 4], [0, 1, 2]]]
    index = choose_experts(logits, RoutingRule(3, sigmoid=True, groups=3, top_groups=1)).index
    assert index.tolist() == [[[0, 1, 2], [5, 7, 4], [0, 1, 2]]]


@pytest.mark.parametrize("rule", [
    RoutingRule(3),
    RoutingRule(3, groups=2, top_groups=1),
    RoutingRule(3, sigmoid=True),
    RoutingRule(3, sigmoid=True, groups=2),
], ids=str)
def test_a_nan_is_chosen_and_breaks_nothing_else(interpreted, rule):
    """As torch.topk does: so the loss becomes NaN, and the step is skipped. Numbers of experts stay valid."""
    logits = torch.randn(1, 4, 10, device=interpreted)
    logits[0, 1, 6] = float("nan")
    logits[0, 2] = float("nan")
    index, weights, _ = choose_experts(logits, rule)
    assert ((index >= 0) & (index < 10)).all()
    assert all(len(set(row)) == 3 for row in index[0].tolist())
    assert weights[0, 1].isnan().any() and weights[0, 2].isnan().all()
    assert weights[0, [0, 3]].isfinite().all()


@pytest.mark.slow
def test_the_same_bits_every_time(interpreted, small_tiles):
    experts, rule = RULES["sigmoid groups"]
    given = [t.to(interpreted) for t in inputs(experts, torch.bfloat16, bias=True)]
    dweights = torch.randn(B, S, rule.top_k, device=interpreted)
    first, second = (run(*given, rule, 0.3, 0.1, dweights, B) for _ in range(2))
    for a, b in zip(first, second):
        assert all(torch.equal(u, v) for u, v in (zip(a, b) if isinstance(a, tuple) else [(a, b)]))


@pytest.mark.parametrize("name", ["softmax", "sigmoid groups", "groups of five"])
def test_the_kernel_takes_a_given_choice(interpreted, small_tiles, name):
    """As the definition; its own choice, given again, leaves every bit."""
    experts, rule = RULES[name]
    x, weight, bias, counted, _ = (t.to(interpreted) for t in inputs(experts, torch.float32, bias=True))
    logits = router_logits(x, weight)
    own = choose_experts(logits, rule, bias, counted)
    again = choose_experts(logits, rule, bias, counted, own.index)
    assert all(map(torch.equal, (*own[:2], *own.sums), (*again[:2], *again.sums)))
    given = torch.rand(B, S, experts).argsort(-1)[..., :rule.top_k].to(interpreted)
    found = choose_experts(logits, rule, bias, counted, given)
    want = choose_experts(logits.double(), rule, bias, counted, given)
    assert torch.equal(found.index, given) and torch.equal(found.sums.counts.double(), want.sums.counts)
    assert torch.allclose(found.weights.double(), want.weights, rtol=1e-5)


# ---- at the sizes of training ----

AUX_LOSS, Z_LOSS = 0.3, 0.1  # large: their gradients count as much as those of the weights
TWO_HALVES = 2.0**-16  # of a number in fp32 that a product reads as two in bf16


def rule_at_training_sizes(training, kind):
    """Mixtral's, and DeepSeek-V3's."""
    if kind == "softmax":
        return RoutingRule(training.top_k)
    groups = min(8, training.experts // 2)
    return RoutingRule(training.top_k, sigmoid=True, groups=groups, top_groups=groups // 2, scale=2.5)


@pytest.mark.gpu("router.router_kernel", "router.statistics_kernel")
@pytest.mark.parametrize("kind", ["softmax", "sigmoid groups"])
def test_choice_at_training_sizes(training, kind):
    """No two logits of a token are near each other, nor are two of its groups: rounding decides nothing."""
    rule, device, experts = rule_at_training_sizes(training, kind), training.device, training.experts
    shape = training.batch, training.seq, rule.groups, experts // rule.groups
    rank_of_group = torch.rand(shape[:3], device=device).argsort(-1)[..., None]
    rank_in_group = torch.rand(shape, device=device).argsort(-1)
    logits = (rank_of_group + 0.9 * rank_in_group / shape[-1] - 0.4 * rule.groups).flatten(-2)
    group = torch.arange(experts, device=device) // shape[-1]
    bias = 2.0 * (group % 3 == 1).double() if rule.sigmoid else None
    counted = torch.rand(shape[:2], device=device) < 0.8
    scale = torch.tensor(0.125, device=device)

    def results(logits):
        index, weights, sums = choose_experts(logits, rule, bias, counted)
        stats, load = router_statistics(sums, scale, aux_loss=AUX_LOSS, z_loss=Z_LOSS, counts=sums.counts)
        return {"index": index, "weights": weights, "stats": stats, "load": load} | sums._asdict()

    few, many = bound(8, experts, FP32), bound(8, experts + training.tokens, FP32)
    rounded = {"weights": few, "load": few, "stats": many, "shares": many, "squares": many, "entropy": many}
    training.check(
        lambda: results(logits), lambda: results(logits.double()), {"index": 0.0, "counts": 0.0} | rounded
    )


@pytest.mark.gpu("router.router_backward_kernel")
@pytest.mark.parametrize("kind", ["softmax", "sigmoid groups"])
def test_gradients_at_training_sizes(training, kind):
    """The choice is given: rounding of x W^T may not change it."""
    rule, device, experts = rule_at_training_sizes(training, kind), training.device, training.experts
    tokens = training.batch, training.seq
    x = training.randn(*tokens, training.hidden)
    weight = training.randn(experts, training.hidden) / math.sqrt(training.hidden)
    index = torch.rand(*tokens, experts, device=device).argsort(-1)[..., : rule.top_k].contiguous()
    dweights = torch.randn(*tokens, rule.top_k, device=device)
    load = torch.rand(training.batch, experts, device=device) + 0.5
    counted = torch.rand(tokens, device=device) < 0.8
    scale = torch.tensor(0.125, device=device)
    losses = RouterLosses(counted, scale, load, AUX_LOSS, Z_LOSS)

    def ours():
        logits = router_logits(x, weight)
        choice = kernel.RouterChoice(index, torch.zeros_like(dweights), None)
        weights = lambda x, weight: routed_weights(x, weight, logits, choice, rule, losses)
        return {"logits": logits} | results_of(weights, {"x": x, "w": weight}, (dweights,), ("w",))

    def definition():
        _, dx, dw = by_autograd(x, weight, index, counted, scale, rule, load, AUX_LOSS, Z_LOSS, dweights)
        return {"logits": x.double() @ weight.double().t(), "dx": dx, "dw": dw}

    training.check(ours, definition, {
        "logits": bound(0, training.hidden),
        "dx": bound(1, 2 * experts) + TWO_HALVES,
        "dw": bound(0, training.tokens) + TWO_HALVES,
    })
