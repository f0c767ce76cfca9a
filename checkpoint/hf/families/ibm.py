"""IBM: Granite, dense, mixtures, with windows and with Mamba."""
from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.names import (
    LLAMA_TENSORS,
    MLP,
    NORMS,
    OUTER,
    OUTPUT,
    QKV,
    STACKED_EXPERTS,
    in_layer,
    mamba_names,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    EXPERTS_PER_TOKEN,
    KV_HEADS,
    LAYERS_AND_WIDTH,
    NO_MLP_BIAS,
    NO_QK_NORM,
    REST_OF_SIZES,
    ROPE_DEFAULTS,
)
from checkpoint.hf.layer_types import GRANITE_SWA_LAYERS
from checkpoint.hf.mamba_layers import GRANITE_LAYERS, GRANITE_MLP, GRANITE_POSITIONS
from checkpoint.hf.rules import (
    ATTENTION_BIAS,
    ATTENTION_MULTIPLIER,
    DIVIDED_LOGITS,
    EXPERTS_BESIDE,
    EXPERTS_OF_FFN,
    NO_ATTENTION_DROPOUT,
    NO_HEAD_DIM,
    NO_WINDOW,
    ROPE,
    Field,
    Fixed,
    Idle,
    Only,
)

GRANITE_RULES = (
    *LAYERS_AND_WIDTH,
    KV_HEADS,
    NO_HEAD_DIM,
    *REST_OF_SIZES,
    ATTENTION_BIAS,
    NO_QK_NORM,
    NO_WINDOW,
    *DECODER,
    ROPE,
    ATTENTION_MULTIPLIER,
    DIVIDED_LOGITS,
    Field("embed_scale", "embedding_multiplier"),
    Field("residual_scale", "residual_multiplier"),
    NO_ATTENTION_DROPOUT,
)
GRANITE_DEFAULTS = {
    **ROPE_DEFAULTS,
    "attention_bias": False,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "max_position_embeddings": 2048,
}

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    rules=(
        *GRANITE_RULES,
        Field("mlp.bias", "mlp_bias"),
    ),
    defaults={**GRANITE_DEFAULTS, "mlp_bias": False},
    tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
)


GRANITE_STACKS = in_layer("model.layers", {  # stacked per layer
    "mlp.experts.{expert}.gate": "block_sparse_moe.input_linear",
    "mlp.experts.{expert}.up": "block_sparse_moe.input_linear",
    "mlp.experts.{expert}.down": "block_sparse_moe.output_linear",
})
GRANITE_EXPERTS = GRANITE_STACKS | in_layer("model.layers", {"mlp.router": "block_sparse_moe.router.layer"})

GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    rules=(
        *GRANITE_RULES,
        Field("experts", "num_local_experts"),
        EXPERTS_PER_TOKEN,
        EXPERTS_OF_FFN,
        Fixed("router", "softmax"),
        Fixed("router_renorm", True),
        NO_MLP_BIAS,
    ),
    defaults={**GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | GRANITE_EXPERTS)
    | with_leaf("bias", QKV | OUTPUT),
    arrangements=dict.fromkeys(
        with_leaf("weight", GRANITE_STACKS).values(), lambda model: Arrangement(leading=model.mlp.experts)
    ),
)


GRANITE_SWA_RULES = (
    *(rule for rule in GRANITE_RULES if rule not in (NO_WINDOW, ROPE)),
    Fixed("mixer.sinks", True),
    GRANITE_SWA_LAYERS,
)
GRANITE_SINKS = in_layer("model.layers", {"attn.sinks": "self_attn.sinks"})

GRANITE_SWA = Family(
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    rules=(*GRANITE_SWA_RULES, Field("mlp.bias", "mlp_bias")),
    defaults={
        **GRANITE_DEFAULTS,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "mlp_bias": False,
        "max_position_embeddings": 8192,
    },
    tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP) | GRANITE_SINKS,
)


GRANITE_SWA_EXPERTS = {
    **in_layer("model.layers", {
        **dict.fromkeys(("mlp.shared.gate.weight", "mlp.shared.up.weight"), "shared_mlp.input_linear.weight"),
        "mlp.shared.down.weight": "shared_mlp.output_linear.weight",
        "mlp.router.weight": "block_sparse_moe.router.weight",
    }),
    **{ours: theirs.replace(".mlp.", ".block_sparse_moe.") for ours, theirs in STACKED_EXPERTS.items()},
}

GRANITEMOE_SWA = Family(
    model_type="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    rules=(
        *GRANITE_SWA_RULES,
        Field("experts", "num_local_experts"),
        EXPERTS_PER_TOKEN,
        EXPERTS_OF_FFN,
        EXPERTS_BESIDE,
        Fixed("router", "softmax"),
        Fixed("router_renorm", True),
        NO_MLP_BIAS,
    ),
    defaults={
        **GRANITE_DEFAULTS,
        "sliding_window": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
    },
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT) | with_leaf("bias", QKV | OUTPUT)
    | GRANITE_SINKS | GRANITE_SWA_EXPERTS,
    arrangements={
        name: lambda model: Arrangement(leading=model.mlp.experts)
        for name in GRANITE_SWA_EXPERTS.values() if ".experts." in name
    },
)


GRANITE_HYBRID_RULES = tuple(  # covered by other rules there
    rule for rule in GRANITE_RULES if not {"mixer.window", "mixer.rope.base", "mlp.width"} & {*rule.fields}
)
GRANITE_SHARED = in_layer("model.layers", {  # the MLP, in layers without experts
    **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.shared.gate", "mlp.shared.up"), "shared_mlp.input_linear"),
    **dict.fromkeys(("mlp.down", "mlp.shared.down"), "shared_mlp.output_linear"),
})

GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    rules=(
        *GRANITE_HYBRID_RULES,
        Fixed("mixer.window", None),
        GRANITE_POSITIONS,
        GRANITE_MLP,
        GRANITE_LAYERS,
        NO_MLP_BIAS,
        Only("mamba_conv_bias", (True,)),
        Only("mamba_proj_bias", (False,)),
        Only("normalization_function", ("rmsnorm",), written=False),
        Idle(("mamba_chunk_size", "init_method")),
    ),
    defaults={
        **GRANITE_DEFAULTS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    aliases={"layers_block_type": "layer_types"},
    tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | GRANITE_EXPERTS | GRANITE_SHARED)
    | with_leaf("bias", QKV | OUTPUT),
    of_mixers={"mamba": mamba_names("model.layers", "mamba", "input_layernorm")},
    arrangements={
        **dict.fromkeys(
            with_leaf("weight", GRANITE_STACKS).values(), lambda model: Arrangement(leading=model.mlp.experts)
        ),
        "model.layers.{layer}.mamba.conv1d.weight": lambda model: Arrangement(inner=True),
    },
)
