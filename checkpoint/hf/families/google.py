"""Google: Gemma 1 to 3."""
from checkpoint.hf.families.family import Family
from checkpoint.hf.families.names import (
    LLAMA_TENSORS,
    MLP,
    NORMS_AROUND,
    OUTER,
    OUTPUT,
    QK_NORM,
    QKV,
    with_leaf,
)
from checkpoint.hf.families.rules import NO_MLP_BIAS, NO_QK_NORM, ROPE_DEFAULTS, ROTARY, SIZES
from checkpoint.hf.layer_types import GEMMA2_LAYERS, GEMMA3_LAYERS
from checkpoint.hf.rules import (
    ATTENTION_BIAS,
    HEADS_DIVIDE_HIDDEN,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    NO_WINDOW,
    QUERY_SCALAR,
    ROOT_OF_WIDTH,
    ROPE,
    Field,
    Fixed,
    Idle,
    Only,
)

# Gemma: norms of w - 1, GeGLU, an embedding scaled by the root of its width.
GELU_TANH = ("gelu_pytorch_tanh", "gelu")
GEMMA_RULES = (
    *SIZES,
    ROOT_OF_WIDTH,
    ATTENTION_BIAS,
    NO_MLP_BIAS,
    Fixed("norm.kind", "rmsnorm"),
    Fixed("mlp.activation", "geglu"),
    *ROTARY,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    Only("use_bidirectional_attention", (None, False), written=False),
    Idle(("hidden_act",)),  # published folders have both names; hidden_activation counts
)
GEMMA_DEFAULTS = {
    **ROPE_DEFAULTS,
    "head_dim": 256,
    "attention_bias": False,
    "tie_word_embeddings": True,
}

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    rules=(
        *GEMMA_RULES,
        NO_QK_NORM,
        NO_WINDOW,
        Only("hidden_act", GELU_TANH),
        Only("hidden_activation", (None, *GELU_TANH), written=False),
        ROPE,
    ),
    defaults={**GEMMA_DEFAULTS, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    tensors=LLAMA_TENSORS,
    norms_below_one=True,
)


GEMMA_AROUND = (
    *GEMMA_RULES,
    HEADS_DIVIDE_HIDDEN,
    Fixed("norm.place", "around"),
    Only("hidden_activation", GELU_TANH[:1]),
    QUERY_SCALAR,
    Field("mixer.softcap", "attn_logit_softcapping", nullable=True),
    Field("logit_cap", "final_logit_softcapping", nullable=True),
)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    rules=(*GEMMA_AROUND, NO_QK_NORM, GEMMA2_LAYERS),
    defaults={
        **GEMMA_DEFAULTS,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "max_position_embeddings": 8192,
    },
    tensors=with_leaf("weight", OUTER | NORMS_AROUND | QKV | OUTPUT | MLP)
    | with_leaf("bias", QKV | OUTPUT),
    norms_below_one=True,
)


GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    rules=(
        *GEMMA_AROUND,
        Fixed("mixer.qk_norm", "head"),
        Idle(("_sliding_window_pattern",)),
        GEMMA3_LAYERS,
    ),
    defaults={
        **GEMMA_DEFAULTS,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "max_position_embeddings": 131072,
    },
    tensors=with_leaf("weight", OUTER | NORMS_AROUND | QKV | OUTPUT | QK_NORM | MLP)
    | with_leaf("bias", QKV | OUTPUT),
    norms_below_one=True,
)
