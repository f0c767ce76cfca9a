"""Quantized weights of Hugging Face folders, a box at a time: against loops of scalars, and against what
transformers dequantizes; every method and misfit that is not read is named.
"""

import itertools
import json
import math
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_named_tensors import bits, some
from test_pickled import REBUILD, named, raw, refusal, text
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.disk.tensors_by_name import open_safetensors_folder
from checkpoint.hf import quantized
from checkpoint.hf.quantized import dequantized
from config import ConfigError

DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
E4M3 = torch.float8_e4m3fn


def opened(folder, tensors, quantization):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return dequantized(open_safetensors_folder(folder), quantization, folder / "config.json")


def fp8(shape, seed=0):
    """Finite numbers of every size."""
    numbers = some(shape, E4M3, seed)
    return torch.where(numbers.float().isnan(), torch.ones(shape), numbers.float()).to(E4M3)


def scales(shape, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=numbers) * 0.01 + 1e-4


def boxes(shape, count=12):
    numbers = torch.Generator().manual_seed(3)
    for _ in range(count):
        ends = [torch.randint(0, n + 1, (2,), generator=numbers).sort().values.tolist() for n in shape]
        yield tuple(slice(*one) for one in ends)


def check(source, name, want):
    """The whole and boxes of it, bit for bit."""
    info = source.tensors[name]
    assert (info.shape, info.dtype) == (tuple(want.shape), want.dtype)
    assert torch.equal(bits(source.read(name)), bits(want))
    for box in boxes(want.shape):
        assert torch.equal(bits(source.read(name, box)), bits(want[box])), box


# ---- fp8 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1 << 20, 100], ids=str)
@pytest.mark.parametrize("shape", [(256, 40), (40, 384), (130, 140), (5, 7)], ids=str)
def test_blocks_of_deepseek_are_scaled_element_by_element(tmp_path, monkeypatch, shape, piece):
    """Where the last blocks are cut, too."""
    monkeypatch.setattr(quantized, "PIECE", piece)
    weight, scale = fp8(shape), scales([math.ceil(n / 128) for n in shape])
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": torch.ones(3).bfloat16()}
    source = opened(tmp_path, tensors, DEEPSEEK)
    assert set(source.tensors) == {"a.weight", "norm.weight"}
    want = torch.empty(shape)
    for row, column in itertools.product(*map(range, shape)):
        want[row, column] = weight[row, column].float() * scale[row // 128, column // 128]
    check(source, "a.weight", want)
    check(source, "norm.weight", tensors["norm.weight"])


def test_blocks_are_dequantized_as_in_transformers(tmp_path):
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale = fp8((256, 384)), scales((2, 3))
    theirs = integration.Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    source = opened(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, DEEPSEEK)
    assert torch.equal(source.read("a.weight"), theirs)


def test_blocks_of_experts_are_scaled_by_powers_of_two(tmp_path):
    """[experts, rows, columns], and scales in E8M0."""
    weight = fp8((3, 200, 130))
    scale = torch.randint(100, 140, (3, 2, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    source = opened(tmp_path, {"up_proj": weight, "up_proj_scale_inv": scale}, DEEPSEEK)
    spread = scale.float().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :200, :130]
    check(source, "up_proj", weight.float() * spread)


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}


def groups(*weights, **more):
    plain = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    made = {f"group_{number}": {"weights": plain | one} for number, one in enumerate(weights)}
    return {**COMPRESSED, "config_groups": made, **more}


@pytest.mark.parametrize("quantization, shape", [
    (groups({}), (1,)),
    (groups({}), ()),
    (groups({"strategy": "channel"}), (6, 1)),
    (groups({}, {"strategy": "channel"}), (6,)),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (6, 1)),
    ({"quant_method": "fp8", "activation_scheme": "static"}, (1,)),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scale_is_of_a_tensor_or_a_row(tmp_path, quantization, shape, dtype):
    weight, scale = fp8((6, 10)), scales(shape).to(dtype)
    more = {"a.input_scale": torch.ones(1), "a.bias": torch.ones(6)}
    source = opened(tmp_path, {"a.weight": weight, "a.weight_scale": scale, **more}, quantization)
    assert set(source.tensors) == {"a.weight", "a.bias"}
    want = torch.empty(6, 10)
    for row, column in itertools.product(range(6), range(10)):
        factor = scale.float().flatten()[row if scale.numel() > 1 else 0]
        want[row, column] = weight[row, column].float() * factor
    check(source, "a.weight", want)


def test_blocks_of_compressed_tensors_are_scaled(tmp_path):
    quantization = groups({"strategy": "block", "block_structure": [4, 8]}, {"strategy": "channel"})
    tensors = {"a.weight": fp8((6, 10)), "a.weight_scale": scales((2, 2)),
               "b.weight": fp8((6, 10), 1), "b.weight_scale": scales((6, 1), 1)}
    source = opened(tmp_path, tensors, quantization)
    spread = tensors["a.weight_scale"].repeat_interleave(4, 0).repeat_interleave(8, 1)[:6, :10]
    check(source, "a.weight", tensors["a.weight"].float() * spread)
    check(source, "b.weight", tensors["b.weight"].float() * tensors["b.weight_scale"])


def test_rows_of_llama4s_experts_are_scaled(tmp_path):
    """[experts, in, out] with a scale for each output: the dim of 1 is in the middle."""
    weight, scale = fp8((3, 4, 6)), scales((3, 1, 6))
    quantization = {"quant_method": "fbgemm_fp8"}
    source = opened(tmp_path, {"gate_up_proj": weight, "gate_up_proj_scale": scale}, quantization)
    check(source, "gate_up_proj", weight.float() * scale)


def test_only_the_blocks_of_the_box_are_read(tmp_path, read_sizes):
    weight, scale = fp8((2048, 2048)), scales((16, 16))
    source = opened(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, DEEPSEEK)
    box = (slice(1024, 1152), slice(0, 2048))
    assert torch.equal(source.read("a.weight", box), weight[box].float() * scale[8].repeat_interleave(128))
    assert sum(read_sizes) == 128 * 2048 + 16 * 4


# ---- MXFP4 -------------------------------------------------------------------------------------------------

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def experts(low, high, shape=(3, 5, 2)):
    """(blocks, scales) of [experts, rows, groups]."""
    numbers = torch.Generator().manual_seed(0)
    return (
        torch.randint(0, 256, (*shape, 16), generator=numbers, dtype=torch.uint8),
        torch.randint(low, high, shape, generator=numbers, dtype=torch.uint8),
    )


def e2m1(code):
    """sign, two bits of exponent with bias 1, one of mantissa; without exponent a subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if sign else size


@pytest.mark.parametrize("piece", [1 << 20, 50], ids=str)
def test_mxfp4_is_read_by_its_bits(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(quantized, "PIECE", piece)
    blocks, exponents = experts(0, 252)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    more = {f"{name}_bias": torch.ones(3, 5).bfloat16()}
    source = opened(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": exponents, **more}, MXFP4)
    assert set(source.tensors) == {name, f"{name}_bias"}
    want = torch.empty(3, 64, 5, dtype=torch.float64)
    for expert, row, group, byte in itertools.product(*map(range, blocks.shape)):
        packed, power = int(blocks[expert, row, group, byte]), int(exponents[expert, row, group]) - 127
        for half, code in enumerate((packed & 15, packed >> 4)):
            want[expert, 32 * group + 2 * byte + half, row] = e2m1(code) * 2.0**power
    assert torch.equal(want.bfloat16().double(), want)  # bf16 holds each exactly
    check(source, name, want.bfloat16())


def test_mxfp4_is_converted_as_in_transformers(tmp_path):
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, exponents = experts(100, 140, (2, 7, 3))
    source = opened(tmp_path, {"w_blocks": blocks, "w_scales": exponents}, MXFP4)
    assert torch.equal(source.read("w"), integration.convert_moe_packed_tensors(blocks, exponents))


def test_a_scale_of_nan_makes_nan(tmp_path):
    blocks, exponents = experts(255, 256)
    assert opened(tmp_path, {"w_blocks": blocks, "w_scales": exponents}, MXFP4).read("w").isnan().all()


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization, words", [
    ({"quant_method": "gptq"}, "quant_method: 'gptq' is not read; these are: fp8, fbgemm_fp8, "),
    ({"quant_method": ["fp8"]}, "quant_method: ['fp8'] is not read"),
    ({}, "quant_method: None is not read"),
    ({**DEEPSEEK, "weight_block_size": 128}, "weight_block_size: [rows, columns] expected, got 128"),
    ({**DEEPSEEK, "weight_block_size": [0, 128]}, "weight_block_size: [rows, columns] expected"),
    (COMPRESSED, "config_groups: groups with weights expected"),
    ({**COMPRESSED, "config_groups": {"g": 5}}, "config_groups: groups with weights expected, got g: 5"),
    (groups({"type": "int", "num_bits": 4}, format="pack-quantized"),
     "config_groups.group_0: format 'pack-quantized', 4 bits of 'int'; only 8-bit floats"),
    (groups({}, {"num_bits": 4}), "config_groups.group_1: format 'float-quantized', 4 bits of 'float'"),
    (groups({}, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format 'sparse-24"),
    (groups({"block_structure": [1, 8]}, {"block_structure": [4, 8]}), "blocks of several shapes"),
    (groups({"block_structure": "4x8"}), "block_structure: [rows, columns] expected, got '4x8'"),
])
def test_methods_that_are_not_read_are_refused(tmp_path, quantization, words):
    line = refusal(lambda: opened(tmp_path, {"w": torch.ones(2)}, quantization))
    assert line.startswith(f"{tmp_path}/config.json: quantization_config.") and words in line, line


@pytest.mark.parametrize("tensors, words", [
    ({"a.weight": fp8((4, 4))}, "a.weight is fp8 with 0 scales; a.weight_scale_inv or a.weight_scale"),
    ({"a.weight": fp8((4, 4)), "a.weight_scale": scales(1), "a.weight_scale_inv": scales(1)},
     "a.weight is fp8 with 2 scales"),
    ({"a.weight": fp8((256, 4)), "a.weight_scale_inv": scales((3, 1))},
     "a.weight_scale_inv has shape [3, 1], which does not fit a.weight of shape [256, 4] (blocks of "),
    ({"a.weight": fp8((256, 4)), "a.weight_scale_inv": scales((2, 1, 1, 1))}, "which does not fit"),
    ({"a.weight": fp8((4, 4)), "a.weight_scale_inv": torch.ones(1, dtype=torch.int32)},
     "a.weight_scale_inv is torch.int32, and a scale must be a float"),
])
def test_scales_that_do_not_fit_are_refused(tmp_path, tensors, words):
    line = refusal(lambda: opened(tmp_path, tensors, DEEPSEEK))
    assert line.startswith(f"{tmp_path}: ") and words in line, line


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop("w_scales"), "w_blocks has no w_scales"),
    (lambda t: t.update(w=torch.ones(1)), "w is stored both plain and quantized"),
    (lambda t: t.update(w_scales=t["w_scales"][:, :4]), "torch.uint8 of [3, 4, 2]; torch.uint8 of ["),
    (lambda t: t.update(w_scales=t["w_scales"].int()), "w_scales torch.int32 of [3, 5, 2]"),
    (lambda t: t.update(w_blocks=t["w_blocks"][..., :8]), "w_blocks is torch.uint8 of [3, 5, 2, 8]"),
    (lambda t: t.update(w_blocks=t["w_blocks"][0]), "w_blocks is torch.uint8 of [5, 2, 16]"),
])
def test_blocks_of_mxfp4_that_do_not_fit_are_refused(tmp_path, change, words):
    tensors = dict(zip(("w_blocks", "w_scales"), experts(1, 200)))
    change(tensors)
    line = refusal(lambda: opened(tmp_path, tensors, MXFP4))
    assert line.startswith(f"{tmp_path}: ") and words in line, line


def test_a_cut_file_is_named(tmp_path):
    source = opened(tmp_path, {"a.weight": fp8((4, 4)), "a.weight_scale_inv": scales(1)}, DEEPSEEK)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="model.safetensors: truncated"):
        source.read("a.weight")


# ---- memory ------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys, torch
from pathlib import Path
from checkpoint.systems.dcp import open_dcp
from checkpoint.systems.pickled import open_torch_file
from checkpoint.hf.quantized import dequantized
from checkpoint.disk.tensors_by_name import open_safetensors_folder

torch.set_num_threads(1)
folder = Path(sys.argv[1])
mxfp4 = dequantized(open_safetensors_folder(folder / "mxfp4"), {"quant_method": "mxfp4"}, folder)
plain = open_safetensors_folder(folder / "plain")
sources = {"s": plain, "w": open_torch_file(folder / "w.pt"), "d": open_dcp(folder), "q": mxfp4}
held = next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]
resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(held) + (48 << 20),) * 2)
for name, source in sources.items():
    shape = source.tensors[name].shape
    few = [slice(size - min(size, 1 << 16 >> 4 * len(shape)), size) for size in shape]  # 256, or 16 of 3 dims
    for dim in range(len(shape)):  # all of one dim
        box = (*few[:dim], slice(None), *few[dim + 1:])
        assert source.read(name, box).flatten()[-1] == 3, (name, dim)
    try:
        source.read(name)
    except (RuntimeError, MemoryError):
        print(name)
"""
SIZE = 1 << 28  # bytes
SHAPE = (1 << 13, 1 << 14)  # of SIZE bytes of bf16
LAST = bits(torch.tensor([3.0]).bfloat16()).numpy().tobytes()  # the last number of each file


def large_torch_file(path, before=b"", after=b""):
    """A torch.save file of zeros, and a 3 at the end: a hole in the disk. before, after: around the tensor in
    the pickle. Returns its size.
    """
    rows, columns, count, one = (b"J" + n.to_bytes(4, "little") for n in (*SHAPE, math.prod(SHAPE), 1))
    kind = text("storage") + named("torch", "BFloat16Storage")
    storage = b"(" + kind + text("0") + text("cpu") + count + b"tQ"
    tensor = REBUILD + b"(" + storage + b"K\x00" + rows + columns + b"\x86" + columns + one + b"\x86\x89)tR"
    info = zipfile.ZipInfo("archive/data/0")
    info.file_size = info.compress_size = SIZE
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", raw(before, tensor, after))
        info.header_offset, info.CRC = file.fp.tell(), 0
        file.fp.write(info.FileHeader(zip64=True))
        file.fp.seek(SIZE - 2, 1)
        file.fp.write(LAST)
        file.start_dir = file.fp.tell()
        file.filelist.append(info)
    return path.stat().st_size


def large_safetensors(folder, tensors):
    """A file of zeros, a hole in the disk. tensors: {name: (dtype, shape, bytes, the last of these)}"""
    folder.mkdir()
    table, ends, end = {}, {}, 0
    for name, (dtype, shape, size, last) in tensors.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
        ends[end] = last
    text = json.dumps(table).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + end)
        for place, last in ends.items():
            file.seek(start + place - len(last))
            file.write(last)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory")
def test_boxes_are_read_of_files_that_do_not_fit_into_memory(tmp_path):
    """With 48 MiB, boxes of 256 MiB along each dim; the whole does not fit, so that the limit holds."""
    large_torch_file(tmp_path / "w.pt", b"}" + text("w"), b"s")
    large_safetensors(tmp_path / "plain", {"s": ("BF16", SHAPE, SIZE, LAST)})
    exponents = (8, 1 << 12, 1 << 9)
    large_safetensors(tmp_path / "mxfp4", {  # a last value of 1.5 * 2 ** 1
        "q_scales": ("U8", exponents, math.prod(exponents), bytes([128])),
        "q_blocks": ("U8", (*exponents, 16), SIZE, bytes([0b0011_0000])),
    })
    size = large_torch_file(tmp_path / "d.distcp")
    start = torch.Size([0, 0])
    chunks = [ChunkStorageMetadata(start, torch.Size(SHAPE))]
    entry = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(SHAPE), chunks)
    storage = {MetadataIndex("d", start): _StorageInfo("d.distcp", 0, size)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"d": entry}, None, storage)))

    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == ["s", "w", "d", "q"], done.stderr
