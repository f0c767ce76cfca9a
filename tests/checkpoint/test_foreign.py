"""A Hugging Face folder read in pieces (checkpoint.init_from) is the folder read whole (scripts.convert), for
every family; in parts of tensors, as ranks hold them, too."""

import json
import random
from dataclasses import replace

import pytest
import torch
import whole_folder
from hf_models import changed, general_model
from safetensors.torch import load_file, save_file
from test_hf_fuzz import NO_SPECIAL_TOKENS, WRITTEN, write_random_weights

from checkpoint.disk.tensors_by_name import open_safetensors_folder
from checkpoint.hf import config as hf_config
from checkpoint.hf import tensors as hf
from checkpoint.hf.families.family import Arrangement
from checkpoint.hf.families.table import FAMILIES
from checkpoint.systems import foreign
from checkpoint.trained import weights_only
from config import Config, ConfigError
from config.reading import defaults
from model.router import ExpertsConfig
from parallel.sharding.boxes import Box


def generation_folder(folder, model_type):
    """A folder of random weights; returns the pieces, (box, tensor), as they are read whole."""
    model = general_model(model_type)
    keys = {**hf_config.to_hf_config(model, "float32", NO_SPECIAL_TOKENS)}
    assert keys["model_type"] == model_type
    (folder / "config.json").write_text(json.dumps(keys))
    write_random_weights(folder, model_type, model, random.Random(model_type))
    _, pieces = weights_only(Config(model=model), torch.device("cpu"), "fp32")
    found = whole_folder.stored_tensors(folder, model_type)
    whole_folder.read_weights(model_type, model, found, pieces)
    return pieces


@pytest.mark.parametrize("model_type", WRITTEN)
def test_pieces_read_alone_equal_the_whole(tmp_path, model_type):
    pieces = generation_folder(tmp_path, model_type)
    index = foreign.open_hf_folder(tmp_path)
    assert {piece.box.key for piece in index.pieces} == {box.key for box, _ in pieces}

    wants, expected = [], []
    for box, whole in pieces:
        row, column = box.size[0] // 2, box.size[-1] // 3
        half = box.rows(row, box.size[0])  # as one of two ranks has it
        rest = len(box.size) - 1
        corner = Box(box.key, box.shape, (1, *[column] * rest), (row, *[1] * rest))
        for part in (box, half, corner):
            value = whole[foreign.place_in(part, box)]
            wants.append((part, torch.zeros(part.size, dtype=whole.dtype)))
            expected.append(value)
    foreign.ForeignLoad(index, wants).fill()
    for (box, read), value in zip(wants, expected):
        assert torch.equal(read, value), box


def test_another_value_of_a_constant_is_refused(tmp_path):
    """As the xIELU of Apertus has them, beside what it learns."""
    generation_folder(tmp_path, "apertus")
    name = "model.layers.1.mlp.act_fn.beta"
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors[name].shape == () and float(tensors[name]) == 0.5
    save_file({**tensors, name: torch.tensor(0.75)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^{name} is 0\.75, and only 0\.5 is supported$"):
        foreign.open_hf_folder(tmp_path)
    model_type, model = hf_config.read_hf_config(tmp_path)
    found = whole_folder.stored_tensors(tmp_path, model_type)
    with pytest.raises(ConfigError, match=rf"^{name} is 0\.75, and only 0\.5 is supported$"):
        _, pieces = weights_only(Config(model=model), torch.device("cpu"), "fp32")
        whole_folder.read_weights(model_type, model, found, pieces)


ROWS = {"a": 4, "b": 6, "c": 2}  # of ours, in two groups


def interleaved(parts):
    """Rows as they should lie: in each of two groups two of a, three of b, one of c."""
    a, b, c = parts
    return torch.cat([a[:2], b[:3], c[:1], a[2:], b[3:], c[1:]])


@pytest.mark.parametrize("arrangement, theirs", [
    (Arrangement(), torch.cat),
    (Arrangement(groups=2), interleaved),
    (Arrangement(groups=2, transpose=True), lambda parts: interleaved(parts).t()),
    (Arrangement(groups=2, inner=True), lambda parts: interleaved(parts)[:, None]),
    (Arrangement(leading=1, outer=True, inner=True), lambda parts: torch.cat(parts)[None, None, :, None]),
    (Arrangement(leading=1, transpose=True), lambda parts: torch.cat(parts).t()[None]),
], ids=("rows", "groups", "transposed", "inner", "outer", "leading"))
def test_an_arrangement_holds_rows_where_it_says(arrangement, theirs):
    parts = [torch.randn(rows, 5) for rows in ROWS.values()]
    tensor = hf.HFTensor("x", parts, arrangement)
    value = torch.cat([hf.stack_of_parts(stack, tensor).contiguous() for stack in tensor.stacks()])
    assert torch.equal(value.view(tensor.shape), theirs(parts))

    read = hf.HFTensor("x", [torch.zeros_like(part) for part in parts], arrangement)
    whole_folder.copy_to_parts(theirs(parts), read)
    assert all(torch.equal(one, other) for one, other in zip(read.parts, parts))


def test_boxes_are_read_out_of_groups_of_a_stack(tmp_path):
    """gate and up of two experts: their rows alternate, and both matrices lie transposed in one tensor."""
    names = ("gate", "up")
    pairs = torch.randn(2, 2, 6, 4)  # [expert, name, row, column]
    values = {
        f"layers.0.mlp.experts.{expert}.{name}.weight": value
        for expert, pair in enumerate(pairs)
        for name, value in zip(names, pair)
    }
    stack = torch.stack([torch.stack([*pair], 1).flatten(0, 1).t() for pair in pairs])  # [expert, 4, 12]
    save_file({"stack": stack.contiguous()}, tmp_path / "model.safetensors")

    keys = [f"layers.{{layer}}.mlp.experts.{{expert}}.{name}.weight" for name in names]
    arrangement = Arrangement(leading=2, groups=6, transpose=True)
    family = replace(
        FAMILIES["mixtral"],
        tensors=dict.fromkeys(keys, "stack"),
        arrangements={"stack": lambda model: arrangement},
    )
    model = replace(defaults().model, mlp=ExpertsConfig(experts=2))
    said = {"name": "stack", "keys": keys, "numbers": {"layer": "0"}, "where": "file: stack"}
    found = list(foreign.places_in(family, model, shape=tuple(stack.shape), **said))
    assert {box.key: box.shape for box, _ in found} == {key: (6, 4) for key in values}
    index = foreign.ForeignIndex(
        path=tmp_path, save_id="", step=0, files={}, pieces=[], model=model, family=family,
        tensors=open_safetensors_folder(tmp_path), places={box.key: place for box, place in found},
    )
    for key, value in values.items():
        target = torch.zeros(3, 2)
        foreign.read_piece(index, Box(key, (6, 4), (1, 2), (3, 2)), target)
        assert torch.equal(target, value[1:4, 2:4]), key

    with pytest.raises(ConfigError, match=r"stack has shape \[3, 4, 12\], config.json makes its first dim 2"):
        list(foreign.places_in(family, model, shape=(3, 4, 12), **said))


def test_gpt_oss_is_read_in_mxfp4_as_published(tmp_path):
    """Its experts are in MXFP4: what is read is what transformers makes of the same bytes."""
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    small = {"hidden": 64, "mixer.heads": 4, "mlp": {"width": 32, "experts": 3, "top_k": 2}}
    model = changed(general_model("gpt_oss"), small)
    keys = hf_config.to_hf_config(model, "bfloat16", NO_SPECIAL_TOKENS)
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder, more in ((plain, {}), (packed, {"quantization_config": {"quant_method": "mxfp4"}})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**keys, **more}))
    write_random_weights(plain, "gpt_oss", model, random.Random(0))

    tensors = load_file(plain / "model.safetensors")
    unpacked = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 130, (experts, rows, columns // 32), dtype=torch.uint8)
            unpacked[name] = integration.convert_moe_packed_tensors(blocks, scales).contiguous()
            assert unpacked[name].shape == tensor.shape
            tensors = {key: value for key, value in tensors.items() if key != name}
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(unpacked, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})

    read = {}
    for folder in (plain, packed):
        _, pieces = weights_only(Config(model=model), torch.device("cpu"), "fp32")
        index = foreign.open_hf_folder(folder)
        foreign.ForeignLoad(index, pieces).fill()
        read[folder] = {box.key: tensor for box, tensor in pieces}
    assert len(read[plain]) > 3 * 6 and read[plain].keys() == read[packed].keys()
    assert all(torch.equal(tensor, read[packed][key]) for key, tensor in read[plain].items())
