"""parallel.compress_tokens: rows go to their experts in e4m3 with a scale for every 128 channels, and come
home exact. The formula by hand in numpy, and its bound; the same run under every layout, and in one process
that rounds by the formula.
"""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from random_tokens import begin
from ranks import corpus, job

from config import ConfigError
from config.reading.suggestions import check_rules
from config.reading.tiny import tiny_config
from config.tree import with_values
from lab.proof.rounded_rows import error_bound, rounded, rounded_rows
from parallel.expert.bounded import plan_bounded_dispatch
from parallel.expert.coded import CodedRowExchange, decode_rows, encode_rows
from parallel.expert.dispatch import Combine, Dispatch, plan_dispatch
from train import train_step

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---- the formula -------------------------------------------------------------------------------------------


def drawn(kind: str, width: int, dtype: torch.dtype, rows: int = 7) -> torch.Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    if kind == "outliers":
        x[:, ::97] *= 1e4
    elif kind == "zeros":
        x[1:3] = 0
    elif kind == "small":
        x *= 1e-5
    return x.to(dtype)


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "small"])
@pytest.mark.parametrize("width", [1, 32, 128, 200, 384])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_row_arrives_as_the_formula_says(dtype, width, kind):
    x = drawn(kind, width, DTYPES[dtype])
    message = encode_rows(x)
    blocks = math.ceil(width / 128)
    assert message.dtype == torch.uint8
    assert message.shape == (7, width + blocks * (8 if dtype == "fp64" else 4))
    y = decode_rows(message, width, x.dtype)
    assert y.dtype == x.dtype and torch.equal(y, rounded(x))


def test_fp64_rounds_twice():
    """17 (1 + 1e-12) is nearer to 18 than to 16, but 17 in fp32, and of 16 and 18 the even is 16."""
    x = torch.zeros(1, 128, dtype=torch.float64)
    x[0, :2] = torch.tensor([448.0, 17 * (1 + 1e-12)], dtype=torch.float64)
    y = decode_rows(encode_rows(x), 128, x.dtype)
    assert y[0, 1] == 16 and torch.equal(y, rounded(x))


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "small"])
@pytest.mark.parametrize("width", [32, 200, 4096])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_error_is_within_its_bound_and_close_to_it(dtype, width, kind):
    x = drawn(kind, width, DTYPES[dtype], rows=64)
    limit = error_bound(x)
    off = (decode_rows(encode_rows(x), width, x.dtype).double() - x.double()).abs()
    assert (off <= limit).all()
    assert off.max() > 0.7 * limit[off == off.max()].max()


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_what_is_not_finite_is_not_hidden(dtype, sick):
    x = drawn("normal", 384, DTYPES[dtype])
    x[2, 130] = sick
    y = decode_rows(encode_rows(x), 384, x.dtype)
    assert not y[2, 130].isfinite()
    assert y[:, :128].isfinite().all() and y[:, 256:].isfinite().all() and y[[0, 1, 3]].isfinite().all()


def test_no_rows():
    x = torch.empty(0, 200, dtype=torch.bfloat16)
    assert encode_rows(x).shape == (0, 208)
    assert decode_rows(encode_rows(x), 200, x.dtype).shape == x.shape


# ---- there and back ----------------------------------------------------------------------------------------

E, K, D, T = 8, 2, 200, 6


def experts(given, counts, first, part, parts):
    """Expert e multiplies by e + 1; the j-th part of it gives a share of that."""
    x, order, weight = given
    source = torch.arange(len(x)) if order is None else order.source
    factors = torch.arange(first, first + len(counts), dtype=torch.float64) + 1
    factors = factors.repeat_interleave(torch.as_tensor(counts)) * (part + 1) / sum(range(1, parts + 1))
    return torch.zeros_like(x).index_add(0, source, x[source] * (factors * weight)[:, None])


def trip(world, kind, etp, chunks):
    """This rank's outputs and gradients with what they must be; bytes counted, and by hand."""
    ledger = Counter()
    group = world.group_of_rank("ep_etp", [list(range(world.size))], ledger)
    g = torch.Generator().manual_seed(world.rank)
    index = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
    probs = torch.rand(T, K, generator=g, dtype=torch.float64).requires_grad_()
    x = torch.randn(T, D, generator=g, dtype=torch.float64).requires_grad_()
    dy = torch.randn(T, D, generator=g, dtype=torch.float64)
    if kind == "bounded":
        plan = plan_bounded_dispatch(index, E, group, etp, bound=8.0, num_chunks=chunks)
    else:
        capacity = T if kind == "padded" else None
        plan = plan_dispatch(index, E, group, etp, False, capacity, chunks)
    here = E * etp // world.size
    back, first = Combine(plan, None, CodedRowExchange), group.index // etp * here
    for chunk, rows in zip(plan.chunks, Dispatch(x, probs, plan, None, CodedRowExchange).chunks()):
        back.send(experts(rows, chunk.rows_per_expert, first, group.index % etp, etp))
    y = back.tokens()
    made = torch.autograd.grad(y, (x, probs), dy)

    factors = (probs * (index + 1)).sum(1, keepdim=True).detach()
    there, there_dy = rounded(x), rounded(dy)
    d_probs = (there * there_dy).sum(1, keepdim=True) * (index + 1)
    pairs = [(y.detach(), there * factors), (made[0], there_dy * factors), (made[1], d_probs)]
    sent = sum(chunk.counts.num_sent for chunk in plan.chunks)
    assert kind != "routed" or sent == T * K * etp
    nbytes = 2 * sent * (D + 2 * 8) + 2 * sent * D * 8 + 2 * sent * 8 + (kind != "padded") * E * etp * 8
    return pairs, ledger["ep_etp", "all_to_all", "bytes"], nbytes


@pytest.mark.slow(every=5)
@pytest.mark.parametrize("kind", ["routed", "padded", "bounded"])
@pytest.mark.parametrize("size, etp, chunks", [(2, 1, 1), (2, 1, 4), (2, 2, 1), (4, 2, 2), (4, 1, 1)])
def test_there_and_back(ranks, size, etp, chunks, kind):
    """Tokens and the gradients of outputs are rounded once, what returns never; probabilities never."""
    for pairs, counted, nbytes in ranks(size).run(trip, kind, etp, chunks):
        for got, want in pairs:
            assert torch.allclose(got, want, rtol=0, atol=1e-12)
        assert counted == nbytes


# ---- a run -------------------------------------------------------------------------------------------------

STEPS = 3
LAYOUTS = {
    "ep2": (2, dict(ep=2)),
    "chunks recomputed": (2, dict(ep=2, ep_chunks=2, recompute="full")),
    "selective": (2, dict(ep=2, recompute="selective", recompute_parts="core,norm,act")),
    "bound": (2, dict(ep=2, ep_bound=1.25)),
    "etp2": (2, dict(tp=2, etp=2)),
    "zero3": (4, dict(ep=2, zero=3)),
    "ep2 tp2": (4, dict(ep=2, tp=2, zero=1)),
    "ep2 etp2 sp": (4, dict(ep=2, etp=2, tp=2, sp=True, zero=2, ep_bound=8.0, recompute="full")),
    "pp2 zb-v": (4, dict(pp=2, ep=2, schedule="zb-v", zero=1)),
    "pp2 1f1b": (4, dict(pp=2, ep=2)),
    "cp2": (4, dict(cp=2, ep=4)),
}


def laid(parallel, dtype="fp64", coded="fp8"):
    values = {"train.dtype": dtype, "model.dropout": 0.0, "model.hidden": 144}
    cfg = with_values(tiny_config("mixtral-tiny", 4), values)
    return replace(cfg, parallel=replace(cfg.parallel, **parallel, compress_tokens=coded))


def trained(world, cfg):
    """A rank's losses and norms, and its masters."""
    run, data = begin(world, cfg, STEPS)
    values = []
    for step in range(1, STEPS + 1):
        loss, norm, *_ = train_step(run, step, data.microbatches(step - 1))
        values += [float(loss), float(norm)]
    for bucket in run.buckets:
        bucket.weights.wait_unshard()
    return values, [bucket.weights.master.clone() for bucket in run.buckets]


def rounded_in_one_process(world, cfg):
    with rounded_rows(cfg):
        return trained(world, cfg)


@pytest.fixture(scope="module")
def alone(ranks):
    """Values of one process that rounds, and of one that does not."""
    return [ranks(1).run(work, laid({}))[0][0] for work in (rounded_in_one_process, trained)]


@pytest.mark.slow(core=["ep2"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_run_is_that_of_one_process_that_rounds_by_hand(ranks, alone, layout):
    """In fp64, where the layout moves nearly no element to another code."""
    size, parallel = LAYOUTS[layout]
    expected, exact = alone
    for values, _ in ranks(size).run(trained, laid(parallel)):
        assert values == pytest.approx(expected, rel=1e-9)
    assert expected == pytest.approx(exact, rel=1e-2) and expected != pytest.approx(exact, rel=1e-7)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_has_the_same_bits(ranks, recompute, dtype):
    plain = ranks(2).run(trained, laid(dict(ep=2), dtype))
    for one, other in zip(plain, ranks(2).run(trained, laid(dict(ep=2, recompute=recompute), dtype))):
        assert one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def test_a_run_of_train_py_learns_alike(tmp_path):
    """As users start it: 20 steps of mixtral-tiny in bf16 on two ranks, with and without."""
    words = (
        f"mixtral-tiny --data.path {corpus(tmp_path)} --log.dir {tmp_path} --log.every 1 --eval.every none "
        "--train.steps 20 --train.dtype bf16 --train.seq_len 32 --train.global_batch 8 --train.micro_batch 2 "
        "--train.threads 1 --checkpoint.every none --optim.warmup 2 --parallel.ep 2"
    )
    losses = {}
    for name, more in {"plain": "", "coded": "--parallel.compress_tokens fp8"}.items():
        end = job(tmp_path / f"logs-{name}", 2, [*words.split(), *more.split(), "--log.name", name])
        assert end.codes == [0, 0], end.logs
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses[name] = [row["loss"] for row in rows if "loss" in row]
    plain, coded = losses["plain"], losses["coded"]
    assert len(plain) == len(coded) == 20 and coded[-1] < coded[0] - 0.5
    assert all(abs(a - b) < 0.02 for a, b in zip(plain, coded)), (plain, coded)
    assert sum(a != b for a, b in zip(plain, coded)) >= 18


# ---- refusals ----------------------------------------------------------------------------------------------


def test_it_needs_experts():
    cfg = tiny_config("llama3-tiny")
    with pytest.raises(ConfigError, match="^parallel.compress_tokens: compresses rows for experts, and no "):
        check_rules(replace(cfg, parallel=replace(cfg.parallel, compress_tokens="fp8")), 2)
