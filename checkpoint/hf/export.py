"""Export the weights of a Hugging Face folder on many ranks, directly from a checkpoint.

The ranks share the files, which are byte for byte those that a single process writes. A rank holds one tensor
of the folder at a time, read from pieces saved with any layout.
"""
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.files import (
    DIGESTS,
    WRITTEN_DIGEST,
    IntegrityError,
    StorageError,
    checksum_text,
    matches_checksum,
    open_shard,
    read_header,
)
from checkpoint.hf import tensors as hf
from checkpoint.hf.families.table import FAMILIES
from checkpoint.hf.tensors import HFTensor, Piece
from config import ModelConfig
from parallel.sharding.boxes import Box

Files = dict[str, list[HFTensor]]  # {file: its tensors}


def files_of_rank(files: Files, dtype: torch.dtype, rank: int, size: int) -> list[str]:
    """Return the files that a rank writes: greedily, the largest file goes to the rank with the least
    bytes."""
    def num_bytes(file: str) -> int:
        return sum(tensor.num_bytes(dtype) for tensor in files[file])

    loads = [0] * size
    results: list[str] = []
    for file in sorted(files, key=lambda file: (-num_bytes(file), file)):
        least = loads.index(min(loads))
        loads[least] += num_bytes(file)
        if least == rank:
            results.append(file)
    return results


@torch.no_grad()
def write_files(
    folder: Path,
    names: Sequence[str],
    files: Files,
    *,
    index: store.StoredIndex,
    model_type: str,
    model: ModelConfig,
    pieces: list[Piece],
    weights: str,
    dtype: torch.dtype,
    sharers: int = 1,
    merge: Callable[[list[Piece]], object] = lambda pieces: None,
) -> None:
    """Write these files of the folder, and read each back.

    `files` are those of the whole folder, without values. `pieces` are whole tensors under our keys, without
    values. `weights` is one of state.WEIGHTS. `sharers` counts the ranks on this machine. `merge` adds to
    loaded values what else the checkpoint has for them (checkpoint/hf/lora.py).
    Raises IntegrityError if the checkpoint is damaged, or StorageError, also if the disk returns different
    bytes.
    """
    get_parts: dict[str, list[tuple[Piece, Box]]] = defaultdict(list)  # by tensor of the folder
    for piece, (box, _) in zip(pieces, state.stored_as(index, pieces, weights)):
        get_parts[FAMILIES[model_type].hf_name(piece[0].key, model)].append((piece, box))
    stored = index.by_key()

    for name in names:
        keys = {box.key for tensor in files[name] for _, box in get_parts[tensor.name]}
        of_file = dataclasses.replace(index, pieces=[piece for key in keys for piece in stored.get(key, [])])
        digests = {tensor.name: DIGESTS[WRITTEN_DIGEST]() for tensor in files[name]}

        def read(tensor: HFTensor) -> HFTensor:
            if tensor.constant is not None:
                return tensor
            parts = get_parts[tensor.name]
            values = [(box, torch.empty(box.size, dtype=like.dtype)) for (box, like), _ in parts]
            wants = [(box, value) for (_, box), (_, value) in zip(parts, values)]
            store.start_load(of_file, wants, strict=False, sharers=sharers).fill()  # noqa: B023
            merge(values)
            hf.fold_mup(model, values)
            (found,) = hf.hf_tensors(model_type, model, values)
            return found

        def note(tensor: str, data: memoryview) -> None:
            digests[tensor].update(data)  # noqa: B023

        hf.write_tensors(folder / name, files[name], dtype, read=read, note=note)
        checksums = {key: checksum_text(WRITTEN_DIGEST, digest) for key, digest in digests.items()}
        check_file(folder / name, checksums)


def check_file(path: Path, checksums: dict[str, str]) -> None:
    """Raise StorageError unless the named tensors of a file have these checksums."""
    try:
        with open_shard(path) as fd:
            header, table = read_header(fd, path)
            for name, checksum in checksums.items():
                begin, end = table[name]["data_offsets"]
                if not matches_checksum(fd, len(header) + begin, end - begin, checksum):
                    raise IntegrityError(f"{path}: {name} is not what was written")
    except IntegrityError as error:
        raise StorageError(path, 0, f"what was written reads back differently: {error}") from error
