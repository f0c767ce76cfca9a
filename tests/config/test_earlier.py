"""Configs of before a model was made of parts: those that runs have saved are read as the same model, and a
key of before is refused with the name that it has now."""

import json
from dataclasses import asdict, replace

import pytest
import yaml

import config
import train
from config import Config, ModelConfig, MTPConfig, MupConfig
from config.pattern import BlockVariant
from config.reading import defaults, get_phases, resolve, saved_config
from config.reading.earlier import ADDED_LATE, NAMES_OF_EXPERTS, NAMES_OF_PARTS, NEW_NAMES, current_tree
from config.tree import plain_data, with_values
from model.attention import AttentionConfig, ChannelGate, HeadGate
from model.mla import LatentConfig
from model.mlp import MLPConfig, SharedExpertsConfig
from model.norm import LayerNormConfig, RMSNormConfig
from model.rope import Llama3Scaling, RopeConfig, YarnScaling
from model.router import BalanceLossConfig, CapacityConfig, ExpertsConfig, RouterConfig, mixture
from runtime.failure import fail_cleanly

# Every key of model.*, as a run saved it.
GPT2 = {
    "preset": "gpt2", "layers": 12, "hidden": 768, "heads": 12, "kv_heads": None, "head_dim": None,
    "ffn": 3072, "vocab": 50257, "vocab_multiple": 128, "context": 1024, "norm": "layernorm",
    "norm_eps": 1e-5, "activation": "gelu", "positions": "learned", "rope_theta": 10000.0,
    "rope_factor": None, "rope_kind": "llama3", "rope_low_freq": 1.0, "rope_high_freq": 4.0,
    "rope_original": 8192, "rope_mscale": 1.0, "rope_mscale_all": 0.0, "rope_pairs": False, "tied": True,
    "bias": True, "qkv_bias": False, "qk_norm": False, "qk_norm_whole": False, "kv_rank": None,
    "q_rank": None, "nope_dim": 128, "rope_dim": 64, "v_dim": 128, "mtp": 0, "mtp_weight": 0.3,
    "window": None, "dropout": 0.1, "init_std": 0.02, "mup_base": 256, "mup_head_dim": 32,
    "attention": "sdpa", "experts": None, "top_k": 2, "moe_ffn": None, "shared_experts": 0,
    "shared_gate": False, "first_dense": 0, "moe_every": 1, "router": "softmax", "router_renorm": True,
    "router_groups": 1, "router_group_top_k": 1, "router_scale": 1.0, "router_bias": False,
    "router_bias_rate": 0.001, "jitter": 0.0, "aux_loss": 0.0, "aux_kind": "sequence", "z_loss": 0.0,
    "capacity": None, "drop": "probability", "pad": False,
}  # fmt: skip
LLAMA3 = GPT2 | {
    "preset": "llama3.1-8b", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
    "ffn": 14336, "vocab": 128256, "context": 131072, "norm": "rmsnorm", "activation": "swiglu",
    "positions": "rope", "rope_theta": 500000.0, "rope_factor": 8.0, "rope_original": 4096, "tied": False,
    "bias": False, "qkv_bias": True, "qk_norm": True, "qk_norm_whole": True, "window": 4096, "dropout": 0.0,
    "mup_base": None, "mup_head_dim": None, "attention": "auto",
}  # fmt: skip
DEEPSEEK = GPT2 | {
    "preset": "deepseek-v3", "layers": 61, "hidden": 7168, "heads": 128, "ffn": 18432, "vocab": 129280,
    "vocab_multiple": 64, "context": 163840, "norm": "rmsnorm", "norm_eps": 1e-6, "activation": "swiglu",
    "positions": "rope", "rope_factor": 40.0, "rope_kind": "yarn", "rope_high_freq": 32.0,
    "rope_original": 4096, "rope_mscale": 0.9, "rope_mscale_all": 1.0, "rope_pairs": True, "tied": False,
    "bias": False, "kv_rank": 512, "q_rank": 1536, "nope_dim": 96, "rope_dim": 48, "v_dim": 80, "mtp": 2,
    "mtp_weight": 0.1, "dropout": 0.0, "init_std": 0.006, "mup_base": None, "mup_head_dim": None,
    "attention": "reference", "experts": 256, "top_k": 8, "moe_ffn": 2048, "shared_experts": 1,
    "first_dense": 3, "router": "sigmoid", "router_groups": 8, "router_group_top_k": 4, "router_scale": 2.5,
    "router_bias": True, "router_bias_rate": 0.002, "aux_loss": 0.0001, "aux_kind": "global", "capacity": 1.5,
    "drop": "position", "pad": True,
}  # fmt: skip
TODAY = {  # the same models
    "gpt2": (
        GPT2,
        ModelConfig(
            preset="gpt2", layers=12, hidden=768, vocab=50257, context=1024, positions="learned", tied=True,
            dropout=0.1, norm=LayerNormConfig(), mup=MupConfig(base=256, head_dim=32),
            mixer=AttentionConfig(heads=12, bias="all", rope=None, kernel="sdpa"),
            mlp=MLPConfig(width=3072, activation="gelu", bias=True),
        ),
    ),
    "llama3": (
        LLAMA3,
        ModelConfig(
            preset="llama3.1-8b", layers=32, hidden=4096, vocab=128256, context=131072, norm=RMSNormConfig(),
            mixer=AttentionConfig(
                heads=32, kv_heads=8, head_dim=128, window=4096, bias="qkv", qk_norm="whole",
                rope=RopeConfig(base=500000.0, scaling=Llama3Scaling(factor=8.0, original=4096)),
            ),
            mlp=MLPConfig(width=14336),
        ),
    ),
    "deepseek-v3": (
        DEEPSEEK,
        ModelConfig(
            preset="deepseek-v3", layers=61, hidden=7168, vocab=129280, vocab_multiple=64, context=163840,
            norm=RMSNormConfig(eps=1e-6), mtp=MTPConfig(modules=2, weight=0.1), init_std=0.006,
            mixer=LatentConfig(
                heads=128, kv_rank=512, q_rank=1536, nope_dim=96, rope_dim=48, v_dim=80, kernel="reference",
                rope=RopeConfig(
                    pairs=True,
                    scaling=YarnScaling(
                        factor=40.0, original=4096, high_freq=32.0, mscale=0.9, mscale_all=1.0
                    ),
                ),
            ),
            mlp=ExpertsConfig(
                experts=256, top_k=8, width=2048, shared=SharedExpertsConfig(experts=1),
                router=RouterConfig(
                    scores="sigmoid", groups=8, group_top_k=4, scale=2.5, bias_rate=0.002,
                    aux=BalanceLossConfig(weight=0.0001, over="global"),
                ),
                capacity=CapacityConfig(factor=1.5, drop="position", pad=True),
            ),
            blocks=(BlockVariant("dense", (("mlp", MLPConfig(width=18432)),)),),
            pattern="3 dense, block...",
        ),
    ),
}
# The keys of experts of a model of parts, as a run saved them beside the parts.
FLAT = {
    "experts": 8, "top_k": 3, "moe_ffn": 24, "shared_experts": 2, "shared_gate": True, "first_dense": 1,
    "moe_every": 2, "router": "sigmoid", "router_renorm": False, "router_groups": 4, "router_group_top_k": 2,
    "router_scale": 2.5, "router_weighs": "input", "router_logit_bias": True, "router_bias": True,
    "router_bias_rate": 0.01, "jitter": 0.1, "aux_loss": 0.0, "aux_kind": "micro", "z_loss": 0.5,
    "capacity": None, "drop": "position", "pad": True,
}  # fmt: skip
FLAT_TODAY = ExpertsConfig(
    experts=8, top_k=3, width=24, activation="relu2", shared=SharedExpertsConfig(experts=2, gate=True),
    router=RouterConfig(
        scores="sigmoid", renorm=False, groups=4, group_top_k=2, scale=2.5, weighs="input", logit_bias=True,
        bias_rate=0.01, jitter=0.1, aux=BalanceLossConfig(weight=0.0, over="micro"), z_loss=0.5,
    ),
)
PHASES = [
    {"after_steps": 10, "model.attention": "reference", "train.seq_len": 512},
    {"after_steps": 20, "model.dropout": 0.2, "optim.lr": 3e-4},
]
CURRENT_PHASES = [{"after_steps": 10, "model.mixer.kernel": "reference", "train.seq_len": 512}, PHASES[1]]


def saved(model, phases=None, **train_keys):
    """A config as a run has saved it, with every key of every section."""
    whole = plain_data(defaults())
    rows = json.dumps(phases) if phases else None
    return {**whole, "model": model, "train": {**whole["train"], "steps": 30, "phases": rows, **train_keys}}


@pytest.mark.parametrize("name", TODAY)
def test_a_saved_config_is_the_same_model(name):
    before, today = TODAY[name]
    wanted = with_values(Config(model=today), {"train.steps": 30, "train.phases": json.dumps(CURRENT_PHASES)})
    assert saved_config(saved(before, PHASES)) == wanted
    assert saved_config(plain_data(wanted)) == wanted  # keys of today stay
    assert current_tree(saved(before)) == current_tree(current_tree(saved(before)))


def with_flat_experts(**changes):
    """A model of parts as a run saved it when its experts were keys beside them."""
    mixer = plain_data(AttentionConfig()) | {"gate": "head", "gate_by": "softplus"}
    mlp = plain_data(MLPConfig(width=96, activation="relu2"))
    return {**plain_data(replace(defaults().model, layers=6)), "mixer": mixer, "mlp": mlp, **FLAT, **changes}


def test_experts_beside_the_parts_are_the_same_experts():
    """Layers 2, 4 and 6 have them; the kinds of blocks that have both are two."""
    local = {"mixer.window": 4, "mixer.gate": "channel", "mlp.width": 72}
    blocks = {"local": local, "near": {"mixer.window": 2}}
    rows = [
        {"after_steps": 2, "model.aux_loss": 0.3, "model.router_bias_rate": 0.2},
        {"after_steps": 4, "model.capacity": 1.5},
        {"after_steps": 6, "model.pad": False},
    ]
    old = with_flat_experts(blocks=blocks, pattern="2 local, near, 3 block")
    cfg = saved_config(saved(old, rows))
    assert [kind for kind in config.layer_kinds(cfg.model)] == [
        "local-dense", "local", "near", "block", "dense", "block",
    ]
    models = [config.layer_model(cfg.model, layer) for layer in range(6)]
    dense = {width: MLPConfig(width=width, activation="relu2") for width in (72, 96)}
    assert [model.mlp for model in models] == [
        dense[72], FLAT_TODAY, dense[96], FLAT_TODAY, dense[96], FLAT_TODAY,
    ]
    assert [model.mixer.window for model in models] == [4, 4, 2, None, None, None]
    gates = [model.mixer.gate for model in models]
    assert gates == [ChannelGate(by="softplus")] * 2 + [HeadGate(by="softplus")] * 4
    assert saved_config(plain_data(cfg)) == cfg

    experts = [phase.cfg.model.mlp for phase in get_phases(cfg).all]
    assert [each.router.aux.weight for each in experts] == [0.0, 0.3, 0.3, 0.3]
    assert [each.router.bias_rate for each in experts] == [0.01, 0.2, 0.2, 0.2]
    full = [CapacityConfig(factor=1.5, drop="position", pad=pad) for pad in (True, False)]
    assert [each.capacity for each in experts] == [None, None, *full]


def test_a_dense_model_with_keys_of_experts_is_dense():
    cfg = saved_config(saved(with_flat_experts(experts=None)))
    assert cfg.model.mlp == MLPConfig(width=96, activation="relu2") and mixture(cfg.model) is None


def test_experts_without_a_width_are_as_wide_as_the_mlp():
    cfg = saved_config(saved(with_flat_experts(moe_ffn=None, first_dense=0, moe_every=1)))
    assert cfg.model.mlp == replace(FLAT_TODAY, width=96) and cfg.model.pattern is None


def test_mtp_modules_of_another_kind_than_the_last_layer_are_refused():
    old = with_flat_experts(mtp={"modules": 1, "weight": 0.3})
    with pytest.raises(config.ConfigError, match="^model.mtp: its modules have another kind of MLP here"):
        saved_config(saved(old))


@pytest.mark.parametrize("name", TODAY)
@pytest.mark.parametrize("as_list", [False, True], ids=["one line", "list"])
def test_the_file_of_a_run_is_read(tmp_path, name, as_list):
    """Its phases are a list there. What the command line states comes above it, in the keys of today."""
    before, today = TODAY[name]
    tree = saved(before, PHASES)
    if as_list:
        tree["train"]["phases"] = PHASES
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    cfg = resolve(None, str(file), ["--model.mixer.heads", "64"])
    assert cfg.model == with_values(today, {"mixer.heads": 64})
    assert [phase.cfg.model.mixer.kernel for phase in get_phases(cfg).all][1:] == ["reference"] * 2


def test_a_config_without_the_keys_that_came_late_is_the_same_model():
    late = {key: value for key, value in LLAMA3.items() if key not in ADDED_LATE}
    model = saved_config(saved(late)).model
    assert model == with_values(TODAY["llama3"][1], {"mixer.qk_norm": "head"})


@pytest.mark.parametrize("stated, scaling", [
    ({"model.rope_factor": 4.0}, Llama3Scaling(factor=4.0, original=4096)),
    ({"model.rope_factor": 4.0, "model.rope_kind": "yarn", "model.rope_mscale": 0.5},
     YarnScaling(factor=4.0, original=4096, high_freq=4.0, mscale=0.5)),
])
def test_a_phase_may_begin_and_end_a_rope_scaling(stated, scaling):
    """Before, its keys were there without it."""
    rows = [
        {"after_steps": 10, **stated, "model.rope_theta": 7.0},
        {"after_steps": 20, "model.rope_low_freq": 2.0},
        {"after_steps": 25, "model.rope_factor": None},
    ]
    cfg = saved_config(saved({**LLAMA3, "rope_factor": None}, rows))
    ropes = [phase.cfg.model.mixer.rope for phase in get_phases(cfg).all]
    assert ropes == [
        RopeConfig(base=500000.0),
        RopeConfig(base=7.0, scaling=scaling),
        RopeConfig(base=7.0, scaling=with_values(scaling, {"low_freq": 2.0})),
        RopeConfig(base=7.0),
    ]


def test_every_key_that_has_moved_is_in_the_models_above():
    for before, _ in TODAY.values():
        assert {f"model.{key}" for key in NAMES_OF_PARTS} <= {f"model.{key}" for key in before}
    assert NAMES_OF_EXPERTS.keys() == FLAT.keys()
    moved = {key.removeprefix("model.") for key in NEW_NAMES}
    kept = set(GPT2) - moved
    assert kept < set(asdict(defaults().model))


@pytest.mark.parametrize("key", NEW_NAMES)
def test_an_old_key_is_refused_with_its_new_name(capsys, key):
    values = [before.get(key.removeprefix("model.")) for before in (GPT2, LLAMA3, DEEPSEEK, FLAT)]
    stated = next((value for value in values if value), 1)
    assert fail_cleanly(train.main, ["llama3-tiny", f"--{key}", str(stated)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {key}: ") and NEW_NAMES[key] in told and told.count("\n") == 1


def test_a_file_with_some_old_keys_is_refused(tmp_path):
    """It is not a config that a run has saved."""
    file = tmp_path / "some.yaml"
    file.write_text("model: {heads: 8, ffn: 512}\n")
    with pytest.raises(config.ConfigError, match="^model.heads: no such key; it is model.mixer.heads now$"):
        resolve(None, str(file), [])
