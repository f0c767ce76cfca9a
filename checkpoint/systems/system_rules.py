"""Helpers shared by the readers of other systems: converting args to our model, and cutting padded
vocabularies."""
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.disk.tensors_by_name import NamedTensors
from checkpoint.hf.families.family import Family
from checkpoint.hf.rules import FamilyError, TrackedKeys, read_parts
from checkpoint.hf.tensors import VOCAB_KEYS
from checkpoint.systems.composed import first_rows
from config import ConfigError, ModelConfig
from config.reading import build_tree


def read_model(
    family: Family, args: Mapping[str, Any], where: str, *, is_whole: bool = True
) -> ModelConfig:
    """Return the model described by the args of a checkpoint. With `is_whole`, no other args are allowed.

    Raises ConfigError, beginning with `where`, for an arg that no rule reads, or whose value our model cannot
    express.
    """
    keys = TrackedKeys({**family.defaults, **args})
    try:
        fields = read_parts(family.rules, keys)
    except FamilyError as error:
        raise ConfigError(f"{where}: {error}") from None
    unread = [key for key in args if key not in keys.asked]
    if unread and is_whole:
        raise ConfigError(f"{where}: {unread[0]}: this arg is unknown for {family.model_type}, so the "
                          "model may be a different one; convert it to a Hugging Face folder")
    return build_tree(ModelConfig, fields, f"{where}: model.")


def check_dims(name: str, shape: Sequence[int], dims: int, where: str) -> None:
    """Raise ConfigError, beginning with `where`, for a tensor with another number of dims."""
    if len(shape) != dims:
        raise ConfigError(f"{where}: {name} has shape {list(shape)}, and {dims} dims are expected")


def cut_vocabulary(
    family: Family, model: ModelConfig, tensors: NamedTensors, *, run: ModelConfig, multiple: int
) -> tuple[ModelConfig, NamedTensors, tuple[str, ...]]:
    """Return (model, tensors, notes) without the rows that only pad the vocabulary.

    model.vocab counts the rows there. If they are the run's vocabulary padded to `multiple`, the rest is cut;
    otherwise all rows count. Our own padding is that of the run.
    """
    model = replace(model, vocab_multiple=run.vocab_multiple)
    rows, ids = model.vocab, run.vocab
    if rows is None or ids is None or ids == rows or -(-ids // multiple) * multiple != rows:
        return model, tensors, ()
    names = {*(family.tensors[key] for key in VOCAB_KEYS), *family.copies(model)} & tensors.tensors.keys()
    note = f"the last {rows - ids:,} of {rows:,} rows of the vocabulary there are padding and are skipped"
    return replace(model, vocab=ids), first_rows(tensors, dict.fromkeys(names, ids)), (note,)


def sealed_zip(file: Path) -> str:
    """Return the sha256 of a zip file's directory: names, sizes and CRCs."""
    with zipfile.ZipFile(file) as members:
        said = [(member.filename, member.file_size, member.CRC) for member in members.infolist()]
    return hashlib.sha256(repr(said).encode()).hexdigest()
