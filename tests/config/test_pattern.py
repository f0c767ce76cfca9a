"""Kinds of blocks and their pattern: what is read, what it means for each layer, and what is refused."""

import random

import pytest

from config import ConfigError, layer_kinds, layer_model
from config.pattern import PLAIN, kinds_of_layers, pattern_text
from config.reading import dump, function, resolve
from config.reading.suggestions import check_rules
from model.mla import LatentConfig

NAMES = ("local", "full", "dense")
LOCAL = {"model.blocks.local.mixer.window": "16", "model.pattern": "(2 local, block)..."}


def resolved(settings=LOCAL, name="llama3-tiny", file=None):
    return resolve(name, file, [f"--{key}={value}" for key, value in settings.items()])


def refused(settings):
    with pytest.raises(ConfigError) as error:
        check_rules(resolved({"model.vocab": 500, **settings}))
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- the grammar -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern, layers, kinds", [
    ("(5 local, full) x 3, local", 19, [*(["local"] * 5 + ["full"]) * 3, "local"]),
    ("3 dense, block...", 6, ["dense"] * 3 + [PLAIN] * 3),
    ("dense x 3, block...", 4, ["dense"] * 3 + [PLAIN]),
    ("(2 local, full)...", 5, ["local", "local", "full", "local", "local"]),
    ("full, (local x 2, full)...", 6, ["full", "local", "local", "full", "local", "local"]),
    ("2 ((local, full) x 2)", 8, ["local", "full"] * 4),
    ("  local...", 2, ["local"] * 2),
    ("3 dense, block...", 3, ["dense"] * 3),
    (None, 2, [PLAIN] * 2),
])
def test_a_pattern_is_its_layers(pattern, layers, kinds):
    assert list(kinds_of_layers(pattern, NAMES, layers)) == kinds


def written(kinds, draw):
    """One of the spellings of these layers."""
    if len(kinds) > 1 and draw.random() < 0.6:
        cut = draw.randrange(1, len(kinds))
        return f"{written(kinds[:cut], draw)}, {written(kinds[cut:], draw)}"
    if len(set(kinds)) == 1 and draw.random() < 0.7:
        count = len(kinds)
        return draw.choice((f"{count} {kinds[0]}", f"{kinds[0]} x {count}", f"{count}({kinds[0]})"))
    if len(kinds) > 1:
        return "(" + ", ".join(kinds) + ")"
    return kinds[0]


def test_every_spelling_is_read_back():
    draw = random.Random(5)
    for _ in range(300):
        kinds = tuple(draw.choice((PLAIN, *NAMES)) for _ in range(draw.randint(1, 12)))
        assert kinds_of_layers(written(kinds, draw), NAMES, len(kinds)) == kinds
        text = pattern_text(kinds)
        assert kinds_of_layers(text, NAMES, len(kinds)) == kinds, text


def test_a_period_is_written_for_any_depth():
    assert pattern_text(["local"] * 5 + ["full"]) == "5 local, full..."
    assert pattern_text((["local"] * 5 + ["full"]) * 2) == "(5 local, full)..."
    assert pattern_text(["local"] * 4) == "local..."
    assert pattern_text([PLAIN] * 4) is None


@pytest.mark.parametrize("pattern, said", [
    ("(5 local, block) x 3", "makes 18 layers, and model.layers is 4; set model.layers 18, or end the"),
    ("lcal...", "lcal is not a kind of model.blocks; did you mean local?"),
    ("nothing...", "nothing is not a kind of model.blocks; there are block, local"),
    ("3 local,", "it ends where a kind of block is expected"),
    ("(local", "a bracket is not closed"),
    ("local)", "')' is not expected there"),
    ("local..., block", "... fills the remaining layers, so it must end the pattern"),
    ("0 local", "0 is not a number of layers"),
    ("local local", "'local' is not expected there"),
    ("*", "'*' is not a part of a pattern"),
    ("", "it ends where a kind of block is expected"),
    ("99999 (99999 local)", "more than 100,000 layers"),
])
def test_a_pattern_that_cannot_be_read_is_one_line(pattern, said):
    line = refused({**LOCAL, "model.pattern": pattern})
    assert line.startswith("model.pattern: ") and said in line


# ---- what layers have --------------------------------------------------------------------------------------


def test_a_layer_has_what_its_kind_states_and_else_what_the_model_has():
    cfg = resolved({
        **LOCAL, "model.mixer.rope.base": "77", "model.blocks.local.mixer.rope.scaling": "none",
        "model.blocks.other.mlp.width": "96", "model.blocks.other.mixer.rope": "none",
        "model.pattern": "local, block, other...",
    })
    local, block, other, last = (layer_model(cfg.model, layer) for layer in range(4))
    assert [model.mixer.window for model in (local, block, other)] == [16, None, None]
    assert local.mixer.rope.scaling is None and block.mixer.rope.scaling.factor == 8.0
    assert local.mixer.rope.base == block.mixer.rope.base == 77.0
    assert other.mixer.rope is None and other.mlp.width == 96 and local.mlp.width == 384
    assert last == other and layer_model(cfg.model, 7) == other  # of multi-token prediction
    assert layer_kinds(cfg.model) == ("local", "block", "other", "other")


def test_a_kind_may_have_another_mixer():
    cfg = resolved({
        "model.blocks.latent.mixer.kind": "latent",
        "model.blocks.latent.mixer.kv_rank": "32",
        "model.pattern": "latent, block...",
    })
    first = layer_model(cfg.model, 0).mixer
    assert isinstance(first, LatentConfig) and (first.kv_rank, first.heads) == (32, 8)  # heads: of both kinds
    assert layer_model(cfg.model, 1).mixer == cfg.model.mixer


def test_recipe_file_and_command_line_are_merged(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "model:\n  blocks: {local: {mixer: {window: 4, rope: {base: 50}}}, nope: {mixer.rope: none}}\n"
        "  pattern: (local, nope)...\n"
    )
    cfg = resolved({"model.blocks.local.mixer.window": "9"}, file=str(file))
    local = layer_model(cfg.model, 0).mixer
    assert (local.window, local.rope.base) == (9, 50.0) and layer_model(cfg.model, 1).mixer.rope is None


def test_a_dump_is_read_back(tmp_path):
    cfg = resolved({**LOCAL, "model.blocks.local.mixer.rope.scaling": "none"})
    (tmp_path / "config.yaml").write_text(dump(cfg))
    assert resolve(None, str(tmp_path / "config.yaml"), []) == cfg
    assert "mixer.window: 16" in dump(cfg)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings, said", [
    ({"model.blocks.local.mixer.window": "3"}, "model.blocks: no layer is of the kinds local"),
    ({**LOCAL, "model.blocks.local.mixer.widow": "3"}, "model.blocks.local.mixer.widow: no such key"),
    ({**LOCAL, "model.blocks.local.experts": "3"}, "model.blocks.local.experts: no such key; a kind"),
    ({**LOCAL, "model.blocks.block.mixer.window": "3"}, "model.blocks.block: 'block' cannot be the name"),
    ({**LOCAL, "model.blocks.local.mixer.window": "0"}, "model.blocks.local.mixer.window: 0 must be"),
    ({**LOCAL, "model.blocks.local.mixer.heads": "3"}, "model.blocks.local.mixer.heads: 3 does"),
    ({**LOCAL, "model.mixer.kv_heads": "3"}, "model.mixer.kv_heads: 3 does not divide"),
    ({"model.blocks": "local"}, "model.blocks: expected kinds of blocks as "),
    ({"model.blocks.local": "3"}, "model.blocks.local: expected keys and values, got '3'"),
])
def test_a_kind_that_does_not_do_is_named(settings, said):
    assert refused(settings).startswith(said)


# ---- what weights compute ----------------------------------------------------------------------------------


def test_two_spellings_of_the_same_layers_are_one_function():
    other = {"model.blocks.far.mixer.window": "none", "model.pattern": "2 block, far, block"}
    one, two = resolved().model, resolved({**other, "model.mixer.window": "16"}).model
    assert function.differences(one, two) == {}
    assert layer_model(one, 2).mixer == layer_model(two, 2).mixer
    three = resolved({**LOCAL, "model.blocks.local.mixer.window": "17"}).model
    assert function.differences(one, three) == {"model.mixer.window": (16, 17)}
