"""A Hugging Face folder read in pieces (checkpoint.init_from) is the folder read whole (scripts.convert), for
every family; in parts of tensors, as ranks hold them, too."""

import json
import random

import pytest
import torch
from test_hf_fuzz import NO_SPECIAL_TOKENS, WRITTEN, general_model, write_random_weights

from build import weights_only
from checkpoint import foreign, hf, hf_config
from checkpoint.hf_families import FAMILIES
from config import Config, ConfigError


def folder_of(folder, model_type):
    """A folder of random weights; returns the pieces, (box, tensor), as they are read whole."""
    model = general_model(model_type)
    keys = {**hf_config.to_hf_config(model, "float32", NO_SPECIAL_TOKENS)}
    assert keys["model_type"] == model_type
    (folder / "config.json").write_text(json.dumps(keys))
    write_random_weights(folder, model_type, model, random.Random(model_type))
    _, pieces = weights_only(Config(model=model), torch.device("cpu"), "fp32")
    found = hf.stored_tensors(folder, model_type)
    hf.read_weights(model_type, model, found, pieces)
    return pieces


@pytest.mark.parametrize("model_type", [name for name in WRITTEN if not FAMILIES[name].leading])
def test_pieces_are_what_the_whole_is(tmp_path, model_type):
    pieces = folder_of(tmp_path, model_type)
    index = foreign.open_hf_folder(tmp_path)
    assert {piece.box.key for piece in index.pieces} == {box.key for box, _ in pieces}

    wants, expected = [], []
    for box, whole in pieces:
        half = box.rows(box.size[0] // 2, box.size[0])  # as one of two ranks has it
        for part, value in ((box, whole), (half, whole[box.size[0] // 2:])):
            wants.append((part, torch.zeros(part.size, dtype=whole.dtype)))
            expected.append(value)
    foreign.ForeignLoad(index, wants).fill()
    for (box, read), value in zip(wants, expected):
        assert torch.equal(read, value), box


@pytest.mark.parametrize("model_type", [name for name in WRITTEN if FAMILIES[name].leading])
def test_a_family_that_stacks_is_refused_with_the_way_out(tmp_path, model_type):
    folder_of(tmp_path, model_type)
    with pytest.raises(ConfigError, match=f"{model_type} stacks .*scripts.convert from-hf"):
        foreign.open_hf_folder(tmp_path)
