"""Routers by their definitions, written out: who is chosen, what balance costs, who is turned away, what a
skipped step leaves.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from random_tokens import RandomTokens
from small_runs import check_cache, compute_weights, gradients_of
from steps import watched

import config
from build import build_run
from config.reading import build_tree
from config.reading.tiny import tiny_config
from config.tree import with_values
from model.mlp import MLP
from model.moe import MoE
from model.router import ROUTER_STATS, CapacityConfig, ExpertsConfig, Router, RouterInputs
from parallel.topology.mesh import Mesh
from train import train_step

E, K, D = 8, 3, 12


def build_config(**mlp) -> config.Config:
    """mlp: keys of model.mlp."""
    model = {"hidden": D, "mixer.heads": 2, "mlp": mlp, "vocab": 64}
    return build_tree(config.Config, {"model": model, "train": {"steps": 1, "dtype": "fp64"}})


def router(dtype=torch.float64, **experts) -> Router:
    """experts: keys of model.mlp."""
    r = Router(build_config(kind="experts", experts=E, top_k=K, **experts), Mesh.single(), 0)
    r.weight = torch.nn.Parameter(torch.randn(E, D, generator=torch.Generator().manual_seed(0)).to(dtype))
    return r


def inputs(b=2, s=6, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(b, s, D, generator=g).to(dtype)
    counted = torch.rand(b, s, generator=g) < 0.7
    counted[0, 1:] = False  # a sequence that hardly counts
    return x, RouterInputs(counted, 1 / counted.sum().double(), None)


def compute_scores(r, x):
    logits = x.double() @ r.weight.double().t()
    return logits, logits.softmax(-1) if r.router.scores == "softmax" else logits.sigmoid()


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"router.renorm": False},
        {"router": {"scores": "sigmoid", "scale": 2.5}},
        {"router": {"groups": 4, "group_top_k": 2}},
        {"router": {"scores": "sigmoid", "groups": 2, "group_top_k": 1, "bias_rate": 0.001}},
    ],
    ids=str,
)
def test_who_is_chosen_and_how_much_they_weigh(model):
    r, (x, _) = router(**model), inputs()
    if r.bias is not None:
        r.bias += torch.linspace(-0.3, 0.3, E, dtype=torch.float64)
    index, probs, told = r(x, None)
    assert told is None
    m, (_, scores) = r.router, compute_scores(r, x)
    for i, p, own in zip(index.flatten(0, 1), probs.flatten(0, 1), scores.flatten(0, 1)):
        chooses = own + (0 if r.bias is None else r.bias)
        groups = chooses.view(m.groups, -1)
        rank = [sum(sorted(g.tolist())[-2:]) if m.scores == "sigmoid" else g.max().item() for g in groups]
        best = sorted(range(m.groups), key=lambda g: -rank[g])[: m.group_top_k]
        open_ = [e for e in range(E) if e // (E // m.groups) in best]
        want = sorted(open_, key=lambda e: -chooses[e])[:K]
        assert sorted(i.tolist()) == sorted(want)
        whole = sum(own[e] for e in want) if m.renorm else 1.0
        assert torch.allclose(p, own[i] / whole * m.scale)


@pytest.mark.parametrize(
    "model",
    [
        {"aux.weight": 0.3},
        {"aux.weight": 0.3, "scores": "sigmoid"},
        {"z_loss": 0.1},
        {"aux.weight": 0.3, "z_loss": 0.1},
        {"aux": {"weight": 0.3, "over": "micro"}},
        {"aux": {"weight": 0.3, "over": "global"}},
    ],
    ids=str,
)
def test_the_losses_are_what_they_say(model):
    """Their value, and their gradient for the router's weight and input, beside one of the main loss."""
    r, (x, learn) = router(router=model), inputs()
    m, x = r.router, x.requires_grad_()
    over, weight = (m.aux.over, m.aux.weight) if m.aux else ("sequence", 0.0)
    if r.load is not None:
        r.load.copy_(torch.linspace(0.5, 1.5, E))
    index, probs, told = r(x, learn)
    main = torch.randn(probs.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    got = torch.autograd.grad((probs * main).sum(), (r.weight, x))

    w, y = r.weight.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    logits = y @ w.t()
    scores = logits.softmax(-1) if m.scores == "softmax" else logits.sigmoid()
    share = scores / scores.sum(-1, keepdim=True)
    total, aux, z, counts = learn.counted.sum().double(), 0.0, 0.0, torch.zeros(E, dtype=torch.float64)
    for b in range(2):
        mine = learn.counted[b] if over == "sequence" else learn.counted
        chosen = index[b] if over == "sequence" else index
        hits = torch.stack([(chosen == e).any(-1)[mine].sum() for e in range(E)]).double()
        f = r.load if over == "global" else hits * E / (K * mine.sum())
        aux = aux + weight * (share[b][learn.counted[b]] * f).sum() / total
        z = z + m.z_loss * logits[b][learn.counted[b]].logsumexp(-1).square().sum() / total
    for e in range(E):
        counts[e] = ((index == e).any(-1) & learn.counted).sum()
    chosen = scores.gather(-1, index)
    want = torch.autograd.grad((chosen / chosen.sum(-1, keepdim=True) * main).sum() + aux + z, (w, y))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, want))
    said = dict(zip(ROUTER_STATS, told[E:]))
    assert torch.equal(told[:E], counts) and said["dropped"] == 0
    for name, value in (("aux_loss", aux), ("z_loss", z)):
        assert abs(said[name] - torch.as_tensor(value).detach()) < 1e-12
    p = share[learn.counted]
    assert math.isclose(said["entropy"], float(-(p * p.log()).sum().detach()), rel_tol=1e-12)


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_tokens_over_capacity_are_dropped(drop):
    r, (x, learn) = router(capacity={"factor": 0.9, "drop": drop}), inputs(s=16)
    index, probs, told = r(x, learn)
    free, before, _ = without_capacity(r)(x, learn)
    room, lost = math.ceil(0.9 * 16 * K / E), 0
    for b in range(2):
        taken = [0] * E
        every = [(t, k) for t in range(16) for k in range(K)]
        if drop == "probability":
            every.sort(key=lambda tk: -float(before.detach()[b][tk]))
        for t, k in every:
            e = int(free[b, t, k])
            taken[e] += 1
            kept = taken[e] <= room
            assert (int(index[b, t, k]) == e) == kept
            assert (float(probs[b, t, k]) == float(before[b, t, k])) == kept
            assert kept or (index[b, t, k] == -1 and probs[b, t, k] == 0)
            lost += not kept and bool(learn.counted[b, t])
    assert lost > 0 and told[E + ROUTER_STATS.index("dropped")] == lost
    assert (r(x, None)[0] >= 0).all()  # evaluation drops nothing


def without_capacity(r):
    other = copy.copy(r)
    other.capacity = None
    return other


def test_the_router_computes_in_fp32_from_bf16():
    r, (x, _) = router(torch.bfloat16), inputs(dtype=torch.bfloat16)
    _, probs, _ = r(x, None)
    _, scores = compute_scores(r, x)
    assert probs.dtype == torch.float32
    assert torch.allclose(probs.double().sum(-1), torch.ones(2, 6, dtype=torch.float64), atol=1e-6)
    top = scores.topk(K, -1).values
    assert torch.allclose(probs.double(), top / top.sum(-1, keepdim=True), atol=1e-6)


# ---- whole steps -------------------------------------------------------------------------------------------


def made(name, micro_batch=None, **experts):
    """experts: keys of model.mlp."""
    cfg = with_values(tiny_config(name), {"model.layers": 2} | {
        f"model.mlp.{key}": value for key, value in experts.items()})
    if micro_batch:
        cfg = with_values(cfg, {"train.micro_batch": micro_batch})
    return build_run(cfg, Mesh.single(), torch.device("cpu"), None, 10), RandomTokens(cfg, 0, 1)


def first_gradients(run, data):
    kept = {}

    def grads_ready():
        kept.update({key: part.clone() for key, part in gradients_of(run).items()})

    train_step(watched(run, grads_ready), 1, data.microbatches(0))
    return kept


@pytest.mark.parametrize(
    "name, changes",
    [
        ("mixtral-tiny", {}),
        ("dots1-tiny", {}),
        ("mixtral-tiny", {"capacity": CapacityConfig(factor=1.0)}),
        ("olmoe-tiny", {"router.aux.over": "global"}),
    ],
    ids=str,
)
def test_the_size_of_microbatches_changes_no_gradient(name, changes):
    one, many = (first_gradients(*made(name, n, **changes)) for n in (8, 1))
    for key, g in one.items():
        assert torch.allclose(g, many[key], rtol=1e-9, atol=1e-12), key


def test_a_balance_over_a_microbatch_depends_on_its_size():
    keys = {"router.aux.over": "micro"}
    one, many = (first_gradients(*made("mixtral-tiny", n, **keys)) for n in (8, 1))
    key = "layers.0.mlp.router.weight"
    assert (one[key] - many[key]).abs().max() > 1e-4 * one[key].abs().max()


def test_experts_without_tokens_have_weight_decay_as_any_parameter():
    run, data = made("dots1-tiny", **{"router.groups": 1, "router.group_top_k": 1})
    for r in run.routers.local_routers:
        r.bias[4:] -= 10  # 3 of the first 4 experts are chosen
    before = {key: part.clone() for key, part in compute_weights(run).items()}
    kept, after = first_gradients(run, data), compute_weights(run)
    o, lr = run.cfg.optim, run.learning_rate(1)
    for e in range(8):
        key = f"layers.1.mlp.experts.{e}.up.weight"
        assert kept[key].any() == (e < 4)
        assert e < 4 or torch.allclose(after[key], before[key] * (1 - lr * o.weight_decay), rtol=1e-12)
    for r in run.routers.local_routers:
        want = torch.full_like(r.bias[4:], -10 + run.cfg.model.mlp.router.bias_rate)
        assert torch.allclose(r.bias[4:], want)


@pytest.mark.parametrize("name", ["dots1-tiny", "qwen3-moe-tiny"])
def test_a_router_that_sees_nan_skips_the_step_and_changes_nothing(name):
    run, data = made(name)
    block = run.stages[0].blocks[1]
    block.mlp.router.weight.data[2] = float("nan")

    def state():
        return [*(b.weights.master for b in run.buckets), *(t for _, t in run.routers.boxes())]

    kept = [t.clone() for t in state()]
    _, norm, ok, _ = train_step(run, 1, data.microbatches(0))
    assert not ok and norm.isnan()
    for before, now in zip(kept, state()):
        torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)


def test_biases_move_against_the_load_and_loads_are_kept():
    run, data = made("dots1-tiny")
    train_step(run, 1, data.microbatches(0))
    for r, told in zip(run.routers.local_routers, run.routers.stats):
        counts = told[:8]
        assert torch.equal(r.bias, 0.01 * torch.sign(counts.mean() - counts))
        assert counts.sum() == 3 * sum(b.num_counted() for b in data.microbatches(0))
    run, data = made("qwen3-moe-tiny")
    train_step(run, 1, data.microbatches(0))
    for r, told in zip(run.routers.local_routers, run.routers.stats):
        assert torch.allclose(r.load, told[:8] * 8 / told[:8].sum()) and r.load.sum() == pytest.approx(8)


def test_in_generation_routing_looks_at_no_other_token():
    run, _ = made("mixtral-tiny", capacity=CapacityConfig(factor=1.0))
    check_cache(run.stages[0], (0, 5, 6, 12))


def fill(moe: MoE) -> None:
    g = torch.Generator().manual_seed(3)
    for p in moe.parameters():
        p.data = torch.randn(p.spec.shape, generator=g, dtype=torch.float64) * (2 if p.dim() > 1 else 3)


def mixture(**experts) -> MoE:
    """experts: keys of model.mlp."""
    moe = MoE(build_config(kind="experts", experts=6, width=20, **experts), Mesh.single(), 0)
    fill(moe)
    return moe


def check_alike(got, want, leaves):
    """Two outputs and their gradients. leaves: (ours, theirs, how to bring their gradient into our shape)."""
    dy = torch.randn_like(want)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)
    ours, theirs, turns = zip(*leaves)
    others = torch.autograd.grad(want, theirs, dy)
    for a, b, turn in zip(torch.autograd.grad(got, ours, dy), others, turns):
        assert torch.allclose(a, (turn(b) if turn else b).reshape(a.shape), rtol=1e-9, atol=1e-9)


def test_experts_with_biases_are_those_of_gpt_oss():
    """Forward and every gradient, as transformers computes them from the same numbers."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig

    biased = {"bias": True, "activation": "clamped_swiglu", "router.logit_bias": True}
    moe = mixture(top_k=3, **biased)
    small = GptOssConfig(hidden_size=D, intermediate_size=20, num_local_experts=6, num_experts_per_tok=3)
    theirs = modeling.GptOssMLP(small).double()

    # ours: of each expert gate, then up; theirs: gate and up in turn, and transposed
    e = moe.experts
    matrices, biases = e.gate_up.data.view(6, 2, 20, D), e.gate_up_bias.data.view(6, 2, 20)
    theirs.experts.gate_up_proj.data = matrices.transpose(1, 2).flatten(1, 2).transpose(1, 2).contiguous()
    theirs.experts.gate_up_proj_bias.data = biases.transpose(1, 2).flatten(1).contiguous()
    theirs.experts.down_proj.data = e.down.data.view(6, D, 20).transpose(1, 2).contiguous()
    theirs.experts.down_proj_bias.data = e.down_bias.data.view(6, D).clone()
    theirs.router.weight.data, theirs.router.bias.data = moe.router.weight.data, moe.router.logit_bias.data

    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    got, want = moe(x, None)[0], theirs(x)[0]
    t, transposed = theirs.experts, lambda g: g.transpose(1, 2)
    check_alike(got, want, (
        (x, x, None),
        (moe.router.weight, theirs.router.weight, None),
        (moe.router.logit_bias, theirs.router.bias, None),
        (e.gate_up_bias, t.gate_up_proj_bias, lambda g: g.view(6, 20, 2).transpose(1, 2)),
        (e.down_bias, t.down_proj_bias, None),
        (e.down, t.down_proj, transposed),
    ))


def test_a_score_on_the_input_is_that_of_llama4():
    modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    from transformers import Llama4TextConfig

    moe = mixture(shared={}, router={"scores": "sigmoid", "renorm": False, "weighs": "input"})
    small = Llama4TextConfig(hidden_size=D, intermediate_size=20, num_local_experts=6, num_experts_per_tok=2)
    theirs = modeling.Llama4TextMoe(small).double()
    e, shared = moe.experts, moe.shared_experts
    theirs.experts.gate_up_proj.data = e.gate_up.data.view(6, 40, D).transpose(1, 2).contiguous()
    theirs.experts.down_proj.data = e.down.data.view(6, D, 20).transpose(1, 2).contiguous()
    theirs.router.weight.data = moe.router.weight.data
    gate, up = shared.gate_up.weight.data.chunk(2)
    theirs.shared_expert.gate_proj.weight.data, theirs.shared_expert.up_proj.weight.data = gate, up
    theirs.shared_expert.down_proj.weight.data = shared.down.weight.data

    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    modeling.torch.Tensor.float, narrow = torch.Tensor.double, torch.Tensor.float  # its scores are in fp32
    try:
        want = theirs(x)[0]
    finally:
        modeling.torch.Tensor.float = narrow
    t, transposed = theirs.experts, lambda g: g.transpose(1, 2)
    check_alike(moe(x, None)[0].flatten(0, 1), want, (
        (x, x, None),
        (moe.router.weight, theirs.router.weight, None),
        (e.gate_up, t.gate_up_proj, transposed),
        (e.down, t.down_proj, transposed),
    ))


@pytest.mark.parametrize(
    "gate", [{}, {"scores": "sigmoid", "bias_rate": 0.001, "scale": 2.5}], ids=["softmax", "sigmoid-bias"]
)
def test_a_given_choice_is_computed_and_learned_by_the_formula(gate):
    """The output and all gradients of a mixture, written out: each token and expert that is given, weighted
    by the scores of the present logits. The bias has no say in the weights."""
    moe = mixture(router=gate)
    moe.router.weight.data *= 0.02  # no expert that is given has a score near 0
    x = torch.randn(2, 6, D, dtype=torch.float64, requires_grad=True)
    experts, top_k = moe.num_experts, moe.router.top_k
    given = torch.rand(2, 6, experts).argsort(-1)[..., :top_k]
    if moe.router.bias is not None:
        moe.router.bias += torch.linspace(-0.3, 0.3, experts, dtype=torch.float64)
    learn = RouterInputs(torch.ones(2, 6, dtype=torch.bool), 1.0, None, {0: given})
    assert not torch.equal(moe.router(x, replace(learn, chosen=None))[0], given)
    y, stats = moe(x, learn)
    assert torch.equal(stats[:experts], torch.bincount(given.flatten(), minlength=experts).double())

    own = {name: param.detach().clone().requires_grad_() for name, param in moe.named_parameters()}
    z = x.detach().clone().requires_grad_()
    logits = z @ own["router.weight"].t()
    scores = logits.sigmoid() if gate else logits.exp() / logits.exp().sum(-1, keepdim=True)
    chosen = scores.gather(-1, given)
    weights = gate.get("scale", 1.0) * chosen / chosen.sum(-1, keepdim=True)
    want = torch.zeros_like(z)
    matrices = [own[f"experts.{name}"].unflatten(0, (experts, -1)) for name in ("gate_up", "down")]
    for choice in range(top_k):
        gate_up, down = (matrix[given[..., choice]] for matrix in matrices)
        halves = torch.einsum("bsd,bsfd->bsf", z, gate_up).chunk(2, -1)
        inner = torch.nn.functional.silu(halves[0]) * halves[1]
        want = want + weights[..., choice, None] * torch.einsum("bsf,bsdf->bsd", inner, down)
    leaves = [(moe.get_parameter(name), other, None) for name, other in own.items()]
    check_alike(y, want, [(x, z, None), *leaves])


@pytest.mark.parametrize("weighs", ["output", "input"])
def test_biases_of_rows_that_are_padded_or_dropped(weighs):
    """With a capacity, as without one whose experts all have room; and what is turned away adds no bias."""
    more = {"bias": True, "router": {"weighs": weighs, "logit_bias": True}}
    free, roomy = mixture(**more), mixture(**more, capacity={"factor": 3.0, "pad": True})
    x = torch.randn(2, 6, D, dtype=torch.float64)
    learn = RouterInputs(torch.ones(2, 6, dtype=torch.bool), 1.0, None)
    same = [(a, b, None) for a, b in zip(roomy.parameters(), free.parameters(), strict=True)]
    check_alike(roomy(x, learn)[0], free(x, learn)[0], same)

    tight, padded = (mixture(**more, capacity={"factor": 0.5, "pad": pad}) for pad in (False, True))
    assert torch.allclose(tight(x, learn)[0], padded(x, learn)[0], atol=1e-9)
    index, probs, _ = tight.router(x, learn)
    assert (index < 0).any()
    no_place = (index < 0).all(-1)
    assert not tight(x, learn)[0][no_place].any()


def test_a_mixture_of_one_expert_is_an_mlp():
    """One expert, always chosen with probability one: the dense block's output, from the same weights."""
    cfg = build_config(width=20)
    mix = replace(cfg, model=replace(cfg.model, mlp=ExpertsConfig(experts=1, top_k=1, width=20)))
    torch.manual_seed(0)
    dense, moe = MLP(cfg, Mesh.single(), 0), MoE(mix, Mesh.single(), 0)
    inner, down = torch.randn(40, D, dtype=torch.float64), torch.randn(D, 20, dtype=torch.float64)
    for p, value in (
        (dense.gate_up.weight, inner),
        (dense.down.weight, down),
        (moe.experts.gate_up, inner),
        (moe.experts.down, down),
        (moe.router.weight, torch.randn(1, D, dtype=torch.float64)),
    ):
        p.data = value
    x = torch.randn(2, 5, D, dtype=torch.float64)
    assert torch.allclose(moe(x, None)[0], dense(x), atol=1e-12)
