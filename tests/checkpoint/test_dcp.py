"""Folders of torch.distributed.checkpoint: what torch saves, in one process and sharded over two, and
Megatron-LM's torch_dist laid out by hand; every misfit is named.
"""

import argparse
import io
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save
from test_named_tensors import bits, check_all, some
from test_pickled import Reduced, refusal
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.systems.dcp import open_dcp, read_object
from checkpoint.systems.pickled import Foreign

# ---- what torch saves --------------------------------------------------------------------------------------


class TrainState:
    """As torchtitan's: an object that is not a tensor."""

    def state_dict(self):
        return {"step": 7, "lr": [0.1, 0.2], "shape": torch.Size([2])}

    def load_state_dict(self, state):
        raise AssertionError


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_one_process_saves_is_read(tmp_path):
    model = {
        "layers.0.attention.wq.weight": some((12, 8), torch.bfloat16),
        "tok_embeddings.weight": some((16, 4), torch.float32, 1).t(),
        "fp8": some((3, 5), torch.float8_e4m3fn, 2),
        "freqs": torch.empty(0, 3),
        "scale": torch.tensor(1.5),
    }
    optimizer = {"state": {"w": {"step": torch.tensor(3.0), "exp_avg": some((4, 4), torch.float64, 3)}}}
    saved = {**model, "optimizer": optimizer, "train_state": TrainState(), "seed": 5}
    torch_dcp.save(saved, checkpoint_id=tmp_path / "step-7", no_dist=True)
    source = open_dcp(tmp_path / "step-7")
    tensors = model | {f"optimizer.state.w.{name}": t for name, t in optimizer["state"]["w"].items()}
    check_all(source, tensors)
    box = (slice(3, 9), slice(2, 8))
    assert torch.equal(bits(source.read("layers.0.attention.wq.weight", box)),
                       bits(model["layers.0.attention.wq.weight"][box]))
    objects = {"seed": 5, "train_state.step": 7, "train_state.lr": [0.1, 0.2], "train_state.shape": (2,)}
    assert {name: read_object(tmp_path / "step-7", name) for name in source.objects} == objects


TWO_RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)
model = {
    "rows": distribute_tensor(whole, mesh, [Shard(0)]),  # 4 and 3 rows
    "columns": distribute_tensor(whole, mesh, [Shard(1)]),
    "one": distribute_tensor(whole[:1], mesh, [Shard(0)]),  # rank 1 has none
    "all": distribute_tensor(whole, mesh, [Replicate()]),
    "plain": whole + 1,
}
dcp.save({"model": model}, checkpoint_id=f"{folder}/saved")
dist.destroy_process_group()
"""


def test_what_two_ranks_save_is_read(tmp_path):
    ranks = [subprocess.Popen([sys.executable, "-c", TWO_RANKS, str(n), str(tmp_path)]) for n in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    source = open_dcp(tmp_path / "saved")
    whole = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)
    want = {"rows": whole, "columns": whole, "one": whole[:1], "all": whole, "plain": whole + 1}
    assert {name: info.shape for name, info in source.tensors.items()} == {
        f"model.{name}": tuple(tensor.shape) for name, tensor in want.items()
    }
    for name, tensor in want.items():
        assert torch.equal(source.read(f"model.{name}"), tensor), name
    for box in ((slice(3, 5), slice(1, 6)), (slice(0, 4), slice(2, 4)), (slice(6, 7), slice(0, 6))):
        assert torch.equal(source.read("model.rows", box), whole[box])
        assert torch.equal(source.read("model.columns", box), whole[box])


# ---- Megatron-LM's, by hand --------------------------------------------------------------------------------


def torch_saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def lay_out(folder, files, tensors, objects=()):
    """files: {name: [(tensor name, offset, tensor) or (object name, None, what)]}."""
    storage = {}
    for file, items in files.items():
        with open(folder / file, "wb") as out:
            for name, offset, value in items:
                data = torch_saved(value)
                storage[MetadataIndex(name, offset)] = _StorageInfo(file, out.tell(), len(data))
                out.write(data)
    entries = {name: BytesStorageMetadata() for name in objects}
    for name, (shape, dtype) in tensors.items():
        parts = [(at, t.shape) for items in files.values() for n, at, t in items if n == name]
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in parts]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
    write_metadata(folder, Metadata(entries, None, storage))


def write_metadata(folder, metadata):
    with open(folder / ".metadata", "wb") as out:
        pickle.dump(metadata, out)


FC1 = "decoder.layers.mlp.linear_fc1.weight"
EXTRA = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
EMBED = "embedding.word_embeddings.weight"


@pytest.fixture
def megatron(tmp_path):
    """(folder, {name: tensor}): 4 layers stacked over pp 2, the rows of each over tp 2."""
    folder = tmp_path / "iter_0000100"
    folder.mkdir()
    fc1, embed = some((4, 6, 5), torch.bfloat16), some((10, 5), torch.float32, 1)
    args = argparse.Namespace(num_layers=4, params_dtype=torch.bfloat16)
    files = {}
    for pp in range(2):
        for tp in range(2):
            items = [(EXTRA, None, [b"fp8"])] if (pp, tp) == (0, 0) else []
            for layer in (2 * pp, 2 * pp + 1):  # a box for each layer, with a leading dim of 1
                items.append((FC1, (layer, 3 * tp, 0), fc1[layer:layer + 1, 3 * tp:3 * tp + 3].clone()))
            if pp == 0:
                items.append((EMBED, (5 * tp, 0), embed[5 * tp:5 * tp + 5].clone()))
            files[f"__{2 * pp + tp}_0.distcp"] = items
    lay_out(folder, files, {FC1: ((4, 6, 5), torch.bfloat16), EMBED: ((10, 5), torch.float32)}, [EXTRA])
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"args": args, "iteration": 100}, folder / "common.pt")
    return folder, {FC1: fc1, EMBED: embed}


def test_megatrons_stacked_layers_are_read_by_box(megatron):
    folder, tensors = megatron
    source = open_dcp(folder)
    assert source.objects == (EXTRA,) and source.where == folder
    assert {name: info.shape for name, info in source.tensors.items()} == {FC1: (4, 6, 5), EMBED: (10, 5)}
    for name, tensor in tensors.items():
        assert torch.equal(bits(source.read(name)), bits(tensor))
    box = (slice(1, 3), slice(2, 5), slice(1, 4))  # of layers, ranks and columns
    assert torch.equal(bits(source.read(FC1, box)), bits(tensors[FC1][box]))
    assert read_object(folder, EXTRA) == [b"fp8"]


def test_only_the_files_of_the_box_are_opened(megatron):
    folder, tensors = megatron
    source = open_dcp(folder)
    for name in ("__1_0.distcp", "__2_0.distcp", "__3_0.distcp"):
        (folder / name).write_bytes(b"")
    box = (slice(0, 2), slice(0, 3), slice(0, 5))
    assert torch.equal(bits(source.read(FC1, box)), bits(tensors[FC1][box]))
    assert refusal(lambda: source.read(FC1)).startswith(f"{folder}/__1_0.distcp: truncated")


def test_items_in_safetensors_are_read_at_their_offsets(tmp_path):
    """Such a file is written behind the objects, and every item has its offset."""
    whole = {"a": some((4, 6), torch.float16), "b": some((2,), torch.int64, 1)}
    lead = torch_saved("object")
    (tmp_path / "__0_0.distcp").write_bytes(lead + save(whole))
    storage = {MetadataIndex("o"): _StorageInfo("__0_0.distcp", 0, len(lead))}
    entries = {"o": BytesStorageMetadata()}
    for name, tensor in whole.items():
        start = torch.Size([0] * tensor.dim())
        storage[MetadataIndex(name, start)] = _StorageInfo("__0_0.distcp", len(lead), tensor.nbytes)
        chunks = [ChunkStorageMetadata(start, tensor.shape)]
        entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    write_metadata(tmp_path, Metadata(entries, None, storage))
    source = open_dcp(tmp_path)
    assert torch.equal(bits(source.read("b")), bits(whole["b"]))
    box = (slice(1, 3), slice(2, 6))
    assert torch.equal(bits(source.read("a", box)), bits(whole["a"][box]))
    assert read_object(tmp_path, "o") == "object"


# ---- refusals ----------------------------------------------------------------------------------------------


def test_files_that_are_missing_or_cut_are_named(megatron):
    folder, _ = megatron
    file = folder / "__3_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    sizes = f"{len(data) - 1:,} bytes, .metadata says {len(data):,}"
    assert refusal(lambda: open_dcp(folder)) == f"{file}: truncated ({sizes}); copy it again"
    file.unlink()
    assert refusal(lambda: open_dcp(folder)) == f"{file}: missing, though .metadata names it; copy it again"
    (folder / ".metadata").unlink()
    assert refusal(lambda: open_dcp(folder)).startswith(f"{folder}: holds no .metadata")


def test_a_box_that_is_another_tensor_is_refused(megatron):
    folder, _ = megatron
    item = [("w", (0, 0), torch.ones(2, 3))]
    lay_out(folder, {"x.distcp": item}, {"w": ((2, 3), torch.float64)})
    where = f"{folder}/x.distcp: w[0:2, 0:3]"
    line = refusal(lambda: open_dcp(folder).read("w"))
    says = ".metadata says torch.float64 of (2, 3), the file has torch.float32 of (2, 3)"
    assert line == f"{where}: {says}"
    (folder / "x.distcp").write_bytes(torch_saved([1]).ljust((folder / "x.distcp").stat().st_size, b"\0"))
    assert refusal(lambda: open_dcp(folder).read("w")).startswith(f"{where}: ")


def changed(folder, how):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata)
    write_metadata(folder, metadata)


def entry_of(metadata):
    return metadata.state_dict_metadata[EMBED]


def find_storage(metadata):
    return metadata.storage_data[MetadataIndex(EMBED, (5, 0))]


@pytest.mark.parametrize("how, words", [
    (lambda m: entry_of(m).chunks.pop(), "[5:10, 0:5] of shape (10, 5): no stored piece covers this"),
    (lambda m: entry_of(m).chunks.append(entry_of(m).chunks[0]), "or two boxes begin there"),
    (lambda m: m.storage_data.pop(MetadataIndex(EMBED, (5, 0))), "no file holds what begins at (5, 0)"),
    (lambda m: m.storage_data.pop(MetadataIndex(EXTRA)), f"{EXTRA}: no file holds what begins at None"),
    (lambda m: setattr(entry_of(m), "size", torch.Size([9, 5])), "does not lie inside its tensor"),
    (lambda m: setattr(entry_of(m), "size", "big"), "whole numbers expected"),
    (lambda m: setattr(entry_of(m), "chunks", 5), "not what torch.distributed.checkpoint writes"),
    (lambda m: setattr(entry_of(m), "properties", None), "not what torch.distributed.checkpoint writes"),
    (lambda m: setattr(find_storage(m), "relative_path", "../x"), "a plain file name expected, got '../x'"),
    (lambda m: setattr(find_storage(m), "offset", -1), "whole numbers expected"),
    (lambda m: setattr(find_storage(m), "transform_descriptors", ["zstd"]), "compressed; save it again"),
    (lambda m: m.state_dict_metadata.update({EMBED: 5}), "TensorStorageMetadata expected, got int"),
    (lambda m: m.storage_data.update(x=5), "MetadataIndex expected, got str"),
    (lambda m: setattr(m, "storage_data", None), "not what torch.distributed.checkpoint writes"),
])
def test_metadata_that_does_not_hang_together_is_refused(megatron, how, words):
    folder, _ = megatron
    changed(folder, how)
    line = refusal(lambda: open_dcp(folder).read(EMBED))
    assert line.startswith(f"{folder}/.metadata: ") and words in line, line


def test_metadata_that_is_an_attack_is_not_run(megatron):
    folder, _ = megatron
    mark = folder / "ran"
    changed(folder, lambda m: setattr(m, "planner_data", Reduced(os.system, f"touch {mark}")))
    line = refusal(lambda: open_dcp(folder))
    assert line.startswith(f"{folder}/.metadata: its pickle asks for posix.system") and not mark.exists()
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert "Metadata expected, got dict" in refusal(lambda: open_dcp(folder))
    (folder / ".metadata").write_bytes(b"")
    assert refusal(lambda: open_dcp(folder)).startswith(f"{folder}/.metadata: damaged")


def test_an_object_is_read_without_running_it(megatron):
    folder, _ = megatron
    mark = folder / "ran"
    evil = [("o", None, Reduced(os.system, f"touch {mark}")), ("n", None, argparse.Namespace(a=1))]
    lay_out(folder, {"x.distcp": evil}, {}, ["o", "n"])
    assert open_dcp(folder).objects == ("o", "n")
    assert "asks for posix.system" in refusal(lambda: read_object(folder, "o")) and not mark.exists()
    assert isinstance(read_object(folder, "n"), Foreign) and read_object(folder, "n").state == {"a": 1}
