"""config.json of a Hugging Face folder <-> config.Model: one table, read in both directions. What only training uses of a
mixture (config.LEARNING) stays behind: their losses are defined otherwise (model/moe.py).

Promises: what is read means the same model, or it is refused with the reason; nothing that changes the logits is guessed.
Both spellings are read (v5 writes rope_parameters and dtype); v4's is written, since v4 silently falls back to
rope_theta=10000 on v5's, and v5 reads v4's exactly. Defaults are those of transformers' config classes, because a
config.json may leave out whatever equals them.
"""
import json
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from config import ConfigError, Model, build, head_dim, kv_heads, moe_ffn

NULLABLE = ("num_key_value_heads", "head_dim", "n_inner", "sliding_window", "q_lora_rank")  # null has a meaning there


@dataclass(frozen=True)
class Family:
    """keys: fields of ours that stand in config.json under another name. ours: fields that all its models share.
    theirs: keys with the values that we compute; any other value is another model. The first one is written."""
    architecture: str
    keys: dict[str, str]
    ours: dict[str, object]
    theirs: dict[str, tuple]
    defaults: dict[str, object] = field(default_factory=dict)


ROPE_KEYS = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
             "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size", "vocab": "vocab_size",
             "context": "max_position_embeddings", "norm_eps": "rms_norm_eps", "init_std": "initializer_range",
             "tied": "tie_word_embeddings"}
ROPE = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope"}
ROPE_DEFAULTS = {"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
                 "tie_word_embeddings": False, "rope_theta": 10000.0}
SILU = {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0,), "quantization_config": (None,)}
MIXTURE = ("experts", "top_k", "moe_ffn", "shared_experts", "shared_gate", "first_dense", "moe_every", "router", "router_renorm",
           "router_groups", "router_group_top_k", "router_scale", "router_bias")
PLAIN = {f.name: f.default for f in fields(Model)  # a family's, where it says nothing else
         if f.name in (*MIXTURE, "qk_norm_whole", "kv_rank", "q_rank", "rope_pairs", "mtp")}
QWEN_MOE = {**{k: v for k, v in ROPE_KEYS.items()}, "experts": "num_experts", "top_k": "num_experts_per_tok", "moe_ffn": "moe_intermediate_size",
            "router_renorm": "norm_topk_prob", "moe_every": "decoder_sparse_step"}
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

DEEPSEEK = ("deepseek_v2", "deepseek_v3")
LATENT_KEYS = {**{ours: key for ours, key in ROPE_KEYS.items() if ours not in ("kv_heads", "head_dim")}, "kv_rank": "kv_lora_rank",
               "q_rank": "q_lora_rank", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim", "v_dim": "v_head_dim",
               "experts": "n_routed_experts", "top_k": "num_experts_per_tok", "moe_ffn": "moe_intermediate_size",
               "shared_experts": "n_shared_experts", "first_dense": "first_k_dense_replace", "router_scale": "routed_scaling_factor"}
LATENT = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False, "qkv_bias": False, "qk_norm": False, "window": None}
LATENT_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False, "rope_theta": 10000.0, "kv_lora_rank": 512,
                   "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": None}

FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel",
                   {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner", "vocab": "vocab_size",
                    "context": "n_positions", "norm_eps": "layer_norm_epsilon", "init_std": "initializer_range",
                    "tied": "tie_word_embeddings"},
                   {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "qkv_bias": False,
                    "qk_norm": False, "window": None},
                   {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
                    "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,), "quantization_config": (None,)},
                   {"n_inner": None, "n_positions": 1024, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
                    "tie_word_embeddings": True}),
    "llama": Family("LlamaForCausalLM", {**ROPE_KEYS, "bias": "attention_bias"},
                    {**ROPE, "qkv_bias": False, "qk_norm": False, "window": None}, SILU,
                    {**ROPE_DEFAULTS, "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 2048}),
    "mistral": Family("MistralForCausalLM", ROPE_KEYS, {**ROPE, "bias": False, "qkv_bias": False, "qk_norm": False}, SILU,
                      {**ROPE_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}),
    "qwen2": Family("Qwen2ForCausalLM", ROPE_KEYS, {**ROPE, "bias": False, "qkv_bias": True, "qk_norm": False}, SILU,
                    {**ROPE_DEFAULTS, **QWEN_WINDOW, "num_key_value_heads": 32, "max_position_embeddings": 32768}),
    "qwen3": Family("Qwen3ForCausalLM", ROPE_KEYS, {**ROPE, "bias": False, "qkv_bias": False, "qk_norm": True},
                    {**SILU, "attention_bias": (False,)},
                    {**ROPE_DEFAULTS, **QWEN_WINDOW, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}),
    "mixtral": Family("MixtralForCausalLM", {**ROPE_KEYS, "experts": "num_local_experts", "top_k": "num_experts_per_tok"},
                      {**ROPE, "bias": False, "qkv_bias": False, "qk_norm": False}, SILU,
                      {**ROPE_DEFAULTS, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
                       "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 131072}),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", {**QWEN_MOE, "qkv_bias": "qkv_bias"},
                        {**ROPE, "bias": False, "qk_norm": False, "window": None, "shared_gate": True},
                        {**SILU, "use_sliding_window": (False,)},
                        {**ROPE_DEFAULTS, "num_key_value_heads": 16, "qkv_bias": True, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
                         "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
                         "max_position_embeddings": 32768}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", QWEN_MOE, {**ROPE, "bias": False, "qkv_bias": False, "qk_norm": True, "window": None},
                        {**SILU, "attention_bias": (False,), "use_sliding_window": (False,)},
                        {**ROPE_DEFAULTS, "num_key_value_heads": 4, "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
                         "num_experts": 128, "norm_topk_prob": False, "max_position_embeddings": 32768}),
    "olmoe": Family("OlmoeForCausalLM", {**{k: v for k, v in ROPE_KEYS.items() if k != "head_dim"}, "experts": "num_experts",
                                         "top_k": "num_experts_per_tok", "router_renorm": "norm_topk_prob"},
                    {**ROPE, "head_dim": None, "bias": False, "qkv_bias": False, "qk_norm": True, "qk_norm_whole": True, "window": None},
                    {**SILU, "attention_bias": (False,), "clip_qkv": (None,)},
                    {**ROPE_DEFAULTS, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
                     "max_position_embeddings": 4096}),
    "dots1": Family("Dots1ForCausalLM",
                    {**ROPE_KEYS, "experts": "n_routed_experts", "top_k": "num_experts_per_tok", "moe_ffn": "moe_intermediate_size",
                     "shared_experts": "n_shared_experts", "first_dense": "first_k_dense_replace", "router_renorm": "norm_topk_prob",
                     "router_groups": "n_group", "router_group_top_k": "topk_group", "router_scale": "routed_scaling_factor"},
                    {**ROPE, "bias": False, "qkv_bias": False, "qk_norm": True, "window": None, "router": "sigmoid", "router_bias": True},
                    {**SILU, "attention_bias": (False,)},
                    {**ROPE_DEFAULTS, "num_key_value_heads": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False,
                     "routed_scaling_factor": 1.0, "max_position_embeddings": 2048}),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", LATENT_KEYS, {**LATENT, "rope_pairs": True, "router_renorm": False},
                          {**SILU, "attention_bias": (False,), "mlp_bias": (False,), "norm_topk_prob": (False,), "scoring_func": ("softmax",),
                           "moe_layer_freq": (1,)},
                          {**LATENT_DEFAULTS, "max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_routed_experts": 64,
                           "n_shared_experts": 2, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0}),
    "deepseek_v3": Family("DeepseekV3ForCausalLM",
                          {**LATENT_KEYS, "mtp": "num_nextn_predict_layers", "rope_pairs": "rope_interleave",
                           "router_groups": "n_group", "router_group_top_k": "topk_group", "router_renorm": "norm_topk_prob"},
                          {**LATENT, "router": "sigmoid", "router_bias": True},
                          {**SILU, "attention_bias": (False,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
                          {**LATENT_DEFAULTS, "max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_routed_experts": 256,
                           "n_shared_experts": 1, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "n_group": 8,
                           "topk_group": 4, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
                           "rope_interleave": True}),
}
ALIASES = {"num_local_experts": "num_experts", "num_experts": "num_local_experts"}  # transformers 5 writes Qwen's under the other name


# ---- config.json -> Model --------------------------------------------------------------------------------------------

def read(folder: Path) -> tuple[str, Model]:
    """(family, Model) of folder/config.json. Raises ConfigError naming the file and the key."""
    path = Path(folder) / "config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}; give a folder as save_pretrained writes it") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: not JSON ({e})") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{path}: expected keys and values, got {type(said).__name__}")
    kind = said.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"{path}: model_type {kind!r} is not supported; these are: {', '.join(FAMILIES)}")
    try:
        return kind, build(Model, to_model(kind, said), f"{path}: model.")
    except Unlike as e:
        raise ConfigError(f"{path}: {e}") from None


class Unlike(ValueError):
    """The config.json means a model that ours is not."""


def to_model(kind: str, said: dict) -> dict:
    """Plain data for config.build. Raises Unlike."""
    family = FAMILIES[kind]
    for key, values in family.theirs.items():
        if said.get(key, values[0]) not in values:
            raise Unlike(f"{key} = {said[key]!r} is not supported, only {' or '.join(map(repr, values))}")
    other = {ALIASES[k]: v for k, v in said.items() if k in ALIASES and ALIASES[k] in family.keys.values()}
    said = {**family.defaults, **other, **said}
    for key in (*family.keys.values(), *family.defaults):
        if key not in said:
            raise Unlike(f"{key} is missing")
        if not isinstance(said[key], (int, float)) and not (said[key] is None and key in NULLABLE):
            raise Unlike(f"{key} = {said[key]!r} is not a number")
    m = {**family.ours, **{ours: said[key] for ours, key in family.keys.items()}, **mixture(kind, said)}
    if kind == "gpt2":
        return {**m, "ffn": 4 * m["hidden"] if m["ffn"] is None else m["ffn"]}
    if kind == "llama" and said["mlp_bias"] != said["attention_bias"]:
        raise Unlike("attention_bias and mlp_bias differ; both or neither are supported")
    if kind in DEEPSEEK:
        return {**m, **rope(kind, said)}
    if m.get("head_dim") is not None and m["head_dim"] * m["heads"] == m["hidden"]:
        m["head_dim"] = None  # what it is anyway; v5 writes it out
    return {**m, **rope(kind, said), "window": window(kind, said)}


def experts(kind: str, said: dict) -> dict:
    """What differs between DeepSeek's layers."""
    if said["num_key_value_heads"] not in (None, said["num_attention_heads"]):
        raise Unlike(f"num_key_value_heads = {said['num_key_value_heads']} is not supported with latent attention, only num_attention_heads")
    if said["first_k_dense_replace"] < said["num_hidden_layers"]:
        raise Unlike(f"first_k_dense_replace = {said['first_k_dense_replace']}: layers with experts are not supported")
    return {}

def mixture(kind: str, said: dict) -> dict:
    """What Qwen's and DeepSeek's say in other terms than ours: the shared experts' width, layers without experts, groups."""
    if kind in DEEPSEEK:
        if said["num_key_value_heads"] not in (None, said["num_attention_heads"]):
            raise Unlike(f"num_key_value_heads = {said['num_key_value_heads']} is not supported with latent attention, only num_attention_heads")
        if said["first_k_dense_replace"] >= said["num_hidden_layers"]:
            return {k: PLAIN[k] for k in MIXTURE}
        how = said.get("topk_method") or "greedy"
        if kind == "deepseek_v2" and how != "greedy":
            if how != "group_limited_greedy":
                raise Unlike(f"topk_method = {how!r} is not supported, only 'greedy' and 'group_limited_greedy'")
            return {"router_groups": said["n_group"], "router_group_top_k": said["topk_group"]}
        return {}
    if kind not in ("qwen2_moe", "qwen3_moe"):
        return {}
    dense = sorted(said.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise Unlike(f"mlp_only_layers = {dense} is not supported, only the first layers (and decoder_sparse_step)")
    if kind == "qwen3_moe":
        return {"first_dense": len(dense)}
    shared, one = said["shared_expert_intermediate_size"], said["moe_intermediate_size"]
    if shared % one or not shared:
        raise Unlike(f"shared_expert_intermediate_size = {shared} is not a multiple of moe_intermediate_size = {one}")
    return {"first_dense": len(dense), "shared_experts": shared // one}


def rope(kind: str, said: dict) -> dict:
    """rope_theta and llama3's or YaRN's scaling. Both spellings; v5 reads rope_scaling first as well."""
    family = kind
    r = said.get("rope_scaling") or said.get("rope_parameters") or {}
    kind = r.get("rope_type", r.get("type", "default")) if isinstance(r, dict) else r
    if kind not in ("default", "llama3", "yarn") or not isinstance(r, dict):
        raise Unlike(f"rope scaling {kind!r} is not supported, only llama3's, yarn's and none")
    for key, value in r.items():
        if key not in ("rope_type", "type") and not isinstance(value, (int, float)) and value is not None:
            raise Unlike(f"rope parameter {key} = {value!r} is not supported")
    if (r.get("partial_rotary_factor") or 1.0) != 1.0:
        raise Unlike(f"partial_rotary_factor = {r['partial_rotary_factor']} is not supported, only 1.0")
    out = {"rope_theta": r.get("rope_theta") or said["rope_theta"]}
    if kind == "default":
        return out
    original = said.get("original_max_position_embeddings", r.get("original_max_position_embeddings", said["max_position_embeddings"]))
    lacks = [k for k in (("factor",) if kind == "yarn" else ("factor", "low_freq_factor", "high_freq_factor")) if r.get(k) is None]
    if lacks:
        raise Unlike(f"{kind} rope scaling without {lacks[0]}")
    if kind == "yarn":
        return {**out, "rope_kind": "yarn", "rope_factor": r["factor"], "rope_low_freq": r.get("beta_slow") or 1,
                "rope_high_freq": r.get("beta_fast") or 32, "rope_original": original, **mscales(family, r)}
    return {**out, "rope_factor": r["factor"], "rope_low_freq": r["low_freq_factor"], "rope_high_freq": r["high_freq_factor"],
            "rope_original": original}


def mscales(kind: str, r: dict) -> dict:
    """YaRN's growth of the logits, as transformers reads it: mscale counts only beside mscale_all_dim, an attention_factor
    beats both on cos and sin."""
    if r.get("truncate", True) is not True:
        raise Unlike(f"rope parameter truncate = {r['truncate']} is not supported, only true")
    mine, every, grown = r.get("mscale"), r.get("mscale_all_dim"), r["factor"] > 1
    if every and kind not in DEEPSEEK:
        raise Unlike(f"rope parameter mscale_all_dim = {every} is supported with latent attention alone")
    out = {"rope_mscale": mine if mine and every else 1.0, "rope_mscale_all": every if mine and every else 0.0}
    if every and not mine:
        raise Unlike(f"rope parameter mscale_all_dim = {every} without mscale is not supported")
    if r.get("attention_factor") is not None and grown:
        if every:
            raise Unlike("rope parameters attention_factor and mscale_all_dim together are not supported")
        out["rope_mscale"] = (r["attention_factor"] - 1) / (0.1 * math.log(r["factor"]))
    return out


def window(kind: str, said: dict) -> int | None:
    """The sliding window that the attention really uses: a Qwen config names one that its use_sliding_window turns off."""
    if FAMILIES[kind].ours.get("window", 0) is None and kind != "dots1":
        return None
    if kind == "dots1":
        slides = said.get("layer_types") or ["sliding_attention"] * (said.get("sliding_window", 4096) is not None and
                                                                     said["num_hidden_layers"] > said.get("max_window_layers", 62))
        if "sliding_attention" in slides:
            raise Unlike("layers with a sliding window (max_window_layers, layer_types) are not supported in this family")
        return None
    size = said["sliding_window"]
    if kind in ("mistral", "mixtral"):
        return size
    size = size if said["use_sliding_window"] else None
    layers, first = said["num_hidden_layers"], said["max_window_layers"]
    slides = [t == "sliding_attention" for t in said["layer_types"]] if said.get("layer_types") else \
        [size is not None and i >= first for i in range(layers)]
    if any(slides) and (not all(slides) or size is None):
        raise Unlike("layers with and without a sliding window are mixed (max_window_layers, layer_types); all or none are supported")
    return size if any(slides) else None


# ---- Model -> config.json --------------------------------------------------------------------------------------------

def family_of(m: Model) -> str:
    """The family whose code computes what ours does. Raises ConfigError naming what no family has."""
    wrong = {kind: misfits(kind, m) for kind in FAMILIES}
    nearest = min(FAMILIES, key=lambda kind: len(wrong[kind]))  # the first of equals
    if wrong[nearest]:
        raise ConfigError(f"model.{wrong[nearest][0]}: no Hugging Face family has this; the nearest, {nearest}, differs in "
                          f"{', '.join(wrong[nearest])}")
    return nearest


def misfits(kind: str, m: Model) -> list[str]:
    """Fields in which m is not of this family."""
    m = replace(m, qkv_bias=m.qkv_bias and not m.bias)  # bias has them already
    family = FAMILIES[kind]
    same = {**{k: v for k, v in PLAIN.items() if k not in family.keys}, **family.ours}
    if m.experts and "moe_ffn" not in family.keys:
        same["moe_ffn"] = m.ffn  # one width for both
        m = replace(m, moe_ffn=moe_ffn(m))
    if kind in ("qwen2_moe", "qwen3_moe"):
        same.pop("first_dense")
    if kind == "qwen2_moe":
        same.pop("shared_experts")
    if kind in DEEPSEEK and not m.experts:
        same = {k: v for k, v in same.items() if k not in MIXTURE}  # no layer has any
    if kind == "deepseek_v2":
        same = {k: v for k, v in same.items() if not k.startswith("router_group")}
    out = [f"{k}={getattr(m, k)}" for k, v in same.items() if getattr(m, k) != v]
    if kind in DEEPSEEK and not m.kv_rank:
        out.append("kv_rank=None")
    if "experts" in family.keys and m.experts is None and kind not in DEEPSEEK:
        out.append("experts=None")
    if kind == "qwen2_moe" and not m.shared_experts:
        out.append("shared_experts=0")
    if kind == "olmoe" and head_dim(m) * m.heads != m.hidden:
        out.append(f"head_dim={m.head_dim}")
    if kind == "gpt2" and kv_heads(m) != m.heads:
        out.append(f"kv_heads={m.kv_heads}")
    if kind == "gpt2" and head_dim(m) * m.heads != m.hidden:
        out.append(f"head_dim={m.head_dim}")
    if kind == "llama" and m.hidden % m.heads:  # transformers 5 refuses it, for Llama alone; Mistral's is the same model
        out.append(f"heads={m.heads}")
    return out


def to_json(m: Model, dtype: str, special: dict) -> dict:
    """config.json in v4's spelling. dtype: float32 or bfloat16; special: bos_token_id and eos_token_id (null: none)."""
    kind = family_of(m)
    family = FAMILIES[kind]
    full = replace(m, kv_heads=kv_heads(m), head_dim=head_dim(m), moe_ffn=moe_ffn(m))
    out = {"architectures": [family.architecture], "model_type": kind, "torch_dtype": dtype, "use_cache": True, **special}
    out |= {key: getattr(full, ours) for ours, key in family.keys.items()}
    out |= {key: values[0] for key, values in family.theirs.items() if key not in ("quantization_config", "partial_rotary_factor")}
    if kind == "gpt2":
        return {**out, "resid_pdrop": m.dropout, "embd_pdrop": m.dropout, "attn_pdrop": 0.0}
    out |= {"rope_theta": m.rope_theta, "rope_scaling": None, "attention_dropout": 0.0}
    if m.rope_factor is not None:
        out["rope_scaling"] = scaling(m)
    if kind in DEEPSEEK:
        out["num_key_value_heads"] = m.heads
        if m.experts is None:
            return out | {"first_k_dense_replace": m.layers, "n_routed_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": m.ffn}
        if kind == "deepseek_v2":
            out |= {"topk_method": "greedy" if m.router_groups == 1 else "group_limited_greedy", "n_group": m.router_groups,
                    "topk_group": m.router_group_top_k}
        return out
    extra = {"llama": {"mlp_bias": m.bias}, "mistral": {"sliding_window": m.window}, "mixtral": {"sliding_window": m.window}, "olmoe": {},
             "dots1": {"sliding_window": None, "max_window_layers": m.layers}, "qwen3_moe": {"mlp_only_layers": list(range(m.first_dense))},
             "qwen2_moe": {"mlp_only_layers": list(range(m.first_dense)), "shared_expert_intermediate_size": m.shared_experts * moe_ffn(m)}}
    qwen = {"use_sliding_window": m.window is not None, "sliding_window": m.window,
            "max_window_layers": 0 if m.window else m.layers}  # the window starts at this layer
    return out | extra.get(kind, qwen)


def scaling(m: Model) -> dict:
    """rope_scaling of a model whose context was made longer."""
    out = {"rope_type": m.rope_kind, "factor": m.rope_factor, "original_max_position_embeddings": m.rope_original}
    if m.rope_kind == "llama3":
        return out | {"low_freq_factor": m.rope_low_freq, "high_freq_factor": m.rope_high_freq}
    out |= {"beta_slow": m.rope_low_freq, "beta_fast": m.rope_high_freq}
    if m.rope_mscale_all:
        return out | {"mscale": m.rope_mscale, "mscale_all_dim": m.rope_mscale_all}
    return out if m.rope_mscale == 1.0 else out | {"attention_factor": 1 + 0.1 * m.rope_mscale * math.log(m.rope_factor)}
