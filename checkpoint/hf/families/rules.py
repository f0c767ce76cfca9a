"""Rules and defaults shared by several families; their classes are in checkpoint/hf/rules.py."""
from checkpoint.hf.rules import HEAD_DIM, Field, Fixed, Idle, Only, Rule


def without(rules: tuple[Rule, ...], name: str) -> tuple[Rule, ...]:
    """Return the rules except those of one field."""
    return tuple(rule for rule in rules if name not in rule.fields)


def without_rope_share(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules except the one that all channels of a head are rotated."""
    return tuple(rule for rule in rules if getattr(rule, "key", "") != "partial_rotary_factor")


def without_key(defaults: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in defaults.items() if name != key}


LAYERS_AND_WIDTH = (
    Fixed("mixer.kind", "attention"),
    Field("layers", "num_hidden_layers"),
    Field("hidden", "hidden_size"),
    Field("mixer.heads", "num_attention_heads", minimum=1),
)
REST_OF_SIZES = (
    Field("mlp.width", "intermediate_size"),
    Field("vocab", "vocab_size"),
    Field("context", "max_position_embeddings"),
    Field("norm.eps", "rms_norm_eps", minimum=0),
    Field("init_std", "initializer_range"),
    Field("tied", "tie_word_embeddings"),
)
KV_HEADS = Field("mixer.kv_heads", "num_key_value_heads", nullable=True)
SIZES = (*LAYERS_AND_WIDTH, KV_HEADS, HEAD_DIM, *REST_OF_SIZES)

# shared by decoders with rotary positions
ROTARY = (
    Fixed("positions", None),
    Only("partial_rotary_factor", (1.0,), written=False),
    Only("quantization_config", (None,), written=False),
)
DECODER = (
    Fixed("norm.kind", "rmsnorm"),
    Fixed("mlp.activation", "swiglu"),
    Only("hidden_act", ("silu", "swish")),
    *ROTARY,
)

NO_MLP_BIAS = Fixed("mlp.bias", False)
NO_BIAS = (Fixed("mixer.bias", None), NO_MLP_BIAS)
NO_QK_NORM = Fixed("mixer.qk_norm", None)
NO_ATTENTION_BIAS = Only("attention_bias", (False,))

EXPERTS_PER_TOKEN = Field("top_k", "num_experts_per_tok")
ROUTER_GROUPS = (Field("router_groups", "n_group"), Field("router_group_top_k", "topk_group"))
SIGMOID_EXPERTS = (
    Field("experts", "n_routed_experts"),
    EXPERTS_PER_TOKEN,
    Field("moe_ffn", "moe_intermediate_size"),
    Field("shared_experts", "n_shared_experts"),
    Field("router_renorm", "norm_topk_prob"),
    *ROUTER_GROUPS,
    Field("router_scale", "routed_scaling_factor"),
    Fixed("router", "sigmoid"),
    Fixed("router_bias", True),
)

DEEPSEEK_SIZES = (
    Fixed("mixer.kind", "latent"),
    *without(LAYERS_AND_WIDTH, "mixer.kind"),
    *REST_OF_SIZES,
    Field("mixer.kv_rank", "kv_lora_rank"),
    Field("mixer.q_rank", "q_lora_rank", nullable=True),
    Field("mixer.nope_dim", "qk_nope_head_dim"),
    Field("mixer.rope_dim", "qk_rope_head_dim"),
    Field("mixer.v_dim", "v_head_dim"),
    Idle(("head_dim", "qk_head_dim")),  # transformers writes values that follow from the others
)
DEEPSEEK_EXPERTS = (
    Field("experts", "n_routed_experts"),
    EXPERTS_PER_TOKEN,
    Field("moe_ffn", "moe_intermediate_size"),
    Field("shared_experts", "n_shared_experts"),
    Field("first_dense", "first_k_dense_replace"),
    Field("router_scale", "routed_scaling_factor"),
)
NO_EXPERTS = Idle((  # in models without experts; otherwise other rules read them
    "n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor",
    "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    "moe_layer_freq",
))

ROPE_DEFAULTS: dict[str, object] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
DEEPSEEK_DEFAULTS: dict[str, object] = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": None,
}
