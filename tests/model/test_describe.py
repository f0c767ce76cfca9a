"""The model described without storage: published parameter counts, layers of one kind that are alike, a new
module that is counted because it says what it has, and the FLOPs of a token.
"""

from dataclasses import replace

import pytest

import config
from config.pattern import pattern_text
from config.reading import defaults, presets, recipes, resolve
from config.tree import value_at, with_values
from model.block import MLPS
from model.describe import describe_stage, keys_of_modules, mesh_of_one_stage
from model.flops import flops_of_parts, keys_seen, mean_keys
from model.mlp import MLP, MLPConfig
from model.router import mixture
from model.split import split_by_cost
from model.transformer import PipelineStage
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
    "smollm3-3b": 3_075_098_624,
    "gemma2-2b": 2_614_341_888,
    "gemma3-1b": 999_885_952,
    "olmo2-7b": 7_298_617_344,
    # OLMo-ladder's counts leave out the embedding
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "speedrun": 12 * 12 * 768**2 + 2 * 32_768 * 768,  # nanochat's depth 12 without value embeddings
    "olmo2-190m": 190_354_176 + 768 * 100_352,
    "olmo2-370m": 371_262_464 + 1024 * 100_352,
    "olmo2-760m": 758_220_288 + 1536 * 100_352,
    "olmo2-1.3b": 1_279_395_840 + 2048 * 100_352,
    "granite-3.3-2b": 2_533_539_840,
    "command-r7b": 8_028_033_024,
    "exaone4-1.2b": 1_279_391_488,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # of the folders, without the model of images and what projects its outputs
    "llama4-scout": 108_641_793_536 - 850_960_896 - 20_971_520,
    "llama4-maverick": 401_583_781_376 - 850_960_896 - 20_971_520,
    "apertus-8b": 8_053_338_176,
    "laguna-xs": 33_442_617_088 - 39 * 256,
    "phi4-mini-3.8b": 3_836_021_760,
    # of the 754 tensors of its text model in GGUF, without rotary factors and the routers' biases
    "step3.7-flash": 196_956_130_432 - 64 - 42 * 288,
    # of the folders, without router biases, the module ahead and its copies of the tables
    "glm4.5": 358_337_791_296 - 90 * 160 - 3_988_069_632 - 1_551_892_480,
    "glm4.5-air": 110_468_824_832 - 46 * 128 - 2_375_059_456 - 1_241_513_984,
    "dots1-142b": 142_774_381_696 - 61 * 128,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_929_856,
    "kimi-linear-48b-a3b": 49_122_681_728 - 26 * 256,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron3-30b-a3b": 31_577_940_288 - 23 * 128,
}
ROUNDED = {  # as their model cards say
    "mixtral-8x22b": 141e9,
    "qwen2-57b-a14b": 57.4e9,
    "minimax-m2": 229e9,
    "ernie4.5-0.3b": 0.36e9,
    "olmo3-7b": 7.3e9,
    "glm4-9b": 9.4e9,
    "exaone4-32b": 32e9,
    "mimo-v2-flash": 309e9,
    "qwen3-next-80b-a3b": 80e9,
    "olmo-hybrid-7b": 7.43e9,  # with the sizes that transformers' config class has for it
    "mistral-small-4": 119e9,
}
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
    "glm4.5": 32e9,
    "glm4.5-air": 12e9,
    "minimax-m2": 10e9,
    "lfm2-8b-a1b": 1.5e9,
    "qwen3-next-80b-a3b": 3e9,
    "kimi-linear-48b-a3b": 3e9,
    "nemotron3-30b-a3b": 3.2e9,
    "gpt-oss-20b": 3.61e9 + 0.58e9,  # the card leaves out the embedding, and counts the head
    "gpt-oss-120b": 5.13e9 + 0.58e9,
    "llama4-scout": 17e9,
    "llama4-maverick": 17e9,
    "laguna-xs": 3e9,
    "mimo-v2-flash": 15e9,
    "mistral-small-4": 6.5e9,
    "step3.7-flash": 11e9,
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
    cfg = resolve(name, None, [])
    return replace(
        cfg,
        model=replace(cfg.model, vocab=cfg.model.vocab or 500, **model),
        parallel=config.ParallelConfig(**(parallel or {})),
    )


def test_every_preset_has_the_parameters_of_its_paper():
    real = [name for name in presets() if not name.endswith(("-tiny", "-mini"))]
    assert sorted({**PUBLISHED, **ROUNDED}) == sorted(real), "a new preset needs its published count here"
    for name in real:
        count = parameters(resolve(name, None, []).model)
        if name in PUBLISHED:
            assert count["total"] == PUBLISHED[name], name
        else:
            assert count["total"] == pytest.approx(ROUNDED[name], rel=0.005), name
        if name in ACTIVE:  # model cards round, and some leave out the tables
            counted = (count["active"], count["active"] - count["embedding"])
            assert any(number == pytest.approx(ACTIVE[name], rel=0.11) for number in counted), name
        else:
            assert count["active"] == count["total"]
    deepseek = parameters(resolve("deepseek-v3", None, []).model)
    assert deepseek["ahead"] == pytest.approx(11.5e9, rel=0.02)  # without embedding and head


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", recipes())
def test_every_recipe_builds_without_storage_what_is_counted(name):
    """The whole model, every layer of it, on one rank."""
    model = resolve(name, None, []).model
    model = replace(model, vocab=model.vocab or 500, vocab_multiple=1)
    experts = mixture(model)
    if model.layers * (experts.experts if experts else 1) > 4000:
        pattern = pattern_text(config.layer_kinds(model)[:8])
        model = replace(model, layers=8, pattern=pattern)
    stage = PipelineStage(config.Config(model=model), mesh_of_one_stage(defaults()), 0, model.layers)
    count = parameters(model)
    assert sum(param.spec.numel for param in sharded_parameters(stage)) == count["total"] + count["ahead"]
    assert all(param.numel() == 0 for param in stage.parameters())


def shapes(params):
    fields = ("shape", "role", "partial_over", "is_expert", "is_replicated_over_tp")
    return sorted(str([getattr(param.spec, name) for name in fields]) for param in params)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "name",
    ["llama3-tiny", "gpt2-tiny", "mixtral-tiny", "dots1-tiny", "deepseek-v3-tiny", "qwen2-moe-tiny",
     "mistral-tiny"],
)
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_layers_of_one_kind_are_alike(name, parallel):
    cfg = shrunk(name, parallel)
    cfg = replace(cfg, train=replace(cfg.train, dtype="fp8", fp8="rowwise", fp8_keep=1))
    described = describe_stage(cfg, 0, cfg.model.layers)
    real = PipelineStage(cfg, mesh_of_one_stage(cfg), 0, cfg.model.layers)
    for module, part in zip(real.parts(), described.parts):
        table = [] if part.shared_table is None else [part.shared_table]
        assert shapes(sharded_parameters(module)) == shapes([*part.params, *table]), type(module)


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


class WiderMLP(MLP):
    """An MLP with one more projection, which it declares."""

    def __init__(self, cfg, mesh, layer, shared=None):
        super().__init__(cfg, mesh, layer, shared)
        box = Box.whole(f"layers.{layer}.mlp.more.weight", (cfg.model.mlp.width, cfg.model.hidden))
        self.more = parameter(ParameterSpec((box,), "hidden", cfg.model.init_std))


def test_a_new_projection_is_counted_everywhere(monkeypatch):
    # init_std: no other test has described these models
    model = replace(resolve("llama3-tiny", None, []).model, vocab=512, init_std=0.123)
    plain = replace(model, init_std=0.124)
    total, flops = parameters(plain)["total"], flops_per_token(plain, 256)
    monkeypatch.setitem(MLPS, MLPConfig, WiderMLP)
    more = model.layers * model.mlp.width * model.hidden
    assert parameters(model)["total"] == total + more
    assert flops_per_token(model, 256) == flops + 6 * more


def test_a_gated_activation_counts_three_matrices():
    model = shrunk("gpt2-tiny").model
    gated = with_values(model, {"mlp.activation": "swiglu"})
    rows = model.mlp.width * model.hidden + (model.mlp.width if model.mlp.bias else 0)
    assert parameters(gated)["total"] == parameters(model)["total"] + model.layers * rows
    assert split_by_cost(model, 2, 256) and split_by_cost(gated, 2, 256)


# ---- FLOPs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 5, 16, 99])
def test_keys_that_a_query_sees(window):
    lengths = (3, 16, 1)
    seen = [sum(min(place + 1, window or 99) for place in range(length)) for length in lengths]
    assert mean_keys(16, window) == pytest.approx(seen[1] / 16)
    assert keys_seen(lengths, window) == pytest.approx(sum(seen) / 20)


def test_flops_of_a_dense_model_whose_head_is_the_table():
    m = shrunk("llama3-tiny", vocab_multiple=1, tied=True).model
    mixer = m.mixer
    width = m.hidden // mixer.heads  # of a head
    attention = m.hidden * (mixer.heads + 2 * mixer.kv_heads) * width + mixer.heads * width * m.hidden
    scores = 2 * mixer.heads * width * 7.5  # with keys, and with values
    block = 2 * (attention + scores + 3 * m.hidden * m.mlp.width)
    head = 2 * m.hidden * m.vocab
    assert flops_of_parts(m, (14,), 14) == pytest.approx([0, *[block] * 4, head], rel=1e-12)


def test_flops_of_a_mixture_are_those_of_the_experts_that_a_token_has():
    m = shrunk("qwen2-moe-tiny", vocab_multiple=1).model
    mixer = m.mixer
    width = m.hidden // mixer.heads
    attention = m.hidden * (mixer.heads + 2 * mixer.kv_heads) * width + mixer.heads * width * m.hidden
    attention += 2 * mixer.heads * width * 7.5
    dense = 3 * m.hidden * value_at(m, "blocks.dense.mlp.width")
    e = m.mlp
    expert = 3 * m.hidden * e.width
    mixture = (e.top_k + e.shared.experts) * expert + m.hidden * e.experts + m.hidden  # and router, and gate
    blocks = [2 * (attention + mlp) for mlp in (dense, mixture, dense, mixture)]
    head = 2 * m.hidden * m.vocab
    assert flops_of_parts(m, (14,), 14) == pytest.approx([0, *blocks, head], rel=1e-12)


def test_flops_of_latent_attention_with_a_module_ahead_and_a_window():
    m = with_values(shrunk("deepseek-v3-tiny", vocab_multiple=1).model, {"mixer.window": 3})
    mixer = m.mixer
    keys = (1 + 2 + 3 * 8) / 10  # the mean of ten tokens
    query = mixer.nope_dim + mixer.rope_dim
    attention = m.hidden * (mixer.q_rank + mixer.kv_rank + mixer.rope_dim)
    attention += mixer.q_rank * mixer.heads * query
    attention += mixer.kv_rank * mixer.heads * (mixer.nope_dim + mixer.v_dim)
    attention += mixer.heads * mixer.v_dim * m.hidden
    attention += mixer.heads * (query + mixer.v_dim) * keys
    dense = 3 * m.hidden * value_at(m, "blocks.dense.mlp.width")
    e = m.mlp
    mixture = (e.top_k + e.shared.experts) * 3 * m.hidden * e.width + m.hidden * e.experts
    head = m.hidden * m.vocab
    ahead = 2 * m.hidden * m.hidden + attention + mixture + head  # a join, a block, the head once more
    parts = [0, attention + dense, *[attention + mixture] * 3, head + ahead]
    want = [2 * one for one in parts]
    assert m.mtp.modules == 1
    assert flops_of_parts(m, (10,), 10) == pytest.approx(want, rel=1e-12)
    assert flops_per_token(m, 10) == pytest.approx(3 * sum(want), rel=1e-12)


FREEZING = {  # layers without a backward; frozen matrices of MLPs elsewhere
    "embedding: lr_factor 0; layers.0.*: lr_factor 0; layers.1.*: lr_factor 0": (2, 0),
    "layers.*.mlp.*: lr_factor 0": (0, 4 * 3),
    "layers.0.*: lr_factor 0; layers.3.mlp.*: lr_factor 0": (0, 3),
}


@pytest.mark.parametrize("groups, without", FREEZING.items(), ids=FREEZING)
def test_flops_of_training_leave_out_what_frozen_parameters_need_not(groups, without):
    """Of three times the forward: two of a part without a backward, one of a frozen matrix elsewhere."""
    m = shrunk("llama3-tiny", vocab_multiple=1).model
    _, block, *_ = parts = flops_of_parts(m, (14,), 14)
    layers, matrices = without
    want = 3 * sum(parts) - 2 * layers * block - 2 * matrices * m.hidden * m.mlp.width
    if groups.startswith("layers.0.*"):  # the embedding trains: layer 0 has a backward
        width = m.hidden // m.mixer.heads
        attention = m.hidden * (2 * m.mixer.heads + 2 * m.mixer.kv_heads) * width
        want -= 2 * (attention + 3 * m.hidden * m.mlp.width)
    assert flops_per_token(m, 14, groups=groups) == pytest.approx(want, rel=1e-12)


def test_flops_of_training_adapters():
    """Two of each frozen matrix, three of an adapter's and of the scores."""
    m = shrunk("llama3-tiny", vocab_multiple=1).model
    lora = config.LoraConfig(rank=2, targets="mlp.down")
    adapters = 4 * 2 * 2 * (m.hidden + m.mlp.width)
    plain = flops_of_parts(m, (14,), 14)
    width = m.hidden // m.mixer.heads
    scores = 4 * 2 * 2 * m.mixer.heads * width * 7.5
    forward = sum(plain)
    want = 2 * (forward - scores) + 3 * scores + 3 * adapters
    assert flops_per_token(replace(m, lora=lora), 14) == pytest.approx(want, rel=1e-12)
