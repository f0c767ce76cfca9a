"""LG: EXAONE 4 and K-EXAONE."""
from checkpoint.hf.families.family import Family
from checkpoint.hf.families.names import (
    DOTS_TENSORS,
    MLP,
    NORMS_AFTER,
    OUTER,
    OUTPUT,
    QK_NORM,
    QKV,
    in_layer,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    EXPERTS_PER_TOKEN,
    NO_BIAS,
    ROPE_DEFAULTS,
    ROUTER_GROUPS,
    SIZES,
)
from checkpoint.hf.layer_types import EXAONE4_LAYERS
from checkpoint.hf.rules import NO_ATTENTION_DROPOUT, Field, Fixed, Idle, Only

EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    rules=(
        *SIZES,
        *NO_BIAS,
        Fixed("mixer.qk_norm", "head"),
        Fixed("norm.place", "after"),
        *DECODER,
        NO_ATTENTION_DROPOUT,
        EXAONE4_LAYERS,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "max_position_embeddings": 2048,
    },
    tensors=with_leaf("weight", OUTER | NORMS_AFTER | QKV | OUTPUT | QK_NORM | MLP),
)


EXAONE_ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "mlp.e_score_correction_bias"})

EXAONE_MOE = Family(
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    rules=(
        *SIZES,
        Field("experts", "num_experts"),
        EXPERTS_PER_TOKEN,
        Field("moe_ffn", "moe_intermediate_size"),
        Field("shared_experts", "num_shared_experts", minimum=1),
        Field("router_renorm", "norm_topk_prob"),
        *ROUTER_GROUPS,
        Field("router_scale", "routed_scaling_factor"),
        Field("first_dense", "first_k_dense_replace"),
        Fixed("router", "sigmoid"),
        Fixed("router_bias", True),
        *NO_BIAS,
        Fixed("mixer.qk_norm", "head"),
        *DECODER,
        NO_ATTENTION_DROPOUT,
        EXAONE4_LAYERS,
        Only("num_nextn_predict_layers", (0, None), written=False),
        Only("mtp_share_layers", (False,), written=False),
        Only("scoring_func", ("sigmoid",), written=False),
        Only("topk_method", ("noaux_tc",), written=False),
        Idle(("mlp_layer_types", "is_moe_layer")),
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 2048,
    },
    tensors=DOTS_TENSORS | EXAONE_ROUTER_BIAS,
)
