"""The planner's bytes: state against what a rank really holds, activations against the record of a step
(test_record.py holds that against real ones).
"""

import math
from dataclasses import replace

import pytest
import steps
from random_tokens import begin
from tiny_records import get_part_record

from config import OPTIMIZERS, LoraConfig
from config.reading import resolve
from config.reading.tiny import tiny_config
from config.tree import with_values
from model.describe import describe_stage
from plan import memory
from plan.job import make_rank_job
from plan.parts import records_of_part
from plan.record.events import OpBegins
from plan.record.launches import CHIPS
from plan.record.memory import memory_curve
from train import train_step


def nbytes_of(tensors):
    """Bytes of their storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t is not None}
    return sum(storage.nbytes() for storage in storages.values())


def finish_gathers(run):
    for bucket in run.buckets:
        bucket.weights.wait_unshard()


def held(world, cfg):
    """Bytes of a rank's state after a step: ({part: on the device}, in host memory)."""
    run, data = begin(world, cfg)
    train_step(run, 1, data.microbatches(0))
    every = [b for b in run.buckets if b.trains]
    averages = [] if run.ema is None else run.ema.averages
    state = [*averages, *(flat for flats in run.optim.state().values() for flat in flats)]
    state += [tensor for _, tensor in run.optim.boxes()]
    masters = [b.weights.master for b in every if b.weights.master is not b.weights.local]
    host = []
    if every[0].sharding.offload_master:
        host, state, masters = [*(b.weights.master for b in every), *state], [], []
    grads = [(b.grads.local, b.grads.full, b.grads.powersgd and b.grads.powersgd.error) for b in every]
    device = {
        "weights": nbytes_of(
            b.weights.local if b.weights.full is None else b.weights.full for b in run.buckets
        ),
        "masters": nbytes_of(masters),
        "gradients": nbytes_of(tensor for tensors in grads for tensor in tensors),
        "optimizer": nbytes_of(state),
    }
    finish_gathers(run)
    return device, nbytes_of(host)


def laid(name, parallel, **train):
    cfg = tiny_config(name)
    mlp = replace(cfg.model.mlp, width=96)
    cfg = replace(cfg, model=replace(cfg.model, layers=4, hidden=64, mlp=mlp, context=64))
    return replace(
        cfg,
        parallel=replace(cfg.parallel, **parallel),
        train=replace(cfg.train, **{"dtype": "bf16", "seq_len": 64, **train}),
    )


LLAMA, GPT2, MIXTURE = "llama3-tiny", "gpt2-tiny", "mixtral-tiny"
FROZEN = "embedding: lr_factor 0; layers.0.*: lr_factor 0; layers.*.mlp.*: lr_factor 0"
ADAPTERS = LoraConfig(rank=4, targets="*")
BF16_STATES = {"optim.states": "bf16"}
STATES = [
    *((LLAMA, dict(offload="optimizer", zero=z), {}) for z in (0, 3)),
    *((LLAMA, dict(zero=z, **more), {}) for z in range(4) for more in ({}, dict(tp=2), dict(pp=2))),
    *((LLAMA, dict(zero=z, compress="int8", compress_weights="int8"), {}) for z in (1, 3)),
    (LLAMA, dict(compress="powersgd", pp=2), {}),
    *((GPT2, dict(zero=z, pp=2), {}) for z in (1, 3)),
    (MIXTURE, dict(zero=1, ep=2), {}),
    (MIXTURE, dict(zero=3, ep=2, etp=2), {}),
    (MIXTURE, dict(tp=2, ep=4), {}),
    (MIXTURE, dict(zero=2, tp=2, dp_rep=2), {}),
    *((MIXTURE, dict(zero=1, ep=2), {"optim.name": optimizer}) for optimizer in OPTIMIZERS),
    *(
        (LLAMA, parallel, {**BF16_STATES, "train.dtype": dtype})
        for dtype in ("bf16", "fp32", "fp16")
        for parallel in (
            dict(),
            dict(zero=1, tp=2),
            dict(zero=3),
            dict(zero=1, offload="optimizer"),
            dict(zero=2, compress_weights="int8"),
            dict(pp=2, zero=1),
        )
    ),
    *((LLAMA, dict(zero=z, pp=2), {"optim.groups": FROZEN, "train.ema": 0.9}) for z in range(4)),
    (LLAMA, dict(offload="optimizer"), {"optim.groups": FROZEN}),
    *((LLAMA, dict(zero=z, tp=2, sp=z > 0), {"model.lora": ADAPTERS}) for z in range(4)),
    (LLAMA, dict(zero=2, compress_weights="int8"), {"optim.groups": FROZEN}),
    *(
        (LLAMA, parallel, {"optim.states": "8bit"})
        for parallel in (dict(), dict(zero=1, tp=2), dict(zero=3), dict(zero=2, compress_weights="int8"))
    ),
    (MIXTURE, dict(zero=1, ep=2), {"optim.states": "8bit"}),
    (LLAMA, dict(tp=4), {"model.mixer.kv_heads": 2}),
    (LLAMA, dict(tp=4, sp=True, zero=3), {"model.mixer.kv_heads": 2}),
]


@pytest.mark.slow(every=8)
@pytest.mark.parametrize("name, parallel, more", STATES, ids=str)
def test_a_rank_holds_the_state_that_is_planned(ranks, name, parallel, more):
    cfg = with_values(laid(name, parallel), more)
    for rank, state in enumerate(ranks(4).run(held, cfg)):
        job = make_rank_job(cfg, 4, rank)
        assert state == (memory.state_bytes(job), memory.host_bytes(job))


def copied_for_a_rerun(world, cfg):
    """Bytes of a rank that are there to run a step again, when its gradients are summed."""
    run, data = begin(world, cfg)
    seen = []

    def look():
        begun_with = [one for extra in run.extras for one in getattr(extra, "begun_with", ())]
        seen.append(nbytes_of([one.error for one in begun_with if one is not None]))

    train_step(steps.watched(run, look), 1, data.microbatches(0))
    finish_gathers(run)
    return max(seen)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("compress, more", [
    ("powersgd", {"rerun_every": 1}),
    ("powersgd", {"rerun_suspects": True}),
    ("powersgd", {}),
    ("none", {"rerun_every": 1}),
])
def test_a_rerun_of_powersgd_keeps_the_errors_that_it_began_with(ranks, compress, more):
    cfg = laid("llama3-tiny", dict(compress=compress, pp=2), **more)
    for rank, copied in enumerate(ranks(4).run(copied_for_a_rerun, cfg)):
        job = make_rank_job(cfg, 4, rank)
        assert copied == memory.rerun_bytes(job)
        assert bool(copied) == (compress == "powersgd" and bool(more))
        without = make_rank_job(laid("llama3-tiny", dict(compress=compress, pp=2)), 4, rank)
        assert memory.passing_bytes(job) - memory.passing_bytes(without) == copied


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 3, "pp": 2}, {"zero": 1, "offload": "optimizer"}])
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_an_average_of_the_weights_takes_4_bytes_of_each_master(ranks, parallel, states):
    """On the device or in host memory, whatever the masters are."""
    cfg = laid("mixtral-tiny", parallel, ema=0.9)
    cfg = replace(cfg, optim=replace(cfg.optim, states=states))
    plain = replace(cfg, train=replace(cfg.train, ema=None))
    for rank, state in enumerate(ranks(4).run(held, cfg)):
        job, without = make_rank_job(cfg, 4, rank), make_rank_job(plain, 4, rank)
        assert state == (memory.state_bytes(job), memory.host_bytes(job))
        of_moments = 2 * (2 if states == "bf16" else 4)  # of AdamW, an element
        where = memory.host_bytes if "offload" in parallel else lambda j: memory.state_bytes(j)["optimizer"]
        of_masters = (of_moments // 2) if "offload" in parallel else 0  # masters are there, too
        assert where(job) - where(without) == 4 * where(without) // (of_moments + of_masters)


def test_states_in_bf16_are_6_bytes_a_parameter_and_the_masters_the_weights():
    cfg = laid("llama3-tiny", {})
    wide, narrow = (
        memory.state_bytes(make_rank_job(replace(cfg, optim=replace(cfg.optim, states=s)), 1, 0))
        for s in ("fp32", "bf16")
    )
    n = wide["weights"] // 2
    assert wide == {"weights": 2 * n, "masters": 4 * n, "gradients": 4 * n, "optimizer": 8 * n}
    assert narrow == {"weights": 2 * n, "masters": 0, "gradients": 4 * n, "optimizer": 4 * n}


def test_sharding_saves_the_bytes_of_the_zero_paper():
    """State of bf16 weights with fp32 masters and AdamW over 8 ranks: 18 bytes a parameter, 2 + 4 + 12/8, 2 +
    16/8, 18/8.
    """
    jobs = [make_rank_job(laid("llama3-tiny", dict(zero=z)), 8, 0) for z in (0, 1, 2, 3)]
    plain, *sharded = (sum(memory.state_bytes(job).values()) for job in jobs)
    for bytes_, state in zip((6 + 12 / 8, 2 + 16 / 8, 18 / 8), sharded):
        assert state / plain == pytest.approx(bytes_ / 18, rel=1e-9)
    assert sorted(sharded, reverse=True) == sharded


# ---- activations -------------------------------------------------------------------------------------------

SIZE = (
    "--model.vocab 4096 --model.hidden 256 --model.mlp.width 512 --model.layers 8 --model.context 1024 "
    "--train.seq_len 1024 --train.micro_batch 4 --train.global_batch 16 --train.dtype bf16"
).split()
EVERY = {"parallel.recompute": "selective", "parallel.recompute_parts": "core,norm,act"}
SP = {"parallel.tp": 2, "parallel.sp": True}
PP = {"parallel.pp": 2}
BLOCKWISE = {"train.dtype": "fp8", "train.fp8": "blockwise", "train.fp8_keep": 0}
DENSE = [
    {},
    {"train.micro_batch": 1, "train.dtype": "fp32"},
    {"parallel.tp": 2},
    SP,
    SP | {"parallel.async_tp": True},
    {"parallel.cp": 2},
    {"parallel.cp": 2, "parallel.cp_kind": "ulysses"},
    *(PP | {"parallel.schedule": kind} for kind in ("gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe-v")),
    PP | {"parallel.schedule": "interleaved", "parallel.vpp": 2},
    *({"parallel.zero": zero} for zero in (1, 2, 3)),
    {"parallel.recompute": "full"},
    PP | {"parallel.recompute": "full"},
    PP | {"parallel.recompute": "full", "parallel.schedule": "zb-h1"},
    EVERY,
    SP | EVERY,
    PP | EVERY | {"parallel.recompute_stages": "full,selective"},
    {"train.dtype": "fp8"},
    PP | BLOCKWISE,
]
OTHERS = {
    "gpt2-tiny": [{}, SP, PP, {"parallel.recompute": "full"}],
    "qwen3-tiny": [SP, PP],
    "mixtral-tiny": [
        {},
        BLOCKWISE,
        {"parallel.ep": 2},
        {"parallel.ep": 2, "parallel.ep_chunks": 2},
        {"parallel.ep": 2, "parallel.ep_bound": 1.5},
        {"parallel.ep": 2, "parallel.compress_tokens": "fp8"},
        SP | {"parallel.ep": 2},
        PP | {"parallel.schedule": "zb-v"},
        {"parallel.ep": 2, "parallel.recompute": "full"},
    ],
    "deepseek-v3-tiny": [{}, SP, PP],
    "shared-keys-tiny": [{}, PP, SP | PP | {"parallel.recompute": "full"}],
}
LAYOUTS = {"llama3-tiny": DENSE, **OTHERS}
CASES = [(name, keys) for name, layouts in LAYOUTS.items() for keys in layouts]


def title(name, keys):
    """llama3-tiny tp 2 sp True"""
    return " ".join([name, *(f"{key.split('.')[1]} {value}" for key, value in keys.items())])


IDS = [title(*case) for case in CASES]
CORE = [
    "llama3-tiny tp 2 sp True",
    "llama3-tiny pp 2 schedule zb-h1",
    "llama3-tiny pp 2 recompute full",
    "mixtral-tiny ep 2 ep_chunks 2",
    "mixtral-tiny ep 2 ep_bound 1.5",
]


def recorded_activations(cfg, world, rank):
    """The most that a recorded step of a rank holds beside its state, before its optimizer begins."""
    record = get_part_record(cfg, world, rank, CHIPS["h100"])
    end = next(one.time for one in record.events if isinstance(one, OpBegins) and one.name == "optimizer")
    curve = memory_curve(record.begun_with, record.changes)
    return max(point.nbytes for point in curve if point.time <= end) - record.state


@pytest.mark.slow(every=8, core=CORE)
@pytest.mark.parametrize("name, keys", CASES, ids=IDS)
def test_activations_are_those_of_a_recorded_step(name, keys):
    """To 1.5 % below, and to 6 % above: what passes is added, though it may not be there at the peak."""
    cfg = with_values(resolve(name, None, SIZE), keys)
    world = 2 if cfg.parallel.zero else math.prod((cfg.parallel.tp, cfg.parallel.cp, cfg.parallel.pp))
    world = max(world, cfg.parallel.ep)
    for rank in sorted({0, world - 1}):
        job = make_rank_job(cfg, world, rank)
        planned = memory.peak_activation_bytes(job) + memory.passing_bytes(job)
        assert 0.985 < planned / recorded_activations(cfg, world, rank) < 1.06, rank


@pytest.mark.parametrize("keys", [{}, {"parallel.zero": 3}, {"optim.states": "bf16"}], ids=str)
def test_a_step_that_is_looked_into_copies_the_masters(keys):
    """With few tokens the copy is more than all activations."""
    few = {"train.seq_len": 8, "train.micro_batch": 1, "train.global_batch": 2, "log.inside_every": 1}
    cfg = with_values(resolve("llama3-tiny", None, SIZE), few | keys)
    job = make_rank_job(cfg, 2, 0)
    masters = memory.copied_master_bytes(job)
    assert memory.peak_activation_bytes(job) == masters
    assert masters <= recorded_activations(cfg, 2, 0) < 1.2 * masters + memory.passing_bytes(job)
    offloaded = with_values(cfg, {"parallel.offload": "optimizer"})
    assert memory.copied_master_bytes(make_rank_job(offloaded, 2, 0)) == 0


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("keys", [{}, SP, PP | {"parallel.recompute": "full"}], ids=str)
def test_offloaded_activations_are_not_on_the_device(keys):
    """Eight blocks are in flight: eight of one microbatch, or four of two. Some tensors of one are in use."""
    cfg = with_values(resolve("llama3-tiny", None, SIZE), keys)
    world = cfg.parallel.tp * cfg.parallel.pp
    (block,) = records_of_part(describe_stage(cfg, 1, 2).parts[0], cfg.train.micro_batch)
    away = with_values(cfg, {"parallel.offload": "activations"})
    least, most = (recorded_activations(one, world, 0) for one in (away, cfg))
    assert 5.9 * block.kept < most - least < 8 * block.kept


@pytest.mark.slow
def test_sequence_parallelism_and_1f1b_lower_the_peak():
    """1F1B below GPipe, most on the last rank."""

    def peaks(ranks, **parallel):
        cfg = resolve("llama3-tiny", None, [*SIZE, "--train.global_batch", "32"])
        cfg = with_values(cfg, {f"parallel.{key}": value for key, value in parallel.items()})
        return [recorded_activations(cfg, 4, rank) for rank in ranks]

    assert peaks([0], tp=4, sp=True) < [0.8 * peak for peak in peaks([0], tp=4)]
    gpipe, one = peaks(range(4), pp=4, schedule="gpipe"), peaks(range(4), pp=4)
    assert all(b < a for a, b in zip(gpipe, one))
    assert one[3] < gpipe[3] / 2, (gpipe, one)  # 8 microbatches; 4, 3, 2, 1 in flight


def whole_at_once(world, cfg):
    """The most bytes of whole gradients and weights that are alive, sampled when another has been made."""
    run, data = begin(world, cfg)
    sizes = []

    def sampled_after(function):
        def call(*args):
            function(*args)
            alive = [b.grads.full for b in run.buckets if b.zero >= 2]
            alive += [b.weights.full for b in run.buckets if b.zero == 3]
            pending = [b.grads.pending_scatter for b in run.buckets]
            sizes.append(nbytes_of([*alive, *(one.source for one in pending if one is not None)]))

        return call

    for b in run.buckets:
        b.grads.allocate = sampled_after(b.grads.allocate)
        b.grads.start_reduce = sampled_after(b.grads.start_reduce)
        b.weights.start_unshard = sampled_after(b.weights.start_unshard)
    train_step(run, 1, data.microbatches(0))
    finish_gathers(run)
    return max(sizes)


@pytest.mark.parametrize("zero", [2, 3])
def test_no_more_than_three_buckets_are_whole_at_once(ranks, zero):
    cfg = laid("llama3-tiny", dict(zero=zero))
    for rank, peak in enumerate(ranks(4).run(whole_at_once, cfg)):
        assert 0 < peak <= memory.passing_bytes(make_rank_job(cfg, 4, rank))


def kept_in_eight_bits(world, cfg):
    """The most bytes of weights in 8 bits that a rank has in a step, and what it has after that."""
    run, data = begin(world, cfg)
    sizes = []

    def kept() -> int:
        pairs = [slot.param.quantized.pair for b in run.buckets for slot in b.slots]
        return nbytes_of([x for pair in pairs if pair is not None for one in pair for x in one[:2]])

    def looked_at_first(function):
        def call(*args):
            sizes.append(kept())
            return function(*args)

        return call

    for b in run.buckets:
        b.weights.reshard = looked_at_first(b.weights.reshard)
        b.weights.start_gather_updated = looked_at_first(b.weights.start_gather_updated)
    train_step(run, 1, data.microbatches(0))
    return max(sizes), kept()


@pytest.mark.slow(every=18)
@pytest.mark.parametrize("name", ["llama3-tiny", "mixtral-tiny"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("parallel", [dict(zero=1, tp=2), dict(zero=0, pp=2), dict(zero=3)], ids=str)
def test_weights_in_eight_bits_are_planned_and_freed(ranks, name, recipe, parallel):
    """Kept to the end of the step; under ZeRO-3 no longer than the full weights. The planner counts what
    their scales are made of, too."""
    cfg = laid(name, parallel, dtype="fp8", fp8=recipe, fp8_block=16, fp8_keep=1)
    cfg = replace(cfg, model=replace(cfg.model, layers=8))
    for rank, (most, after) in enumerate(ranks(4).run(kept_in_eight_bits, cfg)):
        planned = memory.quantized_weight_bytes(make_rank_job(cfg, 4, rank))
        assert after == 0 and 0 < most <= planned, rank
        assert parallel["zero"] == 3 or planned <= 1.07 * most, rank
