"""Every family at a tiny size, said twice: in our keys and in the words of transformers' config classes."""

from dataclasses import replace

from theirs import Family, Recipe, Router

STD = 0.12  # of the initial weights: large enough that attention is not the mean of all
SMALL = (
    f"--model.init_std {STD} --model.layers 2 --model.hidden 32 --model.mixer.heads 4 --model.mlp.width 48 "
    "--model.context 32"
)
GROUPED = f"{SMALL} --model.mixer.kv_heads 2"
LATENT = (
    f"{SMALL} --model.mixer.kv_rank 12 --model.mixer.nope_dim 6 --model.mixer.rope_dim 8 "
    "--model.mixer.v_dim 10 --model.mixer.rope.scaling.original 16 --model.mixer.rope.scaling.factor 4 "
    "--model.mixer.rope.scaling.high_freq 2 --model.mixer.rope.scaling.low_freq 0.3"
)
LLAMA3 = "--model.mixer.rope.scaling.original 16"
DENSE_WIDTH = "--model.blocks.dense.mlp.width 48"  # of the layers of a mixture that have an MLP

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MILLION = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.3,
}
LATENT_BASE = {
    **BASE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}

COSINE, WSD = Recipe(), Recipe(decay="wsd", warmup=1)
LINEAR, CONSTANT = Recipe(decay="linear", warmup=5), Recipe(decay="constant", warmup=0)

DENSE = (
    Family(
        "gpt2",
        f"gpt2-tiny {SMALL}",
        "GPT2",
        {
            "n_embd": 32,
            "n_inner": 48,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        recipe=LINEAR,
        tied=True,
    ),
    Family(
        "llama2",
        f"llama2-tiny {SMALL}",
        "Llama",
        {**BASE, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_parameters": PLAIN_ROPE},
        recipe=COSINE,
    ),
    Family(
        "llama3",
        f"llama3-tiny {GROUPED} {LLAMA3}",
        "Llama",
        {**BASE, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE},
        recipe=WSD,
    ),
    Family(
        "llama3.2",
        f"llama3.2-tiny {GROUPED} {LLAMA3} --model.mixer.head_dim 12",
        "Llama",
        {**BASE, "head_dim": 12, "rms_norm_eps": 1e-5, "rope_parameters": {**LLAMA3_ROPE, "factor": 32.0}},
        recipe=LINEAR,
        tied=True,
    ),
    Family(
        "mistral",
        f"mistral-tiny {GROUPED} --model.mixer.window 7",
        "Mistral",
        {**BASE, "head_dim": 8, "rms_norm_eps": 1e-5, "sliding_window": 7, "rope_parameters": PLAIN_ROPE},
        recipe=COSINE,
    ),
    Family(
        "qwen2.5",
        f"qwen2.5-tiny {GROUPED}",
        "Qwen2",
        {**BASE, "rms_norm_eps": 1e-6, "use_sliding_window": False, "rope_parameters": MILLION},
        recipe=CONSTANT,
        tied=True,
    ),
    Family(
        "qwen3",
        f"qwen3-tiny {GROUPED} --model.mixer.head_dim 10",
        "Qwen3",
        {
            **BASE,
            "head_dim": 10,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "rope_parameters": MILLION,
        },
        recipe=WSD,
    ),
)

MIXTURES = (
    Family(
        "mixtral",
        f"mixtral-tiny {GROUPED} --model.mlp.experts 6 --model.mlp.router.aux.weight 0.05 "
        "--model.mlp.router.aux.over micro",
        "Mixtral",
        {
            **BASE,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": MILLION,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
        Router(aux=0.05, kind="micro"),
        recipe=COSINE,
    ),
    Family(
        "qwen2-moe",
        f"qwen2-moe-tiny {GROUPED} {DENSE_WIDTH} --model.mlp.width 20 --model.mlp.router.aux.weight 0.05",
        "Qwen2Moe",
        {
            **BASE,
            "rms_norm_eps": 1e-6,
            "rope_parameters": MILLION,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
        },
        Router(aux=0.05),
        recipe=LINEAR,
    ),
    Family(
        "qwen3-moe",
        f"qwen3-moe-tiny {GROUPED} --model.mixer.head_dim 10 --model.mlp.experts 7 "
        "--model.mlp.top_k 3 --model.mlp.width 20 --model.mlp.router.aux.weight 0.05",
        "Qwen3Moe",
        {
            **BASE,
            "head_dim": 10,
            "rms_norm_eps": 1e-6,
            "rope_parameters": MILLION,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
        Router(aux=0.05, kind="global"),
        recipe=WSD,
    ),
    Family(
        "olmoe",
        f"olmoe-tiny {SMALL} --model.mlp.experts 6 --model.mlp.top_k 3 "
        "--model.mlp.router.aux.weight 0.05 --model.mlp.router.z_loss 0.02",
        "Olmoe",
        {
            **BASE,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_parameters": PLAIN_ROPE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
        },
        Router(aux=0.05, z=0.02),
        recipe=CONSTANT,
    ),
    Family(
        "dots1",
        f"dots1-tiny {SMALL} {DENSE_WIDTH} --model.mlp.experts 8 --model.mlp.top_k 3 --model.mlp.width 20 "
        "--model.mlp.router.aux.weight 0.05 --model.mlp.router.bias_rate 0.02",
        "Dots1",
        {
            **BASE,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_parameters": PLAIN_ROPE,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "sliding_window": None,
        },
        Router(aux=0.05, sigmoid=True, bias_rate=0.02),
        recipe=COSINE,
    ),
)

EXPERTS_OF_THEIR_OWN = (
    Family(
        "gpt-oss",
        f"gpt-oss-tiny {GROUPED} --model.mixer.head_dim 8 --model.mlp.experts 6 "
        "--model.mlp.top_k 3 --model.mlp.width 20 --model.mlp.router.aux.weight 0.05 "
        "--model.blocks.local.mixer.window 7 "
        "--model.mixer.rope.scaling.original 16 --model.mixer.rope.scaling.factor 4",
        "GptOss",
        {
            **BASE,
            "intermediate_size": 20,
            "head_dim": 8,
            "sliding_window": 7,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                **YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            },
        },
        Router(aux=0.05),
        recipe=COSINE,
    ),
    Family(
        "llama4",
        f"llama4-tiny {GROUPED} {DENSE_WIDTH} --model.layers 4 --model.mlp.experts 6 "
        "--model.mlp.width 20 --model.mlp.router.aux.weight 0.05 "
        "--model.mixer.chunk 7 --model.blocks.nope.mixer.growth.every 5",
        "Llama4Text",
        {
            **BASE,
            "num_hidden_layers": 4,
            "intermediate_size": 20,
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 7,
            "floor_scale": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        Router(aux=0.05, sigmoid=True),
        recipe=LINEAR,
    ),
)

LATENTS = (
    Family(
        "deepseek-v2-lite",
        f"deepseek-v2-lite-tiny {LATENT} {DENSE_WIDTH} --model.layers 3 --model.mlp.experts 6 "
        "--model.mlp.top_k 3 --model.mlp.width 20 --model.mlp.router.aux.weight 0.05",
        "DeepseekV2",
        {
            **LATENT_BASE,
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        Router(aux=0.05),
        recipe=WSD,
    ),
    Family(
        "deepseek-v3",
        f"deepseek-v3-tiny {LATENT} {DENSE_WIDTH} --model.mixer.q_rank 14 --model.mlp.experts 8 "
        "--model.mlp.top_k 3 --model.mlp.width 20 --model.mlp.router.aux.weight 0.05 "
        "--model.mlp.router.bias_rate 0.02",
        "DeepseekV3",
        {
            **LATENT_BASE,
            "q_lora_rank": 14,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        Router(aux=0.05, sigmoid=True, bias_rate=0.02),
        recipe=COSINE,
        mtp=1,
    ),
)


def variant(family: Family, docs: bool, micro: int) -> Family:
    return replace(family, recipe=replace(family.recipe, docs=docs, micro=micro))
