"""Read folders of torch.distributed.checkpoint: torchtitan's, and Megatron-LM's in format torch_dist.

.metadata, a pickle, says which boxes of each tensor are in which files; pickled.py reads it without executing
it. A box is a torch.save file or a tensor of a safetensors file, embedded in a .distcp file. Objects that are
not tensors (Megatron-LM's _extra_state, torchtitan's train_state) are listed but not read; read_object reads
one.

Megatron-LM stacks layers of the same kind: decoder.layers.mlp.linear_fc2.weight has a leading layer dim.

Sources: torch/distributed/checkpoint/metadata.py and filesystem.py of PyTorch;
megatron/core/dist_checkpointing/mapping.py of Megatron-LM (the names of its objects).
"""
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.disk.tensors_by_name import (
    NamedTensors,
    StoredTensor,
    TensorInfo,
    fill_from,
    one_line,
    open_regular,
    safetensors_table,
)
from checkpoint.systems.pickled import Foreign, interpret, tree_at
from config import ConfigError
from parallel.sharding.boxes import Box, check_inside, plan_read

METADATA = ".metadata"
KEPT_ITEMS = 1 << 16  # cached places of boxes in files


@dataclass(frozen=True)
class StoredItem:
    """A part of a .distcp file: a box of a tensor, or an object."""
    file: Path
    start: int  # byte
    num_bytes: int


Items = dict[tuple[str, tuple[int, ...] | None], StoredItem]  # by name and first element (None for an object)


@dataclass(frozen=True)
class DcpMetadata:
    """The content of .metadata. For each tensor, `boxes` and `items` are in the same order."""
    tensors: dict[str, TensorInfo]
    boxes: dict[str, list[Box]]
    items: dict[str, list[StoredItem]]
    objects: dict[str, StoredItem]


def open_dcp(folder: Path) -> NamedTensors:
    """Open the tensors of a torch.distributed.checkpoint folder.

    Raises ConfigError naming the file that is missing, truncated or damaged.
    """
    folder = Path(folder)
    metadata = read_metadata(folder)
    check_files(metadata)
    place = lru_cache(KEPT_ITEMS)(place_of)

    def read_box(want: Box) -> Tensor:
        boxes = metadata.boxes[want.key]
        dtype = metadata.tensors[want.key].dtype
        try:
            plan = plan_read(want, boxes)
        except ValueError as error:
            raise ConfigError(f"{folder / METADATA}: {error}") from None
        target = torch.empty(want.size, dtype=dtype)
        for index, slices, target_slices in plan:
            box = boxes[index]
            stored = place(metadata.items[want.key][index], box, dtype)
            part = Box(
                want.key,
                box.size,
                start=tuple(one.start for one in slices),
                size=tuple(one.stop - one.start for one in slices),
            )
            fill_from(stored, part, target[target_slices])
        return target

    return NamedTensors(folder, metadata.tensors, read_box, tuple(metadata.objects))


def read_object(folder: Path, name: str) -> Any:
    """Read an object listed by open_dcp as a tree, like pickled.read_tree. Raises ConfigError."""
    item = read_metadata(Path(folder)).objects[name]
    with open_regular(item.file) as fd:
        return tree_at(fd, item.file, item.start, item.num_bytes, f"{item.file}: {name}")


# ---- .metadata ---------------------------------------------------------------------------------------------

def read_metadata(folder: Path) -> DcpMetadata:
    """Read .metadata. Raises ConfigError naming it."""
    path = folder / METADATA
    if not path.exists():
        raise ConfigError(f"{folder}: holds no {METADATA}: not a folder of torch.distributed.checkpoint")
    with open_regular(path) as fd, open(fd, "rb", closefd=False) as file:
        tree = interpret(file.read(), str(path))
    try:
        return parsed(tree, folder)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        why = one_line(str(error))
        raise ConfigError(f"{path}: not what torch.distributed.checkpoint writes ({why})") from None


def parsed(tree: Any, folder: Path) -> DcpMetadata:
    """Parse the metadata tree. Raises ValueError, or whatever wrong types raise."""
    state = attributes(tree, "Metadata")
    items: Items = {}
    for index, storage in state["storage_data"].items():
        where = attributes(index, "MetadataIndex")
        offset = where.get("offset")
        key = (text(where["fqn"]), None if offset is None else numbers(offset))
        if key in items:
            raise ValueError(f"{key} is stored twice")
        items[key] = stored_item(attributes(storage, "_StorageInfo"), folder)

    metadata = DcpMetadata({}, {}, {}, {})
    for name, entry in state["state_dict_metadata"].items():
        if get_class(entry) == "BytesStorageMetadata":
            metadata.objects[text(name)] = take(items, name, None)
            continue
        about = attributes(entry, "TensorStorageMetadata")
        shape = numbers(about["size"])
        metadata.tensors[text(name)] = TensorInfo(shape, get_dtype(about["properties"]))
        metadata.boxes[name], metadata.items[name] = [], []
        for chunk in about["chunks"]:
            part = attributes(chunk, "ChunkStorageMetadata")
            box = Box(name, shape, numbers(part["offsets"]), numbers(part["sizes"]))
            check_inside(box, shape)
            metadata.boxes[name].append(box)
            metadata.items[name].append(take(items, name, box.start))
    return metadata


def take(items: Items, name: str, offset: tuple[int, ...] | None) -> StoredItem:
    """Remove and return an item, so that none serves two boxes. Raises ValueError if it is missing."""
    if (name, offset) not in items:
        raise ValueError(f"{name}: no file holds what begins at {offset}, or two boxes begin there")
    return items.pop((name, offset))


def get_class(value: Any) -> str:
    """Return the class name of an object, without the module, which has moved between versions."""
    return value.name.rpartition(".")[2] if isinstance(value, Foreign) else type(value).__name__


def attributes(value: Any, name: str) -> dict[str, Any]:
    """Return the attributes of an object of this class. Raises ValueError for another class."""
    if get_class(value) != name or not isinstance(value.state, dict):
        raise ValueError(f"{name} expected, got {get_class(value)}")
    return value.state


def get_dtype(properties: Any) -> torch.dtype:
    """Return the dtype of a TensorProperties, whose state is (dtype, layout, ...)."""
    dtype = properties.state[0]
    if get_class(properties) != "TensorProperties" or type(dtype) is not torch.dtype:
        raise ValueError("the dtype of a tensor expected")
    return dtype


def stored_item(storage: dict[str, Any], folder: Path) -> StoredItem:
    name = text(storage["relative_path"])
    if Path(name).name != name:
        raise ValueError(f"a plain file name expected, got {name!r}")
    if storage.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed; save it again without extensions")
    start, num_bytes = numbers((storage["offset"], storage["length"]))
    return StoredItem(folder / name, start, num_bytes)


def text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"text expected, got {type(value).__name__}")
    return value


def numbers(values: Any) -> tuple[int, ...]:
    """Parse a shape or an offset."""
    if type(values) not in (tuple, list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in values):
        raise ValueError("whole numbers expected")
    return tuple(values)


# ---- .distcp files -----------------------------------------------------------------------------------------

def check_files(metadata: DcpMetadata) -> None:
    """Raise ConfigError for a file that is missing, or shorter than .metadata says."""
    ends: dict[Path, int] = {}
    of_tensors = [item for items in metadata.items.values() for item in items]
    for stored in (*metadata.objects.values(), *of_tensors):
        ends[stored.file] = max(ends.get(stored.file, 0), stored.start + stored.num_bytes)
    for file, end in ends.items():
        if not file.exists():
            raise ConfigError(f"{file}: missing, though {METADATA} names it; copy it again")
        size = os.stat(file).st_size
        if size < end:
            raise ConfigError(f"{file}: truncated ({size:,} bytes, {METADATA} says {end:,}); copy it again")


def place_of(item: StoredItem, box: Box, dtype: torch.dtype) -> StoredTensor:
    """Locate the elements of a box. Raises ConfigError unless they form a tensor of its size and dtype."""
    where = f"{item.file}: {box}"
    with open_regular(item.file) as fd:
        if os.pread(fd, 4, item.start) == b"PK\3\4":
            stored = tree_at(fd, item.file, item.start, item.num_bytes, where)
        else:  # one safetensors file from there to the end
            stored = safetensors_table(item.file, item.start).get(box.key)
    if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (box.size, dtype):
        found = f"{stored.dtype} of {stored.shape}" if isinstance(stored, StoredTensor) else "something else"
        raise ConfigError(f"{where}: {METADATA} says {dtype} of {box.size}, the file has {found}")
    return stored
