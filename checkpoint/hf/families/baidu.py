"""Baidu: ERNIE 4.5, dense and a mixture."""
from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.names import (
    EXPERTS,
    LLAMA_TENSORS,
    MLP,
    OUTPUT,
    QKV,
    SHARED_EXPERTS,
    in_layer,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    KV_HEADS,
    LAYERS_AND_WIDTH,
    NO_BIAS,
    NO_QK_NORM,
    REST_OF_SIZES,
    ROPE_DEFAULTS,
    SIZES,
    without_key,
)
from checkpoint.hf.rules import (
    ALL_BIASES,
    ERNIE_LAYERS,
    NO_HEAD_DIM,
    NO_PADDING,
    NO_WINDOW,
    ROPE,
    Field,
    Fixed,
    Idle,
    Only,
)

ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    rules=(
        *SIZES,
        ALL_BIASES,
        NO_QK_NORM,
        NO_WINDOW,
        *DECODER,
        ROPE,
        Fixed("mixer.rope.pairs", True),
        NO_PADDING,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "max_position_embeddings": 131072,
    },
    tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
)


ERNIE_ROUTER_BIAS = in_layer(
    "model.layers", {"mlp.router.bias": "mlp.moe_statics.e_score_correction_bias"}
)

ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    rules=(
        *LAYERS_AND_WIDTH,
        KV_HEADS,
        NO_HEAD_DIM,
        *REST_OF_SIZES,
        Field("experts", "moe_num_experts"),
        Field("top_k", "moe_k"),
        Field("moe_ffn", "moe_intermediate_size"),
        Field("shared_experts", "moe_num_shared_experts"),
        ERNIE_LAYERS,
        Field("moe_every", "moe_layer_interval", minimum=1),
        Fixed("router", "softmax"),
        Fixed("router_bias", True),
        Fixed("router_renorm", True),
        Idle(("moe_norm_min", "num_experts", "num_experts_per_tok")),
        Only("use_bias", (False,)),
        *NO_BIAS,
        NO_QK_NORM,
        NO_WINDOW,
        *DECODER,
        ROPE,
        Fixed("mixer.rope.pairs", True),
        NO_PADDING,
    ),
    defaults={
        **without_key(ROPE_DEFAULTS, "head_dim"),
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "max_position_embeddings": 131072,
    },
    tensors=LLAMA_TENSORS | with_leaf("weight", EXPERTS | SHARED_EXPERTS) | ERNIE_ROUTER_BIAS,
    arrangements=dict.fromkeys(ERNIE_ROUTER_BIAS.values(), lambda model: Arrangement(leading=1)),
)
