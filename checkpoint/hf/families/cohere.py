"""Cohere: Command R and Command A."""
from checkpoint.hf.families.family import Family
from checkpoint.hf.families.names import MLP, ONE_NORM, OUTER, OUTPUT, QKV, with_leaf
from checkpoint.hf.families.rules import (
    KV_HEADS,
    LAYERS_AND_WIDTH,
    NO_MLP_BIAS,
    NO_QK_NORM,
    REST_OF_SIZES,
    ROPE_DEFAULTS,
    ROTARY,
    without,
    without_key,
)
from checkpoint.hf.layer_types import COHERE2_LAYERS
from checkpoint.hf.rules import (
    ATTENTION_BIAS,
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

COHERE_RULES = (
    *LAYERS_AND_WIDTH,
    KV_HEADS,
    NO_HEAD_DIM,
    *without(REST_OF_SIZES, "norm.eps"),
    Field("norm.eps", "layer_norm_eps", minimum=0),
    Field("logit_scale", "logit_scale"),
    ATTENTION_BIAS,
    NO_MLP_BIAS,
    NO_QK_NORM,
    Fixed("norm.kind", "layernorm"),
    Fixed("norm.bias", False),
    Fixed("residual", "parallel"),
    Fixed("mlp.activation", "swiglu"),
    Only("hidden_act", ("silu", "swish")),
    *ROTARY,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    Idle(("rms_norm_eps",)),
)
COHERE_DEFAULTS = {
    **without_key(ROPE_DEFAULTS, "rms_norm_eps"),
    "rope_theta": 500000.0,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
COHERE_TENSORS = (
    with_leaf("weight", OUTER | ONE_NORM | QKV | OUTPUT | MLP)
    | with_leaf("bias", QKV | OUTPUT)
)

COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    rules=(*COHERE_RULES, NO_WINDOW, Only("use_qk_norm", (False,)), ROPE, Fixed("mixer.rope.pairs", True)),
    defaults=COHERE_DEFAULTS,
    tensors=COHERE_TENSORS,
)


COHERE2_SPELLINGS = (  # redundant keys of published folders
    Only("use_qk_norm", (False,), written=False),
    Only("use_gated_activation", (True,), written=False),
    Only("use_parallel_block", (True,), written=False),
    Only("rotary_pct", (1.0,), written=False),
    Only("position_embedding_type", ("rope_gptj",), written=False),
    Only("order_of_interleaved_layers", ("local_attn_first",), written=False),
    Idle(("head_dim", "cache_implementation", "use_embedding_sharing", "use_parallel_embedding")),
)

COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    rules=(*COHERE_RULES, *COHERE2_SPELLINGS, COHERE2_LAYERS),
    defaults={**COHERE_DEFAULTS, "rope_theta": 10000.0, "sliding_window": 4096},
    tensors=COHERE_TENSORS,
)
