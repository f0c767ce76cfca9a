"""Dequantize the weights of a Hugging Face folder, one box at a time.

Supported: fp8 with a scale per tensor, row or block (quant_method fp8 of DeepSeek V3, Qwen3 and vLLM;
fbgemm_fp8; compressed-tensors of format float-quantized), and mxfp4 of gpt-oss. Reading a box reads the
blocks that it touches, and takes a few times PIECE elements in addition to the box. Weights are returned in
fp32, so the product of a number and its scale is rounded once; those of mxfp4 in bf16, which is exact.

Sources: arXiv 2412.19437, section 3.3 (blocks of 128 x 128); OCP Microscaling Formats 1.0, sections 5.3.3 and
5.4.1 (E2M1 and E8M0); transformers, integrations/finegrained_fp8.py and integrations/mxfp4.py (names and
layouts).
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.disk.files import TensorTable, header_bytes, raw_bytes, storage_errors
from checkpoint.disk.tensors_by_name import SAFETENSORS_DTYPES, SINGLE_NAME, NamedTensors, TensorInfo
from config import ConfigError, Tree
from parallel.sharding.boxes import Box

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_scale_ub")  # not used for weights
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and their negatives
GROUP = 32  # MXFP4 values per scale
PIECE = 1 << 20  # elements dequantized at a time

ReadBox = Callable[[Box], Tensor]


@dataclass(frozen=True)
class PlainTensor:
    """A dequantized tensor. `stands_for` lists the names in the folder that it replaces."""
    info: TensorInfo
    read: ReadBox
    stands_for: tuple[str, ...]


def dequantized(tensors: NamedTensors, quantization: Tree, where: Path) -> NamedTensors:
    """Return the tensors of a folder under their plain names, dequantized.

    `quantization` is quantization_config of config.json, whose path is `where`. Raises ConfigError naming the
    file and the unsupported setting, or the folder and the tensor whose scale is missing or does not fit.
    """
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"{where}: quantization_config.quant_method: {method!r} is not read; "
                          f"these are: {', '.join(METHODS)}")
    plain = METHODS[method](tensors, quantization, where)

    replaced = {name for one in plain.values() for name in one.stands_for}
    infos = {name: info for name, info in tensors.tensors.items() if name not in replaced}
    for name, one in plain.items():
        if name in infos:
            raise ConfigError(f"{tensors.where}: {name} is stored both plain and quantized")
        infos[name] = one.info
    return NamedTensors(
        tensors.where,
        infos,
        lambda box: plain[box.key].read(box) if box.key in plain else tensors.read_box(box),
        tensors.objects,
    )


def filled_in_pieces(box: Box, dtype: torch.dtype, read: ReadBox, dims: Sequence[int]) -> Tensor:
    """Read the box piece by piece. `dims` gives the order in which it is split."""
    target = torch.empty(box.size, dtype=dtype)
    for piece in split_into_pieces(box, dims) if box.volume else []:
        target[piece.slices_in(box)] = read(piece)
    return target


def split_into_pieces(box: Box, dims: Sequence[int]) -> list[Box]:
    """Split `box` into boxes of at most PIECE elements."""
    if box.volume <= PIECE:
        return [box]
    dim = next(dim for dim in dims if box.size[dim] > 1)
    half = box.size[dim] // 2
    start = [*box.start[:dim], box.start[dim] + half, *box.start[dim + 1:]]
    sizes = [(*box.size[:dim], size, *box.size[dim + 1:]) for size in (half, box.size[dim] - half)]
    first = Box(box.key, box.shape, box.start, sizes[0])
    rest = Box(box.key, box.shape, tuple(start), sizes[1])
    return split_into_pieces(first, dims) + split_into_pieces(rest, dims)


def write_dequantized(folder: Path, tensors: NamedTensors) -> None:
    """Write all tensors, dequantized, to one safetensors file in `folder`, at most PIECE elements at a time.

    Raises StorageError.
    """
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    table: TensorTable = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in tensors.tensors.items():
        begin, end = end, end + prod(info.shape) * info.dtype.itemsize
        table[name] = {"dtype": names[info.dtype], "shape": info.shape, "data_offsets": [begin, end]}
    path = folder / SINGLE_NAME
    with storage_errors(path, end), open(path, "xb") as file:
        file.write(header_bytes(table))
        for name, info in tensors.tensors.items():
            # split by the first dims first, so that pieces follow each other in the file
            for piece in split_into_pieces(Box.whole(name, info.shape), range(len(info.shape))):
                file.write(raw_bytes(tensors.read_box(piece)).data)


# ---- fp8 ---------------------------------------------------------------------------------------------------

def fp8_weights(tensors: NamedTensors, quantization: Tree, where: Path) -> dict[str, PlainTensor]:
    """Read quant_method fp8: weight_scale_inv (DeepSeek) or weight_scale (vLLM). Both are factors."""
    block = quantization.get("weight_block_size")
    return scaled_weights(tensors, ("_scale_inv", "_scale"), checked_block(block, where, "weight_block_size"))


def fbgemm_weights(tensors: NamedTensors, _: Tree, where: Path) -> dict[str, PlainTensor]:
    """Read quant_method fbgemm_fp8: a scale per row."""
    return scaled_weights(tensors, ("_scale",), None)


def compressed_weights(tensors: NamedTensors, quantization: Tree, where: Path) -> dict[str, PlainTensor]:
    """Read quant_method compressed-tensors, only for fp8."""
    formats = ("float-quantized", "naive-quantized")
    groups = quantization.get("config_groups")
    at = f"{where}: quantization_config"
    blocks: set[tuple[int, ...]] = set()
    for name, group in (groups if isinstance(groups, dict) else {"none": None}).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ConfigError(f"{at}.config_groups: groups with weights expected, got {name}: {group!r}")
        stored = group.get("format") or quantization.get("format")
        if stored not in formats or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            what = f"format {stored!r}, {weights.get('num_bits')} bits of {weights.get('type')!r}"
            raise ConfigError(f"{at}.config_groups.{name}: {what}; only 8-bit floats are read "
                              f"({' or '.join(formats)})")
        key = f"config_groups.{name}.weights.block_structure"
        block = checked_block(weights.get("block_structure"), where, key)
        blocks |= {block} if block else set()
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ConfigError(f"{at}.sparsity_config: format {sparsity!r} is not read, only dense")
    if len(blocks) > 1:
        raise ConfigError(f"{at}.config_groups: blocks of several shapes are not read: {sorted(blocks)}")
    return scaled_weights(tensors, ("_scale",), next(iter(blocks), None))


def checked_block(block: Any, where: Path, key: str) -> tuple[int, ...] | None:
    """Return [rows, columns] that share a scale. Raises ConfigError."""
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise ConfigError(f"{where}: quantization_config.{key}: [rows, columns] expected, got {block!r}")
    return tuple(block)


def scaled_weights(
    tensors: NamedTensors, endings: tuple[str, ...], block: tuple[int, ...] | None
) -> dict[str, PlainTensor]:
    """Return every fp8 tensor of the folder with its scale, whose name is the tensor's plus one of these
    endings."""
    result: dict[str, PlainTensor] = {}
    for name, info in tensors.tensors.items():
        if info.dtype not in FP8:
            continue
        scales = [name + ending for ending in endings if name + ending in tensors.tensors]
        if len(scales) != 1:
            wanted = " or ".join(name + ending for ending in endings)
            raise ConfigError(f"{tensors.where}: {name} is fp8 with {len(scales)} scales; {wanted} expected")
        (scale,) = scales
        steps = steps_of(tensors, name, scale, block)
        stems = (name.removesuffix("weight"), f"{name}_")
        unused = [stem + ending for stem in stems for ending in ACTIVATION_SCALES]
        result[name] = PlainTensor(
            TensorInfo(info.shape, torch.float32),
            scaled_reader(tensors, scale, steps),
            stands_for=(name, scale, *(other for other in unused if other in tensors.tensors)),
        )
    return result


def steps_of(
    tensors: NamedTensors, name: str, scale: str, block: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return how many elements share a scale along each dim of a weight.

    Determined by the shape of the scale: a single number, a dim of 1 or of the weight's size (rows, columns),
    or blocks (the last may be cut). Raises ConfigError for any other shape.
    """
    shape, found = tensors.tensors[name].shape, tensors.tensors[scale]
    sizes = found.shape + (1,) * (len(shape) - len(found.shape))  # [rows] is [rows, 1]
    if found.dtype not in SCALES:
        raise ConfigError(f"{tensors.where}: {scale} is {found.dtype}, and a scale must be a float")
    if all(size == 1 for size in sizes):
        return shape
    if len(sizes) == len(shape):
        if all(size in (1, extent) for size, extent in zip(sizes, shape)):
            return tuple(extent if size == 1 else 1 for size, extent in zip(sizes, shape))
        steps = (1,) * (len(shape) - 2) + (block or ())
        if len(steps) == len(shape) and sizes == tuple(-(-n // step) for n, step in zip(shape, steps)):
            return steps
    blocks = f"blocks of {list(block)}" if block else "no blocks"
    raise ConfigError(f"{tensors.where}: {scale} has shape {list(found.shape)}, which does not fit {name} of "
                      f"shape {list(shape)} ({blocks} in config.json)")


def scaled_reader(tensors: NamedTensors, scale: str, steps: tuple[int, ...]) -> ReadBox:
    """Return a reader of boxes of a weight times its scale. `steps` comes from steps_of."""
    stored = tensors.tensors[scale].shape

    def read_piece(piece: Box) -> Tensor:
        firsts = [start // step for start, step in zip(piece.start, steps)]
        ends = [-(-(start + size) // step) for start, size, step in zip(piece.start, piece.size, steps)]
        slices = [slice(first, end) for first, end in zip(firsts, ends)]
        slices = slices[:len(stored)] if len(stored) <= len(slices) else [slice(0, 1)] * len(stored)
        factor = tensors.read(scale, tuple(slices)).float()
        factor = factor.reshape([end - first for first, end in zip(firsts, ends)])
        for dim, (start, size, step) in enumerate(zip(piece.start, piece.size, steps)):
            if factor.shape[dim] > 1:
                place = torch.arange(start, start + size) // step - firsts[dim]
                factor = factor.index_select(dim, place)
        return tensors.read_box(piece).float() * factor

    return lambda box: filled_in_pieces(box, torch.float32, read_piece, range(len(steps)))


# ---- MXFP4 -------------------------------------------------------------------------------------------------

def mxfp4_weights(tensors: NamedTensors, _: Tree, where: Path) -> dict[str, PlainTensor]:
    """Read quant_method mxfp4: NAME_blocks and NAME_scales of the experts.

    Blocks are [experts, rows, groups, 16] bytes with two values each, the lower four bits first. Scales are
    [experts, rows, groups] bytes, each a power-of-two exponent. Returned as [experts, columns, rows], as in
    the bf16 folder of the same model.
    """
    result: dict[str, PlainTensor] = {}
    for blocks, info in tensors.tensors.items():
        if not blocks.endswith("_blocks"):
            continue
        name = blocks.removesuffix("_blocks")
        scales = f"{name}_scales"
        scale_info = tensors.tensors.get(scales)
        if scale_info is None:
            raise ConfigError(f"{tensors.where}: {blocks} has no {scales}")
        shape = info.shape
        fits = len(shape) == 4 and shape[3] == GROUP // 2 and scale_info.shape == shape[:3]
        if not fits or {info.dtype, scale_info.dtype} != {torch.uint8}:
            raise ConfigError(
                f"{tensors.where}: {blocks} is {info.dtype} of {list(shape)}, {scales} {scale_info.dtype} of "
                f"{list(scale_info.shape)}; torch.uint8 of [experts, rows, groups, {GROUP // 2}] and of "
                "[experts, rows, groups] expected"
            )
        experts, rows, groups, _ = shape
        result[name] = PlainTensor(
            TensorInfo((experts, GROUP * groups, rows), torch.bfloat16),
            mxfp4_reader(tensors, blocks, scales),
            stands_for=(blocks, scales),
        )
    return result


def mxfp4_reader(tensors: NamedTensors, blocks: str, scales: str) -> ReadBox:
    """Return a reader of boxes of [experts, columns, rows]."""
    values = torch.tensor(E2M1)
    table = torch.cat([values, -values])

    def read_piece(piece: Box) -> Tensor:
        experts, columns, rows = piece.ranges()
        groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
        place = (slice(experts.start, experts.stop), slice(rows.start, rows.stop), groups)
        packed = tensors.read(blocks, (*place, slice(0, GROUP // 2)))
        pairs = torch.stack([packed & 15, packed >> 4], dim=-1)  # [experts, rows, groups, 16, 2]
        exponents = tensors.read(scales, place).view(torch.float8_e8m0fnu).float()
        numbers = table[pairs.int()].flatten(-2) * exponents[..., None]
        first = columns.start - groups.start * GROUP
        return numbers.flatten(-2)[:, :, first:first + len(columns)].transpose(1, 2)

    return lambda box: filled_in_pieces(box, torch.bfloat16, read_piece, dims=(0, 2, 1))


METHODS: dict[Any, Callable[[NamedTensors, Tree, Path], dict[str, PlainTensor]]] = {
    "fp8": fp8_weights,
    "fbgemm_fp8": fbgemm_weights,
    "compressed-tensors": compressed_weights,
    "mxfp4": mxfp4_weights,
}
