"""The forecast time of a step: its FLOPs are the model's, its bytes cross the links that a ring crosses,
and it scales as it must.
"""

import math
import statistics
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy.stats import spearmanr

from config import modules_ahead, read_yaml
from config.reading import CONFIG_FOLDER, resolve
from config.reading.schedules import plan_pipeline
from config.tree import with_values
from model.describe import describe_stage
from model.flops import attention_flops, mean_keys
from model.router import has_experts, mixture
from parallel.topology.dims import GROUP_AXES, ParallelDims
from plan import bytes as wire
from plan import cost, published
from plan.count import flops_per_token, parameters
from plan.efficiency import (
    CLASSES,
    GENERATIONS,
    KINDS,
    MEASURED_PAIRS,
    MEASURED_RANGE,
    RELAYED,
    SHARED,
    Class,
    get_class,
    get_efficiency,
)
from plan.job import Job
from plan.parts import records_of_part
from plan.search import make_job

FREE = cost.Efficiency(1, 1, 1, 1, 1, 1, 0, 0, 0)
IDEAL = cost.Cluster(  # nothing but products takes time
    "ideal", {"bf16": 1e15, "fp8": 2e15}, 80e9, 1e30, 8, 1e30, 1e30
)


def build_config(name, **keys):
    words = ["--train.micro_batch", "2", "--train.seq_len", "256", "--train.global_batch", "64"]
    return with_values(resolve(name, None, words), {k.replace("__", "."): v for k, v in keys.items()})


@pytest.mark.parametrize(
    "name",
    ["llama3-8b", "gpt2-large", "mistral-7b", "mixtral-8x7b", "qwen2-57b-a14b", "deepseek-v3", "olmoe-1b-7b"],
)
@pytest.mark.parametrize(
    "keys", [{}, dict(parallel__tp=2, parallel__sp=True), dict(parallel__pp=2, parallel__cp=2)], ids=str
)
def test_the_products_of_all_ranks_are_the_models(name, keys):
    """The record's, of the ranks that share a microbatch, are those of flops_per_token."""
    cfg = build_config(name, **keys)
    even = cfg.model.vocab // 2 * 2  # no padding on two ranks
    cfg = replace(cfg, model=replace(cfg.model, vocab=even, vocab_multiple=1))
    model, train = cfg.model, cfg.train
    ranks = cfg.parallel.tp * cfg.parallel.cp
    parts = describe_stage(cfg, 0, model.layers).parts
    records = [one for part in parts for one in records_of_part(part, train.micro_batch)]
    products = ranks * sum(one.forward.work.products + one.backward.work.products for one in records)
    attention = ranks * sum(one.forward.work.attention for one in records)

    # a router's gradients are multiplied as two numbers of 16 bits, by each rank
    routers = sum(has_experts(model, layer) for layer in range(model.layers + modules_ahead(model)))
    tokens = train.micro_batch * train.seq_len
    mlp = mixture(model)
    of_routers = 2 * 2 * tokens * model.hidden * (mlp.experts if mlp else 0) * routers
    assert products - of_routers + 3 * attention == pytest.approx(
        flops_per_token(model, train.seq_len) * tokens, rel=1e-9
    )


def test_a_pipeline_without_exchanges_takes_its_products_and_its_bubble():
    one, n = make_job(build_config("llama3-8b"), 1)
    alone = cost.forecast(one, n, IDEAL, FREE)
    flops = flops_per_token(one.cfg.model, 256) * 64 * 256
    attention = one.cfg.model.layers * attention_flops(one.cfg.model, mean_keys(256, None)) * 64 * 256
    flops += attention / 2  # its backward makes the scores again
    assert alone.step == pytest.approx(flops / 1e15, rel=1e-6)
    assert alone.bubble == 0 and not any(alone.exposed.values())
    four, n = make_job(build_config("llama3-8b", parallel__pp=4, parallel__schedule="1f1b"), 4)
    piped = cost.forecast(four, n, IDEAL, FREE)
    equal_stages = alone.step / 4 * (1 + 3 / 32)  # a bubble of (p - 1) / m
    assert equal_stages <= piped.step < 1.05 * equal_stages
    assert piped.step == pytest.approx(piped.compute + piped.bubble, rel=1e-6)


def test_a_cluster_that_does_all_twice_as_fast_takes_half_the_time():
    c = cost.cluster("h100-ib")
    flops = {dtype: 2 * rate for dtype, rate in c.flops.items()}
    twice = replace(c, flops=flops, hbm=2 * c.hbm, inside=2 * c.inside, between=2 * c.between)
    e = replace(cost.Efficiency(), hop=0, op=0, route=0)
    for name, keys in (
        ("llama3-70b", dict(parallel__tp=8, parallel__sp=True, parallel__pp=4)),
        ("mixtral-8x7b", dict(parallel__ep=8)),
        ("llama3-8b", dict(parallel__cp=4, parallel__zero=3)),
    ):
        job, n = make_job(build_config(name, train__global_batch=128, **keys), 64)
        half = cost.forecast(job, n, c, e).step / 2
        assert cost.forecast(job, n, twice, e).step == pytest.approx(half, rel=1e-9)


def test_what_a_ring_and_an_all_to_all_send_over_each_link():
    c = replace(cost.cluster("h100-ib"), node=4)
    layout = ParallelDims(16, tp=2, ep=8)
    for group in ("tp", "fsdp", "world"):
        ranks = layout.group(0, *GROUP_AXES[group])
        N = len(ranks)
        crosses = sum(a // 4 != b // 4 for a, b in zip(ranks, [*ranks[1:], ranks[0]]))
        inside, between = cost.crossing(layout, c, group=group, verb="all_gather", nbytes=1 << 20)
        assert inside + between == pytest.approx((1 << 20) * (N - 1) / N)
        assert between == pytest.approx((1 << 20) * (N - 1) / N * crosses / N), group
    inside, between = cost.crossing(layout, c, group="ep_etp", verb="all_to_all", nbytes=8)
    assert (inside, between) == (3.0, 4.0)  # itself 1, three in its node, four elsewhere


def test_the_bytes_are_those_that_the_ledger_counts():
    """A step of every microbatch there is (none left out): crossing adds up to plan/bytes.py's ring_bytes."""
    cfg = build_config("llama3-8b", parallel__tp=2, parallel__sp=True, parallel__zero=3,
                       train__micro_batch=16)
    job, n = make_job(cfg, 4)
    assert n == job.schedule.microbatches == 2
    near, far = cost.forecast(job, n, cost.cluster("h100-ib"), cost.Efficiency()).sent
    whole = sum(
        w * (2 if verb == "all_reduce" else 1) * (g - 1) / g
        for (group, verb), (_, w) in wire.step_bytes(job).items()
        for g in [len(job.layout.group(0, *GROUP_AXES[group]))]
    )
    assert far == 0 and near == pytest.approx(whole)


def test_every_exchange_that_cannot_hide_costs_time():
    slow, fast = (replace(cost.cluster("h100-ib"), between=b, inside=b) for b in (1e9, 1e13))
    e = cost.Efficiency()
    for key, value in (("tp", 4), ("cp", 4), ("zero", 1), ("pp", 4), ("zero", 3)):
        job, n = make_job(build_config("llama3-8b", **{f"parallel__{key}": value}), 16)
        assert cost.forecast(job, n, slow, e).step > 1.2 * cost.forecast(job, n, fast, e).step, (key, value)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_sums_and_gathers_share_the_links(zero, microbatches):
    """No step is shorter than all that its links carry for gradients and weights."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        forward, backward, sums, gathers = (float(seconds) for seconds in draw.exponential(size=4))
        exposed = cost.exposed_data_seconds(
            cost.StepTraffic(inside=0.0, between=0.0, sums=sums, gathers=gathers),
            zero=zero,
            microbatches=microbatches,
            num_buckets=10,
            compute=cost.Seconds(forward, backward),
            hidden=1.0,
        )
        computed = microbatches * (forward + backward)
        assert exposed > 0 and computed + exposed >= sums + gathers - 1e-12


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
@pytest.mark.parametrize("links", [1e10, 1e12])
def test_chunks_hide_behind_the_experts_products(num_chunks, links):
    """A layer in which nothing takes time but the experts' products and the exchanges of rows, on links
    that are slow or fast beside them: by hand, from FLOPs and bytes.

    Forward: the first dispatch and the last combine have nothing to hide behind, the others what the experts
    compute. Backward: as many bytes, and twice as many products. The last exchange travels during the last
    weight gradients, after what the link still has to send by then.
    """
    keys = {"parallel__ep": 8, "parallel__ep_chunks": num_chunks}
    cfg = build_config("qwen3-30b-a3b", **keys)
    c = replace(IDEAL, node=8, inside=links, between=links)
    job, _ = make_job(cfg, 8)
    model = cfg.model
    rows = 2 * 256 * model.mlp.top_k
    computes = rows * 3 * 2 * model.hidden * model.mlp.width / 1e15
    travels = rows * model.hidden * 2 * 7 / 8 / links  # one way
    probs = rows * 4 * 7 / 8 / links
    counts = model.mlp.experts * 8 * 7 / 8 / links

    end = travels / num_chunks
    others = 2 * travels - 2 * end
    exposed = 2 * end + max(0.0, others - computes) + probs
    late_grads = computes / num_chunks
    still_to_send = max(0.0, others - (2 * computes - late_grads))
    exposed += end + max(0.0, still_to_send + end - late_grads) + probs
    waits = cost.stage_times(job, 0, 1, c, FREE).waits
    assert waits["ep_etp"] == pytest.approx(model.layers * (exposed + counts), rel=1e-9)


def test_offloading_the_optimizer_takes_the_time_of_its_copies():
    """Master and two moments of AdamW, 12 bytes a parameter, come and go at the same time."""
    cfg = build_config("llama3-8b", parallel__offload="optimizer", parallel__zero=1)
    job, microbatches = make_job(cfg, 8)
    found = cost.forecast(job, microbatches, IDEAL, replace(FREE, host=25e9))
    assert found.optimizer == pytest.approx(12 * parameters(cfg.model)["total"] / 8 / 25e9, rel=1e-3)
    kept = make_job(with_values(cfg, {"parallel.offload": "none"}), 8)[0]
    assert cost.forecast(kept, microbatches, IDEAL, FREE).optimizer < 1e-12


def test_offloaded_activations_wait_for_what_no_computation_hides():
    cfg = build_config("llama3-8b", parallel__zero=1)
    kept, microbatches = make_job(cfg, 8)
    moved, _ = make_job(with_values(cfg, {"parallel.offload": "activations"}), 8)
    times = cost.stage_times(kept, 0, microbatches, IDEAL, FREE)
    record = records_of_part(moved.parts[0][1], 2)[0]
    assert moved.parts[0][1].layer == 0
    copies = cfg.model.layers * record.kept / 1e9
    assert copies > times.f + times.i + times.w

    before = cost.forecast(kept, microbatches, IDEAL, FREE)
    found = cost.forecast(moved, microbatches, IDEAL, replace(FREE, host=1e9))
    waits = microbatches * (2 * copies - times.f - times.i - times.w)
    assert found.step - before.step == pytest.approx(waits, rel=1e-6)
    assert found.exposed["host"] == pytest.approx(waits, rel=1e-6)
    fast = cost.forecast(moved, microbatches, IDEAL, replace(FREE, host=1e18))
    assert fast.step == pytest.approx(before.step) and "host" not in fast.exposed


@pytest.fixture(scope="module")
def judged():
    """[(row, the logarithm of forecast / measured with its class's constants)]."""
    rows = published.rows(("judge",))
    return [(row, row.error(CLASSES[row.of].efficiency)) for row in rows]


def share_off(errors, share):
    return float(np.quantile([abs(math.expm1(error)) for error in errors], share))


def test_forecasts_beside_what_others_have_published(judged):
    """Rows that chose no constant: median and 90th percentile of the errors, and no drift to one side."""
    errors = [error for _, error in judged]
    assert len(errors) == 98
    assert share_off(errors, 0.5) < 0.055 and abs(statistics.median(errors)) < 0.03
    dense = [error for row, error in judged if not mixture(row.job.cfg.model)]
    assert len(dense) == 83 and share_off(dense, 0.5) < 0.05 and share_off(dense, 0.9) < 0.2
    mixtures = [error for row, error in judged if mixture(row.job.cfg.model)]
    assert len(mixtures) == 15 and share_off(mixtures, 0.5) < 0.3 and share_off(mixtures, 0.9) < 0.7


def test_forecasts_rank_the_layouts_of_one_job(judged):
    seconds = [
        (math.exp(error) * row.step, row.step) for row, error in judged if row.group == published.LAYOUTS
    ]
    assert len(seconds) == 21 and spearmanr(*zip(*seconds)).statistic > 0.75


def test_ranges_are_those_of_the_judged_rows(judged):
    for one, fitted in CLASSES.items():
        logs = [-error for row, error in judged if row.of == one]
        assert len(logs) == fitted.rows
        assert fitted.range == pytest.approx(np.exp(np.quantile(logs, [0.1, 0.9])), abs=0.006), str(one)


def test_the_range_in_proportion_to_a_measured_step_is_that_of_judged_pairs(judged):
    constants = {one: fitted.efficiency for one, fitted in CLASSES.items()}
    *found, pairs = published.paired_range([row for row, _ in judged], constants)
    assert found == pytest.approx(MEASURED_RANGE[:2], abs=0.006) and pairs == MEASURED_PAIRS


@pytest.mark.slow
def test_a_class_is_fitted_to_its_rows_to_fit():
    """Judged rows are among those given, and choose nothing."""
    zero3 = Class("ampere", "zero3")
    rows = [row for row in published.rows() if row.of == zero3]
    fitted = published.fit_classes(rows)
    assert {row.use for row in rows} == {"fit", "judge"} and list(fitted) == [zero3]
    for name, value in asdict(CLASSES[zero3].efficiency).items():
        near_zero = 1e-6 if name == "micro" else 0.0  # s
        assert getattr(fitted[zero3], name) == pytest.approx(value, rel=0.03, abs=near_zero), name


def test_classes_are_those_of_the_table():
    rows = published.read_rows()
    assert set(KINDS) <= {row["framework"] for row in rows}
    assert set(GENERATIONS) <= set(read_yaml(CONFIG_FOLDER / "clusters.yaml")["gpus"])
    timed = [row for row in rows if row["use"] in published.TIMED]
    found = {get_class(cost.cluster(row["cluster"]).gpu, row["framework"]) for row in timed}
    assert found == set(CLASSES) and RELAYED <= found


def test_our_own_code_has_the_constants_of_its_chip():
    hopper = get_efficiency(cost.cluster("h200-ib"))
    assert hopper == replace(CLASSES[Class("hopper", "megatron")].efficiency, relayed=False) != SHARED
    assert get_efficiency(cost.cluster("l4-pcie")) == SHARED


def test_a_relayed_token_crosses_to_each_node_once():
    """Two nodes of 8 ranks, and 8 copies of each token: all but 1 in 256 meet the other node, once."""
    inside, between = cost.relayed_bytes((7.0, 8.0), nbytes=16.0, copies=8)
    assert inside == 15.0 and between == pytest.approx(2 * (1 - 0.5**8))
    assert cost.relayed_bytes((7.0, 0.0), nbytes=8.0, copies=8) == (7.0, 0.0)


def test_what_does_not_hide_and_what_a_microbatch_costs():
    assert cost.exposed_seconds(3.0, 5.0, 1.0) == 0.0
    assert cost.exposed_seconds(3.0, 5.0, 0.25) == 2.25
    assert cost.exposed_seconds(8.0, 5.0, 0.9) == 3.0
    job, n = make_job(build_config("llama3-8b", parallel__pp=2), 2)
    c = cost.cluster("h100-ib")
    steps = [cost.forecast(job, n, c, replace(cost.Efficiency(), micro=micro)).step for micro in (0.0, 1e-3)]
    assert steps[1] - steps[0] == pytest.approx(2e-3 * (n + 1), rel=0.01)  # the bubble is one of each


def test_a_job_keeps_enough_microbatches_to_be_steady():
    """Each microbatch that is not simulated adds what the busiest rank computes: exact for equal stages."""
    cfg = build_config("llama3-8b", parallel__pp=4, parallel__stages="8,8,8,8", train__global_batch=256)
    job, n = make_job(cfg, 4)
    assert n == 128 and job.schedule.microbatches == cost.STEADY * 4
    whole = replace(job, schedule=plan_pipeline(cfg, 4), cfg=cfg)
    few, all_of_them = (cost.forecast(j, n, IDEAL, FREE).step for j in (job, whole))
    assert isinstance(whole, Job) and few == pytest.approx(all_of_them, rel=0.01)
