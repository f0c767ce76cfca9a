"""Tencent: Hunyuan V1, Hy3 and Youtu."""
from checkpoint.hf.families.family import Family
from checkpoint.hf.families.names import (
    EXPERT_BIAS,
    EXPERTS,
    LLAMA_TENSORS,
    MLA,
    MLP,
    NORMS,
    OUTER,
    OUTPUT,
    QKV,
    QWEN3_TENSORS,
    in_layer,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_SIZES,
    EXPERTS_PER_TOKEN,
    NO_ATTENTION_BIAS,
    NO_BIAS,
    NO_MLP_BIAS,
    ROPE_DEFAULTS,
    SIZES,
    without,
    without_key,
)
from checkpoint.hf.rules import (
    ATTENTION_BIAS,
    EXPERTS_OF_FFN,
    HUNYUAN_ROPE,
    INIT_STD_BY_WIDTH,
    MLA_HEADS,
    MLA_ROPE,
    MLP_LAYER_TYPES,
    MOE_TOPK,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    NO_WINDOW,
    ROPE,
    Field,
    Fixed,
    Idle,
    Only,
)

HUNYUAN_TOKENS = (
    "eod_token_id", "org_vocab_size", "sep_token_id", "text_start_id", "text_end_id", "mask_init_id",
    "im_start_id", "im_end_id", "im_newline_id", "pad_id", "bos_id", "eos_id", "eod_id",
)
HUNYUAN_RULES = (
    ATTENTION_BIAS,
    NO_MLP_BIAS,
    Fixed("mixer.qk_norm", "after_rope"),
    NO_WINDOW,
    *DECODER,
    HUNYUAN_ROPE,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    Idle(HUNYUAN_TOKENS),
    Only("use_qk_norm", (True,), written=False),
    Only("use_cla", (False,), written=False),
)
HUNYUAN_QK_NORM = in_layer("model.layers", {
    "attn.q_norm": "self_attn.query_layernorm",
    "attn.k_norm": "self_attn.key_layernorm",
})

HUNYUAN_V1_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    rules=(
        *SIZES,
        *HUNYUAN_RULES,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "max_position_embeddings": 2048,
    },
    aliases={"attention_head_dim": "head_dim"},
    tensors=LLAMA_TENSORS | with_leaf("weight", HUNYUAN_QK_NORM) | with_leaf("bias", QKV | OUTPUT),
)


HUNYUAN_MOE = in_layer("model.layers", {
    "mlp.router": "mlp.gate.wg",
    "mlp.experts.{expert}.gate": "mlp.experts.{expert}.gate_proj",
    "mlp.experts.{expert}.up": "mlp.experts.{expert}.up_proj",
    "mlp.experts.{expert}.down": "mlp.experts.{expert}.down_proj",
    "mlp.shared.gate": "mlp.shared_mlp.gate_proj",
    "mlp.shared.up": "mlp.shared_mlp.up_proj",
    "mlp.shared.down": "mlp.shared_mlp.down_proj",
})

HUNYUAN_V1_MOE = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    rules=(
        *SIZES,
        Field("experts", "num_experts"),
        MOE_TOPK,
        EXPERTS_OF_FFN,
        Fixed("shared_experts", 1),
        Fixed("router_renorm", True),
        Fixed("router", "softmax"),
        Only("use_mixed_mlp_moe", (True,), written=False),
        Only("norm_topk_prob", (True,), written=False),
        Only("moe_layer_num_skipped", (0,), written=False),
        Idle(("num_shared_expert", "moe_intermediate_size")),  # redundant with the shapes of the weights
        *HUNYUAN_RULES,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "num_experts": 1,
        "moe_topk": 1,
        "max_position_embeddings": 2048,
    },
    aliases={"attention_head_dim": "head_dim"},
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | HUNYUAN_QK_NORM | HUNYUAN_MOE)
    | with_leaf("bias", QKV | OUTPUT),
)


HUNYUAN_EXPERTS = in_layer("model.layers", {
    "mlp.router": "mlp.router.gate",
    "mlp.shared.gate": "mlp.shared_mlp.gate_proj",
    "mlp.shared.up": "mlp.shared_mlp.up_proj",
    "mlp.shared.down": "mlp.shared_mlp.down_proj",
})

HY_V3 = Family(
    model_type="hy_v3",  # exported as dots1
    architecture="HYV3ForCausalLM",
    rules=(
        *SIZES,
        Field("experts", "num_experts"),
        EXPERTS_PER_TOKEN,
        Field("moe_ffn", "moe_intermediate_size"),
        Field("shared_experts", "num_shared_experts"),
        MLP_LAYER_TYPES,
        Field("router_scale", "router_scaling_factor"),
        Fixed("router", "sigmoid"),
        Fixed("router_bias", True),
        Fixed("router_renorm", True),
        *NO_BIAS,
        Fixed("mixer.qk_norm", "head"),
        NO_WINDOW,
        *DECODER,
        NO_ATTENTION_BIAS,
        Only("mlp_bias", (False,)),
        ROPE,
        NO_ATTENTION_DROPOUT,
        # Its multi-token prediction module has other names, and transformers does not run it.
        Only("num_nextn_predict_layers", (0,), written=False),
        Only("qk_norm", (True,), written=False),
        Only("route_norm", (True,), written=False),
        Only("moe_router_use_sigmoid", (True,), written=False),
        Only("moe_router_enable_expert_bias", (True,), written=False),
        Idle(("enable_moe_fp32_combine", "enable_lm_head_fp32", "enable_attention_fp32_softmax")),
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.006,
        "rope_theta": 11158840.0,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
        "mlp_layer_types": None,
        "max_position_embeddings": 131072,
    },
    aliases={"num_local_experts": "num_experts", "expert_hidden_dim": "moe_intermediate_size"},
    tensors=QWEN3_TENSORS | with_leaf("weight", EXPERTS | HUNYUAN_EXPERTS) | EXPERT_BIAS,
)


YOUTU = Family(
    model_type="youtu",  # exported as deepseek_v2 or deepseek_v3 with only dense layers
    architecture="YoutuForCausalLM",
    rules=(
        *without(DEEPSEEK_SIZES, "init_std"),
        INIT_STD_BY_WIDTH,
        Field("mixer.rope.pairs", "rope_interleave"),
        NO_MLP_BIAS,
        NO_WINDOW,
        *DECODER,
        NO_ATTENTION_BIAS,
        Only("mlp_bias", (False,), written=False),
        Idle(("embedding_initializer_range",)),
        MLA_ROPE,
        NO_ATTENTION_DROPOUT,
        MLA_HEADS,
    ),
    defaults={
        **without_key(DEEPSEEK_DEFAULTS, "initializer_range"),
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "rope_interleave": True,
        "max_position_embeddings": 131072,
    },
    tensors=with_leaf("weight", OUTER | NORMS | MLA | OUTPUT | MLP),
)
