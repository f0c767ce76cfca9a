"""The keys of model.* before a model was made of parts: what they are called now, and configs that have them.

A command line or a file with an earlier key is refused with its new name. Configs that runs have saved are
read as they are: checkpoints and run folders of before go on.
"""
import json
from collections.abc import Iterable, Mapping
from typing import Any

SCALING = "model.mixer.rope.scaling"
# Keys that the first configs did not have, with what they meant without them.
ADDED_LATE = {
    "qk_norm_whole": False,
    "rope_kind": "llama3",
    "rope_mscale": 1.0,
    "rope_mscale_all": 0.0,
    "rope_pairs": False,
    "mup_base": None,
    "mup_head_dim": None,
    "mtp": 0,
    "mtp_weight": 0.3,
    "kv_rank": None,
}

NEW_NAMES = {f"model.{old}": f"model.{new}" for old, new in {
    "heads": "mixer.heads",
    "kv_heads": "mixer.kv_heads",
    "head_dim": "mixer.head_dim",
    "window": "mixer.window",
    "attention": "mixer.kernel",
    "qkv_bias": "mixer.bias qkv",
    "bias": "mixer.bias all and model.mlp.bias true",
    "qk_norm": "mixer.qk_norm head",
    "qk_norm_whole": "mixer.qk_norm whole",
    "kv_rank": "mixer.kv_rank, of model.mixer latent",
    "q_rank": "mixer.q_rank",
    "nope_dim": "mixer.nope_dim",
    "rope_dim": "mixer.rope_dim",
    "v_dim": "mixer.v_dim",
    "rope_theta": "mixer.rope.base",
    "rope_pairs": "mixer.rope.pairs",
    "rope_kind": "mixer.rope.scaling.kind",
    "rope_factor": "mixer.rope.scaling.factor",
    "rope_original": "mixer.rope.scaling.original",
    "rope_low_freq": "mixer.rope.scaling.low_freq",
    "rope_high_freq": "mixer.rope.scaling.high_freq",
    "rope_mscale": "mixer.rope.scaling.mscale",
    "rope_mscale_all": "mixer.rope.scaling.mscale_all",
    "ffn": "mlp.width",
    "activation": "mlp.activation",
    "norm_eps": "norm.eps",
    "mtp": "mtp.modules",
    "mtp_weight": "mtp.weight",
    "mup_base": "mup.base",
    "mup_head_dim": "mup.head_dim",
}.items()}


def is_earlier(model: Mapping[str, Any]) -> bool:
    """Whether a saved model has the keys of before."""
    return {"heads", "ffn", "rope_theta", "positions"} <= model.keys()


def current_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config, which states every key, with the keys of today."""
    model = tree.get("model")
    if not isinstance(model, Mapping) or not is_earlier(model):
        return dict(tree)
    old = {**ADDED_LATE, **model}
    current = {**tree, "model": current_model(old)}
    phases = tree.get("train", {}).get("phases")
    if isinstance(phases, str):
        phases = json.loads(phases)
    if phases:
        current["train"] = {**tree["train"], "phases": json.dumps(current_rows(phases, old))}
    return current


def current_rows(rows: Iterable[Mapping[str, Any]], old: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of train.phases. old: all keys of model.* before the first.

    A row that changes the scaling of the rotary positions has all of it: there may be none before.
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        old = {**old, **{key.removeprefix("model."): value for key, value in row.items()}}
        current = {NEW_NAMES.get(key, key): value for key, value in row.items()}
        of_scaling = [key for key in current if key.startswith(f"{SCALING}.")]
        if of_scaling:
            current[SCALING] = current_rope(old)["scaling"]
        found.append({key: value for key, value in current.items() if key not in of_scaling})
    return found


def current_model(old: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of model.* of before -> the tree of parts."""
    moved = {name.partition(".")[2] for name in NEW_NAMES}
    model = {key: value for key, value in old.items() if key not in moved}
    is_learned = old["positions"] == "learned"
    return {
        **model,
        "mixer": current_mixer(old, None if is_learned else current_rope(old)),
        "mlp": {"width": old["ffn"], "activation": old["activation"], "bias": old["bias"]},
        "norm": {"kind": old["norm"], "eps": old["norm_eps"]},
        "positions": "learned" if is_learned else None,
        "mtp": {"modules": old["mtp"], "weight": old["mtp_weight"]} if old["mtp"] else None,
        "mup": {"base": old["mup_base"], "head_dim": old["mup_head_dim"]} if old["mup_base"] else None,
    }


def current_mixer(old: Mapping[str, Any], rope: dict[str, Any] | None) -> dict[str, Any]:
    shared = {"heads": old["heads"], "window": old["window"], "kernel": old["attention"], "rope": rope}
    if old["kv_rank"] is not None:
        latent = {key: old[key] for key in ("kv_rank", "q_rank", "nope_dim", "rope_dim", "v_dim")}
        return {"kind": "latent", **shared, **latent}
    normed = "whole" if old["qk_norm_whole"] else "head"
    biased = "all" if old["bias"] else "qkv"
    return {
        "kind": "attention",
        **shared,
        "kv_heads": old["kv_heads"],
        "head_dim": old["head_dim"],
        "bias": biased if old["bias"] or old["qkv_bias"] else None,
        "qk_norm": normed if old["qk_norm"] else None,
    }


def current_rope(old: Mapping[str, Any]) -> dict[str, Any]:
    scaling = None
    if old["rope_factor"] is not None:
        names = ["factor", "original", "low_freq", "high_freq"]
        names += ["mscale", "mscale_all"] if old["rope_kind"] == "yarn" else []
        scaling = {"kind": old["rope_kind"], **{name: old[f"rope_{name}"] for name in names}}
    return {"base": old["rope_theta"], "pairs": old["rope_pairs"], "scaling": scaling}
