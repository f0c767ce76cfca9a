"""Tensor names shared by several families: {our name: theirs}.

They lack the leaf (.weight or .bias) where with_leaf adds it; {layer} and {expert} stand for numbers.
"""
from checkpoint.hf.families.family import Arrangement, ArrangementOf


def with_leaf(leaf: str, names: dict[str, str]) -> dict[str, str]:
    return {f"{ours}.{leaf}": f"{theirs}.{leaf}" for ours, theirs in names.items()}


def in_layer(prefix: str, names: dict[str, str]) -> dict[str, str]:
    """Return the names of a layer. `prefix` precedes the layer's number in theirs."""
    return {f"layers.{{layer}}.{ours}": f"{prefix}.{{layer}}.{theirs}" for ours, theirs in names.items()}


def convolutions(*names: str) -> dict[str, ArrangementOf]:
    """Return the arrangement of weights [channels, 1, width] with these names in a layer."""
    full = [f"model.layers.{{layer}}.{name}.weight" for name in names]
    return dict.fromkeys(full, lambda model: Arrangement(inner=True))


OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
NORMS = in_layer("model.layers", {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
NORMS_AFTER = in_layer("model.layers", {
    "attn_norm_after": "post_attention_layernorm",
    "mlp_norm_after": "post_feedforward_layernorm",
})
NORMS_AROUND = NORMS_AFTER | in_layer("model.layers", {
    "attn_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
})
ONE_NORM = in_layer("model.layers", {"attn_norm": "input_layernorm"})  # of parallel attention and MLP

QKV = in_layer("model.layers", {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
})
OUTPUT = in_layer("model.layers", {"attn.o": "self_attn.o_proj"})
QK_NORM = in_layer("model.layers", {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"})

MLP = in_layer("model.layers", {
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
})
UP_AND_DOWN = in_layer("model.layers", {"mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"})
STACKED_MLP = in_layer("model.layers", {
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
    "mlp.down": "mlp.down_proj",
})

MLA = in_layer("model.layers", {
    "attn.q": "self_attn.q_proj",
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
})

ONE_ROUTER = in_layer("model.layers", {"mlp.router": "mlp.gate"})

EXPERTS = in_layer("model.layers", {
    "mlp.router": "mlp.gate",
    "mlp.experts.{expert}.gate": "mlp.experts.{expert}.gate_proj",
    "mlp.experts.{expert}.up": "mlp.experts.{expert}.up_proj",
    "mlp.experts.{expert}.down": "mlp.experts.{expert}.down_proj",
})
MIXTRAL_EXPERTS = in_layer("model.layers", {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.{expert}.gate": "block_sparse_moe.experts.{expert}.w1",
    "mlp.experts.{expert}.up": "block_sparse_moe.experts.{expert}.w3",
    "mlp.experts.{expert}.down": "block_sparse_moe.experts.{expert}.w2",
})
STACKED_EXPERTS = in_layer("model.layers", {  # stacked per layer
    "mlp.experts.{expert}.gate.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.{expert}.up.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.{expert}.down.weight": "mlp.experts.down_proj",
})

ONE_SHARED_EXPERT = in_layer("model.layers", {
    "mlp.shared_gate": "mlp.shared_expert_gate",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
})
SHARED_EXPERTS = in_layer("model.layers", {
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
})

ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "mlp.gate.e_score_correction_bias"})
EXPERT_BIAS = in_layer("model.layers", {"mlp.router.bias": "mlp.expert_bias"})

MTP = in_layer("model.layers", {
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "head_norm": "shared_head.norm",
})
DELTA_RATES = in_layer("model.layers", {
    "attn.A_log": "linear_attn.A_log",
    "attn.dt_bias": "linear_attn.dt_bias",
})


def mamba_names(prefix: str, module: str, norm: str) -> dict[str, str]:
    """Return their tensor names of a Mamba-2 layer, including the leaf. `module` is the mixer, `norm` the
    norm before it."""
    matrices = in_layer(prefix, {
        "attn_norm": norm,
        **dict.fromkeys((f"attn.{name}" for name in ("z", "x", "B", "C", "dt")), f"{module}.in_proj"),
        "attn.norm": f"{module}.norm",
        "attn.o": f"{module}.out_proj",
    })
    convolution = in_layer(prefix, dict.fromkeys(
        (f"attn.{name}_conv" for name in ("x", "B", "C")), f"{module}.conv1d"))
    rates = in_layer(prefix, {f"attn.{name}": f"{module}.{name}" for name in ("A_log", "dt_bias", "D")})
    return with_leaf("weight", matrices | convolution) | with_leaf("bias", convolution) | rates


LLAMA_TENSORS = with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | MLP)
QWEN3_TENSORS = LLAMA_TENSORS | with_leaf("weight", QK_NORM)
DOTS_TENSORS = QWEN3_TENSORS | with_leaf("weight", EXPERTS | SHARED_EXPERTS) | ROUTER_BIAS
DEEPSEEK_V2_TENSORS = with_leaf("weight", OUTER | NORMS | MLA | OUTPUT | MLP | EXPERTS | SHARED_EXPERTS)
