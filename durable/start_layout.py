"""Choose the layout at launch: the planner's (parallel.auto), or one for the available ranks
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
    broadcast_from_first: Callable[[str, Callable[[], list[Any]]], list[Any]],
) -> tuple[Config, list[str]]:
    """Return the config, with the planner's layout under parallel.auto, and header lines about it.

    done: completed steps. stated: keys (section.key) to keep. broadcast_from_first(key, work): broadcasts
    work() of rank 0, the only rank that searches. Raises ConfigError.
    """
    if cfg.parallel.auto is None:
        return cfg, []
    from plan import auto  # imported only if needed

    def choose() -> list[Any]:
        device = rank_device(env.device)
        saved = trained_layout(folder)
        layout = auto.layout_of_run(cfg, env.world, device, stated, after=done, saved=saved)
        return [layout.values, layout.text]

    values, text = broadcast_from_first("auto_layout", choose)
    return with_values(cfg, values), [f"{'auto':<9}{text}"]


def trained_layout(folder: Path) -> tuple[Config, int] | None:
    """Return the config and number of ranks of the last launch that trained.

    Returns None if there is none, or if the config cannot be read.
    """
    try:
        ranks = [start.world for start in read_starts(folder) if start.first_step is not None]
        cfg = from_tree(current_tree(config.read_yaml(folder / "config.yaml")))
    except (OSError, ConfigError):  # damaged, or written by another version
        return None
    return (cfg, ranks[-1]) if ranks else None


def elastic_layout(cfg: Config, env: setup.LaunchEnv, done: int) -> Config:
    """Return the config, under parallel.elastic with a layout for the available ranks. done: completed steps.

    Raises ConfigError.
    """
    if not cfg.parallel.elastic:
        return cfg
    from plan import elastic  # imported only if needed

    layout = elastic.layout_for(cfg, env.world, rank_device(env.device), done)
    note = elastic.describe(layout, env.world)
    if note and env.rank == 0:
        print("\n".join(wrapped(note, output_width())), flush=True)
    return layout.cfg


def rank_device(device: torch.device) -> RankDevice:
    """Describe a rank's device to the planner: name and memory of a GPU."""
    if device.type != "cuda":
        return RankDevice()
    properties = torch.cuda.get_device_properties(device)
    return RankDevice(properties.name, properties.total_memory)
