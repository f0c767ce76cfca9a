"""Translate between config.json of a Hugging Face folder and ModelConfig.

The meaning of a key or field in a family is defined by its record (checkpoint/hf/families), which is used in
both directions.

Guarantees: what is read means the same model, or it is refused with the reason. Nothing that affects logits
is guessed. What is written describes every field of the model that changes its function, or it is refused.
Keys used only for training a mixture (config/reading/flat.py) are not translated: Hugging Face defines those
losses differently (model/moe.py).

Spellings: transformers 4 writes rope_theta, rope_scaling and torch_dtype; transformers 5 writes
rope_parameters and dtype. Both are read. Version 4's is written: version 4 silently falls back to
rope_theta=10000 on version 5's spelling, while version 5 reads version 4's exactly.
"""
import json
from collections.abc import Sequence
from pathlib import Path

from checkpoint.hf.families.family import changes_nothing
from checkpoint.hf.families.table import FAMILIES, UNSUPPORTED, WRAPPERS
from checkpoint.hf.rules import FamilyError
from config import ConfigError, ModelConfig, Tree
from config.reading import build_tree
from config.reading.function import written
from config.tree import value_at

TEXT = "text_config"
QUANTIZATION = "quantization_config"
COPIED_KEYS = (QUANTIZATION, "tie_word_embeddings")  # also taken from outside the text part
BESIDE_TEXT = (  # keys that do not concern the text part, or are taken along
    TEXT, *COPIED_KEYS, "vision_config", "image_token_id", "image_token_index", "video_token_id",
    "vision_start_token_id", "vision_end_token_id", "boi_token_index", "eoi_token_index",
    "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size",
    "vision_feature_layer", "projector_bias", "understand_projector_stride", "image_token_len",
    "patch_token_len",
)


def read_hf_config(folder: Path, but: Sequence[str] = ()) -> tuple[str, ModelConfig]:
    """Return (model_type, ModelConfig) of folder/config.json. The caller reads the keys in `but`.

    Raises ConfigError naming the file and the key.
    """
    path = Path(folder) / "config.json"
    hf_config = {key: value for key, value in read_keys(path).items() if key not in but}
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        if isinstance(model_type, str) and model_type in UNSUPPORTED:
            raise ConfigError(f"{path}: model_type {model_type!r} is not supported: no block here has "
                              f"{UNSUPPORTED[model_type]}")
        supported = ", ".join([*FAMILIES, *WRAPPERS])
        raise ConfigError(f"{path}: model_type {model_type!r} is not supported; these are: {supported}")
    try:
        fields = FAMILIES[model_type].read(hf_config)
    except FamilyError as error:
        raise ConfigError(f"{path}: {error}") from None
    return model_type, build_tree(ModelConfig, fields, f"{path}: model.")


def read_keys(path: Path) -> Tree:
    """Return the keys of a config.json, or of its text part if the model is multimodal. Raises
    ConfigError."""
    tree = read_json(path)
    model_type = tree.get("model_type")
    if not isinstance(model_type, str) or model_type not in WRAPPERS:
        return tree
    text = tree.get(TEXT)
    if not isinstance(text, dict):
        raise ConfigError(f"{path}: {TEXT} is missing; a {model_type} keeps the keys of its text model there")
    for key, value in tree.items():
        own = text.get(key)
        if key not in BESIDE_TEXT and value not in (None, own) and not changes_nothing(key):
            raise ConfigError(f"{path}: {key} = {value!r} beside {TEXT}, which has {own!r}: this key is "
                              f"unknown for a {model_type}")
    beside = {key: tree[key] for key in COPIED_KEYS if key in tree}
    return {"model_type": WRAPPERS[model_type], **text, **beside}


def without_quantization(path: Path) -> Tree:
    """Return the keys of a config.json without quantization_config, at the top and in its text part.

    Raises ConfigError naming the file.
    """
    tree = read_json(path)
    for part in (tree, tree.get(TEXT)):
        if isinstance(part, dict):
            part.pop(QUANTIZATION, None)
    return tree


def read_json(path: Path) -> Tree:
    """Return the keys and values of a JSON file. Raises ConfigError naming it."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_hook=with_special_floats)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a folder as save_pretrained writes it") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected keys and values, got {type(tree).__name__}")
    return tree


def with_special_floats(tree: Tree) -> Tree | float:
    """Decode numbers that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    return float(tree["__float__"]) if tree.keys() == {"__float__"} else tree


def family_of(model: ModelConfig) -> str:
    """Return the model_type whose code computes our model. Raises ConfigError naming what no family
    supports."""
    obstacles = {model_type: family.obstacles(model) for model_type, family in FAMILIES.items()}
    nearest = min(FAMILIES, key=lambda model_type: len(obstacles[model_type]))  # the first of equals
    if not obstacles[nearest]:
        return nearest

    first, *others = [f"model.{name}: {value_text(model, name)}" for name in obstacles[nearest]]
    more = f"; nor has {', '.join(others)}" if others else ""
    raise ConfigError(
        f"{first} has no form in {nearest}, the nearest Hugging Face family{more}; train with values that "
        f"{nearest} has, or add a family that has these to checkpoint/hf/families/table.py"
    )


def value_text(model: ModelConfig, name: str) -> str:
    """Format the value of a field as in a config file."""
    return written(value_at(model, name))


def to_hf_config(model: ModelConfig, dtype: str, special: Tree) -> Tree:
    """Return config.json of a model, in the spelling of transformers 4.

    `dtype` is float32 or bfloat16. `special` has bos_token_id and eos_token_id, None if absent.
    Raises ConfigError if no family has such a model.
    """
    family = FAMILIES[family_of(model)]
    header: Tree = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return {**header, **special, **family.write(model)}
