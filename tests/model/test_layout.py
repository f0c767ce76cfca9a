"""config/reading/layout.py: which layout ranks take where none is given, and which they cannot have."""

from dataclasses import replace

import pytest

from config import ConfigError
from config.reading import from_tree, recipe
from config.reading.layout import RequestedLayout, layout_of_weights


def layout(name: str, world: int, asked: RequestedLayout):
    cfg = from_tree(recipe(name), name)
    parallel = layout_of_weights(replace(cfg, model=replace(cfg.model, vocab=32000)), world, asked).parallel
    return parallel.tp, parallel.pp, parallel.ep, parallel.etp


@pytest.mark.parametrize(
    "name, world, on_node, want",
    [
        ("llama3-8b", 1, 1, (1, 1, 1, 1)),
        ("llama3-8b", 8, 8, (8, 1, 1, 1)),
        ("llama3-8b", 64, 8, (8, 8, 1, 1)),  # tp stays in a node
        ("llama3-8b", 12, 4, (4, 3, 1, 1)),
        ("llama3-8b", 6, 6, (2, 3, 1, 1)),  # 6 and 3 do not divide 32 heads
        ("mixtral-8x7b", 16, 8, (8, 2, 8, 1)),
        ("mixtral-8x7b", 16, 16, (16, 1, 8, 2)),  # two ranks an expert
        ("deepseek-v3", 64, 8, (8, 8, 8, 1)),
    ],
)
def test_ranks_become_tp_within_a_node_then_pp(name, world, on_node, want):
    assert layout(name, world, RequestedLayout(on_node=on_node)) == want


def test_of_two_degrees_one_follows_from_the_other():
    assert layout("llama3-8b", 8, RequestedLayout(tp=2, on_node=8))[:2] == (2, 4)
    assert layout("llama3-8b", 8, RequestedLayout(pp=2, on_node=8))[:2] == (4, 2)
    assert layout("llama3-8b", 8, RequestedLayout(tp=1, on_node=8))[:2] == (1, 8)


@pytest.mark.parametrize(
    "world, asked, says",
    [
        (8, RequestedLayout(tp=2, pp=2),
         r"parallel.tp\*pp = 2\*2 = 4 on 8 ranks: .*; start 4 ranks, or choose"),
        (3, RequestedLayout(tp=3), "parallel.tp: 3 does not divide model.mixer.heads=32"),
        (64, RequestedLayout(pp=64), "parallel.pp: 64 stages, and model.layers is 32; lower it"),
        (37, RequestedLayout(), r"the rest of 37 ranks are stages .*; start 36 ranks$"),
    ],
)
def test_layouts_that_ranks_cannot_have_are_refused(world, asked, says):
    with pytest.raises(ConfigError, match=says):
        layout("llama3-8b", world, asked._replace(on_node=world))
