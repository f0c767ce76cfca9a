"""Mixtures of experts of makers with a single family here.

dots.llm1 (rednote), Solar Open (Upstage), Sarvam-MoE (Sarvam AI), MiniMax-M2 (MiniMax), Laguna (Poolside),
MiMo-V2-Flash (Xiaomi), Step 3.5 and 3.7 (StepFun).
"""
from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.names import (
    DOTS_TENSORS,
    EXPERTS,
    LLAMA_TENSORS,
    MIXTRAL_EXPERTS,
    MLP,
    NORMS,
    OUTER,
    OUTPUT,
    QK_NORM,
    QKV,
    QWEN3_TENSORS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    in_layer,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    EXPERTS_PER_TOKEN,
    LAYERS_AND_WIDTH,
    NO_ATTENTION_BIAS,
    NO_BIAS,
    NO_MLP_BIAS,
    NO_QK_NORM,
    REST_OF_SIZES,
    ROPE_DEFAULTS,
    ROUTER_GROUPS,
    SIGMOID_EXPERTS,
    SIZES,
    without,
    without_key,
    without_rope_share,
)
from checkpoint.hf.layer_types import LAGUNA_LAYERS, MIMO_LAYERS, MIMO_SPELLINGS
from checkpoint.hf.rules import (
    DOTS_NO_WINDOW,
    EXPERTS_OF_FFN,
    GATING,
    MLP_LAYER_TYPES,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    NO_WINDOW,
    QK_NORM_OF_HEADS,
    ROPE,
    SHARED_WIDTH,
    UNUSED_WIDTH,
    Field,
    Fixed,
    Idle,
    Only,
    bias_of_qkv,
    one_of_null,
    share_of_rope,
    shared_width,
)
from checkpoint.hf.step_layers import STEP_LAYERS, STEP_LIMITS, STEP_MLPS, STEP_SCALAR

DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    rules=(
        *SIZES,
        Field("experts", "n_routed_experts"),
        EXPERTS_PER_TOKEN,
        Field("moe_ffn", "moe_intermediate_size"),
        Field("shared_experts", "n_shared_experts"),
        Field("first_dense", "first_k_dense_replace"),
        Field("router_renorm", "norm_topk_prob"),
        *ROUTER_GROUPS,
        Field("router_scale", "routed_scaling_factor"),
        *NO_BIAS,
        Fixed("mixer.qk_norm", "head"),
        Fixed("router", "sigmoid"),
        Fixed("router_bias", True),
        *DECODER,
        NO_ATTENTION_BIAS,
        ROPE,
        NO_ATTENTION_DROPOUT,
        DOTS_NO_WINDOW,
        Idle(("sliding_window", "max_window_layers")),
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 2048,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=DOTS_TENSORS,
)


SOLAR_OPEN = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    rules=(
        *without(SIZES, "mlp.width"),
        UNUSED_WIDTH,
        *SIGMOID_EXPERTS,
        bias_of_qkv("attention_bias"),
        NO_MLP_BIAS,
        NO_QK_NORM,
        NO_WINDOW,
        *DECODER,
        Only("use_qk_norm", (False,), written=False),
        Only("first_k_dense_replace", (0,), written=False),
        ROPE,
        NO_ATTENTION_DROPOUT,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "attention_bias": False,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 131072,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=LLAMA_TENSORS | with_leaf("weight", EXPERTS | SHARED_EXPERTS) | with_leaf("bias", QKV)
    | ROUTER_BIAS,
)


SARVAM_QKV = in_layer(
    "model.layers", dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attention.query_key_value")
)
SARVAM_NAMES = {
    **OUTER,
    "embed": "model.word_embeddings",
    **in_layer("model.layers", {
        "attn.o": "attention.dense",
        "attn.q_norm": "attention.query_layernorm",
        "attn.k_norm": "attention.key_layernorm",
    }),
}
SARVAM_ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "mlp.gate.expert_bias"})

SARVAM_MOE = Family(
    # transformers runs it as glm4_moe. With norms of q and k, and without biases, it is exported as dots1.
    model_type="sarvam_moe",
    architecture="SarvamMoEForCausalLM",
    rules=(
        *SIZES,
        *SIGMOID_EXPERTS,
        Field("first_dense", "first_k_dense_replace"),
        bias_of_qkv("attention_bias"),
        QK_NORM_OF_HEADS,
        NO_MLP_BIAS,
        NO_WINDOW,
        *DECODER,
        ROPE,
        NO_ATTENTION_DROPOUT,
        Only("num_nextn_predict_layers", (0,)),
        # in older folders
        Only("use_bias", (False,), written=False),
        Only("moe_router_enable_expert_bias", (True,), written=False),
        Only("score_function", ("sigmoid",), written=False),
        Idle(("max_window_layers",)),
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "initializer_range": 0.006,
        "rope_theta": 8e6,
        "attention_bias": False,
        "use_qk_norm": True,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1024,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 131072,
    },
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
        "use_qkv_bias": "attention_bias",
    },
    tensors=with_leaf("weight", SARVAM_NAMES | SARVAM_QKV | NORMS | MLP | EXPERTS | SHARED_EXPERTS)
    | with_leaf("bias", SARVAM_QKV)
    | SARVAM_ROUTER_BIAS,
)


MINIMAX_ROUTER_BIAS = in_layer(
    "model.layers", {"mlp.router.bias": "block_sparse_moe.e_score_correction_bias"}
)

MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    rules=(
        *SIZES,
        Field("experts", "num_local_experts"),
        EXPERTS_PER_TOKEN,
        EXPERTS_OF_FFN,
        Fixed("router", "sigmoid"),
        Fixed("router_bias", True),
        Fixed("router_renorm", True),
        *NO_BIAS,
        Fixed("mixer.qk_norm", "whole"),
        NO_WINDOW,
        *without_rope_share(DECODER),
        share_of_rope(1.0),
        NO_ATTENTION_DROPOUT,
        NO_PADDING,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 196608,
    },
    aliases={"num_experts": "num_local_experts"},
    tensors=QWEN3_TENSORS | with_leaf("weight", MIXTRAL_EXPERTS) | MINIMAX_ROUTER_BIAS,
)


LAGUNA_NAMES = in_layer("model.layers", {
    "attn.gate": "self_attn.g_proj",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
})
LAGUNA_ROUTER_BIAS = in_layer(
    "model.layers", {"mlp.router.bias": "mlp.experts.e_score_correction_bias"}
)

LAGUNA = Family(
    model_type="laguna",
    architecture="LagunaForCausalLM",
    rules=(
        *without(LAYERS_AND_WIDTH, "mixer.heads"),
        Field("mixer.kv_heads", "num_key_value_heads"),
        Field("mixer.head_dim", "head_dim", minimum=1),
        *REST_OF_SIZES,
        Field("experts", "num_experts"),
        EXPERTS_PER_TOKEN,
        Field("moe_ffn", "moe_intermediate_size"),
        SHARED_WIDTH,
        MLP_LAYER_TYPES,
        Field("router_scale", "moe_routed_scaling_factor"),
        Fixed("router", "sigmoid"),
        Fixed("router_bias", True),
        Fixed("router_renorm", True),
        *NO_BIAS,
        NO_ATTENTION_BIAS,
        Fixed("mixer.qk_norm", "head"),
        GATING,
        Fixed("mixer.gate.by", "softplus"),
        *without_rope_share(DECODER),
        LAGUNA_LAYERS,
        NO_ATTENTION_DROPOUT,
        Only("moe_router_logit_softcapping", (0.0,), written=False),
        Only("moe_apply_router_weight_on_input", (False,), written=False),
        Only("qkv_bias", (False,), written=False),
        Only("norm_topk_prob", (True,), written=False),
        Idle(("mlp_only_layers", "decoder_sparse_step")),  # redundant with mlp_layer_types
    ),
    defaults={
        **without_key(ROPE_DEFAULTS, "rope_theta"),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "num_attention_heads": 48,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "moe_routed_scaling_factor": 1.0,
        "mlp_layer_types": None,
        "max_position_embeddings": 131072,
    },
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | QK_NORM | MLP | EXPERTS | LAGUNA_NAMES)
    | LAGUNA_ROUTER_BIAS,
)


MIMO_SINKS = in_layer("model.layers", {"attn.sinks": "self_attn.attention_sink_bias"})

MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    rules=(
        *LAYERS_AND_WIDTH,
        Field("mixer.head_dim", "head_dim", minimum=1),
        Field("mixer.value_dim", "v_head_dim"),
        one_of_null("mixer.value_scale", "attention_value_scale"),
        *REST_OF_SIZES,
        Field("experts", "n_routed_experts"),
        EXPERTS_PER_TOKEN,
        Field("moe_ffn", "moe_intermediate_size"),
        Field("router_renorm", "norm_topk_prob"),
        *ROUTER_GROUPS,
        one_of_null("router_scale", "routed_scaling_factor"),
        Fixed("router", "sigmoid"),
        Fixed("router_bias", True),
        MLP_LAYER_TYPES,
        bias_of_qkv("attention_bias"),
        NO_MLP_BIAS,
        NO_QK_NORM,
        *without_rope_share(DECODER),
        MIMO_LAYERS,
        MIMO_SPELLINGS,
        NO_ATTENTION_DROPOUT,
        Idle(("attention_chunk_size", "hybrid_block_size", "partial_rotary_factor")),
    ),
    defaults={
        **without_key(ROPE_DEFAULTS, "rope_theta"),
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "attention_value_scale": 0.707,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "sliding_window": 129,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "mlp_layer_types": None,
        "max_position_embeddings": 131072,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | MLP | EXPERTS) | with_leaf("bias", QKV)
    | ROUTER_BIAS | MIMO_SINKS,
    unread=("model.mtp.",),
)


STEP_NAMES = in_layer("model.layers", {
    "attn.gate": "self_attn.g_proj",
    "mlp.router": "moe.gate",
    "mlp.shared.gate": "share_expert.gate_proj",
    "mlp.shared.up": "share_expert.up_proj",
    "mlp.shared.down": "share_expert.down_proj",
})
STEP_STACKS = in_layer("model.layers", {  # stacked per layer
    "mlp.experts.{expert}.gate": "moe.gate_proj",
    "mlp.experts.{expert}.up": "moe.up_proj",
    "mlp.experts.{expert}.down": "moe.down_proj",
})
STEP_ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "moe.router_bias"})

STEP3P5 = Family(
    # Step 3.5 as published, and the text part of Step 3.7, which transformers computes only inside the whole.
    model_type="step3p5",
    architecture="Step3p5ForCausalLM",
    rules=(
        *without(LAYERS_AND_WIDTH, "mixer.heads"),
        Field("mixer.kv_heads", "num_key_value_heads"),
        Field("mixer.head_dim", "head_dim", minimum=1),
        *REST_OF_SIZES,
        Field("experts", "n_routed_experts"),
        EXPERTS_PER_TOKEN,
        Field("moe_ffn", "moe_intermediate_size"),
        shared_width("share_expert_dim"),
        STEP_MLPS,
        STEP_LIMITS,
        Field("router_scale", "moe_router_scaling_factor"),
        Fixed("router", "sigmoid"),
        Fixed("router_bias", True),
        Fixed("router_renorm", True),
        *NO_BIAS,
        NO_ATTENTION_BIAS,
        Only("mlp_bias", (False,), written=False),
        Fixed("mixer.qk_norm", "head"),
        Fixed("mixer.gate.kind", "head"),
        Fixed("mixer.gate.by", "sigmoid"),
        STEP_SCALAR,
        *without_rope_share(DECODER),
        STEP_LAYERS,
        NO_ATTENTION_DROPOUT,
        Only("gating", (True, "per-head"), written=False),
        Only("use_bidirectional_attention", (False,), written=False),
        # in published folders
        Only("use_head_wise_attn_gate", (True,), written=False),
        Only("use_qk_norm", (True,), written=False),
        Only("zero_centered", (True,), written=False),
        Only("use_moe", (True,), written=False),
        Only("use_moe_router_bias", (True,), written=False),
        Only("moe_router_activation", ("sigmoid",), written=False),
        Only("norm_expert_weight", (True,), written=False),
        Only("moe_layer_offset", (0,), written=False),
        Only("moe_every_n_layer", (1,), written=False),
        Only("att_impl_type", ("GQA",), written=False),
        Only("use_mfa", (False,), written=False),
        Only("sink", (False,), written=False),
        Only("use_rope_layers", ([],), written=False),
        Only("yarn_only_types", (["full_attention"],), written=False),
        Idle(("max_seq_len", "need_fp32_gate", "mtp_layer_types", "mtp_mlp_layer_types")),
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 1.0,
        "sliding_window": None,
        "max_position_embeddings": 128000,
    },
    aliases={
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    tensors=with_leaf(
        "weight", OUTER | NORMS | QKV | OUTPUT | QK_NORM | MLP | STEP_NAMES | STEP_STACKS
    ) | STEP_ROUTER_BIAS,
    arrangements=dict.fromkeys(
        with_leaf("weight", STEP_STACKS).values(), lambda model: Arrangement(leading=model.mlp.experts)
    ),
    norms_below_one=True,
    unread=("vision_model.", "vit_large_projector."),
    leaves_modules_ahead=True,
    within="step3p7",
)
