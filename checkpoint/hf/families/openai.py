"""OpenAI: GPT-2 and gpt-oss."""
from checkpoint.hf.families.family import Arrangement, ArrangementOf, Family
from checkpoint.hf.families.names import NORMS, OUTER, OUTPUT, QKV, in_layer, with_leaf
from checkpoint.hf.families.rules import EXPERTS_PER_TOKEN, NO_QK_NORM, ROPE_DEFAULTS, ROTARY, SIZES
from checkpoint.hf.layer_types import GPT_OSS_LAYERS
from checkpoint.hf.rules import (
    ATTENTION_BIAS,
    EXPERTS_OF_FFN,
    GPT2_DROPOUT,
    GPT2_HEADS,
    GPT2_WIDTH,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    Field,
    Fixed,
    Idle,
    Only,
)
from config import ModelConfig

SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")  # for GPT-2's other heads
GPT2_OUTER = {"embed": "transformer.wte", "positions": "transformer.wpe", "head": "lm_head"}
GPT2_MATRICES = in_layer("transformer.h", {
    "attn.q": "attn.c_attn",  # q, k and v are stacked
    "attn.k": "attn.c_attn",
    "attn.v": "attn.c_attn",
    "attn.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
})
GPT2_BIASED = {
    "norm": "transformer.ln_f",
    **in_layer("transformer.h", {"attn_norm": "ln_1", "mlp_norm": "ln_2"}),
    **GPT2_MATRICES,
}
GPT2_TENSORS = with_leaf("weight", GPT2_OUTER | GPT2_BIASED) | with_leaf("bias", GPT2_BIASED)

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    rules=(
        Fixed("mixer.kind", "attention"),
        Field("layers", "n_layer"),
        Field("hidden", "n_embd"),
        Field("mixer.heads", "n_head", minimum=1),
        GPT2_HEADS,
        GPT2_WIDTH,
        Field("vocab", "vocab_size"),
        Field("context", "n_positions"),
        Field("norm.eps", "layer_norm_epsilon", minimum=0),
        Field("init_std", "initializer_range"),
        Field("tied", "tie_word_embeddings"),
        Fixed("norm.kind", "layernorm"),
        Fixed("mlp.activation", "gelu"),
        Fixed("positions", "learned"),
        Fixed("mixer.rope", None),
        Fixed("mixer.bias", "all"),
        Fixed("mlp.bias", True),
        NO_QK_NORM,
        Fixed("mixer.window", None),
        Only("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
        Only("scale_attn_weights", (True,)),
        Only("scale_attn_by_inverse_layer_idx", (False,)),
        Only("add_cross_attention", (False,)),
        Only("quantization_config", (None,), written=False),
        GPT2_DROPOUT,
        Idle(("reorder_and_upcast_attn", "n_ctx")),
        Idle(tuple(f"summary_{word}" for word in SUMMARY)),
    ),
    defaults={
        "n_inner": None,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    tensors=GPT2_TENSORS,
    arrangements=dict.fromkeys(
        with_leaf("weight", GPT2_MATRICES).values(), lambda model: Arrangement(transpose=True)
    ),
    prefix="transformer.",
)


GPT_OSS_STACKS = {  # per expert, rows of gate and up alternate
    f"layers.{{layer}}.mlp.experts.{{expert}}.{ours}.{leaf}": f"model.layers.{{layer}}.mlp.experts.{theirs}"
    for leaf, end in (("weight", ""), ("bias", "_bias"))
    for ours, theirs in (
        ("gate", f"gate_up_proj{end}"), ("up", f"gate_up_proj{end}"), ("down", f"down_proj{end}"))
}
GPT_OSS_OTHERS = in_layer("model.layers", {
    "attn.sinks": "self_attn.sinks",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.logit_bias": "mlp.router.bias",
})


def gpt_oss_stack(name: str) -> ArrangementOf:
    """Return the arrangement of a tensor of all experts: matrices are transposed."""
    is_matrix = not name.endswith("_bias")

    def arrangement(model: ModelConfig) -> Arrangement:
        pairs = model.mlp.width if "gate_up" in name else 1
        return Arrangement(groups=pairs, transpose=is_matrix, leading=model.mlp.experts)

    return arrangement


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    rules=(
        *SIZES,
        Field("experts", "num_local_experts"),
        EXPERTS_PER_TOKEN,
        EXPERTS_OF_FFN,
        Fixed("router", "softmax"),
        Fixed("router_renorm", True),
        Fixed("router_logit_bias", True),
        Fixed("mlp.bias", True),
        Fixed("mlp.activation", "clamped_swiglu"),
        ATTENTION_BIAS,
        Fixed("mixer.sinks", True),
        NO_QK_NORM,
        Fixed("norm.kind", "rmsnorm"),
        *ROTARY,
        GPT_OSS_LAYERS,
        NO_ATTENTION_DROPOUT,
        NO_PADDING,
        Only("hidden_act", ("silu",)),
        Only("swiglu_alpha", (1.702,), written=False),
        Only("swiglu_limit", (7.0,), written=False),
        Idle(("initial_context_length", "experts_per_token")),  # redundant with other keys
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "max_position_embeddings": 131072,
    },
    aliases={"num_experts": "num_local_experts"},
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT)
    | with_leaf("bias", QKV | OUTPUT)
    | GPT_OSS_OTHERS
    | GPT_OSS_STACKS,
    arrangements={name: gpt_oss_stack(name) for name in GPT_OSS_STACKS.values()},
)
