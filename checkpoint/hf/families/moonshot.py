"""Moonshot AI: Kimi K2 and Kimi Linear."""
from dataclasses import replace

from checkpoint.hf.families.deepseek import DEEPSEEK_V3
from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.names import (
    MIXTRAL_EXPERTS,
    MLA,
    MLP,
    NORMS,
    OUTER,
    OUTPUT,
    convolutions,
    in_layer,
    with_leaf,
)
from checkpoint.hf.families.rules import (
    DECODER,
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_SIZES,
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    without,
    without_key,
)
from checkpoint.hf.rules import MLA_HEADS, NO_ATTENTION_DROPOUT, NO_PADDING, Field, Fixed, Idle, Only
from checkpoint.hf.state_layers import KIMI_DENSE_LAYERS, KIMI_LAYERS

# The folder's code is not executed. Exported as deepseek_v3.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", code="deepseek_v3")


KIMI_NAMES = in_layer("model.layers", {
    **{f"attn.{name}": f"self_attn.{name}_proj" for name in (*"qkvbo", "f_a", "f_b", "g_a", "g_b")},
    **{f"attn.{name}_conv": f"self_attn.{name}_conv1d" for name in "qkv"},
    "attn.norm": "self_attn.o_norm",
})
KIMI_RATES = in_layer("model.layers", {
    "attn.A_log": "self_attn.A_log",
    "attn.dt_bias": "self_attn.dt_bias",
})
KIMI_EXPERTS = MIXTRAL_EXPERTS | in_layer("model.layers", {
    f"mlp.shared.{name}": f"block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")
})
KIMI_ROUTER_BIAS = in_layer(
    "model.layers", {"mlp.router.bias": "block_sparse_moe.gate.e_score_correction_bias"}
)
KIMI_SPELLINGS = {  # transformers saves a dense MLP under expert names
    f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")
}

KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    rules=(
        *without(without(DEEPSEEK_SIZES, "context"), "tied"),
        Field("context", "model_max_length"),
        Fixed("tied", False),
        Only("tie_word_embeddings", (False,)),  # transformers creates a separate head in any case
        MLA_HEADS,
        NO_ATTENTION_BIAS,
        NO_MLP_BIAS,
        Fixed("mixer.window", None),
        Fixed("mixer.rope", None),
        *DECODER,
        NO_ATTENTION_DROPOUT,
        NO_PADDING,
        KIMI_LAYERS,
        Field("experts", "num_experts"),
        Field("top_k", "num_experts_per_token"),
        Field("moe_ffn", "moe_intermediate_size"),
        Field("shared_experts", "num_shared_experts"),
        Field("router_renorm", "moe_renormalize"),
        Field("router_groups", "num_expert_group"),
        Field("router_group_top_k", "topk_group"),
        Field("router_scale", "routed_scaling_factor"),
        Fixed("router", "sigmoid"),
        Fixed("router_bias", True),
        KIMI_DENSE_LAYERS,
        # redundant keys of published folders
        Only("mla_use_nope", (True,), written=False),
        Only("moe_router_activation_func", ("sigmoid",), written=False),
        Only("moe_layer_freq", (1,), written=False),
        Only("topk_method", ("noaux_tc",), written=False),
        Only("num_nextn_predict_layers", (0, None), written=False),
        Idle(("use_grouped_topk", "rope_theta", "rope_scaling", "rope_parameters")),
    ),
    defaults={
        **without_key(without_key(DEEPSEEK_DEFAULTS, "rope_theta"), "q_lora_rank"),
        "q_lora_rank": None,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
        "moe_renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "model_max_length": 1048576,
    },
    aliases={
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
    tensors=with_leaf("weight", OUTER | NORMS | MLA | OUTPUT | MLP | KIMI_EXPERTS) | KIMI_ROUTER_BIAS,
    of_mixers={"kimi": with_leaf("weight", KIMI_NAMES) | KIMI_RATES},
    arrangements={
        **convolutions("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
        "model.layers.{layer}.self_attn.A_log": lambda model: Arrangement(
            leading=1, outer=True, inner=True
        ),
    },
    spellings={"kimi": KIMI_SPELLINGS, "latent": KIMI_SPELLINGS},
)
