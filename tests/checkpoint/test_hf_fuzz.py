"""Random models near each Hugging Face family, and random damage to its config.json: every case is read or
written exactly, or refused in one line. Where transformers is installed, some of them give the same logits.
"""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
import whole_folder
from hf_models import FLAT, GENERAL, LONGROPE, PATHS, differences, general_model, with_key

from checkpoint.hf import config as hf_config
from checkpoint.hf import tensors as hf
from checkpoint.hf.families.table import FAMILIES
from checkpoint.trained import weights_only
from config import Config, ConfigError
from config.reading import defaults
from config.reading.rules import validate
from model.router import mixture
from scripts.convert import as_whole

CASES = 90  # of each family whose config.json is damaged
MODELS = 160  # of each family that are written: most are of none
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}
OUT_AS = {  # families that are only read: the earlier one that their models are written as
    "hy_v3": "dots1",
    "glm4_moe_lite": "deepseek_v3",
    "youtu": "deepseek_v2",
    "internlm3": "llama",
    "kimi_k2": "deepseek_v3",
    "cwm": "ministral",
    "qwen3_5_moe_text": "qwen3_next",
}
WRITTEN = [model_type for model_type in FAMILIES if model_type not in OUT_AS]
# Values of every key of model.*: what a family has, what no family has, and the edges of what is legal.
MODEL_VALUES = {
    "layers": (1, 3), "hidden": (24, 25), "mlp.width": (40, 20), "vocab": (50, None),
    "vocab_multiple": (1, 64), "context": (96, 30),
    "norm.kind": ("rmsnorm", "layernorm"), "norm.eps": (1e-5, 0.0, 1.0, -1e-9),
    "norm.place": ("before", "after", "around"), "norm.bias": (True, False),
    "norm.weight": (True, False), "embed_norm": (True, False),
    "residual": ("sequential", "parallel", "parallel_norms"),
    "residual_scale": (1.0, 0.5), "embed_scale": (1.0, 3.0),
    "logit_scale": (1.0, 0.3), "logit_cap": (None, 20.0),
    "mlp.activation": ("swiglu", "gelu", "gelu_erf", "geglu", "clamped_swiglu", "relu2", "xielu"),
    "mlp.kind": ("mlp", "experts", "none"), "mixer.dt_min": (0.0, 0.5), "mlp.bias": (True, False),
    "positions": (None, "learned"),
    "tied": (True, False), "dropout": (0.0, 0.1), "init_std": (0.02, 2.0, -0.5), "preset": ("llama-mini",),
    "mtp": (None, {}), "mtp.modules": (1, 2), "mtp.weight": (0.3, 0.0), "mup": (None, {"base": 8}),
    "lora": (None, {}), "lora.rank": (4,), "lora.alpha": (8.0,), "lora.scale": ("lora", "rslora"),
    "lora.targets": ("attn.q", "*"), "lora.dropout": (0.0, 0.1),
    "mup.base": (8,), "mup.head_dim": (None, 4),
    "mixer.kind": ("attention", "latent", "short_conv"), "mixer.key_heads": (2,), "mixer.key_dim": (8,),
    "mixer.conv": (2,), "mixer.dim": (8,), "mixer.groups": (2,), "mixer.state": (8,),
    "mixer.negative_eigenvalues": (True, False), "mixer.norm_eps": (None, 1e-5),
    "mixer.heads": (1, 3, 4), "mixer.kv_heads": (None, 1, 2, 4),
    "mixer.head_dim": (None, 6, 8), "mixer.bias": (None, "qkv", "all"),
    "mixer.qk_norm": (None, "head", "whole", "after_rope", "unweighted"),
    "mixer.gate": (None, "channel", "head"), "mixer.gate.kind": ("channel", "head"),
    "mixer.gate.by": ("sigmoid", "softplus"),
    "mixer.growth": (None, {"every": 5}),
    "mixer.growth.rate": (0.3,), "mixer.growth.every": (5, 32), "mixer.growth.first": (0, 1),
    "blocks": (
        {}, {"local": {"mixer.window": 7}}, {"local": {"mixer.heads": 2}},
        {"local": {"mlp": {"kind": "mlp", "width": 28}}}, {"local": {"mlp.width": 28}},
    ),
    "pattern": (None, "local...", "block, local...", "(local, block)...", "2 local, block..."),
    "mixer.keys_of": (None, "local"),
    "mixer.chunk": (None, 8), "mixer.scale": (None, 0.5), "mixer.softcap": (None, 20.0),
    "mixer.sinks": (True, False), "mixer.rope.share": (1.0, 0.5),
    "mixer.window": (None, 7, 64), "mixer.kernel": ("auto", "reference"), "mixer.kv_rank": (12,),
    "mixer.q_rank": (None, 14), "mixer.nope_dim": (6, 8), "mixer.rope_dim": (8, 4), "mixer.v_dim": (10, 14),
    "mixer.value_dim": (None, 10, 6), "mixer.value_scale": (1.0, 0.5),
    "mixer.rope": (None, {}, {"share": 0.5, "scaling": LONGROPE}),
    "mixer.rope.base": (1e4, 100.0, 1.0, 0.0, -2.0),
    "mixer.rope.pairs": (True, False), "mixer.rope.scaling": (None,),
    "mixer.rope.scaling.kind": ("llama3", "yarn", "linear"),
    "mixer.rope.scaling.short": ((1.0, 2.0), (1.0, 2.0, 3.0)),
    "mixer.rope.scaling.long": ((1.0, 2.0), (0.5, 2.0, 3.0), (1.0, 2.0, 3.0, 4.0)),
    "mixer.rope.scaling.truncate": (True, False),
    "mixer.rope.scaling.factor": (2.0, 1.0, 0.5),
    "mixer.rope.scaling.low_freq": (1.0, 0.5, 0.0, -1.0, 4.0, 8.0),
    "mixer.rope.scaling.high_freq": (4.0, 32.0, 0.5, 0.0), "mixer.rope.scaling.original": (8192, 32, 4, 1),
    "mixer.rope.scaling.mscale": (1.0, 0.7, 0.0), "mixer.rope.scaling.mscale_all": (0.0, 0.7),
    "mlp.limit": (None, 0.2), "mlp.shared.limit": (None, 0.3),
    "mlp.experts": (8, 1), "mlp.top_k": (1, 3, 8), "mlp.shared": (None, {}), "mlp.shared.experts": (1, 2),
    "mlp.shared.gate": (True, False), "mlp.router.scores": ("softmax", "sigmoid"),
    "mlp.router.renorm": (True, False), "mlp.router.groups": (1, 2, 4), "mlp.router.group_top_k": (1, 2),
    "mlp.router.scale": (1.0, 2.5), "mlp.router.weighs": ("output", "input"),
    "mlp.router.logit_bias": (True, False), "mlp.router.bias_rate": (None, 1e-3, 0.0),
    "mlp.router.jitter": (0.0, 0.1), "mlp.router.aux": (None, {"weight": 0.0}),
    "mlp.router.aux.weight": (0.0, 0.01), "mlp.router.aux.over": ("sequence", "global"),
    "mlp.router.z_loss": (0.0, 1e-3), "mlp.capacity": (None, {"factor": 1.5}), "mlp.capacity.factor": (1.5,),
    "mlp.capacity.drop": ("probability", "position"), "mlp.capacity.pad": (False, True),
}  # fmt: skip
# Of layers with and without experts, and of the MLPs of the others, in the words of the records.
FLAT_VALUES = {
    "experts": (None, 8, 1), "moe_ffn": (20, 16), "shared_experts": (0, 1, 2), "first_dense": (0, 1, 2, 3),
    "moe_every": (1, 2, 4), "router_bias": (True, False),
    "limits": ((), (0.1, None, 0.1), (0.2,) * 3), "shared_limits": ((), (None, None, 0.3)),
}

# Values of keys of config.json, beside those that any key may get.
ANY_KEY = (None, True, False, 0, 1, -1, 2.5, "x", "2", "", [], {}, [1], {"a": 1}, math.nan, math.inf, 10**400)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
THEIR_LONGROPE = {
    **YARN, "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0],
}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
JSON_VALUES = {
    "rope_theta": (100.0, 1.0, 0, -3.0),
    "layer_types": (["full_attention"] * 3, ["sliding_attention"] * 3, ["x"]),
    "hidden_act": ("silu", "gelu"), "activation_function": ("gelu_new", "gelu"), "sliding_window": (5, 0),
    "max_window_layers": (0, 1, 3), "use_sliding_window": (True, False), "num_key_value_heads": (1, 2, 3),
    "num_attention_heads": (2, 3, 4), "head_dim": (6, 8), "tie_word_embeddings": (True, False),
    "attention_bias": (True,), "mlp_bias": (True,), "qkv_bias": (True, False), "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"), "norm_topk_prob": (True, False),
    "n_group": (1, 2, 3), "topk_group": (1, 2), "num_experts": (4, 8), "num_local_experts": (4, 8),
    "n_routed_experts": (4, 8), "moe_layer_freq": (1, 2), "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([0], [1], [0, 1, 2]),
    "mlp_layer_types": (["dense", "sparse", "sparse"], ["sparse"] * 3, ["sparse", "dense", "sparse"]),
    "initializer_range": (0.03, 1.5), "attention_out_bias": (True, False), "use_qk_norm": (True, False),
    "original_max_position_embeddings": (32,), "first_k_dense_replace": (0, 1, 3), "n_shared_experts": (0, 2),
    "shared_expert_intermediate_size": (20, 30), "num_mtp_layers": (0, 2), "rope_interleave": (True, False),
    "q_lora_rank": (None, 10), "hidden_size": (16, 25), "num_hidden_layers": (2, 4), "clip_qkv": (8.0,),
    "partial_rotary_factor": (0.5, 1.0), "quantization_config": ({"bits": 8},), "rms_norm_eps": (0, -1.0),
    "rope_scaling": (YARN, LLAMA3, THEIR_LONGROPE, {"type": "linear", "factor": 2.0}, {"rope_theta": 77.0}),
    "rope_parameters": (YARN, LLAMA3, {"rope_type": "default", "rope_theta": 0}),
}  # fmt: skip
ROPE_VALUES = {
    "factor": (1.0, 0.5, 4.0, None), "original_max_position_embeddings": (4, 1, 0, None, 16.5),
    "beta_fast": (8.0, 0.5, 0, -1), "beta_slow": (0.5, 4.0, 0, -1, 40), "mscale": (0.7, 0),
    "mscale_all_dim": (0.7, 0), "attention_factor": (1.0, 2.0, 0, 10**400), "truncate": (True, False),
    "low_freq_factor": (4.0, 8.0, 0, -1.0), "high_freq_factor": (1.0, 0, None),
    "rope_theta": (100.0, 0, None), "partial_rotary_factor": (1.0, 0.5), "type": ("yarn", "default"),
}  # fmt: skip


def general_keys(model_type):
    """config.json of the general model in its own family, whichever an export prefers."""
    family = FAMILIES[model_type]
    header = {
        "architectures": [family.architecture], "model_type": model_type, "torch_dtype": "float32",
        "use_cache": True,
    }  # fmt: skip
    tokens = {"bos_token_id": 1, "eos_token_id": 2} if model_type == "cwm" else NO_SPECIAL_TOKENS
    return {**header, **tokens, **family.write(general_model(model_type))}


CONV_VALUES = {
    "layer_types": (["conv", "full_attention", "conv"], ["conv"] * 3, ["conv"], ["conv", "x", "conv"]),
    "conv_L_cache": (2, 0), "conv_bias": (True,), "intermediate_size": (41,), "block_ff_dim": (50,),
}
LINEAR_VALUES = {
    "layer_types": (
        ["full_attention", "linear_attention", "full_attention"], ["linear_attention"] * 3,
        ["full_attention"] * 3, ["linear_attention", "full_attention", "x"],
    ),
    "full_attention_interval": (2, 0), "linear_num_key_heads": (4, 1), "linear_conv_kernel_dim": (2, 3),
    "linear_key_head_dim": (4, 12), "linear_value_head_dim": (4, 12), "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",), "mtp_num_hidden_layers": (1,),
}
STEPS = ([0.0, math.inf], [0.01, math.inf], [0.0, 0.1], [0.0], "x")
LONE_TYPES = ["linear_attention", "mlp", "full_attention", "moe", "mlp"]
OWN_VALUES = {  # of keys that a family alone has
    "granitemoehybrid": {
        "layer_types": (["mamba", "attention", "mamba"], ["attention"] * 3, ["mamba"] * 3, ["mamba", "x"]),
        "position_embedding_type": ("rope", "nope", "x"), "num_local_experts": (4, None),
        "num_experts_per_tok": (2,), "shared_intermediate_size": (88, 50), "mamba_d_head": ("auto", 4, "x"),
        "mamba_n_groups": (1, 3), "mamba_d_conv": (2, 3), "mamba_expand": (1, 4), "time_step_limit": STEPS,
        "mamba_conv_bias": (False,), "mamba_proj_bias": (True,),
    },
    "nemotron_h": {
        "layers_block_type": (
            ["mamba", "attention", "mlp", "mlp", "mamba"], LONE_TYPES, LONE_TYPES[:4], ["mlp"] * 5, ["x"] * 5,
            None,
        ),
        "hybrid_override_pattern": ("M*-M-", "ME*EM", "x", ""), "num_hidden_layers": (5, 4),
        "time_step_min": (0.0, 0.1, -1), "time_step_limit": STEPS, "n_groups": (2, 3), "conv_kernel": (2,),
        "moe_latent_size": (8,), "n_routed_experts": (4,), "moe_shared_expert_intermediate_size": (50,),
        "use_conv_bias": (False,), "mlp_hidden_act": ("silu",), "num_nextn_predict_layers": (1,),
    },
    "smollm3": {
        "no_rope_layers": ([1, 0], [0, 1, 1], [1] * 5, [0] * 5, "x"), "no_rope_layer_interval": (1, 2, 0),
    },
    "lfm2": {
        **CONV_VALUES, "full_attn_idxs": ([1], [], ["x"]), "block_auto_adjust_ff_dim": (True,),
        "block_multiple_of": (8, 0), "block_ffn_dim_multiplier": (1.3, None),
    },
    "lfm2_moe": CONV_VALUES,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), LINEAR_VALUES),
    "kimi_linear": LINEAR_VALUES | {
        "linear_num_heads": (2, 0), "linear_head_dim": (6,), "first_k_dense_replace": (1, 2),
        "linear_attn_config": (
            {"num_heads": 2, "full_attn_layers": [2], "kda_layers": [1, 3]}, {"gate_lower_bound": -5.0},
            {"full_attn_layers": [2], "kda_layers": [1]}, {"head_dim": 6},
        ),
    },
    "olmo_hybrid": LINEAR_VALUES | {
        "linear_allow_neg_eigval": (True, False), "linear_key_head_dim": (None, 12),
        "linear_value_head_dim": (None, 4), "rope_theta": (100.0, None),
    },
    "step3p5": {
        "swiglu_limits": ([0.0, 7, None], [1.0], "x", [-1.0, 0, 0]), "gating": (True, "per-element"),
        "swiglu_limits_shared": ([0.1] * 3, [0.0] * 3, [0.1] * 4), "num_nextn_predict_layers": (1,),
        "num_sliding_attention_heads": (2, 4, 0), "moe_layers_enum": ("1,2", [2], [1], ""),
        "per_layer_config": ({}, {"0": {"num_attention_heads": 6}, "2": {"num_attention_heads": 6}}),
        "attention_other_setting": ({"num_attention_heads": 2}, {"head_dim": 9}, []),
        "query_pre_attn_scalar": (8, 20, 0), "share_expert_dim": (20, 30, 60),
        "rope_theta": ([1e3] * 3, [1e3, 1e4, 1e3], [1.0, 2.0, 3.0]), "rope_parameters": ({}, None),
        "partial_rotary_factors": ([0.5] * 3, [0.5, 1.0, 0.5], [0.5, 0.6, 0.7], [2.0] * 3),
        "layer_types": (["full_attention", "sliding_attention", "full_attention"], ["full_attention"] * 4),
    },
    "llama4_text": {
        "no_rope_layers": ([1, 0], [0, 1, 1], [1] * 3, [0] * 3, "x"), "no_rope_layer_interval": (1, 2, 0),
        "layer_types": (["full_attention", "chunked_attention", "full_attention"], ["chunked_attention"] * 3),
        "moe_layers": ([0], [1, 2], [0, 2], [], [0, 5]), "interleave_moe_layer_step": (2, 3, 4, 0),
        "attn_temperature_tuning": (True, False, 4), "floor_scale": (3, 0), "attn_scale": (0.3, 0.0, -1.0),
        "use_qk_norm": (True, False), "attention_chunk_size": (None, 4), "intermediate_size_mlp": (28,),
    },
}


def random_model(rng, model_type):
    """A model of the family with some keys changed; None if config/reading/rules.py does not allow it."""
    values = MODEL_VALUES | FLAT_VALUES
    keys = rng.sample(sorted(values), rng.choice((1, 2, 3)))
    changes = {key: rng.choice(values[key]) for key in keys}
    if rng.random() < 0.4:
        kind = rng.choice(("yarn", "llama3"))
        changes = {"mixer.rope.scaling": {"kind": kind, "factor": 2.0, "original": 32}, **changes}
    model = general_model(model_type)
    train = replace(defaults().train, steps=1, seq_len=16)
    try:
        for key, value in changes.items():
            model = with_key(model, key, value)
        is_legal = validate(Config(model=model, train=train)) is None
    except ConfigError:  # of no vocabulary, or a kind without the keys that it needs
        return None
    return model if is_legal else None


def damaged_json(rng, model_type):
    """config.json of a model of the family with some keys changed or left out."""
    keys = general_keys(model_type)
    values = JSON_VALUES | OWN_VALUES.get(model_type, {})
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice([*keys, *values])
        if key in keys and rng.random() < 0.1:
            del keys[key]
        else:
            keys[key] = rng.choice(values.get(key, ()) * 2 + ANY_KEY)
    if rng.random() < 0.3:
        scaling = dict(rng.choice((YARN, LLAMA3)))
        for key in rng.sample(sorted(ROPE_VALUES), rng.choice((0, 1, 2))):
            scaling[key] = rng.choice(ROPE_VALUES[key])
        keys[rng.choice(("rope_scaling", "rope_parameters"))] = scaling
    return keys


def read(folder, keys):
    (folder / "config.json").write_text(json.dumps(keys))
    return hf_config.read_hf_config(folder)


def test_the_values_cover_every_key():
    assert set(MODEL_VALUES) == set(PATHS)
    assert set(FLAT_VALUES) <= set(FLAT)
    assert set(GENERAL) == set(FAMILIES)
    for model_type in FAMILIES:
        written_as = OUT_AS.get(model_type, model_type)
        assert hf_config.family_of(general_model(model_type)) == written_as
        assert FAMILIES[model_type].obstacles(general_model(model_type)) == []


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("model_type", WRITTEN)
def test_a_model_is_written_exactly_or_refused_by_name(tmp_path, model_type):
    rng = random.Random(f"write {model_type}")
    written = refused = 0
    for _ in range(MODELS):
        model = random_model(rng, model_type)
        if model is None:
            continue
        try:
            keys = hf_config.to_hf_config(model, "float32", NO_SPECIAL_TOKENS)
        except ConfigError as error:
            refused += 1
            assert str(error).startswith("model.") and "\n" not in str(error)
            continue
        written += 1
        read_type, back = read(tmp_path, keys)
        assert read_type == keys["model_type"]
        assert not differences(model, back, 1e-9), model
    assert written > 5
    assert refused > 0


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_damaged_config_is_read_exactly_or_refused_by_name(tmp_path, model_type):
    rng = random.Random(f"read {model_type}")
    accepted = refused = 0
    for _ in range(CASES):
        keys = damaged_json(rng, model_type)
        try:
            read_type, model = read(tmp_path, keys)
        except ConfigError as error:
            refused += 1
            assert str(error).startswith(f"{tmp_path}/config.json: ") and "\n" not in str(error)
            continue
        if validate(Config(model=model, train=replace(defaults().train, steps=1, seq_len=16))) is not None:
            continue
        accepted += 1
        assert read_type not in OUT_AS or hf_config.family_of(model) in WRITTEN
        if FAMILIES[read_type].obstacles(model) == ["mlp.kind"]:
            assert mixture(model) is None, keys  # all layers are those without experts: another family has it
            continue
        _, back = read(tmp_path, {"model_type": read_type, **FAMILIES[read_type].write(model)})
        assert not differences(model, back, 1e-9), keys
    assert accepted > 5
    assert refused > 5


@torch.no_grad()
def write_random_weights(folder, model_type, model, rng):
    """Writes a folder of random weights; returns the stage that has them."""
    stage, pieces = weights_only(Config(model=model), torch.device("cpu"), "fp32")
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for box, tensor in pieces:
        scale = 1.5 / tensor.shape[1] ** 0.5 if tensor.dim() == 2 else 0.2
        tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
        if "norm." in box.key and box.key.endswith("weight"):
            tensor.add_(1)
        if box.key in hf.VOCAB_KEYS:
            tensor[model.vocab:] = 0
    hf.fold_mup(model, pieces)
    whole_folder.write_weights(folder, model_type, model, pieces, dtype=torch.float32)
    hf.fold_mup(model, pieces, undo=True)
    return stage


def in_transformers(transformers, folder, keys):
    whole = as_whole(keys)
    if whole is not keys:
        their_config = transformers.CONFIG_MAPPING[whole["model_type"]].from_dict(whole)
        return transformers.AutoModelForImageTextToText.from_pretrained(
            folder, config=their_config, dtype=torch.float32, local_files_only=True
        )
    (architecture,) = keys["architectures"]
    model_class = getattr(transformers, architecture, transformers.AutoModelForCausalLM)
    return model_class.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


@pytest.mark.slow(every=8)
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # no shared experts
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("model_type", WRITTEN)
def test_transformers_computes_the_same(transformers, tmp_path, model_type, number):
    rng = random.Random(f"logits {model_type} {number}")
    keys = None
    while keys is None:
        model = random_model(rng, model_type)
        is_tied = model is not None and model.mup and model.tied
        norm = getattr(model.mixer, "qk_norm", None) if model is not None else None
        if model is None or (is_tied and (model.mtp or not model.norm.weight)) or model.hidden % 4:
            continue  # no weights can hold this; CPU kernels of transformers want aligned experts
        if norm == "unweighted" and model.mup and model.mup.head_dim:
            continue  # nor the factor of these scores
        try:
            keys = hf_config.to_hf_config(model, "float32", NO_SPECIAL_TOKENS)
        except ConfigError:
            continue
    (tmp_path / "config.json").write_text(json.dumps(keys))
    stage = write_random_weights(tmp_path, keys["model_type"], model, rng)

    tokens = torch.arange(2 * 24).reshape(2, 24) % model.vocab
    ours = stage.logits(tokens, torch.arange(24).expand_as(tokens))
    theirs = in_transformers(transformers, tmp_path, keys)
    logits = theirs.eval()(input_ids=tokens, use_cache=False).logits
    difference, largest = (ours - logits).abs().max(), logits.abs().max()
    assert difference <= 2e-4 * largest, model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_whatever_transformers_writes_into_a_config_is_read(transformers, tmp_path, model_type):
    """Every attribute of its config object, those that equal its defaults included."""
    model = general_model(model_type)
    (tmp_path / "config.json").write_text(json.dumps(general_keys(model_type)))
    code = FAMILIES[model_type].code or model_type
    keys = transformers.CONFIG_MAPPING[code].from_pretrained(tmp_path).to_dict()
    _, back = read(tmp_path, json.loads(json.dumps(keys)))
    assert not differences(model, back, 1e-9)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_nothing_reads_is_refused_by_name(tmp_path, model_type):
    keys = general_keys(model_type)
    assert read(tmp_path, keys | {"attention_sinks": None})[0] == model_type
    with pytest.raises(ConfigError, match="attention_sinks = 4: this key is unknown for a "):
        read(tmp_path, keys | {"attention_sinks": 4})
