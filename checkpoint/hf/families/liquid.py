"""Liquid AI: LFM2, dense and a mixture."""
from checkpoint.hf.families.family import Family
from checkpoint.hf.families.names import OUTER, QKV, convolutions, in_layer, with_leaf
from checkpoint.hf.families.rules import (
    DECODER,
    EXPERTS_PER_TOKEN,
    KV_HEADS,
    LAYERS_AND_WIDTH,
    NO_BIAS,
    REST_OF_SIZES,
    ROPE_DEFAULTS,
    without,
    without_key,
)
from checkpoint.hf.rules import HEADS_DIVIDE_HIDDEN, NO_HEAD_DIM, NO_PADDING, ROPE, Field, Fixed, Idle, Only
from checkpoint.hf.state_layers import LFM2_LAYERS, LFM2_WIDTH

LFM2_RULES = (
    *LAYERS_AND_WIDTH,
    KV_HEADS,
    NO_HEAD_DIM,
    HEADS_DIVIDE_HIDDEN,
    *without(without(REST_OF_SIZES, "mlp.width"), "norm.eps"),
    Field("norm.eps", "norm_eps", minimum=0),
    *NO_BIAS,
    Fixed("mixer.qk_norm", "head"),
    Fixed("mixer.window", None),
    LFM2_LAYERS,
    *DECODER,
    ROPE,
    NO_PADDING,
    Only("conv_bias", (False,)),
    # redundant keys of published folders, or how weights were initialized
    Only("block_use_swiglu", (True,), written=False),
    Only("use_pos_enc", (True,), written=False),
    Idle((
        "theta", "num_heads", "block_dim", "conv_dim", "conv_dim_out", "block_norm_eps",
        "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init",
    )),
)
LFM2_DEFAULTS = {
    **without_key(without_key(ROPE_DEFAULTS, "head_dim"), "rms_norm_eps"),
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "max_position_embeddings": 128000,
}
LFM2_NAMES = {
    **OUTER,
    "norm": "model.embedding_norm",
    **QKV,
    **in_layer("model.layers", {
        "attn_norm": "operator_norm",
        "mlp_norm": "ffn_norm",
        "attn.o": "self_attn.out_proj",
        "attn.q_norm": "self_attn.q_layernorm",
        "attn.k_norm": "self_attn.k_layernorm",
    }),
}
LFM2_MLP = in_layer("model.layers", {
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
})
LFM2_CONV = in_layer("model.layers", {
    **dict.fromkeys(("attn.B", "attn.C", "attn.x"), "conv.in_proj"),
    "attn.conv": "conv.conv",
    "attn.o": "conv.out_proj",
})

LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    rules=(*LFM2_RULES, LFM2_WIDTH),
    defaults={
        **LFM2_DEFAULTS,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
    aliases={"tie_embedding": "tie_word_embeddings"},
    tensors=with_leaf("weight", LFM2_NAMES | LFM2_MLP),
    of_mixers={"short_conv": with_leaf("weight", LFM2_CONV)},
    arrangements=convolutions("conv.conv"),
)


LFM2_EXPERTS = in_layer("model.layers", {
    "mlp.router": "feed_forward.gate",
    "mlp.experts.{expert}.gate": "feed_forward.experts.{expert}.w1",
    "mlp.experts.{expert}.up": "feed_forward.experts.{expert}.w3",
    "mlp.experts.{expert}.down": "feed_forward.experts.{expert}.w2",
})
LFM2_ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "feed_forward.expert_bias"})

LFM2_MOE = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    rules=(
        *LFM2_RULES,
        Field("mlp.width", "intermediate_size"),
        Field("experts", "num_experts"),
        EXPERTS_PER_TOKEN,
        Field("moe_ffn", "moe_intermediate_size"),
        Field("first_dense", "num_dense_layers"),
        Field("router_renorm", "norm_topk_prob"),
        Field("router_scale", "routed_scaling_factor"),
        Field("router_bias", "use_expert_bias"),
        Fixed("router", "sigmoid"),
    ),
    defaults={
        **LFM2_DEFAULTS,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
    aliases={"tie_embedding": "tie_word_embeddings"},
    tensors=with_leaf("weight", LFM2_NAMES | LFM2_MLP | LFM2_EXPERTS) | LFM2_ROUTER_BIAS,
    of_mixers={"short_conv": with_leaf("weight", LFM2_CONV)},
    arrangements=convolutions("conv.conv"),
)
