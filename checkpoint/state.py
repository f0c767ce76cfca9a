"""Save the state of a run to a checkpoint and load it back.

A checkpoint stores the master weights under their canonical names, the optimizer moments under NAME@MOMENT,
the moving average of the weights under NAME@ema (train.ema), the router state, and PowerSGD's error feedback
(parallel/sharding/powersgd.py). meta.json records the settings of the run. Some of them must be the same when
the run resumes; the others may change.
"""
import dataclasses
import functools
import pathlib
import shlex
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from checkpoint import remote
from checkpoint.disk import store
from checkpoint.disk.folder import parse_index
from checkpoint.disk.saver import CheckpointSaver
from checkpoint.disk.together import Ranks
from checkpoint.origin import (
    FINGERPRINT_DIGITS,
    INIT_FROM,
    UNKNOWN,
    Kinds,
    WeightOrigin,
    compare,
    data_of_tokenizer,
    header_lines,
    kinds_of,
    other_start,
    stored_boxes,
    with_tokenizer,
)
from checkpoint.systems import foreign
from checkpoint.systems.foreign_systems import is_ours, open_foreign
from config import (
    CheckpointConfig,
    Config,
    ConfigError,
    ModelConfig,
    TrainConfig,
    Tree,
    is_permanent_step,
    layer_model,
)
from config.optimizers import EMA
from config.parameter_groups import freezes
from config.pattern import BLOCK_PARTS
from config.reading import get_phases, saved_config
from config.reading.function import FUNCTION_KEYS, START, written
from config.reading.phases import (
    CHANGEABLE,
    LAYOUT,
    check_same_past,
    check_same_schedule,
    get_horizon,
    same_plan,
)
from config.reading.run_name import HORIZON_KEYS, OWN_CHECKPOINTS, is_idle
from config.tree import differing_leaves, plain_data, with_values
from data.loader import BatchLoader
from data.remote import is_url
from model.shared_keys import key_sources
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.powersgd import BASIS_MARK, ERROR_SUFFIX, PowerSGD, is_matrix
from parallel.sharding.shares import Share, broadcast_to_replicas, read_shares, write_shares
from parallel.sharding.views import Moments, boxes_within, get_boxes, state_flats
from parallel.topology.dims import ParallelDims
from parallel.wire import comm, messages
from runtime.run import TrainingRun

# If one of these changed, samples would be repeated or lost, or the checkpoint would lack required states.
# The keys that define the model's function must match, too (config/reading/function.py).
MUST_MATCH = (
    "model.aux_kind",
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
# Changes to these need no warning.
UNREPORTED = ("log.", "eval.", "checkpoint.", "profile.")
EMA_SUFFIX = f"@{EMA}"  # key suffix of the averages of optim/ema.py
TRAINED = "trained"
WEIGHTS = (TRAINED, EMA)  # the sets of weights that scripts can read
BY_TIME = "keep_minutes"  # marks a checkpoint that is permanent because of checkpoint.keep_minutes
DOWNLOADS = pathlib.Path("runs/remote")  # where scripts put local copies of remote checkpoints

BoxedTensors = list[tuple[Box, Tensor]]
Result = TypeVar("Result")
Choose = Callable[[dict[pathlib.Path, str]], "StartingPoint"]  # {damaged checkpoint: reason} -> next to try
Check = Callable[[pathlib.Path], store.StoredIndex]  # raises IntegrityError: store.verify, store.quick_check
Indexes = dict[pathlib.Path, store.StoredIndex]


# ---- tensors -----------------------------------------------------------------------------------------------

def state_boxes(
    buckets: list[Bucket], state: Moments, shares: Sequence[Share] | None = None
) -> BoxedTensors:
    """Return [(box, view)] of the masters and the moments.

    state: {suffix: one flat tensor per bucket, or None for buckets without that moment}.
    shares: the part of each bucket to include; by default everything that this rank owns.
    """
    results: BoxedTensors = []
    for position, bucket in enumerate(buckets):
        share = None if shares is None else shares[position]
        for suffix, flat in state_flats(bucket, position, state):
            if share is None:
                boxes = get_boxes(bucket, flat)
            else:
                boxes = boxes_within(bucket, flat, share.slots, share.elements)
            for box, part in boxes:
                results.append((dataclasses.replace(box, key=box.key + suffix), part))
    return results


def get_moments(run: TrainingRun) -> Moments:
    """Return the tensors that are stored with each master: optimizer moments and the moving average."""
    return {**run.optim.state(), **(run.ema.state() if run.ema is not None else {})}


def stored_as(index: store.StoredIndex, boxes: BoxedTensors, weights: str) -> BoxedTensors:
    """Rename the boxes to the checkpoint keys of the chosen set of weights (one of WEIGHTS).

    Tensors without an average, such as router biases, keep their keys. Raises ConfigError if the checkpoint
    has no average.
    """
    if weights == TRAINED:
        return boxes
    averaged = averaged_keys(index)
    if not averaged:
        raise ConfigError(f"--weights: {index.path} holds no moving average (train.ema); leave it out")
    results: BoxedTensors = []
    for box, tensor in boxes:
        suffix = EMA_SUFFIX if box.key in averaged else ""
        results.append((dataclasses.replace(box, key=box.key + suffix), tensor))
    return results


def averaged_keys(index: store.StoredIndex) -> set[str]:
    """Return the keys of the weights whose moving average is in the checkpoint."""
    keys = {piece.box.key for piece in index.pieces}
    return {key.removesuffix(EMA_SUFFIX) for key in keys if key.endswith(EMA_SUFFIX)}


def get_powersgd(buckets: list[Bucket]) -> dict[int, PowerSGD]:
    """Return {bucket position: its PowerSGD} for the buckets that use it."""
    found = {position: bucket.grads.powersgd for position, bucket in enumerate(buckets)}
    return {position: reducer for position, reducer in found.items() if reducer is not None}


def summed_errors(buckets: list[Bucket]) -> dict[int, Tensor]:
    """Return {bucket position: the flat sum of all ranks' errors}. Collective."""
    return {position: reducer.sum_errors() for position, reducer in get_powersgd(buckets).items()}


def error_boxes(
    buckets: list[Bucket], errors: Mapping[int, Tensor], shares: Sequence[Share], each_once: bool = False
) -> BoxedTensors:
    """Return [(box, view)] of the PowerSGD state: this rank's share of the summed errors, and the bases.

    errors: {bucket position: a flat tensor of its size}. shares: the part of each bucket to include.
    each_once: omit replicated bases that another rank saves.
    """
    results: BoxedTensors = []
    for position, reducer in get_powersgd(buckets).items():
        share = shares[position]
        matrices = [slot for slot in share.slots if is_matrix(slot.param.spec)]
        for box, part in boxes_within(buckets[position], errors[position], matrices, share.elements):
            results.append((dataclasses.replace(box, key=box.key + ERROR_SUFFIX), part))
        results += reducer.basis_boxes(each_once)
    return results


def load_buckets(buckets: list[Bucket]) -> None:
    """Update the weights from the masters, which were just loaded."""
    for bucket in buckets:
        bucket.weights.copy_master_to_local()
        bucket.weights.start_gather_updated()


# ---- meta.json ---------------------------------------------------------------------------------------------

def fingerprints(data: BatchLoader) -> dict[str, str]:
    """Return {name: fingerprint} of the inputs that must not change when a run resumes.

    Raises ConfigError if the data does not name its tokenizer.
    """
    if data.tokenizer is None:
        raise ConfigError(
            "data.tokenizer: the data does not say which tokenizer made it, and a checkpoint must; name it"
        )
    return {"tokenizer": data.tokenizer.fingerprint, "data": data.fingerprint}


def describe_run(run: TrainingRun, step: int) -> Tree:
    """Return the content of meta.json: progress, horizon, and the settings of all phases."""
    return {
        "step": step,
        "tokens": run.phases.tokens_seen(step),
        "steps": run.steps,
        "config": plain_data(run.phases.whole),
        **fingerprints(run.data),
        "chat": run.data.is_chat,
        "bos": run.data.has_start,
        "torch": torch.__version__,
        "layout": dataclasses.asdict(run.mesh.dims),
        "loss_scale": run.scaler.state(),
        "spikes": run.spikes.state(),
        "provenance": run.provenance,
    }


def build_config(meta: Tree) -> Config:
    """Return the config of the last step before the save; in a run with phases, that of its phase."""
    return get_phases(saved_config(meta["config"])).of_step(meta["step"]).cfg


def horizon_in(meta: Tree) -> int | None:
    """Return the total steps of the run, or None for old checkpoints of runs that set train.flops."""
    return meta.get("steps") or get_horizon(saved_config(meta["config"]))


def get_name(index: store.StoredIndex, in_memory: bool) -> str:
    """Name a checkpoint in messages; one in memory without its path, which contains only one rank's part."""
    return f"the checkpoint of step {index.step:,} in memory" if in_memory else str(index.path)


def differing_settings(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return {section.key: (old value, new value)} of the settings that differ.

    Names of block kinds and the spelling of a pattern are ignored if all layers are the same.
    """
    differing = differing_leaves(old, new)
    if blocks_of_layers(old.model) == blocks_of_layers(new.model):
        differing.pop("model.blocks", None)
        differing.pop("model.pattern", None)
    return differing


def blocks_of_layers(model: ModelConfig) -> list[tuple[Any, ...]]:
    """Return the mixer, MLP and norm of each layer, and the layer whose keys it reuses."""
    sources = key_sources(model)
    results: list[tuple[Any, ...]] = []
    for layer in range(model.layers):
        like = layer_model(model, layer)
        if layer in sources:
            like = with_values(like, {"mixer.keys_of": None})  # a name, compared by its layer instead
        results.append((*(getattr(like, part) for part in BLOCK_PARTS), sources.get(layer)))
    return results


def check_same_run(meta: Tree, run: TrainingRun, where: str, in_memory: bool = False) -> list[str]:
    """Compare the settings in `meta` with those of the run. Returns a warning for each changed setting.

    where: get_name the checkpoint, for messages. Raises ConfigError if a setting that must not change has
    changed, or if the data or the tokenizer differ.
    """
    old, new = saved_config(meta["config"]), run.phases.whole
    differing = differing_settings(old, new)
    changed = {key: values for key, values in differing.items() if not key.startswith(UNREPORTED)}
    changed.pop("train.phases", None)  # compared phase by phase
    phase_notes: list[str] = []
    check_skipped_data(meta, new.train, where)
    if any(cfg.train.phases or cfg.data.span for cfg in (old, new)):
        before = get_phases(old)
        phase_notes = check_same_past(before, run.phases, meta["step"], where)
        horizons = (horizon_in(meta) or run.steps, run.steps)
        if check_same_schedule(before, run.phases, meta["step"], where, horizons):
            changed.pop("optim.decay_steps", None)  # spells out the same end of the schedule

    # reject changes that are not allowed
    source = "CHECKPOINT" if in_memory else where  # a new run cannot take weights from memory
    new_run = f"start a new run from its weights: --log.name OTHER --checkpoint.init_from {source}"
    unequal = [key for key, values in changed.items() if must_match(key) or is_switched(key, *values)]
    if unequal:
        key, of_function = unequal[0], [key for key in unequal if key in FUNCTION_KEYS]
        stating = f" --checkpoint.init_changes {','.join(of_function)}" if of_function else ""
        before, now = map(said, changed[key])
        raise ConfigError(
            f"{key}: {where} was trained with {before}, not {now}; set it back, "
            f"{branch_advice(key, changed[key][1], meta['step'], where, in_memory)}or {new_run}{stating}"
        )
    for name, current in fingerprints(run.data).items():
        is_of_phase = run.phases.of_step(meta["step"]) == run.phase  # phases may differ in their data
        if meta[name] != current and (is_of_phase or name != "data"):
            stored = meta[name][:FINGERPRINT_DIGITS]
            found = current[:FINGERPRINT_DIGITS]
            stating = f" --checkpoint.init_changes {START}" if other_start(meta, run.data.has_start) else ""
            advice = f"give the same data and data.bos, or {new_run}{stating}"
            if name == "tokenizer" and stored != UNKNOWN:  # the token ids differ
                advice = f"{data_of_tokenizer(source, run.cfg)}, or start a new run: --log.name OTHER"
            raise ConfigError(
                f"data.path: the {name} of {where} has fingerprint {stored}, this one {found}; {advice}"
            )

    # warn about the other changes
    warnings = [
        f"resumed with a different {key} ({said(before)} -> {said(now)})"
        for key, (before, now) in changed.items()
    ]
    if meta["torch"] != torch.__version__:
        warnings.append(f"resumed with a different torch {meta['torch']} -> {torch.__version__}")
    return warnings + phase_notes


def check_same_origin(meta: Tree, cfg: Config, path: pathlib.Path, where: str) -> None:
    """Raise ConfigError if a run that resumes itself names another initial checkpoint than before.

    path: the run's own checkpoint to resume from. where: get_name that checkpoint.
    """
    began_at = {**dataclasses.asdict(CheckpointConfig()), **meta["config"]["checkpoint"]}
    for key in ("branch", "init_from", "init_changes", "resume"):
        old, new = began_at[key], getattr(cfg.checkpoint, key)
        if new in (None, *OWN_CHECKPOINTS, old) or (key != "init_changes" and is_same_place(str(old), new)):
            continue
        if key == "resume" and pathlib.Path(new).resolve() in (path.resolve(), path.resolve().parents[1]):
            continue  # names this checkpoint or this run
        raise ConfigError(
            f"checkpoint.{key}: the run continues from {where}, which began with {old}, not {new}; set it "
            "back, or choose another --log.name"
        )


def is_same_place(old: str, new: str) -> bool:
    """Return whether two names refer to the same run or checkpoint, relative to the current folder."""
    return not is_url(new) and pathlib.Path(old).resolve() == pathlib.Path(new).resolve()


def branch_advice(key: str, value: object, step: int, where: str, in_memory: bool) -> str:
    """Return advice on changing a key in a branch of the checkpoint, or "" if a branch cannot change it."""
    section, _, name = key.partition(".")
    if in_memory or name not in CHANGEABLE.get(section, "").split():
        return ""
    source = shlex.quote(f"{pathlib.Path(where).parent.parent}@{step}")
    return (
        f"or continue it in a branch, with the optimizer state: train.py --log.name OTHER "
        f"--checkpoint.branch {source} --{key} {value}; "
    )


def said(value: object) -> str:
    """Format a value for messages, a nested part as in a config file."""
    return written(value) if dataclasses.is_dataclass(value) or isinstance(value, tuple) else str(value)


def check_skipped_data(meta: Tree, train: TrainConfig, where: str) -> None:
    """Raise ConfigError if these settings do not support the skipped data steps of the checkpoint."""
    if not meta.get("spikes", {}).get("left_out"):
        return
    for key, value in (("train.phases", train.phases), ("train.ramp", train.ramp)):
        if value is not None:
            raise ConfigError(
                f"{key}: {where} has skipped data after spikes (optim.spike_rewind), and a run with {key} "
                "cannot follow it; leave it out, or start a new run from its weights (--checkpoint.init_from)"
            )


def must_match(key: str) -> bool:
    """Return whether this key must not change when a run resumes."""
    return key in MUST_MATCH or key in FUNCTION_KEYS or key in ("model.blocks", "model.pattern")


def is_switched(key: str, old: object, new: object) -> bool:
    """Return whether setting or unsetting this key changes the training data, or moments that cannot be
    converted, and that has happened."""
    if key == "optim.states":
        return "8bit" in (old, new)
    return key == "data.valid" and (old is None) != (new is None)


def check_horizon(meta: Tree, run: TrainingRun, where: str, own_folder: bool) -> None:
    """Raise ConfigError if nothing is left to train after this checkpoint and it is not this run's result.

    Rejects a checkpoint beyond the horizon, and one at the horizon that is in another run's folder or was
    made with other settings. Thus a run never reports the result of another run as its own.

    meta: the metadata of checkpoint `where`. own_folder: whether it is in this run's folder.
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

    old = saved_config(meta["config"])
    changed = differing_settings(old, run.phases.whole)
    if same_plan(old, run.phases.whole, LAYOUT if run.cfg.parallel.elastic else ()):
        changed.pop("train.phases", None)
    for key, (before, now) in changed.items():
        if not is_idle(key, run.cfg):
            raise ConfigError(
                f"{key}: {run.cfg.log.name} is {finished}, trained with {said(before)}, not {said(now)}; "
                f"set it back, {advice}"
            )


# ---- load --------------------------------------------------------------------------------------------------

def find_checkpoint(
    path: str,
    log: list[str],
    bad: dict[pathlib.Path, str] | None = None,
    check: Check = store.verify,
    downloads: pathlib.Path = DOWNLOADS,
) -> pathlib.Path:
    """Find the checkpoint that `path` names: a checkpoint folder, a folder of checkpoints, or a run folder.

    For a URL, returns the local copy below `downloads`. log, bad, check: see store.newest_checkpoint. Raises
    ConfigError if there is no checkpoint, and IntegrityError if none is good.
    """
    folder = remote.local_checkpoint(path, downloads) if is_url(path) else pathlib.Path(path)
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
        advice = "give a run folder or a folder like .../checkpoints/step_00000100"
        if (folder / "config.json").is_file():  # a Hugging Face folder
            advice = f"import it first: python -m scripts.convert from-hf {path} RUN"
        raise ConfigError(f"checkpoint: {path} holds no checkpoint; {advice}")
    return found


def find_index(path: str, log: list[str]) -> store.StoredIndex:
    """Return the index of the checkpoint from find_checkpoint, after verifying every byte of it."""
    indexes: Indexes = {}
    check = kept_in(indexes, store.verify)
    try:
        return indexes[find_checkpoint(path, log, check=check)]
    except store.IntegrityError:
        if not is_url(path):
            raise
        log.append(remote.repair_copy(path, DOWNLOADS))
        return indexes[find_checkpoint(path, log, check=check)]


def kept_in(indexes: Indexes, check: Check) -> Check:
    """Wrap `check` to store its results in `indexes`, so that each index is read only once."""
    def keep(path: pathlib.Path) -> store.StoredIndex:
        indexes[path] = check(path)
        return indexes[path]

    return keep


def load_found(
    path: str,
    log: list[str],
    load: Callable[[store.StoredIndex], Result],
    world: comm.Group,
    timeout_s: float | None = None,
) -> Result:
    """Find a checkpoint as find_index does and call load(index), on many ranks. Collective.

    Rank 0 finds it and checks only its small files; load() verifies what each rank reads, and raises on all
    ranks if one finds damage. Then the previous checkpoint is tried, or the local copy repaired.
    Raises ConfigError if there is no checkpoint, and IntegrityError if none is good.
    """
    bad: dict[pathlib.Path, str] = {}
    repaired: list[str] = []

    def look() -> StartingPoint:
        if bad and is_url(path) and not repaired:
            repaired.append(remote.repair_copy(path, DOWNLOADS))
            bad.clear()
        indexes: Indexes = {}
        found = find_checkpoint(path, log, bad, kept_in(indexes, store.quick_check))
        return StartingPoint(None, indexes[found], repaired)

    while True:
        start = choose_together(look, world, timeout_s)
        assert start.weights is not None  # find_checkpoint raises if there is none
        try:
            return load(start.weights)
        except store.IntegrityError as error:  # raised on every rank
            bad[start.weights.path] = str(error)


def load_weights(
    buckets: list[Bucket],
    source: pathlib.Path | store.StoredIndex,
    more: Sequence[tuple[Box, Tensor]] = (),
    meet: Callable[[Callable[[], None]], object] = lambda work: work(),
    sharers: int = 1,
    origin: WeightOrigin | None = None,
) -> None:
    """Load only the weights from a checkpoint, for evaluation, init_from and export.

    source: the checkpoint folder or its index. more: tensors in addition to those of the buckets. meet: calls
    its argument, synchronized over all ranks. sharers: see store.start_load. origin: selects the weights to
    load and leaves the others unchanged; by default all are loaded.
    """
    wants = weight_boxes(buckets, more)
    if origin is not None:
        wants = stored_boxes(origin, wants)
    started: list[store.StartedLoad | foreign.ForeignLoad] = []

    def verify() -> None:
        if isinstance(source, foreign.ForeignIndex):
            started.append(foreign.ForeignLoad(source, wants))
            return
        started.append(store.start_load(source, wants, strict=False, allow_cast=True, sharers=sharers))

    meet(verify)
    meet(lambda: started.pop().fill())
    broadcast_all_to_replicas(buckets, {})
    load_buckets(buckets)


def fill_boxes(
    index: store.StoredIndex, wants: BoxedTensors, world: comm.Group, timeout_s: float | None = None
) -> None:
    """Load tensors of an inference model, after all ranks have verified what they read. Collective.

    Raises IntegrityError on all ranks, and ConfigError if the checkpoint does not fit.
    """
    sharers = ranks_on_this_host(world)
    started: list[store.StartedLoad] = []

    def verify() -> None:
        started.append(store.start_load(index, wants, strict=False, allow_cast=True, sharers=sharers))

    run_on_all_ranks(verify, world, timeout_s)
    run_on_all_ranks(lambda: started.pop().fill(), world, timeout_s)


def weight_boxes(buckets: list[Bucket], more: Sequence[tuple[Box, Tensor]] = ()) -> BoxedTensors:
    """Return the weights that this rank reads, plus `more`; it receives the rest in
    broadcast_all_to_replicas."""
    return [*state_boxes(buckets, {}, read_shares(buckets)), *more]


def broadcast_all_to_replicas(buckets: list[Bucket], state: Moments) -> None:
    """Exchange the parts that the replicas of each shard have read. Collective."""
    for position, bucket in enumerate(buckets):
        broadcast_to_replicas(bucket, position, [flat for _, flat in state_flats(bucket, position, state)])


def load(run: TrainingRun, index: store.StoredIndex, in_memory: bool = False) -> list[str]:
    """Load weights and optimizer state into the run, whatever layout saved them. Collective.

    index: the checkpoint's index with its meta.json; with in_memory it covers only this rank's part. Returns
    warnings. Replicas divide the reads: each rank reads and verifies a share. Only when all ranks have
    verified theirs are tensors filled and the shares exchanged. An IntegrityError on one rank is raised on
    all. Raises ConfigError if the checkpoint does not fit the run.
    """
    world = run.mesh.world
    meta, where = index.meta, get_name(index, in_memory)
    warnings = check_same_run(meta, run, where, in_memory)
    stored_states = meta["config"].get("optim", {}).get("states", "fp32")
    states = run.cfg.optim.states
    if stored_states != states:
        rounding = ", to nearest" if states == "bf16" else ""
        converted = f"masters and moments of {where} were converted from {stored_states} to {states}"
        warnings.append(f"optim.states: {converted}{rounding}")

    # handle train.ema being switched on or off; a rank whose part is empty cannot tell by itself
    stored_ema = bool(averaged_keys(index))
    if in_memory:
        stored_ema = any(comm.all_gather_objects(stored_ema, world))
    if run.ema is not None and not stored_ema:
        warnings.append(f"train.ema: {where} holds no moving average; it starts at the weights of that step")
    if run.ema is None and stored_ema:
        warnings.append(f"train.ema: none; the moving average in {where} is dropped")

    # collect the tensors to load; rank 0 gathers the keys of all ranks to find those that none loads
    moments = get_moments(run) if stored_ema else run.optim.state()
    unused = [f"*{EMA_SUFFIX}"] if run.ema is None else []
    shares = read_shares(run.buckets)
    wants = boxes_to_read(run, moments)
    before = build_config(meta)
    was_frozen, is_frozen = freezes(before), freezes(run.cfg)
    if is_frozen:
        unused += [f"*@{moment}" for moment in moments]
    if was_frozen:
        wants = without_new_moments(index, wants)
        if before.optim.groups != run.cfg.optim.groups:
            warnings.append(f"optim.groups: what was frozen in {where} and trains now has moments from 0")
    powersgd = get_powersgd(run.buckets)
    errors = {position: torch.zeros_like(reducer.error) for position, reducer in powersgd.items()}
    wants += stored_only(index, error_boxes(run.buckets, errors, shares))
    own_keys = store.pack(sorted({box.key for box, _ in wants}))
    keys_of_ranks = [store.unpack(keys) for keys in comm.gather_objects(own_keys, world)]
    others: set[str] = set().union(*keys_of_ranks)

    sharers = ranks_on_this_host(world)
    started: list[store.StartedLoad] = []

    def verify() -> None:
        started.append(store.start_load(
            index,
            wants,
            strict=world.index == 0,
            allow=(f"*{ERROR_SUFFIX}", f"*{BASIS_MARK}*", *unused),
            others=others,
            allow_cast=stored_states != states or was_frozen or is_frozen,  # frozen weights have no masters
            sharers=sharers,
        ))

    timeout_s = run.cfg.checkpoint.timeout_s
    run_on_all_ranks(verify, world, timeout_s)
    run_on_all_ranks(lambda: started.pop().fill(), world, timeout_s)
    broadcast_all_to_replicas(run.buckets, moments)
    for position, reducer in powersgd.items():
        broadcast_to_replicas(run.buckets[position], position, [errors[position]])
        reducer.set_summed_error(errors[position])
    load_buckets(run.buckets)
    if run.ema is not None and not stored_ema:
        run.ema.start()
    was_scaled = build_config(meta).train.dtype == "fp16"  # other runs save a scale of 1
    run.scaler.load(meta.get("loss_scale") if was_scaled else None)
    run.spikes.load(meta.get("spikes"))
    return warnings


def without_new_moments(index: store.StoredIndex, boxes: BoxedTensors) -> BoxedTensors:
    """Return the boxes without those of moments that are not stored, with a weight that is: it was frozen."""
    stored = {piece.box.key for piece in index.pieces}
    results: BoxedTensors = []
    for box, part in boxes:
        weight, mark, _ = box.key.partition("@")
        if not mark or box.key in stored or weight not in stored:
            results.append((box, part))
    return results


def boxes_to_read(run: TrainingRun, moments: Moments) -> BoxedTensors:
    """Return the boxes that this rank reads, without PowerSGD state; it receives the rest in
    broadcast_all_to_replicas."""
    flats = state_boxes(run.buckets, moments, read_shares(run.buckets))
    return flats + run.optim.boxes() + run.routers.boxes()


def bytes_to_read(run: TrainingRun) -> int:
    """Return the bytes that this rank reads to resume, as large as its part of an in-memory checkpoint."""
    return sum(part.numel() * part.element_size() for _, part in boxes_to_read(run, get_moments(run)))


def stored_only(index: store.StoredIndex, boxes: BoxedTensors) -> BoxedTensors:
    """Return the boxes that are in the checkpoint. PowerSGD state that is not there starts from scratch."""
    if not boxes:
        return []
    stored = {(piece.box.key, piece.box.shape) for piece in index.pieces}
    results: BoxedTensors = []
    for box, part in boxes:
        if (box.key, box.shape) in stored:
            results.append((box, part))
    return results


# ---- save --------------------------------------------------------------------------------------------------

def save_run(
    run: TrainingRun, saver: CheckpointSaver, root: pathlib.Path, step: int, *, fault_point: store.FaultPoint
) -> None:
    """Save the state of the run after `step`. Collective: every rank writes its share.

    A saver with a background thread may still be writing when this returns. Its errors are raised by its next
    call.
    """
    world = saver.group or run.mesh.world
    pieces = boxes_to_save(run)
    shares = write_shares(run.buckets, run.mesh)
    pieces += error_boxes(run.buckets, summed_errors(run.buckets), shares, each_once=True)
    checkpoint = run.cfg.checkpoint
    saver.save(
        root,
        step,
        pieces,
        describe_run(run, step),
        keep=checkpoint.keep,
        mark=permanent_mark(checkpoint, root, step) if world.index == 0 else "",
        fault_point=fault_point,
        ranks=make_ranks(world),
        timeout_s=checkpoint.timeout_s,
    )


def boxes_to_save(run: TrainingRun) -> BoxedTensors:
    """Return the boxes that this rank writes, without PowerSGD's errors, which must be summed first."""
    shares = write_shares(run.buckets, run.mesh)
    flats = state_boxes(run.buckets, get_moments(run), shares)
    return flats + run.optim.boxes(each_once=True) + run.routers.boxes(each_once=True)


def get_rank_boxes(run: TrainingRun) -> BoxedTensors:
    """Return the boxes that this rank reads when it resumes under the same layout, for in-memory checkpoints.

    Collective, since PowerSGD's errors are summed.
    """
    pieces = boxes_to_read(run, get_moments(run))
    pieces += error_boxes(run.buckets, summed_errors(run.buckets), read_shares(run.buckets))
    return list({box: (box, tensor) for box, tensor in pieces}.values())  # without duplicates


def check_space(run: TrainingRun, root: pathlib.Path) -> None:
    """Raise StorageError, on all ranks, if the disk has no room for one checkpoint. Collective.

    root: the folder of the checkpoints. It need not exist, but its parent must.
    """
    own_bytes = sum(part.numel() * part.element_size() for _, part in boxes_to_save(run))
    total_bytes = sum(comm.all_gather_objects(own_bytes, run.mesh.world))
    run_on_first_rank(lambda: store.check_free_space(root, total_bytes), run.mesh.world)


def permanent_mark(checkpoint: CheckpointConfig, root: pathlib.Path, step: int) -> str:
    """Return why the checkpoint of this step is permanent, or "" if it is not."""
    if is_permanent_step(checkpoint, step):
        return "keep_every or keep_at"
    minutes = checkpoint.keep_minutes
    if minutes is not None and store.seconds_since_mark(root, BY_TIME) >= 60 * minutes:
        return BY_TIME
    return ""


# ---- resume ------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """The starting point of a run, chosen by rank 0. At most one of `resumed` and `weights` is set.

    memory: for an in-memory checkpoint (durable/memory.py), a description of the nodes that have it;
    `resumed` then covers only this rank's part. "" for a checkpoint on disk.
    """
    resumed: store.StoredIndex | None  # the checkpoint to resume from
    weights: store.StoredIndex | None  # the checkpoint that initializes the weights of a new run
    notes: list[str]  # for the log
    memory: str = ""

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.resumed.step if self.resumed is not None else 0


@dataclasses.dataclass(frozen=True)
class PackedStart:
    """A StartingPoint as sent to the other ranks, which then need not read index.json or meta.json.

    The compressed text of index.json is sent separately, since it may exceed the message size limit.
    """
    path: pathlib.Path | None  # the checkpoint, if any
    is_resumed: bool
    text_bytes: int  # size of index.json
    meta: Tree
    notes: list[str]
    is_foreign: bool = False  # each rank opens the folder itself


def pack_start(start: StartingPoint) -> PackedStart:
    """Pack the start that rank 0 chose, to send it to the other ranks."""
    index = start.resumed or start.weights
    return PackedStart(
        path=None if index is None else index.path,
        is_resumed=start.resumed is not None,
        text_bytes=0 if index is None else len(index.text),
        meta={} if index is None else index.meta,
        notes=start.notes,
        is_foreign=isinstance(index, foreign.ForeignIndex),
    )


def unpack_start(packed: PackedStart, text: bytes, model: ModelConfig | None = None) -> StartingPoint:
    """Unpack a start on another rank. text: the compressed index.json. model: the run's model, needed if it
    may start from weights of another system. Raises MessageError or ConfigError."""
    if packed.path is None:
        return StartingPoint(None, None, packed.notes)
    if packed.is_foreign:
        assert model is not None
        return StartingPoint(None, open_foreign(packed.path, model), packed.notes)
    if packed.text_bytes > messages.MAX_TOTAL_BYTES:
        raise messages.MessageError(
            f"{packed.path}/index.json is announced with {packed.text_bytes:,} bytes; the limit is "
            f"{messages.MAX_TOTAL_BYTES:,}"
        )
    index_text = store.decompress(text, packed.text_bytes)
    if len(index_text) != packed.text_bytes:
        raise messages.MessageError(
            f"{packed.path}/index.json arrived with {len(index_text):,} bytes, but "
            f"{packed.text_bytes:,} were announced"
        )
    parsed = parse_index(packed.path, index_text)
    index = dataclasses.replace(parsed, text=b"", meta=packed.meta)
    is_resumed = packed.is_resumed
    return StartingPoint(index if is_resumed else None, None if is_resumed else index, packed.notes)


def choose_together(
    choose: Callable[[], StartingPoint],
    world: comm.Group,
    timeout_s: float | None,
    model: ModelConfig | None = None,
) -> StartingPoint:
    """Call choose() on rank 0 and broadcast the result. Collective. Only rank 0 reads the index from disk.

    model: see unpack_start.
    """
    own: list[StartingPoint] = []
    texts: list[bytes] = []  # the compressed index.json, on rank 0

    def look() -> PackedStart:
        start = choose()
        index = start.resumed or start.weights
        if index is not None and world.size > 1:
            texts.append(zlib.compress(index.text, store.PACK_LEVEL))
        own.append(start)
        return pack_start(start)

    packed = run_on_first_rank(look, world, timeout_s)
    text = comm.broadcast_bytes(texts[0] if texts else b"", world)

    def unpack() -> StartingPoint:
        return own[0] if own else unpack_start(packed, text, model)

    return run_on_all_ranks(unpack, world, timeout_s) if packed.is_foreign else unpack()


def resume(
    run: TrainingRun, root: pathlib.Path, start: StartingPoint, choose: Choose
) -> tuple[StartingPoint, list[str]]:
    """Load what checkpoint.resume and checkpoint.init_from name. Collective.

    root: the folder of this run's checkpoints. start: the first candidate. choose: collective; takes the
    checkpoints found damaged and returns the next candidate. Returns (what was loaded, notes for the log).

    Rank 0 chooses for all, so that ranks with different views of the disk still load the same checkpoint. It
    reads only the small files; then every rank verifies what it reads. If one rank finds damage, all ranks
    reject that checkpoint and rank 0 chooses again.

    Raises ConfigError if the checkpoint does not fit the run, and IntegrityError if no good one is left.
    """
    bad: dict[pathlib.Path, str] = {}
    while True:
        try:
            _, notes = load_start(run, root, start)
            return start, notes
        except store.IntegrityError as error:  # raised on every rank
            damaged = start.resumed or start.weights
            if damaged is None:
                raise
            bad[damaged.path] = str(error)
            start = choose(bad)


def newest_start(
    cfg: Config, root: pathlib.Path, world: comm.Group, bad: dict[pathlib.Path, str] | None = None
) -> StartingPoint:
    """Return the first candidate for resume(), skipping `bad`, {damaged checkpoint: reason}. Collective."""
    timeout_s = cfg.checkpoint.timeout_s
    return choose_together(lambda: choose_start(cfg, root, bad or {}), world, timeout_s, cfg.model)


def resume_after(run: TrainingRun, root: pathlib.Path, step: int) -> None:
    """Load the checkpoint that the run saved at this step. Collective.

    Raises IntegrityError, on all ranks, if it is damaged.
    """
    def look() -> StartingPoint:
        return StartingPoint(store.quick_check(store.checkpoint_folder(root, step)), None, [])

    load_start(run, root, choose_together(look, run.mesh.world, run.cfg.checkpoint.timeout_s))


def load_start(run: TrainingRun, root: pathlib.Path, start: StartingPoint) -> tuple[int, list[str]]:
    """Load what rank 0 chose. Collective. Returns (completed steps, notes for the log).

    Raises ConfigError if the checkpoint does not fit the run, and IntegrityError, on all ranks, if it is
    damaged.
    """
    if start.resumed is not None:
        path, meta = start.resumed.path, start.resumed.meta
        in_memory = bool(start.memory)
        where, is_own = get_name(start.resumed, in_memory), in_memory or path.parent == root
        check_same_run(meta, run, where, in_memory)  # first, settings that must not change
        check_horizon(meta, run, where, own_folder=is_own)
        if is_own:
            check_same_origin(meta, run.cfg, path, where)
        warnings = load(run, start.resumed, in_memory)
        step = meta["step"]
        notes = [*start.notes, *warnings, *layout_change(meta, run.mesh.dims)]
        return step, [*notes, f"resumed from {start.memory or path} at step {step}"]

    if start.weights is None:
        return 0, start.notes
    return 0, [*start.notes, *load_origin(run, start.weights)]


def load_origin(run: TrainingRun, index: store.StoredIndex) -> list[str]:
    """Load the weights of checkpoint.init_from. Collective. Returns header lines that describe them.

    Raises ConfigError, before any tensor changes, if they do not fit this run's model.
    """
    routers = run.routers.boxes(weights=True)
    notes = take_weights(run.cfg, index, run.mesh.world, data=run.data, buckets=run.buckets, routers=routers)
    if run.ema is not None:
        run.ema.start()
    return notes


def take_weights(
    cfg: Config,
    index: store.StoredIndex,
    world: comm.Group,
    *,
    data: BatchLoader,
    buckets: list[Bucket],
    routers: BoxedTensors,
    asker: str = INIT_FROM,
) -> list[str]:
    """Load the weights that `asker` names into the buckets and routers of a model. Collective.

    cfg: of the model. data: of the run. Returns header lines. Raises ConfigError, before any tensor changes,
    if the weights do not fit the model or the data.
    """
    timeout_s = cfg.checkpoint.timeout_s
    if isinstance(index, foreign.ForeignIndex):
        meta = run_on_first_rank(
            lambda: with_tokenizer(index, data.required_tokenizer).meta, world, timeout_s)
        index = dataclasses.replace(index, meta=meta)
    compare_here = functools.partial(  # it may read the tokenizer of the weights
        compare,
        index,
        source_model(index),
        cfg,
        fingerprint=fingerprints(data)["tokenizer"],
        has_start=data.has_start,
        ids_by_text=lambda folder, fingerprint: data.ids_by_text(folder, fingerprint),
        asker=asker,
    )
    origin = run_on_all_ranks(compare_here, world, timeout_s)
    own = store.pack(kinds_of(origin, weight_boxes(buckets, routers)))
    kinds: Kinds = {}
    for of_rank in comm.gather_objects(own, world):
        kinds |= store.unpack(of_rank)
    notes = run_on_first_rank(lambda: header_lines(origin, kinds), world, timeout_s)
    notes += unrecorded_notes(index, data)
    load_weights(
        buckets,
        index,
        more=routers,
        meet=lambda work: run_on_all_ranks(work, world, timeout_s),
        sharers=ranks_on_this_host(world),
        origin=origin,
    )
    return notes


def unrecorded_notes(index: store.StoredIndex, data: BatchLoader) -> list[str]:
    """Return a warning, or [], if the tokenizer of a Hugging Face folder cannot be compared with that of the
    data, whose files do not record it."""
    names = data.without_tokenizer
    if not isinstance(index, foreign.ForeignIndex) or index.meta["tokenizer"] == UNKNOWN or not names:
        return []
    return [f"warning: {names[0]} does not record which tokenizer made it; data.tokenizer says "
            f"{data.required_tokenizer.contract.label}, and nothing confirms it"]


def source_model(index: store.StoredIndex) -> ModelConfig:
    """Return the model config of stored weights."""
    return index.model if isinstance(index, foreign.ForeignIndex) else build_config(index.meta).model


def layout_change(meta: Tree, dims: ParallelDims) -> list[str]:
    """Return a log line if the layout differs from that of the checkpoint, otherwise []."""
    try:
        saved = ParallelDims(**meta["layout"])
    except (KeyError, TypeError, ValueError):  # written by another version
        return []
    return [] if saved == dims else [f"saved on {saved.to_text()}, continues on {dims.to_text()}"]


def choose_start(cfg: Config, root: pathlib.Path, bad: dict[pathlib.Path, str]) -> StartingPoint:
    """Choose, on rank 0, the checkpoint to resume from, or else the one to initialize the weights from.

    Checks only its small files. bad: {checkpoint: reason} for those that a rank found damaged. The caller
    must hold the run's lock. Raises ConfigError or IntegrityError.
    """
    checkpoint = cfg.checkpoint
    notes: list[str] = []
    if root.is_dir():
        store.remove_leftovers(root)  # from a killed writer
    if checkpoint.resume == "none" and root.is_dir() and store.committed_checkpoints(root):
        raise ConfigError(
            f"checkpoint.resume: none, but {root} holds checkpoints; "
            f"choose another --log.name, or move them away"
        )

    indexes: Indexes = {}
    check = kept_in(indexes, store.quick_check)
    resumed = store.newest_checkpoint(root, notes, bad, check) if root.is_dir() else None
    if resumed is None and checkpoint.resume not in ("auto", "none"):
        resumed = find_checkpoint(checkpoint.resume, notes, bad, check, downloads_folder(cfg))
    if resumed is None and checkpoint.branch:
        run, _, step = checkpoint.branch.rpartition("@")
        path = store.checkpoint_folder(pathlib.Path(run) / "checkpoints", int(step))
        resumed = find_checkpoint(str(path), notes, bad, check)
    if resumed is not None:
        return StartingPoint(indexes[resumed], None, notes)
    if checkpoint.init_from and not is_url(checkpoint.init_from):
        folder = pathlib.Path(checkpoint.init_from)
        if not is_ours(folder):
            index = open_foreign(folder, cfg.model)
            foreign.check_copies(index)
            return StartingPoint(None, index, [*notes, *index.notes])
    if checkpoint.init_from:
        weights = find_checkpoint(checkpoint.init_from, notes, bad, check, downloads_folder(cfg))
        return StartingPoint(None, indexes[weights], notes)
    return StartingPoint(None, None, notes)


def downloads_folder(cfg: Config) -> pathlib.Path:
    """Return where a run keeps copies of remote checkpoints: next to its folder, visible to all ranks."""
    return pathlib.Path(cfg.log.dir) / DOWNLOADS.name


# ---- ranks -------------------------------------------------------------------------------------------------

def make_ranks(group: comm.Group) -> Ranks:
    """Return the object collectives of a group, for plain data."""
    return Ranks(
        rank=group.index,
        size=group.size,
        gather=functools.partial(comm.all_gather_objects, group=group),
        gather_first=functools.partial(comm.gather_objects, group=group),
        broadcast=functools.partial(comm.broadcast_object, group=group),
    )


def ranks_on_this_host(world: comm.Group) -> int:
    """Return the number of ranks on this host. Collective."""
    own = socket.gethostname()
    return comm.all_gather_objects(own, world).count(own)


def run_on_all_ranks(work: Callable[[], Result], world: comm.Group, timeout_s: float | None = None) -> Result:
    """Call work() on every rank and return its result once all are done. Collective.

    If it fails on one rank, all raise. timeout_s: see together.agree_on_outcome.
    """
    return make_ranks(world).run_on_all(work, timeout_s)


def run_on_first_rank(work: Callable[[], Result], world: comm.Group,
                      timeout_s: float | None = None) -> Result:
    """Call work() on rank 0, and return its result or raise its error on every rank. Collective."""
    return make_ranks(world).run_on_first(work, timeout_s)
