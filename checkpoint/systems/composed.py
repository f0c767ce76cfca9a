"""Compose tensors from parts of others: tensor-parallel shards in several files, one entry of a stack of
layers, the first rows of a longer tensor, or another name.

Each read opens only the files that hold a part of the box.
"""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from checkpoint.disk.tensors_by_name import NamedTensors, TensorInfo
from config import ConfigError
from parallel.sharding.boxes import Box, check_tiling, plan_read


@dataclass(frozen=True)
class StoredPart:
    """A box of a composed tensor and its source: the stored tensor `name`, from element `start`.

    If the stored tensor has extra leading dims, it is read at one index of each.
    """
    box: Box
    name: str
    start: tuple[int, ...]

    @staticmethod
    def whole(key: str, name: str, shape: Sequence[int], at: Sequence[int] = ()) -> "StoredPart":
        """Return a part that makes a whole tensor from a stored one. `at` gives the indices in the stored
        tensor's extra leading dims."""
        return StoredPart(Box.whole(key, shape), name, (*at, *(0 for _ in shape)))


def composed(tensors: NamedTensors, parts: Mapping[str, Sequence[StoredPart]]) -> NamedTensors:
    """Return only the tensors {name: its parts}. A tensor keeps the dtype of its parts.

    Raises ConfigError naming a tensor whose parts overlap, leave a gap, exceed what is stored, or differ in
    dtype.
    """
    infos: dict[str, TensorInfo] = {}
    for key, of_tensor in parts.items():
        where = f"{tensors.where}: {key}"
        dtypes = {tensors.tensors[part.name].dtype for part in of_tensor}
        if len(dtypes) != 1:
            raise ConfigError(f"{where}: its parts have the dtypes {', '.join(sorted(map(str, dtypes)))}")
        for part in of_tensor:
            shape = tensors.tensors[part.name].shape
            if len(shape) != len(part.start) or any(
                end > extent for end, extent in zip(get_ends(part), shape)
            ):
                raise ConfigError(f"{where}: {part.box} does not lie inside {part.name} of {list(shape)}")
        try:
            check_tiling([part.box for part in of_tensor])
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        infos[key] = TensorInfo(of_tensor[0].box.shape, dtypes.pop())

    def read_box(want: Box) -> Tensor:
        of_tensor = parts[want.key]
        target = torch.empty(want.size, dtype=infos[want.key].dtype)
        for index, slices, target_slices in plan_read(want, [part.box for part in of_tensor]):
            part = of_tensor[index]
            ahead = len(part.start) - len(slices)
            inside = [slice(first + one.start, first + one.stop)
                      for first, one in zip(part.start[ahead:], slices)]
            place = [slice(first, first + 1) for first in part.start[:ahead]]
            value = tensors.read(part.name, (*place, *inside))
            target[target_slices] = value.view(value.shape[ahead:])
        return target

    return NamedTensors(tensors.where, infos, read_box, tensors.objects)


def get_ends(part: StoredPart) -> tuple[int, ...]:
    """Return where a part ends in the stored tensor, one number per dim."""
    ahead = len(part.start) - len(part.box.size)
    return tuple(first + size for first, size in zip(part.start, (*(1,) * ahead, *part.box.size)))


def renamed(tensors: NamedTensors, names: Mapping[str, str]) -> NamedTensors:
    """Return only the tensors {new name: name in `tensors`}."""
    return NamedTensors(
        tensors.where,
        {new: tensors.tensors[old] for new, old in names.items()},
        lambda box: tensors.read_box(replace(box, key=names[box.key])),
        tensors.objects,
    )


def first_rows(tensors: NamedTensors, rows: Mapping[str, int]) -> NamedTensors:
    """Return the tensors, some cut to fewer rows: {name: number of rows}."""
    cut = {
        name: [StoredPart.whole(name, name, (count, *tensors.tensors[name].shape[1:]))]
        for name, count in rows.items()
    }
    shorter = composed(tensors, cut)
    return replace(
        tensors,
        tensors=tensors.tensors | shorter.tensors,
        read_box=lambda box: (shorter if box.key in cut else tensors).read_box(box),
    )
