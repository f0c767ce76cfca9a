"""The tensors of a Hugging Face folder, and how to write them one at a time.

Our tensors are not fused, and our RoPE rotates halves like theirs, so most conversions only rename. Some
families stack several of ours in one tensor, in groups of rows, transposed, or with all experts of a layer
(Arrangement). hf_tensors describes their tensors as views of ours, from which they are written.
checkpoint/systems/foreign.py reads them. No pickle is opened.
"""
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.disk.files import (
    CHUNK,
    DTYPES,
    TensorTable,
    header_bytes,
    raw_bytes,
    storage_errors,
    write_file,
)
from checkpoint.disk.tensors_by_name import NamedTensors, TensorInfo
from checkpoint.hf.families.family import LAYER, Arrangement, Family
from checkpoint.hf.families.table import BESIDE_TEXT, FAMILIES, text_names
from config import ConfigError, ModelConfig, layer_model, layer_models, mup_score_scale, mup_width_ratio
from model.attention import AttentionConfig
from model.mla import LatentConfig
from parallel.sharding.boxes import Box

# ---- names -------------------------------------------------------------------------------------------------

VOCAB_KEYS = ("embed.weight", "head.weight")  # ours are padded: [padded vocab, hidden]
# buffers in old files, which are not weights
BUFFERS = re.compile(r"(.*\.)?(\d+\.(attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)")
NORM_WEIGHT = re.compile(r"(?<!\.attn\.)norm(_after)?\.weight$")  # except that of a state's output
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHARD_BYTES = 5_000_000_000  # the limit of transformers 4; version 5's is ten times larger
MAX_NAMED = 4  # differences named in an error; the rest are only counted

Piece = tuple[Box, Tensor]


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the Hugging Face folder. `parts` are the views of ours that it holds, in order."""
    name: str
    parts: list[Tensor]
    arrangement: Arrangement
    above: float = 0.0  # added to theirs to get ours: 1 for norms stored as w - 1
    exact: bool = False  # stays fp32, whatever the dtype of the others: it only affects the choice of experts
    constant: float | None = None  # holds only this number, and nothing of ours

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype on disk. `dtype` is that of the other tensors."""
        return torch.float32 if self.exact else dtype

    def num_bytes(self, dtype: torch.dtype) -> int:
        return prod(self.shape) * self.dtype(dtype).itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        if self.constant is not None:
            return ()
        rows = sum(len(part) for part in self.parts) // (self.arrangement.leading or 1)
        inner = (1,) if self.arrangement.inner else ()
        outer = (1,) if self.arrangement.outer else ()
        shape = (*outer, rows, *inner, *self.parts[0].shape[1:])
        shape = shape[::-1] if self.arrangement.transpose else shape
        return shape if self.arrangement.leading is None else (self.arrangement.leading, *shape)

    def stacks(self) -> list[list[Tensor]]:
        """Return the parts of each stack, one stack per index of a leading dim."""
        if self.constant is not None:
            return [[torch.tensor(self.constant)]]
        size = len(self.parts) // (self.arrangement.leading or 1)
        return [self.parts[first:first + size] for first in range(0, len(self.parts), size)]


def hf_tensors(model_type: str, model: ModelConfig, pieces: list[Piece]) -> list[HFTensor]:
    """Return every tensor of the folder, in forward order.

    `pieces` are whole tensors under our keys. Vocabulary padding is left out.
    Raises ConfigError naming a tensor that the family does not have.
    """
    family = FAMILIES[model_type]
    get_parts: dict[str, list[Piece]] = defaultdict(list)
    for box, tensor in pieces:
        whole = tensor[:model.vocab] if box.key in VOCAB_KEYS else tensor
        get_parts[family.hf_name(box.key, model)].append((box, whole))

    results: list[HFTensor] = []
    for name, parts in get_parts.items():
        parts.sort(key=lambda part: family.place_in_stack(part[0].key, model))
        key = parts[0][0].key
        results.append(HFTensor(
            name,
            [tensor for _, tensor in parts],
            family.arrangement(key, model),
            above=above_theirs(family, key),
            exact=key.endswith(".router.bias"),
        ))
    return results


def constants(model_type: str, model: ModelConfig) -> list[HFTensor]:
    """Return the tensors of the folder that are the same in every model."""
    numbers = FAMILIES[model_type].get_constants(model)
    return [HFTensor(name, [], Arrangement(), constant=value) for name, value in numbers.items()]


def above_theirs(family: Family, key: str) -> float:
    """Return what is added to their tensor to get ours: 1 for norms stored as w - 1."""
    return 1.0 if family.norms_below_one and NORM_WEIGHT.search(key) else 0.0


# ---- reading -----------------------------------------------------------------------------------------------

def is_weight(name: str, family: Family, layers: float) -> bool:
    """Return whether a tensor, under its full name, is one that is read. `layers` is the model's number of
    layers."""
    return not (BUFFERS.fullmatch(name) or name.startswith(family.unread) or ahead(name, family, layers))


def ahead(name: str, family: Family, layers: float) -> str:
    """Return the prefix of a name in a layer after the last one, if the family ignores such layers, or ""."""
    layer = LAYER.search(name)
    is_ahead = family.leaves_modules_ahead and layer is not None and int(layer[1]) >= layers
    return name[:layer.end()] if layer is not None and is_ahead else ""


def unread_notes(names: Collection[str], family: Family, layers: int) -> list[str]:
    """Return lines that name tensors of a folder that no model of the family has. `layers` is the model's
    number of layers."""
    beside = BESIDE_TEXT if len(text_names(names)) < len(names) else ()
    starts = (*family.unread, *beside, *sorted({ahead(name, family, layers) for name in names} - {""}))
    numbers = {start: sum(name.startswith(start) for name in names) for start in starts}
    return [
        f"the tensors {start}* ({number}) are skipped: transformers does not load them in a text model"
        for start, number in numbers.items() if number
    ]


def tie_embeddings(model: ModelConfig, family: Family, found: Collection[str]) -> ModelConfig:
    """Return the model that the tensors belong to, regardless of what config.json says or omits.

    A folder without an output head has a tied one. A folder without multi-token prediction modules has none:
    transformers drops them when saving.
    """
    has_mtp = any(name.startswith(f"model.layers.{model.layers}.") for name in found)
    return replace(model, tied=model.tied or family.head not in found, mtp=model.mtp if has_mtp else None)


def check_folder(
    model_type: str, model: ModelConfig, found: NamedTensors, pieces: list[Piece]
) -> None:
    """Raise ConfigError listing every tensor that is missing, not a weight of this model, or of another shape
    or dtype.

    `found` has the names of the whole model. `pieces` are whole tensors under our keys; they need no values.
    """
    every = hf_tensors(model_type, model, pieces) + constants(model_type, model)
    wanted = {tensor.name: tensor for tensor in every}
    wrong = get_differences(model_type, wanted, FAMILIES[model_type].copies(model), found.tensors)
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise ConfigError(f"{found.where}: {'; '.join(wrong[:MAX_NAMED])}{more}")


def get_differences(
    model_type: str, wanted: dict[str, HFTensor], copies: Collection[str], found: dict[str, TensorInfo]
) -> list[str]:
    """Return every difference between wanted and found tensors, in words."""
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    for name in found:
        if name not in wanted and name not in copies:
            wrong.append(f"{name} is not a weight of {model_type}")
    for name, tensor in wanted.items():
        if name in found and found[name].shape != tensor.shape:
            shapes = f"{list(found[name].shape)}, config.json implies {list(tensor.shape)}"
            wrong.append(f"{name} has shape {shapes}")
    floats = ", ".join(map(str, FLOATS))
    wrong += [f"{name} is {stored.dtype}, only {floats} are read" for name, stored in found.items()
              if stored.dtype not in FLOATS]
    return wrong


def stack_of_parts(parts: list[Tensor], tensor: HFTensor) -> Tensor:
    """Assemble one stack of a tensor of theirs from our parts: the inverse of foreign.read_piece."""
    if tensor.constant is not None:
        return parts[0]
    arrangement = tensor.arrangement
    grouped = [part.unflatten(0, (arrangement.groups, -1)) for part in parts]
    if arrangement.turned:
        grouped = [part.roll(part.shape[1] // 2, 1) for part in grouped]
    value = torch.cat(grouped, 1).flatten(0, 1) if len(parts) > 1 or arrangement.turned else parts[0]
    if arrangement.inner:
        value = value.unsqueeze(1)
    if arrangement.outer:
        value = value.unsqueeze(0)
    if arrangement.transpose:
        value = value.t()
    return value - tensor.above if tensor.above else value


def check_constant(name: str, value: Tensor, constant: float) -> None:
    """Raise ConfigError unless the tensor holds this number, rounded to its dtype."""
    if not torch.equal(value, torch.tensor(constant, dtype=value.dtype)):
        raise ConfigError(f"{name} is {value.item()!r}, and only {constant!r} is supported")


# ---- writing -----------------------------------------------------------------------------------------------

@torch.no_grad()
def fold_mup(model: ModelConfig, pieces: list[Piece], undo: bool = False) -> None:
    """Multiply the muP factors into the weights, in place: no config.json can express them.

    The logit factor goes into the head or, if the head is tied, into the last norm. The factor of the
    attention scores goes into what produces the queries. With `undo`, factors are divided out again.

    Raises ConfigError if no weights can absorb them.
    """
    if model.mup and model.tied and model.mtp:
        raise ConfigError(
            "model.mup: the factor of a tied head goes into the last norm, "
            "which multi-token prediction reads too; no Hugging Face folder can hold this model "
            "(model.tied with model.mtp)"
        )
    if model.mup and model.tied and not model.norm.weight:
        raise ConfigError("model.mup: the factor of a tied head goes into the weight of the last norm, which "
                          "has none (model.norm.weight); untie the head (model.tied)")
    for like in layer_models(model).values():
        query_names(like)  # refuses mixers without such weights
    head = ("norm.weight", "norm.bias") if model.tied else ("head.weight",)
    for box, tensor in pieces:
        front, attention, leaf = box.key.rpartition(".attn.")
        factor = 1.0
        if box.key in head:
            factor = 1 / mup_width_ratio(model)
        elif attention:
            like = layer_model(model, int(front.rpartition(".")[2]))
            factor = mup_score_scale(like) if leaf in query_names(like) else 1.0
        tensor.mul_(1 / factor if undo else factor)


def query_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the weights of a layer's mixer that scale its queries. Raises ConfigError if muP has a factor
    for them and there are none."""
    mixer = model.mixer
    if isinstance(mixer, LatentConfig) and mixer.q_rank:
        return ("q_b.weight",)
    if not isinstance(mixer, AttentionConfig) or not mixer.qk_norm:
        return ("q.weight", "q.bias")
    if mixer.qk_norm == "unweighted" and mup_score_scale(model) != 1:
        raise ConfigError("model.mup.head_dim: its factor of the scores goes into the weight of the norm of "
                          "queries, and this one has none (model.mixer.qk_norm unweighted)")
    return ("q_norm.weight",)  # the norm removes the scale of q itself


def divide_into_files(
    tensors: list[HFTensor], dtype: torch.dtype, shard_bytes: int
) -> dict[str, list[HFTensor]]:
    """Return {file: its tensors} in order, with the file names used by transformers."""
    groups = split_into_files(tensors, dtype, shard_bytes)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    of = len(groups)
    return {f"model-{number:05d}-of-{of:05d}.safetensors": group for number, group in enumerate(groups, 1)}


def write_index(folder: Path, files: dict[str, list[HFTensor]], total_bytes: int) -> None:
    """Write the index; a single file needs none. Raises StorageError."""
    if len(files) == 1:
        return
    weight_map = {tensor.name: file for file, group in files.items() for tensor in group}
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
    with storage_errors(folder, len(text)):
        write_file(folder / "model.safetensors.index.json", text.encode())


def split_into_files(tensors: list[HFTensor], dtype: torch.dtype, shard_bytes: int) -> list[list[HFTensor]]:
    """Group the tensors into files, in order."""
    groups: list[list[HFTensor]] = [[]]
    group_bytes = 0
    for tensor in tensors:
        size = tensor.num_bytes(dtype)
        if groups[-1] and group_bytes + size > shard_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(tensor)
        group_bytes += size
    return groups


def write_tensors(
    path: Path,
    group: list[HFTensor],
    dtype: torch.dtype,
    *,
    read: Callable[[HFTensor], HFTensor] = lambda tensor: tensor,
    note: Callable[[str, memoryview], object] = lambda name, data: None,
) -> int:
    """Write one safetensors file and flush it. Reads one tensor at a time, and converts one stack at a time.

    `read` returns a tensor of the group with its values. `note` is called with the name of each tensor and
    its next bytes.
    Returns the bytes of its tensors.
    """
    # old versions of transformers refuse files without this format
    table: TensorTable = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in group:
        begin = end
        end += tensor.num_bytes(dtype)
        stored_dtype = DTYPES[tensor.dtype(dtype)]
        shape = list(tensor.shape)
        table[tensor.name] = {"dtype": stored_dtype, "shape": shape, "data_offsets": [begin, end]}

    with storage_errors(path, end), open(path, "xb") as file:
        file.write(header_bytes(table))
        for tensor in map(read, group):
            for parts in tensor.stacks():
                data = raw_bytes(stack_of_parts(parts, tensor).to(tensor.dtype(dtype))).data
                note(tensor.name, data)
                for start in range(0, len(data), CHUNK):
                    file.write(data[start:start + CHUNK])
        file.flush()
        os.fsync(file.fileno())
    return end
