"""A folder of PEFT (checkpoint/hf/peft.py) and the base model that it names, read as one checkpoint of a
model with adapters (model.lora)."""
import contextlib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from checkpoint.disk.folder import StoredPiece
from checkpoint.disk.tensors_by_name import NamedTensors, named_tensors, one_line, safetensors_table
from checkpoint.hf.config import read_json
from checkpoint.hf.families.family import PLAIN_ARRANGEMENT
from checkpoint.hf.peft import BASE, CONFIG, PREFIX, WEIGHTS, module_name
from checkpoint.systems.foreign import ForeignIndex, WeightPlace, is_hf_folder, open_hf_folder
from config import ConfigError, LoraConfig, ModelConfig, Tree
from config.tree import plain_data
from model.lora import ALL, A, B, adapted_names
from parallel.sharding.boxes import Box

PAIR = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight")
SUFFIXES = {"A": A, "B": B}  # of our names
PLAIN: Tree = {  # {key of adapter_config.json that changes what the matrices mean: its values that are read}
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([],),
    "init_lora_weights": (True, False, "gaussian"),  # others also change the weights of the base
}


def seal_peft(folder: Path) -> str:
    """Return a sha256 of the adapters and their settings, which name the base."""
    contents = [(folder / name).read_bytes() for name in (CONFIG, WEIGHTS) if (folder / name).is_file()]
    return hashlib.sha256(b"".join(contents)).hexdigest()


def open_peft(folder: Path, run: ModelConfig) -> ForeignIndex:
    """Open a folder of PEFT, and the Hugging Face folder of its base, under our names. Reads only headers.

    run: the model of the run; where its model.lora.targets means the adapters of the folder, it is theirs.
    Raises ConfigError naming the file, and the key or tensor that is not read or does not fit the base.
    """
    path, file = folder / CONFIG, folder / WEIGHTS
    said = read_json(path)
    check_settings(said, path)
    base = open_hf_folder(base_folder(said, path))
    lora = lora_config(said, path)
    with_lora = replace(base.model, lora=lora)
    adapters = named_tensors(file, safetensors_table(file))
    places, pieces = place_adapters(adapters, base, with_lora, file)

    names = {key.removesuffix(A) for key in places if key.endswith(A)}
    targets = words_for(names, adapted_names(with_lora, ALL))
    if run.lora is not None and names == set(adapted_names(with_lora, run.lora.targets)):
        targets = run.lora.targets
    model = replace(base.model, lora=replace(lora, targets=targets))
    if run.lora is None:
        raise ConfigError(
            f"model.lora: {folder} has adapters, and the run none; set --model.lora.rank {lora.rank} "
            f"--model.lora.alpha {lora.alpha:g} --model.lora.scale {lora.scale} "
            f"--model.lora.targets {targets}"
        )
    return replace(
        base,
        path=folder,
        base=base.path,
        pieces=[*base.pieces, *pieces],
        meta={**base.meta, "config": {"model": plain_data(model)}},
        model=model,
        tensors=joined(base.tensors, adapters),
        places=base.places | places,
        notes=(*base.notes, f"{folder} has adapters of {len(names):,} projections of {base.path}"),
    )


def check_settings(said: Tree, path: Path) -> None:
    """Raise ConfigError for a setting that makes more of the matrices than s B A x."""
    for key, values in PLAIN.items():
        value = said.get(key)
        if value not in (None, *values) and value != ():
            read = " or ".join(map(repr, values))
            raise ConfigError(f"{path}: {key} is {value!r}, and only {read} is read; merge the adapter into "
                              "its base with PEFT (merge_and_unload), and give the merged folder")


def base_folder(said: Tree, path: Path) -> Path:
    """Return the Hugging Face folder that the settings name, relative to the working folder as in PEFT."""
    name = said.get(BASE)
    folder = Path(str(name))
    if not isinstance(name, str) or not is_hf_folder(folder):
        raise ConfigError(
            f"{path}: {BASE} is {name!r}, and no Hugging Face folder is there; download the "
            "base or export it (python -m scripts.convert to-hf), and write its folder there"
        )
    return folder


def lora_config(said: Tree, path: Path) -> LoraConfig:
    """Return model.lora without targets."""
    rank, alpha = said.get("r"), said.get("lora_alpha")
    for key, value, kinds in (("r", rank, int), ("lora_alpha", alpha, (int, float))):
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{path}: {key} is {value!r}, and should be a positive number")
    assert rank is not None and alpha is not None
    return LoraConfig(rank=rank, alpha=float(alpha), scale="rslora" if said.get("use_rslora") else "lora")


def place_adapters(
    adapters: NamedTensors, base: ForeignIndex, model: ModelConfig, file: Path
) -> tuple[dict[str, WeightPlace], list[StoredPiece]]:
    """Return ({our name: where the matrix is stored}, its pieces). Raises ConfigError naming the tensor."""
    assert model.lora is not None
    rank, family = model.lora.rank, base.family.model_type
    shapes = {piece.box.key: piece.box.shape for piece in base.pieces}
    modules: dict[str, str] = {}  # {their module: our projection}
    for name in adapted_names(model, ALL):
        with contextlib.suppress(ConfigError):  # stored with others, so PEFT has no pair for it
            modules[module_name(f"{name}.weight", family, model)] = name

    places: dict[str, WeightPlace] = {}
    pieces: list[StoredPiece] = []
    for stored, info in adapters.tensors.items():
        match = PAIR.fullmatch(stored)
        if match is None:
            raise ConfigError(f"{file}: {one_line(stored)} is not a lora_A or lora_B of a linear layer")
        if match["module"] not in modules:
            takers = sorted({module.rpartition(".")[2] for module in modules})
            raise ConfigError(f"{file}: {one_line(match['module'])} takes no adapter here; in the base "
                              f"{base.path} these do: {', '.join(takers)}")
        name = modules[match["module"]]
        outputs, inputs = shapes[f"{name}.weight"]
        shape = (rank, inputs) if match["matrix"] == "A" else (outputs, rank)
        if info.shape != shape or not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            raise ConfigError(
                f"{file}: {stored} is {info.dtype} {list(info.shape)}; with r {rank} of {CONFIG} and the "
                f"base {base.path} it is a float of {list(shape)}"
            )
        key = name + SUFFIXES[match["matrix"]]
        pieces.append(StoredPiece(Box.whole(key, shape), "F32", file="", name=stored, checksum=""))
        places[key] = WeightPlace(
            name=stored,
            arrangement=PLAIN_ARRANGEMENT,
            first=0,
            rows=shape[0],
            of=shape[0],
            stack=None,
            above=0.0,
        )
    for key in places:
        name = key.removesuffix(A).removesuffix(B)
        for matrix, suffix in SUFFIXES.items():
            if name + suffix not in places:
                raise ConfigError(f"{file}: has {places[key].name} without its lora_{matrix}; copy it again")
    if not places:
        raise ConfigError(f"{file}: holds no adapter")
    return places, pieces


def words_for(names: Iterable[str], every: Iterable[str]) -> str:
    """Return model.lora.targets for these projections, by their names within a layer if every layer has them.

    every: all that take an adapter.
    """
    within = {name.split(".", 2)[2] for name in names}
    is_whole = set(names) == {name for name in every if name.split(".", 2)[2] in within}
    return ",".join(sorted(within if is_whole else names))


def joined(base: NamedTensors, adapters: NamedTensors) -> NamedTensors:
    """Return the tensors of both."""
    return replace(
        base,
        tensors=base.tensors | adapters.tensors,
        read_box=lambda box: (adapters if box.key in adapters.tensors else base).read_box(box),
    )
