"""Mistral AI: Mistral, Ministral and Mixtral."""
from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.names import (
    LLAMA_TENSORS,
    MIXTRAL_EXPERTS,
    MLA,
    MLP,
    NORMS,
    ONE_ROUTER,
    OUTER,
    OUTPUT,
    SHARED_EXPERTS,
    STACKED_EXPERTS,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_EXPERTS,
    DEEPSEEK_SIZES,
    EXPERTS_PER_TOKEN,
    NO_ATTENTION_BIAS,
    NO_BIAS,
    NO_EXPERTS,
    NO_MLP_BIAS,
    NO_QK_NORM,
    ROPE_DEFAULTS,
    SIZES,
    without_key,
)
from checkpoint.hf.rules import (
    EXPERTS_OF_FFN,
    GROWING_ROPE,
    LAYER_WINDOWS,
    MISTRAL4_GROWING_ROPE,
    MLA_HEADS,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    NO_WINDOW,
    PLAIN_WINDOW,
    ROPE,
    Field,
    Only,
    deepseek_experts,
)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    rules=(*SIZES, *NO_BIAS, NO_QK_NORM, *DECODER, ROPE, NO_ATTENTION_DROPOUT, PLAIN_WINDOW),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    tensors=LLAMA_TENSORS,
)


MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    rules=(*SIZES, *NO_BIAS, NO_QK_NORM, *DECODER, ROPE, NO_ATTENTION_DROPOUT, LAYER_WINDOWS),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    tensors=LLAMA_TENSORS,
)


MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    rules=(
        *SIZES, *NO_BIAS, NO_QK_NORM, *DECODER, GROWING_ROPE, NO_ATTENTION_DROPOUT, NO_PADDING,
        PLAIN_WINDOW,
    ),
    defaults={
        **without_key(ROPE_DEFAULTS, "rope_theta"),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "max_position_embeddings": 262144,
    },
    tensors=LLAMA_TENSORS,
)


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rules=(
        *SIZES,
        Field("experts", "num_local_experts"),
        EXPERTS_PER_TOKEN,
        EXPERTS_OF_FFN,
        *NO_BIAS,
        NO_QK_NORM,
        *DECODER,
        ROPE,
        NO_ATTENTION_DROPOUT,
        PLAIN_WINDOW,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 131072,
    },
    aliases={"num_experts": "num_local_experts"},
    tensors=LLAMA_TENSORS | with_leaf("weight", MIXTRAL_EXPERTS),
)


MISTRAL4 = Family(
    # AutoModelForCausalLM does not know it, so its class is named.
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    rules=(
        *DEEPSEEK_SIZES,
        deepseek_experts(*DEEPSEEK_EXPERTS, Field("router_renorm", "norm_topk_prob")),
        Field("mixer.rope.pairs", "rope_interleave"),
        NO_MLP_BIAS,
        NO_WINDOW,
        *DECODER,
        NO_ATTENTION_BIAS,
        MISTRAL4_GROWING_ROPE,
        NO_ATTENTION_DROPOUT,
        NO_PADDING,
        MLA_HEADS,
        Only("n_group", (1,)),
        Only("topk_group", (1,)),
        NO_EXPERTS,
    ),
    defaults={
        **without_key(DEEPSEEK_DEFAULTS, "rope_theta"),
        "num_key_value_heads": 32,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rope_interleave": True,
        "max_position_embeddings": 1048576,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=with_leaf("weight", OUTER | NORMS | MLA | OUTPUT | MLP | SHARED_EXPERTS | ONE_ROUTER)
    | STACKED_EXPERTS,
    arrangements=dict.fromkeys(
        STACKED_EXPERTS.values(), lambda model: Arrangement(leading=model.mlp.experts)
    ),
)
