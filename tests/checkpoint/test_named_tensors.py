"""Tensors by name: boxes of safetensors files and folders, against the whole tensors; what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint.disk import tensors_by_name
from checkpoint.disk.tensors_by_name import (
    NamedTensors,
    StoredTensor,
    open_safetensors_folder,
    read_stored,
    safetensors_table,
)
from config import ConfigError
from parallel.sharding.boxes import Box

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.bool,
]


def bits(tensor):
    """The bytes of a tensor: NaN equals NaN, and every dtype can be compared."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def some(shape, dtype, seed=0):
    """Random bytes as numbers of a dtype."""
    numbers = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=numbers).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=numbers, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def check_all(source, tensors):
    """The source has these tensors, bit for bit, and no other."""
    assert {name: (info.shape, info.dtype) for name, info in source.tensors.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        assert torch.equal(bits(source.read(name)), bits(tensor)), name


def one_file(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return open_safetensors_folder(folder)


def shards(folder, *files):
    """A folder of several files and their index."""
    weight_map = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"part{number}.safetensors")
    write_index(folder, weight_map)


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# ---- reading -----------------------------------------------------------------------------------------------


def test_a_file_is_opened_by_names_shapes_and_dtypes(tmp_path):
    tensors = {str(dtype): some((3, 5), dtype) for dtype in DTYPES} | {"scalar": torch.tensor(2.5)}
    source = one_file(tmp_path, tensors)
    assert source.where == tmp_path and source.objects == ()
    check_all(source, tensors)


@pytest.mark.parametrize("limits", [(1, 8, 1), (16, 64, 2), (1 << 16, 1 << 22, 4)], ids=str)
def test_any_box_is_the_slice_of_the_whole(tmp_path, monkeypatch, limits):
    """With small limits a read halves down to single elements; a box may be empty."""
    for name, limit in zip(("SMALL_READ", "MAX_READ", "MAX_WASTE"), limits):
        monkeypatch.setattr(tensors_by_name, name, limit)
    whole = some((7, 5, 6), torch.bfloat16)
    source = one_file(tmp_path, {"a": torch.ones(3), "w": whole, "z": torch.ones(2)})
    numbers = torch.Generator().manual_seed(1)
    for _ in range(40):
        box = []
        for extent in whole.shape:
            ends = torch.randint(0, extent + 1, (2,), generator=numbers).sort().values.tolist()
            box.append(slice(*ends))
        read = source.read("w", tuple(box))
        assert read.is_contiguous() and torch.equal(bits(read), bits(whole[tuple(box)])), box
    assert torch.equal(bits(source.read("w", (slice(None),) * 3)), bits(whole))


@pytest.mark.parametrize("limits", [(1, 8, 1), (1 << 16, 1 << 22, 4)], ids=str)
@pytest.mark.parametrize("stride", [(1, 6), (20, 1), (0, 3), (0, 0), (2, 7)], ids=str)
def test_a_box_is_read_under_strides_of_any_order(tmp_path, monkeypatch, stride, limits):
    for name, limit in zip(("SMALL_READ", "MAX_READ", "MAX_WASTE"), limits):
        monkeypatch.setattr(tensors_by_name, name, limit)
    data = torch.arange(150, dtype=torch.int32)
    (tmp_path / "data").write_bytes(b"xyz" + data.numpy().tobytes())
    stored = StoredTensor(tmp_path / "data", 3 + 4 * 10, (6, 5), stride, dtype=torch.int32)
    read = read_stored(stored, Box("w", (6, 5), (1, 2), (4, 3)))
    assert torch.equal(read, data.as_strided((6, 5), stride, 10)[1:5, 2:5])


def test_a_column_is_read_without_the_rest(tmp_path, read_sizes):
    """A narrow box of wide rows reads a few times its bytes, in few calls."""
    whole = torch.arange(512 * 40_000, dtype=torch.int16).view(512, 40_000)  # rows of 80 kB
    source = one_file(tmp_path, {"w": whole})
    box = (slice(0, 512), slice(39_000, 40_000))
    assert torch.equal(source.read("w", box), whole[box])
    assert len(read_sizes) == 512 and sum(read_sizes) == 512 * 1000 * 2
    read_sizes.clear()
    assert torch.equal(source.read("w", (slice(3, 500), slice(None))), whole[3:500])
    assert max(read_sizes) <= tensors_by_name.MAX_READ and sum(read_sizes) == 497 * 80_000


def test_shards_are_read_by_their_index_and_through_links(tmp_path):
    one, two = {"a": some((4, 3), torch.float32)}, {"b": some((2,), torch.int8, 1), "c": torch.ones(2)}
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    shards(tmp_path, one, two)
    (tmp_path / "part0.safetensors").rename(blobs / "hash")
    (tmp_path / "part0.safetensors").symlink_to("blobs/hash")  # as in the cache of the hub
    source = open_safetensors_folder(tmp_path)
    check_all(source, one | two)


def test_a_header_may_begin_within_a_file(tmp_path):
    save_file({"w": torch.arange(6)}, tmp_path / "plain")
    (tmp_path / "late").write_bytes(b"12345" + (tmp_path / "plain").read_bytes())
    stored = safetensors_table(tmp_path / "late", 5)["w"]
    assert torch.equal(read_stored(stored, Box.whole("w", (6,))), torch.arange(6))


# ---- refusals ----------------------------------------------------------------------------------------------


def refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_safetensors_folder(tmp_path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{tmp_path}/")


def header(folder, entries, data=b""):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("entries, size, words", [
    ({"w": entry()}, 7, "truncated (7 bytes for 8)"),
    ({"w": entry()}, 9, "longer than its tensors"),
    ({"w": entry(shape=(3,))}, 8, "w: 8 bytes for shape [3] of F32"),
    ({"w": entry(shape=(-2,))}, 8, "w: damaged safetensors header"),
    ({"w": entry(shape=(2.0,))}, 8, "w: damaged safetensors header"),
    ({"w": entry(offsets=(8,))}, 8, "w: damaged safetensors header"),
    ({"w": {"dtype": "F32"}}, 8, "w: damaged safetensors header"),
    ({"w\nerror: fine": entry(shape=(3,))}, 8, "w\\nerror: fine: 8 bytes for shape [3] of F32"),
    ({"w": entry("F4")}, 8, "w has dtype 'F4'; these are read: F64, "),
    ({"w": entry(), "v": entry()}, 8, "its tensors leave a gap or overlap at byte"),
    ({"w": entry(), "v": entry(offsets=(12, 20))}, 20, "its tensors leave a gap or overlap at byte"),
    (b'{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
     b'"w": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', 2, "its tensors leave a gap"),
    (b"[]", 0, "damaged safetensors header"),
    (b"{", 0, "damaged safetensors header"),
])
def test_a_damaged_file_is_named(tmp_path, entries, size, words):
    header(tmp_path, entries, bytes(size))
    line = refused(tmp_path)
    assert line.startswith("model.safetensors: ") and words in line


def test_a_folder_that_does_not_hang_together_is_named(tmp_path):
    assert refused(tmp_path).endswith("holds no model.safetensors and no model.safetensors.index.json")
    shards(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    open_safetensors_folder(tmp_path)

    write_index(tmp_path, {"a": "part0.safetensors", "b": "part2.safetensors"})
    assert refused(tmp_path) == "part2.safetensors: missing, though the index names it; download it again"
    write_index(tmp_path, {"a": "part0.safetensors", "c": "part1.safetensors"})
    words = "names 'part1.safetensors' for c, which is not in it"
    assert refused(tmp_path) == f"model.safetensors.index.json: {words}"
    write_index(tmp_path, {"a": "../part0.safetensors"})
    assert refused(tmp_path).startswith("model.safetensors.index.json: not an index of safetensors")

    shards(tmp_path, {"a": torch.ones(2)}, {"a": torch.ones(2)})
    write_index(tmp_path, {"a": "part1.safetensors", "b": "part0.safetensors"})
    assert refused(tmp_path) == "part1.safetensors: a stands in part0.safetensors already"
    (tmp_path / "part0.safetensors").unlink()
    (tmp_path / "part0.safetensors").mkdir()
    assert refused(tmp_path) == "part0.safetensors: not a regular file"


def test_a_file_that_shrinks_is_refused_at_the_read(tmp_path):
    source = one_file(tmp_path, {"w": torch.ones(100)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="model.safetensors: truncated"):
        source.read("w")
    file.unlink()
    with pytest.raises(ConfigError, match="model.safetensors: cannot be read: No such file"):
        source.read("w", (slice(0, 1),))


OUTSIDE = [(0, 5, 1), (-1, 2, 1), (3, 2, 1), (0, 4, 2)]


@pytest.mark.parametrize("box", [(), (slice(0, 3), slice(0, 1)), *((slice(*ends),) for ends in OUTSIDE)])
def test_a_box_outside_is_an_error(tmp_path, box):
    with pytest.raises(ValueError, match="^w: "):
        one_file(tmp_path, {"w": torch.ones(4)}).read("w", box)


def test_a_reader_is_asked_for_the_box_alone():
    asked = []
    tensors = {"w": tensors_by_name.TensorInfo((4, 2), torch.float32)}
    NamedTensors(Path("x"), tensors, asked.append).read("w", (slice(1, 3), slice(None)))
    assert asked == [Box("w", (4, 2), (1, 0), (2, 2))]
