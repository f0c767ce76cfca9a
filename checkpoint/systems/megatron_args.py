"""Convert the args of a Megatron-LM checkpoint to our model, and its tensor names.

Args are those of the whole program, some 700, so those that do not affect logits are not listed. Each of the
others is either read, or restricted to the values here. Tensor names are those of the newest version; older
ones are translated (SPELLINGS).

Sources: megatron/training/arguments.py, megatron/core/transformer/transformer_config.py and mlp.py; for
models older than megatron/core, megatron/model/transformer.py and language_model.py of 2023.
"""
import re
from collections.abc import Collection
from dataclasses import replace

from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.names import in_layer, with_leaf
from checkpoint.hf.rules import FamilyError, Field, FieldGroup, Fixed, Only, number, plain_number
from config import ModelConfig, Tree, kv_heads

OFF = (False, None)


# ---- the model ---------------------------------------------------------------------------------------------

def is_on(keys: Tree, key: str, default: bool = False) -> bool:
    """Return whether a switch is on. Raises FamilyError for a value that is neither true nor false."""
    value = keys.get(key, default)
    if value is None:
        return default
    if type(value) is not bool:
        raise FamilyError(f"{key} = {value!r} is not true or false")
    return value


def has_bias(keys: Tree) -> bool:
    """Return whether linear layers have biases; disable_bias_linear is the switch of older versions."""
    return is_on(keys, "add_bias_linear", default=not is_on(keys, "disable_bias_linear"))


def read_heads(keys: Tree) -> Tree:
    """Read the heads. Query groups count only if their switch is on; otherwise each head has its own key
    and value."""
    heads, hidden = plain_number(keys, "num_attention_heads"), plain_number(keys, "hidden_size")
    groups = plain_number(keys, "num_query_groups") if is_on(keys, "group_query_attention") else heads
    if heads < 1 or groups < 1 or heads % groups:
        raise FamilyError(
            f"num_attention_heads = {heads} is not a multiple of num_query_groups = {groups}")
    size = number({"kv_channels": None, **keys}, "kv_channels", nullable=True)
    return {"mixer.heads": heads, "mixer.kv_heads": groups, "mixer.head_dim": size or hidden // heads}


def read_biases(keys: Tree) -> Tree:
    of_qkv = "qkv" if is_on(keys, "add_qkv_bias") else None
    return {"mixer.bias": "all" if has_bias(keys) else of_qkv, "mlp.bias": has_bias(keys)}


def read_norm(keys: Tree) -> Tree:
    kinds = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
    name = keys.get("normalization") or "LayerNorm"
    if not isinstance(name, str) or name not in kinds:
        raise FamilyError(f"normalization = {name!r} is not supported, only {' or '.join(kinds)}")
    names = ("norm_epsilon", "layernorm_epsilon")  # of one arg
    given = {**dict.fromkeys(names), **keys}
    epsilons = {number(given, key, nullable=True) for key in names} - {None}
    if len(epsilons) > 1:
        raise FamilyError(f"{' and '.join(names)} are the same arg, and differ: {sorted(epsilons)}")
    return {"norm.kind": kinds[name], "norm.eps": epsilons.pop() if epsilons else 1e-5}


def read_qk_norm(keys: Tree) -> Tree:
    """Read the norms of q and k, which are of the same kind as the others."""
    if not is_on(keys, "qk_layernorm"):
        return {"mixer.qk_norm": None}
    if keys.get("normalization") != "RMSNorm":
        raise FamilyError("qk_layernorm = True with LayerNorm is not supported, only with RMSNorm")
    return {"mixer.qk_norm": "head"}


def read_activation(keys: Tree) -> Tree:
    """Read the activation. GELU is the tanh form if it is fused with its bias, otherwise the erf form."""
    if is_on(keys, "swiglu"):
        return {"mlp.activation": "swiglu"}
    if is_on(keys, "squared_relu"):
        return {"mlp.activation": "relu2"}
    is_fused = is_on(keys, "bias_gelu_fusion", default=True) and has_bias(keys)
    return {"mlp.activation": "gelu" if is_fused else "gelu_erf"}


def read_positions(keys: Tree) -> Tree:
    """Read learned positions, or RoPE with one of two scalings."""
    kind = keys.get("position_embedding_type") or "learned_absolute"
    if is_on(keys, "use_rotary_position_embeddings"):
        kind = "rope"
    if kind == "none":
        return {"positions": None, "mixer.rope": None}
    if kind == "learned_absolute":
        if not is_on(keys, "add_position_embedding", default=True):
            raise FamilyError("add_position_embedding = False with learned_absolute is not supported")
        return {"positions": "learned", "mixer.rope": None}
    if kind != "rope":
        raise FamilyError(
            f"position_embedding_type = {kind!r} is not supported, only learned_absolute, rope and none"
        )
    rope: Tree = {
        "base": plain_number({"rotary_base": 10000, **keys}, "rotary_base"),
        "share": plain_number({"rotary_percent": 1.0, **keys}, "rotary_percent"),
        "pairs": is_on(keys, "rotary_interleaved"),
    }
    by = {"rotary_seq_len_interpolation_factor": None, "rope_scaling_factor": 8.0, **keys}
    interpolated = number(by, "rotary_seq_len_interpolation_factor", nullable=True)
    if is_on(keys, "use_rope_scaling"):
        if interpolated is not None:
            raise FamilyError("use_rope_scaling and rotary_seq_len_interpolation_factor together are not "
                              "supported")
        rope["scaling"] = {"kind": "llama3", "factor": plain_number(by, "rope_scaling_factor")}
    elif interpolated is not None:
        rope["scaling"] = {"kind": "linear", "factor": interpolated}
    return {"positions": None, "mixer.rope": rope}


# ---- its experts -------------------------------------------------------------------------------------------

def read_experts(keys: Tree) -> Tree:
    """Read the experts and their router. Chosen scores are normalized if the softmax follows the choice, or
    if a sigmoid router chooses several experts."""
    experts = number({"num_experts": None, **keys}, "num_experts", nullable=True)
    if experts is None:
        return {"experts": None}
    if has_bias(keys):
        raise FamilyError("num_experts with add_bias_linear = True is not supported")
    given = {
        "moe_router_topk": 2,
        "moe_router_topk_scaling_factor": None,
        "moe_ffn_hidden_size": None,
        "moe_shared_expert_intermediate_size": None,
        **keys,
    }
    top_k = plain_number(given, "moe_router_topk")
    width = number(given, "moe_ffn_hidden_size", nullable=True) or plain_number(keys, "ffn_hidden_size")
    shared = number(given, "moe_shared_expert_intermediate_size", nullable=True) or 0
    if width < 1 or shared % width:
        raise FamilyError(f"moe_shared_expert_intermediate_size = {shared} is not supported beside experts "
                          f"of {width}, only a multiple of that")
    is_sigmoid = score_function(keys) == "sigmoid"
    return {
        "experts": experts,
        "top_k": top_k,
        "moe_ffn": width,
        "shared_experts": shared // width,
        "shared_gate": is_on(keys, "moe_shared_expert_gate"),
        "first_dense": dense_layers(keys),
        "router": score_function(keys),
        "router_bias": is_on(keys, "moe_router_enable_expert_bias"),
        "router_renorm": top_k > 1 if is_sigmoid else not is_on(keys, "moe_router_pre_softmax"),
        "router_scale": number(given, "moe_router_topk_scaling_factor", nullable=True) or 1.0,
        **router_groups(keys, top_k, best_of_group=2 if is_sigmoid else 1),
    }


def score_function(keys: Tree) -> str:
    """Return softmax or sigmoid. Raises FamilyError for another way of choosing experts."""
    name = keys.get("moe_router_score_function") or "softmax"
    if name not in ("softmax", "sigmoid"):
        raise FamilyError(f"moe_router_score_function = {name!r} is not supported, only softmax and sigmoid")
    if name == "softmax" and is_on(keys, "moe_router_enable_expert_bias"):
        raise FamilyError("moe_router_enable_expert_bias = True is not supported with a softmax")
    balancing = keys.get("moe_router_load_balancing_type")
    kinds = balancing if isinstance(balancing, (list, tuple)) else [balancing]
    for kind in kinds:
        if kind in ("sinkhorn", "quantile_balancing"):
            raise FamilyError(f"moe_router_load_balancing_type = {kind!r} is not supported: it routes")
    return name


def router_groups(keys: Tree, top_k: int | float, best_of_group: int) -> Tree:
    """Read the router groups. A group's score comes from as many of its best experts as each chosen group
    contributes."""
    given = {"moe_router_num_groups": None, "moe_router_group_topk": None, **keys}
    groups, chosen = (number(given, key, nullable=True) for key in list(given)[:2])
    if not groups or not chosen:
        return {"router_groups": 1, "router_group_top_k": 1}
    if top_k // chosen != best_of_group:
        raise FamilyError(f"moe_router_group_topk = {chosen} with moe_router_topk = {top_k} is not "
                          f"supported, only where a group counts as its {best_of_group} best experts")
    return {"router_groups": groups, "router_group_top_k": chosen}


def dense_layers(keys: Tree) -> int:
    """Return the number of leading layers without experts; all others have experts."""
    layers = keys.get("moe_layer_freq")
    if layers in (None, 1):
        return 0
    is_list = isinstance(layers, (list, tuple)) and all(kind in (0, 1) for kind in layers)
    if is_list and len(layers) == keys.get("num_layers"):
        dense = layers.index(1) if 1 in layers else len(layers)
        if all(layers[dense:]):
            return dense
    raise FamilyError(f"moe_layer_freq = {layers!r} is not supported, only experts in all layers after the "
                      "first dense ones")


EXPERT_FIELDS = (
    "experts", "top_k", "moe_ffn", "shared_experts", "shared_gate", "first_dense", "router", "router_bias",
    "router_renorm", "router_scale", "router_groups", "router_group_top_k",
)
MEGATRON = Family(
    model_type="Megatron-LM",
    architecture="GPTModel",
    rules=(
        Fixed("mixer.kind", "attention"),
        Field("layers", "num_layers", minimum=1),
        Field("hidden", "hidden_size", minimum=1),
        FieldGroup(("mixer.heads", "mixer.kv_heads", "mixer.head_dim"), read_heads),
        Field("mlp.width", "ffn_hidden_size", minimum=1),
        Field("vocab", "padded_vocab_size", minimum=1),
        Field("context", "max_position_embeddings", minimum=1),
        FieldGroup(("mixer.bias", "mlp.bias"), read_biases),
        FieldGroup(("norm.kind", "norm.eps"), read_norm),
        FieldGroup(("mixer.qk_norm",), read_qk_norm),
        FieldGroup(("mlp.activation",), read_activation),
        FieldGroup(("positions", "mixer.rope"), read_positions),
        FieldGroup(EXPERT_FIELDS, read_experts),
        FieldGroup(
            ("tied",), lambda keys: {"tied": not is_on(keys, "untie_embeddings_and_output_weights")}
        ),
        *(Only(key, OFF) for key in (
            "openai_gelu", "onnx_safe", "quick_geglu", "multi_latent_attention", "qk_l2_norm",
            "attention_output_gate", "apply_residual_connection_post_layernorm", "use_mup", "is_hybrid_model",
            "enable_mhc_connections", "enable_hyper_connections", "heterogeneous_block_specs",
            "retro_add_retriever", "moe_apply_probs_on_input", "moe_router_force_load_balancing",
        )),
        *(Only(key, (None,)) for key in (
            "mtp_hybrid_override_pattern", "window_size", "softmax_scale", "no_rope_freq",
            "experimental_attention_variant", "linear_attention_freq", "linear_attention_type",
            "hybrid_layer_pattern", "hybrid_override_pattern", "heterogeneous_layers_config_path",
            "heterogeneous_layers_config_encoded_json", "activation_func_clamp_value", "mrope_section",
            "spec", "moe_latent_size", "moe_mlp_glu_interleave_size", "moe_router_force_biased",
            "moe_shared_expert_glu_interleave_size", "moe_router_topk_limited_devices",
        )),
        Only("mtp_num_layers", (None, 0)),
        Only("softmax_type", ("vanilla",)),
        Only("glu_linear_offset", (0.0,)),
        Only("rope_type", (None, "rope")),
        Only("hybrid_attention_ratio", (0.0, None)),
        Only("hybrid_mlp_ratio", (0.0, None)),
    ),
    defaults={},
    tensors={},
    prefix="",
    copies=lambda model: dict.fromkeys(
        ("output_layer.weight", "word_embeddings_for_head.weight") if model.tied else (), "embed.weight"
    ),
    config="args",
)


# ---- tensors -----------------------------------------------------------------------------------------------

OUTER = {"norm": "decoder.final_layernorm"}
QKV = in_layer(
    "decoder.layers", dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attention.linear_qkv")
)
UP_AND_DOWN = in_layer("decoder.layers", {"mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2"})
GATE = in_layer("decoder.layers", {"mlp.gate": "mlp.linear_fc1"})  # above up
BLOCK = in_layer("decoder.layers", {
    "attn_norm": "input_layernorm",
    "attn.o": "self_attention.linear_proj",
    "attn.q_norm": "self_attention.q_layernorm",
    "attn.k_norm": "self_attention.k_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
})
SHARED = in_layer("decoder.layers", {
    "mlp.shared.up": "mlp.shared_experts.linear_fc1",
    "mlp.shared.down": "mlp.shared_experts.linear_fc2",
})
SHARED_GATE = in_layer("decoder.layers", {"mlp.shared.gate": "mlp.shared_experts.linear_fc1"})  # above up
ROUTER = in_layer("decoder.layers", {
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.expert_bias",
    "mlp.shared_gate.weight": "mlp.shared_experts.gate_weight",
})
EXPERT_STACK = "mlp.experts"  # all experts of a layer; or each has its own tensors
ENDS = {
    "embed.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "head.weight": "output_layer.weight",
}
SPELLINGS = tuple((re.compile(theirs), ours) for theirs, ours in (
    (r"^language_model\.embedding\.", "embedding."),
    (r"^language_model\.(encoder|transformer)\.", "decoder."),
    (r"^language_model\.output_layer\.", "output_layer."),
    (r"\.attention\.", ".self_attention."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"\.mlp\.experts\.(local_)?experts\.", ".mlp.experts."),
))
# saved in addition to the weights, or determined by the args
NO_WEIGHT = re.compile(
    r"(chained_\d+\.)?optimizer\..*"
    r"|(opt_param_scheduler|rng_state|rerun_state_machine_state|common_state)\b.*"
    r"|.*\b_extra_state\b.*|.*rotary_pos_emb\..*"
    r"|.*\.router\.(local_tokens_per_expert|global_tokens_per_expert|ga_steps)"
)
# the dim along which a tensor is sharded by tensor parallelism; the others are replicated
CUT_ROWS = re.compile(
    r".*\.(linear_qkv|linear_fc1)\.(weight|bias)|(embedding\.word_embeddings|output_layer"
    r"|word_embeddings_for_head)\.weight"
)
CUT_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
STACK_OF_EXPERTS = re.compile(r".*\.mlp\.experts\.linear_fc[12]\.weight")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
FC1 = re.compile(r".*\.linear_fc1\.(weight|bias)")


def name_today(name: str) -> str | None:
    """Return the newest name of a tensor, or None if it is not a weight."""
    if NO_WEIGHT.fullmatch(name):
        return None
    for spelling, ours in SPELLINGS:
        name = spelling.sub(ours, name)
    return name


def family_of(model: ModelConfig, names: Collection[str], below_one: bool) -> Family:
    """Return the names of a model whose tensors have these names. `below_one` says that norm weights are
    stored as w - 1."""
    is_gated = model.mlp.activation == "swiglu"
    matrices = QKV | (GATE if is_gated else {}) | UP_AND_DOWN | BLOCK | OUTER
    stacked = with_leaf("weight", in_layer("decoder.layers", expert_names(EXPERT_STACK, is_gated)))
    of_experts = stacked
    if not set(stacked.values()) & {LAYER.sub("decoder.layers.{layer}.", name) for name in names}:
        alone = expert_names(f"{EXPERT_STACK}.{{expert}}", is_gated)
        of_experts = with_leaf("weight", in_layer("decoder.layers", alone))
    shared = with_leaf("weight", (SHARED_GATE if is_gated else {}) | SHARED)
    of_groups = {f"{name}.{leaf}" for name in QKV.values() for leaf in ("weight", "bias")}
    return replace(
        MEGATRON,
        tensors=(
            with_leaf("weight", matrices) | with_leaf("bias", matrices) | of_experts | shared | ROUTER | ENDS
        ),
        arrangements={
            **dict.fromkeys(of_groups, lambda model: Arrangement(groups=kv_heads(model))),
            **dict.fromkeys(stacked.values(), lambda model: Arrangement(leading=model.mlp.experts)),
        },
        norms_below_one=below_one,
    )


def expert_names(theirs: str, is_gated: bool) -> dict[str, str]:
    """Return {our name: their name} for the matrices of an expert, which are below `theirs`."""
    ours = "mlp.experts.{expert}"
    gate = {f"{ours}.gate": f"{theirs}.linear_fc1"} if is_gated else {}
    return {**gate, f"{ours}.up": f"{theirs}.linear_fc1", f"{ours}.down": f"{theirs}.linear_fc2"}
