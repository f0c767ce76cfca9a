"""Names of model.* keys before models were made of parts, and configs that still use them.

A command line or a file with an old key is refused, naming the new one. Configs saved by runs are converted,
so old checkpoints and run folders resume.
"""
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from config.reading.flat import FLAT_NAMES, FLAT_TRAINING_NAMES, capacity_part, from_flat

SCALING = "model.mixer.rope.scaling"
# keys that the first configs lacked, and their implied values
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

NAMES_OF_PARTS = {
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
}
NAMES_OF_EXPERTS = FLAT_NAMES | FLAT_TRAINING_NAMES | {  # as on a command line
    "experts": "mlp.experts, of model.mlp experts",
    "moe_ffn": "mlp.width, of model.mlp experts",
    "first_dense": "pattern: 3 dense, block... with model.blocks.dense.mlp mlp",
    "moe_every": "pattern: (dense, block)... with model.blocks.dense.mlp mlp",
    "router_bias": "mlp.router.bias_rate 1e-3",
}
NEW_NAMES = {  # old key: new key
    f"model.{old}": f"model.{new}"
    for old, new in (NAMES_OF_PARTS | NAMES_OF_EXPERTS | {"mixer.gate_by": "mixer.gate.by"}).items()
}


def is_first_form(model: Mapping[str, Any]) -> bool:
    """Return whether a saved model predates parts."""
    return {"heads", "ffn", "rope_theta", "positions"} <= model.keys()


def is_second_form(model: Mapping[str, Any]) -> bool:
    """Return whether a saved model has parts, and expert keys outside of them."""
    return "mlp" in model and {"top_k", "moe_ffn", "moe_every"} <= model.keys()


def current_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a saved config, which states every key, to today's keys. Raises ConfigError."""
    model = tree.get("model")
    if isinstance(model, Mapping) and is_first_form(model):
        old = {**ADDED_LATE, **model}
        tree = with_model(tree, current_model(old), lambda rows: current_rows(rows, old))
        model = tree["model"]
    if isinstance(model, Mapping) and is_second_form(model):
        old = {**ADDED_TO_EXPERTS, **model}
        tree = with_model(tree, with_experts_in_mlp(old), lambda rows: rows_of_experts(rows, old))
    return dict(tree)


def with_model(
    tree: Mapping[str, Any], model: Mapping[str, Any], rows: Callable[[list[Any]], list[Any]]
) -> dict[str, Any]:
    """Return the config with another model, and its phases passed through `rows`."""
    current = {**tree, "model": model}
    phases = tree.get("train", {}).get("phases")
    if isinstance(phases, str):
        phases = json.loads(phases)
    if phases:
        current["train"] = {**tree["train"], "phases": json.dumps(rows(phases))}
    return current


def renamed(path: str, names: Mapping[str, str]) -> str:
    """Return a phase's key under its new name."""
    name = names.get(path.removeprefix("model."))
    return f"model.{name}" if name and path.startswith("model.") else path


def current_rows(rows: Iterable[Mapping[str, Any]], old: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert the rows of train.phases. `old` has all keys of model.* before the first row.

    A row that changes RoPE scaling gets the whole part, because there may be none before it.
    """
    results: list[dict[str, Any]] = []
    for row in rows:
        old = {**old, **{key.removeprefix("model."): value for key, value in row.items()}}
        current = {renamed(key, NAMES_OF_PARTS): value for key, value in row.items()}
        of_scaling = [key for key in current if key.startswith(f"{SCALING}.")]
        if of_scaling:
            current[SCALING] = current_rope(old)["scaling"]
        results.append({key: value for key, value in current.items() if key not in of_scaling})
    return results


def current_model(old: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the old keys of model.* to the tree of parts."""
    model = {key: value for key, value in old.items() if key not in NAMES_OF_PARTS}
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


# ---- experts outside of the parts --------------------------------------------------------------------------

# keys that the first configs with parts lacked
ADDED_TO_EXPERTS = {"router_weighs": "output", "router_logit_bias": False, "blocks": {}, "pattern": None}
CAPACITY = ("capacity", "drop", "pad")


def with_experts_in_mlp(old: Mapping[str, Any]) -> dict[str, Any]:
    """Move the expert keys of a saved model, which are outside of its parts, into its `mlp`. Raises
    ConfigError."""
    blocks = {
        name: {path: with_gate(part) if path == "mixer" else part for path, part in changes.items()}
        for name, changes in (old["blocks"] or {}).items()
    }
    blocks = {name: gate_of_changes(changes, old["mixer"]) for name, changes in blocks.items()}
    return from_flat({**old, "mixer": with_gate(old["mixer"]), "blocks": blocks})


def rows_of_experts(rows: Iterable[Mapping[str, Any]], old: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert the rows of train.phases. A row that changes the capacity gets the whole part: there may be
    none before it."""
    results: list[dict[str, Any]] = []
    for row in rows:
        old = {**old, **{key.removeprefix("model."): value for key, value in row.items()}}
        moved = {key for key in row if key.removeprefix("model.") in CAPACITY}
        current = {renamed(key, NAMES_OF_EXPERTS): row[key] for key in row if key not in moved}
        if moved:
            current["model.mlp.capacity"] = capacity_part(old)
        results.append(current)
    return results


def with_gate(mixer: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the two gate keys of a saved mixer into one part."""
    rest = {key: value for key, value in mixer.items() if key != "gate_by"}
    if isinstance(mixer.get("gate"), str):
        rest["gate"] = {"kind": mixer["gate"], "by": mixer.get("gate_by", "sigmoid")}
    return rest


def gate_of_changes(changes: Mapping[str, Any], mixer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a block kind with its gate as one part."""
    rest = {path: value for path, value in changes.items() if path != "mixer.gate_by"}
    stated = {key: changes[f"mixer.{key}"] for key in ("gate", "gate_by") if f"mixer.{key}" in changes}
    if stated:
        rest["mixer.gate"] = with_gate({**mixer, **stated}).get("gate")
    return rest
