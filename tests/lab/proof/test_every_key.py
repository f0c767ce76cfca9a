"""Every key of the config is on in two layouts of the cells that scripts.verify --layouts all draws."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from config import Config, layer_models
from config.reading import defaults, unused
from config.reading.kinds import every_path
from config.tree import has_path, value_at
from lab.proof import lattice
from lab.proof.precision.cells import choose_cells
from lab.proof.verify.overrides import Overrides
from lab.proof.verify.tiny_config import placed, tiny_config

EVERY_KEY = list(every_path(Config))
WORLD = 2

# {key that no cell turns on: why}
WITHOUT_CELLS = {
    "train.device": "the proof runs on the CPU",
    "train.cuda_graphs": "of a GPU",
    "train.compile": "needs a C++ compiler, and minutes a layout: tests/kernels/test_jit.py",
    "parallel.elastic": "chooses the layout before a run: tests/plan/test_elastic.py",
    "parallel.auto": "chooses the layout before a run: tests/test_auto_layout.py",
    "log.routing_every": "tests/runtime/test_routing.py, which compares the record of every layout",
    "train.replay_routing": "a record of the same model: tests/runtime/test_routing.py, under every layout",
    "data.cache": "a folder, of data that the proof does not make",
    "log.wandb": "a copy of what is logged",
    **dict.fromkeys(("log.project", "log.entity", "log.group", "log.tags", "log.notes"), "of a tracker"),
    "log.mlflow": "a copy of what is logged",
    "log.comet": "a copy of what is logged",
    "log.alert_command": "runs after a failure",
    "log.tensorboard": "a copy of what is logged",
    "profile.steps": "writes traces beside the run",
    "profile.memory": "writes the allocations of a GPU beside the run",
}

# Families whose cells have, together, every key of the model: of the last, only what all of their cells have.
COVERED = ("gpt2-tiny", "qwen2-moe-tiny", "deepseek-v3-tiny")
OTHERS = (
    "mistral-tiny", "qwen3-moe-tiny", "olmoe-tiny", "deepseek-v2-lite-tiny", "glm4.5-tiny", "gemma2-tiny",
    "cohere2-tiny", "granite-tiny", "ministral3-tiny", "phi4-mini-tiny", "olmo3-tiny", "delta-tiny",
    "olmo-hybrid-tiny", "kimi-delta-tiny", "mamba-tiny", "nemotron-h-tiny", "short-conv-tiny",
    "gpt-oss-tiny", "llama4-tiny", "nanochat-tiny", "step3.7-tiny", "shared-keys-tiny",
)
FORMS = Overrides((  # of llama3-tiny: what no recipe has
    ("model.mixer.chunk", "9"),
    ("model.mixer.sinks", "true"),
    ("model.mixer.gate", "head"),
    ("model.mixer.gate.by", "softplus"),
    ("model.mixer.value_dim", "6"),
    ("model.mixer.value_scale", "0.7"),
    ("model.mixer.growth.every", "5"),
    ("model.mixer.growth.first", "1"),
    ("model.mixer.rope.scaling.kind", "yarn"),
    ("model.mixer.rope.scaling.truncate", "false"),
))


def layout_of(values: lattice.Values) -> tuple:
    return tuple(values[key] for key in (*lattice.DEGREES, *lattice.LAYOUT))


def jobs() -> Iterator[tuple[object, Config]]:
    """(a layout, the job of a cell in it)"""
    plain = [tiny_config(name, WORLD) for name in (*COVERED, *OTHERS)]
    for name, cfg in zip((*COVERED, *OTHERS, "forms"), (*plain, tiny_config("llama3-tiny", WORLD, FORMS))):
        found = lattice.find_layouts(cfg, WORLD)
        cells = [layout | lattice.default_switches() for layout in found.layouts[:2]]
        for values in lattice.covering_cells(found) if name in COVERED else cells:
            yield layout_of(values), placed(found.config(values), Path("/proof"), "run")
    for cell in choose_cells("llama3-tiny", WORLD):
        yield cell.layout, cell.config("llama3-tiny", WORLD, "data")


def kinds_of(cfg: Config) -> list[Config]:
    """The config, and as each of its kinds of blocks has it."""
    return [cfg, *(replace(cfg, model=model) for model in layer_models(cfg.model).values())]


def has_another_value(cfg: Config, key: str, usual: Config) -> bool:
    return has_path(cfg, key) and not (has_path(usual, key) and value_at(cfg, key) == value_at(usual, key))


@pytest.mark.slow
def test_every_key_is_on_in_two_layouts():
    """A key counts where it has another value than the default, or the default config does not have its part,
    and config/reading/unused.py finds that it acts.
    """
    usual, layouts = defaults(), {key: set() for key in EVERY_KEY if key not in WITHOUT_CELLS}
    assert len(layouts) + len(WITHOUT_CELLS) == len(EVERY_KEY), "a key of WITHOUT_CELLS is not in the schema"
    for layout, cfg in jobs():
        wanted = [key for key, where in layouts.items() if len(where) < 2 and layout not in where]
        on = {key for key in wanted for kind in kinds_of(cfg) if has_another_value(kind, key, usual)}
        on -= {key for key, _, _ in unused.find_unused(cfg, WORLD)} if on else set()
        for key in on:
            layouts[key].add(layout)
    assert not {key: where for key, where in layouts.items() if len(where) < 2}
