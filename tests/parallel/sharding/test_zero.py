"""Overlap: what is started when, that nothing is read before it is there, and that the bits do not depend on
luck.
"""

from dataclasses import replace

import pytest
import torch
from random_tokens import begin
from steps import watched

from build import build_run
from config.reading.tiny import tiny_config
from kernels import linear
from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from train import train_step


def laid(**parallel):
    cfg = tiny_config("llama3-tiny")
    return replace(
        cfg,
        model=replace(cfg.model, layers=3),
        parallel=replace(cfg.parallel, bucket_mb=64.0, **parallel),
        train=replace(cfg.train, global_batch=4),
    )


def story(world, cfg):
    """What happens to the parts e, 0, 1, 2, h in one step, in order."""
    run, data = begin(world, cfg)
    said = []
    for part, name in zip(run.pipeline.zero_hooks[0].parts, ("e", 0, 1, 2, "h")):
        for b in part:
            for verb, (of, method) in VERBS.items():
                setattr(getattr(b, of), method, noted(b, verb, name, said))
    for i, block in enumerate(run.stages[0].blocks):
        block.register_forward_pre_hook(lambda *_, i=i: said.append(f"forward {i}"))
    train_step(watched(run, lambda: said.append("norm")), 1, data.microbatches(0))
    before = list(said)
    for b in run.buckets:
        b.weights.wait_unshard()
    return before


VERBS = {
    "fetch": ("weights", "start_unshard"),
    "reduce": ("grads", "start_reduce"),
    "land": ("grads", "wait_reduce_scatter"),
    "publish": ("weights", "start_gather_updated"),
}


def noted(b, verb, name, said):
    """b.verb, noted where it starts or ends an exchange."""
    of, method = VERBS[verb]
    inner = getattr(getattr(b, of), method)

    def call(*args):
        before = b.weights.pending_gather, b.grads.pending_scatter, b.grads.pending_sum
        inner(*args)
        if (b.weights.pending_gather, b.grads.pending_scatter, b.grads.pending_sum) != before:
            said.append(f"{verb} {name}")

    return call


def test_zero_3_fetches_ahead_and_lands_one_part_later(ranks):
    said = ranks(4).run(story, laid(zero=3))[0]
    assert said == [
        "fetch e",
        "fetch 0",
        "fetch 1",
        "forward 0",
        "fetch 2",
        "forward 1",
        "fetch h",
        "forward 2",
        "fetch 1",
        "reduce h",
        "fetch 0",
        "land h",
        "reduce 2",
        "land 2",
        "reduce 1",
        "land 1",
        "reduce 0",
        "land 0",
        "reduce e",
        "land e",
        "norm",
    ], said


def whole_weights(world, cfg):
    """Which of the parts e, 0, 1, 2, h hold weights that are whole, not only on their way: at the forward of
    each block, at the end of the backward, and after the step.
    """
    run, data = begin(world, cfg)
    said = []

    def look(*_):
        parts = zip("e012h", run.pipeline.zero_hooks[0].parts)
        said.append(
            "".join(
                name
                for name, part in parts
                if any(slot.param.untyped_storage().nbytes() for b in part for slot in b.slots)
            )
        )

    for block in run.stages[0].blocks:
        block.register_forward_pre_hook(look)
    train_step(watched(run, look), 1, data.microbatches(0)[:1])
    look()
    return said


@pytest.mark.parametrize("zero, held", [(2, ["e012h"] * 5), (3, ["0", "1", "2", "", ""])])
def test_zero_3_keeps_whole_weights_no_longer_than_they_are_used(ranks, zero, held):
    assert ranks(4).run(whole_weights, laid(zero=zero)) == [held] * 4


def test_plain_gradients_leave_during_the_backward(ranks):
    said = ranks(4).run(story, laid())[0]
    assert [w for w in said if not w.startswith("forward")] == [
        "reduce h",
        "reduce 2",
        "reduce 1",
        "reduce 0",
        "reduce e",
        "norm",
    ], said


def test_zero_1_waits_for_its_gradients_at_the_end_of_the_step(ranks):
    """A wait inside the backward would hold up the computation of the next part (on a GPU)."""
    said = ranks(4).run(story, laid(zero=1))[0]
    parts = ("h", 2, 1, 0, "e")
    exchanges = [w for w in said if w.startswith(("reduce", "land", "norm"))]
    assert exchanges[:5] == [f"reduce {part}" for part in parts], said
    assert sorted(exchanges[5:-1]) == sorted(f"land {part}" for part in parts), said
    assert exchanges[-1] == "norm", said


@pytest.mark.parametrize("parallel", [dict(dp_rep=2), dict(compress="int8")], ids=str)
def test_shards_that_are_sent_on_or_decoded_are_awaited_during_the_backward(ranks, parallel):
    """Coded messages of all parts together would take memory that the planner does not know."""
    said = ranks(4).run(story, laid(zero=1, **parallel))[0]
    exchanges = [w for w in said if w.startswith(("reduce", "land", "norm"))]
    assert exchanges[:4] == ["reduce h", "land h", "reduce 2", "land 2"], said


def test_publish_does_not_wait(ranks):
    said = ranks(4).run(story, laid(zero=1))[0]
    assert said[-5:] == [f"publish {p}" for p in ("e", 0, 1, 2, "h")] and said[-6] == "norm"


def trained(world, cfg):
    run, data = begin(world, cfg)
    for step in (1, 2, 3):
        loss, norm, *_ = train_step(run, step, data.microbatches(step - 1))
    for b in run.buckets:
        b.weights.wait_unshard()
    return [loss, norm, *(b.weights.master for b in run.buckets)]


@pytest.mark.slow(every=4)
@pytest.mark.parametrize(
    "parallel", [dict(), dict(zero=2, dp_rep=2), dict(zero=3), dict(zero=1, tp=2, sp=True)], ids=str
)
def test_the_same_layout_twice_is_bitwise_equal(ranks, parallel):
    cfg = laid(**parallel)
    cfg = replace(cfg, train=replace(cfg.train, dtype="fp32"))
    for first, second in zip(*(ranks(4).run(trained, cfg) for _ in "ab")):
        assert all(torch.equal(a, b) for a, b in zip(first, second))


def late(world, _):
    x = torch.ones(1 << 20, dtype=torch.float64)
    work = comm.start_all_reduce(x, Mesh.bind(ParallelDims(world.size), world).dp_cp)
    return float(work.wait().sum()), float(work.wait()[0])  # waiting twice is no harm


def test_work(ranks):
    assert ranks(4).run(late, None) == [(4.0 * (1 << 20), 4.0)] * 4
    x = torch.arange(3.0)
    single = Mesh.single()
    assert (
        comm.start_all_reduce(x, single.dp_cp).wait() is x
        and comm.start_reduce_scatter(x, single.fsdp).wait() is x
    )
    assert torch.equal(comm.start_all_gather(x, single.fsdp, torch.empty(3)).wait(), x) and not single.ledger


def test_a_bucket_is_no_larger_than_asked():
    cfg = laid()
    small = replace(cfg, parallel=replace(cfg.parallel, bucket_mb=0.03))
    one, many = (build_run(c, Mesh.single(), torch.device("cpu"), None, 1).buckets for c in (cfg, small))
    assert len(one) == 5 < len(many) and all(b.size * 8 <= 0.03 * 2**20 or len(b.slots) == 1 for b in many)


def order(world, cfg):
    """What a rank does in the backward of its last block's column layers: exchanges over tp, and weight
    gradients.
    """
    run, data = begin(world, cfg)
    said = []

    def note(module, name, word, then=None):
        inner = getattr(module, name)

        def call(*args, **how):
            said.append(word)
            out = inner(*args, **how)
            if then and args[1].name == "tp":
                wait = out.wait
                out.wait = lambda: (said.append(then), wait())[1]
            return out

        setattr(module, name, call)
        return lambda: setattr(module, name, inner)

    back = [
        note(linear, "write_wgrad", "wgrad"),
        note(comm, "start_all_reduce", "sum", "summed"),
        note(comm, "start_reduce_scatter_each", "scatter", "scattered"),
        note(comm, "start_all_gather_each", "gather", "gathered"),
        note(comm, "reduce_scatter_each", "blocking"),
        note(comm, "all_gather_each", "blocking gather"),
    ]
    try:
        train_step(run, 1, data.microbatches(0))
    finally:
        for undo in back:
            undo()
    return said


def runs(said, *words):
    """How often these words stand one after the other."""
    return sum(tuple(said[i : i + len(words)]) == words for i in range(len(said)))


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "parallel, words",
    [
        (dict(tp=4), ("sum", "wgrad", "summed")),
        (dict(tp=4, sp=True), ("scatter", "wgrad", "scattered")),
        (
            dict(tp=4, sp=True, recompute="selective", recompute_parts="norm"),
            ("gather", "scatter", "gathered", "wgrad", "scattered"),
        ),
    ],
    ids=str,
)
def test_the_input_gradient_travels_while_the_weight_gradient_is_computed(ranks, parallel, words):
    for said in ranks(4).run(order, laid(**parallel)):
        assert runs(said, *words) == 4 * 3 * 2, said  # microbatches, blocks, column layers
