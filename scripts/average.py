"""Averages the weights of several checkpoints: a model soup (arXiv 2203.05482), LAWA (arXiv 2306.03241).

    python -m scripts.average RUN@STEP RUN@STEP ... OUT       these checkpoints
    python -m scripts.average RUN OUT --last N                the N newest of a run

OUT becomes a run folder with the mean of the master weights, in fp32, without optimizer state. It works with
scripts.evaluate, scripts.generate, scripts.convert and checkpoint.init_from. meta.json lists what was
averaged. Each weight is summed in fp64.
"""
import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

import torch

from checkpoint import state
from checkpoint.branch import find_source
from checkpoint.disk import store
from checkpoint.disk.files import remove
from checkpoint.sizes import check_size
from checkpoint.trained import weights_only
from config import Config, ConfigError, Tree, provenance
from config.command_line import CommandParser
from config.reading import dump
from config.reading.function import differences
from config.tree import plain_data
from parallel.topology.mesh import Mesh
from runtime.failure import fail_cleanly

CPU = torch.device("cpu")


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.average",
        description=__doc__,
    )
    parser.add_argument("sources", nargs="+", metavar="RUN[@STEP]", help="and OUT, a new folder")
    parser.add_argument("--last", type=int, help="of a single RUN: average its newest N checkpoints")
    return parser


def main(argv: list[str]) -> int:
    args = arguments().parse_intermixed_args(argv)
    *sources, out = args.sources
    paths = find_checkpoints(sources, args.last)
    folder = Path(out)
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; give a folder that does not")
    average(paths, folder, provenance.of_script("scripts.average", argv))
    print(f"{folder}: the mean of {len(paths)} checkpoints: {', '.join(map(str, paths))}")
    return 0


def find_checkpoints(sources: list[str], last: int | None) -> list[Path]:
    """Return the folders to average. Raises ConfigError."""
    if last is None:
        if len(sources) < 2:
            raise ConfigError("average: needs at least two checkpoints and OUT, or RUN OUT --last N")
        return [find_source(source, "average") for source in sources]
    if len(sources) != 1 or last < 2:
        raise ConfigError("average: --last takes one RUN, and at least 2 of its checkpoints")
    saved = store.committed_checkpoints(Path(sources[0]) / "checkpoints")
    if len(saved) < last:
        raise ConfigError(f"average: {sources[0]} has {len(saved)} checkpoints, fewer than --last {last}")
    return [path for _, path in reversed(saved[:last])]


def average(paths: list[Path], folder: Path, made: Tree) -> None:
    """Write the run folder with the mean of the checkpoints. Raises ConfigError if they do not match.

    `made` records the code and command that make it (config/provenance.py).
    """
    indexes = [store.quick_check(path) for path in paths]
    metas = [index.meta for index in indexes]
    cfgs = [state.build_config(meta) for meta in metas]
    for path, meta, cfg in zip(paths[1:], metas[1:], cfgs[1:]):
        check_same_model(paths[0], path, cfgs[0], cfg)
        if meta["tokenizer"] != metas[0]["tokenizer"]:
            raise ConfigError(f"{path}: has another tokenizer than {paths[0]}; average runs of one tokenizer")
        starts = [each.get("bos") for each in (meta, metas[0])]
        if None not in starts and starts[0] != starts[1]:
            raise ConfigError(f"{path}: its documents begin differently from those of {paths[0]} (data.bos); "
                              "average runs of one kind")

    check_size(cfgs[-1].model, indexes[-1].pieces, str(paths[-1]))
    _, boxes = weights_only(cfgs[-1], CPU, "fp32")
    sums = [torch.zeros(tensor.shape, dtype=torch.float64) for _, tensor in boxes]
    for index in indexes:
        store.load(index, boxes, strict=False, allow_cast=True)
        for total, (_, tensor) in zip(sums, boxes):
            total += tensor
    for total, (_, tensor) in zip(sums, boxes):
        tensor.copy_(total / len(paths))

    meta: Tree = {
        **metas[-1],
        "config": plain_data(cfgs[-1]),
        "averaged": [str(path) for path in paths],
        "provenance": made,
        "layout": dataclasses.asdict(Mesh.single().dims),
    }
    try:
        store.save(folder / "checkpoints", meta["step"], boxes, meta, keep=1)
        (folder / "config.yaml").write_text(dump(cfgs[-1]))
        tokenizer = paths[-1].parent.parent / "tokenizer"
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, folder / "tokenizer")
    except BaseException:
        remove(folder)
        raise


def check_same_model(first_path: Path, path: Path, first: Config, other: Config) -> None:
    """Raise ConfigError if the two models compute different functions."""
    for key, (left, right) in differences(first.model, other.model).items():
        raise ConfigError(
            f"{key}: {path} has {right}, and {first_path} has {left}; average weights of one model"
        )


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
