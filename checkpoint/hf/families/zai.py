"""Z.ai: GLM 4 to 4.7."""
from checkpoint.hf.families.family import Family, head_and_mtp
from checkpoint.hf.families.names import (
    DEEPSEEK_V2_TENSORS,
    DOTS_TENSORS,
    MTP,
    NORMS,
    OUTER,
    OUTPUT,
    QKV,
    ROUTER_BIAS,
    STACKED_MLP,
    in_layer,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_SIZES,
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    NO_QK_NORM,
    ROPE_DEFAULTS,
    SIGMOID_EXPERTS,
    SIZES,
    without_rope_share,
)
from checkpoint.hf.rules import (
    MLA_HEADS,
    MLA_ROPE,
    MLP_LAYER_TYPES,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    NO_WINDOW,
    QK_NORM_OF_HEADS,
    STATED_MTP,
    Field,
    Fixed,
    Only,
    bias_of_qkv,
    share_of_rope,
)

GLM_RULES = (
    *SIZES,
    bias_of_qkv("attention_bias"),
    NO_MLP_BIAS,
    NO_QK_NORM,
    NO_WINDOW,
    *without_rope_share(DECODER),
    share_of_rope(0.5),
    Fixed("mixer.rope.pairs", True),
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
)
GLM_DEFAULTS = {
    **ROPE_DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "max_position_embeddings": 131072,
}

GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    rules=GLM_RULES,
    defaults=GLM_DEFAULTS,
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | STACKED_MLP) | with_leaf("bias", QKV),
)


GLM4_NORMS = NORMS | in_layer("model.layers", {
    "attn_norm_after": "post_self_attn_layernorm",
    "mlp_norm_after": "post_mlp_layernorm",
})

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    rules=(*GLM_RULES, Fixed("norm.place", "around")),
    defaults=GLM_DEFAULTS,
    tensors=with_leaf("weight", OUTER | GLM4_NORMS | QKV | OUTPUT | STACKED_MLP) | with_leaf("bias", QKV),
)


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    rules=(
        *SIZES,
        *SIGMOID_EXPERTS,
        Field("first_dense", "first_k_dense_replace"),
        STATED_MTP,
        bias_of_qkv("attention_bias"),
        QK_NORM_OF_HEADS,
        Fixed("mlp.bias", False),
        NO_WINDOW,
        *without_rope_share(DECODER),
        share_of_rope(0.5),
        NO_ATTENTION_DROPOUT,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 131072,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    tensors=DOTS_TENSORS | with_leaf("bias", QKV) | with_leaf("weight", MTP),
    copies=head_and_mtp,
)


GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",  # exported as deepseek_v3
    architecture="Glm4MoeLiteForCausalLM",
    rules=(
        *DEEPSEEK_SIZES,
        *SIGMOID_EXPERTS,
        MLP_LAYER_TYPES,
        STATED_MTP,
        Field("mixer.rope.pairs", "rope_interleave"),
        NO_MLP_BIAS,
        NO_WINDOW,
        *DECODER,
        NO_ATTENTION_BIAS,
        Only("topk_method", ("noaux_tc",), written=False),
        Only("scoring_func", ("sigmoid",), written=False),
        MLA_ROPE,
        NO_ATTENTION_DROPOUT,
        MLA_HEADS,
    ),
    defaults={
        **DEEPSEEK_DEFAULTS,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "rope_interleave": True,
        "mlp_layer_types": None,
        "max_position_embeddings": 202752,
    },
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    tensors=DEEPSEEK_V2_TENSORS | with_leaf("weight", MTP) | ROUTER_BIAS,
    copies=head_and_mtp,
)
