"""Each optimizer beside its paper's rule over whole tensors. That layouts change nothing is verify's."""

import heapq
import itertools
import random
from collections import defaultdict

import pytest
import torch
from paper_rules import RULES, Update, adamw

from build import build_run
from config import OPTIMIZERS
from config.reading.tiny import tiny_config
from config.tree import with_values
from optim.muon_exchange import assign_owners, plan_matrix_exchange
from parallel.sharding.boxes import Box, check_tiling
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh

STEPS, LR, DECAY = 20, 0.01, 0.1
OF_MATRICES = ("dion", "muon", "normuon")  # AdamW on the rest


def forecast_run(name, groups=None, **optim):
    keys = {f"optim.{key}": value for key, value in optim.items()}
    keys |= {"optim.name": name, "optim.weight_decay": DECAY, "optim.eps": 1e-8, "train.dtype": "fp64"}
    keys["optim.groups"] = groups
    cfg = with_values(tiny_config("llama3-tiny"), keys)
    return build_run(cfg, Mesh.single(), torch.device("cpu"), None, 10)


def trained(name, groups=None, **optim):
    """(start, gradients of each step, end, run): {key: whole tensor} of a tiny model in fp64 under our
    optimizer, with made-up gradients.
    """
    run = forecast_run(name, groups, **optim)
    trained = [b for b in run.buckets if b.trains]
    whole = lambda flat, buckets=run.buckets: {
        box.key: part.clone() for b in buckets for box, part in get_boxes(b, flat(b))
    }
    start, grads, stream = whole(lambda b: b.weights.master), [], torch.Generator().manual_seed(3)
    for step in range(1, STEPS + 1):
        for b in run.buckets:
            b.grads.local.normal_(generator=stream)
        grads.append({k: g * 0.5 for k, g in whole(lambda b: b.grads.local, trained).items()})
        run.optim.step(step, LR, torch.tensor(0.5, dtype=torch.float64), torch.tensor(True))
    return start, grads, whole(lambda b: b.weights.master), run


def first_states(name):
    """{key: {moment: tensor}} of the moments that do not begin at 0: Dion's Q."""
    run, states = forecast_run(name), defaultdict(dict)
    for moment, flats in run.optim.state().items():
        for b, flat in zip(run.buckets, flats):
            for box, part in get_boxes(b, flat) if flat is not None and flat.any() else ():
                states[box.key][moment] = part.clone()
    return states


def rule_of(name, key, w):
    """(rule, how far 20 steps may be from it) of a tensor."""
    if name not in OF_MATRICES:
        return RULES[name], 1e-12
    is_hidden = key.startswith("layers.") and w.dim() == 2
    return (RULES[name], 1e-9) if is_hidden else (adamw, 1e-12)


WAYS = [
    *((name, {}) for name in RULES),
    *((name, {"orthogonalize": "polar-express"}) for name in ("muon", "normuon")),
    *(("dion", {"rank_fraction": fraction}) for fraction in (0.01, 1.0)),
]


@pytest.mark.parametrize("name, optim", WAYS, ids=["-".join(map(str, (n, *o.values()))) for n, o in WAYS])
def test_an_optimizer_follows_the_rule_of_its_paper(name, optim):
    """Muon's, NorMuon's and Dion's on hidden matrices, with AdamW's on the rest."""
    assert RULES.keys() == OPTIMIZERS.keys()
    first = first_states(name)
    start, grads, end, _ = trained(name, **optim)
    assert end.keys() == start.keys()
    for key, w in start.items():
        rule, tolerance = rule_of(name, key, w)
        state = first[key]
        for step, g in enumerate(grads, 1):
            w = rule(w, g[key], state, Update(step, LR, DECAY if w.dim() > 1 else 0.0, **optim))
        torch.testing.assert_close(end[key], w, rtol=tolerance, atol=tolerance, msg=lambda m: f"{key}: {m}")


@pytest.mark.parametrize("name", RULES)
def test_a_group_of_parameters_has_its_own_rate_and_decay(name):
    """The first group that names a parameter counts; the decay is times the group's rate, as in torch."""
    groups = "embedding: lr_factor 0.5, weight_decay 0.3; layers.1.*: lr_factor 2; norm: lr_factor 0"

    def factor_and_decay(key, w):
        if key == "embed.weight":
            return 0.5, 0.3
        if key.startswith("layers.1."):
            return 2.0, DECAY if w.dim() > 1 else 0.0
        return (1.0, DECAY) if w.dim() > 1 else (0.0, 0.0)

    first = first_states(name)
    start, grads, end, _ = trained(name, groups)
    for key, w in start.items():
        factor, decay = factor_and_decay(key, w)
        assert torch.equal(end[key], w) == (factor == 0), key
        if factor == 0:
            continue
        rule, tolerance = rule_of(name, key, w)
        state = first[key]
        for step, g in enumerate(grads, 1):
            w = rule(w, g[key], state, Update(step, factor * LR, decay))
        torch.testing.assert_close(end[key], w, rtol=tolerance, atol=tolerance, msg=lambda m: f"{key}: {m}")


def test_muon_keeps_one_moment_of_hidden_matrices_and_adamws_two_of_the_rest():
    run = forecast_run("muon")
    run.optim.step(1, LR, torch.tensor(1.0, dtype=torch.float64), torch.tensor(True))
    state = run.optim.state()
    is_hidden = [b.is_hidden for b in run.buckets]
    assert [m is not None for m in state["muon_m"]] == is_hidden
    assert [v is None for v in state["adam_v"]] == is_hidden
    keys = {box.key for b in run.buckets if not b.is_hidden for box, _ in get_boxes(b, b.weights.master)}
    assert all("norm" in key for key in keys - {"embed.weight", "head.weight"})


@pytest.mark.parametrize("call", ["step", "update"])  # a GPU updates, whatever is_good says
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(name, call):
    _, _, before, run = trained(name)
    state = {k: [None if f is None else f.clone() for f in flats] for k, flats in run.optim.state().items()}
    for b in run.buckets:
        b.grads.local.fill_(float("nan"))
    getattr(run.optim, call)(STEPS + 1, LR, torch.tensor(float("nan")), torch.tensor(False))
    for b in run.buckets:
        assert all(torch.equal(part, before[box.key]) for box, part in get_boxes(b, b.weights.master))
    for k, flats in run.optim.state().items():
        assert all(f is None or torch.equal(f, g) for f, g in zip(flats, state[k]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_steps_may_be_skipped(name):
    """As in fp16, until the loss scale fits. What then divides by a moment of 0 goes far."""
    run = forecast_run(name)
    stream = torch.Generator().manual_seed(3)
    for step in range(1, 6):
        before = [b.weights.master.clone() for b in run.buckets]
        is_good = step > 2
        for b in run.buckets:
            b.grads.local.normal_(generator=stream)
            b.grads.local.mul_(1.0 if is_good else float("nan"))
        run.optim.step(step, LR, torch.tensor(0.5, dtype=torch.float64), torch.tensor(is_good))
        for b, old in zip(run.buckets, before):
            assert (b.weights.master - old).abs().max() <= (100 * LR if is_good else 0.0)


def test_normuon_keeps_one_second_moment_of_each_row():
    _, _, _, run = trained("normuon")
    checked = 0
    for flat, b in zip(run.optim.state()["normuon_v"], run.buckets):
        for _, values in get_boxes(b, flat) if b.is_hidden else ():
            assert torch.equal(values, values[:, :1].expand_as(values)) and values.min() > 0
            assert len(values[:, 0].unique()) == len(values)
            checked += 1
    assert checked


@pytest.mark.parametrize("name", OF_MATRICES)
def test_a_matrix_without_gradients_stays(name):
    """As of an expert without tokens. Weight decay alone moves it."""
    run = forecast_run(name)
    before = [b.weights.master.clone() for b in run.buckets]
    for step in range(1, 3):
        for b in run.buckets:
            b.grads.local.zero_()
        run.optim.step(step, LR, torch.tensor(1.0, dtype=torch.float64), torch.tensor(True))
    for b, old in zip(run.buckets, before):
        if b.is_hidden:
            torch.testing.assert_close(b.weights.master, old * (1 - LR * DECAY) ** 2, rtol=1e-12, atol=1e-14)


def hidden_parts(run, flats):
    """{key: part} of the hidden matrices, copied; flats: one for each bucket."""
    boxes = [found for b, flat in zip(run.buckets, flats) if b.is_hidden for found in get_boxes(b, flat)]
    return {box.key: part.clone() for box, part in boxes}


def test_dion_moves_what_the_gradients_have_and_keeps_the_rest_of_its_basis():
    """Gradients of rank 2, as of an expert with two tokens, then of any rank."""
    run = forecast_run("dion")
    stream = torch.Generator().manual_seed(3)
    masters = lambda: hidden_parts(run, [b.weights.master for b in run.buckets])
    bases = lambda: hidden_parts(run, run.optim.state()["dion_q"])
    start, first = masters(), bases()
    ranks = {key: -(-min(w.shape) // 4) for key, w in start.items()}
    assert min(ranks.values()) > 2
    for rank_of_gradient in (2, None):
        before, old = masters(), bases()
        for b in run.buckets:
            b.grads.local.normal_(generator=stream)
            for _, part in get_boxes(b, b.grads.local) if b.is_hidden and rank_of_gradient else ():
                part.copy_(part[:, :2] @ part[:2])
        run.optim.step(1, LR, torch.tensor(1.0, dtype=torch.float64), torch.tensor(True))
        new = bases()
        for key, w in masters().items():
            moved, rank = rank_of_gradient or ranks[key], ranks[key]
            change = before[key] * (1 - LR * DECAY) - w
            sizes = torch.linalg.svdvals(change / (LR * 0.2 * max(w.shape) ** 0.5))
            assert sizes[moved - 1] > 1e-3 and sizes[moved:].max() < 1e-9, key
            changed = (new[key] != old[key]).any(1)
            assert changed.tolist() == [row < moved for row in range(len(w))], key
            torch.testing.assert_close(new[key][:moved].norm(dim=1), torch.ones(moved, dtype=w.dtype))
            assert torch.equal(new[key][rank:], first[key][rank:])


def test_every_piece_of_a_matrix_travels_once():
    shapes = {f"m{i}": (64 * (1 + i % 3), 64) for i in range(20)}
    half = lambda key, r: Box(key, shapes[key], (r * shapes[key][0] // 2, 0), (shapes[key][0] // 2, 64))
    owned = [[half(k, r % 2) for k in shapes] for r in range(4)]  # tp 2, dp 2
    alone = [owned[0], owned[1], [], []]
    plans = [plan_matrix_exchange(owned, alone, r) for r in range(4)]
    for r, p in enumerate(plans):
        check_tiling([b for some in (p.kept_here, *p.receive_from) for b in some])
        for o, other in enumerate(plans):
            assert p.send_to[o] == other.receive_from[r] and p.return_to[o] == other.return_from[r]
        returned = [b for some in p.return_from for b in some] + p.kept_here
        assert sorted(map(str, returned)) == sorted(map(str, owned[r]))


def loads(shapes: dict, owner: dict, ranks: int) -> list[int]:
    """m n min(m, n), what a matrix costs, summed over those of each rank, in order of size."""
    costs = [0] * ranks
    for key, (m, n) in shapes.items():
        costs[owner[key]] += m * n * min(m, n)
    return sorted(costs)


@pytest.mark.parametrize("ranks", [2, 3])
def test_muon_assigns_the_dearest_matrices_first(ranks):
    """Graham's rule (1969, "Bounds on multiprocessing timing anomalies"): the dearest first, each to whoever
    has least, costs at most 4/3 - 1/(3 ranks) of the best way, which is found here by trying all. And every
    rank comes to the same answer, in whatever order it learned the shapes.
    """
    stream = random.Random(0)
    for _ in range(15):
        shapes = {f"w{i}": (stream.randint(2, 6), stream.randint(6, 40)) for i in range(6)}
        owner = assign_owners(shapes, ranks)
        rule = [0] * ranks
        for cost in sorted((m * n * min(m, n) for m, n in shapes.values()), reverse=True):
            heapq.heapreplace(rule, rule[0] + cost)
        assert loads(shapes, owner, ranks) == sorted(rule), (shapes, owner)
        ways = (dict(zip(shapes, way)) for way in itertools.product(range(ranks), repeat=len(shapes)))
        best = min(loads(shapes, way, ranks)[-1] for way in ways)
        assert max(rule) <= (4 / 3 - 1 / (3 * ranks)) * best
        assert assign_owners(dict(reversed(shapes.items())), ranks) == owner
