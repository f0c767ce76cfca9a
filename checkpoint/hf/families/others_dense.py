"""Dense models of makers with a single family here.

StarCoder2 (BigCode), SmolLM3 (Hugging Face), Seed-OSS (ByteDance), InternLM3 (Shanghai AI Laboratory), Phi-3
and Phi-4 (Microsoft), Apertus (Swiss AI), nanochat.
"""
from checkpoint.hf.families.family import Arrangement, ArrangementOf, Family
from checkpoint.hf.families.names import (
    LLAMA_TENSORS,
    MLP,
    NORMS,
    OUTER,
    OUTPUT,
    QK_NORM,
    QKV,
    STACKED_MLP,
    UP_AND_DOWN,
    in_layer,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    KV_HEADS,
    LAYERS_AND_WIDTH,
    NO_ATTENTION_BIAS,
    NO_BIAS,
    NO_MLP_BIAS,
    NO_QK_NORM,
    REST_OF_SIZES,
    ROPE_DEFAULTS,
    ROTARY,
    SIZES,
    without,
    without_key,
    without_rope_share,
)
from checkpoint.hf.rules import (
    APERTUS_SCALED_ROPE,
    ATTENTION_BIAS,
    EQUAL_BIASES,
    HEAD_DIM,
    HEADS_DIVIDE_HIDDEN,
    NO_ATTENTION_DROPOUT,
    NO_HEAD_DIM,
    NO_PADDING,
    NO_ROPE_LAYERS,
    NO_WINDOW,
    PHI3_ROPE,
    PLAIN_WINDOW,
    RESIDUAL_DROPOUT,
    ROPE,
    SEED_BIASES,
    Field,
    Fixed,
    Idle,
    Only,
)
from config import kv_heads

STARCODER_MLP = in_layer("model.layers", {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})
STARCODER_TENSORS = (
    with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | STARCODER_MLP)
    | with_leaf("bias", {"norm": OUTER["norm"]} | NORMS | QKV | OUTPUT | STARCODER_MLP)
)

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    rules=(
        *LAYERS_AND_WIDTH,
        KV_HEADS,
        NO_HEAD_DIM,
        *without(REST_OF_SIZES, "norm.eps"),
        Field("norm.eps", "norm_epsilon", minimum=0),
        Fixed("norm.kind", "layernorm"),
        Fixed("mlp.activation", "gelu"),
        Fixed("mixer.bias", "all"),
        Fixed("mlp.bias", True),
        NO_QK_NORM,
        Only("use_bias", (True,)),  # otherwise the norms still have biases
        Only("hidden_act", ("gelu_pytorch_tanh", "gelu_new")),
        *ROTARY,
        ROPE,
        RESIDUAL_DROPOUT,
        PLAIN_WINDOW,
        # in older folders
        Only("norm_type", ("layer_norm",), written=False),
        Only("mlp_type", ("default",), written=False),
        Only("scale_attn_weights", (True,), written=False),
        Idle((
            "activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
        )),
    ),
    defaults={
        **without_key(ROPE_DEFAULTS, "rms_norm_eps"),
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "initializer_range": 0.018042,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "max_position_embeddings": 4096,
    },
    tensors=STARCODER_TENSORS,
)


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    rules=(
        *LAYERS_AND_WIDTH,
        KV_HEADS,
        HEAD_DIM,
        *REST_OF_SIZES,
        ATTENTION_BIAS,
        Field("mlp.bias", "mlp_bias"),
        NO_QK_NORM,
        NO_WINDOW,
        Only("use_sliding_window", (False,)),
        Idle(("sliding_window",)),
        NO_ROPE_LAYERS,
        *DECODER,
        ROPE,
        NO_ATTENTION_DROPOUT,
        NO_PADDING,
        Idle(("no_rope_layer_interval",)),
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "max_position_embeddings": 32768,
    },
    tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
)


SEED_OSS = Family(
    # Exported as llama or qwen2, except what llama refuses, such as heads that do not divide hidden.
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    rules=(
        *SIZES,
        SEED_BIASES,
        Field("mlp.bias", "mlp_bias"),
        NO_QK_NORM,
        NO_WINDOW,
        *DECODER,
        ROPE,
        RESIDUAL_DROPOUT,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 524288,
    },
    tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
)


INTERNLM3 = Family(
    model_type="internlm3",  # transformers runs it as llama; exported as llama
    architecture="InternLM3ForCausalLM",
    rules=(
        *SIZES,
        HEADS_DIVIDE_HIDDEN,
        EQUAL_BIASES,
        NO_QK_NORM,
        NO_WINDOW,
        *DECODER,
        ROPE,
        NO_ATTENTION_DROPOUT,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 32768,
    },
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
)


# stacked tensors: q, k and v, or gate and up
PHI_QKV = in_layer("model.layers", dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attn.qkv_proj"))

PHI3 = Family(
    # Without longrope and partial rotation it is exported as llama or, with a window, as mistral.
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    rules=(
        *LAYERS_AND_WIDTH,
        KV_HEADS,
        NO_HEAD_DIM,
        *REST_OF_SIZES,
        *NO_BIAS,
        NO_QK_NORM,
        *without_rope_share(DECODER),
        NO_ATTENTION_BIAS,
        PHI3_ROPE,
        NO_ATTENTION_DROPOUT,
        NO_PADDING,
        PLAIN_WINDOW,
        Only("mlp_bias", (False,), written=False),
        Only("lm_head_bias", (False,), written=False),
        Only("full_attn_mod", (1,), written=False),
        Idle(("interpolate_factor",)),
    ),
    defaults={
        **ROPE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    tensors=with_leaf("weight", OUTER | NORMS | PHI_QKV | OUTPUT | STACKED_MLP),
)


APERTUS_NORMS = in_layer(
    "model.layers", {"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
)
XIELU = in_layer("model.layers", {"mlp.alpha_p": "mlp.act_fn.alpha_p", "mlp.alpha_n": "mlp.act_fn.alpha_n"})

APERTUS = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    rules=(
        *LAYERS_AND_WIDTH,
        KV_HEADS,
        NO_HEAD_DIM,
        *REST_OF_SIZES,
        ATTENTION_BIAS,
        NO_MLP_BIAS,
        Fixed("mixer.qk_norm", "head"),
        NO_WINDOW,
        Fixed("norm.kind", "rmsnorm"),
        Fixed("mlp.activation", "xielu"),
        Only("hidden_act", ("xielu",)),
        *ROTARY,
        APERTUS_SCALED_ROPE,
        NO_ATTENTION_DROPOUT,
        NO_PADDING,
        Only("mlp_bias", (False,), written=False),
        Only("qk_norm", (True,), written=False),
        Idle(("post_norm",)),  # transformers does not read it
    ),
    defaults={
        **ROPE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12e6,
        "attention_bias": False,
        "max_position_embeddings": 65536,
    },
    tensors=with_leaf("weight", OUTER | APERTUS_NORMS | QKV | OUTPUT | QK_NORM | UP_AND_DOWN)
    | with_leaf("bias", QKV | OUTPUT)
    | XIELU,
    constants={"model.layers.{layer}.mlp.act_fn.beta": 0.5, "model.layers.{layer}.mlp.act_fn.eps": -1e-6},
)


NANOCHAT_MLP = in_layer("model.layers", {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"})
# Its angles have the opposite sign. Swapping the halves of q and k turns it into the usual rotation.
NANOCHAT_TURNED: dict[str, ArrangementOf] = {
    "q_proj": lambda model: Arrangement(groups=model.mixer.heads, turned=True),
    "k_proj": lambda model: Arrangement(groups=kv_heads(model), turned=True),
}

NANOCHAT = Family(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    rules=(
        *SIZES,
        ATTENTION_BIAS,
        NO_MLP_BIAS,
        Fixed("mixer.qk_norm", "unweighted"),
        NO_WINDOW,
        Fixed("norm.kind", "rmsnorm"),
        Fixed("norm.weight", False),
        Fixed("embed_norm", True),
        Fixed("mlp.activation", "relu2"),
        Only("hidden_act", ("relu2",)),
        *ROTARY,
        ROPE,
        Field("logit_cap", "final_logit_softcapping", nullable=True),
        NO_ATTENTION_DROPOUT,
        NO_PADDING,
    ),
    defaults={
        **ROPE_DEFAULTS,
        "attention_bias": False,
        "final_logit_softcapping": 15.0,
        "max_position_embeddings": 2048,
    },
    tensors=with_leaf(
        "weight", {"embed": OUTER["embed"], "head": OUTER["head"]} | QKV | OUTPUT | NANOCHAT_MLP
    ) | with_leaf("bias", QKV | OUTPUT),
    arrangements={
        f"model.layers.{{layer}}.self_attn.{name}.{leaf}": arrangement
        for name, arrangement in NANOCHAT_TURNED.items() for leaf in ("weight", "bias")
    },
)
