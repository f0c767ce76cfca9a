"""train.train on the ranks of a warm pool, or in this process, on real files; and what it showed on its
way."""

import contextlib
import os
import pathlib
from collections import Counter
from dataclasses import dataclass, replace

import torch
from ranks import MODEL, corpus  # noqa: F401  corpus is for those who import this

import config
import train
from config.reading import resolve, split_argv
from config.tree import with_values
from parallel.topology.dims import GROUP_AXES
from parallel.wire import comm
from parallel.wire.world import World
from runtime.setup import LaunchEnv

WARM = 2  # the step that is looked at: the first makes what later ones reuse


def settings(prefix: str, *args: str, name: str = "llama3-tiny", **sections) -> config.Config:
    """A small model on the corpus `prefix` in fp64, two steps. sections: {parallel: {...}, ...}, keys set
    past the command line."""
    argv = [name, *MODEL, "--data.path", prefix, "--train.dtype", "fp64", "--train.steps", str(WARM)]
    name, file, rest = split_argv([*argv, "--checkpoint.every", "none", *args])
    cfg = resolve(name, file, rest)
    return replace(
        cfg, **{section: with_values(getattr(cfg, section), keys) for section, keys in sections.items()}
    )


def trained(world: World, cfg: config.Config, folder: str, observe) -> int:
    """train.train without its console output -> the exit code."""
    env = LaunchEnv(rank=world.rank, world=world.size)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(os.devnull, "w") as silent, contextlib.redirect_stdout(silent):
        return train.train(cfg, env, world, folder, observe=observe)


class Enough(Exception):
    """Ends a run from its watch."""


@dataclass(frozen=True)
class Seen:
    """One rank: its groups, ops, exchanges and memory. Everything but the values is of step WARM.

    groups: {axis: ranks}; ops: {microbatches of a step: the ops of this rank, in order}; layers: {stage:
    its blocks}; buckets: how many; wire: {(group, verb): (calls, bytes)}; peers: {global rank: bytes that
    were sent to it alone}; state: bytes of weights, masters (where they are another tensor), gradients and
    moments, and of what lies in host memory; kept: bytes that autograd kept for the backward, each storage
    once; values: the validation loss, then loss and norm of every step.
    """

    groups: dict[str, int]
    ops: dict[int, list[str]]
    layers: dict[int, list[int]]
    buckets: int
    wire: dict[tuple[str, str], tuple[int, int]]
    peers: dict[int, int]
    state: dict[str, int]
    kept: int
    values: list[float]


def stores(tensors) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(run) -> dict[str, int]:
    """Bytes of a rank's state between two steps."""
    away = [b for b in run.buckets if b.sharding.offload_master]
    moments = [flat for flats in run.optim.state().values() for flat in flats]
    weights = [b.weights for b in run.buckets]
    return {
        "weights": stores([w.local if w.full is None else w.full for w in weights]),
        "masters": stores([w.master for w in weights if w.master.data_ptr() != w.local.data_ptr()]),
        "gradients": stores([x for b in run.buckets for x in (b.grads.local, b.grads.full)]),
        "moments": stores(moments),
        "host": stores([b.weights.master for b in away] + (moments if away else [])),
    }


def look(world: World, cfg: config.Config, folder: str) -> Seen:
    """Trains to the end of step WARM, and tells what was seen."""
    seen, storages, peers, values = {}, {}, Counter(), []
    exchange = comm.start_transfers

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()  # held: no address is used twice
        return x

    def spied(sends, receives, group):
        for x, to in sends:
            peers[group.ranks[to]] += x.nbytes
        return exchange(sends, receives, group)

    def watch(point, step=None, **what):
        if point == "run.built":
            run = seen["run"] = what["run"]
            seen["layers"] = {n: [block.layer for block in stage.blocks] for n, stage in run.stages.items()}
            seen["ops"] = {n: [str(op) for op in ops] for n, ops in run.schedules.items()}
        elif point == "step.begin" and step == WARM:
            seen["run"].mesh.ledger.clear(), storages.clear(), peers.clear()
        elif point == "step.end":
            values.extend((float(what["loss"]), float(what["norm"])))
            if step == WARM:
                ledger = seen["run"].mesh.ledger
                seen["wire"] = {
                    (group, verb): (n, ledger[group, verb, "bytes"])
                    for (group, verb, kind), n in ledger.items()
                    if kind == "calls"
                }
                seen["kept"] = sum(s.nbytes() for s in storages.values())
                seen["state"], seen["peers"] = held(seen["run"]), dict(peers)
                seen["run"].data.close()
                raise Enough
        elif point == "eval.end":
            values.append(what["loss"])

    comm.start_transfers = spied
    try:
        with contextlib.suppress(Enough), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            trained(world, cfg, folder, watch)
    finally:
        comm.start_transfers = exchange
    run = seen.pop("run")
    for b in run.buckets:
        b.weights.wait_unshard()  # nothing is left under way
    groups = {name: getattr(run.mesh, name).size for name in GROUP_AXES}
    return Seen(groups=groups, buckets=len(run.buckets), values=values, **seen)
