"""The format of a folder of PEFT: adapter_config.json, and adapter_model.safetensors with a pair of matrices
for each adapted layer, lora_A [rank, n] and lora_B [m, rank], as ours are (model/lora.py)."""
from pathlib import Path

from checkpoint.hf.config import read_json
from checkpoint.hf.families.family import PLAIN_ARRANGEMENT
from checkpoint.hf.families.table import FAMILIES
from config import ConfigError, LoraConfig, ModelConfig, Tree

PREFIX = "base_model.model."  # of names in PEFT
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"  # in adapter_config.json


def find_peft(path: Path) -> Path | None:
    """Return the path if it is a folder of PEFT, not one of a whole model."""
    has_weights = (path / WEIGHTS).is_file() or not (path / "config.json").is_file()
    return path if (path / CONFIG).is_file() and has_weights else None


def base_of(source: str | None) -> str | None:
    """Return the folder of the weights beside the adapters of a run that began from `source`: the base that a
    folder of PEFT names, else the source."""
    folder = None if source is None else find_peft(Path(source))
    return source if folder is None else read_json(folder / CONFIG).get(BASE)


def module_name(key: str, family: str, model: ModelConfig) -> str:
    """Return the name of the Hugging Face module whose weight is our tensor `key`.

    Raises ConfigError if its weight is not ours alone and as it is.
    """
    of_family = FAMILIES[family]
    name = of_family.hf_name(key, model)
    names = of_family.names(key, model)
    is_shared = list(names.values()).count(of_family.template(key, model)) > 1
    if is_shared or of_family.arrangement(key, model) != PLAIN_ARRANGEMENT:
        raise ConfigError(
            f"--adapter: {family} stores {key} in {name}, rearranged or with others, for which PEFT has one "
            "pair of matrices; leave --adapter out, which merges the adapters into the weights"
        )
    return name.removesuffix(".weight")


def target_modules(modules: list[str], model: ModelConfig) -> list[str]:
    """Return PEFT's target_modules: the last words of the names, if they mean the same in every layer."""
    words = sorted({module.rpartition(".")[2] for module in modules})
    return words if len(modules) == len(words) * model.layers else sorted(modules)


def adapter_config(lora: LoraConfig, modules: list[str], base: str | None) -> Tree:
    """Return adapter_config.json. base: the folder of the weights that the adapters were trained on."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE: base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.scale == "rslora",
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
