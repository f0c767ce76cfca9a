"""config.json <-> ModelConfig: every preset survives the trip, transformers counts the same parameters, the
rest is refused.
"""

import json

import pytest
import torch
from hf_models import differences, preset

from checkpoint.hf import config as hf_config
from checkpoint.hf.families.table import FAMILIES
from config import ConfigError, layer_model
from config.reading import presets
from config.tree import value_at
from model.rope import Llama3Scaling, RopeConfig
from plan.count import parameters

NONE = {"bos_token_id": None, "eos_token_id": None}
FAMILY = {  # start of a preset's name
    "qwen3-next": "qwen3_next", "gpt2": "gpt2", "llama4": "llama4_text", "llama": "llama",
    "mistral-small-4": "mistral4", "mistral4": "mistral4", "mistral": "mistral", "qwen2.5": "qwen2",
    "mixtral": "mixtral", "qwen1.5-moe": "qwen2_moe", "qwen2-": "qwen2_moe", "qwen3-moe": "qwen3_moe",
    "qwen3-30b": "qwen3_moe", "qwen3-235b": "qwen3_moe", "qwen3": "qwen3", "olmoe": "olmoe", "dots1": "dots1",
    "deepseek-v2": "deepseek_v2", "deepseek-v3": "deepseek_v3", "smollm3": "smollm3",
    "ministral3": "ministral3", "ministral": "ministral", "glm4.5": "glm4_moe", "minimax-m2": "minimax_m2",
    "ernie4.5": "ernie4_5", "gemma2": "gemma2", "gemma3": "gemma3_text", "olmo2": "olmo2", "olmo3": "olmo3",
    "granite-swa": "granite_swa", "granite": "granite", "arcee": "arcee", "nemotron-h": "nemotron_h",
    "nemotron3": "nemotron_h", "apertus": "apertus", "nanochat": "nanochat", "nemotron": "nemotron",
    "command-r": "cohere2", "cohere2": "cohere2", "glm4-": "glm4", "exaone4": "exaone4", "phi4-mini": "phi3",
    "hunyuan": "hunyuan_v1_dense", "trinity": "afmoe", "lfm2-8b": "lfm2_moe", "lfm2-1.2b": "lfm2",
    "short-conv": "lfm2", "delta-": "qwen3_5_text", "olmo-hybrid": "olmo_hybrid",
    "mamba-": "granitemoehybrid", "kimi-": "kimi_linear", "gpt-oss": "gpt_oss", "laguna": "laguna",
    "mimo": "mimo_v2_flash", "step3": "step3p5", "pythia": "gpt_neox",
    "speedrun": "nanochat",
}
COUNTED = (
    "gpt2", "llama3-8b", "llama3.2-1b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "deepseek-v2-lite",
    "deepseek-v3", "mixtral-8x22b", "qwen1.5-moe-a2.7b", "qwen2-57b-a14b", "qwen3-235b-a22b", "olmoe-1b-7b",
    "dots1-142b", "smollm3-3b", "minimax-m2", "ernie4.5-0.3b", "gemma2-2b", "gemma3-1b", "olmo3-7b",
    "granite-3.3-2b", "command-r7b", "glm4-9b", "mimo-v2-flash", "apertus-8b", "mistral-small-4",
    "phi4-mini-3.8b", "exaone4-32b", "lfm2-1.2b", "lfm2-8b-a1b", "qwen3-next-80b-a3b", "olmo-hybrid-7b",
    "kimi-linear-48b-a3b", "nemotron-h-8b", "nemotron3-30b-a3b", "delta-tiny", "gpt-oss-20b",
    "llama4-maverick", "qwen2-moe-tiny", "pythia-1b",
)
LLAMA = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 48, "intermediate_size": 100,
    "num_hidden_layers": 2, "num_attention_heads": 6,
}
DEEPSEEK = {**LLAMA, "model_type": "deepseek_v3", "first_k_dense_replace": 2}
DEEPSEEK_V2 = {**DEEPSEEK, "model_type": "deepseek_v2", "num_experts_per_tok": 2}
MIXTURE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 1,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 36, "n_layer": 2, "n_head": 3}
SEED = {**LLAMA, "model_type": "seed_oss", "num_key_value_heads": 3}
STARCODER = {**LLAMA, "model_type": "starcoder2"}
SOLAR = {**LLAMA, **MIXTURE, "model_type": "solar_open", "num_key_value_heads": 3}
SARVAM = {**LLAMA, **MIXTURE, "model_type": "sarvam_moe", "num_key_value_heads": 3}
HUNYUAN = {**LLAMA, "model_type": "hy_v3", "num_key_value_heads": 3, "num_experts": 4}
GLM = {**LLAMA, **MIXTURE, "model_type": "glm4_moe_lite", "num_key_value_heads": 6}
YOUTU = {**LLAMA, "model_type": "youtu", "num_key_value_heads": 6}
INTERN = {**LLAMA, "model_type": "internlm3"}
PHI = {**LLAMA, "model_type": "phi3"}
KIMI = {**LLAMA, "model_type": "kimi_linear", "num_key_value_heads": 6}
MIMO = {  # as the published folder spells it
    **LLAMA, "model_type": "mimo_v2_flash", "num_hidden_layers": 3, "head_dim": 192, "v_head_dim": 128,
    "num_key_value_heads": 3, "swa_num_key_value_heads": 6, "swa_num_attention_heads": 6,
    "swa_head_dim": 192, "swa_v_head_dim": 128, "partial_rotary_factor": 0.334, "rope_theta": 5000000,
    "swa_rope_theta": 10000, "sliding_window": 128, "sliding_window_size": 128, "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False, "n_routed_experts": 8, "n_shared_experts": None,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "routed_scaling_factor": None,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "layernorm_epsilon": 1e-5, "attention_value_scale": 0.707,
    "attention_chunk_size": 128,
}
LAGUNA = {
    **LLAMA, "model_type": "laguna", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 20, "num_key_value_heads": 3,
}
STEP = {  # as published folders spell it: with a number for each of 4 layers, and of 2 modules after them
    **{key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}, "model_type": "step3p5",
    "num_hidden_layers": 4, "num_nextn_predict_layers": 2, "num_attention_groups": 2, "head_dim": 8,
    "num_attention_heads": 4, "moe_num_experts": 6, "moe_top_k": 2, "moe_intermediate_size": 20,
    "share_expert_dim": 40, "moe_layers_enum": "2,3,4,5", "moe_router_scaling_factor": 3.0,
    "moe_router_activation": "sigmoid", "use_moe_router_bias": True, "norm_expert_weight": True,
    "layer_types": [*["full_attention", *["sliding_attention"] * 2] * 2], "sliding_window": 5,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2,
        "head_dim": 8, "true_head_dim": 8,
    },
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0] * 2,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"], "use_head_wise_attn_gate": True, "zero_centered": True,
    "swiglu_limits": [0.0, 0.0, 0.0, 7, 0.0, 0.0], "swiglu_limits_shared": [0.0, 5.0, 16.0, 0.0, 0.0, 0.0],
}
YARN = {"rope_type": "yarn", "factor": 2.0}
LONGROPE = {"type": "su", "short_factor": [1.0, 1.0, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(tmp_path, said):
    (tmp_path / "config.json").write_text(said if isinstance(said, str) else json.dumps(said))
    return hf_config.read_hf_config(tmp_path)


LLAMA4 = {
    "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192,
    "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 202048,
}  # fmt: skip
PUBLISHED = {  # as they lie on the hub: in keys of their own, beside keys that change nothing
    "gpt-oss-20b": dict(
        model_type="gpt_oss", attention_bias=True, hidden_act="silu", initializer_range=0.02,
        layer_types=["sliding_attention", "full_attention"] * 12, num_hidden_layers=24, num_key_value_heads=8,
        rms_norm_eps=1e-05, tie_word_embeddings=False, experts_per_token=4, head_dim=64, hidden_size=2880,
        initial_context_length=4096,
        intermediate_size=2880, max_position_embeddings=131072, num_attention_heads=64, num_experts_per_tok=4,
        num_local_experts=32, rope_theta=150000, sliding_window=128, swiglu_limit=7.0, vocab_size=201088,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    ),
    "llama4-scout": {
        **LLAMA4, "attn_scale": 0.1, "attn_temperature_tuning": 4, "cache_implementation": "hybrid",
        "floor_scale": 8192, "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760,
        "moe_layers": list(range(48)), "no_rope_layers": [1, 1, 1, 0] * 12, "num_local_experts": 16,
        "use_qk_norm": True,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
    "llama4-maverick": {
        **LLAMA4, "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576, "no_rope_layers": [],
        "num_local_experts": 128, "rope_scaling": None, "use_qk_norm": False,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 65536, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "block_use_swiglu": True, "block_dim": 2048, "conv_L_cache": 3,
        "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "rope_theta": 1e6, "theta": 1e6,
        "tie_embedding": True, "use_pos_enc": True, "eos_token_id": 7,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120,
        "max_position_embeddings": 262144, "full_attention_interval": 4, "rope_theta": 1e7,
        "partial_rotary_factor": 0.25, "rope_scaling": None, "rms_norm_eps": 1e-6, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "use_sliding_window": False,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "num_hidden_layers": 27, "hidden_size": 2304, "vocab_size": 163840,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "intermediate_size": 9216, "model_max_length": 1048576, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": None, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "num_expert_group": 1,
        "topk_group": 1, "use_grouped_topk": True, "moe_intermediate_size": 1024, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [layer for layer in range(1, 27) if layer % 4], "short_conv_kernel_size": 4,
        },
    },
    "step3.7-flash": {
        **STEP, "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
        "num_nextn_predict_layers": 3, "vocab_size": 128896, "num_attention_heads": 64,
        "num_attention_groups": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
        "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
        "moe_layers_enum": ",".join(map(str, range(3, 45))), "sliding_window": 512,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8,
            "head_dim": 128, "true_head_dim": 128,
        },
        "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12, "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
        "rope_scaling": {**STEP["rope_scaling"], "original_max_position_embeddings": 131072},
        "swiglu_limits": [*[0.0] * 43, 7, 7, *[0.0] * 3],
        "swiglu_limits_shared": [*[0.0] * 43, 16, 16, *[0.0] * 3], "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset(tmp_path, name):
    kind, back = read(tmp_path, PUBLISHED[name])
    assert kind == PUBLISHED[name]["model_type"] and not differences(preset(name), back)


WITHOUT_FAMILY = {"shared-keys-tiny": "mixer.keys_of"}  # what no family has


@pytest.mark.parametrize("name, why", WITHOUT_FAMILY.items())
def test_a_preset_without_a_family_is_refused(name, why):
    with pytest.raises(ConfigError, match=f"{why}.* has no form in"):
        hf_config.to_hf_config(preset(name), "bfloat16", NONE)


@pytest.mark.parametrize("name", [name for name in presets() if name not in WITHOUT_FAMILY])
def test_every_preset_comes_back(tmp_path, name):
    m = preset(name)
    kind, back = read(tmp_path, hf_config.to_hf_config(m, "bfloat16", NONE))
    assert kind == next(FAMILY[start] for start in FAMILY if name.startswith(start))
    assert not differences(back, m)


@pytest.mark.slow(core=["qwen3-8b", "qwen2-57b-a14b"])
@pytest.mark.parametrize("name", COUNTED)
def test_transformers_counts_the_same_parameters(transformers, tmp_path, name):
    m = preset(name)
    (tmp_path / "config.json").write_text(json.dumps(hf_config.to_hf_config(m, "bfloat16", NONE)))
    with torch.device("meta"):
        their_config = transformers.AutoConfig.from_pretrained(tmp_path)
        model_class = getattr(transformers, FAMILIES[their_config.model_type].architecture)
        model = model_class._from_config(their_config)
    assert sum(p.numel() for p in model.parameters()) == parameters(m)["total"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_transformers(transformers, kind):
    """A config.json may leave out what equals them. None of ours stands for what follows from other keys."""
    defaults = {key: value for key, value in FAMILIES[kind].defaults.items() if value is not None}
    theirs = transformers.AutoConfig.for_model(FAMILIES[kind].code or kind)
    if "sliding_window" in defaults:  # theirs is null where it is not used
        assert transformers.AutoConfig.for_model(
            kind, use_sliding_window=True
        ).sliding_window == defaults.pop("sliding_window")
    rope = getattr(theirs, "rope_parameters", None) or vars(theirs)  # transformers 5 keeps rope_theta there
    stated = {"rope_theta": rope.get("full_attention", rope).get("rope_theta")}
    stated["rope_local_base_freq"] = rope.get("sliding_attention", {}).get("rope_theta")
    stated["rotary_emb_base"] = stated["rope_theta"]
    stated["rotary_pct"] = rope.get("partial_rotary_factor")
    for key, value in defaults.items():
        assert value == (stated[key] if key in stated else getattr(theirs, key)), key


def test_both_spellings_of_rope_mean_the_same(tmp_path):
    v4 = {**LLAMA, "rope_theta": 5e5, "rope_scaling": SCALED, "torch_dtype": "float32"}
    v5 = {**LLAMA, "rope_parameters": {"rope_theta": 5e5, **SCALED}, "dtype": "float32"}
    assert read(tmp_path, v4) == read(tmp_path, v5)
    m = read(tmp_path, v5)[1]
    scaling = Llama3Scaling(factor=8.0, low_freq=1.0, high_freq=4.0, original=64)
    assert m.mixer.rope == RopeConfig(base=5e5, scaling=scaling)


QWEN = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 3}
WINDOWED = {**QWEN, "use_sliding_window": True, "sliding_window": 7}


@pytest.mark.parametrize("said, ours", [
    ({},  # transformers' defaults
     {"norm.eps": 1e-6, "tied": False, "mixer.kv_heads": None, "mixer.rope.base": 10000.0, "context": 2048}),
    ({"rope_scaling": None}, {"mixer.rope.scaling": None}),
    ({"rope_scaling": {"type": "default"}}, {"mixer.rope.scaling": None}),
    ({"rope_scaling": {k: v for k, v in SCALED.items() if k[0] != "o"}, "max_position_embeddings": 77},
     {"mixer.rope.scaling.original": 77}),
    ({"attention_bias": True, "mlp_bias": True}, {"mixer.bias": "all", "mlp.bias": True}),
    ({"attention_bias": True}, {"mixer.bias": "all", "mlp.bias": False}),
    ({"mlp_bias": True}, {"mixer.bias": None, "mlp.bias": True}),
    ({"head_dim": 8}, {"mixer.head_dim": None}),
    ({"head_dim": 10}, {"mixer.head_dim": 10}),
    ({"model_type": "mistral", "num_key_value_heads": 2}, {"mixer.window": 4096}),
    ({"model_type": "mistral", "sliding_window": None}, {"mixer.window": None}),
    ({**QWEN, "sliding_window": 7, "max_window_layers": 0}, {"mixer.window": None}),
    ({**WINDOWED, "max_window_layers": 1}, {"pattern": "block, local..."}),
    (WINDOWED, {"mixer.window": None}),
    ({**WINDOWED, "max_window_layers": 0}, {"mixer.window": 7}),
    ({**WINDOWED, "layer_types": ["sliding_attention"] * 2}, {"mixer.window": 7}),
    ({**WINDOWED, "max_window_layers": 0, "layer_types": ["full_attention"] * 2}, {"mixer.window": None}),
    ({**DEEPSEEK, "num_nextn_predict_layers": 0}, {"mtp": None}),
    (DEEPSEEK_V2, {"mixer.q_rank": 1536}),
    ({**DEEPSEEK, "q_lora_rank": None}, {"mixer.q_rank": None}),
    (DEEPSEEK, {"mtp.modules": 1, "mixer.rope.pairs": True}),
    ({**DEEPSEEK, "rope_interleave": False}, {"mixer.rope.pairs": False}),
    ({"rope_scaling": {**YARN, "mscale": 0.7}}, {"mixer.rope.scaling.mscale": 1.0}),
    ({**DEEPSEEK, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.8}},
     {"mixer.rope.scaling.mscale_all": 0.8}),
    ({"rope_scaling": YARN}, {"mixer.rope.scaling.high_freq": 32.0}),
    # a step, as of Kimi K2
    ({"rope_scaling": {**YARN, "beta_fast": 1.0}}, {"mixer.rope.scaling.high_freq": 1.0}),
    ({"rope_scaling": {**YARN, "attention_factor": 1.0}}, {"mixer.rope.scaling.mscale": 0.0}),
    ({"rope_scaling": {**YARN, "factor": 1.0, "attention_factor": 1.0}}, {"mixer.rope.scaling.mscale": 1.0}),
    ({**DEEPSEEK, "num_mtp_layers": 2}, {"mtp.modules": 2}),
    ({**DEEPSEEK, **MIXTURE, "first_k_dense_replace": 0, "num_local_experts": 4}, {"mlp.experts": 4}),
    ({**LLAMA, "model_type": "mixtral", "num_experts": 4}, {"mlp.experts": 4}),
    ({**QWEN, "model_type": "qwen2_moe", "layer_types": ["full_attention"] * 2}, {"mixer.window": None}),
    ({**LLAMA, "model_type": "olmoe", "head_dim": 8}, {"mixer.head_dim": None}),
    ({**QWEN, "model_type": "qwen3"}, {"mixer.head_dim": 128, "mixer.qk_norm": "head"}),
    (SEED, {"mixer.bias": "qkv", "mixer.head_dim": 128}),
    ({**SEED, "attention_bias": False}, {"mixer.bias": None}),
    ({**SEED, "attention_out_bias": True, "mlp_bias": True}, {"mixer.bias": "all", "mlp.bias": True}),
    ({**SEED, "attention_out_bias": True}, {"mlp.bias": False}),
    ({**SEED, "mlp_bias": True}, {"mixer.bias": "qkv", "mlp.bias": True}),
    (STARCODER, {"tied": True, "mixer.window": None, "norm.eps": 1e-5}),
    ({**STARCODER, "sliding_window": 4096}, {"mixer.window": 4096}),
    (SOLAR, {"mixer.rope.base": 1e6, "mlp.width": 20, "pattern": None}),
    ({**SOLAR, "intermediate_size": None}, {"mlp.width": 20}),
    ({**SOLAR, "attention_bias": True}, {"mixer.bias": "qkv"}),
    (SARVAM, {"pattern": "dense, block...", "mixer.rope.base": 8e6}),
    ({**SARVAM, "use_qkv_bias": True}, {"mixer.bias": "qkv"}),
    ({**SARVAM, "use_qk_norm": False}, {"mixer.qk_norm": None}),
    (HUNYUAN, {"pattern": "dense, block...", "mlp.router.scale": 2.826, "mixer.rope.base": 11158840.0}),
    ({**HUNYUAN, "mlp_layer_types": ["sparse", "sparse"]}, {"pattern": None}),
    ({**HUNYUAN, "expert_hidden_dim": 24}, {"mlp.width": 24}),
    (GLM,
     {"pattern": "dense, block...", "blocks.dense.mlp.width": 100, "mtp": None, "mixer.rope.pairs": True}),
    ({**GLM, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1}, {"mtp.modules": 1}),
    ({**GLM, "head_dim": 48, "qk_rope_head_dim": 48}, {"mixer.rope_dim": 48}),
    (YOUTU, {"tied": True, "init_std": 2 / 240**0.5, "mlp.kind": "mlp"}),
    ({**YOUTU, "initializer_range": 0.02}, {"init_std": 0.02}),
    ({**INTERN, "qkv_bias": True, "bias": True}, {"mixer.bias": "all", "mlp.bias": True}),
    (INTERN, {"mixer.kv_heads": 2}),
    (PHI, {"mixer.kv_heads": None, "mixer.window": None}),
    ({**PHI, "rope_scaling": LONGROPE, "max_position_embeddings": 131072},
     {"mixer.rope.scaling.factor": 32.0}),  # of the usual original context
    ({**PHI, "rope_scaling": LONGROPE}, {"mixer.rope.scaling.long": (1.0, 2.0, 4.0, 8.0)}),
    ({**PHI, "partial_rotary_factor": 0.75}, {"mixer.rope.share": 0.75}),
    (MIMO,
     {"pattern": "dense, local...", "blocks.local.mixer.window": 129, "blocks.local.mixer.kv_heads": 6,
      "mixer.rope.share": 64 / 192, "mlp.router.scale": 1.0}),
    (LAGUNA, {"mixer.gate.kind": "head", "mixer.gate.by": "softplus", "mixer.rope.share": 0.5}),
    ({**LAGUNA, "gating": "per-element", "gating_types": ["per_element"] * 2},
     {"mixer.gate.kind": "channel"}),
    ({**PHI, "sliding_window": 2047, "original_max_position_embeddings": 4096}, {"mixer.window": 2047}),
])
def test_a_key_of_config_json_means_this_key_of_ours(tmp_path, said, ours):
    _, model = read(tmp_path, {**LLAMA, **said})
    assert {path: value_at(model, path) for path in ours} == ours


@pytest.mark.parametrize("model, key, ours, other", [
    (LLAMA, "hidden_act", "swish", "gelu"),
    (LLAMA, "partial_rotary_factor", 1.0, 2.0),
    (LLAMA, "quantization_config", None, {"bits": 8}),
    ({**QWEN, "model_type": "qwen3"}, "attention_bias", False, True),
    (GPT2, "activation_function", "gelu_pytorch_tanh", "relu"),
    (GPT2, "scale_attn_weights", True, False),
    (GPT2, "scale_attn_by_inverse_layer_idx", False, True),
    (GPT2, "add_cross_attention", False, True),
    ({**LLAMA, "model_type": "olmoe"}, "clip_qkv", None, 8.0),
    ({**QWEN, "model_type": "qwen2_moe"}, "use_sliding_window", False, True),
    ({**QWEN, "model_type": "qwen3_moe"}, "use_sliding_window", False, True),
    (DEEPSEEK, "scoring_func", "sigmoid", "softmax"),
    (DEEPSEEK, "topk_method", "noaux_tc", "greedy"),
    (DEEPSEEK, "moe_layer_freq", 1, 2),
    (DEEPSEEK_V2, "mlp_bias", False, True),
    (DEEPSEEK_V2, "norm_topk_prob", False, True),
    (DEEPSEEK_V2, "scoring_func", "softmax", "sigmoid"),
    (SEED, "partial_rotary_factor", 1.0, 0.5),
    (STARCODER, "use_bias", True, False),
    (STARCODER, "hidden_act", "gelu_pytorch_tanh", "gelu"),
    (STARCODER, "norm_type", "layer_norm", "rms_norm"),
    (STARCODER, "mlp_type", "default", "gated"),
    (STARCODER, "scale_attn_weights", True, False),
    (SOLAR, "partial_rotary_factor", 1.0, 0.5),
    (SOLAR, "use_qk_norm", False, True),
    (SOLAR, "first_k_dense_replace", 0, 1),
    (SARVAM, "partial_rotary_factor", 1.0, 0.5),
    (SARVAM, "num_nextn_predict_layers", 0, 1),
    (SARVAM, "use_bias", False, True),
    (SARVAM, "moe_router_enable_expert_bias", True, False),
    (SARVAM, "score_function", "sigmoid", "softmax"),
    (HUNYUAN, "attention_bias", False, True),
    (HUNYUAN, "mlp_bias", False, True),
    (HUNYUAN, "num_nextn_predict_layers", 0, 1),
    (HUNYUAN, "qk_norm", True, False),
    (HUNYUAN, "route_norm", True, False),
    (HUNYUAN, "moe_router_use_sigmoid", True, False),
    (HUNYUAN, "moe_router_enable_expert_bias", True, False),
    (HUNYUAN, "first_k_dense_replace", 1, 0),
    (HUNYUAN, "mlp_layer_types", ["dense", "sparse"], ["sparse", "dense"]),
    (HUNYUAN, "mlp_layer_types", ["dense", "sparse"], ["dense", "dense"]),
    (HUNYUAN, "mlp_layer_types", ["dense", "sparse"], ["dense"]),
    (HUNYUAN, "mlp_layer_types", ["dense", "sparse"], ["dense", "linear"]),
    (GLM, "attention_bias", False, True),
    (GLM, "topk_method", "noaux_tc", "greedy"),
    (GLM, "scoring_func", "sigmoid", "softmax"),
    (GLM, "first_k_dense_replace", 1, 3),
    (GLM, "partial_rotary_factor", 1.0, 0.5),
    (GLM, "num_key_value_heads", 6, 3),
    (YOUTU, "attention_bias", False, True),
    (YOUTU, "mlp_bias", False, True),
    (YOUTU, "num_key_value_heads", 6, 3),
    (INTERN, "attention_bias", False, True),
    (PHI, "attention_bias", False, True),
    (PHI, "partial_rotary_factor", 1.0, 2.0),
    (PHI, "head_dim", 8, 10),
])
def test_a_key_may_say_what_we_compute_and_nothing_else(tmp_path, model, key, ours, other):
    """A value that says what we compute anyway changes nothing; every other value is another model."""
    assert read(tmp_path, {**model, key: ours}) == read(tmp_path, model)
    with pytest.raises(ConfigError, match=f"config.json: .*{key}"):
        read(tmp_path, {**model, key: other})


def test_defaults_of_gpt2_stand_for_what_it_leaves_out(tmp_path):
    kind, m = read(tmp_path, GPT2)
    assert (kind, m.mlp.width, m.tied, m.context) == ("gpt2", 144, True, 1024)
    assert (m.norm.eps, m.dropout) == (1e-5, 0.0)


@pytest.mark.parametrize("said, words", [
    ("{", "not JSON"),
    ([1], "expected keys and values"),
    ({}, "model_type None is not supported; these are: gpt2, llama"),
    ({**LLAMA, "model_type": ["llama"]}, "model_type ['llama'] is not supported"),
    ({**LLAMA, "model_type": 3}, "model_type 3 is not supported"),
    ({**LLAMA, "model_type": "bert"}, "model_type 'bert'"),
    ({**LLAMA, "model_type": "deepseek_v32"},
     "model_type 'deepseek_v32' is not supported: no block here has sparse attention by an indexer"),
    ({**LLAMA, "hidden_size": "wide"}, "hidden_size = 'wide' is not a number"),
    ({**LLAMA, "hidden_size": None}, "hidden_size = None"),
    ({**LLAMA, "num_hidden_layers": 1.5}, "layers: expected a whole number"),
    ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size is missing"),
    ({k: v for k, v in DEEPSEEK_V2.items() if k != "num_experts_per_tok"}, "num_experts_per_tok is missing"),
    ({**LLAMA, "hidden_act": "relu"}, "hidden_act = 'relu' is not supported, only 'silu'"),
    ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
    ({**LLAMA, "model_type": "cohere2", "use_qk_norm": True}, "use_qk_norm = True is not supported"),
    ({**LLAMA, "model_type": "cohere2", "rotary_pct": 0.5}, "rotary_pct = 0.5 is not supported"),
    ({**LLAMA, "model_type": "hunyuan_v1_moe", "norm_topk_prob": False},
     "norm_topk_prob = False is not supported"),
    ({**LLAMA, "rope_scaling": {**YARN, "beta_mid": 3}}, "rope parameter beta_mid = 3 is not supported"),
    ({**LLAMA, "rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope scaling 'longrope'"),
    ({**LLAMA, "rope_scaling": {"rope_type": "yarn"}}, "yarn rope scaling without factor"),
    ({**DEEPSEEK, "num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ({**DEEPSEEK, "attention_bias": True}, "attention_bias = True"),
    ({**LLAMA, "rope_scaling": "llama3"}, "rope"),
    ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "without low_freq_factor"),
    ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({**QWEN, "layer_types": 3}, "layer_types = 3 is not a list of str"),
    ({**LLAMA, "model_type": "dots1", **MIXTURE, "max_window_layers": "x"},
     "max_window_layers = 'x' is not a number"),
    ({**LLAMA, "model_type": "qwen3_moe", "mlp_only_layers": ["x", 1]},
     "mlp_only_layers = ['x', 1] is not a list of int"),
    ({**LLAMA, "model_type": "qwen2_moe", "moe_intermediate_size": 0},
     "is not a multiple of moe_intermediate_size = 0"),
    ({**DEEPSEEK_V2, "first_k_dense_replace": 0, "topk_method": "group_limited_greedy"},
     "n_group is missing"),
    # layers of other kinds, or too few of them
    ({**LLAMA, "model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"]},
     "layer_types = ['sliding_attention', 'full_attention']: this key is unknown for a mistral"),
    ({**QWEN, "layer_types": ["chunked_attention"] * 2}, "layer_types = 'chunked_attention'"),
    ({**QWEN, "layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 2"),
    ({**QWEN, "model_type": "qwen2_moe", "layer_types": ["sliding_attention"] * 2},
     "layer_types = 'sliding_attention'"),
    ({**LLAMA, "model_type": "dots1", **MIXTURE, "layer_types": ["x", "x"]}, "layer_types = 'x'"),
    # keys that transformers reads although its config class does not declare them
    ({**LLAMA, "model_type": "olmoe", "head_dim": 10}, "head_dim = 10 is not supported"),
    ({**LLAMA, "model_type": "olmoe", "sliding_window": 7}, "sliding_window = 7 is not supported"),
    ({**GPT2, "num_hidden_layers": 3}, "n_layer = 2 and num_hidden_layers = 3 are the same key"),
    ({**DEEPSEEK, **MIXTURE, "num_local_experts": 8},
     "n_routed_experts = 4 and num_local_experts = 8 are the same key"),
    ({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts": 8},
     "num_local_experts = 4 and num_experts = 8 are the same key"),
    # rotary positions that the two sides compute differently, or not at all
    ({**LLAMA, "rope_scaling": {**YARN, "factor": 1.0, "attention_factor": 2.0}},
     "attention_factor = 2.0 is not supported where factor is at most 1"),
    ({**LLAMA, "rope_scaling": {**YARN, "factor": 4.0, "attention_factor": 0.5}},
     "attention_factor = 0.5 is not supported below 1"),
    ({**LLAMA, "rope_scaling": {**SCALED, "low_freq_factor": 8.0}}, "between 8.0 and 4.0 rotations"),
    ({**LLAMA, "rope_scaling": {**SCALED, "low_freq_factor": 0}}, "between 0 and 4.0 rotations"),
    ({**LLAMA, "rope_scaling": {**YARN, "beta_fast": 0.5}}, "between 1 and 0.5 rotations"),
    ({**LLAMA, "rope_scaling": {**YARN, "beta_slow": -1.0}}, "between -1.0 and 32 rotations"),
    (
        {**LLAMA, "rope_scaling": {**YARN, "beta_slow": 4.0, "original_max_position_embeddings": 1}},
        "between 4.0 and 32 rotations in 1 positions",  # every channel rotates less often
    ),
    ({**LLAMA, "rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1.0"),
    ({**LLAMA, "rope_theta": 0}, "rope_theta = 0 is not above 0"),
    ({**LLAMA, "rope_theta": -3.0}, "rope_theta = -3.0 is not above 0"),
    ({**LLAMA, "rope_scaling": {"rope_theta": 0}}, "rope_theta = 0 is not above 0"),
    ({**LLAMA, "rope_scaling": {"rope_theta": None}}, "rope_theta = None is not a number"),
    ({**LLAMA, "rope_scaling": {**YARN, "attention_factor": 10**400}}, "attention_factor"),
    # values out of range
    ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads = 0 is below 1"),
    ({**LLAMA, "rms_norm_eps": -1.0}, "rms_norm_eps = -1.0 is below 0"),
    ({**SEED, "attention_bias": False, "attention_out_bias": True},
     "attention_out_bias without attention_bias is not supported"),
    ({**SEED, "attention_out_bias": None}, "attention_out_bias = None is not a number"),
    ({**INTERN, "qkv_bias": True}, "attention_bias and mlp_bias differ"),
    ({**INTERN, "bias": True}, "attention_bias and mlp_bias differ"),
    ({**SOLAR, "n_shared_experts": None}, "n_shared_experts = None is not a number"),
    ({**SARVAM, "num_shared_experts": 2}, "n_shared_experts = 1 and num_shared_experts = 2 are the same key"),
    ({**GLM, "head_dim": 48, "qk_rope_head_dim": 64},
     "qk_rope_head_dim = 64 and head_dim = 48 are the same key"),
    ({**GLM, "num_hidden_layers": 1}, "mlp_layer_types = None of 1 layers is not supported"),
    ({**YOUTU, "n_routed_experts": 8}, "n_routed_experts = 8: this key is unknown for a youtu"),
    ({**INTERN, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
     "rope scaling 'dynamic' is not supported"),
    # layers with a state
    ({**LLAMA, "model_type": "lfm2", "layer_types": ["conv"]}, "layer_types names 1 layers"),
    ({**LLAMA, "model_type": "lfm2", "layer_types": ["conv", "x"]}, "layer_types = 'x' is not supported"),
    ({**LLAMA, "model_type": "lfm2", "conv_bias": True}, "conv_bias = True is not supported"),
    ({**LLAMA, "model_type": "lfm2", "block_use_swiglu": False}, "block_use_swiglu = False"),
    ({**LLAMA, "model_type": "lfm2", "block_multiple_of": 0}, "block_multiple_of = 0 is not above 0"),
    ({**LLAMA, "model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate = False"),
    ({**LLAMA, "model_type": "qwen3_5_text", "attention_bias": True}, "attention_bias = True"),
    ({**LLAMA, "model_type": "qwen3_5_text", "full_attention_interval": 0},
     "full_attention_interval = 0 is not supported"),
    ({**LLAMA, "model_type": "olmo_hybrid", "layer_types": ["linear_attention"] * 2},
     "no layer of full_attention or none of linear_attention"),
    ({**LLAMA, "model_type": "olmo_hybrid", "linear_num_key_heads": 0}, "linear_num_key_heads = 0"),
    ({**KIMI, "mla_use_nope": False}, "mla_use_nope = False is not supported"),
    ({**KIMI, "linear_attn_config": {"gate_lower_bound": -5.0}},
     "linear_attn_config.gate_lower_bound = -5.0 is not supported"),
    ({**KIMI, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2]}},
     "full_attn_layers and kda_layers do not name each of 2 layers once"),
    ({**PHI, "rope_scaling": YARN},
     "rope scaling 'yarn' is not supported in this family, only longrope and none"),
    ({**MIMO, "hybrid_layer_pattern": [0, 1, 0]}, "hybrid_layer_pattern = [0, 1, 0] is not supported"),
    ({**MIMO, "swa_rope_theta": 5e4}, "swa_rope_theta = 50000.0 is not supported"),
    ({**MIMO, "add_full_attention_sink_bias": True}, "add_full_attention_sink_bias = True"),
    (
        {**LLAMA, "model_type": "granite_swa", "layer_types": ["full_attention"] * 2,
         "layer_rope_theta": [0, 1e4]},
        "layer_rope_theta = [0, 10000.0] is not supported",
    ),
    ({**LLAMA, "model_type": "granitemoe_swa", "shared_intermediate_size": 30},
     "shared_intermediate_size = 30 is not a multiple of intermediate_size = 100"),
    ({**STEP, "gating": "per-element"}, "gating = 'per-element' is not supported"),
    ({**STEP, "swiglu_limits": [0.0, 7.0]}, "swiglu_limits = [0.0, 7.0] is not supported"),
    ({**STEP, "rope_theta": [5e6, 1e4, 2e4, 5e6]}, "only one number for each type of layer"),
    ({**STEP, "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4}},
     "attention_other_setting = {'num_attention_heads': 8, 'num_attention_groups': 4}"),
    ({**STEP, "per_layer_config": {"1": {"num_attention_heads": 8}}},
     "per_layer_config = {'1': {'num_attention_heads': 8}} is not supported"),
    ({**LAGUNA, "gating": False}, "gating = False is not supported"),
    ({**LAGUNA, "gating_types": ["per_head", "per_element"]}, "are not all 'per_head', as gating says"),
    ({**LAGUNA, "num_attention_heads_per_layer": [6, 9]}, "only one number above 0 for each type of layer"),
    ({**LAGUNA, "moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping = 30.0"),
    ({**PHI, "rope_scaling": SCALED}, "rope scaling 'llama3' is not supported in this family"),
    ({**PHI, "rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope' without numbers"),
    ({**PHI, "rope_scaling": {**LONGROPE, "short_factor": [1.0, 2.0]}},
     "short_factor has 2 numbers, and 8 channels are rotated; rope scaling 'longrope' has 4"),
    ({**PHI, "rope_scaling": {**LONGROPE, "long_factor": [1.0, 2.0, 0, 4.0]}},
     "rope scaling 'longrope' without numbers above 0 in long_factor"),
    ({**PHI, "rope_scaling": {**LONGROPE, "attention_factor": 0.5}}, "attention_factor = 0.5"),
    ({**PHI, "rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "longrope' of 1 tokens"),
])
def test_what_is_another_model_is_refused(tmp_path, said, words):
    with pytest.raises(ConfigError, match="config.json: ") as e:
        read(tmp_path, said)
    assert words in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("change, words", [
    ({"positions": "learned", "mixer.rope": None},
     "model.positions: learned has no form in granitemoehybrid, the nearest Hugging Face family"),
    ({"mixer.bias": "qkv", "mixer.qk_norm": "head"}, "model.mixer.qk_norm: head has no form in qwen2"),
    ({"norm.kind": "layernorm"},
     "model.norm.kind: layernorm has no form in llama, the nearest Hugging Face family; train with "
     "values that llama has, or add a family that has these"),
    ({"mlp": {"activation": "gelu", "bias": True}, "mixer.bias": "all"},
     "model.mlp.activation: gelu has no form in llama"),
    ({"mixer.qk_norm": "head", "norm.kind": "layernorm", "mlp.activation": "gelu"},
     "has no form in qwen3, the nearest Hugging Face family; nor has model."),
    ({"vocab": None}, "model.vocab: none has no form in llama"),
    ({"mixer.rope.scaling.low_freq": 8.0}, "model.mixer.rope.scaling.low_freq: 8.0 has no form in llama"),
    ({"mixer.rope.scaling.low_freq": 0.0}, "model.mixer.rope.scaling.low_freq: 0.0 has no form in llama"),
    ({"mixer.rope.scaling.low_freq": -1.0}, "model.mixer.rope.scaling.low_freq: -1.0 has no form in llama"),
    ({"mixer.rope.base": -2.0}, "model.mixer.rope.base: -2.0 has no form in llama"),
    ({"mixer.rope": {"base": 1.0, "scaling.kind": "yarn"}},
     "model.mixer.rope.base: 1.0 has no form in llama"),
    ({"mixer.rope.scaling": {"kind": "yarn", "low_freq": 3.9, "original": 1}},
     "model.mixer.rope.scaling.original: 1 has no form in llama"),
    ({"mixer.rope.scaling": {"kind": "yarn", "factor": 0.5, "mscale": 0.7}},
     "model.mixer.rope.scaling.mscale: 0.7 has no form in llama"),
    ({"norm.eps": -1e-6}, "model.norm.eps: -1e-06 has no form in"),
    ({"blocks": {"linear": {"mixer": {"kind": "kimi", "heads": 4, "dim": 8}}},
      "pattern": "(3 linear, block)..."}, "model.blocks: {linear: {mixer: {kind: kimi"),
])
def test_what_no_family_has_is_not_exported(change, words):
    with pytest.raises(ConfigError) as e:
        hf_config.to_hf_config(preset("llama3-tiny", change), "float32", NONE)
    assert words in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("change", [
    # LlamaConfig wants hidden % heads == 0
    {"hidden": 40, "mixer": {"heads": 3, "kv_heads": 1, "head_dim": 10}},
    {"init_std": 2.0},  # and 0 <= initializer_range <= 1
])
def test_mistral_stands_in_where_transformers_refuses_llama(change):
    said = hf_config.to_hf_config(preset("llama2-7b", change), "float32", NONE)
    assert (said["model_type"], said["sliding_window"]) == ("mistral", None)


def test_a_step_as_published_is_as_transformers_reads_it(transformers, tmp_path):
    """It drops what lists have for modules of multi-token prediction."""
    _, published = read(tmp_path, STEP)
    mlps = [layer_model(published, layer).mlp for layer in range(4)]
    assert [mlp.limit for mlp in mlps] == [None, 5.0, None, 7.0]
    assert [mlp.shared.limit for mlp in mlps[2:]] == [16.0, None]
    mixers = [layer_model(published, layer).mixer for layer in range(4)]
    assert [(mixer.heads, mixer.window) for mixer in mixers] == [(4, None), (6, 5), (6, 5), (4, None)]
    assert [mixer.rope.share for mixer in mixers] == [0.5, 1.0, 1.0, 0.5]

    keys = json.loads(json.dumps(transformers.AutoConfig.for_model(**STEP).to_dict()))
    assert "rope_theta" not in keys and keys["layer_types"] == STEP["layer_types"][:4]
    assert not differences(read(tmp_path, keys)[1], published)
