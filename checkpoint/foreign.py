"""Hugging Face folders as what a new run begins with (checkpoint.init_from), read in pieces.

Each rank reads of each tensor the boxes that it holds, at most quantized.PIECE elements at a time, straight
into its weights. The families (checkpoint/hf_families.py) say the names, what is stacked and what is
transposed; quantized weights are read as plain ones (checkpoint/quantized.py).
"""
import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import hf, hf_config
from checkpoint.files import is_finite, raw_bytes
from checkpoint.folder import StoredIndex, StoredPiece
from checkpoint.hf_families import FAMILIES, Family
from checkpoint.quantized import dequantized, pieces_of
from checkpoint.tensors_by_name import NamedTensors, open_safetensors_folder
from config import ConfigError, ModelConfig, head_dim, kv_heads, layer_model, padded_vocab
from config.tree import plain_data
from parallel.sharding.boxes import Box

QUANTIZATION = "quantization_config"
NUMBER = re.compile(r"\\\{(layer|expert)\\\}")  # in an escaped name of Family.tensors


@dataclass(frozen=True)
class WeightPlace:
    """Where one of our tensors lies: in their tensor `name`, from row `first` on, before it is transposed."""
    name: str
    first: int
    transpose: bool
    above: float = 0.0  # what ours is above theirs


@dataclass(frozen=True, kw_only=True)
class ForeignIndex(StoredIndex):
    """A folder of another system, as an index of our names. pieces: each tensor, whole. sealed: sha256 of
    config.json."""
    model: ModelConfig
    tensors: NamedTensors
    places: dict[str, WeightPlace]
    sealed: str


@dataclass(frozen=True)
class ForeignLoad:
    """Boxes of a foreign folder that are to be read, as store.StartedLoad is of a checkpoint of ours."""
    index: ForeignIndex
    wants: Sequence[tuple[Box, Tensor]]

    @torch.no_grad()
    def fill(self) -> None:
        """Reads them. Rows that pad the vocabulary stay. Raises ConfigError naming the folder and tensor."""
        for box, tensor in self.wants:
            if box.key in hf.VOCAB_KEYS:
                rows = max(0, min(box.size[0], vocab_rows(self.index, box.key) - box.start[0]))
                box, tensor = box.rows(0, rows), tensor[:rows]
            if box.volume:
                for piece in pieces_of(box, range(len(box.size))):
                    read_piece(self.index, piece, tensor[place_in(piece, box)])


def vocab_rows(index: ForeignIndex, key: str) -> int:
    """The rows that the folder has of the embedding or the head."""
    return index.tensors.tensors[index.places[key].name].shape[0]


def place_in(piece: Box, box: Box) -> tuple[slice, ...]:
    """Where a piece lies in the tensor of its box."""
    firsts = [one - begin for one, begin in zip(piece.start, box.start)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, piece.size))


def read_piece(index: ForeignIndex, piece: Box, target: Tensor) -> None:
    """Reads one piece of one of our tensors. Raises ConfigError, also for NaN and Inf."""
    place = index.places[piece.key]
    slices = [slice(start, start + size) for start, size in zip(piece.start, piece.size)]
    slices[0] = slice(slices[0].start + place.first, slices[0].stop + place.first)
    value = index.tensors.read(place.name, tuple(slices[::-1] if place.transpose else slices))
    if not is_finite(raw_bytes(value), value.dtype):
        raise ConfigError(f"{index.path}: {place.name} holds NaN or Inf; these weights are damaged")
    target.copy_(value.t() if place.transpose else value)
    if place.above:
        target.add_(place.above)


# ---- the folder --------------------------------------------------------------------------------------------

def is_hf_folder(path: Path) -> bool:
    """Whether a folder is one of Hugging Face, and no checkpoint or run of ours."""
    ours = (path / "index.json").exists() or (path / "checkpoints").is_dir()
    return (path / "config.json").is_file() and not ours


def open_hf_folder(folder: Path) -> ForeignIndex:
    """The tensors of a Hugging Face folder under our names. Reads config.json and the headers alone.

    Raises ConfigError naming the file, and the tensor that is unknown, doubled or of an unlikely shape.
    """
    path = folder / "config.json"
    quantization = hf_config.read_json(path).get(QUANTIZATION)
    model_type, model = hf_config.read_hf_config(folder, but=(QUANTIZATION,))
    family = FAMILIES[model_type]
    if family.leading:
        raise ConfigError(
            f"{folder}: {model_type} stacks what our model has apart; convert it first: "
            f"python -m scripts.convert from-hf {folder} RUN, then checkpoint.init_from RUN")
    tensors = open_safetensors_folder(folder)
    if quantization is not None:
        tensors = dequantized(tensors, quantization, path)
    tensors = with_full_names(tensors, family)
    model = hf.tie_embeddings(model, tensors.tensors)

    places: dict[str, WeightPlace] = {}
    pieces: list[StoredPiece] = []
    copies = family.copies(model)
    known = [(re.compile(pattern), keys) for pattern, keys in patterns_of(family).items()]
    for name, info in tensors.tensors.items():
        if name in copies:
            continue
        if not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            raise ConfigError(f"{folder}: {name} is {info.dtype}; plain floats, or a quantization_config in "
                              "config.json that says how they are quantized, are read")
        match, keys = next(
            ((match, keys) for pattern, keys in known if (match := pattern.fullmatch(name))), (None, [])
        )
        if match is None:
            raise ConfigError(f"{folder}: {name} is not a weight of {model_type}")
        own_keys = [key.format(**match.groupdict()) for key in keys]
        transpose = family.conv1d and len(info.shape) == 2 and own_keys[0].startswith("layers.")
        shape = info.shape[::-1] if transpose else info.shape
        first = 0
        for key, rows in zip(own_keys, rows_of(model, own_keys, shape, f"{folder}: {name}")):
            places[key] = WeightPlace(name, first, transpose, above=hf.above_theirs(family, key))
            first += rows
            if key in hf.VOCAB_KEYS:
                if rows != model.vocab:
                    raise ConfigError(f"{folder}: {name} has {rows:,} rows, config.json {model.vocab:,}")
                rows = padded_vocab(model)
            box = Box.whole(key, (rows, *shape[1:]))
            pieces.append(StoredPiece(box, "F32", file="", name=name, checksum=""))
    return ForeignIndex(
        path=folder,
        save_id="",
        step=0,
        files={},
        pieces=pieces,
        meta={"tokenizer": "none", "step": 0, "config": {"model": plain_data(model)}},
        model=model,
        tensors=tensors,
        places=places,
        sealed=hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def with_full_names(tensors: NamedTensors, family: Family) -> NamedTensors:
    """The tensors under the names of the whole model, without buffers: see hf.stored_tensors."""
    bare = not any(name.startswith(family.prefix) for name in tensors.tensors)
    stored = {name if name == hf.HEAD or not bare else family.prefix + name: name for name in tensors.tensors}
    stored = {full: name for full, name in stored.items() if not hf.BUFFERS.fullmatch(full)}
    return replace(
        tensors,
        tensors={full: tensors.tensors[name] for full, name in stored.items()},
        read_box=lambda box: tensors.read_box(replace(box, key=stored[box.key])),
    )


def patterns_of(family: Family) -> dict[str, list[str]]:
    """{pattern of their name: our names that it holds, in their order}."""
    found: dict[str, list[str]] = defaultdict(list)
    for ours, theirs in family.tensors.items():
        found[NUMBER.sub(r"(?P<\1>\\d+)", re.escape(theirs))].append(ours)
    return found


def rows_of(model: ModelConfig, keys: list[str], shape: tuple[int, ...], where: str) -> list[int]:
    """The rows of each of our tensors that one of theirs stacks: q, k and v, or gate and up."""
    if len(keys) == 1:
        return [shape[0]]
    if len(keys) == 2:
        rows = [shape[0] // 2] * 2
    else:
        like = layer_model(model, int(keys[0].split(".")[1]))
        rows = [head_dim(like) * heads for heads in (like.mixer.heads, kv_heads(like), kv_heads(like))]
    if sum(rows) != shape[0]:
        raise ConfigError(f"{where} has {shape[0]:,} rows, config.json makes it {sum(rows):,}")
    return rows


def check_copies(index: ForeignIndex, model_type: str) -> None:
    """Raises ConfigError if a tensor that the folder has a second time differs from the first."""
    for name, key in FAMILIES[model_type].copies(index.model).items():
        if name not in index.tensors.tensors or key not in index.places:
            continue
        first, shape = index.places[key].name, index.tensors.tensors[name].shape
        is_same = shape == index.tensors.tensors[first].shape
        for piece in pieces_of(Box.whole(name, shape), range(len(shape))):
            other = replace(piece, key=first)
            if not is_same or not torch.equal(index.tensors.read_box(piece), index.tensors.read_box(other)):
                raise ConfigError(f"{index.path}: {name} differs from {first}, and config.json says that "
                                  "they are one")
