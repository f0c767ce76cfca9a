"""Arcee AI: Arcee and Trinity (AFMoE)."""
from checkpoint.hf.families.family import Family
from checkpoint.hf.families.names import (
    EXPERT_BIAS,
    EXPERTS,
    MLP,
    NORMS,
    OUTER,
    OUTPUT,
    QK_NORM,
    QKV,
    SHARED_EXPERTS,
    UP_AND_DOWN,
    in_layer,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    EXPERTS_PER_TOKEN,
    NO_ATTENTION_BIAS,
    NO_BIAS,
    NO_QK_NORM,
    ROPE_DEFAULTS,
    ROTARY,
    SIZES,
)
from checkpoint.hf.layer_types import AFMOE_LAYERS
from checkpoint.hf.rules import (
    ATTENTION_BIAS,
    HEADS_DIVIDE_HIDDEN,
    MUP_ENABLED,
    NO_ATTENTION_DROPOUT,
    NO_WINDOW,
    ROPE,
    Field,
    Fixed,
    Idle,
    Only,
)

ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    rules=(
        *SIZES,
        HEADS_DIVIDE_HIDDEN,
        ATTENTION_BIAS,
        Field("mlp.bias", "mlp_bias"),
        NO_QK_NORM,
        NO_WINDOW,
        Fixed("norm.kind", "rmsnorm"),
        Fixed("mlp.activation", "relu2"),
        Only("hidden_act", ("relu2",)),
        *ROTARY,
        ROPE,
        NO_ATTENTION_DROPOUT,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 4096,
    },
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | UP_AND_DOWN)
    | with_leaf("bias", QKV | OUTPUT | UP_AND_DOWN),
)


AFMOE_NORMS = in_layer("model.layers", {
    "attn_norm": "input_layernorm",
    "attn_norm_after": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_norm_after": "post_mlp_layernorm",
    "attn.gate": "self_attn.gate_proj",
})
AFMOE_EXPERTS = EXPERTS | in_layer("model.layers", {"mlp.router": "mlp.router.gate"})

AFMOE = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    rules=(
        *SIZES,
        Field("experts", "num_experts"),
        EXPERTS_PER_TOKEN,
        Field("moe_ffn", "moe_intermediate_size"),
        Field("shared_experts", "num_shared_experts"),
        Field("first_dense", "num_dense_layers"),
        Field("router_scale", "route_scale"),
        Fixed("router", "sigmoid"),
        Fixed("router_bias", True),
        Fixed("router_renorm", True),
        *NO_BIAS,
        NO_ATTENTION_BIAS,
        Fixed("mixer.qk_norm", "head"),
        Fixed("mixer.gate.kind", "channel"),
        Fixed("mixer.gate.by", "sigmoid"),
        Fixed("norm.place", "around"),
        MUP_ENABLED,
        *DECODER,
        AFMOE_LAYERS,
        NO_ATTENTION_DROPOUT,
        Only("score_func", ("sigmoid",), written=False),
        Only("route_norm", (True,), written=False),
        Only("n_group", (1,), written=False),
        Only("topk_group", (1,), written=False),
        Idle(("num_expert_groups", "num_limited_groups", "load_balance_coeff", "use_grouped_mm")),
    ),
    defaults={
        **ROPE_DEFAULTS,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 1.0,
        "sliding_window": 1024,
        "mup_enabled": False,
        "max_position_embeddings": 16384,
    },
    tensors=with_leaf(
        "weight", OUTER | AFMOE_NORMS | QKV | OUTPUT | QK_NORM | MLP | AFMOE_EXPERTS | SHARED_EXPERTS
    )
    | EXPERT_BIAS,
)
