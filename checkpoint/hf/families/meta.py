"""Meta: Llama 2 to 4, and CWM."""
from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.names import LLAMA_TENSORS, MLP, NORMS, OUTER, OUTPUT, QKV, in_layer, with_leaf
from checkpoint.hf.families.rules import (
    DECODER,
    EXPERTS_PER_TOKEN,
    NO_BIAS,
    NO_MLP_BIAS,
    NO_QK_NORM,
    ROPE_DEFAULTS,
    SIZES,
    without,
)
from checkpoint.hf.layer_types import LLAMA4_LAYER_DEFAULTS, LLAMA4_LAYERS
from checkpoint.hf.rules import (
    ATTENTION_BIAS,
    CWM_ROPE,
    CWM_WINDOWS,
    HEADS_DIVIDE_HIDDEN,
    INIT_STD_UP_TO_1,
    MOE_LAYERS,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    NO_WINDOW,
    ROPE,
    Field,
    Fixed,
    Idle,
    Only,
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rules=(
        *SIZES,
        HEADS_DIVIDE_HIDDEN,
        INIT_STD_UP_TO_1,
        ATTENTION_BIAS,
        NO_QK_NORM,
        NO_WINDOW,
        *DECODER,
        ROPE,
        NO_ATTENTION_DROPOUT,
        Field("mlp.bias", "mlp_bias"),
    ),
    defaults={
        **ROPE_DEFAULTS,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 2048,
    },
    tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
)


LLAMA4_STACKS = {
    f"layers.{{layer}}.mlp.experts.{{expert}}.{ours}.weight":
        f"model.layers.{{layer}}.feed_forward.experts.{theirs}"
    for ours, theirs in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
}
LLAMA4_MLP = in_layer("model.layers", {
    "mlp.gate": "feed_forward.gate_proj",
    "mlp.up": "feed_forward.up_proj",
    "mlp.down": "feed_forward.down_proj",
    "mlp.router": "feed_forward.router",
    "mlp.shared.gate": "feed_forward.shared_expert.gate_proj",
    "mlp.shared.up": "feed_forward.shared_expert.up_proj",
    "mlp.shared.down": "feed_forward.shared_expert.down_proj",
})

LLAMA4_TEXT = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    rules=(
        *without(SIZES, "mlp.width"),
        Field("mlp.width", "intermediate_size_mlp"),
        Field("moe_ffn", "intermediate_size"),
        Field("experts", "num_local_experts"),
        EXPERTS_PER_TOKEN,
        MOE_LAYERS,
        Fixed("shared_experts", 1),
        Fixed("router", "sigmoid"),
        Fixed("router_renorm", False),
        Fixed("router_weighs", "input"),
        ATTENTION_BIAS,
        NO_MLP_BIAS,
        *DECODER,
        LLAMA4_LAYERS,
        NO_ATTENTION_DROPOUT,
        NO_PADDING,
        Idle(("no_rope_layer_interval", "for_llm_compressor", "cache_implementation")),
    ),
    defaults={
        **ROPE_DEFAULTS,
        **LLAMA4_LAYER_DEFAULTS,
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "moe_layers": None,
        "attention_bias": False,
    },
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | LLAMA4_MLP)
    | with_leaf("bias", QKV | OUTPUT)
    | LLAMA4_STACKS,
    arrangements=dict.fromkeys(
        LLAMA4_STACKS.values(), lambda model: Arrangement(transpose=True, leading=model.mlp.experts)
    ),
)


CWM = Family(
    model_type="cwm",  # exported as ministral, or as llama if no layer has a window
    architecture="CwmForCausalLM",
    rules=(
        *SIZES,
        *NO_BIAS,
        NO_QK_NORM,
        *DECODER,
        Only("mlp_bias", (False,), written=False),
        CWM_ROPE,
        NO_ATTENTION_DROPOUT,
        CWM_WINDOWS,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": 8192,
        "max_position_embeddings": 131072,
    },
    tensors=LLAMA_TENSORS,
)
