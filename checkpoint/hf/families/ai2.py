"""The Allen Institute (Ai2): OLMo 2, OLMo 3, OLMo hybrid and OLMoE."""
from checkpoint.hf.families.family import Family
from checkpoint.hf.families.names import (
    DELTA_RATES,
    EXPERTS,
    MLP,
    NORMS_AFTER,
    OUTER,
    OUTPUT,
    QK_NORM,
    QKV,
    QWEN3_TENSORS,
    convolutions,
    in_layer,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    EXPERTS_PER_TOKEN,
    KV_HEADS,
    LAYERS_AND_WIDTH,
    NO_ATTENTION_BIAS,
    NO_BIAS,
    NO_MLP_BIAS,
    REST_OF_SIZES,
    ROPE_DEFAULTS,
    without_key,
)
from checkpoint.hf.layer_types import OLMO3_LAYERS
from checkpoint.hf.rules import (
    ATTENTION_BIAS,
    EXPERTS_OF_FFN,
    NO_ATTENTION_DROPOUT,
    NO_HEAD_DIM,
    NO_PADDING,
    NO_WINDOW,
    ROPE,
    Field,
    Fixed,
    Idle,
    Only,
)
from checkpoint.hf.state_layers import OLMO_HYBRID_LAYERS, OLMO_HYBRID_ROPE

OLMO2_RULES = (
    *LAYERS_AND_WIDTH,
    KV_HEADS,
    NO_HEAD_DIM,
    *REST_OF_SIZES,
    ATTENTION_BIAS,
    NO_MLP_BIAS,
    Fixed("mixer.qk_norm", "whole"),
    Fixed("norm.place", "after"),
    *DECODER,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
)
OLMO2_TENSORS = (
    with_leaf("weight", OUTER | NORMS_AFTER | QKV | OUTPUT | QK_NORM | MLP) | with_leaf("bias", QKV | OUTPUT)
)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    rules=(*OLMO2_RULES, NO_WINDOW, ROPE),
    defaults={
        **ROPE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "max_position_embeddings": 2048,
    },
    tensors=OLMO2_TENSORS,
)


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    rules=(*OLMO2_RULES, OLMO3_LAYERS),
    defaults={
        **ROPE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "sliding_window": 4096,
        "max_position_embeddings": 2048,
    },
    tensors=OLMO2_TENSORS,
)


OLMO_LINEAR = in_layer("model.layers", {
    **{f"attn.{ours}": f"linear_attn.{theirs}_proj" for ours, theirs in zip("qkvabzo", "qkvabgo")},
    **{f"attn.{name}_conv": f"linear_attn.{name}_conv1d" for name in "qkv"},
    "attn.norm": "linear_attn.o_norm",
    "attn_norm": "attention_layer_norm",
    "mlp_norm": "feedforward_layer_norm",
})

OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    rules=(
        *OLMO2_RULES,
        Fixed("mixer.window", None),
        OLMO_HYBRID_ROPE,
        OLMO_HYBRID_LAYERS,
        Idle((  # initialization of the states' decay rates
            "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
            "linear_dt_init_floor",
        )),
    ),
    defaults={
        **without_key(ROPE_DEFAULTS, "head_dim"),
        "attention_bias": False,
        "linear_num_key_heads": None,
        "linear_num_value_heads": None,
        "linear_key_head_dim": None,
        "linear_value_head_dim": None,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "max_position_embeddings": 65536,
    },
    tensors=OLMO2_TENSORS,
    of_mixers={"delta": with_leaf("weight", OLMO_LINEAR) | DELTA_RATES},
    arrangements=convolutions("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
    spellings={
        "delta": {
            ".input_layernorm.": ".attention_layer_norm.",
            ".post_attention_layernorm.": ".feedforward_layer_norm.",
        },
        "attention": {".feedforward_layer_norm.": ".post_attention_layernorm."},
    },
    unread=("mtp.",),
)


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    rules=(
        *LAYERS_AND_WIDTH,
        KV_HEADS,
        NO_HEAD_DIM,
        *REST_OF_SIZES,
        Field("experts", "num_experts"),
        EXPERTS_PER_TOKEN,
        EXPERTS_OF_FFN,
        Field("router_renorm", "norm_topk_prob"),
        *NO_BIAS,
        Fixed("mixer.qk_norm", "whole"),
        NO_WINDOW,
        *DECODER,
        NO_ATTENTION_BIAS,
        Only("clip_qkv", (None,)),
        Only("sliding_window", (None,), written=False),
        ROPE,
        NO_ATTENTION_DROPOUT,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
    },
    aliases={"num_local_experts": "num_experts"},
    tensors=QWEN3_TENSORS | with_leaf("weight", EXPERTS),
)
