"""The model described without storage: published parameter counts, layers of one kind that are alike, costs
that are the sum of the real modules', and a new module that is counted because it says what it has.
"""

from dataclasses import replace

import pytest
from torch import nn

import config
from model.block import TransformerBlock
from model.describe import (
    describe_block,
    describe_model,
    describe_stage,
    keys_of_modules,
    mesh_of_one_stage,
    workload,
)
from model.mlp import MLP
from model.split import split_by_cost
from model.transformer import PipelineStage
from parallel.cost import Cost, Exchange, MatrixProduct, SavedTensor, Workload, mean_keys, total
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, parameter, sharded_parameters
from plan.count import flops_per_token, parameters

PUBLISHED = {  # elements of the released weights, without the routers' biases
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "dots1-142b": 142_774_381_696 - 61 * 128,
}
ROUNDED = {"mixtral-8x22b": 141e9, "qwen2-57b-a14b": 57.4e9}  # as their model cards say
ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "mixtral-8x22b": 39e9,
    "qwen1.5-moe-a2.7b": 2.7e9,
    "qwen2-57b-a14b": 14e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-235b-a22b": 22e9,
    "olmoe-1b-7b": 1.3e9,
    "dots1-142b": 14e9,
    "deepseek-v2-lite": 2.4e9,
    "deepseek-v3": 37e9,
}
LAYOUTS = [
    {},
    dict(tp=2, sp=True),
    dict(tp=4, recompute="full"),
    dict(cp=2, recompute="selective", recompute_parts="core,norm,act"),
    dict(tp=2, ep=4),
    dict(ep=2, etp=2, tp=2, sp=True),
]


def shrunk(name, parallel=None, **model):
    cfg = config.resolve(name, None, [])
    return replace(
        cfg,
        model=replace(cfg.model, vocab=cfg.model.vocab or 500, **model),
        parallel=config.ParallelConfig(**(parallel or {})),
    )


def test_every_preset_has_the_parameters_of_its_paper():
    real = [name for name in config.presets() if not name.endswith(("-tiny", "-mini"))]
    assert sorted({**PUBLISHED, **ROUNDED}) == sorted(real), "a new preset needs its published count here"
    for name in real:
        count = parameters(config.resolve(name, None, []).model)
        if name in PUBLISHED:
            assert count["total"] == PUBLISHED[name], name
        else:
            assert count["total"] == pytest.approx(ROUNDED[name], rel=0.005), name
        if name in ACTIVE:  # model cards round, and some leave out the tables
            assert count["active"] == pytest.approx(ACTIVE[name], rel=0.11), name
        else:
            assert count["active"] == count["total"]
    deepseek = parameters(config.resolve("deepseek-v3", None, []).model)
    assert deepseek["ahead"] == pytest.approx(
        11.5e9, rel=0.02
    )  # the module ahead, without embedding and head (684.5B with them)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", config.recipes())
def test_every_recipe_builds_without_storage_what_is_counted(name):
    """The whole model, every layer of it, on one rank."""
    model = config.resolve(name, None, []).model
    model = replace(model, vocab=model.vocab or 500, vocab_multiple=1)
    if model.layers * (model.experts or 1) > 4000:
        model = replace(model, layers=8)
    stage = PipelineStage(config.Config(model=model), mesh_of_one_stage(config.Config()), 0, model.layers)
    count = parameters(model)
    assert sum(param.spec.numel for param in sharded_parameters(stage)) == count["total"] + count["ahead"]
    assert all(param.numel() == 0 for param in stage.parameters())
    token = Workload(1, 1, documents=(2048,))
    assert 3 * stage.cost(token).flops == pytest.approx(flops_per_token(model, 2048), rel=1e-12)


def shapes(module):
    return [
        (
            param.spec.shape,
            param.spec.role,
            param.spec.partial_over,
            param.spec.is_expert,
            param.spec.is_replicated_over_tp,
        )
        for param in sharded_parameters(module)
    ]


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "name",
    [
        "llama3-tiny",
        "gpt2-tiny",
        "mixtral-tiny",
        "dots1-tiny",
        "deepseek-v3-tiny",
        "qwen2-moe-tiny",
        "mistral-tiny",
    ],
)
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_layers_of_one_kind_are_alike(name, parallel):
    cfg = shrunk(name, parallel)
    cfg = replace(
        cfg, train=replace(cfg.train, dtype="fp8", fp8="rowwise", fp8_keep=1, seq_len=64, micro_batch=2)
    )
    work = workload(cfg)
    described = describe_stage(cfg, 0, cfg.model.layers)
    real = PipelineStage(cfg, mesh_of_one_stage(cfg), 0, cfg.model.layers)
    for module, part in zip(real.parts(), described.parts):
        table = [] if part.shared_table is None else [part.shared_table]
        assert sorted(map(str, shapes(module))) == sorted(str(row) for row in [*shapes(part.module)]), type(
            module
        )
        assert len(part.params) + len(table) == len(shapes(module))
        assert module.cost(work) == part.cost(work)
    want, found = real.cost(work), described.cost(work)
    assert found.flops == want.flops and found.saved_bytes() == want.saved_bytes()
    assert wire_of(found) == wire_of(want)


def wire_of(cost):
    sums = {}
    for one in cost.exchanges:
        key = one.group, one.verb, one.phase
        sums[key] = sums.get(key, 0) + one.calls * one.nbytes
    return sums


def test_what_a_search_varies_and_no_module_reads_shares_the_modules():
    cfg = shrunk("llama3-tiny")
    other = replace(
        cfg,
        parallel=replace(cfg.parallel, pp=4, zero=3),
        train=replace(cfg.train, micro_batch=4, global_batch=64),
    )
    assert keys_of_modules(cfg) == keys_of_modules(other)
    assert describe_stage(cfg, 0, 2).parts[1] is describe_stage(other, 0, 2).parts[1]
    sharded = replace(cfg, parallel=replace(cfg.parallel, tp=2))
    assert describe_stage(cfg, 0, 2).parts[1] is not describe_stage(sharded, 0, 2).parts[1]


# ---- a variant of the model is counted because its modules say what they have ------------------------------


class GatedMLP(MLP):
    """An MLP with a projection more, which says so."""

    def __init__(self, cfg, mesh, layer, name="mlp", width=None):
        super().__init__(cfg, mesh, layer, name, width)
        box = Box.whole(f"layers.{layer}.mlp.more.weight", (cfg.model.ffn, cfg.model.hidden))
        self.more = parameter(ParameterSpec((box,), "hidden", cfg.model.init_std))

    def cost(self, work):
        columns, inner = self.more.spec.shape
        return super().cost(work) + Cost(products=(MatrixProduct(work.tokens, inner, columns),))


def test_a_new_projection_is_counted_everywhere(monkeypatch):
    model = replace(
        config.resolve("llama3-tiny", None, []).model, vocab=512, init_std=0.123
    )  # a model of its own: nothing of it is cached
    plain, plain_flops = (
        parameters(replace(model, init_std=0.124)),
        flops_per_token(replace(model, init_std=0.124), 256),
    )
    monkeypatch.setattr("model.block.MLP", GatedMLP)
    more = model.ffn * model.hidden
    assert parameters(model)["total"] == plain["total"] + model.layers * more
    assert flops_per_token(model, 256) == plain_flops + 6 * model.layers * more
    assert [part.module for part in describe_model(model).parts if isinstance(part.module, TransformerBlock)][
        0
    ].mlp.more is not None


def test_a_gated_activation_counts_three_matrices():
    model = shrunk("gpt2-tiny").model
    gated = replace(model, activation="swiglu")
    rows = model.ffn * model.hidden + (model.ffn if model.bias else 0)
    assert parameters(gated)["total"] == parameters(model)["total"] + model.layers * rows
    assert split_by_cost(model, 2, 256) and split_by_cost(gated, 2, 256)


# ---- the arithmetic of a Cost ------------------------------------------------------------------------------


def test_full_recompute_keeps_the_input_and_exchanges_again_all_but_the_last():
    cost = Cost(
        products=(MatrixProduct(2, 3, 4),),
        saved=(SavedTensor(7, "norm"), SavedTensor(9)),
        exchanges=(
            Exchange("tp", "all_gather", 5),
            Exchange("tp", "all_gather", 5, phase="regather", part="norm"),
            Exchange("tp", "reduce_scatter", 6, phase="output"),
            Exchange("tp", "all_reduce", 8, phase="backward"),
        ),
    )
    full = cost.recompute_all(SavedTensor(1))
    assert (
        full.saved_bytes() == 1
        and full.recomputed.saved_bytes() == 16
        and full.recomputed.flops == cost.flops == 48
    )
    assert [(one.nbytes, one.phase) for one in full.exchanges] == [
        (5, "forward"),
        (5, "backward"),
        (6, "output"),
        (8, "backward"),
    ]
    inner = cost.as_inner().recompute_all(SavedTensor(1))
    assert [one.nbytes for one in inner.exchanges if one.phase == "backward"] == [5, 6, 8]
    norm = cost.recompute_parts(frozenset({"norm"}))
    assert norm.saved_bytes() == 9 and norm.recomputed.saved_bytes() == 7
    assert [(one.nbytes, one.phase) for one in norm.exchanges] == [
        (5, "forward"),
        (5, "backward"),
        (6, "output"),
        (8, "backward"),
    ]
    none = cost.recompute_parts(frozenset())
    assert none.recomputed is None and len(none.exchanges) == 3 and none.saved == cost.saved


def test_times_is_a_repeated_sum():
    work = Workload(2, 64)
    cost = describe_block(keys_of_modules(shrunk("mixtral-tiny", dict(recompute="full"))), 0).cost(work)
    for one, many in (
        (cost.times(3), total([cost] * 3)),
        (cost.times(3).recomputed, total([cost] * 3).recomputed),
    ):
        assert (
            one.flops == many.flops
            and one.saved_bytes() == many.saved_bytes()
            and wire_of(one) == wire_of(many)
        )
        assert sum(product.elements for product in one.products) == sum(
            product.elements for product in many.products
        )
        assert (one.launches, one.host_reads) == (many.launches, many.host_reads)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 99])
def test_keys_that_a_query_sees(window):
    lengths = (3, 16, 1)
    seen = [sum(min(place + 1, window or 99) for place in range(length)) for length in lengths]
    assert mean_keys(16, window) == pytest.approx(seen[1] / 16)
    assert Workload(1, 20, documents=lengths).keys_seen(window) == pytest.approx(sum(seen) / 20)


def test_modules_of_the_model_say_what_they_cost():
    """All that have parameters, and every composite."""
    for name in ("deepseek-v3-tiny", "gpt2-tiny", "qwen2-moe-tiny", "olmoe-tiny"):
        cfg = shrunk(name)
        stage = PipelineStage(cfg, mesh_of_one_stage(cfg), 0, cfg.model.layers)
        for module in stage.modules():
            assert isinstance(module, nn.ModuleList) or callable(getattr(module, "cost", None)), type(module)
