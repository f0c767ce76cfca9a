"""Run <-> checkpoint: the master weights under their canonical names, the optimizer's moments under NAME@MOMENT, and what PowerSGD
has yet to send (parallel/powersgd.py).

`run` is a build.Run. What a checkpoint must agree with to be continued stands in its meta.json; the rest may change.
"""
import dataclasses
import pathlib
from collections.abc import Sequence

import torch
from torch import Tensor

from checkpoint import store, together
from checkpoint.saver import Saver
from config import ConfigError, sequences
from parallel import comm
from parallel.boxes import Box
from parallel.params import Bucket
from parallel.powersgd import BASIS, ERROR, PowerSGD

HARD = ("train.seed", "train.seq_len", "train.global_batch", "train.ramp",
        "data.split", "data.doc_mask", "optim.name")  # else samples repeat or are lost
# what a finished run may be asked for in another way: none of it shows in its result
IDLE = ("log.", "profile.", "checkpoint.every", "checkpoint.keep", "checkpoint.resume",
        "checkpoint.async_save", "checkpoint.timeout_s", "train.max_minutes", "train.threads",
        "parallel.timeout_s", "data.path", "data.tokenizer", "data.cache", "data.prefetch")
Boxes = Sequence[tuple[Box, Tensor]]
FREE = ("model.preset", "model.attention", "model.dropout", "model.init_std", "model.aux_loss", "model.z_loss", "model.jitter",
        "model.capacity", "model.drop", "model.pad", "model.router_bias_rate")  # the rest of model.* is hard


def boxes(buckets: list[Bucket], state: dict[str, list[Tensor]], alone: bool = False) -> list[tuple[Box, Tensor]]:
    """[(box, view)] of all that a checkpoint holds. state: {suffix: a flat tensor a bucket}; alone: see Bucket.boxes."""
    return [(dataclasses.replace(box, key=box.key + suffix), part)
            for i, bucket in enumerate(buckets)
            for suffix, flat in [("", bucket.master), *((f"@{name}", flats[i]) for name, flats in state.items())]
            if flat is not None  # an optimizer may keep a moment of some buckets alone
            for box, part in bucket.boxes(flat, alone)]


def powers(buckets: list[Bucket]) -> list[PowerSGD]:
    return [b.power for b in buckets if b.power is not None]


def take(buckets: list[Bucket]) -> None:
    """Masters were filled: bring the weights up to them."""
    for b in buckets:
        b.round()
        b.publish()


def describe(run, step: int) -> dict:
    """meta.json: where the run stands and what it is."""
    cfg = run.cfg
    return {"step": step, "tokens": sequences(cfg.train, step) * cfg.train.seq_len, "config": dataclasses.asdict(cfg),
            "tokenizer": run.data.tokenizer.fingerprint, "data": run.data.fingerprint, "torch": torch.__version__,
            "layout": dataclasses.asdict(run.mesh.layout), "loss_scale": run.scaler.state()}


def flat(tree: dict) -> dict:
    return {f"{s}.{k}": v for s, section in tree.items() for k, v in section.items()}


def agree(meta: dict, run, where: str) -> list[str]:
    """Warnings for settings that changed since the save. Raises ConfigError for those that may not."""
    old, new = flat(meta["config"]), flat(dataclasses.asdict(run.cfg))
    changed = [k for k in new if old.get(k) != new[k] and not k.startswith(("log.", "eval.", "checkpoint.", "profile."))]
    hard = [k for k in changed if k in HARD or (k.startswith("model.") and k not in FREE)]
    if hard:
        k = hard[0]
        raise ConfigError(f"{k}: {where} was trained with {old.get(k)}, not {new[k]}; set it back, or start anew with "
                          f"--log.name OTHER (and --checkpoint.init_from to keep the weights)")
    for name, now in (("tokenizer", run.data.tokenizer.fingerprint), ("data", run.data.fingerprint)):
        if meta[name] != now:
            raise ConfigError(f"data.path: the {name} of {where} has fingerprint {meta[name][:12]}, this one {now[:12]}; give the "
                              f"same data, or start anew with --log.name OTHER --checkpoint.init_from {where}")
    if meta["torch"] != torch.__version__:
        changed.append(f"torch {meta['torch']} -> {torch.__version__}")
    return [f"resumed with another {k}" + (f" ({old.get(k)} -> {new[k]})" if k in new else "") for k in changed]


def check_end(meta: dict, run, where: pathlib.Path, here: bool) -> None:
    """meta: of the checkpoint `where`; here: it is of this run's own folder.

    Raises ConfigError for a checkpoint beyond the horizon, and for one at the horizon that other settings
    made: a run never reports another run's result as its own."""
    t, step, name = run.cfg.train, meta["step"], run.cfg.log.name
    key = next(key for key in ("steps", "tokens", "flops") if getattr(t, key) is not None)
    way = f"raise train.{key}, or choose another --log.name"
    if step < run.steps:
        return
    if step > run.steps:
        beyond = f"at step {step:,}, beyond the {run.steps:,} asked for"
        raise ConfigError(f"train.{key}: {where} is {beyond}; {way}")
    at = f"already at step {step:,} of {run.steps:,}"
    if not here:
        raise ConfigError(f"train.{key}: {where} is {at}: nothing is left to train; {way}")
    old, new = flat(meta["config"]), flat(dataclasses.asdict(run.cfg))
    other = [k for k in new if k in old and old[k] != new[k] and not k.startswith(IDLE)]
    if other:
        k = other[0]
        raise ConfigError(f"{k}: {name} is {at}, trained with {old[k]}, not {new[k]}; set it back, {way}")


def find(path: str, log: list[str], bad: dict[pathlib.Path, str] | None = None,
         check=store.verify) -> pathlib.Path:
    """The checkpoint that a path means: a checkpoint folder, a checkpoints folder, or a run folder. bad,
    check: as store.newest has them."""
    p = pathlib.Path(path)
    if (p / "index.json").exists():
        if p in (bad or {}):
            raise store.IntegrityError(bad[p])
        check(p)
        return p
    root = p / "checkpoints" if (p / "checkpoints").is_dir() else p
    found = store.newest(root, log, bad, check) if root.is_dir() else None
    if found is None:
        raise ConfigError(f"checkpoint: {path} holds no checkpoint; give a run folder or a folder like .../checkpoints/step_00000100")
    return found


def load_weights(buckets: list[Bucket], path: pathlib.Path, more: Boxes = (),
                 meet=lambda work: work()) -> None:
    """The weights alone, whatever else the checkpoint holds (evaluation, init_from, export). more: beside the
    buckets'; meet(work): how many ranks do their parts of it."""
    meet(lambda: store.load(path, [*boxes(buckets, {}), *more], strict=False, allow_cast=True))
    take(buckets)


def load(run, path: pathlib.Path, meta: dict | None = None) -> list[str]:
    """Weights and optimizer state into the run, whatever layout saved them; returns warnings. Each rank
    verifies what it reads; an IntegrityError of one is raised on all."""
    world = run.mesh.world
    meta = store.meta(path) if meta is None else meta
    warnings = agree(meta, run, str(path))
    saved, states = flat(meta["config"]).get("optim.states", "fp32"), run.cfg.optim.states
    if saved != states:
        warnings.append(f"optim.states: masters and moments of {path} were converted from {saved} to {states}" + ", to nearest" * (states == "bf16"))
    wants = boxes(run.buckets, run.optim.state()) + run.routers.boxes()
    errors = [torch.zeros_like(power.error) for power in powers(run.buckets)]
    kept: set[tuple] = set()
    if run.cfg.parallel.compress == "powersgd":  # on every rank, though one may have no such bucket
        kept = first(lambda: {(p["key"], tuple(p["shape"])) for p in store.index(path)["pieces"]}, world)
    more = [pair for power, total in zip(powers(run.buckets), errors) for pair in power.boxes(total)]
    wants += [(box, x) for box, x in more if (box.key, box.shape) in kept]  # the rest begins anew
    keys = {box.key for box, _ in wants}  # a rank of many holds a part
    others = set().union(*comm.all_objects(keys, world))
    allow, cast = (f"*{ERROR}", f"*{BASIS}*"), saved != states
    every_rank(lambda: store.load(path, wants, allow=allow, others=others, allow_cast=cast), world,
               run.cfg.checkpoint.timeout_s)
    for power, total in zip(powers(run.buckets), errors):
        power.take(total)
    take(run.buckets)
    run.scaler.load(meta.get("loss_scale"))
    return warnings


def save(run, saver: Saver, root: pathlib.Path, step: int, at) -> None:
    """One committed checkpoint of the run as it stands after `step`: every rank writes what only it brings. A threaded
    saver may still be writing when this returns; its errors come with the next call."""
    world = saver.group or run.mesh.world
    mine = boxes(run.buckets, run.optim.state(), alone=True) + run.routers.boxes(alone=True)
    mine += [pair for power in powers(run.buckets) for pair in power.boxes(power.share(), alone=True)]
    c = run.cfg.checkpoint
    saver.save(root, step, mine, describe(run, step), c.keep, at, world.index, world.size,
               lambda x: comm.all_objects(x, world), c.timeout_s if world.size > 1 else None)


def resume(run, root: pathlib.Path) -> tuple[int, list[str]]:
    """Take up what checkpoint.resume and checkpoint.init_from name -> (steps done, notes for the log).

    Rank 0 looks and decides for all, so that ranks which see the disk differently still load the same
    checkpoint. It reads the small files alone: every rank then verifies what it reads, and what one of them
    finds damaged is given up by all."""
    c, world = run.cfg.checkpoint, run.mesh.world
    bad: dict[pathlib.Path, str] = {}

    def look() -> tuple[pathlib.Path | None, pathlib.Path | None, dict, list[str]]:
        notes: list[str] = []
        if root.is_dir():
            store.clean(root)  # what a killed writer left; the run's lock is ours
        if c.resume == "none" and root.is_dir() and store.committed(root):
            raise ConfigError(f"checkpoint.resume: none, but {root} holds checkpoints; choose another --log.name, or move them away")
        path = store.newest(root, notes, bad, store.glance) if root.is_dir() else None
        if path is None and c.resume not in ("auto", "none"):
            path = find(c.resume, notes, bad, store.glance)
        weights = find(c.init_from, notes, bad, store.glance) if c.init_from and path is None else None
        return path, weights, store.meta(path) if path else {}, notes

    while True:
        path, weights, meta, notes = first(look, world, c.timeout_s)
        try:
            if path is not None:
                agree(meta, run, str(path))  # what no run may change is said first
                check_end(meta, run, path, path.parent == root)
                notes += load(run, path, meta)
                return meta["step"], [*notes, f"resumed from {path} at step {meta['step']}"]
            if weights is not None:
                more = run.routers.boxes(weights=True)
                load_weights(run.buckets, weights, more, lambda work: every_rank(work, world, c.timeout_s))
                notes.append(f"weights from {weights}")
            return 0, notes
        except store.IntegrityError as error:  # on every rank
            bad[path or weights] = str(error)


def every_rank(work, world: comm.Group, patience: float | None = None) -> list:
    """[work() of every rank], or on every rank the failure of one. patience: see checkpoint/together.py."""
    return together.agree(lambda x: comm.all_objects(x, world), work, patience if world.size > 1 else None)


def first(work, world: comm.Group, patience: float | None = None):
    """work() on rank 0, its result, or its failure, on every rank."""
    return every_rank(work if world.index == 0 else lambda: None, world, patience)[0]
