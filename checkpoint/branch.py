"""Runs that branch off a checkpoint of another run: checkpoint.branch RUN[@STEP].

A branch inherits the source's settings, weights, optimizer state, step and position in each source of data.
Settings that the command line changes become a phase that begins there (train.phases), so the same rules
decide what may change, and the same arithmetic determines where each source of data continues.
"""
import contextlib
import copy
import json
from pathlib import Path

import config.reading
from checkpoint import remote, state
from checkpoint.disk import store
from config import Config, ConfigError, LogConfig, Tree, rest_of_ramp
from config.reading import (
    Phases,
    build_tree,
    dotted_overrides,
    flatten_tree,
    get_phases,
    merge,
    nested,
    saved_config,
    shuffle_span,
)
from config.reading.phases import CHANGEABLE, SCHEDULE_KEYS, differing_keys, phases_text
from config.tree import has_path, plain_data, value_at, with_values

NOT_INHERITED = {  # section: keys that a branch does not inherit
    "log": ("name",),
    "checkpoint": ("resume", "init_from", "init_changes", "branch"),
}


def resolve(name: str | None, file: str | None, argv: list[str]) -> Config:
    """Like config.reading.resolve, but returns the branch's config if argv sets checkpoint.branch.

    Raises ConfigError.
    """
    overrides = dotted_overrides(argv)
    where = overrides.get("checkpoint.branch")
    if where in (None, "none"):
        return config.reading.resolve(name, file, argv)
    if name:
        raise ConfigError(
            f"{name}: a branch keeps the settings of {where}; leave the recipe out, and give --log.name"
        )
    layers = [*([config.read_yaml(file)] if file else []), overrides]
    return branch_config(resolve_branch(str(where), layers), layers)


def resolve_branch(where: str, layers: list[Tree]) -> str:
    """Return RUN@STEP if the run's folder already has a branch of RUN, else `where`.

    An existing branch continues regardless of what RUN has saved since. `layers` are the branch's settings,
    strongest last.
    """
    stated: Tree = {}
    for layer in layers:
        stated = merge(stated, layer)
    log = stated.get("log") or {}
    if "@" in where or not log.get("name"):
        return where
    own = Path(log.get("dir", LogConfig.dir), str(log["name"]), "checkpoints")
    for _, path in store.committed_checkpoints(own):
        with contextlib.suppress(store.IntegrityError):  # skip damaged checkpoints
            begun = str(store.read_meta(path)["config"]["checkpoint"].get("branch"))
            if state.is_same_place(begun.rpartition("@")[0], where):
                return begun
    return where


def branch_config(where: str, layers: list[Tree]) -> Config:
    """Return the config of a branch of `where` (RUN or RUN@STEP). `layers` are its settings, strongest
    last."""
    path = find_source(where)
    meta = store.read_meta(path)
    step = meta["step"]
    before = get_phases(saved_config(meta["config"]))
    here = before.of_step(step)

    # settings at that step, overridden by the branch
    tree = plain_data(here.cfg)
    for section, keys in NOT_INHERITED.items():
        for key in keys:
            del tree[section][key]
    if here.cfg.data.pack == "stream":  # keep the sample order of the past
        tree["data"]["span"] = shuffle_span(before, before.all[0])
    later: list[Tree] = []
    for layer in layers:
        layer = copy.deepcopy(nested(layer))
        given = layer.get("train", {}).pop("phases", None) if isinstance(layer.get("train"), dict) else None
        text = phases_text(given)
        later = json.loads(text) if text else later
        tree = merge(tree, layer)
    stated = build_tree(Config, tree)

    # changes allowed in a phase begin here; the rest is compared on resume (state.check_same_run)
    differing = differing_keys(here.cfg, stated)
    changes = {key: plain_data(value) for key, value in differing.items() if key in changeable_keys()}
    ramp = rest_of_ramp(here.cfg.train, step - here.steps_before)
    begins = SCHEDULE_KEYS + (("train.ramp", "train.global_batch") if ramp else ("train.ramp",))
    for key in flatten_tree(layers[-1]):  # of the command line: even unchanged values
        if key in begins:
            changes[key] = value_at(stated, key)
    if changes and ramp and "train.global_batch" not in changes:  # ramp up to the source's batch
        changes.setdefault("train.ramp", ramp)
    rows = json.loads(before.whole.train.phases or "[]")[:here.number - 1]
    rows += [{"after_steps": step, **changes}] if changes else []
    phases = json.dumps([*rows, *later]) if rows or later else None
    changeable = [key for key in changeable_keys() if has_path(stated, key) and has_path(before.whole, key)]
    cfg = with_values(stated, {key: value_at(before.whole, key) for key in changeable})
    branch = f"{path.parent.parent}@{step}"
    cfg = with_values(cfg, {"train.phases": phases, "checkpoint.branch": branch})
    return with_schedule_of_source(cfg, before, step, state.horizon_in(meta))


def with_schedule_of_source(cfg: Config, before: Phases, step: int, horizon: int | None) -> Config:
    """Return the config of a branch after `step` whose current learning rate schedule keeps its end
    (optim.decay_steps).

    A schedule that ends with the source ends with the branch, unless a phase of the branch begins a new one.
    `before` holds the phases of the source, and `horizon` its last step, if known. Raises ConfigError if the
    phases of the branch are out of order.
    """
    phases = get_phases(cfg)
    schedule = before.get_schedule(step)
    old_end, new_end = before.schedule_end(schedule), phases.schedule_end(phases.get_schedule(step))
    end = old_end or horizon
    if old_end == new_end or end is None:
        return cfg
    if schedule.number == 1:
        return with_values(cfg, {"optim.decay_steps": end})
    rows = json.loads(cfg.train.phases or "[]")
    rows[schedule.number - 2]["optim.decay_steps"] = end
    return with_values(cfg, {"train.phases": json.dumps(rows)})


def find_source(where: str, asker: str = "checkpoint.branch") -> Path:
    """Return the checkpoint named by RUN, RUN@STEP or a checkpoint folder.

    `asker` is used in messages. Raises ConfigError.
    """
    remote.refuse_url(where, asker)
    run, at, step = where.rpartition("@")
    if not at:
        return state.find_checkpoint(where, [], check=store.quick_check)
    if not step.isdigit():
        raise ConfigError(f"{asker}: {where!r} is not RUN or RUN@STEP, such as runs/first@1000")
    path = store.checkpoint_folder(Path(run) / "checkpoints", int(step))
    if not (path / "index.json").exists():
        saved = [str(number) for number, _ in reversed(store.committed_checkpoints(path.parent))]
        raise ConfigError(
            f"{asker}: {run} has no checkpoint at step {step}; it has {', '.join(saved) or 'none'}"
        )
    store.quick_check(path)
    return path


def changeable_keys() -> list[str]:
    """Return every section.key that a phase may change."""
    return [f"{section}.{key}" for section, keys in CHANGEABLE.items() for key in keys.split()]
