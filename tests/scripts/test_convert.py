"""Hugging Face models in, trained, and out again: the same logits, the same losses, for every dense family;
or one clear line.

The shapes are odd on purpose: 3 key/value heads, 9 heads, a head_dim that is not hidden / heads, vocabularies
of odd sizes, positions beyond the original context, windows shorter than the sequence.
"""

import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import job, write_documents
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

import config
from build import build_run
from checkpoint import state
from checkpoint.disk import store
from checkpoint.hf import config as hf_config
from checkpoint.hf import tensors as hf
from checkpoint.hf import tokenizer as hf_tokenizer
from checkpoint.hf.families.table import FAMILIES
from checkpoint.systems import foreign
from checkpoint.trained import load_run
from config.reading import dump, resolve, split_argv
from config.tree import with_values
from data import tokenizer
from data.indexed import IndexedDatasetWriter
from data.tokenizer_files import write_files
from model.context import GenerationCache
from model.rope import RopeConfig
from model.router import with_mlps
from parallel.microbatch import Microbatch
from parallel.topology.mesh import Mesh
from runtime.failure import fail_cleanly
from scripts import convert
from train import train_step

ROOT = Path(__file__).parent.parent.parent
SEQ = 40
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPE = {
    "vocab_size": 211, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64,
}
NEOX = {key: value for key, value in ROPE.items() if key != "num_key_value_heads"}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 3.0, 9.0]}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0,
    "beta_slow": 0.3,
}
LATENT = {
    **ROPE, "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 2, "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
DENSE_LATENT = {
    key: value for key, value in LATENT.items() if "experts" not in key and key != "first_k_dense_replace"
}
MIXED_LATENT = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}
GPT2 = {
    "vocab_size": 203, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_inner": 100, "n_positions": SEQ,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
}
SIGMOID = {**ROPE, "head_dim": 12, "moe_intermediate_size": 20, "num_experts_per_tok": 3}
# sequences longer than a chunk of a layer with a state
STATE = {**ROPE, "num_hidden_layers": 3, "max_position_embeddings": 160}
MAMBA_STATE = {
    **STATE, "mamba_n_heads": 8, "mamba_d_state": 10, "attention_multiplier": 0.2, "logits_scaling": 0.7,
    "embedding_multiplier": 5.0, "residual_multiplier": 0.3,
}
NEMOTRON_H = {
    **{key: value for key, value in STATE.items() if key != "num_hidden_layers"},
    "head_dim": 10,
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 12,
}
DELTA = {
    **STATE, "num_hidden_layers": 2, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
EVEN_DELTA = {  # with as many channels of keys as of values: else transformers saves convolutions badly cut
    **{key: value for key, value in DELTA.items() if key != "head_dim"},
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 6,
}
KIMI = {
    **STATE, "num_hidden_layers": 2, "num_key_value_heads": 6,
    "layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 12, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8, "v_head_dim": 6, "linear_num_heads": 3, "linear_head_dim": 10,
    "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
}
SHARED_EXPERT = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 20,
}
FULL_LAYERS = ["full_attention", "full_attention"]
GROUPED = {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2}
CASES = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": None}),
    "llama2": ("Llama", {**ROPE, "rms_norm_eps": 1e-5}),
    "llama3.1-9heads": ("Llama", {
        **ROPE, "hidden_size": 72, "num_attention_heads": 9, "head_dim": 10, "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
    }),
    "llama3.2-tied": ("Llama", {
        **ROPE, "rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_word_embeddings": True,
    }),
    "llama-biased": ("Llama", {**ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama-biased-attention": ("Llama", {**ROPE, "attention_bias": True}),
    "llama-biased-mlp": ("Llama", {**ROPE, "mlp_bias": True}),
    "mistral": ("Mistral", {**ROPE, "hidden_size": 50, "head_dim": 14, "sliding_window": 7}),
    "mistral-nowindow": ("Mistral", {**ROPE, "sliding_window": None}),
    "qwen2.5-tied": ("Qwen2", {
        **ROPE, "rope_theta": 1e6, "tie_word_embeddings": True, "use_sliding_window": False,
        "sliding_window": 5, "max_window_layers": 1,
    }),
    "qwen2-two-windows": ("Qwen2", {
        **ROPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    }),
    "ernie4.5": ("Ernie4_5", {**ROPE, "head_dim": 10}),
    "ernie4.5-biased": ("Ernie4_5", {**ROPE, "head_dim": 10, "use_bias": True, "tie_word_embeddings": False}),
    "glm4.5": ("Glm4Moe", {
        **SIGMOID, **GROUPED, "head_dim": 16, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    }),
    "glm4.5-air": ("Glm4Moe", {
        **SIGMOID, **GROUPED, "head_dim": 16, "attention_bias": True, "use_qk_norm": True,
        "partial_rotary_factor": 0.25, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0,
    }),
    "minimax-m2": ("MiniMaxM2", {
        **ROPE, "head_dim": 16, "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2,
        "partial_rotary_factor": 0.5,
    }),
    "gemma": ("Gemma", {**ROPE, "head_dim": 10}),
    "gemma2": ("Gemma2", {
        **ROPE, "head_dim": 10, "num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 12,
        "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5,
    }),
    "gemma2-uncapped": ("Gemma2", {
        **ROPE, "head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 10, "attention_bias": True,
        "final_logit_softcapping": None, "attn_logit_softcapping": None,
        "layer_types": ["sliding_attention", "sliding_attention"], "tie_word_embeddings": False,
    }),
    "gemma3": ("Gemma3Text", {
        **ROPE, "head_dim": 10, "num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }),
    "gemma3-1b": ("Gemma3Text", {**ROPE, "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 5}),
    "olmo2": ("Olmo2", ROPE),
    "olmo2-biased": ("Olmo2", {**ROPE, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {
        **ROPE, "num_hidden_layers": 4, "sliding_window": 5, "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    }),
    "granite": ("Granite", {
        **ROPE, "attention_multiplier": 0.2, "logits_scaling": 13.0, "embedding_multiplier": 5.0,
        "residual_multiplier": 0.3, "tie_word_embeddings": True,
    }),
    "arcee": ("Arcee", {**ROPE, "head_dim": 10, "rope_scaling": YARN}),
    "arcee-biased": ("Arcee", {**ROPE, "attention_bias": True, "mlp_bias": True}),
    "apertus": ("Apertus", {**ROPE, "rope_scaling": {**LLAMA3, "rope_theta": 5e5}, "dtype": torch.float32}),
    "apertus-biased": ("Apertus", {
        **ROPE, "attention_bias": True, "tie_word_embeddings": True, "dtype": torch.float32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    "nemotron": ("Nemotron", {**ROPE, "partial_rotary_factor": 0.5}),
    "cohere": ("Cohere", {**ROPE, "logit_scale": 0.3}),
    "cohere2": ("Cohere2", {**ROPE, "num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 0.3}),
    "glm": ("Glm", {**ROPE, "head_dim": 16}),
    "glm4-0414": ("Glm4", {**ROPE, "head_dim": 16}),
    "exaone4": ("Exaone4", {**ROPE, "head_dim": 10, "num_hidden_layers": 4, "sliding_window": 5}),
    "exaone4-full": ("Exaone4", {
        **ROPE, "sliding_window": None, "rope_scaling": LLAMA3, "layer_types": FULL_LAYERS,
    }),
    "hunyuan-v1": ("HunYuanDenseV1", {
        **ROPE, "head_dim": 10, "rope_scaling": {"type": "dynamic", "alpha": 30.0, "factor": 1.0},
        "attention_bias": True,
    }),
    "hunyuan-v1-moe": ("HunYuanMoEV1", {**ROPE, "head_dim": 10, "num_experts": 6, "moe_topk": [2, 2]}),
    "ernie4.5-moe": ("Ernie4_5_Moe", {
        **ROPE, "num_hidden_layers": 4, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 20,
        "moe_layer_start_index": 1, "moe_layer_interval": 2,
    }),
    "trinity": ("Afmoe", {
        **SIGMOID, "num_hidden_layers": 4, "num_experts": 8, "num_shared_experts": 2, "sliding_window": 5,
        "route_scale": 1.7, "mup_enabled": True,
    }),
    "nanochat": ("NanoChat", {**ROPE, "head_dim": 10, "rope_scaling": YARN}),
    "nanochat-biased": ("NanoChat", {
        **ROPE, "num_key_value_heads": 1, "attention_bias": True, "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    }),
    "gpt-neox": ("GPTNeoX", {**NEOX, "rotary_pct": 0.5, "hidden_dropout": 0.1}),
    "gpt-neox-in-a-row": ("GPTNeoX", {
        **NEOX, "use_parallel_residual": False, "attention_bias": False, "rotary_emb_base": 5e4,
        "rotary_pct": 1.0,
    }),
    "laguna": ("Laguna", {
        **SIGMOID, "num_hidden_layers": 4, "num_experts": 8, "shared_expert_intermediate_size": 40,
        "sliding_window": 5, "num_attention_heads_per_layer": [6, 9, 9, 6], "gating": "per-element",
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "moe_routed_scaling_factor": 1.7, "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "laguna-heads": ("Laguna", {
        **SIGMOID, "num_experts": 8, "shared_expert_intermediate_size": 20, "head_dim": 16,
    }),
    "mimo-v2": ("MiMoV2Flash", {
        **SIGMOID, "head_dim": 18, "v_head_dim": 10, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "num_hidden_layers": 4, "sliding_window": 5, "attention_bias": True, "num_attention_heads": 12,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "routed_scaling_factor": 1.7,
    }),
    "mimo-v2-sliding": ("MiMoV2Flash", {
        **SIGMOID, "head_dim": 16, "v_head_dim": 20, "n_routed_experts": 8, "sliding_window": 5,
        "attention_value_scale": None, "layer_types": ["sliding_attention"] * 2, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
        },
    }),
    "step3.7": ("Step3p7", {
        "vision_config": convert.MIN_VISION_TENSORS, "text_config": {
            **SIGMOID, "num_hidden_layers": 6, "n_routed_experts": 8, "share_expert_dim": 40,
            "layer_types": [*["full_attention", *["sliding_attention"] * 2] * 2], "sliding_window": 5,
            "num_sliding_attention_heads": 9, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4,
            "moe_router_scaling_factor": 1.7, "query_pre_attn_scalar": 20, "rope_parameters": {
                "full_attention": {**LLAMA3, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "swiglu_limits": [0.0, None, 0.03, None, 0.0, 0.04],
            "swiglu_limits_shared": [0.0, 0.05, None, 0.06, None, 0.05],
        },
    }),
    "step3.7-sliding": ("Step3p7", {
        "vision_config": convert.MIN_VISION_TENSORS, "tie_word_embeddings": True, "text_config": {
            **SIGMOID, "n_routed_experts": 4, "num_experts_per_tok": 2, "share_expert_dim": 20,
            "layer_types": ["sliding_attention"] * 3, "sliding_window": 7, "moe_layers_enum": "1,2,3",
            "num_hidden_layers": 3, "attention_other_setting": {"num_attention_heads": 3},
            "rope_theta": [1e3] * 3, "partial_rotary_factors": [0.5] * 3, "tie_word_embeddings": True,
        },
    }),
    "k-exaone": ("ExaoneMoe", {
        **SIGMOID, "num_hidden_layers": 4, "num_experts": 8, "n_group": 4, "topk_group": 2,
        "sliding_window": 5,
    }),
    "gpt-oss": ("GptOss", {
        **ROPE, "head_dim": 10, "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 3,
        "sliding_window": 5, "rope_scaling": {**YARN, "truncate": False}, "rope_theta": 1000.0,
    }),
    "gpt-oss-unbiased": ("GptOss", {
        **ROPE, "num_hidden_layers": 3, "intermediate_size": 20, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 7, "attention_bias": False, "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 5000.0, "tie_word_embeddings": True,
    }),
    "llama4": ("Llama4Text", {
        **ROPE, "head_dim": 10, "num_hidden_layers": 5, "intermediate_size": 20, "intermediate_size_mlp": 36,
        "num_local_experts": 6, "interleave_moe_layer_step": 2, "attention_chunk_size": 7, "floor_scale": 5,
        "attn_scale": 0.7, "rope_theta": 1000.0,
        "rope_scaling": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.0},
    }),
    "llama4-two-experts": ("Llama4Text", {
        **ROPE, "num_hidden_layers": 4, "intermediate_size": 20, "intermediate_size_mlp": 36, "head_dim": 8,
        "num_local_experts": 5, "num_experts_per_tok": 2, "moe_layers": [2, 3],
        "no_rope_layers": [1, 0, 0, 1], "attention_chunk_size": None, "use_qk_norm": False,
        "attn_temperature_tuning": False, "attention_bias": True, "tie_word_embeddings": True,
    }),
    "granite-swa": ("GraniteSWA", {
        **ROPE, "num_hidden_layers": 5, "sliding_window": 5, "layer_rope_theta": [0, 1e4, 1e4, 1e4, 0],
        "attention_multiplier": 0.2, "logits_scaling": 13.0, "embedding_multiplier": 5.0,
        "residual_multiplier": 0.3, "mlp_bias": True, "attention_bias": True,
    }),
    "granite-moe-swa": ("GraniteMoeSWA", {
        **ROPE, "num_hidden_layers": 3, "sliding_window": 5, "shared_intermediate_size": 200,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attention_multiplier": 0.2, "num_local_experts": 6, "num_experts_per_tok": 3,
    }),
    "granite-moe": ("GraniteMoe", {
        **ROPE, "attention_multiplier": 0.2, "logits_scaling": 0.7, "embedding_multiplier": 5.0,
        "residual_multiplier": 0.3, "num_local_experts": 6, "num_experts_per_tok": 3,
    }),
    "granite-hybrid": ("GraniteMoeHybrid", {
        **MAMBA_STATE, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
        "shared_intermediate_size": 44, "time_step_limit": [1.3, float("inf")], "mamba_n_groups": 2,
    }),
    "granite-hybrid-moe": ("GraniteMoeHybrid", {
        **MAMBA_STATE, "layer_types": ["mamba", "mamba", "attention"], "num_local_experts": 6,
        "num_experts_per_tok": 3, "intermediate_size": 20, "shared_intermediate_size": 40,
        "position_embedding_type": "rope", "tie_word_embeddings": True, "attention_bias": True,
    }),
    "nemotron-h": ("NemotronH", {**NEMOTRON_H, "hybrid_override_pattern": "M-M*-"}),
    "nemotron-h-moe": ("NemotronH", {
        **NEMOTRON_H, "hybrid_override_pattern": "MEM*E", "n_routed_experts": 8, "n_group": 2,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20, "topk_group": 2,
        "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5, "time_step_min": 0.3,
    }),
    "ministral3": ("Ministral3", {
        **ROPE, "head_dim": 14, "rope_parameters": {
            **YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
    }),
    "mistral4": ("Mistral4", {
        **LATENT, "first_k_dense_replace": 1, "moe_intermediate_size": 20, "num_experts_per_tok": 3,
        "n_shared_experts": 2, "routed_scaling_factor": 1.3, "rope_parameters": {
            **YARN, "rope_theta": 1e5, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
    }),
    "mistral4-halves": ("Mistral4", {
        **MIXED_LATENT, "moe_intermediate_size": 20, "norm_topk_prob": False, "rope_interleave": False,
        "q_lora_rank": None,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "llama_4_scaling_beta": 0.3},
    }),
    "smollm3": ("SmolLM3", {**ROPE, "no_rope_layer_interval": 2}),
    "ministral": ("Ministral", {
        **ROPE, "head_dim": 14, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "cwm": ("Cwm", {**ROPE, "head_dim": 14, "sliding_window": 5, "rope_scaling": LLAMA3, "eos_token_id": 2}),
    "qwen2-window": ("Qwen2", {
        **ROPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0,
    }),
    "qwen3-tied": ("Qwen3", {
        **ROPE, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 26, "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }),
    "qwen3": ("Qwen3", {**ROPE, "head_dim": 10}),
    "mixtral": ("Mixtral", {**ROPE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {
        **ROPE, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7,
        "tie_word_embeddings": True,
    }),
    "qwen2-moe": ("Qwen2Moe", {
        **ROPE, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 60,
    }),
    "qwen2-moe-sparse": ("Qwen2Moe", {
        **ROPE, "num_hidden_layers": 4, "num_experts": 6, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "norm_topk_prob": True,
        "num_experts_per_tok": 2,
    }),
    "qwen3-moe": ("Qwen3Moe", {
        **ROPE, "head_dim": 10, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    }),
    "qwen3-moe-first-dense": ("Qwen3Moe", {
        **ROPE, "head_dim": 10, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "mlp_only_layers": [0],
    }),
    "olmoe": ("Olmoe", {**ROPE, "num_experts": 6, "num_experts_per_tok": 3}),
    "dots1": ("Dots1", {
        **ROPE, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None, "head_dim": 12,
    }),
    "qwen3-yarn": ("Qwen3", {**ROPE, "head_dim": 10, "rope_scaling": YARN}),
    "qwen2-yarn-factor": ("Qwen2", {**ROPE, "rope_scaling": {**YARN, "attention_factor": 1.3}}),
    "deepseek-v2-dense": ("DeepseekV2", {
        **LATENT, "q_lora_rank": None, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    }),
    "deepseek-v3-dense": ("DeepseekV3", {
        **LATENT, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "deepseek-v3-halves": ("DeepseekV3", {**LATENT, "rope_interleave": False, "tie_word_embeddings": True}),
    "deepseek-v2": ("DeepseekV2", {
        **LATENT, "q_lora_rank": None, "first_k_dense_replace": 1, "moe_intermediate_size": 20,
        "n_shared_experts": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5,
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    }),
    "deepseek-v2-groups": ("DeepseekV2", {
        **LATENT, "first_k_dense_replace": 0, "moe_intermediate_size": 20, "n_shared_experts": 1,
        "num_experts_per_tok": 3, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    }),
    "deepseek-v3": ("DeepseekV3", {
        **LATENT, "first_k_dense_replace": 1, "moe_intermediate_size": 20, "n_shared_experts": 1,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "deepseek-v3-step": ("DeepseekV3", {  # YaRN without a ramp, as Kimi K2 has it
        **LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 20,
        "n_group": 1, "topk_group": 1, "rope_scaling": {
            **YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    }),
    "lfm2": ("Lfm2", {**STATE, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}),
    "lfm2-untied": ("Lfm2", {
        **STATE, "full_attn_idxs": [2], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    }),
    "lfm2-moe": ("Lfm2Moe", {
        **STATE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    }),
    "lfm2-moe-unbiased": ("Lfm2Moe", {
        **STATE, "layer_types": ["full_attention", "conv", "conv"], "num_dense_layers": 1, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20, "use_expert_bias": False,
        "norm_topk_prob": False, "routed_scaling_factor": 1.5,
    }),
    "qwen3-next": ("Qwen3Next", {**DELTA, **SHARED_EXPERT, "shared_expert_intermediate_size": 40}),
    "qwen3-next-mixed": ("Qwen3Next", {
        **DELTA, **SHARED_EXPERT, "decoder_sparse_step": 2, "norm_topk_prob": False,
        "linear_num_key_heads": 4, "partial_rotary_factor": 0.5, "tie_word_embeddings": True,
    }),
    "qwen3.5": ("Qwen3_5Text", {
        **DELTA, "layer_types": None, "full_attention_interval": 2, "rope_theta": 1e7,
    }),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**DELTA, **SHARED_EXPERT}),
    "olmo-hybrid": ("OlmoHybrid", {
        **EVEN_DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": None},
    }),
    "kimi-linear": ("KimiLinear", KIMI),
    "kimi-linear-ranks": ("KimiLinear", {
        **KIMI, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "mlp_layer_types": ["sparse"] * 2,
        "norm_topk_prob": False,
    }),
    "olmo-hybrid-rotated": ("OlmoHybrid", {
        **EVEN_DELTA, "linear_allow_neg_eigval": False, "attention_bias": True, "rope_theta": 5e5,
        "rms_norm_eps": 1e-4,
    }),
    "seed-oss": ("SeedOss", {
        **ROPE, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 12,
        "attention_out_bias": True, "mlp_bias": True,
    }),
    "seed-oss-biased-output": ("SeedOss", {**ROPE, "attention_out_bias": True}),
    "seed-oss-biased-mlp": ("SeedOss", {**ROPE, "mlp_bias": True}),
    "seed-oss-36b": ("SeedOss", {**ROPE, "head_dim": 12, "rope_theta": 1e7}),
    "starcoder2": ("Starcoder2", {**ROPE, "sliding_window": 7}),
    "starcoder2-untied": ("Starcoder2", {
        **ROPE, "tie_word_embeddings": False, "norm_epsilon": 1e-3, "rope_scaling": YARN,
    }),
    "solar-open": ("SolarOpen", {**SIGMOID, **GROUPED, "rope_scaling": YARN, "routed_scaling_factor": 1.5}),
    "solar-open-biased": ("SolarOpen", {
        **SIGMOID, "n_routed_experts": 8, "attention_bias": True, "norm_topk_prob": False,
    }),
    "sarvam": ("SarvamMoE", {**SIGMOID, **GROUPED, "num_hidden_layers": 3}),
    "sarvam-biased": ("SarvamMoE", {**SIGMOID, **GROUPED, "attention_bias": True}),
    "sarvam-unnormed": ("SarvamMoE", {**SIGMOID, **GROUPED, "use_qk_norm": False}),
    "hy-v3": ("HYV3", {**SIGMOID, "num_hidden_layers": 3, "num_experts": 8, "num_shared_experts": 2}),
    "hy-v3-two-dense": ("HYV3", {
        **SIGMOID, "num_hidden_layers": 3, "num_experts": 8, "mlp_layer_types": ["dense"] * 2 + ["sparse"],
    }),
    "glm4.7-flash": ("Glm4MoeLite", {
        **MIXED_LATENT, "num_hidden_layers": 3, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2,
    }),
    "glm4.7-flash-sparse": ("Glm4MoeLite", {
        **MIXED_LATENT, "moe_intermediate_size": 20, "n_shared_experts": 2, "mlp_layer_types": ["sparse"] * 2,
        "rope_interleave": False,
    }),
    "youtu": ("Youtu", {**DENSE_LATENT, "rope_theta": 1.6e6}),
    "youtu-untied": ("Youtu", {**DENSE_LATENT, "tie_word_embeddings": False, "q_lora_rank": None}),
    "youtu-halves": ("Youtu", {**DENSE_LATENT, "rope_interleave": False, "initializer_range": 0.02}),
    "internlm3": ("InternLM3", {**ROPE, "head_dim": 12, "rope_theta": 5e7}),
    "internlm3-biased": ("InternLM3", {**ROPE, "head_dim": None, "attention_bias": True, "mlp_bias": True}),
    "phi4": ("Phi3", {**ROPE, "rope_theta": 2.5e5}),
    "phi4-mini": ("Phi3", {  # sequences beyond the original context
        **ROPE, "rope_scaling": LONGROPE, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16, "sliding_window": 100,
    }),
    "phi4-mini-short": ("Phi3", {  # and within it
        **ROPE, "rope_scaling": LONGROPE, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 48, "max_position_embeddings": 480,
    }),
    "phi3-partial": ("Phi3", {**ROPE, "partial_rotary_factor": 0.5}),
    "llama-longrope": ("Llama", {
        **ROPE, "head_dim": 6, "rope_theta": 500.0,
        "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 16, "attention_factor": 1.2},
    }),
    "phi3-window": ("Phi3", {**ROPE, "sliding_window": 7, "tie_word_embeddings": True}),
}
BELOW_ONE = (
    "Step3p7", "Gemma", "Gemma2", "Gemma3Text", "Nemotron", "Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText"
)  # w - 1 of a folder in bf16 is w in fp32, exactly
SAME = {  # written as the first family that computes the same, or under another name
    "mistral-nowindow": "Llama", "step3.7": "Step3p5", "step3.7-sliding": "Step3p5",
    "deepseek-v3-dense": "DeepseekV2", "seed-oss-36b": "Qwen2", "seed-oss-biased-output": "Llama",
    "sarvam": "Dots1", "hy-v3": "Dots1", "hy-v3-two-dense": "Dots1", "glm4.7-flash": "DeepseekV3",
    "glm4.7-flash-sparse": "DeepseekV3", "youtu": "DeepseekV2", "youtu-untied": "DeepseekV2",
    "youtu-halves": "DeepseekV3", "cwm": "Ministral", "gemma3": "Gemma3", "qwen3.5": "Qwen3_5",
    "qwen3.5-moe": "Qwen3Next", "gemma3-1b": "Gemma3", "internlm3": "Llama", "internlm3-biased": "Llama",
    "phi4": "Llama", "phi3-window": "Mistral",
}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def save(run_, root, step):
    """A committed checkpoint of a build.Run, as training leaves it."""
    return store.save(
        root, step, state.state_boxes(run_.buckets, run_.optim.state()) + run_.routers.boxes(),
        state.describe_run(run_, step), keep=1,
    )


def run(capsys, *argv):
    """(exit code, stdout, stderr) of the command."""
    capsys.readouterr()
    code = fail_cleanly(convert.main, list(map(str, argv)))
    out = capsys.readouterr()
    return code, out.out, out.err


def converted(capsys, *argv):
    """Run the command, which must not fail, and return what it prints."""
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def transformers(transformers):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@torch.no_grad()
def their_model(transformers, family, settings):
    """A random model whose biases and norms are random too: as initialised, they would hide a mistake."""
    torch.manual_seed(0)
    if "text_config" not in settings:
        settings = {"pad_token_id": None, **settings}  # a padding token would not train
    their_config = getattr(transformers, f"{family}Config")(**settings)
    own = getattr(transformers, f"{family}ForCausalLM", None)
    if "text_config" in settings:
        own = getattr(transformers, f"{family}ForConditionalGeneration")
    make = own._from_config if own else transformers.AutoModelForCausalLM.from_config
    model = make(their_config).float().eval()
    model.get_input_embeddings().padding_idx = None  # Step wants a padding token, which would not train
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.1)
        if family in BELOW_ONE and p.dim() == 1:
            p.copy_(p.bfloat16())
    for name, bias in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            bias.add_(torch.randn_like(bias) * 0.1)
    return model


def loaded(transformers, folder):
    keys = json.loads((folder / "config.json").read_text())
    if FAMILIES[keys["model_type"]].within:
        own, whole = transformers.AutoModelForImageTextToText, convert.as_whole(keys)
        their_config = transformers.CONFIG_MAPPING[whole["model_type"]].from_dict(whole)
        return own.from_pretrained(folder, config=their_config, dtype=torch.float32).eval()
    (architecture,) = keys["architectures"]
    own = getattr(transformers, architecture, transformers.AutoModelForCausalLM)
    return own.from_pretrained(folder, dtype=torch.float32).eval()


def batches(vocab):
    """Three steps of two microbatches; some targets do not count."""
    g = torch.Generator().manual_seed(1)
    positions = torch.arange(SEQ).expand(2, SEQ)
    draw = [torch.randint(vocab, (2, SEQ + 1), generator=g) for _ in range(6)]
    made = [Microbatch(t[:, :-1], t[:, 1:].clone(), positions) for t in draw]
    for i, b in enumerate(made):
        b.targets[0, : 3 * i] = -100
    return [made[:2], made[2:4], made[4:]]


def is_matrix(name, param):
    """Or a stack of them; not what convolutions have for each channel, [c, 1, k], nor biases of experts."""
    return param.dim() > 1 and 1 not in param.shape[1:] and not name.endswith("_bias")


def train_theirs(model, steps, lr):
    """Losses of plain torch: mean over the counted tokens of a step, clipped at 0.5, AdamW that decays
    matrices only.
    """
    params, named = list(model.parameters()), list(model.named_parameters())
    optim = torch.optim.AdamW(
        [
            {"params": [p for name, p in named if is_matrix(name, p)], "weight_decay": 0.1},
            {"params": [p for name, p in named if not is_matrix(name, p)], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses = []
    for step in steps:
        optim.zero_grad()
        logits = torch.cat([model(input_ids=b.tokens).logits.flatten(0, 1) for b in step])
        targets = torch.cat([b.targets.flatten() for b in step])
        loss = cross_entropy(logits, targets, reduction="sum") / sum(b.num_counted() for b in step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optim.step()
        losses.append(loss.item())
    return losses


def with_still_bias(mlp):
    """Experts whose router bias, if there is one, does not move: transformers' does not."""
    if getattr(getattr(mlp, "router", None), "bias_rate", None) is None:
        return mlp
    return with_values(mlp, {"router.bias_rate": 0.0})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_in_evaluated_trained_and_out(transformers, tmp_path, capsys, name):
    theirs = their_model(transformers, *CASES[name])
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="50KB" if name == "llama2" else "1GB")
    out = converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run", "--json")
    assert json.loads(out)["logits"]["against"].startswith("transformers")

    words = (
        f"--train.dtype fp32 --train.steps 3 --train.seq_len {SEQ} --train.micro_batch 2 "
        "--train.global_batch 4 --optim.lr 1e-3 --optim.warmup 0 --optim.decay constant --optim.clip 0.5"
    )
    cfg = resolve(None, str(tmp_path / "run" / "config.yaml"), words.split())
    cfg = replace(cfg, model=with_mlps(cfg.model, with_still_bias))
    tok = SimpleNamespace(fingerprint="none")
    data = SimpleNamespace(tokenizer=tok, fingerprint="random", is_chat=False, has_start=False)
    ours = build_run(cfg, Mesh.single(), torch.device("cpu"), data, 3)
    state.load_weights(
        ours.buckets, state.find_checkpoint(cfg.checkpoint.init_from, []), ours.routers.boxes(weights=True)
    )
    assert not any(
        t[cfg.model.vocab :].any()
        for box, t in state.state_boxes(ours.buckets, {})
        if box.key in ("embed.weight", "head.weight")
    )

    steps = batches(cfg.model.vocab)
    tokens, positions = steps[0][0].tokens, steps[0][0].positions
    with torch.no_grad():
        assert (ours.stages[0].logits(tokens, positions) - theirs(input_ids=tokens).logits).abs().max() < 1e-5

    losses = [train_step(ours, i, step)[0].item() for i, step in enumerate(steps, 1)]
    assert losses == pytest.approx(train_theirs(theirs, steps, 1e-3), abs=1e-5)
    assert abs(losses[0] - losses[2]) > 1e-3  # it did train

    save(ours, tmp_path / "trained" / "checkpoints", 3)
    converted(capsys, "to-hf", tmp_path / "trained", tmp_path / "out")
    with torch.no_grad():
        back = loaded(transformers, tmp_path / "out")(input_ids=tokens).logits
        assert (back - ours.stages[0].logits(tokens, positions)).abs().max() < 1e-5
        # three AdamW steps apart: rounding of tiny gradients grows
        assert (back - theirs(input_ids=tokens).logits).abs().max() < 1e-3
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    their_class = SAME.get(name, CASES[name][0].removesuffix("Text"))
    assert said["architectures"] == [f"{their_class}{'LMHeadModel' if 'gpt2' in name else 'ForCausalLM'}"]


LOGITS = r"logits: max \|difference\| (\S+) where the largest is (\S+), .* on (.*) tokens"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_import_goes_out_with_every_bit(transformers, tmp_path, capsys, name):
    """Under the same names, if it goes out as the same family; and it comes back as the same weights. With
    pytest -rP it prints a row of lab/docs/families.md."""
    their_model(transformers, *CASES[name]).save_pretrained(tmp_path / "hf")
    said: list[tuple[str, ...]] = []
    for command, source, target in (
        ("from-hf", "hf", "run"), ("to-hf", "run", "out"), ("from-hf", "out", "back")
    ):
        out = converted(capsys, command, tmp_path / source, tmp_path / target)
        said += re.findall(LOGITS, out)
    ours, back = (weights(tmp_path / name / "checkpoints" / "step_00000000") for name in ("run", "back"))
    assert ours.keys() == back.keys() and all(torch.equal(ours[key], back[key]) for key in ours)
    model_type, model = hf_config.read_hf_config(tmp_path / "hf")
    family = FAMILIES[model_type]
    if name not in SAME or family.within:
        theirs, out = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
        theirs = {
            family.usual_name(name, model): value for name, value in theirs.items()
            if hf.is_weight(name, family, model.layers)
        }
        assert theirs.keys() == out.keys() and all(torch.equal(theirs[key], out[key]) for key in theirs)
    read, written = (json.loads((tmp_path / part / "config.json").read_text()) for part in ("hf", "out"))
    worst, largest, tokens = max(said, key=lambda logits: float(logits[0]) / float(logits[1]))
    types = f"`{read['model_type']}` | `{written['model_type']}`"
    print(f"| {name} | {types} | {worst} of {largest} | {tokens} |")


@pytest.mark.slow(every=8)
@pytest.mark.parametrize("name", CASES)
def test_weights_of_16_bits_are_kept_so(transformers, tmp_path, capsys, name):
    """Both sides compute from them in fp32; and what was read goes out as it was."""
    their_model(transformers, *CASES[name]).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    dtypes = {value.dtype for value in load_file(tmp_path / "hf" / "model.safetensors").values()}
    assert torch.bfloat16 in dtypes
    for command, source, target in (("from-hf", "hf", "run"), ("to-hf", "run", "out --dtype bf16")):
        converted(capsys, command, tmp_path / source, *f"{tmp_path}/{target}".split())
    if name not in SAME:
        theirs, out = (load_file(tmp_path / part / "model.safetensors") for part in ("hf", "out"))
        family, model = hf_config.read_hf_config(tmp_path / "hf")
        theirs = {FAMILIES[family].usual_name(key, model): value for key, value in theirs.items()}
        assert theirs.keys() == out.keys()
        wrong = [key for key in theirs if not torch.equal(theirs[key].to(out[key].dtype), out[key])]
        assert not wrong


def peak_growth(work) -> int:
    """By how many bytes the memory of this process grows at most meanwhile, mapped files included."""
    def now(name: str) -> int:
        return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
    before = now("VmRSS")
    work()
    return now("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_memory_is_that_of_the_weights_as_they_are_stored(transformers, tmp_path, capsys):
    """Not that of the model in fp32: a layer at a time is."""
    layers, hidden, inner, vocab = 24, 512, 2048, 2000
    settings = {**ROPE, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
                "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": vocab, "head_dim": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    del model
    stored = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert stored > 190e6

    commands = (("from-hf", tmp_path / "hf", tmp_path / "run"),
                ("to-hf", tmp_path / "run", tmp_path / "out", "--dtype", "bf16"))
    for words in commands:
        grown = peak_growth(lambda: run(capsys, *words))  # noqa: B023
        assert (tmp_path / words[2].name).is_dir() and grown < 1.2 * stored, (words[0], grown / stored)


WITH_STATE = (  # but those with a least step: in theirs a single token has none
    "lfm2", "lfm2-moe", "qwen3-next", "qwen3.5", "olmo-hybrid", "kimi-linear", "granite-hybrid-moe",
    "nemotron-h",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_STATE)
@torch.no_grad()
def test_generation_continues_from_the_state_as_theirs(transformers, tmp_path, capsys, name):
    """A prompt longer than a chunk, then token by token."""
    theirs = their_model(transformers, *CASES[name])
    theirs.save_pretrained(tmp_path / "hf")
    converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run")
    stage = load_run(str(tmp_path / "run"), torch.device("cpu"), "fp32").stage

    prompt = torch.randint(211, (1, 70), generator=torch.Generator().manual_seed(2))
    found = theirs.generate(
        prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )
    cache, first = GenerationCache(), 0
    for last, want in enumerate(found.logits, prompt.shape[1]):
        tokens = found.sequences[:, first:last]
        got = stage.logits(tokens, torch.arange(first, last)[None], cache=cache)[:, -1]
        cache.length = first = last
        torch.testing.assert_close(got[:, :211], want, rtol=0, atol=1e-5)


VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}
PIXTRAL = {**VISION, "model_type": "pixtral", "intermediate_size": 16}
PROJECTED = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
WRAPPED = {  # (class of the whole, type of its text part, sizes of what reads images)
    "gemma3": ("Gemma3", "gemma3_text", {**VISION, "intermediate_size": 16}),
    "llama4": ("Llama4", "llama4_text", {**VISION, "intermediate_size": 64, **PROJECTED}),
    "ministral3": ("Mistral3", "ministral3", PIXTRAL),
    "mistral": ("Mistral3", "mistral", PIXTRAL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_part_of_a_folder_with_images(transformers, tmp_path, capsys, name):
    """Under both spellings of its names, by convert and in pieces."""
    kind, text_type, vision = WRAPPED[name]
    torch.manual_seed(0)
    parts = {"text_config": {**CASES[name][1], "pad_token_id": None, "model_type": text_type}}
    parts["vision_config"] = vision
    if name == "gemma3":
        parts["mm_tokens_per_image"] = 4
    their_config = getattr(transformers, f"{kind}Config")(**parts)
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(their_config).float().eval()
    theirs.save_pretrained(tmp_path / "hf")
    out = converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run", "--json")
    said = json.loads(out)
    assert said["family"] == text_type and said["logits"]["against"].startswith("transformers")
    assert any("multi_modal_projector.* (" in note for note in said["notes"])
    ours = weights(tmp_path / "run" / "checkpoints" / "step_00000000")
    in_pieces = foreign.open_hf_folder(tmp_path / "hf")
    assert in_pieces.places.keys() == ours.keys()
    assert any("multi_modal_projector.* (" in note for note in in_pieces.notes)

    file = tmp_path / "hf" / "model.safetensors"
    spellings = (("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head"))
    renamed = load_file(file)
    for stored, other in spellings:
        renamed = {name.replace(stored, other): value for name, value in renamed.items()}
    save_file(renamed, file, {"format": "pt"})
    assert foreign.open_hf_folder(tmp_path / "hf").places.keys() == ours.keys()


@pytest.mark.slow
def test_the_text_part_of_a_model_of_images_is_read_alone(transformers, tmp_path, capsys):
    text = {key: value for key, value in CASES["qwen3.5"][1].items() if value is not None}
    text["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    }
    del text["rope_theta"]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(
        text_config=text, vision_config={**vision, "num_position_embeddings": 16}, image_token_id=205,
        video_token_id=206, vision_start_token_id=207, vision_end_token_id=208,
    )).float().eval()
    theirs.save_pretrained(tmp_path / "hf")
    out = converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run", "--json")
    said = json.loads(out)
    assert said["family"] == "qwen3_5_text" and said["logits"]["against"].startswith("transformers")
    assert any("the tensors model.visual.* (" in note for note in said["notes"])
    assert len(foreign.open_hf_folder(tmp_path / "hf").places) == len(
        weights(tmp_path / "run" / "checkpoints" / "step_00000000")
    )

    converted(capsys, "to-hf", tmp_path / "run", tmp_path / "out")
    tokens = torch.arange(90)[None]
    with torch.no_grad():
        back = loaded(transformers, tmp_path / "out")
        torch.testing.assert_close(back(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-5)

    edit(logit_cap=3)(tmp_path / "hf")
    code, _, err = run(capsys, "from-hf", tmp_path / "hf", tmp_path / "other")
    assert code == 2 and "logit_cap = 3 beside text_config, which has None: this key is unknown" in err
    edit(logit_cap=None, text_config=None)(tmp_path / "hf")
    code, _, err = run(capsys, "from-hf", tmp_path / "hf", tmp_path / "other")
    assert code == 2 and "text_config is missing; a qwen3_5 keeps the keys of its text model there" in err


@pytest.mark.parametrize("name, start", [("qwen3.5", "mtp."), ("mimo-v2", "model.mtp.")])
def test_what_transformers_does_not_load_is_left_out_and_named(transformers, tmp_path, capsys, name, start):
    their_model(transformers, *CASES[name]).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    save_file({**load_file(file), f"{start}norm.weight": torch.ones(48)}, file, {"format": "pt"})
    out = converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run", "--json")
    named = [note for note in json.loads(out)["notes"] if note.startswith("the tensors ")]
    assert len(named) == 1 and named[0].startswith(f"the tensors {start}* (1) are skipped")
    assert not any("mtp" in key for key in foreign.open_hf_folder(tmp_path / "hf").places)


def test_modules_ahead_of_step_are_left_out_and_named(transformers, tmp_path, capsys):
    """As published: layers after the last, which transformers does not load."""
    their_model(transformers, *CASES["step3.7-sliding"]).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    of_last = {name: value for name, value in tensors.items() if ".layers.2.self_attn" in name}
    ahead = {name.replace(".2.", ".3."): value.clone() for name, value in of_last.items()}
    ahead["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)
    save_file(tensors | ahead, file, {"format": "pt"})
    out = converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run", "--json")
    said = f"the tensors model.layers.3.* ({len(ahead)}) are skipped"
    assert any(note.startswith(said) for note in json.loads(out)["notes"])
    assert not any("layers.3" in key for key in foreign.open_hf_folder(tmp_path / "hf").places)


def test_kimi_is_compared_with_the_code_of_deepseek(transformers, tmp_path, capsys):
    """Its folder names code of its own, which is not run."""
    their_model(transformers, *CASES["deepseek-v3-step"]).save_pretrained(tmp_path / "v3")
    shutil.copytree(tmp_path / "v3", tmp_path / "k2")
    name = "configuration_deepseek.DeepseekV3Config"
    edit(model_type="kimi_k2", auto_map={"AutoConfig": name})(tmp_path / "k2")
    reports = []
    for folder in ("v3", "k2"):
        out = converted(capsys, "from-hf", tmp_path / folder, tmp_path / f"run-{folder}", "--json")
        reports.append(json.loads(out))
    assert [report["family"] for report in reports] == ["deepseek_v3", "kimi_k2"]
    assert reports[0]["logits"] == reports[1]["logits"]
    assert reports[1]["logits"]["against"].startswith("transformers")
    converted(capsys, "to-hf", tmp_path / "run-k2", tmp_path / "out")
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("k2", "out"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "deepseek_v3"


def in_fp8(name, weight):
    """A matrix of a layer as DeepSeek-V3 ships it: blocks of 128 x 128 over 448, and what they stand for."""
    blocks = [-(-size // 128) for size in weight.shape]
    quantized, plain = torch.empty_like(weight, dtype=E4M3), torch.empty_like(weight)
    scales = torch.empty(blocks)
    for row, column in itertools.product(*map(range, blocks)):
        block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
        scales[row, column] = weight[block].abs().max() / 448
        quantized[block] = (weight[block] / scales[row, column]).to(E4M3)
        plain[block] = quantized[block].float() * scales[row, column]
    return {name: quantized, f"{name}_scale_inv": scales}, plain


def in_mxfp4(name, weight):
    """Experts as gpt-oss ships them, [experts, columns, rows], with random bits, and what they stand for."""
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    experts, columns, rows = weight.shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 126, blocks.shape[:3], dtype=torch.uint8)
    plain = integration.convert_moe_packed_tensors(blocks, scales)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, plain


E4M3 = torch.float8_e4m3fn
SHIPPED = {  # family, its settings, quantization_config, which tensors are quantized, and how
    "fp8": (
        "DeepseekV3",
        {**CASES["deepseek-v3"][1], "hidden_size": 144, "intermediate_size": 260, "kv_lora_rank": 130},
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        r".*_proj\S*\.weight", in_fp8,
    ),
    "mxfp4": (
        "GptOss",
        {**CASES["gpt-oss"][1], "hidden_size": 64, "intermediate_size": 32},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        r".*\.experts\.\w+_proj", in_mxfp4,
    ),
}


@pytest.mark.slow(core=["mxfp4"])
@pytest.mark.parametrize("method", SHIPPED)
def test_quantized_weights_are_dequantized(transformers, tmp_path, capsys, method):
    """As DeepSeek-V3 and gpt-oss are published: the run and its logits are those of the plain folder."""
    family, settings, quantization, names, quantize = SHIPPED[method]
    their_model(transformers, family, settings).bfloat16().save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "hf")
    edit(quantization_config=quantization)(tmp_path / "hf")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if re.fullmatch(names, name)]:
        parts, tensors[name] = quantize(name, stored.pop(name).float())
        stored |= parts
    assert len(stored) >= len(tensors) + 4
    for folder, values in (("plain", tensors), ("hf", stored)):
        values = {name: value.contiguous() for name, value in values.items()}
        save_file(values, tmp_path / folder / "model.safetensors", {"format": "pt"})

    reports = []
    for folder in ("plain", "hf"):
        out = converted(capsys, "from-hf", tmp_path / folder, tmp_path / f"run-{folder}", "--json")
        reports.append(json.loads(out))
    plain, quantized = reports
    assert quantized["logits"] == plain["logits"]
    assert quantized["logits"]["against"].startswith("transformers")
    assert plain["tensors"] == quantized["tensors"] == len(tensors)
    (note,) = set(quantized["notes"]) - {note.replace("plain", "hf") for note in plain["notes"]}
    assert f"are quantized ({method})" in note and "fp32 or bf16" in note
    ours, theirs = (
        weights(tmp_path / f"run-{folder}" / "checkpoints" / "step_00000000") for folder in ("hf", "plain")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert {path.name for path in (tmp_path / "run-hf").iterdir()} == {"checkpoints", "config.yaml"}

    converted(capsys, "to-hf", tmp_path / "run-hf", tmp_path / "out", "--dtype", "bf16")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == tensors.keys()
    assert all(torch.equal(out[name].bfloat16(), tensors[name].bfloat16()) for name in out)


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_memory_for_quantized_weights_is_that_of_a_layer(alone, tmp_path, capsys):
    """Not that of the dequantized model, which has four times the bytes."""
    hidden, inner, vocab = 512, 2048, 500
    keys = {**ROPE, "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "head_dim": 64,
            "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": vocab,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
            "quantization_config": SHIPPED["fp8"][2]}
    shapes = dict.fromkeys(("q", "k", "v", "o"), (hidden, hidden))
    tensors = {"model.norm.weight": torch.ones(hidden)}
    tensors["model.embed_tokens.weight"] = torch.ones(vocab, hidden)
    for layer in range(keys["num_hidden_layers"]):
        front = f"model.layers.{layer}"
        names = {f"{front}.self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}
        names |= {f"{front}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        names[f"{front}.mlp.down_proj.weight"] = (hidden, inner)
        for name, shape in names.items():
            tensors[name] = torch.ones(shape).to(E4M3)
            tensors[f"{name}_scale_inv"] = torch.full([size // 128 for size in shape], 0.01)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{front}.{name}.weight"] = torch.ones(hidden)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(keys))
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    del tensors
    stored = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert stored > 100e6
    grown = peak_growth(lambda: run(capsys, "from-hf", tmp_path / "hf", tmp_path / "run"))
    assert (tmp_path / "run").is_dir() and grown < stored, grown / stored


def test_gpt2_as_the_hub_has_it_is_imported(transformers, tmp_path, capsys):
    """The hub's gpt2 has no `transformer.` prefix and carries its causal masks."""
    theirs = their_model(transformers, *CASES["gpt2"])
    theirs.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, SEQ, SEQ)}, file, {"format": "pt"})
    converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run")


# ---- without transformers ----------------------------------------------------------------------------------

BPE = tokenizer.train_bpe(
    [Path(json.__file__).with_name("decoder.py").read_text(), Path(shutil.__file__).read_text()], 400
)


@pytest.fixture
def alone(monkeypatch):
    """transformers cannot be imported."""
    monkeypatch.setitem(sys.modules, "transformers", None)


def make_run(folder, preset="qwen2.5-tiny", tok=BPE, **model):
    """A run folder with random weights and one checkpoint."""
    words = "--train.steps 1 --model.layers 2 --model.hidden 32 --model.mlp.width 40"
    cfg = resolve(preset, None, words.split())
    cfg = replace(cfg, model=with_values(cfg.model, {"vocab": tok.vocab, **model}))
    data = SimpleNamespace(tokenizer=tok, fingerprint="random", is_chat=False, has_start=False)
    made = build_run(cfg, Mesh.single(), torch.device("cpu"), data, 1)
    path = save(made, folder / "checkpoints", 5)
    (folder / "tokenizer").mkdir()
    tok.save(folder / "tokenizer")
    (folder / "config.yaml").write_text(dump(cfg))
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A good Hugging Face folder of ours."""
    folder = tmp_path_factory.mktemp("exported")
    make_run(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        convert.to_hf(str(folder / "run"), folder / "hf")
    return folder / "hf"


def weights(path):
    """{key: tensor} of a checkpoint, without the optimizer's."""
    rows = [r for r in store.read_index(path)["pieces"] if "@" not in r["key"]]
    out = {
        r["key"]: torch.empty(r["size"], dtype={"F64": torch.float64}.get(r["dtype"], torch.float32))
        for r in rows
    }
    store.load(path, [(hf.Box.whole(k, t.shape), t) for k, t in out.items()], strict=False)
    return out


@pytest.mark.slow
def test_out_and_in_again_is_exact(alone, tmp_path, capsys):
    path = make_run(tmp_path / "run")
    report = json.loads(converted(capsys, "to-hf", path, tmp_path / "hf", "--json"))  # path: of a checkpoint
    assert report["notes"] == []
    assert report["logits"] == {**report["logits"], "against": "its own reader", "max_abs_difference": 0.0}
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert said["architectures"] == ["Qwen2ForCausalLM"]
    assert said["rope_theta"] == 1e6
    assert said["torch_dtype"] == "float32"
    assert (said["bos_token_id"], said["eos_token_id"], said["vocab_size"]) == (1, 2, 400)
    assert not {"rope_parameters", "dtype"} & said.keys()  # v4 would read them as silence
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "provenance.json", "tokenizer.json",
        "tokenizer.model", "tokenizer_config.json",
    ]

    assert "transformers is not installed" in converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "back")
    before, after = weights(path), weights(tmp_path / "back" / "checkpoints" / "step_00000000")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before if k not in ("embed.weight", "head.weight"))
    assert torch.equal(before["embed.weight"][:400], after["embed.weight"][:400])
    assert not after["embed.weight"][400:].any()
    back = load_run(str(tmp_path / "back"), torch.device("cpu"))
    assert back.tokenizer.encode("def f(x):\n  return x") == BPE.encode("def f(x):\n  return x")
    assert back.step == 0


@pytest.mark.slow
@pytest.mark.parametrize("key", ["attention_dropout", "residual_dropout", "embedding_dropout"])
def test_dropout_that_is_not_taken_is_named(exported, tmp_path, capsys, key):
    shutil.copytree(exported, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 0.1}))
    out = converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run")
    assert f"config.json trains with {key} 0.1, which is not taken" in " ".join(out.split())


def test_a_rule_that_config_json_breaks_names_the_file(exported, tmp_path, capsys):
    shutil.copytree(exported, tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 0}))
    code, _, err = run(capsys, "from-hf", tmp_path / "hf", tmp_path / "run")
    assert code == 2
    assert err == (f"error: {tmp_path}/hf/config.json: model.context: 0 must be above 0; the names are those "
                   "of our keys\n")


@pytest.mark.parametrize("is_same", [True, False], ids=["the same", "another"])
def test_every_template_of_a_folder_is_imported_or_named(exported, tmp_path, capsys, is_same):
    """Also where --tokenizer names another folder."""
    more = "additional_chat_templates/tool_use.jinja"
    write_files(tmp_path / "t", {name: (exported / name).read_bytes()
                                 for name in ("tokenizer.json", "tokenizer_config.json")})
    shutil.copytree(exported, tmp_path / "hf")
    write_files(tmp_path / "hf", {"chat_template.jinja": TEMPLATE.encode(), more: b""})
    given = tmp_path / "t"
    if not is_same:  # with a token more
        spec = json.loads((given / "tokenizer.json").read_text())
        spec["added_tokens"].append({**spec["added_tokens"][0], "id": BPE.vocab, "content": "<|more|>"})
        (given / "tokenizer.json").write_text(json.dumps(spec))
    out = converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run", "--tokenizer", given)
    kept = [(tmp_path / "run" / "tokenizer" / name).exists() for name in ("chat_template.jinja", more)]
    assert kept == [is_same, is_same]
    told = f"the chat template of {tmp_path}/hf is not taken: {given} is another tokenizer than its own"
    assert (told in " ".join(out.split())) == (not is_same)
    if is_same:
        converted(capsys, "to-hf", tmp_path / "run", tmp_path / "out")
        assert (tmp_path / "out" / more).exists()


def test_an_import_under_another_tokenizer_is_refused(exported, tmp_path, capsys):
    """Else its ids would stand for other texts than the weights have learned, without a word."""
    code, _, err = run(capsys, "from-hf", exported, tmp_path / "run", "--tokenizer", "bytes")
    assert code == 2 and not (tmp_path / "run").exists()
    assert f"--tokenizer: bytes is not the tokenizer of {exported}: id " in err
    assert "leave --tokenizer out" in err and "init_changes data.tokenizer" in err
    same = make_bpe(tmp_path)  # the .model of the folder's tokenizer.json
    converted(capsys, "from-hf", exported, tmp_path / "run", "--tokenizer", same)


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize("data_names_tokenizer", [True, False])
def test_a_chat_template_survives_training(transformers, exported, tmp_path, capsys, data_names_tokenizer):
    """Imported, trained for a step by train.py and exported: transformers finds the template and the
    generation settings."""
    shutil.copytree(exported, tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 1]}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(settings))
    converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run")
    tok = tokenizer.load_tokenizer(tmp_path / "hf")
    write_documents(tmp_path / "text", (tok.encode(f"def f{i}(x): return x + {i}") for i in range(60)), tok)
    (tmp_path / "text.tokenizer" / "chat_template.jinja").unlink()  # only init_from knows of it
    own = tokenizer.load_tokenizer(tmp_path / "text.tokenizer")
    assert own.fingerprint == tok.fingerprint

    words = (
        f"--config {tmp_path}/run/config.yaml --data.path {tmp_path}/text --train.steps 1 "
        "--train.tokens none --train.seq_len 16 --train.micro_batch 1 --train.global_batch 2 "
        "--train.threads 1 --train.dtype fp32 --eval.batches 1 --eval.sample 0 --optim.warmup 0 "
        "--parallel.zero 0"
    )
    if not data_names_tokenizer:  # then only init_from knows of the template
        words += " --data.tokenizer none"
    end = job(tmp_path, 1, words.split())
    assert end.codes == [0], end.logs
    converted(capsys, "to-hf", tmp_path / "run-train", tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    said = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert {key: getattr(said, key) for key in settings} == settings


def test_modules_for_further_tokens_go_out_and_in(transformers, tmp_path, capsys):
    """With a router each, beside the layers; transformers' logits are those of the model without."""
    path = make_run(
        tmp_path / "run", "deepseek-v3-tiny", **{
            "mtp.modules": 2, "mixer.heads": 2, "mixer.nope_dim": 6, "mixer.rope_dim": 4, "mixer.v_dim": 5,
            "mixer.kv_rank": 7, "mixer.q_rank": 9, "mlp.width": 12,
        },
    )
    converted(capsys, "to-hf", path, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    modules = {
        "model.layers.3.eh_proj.weight", "model.layers.2.shared_head.norm.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
    }
    assert modules <= tensors.keys()
    copies = {
        "model.layers.2.embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "model.layers.3.shared_head.head.weight": tensors["lm_head.weight"],
    }
    # as published
    save_file({**tensors, **{k: t.clone() for k, t in copies.items()}}, file, {"format": "pt"})
    notes = json.loads(converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "back", "--json"))["notes"]
    assert not any("further" in note or "multi" in note for note in notes)
    before, after = weights(path), weights(tmp_path / "back" / "checkpoints" / "step_00000000")
    assert before.keys() == after.keys() and "layers.3.join.weight" in after
    assert all(torch.equal(before[k], after[k]) for k in before if k not in ("embed.weight", "head.weight"))
    copies["model.layers.2.embed_tokens.weight"] = copies["model.layers.2.embed_tokens.weight"] + 1
    save_file({**tensors, **{k: t.clone() for k, t in copies.items()}}, file, {"format": "pt"})
    code, _, err = run(capsys, "from-hf", tmp_path / "hf", tmp_path / "wrong")
    assert code == 2
    assert "layers.2.embed_tokens.weight differs from the embedding" in err
    assert "but multi-token prediction shares it" in err
    without = {k: t for k, t in tensors.items() if ".layers.2." not in k and ".layers.3." not in k}
    save_file(without, file, {"format": "pt"})
    notes = json.loads(converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "without", "--json"))["notes"]
    assert any("no weights for multi-token prediction" in note for note in notes)
    assert resolve(None, str(tmp_path / "without" / "config.yaml"), []).model.mtp is None


@pytest.mark.slow
@pytest.mark.parametrize("spec, vocab", [("bytes", 257), (None, 400)])
def test_an_export_in_bf16_keeps_its_tokenizer(alone, tmp_path, capsys, spec, vocab):
    tok = tokenizer.load_tokenizer(spec) if spec else BPE
    make_run(tmp_path / "run", "gpt2-tiny", tok)
    converted(capsys, "to-hf", tmp_path / "run", tmp_path / "hf", "--dtype", "bf16")
    text = (tmp_path / "hf" / "tokenizer.json").read_text()
    assert hf_tokenizer.first_difference(tok.encode, hf_tokenizer.load_encoder(text)) is None
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert said["torch_dtype"] == "bfloat16"
    assert said["vocab_size"] == vocab
    assert said["eos_token_id"] == tok.eod
    numel = sum(t[:vocab].numel() for t in weights(state.find_checkpoint(str(tmp_path / "run"), [])).values())
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size < 2.5 * numel


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset, change, family",
    [
        ("llama3-tiny", {}, "llama"),
        ("qwen2.5-tiny", {}, "qwen2"),
        ("mistral-tiny", {}, "mistral"),
        ("gpt2-tiny", {"positions": None, "mixer.rope": RopeConfig()}, "starcoder2"),
        ("llama3-tiny", {
            "mixer.bias": "all", "mlp.bias": True, "mixer.heads": 3, "mixer.kv_heads": 1, "mixer.head_dim": 8,
        }, "seed_oss"),
        ("dots1-tiny", {"mixer.qk_norm": None, "pattern": None, "blocks": ()}, "solar_open"),
        ("dots1-tiny", {"mixer.bias": "qkv"}, "sarvam_moe"),
    ],
)
def test_auto_tokenizer_gives_our_ids(transformers, tmp_path, capsys, preset, change, family):
    make_run(tmp_path / "run", preset, **change)
    converted(capsys, "to-hf", tmp_path / "run", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == family
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = lambda text: auto.encode(text, add_special_tokens=False)
    assert hf_tokenizer.first_difference(BPE.encode, theirs) is None
    assert (auto.bos_token_id, auto.eos_token_id) == (1, 2)


def test_resume_in_place_is_refused_with_the_way_out(alone, exported, tmp_path, capsys):
    converted(capsys, "from-hf", exported, tmp_path / "back")
    cfg = resolve(None, str(tmp_path / "back" / "config.yaml"), ["--train.dtype", "fp32"])
    assert Path(cfg.log.dir) / cfg.log.name == tmp_path / "back-train"
    assert cfg.checkpoint.init_from == str(tmp_path / "back")
    assert cfg.data.tokenizer == str(tmp_path / "back" / "tokenizer")
    tok = tokenizer.load_tokenizer(cfg.data.tokenizer)
    data = SimpleNamespace(tokenizer=tok, fingerprint="x", is_chat=False, has_start=False)
    fresh = build_run(cfg, Mesh.single(), torch.device("cpu"), data, 1)
    with pytest.raises(config.ConfigError, match="from its weights: --log.name OTHER --checkpoint.init_from"):
        state.load(fresh, state.find_index(str(tmp_path / "back"), []))


def test_the_next_steps_of_an_import_run_as_they_are_printed(alone, exported, tmp_path, capsys, monkeypatch):
    """from-hf prints two commands: FILES is what the user fills in, and the first gives what the second
    reads. The settings are those of continued training, and the shape has no other model's name.
    """
    import train
    from scripts import prepare_data

    monkeypatch.chdir(tmp_path)
    text = json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 20}) + "\n"
    (tmp_path / "my text.jsonl").write_text(text * 60)
    out = converted(capsys, "from-hf", exported, "runs/little")
    told = dict(line.split(": ", 1) for line in out.splitlines() if line.startswith(("first", "next")))
    first = shlex.split(told["first"].partition("   (FILES")[0])
    second = shlex.split(told["next"])
    assert first[:3] == ["python", "-m", "scripts.prepare_data"] and second[:2] == ["python", "train.py"]

    cfg = resolve(*split_argv(second[2:]))
    assert cfg.model.preset is None and cfg.train.tokens is None and cfg.train.steps == 1000
    assert cfg.optim.lr <= 5e-5 and cfg.train.global_batch <= 64 and cfg.checkpoint.init_from == "runs/little"
    with pytest.raises(config.ConfigError, match="^data.path: empty; name the data"):
        train.main(["--config", "runs/little/config.yaml", "--train.dtype", "fp32"])
    with pytest.raises(config.ConfigError, match="--input FILES --tokenizer runs/little/tokenizer --out"):
        train.main([*second[2:], "--train.dtype", "fp32"])
    assert not Path("runs/little-train").exists()

    files = ["my text.jsonl" if word == "FILES" else word for word in first[3:]]
    assert prepare_data.main(files) == 0
    short = ["--train.steps", "1", "--train.global_batch", "2", "--train.seq_len", "32"]
    short += ["--eval.batches", "1"]
    capsys.readouterr()
    assert train.main([*second[2:], *short, "--train.dtype", "fp32", "--train.threads", "1"]) == 0
    said = capsys.readouterr().out
    assert "model    its own shape" in said and "llama-mini" not in said
    assert '--prompt "the quick brown"' in said.replace("'", '"')


@pytest.mark.slow
def test_an_import_that_is_a_preset_has_its_name(alone, tmp_path, capsys):
    make_run(tmp_path / "run", "qwen2.5-tiny", layers=4, hidden=128, **{"mlp.width": 384})
    converted(capsys, "to-hf", tmp_path / "run", tmp_path / "hf")
    converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "back")
    assert resolve(None, str(tmp_path / "back" / "config.yaml"), []).model.preset == "qwen2.5-tiny"


@pytest.mark.slow
def test_an_import_without_tokenizer_is_evaluated_on_tokens(alone, tmp_path, capsys):
    """Beside torch's cross entropy over the same windows. Text needs a tokenizer: --tokenizer names one."""
    from scripts import evaluate, generate

    tok = tokenizer.load_tokenizer("bytes")
    make_run(tmp_path / "run", "llama3-tiny", tok)
    converted(capsys, "to-hf", tmp_path / "run", tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.bytes"):
        (tmp_path / "hf" / name).unlink(missing_ok=True)
    assert "--tokenizer T" in converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "bare")

    ids = torch.randint(97, 123, (7 * 32 + 1,), generator=torch.Generator().manual_seed(3))
    with IndexedDatasetWriter(tmp_path / "ids", 257) as w:
        w.add(ids.tolist())
        w.finish(None, 1)
    words = [str(tmp_path / "bare"), "--data", str(tmp_path / "ids"), "--seq-len", "32", "--dtype", "fp32"]

    def found(*more):
        assert evaluate.main([*words, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    loaded = load_run(str(tmp_path / "bare"), torch.device("cpu"), "fp32")
    assert loaded.known_tokenizer is None
    rows = torch.stack([ids[i * 32 : i * 32 + 33] for i in range(7)])
    with torch.no_grad():
        logits = loaded.stage.logits(rows[:, :-1], torch.arange(32).expand(7, 32))[..., :257]
    by_hand = float(cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
    assert found()["val_loss"] == pytest.approx(by_hand, rel=1e-5) and found()["val_bpb"] is None
    # a byte is a token, and no token is the end of a document
    bits = by_hand / math.log(2)
    assert found("--tokenizer", "bytes")["val_bpb"] == pytest.approx(bits, rel=1e-5)

    for command in (
        lambda: evaluate.main([str(tmp_path / "bare"), "--tasks", str(ROOT / "configs" / "tasks")]),
        lambda: generate.main([str(tmp_path / "bare"), "--prompt", "a"]),
    ):
        with pytest.raises(config.ConfigError, match="^--tokenizer: .*bare has none"):
            command()
    with pytest.raises(config.ConfigError, match="^--data: .* was imported without data"):
        evaluate.main([str(tmp_path / "bare")])
    assert generate.main([str(tmp_path / "bare"), "--tokenizer", "bytes", "--max-new-tokens", "3"]) == 0
    with pytest.raises(config.ConfigError, match="is not the tokenizer that .* leave --tokenizer out"):
        evaluate.main([str(tmp_path / "run"), "--tokenizer", str(make_bpe(tmp_path)), *words[1:]])
    with pytest.raises(config.ConfigError, match="is not the tokenizer that .* leave --tokenizer out"):
        export = ["to-hf", tmp_path / "run", tmp_path / "other", "--tokenizer", tmp_path / "bpe"]
        convert.main([str(word) for word in export])
    assert not (tmp_path / "other").exists()


def make_bpe(folder):
    (folder / "bpe").mkdir()
    BPE.save(folder / "bpe")
    return folder / "bpe"


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("width", [37, 111])
def test_a_mixture_with_experts_of_an_odd_width(transformers, tmp_path, capsys, width):
    """transformers' grouped product refuses rows whose bytes 16 does not divide; its experts one by one do
    not, and give the logits that ours are compared with.
    """
    settings = {**ROPE, "intermediate_size": width, "num_local_experts": 4, "num_experts_per_tok": 2}
    their_model(transformers, "Mixtral", settings).save_pretrained(tmp_path / "hf")
    out = converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run", "--json")
    match = json.loads(out)["logits"]
    assert match["against"].startswith("transformers")
    assert match["max_abs_difference"] < 1e-4 * match["largest"]


def test_logits_are_compared_beyond_the_window(transformers, tmp_path, capsys, monkeypatch):
    settings = CASES["mistral"][1] | {"sliding_window": 300, "max_position_embeddings": 512}
    their_model(transformers, "Mistral", settings).save_pretrained(tmp_path / "hf")
    out = converted(capsys, "from-hf", tmp_path / "hf", tmp_path / "run", "--json")
    assert json.loads(out)["logits"]["tokens"] == [[2, 64], [1, 364]]

    # one token more in the window
    read = convert.hf_config.read_hf_config

    def wider(*args, **keywords):
        family, model = read(*args, **keywords)
        return family, with_values(model, {"mixer.window": 301})

    monkeypatch.setattr(convert.hf_config, "read_hf_config", wider)
    code, out, err = run(capsys, "from-hf", tmp_path / "hf", tmp_path / "other")
    assert code == 1 and "logits from transformers differ by" in err and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_logits_that_differ_leave_nothing(monkeypatch, tmp_path, capsys):
    make_run(tmp_path / "run")
    right = convert.read_back
    monkeypatch.setattr(convert, "their_logits", lambda *a: None)
    monkeypatch.setattr(convert, "read_back", lambda *a: ("it", [each * 1.01 for each in right(*a)[1]]))
    code, out, err = run(capsys, "to-hf", tmp_path / "run", tmp_path / "hf")
    assert code == 1 and out == "" and err.startswith("error: logits") and err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def edit(**change):
    def apply(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    return apply


def poison(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    "how, words",
    [
        (lambda f: (f / "config.json").unlink(), "config.json: No such file or directory"),
        (edit(model_type="mamba"), "model_type 'mamba' is not supported"),
        (edit(model_type=["qwen2"]), "config.json: model_type ['qwen2'] is not"),
        (edit(model_type=None), "config.json: model_type None is not supported"),
        (edit(num_attention_heads=7), "kv_heads: 2 does not divide model.mixer.heads=7"),
        (edit(hidden_act="relu"), "hidden_act"),
        (edit(quantization_config={"quant_method": "gptq"}), "quant_method: 'gptq' is not read"),
        (edit(quantization_config=[8]), "quant_method: [8] is not read"),
        (cut, "truncated"),
        (edit(hidden_size=24), "has shape"),
        (edit(num_hidden_layers=3), "model.layers.2"),
        (poison, "model.norm.weight holds NaN or Inf"),
        (lambda f: shutil.rmtree(f), "No such file or directory"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "not a tokenizer.json"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(alone, exported, tmp_path, capsys, how, words):
    shutil.copytree(exported, tmp_path / "hf")
    how(tmp_path / "hf")
    before = sorted(p.name for p in tmp_path.iterdir())
    code, out, err = run(capsys, "from-hf", tmp_path / "hf", tmp_path / "back")
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and words in err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_targets_that_exist_and_runs_that_do_not(alone, tmp_path, capsys):
    make_run(tmp_path / "run")
    for argv, words in (
        (("to-hf", tmp_path / "run", tmp_path / "run"), "exists already"),
        (("to-hf", tmp_path / "gone", tmp_path / "hf"), "holds no checkpoint"),
        (("from-hf", tmp_path / "run", tmp_path / "back"), "config.json: No such file"),
        (("to-hf", tmp_path / "run", tmp_path / "hf", "--tokenizer", tmp_path / "no.model"), "no.model"),
    ):
        code, out, err = run(capsys, *argv)
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and words in err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_model_that_no_family_has(alone, tmp_path, capsys):
    make_run(tmp_path / "run", "llama3-tiny", **{"mixer.bias": "qkv", "mixer.qk_norm": "head"})
    code, _, err = run(capsys, "to-hf", tmp_path / "run", tmp_path / "hf")
    assert code == 2
    assert "model.mixer.qk_norm: head has no form in qwen2, the nearest Hugging Face family" in err
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_the_help_names_both_directions():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.convert", "--help"], cwd=ROOT, capture_output=True, text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "from-hf DIR RUN" in done.stdout
