"""Adapters of a run (model/lora.py) in Hugging Face folders: merged into the weights, or as a folder of PEFT
(checkpoint/hf/peft.py). That one needs the weights beside it, which the adapters were trained on.
"""
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.folder import StoredIndex
from checkpoint.hf.peft import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    adapter_config,
    base_of,
    module_name,
    target_modules,
)
from checkpoint.hf.tensors import Piece
from config import ConfigError, LoraConfig
from config.parameter_groups import parse_groups
from model.lora import A, B, adapted_names, adapter_scale
from parallel.sharding.boxes import Box


def without_adapters(index: StoredIndex) -> StoredIndex:
    """Return the index of the same checkpoint as that of a model without adapters."""
    config = index.meta["config"]
    model = {**config["model"], "lora": None}
    return replace(index, meta={**index.meta, "config": {**config, "model": model}})


def merger(index: StoredIndex, lora: LoraConfig, weights: str) -> Callable[[list[Piece]], None]:
    """Return a function that adds s B A to weights [m, n] that were just loaded, in place.

    index: the checkpoint. weights: one of state.WEIGHTS. Pieces may be any boxes of the weights.
    """
    @torch.no_grad()
    def merge(pieces: list[Piece]) -> None:
        for box, tensor in pieces:
            name = box.key.removesuffix(".weight")
            pair = load_pair(index, name, weights, tensor.dtype)
            if pair is not None:
                rows, columns = (slice(first, first + size) for first, size in zip(box.start, box.size))
                tensor.add_(pair[1][rows] @ pair[0][:, columns], alpha=adapter_scale(lora))

    return merge


def load_pair(
    index: StoredIndex, name: str, weights: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Return (A [rank, n], B [m, rank]) of a projection in this dtype, or None if it has no adapter."""
    stored = index.by_key()
    keys = f"{name}{A}", f"{name}{B}"
    if keys[0] not in stored:
        return None
    boxes = [Box.whole(key, stored[key][0].box.shape) for key in keys]
    a, b = (torch.empty(box.size, dtype=dtype) for box in boxes)
    wants = state.stored_as(index, list(zip(boxes, (a, b))), weights)
    of_pair = replace(index, pieces=[piece for box, _ in wants for piece in stored[box.key]])
    store.start_load(of_pair, wants, strict=False, allow_cast=True).fill()
    return a, b


# ---- PEFT --------------------------------------------------------------------------------------------------

def write_peft_folder(
    folder: Path, index: StoredIndex, family: str, *, dtype: torch.dtype, weights: str
) -> int:
    """Write the adapters of a checkpoint into `folder` and return the number of tensors.

    weights: one of state.WEIGHTS. Raises ConfigError for what PEFT's folder cannot hold.
    """
    from safetensors.torch import save_file

    cfg = state.build_config(index.meta)
    model, lora = cfg.model, cfg.model.lora
    assert lora is not None
    others = [group.names for group in parse_groups(cfg.optim.groups) if group.lr_factor > 0]
    if others:
        raise ConfigError(
            f"--adapter: optim.groups names {others[0]}, which may train beside the adapters, and a folder "
            "of PEFT has adapters alone; leave --adapter out, which merges them into the weights"
        )
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    for name in adapted_names(model, lora.targets):
        module = module_name(f"{name}.weight", family, model)
        pair = load_pair(index, name, weights, torch.float32)
        if pair is None:
            raise ConfigError(f"{index.path}: holds no adapter of {name}: not a checkpoint of this model")
        modules.append(module)
        for suffix, matrix in zip(("lora_A", "lora_B"), pair):
            tensors[f"{PREFIX}{module}.{suffix}.weight"] = matrix.to(dtype).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    source = base_of(cfg.checkpoint.init_from)
    settings = adapter_config(lora, target_modules(modules, model), source)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return len(tensors)
