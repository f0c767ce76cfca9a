"""Qwen 2 to 3.5, dense and mixtures."""
from checkpoint.hf.families.family import Arrangement, ArrangementOf, Family
from checkpoint.hf.families.names import (
    DELTA_RATES,
    EXPERTS,
    LLAMA_TENSORS,
    MLP,
    NORMS,
    ONE_SHARED_EXPERT,
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
    NO_ATTENTION_BIAS,
    NO_BIAS,
    NO_MLP_BIAS,
    NO_QK_NORM,
    ROPE_DEFAULTS,
    SIZES,
    without,
    without_rope_share,
)
from checkpoint.hf.rules import (
    NO_ATTENTION_DROPOUT,
    NO_WINDOW,
    QWEN_DENSE_LAYERS,
    QWEN_WINDOW,
    ROPE,
    SHARED_WIDTH,
    UNUSED_WIDTH,
    Field,
    Fixed,
    Idle,
    Only,
    bias_of_qkv,
)
from checkpoint.hf.state_layers import QWEN_LAYERS, SHARE_OF_ROPE, TEXT_ROPE

QWEN_WINDOW_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    rules=(
        *SIZES,
        Fixed("mixer.bias", "qkv"),
        NO_MLP_BIAS,
        NO_QK_NORM,
        *DECODER,
        ROPE,
        NO_ATTENTION_DROPOUT,
        QWEN_WINDOW,
    ),
    defaults={
        **ROPE_DEFAULTS,
        **QWEN_WINDOW_DEFAULTS,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    tensors=LLAMA_TENSORS | with_leaf("bias", QKV),
    # For a qwen2 model, transformers 5 silently replaces the pre-tokenizer of any tokenizer.json by Qwen's,
    # unless tokenizer_config.json names its own code.
    tokenizer_keys={"auto_map": {"AutoTokenizer": [None, "tokenizer.PreTrainedTokenizerFast"]}},
)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    rules=(
        *SIZES,
        *NO_BIAS,
        Fixed("mixer.qk_norm", "head"),
        *DECODER,
        NO_ATTENTION_BIAS,
        ROPE,
        NO_ATTENTION_DROPOUT,
        QWEN_WINDOW,
    ),
    defaults={
        **ROPE_DEFAULTS,
        **QWEN_WINDOW_DEFAULTS,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    tensors=QWEN3_TENSORS,
)


NO_QWEN_WINDOW = (
    NO_WINDOW,
    Only("use_sliding_window", (False,)),
    Idle(("sliding_window", "max_window_layers")),
)
QWEN_EXPERTS = (
    Field("experts", "num_experts"),
    EXPERTS_PER_TOKEN,
    Field("moe_ffn", "moe_intermediate_size"),
    Field("router_renorm", "norm_topk_prob"),
    Field("moe_every", "decoder_sparse_step"),
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    rules=(
        *SIZES,
        *QWEN_EXPERTS,
        bias_of_qkv("qkv_bias"),
        NO_MLP_BIAS,
        NO_QK_NORM,
        Fixed("shared_gate", True),
        *DECODER,
        *NO_QWEN_WINDOW,
        ROPE,
        NO_ATTENTION_DROPOUT,
        QWEN_DENSE_LAYERS,
        SHARED_WIDTH,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "norm_topk_prob": False,
        "max_position_embeddings": 32768,
    },
    aliases={"num_local_experts": "num_experts"},
    tensors=LLAMA_TENSORS | with_leaf("weight", EXPERTS | ONE_SHARED_EXPERT) | with_leaf("bias", QKV),
)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=(
        *SIZES,
        *QWEN_EXPERTS,
        *NO_BIAS,
        Fixed("mixer.qk_norm", "head"),
        *DECODER,
        NO_ATTENTION_BIAS,
        *NO_QWEN_WINDOW,
        ROPE,
        NO_ATTENTION_DROPOUT,
        QWEN_DENSE_LAYERS,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "max_position_embeddings": 32768,
    },
    aliases={"num_local_experts": "num_experts"},
    tensors=QWEN3_TENSORS | with_leaf("weight", EXPERTS),
)


QWEN_STATE = (
    *SIZES,
    *NO_BIAS,
    NO_ATTENTION_BIAS,
    Fixed("mixer.qk_norm", "head"),
    Fixed("mixer.gate.kind", "channel"),
    Fixed("mixer.gate.by", "sigmoid"),
    Fixed("mixer.window", None),
    QWEN_LAYERS,
    *without_rope_share(DECODER),
    NO_ATTENTION_DROPOUT,
    Only("use_sliding_window", (False,), written=False),
    Only("attn_output_gate", (True,), written=False),
    Idle(("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")),
)
QWEN_STATE_DEFAULTS = {
    **ROPE_DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
}
QWEN_HYBRID = OUTER | NORMS | QKV | OUTPUT | QK_NORM | MLP | in_layer(
    "model.layers", {"attn.gate": "self_attn.q_proj"}  # after the queries of each head
)
QWEN_LINEAR = in_layer("model.layers", {
    **dict.fromkeys(("attn.q_conv", "attn.k_conv", "attn.v_conv"), "linear_attn.conv1d"),
    "attn.norm": "linear_attn.norm",
    "attn.o": "linear_attn.out_proj",
})
QWEN_ARRANGEMENTS: dict[str, ArrangementOf] = {  # rows of queries and gates alternate by heads
    "model.layers.{layer}.self_attn.q_proj.weight": lambda model: Arrangement(groups=model.mixer.heads),
    **convolutions("linear_attn.conv1d"),
}
NO_DENSE_LAYERS = Only("mlp_only_layers", ([], None), written=False)
QWEN_SHARED_EXPERT = (
    Field("experts", "num_experts"),
    EXPERTS_PER_TOKEN,
    Field("moe_ffn", "moe_intermediate_size"),
    SHARED_WIDTH,
    Fixed("shared_gate", True),
    Fixed("router", "softmax"),
)
QWEN_SHARED_EXPERT_DEFAULTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN_NEXT_LINEAR = QWEN_LINEAR | in_layer("model.layers", {
    **dict.fromkeys(("attn.q", "attn.k", "attn.v", "attn.z"), "linear_attn.in_proj_qkvz"),
    **dict.fromkeys(("attn.b", "attn.a"), "linear_attn.in_proj_ba"),
})

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    rules=(
        *QWEN_STATE,
        SHARE_OF_ROPE,
        *QWEN_SHARED_EXPERT,
        Field("router_renorm", "norm_topk_prob"),
        Field("moe_every", "decoder_sparse_step", minimum=1),
        QWEN_DENSE_LAYERS,
    ),
    defaults={
        **QWEN_STATE_DEFAULTS,
        **QWEN_SHARED_EXPERT_DEFAULTS,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    tensors=with_leaf("weight", QWEN_HYBRID | EXPERTS | ONE_SHARED_EXPERT),
    of_mixers={"delta": with_leaf("weight", QWEN_NEXT_LINEAR) | DELTA_RATES},
    arrangements=QWEN_ARRANGEMENTS | dict.fromkeys(
        (f"model.layers.{{layer}}.linear_attn.{name}.weight" for name in ("in_proj_qkvz", "in_proj_ba")),
        lambda model: Arrangement(groups=model.mixer.heads_over_tp()["key_heads"]),
    ),
    norms_below_one=True,
    unread=("mtp.",),
)


QWEN35_LINEAR = QWEN_LINEAR | in_layer("model.layers", {
    **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "linear_attn.in_proj_qkv"),
    "attn.z": "linear_attn.in_proj_z",
    "attn.b": "linear_attn.in_proj_b",
    "attn.a": "linear_attn.in_proj_a",
})

QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    rules=(*QWEN_STATE, TEXT_ROPE, NO_DENSE_LAYERS),
    defaults={**QWEN_STATE_DEFAULTS, "num_key_value_heads": 4},
    tensors=with_leaf("weight", QWEN_HYBRID),
    of_mixers={"delta": with_leaf("weight", QWEN35_LINEAR) | DELTA_RATES},
    arrangements=QWEN_ARRANGEMENTS,
    norms_below_one=True,
    unread=("mtp.",),
)


QWEN3_5_MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",  # exported as qwen3_next
    architecture="Qwen3_5MoeForCausalLM",
    rules=(
        *without(QWEN_STATE, "mlp.width"),
        UNUSED_WIDTH,
        TEXT_ROPE,
        *QWEN_SHARED_EXPERT,
        Fixed("router_renorm", True),
        NO_DENSE_LAYERS,
    ),
    defaults={
        **QWEN_STATE_DEFAULTS,
        **QWEN_SHARED_EXPERT_DEFAULTS,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    tensors=with_leaf("weight", QWEN_HYBRID | EXPERTS | ONE_SHARED_EXPERT),
    of_mixers={"delta": with_leaf("weight", QWEN35_LINEAR) | DELTA_RATES},
    arrangements=QWEN_ARRANGEMENTS,
    norms_below_one=True,
    unread=("mtp.",),
)
