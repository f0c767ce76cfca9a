"""The layout of a start that asks for one: the planner's (parallel.auto), or one for the ranks that there are
(parallel.elastic).
"""
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

import config
from config import Config, ConfigError
from config.reading import from_tree
from config.reading.earlier import current_tree
from config.terminal import output_width, wrapped
from config.tree import with_values
from plan.job import RankDevice
from runtime import setup
from runtime.goodput import read_starts


def auto_layout(
    cfg: Config,
    env: setup.LaunchEnv,
    folder: Path,
    done: int,
    stated: Collection[str],
    told_by_first: Callable[[str, Callable[[], list[Any]]], list[Any]],
) -> tuple[Config, list[str]]:
    """The config, under parallel.auto with the planner's layout, and a line of the header about it.

    done: steps of the run. stated: keys (section.key) that stay. told_by_first(key, work): what work() is on
    rank 0, which alone searches. Raises ConfigError.
    """
    if cfg.parallel.auto is None:
        return cfg, []
    from plan import auto  # a run that does not ask has nothing to load

    def choose() -> list[Any]:
        device = rank_device(env.device)
        saved = trained_layout(folder)
        layout = auto.layout_of_run(cfg, env.world, device, stated, after=done, saved=saved)
        return [layout.values, layout.text]

    values, text = told_by_first("auto_layout", choose)
    return with_values(cfg, values), [f"{'auto':<9}{text}"]


def trained_layout(folder: Path) -> tuple[Config, int] | None:
    """The config with which the last start of a run has trained, and its number of ranks.

    None if no start has trained, or the config cannot be read.
    """
    try:
        ranks = [start.world for start in read_starts(folder) if start.first_step is not None]
        cfg = from_tree(current_tree(config.read_yaml(folder / "config.yaml")))
    except (OSError, ConfigError):  # of another version, or damaged
        return None
    return (cfg, ranks[-1]) if ranks else None


def elastic_layout(cfg: Config, env: setup.LaunchEnv, done: int) -> Config:
    """The config; under parallel.elastic with a layout for the ranks that there are. done: steps of the run.

    Raises ConfigError.
    """
    if not cfg.parallel.elastic:
        return cfg
    from plan import elastic  # a run that does not ask has nothing to load

    layout = elastic.layout_for(cfg, env.world, rank_device(env.device), done)
    note = elastic.describe(layout, env.world)
    if note and env.rank == 0:
        print("\n".join(wrapped(note, output_width())), flush=True)
    return layout.cfg


def rank_device(device: torch.device) -> RankDevice:
    """A rank's device as the planner knows it: of a GPU its name and memory."""
    if device.type != "cuda":
        return RankDevice()
    properties = torch.cuda.get_device_properties(device)
    return RankDevice(properties.name, properties.total_memory)
