"""Initialize a new run with weights of other systems (checkpoint.init_from), read in pieces.

Each rank reads only the boxes that it holds, at most quantized.PIECE elements at a time, directly into its
weights. A family says what is renamed, stacked and transposed: one of checkpoint/hf/families for a Hugging
Face folder, that of the reader for another system (checkpoint/systems/foreign_systems.py). Quantized weights
are dequantized while reading (checkpoint/hf/quantized.py).
"""
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.disk.files import is_finite, raw_bytes
from checkpoint.disk.folder import StoredIndex, StoredPiece
from checkpoint.disk.tensors_by_name import NamedTensors, open_safetensors_folder
from checkpoint.hf import config as hf_config
from checkpoint.hf import tensors as hf
from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.table import FAMILIES, text_names
from checkpoint.hf.quantized import dequantized, split_into_pieces
from config import ConfigError, ModelConfig, NoPart, head_dim, kv_heads, layer_model, padded_vocab, value_dim
from config.tree import plain_data
from model.attention import AttentionConfig, HeadGate
from model.delta import DeltaConfig
from model.mamba import MambaConfig
from model.router import has_experts
from parallel.sharding.boxes import Box

OF_MIXTURES = ("router", "experts", "shared", "shared_gate")  # MLP tensors of mixtures
NUMBER = re.compile(r"\\\{(layer|expert)\\\}")  # in an escaped name of Family.tensors


@dataclass(frozen=True, kw_only=True)
class WeightPlace:
    """Where one of our tensors is stored: in their tensor `name`, `rows` rows from row `first` of each group.

    `of` counts the rows of a group. `stack` is the index in a leading dim that ours lacks, if there is one.
    `above` is added to their values to get ours.
    """
    name: str
    arrangement: Arrangement
    first: int
    rows: int
    of: int
    stack: int | None
    above: float


@dataclass(frozen=True, kw_only=True)
class ForeignIndex(StoredIndex):
    """A checkpoint of another system, as an index under our names.

    `pieces` has each tensor as a whole. For `sealed` see foreign_systems.ForeignSystem. `notes` are for the
    log. `base` is the Hugging Face folder beside adapters, which are at `path`.
    """
    family: Family
    model: ModelConfig
    tensors: NamedTensors
    places: dict[str, WeightPlace]
    sealed: str = ""
    notes: tuple[str, ...] = ()
    base: Path | None = None


@dataclass(frozen=True, kw_only=True)
class HFFolder:
    """A Hugging Face folder, dequantized.

    `files` has all tensors, under the names in the files. `weights` has those of the model, under the names
    of the whole model. `model` is what config.json describes; the weights may lack a head or modules of
    multi-token prediction (hf.tie_embeddings). `quantized` is the method of quantization, or "".
    """
    path: Path
    family: Family
    model: ModelConfig
    files: NamedTensors
    weights: NamedTensors
    quantized: str


@dataclass(frozen=True)
class ForeignLoad:
    """Boxes to read from a foreign folder, the counterpart of store.StartedLoad."""
    index: ForeignIndex
    wants: Sequence[tuple[Box, Tensor]]

    @torch.no_grad()
    def fill(self) -> None:
        """Read the boxes. Rows that pad the vocabulary are unchanged. Raises ConfigError naming folder and
        tensor."""
        for box, tensor in self.wants:
            if box.key in hf.VOCAB_KEYS:
                rows = max(0, min(box.size[0], vocab_rows(self.index, box.key) - box.start[0]))
                box, tensor = box.rows(0, rows), tensor[:rows]
            if box.volume:
                for piece in split_into_pieces(box, range(len(box.size))):
                    read_piece(self.index, piece, tensor[place_in(piece, box)])


def vocab_rows(index: ForeignIndex, key: str) -> int:
    """Return the number of rows of the folder's embedding or head."""
    return index.tensors.tensors[index.places[key].name].shape[0]


def place_in(piece: Box, box: Box) -> tuple[slice, ...]:
    """Return the slices of a piece within the tensor of its box."""
    place: list[slice] = []
    for start, size, box_start in zip(piece.start, piece.size, box.start):
        first = start - box_start
        place.append(slice(first, first + size))
    return tuple(place)


def read_piece(index: ForeignIndex, piece: Box, target: Tensor) -> None:
    """Read one piece of one of our tensors. Raises ConfigError, also for NaN and Inf."""
    place = index.places[piece.key]
    arrangement = place.arrangement

    # the groups that contain the piece's rows; for a single group only the rows
    begin, end = piece.start[0], piece.start[0] + piece.size[0]
    first_group, last_group = begin // place.rows, -(-end // place.rows)
    in_groups = arrangement.groups > 1 or arrangement.turned
    if not in_groups:
        rows = slice(place.first + begin, place.first + end)
    else:
        rows = slice(first_group * place.of, last_group * place.of)
    slices = [rows, *(slice(start, start + size) for start, size in zip(piece.start[1:], piece.size[1:]))]
    if arrangement.inner:
        slices.insert(1, slice(0, 1))
    if arrangement.outer:
        slices.insert(0, slice(0, 1))
    if arrangement.transpose:
        slices.reverse()
    if place.stack is not None:
        slices.insert(0, slice(place.stack, place.stack + 1))

    value = index.tensors.read(place.name, tuple(slices))
    if not is_finite(raw_bytes(value), value.dtype):
        raise ConfigError(f"{index.path}: {place.name} holds NaN or Inf; these weights are damaged")
    if place.stack is not None:
        value = value.squeeze(0)
    if arrangement.transpose:
        value = value.t()
    if arrangement.outer:
        value = value.squeeze(0)
    if arrangement.inner:
        value = value.squeeze(1)
    if in_groups:
        grouped = value.unflatten(0, (-1, place.of))[:, place.first:place.first + place.rows]
        if arrangement.turned:
            grouped = grouped.roll(place.rows // 2, 1)
        value = grouped.flatten(0, 1)[begin - first_group * place.rows:][:end - begin]
    target.copy_(value)
    if place.above:
        target.add_(place.above)


# ---- the folder --------------------------------------------------------------------------------------------

def is_hf_folder(path: Path) -> bool:
    """Return whether a folder is from Hugging Face, and not a checkpoint or run of ours."""
    ours = (path / "index.json").exists() or (path / "checkpoints").is_dir()
    return (path / "config.json").is_file() and not ours


def open_hf_folder(folder: Path) -> ForeignIndex:
    """Open a Hugging Face folder under our names. Reads only config.json and the headers.

    Raises ConfigError naming the file, and the tensor that is unknown, duplicated or of an unexpected shape.
    """
    return index_hf_folder(read_hf_folder(folder))


def index_hf_folder(folder: HFFolder) -> ForeignIndex:
    """Return the index of a Hugging Face folder under our names.

    Raises ConfigError naming the folder, and the tensor that is unknown or of an unexpected shape.
    """
    model = hf.tie_embeddings(folder.model, folder.family, folder.weights.tensors)
    notes = tuple(hf.unread_notes(folder.files.tensors, folder.family, model.layers))
    return foreign_index(folder.path, folder.family, model, folder.weights, notes)


def read_hf_folder(folder: Path) -> HFFolder:
    """Read config.json and the headers of a Hugging Face folder.

    Raises ConfigError naming the file, and what is not supported or damaged.
    """
    path = folder / "config.json"
    quantization = hf_config.read_keys(path).get(hf_config.QUANTIZATION)
    model_type, model = hf_config.read_hf_config(folder, but=(hf_config.QUANTIZATION,))
    family = FAMILIES[model_type]
    files = open_safetensors_folder(folder)
    if quantization is not None:
        files = dequantized(files, quantization, path)
    return HFFolder(
        path=folder,
        family=family,
        model=model,
        files=files,
        weights=with_full_names(files, family, model),
        quantized=quantization["quant_method"] if quantization is not None else "",
    )


def foreign_index(
    folder: Path,
    family: Family,
    model: ModelConfig,
    tensors: NamedTensors,
    notes: tuple[str, ...] = (),
) -> ForeignIndex:
    """Index the tensors under our names. `folder` names the checkpoint in errors.

    Raises ConfigError naming the tensor that is unknown, not a float, or of an unexpected shape.
    """
    places: dict[str, WeightPlace] = {}
    pieces: list[StoredPiece] = []
    copies, constants = family.copies(model), family.get_constants(model)
    known = [(re.compile(pattern), keys) for pattern, keys in weight_patterns(family).items()]
    for name, info in tensors.tensors.items():
        if name in copies:
            continue
        if name in constants:
            hf.check_constant(name, tensors.read(name, ()), constants[name])
            continue
        if not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            raise ConfigError(f"{folder}: {name} is {info.dtype}; only plain floats are read, and for "
                              "Hugging Face what a quantization_config in config.json describes")
        match, keys = next(
            ((match, keys) for pattern, keys in known if (match := pattern.fullmatch(name))), (None, [])
        )
        if match is None:
            raise ConfigError(f"{folder}: {name} is not a weight of {family.model_type}")
        found = places_in(
            family,
            model,
            name=name,
            shape=info.shape,
            keys=keys,
            numbers=match.groupdict(),
            where=f"{folder}: {name}",
        )
        for box, place in found:
            places[box.key] = place
            pieces.append(StoredPiece(box, "F32", file="", name=name, checksum=""))
    return ForeignIndex(
        path=folder,
        save_id="",
        step=0,
        files={},
        pieces=pieces,
        meta={"tokenizer": "none", "step": 0, "config": {"model": plain_data(model)}},
        family=family,
        model=model,
        tensors=tensors,
        places=places,
        notes=notes,
    )


def with_full_names(tensors: NamedTensors, family: Family, model: ModelConfig) -> NamedTensors:
    """Return the tensors under the names of the whole model, without buffers."""
    names = text_names(tensors.tensors)
    # the hub's gpt2, and base models without a head, are saved without the prefix
    bare = not any(name.startswith(family.prefix) for name in names)
    stored = {
        text if text == family.head or not bare else family.prefix + text: name
        for text, name in names.items()
    }
    stored = {
        family.usual_name(full, model): name for full, name in stored.items()
        if hf.is_weight(full, family, model.layers)
    }
    return replace(
        tensors,
        tensors={full: tensors.tensors[name] for full, name in stored.items()},
        read_box=lambda box: tensors.read_box(replace(box, key=stored[box.key])),
    )


def weight_patterns(family: Family) -> dict[str, list[str]]:
    """Return {pattern of their name: our names that it holds, in order}."""
    found: dict[str, list[str]] = defaultdict(list)
    for names in (family.tensors, *family.of_mixers.values()):
        for ours, theirs in names.items():
            pattern = NUMBER.sub(r"(?P<\1>\\d+)", re.escape(theirs))
            if ours not in found[pattern]:
                found[pattern].append(ours)
    return found


def places_in(
    family: Family,
    model: ModelConfig,
    *,
    name: str,
    shape: tuple[int, ...],
    keys: list[str],
    numbers: dict[str, str],
    where: str,
) -> Iterator[tuple[Box, WeightPlace]]:
    """Yield our whole tensors that one of theirs holds, with their places. `keys` are our names, with {layer}
    and {expert}; `numbers` holds the values found in their name.

    Raises ConfigError, beginning with `where`, if the shape contradicts the model.
    """
    of_first = {"expert": "0", **numbers}
    keys = [key for key in keys if has_part_for(model, key.format(**of_first))] or keys
    own_keys = [key.format(**of_first) for key in keys]
    arrangement = family.arrangement(own_keys[0], model)
    has_shape = f"{where} has shape {list(shape)}"
    dims = 1 + arrangement.inner + (arrangement.leading is not None)
    if len(shape) < dims:
        raise ConfigError(f"{has_shape}, and at least {dims} dims are expected")
    inner = shape
    if arrangement.leading is not None:
        if shape[0] != arrangement.leading:
            raise ConfigError(f"{has_shape}, {family.config} makes its first dim {arrangement.leading:,}")
        inner = shape[1:]
    if len(inner) > 1 + arrangement.inner and arrangement.transpose:
        inner = inner[::-1]
    if arrangement.outer:
        if inner[:1] != (1,):
            raise ConfigError(f"{has_shape}, and the dim before its rows should be 1")
        inner = inner[1:]
    total, *rest = inner
    if arrangement.inner:
        if rest[:1] != [1]:
            raise ConfigError(f"{has_shape}, and its second dim should be 1")
        rest = rest[1:]
    of_each = make_rows(model, own_keys, total)
    if sum(of_each) != total:
        raise ConfigError(f"{has_shape}, {family.config} makes it {sum(of_each):,} rows")
    if any(rows % arrangement.groups for rows in of_each):
        raise ConfigError(f"{has_shape}, and its rows are not {arrangement.groups:,} groups")

    for stack in range(arrangement.leading or 1):
        first = 0
        for key, rows in zip(keys, of_each):
            own = key.format(**{"expert": str(stack), **numbers})
            place = WeightPlace(
                name=name,
                arrangement=arrangement,
                first=first,
                rows=rows // arrangement.groups,
                of=total // arrangement.groups,
                stack=None if arrangement.leading is None else stack,
                above=hf.above_theirs(family, own),
            )
            first += place.rows
            if own in hf.VOCAB_KEYS:
                if rows != model.vocab:
                    raise ConfigError(f"{where} has {rows:,} rows, {family.config} {model.vocab:,}")
                rows = padded_vocab(model)
            yield Box.whole(own, (rows, *rest)), place


def has_part_for(model: ModelConfig, key: str) -> bool:
    """Return whether the layer of our tensor `key` has the part that the tensor belongs to. One of their
    names may stand for tensors of different parts."""
    section, *names = key.split(".")
    if section != "layers":
        return True
    layer, part, *rest = int(names[0]), *names[1:]
    if part.startswith("attn"):
        return not isinstance(layer_model(model, layer).mixer, NoPart)
    if part != "mlp":
        return not isinstance(layer_model(model, layer).mlp, NoPart)
    return (rest[0] in OF_MIXTURES) == has_experts(model, layer)


def make_rows(model: ModelConfig, keys: list[str], total: int) -> list[int]:
    """Return the rows of each of our tensors that are stacked in one of theirs with `total` rows."""
    if len(keys) == 1:
        return [total]
    sizes = {}
    if ".attn." in keys[0]:
        sizes = mixer_rows(layer_model(model, int(keys[0].split(".")[1])))
    return [sizes.get(key.split(".")[3].removesuffix("_conv"), total // len(keys)) for key in keys]


def mixer_rows(model: ModelConfig) -> dict[str, int]:
    """Return {projection of a mixer, by our name: rows of its matrix}, where the rows differ."""
    mixer = model.mixer
    match mixer:
        case AttentionConfig():
            queries, keys = mixer.heads * head_dim(model), kv_heads(model) * head_dim(model)
            values = kv_heads(model) * value_dim(model)
            gate = mixer.heads * (1 if isinstance(mixer.gate, HeadGate) else value_dim(model))
            return {"q": queries, "k": keys, "v": values, "gate": gate}
        case DeltaConfig():
            keys = (mixer.key_heads or mixer.heads) * mixer.key_dim
            return {"q": keys, "k": keys, "v": mixer.heads * mixer.v_dim, "z": mixer.heads * mixer.v_dim}
        case MambaConfig():
            inner, shared = mixer.heads * mixer.dim, mixer.groups * mixer.state
            return {"z": inner, "x": inner, "B": shared, "C": shared, "dt": mixer.heads}
    return {}


def check_copies(index: ForeignIndex) -> None:
    """Raise ConfigError if a duplicate tensor in the folder differs from the first copy."""
    for name, key in index.family.copies(index.model).items():
        if name not in index.tensors.tensors or key not in index.places:
            continue
        first, shape = index.places[key].name, index.tensors.tensors[name].shape
        is_same = shape == index.tensors.tensors[first].shape
        for piece in split_into_pieces(Box.whole(name, shape), range(len(shape))):
            other = replace(piece, key=first)
            if not is_same or not torch.equal(index.tensors.read_box(piece), index.tensors.read_box(other)):
                why = f"from {first}, and {index.family.config} says that they are one"
                if name != index.family.head:
                    whole = "head" if key == "head.weight" else "embedding"
                    why = f"from the {whole}, but multi-token prediction shares it"
                raise ConfigError(f"{index.path}: {name} differs {why}")
