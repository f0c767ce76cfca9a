"""Moves the state of a run into a checkpoint and back.

A checkpoint holds the master weights under their canonical names, the optimizer's moments under NAME@MOMENT,
the moving average of the weights under NAME@ema (train.ema), the state of the routers, and the error feedback
of PowerSGD (parallel/sharding/powersgd.py). meta.json says which settings made it. Some of them must be the
same when the run is continued; the others may change.

`run` is a build.TrainingRun. RunState lists what is used of it here.
"""
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from checkpoint import mirror, store, together
from checkpoint.saver import CheckpointSaver
from config import (
    CheckpointConfig,
    Config,
    ConfigError,
    Phase,
    Phases,
    Tree,
    build_tree,
    flatten_tree,
    is_permanent_step,
    phases_of,
)
from config.optimizers import EMA
from config.phases import check_same_past
from config.run_name import HORIZON_KEYS, IDLE
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.powersgd import BASIS_MARK, ERROR_SUFFIX, PowerSGD
from parallel.sharding.views import boxes_of
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from remote.files import is_url

# If one of these changed, samples would be repeated or lost.
MUST_MATCH = (
    "train.seed",
    "train.seq_len",
    "train.global_batch",
    "train.ramp",
    "data.split",
    "data.doc_mask",
    "data.pack",
    "data.fim_rate",
    "data.fim_spm_rate",
    "data.fim_split",
    "data.fim_tokens",
    "optim.name",
)
# All other keys of model.* must match, too.
MAY_DIFFER = (
    "model.preset",
    "model.attention",
    "model.dropout",
    "model.init_std",
    "model.aux_loss",
    "model.z_loss",
    "model.jitter",
    "model.capacity",
    "model.drop",
    "model.pad",
    "model.router_bias_rate",
)
# A change of these needs no warning.
UNREPORTED = ("log.", "eval.", "checkpoint.", "profile.")
EMA_SUFFIX = f"@{EMA}"  # of the keys of optim/ema.py
TRAINED = "trained"
WEIGHTS = (TRAINED, EMA)  # which weights of a checkpoint a script reads
BY_TIME = "keep_minutes"  # the mark of a checkpoint that is permanent by its time
DOWNLOADS = pathlib.Path("runs/remote")  # copies of checkpoints in a store, for scripts
FINGERPRINT_DIGITS = 12  # of a fingerprint in an error message

BoxedTensors = list[tuple[Box, Tensor]]
Result = TypeVar("Result")
Moments = Mapping[str, Sequence[Tensor | None]]  # {suffix: a flat tensor for each bucket, or None}


# ---- what is used of a run ---------------------------------------------------------------------------------

class Fingerprinted(Protocol):
    """data.tokenizer.Tokenizer"""
    @property
    def fingerprint(self) -> str: ...


class TrainingData(Protocol):
    """data.loader.BatchLoader"""
    @property
    def tokenizer(self) -> Fingerprinted | None: ...
    @property
    def fingerprint(self) -> str: ...


class OptimizerMoments(Protocol):
    """optim.base.Optimizer"""
    def state(self) -> Moments: ...


class MovingAverage(Protocol):
    """optim.ema.WeightEMA"""
    def state(self) -> Moments: ...
    def start(self) -> None: ...


class Routers(Protocol):
    """model.router_states.RouterStates"""
    def boxes(self, each_once: bool = False, weights: bool = False) -> BoxedTensors: ...


class Scaler(Protocol):
    """optim.scaler.LossScaler"""
    def state(self) -> list[float]: ...
    def load(self, state: list[float] | None) -> None: ...


class Spikes(Protocol):
    """optim.spikes.SpikeState"""
    @property
    def left_out(self) -> list[int]: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any] | None) -> None: ...


class RunState(Protocol):
    """What a checkpoint reads and fills of a build.Run."""
    @property
    def cfg(self) -> Config: ...
    @property
    def phases(self) -> Phases: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def data(self) -> TrainingData: ...
    @property
    def buckets(self) -> list[Bucket]: ...
    @property
    def optim(self) -> OptimizerMoments: ...
    @property
    def ema(self) -> MovingAverage | None: ...
    @property
    def routers(self) -> Routers: ...
    @property
    def scaler(self) -> Scaler: ...
    @property
    def spikes(self) -> Spikes: ...
    @property
    def steps(self) -> int: ...


# ---- tensors -----------------------------------------------------------------------------------------------

def state_boxes(buckets: list[Bucket], state: Moments, each_once: bool = False) -> BoxedTensors:
    """[(box, view)] of the masters and the moments.

    state: {suffix: a flat tensor for each bucket, or None where the optimizer keeps no such moment}.
    each_once: see boxes_of.
    """
    found: BoxedTensors = []
    for position, bucket in enumerate(buckets):
        flats: list[tuple[str, Tensor | None]] = [("", bucket.weights.master)]
        flats += [(f"@{name}", moments[position]) for name, moments in state.items()]
        for suffix, flat in flats:
            if flat is None:
                continue
            for box, part in boxes_of(bucket, flat, each_once):
                found.append((dataclasses.replace(box, key=box.key + suffix), part))
    return found


def moments_of(run: RunState) -> Moments:
    """What is stored beside each master: of the optimizer, and its moving average."""
    return {**run.optim.state(), **(run.ema.state() if run.ema is not None else {})}


def stored_as(path: pathlib.Path, boxes: BoxedTensors, weights: str) -> BoxedTensors:
    """The boxes of weights under the keys that hold them in the checkpoint: those of `weights` (WEIGHTS).

    What has no average, such as the biases of routers, keeps its key. Raises ConfigError if the checkpoint
    has no average.
    """
    if weights == TRAINED:
        return boxes
    averaged = averaged_keys(path)
    if not averaged:
        raise ConfigError(f"--weights: {path} holds no moving average (train.ema); leave it out")
    found: BoxedTensors = []
    for box, tensor in boxes:
        suffix = EMA_SUFFIX if box.key in averaged else ""
        found.append((dataclasses.replace(box, key=box.key + suffix), tensor))
    return found


def averaged_keys(path: pathlib.Path) -> set[str]:
    """The keys of the weights of which a checkpoint holds the moving average."""
    keys = {row["key"] for row in store.read_index(path)["pieces"]}
    return {key.removesuffix(EMA_SUFFIX) for key in keys if key.endswith(EMA_SUFFIX)}


def powersgd_of(buckets: list[Bucket]) -> list[PowerSGD]:
    """The PowerSGD state of the buckets that have one."""
    return [bucket.grads.powersgd for bucket in buckets if bucket.grads.powersgd is not None]


def load_buckets(buckets: list[Bucket]) -> None:
    """Brings the weights up to the masters, which were just filled."""
    for bucket in buckets:
        bucket.weights.copy_master_to_local()
        bucket.weights.start_gather_updated()


# ---- meta.json ---------------------------------------------------------------------------------------------

def fingerprints(data: TrainingData) -> dict[str, str]:
    """{name: fingerprint} that must be the same when a run is continued.

    Raises ConfigError if the data does not name its tokenizer.
    """
    if data.tokenizer is None:
        raise ConfigError(
            "data.tokenizer: the data does not say which tokenizer made it, and a checkpoint must; name it"
        )
    return {"tokenizer": data.tokenizer.fingerprint, "data": data.fingerprint}


def describe_run(run: RunState, step: int) -> Tree:
    """The content of meta.json: how far the run is, and which settings it has (those of all phases)."""
    return {
        "step": step,
        "tokens": run.phases.tokens_seen(step),
        "config": dataclasses.asdict(run.phases.whole),
        **fingerprints(run.data),
        "torch": torch.__version__,
        "layout": dataclasses.asdict(run.mesh.dims),
        "loss_scale": run.scaler.state(),
        "spikes": run.spikes.state(),
    }


def config_of(meta: Tree) -> Config:
    """The config with which the last step before a save was made: of a run with phases, that of the phase."""
    return phases_of(build_tree(Config, meta["config"])).of_step(meta["step"]).cfg


def check_same_run(meta: Tree, run: RunState, where: str) -> list[str]:
    """Compares the settings in `meta` with those of the run.

    where: the checkpoint, for messages. Returns a warning for each setting that changed since the save.
    Raises ConfigError for a setting that must not change, and for other data or another tokenizer.
    """
    defaults = flatten_tree(dataclasses.asdict(Config()))  # of keys that are younger than the checkpoint
    old = {**defaults, **flatten_tree(meta["config"])}
    new = flatten_tree(dataclasses.asdict(run.phases.whole))
    phase_notes: list[str] = []
    check_left_out(meta, new, where)
    if any(settings.get(key) for settings in (old, new) for key in ("train.phases", "data.span")):
        before = phases_of(build_tree(Config, meta["config"]))
        phase_notes = check_same_past(before, run.phases, meta["step"], where)
    old["train.phases"] = new["train.phases"]  # compared phase by phase
    changed = [key for key in new if old.get(key) != new[key] and not key.startswith(UNREPORTED)]

    # What must not change.
    for key in changed:
        if must_match(key):
            raise ConfigError(
                f"{key}: {where} was trained with {old.get(key)}, not {new[key]}; set it back, "
                f"or start anew with --log.name OTHER (and --checkpoint.init_from to keep the weights)"
            )
    for name, current in fingerprints(run.data).items():
        is_of_phase = run.phases.of_step(meta["step"]) == run.phase  # each phase has data of its own
        if meta[name] != current and (is_of_phase or name != "data"):
            stored = meta[name][:FINGERPRINT_DIGITS]
            found = current[:FINGERPRINT_DIGITS]
            raise ConfigError(
                f"data.path: the {name} of {where} has fingerprint {stored}, this one {found}; "
                f"give the same data, or start anew with --log.name OTHER --checkpoint.init_from {where}"
            )

    # What may.
    warnings = [f"resumed with another {key} ({old.get(key)} -> {new[key]})" for key in changed]
    if meta["torch"] != torch.__version__:
        warnings.append(f"resumed with another torch {meta['torch']} -> {torch.__version__}")
    return warnings + phase_notes


def check_left_out(meta: Tree, new: Tree, where: str) -> None:
    """Raises ConfigError if the run cannot leave out the data that the checkpoint has left out.

    new: {section.key: value} of the run.
    """
    if not meta.get("spikes", {}).get("left_out"):
        return
    for key in ("train.phases", "train.ramp"):
        if new[key] is not None:
            raise ConfigError(
                f"{key}: {where} has left out data after spikes (optim.spike_rewind), and a run with {key} "
                "cannot follow it; leave it out, or start anew with --checkpoint.init_from"
            )


def must_match(key: str) -> bool:
    """Whether a run cannot be continued with another value of this key."""
    return key in MUST_MATCH or (key.startswith("model.") and key not in MAY_DIFFER)


def check_horizon(meta: Tree, run: RunState, where: pathlib.Path, own_folder: bool) -> None:
    """Raises ConfigError if nothing is left to train after this checkpoint and it is not this run's result.

    Refused are: a checkpoint beyond the horizon; one at the horizon, in another run's folder; one at the
    horizon that other settings made. So a run never reports the result of another run as its own.

    meta: of the checkpoint `where`. own_folder: whether it is in this run's own folder.
    """
    train = run.cfg.train
    step = meta["step"]
    if step < run.steps:
        return

    key = next(key for key in HORIZON_KEYS if getattr(train, key) is not None)
    advice = f"raise train.{key}, or choose another --log.name"
    if step > run.steps:
        raise ConfigError(
            f"train.{key}: {where} is at step {step:,}, beyond the {run.steps:,} asked for; {advice}"
        )
    finished = f"already at step {step:,} of {run.steps:,}"
    if not own_folder:
        raise ConfigError(f"train.{key}: {where} is {finished}: nothing is left to train; {advice}")

    old = flatten_tree(meta["config"])
    new = flatten_tree(dataclasses.asdict(run.phases.whole))
    for key, value in new.items():
        if key in old and old[key] != value and not key.startswith(IDLE):
            name = run.cfg.log.name
            raise ConfigError(
                f"{key}: {name} is {finished}, trained with {old[key]}, not {value}; set it back, {advice}"
            )


# ---- load --------------------------------------------------------------------------------------------------

def find_checkpoint(
    path: str,
    log: list[str],
    bad: dict[pathlib.Path, str] | None = None,
    check: Callable[[pathlib.Path], store.Index] = store.verify,
    downloads: pathlib.Path = DOWNLOADS,
) -> pathlib.Path:
    """The checkpoint that `path` names: a checkpoint folder, a folder of checkpoints, or a run folder.

    Of a URL it is the local copy, below `downloads`.
    log, bad, check: see store.newest_checkpoint. Raises ConfigError if there is no checkpoint; IntegrityError
    if none is good.
    """
    folder = mirror.local_checkpoint(path, downloads) if is_url(path) else pathlib.Path(path)
    if (folder / "index.json").exists():
        why = (bad or {}).get(folder)
        if why is not None:
            raise store.IntegrityError(why)
        check(folder)
        return folder

    root = folder / "checkpoints"
    if not root.is_dir():
        root = folder
    found = store.newest_checkpoint(root, log, bad, check) if root.is_dir() else None
    if found is None:
        raise ConfigError(
            f"checkpoint: {path} holds no checkpoint; "
            f"give a run folder or a folder like .../checkpoints/step_00000100"
        )
    return found


def load_weights(
    buckets: list[Bucket],
    path: pathlib.Path,
    more: Sequence[tuple[Box, Tensor]] = (),
    meet: Callable[[Callable[[], None]], object] = lambda work: work(),
) -> None:
    """Loads the weights alone, whatever else the checkpoint holds: for evaluation, init_from and export.

    more: tensors beside those of the buckets. meet: calls its argument, on many ranks together.
    """
    wants = [*state_boxes(buckets, {}), *more]
    meet(lambda: store.load(path, wants, strict=False, allow_cast=True))
    load_buckets(buckets)


def load(run: RunState, path: pathlib.Path, meta: Tree | None = None) -> list[str]:
    """Loads weights and optimizer state into the run, whatever layout saved them. Collective.

    Returns warnings. Each rank verifies what it reads; an IntegrityError of one rank is raised on all. Raises
    ConfigError if the checkpoint does not fit the run.
    """
    world = run.mesh.world
    meta = store.read_meta(path) if meta is None else meta
    warnings = check_same_run(meta, run, str(path))
    stored_states = flatten_tree(meta["config"]).get("optim.states", "fp32")
    states = run.cfg.optim.states
    if stored_states != states:
        rounding = ", to nearest" if states == "bf16" else ""
        converted = f"masters and moments of {path} were converted from {stored_states} to {states}"
        warnings.append(f"optim.states: {converted}{rounding}")

    # A run that begins to average, or no longer does.
    stored_ema = first_rank_does(lambda: bool(averaged_keys(path)), world)
    if run.ema is not None and not stored_ema:
        warnings.append(f"train.ema: {path} holds no moving average; it starts at the weights of that step")
    if run.ema is None and stored_ema:
        warnings.append(f"train.ema: none; the moving average in {path} is left behind")

    # What this rank fills. Of many ranks, each holds a part of the keys.
    moments = moments_of(run) if stored_ema else run.optim.state()
    unused = [f"*{EMA_SUFFIX}"] if run.ema is None else []
    wants = state_boxes(run.buckets, moments) + run.routers.boxes()
    powersgd = powersgd_of(run.buckets)
    errors = [torch.zeros_like(reducer.error) for reducer in powersgd]
    wants += stored_error_boxes(run, path, errors)
    keys = {box.key for box, _ in wants}
    others: set[str] = set().union(*comm.all_gather_objects(keys, world))

    def read() -> None:
        store.load(
            path,
            wants,
            allow=(f"*{ERROR_SUFFIX}", f"*{BASIS_MARK}*", *unused),
            others=others,
            allow_cast=stored_states != states,
        )

    all_ranks_do(read, world, run.cfg.checkpoint.timeout_s)
    for reducer, error in zip(powersgd, errors):
        reducer.set_summed_error(error)
    load_buckets(run.buckets)
    if run.ema is not None and not stored_ema:
        run.ema.start()
    run.scaler.load(meta.get("loss_scale"))
    run.spikes.load(meta.get("spikes"))
    return warnings


def stored_error_boxes(run: RunState, path: pathlib.Path, errors: list[Tensor]) -> BoxedTensors:
    """[(box, view)] of PowerSGD's `errors` and bases that the checkpoint holds; the others start anew.

    errors: a flat tensor for each PowerSGD of the run. Collective if the run compresses with PowerSGD.
    """
    stored: set[tuple[str, tuple[int, ...]]] = set()
    if run.cfg.parallel.compress == "powersgd":  # asked on every rank, though one may have no such bucket
        stored = first_rank_does(lambda: stored_shapes(path), run.mesh.world)
    found: BoxedTensors = []
    for reducer, error in zip(powersgd_of(run.buckets), errors):
        found += [(box, part) for box, part in reducer.boxes_of(error) if (box.key, box.shape) in stored]
    return found


def stored_shapes(path: pathlib.Path) -> set[tuple[str, tuple[int, ...]]]:
    """{(key, shape of the whole tensor)} of a checkpoint."""
    return {(row["key"], tuple(row["shape"])) for row in store.read_index(path)["pieces"]}


# ---- save --------------------------------------------------------------------------------------------------

def save_run(
    run: RunState, saver: CheckpointSaver, root: pathlib.Path, step: int, *, fault_point: store.FaultPoint
) -> None:
    """Saves the run as it stands after `step`. Collective: every rank writes the pieces that only it has.

    A saver with a background thread may still be writing when this returns. Its errors are raised by its next
    call.
    """
    world = saver.group or run.mesh.world
    pieces = boxes_to_save(run)
    for reducer in powersgd_of(run.buckets):
        pieces += reducer.boxes_of(reducer.sum_errors(), each_once=True)
    checkpoint = run.cfg.checkpoint
    saver.save(
        root,
        step,
        pieces,
        describe_run(run, step),
        keep=checkpoint.keep,
        mark=permanent_mark(checkpoint, root, step) if world.index == 0 else "",
        fault_point=fault_point,
        rank=world.index,
        world_size=world.size,
        gather=lambda mine: comm.all_gather_objects(mine, world),
        timeout_s=checkpoint.timeout_s if world.size > 1 else None,
    )


def boxes_to_save(run: RunState) -> BoxedTensors:
    """What this rank writes of a checkpoint, but for the errors of PowerSGD, which are summed first."""
    return state_boxes(run.buckets, moments_of(run), each_once=True) + run.routers.boxes(each_once=True)


def check_space(run: RunState, root: pathlib.Path) -> None:
    """Raises StorageError, on all ranks, if the disk has no room for one checkpoint. Collective.

    root: the folder of the checkpoints, which need not be there; the one around it is.
    """
    own_bytes = sum(part.numel() * part.element_size() for _, part in boxes_to_save(run))
    total_bytes = sum(comm.all_gather_objects(own_bytes, run.mesh.world))
    first_rank_does(lambda: store.check_free_space(root, total_bytes), run.mesh.world)


def permanent_mark(checkpoint: CheckpointConfig, root: pathlib.Path, step: int) -> str:
    """Why the checkpoint of this step is permanent; "" if it is not."""
    if is_permanent_step(checkpoint, step):
        return "keep_every or keep_at"
    minutes = checkpoint.keep_minutes
    if minutes is not None and store.seconds_since_mark(root, BY_TIME) >= 60 * minutes:
        return BY_TIME
    return ""


# ---- resume ------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """What a run starts from, as rank 0 chose it. At most one of `resumed` and `weights` is set."""
    resumed: pathlib.Path | None  # the checkpoint that the run continues
    weights: pathlib.Path | None  # the checkpoint whose weights a new run starts with
    meta: Tree  # of `resumed`
    notes: list[str]  # for the log


def resume(run: RunState, root: pathlib.Path) -> tuple[int, list[str]]:
    """Loads what checkpoint.resume and checkpoint.init_from name. Collective.

    root: the folder of this run's checkpoints. Returns (steps done, notes for the log).

    Rank 0 chooses for all, so that ranks that see the disk differently still load the same checkpoint. It
    reads the small files alone. Then every rank verifies what it reads. If one rank finds damage, all ranks
    give that checkpoint up, and rank 0 chooses again.

    Raises ConfigError if the checkpoint does not fit the run; IntegrityError if no good checkpoint is left.
    """
    world = run.mesh.world
    timeout_s = run.cfg.checkpoint.timeout_s
    bad: dict[pathlib.Path, str] = {}  # {checkpoint: why it is damaged}
    while True:
        start = first_rank_does(lambda: choose_start(run.cfg, root, bad), world, timeout_s)
        try:
            return load_start(run, root, start)
        except store.IntegrityError as error:  # raised on every rank
            damaged = start.resumed or start.weights
            if damaged is None:
                raise
            bad[damaged] = str(error)


def newest_step(cfg: Config, root: pathlib.Path, world: comm.Group) -> int:
    """The step of the checkpoint that resume() will try first; 0 for a new run. Collective."""
    def look() -> int:
        return choose_start(cfg, root, {}).meta.get("step", 0)

    return first_rank_does(look, world, cfg.checkpoint.timeout_s)


def resume_after(run: RunState, root: pathlib.Path, step: int) -> None:
    """Loads the checkpoint of this step, which the run has just saved. Collective.

    Raises IntegrityError, on all ranks, if it is damaged.
    """
    def look() -> StartingPoint:
        path = store.checkpoint_folder(root, step)
        return StartingPoint(path, None, store.read_meta(path), [])

    load_start(run, root, first_rank_does(look, run.mesh.world, run.cfg.checkpoint.timeout_s))


def load_start(run: RunState, root: pathlib.Path, start: StartingPoint) -> tuple[int, list[str]]:
    """Loads what rank 0 chose. Collective. Returns (steps done, notes for the log).

    Raises ConfigError if the checkpoint does not fit the run; IntegrityError, on all ranks, if it is damaged.
    """
    if start.resumed is not None:
        path = start.resumed
        check_same_run(start.meta, run, str(path))  # first, what no run may change
        check_horizon(start.meta, run, path, own_folder=path.parent == root)
        warnings = load(run, path, start.meta)
        step = start.meta["step"]
        return step, [*start.notes, *warnings, f"resumed from {path} at step {step}"]

    if start.weights is None:
        return 0, start.notes
    world = run.mesh.world
    timeout_s = run.cfg.checkpoint.timeout_s
    load_weights(
        run.buckets,
        start.weights,
        more=run.routers.boxes(weights=True),
        meet=lambda work: all_ranks_do(work, world, timeout_s),
    )
    if run.ema is not None:
        run.ema.start()
    return 0, [*start.notes, f"weights from {start.weights}"]


def choose_start(cfg: Config, root: pathlib.Path, bad: dict[pathlib.Path, str]) -> StartingPoint:
    """Rank 0: the checkpoint to continue, or else the one to take weights from.

    Only its small files are checked. bad: {checkpoint: why} of those that a rank found damaged. The caller
    holds the run's lock. Raises ConfigError; IntegrityError.
    """
    checkpoint = cfg.checkpoint
    notes: list[str] = []
    if root.is_dir():
        store.remove_leftovers(root)  # what a killed writer left
    if checkpoint.resume == "none" and root.is_dir() and store.committed_checkpoints(root):
        raise ConfigError(
            f"checkpoint.resume: none, but {root} holds checkpoints; "
            f"choose another --log.name, or move them away"
        )

    resumed = store.newest_checkpoint(root, notes, bad, store.quick_check) if root.is_dir() else None
    if resumed is None and checkpoint.resume not in ("auto", "none"):
        resumed = find_checkpoint(checkpoint.resume, notes, bad, store.quick_check, downloads_of(cfg))
    if resumed is None and checkpoint.branch:
        run, _, step = checkpoint.branch.rpartition("@")
        path = store.checkpoint_folder(pathlib.Path(run) / "checkpoints", int(step))
        resumed = find_checkpoint(str(path), notes, bad, store.quick_check)
    weights = None
    if resumed is None and checkpoint.init_from:
        named = checkpoint.init_from
        weights = find_checkpoint(named, notes, bad, store.quick_check, downloads_of(cfg))
    meta = store.read_meta(resumed) if resumed else {}
    return StartingPoint(resumed, weights, meta, notes)


def downloads_of(cfg: Config) -> pathlib.Path:
    """Where a run puts copies of checkpoints in a store: beside its folder, where every rank sees them."""
    return pathlib.Path(cfg.log.dir) / DOWNLOADS.name


# ---- ranks -------------------------------------------------------------------------------------------------

def all_ranks_do(
    work: Callable[[], Result], world: comm.Group, timeout_s: float | None = None
) -> list[Result]:
    """[work() of every rank], on every rank. If it fails on one rank, all raise. Collective.

    timeout_s: see together.agree_on_outcome.
    """
    def gather(mine: object) -> list[Any]:
        return comm.all_gather_objects(mine, world)

    return together.agree_on_outcome(gather, work, timeout_s if world.size > 1 else None)


def first_rank_does(work: Callable[[], Result], world: comm.Group, timeout_s: float | None = None) -> Result:
    """work() of rank 0, its result or its error, on every rank. Collective."""
    own_part: Callable[[], Any] = work if world.index == 0 else store.do_nothing
    results = all_ranks_do(own_part, world, timeout_s)
    return results[0]
