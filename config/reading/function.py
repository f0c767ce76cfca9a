"""Which config keys decide the function that weights compute, and which do not.

Two models without `differences` have weights of the same names and shapes, and the same weights produce the
same logits. Every key of model.* counts unless it is listed here, so a new key is compared until someone
exempts it. Keys of other sections only affect layout, rounding, training and data. The tokenizer, which
defines the meaning of token ids, is compared by its fingerprint; whether documents begin with its start token
is compared too.
"""
import dataclasses
from collections.abc import Callable
from typing import Any

from config.reading.kinds import every_path
from config.schema import (
    ModelConfig,
    head_dim,
    kv_heads,
    layer_model,
    mup_score_scale,
    mup_width_ratio,
    padded_vocab,
    value_dim,
)
from config.tree import differing_leaves, is_below, leaves, plain_data
from model.shared_keys import key_sources

TOKENIZER = "data.tokenizer"
BY_TEXT = "data.tokenizer=text"  # another tokenizer; rows move to tokens with the same text
START = "data.bos"  # whether documents begin with the tokenizer's start token

# keys of model.* for initialization, training and the choice of kernels
NOT_THE_FUNCTION = (
    "preset", "blocks", "pattern",  # they only say which layers have which values
    "mixer.kernel", "dropout", "lora.dropout", "init_std", "mtp.weight", "mlp.router.jitter",
    "mlp.router.aux", "mlp.router.z_loss", "mlp.capacity",
)
FUNCTION_KEYS = frozenset(
    f"model.{path}" for path in every_path(ModelConfig) if not is_below(path, NOT_THE_FUNCTION)
)
# keys that do not affect the names and shapes of weights
VALUES_ALONE = tuple(f"model.{key}" for key in (
    "norm.eps", "mixer.rope", "mixer.window", "mixer.chunk", "mixer.scale", "mixer.softcap",
    "mixer.value_scale", "mixer.gate.by", "mixer.growth", "mixer.negative_eigenvalues", "mixer.norm_eps",
    "mixer.dt_min",
    "residual_scale", "embed_scale", "logit_scale", "logit_cap", "mup", "mlp.top_k",
    "mlp.router.scores", "mlp.router.renorm", "mlp.router.groups", "mlp.router.group_top_k",
    "mlp.router.scale", "mlp.router.weighs", "mlp.limit", "mlp.shared.limit",
))
# weights that a larger model extends by rows: the key that sets the number of meaningful rows, and one that
# pads them
ROWS = {
    "embed.weight": ("vocab", "vocab_multiple"),
    "head.weight": ("vocab", "vocab_multiple"),
    "positions.weight": ("context",),
}

# keys whose effect depends on other keys: different values may resolve to the same
RESOLVED: dict[str, Callable[[ModelConfig], object]] = {
    "mixer.kv_heads": kv_heads,
    "mixer.head_dim": head_dim,
    "mixer.value_dim": value_dim,
    "mlp.router.bias_rate": lambda model: model.mlp.router.bias_rate is not None,
    "vocab_multiple": padded_vocab,
    "mup": lambda model: (mup_width_ratio(model), mup_score_scale(model)),
    "mup.base": mup_width_ratio,
    "mup.head_dim": mup_score_scale,
}


def differences(left: ModelConfig, right: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return {model.KEY: (value of left, value of right)} for the keys that make the two compute different
    functions.

    Excludes keys that only one of the models reads: the key that makes the model read it is listed instead.
    """
    found: dict[str, tuple[Any, Any]] = {}
    if left.layers == right.layers and (left.pattern or right.pattern):
        for layer in range(left.layers):
            found = differences(layer_model(left, layer), layer_model(right, layer)) | found
        if key_sources(left) == key_sources(right):
            found.pop("model.mixer.keys_of", None)  # same source by another name
        return found
    for key, values in differing_leaves(left, right).items():
        if f"model.{key}" not in FUNCTION_KEYS:
            continue
        if not (is_read(key, left) and is_read(key, right)):
            continue
        resolve = RESOLVED.get(key)
        if resolve is None or resolve(left) != resolve(right):
            found[f"model.{key}"] = values
    return found


def leaves_weights_alone(path: str) -> bool:
    """Return whether changing a key of model.* keeps the names and shapes of the weights."""
    return is_below(path, VALUES_ALONE)


def is_read(key: str, model: ModelConfig) -> bool:
    """Return whether the function depends on this key of model.*, given the others."""
    if key == "context":  # RoPE works at any position
        return model.positions == "learned"
    return True


def written(value: object) -> str:
    """Format a value as in a config file."""
    if isinstance(value, tuple) and isinstance(plain_data(value), dict):  # kinds of blocks
        value = plain_data(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if dataclasses.is_dataclass(value):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in leaves(value)) + "}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
