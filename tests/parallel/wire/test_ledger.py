"""The wire, counted: a real step's calls and bytes equal plan/bytes.py's closed forms, and the promises built
on them.
"""

import math
from dataclasses import replace

import pytest
import torch
from random_tokens import begin

import config
from config import LoraConfig, MupConfig
from config.reading.tiny import tiny_config
from config.tree import with_values
from model import block
from plan import bytes as wire
from plan.buckets import buckets, unique_buckets
from plan.job import make_rank_job
from train import train_step

PLAIN = [dict(zero=z, dp_rep=r) for z in (0, 1, 2, 3) for r in (1, 2, 4) if z or r == 1]
SENDS = [dict(reduce=r) for r in ("ring", "hierarchy", "server")] + [
    dict(reduce="ring", zero=2, dp_rep=2),
    dict(reduce="hierarchy", node=None),
]
SPLIT = [dict(tp=2, sp=sp, zero=z) for sp in (False, True) for z in (0, 1, 3)] + [
    dict(tp=4, sp=True),
    dict(tp=4),
]
PIPES = [
    dict(pp=2, zero=z, schedule=s)
    for z, s in (
        (0, "1f1b"),
        (1, "gpipe"),
        (2, "interleaved"),
        (3, "1f1b"),
        (3, "zb-v"),
        (3, "zb-h1"),
        (3, "gpipe"),
    )
]
MIXED = [
    dict(pp=2, tp=2, sp=True, schedule="zb-h1"),
    dict(pp=4),
    dict(pp=2, tp=2, zero=3, schedule="dualpipe-v"),
]
CONTEXT = [
    dict(cp=cp, cp_kind=kind, zero=z) for kind in ("ring", "ulysses") for cp, z in ((2, 0), (4, 1), (4, 3))
] + [
    dict(cp=2, cp_kind="ulysses", tp=2, sp=True),
    dict(cp=2, pp=2, schedule="zb-v", zero=2),
    dict(cp=2, dp_rep=2, zero=1),
    dict(cp=2, reduce="ring"),
]
EIGHT = [
    dict(pp=2, tp=2, sp=True, zero=3),
    dict(tp=2, zero=3, dp_rep=2),
    dict(pp=2, zero=1, dp_rep=2, schedule="zb-v"),
    dict(tp=2, reduce="hierarchy"),
]


MIXTURES = [
    dict(ep=4),
    dict(ep=2, etp=2, zero=1),
    dict(tp=2, ep=2),
    dict(tp=2, sp=True, ep=4, zero=3),
    dict(tp=2, etp=2, zero=2),
    dict(cp=2, ep=2, zero=3),
    dict(pp=2, ep=2, zero=1),
    dict(pp=2, tp=2, sp=True, ep=2, schedule="zb-v"),
    dict(zero=3, dp_rep=2, ep=2),
    dict(ep=2, reduce="ring"),
    dict(ep=2, reduce="hierarchy"),
    dict(tp=4),
    dict(ep=2, tp=2, recompute="full"),
    dict(tp=2, sp=True, ep=2, recompute="full", pp=2),
    dict(tp=2, sp=True, etp=2, recompute="selective", recompute_parts="core,norm,act"),
    dict(pp=2, zero=2, etp=2, schedule="dualpipe-v"),
    dict(ep=4, ep_chunks=2),
    dict(tp=2, sp=True, ep=2, etp=2, ep_chunks=3, recompute="full"),
    dict(pp=2, ep=2, ep_chunks=4, zero=1, schedule="zb-v"),
    dict(ep=4, ep_bound=8.0),
    dict(tp=2, ep=2, etp=2, ep_bound=8.0, recompute="full"),
    dict(pp=2, ep=2, ep_chunks=2, ep_bound=8.0, schedule="zb-v"),
    dict(ep=4, ep_chunks=2, compress_tokens="fp8"),
    dict(tp=2, ep=2, etp=2, ep_bound=8.0, recompute="full", compress_tokens="fp8"),
]
PARTS = "core,norm,act"
AGAIN = [
    dict(tp=2, recompute="full"),
    dict(tp=2, sp=True, recompute="full", pp=2),
    dict(tp=2, sp=True, recompute="selective", recompute_parts=PARTS),
    dict(cp=2, recompute="full", zero=3),
    dict(cp=4, cp_kind="ulysses", recompute="full"),
    dict(cp=2, recompute="selective", recompute_parts=PARTS),
    dict(tp=2, sp=True, pp=2, stages="1,3", recompute_stages="selective,full", recompute_parts="norm"),
]


def laid(name: str, parallel: dict, **train) -> config.Config:
    cfg = tiny_config(name)
    cfg = replace(cfg, model=replace(cfg.model, layers=4))
    return replace(cfg, parallel=replace(cfg.parallel, **parallel), train=replace(cfg.train, **train))


def counted_exchanges(mesh):
    """{(group, verb): (calls, bytes)} since the mesh's ledger was cleared."""
    ledger = {}
    for (group, verb, what), calls in mesh.ledger.items():
        if what == "calls":
            ledger[group, verb] = (calls, mesh.ledger[group, verb, "bytes"])
    return ledger


def counted(world, cfg):
    """What the second step of this rank puts on the wire, and how its buckets are made."""
    run, data = begin(world, cfg)
    for step in (1, 2):
        run.mesh.ledger.clear()
        train_step(run, step, data.microbatches(step - 1))
    ledger = counted_exchanges(run.mesh)
    slots = [
        (b.size, b.shard_start, b.shard_end, b.num_users, [(s.offset, s.numel) for s in b.slots])
        for b in run.buckets
    ]
    for b in run.buckets:
        b.weights.wait_unshard()  # nothing is left under way
    return ledger, slots


def compare(pool, name, parallel, dropout=0.1, values=None, **train):
    cfg = laid(name, parallel, **train)
    cfg = with_values(cfg, {"model.dropout": dropout, **(values or {})})
    found = pool.run(counted, cfg)
    for rank, (ledger, slots) in enumerate(found):
        job = make_rank_job(cfg, pool.size, rank)
        planned = [
            (
                b.size,
                b.shard_start,
                b.shard_end,
                b.num_users,
                list(zip(b.offsets, (spec.numel for spec in b.specs))),
            )
            for b in unique_buckets(buckets(job))
        ]
        assert slots == planned, (rank, parallel)
        assert ledger == wire.step_bytes(job), (rank, parallel)


@pytest.mark.slow(every=43)
@pytest.mark.parametrize("parallel", PLAIN + SENDS + SPLIT + PIPES + MIXED + CONTEXT, ids=str)
def test_every_byte_is_planned(ranks, parallel):
    compare(ranks(4), "llama3-tiny", parallel)


FROZEN = {
    "lower": {"optim.groups": "embedding: lr_factor 0; layers.0.*: lr_factor 0; layers.*.mlp.*: lr_factor 0"},
    "all but norms": {"optim.groups": "embedding: lr_factor 0; head: lr_factor 0; hidden: lr_factor 0"},
    "adapters": {"model.lora": LoraConfig(rank=2, targets="attn.*,mlp.down")},
}
FREEZING = [
    *(dict(zero=z) for z in range(4)),
    dict(tp=2, zero=3),
    dict(tp=2, sp=True),
    dict(pp=2, zero=3, schedule="zb-v"),
    dict(pp=2, zero=2, dp_rep=2),
    dict(tp=2, sp=True, recompute="full", pp=2),
]


@pytest.mark.slow(every=9)
@pytest.mark.parametrize("values", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("parallel", FREEZING, ids=str)
def test_frozen_parameters_send_no_gradients(ranks, parallel, values):
    compare(ranks(4), "llama3-tiny", parallel, values=values)


CODED = [
    dict(compress="int8"),
    dict(compress="fp8", tp=2, compress_block=64),
    dict(compress="int8", zero=1, dp_rep=2),
    dict(compress="fp8", zero=2, pp=2),
    dict(compress="int8", compress_weights="fp8", zero=3),
    dict(compress_weights="int8", zero=1, cp=2),
    dict(compress_weights="int8", zero=3, dp_rep=2),
]
RANKS = [
    dict(compress="powersgd", powersgd_rank=3),
    dict(compress="powersgd", tp=2, sp=True),
    dict(compress="powersgd", pp=2, schedule="zb-v"),
]


@pytest.mark.slow(every=10)
@pytest.mark.parametrize("parallel", CODED + RANKS, ids=str)
def test_compressed_sums_and_gathers(ranks, parallel):
    compare(ranks(4), "llama3.2-tiny", parallel, dtype="bf16")


@pytest.mark.slow(every=6)
@pytest.mark.parametrize(
    "name, parallel",
    [
        ("qwen2-moe-tiny", dict(compress="powersgd", ep=2)),
        ("mixtral-tiny", dict(compress="powersgd", tp=2, etp=2)),
        ("deepseek-v3-tiny", dict(compress="powersgd")),
        ("deepseek-v2-lite-tiny", dict(compress="powersgd", tp=2, sp=True)),
        ("qwen2-moe-tiny", dict(compress="int8", compress_weights="int8", zero=1, ep=2)),
        ("gpt2-tiny", RANKS[1]),
    ],
    ids=str,
)
def test_compressed_mixtures_latents_and_biases(ranks, name, parallel):
    compare(ranks(4), name, parallel)


@pytest.mark.parametrize("dtype, gradients, weights", [("fp32", 1 / 4, 1 / 4), ("bf16", 1 / 4, 1 / 2)])
def test_eight_bits_cost_what_the_paper_says(dtype, gradients, weights):
    """qgZ and qwZ with blocks of 256: a quarter of fp32, half of bf16, and a scale of four bytes a block
    beside them.
    """

    def wires(**parallel):
        found = wire.step_bytes(
            make_rank_job(laid("llama3-tiny", dict(zero=1, bucket_mb=64.0, **parallel), dtype=dtype), 4, 0)
        )
        return found.get(("fsdp", "all_to_all"), found.get(("fsdp", "reduce_scatter")))[1], found[
            "fsdp", "all_gather"
        ][1]

    plain, coded = (
        wires(compress_block=256),
        wires(compress="int8", compress_weights="fp8", compress_block=256),
    )
    pad = 1.35  # of these small parameters to whole blocks; 64 elements otherwise
    assert (
        gradients < coded[0] / plain[0] < gradients * (1 + 4 / 256) * pad
        and weights < coded[1] / plain[1] < weights * (1 + 4 / 256) * pad
    )


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("name", ["gpt2-tiny", "qwen3-tiny"])
@pytest.mark.parametrize(
    "parallel",
    [dict(zero=3), dict(tp=2, sp=True, pp=2), dict(pp=2, zero=2, schedule="zb-v"), dict(tp=2, zero=3)],
    ids=str,
)
def test_tied_tables_biases_and_head_norms(ranks, name, parallel):
    compare(ranks(4), name, parallel, micro_batch=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        dict(tp=4),
        dict(tp=4, sp=True, recompute="selective", recompute_parts="norm"),
        dict(tp=2, cp=2, zero=3),
    ],
    ids=str,
)
def test_fewer_key_heads_than_ranks(ranks, parallel):
    compare(ranks(4), "qwen2.5-tiny", parallel, values={"model.mixer.kv_heads": 1})


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("parallel", AGAIN, ids=str)
def test_exchanges_that_recompute_repeats(ranks, parallel, dropout):
    compare(ranks(4), "llama3-tiny", parallel, dropout)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "parallel", [dict(zero=3, tp=2), dict(cp=4), dict(cp=2, tp=2, cp_kind="ulysses")], ids=str
)
def test_dtypes(ranks, dtype, parallel):
    compare(ranks(4), "llama3-tiny", parallel, dtype=dtype)


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("parallel", EIGHT, ids=str)
def test_eight_ranks(ranks, parallel):
    compare(ranks(8), "gpt2-tiny", parallel)


@pytest.mark.slow(every=95)
@pytest.mark.parametrize(
    "name", ["mixtral-tiny", "qwen3-moe-tiny", "dots1-tiny", "qwen2-moe-tiny", "olmoe-tiny"]
)
@pytest.mark.parametrize("parallel", MIXTURES, ids=str)
def test_mixtures(ranks, name, parallel):
    """Dispatch and combine send what is routed, without padding, whatever the router does."""
    compare(ranks(4), name, parallel, micro_batch=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-tiny", "qwen2-moe-tiny"])
@pytest.mark.parametrize(
    "parallel", [dict(ep=2, tp=2), dict(ep=4, ep_chunks=2), dict(tp=2, sp=True, etp=2, ep_chunks=3)], ids=str
)
def test_mixtures_that_are_computed_again_without_dropout(ranks, name, parallel):
    """Nothing of the block is kept after the mixture; but the mixture keeps something after its last
    exchange of rows."""
    compare(ranks(4), name, dict(parallel, recompute="full"), dropout=0.0)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_chunks_send_the_same_bytes_in_more_messages(ranks, dtype):
    """Of a layer and microbatch: counts and probabilities once, and rows once a chunk, in either direction,
    forward and backward. Counts: of each expert, 8 bytes. All else has the size of the dtype, but the
    probabilities, which have at least 4 bytes.
    """
    seen = {}
    for chunks in (1, 2, 4):
        cfg = laid("mixtral-tiny", dict(ep=2, ep_chunks=chunks), dtype=dtype, micro_batch=2)
        found = ranks(2).run(counted, cfg)
        seen[chunks] = {ledger["ep_etp", "all_to_all"] for ledger, _ in found}
    model = cfg.model
    size = 8 if dtype == "fp64" else 2
    rows = 2 * cfg.train.seq_len * model.mlp.top_k
    layer = 8 * model.mlp.experts + rows * (4 * model.hidden * size + 2 * max(size, 4))
    times = model.layers * cfg.train.global_batch // (2 * 2)  # two sequences on each of two ranks
    for chunks, ledgers in seen.items():
        assert ledgers == {(times * (3 + 4 * chunks), times * layer)}, chunks


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("dtype, hidden", [("bf16", 144), ("fp32", 32)])
def test_rows_in_8_bits_are_half_of_two_of_four_exchanges(ranks, dtype, hidden):
    """By hand: to the experts a byte for each channel and 4 for every 128, back what the dtype has."""
    cfg = laid("mixtral-tiny", dict(ep=2, compress_tokens="fp8"), dtype=dtype, micro_batch=2)
    cfg = with_values(cfg, {"model.hidden": hidden})
    there, back = hidden + 4 * math.ceil(hidden / 128), hidden * (2 if dtype == "bf16" else 4)
    rows = 2 * cfg.train.seq_len * cfg.model.mlp.top_k
    layer = 8 * cfg.model.mlp.experts + rows * (2 * there + 2 * back + 2 * 4)
    times = cfg.model.layers * cfg.train.global_batch // (2 * 2)  # two sequences on each of two ranks
    for rank, (ledger, _) in enumerate(ranks(2).run(counted, cfg)):
        assert ledger["ep_etp", "all_to_all"] == (times * 7, times * layer)
        planned = wire.step_bytes(make_rank_job(cfg, 2, rank))
        assert planned["ep_etp", "all_to_all"] == ledger["ep_etp", "all_to_all"]


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("parallel", [dict(ep=2, tp=2, zero=1), dict(ep=4, zero=3)], ids=str)
def test_mixtures_in_bf16(ranks, parallel):
    compare(ranks(4), "mixtral-tiny", parallel, dtype="bf16")


LATENT = [
    dict(zero=3),
    dict(tp=2),
    dict(tp=2, sp=True, zero=1),
    dict(cp=2),
    dict(cp=2, cp_kind="ulysses", zero=2),
    dict(pp=2, zero=3),
    dict(pp=2, zero=3, schedule="zb-v"),
    dict(pp=2, tp=2, sp=True, schedule="zb-h1"),
    dict(pp=4, zero=2),
    dict(pp=2, schedule="dualpipe-v", ep=2),
    dict(tp=2, sp=True, recompute="full"),
    dict(tp=2, recompute="full"),
    dict(cp=2, recompute="full", pp=2),
    dict(tp=2, sp=True, recompute="selective", recompute_parts="norm,core"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v2-lite-tiny", "deepseek-v3-tiny"])
@pytest.mark.parametrize("parallel", LATENT, ids=str)
def test_latents_and_further_tokens(ranks, name, parallel):
    compare(ranks(4), name, parallel)


EIGHT_BITS = [
    dict(tp=2, sp=True, cp=2),
    dict(tp=2, recompute="full", zero=3),
    dict(cp=2, pp=2, schedule="zb-v"),
    dict(tp=4, sp=True, recompute="selective", recompute_parts=PARTS),
    dict(pp=2, tp=2, stages="1,3"),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("parallel", EIGHT_BITS, ids=str)
def test_scales_in_fp8(ranks, recipe, parallel):
    compare(ranks(4), "llama3-tiny", parallel, fp8=recipe)


def trained(world, cfg, is_together):
    """-> (this rank's weights after two steps, all-reduces over tp of the second and their bytes)."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_together:
            patch.setattr(block, "exchange_weight_maxima_together", lambda *_: None)
        run, data = begin(world, cfg)
    for step in (1, 2):
        run.mesh.ledger.clear()
        train_step(run, step, data.microbatches(step - 1))
    exchanges = counted_exchanges(run.mesh)["tp", "all_reduce"]
    for b in run.buckets:
        b.weights.wait_unshard()
    return [b.weights.full.clone() for b in run.buckets], exchanges


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("parallel", [dict(tp=2), dict(tp=2, sp=True, zero=1), dict(tp=2, zero=3)], ids=str)
def test_maxima_of_a_block_travel_together(ranks, recipe, parallel):
    """One exchange a block and step for its four weights: the same bytes, and the same bits in the end."""
    cfg = laid("llama3-tiny", parallel, fp8=recipe)
    in_fp8 = sum(config.layer_in_fp8(cfg, layer) for layer in range(cfg.model.layers))
    assert in_fp8 > 1
    together = ranks(2).run(trained, cfg, True)
    alone = ranks(2).run(trained, cfg, False)
    for (weights, (calls, nbytes)), (weights_alone, (calls_alone, nbytes_alone)) in zip(together, alone):
        assert all(map(torch.equal, weights, weights_alone))
        assert calls_alone - calls == 3 * in_fp8
        assert nbytes == nbytes_alone


@pytest.mark.slow
def test_a_number_of_all_ranks_is_exchanged_once(ranks):
    """By hand: of a column layer dy is divided over tp and cp, of a row layer x, and x, or dy, over cp."""
    cfg = laid("llama3-tiny", dict(tp=2, cp=2), fp8="tensorwise")
    in_fp8 = sum(config.layer_in_fp8(cfg, layer) for layer in range(cfg.model.layers))
    microbatches = cfg.train.global_batch // cfg.train.micro_batch
    for ledger, _ in ranks(4).run(counted, cfg):
        calls, nbytes = ledger["tp_cp", "all_reduce"]
        assert calls == 4 * in_fp8 * microbatches
        assert nbytes == 8 * calls  # fp64


@pytest.mark.slow
@pytest.mark.parametrize("name, recipe", [("gpt2-tiny", "rowwise"), ("gpt2-tiny", "tensorwise")])
def test_scales_beside_biases(ranks, name, recipe):
    compare(ranks(4), name, dict(tp=2, cp=2), fp8=recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, recipe",
    [("mixtral-tiny", "rowwise"), ("qwen2-moe-tiny", "tensorwise"), ("deepseek-v3-tiny", "rowwise")],
)
@pytest.mark.parametrize(
    "parallel", [dict(tp=2, sp=True, cp=2, ep=2), dict(tp=2, pp=2, recompute="full")], ids=str
)
def test_scales_of_mixtures(ranks, name, recipe, parallel):
    """Experts exchange none: a token and an expert have their own."""
    compare(ranks(4), name, parallel, fp8=recipe)


def cost(parallel, world=8, **train) -> int:
    """The most that a rank of it sends, without the scalars."""
    cfg = laid("llama3-tiny", parallel, **train)
    return max(
        wire.ring_bytes({k: v for k, v in wire.step_bytes(make_rank_job(cfg, world, r)).items() if v[1] > 64})
        for r in range(world)
    )


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_sharding_costs_what_the_paper_says(dtype):
    """One microbatch: ZeRO-1 and 2 no more than plain data parallelism, ZeRO-3 at most 1.5 times."""
    train = dict(dtype=dtype, global_batch=8, micro_batch=1)
    dp, *zero = (cost(dict(zero=z), **train) for z in (0, 1, 2, 3))
    assert zero[0] == zero[1] <= dp and zero[1] < zero[2] <= 1.5 * dp


def test_sequence_parallelism_is_free():
    """On activations, to the byte; it adds the sum of the norms' gradients, once a step."""
    for tp in (2, 4):
        plain, sp = (make_rank_job(laid("llama3-tiny", dict(tp=tp, sp=sp)), 8, 0) for sp in (False, True))
        norms = sum(b.partial_elements("tp") for b in unique_buckets(buckets(sp)))
        tensor, both = (
            sum(
                n * (2 if verb == "all_reduce" else 1)
                for (group, verb), (_, n) in wire.step_bytes(job).items()
                if group == "tp"
            )
            for job in (plain, sp)
        )
        assert both == tensor + 2 * norms * 8 and norms == (2 * sp.cfg.model.layers + 1) * sp.cfg.model.hidden


def test_a_ring_sends_what_the_collective_counts():
    """2 (N-1)/N n: the bytes of an all-reduce by its best algorithm; the server's rank 0 sends N / 2 times as
    much.
    """
    cfgs = [laid("llama3-tiny", dict(reduce=kind)) for kind in ("collective", "ring", "server")]
    everyone, ring, server = (wire.step_bytes(make_rank_job(c, 8, 0)) for c in cfgs)
    n = everyone["dp_cp", "all_reduce"][1] - 8  # without the loss
    assert ring["dp_cp", "send"][1] * 8 == 2 * 7 * n and server["dp_cp", "send"][1] == 7 * n


@pytest.mark.slow(every=3)
@pytest.mark.parametrize(
    "parallel",
    [dict(zero=1, bucket_mb=0.01), dict(tp=2, sp=True, zero=3, bucket_mb=0.02), dict(pp=2, bucket_mb=0.05)],
    ids=str,
)
def test_rates_of_mup(ranks, parallel):
    """Matrices of different rates lie apart."""
    compare(ranks(4), "deepseek-v3-tiny", parallel, values={"model.mup": MupConfig(base=8)})
