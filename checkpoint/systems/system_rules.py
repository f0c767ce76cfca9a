"""Functions that the readers of other systems share: the args of a checkpoint as our model, and vocabularies
that are padded there.
"""
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.systems.composed import first_rows
from checkpoint.hf.families.family import Family
from checkpoint.hf.tensors import VOCAB_KEYS
from checkpoint.hf.rules import NotedKeys, UnlikeFamily, read_parts
from checkpoint.disk.tensors_by_name import NamedTensors
from config import ConfigError, ModelConfig
from config.reading import build_tree


def read_model(
    family: Family, args: Mapping[str, Any], where: str, *, is_whole: bool = True
) -> ModelConfig:
    """The model that the args of a checkpoint describe. is_whole: no other args are allowed.

    Raises ConfigError, beginning with `where`, for an arg that no rule reads, or with a value that our model
    has no form for.
    """
    keys = NotedKeys({**family.defaults, **args})
    try:
        fields = read_parts(family.rules, keys)
    except UnlikeFamily as error:
        raise ConfigError(f"{where}: {error}") from None
    unread = [key for key in args if key not in keys.asked]
    if unread and is_whole:
        raise ConfigError(f"{where}: {unread[0]}: nothing here reads this arg of {family.model_type}, so the "
                          "model may be another one; convert it to a Hugging Face folder")
    return build_tree(ModelConfig, fields, f"{where}: model.")


def check_dims(name: str, shape: Sequence[int], dims: int, where: str) -> None:
    """Raises ConfigError, beginning with `where`, for a tensor with another number of dims."""
    if len(shape) != dims:
        raise ConfigError(f"{where}: {name} has shape {list(shape)}, and {dims} dims are expected")


def cut_vocabulary(
    family: Family, model: ModelConfig, tensors: NamedTensors, *, run: ModelConfig, multiple: int
) -> tuple[ModelConfig, NamedTensors, tuple[str, ...]]:
    """(the model, its tensors, notes) without the rows of the vocabulary that only pad it.

    model.vocab: the rows there. They are the vocabulary of the run, padded to a multiple, or all of them
    count. Our own padding is that of the run.
    """
    model = replace(model, vocab_multiple=run.vocab_multiple)
    rows, ids = model.vocab, run.vocab
    if rows is None or ids is None or ids == rows or -(-ids // multiple) * multiple != rows:
        return model, tensors, ()
    names = {*(family.tensors[key] for key in VOCAB_KEYS), *family.copies(model)} & tensors.tensors.keys()
    note = f"the last {rows - ids:,} of {rows:,} rows of the vocabulary there only pad it; they are left out"
    return replace(model, vocab=ids), first_rows(tensors, dict.fromkeys(names, ids)), (note,)


def sealed_zip(file: Path) -> str:
    """The sha256 of what a zip file says of its members: names, sizes and CRCs."""
    with zipfile.ZipFile(file) as members:
        said = [(member.filename, member.file_size, member.CRC) for member in members.infolist()]
    return hashlib.sha256(repr(said).encode()).hexdigest()
