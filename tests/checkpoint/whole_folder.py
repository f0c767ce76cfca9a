"""A Hugging Face folder read and written at once, a whole tensor at a time: what
checkpoint/systems/foreign.py reads in pieces and checkpoint/hf/export.py writes file by file is compared with
this.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from checkpoint.disk.files import TORCH
from checkpoint.disk.tensors_by_name import NamedTensors, TensorInfo, weight_files
from checkpoint.hf.families.family import HEAD
from checkpoint.hf.families.table import FAMILIES, text_names
from checkpoint.hf.tensors import (
    SHARD_BYTES,
    HFTensor,
    Piece,
    check_constant,
    check_folder,
    constants,
    divide_into_files,
    hf_tensors,
    is_weight,
    write_index,
    write_tensors,
)
from config import ConfigError, ModelConfig


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk, under its name in the file."""
    file: Path
    name: str
    info: TensorInfo


def stored_tensors(folder: Path, family: str, layers: float = float("inf")) -> dict[str, StoredTensor]:
    """{name in the whole model: StoredTensor}. layers: those of the model, if known."""
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as reader:
            for name in reader.keys():
                view = reader.get_slice(name)
                info = TensorInfo(tuple(view.get_shape()), TORCH[view.get_dtype()])
                found[name] = StoredTensor(file, name, info)
    found = {text: found[name] for text, name in text_names(found).items()}
    prefix = FAMILIES[family].prefix
    if not any(name.startswith(prefix) for name in found):
        found = {name if name == HEAD else prefix + name: stored for name, stored in found.items()}
    return {name: stored for name, stored in found.items() if is_weight(name, FAMILIES[family], layers)}


@torch.no_grad()
def read_weights(
    model_type: str, model: ModelConfig, found: dict[str, StoredTensor], pieces: list[Piece]
) -> None:
    """Fills `pieces`: whole tensors under our keys. found: what stored_tensors returned.

    Raises ConfigError listing every tensor that is missing, that is not a weight of this model, or that has
    another shape or dtype, before any is read; and ConfigError if a tensor that is stored twice has two
    values.
    """
    found = {FAMILIES[model_type].usual_name(name, model): stored for name, stored in found.items()}
    infos = {name: stored.info for name, stored in found.items()}
    check_folder(model_type, model, NamedTensors(Path("folder"), infos, lambda _: torch.empty(0)), pieces)
    every = hf_tensors(model_type, model, pieces) + constants(model_type, model)
    wanted = {tensor.name: tensor for tensor in every}
    copies = FAMILIES[model_type].copies(model)

    names_in: dict[Path, list[str]] = defaultdict(list)
    for name, stored in found.items():
        names_in[stored.file].append(name)
    for file, names in names_in.items():  # one file is mapped at a time
        with safe_open(file, "pt") as reader:
            for name in names:
                if name in wanted:
                    copy_to_parts(reader.get_tensor(found[name].name), wanted[name])

    tensors = {box.key: tensor for box, tensor in pieces}
    for name, key in copies.items():
        if name in found:
            check_copy(name, found[name], key, tensors[key][:model.vocab])


def copy_to_parts(value: Tensor, tensor: HFTensor) -> None:
    """Copies a tensor of theirs into our views. Raises ConfigError for another constant."""
    if tensor.constant is not None:
        return check_constant(tensor.name, value, tensor.constant)
    arrangement = tensor.arrangement
    stacked = value if arrangement.leading is not None else value[None]
    for parts, one in zip(tensor.stacks(), stacked):
        rows = one.t() if arrangement.transpose else one
        if arrangement.outer:
            rows = rows.squeeze(0)
        if arrangement.inner:
            rows = rows.squeeze(1)
        shares = [len(part) // arrangement.groups for part in parts]
        sources = rows.unflatten(0, (arrangement.groups, -1)).split(shares, 1)
        for part, source in zip(parts, sources):
            if arrangement.turned:
                source = source.roll(source.shape[1] // 2, 1)
            part.copy_(source.flatten(0, 1))
            if tensor.above:
                part.add_(tensor.above)


def check_copy(name: str, stored: StoredTensor, key: str, original: Tensor) -> None:
    """Raises ConfigError if a tensor that is stored a second time differs from the original, our `key`."""
    with safe_open(stored.file, "pt") as reader:
        copy: Tensor = reader.get_tensor(stored.name)
    if copy.shape == original.shape and torch.equal(copy.to(original.dtype), original):
        return
    original_name = "head" if key == "head.weight" else "embedding"
    why = "tie_word_embeddings says they are one" if name == HEAD else "multi-token prediction shares it"
    raise ConfigError(f"{stored.file}: {name} differs from the {original_name}, but {why}")


@torch.no_grad()
def write_weights(
    folder: Path,
    model_type: str,
    model: ModelConfig,
    pieces: list[Piece],
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Writes the weights: one safetensors file or, beyond `shard_bytes`, several files and their index.

    pieces: whole tensors under our keys. Returns the bytes of all tensors. Raises StorageError.
    """
    tensors = hf_tensors(model_type, model, pieces) + constants(model_type, model)
    files = divide_into_files(tensors, dtype, shard_bytes)
    total_bytes = sum(write_tensors(folder / file, group, dtype) for file, group in files.items())
    write_index(folder, files, total_bytes)
    return total_bytes
