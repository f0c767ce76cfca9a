"""Read checkpoints of Megatron-LM: format torch_dist, and the older format with a file per rank.

    torch_dist    iter_N/metadata.json, .metadata, *.distcp; args in common.pt, or in the object common_state.
                  A tensor of all layers has a leading layer dim, or each layer has its own name.
    older         iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt: the tensors and args of one tensor- and
                  pipeline-parallel rank. Layers are counted from 0 in each stage.

In both, q, k and v are interleaved by groups of query heads, and [gate | up] are one matrix; in the older
format a rank has [its gate | its up].
"""
import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.disk.tensors_by_name import NamedTensors, Table, named_tensors, one_line
from checkpoint.hf.config import read_json
from checkpoint.systems.composed import StoredPart, composed
from checkpoint.systems.dcp import METADATA, open_dcp, read_object
from checkpoint.systems.foreign import ForeignIndex, foreign_index
from checkpoint.systems.megatron_args import (
    CUT_COLUMNS,
    CUT_ROWS,
    FC1,
    LAYER,
    MEGATRON,
    STACK_OF_EXPERTS,
    family_of,
    name_today,
)
from checkpoint.systems.pickled import Foreign, leaves, read_tree
from checkpoint.systems.system_rules import check_dims, cut_vocabulary, read_model, sealed_zip
from config import ConfigError, ModelConfig
from parallel.sharding.boxes import Box

TRACKER = "latest_checkpointed_iteration.txt"
BACKEND = "metadata.json"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
RANK_FILE = "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
CHUNK = re.compile(r"model(\d*)")  # of a stage with several chunks: model0, model1, ...
STACK = "decoder.layers."
VERSION = 2.0  # since then q, k and v are interleaved by heads

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EXPERT_TP = "expert_tensor_parallel_size"
BELOW_ONE = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")  # norm weights are stored as w - 1
EMBEDDING = "embedding.word_embeddings.weight"

Args = Mapping[str, Any]
Parts = dict[str, list[StoredPart]]


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint without its data.

    `shards` has for each tensor, under its current name, the whole tensor of each tensor-parallel rank, or
    the parts that make it if is_by_rank is false.
    """
    args: Args
    tensors: NamedTensors
    shards: Parts
    is_by_rank: bool = False


def find_megatron(path: Path) -> Path | None:
    """Return the folder of an iteration: the path itself, or the one in latest_checkpointed_iteration.txt."""
    tracker = path / TRACKER
    if tracker.is_file():
        text = tracker.read_text(errors="replace").strip()
        folder = path / (f"iter_{int(text):07d}" if text.isdecimal() else text)
        if text != "release" and not text.isdecimal() or not folder.is_dir():
            raise ConfigError(f"{tracker}: names {one_line(text)!r}, and {folder} is not there")
        return folder
    is_one = (path / BACKEND).is_file() or (path / COMMON).is_file() or any(path.glob("mp_rank_*"))
    return path if is_one else None


def open_megatron(folder: Path, run: ModelConfig) -> ForeignIndex:
    """Open the tensors of an iteration under our names. `run` is the model of the run, whose vocabulary
    may be padded there. Raises ConfigError naming the file, the arg or the tensor."""
    saved = read_ranks(folder) if any(folder.glob("mp_rank_*")) else read_torch_dist(folder)
    where = f"{folder}: args"
    for name, shards in saved.shards.items():
        dims = 3 if STACK_OF_EXPERTS.fullmatch(name) else 1 if name.endswith("bias") else 2
        for part in shards if CUT_ROWS.fullmatch(name) or CUT_COLUMNS.fullmatch(name) else []:
            check_dims(part.name, part.box.shape, dims, str(folder))
    rows = sum(part.box.shape[0] for part in saved.shards.get(EMBEDDING, []))
    args = {"padded_vocab_size": rows, **{key: arg for key, arg in saved.args.items() if arg is not None}}
    model = read_model(MEGATRON, args, where, is_whole=False)
    below_one = any(args.get(key) is True for key in BELOW_ONE)
    family = family_of(model, saved.shards, below_one)

    is_gated = model.mlp.activation == "swiglu"
    parts = saved.shards
    if saved.is_by_rank:
        parts = {name: joined_shards(name, shards, is_gated) for name, shards in parts.items()}
    tensors = composed(saved.tensors, parts)
    multiple = count(args, "make_vocab_size_divisible_by", where, 128) * count(args, TP, where)
    model, tensors, notes = cut_vocabulary(family, model, tensors, run=run, multiple=multiple)
    return foreign_index(folder, family, model, tensors, notes)


def seal_megatron(folder: Path) -> str:
    """Return the sha256 of what lists the tensors: .metadata, or the zip tables of all rank files."""
    if (folder / METADATA).is_file():
        return hashlib.sha256((folder / METADATA).read_bytes()).hexdigest()
    seals = "".join(sealed_zip(file) for _, file in sorted(places_of_ranks(folder).items()))
    return hashlib.sha256(seals.encode()).hexdigest()


def count(args: Args, key: str, where: str, default: int = 1) -> int:
    """Return a positive integer arg. Raises ConfigError."""
    value = args.get(key, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {key} = {value!r} is not a number above 0")
    return value


def args_in(tree: Any, where: str) -> Args:
    """Return the args of a checkpoint. Raises ConfigError if it has none."""
    args = tree.get("args") if isinstance(tree, dict) else None
    state = args.state if isinstance(args, Foreign) else args
    if not isinstance(state, dict):
        raise ConfigError(f"{where}: holds no args of Megatron-LM, which describe the model; convert the "
                          "weights to a Hugging Face folder")
    return state


# ---- torch_dist --------------------------------------------------------------------------------------------

def read_torch_dist(folder: Path) -> SavedModel:
    """Read a torch_dist folder, without tensor data. Raises ConfigError."""
    backend = read_json(folder / BACKEND).get("sharded_backend") if (folder / BACKEND).is_file() else None
    if backend not in (None, "torch_dist"):
        raise ConfigError(f"{folder / BACKEND}: sharded_backend {backend!r} is not read, only torch_dist; "
                          "save it with --ckpt-format torch_dist")
    tensors = open_dcp(folder)
    if (folder / COMMON).is_file():
        common = read_tree(folder / COMMON)
    elif COMMON_OBJECT in tensors.objects:
        (common,) = read_object(folder, COMMON_OBJECT)
    else:
        raise ConfigError(f"{folder}: holds neither {COMMON} nor common_state, and so no args of Megatron-LM")
    args = args_in(common, str(folder))

    parts: Parts = {}
    for stored, info in tensors.tensors.items():
        name, shape = name_today(stored), info.shape
        if name is None:
            continue
        if not name.startswith(STACK) or LAYER.match(name):
            parts[name] = [StoredPart.whole(name, stored, shape)]
            continue
        layers = args.get("num_layers")
        if not shape or shape[0] != layers:
            raise ConfigError(f"{folder}: {stored} has shape {list(shape)}, args say num_layers {layers}")
        for layer in range(shape[0]):
            own = f"{STACK}{layer}.{name.removeprefix(STACK)}"
            parts[own] = [StoredPart.whole(own, stored, shape[1:], at=(layer,))]
    return SavedModel(args, tensors, with_joined_halves(parts))


def with_joined_halves(parts: Parts) -> Parts:
    """Join gate and up of a layer again if they were saved as NAME_w and NAME_v."""
    joined: Parts = {}
    for name, of_tensor in parts.items():
        base = name[:-2] if name.endswith(("_w", "_v")) else name
        joined.setdefault(base, [])
        joined[base] += of_tensor
    return {
        name: of_tensor if len(of_tensor) == 1 else stacked(
            name, sorted(of_tensor, key=lambda part: part.name.endswith("_v")), dim=0
        )
        for name, of_tensor in joined.items()
    }


def stacked(name: str, parts: list[StoredPart], dim: int) -> list[StoredPart]:
    """Concatenate parts, each a whole tensor so far, along a dim."""
    first = parts[0].box.shape
    extent = sum(part.box.size[dim] for part in parts)
    shape = (*first[:dim], extent, *first[dim + 1:])
    results: list[StoredPart] = []
    at = 0
    for part in parts:
        start = tuple(at if number == dim else 0 for number in range(len(shape)))
        results.append(StoredPart(Box(name, shape, start, part.box.size), part.name, part.start))
        at += part.box.size[dim]
    return results


# ---- a file per rank ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class RankFile:
    """The file of a rank. `chunks` are those of its stage, as {current name: name in `table`}."""
    path: Path
    iteration: int | None
    args: Args
    chunks: list[dict[str, str]]
    table: Table


def read_ranks(folder: Path) -> SavedModel:
    """Read the files of all ranks, without tensor data. Raises ConfigError."""
    files = {place: read_rank(path, folder) for place, path in places_of_ranks(folder).items()}
    first = files[0, 0]
    tp, pp = (count(first.args, key, f"{first.path}: args") for key in (TP, PP))
    if first.args.get("num_experts") and first.args.get(EXPERT_TP) not in (None, tp):
        raise ConfigError(f"{first.path}: args: {EXPERT_TP} = {first.args[EXPERT_TP]!r} is not read beside "
                          f"{TP} {tp}; save it with --ckpt-format torch_dist")
    expected = {(t, p) for t in range(tp) for p in range(pp)}
    for what, wrong in (("missing", expected - files.keys()), ("one too many", files.keys() - expected)):
        if wrong:
            t, p = min(wrong)
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if p or pp > 1 else "")
            raise ConfigError(f"{folder}: {name} is {what}: args say {TP} {tp} and {PP} {pp}")
    for file in files.values():
        if file.iteration != first.iteration:
            raise ConfigError(f"{file.path}: of iteration {file.iteration}, and {first.path} of "
                              f"{first.iteration}; copy them again")

    table: Table = {}
    for file in files.values():
        table |= file.table
    shards = {
        name: [StoredPart.whole(name, stored, table[stored].shape) for stored in of_ranks]
        for name, of_ranks in names_over_stages(files, tp, pp).items()
    }
    return SavedModel(first.args, named_tensors(folder, table), shards, is_by_rank=True)


def places_of_ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """Return {(tensor-parallel rank, pipeline-parallel rank): its file}."""
    places: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = RANK.fullmatch(path.name)
        if match is None:
            raise ConfigError(f"{path}: not mp_rank_TT or mp_rank_TT_PPP; expert-parallel ranks are not "
                              "read: save it with --ckpt-format torch_dist")
        if not (path / RANK_FILE).is_file():
            raise ConfigError(f"{path / RANK_FILE}: missing; copy it again")
        places[int(match[1]), int(match[2] or 0)] = path / RANK_FILE
    if (0, 0) not in places:
        raise ConfigError(f"{folder}: the file of its first rank is missing (mp_rank_00 or mp_rank_00_000)")
    return places


def read_rank(path: Path, folder: Path) -> RankFile:
    """Read the file of one rank, without tensor data. Raises ConfigError."""
    tree = read_tree(path)
    args = args_in(tree, str(path))
    version = tree.get("checkpoint_version") or 0
    if not isinstance(version, (int, float)) or version < VERSION:
        raise ConfigError(f"{path}: checkpoint_version {version}: read is {VERSION} or later; save it again "
                          "with a later Megatron-LM")
    chunks: list[dict[str, str]] = []
    table: Table = {}
    models = sorted((key for key in tree if CHUNK.fullmatch(str(key))), key=lambda key: (len(key), key))
    for key in models:
        names: dict[str, str] = {}
        for stored, tensor in leaves(tree[key]):
            name = name_today(stored)
            if name is not None:
                names[name] = f"{path.relative_to(folder)}: {key}.{stored}"
                table[names[name]] = tensor
        chunks.append(names)
    if not chunks:
        raise ConfigError(f"{path}: holds no model")
    return RankFile(path, tree.get("iteration"), args, chunks, table)


def names_over_stages(files: Mapping[tuple[int, int], RankFile], tp: int, pp: int) -> dict[str, list[str]]:
    """Return {name in the whole model: its stored names, by tensor-parallel rank}.

    Chunks are interleaved across stages. Raises ConfigError if a rank lacks tensors of the first rank in its
    stage, or if a tensor occurs in two stages.
    """
    found: dict[str, list[str]] = defaultdict(list)
    first_layer = 0
    order = [(chunk, p) for chunk in range(len(files[0, 0].chunks)) for p in range(pp)]
    for chunk, p in order:
        own = files[0, p].chunks[chunk] if chunk < len(files[0, p].chunks) else {}
        layers = {int(match[1]) for name in own if (match := LAYER.match(name))}
        for t in range(tp):
            file = files[t, p]
            names = file.chunks[chunk] if chunk < len(file.chunks) else {}
            if names.keys() != own.keys():
                odd = min(names.keys() ^ own.keys())
                raise ConfigError(f"{file.path}: {odd} is in it or in {files[0, p].path}, and not in both")
            for name, stored in names.items():
                whole = LAYER.sub(lambda match: f"{STACK}{first_layer + int(match[1])}.", name)  # noqa: B023
                if len(found[whole]) != t:
                    raise ConfigError(f"{file.path}: {whole} is in another stage, too")
                found[whole].append(stored)
        first_layer += len(layers)
    return found


def joined_shards(name: str, shards: list[StoredPart], is_gated: bool) -> list[StoredPart]:
    """Return the parts of a tensor that is spread over the files of several ranks. Each rank has
    [its gate | its up]."""
    if CUT_COLUMNS.fullmatch(name):
        return stacked(name, shards, dim=1)
    if not CUT_ROWS.fullmatch(name):
        return shards[:1]
    if not (is_gated and FC1.fullmatch(name)):
        return stacked(name, shards, dim=0)
    halves: list[StoredPart] = []
    for half in range(2):
        for shard in shards:
            rows, *rest = shard.box.shape
            box = Box.whole(name, (rows // 2, *rest))
            start = (half * (rows // 2), *(0 for _ in rest))
            halves.append(StoredPart(box, shard.name, start))
    return stacked(name, halves, dim=0)
